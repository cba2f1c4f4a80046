"""Sessions in the data of a head that does not run: listed, written to files, marked to go on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import BinaryIO

from gpulse.cluster.head import documents
from gpulse.cluster.head.sessions import Sessions, interrupted, is_to_go_on, recovered
from gpulse.cluster.protocol.answers import SessionAnswer
from gpulse.export.session.write import SessionExport
from gpulse.model.session import Format, Session
from gpulse.store.local import LocalStore
from gpulse.store.log.records import Entry
from gpulse.store.offline import OfflineStore, open_offline


@contextmanager
def opened(directory: str) -> Iterator[OfflineStore]:
    """The store in a directory, for as long as the block runs.

    Raises:
        GpulseError: There is none, or it cannot be read.
    """
    with open_offline(directory) as store:
        yield store


def described(directory: str, now: float) -> list[SessionAnswer]:
    """All sessions, as a head would describe them.

    Raises:
        GpulseError: There is no store, or it cannot be read.
    """
    with opened(directory) as store:
        sessions = _left(store.sessions(), store.newest)
        return [documents.session(session, now, output_file=session.output) for session in sessions]


def find(store: OfflineStore, name: str) -> Session:
    """A session by its id, or the newest of that name.

    Raises:
        RefusedError: There is none.
    """
    return Sessions(_left(store.sessions(), store.newest)).find(name)


def write(
    store: OfflineStore,
    session: Session,
    output_format: Format,
    file: BinaryIO,
    progress: Callable[[int], None] = lambda _: None,
) -> int:
    """Write a session's file; how many bytes it has."""
    size = 0
    for piece in SessionExport(store, session, output_format):
        file.write(piece)
        size += len(piece)
        progress(size)
    return size


def recover(directory: str, *, name: str | None, session_id: str | None, now: float) -> Session:
    """Mark a session to go on when the next head starts with this directory.

    Raises:
        RefusedError: There is no such session, or it was not interrupted.
        GpulseError: The store cannot be written, or a head writes it.
    """
    with LocalStore(directory) as archive:
        sessions = Sessions(_left(archive.sessions(), archive.newest))
        session = recovered(sessions.to_recover(name, session_id), now)
        archive.commit([Entry.of_fact("session", **session.to_dict())])
    return session


def _left(sessions: list[Session], newest: float | None) -> list[Session]:
    """Sessions without a head: none goes on, since when is known from the last frame."""
    return [
        session
        if not session.is_active or is_to_go_on(session, newest)
        else interrupted(session, max(newest or 0.0, session.created))
        for session in sessions
    ]
