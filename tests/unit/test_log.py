"""The append-only log: what goes in comes out, in order, whatever happens to the end of it; damage is never passed over."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from zlib import crc32

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gpulse.errors import ClosedError, DiskError, LogError
from gpulse.store.log import repair
from gpulse.store.log.log import Log
from gpulse.store.log.reader import LogReader
from gpulse.store.log.segment import (
    DAMAGED,
    MAX_WRITE_BYTES,
    SEGMENT_HEADER_BYTES,
    SEGMENT_VERSION,
    LogRecord,
    RecordScan,
    SegmentHeader,
    encode_record,
    open_segment,
    read_header,
    read_headers,
)

LIMIT = 64 << 10


def fill(directory: Path, count: int = 30, *, size: int = 100, segment_bytes: int = 1024) -> list[LogRecord]:
    """A log of several segments, and what is in it."""
    with Log(directory, segment_bytes=segment_bytes) as log:
        for number in range(count):
            if number == count - 1:
                log.sync()  # the others were relied on
            log.append(number % 127, number.to_bytes(2, "big") * (size // 2))
        return list(log.read())


def segments(directory: Path) -> list[Path]:
    """The files of a log, oldest first."""
    return sorted(directory.glob("*.log"))


def flip(path: Path, offset: int) -> None:
    """Damage one byte; a negative offset counts from the end."""
    text = bytearray(path.read_bytes())
    text[offset] ^= 0x40
    path.write_bytes(text)


def test_records_come_out_as_they_went_in(tmp_path: Path) -> None:
    """Positions count from 1, and kinds and payloads of every size are kept."""
    payloads = [b"", b"a", bytes(1000), os.urandom(3 << 20), b"end"]
    with Log(tmp_path / "log") as log:
        positions = [log.append(number, payload) for number, payload in enumerate(payloads)]

        expected = [LogRecord(number + 1, number, payload) for number, payload in enumerate(payloads)]
        assert [1, 2, 3, 4, 5] == positions
        assert expected == list(log.read())
        assert expected == list(LogReader(tmp_path / "log").read())


def test_a_batch_is_one_run_of_positions(tmp_path: Path) -> None:
    """It lies in one segment even when that gets longer than usual."""
    with Log(tmp_path, segment_bytes=1024) as log:
        log.append(0, b"before")
        positions = log.append_many((1, bytes(100)) for _ in range(50))
        log.append(2, b"after")

        assert range(2, 52) == positions
        assert [*range(1, 53)] == [record.position for record in log.read()]
        assert 3 == len(segments(tmp_path))


def test_an_empty_log_has_no_positions(tmp_path: Path) -> None:
    """The first is one more than the last, for writers and readers alike, and an empty batch changes nothing."""
    with Log(tmp_path) as log:
        assert range(1, 1) == log.append_many(())
        assert (1, 0, SEGMENT_HEADER_BYTES) == (log.first, log.last, log.size_bytes)
        assert [] == list(log.read())
        reader = LogReader(tmp_path)
        assert (1, 0, SEGMENT_HEADER_BYTES) == (reader.first, reader.last, reader.size_bytes)


def test_positions_go_on_after_opening_again(tmp_path: Path) -> None:
    """Nothing is cut off a log that was closed, or whose process just ended."""
    written = fill(tmp_path, 30)
    with Log(tmp_path) as log:
        assert 0 == log.recovered
        assert 31 == log.append(7, b"next")
        assert [*written, LogRecord(31, 7, b"next")] == list(log.read())


def test_reading_begins_at_any_position(tmp_path: Path) -> None:
    """One before the first is the first, and one after the last is nothing."""
    written = fill(tmp_path, 30)
    with Log(tmp_path) as log:
        for start in (-1, 0, 1, 2, 8, 29, 30, 31, 1000):
            assert written[max(0, start - 1) :] == list(log.read(start))
            assert written[max(0, start - 1) :] == list(LogReader(tmp_path).read(start))


def test_a_new_segment_is_begun_by_size_and_by_age(tmp_path: Path) -> None:
    """An empty segment is as old as it likes."""
    now = 1000.0
    with Log(tmp_path, segment_bytes=1000, segment_seconds=60, clock=lambda: now) as log:
        now = 2000.0
        log.append(1, b"x")
        assert 1 == len(segments(tmp_path))
        log.append(1, b"x")
        assert 2 == len(segments(tmp_path))
        log.append(1, bytes(2000))
        assert 3 == len(segments(tmp_path))
        log.append(1, bytes(2000))
        assert 4 == len(segments(tmp_path))


def test_whole_segments_are_dropped_and_the_newest_stays(tmp_path: Path) -> None:
    """What is at or after the position is always kept, and positions go on even when all else is gone."""
    written = fill(tmp_path, 30)
    with Log(tmp_path) as log:
        for position in (0, 1, 5, 17, 30):
            log.drop_before(position)
            assert log.first <= max(position, 1)
            assert written[log.first - 1 :] == list(log.read())
        log.drop_before(1000)
        assert 1 == len(segments(tmp_path))
        assert 0 == log.dropped_records
        log.sync()
    with Log(tmp_path) as log:
        assert 31 == log.append(1, b"")


def test_a_bounded_log_drops_its_oldest_segments(tmp_path: Path) -> None:
    """It never gets longer than its limit, and counts what it dropped."""
    with Log(tmp_path, limit_bytes=LIMIT) as log:
        for number in range(2000):
            log.append(1, bytes(number % 700))
            assert log.size_bytes <= LIMIT
        assert sum(path.stat().st_size for path in segments(tmp_path)) == log.size_bytes
        assert log.size_bytes > LIMIT * 3 // 4
        assert log.first - 1 == log.dropped_records > 0
        assert [*range(log.first, 2001)] == [record.position for record in log.read()]


def test_a_record_as_large_as_the_limit_replaces_everything(tmp_path: Path) -> None:
    """And a larger one is refused before anything is dropped for it."""
    with Log(tmp_path, limit_bytes=LIMIT) as log:
        log.append(1, bytes(30_000))
        log.append(1, bytes(30_000))
        with pytest.raises(ValueError, match="the maximum is"):
            log.append(1, bytes(LIMIT))
        assert 1 == log.first
        log.append(1, bytes(LIMIT - SEGMENT_HEADER_BYTES - 25))
        assert (3, 3, 2, LIMIT) == (log.first, log.last, log.dropped_records, log.size_bytes)


@pytest.mark.parametrize(("kind", "size"), [(-1, 0), (256, 0), (1, MAX_WRITE_BYTES)])
def test_impossible_records_are_refused(tmp_path: Path, kind: int, size: int) -> None:
    """The log goes on as if nothing had been asked."""
    with Log(tmp_path) as log:
        with pytest.raises(ValueError, match=r"kind|the maximum is"):
            log.append(kind, bytes(size))
        assert 1 == log.append(1, b"fine")


def test_a_limit_too_small_to_be_useful_is_refused(tmp_path: Path) -> None:
    """It would hold no record of any size worth keeping."""
    with pytest.raises(ValueError, match="limit_bytes"):
        Log(tmp_path, limit_bytes=100)


def test_other_people_cannot_read_it(tmp_path: Path) -> None:
    """The directory is 0700 and its files 0600."""
    with Log(tmp_path / "a" / "log"):
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "a").rglob("*")}
    assert {"log": 0o700, "lock": 0o600, "0000000000000001.log": 0o600} == modes


def test_files_of_other_names_are_left_alone(tmp_path: Path) -> None:
    """They are neither read nor removed."""
    names = ["1.log", "0000000000000002.log.bak", "notes.txt", "\N{ARABIC-INDIC DIGIT ONE}" * 16 + ".log"]
    for name in names:
        (tmp_path / name).write_bytes(b"mine")
    written = fill(tmp_path)
    with Log(tmp_path) as log:
        log.drop_before(1000)
        assert written[log.first - 1 :] == list(log.read())
    assert [b"mine"] * 4 == [(tmp_path / name).read_bytes() for name in names]


def test_a_second_writer_is_told_who_the_first_is(tmp_path: Path) -> None:
    """And may write once the first has closed the log."""
    with Log(tmp_path), pytest.raises(LogError, match=f"process {os.getpid()} is writing"):
        Log(tmp_path)
    Log(tmp_path).close()


def test_a_closed_log_refuses_everything(tmp_path: Path) -> None:
    """Closing twice is no error."""
    log = Log(tmp_path)
    log.close()
    log.close()
    for use in (lambda: log.append(1, b""), log.sync, lambda: log.drop_before(1)):
        with pytest.raises(ClosedError):
            use()


def test_sync_tells_what_is_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others append while it waits for the disk, it promises only what was there before, and nothing new costs nothing."""
    calls = []
    with Log(tmp_path) as log:
        log.append(1, b"")
        real = os.fdatasync

        def slow(file: int) -> None:
            calls.append(log.append(1, b"meanwhile"))  # would wait forever for a lock that is held
            real(file)

        monkeypatch.setattr(os, "fdatasync", slow)
        assert 1 == log.sync() == log.durable
        monkeypatch.setattr(os, "fdatasync", real)
        assert 2 == log.sync() == log.durable
        monkeypatch.setattr(os, "fdatasync", slow)
        assert 2 == log.sync()
        monkeypatch.undo()
    assert [2] == calls


