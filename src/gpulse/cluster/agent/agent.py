"""Agent process: samples one machine, spools frames that no head has acknowledged, and sends them."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from gpulse._version import __version__
from gpulse.atomic_files import replace_file
from gpulse.cluster import wire
from gpulse.cluster.agent.connection import AgentConnection, ConnectionConfig
from gpulse.cluster.agent.event_detector import EventDetector
from gpulse.cluster.agent.frame_buffer import MAX_MEMORY_FRAMES, RESEND_SECONDS, FrameBuffer
from gpulse.cluster.agent.frame_stream import AgentContext
from gpulse.cluster.agent.identity import AgentIdentity, read_identity
from gpulse.cluster.agent.sampling_thread import FrameCallback, SamplingThread
from gpulse.cluster.agent.spool import DEFAULT_LIMIT_BYTES, SpoolReader
from gpulse.cluster.agent.spool_writer import SpoolWriter
from gpulse.cluster.wire_pb2 import Hello, Settings, StackAnswer, StackRequest
from gpulse.errors import DiskError, GpulseError, LogError
from gpulse.model.device import Node
from gpulse.model.frame import Frame
from gpulse.model.message_limits import bound_name
from gpulse.model.packed_columns import PackedFrame
from gpulse.model.recording_codec import to_sparse_dict
from gpulse.model.xid import XidCounts, XidErrors, xid_from_document
from gpulse.sampling.sampler import MIN_INTERVAL_SECONDS
from gpulse.sources.frame_source import Source
from gpulse.store.log.lock import acquire_lock

if TYPE_CHECKING:
    from gpulse.cluster.agent.line_collection import LineCollection

MAX_XID_AGE_SECONDS = 86_400.0
"""Older Xid errors are ignored, because the GPU may have been reset since."""
_MAX_XID_FILE_BYTES = 4 << 20

_log = logging.getLogger(__name__)


class XidFile:
    """File in which an agent keeps the Xid errors of this boot for the next agent."""

    def __init__(self, path: Path, boot: str) -> None:
        """Prepare to read and write the file.

        Args:
            path: Path of the file.
            boot: ID of this boot of the machine; errors from another boot are ignored.
        """
        self._path = path
        self._boot = boot
        self._lock = threading.Lock()
        self.xids: Sequence[XidErrors] = ()
        """The errors that `write` writes."""

    def read(self, now: float) -> list[XidErrors]:
        """Return the errors of this boot from the last 24 hours; none if the file cannot be read."""
        try:
            with open(self._path, "rb") as file:
                document = json.loads(file.read(_MAX_XID_FILE_BYTES))
            if document["boot"] != self._boot or not self._boot:
                return []
            found = [xid_from_document(one) for one in document["xids"]]
        except FileNotFoundError:
            return []
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            _log.warning(
                "cannot read %s: %s; Xid errors from earlier runs of the agent are not reported",
                self._path,
                error,
            )
            return []
        return [xid for xid in found if xid is not None and now - xid.time <= MAX_XID_AGE_SECONDS]

    def write(self) -> None:
        """Replace the content of the file with `xids`; may be called from any thread."""
        with self._lock:
            text = json.dumps({"boot": self._boot, "xids": [xid._asdict() for xid in self.xids]})
            try:
                replace_file(self._path, text.encode(), durable=False)
            except OSError as error:
                _log.warning(
                    "cannot write %s: %s; after a restart, the agent will not report the Xid errors of this run",
                    self._path,
                    error,
                )


DEFAULT_INTERVAL_SECONDS = 1.0
"""Sampling interval until the head sets one."""
_START_SECONDS = 10.0
_FIRST_CONTACT_SECONDS = 3.0
_LAST_FRAME_SECONDS = 0.4
_GOODBYE_SECONDS = 0.4
_FINISH_SECONDS = 1.5


class AgentConfig(NamedTuple):
    """Configuration of an agent."""

    link: ConnectionConfig
    state: Path
    """State directory; no other agent may use it."""
    node_name: str | None = None
    machine_file: Path | None = None
    labels: Mapping[str, str] = {}
    interval_seconds: float | None = None
    """Sampling interval; the head's setting when None."""
    spool_limit_bytes: int = DEFAULT_LIMIT_BYTES
    memory_frames: int = MAX_MEMORY_FRAMES
    diagnosis: bool = True
    full_commands: bool = False
    lines: bool = False
    """Read stacks of programs with findings, and name the lines of code behind them."""
    last_frame_file: Path | None = None
    """File in memory that counts the frames, for the next agent if this one is killed; None for none."""


