"""The nodes of `gpulse deploy`: select them, run an order on all of them, and print the outcomes."""

from __future__ import annotations

import asyncio
import json
import os
import stat
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import click
from rich import progress as rich_progress
from rich.console import Console

from gpulse.cli import common, daemon, head_client
from gpulse.cluster import wire
from gpulse.cluster.client.transport import parse_agent_addresses
from gpulse.cluster.head.expected_nodes import is_node_named
from gpulse.cluster.protocol.answers import NodeStatus, Status
from gpulse.deploy.deployment import (
    Deployment,
    DeployOrder,
    NodeOutcome,
    NodeTask,
    WheelhouseCache,
    run_on_all,
)
from gpulse.deploy.node_list import NodeSpec, read_node_list
from gpulse.deploy.ssh import SshConfig, is_new_ssh
from gpulse.errors import EXIT_INTERRUPTED, GpulseError, UsageError
from gpulse.terminal import value_format as f
from gpulse.terminal.table import Paint, TableCell, TableColumn, render_table

_MAX_NAMED = 3
_STYLES = {"running": "good", "ended": "warn", "failed": "warn", "stopped": "notice", "connected": "good"}
_WORK_COLUMNS = (
    TableColumn("node", right=False),
    TableColumn("state", right=False),
    TableColumn("result", right=False, least=12),
    TableColumn("head", right=False, drop=2, least=9, optional=True),
    TableColumn("seconds", drop=1),
)
_STATUS_COLUMNS = (
    TableColumn("node", right=False),
    TableColumn("state", right=False),
    TableColumn("host name", right=False, drop=5, optional=True),
    TableColumn("since", right=False, drop=2, optional=True),
    TableColumn("pid", drop=4, optional=True),
    TableColumn("version", right=False, drop=3, optional=True),
    TableColumn("head", right=False, drop=6, least=10, optional=True),
    TableColumn("connection", right=False, least=9),
    TableColumn("state at head", right=False, drop=1, optional=True),
)


class DeployProgress:
    """Shows the progress: a bar on a terminal, a line per node elsewhere, nothing when quiet."""

    def __init__(self, title: str, count: int, *, quiet: bool) -> None:
        self.outcomes: list[NodeOutcome] = []
        self._title = title
        self._count = count
        self._quiet = quiet
        self._busy: dict[str, float] = {}
        self._failed = 0
        self._bar: rich_progress.Progress | None = None

    def __enter__(self) -> Self:
        if not self._quiet and sys.stderr.isatty():
            self._bar = _make_bar()
            self._bar.add_task(self._title, total=self._count, busy="")
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    @property
    def unfinished(self) -> list[str]:
        """Nodes on which work has started but not finished."""
        return list(self._busy)

    def begun(self, node: NodeSpec) -> None:
        """Note that work on a node has started."""
        self._busy[node.title] = time.monotonic()
        self._draw()

    def done(self, outcome: NodeOutcome) -> None:
        """Note an outcome."""
        self.outcomes.append(outcome)
        self._busy.pop(outcome.node.title, None)
        self._failed += outcome.error is not None
        if self._bar is not None:
            self._bar.advance(self._bar.task_ids[0])
            self._draw()
        elif not self._quiet:
            common.print_note(
                f"{f.plain(outcome.node.title)}: {summarize_outcome(outcome)} ({outcome.seconds:.1f} s)"
            )

    def _draw(self) -> None:
        if self._bar is None:
            return
        oldest = sorted(self._busy, key=lambda title: self._busy[title])
        busy = ", ".join(map(f.plain, oldest[:_MAX_NAMED]))
        busy += f" and {len(oldest) - _MAX_NAMED} more" if len(oldest) > _MAX_NAMED else ""
        failed = f"  {self._failed} failed" if self._failed else ""
        self._bar.update(self._bar.task_ids[0], busy=f"{busy}{failed}")


def _make_bar() -> rich_progress.Progress:
    return rich_progress.Progress(
        rich_progress.TextColumn("{task.description}", markup=False),
        rich_progress.BarColumn(bar_width=24),
        rich_progress.MofNCompleteColumn(),
        rich_progress.TimeElapsedColumn(),
        rich_progress.TextColumn("{task.fields[busy]}", markup=False),
        console=Console(stderr=True),
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )


def summarize_outcome(outcome: NodeOutcome) -> str:
    """Return one node's outcome in a few words."""
    if outcome.error is not None:
        return f"failed: {f.plain(outcome.error)}"
    words = outcome.did or outcome.state or "done"
    return f"{'gpulse copied, ' if outcome.pushed else ''}{f.plain(words)}"


