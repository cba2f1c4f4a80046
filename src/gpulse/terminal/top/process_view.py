"""The process table as lines of text."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.cells import cell_len

from gpulse.terminal import format as human
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
    width,
    words,
)
from gpulse.terminal.top.glyphs import Glyphs, level
from gpulse.terminal.top.process_tree import Entry, Row, command_of
from gpulse.terminal.top.state import ViewState

TITLES = {
    "pid": "PID",
    "user": "USER",
    "gpu": "GPU",
    "kind": "TYPE",
    "gpu_memory": "GMEM",
    "sm": "SM",
    "cpu": "CPU",
    "ram": "RAM",
    "state": "S",
    "read": "READ",
    "elapsed": "TIME",
    "job": "JOB",
    "command": "COMMAND",
}
_KINDS = {"compute": "C", "graphics": "G"}
_BUSY_CPU = 50.0


def columns_for(found: Sequence[Row], cells: int) -> list[tuple[Column, int]]:
    """The columns that fit, as wide as what they hold; one that would be empty all the way down is left out."""
    user = max((cell_len(_user(row.entry)[0]) for row in found), default=0)
    gpu = max((len(span(row.entry.gpus)) for row in found), default=0)
    columns = [
        _column("pid", 7, 0),
        _column("user", max(6, min(user, 12)), 2, right=False),
        _column("gpu", max(4, min(gpu, 11)), 1),
        _column("kind", 4, 8),
        _column("gpu_memory", 5, 0),
        _column("sm", 4, 2),
        _column("cpu", 5, 4),
        _column("ram", 5, 6),
        _column("state", 2, 9),
        _column("read", 8, 10),
        _column("elapsed", 8, 7),
        _column("command", max(14, cells // 3 - 3), 3, right=False, stretch=ENDLESS),
    ]
    if any(_job(row.entry) for row in found):
        columns.insert(-1, _column("job", 14, 11, right=False))
    return chosen(columns, cells)


def _column(key: str, room: int, priority: int, *, right: bool = True, stretch: int = 0) -> Column:
    return Column(key, TITLES[key], room, priority, right=right, stretch=stretch)


def heading(
    columns: Sequence[tuple[Column, int]], state: ViewState, status: Line, cells: int, glyphs: Glyphs
) -> Line:
    """The titles, the one that is sorted by with an arrow, and at the right end what else is to be said."""
    titles = [_title(column, room, state, glyphs) for column, room in columns]
    if columns and columns[-1][1] < len(columns[-1][0].title) + 1 + width(status):
        # Half a title reads worse than none.
        titles.pop()
    return ends((Piece(" "), *joined(titles)), status, cells)


def line(row: Row, columns: Sequence[tuple[Column, int]], glyphs: Glyphs) -> Line:
    """One process."""
    return joined(
        padded(_cell(column.key, row, room, glyphs), room, right=column.right) for column, room in columns
    )


def sort_title(state: ViewState, glyphs: Glyphs) -> str:
    """What the table is sorted by, such as `GMEM▼`."""
    return TITLES[state.sort] + (glyphs.down if state.descending else glyphs.up)


def span(labels: Sequence[str]) -> str:
    """Labels of GPUs in short: `0-3,6`, `3:0,3:1`."""
    parts: list[str] = []
    run: list[int] = []
    for label in [*labels, ""]:
        if label.isdecimal() and run and int(label) == run[-1] + 1:
            run.append(int(label))
            continue
        if run:
            parts.append(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}")
        run = [int(label)] if label.isdecimal() else []
        if label and not run:
            parts.append(label)
    return ",".join(parts)


def _title(column: Column, room: int, state: ViewState, glyphs: Glyphs) -> Line:
    if column.key != state.sort:
        return padded(words(column.title, "head"), room, right=column.right)
    arrow = glyphs.down if state.descending else glyphs.up
    return padded(words(cut(column.title, room - 1, "") + arrow, "accent"), room, right=column.right)


def _cell(key: str, row: Row, room: int, glyphs: Glyphs) -> Line:
    if key == "command":
        return _command(row, room, glyphs)
    text, tone = _CELLS[key](row.entry)
    return words(cut(glyphs.clean(text) if key in ("user", "job") else text, room, glyphs.ellipsis), tone)


def _user(entry: Entry) -> tuple[str, Tone]:
    owner = entry.process.identity.owner
    return owner.user or (
        human.UNKNOWN if owner.uid is None else str(owner.uid)
    ), "plain" if entry.gpus else "dim"


def _kind(entry: Entry) -> tuple[str, Tone]:
    if not entry.gpus:
        return "", "dim"
    kinds = (entry.kind or human.UNKNOWN).split("+")
    return "+".join(_KINDS.get(kind, kind) for kind in kinds), "dim"


def _gpu_memory(entry: Entry) -> tuple[str, Tone]:
    return (human.size(entry.gpu_memory), "memory") if entry.gpus else ("", "dim")


def _sm(entry: Entry) -> tuple[str, Tone]:
    return (human.ratio(entry.sm), level(entry.sm)) if entry.gpus else ("", "dim")


def _cpu(entry: Entry) -> tuple[str, Tone]:
    busy = entry.cpu is not None and entry.cpu >= _BUSY_CPU
    return human.percent(entry.cpu), "plain" if busy else "dim"


def _state(entry: Entry) -> tuple[str, Tone]:
    state = entry.process.state or human.UNKNOWN
    return state, "warn" if state in "DZ" else "dim"


def _job(entry: Entry) -> str:
    owner = entry.process.identity.owner
    return owner.job or owner.container or owner.pod or ""


_CELLS: dict[str, Callable[[Entry], tuple[str, Tone]]] = {
    "pid": lambda entry: (str(entry.process.pid), "plain" if entry.gpus else "dim"),
    "user": _user,
    "gpu": lambda entry: (span(entry.gpus), "strong"),
    "kind": _kind,
    "gpu_memory": _gpu_memory,
    "sm": _sm,
    "cpu": _cpu,
    "ram": lambda entry: (human.size(entry.ram), "plain" if entry.gpus else "dim"),
    "state": _state,
    "read": lambda entry: (human.rate(entry.read), "plain" if entry.read else "dim"),
    "elapsed": lambda entry: (human.duration(entry.elapsed), "dim"),
    "job": lambda entry: (_job(entry), "dim"),
}


def _command(row: Row, room: int, glyphs: Glyphs) -> Line:
    identity = row.entry.process.identity
    mark = ""
    if row.ancestors_go_on:
        *above, own = row.ancestors_go_on
        mark = "".join(glyphs.trunk if goes_on else " " * len(glyphs.trunk) for goes_on in above[:4])
        mark += glyphs.branch if own else glyphs.last_branch
    elif row.hidden:
        plural = "" if row.hidden == 1 else "s"
        mark = f"{glyphs.folded} +{row.hidden} worker{plural} "
    elif row.is_unfolded:
        mark = f"{glyphs.unfolded} "
    if identity.name is None and identity.start_time is None:
        text, tone = "not visible from here", "dim"  # type: tuple[str, Tone]
    elif row.entry.gpus:
        text, tone = command_of(identity), "plain"
    else:
        text, tone = _worker(row), "dim"
    if row.hidden and row.ancestors_go_on:
        text = f"+{row.hidden} {text}"
    return (
        Piece(mark, "accent"),
        Piece(cut(glyphs.clean(text), max(0, room - len(mark)), glyphs.ellipsis), tone),
    )


def _worker(row: Row) -> str:
    """A worker shares the command line of its trainer: its own name says more."""
    identity = row.entry.process.identity
    command = command_of(identity)
    program = identity.command[0].rpartition("/")[2] if identity.command else ""
    return (
        f"{identity.name}: {command}" if identity.name and not program.startswith(identity.name) else command
    )
