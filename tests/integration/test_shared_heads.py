"""Real heads that share a directory: killed, come back, replaced, and with a file server that hangs."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.cluster import AgentProcess, Cluster, HeadProcess, cluster_in, free_port, until
from tests.unit.shared_heads import TinyHead

_QUICK_AGENT = {"gpulse.cluster.agent.heads:LOOK_SECONDS": 0.5}
_QUICK_HEAD = {
    "gpulse.cluster.head.sharing:_COPY_SECONDS": 0.5,
    "gpulse.cluster.head.exchange:_LIFE_SECONDS": 1.0,
    "gpulse.cluster.head.courier:HANGING_SECONDS": 1.0,
    "gpulse.store.shared.listing:_REFRESH_SECONDS": 0.0,
    "gpulse.store.coverage:_PRESENT_SECONDS": 2.0,
}
_STUCK = "0000aaaa-bbbb"


class Heads:
    """Heads that share a directory, each with a data directory of its own, by name."""

    def __init__(self, directory: Path, cluster: Cluster) -> None:
        self._directory = directory
        self._cluster = cluster
        self._ports = {name: (free_port(), free_port()) for name in "abc"}
        self.shared = directory / "shared"
        self.shared.mkdir()

    def start(self, name: str) -> HeadProcess:
        """Start a head, again perhaps."""
        directory = self._directory / name
        directory.mkdir(exist_ok=True)
        port, http_port = self._ports[name]
        options = ("--shared-dir", str(self.shared), "--seal-after", "1s", "--freq", "200")
        head = HeadProcess(directory, *options, port=port, http_port=http_port, tuned=_QUICK_HEAD)
        return self._cluster._kept(head)

    def agent(self, node: str) -> AgentProcess:
        """Start an agent that knows the first two heads."""
        first, second = (self._ports[name][0] for name in "ab")
        return self._cluster.agent(node, second, host=f"127.0.0.1:{first},127.0.0.1", tuned=_QUICK_AGENT)

    def told(self, event: str) -> int:
        """In how many frames something happened, whichever heads tell of them."""
        frames = set()
        for path in self.shared.glob("*/facts-*.jsonl"):
            for line in path.read_text().splitlines():
                for fact in json.loads(line)["facts"]:
                    if fact["fact"] == "frame" and f'"{event}"' in fact["events"]:
                        frames.add((fact["run"], fact["sequence"]))
        return len(frames)

    def lose(self, name: str) -> None:
        """The disk of a head is gone."""
        shutil.rmtree(self._directory / name / "data")


@pytest.fixture
def heads(tmp_path: Path) -> Iterator[Heads]:
    """No head yet."""
    with cluster_in(tmp_path) as cluster:
        yield Heads(tmp_path, cluster)


def session(head: HeadProcess, name: str) -> dict[str, Any] | None:
    """A session as a head knows it."""
    found = [one for one in head.get("/api/v1/sessions")["sessions"] if one["name"] == name]
    return found[0] if found else None


def state(head: HeadProcess, name: str) -> str | None:
    """How a session is."""
    found = session(head, name)
    return None if found is None else str(found["state"])


def processes(head: HeadProcess) -> set[tuple[str, int]]:
    """Who held GPUs during the last hour."""
    now = time.time()
    found = head.get(f"/api/v1/processes?from={now - 3600}&to={now + 60}")["processes"]
    return {(one["node"], one["pid"]) for one in found}


def used(head: HeadProcess, begin: float, end: float) -> float:
    """How much GPU time processes used, in seconds."""
    return float(head.get(f"/api/v1/usage?from={begin}&to={end}")["gpu_seconds"])


def events(head: HeadProcess, kind: str) -> list[dict[str, Any]]:
    """What happened, of one kind."""
    found: list[dict[str, Any]] = head.get(f"/api/v1/events?kinds={kind}")["events"]
    return found


@pytest.mark.timeout(300)  # five heads start one after the other
def test_sessions_events_and_processes_outlive_their_head(heads: Heads) -> None:
    """A session begins at one head, goes on when that is killed, and is stopped at another; a new head has it all."""

    a, b = heads.start("a"), heads.start("b")
    heads.agent("n1")
    until(lambda: a.nodes().get("n1") == "healthy", "the node at the first head")
    began = time.time()
    a.post("/profiling/start", {"name": "run"})
    until(lambda: state(b, "run") == "active", "the session at the second head")
    known = until(lambda: processes(a), "processes")
    assert b.ask("/profiling/start", {"name": "run"}, method="POST")[0] == 409

    a.kill()
    until(lambda: b.get("/status")["connected_clients"] == ["n1"], "the node at the second head")
    assert state(b, "run") == "active"
    until(lambda: processes(b) == known, "the processes that the first head saw")
    a = heads.start("a")
    until(lambda: a.get("/status")["connected_clients"] == ["n1"], "the node at the first head again")
    until(lambda: len(a.get("/status")["shared"]["heads"]) == 1, "a look at the other head")
    assert state(a, "run") == "active"

    b.post("/profiling/stop", {"name": "run"})
    until(lambda: state(a, "run") == "finished", "the end of the session at the first head")
    exported = json.loads((b.output_dir / "run.json").read_text())
    assert len(exported["frames"]) > 10
    assert [] == [
        frame
        for frame in exported["frames"]
        if [one is None for one in frame["gpu_util"]] != [one is None for one in frame["gpu_memory"]]
    ]
    assert "interrupted" not in {state(head, "run") for head in (a, b)}

    window = began + 0.7, max(began + 6.0, time.time())  # processes are looked at every few seconds
    until(lambda: time.time() > window[1] and used(a, *window) > 8.0, "what processes used")
    seconds = used(a, *window)
    until(lambda: used(b, *window) == pytest.approx(seconds, rel=0.25), "the same at both heads")
    c = heads.start(
        "c"
    )  # what a head has not sealed and copied yet is lost with its disk: wait until another one sees it
    until(lambda: used(c, *window) == pytest.approx(seconds, rel=0.25), "the same in the shared directory")
    for head in (a, b, c):
        head.kill()
    for name in "abc":
        heads.lose(name)
    c = heads.start("c")
    until(lambda: state(c, "run") == "finished", "the session at a new head")
    until(lambda: processes(c) == known, "the processes at a new head")
    until(lambda: used(c, *window) == pytest.approx(seconds, rel=0.25), "what processes used at a new head")
    starts = heads.told("agent_started")
    until(lambda: len(events(c, "agent_started")) == starts, "what happened at a new head, each of it once")
    assert c.end() == 0, c.text


def test_a_file_server_that_hangs_stops_nothing(heads: Heads) -> None:
    """The head starts, takes frames, tells what is wrong, and ends in time."""

    stuck = heads.shared / _STUCK
    stuck.mkdir()
    os.mkfifo(stuck / "head.json")
    a = heads.start("a")
    heads.agent("n1")
    until(lambda: a.nodes().get("n1") == "healthy", "the node")
    shared = until(
        lambda: (found := a.get("/status")["shared"])["state"] == "failing" and found, "what is wrong"
    )

    assert "does not answer" in shared["error"]
    assert shared["hint"]
    a.post("/profiling/start", {"name": "run"})
    assert state(a, "run") == "active"
    assert a.end() == 0, a.text
    assert "does not answer" in a.text


def test_a_head_that_ends_leaves_its_sessions_to_another_one(heads: Heads) -> None:
    """Only the last one interrupts them."""

    a, b = heads.start("a"), heads.start("b")
    a.post("/profiling/start", {"name": "run"})
    until(lambda: state(b, "run") == "active", "the session at the second head")
    until(lambda: a.get("/status")["shared"]["heads"][0]["alive"], "a sign of life")
    assert a.end() == 0, a.text
    until(lambda: not b.get("/status")["shared"]["heads"][0]["alive"], "the end of the first head")
    assert state(b, "run") == "active"
    assert b.end() == 0, b.text
    assert "is interrupted" in b.text
    assert "is interrupted" not in a.text
    again = heads.start("a")
    until(lambda: state(again, "run") == "interrupted", "what the other head said at its end")


def test_a_head_that_is_killed_again_and_again_tells_everything_once(tmp_path: Path) -> None:
    """At any moment: what is in its own book is in the others', once."""

    chance = random.Random(7)
    (tmp_path / "shared").mkdir()
    for _ in range(6):
        command = [
            sys.executable,
            "-m",
            "tests.integration.shared_writer",
            str(tmp_path / "a"),
            str(tmp_path / "shared"),
        ]
        with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]) as writer:
            assert writer.stdout is not None
            assert writer.stdout.readline() == b"ready\n"
            time.sleep(chance.uniform(0.0, 0.2))
            writer.kill()
    a, b = (TinyHead(tmp_path / name, tmp_path / "shared") for name in "ab")
    try:
        a.look()
        b.look(20)
        known = [f"e{number}" for number in range(1, len(a.kinds()) + 1)]

        assert known == a.kinds() == b.kinds()
        assert len(known) == len(b.lives()) > 20
    finally:
        a.end()
        b.end()
