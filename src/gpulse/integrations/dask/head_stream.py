"""Stream the frames of a worker's machine to a head: gpulse's own agent, fed by the sampling thread."""

from __future__ import annotations

import asyncio
import logging
import os
import platform
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from gpulse.cluster.client.transport import HeadAddress, parse_agent_address
from gpulse.cluster.credentials import read_token
from gpulse.errors import ClosedError, GpulseError, LogError, UsageError
from gpulse.model.device import Node
from gpulse.model.frame import Frame
from gpulse.model.process import ProcessReading
from gpulse.model.source_health import Health
from gpulse.sources.procfs import ProcessDescendants, Roots
from gpulse.store.log.lock import acquire_lock

if TYPE_CHECKING:
    from gpulse.cluster.agent.agent import AgentConfig

_MAX_JOB_STARTS = 4096
_SILENCE_SECONDS = 5.0
"""A working head acknowledges frames about every second."""

_STOP_SECONDS = 3.0
_MIN_PATIENCE_SECONDS = 5.0
_PATIENCE_INTERVALS = 3
_MAX_CA_BYTES = 1_000_000
_MACHINE_FILES = ("/etc/machine-id", "/var/lib/dbus/machine-id")
_BOOT_FILE = "/proc/sys/kernel/random/boot_id"
_OPTION_NAMES = {
    "stop that agent, or start this one with another --node-name": "the running agent already reports this node, but without Dask's jobs",
    "--token-file": "head_token_file",
    "; if the head requires a client certificate, also give --tls-cert and --tls-key": "",
    "--tls-ca": "head_ca",
    "--tls": "an address that starts with grpcs://",
}
"""Python arguments by the agent's options and phrases."""
_log = logging.getLogger(__name__)


class _OfferedFrame(NamedTuple):
    frame: Frame
    jobs: Mapping[int, str]
    """As they were when it was offered."""


class FrameRelay:
    """Source for an agent whose frames come from the sampling thread: returns the newest frame, each once."""

    def __init__(
        self,
        timeout_seconds: float,
        roots: Roots = Roots(),  # noqa: B008  frozen
        *,
        given: Callable[[], None] = lambda: None,
    ) -> None:
        """Start empty.

        Args:
            timeout_seconds: How long to wait for the next frame.
            roots: Where /proc is.
            given: Called for each frame that goes to the agent.
        """
        self._patience = timeout_seconds
        self._given = given
        self._changed = threading.Condition()
        self._newest: _OfferedFrame | None = None
        self._jobs: Mapping[int, str] = {}
        self._is_ending = False
        self._last: Frame | None = None
        self._silent_since: float | None = None
        self._labels = ProcessJobLabels(roots)

    def offer(self, frame: Frame) -> None:
        """Offer a frame; it replaces one that was not sampled."""
        with self._changed:
            if not self._is_ending:
                self._newest = _OfferedFrame(frame, self._jobs)
                self._changed.notify()

    def label(self, jobs: Mapping[int, str]) -> None:
        """Set the jobs of frames that are offered from now on."""
        with self._changed:
            self._jobs = dict(jobs)

    def end(self) -> None:
        """Note that no more frames will be offered, and wake up a waiting `sample`."""
        with self._changed:
            self._is_ending = True
            self._changed.notify()

    def sample(self, now: float) -> Frame:
        """Return the newest frame that was not given yet, or an empty one when none comes.

        After the end it returns the last frame again, with which an agent reports that it stops.

        Raises:
            ClosedError: There was no frame until the end.
        """
        frame = self._next(now)
        self._given()
        return frame

    def _next(self, now: float) -> Frame:
        with self._changed:
            self._changed.wait_for(lambda: self._newest is not None or self._is_ending, self._patience)
            offered, self._newest = self._newest, None
            is_ending = self._is_ending
        if offered is not None:
            self._silent_since = None
            self._last = self._labels.on(offered.frame, offered.jobs)
        elif not is_ending:
            return self._silence(now)
        if self._last is None:
            raise ClosedError("the worker has not measured anything")
        return self._last

    def close(self) -> None:
        """Drop the newest frame."""
        self.end()
        with self._changed:
            self._newest = None

    def _silence(self, now: float) -> Frame:
        since = self._silent_since = self._silent_since or now
        node = Node(platform.node()) if self._last is None else self._last.node
        detail = f"the Dask worker has taken no measurement for {self._patience:g} s or longer"
        health = Health(
            "sampler",
            "not_answering",
            detail,
            since,
            hint="check whether the worker is overloaded or suspended",
        )
        return Frame(now, time.monotonic(), node, health=(health,))


