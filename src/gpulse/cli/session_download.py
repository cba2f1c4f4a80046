"""Files of profiling sessions: wait until the head has written them, download them, save them here."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, get_args

import click

from gpulse.cli import common
from gpulse.cli.head_client import HeadConnection
from gpulse.cli.progress import WaitNotice
from gpulse.cluster.client.head_client import HeadClient
from gpulse.cluster.protocol.answers import ExportState, SessionAnswer, Sessions, SeveralSessions
from gpulse.errors import GpulseError, UsageError
from gpulse.export.session_file.output_file import SessionFile
from gpulse.model.finding import CODE_FIELDS
from gpulse.model.session import SessionFormat
from gpulse.terminal import value_format as f

FORMATS = get_args(SessionFormat)
_POLL_SECONDS = 0.5
_CODE_KEYS = tuple(f'"{name}":'.encode() for name in sorted(CODE_FIELDS))
STDOUT = "-"


def reject_empty_name(_ctx: click.Context, _parameter: click.Parameter, value: str | None) -> str | None:
    """Reject an empty name, which comes from an unset variable and must not mean all sessions.

    Raises:
        click.BadParameter: It is empty.
    """
    if value is not None and not value.strip():
        raise click.BadParameter("the name is empty; give a name, or leave the name out")
    return value


def _make_format_option(default: str) -> Callable[[common.Command], common.Command]:
    return click.option(
        "--format",
        "output_format",
        type=click.Choice(FORMATS),
        show_default=default,
        help="Format of the session file.",
    )


format_option = _make_format_option("from FILE's extension, else json")
format_option_without_file = _make_format_option("json")
"""The same for commands without an option for the file."""


def wait_until_written(head: HeadConnection, outcome: SeveralSessions) -> list[SessionAnswer]:
    """Wait until the head has written the files of sessions; return the sessions."""
    sessions = {session.session_id: session for session in outcome.sessions}
    with WaitNotice("") as waiting:
        while pending := [key for key, session in sessions.items() if _is_writing(session)]:
            waiting.text = f"the head is writing {_progress_text(sessions, pending)}"
            time.sleep(_POLL_SECONDS)
            sessions |= _fetch_states(head.client, pending)
    return list(sessions.values())


def _is_writing(session: SessionAnswer) -> bool:
    return session.export.state == "writing" if session.export else False


def _progress_text(sessions: Mapping[str, SessionAnswer], pending: Sequence[str]) -> str:
    name = f.plain(sessions[pending[0]].name)
    if len(sessions) == 1:
        return name
    return f"{name}, file {len(sessions) - len(pending) + 1} of {len(sessions)}"


def _fetch_states(client: HeadClient, pending: Sequence[str]) -> dict[str, SessionAnswer]:
    """Fetch the states of sessions with one request."""
    if len(pending) == 1:
        return {pending[0]: client.call("session", SessionAnswer, {"name": pending[0]})}
    found = {session.session_id: session for session in client.call("sessions", Sessions).sessions}
    return {key: found[key] for key in pending if key in found}


def print_written_files(
    sessions: Sequence[SessionAnswer],
    *,
    verb: str,
    export_with: Callable[[str], str],
    say: Callable[[str], None] = common.write,
) -> int:
    """Print where the files of sessions are, or why they are missing; return the exit code.

    Args:
        sessions: The sessions.
        verb: What has been done to them.
        export_with: Returns the command that saves the file of a session of this name here.
        say: Prints a line.
    """
    code = 0
    for session in sessions:
        name = f.plain(session.name)
        match session.export:
            case ExportState(state="done", path=str(path)):
                say(f"{name} {verb}: {f.plain(path)}")
                if not os.path.exists(path):
                    say(f"save it here with: {export_with(name)}")
                elif hint := report_command(path):
                    say(hint)
            case ExportState(state="failed", error=error):
                code = 1
                common.print_error(
                    export_with(name).partition(" ")[0],
                    f"{name} {verb}, but its file could not be written: {f.plain(str(error))}",
                    export_with(name),
                )
            case _:
                say(f"{name} {verb}")
    return code


def report_command(path: str) -> str | None:
    """Return the hint how to view a session's file; None for formats that reports do not read."""
    if not path.endswith((".json", ".jsonl")):
        return None
    near = os.path.relpath(path)
    place = path if near.startswith(os.pardir) else near
    return common.get_rewording()(f"view it with: gpulse report {shlex.quote(f.plain(place))}")


