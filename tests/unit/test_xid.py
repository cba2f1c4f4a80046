from __future__ import annotations

import threading
from typing import Any

import pytest

from gpulse.cluster.agent.event_detector import EventDetector
from gpulse.cluster.head.fleet import Fleet
from gpulse.model.device import Device, Node
from gpulse.model.frame import Frame, GpuReading
from gpulse.model.metric_catalog import Values
from gpulse.model.xid import XidCount, XidCounts, XidErrors, xid_from_document
from gpulse.sources.nvml.nvml_lifecycle import XidLog, XidSummary
from gpulse.store.store import Query, Store, StoredEvent, StoredNode

NOW = 1_767_225_600.0


def frame(second: int, values: Values) -> Frame:
    """A frame of one GPU."""
    moment = NOW + second
    return Frame(moment, moment, Node("x"), (GpuReading(Device(0, "GPU-0", "X"), values),))


def told(total: int, code: int, moment: float) -> Values:
    """Readings of Xid errors."""
    return {"xid_errors_total": total, "xid_last_code": code, "xid_last_timestamp_seconds": moment}


def test_a_burst_is_reported_code_by_code() -> None:
    """Errors of several codes between two frames are reported one code per frame, the latest last."""

    log = XidLog()
    assert {} == log.next()
    for code, moment in ((13, 1.0), (43, 2.0), (13, 3.0), (79, 4.0)):
        log.add("GPU-0", code, moment)
    log.add("GPU-1", 31, 5.0)

    frames = [log.next() for _ in range(4)]
    assert [
        XidSummary(1, 43, 2.0),
        XidSummary(3, 13, 3.0),
        XidSummary(4, 79, 4.0),
        XidSummary(4, 79, 4.0),
    ] == [each["GPU-0"] for each in frames]
    assert [XidSummary(1, 31, 5.0)] * 4 == [each["GPU-1"] for each in frames]


def test_nothing_is_lost_between_the_watcher_and_the_frames() -> None:
    """Errors that come while frames are taken are all counted."""

    log, counts = XidLog(), XidCounts()

    def watch() -> None:
        for number in range(3000):
            log.add("GPU-0", 13 + number % 3, float(number))

    watcher = threading.Thread(target=watch)
    watcher.start()
    second = 0
    while watcher.is_alive() or log._unreported:
        second += 1
        found = log.next().get("GPU-0")
        if found is not None:
            counts.follow(frame(second, told(*found)))
    watcher.join()

    assert {13: 1000, 14: 1000, 15: 1000} == {
        code: counted.errors for code, counted in counts.of("GPU-0").items()
    }


def test_counts_follow_frames() -> None:
    """New errors of a frame are returned and counted, also after the source restarted its count."""

    counts = XidCounts()
    assert [] == counts.follow(frame(0, {"xid_errors_total": 0}))
    assert [XidErrors("GPU-0", "0", 31, 2, NOW + 0.5)] == counts.follow(frame(1, told(2, 31, NOW + 0.5)))
    assert [] == counts.follow(frame(2, told(2, 31, NOW + 0.5)))
    assert [] == counts.follow(frame(3, {}))
    assert [XidErrors("GPU-0", "0", 79, 1, NOW + 3.5)] == counts.follow(frame(4, told(3, 79, NOW + 3.5)))
    assert [XidErrors("GPU-0", "0", 31, 1, NOW + 4.5)] == counts.follow(frame(5, told(1, 31, NOW + 4.5)))

    assert {31: XidCount(3, NOW + 4.5, NOW + 0.5), 79: XidCount(1, NOW + 3.5, NOW + 3.5)} == counts.of(
        "GPU-0"
    )
    assert {} == counts.of("GPU-1")


def test_an_agent_reports_each_error_once() -> None:
    """An event goes with the frame that has it, and is not repeated when everything else is."""

    changes = EventDetector(version="1", pid=1)
    changes(frame(0, {"xid_errors_total": 0}))
    events = changes(frame(1, told(1, 79, NOW + 0.5)))
    changes.again()
    after = changes(frame(2, told(1, 79, NOW + 0.5)))

    told_of = {"event": "xid", "uuid": "GPU-0", "gpu": "0", "code": 79, "errors": 1, "time": NOW + 0.5}
    assert [told_of] == [event for event in events if event["event"] == "xid"]
    assert [] == [event for event in after if event["event"] == "xid"]
    assert XidErrors("GPU-0", "0", 79, 1, NOW + 0.5) == xid_from_document(told_of)


