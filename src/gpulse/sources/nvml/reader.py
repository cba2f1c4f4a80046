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
from gpulse.sources.nvml import inventory, library
from gpulse.sources.nvml.cadence import Cadence, Patience, close_up
from gpulse.sources.nvml.driver import Driver
from gpulse.sources.nvml.events import Xids
from gpulse.sources.nvml.gpm import SHORTEST_SECONDS
from gpulse.sources.nvml.inventory import Listed
from gpulse.sources.nvml.library import DRIVER_GONE, code_of, hint_for, text_of
from gpulse.sources.nvml.row import Row, apart, gone, is_current, late, silent, unopened
from gpulse.sources.nvml.target import Result, Target, open_gpu, placeholder

_GROUPS = ("facts", "second", "slow", "gpm")
_OPENERS = 8
_LOOK_SECONDS = 0.4
"""Short enough that a look which measures rates reads the counters of the per-second group twice."""


class GpuReader:
    """Reads every GPU without letting one of them delay or blank the others."""

    def __init__(
        self,
        cadence: Cadence | None = None,
        *,
        watch_xids: bool = True,
        patience: Patience | None = None,
        parallel: int | None = 2,
        names: frozenset[str] | None = None,
    ) -> None:
        """Prepare to read.

        Args:
            cadence: How often the groups of readings are taken.
            watch_xids: Wait for Xid errors on a thread.
            patience: How long the driver is waited for.
            parallel: GPUs whose slower groups are read at the same time, None for all. The driver's calls
                keep a CPU busy, so more of them make one look faster and a long run only costlier.
            names: The only readings that are wanted; all when None.
        """
        self.waits_for_pcie = True
        """Whether GPUs without GPM are asked for PCIe rates by the call that takes 40 ms."""
        self._cadence = cadence or Cadence()
        self._patience = patience or Patience()
        self._names = names
        self._only: frozenset[str] | None = None
        self._driver = Driver(watch_xids=watch_xids)
        self._tick: Lanes[Target] = Lanes("tick", 1)
        self._others: Lanes[Target] = Lanes("slow", parallel or 1)
        self._openers: Lanes[int] = Lanes("open", _OPENERS)
        self._control: Lanes[str] = Lanes("control", 1)
        self._rows: dict[int, list[Row]] = {}
        """By NVML's index: the GPU, then its MIG instances."""
        self._gone: dict[str, Row] = {}
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
        self._rounds: list[tuple[str, Run[Target, Result | None]]] = []
        """The rounds of slower groups that are under way; a sick GPU's stays while the others go on."""
        self._generation = 0
        """Counts the drivers that were lost, so that a GPU opened too late is given back at once."""

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

    @property
    def devices(self) -> list[Device]:
        """The GPUs that have said who they are, each followed by its MIG instances."""
        return [
            row.device for _, rows in sorted(self._rows.items()) for row in rows if row.target is not None
        ]

    def only(self, uuids: frozenset[str]) -> None:
        """Ask from now on no other GPU or instance for anything."""
        self._only = uuids
        for target in self._targets():
            self._narrow(target)

    def _narrow(self, target: Target) -> None:
        if self._only is not None and target.device.uuid not in self._only:
            target.narrow(frozenset())
        elif self._names is not None:
            target.narrow(self._names)

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
        for _, run in self._rounds:
            run.wait(deadline - monotonic())
        self._take_rounds()
        seen = self._driver.xids()
        rows = [row for _, group in sorted(self._rows.items()) for row in group]
        rows.extend(self._gone.values())
        readings = apart(self._reading(row, now, seen) for row in rows)
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
        if period is None:
            return
        out = {
            target
            for name, run in self._rounds
            if name == group
            for target in run.items
            if not run.has(target)
        }
        due = {
            row.target: row
            for rows in self._rows.values()
            for row in rows
            if row.target is not None and row.target not in out and row.due(group, period, clock)
        }
        if not due:
            return
        run = self._others.start(list(due), lambda target: target.read(group, now))
        for target in run.items:
            due[target].begun[group] = clock
        self._rounds.append((group, run))

    def _take_rounds(self) -> None:
        under_way = []
        for group, run in self._rounds:
            self._others.sweep(run, self._patience.call)
            finished = run.finished
            self._take(run, group)
            if not finished:
                under_way.append((group, run))
        self._rounds = under_way

    def _take(self, run: Run[Target, Result | None], group: str) -> None:
        for row in (row for rows in self._rows.values() for row in rows):
            if row.target is None:
                continue
            result, error = run.results.get(row.target), run.errors.get(row.target)
            newest = row.results.get(group)
            if result is not None and newest is not None and newest.at > result.at:
                continue  # a round that was left behind by a later one
            if group != "tick" and row.away_since is not None:
                row.begun.pop(group, None)  # what it says while it is away is old: ask again when it is back
                continue
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
                row.mind()

    def _reading(self, row: Row, now: float, seen: dict[str, Xids]) -> GpuReading:
        values: Values = {}
        read_at: dict[str, float] = {}
        for group in ("slow", "second", "gpm"):
            result = row.results.get(group)
            period = self._cadence.period(group)
            if result is None or period is None or row.away_since is not None:
                continue
            if now - result.at <= 2 * period + 1:
                values.update(result.values)
                read_at.update({group: result.at, **result.read_at})
        tick = row.results.get("tick")
        if tick is not None:
            values.update(tick.values)
        answers = row.target is not None and row.away_since is None
        if row.device.parent_uuid is None and (answers or row.device.uuid in seen):
            values.update(self._driver.xid_values(row.device.uuid, seen))
        processes = row.results["second"].processes if "second" in read_at else None
        return GpuReading(row.device, values, processes, read_at)

    def _health(self, row: Row, now: float) -> Iterator[Health]:
        if row.target is None:
            if row.trouble is not None:
                yield row.trouble
            return
        subject = f"gpu {row.device.label}"
        stuck = [lanes.stuck_seconds(row.target) for lanes in (self._tick, self._others)]
        if any(seconds is not None for seconds in stuck):
            yield late(subject, max(seconds or 0.0 for seconds in stuck), now)
            return
        yield from row.faults(now)

    def _await_start(self, run: Run[str, int], now: float, patience: float) -> None:
        """Go on from NVML's start once it has answered, even if that is much later."""
        if not run.wait(patience):
            self._control.sweep(run, 0.9 * (patience or self._patience.call))
        if "start" in run.errors:
            self._unavailable = Health("nvml", "failed", str(run.errors["start"]), now)
        elif "start" not in run.results:
            if run.finished:
                self._unavailable = silent(now)
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
        generation = self._generation
        targets = open_gpu(index, self._cadence, lambda: self.waits_for_pcie)
        for target in targets:
            self._narrow(target)
        refused = self._driver.watch(targets[0].device.uuid, targets[0].handle)
        if refused:
            targets[0].unsupported["xid_errors_total"] = refused
        if generation != self._generation:
            for target in targets:
                target.close()
        return targets

    def _await_opening(self, now: float, patience: float) -> None:
        """A row for each GPU that has said who it is, and one for those that have not in good time."""
        for run in set(self._opening.values()):
            if not run.wait(patience):
                self._openers.sweep(run, 0.9 * (patience or self._patience.call))
        for index, run in list(self._opening.items()):
            if index in run.results:
                del self._opening[index]
                targets = run.results[index]
                if self._is_elsewhere(index, targets[0].device.uuid):
                    for target in targets:
                        target.close()
                else:
                    self._install(index, [Row(target.device, target) for target in targets])
            elif index in run.errors:
                del self._opening[index]
                self._install(index, [self._nameless(index, run.errors[index], now)])
            elif run.finished and all(row.trouble is None for row in self._rows.get(index, ())):
                self._install(index, [self._nameless(index, None, now)])

    def _is_elsewhere(self, index: int, uuid: str) -> bool:
        """Whether the GPUs were numbered anew while one was opened, so that another one answered."""
        return any(rows[0].device.uuid == uuid for other, rows in self._rows.items() if other != index)

    def _nameless(self, index: int, error: Exception | None, now: float) -> Row:
        """The row of a GPU that the driver lists but that could not be opened."""
        known = self._rows.get(index)
        device = known[0].device if known else placeholder(index)
        return Row(device, None, unopened(index, error, now))

    def _install(self, index: int, rows: list[Row]) -> None:
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
        unnamed = {index: rows for index, rows in self._rows.items() if rows[0].device.uuid not in named}
        wanted: list[int] = []
        self._rows = {}
        for index, gpu in enumerate(listed):
            rows = unnamed.get(index) if gpu.uuid is None else known.pop(gpu.uuid, None)
            if rows is not None:
                known.pop(rows[0].device.uuid, None)
                self._rows[index] = rows
                for row in rows:
                    row.device = row.device._replace(index=index)
            if gpu.uuid is not None and not is_current(rows, gpu):
                wanted.append(index)
        for uuid, rows in known.items():
            self._drop(uuid, rows, now)
        self._name(wanted)

    def _drop(self, uuid: str, rows: list[Row], now: float) -> None:
        """Keep a row, as a gap, for a GPU that is not listed any more."""
        for row in rows:
            if row.target is not None:
                row.target.close()
        if rows[0].device.minor_number is not None:
            self._gone[uuid] = Row(rows[0].device, None, gone(rows[0].device, now))

    def _lose_driver(self, error: int, now: float) -> None:
        self._open = False
        self._generation += 1
        late = [
            target
            for run in set(self._opening.values())
            for opened in run.results.values()
            for target in opened
        ]
        self._rounds, self._opening, self._survey = [], {}, None
        self._driver.leave([*self._targets(), *late])
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
    cadence = close_up(SHORTEST_SECONDS)._replace(second=_LOOK_SECONDS)
    return GpuReader(cadence, watch_xids=False, parallel=None)
