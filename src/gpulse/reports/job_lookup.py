"""Find the subject of a report by its name: a scheduler's job, a session, or a process and its descendants."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from gpulse.errors import RefusedError
from gpulse.model import time_text
from gpulse.model.job import JOB, JOB_END
from gpulse.model.safe_text import natural_key, printable
from gpulse.model.session import Session, find_session
from gpulse.reports.process_report import ProcessIndex, process_key, stored_owner, text_or_none
from gpulse.reports.report_subject import (
    AGENT_STARTED,
    JobKind,
    ReportSubject,
    TimeRange,
    find_grants,
    job_id,
    read_job,
)
from gpulse.reports.time_grid import ReportContext
from gpulse.store.gpu_selection import select_gpus
from gpulse.store.store import ALL_TIME, Query, StoredEvent, StoredProcess

MAX_CLOCK_AHEAD_SECONDS = 3600.0
"""How far a node's clock may be ahead."""
_PRESENCE_METRICS = ("gpu_utilization_ratio", "power_watts", "memory_used_bytes")
"""Every present GPU has at least one of them."""
_MIN_SILENCE_SECONDS = 60.0
"""A node that is silent for less is late, or its agent is restarting."""
_MIN_MISSED_SAMPLES = 4
_FIRST_END_SEARCH_SECONDS = 120.0
_MAX_STEPS = 720


class SubjectEnds(NamedTuple):
    """A subject whose grants and processes end when their node last reported."""

    subject: ReportSubject
    last: float
    """When its nodes last reported, but at least the present."""
    lost: Mapping[int, float]
    """Nodes that stopped reporting before the subject ended there, and when they last reported."""
    is_open: bool
    """Whether it still runs on a node."""


def find_ends(context: ReportContext, subject: ReportSubject, now: float) -> SubjectEnds:
    """Return a subject with corrected ends: a part of it ends when its node last reported, if that was much earlier.

    When an agent starts, it ends jobs and processes that no longer exist; if it was down for long, they ended earlier.
    """
    parts = [
        *((one.node, one.start, one.end) for one in subject.grants),
        *((one.node, one.first_seen, one.ended) for one in subject.processes),
    ]
    first = min(start for _, start, _ in parts)
    interval = context.interval_seconds
    silence = max(_MIN_SILENCE_SECONDS, _MIN_MISSED_SAMPLES * interval)
    agent_starts = _read_agent_starts(context, {node for node, _, _ in parts}, first, now)
    late: dict[tuple[int, float], float] = {}
    for moment, nodes in _nodes_by_end(parts, agent_starts).items():
        for node, last_sample in _find_last_samples(context, nodes, first, moment).items():
            if moment - last_sample > silence:
                late[node, moment] = last_sample + interval
    open_nodes = {node for node, _, end in parts if end is None}
    last_samples = _find_last_samples(
        context, open_nodes, min(first, now), now + MAX_CLOCK_AHEAD_SECONDS, MAX_CLOCK_AHEAD_SECONDS
    )
    lost = {node: time + interval for node, time in last_samples.items() if now - time > silence}

    def ended(node: int, start: float, end: float | None) -> float | None:
        over = lost.get(node) if end is None else late.get((node, end), end)
        return None if over is None else max(start, over)

    subject = subject._replace(
        grants=[one._replace(end=ended(one.node, one.start, one.end)) for one in subject.grants],
        processes=[
            one._replace(ended=ended(one.node, one.first_seen, one.ended)) for one in subject.processes
        ],
    )
    last = max([now, *(time for node, time in last_samples.items() if node not in lost)])
    return SubjectEnds(subject, last, lost, bool(open_nodes - lost.keys()))


def _read_agent_starts(
    context: ReportContext, nodes: Collection[int], first: float, now: float
) -> set[tuple[int, float]]:
    """Return the node and time of each start of an agent."""
    query = Query(
        first,
        now + MAX_CLOCK_AHEAD_SECONDS,
        nodes=frozenset(nodes),
        kinds=frozenset({AGENT_STARTED}),
        deadline=context.deadline,
    )
    events = context.store.events(query)
    return {(event.node, event.time) for event in events if event.node is not None}


