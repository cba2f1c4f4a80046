"""GPU table of the live view, and the recent values of each GPU for its charts."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gpulse.model.clock_event_reasons import active_clock_reasons, is_power_limit_lowered
from gpulse.model.frame import Frame, GpuReading
from gpulse.model.metric_catalog import Values
from gpulse.model.source_health import Health
from gpulse.terminal import harvest_tables
from gpulse.terminal import value_format as human
from gpulse.terminal.top.styled_text import (
    UNLIMITED_CELLS,
    Glyphs,
    Line,
    PanelColumn,
    StyledText,
    Tone,
    align_both,
    bar,
    fit_columns,
    join,
    level,
    pad,
    styled,
    trend,
    truncate,
)
from gpulse.terminal.top.view_state import TopSnapshot

_SHORT_REASONS = {
    "hardware slowdown": "HW slow",
    "thermal slowdown": "thermal",
    "hardware thermal slowdown": "HW heat",
    "power brake": "brake",
    "application clocks": "app clocks",
    "display clocks": "display",
}
"""Short forms of the reasons whose names are too long for a column."""
_REASON_TONES: dict[str, Tone] = {"fault": "bad", "notice": "warn", "normal": "dim"}
_WARM_CELSIUS, _HOT_CELSIUS = 10, 3
"""Degrees below the slowdown temperature."""
_FULL_MEMORY_RATIO = 0.95
_NAME_CELLS = 16
MAX_VALUES_PER_GPU = 600
"""Values kept for each GPU: ten minutes at one per second."""


class GpuMoment(NamedTuple):
    """One GPU at one moment; each value is a ratio from 0 to 1."""

    activity: float | None
    memory: float | None
    power: float | None


class GpuHistory:
    """Recent values of all GPUs, by UUID."""

    def __init__(self, max_values: int = MAX_VALUES_PER_GPU) -> None:
        self._max_values = max_values
        self._by_gpu: dict[str, deque[GpuMoment]] = {}

    def add(self, frame: Frame) -> None:
        """Add one frame; GPUs that are no longer in it are dropped."""
        present = {gpu.device.uuid for gpu in frame.gpus}
        for uuid in self._by_gpu.keys() - present:
            del self._by_gpu[uuid]
        for gpu in frame.gpus:
            moments = self._by_gpu.setdefault(gpu.device.uuid, deque(maxlen=self._max_values))
            moments.append(read_moment(gpu))

    def last(self, uuid: str, count: int) -> list[GpuMoment]:
        """Return the newest moments of one GPU, oldest first."""
        moments = self._by_gpu.get(uuid, ())
        begin = max(0, len(moments) - count)
        return [moment for index, moment in enumerate(moments) if index >= begin]

    def copy(self) -> GpuHistory:
        """Return a copy of the history as it is now, for a paused view."""
        other = GpuHistory(self._max_values)
        other._by_gpu = {uuid: moments.copy() for uuid, moments in self._by_gpu.items()}
        return other


def read_moment(gpu: GpuReading) -> GpuMoment:
    """Return the values of one reading that the history keeps."""
    return GpuMoment(
        activity(gpu),
        divide(gpu.get("memory_used_bytes"), gpu.get("memory_total_bytes")),
        divide(gpu.get("power_watts"), gpu.get("power_limit_watts")),
    )


def activity(gpu: GpuReading) -> float | None:
    """Return how busy the GPU is: its SM activity if known, else its utilization."""
    busy = gpu.get("sm_active_ratio")
    return gpu.get("gpu_utilization_ratio") if busy is None else busy


def divide(part: float | None, whole: float | None) -> float | None:
    """Return part divided by whole; None when either is unknown."""
    return None if part is None or not whole else part / whole


@dataclass(frozen=True, slots=True)
class RowContext:
    """What all rows of one table have in common."""

    columns: Sequence[tuple[PanelColumn, int]]
    snapshot: TopSnapshot
    history: GpuHistory
    glyphs: Glyphs
    owners: Mapping[int, str | None]
    """Users by PID, also those of harvests' processes."""
    harvested: Mapping[int, str]
    """Jobs of harvests by PID."""


def make_row_context(
    columns: Sequence[tuple[PanelColumn, int]], snapshot: TopSnapshot, history: GpuHistory, glyphs: Glyphs
) -> RowContext:
    """Return what all rows of this snapshot have in common."""
    owners = {process.pid: process.identity.owner.user for process in snapshot.frame.processes}
    return RowContext(
        columns, snapshot, history, glyphs, owners, harvest_tables.find_harvest_jobs(snapshot.frame)
    )


