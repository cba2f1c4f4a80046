"""Messages of a head to people, and the queue of one target.

Changes wait there for the next message, and messages wait to be delivered. The functions are pure.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple, Protocol

from msgspec import Struct, field
from msgspec.structs import replace

from gpulse.cluster.notify.changes import Change, FindingRecord, is_at_least, is_quiet, passes_quiet
from gpulse.cluster.notify.config import QuietHours
from gpulse.model.finding import SEVERITIES, Severity

MAX_TITLE_CHARACTERS = 200
MAX_BODY_CHARACTERS = 12_000
MAX_RECIPIENT_CHARACTERS = 254
"""Length of a mail address that every server accepts."""
FIRST_RETRY_SECONDS = 10.0
MAX_RETRY_SECONDS = 600.0
"""The delay between two attempts doubles up to this one."""
MAX_WAITING_MESSAGES = 200
"""Maximum number of messages of one target that wait, without those about findings."""
_HOUR_SECONDS = 3600.0


class Message(NamedTuple):
    """One message in plain text; text from outside is already safe in it."""

    key: str
    """Identifies the message: the same key is not queued a second time while the first one waits."""
    title: str
    """One line: the subject of a mail."""
    body: str
    severity: Severity = "info"
    is_resolved: bool = False
    """Whether it only says that something is over."""
    waits_for_quiet_end: bool = False
    """Whether it is not sent in quiet hours, unless its severity is one of their exceptions."""


class MessageSender(Protocol):
    """Accepts messages for delivery."""

    def send(self, message: Message, targets: Sequence[str], *, recipient: str | None = None) -> bool:
        """Queue a message for each target; returns at once, from any thread.

        The message is stored before it is sent, and sent again until the target accepts it or the time for that is over.
        It is subject to the limit per hour. Messages that wait for the same recipient are sent as one.

        Args:
            message: The message.
            targets: Names of targets in the configuration; unknown ones are logged and skipped.
            recipient: Mail address that replaces the recipients of a mail target; None for the target's own.

        Returns:
            False if too many messages wait, so that it was queued for no target, and must be sent again.
        """

    def is_stored(self, key: str) -> bool:
        """Return whether no message with this key would be lost now if the head were killed."""

    def is_waiting(self, key: str) -> bool:
        """Return whether a message with this key is queued and not delivered yet."""


class PendingFinding(Struct, frozen=True):
    """The changes of one finding since the last message."""

    record: FindingRecord
    began: int
    """How often it began."""
    resolved: int
    """How often it was resolved."""
    is_active: bool
    first: float
    """Time of the first of these changes."""
    last: float
    """Time of the last of these changes."""


class OutgoingMessage(Struct, frozen=True):
    """A message that is not delivered yet."""

    id: int
    key: str
    title: str
    body: str
    severity: str
    is_resolved: bool
    created: float
    next_try: float
    recipient: str | None = None
    attempts: int = 0
    is_digest: bool = False
    """Whether it is about changes of findings; a target has at most one of them."""
    waits_for_quiet_end: bool = False
    """Whether it is not sent in quiet hours."""
    grouped_keys: tuple[str, ...] = ()
    """Keys of further messages that are part of this one."""

    def has_key(self, key: str) -> bool:
        """Return whether this is, or contains, the message with a key."""
        return key == self.key or key in self.grouped_keys


class TargetQueue(Struct, frozen=True):
    """What one target has not received yet, and how its deliveries went."""

    pending: dict[str, PendingFinding] = field(default_factory=dict)
    """By key of the finding."""
    pending_since: float | None = None
    messages: tuple[OutgoingMessage, ...] = ()
    sent_at: dict[str, tuple[float, ...]] = field(default_factory=dict)
    """When messages that are not about findings were sent within the last hour, by recipient.

    The target's own recipients are an empty text.
    """
    digests_sent_at: tuple[float, ...] = ()
    """When messages about findings were sent within the last hour: no other messages delay them."""
    sent_total: int = 0
    failed_total: int = 0
    """Attempts that failed."""
    given_up_total: int = 0
    error: str | None = None
    """Why the last attempt failed; None after a success."""
    failing_since: float | None = None


class SendRules(NamedTuple):
    """Settings of one target's messages."""

    group_seconds: float
    max_per_hour: int
    give_up_seconds: float
    quiet: QuietHours | None = None


def add_changes(queue: TargetQueue, changes: Iterable[Change], now: float) -> TargetQueue:
    """Return the queue with further changes of findings, which were noticed now."""
    pending = dict(queue.pending)
    for change in changes:
        before = pending.get(change.record.key)
        pending[change.record.key] = PendingFinding(
            change.record,
            int(change.kind == "begin") + (before.began if before else 0),
            int(change.kind == "resolved") + (before.resolved if before else 0),
            change.kind != "resolved",
            before.first if before else change.time,
            change.time,
        )
    since = now if queue.pending_since is None else queue.pending_since
    return replace(queue, pending=pending, pending_since=since if pending else None)


