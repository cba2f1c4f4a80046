"""A snapshot as text: GPUs, and on request their details, the host, processes, disks, network and findings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from gpulse.model.clock_event_reasons import ClockReason, active_clock_reasons, is_power_limit_lowered
from gpulse.model.device import format_ranges, gpu_label
from gpulse.model.finding import Finding
from gpulse.model.frame import DiskReading, FilesystemReading, Frame, GpuReading, NetworkReading
from gpulse.model.harvest_status import is_harvest_job
from gpulse.model.metric_catalog import Value
from gpulse.model.process import GpuProcess, ProcessReading
from gpulse.model.snapshot import Snapshot
from gpulse.model.source_health import Health, format_subject, merge_gpu_entries
from gpulse.terminal import harvest_tables
from gpulse.terminal import value_format as f
from gpulse.terminal.table import Paint, TableCell, TableColumn, render_table, truncate, wrap, wrap_items

_NOTE_INDENT = "  "
_URGENT = ("high", "critical")
_MIN_SHOWN_SECONDS = 15.0
"""Longer than one snapshot watches: a finding that held from the first moment began at an unknown time."""
_GPU_COLUMNS = (
    TableColumn("GPU"),
    TableColumn("Name", right=False, drop=5, least=8),
    TableColumn("Temp", drop=4, optional=True),
    TableColumn("Power", drop=1, optional=True),
    TableColumn("Util"),
    TableColumn("MemBW", drop=8, optional=True),
    TableColumn("SM", drop=3, optional=True),
    TableColumn("Tensor", drop=6, optional=True),
    TableColumn("Memory"),
    TableColumn("Clocks", right=False, drop=7, optional=True),
    TableColumn("Processes", right=False, drop=2, least=8, optional=True),
)
READINGS = frozenset(
    {
        "clocks_event_reasons",
        "gpu_utilization_ratio",
        "memory_total_bytes",
        "memory_used_bytes",
        "power_default_limit_watts",
        "power_limit_watts",
        "power_watts",
        "sm_clock_hertz",
        "sm_clock_max_hertz",
        "temperature_celsius",
        "temperature_slowdown_celsius",
    }
)
"""Metrics that the table needs, besides GPM's activity metrics and the list of processes."""
_OTHER_REASONS_BIT = 0x8
"""This bit is also set whenever a more specific one is."""


def gpu_lines(frame: Frame, width: int, paint: Paint) -> list[str]:
    """Return a table with a row per GPU or MIG instance, without the columns that no GPU here can fill."""
    by_pid = {process.pid: process for process in frame.processes}
    troubles = {h.subject: h.detail for h in frame.health if h.is_problem and h.source == "nvml"}
    lines = render_table(_GPU_COLUMNS, [_gpu_row(gpu, by_pid, troubles) for gpu in frame.gpus], width, paint)
    note = harvest_tables.harvest_note(frame)
    return lines if note is None else [*lines, *(paint("dim", line) for line in wrap(note, width))]


def no_gpu_lines(frame: Frame, width: int, paint: Paint) -> Iterator[str]:
    """Yield why there is no GPU to show, and what to do about it."""
    reasons_why = [health for health in frame.health if health.source == "nvml"]
    if not reasons_why:
        yield from wrap("This machine has an NVIDIA driver but no NVIDIA GPU.", width)
    for health in reasons_why:
        for line in wrap(f"No GPU to show: {f.plain(health.detail)}.", width):
            yield paint("title", line)
        for line in wrap(f"  -> {f.plain(health.hint)}", width, "     ") if health.hint else ():
            yield paint("dim", line)


def _gpu_row(
    gpu: GpuReading, by_pid: dict[int, ProcessReading], troubles: dict[str | None, str]
) -> list[TableCell]:
    temperature, slowdown = gpu.get("temperature_celsius"), gpu.get("temperature_slowdown_celsius")
    hot = temperature is not None and slowdown is not None and temperature >= slowdown - 5
    used, total = gpu.get("memory_used_bytes"), gpu.get("memory_total_bytes")
    full = used is not None and total is not None and used > 0.97 * total
    trouble = troubles.get(f"gpu {gpu.device.label}")
    silent = trouble is not None and "memory_used_bytes" not in gpu.values
    return [
        TableCell(gpu.device.label, "name"),
        TableCell(_name(gpu)),
        TableCell(f.celsius(temperature), "warn" if hot else ""),
        TableCell(_power(gpu)),
        TableCell(f.ratio(gpu.get("gpu_utilization_ratio"))),
        TableCell(f.ratio(gpu.get("memory_utilization_ratio"))),
        TableCell(f.ratio(gpu.get("sm_active_ratio"))),
        TableCell(f.ratio(gpu.get("tensor_active_ratio"))),
        TableCell(f.sizes(used, total), "notice" if full else ""),
        _clocks(gpu),
        TableCell(f.plain(trouble), "warn") if silent else _holders(gpu, by_pid),
    ]


