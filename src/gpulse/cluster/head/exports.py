"""Sessions on their way into files: written beside everything else, never in the way of frames."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator
from contextlib import suppress

from gpulse.cluster.protocol.answers import ExportState
from gpulse.cluster.protocol.interface import Download
from gpulse.errors import ExportCancelledError, GpulseError
from gpulse.export.session.files import create_session_file, free_path, remove_stale_drafts
from gpulse.export.session.steps import checked_steps
from gpulse.export.session.write import MEDIA_TYPES, SessionExport, write_session
from gpulse.model.session import Format, Session
from gpulse.store.disk import disk_error
from gpulse.store.incomplete import noticing
from gpulse.store.store import Store

log = logging.getLogger(__name__)

Written = Callable[[Session, str], Awaitable[None]]
_AT_ONCE = 2
_CLOSE_SECONDS = 10.0
_PLAN_SECONDS = 2.0


class Exports:
    """Writes sessions' files, one after the other."""

    def __init__(self, store: Store, directory: str, *, now: Callable[[], float]) -> None:
        """Prepare to write.

        Args:
            store: Where the frames are.
            directory: Where files go.
            now: The head's clock.
        """
        self.directory = directory
        self._store = store
        self._now = now
        self._states: dict[str, ExportState] = {}
        self._planned: dict[str, str] = {}
        """By session id the file that a session will be written to when it is stopped."""
        self._tasks: dict[tuple[str, Format, float | None], asyncio.Task[None]] = {}
        self._turn = asyncio.Semaphore(_AT_ONCE)
        self._cancelled = False
        remove_stale_drafts(directory)

    async def plan(self, session: Session) -> None:
        """Choose the file that a session will be written to, so that it can be told before it is there."""
        work = asyncio.to_thread(free_path, self.directory, session.name, ".json", taken=self._taken(session))
        with suppress(TimeoutError):  # a file server that hangs must not keep a session from beginning
            path = await asyncio.wait_for(work, _PLAN_SECONDS)
            if path is not None:
                self._planned[session.id] = path

    def path(self, session: Session) -> str | None:
        """The file that a session was written to, or will be; None when neither is known."""
        return session.output or (None if session.state == "finished" else self._planned.get(session.id))

    def _taken(self, session: Session) -> set[str]:
        """The files of other sessions that are not there yet: `run` may get the name that `run-2` would have."""
        return {path for key, path in list(self._planned.items()) if key != session.id}

    def begin(self, session: Session, output_format: Format, written: Written) -> None:
        """Write a session's file; `written` is told where it is once it is complete."""
        key = (session.id, output_format, session.end)
        if key in self._tasks:
            return
        self._states[session.id] = ExportState(state="writing")
        task = asyncio.create_task(self._write(session, output_format, written))
        self._tasks[key] = task
        task.add_done_callback(lambda _: self._tasks.pop(key, None))

    async def finished(self, ids: Collection[str], timeout_seconds: float) -> None:
        """Wait until these are written, but not for longer than that."""
        tasks = [task for key, task in self._tasks.items() if key[0] in ids]
        if tasks:
            await asyncio.wait(tasks, timeout=timeout_seconds)

    async def close(self) -> None:
        """Give up what is being written; the next head writes it."""
        self._cancelled = True
        await self.finished([key[0] for key in self._tasks], _CLOSE_SECONDS)

    def state(self, session: Session) -> ExportState:
        """Return how far a session's file is."""
        known = self._states.get(session.id)
        if known is not None:
            return known
        if session.output:
            return ExportState(state="done", path=session.output)
        return ExportState(state="writing" if session.state == "finished" else "none")

    def download(self, session: Session, output_format: Format, now: float) -> Download:
        """A session's file for somebody, piece by piece.

        Raises:
            UsageError: It would be too long.
        """
        checked_steps(session, now if session.end is None else session.end)
        pieces = _pieces(self._store, session, output_format, now)
        return Download(f"{session.name}.{output_format}", MEDIA_TYPES[output_format], _from_thread(pieces))

    async def _write(self, session: Session, output_format: Format, written: Written) -> None:
        try:
            async with self._turn:
                path, incomplete = await asyncio.to_thread(self._write_noticing, session, output_format)
            for text in incomplete:
                log.warning("the file of session %s is incomplete: %s", session.name, text)
        except ExportCancelledError:
            self._states[session.id] = ExportState(state="none")
            return
        except GpulseError as error:
            log.error("session %s could not be written: %s", session.name, error.message)
            self._states[session.id] = ExportState(state="failed", error=error.message)
            return
        except Exception as error:
            log.exception("session %s could not be written", session.name)
            self._states[session.id] = ExportState(state="failed", error=f"{type(error).__name__}: {error}")
            return
        finally:
            if session.state == "finished":
                self._planned.pop(session.id, None)
        log.info("session %s is in %s", session.name, path)
        self._states[session.id] = ExportState(state="done", path=path)
        await written(session, path)

    def _write_noticing(self, session: Session, output_format: Format) -> tuple[str, list[str]]:
        """Write a session's file; return where it is, and what is missing from it."""
        with noticing() as incomplete:
            return self._write_file(session, output_format), incomplete

    def _write_file(self, session: Session, output_format: Format) -> str:
        suffix, taken = f".{output_format}", self._taken(session)
        with create_session_file(self.directory, session.name, suffix, taken=taken) as draft:
            try:
                write_session(
                    self._store,
                    session,
                    draft.file,
                    output_format,
                    now=self._now(),
                    cancelled=lambda: self._cancelled,
                )
            except OSError as error:
                raise disk_error(
                    f"write {session.name}.{output_format} in {self.directory}", error
                ) from error
            return draft.publish()


def _pieces(store: Store, session: Session, output_format: Format, now: float) -> Iterator[bytes]:
    """The file's bytes; nothing is looked up before the first of them is asked for."""
    yield from SessionExport(store, session, output_format, now=now)


async def _from_thread(pieces: Iterator[bytes]) -> AsyncIterator[bytes]:
    while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
        yield piece
