"""The log among real processes: writers that are killed, readers beside them, disks that fill up."""

from __future__ import annotations

import ctypes
import os
import random
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest

from gpulse.errors import DiskError, LogError
from gpulse.store.log.log import Log
from gpulse.store.log.reader import LogReader

_PATIENCE_SECONDS = 60.0
_KILLS = 20
_END = 126
"""The kind of the record after which a reader may stop."""

_WRITER = """
import os, sys, threading
from gpulse.store.log.log import Log

def payload(position):
    return b"%d;" % position * (position * 7919 % 400 if position % 300 else 1_000_000)

def sync_forever():
    while True:
        os.write(1, b"durable %d\\n" % log.sync())

log = Log(sys.argv[1], segment_bytes=50_000)
os.write(1, b"open %d %d\\n" % (log.last, log.recovered))
threading.Thread(target=sync_forever, daemon=True).start()
while True:
    if log.last % 5:
        os.write(1, b"wrote %d\\n" % log.append(1, payload(log.last + 1)))
    else:
        batch = [(2, payload(position)) for position in range(log.last + 1, log.last + 8)]
        os.write(1, b"".join(b"wrote %d\\n" % position for position in log.append_many(batch)))
"""

_READER = """
import sys
from gpulse.store.log.reader import LogReader

seen = missed = 0
with LogReader(sys.argv[1]).follow() as cursor:
    print("reading", flush=True)
    while True:
        for position, kind, payload in cursor:
            assert position > seen, (position, seen)
            assert payload.startswith(b"%d;" % position), position
            assert payload == payload[:payload.index(b";") + 1] * payload.count(b";"), position
            missed += position - seen - 1
            seen = position
            if kind == 126:
                print("read", position, "missed", missed, flush=True)
                sys.exit()
"""


def payload(position: int) -> bytes:
    """What the writers put at a position: mostly little, now and then so much that kill -9 may come in the middle."""
    return b"%d;" % position * (position * 7919 % 400 if position % 300 else 1_000_000)


@contextmanager
def child(source: str, *arguments: str | Path) -> Iterator[subprocess.Popen[bytes]]:
    """A Python process that ends with the block."""
    process = subprocess.Popen([sys.executable, "-c", source, *arguments], stdout=subprocess.PIPE)
    guard = threading.Timer(_PATIENCE_SECONDS, process.kill)
    guard.start()
    try:
        yield process
    finally:
        guard.cancel()
        guard.join()
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def killed_after(directory: Path, lines: int) -> list[list[bytes]]:
    """What a writer said before kill -9 ended it somewhere after so many lines."""
    with child(_WRITER, directory) as process:
        assert process.stdout is not None
        said = [process.stdout.readline() for _ in range(lines)]
        process.send_signal(signal.SIGKILL)
        said += process.stdout.readlines()
    return [line.split() for line in said if line.endswith(b"\n")]


def test_what_a_killed_writer_reported_is_there(tmp_path: Path) -> None:
    """Every position, exactly once and in order, over twenty writers one after the other."""
    chance = random.Random(20)
    there = 0
    for _ in range(_KILLS):
        said = killed_after(tmp_path, chance.randrange(1, 1500))
        assert [b"open", b"%d" % there] == said[0][:2]
        positions = [int(words[1]) for words in said if words[0] == b"wrote"]
        durable = [int(words[1]) for words in said if words[0] == b"durable"]
        assert [*range(there + 1, there + 1 + len(positions))] == positions
        assert durable == sorted(durable)

        records = list(LogReader(tmp_path).read(there + 1))
        assert [*range(there + 1, there + 1 + len(records))] == [record.position for record in records]
        assert all(payload(record.position) == record.payload for record in records)
        there += len(records)
        assert there >= max([0, *positions, *durable])
    with Log(tmp_path) as log:
        assert there == log.last
        assert [*range(1, there + 1)] == [record.position for record in log.read()]


def numbered(position: int) -> bytes:
    """What the reader expects at a position."""
    return b"%d;" % position * (1 + position * 7919 % 400)


