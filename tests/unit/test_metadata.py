"""Metadata of one head: facts are applied and queried."""

from __future__ import annotations

import os
import sqlite3
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpulse.errors import ClosedError, DiskError, LogError
from gpulse.model.packed_columns import layout_id
from gpulse.model.session import Interruption, Session
from gpulse.store.metadata.local_metadata import Metadata, MetadataUpdate, StoredRun
from gpulse.store.metadata.schema import APPLICATION_ID, VERSION
from gpulse.store.store import StoredEvent
from tests.queries import query
from tests.unit.metadata_records import (
    LATER_RUN,
    RUN,
    content,
    fact,
    frame_events,
    gpu_layout,
    layout_facts,
    node_fact,
)


@pytest.fixture
def metadata(tmp_path: Path) -> Iterator[Metadata]:
    """Empty metadata."""
    with Metadata(str(tmp_path / "data" / "metadata.sqlite")) as opened:
        yield opened


def test_new_metadata_is_empty_and_private(metadata: Metadata) -> None:
    """It has an identity of its own, reaches nowhere yet, and others on the machine cannot read it."""
    assert 0 == metadata.applied
    assert ({}, [], [], {}, {}, None) == (
        metadata.nodes(),
        metadata.gpus(),
        metadata.sessions(),
        metadata.runs(),
        metadata.layouts(),
        metadata.settings(),
    )
    assert "wal" == metadata.file.journal_mode
    assert 36 == len(metadata.head_id)
    assert 0o600 == stat.S_IMODE(os.stat(metadata.path).st_mode)
    assert 0o700 == stat.S_IMODE(os.stat(os.path.dirname(metadata.path)).st_mode)


def test_metadata_is_the_same_when_opened_again(tmp_path: Path) -> None:
    """With its identity, by its writer and by readers."""
    path = str(tmp_path / "metadata.sqlite")
    with Metadata(path) as metadata:
        metadata.apply(MetadataUpdate(3, [node_fact()], {RUN: 7}))
        expected, head_id = content(metadata), metadata.head_id
    for read_only in (False, True):
        with Metadata(path, read_only=read_only) as again:
            assert expected == content(again)
            assert head_id == again.head_id


def test_the_last_word_about_a_node_counts(metadata: Metadata) -> None:
    """It keeps when it was first seen."""
    metadata.apply(MetadataUpdate(1, [node_fact(1, "a"), node_fact(2, "b", labels={"rack": "7"})]))
    metadata.apply(MetadataUpdate(2, [node_fact(1, "a#2", time=500.0, facts={"driver": "590"})]))

    nodes = metadata.nodes()
    assert [1, 2] == list(nodes)
    assert ("a#2", "m1", 100.0, {"driver": "590"}) == (
        nodes[1].name,
        nodes[1].machine,
        nodes[1].first_seen,
        nodes[1].facts,
    )
    assert {"rack": "7"} == nodes[2].labels


def test_runs_know_their_last_frame(metadata: Metadata) -> None:
    """It never runs backwards, and a run that was never introduced has no node."""
    run = fact("run", run=RUN.hex(), node=1, time=100.0, version="1.0", pid=42, boot="b")
    metadata.apply(MetadataUpdate(1, [run], {RUN: 10}))
    metadata.apply(MetadataUpdate(2, [], {RUN: 9, LATER_RUN: 3}))

    assert {
        RUN: StoredRun(1, 10, 100.0, "1.0", 42, "b"),
        LATER_RUN: StoredRun(None, 3, None, None, None, None),
    } == metadata.runs()


def test_gpus_are_those_of_a_nodes_layouts(metadata: Metadata) -> None:
    """Ordered by node and index, described as they were last."""
    old, new = gpu_layout((1, None), (0, None), (0, 1)), gpu_layout((1, None), name="NVIDIA B200")
    metadata.apply(
        MetadataUpdate(1, [node_fact(2, "b"), node_fact(), *layout_facts(old, node=2), *layout_facts(old)])
    )
    metadata.apply(MetadataUpdate(2, layout_facts(new, node=2, time=200.0)))

    assert [
        "a:0:NVIDIA H200",
        "a:0:1:NVIDIA H200",
        "a:1:NVIDIA H200",
        "b:0:NVIDIA H200",
        "b:0:1:NVIDIA H200",
        "b:1:NVIDIA B200",
    ] == [gpu.key for gpu in metadata.gpus()]
    assert new.subjects[0] == metadata.gpus()[-1].device
    assert {layout_id(layout.to_json()): layout for layout in (old, new)} == metadata.layouts()
    wanted = layout_id(new.to_json())
    assert {wanted: new} == metadata.layouts([wanted, 5])


