"""Compute rates and ratios from the counters of two frames."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from gpulse.model.frame import Frame, GpuReading
from gpulse.model.metric_catalog import Values
from gpulse.model.process import ProcessReading

ProcessKey = tuple[int, float | None]

_BUSY = ("user", "nice", "system", "irq", "softirq", "steal")
_STATES = {
    state: f"cpu_{state}_seconds_total"
    for state in ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")
}


def _name_rates(*names: str) -> tuple[tuple[str, str], ...]:
    """Return the names of counters, each with the name of its rate."""
    return tuple((f"{name}_total", f"{name}_per_second") for name in names)


_NETWORK = _name_rates(
    "rx_bytes",
    "tx_bytes",
    "rx_packets",
    "tx_packets",
    "rx_errors",
    "tx_errors",
    "rx_drops",
    "tx_drops",
)
_HOST = _name_rates("context_switches", "swap_in_pages", "swap_out_pages", "major_faults")
_PRESSURE = tuple(
    (f"pressure_{resource}_{share}_seconds_total", f"pressure_{resource}_{share}_ratio")
    for resource in ("cpu", "io", "memory")
    for share in ("some", "full")
)
_DISK = _name_rates("read_bytes", "written_bytes", "reads", "writes")
_FILESYSTEM = _name_rates("nfs_reads", "nfs_read_bytes")
_PROCESS = _name_rates("read_bytes", "written_bytes")
_LINKS = tuple(
    (f"{link}_bytes_total", f"{link}_bytes_per_second")
    for link in ("pcie_rx", "pcie_tx", "nvlink_rx", "nvlink_tx")
)


class Rates(NamedTuple):
    """Derived values by metric name, with the same keys as the readings of frames."""

    interval_seconds: float
    gpus: dict[str, Values] = {}
    """By UUID."""
    host: Values = {}
    cores: tuple[float | None, ...] = ()
    """Utilization of each CPU."""
    disks: dict[str, Values] = {}
    filesystems: dict[str, Values] = {}
    """By mount point."""
    network: dict[str, Values] = {}
    processes: dict[ProcessKey, Values] = {}
    cgroups: dict[str, Values] = {}


def process_key(process: ProcessReading) -> ProcessKey:
    """Return the unique key of a process: its PID and start time."""
    return process.identity.pid, process.identity.start_time


def compute_rates(earlier: Frame, later: Frame, *, cores: bool = True) -> Rates:
    """Compute the rates between two frames of one node; unknown values are absent.

    A counter that ran backwards (a driver reload, a reboot, an overflow) gives no rate. `cores=False` omits the
    utilization of single CPUs, which costs the most on large machines.
    """
    seconds = later.monotonic - earlier.monotonic
    if seconds <= 0 or earlier.node.name != later.node.name:
        return Rates(interval_seconds=0.0)
    old_disks = {disk.name: disk.values for disk in earlier.disks}
    old_filesystems = {(item.mount_point, item.device): item.values for item in earlier.filesystems}
    old_links = {link.name: link.values for link in earlier.network}
    old_processes = {process_key(process): process.values for process in earlier.processes}
    old_cgroups = {group.path: group.values for group in earlier.cgroups}
    old_gpus = {gpu.device.uuid: gpu for gpu in earlier.gpus}
    return Rates(
        interval_seconds=seconds,
        gpus={gpu.device.uuid: _gpu(old_gpus.get(gpu.device.uuid), gpu, seconds) for gpu in later.gpus},
        host=_host(
            earlier.host.values if earlier.host else {}, later.host.values if later.host else {}, seconds
        ),
        cores=_cores(earlier, later) if cores else (),
        disks={disk.name: _disk(old_disks.get(disk.name, {}), disk.values, seconds) for disk in later.disks},
        filesystems={
            item.mount_point: _filesystem(
                old_filesystems.get((item.mount_point, item.device), {}), item.values, seconds
            )
            for item in later.filesystems
        },
        network={
            link.name: _network(old_links.get(link.name, {}), link.values, seconds) for link in later.network
        },
        processes={
            process_key(process): _process(
                old_processes.get(process_key(process), {}), process, seconds, later.time
            )
            for process in later.processes
        },
        cgroups={
            group.path: _cgroup(old_cgroups.get(group.path, {}), group.values) for group in later.cgroups
        },
    )


def counter_increase(old: Values, new: Values, name: str) -> float | None:
    """Return how much a counter grew; None when it is unknown or ran backwards."""
    before, after = old.get(name), new.get(name)
    if before is None or after is None or after < before:
        return None
    return after - before


def _put(values: Values, name: str, value: float | None) -> None:
    if value is not None:
        values[name] = value


def _put_rates(
    values: Values, old: Values, new: Values, names: Iterable[tuple[str, str]], seconds: float
) -> None:
    """Add the rates of counters, given by the names of the counter and of its rate."""
    for total, rate in names:
        before, after = old.get(total), new.get(total)
        if before is not None and after is not None and after >= before:
            values[rate] = (after - before) / seconds


def _per_second(old: Values, new: Values, name: str, seconds: float) -> float | None:
    grown = counter_increase(old, new, name)
    return None if grown is None else grown / seconds


def _ratio(old: Values, new: Values, name: str, seconds: float) -> float | None:
    rate = _per_second(old, new, name, seconds)
    return None if rate is None else min(rate, 1.0)


def _gpu(earlier: GpuReading | None, later: GpuReading, seconds: float) -> Values:
    """Compute link rates from byte counters, for GPUs that count bytes but do not report a rate.

    The counters have their own period: the rate is over the time between two reads, and a repeated value gives no rate.
    """
    values: Values = {}
    if earlier is None:
        return values
    old, new = earlier.values, later.values
    if "second" in later.read_at and "second" in earlier.read_at:
        seconds = later.read_at["second"] - earlier.read_at["second"]
    if seconds <= 0:
        return values
    _put_rates(values, old, new, [pair for pair in _LINKS if pair[1] not in new], seconds)
    return values


def _host(old: Values, new: Values, seconds: float) -> Values:
    values: Values = {}
    spent = {state: counter_increase(old, new, name) for state, name in _STATES.items()}
    total = sum(part or 0.0 for part in spent.values())
    if total > 0 and spent["idle"] is not None:
        values["cpu_utilization_ratio"] = sum(spent[state] or 0.0 for state in _BUSY) / total
        _put(values, "cpu_iowait_ratio", None if spent["iowait"] is None else spent["iowait"] / total)
    _put_rates(values, old, new, _HOST, seconds)
    for name, ratio in _PRESSURE:
        _put(values, ratio, _ratio(old, new, name, seconds))
    return values


def _cores(earlier: Frame, later: Frame) -> tuple[float | None, ...]:
    if earlier.host is None or later.host is None or len(earlier.host.cores) != len(later.host.cores):
        return ()
    return tuple(_core(old, new) for old, new in zip(earlier.host.cores, later.host.cores, strict=True))


def _core(old: tuple[int, ...], new: tuple[int, ...]) -> float | None:
    spent = [max(after - before, 0) for before, after in zip(old, new, strict=False)]
    total = sum(spent)
    return None if total == 0 else 1.0 - (spent[3] + spent[4]) / total


def _disk(old: Values, new: Values, seconds: float) -> Values:
    values: Values = {}
    _put_rates(values, old, new, _DISK, seconds)
    reads, writes = counter_increase(old, new, "reads_total"), counter_increase(old, new, "writes_total")
    read_time, write_time = (
        counter_increase(old, new, "read_seconds_total"),
        counter_increase(old, new, "write_seconds_total"),
    )
    if reads and read_time is not None:
        values["read_await_seconds"] = read_time / reads
    if writes and write_time is not None:
        values["write_await_seconds"] = write_time / writes
    if read_time is not None and write_time is not None and (count := (reads or 0) + (writes or 0)):
        values["await_seconds"] = (read_time + write_time) / count
    _put(values, "queue_length", _per_second(old, new, "queue_seconds_total", seconds))
    _put(values, "busy_ratio", _ratio(old, new, "busy_seconds_total", seconds))
    return values


def _filesystem(old: Values, new: Values, seconds: float) -> Values:
    values: Values = {}
    _put_rates(values, old, new, _FILESYSTEM, seconds)
    reads = counter_increase(old, new, "nfs_reads_total")
    for name, total in (
        ("nfs_read_await_seconds", "nfs_read_seconds_total"),
        ("nfs_read_round_trip_seconds", "nfs_read_round_trip_seconds_total"),
    ):
        if reads and (spent := counter_increase(old, new, total)) is not None:
            values[name] = spent / reads
    _put(values, "nfs_reads_in_flight", _per_second(old, new, "nfs_read_seconds_total", seconds))
    return values


def _network(old: Values, new: Values, seconds: float) -> Values:
    values: Values = {}
    _put_rates(values, old, new, _NETWORK, seconds)
    return values


def _process(old: Values, process: ProcessReading, seconds: float, now: float) -> Values:
    new = process.values
    values: Values = {}
    user, system = (
        counter_increase(old, new, "cpu_user_seconds_total"),
        counter_increase(old, new, "cpu_system_seconds_total"),
    )
    if user is not None and system is not None:
        values["cpu_percent"] = 100.0 * (user + system) / seconds
    if process.identity.start_time is not None:
        values["elapsed_seconds"] = max(0.0, now - process.identity.start_time)
    _put(values, "run_wait_ratio", _ratio(old, new, "run_wait_seconds_total", seconds))
    _put_rates(values, old, new, _PROCESS, seconds)
    return values


def _cgroup(old: Values, new: Values) -> Values:
    periods, throttled = (
        counter_increase(old, new, "cpu_periods_total"),
        counter_increase(old, new, "cpu_throttled_periods_total"),
    )
    if not periods or throttled is None:
        return {}
    return {"cpu_throttled_ratio": throttled / periods}
