"""`gpulse session`: begin, end, list and fetch profiling sessions of a head."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gpulse.cli import recover, remote, service, shell, target
from gpulse.errors import UsageError
from gpulse.terminal import format as f

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem


_OUTPUT = click.Path(path_type=Path, allow_dash=True)
_COMPLETION_SECONDS = 1.0


def _names(ctx: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """The names of sessions, for a shell that completes one; none when the head does not answer at once."""
    from click.shell_completion import CompletionItem  # noqa: PLC0415

    from gpulse.cluster.protocol.answers import Sessions  # noqa: PLC0415
    from gpulse.errors import GpulseError  # noqa: PLC0415

    try:
        chosen = target.Target(head=ctx.params.get("head"))
        with chosen.connect(call_seconds=_COMPLETION_SECONDS) as client:
            found = client.call("sessions", Sessions).sessions
    except GpulseError:
        return []
    return [
        CompletionItem(session.name, help=session.state)
        for session in reversed(found)
        if session.name.startswith(incomplete)
    ]


@click.group()
def command() -> None:
    """Named profiling sessions over all nodes of a head.

    \b
    gpulse session start training_run      from now on; --since 10m: ten minutes ago already
    gpulse session list
    gpulse session stop training_run       writes training_run.json where the head was started
    gpulse session export training_run     brings it here
    """  # noqa: D301  click needs the backspace itself


@command.command()
@click.argument("name", required=False, callback=remote.not_empty)
@click.option(
    "--since",
    type=service.duration,
    metavar="TIME",
    help="Begin in the past, such as 10m: it is stored already.",
)
@click.option("--node", "nodes", multiple=True, metavar="NAME", help="Only this node; can be given again.")
@click.option(
    "--gpu",
    "gpus",
    multiple=True,
    metavar="GPU",
    help="Only this GPU, as index, NODE:INDEX or UUID; can be given again.",
)
@click.option("--label", "labels", multiple=True, metavar="KEY=VALUE", help="Something to find it by.")
@click.option(
    "--freq",
    "interval_ms",
    type=click.IntRange(50, 3_600_000),
    metavar="MS",
    help="One frame of its file for so many milliseconds; as agents sample when left out.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@target.options
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
    """Begin a session called NAME; the head finds a name when there is none."""
    body: dict[str, Any] = {
        "name": name,
        "since": since,
        "nodes": list(nodes),
        "gpus": list(gpus),
        "labels": service.labels(labels),
        "interval_ms": interval_ms,
    }
    begin(target.taken(given), body, as_json=as_json)


def begin(
    chosen: target.Target,
    body: Mapping[str, Any],
    *,
    as_json: bool = False,
    transport: Any = "grpc",
    stop: Callable[[str], str] | None = None,
) -> None:
    """Begin a session, and say where it will be written to and how to end it.

    Args:
        chosen: The head.
        body: What the session is.
        as_json: Print the head's answer.
        transport: What to speak.
        stop: The command that ends a session, given its name, if it is another one than our own.
    """
    from gpulse.cluster.protocol.answers import OneSession  # noqa: PLC0415  --help needs none of it

    given = {key: value for key, value in body.items() if value not in (None, [], {})}
    with remote.asking(chosen, transport) as head:
        answer = head.call("start", OneSession, given)
    if as_json:
        remote.print_json(answer)
        return
    name = f.plain(answer.session.name)
    earlier = f", from {f.duration(body['since'])} ago on" if body.get("since") else ""
    ending = stop(name) if stop else f"gpulse session stop {name}{chosen.options()}"
    shell.write(f"{name} is being profiled{earlier}; end it with: {ending}")
    if planned := answer.output_file:
        usual = f"{name}.json"
        why = "" if os.path.basename(str(planned)) == usual else f", since {usual} is taken"
        shell.write(f"its file will be {f.plain(str(planned))}{why}")


@command.command()
@click.argument("name", required=False, shell_complete=_names, callback=remote.not_empty)
@click.option("--all", "everything", is_flag=True, help="All sessions that go on.")
@remote.format_option
@click.option(
    "-o",
    "--output",
    type=_OUTPUT,
    metavar="FILE",
    help="Also bring the file here; a directory takes it under its own name.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@target.options
def stop(
    *,
    name: str | None,
    everything: bool,
    output_format: str | None,
    output: Path | None,
    as_json: bool,
    **given: Any,
) -> int:
    """End the session NAME, and wait until its file is written.

    NAME can be left out when only one goes on.
    """
    if name and everything:
        raise UsageError("NAME means one session, --all means all", hint="leave out one of them")
    from gpulse.cluster.protocol.answers import SeveralSessions  # noqa: PLC0415  --help needs none of it

    kind = remote.chosen_format(output_format, output)
    chosen = target.taken(given)
    with remote.asking(chosen) as head:
        names = [name] if name else active_names(head, all_of_them=everything)
        if len(names) > 1 and output is not None and not output.is_dir():
            raise UsageError("several sessions do not fit into one file", hint="give a directory with -o")
        meant = {} if everything else {"name": names[0]}  # all at once, so that they end at one moment
        stopped = head.call("stop", SeveralSessions, {**meant, "format": kind})
        sessions = remote.written(head, stopped)
        if as_json:
            remote.print_json({"sessions": sessions})
            code = int(any(session.export and session.export.state == "failed" for session in sessions))
        else:
            aside = output is not None and str(output) == remote.STDOUT
            code = remote.tell_written(
                sessions,
                verb="stopped",
                export_with=lambda name: f"gpulse session export {name}{chosen.options()}",
                say=shell.remark if aside else shell.write,
            )
        if output is not None:
            for session in sessions:
                remote.fetch(head, session.session_id, kind, output)
    return code


def active_names(head: remote.Head, *, all_of_them: bool) -> list[str]:
    """The sessions that go on: the only one, or all when all are meant.

    Raises:
        UsageError: There is none, or it is not clear which one is meant.
    """
    from gpulse.cluster.protocol.answers import Sessions  # noqa: PLC0415  --help needs none of it

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
@click.option("--no-color", is_flag=True, help="No colours (as NO_COLOR=1).")
@target.options
def list_sessions(*, as_json: bool, no_color: bool, **given: Any) -> None:
    """List all sessions, the newest last."""
    from gpulse.cluster.protocol.answers import Sessions, Status  # noqa: PLC0415  --help needs none of it

    with remote.asking(target.taken(given)) as head:
        if as_json:
            remote.print_json(head.call("sessions", dict))
            return
        answer = head.call("sessions", Sessions)
        now = head.call("status", Status).time
    if not answer.sessions:
        shell.write("there is no session yet; start one with: gpulse session start NAME")
    else:
        from gpulse.terminal.cluster import seconds_of, session_lines  # noqa: PLC0415

        paint = shell.paint(no_color=no_color)
        lines = session_lines(answer.sessions, now=seconds_of(now), width=shell.width(), paint=paint)
        shell.write("\n".join(lines))


@command.command()
@click.argument("name", shell_complete=_names)
@click.option("--json", "as_json", is_flag=True, help="Print the head's answer as JSON.")
@click.option("--no-color", is_flag=True, help="No colours (as NO_COLOR=1).")
@target.options
def show(*, name: str, as_json: bool, no_color: bool, **given: Any) -> None:
    """Show everything about the session NAME, which can be an id too."""
    from gpulse.cluster.protocol.answers import SessionAnswer, Status  # noqa: PLC0415  --help needs none of it

    with remote.asking(target.taken(given)) as head:
        if as_json:
            remote.print_json(head.call("session", dict, {"name": name}))
            return
        session = head.call("session", SessionAnswer, {"name": name})
        now = head.call("status", Status).time
    from gpulse.terminal.cluster import seconds_of, session_facts  # noqa: PLC0415

    paint = shell.paint(no_color=no_color)
    lines = session_facts(session, now=seconds_of(now), width=shell.width(), paint=paint)
    shell.write("\n".join(lines))


@command.command()
@click.argument("name", shell_complete=_names)
@remote.format_option
@click.option(
    "-o",
    "--output",
    type=_OUTPUT,
    metavar="FILE",
    help="A new file or a directory, - for standard output; NAME.json here when left out.",
)
@target.options
def export(*, name: str, output_format: str | None, output: Path | None, **given: Any) -> None:
    """Bring the file of the session NAME here, also while it goes on.

    Nothing is overwritten: where there is NAME.json already, NAME-2.json is made.
    """
    kind = remote.chosen_format(output_format, output)
    with remote.asking(target.taken(given)) as head:
        remote.fetch(head, name, kind, output)


@command.command("recover")
@click.argument("name", required=False, shell_complete=_names, callback=remote.not_empty)
@recover.options
@click.option(
    "--data-dir",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    metavar="DIR",
    help="Look into the data of a head that does not run.",
)
@target.options
def recover_session(*, data_dir: Path | None, **given: Any) -> None:
    """Go on with a session that was interrupted because its head ended.

    \b
    gpulse session recover --list          which can be recovered
    gpulse session recover NAME            go on; agents send what they sampled meanwhile
    gpulse session recover --export NAME   bring what there is here, and leave it as it is
    """  # noqa: D301  click needs the backspace itself
    chosen = target.taken(given)
    place = f" --data-dir {shlex.quote(str(data_dir))}" if data_dir is not None else ""
    asked = recover.Asked(**given, options=f"{place}{chosen.options()}")
    if data_dir is not None:
        recover.in_directory(asked, data_dir, chosen)
        return
    with remote.asking(chosen) as head:
        recover.at_head(asked, head)
