"""Resolve the name that a report is asked for: a scheduler's job, a session, or a process and its descendants."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from gpulse.errors import RefusedError
from gpulse.model import iso_time
from gpulse.model.job import JOB, JOB_END
from gpulse.model.natural import natural_key
from gpulse.model.session import Session, find_session
from gpulse.reports import grants
from gpulse.reports.context import Context
from gpulse.reports.job_ends import AHEAD_SECONDS, find_ends
from gpulse.reports.process_index import ProcessIndex, key_of, owner_of, text
from gpulse.reports.same_name_jobs import SameNameJobs, User, user_of
from gpulse.reports.subject import JobKind, Subject, TimeRange
from gpulse.store.gpu_choice import choose_gpus
from gpulse.store.store import ALWAYS, Query, StoredEvent, StoredProcess

_FIRST_SEARCH_SECONDS = 86_400.0
"""Most reports are about today; each further search goes back twice as far."""
_MAX_SUGGESTIONS, _MAX_SUGGESTION_EVENTS = 5, 100
_SUGGESTION_SECONDS = (
    AHEAD_SECONDS + 900.0,
    AHEAD_SECONDS + 7200.0,
    AHEAD_SECONDS + _FIRST_SEARCH_SECONDS,
)
"""How far back to search for jobs that may have been meant, one after the other."""


class JobRequest(NamedTuple):
    """The name of a subject, and where and when it is looked for."""

    name: str
    """A job's id or name, a session's name or id, or a pid."""
    kind: JobKind | None = None
    """None: a job, or else a session."""
    nodes: frozenset[int] | None = None
    """Only there; None for all nodes."""
    range: TimeRange = (None, None)
    """Only what was then."""


def find_subject(context: Context, request: JobRequest, now: float) -> Subject:
    """Return what a name means; a job before a session when the request does not say which.

    Args:
        context: What the answer is computed from.
        request: The name, and where and when it is looked for.
        now: Epoch seconds.

    Raises:
        RefusedError: Nothing has that name.
    """
    (start, end), name, store = request.range, request.name, context.store
    if start is not None and end is not None and start >= end:
        raise RefusedError(400, "that time ends before it begins", hint="the end has to be after the start")
    if request.kind == "session":
        return _session(context, find_session(store.sessions(), name), request, now)
    if request.kind == "process":
        return _process_tree(context, request, now)
    heard = [
        event for event in store.job_events(name) if request.nodes is None or event.node in request.nodes
    ]
    events = [event for event in heard if event.kind == JOB]
    subject = _newest_job(context, _candidates(context, heard, request), request, now)
    if subject is not None:
        return subject
    named = [session for session in store.sessions() if name in (session.name, session.id)]
    if request.kind is None and named:
        return _session(context, find_session(named, name), request, now)
    called = [job for event in events if event.detail.get("name") == name and (job := grants.job_of(event))]
    if called:
        return find_subject(context, request._replace(name=called[-1], kind="job"), now)
    raise _unknown(context, request, events, now)


class _Candidate(NamedTuple):
    """What is known about one job."""

    processes: list[StoredProcess]
    events: list[StoredEvent]
    """Those that report it."""
    ends: list[StoredEvent]

    @property
    def recency(self) -> tuple[float, float]:
        """When it was last heard, and when it began: the later the newer."""
        last = [math.inf if process.ended is None else process.ended for process in self.processes]
        first = [process.first_seen for process in self.processes]
        reported = [event.time for event in self.events]
        return max([*last, *reported]), max([*first, *reported])


def _candidates(
    context: Context, events: Iterable[StoredEvent], request: JobRequest
) -> dict[str, _Candidate]:
    """Return the jobs that a name can mean: with its scheduler's name or without, or as a task of an array."""
    found: dict[str, _Candidate] = {}
    for event in events:
        if event.kind == JOB and event.node is not None and (name := _job_meant(event, request.name)):
            found.setdefault(name, _Candidate([], [], [])).events.append(event)
    for event in events:
        if event.kind == JOB_END and (ended := found.get(grants.job_of(event) or "")) is not None:
            ended.ends.append(event)
    names = {name for name in context.store.job_names() if _is_meant(name, request.name)} | found.keys()
    query = Query(*ALWAYS, nodes=request.nodes, jobs=frozenset(names), deadline=context.deadline)
    for process in context.store.processes(query) if names else ():
        found.setdefault(owner_of(process)["job"], _Candidate([], [], [])).processes.append(process)
    return found