def _find_last_samples(
    context: ReportContext, nodes: Collection[int], first: float, end: float, more_seconds: float = 0.0
) -> dict[int, float]:
    """Return the time of each node's last sample before `end`; nodes without samples since `first` are left out.

    The search goes back in ranges, each four times as long as the previous one.
    """
    found: dict[int, float] = {}
    left, stop, length = set(nodes), end, _FIRST_END_SEARCH_SECONDS + more_seconds
    while left and stop > first:
        begin = max(first, stop - length)
        step = float(max(5, 60 * int((stop - begin) / _MAX_STEPS / 60)))
        query = Query(
            begin,
            stop,
            "gpu",
            _PRESENCE_METRICS,
            nodes=frozenset(left),
            step=step,
            spread=False,
            deadline=context.deadline,
        )
        for one in context.store.series(query):
            ends = np.where(np.isnan(one.ends), one.times + step, one.ends)
            node = one.key.node
            found[node] = max(found.get(node, 0.0), float(ends.max()))
        left -= found.keys()
        stop, length = begin, 4 * length
    return found


def _nodes_by_end(
    parts: Iterable[tuple[int, float, float | None]], agent_starts: Collection[tuple[int, float]]
) -> dict[float, set[int]]:
    """Return the nodes of parts that ended when an agent started, by that time."""
    found: dict[float, set[int]] = {}
    for node, _, end in parts:
        if end is not None and (node, end) in agent_starts:
            found.setdefault(end, set()).add(node)
    return found


_ROOT = "root"
_MAX_OTHER_USERS = 5
_MAX_NAMED_NODES = 4


class JobUser(NamedTuple):
    """A user by name, UID or both."""

    name: str | None = None
    uid: int | None = None

    @property
    def shown(self) -> str:
        """The name, or else the UID."""
        return self.name[:40] if self.name else f"uid {self.uid}"

    @property
    def is_root(self) -> bool:
        """Whether it is root, whose processes may belong to any job, for example in containers."""
        return self.uid == 0 or self.name == _ROOT

    def differs(self, other: JobUser) -> bool:
        """Return whether two users are certainly different; UIDs decide if both have one."""
        if self.uid is not None and other.uid is not None:
            return self.uid != other.uid
        return self.name is not None and other.name is not None and self.name != other.name


def read_user(document: Mapping[str, Any]) -> JobUser:
    """Return the user of a job or of a process's owner."""
    uid = document.get("uid")
    return JobUser(text_or_none(document.get("user")), uid if isinstance(uid, int) else None)


