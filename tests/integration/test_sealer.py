"""The sealing process among real processes: killed at random moments, restarted, orphaned."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

from gpulse.errors import ClosedError, DiskError, GpulseError, LogError
from gpulse.model.packed_columns import split_packed_frames
from gpulse.store.damage import add_checksum, strip_checksum
from gpulse.store.history.duckdb_query import SealedHistory
from gpulse.store.history.reader import HistoryReader
from gpulse.store.history.recent_frames import RecentFrames
from gpulse.store.history.segments import read_segments
from gpulse.store.log.log import Log
from gpulse.store.log.reader import LogReader
from gpulse.store.log.record_payloads import BATCH, FACT, FrameBatch, encode_fact
from gpulse.store.seal_client import SealClient
from tests.queries import query
from tests.unit.history_frames import BEGIN, GPUS, Fleet, power, write_log

_PATIENCE_SECONDS = 60.0
_KILLS = 5
_NODES = range(1, 4)


@contextmanager
def killer(sealer: SealClient, chance: random.Random) -> Iterator[list[int]]:
    """Kills the sealing process with SIGKILL at random moments until the block ends."""
    over = threading.Event()
    killed: list[int] = []

    def kill() -> None:
        while not over.wait(chance.uniform(0.0, 0.5)):
            pid = sealer.pid
            if pid is not None:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    killed.append(pid)

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        yield killed
    finally:
        over.set()
        thread.join()


def recent_after(data_dir: Path, fleet: Fleet, position: int) -> RecentFrames:
    """What a head has in memory when it starts: everything in the log after what is sealed."""
    recent = RecentFrames(fleet.layouts)
    for record in LogReader(data_dir / "log").read(position + 1):
        if record.kind == BATCH:
            recent.add(record.position, FrameBatch.from_bytes(record.payload))
    return recent


def check_everything(samples: HistoryReader, seconds: int) -> None:
    """Every sample of every run is there exactly once, in order, and has its own value."""
    found: dict[tuple[int, str, int], list[tuple[int, float]]] = {}
    for part in samples.scan(query("gpu", ["power_watts"], start=0, end=BEGIN * 2)):
        for place, run, sequence, value in zip(
            part.series.tolist(),
            part.runs.tolist(),
            part.sequences.tolist(),
            part.values["power_watts"].tolist(),
            strict=True,
        ):
            found.setdefault((*part.keys[place], run), []).append((sequence, value))
    assert len(_NODES) * GPUS == len(found)
    for (node, subject, _), rows in found.items():
        gpu = int(subject.rpartition("-")[2])
        assert [*range(1, seconds + 1)] == [sequence for sequence, _ in rows]
        wanted = [power(node, gpu, second) for second in range(seconds)]
        assert np.allclose(wanted, [value for _, value in rows], atol=1e-9)


@pytest.mark.slow
def test_every_frame_is_there_once_however_often_the_sealer_is_killed(tmp_path: Path) -> None:
    """Frames are in history and memory together exactly once, whatever the sealing process was doing when it died."""
    chance = random.Random(4)
    fleet = Fleet()
    seconds = kills = 0
    with closing(SealClient(tmp_path)) as sealer, closing(SealedHistory(tmp_path)) as history:
        while kills < _KILLS:
            more = chance.randrange(60, 400)
            last = write_log(tmp_path, fleet, _NODES, range(seconds, seconds + more))
            seconds += more
            recent = recent_after(tmp_path, fleet, history.refresh())
            with killer(sealer, chance) as killed, suppress(GpulseError):
                sealer.seal(last)
                sealer.compact()
            kills += len(killed)
            position = history.refresh()
            recent.drop_through(position)
            check_everything(HistoryReader(history, recent), seconds)
        assert last == sealer.seal(last).position
        while sealer.compact():
            pass
        history.refresh()
        check_everything(HistoryReader(history, RecentFrames({})), seconds)
    names = sorted(os.listdir(tmp_path / "history"))
    assert not [name for name in names if name.startswith(".")]


def test_questions_are_answered_rightly_while_segments_change_under_them(tmp_path: Path) -> None:
    """A query gives the same points whether it comes before, during or after sealing and merging."""
    fleet = Fleet()
    seconds = 4000
    over = threading.Event()
    last = write_log(tmp_path, fleet, _NODES, range(seconds), frames=100)
    with closing(SealClient(tmp_path)) as sealer, closing(SealedHistory(tmp_path)) as history:
        recent = recent_after(tmp_path, fleet, 0)
        samples = HistoryReader(history, recent)
        counts: set[int] = set()

        def ask() -> None:
            while not over.is_set():
                found = samples.series(query("gpu", "power_watts", start=0, end=BEGIN * 2, nodes=[2]))
                counts.add(sum(len(series.times) for series in found))

        thread = threading.Thread(target=ask)
        thread.start()
        try:
            for position in range(last // 5, last + 1, last // 5):
                sealer.seal(position)
                recent.drop_through(history.refresh())
            sealer.seal(last)
            recent.drop_through(history.refresh())
            assert sealer.compact()
        finally:
            over.set()
            thread.join()
        assert {seconds * GPUS} == counts
        check_everything(samples, seconds)
        assert 0 == recent.bytes


def test_a_sealer_that_died_is_started_again(tmp_path: Path) -> None:
    """A killed process costs nothing but time: the next request starts another one."""
    fleet = Fleet()
    last = write_log(tmp_path, fleet, _NODES, range(30))
    with closing(SealClient(tmp_path)) as sealer:
        assert 0 == sealer.start()
        pid = sealer.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        assert last == sealer.seal(last).position
        assert pid != sealer.pid
        assert ((),) == (sealer.seal(last).segments,)


def test_a_closed_sealer_says_so(tmp_path: Path) -> None:
    """After close() nothing is started any more."""
    sealer = SealClient(tmp_path)
    sealer.start()
    sealer.close()
    with pytest.raises(ClosedError):
        sealer.seal(1)


def test_a_sealer_ends_with_its_parent(tmp_path: Path) -> None:
    """A head that was killed leaves no sealing process behind, so that the next head finds the directory free."""
    source = """
