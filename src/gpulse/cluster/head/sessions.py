"""What may be done with sessions: pure decisions, from the sessions there are to the ones there will be."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence

from gpulse.errors import RefusedError
from gpulse.model.session import (
    LONGEST_LABEL,
    MAX_INTERVAL_MS,
    MIN_INTERVAL_MS,
    MOST_LABELS,
    Interruption,
    Session,
    checked_name,
    find_session,
)


class Sessions:
    """All sessions of a head, by id, oldest first."""

    def __init__(self, sessions: Iterable[Session] = ()) -> None:
        self._by_id = {session.id: session for session in sessions}

    def all(self) -> list[Session]:
        """Every session, oldest first."""
        return sorted(self._by_id.values(), key=lambda session: session.created)

    def active(self) -> list[Session]:
        """Those that go on."""
        return [session for session in self.all() if session.is_active]

    def get(self, session_id: str) -> Session | None:
        """Return the session of an id; None when there is none."""
        return self._by_id.get(session_id)

    def put(self, session: Session) -> None:
        """Take in what is new about a session."""
        self._by_id[session.id] = session

    def find(self, name: str) -> Session:
        """A session by its id, or the newest of that name.

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
        longest_seconds: float,
        nodes: Sequence[str],
        gpus: Sequence[str],
        labels: Mapping[str, str],
        interval_ms: int,
        bandwidth: bool,
        nvlink: bool,
    ) -> Session:
        """A new session; it is not taken in yet. It begins no earlier than history reaches.

        Raises:
            RefusedError: One of that name goes on already, or waits to be recovered.
            UsageError: The name cannot be one.
        """
        name = checked_name(name) if name else self._free_name(now)
        taken = next((s for s in self._by_id.values() if s.name == name and s.state != "finished"), None)
        if taken is not None:
            hint = f"end it with: gpulse session stop {name}, or choose another name"
            if taken.state == "interrupted":
                hint = f"gpulse session recover {name}, or end it with: gpulse session stop {name}, or choose another name"
            raise RefusedError(409, f"a session called {name} is {taken.state} already", hint=hint)
        if not MIN_INTERVAL_MS <= interval_ms <= MAX_INTERVAL_MS:
            raise RefusedError(
                400,
                f"The interval must be between {MIN_INTERVAL_MS} and {MAX_INTERVAL_MS} ms, not {interval_ms} ms",
            )
        if len(labels) > MOST_LABELS or any(
            len(text) > LONGEST_LABEL for pair in labels.items() for text in pair
        ):
            raise RefusedError(400, f"at most {MOST_LABELS} labels of {LONGEST_LABEL} characters")
        return Session(
            id=session_id,
            name=name,
            start=now - min(max(since_seconds or 0.0, 0.0), longest_seconds),
            created=now,
            interval_ms=interval_ms,
            nodes=tuple(nodes),
            gpus=tuple(gpus),
            labels=dict(labels),
            bandwidth=bandwidth,
            nvlink=nvlink,
        )

    def _free_name(self, now: float) -> str:
        """A name as the profiler makes them, that no session has."""
        base = f"gswarm_profiler_{time.strftime('%Y%m%d_%H%M%S', time.gmtime(now))}"
        names, name, number = {session.name for session in self._by_id.values()}, base, 1
        while name in names:
            number += 1
            name = f"{base}-{number}"
        return name

    def to_stop(self, name: str | None) -> list[Session]:
        """The sessions that a stop means.

        Raises:
            RefusedError: There is none of that name, or it has ended already.
        """
        if not name:
            return self.active()
        session = self.find(name)
        if session.state == "finished":
            raise RefusedError(
                409,
                f"session {session.name} has ended already",
                hint=f"bring its file here with: gpulse session export {session.name}",
            )
        return [session]

    def to_recover(self, name: str | None, session_id: str | None) -> Session:
        """The session that a recovery means.

        Raises:
            RefusedError: There is none, or it was not interrupted.
        """
        wanted = session_id or name
        if not wanted:
            raise RefusedError(400, "which session?", hint="give its name or its id")
        session = self.find(wanted)
        if session.state == "active":
            raise RefusedError(
                409,
                f"session {session.name} goes on already",
                hint=f"end it with: gpulse session stop {session.name}",
            )
        if session.state == "finished":
            raise RefusedError(
                409,
                f"session {session.name} was stopped, and is complete",
                hint=f"bring its file here with: gpulse session export {session.name}, or start a new one",
            )
        return session


def stopped(session: Session, now: float) -> Session:
    """The session, ended now; what was interrupted ends where the interruption began."""
    if session.state == "interrupted" and session.interruptions:
        *before, last = session.interruptions
        return session._replace(state="finished", end=last.start, interruptions=tuple(before), output=None)
    return session._replace(state="finished", end=max(now, session.start), output=None)


def interrupted(session: Session, since: float) -> Session:
    """The session of a head that is gone since then."""
    gap = Interruption(max(since, session.start))
    return session._replace(state="interrupted", interruptions=(*session.interruptions, gap))


def recovered(session: Session, now: float) -> Session:
    """The session, going on from now."""
    *before, last = session.interruptions or (Interruption(now),)
    return session._replace(state="active", interruptions=(*before, last._replace(end=max(now, last.start))))


def woken(session: Session, newest: float | None, now: float, *, resume: bool) -> Session:
    """The session as the next head finds it.

    Args:
        session: As the last head left it.
        newest: When the last head got frames last.
        now: When the next one starts.
        resume: Go on with it in any case.
    """
    if not session.is_active:
        return recovered(session, now) if resume and session.state == "interrupted" else session
    if is_to_go_on(session, newest):
        return recovered(session, now)
    left = interrupted(session, max(newest or 0.0, session.created))
    return recovered(left, now) if resume else left


def is_to_go_on(session: Session, newest: float | None) -> bool:
    """Whether somebody recovered a session while no head was there: its gap ends after the last frame."""
    gaps = session.interruptions
    return session.is_active and bool(gaps) and gaps[-1].end is not None and gaps[-1].end > (newest or 0.0)
