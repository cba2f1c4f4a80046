"""Brings the frames of a worker's machine to a head: gpulse's own agent, fed by the recorder instead of by hardware."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from gpulse.errors import GpulseError, LogError, UsageError
from gpulse.integrations.dask.relay import Answers, Relay
from gpulse.model.frame import Frame

if TYPE_CHECKING:
    from gpulse.cluster.agent.agent import AgentConfig
    from gpulse.cluster.client.address import Address

_STOP_SECONDS = 3.0
_LEAST_PATIENCE_SECONDS = 5.0
_PATIENCE_INTERVALS = 3
_LARGEST_CA_BYTES = 1_000_000
_MACHINE_FILES = ("/etc/machine-id", "/var/lib/dbus/machine-id")
_BOOT_FILE = "/proc/sys/kernel/random/boot_id"
_WORDS = {
    "stop it, or give this one a --node-name": "that one shows the node there, without the jobs of Dask",
    "--token-file": "head_token_file",
    ", --tls-cert and --tls-key are what it may want of you": "",
    "--tls-ca": "head_ca",
    "--tls": "grpcs:// before the address",
}
"""What an agent's options are called here."""

_log = logging.getLogger(__name__)


class HeadSettings(NamedTuple):
    """Where a head is and what to show it, complete: it travels to machines that have none of the files."""

    address: str
    """`host:port`, with `grpcs://` before it where TLS is spoken."""
    token: str | None = None
    ca: str | None = None
    """PEM certificates of who vouches for the head; the system's authorities when None."""

    def __repr__(self) -> str:
        return f"HeadSettings({self.address!r}, token {'given' if self.token else 'not given'})"


def head_settings(
    head: str, token_file: str | os.PathLike[str] | None = None, ca: str | os.PathLike[str] | None = None
) -> HeadSettings:
    """The settings for what somebody wrote, with what is in the files.

    Args:
        head: `HOST` or `HOST:8090`.
        token_file: Holds the head's token; without it none is shown.
        ca: PEM file of who vouches for the head; naming it means TLS.

    Raises:
        UsageError: It is no address, or a file does not hold what it should.
        GpulseError: The token's file cannot be read.
    """
    from gpulse.cluster.client.address import agent_address  # noqa: PLC0415  hardly anybody streams
    from gpulse.cluster.tokens import read_token  # noqa: PLC0415

    if not isinstance(head, str):
        raise UsageError(f"{head!r} is no address of a head", hint="head='HOST:8090'")
    address = agent_address(head)
    try:
        token = None if token_file is None else read_token(os.fspath(token_file))
    except GpulseError as error:
        raise type(error)(_ours(error.message), hint=error.hint and _ours(error.hint)) from error
    tls = address.tls or ca is not None
    text = None if ca is None else _certificates(ca)
    return HeadSettings(f"{'grpcs://' if tls else ''}{address.target}", token, text)


def _certificates(path: str | os.PathLike[str]) -> str:
    hint = "head_ca names a PEM file, which has lines such as -----BEGIN CERTIFICATE-----"
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            text = file.read(_LARGEST_CA_BYTES + 1)
    except OSError as error:
        raise UsageError(f"{os.fspath(path)} cannot be read: {error.strerror}", hint=hint) from error
    if len(text) > _LARGEST_CA_BYTES or "-----BEGIN " not in text:
        raise UsageError(f"{os.fspath(path)} is not a PEM file", hint=hint)
    return text


