"""An agent: samples one machine, keeps what no head has yet, and brings it there, whatever happens on the way."""

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
from typing import Any, Literal, NamedTuple

from gpulse._version import __version__
from gpulse.cluster import wire
from gpulse.cluster.agent.buffer import MOST_FRAMES, Buffer
from gpulse.cluster.agent.changes import Changes
from gpulse.cluster.agent.identity import Identity, read_identity
from gpulse.cluster.agent.keeper import Keeper
from gpulse.cluster.agent.link import Link, LinkConfig
from gpulse.cluster.agent.overlap import KEEP_SECONDS as OVERLAP_SECONDS
from gpulse.cluster.agent.spool import LIMIT_BYTES, SpoolReader
from gpulse.cluster.agent.stream import Side
from gpulse.cluster.agent.taker import Seen, Taker
from gpulse.cluster.agent.xid_file import XidFile
from gpulse.cluster.wire_pb2 import Hello, Settings
from gpulse.errors import DiskError, GpulseError, LogError
from gpulse.model.bounds import bounded_name
from gpulse.model.codec import plain
from gpulse.model.columns import PackedFrame
from gpulse.model.device import Node
from gpulse.model.frame import Frame
from gpulse.model.xid import XidLedger
from gpulse.sampling.sampler import SHORTEST_INTERVAL_SECONDS
from gpulse.sources.base import Source
from gpulse.store.log.lock import take_lock

DEFAULT_INTERVAL_SECONDS = 1.0
"""Until the head says how often it wants frames."""
_START_SECONDS = 10.0
_FIRST_CONTACT_SECONDS = 3.0
_LAST_FRAME_SECONDS = 0.4
_FAREWELL_SECONDS = 0.4
_FINISH_SECONDS = 1.5

_log = logging.getLogger(__name__)


class AgentConfig(NamedTuple):
    """How an agent is to run."""

    link: LinkConfig
    state: Path
    """The directory that is its own."""
    node_name: str | None = None
    machine_file: Path | None = None
    labels: Mapping[str, str] = {}
    interval_seconds: float | None = None
    """As often as the head wants when None."""
    spool_limit_bytes: int = LIMIT_BYTES
    memory_frames: int = MOST_FRAMES
    diagnosis: bool = True
    full_commands: bool = False


async def run_agent(
    config: AgentConfig,
    source: Source,
    *,
    stop: asyncio.Event,
    ready: Callable[[str], None] = lambda _: None,
    bandwidth: Callable[[bool], None] = lambda _: None,
    answered: Callable[[], None] = lambda: None,
    seen: Seen = lambda _frame, _findings, _interval: None,
) -> None:
    """Be an agent until told to stop, or until a recording ends.

    Args:
        config: How.
        source: Where frames come from; closed in the end.
        stop: Set to end it.
        ready: Told once it runs, in words.
        bandwidth: Told whether the head wants PCIe traffic, which takes its time on some GPUs.
        answered: Told whenever the head says welcome, or that it keeps what it got.
        seen: Gets each frame, in a thread.

    Raises:
        GpulseError: Another agent has the state directory, the head refuses this one, or nothing can be sampled.
    """
    try:
        lock = _lock(config.state)
    except BaseException:
        source.close()
        raise
    try:
        await _Agent(config, source, stop, bandwidth, answered, seen).run(ready)
    finally:
        if lock is not None:
            os.close(lock)


def _lock(state: Path) -> int | None:
    try:
        return take_lock(os.fspath(state))
    except LogError as error:
        holder = error.message.rpartition(" by ")[2]
        raise GpulseError(
            f"another agent ({holder}) uses {state}",
            hint="stop that one first, or give this one a --state-dir of its own",
        ) from error
    except DiskError as error:
        _log.warning("%s", error.message)
        return None


