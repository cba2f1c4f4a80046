"""`gpulse deploy`: install and remove agents on many nodes over ssh."""

from __future__ import annotations

import json
import os
import ssl
import sys
from collections import deque
from pathlib import Path
from typing import Any

import click

from gpulse.atomic_files import resolve_output
from gpulse.cli import agent, common, deploy_nodes, head_client, option_types
from gpulse.cli.common import CommandGroup
from gpulse.cli.token import find_token
from gpulse.cluster.client.transport import parse_agent_addresses
from gpulse.deploy.deployment import (
    RESERVED_OPTIONS,
    DeployOrder,
    DeployVerb,
    NodeOutcome,
    WheelhouseCache,
    choose_head,
    head_slug,
    show_log,
)
from gpulse.deploy.node_list import NodeSpec
from gpulse.deploy.wheelhouse import Platform, ProgramRunner, make_wheelhouse, own_platform, pack_wheelhouse
from gpulse.errors import EXIT_INTERRUPTED, GpulseError, UsageError
from gpulse.model.safe_text import quoted
from gpulse.terminal import value_format as f

_DIRECTORY = click.Path(path_type=Path, file_okay=False)
_START_OPTIONS = (
    *("agent_options", "push", "wheelhouse", "python", "no_token"),
    *("token_file", "tls", "tls_ca", "tls_cert", "tls_key"),
)
_MAX_PEM_BYTES = 1 << 20
_CREDENTIAL_FILES = {"tls_ca": "ca.pem", "tls_cert": "cert.pem", "tls_key": "key.pem"}


@click.group(cls=CommandGroup)
def command() -> None:
    """Install and remove agents on many nodes over ssh, without root privileges or internet access.

    \b
    gpulse deploy up     --nodes node-list.txt --head gpu-head:8090           start agents
    gpulse deploy up     --nodes node-list.txt --head gpu-head:8090 --push    copy gpulse first
    gpulse deploy status --nodes node-list.txt     show the agents' state
    gpulse deploy logs   --nodes node-list.txt     print the agents' logs
    gpulse deploy down   --nodes node-list.txt     stop the agents that `up` started

    The list of nodes has one ssh destination per line (`gpu01`, `ada@gpu02`, `ssh://ada@gpu03:2222`, # comments), or is
    a TOML file. Nodes are reached with the system's ssh and your configuration, keys and jump hosts; ssh never prompts. A
    node that fails does not stop the others; the exit code is 1 when one failed.
    """  # noqa: D301  click needs the backspace itself


def up_options(command: common.Command) -> common.Command:
    """Add the options of commands that start agents."""
    for option in reversed(
        (
            click.option(
                "--push",
                is_flag=True,
                help="Copy gpulse to the nodes first, into its own virtual environment.",
            ),
            click.option(
                "--wheelhouse",
                type=_DIRECTORY,
                metavar="DIR",
                help="With --push: take wheels from this directory, written by `gpulse deploy wheelhouse`, instead of downloading them.",
            ),
            click.option(
                "--python",
                metavar="PATH",
                help="Python interpreter on the nodes, unless the list of nodes names one.",
            ),
            click.option(
                "--head",
                metavar="HOST[:8090]",
                help="Address of the head as the nodes see it (GPULSE_HEAD).",
            ),
            head_client.access_options,
            click.option(
                "--no-token",
                is_flag=True,
                help="Send no token, and remove the token that is stored on the nodes.",
            ),
            click.argument("agent_options", nargs=-1, type=click.UNPROCESSED, metavar="[-- AGENT_OPTIONS]"),
        )
    ):
        command = option(command)
    return command


@command.command()
@deploy_nodes.push_node_options
@up_options
def up(**given: Any) -> int:
    """Start agents on the nodes.

    An agent that already runs with the same options is left unchanged.

    \b
    gpulse deploy up --nodes node-list.txt --head gpu-head:8090
    gpulse deploy up --nodes node-list.txt --head gpu-head:8090 --push
    gpulse deploy up --nodes node-list.txt --head gpu-head:8090 -- --no-diagnosis --label rack=a1

    The token is the one that other commands use. The token and the files of --tls-ca, --tls-cert and --tls-key are sent on
    ssh's standard input and stored on the node, readable only by you.
    """  # noqa: D301  click needs the backspace itself
    return _start_agents("up", given, keep=False)


@command.command()
@deploy_nodes.push_node_options
@up_options
def restart(**given: Any) -> int:
    """Restart agents with the options that they were started with.

    Agents keep their options, token and certificates. With AGENT_OPTIONS, or any other option for starting agents,
    this works like `up`, but also replaces agents that already run with these options.
    With --head, nodes without an agent get one.
    """
    keep = not any(given[name] for name in _START_OPTIONS)
    return _start_agents("restart", given, keep=keep)


def head_option(command: common.Command) -> common.Command:
    """Add the option that limits a command to the agents of one head."""
    return click.option(
        "--head", metavar="HOST[:8090]", help="Select only agents that were started for this head."
    )(command)


