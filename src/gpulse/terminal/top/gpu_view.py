"""The GPU table as lines of text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from gpulse.model.clocks import is_lowered_cap, reasons
from gpulse.model.frame import Frame, GpuReading
from gpulse.model.health import Health
from gpulse.model.metric import Values
from gpulse.terminal import format as human
from gpulse.terminal import harvested
from gpulse.terminal.top.cells import (
    ENDLESS,
    Column,
    Line,
    Piece,
    Tone,
    chosen,
    cut,
    ends,
    joined,
    padded,
    words,
)
from gpulse.terminal.top.glyphs import Glyphs, bar, level, trend
from gpulse.terminal.top.history import History, share
from gpulse.terminal.top.snapshot import Snapshot

_HELD = {
    "hardware slowdown": "HW slow",
    "thermal slowdown": "thermal",
    "hardware thermal slowdown": "HW heat",
    "power brake": "brake",
    "application clocks": "app clocks",
    "display clocks": "display",
}
"""The reasons whose names are too long for a column."""
_HELD_TONES: dict[str, Tone] = {"fault": "bad", "notice": "warn", "normal": "dim"}
_WARM_CELSIUS, _HOT_CELSIUS = 10, 3
"""Degrees below the slowdown temperature."""
_FULL_MEMORY = 0.95
_NAME_CELLS = 16


@dataclass(frozen=True, slots=True)
class Look:
    """What all rows of one table share."""

    columns: Sequence[tuple[Column, int]]
    snapshot: Snapshot
    history: History
    glyphs: Glyphs
    owners: Mapping[int, str | None]
    """Users by pid; those of harvests are nobody's own work."""
    harvested: Mapping[int, str]
    """Jobs of harvests by pid."""


def look(columns: Sequence[tuple[Column, int]], snapshot: Snapshot, history: History, glyphs: Glyphs) -> Look:
    """What the rows of this snapshot share."""
    owners = {process.pid: process.identity.owner.user for process in snapshot.frame.processes}
    return Look(columns, snapshot, history, glyphs, owners, harvested.jobs(snapshot.frame))


def columns_for(frame: Frame, cells: int) -> list[tuple[Column, int]]:
    """The columns that fit; those that no GPU of this machine can fill are left out."""
    has_gpm = any(gpu.device.has_gpm for gpu in frame.gpus)
    has_links = any(
        gpu.get("nvlink_rx_bytes_per_second") or gpu.get("nvlink_tx_bytes_per_second") for gpu in frame.gpus
    )
    label = max((len(gpu.device.label) for gpu in frame.gpus), default=0)
    name = max((len(short_name(gpu)) for gpu in frame.gpus), default=4)
    columns = [
        Column("id", "GPU", max(3, label), 0, right=False),
        Column("name", "NAME", min(_NAME_CELLS, max(4, name)), 11, right=False),
        Column("users", "USED BY", 10, 10, right=False),
        Column("temperature", "TEMP", 4, 1),
        Column("power", "POWER", 8, 2),
        Column("gpu", "UTIL", 4, 0),
        Column("gpu_bar", "", 6, 3, right=False, stretch=4),
        Column("memory", "MEMORY", 10, 1),
        Column("memory_bar", "", 6, 7, right=False, stretch=4),
        Column("sm", "SM", 4, 4),
        Column("tensor", "TC", 4, 4),
        Column("dram", "DRAM", 4, 8) if has_gpm else Column("memory_busy", "MBUS", 4, 8),
        Column("clock", "MHz", 4, 9),
        Column("held", "HELD BY", 10, 5, right=False),
        Column("pcie", "PCIe rx/tx", 15, 12),
        Column("nvlink", "NVLink rx/tx", 15, 12),
        Column("history", "SM TREND" if has_gpm else "TREND", 8, 6, right=False, stretch=ENDLESS),
    ]
    unfit = set() if has_gpm else {"sm", "tensor"}
    unfit |= set() if has_links else {"nvlink"}
    return chosen([column for column in columns if column.key not in unfit], cells)


def heading(columns: Sequence[tuple[Column, int]], status: Line, cells: int) -> Line:
    """The titles, and at the right end what else is to be said."""
    titles = joined(padded(words(column.title, "head"), room, right=column.right) for column, room in columns)
    return ends((Piece(" "), *titles), status, cells)


def line(gpu: GpuReading, look: Look) -> Line:
    """One GPU; one that does not answer says why."""
    trouble = silence(gpu, look.snapshot.frame)
    if trouble is not None:
        cells = sum(room + 1 for _, room in look.columns) - 1
        text = look.glyphs.clean(f"{trouble.code.replace('_', ' ')}: {trouble.detail}")
        named = f"{gpu.device.label:<4} {look.glyphs.warning} "
        return padded(
            (Piece(named, "bad"), Piece(cut(text, cells - len(named), look.glyphs.ellipsis), "bad")), cells
        )
    return joined(
        padded(_CELLS[column.key](gpu, room, look), room, right=column.right) for column, room in look.columns
    )


def silence(gpu: GpuReading, frame: Frame) -> Health | None:
    """Why nothing is known about a GPU, None when something is."""
    if gpu.values:
        return None
    subject = f"gpu {gpu.device.label}"
    return next((item for item in frame.health if item.subject == subject and item.is_problem), None)


def nothing(frame: Frame, cells: int, glyphs: Glyphs) -> list[Line]:
    """What stands in the table when there is no GPU."""
    why = [item for item in frame.health if item.source == "nvml" and item.is_problem]
    text = [f"{item.detail}" + (f" ({item.hint})" if item.hint else "") for item in why] or [
        "no GPU in this machine"
    ]
    return [
        words(cut(f" {glyphs.warning} {glyphs.clean(item)}", cells, glyphs.ellipsis), "warn")
        for item in text[:2]
    ]


