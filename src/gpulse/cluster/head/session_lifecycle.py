"""Lifecycle of sessions: start, stop, interrupt, recover. Pure functions and an in-memory registry."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence

from gpulse.errors import RefusedError
from gpulse.model.session import (
    MAX_INTERVAL_MS,
    MAX_LABEL_CHARS,
    MAX_LABELS,
    MIN_INTERVAL_MS,
    Interruption,
    Session,
    check_session_name,
    find_session,
)


class SessionRegistry:
    """All sessions of a head, by id, oldest first."""

    def __init__(self, sessions: Iterable[Session] = ()) -> None:
        self._by_id = {session.id: session for session in sessions}

    def all(self) -> list[Session]:
        """Return every session, oldest first."""
        return sorted(self._by_id.values(), key=lambda session: session.created)

    def active(self) -> list[Session]:
        """Return the active sessions."""
        return [session for session in self.all() if session.is_active]

    def get(self, session_id: str) -> Session | None:
        """Return the session with an ID; None if there is none."""
        return self._by_id.get(session_id)

    def put(self, session: Session) -> None:
        """Add or replace a session."""
        self._by_id[session.id] = session

    def find(self, name: str) -> Session:
        """Return a session by its ID, or the newest one with a name.

        Raises:
            RefusedError: There is none.
        """
        return find_session(self.all(), name)

    def begin(
        self,
        session_id: str,
        *,
        now: float,
        name: str | None,
        since_seconds: float | None,
        max_seconds: float,
        nodes: Sequence[str],
        gpus: Sequence[str],
        labels: Mapping[str, str],
        interval_ms: int,
        bandwidth: bool,
        nvlink: bool,
    ) -> Session:
        """Return a new session without adding it; it starts no earlier than the history reaches.

        Raises:
            RefusedError: A session with this name is active or interrupted.
            UsageError: The name is invalid.
        """
        name = check_session_name(name) if name else self._free_name(now)
        taken = next((s for s in self._by_id.values() if s.name == name and s.state != "finished"), None)
        if taken is not None:
            hint = f"stop it with: gpulse session stop {name}, or choose another name"
            if taken.state == "interrupted":
                hint = f"resume it with: gpulse session recover {name}, or stop it with: gpulse session stop {name}, or choose another name"
            raise RefusedError(409, f"there is already a session {name}, which is {taken.state}", hint=hint)
        if not MIN_INTERVAL_MS <= interval_ms <= MAX_INTERVAL_MS:
            raise RefusedError(
                400,
                f"the interval must be between {MIN_INTERVAL_MS} and {MAX_INTERVAL_MS} ms, not {interval_ms} ms",
            )
        if len(labels) > MAX_LABELS or any(
            len(text) > MAX_LABEL_CHARS for pair in labels.items() for text in pair
        ):
            raise RefusedError(
                400,
                f"a session can have at most {MAX_LABELS} labels of at most {MAX_LABEL_CHARS} characters each",
            )
        return Session(
            id=session_id,
            name=name,
            start=now - min(max(since_seconds or 0.0, 0.0), max_seconds),
            created=now,
            interval_ms=interval_ms,
            nodes=tuple(nodes),
            gpus=tuple(gpus),
            labels=dict(labels),
            bandwidth=bandwidth,
            nvlink=nvlink,
        )

    def _free_name(self, now: float) -> str:
        """Return an unused name in the style of gswarm-profiler."""
        base = f"gswarm_profiler_{time.strftime('%Y%m%d_%H%M%S', time.gmtime(now))}"
        names, name, number = {session.name for session in self._by_id.values()}, base, 1
        while name in names:
            number += 1
            name = f"{base}-{number}"
        return name

    def to_stop(self, name: str | None) -> list[Session]:
        """Return the sessions that a stop request selects.

        Raises:
            RefusedError: There is no session with this name, or it is already finished.
        """
        if not name:
            return self.active()
        session = self.find(name)
        if session.state == "finished":
            raise RefusedError(
                409,
                f"session {session.name} is already finished",
                hint=f"get its file with: gpulse session export {session.name}",
            )
        return [session]

    def to_recover(self, name: str | None, session_id: str | None) -> Session:
        """Return the session that a recovery request selects.

        Raises:
            RefusedError: There is none, or it was not interrupted.
        """
        wanted = session_id or name
        if not wanted:
            raise RefusedError(
                400, "the request does not name a session", hint="give the session's name or ID"
            )
        session = self.find(wanted)
        if session.state == "active":
            raise RefusedError(
                409,
                f"session {session.name} is already active",
                hint=f"stop it with: gpulse session stop {session.name}",
            )
        if session.state == "finished":
            raise RefusedError(
                409,
                f"session {session.name} was stopped and is complete",
                hint=f"get its file with: gpulse session export {session.name}, or start a new session",
            )
        return session


def stop_session(session: Session, now: float) -> Session:
    """Return the session, finished now; an interrupted one ends where its interruption began."""
    if session.state == "interrupted" and session.interruptions:
        *before, last = session.interruptions
        return session._replace(state="finished", end=last.start, interruptions=tuple(before), output=None)
    # If the head's clock is behind what it was, the session ends where it last was known to be active.
    return session._replace(state="finished", end=max(now, session.last_time), output=None)


def interrupt_session(session: Session, since: float) -> Session:
    """Return the session, interrupted since the head went away."""
    gap = Interruption(max(since, session.last_time))
    return session._replace(state="interrupted", interruptions=(*session.interruptions, gap))


def recover_session(session: Session, now: float) -> Session:
    """Return the session, active again from now on."""
    *before, last = session.interruptions or (Interruption(now),)
    return session._replace(state="active", interruptions=(*before, last._replace(end=max(now, last.start))))


def restore_session(session: Session, newest: float | None, now: float, *, resume: bool) -> Session:
    """Return the session as the next head must treat it.

    Args:
        session: The session as the last head left it.
        newest: When the last head last received frames.
        now: When the next head starts.
        resume: Continue the session in any case.
    """
    if not session.is_active:
        return recover_session(session, now) if resume and session.state == "interrupted" else session
    if was_recovered_offline(session, newest):
        return recover_session(session, now)
    left = interrupt_session(session, max(newest or 0.0, session.created))
    return recover_session(left, now) if resume else left


def was_recovered_offline(session: Session, newest: float | None) -> bool:
    """Return whether a session was recovered while no head ran: its last interruption ends after the last frame."""
    gaps = session.interruptions
    return session.is_active and bool(gaps) and gaps[-1].end is not None and gaps[-1].end > (newest or 0.0)
