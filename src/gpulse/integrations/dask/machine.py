"""What one worker sees of its machine: frames of its own GPUs, with no more in them than its columns need."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any, Protocol

from gpulse.errors import ClosedError
from gpulse.integrations.dask.tracking import Column, needed
from gpulse.model.device import Node
from gpulse.model.frame import Frame
from gpulse.model.health import Health
from gpulse.model.metric import Scope
from gpulse.sources.disks import DiskReader, FilesystemReader
from gpulse.sources.host import HostReader
from gpulse.sources.network import NetworkReader
from gpulse.sources.nvml.cadence import Cadence, Patience
from gpulse.sources.nvml.gpm import SHORTEST_SECONDS
from gpulse.sources.nvml.reader import GpuReader
from gpulse.sources.processes import ProcessReader

_NEVER = 1e9
_SLOW_SECONDS = 5.0
"""Energy and the like cost milliseconds of CPU time a GPU."""
_SHARES_SECONDS = 2.0
_TICK_PATIENCE = 2.0
"""Long: tasks that hold the interpreter's lock make every call of ours wait its turn."""
_CALL_PATIENCE = 10.0
_FIRST_PATIENCE = 1.0
"""For what is read beside the tick, such as the size of the memory, before the first frame goes out."""


def cadence(tracked: Sequence[Column], interval_seconds: float) -> Cadence:
    """As often as somebody measures, but for what is dear."""
    gpm = max(SHORTEST_SECONDS, interval_seconds)
    wants_graphics = any(column.metric == "graphics_active_ratio" for column in tracked)
    return Cadence(
        second=interval_seconds,
        gpm=gpm,
        graphics=gpm if wants_graphics else _NEVER,
        shares=max(_SHARES_SECONDS, interval_seconds),
        slow=max(_SLOW_SECONDS, interval_seconds),
        details=0.0,
    )


def patience() -> Patience:
    """For a driver that is asked from a process whose own work comes first."""
    return Patience(call=_CALL_PATIENCE)


class _Reader(Protocol):
    """One part of a machine."""

    def read(self, now: float) -> tuple[Any, list[Health]]: ...


class WorkerMachine:
    """The source of one worker's frames: what its columns need, and nothing else of the machine."""

    def __init__(self, tracked: Sequence[Column], gpus: GpuReader | None) -> None:
        """Prepare to read.

        Args:
            tracked: What frames must tell.
            gpus: The reader of the worker's GPUs, None when it has none; closed with this.
        """
        scopes: set[Scope | None] = {column.scope for column in tracked}
        self._gpus = gpus if any(column.is_of_gpus for column in tracked) else None
        self._opened = gpus
        self._node = Node(platform.node())
        made: dict[Scope, tuple[str, Callable[[], _Reader]]] = {
            "host": ("host", HostReader),
            "disk": ("disks", DiskReader),
            "filesystem": ("filesystems", FilesystemReader),
            "network": ("network", NetworkReader),
        }
        self._parts = {part: make() for scope, (part, make) in made.items() if scope in scopes}
        """By the part of a frame that each reads."""
        wants_process = any(
            column.scope in ("process", "cgroup") and not column.is_of_gpus for column in tracked
        )
        self._processes = ProcessReader() if wants_process else None
        self._sampled = False
        self._closed = False

    def sample(self, now: float) -> Frame:
        """One frame.

        Raises:
            ClosedError: The source was closed.
        """
        if self._closed:
            raise ClosedError("this worker is no longer being read")
        if self._gpus is not None:
            self._gpus.start(now)
        frame = Frame(time=now, monotonic=monotonic(), node=self._node)
        health: list[Health] = []
        for part, reader in self._parts.items():
            reading, found = reader.read(now)
            frame = frame._replace(**{part: reading})
            health += found
        if self._processes is not None:
            process, groups = self._processes.read_one(now, os.getpid())
            frame = frame._replace(processes=() if process is None else (process,), cgroups=groups)
        if self._gpus is not None:
            patience = 0.0 if self._sampled else _FIRST_PATIENCE
            gpus, found = self._gpus.collect(now, tick_patience=_TICK_PATIENCE, patience=patience)
            frame = frame._replace(gpus=gpus)
            health += found
        self._sampled = True
        return frame._replace(health=tuple(health))

    def close(self) -> None:
        """Give back what is held; a second call does nothing."""
        if self._closed:
            return
        self._closed = True
        if self._opened is not None:
            self._opened.close()
        filesystems = self._parts.get("filesystems")
        if isinstance(filesystems, FilesystemReader):
            filesystems.close()


def open_gpus(
    tracked: Sequence[Column], interval_seconds: float, now: float, *, whole: bool = False
) -> GpuReader:
    """A reader whose GPUs have said who they are, as far as they do so in a few seconds.

    Args:
        tracked: What will be read.
        interval_seconds: How often.
        now: Epoch seconds.
        whole: Read everything, for those who look at whole frames.
    """
    reader = GpuReader(
        cadence(tracked, interval_seconds),
        watch_xids=whole or any(column.metric.startswith("xid_") for column in tracked),
        patience=patience(),
        names=None if whole else needed(tracked),
    )
    reader.open(now)
    return reader
