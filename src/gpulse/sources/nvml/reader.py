"""All GPUs of a node, tick by tick: what is due is read, what is sick is kept apart, what is lost is looked for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import inf
from time import monotonic

from gpulse.model.device import Device
from gpulse.model.frame import GpuReading
from gpulse.model.health import Code, Health
from gpulse.model.metric import Values
from gpulse.sources.lanes import Lanes, Run
from gpulse.sources.nvml import inventory, library, probes
from gpulse.sources.nvml.cadence import Cadence, Patience, close_up
from gpulse.sources.nvml.driver import Driver
from gpulse.sources.nvml.events import Xids
from gpulse.sources.nvml.gpm import SHORTEST_SECONDS
from gpulse.sources.nvml.inventory import Listed
from gpulse.sources.nvml.library import DRIVER_GONE, NVMLError, code_of, hint_for, text_of
from gpulse.sources.nvml.target import Result, Target, open_gpu, placeholder

_GROUPS = ("facts", "second", "slow", "gpm")
_OPENERS = 8
_SILENT_SECONDS = 1.0
"""A call that is out for less than this is late, not yet a GPU that does not answer."""


class _Row:
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
        self.away = False
        """True from the tick at which it is lost or does not answer until it is back."""

    @property
    def is_lost(self) -> bool:
        """True when all that the driver says about it is that it is lost."""
        tick = self.results.get("tick")
        if tick is None or tick.values:
            return False
        return any(code_of(error) == "gpu_lost" for error in tick.failures.values())

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
        return group == "second" or bool(self.target.probes[group])

    def take_over(self, old: _Row) -> None:
        """Go on from what was known about the same GPU."""
        self.results = old.results
        self.device = self.device._replace(facts=old.device.facts)
        self.begun = old.begun if old.target is not None else {}


class GpuReader:
    """Reads every GPU without letting one of them delay or blank the others."""

    def __init__(
        self,
        cadence: Cadence | None = None,
        *,
        watch_xids: bool = True,
        patience: Patience | None = None,
        parallel: int | None = 2,
    ) -> None:
        """Prepare to read.

        Args:
            cadence: How often the groups of readings are taken.
            watch_xids: Wait for Xid errors on a thread.
            patience: How long the driver is waited for.
            parallel: GPUs whose slower groups are read at the same time, None for all. The driver's calls
                keep a CPU busy, so more of them make one look faster and a long run only costlier.
        """
        self._cadence = cadence or Cadence()
        self._patience = patience or Patience()
        self._driver = Driver(watch_xids=watch_xids)
        self._tick: Lanes[Target] = Lanes("tick", 1)
        self._others: Lanes[Target] = Lanes("slow", parallel or 1)
        self._openers: Lanes[int] = Lanes("open", _OPENERS)
        self._control: Lanes[str] = Lanes("control", 1)
        self._rows: dict[int, list[_Row]] = {}
        """By NVML's index: the GPU, then its MIG instances."""
        self._gone: dict[str, _Row] = {}
        """By UUID: GPUs that the driver no longer lists."""
        self._open = False
        self._closed = False
        self._all_at_once = parallel is None
        self._unavailable: Health | None = None
        self._tried_at = -inf
        self._surveyed_at = -inf
        self._starting: Run[str, int] | None = None
        self._opening: dict[int, Run[int, list[Target]]] = {}
        """By NVML's index: the rounds from which a GPU's answer is still awaited."""
        self._survey: Run[str, tuple[Listed, ...] | int] | None = None
        self._tick_run: Run[Target, Result | None] | None = None
        self._rounds: dict[str, Run[Target, Result | None]] = {}

    @property
    def versions(self) -> tuple[str | None, str | None]:
        """Of the driver, and of the newest CUDA it supports."""
        return self._driver.versions

    @property
    def gpm_ready_at(self) -> float | None:
        """The monotonic time from which on every GPU's GPM activity can be read, None when none has it."""
        activities = [target.gpm for target in self._targets()]
        return max((activity.ready_at for activity in activities if activity is not None), default=None)

    def open(self, now: float) -> None:
        """Start NVML and name the GPUs; only the first attempt is waited for."""
        clock = monotonic()
        is_first = self._tried_at == -inf
        if not self._open and self._starting is None and clock - self._tried_at >= self._patience.retry:
            self._tried_at = clock
            calm = not (self._tick.busy or self._others.busy or self._openers.busy)
            self._starting = self._control.start(["start"], lambda _: self._driver.start(calm=calm))
        patience = self._patience.start if is_first else 0.0
        if self._starting is not None:
            self._await_start(self._starting, now, patience)
        self._await_opening(now, patience)

    def keep(self, names: frozenset[str]) -> None:
        """Ask the GPUs that are open only for these readings: for one look that shows no more."""
        for target in self._targets():
            target.keep(names)

    def start(self, now: float) -> None:
        """Begin this tick's readings; `collect` brings them home."""
        self.open(now)
        if not self._open:
            return
        clock = monotonic()
        self._tick_run = self._tick.start(self._targets(), lambda target: target.read("tick", now))
        self._take_rounds()
        for group in _GROUPS:
            self._begin(group, now, clock)
        if self._survey is None and clock - self._surveyed_at >= self._patience.survey:
            self._surveyed_at = clock
            self._survey = self._control.start(["survey"], lambda _: inventory.survey())

    def collect(
        self, now: float, *, tick_patience: float, patience: float = 0.0
    ) -> tuple[tuple[GpuReading, ...], list[Health]]:
        """The readings of the tick that `start` began.

        Args:
            now: Epoch seconds.
            tick_patience: How long to wait for a GPU before going on without it.
            patience: How long to wait for the slower groups; what comes later is in the next frame.
        """
        deadline = monotonic() + patience
        if self._tick_run is not None:
            self._tick.finish(self._tick_run, tick_patience)
            self._take(self._tick_run, "tick")
            self._tick_run = None
        for run in self._rounds.values():
            run.wait(deadline - monotonic())
        self._take_rounds()
        seen = self._driver.xids()
        rows = [row for _, group in sorted(self._rows.items()) for row in group]
        rows.extend(self._gone.values())
        readings = _apart(self._reading(row, now, seen) for row in rows)
        health = [entry for row in rows for entry in self._health(row, now)]
        if self._unavailable is not None:
            health.insert(0, self._unavailable)
        self._look_for_changes(now)
        return readings, health

    def close(self) -> None:
        """End the threads and NVML; a call that hangs is left to die with the process."""
        if self._closed:
            return
        self._closed = True
        self._driver.leave(self._targets())
        calm = all([self._tick.close(), self._others.close(), self._openers.close()])
        run = self._control.start(["close"], lambda _: self._driver.stop(calm=calm))
        self._control.finish(run, 1.0)
        self._control.close()

    def _targets(self) -> list[Target]:
        return [row.target for group in self._rows.values() for row in group if row.target is not None]

    def _begin(self, group: str, now: float, clock: float) -> None:
        period = self._cadence.slow if group == "facts" else self._cadence.period(group)
        if period is None or group in self._rounds:
            return
        due = {
            row.target: row
            for rows in self._rows.values()
            for row in rows
            if row.target is not None and row.due(group, period, clock)
        }
        if not due:
            return
        run = self._others.start(list(due), lambda target: target.read(group, now))
        for target in run.items:
            due[target].begun[group] = clock
        self._rounds[group] = run

    def _take_rounds(self) -> None:
        for group, run in list(self._rounds.items()):
            self._others.sweep(run, self._patience.call)
            finished = run.finished
            self._take(run, group)
            if finished:
                del self._rounds[group]

    def _take(self, run: Run[Target, Result | None], group: str) -> None:
        for row in (row for rows in self._rows.values() for row in rows):
            if row.target is None:
                continue
            result, error = run.results.get(row.target), run.errors.get(row.target)
            if group == "tick":
                row.results.pop("tick", None)
            if error is not None:
                row.errors[group] = error
            if result is not None:
                row.errors.pop(group, None)
                row.results[group] = result
                if group == "facts":
                    row.device = row.device._replace(
                        facts={**row.device.facts, **result.values}, **result.details
                    )
            if group == "tick":
                self._mind(row)

    def _mind(self, row: _Row) -> None:
        """After each tick: forget what a lost GPU said before, and ask one that is back for everything."""
        if row.is_lost:
            row.results = {"tick": row.results["tick"]}
            row.away = True
        elif "tick" not in row.results:
            row.away = True
        elif row.away:
            row.away = False
            row.begun.clear()

    def _reading(self, row: _Row, now: float, seen: dict[str, Xids]) -> GpuReading:
        values: Values = {}
        read_at: dict[str, float] = {}
        for group in ("slow", "second", "gpm"):
            result = row.results.get(group)
            period = self._cadence.period(group)
            if result is not None and period is not None and now - result.at <= 2 * period + 1:
                values.update(result.values)
                read_at[group] = result.at
        tick = row.results.get("tick")
        if tick is not None:
            values.update(tick.values)
        if row.device.parent_uuid is None:
            values.update(self._driver.xid_values(row.device.uuid, seen))
        processes = row.results["second"].processes if "second" in read_at else None
        return GpuReading(row.device, values, processes, read_at)

    def _health(self, row: _Row, now: float) -> Iterator[Health]:
        if row.target is None:
            if row.trouble is not None:
                yield row.trouble
            return
        subject = f"gpu {row.device.label}"
        stuck = [lanes.stuck_seconds(row.target) for lanes in (self._tick, self._others)]
        if any(seconds is not None for seconds in stuck):
            yield _late(subject, max(seconds or 0.0 for seconds in stuck), now)
            return
        for group, error in row.errors.items():
            yield Health("nvml", "failed", f"reading the {group} group broke: {error!r}", now, subject)
        by_error: dict[int, set[str]] = {}
        for result in row.results.values():
            for name, code in probes.passing(result.failures).items():
                by_error.setdefault(code, set()).add(name)
        for name, code in row.target.unsupported.copy().items():  # its threads add to it
            by_error.setdefault(code, set()).add(name)
        for code, names in by_error.items():
            meaning = code_of(code)
            yield Health(
                "nvml", meaning, text_of(code), now, subject, tuple(sorted(names)), hint_for(meaning)
            )

    def _await_start(self, run: Run[str, int], now: float, patience: float) -> None:
        """Go on from NVML's start once it has answered, even if that is much later."""
        if not run.wait(patience):
            self._control.sweep(run, 0.9 * (patience or self._patience.call))
        if "start" in run.errors:
            self._unavailable = Health("nvml", "failed", str(run.errors["start"]), now)
        elif "start" not in run.results:
            if run.finished:
                self._unavailable = _silent(now)
            return
        elif run.results["start"]:
            self._unavailable = library.unavailable(run.results["start"], now)
        else:
            self._unavailable = None
        self._starting = None
        if self._unavailable is not None:
            self._lose_all(self._unavailable.code, self._unavailable.detail, now)
            return
        self._open = True
        self._surveyed_at = -inf if self._rows else monotonic()
        if self._all_at_once:
            self._others.width = self._driver.count
        self._name(range(self._driver.count))

    def _name(self, indexes: Iterable[int]) -> None:
        run = self._openers.start([index for index in indexes if index not in self._opening], self._opened)
        self._opening.update(dict.fromkeys(run.items, run))

    def _opened(self, index: int) -> list[Target]:
        targets = open_gpu(index, self._cadence)
        self._driver.watch(targets[0].device.uuid, targets[0].handle)
        return targets

    def _await_opening(self, now: float, patience: float) -> None:
        """A row for each GPU that has said who it is, and one for those that have not in good time."""
        for run in set(self._opening.values()):
            if not run.wait(patience):
                self._openers.sweep(run, 0.9 * (patience or self._patience.call))
        for index, run in list(self._opening.items()):
            if index in run.results:
                del self._opening[index]
                self._install(index, [_Row(target.device, target) for target in run.results[index]])
            elif index in run.errors:
                del self._opening[index]
                self._install(index, [self._nameless(index, run.errors[index], now)])
            elif run.finished and all(row.trouble is None for row in self._rows.get(index, ())):
                self._install(index, [self._nameless(index, None, now)])

    def _nameless(self, index: int, error: Exception | None, now: float) -> _Row:
        """The row of a GPU that the driver lists but that could not be opened."""
        known = self._rows.get(index)
        device = known[0].device if known else placeholder(index)
        return _Row(device, None, _unopened(index, error, now))

    def _install(self, index: int, rows: list[_Row]) -> None:
        old = {row.device.uuid: row for row in (*self._gone.values(), *self._rows.get(index, ()))}
        self._rows[index] = rows
        for row in rows:
            if row.target is not None and row.device.uuid in old:
                row.take_over(old[row.device.uuid])
            self._gone.pop(row.device.uuid, None)
        for row in old.values():
            if row.target is not None:
                row.target.close()

    def _look_for_changes(self, now: float) -> None:
        """Notice a driver that went away, GPUs that came or went, and MIG that was set up anew."""
        if not self._open:
            return
        for rows in self._rows.values():
            tick = rows[0].results.get("tick")
            for error in tick.failures.values() if tick is not None else ():
                if code_of(error) in DRIVER_GONE:
                    self._lose_driver(error, now)
                    return
        if self._survey is None:
            return
        self._control.sweep(self._survey, self._patience.call)
        if not self._survey.finished:
            return
        answer = self._survey.results.get("survey")
        self._survey = None
        if isinstance(answer, int):
            self._lose_driver(answer, now)
        elif answer is not None:
            self._reconcile(answer, now)

    def _reconcile(self, listed: tuple[Listed, ...], now: float) -> None:
        """Bring the rows in line with what the driver lists, opening what is new and leaving the rest alone."""
        named = {gpu.uuid for gpu in listed}
        known = {rows[0].device.uuid: rows for rows in self._rows.values()}
        silent = {index: rows for index, rows in self._rows.items() if rows[0].device.uuid not in named}
        wanted: list[int] = []
        self._rows = {}
        for index, gpu in enumerate(listed):
            rows = silent.get(index) if gpu.uuid is None else known.pop(gpu.uuid, None)
            if rows is not None:
                known.pop(rows[0].device.uuid, None)
                self._rows[index] = rows
                for row in rows:
                    row.device = row.device._replace(index=index)
            if gpu.uuid is not None and not _is_current(rows, gpu):
                wanted.append(index)
        for uuid, rows in known.items():
            self._drop(uuid, rows, now)
        self._name(wanted)

    def _drop(self, uuid: str, rows: list[_Row], now: float) -> None:
        """Keep a row, as a gap, for a GPU that is not listed any more."""
        for row in rows:
            if row.target is not None:
                row.target.close()
        if rows[0].device.minor_number is not None:
            self._gone[uuid] = _Row(rows[0].device, None, _gone(rows[0].device, now))

    def _lose_driver(self, error: int, now: float) -> None:
        self._open = False
        self._rounds, self._opening, self._survey = {}, {}, None
        self._driver.leave(self._targets())
        self._lose_all(code_of(error), text_of(error), now)
        self._tried_at = monotonic()

    def _lose_all(self, code: Code, detail: str, now: float) -> None:
        for row in (row for rows in self._rows.values() for row in rows):
            if row.target is not None:
                row.target, row.results, row.errors = None, {}, {}
                subject = f"gpu {row.device.label}"
                row.trouble = Health("nvml", code, detail, now, subject, hint=hint_for(code))


