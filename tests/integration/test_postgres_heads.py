"""What heads write to the database that they share: everything once, in whatever order it comes."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import pytest

from gpulse.cluster.head.session_lifecycle import interrupt_session, stop_session
from gpulse.model.device import Device
from gpulse.model.finding_acknowledgement import (
    ACKNOWLEDGED_EVENT,
    SILENCE_ENDED_EVENT,
    SILENCED_EVENT,
    Silence,
)
from gpulse.store.log.record_payloads import LogEntry
from gpulse.store.metadata.postgres_writer import PostgresWriter
from tests.integration.cluster import until
from tests.integration.postgres import PostgresServer
from tests.integration.postgres_heads import RUN, START, SmallHead, config_of, ended, process
from tests.queries import query
from tests.unit.metadata_records import gpu_layout, layout_facts

pytestmark = pytest.mark.requires("PostgreSQL")

_STARTED = {"event": "agent_started", "version": "1", "pid": 1}


class Make(Protocol):
    """Starts a head of the database, by the name of its directory."""

    def __call__(self, name: str) -> SmallHead:
        """Start it."""


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    """A server."""
    with PostgresServer() as server:
        yield server


@pytest.fixture
def database(server: PostgresServer) -> str:
    """An empty database."""
    return server.make_database()


@pytest.fixture
def make(tmp_path: Path, server: PostgresServer, database: str) -> Iterator[Make]:
    """Heads of one database; they end with the test."""
    with ExitStack() as stack:

        def start(name: str) -> SmallHead:
            return stack.enter_context(SmallHead(tmp_path / name, config_of(server, database)))

        yield start


def test_what_one_head_knows_the_other_one_knows(make: Make) -> None:
    """Nodes, GPUs, sessions, events and processes, under the other's own numbers for nodes."""

    a, b = make("a"), make("b")
    b.node("own", "m0")
    node = a.node("gpu01")
    for fact in layout_facts(gpu_layout((0, None), (1, None)), node, START):
        a.note(fact.pop("fact"), **fact)
    a.commit()
    a.frame(node, 1, process(7, job="slurm:5"), {"event": "gap", "frames": 3})
    a.session("run")
    a.look()
    b.look()

    assert ["gap"] == [event.kind for event in b.store.events(query(start=0, end=1e11))]
    (found,) = b.store.processes(query(start=0, end=1e11, jobs=["slurm:5"]))
    assert 2 == found.node
    assert ("gpu01", "m1") == b.store.nodes()[2][1:4:2]
    assert ["slurm:5"] == b.store.job_names()
    until(lambda: b.look() is None and len(b.store.gpus()) == 2, "its GPUs")  # type: ignore[func-returns-value]
    assert ["GPU-0-None", "GPU-1-None"] == [gpu.uuid for gpu in b.store.gpus()]
    assert ["run"] == [session.name for session in b.sessions.all()]
    assert {1} == set(b.archive.nodes())  # nothing of it is in this head's own data
    assert [] == b.archive.sessions()
    assert [] == list(b.store.events(query(start=0, end=1e11, nodes=[1])))


def test_a_frame_that_two_heads_got_counts_once(make: Make) -> None:
    """An agent sends what it sent last to the next head again."""

    a, b = make("a"), make("b")
    for head in (a, b):
        node = head.node("gpu01")
        for sequence in range(1, 6):
            head.frame(node, sequence, {"event": f"e{sequence}"})
        head.settle()

    assert [f"e{number}" for number in range(1, 6)] == a.kinds() == b.kinds()


@pytest.mark.parametrize("first", ["begin", "end"])
def test_a_process_that_began_at_one_head_and_ended_at_another_has_ended(make: Make, first: str) -> None:
    """In whatever order the two heads write it."""

    a, b = make("a"), make("b")
    nodes = a.node("gpu01"), b.node("gpu01")
    for head in (a, b) if first == "begin" else (b, a):
        if head is a:
            a.frame(nodes[0], 1, _STARTED, process(7))
        else:
            b.frame(nodes[1], 2, ended(7), process(8))
        head.settle()

    assert {7: START + 2, 8: None} == a.lives() == b.lives()


def test_an_older_run_that_comes_late_stays_ended(make: Make) -> None:
    """The next run began at another head meanwhile."""

    a, b = make("a"), make("b")
    old, new = a.node("gpu01"), b.node("gpu01")
    b.frame(new, 10, _STARTED, process(9), run=bytes(16))
    b.settle()
    a.frame(old, 1, _STARTED, process(7))
    a.settle()

    assert {7: START + 10, 9: None} == a.lives() == b.lives()


