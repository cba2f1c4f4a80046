"""Texts of notifications: complete, in groups, and safe."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from gpulse.cluster.notify import outbox
from gpulse.cluster.notify.changes import Change, ChangeKind, make_record
from gpulse.cluster.notify.outbox import (
    MAX_BODY_CHARACTERS,
    MAX_TITLE_CHARACTERS,
    Message,
    PendingFinding,
    TargetQueue,
)
from gpulse.cluster.notify.templates import build_digest, build_test_message, safe_words
from tests.unit.notified_findings import NOW, Active, lost

FAULT = Active()


@pytest.fixture(autouse=True)
def _in_utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def entries(*changes: tuple[Active, ChangeKind]) -> list[PendingFinding]:
    """The changes of one message."""
    queue = TargetQueue()
    for finding, kind in changes:
        queue = outbox.add_changes(queue, [Change("admins", kind, NOW, make_record(finding))], NOW)
    return list(queue.pending.values())


def message(*changes: tuple[Active, ChangeKind], link: str | None = "http://head:8091") -> Message:
    """The message about these changes."""
    return build_digest(entries(*changes), key="1", link=link, now=NOW)


def test_a_message_says_what_is_wrong_where_since_when_for_whom_and_what_to_do() -> None:
    """With the evidence, and a link to the page of the GPU."""
    found = message((FAULT, "begin"))

    assert "gpulse: critical: The GPU has a fault on n1 GPU 3" == found.title
    assert (
        "New:\n"
        "- CRITICAL n1 GPU 3: The GPU has a fault\n"
        "  Xid 79: the GPU has fallen off the bus\n"
        "  Since: 2025-12-31 23:58:30 (1:30)\n"
        "  Users: alice\n"
        "  Jobs: 4711\n"
        "  Evidence: Xid errors: 1\n"
        "  What to do: drain the node\n"
        "  http://head:8091/#/gpu/n1/3\n"
        "\n"
        "Times are in UTC. Sent by gpulse."
    ) == found.body
    assert ("critical", False) == (found.severity, found.is_resolved)


def test_the_end_of_a_finding_says_how_long_it_lasted() -> None:
    """Such a message is good news."""
    found = message((FAULT, "resolved"))

    assert "gpulse: resolved: The GPU has a fault on n1 GPU 3" == found.title
    assert (
        "- n1 GPU 3: The GPU has a fault\n  Lasted 1:30, from 2025-12-31 23:58:30 to 00:00:00" in found.body
    )
    assert ("info", True) == (found.severity, found.is_resolved)


def test_findings_with_the_same_cause_are_one_entry() -> None:
    """With the GPUs and nodes as ranges, and everybody who is affected."""
    many = [
        FAULT._replace(key=f"k{node}{gpu}", node=f"n{node}", label=str(gpu), users=(f"user{node}",))
        for node in (1, 2)
        for gpu in range(4)
    ]
    found = message(*[(one, "begin") for one in many], (lost("n9"), "resolved"))

    assert "gpulse: 8 new findings, 1 resolved, worst: critical, on n1, n2, n9" == found.title
    assert "- CRITICAL n1 GPUs 0-3, n2 GPUs 0-3: The GPU has a fault\n" in found.body
    assert "  Users: user1, user2\n" in found.body
    assert "  http://head:8091/\n" in found.body


def test_reminders_are_told_from_new_findings() -> None:
    """In the title as well."""
    found = message((FAULT, "reminder"))

    assert "gpulse: still active: The GPU has a fault on n1 GPU 3" == found.title
    assert found.body.startswith("Still active:\n")


def test_a_message_stays_short_however_much_has_changed() -> None:
    """A switch that fails takes hundreds of nodes with it."""
    found = message(
        *[
            (
                FAULT._replace(
                    key=f"k{number}", group=f"g{number}", node=f"node-{number}", advice=("x" * 5000,) * 9
                ),
                "begin",
            )
            for number in range(300)
        ]
    )

    assert MAX_BODY_CHARACTERS >= len(found.body)
    assert MAX_TITLE_CHARACTERS >= len(found.title)
    assert "and 297 more nodes" in found.title


def test_foreign_text_controls_neither_a_terminal_nor_a_chat() -> None:
    """Users choose names of jobs and processes."""
    evil = FAULT._replace(
        node="n1\x1b[2J", users=("@everyone",), jobs=("<!channel> a\nNew: fake",), summary="a\u202eb\r\nX: y"
    )
    found = message((evil, "begin"))

    assert "(at)everyone (at)here user@host" == safe_words("@everyone @here user@host")
    for harmful in ("\x1b", "\u202e", "\r", "@everyone", "<!", "\nNew: fake", "\nX: y"):
        assert harmful not in found.body
    assert "\x1b" not in found.title
    assert "n1%1B%5B2J" in found.body


def test_a_test_message_says_that_it_is_one() -> None:
    """Nobody should start to work because of it."""
    found = build_test_message("admins", "head", NOW)

    assert "gpulse: test message to admins" == found.title
    assert "It does not report a problem." in found.body
