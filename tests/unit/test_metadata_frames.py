"""Events inside frames: processes that come and go over restarts of their agent, and what cannot be read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpulse.store.log.record_payloads import FrameEvents
from gpulse.store.metadata.local_metadata import Metadata, MetadataUpdate
from gpulse.store.store import StoredEvent
from tests.queries import query
from tests.unit.metadata_records import LATER_RUN, RUN, frame_events, process


@pytest.fixture
def metadata(tmp_path: Path) -> Iterator[Metadata]:
    """Empty metadata."""
    with Metadata(str(tmp_path / "metadata.sqlite")) as opened:
        yield opened


def tell(metadata: Metadata, *frames: FrameEvents) -> None:
    """Apply frames as the next step."""
    metadata.apply(MetadataUpdate(metadata.applied + 1, events=frames))


def lives(metadata: Metadata) -> list[tuple[int, float, float | None]]:
    """The pid, first and last time of every process."""
    return [
        (found.pid, found.first_seen, found.ended) for found in metadata.processes(query(start=0, end=1e9))
    ]


def ended(pid: int, start_time: float | None = 50.0) -> dict[str, Any]:
    """A process ended."""
    return {"event": "process_end", "pid": pid, "start_time": start_time}


STARTED: dict[str, Any] = {"event": "agent_started", "version": "1.0", "pid": 7}


def test_a_process_has_one_row_for_its_life(metadata: Metadata) -> None:
    """It keeps what was said last of it; the same pid with another start is another process."""
    tell(metadata, frame_events(process(1), time=100.0))
    tell(metadata, frame_events(process(1, name="train.py"), time=110.0), frame_events(ended(1), time=120.0))
    tell(
        metadata,
        frame_events(process(1, 121.0), process(2, None), time=130.0),
        frame_events(ended(9), time=130.0),
    )

    assert [(1, 100.0, 120.0), (1, 130.0, None), (2, 130.0, None)] == lives(metadata)
    first, second, third = metadata.processes(query(start=0, end=1e9))
    assert (50.0, 121.0, None) == (first.start, second.start, third.start)
    assert {"pid": 1, "start_time": 50.0, "name": "train.py", "owner": {"user": "eve"}} == first.identity


def test_processes_are_found_by_the_time_they_lived(metadata: Metadata) -> None:
    """From the first time they were seen to their end, on the nodes asked for."""
    tell(
        metadata,
        frame_events(process(1), time=100.0),
        frame_events(ended(1), time=120.0),
        frame_events(process(2), time=150.0, node=2),
    )

    def found(start: float, end: float, nodes: list[int] | None = None) -> list[int]:
        return [item.pid for item in metadata.processes(query(start=start, end=end, nodes=nodes))]

    assert [] == found(0.0, 100.0)
    assert [1] == found(0.0, 100.1)
    assert [1] == found(120.0, 150.0)
    assert [2] == found(120.1, 150.1)
    assert [1, 2] == found(0.0, 200.0)
    assert [2] == found(0.0, 200.0, [2])


def test_an_agent_that_starts_again_ends_what_was_open(metadata: Metadata) -> None:
    """On its own node; what it still sees is open again, as the same process."""
    tell(
        metadata,
        frame_events(STARTED, process(1), process(2), time=100.0),
        frame_events(process(3), time=100.0, node=2, run=b"2" * 16),
    )
    tell(metadata, frame_events(STARTED, time=200.0, run=LATER_RUN))
    assert [(1, 100.0, 200.0), (2, 100.0, 200.0), (3, 100.0, None)] == lives(metadata)

    tell(metadata, frame_events(process(2), time=201.0, run=LATER_RUN))
    assert [(1, 100.0, 200.0), (2, 100.0, None), (3, 100.0, None)] == lives(metadata)


def test_what_an_earlier_run_left_behind_changes_nothing_that_is_newer(metadata: Metadata) -> None:
    """Its processes are those of its time: frames that were kept on disk come after those of the next run."""
    late = [
        frame_events(STARTED, process(1, name="old"), process(2, name="old"), time=100.0),
        frame_events({"event": "health", "entries": [{"detail": "old"}]}, process(3), time=110.0),
        frame_events(ended(3), ended(2), time=120.0),
    ]
    tell(
        metadata,
        frame_events(STARTED, time=200.0, run=LATER_RUN),
        frame_events(
            process(2, name="new"),
            {"event": "health", "entries": [{"detail": "new"}]},
            time=201.0,
            run=LATER_RUN,
        ),
    )
    tell(metadata, *late)

    assert [(1, 100.0, 200.0), (2, 100.0, None), (3, 110.0, 120.0)] == lives(metadata)
    assert ["old", "new", "python3"] == [
        item.identity["name"] for item in metadata.processes(query(start=0, end=1e9))
    ]
    assert {1: (201.0, {"entries": [{"detail": "new"}]})} == metadata.latest("health")


def test_the_state_of_a_node_is_what_was_said_last(metadata: Metadata) -> None:
    """Each list replaces the one before, all are among the events, and a new agent begins with none."""
    tell(
        metadata,
        frame_events({"event": "findings", "findings": [{"id": "x"}], "verdict": "slow"}, time=100.0),
        frame_events({"event": "health", "entries": []}, time=100.0, node=2, run=LATER_RUN),
    )
    tell(metadata, frame_events({"event": "findings", "findings": [], "verdict": None}, time=90.0))

    assert {1: (90.0, {"findings": [], "verdict": None})} == metadata.latest("findings")
    assert {2: (100.0, {"entries": []})} == metadata.latest("health")
    assert {} == metadata.latest("clock_step")
    assert ["findings", "findings", "health"] == [
        event.kind for event in metadata.events(query(start=0, end=1e9))
    ]

    tell(metadata, frame_events(STARTED, time=300.0, run=b"3" * 16))
    assert {} == metadata.latest("findings")
    assert [2] == list(metadata.latest("health"))


def test_other_events_are_kept_as_they_are(metadata: Metadata) -> None:
    """Also those that only a newer version knows; processes are not among them."""
    events: list[dict[str, Any]] = [
        STARTED,
        {"event": "clock_step", "seconds": -3600.0},
        {"event": "aurora", "colour": "green"},
    ]
    tell(metadata, frame_events(*events, process(1), {"event": "agent_stopping"}, time=100.0))

    assert [
        StoredEvent(100.0, "agent_started", 1, {"version": "1.0", "pid": 7}),
        StoredEvent(100.0, "clock_step", 1, {"seconds": -3600.0}),
        StoredEvent(100.0, "aurora", 1, {"colour": "green"}),
        StoredEvent(100.0, "agent_stopping", 1, {}),
    ] == metadata.events(query(start=0, end=1e9))


@pytest.mark.parametrize(
    "text",
    [
        b"[",
        b"\xff",
        b"{}",
        b"7",
        b"[7]",
        b'[{"event":7}]',
        b'[{"event":"process"}]',
        b'[{"event":"process","pid":true}]',
        b'[{"event":"process","pid":1e400}]',
        b'[{"event":"process","pid":1,"start_time":"x"}]',
        b'[{"event":"process","pid":1,"start_time":NaN}]',
        b'[{"event":"process","pid":99999999999999999999}]',
        b'[{"event":"process_end","pid":[]}]',
        b'[{"event":"clock_step","seconds":Infinity}]',
        b'[{"event":"health","entries":[1e999]}]',
        b'[{"event":"\\ud800"}]',
        b"[" * 100_000,
        b"9" * 10_000,
    ],
)
def test_what_cannot_be_read_is_one_event_that_says_so(metadata: Metadata, text: bytes) -> None:
    """It names the frame, and what stands beside it is kept."""
    tell(
        metadata,
        FrameEvents(1, RUN, 17, 100.0, text),
        frame_events({"event": "gap", "frames": 2}, time=101.0),
    )

    odd, gap = metadata.events(query(start=0, end=1e9))
    assert ("unreadable_event", 1) == (odd.kind, odd.node)
    assert {"run": RUN.hex(), "sequence": 17, "events": 1} == odd.detail
    assert "gap" == gap.kind
    assert ([], {}) == (lives(metadata), metadata.latest("health"))


def test_events_beside_an_unreadable_one_are_kept(metadata: Metadata) -> None:
    """However many cannot be read, they are one event."""
    tell(metadata, FrameEvents(1, RUN, 1, 100.0, b'[1,{"event":"gap"},2,{"event":"process","pid":5}]'))

    assert [("gap", None), ("unreadable_event", 2)] == [
        (event.kind, event.detail.get("events")) for event in metadata.events(query(start=0, end=1e9))
    ]
    assert [(5, 100.0, None)] == lives(metadata)


_positions = count(1)
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)
_NAMES = st.sampled_from(["process", "process_end", "agent_started", "health", "findings", "x"])


@given(
    st.binary(max_size=40)
    | st.lists(
        _JSON | st.fixed_dictionaries({"event": _NAMES}, optional={"pid": _JSON, "start_time": _JSON}),
        max_size=4,
    )
)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_event_stops_the_metadata(metadata: Metadata, events: Any) -> None:
    """Whatever an agent sends, the step is taken and everything can be read again."""
    text = events if isinstance(events, bytes) else json.dumps(events).encode()
    assert metadata.apply(MetadataUpdate(next(_positions), events=[FrameEvents(1, RUN, 1, 100.0, text)]))
    metadata.events(query(start=0, end=1e9))
    metadata.processes(query(start=0, end=1e9))
    metadata.latest("health")