def _name(gpu: GpuReading) -> str:
    """Return the model without the vendor; a MIG instance is indented and shows only its profile."""
    name = f.plain(gpu.device.name).removeprefix("NVIDIA ")
    if gpu.device.parent_uuid is None:
        return name
    before, mig, profile = name.partition("MIG ")
    return f" {mig}{profile}" if mig else f" {before}"


def _power(gpu: GpuReading) -> str:
    power, limit = gpu.get("power_watts"), gpu.get("power_limit_watts")
    if power is None or limit is None:
        return f.watts(power)
    return f"{f.number(power)}/{f.watts(limit)}"


def _clocks(gpu: GpuReading) -> TableCell:
    """Return what holds the clock down, and at which frequency; empty when it is held down only by idleness."""
    reason = _strongest_reason(active_clock_reasons(gpu))
    clock, most = gpu.get("sm_clock_hertz"), gpu.get("sm_clock_max_hertz")
    if reason is None or clock is None:
        return TableCell("")
    if reason.weight == "normal" and most is not None and clock >= most:
        return TableCell("")
    style = {"fault": "warn", "notice": "notice", "normal": ""}[reason.weight]
    if reason.name == "power cap" and is_power_limit_lowered(gpu):
        style = "notice"
    of = "" if most is None else f"/{most / 1e6:.0f}"
    whole = f"{reason.name}, {clock / 1e6:.0f}{of}MHz"
    return TableCell(whole, style, (reason.name, reason.name.replace("hardware", "HW")))


def _strongest_reason(held: list[ClockReason]) -> ClockReason | None:
    busy = [reason for reason in held if reason.name != "idle"]
    specific = [reason for reason in busy if reason.bit != _OTHER_REASONS_BIT and reason.weight == "fault"]
    return next(iter(specific or busy), None)


def _holders(gpu: GpuReading, by_pid: dict[int, ProcessReading]) -> TableCell:
    """Return `ada:python3/2201 13.0G`, shortened to `ada/2201`, then `ada`: the user matters most."""
    if gpu.processes is None:
        return TableCell(f.UNKNOWN)
    holders = [(process, by_pid.get(process.pid)) for process in gpu.processes]
    people = Counter(_owner(known) for _, known in holders)
    return TableCell(
        ", ".join(_holder(process, known) for process, known in holders),
        briefer=(
            ", ".join(f"{_owner(known)}/{process.pid}" for process, known in holders),
            ", ".join(person if count == 1 else f"{person} ({count})" for person, count in people.items()),
        ),
    )


def _holder(process: GpuProcess, known: ProcessReading | None) -> str:
    memory = "" if process.gpu_memory_bytes is None else f" {f.size(process.gpu_memory_bytes)}"
    if known is not None and is_harvest_job(known.identity.owner.job):
        return f"{_owner(known)}/{process.pid}{memory}"
    user = _user(known)
    return f"{f'{user}:' if user else ''}{_program(known)}/{process.pid}{memory}"


def _owner(known: ProcessReading | None) -> str:
    """Return the owner of a process: its user, or the harvest that runs it, which is not the user's own work."""
    if known is not None and is_harvest_job(known.identity.owner.job):
        return f.plain(known.identity.owner.job)
    return _user(known) or _program(known)


def _user(known: ProcessReading | None) -> str | None:
    user = None if known is None else known.identity.owner.user
    return f.plain(user) if user else None


def _program(known: ProcessReading | None) -> str:
    return "?" if known is None or known.identity.name is None else f.plain(known.identity.name)


def finding_lines(snapshot: Snapshot, width: int, paint: Paint) -> Iterator[str]:
    """Yield every finding with what to do about it."""
    if not snapshot.findings:
        yield from wrap(_no_finding_text(snapshot), width)
    for finding in snapshot.findings:
        yield from _finding(finding, snapshot, width, paint)
        for advice in finding.advice:
            yield from wrap(f"  -> {advice.do}", width, "     ")


