"""Queue of a target: grouping, limits per hour, quiet hours, and retries."""

from __future__ import annotations

from datetime import time
from zoneinfo import ZoneInfo

import pytest

from gpulse.cluster.notify import outbox
from gpulse.cluster.notify.changes import Change, ChangeKind, is_quiet, make_record
from gpulse.cluster.notify.config import NotifyConfig, QuietHours, Route, Target
from gpulse.cluster.notify.notify_state import (
    FindingSnapshot,
    NotifyState,
    apply_snapshot,
    prepare_messages,
    queue_message,
    replace_queue,
    send_rules,
)
from gpulse.cluster.notify.outbox import (
    MAX_BODY_CHARACTERS,
    MAX_TITLE_CHARACTERS,
    Message,
    SendRules,
    TargetQueue,
)
from gpulse.cluster.notify.secret_text import SecretText
from tests.unit.notified_findings import NOW, Active

FAULT = Active()
SLOW = Active("input_workers/n1/0", "input_workers", "input_workers", "slowness", "medium")
RULES = SendRules(30.0, 3, 3600.0)
NIGHT = QuietHours(time(22), time(7), ZoneInfo("Europe/Berlin"), except_categories=("fault",))
MIDNIGHT = NOW  # 2026-01-01 01:00 in Berlin


def changed(queue: TargetQueue, finding: Active, kind: ChangeKind, now: float) -> TargetQueue:
    """The queue with one more change."""
    return outbox.add_changes(queue, [Change("admins", kind, now, make_record(finding))], now)


def with_message(queue: TargetQueue, number: int, now: float = NOW, **given: str) -> TargetQueue:
    """The queue with a message of somebody else."""
    message = Message(f"idle-{number}", "title", "body")
    return outbox.add_message(queue, message, now, number=number, recipient=given.get("to"))


def test_changes_are_collected_and_sent_together() -> None:
    """The first of them starts the time."""
    queue = changed(changed(TargetQueue(), FAULT, "begin", NOW), SLOW, "begin", NOW + 29)

    assert [] == outbox.take_due(queue, RULES, NOW + 29.9)[1]
    queue, due = outbox.take_due(queue, RULES, NOW + 30)
    assert ([FAULT.key, SLOW.key], {}) == ([entry.record.key for entry in due], queue.pending)


def test_a_finding_that_came_and_went_between_two_messages_is_one_entry_with_both_changes() -> None:
    """However often it did so."""
    queue = TargetQueue()
    for number in range(5):
        queue = changed(queue, FAULT, "begin", NOW + number)
        queue = changed(queue, FAULT, "resolved", NOW + number + 0.5)
    _, due = outbox.take_due(queue, RULES, NOW + 60)

    assert [(5, 5, False)] == [(entry.began, entry.resolved, entry.is_active) for entry in due]


def test_what_was_acknowledged_before_it_was_sent_is_withdrawn() -> None:
    """The end of an earlier occurrence stays."""
    queue = changed(changed(TargetQueue(), FAULT, "begin", NOW), SLOW, "resolved", NOW)
    queue = changed(queue, SLOW, "begin", NOW + 5)
    queue, withdrawn = outbox.withdraw(queue, {FAULT.key, SLOW.key})

    assert {FAULT.key, SLOW.key} == set(withdrawn)
    assert [(SLOW.key, 0, 1)] == [(key, entry.began, entry.resolved) for key, entry in queue.pending.items()]


def test_messages_beyond_the_limit_per_hour_wait_and_become_one() -> None:
    """Nothing is lost: an hour after the first message, the next one has everything."""
    queue, sent = TargetQueue(), []
    for number in range(8):
        now = NOW + number * 100
        queue = changed(queue, FAULT._replace(key=f"gpu_fault/n{number}/0"), "begin", now)
        queue, due = outbox.take_due(queue, RULES._replace(group_seconds=0.0), now)
        sent.append(len(due))
    _, due = outbox.take_due(queue, RULES._replace(group_seconds=0.0), NOW + 3600)

    assert ([1, 1, 1, 0, 0, 0, 0, 0], 5) == (sent, len(due))


def test_quiet_hours_delay_everything_but_their_exceptions() -> None:
    """What waits is sent in the morning."""
    rules = RULES._replace(quiet=NIGHT)
    queue = changed(changed(TargetQueue(), FAULT, "begin", NOW), SLOW, "begin", NOW)
    queue, at_night = outbox.take_due(queue, rules, MIDNIGHT + 60)
    queue, later = outbox.take_due(queue, rules, MIDNIGHT + 5 * 3600)
    _, morning = outbox.take_due(queue, rules, MIDNIGHT + 6 * 3600)

    assert ([FAULT.key], [], [SLOW.key]) == tuple(
        [entry.record.key for entry in found] for found in (at_night, later, morning)
    )


