"""What a word means that people ask a report for: a scheduler's job, a session, or a process with all below it."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from gpulse.errors import RefusedError
from gpulse.model import iso_time
from gpulse.model.job import JOB, JOB_END
from gpulse.model.natural import natural_key
from gpulse.model.session import Session, find_session
from gpulse.reports import grants
from gpulse.reports.job_ends import AHEAD_SECONDS, Lasting
from gpulse.reports.owners import People, owner_of, text
from gpulse.reports.same_name_jobs import Namesakes, Who, someone
from gpulse.reports.subject import JobKind, Subject, Window, key_of
from gpulse.store.store import ALWAYS, Query, Store, StoredEvent, StoredGpu, StoredProcess

FIRST_SECONDS = 86_400.0
"""What people ask for is mostly of today; each further look goes back twice as far."""
_NEWEST, _MOST_TOLD = 5, 100
_LOOKS_BACK = (AHEAD_SECONDS + 900.0, AHEAD_SECONDS + 7200.0, AHEAD_SECONDS + FIRST_SECONDS)
"""How far to look back for jobs that somebody may have meant."""

Choose = Callable[[Sequence[str], Sequence[str]], list[StoredGpu]]


class _Job(NamedTuple):
    """What was found of one job."""

    processes: list[StoredProcess]
    events: list[StoredEvent]
    ends: list[StoredEvent]

    @property
    def heard(self) -> tuple[float, float]:
        """When it was heard of last, and when it began: the later the newer."""
        last = [math.inf if process.ended is None else process.ended for process in self.processes]
        first = [process.first_seen for process in self.processes]
        told = [event.time for event in self.events]
        return max([*last, *told]), max([*first, *told])

    @property
    def began(self) -> float:
        """When it was heard of first."""
        known = [process.first_seen for process in self.processes]
        return min([*known, *(event.time for event in self.events)])


class Finder:
    """A store, asked what a word means."""

    def __init__(self, store: Store, choose: Choose, interval_seconds: Callable[[], float]) -> None:
        """Prepare to look.

        Args:
            store: Where everything is.
            choose: Finds GPUs by nodes and words such as `node:3`.
            interval_seconds: How often agents sample.
        """
        self._store = store
        self._choose = choose
        self._lasting = Lasting(store, interval_seconds)

    def find(
        self, word: str, kind: JobKind | None, *, nodes: Collection[int] | None, window: Window, now: float
    ) -> Subject:
        """What a word means; a job before a session when nobody says which.

        Args:
            word: A job's number or name, a session's name or id, a pid.
            kind: Which of them it is, if somebody says so.
            nodes: Only there.
            window: Only what was from then on, and until then.
            now: Epoch seconds.

        Raises:
            RefusedError: There is nothing like that.
        """
        start, end = window
        if start is not None and end is not None and start >= end:
            raise RefusedError(
                400, "that time ends before it begins", hint="the end has to be after the start"
            )
        if kind == "session":
            return self._session(find_session(self._store.sessions(), word), nodes, window, now)
        if kind == "process":
            return self._tree(word, nodes, window, now)
        events = [event for event in self._store.job_events(word) if nodes is None or event.node in nodes]
        told = [event for event in events if event.kind == JOB]
        ends = [event for event in events if event.kind == JOB_END]
        subject = self._newest(self._jobs(word, told, ends, nodes), word, window, now)
        if subject is not None:
            return subject
        named = [session for session in self._store.sessions() if word in (session.name, session.id)]
        if kind is None and named:
            return self._session(find_session(named, word), nodes, window, now)
        called = [
            name for event in told if event.detail.get("name") == word and (name := grants.job_of(event))
        ]
        if called:
            return self.find(called[-1], "job", nodes=nodes, window=window, now=now)
        raise self._unknown(word, kind, told, window, now)

    def _newest(self, found: Mapping[str, _Job], word: str, window: Window, now: float) -> Subject | None:
        """Of the jobs that a word can mean the one of that very name, or else the one that was heard of last."""
        for name in sorted(found, key=lambda name: (name == word, found[name].heard), reverse=True):
            if (subject := self._job(name, found[name], window, now)) is not None:
                return subject
        return None

    def _jobs(
        self,
        word: str,
        told: Iterable[StoredEvent],
        ends: Iterable[StoredEvent],
        nodes: Collection[int] | None,
    ) -> dict[str, _Job]:
        """The jobs that a word can mean: with its scheduler's name or without, or as a task of an array."""
        found: dict[str, _Job] = {}
        for event in told:
            if event.node is not None and (name := _named(event, word)) is not None:
                found.setdefault(name, _Job([], [], [])).events.append(event)
        for event in ends:
            if (ended := found.get(grants.job_of(event) or "")) is not None:
                ended.ends.append(event)
        names = {name for name in self._store.job_names() if _is_meant(name, word)}
        self._add_processes(found, names | found.keys(), nodes)
        return found

    def _add_processes(
        self, found: dict[str, _Job], names: Collection[str], nodes: Collection[int] | None
    ) -> None:
        """Take the processes of some jobs in."""
        if not names:
            return
        query = Query(*ALWAYS, nodes=None if nodes is None else frozenset(nodes), jobs=frozenset(names))
        for process in self._store.processes(query):
            found.setdefault(owner_of(process)["job"], _Job([], [], [])).processes.append(process)

    def _windows(self, window: Window, now: float) -> Iterator[tuple[float, float]]:
        """Stretches of time to look through, the newest first."""
        start, end = window
        known = [node.first_seen for node in self._store.nodes().values()]
        oldest = min(known, default=now) - FIRST_SECONDS if start is None else start
        last, length = now + AHEAD_SECONDS if end is None else end, FIRST_SECONDS
        if start is not None:
            length = max(length, last - start)
        while last > oldest:
            yield max(oldest, last - length), last
            last, length = last - length, 2 * length

    def _job(self, name: str, found: _Job, window: Window, now: float) -> Subject | None:
        """A job; None when nothing but its end is known.

        Of several users' with that name the newest that was there in the time asked for.
        """
        events = self._told(found, now)
        namesakes = Namesakes(name, found.processes, found.events)
        refused: RefusedError | None = None
        for user in namesakes.users:
            own, told = namesakes.of(user)
            given = grants.grants([event for event in events if _is_of(event, user)], name, now)
            if not own and not given:
                continue
            subject = Subject("job", name, told=_described(told), processes=own, grants=given)
            try:
                subject = self._timed(subject, window, now)
            except RefusedError as error:
                refused = refused or error
                continue
            others = namesakes.others(user, (subject.start, subject.end), self._names())
            return subject._replace(untold=[*subject.untold, *others])
        if refused is not None:
            raise refused
        return None

    def _told(self, found: _Job, now: float) -> list[StoredEvent]:
        """What grants of a job are made from, in the order of time."""
        jobs = found.events
        if not jobs:
            return []
        nodes = {event.node for event in jobs if event.node is not None}
        ends = [event for event in found.ends if event.node in nodes]
        first = min(event.time for event in jobs)
        starts = self._store.events(
            Query(first, now + AHEAD_SECONDS, nodes=frozenset(nodes), kinds=frozenset({grants.STARTED}))
        )
        return sorted([*starts, *ends, *jobs], key=lambda event: event.time)

    def _names(self) -> dict[int, str]:
        return {number: node.name for number, node in self._store.nodes().items()}

    def _tree(self, word: str, nodes: Collection[int] | None, window: Window, now: float) -> Subject:
        """A process and all that descend from it; of several that had the pid the newest."""
        if not word.isdecimal() or len(word) > 18:
            raise RefusedError(400, f"{word[:40]!r} is no pid", hint="a number, such as 1234")
        pid, top = int(word), None
        for start, end in self._windows(window, now):
            found = self._store.processes(
                Query(start, end, nodes=None if nodes is None else frozenset(nodes), pids=frozenset({pid}))
            )
            if len({process.node for process in found}) > 1:
                names = self._store.nodes()
                shown = sorted(
                    {names[process.node].name for process in found if process.node in names}, key=natural_key
                )
                raise RefusedError(
                    409,
                    f"pid {pid} was on {', '.join(shown[:5])}",
                    hint=f"say which node is meant, such as {shown[0]}",
                )
            if found:
                top = max(found, key=lambda process: process.first_seen)
                break
        if top is None:
            raise RefusedError(
                404,
                f"no process with the pid {pid} is known",
                hint="only those on GPUs and their children are",
            )
        last = now + AHEAD_SECONDS if top.ended is None else top.ended
        alive = self._store.processes(Query(top.first_seen, last, nodes=frozenset({top.node})))
        people = People(alive)
        own = [one for one in alive if any(key_of(above) == key_of(top) for above in people.line(one))]
        name = f"{self._store.nodes()[top.node].name}:{pid}"
        return self._timed(Subject("process", name, processes=own or [top]), window, now)

    def _unknown(
        self, word: str, kind: JobKind | None, told: Iterable[StoredEvent], window: Window, now: float
    ) -> RefusedError:
        """There is no such job, and which are the newest that there are."""
        arrays = {text(event.detail.get("array")) or "" for event in told}
        tasks = sorted((array for array in arrays if array.startswith(f"{word}_")), key=natural_key)
        end = now + AHEAD_SECONDS if window[1] is None else window[1]
        newest: dict[str, float] = {}
        for length in _LOOKS_BACK:
            newest = self._newest_names(end - length, end)
            if len(newest) >= _NEWEST:
                break
        names = sorted(newest, key=lambda name: newest[name], reverse=True)[:_NEWEST]
        hint = f"the newest jobs are: {', '.join(map(_shown, names))}"
        if tasks:
            hint = f"it is an array, whose tasks are: {', '.join(map(_shown, tasks[:_NEWEST]))}"
        elif not names:
            hint = "no process or scheduler has told of a job of late; /profiling/sessions lists sessions"
        what = "job" if kind == "job" else "job or session"
        return RefusedError(404, f"there is no {what} {word[:100]!r}", hint=hint)

    def _newest_names(self, start: float, end: float) -> dict[str, float]:
        """Jobs of some time, and when they were heard of first."""
        found: dict[str, float] = {}
        for process in self._store.processes(Query(start, end)):
            if name := text(owner_of(process).get("job")):
                found[name] = max(found.get(name, 0.0), process.first_seen)
        nodes = frozenset(self._store.nodes())
        query = Query(start, end, nodes=nodes, kinds=frozenset({JOB}), limit=_MOST_TOLD)
        for event in self._store.events(query):
            if name := grants.job_of(event):
                found[name] = max(found.get(name, 0.0), event.time)
        return found

    def _session(
        self, session: Session, nodes: Collection[int] | None, window: Window, now: float
    ) -> Subject:
        end = session.end
        if end is None:
            end = session.interruptions[-1].start if session.state == "interrupted" else now
        start, until = _cut(session.name, (session.start, max(session.start, end)), window)
        there = {
            number
            for number, node in self._store.nodes().items()
            if node.first_seen <= until and (nodes is None or number in nodes)
        }
        return Subject(
            "session",
            session.name,
            start,
            until,
            "running" if session.is_active else "ended",
            session.is_active and until == end,
            gpus=[gpu for gpu in self._choose(session.nodes, session.gpus) if gpu.node in there],
        )

    def _timed(self, subject: Subject, window: Window, now: float) -> Subject:
        """A job or a process with the time it takes, cut to what was asked for."""
        found = self._lasting.ends(subject, now)
        subject, names = found.subject, self._names()
        some: tuple[tuple[float, float | None], ...] = (
            *((grant.start, grant.end) for grant in subject.grants),
            *((process.first_seen, process.ended) for process in subject.processes),
        )
        ends = [found.last if end is None else end for _, end in some]
        start = min(start for start, _ in some)
        end = max(start, *ends)
        begin, until = _cut(subject.name, (start, end), window)
        untold = [
            f"whether it still runs on {names.get(node, node)} is not known: nothing was heard of that since {iso_time.iso(heard)}"
            for node, heard in sorted(
                found.lost.items(), key=lambda lost: natural_key(str(names.get(lost[0], lost[0])))
            )
        ]
        return subject._replace(
            start=begin,
            end=until,
            state="running" if found.is_open else "lost" if found.lost else "ended",
            is_now=found.is_open and until == end,
            untold=untold,
        )


