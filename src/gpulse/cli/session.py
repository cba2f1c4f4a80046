"""`gpulse session`: start, stop, list, export and recover profiling sessions of a head."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click
from click.shell_completion import CompletionItem

from gpulse.cli import common, head_client, option_types, progress, session_download
from gpulse.cli.common import CommandGroup
from gpulse.cluster.protocol.answers import OneSession, SessionAnswer, Sessions, SeveralSessions, Status
from gpulse.errors import GpulseError, MissingExtraError, UsageError
from gpulse.model.time_text import parse_iso
from gpulse.store.log.lock import find_writer
from gpulse.terminal import value_format as f
from gpulse.terminal.cluster_status import describe_interruption, session_facts, session_lines

_OUTPUT = click.Path(path_type=Path, allow_dash=True)
_COMPLETION_TIMEOUT_SECONDS = 1.0
_NOT_COMPARED = 3


def _complete_names(ctx: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete the name of a session; without names when the head does not answer within a second."""
    try:
        chosen = head_client.HeadTarget(head=ctx.params.get("head"))
        with chosen.connect(call_seconds=_COMPLETION_TIMEOUT_SECONDS) as client:
            found = client.call("sessions", Sessions).sessions
    except GpulseError:
        return []
    return [
        CompletionItem(session.name, help=session.state)
        for session in reversed(found)
        if session.name.startswith(incomplete)
    ]


class RecoveryRequest(NamedTuple):
    """Options of a command that recovers sessions."""

    name: str | None = None
    session_id: str | None = None
    listed: bool = False
    exported: bool = False
    output_format: str | None = None
    output: Path | None = None
    as_json: bool = False
    no_color: bool = False
    command: str = "gpulse session recover"
    """The command itself, for suggested commands."""
    before_name: str = ""
    """What precedes a session's name on its command line."""
    options: str = ""
    """Options that name the head, for suggested commands."""

    @property
    def wanted(self) -> str | None:
        """The ID or the name; None without either."""
        return self.session_id or self.name

    def choose(self, sessions: Sequence[SessionAnswer]) -> RecoveryRequest | None:
        """Choose a session when none is named: the only one there is. Print the list and return None with --list.

        Only interrupted sessions can be resumed. Any session can be exported, but interrupted ones come first.

        Raises:
            UsageError: There are several.
        """
        recoverable = [session for session in sessions if session.recoverable]
        if self.listed or not (recoverable or (self.exported and sessions)):
            _print_sessions(self, recoverable)
            return None
        candidates = recoverable or list(sessions)
        if len(candidates) > 1:
            names = list(dict.fromkeys(f.plain(session.name) for session in candidates))
            kind = "interrupted sessions" if recoverable else "sessions"
            export = " --export" if self.exported else ""
            raise UsageError(
                f"there are {len(candidates)} {kind}: {', '.join(names)}; give the name of one",
                hint=f"{self.command}{export} {self.before_name}{names[-1]}{self.options}",
            )
        return self._replace(session_id=candidates[0].session_id)


def recovery_options(command: common.Command) -> common.Command:
    """Add the options of a `RecoveryRequest`, except the name."""
    for option in reversed(
        (
            click.option(
                "--session-id", metavar="ID", help="ID of the session, if several have the same name."
            ),
            click.option("--list", "listed", is_flag=True, help="List interrupted sessions."),
            click.option(
                "--export",
                "exported",
                is_flag=True,
                help="Save the session's file here instead of resuming the session.",
            ),
            session_download.format_option,
            click.option(
                "-o",
                "--output",
                type=click.Path(path_type=Path),
                metavar="FILE",
                show_default="NAME.json in the current directory",
                help="With --export: file to create, or existing directory.",
            ),
            click.option("--json", "as_json", is_flag=True, help="With --list: print JSON."),
            click.option("--no-color", is_flag=True, help="Do not use colors (same as NO_COLOR=1)."),
        )
    ):
        command = option(command)
    return command


@click.group(cls=CommandGroup)
def command() -> None:
    """Manage named profiling sessions on all nodes of a head.

    \b
    gpulse session start training_run      start now, or in the past with --since 10m
    gpulse session list                    list all sessions
    gpulse session stop training_run       stop it; the head writes training_run.json
    gpulse session export training_run     save the file here
    gpulse session compare run_1 run_2     find out whether a change helped
    """  # noqa: D301  click needs the backspace itself


