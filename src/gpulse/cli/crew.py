"""The nodes of a deploy: which they are, working on all of them, and showing what came of it."""

from __future__ import annotations

import asyncio
import json
import os
import stat
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import click

from gpulse.cli import deployed, service, shell, target
from gpulse.errors import INTERRUPTED, GpulseError, UsageError
from gpulse.terminal import format as f

if TYPE_CHECKING:
    from gpulse.cluster.protocol.answers import NodeStatus
    from gpulse.deploy.nodes import NodeSpec
    from gpulse.deploy.order import Order, Outcome
    from gpulse.deploy.ssh import Ssh
    from gpulse.deploy.work import Shop

Command = TypeVar("Command", bound=Callable[..., object])

SECONDS = 60.0
"""For one node."""
_PUSH_SECONDS = 600.0
_FILE = click.Path(path_type=Path, dir_okay=False)
_TITLES = {
    "up": "starting agents",
    "restart": "restarting agents",
    "down": "stopping agents",
    "status": "asking nodes",
    "purge": "removing everything",
}


class Crew(NamedTuple):
    """Which nodes, and how they are reached."""

    path: Path
    nodes: list[NodeSpec]
    ssh: Ssh
    parallel: int
    seconds: float | None
    as_json: bool
    no_color: bool


def node_options(command: Command) -> Command:
    """The options that say which nodes, and how they are reached."""
    for option in reversed(
        (
            click.option(
                "--nodes", "path", type=_FILE, required=True, metavar="FILE", help="The list of nodes."
            ),
            click.option(
                "--only", multiple=True, metavar="NODE", help="Only this one of them; can be given again."
            ),
            click.option(
                "--parallel",
                type=click.IntRange(1, 1000),
                default=32,
                show_default=True,
                metavar="N",
                help="How many nodes at a time.",
            ),
            click.option(
                "--timeout",
                "seconds",
                type=shell.seconds,
                metavar="SECONDS",
                help="How long one node may take; 60, or 600 with --push.",
            ),
            click.option(
                "--ssh-config", type=_FILE, metavar="FILE", help="In place of your ssh configuration."
            ),
            click.option(
                "--ssh-option", multiple=True, metavar="KEY=VALUE", help="As ssh -o; can be given again."
            ),
            click.option("--json", "as_json", is_flag=True, help="Print JSON."),
            click.option("--no-color", is_flag=True, help="No colours (as NO_COLOR=1)."),
        )
    ):
        command = option(command)
    return command


def crew_of(given: dict[str, Any]) -> Crew:
    """What those options mean.

    Raises:
        UsageError: The list cannot be used, or a node that is meant is not in it.
    """
    from gpulse.deploy.nodes import read_nodes  # noqa: PLC0415  --help needs none of it
    from gpulse.deploy.ssh import Ssh, is_new_ssh  # noqa: PLC0415

    path, only = given.pop("path"), given.pop("only")
    nodes = read_nodes(path)
    names = [{node.title, node.host, node.destination} for node in nodes]
    for wanted in only:
        if not any(wanted in known for known in names):
            raise UsageError(f"{wanted!a} is not in {path}", hint="write it as the list does")
    chosen = [node for node, known in zip(nodes, names, strict=True) if not only or known & set(only)]
    config: Path | None = given.pop("ssh_config")
    if config is not None and not os.access(config, os.R_OK):
        raise UsageError(f"cannot read {config}", hint="leave --ssh-config out for your own configuration")
    ssh = Ssh(
        None if config is None else str(config.absolute()), given.pop("ssh_option"), is_new=is_new_ssh()
    )
    return Crew(
        path,
        chosen,
        ssh,
        given.pop("parallel"),
        given.pop("seconds"),
        given.pop("as_json"),
        given.pop("no_color"),
    )


def carry_out(
    crew: Crew, order: Order, asked: target.Target | None = None, *, shop: Shop | None = None
) -> int:
    """Carry an order out and show what came of it; the exit code."""
    from gpulse.deploy.work import Foreman, Shop  # noqa: PLC0415  --help needs none of it

    view = deployed.View(_TITLES[order.verb], len(crew.nodes), quiet=crew.as_json or _stays_silent(order))
    seconds = crew.seconds or (_PUSH_SECONDS if order.push else SECONDS)
    store = shop or Shop()
    foreman = Foreman(crew.ssh, order, store, seconds=seconds)
    was_interrupted = run_on(crew, foreman.job, view, store.close)
    outcomes = in_order(crew, view.outcomes)
    if asked is not None:
        outcomes = _heard(outcomes, asked)
    _show(crew, order, outcomes)
    if was_interrupted:
        shell.remark(f"interrupted: {len(outcomes)} of {len(crew.nodes)} nodes were done")
        if view.unfinished:
            shell.remark(f"  may have been done: {', '.join(map(f.plain, view.unfinished))}")
        return INTERRUPTED
    return tell_failures(outcomes, quiet=crew.as_json) or int(_is_amiss(order, outcomes))


def _stays_silent(order: Order) -> bool:
    """A question needs no line a node before its answer."""
    return order.verb == "status" and not sys.stderr.isatty()


def _is_amiss(order: Order, outcomes: list[Outcome]) -> bool:
    return order.verb == "status" and any(outcome.state != "running" for outcome in outcomes)


