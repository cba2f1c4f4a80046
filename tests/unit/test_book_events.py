"""Events of the book: the newest of them."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from gpulse.store.metadata.metadata import Metadata, Step
from tests.queries import query
from tests.unit.books import fact, frame_events

TIMES = st.integers(0, 60).map(lambda half: half / 2)
EVENTS = st.lists(st.tuples(TIMES, st.sampled_from(("a", "b", "c")), st.integers(1, 3)), max_size=40)


def filled(path: Path, events: list[tuple[float, str, int]]) -> Metadata:
    """A book of events by time, kind and node; each knows its place."""
    book = Metadata(str(path / "metadata.sqlite"))
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
            every = book.events(query(start=start, end=end, kinds=kinds, nodes=nodes))
            newest = book.events(query(start=start, end=end, kinds=kinds, nodes=nodes, limit=most))
            assert (every[-most:] if most else []) == newest


def test_what_frames_say_comes_last(tmp_path: Path) -> None:
    """At the same moment the head speaks first, so that the last word is the agent's."""
    with Metadata(str(tmp_path / "metadata.sqlite")) as book:
        book.apply(Step(1, [], {}, [frame_events({"event": "a", "who": "agent"}, time=5.0)]))
        book.apply(Step(2, [fact("event", time=5.0, kind="a", node=1, detail={"who": "head"})]))

        (last,) = book.events(query(start=0, end=10, limit=1))
        assert {"who": "agent"} == last.detail
