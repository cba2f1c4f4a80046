"""The processes on the GPUs, what they use of the machine, and their helpers."""

from __future__ import annotations

from collections.abc import Iterator

from gpulse.model.device import ranges
from gpulse.model.process import GpuProcess, ProcessReading
from gpulse.model.snapshot import Snapshot
from gpulse.terminal import format as f
from gpulse.terminal.table import Column, Paint, render, wrapped

_COLUMNS = (
    Column("PID"),
    Column("User", right=False, drop=1, least=8, optional=True),
    Column("GPU", drop=2),
    Column("GPU mem"),
    Column("SM", drop=5, optional=True),
    Column("CPU"),
    Column("RAM", drop=3),
    Column("Time", drop=4),
    Column("Job", right=False, drop=6, least=8, optional=True),
    Column("Command", right=False, least=20),
)
_HIDDEN = "(not visible)"


def process_lines(snapshot: Snapshot, width: int, paint: Paint, *, verbose: bool) -> list[str]:
    """One row a process on a GPU and one for all its helpers, or with `verbose` for each of them."""
    rows = list(_rows(snapshot, verbose=verbose))
    if rows:
        return render(_COLUMNS, rows, width, paint)
    return list(wrapped(_nobody(snapshot), width))


def _nobody(snapshot: Snapshot) -> str:
    hidden = [gpu.device.label for gpu in snapshot.frame.gpus if gpu.processes is None]
    if not hidden:
        return "No process is on a GPU."
    if len(hidden) == len(snapshot.frame.gpus):
        return "The driver did not say which processes are on the GPUs."
    return f"The driver did not say which processes are on GPU {ranges(hidden)}; no process is on the others."


def _rows(snapshot: Snapshot, *, verbose: bool) -> Iterator[list[str]]:
    by_pid = {process.pid: process for process in snapshot.frame.processes}
    children: dict[int | None, list[ProcessReading]] = {}
    for process in snapshot.frame.processes:
        if not process.on_gpu:
            children.setdefault(process.identity.parent_pid, []).append(process)
    holds: dict[int, list[tuple[str, GpuProcess]]] = {}
    for gpu in snapshot.frame.gpus:
        for held in gpu.processes or ():
            holds.setdefault(held.pid, []).append((gpu.device.label, held))
    for pid, held_on in holds.items():
        yield _row(snapshot, pid, by_pid.get(pid), held_on, 0)
        helpers = list(_below(children, pid, 1))
        if verbose:
            yield from (_row(snapshot, child.pid, child, [], depth) for child, depth in helpers)
        elif helpers:
            yield _together(snapshot, [child for child, _ in helpers])


def _below(
    children: dict[int | None, list[ProcessReading]], pid: int, depth: int
) -> Iterator[tuple[ProcessReading, int]]:
    for child in children.pop(pid, ()):  # popped, so that a recording's circle of parents comes to an end
        yield child, depth
        yield from _below(children, child.pid, depth + 1)


def _row(
    snapshot: Snapshot,
    pid: int,
    known: ProcessReading | None,
    held_on: list[tuple[str, GpuProcess]],
    depth: int,
) -> list[str]:
    memories = [held.gpu_memory_bytes for _, held in held_on if held.gpu_memory_bytes is not None]
    shares = [held.sm_ratio for _, held in held_on if held.sm_ratio is not None]
    on_gpu = [
        ranges(label for label, _ in held_on),
        f.size(sum(memories)) if memories else (f.UNKNOWN if held_on else ""),
        f.ratio(max(shares)) if shares else (f.UNKNOWN if held_on else ""),
    ]
    if known is None or known.state is None:
        return [str(pid), f.UNKNOWN, *on_gpu, f.UNKNOWN, f.UNKNOWN, f.UNKNOWN, "", _HIDDEN]
    owner = known.identity.owner
    return [
        str(pid),
        f.plain(owner.user),
        *on_gpu,
        f.percent(snapshot.process(known, "cpu_percent")),
        f.size(snapshot.process(known, "host_memory_bytes")),
        f.duration(snapshot.process(known, "elapsed_seconds")),
        f.plain(owner.job or owner.container or ""),
        "  " * depth + f.command(known.identity.command, known.identity.name),
    ]


def _together(snapshot: Snapshot, helpers: list[ProcessReading]) -> list[str]:
    """A trainer's helpers as one line: how many, and what they use together."""
    percents = [value for child in helpers if (value := snapshot.process(child, "cpu_percent")) is not None]
    memories = [value for child in helpers if (value := child.values.get("host_memory_bytes")) is not None]
    names = ", ".join(sorted({f.plain(child.identity.name) for child in helpers}))
    return [
        *([""] * 5),
        f.percent(sum(percents) if percents else None),
        f.size(sum(memories) if memories else None),
        "",
        "",
        f"  + {len(helpers)} {'child' if len(helpers) == 1 else 'children'}: {names}",
    ]