@command.command()
@click.argument("name", required=False, callback=session_download.reject_empty_name)
@click.option(
    "--since",
    type=option_types.duration,
    metavar="TIME",
    show_default="now",
    help="Start the session this long in the past, such as 10m; the head already has the data.",
)
@click.option("--node", "nodes", multiple=True, metavar="NAME", help="Record only this node; repeatable.")
@click.option(
    "--gpu",
    "gpus",
    multiple=True,
    metavar="GPU",
    help="Record only this GPU, given as INDEX, NODE:INDEX or UUID; repeatable.",
)
@click.option(
    "--label",
    "labels",
    multiple=True,
    metavar="KEY=VALUE",
    help="Label for finding the session later; repeatable.",
)
@click.option(
    "--freq",
    "interval_ms",
    type=click.IntRange(50, 3_600_000),
    metavar="MS",
    show_default="the agents' sampling interval",
    help="Milliseconds between frames in the session's file.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@head_client.options
def start(
    *,
    name: str | None,
    since: float | None,
    nodes: tuple[str, ...],
    gpus: tuple[str, ...],
    labels: tuple[str, ...],
    interval_ms: int | None,
    as_json: bool,
    **given: Any,
) -> None:
    """Start a session; without NAME the head chooses a name."""
    body: dict[str, Any] = {
        "name": name,
        "since": since,
        "nodes": list(nodes),
        "gpus": list(gpus),
        "labels": option_types.labels(labels),
        "interval_ms": interval_ms,
    }
    start_session(head_client.pop_target(given), body, as_json=as_json)


def start_session(
    chosen: head_client.HeadTarget,
    body: Mapping[str, Any],
    *,
    as_json: bool = False,
    transport: Any = "grpc",
    stop: Callable[[str], str] | None = None,
) -> None:
    """Start a session, and print its future file and how to stop it.

    Args:
        chosen: The head.
        body: Fields of the request.
        as_json: Print the head's answer.
        transport: The protocol.
        stop: Returns the command that stops a session of a name, if it is not `gpulse session stop`.
    """
    given = {key: value for key, value in body.items() if value not in (None, [], {})}
    with head_client.connect_to_head(chosen, transport) as head:
        answer = head.call("start", OneSession, given)
    if as_json:
        head_client.print_json(answer)
        return
    name = f.plain(answer.session.name)
    earlier = f", starting {f.duration(body['since'])} ago" if body.get("since") else ""
    ending = stop(name) if stop else f"gpulse session stop {name}{chosen.options()}"
    common.write(f"session {name} started{earlier}; stop it with: {ending}")
    if planned := answer.output_file:
        usual = f"{name}.json"
        why = "" if os.path.basename(str(planned)) == usual else f", because {usual} exists"
        common.write(f"its file will be {f.plain(str(planned))}{why}")


@command.command()
@click.argument(
    "name", required=False, shell_complete=_complete_names, callback=session_download.reject_empty_name
)
@click.option("--all", "everything", is_flag=True, help="Stop all active sessions.")
@session_download.format_option
@click.option(
    "-o",
    "--output",
    type=_OUTPUT,
    metavar="FILE",
    help="Also save the file here: to a new file, into a directory, or to standard output with -.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@head_client.options
def stop(
    *,
    name: str | None,
    everything: bool,
    output_format: str | None,
    output: Path | None,
    as_json: bool,
    **given: Any,
) -> int:
    """Stop a session, and wait until its file is written.

    NAME can be left out when only one session is active.
    """
    if name and everything:
        raise UsageError("NAME and --all cannot be used together", hint="leave out NAME or --all")
    kind = session_download.choose_format(output_format, output)
    chosen = head_client.pop_target(given)
    with head_client.connect_to_head(chosen) as head:
        names = [name] if name else find_active_names(head, all_of_them=everything)
        if len(names) > 1 and output is not None and not output.is_dir():
            raise UsageError("several sessions cannot be saved to one file", hint="give a directory with -o")
        meant = (
            {} if everything else {"name": names[0]}
        )  # all in one request, so that they end at the same time
        stopped = head.call("stop", SeveralSessions, {**meant, "format": kind})
        sessions = session_download.wait_until_written(head, stopped)
        if as_json:
            head_client.print_json({"sessions": sessions})
            code = int(any(session.export and session.export.state == "failed" for session in sessions))
        else:
            aside = output is not None and str(output) == session_download.STDOUT
            code = session_download.print_written_files(
                sessions,
                verb="stopped",
                export_with=lambda name: f"gpulse session export {name}{chosen.options()}",
                say=common.print_note if aside else common.write,
            )
        if output is not None:
            for session in sessions:
                session_download.download(head, session.session_id, kind, output)
    return code


def find_active_names(head: head_client.HeadConnection, *, all_of_them: bool) -> list[str]:
    """Return the names of active sessions: the only one, or all with `all_of_them`.

    Raises:
        UsageError: There is none, or there are several.
    """
    names = [session.name for session in head.call("sessions", Sessions).sessions if session.is_active]
    if not names:
        raise UsageError("no session is active", hint=f"gpulse session list{head.options}")
    if len(names) > 1 and not all_of_them:
        raise UsageError(
            f"{len(names)} sessions are active: {', '.join(map(f.plain, names))}",
            hint="give the name of one, or --all",
        )
    return names


@command.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print the head's answer as JSON.")
@click.option("--no-color", is_flag=True, help="Do not use colors (same as NO_COLOR=1).")
@head_client.options
def list_sessions(*, as_json: bool, no_color: bool, **given: Any) -> None:
    """List all sessions, newest last."""
    with head_client.connect_to_head(head_client.pop_target(given)) as head:
        if as_json:
            head_client.print_json(head.call("sessions", dict))
            return
        answer = head.call("sessions", Sessions)
        now = head.call("status", Status).time
    if not answer.sessions:
        common.write("no sessions yet; start one with: gpulse session start NAME")
    else:
        paint = common.paint(no_color=no_color)
        lines = session_lines(answer.sessions, now=parse_iso(now), width=common.terminal_width(), paint=paint)
        common.write("\n".join(lines))


@command.command()
@click.argument("name", shell_complete=_complete_names)
@click.option("--json", "as_json", is_flag=True, help="Print the head's answer as JSON.")
@click.option("--no-color", is_flag=True, help="Do not use colors (same as NO_COLOR=1).")
@head_client.options
def show(*, name: str, as_json: bool, no_color: bool, **given: Any) -> None:
    """Show all details of a session, by name or ID."""
    with head_client.connect_to_head(head_client.pop_target(given)) as head:
        if as_json:
            head_client.print_json(head.call("session", dict, {"name": name}))
            return
        session = head.call("session", SessionAnswer, {"name": name})
        now = head.call("status", Status).time
    paint = common.paint(no_color=no_color)
    lines = session_facts(session, now=parse_iso(now), width=common.terminal_width(), paint=paint)
    common.write("\n".join(lines))


@command.command()
@click.argument("name", shell_complete=_complete_names)
@session_download.format_option
@click.option(
    "-o",
    "--output",
    type=_OUTPUT,
    metavar="FILE",
    show_default="NAME.json in the current directory",
    help="File to create, or existing directory; - for standard output.",
)
@head_client.options
def export(*, name: str, output_format: str | None, output: Path | None, **given: Any) -> None:
    """Save the file of a session here, even if it is still active.

    Existing files are kept: if NAME.json exists, NAME-2.json is written.
    """
    kind = session_download.choose_format(output_format, output)
    with head_client.connect_to_head(head_client.pop_target(given)) as head:
        session_download.download(head, name, kind, output)


@command.command()
@click.argument("before", shell_complete=_complete_names, callback=session_download.reject_empty_name)
@click.argument("after", shell_complete=_complete_names, callback=session_download.reject_empty_name)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--no-color", is_flag=True, help="Do not use colors (same as NO_COLOR=1).")
@head_client.options
@click.pass_context
def compare(
    ctx: click.Context, /, *, before: str, after: str, as_json: bool, no_color: bool, **given: Any
) -> int:
    """Compare two sessions, from before and after a change.

    BEFORE and AFTER are each the name or the ID of a session, or a file of `gpulse session export` (.json or .jsonl).
    Files do not contain SM and tensor core activity, step time or programs; if either side is a file, these are unknown.

    Exit codes: 0 better or no clear change, 1 worse or partly worse, 2 wrong usage, 3 not enough data or an error.
    """
    from gpulse.cli import run_comparison  # noqa: PLC0415  loads NumPy, which no other session command needs

    ending = common.exit_codes(ctx)
    ending.failed = _NOT_COMPARED  # an error must not be mistaken for a worse run
    comparison = run_comparison.compare_sessions(head_client.pop_target(given), before, after)
    ending.unread = run_comparison.EXIT_CODES[comparison.outcome]
    return run_comparison.print_comparison(comparison, as_json=as_json, no_color=no_color)


@command.command("recover")
@click.argument(
    "name", required=False, shell_complete=_complete_names, callback=session_download.reject_empty_name
)
@recovery_options
@click.option(
    "--data-dir",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    metavar="DIR",
    help="Read the data directory of a head that is not running.",
)
@head_client.options
def recover_session(*, data_dir: Path | None, **given: Any) -> None:
    """Resume a session that was interrupted when its head stopped.

    \b
    gpulse session recover --list          list interrupted sessions
    gpulse session recover NAME            resume one; agents send the missing frames
    gpulse session recover --export NAME   save its file here, and leave it interrupted
    """  # noqa: D301  click needs the backspace itself
    chosen = head_client.pop_target(given)
    place = f" --data-dir {shlex.quote(str(data_dir))}" if data_dir is not None else ""
    asked = RecoveryRequest(**given, options=f"{place}{chosen.options()}")
    if data_dir is not None:
        recover_in_directory(asked, data_dir, chosen)
        return
    with head_client.connect_to_head(chosen) as head:
        recover_at_head(asked, head)


def recover_at_head(request: RecoveryRequest, head: head_client.HeadConnection) -> None:
    """List, resume or export sessions at a running head."""
    if request.listed or not request.wanted:
        chosen = request.choose(head.call("sessions", Sessions).sessions)
        if chosen is None:
            return
        request = chosen
    if request.exported:
        kind = session_download.choose_format(request.output_format, request.output)
        session_download.download(head, request.wanted or "", kind, request.output)
    else:
        body = {"session_id": request.session_id} if request.session_id else {"name": request.name}
        common.write(_describe_resumed(head.call("recover", OneSession, body).session))


def recover_in_directory(request: RecoveryRequest, directory: Path, chosen: head_client.HeadTarget) -> None:
    """List, resume or export sessions of a data directory, through the head if one is using it.

    Raises:
        GpulseError: A head uses the directory but its address is unknown, or it is not a data directory.
    """
    if find_data_holder(directory) is not None:
        address = head_client.find_running_head(directory)
        if address is None:
            raise GpulseError(
                f"a head is using {directory}, but the head's address is not known yet",
                hint="wait until the head is up, or give its address: HOST:8090",
            )
        with head_client.connect_to_head(chosen._replace(head=address.target)) as head:
            recover_at_head(request, head)
        return
    try:
        from gpulse.cluster.client import offline_sessions  # noqa: PLC0415  loads numpy and DuckDB
    except ImportError as error:
        raise MissingExtraError("reading the data of a head", "head") from error
    if request.listed or not request.wanted:
        with progress.WaitNotice(f"reading {directory}"):
            sessions = offline_sessions.list_sessions(str(directory), time.time())
        chosen_one = request.choose(sessions)
        if chosen_one is None:
            return
        request = chosen_one
    if request.exported:
        _export_session(request, directory)
    else:
        session = offline_sessions.recover_offline_session(
            str(directory), name=request.name, session_id=request.session_id, now=time.time()
        )
        common.write(f"{f.plain(session.name)} will be resumed when a head is started with {directory}")


def _export_session(request: RecoveryRequest, directory: Path) -> None:
    from gpulse.cluster.client import offline_sessions  # noqa: PLC0415  loads numpy and DuckDB

    kind = session_download.choose_format(request.output_format, request.output)
    with offline_sessions.open_store(str(directory)) as store:
        session = offline_sessions.find_offline_session(store, request.wanted or "")
        session_download.save_file(
            session.name,
            kind,
            request.output,
            lambda draft, progress: offline_sessions.write_session_file(
                store, session, kind, draft.file, progress, draft.make_private
            ),
        )


def find_data_holder(directory: Path) -> int | None:
    """Return the PID of the process that uses a data directory, 0 if it is unknown; None when nobody does."""
    return find_writer(str(directory))


def _print_sessions(request: RecoveryRequest, sessions: Sequence[SessionAnswer]) -> None:
    if request.as_json:
        head_client.print_json({"sessions": list(sessions)})
        return
    if not sessions:
        common.write("there is no interrupted session")
        return
    paint = common.paint(no_color=request.no_color)
    common.write(
        "\n".join(session_lines(sessions, now=time.time(), width=common.terminal_width(), paint=paint))
    )


def _describe_resumed(session: SessionAnswer) -> str:
    """Return the message that a session was resumed, how long it was interrupted, and what is missing."""
    name = f.plain(session.name)
    last = session.interruptions[-1] if session.interruptions else None
    start, end = (None, None) if last is None else (parse_iso(last.start_time), parse_iso(last.end_time))
    if last is None or start is None or end is None:
        return f"{name} resumed"
    missing = describe_interruption(last)
    return f"{name} resumed after an interruption of {f.duration(end - start)}{f': {missing}' if missing else ''}"
