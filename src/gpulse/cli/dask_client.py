"""Connect a command to a Dask scheduler: address options, the connection, and errors that say why it failed."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import socket
import struct
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from gpulse.background_call import await_background_call
from gpulse.cli import common
from gpulse.cli.progress import WaitNotice
from gpulse.errors import GpulseError, MissingExtraError, UsageError
from gpulse.integrations.dask import Monitor
from gpulse.integrations.dask.monitor import NotAttachedError
from gpulse.terminal import value_format as f

if TYPE_CHECKING:
    from distributed import Client


DEFAULT_PORT = 8786
ANSWER_TIMEOUT_SECONDS = 4.0
_SCHEMES = ("tcp", "tls", "ucx", "ucxx", "ws", "wss")
_ADDRESS = re.compile(
    r"(?:([A-Za-z]+)://)?(\[[0-9A-Fa-f:.]+(?:%[\w.-]+)?\]|[A-Za-z0-9][\w.-]{0,252})(?::(\d{1,5}))?/?",
    re.ASCII,
)
ADDRESS_HINT = (
    f"use HOST, HOST:{DEFAULT_PORT} or tcp://HOST:{DEFAULT_PORT}, as `dask scheduler` prints when it starts"
)

_PROMPT_SECONDS = 0.5
"""Without an answer by then, the port is probed."""
_CLOSE_SECONDS = 2.0
_TLS_HINT = "set DASK_DISTRIBUTED__COMM__TLS__CA_FILE, ..._TLS__CLIENT__CERT and ..._TLS__CLIENT__KEY, as for any Dask client"
_AS_COMMANDS = tuple(
    (re.compile(rf"(?<!\w)(?:monitor\.)?{pattern}"), words)
    for pattern, words in (
        (r"Monitor\.to_csv\(\)", "`gpulse dask csv`"),
        (r"attach\(job_type='manual'\)", "`gpulse dask attach --job-type manual`"),
        (r"new_job\(\)", "`gpulse dask new-job`"),
        (r"(attach|detach|start|stop)\(\)", r"`gpulse dask \1`"),
        (r"save='([^']*)'", r"-o \1"),
        (r"workers=\[0, 1\]", "--workers 0,1"),
        (r"job=1, or job=None", "give --job 1, or leave out --job"),
        ("or None for no limit", "or left out for no limit"),
        ("polling_interval", "--interval"),
        ("job_type", "--job-type"),
        ("mem_limit", "--mem-limit"),
        ("dump_loc", "--dump-loc"),
        ("head_token_file", "--token-file"),
        ("head_ca", "--tls-ca"),
    )
)
"""Patterns that replace names of the Python API in messages with commands and options."""


class AddressError(UsageError):
    """The given text is not the address of a scheduler."""


class SchedulerAddress(NamedTuple):
    """Address of a Dask scheduler, and how long to wait for it."""

    address: str
    seconds: float = ANSWER_TIMEOUT_SECONDS
    """Timeout of its first answer."""

    @property
    def host(self) -> str:
        """The host, without the brackets of IPv6."""
        return self.address.partition("://")[2].rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        """The port."""
        return int(self.address.rpartition(":")[2])


def options(command: common.Command) -> common.Command:
    """Add the argument and the options that name a scheduler; `pop_scheduler` reads them."""
    for option in reversed(
        (
            click.argument("scheduler", metavar="[SCHEDULER]", required=False),
            click.option(
                "--scheduler-file",
                type=click.Path(path_type=Path, dir_okay=False),
                metavar="FILE",
                help="Read the address from this file, which `dask scheduler --scheduler-file` writes.",
            ),
            click.option(
                "--timeout",
                type=common.parse_seconds,
                default=ANSWER_TIMEOUT_SECONDS,
                show_default=True,
                metavar="SECONDS",
                help="Seconds to wait for the scheduler's first answer.",
            ),
        )
    ):
        command = option(command)
    return command


def pop_scheduler(given: dict[str, Any], last: str | None = None) -> SchedulerAddress:
    """Remove the options of a scheduler from a command's parameters and return its address.

    Args:
        given: The parameters.
        last: Name of the argument after SCHEDULER, which is the only one when --scheduler-file is given.

    Raises:
        click.UsageError: An argument is missing or superfluous.
        UsageError: The address is not valid.
    """
    text, file, seconds = (given.pop(name) for name in ("scheduler", "scheduler_file", "timeout"))
    if last is not None and given[last] is None and file is not None:
        text, given[last] = None, text
    if text is None and file is None:
        raise click.UsageError("Missing argument 'SCHEDULER', such as tcp://HOST:8786.")
    if last is not None and given[last] is None:
        raise click.UsageError(f"Missing argument '{last.upper()}'.")
    if text is not None and file is not None:
        raise click.UsageError("SCHEDULER and --scheduler-file cannot be used together")
    return SchedulerAddress(parse_address(text) if file is None else read_scheduler_file(file), seconds)


def parse_address(text: str) -> str:
    """Return the full address, `tcp://host:8786`, of `host`, `host:port`, or either after `tcp://`, `tls://` and so on.

    Raises:
        AddressError: The text is not an address of a scheduler.
    """
    match = _ADDRESS.fullmatch(text.strip())
    scheme = (match[1] or "tcp").lower() if match else ""
    port = int(match[3] or DEFAULT_PORT) if match else 0
    if match is None or not 0 < port <= 65535:
        raise AddressError(f"{text[:100]!r} is not the address of a Dask scheduler", hint=ADDRESS_HINT)
    if scheme in ("http", "https"):
        raise UsageError(
            f"{text[:100]!r} is the address of a dashboard, not of a scheduler",
            hint=f"tcp://{match[2]}:{DEFAULT_PORT}",
        )
    if scheme not in _SCHEMES:
        raise UsageError(
            f"{scheme}:// is not a protocol of Dask schedulers",
            hint=f"use one of {', '.join(f'{known}://' for known in _SCHEMES)}",
        )
    return f"{scheme}://{match[2]}:{port}"


def read_scheduler_file(path: Path) -> str:
    """Return the address from a file that `dask scheduler --scheduler-file` wrote.

    Raises:
        UsageError: It cannot be read, or has none.
    """
    hint = "give the file that `dask scheduler --scheduler-file FILE` writes when it has started"
    try:
        document = json.loads(path.read_bytes())
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}", hint=hint) from error
    except ValueError as error:
        raise UsageError(f"{path} is not a scheduler file: it is not JSON", hint=hint) from error
    address = document.get("address") if isinstance(document, dict) else None
    if not isinstance(address, str):
        raise UsageError(f"{path} is not a scheduler file: it has no address", hint=hint)
    return parse_address(address)


class SchedulerUnreachableError(GpulseError):
    """No scheduler answers at the address."""


@contextmanager
def connect_to_scheduler(
    scheduler: SchedulerAddress, what: str = "waiting for the scheduler"
) -> Iterator[Monitor]:
    """Yield a monitor that is connected to a cluster while the block runs; show what is waited for.

    Args:
        scheduler: The scheduler.
        what: What is being done, in a few words.

    Raises:
        MissingExtraError: Dask is not installed.
        SchedulerUnreachableError: The scheduler does not answer.
    """
    require_dask()
    _silence_dask_logging()
    with (
        WaitNotice(f"{what} at {scheduler.address}"),
        _open_client(scheduler) as client,
        reword_errors(scheduler.address),
    ):
        yield Monitor(client)


@contextmanager
def reword_errors(address: str = "SCHEDULER") -> Iterator[None]:
    """Replace names of the Python API in errors with commands and options.

    Args:
        address: Address of the scheduler, for hints.
    """
    try:
        yield
    except MissingExtraError:
        raise
    except NotAttachedError as error:
        error.message = _as_commands(error.message)
        error.hint = f"gpulse dask attach {address} --start"
        raise
    except GpulseError as error:
        error.message = _as_commands(error.message)
        error.hint = _as_commands(error.hint or f"{click.get_current_context().command_path} --help")
        raise


def _as_commands(text: str) -> str:
    for pattern, words in _AS_COMMANDS:
        text = pattern.sub(words, text)
    return f.plain(text)


def require_dask() -> None:
    """Check that Dask is installed.

    Raises:
        MissingExtraError: It is not installed.
    """
    if find_spec("distributed") is None:
        raise MissingExtraError("`gpulse dask`", "dask")


def _silence_dask_logging() -> None:
    """Turn off the logging of Dask, tornado and asyncio, which would repeat our errors in several lines each."""
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")


@contextmanager
def _open_client(scheduler: SchedulerAddress) -> Iterator[Client]:
    import distributed  # noqa: PLC0415  an extra

    deadline = time.monotonic() + scheduler.seconds
    _check_scheduler(scheduler)
    connect: Any = distributed.Client  # it has no types
    try:
        client = connect(
            scheduler.address,
            timeout=max(1.0, deadline - time.monotonic()),
            set_as_default=False,
            name="gpulse",
        )
    except (OSError, ImportError) as error:
        raise _unreachable_error(scheduler, str(error) or "no answer") from error
    try:
        for topic in ("print", "warn"):
            client.unsubscribe_topic(topic)  # what tasks print is for their own clients
        yield client
    finally:
        client.close(timeout=_CLOSE_SECONDS)


def _check_scheduler(scheduler: SchedulerAddress) -> None:
    """Check that a scheduler answers in time; a Dask client by itself might wait forever.

    Raises:
        SchedulerUnreachableError: None does.
    """
    try:
        identity = asyncio.run(_read_identity(scheduler))
    except TimeoutError as error:
        raise SchedulerUnreachableError(
            f"no Dask scheduler answered at {scheduler.address} within {scheduler.seconds:g} s",
            hint="if the scheduler is busy, try --timeout 30; otherwise check that this is the scheduler's address, not its dashboard's",
        ) from error
    except (MemoryError, OverflowError, struct.error) as error:
        raise _wrong_protocol_error(scheduler) from error
    except (OSError, TypeError, ValueError, ImportError, RuntimeError) as error:
        if isinstance(error, ValueError) and scheduler.address.startswith("tcp://"):
            raise _wrong_protocol_error(scheduler) from error
        if isinstance(error, TypeError) and scheduler.address.startswith(("tls://", "wss://")):
            raise SchedulerUnreachableError(
                f"{scheduler.address} needs TLS certificates, but Dask's configuration has none",
                hint=_TLS_HINT,
            ) from error
        raise _unreachable_error(scheduler, _error_reason(error)) from error
    kind = str(identity.get("type"))
    if "Scheduler" not in kind:
        raise SchedulerUnreachableError(
            f"{scheduler.address} is the address of a Dask {f.plain(kind).lower()}, not of a scheduler",
            hint=ADDRESS_HINT,
        )


async def _read_identity(scheduler: SchedulerAddress) -> dict[str, Any]:
    """Return what the Dask process at an address reports about itself."""
    async with asyncio.timeout(scheduler.seconds):
        asked = asyncio.create_task(_ask_identity(scheduler))
        done, _ = await asyncio.wait({asked}, timeout=_PROMPT_SECONDS)
        if not done:
            await await_background_call(lambda: _check_listening(scheduler), name="gpulse-probe")
        return await asked


async def _ask_identity(scheduler: SchedulerAddress) -> dict[str, Any]:
    from distributed.core import rpc  # noqa: PLC0415  an extra
    from distributed.security import Security  # noqa: PLC0415

    call: Any = rpc  # it has no types
    arguments = Security().get_connection_args("client")  # type: ignore[no-untyped-call]
    async with call(scheduler.address, connection_args=arguments, timeout=scheduler.seconds) as there:
        identity: dict[str, Any] = await there.identity()
        return identity


def _check_listening(scheduler: SchedulerAddress) -> None:
    """Check that the port is open; Dask would retry until its timeout."""
    if not scheduler.address.startswith("ucx"):
        socket.create_connection((scheduler.host, scheduler.port), scheduler.seconds).close()


def _wrong_protocol_error(scheduler: SchedulerAddress) -> SchedulerUnreachableError:
    """Return the error for a server that does not speak Dask's protocol: Dask reads its first bytes as a length."""
    return SchedulerUnreachableError(
        f"the server at {scheduler.address} is not a Dask scheduler: it does not speak Dask's protocol",
        hint=f"{ADDRESS_HINT}; the dashboard uses a different port",
    )


def _error_reason(error: Exception) -> str:
    said = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return (
        "the server at that address closed the connection"
        if "before comm was established" in said
        else str(said)
    )


def _unreachable_error(scheduler: SchedulerAddress, why: str) -> SchedulerUnreachableError:
    return SchedulerUnreachableError(
        f"cannot reach a scheduler at {scheduler.address}: {f.plain(why)}", hint=ADDRESS_HINT
    )
