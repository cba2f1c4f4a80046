"""`gpulse deploy`: puts agents on many nodes over ssh, and takes them away again."""

from __future__ import annotations

import json
import os
import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from gpulse.cli import crew as crews
from gpulse.cli import deployed, service, shell, target
from gpulse.errors import INTERRUPTED, GpulseError, UsageError
from gpulse.terminal import format as f

if TYPE_CHECKING:
    from gpulse.deploy.nodes import NodeSpec
    from gpulse.deploy.order import Order, Outcome

Command = TypeVar("Command", bound=Callable[..., object])

_DIRECTORY = click.Path(path_type=Path, file_okay=False)
_WITH_WHAT = (
    *("agent_options", "push", "wheelhouse", "python", "no_token"),
    *("token_file", "tls", "tls_ca", "tls_cert", "tls_key"),
)
_MOST_PEM = 1 << 20
_PIECES = {"tls_ca": "ca.pem", "tls_cert": "cert.pem", "tls_key": "key.pem"}


@click.group()
def command() -> None:
    """Agents on many nodes over ssh, without root and without internet.

    \b
    gpulse deploy up     --nodes node-list.txt --head gpu-head:8090    start an agent on each
    gpulse deploy up     --nodes node-list.txt --head gpu-head:8090 --push    copy gpulse there first
    gpulse deploy status --nodes node-list.txt     what runs where
    gpulse deploy logs   --nodes node-list.txt     what the agents say
    gpulse deploy down   --nodes node-list.txt     end what `up` started

    The list holds one ssh destination a line (`gpu01`, `ada@gpu02`, `ssh://ada@gpu03:2222`, # comments), or TOML.
    ssh is the system's, with your configuration, keys and jump hosts; it never asks anything. One node that fails
    stops no other. The exit code is 1 when one did.
    """  # noqa: D301  click needs the backspace itself


def up_options(command: Command) -> Command:
    """The options of verbs that start agents."""
    for option in reversed(
        (
            click.option(
                "--push", is_flag=True, help="Copy gpulse to nodes first, into an environment of its own."
            ),
            click.option(
                "--wheelhouse",
                type=_DIRECTORY,
                metavar="DIR",
                help="With --push: wheels that `gpulse deploy wheelhouse` made, where this machine has no internet.",
            ),
            click.option("--python", metavar="PATH", help="The Python of nodes that name none themselves."),
            click.option(
                "--head",
                metavar="HOST[:8090]",
                help="The head, at an address where nodes reach it (GPULSE_HEAD).",
            ),
            target.access_options,
            click.option(
                "--no-token", is_flag=True, help="Send no token, and take away the one that an agent has."
            ),
            click.argument("agent_options", nargs=-1, type=click.UNPROCESSED, metavar="[-- AGENT_OPTIONS]"),
        )
    ):
        command = option(command)
    return command


@command.command()
@crews.node_options
@up_options
def up(**given: Any) -> int:
    """Start an agent on each node; one that runs as it should is left alone.

    \b
    gpulse deploy up --nodes node-list.txt --head gpu-head:8090
    gpulse deploy up --nodes node-list.txt --head gpu-head:8090 --push
    gpulse deploy up --nodes node-list.txt --head gpu-head:8090 -- --no-diagnosis --label rack=a1

    HEAD is the head's address as nodes see it. The token is taken from where commands find it, travels on standard
    input, and is kept on the node where only you can read it. So are the files of --tls-ca, --tls-cert, --tls-key.
    """  # noqa: D301  click needs the backspace itself
    return _start("up", given, keep=False)


@command.command()
@crews.node_options
@up_options
def restart(**given: Any) -> int:
    """End agents and start them again, as they were started.

    They keep their options, token and certificates. With agent options, or any option that says with what agents are
    started, it is an `up` that also replaces agents that run as they should. Nodes that have none get one, with --head.
    """
    keep = not any(given[name] for name in _WITH_WHAT)
    return _start("restart", given, keep=keep)


def meant_option(command: Command) -> Command:
    """The option of verbs that can be for the agents of one head alone."""
    return click.option("--head", metavar="HOST[:8090]", help="Only agents that were started for this head.")(
        command
    )


@command.command()
@crews.node_options
@meant_option
def down(*, head: str | None, **given: Any) -> int:
    """End the agents that `up` started, and no others."""
    from gpulse.deploy.order import Order  # noqa: PLC0415  --help needs none of it

    return crews.carry_out(crews.crew_of(given), Order("down", _meant(head)))


@command.command()
@click.option("--spool", is_flag=True, help="Also frames that no head may have yet.")
@crews.node_options
@meant_option
def purge(*, spool: bool, head: str | None, **given: Any) -> int:
    """End the agents that `up` started, and remove everything that deploy put there.

    That is state, log, token, certificates, and the copy of gpulse once no node of the same home directory uses it.
    Frames of an agent that was not connected to its head are kept, unless --spool is given.
    """
    from gpulse.deploy.order import Order  # noqa: PLC0415  as above

    return crews.carry_out(crews.crew_of(given), Order("purge", _meant(head), spool=spool))