import sys, time
from gpulse.store.seal_client import SealClient
sealer = SealClient(sys.argv[1])
sealer.start()
print(sealer.pid, flush=True)
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", source, tmp_path], stdout=subprocess.PIPE) as head:
        assert head.stdout is not None
        pid = int(head.stdout.readline())
        head.kill()
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while _is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not _is_alive(pid)


def _is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_only_what_is_in_the_log_can_be_sealed(tmp_path: Path) -> None:
    """A position beyond the log's end is refused, and the process goes on."""
    fleet = Fleet()
    last = write_log(tmp_path, fleet, _NODES, range(30))
    with closing(SealClient(tmp_path)) as sealer:
        with pytest.raises(LogError, match="ends at"):
            sealer.seal(last + 10)
        assert last == sealer.seal(last).position


def test_a_segment_of_a_newer_format_is_refused_by_name(tmp_path: Path) -> None:
    """Neither the sealing process nor a reader goes on as if a segment were not there."""
    fleet = Fleet()
    last = write_log(tmp_path, fleet, _NODES, range(30))
    with closing(SealClient(tmp_path)) as sealer:
        name = sealer.seal(last).segments[0]
    meta = tmp_path / "history" / name / "meta.json"
    document = strip_checksum(meta.read_bytes())[0].replace(b'"format":1', b'"format":2')
    meta.write_bytes(add_checksum(document))
    with closing(SealClient(tmp_path)) as sealer, pytest.raises(LogError, match=f"{name} has format 2"):
        sealer.start()
    with pytest.raises(LogError, match=f"{name} has format 2"):
        SealedHistory(tmp_path)


def test_another_log_is_refused(tmp_path: Path) -> None:
    """A history does not go on with a log that it was not made from."""
    fleet = Fleet()
    last = write_log(tmp_path, fleet, _NODES, range(30))
    with closing(SealClient(tmp_path)) as sealer:
        sealer.seal(last)
    os.rename(tmp_path / "log", tmp_path / "old")
    write_log(tmp_path, fleet, _NODES, range(30))
    with closing(SealClient(tmp_path)) as sealer, pytest.raises(LogError, match="does not belong to the log"):
        sealer.start()


