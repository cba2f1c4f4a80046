"""Events in the metadata: queries for the newest ones."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from gpulse.store.metadata.local_metadata import Metadata, MetadataUpdate
from tests.queries import query
from tests.unit.metadata_records import fact, frame_events

TIMES = st.integers(0, 60).map(lambda half: half / 2)
EVENTS = st.lists(st.tuples(TIMES, st.sampled_from(("a", "b", "c")), st.integers(1, 3)), max_size=40)


def filled(path: Path, events: list[tuple[float, str, int]]) -> Metadata:
    """Metadata of events by time, kind and node; each knows its place."""
    metadata = Metadata(str(path / "metadata.sqlite"))
    facts = [
        fact("event", time=time, kind=kind, node=node, detail={"n": place})
        for place, (time, kind, node) in enumerate(events)
    ]
    metadata.apply(MetadataUpdate(1, facts))
    return metadata


@given(EVENTS, TIMES, TIMES, st.integers(0, 12))
def test_the_newest_are_the_end_of_all(
    events: list[tuple[float, str, int]], start: float, end: float, most: int
) -> None:
    """In the same order, with or without a choice of kinds and nodes."""
    with tempfile.TemporaryDirectory() as directory, filled(Path(directory), events) as metadata:
        for kinds, nodes in ((None, None), (["a", "b"], None), (None, [1, 3]), (["c"], [2])):
            every = metadata.events(query(start=start, end=end, kinds=kinds, nodes=nodes))
            newest = metadata.events(query(start=start, end=end, kinds=kinds, nodes=nodes, limit=most))
            assert (every[-most:] if most else []) == newest


def test_what_frames_say_comes_last(tmp_path: Path) -> None:
    """At the same moment the head speaks first, so that the last word is the agent's."""
    with Metadata(str(tmp_path / "metadata.sqlite")) as metadata:
        metadata.apply(MetadataUpdate(1, [], {}, [frame_events({"event": "a", "who": "agent"}, time=5.0)]))
        metadata.apply(MetadataUpdate(2, [fact("event", time=5.0, kind="a", node=1, detail={"who": "head"})]))

        (last,) = metadata.events(query(start=0, end=10, limit=1))
        assert {"who": "agent"} == last.detail
