"""When GPUs were not heard of."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

_MOST = 2000
_OFTEN = 0.25
"""When a GPU is silent this often between frames in which it is not, silence is its pace and not a gap."""


class Gap(NamedTuple):
    """A stretch of time in which nothing is known of some GPUs."""

    start: float
    end: float
    gpus: tuple[int, ...]
    """Their places in the report."""

    @property
    def seconds(self) -> float:
        """How long it lasted."""
        return self.end - self.start


class Absence(NamedTuple):
    """A stretch of time in which the head was not there to keep the session; agents may have kept what they saw."""

    start: float
    end: float | None
    """None when it never came back to the session."""


class Silence:
    """Notes for every GPU when it falls silent and when it is back."""

    def __init__(self) -> None:
        self._since: list[float | None] = []
        self._gaps: list[list[tuple[float, float]]] = []
        self._limit: list[float] = []
        self._often: list[int] = []
        self._start: float | None = None

    def add(self, times: NDArray[np.float64], known: NDArray[np.bool_]) -> None:
        """Take a row a moment and a column a GPU: whether anything is known of it. New GPUs come last."""
        if not len(times):
            return
        if self._start is None:
            self._start = float(times[0])
        while len(self._since) < known.shape[1]:
            self._since.append(self._start)
            self._gaps.append([])
            self._limit.append(0.0)
            self._often.append(0)
        before = np.array([since is None for since in self._since[: known.shape[1]]], np.bool_)
        changed = np.vstack((before, known[:-1])) != known
        for column in np.flatnonzero(changed.any(axis=0)):
            self._follow(int(column), times, known[:, column])

    def _follow(self, column: int, times: NDArray[np.float64], known: NDArray[np.bool_]) -> None:
        since = self._since[column]
        changes = np.flatnonzero(np.diff(known, prepend=since is None))
        if not len(changes):
            return
        moments = times[changes]
        if since is not None:
            moments = np.concatenate(([since], moments))
        pairs = moments[: len(moments) // 2 * 2].reshape(-1, 2)
        self._since[column] = float(moments[-1]) if len(moments) % 2 else None
        lengths = pairs[:, 1] - pairs[:, 0]
        self._often[column] += int((lengths > 0).sum())
        found = self._gaps[column]
        found += [(float(a), float(b)) for a, b in pairs[lengths > self._limit[column]]]
        if len(found) > _MOST:
            self._thin(column, 2.0)

    def finish(self, end: float, heard: NDArray[np.int64]) -> tuple[Gap, ...]:
        """The gaps, oldest first, those of several GPUs at the same time as one.

        Args:
            end: The session's.
            heard: In how many frames each GPU was there.
        """
        together: dict[tuple[float, float], list[int]] = {}
        for column, since in enumerate(self._since):
            if self._often[column] > _OFTEN * max(1, heard[column]) and self._often[column] > 2:
                self._thin(column, 3.0)
            if since is not None and end - since > self._limit[column]:
                self._gaps[column].append((since, end))
            for gap in self._gaps[column]:
                together.setdefault(gap, []).append(column)
        return tuple(Gap(start, end, tuple(gpus)) for (start, end), gpus in sorted(together.items()))

    def _thin(self, column: int, times: float) -> None:
        """Forget what is short as gaps of this GPU go."""
        found = self._gaps[column]
        if not found:
            return
        limit = times * float(np.median([end - start for start, end in found]))
        self._limit[column] = max(limit, self._limit[column])
        kept = [gap for gap in found if gap[1] - gap[0] > limit]
        self._gaps[column] = sorted(sorted(kept, key=lambda gap: gap[0] - gap[1])[: _MOST // 2])
