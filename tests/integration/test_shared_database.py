"""Real heads that share a PostgreSQL database: killed, replaced, and with a database that fails."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.integration.cluster import AgentProcess, Cluster, HeadProcess, cluster_in, free_port, until
from tests.integration.postgres import PASSWORD, PostgresServer
from tests.integration.test_cluster_disk import small_disk

pytestmark = pytest.mark.requires("PostgreSQL")

_QUICK_AGENT = {"gpulse.cluster.agent.head_selection:PROBE_SECONDS": 0.5}
_QUICK_HEAD = {
    "gpulse.store.metadata.postgres_writer:ALIVE_SECONDS": 3.0,
    "gpulse.store.metadata.postgres_writer:MAX_RETRY_SECONDS": 1.0,
    "gpulse.store.metadata.postgres_gpu_time:COUNT_INTERVAL_SECONDS": 1.0,
    "gpulse.store.metadata.postgres_gpu_time:ALIGN_SECONDS": 10.0,
    "gpulse.store.metadata.postgres_gpu_time:SETTLE_SECONDS": 5.0,
    "gpulse.store.local_coverage:_PRESENT_SECONDS": 2.0,
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

    until(lambda: (session(b, "run") or {})["frame_count"] > 10, "frames at the second head")
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
    assert starts <= set(found)  # the agent may have reported its start to the new head as well
    assert len(found) == len(set(found))
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
        assert "PostgreSQL" in str(a.get("/api/v1/events")["incomplete"])
        assert "PostgreSQL" in str(answer["incomplete"])
        assert state(a, "run") == "active"
        frames = a.get("/status")["frames_received"]
        until(lambda: a.get("/status")["frames_received"] > frames + 10, "frames")
    finally:
        fragile.server.signal(signal.SIGCONT)
    until(lambda: is_caught_up(a), "everything in the database")
    assert [("run", "active")] == fragile.rows("SELECT name, state FROM sessions")
    assert a.end() == 0, a.text


def count_events(head: HeadProcess) -> int:
    """How many events the head itself has, from its own metadata."""
    with sqlite3.connect(f"file:{head.data_dir}/metadata.sqlite?mode=ro", uri=True) as metadata:
        found: int = metadata.execute("SELECT count(*) FROM events").fetchone()[0]
    metadata.close()
    return found


def test_a_database_that_is_killed_again_and_again_has_everything_once(fragile: Heads) -> None:
    """Under load: as many events and processes as the head itself has, and no moment of GPU time twice."""

    a = fragile.start("a")
    for number in range(3):
        fragile.agent(f"n{number}", "a")
    until(lambda: len(a.get("/status")["connected_clients"]) == 3, "the nodes")
    for number in range(4):
        for name in range(5):
            a.post("/profiling/start", {"name": f"run-{number}-{name}"})
            a.post("/profiling/stop", {"name": f"run-{number}-{name}"})
        fragile.server.kill()
        a.post("/profiling/start", {"name": f"killed-{number}"})
        fragile.server.start()
    until(lambda: is_caught_up(a), "everything in the database")
    assert 24 == len(a.get("/api/v1/sessions")["sessions"])
    assert [(24,)] == fragile.rows("SELECT count(*) FROM sessions")
    assert "is available again" in a.text
    assert a.end() == 0, a.text

    (events_there,) = fragile.rows("SELECT count(*) FROM events")
    assert count_events(a) == events_there[0]
    with sqlite3.connect(f"file:{a.data_dir}/metadata.sqlite?mode=ro", uri=True) as metadata:
        known = metadata.execute("SELECT pid, start_time FROM processes ORDER BY 1, 2").fetchall()
    metadata.close()
    assert known == fragile.rows("SELECT pid, start_time FROM processes ORDER BY 1, 2")
    overlaps = (
        "SELECT count(*) FROM counted_time a JOIN counted_time b ON a.node = b.node AND a.ctid < b.ctid "
    )
    assert [(0,)] == fragile.rows(overlaps + 'AND a.start < b."end" AND b.start < a."end"')


def test_a_database_that_is_away_for_long_gets_everything_later(fragile: Heads) -> None:
    """Also when the head is restarted meanwhile; what is missing is said once."""

    a = fragile.start("a")
    fragile.agent("n1", "a")
    until(lambda: a.nodes().get("n1") == "healthy" and is_caught_up(a), "the node")
    fragile.server.stop()
    until(lambda: database(a)["state"] == "failing", "a failure")
    a.post("/profiling/start", {"name": "run"})
    found = database(a)
    assert found["error"].startswith(f"PostgreSQL at 127.0.0.1:{fragile.server.port}/")
    assert found["hint"]
    assert found["waiting_records"] > 0
    assert "missing" in str(a.get("/api/v1/processes")["incomplete"])
    time.sleep(3.0)
    assert 1 == a.text.count("PostgreSQL at")
    assert a.end() == 0, a.text
    a = fragile.start("a")
    assert state(a, "run") in ("active", "interrupted")
    until(lambda: a.nodes().get("n1") == "healthy", "the node")
    fragile.server.start()
    until(lambda: is_caught_up(a), "everything in the database")
    until(lambda: [("run",)] == fragile.rows("SELECT name FROM sessions"), "the session")
    assert a.end() == 0, a.text
    assert [(count_events(a),)] == fragile.rows("SELECT count(*) FROM events")


def test_a_wrong_password_is_a_warning(heads: Heads) -> None:
    """The head runs, says what to do, and never repeats the password."""

    heads.password_file.write_text("another-secret")
    a = heads.start("a")
    found = until(
        lambda: (found := database(a))["state"] == "failing" and "password" in found["error"] and found,
        "a refusal",
    )
    assert "password authentication failed" in found["error"]
    assert "--database-password-file" in found["hint"]
    heads.password_file.write_text(PASSWORD)
    assert a.end() == 0, a.text
    assert "another-secret" not in a.text + json.dumps(found)
    a = heads.start("a")
    until(lambda: is_caught_up(a), "everything in the database")


def test_a_database_without_permission_or_without_existence_is_said(heads: Heads) -> None:
    """With the command that helps."""

    owner = heads.database
    heads.server.execute(
        "postgres", f"REVOKE ALL ON DATABASE {owner} FROM PUBLIC", f"ALTER DATABASE {owner} OWNER TO postgres"
    )
    heads.server.execute("postgres", f"GRANT CONNECT ON DATABASE {owner} TO {owner}")
    a = heads.start("a")
    found = until(
        lambda: (found := database(a))["hint"] and "CREATE SCHEMA" in found["hint"] and found, "a refusal"
    )
    assert "permission denied" in found["error"]
    heads.server.execute(owner, f"CREATE SCHEMA gpulse AUTHORIZATION {owner}")
    until(lambda: is_caught_up(a), "everything in the database")
    assert a.end() == 0, a.text
    heads.server.execute("postgres", f"DROP DATABASE {owner}")
    a = heads.start("a")
    found = until(
        lambda: (found := database(a))["hint"] and "createdb" in found["hint"] and found, "a refusal"
    )
    assert "does not exist" in found["error"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--database", "mysql://x:sesame@y/z"), "--database must be a postgresql:// URL"),
        (("--database", "postgresql://x:ses ame@[y/z"), "--database is not a valid postgresql:// URL"),
        (
            ("--database", "postgresql://x:ses/ame@db:5432/gpulse"),
            "--database is not a valid postgresql:// URL",
        ),
        (
            ("--database", "postgresql://x:77/ame@db:5432/gpulse"),
            "--database is not a valid postgresql:// URL",
        ),
        (
            ("--database", "postgresql://x:ses@ame@db:5432/gpulse"),
            "--database contains a password",
        ),
        (("--database", "postgresql://x@db:99999/gpulse"), "--database is not a valid postgresql:// URL"),
        (("--database", "postgresql://x@db:abc/gpulse"), "--database is not a valid postgresql:// URL"),
        (("--database", f"postgresql://x@db/{'n' * 20_000}"), "--database is not a valid postgresql:// URL"),
        (("--database", "postgresql://x@y"), "--database has no database name"),
        (("--database", "postgresql://x:sesame@y/z"), "--database contains a password"),
        (("--database", "postgres://x@y,v/z?password=sesame"), "--database contains a password"),
        (("--database-password-file", "/nowhere"), "--database-password-file requires --database URL"),
        (("--database", "postgresql://y/z", "--database-password-file", "/nowhere"), "cannot read /nowhere"),
        (("--database", "postgresql://y/z", "--database-limit", "1MiB"), "--database-limit must be at least"),
    ],
)
def test_a_bad_option_is_one_line(tmp_path: Path, options: tuple[str, ...], words: str) -> None:
    """With the next step, and without the password."""

    done = subprocess.run(
        [sys.executable, "-m", "gpulse", "head", "--data-dir", str(tmp_path), *options],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 2
    assert words in done.stderr
    assert len(done.stderr.strip().splitlines()) <= 2
    assert "sesame" not in done.stderr


def test_a_password_in_the_environment_is_accepted(tmp_path: Path) -> None:
    """Only the head's user can read it there; what is wrong with this URL is something else."""

    done = subprocess.run(
        [sys.executable, "-m", "gpulse", "head", "--data-dir", str(tmp_path)],
        env={**os.environ, "GPULSE_DATABASE": "postgresql://x:sesame@y"},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 2
    assert "--database has no database name" in done.stderr
    assert "sesame" not in done.stderr


@pytest.mark.timeout(240)
def test_a_database_whose_disk_is_full_gets_everything_later(tmp_path: Path) -> None:
    """It is said; nothing is lost, and nothing is there twice."""

    directory = Path(tempfile.mkdtemp(prefix="gpulse-pg-"))
    directory.chmod(0o755)  # the server's user goes through it
    place = directory / "disk"
    with (
        small_disk(place, 150_000),
        PostgresServer(directory=place) as server,
        cluster_in(tmp_path) as cluster,
    ):
        heads = Heads(tmp_path, cluster, server)
        a = heads.start("a")
        heads.agent("n1", "a")
        until(lambda: a.nodes().get("n1") == "healthy" and is_caught_up(a), "the node")
        filler = place / "filler"
        _fill(filler)
        for number in range(400):
            a.post("/profiling/start", {"name": f"run{number}", "labels": {"text": "x" * 200}})
            if database(a)["state"] == "failing":
                break
        found = until(lambda: (found := database(a))["state"] == "failing" and found, "a failure")
        started = number + 1
        a.post("/profiling/start", {"name": "last"})
        filler.unlink()
        if not server.is_running:  # a server that cannot write its own log ends
            server.start()
        until(lambda: is_caught_up(a), "everything in the database")
        assert found["hint"]
        assert [(started + 1,)] == heads.rows("SELECT count(*) FROM sessions")
        assert a.end() == 0, a.text
        assert [(count_events(a),)] == heads.rows("SELECT count(*) FROM events")
    shutil.rmtree(directory, ignore_errors=True)


def _fill(path: Path) -> None:
    """Fill the disk that a file is on."""
    with path.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(1 << 16))
    with path.open("ab", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(512))
