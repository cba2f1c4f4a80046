"""The writer on disks that are full, read-only, damaged or gone, without its threads."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpulse.cluster.agent.frame_buffer import FrameBuffer
from gpulse.cluster.agent.run_index import AgentRunState, RunIndex, SpoolRange
from gpulse.cluster.agent.spool import SpoolReader
from gpulse.cluster.agent.spool_writer import SpoolWriter
from gpulse.errors import DiskError
from gpulse.model.packed_columns import ColumnBlock, PackedFrame, layout_id
from gpulse.store.log.log import Log

RUN = b"r" * 16
TEXT = b"a layout"


def fill(buffer: FrameBuffer, count: int, taken: float, size: int = 2000) -> None:
    """Take frames."""
    for _ in range(count):
        buffer.add(PackedFrame(0, 0, (ColumnBlock(layout_id(TEXT), bytes(size)),)), [TEXT], taken)


def step(writer: SpoolWriter, now: float) -> None:
    """One turn of its thread."""
    writer._retry_at = 0.0
    writer._locked(lambda: writer._tick(now))


def is_open(writer: SpoolWriter) -> bool:
    """Whether there is a spool."""
    return writer.log is not None


def let_go(writer: SpoolWriter) -> None:
    """Close its files."""
    if writer._spool is not None:
        writer._spool.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A filesystem of 256 KiB, where the machine lets us mount one."""
    libc = ctypes.CDLL(None, use_errno=True)
    target = tmp_path / "disk"
    target.mkdir()
    if libc.mount(b"tmpfs", os.fsencode(target), b"tmpfs", 0, b"size=256k"):
        pytest.skip(f"cannot mount a tmpfs here: {os.strerror(ctypes.get_errno())}")
    yield target
    assert 0 == libc.umount(os.fsencode(target))


