from __future__ import annotations

import gzip
import json
import os
import random
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpulse.errors import ClosedError, RecordingError
from gpulse.model.frame import Frame
from gpulse.sampling.recorder import Recorder
from gpulse.sources.demo_machine import DemoMachine
from gpulse.sources.frame_source import EndOfRecordingError
from gpulse.sources.recording_reader import Recording, ReplaySource

STARTED = 1_800_000_000.0
TRACE = Path(__file__).parents[1] / "data" / "traces" / "gpu_shared.jsonl.gz"
COUNT = 5


@pytest.fixture(scope="module")
def frames() -> list[Frame]:
    """A few frames of a small machine."""
    demo = DemoMachine(STARTED, gpus=2)
    return [demo.sample(STARTED + number) for number in range(COUNT)]


@pytest.fixture(scope="module", params=["run.jsonl", "run.jsonl.gz"])
def recorded(
    request: pytest.FixtureRequest, frames: list[Frame], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Their recording."""
    path: Path = tmp_path_factory.mktemp("recorded") / request.param
    recorder = Recorder(path)
    for frame in frames:
        recorder.write(frame)
    recorder.close()
    return path


def whole(frame: Frame) -> Frame:
    """A frame without what reading it back added."""
    return frame._replace(health=tuple(entry for entry in frame.health if entry.source != "recording"))


def test_a_recording_reads_back_what_was_written(recorded: Path, frames: list[Frame]) -> None:
    """Frame by frame, as often as one likes."""

    recording = Recording(recorded)

    assert frames == list(recording) == list(recording)


def test_a_recording_that_is_cut_off_anywhere_gives_the_frames_before(
    recorded: Path, frames: list[Frame], tmp_path: Path
) -> None:
    """Cut at any byte: either not a recording at all, or its first frames, the last of which says so."""

    data = recorded.read_bytes()
    path = tmp_path / recorded.name
    cuts = sorted({*range(64), *random.Random(3).sample(range(len(data)), 150), len(data) - 1})
    most = 0
    for cut in cuts:
        path.write_bytes(data[:cut])
        try:
            found = list(Recording(path))
        except RecordingError:
            continue
        assert [whole(frame) for frame in found] == frames[: len(found)]
        if found and len(found) < COUNT and recorded.suffix == ".gz":
            assert ["truncated"] == [entry.code for entry in found[-1].health]
        most = max(most, len(found))

    assert most >= COUNT - 1


def test_garbage_in_the_middle_is_named_by_its_line(recorded: Path, tmp_path: Path) -> None:
    """The frames before it are given, then an error says where it is, blank lines counted."""

    opened = gzip.open if recorded.suffix == ".gz" else open
    with opened(recorded, "rt") as file:
        lines = file.read().splitlines()
    bad = len(lines) // 2
    path = tmp_path / "bad.jsonl"
    path.write_text("\n".join(["", *lines[:bad], "garbage", *lines[bad:]]))

    with pytest.raises(RecordingError, match=rf"line {bad + 2} is damaged: this is not a line"):
        list(Recording(path))


@pytest.mark.parametrize("name", ["empty.jsonl", "empty.jsonl.gz"])
def test_an_empty_file_is_no_recording(tmp_path: Path, name: str) -> None:
    """And the error says how to make one."""

    path = tmp_path / name
    path.write_bytes(gzip.compress(b"") if name.endswith(".gz") else b"")

    with pytest.raises(RecordingError, match="is empty") as caught:
        Recording(path)
    assert caught.value.hint


@pytest.mark.parametrize("content", [b"hello\n", b"{}\n", b"[]\n", b"\x00\xff\n", b"[" * 100_000])
def test_something_else_is_no_recording(tmp_path: Path, content: bytes) -> None:
    """Refused by name before anything is made of it."""

    path = tmp_path / "something"
    path.write_bytes(content)

    with pytest.raises(RecordingError, match="is not a recording"):
        Recording(path)


@pytest.mark.parametrize(
    ("header", "words"),
    [
        ({"format": "gpulse-recording", "version": 2}, "version 2; this version of gpulse reads version 1"),
        ({"trace": 7}, "format 7; this version of gpulse reads only format 1"),
    ],
)
def test_a_newer_format_is_refused_by_name(tmp_path: Path, header: dict[str, object], words: str) -> None:
    """Rather than read wrongly."""

    path = tmp_path / "newer.jsonl"
    path.write_text(json.dumps(header) + "\n")

    with pytest.raises(RecordingError, match=words):
        Recording(path)


@pytest.mark.parametrize("name", [".", "nothing-here.jsonl"])
def test_a_file_that_cannot_be_read_is_an_error_with_its_reason(tmp_path: Path, name: str) -> None:
    """A directory, or nothing at all."""

    with pytest.raises(RecordingError, match="cannot read"):
        Recording(tmp_path / name)


def test_a_file_that_is_removed_after_it_was_opened(tmp_path: Path, recorded: Path) -> None:
    """Opening works, reading does not; the error is of the same kind."""

    path = tmp_path / recorded.name
    path.write_bytes(recorded.read_bytes())
    recording = Recording(path)
    path.unlink()

    with pytest.raises(RecordingError, match="cannot read"):
        list(recording)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.binary(max_size=400),
    st.sampled_from([b"", b"\x1f\x8b", b'{"format":"gpulse-recording","version":1}\n']),
)
def test_random_bytes_are_refused_or_read(tmp_path: Path, data: bytes, start: bytes) -> None:
    """Nothing but our own error ever comes out."""

    path = tmp_path / "random"
    path.write_bytes(start + data)
    try:
        assert list(Recording(path)) == []
    except RecordingError:
        return


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.randoms(use_true_random=False), st.booleans())
def test_damaged_recordings_are_refused_or_read(
    tmp_path: Path, recorded: Path, chance: random.Random, trace: bool
) -> None:
    """A few bytes changed, left out or doubled in a real one: frames, or our own error."""

    source = TRACE if trace else recorded
    packed = source.read_bytes()
    data = bytearray(gzip.decompress(packed) if source.suffix == ".gz" and chance.random() < 0.8 else packed)
    del data[60_000:]
    for _ in range(chance.randint(1, 4)):
        place, length = chance.randrange(len(data)), chance.randint(1, 20)
        piece = data[place : place + length]
        data[place : place + length] = chance.choice(
            [b"", piece * 2, chance.randbytes(length), b"null", b"NaN", b"-1", b"{", b"]", b"1e999", b'""']
        )
    path = tmp_path / "damaged"
    path.write_bytes(bytes(data))
    try:
        for frame in Recording(path):
            assert isinstance(frame, Frame)
    except RecordingError:
        return


def test_a_source_replays_frame_by_frame(recorded: Path, frames: list[Frame]) -> None:
    """Each sample is the next frame, and after the last one there is an end."""

    source = ReplaySource(Recording(recorded))

    assert frames == [source.sample(0.0) for _ in frames]
    with pytest.raises(EndOfRecordingError):
        source.sample(0.0)
    source.close()


def test_a_source_replays_at_the_pace_of_the_recording(recorded: Path, frames: list[Frame]) -> None:
    """What is due is shown, what was missed is left out, and the last frame is shown before the end."""

    source = ReplaySource(Recording(recorded), started=100.0)

    assert [frames[0], frames[2], frames[4]] == [source.sample(now) for now in (100.0, 102.5, 110.0)]
    with pytest.raises(EndOfRecordingError):
        source.sample(111.0)


def test_a_replay_that_is_asked_early_shows_the_next_frame(recorded: Path, frames: list[Frame]) -> None:
    """A frame that is not due yet is better than none."""

    source = ReplaySource(Recording(recorded), started=100.0)

    assert frames[:2] == [source.sample(100.0), source.sample(100.1)]


def test_a_closed_replay_lets_its_file_go(recorded: Path) -> None:
    """In the middle of a recording, too."""

    source = ReplaySource(Recording(recorded))
    source.sample(0.0)
    source.close()

    with pytest.raises(ClosedError):
        source.sample(0.0)


def test_an_existing_file_is_not_touched(recorded: Path) -> None:
    """Not even opened for writing."""

    before = recorded.read_bytes()

    with pytest.raises(RecordingError, match="already exists"):
        Recorder(recorded)
    assert before == recorded.read_bytes()


def test_a_place_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    """With the system's reason."""

    with pytest.raises(RecordingError, match="No such file or directory"):
        Recorder(tmp_path / "nowhere" / "run.jsonl")


@pytest.mark.parametrize("name", ["full.jsonl", "full.jsonl.gz"])
def test_a_full_disk_is_an_error_with_its_reason(tmp_path: Path, name: str, frames: list[Frame]) -> None:
    """Whether it shows when a frame is written or when the file is finished."""

    path = tmp_path / name
    recorder = Recorder(path)
    recorder._file.close()
    recorder._file = open("/dev/full", "wb")  # noqa: SIM115  closed by the recorder

    with pytest.raises(RecordingError, match="No space left on device"):  # noqa: PT012  either of the two
        for frame in frames:
            recorder.write(frame)
        recorder.close()
    with suppress(RecordingError):
        recorder.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["run.jsonl", "run.jsonl.gz"])
