"""Events of the book: the newest of them, and the last of each step."""

from __future__ import annotations

import math
import sqlite3
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulse.store.base import StoredEvent
from gpulse.store.book.book import Book, Step
from tests.unit.books import fact, frame_events

TIMES = st.integers(0, 60).map(lambda half: half / 2)
EVENTS = st.lists(st.tuples(TIMES, st.sampled_from(("a", "b", "c")), st.integers(1, 3)), max_size=40)


def filled(path: Path, events: list[tuple[float, str, int]]) -> Book:
    """A book of events by time, kind and node; each knows its place."""
    book = Book(str(path / "book.sqlite"))
    facts = [
        fact("event", time=time, kind=kind, node=node, detail={"n": place})
        for place, (time, kind, node) in enumerate(events)
    ]
    book.apply(Step(1, facts))
    return book


@given(EVENTS, TIMES, TIMES, st.integers(0, 12))
def test_the_newest_are_the_end_of_all(
    events: list[tuple[float, str, int]], start: float, end: float, most: int
) -> None:
    """In the same order, with or without a choice of kinds and nodes."""
    with tempfile.TemporaryDirectory() as directory, filled(Path(directory), events) as book:
        for kinds, nodes in ((None, None), (["a", "b"], None), (None, [1, 3]), (["c"], [2])):
            every = book.events(start=start, end=end, kinds=kinds, nodes=nodes)
            newest = book.events(start=start, end=end, kinds=kinds, nodes=nodes, most=most)
            assert (every[-most:] if most else []) == newest


def slowly(
    events: list[StoredEvent], start: float, end: float, every: float, kinds: set[str], nodes: set[int]
) -> list[StoredEvent]:
    """The last of each step by looking at all of them."""
    last: dict[tuple[object, ...], StoredEvent] = {}
    for event in events:
        if event.kind in kinds and event.node in nodes and (event.time < start or start <= event.time < end):
            step = None if event.time < start else math.floor(event.time / every)
            last[event.node, event.kind, step] = event
    return [event for event in events if any(event is kept for kept in last.values())]


@given(EVENTS, TIMES, TIMES, st.sampled_from((1.0, 2.5, 7.0, 100.0)))
def test_one_event_a_step(
    events: list[tuple[float, str, int]], start: float, end: float, every: float
) -> None:
    """The last one of each node and kind, and the last one before; no other nodes and kinds."""
    with tempfile.TemporaryDirectory() as directory, filled(Path(directory), events) as book:
        found = book.last_events(start=start, end=end, every=every, kinds=["a", "b"], nodes=[1, 3])

        everything = book.events(start=-1e300, end=1e300)
        assert slowly(everything, start, end, every, {"a", "b"}, {1, 3}) == found


def test_what_frames_say_comes_last(tmp_path: Path) -> None:
    """At the same moment the head speaks first, so that the last word is the agent's."""
    with Book(str(tmp_path / "book.sqlite")) as book:
        book.apply(Step(1, [], {}, [frame_events({"event": "a", "who": "agent"}, time=5.0)]))
        book.apply(Step(2, [fact("event", time=5.0, kind="a", node=1, detail={"who": "head"})]))

        (last,) = book.last_events(start=0, end=10, every=10, kinds=["a"], nodes=[1])
        assert {"who": "agent"} == last.detail
        assert [last] == book.events(start=0, end=10, most=1)


def test_a_book_without_the_index_gets_it(tmp_path: Path) -> None:
    """One of an earlier head answers a reader just as well, and a writer gives it the index."""
    filled(tmp_path, [(1.0, "a", 1), (2.0, "a", 1)]).close()
    path = str(tmp_path / "book.sqlite")
    with sqlite3.connect(path) as database:
        database.execute("DROP INDEX events_kind")
    database.close()

    for read_only, has_it in ((True, False), (False, True)):
        with Book(path, read_only=read_only) as book:
            found = book.last_events(start=0, end=10, every=10, kinds=["a"], nodes=[1])
            assert [2.0] == [event.time for event in found]
        assert has_it is _has_index(path)


def _has_index(path: str) -> bool:
    database = sqlite3.connect(path)
    try:
        (count,) = database.execute(
            "SELECT count(*) FROM sqlite_master WHERE name = 'events_kind'"
        ).fetchone()
    finally:
        database.close()
    return bool(count)


@pytest.mark.parametrize("steps", [60, 600])
def test_a_long_time_costs_a_row_a_step(tmp_path: Path, steps: int) -> None:
    """However often something was told."""
    with filled(tmp_path, [(float(time), "a", 1) for time in range(6000)]) as book:
        found = book.last_events(start=0, end=6000, every=6000 / steps, kinds=["a"], nodes=[1])
        assert steps == len(found)
