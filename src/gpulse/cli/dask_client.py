"""A connection to a Dask cluster for the length of a command, and what is said when there is none."""

from __future__ import annotations

import asyncio
import logging
import re
import socket
import struct
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import click

from gpulse.cli.remote import Waiting
from gpulse.cli.scheduler import HINT, Place
from gpulse.errors import GpulseError, MissingExtraError
from gpulse.terminal import format as f

if TYPE_CHECKING:
    from distributed import Client

    from gpulse.integrations.dask import Monitor

_PROMPT_SECONDS = 0.5
"""Who has not answered by then is looked at more closely."""
_CLOSE_SECONDS = 2.0
_TLS_HINT = "DASK_DISTRIBUTED__COMM__TLS__CA_FILE, ..._TLS__CLIENT__CERT and ..._TLS__CLIENT__KEY, as for any Dask client"
_AS_COMMANDS = tuple(
    (re.compile(rf"(?<!\w)(?:monitor\.)?{pattern}"), words)
    for pattern, words in (
        (r"Monitor\.to_csv\(\)", "`gpulse dask csv`"),
        (r"attach\(job_type='manual'\)", "`gpulse dask attach --job-type manual`"),
        (r"new_job\(\)", "`gpulse dask new-job`"),
        (r"(attach|detach|start|stop)\(\)", r"`gpulse dask \1`"),
        (r"save='([^']*)'", r"-o \1"),
        (r"workers=\[0, 1\]", "--workers 0,1"),
        (r"job=1, or job=None", "--job 1, or no --job"),
        ("or None for no limit", "or left out for no limit"),
        ("polling_interval", "--interval"),
        ("job_type", "--job-type"),
        ("mem_limit", "--mem-limit"),
        ("dump_loc", "--dump-loc"),
        ("head_token_file", "--token-file"),
        ("head_ca", "--tls-ca"),
    )
)
"""What the Python interface suggests to those who write code, as commands and options."""


class UnreachableError(GpulseError):
    """No scheduler answers."""


@contextmanager
def asking(place: Place, what: str = "waiting for the scheduler") -> Iterator[Monitor]:
    """The monitor of a cluster, for as long as the block runs; what takes long is shown.

    Args:
        place: The scheduler.
        what: What is done, in a few words.

    Raises:
        MissingExtraError: Dask is not installed.
        UnreachableError: The scheduler does not answer, or no longer.
    """
    need_dask()
    _be_quiet()
    from gpulse.integrations.dask import Monitor  # noqa: PLC0415  --help needs none of it

    with Waiting(f"{what} at {place.address}"), _connected(place) as client, reworded(place.address):
        yield Monitor(client)


@contextmanager
def reworded(address: str = "SCHEDULER") -> Iterator[None]:
    """Say errors of the Python interface in the words of the command line.

    Args:
        address: Of the scheduler, for what is suggested.
    """
    from gpulse.integrations.dask.monitor import NotAttachedError  # noqa: PLC0415  --help needs none of it

    try:
        yield
    except MissingExtraError:
        raise
    except NotAttachedError as error:
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


def need_dask() -> None:
    """See to it that Dask is there.

    Raises:
        MissingExtraError: It is not installed.
    """
    if find_spec("distributed") is None:
        raise MissingExtraError("`gpulse dask`", "dask")


def _be_quiet() -> None:
    """What goes wrong is said by us, once: Dask, tornado and asyncio would say it too, each in several lines."""
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")


@contextmanager
def _connected(place: Place) -> Iterator[Client]:
    import distributed  # noqa: PLC0415  as above

    deadline = time.monotonic() + place.seconds
    _check_scheduler(place)
    connect: Any = distributed.Client  # it has no types
    try:
        client = connect(
            place.address,
            timeout=max(1.0, deadline - time.monotonic()),
            set_as_default=False,
            name="gpulse",
        )
    except (OSError, ImportError) as error:
        raise _unreachable(place, str(error) or "it does not answer") from error
    try:
        for topic in ("print", "warn"):
            client.unsubscribe_topic(topic)  # what tasks print is for those who wait for them
        yield client
    finally:
        client.close(timeout=_CLOSE_SECONDS)


def _check_scheduler(place: Place) -> None:
    """See to it that a scheduler answers there, and soon: a client alone could wait for good.

    Raises:
        UnreachableError: None does, and why.
    """
    try:
        identity = asyncio.run(_identity(place))
    except TimeoutError as error:
        raise UnreachableError(
            f"no Dask scheduler answers at {place.address} within {place.seconds:g} s",
            hint="--timeout 30 if it is busy; else see whether the address is the scheduler's own, not its dashboard's",
        ) from error
    except (MemoryError, OverflowError, struct.error) as error:
        raise _foreign(place) from error
    except (OSError, TypeError, ValueError, ImportError, RuntimeError) as error:
        if isinstance(error, ValueError) and place.address.startswith("tcp://"):
            raise _foreign(place) from error
        if isinstance(error, TypeError) and place.address.startswith(("tls://", "wss://")):
            raise UnreachableError(
                f"{place.address} needs certificates, and Dask's configuration names none", hint=_TLS_HINT
            ) from error
        raise _unreachable(place, _reason(error)) from error
    kind = str(identity.get("type"))
    if "Scheduler" not in kind:
        raise UnreachableError(
            f"{place.address} is the address of a Dask {f.plain(kind).lower()}, not of its scheduler",
            hint=HINT,
        )


async def _identity(place: Place) -> dict[str, Any]:
    """What Dask says about itself there."""
    async with asyncio.timeout(place.seconds):
        asked = asyncio.create_task(_asked_who(place))
        done, _ = await asyncio.wait({asked}, timeout=_PROMPT_SECONDS)
        if not done:
            await asyncio.to_thread(_check_listening, place)
        return await asked


async def _asked_who(place: Place) -> dict[str, Any]:
    from distributed.core import rpc  # noqa: PLC0415  as above
    from distributed.security import Security  # noqa: PLC0415

    call: Any = rpc  # it has no types
    arguments = Security().get_connection_args("client")  # type: ignore[no-untyped-call]
    async with call(place.address, connection_args=arguments, timeout=place.seconds) as there:
        identity: dict[str, Any] = await there.identity()
        return identity


def _check_listening(place: Place) -> None:
    """See to it that somebody listens there: Dask would try again and again until its time is up."""
    if not place.address.startswith("ucx"):
        socket.create_connection((place.host, place.port), place.seconds).close()


def _foreign(place: Place) -> UnreachableError:
    """For what answers in another language: Dask takes the first bytes, whatever they are, for a length."""
    return UnreachableError(
        f"what listens at {place.address} is no Dask scheduler: it answers with something else than Dask's messages",
        hint=f"{HINT}; the dashboard and what serves web pages have other ports",
    )


def _reason(error: Exception) -> str:
    said = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return "what listens there ends the connection" if "before comm was established" in said else str(said)


def _unreachable(place: Place, why: str) -> UnreachableError:
    return UnreachableError(f"no scheduler can be reached at {place.address}: {f.plain(why)}", hint=HINT)
