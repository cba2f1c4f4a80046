"""Demo machine: one node with invented hardware, whose GPUs each play workloads, which are recordings of real hardware."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from gpulse.errors import ClosedError
from gpulse.model.device import Device, DevicePath, Node, PcieLevel
from gpulse.model.frame import DiskReading, FilesystemReading, Frame, GpuReading, HostReading, NetworkReading
from gpulse.model.harvest_status import STATE_CODES, is_harvest_job
from gpulse.model.job import Job
from gpulse.model.metric_catalog import CATALOG, Scope, Value, Values
from gpulse.model.process import GpuProcess, Owner, ProcessIdentity, ProcessReading
from gpulse.sources.demo_playback import (
    ACTIVITY_METRICS,
    NO_OFFSETS,
    CounterOffsets,
    add_core_growth,
    add_growth,
    compute_core_growth,
    host_values,
    load_loop,
    sum_values,
)

_PCIE_MACHINE = 6
"""Number of the machine with PCIe GPUs, in every group of `_MACHINES_PER_GROUP`."""
_MACHINES_PER_GROUP = 8
_LINKS = 18
_LINK_BYTES_PER_SECOND = 26_562_000_000
_CPUS_PER_NODE = 64
_BRIDGED = 2
"""GPUs that share a PCIe switch."""
_HEALTHY: Values = {
    "ecc_enabled": 1,
    "ecc_corrected_errors_total": 0,
    "ecc_uncorrected_errors_total": 0,
    "ecc_corrected_errors_lifetime_total": 0,
    "ecc_uncorrected_errors_lifetime_total": 0,
    "remapped_rows_corrected": 0,
    "remapped_rows_uncorrected": 0,
    "remapped_rows_pending": 0,
    "remapped_rows_failed": 0,
    "mig_enabled": 0,
    "persistence_enabled": 1,
}
_NVLINK: Values = {
    "nvlink_links": _LINKS,
    "nvlink_links_active": _LINKS,
    "nvlink_link_bytes_per_second": _LINK_BYTES_PER_SECOND,
    "nvlink_errors_total": 0,
}
REPAIRED: Values = {
    "ecc_corrected_errors_lifetime_total": 14,
    "ecc_uncorrected_errors_lifetime_total": 1,
    "remapped_rows_corrected": 2,
    "remapped_rows_uncorrected": 1,
}
"""Counters of a GPU that had a memory error and replaced the faulty rows."""


class DemoHardware(NamedTuple):
    """The invented part of one GPU."""

    fields: dict[str, Any]
    """Fields of its `Device`."""
    values: Values
    """Readings that do not change."""


def make_hardware(slot: int, gpus: int, number: int) -> DemoHardware:
    """Return the invented part of a GPU, which is always the same.

    Args:
        slot: Index of the GPU.
        gpus: Number of GPUs of its machine.
        number: Number of the machine.
    """
    is_pcie = number % _MACHINES_PER_GROUP == _PCIE_MACHINE
    half = max(1, gpus // 2)
    socket = min(slot // half, 1)
    others = [other for other in range(gpus) if other != slot]
    fields: dict[str, Any] = {
        "serial": f"165{number:04d}{slot:03d}377",
        "vbios": "96.00.BC.00.01",
        "board_part_number": "900-21010-0040-000" if is_pcie else "692-2G520-0282-000",
        "numa_node": socket,
        "cpu_affinity": f"{_CPUS_PER_NODE * socket}-{_CPUS_PER_NODE * (socket + 1) - 1}",
        "paths": tuple(
            DevicePath(
                demo_uuid(other, number),
                _pcie_level(slot, other, half, is_pcie=is_pcie),
                None if is_pcie else 0,
            )
            for other in others
        ),
    }
    if is_pcie:
        fields["name"] = "NVIDIA H200 NVL"
        adapters: list[tuple[str, PcieLevel]] = [
            ("mlx5_0", "NODE" if socket == 0 else "SYS"),
            ("mlx5_1", "NODE" if socket == 1 else "SYS"),
        ]
        if slot // _BRIDGED in (0, half // _BRIDGED):  # the pair of GPUs on the adapter's host bridge
            adapters[socket] = (adapters[socket][0], "PHB")
    else:
        fields["switch_links"] = _LINKS
        adapters = [
            (
                f"mlx5_{other}",
                "PIX" if other == slot else "NODE" if min(other // half, 1) == socket else "SYS",
            )
            for other in range(gpus)
        ]
    fields["adapter_paths"] = tuple(DevicePath(name, level) for name, level in adapters)
    return DemoHardware(fields, _HEALTHY if is_pcie else {**_HEALTHY, **_NVLINK})


def _pcie_level(slot: int, other: int, half: int, *, is_pcie: bool) -> PcieLevel:
    if min(slot // half, 1) != min(other // half, 1):
        return "SYS"
    if not is_pcie:
        return "NODE"
    return "PIX" if slot // _BRIDGED == other // _BRIDGED else "PHB"


def demo_uuid(slot: int, number: int) -> str:
    """Return the UUID of a GPU of the demo."""
    return f"GPU-de300000-{number:04x}-4000-8000-{slot:012x}"


_LOADS = ("load1", "load5", "load15")
_LEAK_RATIO = 0.97
"""Memory in use at which a leaking process fails."""
_EXCHANGE_SECONDS = 2.4
"""Rhythm in which the nodes of a job exchange their results."""
_EXCHANGE_DEPTH = 0.4
"""How much the traffic varies with that rhythm."""
_PACKET_BYTES = 8900
_PIDS_APART = 10_000
_PIDS_BETWEEN_PERIODS = 517
_PIDS_BETWEEN_RESTARTS = 11
_FAULTY_MEMORY: Values = {
    "ecc_uncorrected_errors_total": 1,
    "remapped_rows_pending": 1,
}
"""Counters after an uncorrectable error, until the GPU is reset."""


class DemoWorkload(NamedTuple):
    """A simulated workload: a recording, where its interesting part begins, and who seems to run it."""

    recording: str
    begin: float
    """Seconds after the recording's start."""
    user: str
    command: str
    job: str | None = None
    container: str | None = None
    pod: str | None = None
    neighbour: tuple[str, str] | None = None
    """User and command of the second process where two share the GPU; None: those of the first."""
    leak_seconds: float | None = None
    """Its memory grows for this long until it is full; the process then fails, and is started again."""
    link_bytes_per_second: float = 0.0
    """Traffic with other nodes, in both directions. The recorded workloads ran on one GPU each."""
    nvlink_bytes_per_second: float = 0.0
    """Traffic with other GPUs of the node at full utilization, in both directions."""
    max_activity_ratio: float = 1.0
    """Upper limit of its utilization and SM activity: a service that hardly anybody uses."""

    def restarts(self, seconds: float) -> int:
        """Return how often its process has failed and was started again this long after it began."""
        return 0 if self.leak_seconds is None else int(max(0.0, seconds) // self.leak_seconds)


class WorkloadPeriod(NamedTuple):
    """A workload that a GPU plays from some time on, until its next period begins."""

    scene: DemoWorkload
    begin: float = 0.0
    """Seconds after the demo's start; before it when negative."""
    phase: float = 0.0
    """Offset into the recording in seconds, so that two GPUs with the same recording differ."""
    xid: int | None = None
    """An Xid error that the driver reports at its start; no recording has one."""


class GpuPart(NamedTuple):
    """One GPU and its part of the machine."""

    driver: str | None
    gpu: GpuReading
    host: HostReading | None
    disk: Values
    link: Values
    processes: tuple[ProcessReading, ...]


class GpuTimeline:
    """One GPU of the machine with its workload periods, one after the other."""

    def __init__(
        self,
        slot: int,
        periods: Sequence[WorkloadPeriod],
        started: float,
        number: int,
        *,
        inside: bool,
        gpus: int = 1,
    ) -> None:
        hardware = make_hardware(slot, gpus, number)
        self._periods = tuple(periods)
        self._is_harvested = any(is_harvest_job(period.scene.job) for period in periods)
        self._players: list[_PeriodPlayer] = []
        for place, period in enumerate(periods):
            player = _PeriodPlayer(slot, place, period, started, number, inside=inside, hardware=hardware)
            if self._players:
                before = self._players[-1].at(period.begin)
                player.offsets = _compute_offsets(before, player.at(period.begin))
            self._players.append(player)

    def at(self, seconds: float, *, whole: bool, over: float | None) -> GpuPart:
        """Return the GPU this many seconds after the demo's start; `over`: averaged over this many seconds up to then."""
        player = self._players[0]
        for later in self._players[1:]:
            if later.period.begin <= seconds:
                player = later
        part = player.at(seconds, whole=whole, over=over)
        if not self._is_harvested:
            return part
        gpu = part.gpu
        return part._replace(gpu=gpu._replace(values=gpu.values | _harvest_values(self._periods, seconds)))


class _PeriodPlayer:
    """Plays one workload period of one GPU as part of the machine."""

    def __init__(
        self,
        slot: int,
        place: int,
        period: WorkloadPeriod,
        started: float,
        number: int,
        *,
        inside: bool,
        hardware: DemoHardware,
    ) -> None:
        self.period = period
        self._constant = hardware.values | ({} if period.xid is None else REPAIRED)
        self._inside = inside
        self.offsets = NO_OFFSETS
        self._slot = slot
        self._more_pids = slot * _PIDS_APART + place * _PIDS_BETWEEN_PERIODS
        self._loop = load_loop(period.scene.recording, period.scene.begin)
        self._began = started + period.begin
        self._later = self._began - self._loop.base.time
        """Time by which the demo runs later than the recording."""
        device = _rename_device(self._loop.first.gpus[0].device, slot, number)
        self._device = device._replace(**hardware.fields)
        self._identities: dict[int, tuple[ProcessIdentity, ProcessIdentity]] = {}
        """By recorded PID: the recorded identity and the simulated one."""
        self._restarts = 0
        """How often the process of these identities has failed and was started again."""

    def at(self, seconds: float, *, whole: bool = True, over: float | None = None) -> GpuPart:
        """Return the GPU and its part of the machine this many seconds after the demo's start."""
        scene, elapsed = self.period.scene, max(0.0, seconds - self.period.begin)
        moment = self._loop.at(elapsed + self.period.phase)
        frame, loops, pids = moment.frame, moment.loops, moment.pids
        played, offsets = self._loop, self.offsets
        gpu, host = frame.gpus[0], frame.host
        values = add_growth(gpu.values, played.gpu, loops, offsets.gpu) | self._constant
        if over is not None:
            values |= played.means(moment, over)
        values |= self._simulated_values(values, seconds, elapsed)
        if host is not None:
            host = HostReading(
                add_growth(host.values, played.host, loops, offsets.host)
                | dict.fromkeys(_LOADS, played.load),
                add_core_growth(host.cores, played.cores, loops, offsets.cores) if self._inside else (),
            )
        if not whole:
            reading = GpuReading(self._device, values, None, gpu.read_at)
            return GpuPart(frame.node.driver, reading, host, {}, {}, ())
        disk = add_growth(frame.disks[0].values, played.disks[0], loops, offsets.disk) if frame.disks else {}
        links = [
            add_growth(link.values, growth, loops)
            for link, growth in zip(frame.network, played.links, strict=True)
            if link.kind == "ethernet"
        ]
        links.append(_exchange(scene.link_bytes_per_second, self.period.begin, elapsed))
        restarts = scene.restarts(elapsed)
        loops -= (
            int((restarts * (scene.leak_seconds or 0.0) + self.period.phase) // played.span)
            if restarts
            else 0
        )
        processes = tuple(
            self._owned(
                process, add_growth(process.values, played.processes.get(process.pid, {}), loops), restarts
            )
            for process in frame.processes
            if process.pid in pids
        )
        held = tuple(self._holding(process, values, restarts) for process in gpu.processes or ())
        reading = GpuReading(self._device, values, held, gpu.read_at)
        return GpuPart(frame.node.driver, reading, host, disk, sum_values([*links, offsets.link]), processes)

    def _simulated_values(self, values: Values, seconds: float, elapsed: float) -> Values:
        """Return the readings of the GPU that no recording has."""
        scene = self.period.scene
        made: dict[str, Value] = {}
        if scene.max_activity_ratio < 1:
            made |= {
                name: min(scene.max_activity_ratio, values[name])
                for name in ACTIVITY_METRICS
                if name in values
            }
        if self.period.xid is not None:
            made |= {
                **_FAULTY_MEMORY,
                "xid_errors_total": 1,
                "xid_last_code": self.period.xid,
                "xid_last_timestamp_seconds": self._began,
            }
        if scene.leak_seconds is not None:
            low = self._loop.base.gpus[0].values["memory_used_bytes"]
            high = _LEAK_RATIO * self._device.facts["memory_total_bytes"]
            made["memory_used_bytes"] = int(low + (high - low) * (elapsed / scene.leak_seconds % 1))
        if scene.nvlink_bytes_per_second:
            used = values.get("gpu_utilization_ratio", 0.0)
            traffic = int(
                scene.nvlink_bytes_per_second * used * (1 + _EXCHANGE_DEPTH * _exchange_phase(seconds))
            )
            made |= {"nvlink_rx_bytes_per_second": traffic, "nvlink_tx_bytes_per_second": traffic}
        return made

    def _holding(self, process: GpuProcess, values: Values, restarts: int) -> GpuProcess:
        """Return a process on the GPU, with its part of the GPU's memory and utilization."""
        memory, used = process.gpu_memory_bytes, values.get("gpu_utilization_ratio")
        if self.period.scene.leak_seconds is not None:
            memory = int(values["memory_used_bytes"]) - self._loop.reserved_bytes
        share = self._loop.sm_shares.get(process.pid)
        return process._replace(
            pid=self._pid(process.pid, restarts),
            gpu_memory_bytes=memory,
            sm_ratio=None if used is None or share is None else round(share * used, 4),
        )

    def _pid(self, pid: int, restarts: int) -> int:
        return pid + self._more_pids + restarts * _PIDS_BETWEEN_RESTARTS % _PIDS_BETWEEN_PERIODS

    def _owned(self, process: ProcessReading, values: Values, restarts: int) -> ProcessReading:
        if restarts != self._restarts:
            self._restarts = restarts
            self._identities.clear()
        recorded, identity = self._identities.get(process.pid, (None, None))
        if identity is None or recorded != process.identity:
            identity = self._identity(process.identity, restarts)
            self._identities[process.pid] = (process.identity, identity)
        values["cpus_allowed"] = 16  # as on the recorded machine: each workload is pinned to its own CPUs
        values["last_cpu"] = values["last_cpu"] + 16 * self._slot
        threads = (
            tuple(thread._replace(tid=self._pid(thread.tid, restarts)) for thread in process.threads)
            if self._inside
            else ()
        )
        return ProcessReading(identity, process.state, values, threads, process.on_gpu)

    def _identity(self, recorded: ProcessIdentity, restarts: int) -> ProcessIdentity:
        scene, user, command, parent = (
            self.period.scene,
            self.period.scene.user,
            self.period.scene.command,
            recorded.parent_pid,
        )
        if scene.neighbour is not None and recorded.pid in self._loop.holders[1:]:
            user, command = scene.neighbour
            parent = self._loop.base.processes[0].identity.parent_pid  # not a child of the first process
        later = self._later
        if (
            restarts and scene.leak_seconds and recorded.start_time is not None
        ):  # starts when the one before fails
            later = self._began + restarts * scene.leak_seconds - recorded.start_time
        return recorded._replace(
            pid=self._pid(recorded.pid, restarts),
            start_time=None if recorded.start_time is None else recorded.start_time + later,
            parent_pid=None if parent is None else self._pid(parent, restarts),
            command=tuple(command.split()),
            owner=Owner(user=user, job=scene.job, container=scene.container, pod=scene.pod),
        )


def _exchange_phase(seconds: float) -> float:
    """Return from -1 to 1 how much the nodes of a job exchange at a time of the demo, the same for all of them."""
    return math.cos(2 * math.pi * seconds / _EXCHANGE_SECONDS)


def _exchange(bytes_per_second: float, begin: float, elapsed: float) -> Values:
    """Return the counters of a link of a job that exchanges results with another node; they follow its rhythm."""
    if not bytes_per_second:
        return {}
    turn = 2 * math.pi / _EXCHANGE_SECONDS
    ripple = _EXCHANGE_DEPTH / turn * (math.sin(turn * (begin + elapsed)) - math.sin(turn * begin))
    moved = round(bytes_per_second * (elapsed + ripple))
    packets = moved // _PACKET_BYTES
    return {
        "rx_bytes_total": moved,
        "tx_bytes_total": moved,
        "rx_packets_total": packets,
        "tx_packets_total": packets,
    }


def _harvest_values(periods: Sequence[WorkloadPeriod], seconds: float) -> Values:
    """Return what a harvest would publish about a GPU that played these periods up to some time."""
    harvested, preemptions, state = 0.0, 0, STATE_CODES["waiting"]
    for place, period in enumerate(periods):
        if place and period.begin > seconds:
            break
        end = periods[place + 1].begin if place + 1 < len(periods) else seconds
        state = STATE_CODES["people" if period.scene.user else "waiting"]
        if is_harvest_job(period.scene.job):
            state = STATE_CODES["harvested"]
            harvested += max(0.0, min(end, seconds) - period.begin)
            preemptions += end < seconds
    return {
        "harvest_state": state,
        "harvested_seconds_total": harvested,
        "harvest_preemptions_total": preemptions,
    }


def _rename_device(device: Device, slot: int, number: int) -> Device:
    return device._replace(
        index=slot,
        uuid=demo_uuid(slot, number),
        bus_id=f"{slot // 8:08x}:{0x1B + 0x10 * (slot % 8):02x}:00.0",
        minor_number=slot,
        architecture="Hopper",
    )


def _compute_offsets(before: GpuPart, after: GpuPart) -> CounterOffsets:
    """Return the offsets that let the counters of a period continue from those of the previous one."""
    return CounterOffsets(
        gpu=_difference("gpu", after.gpu.values, before.gpu.values),
        host=_difference("host", host_values(after.host), host_values(before.host)),
        disk=_difference("disk", after.disk, before.disk),
        link=_difference("network", after.link, before.link),
        cores=compute_core_growth(after.host.cores, before.host.cores) if after.host and before.host else (),
    )


def _difference(scope: Scope, values: Values, wanted: Values) -> Values:
    metrics = CATALOG[scope]
    return {
        name: wanted.get(name, value) - value
        for name, value in values.items()
        if metrics[name].kind == "counter"
    }


_GIB = 1024**3
_JOB_PREFIX = "slurm:"
_NODE_BYTES_PER_SECOND = 20_000
"""Traffic of a node without its workloads: logins, file servers, monitoring."""
_MAX_PAST_SECONDS = 7 * 86_400
"""Simulated machines have been running for this long when the demo starts."""
_DISK_USE_RATIOS = (0.62, 0.41, 0.55, 0.93, 0.78, 0.34, 0.17, 0.69)
"""Used fraction of the file system, by machine number."""


DEMO_WORKLOADS = (
    DemoWorkload("healthy_gpt", 11.0, "ada", "python3 train_gpt.py --config gpt-1b.yaml"),
    DemoWorkload(
        "loader_too_few_workers", 9.0, "grace", "python3 train.py --data /data/imagenet --workers 2"
    ),
    DemoWorkload("launch_bound", 9.5, "linus", "python3 rnn_lm.py --hidden 256"),
    DemoWorkload("disk_read", 10.5, "grace", "python3 pretrain.py --shards /data/laion --workers 8"),
    DemoWorkload("pcie_copies", 6.5, "barbara", "python3 embed.py --shard 3"),
    DemoWorkload("gpu_memory_leak", 14.0, "alan", "python3 finetune.py --log-losses", leak_seconds=600.0),
    DemoWorkload("idle_allocated", 5.0, "katherine", "python3 -m ipykernel_launcher -f kernel-4f1c.json"),
    DemoWorkload("idle", 3.0, "", ""),
)
IDLE_WORKLOAD = DEMO_WORKLOADS[-1]
"""An unused GPU."""


class DemoMachine:
    """Source that composes one realistic machine out of recordings that play in a loop.

    Its frames depend only on the time since `started`. Each recording plays from its interesting part to its
    end and starts over; counters keep growing across loops and from one workload period to the next.
    """

    def __init__(
        self,
        started: float,
        *,
        gpus: int = 8,
        slots: Sequence[Sequence[WorkloadPeriod]] | None = None,
        name: str = "demo",
        number: int = 0,
        inside: bool = True,
    ) -> None:
        """Compose the machine.

        Args:
            started: When the demo starts, in epoch seconds.
            gpus: Number of GPUs, which play the workloads above in turn.
            slots: The workload periods of each GPU, instead of the default ones.
            name: Name of the node.
            number: Machine number; different numbers have different GPU UUIDs.
            inside: Include single CPUs and threads, which are not stored.
        """
        self._started = started
        self._name = name
        self._number = number
        if slots is None:
            slots = [_default_periods(slot) for slot in range(gpus)]
        self._gpus = len(slots)
        # A machine without GPUs still has CPUs.
        self._tracks = [
            GpuTimeline(slot, periods, started, number, inside=inside, gpus=len(slots))
            for slot, periods in enumerate(slots or [[WorkloadPeriod(IDLE_WORKLOAD)]])
        ]
        self._closed = False

    def sample(self, now: float) -> Frame:
        """Return the frame of this time.

        Raises:
            ClosedError: The source was closed.
        """
        return self.sample_over(now, None)

    def sample_over(self, now: float, over: float | None) -> Frame:
        """Return the frame of this time, with the GPUs averaged over some seconds up to then.

        Raises:
            ClosedError: The source was closed.
        """
        parts = self._parts(now, whole=True, over=over)
        return self._quick(now, parts)._replace(
            disks=(
                DiskReading("nvme0n1", "nvme", sum_values([part.disk for part in parts]), "Demo NVMe 15 TB"),
            ),
            filesystems=_build_filesystems(_DISK_USE_RATIOS[self._number % len(_DISK_USE_RATIOS)]),
            network=(_build_link([part.link for part in parts], now - self._started),),
            processes=tuple(process for part in parts for process in part.processes),
            jobs=tuple(_build_jobs(parts[: self._gpus])),
        )

    def glance(self, now: float, *, over: float | None = None) -> Frame:
        """Return a frame with only the GPUs and the host, which takes much less work.

        Args:
            now: Epoch seconds.
            over: Average the GPUs over this many seconds up to then.

        Raises:
            ClosedError: The source was closed.
        """
        return self._quick(now, self._parts(now, whole=False, over=over))

    def _parts(self, now: float, *, whole: bool, over: float | None) -> list[GpuPart]:
        if self._closed:
            raise ClosedError("the demo machine was closed")
        return [track.at(now - self._started, whole=whole, over=over) for track in self._tracks]

    def _quick(self, now: float, parts: Sequence[GpuPart]) -> Frame:
        return Frame(
            time=now,
            monotonic=now,
            node=Node(
                name=self._name,
                driver=parts[0].driver,
                cuda="13.0",
                kernel="6.8.0",
                cpu_model=f"2 x {8 * len(self._tracks)}-core demo CPU",
            ),
            gpus=tuple(
                part.gpu._replace(read_at=dict.fromkeys(part.gpu.read_at, now))
                for part in parts[: self._gpus]
            ),
            host=_merge_hosts([part.host for part in parts if part.host is not None]),
        )

    def close(self) -> None:
        """Close the source; later calls of `sample` fail."""
        self._closed = True


def _build_jobs(parts: Iterable[GpuPart]) -> Iterable[Job]:
    """Return the scheduler's jobs, which are allocated the GPUs that they use."""
    found: dict[str, Job] = {}
    for part in parts:
        for owner in {process.identity.owner for process in part.processes}:
            if owner.job is not None and owner.job.startswith(_JOB_PREFIX):
                before = found.get(owner.job, Job(owner.job, owner.user, partition="gpu", source="devices"))
                found[owner.job] = before._replace(gpus=(*before.gpus, part.gpu.device.uuid))
    return sorted(found.values(), key=lambda job: job.id)


def _default_periods(slot: int) -> tuple[WorkloadPeriod, ...]:
    return (
        WorkloadPeriod(DEMO_WORKLOADS[slot % len(DEMO_WORKLOADS)], phase=(slot // len(DEMO_WORKLOADS)) * 1.7),
    )


def _merge_hosts(parts: list[HostReading]) -> HostReading:
    """Merge the hosts of the recordings: concatenate their CPUs and add up their values.

    "Full" pressure, the time in which every task waited, cannot be added up; its mean is used instead.
    """
    values: dict[str, Value] = {}
    for part in parts:
        for name, value in part.values.items():
            values[name] = values.get(name, 0) + (value / len(parts) if "_full_" in name else value)
    return HostReading(values, tuple(core for part in parts for core in part.cores))


def _build_filesystems(used: float) -> tuple[FilesystemReading, ...]:
    size = 14_000 * _GIB
    values: Values = {
        "size_bytes": size,
        "used_bytes": int(size * used),
        "available_bytes": int(size * (1 - used)),
    }
    return (FilesystemReading("/data", "/dev/nvme0n1", "ext4", "nvme0n1", "nvme", values),)


def _build_link(parts: Sequence[Values], seconds: float) -> NetworkReading:
    """Return the network interface with the traffic of all workloads and of the node itself."""
    moved = round(_NODE_BYTES_PER_SECOND * (seconds + _MAX_PAST_SECONDS))
    own: Values = {"rx_bytes_total": moved, "tx_bytes_total": moved}
    values = {**sum_values([*parts, own]), "link_bits_per_second": 100_000_000_000}
    return NetworkReading("eth0", "ethernet", True, values)