def test_layouts_have_large_numbers(metadata: Metadata) -> None:
    """All 64 bits; one of a scope that only a newer version knows is kept, and left out."""
    largest = (1 << 64) - 1
    text = gpu_layout((0, None)).to_json().decode()
    newer = text.replace('"scope":"gpu"', '"scope":"rack"')
    metadata.apply(
        MetadataUpdate(1, [fact("layout", id=str(largest), text=text), fact("layout", id="1", text=newer)])
    )

    assert [largest] == list(metadata.layouts())
    assert [largest] == list(metadata.layouts([largest]))


def test_sessions_are_replaced_by_id(metadata: Metadata) -> None:
    """They come back as they went in, oldest first."""
    first = Session("i1", "night", 100.0, 100.0, 500, labels={"team": "x"}, nodes=("a",))
    earlier = Session("i2", "night", 50.0, 101.0, 500)
    ended = first._replace(state="finished", end=300.0, interruptions=(Interruption(150.0, 160.0),))
    metadata.apply(MetadataUpdate(1, [fact("session", **session.to_dict()) for session in (first, earlier)]))
    assert [earlier, first] == metadata.sessions()

    metadata.apply(MetadataUpdate(2, [fact("session", **ended.to_dict(), colour="of a newer version")]))
    assert [earlier, ended] == metadata.sessions()
    assert ended == metadata.session("i1")
    assert None is metadata.session("i3")


def test_events_are_found_by_time_kind_and_node(metadata: Metadata) -> None:
    """The end of a time range is exclusive; what happened to no node in particular is found by its kind."""
    facts = [
        fact("event", time=float(time), kind=kind, node=node, detail={"n": time})
        for time, kind, node in ((30, "node_lost", 2), (10, "node_joined", 1), (20, "head_started", None))
    ]
    metadata.apply(MetadataUpdate(1, facts))

    def found(**where: object) -> list[float]:
        asked: dict[str, Any] = {"start": 0.0, "end": 100.0, **where}
        return [event.time for event in metadata.events(query(**asked))]

    assert StoredEvent(20.0, "head_started", None, {"n": 20}) == metadata.events(query(start=15, end=25))[0]
    assert [10.0, 20.0, 30.0] == found()
    assert [10.0, 20.0] == found(start=10.0, end=30.0)
    assert [20.0, 30.0] == found(kinds=["head_started", "node_lost"])
    assert [10.0] == found(nodes={1})
    assert [] == found(nodes=[1], kinds=["node_lost"])
    assert [] == found(nodes=[])


def test_the_last_settings_count(metadata: Metadata) -> None:
    """With everything they say."""
    for position, interval in enumerate((500, 100), 1):
        metadata.apply(
            MetadataUpdate(position, [fact("settings", interval_ms=interval, bandwidth=True, time=1.0)])
        )

    assert {"interval_ms": 100, "bandwidth": True, "time": 1.0} == metadata.settings()


@pytest.mark.parametrize(
    "odd",
    [
        {"fact": "node", "id": 1, "time": 5.0},
        {"fact": "node", "id": "1", "name": "a", "host": "a", "machine": "m", "time": 5.0},
        {"fact": "run", "run": "xyz", "node": 1, "time": 5.0},
        {"fact": "layout", "id": "seven", "text": "{}", "time": 5.0},
        {"fact": "devices", "node": 1, "layout": "7", "time": 5.0},
        {"fact": "session", "id": "i", "time": 5.0},
        {"fact": "session", **Session("i", "n", 1.0, 1.0, 1)._replace(id=[])._asdict(), "time": 5.0},  # type: ignore[arg-type]
        {"fact": "event", "time": 5.0},
        {"fact": "event", "time": 5.0, "kind": "\ud800"},
        {"fact": "settings", "interval_ms": float("inf"), "time": 5.0},
        {"fact": "node", "id": 1 << 70, "name": "a", "host": "a", "machine": "m", "time": 5.0},
    ],
)
def test_a_fact_that_cannot_be_read_is_an_event(metadata: Metadata, odd: dict[str, object]) -> None:
    """Nothing else of it is kept, and the facts after it are."""
    assert metadata.apply(MetadataUpdate(1, [odd, node_fact()]))

    (event,) = metadata.events(query(start=0, end=10))
    assert ("unreadable_fact", odd["fact"]) == (event.kind, event.detail["fact"])
    assert [] == metadata.sessions()
    assert [1] == list(metadata.nodes())