def withdraw(queue: TargetQueue, muted: Collection[str]) -> tuple[TargetQueue, list[str]]:
    """Remove what nobody wants to hear any more: beginnings and reminders of muted findings.

    Args:
        queue: The queue.
        muted: Keys of findings that are acknowledged or silenced.

    Returns:
        The queue, and the keys of the findings whose beginning was removed.
    """
    pending, withdrawn = dict(queue.pending), []
    for key in [key for key, entry in pending.items() if entry.is_active and key in muted]:
        entry = pending.pop(key)
        if entry.began:
            withdrawn.append(key)
        if entry.resolved:
            pending[key] = replace(entry, began=entry.began - bool(entry.began), is_active=False)
    if len(pending) == len(queue.pending) and not withdrawn:
        return queue, []
    return replace(queue, pending=pending, pending_since=queue.pending_since if pending else None), withdrawn


def take_due(queue: TargetQueue, rules: SendRules, now: float) -> tuple[TargetQueue, list[PendingFinding]]:
    """Remove and return the changes that the next message is about; none if it is not time for one.

    Changes wait for `group_seconds`, until the previous message about findings is delivered, until the limit per hour
    permits a message, and until quiet hours are over. Those that were stored before the clock was set back are due.
    """
    if (
        queue.pending_since is None
        or 0 <= now - queue.pending_since < rules.group_seconds
        or any(message.is_digest for message in queue.messages)
        or len(_recent(queue.digests_sent_at, now)) >= rules.max_per_hour
    ):
        return queue, []
    due = queue.pending
    if rules.quiet is not None and is_quiet(rules.quiet, now):
        due = {key: entry for key, entry in due.items() if passes_quiet(entry.record, rules.quiet)}
    if not due:
        return queue, []
    left = {key: entry for key, entry in queue.pending.items() if key not in due}
    queue = replace(
        queue,
        pending=left,
        pending_since=queue.pending_since if left else None,
        digests_sent_at=(*_recent(queue.digests_sent_at, now), now),
    )
    return queue, list(due.values())


def has_room(queue: TargetQueue) -> bool:
    """Return whether one more message may wait that is not about findings."""
    return sum(not message.is_digest for message in queue.messages) < MAX_WAITING_MESSAGES


def add_message(
    queue: TargetQueue,
    message: Message,
    now: float,
    *,
    number: int,
    recipient: str | None = None,
    is_digest: bool = False,
) -> TargetQueue:
    """Return the queue with a message to deliver; the same queue if it has one with that key and recipient."""
    if any(one.has_key(message.key) and one.recipient == recipient for one in queue.messages):
        return queue
    outgoing = OutgoingMessage(
        number,
        message.key,
        message.title,
        message.body,
        message.severity,
        message.is_resolved,
        now,
        now,
        recipient,
        is_digest=is_digest,
        waits_for_quiet_end=message.waits_for_quiet_end,
    )
    return replace(queue, messages=(*queue.messages, outgoing))


def next_message(queue: TargetQueue, rules: SendRules, now: float) -> OutgoingMessage | None:
    """Return the message that may be sent now, first those about findings, then the oldest; None if there is none.

    One whose next attempt is too far in the future was stored before the clock was set back, and is sent now.
    """
    for message in sorted(queue.messages, key=lambda one: not one.is_digest):
        is_due = message.next_try <= now or message.next_try > now + MAX_RETRY_SECONDS
        is_counted = message.is_digest or message.attempts > 0
        if (
            is_due
            and not _is_held(message, rules, now)
            and (is_counted or _may_send(queue, message.recipient or "", rules, now))
        ):
            return message
    return None


