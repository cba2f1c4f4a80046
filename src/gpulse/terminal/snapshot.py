"""One look as text: GPUs, and on request host, processes, disks, network and findings."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import NamedTuple

from gpulse.model.clocks import is_lowered_cap, reasons
from gpulse.model.frame import Frame, GpuReading
from gpulse.model.process import GpuProcess, ProcessReading
from gpulse.model.snapshot import Snapshot
from gpulse.terminal import format as f
from gpulse.terminal.machine import disk_lines, host_lines, network_lines
from gpulse.terminal.table import Cell, Column, Paint, cut, render


class Parts(NamedTuple):
    """Which parts of a look are wanted."""

    cpu: bool = False
    disk: bool = False
    network: bool = False
    findings: bool = False
    verbose: bool = False


def snapshot_lines(snapshot: Snapshot, parts: Parts, width: int, paint: Paint) -> Iterator[str]:
    """The look, line by line."""
    frame = snapshot.frame
    yield _header(frame, width, paint)
    if frame.gpus:
        yield from _gpus(snapshot, width, paint)
        if parts.verbose:
            yield from _details(snapshot, width, paint)
    else:
        yield from _no_gpus(frame, paint)
    if parts.cpu or not frame.gpus:
        yield ""
        yield from host_lines(snapshot, width, paint, verbose=parts.verbose)
    if parts.cpu and frame.gpus:
        yield ""
        yield from _processes(snapshot, width, paint, verbose=parts.verbose)
    if parts.disk:
        yield ""
        yield from disk_lines(snapshot, width, paint, verbose=parts.verbose)
    if parts.network:
        yield ""
        yield from network_lines(snapshot, width, paint, verbose=parts.verbose)
    if parts.findings:
        yield ""
        yield from _findings(snapshot, paint)
    yield from _footer(snapshot, parts, paint)


def _header(frame: Frame, width: int, paint: Paint) -> str:
    stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(frame.time))
    parts = [f.plain(frame.node.name), stamp]
    if frame.node.driver:
        parts.append(f"driver {frame.node.driver}")
    if frame.node.cuda:
        parts.append(f"CUDA {frame.node.cuda}")
    while len("  ".join(parts)) > width and len(parts) > 2:
        parts.pop()
    return paint("dim", cut("  ".join(parts), width))


_GPU_COLUMNS = (
    Column("GPU"),
    Column("Name", right=False, drop=5, least=8),
    Column("Temp", drop=2),
    Column("Power", drop=1),
    Column("Util"),
    Column("MemBW", drop=6),
    Column("SM", drop=3),
    Column("Tensor", drop=4),
    Column("Memory"),
    Column("Clocks held by", right=False, drop=8, least=12),
    Column("Processes", right=False, drop=7, least=12),
)


def _gpus(snapshot: Snapshot, width: int, paint: Paint) -> list[str]:
    frame = snapshot.frame
    by_pid = {process.pid: process for process in frame.processes}
    troubles = {h.subject: h.detail for h in frame.health if h.is_problem and h.source == "nvml"}
    rows = [_gpu_row(gpu, by_pid, troubles) for gpu in frame.gpus]
    known = [
        any(row[place].text not in ("", f.UNKNOWN) for row in rows) for place in range(len(_GPU_COLUMNS))
    ]
    shown = [
        place
        for place, column in enumerate(_GPU_COLUMNS)
        if known[place] or column.title in ("Util", "Memory", "GPU")
    ]
    return render(
        [_GPU_COLUMNS[place] for place in shown],
        [[row[place] for place in shown] for row in rows],
        width,
        paint,
    )


def _gpu_row(
    gpu: GpuReading, by_pid: dict[int, ProcessReading], troubles: dict[str | None, str]
) -> list[Cell]:
    temperature, slowdown = gpu.get("temperature_celsius"), gpu.get("temperature_slowdown_celsius")
    hot = temperature is not None and slowdown is not None and temperature >= slowdown - 5
    used, total = gpu.get("memory_used_bytes"), gpu.get("memory_total_bytes")
    full = used is not None and total is not None and used > 0.97 * total
    trouble = troubles.get(f"gpu {gpu.device.label}")
    people = (
        Cell(trouble, "warn")
        if trouble and not gpu.values.get("memory_used_bytes")
        else Cell(_people(gpu, by_pid))
    )
    name = gpu.device.name.removeprefix("NVIDIA ")
    return [
        Cell(gpu.device.label, "name"),
        Cell(f.plain(f" {name}" if gpu.device.parent_uuid else name)),
        Cell(f.celsius(temperature), "warn" if hot else ""),
        Cell(_power(gpu)),
        Cell(f.ratio(gpu.get("gpu_utilization_ratio"))),
        Cell(f.ratio(gpu.get("memory_utilization_ratio"))),
        Cell(f.ratio(gpu.get("sm_active_ratio"))),
        Cell(f.ratio(gpu.get("tensor_active_ratio"))),
        Cell(f.sizes(used, total), "notice" if full else ""),
        _clocks(gpu),
        people,
    ]


def _power(gpu: GpuReading) -> str:
    power, limit = gpu.get("power_watts"), gpu.get("power_limit_watts")
    if limit is None:
        return f.watts(power)
    return f"{f.number(power)}/{f.watts(limit)}"


def _clocks(gpu: GpuReading) -> Cell:
    """The clock and what holds it down; empty when nothing does but idleness."""
    held = [reason for reason in reasons(gpu) if reason.name != "idle"]
    clock, most = gpu.get("sm_clock_hertz"), gpu.get("sm_clock_max_hertz")
    if not held or clock is None:
        return Cell("")
    reason = held[0]
    at_its_best = most is not None and clock >= most
    if reason.weight == "normal" and at_its_best:
        return Cell("")
    style = {"fault": "warn", "notice": "notice", "normal": ""}[reason.weight]
    if reason.name == "power cap" and is_lowered_cap(gpu):
        style = "notice"
    of = "" if most is None else f"/{most / 1e6:.0f}"
    return Cell(f"{reason.name}, {clock / 1e6:.0f}{of}MHz", style)


def _people(gpu: GpuReading, by_pid: dict[int, ProcessReading]) -> str:
    if gpu.processes is None:
        return f.UNKNOWN
    return ", ".join(_person(process, by_pid.get(process.pid)) for process in gpu.processes)


def _person(process: GpuProcess, known: ProcessReading | None) -> str:
    """`ada:python3/2201 13.0G`, or as much of it as is known."""
    memory = "" if process.gpu_memory_bytes is None else f" {f.size(process.gpu_memory_bytes)}"
    if known is None or known.identity.name is None:
        return f"?/{process.pid}{memory}"
    user = known.identity.owner.user
    name = f.plain(known.identity.name)
    return f"{f.plain(user)}:{name}/{process.pid}{memory}" if user else f"{name}/{process.pid}{memory}"


def _no_gpus(frame: Frame, paint: Paint) -> Iterator[str]:
    reasons_why = [health for health in frame.health if health.source == "nvml"]
    if not reasons_why:
        yield "This machine has an NVIDIA driver but no NVIDIA GPU."
    for health in reasons_why:
        yield paint("title", f"No GPU to show: {health.detail}.")


_PROCESS_COLUMNS = (
    Column("PID"),
    Column("User", right=False, drop=4, least=6),
    Column("GPU", drop=1),
    Column("GPU mem"),
    Column("SM", drop=5),
    Column("CPU"),
    Column("RAM", drop=2),
    Column("Time", drop=3),
    Column("Job", right=False, drop=6, least=8),
    Column("Command", right=False, least=12),
)


def _processes(snapshot: Snapshot, width: int, paint: Paint, *, verbose: bool) -> list[str]:
    rows = list(_process_rows(snapshot, verbose=verbose))
    if not rows:
        hidden = any(gpu.processes is None for gpu in snapshot.frame.gpus)
        return [
            "The driver did not say which processes are on the GPUs." if hidden else "No process is on a GPU."
        ]
    jobs = any(row[8] for row in rows)
    places = [place for place in range(len(_PROCESS_COLUMNS)) if jobs or place != 8]
    return render(
        [_PROCESS_COLUMNS[p] for p in places], [[row[p] for p in places] for row in rows], width, paint
    )


def _process_rows(snapshot: Snapshot, *, verbose: bool) -> Iterator[list[str]]:
    by_pid = {process.pid: process for process in snapshot.frame.processes}
    holds: dict[int, list[tuple[str, GpuProcess]]] = {}
    for gpu in snapshot.frame.gpus:
        for held in gpu.processes or ():
            holds.setdefault(held.pid, []).append((gpu.device.label, held))
    for pid, held_on in holds.items():
        known = by_pid.get(pid)
        yield _process_row(snapshot, pid, known, held_on, 0)
        if known is not None:
            yield from _descendants(snapshot, known, 1, verbose=verbose)


def _descendants(
    snapshot: Snapshot, parent: ProcessReading, depth: int, *, verbose: bool
) -> Iterator[list[str]]:
    children = [p for p in snapshot.frame.processes if p.identity.parent_pid == parent.pid and not p.on_gpu]
    if not verbose:
        if children:
            yield _summary_row(snapshot, children)
        return
    for child in children:
        yield _process_row(snapshot, child.pid, child, [], depth)
        yield from _descendants(snapshot, child, depth + 1, verbose=True)


def _process_row(
    snapshot: Snapshot,
    pid: int,
    known: ProcessReading | None,
    held_on: list[tuple[str, GpuProcess]],
    depth: int,
) -> list[str]:
    memories = [held.gpu_memory_bytes for _, held in held_on if held.gpu_memory_bytes is not None]
    shares = [held.sm_ratio for _, held in held_on if held.sm_ratio is not None]
    row = [
        str(pid),
        f.UNKNOWN,
        ",".join(label for label, _ in held_on),
        f.size(sum(memories)) if memories else (f.UNKNOWN if held_on else ""),
        f.ratio(max(shares)) if shares else (f.UNKNOWN if held_on else ""),
        f.UNKNOWN,
        f.UNKNOWN,
        f.UNKNOWN,
        "",
        "not visible from here",
    ]
    if known is not None and known.state is not None:
        owner = known.identity.owner
        row[1] = f.plain(owner.user)
        row[5] = f.percent(snapshot.process(known, "cpu_percent"))
        row[6] = f.size(snapshot.process(known, "host_memory_bytes"))
        row[7] = f.duration(snapshot.process(known, "elapsed_seconds"))
        row[8] = f.plain(owner.job or owner.container or "")
        row[9] = "  " * depth + f.plain(" ".join(known.identity.command) or known.identity.name)
    return row


def _summary_row(snapshot: Snapshot, children: list[ProcessReading]) -> list[str]:
    """A trainer's helpers as one line: how many, and what they use together."""
    percents = [value for child in children if (value := snapshot.process(child, "cpu_percent")) is not None]
    memory = sum(child.values.get("host_memory_bytes", 0) for child in children)
    names = sorted({f.plain(child.identity.name) for child in children})
    text = f"  + {len(children)} {'child' if len(children) == 1 else 'children'}: {', '.join(names)}"
    return ["", "", "", "", "", f.percent(sum(percents) if percents else None), f.size(memory), "", "", text]


