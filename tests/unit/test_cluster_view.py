"""Tables of a head, its nodes and its sessions."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET

from gpulse.cluster.protocol.answers import (
    ExportState,
    MissingFrames,
    NotificationTarget,
    RemoteQuery,
    RemoteWrite,
    SessionInterruption,
    Status,
)
from gpulse.terminal.cluster_status import (
    SuggestedCommands,
    describe_free_gpus,
    describe_interruption,
    session_facts,
    session_lines,
    status_lines,
)
from gpulse.terminal.table import display_width, make_painter
from tests.unit.head_answers import head_status, node_status, session_answer, storage

PLAIN = make_painter(color=False)
NOW = 1_763_200_000.0


@pytest.fixture(autouse=True)
def _utc() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TZ", "UTC")
        time.tzset()
        yield
    time.tzset()


def lines(document: Status, width: int = 100, **options: Any) -> list[str]:
    """What is shown of it."""
    return list(status_lines(document, "gpu-head:8090", width=width, paint=PLAIN, **options))


def test_a_head_is_shown_with_its_storage_nodes_and_sessions() -> None:
    """Everything that somebody wants to know at a glance."""
    document = head_status(
        node_status("a"), node_status("b", "lost", silent_seconds=90.0), active_sessions=[session_answer()]
    )

    assert [
        "head at gpu-head:8090: gpulse 0.1.0, up 1:02:05",
        "samples every 500 ms; sessions include PCIe traffic; 12.3k frames received",
        "stores data in /data: 1.0M log, 2.0M history, 1.0G free",
        "",
        "2 nodes with 16 GPUs: 1 healthy, 1 lost; 8 GPUs connected now",
        "node  state    GPUs  model        last report  version",
        "b     lost        8  NVIDIA H200     1:30 ago  0.1.0",
        "a     healthy     8  NVIDIA H200          now  0.1.0",
        "",
        "session  state   started              length  frames  id",
        "run      active  2025-11-15 09:40:00    6:40     400  e8691366c8487001",
    ] == lines(document)


def test_a_head_without_nodes_says_what_to_do() -> None:
    """The next command is on the screen."""
    shown = lines(head_status())

    assert "no nodes yet; on each machine with GPUs, run: gpulse agent HEAD:8090" in shown
    assert "no active sessions; start one with: gpulse session start NAME" in shown


def test_a_head_that_cannot_store_says_so() -> None:
    """With what is wrong and what to try."""
    failing = storage(state="failing", error="the disk is full", hint="free some room")

    assert "storage in /data is currently failing: the disk is full; try: free some room" in lines(
        head_status(storage=failing)
    )


def test_of_many_nodes_those_that_are_not_well_are_shown() -> None:
    """All of them on request."""
    document = head_status(
        *(node_status(f"n{number:02}") for number in range(50)), node_status("sick", "late")
    )

    shown = lines(document)
    assert "51 nodes with 408 GPUs: 50 healthy, 1 late" in shown
    assert ["sick"] == [line.split()[0] for line in shown if "NVIDIA" in line]
    assert 51 == sum("NVIDIA" in line for line in lines(document, every_node=True))


def test_interrupted_sessions_are_named() -> None:
    """With the command that goes on with them."""
    shown = lines(head_status(node_status("a"), recoverable_sessions=["week_long"]))

    assert "interrupted: week_long; resume with: gpulse session recover week_long" == shown[-1]


def test_names_from_elsewhere_are_harmless() -> None:
    """A node can call itself anything."""
    evil = "\x1b]0;pwned\x07\n"
    document = head_status(
        node_status(evil, labels={evil: evil}),
        active_sessions=[session_answer(evil, nodes=[evil])],
        recoverable_sessions=[evil],
    )

    assert not any("\x1b" in line or "\x07" in line or "\n" in line for line in lines(document))


@given(st.integers(20, 160))
def test_nothing_is_wider_than_the_terminal(width: int) -> None:
    """Columns give way instead of wrapping."""
    document = head_status(
        node_status("a-long-name" * 3), node_status("b"), active_sessions=[session_answer("s" * 60)]
    )

    assert all(display_width(line) <= width for line in lines(document, width))


def test_sessions_that_ended_show_their_file() -> None:
    """A file that failed says so too."""
    ended = session_answer(
        state="finished",
        end_time="2025-11-15T09:41:00.000Z",
        export=ExportState(state="done", path="/out/run.json"),
    )
    failed = session_answer(state="finished", export=ExportState(state="failed", error="disk full"))

    shown = session_lines([ended, failed], now=NOW, width=120, paint=PLAIN)
    assert shown[1].endswith("/out/run.json")
    assert shown[2].endswith("failed: disk full")
    assert "1:00" in shown[1]


def test_why_a_file_failed_is_not_cut_like_a_path() -> None:
    """On a narrow terminal the beginning of the reason stays, not what follows its last slash."""
    failed = session_answer(
        state="finished",
        export=ExportState(state="failed", error="cannot write /out/run.json: No space left"),
    )

    (_, shown) = session_lines([failed], now=NOW, width=100, paint=PLAIN)
    assert "failed: " in shown


def test_another_program_names_its_own_commands() -> None:
    """What is suggested can be typed."""
    other = SuggestedCommands(
        "gsprof profile --name NAME", "gsprof recover --name NAME", "gsprof connect HEAD:8090"
    )

    shown = "\n".join(lines(head_status(recoverable_sessions=["lost", "other"]), commands=other))
    assert "gpulse session" not in shown
    assert "gpulse agent" not in shown
    assert all(command in shown for command in other)


def test_everything_about_a_session() -> None:
    """Interruptions are part of it."""
    document = session_answer(
        labels={"model": "llama"},
        gpus=["a:0"],
        interruptions=[
            SessionInterruption(start_time="2025-11-15T09:41:00.000Z", end_time="2025-11-15T09:42:00.000Z")
        ],
    )

    assert [
        "run",
        "state        active",
        "id           e8691366c8487001",
        "started      2025-11-15 09:40:00",
        "length       6:40",
        "frames       400, one every 500 ms",
        "nodes        all",
        "GPUs         a:0",
        "labels       model=llama",
        "interrupted  2025-11-15 09:41:00 to 2025-11-15 09:42:00",
    ] == list(session_facts(document, now=NOW, width=100, paint=PLAIN))


@pytest.mark.parametrize(
    ("missing", "pending", "words"),
    [
        ([], [], "no frames are missing"),
        ([MissingFrames(node="a", seconds=9.0)], [], "no frames from a for 9s"),
        ([], ["a", "b"], "frames from a, b may still arrive"),
        (
            [],
            list("abcdefg"),
            "frames from a, b, c, d, e and 2 more may still arrive",
        ),
        (UNSET, UNSET, ""),
    ],
)
def test_what_is_missing_of_an_interruption(missing: Any, pending: Any, words: str) -> None:
    """Only what no frame covers is missing, and what is not known yet is said to be so."""

    part = SessionInterruption(start_time="", end_time="", missing=missing, pending=pending)
    assert words == describe_interruption(part)


def test_an_interruption_that_waits_to_be_recovered() -> None:
    """It says how."""
    document = session_answer(
        state="interrupted",
        interruptions=[SessionInterruption(start_time="2025-11-15T09:41:00.000Z", end_time=None)],
    )

    shown = list(session_facts(document, now=NOW, width=100, paint=PLAIN))
    assert "interrupted  2025-11-15 09:41:00 to now; resume with: gpulse session recover run" == shown[-1]


def test_nodes_never_heard_of_are_named() -> None:
    """What should be there and is not comes first, as text that cannot disturb the terminal."""
    lines = list(
        status_lines(
            head_status(node_status("a"), missing_nodes=["b", "c\x1b[2J"]), "here", width=80, paint=PLAIN
        )
    )
    told = next(line for line in lines if "never reported" in line)
    assert "b, c" in told
    assert "\x1b" not in told


@pytest.mark.parametrize(
    ("missing", "words"),
    [(["b"], "b; check that its agent is"), (["b", "c"], "b, c; check that their agents are")],
)
def test_one_missing_node_is_not_several(missing: list[str], words: str) -> None:
    """Its agent, their agents."""
    status = head_status(node_status("a"), missing_nodes=missing)
    text = " ".join(status_lines(status, "here", width=200, paint=PLAIN))

    assert f"never reported: {words} running: gpulse deploy status" in text


def remote_write(**changes: Any) -> RemoteWrite:
    """A time-series database that takes samples."""
    counts = ("waiting_bytes", "samples_total", "refused_total", "lost_total", "resent_total")
    fields: dict[str, Any] = {**dict.fromkeys(counts, 0), **dict.fromkeys(("error", "hint", "since"))}
    fields |= {"state": "ok", "url": "http://vm/api/v1/write", "waiting_seconds": 0.0}
    return RemoteWrite(**{**fields, **changes})


def test_what_a_head_has_beyond_its_disk_is_shown() -> None:
    """Writing to the time-series database has a line, and what is wrong with it or with reading is said."""
    query = RemoteQuery(url="http://vm", state="ok", error=None, hint=None, since=None)
    well = head_status(remote=remote_write(samples_total=12345), remote_query=query)
    failing = remote_write(
        state="failing",
        url="http://vm",
        error="it does not answer",
        hint="start it",
        waiting_bytes=1 << 20,
        lost_total=7,
    )
    silent = RemoteQuery(url="http://vm", state="failing", error="it does not answer", hint=None, since=1.0)
    ill = head_status(remote=failing, remote_query=silent)

    assert ["sent 12.3k samples to http://vm/api/v1/write since the head started", ""] == lines(well)[3:5]
    assert [
        "the remote-write endpoint http://vm is not accepting samples: it does not answer; try: start it; 1.0M waiting to be sent; dropped 7 unsent records",
        "cannot read older history from http://vm: it does not answer",
        "",
    ] == lines(ill, width=200)[3:6]


@pytest.mark.parametrize(
    ("text", "free"),
    [
        ("6 free: a all, b 0-2", {"b": ["0", "1", "2"], "a": ["0", "1", "2"]}),
        ("2 free: b 0,7:1", {"b": ["0", "7:1"]}),
        ("no GPU is free", {}),
        (None, UNSET),
    ],
)
def test_free_gpus_are_counted_and_named(text: str | None, free: Any) -> None:
    """An older head does not say."""
    document = head_status(node_status("b"), node_status("a", gpu_count=3), free_gpus=free)

    assert text == describe_free_gpus(document)
    assert (text is None) != (text in lines(document))


def test_free_gpus_of_many_nodes_are_summed_up() -> None:
    """All of them on request."""
    nodes = [node_status(f"n{number}") for number in range(25)]
    document = head_status(*nodes, free_gpus={node.name: ["0"] for node in nodes})

    shown = describe_free_gpus(document)
    assert shown is not None
    assert shown.startswith("25 free: n0 0, n1 0, n2 0, ")
    assert shown.endswith(", n19 0, and on 5 more nodes")
    assert "n24 0" in (describe_free_gpus(document, every_node=True) or "")


def notification_target(**changes: Any) -> NotificationTarget:
    """The status of a target that has got a hundred messages."""
    fields: dict[str, Any] = {
        "name": "admins",
        "kind": "mailtos",
        "state": "ok",
        "error": None,
        "since": None,
    }
    fields |= {"waiting": 0, "sent_total": 100, "failed_total": 0, "given_up_total": 0}
    return NotificationTarget(**{**fields, **changes})


def test_notifications_have_a_line_and_what_fails_is_said() -> None:
    """By name and kind: the URL of a target is secret."""
    failing = notification_target(
        name="hook",
        kind="json",
        state="failing",
        error="error=500",
        waiting=3,
        sent_total=1,
        given_up_total=2,
    )
    well = head_status(notifications=[notification_target()])
    ill = head_status(notifications=[notification_target(waiting=1), failing])

    assert ["sent 100 notifications to admins (mailtos)", ""] == lines(well)[3:5]
    assert [
        "sent 101 notifications to admins (mailtos), hook (json); 1 waiting",
        "cannot send notifications to hook: error=500; 3 waiting",
        "gave up on 2 notifications to hook that could not be delivered",
        "",
    ] == lines(ill, width=200)[3:7]
