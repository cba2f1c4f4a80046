"""The options of `gpulse agent` about being scraped by Prometheus, and the server that they ask for."""

from __future__ import annotations

import logging
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import click

from gpulse.cli import service
from gpulse.errors import UsageError

if TYPE_CHECKING:
    from gpulse.cluster.agent.identity import Identity
    from gpulse.cluster.agent.taker import Seen
    from gpulse.cluster.security import Access

Command = TypeVar("Command", bound=Callable[..., object])

log = logging.getLogger(__name__)


class MetricsOptions(NamedTuple):
    """What was given."""

    port: int | None = None
    host: str = "127.0.0.1"
    insecure: bool = False
    dcgm_names: bool = False

    def checked(self) -> MetricsOptions:
        """Itself, if it makes sense.

        Raises:
            UsageError: It speaks of a server that is not to be.
        """
        if self.port is None and self != MetricsOptions():
            raise UsageError(
                "--metrics-host, --insecure and --dcgm-names are about a port that is not served",
                hint="--metrics-port 9400",
            )
        return self


class Serving(NamedTuple):
    """A server while it is open, or none."""

    seen: Seen
    """Takes each frame."""
    told: str = ""
    """Where it is, to be said with the rest."""


def options(command: Command) -> Command:
    """The options; `taken` makes MetricsOptions of them."""
    for option in reversed(
        (
            click.option(
                "--metrics-port",
                type=click.IntRange(0, 65535),
                metavar="PORT",
                help="Serve /metrics for Prometheus here; no HEAD is needed then.",
            ),
            click.option(
                "--metrics-host",
                default=MetricsOptions().host,
                show_default=True,
                help="Address for it; from other machines the head's token is needed.",
            ),
            click.option("--insecure", is_flag=True, help="Serve /metrics to everybody, without a token."),
            click.option(
                "--dcgm-names",
                is_flag=True,
                help="Serve /metrics under the names and labels of NVIDIA's DCGM exporter.",
            ),
        )
    ):
        command = option(command)
    return command


def taken(given: dict[str, Any]) -> MetricsOptions:
    """What the options say; they are taken out of what was given."""
    return MetricsOptions(
        given.pop("metrics_port"),
        given.pop("metrics_host"),
        given.pop("insecure"),
        given.pop("dcgm_names"),
    )


@asynccontextmanager
async def serving(
    wanted: MetricsOptions, me: Callable[[], Identity], *, token: str | None, token_file: Path | None
) -> AsyncIterator[Serving]:
    """Serve what is seen, if a port for it was given.

    Args:
        wanted: What was given.
        me: Whose frames they are.
        token: What the agent shows its head, which is what others show it.
        token_file: Where that was to be found.

    Raises:
        GpulseError: The port cannot be listened on.
    """
    if wanted.port is None:
        yield Serving(lambda _frame, _findings, _interval: None)
        return
    from gpulse.cluster.agent.board import Board  # noqa: PLC0415  only for who serves
    from gpulse.cluster.agent.exporter import Exporter  # noqa: PLC0415

    board = Board(me(), dcgm_names=wanted.dcgm_names)
    exporter = Exporter(board, _access(wanted, token, token_file))
    await exporter.start(wanted.host, wanted.port)
    told = f"metrics on http://{exporter.address}/metrics"
    log.info("%s", told)
    try:
        yield Serving(board.show, told)
    finally:
        await exporter.close()


def _access(wanted: MetricsOptions, token: str | None, token_file: Path | None) -> Access:
    from gpulse.cluster.security import Access, is_loopback, load_or_make_token  # noqa: PLC0415

    is_here = wanted.host == "localhost" or is_loopback(wanted.host)
    names = {wanted.host} if is_here else {socket.gethostname(), socket.getfqdn(), wanted.host}
    if wanted.insecure:
        log.warning("--insecure: whoever reaches the metrics port can read it")
        token = None
    elif token is None and not is_here:
        chosen = token_file or service.default_token_file()
        token = load_or_make_token(str(chosen))
        log.info("other machines need the token in %s for /metrics", chosen)
    return Access(token, names={name for name in names if name}, insecure=wanted.insecure, who="agent")
