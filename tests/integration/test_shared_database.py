"""Real heads that share a PostgreSQL database: killed, replaced, and with a database that fails."""

from __future__ import annotations

import json
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.cluster import AgentProcess, Cluster, HeadProcess, cluster_in, free_port, until
from tests.integration.postgres import PASSWORD, PostgresServer

pytestmark = pytest.mark.requires("PostgreSQL")

_QUICK_AGENT = {"gpulse.cluster.agent.heads:LOOK_SECONDS": 0.5}
_QUICK_HEAD = {
    "gpulse.store.metadata.postgres_writer:ALIVE_SECONDS": 3.0,
    "gpulse.store.metadata.postgres_writer:MAX_RETRY_SECONDS": 1.0,
    "gpulse.store.metadata.gpu_time_writer:COUNT_SECONDS": 1.0,
    "gpulse.store.metadata.gpu_time_writer:ALIGN_SECONDS": 10.0,
    "gpulse.store.metadata.gpu_time_writer:SETTLE_SECONDS": 5.0,
    "gpulse.store.coverage:_PRESENT_SECONDS": 2.0,
    "gpulse.store.federated:_MIN_PAUSE_SECONDS": 0.5,
}


class Heads:
    """Heads of one database, each with a data directory of its own, by name."""

    def __init__(self, directory: Path, cluster: Cluster, server: PostgresServer) -> None:
        self._directory = directory
        self._cluster = cluster
        self._ports = {name: (free_port(), free_port()) for name in "abc"}
        self.server = server
        self.database = server.make_database()
        self.password_file = directory / "password"
        self.password_file.write_text(PASSWORD + "\n")

    def start(self, name: str, *options: str) -> HeadProcess:
        """Start a head, again perhaps."""
        directory = self._directory / name
        directory.mkdir(exist_ok=True)
        port, http_port = self._ports[name]
        head = HeadProcess(
            directory,
            *(
                "--database",
                self.server.url(self.database),
                "--database-password-file",
                str(self.password_file),
            ),
            *("--seal-after", "1s", "--freq", "200", *options),
            port=port,
            http_port=http_port,
            tuned=_QUICK_HEAD,
        )
        return self._cluster._kept(head)

    def agent(self, node: str, heads: str = "ab") -> AgentProcess:
        """Start an agent that knows two heads, or one."""
        *others, last = (self._ports[name][0] for name in heads)
        hosts = "".join(f"127.0.0.1:{port}," for port in others)
        return self._cluster.agent(node, last, host=f"{hosts}127.0.0.1", tuned=_QUICK_AGENT)

    def rows(self, statement: str) -> list[tuple[Any, ...]]:
        """What a statement finds in the database."""
        return self.server.rows(self.database, statement)

    def lose(self, name: str) -> None:
        """The disk of a head is gone."""
        shutil.rmtree(self._directory / name / "data")


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    """A server that no test harms."""
    with PostgresServer() as server:
        yield server


@pytest.fixture
def heads(tmp_path: Path, server: PostgresServer) -> Iterator[Heads]:
    """No head yet, and a database without tables."""
    with cluster_in(tmp_path) as cluster:
        yield Heads(tmp_path, cluster, server)


@pytest.fixture
def fragile(tmp_path: Path) -> Iterator[Heads]:
    """The same with a server of its own, which may be harmed."""
    with PostgresServer() as server, cluster_in(tmp_path) as cluster:
        yield Heads(tmp_path, cluster, server)


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


def database(head: HeadProcess) -> dict[str, Any]:
    """How it is with the database."""
    found: dict[str, Any] = head.get("/status")["database"]
    return found


def is_caught_up(head: HeadProcess) -> bool:
    """Whether everything that a head committed is in the database."""
    found = database(head)
    return bool(found["state"] == "ok" and found["waiting_records"] == 0)


