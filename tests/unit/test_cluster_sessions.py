from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulse.cluster.head.session_lifecycle import (
    SessionRegistry,
    interrupt_session,
    recover_session,
    stop_session,
)
from gpulse.errors import RefusedError, UsageError
from gpulse.model.session import Interruption, Session, check_session_name

NOW = 1_800_000_000.0


def begin(sessions: SessionRegistry, name: str | None = "run", number: int = 1, **given: Any) -> Session:
    """Begin a session and take it in."""
    settings: dict[str, Any] = {
        "now": NOW + number,
        "since_seconds": None,
        "max_seconds": 30 * 86_400.0,
        "nodes": (),
        "gpus": (),
        "labels": {},
        "interval_ms": 500,
        "bandwidth": False,
        "nvlink": False,
    }
    session = sessions.begin(f"id{number}", name=name, **{**settings, **given})
    sessions.put(session)
    return session


def test_a_name_that_is_active_is_refused() -> None:
    """Two sessions of one name would end in one file."""

    sessions = SessionRegistry()
    begin(sessions)

    with pytest.raises(RefusedError, match="which is active") as refused:
        begin(sessions, number=2)
    assert refused.value.status == 409


def test_a_name_that_is_finished_may_be_used_again() -> None:
    """The newest one is meant from then on."""

    sessions = SessionRegistry()
    sessions.put(stop_session(begin(sessions), NOW + 10))

    again = begin(sessions, number=2)

    assert sessions.find("run") == again
    assert sessions.find("id1").state == "finished"


def test_fifty_sessions_may_overlap() -> None:
    """They are intervals, and cost nothing."""

    sessions = SessionRegistry()
    for number in range(50):
        begin(sessions, f"s{number}", number)

    assert len(sessions.to_stop(None)) == 50


def test_a_session_may_begin_in_the_past() -> None:
    """`--since 10m`."""

    session = begin(SessionRegistry(), since_seconds=600.0)

    assert session.created - session.start == 600.0


def test_a_session_begins_no_earlier_than_history_reaches() -> None:
    """However long ago somebody asks for."""

    session = begin(SessionRegistry(), since_seconds=1e308)

    assert session.created - session.start == 30 * 86_400.0


def test_sessions_without_a_name_get_one_each() -> None:
    """As the profiler names its files."""

    sessions = SessionRegistry()

    names = [begin(sessions, None, number, now=NOW).name for number in (1, 2)]

    assert names == ["gswarm_profiler_20270115_080000", "gswarm_profiler_20270115_080000-2"]


@pytest.mark.parametrize(
    "name", ["../../x", "", "-a", ".a", "a/b", "a" * 101, "a b", "a\n", "ä", "a\0", "..", "a\udce4"]
)
def test_names_that_could_leave_the_directory_are_refused(name: str) -> None:
    """Files are made from them."""

    with pytest.raises(UsageError, match="invalid session name"):
        check_session_name(name)


@given(st.text())
def test_a_name_that_is_allowed_is_harmless(name: str) -> None:
    """Whatever passes is a plain file name."""

    try:
        check_session_name(name)
    except UsageError:
        return
    assert name.isascii()
    assert "/" not in name
    assert name[0].isalnum()


def test_an_interrupted_session_is_recovered_with_its_gap() -> None:
    """Everything about the interruption stays in the session."""

    sessions = SessionRegistry()
    session = interrupt_session(begin(sessions), NOW + 100)
    sessions.put(session)

    found = recover_session(sessions.to_recover("run", None), NOW + 160)

    assert found.is_active
    assert found.interruptions == (Interruption(NOW + 100, NOW + 160),)


def test_an_interrupted_session_that_is_stopped_ends_where_it_broke_off() -> None:
    """Nobody asked for what came afterwards."""

    session = stop_session(interrupt_session(begin(SessionRegistry()), NOW + 100), NOW + 500)

    assert (session.state, session.end) == ("finished", NOW + 100)


def test_a_session_keeps_its_data_when_the_clock_is_set_back() -> None:
    """It ends where it was last known to be active, not at its start."""

    session = interrupt_session(begin(SessionRegistry()), NOW + 100)
    session = recover_session(session, NOW - 600)
    assert session.interruptions == (Interruption(NOW + 100, NOW + 100),)
    assert stop_session(session, NOW - 500).end == NOW + 100
    assert interrupt_session(session, NOW - 500).interruptions[-1] == Interruption(NOW + 100)


def test_a_name_waits_while_its_session_can_be_recovered() -> None:
    """The refusal says how to go on."""

    sessions = SessionRegistry()
    sessions.put(interrupt_session(begin(sessions), NOW + 100))

    with pytest.raises(RefusedError) as refused:
        begin(sessions, number=2)
    assert refused.value.hint is not None
    assert "recover run" in refused.value.hint


@pytest.mark.parametrize(
    ("name", "status"), [("nope", 404), ("going", 409), ("ended", 409), (None, 400), ("", 400)]
)
def test_what_cannot_be_recovered_is_said(name: str | None, status: int) -> None:
    """One that goes on, one that is complete, one that never was."""

    sessions = SessionRegistry()
    begin(sessions, "going", 1)
    sessions.put(stop_session(begin(sessions, "ended", 2), NOW + 10))

    with pytest.raises(RefusedError) as refused:
        sessions.to_recover(name, None)
    assert refused.value.status == status


@given(st.text(max_size=5), st.lists(st.text(max_size=3), max_size=2), st.floats(0, 1e9))
def test_a_session_survives_its_spelling(label: str, nodes: list[str], start: float) -> None:
    """What is written to the log is what is read back."""

    session = begin(SessionRegistry(), labels={label: label}, nodes=tuple(nodes), since_seconds=start)
    session = recover_session(interrupt_session(session, NOW), NOW + 1)

    assert Session.from_dict(session.to_dict()) == session
