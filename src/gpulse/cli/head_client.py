"""Connect a command to a head: find its address and token from options, environment and files, then call it."""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import click
import msgspec

from gpulse.cli import common
from gpulse.cli.progress import WaitNotice
from gpulse.cli.token import find_token
from gpulse.cluster.client.head_client import DEFAULT_CALL_SECONDS, HeadClient, connect
from gpulse.cluster.client.transport import (
    HeadAddress,
    HeadCredentials,
    Transport,
    parse_address,
    parse_addresses,
)
from gpulse.cluster.head.address_file import read_address_file
from gpulse.errors import GpulseError

Result = TypeVar("Result")

_FILE = click.Path(path_type=Path, dir_okay=False)
_PROBE_SECONDS = 1.0
_OPTIONS = ("token_file", "tls", "tls_ca", "tls_cert", "tls_key")
_AS_COMMANDS = {
    "/clients": "gpulse status",
    "/profiling/sessions": "gpulse session list",
    "/api/v1/findings/groups": "gpulse findings",
    "/api/v1/findings": "gpulse findings",
    "/api/v1/silences": "gpulse findings silences",
}
"""Commands that replace HTTP paths in a head's hints."""
_PATHS = re.compile(rf"(?:GET )?({'|'.join(_AS_COMMANDS)})\b")
SESSION_NAME_PATTERN = r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9_-])?"
"""A session's name in a sentence, without the sentence's full stop."""
_AT_HEAD = re.compile(
    rf"gpulse (?:status|findings(?: silences)?|session list|session (?:start|stop|show|export|recover) {SESSION_NAME_PATTERN})"
)
"""Commands to which the options of the head are added in hints."""


class HeadTarget(NamedTuple):
    """The head that options name, and the credentials for it."""

    head: str | None = None
    token_file: Path | None = None
    tls: bool = False
    tls_ca: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None

    def options(self, transport: Transport = "grpc") -> str:
        """Return the options as they were given, each after a space, for a suggested command."""
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
        """Return a client that is connected to the head.

        Raises:
            UnreachableError: Nothing listens there.
            UsageError: The address, the token or a file for TLS cannot be used.
        """
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # gRPC would log errors that we report
        address = self.address(transport)
        return connect(
            address,
            self.credentials(is_local=address.is_local),
            call_seconds=call_seconds or DEFAULT_CALL_SECONDS,
        )

    def address(self, transport: Transport = "grpc") -> HeadAddress:
        """Return the address of the head; of several the first one that accepts connections.

        Raises:
            UsageError: An address is not valid.
        """
        given = self.head or os.environ.get("GPULSE_HEAD")
        if given:
            first, *others = parse_addresses(given, transport)
            if not others:
                return first
            return next((address for address in (first, *others) if _is_listening(address)), first)
        local = find_running_head(common.state_dir("head"), transport)
        if local is not None and _is_listening(local):
            return local
        return parse_address("localhost", transport)

    def credentials(self, *, is_local: bool) -> HeadCredentials:
        """Return the credentials for the head; one on this machine needs no token.

        Raises:
            UsageError: The token cannot be used.
        """
        ca, cert, key = (
            None if path is None else str(path) for path in (self.tls_ca, self.tls_cert, self.tls_key)
        )
        return HeadCredentials(
            find_token(self.token_file, is_local=is_local), self.tls or any((ca, cert, key)), ca, cert, key
        )


def options(command: common.Command) -> common.Command:
    """Add the options that name a head; `pop_target` reads them."""
    head = click.option(
        "--head",
        metavar="HOST[:8090]",
        show_default="the head on this machine",
        help="Address of the head, HOST:8090 or http://HOST:8091; if several are given, separated by commas, the first that answers is used "
        "(GPULSE_HEAD).",
    )
    return head(access_options(command))


def access_options(command: common.Command) -> common.Command:
    """Add the options for a head's token and TLS."""
    for option in reversed(
        (
            click.option(
                "--token-file",
                type=_FILE,
                metavar="FILE",
                help="File with the head's token, copied from the head's machine (GPULSE_TOKEN_FILE, GPULSE_TOKEN).",
            ),
            click.option("--tls", is_flag=True, help="Use TLS; implied by any --tls-... option."),
            click.option(
                "--tls-ca",
                type=_FILE,
                metavar="PEM",
                show_default="the system's CA certificates",
                help="CA certificates to verify the head with.",
            ),
            click.option(
                "--tls-cert", type=_FILE, metavar="PEM", help="Client certificate to present to the head."
            ),
            click.option(
                "--tls-key", type=_FILE, metavar="PEM", help="Private key of the client certificate."
            ),
        )
    ):
        command = option(command)
    return command


def pop_target(given: dict[str, Any]) -> HeadTarget:
    """Remove these options from a command's parameters and return the head that they name."""
    return HeadTarget(given.pop("head", None), **{name: given.pop(name) for name in _OPTIONS})


def find_running_head(directory: Path, transport: Transport = "grpc") -> HeadAddress | None:
    """Return the address of the head that uses a data directory on this machine; None when none does."""
    document = read_address_file(str(directory))
    try:
        return parse_address(str(document[transport] or ""), transport).reachable() if document else None
    except (KeyError, GpulseError):
        return None


def _is_listening(address: HeadAddress) -> bool:
    """Return whether an address accepts connections; after a head was killed, another process may have its PID."""
    try:
        socket.create_connection((address.host, address.port), _PROBE_SECONDS).close()
    except OSError:
        return False
    return True


class HeadConnection:
    """Connection to a head that shows a notice while an answer takes long."""

    def __init__(self, client: HeadClient, options: str = "") -> None:
        self.client = client
        self.options = options
        """Options that name the head, for suggested commands."""
        self.address = client.address.target
        """Address of the head."""

    def call(self, operation: str, answer: type[Result], body: Mapping[str, Any] | None = None) -> Result:
        """Carry out one operation of the head and return its answer.

        Args:
            operation: Its name.
            answer: The type of its answer.
            body: The fields of the request.

        Raises:
            GpulseError: The head cannot be reached, or refuses.
        """
        try:
            with WaitNotice(f"waiting for the head at {self.address}"):
                return self.client.call(operation, answer, body)
        except GpulseError as error:
            hint = _PATHS.sub(lambda path: _AS_COMMANDS[path[1]], error.hint or "")
            error.hint = _AT_HEAD.sub(lambda command: f"{command[0]}{self.options}", hint) or None
            raise


@contextmanager
def connect_to_head(chosen: HeadTarget, transport: Transport = "grpc") -> Iterator[HeadConnection]:
    """Yield a connection to a head while the block runs."""
    with WaitNotice("connecting"):
        client = chosen.connect(transport)
    with client:
        yield HeadConnection(client, chosen.options(transport))


def print_json(answer: object) -> None:
    """Print a head's answer as JSON."""
    common.write(json.dumps(msgspec.to_builtins(answer), indent=2))