class _Agent:
    """The parts of an agent and how they speak to each other."""

    def __init__(
        self,
        config: AgentConfig,
        source: Source,
        stop: asyncio.Event,
        bandwidth: Callable[[bool], None],
        answered: Callable[[], None] = lambda: None,
        seen: Seen = lambda _frame, _findings, _interval: None,
    ) -> None:
        self._config = config
        self._bandwidth = bandwidth
        self._loop = asyncio.get_running_loop()
        self._stop = stop
        self._node: Node | None = None
        self._wanted_ms, self._pacing = 0, threading.Lock()
        self._first_frame, self._spool_open = asyncio.Event(), asyncio.Event()
        self._identity: Identity = read_identity(
            config.state, name=config.node_name, machine_file=config.machine_file
        )
        interval = config.interval_seconds or DEFAULT_INTERVAL_SECONDS
        self._buffer = Buffer(
            os.urandom(wire.RUN_BYTES),
            self._identity.boot,
            round(interval * 1000),
            most_frames=config.memory_frames,
            overlap_seconds=OVERLAP_SECONDS if config.link.others else 0.0,
        )
        self._keeper = Keeper(
            self._buffer,
            config.state / "spool",
            limit_bytes=config.spool_limit_bytes,
            opened=lambda: self._soon(self._spool_open.set),
            found=lambda: self._soon(self._link.announce),
        )
        self._reader = SpoolReader(lambda: self._keeper.log)
        changes = Changes(version=__version__, pid=self._identity.pid, full_commands=config.full_commands)
        side = Side(
            self._buffer,
            self._reader,
            self._hello,
            self._settings,
            self._keeper.note,
            changes.again,
            time.monotonic,
            answered,
        )
        self._link = Link(config.link, side, random.random)
        self._xid_file = XidFile(config.state / "xids.json", self._identity.boot)
        self._xids = XidLedger()
        for xid in self._xid_file.read(time.time()):
            self._xids.add(xid)
        self._xid_file.xids = self._xids.errors()
        self._taker = Taker(
            source,
            interval,
            changes=changes,
            taken=self._taken,
            ended=lambda: self._soon(self._stop.set),
            diagnosis=config.diagnosis,
            xids=self._xids,
            seen=seen,
        )

    async def run(self, ready: Callable[[str], None]) -> None:
        self._keeper.start()
        self._taker.start()
        link: asyncio.Task[None] | None = None
        stopped = asyncio.ensure_future(self._stop.wait())
        try:
            await self._started(stopped)
            link = asyncio.ensure_future(self._link.run())
            contact = asyncio.ensure_future(self._link.contacted.wait())
            await asyncio.wait(
                {link, stopped, contact},
                timeout=_FIRST_CONTACT_SECONDS,
                return_when=asyncio.FIRST_COMPLETED,
            )
            contact.cancel()
            if not link.done():
                ready(f"the agent samples {self._identity.host} for {','.join(self._config.link.targets)}")
            await asyncio.wait({link, stopped}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopped.cancel()
            await self._finish(link)
        if self._taker.error is not None:
            raise self._taker.error

    async def _started(self, stopped: asyncio.Future[Literal[True]]) -> None:
        """Wait until the spool and the first frame are there, unless either takes too long."""
        started = asyncio.ensure_future(self._begun())
        await asyncio.wait({started, stopped}, timeout=_START_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        started.cancel()

    async def _begun(self) -> Literal[True]:
        await self._first_frame.wait()
        return await self._spool_open.wait()

    async def _finish(self, link: asyncio.Task[None] | None) -> None:
        """Take the last frame, send what can be sent, and write the rest to the spool."""
        self._taker.stop()
        await asyncio.to_thread(self._taker.join, _LAST_FRAME_SECONDS)
        self._link.stop()
        failure: BaseException | None = None
        if link is not None:
            await asyncio.wait({link}, timeout=_FAREWELL_SECONDS)
            link.cancel()
            with suppress(asyncio.CancelledError):
                failure = (await asyncio.gather(link, return_exceptions=True))[0]
        if not await asyncio.to_thread(self._keeper.finish, _FINISH_SECONDS):
            _log.error("the disk is too slow: not every frame is in the spool")
        self._reader.close()
        if isinstance(failure, Exception):
            raise failure

    def _soon(self, step: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # the loop has ended already
            self._loop.call_soon_threadsafe(step)

    def _taken(self, frame: Frame, packed: PackedFrame, texts: Sequence[bytes]) -> None:
        self._buffer.add(packed, texts, time.monotonic())
        is_first, self._node = self._node is None, frame.node  # before anybody is told: hello needs it
        if is_first:
            self._soon(self._first_frame.set)
        self._soon(self._link.wake)
        xids = self._xids.errors()
        if xids != self._xid_file.xids:
            self._xid_file.xids = xids
            self._soon(self._write_xids)

    def _write_xids(self) -> None:
        self._loop.run_in_executor(None, self._xid_file.write)

    def _settings(self, settings: Settings) -> None:
        if settings.interval_ms and self._config.interval_seconds is None:
            self._wanted_ms = settings.interval_ms
            self._loop.run_in_executor(None, self._follow)
        self._bandwidth(settings.bandwidth)

    def _follow(self) -> None:
        """Take up the pace that the head wants; how much a kill may cost at that pace is on disk before."""
        with self._pacing:
            interval_ms = max(self._wanted_ms, round(SHORTEST_INTERVAL_SECONDS * 1000))
            if self._buffer.set_interval(interval_ms):
                self._keeper.note()
            self._taker.set_interval(interval_ms / 1000)

    def _hello(self) -> Hello:
        facts = {} if self._node is None else plain(self._node)
        facts.pop("name", None)
        facts = {name: _bounded(value) for name, value in facts.items()}
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
        )


def _bounded(value: Any) -> Any:
    """A fact about the node as heads take it."""
    if isinstance(value, str):
        return bounded_name(value)
    return [bounded_name(item) for item in value] if isinstance(value, tuple) else value
