"""`gpulse job`: against a real head with an agent."""

from __future__ import annotations

import json
import os
import urllib.request
from collections.abc import Iterator

import pytest

from tests.integration.head_processes import Place, place, wait_for

pytestmark = pytest.mark.slow


def holders(here: Place) -> list[int]:
    """The processes that have held a GPU for a while, those that held it longest first."""
    address = f"http://127.0.0.1:{here.http_port}/api/v1/usage?by=job"
    with urllib.request.urlopen(address, timeout=30) as answer:
        return [row["pid"] for row in json.load(answer)["rows"] if row["gpu_seconds"] > 0]


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """A head with one node of eight GPUs, processes on some of them, and a session."""
    with place(tmp_path_factory.mktemp("place")) as made:
        made.environment["GPULSE_HEAD"] = f"localhost:{made.port}"
        made.head("gpulse head --port 8090 --http-port 8091 --freq 200")
        made.agent("gpulse agent localhost:8090 --node-name n1")
        wait_for(lambda: bool(holders(made)), "a process that was on a GPU for a while")
        made.type("gpulse session start training --since 1m --gpu 0 --gpu 1")
        yield made


def test_a_process_in_text_json_and_one_line(here: Place) -> None:
    """The same report in three forms; the line is short, one, and without colours."""
    pid = holders(here)[0]
    text = here.type(f"gpulse job --pid {pid}")
    assert text.startswith(f"process {pid} on n1")
    assert "held but idle" in text

    report = json.loads(here.type(f"gpulse job --pid {pid} --node n1 --json"))
    assert (f"n1:{pid}", "process", "running", ["n1"]) == tuple(
        report[name] for name in ("job", "kind", "state", "nodes")
    )
    assert report["gpu_seconds"] > 0
    assert report["series"] is None
    line = here.run(f"gpulse job --pid {pid} --line", FORCE_COLOR="1").out
    assert (1, True, False) == (line.count("\n"), line.isascii(), "\x1b" in line)
    assert len(line) < 200


def test_a_session_over_http_and_as_a_page(here: Place) -> None:
    """By its name alone, over either transport; a page replaces what was there, or goes to standard output alone."""
    page = here.directory / "page.html"
    page.write_text("old")
    ended = here.run(f"gpulse job training --head http://localhost:8091 --html {page}")
    assert ended.out.startswith("session training\nrunning, ")
    assert f"wrote {page}\n" == ended.err
    assert "<polyline" in page.read_text()
    assert ["page.html"] == [name for name in os.listdir(here.directory) if "page" in name]

    text = here.type("gpulse job --session training --since 1h --html -")
    assert text.startswith("<!DOCTYPE html>")
    assert text.endswith("</html>\n")


def test_what_there_is_not(here: Place) -> None:
    """Exit code 1 with what is known; a page that cannot be written is an error, too."""
    ended = here.run("gpulse job 4711")
    assert (1, "") == (ended.code, ended.out)
    assert "gpulse: there is no job or session '4711'\n  try: " in ended.err
    assert "gpulse session list" in ended.err
    assert 1 == here.run("gpulse job --session nothing").code
    assert 1 == here.run("gpulse job --pid 999999999").code
    assert 1 == here.run("gpulse job 4711 --node nowhere").code
    ended = here.run("gpulse job training --html /nowhere/page.html")
    assert (1, "gpulse: cannot write /nowhere/page.html: ") == (ended.code, ended.err[:41])


def test_what_makes_no_sense(here: Place) -> None:
    """Exit code 2, what to try, and nothing is printed, whoever finds out."""
    for words in ("4711 --pid 7", "a/b"):
        ended = here.run(f"gpulse job {words}")
        assert (2, "") == (ended.code, ended.out)
        assert "  try: " in ended.err