@pytest.mark.parametrize(
    ("start", "end", "hour", "expected"),
    [(22, 7, 23, True), (22, 7, 7, False), (22, 7, 21, False), (1, 5, 3, True), (1, 5, 5, False)],
)
def test_quiet_hours_may_include_midnight(start: int, end: int, hour: int, *, expected: bool) -> None:
    """They are in the time zone of the settings."""
    quiet = QuietHours(time(start), time(end), ZoneInfo("Europe/Berlin"))

    assert expected == is_quiet(quiet, NOW + (hour - 1) * 3600)


def test_the_next_message_about_findings_waits_until_the_last_one_is_delivered() -> None:
    """So a target that is down for long gets two messages, not hundreds."""
    queue = outbox.add_message(TargetQueue(), Message("1", "t", "b"), NOW, number=1, is_digest=True)
    queue = changed(queue, FAULT, "begin", NOW)

    assert [] == outbox.take_due(queue, RULES, NOW + 600)[1]
    assert 1 == len(outbox.take_due(outbox.mark_delivered(queue, 1), RULES, NOW + 600)[1])


def test_a_failed_message_is_tried_again_after_growing_delays() -> None:
    """At most ten minutes."""
    queue, now, delays = with_message(TargetQueue(), 1), NOW, []
    for _ in range(9):
        queue = outbox.begin_attempt(queue, 1, now)
        queue = outbox.mark_failed(queue, 1, "refused", now)
        (message,) = queue.messages
        delays.append(message.next_try - now)
        now = message.next_try

    assert [10, 20, 40, 80, 160, 320, 600, 600, 600] == delays
    assert ("refused", NOW, 9) == (queue.error, queue.failing_since, queue.failed_total)


def test_nothing_waits_for_a_clock_that_was_set_back() -> None:
    """The head may have been started with a wrong clock."""
    queue = changed(with_message(TargetQueue(), 1, NOW + 86_400), FAULT, "begin", NOW + 86_400)
    found = outbox.next_message(queue, RULES, NOW)

    assert (1, 1) == (found and found.id, len(outbox.take_due(queue, RULES, NOW)[1]))


def test_a_message_that_fails_for_too_long_is_given_up_unless_it_is_being_sent() -> None:
    """It is counted."""
    queue = outbox.mark_failed(
        outbox.begin_attempt(with_message(TargetQueue(), 1), 1, NOW), 1, "refused", NOW
    )

    assert [] == outbox.give_up(queue, RULES, NOW + 3600, sending={1})[1]
    queue, old = outbox.give_up(queue, RULES, NOW + 3600)
    assert ([1], 1, ()) == ([one.id for one in old], queue.given_up_total, queue.messages)


def test_a_message_to_one_recipient_does_not_wait_for_that_to_another() -> None:
    """Mail servers refuse single addresses."""
    queue = with_message(with_message(TargetQueue(), 1, to="alice@example.com"), 2, to="bob@example.com")
    queue = outbox.mark_failed(outbox.begin_attempt(queue, 1, NOW), 1, "refused", NOW)
    found = outbox.next_message(queue, RULES, NOW)

    assert 2 == (found and found.id)


def test_each_recipient_has_its_own_limit_per_hour() -> None:
    """Messages beyond it wait."""
    queue = TargetQueue()
    for number in range(1, 6):
        queue = with_message(queue, number, to="alice@example.com")
    sent = []
    while (message := outbox.next_message(queue, RULES, NOW)) is not None:
        queue = outbox.mark_delivered(outbox.begin_attempt(queue, message.id, NOW), message.id)
        sent.append(message.id)
    found = outbox.next_message(queue, RULES, NOW + 3601)

    assert ([1, 2, 3], 4) == (sent, found and found.id)


def test_a_waiting_message_is_not_queued_twice_and_the_queue_is_bounded() -> None:
    """A message about findings does not count: it always has room, and takes none."""
    queue = outbox.add_message(TargetQueue(), Message("f", "t", "b"), NOW, number=0, is_digest=True)
    room = []
    for number in range(1, outbox.MAX_WAITING_MESSAGES + 1):
        room.append(outbox.has_room(queue))
        queue = with_message(with_message(queue, number), number)

    assert (outbox.MAX_WAITING_MESSAGES + 1, {True}) == (len(queue.messages), set(room))
    assert not outbox.has_room(queue)


