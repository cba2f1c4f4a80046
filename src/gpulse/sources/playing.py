"""One GPU of a simulated machine: whose jobs it plays, one after the other, each a recording made part of the machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from gpulse.model.device import Device
from gpulse.model.frame import GpuReading, HostReading
from gpulse.model.harvest import STATE_CODES, is_harvested
from gpulse.model.metric import CATALOGUE, Scope, Values
from gpulse.model.process import Owner, ProcessIdentity, ProcessReading
from gpulse.sources.reel import NO_CARRY, Carry, added, core_growth, grown, grown_cores, loop

_PIDS_APART = 10_000
_PIDS_BETWEEN_STINTS = 517


class Scene(NamedTuple):
    """One recording, the stretch of it that is worth watching, and who seems to run it."""

    recording: str
    begin: float
    """Seconds after the recording's start."""
    user: str
    command: str
    job: str | None = None
    container: str | None = None
    pod: str | None = None
    neighbour: tuple[str, str] | None = None
    """User and command of the second process where two hold the GPU; the same as the first one's when None."""


class Stint(NamedTuple):
    """What a GPU plays from some moment on, until its next stint begins."""

    scene: Scene
    begin: float = 0.0
    """Seconds after the demo's start; before it when negative."""
    phase: float = 0.0
    """How far into the recording it begins, in seconds: two that play the same are not alike then."""
    xid: int | None = None
    """An Xid error that the driver reported when it began; the only reading that no recording has."""


class Part(NamedTuple):
    """One GPU and its share of the machine."""

    driver: str | None
    gpu: GpuReading
    host: HostReading | None
    disk: Values
    link: Values
    processes: tuple[ProcessReading, ...]


class Track:
    """One GPU of the machine: its stints, one after the other."""

    def __init__(
        self, slot: int, stints: Sequence[Stint], started: float, number: int, *, inside: bool
    ) -> None:
        self._stints = tuple(stints)
        self._is_harvested = any(is_harvested(stint.scene.job) for stint in stints)
        self._plays: list[_Play] = []
        for place, stint in enumerate(stints):
            play = _Play(slot, place, stint, started, number, inside=inside)
            if self._plays:
                before = self._plays[-1].at(stint.begin)
                play.carry = _carried(before, play.at(stint.begin))
            self._plays.append(play)

    def at(self, seconds: float, *, whole: bool, over: float | None) -> Part:
        """The GPU this many seconds after the demo's start, on the mean over some time up to then where that is given."""
        play = self._plays[0]
        for later in self._plays[1:]:
            if later.stint.begin <= seconds:
                play = later
        part = play.at(seconds, whole=whole, over=over)
        if not self._is_harvested:
            return part
        gpu = part.gpu
        return part._replace(gpu=gpu._replace(values=gpu.values | _harvest(self._stints, seconds)))