def for_one_look() -> GpuReader:
    """A reader of all GPUs at once, with GPM as soon as it can be had and without what pays in the long run."""
    return GpuReader(close_up(SHORTEST_SECONDS), watch_xids=False, parallel=None)


def _apart(readings: Iterable[GpuReading]) -> tuple[GpuReading, ...]:
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


def _is_current(rows: list[_Row] | None, gpu: Listed) -> bool:
    """Whether a listed GPU is open already, as it is now."""
    if rows is None or rows[0].target is None or rows[0].is_lost:
        return False
    return gpu.instances == tuple(row.device.uuid for row in rows[1:])


def _late(subject: str, seconds: float, now: float) -> Health:
    """A call that has not come back."""
    code: Code = "not_answering" if seconds >= _SILENT_SECONDS else "timeout"
    took = f"{seconds:.0f} s" if seconds >= _SILENT_SECONDS else f"{seconds * 1000:.0f} ms"
    detail = f"a call to the driver has not come back for {took}"
    return Health("nvml", code, detail, now - seconds, subject, hint=hint_for(code))


def _unopened(index: int, error: Exception | None, now: float) -> Health:
    """Why a GPU that the driver lists could not be opened."""
    if error is None:
        code: Code = "not_answering"
        detail = "the GPU did not answer when it was asked for its name"
    else:
        code = code_of(error.value) if isinstance(error, NVMLError) else "failed"
        code = "failed" if code == "not_supported" else code
        detail = str(error)
    return Health("nvml", code, detail, now, f"gpu {index}", hint=hint_for(code))


def _silent(now: float) -> Health:
    return Health(
        "nvml",
        "not_answering",
        "the NVIDIA driver did not answer when NVML was started",
        now,
        hint=hint_for("not_answering"),
    )


def _gone(device: Device, now: float) -> Health:
    """By its UUID: another GPU may have its index now."""
    detail = f"the driver no longer lists {device.name}, which was gpu {device.label}"
    return Health("nvml", "gpu_lost", detail, now, device.uuid, hint=hint_for("gpu_lost"))