class HeadStream:
    """An agent in a thread of this process."""

    def __init__(self, settings: HeadSettings, state: Path, *, interval_seconds: float = 0.2) -> None:
        """Prepare to stream.

        Args:
            settings: Where to.
            state: A directory of its own: what the head does not have yet waits there, also for a later stream.
            interval_seconds: How often a frame is offered.
        """
        self._settings = settings
        self._state = state
        self._target = settings.address.rpartition("://")[2]
        self._answers = Answers(self._target)
        self._relay = Relay(
            max(_LEAST_PATIENCE_SECONDS, _PATIENCE_INTERVALS * interval_seconds),
            given=lambda: self._answers.asked(time.monotonic()),
        )
        self._failure: str | None = None
        """Why it ended."""
        self._missing: str | None = None
        """Set once the head was not there at first, until it is."""
        self._lock = threading.Lock()
        self._is_stopping = False
        self._welcome = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="gpulse-head", daemon=True)

    @property
    def trouble(self) -> str | None:
        """Why the head does not get the frames now, in words; None as long as nothing is known to be wrong."""
        silence = self._answers.trouble(time.monotonic()) if self._welcome else None
        return self._failure or self._missing or silence

    def start(self) -> None:
        """Begin; neither the head nor the disk is waited for."""
        self._thread.start()

    def offer(self, frame: Frame) -> None:
        """Here is a frame; the head gets the newest one whenever it wants one."""
        self._relay.offer(frame)

    def label(self, jobs: Mapping[int, str]) -> None:
        """From now on processes with these pids, and all that descend from them, work for these jobs."""
        self._relay.label(jobs)

    def stop(self) -> None:
        """Send what there is, say goodbye, and end; a second call does nothing."""
        with self._lock:
            self._is_stopping = True
            loop = self._loop
        self._relay.end()
        if loop is not None:
            with suppress(RuntimeError):  # it has ended already
                loop.call_soon_threadsafe(self._stop.set)
        if self._thread.is_alive():
            self._thread.join(_STOP_SECONDS)

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
                with self._lock:
                    self._loop = runner.get_loop()
                    if self._is_stopping:
                        return
                runner.run(self._be_agent())
        except GpulseError as error:
            hint = f" ({error.hint})" if error.hint else ""
            self._failed(_ours(f"{error.message}{hint}"))
        except Exception as error:  # noqa: BLE001  the work of the cluster does not end because a dashboard is dark
            self._failed(f"streaming to the head ended: {error!r}")
        finally:
            self._relay.end()
            self._answers.answered()

    def _failed(self, why: str) -> None:
        self._failure = why
        _log.warning("no frames for the head from now on: %s", why)

    async def _be_agent(self) -> None:
        from gpulse.cluster.agent.agent import run_agent  # noqa: PLC0415  loads gRPC
        from gpulse.cluster.client.address import agent_address  # noqa: PLC0415

        address = agent_address(self._settings.address)
        config = _config(self._settings, address, _own_directory(self._state))
        await run_agent(
            config,
            self._relay,
            stop=self._stop,
            ready=lambda _: self._tried(),
            answered=self._answered,
        )

    def _tried(self) -> None:
        if not self._welcome:
            self._missing = f"not connected to the head at {self._target} yet (the log of the worker says why); frames wait"

    def _answered(self) -> None:
        self._welcome, self._missing = True, None
        self._answers.answered()


def _config(settings: HeadSettings, address: Address, directory: Path) -> AgentConfig:
    from gpulse.cluster.agent.agent import AgentConfig  # noqa: PLC0415  loads gRPC
    from gpulse.cluster.agent.link import LinkConfig, Tls  # noqa: PLC0415

    ca: Path | None = None
    if settings.ca is not None:
        ca = directory / "head-ca.pem"
        ca.write_text(settings.ca, encoding="ascii")
    tls = Tls(None if ca is None else str(ca)) if address.tls else None
    # Without an id of the machine agents make one up and keep it, but nothing that is kept here lasts.
    is_known = any(os.access(path, os.R_OK) for path in _MACHINE_FILES)
    return AgentConfig(
        LinkConfig(address.target, settings.token, tls),
        directory,
        machine_file=None if is_known else Path(_BOOT_FILE),
    )


def _own_directory(state: Path) -> Path:
    """The first directory in it that nobody uses: a forked child of a task keeps the lock of the stream before."""
    from gpulse.store.log.lock import take_lock  # noqa: PLC0415  hardly anybody streams

    for number in count(1):
        directory = state / str(number)
        with suppress(LogError):
            os.close(take_lock(str(directory)))
            return directory
    raise AssertionError


def _ours(text: str) -> str:
    """What an agent or a head says, in the words of whoever called `attach`."""
    for theirs, ours in _WORDS.items():
        text = text.replace(theirs, ours)
    return text