def work_table(outcomes: Sequence[NodeOutcome], *, width: int, paint: Paint) -> list[str]:
    """Return the table of nodes and what was done there."""
    return render_table(_WORK_COLUMNS, map(_work_row, outcomes), width, paint)


def _work_row(outcome: NodeOutcome) -> list[TableCell | str]:
    state = "failed" if outcome.error is not None else outcome.state or "-"
    return [
        f.plain(outcome.node.title),
        TableCell(f.plain(state), _STYLES.get(state, "")),
        summarize_outcome(outcome).removeprefix("failed: "),
        _link_cell(outcome) if outcome.state == "running" else "-",
        f"{outcome.seconds:.1f}",
    ]


def status_table(outcomes: Sequence[NodeOutcome], *, now: float, width: int, paint: Paint) -> list[str]:
    """Return the table of nodes and their agents."""
    return render_table(_STATUS_COLUMNS, (_status_row(outcome, now) for outcome in outcomes), width, paint)


def _status_row(outcome: NodeOutcome, now: float) -> list[TableCell | str]:
    state = "failed" if outcome.error is not None else outcome.state or "-"
    named = None if outcome.hostname in (outcome.node.host, outcome.node.title) else outcome.hostname
    since = "-" if outcome.since is None else f.since(outcome.since, now).removeprefix("since ")
    return [
        f.plain(outcome.node.title),
        TableCell(f.plain(state), _STYLES.get(state, "")),
        f.plain(named),
        since,
        "-" if outcome.pid is None else str(outcome.pid),
        f.plain(outcome.version),
        f.plain(outcome.head),
        TableCell(f.plain(outcome.error)) if outcome.error is not None else _link_cell(outcome),
        TableCell(f.plain(outcome.heard), "good" if outcome.heard == "healthy" else "notice"),
    ]


def _link_cell(outcome: NodeOutcome) -> TableCell:
    text = f.plain(outcome.link)
    return TableCell(text, _STYLES.get(text, "notice" if outcome.link else ""))


def group_failures(outcomes: Iterable[NodeOutcome]) -> Iterator[tuple[list[str], str, str | None]]:
    """Yield which nodes failed, why, and what to try; nodes with the same reason together."""
    reasons: dict[str, list[NodeOutcome]] = {}
    for outcome in outcomes:
        if outcome.error is not None:
            reasons.setdefault(outcome.error, []).append(outcome)
    for reason, failed in reasons.items():
        hint = failed[0].hint
        if hint and any(outcome.hint != hint for outcome in failed):
            hint = f"{hint} (for {f.plain(failed[0].node.title)})"
        yield [f.plain(outcome.node.title) for outcome in failed], f.plain(reason), hint


NODE_TIMEOUT_SECONDS = 60.0
_PUSH_TIMEOUT_SECONDS = 600.0
_FILE = click.Path(path_type=Path, dir_okay=False)
_TITLES = {
    "up": "starting agents",
    "restart": "restarting agents",
    "down": "stopping agents",
    "status": "querying nodes",
    "purge": "removing agents and their files",
}


class NodeSelection(NamedTuple):
    """The selected nodes, and how to reach them."""

    path: Path
    nodes: list[NodeSpec]
    ssh: SshConfig
    parallel: int
    seconds: float | None
    as_json: bool
    no_color: bool


def node_options(command: common.Command, timeout: str = f"{NODE_TIMEOUT_SECONDS:g}") -> common.Command:
    """Add the options that select nodes and say how to reach them.

    Args:
        command: The command.
        timeout: Default of --timeout, for the help.
    """
    for option in reversed(
        (
            click.option(
                "--nodes",
                "path",
                type=_FILE,
                required=True,
                metavar="FILE",
                help="File with the list of nodes.",
            ),
            click.option(
                "--only", multiple=True, metavar="NODE", help="Use only this node of the list; repeatable."
            ),
            click.option(
                "--parallel",
                type=click.IntRange(1, 1000),
                default=32,
                show_default=True,
                metavar="N",
                help="Work on at most this many nodes at a time.",
            ),
            click.option(
                "--timeout",
                "seconds",
                type=common.parse_seconds,
                metavar="SECONDS",
                show_default=timeout,
                help="Time limit for each node, in seconds.",
            ),
            click.option(
                "--ssh-config",
                type=_FILE,
                metavar="FILE",
                help="Use this file instead of your ssh configuration.",
            ),
            click.option(
                "--ssh-option",
                multiple=True,
                metavar="KEY=VALUE",
                help="Option for ssh, as with ssh -o; repeatable.",
            ),
            click.option("--json", "as_json", is_flag=True, help="Print JSON."),
            click.option("--no-color", is_flag=True, help="Do not use colors (same as NO_COLOR=1)."),
        )
    ):
        command = option(command)
    return command