def test_a_session_of_one_head_can_be_stopped_at_another(make: Make) -> None:
    """And stays stopped, whatever is written of it later."""

    a, b = make("a"), make("b")
    session = a.session("run")
    a.look()
    b.look()
    b.time += 5.0
    b.keep(stop_session(b.sessions.find("run"), b.time))
    b.look()
    a.look()
    assert "finished" == a.sessions.find("run").state
    assert ["finished"] == [one.state for one in a.archive.sessions()]  # also without the database
    a.keep(interrupt_session(session, START + 9.0))
    a.look()
    b.look()
    assert ["finished"] == [one.state for one in b.shared.store.sessions()]


def test_a_head_that_is_there_goes_on_with_what_another_one_left(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    """That one did not see it, because PostgreSQL did not answer for a while."""

    a, b = make("a"), make("b")
    session = a.session("run")
    a.look()
    b.look()
    a.keep(interrupt_session(session, START + 20.0))
    a.look()
    b.look()
    a.look()

    assert "session run continues here although another head marked it as interrupted" in caplog.text
    assert ["active"] * 4 == [
        sessions[0].state
        for head in (a, b)
        for sessions in (head.sessions.all(), head.shared.store.sessions())
    ]
    assert ["active"] == [one.state for one in a.archive.sessions()]  # also without the database


def test_heads_that_use_copies_of_one_data_directory_are_told(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Two that write as one would lose records."""

    a = make("a")
    a.node("gpu01")
    a.settle()
    a.end()
    shutil.copytree(tmp_path / "a", tmp_path / "copy")
    heads = [make("a"), make("copy")]
    for head in heads:
        head.settle()
    for head in heads:
        head.event("one", None)
        head.commit()
    until(lambda: "another process is writing to" in caplog.text, "a warning")

    assert "stop the other head, which uses a copy of this data directory" in caplog.text


@pytest.mark.parametrize(
    "bad",
    [
        {"fact": "node", "id": 1, "name": "gpu01", "host": "gpu02", "machine": "m2", "time": START},
        {
            "fact": "event",
            "time": START,
            "kind": "".join(map(chr, range(256, 6000))),
            "node": 1,
            "detail": {},
        },
        {"fact": "event", "time": START, "kind": "half \ud800", "node": 1, "detail": {}},
    ],
    ids=["twice", "too-long", "half-a-letter"],
)
def test_facts_that_postgresql_refuses_do_not_stop_the_rest(
    make: Make, server: PostgresServer, database: str, bad: dict[str, Any]
) -> None:
    """Each is left out on its own, whether the log is followed or everything is copied."""

    a = make("a")
    for node in ("gpu01", "gpu02"):
        a.node(node, f"m{node[-1]}")
    a.settle()
    fact = dict(bad)
    a.event("before", None)
    a.note(fact.pop("fact"), **fact)
    a.event("between", None)
    a.commit()
    a.event("after", 2)
    a.commit()
    a.settle()

    assert {"before", "between", "after"} <= set(a.kinds())
    a.end()
    server.rows(database, "DELETE FROM events; UPDATE heads SET position = 999")
    again = make("a")
    again.settle()
    assert {"before", "between", "after"} <= set(again.kinds())


def test_machines_of_one_name_keep_theirs(make: Make) -> None:
    """Nodes are known by their machines."""

    a, b = make("a"), make("b")
    a.node("gpu01", "m1")
    b.node("gpu01", "m2")
    a.look()
    b.look()
    a.look()

    assert ["gpu01", "gpu01#2"] == [node.name for node in a.store.nodes().values()]
    assert ["m1", "m2"] == [node.machine for node in a.store.nodes().values()]
    assert ["m2", "m1"] == [node.machine for node in b.store.nodes().values()]


def test_heads_share_acknowledgements_and_silences(make: Make) -> None:
    """Also with a head that comes later; one that was ended at another head is over everywhere."""

    a, b = make("a"), make("b")
    silence = Silence("s1", a.time, a.time + 3600, "repair", "mo", nodes=("gpu01",))
    a.event(SILENCED_EVENT, None, **silence.to_dict())
    a.event(ACKNOWLEDGED_EVENT, None, keys=["gpu_fault/gpu01/0"], by="mo", note=None)
    a.commit()
    a.settle()
    b.look()
    c = make("c")
    c.look()
    for head in (b, c):
        known = head.responses.acknowledgement("gpu_fault/gpu01/0", a.time)
        assert ([silence], "mo") == (head.responses.silences(a.time), known and known.by)

    b.event(SILENCE_ENDED_EVENT, None, id="s1", by="ada")
    b.commit()
    b.settle()
    a.look()
    assert [] == a.responses.silences(a.time)


def test_a_head_that_begins_to_share_copies_its_past(
    tmp_path: Path, server: PostgresServer, database: str
) -> None:
    """What its log has dropped long ago is in its own metadata; copying again changes nothing."""

    alone = SmallHead(tmp_path / "a", config_of(server, database))
    node = alone.node("gpu01")
    alone.frame(node, 1, _STARTED, process(7), {"event": "gap"})
    alone.frame(
        node,
        2,
        {
            "event": "findings",
            "findings": [{"id": "slow", "severity": "high", "summary": "waits", "gpu": 0, "label": "0"}],
        },
    )
    alone.session("run")
    alone.archive._follower = None  # it does not share yet
    alone.archive.seal()
    alone.archive._log.drop_before(alone.archive.accepted)
    alone.archive.commit([LogEntry.of_fact("event", time=START, kind="later", node=None, detail={})] * 2)
    alone.archive._log._rotate(0)
    alone.archive.commit([LogEntry.of_fact("event", time=START, kind="last", node=None, detail={})])
    alone.archive.seal()
    alone.archive.close()

    for _ in range(2):
        with SmallHead(tmp_path / "a", config_of(server, database)) as a:
            a.settle()
            assert {"agent_started", "gap", "findings", "later", "last"} == set(a.kinds())
            assert 5 == len(a.kinds())
            assert {7: None} == a.lives()
            assert 1 == len(a.shared.store.findings(query(start=0, end=1e11)))
            assert ["run"] == [one.name for one in a.shared.store.sessions()]
        server.rows(database, "UPDATE heads SET position = 0")


def test_a_copy_goes_in_pieces_and_ends_what_has_ended(
    make: Make, server: PostgresServer, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PostgreSQL lost the last hours; the status says what goes on."""

    a = make("a")
    node = a.node("gpu01")
    finding = {"id": "slow", "severity": "high", "summary": "waits", "gpu": 0, "label": "0"}
    a.frame(node, 1, _STARTED, {"event": "findings", "findings": [finding]})
    a.frame(node, 2, {"event": "findings", "findings": []})
    for sequence in range(3, 12):
        a.frame(node, sequence, process(sequence), {"event": "tick"})
    a.settle()
    before = a.kinds()
    (known,) = a.archive.findings(query(start=0, end=1e11))
    a.end()
    server.rows(
        database,
        "DELETE FROM processes; DELETE FROM events WHERE kind = 'tick'; "
        'UPDATE findings SET "end" = NULL, is_over = 0; UPDATE heads SET position = 999',
    )
    monkeypatch.setattr("gpulse.store.metadata.postgres_replication._ROWS_AT_ONCE", 3)
    said: list[str] = []
    copy = PostgresWriter._check_open

    def check(writer: PostgresWriter) -> None:
        assert writer.outage is not None
        said.append(writer.outage.message)
        copy(writer)

    monkeypatch.setattr(PostgresWriter, "_check_open", check)
    again = make("a")
    again.settle()

    assert sorted(before) == sorted(again.kinds())
    assert set(range(3, 12)) == set(again.lives())
    (found,) = again.shared.store.findings(query(start=0, end=1e11))
    assert known.span == found.span
    assert found.span.is_over
    assert all(message.endswith("copying this head's metadata") for message in said)
    assert len(said) > 10


def test_a_value_that_postgresql_cannot_hold_costs_only_itself(make: Make) -> None:
    """Texts with NUL are changed."""

    a = make("a")
    node = a.node("gpu01")
    a.note("event", time=START, kind="odd\x00kind", node=node, detail={"reason": "\x00"})
    a.note("event", time=START + 1, kind="after", node=node, detail={})
    a.commit()
    a.settle()

    assert ["odd\ufffdkind", "after"] == a.kinds()


def test_a_new_node_next_to_a_bad_record_keeps_its_events(
    make: Make, server: PostgresServer, database: str
) -> None:
    """The node's id of the transaction that failed does not exist."""

    a = make("a")
    a.settle()
    server.rows(database, "ALTER TABLE events ADD CHECK (kind <> 'bad')")
    register = a.fleet.register
    node = register.new("gpu01", "m1", START)
    register.put(node)
    a.note("event", time=START, kind="bad", node=node.id, detail={})
    a.note("event", time=START + 1, kind="after", node=node.id, detail={})
    a.commit()
    a.settle()

    assert ["after"] == a.kinds()
    assert server.rows(database, "SELECT id FROM nodes") == server.rows(database, "SELECT node FROM events")


def test_nodes_without_events_are_seen_after_a_reconnect(
    make: Make, server: PostgresServer, database: str
) -> None:
    """Frames alone do not name a node; the head knows which ones it has."""

    a = make("a")
    node = a.node("gpu01")
    a.settle()
    server.execute(
        database, "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()"
    )
    a.time += 60.0
    a.fleet.members[node].seen = a.time
    a.frame(node, 60)
    seen = "SELECT name, seen FROM node_seen JOIN nodes ON id = node"
    until(lambda: server.rows(database, seen) == [("gpu01", a.time)], "the node in the database")


def test_another_version_of_the_tables_is_refused(make: Make, server: PostgresServer, database: str) -> None:
    """By name, with what to do; the head goes on."""

    a = make("a")
    a.node("gpu01")
    a.settle()
    server.rows(database, "UPDATE meta SET value = '1'")
    b = make("b")
    node = b.node("gpu02")
    b.frame(node, 1, {"event": "gap"})
    outage = until(
        lambda: (found := b.shared.writer.outage) is not None and "format" in found.message and found,
        "a refusal",
    )
    assert "have format 1; this version of gpulse uses format 2" in outage.message
    assert "another database" in outage.hint
    assert ["gap"] == [event.kind for event in b.store.events(query(start=0, end=1e11))]
    server.rows(database, "UPDATE meta SET value = '2'")
    b.settle()
    assert ["gap"] == b.kinds()


def test_nodes_of_other_heads_are_shown(make: Make) -> None:
    """With the node, its processes and its findings."""

    a, b = make("a"), make("b")
    node = a.node("gpu01")
    for fact in layout_facts(gpu_layout((0, None)), node, START):
        a.note(fact.pop("fact"), **fact)
    finding = {"id": "slow", "severity": "high", "summary": "waits", "gpu": 0, "label": "0"}
    a.frame(node, 1, process(7), process(8), {"event": "findings", "findings": [finding]})

    def shown() -> bool:
        b.look()
        return any(node.devices and node.processes for node in b.fleet.live())

    until(shown, "the node")

    (live,) = b.fleet.live()
    assert ("gpu01", "healthy", True) == (live.name, live.state, live.at_other_head)
    assert [Device] == [type(device) for device in live.devices]
    assert {7, 8} == set(live.processes)
    assert 1 == len(live.findings)
    a.frame(node, 2, ended(7))
    until(lambda: b.look() is None and {8} == set(b.fleet.live()[0].processes), "an end")  # type: ignore[func-returns-value]
    assert RUN not in b.archive.runs()


def test_what_another_head_writes_late_is_shown(make: Make) -> None:
    """It was behind for longer than anybody looks back."""

    a, b = make("a"), make("b")
    node = a.node("gpu01")
    a.frame(node, 1, process(7))

    def processes() -> set[int]:
        b.look()
        return {pid for live in b.fleet.live() for pid in live.processes}

    until(lambda: processes() == {7}, "the node")
    b.time += 3600.0
    until(lambda: processes() == {7} and b.shared.writer._seen_at > 0.0, "another look")
    a.frame(node, 2, process(8), ended(7))
    until(lambda: processes() == {8}, "what was late")


def test_ten_minutes_without_a_database_are_made_up_for(tmp_path: Path) -> None:
    """From the log, since no memory is kept for so long; as many as agents sent, and each once."""

    with PostgresServer() as server:
        name = server.make_database()
        with SmallHead(tmp_path / "a", config_of(server, name)) as a:
            node = a.node("gpu01")
            a.frame(node, 1, _STARTED)
            a.settle()
            server.stop()
            for sequence in range(2, 602):
                a.frame(node, sequence, process(sequence), {"event": "tick"}, ended(sequence - 1))
            until(lambda: a.shared.writer.outage is not None, "a failure")
            assert a.shared.writer.waiting_records == 600
            assert 601 == len(a.store.events(query(start=0, end=1e11)))  # its own data
            a.archive.seal()
            server.start()
            a.settle()
            assert 601 == len(a.kinds())
            lives = a.lives()
            assert (600, [601]) == (len(lives), [pid for pid, end in lives.items() if end is None])
            assert [(601,)] == server.rows(name, "SELECT count(*) FROM seen_frames")


def test_a_log_that_got_too_long_is_made_up_for_by_a_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit of what may wait for the database costs no metadata."""

    monkeypatch.setattr("gpulse.store.local._SEGMENT_BYTES", 4096)
    with PostgresServer() as server:
        name = server.make_database()
        config = config_of(server, name)._replace(limit_bytes=8192)
        with SmallHead(tmp_path / "a", config) as a:
            node = a.node("gpu01")
            a.settle()
            server.stop()
            for sequence in range(1, 201):
                a.frame(node, sequence, process(sequence), {"event": "tick"})
            a.archive.seal()
            assert a.archive.usage().log_bytes < 16_000
            server.start()
            a.settle()
            assert ["tick"] * 200 == a.kinds()
            assert 200 == len(a.lives())