class SameNameJobs:
    """Processes and events of jobs with one name, by user."""

    def __init__(self, processes: Sequence[StoredProcess], events: Sequence[StoredEvent]) -> None:
        """Store the processes and events.

        Args:
            processes: Processes that claim the job.
            events: Events that report the job.
        """
        self._processes = processes
        self._events = events

    @property
    def users(self) -> list[JobUser]:
        """Users that may own such a job, newest first: those from schedulers, or else those of the processes."""
        reported = [(event.time, read_user(event.detail)) for event in self._events]
        seen = [(one.first_seen, _process_user(one)) for one in self._processes]
        for some in (reported, [one for one in seen if not one[1].is_root], seen):
            ordered = [user for _, user in sorted(some, key=lambda one: one[0], reverse=True)]
            found = _distinct(user for user in ordered if user != JobUser())
            if found:
                return found
        return [JobUser()]

    def of(self, user: JobUser) -> tuple[list[StoredProcess], list[StoredEvent]]:
        """Return the processes and events that belong, or may belong, to a user."""
        return (
            [
                one
                for one in self._processes
                if (owner := _process_user(one)).is_root or not owner.differs(user)
            ],
            [one for one in self._events if not read_user(one.detail).differs(user)],
        )

    def others(self, user: JobUser, during: tuple[float, float], names: Mapping[int, str]) -> Iterator[str]:
        """Yield sentences about other users' jobs and processes, which the report leaves out.

        Args:
            user: The user whose job is reported.
            during: Time range of the report.
            names: Names of the nodes.
        """
        everybody = [_process_user(one) for one in self._processes] + [
            read_user(one.detail) for one in self._events
        ]
        others = _distinct(one for one in everybody if one.differs(user) and not one.is_root)
        for other in others[:_MAX_OTHER_USERS]:
            own = [one for one in self._processes if _belongs_to(_process_user(one), other, user)]
            events = [one for one in self._events if _belongs_to(read_user(one.detail), other, user)]
            places = {one.node for one in own} | {one.node for one in events}
            nodes = sorted(
                (names[node] for node in places if node is not None and node in names), key=natural_key
            )
            where = ", ".join(nodes[:_MAX_NAMED_NODES]) + (
                " and more" if len(nodes) > _MAX_NAMED_NODES else ""
            )
            if events:
                first = min([one.time for one in events] + [one.first_seen for one in own])
                yield (
                    f"Left out a job of {other.shown} with the same name, on {where} since {time_text.format_iso(first)}; "
                    "to report on it, select another time range or node"
                )
            elif any(one.first_seen < during[1] and (one.ended or during[1]) > during[0] for one in own):
                count = f"{len(own)} {'process' if len(own) == 1 else 'processes'}"
                yield f"Ignored {count} of {other.shown} on {where} that claim{'s' if len(own) == 1 else ''} this job's ID"


def _distinct(users: Iterable[JobUser]) -> list[JobUser]:
    found: list[JobUser] = []
    for user in users:
        if all(user.differs(one) for one in found):
            found.append(user)
    return found


def _belongs_to(user: JobUser, other: JobUser, reported: JobUser) -> bool:
    return user.differs(reported) and not user.differs(other)


def _process_user(process: StoredProcess) -> JobUser:
    return read_user(stored_owner(process))


_MAX_NAME_CHARACTERS = 60
_FIRST_SEARCH_SECONDS = 86_400.0
"""Most reports are about today; each further search covers twice as much time."""
_MAX_SUGGESTIONS, _MAX_SUGGESTION_EVENTS = 5, 100
_SUGGESTION_SECONDS = (
    MAX_CLOCK_AHEAD_SECONDS + 900.0,
    MAX_CLOCK_AHEAD_SECONDS + 7200.0,
    MAX_CLOCK_AHEAD_SECONDS + _FIRST_SEARCH_SECONDS,
)
"""How far back to search for jobs to suggest, one range after the other."""


class JobRequest(NamedTuple):
    """Name of a subject, and where and when to look for it."""

    name: str
    """ID or name of a job, name or ID of a session, or a PID."""
    kind: JobKind | None = None
    """None: a job, or else a session."""
    nodes: frozenset[int] | None = None
    """Only these nodes; None for all."""
    range: TimeRange = (None, None)
    """Only this time range."""


def find_subject(context: ReportContext, request: JobRequest, now: float) -> ReportSubject:
    """Return the subject with a name; if the request has no kind, jobs are preferred to sessions.

    Args:
        context: Source of the data.
        request: The name, and where and when to look for it.
        now: Epoch seconds.

    Raises:
        RefusedError: Nothing has this name.
    """
    (start, end), name, store = request.range, request.name, context.store
    if start is not None and end is not None and start >= end:
        raise RefusedError(409, "the time range ends before it starts", hint="choose an end after the start")
    if request.kind == "session":
        return _find_session(context, find_session(store.sessions(), name), request, now)
    if request.kind == "process":
        return _find_process_tree(context, request, now)
    reported = [
        event for event in store.job_events(name) if request.nodes is None or event.node in request.nodes
    ]
    events = [event for event in reported if event.kind == JOB]
    subject = _find_newest_job(context, _find_candidates(context, reported, request), request, now)
    if subject is not None:
        return subject
    named = [session for session in store.sessions() if name in (session.name, session.id)]
    if request.kind is None and named:
        return _find_session(context, find_session(named, name), request, now)
    ids = [job for event in events if event.detail.get("name") == name and (job := job_id(event))]
    if ids:
        return find_subject(context, request._replace(name=ids[-1], kind="job"), now)
    raise _not_found_error(context, request, events, now)


