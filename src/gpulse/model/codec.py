"""Frames as JSON lines and back: what a recording holds.

The first line is the header. What hardly changes (the node, devices, processes) is written once, as a
line of its own, and referred to afterwards; each frame is one line. A scheduler's jobs stand in the frame with
which they changed, where readers that do not know them pass over them, and hold until the next such frame. A
reader therefore needs the lines before a frame, and can stop after any of them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any, TypeVar

from gpulse.model.device import Device, Node
from gpulse.model.frame import (
    CgroupReading,
    DiskReading,
    FilesystemReading,
    Frame,
    GpuReading,
    HostReading,
    NetworkReading,
)
from gpulse.model.health import Health
from gpulse.model.job import Job
from gpulse.model.job import from_document as job_from
from gpulse.model.metric import Values, is_finite
from gpulse.model.process import GpuProcess, Owner, ProcessIdentity, ProcessReading, Thread

FORMAT = "gpulse-recording"
VERSION = 1
Reading = TypeVar("Reading", DiskReading, FilesystemReading, NetworkReading, CgroupReading)


class Encoder:
    """Turns frames into lines, remembering what was already written."""

    def __init__(self) -> None:
        self._node: Node | None = None
        self._devices: dict[str, Device] = {}
        self._processes: dict[int, ProcessIdentity] = {}
        self._jobs: tuple[Job, ...] = ()
        self._begun = False

    def lines(self, frame: Frame) -> Iterator[str]:
        """The lines that this frame adds to a recording, without their line ends."""
        if not self._begun:
            self._begun = True
            yield _dump({"format": FORMAT, "version": VERSION})
        if frame.node != self._node:
            self._node = frame.node
            yield _dump({"node": plain(frame.node)})
        for gpu in frame.gpus:
            if self._devices.get(gpu.device.uuid) != gpu.device:
                self._devices[gpu.device.uuid] = gpu.device
                yield _dump({"device": plain(gpu.device)})
        living = {process.pid for process in frame.processes}
        for process in frame.processes:
            if self._processes.get(process.pid) != process.identity:
                self._processes[process.pid] = process.identity
                yield _dump({"process": plain(process.identity)})
        for pid in self._processes.keys() - living:
            del self._processes[pid]
        document = _frame(frame)
        if frame.jobs != self._jobs:
            self._jobs = frame.jobs
            document["jobs"] = [plain(job) for job in frame.jobs]
        yield _dump({"frame": document})


class Decoder:
    """Turns lines back into frames."""

    def __init__(self) -> None:
        self._node = Node(name="")
        self._devices: dict[str, Device] = {}
        self._processes: dict[int, ProcessIdentity] = {}
        self._jobs: tuple[Job, ...] = ()

    def feed(self, line: str) -> Frame | None:
        """Take one line; the frame it completes, or None for a line that only prepares one.

        Raises:
            ValueError: The line is not one of a recording.
        """
        try:
            document = json.loads(line)
            if "frame" in document:
                return self._frame(document["frame"])
            self._prepare(document)
        except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise ValueError("it is not a line of a recording") from error
        return None

    def _prepare(self, document: dict[str, Any]) -> None:
        if "node" in document:
            raw = _known(Node, document["node"])
            raw["numa_cpus"] = tuple(map(str, raw.get("numa_cpus", ())))
            self._node = Node(**raw)
        elif "device" in document:
            device = Device(**_known(Device, document["device"]))
            self._devices[device.uuid] = device._replace(facts=_values(device.facts))
        elif "process" in document:
            raw = _known(ProcessIdentity, document["process"])
            raw["command"] = tuple(raw.get("command", ()))
            raw["owner"] = Owner(**_known(Owner, raw.get("owner", {})))
            identity = ProcessIdentity(**raw)
            self._processes[identity.pid] = identity
        elif "format" not in document:
            raise ValueError(f"unknown line: {sorted(document)[:3]}")

    def _frame(self, raw: dict[str, Any]) -> Frame:
        host = raw.get("host")
        if "jobs" in raw:
            self._jobs = tuple(map(job_from, raw["jobs"]))
        return Frame(
            time=_finite(raw["time"]),
            monotonic=_finite(raw["monotonic"]),
            node=self._node,
            gpus=tuple(self._gpu(gpu) for gpu in raw.get("gpus", ())),
            host=None if host is None else HostReading(_values(host["values"]), _cores(host["cores"])),
            disks=tuple(_reading(DiskReading, disk) for disk in raw.get("disks", ())),
            filesystems=tuple(_reading(FilesystemReading, item) for item in raw.get("filesystems", ())),
            network=tuple(_reading(NetworkReading, link) for link in raw.get("network", ())),
            processes=tuple(self._process(process) for process in raw.get("processes", ())),
            cgroups=tuple(_reading(CgroupReading, group) for group in raw.get("cgroups", ())),
            health=tuple(
                Health(**_known(Health, item))._replace(metrics=tuple(item.get("metrics", ())))
                for item in raw.get("health", ())
            ),
            jobs=self._jobs,
        )

    def _gpu(self, raw: dict[str, Any]) -> GpuReading:
        processes = raw.get("processes")
        return GpuReading(
            self._devices[raw["uuid"]],
            _values(raw["values"]),
            None if processes is None else tuple(map(_gpu_process, processes)),
            _values(raw.get("read_at", {})),
        )

    def _process(self, raw: dict[str, Any]) -> ProcessReading:
        return ProcessReading(
            self._processes[raw["pid"]],
            raw["state"],
            _values(raw["values"]),
            tuple(Thread(*thread) for thread in raw.get("threads", ())),
            raw.get("on_gpu", False),
        )


def _frame(frame: Frame) -> dict[str, Any]:
    document: dict[str, Any] = {"time": frame.time, "monotonic": frame.monotonic}
    document["gpus"] = [
        {
            "uuid": gpu.device.uuid,
            "values": gpu.values,
            "processes": gpu.processes,
            "read_at": gpu.read_at,
        }
        for gpu in frame.gpus
    ]
    if frame.host is not None:
        document["host"] = {"values": frame.host.values, "cores": frame.host.cores}
    for name in ("disks", "filesystems", "network", "cgroups", "health"):
        if items := getattr(frame, name):
            document[name] = [plain(item) for item in items]
    if frame.processes:
        document["processes"] = [_process(process) for process in frame.processes]
    return document


def _process(process: ProcessReading) -> dict[str, Any]:
    document: dict[str, Any] = {"pid": process.pid, "state": process.state, "values": process.values}
    if process.threads:
        document["threads"] = process.threads
    if process.on_gpu:
        document["on_gpu"] = True
    return document


def plain(item: Any) -> dict[str, Any]:
    """A record as a dictionary, without what is at its default of nothing."""
    document = {}
    for name, value in item._asdict().items():
        if isinstance(value, Owner):
            document[name] = plain(value)
        elif value is not None and value != ():
            document[name] = value
    return document


def _known(kind: Any, raw: dict[str, Any]) -> dict[str, Any]:
    """The entries that this version knows, every one it needs present: a newer minor field does no harm."""
    return {name: raw.get(name) for name in kind._fields if name in raw or name in _NULLABLE}


def _reading(kind: type[Reading], raw: dict[str, Any]) -> Reading:
    """A record whose first field names it; what is left out is None."""
    raw[kind._fields[0]]
    reading: Reading = kind._make(map({**raw, "values": _values(raw["values"])}.get, kind._fields))
    return reading


def _values(raw: Any) -> Values:
    """The readings, when they are numbers by name; one that is not finite is unknown, and left out."""
    if not isinstance(raw, dict):
        raise TypeError("readings are not numbers by name")
    try:
        if all(map(math.isfinite, raw.values())):
            return raw
    except OverflowError:  # an integer beyond a float's range
        pass
    return {name: value for name, value in raw.items() if is_finite(value)}


def _gpu_process(raw: Any) -> GpuProcess:
    process = GpuProcess(*raw)
    return process._replace(
        gpu_memory_bytes=_number(process.gpu_memory_bytes), sm_ratio=_number(process.sm_ratio)
    )


def _number(raw: Any) -> Any:
    """A number or None; None for one that is not finite."""
    return raw if raw is None or is_finite(raw) else None


def _cores(raw: Any) -> tuple[tuple[int, ...], ...]:
    """The ticks of each CPU, nothing at all when one is not a finite number."""
    known = all(ticks is not None and is_finite(ticks) for core in raw for ticks in core)
    return tuple(map(tuple, raw)) if known else ()


def _finite(raw: Any) -> float:
    number = float(raw)
    if not 0 <= number < _LATEST_TIME:
        raise ValueError(f"not a time: {number}")
    return number


_LATEST_TIME = 1e11
"""Seconds; what is later was meant in another unit."""
_NULLABLE = frozenset({"kind", "disk", "up"})
"""Fields without a default that may be None, and are left out of the lines then."""


def _dump(document: dict[str, Any]) -> str:
    try:
        return json.dumps(document, separators=(",", ":"), allow_nan=False)
    except ValueError:  # a number that JSON cannot hold: one bad reading must not cost the file
        return json.dumps(_storable(document), separators=(",", ":"), allow_nan=False)


def _storable(value: Any) -> Any:
    """The value without readings that are not finite; None in place of one in a list."""
    if isinstance(value, dict):
        return {name: _storable(item) for name, item in value.items() if not _is_bad(item)}
    if isinstance(value, list | tuple):
        return [None if _is_bad(item) else _storable(item) for item in value]
    return value


def _is_bad(value: Any) -> bool:
    return isinstance(value, int | float) and not is_finite(value)
