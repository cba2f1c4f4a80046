"""`gpulse session`, `status` and `settings`: against a real head with an agent."""

from __future__ import annotations

import csv
import json
import os
import pwd
import shlex
import socket
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.integration.cluster import until
from tests.integration.commands import Ended, run
from tests.integration.head_processes import Place, place, wait_for

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """A head with one node of eight GPUs, for all tests of this file."""
    with place(tmp_path_factory.mktemp("place")) as made:
        made.environment["GPULSE_HEAD"] = f"localhost:{made.port}"
        made.head("gpulse head --port 8090 --http-port 8091 --freq 100")
        made.agent("gpulse agent localhost:8090 --node-name n1")
        yield made


def test_status(here: Place) -> None:
    """The head, its nodes and their GPUs."""
    shown = here.type("gpulse status")

    assert shown.startswith(f"head at localhost:{here.port}: gpulse ")
    assert "n1    healthy     8  NVIDIA H200" in shown
    assert 8 == here.status()["total_gpus"]


def test_a_head_is_found_without_naming_it(here: Place) -> None:
    """The head of this user on this machine says where it listens, whatever the port."""
    assert f"127.0.0.1:{here.port}" in here.run("gpulse status", GPULSE_HEAD="").out


def test_a_head_with_its_data_elsewhere_is_found(tmp_path: Path) -> None:
    """Wherever it keeps its data, it is the head of this user on this machine."""
    with place(tmp_path) as there:
        there.head("gpulse head --port 8090 --http-port 8091 --data-dir elsewhere")

        assert f"127.0.0.1:{there.port}" in there.type("gpulse status")