class _JobCandidate(NamedTuple):
    """Processes and events of one job."""

    processes: list[StoredProcess]
    events: list[StoredEvent]
    """Events that report the job."""
    ends: list[StoredEvent]

    @property
    def recency(self) -> tuple[float, float]:
        """When it was last reported, and when it started."""
        last = [math.inf if process.ended is None else process.ended for process in self.processes]
        first = [process.first_seen for process in self.processes]
        reported = [event.time for event in self.events]
        return max([*last, *reported]), max([*first, *reported])


def _find_candidates(
    context: ReportContext, events: Iterable[StoredEvent], request: JobRequest
) -> dict[str, _JobCandidate]:
    """Return the jobs that match a name, with or without the scheduler's name, or as a task of an array."""
    found: dict[str, _JobCandidate] = {}
    for event in events:
        if event.kind == JOB and event.node is not None and (name := _matching_job(event, request.name)):
            found.setdefault(name, _JobCandidate([], [], [])).events.append(event)
    for event in events:
        if event.kind == JOB_END and (ended := found.get(job_id(event) or "")) is not None:
            ended.ends.append(event)
    names = {name for name in context.store.job_names() if _matches_name(name, request.name)} | found.keys()
    query = Query(*ALL_TIME, nodes=request.nodes, jobs=frozenset(names), deadline=context.deadline)
    for process in context.store.processes(query) if names else ():
        found.setdefault(stored_owner(process)["job"], _JobCandidate([], [], [])).processes.append(process)
    return found


def _matches_name(job: str, name: str) -> bool:
    return job == name or job.partition(":")[2] == name


def _matching_job(event: StoredEvent, name: str) -> str | None:
    """Return the job that an event reports, if it matches the name."""
    job = job_id(event)
    is_own = job is not None and (_matches_name(job, name) or event.detail.get("array") == name)
    return job if is_own else None


def _find_newest_job(
    context: ReportContext, found: Mapping[str, _JobCandidate], request: JobRequest, now: float
) -> ReportSubject | None:
    """Return the job with exactly this name, or else the one that was reported last."""
    ordered = sorted(found, key=lambda job: (job == request.name, found[job].recency), reverse=True)
    for job in ordered:
        if (subject := _find_job(context, job, found[job], request, now)) is not None:
            return subject
    return None


def _find_job(
    context: ReportContext, name: str, found: _JobCandidate, request: JobRequest, now: float
) -> ReportSubject | None:
    """Return a job; None when only its end is known.

    If several users have a job with this name, it is the newest one in the requested time range.
    """
    events = _read_grant_events(context, found, now)
    same_name = SameNameJobs(found.processes, found.events)
    refused: RefusedError | None = None
    for user in same_name.users:
        own, reported = same_name.of(user)
        granted = find_grants([event for event in events if _may_belong_to(event, user)], name, now)
        if not own and not granted:
            continue
        subject = ReportSubject("job", name, job=_description(reported), processes=own, grants=granted)
        try:
            subject = _with_times(context, subject, request.range, now)
        except RefusedError as error:
            refused = refused or error
            continue
        others = same_name.others(user, (subject.start, subject.end), context.node_names)
        return subject._replace(data_gaps=[*subject.data_gaps, *others])
    if refused is not None:
        raise refused
    return None


def _read_grant_events(context: ReportContext, found: _JobCandidate, now: float) -> list[StoredEvent]:
    """Return the events that determine the grants of a job, in the order of time."""
    if not found.events:
        return []
    nodes = frozenset(event.node for event in found.events if event.node is not None)
    ends = [event for event in found.ends if event.node in nodes]
    first = min(event.time for event in found.events)
    query = Query(
        first,
        now + MAX_CLOCK_AHEAD_SECONDS,
        nodes=nodes,
        kinds=frozenset({AGENT_STARTED}),
        deadline=context.deadline,
    )
    return sorted([*context.store.events(query), *ends, *found.events], key=lambda event: event.time)