def columns_for(frame: Frame, cells: int) -> list[tuple[PanelColumn, int]]:
    """Return the columns that fit, without those that no GPU of this machine can fill."""
    has_gpm = any(gpu.device.has_gpm for gpu in frame.gpus)
    has_links = any(
        gpu.get("nvlink_rx_bytes_per_second") or gpu.get("nvlink_tx_bytes_per_second") for gpu in frame.gpus
    )
    label = max((len(gpu.device.label) for gpu in frame.gpus), default=0)
    name = max((len(short_name(gpu)) for gpu in frame.gpus), default=4)
    columns = [
        PanelColumn("id", "GPU", max(3, label), 0, right=False),
        PanelColumn("name", "NAME", min(_NAME_CELLS, max(4, name)), 11, right=False),
        PanelColumn("users", "USED BY", 10, 10, right=False),
        PanelColumn("temperature", "TEMP", 4, 1),
        PanelColumn("power", "POWER", 8, 2),
        PanelColumn("gpu", "UTIL", 4, 0),
        PanelColumn("gpu_bar", "", 6, 3, right=False, extra_cells=4),
        PanelColumn("memory", "MEMORY", 10, 1),
        PanelColumn("memory_bar", "", 6, 7, right=False, extra_cells=4),
        PanelColumn("sm", "SM", 4, 4),
        PanelColumn("tensor", "TC", 4, 4),
        PanelColumn("dram", "DRAM", 4, 8) if has_gpm else PanelColumn("memory_busy", "MBUS", 4, 8),
        PanelColumn("clock", "MHz", 4, 9),
        PanelColumn("held", "HELD BY", 10, 5, right=False),
        PanelColumn("pcie", "PCIe rx/tx", 15, 12),
        PanelColumn("nvlink", "NVLink rx/tx", 15, 12),
        PanelColumn(
            "history", "SM TREND" if has_gpm else "TREND", 8, 6, right=False, extra_cells=UNLIMITED_CELLS
        ),
    ]
    unfit = set() if has_gpm else {"sm", "tensor"}
    unfit |= set() if has_links else {"nvlink"}
    return fit_columns([column for column in columns if column.key not in unfit], cells)


def heading(columns: Sequence[tuple[PanelColumn, int]], status: Line, cells: int) -> Line:
    """Return the titles, with a status at the right end."""
    titles = join(pad(styled(column.title, "head"), room, right=column.right) for column, room in columns)
    return align_both((StyledText(" "), *titles), status, cells)


def gpu_line(gpu: GpuReading, context: RowContext) -> Line:
    """Return the row of one GPU; for a GPU that does not answer, the reason."""
    problem = find_silence_reason(gpu, context.snapshot.frame)
    if problem is not None:
        cells = sum(room + 1 for _, room in context.columns) - 1
        text = context.glyphs.clean(f"{problem.code.replace('_', ' ')}: {problem.detail}")
        named = f"{gpu.device.label:<4} {context.glyphs.warning} "
        return pad(
            (
                StyledText(named, "bad"),
                StyledText(truncate(text, cells - len(named), context.glyphs.ellipsis), "bad"),
            ),
            cells,
        )
    return join(
        pad(_CELLS[column.key](gpu, room, context), room, right=column.right)
        for column, room in context.columns
    )


def find_silence_reason(gpu: GpuReading, frame: Frame) -> Health | None:
    """Return why a GPU has no values at all; None when it has some."""
    if gpu.values:
        return None
    subject = f"gpu {gpu.device.label}"
    return next((item for item in frame.health if item.subject == subject and item.is_problem), None)


def no_gpu_lines(frame: Frame, cells: int, glyphs: Glyphs) -> list[Line]:
    """Return the text in place of the table when there is no GPU."""
    why = [item for item in frame.health if item.source == "nvml" and item.is_problem]
    text = [f"{item.detail}" + (f" ({item.hint})" if item.hint else "") for item in why] or [
        "no GPU in this machine"
    ]
    return [
        styled(truncate(f" {glyphs.warning} {glyphs.clean(item)}", cells, glyphs.ellipsis), "warn")
        for item in text[:2]
    ]


def short_name(gpu: GpuReading) -> str:
    """Return `H100 80GB HBM3` for `NVIDIA H100 80GB HBM3`."""
    name = gpu.device.name
    for word in ("NVIDIA ", "GeForce ", "Tesla ", "Quadro "):
        name = name.removeprefix(word)
    return human.plain(name)


def _temperature(gpu: GpuReading, room: int, context: RowContext) -> Line:  # noqa: ARG001
    value, limit = gpu.get("temperature_celsius"), gpu.get("temperature_slowdown_celsius")
    if value is None:
        return styled(human.UNKNOWN, "dim")
    left = UNLIMITED_CELLS if limit is None else limit - value
    if left <= _HOT_CELSIUS:
        return styled(f"{human.celsius(value)}!", "bad")
    return styled(human.celsius(value), "warn" if left <= _WARM_CELSIUS else "plain")


