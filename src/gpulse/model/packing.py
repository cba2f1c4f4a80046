"""From frames to packed frames and back."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, TypeGuard

from gpulse.model.bounds import MAX_VALUE, bounded_name, encode_events
from gpulse.model.codec import plain
from gpulse.model.columns import Block, BlockPacker, Layout, PackedFrame, Row, unpack
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
from gpulse.model.job import Job
from gpulse.model.metric import Scope, Values
from gpulse.model.process import GpuProcess, ProcessIdentity, ProcessReading
from gpulse.model.rates import Rates, between, key

SLOW_SECONDS = 5.0
"""How often disks, network, groups and processes are packed."""
_ON_GPU = ("gpu_memory_bytes", "sm_ratio")

_Found = tuple[Block, bool]


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
        """The frame as it travels, and the spellings of the layouts that were not in use before it."""
        quick = Frame(frame.time, frame.monotonic, frame.node, frame.gpus, frame.host)
        rates = Rates(0.0) if self._last is None else between(self._last, quick, cores=False)
        self._last = quick
        found = [(self._gpu, self._pack_gpus(quick, rates))]
        if frame.host is not None:
            found.append((self._host, self._host.pack(({},), ((frame.host.values, rates.host),))))
        slow = self._last_slow
        # A tenth early, so that a tick that comes a little soon is not a whole tick late.
        if slow is None or not 0 <= frame.monotonic - slow.monotonic < 0.9 * self._slow_seconds:
            found += self._pack_slow(frame, Rates(0.0) if slow is None else between(slow, frame, cores=False))
            self._last_slow = frame
        packed = PackedFrame(
            round(frame.time * 1e6),
            round(frame.monotonic * 1e6),
            tuple(block for _, (block, _) in found),
            encode_events(events),
        )
        return packed, [packer.text for packer, (_, is_new) in found if is_new]

    def _pack_gpus(self, frame: Frame, rates: Rates) -> _Found:
        devices = [gpu.device for gpu in frame.gpus]
        if devices != self._devices:
            self._devices, self._subjects = devices, [_named(plain(device)) for device in devices]
        rows = [(gpu.values, rates.gpus.get(gpu.device.uuid, {})) for gpu in frame.gpus]
        return self._gpu.pack(self._subjects, rows)

    def _pack_slow(self, frame: Frame, rates: Rates) -> list[tuple[BlockPacker, _Found]]:
        parts: list[tuple[BlockPacker, list[dict[str, Any]], list[Row]]] = [
            (
                self._disk,
                [_words(disk, ("name", "kind", "model")) for disk in frame.disks],
                [(disk.values, rates.disks.get(disk.name, {})) for disk in frame.disks],
            ),
            (
                self._filesystem,
                [
                    _words(item, ("mount_point", "device", "type", "disk", "kind"))
                    for item in frame.filesystems
                ],
                [(item.values, rates.filesystems.get(item.mount_point, {})) for item in frame.filesystems],
            ),
            (
                self._network,
                [_words(link, ("name", "kind", "up")) for link in frame.network],
                [(link.values, rates.network.get(link.name, {})) for link in frame.network],
            ),
            (
                self._cgroup,
                [_words(group, ("path",)) for group in frame.cgroups],
                [(group.values, rates.cgroups.get(group.path, {})) for group in frame.cgroups],
            ),
            (
                self._process,
                [_who(process) for process in frame.processes],
                [(process.values, rates.processes.get(key(process), {})) for process in frame.processes],
            ),
            (self._on_gpu, *_holdings(frame)),
        ]
        return [(packer, packer.pack(*_distinct(subjects, rows))) for packer, subjects, rows in parts]


def _words(reading: Any, names: Sequence[str]) -> dict[str, Any]:
    return _named({name: getattr(reading, name) for name in names})


def _named(subject: dict[str, Any]) -> dict[str, Any]:
    """A subject with texts that heads take."""
    return {name: bounded_name(value) if isinstance(value, str) else value for name, value in subject.items()}


def _distinct(
    subjects: list[dict[str, Any]], rows: list[Row]
) -> tuple[Sequence[dict[str, Any]], Sequence[Row]]:
    """Subjects and rows without those that another one of the same name follows: what was mounted last is what is seen."""
    places = {tuple(map(subject.get, _KEYS)): place for place, subject in enumerate(subjects)}
    if len(places) == len(subjects):
        return subjects, rows
    kept = sorted(places.values())
    return [subjects[place] for place in kept], [rows[place] for place in kept]


_KEYS = ("name", "mount_point", "path", "pid", "gpu")
"""The fields that name a subject within its scope."""


def _who(process: ProcessReading) -> dict[str, Any]:
    return {"pid": process.pid, "start_time": process.identity.start_time}


def _holdings(frame: Frame) -> tuple[list[dict[str, Any]], list[Row]]:
    """What processes hold on GPUs: whose it is, and how much."""
    started = {process.pid: process.identity.start_time for process in frame.processes}
    subjects: list[dict[str, Any]] = []
    rows: list[Row] = []
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
    layouts: Mapping[int, Layout],
    packed: PackedFrame,
    *,
    slow: PackedFrame | None = None,
    identities: Mapping[int, ProcessIdentity] | None = None,
    jobs: Mapping[str, Job] | None = None,
    shift_us: int = 0,
) -> Frame:
    """The frame that was packed.

    Args:
        node: Whose it is.
        layouts: Those its blocks refer to.
        packed: The frame.
        slow: The last frame before it that had disks, network and processes.
        identities: The processes that are known, by pid.
        jobs: The scheduler's jobs that are known to be on the node, by id.
        shift_us: What to add to its time.

    Raises:
        ValueError: A block is not what its layout says, or its layout is not known.
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
    # What agents of other versions may add is not handed on.
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