def _may_belong_to(event: StoredEvent, user: JobUser) -> bool:
    """Return whether an event may be about a user's job; only events that report a job name the user."""
    return event.kind != JOB or not read_user(event.detail).differs(user)


def _description(events: Sequence[StoredEvent]) -> dict[str, Any]:
    """Return the newest description of a job by its scheduler."""
    found: dict[str, Any] = {}
    for event in sorted(events, key=lambda event: event.time):
        if (job := read_job(event)) is not None:
            found |= {name: value for name, value in job._asdict().items() if value is not None}
    return found


def _find_process_tree(context: ReportContext, request: JobRequest, now: float) -> ReportSubject:
    """Return a process and its descendants; if several had the PID, the newest."""
    pid = request.name
    if not pid.isdecimal() or len(pid) > 18:
        raise RefusedError(404, f"there is no process {pid[:40]!r}", hint="use a number, such as 1234")
    top = _find_newest_process(context, int(pid), request, now)
    last = now + MAX_CLOCK_AHEAD_SECONDS if top.ended is None else top.ended
    alive = context.store.processes(
        Query(top.first_seen, last, nodes=frozenset({top.node}), deadline=context.deadline)
    )
    index = ProcessIndex(alive)
    own = [
        one for one in alive if any(process_key(above) == process_key(top) for above in index.lineage(one))
    ]
    name = f"{context.node_names.get(top.node, top.node)}:{top.pid}"
    return _with_times(context, ReportSubject("process", name, processes=own or [top]), request.range, now)


def _find_newest_process(context: ReportContext, pid: int, request: JobRequest, now: float) -> StoredProcess:
    for start, end in _search_ranges(context, request.range, now):
        query = Query(start, end, nodes=request.nodes, pids=frozenset({pid}), deadline=context.deadline)
        found = context.store.processes(query)
        nodes = {process.node for process in found}
        if len(nodes) > 1:
            names = sorted((context.node_names.get(node, str(node)) for node in nodes), key=natural_key)
            raise RefusedError(
                409,
                f"PID {pid} was on several nodes: {', '.join(names[:5])}",
                hint=f"select a node, such as {names[0]}",
            )
        if found:
            return max(found, key=lambda process: process.first_seen)
    raise RefusedError(
        404,
        f"there is no process with PID {pid}",
        hint="check the PID and the time range; only processes on GPUs and their child processes are recorded",
    )


def _search_ranges(context: ReportContext, wanted: TimeRange, now: float) -> Iterator[tuple[float, float]]:
    """Yield the time ranges to search, newest first."""
    start, end = wanted
    last, length = now + MAX_CLOCK_AHEAD_SECONDS if end is None else end, _FIRST_SEARCH_SECONDS
    if start is None:
        known = [node.first_seen for node in context.store.nodes().values()]
        oldest = min(known, default=now) - _FIRST_SEARCH_SECONDS
    else:
        oldest, length = start, max(length, last - start)
    while last > oldest:
        yield max(oldest, last - length), last
        last, length = last - length, 2 * length


def _find_session(context: ReportContext, session: Session, request: JobRequest, now: float) -> ReportSubject:
    end = session.end
    if end is None:
        end = session.interruptions[-1].start if session.state == "interrupted" else now
    start, until = _clip(session.name, (session.start, max(session.start, end)), request.range)
    present = {
        number
        for number, node in context.store.nodes().items()
        if node.first_seen <= until and (request.nodes is None or number in request.nodes)
    }
    chosen = select_gpus(context.store.gpus(), session.nodes, session.gpus)
    return ReportSubject(
        "session",
        session.name,
        start,
        until,
        "running" if session.is_active else "ended",
        session.is_active and until == end,
        gpus=[gpu for gpu in chosen if gpu.node in present],
    )