async def run_agent(
    config: AgentConfig,
    source: Source,
    *,
    stop: asyncio.Event,
    ready: Callable[[str], None] = lambda _: None,
    bandwidth: Callable[[bool], None] = lambda _: None,
    answered: Callable[[], None] = lambda: None,
    seen: FrameCallback = lambda _frame, _findings, _interval: None,
) -> None:
    """Run an agent until `stop` is set or a recording ends.

    Args:
        config: The configuration.
        source: Source of the frames; closed at the end.
        stop: Set it to end the agent.
        ready: Called with a message for the user once the agent runs.
        bandwidth: Called with whether the head wants PCIe traffic, which is slow to read on some GPUs.
        answered: Called whenever the head welcomes the agent or acknowledges frames.
        seen: Called with each frame, in the sampling thread.

    Raises:
        GpulseError: Another agent uses the state directory, the head refuses this agent, or nothing can be sampled.
    """
    try:
        lock = _lock_state_directory(config.state)
    except BaseException:
        source.close()
        raise
    try:
        await _Agent(config, source, stop, bandwidth, answered, seen).run(ready)
    finally:
        if lock is not None:
            os.close(lock)


def _lock_state_directory(state: Path) -> int | None:
    try:
        return acquire_lock(os.fspath(state))
    except LogError as error:
        holder = error.message.rpartition(" by ")[2]
        raise GpulseError(
            f"another agent ({holder}) is using {state}",
            hint="stop that agent first, or give this one its own --state-dir",
        ) from error
    except DiskError as error:
        _log.warning("%s", error.message)
        return None


def _collect_lines() -> LineCollection:
    from gpulse.cluster.agent.line_collection import LineCollection  # noqa: PLC0415  for --lines alone

    return LineCollection()


