"""Tables of a cluster: the head and its storage, nodes, sessions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from typing import NamedTuple

import msgspec

from gpulse.cluster.protocol.answers import (
    ExportState,
    NodeStatus,
    SessionAnswer,
    SessionInterruption,
    Status,
    Storage,
)
from gpulse.model.finding_group import grouped
from gpulse.model.natural import natural_key
from gpulse.terminal import format as f
from gpulse.terminal.beyond import beyond_lines
from gpulse.terminal.table import Cell, Column, Paint, render, wrapped


class Commands(NamedTuple):
    """How to do what a table suggests."""

    start: str = "gpulse session start NAME"
    recover: str = "gpulse session recover NAME"
    agent: str = "gpulse agent HEAD:8090"


MOST_NODES = 40
"""More than so many are summed up, and only those that are not well are listed."""
_MAX_NAMED = 5
"""At most this many nodes are named in a sentence."""
_STYLES = {"healthy": "good", "late": "notice", "lost": "warn", "active": "good", "interrupted": "notice"}
_SEVERITY_STYLES = {"critical": "warn", "high": "warn", "medium": "notice", "low": "notice"}
_MAX_FINDINGS = 12
_MAX_PLACES = 4
_NODE_COLUMNS = (
    Column("node", right=False),
    Column("state", right=False),
    Column("GPUs"),
    Column("model", right=False, drop=2, least=8, optional=True),
    Column("last heard", drop=1),
    Column("version", right=False, drop=3, optional=True),
    Column("labels", right=False, drop=4, least=8, optional=True),
)
_SESSION_COLUMNS = (
    Column("session", right=False),
    Column("state", right=False),
    Column("began", right=False, drop=1),
    Column("length"),
    Column("frames", drop=2),
    Column("of", right=False, drop=3, least=6, optional=True),
    Column("labels", right=False, drop=4, least=8, optional=True),
    Column("id", right=False, drop=6, optional=True),
    Column("file", right=False, drop=5, least=10, optional=True),
)


def status_lines(
    status: Status,
    place: str,
    *,
    width: int,
    paint: Paint,
    every_node: bool = False,
    commands: Commands = Commands(),  # noqa: B008  it never changes
) -> Iterator[str]:
    """A head, its storage, its nodes and the sessions that go on.

    Args:
        status: The head's own words.
        place: Where it is.
        width: Columns of the terminal.
        paint: Puts on colours.
        every_node: List them all, however many there are.
        commands: What to suggest.
    """
    yield from wrapped(_headline(status, place), width, "  ")
    yield from wrapped(_sampling(status), width, "  ")
    style = "" if status.storage.state == "ok" else "warn"
    yield from (paint(style, line) for line in wrapped(_storage(status.storage), width, "  "))
    for style, told in beyond_lines(status):
        yield from (paint(style, line) for line in wrapped(told, width, "  "))
    yield ""
    yield from node_lines(status, width=width, paint=paint, every_node=every_node, commands=commands)
    yield from finding_lines(status, width=width, paint=paint)
    yield ""
    if status.active_sessions:
        now = seconds_of(status.time)
        yield from session_lines(status.active_sessions, now=now, width=width, paint=paint)
    else:
        yield from wrapped(f"no session is active; start one with: {commands.start}", width, "  ")
    waiting = [f.plain(name) for name in status.recoverable_sessions]
    if waiting:
        recover = commands.recover.replace("NAME", waiting[0]) if len(waiting) == 1 else commands.recover
        text = f"interrupted: {', '.join(waiting)}; go on with: {recover}"
        yield from (paint("notice", line) for line in wrapped(text, width, "  "))


def node_lines(
    status: Status,
    *,
    width: int,
    paint: Paint,
    every_node: bool = False,
    commands: Commands = Commands(),  # noqa: B008  it never changes
) -> Iterator[str]:
    """The nodes, those that are not well first."""
    nodes, missing = status.nodes, [f.plain(name) for name in status.missing_nodes]
    if missing:
        told = f"never reported: {', '.join(missing)}; see whether their agents run: gpulse deploy status --nodes FILE"
        yield from (paint("warn", line) for line in wrapped(told, width, "  "))
    if not nodes:
        yield from wrapped(f"no node yet; on each machine with GPUs run: {commands.agent}", width, "  ")
        return
    order = {"lost": 0, "late": 1}
    ordered = sorted(nodes, key=lambda node: (order.get(node.state, 2), natural_key(node.name)))
    shown = ordered
    if len(ordered) > MOST_NODES and not every_node:
        shown = [node for node in ordered if node.state != "healthy"]
    if len(nodes) > 1:
        states = Counter[str](node.state for node in nodes)
        told = ", ".join(f"{states[state]} {state}" for state in ("healthy", "late", "lost") if states[state])
        gpus = sum(node.gpu_count or 0 for node in nodes)
        if status.total_gpus != gpus:
            told += f"; {f.count(status.total_gpus)} GPUs are connected"
        yield from wrapped(f"{len(nodes)} nodes with {f.count(gpus)} GPUs: {told}", width, "  ")
    if shown:
        yield from render(_NODE_COLUMNS, map(_node_row, shown), width, paint)


def finding_lines(status: Status, *, width: int, paint: Paint) -> Iterator[str]:
    """What is wrong now, worst first; the same on several GPUs once. Notes are left out."""
    now = seconds_of(status.time)
    found = [one for one in status.findings if one.severity != "info"]
    groups = grouped([msgspec.to_builtins(one) for one in found])
    if groups:
        yield ""
        yield paint("title", f"{len(found)} {'finding' if len(found) == 1 else 'findings'}")
    for group in groups[:_MAX_FINDINGS]:
        starts = [start for one in group.members if isinstance(start := one.get("start"), int | float)]
        since = f", {f.since(min(starts), now)}" if starts and now is not None else ""
        more = len(group.places) - _MAX_PLACES
        places = ", ".join(group.places[:_MAX_PLACES]) + (f" and {more} more nodes" if more > 0 else "")
        text = f"{group.severity}: {places}: {group.worst.get('summary')} ({group.id}{since})"
        style = _SEVERITY_STYLES.get(group.severity, "")
        yield from (paint(style, line) for line in wrapped(f.plain(f"  {text}"), width, "    "))
    if len(groups) > _MAX_FINDINGS:
        yield f"  and {len(groups) - _MAX_FINDINGS} more kinds: gpulse status --json, or the page"


def session_lines(
    sessions: Iterable[SessionAnswer], *, now: float | None, width: int, paint: Paint
) -> list[str]:
    """Sessions, a line each."""
    return render(_SESSION_COLUMNS, (_session_row(session, now) for session in sessions), width, paint)


def session_facts(session: SessionAnswer, *, now: float | None, width: int, paint: Paint) -> Iterator[str]:
    """Everything about one session."""
    told: dict[str, str] = {
        "state": session.state,
        "id": session.session_id,
        "began": _moment(session.start_time),
        "ended": _moment(session.end_time),
        "length": _length(session, now),
        "frames": f"{session.frame_count}, one every {session.interval_ms} ms",
        "nodes": ", ".join(session.nodes) or "all",
        "GPUs": ", ".join(session.gpus) or "all",
        "labels": _labels(session.labels),
        "file": _file(session),
    }
    interruptions = session.interruptions
    wide = max(map(len, [*told, *(["interrupted"] if interruptions else [])])) + 2
    yield paint("title", f.plain(session.name))
    for name, text in told.items():
        if text not in ("", f.UNKNOWN):
            yield from wrapped(f"{name:<{wide}}{f.plain(text)}", width, " " * wide)
    for part in interruptions:
        text = f"{_moment(part.start_time)} to "
        if part.end_time:
            missing = interruption_words(part)
            text += f"{_moment(part.end_time)}{f': {missing}' if missing else ''}"
        else:
            text += f"now; to go on: gpulse session recover {session.name}"
        style = "dim" if part.missing == part.pending == [] else "notice"
        lines = wrapped(f"{'interrupted':<{wide}}{f.plain(text)}", width, " " * wide)
        yield from (paint(style, line) for line in lines)


def interruption_words(part: SessionInterruption) -> str:
    """Return what is missing of a session's interruption; empty when the head does not say."""
    missing, pending = part.missing, part.pending
    if missing is msgspec.UNSET or pending is msgspec.UNSET:
        return ""
    told = [f"no frames of {f.plain(one.node)} for {f.duration(one.seconds)}" for one in missing[:_MAX_NAMED]]
    if len(missing) > _MAX_NAMED:
        told.append(f"and of {len(missing) - _MAX_NAMED} more nodes")
    if pending:
        names = ", ".join(f.plain(name) for name in pending[:_MAX_NAMED])
        more = f" and {len(pending) - _MAX_NAMED} more" if len(pending) > _MAX_NAMED else ""
        told.append(f"not known yet for {names}{more}, whose agents may still send frames")
    return "; ".join(told) or "no frames are missing"