def urgent_lines(snapshot: Snapshot, width: int, paint: Paint) -> Iterator[str]:
    """Yield the severe findings, which are shown even when nobody asks for findings."""
    if not snapshot.frame.gpus:
        return  # the line in place of the table says why
    urgent = [finding for finding in snapshot.findings if finding.severity in _URGENT]
    for finding in urgent:
        yield from _finding(finding, snapshot, width, paint)
    if urgent:
        yield from (paint("dim", line) for line in wrap("Run `gpulse -b` to see how to fix this.", width))


def health_lines(snapshot: Snapshot, width: int, paint: Paint, *, verbose: bool) -> Iterator[str]:
    """Yield what could not be read and why; with `verbose` also what this machine does not support."""
    for health in merge_gpu_entries(snapshot.frame.health):
        if (health.is_problem or verbose) and not _is_shown_above(health, snapshot):
            about = f"{format_subject(health.subject)}: " if health.subject else ""
            missing = f" ({', '.join(health.metrics)})" if health.metrics and verbose else ""
            style = "notice" if health.is_problem else "dim"
            for line in wrap(f.plain(f"! {about}{health.detail}{missing}"), width, _NOTE_INDENT):
                yield paint(style, line)
            if health.hint:
                for line in wrap(f"  -> {f.plain(health.hint)}", width, "     "):
                    yield paint("dim", line)


def since(finding: Finding, now: float) -> str:
    """Return since when a finding holds; empty where that is unknown or only moments ago."""
    if finding.start is None or now - finding.start < _MIN_SHOWN_SECONDS:
        return ""
    return f.since(finding.start, now)


def is_in_findings(health: Health, findings: Iterable[Finding]) -> bool:
    """Return whether one of the findings repeats the text of this health entry."""
    return health.detail != "" and any(finding.summary.endswith(health.detail) for finding in findings)


def _no_finding_text(snapshot: Snapshot) -> str:
    if snapshot.verdict is not None:
        return f.plain(snapshot.verdict)
    if snapshot.frame.gpus:
        return "The driver reports no faults. Run `gpulse why` to find out what slows the jobs down."
    missing = any(health.code == "driver_missing" for health in snapshot.frame.health)
    return f"Cannot check for faults: there is no {'NVIDIA driver' if missing else 'GPU'}."


def _finding(finding: Finding, snapshot: Snapshot, width: int, paint: Paint) -> Iterator[str]:
    style = "warn" if finding.severity in _URGENT else "notice"
    held = since(finding, snapshot.frame.time)
    text = f"[{finding.severity}] {f.plain(finding.summary)}{f', {held}' if held else ''}"
    for line in wrap(text, width, _NOTE_INDENT):
        yield paint(style, line)


def _is_shown_above(health: Health, snapshot: Snapshot) -> bool:
    """Return whether a finding, or the text in place of the GPU table, has shown it already."""
    if not snapshot.frame.gpus:
        return health.source == "nvml"
    return health.source == "nvml" and is_in_findings(health, snapshot.findings)


Formatter = Callable[[Value], str]


def _kilowatt_hours(joules: Value) -> str:
    return f"{joules / 3.6e6:.2f}kWh"


def _times(count: Value) -> str:
    return f.count_noun(count, "time")


def _on(value: Value) -> str:
    return "on" if value else "off"