@command.command()
@deploy_nodes.node_options
@head_option
def down(*, head: str | None, **given: Any) -> int:
    """Stop the agents that `up` started, and no others."""
    return deploy_nodes.execute_order(
        deploy_nodes.select_nodes(given), DeployOrder("down", _check_head(head))
    )


@command.command()
@click.option("--spool", is_flag=True, help="Also delete frames that may not have reached a head.")
@deploy_nodes.node_options
@head_option
def purge(*, spool: bool, head: str | None, **given: Any) -> int:
    """Stop the agents that `up` started and remove their files.

    This removes the agents' state, logs, tokens and certificates, and also the copy of gpulse once no node with the same
    home directory uses it. Frames of an agent that was not connected to its head are kept, unless --spool is given.
    """
    return deploy_nodes.execute_order(
        deploy_nodes.select_nodes(given), DeployOrder("purge", _check_head(head), spool=spool)
    )


@command.command()
@deploy_nodes.node_options
@head_client.options
def status(**given: Any) -> int:
    """Show the state of each node's agent.

    With --head, also show the state of each node according to the head. The exit code is 1 when a node cannot be reached or its agent is not running.
    """
    chosen = head_client.pop_target(given)
    return deploy_nodes.execute_order(
        deploy_nodes.select_nodes(given), DeployOrder("status"), chosen if chosen.head else None
    )


@command.command()
@click.option(
    "-n",
    "lines",
    type=click.IntRange(0, 100_000),
    default=50,
    show_default=True,
    metavar="N",
    help="Number of lines to print per node.",
)
@click.option("-F", "--follow", is_flag=True, help="Keep printing new lines until Ctrl-C.")
@deploy_nodes.node_options
@head_option
def logs(*, lines: int, follow: bool, head: str | None, **given: Any) -> int:
    """Print the end of each agent's log, with node names.

    With -F, the logs of all nodes are read at the same time, regardless of --parallel.
    """
    selection, chosen = deploy_nodes.select_nodes(given), _check_head(head)
    widest = max(len(f.plain(node.title)) for node in selection.nodes)
    texts: dict[str, deque[str]] = {}

    def show(node: NodeSpec, line: str) -> None:
        text = f"{f.plain(node.title):<{widest}} | {f.plain(line)}"
        if selection.as_json:
            text = json.dumps({"node": node.title, "line": line})
        if follow:
            common.write(text)
        else:
            texts.setdefault(node.place, deque(maxlen=lines)).append(text)

    async def job(node: NodeSpec) -> NodeOutcome:
        wait = selection.seconds or deploy_nodes.NODE_TIMEOUT_SECONDS
        slug = head_slug(node.head or chosen) if chosen else None
        return await show_log(selection.ssh, node, show, lines=lines, follow=follow, seconds=wait, slug=slug)

    parallel = len(selection.nodes) if follow else selection.parallel
    view = deploy_nodes.DeployProgress(
        "reading logs", len(selection.nodes), quiet=follow or not sys.stderr.isatty()
    )
    was_interrupted = deploy_nodes.run_on(selection._replace(parallel=parallel), job, view, while_read=follow)
    for node in selection.nodes:
        for text in texts.get(node.place, ()):
            common.write(text)
    code = deploy_nodes.report_failures(deploy_nodes.sort_outcomes(selection, view.outcomes))
    return EXIT_INTERRUPTED if was_interrupted and not follow else code


@command.command()
@click.argument("directory", type=_DIRECTORY, metavar="DIR")
@click.option(
    "--python-version",
    "versions",
    multiple=True,
    metavar="3.X",
    show_default="this machine's version",
    help="Python version of the nodes; repeatable.",
)
@click.option(
    "--machine",
    metavar="NAME",
    show_default="this machine's architecture",
    help="Architecture of the nodes: x86_64 or aarch64.",
)
def wheelhouse(*, directory: Path, versions: tuple[str, ...], machine: str | None) -> None:
    """Download the wheels that --push needs into DIR.

    \b
    gpulse deploy wheelhouse wheels --python-version 3.11 --python-version 3.12
    gpulse deploy up --nodes node-list.txt --head gpu-head:8090 --push --wheelhouse wheels
    """  # noqa: D301  click needs the backspace itself
    own = own_platform()
    platforms = [
        Platform(_minor_version(text), machine or own.machine, _oldest_glibc(own.glibc)) for text in versions
    ]
    if not platforms:
        platforms = [own if machine in (None, own.machine) else own._replace(machine=str(machine))]
    try:
        resolve_output(directory)
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"cannot create {directory}: {error.strerror}", hint="choose another directory"
        ) from error
    for platform in platforms:
        make_wheelhouse(directory, platform, ProgramRunner())
    made = pack_wheelhouse(directory)
    common.write(
        f"{directory}: {made.wheels} {'wheel' if made.wheels == 1 else 'wheels'}, {f.size(len(made.archive))}"
    )


def _minor_version(text: str) -> int:
    words = text.split(".")
    if len(words) != 2 or words[0] != "3" or not words[1].isdecimal() or not 11 <= int(words[1]) < 100:
        raise click.BadParameter(
            f"{text!r} is not a Python version that can run gpulse; give one such as 3.12"
        )
    return int(words[1])