_DETAILS = (
    ("SM clock", "sm_clock_hertz", f.megahertz),
    ("max", "sm_clock_max_hertz", f.megahertz),
    ("memory clock", "memory_clock_hertz", f.megahertz),
    ("P-state", "performance_state", f.number),
    ("memory temp", "memory_temperature_celsius", f.celsius),
    ("slowdown at", "temperature_slowdown_celsius", f.celsius),
    ("fan", "fan_speed_ratio", f.ratio),
    (
        "energy",
        "energy_joules_total",
        lambda value: f.UNKNOWN if value is None else f"{value / 3.6e6:.2f}kWh",
    ),
    ("occupancy", "sm_occupancy_ratio", f.ratio),
    ("DRAM", "dram_active_ratio", f.ratio),
    ("FP32", "fp32_active_ratio", f.ratio),
    ("FP64", "fp64_active_ratio", f.ratio),
    ("encoder", "encoder_utilization_ratio", f.ratio),
    ("decoder", "decoder_utilization_ratio", f.ratio),
    ("PCIe gen", "pcie_link_generation", f.number),
    ("width", "pcie_link_width", f.number),
    ("PCIe to GPU", "pcie_rx_bytes_per_second", f.rate),
    ("from GPU", "pcie_tx_bytes_per_second", f.rate),
    ("replays", "pcie_replays_total", f.count),
    ("NVLinks up", "nvlink_links_active", f.number),
    ("NVLink to GPU", "nvlink_rx_bytes_per_second", f.rate),
    ("from GPU", "nvlink_tx_bytes_per_second", f.rate),
    ("ECC uncorrected", "ecc_uncorrected_errors_total", f.count),
    ("remapped rows", "remapped_rows_uncorrected", f.count),
    ("reserved", "memory_reserved_bytes", f.size),
    ("compute mode", "compute_mode", f.number),
    ("persistence", "persistence_enabled", lambda value: {None: f.UNKNOWN, 0: "off"}.get(value, "on")),
)


