"""Layout of the live view's screen: the height of every panel, and its lines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from gpulse.model.counter_rates import ProcessKey
from gpulse.model.formatting import clock_time
from gpulse.model.frame import Frame, GpuReading
from gpulse.model.metric_catalog import Values
from gpulse.terminal import value_format as human
from gpulse.terminal.top import findings_panel, gpu_panel, process_panel
from gpulse.terminal.top.gpu_panel import GpuHistory, GpuMoment, activity, divide, short_name
from gpulse.terminal.top.process_panel import (
    ProcessEntry,
    ProcessTreeRow,
    build_entries,
    build_rows,
    sort_title,
)
from gpulse.terminal.top.styled_text import (
    Glyphs,
    Line,
    StyledText,
    Tone,
    align_both,
    bar,
    draw_box,
    fit_parts,
    join,
    level,
    pad,
    styled,
    trend,
    truncate,
    underline_heading,
    width,
)
from gpulse.terminal.top.view_state import ListCursor, TopSnapshot, ViewState


@dataclass(frozen=True, slots=True)
class SamplingStatus:
    """State of the sampling."""

    interval_seconds: float
    ended: bool = False
    failing: bool = False


_KEY_HINTS = (
    (0, "q", "quit"),
    (0, "?", "help"),
    (1, "/", "filter"),
    (1, "s", "sort"),
    (3, "t", "tree"),
    (4, "u", "user"),
    (4, "g", "gpu"),
    (2, "k", "end"),
    (2, "space", "pause"),
    (5, "enter", "details"),
    (5, "f", "findings"),
    (6, "tab", "switch"),
)


def top_line(
    snapshot: TopSnapshot | None,
    state: ViewState,
    status: SamplingStatus,
    title: str,
    cells: int,
    glyphs: Glyphs,
) -> Line:
    """Return the top line: the node and its GPUs; at the right the interval and the time of the frame."""
    left: list[tuple[int, Line]] = [(0, styled(glyphs.clean(title), "title"))]
    right: list[StyledText] = []
    if status.ended:
        right += [StyledText(" end of recording ", "alert"), StyledText(" ")]
    if status.failing:
        right += [StyledText(" NOT SAMPLING ", "alert"), StyledText(" ")]
    if state.paused:
        right += [StyledText(" PAUSED ", "alert"), StyledText(" ")]
    right.append(StyledText(f"{status.interval_seconds:g} s ", "dim"))
    if snapshot is not None:
        frame = snapshot.frame
        left.append((1, styled(glyphs.clean(frame.node.name), "strong")))
        left.append((2, styled(_inventory(snapshot, glyphs), "plain")))
        versions = [
            f"driver {frame.node.driver}" if frame.node.driver else "",
            f"CUDA {frame.node.cuda}" if frame.node.cuda else "",
        ]
        left.append(
            (3, styled(glyphs.clean(f" {glyphs.dot} ".join(part for part in versions if part)), "dim"))
        )
        right.append(StyledText(f" {clock_time(frame.time)} ", "strong"))
    room = cells - sum(len(piece.text) for piece in right) - 1
    return align_both(
        (StyledText(" "), *fit_parts([part for part in left if part[1][0].text], room, "  ")),
        tuple(right),
        cells,
    )


def key_line(cells: int, hints: Sequence[tuple[int, str, str]] = _KEY_HINTS) -> Line:
    """Return the line with the most important keys.

    Args:
        cells: Width of the line.
        hints: Priority, key and meaning of each.
    """
    parts: list[tuple[int, Line]] = [
        (priority, (StyledText(key, "key"), StyledText(f" {text}", "dim"))) for priority, key, text in hints
    ]
    return (StyledText(" "), *fit_parts(parts, cells - 1))


def notice_line(text: str, cells: int, glyphs: Glyphs) -> Line:
    """Return a message, which is shown in place of the keys."""
    shown = truncate(f"{glyphs.warning} {glyphs.clean(text)}", cells - 2, glyphs.ellipsis)
    return (StyledText(" "), StyledText(shown, "warn"))


def position(first: int, visible: int, total: int) -> Line:
    """Return the visible rows as `9-16/64`; empty while everything is visible."""
    if visible >= total:
        return ()
    if visible < 1:
        return styled(f"0/{total}", "accent")
    return styled(f"{first + 1}-{min(total, first + visible)}/{total}", "accent")


def process_status(
    state: ViewState, place: Line, counts: tuple[int, int], glyphs: Glyphs, *, with_sort: bool
) -> Line:
    """Return the filter and the sort order of the process table."""
    parts: list[StyledText] = []
    if state.query:
        shown, total = counts
        parts.append(StyledText(f"{glyphs.clean(str(state.query))} ({shown} of {total})", "accent"))
    if with_sort:
        parts.append(StyledText(f"{sort_title(state, glyphs)} {'tree' if state.tree else 'flat'}", "dim"))
    return join([(part,) for part in parts] + ([place] if place else []))


def _inventory(snapshot: TopSnapshot, glyphs: Glyphs) -> str:
    """Return the models as `8 x H200`; MIG instances are not counted."""
    names = Counter(short_name(gpu) for gpu in snapshot.frame.gpus if gpu.device.mig_index is None)
    return ", ".join(f"{count} x {glyphs.clean(name)}" for name, count in names.most_common(2))


_BAR_CELLS = 6
_MIN_HEAT_CELLS = 8
_HOST_GAP = 2
_HOST_WIDE_CELLS = 100
_NAMED_DISK_CELLS = 76
_PRESSURE_WARN_RATIO, _PRESSURE_BAD_RATIO = 0.1, 0.4
"""Pressure (the part of the time in which some task waits) from which on it is marked as a warning, and as bad."""


def host_lines(snapshot: TopSnapshot, cells: int, glyphs: Glyphs) -> list[Line]:
    """Return the two lines about the host."""
    return [_cpu_memory_line(snapshot, cells, glyphs), _disk_network_line(snapshot, cells, glyphs)]


def _cpu_memory_line(snapshot: TopSnapshot, cells: int, glyphs: Glyphs) -> Line:
    host = snapshot.frame.host.values if snapshot.frame.host else {}
    busy = snapshot.rates.host.get("cpu_utilization_ratio")
    cpu: Line = (_label("CPU"), StyledText(f"{human.ratio(busy):>4}", _busy(busy)))
    parts = [
        (0, cpu),
        (3, _load(host, longer=cells >= _HOST_WIDE_CELLS)),
        (1, _host_memory(host, glyphs)),
        (1, _swap(host, glyphs)),
        (2, _network(snapshot)),
    ]
    parts = [part for part in parts if part[1]]
    room = cells - sum(width(line) + _HOST_GAP for _, line in parts)
    if room >= _MIN_HEAT_CELLS and snapshot.rates.cores:
        groups = group_cores(snapshot.rates.cores, room)
        parts[0] = (0, (*cpu, StyledText(" "), *trend(groups, len(groups), glyphs)))
    return (StyledText(" "), *fit_parts(parts, cells - 1, " " * _HOST_GAP))


def group_cores(cores: Sequence[float | None], cells: int) -> list[float | None]:
    """Return the busiest CPU of each of at most this many groups: a mean would hide one busy CPU."""
    size = -(-len(cores) // cells)
    groups = [cores[begin : begin + size] for begin in range(0, len(cores), size)]
    return [max((core for core in group if core is not None), default=None) for group in groups]


def _disk_network_line(snapshot: TopSnapshot, cells: int, glyphs: Glyphs) -> Line:
    pressure = _pressure(snapshot.rates.host, glyphs)
    parts = [
        (0, pressure),
        (1, _disk(snapshot, named=cells >= _NAMED_DISK_CELLS)),
        (2, _filesystem(snapshot, glyphs)),
    ]
    return (StyledText(" "), *fit_parts([part for part in parts if part[1]], cells - 1, " " * _HOST_GAP))


def _label(text: str) -> StyledText:
    return StyledText(f"{text} ", "head")


def _busy(value: float | None) -> Tone:
    if value is None:
        return "dim"
    return "warn" if value >= 0.9 else "plain"


def _load(host: Values, *, longer: bool) -> Line:
    loads = [human.number(host.get(f"load{minutes}"), 1) for minutes in ((1, 5, 15) if longer else (1,))]
    return (_label("load"), StyledText(" ".join(loads), "plain" if "load1" in host else "dim"))


def _host_memory(host: Values, glyphs: Glyphs) -> Line:
    total, available = host.get("memory_total_bytes"), host.get("memory_available_bytes")
    used = None if total is None or available is None else total - available
    part = divide(used, total)
    tone: Tone = "warn" if part is not None and part >= 0.9 else "memory"
    return (
        _label("RAM"),
        StyledText(human.sizes(used, total), tone),
        StyledText(" "),
        *bar(part, _BAR_CELLS, tone, glyphs),
    )


def _swap(host: Values, glyphs: Glyphs) -> Line:
    """Return the swap in use; empty while none is in use."""
    total, free = host.get("swap_total_bytes"), host.get("swap_free_bytes")
    if total is None or free is None or total - free <= 0:
        return ()
    return (_label("swap"), StyledText(f"{human.sizes(total - free, total)}{glyphs.up}", "warn"))


def _pressure(rates: Values, glyphs: Glyphs) -> Line:
    pieces = [_label("PSI")]
    for resource, name in (("cpu", "cpu"), ("io", "io"), ("memory", "mem")):
        value = rates.get(f"pressure_{resource}_some_ratio")
        mark, tone = "", "plain"  # type: tuple[str, Tone]
        if value is None:
            tone = "dim"
        elif value >= _PRESSURE_WARN_RATIO:
            mark, tone = (glyphs.up, "bad" if value >= _PRESSURE_BAD_RATIO else "warn")
        pieces += [
            StyledText(f"{name} ", "dim"),
            StyledText(f"{human.ratio(value):>4}", tone),
            StyledText(f"{mark or ' '} ", tone),
        ]
    return tuple(pieces[:-1]) if not pieces[-1].text.strip() else tuple(pieces)


def _disk(snapshot: TopSnapshot, *, named: bool) -> Line:
    rates = snapshot.rates.disks
    if not snapshot.frame.disks:
        return ()
    name = max((disk.name for disk in snapshot.frame.disks), key=lambda name: _weight(rates.get(name, {})))
    own = rates.get(name, {})
    return (
        _label("disk"),
        *(_named(name, own.get("busy_ratio")) if named else ()),
        *_pair("r", own.get("read_bytes_per_second"), "w", own.get("written_bytes_per_second")),
    )


def _named(disk: str, busy: float | None) -> Line:
    return (
        StyledText(f"{human.plain(disk)} ", "dim"),
        StyledText(f"{human.ratio(busy):>4}", _busy(busy)),
        StyledText(" "),
    )


def _weight(values: Values) -> tuple[float, float]:
    moved = values.get("read_bytes_per_second", 0.0) + values.get("written_bytes_per_second", 0.0)
    return values.get("busy_ratio", -1.0), moved


def _network(snapshot: TopSnapshot) -> Line:
    names = _links(snapshot.frame)
    rates = [snapshot.rates.network.get(name, {}) for name in names]
    received, sent = _total(rates, "rx_bytes_per_second"), _total(rates, "tx_bytes_per_second")
    return (_label("net"), *_pair("rx", received, "tx", sent)) if names else ()


def _links(frame: Frame) -> list[str]:
    """Return the physical interfaces; where there are none, as in a container, all but the loopback."""
    real = [link.name for link in frame.network if link.kind in ("ethernet", "infiniband")]
    return real or [link.name for link in frame.network if link.kind != "loopback"]


def _total(rates: Iterable[Values], name: str) -> float | None:
    known = [values[name] for values in rates if name in values]
    return sum(known) if known else None


def _filesystem(snapshot: TopSnapshot, glyphs: Glyphs) -> Line:
    """Return the fullest file system."""
    full = {
        item.mount_point: divide(item.values.get("used_bytes"), item.values.get("size_bytes"))
        for item in snapshot.frame.filesystems
    }
    known = {mount_point: part for mount_point, part in full.items() if part is not None}
    if not known:
        return ()
    fullest = max(known, key=lambda mount_point: known[mount_point])
    mark = glyphs.up if known[fullest] >= 0.9 else ""
    tone: Tone = "warn" if mark else "plain"
    return (
        _label("fullest mount"),
        StyledText(f"{glyphs.clean(fullest)} ", "dim"),
        StyledText(f"{human.ratio(known[fullest])}{mark}", tone),
    )


def _pair(first: str, one: float | None, second: str, other: float | None) -> Line:
    return (
        StyledText(f"{first} ", "dim"),
        StyledText(f"{_short(one):>5}", "plain" if one else "dim"),
        StyledText(f" {second} ", "dim"),
        StyledText(f"{_short(other):>5}", "plain" if other else "dim"),
        StyledText(" B/s", "dim"),
    )


def _short(value: float | None) -> str:
    """Return a rate without its unit, which follows the pair."""
    return human.rate(value).removesuffix("B/s").replace(" ", "")


_WIDE_CELLS = 150
_GAP = "   "


def chart_lines(gpu: GpuReading, history: GpuHistory, cells: int, height: int, glyphs: Glyphs) -> list[Line]:
    """Return charts of activity and memory side by side, and of power if there is room, under one line of titles."""
    moments = history.last(gpu.device.uuid, cells)
    charts: list[tuple[Line, Callable[[GpuMoment], float | None], Callable[[float], Tone]]] = [
        (_activity(gpu), lambda moment: moment.activity, level),
        (_memory(gpu), lambda moment: moment.memory, lambda _: "memory"),
    ]
    if cells >= _WIDE_CELLS:
        charts.append((_power(gpu), lambda moment: moment.power, lambda _: "power"))
    room = (cells - 2 - len(_GAP) * (len(charts) - 1)) // len(charts)
    drawn = [
        [pad(title, room), *area([value(moment) for moment in moments], room, height - 1, tone, glyphs)]
        for title, value, tone in charts
    ]
    return [pad((StyledText(" "), *join(parts, _GAP)), cells) for parts in zip(*drawn, strict=True)]


def area(
    values: Sequence[float | None], cells: int, height: int, tone: Callable[[float], Tone], glyphs: Glyphs
) -> list[Line]:
    """Return the newest values as columns of several lines; the tone of a line depends on its height."""
    newest = [None] * max(0, cells - len(values)) + list(values[-cells:])
    steps = len(glyphs.rise) - 1
    filled = [None if value is None else max(1, round(min(1.0, value) * height * steps)) for value in newest]
    out: list[Line] = []
    for row in range(height - 1, -1, -1):
        signs = "".join(
            " " if fill is None else glyphs.rise[max(0, min(steps, fill - row * steps))] for fill in filled
        )
        out.append((StyledText(signs, tone((row + 0.5) / height)),))
    return out


def _activity(gpu: GpuReading) -> Line:
    name = "SM activity" if gpu.get("sm_active_ratio") is not None else "utilization"
    return (StyledText(f"{name} ", "head"), StyledText(human.ratio(activity(gpu)), "strong"))


def _memory(gpu: GpuReading) -> Line:
    return (
        StyledText("memory ", "head"),
        StyledText(human.sizes(gpu.get("memory_used_bytes"), gpu.get("memory_total_bytes")), "strong"),
    )


def _power(gpu: GpuReading) -> Line:
    used, limit = gpu.get("power_watts"), gpu.get("power_limit_watts")
    return (StyledText("power ", "head"), StyledText(f"{human.number(used)}/{human.watts(limit)}", "strong"))


_MIN_BOXED_LINES = 30
_MIN_BOXED_CELLS = 76
_MIN_PROCESS_ROWS = 5
_MIN_CHART_LINES = 5
_MAX_CHART_LINES = 9
_MAX_FINDING_LINES = 4


@dataclass(frozen=True, slots=True)
class PanelHeights:
    """Number of rows of each panel, without boxes and titles; 0 leaves a panel out."""

    boxed: bool
    host: int
    gpus: int
    chart: int
    processes: int
    findings: int


def plan_panel_heights(cells: int, lines: int, *, gpus: int, processes: int, findings: int) -> PanelHeights:
    """Divide the lines: every panel gets a minimum, then the tables what they can use, then the chart."""
    boxed = lines >= _MIN_BOXED_LINES and cells >= _MIN_BOXED_CELLS
    frame = 2 if boxed else 0
    host = 2 if lines >= 16 else 1
    shown = min(_MAX_FINDING_LINES, max(1, findings)) if boxed else 1
    rest = lines - 2 - (host + frame) - (1 + frame) - (1 + frame) - (shown + frame)
    gpu_rows = _gpu_rows(rest, max(1, gpus), processes)
    process_rows = rest - gpu_rows
    spare = process_rows - max(_MIN_PROCESS_ROWS, processes) - frame
    chart = 0
    if boxed and spare >= _MIN_CHART_LINES and gpus:
        chart = min(_MAX_CHART_LINES, spare)
        process_rows -= chart + frame
    return PanelHeights(boxed, host, gpu_rows, chart, max(0, process_rows), shown)


def _gpu_rows(rest: int, gpus: int, processes: int) -> int:
    """Return the rows for the GPUs: all GPUs if a few processes still fit, else about half of the lines."""
    wanted = min(processes, _MIN_PROCESS_ROWS)
    if gpus + wanted <= rest:
        return gpus
    return max(1, min(gpus, rest // 2, rest - wanted))


PanelName = Literal["top", "host", "gpus", "chart", "processes", "findings", "keys"]
PANEL_NAMES: tuple[PanelName, ...] = ("top", "host", "gpus", "chart", "processes", "findings", "keys")


@dataclass(frozen=True, slots=True)
class ScreenInput:
    """Everything that the screen is drawn from."""

    snapshot: TopSnapshot | None
    history: GpuHistory
    state: ViewState
    status: SamplingStatus
    title: str
    glyphs: Glyphs
    cells: int
    lines: int
    notice: str = ""


@dataclass(frozen=True, slots=True)
class DrawnScreen:
    """The lines of each panel, and what is needed to move the cursors in them."""

    parts: dict[PanelName, list[Line]]
    marked: dict[PanelName, int]
    """Line of the cursor in each panel."""
    first_line: int = 0
    """Number of lines of a table before its first row."""
    state: ViewState = field(default_factory=ViewState)
    """The state with its cursors scrolled into view."""
    entries: Sequence[ProcessEntry] = ()
    rows: Sequence[ProcessTreeRow] = ()
    plan: PanelHeights | None = None

    @property
    def process_keys(self) -> list[ProcessKey]:
        """Keys of the processes in the table, in its order."""
        return [row.entry.key for row in self.rows]

    @property
    def selected(self) -> ProcessTreeRow | None:
        """The row of the selected process."""
        return self.rows[self.state.process.index] if self.rows else None


def draw_screen(scene: ScreenInput) -> DrawnScreen:
    """Draw the screen, or a message while there is no frame yet."""
    bottom = notice_line(scene.notice, scene.cells, scene.glyphs) if scene.notice else key_line(scene.cells)
    top = top_line(scene.snapshot, scene.state, scene.status, scene.title, scene.cells, scene.glyphs)
    if scene.snapshot is None:
        waiting: list[Line] = [(), styled("  waiting for the first sample", "dim")]
        return DrawnScreen({"top": [top], "host": waiting, "keys": [bottom]}, {}, state=scene.state)
    found = build_entries(scene.snapshot)
    listed = build_rows(found, scene.state)
    wrong = findings_panel.find_problems(scene.snapshot)
    frame = scene.snapshot.frame
    layout = plan_panel_heights(
        scene.cells, scene.lines, gpus=len(frame.gpus), processes=len(listed), findings=len(wrong)
    )
    state = replace(
        scene.state,
        gpu=scene.state.gpu.settled([gpu.device.uuid for gpu in frame.gpus], layout.gpus),
        process=scene.state.process.settled([row.entry.key for row in listed], layout.processes),
    )
    drawing = _ScreenDrawing(replace(scene, state=state), scene.snapshot, layout)
    parts: dict[PanelName, list[Line]] = {
        "top": [top],
        "host": drawing.host(),
        "gpus": drawing.gpus(),
        "chart": drawing.chart(),
        "processes": drawing.processes(listed, len(found)),
        "findings": drawing.findings(wrong),
        "keys": [bottom],
    }
    first = 2 if layout.boxed else 1
    marked: dict[PanelName, int] = {}
    if frame.gpus:
        marked["gpus"] = first + state.gpu.index - state.gpu.offset
    if listed:
        marked["processes"] = first + state.process.index - state.process.offset
    return DrawnScreen(parts, marked, first, state, found, listed, layout)


class _ScreenDrawing:
    """Draws the panels of one screen."""

    def __init__(self, scene: ScreenInput, snapshot: TopSnapshot, layout: PanelHeights) -> None:
        self._scene = scene
        self._snapshot = snapshot
        self._plan = layout
        self._glyphs = scene.glyphs
        self._cells = scene.cells - 2 if layout.boxed else scene.cells

    def host(self) -> list[Line]:
        lines = host_lines(self._snapshot, self._cells, self._glyphs)[: self._plan.host]
        return self._framed(lines, "host", ())

    def gpus(self) -> list[Line]:
        gpus, cursor = self._snapshot.frame.gpus, self._scene.state.gpu
        if not gpus:
            return self._framed(
                [(), *gpu_panel.no_gpu_lines(self._snapshot.frame, self._cells, self._glyphs)], "GPUs", ()
            )
        place = position(cursor.offset, self._plan.gpus, len(gpus))
        columns = gpu_panel.columns_for(self._snapshot.frame, self._cells - 2)
        look = gpu_panel.make_row_context(columns, self._snapshot, self._scene.history, self._glyphs)
        shown = gpus[cursor.offset : cursor.offset + self._plan.gpus]
        focused = self._scene.state.focus == "gpus"
        lines = [self._heading(gpu_panel.heading(columns, self._inner(place), self._cells))]
        lines += [
            self._marked(gpu_panel.gpu_line(gpu, look), cursor, number, focused=focused)
            for number, gpu in enumerate(shown)
        ]
        return self._framed(lines, "GPUs", place)

    def chart(self) -> list[Line]:
        if not self._plan.chart:
            return []
        gpu: GpuReading = self._snapshot.frame.gpus[self._scene.state.gpu.index]
        lines = chart_lines(gpu, self._scene.history, self._cells, self._plan.chart, self._glyphs)
        name = self._glyphs.clean(gpu_panel.short_name(gpu))
        return self._framed(lines, f"GPU {gpu.device.label} {name}", ())

    def processes(self, listed: Sequence[ProcessTreeRow], total: int) -> list[Line]:
        state, cursor, height = self._scene.state, self._scene.state.process, self._plan.processes
        place = position(cursor.offset, height, len(listed))
        shown = listed[cursor.offset : cursor.offset + height]
        hidden = sum(row.hidden for row in listed)
        columns = process_panel.columns_for(shown, self._cells - 2)
        with_sort = self._plan.boxed or state.sort not in {column.key for column, _ in columns}
        status = process_status(
            state, place, (len(listed) + hidden, total), self._glyphs, with_sort=with_sort
        )
        lines = [
            self._heading(
                process_panel.heading(columns, state, self._inner(status), self._cells, self._glyphs)
            )
        ]
        focused = state.focus == "processes"
        lines += [
            self._marked(
                process_panel.process_line(row, columns, self._glyphs), cursor, number, focused=focused
            )
            for number, row in enumerate(shown)
        ]
        if not listed:
            lines.append(
                styled("  no processes match the filter" if state.query else "  no process uses a GPU", "dim")
            )
        lines = lines[: height + 1] + [()] * (height + 1 - len(lines))
        return self._framed(lines, "processes", status)

    def findings(self, wrong: list[findings_panel.Problem]) -> list[Line]:
        lines = findings_panel.panel_lines(wrong, self._plan.findings, self._cells, self._glyphs)
        return self._framed(lines, f"findings {len(wrong)}" if wrong else "findings", ())

    def _marked(
        self, line: Line, cursor: ListCursor[ProcessKey] | ListCursor[str], number: int, *, focused: bool
    ) -> Line:
        here = focused and cursor.index == cursor.offset + number
        return (StyledText(self._glyphs.cursor if here else " ", "accent"), *line)

    def _heading(self, line: Line) -> Line:
        return line if self._plan.boxed else underline_heading(line)

    def _inner(self, status: Line) -> Line:
        """Return the status for the heading, where there is no box to show it in."""
        return () if self._plan.boxed or not status else (StyledText(" "), *status, StyledText(" "))

    def _framed(self, lines: list[Line], title: str, status: Line) -> list[Line]:
        if not self._plan.boxed:
            return lines
        inner = [pad(line, self._cells) for line in lines]
        return draw_box(inner, styled(title, "title"), status, self._scene.cells, self._glyphs)
