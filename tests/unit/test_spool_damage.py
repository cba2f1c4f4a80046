"""Spools with flipped bits, cut ends and lost files: what is left is sent as it was, and the rest is named."""

from __future__ import annotations

import os
import random
import shutil
import time
from collections.abc import Iterator
from math import inf
from pathlib import Path
from typing import NamedTuple

import pytest

from gpulse.cluster.agent import spool_writer
from gpulse.cluster.agent.frame_buffer import FrameBuffer
from gpulse.cluster.agent.run_index import SpoolRange
from gpulse.cluster.agent.spool import LastFrameFile, SpoolReader, SyncedMark
from gpulse.cluster.agent.spool_writer import SpoolWriter
from gpulse.model.packed_columns import ColumnBlock, PackedFrame, layout_id
from gpulse.store.log.segment import SEGMENT_HEADER_BYTES, RecordScan, read_header

MUTATIONS = int(os.environ.get("GPULSE_MUTATIONS", "60"))
OLD, RUN = b"o" * 16, b"r" * 16
FRAMES = 250
TEXTS = [b"layout one", b"layout two"]


class Spooled(NamedTuple):
    """The state directory of an agent that has ended, and the frames that it took."""

    directory: Path
    frames: dict[int, bytes]


class Clock:
    """The clocks of an agent of the past."""

    def __init__(self, now_us: int) -> None:
        self.now_us = now_us
        self.time_ns = time.time_ns

    def monotonic(self) -> float:
        """Seconds."""
        return self.now_us / 1e6

    def monotonic_ns(self) -> int:
        """Nanoseconds."""
        return self.now_us * 1000


