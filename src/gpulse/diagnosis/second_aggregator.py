"""Aggregate frames into one-second summaries, once: a window slides by dropping old seconds and adding new ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from gpulse.diagnosis.estimates import ContextPower
from gpulse.diagnosis.second_summary import SecondSummary, WeightedMean, WorkerUse
from gpulse.errors import RecordingError
from gpulse.model.counter_rates import ProcessKey, Rates, compute_rates, process_key
from gpulse.model.device import parse_cpu_ranges
from gpulse.model.frame import Frame, GpuReading
from gpulse.model.metric_catalog import Values
from gpulse.model.process import ProcessReading

_EARLY_SECONDS = 0.05
"""Frames that come slightly early still complete a second."""
_GAP_SECONDS = 5.0
_GAP_INTERVALS = 4.0
_MAX_DISORDER_SECONDS = 1.0
_MASK = 2**64 - 1
_MAX_GRAPHICS_AGE_SECONDS = 2.5
"""The graphics metric is ignored when it was read this much earlier than the other GPM metrics."""

AVERAGED_METRICS = (
    "gpu_utilization_ratio",
    "memory_utilization_ratio",
    "memory_used_bytes",
    "power_watts",
    "sm_clock_hertz",
    "graphics_active_ratio",
    "sm_active_ratio",
    "tensor_active_ratio",
    "dram_active_ratio",
    "fp64_active_ratio",
    "fp32_active_ratio",
    "fp16_active_ratio",
    "pcie_rx_bytes_per_second",
    "pcie_tx_bytes_per_second",
    "nvlink_rx_bytes_per_second",
    "nvlink_tx_bytes_per_second",
)
"""GPU metrics whose means the rules use."""
_PCIE_RATES = ("pcie_rx_bytes_per_second", "pcie_tx_bytes_per_second")


class SecondAggregator:
    """Takes frames in order and returns a `SecondSummary` for each GPU whenever a second is complete."""

    def __init__(self, seconds: float = 1.0) -> None:
        self.seconds = seconds
        """Length of a `SecondSummary`: more than one second for recordings of hours."""
        self._frames: list[Frame] = []
        """The frames since the end of the last second, including the one that ended it."""
        self._interval: float | None = None
        """The usual time between two frames, to distinguish a gap from slow sampling."""
        self._context: dict[str, ContextPower] = {}
        """Power draw of each GPU without GPM while it is idle."""

    def feed(self, frame: Frame) -> dict[str, SecondSummary]:
        """Add one frame, and return the seconds that it completes by GPU, usually none.

        Raises:
            RecordingError: The frame is from another machine, or older than the previous one.
        """
        frames = self.add(frame)
        return {} if frames is None else self.summarize(frames)

    def add(self, frame: Frame) -> Sequence[Frame] | None:
        """Add one frame, and return the frames of the second that it completes, for `summarize`; None if it does not.

        Raises:
            RecordingError: The frame is from another machine, or older than the previous one.
        """
        if self._frames and not self._follows(frame):
            return None
        self._frames.append(frame)
        if frame.time - self._frames[0].time < self.seconds - _EARLY_SECONDS:
            return None
        frames, self._frames = self._frames, [frame]
        return None if self._is_gap(frames) else frames

    def summarize(self, frames: Sequence[Frame]) -> dict[str, SecondSummary]:
        """Return the second that these frames make, by GPU. Seconds must come in order, but may come later."""
        begin, frame = frames[0], frames[-1]
        rates = compute_rates(begin, frame, cores=False)
        around = _HostRates.of(frame, rates)
        before = {process_key(process): process for process in begin.processes}
        # Within a second only processes that waited for a disk matter, and usually there are none.
        trees = [
            _GpuProcesses.of(each) if each is frame or any(p.state == "D" for p in each.processes) else None
            for each in frames[1:]
        ]
        return {
            gpu.device.uuid: self._learn(_second(gpu.device.uuid, frames, trees, rates, around, before))
            for gpu in frame.gpus
            if _is_known(gpu)
        }

    def _learn(self, second: SecondSummary) -> SecondSummary:
        if "sm_active_ratio" in second.gpu:
            return second
        context = self._context.setdefault(second.reading.device.uuid, ContextPower())
        return second._replace(context_watts=context.follow(second))

    def _follows(self, frame: Frame) -> bool:
        last = self._frames[-1]
        if frame.node.name != last.node.name:
            raise RecordingError(
                f"the recording mixes frames of two machines, {last.node.name} and {frame.node.name}",
                hint="diagnose the recording of one machine at a time",
            )
        if last.monotonic - frame.monotonic > _MAX_DISORDER_SECONDS:
            raise RecordingError(
                f"the frames are out of order: one is {last.monotonic - frame.monotonic:.1f} s older than the frame before it",
                hint="diagnose recordings one by one if several were joined, or record again",
            )
        if frame.time < last.time - _MAX_DISORDER_SECONDS:  # the clock was set back
            self._frames = []
            return True
        return frame.time > last.time and frame.monotonic > last.monotonic

    def _is_gap(self, frames: list[Frame]) -> bool:
        """Whether frames are missing, so that these frames do not make a second."""
        longest = max(later.time - earlier.time for earlier, later in pairwise(frames))
        usual = self._interval
        if usual is None or longest < usual:
            self._interval = longest
        elif longest <= 2 * usual:
            self._interval = 0.9 * usual + 0.1 * longest
        return longest > _GAP_SECONDS and (usual is None or longest > _GAP_INTERVALS * usual)


def _is_known(gpu: GpuReading) -> bool:
    return bool(gpu.values) or gpu.processes is not None


class _HostRates(NamedTuple):
    """Rates of the host, the busiest disk, NFS mount and network interface: the same for all GPUs."""

    host: Values
    disk: Values
    nfs: Values
    network: tuple[str, Values]

    @classmethod
    def of(cls, frame: Frame, rates: Rates) -> _HostRates:
        return cls(
            host={**(frame.host.values if frame.host is not None else {}), **rates.host},
            disk=max(rates.disks.values(), key=lambda values: values.get("queue_length", 0.0), default={}),
            nfs=max(
                rates.filesystems.values(),
                key=lambda values: values.get("nfs_reads_in_flight", -1.0),
                default={},
            ),
            network=_network(frame, rates),
        )


_Family = tuple[list[ProcessReading], list[ProcessReading]]
"""The processes on a GPU, and their descendants that use no GPU."""


class _GpuProcesses(NamedTuple):
    """The processes of a frame by PID, and those that use no GPU by their parent."""

    processes: dict[int, ProcessReading]
    children: dict[int | None, list[ProcessReading]]

    @classmethod
    def of(cls, frame: Frame) -> _GpuProcesses:
        children: dict[int | None, list[ProcessReading]] = {}
        for process in frame.processes:
            if not process.on_gpu:
                children.setdefault(process.identity.parent_pid, []).append(process)
        return cls({process.identity.pid: process for process in frame.processes}, children)

    def family(self, reading: GpuReading) -> _Family:
        """The processes on a GPU, and their descendants that use no GPU."""
        pids = dict.fromkeys(process.pid for process in reading.processes or ())
        holders = [self.processes[pid] for pid in pids if pid in self.processes]
        workers: list[ProcessReading] = []
        waiting = list(pids)
        while waiting:
            found = [p for p in self.children.get(waiting.pop(), ()) if p.identity.pid not in pids]
            workers += found
            pids.update(dict.fromkeys(process.identity.pid for process in found))
            waiting += [process.identity.pid for process in found]
        return holders, workers


def _second(
    uuid: str,
    frames: Sequence[Frame],
    trees: Sequence[_GpuProcesses | None],
    rates: Rates,
    around: _HostRates,
    before: Mapping[ProcessKey, ProcessReading],
) -> SecondSummary:
    """Summarize one GPU over some frames; the first one only provides the start values of the counters.

    Args:
        uuid: Of the GPU.
        frames: The frames.
        trees: The processes of all frames but the first; None where they do not matter.
        rates: Between the first and the last frame.
        around: Rates of the host.
        before: The processes of the first frame.
    """
    begin, end = frames[0], frames[-1]
    found = [
        (frame, gpu, tree)
        for frame, tree in zip(frames[1:], trees, strict=True)
        for gpu in frame.gpus
        if gpu.device.uuid == uuid
    ]
    pairs = [(frame, gpu) for frame, gpu, _ in found]
    last = pairs[-1][1]
    means, duties = _means(pairs)
    _add_counted_copies(means, rates.gpus.get(uuid, {}))
    families: list[_Family] = [([], []) if tree is None else tree.family(gpu) for _, gpu, tree in found]
    holders, workers = families[-1]
    family = [*holders, *workers]
    percents = {process_key(p): rates.processes.get(process_key(p), {}).get("cpu_percent") for p in holders}
    used = {each: percent / 100 for each, percent in percents.items() if percent is not None}
    known = list(used.values())
    threads = _busiest_threads(holders, before, rates.interval_seconds)
    return SecondSummary(
        start=begin.time,
        end=end.time,
        frames=len(pairs),
        reading=last,
        gpu=means,
        duties=duties,
        reasons=_reasons(gpu for _, gpu in pairs),
        holders=_holders(last, found[-1][2]),
        shares=_shares(gpu for _, gpu in pairs),
        holder_cores=used,
        cores=sum(known) if known else None,
        thread_cores=threads[0] if threads else None,
        feeding_cores=min(sum(known), sum(threads)) if known and threads else sum(known) if known else None,
        workers=_helpers(workers, rates),
        blocked=_blocked(families),
        stuck=_stuck(families),
        run_wait=_largest(rates, family, "run_wait_ratio"),
        read_bytes=_sum(rates, family, "read_bytes_per_second"),
        written_bytes=_written(before, holders, rates),
        resident_bytes=_resident(family),
        throttled=_throttled(family, rates),
        cpus=_cpus(family, end),
        remote_cpus=_remote(last, end, holders, rates),
        host=around.host,
        disk=around.disk,
        nfs=around.nfs,
        network=around.network,
    )


def _means(
    pairs: Sequence[tuple[Frame, GpuReading]],
) -> tuple[dict[str, WeightedMean], tuple[tuple[float, float], ...]]:
    means: dict[str, WeightedMean] = {}
    readings = [gpu.values for _, gpu in pairs]
    for name in AVERAGED_METRICS:
        known = [value for each in readings if (value := each.get(name)) is not None and value >= 0]
        if known:
            means[name] = WeightedMean(sum(known), len(known))
    duties: list[tuple[float, float]] = []
    moved: list[float] = []
    for frame, gpu in pairs:
        traffic = _copies(gpu)
        busy = _kernel_duty(gpu, traffic)
        if busy is not None:
            duties.append((frame.time, min(1.0, max(0.0, busy))))
        if traffic is not None:
            moved.append(traffic)
    if duties:
        means["duty"] = WeightedMean(sum(value for _, value in duties), len(duties))
    if moved:
        means["copies"] = WeightedMean(sum(moved), len(moved))
    return means, tuple(duties)


def _add_counted_copies(means: dict[str, WeightedMean], rates: Values) -> None:
    """Add the PCIe rates of a GPU that counts bytes and reports no rates."""
    if "copies" in means:
        return
    known = {name: rates[name] for name in _PCIE_RATES if name in rates}
    if known:
        means.update({name: WeightedMean(rate, 1) for name, rate in known.items()})
        means["copies"] = WeightedMean(sum(known.values()), 1)


def kernel_duty(reading: GpuReading) -> float | None:
    """Return the fraction of the time in which kernels ran.

    GPM's value is best, but it is costly and can be old. NVML's utilization counts copies as work, so while much is
    copied the SM activity, which is never more than the duty, is the better estimate.
    """
    return _kernel_duty(reading, _copies(reading))


def _kernel_duty(reading: GpuReading, copies: float | None) -> float | None:
    values = reading.values
    active = values.get("graphics_active_ratio")
    read_at = reading.read_at
    held = read_at.get("gpm", 0.0) - read_at["graphics"] if "graphics" in read_at else 0.0
    if active is not None and active >= 0 and held <= _MAX_GRAPHICS_AGE_SECONDS:
        return active
    used, filled = values.get("gpu_utilization_ratio"), values.get("sm_active_ratio")
    if filled is not None and (copies or 0.0) >= 2**30 and filled < 0.2:
        return filled
    return used


def _copies(reading: GpuReading) -> float | None:
    """Return the bytes per second over PCIe in both directions."""
    received, sent = (reading.values.get(name) for name in _PCIE_RATES)
    if received is None:
        return None if sent is None else float(sent)
    return float(received if sent is None else received + sent)


def _reasons(readings: Iterable[GpuReading]) -> dict[int, int]:
    seen: dict[int, int] = {}
    for reading in readings:
        mask = int(reading.values.get("clocks_event_reasons", 0)) & _MASK
        while mask:
            bit = mask & -mask
            seen[bit] = seen.get(bit, 0) + 1
            mask ^= bit
    return seen


def _shares(readings: Iterable[GpuReading]) -> dict[int, WeightedMean]:
    shares: dict[int, WeightedMean] = {}
    for reading in readings:
        for process in reading.processes or ():
            if process.sm_ratio is not None:
                total, count = shares.get(process.pid, (0.0, 0))
                shares[process.pid] = WeightedMean(total + process.sm_ratio, count + 1)
    return shares


def _holders(reading: GpuReading, tree: _GpuProcesses | None) -> frozenset[ProcessKey] | None:
    if reading.processes is None:
        return None
    known = {} if tree is None else tree.processes
    return frozenset(
        process_key(known[process.pid]) if process.pid in known else (process.pid, None)
        for process in reading.processes
    )


def _helpers(workers: Iterable[ProcessReading], rates: Rates) -> tuple[WorkerUse, ...]:
    found = []
    for process in workers:
        percent = rates.processes.get(process_key(process), {}).get("cpu_percent")
        if percent is not None:
            cpu = process.values.get("last_cpu")
            found.append(WorkerUse(process_key(process), percent / 100, None if cpu is None else int(cpu)))
    return tuple(found)


def _blocked(families: Sequence[_Family]) -> float | None:
    if not any(process.state is not None for part in families[-1] for process in part):
        return None
    waiting = sum(process.state == "D" for family in families for part in family for process in part)
    return waiting / len(families)


def _stuck(families: Sequence[_Family]) -> int:
    blocked = [{process.pid for process in holders if process.state == "D"} for holders, _ in families]
    return len(set.intersection(*blocked)) if blocked else 0


def _busiest_threads(
    holders: Iterable[ProcessReading], before: Mapping[ProcessKey, ProcessReading], seconds: float
) -> list[float]:
    """Return the CPU use of the two busiest threads in CPUs, busiest first; empty when threads were not read."""
    grown: list[float] = []
    for process in holders:
        earlier = before.get(process_key(process))
        if earlier is None or not process.threads:
            continue
        used = {thread.tid: thread.cpu_seconds_total for thread in earlier.threads}
        grown += [
            thread.cpu_seconds_total - used[thread.tid] for thread in process.threads if thread.tid in used
        ]
    return sorted((each / seconds for each in grown), reverse=True)[:2] if seconds > 0 else []


def _sum(rates: Rates, processes: Iterable[ProcessReading], name: str) -> float | None:
    values = [rates.processes.get(process_key(process), {}).get(name) for process in processes]
    known = [value for value in values if value is not None]
    return float(sum(known)) if known else None


def _largest(rates: Rates, processes: Iterable[ProcessReading], name: str) -> float | None:
    values = [rates.processes.get(process_key(process), {}).get(name) for process in processes]
    known = [value for value in values if value is not None]
    return float(max(known)) if known else None


def _written(
    before: Mapping[ProcessKey, ProcessReading], holders: Sequence[ProcessReading], rates: Rates
) -> float | None:
    written = _sum(rates, holders, "written_bytes_per_second")
    grown: list[float] = []
    for process in holders:
        earlier, new = before.get(process_key(process)), process.values.get("written_chars_total")
        old = None if earlier is None else earlier.values.get("written_chars_total")
        if old is not None and new is not None and new >= old:
            grown.append(new - old)
    if not grown or rates.interval_seconds <= 0:
        return written
    return max(written or 0.0, sum(grown) / rates.interval_seconds)


def _resident(family: Iterable[ProcessReading]) -> float | None:
    sizes = [process.values.get("host_memory_bytes") for process in family]
    known = [size for size in sizes if size is not None]
    return float(sum(known)) if known else None


def _throttled(family: Iterable[ProcessReading], rates: Rates) -> float | None:
    groups = {process.identity.cgroup for process in family}
    ratios = [
        values["cpu_throttled_ratio"]
        for path, values in rates.cgroups.items()
        if path in groups and "cpu_throttled_ratio" in values
    ]
    return max(ratios, default=None)


def _cpus(family: Sequence[ProcessReading], frame: Frame) -> float | None:
    groups = {process.identity.cgroup for process in family}
    limits = [p.values["cpus_allowed"] for p in family if "cpus_allowed" in p.values]
    limits = [max(limits)] if limits else []
    limits += [
        group.values["cpu_limit_cores"]
        for group in frame.cgroups
        if group.path in groups and "cpu_limit_cores" in group.values
    ]
    if frame.host is not None and "cpus" in frame.host.values:
        limits.append(frame.host.values["cpus"])
    return float(min(limits)) if limits else None


def _remote(
    reading: GpuReading, frame: Frame, holders: Iterable[ProcessReading], rates: Rates
) -> float | None:
    """Return the fraction of the holders' CPU time on CPUs of another NUMA node than the GPU's."""
    node = reading.device.numa_node
    nodes = frame.node.numa_cpus
    if node is None or not 0 <= node < len(nodes) or len(nodes) < 2:
        return None
    near = parse_cpu_ranges(nodes[node])
    used = [
        (
            rates.processes.get(process_key(process), {}).get("cpu_percent", 0.0),
            process.values["last_cpu"] in near,
        )
        for process in holders
        if "last_cpu" in process.values
    ]
    total = sum(percent for percent, _ in used)
    return sum(percent for percent, is_near in used if not is_near) / total if total > 0 else None


def _network(frame: Frame, rates: Rates) -> tuple[str, Values]:
    """Return the interface that uses most of its speed, with `busy_ratio` and `error_ratio` added to its rates."""
    best: tuple[str, Values] = ("", {})
    for link in frame.network:
        values = dict(rates.network.get(link.name, {}))
        speed = link.values.get("link_bits_per_second")
        if not speed or link.kind not in ("ethernet", "infiniband"):
            continue
        rx, tx = values.get("rx_bytes_per_second"), values.get("tx_bytes_per_second")
        if rx is None or tx is None:
            continue
        values["busy_ratio"] = max(rx, tx) * 8 / speed
        packets = sum(values.get(f"{way}_packets_per_second", 0.0) for way in ("rx", "tx"))
        errors = sum(values.get(f"{way}_errors_per_second", 0.0) for way in ("rx", "tx"))
        values["error_ratio"] = errors / packets if packets > 100 else 0.0
        if values["busy_ratio"] > best[1].get("busy_ratio", -1.0):
            best = (link.name, values)
    return best