def seconds_of(text: object) -> float | None:
    """Epoch seconds of a time that a head wrote."""
    try:
        return datetime.fromisoformat(str(text)).timestamp()
    except (ValueError, OverflowError):
        return None


def _headline(status: Status, place: str) -> str:
    return f"head at {place}: gpulse {f.plain(status.version)}, up {f.duration(status.uptime_seconds)}"


def _sampling(status: Status) -> str:
    extra = [
        word
        for word, is_on in (
            ("PCIe bandwidth", status.enable_bandwidth_profiling),
            ("NVLink", status.enable_nvlink_profiling),
        )
        if is_on
    ]
    kept = f"; sessions hold {' and '.join(extra)}" if extra else ""
    return f"samples every {status.freq} ms{kept}; {f.count(status.frames_received)} frames received"


def _storage(storage: Storage) -> str:
    place = f.plain(storage.directory)
    if storage.state == "ok":
        used = f"{f.size(storage.log_bytes)} log, {f.size(storage.history_bytes)} history"
        return f"stores in {place}: {used}, {f.size(storage.free_bytes)} free"
    hint = f"; try: {f.plain(storage.hint)}" if storage.hint else ""
    return f"stores nothing at the moment ({place}): {f.plain(str(storage.error))}{hint}"


def _node_row(node: NodeStatus) -> list[Cell | str]:
    return [
        Cell(f.plain(node.name), "name"),
        Cell(node.state, _STYLES.get(node.state, "")),
        f.count(node.gpu_count),
        f.plain(", ".join(node.gpu_models)) or f.UNKNOWN,
        _ago(node.silent_seconds),
        f.plain(node.version) or f.UNKNOWN,
        f.plain(_labels(node.labels)),
    ]