def _scope(layouts: Mapping[int, Layout], block: Block) -> Scope | None:
    layout = layouts.get(block.layout)
    return None if layout is None else layout.scope


def _part(layouts: Mapping[int, Layout], block: Block) -> tuple[Layout, list[Values]]:
    layout = layouts.get(block.layout)
    if layout is None:
        raise ValueError("a block of a layout that was never told")
    return layout, unpack(layout, block.numbers)


def device_of(subject: Mapping[str, Any]) -> Device:
    """The device that a layout's subject describes; what of it is of the wrong kind is left out.

    Raises:
        ValueError: It describes none.
    """
    index, uuid, name = subject.get("index"), subject.get("uuid"), subject.get("name")
    if not _is_whole(index) or not isinstance(uuid, str) or not isinstance(name, str):
        raise ValueError("it is not a GPU: its index, UUID or name is missing")
    facts = subject.get("facts")
    known: dict[str, Any] = {
        key: value for key in _DEVICE_TEXTS if isinstance(value := subject.get(key), str)
    }
    known |= {key: value for key in _DEVICE_NUMBERS if _is_whole(value := subject.get(key), lowest=-1)}
    known["has_gpm"] = subject.get("has_gpm") is True
    known["facts"] = {
        str(key): value
        for key, value in (facts.items() if isinstance(facts, Mapping) else ())
        if _is_quantity(value)
    }
    return Device(index, uuid, name, **known)


_DEVICE_TEXTS = ("bus_id", "serial", "vbios", "architecture", "compute_capability", "parent_uuid")
_DEVICE_NUMBERS = ("minor_number", "numa_node", "mig_index", "gpu_instance", "compute_instance")


def _is_whole(value: object, lowest: int = 0) -> TypeGuard[int]:
    return type(value) is int and lowest <= value < 1 << 31


def _is_quantity(value: object) -> bool:
    return type(value) in (int, float) and -MAX_VALUE <= value <= MAX_VALUE  # type: ignore[operator]  # NaN is not


def _known_device(subject: Mapping[str, Any]) -> Device:
    """The same, put together once for all frames of a layout."""
    known = _DEVICES.get(id(subject))
    if known is None:
        if len(_DEVICES) >= _MOST_DEVICES:
            _DEVICES.clear()
        known = _DEVICES[id(subject)] = (subject, device_of(subject))
    return known[1]


_MOST_DEVICES = 20_000
_DEVICES: dict[int, tuple[Mapping[str, Any], Device]] = {}
"""By the identity of a layout's subject, which is kept, so that no other can have it."""


def _gpu(
    subject: dict[str, Any], values: Values, holdings: Iterable[tuple[dict[str, Any], Values]]
) -> GpuReading:
    device = _known_device(subject)
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