def _is_meant(job: str, name: str) -> bool:
    return job == name or job.partition(":")[2] == name


def _job_meant(event: StoredEvent, name: str) -> str | None:
    """Return the job that an event reports, if the name means it."""
    job = grants.job_of(event)
    is_own = job is not None and (_is_meant(job, name) or event.detail.get("array") == name)
    return job if is_own else None


def _newest_job(
    context: Context, found: Mapping[str, _Candidate], request: JobRequest, now: float
) -> Subject | None:
    """Return the job with exactly that name, or else the one that was heard last."""
    ordered = sorted(found, key=lambda job: (job == request.name, found[job].recency), reverse=True)
    for job in ordered:
        if (subject := _job(context, job, found[job], request, now)) is not None:
            return subject
    return None


def _job(context: Context, name: str, found: _Candidate, request: JobRequest, now: float) -> Subject | None:
    """Return a job; None when only its end is known.

    Of jobs of several users with that name, it is the newest that was there in the time asked for.
    """
    events = _grant_events(context, found, now)
    same_name = SameNameJobs(found.processes, found.events)
    refused: RefusedError | None = None
    for user in same_name.users:
        own, reported = same_name.of(user)
        granted = grants.find_grants([event for event in events if _may_be_of(event, user)], name, now)
        if not own and not granted:
            continue
        subject = Subject("job", name, job=_description(reported), processes=own, grants=granted)
        try:
            subject = _timed(context, subject, request.range, now)
        except RefusedError as error:
            refused = refused or error
            continue
        others = same_name.others(user, (subject.start, subject.end), context.node_names)
        return subject._replace(data_gaps=[*subject.data_gaps, *others])
    if refused is not None:
        raise refused
    return None


def _grant_events(context: Context, found: _Candidate, now: float) -> list[StoredEvent]:
    """Return the events that grants of a job are made from, in the order of time."""
    if not found.events:
        return []
    nodes = frozenset(event.node for event in found.events if event.node is not None)
    ends = [event for event in found.ends if event.node in nodes]
    first = min(event.time for event in found.events)
    query = Query(
        first, now + AHEAD_SECONDS, nodes=nodes, kinds=frozenset({grants.STARTED}), deadline=context.deadline
    )
    return sorted([*context.store.events(query), *ends, *found.events], key=lambda event: event.time)


def _may_be_of(event: StoredEvent, user: User) -> bool:
    """Return whether an event may be about a user's job; only those that report a job name the user."""
    return event.kind != JOB or not user_of(event.detail).differs(user)


def _description(events: Sequence[StoredEvent]) -> dict[str, Any]:
    """Return the newest that a scheduler says about a job."""
    found: dict[str, Any] = {}
    for event in sorted(events, key=lambda event: event.time):
        if (job := grants.read_job(event)) is not None:
            found |= {name: value for name, value in job._asdict().items() if value is not None}
    return found


def _process_tree(context: Context, request: JobRequest, now: float) -> Subject:
    """Return a process and its descendants; of several that had the pid, the newest."""
    word = request.name
    if not word.isdecimal() or len(word) > 18:
        raise RefusedError(404, f"there is no process {word[:40]!r}", hint="a pid is a number, such as 1234")
    top = _newest_process(context, int(word), request, now)
    last = now + AHEAD_SECONDS if top.ended is None else top.ended
    alive = context.store.processes(
        Query(top.first_seen, last, nodes=frozenset({top.node}), deadline=context.deadline)
    )
    index = ProcessIndex(alive)
    own = [one for one in alive if any(key_of(above) == key_of(top) for above in index.lineage(one))]
    name = f"{context.node_names.get(top.node, top.node)}:{top.pid}"
    return _timed(context, Subject("process", name, processes=own or [top]), request.range, now)


def _newest_process(context: Context, pid: int, request: JobRequest, now: float) -> StoredProcess:
    for start, end in _search_ranges(context, request.range, now):
        query = Query(start, end, nodes=request.nodes, pids=frozenset({pid}), deadline=context.deadline)
        found = context.store.processes(query)
        nodes = {process.node for process in found}
        if len(nodes) > 1:
            names = sorted((context.node_names.get(node, str(node)) for node in nodes), key=natural_key)
            raise RefusedError(
                409,
                f"pid {pid} was on {', '.join(names[:5])}",
                hint=f"say which node is meant, such as {names[0]}",
            )
        if found:
            return max(found, key=lambda process: process.first_seen)
    raise RefusedError(
        404,
        f"no process with the pid {pid} is known",
        hint="only processes on GPUs and their children are",
    )


