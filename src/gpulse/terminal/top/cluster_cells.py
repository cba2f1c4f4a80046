"""Cells and columns of the cluster view: a glyph and a number for each GPU, and the rows of its tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from rich.cells import cell_len

from gpulse.cluster.protocol.answers import GpuHolderAnswer, GpuOccupancy
from gpulse.model.gpu_state import GPU_STATES, STATE_TITLES, GpuState
from gpulse.terminal import value_format as human
from gpulse.terminal.top.cluster_rows import JobRow, NodeRow, SortOrder, finding_of, program_of
from gpulse.terminal.top.styled_text import (
    UNLIMITED_CELLS,
    Glyphs,
    Line,
    PanelColumn,
    StyledText,
    Tone,
    fit_columns,
    fit_parts,
    join,
    level,
    pad,
    styled,
    truncate,
    width,
)

STATE_GLYPHS: Mapping[GpuState, str] = {
    "busy": "●",
    "idle": "◐",
    "free": "○",
    "harvested": "◇",
    "faulty": "⊘",
    "lost": "✕",
    "unknown": "?",
}
"""A shape for every state, so that color is not the only signal."""
ASCII_STATE_GLYPHS: Mapping[GpuState, str] = {
    "busy": "*",
    "idle": "=",
    "free": "o",
    "harvested": "+",
    "faulty": "!",
    "lost": "x",
    "unknown": "?",
}
_STATE_TONES: Mapping[GpuState, Tone] = {
    "busy": "level2",
    "idle": "memory",
    "free": "good",
    "harvested": "good",
    "faulty": "bad",
    "lost": "dim",
    "unknown": "dim",
}
_SHORT_TITLES: Mapping[GpuState, str] = {**STATE_TITLES, "idle": "idle", "harvested": "harv."}
_SEVERITY_TONES: Mapping[str, Tone] = {"critical": "alert", "high": "bad", "medium": "warn", "low": "plain"}
_NUMBER_CELLS = 5
"""A glyph, a number of three digits, and a blank."""
_MAX_NAME_CELLS = 24
_WIDE_CELLS = 100

Columns = Sequence[tuple[PanelColumn, int]]


def state_glyph(state: GpuState, glyphs: Glyphs) -> StyledText:
    """Return the shape of a state."""
    shapes = ASCII_STATE_GLYPHS if glyphs.is_ascii else STATE_GLYPHS
    return StyledText(shapes[state], _STATE_TONES[state])


def totals_line(counts: Mapping[GpuState, int], watts: float | None, cells: int, glyphs: Glyphs) -> Line:
    """Return the number of GPUs in each state, which is also the legend, and the power of all."""
    power = styled(_kilowatts(watts), "power")
    listed = [state for state in GPU_STATES if counts[state] or state != "unknown"]
    used = [state for state in listed if counts[state]]
    for states, titles, gap in (
        (listed, STATE_TITLES, "   "),
        (listed, STATE_TITLES, "  "),
        (listed, _SHORT_TITLES, "  "),
        (used, _SHORT_TITLES, "  "),
        (used, {}, "  "),
    ):
        parts = [*(_total(state, counts[state], titles.get(state, ""), glyphs) for state in states), power]
        if width(join(parts, gap)) <= cells - 2:
            break
    return (StyledText(" "), *fit_parts(list(enumerate(parts)), cells - 1, gap))


def _total(state: GpuState, count: int, title: str, glyphs: Glyphs) -> Line:
    tone: Tone = "strong" if count else "dim"
    return (
        state_glyph(state, glyphs),
        StyledText(f" {count}", tone),
        StyledText(f" {title}" if title else "", "dim"),
    )


def _kilowatts(watts: float | None) -> str:
    if watts is None:
        return human.UNKNOWN
    return f"{watts / 1000:.1f} kW" if watts >= 1000 else f"{watts:.0f} W"


def gpu_cells(gpus: Sequence[GpuOccupancy], room: int, glyphs: Glyphs) -> Line:
    """Return a cell for each GPU: a glyph with its activity in percent, or only the glyph if there is little room."""
    if len(gpus) * _NUMBER_CELLS - 1 <= room:
        return join([_numbered_cell(gpu, glyphs) for gpu in gpus])
    gap = " " if 2 * len(gpus) - 1 <= room else ""
    fitting = gpus if len(gpus) <= room else gpus[: max(0, room - 4)]
    hidden = len(gpus) - len(fitting)
    cells = join([(state_glyph(gpu.state, glyphs),) for gpu in fitting], gap)
    return (*cells, StyledText(f"+{hidden}", "dim")) if hidden else cells


def _numbered_cell(gpu: GpuOccupancy, glyphs: Glyphs) -> Line:
    activity = gpu.utilization_ratio
    number = human.UNKNOWN if activity is None else f"{100 * activity:.0f}"
    tone: Tone = level(activity) if gpu.state == "busy" else "dim"
    return (state_glyph(gpu.state, glyphs), StyledText(f"{number:>3}", tone))


def _column(
    key: str, title: str, room: int, priority: int, *, right: bool = True, extra_cells: int = 0
) -> PanelColumn:
    return PanelColumn(key, title, room, priority, right=right, extra_cells=extra_cells)


def _widest(texts: Sequence[str], least: int, most: int) -> int:
    return max(least, min(most, max(map(cell_len, texts), default=0)))


def node_columns(rows: Sequence[NodeRow], cells: int) -> Columns:
    """Return the columns of the table of nodes that fit."""
    name = _widest([row.name for row in rows], 6, _MAX_NAME_CELLS)
    gpus = max((len(row.gpus) for row in rows), default=1) or 1
    shown = min(gpus * _NUMBER_CELLS - 1, cells - name - 1)
    if gpus * _NUMBER_CELLS - 1 > shown:
        shown = min(2 * gpus - 1, shown)
    users = _widest([", ".join(row.users) for row in rows], 5, 20 if cells >= _WIDE_CELLS else 10)
    return fit_columns(
        [
            _column("name", "NODE", name, 0, right=False),
            _column("gpus", "GPUs", max(4, shown), 0, right=False),
            _column("utilization", "UTIL", 5, 3),
            _column("memory", "MEM", 5, 5),
            _column("power", "POWER", 6, 4),
            _column("users", "USERS", users, 2, right=False),
            _column("finding", "FINDING", 10, 1, right=False, extra_cells=UNLIMITED_CELLS),
        ],
        cells,
    )


def node_line(row: NodeRow, columns: Columns, now: float, glyphs: Glyphs) -> Line:
    """Return the row of one node."""
    cells: dict[str, Callable[[int], Line]] = {
        "name": lambda room: _text(row.name, room, glyphs, "strong" if row.state == "healthy" else "warn"),
        "gpus": lambda room: gpu_cells(row.gpus, room, glyphs) if row.gpus else styled("-", "dim"),
        "utilization": lambda _: styled(human.ratio(row.utilization), level(row.utilization)),
        "memory": lambda _: styled(human.size(row.memory), "memory"),
        "power": lambda _: styled(human.watts(row.power), "power"),
        "users": lambda room: _text(", ".join(row.users), room, glyphs),
        "finding": lambda room: _node_note(row, now, room, glyphs),
    }
    return _row(cells, columns)


def _node_note(row: NodeRow, now: float, room: int, glyphs: Glyphs) -> Line:
    if row.state == "missing":
        return styled(truncate("has never reported", room, glyphs.ellipsis), "warn")
    if row.state != "healthy":
        silent = "" if row.seen is None else f" {human.since(row.seen, now)}"
        return styled(truncate(f"{row.state}{silent}", room, glyphs.ellipsis), "warn")
    if not row.findings:
        return ()
    worst = row.findings[0]
    more = f" +{len(row.findings) - 1}" if len(row.findings) > 1 else ""
    text = truncate(glyphs.clean(worst.summary), room - 2 - len(more), glyphs.ellipsis)
    tone = _SEVERITY_TONES.get(worst.severity, "plain")
    return (StyledText(f"{glyphs.warning} ", tone), StyledText(text), StyledText(more, "dim"))


def job_columns(rows: Sequence[JobRow], cells: int) -> Columns:
    """Return the columns of the table of jobs that fit."""
    return fit_columns(
        [
            _column("name", "JOB", _widest([row.name for row in rows], 6, 20), 0, right=False),
            _column("user", "USER", _widest([row.user for row in rows], 5, 12), 0, right=False),
            _column("gpus", "GPUS", 5, 0),
            _column("idle", "IDLE", 5, 2),
            _column("utilization", "UTIL", 5, 1),
            _column("memory", "MEM", 5, 4),
            _column("elapsed", "TIME", 8, 3),
            _column(
                "nodes",
                "WHERE",
                _widest([_where(row) for row in rows], 10, 30),
                5,
                right=False,
                extra_cells=10,
            ),
            _column("program", "PROGRAM", 12, 2, right=False, extra_cells=UNLIMITED_CELLS),
        ],
        cells,
    )


def job_line(row: JobRow, columns: Columns, now: float, glyphs: Glyphs) -> Line:
    """Return the row of one job."""
    elapsed = None if row.start is None else max(0.0, now - row.start)
    idle: Tone = "memory" if row.idle else "dim"
    cells: dict[str, Callable[[int], Line]] = {
        "name": lambda room: _text(row.name, room, glyphs, "strong"),
        "user": lambda room: _text(row.user or human.UNKNOWN, room, glyphs),
        "gpus": lambda _: styled(str(len(row.gpus)), "strong"),
        "idle": lambda _: styled(str(row.idle), idle),
        "utilization": lambda _: styled(human.ratio(row.utilization), level(row.utilization)),
        "memory": lambda _: styled(human.size(row.memory), "memory"),
        "elapsed": lambda _: styled(human.duration(elapsed), "dim"),
        "nodes": lambda room: _text(_where(row), room, glyphs, "dim"),
        "program": lambda room: _text(row.program, room, glyphs),
    }
    return _row(cells, columns)


def _where(row: JobRow) -> str:
    first, *others = row.nodes
    if others:
        return f"{first} +{len(others)}"
    labels = [gpu.label for _, gpu in row.gpus]
    return f"{first}:{labels[0]}" if len(labels) == 1 else first


def gpu_columns(node: NodeRow, cells: int) -> Columns:
    """Return the columns of the table of a node's GPUs that fit."""
    users = [_users_of(gpu) for gpu in node.gpus]
    jobs = [_main_holder(gpu).job or "" for gpu in node.gpus]
    columns = [
        _column("gpu", "GPU", 4, 0),
        _column("state", "STATE", 11, 0, right=False),
        _column("utilization", "UTIL", 5, 0),
        _column("memory", "MEM", 9, 1),
        _column("power", "POWER", 6, 3),
        _column("temperature", "TEMP", 4, 6),
        _column("user", "USER", _widest(users, 4, 12), 1, right=False),
        _column("elapsed", "TIME", 8, 5),
        _column("program", "PROGRAM", 12, 2, right=False, extra_cells=24),
        _column("finding", "FINDING", 14, 4, right=False, extra_cells=UNLIMITED_CELLS),
    ]
    if any(jobs):
        columns.insert(-3, _column("job", "JOB", _widest(jobs, 6, 18), 6, right=False))
    return fit_columns(columns, cells)