_DETAIL_LINES: dict[str, tuple[tuple[str, str, Formatter], ...]] = {
    "clocks": (
        ("SM", "sm_clock_hertz", f.megahertz),
        ("maximum", "sm_clock_max_hertz", f.megahertz),
        ("memory", "memory_clock_hertz", f.megahertz),
        ("P-state", "performance_state", f.number),
    ),
    "heat": (
        ("memory", "memory_temperature_celsius", f.celsius),
        ("slowdown at", "temperature_slowdown_celsius", f.celsius),
        ("fan", "fan_speed_ratio", f.ratio),
    ),
    "power": (
        ("limit", "power_limit_watts", f.watts),
        ("default", "power_default_limit_watts", f.watts),
        ("energy used", "energy_joules_total", _kilowatt_hours),
    ),
    "activity": (
        ("occupancy", "sm_occupancy_ratio", f.ratio),
        ("DRAM", "dram_active_ratio", f.ratio),
        ("FP16", "fp16_active_ratio", f.ratio),
        ("FP32", "fp32_active_ratio", f.ratio),
        ("FP64", "fp64_active_ratio", f.ratio),
        ("encoder", "encoder_utilization_ratio", f.ratio),
        ("decoder", "decoder_utilization_ratio", f.ratio),
    ),
    "PCIe": (
        ("gen", "pcie_link_generation", f.number),
        ("lanes", "pcie_link_width", f.number),
        ("to GPU", "pcie_rx_bytes_per_second", f.rate),
        ("from GPU", "pcie_tx_bytes_per_second", f.rate),
        ("replays", "pcie_replays_total", f.count),
    ),
    "NVLink": (
        ("up", "nvlink_links_active", f.number),
        ("to GPU", "nvlink_rx_bytes_per_second", f.rate),
        ("from GPU", "nvlink_tx_bytes_per_second", f.rate),
    ),
    "memory": (
        ("reserved", "memory_reserved_bytes", f.size),
        ("ECC uncorrected", "ecc_uncorrected_errors_total", f.count),
        ("remapped rows", "remapped_rows_uncorrected", f.count),
    ),
    "harvest": (
        ("state", "harvest_state", harvest_tables.describe_state),
        ("total", "harvested_seconds_total", f.hours),
        ("given back", "harvest_preemptions_total", _times),
    ),
    "mode": (
        ("compute", "compute_mode", f.number),
        ("persistence", "persistence_enabled", _on),
    ),
}
_INDENT = " " * 12


def detail_lines(snapshot: Snapshot, width: int, paint: Paint) -> Iterator[str]:
    """Yield a few lines per GPU, one per subject, without the metrics that the GPU does not have."""
    for gpu in snapshot.frame.gpus:
        yield ""
        for line in wrap_items(_facts(gpu), width, "  ", "  "):
            yield paint("name", line)
        for subject, readings in _DETAIL_LINES.items():
            words = [
                f"{label} {format_(value)}"
                for label, name, format_ in readings
                if (value := snapshot.gpu(gpu, name)) is not None
            ]
            if words:
                first, *rest = words
                yield from wrap_items([f"  {subject:8}  {first}", *rest], width, ", ", _INDENT)


def _facts(gpu: GpuReading) -> list[str]:
    device = gpu.device
    facts = [
        f"GPU {device.label}",
        device.name,
        device.architecture,
        device.uuid,
        device.bus_id,
        device.vbios and f"VBIOS {device.vbios}",
        device.serial and f"serial {device.serial}",
    ]
    return [f.plain(fact) for fact in facts if fact]


_LOAD_SIGNS = " .:-=+*#"


def host_lines(snapshot: Snapshot, width: int, paint: Paint, *, verbose: bool) -> Iterator[str]:
    """Yield CPUs, load, memory, swap and pressure; with `verbose` every CPU as one character."""
    if snapshot.frame.host is None:
        yield from wrap("Cannot read the host's /proc.", width)
        return
    loads = (f.number(snapshot.host(name), 1) for name in ("load1", "load5", "load15"))
    words = [_cpus(snapshot), f"load {' '.join(loads)}", f"RAM {_memory(snapshot)}"]
    if snapshot.host("swap_total_bytes"):
        total, free = snapshot.host("swap_total_bytes") or 0, snapshot.host("swap_free_bytes") or 0
        words.append(f"swap {f.sizes(total - free, total)}")
    words.append(_pressure(snapshot))
    yield from wrap_items([word for word in words if word], width, "   ")
    if verbose:
        yield from _cores(snapshot, width, paint)


def _cpus(snapshot: Snapshot) -> str:
    busy, cpus = snapshot.host("cpu_utilization_ratio"), snapshot.host("cpus")
    return f"{f.number(cpus)} CPUs" if busy is None else f"CPU {f.ratio(busy)} of {f.number(cpus)}"


def _memory(snapshot: Snapshot) -> str:
    total, available = snapshot.host("memory_total_bytes"), snapshot.host("memory_available_bytes")
    used = None if total is None or available is None else total - available
    return f"{f.sizes(used, total)} used"


def _pressure(snapshot: Snapshot) -> str:
    shares = [(name, snapshot.host(f"pressure_{name}_some_ratio")) for name in ("cpu", "io", "memory")]
    if all(share is None for _, share in shares):
        return ""
    return "waiting for " + ", ".join(f"{name} {f.ratio(share)}" for name, share in shares)