@pytest.mark.parametrize(
    "wrong",
    [
        {"uuid": 5},
        {"gpu": None},
        {"code": -1},
        {"code": 1 << 20},
        {"code": "79"},
        {"errors": 0},
        {"errors": 1 << 40},
        {"time": None},
    ],
)
def test_what_is_no_error_is_not_counted(wrong: dict[str, object]) -> None:
    """An agent of another version may say anything."""

    good = {"uuid": "GPU-0", "gpu": "0", "code": 79, "errors": 1, "time": NOW}
    assert xid_from_document(good) is not None
    assert xid_from_document({**good, **wrong}) is None


def test_errors_that_are_reported_twice_count_once() -> None:
    """A head may hear of them through another head, and again from the agent, with another shift of its clock."""

    counts = XidCounts()
    first, second = XidErrors("GPU-0", "0", 79, 2, NOW), XidErrors("GPU-0", "0", 79, 1, NOW + 1)
    for told_at, shift in ((first, 0.0), (second, 0.0), (first, 5.0), (second, 5.0)):
        counts.add(told_at, shift_seconds=shift)
    for other in (first._replace(uuid="GPU-1"), first._replace(code=31)):
        counts.add(other, shift_seconds=5.0)

    assert {79: XidCount(3, NOW + 1, NOW), 31: XidCount(2, NOW + 5, NOW + 5)} == counts.of("GPU-0")
    assert {79: XidCount(2, NOW + 5, NOW + 5)} == counts.of("GPU-1")
    counts.add(second._replace(time=NOW + 1.5), shift_seconds=-5.0)
    assert XidCount(4, NOW + 1, NOW) == counts.of("GPU-0")[79]


def test_counts_are_bounded() -> None:
    """The number of GPUs and of codes per GPU is limited."""

    counts = XidCounts()
    for number in range(1000):
        counts.add(XidErrors(f"GPU-{number}", "0", 1, 1, NOW))
        counts.add(XidErrors("GPU-0", "0", number, 1, NOW))

    assert 64 == len(counts.of("GPU-0"))
    assert 256 == sum(bool(counts.of(f"GPU-{number}")) for number in range(1000))


class Before(Store):
    """What a head finds of the one before it."""

    def __init__(self, told: list[StoredEvent]) -> None:
        self._told = told

    def nodes(self) -> dict[int, StoredNode]:
        """One node."""
        return {1: StoredNode(1, "a", "a.example", "m", NOW, {}, {})}

    def latest(self, _kind: str) -> dict[int, tuple[float, dict[str, object]]]:
        """Nothing."""
        return {}

    def events(self, query: Query) -> list[StoredEvent]:
        """Return the reported errors."""
        return [event for event in self._told if query.kinds is None or event.kind in query.kinds]

    def seen(self, _node: int) -> float:
        """Some time."""
        return NOW


def test_counts_outlive_agents_and_heads() -> None:
    """A head counts the errors of its nodes across restarts of agents and heads."""

    event = {"uuid": "GPU-0", "gpu": "0", "code": 79, "errors": 2, "time": NOW}
    events = [StoredEvent(NOW, "xid", 1, event), StoredEvent(NOW, "xid", 1, {"code": "?"})]
    fleet = Fleet({}, {}, {})
    fleet.restore(Before(events), NOW + 10)
    member = fleet.members[1]
    member.shift_us = 5_000_000
    told: list[list[dict[str, Any]]] = [
        [{"event": "agent_started"}, {**event, "event": "xid", "errors": 1, "time": NOW + 20}],
        [{"event": "agent_started"}, {**event, "event": "xid", "code": 31, "errors": 1, "time": NOW + 30}],
    ]
    for documents in told:
        member.apply_events(documents, NOW)

    [node] = fleet.live()
    assert node.xids is not None
    assert {79: XidCount(3, NOW + 25, NOW), 31: XidCount(1, NOW + 35, NOW + 35)} == node.xids.of("GPU-0")
    assert ("a.example", "m") == (node.host, node.machine)


def test_a_head_remembers_who_left_in_order() -> None:
    """Including errors reported to the previous head; a new agent on the node starts over."""

    ended, started = {"event": "agent_stopping"}, {"event": "agent_started"}
    fleet = Fleet({}, {}, {})
    fleet.restore(Before([StoredEvent(NOW, "agent_stopping", 1, {})]), NOW + 10)
    seen = [fleet.live()[0].was_stopped]
    for document in (started, ended):
        fleet.members[1].apply_events([document], NOW)
        seen.append(fleet.live()[0].was_stopped)

    assert [True, False, True] == seen
