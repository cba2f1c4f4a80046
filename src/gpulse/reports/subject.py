"""The subject of a report: a job, a session or a process tree, and when it was where."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from gpulse.reports.grants import Grant
from gpulse.reports.process_index import ProcessKey, key_of
from gpulse.store.store import StoredGpu, StoredProcess

JobState = Literal["running", "ended", "lost"]
"""Lost: it had not ended when its nodes were last heard."""
TimeRange = tuple[float | None, float | None]
"""Start and end in epoch seconds; None for no bound."""
JobKind = Literal["job", "session", "process"]
"""Subject of a report: a scheduler's job, a session, or a process and its descendants."""

_SLACK_SECONDS = 60.0
"""A process is seen on a GPU a little before or after the store knows it."""


class Subject(NamedTuple):
    """What a report is about."""

    kind: JobKind
    name: str
    start: float = 0.0
    """Epoch seconds."""
    end: float = 0.0
    state: JobState = "ended"
    is_now: bool = False
    """Whether it goes on: its end is the present."""
    job: Mapping[str, Any] = {}
    """What a scheduler says about the job: fields of `model.job.Job`."""
    processes: Sequence[StoredProcess] = ()
    """Its own; a session has none."""
    grants: Sequence[Grant] = ()
    gpus: Sequence[StoredGpu] = ()
    """Those of a session."""
    data_gaps: Sequence[str] = ()
    """What its figures leave out, in words."""

    @property
    def keys(self) -> set[ProcessKey]:
        """The keys of its own processes."""
        return {key_of(process) for process in self.processes}

    @property
    def nodes(self) -> set[int]:
        """The nodes on which it was."""
        parts: tuple[Sequence[Any], ...] = self.processes, self.grants, self.gpus
        return {one.node for part in parts for one in part}

    def spans(self, node: int) -> list[tuple[float, float]]:
        """Return from when to when it was on a node, within its time."""
        if self.kind == "session":
            return [(self.start, self.end)]
        found = [(grant.start, grant.end) for grant in self.grants if grant.node == node]
        found += [(one.first_seen, one.ended) for one in self.processes if one.node == node]
        return self.clip(found)

    def process_spans(self, node: int) -> Callable[[int], list[tuple[float, float]] | None]:
        """Return a function that says when a process with some pid was its own; None for always, as in a session."""
        by_pid: dict[int, list[tuple[float, float | None]]] = {}
        for one in self.processes:
            if one.node == node:
                last = None if one.ended is None else one.ended + _SLACK_SECONDS
                by_pid.setdefault(one.pid, []).append((one.first_seen - _SLACK_SECONDS, last))
        if self.kind == "session":
            return lambda _: None
        return lambda pid: self.clip(by_pid.get(pid, ()))

    def clip(self, spans: Iterable[tuple[float, float | None]]) -> list[tuple[float, float]]:
        """Return time spans cut to the subject's time, in order; those that meet are merged."""
        cut = [
            (max(first, self.start), min(self.end if last is None else last, self.end))
            for first, last in spans
        ]
        found: list[tuple[float, float]] = []
        for first, last in sorted(span for span in cut if span[0] < span[1]):
            if found and first <= found[-1][1]:
                found[-1] = found[-1][0], max(found[-1][1], last)
            else:
                found.append((first, last))
        return found