def test_status_of_nothing_is_3(here: Place) -> None:
    """So that scripts can tell."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        ended = here.run(f"gpulse status --head 127.0.0.1:{free.getsockname()[1]}")

    assert 3 == ended.code
    assert "nothing is listening" in ended.err
    assert "try: start a head here with `gpulse head`" in ended.err


def test_a_session_from_start_to_file(here: Place) -> None:
    """Begun in the past, for one GPU, with a label, shown, listed, stopped, and brought here."""
    here.type("gpulse session start first --since 2s --node n1 --gpu 0 --label model=llama --freq 200")
    shown = here.type("gpulse session show first")
    assert "labels   model=llama" in shown
    assert "GPUs     0" in shown
    assert "first" in here.type("gpulse session list")
    assert "there is already a session first, which is active" in here.run("gpulse session start first").err

    stopped = here.type("gpulse session stop first -o copy.json")

    assert f"first stopped: {here.directory}/first.json" in stopped
    assert "wrote copy.json" in stopped.replace("./", "")
    document = here.json("copy.json")
    assert ["n1:0:NVIDIA H200"] == document["frames"][-1]["gpu_id"]
    assert 200 == document["interval_ms"]
    assert "is already finished" in here.run("gpulse session stop first").err


def test_every_format_is_fetched_over_both_transports(here: Place) -> None:
    """The same bytes come over gRPC and HTTP, and nothing is overwritten."""
    here.type("gpulse session start formats --since 1s")
    here.type("gpulse session stop formats")

    def is_same(kind: str) -> bool:
        first, second = (here.directory / f"export{count}.{kind}" for count in ("", "-2"))
        first.unlink(missing_ok=True)
        second.unlink(missing_ok=True)
        over_grpc = here.type(f"gpulse session export formats --format {kind} -o export.{kind}")
        over_http = here.run(f"gpulse session export formats --head http://localhost:8091 -o export.{kind}")
        assert f"export.{kind}" in over_grpc
        assert f"export-2.{kind}" in over_http.out
        assert "already exists and is kept" in over_http.err
        assert first.stat().st_size > 100
        return kind == "parquet" or first.read_bytes() == second.read_bytes()

    for kind in ("json", "jsonl", "csv", "parquet"):  # the last frames may arrive between two of them
        until(partial(is_same, kind), f"the same {kind} from both")
    with (here.directory / "export.csv").open(newline="") as file:
        assert "n1:0:NVIDIA H200" == next(csv.DictReader(file))["gpu_id"]


def test_standard_output_gets_the_file_and_nothing_else(here: Place) -> None:
    """It can be piped, also while the session goes on."""
    here.type("gpulse session start piped --since 1s")

    assert "piped" == json.loads(here.type("gpulse session export piped -o -"))["session_name"]
    ended = here.run("gpulse session stop piped -o -")
    assert "piped" == json.loads(ended.out)["session_name"]
    assert "piped stopped" in ended.err


def test_stop_without_a_name_means_the_only_one(here: Place) -> None:
    """Of several it asks which, and all are meant only when it is said."""
    here.type("gpulse session start one")
    here.type("gpulse session start two")

    assert "2 sessions are active: one, two" in here.run("gpulse session stop").err
    both = here.type("gpulse session stop --all")
    assert "one stopped" in both
    assert "two stopped" in both
    ended = [
        s
        for s in json.loads(here.type("gpulse session list --json"))["sessions"]
        if s["name"] in ("one", "two")
    ]
    assert 1 == len({session["end_time"] for session in ended})
    assert "no session is active" in here.run("gpulse session stop").err
    here.type("gpulse session start three")
    assert "three stopped" in here.type("gpulse session stop")


def test_what_makes_no_sense_is_refused(here: Place) -> None:
    """With what is wrong and what to try, and nothing is written."""
    before = sorted(os.listdir(here.directory))

    for line, words in (
        ("gpulse session start ../../x", "invalid session name"),
        ("gpulse session start x --gpu 99", "99"),
        ("gpulse session start x --node nowhere", "no node"),
        ("gpulse session start x --label nonsense", "is not a label"),
        ("gpulse session start x --since yesterday", "not a duration"),
        ("gpulse session show nothing", "there is no session"),
        ("gpulse session export nothing", "there is no session"),
        ("gpulse session export nothing -o x.txt", "cannot tell the format of x.txt from its extension"),
        ("gpulse session recover nothing", "there is no session"),
        ("gpulse session stop '' ", "the name is empty"),
    ):
        ended: Ended = here.run(line)
        assert ended.code in (1, 2), line
        assert words in ended.err, line
        assert "try: " in ended.err, line
    assert before == sorted(os.listdir(here.directory))


def test_the_wrong_port_is_named(here: Place) -> None:
    """What speaks there is said, and what to give instead."""
    crossed = here.run("gpulse status --head localhost:8091")
    assert 1 == crossed.code
    assert "is an HTTP port, but this command uses gRPC" in crossed.err
    wrong = here.run("gpulse status --head http://localhost:8090")
    assert "is a gRPC port, but this command uses HTTP" in wrong.err
    assert "does not use TLS" in here.run("gpulse status --head localhost:8090 --tls").err


def test_settings_change_while_it_runs(here: Place) -> None:
    """Agents follow, and sessions that begin later hold what was switched on."""
    assert "agents sample every 100 ms; PCIe traffic off, NVLink traffic off" in here.type("gpulse settings")
    assert "agents sample every 200 ms; PCIe traffic on" in here.type(
        "gpulse settings --freq 200 --bandwidth"
    )
    assert 200 == here.status()["freq"]
    here.type("gpulse settings --freq 100 --no-bandwidth")


def test_other_machines_need_the_token(tmp_path: Path) -> None:
    """From this machine's other address a command without the token is told how to get it."""
    outside = _own_address()
    if outside is None:
        pytest.skip("this machine has no address but its own")
    with place(tmp_path) as made:
        made.head("gpulse head --host 0.0.0.0 --port 8090 --http-port 8091")
        for head in (f"{outside}:{made.port}", f"http://{outside}:{made.http_port}"):
            stranger = made.run(f"gpulse session list --head {head}", XDG_CONFIG_HOME=str(tmp_path / "none"))
            assert 1 == stranger.code
            assert (
                f"mkdir -p ~/.config/gpulse && scp {outside}:.config/gpulse/token ~/.config/gpulse/token"
                in stranger.err
            )
            assert 0 == made.run(f"gpulse session list --head {head}").code
        refused = made.run(
            f"gpulse agent {outside}:{made.port} --demo", XDG_CONFIG_HOME=str(tmp_path / "none")
        )
        assert 1 == refused.code
        assert (
            "refused this agent: this head requires a token for requests from other machines\n" in refused.err
        )
        assert f"scp {outside}:.config/gpulse/token ~/.config/gpulse/token" in refused.err