def _session_row(session: SessionAnswer, now: float | None) -> list[Cell | str]:
    state = session.export.state if session.export else "none"
    path = f.UNKNOWN if state == "none" else f.plain(_file(session))
    return [
        Cell(f.plain(session.name), "name"),
        Cell(session.state, _STYLES.get(session.state, "")),
        _moment(session.start_time),
        _length(session, now),
        f.count(session.frame_count),
        f.plain(",".join([*session.nodes, *session.gpus])),
        f.plain(_labels(session.labels)),
        f.plain(session.session_id),
        Cell(path, briefer=(path.rpartition("/")[2],) if state == "done" and "/" in path else ()),
    ]


def _labels(labels: Mapping[str, str]) -> str:
    return " ".join(f"{name}={text}" for name, text in labels.items())


def _file(session: SessionAnswer) -> str:
    match session.export:
        case ExportState(state="writing"):
            return "being written"
        case ExportState(state="failed", error=error):
            return f"failed: {error}"
        case ExportState(state="done", path=path):
            return str(path)
    if session.end_time is None and session.output_file:
        return f"{session.output_file}, when it is stopped"
    return f.UNKNOWN if session.end_time is None else "not written"


def _length(session: SessionAnswer, now: float | None) -> str:
    start, end = seconds_of(session.start_time), seconds_of(session.end_time)
    if end is None:
        open_gaps = [gap for gap in session.interruptions if gap.end_time is None]
        end = seconds_of(open_gaps[-1].start_time) if open_gaps else now
    return f.UNKNOWN if start is None or end is None else f.duration(max(0.0, end - start))


def _moment(text: object) -> str:
    """A time on this machine's clock, with its day."""
    seconds = seconds_of(text)
    if seconds is None:
        return f.UNKNOWN
    return datetime.fromtimestamp(seconds, UTC).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def _ago(seconds: object) -> str:
    if not isinstance(seconds, int | float):
        return f.UNKNOWN
    return "now" if seconds < 2 else f"{f.duration(float(seconds))} ago"