def _shown(name: str) -> str:
    """A name that somebody chose, harmless and short."""
    return name[:60] if name.isprintable() else ascii(name[:60])


def _is_meant(name: str, word: str) -> bool:
    return name == word or name.partition(":")[2] == word


def _named(event: StoredEvent, word: str) -> str | None:
    """The job that an event tells of, if the word means it."""
    name = grants.job_of(event)
    is_own = name is not None and (_is_meant(name, word) or event.detail.get("array") == word)
    return name if is_own else None


def _is_of(event: StoredEvent, user: Who) -> bool:
    """Whether an event may be about a user's job; only those that tell of a job say whose it is."""
    return event.kind != JOB or not someone(event.detail).is_other(user)


def _described(events: Sequence[StoredEvent]) -> dict[str, Any]:
    """What a scheduler says of a job, the newest of it."""
    told: dict[str, Any] = {}
    for event in sorted(events, key=lambda event: event.time):
        if (job := grants.read_job(event)) is not None:
            told |= {name: value for name, value in job._asdict().items() if value is not None}
    return told


def _cut(name: str, span: tuple[float, float], window: Window) -> tuple[float, float]:
    """The part of a stretch of time that was asked for.

    Raises:
        RefusedError: There is none.
    """
    start, end = span
    begin = start if window[0] is None else max(start, window[0])
    until = end if window[1] is None else min(end, window[1])
    if begin > until or (begin == until and start < end):
        raise RefusedError(
            404,
            f"{_shown(name)} was not there in that time",
            hint=f"it was there from {iso_time.iso(start)} to {iso_time.iso(end)}",
        )
    return begin, until
