"""Findings over time: from tellings to spans, and as the API answers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulse.cluster.api.interface import Document, RefusedError
from gpulse.cluster.head.membership import Register
from gpulse.cluster.head.past import happened
from gpulse.cluster.head.past.findings import Span, described, newest, spans
from gpulse.cluster.head.past.happened import Happened
from gpulse.store.base import StoredEvent
from gpulse.store.entry import Entry
from tests.unit.past_lab import BEGIN, Lab

DAY = 86_400


def finding(number: str = "slow", label: str | None = "0", **more: Any) -> dict[str, Any]:
    """A finding as an agent tells it."""
    return {"id": number, "severity": "high", "summary": "waits", "gpu": 0, "label": label, **more}


def told(time: float, *found: Any, node: int = 1) -> StoredEvent:
    """All findings of a node at a time."""
    return StoredEvent(time, "findings", node, {"findings": list(found)})


def happens(time: float, kind: str, node: int = 1) -> StoredEvent:
    """Something else at a time."""
    return StoredEvent(time, kind, node, {})


def lengths(found: list[Span]) -> list[tuple[str, float, float | None]]:
    """Which finding held from when to when."""
    return [(str(span.finding["id"]), span.first, span.last) for span in found]


def test_a_finding_holds_until_it_is_told_no_more() -> None:
    """With the words of its last telling; one that comes again is another span."""
    events = [
        told(10, finding(summary="a")),
        told(40, finding(summary="b"), finding("hot")),
        told(70, finding("hot")),
        told(90, finding("hot"), finding(summary="c")),
    ]
    found = spans(events, 0)

    assert [("slow", 10, 70), ("hot", 40, None), ("slow", 90, None)] == lengths(found)
    assert ["b", "waits", "c"] == [span.finding["summary"] for span in found]


@pytest.mark.parametrize("kind", ["agent_started", "agent_stopping", "node_lost"])
def test_silence_ends_all_of_a_node(kind: str) -> None:
    """Of that node alone."""
    events = [told(10, finding()), told(10, finding(), node=2), happens(20, kind), told(30, finding())]

    assert [("slow", 10, 20), ("slow", 10, None), ("slow", 30, None)] == lengths(spans(events, 0))


def test_an_agent_tells_its_start_with_what_it_found() -> None:
    """In one frame, whatever comes first in it."""
    events = [told(10, finding()), told(20, finding()), happens(20, "agent_started")]
    assert [("slow", 10, 20), ("slow", 20, None)] == lengths(spans(events, 0))


def test_other_events_end_nothing() -> None:
    """A late node may still be heard of."""
    assert [("slow", 10, None)] == lengths(spans([told(10, finding())], 0))
    assert [("slow", 10, 12)] == lengths(spans([told(10, finding()), told(12)], 0))


def test_what_was_there_before_begins_with_the_time() -> None:
    """What was over by then is left out."""
    events = [told(10, finding(), finding("hot")), told(20, finding()), told(50)]
    assert [("slow", 30, 50)] == lengths(spans(events, 30))
    assert [] == spans(events, 50)


def test_gpus_have_findings_of_their_own() -> None:
    """The same one on two GPUs is two; one that is told twice of a GPU is one, whatever it weighs."""
    events = [
        told(10, finding(), finding(label="1"), finding(label="0", severity="low")),
        told(20, finding(severity="low")),
    ]
    found = spans(events, 0)
    assert [("0", None), ("1", 20)] == [(span.finding["label"], span.last) for span in found]
    assert "low" == found[0].finding["severity"]


@pytest.mark.parametrize("listed", [None, 7, {"id": "x"}, ["x", None, {}, {"id": 3}]])
def test_what_is_no_finding_is_none(listed: Any) -> None:
    """Agents of other versions may say anything."""
    assert [] == spans([StoredEvent(10, "findings", 1, {"findings": listed})], 0)


def test_odd_fields_become_unknown() -> None:
    """The answer is always of the same form."""
    odd: dict[str, Any] = {
        "id": "x", "label": 3, "gpu": True, "severity": None, "summary": 5, "lost_ratio": "1", "confidence": True,
        "pids": [1, "2", True], "evidence": [1, {}], "advice": {}, "url": 1, "family": [],
    }  # fmt: skip
    (span,) = spans([told(10, odd)], 0)

    assert {
        "node": "n1", "gpu": None, "label": None, "id": "x", "family": None, "severity": "info", "summary": "",
        "lost_ratio": None, "confidence": None, "pids": [1], "from": 10, "to": 99.0, "evidence": [{}], "advice": [],
        "url": None,
    } == described(span, "n1", 99.0)  # fmt: skip


def test_the_newest_are_those_that_lasted_until_last() -> None:
    """They stay in their order."""
    found = [Span(1, first, last, finding()) for first, last in ((1, 9), (2, None), (3, 4), (5, 8))]

    assert [1, 2, 5] == [span.first for span in newest(found, 3)]
    assert [1, 2] == [span.first for span in newest(found, 2)]
    assert found == newest(found, 4)


TELLINGS = st.lists(
    st.tuples(
        st.integers(0, 40),
        st.integers(1, 2),
        st.one_of(st.none(), st.sets(st.tuples(st.sampled_from("ab"), st.sampled_from(("0", "1", None))))),
    ),
    max_size=25,
    unique_by=lambda item: item[:2],
)


@given(TELLINGS, st.integers(0, 40))
def test_at_any_moment_the_spans_are_what_was_told_last(
    tellings: list[tuple[int, int, set[tuple[str, str | None]] | None]], start: int
) -> None:
    """None is the loss of a node: nothing is known to hold until the next telling."""
    events = [
        happens(time, "node_lost", node)
        if found is None
        else told(time, *(finding(number, label) for number, label in found), node=node)
        for time, node, found in tellings
    ]
    result = spans(reversed(events), start)

    assert all(span.first >= start and (span.last is None or span.last > span.first) for span in result)
    assert [span.first for span in result] == sorted(span.first for span in result)
    for moment in range(start, 42):
        expected: set[tuple[int, str, str | None]] = set()
        for node in (1, 2):
            heard = [item for item in tellings if item[1] == node and item[0] <= moment]
            last = max(heard, default=(0, node, None), key=lambda item: item[0])[2]
            expected |= {(node, *key) for key in last or ()}
        holding = [
            (span.node, span.finding["id"], span.finding["label"])
            for span in result
            if span.first <= moment and (span.last is None or span.last > moment)
        ]
        assert len(holding) == len(set(holding))
        assert expected == set(holding)


class Story:
    """A store with two nodes, and the question over it; seconds count from the beginning."""

    def __init__(self, lab: Lab) -> None:
        self._archive = lab.archive
        self._happened = Happened(lab.archive, Register(lab.archive.nodes().values()), lab.past.node_ids)

    def tell(self, *events: StoredEvent) -> None:
        """These happen, seconds after the beginning."""
        self._archive.commit(
            [
                Entry.of_fact(
                    "event", time=BEGIN + one.time, kind=one.kind, node=one.node, detail=dict(one.detail)
                )
                for one in events
            ]
        )

    async def ask(self, start: float, end: float | None, *nodes: str, now: float) -> Document:
        """Findings over time."""
        until = None if end is None else BEGIN + end
        return await self._happened.finding_spans(
            start=BEGIN + start, end=until, nodes=nodes, now=BEGIN + now
        )

    async def events(self, start: float, end: float) -> Document:
        """What happened."""
        return await self._happened.events(start=BEGIN + start, end=BEGIN + end, kinds=(), nodes=())


@pytest.fixture
def story(tmp_path: Path) -> Iterator[Story]:
    """Nothing has happened yet."""
    with Lab(tmp_path, ("0",), ("0",)) as lab:
        yield Story(lab)


def times(answer: Document) -> list[tuple[str, float, float | None]]:
    """Node, beginning and end of each span."""
    return [
        (span["node"], span["from"] - BEGIN, None if span["to"] is None else span["to"] - BEGIN)
        for span in answer["spans"]
    ]


async def test_the_answer(story: Story) -> None:
    """What holds now has no end; what held at the end of a time in the past ends there."""
    story.tell(told(-500, finding()), told(100, finding(), node=2), told(200, node=2))

    assert [("n1", 0, None), ("n2", 100, 200)] == times(await story.ask(0, None, now=300))
    assert [("n1", 0, 150), ("n2", 100, 150)] == times(await story.ask(0, 150, now=300))
    assert [("n2", 100, 200)] == times(await story.ask(0, 300, "n2", now=900))
    assert [] == times(await story.ask(10, 10, now=300))
    with pytest.raises(RefusedError, match="no node"):
        await story.ask(0, None, "n9", now=300)


async def test_a_month_is_told_by_steps(story: Story) -> None:
    """Few events are read, and the spans are right but for a step; what holds is told with its last numbers."""
    gone, back = 10 * DAY, 20 * DAY
    story.tell(
        *(told(time, finding(summary=str(time))) for time in range(0, gone, 600)),
        *(told(time, finding(summary=str(time))) for time in range(back, 30 * DAY, 600)),
        happens(gone, "node_lost"),
    )
    answer = await story.ask(0, None, now=30 * DAY)

    assert 7200.0 == answer["step"]
    assert [0, gone, back] == pytest.approx([*times(answer)[0][1:], times(answer)[1][1]], abs=7200)
    assert None is times(answer)[1][2]
    assert str(30 * DAY - 600) == answer["spans"][1]["summary"]


@pytest.mark.parametrize(("seconds", "step"), [(60, 30), (18_000, 30), (18_100, 60), (DAY, 300)])
async def test_the_step_is_round_and_never_short(story: Story, seconds: float, step: float) -> None:
    """Agents tell twice a minute."""
    answer = await story.ask(0, seconds, now=seconds)
    assert step == answer["step"]


async def test_many_spans_are_too_many(story: Story, monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest are told, and that there are more."""
    story.tell(*(told(time, *([finding()] if time % 60 else [])) for time in range(30, 600, 30)))
    whole = await story.ask(0, 600, now=600)
    monkeypatch.setattr(happened, "_MOST_SPANS", 3)
    part = await story.ask(0, 600, now=600)

    assert (False, True) == (whole["truncated"], part["truncated"])
    assert whole["spans"][-3:] == part["spans"]


async def test_the_newest_events(story: Story, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only as many as are told are read, oldest first; that there are more is said when there are."""
    monkeypatch.setattr(happened, "_MOST_EVENTS", 3)
    story.tell(*(happens(time, "gap") for time in (10, 20, 30, 40)))

    cut, whole = await story.events(0, 100), await story.events(15, 100)
    assert (True, False) == (cut["truncated"], whole["truncated"])
    assert cut["events"] == whole["events"]
    assert ["20", "30", "40"] == [event["time"][17:19] for event in cut["events"]]
