from __future__ import annotations

import math
from pathlib import Path

import pytest

from gpulse.cluster.head.fleet import Fleet as HeadFleet
from gpulse.cluster.head.maintenance import Maintenance, RetentionRules
from gpulse.model.packed_columns import BlockPacker, ColumnBlock, PackedFrame, split_packed_frames
from gpulse.model.series_labels import MAX_EXPOSED_SUBJECTS
from gpulse.store.local import LocalStore
from gpulse.store.log.log import Log
from gpulse.store.log.reader import LogReader
from gpulse.store.log.record_payloads import BATCH, FrameBatch, LogEntry, encode_fact
from gpulse.store.metadata.log_updates import MetadataUpdate
from gpulse.store.metadata.reader import MetadataLookup
from gpulse.store.tsdb import send_process as tail_module
from gpulse.store.tsdb.request_builder import INFO_MS, BlockSeries, LayoutCache, RequestBuilder
from gpulse.store.tsdb.send_process import LogFollower
from gpulse.store.tsdb.write_request import format_labels, series_labels, split_series
from tests.unit.history_frames import BEGIN, Fleet, write_log


def names(parts: list[BlockSeries]) -> list[str]:
    """The series of parts, as people write them."""
    return [format_labels(series_labels(one)) for part in parts for one in split_series(part.series)]


def reader(directory: Path) -> RequestBuilder:
    """Requests of a head's log."""
    return RequestBuilder(
        LayoutCache(LogReader(directory / "log"), MetadataLookup(f"{directory}/metadata.sqlite")), {}
    )


def everything(directory: Path, after: int = 0) -> list[BlockSeries]:
    """All that a log has to send after a position."""
    tail = LogFollower(LogReader(directory / "log"), after)
    try:
        found = tail.take(1 << 60)
        return list(reader(directory).parts(found.entries)) if found else []
    finally:
        tail.close()


def test_a_log_is_read_up_to_what_is_on_disk(tmp_path: Path) -> None:
    """Not a record further, and from there on with the next one."""

    last = write_log(tmp_path, Fleet(), range(1, 3), range(30))
    tail = LogFollower(LogReader(tmp_path / "log"), 0)

    rounds = [tail.take(last - 2), tail.take(last - 2), tail.take(last), tail.take(last)]
    tail.close()

    assert [last - 2, None, last, None] == [found and found.last for found in rounds]
    assert last == sum(len(found.entries) for found in rounds if found)


