"""`gpulse status`: how a head is, who is connected, which sessions go on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from gpulse.cli import remote, shell, target

if TYPE_CHECKING:
    from gpulse.cluster.client.address import Transport
    from gpulse.terminal.cluster import Commands

NOT_RUNNING = 3


@click.command()
@click.option("-a", "--all", "everything", is_flag=True, help="Every node, however many there are.")
@click.option("--json", "as_json", is_flag=True, help="Print the head's answer as JSON.")
@click.option("--no-color", is_flag=True, help="No colours (as NO_COLOR=1).")
@target.options
def command(*, everything: bool, as_json: bool, no_color: bool, **given: Any) -> int:
    """Show the head, its storage, its nodes and the sessions that go on.

    The exit code is 3 when no head runs there.
    """
    return show(target.taken(given), as_json=as_json, no_color=no_color, everything=everything)


def show(
    chosen: target.Target,
    *,
    as_json: bool,
    no_color: bool,
    everything: bool = False,
    transport: Transport = "grpc",
    name: str = "gpulse",
) -> int:
    """Print a head's status; the exit code.

    Args:
        chosen: The head.
        as_json: Print its own answer.
        no_color: No colours.
        everything: List every node.
        transport: What to speak.
        name: The program that was called.
    """
    from gpulse.cluster.client.link import UnreachableError  # noqa: PLC0415  --help needs none of it
    from gpulse.cluster.protocol.answers import Status  # noqa: PLC0415

    try:
        with remote.asking(chosen, transport) as head:
            if as_json:
                remote.print_json(head.call("status", dict))
                return 0
            status = head.call("status", Status)
    except UnreachableError as error:
        shell.complain(name, error.message, error.hint)
        return NOT_RUNNING
    from gpulse.terminal.cluster import status_lines  # noqa: PLC0415

    lines = status_lines(
        status,
        head.place,
        width=shell.width(),
        paint=shell.paint(no_color=no_color),
        every_node=everything,
        commands=_commands(chosen, head, transport),
    )
    shell.write("\n".join(lines))
    return 0


def _commands(chosen: target.Target, head: remote.Head, transport: Transport) -> Commands:
    """Say how to do what the status suggests, at this head and with the program that was called."""
    from gpulse.cluster import wire  # noqa: PLC0415  --help needs none of it
    from gpulse.terminal.cluster import Commands  # noqa: PLC0415

    address, options, reword = head.client.address, chosen.options(transport), shell.words()
    port = address.port if address.transport == "grpc" else wire.DEFAULT_PORT
    return Commands(
        start=reword(f"gpulse session start NAME{options}"),
        recover=reword(f"gpulse session recover NAME{options}"),
        agent=reword(f"gpulse agent {'HEAD' if address.is_local else address.host}:{port}"),
    )
