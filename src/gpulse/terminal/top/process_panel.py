"""Processes in the live view: the table of all, and the page with the details of one.

Rows are filtered, sorted, and drawn as a tree with workers under the process that holds the GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from rich.cells import cell_len

from gpulse.model.counter_rates import ProcessKey, process_key
from gpulse.model.frame import Frame
from gpulse.model.process import GpuProcess, ProcessIdentity, ProcessReading
from gpulse.terminal import value_format as human
from gpulse.terminal.top.styled_text import (
    UNLIMITED_CELLS,
    Glyphs,
    Line,
    PanelColumn,
    StyledText,
    Tone,
    align_both,
    fit_columns,
    join,
    level,
    pad,
    styled,
    truncate,
    width,
)
from gpulse.terminal.top.view_state import TopSnapshot, ViewState

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
_BUSY_CPU_PERCENT = 50.0


@dataclass(frozen=True, slots=True)
class ProcessEntry:
    """One process with all values that it can be shown, sorted or filtered by; None is unknown."""

    process: ProcessReading
    key: ProcessKey
    gpus: tuple[str, ...]
    """Labels of the GPUs that it holds."""
    own_or_holder_gpus: tuple[str, ...]
    """The same, or for a worker those of its holder."""
    holder: ProcessKey | None
    """The nearest ancestor that holds a GPU."""
    kind: str | None
    gpu_memory: float | None
    sm: float | None
    cpu: float | None
    ram: float | None
    elapsed: float | None
    read: float | None

    @property
    def user(self) -> str:
        """Name of its user; empty when unknown."""
        return self.process.identity.owner.user or ""


@dataclass(frozen=True, slots=True)
class ProcessTreeRow:
    """One row of the process table."""

    entry: ProcessEntry
    hidden: int = 0
    """Number of its workers that are hidden."""
    is_unfolded: bool = False
    has_more_siblings: tuple[bool, ...] = ()
    """For each level from the root, whether another sibling follows; the last one is its own level."""


def command_line(identity: ProcessIdentity) -> str:
    """Return the command line, or the program if that is hidden; empty when both are unknown."""
    return " ".join(identity.command) or identity.name or ""


def build_entries(snapshot: TopSnapshot) -> list[ProcessEntry]:
    """Return the processes of a snapshot."""
    held = _find_held_gpus(snapshot.frame)
    by_pid = {process.pid: process for process in snapshot.frame.processes}
    return [_build_entry(process, snapshot, held, by_pid) for process in snapshot.frame.processes]


def find_users(found: Iterable[ProcessEntry]) -> list[str]:
    """Return all users that have a process here, sorted."""
    return sorted({entry.user for entry in found if entry.user})


def build_rows(found: Sequence[ProcessEntry], state: ViewState) -> list[ProcessTreeRow]:
    """Return the rows of the table."""
    passing = [entry for entry in found if _matches_filter(entry, state)] if state.query else list(found)
    ordered = sort_entries(passing, state.sort, descending=state.descending)
    if not state.tree:
        return [ProcessTreeRow(entry) for entry in ordered]
    present = {entry.key for entry in passing}
    shown: list[ProcessEntry] = []
    folded: dict[ProcessKey, int] = {}
    unfolded: set[ProcessKey] = set()
    for entry in ordered:
        holder = entry.holder
        if entry.process.on_gpu or holder is None or holder not in present:
            shown.append(entry)
        elif state.is_unfolded(holder):
            unfolded.add(holder)
            shown.append(entry)
        else:
            folded[holder] = folded.get(holder, 0) + 1
    return _build_tree(shown, folded, unfolded)


def sort_entries(found: Iterable[ProcessEntry], sort: str, *, descending: bool) -> list[ProcessEntry]:
    """Return the entries sorted; those with unknown values come last in both directions."""
    by_pid = sorted(found, key=lambda entry: entry.process.pid)
    keyed = [(_sort_key(entry, sort), entry) for entry in by_pid]
    known = [(value, entry) for value, entry in keyed if value is not None]
    known.sort(key=lambda pair: pair[0], reverse=descending)  # type: ignore[arg-type,return-value]
    return [entry for _, entry in known] + [entry for value, entry in keyed if value is None]


def _sort_key(entry: ProcessEntry, sort: str) -> object:
    if sort == "pid":
        return entry.process.pid
    if sort == "user":
        return entry.user or None
    if sort == "gpu":
        return [tuple(int(part) for part in label.split(":")) for label in entry.own_or_holder_gpus] or None
    if sort == "state":
        return entry.process.state
    if sort == "command":
        return command_line(entry.process.identity) or None
    value: object = getattr(entry, sort)
    return value


def _matches_filter(entry: ProcessEntry, state: ViewState) -> bool:
    identity = entry.process.identity
    text = f"{identity.pid} {identity.name or ''} {command_line(identity)}" if state.query.text else ""
    return state.query.admits(user=entry.user, gpus=entry.own_or_holder_gpus, text=text)


def _build_tree(
    shown: Sequence[ProcessEntry], folded: Mapping[ProcessKey, int], unfolded: set[ProcessKey]
) -> list[ProcessTreeRow]:
    pids = {entry.process.pid for entry in shown}
    children: dict[int | None, list[ProcessEntry]] = {}
    for entry in shown:
        children.setdefault(_find_parent(entry, pids), []).append(entry)
    out: list[ProcessTreeRow] = []
    # A stack instead of recursion, because processes may be nested to any depth.
    stack = [ProcessTreeRow(entry) for entry in reversed(children.pop(None, []))]
    while stack:
        row = stack.pop()
        own = row.entry.key
        out.append(replace(row, hidden=folded.get(own, 0), is_unfolded=own in unfolded))
        below = children.pop(row.entry.process.pid, [])
        stack.extend(
            ProcessTreeRow(entry, has_more_siblings=(*row.has_more_siblings, entry is not below[-1]))
            for entry in reversed(below)
        )
    return out + [ProcessTreeRow(entry) for ring in children.values() for entry in ring]


def _find_parent(entry: ProcessEntry, shown: set[int]) -> int | None:
    """Return the parent or the holder of a process, whichever is shown."""
    for pid in (entry.process.identity.parent_pid, None if entry.holder is None else entry.holder[0]):
        if pid in shown and pid != entry.process.pid:
            return pid
    return None


def _find_held_gpus(frame: Frame) -> dict[int, dict[str, GpuProcess]]:
    """Return what each PID holds, by GPU label; MIG instances count instead of their whole GPU."""
    held: dict[int, dict[str, GpuProcess]] = {}
    for gpu in frame.gpus:
        for process in gpu.processes or ():
            own = held.setdefault(process.pid, {})
            if gpu.device.mig_index is not None:
                own.pop(str(gpu.device.index), None)
            own[gpu.device.label] = process
    return held


def _build_entry(
    process: ProcessReading,
    snapshot: TopSnapshot,
    held: Mapping[int, dict[str, GpuProcess]],
    by_pid: Mapping[int, ProcessReading],
) -> ProcessEntry:
    rates = snapshot.rates.processes.get(process_key(process), {})
    own = held.get(process.pid, {})
    holder = _find_holder(process, by_pid)
    shares = [item.sm_ratio for item in own.values() if item.sm_ratio is not None]
    memory = [item.gpu_memory_bytes for item in own.values() if item.gpu_memory_bytes is not None]
    kinds = {item.kind for item in own.values()}
    started = process.identity.start_time
    return ProcessEntry(
        process=process,
        key=process_key(process),
        gpus=tuple(own),
        own_or_holder_gpus=tuple(own) or (() if holder is None else tuple(held.get(holder.pid, ()))),
        holder=None if holder is None else process_key(holder),
        kind="+".join(sorted(kinds)) if kinds else None,
        gpu_memory=sum(memory) if memory else None,
        sm=sum(shares) / len(shares) if shares else None,
        cpu=rates.get("cpu_percent"),
        ram=process.values.get("host_memory_bytes"),
        elapsed=None if started is None else max(0.0, snapshot.frame.time - started),
        read=rates.get("read_bytes_per_second"),
    )


def _find_holder(process: ProcessReading, by_pid: Mapping[int, ProcessReading]) -> ProcessReading | None:
    """Return the nearest ancestor on a GPU; the search ends at a cycle, which PIDs read at two moments can form."""
    seen = {process.pid}
    parent = by_pid.get(process.identity.parent_pid or 0)
    while parent is not None and parent.pid not in seen:
        if parent.on_gpu:
            return parent
        seen.add(parent.pid)
        parent = by_pid.get(parent.identity.parent_pid or 0)
    return None


def columns_for(found: Sequence[ProcessTreeRow], cells: int) -> list[tuple[PanelColumn, int]]:
    """Return the columns that fit, as wide as their content needs, without the job column if it would be empty."""
    user = max((cell_len(_user(row.entry)[0]) for row in found), default=0)
    gpu = max((len(join_labels(row.entry.gpus)) for row in found), default=0)
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
        _column("command", max(14, cells // 3 - 3), 3, right=False, extra_cells=UNLIMITED_CELLS),
    ]
    if any(_job(row.entry) for row in found):
        columns.insert(-1, _column("job", 14, 11, right=False))
    return fit_columns(columns, cells)


def _column(key: str, room: int, priority: int, *, right: bool = True, extra_cells: int = 0) -> PanelColumn:
    return PanelColumn(key, TITLES[key], room, priority, right=right, extra_cells=extra_cells)


def heading(
    columns: Sequence[tuple[PanelColumn, int]], state: ViewState, status: Line, cells: int, glyphs: Glyphs
) -> Line:
    """Return the titles, with an arrow at the sorted column and a status at the right end."""
    titles = [_title(column, room, state, glyphs) for column, room in columns]
    if columns and columns[-1][1] < len(columns[-1][0].title) + 1 + width(status):
        # No title is better than half a title.
        titles.pop()
    return align_both((StyledText(" "), *join(titles)), status, cells)


def process_line(row: ProcessTreeRow, columns: Sequence[tuple[PanelColumn, int]], glyphs: Glyphs) -> Line:
    """Return the row of one process."""
    return join(
        pad(_cell(column.key, row, room, glyphs), room, right=column.right) for column, room in columns
    )


def sort_title(state: ViewState, glyphs: Glyphs) -> str:
    """Return the sorted column and its direction: `GMEM▼`."""
    return TITLES[state.sort] + (glyphs.down if state.descending else glyphs.up)


def join_labels(labels: Sequence[str]) -> str:
    """Return labels of GPUs as ranges: `0-3,6`, `3:0,3:1`."""
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


def _title(column: PanelColumn, room: int, state: ViewState, glyphs: Glyphs) -> Line:
    if column.key != state.sort:
        return pad(styled(column.title, "head"), room, right=column.right)
    arrow = glyphs.down if state.descending else glyphs.up
    return pad(styled(truncate(column.title, room - 1, "") + arrow, "accent"), room, right=column.right)


def _cell(key: str, row: ProcessTreeRow, room: int, glyphs: Glyphs) -> Line:
    if key == "command":
        return _command(row, room, glyphs)
    text, tone = _CELLS[key](row.entry)
    return styled(
        truncate(glyphs.clean(text) if key in ("user", "job") else text, room, glyphs.ellipsis), tone
    )


def _user(entry: ProcessEntry) -> tuple[str, Tone]:
    owner = entry.process.identity.owner
    return owner.user or (
        human.UNKNOWN if owner.uid is None else str(owner.uid)
    ), "plain" if entry.gpus else "dim"


def _kind(entry: ProcessEntry) -> tuple[str, Tone]:
    if not entry.gpus:
        return "", "dim"
    kinds = (entry.kind or human.UNKNOWN).split("+")
    return "+".join(_KINDS.get(kind, kind) for kind in kinds), "dim"


def _gpu_memory(entry: ProcessEntry) -> tuple[str, Tone]:
    return (human.size(entry.gpu_memory), "memory") if entry.gpus else ("", "dim")


def _sm(entry: ProcessEntry) -> tuple[str, Tone]:
    return (human.ratio(entry.sm), level(entry.sm)) if entry.gpus else ("", "dim")


def _cpu(entry: ProcessEntry) -> tuple[str, Tone]:
    busy = entry.cpu is not None and entry.cpu >= _BUSY_CPU_PERCENT
    return human.percent(entry.cpu), "plain" if busy else "dim"


def _state(entry: ProcessEntry) -> tuple[str, Tone]:
    state = entry.process.state or human.UNKNOWN
    return state, "warn" if state in "DZ" else "dim"


def _job(entry: ProcessEntry) -> str:
    owner = entry.process.identity.owner
    return owner.job or owner.container or owner.pod or ""


_CELLS: dict[str, Callable[[ProcessEntry], tuple[str, Tone]]] = {
    "pid": lambda entry: (str(entry.process.pid), "plain" if entry.gpus else "dim"),
    "user": _user,
    "gpu": lambda entry: (join_labels(entry.gpus), "strong"),
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


def _command(row: ProcessTreeRow, room: int, glyphs: Glyphs) -> Line:
    identity = row.entry.process.identity
    mark = ""
    if row.has_more_siblings:
        *above, own = row.has_more_siblings
        mark = "".join(glyphs.trunk if has_more else " " * len(glyphs.trunk) for has_more in above[:4])
        mark += glyphs.branch if own else glyphs.last_branch
    elif row.hidden:
        plural = "" if row.hidden == 1 else "s"
        mark = f"{glyphs.folded} +{row.hidden} worker{plural} "
    elif row.is_unfolded:
        mark = f"{glyphs.unfolded} "
    if identity.name is None and identity.start_time is None:
        text, tone = "(not visible)", "dim"  # type: tuple[str, Tone]
    elif row.entry.gpus:
        text, tone = command_line(identity), "plain"
    else:
        text, tone = _worker(row), "dim"
    if row.hidden and row.has_more_siblings:
        text = f"+{row.hidden} {text}"
    return (
        StyledText(mark, "accent"),
        StyledText(truncate(glyphs.clean(text), max(0, room - len(mark)), glyphs.ellipsis), tone),
    )


def _worker(row: ProcessTreeRow) -> str:
    """Return a worker's name before its command line, which it often shares with its parent."""
    identity = row.entry.process.identity
    command = command_line(identity)
    program = identity.command[0].rpartition("/")[2] if identity.command else ""
    return (
        f"{identity.name}: {command}" if identity.name and not program.startswith(identity.name) else command
    )


_STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "waiting for I/O",
    "Z": "zombie: ended, but not yet reaped by its parent",
    "T": "stopped",
    "t": "stopped by a debugger",
    "I": "idle",
}
_MAX_THREADS = 12


def page_lines(snapshot: TopSnapshot, wanted: ProcessKey, glyphs: Glyphs) -> list[Line]:
    """Return the page about one process, or a line that it has ended."""
    entry = next((entry for entry in build_entries(snapshot) if entry.key == wanted), None)
    if entry is None:
        return [_line("PID", f"process {wanted[0]} has ended", glyphs)]
    return [
        *_identity(entry, glyphs),
        (),
        *_use(entry, snapshot, glyphs),
        *_threads(entry.process, glyphs),
        *_related_processes(entry, snapshot, glyphs),
    ]


def question_lines(identity: ProcessIdentity, glyphs: Glyphs) -> list[Line]:
    """Return the process that the user is about to end."""
    return [
        _line("PID", str(identity.pid), glyphs),
        _line("user", identity.owner.user, glyphs),
        _line("command", command_line(identity) or None, glyphs),
        (),
    ]


def _line(label: str, text: str | None, glyphs: Glyphs) -> Line:
    return (StyledText(label, "head"), StyledText(glyphs.clean(text)))


def _identity(entry: ProcessEntry, glyphs: Glyphs) -> Iterator[Line]:
    identity = entry.process.identity
    owner = identity.owner
    yield _line("command", command_line(identity) or None, glyphs)
    yield _line("program", identity.name, glyphs)
    yield _line("user", f"{owner.user or human.UNKNOWN} (uid {human.number(owner.uid)})", glyphs)
    for label, value in (
        ("job", owner.job),
        ("container", owner.container),
        ("pod", owner.pod),
        ("cgroup", identity.cgroup),
    ):
        if value:
            yield _line(label, value, glyphs)
    started = identity.start_time
    when = human.UNKNOWN if started is None else human.local_time(started)
    yield _line("started", f"{when}, {human.duration(entry.elapsed)} ago", glyphs)


