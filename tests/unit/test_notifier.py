"""What a notifier knows of messages that it was given: waiting, stored, or neither."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from gpulse.cluster.notify import outbox
from gpulse.cluster.notify.config import NotifyConfig, Target
from gpulse.cluster.notify.notifier import Notifier
from gpulse.cluster.notify.notify_state import STATE_FILE, NotifyState, load_state, queue_message, save_state
from gpulse.cluster.notify.outbox import Message
from gpulse.cluster.notify.secret_text import SecretText
from tests.unit.notified_findings import NOW

CONFIG = NotifyConfig({"ops": Target("ops", "json", SecretText("json://127.0.0.1:9"), 20)})


@pytest.fixture
def notifier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Notifier:
    """One whose thread is not started, and that sends nothing: tests call its rounds."""
    monkeypatch.setattr("gpulse.cluster.notify.notifier.MAX_PARALLEL_SENDS", 0)
    return Notifier(CONFIG, str(tmp_path), now=lambda: NOW)


def send(notifier: Notifier, numbers: Iterable[int]) -> set[bool]:
    """Send messages, and return what the notifier said."""
    return {notifier.send(Message(f"idle-{number}", "title", "body"), ["ops"]) for number in numbers}


def test_a_message_without_room_in_the_queue_waits_until_there_is_some(
    notifier: Notifier, tmp_path: Path
) -> None:
    """It is neither forgotten nor taken for stored."""
    last = f"idle-{outbox.MAX_WAITING_MESSAGES}"
    send(notifier, range(outbox.MAX_WAITING_MESSAGES + 1))
    notifier._step()
    assert [(True, True), (True, False)] == [
        (notifier.is_waiting(key), notifier.is_stored(key)) for key in ("idle-0", last)
    ]
    notifier._set_queue("ops", outbox.mark_delivered(notifier._state.queue("ops"), 1))
    notifier._step()

    assert (True, True) == (notifier.is_waiting(last), notifier.is_stored(last))
    stored = load_state(str(tmp_path / STATE_FILE)).queue("ops")
    assert (last, 0) == (stored.messages[-1].key, stored.given_up_total)


def test_too_many_messages_at_once_are_refused_and_those_without_room_are_stored_at_the_end(
    notifier: Notifier, tmp_path: Path
) -> None:
    """Who sends them knows, and can send them again."""
    assert {True} == send(notifier, range(1000))
    notifier._step()
    assert {True} == send(notifier, range(1000, 1000 + outbox.MAX_WAITING_MESSAGES))
    assert {False} == send(notifier, [9999])
    notifier._finish_sending()

    assert 1200 == len(load_state(str(tmp_path / STATE_FILE)).queue("ops").messages)


def test_a_message_waits_at_every_moment_and_is_stored_only_when_the_disk_has_it(
    notifier: Notifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while the thread looks at it, and while the disk is full."""
    seen = []

    def fail(*_: object) -> None:
        seen.append((notifier.is_waiting("idle-1"), notifier.is_stored("idle-1")))
        raise OSError(28, "No space left on device")

    handle: Any = notifier._handle_items

    def look(*given: Any) -> None:
        seen.append((notifier.is_waiting("idle-1"), notifier.is_stored("idle-1")))
        handle(*given)

    send(notifier, [1])
    monkeypatch.setattr(notifier, "_handle_items", look)
    with monkeypatch.context() as full:
        full.setattr("gpulse.cluster.notify.notifier.save_state", fail)
        notifier._step()
        seen.append((notifier.is_waiting("idle-1"), notifier.is_stored("idle-1")))
    notifier._step()

    assert [(True, False)] * 4 == seen
    assert (True, True) == (notifier.is_waiting("idle-1"), notifier.is_stored("idle-1"))


def test_a_target_that_is_gone_is_named_at_one_start_only(
    notifier: Notifier, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What waited for it is no longer stored."""
    path = str(tmp_path / STATE_FILE)
    save_state(path, queue_message(NotifyState(), Message("1", "t", "b"), "old", NOW))
    notifier.start()
    notifier.close()
    again = Notifier(CONFIG, str(tmp_path), now=lambda: NOW)
    again.start()
    again.close()

    assert 1 == caplog.text.count("dropped the waiting notifications for old, which is no longer a target")
    assert {} == load_state(path).queues
