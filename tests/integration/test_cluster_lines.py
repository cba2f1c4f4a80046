"""Lines of code from an agent with --lines to everybody who may see them, with a real program and a real py-spy."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from urllib.request import urlopen

import pytest
from playwright.sync_api import expect

from gpulse.cluster.wire_pb2 import AgentMessage, Layout
from tests.fakes.nvml import FakeNvml
from tests.integration.browser import browsing, tab
from tests.integration.cluster import AgentProcess, Cluster, HeadProcess, cluster_in, talk, until
from tests.integration.commands import Ended, environment, run
from tests.integration.hostile_messages import EVENTS, SUBJECTS, batch, frame, hello, layout
from tests.integration.job_cgroups import no_job_cgroups
from tests.integration.line_lab import PROGRAMS, guilty_line, program
from tests.integration.remote_lab import fake_tsdb

NAME = "tokenise"
EAGER = {
    "gpulse.cluster.agent.sampling_thread:_DIAGNOSIS_SECONDS": 1.0,
    "gpulse.diagnosis.line_search:_JUDGE_SECONDS": 1.0,
}
"""Agents that judge what they see every second."""
READER = {"Via": "1.1 a-proxy"}
"""Somebody elsewhere, who has no token: a proxy forwards requests from anywhere."""


class Lab(NamedTuple):
    """A head and an agent with --lines, beside a program that holds its GPU up."""

    cluster: Cluster
    head: HeadProcess
    agent: AgentProcess
    child: subprocess.Popen[bytes]
    token: Path
    env: dict[str, str]
    fake: FakeNvml

    def command(self, *words: str) -> Ended:
        """Run a command for this head."""
        return run(*words, "--head", f"127.0.0.1:{self.head.port}", env=self.env)

    def finding(self, **headers: str) -> dict[str, Any] | None:
        """The finding that has a line; which one it is depends on what else this machine does."""
        status, answer = self.head.ask("/api/v1/findings", headers=headers)
        assert 200 == status, answer
        return next((one for one in answer["findings"] if one.get("where")), None)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory, nvml_library: Path) -> Iterator[Lab]:
    """Everything runs, and the line is known."""
    folder = tmp_path_factory.mktemp("lines")
    fake = FakeNvml.create(folder / "control", 1)
    try:
        with no_job_cgroups(), cluster_in(folder) as cluster, program(NAME, fake, folder) as child:
            token = folder / "token"
            head = cluster.head("--freq", "250", "--public-read", "--token-file", str(token))
            head.post("/profiling/start", {"name": "slow"})
            agent = cluster.agent(
                "n1",
                head.port,
                "--lines",
                *("--token-file", str(token)),
                source=(),
                env=fake.env(nvml_library),
                tuned=EAGER,
            )
            made = Lab(cluster, head, agent, child, token, {"HOME": str(folder)}, fake)
            until(made.finding, "a line is known")
            yield made
    finally:
        fake.close()


def guilty_place(lab: Lab) -> dict[str, Any] | None:
    """The first line of the finding, if it is the guilty one."""
    first = (lab.finding() or {"where": [{}]})["where"][0]
    wanted = (str(PROGRAMS / f"{NAME}.py"), guilty_line(NAME), NAME)
    return first if wanted == (first.get("file"), first.get("line"), first.get("function")) else None


def test_the_line_arrives(lab: Lab) -> None:
    """It is the guilty one, with its process."""
    place = until(lambda: guilty_place(lab), "the guilty line is named")

    assert (lab.child.pid, "main") == (place["pid"], place["role"])
    assert place["share"] >= 0.5
    assert place["stacks"] >= 5


def test_only_callers_with_the_token_see_code(lab: Lab) -> None:
    """In every answer about findings, from anywhere."""
    paths = (
        *("/status", "/api/v1/findings", "/api/v1/findings/history?from=-10m", "/api/v1/events?from=-10m"),
        *(f"/api/v1/jobs/{lab.child.pid}?kind=process", "/api/v1/sessions/slow/download"),
    )
    token = {**READER, "Authorization": f"Bearer {lab.token.read_text().strip()}"}

    def has_line(path: str, headers: dict[str, str]) -> bool:
        status, answer = lab.head.ask(path, headers=headers)
        assert 200 == status, answer
        return f"line_programs/{NAME}.py" in json.dumps(answer)

    for path in paths:
        until(partial(has_line, path, token), f"{path} has the line")
        assert not has_line(path, READER), path


def test_paths_never_reach_prometheus(tmp_path: Path) -> None:
    """Neither a scrape nor what is sent to a time-series database names a file or a function."""
    text = layout("gpu", json.dumps(SUBJECTS["gpu"]))
    event = {"event": "findings", **EVENTS["findings"]}
    messages = (
        hello("n1"),
        AgentMessage(layout=Layout(text=text)),
        batch("n1", 1, [frame([(text, 8)], json.dumps([event]).encode())]),
    )
    with cluster_in(tmp_path) as cluster, fake_tsdb() as tsdb:
        head = cluster.head("--remote-write", f"{tsdb.tsdb.query_url}/receive")
        talk(f"127.0.0.1:{head.port}", [message.SerializeToString() for message in messages])
        until(lambda: any("node='n1'" in series for series in tsdb.samples()), "samples are sent")

        with urlopen(f"http://127.0.0.1:{head.http_port}/metrics", timeout=60) as answer:
            scraped = answer.read().decode()
        assert "gpulse_finding{" in scraped
        assert "train.py" in json.dumps(head.get("/api/v1/findings"))
        assert "train.py" not in scraped
        assert not [series for series in tsdb.samples() if "train.py" in series]


def test_commands_name_the_line(lab: Lab) -> None:
    """Wherever they list findings."""
    wanted = f"where: {NAME}.py:{guilty_line(NAME)} {NAME}"

    def is_named(*words: str) -> bool:
        return wanted in lab.command(*words).out

    for words in (("status",), ("job", "--pid", str(lab.child.pid))):
        until(partial(is_named, *words), f"{words[0]} names it")


def test_the_stacks_of_a_node(lab: Lab, tmp_path: Path, nvml_library: Path) -> None:
    """One command shows where every process on its GPUs is; the nodes without stacks are named, and why."""
    unused = FakeNvml.create(tmp_path / "control", 1)
    other = lab.cluster.agent("n2", lab.head.port, "--token-file", str(lab.token))
    gone = lab.cluster.agent("n3", lab.head.port, "--token-file", str(lab.token))
    idle = lab.cluster.agent(
        "n4",
        lab.head.port,
        "--lines",
        *("--token-file", str(lab.token)),
        source=(),
        env=unused.env(nvml_library),
    )
    until(lambda: {"n2", "n3", "n4"} <= lab.head.nodes().keys(), "the others are there")
    assert 0 == gone.end()
    nodes = ("--node", "n1", "--node", "n2", "--node", "n3", "--node", "n4")

    def ask(*more: str) -> Ended | None:
        """The answer; a process that is not stopped can be read at a moment when its stack is incomplete."""
        ended = lab.command("stacks", *nodes, *more)
        return ended if f"{NAME}.py" in ended.out else None

    shown = until(ask, "the stacks are printed")
    answer = json.loads(until(partial(ask, "--json"), "the stacks are there as JSON").out)
    nothing = lab.command("stacks", "--node", "n4")

    assert 0 == shown.code, shown.err
    assert f"n1 pid {lab.child.pid}" in shown.out
    assert f"{NAME}.py:" in shown.out
    assert "no stacks from n2: this agent was started without --lines" in shown.out
    assert "no stacks from n3: the agent is not connected to this head" in shown.out
    assert (3, "no stacks from n4: no process uses a GPU there\n") == (nothing.code, nothing.out)
    (group,) = answer["groups"]
    (process,) = group["processes"]
    assert ("n1", lab.child.pid, "main", ["0"]) == tuple(
        process[key] for key in ("node", "pid", "role", "gpus")
    )
    assert str(PROGRAMS / f"{NAME}.py") in {frame["file"] for frame in group["threads"][0]["frames"]}
    assert [0, 0] == [other.end(), idle.end()]
    unused.close()


@contextmanager
def ranks(lab: Lab, folder: Path, *names: str) -> Iterator[dict[str, int]]:
    """Processes of one job on the GPU, each of which hangs in a function of its name; their process IDs."""
    script = folder / "rank.py"
    script.write_text(_RANK)
    children = {}
    try:
        for name in names:
            env = environment({"SLURM_JOB_ID": "4711"})
            child = subprocess.Popen(
                [sys.executable, script, name.rstrip("0123456789")], env=env, stdout=subprocess.PIPE
            )
            children[name] = child
            assert child.stdout is not None
            assert b"hangs\n" == child.stdout.readline()
            lab.fake.add_process(0, child.pid, 1 << 30, sm=1)
        yield {name: child.pid for name, child in children.items()}
    finally:
        for child in children.values():
            lab.fake.remove_process(0, child.pid)
            child.kill()
            child.communicate()


_RANK = """
import sys, time


