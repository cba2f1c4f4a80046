"""Changes of findings: each beginning and each end is told once to each target, whatever happens in between."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from gpulse.cluster.notify import outbox
from gpulse.cluster.notify.changes import AnnouncedFinding, ChangeRules, detect_changes
from gpulse.cluster.notify.config import Route
from gpulse.cluster.notify.notify_state import (
    FindingSnapshot,
    NotifyState,
    apply_snapshot,
    keep_targets,
    replace_queue,
    send_rules,
)
from tests.unit.notified_findings import NOW, Active, lost, settings

FAULT = Active()
ALL = ChangeRules((Route(("admins",), "info"),), resolve_seconds=0.0)


def told(
    *snapshots: Sequence[Active], rules: ChangeRules = ALL, step_seconds: float = 10.0
) -> list[tuple[str, str, str]]:
    """What targets are told about these snapshots, one every ten seconds: target, kind and node."""
    tracked: dict[str, AnnouncedFinding] = {}
    all_changes: list[tuple[str, str, str]] = []
    for number, findings in enumerate(snapshots):
        tracked, changes = detect_changes(tracked, findings, rules, NOW + number * step_seconds)
        all_changes += [(change.target, change.kind, change.record.node) for change in changes]
    return all_changes


def test_a_finding_is_told_when_it_begins_and_when_it_is_resolved() -> None:
    """And not in between."""

    assert [("admins", "begin", "n1"), ("admins", "resolved", "n1")] == told([], [FAULT], [FAULT], [], [])


def test_a_finding_that_returns_soon_was_never_gone() -> None:
    """Findings flicker around their thresholds."""
    patient = ALL._replace(resolve_seconds=15.0)

    assert [("admins", "begin", "n1")] == told([FAULT], [], [FAULT], [], [FAULT], rules=patient)


def test_an_acknowledged_finding_sends_nothing_new() -> None:
    """It begins when a silence ends, if it is still active then."""
    silenced, acknowledged = FAULT._replace(silenced=True), FAULT._replace(acknowledged=True)

    assert [] == told([acknowledged], [acknowledged], [])
    assert [("admins", "begin", "n1")] == told([silenced], [silenced], [FAULT])


def test_the_end_of_an_acknowledged_finding_is_told_to_those_who_heard_of_its_beginning() -> None:
    """Otherwise they would take it for active."""
    acknowledged = FAULT._replace(acknowledged=True)

    assert [("admins", "begin", "n1"), ("admins", "resolved", "n1")] == told([FAULT], [acknowledged], [])


def test_findings_of_a_lost_node_are_not_resolved() -> None:
    """Nothing is known about them until it is back."""
    expected = [
        ("admins", "begin", "n1"),
        ("admins", "begin", "n1"),
        ("admins", "resolved", "n1"),
        ("admins", "resolved", "n1"),
    ]

    assert expected[:2] == told([FAULT], [lost("n1")], [lost("n1")])
    assert expected == told([FAULT], [lost("n1")], [])


def test_findings_of_a_node_that_moved_to_another_head_are_left_to_that_head() -> None:
    """It announces them, and their end."""
    tracked, _ = detect_changes({}, [FAULT], ALL, NOW)

    assert ({}, []) == detect_changes(tracked, [], ALL, NOW + 10, moved_nodes={"n1"})


def test_a_target_is_told_when_a_finding_becomes_severe_enough_for_it() -> None:
    """The others are not told again."""
    routes = (Route(("team",), "low"), Route(("admins",), "critical"))
    medium = FAULT._replace(severity="medium")

    expected = [
        ("team", "begin", "n1"),
        ("admins", "begin", "n1"),
        ("team", "resolved", "n1"),
        ("admins", "resolved", "n1"),
    ]
    assert expected == told([medium], [FAULT], [], rules=ALL._replace(routes=routes))


def test_reminders_come_only_on_request_and_not_when_acknowledged() -> None:
    """Every `repeat_seconds`, while the finding is active."""
    repeat = ALL._replace(repeat_seconds=60.0)
    acknowledged = FAULT._replace(acknowledged=True)

    kinds = [kind for _, kind, _ in told(*[[FAULT]] * 14, rules=repeat)]
    assert ["begin", "reminder", "reminder"] == kinds
    assert ["begin"] == [kind for _, kind, _ in told([FAULT], *[[acknowledged]] * 14, rules=repeat)]


KEYS = ("gpu_fault/n1/0", "input_workers/n1/1", "gpu_fault/n2/0")
STATES = st.sampled_from(["absent", "active", "active", "acknowledged", "silenced"])
SNAPSHOTS = st.lists(
    st.tuples(
        st.tuples(*[STATES] * len(KEYS)),
        st.booleans(),  # n1 is lost
        st.booleans(),  # the head restarts
        st.booleans(),  # messages are sent
    ),
    max_size=30,
)


def snapshot(states: Sequence[str], *, is_lost: bool) -> list[Active]:
    """The findings of one moment; those of a lost node are not known."""
    found = [
        Active(
            key,
            key,
            key.split("/")[0],
            node=key.split("/")[1],
            acknowledged=state == "acknowledged",
            silenced=state == "silenced",
        )
        for key, state in zip(KEYS, states, strict=True)
        if state != "absent" and not (is_lost and "/n1/" in key)
    ]
    return [*found, lost("n1")] if is_lost else found


@given(SNAPSHOTS)
def test_beginnings_and_ends_alternate_in_messages_whatever_happens(
    history: list[tuple[tuple[str, str, str], bool, bool, bool]],
) -> None:
    """For each finding and target, also over restarts; when all is over, nobody takes anything for active."""
    config = settings(
        Route(("admins",), "info"), Route(("team",), "info", nodes=("n1",)), resolve_seconds=15.0
    )
    state, is_told, now = NotifyState(), Counter[tuple[str, str]](), NOW
    over = ((("absent",) * 3, False, False, True),) * 4
    for states, is_lost, is_restarted, is_sent in [*history, *over]:
        now += 10.0
        if is_restarted:
            stored = msgspec.json.encode(state)
            state = keep_targets(msgspec.json.decode(stored, type=NotifyState), config.targets)
        state = apply_snapshot(state, FindingSnapshot(snapshot(states, is_lost=is_lost), now), config)
        for name, target in config.targets.items() if is_sent else ():
            queue, due = outbox.take_due(state.queue(name), send_rules(target, config), now)
            state = replace_queue(state, name, queue)
            for entry in due:
                key = name, entry.record.key
                is_told[key] += entry.began - entry.resolved
                assert int(entry.is_active) == is_told[key]

    assert {} == {key: count for key, count in is_told.items() if count}
    assert ({}, {}) == (
        state.tracked,
        {name: queue.pending for name, queue in state.queues.items() if queue.pending},
    )


@given(st.lists(st.booleans(), max_size=40), st.integers(0, 3))
def test_every_time_that_a_finding_is_active_is_told_once(seen: list[bool], patience: int) -> None:
    """A gap that is shorter than `resolve_seconds` is none."""
    rules = ALL._replace(resolve_seconds=patience * 10.0)
    kinds = [kind for _, kind, _ in told(*([FAULT] if is_active else [] for is_active in seen), rules=rules)]
    text = "".join("x" if is_active else " " for is_active in seen).strip()
    times = len([part for part in text.split(" " * (patience + 1)) if part.strip()]) if text else 0

    assert times == kinds.count("begin")
    assert (["begin", "resolved"] * len(kinds))[: len(kinds)] == kinds
