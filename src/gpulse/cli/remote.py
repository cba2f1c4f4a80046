"""What commands do at a head: stop sessions and wait for their files, fetch files, and show that it takes its time."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar, get_args

import click

from gpulse.cli import shell
from gpulse.errors import GpulseError, UsageError
from gpulse.model.session import Format
from gpulse.terminal import format as f

if TYPE_CHECKING:
    from gpulse.cli.target import Target
    from gpulse.cluster.client.address import Transport
    from gpulse.cluster.client.client import HeadClient
    from gpulse.cluster.protocol.answers import SessionAnswer, SeveralSessions

Result = TypeVar("Result")

FORMATS = get_args(Format)
_PATIENCE_SECONDS = 2.0
"""What takes no longer needs no explanation."""
_DRAW_SECONDS = 0.5
_POLL_SECONDS = 0.5
STDOUT = "-"
_AS_COMMANDS = {"/clients": "gpulse status", "/profiling/sessions": "gpulse session list"}
"""What heads suggest to those who speak HTTP, as commands."""
_PATHS = re.compile(rf"(?:GET )?({'|'.join(_AS_COMMANDS)})\b")
NAME = r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9_-])?"
"""A session's name in a sentence, without the dot that ends it."""
_AT_HEAD = re.compile(rf"gpulse (?:status|session list|session (?:start|stop|show|export|recover) {NAME})")
"""Commands that mean a head."""


def not_empty(_ctx: click.Context, _parameter: click.Parameter, value: str | None) -> str | None:
    """An empty name is a variable that was not set, and must not mean all sessions.

    Raises:
        click.BadParameter: It is empty.
    """
    if value is not None and not value.strip():
        raise click.BadParameter("it is empty; leave it out if none is meant")
    return value


format_option = click.option(
    "--format",
    "output_format",
    type=click.Choice(FORMATS),
    help="The kind of file; json, or what the name of FILE says.",
)


