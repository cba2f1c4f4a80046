"""Sessions whose head ended under them: listed, resumed or written to files, with a head or without one."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import click

from gpulse.cli import remote, shell, target
from gpulse.errors import GpulseError, MissingExtraError, UsageError
from gpulse.terminal import format as f

if TYPE_CHECKING:
    from gpulse.cluster.protocol.answers import SessionAnswer

Command = TypeVar("Command", bound=Callable[..., object])


class Asked(NamedTuple):
    """What somebody wants of interrupted sessions."""

    name: str | None = None
    session_id: str | None = None
    listed: bool = False
    exported: bool = False
    output_format: str | None = None
    output: Path | None = None
    as_json: bool = False
    no_color: bool = False
    command: str = "gpulse session recover"
    """How it was called, up to its options."""
    before_name: str = ""
    """What stands before a name on its command line."""
    options: str = ""
    """How the head was named, for a command that is suggested."""

    @property
    def wanted(self) -> str | None:
        """The name or the id; None when there is neither."""
        return self.session_id or self.name

    def choose(self, sessions: Sequence[SessionAnswer]) -> Asked | None:
        """Say which session is meant when none is named: the only one there is, or none if they are to be listed.

        Only sessions that were interrupted can go on. Any session can be exported, but those come first.

        Raises:
            UsageError: There are several.
        """
        recoverable = [session for session in sessions if session.recoverable]
        if self.listed or not (recoverable or (self.exported and sessions)):
            _list(self, recoverable)
            return None
        candidates = recoverable or list(sessions)
        if len(candidates) > 1:
            names = list(dict.fromkeys(f.plain(session.name) for session in candidates))
            kind = "interrupted" if recoverable else "there are"
            export = " --export" if self.exported else ""
            raise UsageError(
                f"which session? {kind}: {', '.join(names)}",
                hint=f"{self.command}{export} {self.before_name}{names[-1]}{self.options}",
            )
        return self._replace(session_id=candidates[0].session_id)


def options(command: Command) -> Command:
    """The options that make an `Asked`, the name aside."""
    for option in reversed(
        (
            click.option("--session-id", metavar="ID", help="The session, when several have one name."),
            click.option("--list", "listed", is_flag=True, help="List the sessions that can be recovered."),
            click.option(
                "--export", "exported", is_flag=True, help="Write its file here instead of going on."
            ),
            remote.format_option,
            click.option(
                "-o",
                "--output",
                type=click.Path(path_type=Path),
                metavar="FILE",
                help="With --export: a new file or a directory.",
            ),
            click.option("--json", "as_json", is_flag=True, help="With --list: print JSON."),
            click.option("--no-color", is_flag=True, help="No colours (as NO_COLOR=1)."),
        )
    ):
        command = option(command)
    return command


def at_head(asked: Asked, head: remote.Head) -> None:
    """Do it at a head."""
    from gpulse.cluster.protocol.answers import OneSession, Sessions  # noqa: PLC0415  --help needs none of it

    if asked.listed or not asked.wanted:
        chosen = asked.choose(head.call("sessions", Sessions).sessions)
        if chosen is None:
            return
        asked = chosen
    if asked.exported:
        kind = remote.chosen_format(asked.output_format, asked.output)
        remote.fetch(head, asked.wanted or "", kind, asked.output)
    else:
        body = {"session_id": asked.session_id} if asked.session_id else {"name": asked.name}
        shell.write(_resumed(head.call("recover", OneSession, body).session))


def in_directory(asked: Asked, directory: Path, chosen: target.Target) -> None:
    """Do it with the data of a head: ask the head if one holds it, else look into it.

    Raises:
        GpulseError: A head holds it and does not say where it is, or it is no such directory.
    """
    if holder_of(directory) is not None:
        address = target.running_at(directory)
        if address is None:
            raise GpulseError(
                f"a head is at work in {directory}, and does not say where it listens",
                hint="wait until it is up, or name it: HOST:8090",
            )
        with remote.asking(chosen._replace(head=address.target)) as head:
            at_head(asked, head)
        return
    try:
        from gpulse.cluster.client import offline  # noqa: PLC0415  loads numpy and DuckDB
    except ImportError as error:
        raise MissingExtraError("reading the data of a head", "head") from error
    if asked.listed or not asked.wanted:
        with remote.Waiting(f"reading {directory}"):
            sessions = offline.described(str(directory), time.time())
        chosen_one = asked.choose(sessions)
        if chosen_one is None:
            return
        asked = chosen_one
    if asked.exported:
        _export(asked, directory)
    else:
        session = offline.recover(
            str(directory), name=asked.name, session_id=asked.session_id, now=time.time()
        )
        shell.write(f"{f.plain(session.name)} goes on when a head is started with {directory}")


def _export(asked: Asked, directory: Path) -> None:
    from gpulse.cluster.client import offline  # noqa: PLC0415  loads numpy and DuckDB

    kind = remote.chosen_format(asked.output_format, asked.output)
    with offline.opened(str(directory)) as store:
        session = offline.find(store, asked.wanted or "")
        remote.save(
            session.name,
            kind,
            asked.output,
            lambda file, told: offline.write(store, session, kind, file, told),
        )


def holder_of(directory: Path) -> int | None:
    """The process that holds the data of a head, 0 when it does not say; None when nobody does."""
    from gpulse.store.log.lock import writer_of  # noqa: PLC0415  --help needs none of it

    return writer_of(str(directory))


def _list(asked: Asked, sessions: Sequence[SessionAnswer]) -> None:
    if asked.as_json:
        remote.print_json({"sessions": list(sessions)})
        return
    if not sessions:
        shell.write("there is no session to recover")
        return
    from gpulse.terminal.cluster import session_lines  # noqa: PLC0415

    paint = shell.paint(no_color=asked.no_color)
    shell.write("\n".join(session_lines(sessions, now=time.time(), width=shell.width(), paint=paint)))


def _resumed(session: SessionAnswer) -> str:
    """Return that a session goes on, for how long it was interrupted, and what is missing."""
    from gpulse.terminal.cluster import interruption_words, seconds_of  # noqa: PLC0415

    name = f.plain(session.name)
    last = session.interruptions[-1] if session.interruptions else None
    start, end = (None, None) if last is None else (seconds_of(last.start_time), seconds_of(last.end_time))
    if last is None or start is None or end is None:
        return f"{name} goes on"
    missing = interruption_words(last)
    return f"{name} goes on after an interruption of {f.duration(end - start)}{f': {missing}' if missing else ''}"
