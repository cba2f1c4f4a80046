from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from gpulse.store.history.segments import SealedFile, Segment
from gpulse.store.local_coverage import CoverageGap, CoverageLoader, LocalCoverage, merge_gaps
from gpulse.store.store import Query, Series, SeriesKey

NOW = 120_000.0
"""The beginning of a minute."""
RUN, OTHER = b"a" * 16, b"b" * 16


DAY = 86_400.0


class Disk:
    """A store that has a sample a second of one node, and remembers which times it was asked for."""

    def __init__(self, start: float, end: float) -> None:
        self.span = start, end
        self.asked: list[tuple[float, float]] = []
        file = SealedFile("", "host", (1,), 1, 1, int(start * 1e6), int(end * 1e6), {})
        self.segments = (Segment(1, 9, "", 1, None, False, (file,)), Segment(10, 19, "", 1, None, False, ()))

    def nodes(self) -> dict[int, None]:
        """One."""
        return {1: None}

    def series(self, query: Query) -> list[Series]:
        """Whole steps of the first metric."""
        self.asked.append((query.start, query.end))
        step = query.step or 1.0
        times = np.arange(max(query.start, self.span[0]) // step * step, min(query.end, self.span[1]), step)
        if query.scope != "host" or not len(times):
            return []
        counts = np.full(len(times), int(step))
        return [Series(SeriesKey(1, ""), query.metrics[0], times, times, times, times, times, counts)]


def test_what_is_on_disk_is_looked_at_once_a_day_of_it() -> None:
    """And again for a while where more may come; what is not there at all is not looked for."""

    disk: Any = Disk(10 * DAY + 600.0, 13 * DAY)
    coverage, began = LocalCoverage(), 13 * DAY
    loader = CoverageLoader(disk, coverage, began)

    loader.load(0.0, began, began)
    assert [] == coverage.gaps(10 * DAY + 900.0, began - 60.0, [1], began)
    assert [(0.0, 10 * DAY + 900.0)] == [gap[:2] for gap in coverage.gaps(0.0, began - 60.0, [1], began)]
    looked = len(disk.asked)
    assert 3 == looked

    loader.load(0.0, began - DAY, began + 30.0)
    assert looked == len(disk.asked)
    loader.load(0.0, began + 100.0, began + 500.0)
    loader.load(0.0, began + 100.0, began + 900.0)
    assert len(disk.asked) <= looked + 2


def test_what_a_store_drops_while_it_runs_is_noticed() -> None:
    """By what its oldest piece was."""

    disk: Any = Disk(10 * DAY, 13 * DAY)
    coverage, began = LocalCoverage(), 13 * DAY
    loader = CoverageLoader(disk, coverage, began)
    loader.load(11 * DAY, 12 * DAY, began)
    assert [] == coverage.gaps(11 * DAY, 12 * DAY, [1], began)

    disk.segments = disk.segments[1:]
    loader.load(11 * DAY, 12 * DAY, began)

    assert [(11 * DAY, 12 * DAY)] == [gap[:2] for gap in coverage.gaps(11 * DAY, 12 * DAY, [1], began)]


def test_what_is_thin_does_not_count_as_here() -> None:
    """Whether it became so while this runs or earlier: what is left of it are processes, and not every sample."""

    disk: Any = Disk(10 * DAY, 13 * DAY)
    began = 13 * DAY
    running = LocalCoverage()
    loader = CoverageLoader(disk, running, began)
    loader.load(11 * DAY, 12 * DAY, began)
    first, *others = disk.segments
    disk.segments = (first._replace(thinned=int(11.5 * DAY * 1e6)), *others)
    started = LocalCoverage()
    for coverage, one in ((running, loader), (started, CoverageLoader(disk, started, began))):
        one.load(11 * DAY, 12 * DAY, began)
        gaps = coverage.gaps(11 * DAY, 12 * DAY, [1], began)
        assert [(11 * DAY, 11.5 * DAY + 60.0)] == [gap[:2] for gap in gaps]
        assert [] == coverage.gaps(11 * DAY, 12 * DAY, [1], began, of_samples=False)


def gaps(
    coverage: LocalCoverage, start: float, end: float, *nodes: int
) -> list[tuple[float, float, list[int]]]:
    """What is missing, of node 1 when none is named."""
    found: list[CoverageGap] = coverage.gaps(start, end, nodes or (1,), NOW)
    return [(gap.start, gap.end, sorted(gap.nodes)) for gap in found]


def test_a_node_that_was_never_seen_is_elsewhere_all_the_time() -> None:
    """Each of them."""

    assert [(10.0, 20.0, [1, 2])] == gaps(LocalCoverage(), 10.0, 20.0, 1, 2)
    assert [] == LocalCoverage().gaps(10.0, 20.0, (), NOW)


def test_what_came_without_a_gap_is_here() -> None:
    """From the first frame on, and up to now while more may come any moment."""

    coverage = LocalCoverage()
    for number in range(1, 11):
        coverage.add_frames(1, RUN, range(number, number + 1), NOW - 20 + number, NOW - 20 + number)

    assert [] == gaps(coverage, NOW - 19, NOW)
    assert [(NOW - 90, NOW, [1])] == gaps(coverage, NOW - 90, NOW)
    assert [(NOW - 90, NOW - 15, [1])] == gaps(coverage, NOW - 90, NOW - 15)


def test_a_node_that_fell_silent_may_have_gone_elsewhere() -> None:
    """Since its last frame."""

    coverage = LocalCoverage()
    coverage.add_frames(1, RUN, range(1, 61), NOW - 400, NOW - 140)

    assert [(NOW - 180, NOW, [1])] == gaps(coverage, NOW - 400, NOW)


def test_frames_that_did_not_come_here_are_a_hole_however_short() -> None:
    """Their numbers tell: another head has them."""

    coverage = LocalCoverage()
    coverage.add_frames(1, RUN, range(1, 61), NOW - 300, NOW - 150)
    coverage.add_frames(1, RUN, range(64, 121), NOW - 146, NOW)

    assert [(NOW - 180, NOW - 120, [1])] == gaps(coverage, NOW - 300, NOW)


def test_another_run_begins_another_stretch() -> None:
    """Nobody knows whether the run before ended here."""

    coverage = LocalCoverage()
    coverage.add_frames(1, RUN, range(1, 61), NOW - 300, NOW - 150)
    coverage.add_frames(1, OTHER, range(1, 51), NOW - 146, NOW)

    assert [(NOW - 180, NOW - 120, [1])] == gaps(coverage, NOW - 300, NOW)


def test_nodes_with_the_same_hole_share_it_and_others_have_their_own() -> None:
    """A node that has been away for long makes no hole for those that have not."""

    coverage = LocalCoverage()
    coverage.add_steps(1, np.arange(540.0, 6060.0, 60.0), np.full(92, 60))
    coverage.add_steps(2, np.arange(540.0, 6060.0, 60.0), np.full(92, 60))

    assert [(0.0, 600.0, [1, 2]), (0.0, 6000.0, [3])] == gaps(coverage, 0.0, 6000.0, 1, 2, 3)
    assert [(0.0, 6000.0, [1, 2, 3])] == [
        (gap.start, gap.end, sorted(gap.nodes))
        for gap in merge_gaps(coverage.gaps(0.0, 6000.0, (1, 2, 3), NOW))
    ]


def test_what_was_found_on_disk_is_here_minute_by_minute() -> None:
    """Minutes with fewer samples than the others may have a hole, and those at an end may be cut off."""

    coverage = LocalCoverage()
    counts = np.array([60, 60, 60, 41, 59, 60, 60])
    coverage.add_steps(1, np.arange(540.0, 960.0, 60.0), counts)
    coverage.add_steps(2, np.array([600.0]), np.array([7]))

    assert [(720.0, 780.0, [1])] == gaps(coverage, 600.0, 900.0)
    assert [(500.0, 600.0, [1]), (720.0, 780.0, [1]), (900.0, 1000.0, [1])] == gaps(coverage, 500.0, 1000.0)
    assert [(600.0, 660.0, [2])] == gaps(coverage, 600.0, 660.0, 2)


def test_what_was_dropped_is_elsewhere() -> None:
    """However it was known to be here."""

    coverage = LocalCoverage()
    coverage.add_steps(1, np.arange(540.0, 1260.0, 60.0), np.full(12, 60))
    coverage.add_frames(2, RUN, range(1, 601), 600.0, 1200.0)
    coverage.forget_before(900.0)

    assert [(600.0, 900.0, [1, 2])] == gaps(coverage, 600.0, 1200.0, 1, 2)
    assert [(600.0, 700.0, [1, 2])] == gaps(coverage, 600.0, 700.0, 1, 2)
    assert [] == gaps(coverage, 900.0, 1200.0, 1, 2)


def test_holes_of_many_nodes_are_few_and_miss_nothing() -> None:
    """Those that lie close together become one for all of their nodes."""

    coverage = LocalCoverage()
    for node in range(1, 41):
        coverage.add_frames(node, RUN, range(1, 2), 0.0, 1000.0 * node)
        coverage.add_frames(node, RUN, range(9, 10), 1000.0 * node + 5.0, NOW)

    found = coverage.gaps(0.0, NOW, range(1, 41), NOW)

    assert len(found) <= 8
    assert all(before.end < after.start for before, after in pairwise(found))
    for node in range(1, 41):
        assert any(
            gap.start <= 1000.0 * node and gap.end >= 1000.0 * node + 5.0 and node in gap.nodes
            for gap in found
        )
