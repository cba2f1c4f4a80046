"""Notifications of a running head: detects changes of findings and delivers messages, on a thread of its own."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

from gpulse.cluster.notify import outbox
from gpulse.cluster.notify.changes import NotifiableFinding
from gpulse.cluster.notify.config import NotifyConfig, Target
from gpulse.cluster.notify.delivery import DeliveryClient, message_url
from gpulse.cluster.notify.notify_state import (
    STATE_FILE,
    FindingSnapshot,
    NotifyState,
    apply_snapshot,
    keep_targets,
    load_state,
    prepare_messages,
    queue_message,
    replace_queue,
    save_state,
    send_rules,
)
from gpulse.cluster.notify.outbox import (
    MAX_BODY_CHARACTERS,
    MAX_RECIPIENT_CHARACTERS,
    MAX_TITLE_CHARACTERS,
    Message,
    OutgoingMessage,
    TargetQueue,
)
from gpulse.cluster.protocol.answers import NotificationTarget
from gpulse.model.finding import SEVERITIES, Severity

log = logging.getLogger(__name__)

MAX_PARALLEL_SENDS = 16
_STEP_SECONDS = 1.0
"""Maximum time between two rounds of the thread."""
_MAX_INBOX = 1000
"""Messages that are not stored; more wait only while the disk hangs, or while the queue of a target is full."""
_CLOSE_SECONDS = 5.0
"""How long closing waits for messages that are being sent: one that is cut off is sent again by the next head."""


class _DeliveryResult(NamedTuple):
    """The answer of the delivery process about one message."""

    number: int
    error: str | None


class _DirectMessage(NamedTuple):
    """A message that somebody else wants to send."""

    message: Message
    target: str
    recipient: str | None


class Notifier:
    """Sends notifications. `update`, `send` and `status` never block and may be called from any thread."""

    def __init__(self, config: NotifyConfig, data_dir: str, *, now: Callable[[], float]) -> None:
        """Prepare to send; `start` starts the thread.

        Args:
            config: The targets, routes and limits.
            data_dir: The head's data directory, which keeps what is not delivered.
            now: The head's clock.
        """
        self._config = config
        self._path = f"{data_dir}/{STATE_FILE}"
        self._now = now
        self._state = NotifyState()
        self._is_saved = True
        self._has_save_error = False
        self._sending: dict[int, str] = {}
        """Targets of the messages that are being sent, by number of the message."""
        self._client = DeliveryClient(lambda number, error: self._put(_DeliveryResult(number, error)))
        self._wake = threading.Condition()
        self._snapshot: FindingSnapshot | None = None
        self._inbox: deque[_DeliveryResult | _DirectMessage] = deque()
        self._unstored: list[_DirectMessage] = []
        """Messages that were taken from the inbox, and are not known to be on disk."""
        self._held: list[_DirectMessage] = []
        """Those of them that wait for room in the queue of their target."""
        self._is_closing = False
        self._status: tuple[NotificationTarget, ...] = ()
        self._thread = threading.Thread(target=self._run, name="notifications", daemon=True)

    def start(self) -> None:
        """Load the stored state and start.

        Raises:
            DiskError: The stored state cannot be read.
        """
        stored = load_state(self._path)
        for name in sorted(set(stored.queues) - set(self._config.targets)):
            if outbox.waiting_count(stored.queues[name]):
                log.warning("dropped the waiting notifications for %s, which is no longer a target", name)
        self._state = keep_targets(stored, self._config.targets)
        self._is_saved = self._state == stored
        self._publish_status()
        self._thread.start()

    def update(
        self, findings: Sequence[NotifiableFinding], now: float, *, moved_nodes: Collection[str] = ()
    ) -> None:
        """Set the findings that are active now; if the thread is late, only the newest are looked at.

        Args:
            findings: All active findings of the fleet.
            now: Epoch seconds.
            moved_nodes: Nodes that report to another head now.
        """
        with self._wake:
            self._snapshot = FindingSnapshot(findings, now, moved_nodes)
            self._wake.notify()

    def send(self, message: Message, targets: Sequence[str], *, recipient: str | None = None) -> bool:
        """Queue a message for each target: see `MessageSender`."""
        short = message._replace(
            title=message.title[:MAX_TITLE_CHARACTERS], body=message.body[:MAX_BODY_CHARACTERS]
        )
        if recipient is not None and (
            len(recipient) > MAX_RECIPIENT_CHARACTERS or not recipient.isprintable()
        ):
            log.warning("a notification was not sent because its mail address is invalid: %s", short.key)
            return True
        known = [target for target in targets if target in self._config.targets]
        for target in targets:
            if target not in known:
                log.warning("a notification was not sent because there is no target %s", target)
        with self._wake:
            if len(self._inbox) + len(self._unstored) + len(known) > _MAX_INBOX:
                return False
            self._inbox.extend(_DirectMessage(short, target, recipient) for target in known)
            self._wake.notify()
        return True

    def is_waiting(self, key: str) -> bool:
        """Return whether a message with this key is queued and not delivered yet."""
        return not self.is_stored(key) or any(
            message.has_key(key) for queue in self._state.queues.values() for message in queue.messages
        )

    def is_stored(self, key: str) -> bool:
        """Return whether no message with this key would be lost now: see `MessageSender`."""
        with self._wake:
            return not any(
                isinstance(item, _DirectMessage) and item.message.key == key
                for item in (*self._inbox, *self._unstored)
            )

    def status(self) -> tuple[NotificationTarget, ...]:
        """Return how the deliveries to each target go."""
        return self._status

    def close(self) -> None:
        """Stop; what is not delivered is sent after the next start."""
        with self._wake:
            self._is_closing = True
            self._wake.notify()
        self._thread.join(2 * _CLOSE_SECONDS)

    # --- on the thread

    def _put(self, item: _DeliveryResult | _DirectMessage) -> None:
        with self._wake:
            self._inbox.append(item)
            self._wake.notify()

    def _run(self) -> None:
        last_failure = ""
        try:
            while not self._wait():
                try:
                    self._step()
                except Exception as error:
                    if repr(error) != last_failure:  # it may repeat every second
                        log.exception("sending notifications failed because of a bug in gpulse; trying again")
                    last_failure = repr(error)
            self._finish_sending()
        finally:
            self._client.close()

    def _wait(self) -> bool:
        """Wait for something to do; True when it is time to stop."""
        with self._wake:
            if not self._inbox and self._snapshot is None and not self._is_closing:
                self._wake.wait(_STEP_SECONDS)
            return self._is_closing

    def _step(self) -> None:
        """Handle what came in, then send what is due."""
        with self._wake:
            snapshot, self._snapshot = self._snapshot, None
            items = list(self._inbox)
            self._inbox.clear()
            self._unstored += [item for item in items if isinstance(item, _DirectMessage)]
        now = self._now()
        self._handle_items(items, now)
        if snapshot is not None:
            self._change(apply_snapshot(self._state, snapshot, self._config))
        for name, target in self._config.targets.items():
            state, given_up = prepare_messages(self._state, target, self._config, now, sending=self._sending)
            self._change(state)
            for message in given_up:
                error = self._state.queue(name).error
                log.error(
                    "gave up sending a notification to %s after %d attempts: %s",
                    self._label(name),
                    message.attempts,
                    error,
                )
        self._save()
        if self._is_saved:
            with self._wake:
                self._unstored = list(self._held)
        for target in self._config.targets.values():
            self._send_next(target, now)
        self._client.end_stuck_process()
        self._publish_status()

    def _handle_items(
        self, items: Iterable[_DeliveryResult | _DirectMessage], now: float, *, is_last: bool = False
    ) -> None:
        """Queue messages and note answers; a message to a target whose queue is full is held, but for the last time."""
        held, self._held = self._held, []
        full = {item.target for item in held}
        for item in (*held, *items):
            if isinstance(item, _DeliveryResult):
                self._handle_answer(item, now)
            elif is_last or outbox.has_room(self._state.queue(item.target)):
                self._change(
                    queue_message(self._state, item.message, item.target, now, recipient=item.recipient)
                )
            else:
                self._held.append(item)
                if item.target not in full:
                    full.add(item.target)
                    log.error(
                        "the limit of %d waiting notifications to %s has been reached; further notifications are kept only in memory for now",
                        outbox.MAX_WAITING_MESSAGES,
                        self._label(item.target),
                    )

    def _send_next(self, target: Target, now: float) -> None:
        """Hand the next message of a target to the delivery process, unless one is being sent."""
        if target.name in self._sending.values() or len(self._sending) >= MAX_PARALLEL_SENDS:
            return
        queue = self._state.queue(target.name)
        rules = send_rules(target, self._config)
        message = outbox.next_message(queue, rules, now)
        if message is None:
            return
        queue, message = outbox.group_messages(queue, message, rules, now)
        self._set_queue(target.name, outbox.begin_attempt(queue, message.id, now))
        self._sending[message.id] = target.name
        self._client.submit(message.id, message_url(target, message.recipient), _plain_message(message))

    def _handle_answer(self, answer: _DeliveryResult, now: float) -> None:
        name = self._sending.pop(answer.number, None)
        if name is None:
            return
        queue = self._state.queue(name)
        if answer.error is None:
            if queue.error is not None:
                log.info("notifications to %s are delivered again", self._label(name))
            self._set_queue(name, outbox.mark_delivered(queue, answer.number))
            return
        if queue.error != answer.error:
            log.warning(
                "cannot deliver a notification to %s: %s; trying again", self._label(name), answer.error
            )
        self._set_queue(name, outbox.mark_failed(queue, answer.number, answer.error, now))

    def _finish_sending(self) -> None:
        """Wait a moment for messages that are being sent, so that the next head does not send them again."""
        with self._wake:
            self._wake.wait_for(
                lambda: sum(isinstance(item, _DeliveryResult) for item in self._inbox) >= len(self._sending),
                _CLOSE_SECONDS,
            )
            items = list(self._inbox)
        self._handle_items(items, self._now(), is_last=True)
        self._save()

    def _label(self, name: str) -> str:
        return f"{name} ({self._config.targets[name].schema})"

    def _set_queue(self, name: str, queue: TargetQueue) -> None:
        self._change(replace_queue(self._state, name, queue))

    def _change(self, state: NotifyState) -> None:
        if state != self._state:
            self._state = state
            self._is_saved = False

    def _save(self) -> None:
        """Store the state before anything is sent; if that fails, it is sent nevertheless."""
        if self._is_saved:
            return
        try:
            save_state(self._path, self._state)
            self._is_saved, self._has_save_error = True, False
        except OSError as error:
            if not self._has_save_error:
                self._has_save_error = True
                log.error(
                    "cannot write the notification state to %s: %s; after a restart, some notifications may be sent again",
                    self._path,
                    error.strerror,
                )

    def _publish_status(self) -> None:
        self._status = tuple(
            _target_status(target, self._state.queue(name)) for name, target in self._config.targets.items()
        )


def _plain_message(message: OutgoingMessage) -> Message:
    severity: Severity = next((one for one in SEVERITIES if one == message.severity), "info")
    return Message(message.key, message.title, message.body, severity, message.is_resolved)


def _target_status(target: Target, queue: TargetQueue) -> NotificationTarget:
    return NotificationTarget(
        name=target.name,
        kind=target.schema,
        state="ok" if queue.error is None else "failing",
        error=queue.error,
        since=queue.failing_since,
        waiting=outbox.waiting_count(queue),
        sent_total=queue.sent_total,
        failed_total=queue.failed_total,
        given_up_total=queue.given_up_total,
    )