def push_node_options(command: common.Command) -> common.Command:
    """Add the same options to a command with --push."""
    return node_options(command, f"{NODE_TIMEOUT_SECONDS:g}, or {_PUSH_TIMEOUT_SECONDS:g} with --push")


def select_nodes(given: dict[str, Any]) -> NodeSelection:
    """Remove these options from a command's parameters and return the selected nodes.

    Raises:
        UsageError: The list cannot be used, or a chosen node is not in it.
    """
    path, only = given.pop("path"), given.pop("only")
    nodes = read_node_list(path)
    names = [{node.title, node.host, node.destination} for node in nodes]
    for wanted in only:
        if not any(wanted in known for known in names):
            raise UsageError(
                f"{wanted!a} is not in {path}", hint="use a name or an ssh destination from the list"
            )
    chosen = [node for node, known in zip(nodes, names, strict=True) if not only or known & set(only)]
    config: Path | None = given.pop("ssh_config")
    if config is not None and not os.access(config, os.R_OK):
        raise UsageError(f"cannot read {config}", hint="leave out --ssh-config to use your own configuration")
    ssh = SshConfig(
        None if config is None else str(config.absolute()), given.pop("ssh_option"), is_new=is_new_ssh()
    )
    return NodeSelection(
        path,
        chosen,
        ssh,
        given.pop("parallel"),
        given.pop("seconds"),
        given.pop("as_json"),
        given.pop("no_color"),
    )


def execute_order(
    selection: NodeSelection,
    order: DeployOrder,
    asked: head_client.HeadTarget | None = None,
    *,
    prepared: WheelhouseCache | None = None,
) -> int:
    """Carry out an order on all nodes and print the outcomes; return the exit code.

    Args:
        selection: The nodes.
        order: What to do.
        asked: The head to query for the state of the nodes, if any.
        prepared: Wheels for nodes.
    """
    view = DeployProgress(
        _TITLES[order.verb], len(selection.nodes), quiet=selection.as_json or _stays_silent(order)
    )
    seconds = selection.seconds or (_PUSH_TIMEOUT_SECONDS if order.push else NODE_TIMEOUT_SECONDS)
    wheels = prepared or WheelhouseCache()
    deployment = Deployment(selection.ssh, order, wheels, seconds=seconds)
    was_interrupted = run_on(selection, deployment.run, view, wheels.close)
    outcomes = sort_outcomes(selection, view.outcomes)
    if asked is not None:
        outcomes = _with_head_states(outcomes, asked)
    _print_outcomes(selection, order, outcomes)
    if was_interrupted:
        common.print_note(f"interrupted after {len(outcomes)} of {len(selection.nodes)} nodes")
        if view.unfinished:
            common.print_note(f"  nodes in an unknown state: {', '.join(map(f.plain, view.unfinished))}")
        return EXIT_INTERRUPTED
    return report_failures(outcomes, quiet=selection.as_json) or int(_has_node_down(order, outcomes))


def _stays_silent(order: DeployOrder) -> bool:
    """Return whether to print nothing before the table: a status needs no line per node."""
    return order.verb == "status" and not sys.stderr.isatty()


def _has_node_down(order: DeployOrder, outcomes: list[NodeOutcome]) -> bool:
    return order.verb == "status" and any(outcome.state != "running" for outcome in outcomes)


def run_on(
    selection: NodeSelection,
    job: NodeTask,
    view: DeployProgress,
    close: Callable[[], Awaitable[None]] | None = None,
    *,
    while_read: bool = False,
) -> bool:
    """Run a function on all nodes; return whether Ctrl-C ended it. It stops every ssh too; a second one exits at once.

    Args:
        selection: The nodes.
        job: The function.
        view: Shows the progress.
        close: Called at the end.
        while_read: Stop as by Ctrl-C when nobody reads the output any more.
    """
    signals = daemon.StopSignals()
    with view:
        return asyncio.run(_until_stopped(selection, job, view, signals, close, while_read=while_read))


