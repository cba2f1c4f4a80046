"""Draws the pictures of the documentation from the demo machine: `make docs`."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Sequence
from pathlib import Path

from gpulse.model.finding import Finding
from gpulse.model.frame import Frame
from gpulse.sources.simulated import DemoMachine
from gpulse.terminal.top import Options, TopApp

IMAGES = Path(__file__).with_name("images")
SIZE = (132, 38)
FRAMES = 60
STEPS_TO_ONE_SECOND = 4


class HurriedDemo:
    """The demo machine with a clock that gains a second at every sample, so that history fills at once."""

    def __init__(self) -> None:
        self._now = time.time()
        self._machine = DemoMachine(self._now)
        self.samples = 0

    def sample(self, now: float) -> Frame:  # noqa: ARG002  it has its own clock
        """The machine a second later."""
        self._now += 1.0
        self.samples += 1
        return self._machine.sample(self._now)

    def close(self) -> None:
        """End the machine."""
        self._machine.close()


def _nothing(_: Frame) -> Sequence[Finding]:
    return ()


async def draw_top() -> str:
    """The live view as an SVG."""
    source = HurriedDemo()
    app = TopApp(source, Options(interval_seconds=0.05, killable=False, findings=_nothing, title="gpulse"))
    async with app.run_test(size=SIZE) as pilot:
        while source.samples < FRAMES:
            await pilot.pause(0.05)
        await pilot.press("e", *["plus"] * STEPS_TO_ONE_SECOND)
        await pilot.pause()
        return app.export_screenshot(title="gpulse top --demo")


def without_web_fonts(svg: str) -> str:
    """The picture without the fonts that a viewer would fetch from elsewhere."""
    return re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)


if __name__ == "__main__":
    IMAGES.mkdir(exist_ok=True)
    (IMAGES / "top.svg").write_text(without_web_fonts(asyncio.run(draw_top())), encoding="utf-8")
    print(f"drew {IMAGES / 'top.svg'}")