def test_how_to_copy_the_token_is_said_at_start_and_on_request(tmp_path: Path) -> None:
    """By `gsprof start`, also in the background, and by `gpulse token` for whichever file the head uses."""
    with place(tmp_path) as made:
        assert "the head creates the token when it first starts" in made.run("gpulse token").err
        usual, other = tmp_path / "home/config/gpulse/token", tmp_path / "other token"
        for option, path in (("", usual), (f"--token-file '{other}'", other)):
            started = made.type(f"gsprof start --port 8090 --http-port 8091 {option} --background")
            user = pwd.getpwuid(os.geteuid()).pw_name
            copy = f"mkdir -p ~/.config/gpulse && scp {shlex.quote(f'{user}@{socket.gethostname()}:{path}')}"
            copy += " ~/.config/gpulse/token"
            told = made.type("gpulse token")
            token = made.type("gpulse token --show")
            made.type("gsprof exit localhost:8090")
            wait_for(lambda: 3 == made.run("gpulse status --head localhost:8090").code, "the head to end")
            assert (
                "other users of this machine need the token to change anything; show how to copy it with: gpulse token"
                in started
            )
            assert (
                f"other machines need the token to read or change anything; on each of them, run: {copy}\n"
                in started
            )
            assert [f"token file: {path}", f"on another machine, run:  {copy}"] == told.splitlines()[:2]
            assert path.read_text() == token


def test_public_read(tmp_path: Path) -> None:
    """Other machines read without the token, on request; it is said loudly, and they change nothing."""
    outside = _own_address()
    if outside is None:
        pytest.skip("this machine has no address but its own")
    with place(tmp_path) as made:
        made.head("gsprof start --public-read --port 8090 --http-port 8091")
        bare = {"XDG_CONFIG_HOME": str(tmp_path / "none")}
        for head in (f"{outside}:{made.port}", f"http://{outside}:{made.http_port}"):
            assert 0 == made.run(f"gpulse status --head {head}", **bare).code
            refused = made.run(f"gpulse session start x --head {head}", **bare)
            assert 1 == refused.code
            assert "this head requires a token for changes from other machines" in refused.err
            assert 0 == made.run(f"gpulse settings --freq 600 --head {head}").code
        said = (tmp_path / "log-0.txt").read_text()
        assert "--public-read: everybody who can reach this head can read everything without a token" in said
        assert "names of nodes, users, jobs and processes" in said
    for words in ("--public-read --private", "--public-read --insecure", "--private --insecure"):
        assert "cannot be used together" in run("head", *words.split()).err


def test_a_head_that_ends_is_noticed(tmp_path: Path) -> None:
    """Its sessions wait to be recovered, with the directory or with the next head."""
    with place(tmp_path) as made:
        head = made.head("gpulse head --port 8090 --http-port 8091 --data-dir data")
        made.type("gpulse session start left --head localhost:8090")
        made.end(head)
        assert 3 == made.run("gpulse status --head localhost:8090").code
        assert "left" in made.type("gpulse session recover --list --data-dir data")

        made.head("gpulse head --port 8090 --http-port 8091 --data-dir data")
        assert "interrupted: left" in made.type("gpulse status --head localhost:8090")
        made.type("gpulse session recover left --head localhost:8090")
        wait_for(lambda: bool(made.status()["active_sessions"]), "the session to go on")
        made.type("gpulse session stop left --head localhost:8090")


def _own_address() -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # nothing is sent; the system chooses the address it would use
        except OSError:
            return None
        address = str(probe.getsockname()[0])
    return None if address.startswith("127.") else address


def _session(here: Place, name: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(here.type(f"gpulse session show {name} --json"))
    return document


def test_sessions_are_compared(here: Place) -> None:
    """By name, by ID and by file; a session is no different from itself."""
    here.type("gpulse session start first-half --gpu 0 --label batch=8")
    wait_for(lambda: _session(here, "first-half")["frame_count"] >= 140, "fourteen seconds are recorded")
    here.type("gpulse session stop first-half -o first-half.json")
    named = here.run("gpulse session compare first-half first-half --json")
    document = json.loads(named.out)
    key = _session(here, "first-half")["session_id"]
    mixed = here.run(f"gpulse session compare first-half.json {key} --json")

    assert (0, 0) == (named.code, mixed.code)
    assert "no_clear_change" == document["outcome"] == json.loads(mixed.out)["outcome"]
    assert None is not document["quantities"][1]["before"]
    assert None is json.loads(mixed.out)["quantities"][1]["before"]
    assert here.run("gpulse session compare first-half first-half").out.startswith(
        "No clear change\nGPU utilization"
    )


def test_sessions_that_cannot_be_compared(here: Place) -> None:
    """An unknown session and a missing file are errors, and not a worse run."""
    unknown = here.run("gpulse session compare nowhere nothing")
    missing = here.run("gpulse session compare nowhere.json nothing")
    empty = here.run("gpulse session compare '' nothing")
    long = here.run(f"gpulse session compare {'a' * 300} nothing")

    assert [3, 2, 2, 3] == [unknown.code, missing.code, empty.code, long.code]
    assert "invalid session name" in long.err
    assert "there is no session 'nowhere'" in unknown.err
    assert "there is no file nowhere.json" in missing.err