class _Play:
    """One stint of one GPU: a recording made part of the machine."""

    def __init__(
        self, slot: int, place: int, stint: Stint, started: float, number: int, *, inside: bool
    ) -> None:
        self.stint = stint
        self._inside = inside
        self.carry = NO_CARRY
        self._slot = slot
        self._more_pids = slot * _PIDS_APART + place * _PIDS_BETWEEN_STINTS
        self._loop = loop(stint.scene.recording, stint.scene.begin)
        self._began = started + stint.begin
        self._later = self._began - self._loop.base.time
        """How much later the demo runs than the recording did."""
        self._device = _named(self._loop.first.gpus[0].device, slot, number)
        self._identities: dict[int, tuple[ProcessIdentity, ProcessIdentity]] = {}
        """By the recorded pid the recorded process and the one it becomes."""

    def at(self, seconds: float, *, whole: bool = True, over: float | None = None) -> Part:
        """What there is this many seconds after the demo's start."""
        moment = self._loop.at(max(0.0, seconds - self.stint.begin) + self.stint.phase)
        frame, loops, pids = moment.frame, moment.loops, moment.pids
        played, carry = self._loop, self.carry
        gpu, host = frame.gpus[0], frame.host
        values = grown(gpu.values, played.gpu, loops, carry.gpu)
        if over is not None:
            values |= played.means(moment, over)
        if self.stint.xid is not None:
            values |= {
                "xid_errors_total": 1,
                "xid_last_code": self.stint.xid,
                "xid_last_timestamp_seconds": self._began,
            }
        if host is not None:
            host = HostReading(
                grown(host.values, played.host, loops, carry.host),
                grown_cores(host.cores, played.cores, loops, carry.cores) if self._inside else (),
            )
        if not whole:
            reading = GpuReading(self._device, values, None, gpu.read_at)
            return Part(frame.node.driver, reading, host, {}, {}, ())
        disk = grown(frame.disks[0].values, played.disks[0], loops, carry.disk) if frame.disks else {}
        links = [
            grown(link.values, growth, loops)
            for link, growth in zip(frame.network, played.links, strict=True)
            if link.kind == "ethernet"
        ]
        processes = tuple(
            self._owned(process, grown(process.values, played.processes.get(process.pid, {}), loops))
            for process in frame.processes
            if process.pid in pids
        )
        held = tuple(process._replace(pid=self._pid(process.pid)) for process in gpu.processes or ())
        reading = GpuReading(self._device, values, held, gpu.read_at)
        return Part(frame.node.driver, reading, host, disk, added([*links, carry.link]), processes)

    def _pid(self, pid: int) -> int:
        return pid + self._more_pids

    def _owned(self, process: ProcessReading, values: Values) -> ProcessReading:
        recorded, identity = self._identities.get(process.pid, (None, None))
        if identity is None or recorded != process.identity:
            identity = self._identity(process.identity)
            self._identities[process.pid] = (process.identity, identity)
        values["cpus_allowed"] = 16  # as on the machine of the recordings: each job is pinned to its own CPUs
        values["last_cpu"] = values["last_cpu"] + 16 * self._slot
        threads = (
            tuple(thread._replace(tid=self._pid(thread.tid)) for thread in process.threads)
            if self._inside
            else ()
        )
        return ProcessReading(identity, process.state, values, threads, process.on_gpu)

    def _identity(self, recorded: ProcessIdentity) -> ProcessIdentity:
        scene, user, command, parent = (
            self.stint.scene,
            self.stint.scene.user,
            self.stint.scene.command,
            recorded.parent_pid,
        )
        if scene.neighbour is not None and recorded.pid in self._loop.holders[1:]:
            user, command = scene.neighbour
            parent = self._loop.base.processes[0].identity.parent_pid  # no child of the first one
        return recorded._replace(
            pid=self._pid(recorded.pid),
            start_time=None if recorded.start_time is None else recorded.start_time + self._later,
            parent_pid=None if parent is None else self._pid(parent),
            command=tuple(command.split()),
            owner=Owner(user=user, job=scene.job, container=scene.container, pod=scene.pod),
        )


def _harvest(stints: Sequence[Stint], seconds: float) -> Values:
    """What a harvest would say of a GPU after it played these stints up to some moment."""
    harvested, preemptions, state = 0.0, 0, STATE_CODES["waiting"]
    for place, stint in enumerate(stints):
        if place and stint.begin > seconds:
            break
        end = stints[place + 1].begin if place + 1 < len(stints) else seconds
        state = STATE_CODES["people" if stint.scene.user else "waiting"]
        if is_harvested(stint.scene.job):
            state = STATE_CODES["harvested"]
            harvested += max(0.0, min(end, seconds) - stint.begin)
            preemptions += end < seconds
    return {
        "harvest_state": state,
        "harvested_seconds_total": harvested,
        "harvest_preemptions_total": preemptions,
    }


def _named(device: Device, slot: int, number: int) -> Device:
    return device._replace(
        index=slot,
        uuid=f"GPU-de300000-{number:04x}-4000-8000-{slot:012x}",
        bus_id=f"{slot // 8:08x}:{0x1B + 0x10 * (slot % 8):02x}:00.0",
        minor_number=slot,
        architecture="Hopper",
    )


def _carried(before: Part, after: Part) -> Carry:
    """What to add to the counters of a stint so that they go on where those of the one before it were."""
    return Carry(
        gpu=_difference("gpu", after.gpu.values, before.gpu.values),
        host=_difference("host", _of(after.host), _of(before.host)),
        disk=_difference("disk", after.disk, before.disk),
        link=_difference("network", after.link, before.link),
        cores=core_growth(after.host.cores, before.host.cores) if after.host and before.host else (),
    )


def _difference(scope: Scope, values: Values, wanted: Values) -> Values:
    metrics = CATALOGUE[scope]
    return {
        name: wanted.get(name, value) - value
        for name, value in values.items()
        if metrics[name].kind == "counter"
    }


def _of(host: HostReading | None) -> Values:
    return {} if host is None else host.values