def test_a_disk_that_is_full_and_then_is_not(small_disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is said once that it is full and once that it no longer is; nothing is lost while memory has room."""

    buffer = FrameBuffer(RUN, "b", 1000)
    writer = SpoolWriter(buffer, small_disk / "spool", limit_bytes=1 << 20)
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(128 << 10))
    for now in range(10):
        fill(buffer, 10, float(now))
        step(writer, now + 1.0)
    ballast.unlink()
    step(writer, 20.0)
    fill(buffer, 1, 20.0)
    said = [record.getMessage() for record in caplog.records]
    assert 1 == sum("only in memory" in text and "No space left" in text for text in said)
    buffer.acknowledge(RUN, 60)
    for now in range(30, 50):
        step(writer, float(now))
    said = [record.getMessage() for record in caplog.records]
    assert 1 == sum("works again" in text for text in said)
    assert 0 == buffer.dropped
    assert 0 == len(buffer.due(100.0, 10)[0])
    let_go(writer)


def test_frames_are_on_disk_within_a_second(tmp_path: Path) -> None:
    """A frame that was taken just after a turn of the thread is written by a turn less than a second later."""

    buffer = FrameBuffer(RUN, "b", 1000)
    writer = SpoolWriter(buffer, tmp_path / "spool")
    now, taken = 10.0, 10.001
    step(writer, now)
    waits = writer.wait_seconds(now)
    fill(buffer, 3, taken)
    while (now := now + waits) < taken + 1.0:
        step(writer, now)
        waits = writer.wait_seconds(now)
    assert ([], 0) == buffer.due(99.0, 10)
    let_go(writer)


def test_frames_taken_in_quick_succession_are_written_together(tmp_path: Path) -> None:
    """Twenty frames a second need a few turns of the thread a second, not twenty."""

    buffer = FrameBuffer(RUN, "b", 50)
    writer = SpoolWriter(buffer, tmp_path / "spool")
    due, turns = 10.0, 0
    for number in range(100):
        now = 10.0 + number * 0.05
        fill(buffer, 1, now)
        if now >= due:
            turns += 1
            step(writer, now)
            due = now + writer.wait_seconds(now)
    assert turns < 30
    let_go(writer)


def test_a_directory_that_cannot_be_made_and_then_can(tmp_path: Path) -> None:
    """The spool begins as soon as there is a place for it, with all that memory still has."""

    (tmp_path / "file").write_text("")
    buffer = FrameBuffer(RUN, "b", 1000)
    writer = SpoolWriter(buffer, tmp_path / "file" / "spool")
    fill(buffer, 5, 0.0)
    step(writer, 1.0)
    assert not is_open(writer)
    (tmp_path / "file").unlink()
    step(writer, 2.0)
    assert is_open(writer)
    assert ([], 0) == buffer.due(9.0, 10)
    let_go(writer)


def test_a_log_that_failed_to_sync_is_opened_again(tmp_path: Path) -> None:
    """What was written stays known, and what comes later goes on after it."""

    buffer = FrameBuffer(RUN, "b", 1000, max_frames=2)
    writer = SpoolWriter(buffer, tmp_path / "spool")
    fill(buffer, 2, 0.0)
    step(writer, 1.0)
    first = writer.log
    assert first is not None
    first._fail(OSError(5, "Input/output error"))
    fill(buffer, 2, 1.0)
    step(writer, 2.0)
    assert not is_open(writer)
    step(writer, 3.0)
    assert is_open(writer)
    piece = buffer.ready(RUN, 0, 10, 10**6)
    assert isinstance(piece, SpoolRange)
    reader = SpoolReader(lambda: writer.log)
    assert [1, 2] == [frame.sequence for frame in reader.read(piece, 10, 10**6)]
    assert 0 == buffer.dropped
    reader.close()
    let_go(writer)


def test_what_is_acknowledged_leaves_the_disk(tmp_path: Path) -> None:
    """Segments go as soon as nothing in them is needed."""

    buffer = FrameBuffer(RUN, "b", 1000)
    writer = SpoolWriter(buffer, tmp_path / "spool", limit_bytes=8 << 20)
    for now in range(8):
        fill(buffer, 200, float(now))
        step(writer, now + 1.0)
    assert 3 <= len(list((tmp_path / "spool").glob("*.log")))
    buffer.acknowledge(RUN, 1600)
    step(writer, 20.0)
    assert 1 == len(list((tmp_path / "spool").glob("*.log")))
    let_go(writer)


def test_threads_end_and_leave_an_end_marker(tmp_path: Path) -> None:
    """All that was left is on disk, and the next writer finds a run that ended well."""

    buffer = FrameBuffer(RUN, "b", 1000)
    writer = SpoolWriter(buffer, tmp_path / "spool")
    writer.start()
    fill(buffer, 3, 1e18)
    assert writer.finish(10.0)
    later = FrameBuffer(b"x" * 16, "b", 1000)
    writer = SpoolWriter(later, tmp_path / "spool")
    step(writer, 1.0)
    old = later.runs()[0]
    assert (RUN, 1, 3, False, 0) == (
        old.note.id,
        old.first_kept,
        old.note.last,
        old.ended_badly,
        old.dropped,
    )
    let_go(writer)


@pytest.mark.parametrize("is_broken", [False, True])
def test_a_full_disk_with_frames_of_an_earlier_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_broken: bool
) -> None:
    """They can be sent, each once and none said to be missing, however often the spool must be opened again."""

    earlier = SpoolWriter(FrameBuffer(RUN, "b", 1000), tmp_path / "spool")
    fill(earlier._buffer, 5, 0.0)
    step(earlier, 1.0)
    let_go(earlier)

    def is_full(_: Log, data: bytes, count: int) -> None:
        raise DiskError(f"cannot write {len(data)} bytes, {count} records: No space left on device")

    def cannot_sync(_: Log) -> None:
        raise DiskError("Input/output error")

    buffer = FrameBuffer(b"x" * 16, "b", 1000)
    fill(buffer, 2, 0.0)
    found: list[bool] = []
    writer = SpoolWriter(buffer, tmp_path / "spool", found=lambda: found.append(True))
    with monkeypatch.context() as patch:
        patch.setattr(Log, "_write", is_full)
        if is_broken:
            patch.setattr(Log, "sync", cannot_sync)
        for now in (1.0, 2.0, 3.0):
            step(writer, now)
            assert is_broken is not is_open(writer)
            assert [(RUN, 1, 0), (b"x" * 16, 1, 0)] == [
                (run.note.id, run.first_kept, run.dropped) for run in buffer.runs()
            ]
    step(writer, 4.0)

    assert [True] == found
    assert ([], 0) == buffer.due(9.0, 10)
    piece = buffer.ready(RUN, 0, 10, 10**6)
    assert isinstance(piece, SpoolRange)
    reader = SpoolReader(lambda: writer.log)
    assert [1, 2, 3, 4, 5] == [frame.sequence for frame in reader.read(piece, 10, 10**6)]
    assert buffer.ready(RUN, 5, 10, 10**6) is None
    buffer.acknowledge(RUN, 5)
    assert 1 == buffer.forget_finished_runs([RUN])
    assert 0 == buffer.dropped
    reader.close()
    let_go(writer)


def test_what_is_adopted_twice_is_there_once() -> None:
    """Without what was acknowledged in between."""

    found, buffer = RunIndex(), FrameBuffer(b"x" * 16, "b", 1000)
    found.begin(AgentRunState(RUN, "b", 1000))
    found.spooled(1, RUN, 1, 5)
    for acked in (2, 3):
        buffer.adopt(found)
        buffer.acknowledge(RUN, acked)
        old = buffer.runs()[0]
        assert (acked + 1, 0) == (old.first_kept, old.dropped)