def _oldest_glibc(own: int | None) -> int | None:
    """Return the oldest glibc to support: nodes may be older than this machine."""
    return None if own is None else min(own, 28)


def _check_head(head: str | None) -> str | None:
    """Return the head if its address is valid.

    Raises:
        UsageError: Its address is not one that an agent can use.
    """
    if head is not None:
        parse_agent_addresses(head)
    return head


def _start_agents(verb: DeployVerb, given: dict[str, Any], *, keep: bool) -> int:
    chosen, selection = head_client.pop_target(given), deploy_nodes.select_nodes(given)
    options = _check_agent_options(given.pop("agent_options"))
    push, wheels, python = given.pop("push"), given.pop("wheelhouse"), given.pop("python")
    without_token = given.pop("no_token")
    if without_token and chosen.token_file is not None:
        raise UsageError(
            "--no-token and --token-file cannot be used together", hint="leave out one of these options"
        )
    if wheels is not None and not push:
        raise UsageError("--wheelhouse requires --push", hint="add --push")
    if python is not None and (not python.strip() or not python.isprintable() or python.startswith("-")):
        raise UsageError(
            f"{quoted(python)} is not the path of a Python interpreter",
            hint="--python /opt/python3.12/bin/python3",
        )
    head = chosen.head or (None if keep else os.environ.get("GPULSE_HEAD"))
    if chosen.tls or any((chosen.tls_ca, chosen.tls_cert, chosen.tls_key)):
        options = ("--tls", *options)
    files = _read_credentials(chosen, head, without_token=without_token)
    order = DeployOrder(verb, head, options, files, python, push, keep=keep, without_token=without_token)
    for node in selection.nodes:
        if node.wrong is None and (head or node.head or not keep):
            choose_head(node, order)
    _warn_about_loopback(selection, order)
    prepared = WheelhouseCache(None if wheels is None else pack_wheelhouse(wheels))
    return deploy_nodes.execute_order(selection, order, prepared=prepared)


def _check_agent_options(words: tuple[str, ...]) -> tuple[str, ...]:
    """Check the options for agents as an agent does.

    Raises:
        click.UsageError: An agent has no such option.
        UsageError: `gpulse deploy` sets one of them itself.
    """
    for word in words:
        option = word.partition("=")[0]
        if option in RESERVED_OPTIONS:
            raise UsageError(
                f"gpulse deploy sets {option} itself",
                hint="leave out this option; set node names in the list of nodes",
            )
        if not word.isprintable():
            raise UsageError(f"{quoted(word)} has unprintable characters", hint="remove them")
    with agent.command.make_context("gpulse agent", ["HEAD", *words]) as read:
        option_types.labels(read.params["labels"])
    return words


def _read_credentials(
    chosen: head_client.HeadTarget, head: str | None, *, without_token: bool
) -> dict[str, bytes]:
    """Read the files with which agents authenticate.

    Raises:
        UsageError: A file cannot be read, or has the wrong content.
    """
    is_local = head is not None and all(address.is_local for address in parse_agent_addresses(head))
    files = {}
    try:
        token = None if without_token else find_token(chosen.token_file, is_local=is_local)
    except GpulseError as error:
        raise UsageError(error.message, hint=error.hint) from error
    if token:
        files["token"] = f"{token}\n".encode()
    for option, name in _CREDENTIAL_FILES.items():
        path: Path | None = getattr(chosen, option)
        if path is not None:
            files[name] = _read_pem(path, is_key=option == "tls_key")
    if (chosen.tls_cert is None) != (chosen.tls_key is None):
        raise UsageError(
            "--tls-cert and --tls-key must be used together", hint="give both options, or neither"
        )
    return files


def _read_pem(path: Path, *, is_key: bool) -> bytes:
    """Read a certificate or a key that agents can use.

    Raises:
        UsageError: It is not one.
    """
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_PEM_BYTES + 1)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}", hint="give a PEM file") from error
    if len(data) > _MAX_PEM_BYTES:
        raise UsageError(
            f"{path} is larger than 1 MiB, which is too large for a PEM file", hint="give a PEM file"
        )
    if is_key:
        if b"PRIVATE KEY-----" not in data or b"ENCRYPTED" in data:
            raise UsageError(
                f"{path} is not a usable private key", hint="give a PEM file without a passphrase"
            )
        return data
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=data.decode("ascii"))
    except (ValueError, ssl.SSLError) as error:
        raise UsageError(f"{path} contains no certificate", hint="give a PEM file") from error
    return data


def _warn_about_loopback(selection: deploy_nodes.NodeSelection, order: DeployOrder) -> None:
    """Warn that every node would look for a head at localhost on itself."""
    local = {"localhost", "127.0.0.1", "::1"}
    head = order.head
    if (
        head
        and any(address.is_local for address in parse_agent_addresses(head))
        and any(not node.head and not node.wrong and node.host not in local for node in selection.nodes)
    ):
        common.print_note(
            f"warning: {head} is a local address, so each node would look for the head on its own machine"
        )
