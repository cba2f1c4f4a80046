"""Frames digested second by second, once: a window slides by dropping old seconds and adding new ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from gpulse.diagnosis.seconds import MEANS, Helper, Second, Sum, copies, duty
from gpulse.errors import RecordingError
from gpulse.model.device import cpus_in
from gpulse.model.frame import Frame, GpuReading
from gpulse.model.metric import Values
from gpulse.model.process import ProcessReading
from gpulse.model.rates import ProcessKey, Rates, between, key

_EARLY_SECONDS = 0.05
"""So that ticks that come a moment early still make a second."""
_GAP_SECONDS = 5.0
_GAP_INTERVALS = 4.0
_DISORDER_SECONDS = 1.0
_MASK = 2**64 - 1


class Digest:
    """Takes frames in order and gives back a `Second` for each GPU whenever one is over."""

    def __init__(self, seconds: float = 1.0) -> None:
        self.seconds = seconds
        """How long a `Second` shall be: more than one where hours are digested."""
        self._frames: list[Frame] = []
        """The frames since the last second ended, with the one that ended it."""
        self._interval: float | None = None
        """The usual time between two frames, so that a gap can be told from a slow pace."""

    def feed(self, frame: Frame) -> dict[str, Second]:
        """Take one frame; the seconds by GPU that it completes, mostly none.

        Raises:
            RecordingError: The frame is of another machine, or older than the one before.
        """
        if self._frames and not self._follows(frame):
            return {}
        self._frames.append(frame)
        begin = self._frames[0]
        if frame.time - begin.time < self.seconds - _EARLY_SECONDS:
            return {}
        frames, self._frames = self._frames, [frame]
        if self._is_gap(frames):
            return {}
        rates = between(begin, frame, cores=False)
        around = _Surroundings.of(frame, rates)
        # Between its ends a second asks only who waited for a disk, and mostly nobody did.
        trees = [
            _Tree.of(each) if each is frame or any(p.state == "D" for p in each.processes) else None
            for each in frames[1:]
        ]
        return {
            gpu.device.uuid: _second(gpu.device.uuid, frames, trees, rates, around)
            for gpu in frame.gpus
            if _is_known(gpu)
        }

    def _follows(self, frame: Frame) -> bool:
        last = self._frames[-1]
        if frame.node.name != last.node.name:
            raise RecordingError(
                f"frames of two machines, {last.node.name} and {frame.node.name}, are mixed up",
                hint="diagnose one recording of one machine at a time",
            )
        if last.monotonic - frame.monotonic > _DISORDER_SECONDS:
            raise RecordingError(
                f"a frame is {last.monotonic - frame.monotonic:.1f} s older than the one before it",
                hint="the recording is out of order or several were joined; record again",
            )
        if frame.time < last.time - _DISORDER_SECONDS:  # somebody set the clock
            self._frames = []
            return True
        return frame.time > last.time and frame.monotonic > last.monotonic

    def _is_gap(self, frames: list[Frame]) -> bool:
        """Whether something is missing in there, so that it is no second."""
        longest = max(later.time - earlier.time for earlier, later in pairwise(frames))
        usual = self._interval
        if usual is None or longest < usual:
            self._interval = longest
        elif longest <= 2 * usual:
            self._interval = 0.9 * usual + 0.1 * longest
        return longest > _GAP_SECONDS and (usual is None or longest > _GAP_INTERVALS * usual)


def _is_known(gpu: GpuReading) -> bool:
    return bool(gpu.values) or gpu.processes is not None


class _Surroundings(NamedTuple):
    """What all GPUs of a machine have in common."""

    host: Values
    disk: Values
    nfs: Values
    network: tuple[str, Values]

    @classmethod
    def of(cls, frame: Frame, rates: Rates) -> _Surroundings:
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
"""The processes on a GPU, and their descendants that are on none."""


class _Tree(NamedTuple):
    """The processes of a frame by pid, and those on no GPU by their parent."""

    processes: dict[int, ProcessReading]
    children: dict[int | None, list[ProcessReading]]

    @classmethod
    def of(cls, frame: Frame) -> _Tree:
        children: dict[int | None, list[ProcessReading]] = {}
        for process in frame.processes:
            if not process.on_gpu:
                children.setdefault(process.identity.parent_pid, []).append(process)
        return cls({process.identity.pid: process for process in frame.processes}, children)

    def family(self, reading: GpuReading) -> _Family:
        """The processes on a GPU, and their descendants that are on none."""
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
    uuid: str, frames: Sequence[Frame], trees: Sequence[_Tree | None], rates: Rates, around: _Surroundings
) -> Second:
    """What one GPU's part of some frames says; the first of them only opens the counters."""
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
    families: list[_Family] = [([], []) if tree is None else tree.family(gpu) for _, gpu, tree in found]
    holders, workers = families[-1]
    family = [*holders, *workers]
    percents = {key(p): rates.processes.get(key(p), {}).get("cpu_percent") for p in holders}
    used = {each: percent / 100 for each, percent in percents.items() if percent is not None}
    known = list(used.values())
    threads = _busiest_threads(holders, begin, rates.interval_seconds)
    return Second(
        start=begin.time,
        end=end.time,
        frames=len(pairs),
        reading=last,
        gpu=means,
        duties=duties,
        reasons=_reasons(gpu for _, gpu in pairs),
        holders=_holders(last, end),
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
        written_bytes=_written(begin, holders, rates),
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
) -> tuple[dict[str, Sum], tuple[tuple[float, float], ...]]:
    found: dict[str, list[float]] = {name: [] for name in MEANS}
    moved: list[float] = []
    duties: list[tuple[float, float]] = []
    for frame, gpu in pairs:
        for name, values in found.items():
            value = gpu.values.get(name)
            if value is not None and value >= 0:
                values.append(value)
        busy, traffic = duty(gpu), copies(gpu)
        if busy is not None:
            duties.append((frame.time, min(1.0, max(0.0, busy))))
        if traffic is not None:
            moved.append(traffic)
    found["duty"], found["copies"] = [value for _, value in duties], moved
    return {name: Sum(sum(values), len(values)) for name, values in found.items() if values}, tuple(duties)


