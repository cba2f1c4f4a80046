"""Everything known about one process, as a page."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime

from gpulse.model.process import ProcessIdentity, ProcessReading
from gpulse.model.rates import ProcessKey, key
from gpulse.terminal import format as human
from gpulse.terminal.top.cells import Line, Piece
from gpulse.terminal.top.glyphs import Glyphs
from gpulse.terminal.top.process_tree import Entry, command_of, entries
from gpulse.terminal.top.process_view import span
from gpulse.terminal.top.snapshot import Snapshot

_STATES = {
    "R": "running",
    "S": "asleep",
    "D": "waiting for a disk",
    "Z": "dead, not yet collected by its parent",
    "T": "stopped",
    "t": "stopped by a debugger",
    "I": "idle",
}
_MOST_THREADS = 12


def page(snapshot: Snapshot, wanted: ProcessKey, glyphs: Glyphs) -> list[Line]:
    """The page of one process; says so when it is gone."""
    entry = next((entry for entry in entries(snapshot) if entry.key == wanted), None)
    if entry is None:
        return [_line("pid", f"{wanted[0]} has ended", glyphs)]
    return [
        *_identity(entry, glyphs),
        (),
        *_use(entry, snapshot, glyphs),
        *_threads(entry.process, glyphs),
        *_relatives(entry, snapshot, glyphs),
    ]


def question(identity: ProcessIdentity, glyphs: Glyphs) -> list[Line]:
    """Whom one is about to end."""
    return [
        _line("pid", str(identity.pid), glyphs),
        _line("user", identity.owner.user, glyphs),
        _line("command", command_of(identity) or None, glyphs),
        (),
    ]


def _line(label: str, text: str | None, glyphs: Glyphs) -> Line:
    return (Piece(label, "head"), Piece(glyphs.clean(text)))


def _identity(entry: Entry, glyphs: Glyphs) -> Iterator[Line]:
    identity = entry.process.identity
    owner = identity.owner
    yield _line("command", command_of(identity) or None, glyphs)
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
    when = (
        None
        if started is None
        else datetime.fromtimestamp(started, UTC).astimezone().strftime("%Y-%m-%d %H:%M:%S")
    )
    yield _line("started", f"{when or human.UNKNOWN}, {human.duration(entry.elapsed)} ago", glyphs)


def _use(entry: Entry, snapshot: Snapshot, glyphs: Glyphs) -> Iterator[Line]:
    process = entry.process
    rates = snapshot.rates.processes.get(entry.key, {})
    state = process.state or human.UNKNOWN
    yield _line("state", f"{state} {_STATES.get(state, '')}", glyphs)
    if entry.gpus:
        yield _line(
            "GPU",
            f"{span(entry.gpus)}: {human.size(entry.gpu_memory)} memory, {human.ratio(entry.sm)} of the SMs' time",
            glyphs,
        )
    cpus = human.number(process.values.get("cpus_allowed"))
    waiting = human.ratio(rates.get("run_wait_ratio"))
    yield _line(
        "CPU",
        f"{human.percent(entry.cpu)} on {cpus} CPUs allowed, main thread waits for one {waiting} of the time",
        glyphs,
    )
    yield _line("RAM", human.size(entry.ram), glyphs)
    written = rates.get("written_bytes_per_second")
    yield _line("disks", f"reads {human.rate(entry.read)}, writes {human.rate(written)}", glyphs)


def _threads(process: ProcessReading, glyphs: Glyphs) -> Iterator[Line]:
    yield _line("threads", human.number(process.values.get("threads")), glyphs)
    for thread in process.threads[:_MOST_THREADS]:
        text = f"{thread.tid:>9} {thread.state}  {human.duration(thread.cpu_seconds_total):>8} CPU  {thread.name}"
        yield _line("", text, glyphs)


def _relatives(entry: Entry, snapshot: Snapshot, glyphs: Glyphs) -> Iterator[Line]:
    by_pid = {process.pid: process for process in snapshot.frame.processes}
    parent = entry.process.identity.parent_pid
    seen = {entry.process.pid}
    label = "parents"
    while parent is not None and parent not in seen:
        seen.add(parent)
        known = by_pid.get(parent)
        yield _line(label, f"{parent}  {command_of(known.identity) if known else ''}", glyphs)
        parent, label = (known.identity.parent_pid if known else None), ""
    children = [
        process for process in snapshot.frame.processes if process.identity.parent_pid == entry.process.pid
    ]
    busy = sum(snapshot.rates.processes.get(key(child), {}).get("cpu_percent", 0.0) for child in children)
    if children:
        yield _line("children", f"{len(children)}, together {human.percent(busy)} CPU", glyphs)