def all_reduce():
    time.sleep(600)


def load():
    time.sleep(600)


print("hangs", flush=True)
{"all_reduce": all_reduce, "load": load}[sys.argv[1]]()
"""


def test_the_rank_that_differs_is_first(lab: Lab, tmp_path: Path) -> None:
    """In a job that hangs, two ranks wait for the third one, which is somewhere else."""
    with ranks(lab, tmp_path, "all_reduce1", "load", "all_reduce2") as pids:

        def groups() -> list[list[int]]:
            status, answer = lab.head.ask("/api/v1/stacks", {"job": "4711"})
            found = answer["groups"] if status == 200 else []
            return [sorted(process["pid"] for process in group["processes"]) for group in found]

        expected = [[pids["load"]], sorted((pids["all_reduce1"], pids["all_reduce2"]))]
        until(lambda: groups() == expected, "all ranks are known", max_pause_seconds=1.0)
        shown = lab.command("stacks", "--job", "slurm:4711").out

    assert shown.index(" load") < shown.index("2 processes at the same line") < shown.index(" all_reduce")
    assert str(lab.child.pid) not in shown


def test_stacks_need_the_token(lab: Lab) -> None:
    """Reading costs something and shows code; requests that cannot be answered say why."""
    token = {"Authorization": f"Bearer {lab.token.read_text().strip()}"}

    assert 401 == lab.head.ask("/api/v1/stacks", {"nodes": ["n1"]}, headers=READER)[0]
    assert 200 == lab.head.ask("/api/v1/stacks", {"nodes": ["n1"]}, headers={**READER, **token})[0]
    assert 404 == lab.head.ask("/api/v1/stacks", {"nodes": ["other"]})[0]
    assert 404 == lab.head.ask("/api/v1/stacks", {"job": "slurm:1"})[0]
    assert 400 == lab.head.ask("/api/v1/stacks", {})[0]
    assert 2 == lab.command("stacks").code


def test_a_session_file_has_the_line_and_belongs_to_its_owner(lab: Lab) -> None:
    """The report names the line; other users of the machine cannot read the file."""
    until(lambda: guilty_place(lab), "the guilty line is named")
    lab.head.post("/profiling/stop", {"name": "slow"})
    file = lab.head.output_dir / "slow.json"
    until(file.exists, "the file is written")

    assert 0o600 == stat.S_IMODE(file.stat().st_mode)
    assert f"where: {NAME}.py:{guilty_line(NAME)} {NAME}" in run("report", file).out


def test_the_dashboard_shows_the_line(lab: Lab) -> None:
    """On the card of the finding, and on the page of its GPU."""
    line = f"{NAME}.py:{guilty_line(NAME)} {NAME}"
    with browsing() as browser, tab(browser, lab.head.http_port) as window:
        window.go("findings")
        expect(window.page.locator(".finding-detail .code-lines li code").first).to_have_text(line)
        window.go("gpu", "n1", "0")
        expect(window.page.locator(".now .code-line").first).to_have_text(line)


def test_agents_end_without_leaving_anything(lab: Lab) -> None:
    """An agent that reads stacks ends as quickly as others, and the program goes on."""
    assert 0 == lab.agent.end()

    assert lab.child.poll() is None
    assert not subprocess.run(
        ["pgrep", "-f", f"py-spy dump .*--pid {lab.child.pid}$"], capture_output=True, check=False
    ).stdout