def _cores(snapshot: Snapshot, width: int, paint: Paint) -> Iterator[str]:
    marks = ["?" if share is None else _LOAD_SIGNS[min(7, int(share * 8))] for share in snapshot.rates.cores]
    if not marks:
        return
    room = max(8, width - 2)
    yield from (paint("dim", line) for line in wrap("Load of each CPU (blank: idle, #: busy):", width))
    for begin in range(0, len(marks), room):
        yield "[" + "".join(marks[begin : begin + room]) + "]"


_DISK_COLUMNS = (
    TableColumn("Disk", right=False),
    TableColumn("Kind", right=False, drop=3),
    TableColumn("Read"),
    TableColumn("Write"),
    TableColumn("Reads/s", drop=5),
    TableColumn("Writes/s", drop=4),
    TableColumn("Await", drop=1),
    TableColumn("Queue", drop=2),
    TableColumn("Busy"),
)
_FILESYSTEM_COLUMNS = (
    TableColumn("Mounted on", right=False, least=12),
    TableColumn("Used"),
    TableColumn("Full", drop=1),
    TableColumn("Kind", right=False, drop=2),
    TableColumn("Type", right=False, drop=3),
    TableColumn("Device", right=False, drop=4, least=12),
)


def disk_lines(snapshot: Snapshot, width: int, paint: Paint, *, verbose: bool) -> Iterator[str]:
    """Yield a table of the disks' activity, then one of the file systems' usage."""
    disks = [disk for disk in snapshot.frame.disks if verbose or disk.kind != "memory"]
    if disks:
        yield from render_table(_DISK_COLUMNS, [_disk_row(snapshot, disk) for disk in disks], width, paint)
    else:
        yield from wrap("No disks to show.", width)
    if snapshot.frame.filesystems:
        yield ""
        rows = [_filesystem_row(filesystem) for filesystem in snapshot.frame.filesystems]
        yield from render_table(_FILESYSTEM_COLUMNS, rows, width, paint)


def _disk_row(snapshot: Snapshot, disk: DiskReading) -> list[TableCell]:
    rates = snapshot.rates.disks.get(disk.name, {})
    queue = rates.get("queue_length")
    return [
        TableCell(f.plain(disk.name), "name"),
        TableCell(_kind(disk.kind)),
        TableCell(f.rate(rates.get("read_bytes_per_second"))),
        TableCell(f.rate(rates.get("written_bytes_per_second"))),
        TableCell(f.count(rates.get("reads_per_second"))),
        TableCell(f.count(rates.get("writes_per_second"))),
        TableCell(f.milliseconds(rates.get("await_seconds"))),
        TableCell(f.number(queue, 1)),
        TableCell(f.ratio(rates.get("busy_ratio"))),
    ]


def _filesystem_row(filesystem: FilesystemReading) -> list[TableCell]:
    used, size = filesystem.values.get("used_bytes"), filesystem.values.get("size_bytes")
    share = used / size if used is not None and size else None
    nearly_full = share is not None and share > 0.95
    return [
        TableCell(f.plain(filesystem.mount_point)),
        TableCell(f.sizes(used, size), "notice" if nearly_full else ""),
        TableCell(f.ratio(share), "notice" if nearly_full else ""),
        TableCell(_kind(filesystem.kind)),
        TableCell(f.plain(filesystem.type)),
        TableCell(f.plain(filesystem.device)),
    ]


def _kind(kind: str | None) -> str:
    return {"nvme": "NVMe SSD", "ssd": "SSD", "hdd": "HDD"}.get(kind or "", f.plain(kind))


_NETWORK_COLUMNS = (
    TableColumn("Interface", right=False),
    TableColumn("Kind", right=False, drop=3),
    TableColumn("State", right=False, drop=1, optional=True),
    TableColumn("Link", drop=2, optional=True),
    TableColumn("Received"),
    TableColumn("Sent"),
    TableColumn("Errors/s", drop=5, optional=True),
    TableColumn("Drops/s", drop=5, optional=True),
    TableColumn("Errors", drop=4, optional=True),
)


