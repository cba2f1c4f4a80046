"""What the cluster was at, moment by moment: the label of workers that executed nothing themselves."""

from __future__ import annotations

from bisect import bisect_right

from gpulse.integrations.dask.jobs import NOTHING, Label

_KEPT_SECONDS = 900.0
"""Rows can be late: a worker keeps them while the scheduler does not take them."""


class Resting:
    """A history of labels."""

    def __init__(self) -> None:
        self._since: list[tuple[float, Label]] = [(float("-inf"), NOTHING)]

    @property
    def now(self) -> Label:
        """The newest label."""
        return self._since[-1][1]

    def note(self, timestamp: float, label: Label) -> None:
        """From this moment on it is this label; what is long past is forgotten, some of it at a time."""
        if label[:2] != self.now[:2]:
            self._since.append((max(timestamp, self._since[-1][0]), label))
        past = self._place(timestamp - _KEPT_SECONDS)
        if past > len(self._since) / 2:
            del self._since[:past]

    def at(self, timestamp: float) -> Label:
        """The label of a moment."""
        return self._since[self._place(timestamp)][1]

    def filled(self, lines: bytes) -> bytes:
        """Lines with a label wherever a worker could not tell one."""
        if not lines.startswith(b",") and b"\n," not in lines:
            return lines
        return b"".join(
            self._labelled(line) if line.startswith(b",") else line
            for line in lines.splitlines(keepends=True)
        )

    def _place(self, timestamp: float) -> int:
        return max(0, bisect_right(self._since, timestamp, key=lambda entry: entry[0]) - 1)

    def _labelled(self, line: bytes) -> bytes:
        label = self.at(float(line.split(b",", 3)[2].strip()))
        return b"%d,%d%s" % (label.job, label.dag, line[1:])
