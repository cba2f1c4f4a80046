"""Pack frames for sending and storing, and unpack them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, TypeGuard

from gpulse.model.counter_rates import Rates, compute_rates, process_key
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
from gpulse.model.job import Job
from gpulse.model.message_limits import MAX_VALUE, bound_name, encode_events
from gpulse.model.metric_catalog import Scope, Values
from gpulse.model.packed_columns import (
    BlockPacker,
    ColumnBlock,
    ColumnLayout,
    PackedFrame,
    SubjectValues,
    unpack_block,
)
from gpulse.model.process import GpuProcess, ProcessIdentity, ProcessReading
from gpulse.model.recording_codec import to_sparse_dict

SLOW_SECONDS = 5.0
"""How often disks, network, cgroups and processes are packed."""
_ON_GPU = ("gpu_memory_bytes", "sm_ratio")

_PackedBlock = tuple[ColumnBlock, bool]


class FramePacker:
    """Packs the frames of one run, one after the other."""

    def __init__(self, *, slow_seconds: float = SLOW_SECONDS) -> None:
        self._slow_seconds = slow_seconds
        self._gpu = BlockPacker("gpu")
        self._host = BlockPacker("host")
        self._disk = BlockPacker("disk")
        self._filesystem = BlockPacker("filesystem")
        self._network = BlockPacker("network")
        self._cgroup = BlockPacker("cgroup")
        self._process = BlockPacker("process")
        self._on_gpu = BlockPacker("process", _ON_GPU)
        self._devices: list[Device] = []
        self._subjects: list[dict[str, Any]] = []
        self._last: Frame | None = None
        self._last_slow: Frame | None = None

    def pack(self, frame: Frame, events: Sequence[Mapping[str, Any]] = ()) -> tuple[PackedFrame, list[bytes]]:
        """Pack a frame; return it with the JSON of the layouts that are new."""
        quick = Frame(frame.time, frame.monotonic, frame.node, frame.gpus, frame.host)
        rates = Rates(0.0) if self._last is None else compute_rates(self._last, quick, cores=False)
        self._last = quick
        found = [(self._gpu, self._pack_gpus(quick, rates))]
        if frame.host is not None:
            found.append((self._host, self._host.pack(({},), ((frame.host.values, rates.host),))))
        slow = self._last_slow
        # Up to a tenth early, so that a slightly early frame does not delay them by a whole interval.
        if slow is None or not 0 <= frame.monotonic - slow.monotonic < 0.9 * self._slow_seconds:
            found += self._pack_slow(
                frame, Rates(0.0) if slow is None else compute_rates(slow, frame, cores=False)
            )
            self._last_slow = frame
        packed = PackedFrame(
            round(frame.time * 1e6),
            round(frame.monotonic * 1e6),
            tuple(block for _, (block, _) in found),
            encode_events(events),
        )
        return packed, [packer.text for packer, (_, is_new) in found if is_new]

    def _pack_gpus(self, frame: Frame, rates: Rates) -> _PackedBlock:
        devices = [gpu.device for gpu in frame.gpus]
        if devices != self._devices:
            self._devices, self._subjects = (
                devices,
                [_with_bound_names(to_sparse_dict(device)) for device in devices],
            )
        rows = [(gpu.values, rates.gpus.get(gpu.device.uuid, {})) for gpu in frame.gpus]
        return self._gpu.pack(self._subjects, rows)

    def _pack_slow(self, frame: Frame, rates: Rates) -> list[tuple[BlockPacker, _PackedBlock]]:
        parts: list[tuple[BlockPacker, list[dict[str, Any]], list[SubjectValues]]] = [
            (
                self._disk,
                [_text_fields(disk, ("name", "kind", "model")) for disk in frame.disks],
                [(disk.values, rates.disks.get(disk.name, {})) for disk in frame.disks],
            ),
            (
                self._filesystem,
                [
                    _text_fields(item, ("mount_point", "device", "type", "disk", "kind"))
                    for item in frame.filesystems
                ],
                [(item.values, rates.filesystems.get(item.mount_point, {})) for item in frame.filesystems],
            ),
            (
                self._network,
                [_text_fields(link, ("name", "kind", "up")) for link in frame.network],
                [(link.values, rates.network.get(link.name, {})) for link in frame.network],
            ),
            (
                self._cgroup,
                [_text_fields(group, ("path",)) for group in frame.cgroups],
                [(group.values, rates.cgroups.get(group.path, {})) for group in frame.cgroups],
            ),
            (
                self._process,
                [_process_subject(process) for process in frame.processes],
                [
                    (process.values, rates.processes.get(process_key(process), {}))
                    for process in frame.processes
                ],
            ),
            (self._on_gpu, *_holdings(frame)),
        ]
        return [(packer, packer.pack(*_distinct(subjects, rows))) for packer, subjects, rows in parts]


def _text_fields(reading: Any, names: Sequence[str]) -> dict[str, Any]:
    return _with_bound_names({name: getattr(reading, name) for name in names})


def _with_bound_names(subject: dict[str, Any]) -> dict[str, Any]:
    """Return a subject with texts that heads accept."""
    bound: dict[str, Any] = {}
    for name, value in subject.items():
        if name in _PATH_FIELDS:
            bound[name] = [path._replace(to=bound_name(path.to)) for path in value]
        else:
            bound[name] = bound_name(value) if isinstance(value, str) else value
    return bound


def _distinct(
    subjects: list[dict[str, Any]], rows: list[SubjectValues]
) -> tuple[Sequence[dict[str, Any]], Sequence[SubjectValues]]:
    """Drop subjects that a later one of the same name replaces: the last mount hides earlier ones."""
    places = {tuple(map(subject.get, _KEYS)): place for place, subject in enumerate(subjects)}
    if len(places) == len(subjects):
        return subjects, rows
    kept = sorted(places.values())
    return [subjects[place] for place in kept], [rows[place] for place in kept]


_KEYS = ("name", "mount_point", "path", "pid", "gpu")
"""Fields that identify a subject within its scope."""


def _process_subject(process: ProcessReading) -> dict[str, Any]:
    return {"pid": process.pid, "start_time": process.identity.start_time}


def _holdings(frame: Frame) -> tuple[list[dict[str, Any]], list[SubjectValues]]:
    """Return the GPU memory and GPU shares of the processes: subjects and rows."""
    started = {process.pid: process.identity.start_time for process in frame.processes}
    subjects: list[dict[str, Any]] = []
    rows: list[SubjectValues] = []
    for gpu in frame.gpus:
        for process in gpu.processes or ():
            pid = process.pid
            subjects.append(
                {
                    "pid": pid,
                    "start_time": started.get(pid),
                    "gpu": gpu.device.uuid,
                    "kind": process.kind,
                }
            )
            values = {name: getattr(process, name) for name in _ON_GPU}
            rows.append(({name: value for name, value in values.items() if value is not None}, {}))
    return subjects, rows


def unpack_frame(
    node: Node,
    layouts: Mapping[int, ColumnLayout],
    packed: PackedFrame,
    *,
    slow: PackedFrame | None = None,
    identities: Mapping[int, ProcessIdentity] | None = None,
    jobs: Mapping[str, Job] | None = None,
    shift_us: int = 0,
) -> Frame:
    """Unpack a frame.

    Args:
        node: Node of the frame.
        layouts: Layouts of its blocks, by ID.
        packed: The packed frame.
        slow: The last frame before it with disks, network and processes.
        identities: Known processes by PID.
        jobs: Known jobs of the scheduler on the node, by ID.
        shift_us: Microseconds to add to its time.

    Raises:
        ValueError: A block does not match its layout, or its layout is unknown.
    """
    parts = [_part(layouts, block) for block in packed.blocks]
    if slow is not None and slow is not packed:
        here = {layout.scope for layout, _ in parts}
        parts += [_part(layouts, block) for block in slow.blocks if _scope(layouts, block) not in here]
    by_scope: dict[str, list[tuple[dict[str, Any], Values]]] = {}
    for layout, rows in parts:
        by_scope.setdefault(layout.scope, []).extend(zip(layout.subjects, rows, strict=True))
    own = [(subject, values) for subject, values in by_scope.get("process", []) if "gpu" not in subject]
    holdings = [(subject, values) for subject, values in by_scope.get("process", []) if "gpu" in subject]
    holding = {subject["pid"] for subject, _ in holdings}
    host = by_scope.get("host")
    # Fields that agents of other versions add are dropped.
    return Frame(
        time=(packed.time_us + shift_us) / 1e6,
        monotonic=packed.monotonic_us / 1e6,
        node=node,
        gpus=tuple(_gpu(subject, values, holdings) for subject, values in by_scope.get("gpu", ())),
        host=HostReading(host[0][1]) if host else None,
        disks=tuple(
            DiskReading(str(s["name"]), s.get("kind"), values, s.get("model"))
            for s, values in by_scope.get("disk", ())
        ),
        filesystems=tuple(
            FilesystemReading(
                str(s["mount_point"]),
                str(s.get("device", "")),
                str(s.get("type", "")),
                s.get("disk"),
                s.get("kind"),
                values,
            )
            for s, values in by_scope.get("filesystem", ())
        ),
        network=tuple(
            NetworkReading(str(s["name"]), str(s.get("kind", "")), s.get("up"), values)
            for s, values in by_scope.get("network", ())
        ),
        processes=tuple(_process(subject, values, identities or {}, holding) for subject, values in own),
        cgroups=tuple(CgroupReading(str(s["path"]), values) for s, values in by_scope.get("cgroup", ())),
        jobs=tuple((jobs or {}).values()),
    )


def _scope(layouts: Mapping[int, ColumnLayout], block: ColumnBlock) -> Scope | None:
    layout = layouts.get(block.layout)
    return None if layout is None else layout.scope


def _part(layouts: Mapping[int, ColumnLayout], block: ColumnBlock) -> tuple[ColumnLayout, list[Values]]:
    layout = layouts.get(block.layout)
    if layout is None:
        raise ValueError("a block refers to an unknown layout")
    return layout, unpack_block(layout, block.numbers)


def device_from_subject(subject: Mapping[str, Any]) -> Device:
    """Return the device that a layout's subject describes; fields of the wrong type are dropped.

    Raises:
        ValueError: The subject does not describe a device.
    """
    index, uuid, name = subject.get("index"), subject.get("uuid"), subject.get("name")
    if not _is_whole(index) or not isinstance(uuid, str) or not isinstance(name, str):
        raise ValueError("the subject is not a GPU: its index, UUID or name is missing")
    facts = subject.get("facts")
    known: dict[str, Any] = {
        key: value for key in _DEVICE_TEXTS if isinstance(value := subject.get(key), str)
    }
    known |= {key: value for key in _DEVICE_NUMBERS if _is_whole(value := subject.get(key), lowest=-1)}
    known["has_gpm"] = subject.get("has_gpm") is True
    known |= {name: paths_from_document(subject.get(name)) for name in _PATH_FIELDS}
    known["facts"] = {
        str(key): value
        for key, value in (facts.items() if isinstance(facts, Mapping) else ())
        if _is_quantity(value)
    }
    return Device(index, uuid, name, **known)


_PATH_FIELDS = frozenset({"paths", "adapter_paths"})
_DEVICE_TEXTS = (
    *("bus_id", "serial", "vbios", "architecture", "compute_capability", "parent_uuid"),
    *("board_part_number", "cpu_affinity"),
)
_DEVICE_NUMBERS = (
    *("minor_number", "numa_node", "mig_index", "gpu_instance", "compute_instance"),
    "switch_links",
)


def _is_whole(value: object, lowest: int = 0) -> TypeGuard[int]:
    return type(value) is int and lowest <= value < 1 << 31


def _is_quantity(value: object) -> bool:
    return type(value) in (int, float) and -MAX_VALUE <= value <= MAX_VALUE  # type: ignore[operator]  # false for NaN


def _cached_device(subject: Mapping[str, Any]) -> Device:
    """Like `device_from_subject`, but built once for all frames of a layout."""
    known = _DEVICE_CACHE.get(id(subject))
    if known is None:
        if len(_DEVICE_CACHE) >= _MAX_CACHED_DEVICES:
            _DEVICE_CACHE.clear()
        known = _DEVICE_CACHE[id(subject)] = (subject, device_from_subject(subject))
    return known[1]


_MAX_CACHED_DEVICES = 20_000
_DEVICE_CACHE: dict[int, tuple[Mapping[str, Any], Device]] = {}
"""Devices by the `id()` of their subject; the subject is kept, so that no other object can have the same ID."""


def _gpu(
    subject: dict[str, Any], values: Values, holdings: Iterable[tuple[dict[str, Any], Values]]
) -> GpuReading:
    device = _cached_device(subject)
    processes = [
        GpuProcess(
            int(held["pid"]),
            str(held.get("kind")),
            _whole(amounts.get("gpu_memory_bytes")),
            amounts.get("sm_ratio"),
        )
        for held, amounts in holdings
        if held["gpu"] == device.uuid
    ]
    return GpuReading(device, values, tuple(processes))


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)


def _process(
    subject: dict[str, Any],
    values: Values,
    identities: Mapping[int, ProcessIdentity],
    holding: Collection[int],
) -> ProcessReading:
    pid = int(subject["pid"])
    identity = identities.get(pid) or ProcessIdentity(pid, start_time=subject.get("start_time"))
    return ProcessReading(identity, None, values, on_gpu=pid in holding)