@contextmanager
def synced(log: Log) -> Iterator[None]:
    """Another thread syncs all the time, and never takes a promise back."""
    done = threading.Event()
    durable: list[int] = []

    def sync_forever() -> None:
        while not done.is_set():
            durable.append(log.sync())

    thread = threading.Thread(target=sync_forever)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
    assert durable == sorted(durable)


@contextmanager
def follower(directory: Path) -> Iterator[IO[bytes]]:
    """A reader in another process, which is at work already; gives what it says in the end."""
    with child(_READER, directory) as process:
        assert process.stdout is not None
        assert b"reading\n" == process.stdout.readline()
        yield process.stdout


def test_a_reader_in_another_process_sees_whole_records_only(tmp_path: Path) -> None:
    """It follows over many segments while they are written, alone and in batches, synced by another thread."""
    with Log(tmp_path, segment_bytes=200_000) as log, follower(tmp_path) as said:
        with synced(log):
            while log.last < 20_000:
                log.append(1, numbered(log.last + 1))
                log.append_many((2, numbered(log.last + number)) for number in range(1, 10))
        log.append(_END, numbered(log.last + 1))
        assert b"read %d missed 0\n" % log.last == said.readline()
        assert len(list(tmp_path.glob("*.log"))) > 10


def test_a_reader_in_another_process_outlives_what_is_dropped(tmp_path: Path) -> None:
    """It misses records of a bounded log that is faster than it, and nothing else goes wrong."""
    with Log(tmp_path, limit_bytes=64 << 10) as log, follower(tmp_path) as said:
        while log.last < 6_000:
            log.append(1, numbered(log.last + 1))
        log.append(_END, numbered(log.last + 1))
        words = said.readline().split()
        assert [b"read", b"%d" % log.last, b"missed"] == words[:3]
        assert int(words[3]) <= log.dropped_records


def test_a_reader_in_another_process_passes_over_failed_writes(tmp_path: Path) -> None:
    """Halves of records that came and went leave no trace."""
    with Log(tmp_path) as log, follower(tmp_path) as said:
        for _ in range(300):
            log.append(1, numbered(log.last + 1))
            with files_of_at_most(log.size_bytes + 700), pytest.raises(DiskError, match="File too large"):
                log.append(1, b"lost" * 1000)
        log.append(_END, numbered(log.last + 1))
        assert b"read %d missed 0\n" % log.last == said.readline()