def test_a_full_disk_is_told_and_sealing_goes_on_afterwards(tmp_path: Path) -> None:
    """Without room nothing of a segment is left; with room it is sealed as if nothing had been."""
    fleet = Fleet()
    last = write_log(tmp_path, fleet, _NODES, range(30))
    history = tmp_path / "history"
    with closing(SealClient(tmp_path)) as sealer:
        sealer.start()
        history.rename(tmp_path / "away")
        history.write_text("in the way")
        with pytest.raises(DiskError):
            sealer.seal(last)
        history.unlink()
        (tmp_path / "away").rename(history)
        assert last == sealer.seal(last).position


def test_old_segments_are_removed_on_request(tmp_path: Path) -> None:
    """The oldest go first, by age, and the newest stays."""
    fleet = Fleet()
    with closing(SealClient(tmp_path)) as sealer:
        names: list[str] = []
        for begin in (0, 100, 200):
            last = write_log(tmp_path, fleet, _NODES, range(begin, begin + 100))
            names += sealer.seal(last).segments
        assert (names[0],) == sealer.retain(BEGIN + 250, 100, None)
        assert (names[1],) == sealer.retain(BEGIN + 1e6, 100, None)
        assert () == sealer.retain(BEGIN + 1e6, 100, 1)
        with closing(SealedHistory(tmp_path)) as history:
            assert [names[2]] == [segment.name for segment in history.segments]


def test_layouts_come_from_the_log_itself_when_there_is_no_book(tmp_path: Path) -> None:
    """A new sealing process reads what an earlier one learned from facts that were sealed long ago."""
    fleet = Fleet()
    last = write_log(tmp_path, fleet, _NODES, range(10))
    with closing(SealClient(tmp_path)) as sealer:
        sealer.seal(last)
    with Log(tmp_path / "log") as log:
        log.append(BATCH, fleet.batch(1, 10).to_bytes())
        last = log.sync()
    with closing(SealClient(tmp_path)) as sealer:
        assert last == sealer.seal(last).position


def test_numbers_without_a_layout_are_left_out_and_counted(tmp_path: Path) -> None:
    """What nobody can read does not keep the rest out of the history."""

    fleet = Fleet()
    known, unknown = fleet.batch(1, 0), fleet.batch(2, 0)
    layouts = {block.layout for frame in split_packed_frames(known.frames) for block in frame.blocks}
    with Log(tmp_path / "log") as log:
        for number in (1, 2):
            log.append(FACT, encode_fact("node", id=number, name=f"n{number}"))
        log.append(FACT, b"[" * 5000)
        log.append(FACT, b'{"fact":"layout","id":"7","text":"nonsense"}')
        for layout in layouts:
            log.append(FACT, encode_fact("layout", id=str(layout), text=fleet.texts[layout].decode()))
        log.append(BATCH, b"too short")
        log.append(BATCH, known.to_bytes())
        log.append(BATCH, unknown._replace(frames=_renamed(unknown.frames)).to_bytes())
        log.append(BATCH, unknown._replace(count=unknown.count + 1).to_bytes())
        last = log.sync()
    with closing(SealClient(tmp_path)) as sealer:
        sealed = sealer.seal(last)
        assert last == sealed.position
        assert sealed.unreadable == 2 + sum(
            len(frame.blocks) for frame in split_packed_frames(unknown.frames)
        )
    assert [[1]] == [list(file.nodes) for file in read_segments(str(tmp_path / "history"))[0].files[:1]]


def _renamed(frames: bytes) -> bytes:
    """Frames of layouts that nobody knows."""
    found = [
        frame._replace(blocks=tuple(block._replace(layout=9) for block in frame.blocks))
        for frame in split_packed_frames(frames)
    ]
    return b"".join(frame.to_bytes() for frame in found)


def test_a_sealer_whose_head_was_killed_ends_without_a_word(tmp_path: Path) -> None:
    """A head that is killed while its sealing process starts leaves no traceback in the log."""

    read, write = os.pipe()
    os.close(read)
    with subprocess.Popen(
        [sys.executable, "-m", "gpulse.store.seal_process", str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=write,
        stderr=subprocess.PIPE,
    ) as process:
        os.close(write)
        assert process.stderr is not None
        assert b"" == process.stderr.read()
        assert 0 == process.wait(_PATIENCE_SECONDS)