def network_lines(snapshot: Snapshot, width: int, paint: Paint, *, verbose: bool) -> Iterator[str]:
    """Yield a table of interfaces; loopback and unused virtual ones only with `verbose`."""
    links = [link for link in snapshot.frame.network if verbose or _is_interesting(link)]
    if not links:
        yield from wrap("No network interfaces to show.", width)
        return
    yield from render_table(_NETWORK_COLUMNS, [_network_row(snapshot, link) for link in links], width, paint)


def _is_interesting(link: NetworkReading) -> bool:
    used = link.values.get("rx_bytes_total", 0) or link.values.get("tx_bytes_total", 0)
    return link.kind != "loopback" and bool(link.kind != "virtual" or used)


def _network_row(snapshot: Snapshot, link: NetworkReading) -> list[TableCell]:
    rates = snapshot.rates.network.get(link.name, {})

    def both(values: dict[str, float], kind: str) -> float | None:
        parts = [values[name] for name in (f"rx_{kind}", f"tx_{kind}") if name in values]
        return sum(parts) if parts else None

    errors = both(rates, "errors_per_second")
    return [
        TableCell(f.plain(link.name), "name"),
        TableCell(f.plain(link.kind)),
        TableCell(
            {True: "up", False: "down", None: f.UNKNOWN}[link.up], "notice" if link.up is False else ""
        ),
        TableCell(f.bits(link.values.get("link_bits_per_second"))),
        TableCell(f.rate(rates.get("rx_bytes_per_second"))),
        TableCell(f.rate(rates.get("tx_bytes_per_second"))),
        TableCell(f.count(errors), "warn" if errors else ""),
        TableCell(f.count(both(rates, "drops_per_second"))),
        TableCell(f.count(both(link.values, "errors_total"))),
    ]


_PROCESS_COLUMNS = (
    TableColumn("PID"),
    TableColumn("User", right=False, drop=1, least=8, optional=True),
    TableColumn("GPU", drop=2),
    TableColumn("GPU mem"),
    TableColumn("SM", drop=5, optional=True),
    TableColumn("CPU"),
    TableColumn("RAM", drop=3),
    TableColumn("Time", drop=4),
    TableColumn("Job", right=False, drop=6, least=8, optional=True),
    TableColumn("Command", right=False, least=20),
)
_HIDDEN = "(not visible)"


def process_lines(snapshot: Snapshot, width: int, paint: Paint, *, verbose: bool) -> list[str]:
    """Return a row per process on a GPU, and one for all its child processes, or with `verbose` for each."""
    rows = list(_rows(snapshot, verbose=verbose))
    if rows:
        return render_table(_PROCESS_COLUMNS, rows, width, paint)
    return list(wrap(_no_process_text(snapshot), width))


def _no_process_text(snapshot: Snapshot) -> str:
    hidden = [gpu.device.label for gpu in snapshot.frame.gpus if gpu.processes is None]
    if not hidden:
        return "No process uses a GPU."
    if len(hidden) == len(snapshot.frame.gpus):
        return "The driver did not report which processes use the GPUs."
    return (
        f"The driver did not report which processes use {gpu_label(hidden)}; no process uses the other GPUs."
    )


def _rows(snapshot: Snapshot, *, verbose: bool) -> Iterator[list[str]]:
    by_pid = {process.pid: process for process in snapshot.frame.processes}
    children: dict[int | None, list[ProcessReading]] = {}
    for process in snapshot.frame.processes:
        if not process.on_gpu:
            children.setdefault(process.identity.parent_pid, []).append(process)
    holds: dict[int, list[tuple[str, GpuProcess]]] = {}
    for gpu in snapshot.frame.gpus:
        for held in gpu.processes or ():
            holds.setdefault(held.pid, []).append((gpu.device.label, held))
    for pid, held_on in holds.items():
        yield _process_row(snapshot, pid, by_pid.get(pid), held_on, 0)
        helpers = list(_descendants(children, pid, 1))
        if verbose:
            yield from (_process_row(snapshot, child.pid, child, [], depth) for child, depth in helpers)
        elif helpers:
            yield _helpers_row(snapshot, [child for child, _ in helpers])


def _descendants(
    children: dict[int | None, list[ProcessReading]], pid: int, depth: int
) -> Iterator[tuple[ProcessReading, int]]:
    for child in children.pop(pid, ()):  # popped, so that a cycle of parents in a recording ends
        yield child, depth
        yield from _descendants(children, child.pid, depth + 1)


