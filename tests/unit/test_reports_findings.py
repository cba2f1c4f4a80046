"""Findings over time: which reports make one finding, and what the API answers about them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from gpulse.cluster.head.fleet import Fleet
from gpulse.cluster.protocol import requests as r
from gpulse.cluster.protocol.requests import Time
from gpulse.diagnosis.rules.faults import node_lost, node_missing
from gpulse.errors import RefusedError
from gpulse.model.finding import (
    MAX_GAP_SECONDS,
    MAX_SILENCE_SECONDS,
    CodeLocation,
    Evidence,
    Finding,
    finding_from_document,
)
from gpulse.reports import event_report, finding_report
from gpulse.store.log.record_payloads import LogEntry
from gpulse.store.metadata.local_metadata import Metadata, MetadataUpdate
from gpulse.store.store import StoredEvent
from tests.queries import query
from tests.unit.metadata_records import frame_events
from tests.unit.report_lab import BEGIN, Document, Lab, as_json

DAY = 86_400


def finding(number: str = "slow", label: str | None = "0", **more: Any) -> dict[str, Any]:
    """A finding as an agent tells it."""
    return {"id": number, "severity": "high", "summary": "waits", "gpu": 0, "label": label, **more}


def fault(cause: str, severity: str = "critical", **more: Any) -> dict[str, Any]:
    """A fault of GPU 0."""
    return finding("gpu_fault", cause=cause, severity=severity, **more)


def told(time: float, *found: Any, node: int = 1, **more: Any) -> StoredEvent:
    """All findings of a node at a time."""
    return StoredEvent(time, "findings", node, {"findings": list(found), **more})


def happens(time: float, kind: str, node: int | None = 1, **detail: Any) -> StoredEvent:
    """Something else at a time."""
    return StoredEvent(time, kind, node, detail)


class Story:
    """A store with two nodes, and the question over it; seconds count from the beginning."""

    def __init__(self, lab: Lab) -> None:
        self._lab = lab
        self.archive = lab.archive

    def tell(self, *events: StoredEvent) -> None:
        """These happen, seconds after the beginning."""
        self.archive.commit(
            [
                LogEntry.of_fact(
                    "event", time=BEGIN + one.time, kind=one.kind, node=one.node, detail=dict(one.detail)
                )
                for one in events
            ]
        )

    async def ask(self, start: float, end: float | None, *nodes: str, now: float) -> Document:
        """Findings over time."""
        until = None if end is None else Time(BEGIN + end)
        request = r.GetFindingSpans(start=Time(BEGIN + start), end=until, nodes=nodes)
        return as_json(await self._lab.reports.finding_spans(request, BEGIN + now))

    def held(self) -> list[tuple[str, float, float | None]]:
        """Which finding held from when to when."""
        return self.spans("id")

    def spans(self, *names: str) -> list[tuple[Any, ...]]:
        """These fields of every finding, and from when to when it held."""
        return [
            (
                *(getattr(one.finding, name) for name in names),
                one.span.start - BEGIN,
                one.span.end and one.span.end - BEGIN,
            )
            for one in self.archive.findings(query(start=0.0, end=2.0 * BEGIN))
        ]

    def live(self, now: float, *reported: Any) -> list[tuple[str, float]]:
        """What a head that starts now tells of the first node when it gets a report, and since when."""
        fleet = Fleet(self.archive.nodes(), {}, self.archive.layouts)
        fleet.restore(self.archive, BEGIN + now)
        member = fleet.members[1]
        member.apply_events([{"event": "findings", "findings": list(reported)}], BEGIN + now)
        return [(one.id, (one.start or 0.0) - BEGIN) for one in member.findings]

    async def events(self, start: float, end: float) -> Document:
        """What happened."""
        request = r.GetEvents(start=Time(BEGIN + start), end=Time(BEGIN + end))
        return as_json(await self._lab.reports.events(request, BEGIN + end))


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


def test_a_finding_goes_on_while_it_is_reported(story: Story) -> None:
    """It begins when its first report says, and keeps that start."""
    story.tell(told(10, finding(start=5004.0, end=5010.0)), told(40, finding(start=5020.0, end=5040.0)))
    story.tell(told(70, finding(), finding("hot")), told(100, finding("hot")))

    assert [("slow", 4, 100), ("hot", 70, None)] == story.held()


@pytest.mark.parametrize(
    ("away", "spans"),
    [
        (MAX_GAP_SECONDS - 40, [("slow", 0, None)]),
        (MAX_GAP_SECONDS + 40, [("slow", 0, 30), ("slow", MAX_GAP_SECONDS + 40, None)]),
    ],
)
def test_one_that_comes_back_soon_goes_on(
    story: Story, away: float, spans: list[tuple[str, float, float | None]]
) -> None:
    """After a long absence it is a new one."""
    story.tell(told(0, finding()), told(30), told(away, finding()))
    assert spans == story.held()


@pytest.mark.parametrize("kind", ["agent_stopping", "node_lost"])
@pytest.mark.parametrize(
    ("number", "away", "is_same"),
    [
        ("slow", MAX_SILENCE_SECONDS - 10, True),
        ("slow", MAX_SILENCE_SECONDS + 60, False),
        ("gpu_fault", 9 * DAY, True),
    ],
)
def test_a_restart_ends_nothing_that_is_reported_again(
    story: Story, kind: str, number: str, away: float, is_same: bool
) -> None:
    """What was found before a long silence is a new finding after it, except a fault, which stays until a reset."""
    story.tell(told(0, finding(number)), happens(20, kind))
    assert [(number, 0, 20)] == story.held()

    story.tell(happens(away, "agent_started"), told(away, finding(number)))
    assert [(number, 0, None)] == story.held() if is_same else [(number, 0, 20), (number, away, None)]


def test_an_agent_that_starts_again_changes_nothing_until_it_reports(story: Story) -> None:
    """The live page shows its findings all the time, so the history does as well."""
    story.tell(told(0, finding()), happens(20, "agent_started"))
    assert [("slow", 0, None)] == story.held()

    story.tell(told(65))
    assert [("slow", 0, 65)] == story.held()


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_an_agent_that_has_just_started_reports_faults_first(story: Story, order: tuple[int, ...]) -> None:
    """Slowness takes longer to recognise: it goes on, while what only the new agent reported and withdrew is over."""
    story.tell(told(0, finding(), fault("ecc")), happens(20, "agent_stopping"), happens(600, "agent_started"))
    reports = [
        told(600, fault("ecc"), finding("hot"), watched_seconds=0.0),
        told(610, fault("ecc"), watched_seconds=10.0),
        told(650, fault("ecc"), finding()),
    ]
    story.tell(*(reports[place] for place in order))

    assert [("gpu_fault", 0, None), ("slow", 0, None), ("hot", 600, 610)] == story.held()


def test_the_live_view_keeps_what_an_agent_cannot_have_recognised_again(story: Story) -> None:
    """Until its reports are complete."""
    fleet = Fleet({}, {}, {})
    fleet.restore(story.archive, BEGIN)
    member = fleet.members[1]
    shown = []
    for event in (
        told(0, finding(), fault("ecc")),
        told(600, fault("ecc"), watched_seconds=0.0),
        told(630, fault("ecc"), finding(), watched_seconds=30.0),
        told(650, fault("ecc")),
    ):
        member.apply_events([{**event.detail, "event": "findings"}], BEGIN + event.time)
        shown.append(sorted((one.id, (one.start or 0.0) - BEGIN) for one in member.findings))

    assert [[("gpu_fault", 0), ("slow", 0)]] * 3 + [[("gpu_fault", 0)]] == shown


def test_a_fault_that_was_mended_while_nobody_looked(story: Story) -> None:
    """The first report of the next agent is without it: it ended when the reports did, and another one is new."""
    story.tell(told(0, finding("gpu_fault")), happens(20, "agent_stopping"), happens(300, "agent_started"))
    story.tell(told(310, finding("hot")), told(500, finding("hot"), finding("gpu_fault")))

    assert [("gpu_fault", 0, 20), ("hot", 310, None), ("gpu_fault", 500, None)] == story.held()


def test_a_gpu_has_several_faults_at_once(story: Story) -> None:
    """Each has a start and an end of its own; so has the same fault on another GPU."""
    story.tell(told(0, fault("ecc")), told(30, fault("ecc"), fault("xid_94"), fault("remap", "medium")))
    story.tell(told(60, fault("ecc"), fault("remap", "medium"), fault("ecc", label="1")))

    found = story.spans("cause", "label")
    assert [
        ("ecc", "0", 0, None),
        ("remap", "0", 30, None),
        ("xid_94", "0", 30, 60),
        ("ecc", "1", 60, None),
    ] == found


def test_reports_that_come_late_make_the_same_spans(tmp_path: Path) -> None:
    """An agent sends what it could not send before after its newest frames."""
    reports: list[tuple[float, dict[str, Any]]] = [
        (0, {"event": "findings", "findings": [finding()]}),
        (30, {"event": "findings", "findings": [finding()]}),
        (40, {"event": "agent_started"}),
        (60, {"event": "findings", "findings": [finding()]}),
        (90, {"event": "findings", "findings": []}),
    ]
    found = set()
    for number, order in enumerate(permutations(reports)):
        with Metadata(str(tmp_path / str(number))) as metadata:
            metadata.apply(
                MetadataUpdate(1, [], {}, [frame_events(event, time=time) for time, event in order])
            )
            found |= {one.span[:3:2] for one in metadata.findings(query(start=-1, end=1e9))}
    assert {(0, 90)} == found


@pytest.mark.parametrize("listed", [None, 7, {"id": "x"}, ["x", None, {}, {"id": 3}, {"id": "node_lost"}]])
def test_what_is_no_finding_is_none(story: Story, listed: Any) -> None:
    """Agents of other versions may say anything; what heads alone can know they do not."""
    story.tell(StoredEvent(10, "findings", 1, {"findings": listed}))
    assert [] == story.held()


def test_a_head_that_starts_again_knows_since_when(story: Story) -> None:
    """The live view has the start that history has."""
    story.tell(told(0, fault("ecc")), told(500, fault("ecc"), finding("hot")))
    story.tell(happens(600, "agent_started"), told(600, fault("ecc")))

    assert [("gpu_fault", 0), ("hot", 500)] == story.live(610, fault("ecc"), finding("hot"))
    assert [("gpu_fault", 0), ("hot", 800)] == story.live(800, fault("ecc"), finding("hot"))
    assert ("gpu_fault", 0, None) == story.held()[0]


async def test_a_node_that_is_lost_is_a_finding(story: Story) -> None:
    """From when it was last heard until it is back; its own findings end when it was last heard."""
    lost = node_lost("n1", BEGIN + 100, BEGIN + 130, was_stopped=False).to_dict()
    story.tell(told(60, finding()), happens(130, "node_lost", finding=lost))
    assert [("slow", 60, 100), ("node_lost", 100, None)] == story.held()

    story.tell(happens(890, "agent_started"), happens(900, "node_back"))
    assert [("slow", 60, 100), ("node_lost", 100, 900)] == story.held()
    assert [("n1", 100, 900)] == times(await story.ask(200, 300, now=1000))


@pytest.mark.parametrize("kind", ["agent_started", "agent_stopping"])
def test_a_node_that_was_cut_off_has_its_findings_again(story: Story, kind: str) -> None:
    """When it is back, unless its agent ended meanwhile: then it is unknown until that reports."""
    story.tell(told(0, finding()), happens(40, "node_lost"), happens(50, "node_back"))
    assert [("slow", 0, None)] == story.held()

    story.tell(happens(60, "node_lost"), happens(61, kind), happens(70, "node_back"))
    assert [("slow", 0, 60)] == story.held()


async def test_a_node_that_is_missing_is_a_finding(story: Story) -> None:
    """By the name in the list of nodes, until it reports."""
    for name in ("n8", "n9"):
        finding = node_missing(name, BEGIN + 5, BEGIN + 20).to_dict()
        story.tell(happens(20, "node_missing", None, name=name, finding=finding))
    story.tell(happens(70, "node_found", None, name="n9"))

    assert [("n8", 5, None), ("n9", 5, 70)] == sorted(times(await story.ask(0, None, now=100)))
    assert [] == times(await story.ask(0, None, "n1", now=100))


def test_odd_fields_become_unknown() -> None:
    """A finding is always of the same form, whatever an agent of another version reported."""
    odd: dict[str, Any] = {
        "id": "x", "label": 3, "gpu": True, "severity": None, "summary": 5, "lost_ratio": "1", "confidence": True,
        "pids": [1, "2", True], "evidence": [1, {}], "advice": {}, "url": 1, "family": [], "cause": 4,
        "where": [{"pid": "1"}, 2], "where_note": 3,
    }  # fmt: skip

    found = finding_from_document(odd)
    assert math.isnan(found.confidence)
    assert Finding("x", None, "info", 0.0, "", pids=(1,), where=()) == found._replace(confidence=0.0)


def test_a_finding_survives_being_stored() -> None:
    """All of its fields are there again."""
    whole = node_lost("n1", 100.0, 130.0, was_stopped=False)._replace(
        gpu=0, label="0", evidence=(Evidence("power", "mean", 1.0, ">", 0.5),), counter_evidence=(), cause="x"
    )
    place = CodeLocation(
        7, "worker", "/home/a/train.py", 84, "tokenize", 0.83, 40, "json/encoder.py:258 encode"
    )
    for finding in (
        whole,
        whole._replace(where=(place,)),
        whole._replace(where=(), where_note="no single line"),
    ):
        assert finding == finding_from_document(finding.to_dict())


async def test_one_finding_is_the_same_in_every_range(story: Story) -> None:
    """Its start and end are its own, also where they lie outside of the time asked for."""
    reports = [told(time, finding(summary=str(time))) for time in range(-500, 20 * DAY, 600)]
    story.tell(*reports, told(20 * DAY))
    for begin, end in ((-1000, 30 * DAY), (0, 30 * DAY), (19 * DAY, 20 * DAY), (DAY, DAY + 60)):
        assert [("n1", -500, 20 * DAY)] == times(await story.ask(begin, end, now=30 * DAY))
    assert [] == times(await story.ask(20 * DAY, 30 * DAY, now=30 * DAY))


async def test_the_answer(story: Story) -> None:
    """What holds now has no end."""
    story.tell(told(-500, finding()), told(100, finding(), node=2), told(200, node=2))

    assert [("n1", -500, None), ("n2", 100, 200)] == times(await story.ask(0, None, now=300))
    assert [("n2", 100, 200)] == times(await story.ask(0, 300, "n2", now=900))
    assert [] == times(await story.ask(10, 10, "n2", now=300))
    with pytest.raises(RefusedError, match="no node"):
        await story.ask(0, None, "n9", now=300)


async def test_many_spans_are_too_many(story: Story, monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest are told, and that there are more."""
    story.tell(*(told(time, finding(str(time))) for time in range(30, 600, 30)))
    whole = await story.ask(0, 600, now=600)
    monkeypatch.setattr(finding_report, "_MAX_FINDINGS", 3)
    part = await story.ask(0, 600, now=600)

    assert (False, True) == (whole["truncated"], part["truncated"])
    assert whole["spans"][-3:] == part["spans"]


async def test_the_newest_events(story: Story, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only as many as are told are read, oldest first; that there are more is said when there are."""
    monkeypatch.setattr(event_report, "_MAX_EVENTS", 3)
    story.tell(*(happens(time, "gap") for time in (10, 20, 30, 40)))

    cut, whole = await story.events(0, 100), await story.events(15, 100)
    assert (True, False) == (cut["truncated"], whole["truncated"])
    assert cut["events"] == whole["events"]
    assert ["20", "30", "40"] == [event["time"][17:19] for event in cut["events"]]
