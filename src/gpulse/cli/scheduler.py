"""Which Dask scheduler a command asks: an address, or a file that says it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import click

from gpulse.cli import shell
from gpulse.errors import UsageError

Command = TypeVar("Command", bound=Callable[..., object])

DEFAULT_PORT = 8786
ANSWER_SECONDS = 4.0
_SCHEMES = ("tcp", "tls", "ucx", "ucxx", "ws", "wss")
_ADDRESS = re.compile(
    r"(?:([A-Za-z]+)://)?(\[[0-9A-Fa-f:.]+(?:%[\w.-]+)?\]|[A-Za-z0-9][\w.-]{0,252})(?::(\d{1,5}))?/?",
    re.ASCII,
)
HINT = f"HOST, HOST:{DEFAULT_PORT} or tcp://HOST:{DEFAULT_PORT}, as `dask scheduler` says when it starts"
"""What addresses look like."""


class AddressError(UsageError):
    """What was given is no address of a scheduler."""


class Place(NamedTuple):
    """The scheduler that is meant."""

    address: str
    seconds: float = ANSWER_SECONDS
    """How long it may take to answer."""

    @property
    def host(self) -> str:
        """Without brackets."""
        return self.address.partition("://")[2].rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        """Always there."""
        return int(self.address.rpartition(":")[2])


def options(command: Command) -> Command:
    """The argument and the options that say which scheduler is meant; `taken` makes a Place of them."""
    for option in reversed(
        (
            click.argument("scheduler", metavar="[SCHEDULER]", required=False),
            click.option(
                "--scheduler-file",
                type=click.Path(path_type=Path, dir_okay=False),
                metavar="FILE",
                help="What `dask scheduler --scheduler-file` wrote, instead of SCHEDULER.",
            ),
            click.option(
                "--timeout",
                type=shell.seconds,
                default=ANSWER_SECONDS,
                show_default=True,
                metavar="SECONDS",
                help="How long the scheduler may take to answer at first.",
            ),
        )
    ):
        command = option(command)
    return command


def taken(given: dict[str, Any], last: str | None = None) -> Place:
    """The scheduler that options mean; they are taken out of what was given.

    Args:
        given: What was given.
        last: The argument after SCHEDULER, which stands alone when a file says which scheduler is meant.

    Raises:
        click.UsageError: An argument is missing or too much.
        UsageError: What was given is no address.
    """
    text, file, seconds = (given.pop(name) for name in ("scheduler", "scheduler_file", "timeout"))
    if last is not None and given[last] is None and file is not None:
        text, given[last] = None, text
    if text is None and file is None:
        raise click.UsageError("Missing argument 'SCHEDULER', such as tcp://HOST:8786.")
    if last is not None and given[last] is None:
        raise click.UsageError(f"Missing argument '{last.upper()}'.")
    if text is not None and file is not None:
        raise click.UsageError("SCHEDULER and --scheduler-file exclude each other")
    return Place(parse_address(text) if file is None else read_file(file), seconds)


def parse_address(text: str) -> str:
    """`tcp://host:8786` of what somebody wrote: `host`, `host:port`, or either after `tcp://`, `tls://` and so on.

    Raises:
        AddressError: It is no address of a scheduler.
    """
    match = _ADDRESS.fullmatch(text.strip())
    scheme = (match[1] or "tcp").lower() if match else ""
    port = int(match[3] or DEFAULT_PORT) if match else 0
    if match is None or not 0 < port <= 65535:
        raise AddressError(f"{text[:100]!r} is no address of a Dask scheduler", hint=HINT)
    if scheme in ("http", "https"):
        raise UsageError(
            f"{text[:100]!r} is the address of a dashboard, not of a scheduler",
            hint=f"tcp://{match[2]}:{DEFAULT_PORT}",
        )
    if scheme not in _SCHEMES:
        raise UsageError(
            f"a scheduler cannot be reached by {scheme}:// from here",
            hint=f"one of {', '.join(f'{known}://' for known in _SCHEMES)}",
        )
    return f"{scheme}://{match[2]}:{port}"


def read_file(path: Path) -> str:
    """The address in a file that `dask scheduler --scheduler-file` wrote.

    Raises:
        UsageError: There is none in it.
    """
    hint = "the file that `dask scheduler --scheduler-file FILE` writes once it has started"
    try:
        document = json.loads(path.read_bytes())
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}", hint=hint) from error
    except ValueError as error:
        raise UsageError(f"{path} is no scheduler file: it is not JSON", hint=hint) from error
    address = document.get("address") if isinstance(document, dict) else None
    if not isinstance(address, str):
        raise UsageError(f"{path} is no scheduler file: it has no address", hint=hint)
    return parse_address(address)