@pytest.mark.parametrize("interval", [0.05, 0.3, 1.0])
def test_at_most_a_second_is_held_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, interval: float
) -> None:
    """Whoever reads the file while it is written, or after the recorder was killed, finds all frames but the last second's."""

    now = STARTED
    monkeypatch.setattr("gpulse.sampling.recorder.time", SimpleNamespace(monotonic=lambda: now))
    demo = DemoMachine(STARTED, gpus=2)
    recorder = Recorder(tmp_path / name)
    lost = []
    while now < STARTED + 5:
        now += interval
        recorder.write(demo.sample(now))
        with suppress(RecordingError):  # nothing is there yet
            lost.append(now - list(Recording(tmp_path / name))[-1].time)
    recorder.close()

    assert len(lost) > 3 / interval
    assert max(lost) < 1.0


def test_recordings_of_the_same_frames_are_the_same_bytes(
    tmp_path: Path, frames: list[Frame], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No time of writing and no name inside."""

    monkeypatch.setattr("gpulse.sampling.recorder.time", SimpleNamespace(monotonic=lambda: STARTED))
    packed = []
    for name in ("a.jsonl.gz", "b.jsonl.gz"):
        recorder = Recorder(tmp_path / name)
        for frame in frames:
            recorder.write(frame)
        recorder.close()
        packed.append((tmp_path / name).read_bytes()[20:])

    assert packed[0] == packed[1]


_PEAK = """
import resource, sys
from gpulse.errors import RecordingError
from gpulse.sources.recording_reader import Recording
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    for _ in Recording(sys.argv[1]):
        pass
    print("read to its end")
except RecordingError as error:
    print(error.message)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
HEADER = b'{"format":"gpulse-recording","version":1}\n'


@pytest.mark.parametrize(
    ("unit", "said", "max_mib"),
    [
        (b"\n", "more than 1000 blank lines", 8),
        (b" ", "is longer than 16 MiB", 64),
        (HEADER[:-2] + b" " * 60_000 + b"}\n", "more than 500 times as large as the compressed file", 8),
        (b"[],", "is longer than 16 MiB", 64),
    ],
)
@pytest.mark.parametrize("start", [b"", HEADER])
def test_bombs_take_little_memory(tmp_path: Path, unit: bytes, said: str, max_mib: int, start: bytes) -> None:
    """100 MB that are compressed to 100 kB; what comes before is read."""

    path = tmp_path / "bomb.jsonl.gz"
    with gzip.open(path, "wb", compresslevel=6) as file:
        file.write(start)
        block = unit * (2**20 // len(unit))
        for _ in range(100):
            file.write(block)
    done = subprocess.run(
        [sys.executable, "-c", _PEAK, str(path)], capture_output=True, text=True, timeout=60, check=True
    )
    outcome, kib = done.stdout.splitlines()

    is_cut_later = bool(start) or unit.startswith(HEADER[:-2])
    assert outcome == "read to its end" if is_cut_later else said in outcome
    assert int(kib) < max_mib * 1024


def test_more_processes_than_a_machine_has_are_refused(tmp_path: Path) -> None:
    """They would be kept until the next frame."""

    path = tmp_path / "many.jsonl"
    with path.open("wb") as file:
        file.write(HEADER)
        for pid in range(100_001):
            file.write(b'{"process":{"pid":%d,"start_ticks":1,"name":"x"}}\n' % pid)
        file.write(HEADER)

    with pytest.raises(RecordingError, match="line 100002 is damaged"):
        list(Recording(path))


@pytest.mark.parametrize("kind", ["pipe", "device", "directory"])
def test_what_is_not_a_file_is_refused_at_once(tmp_path: Path, kind: str) -> None:
    """A pipe without a writer would never end, and a device like /dev/zero neither."""

    path = tmp_path / "run.jsonl"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()

    with pytest.raises(
        RecordingError, match=r"cannot read .*: (it is not a regular file|Is a directory)"
    ) as raised:
        Recording(path)
    assert raised.value.hint