def _reasons(readings: Iterable[GpuReading]) -> dict[int, int]:
    seen: dict[int, int] = {}
    for reading in readings:
        mask = int(reading.values.get("clocks_event_reasons", 0)) & _MASK
        while mask:
            bit = mask & -mask
            seen[bit] = seen.get(bit, 0) + 1
            mask ^= bit
    return seen


def _shares(readings: Iterable[GpuReading]) -> dict[int, Sum]:
    shares: dict[int, Sum] = {}
    for reading in readings:
        for process in reading.processes or ():
            if process.sm_ratio is not None:
                total, count = shares.get(process.pid, (0.0, 0))
                shares[process.pid] = Sum(total + process.sm_ratio, count + 1)
    return shares


def _holders(reading: GpuReading, frame: Frame) -> frozenset[ProcessKey] | None:
    if reading.processes is None:
        return None
    started = {process.pid: process.identity.start_time for process in frame.processes}
    return frozenset((process.pid, started.get(process.pid)) for process in reading.processes)


def _helpers(workers: Iterable[ProcessReading], rates: Rates) -> tuple[Helper, ...]:
    found = []
    for process in workers:
        percent = rates.processes.get(key(process), {}).get("cpu_percent")
        if percent is not None:
            cpu = process.values.get("last_cpu")
            found.append(Helper(key(process), percent / 100, None if cpu is None else int(cpu)))
    return tuple(found)


def _blocked(families: Sequence[_Family]) -> float | None:
    if not any(process.state is not None for part in families[-1] for process in part):
        return None
    waiting = sum(process.state == "D" for family in families for part in family for process in part)
    return waiting / len(families)


def _stuck(families: Sequence[_Family]) -> int:
    blocked = [{process.pid for process in holders if process.state == "D"} for holders, _ in families]
    return len(set.intersection(*blocked)) if blocked else 0


def _busiest_threads(holders: Iterable[ProcessReading], earlier: Frame, seconds: float) -> list[float]:
    """CPUs' worth of time of the two busiest threads, the busiest first; nothing when threads were not read."""
    pids = {process.pid for process in holders}
    before = {
        (process.pid, thread.tid): thread.cpu_seconds_total
        for process in earlier.processes
        if process.pid in pids
        for thread in process.threads
    }
    grown = [
        thread.cpu_seconds_total - before[process.pid, thread.tid]
        for process in holders
        for thread in process.threads
        if (process.pid, thread.tid) in before
    ]
    return sorted((each / seconds for each in grown), reverse=True)[:2] if seconds > 0 else []


def _sum(rates: Rates, processes: Iterable[ProcessReading], name: str) -> float | None:
    values = [rates.processes.get(key(process), {}).get(name) for process in processes]
    known = [value for value in values if value is not None]
    return float(sum(known)) if known else None


def _largest(rates: Rates, processes: Iterable[ProcessReading], name: str) -> float | None:
    values = [rates.processes.get(key(process), {}).get(name) for process in processes]
    known = [value for value in values if value is not None]
    return float(max(known)) if known else None


def _written(begin: Frame, holders: Sequence[ProcessReading], rates: Rates) -> float | None:
    written = _sum(rates, holders, "written_bytes_per_second")
    before = {key(process): process.values.get("written_chars_total") for process in begin.processes}
    pairs = [(before.get(key(process)), process.values.get("written_chars_total")) for process in holders]
    grown = [new - old for old, new in pairs if old is not None and new is not None and new >= old]
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
    """Share of the holders' CPU time that was last seen on a CPU of another NUMA node than the GPU's."""
    node = reading.device.numa_node
    nodes = frame.node.numa_cpus
    if node is None or not 0 <= node < len(nodes) or len(nodes) < 2:
        return None
    near = cpus_in(nodes[node])
    used = [
        (rates.processes.get(key(process), {}).get("cpu_percent", 0.0), process.values["last_cpu"] in near)
        for process in holders
        if "last_cpu" in process.values
    ]
    total = sum(percent for percent, _ in used)
    return sum(percent for percent, is_near in used if not is_near) / total if total > 0 else None


def _network(frame: Frame, rates: Rates) -> tuple[str, Values]:
    """The interface that uses most of its speed, with `busy_ratio` and `error_ratio` beside its rates."""
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
