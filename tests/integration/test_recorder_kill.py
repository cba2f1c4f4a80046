from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from gpulse.errors import RecordingError
from gpulse.model.frame import Frame
from gpulse.sources.recording_reader import Recording
from tests.integration.cluster import until

GPULSE = Path(sys.executable).with_name("gpulse")
INTERVALS = (0.1, 1.0)
NAMES = ("run.jsonl.gz", "run.jsonl")


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, int]:
    """Recordings of each kind and pace whose programs were killed, and how many frames were in them just before."""
    directory = tmp_path_factory.mktemp("killed")
    paths = [directory / f"{interval}-{name}" for name in NAMES for interval in INTERVALS]
    counts = {}
    with ExitStack() as stack:
        children = [stack.enter_context(_recording(path)) for path in paths]
        for path, child in zip(paths, children, strict=True):
            counts[path] = until(lambda: _count(path), f"three frames in {path.name}")  # noqa: B023  called at once
            child.kill()
    return counts


def _count(path: Path) -> int:
    """Return how many frames are in a recording, if they are three or more."""
    try:
        frames = list(Recording(path)) if path.exists() else []
    except RecordingError:  # nothing is there yet
        return 0
    return len(frames) if len(frames) >= 3 else 0


@contextmanager
def _recording(path: Path) -> Iterator[subprocess.Popen[bytes]]:
    interval = path.name.partition("-")[0]
    command = [str(GPULSE), "record", "--demo", "-q", "-i", interval, "-o", str(path)]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL) as child:
        try:
            yield child
        finally:
            child.kill()


@pytest.mark.parametrize("interval", INTERVALS)
@pytest.mark.parametrize("name", NAMES)
def test_a_recording_survives_kill_9(killed: dict[Path, int], name: str, interval: float) -> None:
    """What was in it before is there, and it says that it ends early or ends between two frames."""

    (path,) = (path for path in killed if path.name == f"{interval}-{name}")
    frames: list[Frame] = list(Recording(path))

    assert len(frames) >= killed[path]
    assert all(entry.code == "truncated" for entry in frames[-1].health)
    assert [8] * len(frames) == [len(frame.gpus) for frame in frames]
