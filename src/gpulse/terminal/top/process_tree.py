"""Which processes are shown and in what order: filtered, sorted, workers folded under their trainer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from gpulse.model.frame import Frame
from gpulse.model.process import GpuProcess, ProcessIdentity, ProcessReading
from gpulse.model.rates import ProcessKey, key
from gpulse.terminal.top.snapshot import Snapshot
from gpulse.terminal.top.state import ViewState


@dataclass(frozen=True, slots=True)
class Entry:
    """One process with everything it can be shown, sorted and filtered by; None is unknown."""

    process: ProcessReading
    key: ProcessKey
    gpus: tuple[str, ...]
    """Labels of the GPUs it holds."""
    near: tuple[str, ...]
    """The same, or for a worker those of the process it works for."""
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
        """Who runs it; empty when unknown."""
        return self.process.identity.owner.user or ""


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table."""

    entry: Entry
    hidden: int = 0
    """Workers that are folded away under it."""
    is_unfolded: bool = False
    ancestors_go_on: tuple[bool, ...] = ()
    """For each level above, whether more of it follows below; the last one is its own level."""


def command_of(identity: ProcessIdentity) -> str:
    """The command line, or the program when that is hidden; empty when not even that is known."""
    return " ".join(identity.command) or identity.name or ""


def entries(snapshot: Snapshot) -> list[Entry]:
    """The processes of a snapshot."""
    held = _held(snapshot.frame)
    by_pid = {process.pid: process for process in snapshot.frame.processes}
    return [_entry(process, snapshot, held, by_pid) for process in snapshot.frame.processes]


def users(found: Iterable[Entry]) -> list[str]:
    """Everybody who has a process here."""
    return sorted({entry.user for entry in found if entry.user})


def rows(found: Sequence[Entry], state: ViewState) -> list[Row]:
    """The lines of the table."""
    passing = [entry for entry in found if _passes(entry, state)] if state.query else list(found)
    ordered = in_order(passing, state.sort, descending=state.descending)
    if not state.tree:
        return [Row(entry) for entry in ordered]
    present = {entry.key for entry in passing}
    shown: list[Entry] = []
    folded: dict[ProcessKey, int] = {}
    unfolded: set[ProcessKey] = set()
    for entry in ordered:
        boss = entry.holder
        if entry.process.on_gpu or boss is None or boss not in present:
            shown.append(entry)
        elif state.is_unfolded(boss):
            unfolded.add(boss)
            shown.append(entry)
        else:
            folded[boss] = folded.get(boss, 0) + 1
    return _tree(shown, folded, unfolded)


def in_order(found: Iterable[Entry], sort: str, *, descending: bool) -> list[Entry]:
    """Sorted, what is unknown last in both directions."""
    by_pid = sorted(found, key=lambda entry: entry.process.pid)
    keyed = [(_sort_key(entry, sort), entry) for entry in by_pid]
    known = [(value, entry) for value, entry in keyed if value is not None]
    known.sort(key=lambda pair: pair[0], reverse=descending)  # type: ignore[arg-type,return-value]
    return [entry for _, entry in known] + [entry for value, entry in keyed if value is None]


def _sort_key(entry: Entry, sort: str) -> object:
    if sort == "pid":
        return entry.process.pid
    if sort == "user":
        return entry.user or None
    if sort == "gpu":
        return [tuple(int(part) for part in label.split(":")) for label in entry.near] or None
    if sort == "state":
        return entry.process.state
    if sort == "command":
        return command_of(entry.process.identity) or None
    value: object = getattr(entry, sort)
    return value


def _passes(entry: Entry, state: ViewState) -> bool:
    identity = entry.process.identity
    text = f"{identity.pid} {identity.name or ''} {command_of(identity)}" if state.query.text else ""
    return state.query.admits(user=entry.user, gpus=entry.near, text=text)


def _tree(shown: Sequence[Entry], folded: Mapping[ProcessKey, int], unfolded: set[ProcessKey]) -> list[Row]:
    pids = {entry.process.pid for entry in shown}
    children: dict[int | None, list[Entry]] = {}
    for entry in shown:
        children.setdefault(_parent(entry, pids), []).append(entry)
    out: list[Row] = []
    # A stack, because how deep processes are nested is up to whoever started them.
    stack = [Row(entry) for entry in reversed(children.pop(None, []))]
    while stack:
        row = stack.pop()
        own = row.entry.key
        out.append(replace(row, hidden=folded.get(own, 0), is_unfolded=own in unfolded))
        below = children.pop(row.entry.process.pid, [])
        stack.extend(
            Row(entry, ancestors_go_on=(*row.ancestors_go_on, entry is not below[-1]))
            for entry in reversed(below)
        )
    return out + [Row(entry) for ring in children.values() for entry in ring]


def _parent(entry: Entry, shown: set[int]) -> int | None:
    """The nearest ancestor that is shown: the parent itself, or the process it works for."""
    for pid in (entry.process.identity.parent_pid, None if entry.holder is None else entry.holder[0]):
        if pid in shown and pid != entry.process.pid:
            return pid
    return None


def _held(frame: Frame) -> dict[int, dict[str, GpuProcess]]:
    """By pid what it holds, by label; a GPU split into instances does not count beside them."""
    held: dict[int, dict[str, GpuProcess]] = {}
    for gpu in frame.gpus:
        for process in gpu.processes or ():
            own = held.setdefault(process.pid, {})
            if gpu.device.mig_index is not None:
                own.pop(str(gpu.device.index), None)
            own[gpu.device.label] = process
    return held


def _entry(
    process: ProcessReading,
    snapshot: Snapshot,
    held: Mapping[int, dict[str, GpuProcess]],
    by_pid: Mapping[int, ProcessReading],
) -> Entry:
    rates = snapshot.rates.processes.get(key(process), {})
    own = held.get(process.pid, {})
    holder = _holder(process, by_pid)
    shares = [item.sm_ratio for item in own.values() if item.sm_ratio is not None]
    memory = [item.gpu_memory_bytes for item in own.values() if item.gpu_memory_bytes is not None]
    kinds = {item.kind for item in own.values()}
    started = process.identity.start_time
    return Entry(
        process=process,
        key=key(process),
        gpus=tuple(own),
        near=tuple(own) or (() if holder is None else tuple(held.get(holder.pid, ()))),
        holder=None if holder is None else key(holder),
        kind="+".join(sorted(kinds)) if kinds else None,
        gpu_memory=sum(memory) if memory else None,
        sm=sum(shares) / len(shares) if shares else None,
        cpu=rates.get("cpu_percent"),
        ram=process.values.get("host_memory_bytes"),
        elapsed=None if started is None else max(0.0, snapshot.frame.time - started),
        read=rates.get("read_bytes_per_second"),
    )


def _holder(process: ProcessReading, by_pid: Mapping[int, ProcessReading]) -> ProcessReading | None:
    """The nearest ancestor on a GPU; pids seen in two moments can form a ring, which ends the search."""
    seen = {process.pid}
    parent = by_pid.get(process.identity.parent_pid or 0)
    while parent is not None and parent.pid not in seen:
        if parent.on_gpu:
            return parent
        seen.add(parent.pid)
        parent = by_pid.get(parent.identity.parent_pid or 0)
    return None