def test_facts_of_newer_versions_do_no_harm(metadata: Metadata) -> None:
    """Those with a time are events of their kind."""
    facts = [
        fact("rack", time=5.0, node=3, height=42),
        fact("row", name="x"),
        fact("event", kind="no time"),
        {"fact": []},
        {},
    ]
    metadata.apply(MetadataUpdate(1, facts))

    assert [StoredEvent(5.0, "rack", 3, {"height": 42})] == metadata.events(query(start=0, end=10))


def test_an_update_is_applied_once(metadata: Metadata) -> None:
    """An update up to the metadata's position was applied already."""
    step = MetadataUpdate(5, [fact("event", time=1.0, kind="head_started", node=None, detail={})])

    assert [True, False, False] == [
        metadata.apply(step),
        metadata.apply(step),
        metadata.apply(step._replace(position=4)),
    ]
    assert 5 == metadata.applied
    assert 1 == len(metadata.events(query(start=0, end=10)))


def test_old_things_are_dropped(metadata: Metadata) -> None:
    """Events before a time and processes that had ended by then; what the state is now stays."""
    times = [10.0, 20.0, 30.0]
    facts = [fact("event", time=time, kind="node_lost", node=1, detail={}) for time in times]
    events = [frame_events({"event": "process", "pid": pid, "start_time": 1.0}, time=5.0) for pid in range(3)]
    events += [
        frame_events({"event": "process_end", "pid": 1, "start_time": 1.0}, time=10.0),
        frame_events({"event": "process_end", "pid": 2, "start_time": 1.0}, time=20.0),
        frame_events({"event": "findings", "findings": [], "verdict": None}, time=12.0),
    ]
    metadata.apply(MetadataUpdate(1, [node_fact(), *facts], {}, events))
    metadata.drop_before(20.0)

    assert [20.0, 30.0] == [event.time for event in metadata.events(query(start=0, end=100))]
    assert [0, 2] == [found.pid for found in metadata.processes(query(start=0, end=100))]
    assert [1] == list(metadata.latest("findings"))
    assert [1] == list(metadata.nodes())


def test_what_people_did_is_kept_while_it_may_hold(metadata: Metadata) -> None:
    """A silence for up to 30 days, an acknowledgement as long as a finding that began before it."""
    days = [10.0, 50.0, 95.0]
    facts = [
        fact("event", time=day * 86_400, kind=kind, node=None, detail={"day": day})
        for day in days
        for kind in ("findings_acknowledged", "silence_started", "node_found")
    ]
    slow = {"id": "slow", "severity": "high", "summary": "waits", "gpu": 0, "label": "0"}
    report = frame_events({"event": "findings", "findings": [slow]}, time=40.0 * 86_400)
    metadata.apply(MetadataUpdate(1, [node_fact(), *facts], {}, [report]))
    kept = []
    for before, ends in ((90.0, False), (100.0, True)):
        if ends:
            over = frame_events({"event": "findings", "findings": []}, time=96.0 * 86_400)
            metadata.apply(MetadataUpdate(2, [], {}, [over]))
        metadata.drop_before(before * 86_400)
        found = metadata.events(query(start=0, end=100 * 86_400))
        kept.append([(event.kind, event.detail["day"]) for event in found if "day" in event.detail])

    responses = ("findings_acknowledged", "silence_started")
    assert [
        [
            (kind, day)
            for day in (50.0, 95.0)
            for kind in (*responses, "node_found")
            if day > 90 or kind in responses
        ],
        [(kind, 95.0) for kind in responses],
    ] == kept


def test_a_checkpoint_leaves_nothing_in_the_journal(metadata: Metadata) -> None:
    """Then the file alone has all metadata, and its position says what the log need not keep."""
    metadata.apply(MetadataUpdate(9, [node_fact()]))
    journal = Path(f"{metadata.path}-wal")
    assert journal.stat().st_size > 0
    assert 9 == metadata.checkpoint()
    assert 0 == journal.stat().st_size


def test_a_checkpoint_does_not_wait_for_readers(metadata: Metadata) -> None:
    """One that looks at an old state of the metadata from outside keeps nobody from going on."""
    metadata.apply(MetadataUpdate(1, [node_fact()]))
    reader = sqlite3.connect(metadata.path, isolation_level=None)
    try:
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM nodes").fetchall()
        metadata.apply(MetadataUpdate(2, [node_fact(2, "b")]))
        assert 2 == metadata.checkpoint()
    finally:
        reader.close()
    assert 2 == metadata.checkpoint()


