"""Layout of the cluster view's screen: the height of every panel, and its lines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from gpulse.cluster.protocol.answers import GpuOccupancy
from gpulse.diagnosis.line_search import describe_first_line
from gpulse.model.finding import SEVERITIES, Advice, FindingGroup, finding_kind
from gpulse.model.formatting import clock_time
from gpulse.terminal import value_format as human
from gpulse.terminal.top import cluster_cells, cluster_rows, findings_panel
from gpulse.terminal.top.cluster_rows import TABS, ClusterSnapshot, ClusterViewState, JobRow, NodeRow, Tab
from gpulse.terminal.top.findings_panel import Problem
from gpulse.terminal.top.screen_layout import key_line, notice_line, position
from gpulse.terminal.top.styled_text import (
    Glyphs,
    Line,
    StyledText,
    align_both,
    draw_box,
    fit_parts,
    join,
    pad,
    styled,
    truncate,
    underline_heading,
)

PanelName = Literal["top", "totals", "tabs", "main", "jobs", "findings", "keys"]
PANEL_NAMES: tuple[PanelName, ...] = ("top", "totals", "tabs", "main", "jobs", "findings", "keys")

_MIN_BOXED_LINES = 30
_MIN_BOXED_CELLS = 76
_MIN_PREVIEW_ROWS = 3
_MAX_FINDING_ROWS = 6
_KEY_HINTS = (
    (0, "q", "quit"),
    (0, "?", "help"),
    (1, "tab", "nodes, jobs, findings"),
    (1, "enter", "open"),
    (2, "esc", "back"),
    (1, "/", "filter"),
    (2, "s", "sort"),
    (3, "u", "user"),
    (3, "space", "pause"),
    (4, "f", "findings"),
)


@dataclass(frozen=True, slots=True)
class ConnectionStatus:
    """State of the connection to the head."""

    address: str
    interval_seconds: float
    lost_since: float | None = None
    """Epoch seconds of the first failed request, if the last one failed."""
    problem: str = ""
    """Why it failed."""


@dataclass(frozen=True, slots=True)
class ClusterScreenInput:
    """Everything that the screen is drawn from."""

    snapshot: ClusterSnapshot | None
    state: ClusterViewState
    status: ConnectionStatus
    glyphs: Glyphs
    cells: int
    lines: int
    now: float
    """Epoch seconds."""
    notice: str = ""


@dataclass(frozen=True, slots=True)
class DrawnCluster:
    """The lines of each panel, and what is needed to move the cursor."""

    parts: dict[PanelName, list[Line]]
    mark: int | None = None
    """Line of the cursor in the main panel."""
    first_line: int = 0
    """Number of lines of the main panel before its first row."""
    state: ClusterViewState = field(default_factory=ClusterViewState)
    """The state with its cursor scrolled into view."""
    keys: Sequence[str] = ()
    """Keys of the rows of the table, in its order."""
    height: int = 0
    """Number of rows of the table in view."""
    groups: Sequence[FindingGroup] = ()
    """The findings of the table, while it shows findings."""


def draw_cluster(scene: ClusterScreenInput) -> DrawnCluster:
    """Draw the screen, or a message while the head has not answered yet."""
    top, bottom = _top_line(scene), _bottom_line(scene)
    if scene.snapshot is None:
        waiting = scene.status.problem or f"waiting for the head at {scene.status.address}"
        lines: list[Line] = [(), styled(f"  {scene.glyphs.clean(waiting)}", "dim")]
        return DrawnCluster({"top": [top], "main": lines, "keys": [bottom]}, state=scene.state)
    drawing = _ClusterDrawing(scene, scene.snapshot)
    return drawing.draw(top, bottom)


def _top_line(scene: ClusterScreenInput) -> Line:
    glyphs, status, snapshot = scene.glyphs, scene.status, scene.snapshot
    left: list[tuple[int, Line]] = [
        (0, styled("gpulse", "title")),
        (1, styled(glyphs.clean(status.address), "strong")),
    ]
    right: list[StyledText] = []
    if status.lost_since is not None and snapshot is not None:
        text = f" DISCONNECTED since {clock_time(status.lost_since)}; showing the last values "
        right += [StyledText(text, "alert"), StyledText(" ")]
    if scene.state.paused:
        right += [StyledText(" PAUSED ", "alert"), StyledText(" ")]
    right.append(StyledText(f"{status.interval_seconds:g} s ", "dim"))
    if snapshot is not None:
        nodes = snapshot.occupancy.nodes
        gpus = sum(len(node.gpus) for node in nodes)
        left.append((2, styled(f"{human.count_noun(len(nodes), 'node')}, {gpus} GPUs")))
        right.append(StyledText(f" {clock_time(snapshot.occupancy.time)} ", "strong"))
    room = scene.cells - sum(len(piece.text) for piece in right) - 1
    return align_both((StyledText(" "), *fit_parts(left, room, "  ")), tuple(right), scene.cells)


def _bottom_line(scene: ClusterScreenInput) -> Line:
    if scene.notice:
        return notice_line(scene.notice, scene.cells, scene.glyphs)
    return key_line(scene.cells, _KEY_HINTS)


def build_problems(groups: Sequence[FindingGroup], now: float) -> list[Problem]:
    """Return groups of findings as the findings of the local view, worst first."""
    return [_problem(group, now) for group in groups]


def _problem(group: FindingGroup, now: float) -> Problem:
    worst = group.worst
    starts = [start for one in group.members if isinstance(start := one.get("start"), int | float)]
    about, *others = group.places or ("",)
    subject = f"{worst.get('node')}" if worst.get("label") is None else f"GPU {worst.get('label')}"
    text = str(worst.get("summary") or group.id).removeprefix(subject).removeprefix(":").strip()
    return Problem(
        next(severity for severity in SEVERITIES if severity == group.severity),
        f"{about}{f' and {len(others)} more' if others else ''}",
        text,
        tuple(Advice(**advice) for advice in worst.get("advice") or ()),
        since=human.since(min(starts), now) if starts else "",
    )


def finding_page(group: FindingGroup, now: float, glyphs: Glyphs) -> list[Line]:
    """Return the page about one kind of finding: where it is, since when, and what to do."""
    lines = findings_panel.page_lines([_problem(group, now)], glyphs)
    lines.append((StyledText("  where", "head"), StyledText(glyphs.clean("; ".join(group.places)))))
    if (code := describe_first_line(group.members)) is not None:
        lines.append((StyledText("  code", "head"), StyledText(glyphs.clean(code))))
    lines.append((StyledText("  more", "head"), StyledText(f"gpulse explain {group.id}", "dim")))
    return lines


class _ClusterDrawing:
    """Draws the panels of one screen."""

    def __init__(self, scene: ClusterScreenInput, snapshot: ClusterSnapshot) -> None:
        self._scene = scene
        self._state = scene.state
        self._glyphs = scene.glyphs
        self._snapshot = snapshot
        self._boxed = scene.lines >= _MIN_BOXED_LINES and scene.cells >= _MIN_BOXED_CELLS
        self._cells = scene.cells - 2 if self._boxed else scene.cells
        query, nodes = self._state.query, snapshot.occupancy.nodes
        self._every_node = cluster_rows.build_nodes(snapshot)
        self._nodes = self._sorted_nodes(cluster_rows.filter_nodes(self._every_node, query))
        self._jobs = self._sorted_jobs(
            cluster_rows.filter_jobs(cluster_rows.build_jobs(snapshot.occupancy), query)
        )
        found = cluster_rows.filter_findings(
            snapshot.findings.findings, cluster_rows.users_by_place(nodes), query
        )
        self._groups = cluster_rows.group_findings(found)
        self._open = next((row for row in self._every_node if row.name == self._state.node), None)

    def draw(self, top: Line, bottom: Line) -> DrawnCluster:
        """Draw everything."""
        frame = 2 if self._boxed else 0
        rest = self._scene.lines - 4 - frame  # the top line, totals, tabs and keys
        heading = 0 if self._state.table == "findings" else 1
        keys = self._keys()
        previews = self._plan_previews(rest - heading - max(1, len(keys)))
        height = max(0, rest - heading - sum(rows + frame for rows in previews if rows))
        cursor = self._state.cursor.settled(keys, height)
        state = self._state.with_cursor(cursor)
        rows = self._rows(cursor.offset, height)
        focused = [
            (
                StyledText(self._glyphs.cursor if cursor.offset + number == cursor.index else " ", "accent"),
                *row,
            )
            for number, row in enumerate(rows)
        ]
        lines = [*self._heading(), *(focused or [self._empty_line()])]
        lines = lines[: height + heading] + [()] * (height + heading - len(lines))
        watts = cluster_rows.total(
            gpu.power_watts
            for node in self._snapshot.occupancy.nodes
            for gpu in node.gpus
            if gpu.state != "lost"
        )
        counts = cluster_rows.count_states(self._snapshot.occupancy)
        parts: dict[PanelName, list[Line]] = {
            "top": [top],
            "totals": [cluster_cells.totals_line(counts, watts, self._scene.cells, self._glyphs)],
            "tabs": [self._tab_line(cursor.offset, height, len(keys))],
            "main": self._framed(lines, self._title()),
            "jobs": self._job_preview(previews[0]),
            "findings": self._finding_preview(previews[1]),
            "keys": [bottom],
        }
        first = heading + frame // 2
        mark = first + cursor.index - cursor.offset if keys else None
        groups = self._groups if state.table == "findings" else ()
        return DrawnCluster(parts, mark, first, state, keys, height, groups)

    def _sorted_nodes(self, rows: list[NodeRow]) -> list[NodeRow]:
        order = self._state.orders["nodes"]
        return cluster_rows.sort_nodes(rows, order.column, descending=order.descending)

    def _sorted_jobs(self, rows: list[JobRow]) -> list[JobRow]:
        order = self._state.orders["jobs"]
        return cluster_rows.sort_jobs(rows, order.column, descending=order.descending)

    def _gpus(self) -> list[GpuOccupancy]:
        if self._open is None:
            return []
        order = self._state.orders["gpus"]
        found = cluster_rows.filter_gpus(self._open.name, self._open.gpus, self._state.query)
        return cluster_rows.sort_gpus(found, order.column, descending=order.descending)

    def _keys(self) -> list[str]:
        match self._state.table:
            case "nodes":
                return [row.name for row in self._nodes]
            case "jobs":
                return [row.key for row in self._jobs]
            case "findings":
                return [" ".join(map(str, finding_kind(group.worst))) for group in self._groups]
            case "gpus":
                return [gpu.uuid for gpu in self._gpus()]

    def _rows(self, offset: int, height: int) -> list[Line]:
        """Return the rows of the table that are in view."""
        now, cells, glyphs, view = self._scene.now, self._cells, self._glyphs, slice(offset, offset + height)
        match self._state.table:
            case "nodes":
                columns = cluster_cells.node_columns(self._every_node, cells - 1)
                return [cluster_cells.node_line(row, columns, now, glyphs) for row in self._nodes[view]]
            case "jobs":
                columns = cluster_cells.job_columns(self._jobs, cells - 1)
                return [cluster_cells.job_line(row, columns, now, glyphs) for row in self._jobs[view]]
            case "findings":
                problems = build_problems(self._groups[view], now)
                return [findings_panel.problem_line(one, cells - 1, glyphs) for one in problems]
            case "gpus":
                if self._open is None:
                    return []
                columns = cluster_cells.gpu_columns(self._open, cells - 1)
                return [
                    cluster_cells.gpu_line(gpu, self._open, columns, now, glyphs)
                    for gpu in self._gpus()[view]
                ]

    def _heading(self) -> list[Line]:
        state, cells = self._state, self._cells
        labels: Sequence[str] = ()
        match state.table:
            case "findings":
                return []
            case "nodes":
                columns = cluster_cells.node_columns(self._every_node, cells - 1)
                labels = _common_labels(self._nodes)
            case "jobs":
                columns = cluster_cells.job_columns(self._jobs, cells - 1)
            case "gpus":
                if self._open is None:
                    return [()]
                columns = cluster_cells.gpu_columns(self._open, cells - 1)
        line = cluster_cells.heading(columns, state.order, labels, cells, self._glyphs)
        return [line if self._boxed else underline_heading(line)]

    def _tab_line(self, offset: int, height: int, count: int) -> Line:
        state = self._state
        counts: dict[Tab, int] = {
            "nodes": len(self._nodes),
            "jobs": len(self._jobs),
            "findings": sum(len(group.members) for group in self._groups),
        }
        parts: list[Line] = []
        for tab in TABS:
            is_shown = tab == state.tab and state.node is None
            text = f"[{tab} {counts[tab]}]" if is_shown else f" {tab} {counts[tab]} "
            parts.append(styled(text, "title" if is_shown else "dim"))
        if state.node is not None:
            parts.append(styled(f"[{self._glyphs.clean(state.node)}]", "title"))
        right: list[Line] = []
        if state.query:
            right.append(styled(self._glyphs.clean(str(state.query)), "accent"))
        if state.order is not None:
            arrow = self._glyphs.down if state.order.descending else self._glyphs.up
            right.append(styled(f"sort: {state.order.column}{arrow}", "dim"))
        right.append(position(offset, height, count))
        status = (*join([part for part in right if part], "  "), StyledText(" "))
        return align_both((StyledText(" "), *join(parts)), status, self._scene.cells)

    def _empty_line(self) -> Line:
        if self._state.node is not None and self._open is None:
            return styled("  the head no longer knows this node", "dim")
        if self._state.query:
            return styled("  nothing matches the filter", "dim")
        return styled(
            {
                "nodes": "  no node has reported yet",
                "jobs": "  no process holds a GPU",
                "findings": "  no findings",
                "gpus": "  this node has no GPUs",
            }[self._state.table],
            "dim",
        )

    def _title(self) -> str:
        if self._open is None:
            return self._state.tab
        models = dict.fromkeys(gpu.name for gpu in self._open.gpus)
        return self._glyphs.clean(f"{self._open.name}  {', '.join(models)}".strip())

    def _plan_previews(self, spare: int) -> tuple[int, int]:
        """Return the rows of jobs and findings under the nodes, if the screen has lines to spare."""
        if not self._boxed or self._state.table != "nodes":
            return 0, 0
        wanted = max(1, len(self._groups))
        findings = min(_MAX_FINDING_ROWS, wanted, max(0, spare - 2))
        if findings < min(_MIN_PREVIEW_ROWS, wanted):
            return 0, 0
        jobs = min(len(self._jobs) + 1, spare - (findings + 2) - 2)
        return (jobs if jobs > _MIN_PREVIEW_ROWS else 0), findings

    def _job_preview(self, rows: int) -> list[Line]:
        if rows <= 0:
            return []
        columns = cluster_cells.job_columns(self._jobs, self._cells - 1)
        order = self._state.orders["jobs"]
        lines = [cluster_cells.heading(columns, order, (), self._cells, self._glyphs)]
        lines += [
            (StyledText(" "), *cluster_cells.job_line(row, columns, self._scene.now, self._glyphs))
            for row in self._jobs[: rows - 1]
        ]
        return self._framed(lines, f"jobs {len(self._jobs)}")

    def _finding_preview(self, rows: int) -> list[Line]:
        if rows <= 0:
            return []
        problems = build_problems(self._groups, self._scene.now)
        lines = findings_panel.panel_lines(problems, rows, self._cells, self._glyphs)
        return self._framed(lines, f"findings {sum(len(group.members) for group in self._groups)}")

    def _framed(self, lines: list[Line], title: str) -> list[Line]:
        if not self._boxed:
            return lines
        inner = [pad(line, self._cells) for line in lines]
        name = truncate(title, self._cells - 8, self._glyphs.ellipsis)
        return draw_box(inner, styled(name, "title"), (), self._scene.cells, self._glyphs)


def _common_labels(rows: Sequence[NodeRow]) -> list[str]:
    """Return the labels of the GPUs of the largest node, if all nodes number theirs in the same way."""
    longest: list[str] = max(([gpu.label for gpu in row.gpus] for row in rows), key=len, default=[])
    same = all([gpu.label for gpu in row.gpus] == longest[: len(row.gpus)] for row in rows)
    return longest if same else []