def download(head: HeadConnection, name: str, output_format: SessionFormat, place: Path | None) -> None:
    """Download a session's file to a new file, or to standard output if `place` is `-`.

    An incomplete download leaves no file behind. A file with lines of code can be read only by its owner.

    Args:
        head: The head.
        name: The session's name or ID.
        output_format: Format of the file.
        place: A file, a directory, or None for the current directory.

    Raises:
        GpulseError: The download or the writing fails.
    """
    if place is not None and str(place) == STDOUT:
        head.client.download(name, output_format, sys.stdout.buffer)
        sys.stdout.flush()
        return
    session = head.call("session", SessionAnswer, {"name": name})

    def write(draft: SessionFile, progress: Callable[[int], None]) -> int:
        draft.make_private()
        content = _CodeDetector(draft.file)
        size = head.client.download(session.session_id, output_format, content, progress)
        if not content.has_code:
            draft.undo_private()
        return size

    save_file(session.name, output_format, place, write)


class _CodeDetector:
    """Writes to a file, and notices findings with lines of code, which are at the end of a session's file."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._tail = b""
        self.has_code = False

    def write(self, data: bytes, /) -> int:
        """Write some bytes."""
        seen = self._tail + data
        self.has_code = self.has_code or any(key in seen for key in _CODE_KEYS)
        self._tail = seen[-max(map(len, _CODE_KEYS)) :]
        return self._file.write(data)


def save_file(
    name: str,
    output_format: SessionFormat,
    place: Path | None,
    write: Callable[[SessionFile, Callable[[int], None]], int],
) -> str:
    """Write a session's file, complete or not at all and never over another, and print its path.

    Args:
        name: The session's name.
        output_format: Format of the file.
        place: A file, a directory, or None for the current directory.
        write: Writes to a file, reports the bytes so far, and returns the bytes written.
    """
    directory, stem = _file_name(name, output_format, place)
    with WaitNotice(f"downloading {name}") as waiting:

        def progress(size: int) -> None:
            waiting.text = f"downloading {name}: {f.size(size)}"

        with SessionFile(directory, stem, f".{output_format}") as new:
            try:
                size = write(new, progress)
            except OSError as error:
                raise GpulseError(
                    f"cannot write {stem}.{output_format} in {directory}: {error.strerror}",
                    hint="check whether the disk is full",
                ) from error
            path = new.publish()
    shown = os.path.relpath(path) if place is None else path
    if os.path.basename(path) != f"{stem}.{output_format}":
        common.print_note(f"{stem}.{output_format} already exists and is kept")
    common.write(f"wrote {f.plain(shown)} ({f.size(size)})")
    if hint := report_command(path):
        common.write(hint)
    return path


def choose_format(output_format: str | None, place: Path | None) -> SessionFormat:
    """Return the format of --format, of the file's extension, or json.

    Raises:
        UsageError: The extension is unknown, or contradicts --format.
    """
    said = None
    if place is not None and str(place) != STDOUT and not place.is_dir():
        said = place.suffix[1:].lower()
        if said not in FORMATS:
            raise UsageError(
                f"cannot tell the format of {place} from its extension",
                hint=f"use one of {', '.join('.' + known for known in FORMATS)}",
            )
        if output_format not in (None, said):
            raise UsageError(
                f"the extension of {place} contradicts --format {output_format}", hint="leave out --format"
            )
    chosen = said or output_format or "json"
    return next(known for known in get_args(SessionFormat) if known == chosen)


def _file_name(name: str, output_format: str, place: Path | None) -> tuple[str, str]:
    """Return the directory and the file name without its suffix."""
    if place is None:
        return ".", name
    if place.is_dir():
        return str(place), name
    if not place.parent.is_dir():
        raise UsageError(f"there is no directory {place.parent}", hint=f"mkdir -p {place.parent}")
    return str(place.parent), place.name.removesuffix(f".{output_format}")