def _process_row(
    snapshot: Snapshot,
    pid: int,
    known: ProcessReading | None,
    held_on: list[tuple[str, GpuProcess]],
    depth: int,
) -> list[str]:
    memories = [held.gpu_memory_bytes for _, held in held_on if held.gpu_memory_bytes is not None]
    shares = [held.sm_ratio for _, held in held_on if held.sm_ratio is not None]
    on_gpu = [
        format_ranges(label for label, _ in held_on),
        f.size(sum(memories)) if memories else (f.UNKNOWN if held_on else ""),
        f.ratio(max(shares)) if shares else (f.UNKNOWN if held_on else ""),
    ]
    if known is None or known.state is None:
        return [str(pid), f.UNKNOWN, *on_gpu, f.UNKNOWN, f.UNKNOWN, f.UNKNOWN, "", _HIDDEN]
    owner = known.identity.owner
    return [
        str(pid),
        f.plain(owner.user),
        *on_gpu,
        f.percent(snapshot.process(known, "cpu_percent")),
        f.size(snapshot.process(known, "host_memory_bytes")),
        f.duration(snapshot.process(known, "elapsed_seconds")),
        f.plain(owner.job or owner.container or ""),
        "  " * depth + f.shorten_command(known.identity.command, known.identity.name),
    ]


def _helpers_row(snapshot: Snapshot, helpers: list[ProcessReading]) -> list[str]:
    """Return one row for all child processes of a process: how many, and what they use together."""
    percents = [value for child in helpers if (value := snapshot.process(child, "cpu_percent")) is not None]
    memories = [value for child in helpers if (value := child.values.get("host_memory_bytes")) is not None]
    names = ", ".join(sorted({f.plain(child.identity.name) for child in helpers}))
    return [
        *([""] * 5),
        f.percent(sum(percents) if percents else None),
        f.size(sum(memories) if memories else None),
        "",
        "",
        f"  + {len(helpers)} {'child' if len(helpers) == 1 else 'children'}: {names}",
    ]


class SnapshotSections(NamedTuple):
    """Sections of a snapshot to show."""

    cpu: bool = False
    disk: bool = False
    network: bool = False
    findings: bool = False
    verbose: bool = False


def snapshot_lines(snapshot: Snapshot, parts: SnapshotSections, width: int, paint: Paint) -> Iterator[str]:
    """Yield a snapshot as lines, with a blank line between its sections."""
    yield paint("dim", truncate(_header(snapshot.frame, width), width))
    for number, part in enumerate(_sections(snapshot, parts, width, paint)):
        lines = list(part)
        if number and lines:
            yield ""
        yield from lines
    if snapshot.rates.interval_seconds and (parts.cpu or parts.disk or parts.network):
        text = f"Rates are averages over {snapshot.rates.interval_seconds:.2f} s."
        yield from (paint("dim", line) for line in wrap(text, width))


def _sections(
    snapshot: Snapshot, parts: SnapshotSections, width: int, paint: Paint
) -> Iterator[Iterator[str] | list[str]]:
    frame, verbose = snapshot.frame, parts.verbose
    yield gpu_lines(frame, width, paint) if frame.gpus else no_gpu_lines(frame, width, paint)
    if verbose:
        yield list(detail_lines(snapshot, width, paint))[1:]
    if parts.cpu or not frame.gpus:
        yield host_lines(snapshot, width, paint, verbose=verbose)
    if parts.cpu and frame.gpus:
        yield process_lines(snapshot, width, paint, verbose=verbose)
    if parts.disk:
        yield disk_lines(snapshot, width, paint, verbose=verbose)
    if parts.network:
        yield network_lines(snapshot, width, paint, verbose=verbose)
    yield (finding_lines if parts.findings else urgent_lines)(snapshot, width, paint)
    yield health_lines(snapshot, width, paint, verbose=verbose)


def _header(frame: Frame, width: int) -> str:
    node = frame.node
    words = [f.plain(node.name), _format_time(frame.time)]
    if node.driver:
        words.append(f"driver {f.plain(node.driver)}")
    if node.cuda:
        words.append(f"CUDA {f.plain(node.cuda)}")
    while len("  ".join(words)) > width and len(words) > 2:
        words.pop()
    return "  ".join(words)


def _format_time(moment: float) -> str:
    text = f.local_time(moment)
    return "unknown time" if text == f.UNKNOWN else text
