"""Which head a command asks, and what it shows it: options, environment, and what a head on this machine left."""

from __future__ import annotations

import os
import shlex
import socket
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import click

from gpulse.cli import service
from gpulse.errors import GpulseError

if TYPE_CHECKING:
    from gpulse.cluster.client.address import Address, Transport
    from gpulse.cluster.client.client import HeadClient
    from gpulse.cluster.client.link import Credentials

Command = TypeVar("Command", bound=Callable[..., object])

_FILE = click.Path(path_type=Path, dir_okay=False)
_LOOK_SECONDS = 1.0
_OPTIONS = ("token_file", "tls", "tls_ca", "tls_cert", "tls_key")


class Target(NamedTuple):
    """What the options say."""

    head: str | None = None
    token_file: Path | None = None
    tls: bool = False
    tls_ca: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None

    def options(self, transport: Transport = "grpc") -> str:
        """Return the options as they were given, each after a space, for a command that is suggested."""
        is_plain = self.head is not None and "://" not in self.head
        given = {
            "--head": f"http://{self.head}" if is_plain and transport == "http" else self.head,
            "--token-file": self.token_file,
            "--tls-ca": self.tls_ca,
            "--tls-cert": self.tls_cert,
            "--tls-key": self.tls_key,
        }
        words = [f" {name} {shlex.quote(str(value))}" for name, value in given.items() if value is not None]
        return "".join([*words, *([" --tls"] if self.tls else [])])

    def connect(self, transport: Transport = "grpc", *, call_seconds: float | None = None) -> HeadClient:
        """A client for the head that is meant.

        Raises:
            UnreachableError: Nothing listens there.
            UsageError: The address, the token or a file for TLS cannot be used.
        """
        from gpulse.cluster.client.client import CALL_SECONDS, connect  # noqa: PLC0415  --help needs none of it

        os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # what went wrong is said by us, once
        address = self.address(transport)
        return connect(
            address,
            self.credentials(is_local=address.is_local),
            call_seconds=call_seconds or CALL_SECONDS,
        )

    def address(self, transport: Transport = "grpc") -> Address:
        """Where the head is; of several the first at which somebody listens.

        Raises:
            UsageError: What was given is no address.
        """
        from gpulse.cluster.client.address import parse_address, parse_addresses  # noqa: PLC0415  as above

        given = self.head or os.environ.get("GPULSE_HEAD")
        if given:
            first, *others = parse_addresses(given, transport)
            if not others:
                return first
            return next((address for address in (first, *others) if _listens(address)), first)
        here = running_at(service.state_dir("head"), transport)
        if here is not None and _listens(here):
            return here
        return parse_address("localhost", transport)

    def credentials(self, *, is_local: bool) -> Credentials:
        """What to show a head; one on this machine needs no token.

        Raises:
            UsageError: The token cannot be used.
        """
        from gpulse.cluster.client.link import Credentials  # noqa: PLC0415  as above

        ca, cert, key = (
            None if path is None else str(path) for path in (self.tls_ca, self.tls_cert, self.tls_key)
        )
        return Credentials(
            token(self.token_file, is_local=is_local), self.tls or any((ca, cert, key)), ca, cert, key
        )


def options(command: Command) -> Command:
    """The options that say which head is meant; `taken` makes a Target of them."""
    head = click.option(
        "--head",
        metavar="HOST[:8090]",
        help="The head to ask, or http://HOST:8091 (GPULSE_HEAD), of several with commas between them the first that "
        "answers; the one of this machine when left out.",
    )
    return head(access_options(command))


def access_options(command: Command) -> Command:
    """The options that say what to show a head."""
    for option in reversed(
        (
            click.option(
                "--token-file",
                type=_FILE,
                metavar="FILE",
                help="The head's token, copied from its machine (GPULSE_TOKEN_FILE, GPULSE_TOKEN).",
            ),
            click.option("--tls", is_flag=True, help="Speak TLS; any --tls-... option means the same."),
            click.option(
                "--tls-ca",
                type=_FILE,
                metavar="PEM",
                help="Who vouches for the head; the system's authorities else.",
            ),
            click.option("--tls-cert", type=_FILE, metavar="PEM", help="A certificate to show the head."),
            click.option("--tls-key", type=_FILE, metavar="PEM", help="Its key."),
        )
    ):
        command = option(command)
    return command


def taken(given: dict[str, Any]) -> Target:
    """The target that options mean; they are taken out of what was given."""
    return Target(given.pop("head", None), **{name: given.pop(name) for name in _OPTIONS})


def running_at(directory: Path, transport: Transport = "grpc") -> Address | None:
    """Where the head listens that works in a data directory on this machine; None when none does."""
    from gpulse.cluster.client.address import parse_address  # noqa: PLC0415  as above
    from gpulse.cluster.head.address_file import read_whereabouts  # noqa: PLC0415

    document = read_whereabouts(str(directory))
    try:
        return parse_address(str(document[transport] or ""), transport).reachable() if document else None
    except (KeyError, GpulseError):
        return None


def _listens(address: Address) -> bool:
    """Whether somebody does: a process may have got the number of a head that was killed."""
    try:
        socket.create_connection((address.host, address.port), _LOOK_SECONDS).close()
    except OSError:
        return False
    return True


def token(path: Path | None, *, is_local: bool) -> str | None:
    """The token to show: of the file that was named, of the environment, or of this user's configuration."""
    from gpulse.cluster.tokens import read_token  # noqa: PLC0415  as above

    chosen = path or os.environ.get("GPULSE_TOKEN_FILE")
    if chosen:
        return read_token(os.fspath(chosen))
    if told := os.environ.get("GPULSE_TOKEN", "").strip():
        return told
    default = service.default_token_file()
    if not os.access(default, os.R_OK):
        return None
    try:
        return read_token(str(default))
    except GpulseError:
        if is_local:  # a head on this machine needs none
            return None
        raise