def test_a_round_that_is_repeated_ends_where_it_did(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long it is; others end when they are long enough."""

    monkeypatch.setattr(tail_module, "_MAX_BATCH_BYTES", 2000)
    last = write_log(tmp_path, Fleet(), range(1, 3), range(60))
    tail = LogFollower(LogReader(tmp_path / "log"), 0)

    short = tail.take(last)
    assert short is not None
    assert short.last < last - 3
    assert not short.is_repeated
    long = tail.take(last, last - 1)
    tail.close()

    assert long is not None
    assert (last - 1, True) == (long.last, long.is_repeated)


def test_what_was_dropped_before_it_was_read_is_counted(tmp_path: Path) -> None:
    """Positions have no gaps, so that a gap is a loss."""

    with Log(tmp_path / "log", segment_bytes=200) as log:
        for _ in range(10):
            log.append(BATCH, FrameBatch(bytes(16), 1, 1, 0, 5_000_000, 0, bytes(100)).to_bytes())
        log.sync()
        tail = LogFollower(LogReader(tmp_path / "log"), 0)
        log.drop_before(6)
        found = tail.take(10)
        tail.close()

    assert found is not None
    assert (5, 5, 10) == (found.missing, len(found.entries), found.last)
    assert (5.0, 5.0) == (found.began, found.received)


def test_how_much_waits_is_told_in_bytes(tmp_path: Path) -> None:
    """Over all segments; nothing once everything was read."""

    with Log(tmp_path / "log", segment_bytes=300) as log:
        for _ in range(9):
            log.append(BATCH, FrameBatch(bytes(16), 1, 1, 0, 0, 0, bytes(100)).to_bytes())
        log.sync()
        size = log.size_bytes
    tail = LogFollower(LogReader(tmp_path / "log"), 0)
    before = tail.waiting_bytes
    tail.take(4)
    between = tail.waiting_bytes
    tail.take(9)
    after = tail.waiting_bytes
    tail.close()

    assert (size, 0) == (before, after)
    assert 0.4 * size < between < 0.7 * size


@pytest.mark.parametrize("has_metadata", [True, False])
def test_what_was_told_before_is_looked_up(tmp_path: Path, has_metadata: bool) -> None:
    """A reader that starts in the middle of a log uses the metadata; without metadata, it reads the log from the start."""

    fleet = Fleet()
    batches = [fleet.batch(1, second) for second in (1, 3)]
    facts = [
        LogEntry.of_fact("node", id=1, name="host-1", host="h", machine="m", time=BEGIN),
        *(LogEntry.of_fact("layout", id=str(n), text=t.decode()) for n, t in fleet.texts.items()),
        LogEntry.of_fact("run", run=batches[0].run.hex(), node=1, time=BEGIN, version="7.1"),
    ]
    with LocalStore(str(tmp_path), layouts=fleet.layouts) as archive:
        archive.commit([*facts, *(LogEntry.of_batch(batch, ()) for batch in batches)])
        last = archive.accepted

    if not has_metadata:
        for path in tmp_path.glob("metadata.sqlite*"):
            path.unlink()

    found = names(everything(tmp_path, last - 1))

    assert 13 + 3 == len(found)
    assert any("gpulse_gpu_power_watts{gpu='0'" in name and "node='host-1'" in name for name in found)
    assert any("gpulse_node_info" in name and "version='7.1'" in name for name in found)


def test_numbers_that_nobody_can_explain_are_passed_over(tmp_path: Path) -> None:
    """They are counted; what stands beside them is sent."""

    fleet = Fleet()
    write_log(tmp_path, fleet, range(1, 2), range(2), frames=2)
    strange = PackedFrame(BEGIN * 1_000_000, 1, (ColumnBlock(17, bytes(8)),)).to_bytes()
    late = PackedFrame((1 << 42) * 1_000_000, 1, ()).to_bytes()
    requests = reader(tmp_path)
    batches = [
        FrameBatch(bytes(16), 1, 1, 1, 0, 0, strange),
        FrameBatch(bytes(16), 1, 2, 1, 0, 0, b"nonsense"),
        FrameBatch(bytes(16), 1, 3, 1, 0, 0, late),
        fleet.batch(1, 5),
    ]

    parts = list(requests.parts([b"no fact", *batches]))

    assert 13 == sum(part.samples for part in parts if part.layout)
    assert requests.unreadable >= 2


def test_what_hardly_changes_is_told_now_and_then_and_when_it_changed(tmp_path: Path) -> None:
    """Every half minute, after another name was given, and when everything is to be told again."""

    fleet = Fleet()
    write_log(tmp_path, fleet, range(1, 2), range(2))
    requests = reader(tmp_path)
    renamed = encode_fact("node", id=1, name="other", host="h", machine="m", time=BEGIN)

    def info_series(entry: FrameBatch | bytes) -> list[str]:
        return [name for name in names(list(requests.parts([entry]))) if "node_info" in name]

    seconds = range(INFO_MS // 1000 * 2 + 2)
    assert [0, 30, 60] == [second for second in seconds if info_series(fleet.batch(1, second))]
    assert [] == info_series(fleet.batch(1, 62))
    requests.resend_info()
    assert 1 == len(info_series(fleet.batch(1, 62)))
    assert [] == info_series(renamed)
    parts = list(requests.parts([fleet.batch(1, 63)]))
    assert all("node='other'" in name for name in names(parts))
    assert any("node_info" in name for name in names(parts))


def test_a_node_that_makes_up_new_disks_without_end_gets_no_series_for_them(tmp_path: Path) -> None:
    """The first ones go on, and it is said whose others are left out."""

    with Log(tmp_path / "log") as log:
        log.sync()
    requests = reader(tmp_path)
    found: set[str] = set()
    list(requests.parts([encode_fact("node", id=1, name="n", host="h", machine="m", time=BEGIN)]))
    for number in range(30):
        packer = BlockPacker("disk")
        disks = [{"name": "sda"}, *({"name": f"made-up-{number}-{place}"} for place in range(40))]
        block, _ = packer.pack(disks, [({"read_bytes_total": 1}, {}) for _ in disks])
        frame = PackedFrame((BEGIN + number) * 1_000_000, 1, (block,)).to_bytes()
        fact = encode_fact("layout", id=str(block.layout), text=packer.text.decode())
        series = names(list(requests.parts([fact, FrameBatch(bytes(16), 1, number, 1, 0, 0, frame)])))
        assert any("disk='sda'" in name for name in series)
        found.update(series)

    assert MAX_EXPOSED_SUBJECTS + 1 == len(found)
    assert f"n has reported more than {MAX_EXPOSED_SUBJECTS} different items in scope disk" in (
        requests.over_limit or ""
    )


async def test_a_layout_is_not_forgotten_while_frames_of_it_wait_to_be_sent(tmp_path: Path) -> None:
    """A time-series database may be away for hours; a sending process that begins then finds what the numbers mean."""

    made, noted = Fleet(), Notebook()
    facts = [
        LogEntry.of_fact("node", id=1, name="host-1", host="h", machine="m", time=BEGIN),
        LogEntry.of_fact("node", id=2, name="host-2", host="h", machine="n", time=BEGIN),
    ]
    batches = [made.batch(1, 1), made.batch(2, 3)]
    layouts = [
        LogEntry.of_fact("layout", id=str(number), text=text.decode()) for number, text in made.texts.items()
    ]
    with LocalStore(str(tmp_path)) as archive:
        archive.layouts.update(made.layouts)
        archive.commit([*facts, *layouts])
        confirmed = archive.accepted
        archive.commit([LogEntry.of_batch(batch, ()) for batch in batches])
        reader = Reader()
        reader.confirmed = confirmed
        archive.follow_with(reader)
        fleet = HeadFleet(archive.nodes(), {}, archive.layouts)
        for batch in batches:
            fleet.used(list(split_packed_frames(batch.frames)), batch.received_us / 1e6)
        upkeep = Maintenance(archive, fleet, noted, RetentionRules(), now=lambda: BEGIN + 86_400.0)

        await upkeep._seal()
        assert BEGIN + 2 == archive.needed_since()
        assert [] == noted.facts

        reader.confirmed = archive.accepted
        await upkeep._seal()
        assert math.inf == archive.needed_since()
        assert ["forget"] == noted.facts


def test_what_is_forgotten_further_on_in_the_log_is_sent(tmp_path: Path) -> None:
    """The metadata of an earlier head no longer has it, but the log does."""

    fleet = Fleet()
    batches = [fleet.batch(node, 1) for node in (1, 2)]
    names_of = [
        LogEntry.of_fact("node", id=node, name=f"host-{node}", host="h", machine=f"m{node}", time=BEGIN)
        for node in (1, 2)
    ]
    layouts = [LogEntry.of_fact("layout", id=str(n), text=text.decode()) for n, text in fleet.texts.items()]
    other = LogEntry.of_fact("event", time=BEGIN, kind="other", node=None, detail={})
    with LocalStore(str(tmp_path), layouts=fleet.layouts) as archive:
        archive.commit([*names_of, *layouts])
        after = archive.accepted
        archive.commit([LogEntry.of_batch(batches[0], ()), other, LogEntry.of_batch(batches[1], ())])
        archive.commit([LogEntry.of_fact("forget", layouts=[str(number) for number in fleet.texts]), other])

    parts = everything(tmp_path, after)

    assert {1: 13, 2: 13} == {
        node: sum(part.samples for part in parts if part.layout and part.node == node) for node in (1, 2)
    }


class Reader:
    """Somebody who reads the log, and says how far."""

    confirmed = 0
    limit_bytes = 1 << 40
    waiting_bytes = 0

    def committed(self, first: int, step: MetadataUpdate) -> None:
        """Take in what was committed."""


class Notebook:
    """Where facts are written down."""

    def __init__(self) -> None:
        self.facts: list[str] = []

    def note(self, fact: str, **_: object) -> None:
        """Write a fact."""
        self.facts.append(fact)

    def event(self, kind: str, node: int | None, **detail: object) -> None:
        """Write down that something happened."""
