"""The whole screen as lines: every part drawn, framed and put in its place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from gpulse.model.frame import GpuReading
from gpulse.model.rates import ProcessKey
from gpulse.terminal.top import chart, chrome, findings_view, gpu_view, host_view, process_view
from gpulse.terminal.top.cells import Line, Piece, padded, words
from gpulse.terminal.top.glyphs import Glyphs, barred, boxed
from gpulse.terminal.top.history import History
from gpulse.terminal.top.layout import Plan, plan
from gpulse.terminal.top.process_tree import Entry, Row, entries, rows
from gpulse.terminal.top.snapshot import Snapshot
from gpulse.terminal.top.state import Cursor, ViewState

Part = Literal["top", "host", "gpus", "chart", "processes", "findings", "keys"]
PARTS: tuple[Part, ...] = ("top", "host", "gpus", "chart", "processes", "findings", "keys")


@dataclass(frozen=True, slots=True)
class Scene:
    """Everything that decides what the screen looks like."""

    snapshot: Snapshot | None
    history: History
    state: ViewState
    status: chrome.Status
    title: str
    glyphs: Glyphs
    cells: int
    lines: int
    notice: str = ""


@dataclass(frozen=True, slots=True)
class Picture:
    """The lines of each part, and what one needs to know to move about in them."""

    parts: dict[Part, list[Line]]
    marked: dict[Part, int]
    """The line in which the cursor is."""
    first_line: int = 0
    """How many lines of a table come before its first row."""
    state: ViewState = field(default_factory=ViewState)
    """The state with its cursors in view."""
    entries: Sequence[Entry] = ()
    rows: Sequence[Row] = ()
    plan: Plan | None = None

    @property
    def process_keys(self) -> list[ProcessKey]:
        """The processes in the table, in its order."""
        return [row.entry.key for row in self.rows]

    @property
    def selected(self) -> Row | None:
        """The process under the cursor."""
        return self.rows[self.state.process.index] if self.rows else None


def draw(scene: Scene) -> Picture:
    """The screen; while there is no frame yet it says so."""
    bottom = (
        chrome.notice_line(scene.notice, scene.cells, scene.glyphs)
        if scene.notice
        else chrome.key_line(scene.cells)
    )
    top = chrome.top_line(scene.snapshot, scene.state, scene.status, scene.title, scene.cells, scene.glyphs)
    if scene.snapshot is None:
        waiting: list[Line] = [(), words("  waiting for the first reading", "dim")]
        return Picture({"top": [top], "host": waiting, "keys": [bottom]}, {}, state=scene.state)
    found = entries(scene.snapshot)
    listed = rows(found, scene.state)
    wrong = findings_view.items(scene.snapshot)
    frame = scene.snapshot.frame
    layout = plan(scene.cells, scene.lines, gpus=len(frame.gpus), processes=len(listed), findings=len(wrong))
    state = replace(
        scene.state,
        gpu=scene.state.gpu.settled([gpu.device.uuid for gpu in frame.gpus], layout.gpus),
        process=scene.state.process.settled([row.entry.key for row in listed], layout.processes),
    )
    drawing = _Drawing(replace(scene, state=state), scene.snapshot, layout)
    parts: dict[Part, list[Line]] = {
        "top": [top],
        "host": drawing.host(),
        "gpus": drawing.gpus(),
        "chart": drawing.chart(),
        "processes": drawing.processes(listed, len(found)),
        "findings": drawing.findings(wrong),
        "keys": [bottom],
    }
    first = 2 if layout.boxed else 1
    marked: dict[Part, int] = {}
    if frame.gpus:
        marked["gpus"] = first + state.gpu.index - state.gpu.offset
    if listed:
        marked["processes"] = first + state.process.index - state.process.offset
    return Picture(parts, marked, first, state, found, listed, layout)


class _Drawing:
    """One screen in the making."""

    def __init__(self, scene: Scene, snapshot: Snapshot, layout: Plan) -> None:
        self._scene = scene
        self._snapshot = snapshot
        self._plan = layout
        self._glyphs = scene.glyphs
        self._cells = scene.cells - 2 if layout.boxed else scene.cells

    def host(self) -> list[Line]:
        lines = host_view.lines(self._snapshot, self._cells, self._glyphs)[: self._plan.host]
        return self._framed(lines, "host", ())

    def gpus(self) -> list[Line]:
        gpus, cursor = self._snapshot.frame.gpus, self._scene.state.gpu
        if not gpus:
            return self._framed(
                [(), *gpu_view.nothing(self._snapshot.frame, self._cells, self._glyphs)], "GPUs", ()
            )
        place = chrome.position(cursor.offset, self._plan.gpus, len(gpus))
        columns = gpu_view.columns_for(self._snapshot.frame, self._cells - 2)
        look = gpu_view.look(columns, self._snapshot, self._scene.history, self._glyphs)
        shown = gpus[cursor.offset : cursor.offset + self._plan.gpus]
        focused = self._scene.state.focus == "gpus"
        lines = [self._heading(gpu_view.heading(columns, self._inner(place), self._cells))]
        lines += [
            self._marked(gpu_view.line(gpu, look), cursor, number, focused=focused)
            for number, gpu in enumerate(shown)
        ]
        return self._framed(lines, "GPUs", place)

    def chart(self) -> list[Line]:
        if not self._plan.chart:
            return []
        gpu: GpuReading = self._snapshot.frame.gpus[self._scene.state.gpu.index]
        lines = chart.lines(gpu, self._scene.history, self._cells, self._plan.chart, self._glyphs)
        name = self._glyphs.clean(gpu_view.short_name(gpu))
        return self._framed(lines, f"GPU {gpu.device.label} {name}", ())

    def processes(self, listed: Sequence[Row], total: int) -> list[Line]:
        state, cursor, height = self._scene.state, self._scene.state.process, self._plan.processes
        place = chrome.position(cursor.offset, height, len(listed))
        shown = listed[cursor.offset : cursor.offset + height]
        hidden = sum(row.hidden for row in listed)
        columns = process_view.columns_for(shown, self._cells - 2)
        told = self._plan.boxed or state.sort not in {column.key for column, _ in columns}
        status = chrome.process_status(
            state, place, (len(listed) + hidden, total), self._glyphs, with_sort=told
        )
        lines = [
            self._heading(
                process_view.heading(columns, state, self._inner(status), self._cells, self._glyphs)
            )
        ]
        focused = state.focus == "processes"
        lines += [
            self._marked(process_view.line(row, columns, self._glyphs), cursor, number, focused=focused)
            for number, row in enumerate(shown)
        ]
        if not listed:
            lines.append(
                words("  no process passes the filter" if state.query else "  no process on a GPU", "dim")
            )
        lines = lines[: height + 1] + [()] * (height + 1 - len(lines))
        return self._framed(lines, "processes", status)

    def findings(self, wrong: list[findings_view.Item]) -> list[Line]:
        lines = findings_view.lines(wrong, self._plan.findings, self._cells, self._glyphs)
        return self._framed(lines, f"findings {len(wrong)}" if wrong else "findings", ())

    def _marked(
        self, line: Line, cursor: Cursor[ProcessKey] | Cursor[str], number: int, *, focused: bool
    ) -> Line:
        here = focused and cursor.index == cursor.offset + number
        return (Piece(self._glyphs.cursor if here else " ", "accent"), *line)

    def _heading(self, line: Line) -> Line:
        return line if self._plan.boxed else barred(line)

    def _inner(self, status: Line) -> Line:
        """The status stands in the heading where there is no frame to hold it."""
        return () if self._plan.boxed or not status else (Piece(" "), *status, Piece(" "))

    def _framed(self, lines: list[Line], title: str, status: Line) -> list[Line]:
        if not self._plan.boxed:
            return lines
        inner = [padded(line, self._cells) for line in lines]
        return boxed(inner, words(title, "title"), status, self._scene.cells, self._glyphs)