def test_a_newer_format_is_refused_by_name(tmp_path: Path) -> None:
    """For writers and readers, with what to do about it."""
    path = str(tmp_path / "metadata.sqlite")
    Metadata(path).close()
    database = sqlite3.connect(path)
    database.execute(f"PRAGMA user_version = {VERSION + 1}")
    database.close()
    for read_only in (False, True):
        with pytest.raises(
            LogError, match=f"format {VERSION + 1}; this version of gpulse reads format {VERSION}"
        ) as caught:
            Metadata(path, read_only=read_only)
        assert caught.value.hint is not None


def test_another_programs_database_is_left_alone(tmp_path: Path) -> None:
    """Byte for byte."""
    path = tmp_path / "metadata.sqlite"
    database = sqlite3.connect(path)
    database.execute("CREATE TABLE theirs (x)")
    database.close()
    before = path.read_bytes()
    with pytest.raises(LogError, match="another program"):
        Metadata(str(path))
    assert before == path.read_bytes()


def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    """It is named, and not touched."""
    path = tmp_path / "metadata.sqlite"
    path.write_bytes(b"some text " * 1000)
    with pytest.raises(LogError, match=r"metadata.sqlite is damaged"):
        Metadata(str(path))
    assert b"some text " * 1000 == path.read_bytes()


def test_metadata_has_the_id_of_its_head(metadata: Metadata) -> None:
    """Tools that look at the file see it."""
    database = sqlite3.connect(metadata.path)
    try:
        assert (APPLICATION_ID,) == database.execute("PRAGMA application_id").fetchone()
    finally:
        database.close()


def test_a_reader_changes_nothing(tmp_path: Path) -> None:
    """It needs existing metadata, and sees what the writer does meanwhile."""
    path = str(tmp_path / "metadata.sqlite")
    with pytest.raises(DiskError, match="No such file"):
        Metadata(path, read_only=True)
    assert not os.path.exists(path)
    with Metadata(path) as metadata, Metadata(path, read_only=True) as reader:
        metadata.apply(MetadataUpdate(1, [node_fact()]))
        assert 1 == reader.applied
        with pytest.raises(DiskError, match="read-only"):
            reader.apply(MetadataUpdate(2))
        with pytest.raises(DiskError, match="read-only"):
            reader.checkpoint()
        assert 1 == metadata.applied


def test_an_empty_file_cannot_be_read(tmp_path: Path) -> None:
    """A crash may leave one; a writer creates the metadata in it."""
    path = tmp_path / "metadata.sqlite"
    path.touch()
    with pytest.raises(LogError, match="is empty"):
        Metadata(str(path), read_only=True)
    Metadata(str(path)).close()
    Metadata(str(path), read_only=True).close()


def test_closed_metadata_raises_an_error(tmp_path: Path) -> None:
    """Closing twice is fine."""
    metadata = Metadata(str(tmp_path / "metadata.sqlite"))
    metadata.close()
    metadata.close()
    with pytest.raises(ClosedError):
        metadata.nodes()
    with pytest.raises(ClosedError):
        metadata.apply(MetadataUpdate(1))


def test_names_with_odd_characters(tmp_path: Path) -> None:
    """A path is a path, not part of an address."""
    path = str(tmp_path / "50% full?mode=memory#x" / "metadata.sqlite")
    with Metadata(path) as metadata:
        metadata.apply(MetadataUpdate(1))
        assert os.path.getsize(path) > 0


def test_many_threads_read_while_one_writes(metadata: Metadata) -> None:
    """Each sees only whole updates, and never older metadata than before."""
    done = threading.Event()
    failures: list[BaseException] = []

    def read() -> None:
        seen = 0
        try:
            while not done.is_set():
                count, last = len(metadata.events(query(start=0, end=1e9))), metadata.applied
                assert count % 10 == 0
                assert seen <= count <= last * 10
                seen = count
        except BaseException as error:  # noqa: BLE001 -- told in the main thread
            failures.append(error)

    threads = [threading.Thread(target=read) for _ in range(6)]
    for thread in threads:
        thread.start()
    for position in range(1, 60):
        facts = [fact("event", time=float(position), kind="x", node=1, detail={"n": n}) for n in range(10)]
        metadata.apply(MetadataUpdate(position, facts))
        if position % 20 == 0:
            metadata.checkpoint()
    done.set()
    for thread in threads:
        thread.join()
    assert [] == failures
    assert 590 == len(metadata.events(query(start=0, end=1e9)))
