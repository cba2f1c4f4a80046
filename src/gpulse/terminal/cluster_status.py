"""Status of a cluster as text: the head and its storage, nodes, findings and sessions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from gpulse.cluster.protocol.answers import (
    BackendStatus,
    ExportState,
    NodeStatus,
    NotificationTarget,
    RemoteQuery,
    RemoteWrite,
    SessionAnswer,
    SessionInterruption,
    SharedDatabaseStatus,
    Status,
    Storage,
)
from gpulse.diagnosis.line_search import describe_first_line
from gpulse.model.device import format_ranges
from gpulse.model.finding import group_similar_findings
from gpulse.model.safe_text import natural_key
from gpulse.model.time_text import parse_iso
from gpulse.terminal import value_format as f
from gpulse.terminal.table import Paint, TableCell, TableColumn, render_table, wrap


def backend_lines(status: BackendStatus) -> Iterator[tuple[str, str]]:
    """Yield a style and a line for each database that a head uses."""
    if status.remote:
        yield _style(status.remote), _remote_write_text(status.remote)
    if status.remote_query and status.remote_query.state != "ok":
        query = status.remote_query
        text = f"cannot read older history from {f.plain(query.url)}{_error_text(query)}"
        yield _style(query), text
    if status.database:
        yield _style(status.database), _database_text(status.database)


def notification_lines(targets: Sequence[NotificationTarget]) -> Iterator[tuple[str, str]]:
    """Yield a style and a line about the notifications of a head, and one for each target that has a problem."""
    if not targets:
        return
    fine = [target for target in targets if target.state == "ok"]
    sent = f.count_noun(sum(target.sent_total for target in targets), "notification")
    text = f"sent {sent} to {', '.join(f'{f.plain(one.name)} ({f.plain(one.kind)})' for one in targets)}"
    waiting = sum(target.waiting for target in fine)
    yield "", text + (f"; {waiting} waiting" if waiting else "")
    for target in targets:
        if target.state != "ok":
            why = f": {f.plain(target.error)}" if target.error else ""
            yield (
                "warn",
                f"cannot send notifications to {f.plain(target.name)}{why}; {target.waiting} waiting",
            )
        if target.given_up_total:
            given_up = f.count_noun(target.given_up_total, "notification")
            yield "notice", f"gave up on {given_up} to {f.plain(target.name)} that could not be delivered"


def _style(part: RemoteWrite | RemoteQuery | SharedDatabaseStatus) -> str:
    return "" if part.state == "ok" else "warn"


def _remote_write_text(remote: RemoteWrite) -> str:
    place, state = f.plain(remote.url), remote.state
    text = f"sent {f.count_noun(remote.samples_total, 'sample')} to {place} since the head started"
    if state == "behind":
        text += f"; {f.duration(remote.waiting_seconds)} behind"
    elif state != "ok":
        what = "rejects samples" if state == "refused" else "is not accepting samples"
        text = f"the remote-write endpoint {place} {what}{_error_text(remote)}"
        text += f"; {f.size(remote.waiting_bytes)} waiting to be sent"
    losses = []
    if remote.refused_total:
        losses.append(f"the endpoint rejected {f.count_noun(remote.refused_total, 'sample')}")
    if remote.lost_total:
        losses.append(f"dropped {f.count_noun(remote.lost_total, 'unsent record')}")
    return "; ".join([text, *losses])


def _database_text(shared: SharedDatabaseStatus) -> str:
    if shared.state != "ok":
        waiting = f"; {f.count_noun(shared.waiting_records, 'record')} waiting to be written"
        return f"cannot read data of other heads{_error_text(shared)}{waiting}"
    alive = sum(head.alive for head in shared.heads)
    others = f.count_noun(alive, "other head") if alive else "no other head"
    return f"shares sessions and reports in PostgreSQL at {f.plain(shared.database)} with {others}"


def _error_text(part: RemoteWrite | RemoteQuery | SharedDatabaseStatus) -> str:
    error = f": {f.plain(part.error)}" if part.error else ""
    return error + (f"; try: {f.plain(part.hint)}" if part.hint else "")


class SuggestedCommands(NamedTuple):
    """Commands that a table suggests."""

    start: str = "gpulse session start NAME"
    recover: str = "gpulse session recover NAME"
    agent: str = "gpulse agent HEAD:8090"


MAX_LISTED_NODES = 40
"""With more nodes, only those that are late or lost are listed."""
MAX_FREE_NODES = 20
"""Free GPUs are listed for at most this many nodes."""
_MAX_NAMED_NODES = 5
"""At most this many nodes are named in a sentence."""
_STYLES = {"healthy": "good", "late": "notice", "lost": "warn", "active": "good", "interrupted": "notice"}
_SEVERITY_STYLES = {"critical": "warn", "high": "warn", "medium": "notice", "low": "notice"}
_MAX_FINDINGS = 12
_NODE_COLUMNS = (
    TableColumn("node", right=False),
    TableColumn("state", right=False),
    TableColumn("GPUs"),
    TableColumn("model", right=False, drop=2, least=8, optional=True),
    TableColumn("last report", drop=1),
    TableColumn("version", right=False, drop=3, optional=True),
    TableColumn("labels", right=False, drop=4, least=8, optional=True),
)
_SESSION_COLUMNS = (
    TableColumn("session", right=False),
    TableColumn("state", right=False),
    TableColumn("started", right=False, drop=1),
    TableColumn("length"),
    TableColumn("frames", drop=2),
    TableColumn("nodes/GPUs", right=False, drop=3, least=6, optional=True),
    TableColumn("labels", right=False, drop=4, least=8, optional=True),
    TableColumn("id", right=False, drop=6, optional=True),
    TableColumn("file", right=False, drop=5, least=10, optional=True),
)


def status_lines(
    status: Status,
    place: str,
    *,
    width: int,
    paint: Paint,
    every_node: bool = False,
    commands: SuggestedCommands = SuggestedCommands(),  # noqa: B008  it never changes
) -> Iterator[str]:
    """Yield lines about a head, its storage, its nodes and the active sessions.

    Args:
        status: The head's answer.
        place: Address of the head.
        width: Columns of the terminal.
        paint: Adds colors.
        every_node: List all nodes, however many there are.
        commands: Commands to suggest.
    """
    yield from wrap(_headline(status, place), width, "  ")
    yield from wrap(_sampling(status), width, "  ")
    style = "" if status.storage.state == "ok" else "warn"
    yield from (paint(style, line) for line in wrap(_storage(status.storage), width, "  "))
    for text in describe_damage(status.storage):
        yield from (paint("warn", line) for line in wrap(text, width, "  "))
    for style, text in (*backend_lines(status), *notification_lines(status.notifications or ())):
        yield from (paint(style, line) for line in wrap(text, width, "  "))
    yield ""
    yield from node_lines(status, width=width, paint=paint, every_node=every_node, commands=commands)
    if (free := describe_free_gpus(status, every_node=every_node)) is not None:
        yield ""
        yield from wrap(free, width, "  ")
    yield from finding_lines(status, width=width, paint=paint)
    yield ""
    if status.active_sessions:
        now = parse_iso(status.time)
        yield from session_lines(status.active_sessions, now=now, width=width, paint=paint)
    else:
        yield from wrap(f"no active sessions; start one with: {commands.start}", width, "  ")
    waiting = [f.plain(name) for name in status.recoverable_sessions]
    if waiting:
        recover = commands.recover.replace("NAME", waiting[0]) if len(waiting) == 1 else commands.recover
        text = f"interrupted: {', '.join(waiting)}; resume with: {recover}"
        yield from (paint("notice", line) for line in wrap(text, width, "  "))


def node_lines(
    status: Status,
    *,
    width: int,
    paint: Paint,
    every_node: bool = False,
    commands: SuggestedCommands = SuggestedCommands(),  # noqa: B008  it never changes
) -> Iterator[str]:
    """Yield a table of the nodes; those that are lost or late come first."""
    nodes, missing = status.nodes, [f.plain(name) for name in status.missing_nodes]
    if missing:
        text = (
            f"never reported: {', '.join(missing)}; check that "
            f"{'its agent is' if len(missing) == 1 else 'their agents are'} running: gpulse deploy status --nodes FILE"
        )
        yield from (paint("warn", line) for line in wrap(text, width, "  "))
    if not nodes:
        yield from wrap(f"no nodes yet; on each machine with GPUs, run: {commands.agent}", width, "  ")
        return
    order = {"lost": 0, "late": 1}
    ordered = sorted(nodes, key=lambda node: (order.get(node.state, 2), natural_key(node.name)))
    shown = ordered
    if len(ordered) > MAX_LISTED_NODES and not every_node:
        shown = [node for node in ordered if node.state != "healthy"]
    if len(nodes) > 1:
        states = Counter[str](node.state for node in nodes)
        text = ", ".join(f"{states[state]} {state}" for state in ("healthy", "late", "lost") if states[state])
        gpus = sum(node.gpu_count or 0 for node in nodes)
        if status.total_gpus != gpus:
            text += f"; {f.count_noun(status.total_gpus, 'GPU')} connected now"
        yield from wrap(f"{len(nodes)} nodes with {f.count_noun(gpus, 'GPU')}: {text}", width, "  ")
    if shown:
        yield from render_table(_NODE_COLUMNS, map(_node_row, shown), width, paint)


def describe_free_gpus(status: Status, *, every_node: bool = False) -> str | None:
    """Return how many GPUs are free and where: `12 free: gpu-02 0-3, gpu-05 all`; None if that is not known."""
    if status.free_gpus is msgspec.UNSET or not status.total_gpus:
        return None
    if not status.free_gpus:
        return "no GPU is free"
    sizes = {node.name: node.gpu_count for node in status.nodes}
    places = [
        f"{f.plain(name)} {'all' if len(labels) == sizes.get(name) else format_ranges(labels)}"
        for name, labels in sorted(status.free_gpus.items(), key=lambda item: natural_key(item[0]))
    ]
    shown = places if every_node else places[:MAX_FREE_NODES]
    hidden = len(places) - len(shown)
    more = f", and on {f.count_noun(hidden, 'more node')}" if hidden else ""
    return f"{sum(map(len, status.free_gpus.values()))} free: {', '.join(shown)}{more}"


def finding_lines(status: Status, *, width: int, paint: Paint) -> Iterator[str]:
    """Yield the current findings, worst first, without notes; a finding that several GPUs have is listed once."""
    now = parse_iso(status.time)
    found = [one for one in status.findings if one.severity != "info"]
    groups = group_similar_findings([msgspec.to_builtins(one) for one in found])
    if groups:
        yield ""
        yield paint("title", f.count_noun(len(found), "finding"))
    for group in groups[:_MAX_FINDINGS]:
        starts = [start for one in group.members if isinstance(start := one.get("start"), int | float)]
        since = f", {f.since(min(starts), now)}" if starts and now is not None else ""
        text = f"{group.severity}: {group.text} ({group.id}{since})"
        style = _SEVERITY_STYLES.get(group.severity, "")
        yield from (paint(style, line) for line in wrap(f.plain(f"  {text}"), width, "    "))
        if (code := describe_first_line(group.members)) is not None:
            yield from wrap(f.plain(f"    where: {code}"), width, "      ")
    if len(groups) > _MAX_FINDINGS:
        kinds = f.count_noun(len(groups) - _MAX_FINDINGS, "more kind")
        yield f"  and {kinds} of finding; see all with: gpulse status --json, or on the web page"


def session_lines(
    sessions: Iterable[SessionAnswer], *, now: float | None, width: int, paint: Paint
) -> list[str]:
    """Return a table of sessions."""
    return render_table(_SESSION_COLUMNS, (_session_row(session, now) for session in sessions), width, paint)


def session_facts(session: SessionAnswer, *, now: float | None, width: int, paint: Paint) -> Iterator[str]:
    """Yield everything about one session."""
    facts: dict[str, str] = {
        "state": session.state,
        "id": session.session_id,
        "started": _local_time(session.start_time),
        "ended": _local_time(session.end_time),
        "length": _length(session, now),
        "frames": f"{session.frame_count}, one every {session.interval_ms} ms",
        "nodes": ", ".join(session.nodes) or "all",
        "GPUs": ", ".join(session.gpus) or "all",
        "labels": _labels(session.labels),
        "file": _file(session),
    }
    interruptions = session.interruptions
    wide = max(map(len, [*facts, *(["interrupted"] if interruptions else [])])) + 2
    yield paint("title", f.plain(session.name))
    for name, text in facts.items():
        if text not in ("", f.UNKNOWN):
            yield from wrap(f"{name:<{wide}}{f.plain(text)}", width, " " * wide)
    for part in interruptions:
        text = f"{_local_time(part.start_time)} to "
        if part.end_time:
            missing = describe_interruption(part)
            text += f"{_local_time(part.end_time)}{f': {missing}' if missing else ''}"
        else:
            text += f"now; resume with: gpulse session recover {session.name}"
        style = "dim" if part.missing == part.pending == [] else "notice"
        lines = wrap(f"{'interrupted':<{wide}}{f.plain(text)}", width, " " * wide)
        yield from (paint(style, line) for line in lines)


def describe_interruption(part: SessionInterruption) -> str:
    """Return which frames are missing after an interruption of a session; empty when the head does not say."""
    missing, pending = part.missing, part.pending
    if missing is msgspec.UNSET or pending is msgspec.UNSET:
        return ""
    parts = [
        f"no frames from {f.plain(one.node)} for {f.duration(one.seconds)}"
        for one in missing[:_MAX_NAMED_NODES]
    ]
    if len(missing) > _MAX_NAMED_NODES:
        parts.append(f"and from {f.count_noun(len(missing) - _MAX_NAMED_NODES, 'more node')}")
    if pending:
        names = ", ".join(f.plain(name) for name in pending[:_MAX_NAMED_NODES])
        more = f" and {len(pending) - _MAX_NAMED_NODES} more" if len(pending) > _MAX_NAMED_NODES else ""
        parts.append(f"frames from {names}{more} may still arrive")
    return "; ".join(parts) or "no frames are missing"


def _headline(status: Status, place: str) -> str:
    return f"head at {place}: gpulse {f.plain(status.version)}, up {f.duration(status.uptime_seconds)}"


def _sampling(status: Status) -> str:
    extra = [
        word
        for word, is_on in (
            ("PCIe traffic", status.enable_bandwidth_profiling),
            ("NVLink traffic", status.enable_nvlink_profiling),
        )
        if is_on
    ]
    kept = f"; sessions include {' and '.join(extra)}" if extra else ""
    received = f.count_noun(status.frames_received, "frame")
    return f"samples every {status.freq} ms{kept}; {received} received"


def describe_damage(storage: Storage) -> Iterator[str]:
    """Yield lines about damaged files, which were moved aside."""
    if storage.damaged_files:
        count = (
            f"{storage.damaged_files} damaged {'file was' if storage.damaged_files == 1 else 'files were'}"
        )
        yield f"{count} moved to {f.plain(storage.directory)}/damaged; the remaining data is unaffected"
    for text in storage.damage:
        yield f"damaged: {f.plain(text)}"


def _storage(storage: Storage) -> str:
    place = f.plain(storage.directory)
    if storage.state == "ok":
        used = f"{f.size(storage.log_bytes)} log, {f.size(storage.history_bytes)} history"
        return f"stores data in {place}: {used}, {f.size(storage.free_bytes)} free"
    hint = f"; try: {f.plain(storage.hint)}" if storage.hint else ""
    return f"storage in {place} is currently failing: {f.plain(str(storage.error))}{hint}"


def _node_row(node: NodeStatus) -> list[TableCell | str]:
    return [
        TableCell(f.plain(node.name), "name"),
        TableCell(node.state, _STYLES.get(node.state, "")),
        f.count(node.gpu_count),
        f.plain(", ".join(node.gpu_models)) or f.UNKNOWN,
        _ago(node.silent_seconds),
        f.plain(node.version) or f.UNKNOWN,
        f.plain(_labels(node.labels)),
    ]


def _session_row(session: SessionAnswer, now: float | None) -> list[TableCell | str]:
    state = session.export.state if session.export else "none"
    path = f.UNKNOWN if state == "none" else f.plain(_file(session))
    return [
        TableCell(f.plain(session.name), "name"),
        TableCell(session.state, _STYLES.get(session.state, "")),
        _local_time(session.start_time),
        _length(session, now),
        f.count(session.frame_count),
        f.plain(",".join([*session.nodes, *session.gpus])),
        f.plain(_labels(session.labels)),
        f.plain(session.session_id),
        TableCell(path, briefer=(path.rpartition("/")[2],) if state == "done" and "/" in path else ()),
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
        return f"{session.output_file}, once the session has stopped"
    return f.UNKNOWN if session.end_time is None else "not written"


def _length(session: SessionAnswer, now: float | None) -> str:
    start, end = parse_iso(session.start_time), parse_iso(session.end_time)
    if end is None:
        open_gaps = [gap for gap in session.interruptions if gap.end_time is None]
        end = parse_iso(open_gaps[-1].start_time) if open_gaps else now
    return f.UNKNOWN if start is None or end is None else f.duration(max(0.0, end - start))


def _local_time(text: object) -> str:
    """Return a time as local time with its date."""
    seconds = parse_iso(text)
    return f.UNKNOWN if seconds is None else f.local_time(seconds)


def _ago(seconds: object) -> str:
    if not isinstance(seconds, int | float):
        return f.UNKNOWN
    return "now" if seconds < 2 else f"{f.duration(float(seconds))} ago"
