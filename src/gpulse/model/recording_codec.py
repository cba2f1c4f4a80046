"""Encode frames as the JSON lines of a recording, and decode them.

The first line is the header. Data that hardly changes (the node, devices, processes) is written once, on a line of
its own, and referred to afterwards; each frame is one line. The jobs of a scheduler are written with the frame in
which they changed, and hold until the next such frame; readers that do not know them ignore them. A reader needs all
lines before a frame, and can stop after any line.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any, TypeVar

from gpulse.model.device import Device, Node, paths_from_document
from gpulse.model.frame import (
    CgroupReading,
    DiskReading,
    FilesystemReading,
    Frame,
    GpuReading,
    HostReading,
    NetworkReading,
)
from gpulse.model.job import Job, job_from_document
from gpulse.model.metric_catalog import Values, is_finite
from gpulse.model.process import GpuProcess, Owner, ProcessIdentity, ProcessReading, Thread
from gpulse.model.source_health import Health

RECORDING_FORMAT = "gpulse-recording"
RECORDING_VERSION = 1
Reading = TypeVar("Reading", DiskReading, FilesystemReading, NetworkReading, CgroupReading)


class RecordingEncoder:
    """Encodes frames as lines, without repeating data that was already written."""

    def __init__(self) -> None:
        self._node: Node | None = None
        self._devices: dict[str, Device] = {}
        self._processes: dict[int, ProcessIdentity] = {}
        self._jobs: tuple[Job, ...] = ()
        self._has_header = False

    def lines(self, frame: Frame) -> Iterator[str]:
        """Yield the lines that a frame adds to a recording, without line ends."""
        if not self._has_header:
            self._has_header = True
            yield _dump({"format": RECORDING_FORMAT, "version": RECORDING_VERSION})
        if frame.node != self._node:
            self._node = frame.node
            yield _dump({"node": to_sparse_dict(frame.node)})
        for gpu in frame.gpus:
            if self._devices.get(gpu.device.uuid) != gpu.device:
                self._devices[gpu.device.uuid] = gpu.device
                yield _dump({"device": to_sparse_dict(gpu.device)})
        living = {process.pid for process in frame.processes}
        for process in frame.processes:
            if self._processes.get(process.pid) != process.identity:
                self._processes[process.pid] = process.identity
                yield _dump({"process": to_sparse_dict(process.identity)})
        for pid in self._processes.keys() - living:
            del self._processes[pid]
        document = _frame(frame)
        if frame.jobs != self._jobs:
            self._jobs = frame.jobs
            document["jobs"] = [to_sparse_dict(job) for job in frame.jobs]
        yield _dump({"frame": document})


class RecordingDecoder:
    """Decodes lines into frames."""

    def __init__(self) -> None:
        self._node = Node(name="")
        self._devices: dict[str, Device] = {}
        self._processes: dict[int, ProcessIdentity] = {}
        self._jobs: tuple[Job, ...] = ()

    def feed(self, line: str) -> Frame | None:
        """Read one line, and return its frame; None for a line without a frame.

        Raises:
            ValueError: The line is not part of a recording.
        """
        try:
            document = json.loads(line)
            if "frame" in document:
                frame = self._frame(document["frame"])
                self._processes = {process.pid: process.identity for process in frame.processes}
                return frame
            self._prepare(document)
        except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise ValueError("this is not a line of a gpulse recording") from error
        return None

    def _prepare(self, document: dict[str, Any]) -> None:
        if len(self._devices) + len(self._processes) >= _MAX_DEFINITIONS:
            raise ValueError("the recording has too many devices or processes for one machine")
        if "node" in document:
            raw = _known_fields(Node, document["node"])
            raw["numa_cpus"] = tuple(map(str, raw.get("numa_cpus", ())))
            self._node = Node(**raw)
        elif "device" in document:
            device = Device(**_known_fields(Device, document["device"]))
            self._devices[device.uuid] = device._replace(
                facts=_values(device.facts),
                paths=paths_from_document(device.paths),
                adapter_paths=paths_from_document(device.adapter_paths),
            )
        elif "process" in document:
            raw = _known_fields(ProcessIdentity, document["process"])
            raw["command"] = tuple(raw.get("command", ()))
            raw["owner"] = Owner(**_known_fields(Owner, raw.get("owner", {})))
            identity = ProcessIdentity(**raw)
            self._processes[identity.pid] = identity
        elif "format" not in document:
            raise ValueError(f"the line has unknown fields: {', '.join(map(repr, sorted(document)[:3]))}")

    def _frame(self, raw: dict[str, Any]) -> Frame:
        host = raw.get("host")
        if "jobs" in raw:
            self._jobs = tuple(map(job_from_document, raw["jobs"]))
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
                Health(**_known_fields(Health, item))._replace(metrics=tuple(item.get("metrics", ())))
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
            document[name] = [to_sparse_dict(item) for item in items]
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


def to_sparse_dict(item: Any) -> dict[str, Any]:
    """Return a record as a dictionary, without empty fields."""
    document = {}
    for name, value in item._asdict().items():
        if isinstance(value, Owner):
            document[name] = to_sparse_dict(value)
        elif value is not None and value != ():
            document[name] = value
    return document


def _known_fields(kind: Any, raw: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that this version knows; additional fields of newer versions are ignored."""
    return {name: raw.get(name) for name in kind._fields if name in raw or name in _NULLABLE}


def _reading(kind: type[Reading], raw: dict[str, Any]) -> Reading:
    """Decode a record whose first field is its name; missing fields are None."""
    raw[kind._fields[0]]
    reading: Reading = kind._make(map({**raw, "values": _values(raw["values"])}.get, kind._fields))
    return reading


def _values(raw: Any) -> Values:
    """Return readings by name, without non-finite numbers."""
    if not isinstance(raw, dict):
        raise TypeError("readings must be a JSON object with numeric values")
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
    """Return a finite number, else None."""
    return raw if raw is None or is_finite(raw) else None


def _cores(raw: Any) -> tuple[tuple[int, ...], ...]:
    """Return the ticks of each CPU; empty when one is not a finite number."""
    known = all(ticks is not None and is_finite(ticks) for core in raw for ticks in core)
    return tuple(map(tuple, raw)) if known else ()


def _finite(raw: Any) -> float:
    number = float(raw)
    if not 0 <= number < _MAX_TIME_SECONDS:
        raise ValueError(f"{number} is not a valid time")
    return number


_MAX_DEFINITIONS = 100_000
"""Devices and processes of one frame."""
_MAX_TIME_SECONDS = 1e11
"""Later times are in another unit than seconds."""
_NULLABLE = frozenset({"kind", "disk", "up"})
"""Fields without a default that may be None, and are then omitted."""


def _dump(document: dict[str, Any]) -> str:
    try:
        return json.dumps(document, separators=(",", ":"), allow_nan=False)
    except ValueError:  # JSON cannot hold a number; one bad reading must not spoil the file
        return json.dumps(_without_nonfinite(document), separators=(",", ":"), allow_nan=False)


def _without_nonfinite(value: Any) -> Any:
    """Return the value without non-finite numbers; in lists they become None."""
    if isinstance(value, dict):
        return {name: _without_nonfinite(item) for name, item in value.items() if not _is_nonfinite(item)}
    if isinstance(value, list | tuple):
        return [None if _is_nonfinite(item) else _without_nonfinite(item) for item in value]
    return value


def _is_nonfinite(value: Any) -> bool:
    return isinstance(value, int | float) and not is_finite(value)