def _details(snapshot: Snapshot, width: int, paint: Paint) -> Iterator[str]:
    """What is known of each GPU beyond the table; readings it does not have are left out."""
    for gpu in snapshot.frame.gpus:
        device = gpu.device
        yield ""
        facts = [
            device.uuid,
            device.bus_id,
            device.architecture,
            device.vbios and f"VBIOS {device.vbios}",
            device.serial and f"serial {device.serial}",
        ]
        title = f"GPU {device.label}  {f.plain(device.name)}"
        yield paint("name", cut("  ".join([title, *(f.plain(fact) for fact in facts if fact)]), width))
        words = [
            f"{label} {show(value)}"
            for label, name, show in _DETAILS
            if (value := snapshot.gpu(gpu, name)) is not None
        ]
        yield from _wrapped(words, width)


def _wrapped(words: list[str], width: int) -> Iterator[str]:
    line = " "
    for word in words:
        if len(line) + len(word) + 3 > width and line.strip():
            yield line
            line = " "
        line += f" {word}" if line == " " else f" · {word}".replace("·", "|")
    if line.strip():
        yield line


def _findings(snapshot: Snapshot, paint: Paint) -> Iterator[str]:
    if not snapshot.findings:
        yield (
            "The driver reports no fault." if snapshot.frame.gpus else "There is no driver to report faults."
        )
    for finding in snapshot.findings:
        style = "warn" if finding.severity in ("high", "critical") else "notice"
        yield paint(style, f"[{finding.severity}] {finding.summary}")
        for advice in finding.advice:
            yield f"    {advice.do}"


def _footer(snapshot: Snapshot, parts: Parts, paint: Paint) -> Iterator[str]:
    entries = [
        h
        for h in snapshot.frame.health
        if (h.is_problem or parts.verbose) and (snapshot.frame.gpus or h.source != "nvml")
    ]
    if entries:
        yield ""
    for health in entries:
        about = f"{health.subject}: " if health.subject else ""
        missing = f" ({', '.join(health.metrics)})" if health.metrics and parts.verbose else ""
        yield paint("notice" if health.is_problem else "dim", f"! {f.plain(about + health.detail)}{missing}")
        if health.hint:
            yield paint("dim", f"    {health.hint}")
    if not snapshot.frame.gpus:
        for health in snapshot.frame.health:
            if health.source == "nvml" and health.hint:
                yield paint("dim", f"Next: {health.hint}.")
    if snapshot.rates.interval_seconds and (
        parts.cpu or parts.disk or parts.network or not snapshot.frame.gpus
    ):
        yield paint("dim", f"Rates over {snapshot.rates.interval_seconds:.2f} s.")
