"""Generate the history of the demo cluster as the log of a head, from which the head builds everything else.

Totals of the two days before its start follow from the scenario: which workload each GPU had when, and what a head would
call that workload. Simulating two days of a thousand GPUs would take minutes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from itertools import chain
from math import ceil
from typing import NamedTuple

from gpulse._version import __version__
from gpulse.atomic_files import replace_file
from gpulse.cluster import wire
from gpulse.cluster.agent.event_detector import Event, EventDetector
from gpulse.cluster.demo.scenario import FINISHED_SESSION, HISTORY_SECONDS, DemoCluster, DemoNode
from gpulse.cluster.head.fleet_totals import (
    DAY_STEP_SECONDS,
    MAX_STEPS,
    TOTALS_FILE,
    IdleGpu,
    StateCounts,
    TotalsHistory,
)
from gpulse.diagnosis.live_diagnosis import LiveDiagnosis
from gpulse.diagnosis.rules.faults import node_lost, node_missing
from gpulse.model.device import IDLE_RATIO
from gpulse.model.finding import Finding
from gpulse.model.frame import Frame
from gpulse.model.frame_packing import FramePacker
from gpulse.model.gpu_state import GPU_STATES, GpuState
from gpulse.model.harvest_status import is_harvest_job
from gpulse.model.packed_columns import PackedFrame, layout_id
from gpulse.model.recording_codec import to_sparse_dict
from gpulse.model.session import Session
from gpulse.model.xid import XID_EVENT
from gpulse.sources.demo_machine import DemoMachine, DemoWorkload, WorkloadPeriod, demo_uuid
from gpulse.sources.demo_playback import ACTIVITY_METRICS, load_loop
from gpulse.store.format_version import prepare_format
from gpulse.store.log.log import Log
from gpulse.store.log.record_payloads import FrameBatch, FrameEvents, LogEntry

MAX_FRAMES = 5600
"""Maximum number of generated frames for the whole cluster: large clusters have a shorter history."""
DIAGNOSED_SECONDS = 30
"""The last part of the history is sampled every second and diagnosed, unless there are too many nodes."""
_MAX_DIAGNOSED_NODES = 16
_STEP_SECONDS = 60
_FINE_SECONDS, _FINE_STEP_SECONDS = 1200, 10
"""With few nodes the last twenty minutes have finer steps."""
_BATCH_FRAMES = 60
_DIAGNOSIS_SECONDS = 5.0
_SLOW_SECONDS = 20.0
"""How often disks, network and processes are reported."""
_DETECTION_SECONDS = 40.0
"""Time from the start of a job until its problem would have been reported."""
_BRIEF_FINDINGS = ("slow_start",)
"""Findings that say that a job has just begun."""
_AGENT_PID = 4242
_DAY = 86_400.0
_PAST_XIDS = (
    (20.4 * _DAY, 43, 30_211, "ken", "python3 sweep.py"),
    (15.1 * _DAY, 31, 28_760, "ken", "python3 sweep.py"),
    (5.7 * _DAY, 94, 9_114, "joan", "python3 train_gpt.py"),
    (5.7 * _DAY - 1.0, 63, 9_114, "joan", "python3 train_gpt.py"),
)
"""Xid errors before the history: seconds before the start, code, and the process on the GPU."""
_LATE_SECONDS = 5.0
_LOST_SECONDS = 30.0

ProgressCallback = Callable[[float], None]
_READINGS_PER_LOOP = 25


def machine_id(node: DemoNode) -> str:
    """Return the machine ID of a node."""
    return f"demo-{node.number}"


def make_machine(node: DemoNode, started: float, *, inside: bool = True) -> DemoMachine:
    """Return the simulated machine of a node; `inside` adds details of host and processes."""
    return DemoMachine(started, slots=node.slots, name=node.name, number=node.number, inside=inside)


def frame_ages(nodes: int) -> list[int]:
    """Return the ages of a node's frames in seconds before the start, oldest first, without the diagnosed part."""
    whole = round(HISTORY_SECONDS)
    coarse = [*range(whole, _FINE_SECONDS, -_STEP_SECONDS), *range(_FINE_SECONDS, 0, -_STEP_SECONDS)]
    fine = [ago for ago in coarse if ago > _FINE_SECONDS]
    fine += range(_FINE_SECONDS, DIAGNOSED_SECONDS, -_FINE_STEP_SECONDS)
    return fine if nodes * len(fine) <= MAX_FRAMES else coarse[-(MAX_FRAMES // nodes) :]


def history_seconds(nodes: int) -> float:
    """Return the length of the history for a number of nodes."""
    return float(frame_ages(nodes)[0])


def write_history(
    data_dir: str,
    plan: DemoCluster,
    started: float,
    *,
    clock: Callable[[], float],
    progress: ProgressCallback,
) -> None:
    """Write the history of the cluster to the log of a data directory.

    Args:
        data_dir: Data directory of the head.
        plan: The cluster.
        started: When the demo starts.
        clock: Returns the current time, at which the history ends.
        progress: Called with the progress from 0 to 1.

    Raises:
        GpulseError: The log cannot be written.
    """
    writers = [_NodeHistoryWriter(node, started) for node in plan.nodes]
    times = frame_ages(len(writers))
    diagnosed = range(DIAGNOSED_SECONDS if len(writers) <= _MAX_DIAGNOSED_NODES else 0, -1, -1)
    whole = len(writers) * (len(times) + 3 * len(diagnosed))  # a diagnosed frame takes three times as long
    prepare_format(data_dir)
    write_totals(data_dir, plan, started)
    with Log(f"{data_dir}/log", segment_bytes=256 << 20) as log:
        _append_entries(log, _head_entries(plan, started, started - times[0]))
        for place, writer in enumerate(writers):
            _append_entries(log, writer.entries([started - ago for ago in times]))
            progress((place + 1) * len(times) / whole)
        for place, writer in enumerate(writers):
            now = clock()
            _append_entries(log, writer.diagnosed_entries([now - ago for ago in diagnosed]))
            progress((len(writers) * len(times) + (place + 1) * 3 * len(diagnosed)) / whole)


def _append_entries(log: Log, entries: Iterable[LogEntry]) -> None:
    log.append_many((entry.kind, entry.payload) for entry in entries)


def _head_entries(plan: DemoCluster, started: float, begin: float) -> Iterator[LogEntry]:
    """Yield the log entries of the head itself: its start, nodes, lost nodes, a session."""
    yield LogEntry.of_fact(
        "event", time=begin, kind="head_started", node=None, detail={"version": __version__}
    )
    facts = to_sparse_dict(DemoMachine(started, slots=()).sample(started).node)
    facts.pop("name")
    for node in plan.nodes:
        yield LogEntry.of_fact(
            "node",
            id=node.number,
            name=node.name,
            host=node.name,
            machine=machine_id(node),
            time=begin,
            facts=facts,
            labels=dict(node.labels),
        )
        yield from _past_xid_entries(node, started)
        if node.away is not None and started + node.away[0] > begin:
            yield from _lost_node_entries(node, started + node.away[0], started + node.away[1])
    for name in plan.missing:
        finding = node_missing(name, begin, begin + _LOST_SECONDS).to_dict()
        yield LogEntry.of_fact(
            "event",
            time=begin + _LOST_SECONDS,
            kind="node_missing",
            node=None,
            detail={"name": name, "finding": finding},
        )
    yield LogEntry.of_fact("session", **_finished_session(plan, started, started - begin).to_dict())


def _past_xid_entries(node: DemoNode, started: float) -> Iterator[LogEntry]:
    """Yield earlier Xid errors of the GPUs that had one during the history."""
    for slot, periods in enumerate(node.slots):
        if all(period.xid is None for period in periods):
            continue
        for ago, code, pid, user, name in _PAST_XIDS:
            detail = {
                "uuid": demo_uuid(slot, node.number),
                "gpu": str(slot),
                "code": code,
                "errors": 1,
                "time": started - ago,
                "holders": [{"pid": pid, "user": user, "name": name}],
            }
            yield LogEntry.of_fact(
                "event", time=started - ago, kind=XID_EVENT, node=node.number, detail=detail
            )


def _lost_node_entries(node: DemoNode, gone: float, back: float) -> Iterator[LogEntry]:
    lost = node_lost(node.name, gone, gone + _LOST_SECONDS, was_stopped=False)
    for time, kind, before in (
        (gone + _LATE_SECONDS, "node_late", "healthy"),
        (gone + _LOST_SECONDS, "node_lost", "late"),
        (back, "node_back", "lost"),
    ):
        detail = {"before": before, **({"finding": lost.to_dict()} if kind == "node_lost" else {})}
        yield LogEntry.of_fact("event", time=time, kind=kind, node=node.number, detail=detail)


def _finished_session(plan: DemoCluster, started: float, past: float) -> Session:
    """Return a session that ended a while ago, with at most two nodes."""
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


class _NodeHistoryWriter:
    """Generates the log entries of one node as its agent would have sent them."""

    def __init__(self, plan: DemoNode, started: float) -> None:
        self._plan = plan
        self._started = started
        self._machine = make_machine(plan, started, inside=False)
        self._packer = FramePacker(slow_seconds=_SLOW_SECONDS)
        self._monitor = LiveDiagnosis(every_seconds=_DIAGNOSIS_SECONDS)
        self._findings: list[Finding] = []
        self._judged_at: float | None = None
        """When findings are reported: at the end, when the diagnosis has seen all that it needs."""
        self._whole: float | None = None
        """When disks, network and processes were last reported."""
        self._last: float | None = None
        self._sequence = 0
        self._new_run()

    def _new_run(self) -> None:
        self._run = os.urandom(wire.RUN_BYTES)
        self._changes = EventDetector(version=__version__, pid=_AGENT_PID)
        self._sequence = 0
        self._is_announced = False

    def entries(self, times: Sequence[float]) -> Iterator[LogEntry]:
        """Return the entries for these times, without diagnosis."""
        away = self._plan.away
        if away is None or self._started + away[0] <= times[0]:
            return self._entries(times, diagnosed=False)
        gone, back = self._started + away[0], self._started + away[1]
        before, after = [t for t in times if t < gone], [t for t in times if t >= back]
        return chain(self._entries(before, diagnosed=False), self._restarted(after))

    def _restarted(self, times: Sequence[float]) -> Iterator[LogEntry]:
        self._new_run()
        yield from self._entries(times, diagnosed=False)

    def diagnosed_entries(self, times: Sequence[float]) -> Iterator[LogEntry]:
        """Return the entries for these times, with diagnosis."""
        self._machine = make_machine(self._plan, self._started)
        self._judged_at = times[-1]
        return self._entries(times, diagnosed=True)

    def _since_their_jobs(self, findings: Sequence[Finding], now: float) -> list[Finding]:
        """Return findings, of which the first one of each GPU has begun soon after the process there.

        The others keep their start: many of them last only until the diagnosis has seen enough.
        """
        first = {finding.label: finding for finding in reversed(findings)}
        return [
            self._since_its_job(finding, now) if finding is first[finding.label] else finding
            for finding in findings
        ]

    def _since_its_job(self, finding: Finding, now: float) -> Finding:
        slot = int(finding.label) if finding.label is not None and finding.label.isdecimal() else -1
        if not 0 <= slot < len(self._plan.slots) or finding.id in _BRIEF_FINDINGS:
            return finding
        period = self._plan.slots[slot][-1]
        began, scene = self._started + period.begin, period.scene
        restarted = scene.restarts(now - began) * (scene.leak_seconds or 0.0)
        return finding._replace(start=min(began + restarted + _DETECTION_SECONDS, now))

    def _entries(self, times: Sequence[float], *, diagnosed: bool) -> Iterator[LogEntry]:
        for place in range(0, len(times), _BATCH_FRAMES):
            yield from self._batch(times[place : place + _BATCH_FRAMES], diagnosed=diagnosed)

    def _batch(self, times: Sequence[float], *, diagnosed: bool) -> Iterator[LogEntry]:
        node = self._plan.number
        if not self._is_announced:
            self._is_announced = True
            yield LogEntry.of_fact(
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
            packed, layouts = self._packer.pack(*self._seen(time, diagnosed=diagnosed))
            frames.append(packed)
            for text in layouts:
                yield LogEntry.of_fact("layout", id=str(layout_id(text)), text=text.decode())
                if text.startswith(b'{"narrow"') and b'"scope":"gpu"' in text:
                    yield LogEntry.of_fact("devices", node=node, layout=str(layout_id(text)), time=time)
        first, self._sequence = self._sequence + 1, self._sequence + len(frames)
        received_us = frames[-1].time_us
        batch = FrameBatch(
            self._run,
            node,
            first,
            len(frames),
            received_us,
            0,
            b"".join(frame.to_bytes() for frame in frames),
        )
        frame_events = tuple(
            FrameEvents(node, self._run, first + place, frame.time_us / 1e6, frame.events)
            for place, frame in enumerate(frames)
            if frame.events
        )
        yield LogEntry.of_batch(batch, frame_events)

    def _seen(self, time: float, *, diagnosed: bool) -> tuple[Frame, Sequence[Event]]:
        """Return the frame at a time and its events; a partial frame where only a part is packed."""
        is_whole = self._whole is None or time - self._whole >= 0.9 * _SLOW_SECONDS
        before, self._last = self._last, time
        over = None if diagnosed else min(_STEP_SECONDS, time - before) if before else _STEP_SECONDS
        if not is_whole and not diagnosed:
            return self._machine.glance(time, over=over), ()
        frame = self._machine.sample_over(time, over)
        if is_whole:
            self._whole = time
        if diagnosed:
            findings = self._monitor(frame)
            self._findings = self._since_their_jobs(findings, time) if time == self._judged_at else []
        return frame, self._changes(frame, self._findings)


class _WorkloadUse(NamedTuple):
    """What a head counts while a GPU has a workload."""

    state: GpuState
    power_watts: float


@cache
def _find_use(scene: DemoWorkload) -> _WorkloadUse:
    """Return the state and the mean power of a GPU with a workload and without a fault."""
    loop = load_loop(scene.recording, scene.begin)
    frames = [loop.at(place * loop.span / _READINGS_PER_LOOP).frame for place in range(_READINGS_PER_LOOP)]
    values = [frame.gpus[0].values for frame in frames]
    activity = max(one.get(name, 0) for one in values for name in ACTIVITY_METRICS)
    is_active = min(scene.max_activity_ratio, activity) > IDLE_RATIO
    state: GpuState = "busy" if is_active else "idle" if loop.holders else "free"
    if is_harvest_job(scene.job):
        state = "harvested"
    return _WorkloadUse(state, sum(one["power_watts"] for one in values) / len(values))


def find_period(node: DemoNode, slot: int, seconds: float) -> WorkloadPeriod:
    """Return what a GPU did this many seconds after the demo's start."""
    periods = (*node.earlier[slot], *node.slots[slot])
    return next((period for period in reversed(periods) if period.begin <= seconds), periods[0])


def build_totals(plan: DemoCluster, started: float) -> tuple[TotalsHistory, list[IdleGpu]]:
    """Return the totals up to the demo's start, and the GPUs that are held and idle then."""
    last = int(started // DAY_STEP_SECONDS)
    first = last - MAX_STEPS + 1
    counts: dict[GpuState, list[int]] = {state: [0] * MAX_STEPS for state in GPU_STATES}
    power = [0.0] * MAX_STEPS

    def step_at(seconds: float) -> int:
        """Return the first step whose middle is at this time or later."""
        return min(MAX_STEPS, max(0, ceil((started + seconds) / DAY_STEP_SECONDS - 0.5) - first))

    for node in plan.nodes:
        away = range(0) if node.away is None else range(step_at(node.away[0]), step_at(node.away[1]))
        for slot in range(len(node.slots)):
            periods = (*node.earlier[slot], *node.slots[slot])
            ends = [step_at(period.begin) for period in periods[1:]]
            for period, begin, end in zip(periods, (0, *ends), (*ends, MAX_STEPS), strict=True):
                state, watts = _find_use(period.scene)
                counted = counts["faulty" if period.xid is not None else state]
                for step in range(begin, end):
                    if step not in away:
                        counted[step] += 1
                        power[step] += watts
    totals = TotalsHistory()
    for step in range(MAX_STEPS):
        begin_time = (first + step) * DAY_STEP_SECONDS
        seconds = min(float(DAY_STEP_SECONDS), started - begin_time)
        if seconds > 0:
            totals.add(
                StateCounts(
                    busy=counts["busy"][step],
                    held_idle=counts["idle"][step],
                    free=counts["free"][step],
                    harvested=counts["harvested"][step],
                    faulty=counts["faulty"][step],
                    power_watts=power[step] or None,
                ),
                seconds,
                begin_time,
            )
    return totals, _find_idle(plan, started)


def _find_idle(plan: DemoCluster, started: float) -> list[IdleGpu]:
    return [
        IdleGpu(demo_uuid(slot, node.number), None, started + period.begin)
        for node in plan.nodes
        for slot in range(len(node.slots))
        if _find_use((period := find_period(node, slot, 0.0)).scene).state == "idle"
    ]


def write_totals(data_dir: str, plan: DemoCluster, started: float) -> None:
    """Write the totals to the file from which the head reads them.

    Raises:
        OSError: The file cannot be written.
    """
    totals, idle = build_totals(plan, started)
    replace_file(f"{data_dir}/{TOTALS_FILE}", totals.to_bytes(idle), durable=False)