def _use(entry: ProcessEntry, snapshot: TopSnapshot, glyphs: Glyphs) -> Iterator[Line]:
    process = entry.process
    rates = snapshot.rates.processes.get(entry.key, {})
    state = process.state or human.UNKNOWN
    yield _line("state", f"{state} {_STATES.get(state, '')}", glyphs)
    if entry.gpus:
        yield _line(
            "GPU",
            f"{join_labels(entry.gpus)}: {human.size(entry.gpu_memory)} memory, {human.ratio(entry.sm)} of SM time",
            glyphs,
        )
    cpus = human.number(process.values.get("cpus_allowed"))
    waiting = human.ratio(rates.get("run_wait_ratio"))
    yield _line(
        "CPU",
        f"{human.percent(entry.cpu)}, may use {cpus} {'CPU' if cpus == '1' else 'CPUs'}; "
        f"main thread waits for a CPU {waiting} of the time",
        glyphs,
    )
    yield _line("RAM", human.size(entry.ram), glyphs)
    written = rates.get("written_bytes_per_second")
    yield _line("disks", f"reads {human.rate(entry.read)}, writes {human.rate(written)}", glyphs)


def _threads(process: ProcessReading, glyphs: Glyphs) -> Iterator[Line]:
    yield _line("threads", human.number(process.values.get("threads")), glyphs)
    for thread in process.threads[:_MAX_THREADS]:
        text = f"{thread.tid:>9} {thread.state}  {human.duration(thread.cpu_seconds_total):>8} CPU  {thread.name}"
        yield _line("", text, glyphs)


def _related_processes(entry: ProcessEntry, snapshot: TopSnapshot, glyphs: Glyphs) -> Iterator[Line]:
    by_pid = {process.pid: process for process in snapshot.frame.processes}
    parent = entry.process.identity.parent_pid
    seen = {entry.process.pid}
    label = "ancestors"
    while parent is not None and parent not in seen:
        seen.add(parent)
        known = by_pid.get(parent)
        yield _line(label, f"{parent}  {command_line(known.identity) if known else ''}", glyphs)
        parent, label = (known.identity.parent_pid if known else None), ""
    children = [
        process for process in snapshot.frame.processes if process.identity.parent_pid == entry.process.pid
    ]
    busy = sum(
        snapshot.rates.processes.get(process_key(child), {}).get("cpu_percent", 0.0) for child in children
    )
    if children:
        yield _line("children", f"{len(children)}, using {human.percent(busy)} CPU in total", glyphs)
