"""The GPUs of a look as one table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from gpulse.model.clocks import Reason, is_lowered_cap, reasons
from gpulse.model.frame import Frame, GpuReading
from gpulse.model.harvest import is_harvested
from gpulse.model.process import GpuProcess, ProcessReading
from gpulse.terminal import format as f
from gpulse.terminal import harvested
from gpulse.terminal.table import Cell, Column, Paint, render, wrapped

_COLUMNS = (
    Column("GPU"),
    Column("Name", right=False, drop=5, least=8),
    Column("Temp", drop=4, optional=True),
    Column("Power", drop=1, optional=True),
    Column("Util"),
    Column("MemBW", drop=8, optional=True),
    Column("SM", drop=3, optional=True),
    Column("Tensor", drop=6, optional=True),
    Column("Memory"),
    Column("Clocks", right=False, drop=7, optional=True),
    Column("Processes", right=False, drop=2, least=8, optional=True),
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
"""What the table shows or decides by, besides GPM's activity and the list of processes."""
_UNSPECIFIC = 0x8
"""The bit that only repeats what a more specific one says."""


def gpu_lines(frame: Frame, width: int, paint: Paint) -> list[str]:
    """One row a GPU or MIG instance; columns that no GPU here can fill are left out."""
    by_pid = {process.pid: process for process in frame.processes}
    troubles = {h.subject: h.detail for h in frame.health if h.is_problem and h.source == "nvml"}
    lines = render(_COLUMNS, [_row(gpu, by_pid, troubles) for gpu in frame.gpus], width, paint)
    note = harvested.note(frame)
    return lines if note is None else [*lines, *(paint("dim", line) for line in wrapped(note, width))]


def no_gpu_lines(frame: Frame, width: int, paint: Paint) -> Iterator[str]:
    """Why there is no GPU to show, and what to do about it."""
    reasons_why = [health for health in frame.health if health.source == "nvml"]
    if not reasons_why:
        yield from wrapped("This machine has an NVIDIA driver but no NVIDIA GPU.", width)
    for health in reasons_why:
        for line in wrapped(f"No GPU to show: {f.plain(health.detail)}.", width):
            yield paint("title", line)
        for line in wrapped(f"  -> {f.plain(health.hint)}", width, "     ") if health.hint else ():
            yield paint("dim", line)


def _row(gpu: GpuReading, by_pid: dict[int, ProcessReading], troubles: dict[str | None, str]) -> list[Cell]:
    temperature, slowdown = gpu.get("temperature_celsius"), gpu.get("temperature_slowdown_celsius")
    hot = temperature is not None and slowdown is not None and temperature >= slowdown - 5
    used, total = gpu.get("memory_used_bytes"), gpu.get("memory_total_bytes")
    full = used is not None and total is not None and used > 0.97 * total
    trouble = troubles.get(f"gpu {gpu.device.label}")
    silent = trouble is not None and "memory_used_bytes" not in gpu.values
    return [
        Cell(gpu.device.label, "name"),
        Cell(_name(gpu)),
        Cell(f.celsius(temperature), "warn" if hot else ""),
        Cell(_power(gpu)),
        Cell(f.ratio(gpu.get("gpu_utilization_ratio"))),
        Cell(f.ratio(gpu.get("memory_utilization_ratio"))),
        Cell(f.ratio(gpu.get("sm_active_ratio"))),
        Cell(f.ratio(gpu.get("tensor_active_ratio"))),
        Cell(f.sizes(used, total), "notice" if full else ""),
        _clocks(gpu),
        Cell(f.plain(trouble), "warn") if silent else _holders(gpu, by_pid),
    ]


def _name(gpu: GpuReading) -> str:
    """Without what every name begins with; an instance is indented and needs only its profile."""
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


def _clocks(gpu: GpuReading) -> Cell:
    """What holds the clock down, and where; empty when nothing does but idleness."""
    reason = _holding(reasons(gpu))
    clock, most = gpu.get("sm_clock_hertz"), gpu.get("sm_clock_max_hertz")
    if reason is None or clock is None:
        return Cell("")
    if reason.weight == "normal" and most is not None and clock >= most:
        return Cell("")
    style = {"fault": "warn", "notice": "notice", "normal": ""}[reason.weight]
    if reason.name == "power cap" and is_lowered_cap(gpu):
        style = "notice"
    of = "" if most is None else f"/{most / 1e6:.0f}"
    whole = f"{reason.name}, {clock / 1e6:.0f}{of}MHz"
    return Cell(whole, style, (reason.name, reason.name.replace("hardware", "HW")))


def _holding(held: list[Reason]) -> Reason | None:
    busy = [reason for reason in held if reason.name != "idle"]
    specific = [reason for reason in busy if reason.bit != _UNSPECIFIC and reason.weight == "fault"]
    return next(iter(specific or busy), None)


def _holders(gpu: GpuReading, by_pid: dict[int, ProcessReading]) -> Cell:
    """`ada:python3/2201 13.0G`, then `ada/2201`, then `ada`: who holds the GPU matters most."""
    if gpu.processes is None:
        return Cell(f.UNKNOWN)
    holders = [(process, by_pid.get(process.pid)) for process in gpu.processes]
    people = Counter(_who(known) for _, known in holders)
    return Cell(
        ", ".join(_holder(process, known) for process, known in holders),
        briefer=(
            ", ".join(f"{_who(known)}/{process.pid}" for process, known in holders),
            ", ".join(person if count == 1 else f"{person} ({count})" for person, count in people.items()),
        ),
    )


def _holder(process: GpuProcess, known: ProcessReading | None) -> str:
    memory = "" if process.gpu_memory_bytes is None else f" {f.size(process.gpu_memory_bytes)}"
    if known is not None and is_harvested(known.identity.owner.job):
        return f"{_who(known)}/{process.pid}{memory}"
    user = _user(known)
    return f"{f'{user}:' if user else ''}{_program(known)}/{process.pid}{memory}"


def _who(known: ProcessReading | None) -> str:
    """Whose a process is: a harvest's program is not its user's own work."""
    if known is not None and is_harvested(known.identity.owner.job):
        return f.plain(known.identity.owner.job)
    return _user(known) or _program(known)


def _user(known: ProcessReading | None) -> str | None:
    user = None if known is None else known.identity.owner.user
    return f.plain(user) if user else None


def _program(known: ProcessReading | None) -> str:
    return "?" if known is None or known.identity.name is None else f.plain(known.identity.name)
