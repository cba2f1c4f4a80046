from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from gpulse.model.frame import Frame
from gpulse.sources.recording import Recording

GPULSE = Path(sys.executable).with_name("gpulse")


@pytest.mark.parametrize("interval", [0.1, 1.0])
@pytest.mark.parametrize("name", ["run.jsonl.gz", "run.jsonl"])
def test_a_recording_survives_kill_9(tmp_path: Path, name: str, interval: float) -> None:
    """All but the last second or so is there, and it says that it ends early or ends between two frames."""

    path = tmp_path / name
    command = [str(GPULSE), "record", "--demo", "-q", "-i", str(interval), "-o", str(path)]
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 20
        while not (path.exists() and path.stat().st_size):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        time.sleep(2.2)
    finally:
        killed = time.time()
        child.kill()
        child.wait()
    frames: list[Frame] = list(Recording(path))

    assert killed - frames[-1].time < 1.0 + interval
    assert all(entry.code == "truncated" for entry in frames[-1].health)
    assert [8] * len(frames) == [len(frame.gpus) for frame in frames]