def gpu_line(gpu: GpuOccupancy, node: NodeRow, columns: Columns, now: float, glyphs: Glyphs) -> Line:
    """Return the row of one GPU."""
    holder = _main_holder(gpu)
    others = len(gpu.holders or ()) - 1
    program = f"{program_of(holder)}{f' +{others}' if others > 0 else ''}"
    elapsed = None if holder.start_time is None else max(0.0, now - holder.start_time)
    users = _users_of(gpu)
    cells: dict[str, Callable[[int], Line]] = {
        "gpu": lambda room: _text(gpu.label, room, glyphs, "strong"),
        "state": lambda _: (state_glyph(gpu.state, glyphs), StyledText(f" {STATE_TITLES[gpu.state]}")),
        "utilization": lambda _: styled(human.ratio(gpu.utilization_ratio), level(gpu.utilization_ratio)),
        "memory": lambda _: styled(human.sizes(gpu.memory_used_bytes, gpu.memory_total_bytes), "memory"),
        "power": lambda _: styled(human.watts(gpu.power_watts), "power"),
        "temperature": lambda _: styled(human.celsius(gpu.temperature_celsius)),
        "user": lambda room: _text(users, room, glyphs),
        "job": lambda room: _text(holder.job or "", room, glyphs, "dim"),
        "elapsed": lambda _: styled("" if elapsed is None else human.duration(elapsed), "dim"),
        "program": lambda room: _text(program, room, glyphs),
        "finding": lambda room: _gpu_note(gpu, node, room, glyphs),
    }
    return _row(cells, columns)