class Waiting:
    """A line on standard error about something that takes longer than two seconds."""

    def __init__(self, text: str, *, patience_seconds: float = _PATIENCE_SECONDS) -> None:
        """Prepare to wait.

        Args:
            text: What is waited for; it may change.
            patience_seconds: Nothing is said before.
        """
        self.text = text
        self._patience = patience_seconds
        self._began = time.monotonic()
        self._done = threading.Event()
        self._is_terminal = sys.stderr.isatty()
        self._drawn = False
        self._thread = threading.Thread(target=self._run, name="waiting", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        if self._drawn and self._is_terminal:
            self._write("\r\x1b[K")

    def _run(self) -> None:
        if self._done.wait(self._patience):
            return
        if not self._is_terminal:
            self._write(f"{self.text} ...\n")
            self._drawn = True
            return
        self._drawn = True
        while not self._done.wait(_DRAW_SECONDS):
            from gpulse.terminal.table import cut  # noqa: PLC0415

            passed = f.duration(time.monotonic() - self._began)
            self._write(f"\r\x1b[K{cut(f'{self.text} ({passed})', shell.width() - 1)}")

    @staticmethod
    def _write(text: str) -> None:
        with suppress(OSError):  # a terminal that is gone is no reason to stop waiting
            sys.stderr.write(text)
            sys.stderr.flush()


class Head:
    """A head that is asked with patience: what takes long is shown."""

    def __init__(self, client: HeadClient, options: str = "") -> None:
        self.client = client
        self.options = options
        """How it was named on the command line, for commands that are suggested."""
        self.place = client.address.target
        """Where it is, as people write it."""

    def call(self, operation: str, answer: type[Result], body: Mapping[str, Any] | None = None) -> Result:
        """Carry out one operation of the head and return its answer.

        Args:
            operation: Its name.
            answer: The type of its answer.
            body: The fields of the request.

        Raises:
            GpulseError: It could not be reached, or will not do that.
        """
        try:
            with Waiting(f"waiting for the head at {self.place}"):
                return self.client.call(operation, answer, body)
        except GpulseError as error:
            hint = _PATHS.sub(lambda path: _AS_COMMANDS[path[1]], error.hint or "")
            error.hint = _AT_HEAD.sub(lambda command: f"{command[0]}{self.options}", hint) or None
            raise


@contextmanager
def asking(chosen: Target, transport: Transport = "grpc") -> Iterator[Head]:
    """A head to ask, for as long as the block runs."""
    with Waiting("connecting"):
        client = chosen.connect(transport)
    with client:
        yield Head(client, chosen.options(transport))


def print_json(answer: object) -> None:
    """Print an answer of the head as JSON."""
    import msgspec  # noqa: PLC0415  --help needs none of it

    shell.write(json.dumps(msgspec.to_builtins(answer), indent=2))


def written(head: Head, outcome: SeveralSessions) -> list[SessionAnswer]:
    """Wait until the head has written the files of sessions; the sessions then."""
    sessions = {session.session_id: session for session in outcome.sessions}
    with Waiting("") as waiting:
        while pending := [key for key, session in sessions.items() if _is_writing(session)]:
            waiting.text = f"the head writes {_progress(sessions, pending)}"
            time.sleep(_POLL_SECONDS)
            sessions |= _looked_up(head.client, pending)
    return list(sessions.values())


def _is_writing(session: SessionAnswer) -> bool:
    return session.export.state == "writing" if session.export else False


def _progress(sessions: Mapping[str, SessionAnswer], pending: Sequence[str]) -> str:
    name = f.plain(sessions[pending[0]].name)
    if len(sessions) == 1:
        return name
    return f"{name}, file {len(sessions) - len(pending) + 1} of {len(sessions)}"


def _looked_up(client: HeadClient, pending: Sequence[str]) -> dict[str, SessionAnswer]:
    """What has become of sessions, with one question."""
    from gpulse.cluster.protocol.answers import SessionAnswer, Sessions  # noqa: PLC0415  as above

    if len(pending) == 1:
        return {pending[0]: client.call("session", SessionAnswer, {"name": pending[0]})}
    found = {session.session_id: session for session in client.call("sessions", Sessions).sessions}
    return {key: found[key] for key in pending if key in found}


def tell_written(
    sessions: Sequence[SessionAnswer],
    *,
    verb: str,
    export_with: Callable[[str], str],
    say: Callable[[str], None] = shell.write,
) -> int:
    """Say where files are, or why they are not; the exit code.

    Args:
        sessions: Whose files.
        verb: What has been done to them.
        export_with: The command that brings the file of a session here, given its name.
        say: Says it.
    """
    from gpulse.cluster.protocol.answers import ExportState  # noqa: PLC0415  as above

    code = 0
    for session in sessions:
        name = f.plain(session.name)
        match session.export:
            case ExportState(state="done", path=str(path)):
                say(f"{name} {verb}: {f.plain(path)}")
                if not os.path.exists(path):
                    say(f"bring it here with: {export_with(name)}")
                elif told := see_with(path):
                    say(told)
            case ExportState(state="failed", error=error):
                code = 1
                shell.complain(
                    export_with(name).partition(" ")[0],
                    f"{name} {verb}, but its file could not be written: {f.plain(str(error))}",
                    export_with(name),
                )
            case _:
                say(f"{name} {verb}")
    return code


def see_with(path: str) -> str | None:
    """Say how to look at a session's file; None of formats that no report reads."""
    if not path.endswith((".json", ".jsonl")):
        return None
    near = os.path.relpath(path)
    place = path if near.startswith(os.pardir) else near
    return shell.words()(f"see it with: gpulse report {shlex.quote(f.plain(place))}")


def fetch(head: Head, name: str, output_format: Format, place: Path | None) -> None:
    """Download a session's file: into a new file, or to standard output when the place is `-`.

    What was begun and not completed leaves nothing behind.

    Args:
        head: Where it is.
        name: The session's name or id.
        output_format: The kind of file.
        place: A file, a directory, or None for here.

    Raises:
        GpulseError: It could not be had, or not be written.
    """
    if place is not None and str(place) == STDOUT:
        head.client.download(name, output_format, sys.stdout.buffer)
        sys.stdout.flush()
        return
    from gpulse.cluster.protocol.answers import SessionAnswer  # noqa: PLC0415  as above

    session = head.call("session", SessionAnswer, {"name": name})
    save(
        session.name,
        output_format,
        place,
        lambda file, told: head.client.download(session.session_id, output_format, file, told),
    )


def save(
    name: str,
    output_format: Format,
    place: Path | None,
    write: Callable[[Any, Callable[[int], None]], int],
) -> str:
    """Write a session's file here, complete or not at all, never in place of another, and say where it is.

    Args:
        name: The session's name.
        output_format: The kind of file.
        place: A file, a directory, or None for here.
        write: Writes to a file, tells how many bytes there are so far, and gives how many there were.
    """
    from gpulse.export.session.files import create_session_file  # noqa: PLC0415  few commands write files

    directory, stem = _file_name(name, output_format, place)
    with Waiting(f"fetching {name}") as waiting:

        def progress(size: int) -> None:
            waiting.text = f"fetching {name}: {f.size(size)}"

        with create_session_file(directory, stem, f".{output_format}") as new:
            try:
                size = write(new.file, progress)
            except OSError as error:
                raise GpulseError(
                    f"cannot write {stem}.{output_format} in {directory}: {error.strerror}",
                    hint="see whether the disk is full",
                ) from error
            path = new.publish()
    shown = os.path.relpath(path) if place is None else path
    if os.path.basename(path) != f"{stem}.{output_format}":
        shell.remark(f"{stem}.{output_format} was there already and stays as it is")
    shell.write(f"{f.plain(name)} saved: {f.plain(shown)} ({f.size(size)})")
    if told := see_with(path):
        shell.write(told)
    return path


def chosen_format(output_format: str | None, place: Path | None) -> Format:
    """The kind of file that was asked for, if need be by its name.

    Raises:
        UsageError: The name says another kind than the option.
    """
    said = None
    if place is not None and str(place) != STDOUT and not place.is_dir():
        said = place.suffix[1:].lower()
        if said not in FORMATS:
            raise UsageError(
                f"{place} does not say which kind of file it is",
                hint=f"let it end with one of {', '.join('.' + known for known in FORMATS)}",
            )
        if output_format not in (None, said):
            raise UsageError(f"{place} is not the name of a {output_format} file", hint="leave out --format")
    chosen = said or output_format or "json"
    return next(known for known in get_args(Format) if known == chosen)


def _file_name(name: str, output_format: str, place: Path | None) -> tuple[str, str]:
    """The directory and the name without its suffix."""
    if place is None:
        return ".", name
    if place.is_dir():
        return str(place), name
    if not place.parent.is_dir():
        raise UsageError(f"there is no directory {place.parent}", hint=f"mkdir -p {place.parent}")
    return str(place.parent), place.name.removesuffix(f".{output_format}")