async def _until_stopped(
    selection: NodeSelection,
    job: NodeTask,
    view: DeployProgress,
    signals: daemon.StopSignals,
    close: Callable[[], Awaitable[None]] | None,
    *,
    while_read: bool,
) -> bool:
    stop = asyncio.Event()
    signals.bind(lambda: _exit_now(view) if stop.is_set() else stop.set())
    if while_read and stat.S_ISFIFO(os.fstat(1).st_mode):
        asyncio.get_running_loop().add_reader(
            1, stop.set
        )  # the writing end becomes readable only when the reader is gone
    work = asyncio.ensure_future(
        run_on_all(selection.nodes, job, parallel=selection.parallel, begun=view.begun, done=view.done)
    )
    stopped = asyncio.ensure_future(stop.wait())
    await asyncio.wait({work, stopped}, return_when=asyncio.FIRST_COMPLETED)
    was_interrupted = not work.done()
    stopped.cancel()
    work.cancel()
    (error,) = await asyncio.gather(work, return_exceptions=True)
    if close is not None:
        await close()
    if isinstance(error, BaseExceptionGroup):
        raise error.exceptions[0]
    return was_interrupted


def _exit_now(view: DeployProgress) -> None:
    """Exit at once, after a second Ctrl-C."""
    view.__exit__()
    os._exit(EXIT_INTERRUPTED)


def sort_outcomes(selection: NodeSelection, outcomes: list[NodeOutcome]) -> list[NodeOutcome]:
    """Return the outcomes in the order of the list."""
    places = {node.place: place for place, node in enumerate(selection.nodes)}
    return sorted(outcomes, key=lambda outcome: places[outcome.node.place])


def _with_head_states(outcomes: list[NodeOutcome], asked: head_client.HeadTarget) -> list[NodeOutcome]:
    """Add the states of the nodes at a head, if it answers."""
    try:
        with asked.connect() as client:
            nodes = client.call("status", Status).nodes
    except GpulseError as error:
        common.print_error("gpulse", f"cannot query the head: {error.message}", error.hint)
        return outcomes
    return [outcome._replace(heard=_head_state(outcome, nodes)) for outcome in outcomes]


def _head_state(outcome: NodeOutcome, nodes: Sequence[NodeStatus]) -> str | None:
    """Return the state of a node at the head, None when its name there is unknown."""
    node = outcome.node
    wanted = node.name or outcome.hostname
    found = [known for known in nodes if wanted is not None and known.name == wanted]
    if not found and node.wrong is None:
        listed = node.name or node.reached
        found = [known for known in nodes if is_node_named(listed, known.name, "", known.labels)]
    if len(found) == 1:
        return found[0].state
    return None if outcome.error is not None else "never reported"


def _print_outcomes(selection: NodeSelection, order: DeployOrder, outcomes: list[NodeOutcome]) -> None:
    if selection.as_json:
        failed = [outcome.node.title for outcome in outcomes if outcome.error is not None]
        document = {
            "verb": order.verb,
            "nodes": [outcome.document() for outcome in outcomes],
            "failed": failed,
        }
        common.write(json.dumps(document, indent=2))
        return
    paint = common.paint(no_color=selection.no_color)
    if order.verb == "status":
        lines = status_table(outcomes, now=time.time(), width=common.terminal_width(), paint=paint)
    else:
        lines = work_table(outcomes, width=common.terminal_width(), paint=paint)
    common.write("\n".join(lines))
    for outcome in outcomes:
        for note in outcome.notes:
            common.write(f"{f.plain(outcome.node.title)}: {f.plain(note)}")
    if order.verb in ("up", "restart") and any(outcome.error is None for outcome in outcomes):
        _print_next_steps(selection, order, outcomes)


def _print_next_steps(selection: NodeSelection, order: DeployOrder, outcomes: list[NodeOutcome]) -> None:
    """Print how to see the nodes now."""
    head = order.head or next((outcome.head for outcome in outcomes if outcome.head), None)
    if head is None:
        return
    address, *_ = parse_agent_addresses(head)
    page = ""
    if address.port == wire.DEFAULT_PORT:
        scheme = "https" if "--tls" in order.options else "http"
        page = f", or open {scheme}://{address._replace(port=wire.DEFAULT_HTTP_PORT).target}/ in a browser"
    common.write(f"\nsee the nodes with: gpulse status --head {address.target}{page}")
    common.write(f"start the head with --nodes {selection.path} to also see nodes that have never reported")


def report_failures(outcomes: list[NodeOutcome], *, quiet: bool = False) -> int:
    """Print which nodes failed and why; return the exit code."""
    failed = [outcome for outcome in outcomes if outcome.error is not None]
    if failed and not quiet:
        count = f"{len(failed)} of {len(outcomes)} nodes failed" if len(outcomes) > 1 else "the node failed"
        common.print_error("gpulse", count)
        for names, reason, hint in group_failures(failed):
            common.print_note(f"  {', '.join(names)}: {reason}")
            if hint:
                common.print_note(f"    try: {f.plain(hint)}")
    return int(bool(failed))
