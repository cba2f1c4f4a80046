"""Split long questions into short ones, within the limits of a time-series database and of our memory.

All times are whole milliseconds, which is what these databases keep.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

DAY = 86_400_000
_MAX_NUMBERS = 500_000
"""So many numbers at most are in one answer, as far as that is known before."""
_MAX_STEPS = 10_000
"""Prometheus answers for 11,000 moments at most."""
_SAMPLES_A_SECOND = 2
_MIN_MILLISECONDS = 10_000
_MAX_STRETCH_MS = 600_000
"""A scan of few series gives this much time at once."""


class Piece(NamedTuple):
    """Moments at which an expression is looked at, each time over the window that ends there."""

    first: int
    last: int
    step: int
    window: int


def step_pieces(start: int, end: int, step_us: int, series: int) -> Iterator[Piece]:
    """The moments that tell of each step in `[start, end)`, those that are cut off at an end by themselves.

    Args:
        start: Milliseconds.
        end: Milliseconds.
        step_us: Microseconds; steps that are no whole milliseconds are looked at one by one.
        series: About how many series answer.
    """
    step = step_us // 1000
    most = max(1, min(_MAX_STEPS, _MAX_NUMBERS // max(1, series)))
    begin = start
    while begin < end:
        until = min(end, -(-(begin * 1000 // step_us + 1) * step_us // 1000))
        is_whole = step_us % 1000 == 0 and begin % step == 0
        many = min(most, (end - begin) // step) if is_whole else 0
        if many:
            until = begin + many * step
            yield Piece(begin + step - 1, until - 1, step, step)
        else:
            yield Piece(until - 1, until - 1, step, until - begin)
        begin = until


def raw_pieces(start: int, end: int, series: int) -> Iterator[tuple[int, int]]:
    """Stretches of time that are short enough to ask for every sample."""
    length = max(_MIN_MILLISECONDS, min(DAY, 1000 * _MAX_NUMBERS // (_SAMPLES_A_SECOND * max(1, series))))
    while start < end:
        until = min(end, start + length)
        yield start, until
        start = until


def scan_pieces(start: int, end: int, series: int) -> Iterator[tuple[int, int]]:
    """Stretches of time whose samples of all series are in memory at once."""
    for first, until in raw_pieces(start, end, series):
        for begin in range(first, until, _MAX_STRETCH_MS):
            yield begin, min(until, begin + _MAX_STRETCH_MS)
