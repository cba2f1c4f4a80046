"""List, export and recover sessions in the data directory of a head that is not running."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import BinaryIO

from gpulse.cluster.head import answer_builder
from gpulse.cluster.head.session_lifecycle import (
    SessionRegistry,
    interrupt_session,
    recover_session,
    was_recovered_offline,
)
from gpulse.cluster.protocol.answers import SessionAnswer
from gpulse.export.session_file.file_writer import SessionExport
from gpulse.model.session import Session, SessionFormat
from gpulse.store.local import LocalStore, OfflineStore, open_offline
from gpulse.store.log.record_payloads import LogEntry


@contextmanager
def open_store(directory: str) -> Iterator[OfflineStore]:
    """Open the store in a directory for the duration of a `with` block.

    Raises:
        GpulseError: There is no store, or it cannot be read.
    """
    with open_offline(directory) as store:
        yield store


def list_sessions(directory: str, now: float) -> list[SessionAnswer]:
    """Return all sessions as a head would describe them.

    Raises:
        GpulseError: There is no store, or it cannot be read.
    """
    with open_store(directory) as store:
        sessions = _mark_interrupted(store.sessions(), store.newest)
        return [
            answer_builder.build_session(session, now, output_file=session.output) for session in sessions
        ]


def find_offline_session(store: OfflineStore, name: str) -> Session:
    """Return a session by its ID, or the newest one with a name.

    Raises:
        RefusedError: There is none.
    """
    return SessionRegistry(_mark_interrupted(store.sessions(), store.newest)).find(name)


def write_session_file(
    store: OfflineStore,
    session: Session,
    output_format: SessionFormat,
    file: BinaryIO,
    progress: Callable[[int], None] = lambda _: None,
    make_private: Callable[[], None] = lambda: None,
) -> int:
    """Write a session's file; return its size in bytes.

    A session that waits to be resumed by the next head ends, in the file, where its last interruption does.
    `make_private` is called before anything is written to a file with lines of code.
    """
    resumed = [gap.end for gap in session.interruptions if gap.end is not None]
    end = max([store.newest or 0.0, session.created, *resumed])
    export = SessionExport(store, session, output_format, now=end)
    if export.decide_on_code():
        make_private()
    size = 0
    for piece in export:
        file.write(piece)
        size += len(piece)
        progress(size)
    return size


_MIN_INTERRUPTION_SECONDS = 1e-3


def recover_offline_session(
    directory: str, *, name: str | None, session_id: str | None, now: float
) -> Session:
    """Mark a session to continue when the next head starts with this directory.

    Raises:
        RefusedError: There is no such session, or it was not interrupted.
        GpulseError: The store cannot be written, or a running head uses it.
    """
    with LocalStore(directory) as archive:
        sessions = SessionRegistry(_mark_interrupted(archive.sessions(), archive.newest))
        after = max(
            now, (archive.newest or 0.0) + _MIN_INTERRUPTION_SECONDS
        )  # the clock may have been set back
        session = recover_session(sessions.to_recover(name, session_id), after)
        archive.commit([LogEntry.of_fact("session", **session.to_dict())])
    return session


def _mark_interrupted(sessions: list[Session], newest: float | None) -> list[Session]:
    """Return the sessions with the active ones interrupted since the last frame, because no head runs."""
    return [
        session
        if not session.is_active or was_recovered_offline(session, newest)
        else interrupt_session(session, max(newest or 0.0, session.created))
        for session in sessions
    ]