@command.command()
@crews.node_options
@target.options
def status(**given: Any) -> int:
    """Show what runs on each node; with --head also whether the head hears it.

    The exit code is 1 when a node cannot be asked or its agent does not run.
    """
    from gpulse.deploy.order import Order  # noqa: PLC0415  as above

    chosen = target.taken(given)
    return crews.carry_out(crews.crew_of(given), Order("status"), chosen if chosen.head else None)


@command.command()
@click.option(
    "-n", "lines", type=click.IntRange(0, 100_000), default=50, show_default=True, help="How many lines."
)
@click.option("-F", "--follow", is_flag=True, help="Go on with what comes, until Ctrl-C.")
@crews.node_options
@meant_option
def logs(*, lines: int, follow: bool, head: str | None, **given: Any) -> int:
    """Print the last lines of each agent's log, each with its node's name.

    With -F all nodes at once, whatever --parallel says.
    """
    from gpulse.deploy.logs import show_log  # noqa: PLC0415  as above
    from gpulse.deploy.order import slug_of  # noqa: PLC0415  as above

    crew, meant = crews.crew_of(given), _meant(head)
    widest = max(len(f.plain(node.title)) for node in crew.nodes)
    texts: dict[str, deque[str]] = {}

    def told(node: NodeSpec, line: str) -> None:
        text = f"{f.plain(node.title):<{widest}} | {f.plain(line)}"
        if crew.as_json:
            text = json.dumps({"node": node.title, "line": line})
        if follow:
            shell.write(text)
        else:
            texts.setdefault(node.place, deque(maxlen=lines)).append(text)

    async def job(node: NodeSpec) -> Outcome:
        wait = crew.seconds or crews.SECONDS
        slug = slug_of(node.head or meant) if meant else None
        return await show_log(crew.ssh, node, told, lines=lines, follow=follow, seconds=wait, slug=slug)

    parallel = len(crew.nodes) if follow else crew.parallel
    view = deployed.View("reading logs", len(crew.nodes), quiet=follow or not sys.stderr.isatty())
    was_interrupted = crews.run_on(crew._replace(parallel=parallel), job, view, while_read=follow)
    for node in crew.nodes:
        for text in texts.get(node.place, ()):
            shell.write(text)
    code = crews.tell_failures(crews.in_order(crew, view.outcomes))
    return INTERRUPTED if was_interrupted and not follow else code


@command.command()
@click.argument("directory", type=_DIRECTORY, metavar="DIR")
@click.option(
    "--python-version",
    "versions",
    multiple=True,
    metavar="3.X",
    help="For nodes with this Python; can be given again. This machine's when left out.",
)
@click.option(
    "--machine", metavar="NAME", help="For such machines (x86_64, aarch64); like this one when left out."
)
def wheelhouse(*, directory: Path, versions: tuple[str, ...], machine: str | None) -> None:
    """Put everything that --push copies into DIR, for a machine without internet.

    \b
    gpulse deploy wheelhouse wheels --python-version 3.11 --python-version 3.12
    gpulse deploy up --nodes node-list.txt --head gpu-head:8090 --push --wheelhouse wheels
    """  # noqa: D301  click needs the backspace itself
    from gpulse.deploy.helpers import Helpers  # noqa: PLC0415  as above
    from gpulse.deploy.wheelhouse import Kind, make_wheelhouse, own_kind, packed  # noqa: PLC0415

    own = own_kind()
    kinds = [Kind(_minor(text), machine or own.machine, _glibc(own.glibc)) for text in versions]
    if not kinds:
        kinds = [own if machine in (None, own.machine) else own._replace(machine=str(machine))]
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot make {directory}: {error.strerror}", hint="another directory") from error
    for kind in kinds:
        make_wheelhouse(directory, kind, Helpers())
    made = packed(directory)
    shell.write(f"{directory}: {made.wheels} wheels, {f.size(len(made.archive))}")


def _minor(text: str) -> int:
    words = text.split(".")
    if len(words) != 2 or words[0] != "3" or not words[1].isdecimal() or not 11 <= int(words[1]) < 100:
        raise click.BadParameter(f"{text!r} is no version of Python that runs gpulse; write 3.12")
    return int(words[1])


def _glibc(own: int | None) -> int | None:
    """Nodes may be older than this machine."""
    return None if own is None else min(own, 28)


def _meant(head: str | None) -> str | None:
    """The head that was named.

    Raises:
        UsageError: It is no address that an agent can use.
    """
    from gpulse.cluster.client.address import agent_addresses  # noqa: PLC0415  --help needs none of it

    if head is not None:
        agent_addresses(head)
    return head


