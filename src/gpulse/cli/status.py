"""`gpulse status`: show a head, its nodes and its active sessions."""

from __future__ import annotations

from typing import Any

import click

from gpulse.cli import common, head_client
from gpulse.cluster import wire
from gpulse.cluster.client.transport import HeadUnreachableError, Transport
from gpulse.cluster.protocol.answers import Status
from gpulse.terminal.cluster_status import SuggestedCommands, status_lines

NOT_RUNNING = 3


@click.command()
@click.option("-a", "--all", "everything", is_flag=True, help="List all nodes, even if there are many.")
@click.option("--json", "as_json", is_flag=True, help="Print the head's answer as JSON.")
@click.option("--no-color", is_flag=True, help="Do not use colors (same as NO_COLOR=1).")
@head_client.options
def command(*, everything: bool, as_json: bool, no_color: bool, **given: Any) -> int:
    """Show a head, its storage, its nodes and its active sessions.

    The exit code is 3 when no head is running at that address.
    """
    return print_status(
        head_client.pop_target(given), as_json=as_json, no_color=no_color, everything=everything
    )


def print_status(
    chosen: head_client.HeadTarget,
    *,
    as_json: bool,
    no_color: bool,
    everything: bool = False,
    transport: Transport = "grpc",
    name: str = "gpulse",
) -> int:
    """Print a head's status; return the exit code.

    Args:
        chosen: The head.
        as_json: Print its answer as JSON.
        no_color: Print without colors.
        everything: List every node.
        transport: The protocol.
        name: The program that was called.
    """
    try:
        with head_client.connect_to_head(chosen, transport) as head:
            if as_json:
                head_client.print_json(head.call("status", dict))
                return 0
            status = head.call("status", Status)
    except HeadUnreachableError as error:
        common.print_error(name, error.message, error.hint)
        return NOT_RUNNING
    lines = status_lines(
        status,
        head.address,
        width=common.terminal_width(),
        paint=common.paint(no_color=no_color),
        every_node=everything,
        commands=_command_hints(chosen, head, transport),
    )
    common.write("\n".join(lines))
    return 0


def _command_hints(
    chosen: head_client.HeadTarget, head: head_client.HeadConnection, transport: Transport
) -> SuggestedCommands:
    """Return the commands that the status suggests, for this head and the program that was called."""
    address, options, reword = head.client.address, chosen.options(transport), common.get_rewording()
    port = address.port if address.transport == "grpc" else wire.DEFAULT_PORT
    return SuggestedCommands(
        start=reword(f"gpulse session start NAME{options}"),
        recover=reword(f"gpulse session recover NAME{options}"),
        agent=reword(f"gpulse agent {'HEAD' if address.is_local else address.host}:{port}"),
    )
