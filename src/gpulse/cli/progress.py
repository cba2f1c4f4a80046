"""Progress lines on standard error: for watching, for reading, and for waiting."""

from __future__ import annotations

import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Self

from gpulse.cli import common
from gpulse.diagnosis.windowed_diagnosis import WindowedDiagnosis
from gpulse.model.frame import Frame
from gpulse.terminal import value_format as f
from gpulse.terminal.table import truncate

_SHOW_AFTER_SECONDS = 2.0
"""A shorter wait is not mentioned."""
_DRAW_SECONDS = 0.5


class WatchProgress:
    """A line on standard error with the time passed and the latest activity."""

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet
        self._shown = not quiet and sys.stderr.isatty()
        self._began = self._drawn = time.monotonic()
        self._seconds: float | None = None
        self._dirty = False

    def begin(self, seconds: float | None, command: str | None, *, is_maximum: bool = False) -> None:
        """Print what is watched, and for how long or at most how long if that is known."""
        self._seconds = seconds
        if not self._quiet and not self._shown:
            what = "this machine" if command is None else command
            long = (
                f" for {'at most ' if is_maximum else ''}{seconds:g} s"
                if seconds is not None
                else " until it ends"
            )
            common.print_note(f"watching {what}{long}")

    def watching(self, frame: Frame, timeline: WindowedDiagnosis) -> None:
        """Show how much time has passed, and the latest activity."""
        passed = time.monotonic() - self._began
        if self._seconds is not None and self._is_due():
            done = min(1.0, passed / self._seconds)
            bar = "#" * round(20 * done)
            self._draw(
                f"[{bar:<20}] {passed:2.0f}/{self._seconds:.0f} s  {_latest_activity(timeline) or _here(frame)}"
            )

    def reading(self, path: Path, count: int) -> None:
        """Show how many frames were read."""
        if count % 500 == 0 and self._is_due():
            self._draw(f"reading {path.name}: {count} {'frame' if count == 1 else 'frames'}")

    def clear(self) -> None:
        """Erase the line."""
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
        self._dirty = True
        self._write(f"\r\x1b[K{truncate(text, common.terminal_width() - 1)}")

    @staticmethod
    def _write(text: str) -> None:
        with suppress(OSError):  # a terminal that is gone is no reason to stop watching
            sys.stderr.write(text)
            sys.stderr.flush()


def _latest_activity(timeline: WindowedDiagnosis) -> str:
    """Describe the activity of the last second, GPU by GPU."""
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
            text += f", program uses {last.cores:.1f} CPUs"
        if last.workers:
            count = "1 worker uses" if len(last.workers) == 1 else f"{len(last.workers)} workers use"
            text += f", {count} {sum(helper.cores for helper in last.workers):.1f}"
        parts.append(text)
    return "; ".join(parts)


def _here(frame: Frame) -> str:
    count = "1 GPU" if len(frame.gpus) == 1 else f"{len(frame.gpus)} GPUs"
    return f"{count}, no process running" if frame.gpus else "no GPU"


class WaitNotice:
    """A line on standard error about a wait of more than two seconds."""

    def __init__(self, text: str, *, patience_seconds: float = _SHOW_AFTER_SECONDS) -> None:
        """Prepare the notice.

        Args:
            text: What is waited for; it may change.
            patience_seconds: How long to wait before it is shown.
        """
        self.text = text
        self._patience = patience_seconds
        self._began = time.monotonic()
        self._done = threading.Event()
        self._is_terminal = sys.stderr.isatty()
        self._drawn = False
        self._thread = threading.Thread(target=self._run, name="waiting", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        if self._drawn and self._is_terminal:
            self._write("\r\x1b[K")

    def _run(self) -> None:
        if self._done.wait(self._patience):
            return
        if not self._is_terminal:
            self._write(f"{self.text} ...\n")
            self._drawn = True
            return
        self._drawn = True
        while not self._done.wait(_DRAW_SECONDS):
            passed = f.duration(time.monotonic() - self._began)
            self._write(f"\r\x1b[K{truncate(f'{self.text} ({passed})', common.terminal_width() - 1)}")

    @staticmethod
    def _write(text: str) -> None:
        with suppress(OSError):  # a terminal that is gone is no reason to stop waiting
            sys.stderr.write(text)
            sys.stderr.flush()
