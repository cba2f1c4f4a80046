"""The demo machine: one node whose GPUs each replay another recording of real hardware."""

from __future__ import annotations

import gzip
from collections import defaultdict
from collections.abc import Iterable
from importlib.resources import files
from typing import NamedTuple

from gpulse.errors import ClosedError
from gpulse.model.device import Device, Node
from gpulse.model.frame import DiskReading, FilesystemReading, Frame, GpuReading, HostReading, NetworkReading
from gpulse.model.metric import CATALOGUE, Scope, Value, Values
from gpulse.model.process import Owner, ProcessReading
from gpulse.sources.trace import TraceDecoder

_GIB = 1024**3
_PIDS_APART = 10_000


class Scene(NamedTuple):
    """One recording, the stretch of it that is worth watching, and who seems to run it."""

    recording: str
    begin: float
    """Seconds after the recording's start."""
    user: str
    command: str


SCENES = (
    Scene("healthy_gpt", 9.0, "ada", "python3 train_gpt.py --config gpt-1b.yaml"),
    Scene("loader_too_few_workers", 9.0, "grace", "python3 train.py --data /data/imagenet --workers 2"),
    Scene("launch_bound", 9.5, "linus", "python3 rnn_lm.py --hidden 256"),
    Scene("disk_read", 9.0, "grace", "python3 pretrain.py --shards /data/laion --workers 8"),
    Scene("pcie_copies", 5.0, "barbara", "python3 embed.py --shard 3"),
    Scene("gpu_memory_leak", 8.0, "alan", "python3 finetune.py --log-losses"),
    Scene("idle_allocated", 5.0, "katherine", "python3 -m ipykernel_launcher -f kernel-4f1c.json"),
    Scene("idle", 0.0, "", ""),
)


class DemoMachine:
    """A source that composes one believable machine out of recordings, endlessly.

    What it shows depends only on the time since `started`. Each recording plays from its interesting
    stretch to its end and starts over; counters go on growing across the seam.
    """

    def __init__(self, started: float, *, gpus: int = 8) -> None:
        self._started = started
        self._tracks = [_Track(slot, SCENES[slot % len(SCENES)], started) for slot in range(gpus)]
        self._closed = False

    def sample(self, now: float) -> Frame:
        """The machine at one instant.

        Raises:
            ClosedError: The source was closed.
        """
        if self._closed:
            raise ClosedError("this demo machine was closed")
        parts = [track.at(now - self._started) for track in self._tracks]
        return Frame(
            time=now,
            monotonic=now,
            node=Node(
                name="demo",
                driver=parts[0].node.driver,
                cuda="13.0",
                kernel="6.8.0",
                cpu_model="2 x 64-core demo CPU",
            ),
            gpus=tuple(
                gpu._replace(read_at=dict.fromkeys(gpu.read_at, now)) for part in parts for gpu in part.gpus
            ),
            host=_host([part.host for part in parts if part.host is not None]),
            disks=(_disk(part.disks for part in parts),),
            filesystems=_filesystems(),
            network=(_link(part.network for part in parts),),
            processes=tuple(process for part in parts for process in part.processes),
        )

    def close(self) -> None:
        """Nothing is held; later calls of `sample` fail."""
        self._closed = True


