"""State of all notifications, its transitions, and its file in the head's data directory.

Findings change and messages are queued in pure functions.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

import msgspec
from msgspec import Struct, field
from msgspec.structs import replace

from gpulse.atomic_files import replace_file
from gpulse.cluster.notify import outbox
from gpulse.cluster.notify.changes import (
    AnnouncedFinding,
    ChangeRules,
    NotifiableFinding,
    detect_changes,
    forget_announcements,
)
from gpulse.cluster.notify.config import NotifyConfig, Target
from gpulse.cluster.notify.outbox import Message, OutgoingMessage, SendRules, TargetQueue
from gpulse.cluster.notify.templates import build_digest
from gpulse.errors import DiskError, file_hint
from gpulse.store.damage import add_checksum, strip_checksum

STATE_VERSION = 1
STATE_FILE = "notifications.json"
_MAX_FILE_BYTES = 256 << 20
log = logging.getLogger(__name__)


class NotifyState(Struct, frozen=True):
    """What must survive a restart of the head; it contains names of targets, but never their URLs."""

    version: int = STATE_VERSION
    tracked: dict[str, AnnouncedFinding] = field(default_factory=dict)
    """Findings that were announced and are not resolved, by key."""
    queues: dict[str, TargetQueue] = field(default_factory=dict)
    """By name of the target."""
    next_number: int = 1
    """Number of the next message."""

    def queue(self, target: str) -> TargetQueue:
        """Return the queue of a target."""
        return _queue(self.queues, target)


class FindingSnapshot(NamedTuple):
    """The active findings at one moment."""

    findings: Sequence[NotifiableFinding]
    time: float
    """Epoch seconds."""
    moved_nodes: Collection[str] = ()
    """Nodes that report to another head now."""


def apply_snapshot(state: NotifyState, snapshot: FindingSnapshot, config: NotifyConfig) -> NotifyState:
    """Return the state after a look at the active findings.

    Changes wait in the queues of their targets. Those of findings that were acknowledged or silenced before they were
    sent are withdrawn.
    """
    rules = ChangeRules(config.routes, config.resolve_seconds, config.repeat_seconds)
    now = snapshot.time
    tracked, changes = detect_changes(
        state.tracked, snapshot.findings, rules, now, moved_nodes=snapshot.moved_nodes
    )
    queues = dict(state.queues)
    for name in config.targets:
        new = [change for change in changes if change.target == name]
        if new:
            queues[name] = outbox.add_changes(_queue(queues, name), new, now)
    muted = {finding.key for finding in snapshot.findings if finding.acknowledged or finding.silenced}
    for name, queue in queues.items() if muted else ():
        queues[name], keys = outbox.withdraw(queue, muted)
        tracked = forget_announcements(tracked, ((key, name) for key in keys))
    return replace(state, tracked=tracked, queues=queues)


def prepare_messages(
    state: NotifyState, target: Target, config: NotifyConfig, now: float, *, sending: Collection[int] = ()
) -> tuple[NotifyState, list[OutgoingMessage]]:
    """Turn changes that are due into the next message of a target, and give up messages that are too old.

    Args:
        state: The state.
        target: The target.
        config: The settings.
        now: Epoch seconds.
        sending: Numbers of messages that are being sent.

    Returns:
        The state, and the messages that were given up.
    """
    rules = send_rules(target, config)
    queue, given_up = outbox.give_up(state.queue(target.name), rules, now, sending=sending)
    queue, due = outbox.take_due(queue, rules, now)
    if not given_up and not due:
        return state, []
    state = replace_queue(state, target.name, queue)
    if due:
        digest = build_digest(due, key=f"findings-{state.next_number}", link=config.link, now=now)
        state = queue_message(state, digest, target.name, now, is_digest=True)
    return state, given_up


def queue_message(
    state: NotifyState,
    message: Message,
    target: str,
    now: float,
    *,
    recipient: str | None = None,
    is_digest: bool = False,
) -> NotifyState:
    """Return the state with one more message to deliver."""
    number = state.next_number
    queue = outbox.add_message(
        state.queue(target), message, now, number=number, recipient=recipient, is_digest=is_digest
    )
    return replace_queue(replace(state, next_number=number + 1), target, queue)


def replace_queue(state: NotifyState, target: str, queue: TargetQueue) -> NotifyState:
    """Return the state with another queue of a target; the same state if that is equal."""
    if queue == state.queues.get(target):
        return state
    return replace(state, queues={**state.queues, target: queue})


def keep_targets(state: NotifyState, targets: Collection[str]) -> NotifyState:
    """Return the state without targets that are no longer configured."""
    gone = [
        (key, name) for key, known in state.tracked.items() for name in known.targets if name not in targets
    ]
    return replace(
        state,
        tracked=forget_announcements(state.tracked, gone),
        queues={name: queue for name, queue in state.queues.items() if name in targets},
    )


def send_rules(target: Target, config: NotifyConfig) -> SendRules:
    """Return the settings of a target's messages."""
    return SendRules(config.group_seconds, target.max_per_hour, config.give_up_seconds, config.quiet)


def _queue(queues: Mapping[str, TargetQueue], target: str) -> TargetQueue:
    """Return the queue of a target; an empty one if it has none."""
    return queues.get(target) or TargetQueue()


def load_state(path: str) -> NotifyState:
    """Return the stored state; an empty one if there is none, or if it is damaged, which is logged.

    A damaged file is kept under another name.

    Raises:
        DiskError: The file cannot be read.
    """
    try:
        with open(path, "rb") as file:
            data = file.read(_MAX_FILE_BYTES)
    except FileNotFoundError:
        return NotifyState()
    except OSError as error:
        raise DiskError(
            f"cannot read the notification state from {path}: {error.strerror}", hint=file_hint(error)
        ) from error
    try:
        state = msgspec.json.decode(strip_checksum(data)[0], type=NotifyState)
        if state.version == STATE_VERSION:
            return state
        reason = f"its version {state.version} is unknown"
    except ValueError as error:
        reason = str(error)
    log.error(
        "cannot use the notification state in %s: %s; active findings will be announced again", path, reason
    )
    with suppress(OSError):
        os.replace(path, f"{path}.damaged")
    return NotifyState()


def save_state(path: str, state: NotifyState) -> None:
    """Store the state durably.

    Raises:
        OSError: The file cannot be written; the old one is unchanged.
    """
    replace_file(path, add_checksum(msgspec.json.encode(state)), 0o600, has_umask=False)
