"""The past of the demo's cluster, written as the log of a head that had been there: everything else is made from it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain

from gpulse._version import __version__
from gpulse.cluster import wire
from gpulse.cluster.agent.changes import Changes, Event
from gpulse.cluster.demo.plan import FINISHED_SESSION, PAST_SECONDS, ClusterPlan, NodePlan
from gpulse.diagnosis.live import Monitor
from gpulse.diagnosis.rules.node import node_lost
from gpulse.model.codec import plain
from gpulse.model.columns import PackedFrame, layout_id
from gpulse.model.finding import Finding
from gpulse.model.frame import Frame
from gpulse.model.packing import FramePacker
from gpulse.model.session import Session
from gpulse.sources.simulated import DemoMachine
from gpulse.store.format import prepare_format
from gpulse.store.log.log import Log
from gpulse.store.log.records import Batch, Entry, FrameEvents

MOST_FRAMES = 5600
"""So many frames of the past are made for the whole cluster: large ones have a shorter past."""
JUDGED_SECONDS = 30
"""The last of the past is sampled every second, and judged, unless there are too many nodes."""
_MOST_JUDGED = 16
_STEP_SECONDS = 60
_FINE_SECONDS, _FINE_STEP_SECONDS = 3600, 10
"""The last of it is finer where there are few nodes."""
_BATCH_FRAMES = 60
_JUDGE_SECONDS = 5.0
_SLOW_SECONDS = 20.0
"""How often disks, network and processes are told of."""
_SEEN_SECONDS = 40.0
"""So long after a job began its trouble would have been told."""
_AGENT_PID = 4242
_LATE_SECONDS = 5.0
_LOST_SECONDS = 30.0

Progress = Callable[[float], None]


def machine_id(node: NodePlan) -> str:
    """What tells the machine of a node from others."""
    return f"demo-{node.number}"


def simulated(node: NodePlan, started: float, *, inside: bool = True) -> DemoMachine:
    """The machine of a node; with or without what is inside of hosts and processes."""
    return DemoMachine(started, slots=node.slots, name=node.name, number=node.number, inside=inside)


def moments(nodes: int) -> list[int]:
    """When there are frames of a node, in seconds before the start, oldest first; the last seconds aside."""
    whole = round(PAST_SECONDS)
    coarse = [*range(whole, _FINE_SECONDS, -_STEP_SECONDS), *range(_FINE_SECONDS, 0, -_STEP_SECONDS)]
    fine = [ago for ago in coarse if ago > _FINE_SECONDS]
    fine += range(_FINE_SECONDS, JUDGED_SECONDS, -_FINE_STEP_SECONDS)
    return fine if nodes * len(fine) <= MOST_FRAMES else coarse[-(MOST_FRAMES // nodes) :]


def past_seconds(nodes: int) -> float:
    """How much of the past so many nodes have."""
    return float(moments(nodes)[0])


def write_past(
    data_dir: str, plan: ClusterPlan, started: float, *, clock: Callable[[], float], progress: Progress
) -> None:
    """Write everything that happened before now into the log of a data directory.

    Args:
        data_dir: The head's.
        plan: The cluster.
        started: When the demo starts.
        clock: The time; the past ends with it.
        progress: Told how much of it is done, from 0 to 1.

    Raises:
        GpulseError: The disk does not take it.
    """
    authors = [_Author(node, started) for node in plan.nodes]
    times = moments(len(authors))
    judged = range(JUDGED_SECONDS if len(authors) <= _MOST_JUDGED else 0, -1, -1)
    whole = len(authors) * (len(times) + 3 * len(judged))  # a frame that is judged takes thrice as long
    prepare_format(data_dir)
    with Log(f"{data_dir}/log", segment_bytes=256 << 20) as log:
        _append(log, _head_entries(plan, started, started - times[0]))
        for place, author in enumerate(authors):
            _append(log, author.long_ago([started - ago for ago in times]))
            progress((place + 1) * len(times) / whole)
        for place, author in enumerate(authors):
            now = clock()
            _append(log, author.lately([now - ago for ago in judged]))
            progress((len(authors) * len(times) + (place + 1) * 3 * len(judged)) / whole)


def _append(log: Log, entries: Iterable[Entry]) -> None:
    log.append_many((entry.kind, entry.payload) for entry in entries)


def _head_entries(plan: ClusterPlan, started: float, begin: float) -> Iterator[Entry]:
    """What the head itself would have written down: nodes, its start, nodes that went and came, a session."""
    yield Entry.of_fact("event", time=begin, kind="head_started", node=None, detail={"version": __version__})
    facts = plain(DemoMachine(started, slots=()).sample(started).node)
    facts.pop("name")
    for node in plan.nodes:
        yield Entry.of_fact(
            "node",
            id=node.number,
            name=node.name,
            host=node.name,
            machine=machine_id(node),
            time=begin,
            facts=facts,
            labels=dict(node.labels),
        )
        if node.away is not None and started + node.away[0] > begin:
            yield from _away(node, started + node.away[0], started + node.away[1])
    yield Entry.of_fact("session", **_finished(plan, started, started - begin).to_dict())


def _away(node: NodePlan, gone: float, back: float) -> Iterator[Entry]:
    lost = node_lost(node.name, gone, gone + _LOST_SECONDS, was_stopped=False)
    for time, kind, before in (
        (gone + _LATE_SECONDS, "node_late", "healthy"),
        (gone + _LOST_SECONDS, "node_lost", "late"),
        (back, "node_back", "lost"),
    ):
        detail = {"before": before, **({"finding": lost.to_dict()} if kind == "node_lost" else {})}
        yield Entry.of_fact("event", time=time, kind=kind, node=node.number, detail=detail)


def _finished(plan: ClusterPlan, started: float, past: float) -> Session:
    """A session that somebody ended a while ago, of at most two nodes."""
    begin = started - 0.9 * past
    return Session(
        id="de30000000000001",
        name=FINISHED_SESSION,
        start=begin,
        created=begin,
        interval_ms=_STEP_SECONDS * 1000,
        state="finished",
        end=started - 0.7 * past,
        nodes=plan.example_nodes,
        labels={"demo": "yes"},
    )


class _Author:
    """Writes the past of one node, as its agent would have sent it."""

    def __init__(self, plan: NodePlan, started: float) -> None:
        self._plan = plan
        self._started = started
        self._machine = simulated(plan, started, inside=False)
        self._packer = FramePacker(slow_seconds=_SLOW_SECONDS)
        self._monitor = Monitor(every_seconds=_JUDGE_SECONDS)
        self._findings: list[Finding] = []
        self._whole: float | None = None
        """When disks, network and processes were told of last."""
        self._last: float | None = None
        self._sequence = 0
        self._new_run()

    def _new_run(self) -> None:
        self._run = os.urandom(wire.RUN_BYTES)
        self._changes = Changes(version=__version__, pid=_AGENT_PID)
        self._sequence = 0
        self._is_told = False

    def long_ago(self, times: Sequence[float]) -> Iterator[Entry]:
        """The entries of these moments, at which nothing is judged."""
        away = self._plan.away
        if away is None or self._started + away[0] <= times[0]:
            return self._entries(times, judged=False)
        gone, back = self._started + away[0], self._started + away[1]
        before, after = [t for t in times if t < gone], [t for t in times if t >= back]
        return chain(self._entries(before, judged=False), self._restarted(after))

    def _restarted(self, times: Sequence[float]) -> Iterator[Entry]:
        self._new_run()
        yield from self._entries(times, judged=False)

    def lately(self, times: Sequence[float]) -> Iterator[Entry]:
        """The entries of these moments, judged."""
        self._machine = simulated(self._plan, self._started)
        return self._entries(times, judged=True)

    def _since_its_job(self, finding: Finding, now: float) -> Finding:
        """Return a finding with the start that it has: it was seen soon after the job on its GPU began."""
        slot = int(finding.label) if finding.label is not None and finding.label.isdecimal() else -1
        if not 0 <= slot < len(self._plan.slots):
            return finding
        begin = self._started + self._plan.slots[slot][-1].begin + _SEEN_SECONDS
        return finding._replace(start=min(begin, now))

    def _entries(self, times: Sequence[float], *, judged: bool) -> Iterator[Entry]:
        for place in range(0, len(times), _BATCH_FRAMES):
            yield from self._batch(times[place : place + _BATCH_FRAMES], judged=judged)

    def _batch(self, times: Sequence[float], *, judged: bool) -> Iterator[Entry]:
        node = self._plan.number
        if not self._is_told:
            self._is_told = True
            yield Entry.of_fact(
                "run",
                run=self._run.hex(),
                node=node,
                time=times[0],
                version=__version__,
                pid=_AGENT_PID,
                boot="demo",
            )
        frames: list[PackedFrame] = []
        for time in times:
            packed, layouts = self._packer.pack(*self._seen(time, judged=judged))
            frames.append(packed)
            for text in layouts:
                yield Entry.of_fact("layout", id=str(layout_id(text)), text=text.decode())
                if text.startswith(b'{"narrow"') and b'"scope":"gpu"' in text:
                    yield Entry.of_fact("devices", node=node, layout=str(layout_id(text)), time=time)
        first, self._sequence = self._sequence + 1, self._sequence + len(frames)
        received_us = frames[-1].time_us
        batch = Batch(
            self._run,
            node,
            first,
            len(frames),
            received_us,
            0,
            b"".join(frame.to_bytes() for frame in frames),
        )
        happened = tuple(
            FrameEvents(node, self._run, first + place, frame.time_us / 1e6, frame.events)
            for place, frame in enumerate(frames)
            if frame.events
        )
        yield Entry.of_batch(batch, happened)

    def _seen(self, time: float, *, judged: bool) -> tuple[Frame, Sequence[Event]]:
        """The machine since the last moment, or at this one to be judged, and what happened; less where less is packed."""
        is_whole = self._whole is None or time - self._whole >= 0.9 * _SLOW_SECONDS
        before, self._last = self._last, time
        over = None if judged else min(_STEP_SECONDS, time - before) if before else _STEP_SECONDS
        if not is_whole and not judged:
            return self._machine.glance(time, over=over), ()
        frame = self._machine.sample_over(time, over)
        if is_whole:
            self._whole = time
        if judged:
            self._findings = [self._since_its_job(finding, time) for finding in self._monitor(frame)]
        return frame, self._changes(frame, self._findings)