def test_threads_share_a_log(tmp_path: Path) -> None:
    """Each gets positions of its own, in its own order, while others sync, read and drop."""
    with Log(tmp_path, segment_bytes=20_000) as log:
        written: dict[int, bytes] = {}
        failures: list[BaseException] = []

        def write(name: int) -> None:
            try:
                for number in range(500):
                    text = b"%d-%d" % (name, number) * 20
                    written[log.append(name, text)] = text
                    if number % 50 == 0:
                        log.sync()
                        log.drop_before(log.last - 1000)
                        assert all(record.payload for record in log.read(log.last - 100))
            except BaseException as error:  # noqa: BLE001 -- told in the main thread
                failures.append(error)

        threads = [threading.Thread(target=write, args=(name,)) for name in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [] == failures
        assert [*range(1, 2001)] == sorted(written)
        assert 2000 == log.sync()
        assert {position: written[position] for position in range(log.first, 2001)} == {
            record.position: record.payload for record in log.read()
        }


def test_the_second_writer_is_told_who_the_first_is(tmp_path: Path) -> None:
    """Once that process is gone, even by kill -9, the log can be opened."""
    with child(_WRITER, tmp_path) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith(b"open")
        with pytest.raises(LogError, match=f"process {process.pid} is writing") as caught:
            Log(tmp_path)
        assert caught.value.hint is not None
        assert list(LogReader(tmp_path).read()) is not None
    with Log(tmp_path) as log:
        assert log.append(1, b"mine") == log.last


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """No file of this process may grow beyond a size; Python ignores the signal, so that writing says EFBIG."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_file_that_may_not_grow_and_then_may(tmp_path: Path) -> None:
    """A record that fits by half leaves nothing, smaller ones still go in, and all is well once there is room."""
    with Log(tmp_path) as log, LogReader(tmp_path).follow() as cursor:
        kept = [(log.append(1, bytes(1000)), 1000)]
        with files_of_at_most(5000):
            with pytest.raises(DiskError, match="File too large") as caught:
                log.append(1, bytes(6000))
            with pytest.raises(DiskError, match="File too large"):
                log.append_many([(1, bytes(900))] * 10)
            kept.append((log.append(1, bytes(100)), 100))
            assert 2 == log.sync()
        assert caught.value.hint is not None
        assert "ulimit -f" in caught.value.hint
        kept.append((log.append(1, bytes(6000)), 6000))
        assert [(1, 1000), (2, 100), (3, 6000)] == kept
        assert kept == [(record.position, len(record.payload)) for record in log.read()]
        assert kept == [(record.position, len(record.payload)) for record in cursor]
        assert log.size_bytes == (tmp_path / "0000000000000001.log").stat().st_size
    with Log(tmp_path) as log:
        assert 0 == log.recovered
        assert 3 == log.last


def test_a_segment_that_may_not_be_begun_and_then_may(tmp_path: Path) -> None:
    """The header of a new segment needs room as well."""
    with Log(tmp_path, segment_bytes=200) as log:
        log.append(1, bytes(100))
        with files_of_at_most(30), pytest.raises(DiskError, match=r"create .*0002\.log: File too large"):
            log.append(1, bytes(100))
        assert 2 == log.append(1, bytes(100))
        assert [1, 2] == [record.position for record in log.read()]


def fill_up(log: Log) -> None:
    """Append until something gives way."""
    for _ in range(10_000):
        log.append(1, numbered(log.last + 1))


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


def test_a_disk_that_is_full_and_then_is_not(small_disk: Path) -> None:
    """Each refusal leaves the log as it was, and after somebody makes room it goes on without being opened again."""
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(128 << 10))
    with Log(small_disk / "log", segment_bytes=20_000) as log:
        with pytest.raises(DiskError, match="No space left") as caught:
            fill_up(log)
        full_at = log.last
        assert caught.value.hint is not None
        for _ in range(3):
            with pytest.raises(DiskError, match="No space left"):
                log.append_many([(1, bytes(5000))] * 8)
        assert full_at == log.last == log.sync()
        ballast.unlink()
        for _ in range(50):
            log.append(1, numbered(log.last + 1))
        assert full_at + 50 == log.last
        expected = [numbered(position) for position in range(1, log.last + 1)]
        assert expected == [record.payload for record in log.read()]
    with Log(small_disk / "log") as log:
        assert 0 == log.recovered
        assert expected == [record.payload for record in log.read()]


def test_a_full_disk_is_relieved_by_dropping(small_disk: Path) -> None:
    """Removing what is no longer needed works on a full disk and makes the room that is missing."""
    with Log(small_disk / "log", segment_bytes=20_000) as log:
        with pytest.raises(DiskError, match="No space left"):
            fill_up(log)
        log.drop_before(log.last)
        assert log.append(1, bytes(1000)) == log.last
        assert [*range(log.first, log.last + 1)] == [record.position for record in log.read()]


def test_a_log_is_not_begun_on_a_full_disk(small_disk: Path) -> None:
    """It says so, leaves nothing half made, and begins once there is room."""
    ballast = small_disk / "ballast"
    (small_disk / "log").mkdir()
    with pytest.raises(OSError, match="No space left"):
        ballast.write_bytes(bytes(1 << 20))
    with pytest.raises(DiskError, match="No space left"):
        Log(small_disk / "log")
    assert [] == list((small_disk / "log").glob("*.log"))
    ballast.unlink()
    with Log(small_disk / "log") as log:
        assert 1 == log.append(1, b"")


def test_a_filesystem_that_turns_read_only(small_disk: Path) -> None:
    """As after an I/O error: reading goes on, opening to write is refused with a reason."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Log(small_disk / "log") as log:
        log.append(1, b"kept")
    read_only_remount = 0x1 | 0x20
    assert 0 == libc.mount(None, os.fsencode(small_disk), None, read_only_remount, None)
    with pytest.raises(DiskError, match="Read-only file system") as caught:
        Log(small_disk / "log")
    assert caught.value.hint is not None
    assert [b"kept"] == [record.payload for record in LogReader(small_disk / "log").read()]