def group_messages(
    queue: TargetQueue, first: OutgoingMessage, rules: SendRules, now: float
) -> tuple[TargetQueue, OutgoingMessage]:
    """Add to a message those that wait for the same recipient, as many as fit into one.

    Only messages that were never tried are grouped, and none about findings: those are collected as changes.

    Returns:
        The queue, and the message to send.
    """
    if first.is_digest or first.attempts > 0:
        return queue, first
    parts, length = [first], _part_length(first)
    for message in queue.messages:
        if (
            message.id != first.id
            and message.recipient == first.recipient
            and not message.is_digest
            and message.attempts == 0
            and not _is_held(message, rules, now)
            and length + _part_length(message) <= MAX_BODY_CHARACTERS
        ):
            parts.append(message)
            length += _part_length(message)
    if parts == [first]:
        return queue, first
    more = f" (and {len(parts) - 1} more)"
    severities: list[Severity] = [one for one in SEVERITIES if any(one == part.severity for part in parts)]
    grouped = replace(
        first,
        title=f"{first.title[: MAX_TITLE_CHARACTERS - len(more)]}{more}",
        body="\n\n".join(f"{part.title}\n{part.body}" for part in parts),
        severity=severities[-1] if severities else first.severity,
        is_resolved=all(part.is_resolved for part in parts),
        created=min(part.created for part in parts),
        grouped_keys=tuple(
            key for part in parts for key in (part.key, *part.grouped_keys) if key != first.key
        ),
    )
    added = {part.id for part in parts} - {first.id}
    left = tuple(grouped if one.id == first.id else one for one in queue.messages if one.id not in added)
    return replace(queue, messages=left), grouped


def begin_attempt(queue: TargetQueue, number: int, now: float) -> TargetQueue:
    """Return the queue after a message was handed to the delivery process."""
    message = next((one for one in queue.messages if one.id == number), None)
    if message is None:
        return queue
    if not message.is_digest and message.attempts == 0:
        queue = _count_sent(queue, message.recipient or "", now)
    return _replace_message(queue, replace(message, attempts=message.attempts + 1))


def mark_delivered(queue: TargetQueue, number: int) -> TargetQueue:
    """Return the queue after the target accepted a message."""
    left = tuple(message for message in queue.messages if message.id != number)
    return replace(
        queue,
        messages=left,
        sent_total=queue.sent_total + len(queue.messages) - len(left),
        error=None,
        failing_since=None,
    )


def mark_failed(queue: TargetQueue, number: int, error: str, now: float) -> TargetQueue:
    """Return the queue after an attempt failed: the message is tried again later."""
    message = next((one for one in queue.messages if one.id == number), None)
    if message is None:
        return queue
    delay = min(MAX_RETRY_SECONDS, FIRST_RETRY_SECONDS * 2.0 ** min(30, max(0, message.attempts - 1)))
    queue = _replace_message(queue, replace(message, next_try=now + delay))
    since = now if queue.failing_since is None else queue.failing_since
    return replace(queue, failed_total=queue.failed_total + 1, error=error, failing_since=since)


def give_up(
    queue: TargetQueue, rules: SendRules, now: float, *, sending: Collection[int] = ()
) -> tuple[TargetQueue, list[OutgoingMessage]]:
    """Remove and return the messages that were tried for too long.

    Args:
        queue: The queue.
        rules: The settings.
        now: Epoch seconds.
        sending: Numbers of messages that are being sent, and so not given up yet.
    """
    old = [
        message
        for message in queue.messages
        if message.attempts > 0
        and message.id not in sending
        and now - message.created >= rules.give_up_seconds
    ]
    if not old:
        return queue, []
    left = tuple(message for message in queue.messages if message not in old)
    return replace(queue, messages=left, given_up_total=queue.given_up_total + len(old)), old


def waiting_count(queue: TargetQueue) -> int:
    """Return how many changes and messages wait."""
    return len(queue.pending) + len(queue.messages)


def _part_length(message: OutgoingMessage) -> int:
    """Return how many characters a message takes in a grouped one, with the empty line after it."""
    return len(message.title) + len(message.body) + 3


def _is_held(message: OutgoingMessage, rules: SendRules, now: float) -> bool:
    """Return whether a message waits for the end of quiet hours."""
    if not message.waits_for_quiet_end or rules.quiet is None or not is_quiet(rules.quiet, now):
        return False
    lowest = rules.quiet.except_severity
    return lowest is None or not any(
        one == message.severity for one in SEVERITIES if is_at_least(one, lowest)
    )


def _replace_message(queue: TargetQueue, changed: OutgoingMessage) -> TargetQueue:
    return replace(queue, messages=tuple(changed if one.id == changed.id else one for one in queue.messages))


def _may_send(queue: TargetQueue, recipient: str, rules: SendRules, now: float) -> bool:
    return len(_recent(queue.sent_at.get(recipient, ()), now)) < rules.max_per_hour


def _count_sent(queue: TargetQueue, recipient: str, now: float) -> TargetQueue:
    recent = {name: times for name, all_times in queue.sent_at.items() if (times := _recent(all_times, now))}
    return replace(queue, sent_at={**recent, recipient: (*recent.get(recipient, ()), now)})


def _recent(times: Iterable[float], now: float) -> tuple[float, ...]:
    """Return the times within the last hour; those after now are from before the clock was set back."""
    return tuple(time for time in times if now - _HOUR_SECONDS < time <= now)
