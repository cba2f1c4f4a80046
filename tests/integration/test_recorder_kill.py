from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from gpulse.model.frame import Frame
from gpulse.sources.recording import Recording

GPULSE = Path(sys.executable).with_name("gpulse")
INTERVALS = (0.1, 1.0)
NAMES = ("run.jsonl.gz", "run.jsonl")


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, float]:
    """Recordings of each kind and pace whose programs were killed, all of them after the same two seconds, and when."""
    directory = tmp_path_factory.mktemp("killed")
    paths = [directory / f"{interval}-{name}" for name in NAMES for interval in INTERVALS]
    times = {}
    with ExitStack() as stack:
        children = [stack.enter_context(_recording(path)) for path in paths]
        deadline = time.monotonic() + 60
        while not all(path.exists() and path.stat().st_size for path in paths):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        time.sleep(2.2)
        for path, child in zip(paths, children, strict=True):
            times[path] = time.time()
            child.kill()
    return times


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
def test_a_recording_survives_kill_9(killed: dict[Path, float], name: str, interval: float) -> None:
    """All but the last second or so is there, and it says that it ends early or ends between two frames."""

    (path,) = (path for path in killed if path.name == f"{interval}-{name}")
    frames: list[Frame] = list(Recording(path))

    assert killed[path] - frames[-1].time < 1.0 + interval
    assert all(entry.code == "truncated" for entry in frames[-1].health)
    assert [8] * len(frames) == [len(frame.gpus) for frame in frames]
