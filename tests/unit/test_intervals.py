"""Intervals: every operation against the same one on sets of whole numbers."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from gpulse.model.intervals import Interval, cut, groups, merge, overlap, shared_length, subtract, total

INTERVALS = st.lists(st.tuples(st.integers(-20, 20), st.integers(-20, 20)), max_size=8)


def numbers(intervals: list[tuple[int, int]] | list[Interval[int]]) -> set[int]:
    """Return the whole numbers in some intervals."""
    return {number for start, end in intervals for number in range(start, end)}


def is_in_order_and_apart(intervals: list[Interval[int]]) -> bool:
    """Whether intervals are not empty, in order, and do not touch."""
    return all(one.start < one.end for one in intervals) and all(
        one.end < other.start for one, other in pairwise(intervals)
    )


@given(INTERVALS)
def test_merged_intervals_hold_the_same_numbers(intervals: list[tuple[int, int]]) -> None:
    """Merged intervals hold the same numbers, in order and apart."""

    merged = merge(intervals)

    assert numbers(intervals) == numbers(merged)
    assert is_in_order_and_apart(merged)


def test_intervals_that_touch_are_one() -> None:
    """Two intervals that touch become one."""

    assert [Interval(1.0, 3.0)] == merge([(2.0, 3.0), (1.0, 2.0)])


@given(INTERVALS, st.integers(-20, 20), st.integers(-20, 20))
def test_cut_keeps_what_is_within(intervals: list[tuple[int, int]], start: int, end: int) -> None:
    """A cut keeps what is between two numbers."""

    kept = cut(intervals, start, end)

    assert numbers(intervals) & set(range(start, end)) == numbers(kept)
    assert is_in_order_and_apart(kept)


@given(INTERVALS, INTERVALS)
def test_overlap_is_what_both_hold(one: list[tuple[int, int]], other: list[tuple[int, int]]) -> None:
    """The overlap is what both hold."""

    both = overlap(one, other)

    assert numbers(one) & numbers(other) == numbers(both)
    assert is_in_order_and_apart(both)


@given(INTERVALS, INTERVALS)
def test_subtract_leaves_what_is_not_taken(one: list[tuple[int, int]], other: list[tuple[int, int]]) -> None:
    """What is taken is gone, and nothing else is."""

    left = subtract(one, other)

    assert numbers(one) - numbers(other) == numbers(left)
    assert is_in_order_and_apart(left)


@given(INTERVALS)
def test_total_counts_every_number_once(intervals: list[tuple[int, int]]) -> None:
    """Numbers that are in several intervals count once."""

    assert len(numbers(intervals)) == total(intervals)


def test_an_interval_without_end() -> None:
    """An interval may last for ever."""

    assert [Interval(0.0, 5.0)] == cut([(-1.0, float("inf"))], 0.0, 5.0)
    assert [Interval(0.0, 1.0)] == subtract([(0.0, 5.0)], [(1.0, float("inf"))])


def test_groups_are_apart() -> None:
    """Groups are apart; those that only touch are together when wanted."""

    spans = [(5, 9), (0, 2), (1, 3), (3, 4)]

    assert [[(0, 2), (1, 3), (3, 4)], [(5, 9)]] == list(groups(spans, lambda span: span))
    assert [[(0, 2), (1, 3)], [(3, 4)], [(5, 9)]] == list(groups(spans, lambda span: span, touching=False))


@given(
    st.tuples(st.integers(-20, 20), st.integers(-20, 20)),
    st.tuples(st.integers(-20, 20), st.integers(-20, 20)),
)
def test_the_shared_length_is_that_of_the_overlap(one: tuple[int, int], other: tuple[int, int]) -> None:
    """0 where they do not meet."""
    assert total(overlap([one], [other])) == shared_length(Interval(*one), Interval(*other))
