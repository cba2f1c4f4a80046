"""How far the watching is, on standard error."""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from gpulse.cli import shell

if TYPE_CHECKING:
    from gpulse.diagnosis.timeline import Timeline
    from gpulse.model.frame import Frame


class Progress:
    """One line on standard error that says how far it is and what is seen so far."""

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet
        self._shown = not quiet and sys.stderr.isatty()
        self._began = self._drawn = time.monotonic()
        self._seconds: float | None = None
        self._dirty = False

    def begin(self, seconds: float | None, command: str | None) -> None:
        """Say what is watched, and for how long if that is known."""
        self._seconds = seconds
        if not self._quiet and not self._shown:
            what = "this machine" if command is None else command
            long = f" for {seconds:g} s" if seconds is not None else " until it ends"
            shell.remark(f"watching {what}{long}")

    def watching(self, frame: Frame, timeline: Timeline) -> None:
        """Show how much of the time has passed, and what was seen last."""
        passed = time.monotonic() - self._began
        if self._seconds is not None and self._is_due():
            done = min(1.0, passed / self._seconds)
            bar = "#" * round(20 * done)
            self._draw(f"[{bar:<20}] {passed:2.0f}/{self._seconds:.0f} s  {_seen(timeline) or _here(frame)}")

    def reading(self, path: Path, count: int) -> None:
        """Show how many frames were read."""
        if count % 500 == 0 and self._is_due():
            self._draw(f"reading {path.name}: {count} frames")

    def clear(self) -> None:
        """Wipe the line away."""
        if self._dirty:
            self._write("\r\x1b[K")
            self._dirty = False

    def _is_due(self) -> bool:
        now = time.monotonic()
        if not self._shown or now - self._drawn < 0.5:
            return False
        self._drawn = now
        return True

    def _draw(self, text: str) -> None:
        from gpulse.terminal.table import cut  # noqa: PLC0415

        self._dirty = True
        self._write(f"\r\x1b[K{cut(text, shell.width() - 1)}")

    @staticmethod
    def _write(text: str) -> None:
        with suppress(OSError):  # a terminal that is gone is no reason to stop watching
            sys.stderr.write(text)
            sys.stderr.flush()


def _seen(timeline: Timeline) -> str:
    """What the last second showed, GPU by GPU."""
    parts = []
    for seconds in list(timeline.seconds.values())[:4]:
        last = seconds[-1]
        if not last.holders:
            continue
        busy, filled = last.mean("duty"), last.mean("sm_active_ratio")
        text = f"GPU {last.reading.device.label}"
        text += f" busy {busy:.0%}" if busy is not None else ""
        text += f" SM {filled:.0%}" if filled is not None else ""
        if last.cores is not None:
            text += f", its program {last.cores:.1f} CPUs"
        if last.workers:
            text += f", {len(last.workers)} workers {sum(helper.cores for helper in last.workers):.1f}"
        parts.append(text)
    return "; ".join(parts)


def _here(frame: Frame) -> str:
    return f"{len(frame.gpus)} GPUs, nothing runs on them" if frame.gpus else "no GPU"