def short_name(gpu: GpuReading) -> str:
    """`NVIDIA H100 80GB HBM3` as `H100 80GB HBM3`."""
    name = gpu.device.name
    for word in ("NVIDIA ", "GeForce ", "Tesla ", "Quadro "):
        name = name.removeprefix(word)
    return human.plain(name)


def _temperature(gpu: GpuReading, room: int, look: Look) -> Line:  # noqa: ARG001
    value, limit = gpu.get("temperature_celsius"), gpu.get("temperature_slowdown_celsius")
    if value is None:
        return words(human.UNKNOWN, "dim")
    left = ENDLESS if limit is None else limit - value
    if left <= _HOT_CELSIUS:
        return words(f"{human.celsius(value)}!", "bad")
    return words(human.celsius(value), "warn" if left <= _WARM_CELSIUS else "plain")


def _power(gpu: GpuReading, room: int, look: Look) -> Line:  # noqa: ARG001
    used, limit = gpu.get("power_watts"), gpu.get("power_limit_watts")
    text = human.watts(used) if limit is None else f"{human.number(used)}/{human.watts(limit)}"
    return words(text, "dim" if used is None else "plain")


def _ratio(name: str) -> Callable[[GpuReading, int, Look], Line]:
    def cell(gpu: GpuReading, room: int, look: Look) -> Line:  # noqa: ARG001
        value = gpu.get(name)
        return words(human.ratio(value), level(value))

    return cell


def _gpu_bar(gpu: GpuReading, room: int, look: Look) -> Line:
    value = gpu.get("gpu_utilization_ratio")
    return bar(value, room, level(value), look.glyphs)


def _memory(gpu: GpuReading, room: int, look: Look) -> Line:  # noqa: ARG001
    used, total = gpu.get("memory_used_bytes"), gpu.get("memory_total_bytes")
    return words(human.sizes(used, total), _memory_tone(gpu))


def _memory_bar(gpu: GpuReading, room: int, look: Look) -> Line:
    return bar(
        share(gpu.get("memory_used_bytes"), gpu.get("memory_total_bytes")),
        room,
        _memory_tone(gpu),
        look.glyphs,
    )


def _memory_tone(gpu: GpuReading) -> Tone:
    used = share(gpu.get("memory_used_bytes"), gpu.get("memory_total_bytes"))
    if used is None:
        return "dim"
    return "warn" if used >= _FULL_MEMORY else "memory"


def _clock(gpu: GpuReading, room: int, look: Look) -> Line:  # noqa: ARG001
    value = gpu.get("sm_clock_hertz")
    return words(human.number(None if value is None else value / 1e6), "dim" if value is None else "plain")


def _held(gpu: GpuReading, room: int, look: Look) -> Line:
    found = reasons(gpu)
    if not found:
        return ()
    name = "low cap" if found[0].name == "power cap" and is_lowered_cap(gpu) else found[0].name
    tone: Tone = "warn" if name == "low cap" else _HELD_TONES[found[0].weight]
    mark = look.glyphs.warning if found[0].weight == "fault" else ""
    return words(cut(mark + _HELD.get(name, name), room, look.glyphs.ellipsis), tone)


def _users(gpu: GpuReading, room: int, look: Look) -> Line:
    pids = {process.pid for process in gpu.processes or ()}
    found = sorted({look.owners.get(pid) or human.UNKNOWN for pid in pids - look.harvested.keys()})
    if not found:
        return words(cut("harvested", room, look.glyphs.ellipsis), "accent") if _is_lent(gpu, look) else ()
    more = f" +{len(found) - 1}" if len(found) > 1 else ""
    return words(cut(look.glyphs.clean(found[0]), room - len(more), look.glyphs.ellipsis) + more)


def _is_lent(gpu: GpuReading, look: Look) -> bool:
    return harvested.is_lent(gpu, look.harvested, look.owners)


def _link(link: str) -> Callable[[GpuReading, int, Look], Line]:
    def cell(gpu: GpuReading, room: int, look: Look) -> Line:  # noqa: ARG001
        rates: Values = look.snapshot.rates.gpus.get(gpu.device.uuid, {})
        names = (f"{link}_rx_bytes_per_second", f"{link}_tx_bytes_per_second")
        both = [rates.get(name) if gpu.get(name) is None else gpu.get(name) for name in names]
        text = "/".join(human.rate(value).removesuffix("B/s").replace(" ", "") for value in both)
        return words(text if both == [None, None] else f"{text} B/s", "plain" if any(both) else "dim")

    return cell


def _history(gpu: GpuReading, room: int, look: Look) -> Line:
    values = [moment.activity for moment in look.history.last(gpu.device.uuid, room)]
    return trend(values, room, look.glyphs)


_CELLS: dict[str, Callable[[GpuReading, int, Look], Line]] = {
    "id": lambda gpu, _room, _look: words(gpu.device.label, "strong"),
    "name": lambda gpu, room, look: words(
        cut(look.glyphs.clean(short_name(gpu)), room, look.glyphs.ellipsis), "dim"
    ),
    "users": _users,
    "temperature": _temperature,
    "power": _power,
    "gpu": _ratio("gpu_utilization_ratio"),
    "gpu_bar": _gpu_bar,
    "memory": _memory,
    "memory_bar": _memory_bar,
    "sm": _ratio("sm_active_ratio"),
    "tensor": _ratio("tensor_active_ratio"),
    "dram": _ratio("dram_active_ratio"),
    "memory_busy": _ratio("memory_utilization_ratio"),
    "clock": _clock,
    "held": _held,
    "pcie": _link("pcie"),
    "nvlink": _link("nvlink"),
    "history": _history,
}