def run_on(
    crew: Crew,
    job: Callable[[NodeSpec], Awaitable[Outcome]],
    view: deployed.View,
    close: Callable[[], Awaitable[None]] | None = None,
    *,
    while_read: bool = False,
) -> bool:
    """Do something on all nodes; whether Ctrl-C ended it, with which every ssh ends too. A second one ends us at once.

    Args:
        crew: The nodes.
        job: What to do on each.
        view: Shows how far it is.
        close: Called in the end.
        while_read: End it when nobody reads the output any more, as if by Ctrl-C.
    """
    signals = service.EndSignals()
    with view:
        return asyncio.run(_until_stopped(crew, job, view, signals, close, while_read=while_read))


async def _until_stopped(
    crew: Crew,
    job: Callable[[NodeSpec], Awaitable[Outcome]],
    view: deployed.View,
    signals: service.EndSignals,
    close: Callable[[], Awaitable[None]] | None,
    *,
    while_read: bool,
) -> bool:
    from gpulse.deploy.work import everywhere  # noqa: PLC0415  --help needs none of it

    stop = asyncio.Event()
    signals.bind(lambda: _leave(view) if stop.is_set() else stop.set())
    if while_read and stat.S_ISFIFO(os.fstat(1).st_mode):
        asyncio.get_running_loop().add_reader(1, stop.set)  # the only news from the end that is written to
    work = asyncio.ensure_future(
        everywhere(crew.nodes, job, parallel=crew.parallel, begun=view.begun, done=view.done)
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


def _leave(view: deployed.View) -> None:
    """End at once, for somebody who asked twice."""
    view.__exit__()
    os._exit(INTERRUPTED)


def in_order(crew: Crew, outcomes: list[Outcome]) -> list[Outcome]:
    """As the list has them, not as they came."""
    places = {node.place: place for place, node in enumerate(crew.nodes)}
    return sorted(outcomes, key=lambda outcome: places[outcome.node.place])


def _heard(outcomes: list[Outcome], asked: target.Target) -> list[Outcome]:
    """With what a head says about the nodes; without it when it does not answer."""
    from gpulse.cluster.protocol.answers import Status  # noqa: PLC0415  --help needs none of it

    try:
        with asked.connect() as client:
            nodes = client.call("status", Status).nodes
    except GpulseError as error:
        shell.complain("gpulse", f"the head cannot be asked: {error.message}", error.hint)
        return outcomes
    return [outcome._replace(heard=_heard_of(outcome, nodes)) for outcome in outcomes]


def _heard_of(outcome: Outcome, nodes: Sequence[NodeStatus]) -> str | None:
    """The state of a node at its head; None when it is not known what the node is called there."""
    from gpulse.cluster.head.expected import is_known  # noqa: PLC0415  --help needs none of it

    node = outcome.node
    wanted = node.name or outcome.hostname
    found = [known for known in nodes if wanted is not None and known.name == wanted]
    if not found and node.wrong is None:
        listed = node.name or node.reached
        found = [known for known in nodes if is_known(listed, known.name, "", known.labels)]
    if len(found) == 1:
        return found[0].state
    return None if outcome.error is not None else "never reported"


def _show(crew: Crew, order: Order, outcomes: list[Outcome]) -> None:
    if crew.as_json:
        failed = [outcome.node.title for outcome in outcomes if outcome.error is not None]
        document = {
            "verb": order.verb,
            "nodes": [outcome.document() for outcome in outcomes],
            "failed": failed,
        }
        shell.write(json.dumps(document, indent=2))
        return
    paint = shell.paint(no_color=crew.no_color)
    if order.verb == "status":
        lines = deployed.status_table(outcomes, now=time.time(), width=shell.width(), paint=paint)
    else:
        lines = deployed.work_table(outcomes, width=shell.width(), paint=paint)
    shell.write("\n".join(lines))
    for outcome in outcomes:
        for note in outcome.notes:
            shell.write(f"{f.plain(outcome.node.title)}: {f.plain(note)}")
    if order.verb in ("up", "restart") and any(outcome.error is None for outcome in outcomes):
        _tell_next(crew, order, outcomes)


def _tell_next(crew: Crew, order: Order, outcomes: list[Outcome]) -> None:
    """Where the nodes can be seen now."""
    from gpulse.cluster import wire  # noqa: PLC0415  --help needs none of it
    from gpulse.cluster.client.address import agent_addresses  # noqa: PLC0415  --help needs none of it

    head = order.head or next((outcome.head for outcome in outcomes if outcome.head), None)
    if head is None:
        return
    address, *_ = agent_addresses(head)
    page = ""
    if address.port == wire.DEFAULT_PORT:
        scheme = "https" if "--tls" in order.words else "http"
        page = f", or {scheme}://{address._replace(port=wire.DEFAULT_HTTP_PORT).target}/ in a browser"
    shell.write(f"\nsee them: gpulse status --head {address.target}{page}")
    shell.write(f"gpulse head --nodes {crew.path} also shows nodes that have never reported")


def tell_failures(outcomes: list[Outcome], *, quiet: bool = False) -> int:
    """Say who failed and why; the exit code."""
    failed = [outcome for outcome in outcomes if outcome.error is not None]
    if failed and not quiet:
        count = f"{len(failed)} of {len(outcomes)} nodes failed" if len(outcomes) > 1 else "the node failed"
        shell.complain("gpulse", count)
        for names, reason, hint in deployed.failures(failed):
            shell.remark(f"  {', '.join(names)}: {reason}")
            if hint:
                shell.remark(f"    try: {f.plain(hint)}")
    return int(bool(failed))