def _search_ranges(context: Context, wanted: TimeRange, now: float) -> Iterator[tuple[float, float]]:
    """Yield time ranges to search, the newest first."""
    start, end = wanted
    last, length = now + AHEAD_SECONDS if end is None else end, _FIRST_SEARCH_SECONDS
    if start is None:
        known = [node.first_seen for node in context.store.nodes().values()]
        oldest = min(known, default=now) - _FIRST_SEARCH_SECONDS
    else:
        oldest, length = start, max(length, last - start)
    while last > oldest:
        yield max(oldest, last - length), last
        last, length = last - length, 2 * length


def _session(context: Context, session: Session, request: JobRequest, now: float) -> Subject:
    end = session.end
    if end is None:
        end = session.interruptions[-1].start if session.state == "interrupted" else now
    start, until = _clip(session.name, (session.start, max(session.start, end)), request.range)
    present = {
        number
        for number, node in context.store.nodes().items()
        if node.first_seen <= until and (request.nodes is None or number in request.nodes)
    }
    chosen = choose_gpus(context.store.gpus(), session.nodes, session.gpus)
    return Subject(
        "session",
        session.name,
        start,
        until,
        "running" if session.is_active else "ended",
        session.is_active and until == end,
        gpus=[gpu for gpu in chosen if gpu.node in present],
    )


def _timed(context: Context, subject: Subject, wanted: TimeRange, now: float) -> Subject:
    """Return a job or a process with its start, end and state, cut to the time that was asked for."""
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
    lost = {str(names.get(node, node)): heard for node, heard in found.lost.items()}
    return subject._replace(
        start=begin,
        end=until,
        state="running" if found.is_open else "lost" if found.lost else "ended",
        is_now=found.is_open and until == end,
        data_gaps=[
            f"{node} was last heard at {iso_time.iso(lost[node])}; whether it still runs there is unknown"
            for node in sorted(lost, key=natural_key)
        ],
    )


def _clip(name: str, span: tuple[float, float], wanted: TimeRange) -> tuple[float, float]:
    """Return the part of a time span that was asked for.

    Raises:
        RefusedError: There is none.
    """
    start, end = span
    begin = start if wanted[0] is None else max(start, wanted[0])
    until = end if wanted[1] is None else min(end, wanted[1])
    if begin > until or (begin == until and start < end):
        raise RefusedError(
            404,
            f"{_printable(name)} was not there in that time",
            hint=f"it was there from {iso_time.iso(start)} to {iso_time.iso(end)}",
        )
    return begin, until


def _unknown(
    context: Context, request: JobRequest, events: Iterable[StoredEvent], now: float
) -> RefusedError:
    """Return the error that there is no such job, with the newest jobs as suggestions."""
    name = request.name
    arrays = {text(event.detail.get("array")) or "" for event in events}
    tasks = sorted((array for array in arrays if array.startswith(f"{name}_")), key=natural_key)
    end = now + AHEAD_SECONDS if request.range[1] is None else request.range[1]
    newest: dict[str, float] = {}
    for length in _SUGGESTION_SECONDS:
        newest = _job_times(context, end - length, end)
        if len(newest) >= _MAX_SUGGESTIONS:
            break
    names = sorted(newest, key=lambda job: newest[job], reverse=True)[:_MAX_SUGGESTIONS]
    hint = f"the newest jobs are: {', '.join(map(_printable, names))}"
    if tasks:
        hint = f"it is an array, whose tasks are: {', '.join(map(_printable, tasks[:_MAX_SUGGESTIONS]))}"
    elif not names:
        hint = "no process or scheduler has reported a job lately; /profiling/sessions lists sessions"
    what = "job" if request.kind == "job" else "job or session"
    return RefusedError(404, f"there is no {what} {name[:100]!r}", hint=hint)


def _job_times(context: Context, start: float, end: float) -> dict[str, float]:
    """Return the jobs of a time range, and when each was last reported to begin."""
    found: dict[str, float] = {}
    for process in context.store.processes(Query(start, end, deadline=context.deadline)):
        if name := text(owner_of(process).get("job")):
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
        if name := grants.job_of(event):
            found[name] = max(found.get(name, 0.0), event.time)
    return found


def _printable(name: str) -> str:
    return name[:60] if name.isprintable() else ascii(name[:60])