def test_a_segment_begun_while_syncing_does_no_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The append that begins it waits, since it would close the file that is being synced."""
    with Log(tmp_path, segment_bytes=100) as log:
        log.append(1, bytes(50))
        real = os.fdatasync
        appending = threading.Thread(target=log.append, args=(1, bytes(50)))

        def slow(file: int) -> None:
            monkeypatch.setattr(os, "fdatasync", real)
            appending.start()
            appending.join(0.05)
            assert appending.is_alive()
            real(file)

        monkeypatch.setattr(os, "fdatasync", slow)
        assert 1 == log.sync()
        appending.join()
        assert 2 == log.sync()
        assert 2 == len(segments(tmp_path))


def test_a_sync_that_fails_is_final(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel has forgotten what it could not write, so nothing more is promised until the log is opened again."""
    log = Log(tmp_path)
    log.append(1, b"a")

    def broken(_: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fdatasync", broken)
        with pytest.raises(DiskError, match="Input/output error"):
            log.sync()
    for use in (log.sync, lambda: log.append(1, b"b")):
        with pytest.raises(DiskError, match="Input/output error") as caught:
            use()
        assert caught.value.hint is not None
        assert "reopen the log" in caught.value.hint
    log.close()
    with Log(tmp_path) as log:
        assert 2 == log.append(1, b"b")


def test_a_write_that_cannot_be_taken_back_is_cut_off_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until that works nothing is appended after it."""

    sizes = iter((100,))

    def half(file: int, data: bytes, offset: int) -> int:
        for size in sizes:
            return real(file, data[:size], offset)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def read_only(*_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    real = os.pwrite
    with Log(tmp_path) as log:
        log.append(1, b"first")
        with monkeypatch.context() as patched:
            patched.setattr(os, "pwrite", half)
            patched.setattr(os, "ftruncate", read_only)
            with pytest.raises(DiskError, match="No space left"):
                log.append_many([(1, b"lost" * 100)] * 4)
            with pytest.raises(DiskError, match="Read-only"):
                log.append(1, b"lost")
        assert 2 == log.append(2, b"second")
        assert [b"first", b"second"] == [record.payload for record in log.read()]
    with Log(tmp_path) as log:
        assert (0, 2) == (log.recovered, log.last)


def test_a_segment_that_cannot_be_begun_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The records before it stay, and appending again begins it again."""

    def full(*_: object) -> int:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    with Log(tmp_path, segment_bytes=100) as log:
        log.append(1, bytes(50))
        with monkeypatch.context() as patched:
            patched.setattr(os, "pwrite", full)
            for _ in range(2):
                with pytest.raises(DiskError, match=r"create .*0002\.log: Disk quota exceeded"):
                    log.append(1, bytes(50))
        assert 1 == len(segments(tmp_path))
        assert 2 == log.append(1, bytes(50))
    with Log(tmp_path) as log:
        assert [1, 2] == [record.position for record in log.read()]


def test_a_directory_that_cannot_be_made_is_a_disk_error(tmp_path: Path) -> None:
    """So is a log that is not there, for a reader."""
    (tmp_path / "file").touch()
    with pytest.raises(DiskError, match="Not a directory"):
        Log(tmp_path / "file" / "log")
    with pytest.raises(DiskError, match="No such file"):
        list(LogReader(tmp_path / "none").read())


def test_a_cursor_gives_what_is_new(tmp_path: Path) -> None:
    """Over the ends of segments, beside the writer and as an outsider would."""
    with (
        Log(tmp_path, segment_bytes=300) as log,
        log.follow() as inside,
        LogReader(tmp_path).follow(3) as outside,
    ):
        seen_inside: list[LogRecord] = []
        seen_outside: list[LogRecord] = []
        for number in range(40):
            log.append(1, bytes(number * 10))
            seen_inside += inside
            seen_outside += outside
            assert number + 1 == len(seen_inside) == LogReader(tmp_path).last
        assert seen_inside[2:] == seen_outside
        assert [] == list(inside)


def test_a_cursor_in_a_dropped_segment_goes_on_with_the_oldest(tmp_path: Path) -> None:
    """The gap in the positions says how many it missed."""
    with Log(tmp_path, limit_bytes=LIMIT) as log:
        with log.follow() as inside, LogReader(tmp_path).follow() as outside:
            log.append(1, b"first")
            assert 1 == len(list(inside)) == len(list(outside))
            log.append_many([(1, bytes(100))] * 10)
            for _ in range(1000):
                log.append(1, bytes(200))
            expected = [*range(2, 12), *range(log.first, log.last + 1)]
            seen = [record.position for record in inside]
            assert expected[-1] == seen[-1]
            assert seen == [record.position for record in outside]
            assert seen == sorted(set(seen))
            assert [*range(log.first, log.last + 1)] == seen[-(log.last - log.first + 1) :]
        assert log.first == LogReader(tmp_path).first


TAILS = {
    "half a head": b"\x01\x02\x03",
    "zeros": bytes(5000),
    "noise": bytes(range(256)) * 20,
}


@pytest.mark.parametrize("tail", TAILS.values(), ids=TAILS.keys())
def test_an_unfinished_end_is_cut_off(tmp_path: Path, tail: bytes) -> None:
    """It is counted, readers stop before it, and the next record takes its place."""
    written = fill(tmp_path)
    with segments(tmp_path)[-1].open("ab") as file:
        file.write(tail)

    assert written == list(LogReader(tmp_path).read())
    with Log(tmp_path) as log:
        assert len(tail) == log.recovered
        assert 31 == log.append(1, b"next")
        assert [*written, LogRecord(31, 1, b"next")] == list(log.read())
    with Log(tmp_path) as log:
        assert 0 == log.recovered


def test_the_last_record_may_be_torn_anywhere(tmp_path: Path) -> None:
    """Cut to any length, or with zeros for the rest, the records before it are whole."""
    written = fill(tmp_path / "log", 3, segment_bytes=1 << 20)
    path = segments(tmp_path / "log")[-1]
    whole = path.read_bytes()
    begin = SEGMENT_HEADER_BYTES + 2 * 125
    for cut in range(begin, len(whole)):
        for rest in (b"", bytes(len(whole) - cut)):
            path.write_bytes(whole[:cut] + rest)
            if whole == path.read_bytes():
                continue
            assert written[:2] == list(LogReader(tmp_path / "log").read())
            with Log(tmp_path / "log") as log:
                assert path.stat().st_size == begin
                assert len(whole[:cut] + rest) - begin == log.recovered
                assert written[:2] == list(log.read())


@pytest.mark.parametrize("left", [b"", b"\x89gplog", bytes(10), bytes(4096)])
def test_a_segment_whose_making_was_cut_short_is_removed(tmp_path: Path, left: bytes) -> None:
    """The log goes on in the one before it, or anew when there is none."""
    (tmp_path / "0000000000000001.log").write_bytes(left)
    assert [] == list(LogReader(tmp_path).read())
    written = fill(tmp_path, segment_bytes=1 << 20)
    (tmp_path / "0000000000000002.log").write_bytes(left)

    assert written == list(LogReader(tmp_path).read())
    assert (1, 30) == (LogReader(tmp_path).first, LogReader(tmp_path).last)
    with Log(tmp_path) as log:
        assert len(left) == log.recovered
        assert 31 == log.append(1, b"")
        assert 1 == len(segments(tmp_path))


def zero_header(directory: Path) -> None:
    """The second segment, emptied."""
    segments(directory)[1].write_bytes(bytes(1000))


def lone_zero_header(directory: Path) -> None:
    """The newest segment emptied, and all before it gone."""
    *others, newest = segments(directory)
    newest.write_bytes(b"")
    for path in others:
        path.unlink()


def missing(directory: Path) -> None:
    """One segment between others removed."""
    segments(directory)[1].unlink()


def foreign(directory: Path) -> None:
    """The newest segment replaced by one of another log."""
    fill(directory / "other")
    shutil.copy(segments(directory / "other")[-1], segments(directory)[-1])


def renamed(directory: Path) -> None:
    """The newest segment under the next number."""
    newest = segments(directory)[-1]
    shutil.copy(newest, newest.with_name(f"{int(newest.stem) + 1:016d}.log"))


def shortened(directory: Path) -> None:
    """A record cut off an older segment, so that what is left looks whole."""
    os.truncate(segments(directory)[1], SEGMENT_HEADER_BYTES + 2 * 125)


def newer(directory: Path) -> None:
    """A version of the format that is not known yet."""
    path = segments(directory)[-1]
    text = bytearray(path.read_bytes())
    text[8] = 3
    text[60:64] = crc32(text[:60]).to_bytes(4, "little")
    path.write_bytes(text)


def alien(directory: Path) -> None:
    """Somebody else's file under one of our names."""
    segments(directory)[-1].write_bytes(b"hello")


def test_a_hole_in_what_was_not_synced_is_cut_off(tmp_path: Path) -> None:
    """A power cut may keep later pages and lose earlier ones; nobody was told that these records are safe."""
    with Log(tmp_path) as log:
        log.append(1, b"synced" * 1000)
        log.sync()
        size = segments(tmp_path)[0].stat().st_size
        log.append_many([(1, bytes([number]) * 3000) for number in range(10)])
        text = bytearray(segments(tmp_path)[0].read_bytes())
    text[size + 4096 : size + 8192] = bytes(4096)
    segments(tmp_path)[0].write_bytes(text)
    assert [1, 2] == [record.position for record in LogReader(tmp_path).read()]

    with Log(tmp_path) as log:
        assert log.recovered > 4096
        assert [b"synced" * 1000, bytes(3000)] == [record.payload for record in log.read()]
        assert 3 == log.append(1, b"goes on")


def test_a_search_for_damage_does_not_stop_appends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The log is read without its locks; a repair then reads only the segments that are damaged."""
    directory = tmp_path / "log"
    opened: list[int] = []

    def append_meanwhile(path: str, number: int) -> tuple[int, SegmentHeader | None]:
        opened.append(number)
        log.append(1, b"meanwhile")
        return open_segment(path, number)

    with Log(directory, segment_bytes=500) as log:
        for number in range(12):
            log.append(1, bytes([number]) * 100)
        log.sync()
        damaged, whole = [int(path.stem) for path in segments(directory)[1:3]]
        flip(segments(directory)[1], 100)
        with monkeypatch.context() as patch:
            patch.setattr(repair, "open_segment", append_meanwhile)
            assert {damaged} == log.find_damaged_segments()
        assert whole in opened
        scanned: list[int] = []

        def count_scan(file: int, marker: bytes, offset: int, position: int) -> RecordScan:
            scanned.append(position)
            return RecordScan(file, marker, offset, position)

        monkeypatch.setattr(repair, "RecordScan", count_scan)
        (lost,) = log.repair({damaged})
        assert {4} == set(scanned)
        assert (4, 4) == (lost.first, lost.last)
        assert set() == log.find_damaged_segments()
        assert log.last == len(list(log.read()))


@pytest.mark.parametrize("keep_unsynced", [False, True])
def test_damage_does_not_keep_what_follows_a_hole_in_what_was_not_synced(
    tmp_path: Path, *, keep_unsynced: bool
) -> None:
    """The synced record that is damaged is replaced; what a power cut left after a hole is cut off, unless all is wanted."""
    directory = tmp_path / "log"
    with Log(directory) as log:
        for payload in (b"first" * 100, b"second" * 100):
            log.append(1, payload)
            log.sync()
        size = segments(directory)[0].stat().st_size
        log.append_many([(1, bytes([number]) * 3000) for number in range(10)])
        text = bytearray(segments(directory)[0].read_bytes())
    text[SEGMENT_HEADER_BYTES + 100] ^= 1
    text[size + 4096 : size + 8192] = bytes(4096)
    segments(directory)[0].write_bytes(text)

    with Log(directory, repairs=True, keep_unsynced=keep_unsynced) as log:
        kinds = [(record.position, record.kind == DAMAGED) for record in log.read()]
        whole = [(1, True), (2, False), (3, False)]
        hole = [(4, True), (5, True), *((position, False) for position in range(6, 13))]
        assert [*whole, *(hole if keep_unsynced else [])] == kinds
        assert [(1, 1), (4, 5)][: 1 + keep_unsynced] == [(lost.first, lost.last) for lost in log.lost]
        assert kinds[-1][0] + 1 == log.append(1, b"goes on")
    with Log(directory) as log:
        assert b"goes on" == list(log.read())[-1].payload


def test_segments_of_an_earlier_version_are_read_and_not_continued(tmp_path: Path) -> None:
    """Version 1 does not say what was synced, so that any valid record after an invalid one shows damage."""
    with Log(tmp_path) as log:
        log.append_many([(1, b"one"), (1, b"two"), (1, b"three")])
    header = read_headers(str(tmp_path))[0]._replace(version=1)
    records = [encode_record(header.marker, place, 1, text) for place, text in ((1, b"one"), (2, b"two"))]
    path = segments(tmp_path)[0]
    path.write_bytes(header.encode() + b"".join(piece for record in records for piece in record))

    with Log(tmp_path) as log:
        log.append(1, b"new")
        assert [b"one", b"two", b"new"] == [record.payload for record in log.read()]
        assert [1, SEGMENT_VERSION] == [one.version for one in read_headers(str(tmp_path))]
    segments(tmp_path)[1].unlink()
    flip(path, SEGMENT_HEADER_BYTES + 26)
    with pytest.raises(LogError, match="a valid record follows"):
        Log(tmp_path)


@pytest.mark.parametrize(
    ("damage", "names"),
    [
        (zero_header, r"0002\.log is damaged at byte 0"),
        (lone_zero_header, r"0005\.log is damaged at byte 0"),
        (missing, r"0002\.log is missing"),
        (foreign, r"0005\.log is damaged at byte 0: the segment belongs to another log"),
        (renamed, r"0006\.log is damaged at byte 0: the file was renamed: it contains segment 5"),
        (shortened, r"0002\.log is damaged at byte 314"),
        (newer, r"0005\.log has log format 3"),
        (alien, r"0005\.log is damaged at byte 0"),
        (lambda directory: flip(segments(directory)[0], 40), r"0001\.log is damaged at byte 0"),
        (lambda directory: flip(segments(directory)[-1], 20), r"0005\.log is damaged at byte 0"),
        (lambda directory: flip(segments(directory)[-1], 100), r"0005\.log is damaged at byte 64"),
    ],
)  # fmt: skip
def test_damage_is_refused_when_a_log_is_opened(tmp_path: Path, damage: object, names: str) -> None:
    """The error names the file and the place, and the hint what to do; no file is changed."""
    assert callable(damage)
    written = fill(tmp_path)
    damage(tmp_path)
    before = {path: path.read_bytes() for path in segments(tmp_path)}
    with pytest.raises(LogError, match=names) as caught:
        Log(tmp_path)

    assert caught.value.exit_code == 1
    assert caught.value.hint is not None
    assert before == {path: path.read_bytes() for path in segments(tmp_path)}
    seen: list[LogRecord] = []
    if damage is lone_zero_header:
        return  # to a reader, it may just be about to be written
    with pytest.raises(LogError):
        seen.extend(LogReader(tmp_path).read())
    assert written[: len(seen)] == seen


@pytest.mark.parametrize("offset", [70, 120, 500, -1])
def test_damage_in_an_older_segment_is_found_by_reading_it(tmp_path: Path, offset: int) -> None:
    """What comes before it is given first."""
    written = fill(tmp_path)
    flip(segments(tmp_path)[1], offset)
    for log in (Log(tmp_path), LogReader(tmp_path)):
        seen: list[LogRecord] = []
        with pytest.raises(LogError, match=r"0002\.log is damaged at byte"):
            seen.extend(log.read())
        assert 7 <= len(seen) < 14
        assert written[: len(seen)] == seen
        if isinstance(log, Log):
            log.close()


def test_damage_to_the_last_record_is_found_by_its_own_writer(tmp_path: Path) -> None:
    """For it that is no unfinished write: it knows that the record was whole."""
    with Log(tmp_path) as log:
        log.append(1, b"one")
        log.append(1, b"two")
        flip(segments(tmp_path)[0], -1)
        with pytest.raises(LogError, match="damaged at byte 92"):
            list(log.read())


def test_a_payload_cannot_pass_for_a_record(tmp_path: Path) -> None:
    """A torn record full of what looks like records of another log is torn all the same."""
    stolen = b"".join(encode_record(b"abcd", 2, 1, b"evil")) * 10
    with Log(tmp_path) as log:
        log.append(1, b"good")
        log.append(1, stolen)
    os.truncate(segments(tmp_path)[0], segments(tmp_path)[0].stat().st_size - 1)
    with Log(tmp_path) as log:
        assert [b"good"] == [record.payload for record in log.read()]
        assert len(stolen) + 24 == log.recovered


def test_a_length_beyond_the_limit_is_not_believed(tmp_path: Path) -> None:
    """Even with the right checksum nobody allocates for it."""
    Log(tmp_path).close()
    header = read_header(str(tmp_path), 1)
    assert header is not None
    head = b"".join(encode_record(header.marker, 1, 1, bytes(MAX_WRITE_BYTES + 1))[:2])
    with segments(tmp_path)[0].open("ab") as file:
        file.write(head)
        file.truncate(MAX_WRITE_BYTES * 4)
    with Log(tmp_path) as log:
        assert MAX_WRITE_BYTES * 4 - SEGMENT_HEADER_BYTES == log.recovered


def test_a_scan_reads_records_larger_than_its_buffer(tmp_path: Path) -> None:
    """Records of all sizes around a megabyte come out whole."""
    sizes = [(1 << 20) + delta for delta in (-26, -25, -24, -1, 0, 1)] + [5 << 20]
    with Log(tmp_path) as log:
        log.append_many((1, bytes(size)) for size in sizes)
        assert sizes == [len(record.payload) for record in log.read()]


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, bytes], list[LogRecord]]:
    """A log of four segments as bytes, and what is in it."""
    directory = tmp_path_factory.mktemp("pristine")
    written = fill(directory, 12, size=40, segment_bytes=300)
    return {path.name: path.read_bytes() for path in segments(directory)}, written


@st.composite
def damages(draw: st.DrawFn, text: bytes) -> bytes:
    """The same bytes with one thing wrong."""
    begin = draw(st.integers(0, len(text) - 1))
    end = draw(st.integers(begin + 1, min(len(text), begin + 200)))
    match draw(st.sampled_from(["flip", "cut", "end", "zero", "noise", "double", "move"])):
        case "flip":
            return text[:begin] + bytes([text[begin] ^ draw(st.integers(1, 255))]) + text[begin + 1 :]
        case "cut":
            return text[:begin] + text[end:]
        case "end":
            return text[:begin]
        case "zero":
            return text[:begin] + bytes(end - begin) + text[end:]
        case "noise":
            return text[:begin] + draw(st.binary(min_size=1, max_size=100)) + text[begin:]
        case "double":
            record = SEGMENT_HEADER_BYTES + begin % 5 * 65
            return text[: record + 65] + text[record : record + 65] + text[record + 65 :]
        case _:
            record = SEGMENT_HEADER_BYTES + begin % 3 * 65
            return (
                text[:record]
                + text[record + 65 : record + 130]
                + text[record : record + 65]
                + text[record + 130 :]
            )


@pytest.mark.slow
@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_damage_ever_gives_wrong_records(
    pristine: tuple[dict[str, bytes], list[LogRecord]], data: st.DataObject
) -> None:
    """What comes out is what went in up to the damage, and then an error or a report; readers and writers agree."""
    files, written = pristine
    name = data.draw(st.sampled_from(sorted(files)))
    text = data.draw(damages(files[name]))
    newest = name == max(files)
    with tempfile.TemporaryDirectory() as directory:
        for other, content in files.items():
            Path(directory, other).write_bytes(text if other == name else content)
        seen: list[LogRecord] = []
        refused = exhausts(LogReader(directory).read(), seen)
        assert written[: len(seen)] == seen
        kept: list[LogRecord] = []
        recovered = 0
        try:
            with Log(directory) as log:
                recovered = log.recovered
                stopped = exhausts(log.read(), kept)
        except LogError:
            stopped = True
        assert written[: len(kept)] == kept
        if text == files[name]:
            assert written == seen == kept
        elif newest and not stopped:
            at_a_boundary = files[name].startswith(text) and (len(text) - SEGMENT_HEADER_BYTES) % 65 == 0
            assert recovered or at_a_boundary or not text
            assert kept == seen
        else:
            assert stopped
            assert refused or newest


@pytest.mark.slow
@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_repaired_log_has_everything_that_is_not_damaged(
    pristine: tuple[dict[str, bytes], list[LogRecord]], data: st.DataObject
) -> None:
    """Every record is the one that was written, or a replacement; the log can be written and read on as before."""
    files, written = pristine
    name = data.draw(st.sampled_from(sorted(files)))
    text = data.draw(
        damages(files[name]) if name == min(files) else st.one_of(damages(files[name]), st.none())
    )
    with tempfile.TemporaryDirectory() as parent:
        directory = Path(parent, "log")
        directory.mkdir()
        for other, content in files.items():
            if other != name or text is not None:
                (directory / other).write_bytes(text if other == name and text is not None else content)
        with Log(directory, repairs=True, written=len(written)) as log:
            if exhausts(log.read(), []):
                log.repair()
            kept = list(log.read())
            lost = [record for record in kept if record.kind == DAMAGED]
            was_oldest = name == min(files)
            assert list(range(kept[0].position, len(written) + 1)) == [record.position for record in kept]
            assert was_oldest or kept[0].position == 1
            assert [] == [
                record for record in kept if record.kind != DAMAGED and record != written[record.position - 1]
            ]
            assert len(lost) <= len(files[name]) // 65
            assert bool(lost) <= bool(log.lost)
            if text != files[name]:
                assert log.lost
            assert len(written) + 1 == log.append(1, b"next")
            log.sync()
            copies = [Path(found.copy).read_bytes() for found in log.lost if found.copy]
            is_kept = text in (None, files[name]) or text in copies or log.recovered
            assert is_kept or len(text or b"") < SEGMENT_HEADER_BYTES
        with Log(directory) as log:
            assert [*kept, LogRecord(len(written) + 1, 1, b"next")] == list(log.read())
        assert len(written) + 1 == LogReader(directory).last


def exhausts(records: Iterator[LogRecord], into: list[LogRecord]) -> bool:
    """Whether reading ends with an error; what came before it is kept."""
    try:
        into.extend(records)
    except LogError:
        return True
    return False


class LogMachine(RuleBasedStateMachine):
    """Does everything a caller can do, beside a model that is a list."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.mkdtemp()
        self.model: list[tuple[int, bytes]] = []
        self.limit: int | None = None
        self.first_at_open = 1
        self.dropped_by_hand = 0
        self.log: Log
        self.now = 0.0

    @initialize(limit=st.sampled_from([None, LIMIT]))
    def begin(self, limit: int | None) -> None:
        """A log with a limit or without."""
        self.limit = limit
        self.log = Log(self.directory, segment_bytes=1000, limit_bytes=limit, clock=lambda: self.now)
        self.cursor = LogReader(self.directory).follow()
        self.followed = 0

    def teardown(self) -> None:
        """Leave nothing."""
        self.log.close()
        self.cursor.close()
        shutil.rmtree(self.directory)

    @rule(kind=st.integers(0, 126), size=st.integers(0, 3000), fill=st.integers(0, 255))
    def append(self, kind: int, size: int, fill: int) -> None:
        """One record."""
        payload = bytes([fill]) * size
        assert len(self.model) + 1 == self.log.append(kind, payload)
        self.model.append((kind, payload))

    @rule(sizes=st.lists(st.integers(0, 8000), max_size=7))
    def append_many(self, sizes: list[int]) -> None:
        """Several, which may be more than a segment."""
        before = len(self.model)
        self.model += [(size % 127, bytes([size % 251]) * size) for size in sizes]
        assert range(before + 1, len(self.model) + 1) == self.log.append_many(self.model[before:])

    @rule()
    def sync(self) -> None:
        """All of it is durable."""
        assert len(self.model) == self.log.sync()

    @rule(seconds=st.floats(-10, 4000))
    def wait(self, seconds: float) -> None:
        """Clocks run, and sometimes backwards."""
        self.now += seconds

    @rule(back=st.integers(0, 30))
    def drop_before(self, back: int) -> None:
        """What is at or after the position stays."""
        position = len(self.model) - back
        before = self.log.first
        self.log.drop_before(position)
        assert before <= self.log.first <= max(before, position)
        self.dropped_by_hand += self.log.first - before

    @rule(torn=st.binary(max_size=100))
    def reopen(self, torn: bytes) -> None:
        """After a crash that left half a record."""
        self.log.close()
        with segments(Path(self.directory))[-1].open("ab") as file:
            file.write(torn)
        self.log = Log(self.directory, segment_bytes=1000, limit_bytes=self.limit, clock=lambda: self.now)
        assert len(torn) == self.log.recovered
        self.first_at_open = self.log.first
        self.dropped_by_hand = 0

    @rule(share=st.floats(0, 1), zeros=st.integers(0, 5000))
    def lose_power(self, share: float, zeros: int) -> None:
        """What was not synced is lost from anywhere on, perhaps with zeros in its place; what was synced is not."""
        durable = self.log.durable
        header = self.log._end.header
        self.log.close()
        self.cursor.close()
        path = segments(Path(self.directory))[-1]
        synced = (
            sum(25 + len(payload) for _, payload in self.model[header.first - 1 : durable])
            + SEGMENT_HEADER_BYTES
        )
        os.truncate(path, synced + int((path.stat().st_size - synced) * share))
        os.truncate(path, path.stat().st_size + zeros)
        self.log = Log(self.directory, segment_bytes=1000, limit_bytes=self.limit, clock=lambda: self.now)
        assert durable <= self.log.last <= len(self.model)
        del self.model[self.log.last :]
        self.first_at_open = self.log.first
        self.dropped_by_hand = 0
        self.cursor = LogReader(self.directory).follow(self.log.first)
        self.followed = self.log.first - 1

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def read_from(self, data: st.DataObject) -> None:
        """From any position."""
        start = data.draw(st.integers(0, len(self.model) + 1))
        self.check(list(self.log.read(start)), max(start, self.log.first))

    @rule()
    def follow(self) -> None:
        """A cursor that was opened long ago gives each record once, without those that were dropped."""
        seen = list(self.cursor)
        positions = [record.position for record in seen]
        assert positions == sorted(set(positions))
        assert not positions or positions[0] > self.followed
        for position, kind, payload in seen:
            assert self.model[position - 1] == (kind, payload)
        missed = set(range(max(self.followed + 1, self.log.first), len(self.model) + 1)) - set(positions)
        assert not missed
        self.followed = max([self.followed, *positions])

    def check(self, seen: list[LogRecord], first: int) -> None:
        """Compare with the model from a position on."""
        expected = [LogRecord(first + index, *record) for index, record in enumerate(self.model[first - 1 :])]
        assert expected == seen

    @invariant()
    def holds_the_model(self) -> None:
        """All that was not dropped is there, for writer and reader, and the numbers agree with the disk."""
        if not hasattr(self, "log"):
            return
        self.check(list(self.log.read()), self.log.first)
        reader = LogReader(self.directory)
        assert (self.log.first, self.log.last) == (reader.first, reader.last)
        assert len(self.model) == self.log.last >= self.log.durable
        assert self.log.size_bytes == reader.size_bytes
        assert self.limit is None or self.log.size_bytes <= self.limit
        assert self.log.first - self.first_at_open == self.log.dropped_records + self.dropped_by_hand


LogMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestLogMachine = pytest.mark.slow(LogMachine.TestCase)