class _Agent:
    """The parts of an agent, connected to each other."""

    def __init__(
        self,
        config: AgentConfig,
        source: Source,
        stop: asyncio.Event,
        bandwidth: Callable[[bool], None],
        answered: Callable[[], None] = lambda: None,
        seen: FrameCallback = lambda _frame, _findings, _interval: None,
    ) -> None:
        self._config = config
        self._bandwidth = bandwidth
        self._loop = asyncio.get_running_loop()
        self._stop = stop
        self._node: Node | None = None
        self._announced: tuple[Node | None] | None = None
        """The node as the last hello message described it; None before the first one."""
        self._frame: Frame | None = None
        self._wanted_ms, self._pacing = 0, threading.Lock()
        self._first_frame, self._spool_open = asyncio.Event(), asyncio.Event()
        self._identity: AgentIdentity = read_identity(
            config.state, name=config.node_name, machine_file=config.machine_file
        )
        interval = config.interval_seconds or DEFAULT_INTERVAL_SECONDS
        self._buffer = FrameBuffer(
            os.urandom(wire.RUN_BYTES),
            self._identity.boot,
            round(interval * 1000),
            max_frames=config.memory_frames,
            resend_seconds=RESEND_SECONDS if config.link.others else 0.0,
        )
        self._spool_writer = SpoolWriter(
            self._buffer,
            config.state / "spool",
            limit_bytes=config.spool_limit_bytes,
            last_frame_file=config.last_frame_file,
            opened=lambda: self._call_in_loop(self._spool_open.set),
            found=lambda: self._call_in_loop(self._link.announce),
        )
        self._reader = SpoolReader(lambda: self._spool_writer.log)
        changes = EventDetector(
            version=__version__, pid=self._identity.pid, full_commands=config.full_commands
        )
        side = AgentContext(
            self._buffer,
            self._reader,
            self._make_hello,
            self._on_settings,
            self._spool_writer.note,
            changes.again,
            time.monotonic,
            answered,
            self._on_stack_request,
            self._spool_writer.repair,
        )
        self._link = AgentConnection(config.link, side, random.random)
        self._xid_file = XidFile(config.state / "xids.json", self._identity.boot)
        self._xids = XidCounts()
        for xid in self._xid_file.read(time.time()):
            self._xids.add(xid)
        self._xid_file.xids = self._xids.errors()
        self._lines = _collect_lines() if config.lines else None
        self._sampling_thread = SamplingThread(
            source,
            interval,
            changes=changes,
            taken=self._on_frame,
            ended=lambda: self._call_in_loop(self._stop.set),
            diagnosis=config.diagnosis,
            xids=self._xids,
            lines=self._lines,
            seen=seen,
        )

    async def run(self, ready: Callable[[str], None]) -> None:
        self._spool_writer.start()
        self._sampling_thread.start()
        link: asyncio.Task[None] | None = None
        stopped = asyncio.ensure_future(self._stop.wait())
        try:
            await self._wait_for_start(stopped)
            link = asyncio.ensure_future(self._link.run())
            contact = asyncio.ensure_future(self._link.contacted.wait())
            await asyncio.wait(
                {link, stopped, contact},
                timeout=_FIRST_CONTACT_SECONDS,
                return_when=asyncio.FIRST_COMPLETED,
            )
            contact.cancel()
            if not link.done():
                ready(f"sampling {self._identity.host} and sending to {', '.join(self._config.link.targets)}")
            await asyncio.wait({link, stopped}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopped.cancel()
            await self._finish(link)
        if self._sampling_thread.error is not None:
            raise self._sampling_thread.error

    async def _wait_for_start(self, stopped: asyncio.Future[Literal[True]]) -> None:
        """Wait for the spool and the first frame, but no longer than `_START_SECONDS`."""
        started = asyncio.ensure_future(self._wait_started())
        await asyncio.wait({started, stopped}, timeout=_START_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        started.cancel()

    async def _wait_started(self) -> Literal[True]:
        await self._first_frame.wait()
        return await self._spool_open.wait()

    async def _finish(self, link: asyncio.Task[None] | None) -> None:
        """Take the last frame, send what the head accepts in time, and write the rest to the spool."""
        self._sampling_thread.stop()
        await asyncio.to_thread(self._sampling_thread.join, _LAST_FRAME_SECONDS)
        self._link.stop()
        failure: BaseException | None = None
        if link is not None:
            await asyncio.wait({link}, timeout=_GOODBYE_SECONDS)
            link.cancel()
            with suppress(asyncio.CancelledError):
                failure = (await asyncio.gather(link, return_exceptions=True))[0]
        if not await asyncio.to_thread(self._spool_writer.finish, _FINISH_SECONDS):
            _log.error("the disk is too slow: some frames were not written to the spool")
        if self._lines is not None:
            await asyncio.to_thread(self._lines.close)
        self._reader.close()
        if isinstance(failure, Exception):
            raise failure

    def _call_in_loop(self, step: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # the loop has ended already
            self._loop.call_soon_threadsafe(step)

    def _on_frame(self, frame: Frame, packed: PackedFrame, texts: Sequence[bytes]) -> None:
        self._buffer.add(packed, texts, time.monotonic())
        self._frame = frame
        is_first, self._node = (
            self._node is None,
            frame.node,
        )  # before the callbacks: the hello message needs it
        if is_first:
            self._call_in_loop(self._first_frame.set)
        if self._announced is not None and self._announced != (frame.node,):  # another driver was loaded
            self._call_in_loop(self._link.reconnect)
        self._call_in_loop(self._link.wake)
        xids = self._xids.errors()
        if xids != self._xid_file.xids:
            self._xid_file.xids = xids
            self._call_in_loop(self._write_xids)

    def _write_xids(self) -> None:
        self._loop.run_in_executor(None, self._xid_file.write)

    def _on_settings(self, settings: Settings) -> None:
        if settings.interval_ms and self._config.interval_seconds is None:
            self._wanted_ms = settings.interval_ms
            self._loop.run_in_executor(None, self._apply_interval)
        self._bandwidth(settings.bandwidth)

    def _on_stack_request(self, request: StackRequest, reply: Callable[[StackAnswer], None]) -> None:
        lines = self._lines
        if lines is None:
            reply(StackAnswer(id=request.id, refusal="this agent was started without --lines"))
            return

        def work() -> None:
            answer = lines.answers.answer(request, self._frame)
            self._call_in_loop(lambda: reply(answer))

        threading.Thread(target=work, name="gpulse-stack-request", daemon=True).start()

    def _apply_interval(self) -> None:
        """Switch to the interval that the head wants.

        The spool records the interval first, because it limits how many frames a kill can lose.
        """
        with self._pacing:
            interval_ms = max(self._wanted_ms, round(MIN_INTERVAL_SECONDS * 1000))
            if self._buffer.set_interval(interval_ms):
                self._spool_writer.note()
            self._sampling_thread.set_interval(interval_ms / 1000)

    def _make_hello(self) -> Hello:
        node = self._node
        self._announced = (node,)
        facts = {} if node is None else to_sparse_dict(node)
        facts.pop("name", None)
        facts = {name: _bound_fact(value) for name, value in facts.items()}
        me = self._identity
        return Hello(
            protocol=wire.PROTOCOL,
            version=__version__,
            host=me.host,
            machine=me.machine,
            boot=me.boot,
            instance=me.instance,
            pid=me.pid,
            node=json.dumps(facts).encode(),
            labels=dict(self._config.labels),
            time_us=time.time_ns() // 1000,
            monotonic_us=time.monotonic_ns() // 1000,
            interval_ms=round((self._config.interval_seconds or 0.0) * 1000),
            stacks=True,
        )


def _bound_fact(value: Any) -> Any:
    """Return a fact about the node within the size limits of the head."""
    if isinstance(value, str):
        return bound_name(value)
    return [bound_name(item) for item in value] if isinstance(value, tuple) else value