@pytest.mark.timeout(300)  # five heads start one after the other
def test_sessions_events_and_processes_outlive_their_head(heads: Heads) -> None:
    """A session begins at one head, goes on when that is killed, and is stopped at another; a new head has it all."""

    a, b = heads.start("a"), heads.start("b")
    heads.agent("n1")
    until(lambda: a.nodes().get("n1") == "healthy", "the node at the first head")
    until(lambda: b.nodes().get("n1") == "healthy", "the node at the second head")
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
    until(lambda: len(database(a)["heads"]) == 1, "a look at the other head")
    assert state(a, "run") == "active"

    b.post("/profiling/stop", {"name": "run"})
    until(lambda: state(a, "run") == "finished", "the end of the session at the first head")
    exported = json.loads((b.output_dir / "run.json").read_text())
    assert len(exported["frames"]) > 10
    assert "interrupted" not in {state(head, "run") for head in (a, b)}

    window = began + 0.7, max(began + 6.0, time.time())  # processes are looked at every few seconds
    seconds = len(known) * (window[1] - window[0])  # all of them hold one GPU all the time
    until(lambda: used(a, *window) == pytest.approx(seconds, rel=0.25), "what processes used")
    until(lambda: used(b, *window) == pytest.approx(seconds, rel=0.25), "the same at both heads")
    c = heads.start(
        "c"
    )  # what a head has not counted yet is lost with its disk: wait until another one sees it
    until(lambda: used(c, *window) == pytest.approx(seconds, rel=0.25), "the same in the database")
    starts = {(event["time"], event["node"]) for event in events(a, "agent_started")}
    for head in (a, b, c):
        until(lambda head=head: is_caught_up(head), "everything in the database")  # type: ignore[misc]
        head.kill()
    for name in "abc":
        heads.lose(name)
    c = heads.start("c")
    until(lambda: state(c, "run") == "finished", "the session at a new head")
    until(lambda: processes(c) == known, "the processes at a new head")
    until(lambda: used(c, *window) == pytest.approx(seconds, rel=0.25), "what processes used at a new head")
    found = [(event["time"], event["node"]) for event in events(c, "agent_started")]
    assert sorted(starts) == sorted(found)
    assert c.end() == 0, c.text
    assert PASSWORD not in a.text + b.text + c.text


def test_a_head_that_ends_leaves_its_sessions_to_another_one(heads: Heads) -> None:
    """Only the last one interrupts them."""

    a, b = heads.start("a"), heads.start("b")
    a.post("/profiling/start", {"name": "run"})
    until(lambda: state(b, "run") == "active", "the session at the second head")
    until(lambda: [head["alive"] for head in database(a)["heads"]] == [True], "a sign of life")
    assert a.end() == 0, a.text
    until(lambda: not database(b)["heads"][0]["alive"], "the end of the first head")
    assert state(b, "run") == "active"
    assert b.end() == 0, b.text
    assert "is interrupted" in b.text
    assert "is interrupted" not in a.text
    again = heads.start("a")
    until(lambda: state(again, "run") == "interrupted", "what the other head said at its end")


def test_a_database_that_hangs_stops_nothing(fragile: Heads) -> None:
    """The head takes frames, answers from its own data and says what is missing, and catches up."""

    a = fragile.start("a")
    fragile.agent("n1", "a")
    until(lambda: processes(a) and is_caught_up(a), "the node")
    fragile.server.signal(signal.SIGSTOP)
    try:
        a.post("/profiling/start", {"name": "run"})
        began = time.monotonic()
        answer = a.get("/api/v1/processes")
        assert time.monotonic() - began < 20.0
        assert answer["processes"]
        assert "PostgreSQL" in str(answer["incomplete"])
        assert state(a, "run") == "active"
        frames = a.get("/status")["frames_received"]
        until(lambda: a.get("/status")["frames_received"] > frames + 10, "frames")
    finally:
        fragile.server.signal(signal.SIGCONT)
    until(lambda: is_caught_up(a), "everything in the database")
    assert [("run", "active")] == fragile.rows("SELECT name, state FROM sessions")
    assert a.end() == 0, a.text