def make_spool(directory: Path, monkeypatch: pytest.MonkeyPatch, *, is_killed: bool) -> Spooled:
    """A spool of several segments, left by an agent that was killed or ended."""
    clock = Clock(time.monotonic_ns() // 1000 - FRAMES * 10_000)
    with monkeypatch.context() as patch:
        patch.setattr(spool_writer, "time", clock)
        return _make_spool(directory, clock, is_killed=is_killed)


def _make_spool(directory: Path, clock: Clock, *, is_killed: bool) -> Spooled:
    buffer = FrameBuffer(OLD, "boot", 10)
    writer = SpoolWriter(
        buffer, directory / "spool", limit_bytes=2 << 20, last_frame_file=directory / "memory"
    )
    writer._count_frames()
    frames = {}
    for number in range(1, FRAMES + 1):
        text = TEXTS[number // 100 % 2]
        numbers = number.to_bytes(2, "big") * 900
        clock.now_us += 10_000
        moment = clock.now_us
        packed = PackedFrame(moment + 10**15, moment, (ColumnBlock(layout_id(text), numbers),))
        assert number == buffer.add(packed, [text], 0.0)
        frames[number] = packed.to_bytes()
        if number % 20 == 0:
            writer._tick(clock.monotonic())
        if number % 60 == 0:
            assert writer._spool is not None
            writer._spool.log.sync()
    if is_killed:
        assert writer._spool is not None
        writer._write(writer._spool, inf)
    else:
        writer._end()
    writer._close()
    return Spooled(directory, frames)


def open_spool(directory: Path) -> tuple[SpoolWriter, FrameBuffer]:
    """The next agent, which has opened the spool."""
    buffer = FrameBuffer(RUN, "boot", 10)
    writer = SpoolWriter(
        buffer, directory / "spool", limit_bytes=2 << 20, last_frame_file=directory / "memory"
    )
    writer._count_frames()
    writer._locked(lambda: writer._open(1.0))
    assert writer.log is not None, writer._trouble
    return writer, buffer


def sent(writer: SpoolWriter, buffer: FrameBuffer) -> Iterator[tuple[int, bytes]]:
    """Send all frames of the old run, as a stream does."""
    reader = SpoolReader(lambda: writer.log)
    number = 0
    while ready := buffer.ready(OLD, number, 50, 1 << 20):
        assert isinstance(ready, SpoolRange)
        for frame in reader.read(ready, 50, 1 << 20):
            assert reader.texts[frame.layouts[0]] in TEXTS
            number = frame.sequence
            yield number, frame.data
    reader.close()


def mutate(spool: Path, chance: random.Random) -> str:
    """Damage a spool; what was done."""
    path = chance.choice(sorted(spool.glob("*.log")))
    text = bytearray(path.read_bytes())
    match chance.choice(("flip", "flip", "flip", "flips", "zeros", "cut", "lost")):
        case "flip":
            place = chance.randrange(len(text))
            text[place] ^= 1 << chance.randrange(8)
            what = f"flip at {place}"
        case "flips":
            for _ in range(5):
                text[chance.randrange(len(text))] ^= 1 << chance.randrange(8)
            what = "flips"
        case "zeros":
            place = chance.randrange(len(text)) // 4096 * 4096
            text[place : place + 4096] = bytes(len(text[place : place + 4096]))
            what = f"zeros at {place}"
        case "cut":
            del text[chance.randrange(len(text)) :]
            what = f"cut at {len(text)}"
        case _:
            path.unlink()
            return f"lost {path.name}"
    path.write_bytes(text)
    return f"{what} of {path.name}"


@pytest.mark.timeout(120 + MUTATIONS)
@pytest.mark.parametrize("is_killed", [True, False])
def test_damage_is_named_and_costs_only_what_it_touches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_killed: bool
) -> None:
    """Every frame that arrives is as it was taken; every other one is in a damaged part, or may be lost at the end."""
    seed = random.randrange(1 << 30)
    print("seed", seed)
    chance = random.Random(seed)
    clean = make_spool(tmp_path / "clean", monkeypatch, is_killed=is_killed)
    for round_number in range(MUTATIONS // 2):
        directory = tmp_path / "damaged"
        shutil.copytree(clean.directory, directory)
        what = f"seed {seed}, round {round_number}: {mutate(directory / 'spool', chance)}"
        writer, buffer = open_spool(directory)
        got = dict(sent(writer, buffer))

        assert all(clean.frames[number] == data for number, data in got.items()), what
        lost = clean.frames.keys() - got.keys()
        announced = {run.note.id: run for run in buffer.runs()}
        damage = [part for run in announced.values() for part in run.note.damaged]
        old = announced.get(OLD)
        if old is None:
            assert any(not part.first for part in damage), what
        else:
            last = max(old.note.last, old.note.acked)
            named = {number for part in damage for number in range(part.first, part.last + 1)}
            dropped = range(1, old.first_kept)  # the oldest segment is gone, as if for lack of space
            unnamed = {number for number in lost - named if number <= last and number not in dropped}
            assert not unnamed, what
            assert sum(number > last for number in lost) <= old.lost_at_most, what
            assert old.ended_badly or damage or lost <= set(dropped) != set(), what
            if "flip at" in what:
                assert len(lost) <= 1, what
        writer._close()
        shutil.rmtree(directory)


@pytest.mark.parametrize("is_killed", [True, False])
def test_a_spool_that_is_cut_between_two_records_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_killed: bool
) -> None:
    """What is left looks whole; but the spool knows how much of it was on disk, also after a reboot."""
    clean = make_spool(tmp_path, monkeypatch, is_killed=is_killed)
    (tmp_path / "memory").unlink(missing_ok=True)
    newest = max((tmp_path / "spool").glob("*.log"))
    header = read_header(str(tmp_path / "spool"), int(newest.stem))
    assert header is not None
    with newest.open("rb") as file:
        scan = RecordScan(file.fileno(), header.marker, SEGMENT_HEADER_BYTES, header.first)
        ends = [scan.offset for _ in scan]
    os.truncate(newest, ends[len(ends) // 2])

    writer, buffer = open_spool(tmp_path)
    found = dict(sent(writer, buffer))
    assert found.items() < clean.frames.items()
    old = buffer.runs()[0].note
    assert (OLD, [max(found) + 1]) == (old.id, [part.first for part in old.damaged])
    writer._close()


def test_a_mark_of_another_spool_or_a_torn_one_is_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is only a second witness."""
    clean = make_spool(tmp_path, monkeypatch, is_killed=False)
    mark = tmp_path / "spool" / "synced"
    whole = mark.read_bytes()
    for text in (whole[:-1], bytes(len(whole)), bytes(16) + whole[16:], b""):
        mark.write_bytes(text)
        assert (None, 0) == SyncedMark(str(mark.parent)).read()
    SyncedMark(str(mark.parent)).write(bytes(16), 10**6)
    writer, buffer = open_spool(tmp_path)
    assert clean.frames == dict(sent(writer, buffer))
    assert [(), ()] == [run.note.damaged for run in buffer.runs()]
    writer._close()


def test_an_undamaged_spool_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No damage, and no losses at the end."""
    clean = make_spool(tmp_path, monkeypatch, is_killed=False)
    writer, buffer = open_spool(tmp_path)
    assert clean.frames == dict(sent(writer, buffer))
    old, own = buffer.runs()
    assert (False, 0, (), ()) == (old.ended_badly, old.dropped, old.note.damaged, own.note.damaged)
    writer._close()


def test_frames_of_a_killed_agent_are_counted_on_a_full_disk(tmp_path: Path) -> None:
    """Frames that could not be written are lost with the agent: the next one knows how many."""
    buffer = FrameBuffer(OLD, "boot", 100)
    writer = SpoolWriter(buffer, tmp_path / "spool", last_frame_file=tmp_path / "memory")
    writer._count_frames()
    frame = PackedFrame(0, 0, (ColumnBlock(layout_id(TEXTS[0]), bytes(100)),))
    for number in range(100):
        buffer.add(frame, TEXTS, 0.0)
        if number < 11:
            writer._tick(number + 1.0)  # the disk is full from here on
    writer._close()

    writer, buffer = open_spool(tmp_path)
    assert (True, 89) == (buffer.runs()[0].ended_badly, buffer.runs()[0].lost_at_most)
    writer._close()


def test_the_numbers_of_frames_survive_their_agent(tmp_path: Path) -> None:
    """One run after another, up to the number of slots; a file of somebody else is refused."""
    file = LastFrameFile(tmp_path / "memory")
    for number in range(70):
        file.close(remove=False)
        file = LastFrameFile(tmp_path / "memory")
        file.begin(bytes([number + 1]) * 16)
        file.count(number * 10)
    found = file.read()
    assert 64 == len(found)
    assert 690 == found[bytes([70]) * 16]
    file.keep({bytes([70]) * 16, bytes([5]) * 16})
    assert 2 == len(file.read())
    file.close(remove=True)
    assert not (tmp_path / "memory").exists()
    (tmp_path / "memory").symlink_to(tmp_path / "other")
    with pytest.raises(OSError, match="symbolic link"):
        LastFrameFile(tmp_path / "memory")


@pytest.mark.parametrize("is_killed", [True, False])
@pytest.mark.parametrize("size", [2_801, 30_000, 100_000])
def test_the_bound_holds_for_frames_that_were_cut_off_with_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, *, is_killed: bool
) -> None:
    """Also for those that were written just after the note that says when the agent was alive."""
    clean = make_spool(tmp_path, monkeypatch, is_killed=is_killed)
    os.truncate(max((tmp_path / "spool").glob("*.log")), size)
    writer, buffer = open_spool(tmp_path)
    found = dict(sent(writer, buffer))
    old = buffer.runs()[0]
    writer._close()

    assert 0 < len(clean.frames) - max(found) <= old.lost_at_most