class AckTimer:
    """Measures for how long a head has not acknowledged frames."""

    def __init__(self, target: str) -> None:
        """Start with nothing sent.

        Args:
            target: Address of the head.
        """
        self._target = target
        self._lock = threading.Lock()
        self._waiting_since: float | None = None

    def asked(self, now: float) -> None:
        """Note that a frame was sent."""
        with self._lock:
            if self._waiting_since is None:
                self._waiting_since = now

    def answered(self) -> None:
        """Note that the head answered, or that no answer is expected any more."""
        with self._lock:
            self._waiting_since = None

    def trouble(self, now: float) -> str | None:
        """Return an error while the head has been silent for long; its text does not change over time."""
        with self._lock:
            since = self._waiting_since
        if since is None or now - since < _SILENCE_SECONDS:
            return None
        return f"the head at {self._target} has not answered for {_SILENCE_SECONDS:g} s or longer; frames are kept on this machine"


class ProcessJobLabels:
    """Labels processes in frames with their Dask job.

    For a head a process has one job for its whole life, but a worker outlives its jobs. So each job of a process
    is reported as a process of its own, which started when the job did.
    """

    def __init__(self, roots: Roots) -> None:
        self._family = ProcessDescendants(roots)
        self._stints: dict[tuple[int, float | None, str], float] = {}
        """When a process began to work for a job, by PID, start time and job."""

    def on(self, frame: Frame, jobs: Mapping[int, str]) -> Frame:
        """Return the frame with jobs added to processes that have none."""
        if not jobs or not frame.processes:
            return frame
        working: dict[int, str] = {}
        for pid, job in jobs.items():
            working.update(dict.fromkeys(self._family.descendants(frame.time, (pid,)), job))
        working.update(jobs)
        self._forget(frame)
        return frame._replace(
            processes=tuple(
                self._label_process(process, working.get(process.pid), frame.time)
                for process in frame.processes
            )
        )

    def _label_process(self, process: ProcessReading, job: str | None, now: float) -> ProcessReading:
        identity = process.identity
        if job is None or identity.owner.job is not None:
            return process
        began = self._stints.setdefault((identity.pid, identity.start_time, job), round(now, 2))
        owner = identity.owner._replace(job=job)
        return process._replace(identity=identity._replace(owner=owner, start_time=began))

    def _forget(self, frame: Frame) -> None:
        if len(self._stints) > _MAX_JOB_STARTS:
            alive = {(process.pid, process.identity.start_time) for process in frame.processes}
            self._stints = {key: began for key, began in self._stints.items() if key[:2] in alive}


class HeadSettings(NamedTuple):
    """Address and credentials of a head, with the contents of files, because workers do not have the files."""

    address: str
    """`host:port`, with `grpcs://` before it where TLS is spoken."""
    token: str | None = None
    ca: str | None = None
    """PEM certificates of the head's CA; None for the system's authorities."""

    def __repr__(self) -> str:
        return f"HeadSettings({self.address!r}, token {'given' if self.token else 'not given'})"


def head_settings(
    head: str, token_file: str | os.PathLike[str] | None = None, ca: str | os.PathLike[str] | None = None
) -> HeadSettings:
    """Return the settings for an address, with the contents of the files.

    Args:
        head: `HOST` or `HOST:8090`.
        token_file: File with the head's token; without it no token is sent.
        ca: PEM file with the CA certificate of the head; implies TLS.

    Raises:
        UsageError: The address is wrong, or a file has the wrong content.
        GpulseError: The token's file cannot be read.
    """
    if not isinstance(head, str):
        raise UsageError(f"{head!r} is not the address of a head", hint="head='HOST:8090'")
    address = parse_agent_address(head)
    try:
        token = None if token_file is None else read_token(os.fspath(token_file))
    except GpulseError as error:
        raise type(error)(
            _translate_options(error.message), hint=error.hint and _translate_options(error.hint)
        ) from error
    tls = address.tls or ca is not None
    text = None if ca is None else _read_certificates(ca)
    return HeadSettings(f"{'grpcs://' if tls else ''}{address.target}", token, text)


def _read_certificates(path: str | os.PathLike[str]) -> str:
    hint = "set head_ca to a PEM file, which contains a line such as -----BEGIN CERTIFICATE-----"
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            text = file.read(_MAX_CA_BYTES + 1)
    except OSError as error:
        raise UsageError(f"cannot read {os.fspath(path)}: {error.strerror}", hint=hint) from error
    if len(text) > _MAX_CA_BYTES or "-----BEGIN " not in text:
        raise UsageError(f"{os.fspath(path)} is not a PEM file", hint=hint)
    return text


