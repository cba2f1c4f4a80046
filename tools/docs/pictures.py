"""Draw the pictures of the documentation from the simulated machine and its recordings: `make pictures`."""

from __future__ import annotations

import asyncio
import json
import os
import re
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpulse import sources
from gpulse.diagnosis.windowed_diagnosis import WindowedDiagnosis
from gpulse.export.diagnosis_charts import write_diagnosis_charts
from gpulse.export.session_report import session_charts
from gpulse.export.session_report.file_reader import read_report
from gpulse.model.finding import Finding
from gpulse.model.frame import Frame
from gpulse.sources.demo_machine import DemoMachine
from gpulse.sources.recording_reader import Recording
from gpulse.terminal.top import TopApp, TopOptions

IMAGES = Path(__file__).parents[2] / "docs" / "images"
SIZE = (132, 38)
FRAMES = 60
STEPS_TO_ONE_SECOND = 4


class HurriedDemo:
    """The simulated machine with a clock that advances by a second per sample, so that its history fills at once."""

    def __init__(self) -> None:
        self._now = time.time()
        self._machine = DemoMachine(self._now)
        self.samples = 0

    def sample(self, now: float) -> Frame:  # noqa: ARG002  it has a clock of its own
        """Sample the machine one second later."""
        self._now += 1.0
        self.samples += 1
        return self._machine.sample(self._now)

    def close(self) -> None:
        """Close the machine."""
        self._machine.close()


def _nothing(_: Frame) -> Sequence[Finding]:
    return ()


async def draw_top() -> str:
    """Return the live view as an SVG."""
    source = HurriedDemo()
    app = TopApp(source, TopOptions(interval_seconds=0.05, killable=False, findings=_nothing, title="gpulse"))
    async with app.run_test(size=SIZE) as pilot:
        while source.samples < FRAMES:
            await pilot.pause(0.05)
        await pilot.press("e", *["plus"] * STEPS_TO_ONE_SECOND)
        await pilot.pause()
        return app.export_screenshot(title="gpulse top --demo")


def draw_why(path: Path) -> None:
    """Draw the diagnosis of a run that waits for its disk, in UTC so that it is the same everywhere."""
    os.environ["TZ"] = "UTC"
    time.tzset()
    timeline = WindowedDiagnosis()
    for frame in Recording(Path(sources.__path__[0], "demo", "disk_read.jsonl.gz")):
        timeline.feed(frame)
    write_diagnosis_charts(timeline.seconds, timeline.finish(), path)


def draw_report(path: Path) -> None:
    """Draw a session of ten minutes on the simulated machine, during which the head was down for half a minute."""
    start, down = 1_800_000_000, range(330, 360)
    machine = DemoMachine(start)
    frames = [session_frame(machine.sample(start + second)) for second in range(600)]
    machine.close()
    session = {
        "session_name": "training_run_1",
        "interval_ms": 1000,
        "interruptions": [{"start_time": start + down.start, "end_time": start + down.stop}],
        "frames": [frame for second, frame in enumerate(frames) if second not in down],
    }
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "training_run_1.json")
        file.write_text(json.dumps(session), encoding="utf-8")
        session_charts.write_charts(read_report(file), path)


def session_frame(frame: Frame) -> dict[str, Any]:
    """Return a frame as session files have it."""

    def values(name: str, unit: float) -> list[float | None]:
        found = [gpu.get(name) for gpu in frame.gpus]
        return [None if value is None else value / unit for value in found]

    used, total = values("memory_used_bytes", 1), values("memory_total_bytes", 1)
    return {
        "time": frame.time,
        "gpu_id": [f"{frame.node.name}:{gpu.device.label}:{gpu.device.name}" for gpu in frame.gpus],
        "gpu_util": values("gpu_utilization_ratio", 0.01),
        "gpu_memory": [
            100 * one / of if one is not None and of else None for one, of in zip(used, total, strict=True)
        ],
        "dram_bandwidth": values("pcie_rx_bytes_per_second", 1e9),
    }


def without_web_fonts(svg: str) -> str:
    """Return the picture without the fonts that a viewer would fetch from other servers."""
    return re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)


if __name__ == "__main__":
    IMAGES.mkdir(exist_ok=True)
    (IMAGES / "top.svg").write_text(without_web_fonts(asyncio.run(draw_top())), encoding="utf-8")
    draw_why(IMAGES / "why.svg")
    draw_report(IMAGES / "report.png")
    print(f"drew top.svg, why.svg and report.png in {IMAGES}")
