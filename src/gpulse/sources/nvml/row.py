"""One line of the machine, a GPU or MIG instance, and what is to be said of it when it does not answer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import inf
from time import monotonic

from gpulse.model.device import Device
from gpulse.model.frame import GpuReading
from gpulse.model.health import Code, Health
from gpulse.sources.nvml import probes
from gpulse.sources.nvml.inventory import Listed
from gpulse.sources.nvml.library import LASTING, NO_DATA, NVMLError, code_of, hint_for, text_of
from gpulse.sources.nvml.target import Result, Target

SILENT_SECONDS = 1.0
"""A call that is out for less than this is late, not yet a GPU that does not answer."""


class Row:
    """One line of the machine: a GPU or MIG instance, whether it answers or not."""

    def __init__(self, device: Device, target: Target | None = None, trouble: Health | None = None) -> None:
        self.device = device
        self.target = target
        self.trouble = trouble
        """Why there is no target."""
        self.results: dict[str, Result] = {}
        self.errors: dict[str, Exception] = {}
        """Groups whose reading broke in a way that no probe foresaw."""
        self.begun: dict[str, float] = {}
        """The monotonic time at which each group was last asked for."""
        self.away_since: float | None = None
        """The monotonic time of the tick at which it was lost or did not answer, None once it is back."""

    @property
    def is_lost(self) -> bool:
        """True when all that the driver says about it is that it is lost."""
        tick = self.results.get("tick")
        if tick is None or tick.values:
            return False
        return any(code_of(error) == "gpu_lost" for error in tick.failures.values())

    @property
    def is_mute(self) -> bool:
        """True when it answers every question of a tick with an error, as a handle of another time would."""
        tick = self.results.get("tick")
        return tick is not None and not tick.values and bool(tick.failures)

    def due(self, group: str, period: float, clock: float) -> bool:
        """Whether a group should be asked for now."""
        if self.target is None or clock - self.begun.get(group, -inf) < period * 0.9:
            return False
        if group == "gpm":
            activity = self.target.gpm
            return activity is not None and clock >= activity.ready_at
        if group == "facts":
            known = self.results.get("facts")
            return known is None or bool(probes.passing(known.failures))
        return bool(self.target.probes[group]) or (group == "second" and self.target.wants_processes)

    def take_over(self, old: Row) -> None:
        """Go on from what was known about the same GPU."""
        self.results = old.results
        self.device = self.device._replace(facts=old.device.facts)
        self.begun = old.begun if old.target is not None else {}
        if self.target is not None and old.target is not None:
            self.target.unsupported = old.target.unsupported.copy()

    def mind(self) -> None:
        """After each tick: forget what a lost GPU said before, and ask one that is back for everything."""
        if self.is_lost:
            self.results = {"tick": self.results["tick"]}
        if self.is_lost or "tick" not in self.results:
            self.away_since = self.away_since or monotonic()
        elif self.away_since is not None:
            if monotonic() - self.away_since >= SILENT_SECONDS or len(self.results) == 1:
                self.begun.clear()
            self.away_since = None

    def faults(self, now: float) -> Iterator[Health]:
        """What its readings of late could not tell, and why."""
        subject = f"gpu {self.device.label}"
        for group, error in self.errors.items():
            yield Health("nvml", "failed", f"reading the {group} group broke: {error!r}", now, subject)
        refused = {} if self.target is None else self.target.unsupported.copy()  # its threads add to it
        failed: dict[int, set[str]] = {}
        for result in self.results.values():
            for name, code in result.failures.items():
                if name not in refused and code not in NO_DATA:
                    failed.setdefault(code, set()).add(name)
        for code, names in failed.items():
            # What was told before and is refused now is a fault, whatever the driver calls it.
            meaning: Code = "failed" if code_of(code) in LASTING else code_of(code)
            yield _entry(meaning, code, names, subject, now)
        for code in set(refused.values()):
            yield _entry(code_of(code), code, {n for n, c in refused.items() if c == code}, subject, now)


def apart(readings: Iterable[GpuReading]) -> tuple[GpuReading, ...]:
    """The readings with each process listed once: a GPU that is split leaves it to the instance."""
    known = list(readings)
    on_instances: dict[str, set[int]] = {}
    for reading in known:
        if reading.device.parent_uuid is not None:
            pids = on_instances.setdefault(reading.device.parent_uuid, set())
            pids.update(process.pid for process in reading.processes or ())
    if not on_instances:
        return tuple(known)
    return tuple(
        reading._replace(processes=tuple(p for p in reading.processes if p.pid not in taken))
        if reading.processes is not None and (taken := on_instances.get(reading.device.uuid))
        else reading
        for reading in known
    )


def is_current(rows: list[Row] | None, gpu: Listed) -> bool:
    """Whether a listed GPU is open already, as it is now."""
    if rows is None or rows[0].target is None or rows[0].is_mute:
        return False
    return gpu.instances == rows[0].target.instances


def _entry(meaning: Code, code: int, names: set[str], subject: str, now: float) -> Health:
    return Health("nvml", meaning, text_of(code), now, subject, tuple(sorted(names)), hint_for(meaning))


def late(subject: str, seconds: float, now: float) -> Health:
    """A call that has not come back."""
    code: Code = "not_answering" if seconds >= SILENT_SECONDS else "timeout"
    took = f"{seconds:.0f} s" if seconds >= SILENT_SECONDS else f"{seconds * 1000:.0f} ms"
    detail = f"a call to the driver has not come back for {took}"
    return Health("nvml", code, detail, now - seconds, subject, hint=hint_for(code))


def unopened(index: int, error: Exception | None, now: float) -> Health:
    """Why a GPU that the driver lists could not be opened."""
    if error is None:
        code: Code = "not_answering"
        detail = "the GPU did not answer when it was asked for its name"
    else:
        code = code_of(error.value) if isinstance(error, NVMLError) else "failed"
        code = "failed" if code == "not_supported" else code
        detail = str(error)
    return Health("nvml", code, detail, now, f"gpu {index}", hint=hint_for(code))


def silent(now: float) -> Health:
    """A driver that did not even start."""
    return Health(
        "nvml",
        "not_answering",
        "the NVIDIA driver did not answer when NVML was started",
        now,
        hint=hint_for("not_answering"),
    )


def gone(device: Device, now: float) -> Health:
    """By its UUID: another GPU may have its index now."""
    detail = f"the driver no longer lists {device.name}, which was gpu {device.label}"
    return Health("nvml", "gpu_lost", detail, now, device.uuid, hint=hint_for("gpu_lost"))