def _with_times(
    context: ReportContext, subject: ReportSubject, wanted: TimeRange, now: float
) -> ReportSubject:
    """Return a job or a process with its start, end and state, clipped to the requested time range."""
    found = find_ends(context, subject, now)
    subject, names = found.subject, context.node_names
    spans: tuple[tuple[float, float | None], ...] = (
        *((grant.start, grant.end) for grant in subject.grants),
        *((process.first_seen, process.ended) for process in subject.processes),
    )
    ends = [found.last if end is None else end for _, end in spans]
    start = min(start for start, _ in spans)
    end = max(start, *ends)
    begin, until = _clip(subject.name, (start, end), wanted)
    lost = {str(names.get(node, node)): time for node, time in found.lost.items()}
    return subject._replace(
        start=begin,
        end=until,
        state="running" if found.is_open else "lost" if found.lost else "ended",
        is_now=found.is_open and until == end,
        data_gaps=[
            f"{node} last reported at {time_text.format_iso(lost[node])}; it is unknown whether the {subject.kind} still runs there"
            for node in sorted(lost, key=natural_key)
        ],
    )


def _clip(name: str, span: tuple[float, float], wanted: TimeRange) -> tuple[float, float]:
    """Return the part of a time span within the requested time range.

    Raises:
        RefusedError: The span lies outside the range.
    """
    start, end = span
    begin = start if wanted[0] is None else max(start, wanted[0])
    until = end if wanted[1] is None else min(end, wanted[1])
    if begin > until or (begin == until and start < end):
        raise RefusedError(
            404,
            f"{printable(name, _MAX_NAME_CHARACTERS)} did not run in this time range",
            hint=f"choose a time range in which it ran: {time_text.format_iso(start)} to {time_text.format_iso(end)}",
        )
    return begin, until


def _not_found_error(
    context: ReportContext, request: JobRequest, events: Iterable[StoredEvent], now: float
) -> RefusedError:
    """Return the error that there is no such job, with the newest jobs as suggestions."""
    name = request.name
    arrays = {text_or_none(event.detail.get("array")) or "" for event in events}
    tasks = sorted((array for array in arrays if array.startswith(f"{name}_")), key=natural_key)
    end = now + MAX_CLOCK_AHEAD_SECONDS if request.range[1] is None else request.range[1]
    newest: dict[str, float] = {}
    for length in _SUGGESTION_SECONDS:
        newest = _read_job_times(context, end - length, end)
        if len(newest) >= _MAX_SUGGESTIONS:
            break
    names = sorted(newest, key=lambda job: newest[job], reverse=True)[:_MAX_SUGGESTIONS]
    hint = f"use one of the newest jobs: {_join_names(names)}"
    if tasks:
        hint = f"select a task of this job array: {_join_names(tasks[:_MAX_SUGGESTIONS])}"
    elif not names:
        hint = "list sessions with: gpulse session list (no process or scheduler has reported a job recently)"
    what = "job" if request.kind == "job" else "job or session"
    return RefusedError(404, f"there is no {what} {name[:100]!r}", hint=hint)


def _read_job_times(context: ReportContext, start: float, end: float) -> dict[str, float]:
    """Return the jobs of a time range, with the time of each job's last start."""
    found: dict[str, float] = {}
    for process in context.store.processes(Query(start, end, deadline=context.deadline)):
        if name := text_or_none(stored_owner(process).get("job")):
            found[name] = max(found.get(name, 0.0), process.first_seen)
    query = Query(
        start,
        end,
        nodes=frozenset(context.node_names),
        kinds=frozenset({JOB}),
        limit=_MAX_SUGGESTION_EVENTS,
        deadline=context.deadline,
    )
    for event in context.store.events(query):
        if name := job_id(event):
            found[name] = max(found.get(name, 0.0), event.time)
    return found


def _join_names(names: Iterable[str]) -> str:
    return ", ".join(printable(name, _MAX_NAME_CHARACTERS) for name in names)