def test_messages_that_wait_for_the_same_recipient_are_sent_as_one() -> None:
    """It has all of their keys; one that was tried, and one for somebody else, stay alone."""
    queue = TargetQueue()
    for number, to in enumerate(("ada@example.com", "ada@example.com", "bob@example.com", "ada@example.com")):
        queue = with_message(queue, number, to=to)
    queue = outbox.mark_failed(outbox.begin_attempt(queue, 0, NOW), 0, "refused", NOW)
    first = outbox.next_message(queue, RULES, NOW)
    assert first is not None
    queue, sent = outbox.group_messages(queue, first, RULES, NOW)

    assert ("title (and 1 more)", "title\nbody\n\ntitle\nbody") == (sent.title, sent.body)
    assert [True, True] == [sent.has_key("idle-1"), sent.has_key("idle-3")]
    assert [0, 1, 2] == [message.id for message in queue.messages]
    assert queue == with_message(queue, 3, to="ada@example.com")


def test_a_grouped_message_is_not_longer_than_one_may_be() -> None:
    """The rest is the next one."""
    queue = TargetQueue()
    for number in range(5):
        message = Message(f"idle-{number}", "t" * 200, "b" * 4000)
        queue = outbox.add_message(queue, message, NOW, number=number)
    queue, sent = outbox.group_messages(queue, queue.messages[0], RULES, NOW)

    assert (True, True, 4) == (
        len(sent.body) <= MAX_BODY_CHARACTERS,
        len(sent.title) <= MAX_TITLE_CHARACTERS,
        len(queue.messages),
    )
    long = outbox.add_message(TargetQueue(), Message("long", "t", "b" * MAX_BODY_CHARACTERS), NOW, number=9)
    long = with_message(with_message(long, 10), 11)
    assert (long, long.messages[0]) == outbox.group_messages(long, long.messages[0], RULES, NOW)


def test_messages_to_operators_wait_for_the_end_of_quiet_hours_and_warnings_to_users_do_not() -> None:
    """Unless their severity is an exception."""
    rules = RULES._replace(quiet=NIGHT._replace(except_severity="high"))
    operators = Message("1", "t", "b", waits_for_quiet_end=True)
    queue = outbox.add_message(TargetQueue(), operators, NOW, number=1)
    urgent = outbox.add_message(queue, operators._replace(key="2", severity="high"), NOW, number=2)
    user = with_message(queue, 3)
    times = (MIDNIGHT + 60, MIDNIGHT + 6 * 3600)

    assert [(None, 1), (2, 1), (3, 1)] == [
        tuple((found := outbox.next_message(one, rules, now)) and found.id for now in times)
        for one in (queue, urgent, user)
    ]
    assert 2 == len(outbox.group_messages(user, user.messages[1], rules, times[0])[0].messages)


def test_idle_messages_neither_delay_nor_drop_findings() -> None:
    """In a day with twice as many idle messages as the limit permits, every finding is sent when its group is due."""
    target = Target("admins", "json", SecretText("json://host"), 20)
    config = NotifyConfig({"admins": target}, (Route(("admins",)),))
    rules = send_rules(target, config)
    state, active, delays, sent_keys = NotifyState(), list[Active](), list[float](), set[str]()
    for tick in range(24 * 120):
        now = NOW + 30.0 * tick
        if tick % 3 == 0:
            state = queue_message(state, Message(f"idle-{tick}", "title", "body"), "admins", now)
        if tick % 240 == 0:
            active.append(FAULT._replace(key=f"gpu_fault/n{tick}/0", severity="critical", since=now))
            state = apply_snapshot(state, FindingSnapshot(active, now), config)
        state, _ = prepare_messages(state, target, config, now)
        queue = state.queue("admins")
        message = outbox.next_message(queue, rules, now)
        if message is not None:
            queue, message = outbox.group_messages(queue, message, rules, now)
            sent_keys |= {message.key, *message.grouped_keys}
            delays += [now - active[-1].since] if message.is_digest else []
            queue = outbox.mark_delivered(outbox.begin_attempt(queue, message.id, now), message.id)
            state = replace_queue(state, "admins", queue)

    assert ([30.0] * 12, 0) == (delays, state.queue("admins").given_up_total)
    waiting = {f"idle-{tick}" for tick in range(0, 24 * 120, 3)} - sent_keys
    assert len(waiting) == len(state.queue("admins").messages) <= 40


def test_findings_are_sent_while_the_queue_of_other_messages_is_full() -> None:
    """And before them."""
    target = Target("admins", "json", SecretText("json://host"), 20)
    config = NotifyConfig({"admins": target}, (Route(("admins",)),))
    state = NotifyState()
    for number in range(outbox.MAX_WAITING_MESSAGES):
        state = queue_message(state, Message(f"idle-{number}", "title", "body"), "admins", NOW)
    state = apply_snapshot(state, FindingSnapshot([FAULT], NOW), config)
    state, _ = prepare_messages(state, target, config, NOW + 30)
    found = outbox.next_message(state.queue("admins"), send_rules(target, config), NOW + 30)

    assert found is not None
    assert (True, 0) == (found.is_digest, state.queue("admins").given_up_total)