class _Track:
    """One recording as one GPU of the machine."""

    def __init__(self, slot: int, scene: Scene, started: float) -> None:
        self._slot = slot
        self._scene = scene
        packed = files("gpulse.sources").joinpath("demo", f"{scene.recording}.jsonl.gz").read_bytes()
        header, *self._lines = gzip.decompress(packed).splitlines()
        self._decoder = TraceDecoder()
        self._decoder.feed(header.decode())
        self._frames: dict[int, Frame] = {}
        first = self._raw(0)
        self._begin = self._index(scene.begin, first.time)
        self._base = self._raw(self._begin)
        self._end = self._raw(self._last_alike(self._base))
        self._later = started - self._base.time
        """How much later the demo runs than the recording did."""
        self._span = self._end.time - self._base.time
        self._phase = (slot // len(SCENES)) * 1.7
        self._device = self._named(first.gpus[0].device)

    def at(self, seconds: float) -> Frame:
        """The recording's frame for this many seconds after the demo's start, made part of the machine."""
        loops, offset = divmod(max(0.0, seconds) + self._phase, self._span)
        frame = self._raw(self._index(self._base.time - self._raw(0).time + offset, self._raw(0).time))
        return self._placed(frame, int(loops))

    def _last_alike(self, base: Frame) -> int:
        """The last line at which the same processes run: near its end a recording shows them leave."""
        pids = _tree(base)
        index = len(self._lines) - 1
        while index > self._begin and _tree(self._raw(index)) != pids:
            index -= 1
        return index

    def _raw(self, index: int) -> Frame:
        frame = self._frames.get(index)
        if frame is None:
            decoded = self._decoder.feed(self._lines[index].decode())
            assert decoded is not None  # noqa: S101  the header was taken off before
            frame = self._frames[index] = decoded
        return frame

    def _index(self, seconds: float, origin: float) -> int:
        """The last line at or before this many seconds; lines are a tenth of a second apart, more or less."""
        index = min(len(self._lines) - 1, max(0, int(seconds * 10)))
        while index > 0 and self._raw(index).time - origin > seconds:
            index -= 1
        while index + 1 < len(self._lines) and self._raw(index + 1).time - origin <= seconds:
            index += 1
        return index

    def _placed(self, frame: Frame, loops: int) -> Frame:
        gpu, base, end = frame.gpus[0], self._base.gpus[0], self._end.gpus[0]
        pids = _tree(frame)
        old = {process.pid: process.values for process in self._base.processes}
        last = {process.pid: process.values for process in self._end.processes}
        reading = GpuReading(
            self._device,
            _grown("gpu", gpu.values, base.values, end.values, loops),
            tuple(process._replace(pid=self._pid(process.pid)) for process in gpu.processes or ()),
            gpu.read_at,
        )
        processes = tuple(
            self._owned(
                process,
                _grown("process", process.values, old.get(process.pid, {}), last.get(process.pid, {}), loops),
            )
            for process in frame.processes
            if process.pid in pids
        )
        host = frame.host
        if host is not None and self._base.host is not None and self._end.host is not None:
            values = _grown("host", host.values, self._base.host.values, self._end.host.values, loops)
            host = HostReading(values, _grown_cores(host, self._base.host, self._end.host, loops))
        disks = tuple(
            d._replace(values=_grown("disk", d.values, b.values, e.values, loops))
            for d, b, e in zip(frame.disks, self._base.disks, self._end.disks, strict=True)
        )
        links = tuple(
            n._replace(values=_grown("network", n.values, b.values, e.values, loops))
            for n, b, e in zip(frame.network, self._base.network, self._end.network, strict=True)
        )
        return frame._replace(gpus=(reading,), host=host, disks=disks, network=links, processes=processes)

    def _pid(self, pid: int) -> int:
        return pid + self._slot * _PIDS_APART

    def _owned(self, process: ProcessReading, values: Values) -> ProcessReading:
        identity = process.identity._replace(
            pid=self._pid(process.pid),
            start_time=None
            if process.identity.start_time is None
            else process.identity.start_time + self._later,
            parent_pid=None
            if process.identity.parent_pid is None
            else self._pid(process.identity.parent_pid),
            command=tuple(self._scene.command.split()),
            owner=Owner(user=self._scene.user),
        )
        values["cpus_allowed"] = 16  # as on the machine of the recordings: each job is pinned to its own CPUs
        values["last_cpu"] = values["last_cpu"] + 16 * self._slot
        threads = tuple(thread._replace(tid=self._pid(thread.tid)) for thread in process.threads)
        return ProcessReading(identity, process.state, values, threads, process.on_gpu)

    def _named(self, device: Device) -> Device:
        return device._replace(
            index=self._slot,
            uuid=f"GPU-de300000-0000-4000-8000-{self._slot:012x}",
            bus_id=f"{self._slot // 8:08x}:{0x1B + 0x10 * (self._slot % 8):02x}:00.0",
            minor_number=self._slot,
            architecture="Hopper",
        )


def _tree(frame: Frame) -> set[int]:
    """The processes that hold the GPU and their descendants."""
    pids = {process.pid for process in frame.processes if process.on_gpu}
    grew = True
    while grew:
        children = {process.pid for process in frame.processes if process.identity.parent_pid in pids}
        grew = not children <= pids
        pids |= children
    return pids


def _grown(scope: Scope, values: Values, base: Values, end: Values, loops: int) -> Values:
    """The values with their counters carried on over as many loops as were played."""
    metrics = CATALOGUE[scope]
    grown: Values = {}
    for name, value in values.items():
        if loops and metrics[name].kind == "counter":
            # Rounded, or the last digit of a sum could run backwards at the seam.
            grown[name] = round(value + loops * max(0, end.get(name, value) - base.get(name, value)), 6)
        else:
            grown[name] = value
    return grown


def _grown_cores(
    host: HostReading, base: HostReading, end: HostReading, loops: int
) -> tuple[tuple[int, ...], ...]:
    return tuple(
        tuple(now + loops * (last - first) for now, first, last in zip(core, old, new, strict=True))
        for core, old, new in zip(host.cores, base.cores, end.cores, strict=True)
    )


def _host(parts: list[HostReading]) -> HostReading:
    """The hosts side by side: their CPUs in a row, everything that can be added added.

    Time in which *every* task waited cannot be added up; the mean stands in for it.
    """
    values: defaultdict[str, Value] = defaultdict(int)
    for part in parts:
        for name, value in part.values.items():
            values[name] += value / len(parts) if "_full_" in name else value
    return HostReading(dict(values), tuple(core for part in parts for core in part.cores))


def _disk(parts: Iterable[tuple[DiskReading, ...]]) -> DiskReading:
    values: defaultdict[str, Value] = defaultdict(int)
    for disks in parts:
        for name, value in disks[0].values.items() if disks else ():
            values[name] += value
    return DiskReading("nvme0n1", "nvme", dict(values), "Demo NVMe 15 TB")


def _filesystems() -> tuple[FilesystemReading, ...]:
    size = 14_000 * _GIB
    values: Values = {"size_bytes": size, "used_bytes": int(size * 0.62), "available_bytes": int(size * 0.38)}
    return (FilesystemReading("/data", "/dev/nvme0n1", "ext4", "nvme0n1", "nvme", values),)


def _link(parts: Iterable[tuple[NetworkReading, ...]]) -> NetworkReading:
    values: defaultdict[str, Value] = defaultdict(int)
    for links in parts:
        for link in links:
            if link.kind == "ethernet":
                for name, value in link.values.items():
                    values[name] += value
    return NetworkReading("eth0", "ethernet", True, {**values, "link_bits_per_second": 100_000_000_000})
