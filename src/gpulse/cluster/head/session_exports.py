"""Write sessions to files in the background, without delaying frames."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator
from contextlib import suppress

from gpulse.background_call import await_background_call
from gpulse.cluster.protocol.answers import ExportState
from gpulse.cluster.protocol.head_interface import Download
from gpulse.errors import ExportCancelledError, GpulseError
from gpulse.export.session_file.file_writer import MEDIA_TYPES, SessionExport, write_session
from gpulse.export.session_file.frame_grid import count_steps_checked
from gpulse.export.session_file.output_file import SessionFile, find_free_path, remove_stale_drafts
from gpulse.model.session import Session, SessionFormat
from gpulse.store.disk_errors import disk_error
from gpulse.store.incomplete_answers import collect_missing
from gpulse.store.store import Store

log = logging.getLogger(__name__)

WrittenCallback = Callable[[Session, str], Awaitable[None]]
_MAX_PARALLEL = 2
_CLOSE_SECONDS = 10.0
_PATH_SECONDS = 2.0


class ExportQueue:
    """Queue of session files to write."""

    def __init__(self, store: Store, directory: str, *, now: Callable[[], float]) -> None:
        """Prepare to write.

        Args:
            store: The store with the frames.
            directory: Directory of the files.
            now: The head's clock.
        """
        self.directory = directory
        self._store = store
        self._now = now
        self._states: dict[str, ExportState] = {}
        self._planned: dict[str, str] = {}
        """File that a session will be written to when it is stopped, by session ID."""
        self._tasks: dict[tuple[str, SessionFormat, float | None], asyncio.Task[None]] = {}
        self._turn = asyncio.Semaphore(_MAX_PARALLEL)
        self._cancelled = False
        remove_stale_drafts(directory)

    async def plan(self, session: Session) -> None:
        """Choose the file that a session will be written to, so that answers can name it in advance."""
        taken = self._taken(session)
        with suppress(TimeoutError):  # a hanging file server must not block the start of a session
            async with asyncio.timeout(_PATH_SECONDS):
                path = await await_background_call(
                    lambda: find_free_path(self.directory, session.name, ".json", taken=taken),
                    name="free-path",
                )
            if path is not None:
                self._planned[session.id] = path

    def path(self, session: Session) -> str | None:
        """Return the file that a session was or will be written to; None if unknown."""
        return session.output or (None if session.state == "finished" else self._planned.get(session.id))

    def _taken(self, session: Session) -> set[str]:
        """Return the planned files of other sessions: `run` may get the name that `run-2` would have."""
        return {path for key, path in list(self._planned.items()) if key != session.id}

    def begin(self, session: Session, output_format: SessionFormat, written: WrittenCallback) -> None:
        """Start to write a session's file; `written` is called with its path once it is complete."""
        key = (session.id, output_format, session.end)
        if key in self._tasks:
            return
        self._states[session.id] = ExportState(state="writing")
        task = asyncio.create_task(self._write(session, output_format, written))
        self._tasks[key] = task
        task.add_done_callback(lambda _: self._tasks.pop(key, None))

    async def finished(self, ids: Collection[str], timeout_seconds: float) -> None:
        """Wait until the files of these sessions are written, up to a time limit."""
        tasks = [task for key, task in self._tasks.items() if key[0] in ids]
        if tasks:
            await asyncio.wait(tasks, timeout=timeout_seconds)

    async def close(self) -> None:
        """Cancel the files that are being written; the next head writes them."""
        self._cancelled = True
        await self.finished([key[0] for key in self._tasks], _CLOSE_SECONDS)

    def state(self, session: Session) -> ExportState:
        """Return the state of a session's file."""
        known = self._states.get(session.id)
        if known is not None:
            return known
        if session.output:
            return ExportState(state="done", path=session.output)
        return ExportState(state="writing" if session.state == "finished" else "none")

    def download(
        self, session: Session, output_format: SessionFormat, now: float, *, with_code: bool
    ) -> Download:
        """Return a session's file as a download in pieces.

        Args:
            session: The session.
            output_format: Format of the file.
            now: End of the file if the session is active.
            with_code: Whether findings have their lines of code.

        Raises:
            UsageError: The file would be too large.
        """
        count_steps_checked(session, now if session.end is None else session.end)
        pieces = _session_chunks(self._store, session, output_format, now, with_code=with_code)
        return Download(
            f"{session.name}.{output_format}", MEDIA_TYPES[output_format], _iterate_in_thread(pieces)
        )

    async def _write(self, session: Session, output_format: SessionFormat, written: WrittenCallback) -> None:
        try:
            async with self._turn:
                path, incomplete = await asyncio.to_thread(self._write_noticing, session, output_format)
            for text in incomplete:
                log.warning("the file of session %s is incomplete: %s", session.name, text)
        except ExportCancelledError:
            self._states[session.id] = ExportState(state="none")
            return
        except GpulseError as error:
            log.error("cannot write the file of session %s: %s", session.name, error.message)
            self._states[session.id] = ExportState(state="failed", error=error.message)
            return
        except Exception as error:
            log.exception("cannot write the file of session %s", session.name)
            self._states[session.id] = ExportState(state="failed", error=f"{type(error).__name__}: {error}")
            return
        finally:
            if session.state == "finished":
                self._planned.pop(session.id, None)
        log.info("wrote session %s to %s", session.name, path)
        self._states[session.id] = ExportState(state="done", path=path)
        await written(session, path)

    def _write_noticing(self, session: Session, output_format: SessionFormat) -> tuple[str, list[str]]:
        """Write a session's file; return its path and what is missing from it."""
        with collect_missing() as incomplete:
            return self._write_file(session, output_format), incomplete

    def _write_file(self, session: Session, output_format: SessionFormat) -> str:
        suffix, taken = f".{output_format}", self._taken(session)
        with SessionFile(self.directory, session.name, suffix, taken=taken) as draft:
            try:
                write_session(
                    self._store,
                    session,
                    draft.file,
                    output_format,
                    now=self._now(),
                    cancelled=lambda: self._cancelled,
                    # Other users of this machine may read session files, but not the code of other people's programs.
                    make_private=draft.make_private,
                )
            except OSError as error:
                raise disk_error(
                    f"cannot write {session.name}.{output_format} in {self.directory}", error
                ) from error
            return draft.publish()


def _session_chunks(
    store: Store, session: Session, output_format: SessionFormat, now: float, *, with_code: bool
) -> Iterator[bytes]:
    """Yield the bytes of the file; nothing is read before the first of them is requested."""
    yield from SessionExport(store, session, output_format, now=now, with_code=with_code)


async def _iterate_in_thread(pieces: Iterator[bytes]) -> AsyncIterator[bytes]:
    while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
        yield piece
