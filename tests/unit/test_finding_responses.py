"""Acknowledgements and silences: what they are about, and how long they hold."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulse.cluster.head.active_findings import ActiveFinding, collect_active_findings
from gpulse.cluster.head.finding_operations import MAX_SILENCES, FindingResponses, is_about
from gpulse.cluster.protocol.operations import call_operation
from gpulse.model.finding_acknowledgement import (
    ACKNOWLEDGED_EVENT,
    MAX_SILENCE_SECONDS,
    SILENCE_ENDED_EVENT,
    SILENCED_EVENT,
    Silence,
)
from gpulse.model.process import Owner, ProcessIdentity
from tests.unit.fake_head import NOW, FakeHead
from tests.unit.test_active_findings import WORKERS, live

HOUR = 3600.0
KEY = "input_too_few_workers/n1/1"
GIVEN: dict[str, Any] = {"nodes": ["alpha"], "seconds": "2h", "reason": "being repaired", "by": "mo"}


def waiting(**fields: Any) -> ActiveFinding:
    """A finding of frances and grace on one GPU."""
    owners = {8: Owner(user="frances", job="slurm:1"), 9: Owner(user="grace", job="slurm:1")}
    processes = {pid: ProcessIdentity(pid, owner=owner) for pid, owner in owners.items()}
    (found,) = collect_active_findings(
        [live("n1", WORKERS._replace(pids=(8, 9)), processes=processes)], [], NOW
    )
    return found._replace(**fields)


def silence(**fields: Any) -> Silence:
    """A silence of two hours."""
    return Silence("s1", NOW, NOW + 2 * HOUR, "being repaired", "mo", **fields)


def test_an_acknowledgement_holds_as_long_as_the_condition() -> None:
    """When it returns after it was over, it is new."""
    responses = FindingResponses()
    responses.apply(ACKNOWLEDGED_EVENT, NOW, {"keys": [KEY], "by": "mo", "note": "known"})

    assert [True, True, False, False] == [
        responses.is_acknowledged(waiting(since=NOW - 60)),
        responses.is_acknowledged(waiting(since=NOW)),
        responses.is_acknowledged(waiting(since=NOW + 60)),
        responses.is_acknowledged(waiting(key="input_too_few_workers/n1/0")),
    ]


@pytest.mark.parametrize(
    ("fields", "is_met"),
    [
        ({"findings": ("input_too_few_workers",)}, True),
        ({"findings": ("gpu_fault", "input_too_few_workers"), "nodes": ("n1",)}, True),
        ({"findings": ("input_too_few_workers",), "nodes": ("n2",)}, False),
        ({"gpus": ("n1:1",)}, True),
        ({"gpus": ("n1:0", "n2:1")}, False),
        ({"users": ("frances",)}, False),
        ({"users": ("frances", "grace", "mo")}, True),
        ({"jobs": ("slurm:1",)}, True),
        ({"jobs": ("slurm:2",)}, False),
        ({}, False),
    ],
)
def test_a_silence_matches_what_meets_all_of_its_fields(fields: dict[str, Any], *, is_met: bool) -> None:
    """One for a single user does not hide what affects another, and one about nothing hides nothing."""
    responses = FindingResponses()
    responses.apply(SILENCED_EVENT, NOW, silence(**fields).to_dict())

    assert (is_met, False) == (
        responses.is_silenced(waiting(), NOW + 1),
        responses.is_silenced(waiting(), NOW + 2 * HOUR),
    )


_NAMES = {
    "findings": ("input_too_few_workers", "gpu_fault"),
    "nodes": ("n1", "n2"),
    "gpus": ("n1:1", "n1:0"),
    "users": ("frances", "grace", "mo"),
    "jobs": ("slurm:1", "slurm:2"),
}
_CHOICES = {field: st.lists(st.sampled_from(names), min_size=1) for field, names in _NAMES.items()}


@given(
    st.lists(
        st.tuples(st.fixed_dictionaries({}, optional=_CHOICES).filter(bool), st.integers(1, 100)), max_size=6
    )
)
def test_the_last_ending_silence_that_matches_is_found(
    given_silences: list[tuple[dict[str, Any], int]],
) -> None:
    """However it is looked up: with all of its fields, not only the one by which it is indexed."""
    finding, responses = waiting(), FindingResponses()
    made = [
        Silence(
            f"s{place}", NOW, NOW + seconds, "r", "mo", **{name: tuple(some) for name, some in fields.items()}
        )
        for place, (fields, seconds) in enumerate(given_silences)
    ]
    for one in made:
        responses.apply(SILENCED_EVENT, NOW, one.to_dict())
    matching = [one for one in made if is_about(one, finding)]

    assert max(matching, key=lambda one: (one.until, one.id), default=None) == responses.silence_of(
        finding, NOW
    )


@given(st.randoms(use_true_random=False), st.integers(1, 3))
def test_the_order_of_events_does_not_matter(order: random.Random, times: int) -> None:
    """Several heads share them: each may see its own first, and events more than once."""
    other = silence(nodes=("n2",))._replace(id="s2")
    events = [
        (ACKNOWLEDGED_EVENT, NOW, {"keys": [KEY], "by": "ada"}),
        (ACKNOWLEDGED_EVENT, NOW + 5, {"keys": [KEY, "x/y"], "by": "mo"}),
        (SILENCED_EVENT, NOW, silence(nodes=("n1",)).to_dict()),
        (SILENCED_EVENT, NOW + 1, other.to_dict()),
        (SILENCE_ENDED_EVENT, NOW + 9, {"id": "s1", "by": "mo"}),
    ] * times
    order.shuffle(events)
    responses = FindingResponses()
    for kind, time, detail in events:
        responses.apply(kind, time, detail)
    known = responses.acknowledgement(KEY, NOW)

    assert ("mo", [other]) == (known and known.by, responses.silences(NOW + 10))


@given(
    st.sampled_from([ACKNOWLEDGED_EVENT, SILENCED_EVENT, SILENCE_ENDED_EVENT, "node_lost"]),
    st.dictionaries(
        st.sampled_from([*Silence._fields, "keys", "note"]),
        st.none()
        | st.booleans()
        | st.floats()
        | st.text(max_size=3)
        | st.lists(st.text(max_size=3) | st.integers()),
    ),
)
def test_events_that_make_no_sense_change_nothing(kind: str, detail: dict[str, Any]) -> None:
    """They may come from another version through a shared database."""
    responses = FindingResponses()
    responses.apply(SILENCED_EVENT, NOW, silence(nodes=("n1",)).to_dict())
    responses.apply(kind, NOW, detail)

    assert silence(nodes=("n1",)) in responses.silences(NOW + 1)


@pytest.mark.parametrize(
    ("operation", "body", "word"),
    [
        ("silence", {**GIVEN, "seconds": None}, "either `until` or `seconds`, but not both"),
        ("silence", {**GIVEN, "until": NOW + 60}, "either `until` or `seconds`, but not both"),
        ("silence", {**GIVEN, "seconds": MAX_SILENCE_SECONDS + 1}, "within 30 days"),
        ("silence", {**GIVEN, "seconds": 0}, "within 30 days"),
        ("silence", {**GIVEN, "seconds": None, "until": NOW - 60}, "within 30 days"),
        ("silence", {**GIVEN, "reason": None}, "reason is missing"),
        ("silence", {**GIVEN, "reason": ""}, "reason must be"),
        ("silence", {**GIVEN, "by": None}, "by is missing"),
        ("silence", {**GIVEN, "nodes": []}, "findings or nodes"),
        ("silence", {"seconds": 60, "reason": "r", "by": "mo"}, "findings or nodes"),
        ("end_silence", {"silence": "s9", "by": "mo"}, "no active silence 's9'"),
        ("acknowledge", {"keys": ["gpu_fault/alpha/0"], "by": "mo"}, "no current finding"),
        ("acknowledge", {"group": "gpu_fault", "by": "mo"}, "no current finding in group"),
        ("acknowledge", {"by": "mo"}, "keys or group is missing"),
    ],
)
async def test_what_is_refused(operation: str, body: dict[str, Any], word: str) -> None:
    """A silence needs an end, a reason and somebody who wants it."""
    head = FakeHead()
    status, answer = await call_operation(head, operation, body, now=NOW)

    assert status in (400, 404, 409)
    assert word in getattr(answer, "error", "")
    assert [] == head.asked


async def test_silences_are_limited_in_number() -> None:
    """Those that are over make room."""
    head = FakeHead()
    statuses = [(await call_operation(head, "silence", GIVEN, now=NOW))[0] for _ in range(MAX_SILENCES + 1)]
    head.time += 3 * HOUR

    assert [200] * MAX_SILENCES + [409] == statuses
    assert 200 == (await call_operation(head, "silence", GIVEN, now=head.time))[0]


async def test_the_groups_say_who_knows_and_what_is_silenced() -> None:
    """Silenced findings are in a list of their own; acknowledged ones stay in the list of now."""
    head = FakeHead()
    head.finding = WORKERS._replace(gpu=0, label="0")

    async def states() -> list[tuple[int, ...]]:
        found: list[tuple[int, ...]] = []
        for state in ("now", "acknowledged", "silenced"):
            groups: Any = (await call_operation(head, "finding_groups", {"state": state}, now=NOW))[1]
            found.append(
                (len(groups.groups), groups.counts.now, groups.counts.acknowledged, groups.counts.silenced)
            )
        return found

    assert [(1, 1, 0, 0), (0, 1, 0, 0), (0, 1, 0, 0)] == await states()
    await call_operation(
        head, "acknowledge", {"keys": ["input_too_few_workers/alpha/0"], "by": "mo"}, now=NOW
    )
    assert [(1, 1, 1, 0), (1, 1, 1, 0), (0, 1, 1, 0)] == await states()
    made: Any = (await call_operation(head, "silence", GIVEN, now=NOW))[1]
    assert (1, "mo", NOW + 2 * HOUR) == (made.matches, made.by, made.until)
    assert [(0, 0, 1, 1), (1, 0, 1, 1), (1, 0, 1, 1)] == await states()
    await call_operation(head, "end_silence", {"silence": made.id, "by": "ada"}, now=NOW)
    assert [(1, 1, 1, 0), (1, 1, 1, 0), (0, 1, 1, 0)] == await states()