def _users_of(gpu: GpuOccupancy) -> str:
    """Return the users of a GPU, or that of the harvest on it."""
    return ", ".join(gpu.users) or (_main_holder(gpu).user or "")


def _gpu_note(gpu: GpuOccupancy, node: NodeRow, room: int, glyphs: Glyphs) -> Line:
    finding = finding_of(gpu, node)
    if finding is None:
        return ()
    summary = finding.summary.removeprefix(f"GPU {gpu.label}").removeprefix(":").strip()
    tone = _SEVERITY_TONES.get(finding.severity, "plain")
    return (
        StyledText(f"{glyphs.warning} ", tone),
        StyledText(truncate(glyphs.clean(summary), room - 2, glyphs.ellipsis)),
    )


_NO_HOLDER = GpuHolderAnswer(
    pid=0, user=None, job=None, name=None, command=None, gpu_memory_bytes=None, start_time=None
)


def _main_holder(gpu: GpuOccupancy) -> GpuHolderAnswer:
    """Return the process with the most memory on a GPU."""
    return gpu.holders[0] if gpu.holders else _NO_HOLDER


def heading(
    columns: Columns, order: SortOrder | None, labels: Sequence[str], cells: int, glyphs: Glyphs
) -> Line:
    """Return the titles of columns, with an arrow at the sorted one.

    Args:
        columns: The columns.
        order: The sort order, if there is one.
        labels: Labels of the GPUs above their cells; empty if nodes differ in them.
        cells: Cells of the line.
        glyphs: Characters to draw with.
    """
    titles = []
    for column, room in columns:
        if column.key == "gpus" and labels and len(labels) * _NUMBER_CELLS - 1 <= room:
            numbers = " ".join(f"{label:>4}" for label in labels)
            titles.append(pad(styled(numbers, "head"), room))
        elif order is not None and column.key == order.column:
            arrow = glyphs.down if order.descending else glyphs.up
            text = truncate(column.title, room - 1, "") + arrow
            titles.append(pad(styled(text, "accent"), room, right=column.right))
        else:
            titles.append(pad(styled(column.title, "head"), room, right=column.right))
    return pad((StyledText(" "), *join(titles)), cells)


def _row(cells: Mapping[str, Callable[[int], Line]], columns: Columns) -> Line:
    return join(pad(cells[column.key](room), room, right=column.right) for column, room in columns)


def _text(text: str, room: int, glyphs: Glyphs, tone: Tone = "plain") -> Line:
    return styled(truncate(glyphs.clean(text) if text else "", room, glyphs.ellipsis), tone)
