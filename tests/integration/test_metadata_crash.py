"""Metadata on real disks: writers that are killed in the middle of an update, disks that fill up or become read-only."""

from __future__ import annotations

import ctypes
import json
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gpulse.errors import DiskError
from gpulse.store.log.log import Log
from gpulse.store.log.reader import LogReader
from gpulse.store.log.record_payloads import BATCH, FACT, encode_fact
from gpulse.store.metadata import sqlite_file as metadata_file
from gpulse.store.metadata.local_metadata import Metadata, MetadataUpdate
from tests.queries import query
from tests.unit.metadata_records import RUN, batch, content, fact, node_fact, process

_PATIENCE_SECONDS = 60.0
_KILLS = 15
_RECORDS = 20_000

_WRITER = """
import itertools, os, random, sys
from gpulse.store.metadata import sqlite_file as metadata_file
from gpulse.store.metadata.local_metadata import Metadata
from gpulse.store.log.reader import LogReader

directory, local, seed = sys.argv[1:]
metadata_file.is_local = lambda _: local == "local"
chance = random.Random(int(seed))
metadata = Metadata(f"{directory}/metadata.sqlite")
os.write(1, b"applied %d\\n" % metadata.applied)
records = LogReader(f"{directory}/log").read(metadata.applied + 1)
while piece := list(itertools.islice(records, chance.randrange(1, 60))):
    metadata.replay(piece, at_once=chance.randrange(1, 40))
    os.write(1, b"applied %d\\n" % metadata.applied)
    if chance.random() < 0.1:
        os.write(1, b"durable %d\\n" % metadata.checkpoint())
"""


@contextmanager
def child(*arguments: str | Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that brings the metadata up to date; it ends with the block."""
    process = subprocess.Popen([sys.executable, "-c", _WRITER, *arguments], stdout=subprocess.PIPE)
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


def killed_after(directory: Path, local: str, seed: int, lines: int) -> list[int]:
    """The positions that a writer reported before kill -9 ended it somewhere after so many lines."""
    with child(directory, local, str(seed)) as writer:
        assert writer.stdout is not None
        said = [writer.stdout.readline() for _ in range(lines)]
        writer.send_signal(signal.SIGKILL)
        said += writer.stdout.readlines()
    return [int(line.split()[1]) for line in said if line.endswith(b"\n")]


def fill(log: Log) -> None:
    """Records of which each leaves one event that holds its position."""
    payloads: list[tuple[int, bytes]] = []
    for position in range(1, _RECORDS + 1):
        if position % 3:
            detail = {"n": position}
            fact = encode_fact("event", time=float(position), kind="x", node=1, detail=detail)
            payloads.append((FACT, fact))
        else:
            events = [{"event": "x", "n": position}, process(position % 50, name=str(position))]
            text = json.dumps(events).encode()
            payloads.append((BATCH, batch((float(position), text), run=RUN, first=position)))
    log.append_many(payloads)


@pytest.mark.parametrize("local", ["local", "shared"])
def test_metadata_survives_kills_in_the_middle_of_updates(tmp_path: Path, local: str) -> None:
    """It reaches at least what was reported, holds exactly what the log has up to there, and in the end everything."""
    with Log(tmp_path / "log") as log:
        fill(log)
    chance = random.Random(15)
    path = str(tmp_path / "metadata.sqlite")
    for seed in range(_KILLS):
        reported = killed_after(tmp_path, local, seed, chance.randrange(1, 25))
        with Metadata(path, read_only=True) as metadata:
            reached = metadata.applied
            events = metadata.events(query(start=0, end=1e9))
            last = metadata.runs()[RUN].last if reached >= 3 else 0
        assert reported == sorted(reported)
        assert reached >= max(reported, default=0)
        assert [*range(1, reached + 1)] == [event.detail["n"] for event in events]
        assert reached // 3 * 3 == last
    assert 0 < reached < _RECORDS

    records = list(LogReader(tmp_path / "log").read())
    with Metadata(path) as metadata, Metadata(str(tmp_path / "fresh.sqlite")) as fresh:
        assert _RECORDS - reached == metadata.replay(records)
        assert _RECORDS == fresh.replay(records)
        assert content(fresh) == content(metadata)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A filesystem of 1 MiB, where the machine lets us mount one."""
    libc = ctypes.CDLL(None, use_errno=True)
    target = tmp_path / "disk"
    target.mkdir()
    if libc.mount(b"tmpfs", os.fsencode(target), b"tmpfs", 0, b"size=1m"):
        pytest.skip(f"cannot mount a tmpfs here: {os.strerror(ctypes.get_errno())}")
    yield target
    assert 0 == libc.umount(os.fsencode(target))


def large(position: int) -> MetadataUpdate:
    """A step of some 20 kB."""
    details = [{"text": "x" * 1000, "number": [position, number]} for number in range(20)]
    return MetadataUpdate(
        position, [fact("event", time=1.0, kind="x", node=1, detail=detail) for detail in details]
    )


def fill_up(metadata: Metadata) -> None:
    """Apply until something gives way."""
    for _ in range(100):
        metadata.apply(large(metadata.applied + 1))


@pytest.mark.parametrize("local", [True, False])
def test_a_disk_that_is_full_and_then_is_not(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch, local: bool
) -> None:
    """Each refusal leaves the metadata as it was, and after somebody makes room it goes on without being opened again."""
    monkeypatch.setattr(metadata_file, "is_local", lambda _: local)
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(640 << 10))
    with Metadata(str(small_disk / "metadata.sqlite")) as metadata:
        with pytest.raises(DiskError, match="No space left") as caught:
            fill_up(metadata)
        assert caught.value.hint is not None
        before = content(metadata)
        for _ in range(3):
            with pytest.raises(DiskError, match="No space left"):
                metadata.apply(large(metadata.applied + 1))
            assert before == content(metadata)
        ballast.unlink()
        assert metadata.apply(large(metadata.applied + 1))
        assert metadata.applied * 20 == len(metadata.events(query(start=0, end=10)))
        assert metadata.applied == metadata.checkpoint()
        expected = content(metadata)
    with Metadata(str(small_disk / "metadata.sqlite")) as metadata:
        assert expected == content(metadata)


def test_metadata_is_not_created_on_a_full_disk(small_disk: Path) -> None:
    """It says so, and begins once there is room."""
    ballast = small_disk / "ballast"
    path = str(small_disk / "metadata.sqlite")
    with pytest.raises(OSError, match="No space left"):
        ballast.write_bytes(bytes(2 << 20))
    with pytest.raises(DiskError, match="cannot open"):
        Metadata(path)
    ballast.unlink()
    with Metadata(path) as metadata:
        assert metadata.apply(MetadataUpdate(1, [node_fact()]))


def test_a_filesystem_that_turned_read_only(small_disk: Path) -> None:
    """The metadata can be read, and opening it to write is refused with a reason."""
    libc = ctypes.CDLL(None, use_errno=True)
    path = str(small_disk / "metadata.sqlite")
    with Metadata(path) as metadata:
        metadata.apply(MetadataUpdate(1, [node_fact()]))
        expected = content(metadata)
    read_only_remount = 0x1 | 0x20
    assert 0 == libc.mount(None, os.fsencode(small_disk), None, read_only_remount, None)
    with pytest.raises(DiskError, match="Read-only file system") as caught:
        Metadata(path)
    assert caught.value.hint is not None
    with Metadata(path, read_only=True) as metadata:
        assert expected == content(metadata)