def _start(verb: Any, given: dict[str, Any], *, keep: bool) -> int:
    from gpulse.deploy.order import Order, head_of  # noqa: PLC0415  --help needs none of it
    from gpulse.deploy.wheelhouse import packed  # noqa: PLC0415
    from gpulse.deploy.work import Shop  # noqa: PLC0415

    chosen, crew = target.taken(given), crews.crew_of(given)
    words = _agent_options(given.pop("agent_options"))
    push, wheels, python = given.pop("push"), given.pop("wheelhouse"), given.pop("python")
    bare = given.pop("no_token")
    if bare and chosen.token_file is not None:
        raise UsageError("--no-token and --token-file exclude each other", hint="leave one of them out")
    if wheels is not None and not push:
        raise UsageError("--wheelhouse goes with --push", hint="add --push")
    if python is not None and (not python.strip() or not python.isprintable() or python.startswith("-")):
        raise UsageError(f"{python[:60]!a} is no Python", hint="--python /opt/python3.12/bin/python3")
    head = chosen.head or (None if keep else os.environ.get("GPULSE_HEAD"))
    if chosen.tls or any((chosen.tls_ca, chosen.tls_cert, chosen.tls_key)):
        words = ("--tls", *words)
    pieces = _pieces(chosen, head, bare=bare)
    order = Order(verb, head, words, pieces, python, push, keep=keep, bare=bare)
    for node in crew.nodes:
        if node.wrong is None and (head or node.head or not keep):
            head_of(node, order)
    _warn_of_loopback(crew, order)
    prepared = None if wheels is None else packed(wheels)
    return crews.carry_out(crew, order, shop=Shop(prepared))


def _agent_options(words: tuple[str, ...]) -> tuple[str, ...]:
    """Options for agents, as the agent itself will read them.

    Raises:
        click.UsageError: An agent does not know them.
        UsageError: They are not for the user to choose here.
    """
    from gpulse.cli import agent  # noqa: PLC0415  --help needs none of it
    from gpulse.deploy.order import OWN_OPTIONS  # noqa: PLC0415

    for word in words:
        option = word.partition("=")[0]
        if option in OWN_OPTIONS:
            raise UsageError(
                f"{option} is chosen by gpulse deploy", hint="leave it out; names of nodes go into the list"
            )
        if not word.isprintable():
            raise UsageError(f"{word[:60]!a} cannot be passed on", hint="leave it out")
    with agent.command.make_context("gpulse agent", ["HEAD", *words]) as read:
        service.labels(read.params["labels"])
    return words


def _pieces(chosen: target.Target, head: str | None, *, bare: bool) -> dict[str, bytes]:
    """What agents show their head.

    Raises:
        UsageError: A file cannot be read, or is not what it should be.
    """
    from gpulse.cluster.client.address import agent_addresses  # noqa: PLC0415  --help needs none of it

    is_local = head is not None and all(address.is_local for address in agent_addresses(head))
    pieces = {}
    try:
        token = None if bare else target.token(chosen.token_file, is_local=is_local)
    except GpulseError as error:
        raise UsageError(error.message, hint=error.hint) from error
    if token:
        pieces["token"] = f"{token}\n".encode()
    for option, name in _PIECES.items():
        path: Path | None = getattr(chosen, option)
        if path is not None:
            pieces[name] = _pem(path, is_key=option == "tls_key")
    if (chosen.tls_cert is None) != (chosen.tls_key is None):
        raise UsageError("--tls-cert and --tls-key go together", hint="give both, or neither")
    return pieces


def _pem(path: Path, *, is_key: bool) -> bytes:
    """A certificate or a key that agents can use.

    Raises:
        UsageError: It is none.
    """
    import ssl  # noqa: PLC0415  most deploys have no certificates

    try:
        with path.open("rb") as file:
            data = file.read(_MOST_PEM + 1)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}", hint="a PEM file") from error
    if len(data) > _MOST_PEM:
        raise UsageError(f"{path} is larger than 1 MiB", hint="is it a PEM file?")
    if is_key:
        if b"PRIVATE KEY-----" not in data or b"ENCRYPTED" in data:
            raise UsageError(f"{path} is no key that can be used", hint="a PEM file without a passphrase")
        return data
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=data.decode("ascii"))
    except (ValueError, ssl.SSLError) as error:
        raise UsageError(f"{path} holds no certificate", hint="a PEM file") from error
    return data


def _warn_of_loopback(crew: crews.Crew, order: Order) -> None:
    """Nodes that are told to find their head at localhost look for it on themselves."""
    from gpulse.cluster.client.address import agent_addresses  # noqa: PLC0415  --help needs none of it

    local = {"localhost", "127.0.0.1", "::1"}
    head = order.head
    if (
        head
        and any(address.is_local for address in agent_addresses(head))
        and any(not node.head and not node.wrong and node.host not in local for node in crew.nodes)
    ):
        shell.remark(f"each node will look for the head on itself, at {head}; is that meant?")
