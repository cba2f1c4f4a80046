"""Reports about jobs: what a store says about somebody's GPUs in their time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

from gpulse.model.harvest import is_harvested
from gpulse.model.packing import SLOW_SECONDS
from gpulse.reports import chart, efficiency, job_findings, job_report, occupancy
from gpulse.reports.document import Document
from gpulse.reports.efficiency import GpuKey, GpuUse
from gpulse.reports.gaps import Missing, missing
from gpulse.reports.gpu_use import Found, Occupied, uses_of, wanted_of
from gpulse.reports.owners import Key, People
from gpulse.reports.resolve import Choose, Finder
from gpulse.reports.subject import JobKind, Subject, key_of
from gpulse.store.incomplete import noticing
from gpulse.store.registry import Register
from gpulse.store.store import ALWAYS, Query, Series, Share, Store

_MOST_POINTS, _FEWEST_POINTS = 1500, 60
_MOST_CELLS = 250_000
"""Steps of all GPUs together; of many GPUs steps are longer."""
_KNOWN_BEFORE_SECONDS = 120.0
_MAX_FINDINGS = 20_000
"""That are read for a report; of more, those that held last."""


_METRICS = tuple(dict.fromkeys((*efficiency.METRICS, *occupancy.WORK_METRICS)))


class Jobs:
    """A store, asked for reports."""

    def __init__(
        self,
        store: Store,
        register: Register,
        node_ids: Callable[[Sequence[str]], frozenset[int] | None],
        choose: Choose,
        interval_seconds: Callable[[], float],
    ) -> None:
        """Prepare to answer.

        Args:
            store: Where the answers are.
            register: The nodes by number.
            node_ids: The numbers of nodes by name; None for all of them.
            choose: Finds GPUs by nodes and words such as `node:3`.
            interval_seconds: How often agents sample.
        """
        self._store = store
        self._register = register
        self._node_ids = node_ids
        self._finder = Finder(store, choose, interval_seconds)
        self._interval_seconds = interval_seconds

    async def job(
        self,
        *,
        job: str,
        kind: JobKind | None,
        node: str | None,
        start: float | None,
        end: float | None,
        points: int,
        now: float,
    ) -> Document:
        """How well a job, a session or a process used its GPUs.

        Args:
            job: A job's number or name, a session's name, or a pid.
            kind: Which of them; found out when None.
            node: Only there.
            start: Only from then on, in epoch seconds.
            end: Only until then.
            points: The most steps of what is told over time; 0 for none of it.
            now: Epoch seconds.

        Raises:
            RefusedError: There is nothing like that.
        """
        nodes = self._node_ids([] if node is None else [node])

        def ask() -> Document:
            with noticing() as incomplete:
                subject = self._finder.find(job, kind, nodes=nodes, window=(start, end), now=now)
                found = self._looked_up(subject)
                gaps = self._missing(found)
                uses = uses_of(found, gaps)
                findings = self._findings(found, uses)
            found.incomplete = incomplete
            return job_report.document(found, uses, gaps, findings, points)

        return await asyncio.to_thread(ask)

    def _looked_up(self, subject: Subject) -> Found:
        start, end = subject.start, subject.end
        names = {number: node.name for number, node in self._register.by_id.items()}
        shares: dict[GpuKey, list[Share]] = {}
        if start < end:
            for share in self._store.gpu_time(Query(start, end)):
                if share.node in names:
                    shares.setdefault((share.node, share.uuid), []).append(share)
        people = self._people(subject, shares)
        gpus = {(gpu.node, gpu.uuid): gpu for gpu in self._store.gpus()}
        wanted = [key for key in wanted_of(subject, shares, people, gpus) if key[0] in names]
        moments = self._grid(start, end, len(wanted))
        steps = self._steps(wanted, moments, start, end)
        occupied = self._occupied(subject, moments, steps, shares, people)
        return Found(subject, names, shares, people, self._harvested(), gpus, moments, steps, occupied)

    def _occupied(
        self,
        subject: Subject,
        moments: chart.Grid,
        steps: Mapping[GpuKey, Sequence[Series]],
        shares: Mapping[GpuKey, Sequence[Share]],
        people: People,
    ) -> dict[GpuKey, Occupied]:
        """Who was on each GPU when."""
        asked: list[Series] = []
        if moments.count and steps:
            asked = self._store.series(
                Query(
                    subject.start,
                    subject.end,
                    "process",
                    occupancy.HELD_METRICS,
                    nodes=frozenset(node for node, _ in steps),
                    gpus=frozenset(uuid for _, uuid in steps),
                    step=moments.step,
                )
            )
        there, keys = occupancy.by_process(asked), subject.keys
        found = {}
        for key, own in steps.items():
            known = there.get(key, {})
            sides: tuple[list[Share], list[Share]] = [], []
            for share in shares.get(key, ()):
                if share.pid is not None:
                    is_own = subject.kind == "session" or people.of(share).key in keys
                    sides[not is_own].append(share)
            pids, others = ({share.pid for share in side} for side in sides)
            lives = subject.lives(key[0])

            def alive(pid: int) -> occupancy.Spans | None:
                return None if pid in pids and pid not in others else lives(pid)  # noqa: B023  it is asked at once

            pace = occupancy.pace_of(own, moments.step, self._interval_seconds())
            held = occupancy.occupancy(known, moments.step, pace, alive, subject.within)
            mine, theirs = ([_stretch(share) for share in side if share.pid not in known] for side in sides)
            held = held._replace(
                own=subject.within([*held.own, *mine]),
                others=subject.within([*held.others, *theirs]),
                is_sm_known=held.is_sm_known and not mine,
            )
            found[key] = Occupied(held, pace)
        return found

    def _people(self, subject: Subject, shares: Mapping[GpuKey, Sequence[Share]]) -> People:
        """Whose the processes are that can be the subject's, by their pids."""
        if subject.kind == "session":
            gpus = [(gpu.node, gpu.uuid) for gpu in subject.gpus]
            pids = {share.pid for key in gpus for share in shares.get(key, ()) if share.pid is not None}
        else:
            pids = {process.pid for process in subject.processes}
        return People(
            self._store.processes(
                Query(
                    subject.start - _KNOWN_BEFORE_SECONDS,
                    subject.end + _KNOWN_BEFORE_SECONDS,
                    nodes=frozenset(subject.nodes),
                    pids=frozenset(pids),
                )
            )
        )

    def _harvested(self) -> set[Key]:
        names = frozenset(name for name in self._store.job_names() if is_harvested(name))
        if not names:
            return set()
        return {key_of(process) for process in self._store.processes(Query(*ALWAYS, jobs=names))}

    def _grid(self, start: float, end: float, gpus: int) -> chart.Grid:
        points = max(_FEWEST_POINTS, min(_MOST_POINTS, _MOST_CELLS // max(1, gpus)))
        return chart.grid(start, end, points, self._interval_seconds())

    def _steps(
        self, wanted: Sequence[GpuKey], moments: chart.Grid, start: float, end: float
    ) -> dict[GpuKey, list[Series]]:
        found: dict[GpuKey, list[Series]] = {key: [] for key in wanted}
        if not moments.count or not wanted:
            return found
        asked = self._store.series(
            Query(
                start,
                end,
                "gpu",
                _METRICS,
                nodes=frozenset(node for node, _ in wanted),
                subjects=frozenset(uuid for _, uuid in wanted),
                step=moments.step,
            )
        )
        for steps in asked:
            if steps.key in found:
                found[steps.key].append(steps)
        return found

    def _missing(self, found: Found) -> list[Missing]:
        """When nothing is known of the nodes, the first of it first."""
        gaps = []
        for node in sorted(found.subject.nodes & found.names.keys()):
            steps = [one for key, own in found.steps.items() if key[0] == node for one in own]
            spans = found.subject.spans(node)
            gaps += missing(node, steps, found.moments, spans, self._interval_seconds())
        return sorted(gaps, key=lambda gap: (gap.start, gap.node))

    def _findings(self, found: Found, uses: Sequence[GpuUse]) -> list[Document]:
        """What was wrong, worst first."""
        subject = found.subject
        names = {node: found.names[node] for node in subject.nodes if node in found.names}
        held = self._store.findings(
            Query(subject.start, subject.end, nodes=frozenset(names), limit=_MAX_FINDINGS)
        )
        labels: dict[int, set[str]] = {}
        for use in uses:
            if use.gpu is not None:
                labels.setdefault(use.key[0], set()).add(use.gpu.label)
        pids = None if subject.kind == "session" else job_findings.pids_by_node(found.keys)
        whole = job_findings.of_the_whole(uses, subject.start, subject.end)
        return job_findings.ranked(
            [*whole, *job_findings.gathered(held, names, labels, pids, subject.start, subject.end)]
        )


def _stretch(share: Share) -> tuple[float, float]:
    """From when to when a process was on a GPU of whose samples nothing more is known."""
    return share.first or 0.0, (share.last or 0.0) + SLOW_SECONDS
