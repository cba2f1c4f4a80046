"""What the cluster was at, moment by moment: the label of workers that executed nothing themselves."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque

from gpulse.integrations.dask.jobs import NOTHING, Label

_KEPT_SECONDS = 120.0


class Resting:
    """A short history of labels."""

    def __init__(self) -> None:
        self._since: deque[tuple[float, Label]] = deque([(float("-inf"), NOTHING)])

    @property
    def now(self) -> Label:
        """The newest label."""
        return self._since[-1][1]

    def note(self, timestamp: float, label: Label) -> None:
        """From this moment on it is this label; what is long past is forgotten."""
        if label[:2] != self.now[:2]:
            self._since.append((max(timestamp, self._since[-1][0]), label))
        while len(self._since) > 1 and self._since[1][0] < timestamp - _KEPT_SECONDS:
            self._since.popleft()

    def at(self, timestamp: float) -> Label:
        """The label of a moment."""
        place = bisect_right(self._since, timestamp, key=lambda entry: entry[0])
        return self._since[max(0, place - 1)][1]

    def filled(self, lines: bytes) -> bytes:
        """Lines with a label wherever a worker could not tell one."""
        if not lines.startswith(b",") and b"\n," not in lines:
            return lines
        return b"".join(
            self._labelled(line) if line.startswith(b",") else line
            for line in lines.splitlines(keepends=True)
        )

    def _labelled(self, line: bytes) -> bytes:
        label = self.at(float(line.split(b",", 3)[2].strip()))
        return b"%d,%d%s" % (label.job, label.dag, line[1:])
