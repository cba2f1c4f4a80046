"""What a word means that people ask a report for: a scheduler's job, a session, or a process with all below it."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from gpulse.cluster.api.interface import JobKind, RefusedError
from gpulse.cluster.head import describe
from gpulse.cluster.head.past import grants
from gpulse.cluster.head.past.grants import Grant
from gpulse.cluster.head.past.people import People, owner_of, text
from gpulse.cluster.head.past.subject import Subject, Window, key_of
from gpulse.cluster.head.sessions import Sessions
from gpulse.model.job import JOB
from gpulse.model.session import Session
from gpulse.store.base import HeadStore, StoredEvent, StoredGpu, StoredProcess

FIRST_SECONDS = 86_400.0
"""What people ask for is mostly of today; each further look goes back twice as far."""
_NEWEST = 5
_AHEAD_SECONDS = 3600.0
"""A node's clock may be ahead a little."""

Choose = Callable[[Sequence[str], Sequence[str]], list[StoredGpu]]


class _Job(NamedTuple):
    """What was found of one job."""

    processes: list[StoredProcess]
    events: list[StoredEvent]

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

    def __init__(self, store: HeadStore, choose: Choose) -> None:
        """Prepare to look.

        Args:
            store: Where everything is.
            choose: Finds GPUs by nodes and words such as `node:3`.
        """
        self._store = store
        self._choose = choose

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
        if kind == "session":
            return self._session(Sessions(self._store.sessions()).find(word), window, now)
        if kind == "process":
            return self._tree(word, nodes, window, now)
        found = self._jobs(word, nodes, window, now)
        for name in sorted(found, key=lambda name: (name == word, found[name].heard), reverse=True):
            if (subject := self._job(name, found[name], window, now)) is not None:
                return subject
        named = [session for session in self._store.sessions() if word in (session.name, session.id)]
        if kind is None and named:
            return self._session(Sessions(named).find(word), window, now)
        raise self._unknown(word, kind, window, now)

    def _jobs(self, word: str, nodes: Collection[int] | None, window: Window, now: float) -> dict[str, _Job]:
        """The jobs that a word can mean: with its scheduler's name or without, or as a task of an array."""
        found: dict[str, _Job] = {}
        self._add_processes(found, [name for name in self._store.job_names() if _is_meant(name, word)], nodes)
        numbers = list(self._store.nodes()) if nodes is None else list(nodes)
        for start, end in self._windows((None, window[1]), now):
            events = self._store.events(start=start, end=end, kinds={JOB}, nodes=numbers)
            own = [(name, event) for event in events if (name := _named(event, word)) is not None]
            self._add_processes(found, {name for name, _ in own} - found.keys(), nodes)
            for name, event in own:
                found.setdefault(name, _Job([], [])).events.append(event)
            if found and not own and start < min(job.began for job in found.values()):
                break
        return found

    def _add_processes(
        self, found: dict[str, _Job], names: Collection[str], nodes: Collection[int] | None
    ) -> None:
        """Take the processes of some jobs in."""
        for process in self._store.of_jobs(names) if names else ():
            if nodes is None or process.node in nodes:
                found.setdefault(owner_of(process)["job"], _Job([], [])).processes.append(process)

    def _windows(self, window: Window, now: float) -> Iterator[tuple[float, float]]:
        """Stretches of time to look through, the newest first."""
        start, end = window
        known = [node.first_seen for node in self._store.nodes().values()]
        oldest = min(known, default=now) - FIRST_SECONDS if start is None else start
        last, length = now + _AHEAD_SECONDS if end is None else end, FIRST_SECONDS
        if start is not None:
            length = max(length, last - start)
        while last > oldest:
            yield max(oldest, last - length), last
            last, length = last - length, 2 * length

    def _job(self, name: str, found: _Job, window: Window, now: float) -> Subject | None:
        """A job; None when nothing but its end is known."""
        given: list[Grant] = []
        told: Mapping[str, Any] = {}
        if found.events:
            events = self._store.events(
                start=min(event.time for event in found.events),
                end=now + _AHEAD_SECONDS,
                kinds=grants.KINDS,
                nodes={event.node for event in found.events if event.node is not None},
            )
            given = grants.grants(events, name, now)
            for event in sorted(found.events, key=lambda event: event.time):
                job = grants.read_job(event)
                told = told if job is None else {**told, **_known(job._asdict())}
        if not found.processes and not given:
            return None
        subject = Subject("job", name, told=told, processes=found.processes, grants=given)
        return _timed(subject, window, now)

    def _tree(self, word: str, nodes: Collection[int] | None, window: Window, now: float) -> Subject:
        """A process and all that descend from it; of several that had the pid the newest."""
        if not word.isdecimal() or len(word) > 18:
            raise RefusedError(400, f"{word[:40]!r} is no pid", hint="a number, such as 1234")
        pid, top = int(word), None
        for start, end in self._windows(window, now):
            found = self._store.holders({pid}, start=start, end=end, nodes=nodes)
            if len({process.node for process in found}) > 1:
                names = self._store.nodes()
                shown = sorted({names[process.node].name for process in found if process.node in names})
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
        alive = self._store.processes(
            start=top.first_seen,
            end=now + _AHEAD_SECONDS if top.ended is None else top.ended,
            nodes={top.node},
        )
        people = People(alive)
        own = [one for one in alive if any(key_of(above) == key_of(top) for above in people.line(one))]
        name = f"{self._store.nodes()[top.node].name}:{pid}"
        return _timed(Subject("process", name, processes=own or [top]), window, now)

    def _unknown(self, word: str, kind: JobKind | None, window: Window, now: float) -> RefusedError:
        """There is no such job, and which are the newest that there are."""
        start, end = next(iter(self._windows(window, now)), (now - FIRST_SECONDS, now))
        newest: dict[str, float] = {}
        for process in self._store.processes(start=start, end=end):
            if name := text(owner_of(process).get("job")):
                newest[name] = max(newest.get(name, 0.0), process.first_seen)
        tasks: set[str] = set()
        for event in self._store.events(start=start, end=end, kinds={JOB}, nodes=list(self._store.nodes())):
            if name := grants.job_of(event):
                newest[name] = max(newest.get(name, 0.0), event.time)
                if str(event.detail.get("array")).startswith(f"{word}_"):
                    tasks.add(str(event.detail["array"]))
        names = sorted(newest, key=lambda name: newest[name], reverse=True)[:_NEWEST]
        hint = f"the newest jobs are: {', '.join(map(_shown, names))}"
        if tasks:
            hint = f"it is an array, whose tasks are: {', '.join(map(_shown, sorted(tasks)[:_NEWEST]))}"
        elif not names:
            hint = "no process or scheduler has told of a job of late; /profiling/sessions lists sessions"
        what = "job" if kind == "job" else "job or session"
        return RefusedError(404, f"there is no {what} {word[:100]!r}", hint=hint)

    def _session(self, session: Session, window: Window, now: float) -> Subject:
        end = session.end
        if end is None:
            end = session.interruptions[-1].start if session.state == "interrupted" else now
        start = session.start if window[0] is None else max(session.start, window[0])
        return Subject(
            "session",
            session.name,
            start,
            max(start, end if window[1] is None else min(end, window[1])),
            session.is_active,
            gpus=self._choose(session.nodes, session.gpus),
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


def _known(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _timed(subject: Subject, window: Window, now: float) -> Subject:
    """A job or a process with the time it takes, cut to what was asked for."""
    some: tuple[tuple[float, float | None], ...] = (
        *((grant.start, grant.end) for grant in subject.grants),
        *((process.first_seen, process.ended) for process in subject.processes),
    )
    ends = [end for _, end in some if end is not None]
    is_running = len(ends) < len(some)
    start, end = min(start for start, _ in some), now if is_running else max(ends)
    begin = start if window[0] is None else max(start, window[0])
    until = end if window[1] is None else min(end, window[1])
    if begin > until:
        raise RefusedError(
            404,
            f"{_shown(subject.name)} was not there in that time",
            hint=f"it was there from {describe.iso(start)} to {describe.iso(end)}",
        )
    return subject._replace(start=begin, end=until, is_running=is_running, asked=window)