class HeadStream:
    """An agent in a thread of this process."""

    def __init__(self, settings: HeadSettings, state: Path, *, interval_seconds: float = 0.2) -> None:
        """Prepare to stream.

        Args:
            settings: Address and credentials of the head.
            state: A directory for frames that the head does not have yet, also for a later stream.
            interval_seconds: How often a frame is offered.
        """
        self._settings = settings
        self._state = state
        self._target = settings.address.rpartition("://")[2]
        self._answers = AckTimer(self._target)
        self._relay = FrameRelay(
            max(_MIN_PATIENCE_SECONDS, _PATIENCE_INTERVALS * interval_seconds),
            given=lambda: self._answers.asked(time.monotonic()),
        )
        self._failure: str | None = None
        """Why it ended."""
        self._missing: str | None = None
        """Set when the head was not reachable at first, until it is."""
        self._lock = threading.Lock()
        self._is_stopping = False
        self._welcome = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="gpulse-head", daemon=True)

    @property
    def trouble(self) -> str | None:
        """Why the head does not receive frames; None when it does."""
        silence = self._answers.trouble(time.monotonic()) if self._welcome else None
        return self._failure or self._missing or silence

    def start(self) -> None:
        """Start, without waiting for the head or the disk."""
        self._thread.start()

    def offer(self, frame: Frame) -> None:
        """Offer a frame; the head gets the newest one."""
        self._relay.offer(frame)

    def label(self, jobs: Mapping[int, str]) -> None:
        """Set the jobs of processes by pid, which also hold for their descendants."""
        self._relay.label(jobs)

    def stop(self) -> None:
        """Send the last frame and end; a second call does nothing."""
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
                runner.run(self._run_agent())
        except GpulseError as error:
            hint = f" ({error.hint})" if error.hint else ""
            self._record_failure(_translate_options(f"{error.message}{hint}"))
        except Exception as error:  # noqa: BLE001  the cluster's work must not fail because a dashboard gets no data
            self._record_failure(f"streaming to the head ended: {error!r}")
        finally:
            self._relay.end()
            self._answers.answered()

    def _record_failure(self, why: str) -> None:
        self._failure = why
        _log.warning("stopped sending frames to the head: %s", why)

    async def _run_agent(self) -> None:
        from gpulse.cluster.agent.agent import run_agent  # noqa: PLC0415  loads gRPC

        address = parse_agent_address(self._settings.address)
        config = _build_agent_config(self._settings, address, _own_directory(self._state))
        await run_agent(
            config,
            self._relay,
            stop=self._stop,
            ready=lambda _: self._note_first_attempt(),
            answered=self._note_answer,
        )

    def _note_first_attempt(self) -> None:
        if not self._welcome:
            self._missing = f"not yet connected to the head at {self._target} (see the worker's log); frames are kept on this machine"

    def _note_answer(self) -> None:
        self._welcome, self._missing = True, None
        self._answers.answered()


def _build_agent_config(settings: HeadSettings, address: HeadAddress, directory: Path) -> AgentConfig:
    from gpulse.cluster.agent.agent import AgentConfig  # noqa: PLC0415  loads gRPC
    from gpulse.cluster.agent.connection import ClientTls, ConnectionConfig  # noqa: PLC0415

    ca: Path | None = None
    if settings.ca is not None:
        ca = directory / "head-ca.pem"
        ca.write_text(settings.ca, encoding="ascii")
    tls = ClientTls(None if ca is None else str(ca)) if address.tls else None
    # Without a machine ID an agent would generate and store one, but this directory is temporary.
    is_known = any(os.access(path, os.R_OK) for path in _MACHINE_FILES)
    return AgentConfig(
        ConnectionConfig(address.target, settings.token, tls),
        directory,
        machine_file=None if is_known else Path(_BOOT_FILE),
    )


def _own_directory(state: Path) -> Path:
    """Return the first directory that no process uses: a forked child of a task keeps the lock of an earlier stream."""
    for number in count(1):
        directory = state / str(number)
        with suppress(LogError):
            os.close(acquire_lock(str(directory)))
            return directory
    raise AssertionError


def _translate_options(text: str) -> str:
    """Replace command-line options in a message by the names of `attach`'s arguments."""
    for theirs, ours in _OPTION_NAMES.items():
        text = text.replace(theirs, ours)
    return text