def _power(gpu: GpuReading, room: int, context: RowContext) -> Line:  # noqa: ARG001
    used, limit = gpu.get("power_watts"), gpu.get("power_limit_watts")
    text = human.watts(used) if limit is None else f"{human.number(used)}/{human.watts(limit)}"
    return styled(text, "dim" if used is None else "plain")


def _ratio(name: str) -> Callable[[GpuReading, int, RowContext], Line]:
    def cell(gpu: GpuReading, room: int, context: RowContext) -> Line:  # noqa: ARG001
        value = gpu.get(name)
        return styled(human.ratio(value), level(value))

    return cell


def _gpu_bar(gpu: GpuReading, room: int, context: RowContext) -> Line:
    value = gpu.get("gpu_utilization_ratio")
    return bar(value, room, level(value), context.glyphs)


def _memory(gpu: GpuReading, room: int, context: RowContext) -> Line:  # noqa: ARG001
    used, total = gpu.get("memory_used_bytes"), gpu.get("memory_total_bytes")
    return styled(human.sizes(used, total), _memory_tone(gpu))


def _memory_bar(gpu: GpuReading, room: int, context: RowContext) -> Line:
    return bar(
        divide(gpu.get("memory_used_bytes"), gpu.get("memory_total_bytes")),
        room,
        _memory_tone(gpu),
        context.glyphs,
    )


def _memory_tone(gpu: GpuReading) -> Tone:
    used = divide(gpu.get("memory_used_bytes"), gpu.get("memory_total_bytes"))
    if used is None:
        return "dim"
    return "warn" if used >= _FULL_MEMORY_RATIO else "memory"


def _clock(gpu: GpuReading, room: int, context: RowContext) -> Line:  # noqa: ARG001
    value = gpu.get("sm_clock_hertz")
    return styled(human.number(None if value is None else value / 1e6), "dim" if value is None else "plain")


def _clock_reason(gpu: GpuReading, room: int, context: RowContext) -> Line:
    found = active_clock_reasons(gpu)
    if not found:
        return ()
    name = "low cap" if found[0].name == "power cap" and is_power_limit_lowered(gpu) else found[0].name
    tone: Tone = "warn" if name == "low cap" else _REASON_TONES[found[0].weight]
    mark = context.glyphs.warning if found[0].weight == "fault" else ""
    return styled(truncate(mark + _SHORT_REASONS.get(name, name), room, context.glyphs.ellipsis), tone)


def _users(gpu: GpuReading, room: int, context: RowContext) -> Line:
    pids = {process.pid for process in gpu.processes or ()}
    found = sorted({context.owners.get(pid) or human.UNKNOWN for pid in pids - context.harvested.keys()})
    if not found:
        return (
            styled(truncate("harvested", room, context.glyphs.ellipsis), "accent")
            if _is_only_harvested(gpu, context)
            else ()
        )
    more = f" +{len(found) - 1}" if len(found) > 1 else ""
    return styled(truncate(context.glyphs.clean(found[0]), room - len(more), context.glyphs.ellipsis) + more)


def _is_only_harvested(gpu: GpuReading, context: RowContext) -> bool:
    return harvest_tables.is_only_harvested(gpu, context.harvested, context.owners)


def _link(link: str) -> Callable[[GpuReading, int, RowContext], Line]:
    def cell(gpu: GpuReading, room: int, context: RowContext) -> Line:  # noqa: ARG001
        rates: Values = context.snapshot.rates.gpus.get(gpu.device.uuid, {})
        names = (f"{link}_rx_bytes_per_second", f"{link}_tx_bytes_per_second")
        both = [rates.get(name) if gpu.get(name) is None else gpu.get(name) for name in names]
        text = "/".join(human.rate(value).removesuffix("B/s").replace(" ", "") for value in both)
        return styled(text if both == [None, None] else f"{text} B/s", "plain" if any(both) else "dim")

    return cell


def _history(gpu: GpuReading, room: int, context: RowContext) -> Line:
    values = [moment.activity for moment in context.history.last(gpu.device.uuid, room)]
    return trend(values, room, context.glyphs)


_CELLS: dict[str, Callable[[GpuReading, int, RowContext], Line]] = {
    "id": lambda gpu, _room, _context: styled(gpu.device.label, "strong"),
    "name": lambda gpu, room, context: styled(
        truncate(context.glyphs.clean(short_name(gpu)), room, context.glyphs.ellipsis), "dim"
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
    "held": _clock_reason,
    "pcie": _link("pcie"),
    "nvlink": _link("nvlink"),
    "history": _history,
}
