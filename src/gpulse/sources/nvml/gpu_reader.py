"""Read all GPUs of a node at each tick: due metric groups are read, faulty GPUs isolated, lost GPUs searched for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from math import inf
from time import monotonic

from gpulse.model.device import Device
from gpulse.model.frame import GpuReading
from gpulse.model.metric_catalog import Values
from gpulse.model.source_health import Health, HealthCode
from gpulse.sources.network import PciDevices
from gpulse.sources.nvml import gpu_inventory, library, metric_probes
from gpulse.sources.nvml.gpm import MIN_GPM_SECONDS
from gpulse.sources.nvml.gpu_inventory import ListedGpu
from gpulse.sources.nvml.gpu_topology import PeerGpu
from gpulse.sources.nvml.library import (
    DRIVER_GONE_CODES,
    NO_DATA_ERRORS,
    PERMANENT_CODES,
    NVMLError,
    code_of,
    hint_for,
    text_of,
)
from gpulse.sources.nvml.nvml_lifecycle import NvmlDriver, XidSummary
from gpulse.sources.nvml.open_device import OpenDevice, ProbeResult, open_gpu, placeholder_device
from gpulse.sources.nvml.read_timing import Cadence, DriverTimeouts, detailed_cadence
from gpulse.sources.timeout_pool import PoolBatch, TimeoutPool

_READ_LATER = (
    *("facts", "serial", "vbios", "architecture", "compute_capability", "numa_node"),
    *("board_part_number", "cpu_affinity", "switch_links", "paths", "adapter_paths"),
)
"""Fields of a device that are read after it was opened."""
NOT_ANSWERING_SECONDS = 1.0
"""A call that is pending for less than this is late; after that the GPU counts as not responding."""


class DeviceState:
    """State of one GPU or MIG instance, whether it responds or not."""

    def __init__(
        self, device: Device, target: OpenDevice | None = None, problem: Health | None = None
    ) -> None:
        self.device = device
        self.target = target
        self.problem = problem
        """Why the device is not open."""
        self.results: dict[str, ProbeResult] = {}
        self.errors: dict[str, Exception] = {}
        """Groups whose reading raised an unexpected exception."""
        self.begun: dict[str, float] = {}
        """Monotonic time at which each group was last requested."""
        self._refused: tuple[dict[str, int], str] = ({}, "")
        self._refusals: list[Health] = []
        """What the device refuses, and the health entries about it: they are the same in nearly every frame."""
        self.away_since: float | None = None
        """Monotonic time of the tick at which it was lost or did not respond; None once it is back."""

    @property
    def is_lost(self) -> bool:
        """True when the driver only reports that it is lost."""
        tick = self.results.get("tick")
        if tick is None or tick.values:
            return False
        return any(code_of(error) == "gpu_lost" for error in tick.failures.values())

    @property
    def answers_nothing(self) -> bool:
        """True when every probe of a tick failed, as with a stale handle."""
        tick = self.results.get("tick")
        return tick is not None and not tick.values and bool(tick.failures)

    def due(self, group: str, period: float, clock: float) -> bool:
        """Return whether a group should be read now."""
        if self.target is None or clock - self.begun.get(group, -inf) < period * 0.9:
            return False
        if group == "gpm":
            activity = self.target.gpm
            return activity is not None and clock >= activity.ready_at
        if group == "facts":
            known = self.results.get("facts")
            return known is None or bool(metric_probes.temporary_failures(known.failures))
        if group == "topology":
            return self.target.wants_topology
        return bool(self.target.probes[group]) or (group == "second" and self.target.wants_processes)

    def take_over(self, old: DeviceState) -> None:
        """Continue from an earlier state of the same GPU."""
        self.results = old.results
        self.device = self.device._replace(**{name: getattr(old.device, name) for name in _READ_LATER})
        self.begun = old.begun if old.target is not None else {}
        if self.target is not None and old.target is not None:
            self.target.unsupported = old.target.unsupported.copy()

    def update_after_tick(self) -> None:
        """After each tick, drop old values of a lost GPU, and read everything from one that is back."""
        if self.is_lost:
            self.results = {"tick": self.results["tick"]}
        if self.is_lost or "tick" not in self.results:
            self.away_since = self.away_since or monotonic()
        elif self.away_since is not None:
            if monotonic() - self.away_since >= NOT_ANSWERING_SECONDS or len(self.results) == 1:
                self.begun.clear()
            self.away_since = None

    def faults(self, now: float) -> Iterator[Health]:
        """Yield what its recent readings could not read, and why."""
        subject = f"gpu {self.device.label}"
        for group, error in self.errors.items():
            yield Health("nvml", "failed", f"reading the {group} metrics failed: {error!r}", now, subject)
        refused = {} if self.target is None else self.target.unsupported.copy()  # other threads add to it
        failed: dict[int, set[str]] = {}
        for result in self.results.values():
            for name, code in result.failures.items():
                if name not in refused and code not in NO_DATA_ERRORS:
                    failed.setdefault(code, set()).add(name)
        for code, names in failed.items():
            # A metric that was read before and is refused now is a failure, whatever the driver calls it.
            meaning: HealthCode = "failed" if code_of(code) in PERMANENT_CODES else code_of(code)
            yield _build_health(meaning, code, names, subject, now)
        if (refused, subject) != self._refused:
            self._refused = refused, subject
            self._refusals = [
                _build_health(code_of(code), code, {n for n, c in refused.items() if c == code}, subject, now)
                for code in set(refused.values())
            ]
        yield from (health._replace(since=now) for health in self._refusals)


def deduplicate_processes(readings: Iterable[GpuReading]) -> tuple[GpuReading, ...]:
    """Return the readings with each process listed once: on its MIG instance and not on the whole GPU."""
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


def is_current(rows: list[DeviceState] | None, gpu: ListedGpu) -> bool:
    """Return whether a listed GPU is already open with its current MIG instances."""
    if rows is None or rows[0].target is None or rows[0].answers_nothing:
        return False
    return gpu.instances == rows[0].target.instances


def _build_health(meaning: HealthCode, code: int, names: set[str], subject: str, now: float) -> Health:
    return Health("nvml", meaning, text_of(code), now, subject, tuple(sorted(names)), hint_for(meaning))


def late_call_health(subject: str, seconds: float, now: float) -> Health:
    """Return the health entry for a call that has not returned."""
    code: HealthCode = "not_answering" if seconds >= NOT_ANSWERING_SECONDS else "timeout"
    took = f"{seconds:.0f} s" if seconds >= NOT_ANSWERING_SECONDS else f"{seconds * 1000:.0f} ms"
    detail = f"a driver call has not returned for {took}"
    return Health("nvml", code, detail, now - seconds, subject, hint=hint_for(code))


def unopened_gpu_health(index: int, error: Exception | None, now: float) -> Health:
    """Return the health entry for a GPU that the driver lists but that could not be opened."""
    if error is None:
        code: HealthCode = "not_answering"
        detail = "the GPU did not respond while it was being identified"
    else:
        code = code_of(error.value) if isinstance(error, NVMLError) else "failed"
        code = "failed" if code == "not_supported" else code
        detail = str(error)
    return Health("nvml", code, detail, now, f"gpu {index}", hint=hint_for(code))


def silent_driver_health(now: float) -> Health:
    """Return the health entry for a driver that did not start."""
    return Health(
        "nvml",
        "not_answering",
        "the NVIDIA driver did not respond when NVML was started",
        now,
        hint=hint_for("not_answering"),
    )


def missing_gpu_health(device: Device, now: float) -> Health:
    """Return the health entry for a GPU that is no longer listed, by UUID: another GPU may have its index now."""
    detail = f"the driver no longer lists {device.name}, previously GPU {device.label}"
    return Health("nvml", "gpu_lost", detail, now, device.uuid, hint=hint_for("gpu_lost"))


_EARLY_GROUPS = ("facts", "second", "slow", "topology")
_LATE_GROUPS = ("gpm", "pcie")
"""Groups whose calls may wait for the GPU for longer than a frame does."""
_FACT_GROUPS = ("facts", "topology")
"""Groups that are read once, and again only after a failure."""
_RARE_PCIE_SECONDS = 10.0
"""How often PCIe rates are still read for the diagnosis while nobody else wants them."""
_MAX_OPENING_THREADS = 8
_SNAPSHOT_SECONDS = 0.4
"""Short enough that a snapshot that measures rates reads the per-second counters twice."""


class GpuReader:
    """Reads every GPU so that none can delay the others or hide their values."""

    def __init__(
        self,
        cadence: Cadence | None = None,
        *,
        watch_xids: bool = True,
        timeouts: DriverTimeouts | None = None,
        parallel: int | None = 2,
        names: frozenset[str] | None = None,
        pci: PciDevices | None = None,
    ) -> None:
        """Prepare to read.

        Args:
            cadence: How often each metric group is read.
            watch_xids: Wait for Xid errors on a thread.
            timeouts: How long to wait for the driver.
            parallel: GPUs whose slower groups may be read at the same time, when the driver hangs with one of them;
                None for all. The driver's calls keep a CPU busy, so more of them make one snapshot faster but continuous
                sampling only costlier.
            names: Metrics to read; all when None.
            pci: The PCI devices of the node, to read how GPUs are connected; when None, this is not read.
        """
        self._pci = pci
        self.waits_for_pcie = True
        """Whether PCIe rates of GPUs without GPM are wanted, by the call that takes 40 ms; otherwise they are read rarely."""
        self._cadence = cadence or Cadence()
        self._timeouts = timeouts or DriverTimeouts()
        self._names = names
        self._only: frozenset[str] | None = None
        self._driver = NvmlDriver(watch_xids=watch_xids)
        self._tick: TimeoutPool[OpenDevice] = TimeoutPool("tick", 1)
        self._others: TimeoutPool[OpenDevice] = TimeoutPool("slow", parallel or 1, eager=parallel is None)
        self._openers: TimeoutPool[int] = TimeoutPool("open", _MAX_OPENING_THREADS)
        self._control: TimeoutPool[str] = TimeoutPool("control", 1)
        self._rows: dict[int, list[DeviceState]] = {}
        """By NVML's index: the GPU, then its MIG instances."""
        self._gone: dict[str, DeviceState] = {}
        """By UUID: GPUs that the driver no longer lists."""
        self._open = False
        self._closed = False
        self._all_at_once = parallel is None
        self._unavailable: Health | None = None
        self._tried_at = -inf
        self._surveyed_at = -inf
        self._starting: PoolBatch[str, int] | None = None
        self._opening: dict[int, PoolBatch[int, list[OpenDevice]]] = {}
        """By NVML's index: the batches from which a GPU's answer is still expected."""
        self._survey: PoolBatch[str, tuple[ListedGpu, ...] | int] | None = None
        self._tick_batch: PoolBatch[OpenDevice, ProbeResult | None] | None = None
        self._batches: list[tuple[str, PoolBatch[OpenDevice, ProbeResult | None]]] = []
        """Pending batches of slower groups; that of a faulty GPU stays while the others go on."""
        self._generation = 0
        """Counts lost drivers, so that a GPU that was opened too late is closed at once."""

    @property
    def versions(self) -> tuple[str | None, str | None]:
        """Versions of the driver and of the newest CUDA that it supports."""
        return self._driver.versions

    @property
    def gpm_ready_at(self) -> float | None:
        """Monotonic time from which every GPU's GPM activity can be read; None when no GPU supports GPM."""
        activities = [target.gpm for target in self._targets()]
        return max((activity.ready_at for activity in activities if activity is not None), default=None)

    def open(self, now: float) -> None:
        """Start NVML and identify the GPUs; only the first attempt is waited for."""
        clock = monotonic()
        is_first = self._tried_at == -inf
        if not self._open and self._starting is None and clock - self._tried_at >= self._timeouts.retry:
            self._tried_at = clock
            calm = not (self._tick.busy or self._others.busy or self._openers.busy)
            self._starting = self._control.start(["start"], lambda _: self._driver.start(calm=calm))
        patience = self._timeouts.start if is_first else 0.0
        if self._starting is not None:
            self._await_start(self._starting, now, patience)
        self._await_opening(now, patience)

    @property
    def devices(self) -> list[Device]:
        """The GPUs that have identified themselves, each followed by its MIG instances."""
        return [
            row.device for _, rows in sorted(self._rows.items()) for row in rows if row.target is not None
        ]

    def only(self, uuids: frozenset[str]) -> None:
        """From now on read only these GPUs and instances."""
        self._only = uuids
        for target in self._targets():
            self._narrow(target)

    def _narrow(self, target: OpenDevice) -> None:
        if self._only is not None and target.device.uuid not in self._only:
            target.narrow(frozenset())
        elif self._names is not None:
            target.narrow(self._names)

    def keep(self, names: frozenset[str]) -> None:
        """Read only these metrics of the open GPUs, for a snapshot that shows no more."""
        for target in self._targets():
            target.keep(names)

    def start(self, now: float) -> None:
        """Start this tick's readings; `collect` returns them."""
        self.open(now)
        if not self._open:
            return
        clock = monotonic()
        self._tick_batch = self._tick.start(self._targets(), lambda target: target.read("tick", now))
        if self._all_at_once:
            self._begin_groups((*_EARLY_GROUPS, *_LATE_GROUPS), now, clock)
        if self._survey is None and clock - self._surveyed_at >= self._timeouts.survey:
            self._surveyed_at = clock
            self._survey = self._control.start(["survey"], lambda _: gpu_inventory.list_gpus())

    def collect(
        self, now: float, *, tick_patience: float, patience: float = 0.0
    ) -> tuple[tuple[GpuReading, ...], list[Health]]:
        """Return the readings of the tick that `start` began.

        Args:
            now: Epoch seconds.
            tick_patience: How long to wait for a GPU before going on without it.
            patience: How long to wait for the slower groups; later values are in the next frame.
        """
        deadline = monotonic() + patience
        if self._tick_batch is not None:
            self._tick.finish(self._tick_batch, tick_patience)
            self._take(self._tick_batch, "tick")
            self._tick_batch = None
        if self._open and not self._all_at_once:
            # Threads that read at the same time would only wait for each other: for Python's lock.
            self._begin_groups(_EARLY_GROUPS, now, monotonic())
            self._wait_for_batches(deadline)
            self._begin_groups(_LATE_GROUPS, now, monotonic())
        self._wait_for_batches(deadline)
        self._take_batches()
        seen = self._driver.xids()
        rows = [row for _, group in sorted(self._rows.items()) for row in group]
        rows.extend(self._gone.values())
        readings = deduplicate_processes(self._reading(row, now, seen) for row in rows)
        health = [entry for row in rows for entry in self._health(row, now)]
        if self._unavailable is not None:
            health.insert(0, self._unavailable)
        self._look_for_changes(now)
        return readings, health

    def close(self) -> None:
        """End the threads and NVML; a call that hangs ends with the process."""
        if self._closed:
            return
        self._closed = True
        self._driver.leave(self._targets())
        calm = all([self._tick.close(), self._others.close(), self._openers.close()])
        batch = self._control.start(["close"], lambda _: self._driver.stop(calm=calm))
        self._control.finish(batch, 1.0)
        self._control.close()

    def _targets(self) -> list[OpenDevice]:
        return [row.target for group in self._rows.values() for row in group if row.target is not None]

    def _period(self, group: str) -> float | None:
        period = self._cadence.period(group)
        if group == "pcie" and period is not None and not self.waits_for_pcie:
            return max(period, _RARE_PCIE_SECONDS)
        return period

    def _wait_for_batches(self, deadline: float) -> None:
        for _, batch in self._batches:
            batch.wait(deadline - monotonic())

    def _begin_groups(self, groups: Iterable[str], now: float, clock: float) -> None:
        self._take_batches()
        for group in groups:
            self._begin(group, now, clock)

    def _begin(self, group: str, now: float, clock: float) -> None:
        period = self._cadence.slow if group in _FACT_GROUPS else self._period(group)
        if period is None or (group == "topology" and self._pci is None):
            return
        out = {
            target
            for name, batch in self._batches
            if name == group
            for target in batch.items
            if not batch.has(target)
        }
        due = {
            row.target: row
            for rows in self._rows.values()
            for row in rows
            if row.target is not None and row.target not in out and row.due(group, period, clock)
        }
        if not due:
            return
        batch = self._others.start(list(due), self._read_function(group, now))
        for target in batch.items:
            due[target].begun[group] = clock
        self._batches.append((group, batch))

    def _read_function(self, group: str, now: float) -> Callable[[OpenDevice], ProbeResult | None]:
        """Return the function that reads a group of one GPU."""
        pci = self._pci
        if group != "topology" or pci is None:
            return lambda target: target.read(group, now)
        peers = [
            PeerGpu(target.device, target.handle)
            for target in self._targets()
            if target.device.parent_uuid is None
        ]
        return lambda target: target.read_topology(now, peers, pci)

    def _take_batches(self) -> None:
        under_way = []
        for group, batch in self._batches:
            self._others.sweep(batch, self._timeouts.call)
            finished = batch.finished
            self._take(batch, group)
            if not finished:
                under_way.append((group, batch))
        self._batches = under_way

    def _take(self, batch: PoolBatch[OpenDevice, ProbeResult | None], group: str) -> None:
        for row in (row for rows in self._rows.values() for row in rows):
            if row.target is None:
                continue
            result, error = batch.results.get(row.target), batch.errors.get(row.target)
            newest = row.results.get(group)
            if result is not None and newest is not None and newest.at > result.at:
                continue  # a batch that was overtaken by a later one
            if group != "tick" and row.away_since is not None:
                row.begun.pop(group, None)  # its values are old while it is away: read again when it is back
                continue
            if group == "tick":
                row.results.pop("tick", None)
            if error is not None:
                row.errors[group] = error
            if result is not None:
                row.errors.pop(group, None)
                row.results[group] = result
                if group in _FACT_GROUPS:
                    row.device = row.device._replace(
                        facts={**row.device.facts, **result.values}, **result.details
                    )
            if group == "tick":
                row.update_after_tick()

    def _reading(self, row: DeviceState, now: float, seen: dict[str, XidSummary]) -> GpuReading:
        values: Values = {}
        read_at: dict[str, float] = {}
        for group in ("slow", "second", "gpm", "pcie"):
            result = row.results.get(group)
            period = self._period(group)
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

    def _health(self, row: DeviceState, now: float) -> Iterator[Health]:
        if row.target is None:
            if row.problem is not None:
                yield row.problem
            return
        subject = f"gpu {row.device.label}"
        stuck = [lanes.stuck_seconds(row.target) for lanes in (self._tick, self._others)]
        if any(seconds is not None for seconds in stuck):
            yield late_call_health(subject, max(seconds or 0.0 for seconds in stuck), now)
            return
        yield from row.faults(now)

    def _await_start(self, batch: PoolBatch[str, int], now: float, patience: float) -> None:
        """Continue once NVML has started, even if that is much later."""
        if not batch.wait(patience):
            self._control.sweep(batch, 0.9 * (patience or self._timeouts.call))
        if "start" in batch.errors:
            self._unavailable = Health("nvml", "failed", str(batch.errors["start"]), now)
        elif "start" not in batch.results:
            if batch.finished:
                self._unavailable = silent_driver_health(now)
            return
        elif batch.results["start"]:
            self._unavailable = library.unavailable_health(batch.results["start"], now)
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
        batch = self._openers.start([index for index in indexes if index not in self._opening], self._opened)
        self._opening.update(dict.fromkeys(batch.items, batch))

    def _opened(self, index: int) -> list[OpenDevice]:
        generation = self._generation
        targets = open_gpu(index, self._cadence)
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
        """Add a state for each GPU that has identified itself, and one for those that did not in time."""
        for batch in set(self._opening.values()):
            if not batch.wait(patience):
                self._openers.sweep(batch, 0.9 * (patience or self._timeouts.call))
        for index, batch in list(self._opening.items()):
            if index in batch.results:
                del self._opening[index]
                targets = batch.results[index]
                if self._has_moved(index, targets[0].device.uuid):
                    for target in targets:
                        target.close()
                else:
                    self._install(index, [DeviceState(target.device, target) for target in targets])
            elif index in batch.errors:
                del self._opening[index]
                self._install(index, [self._unopened_state(index, batch.errors[index], now)])
            elif batch.finished and all(row.problem is None for row in self._rows.get(index, ())):
                self._install(index, [self._unopened_state(index, None, now)])

    def _has_moved(self, index: int, uuid: str) -> bool:
        """Return whether the indices changed while a GPU was opened, so that another GPU was opened instead."""
        return any(rows[0].device.uuid == uuid for other, rows in self._rows.items() if other != index)

    def _unopened_state(self, index: int, error: Exception | None, now: float) -> DeviceState:
        """Return the state of a GPU that the driver lists but that could not be opened."""
        known = self._rows.get(index)
        device = known[0].device if known else placeholder_device(index)
        return DeviceState(device, None, unopened_gpu_health(index, error, now))

    def _install(self, index: int, rows: list[DeviceState]) -> None:
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
        """Detect a driver that went away, GPUs that came or went, and MIG instances that changed."""
        if not self._open:
            return
        for rows in self._rows.values():
            tick = rows[0].results.get("tick")
            for error in tick.failures.values() if tick is not None else ():
                if code_of(error) in DRIVER_GONE_CODES:
                    self._lose_driver(error, now)
                    return
        if self._survey is None:
            return
        self._control.sweep(self._survey, self._timeouts.call)
        if not self._survey.finished:
            return
        answer = self._survey.results.get("survey")
        self._survey = None
        if isinstance(answer, int):
            self._lose_driver(answer, now)
        elif answer is not None:
            self._reconcile(answer, now)

    def _reconcile(self, listed: tuple[ListedGpu, ...], now: float) -> None:
        """Update the states to match the driver's list: open new GPUs and leave the rest as they are."""
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

    def _drop(self, uuid: str, rows: list[DeviceState], now: float) -> None:
        """Keep a state without values for a GPU that is no longer listed."""
        for row in rows:
            if row.target is not None:
                row.target.close()
        if rows[0].device.minor_number is not None:
            self._gone[uuid] = DeviceState(rows[0].device, None, missing_gpu_health(rows[0].device, now))

    def _lose_driver(self, error: int, now: float) -> None:
        self._open = False
        self._generation += 1
        opened_late = [
            target
            for batch in set(self._opening.values())
            for opened in batch.results.values()
            for target in opened
        ]
        self._batches, self._opening, self._survey = [], {}, None
        self._driver.leave([*self._targets(), *opened_late])
        self._lose_all(code_of(error), text_of(error), now)
        self._tried_at = monotonic()

    def _lose_all(self, code: HealthCode, detail: str, now: float) -> None:
        for row in (row for rows in self._rows.values() for row in rows):
            if row.target is not None:
                row.target, row.results, row.errors = None, {}, {}
                subject = f"gpu {row.device.label}"
                row.problem = Health("nvml", code, detail, now, subject, hint=hint_for(code))


def snapshot_reader() -> GpuReader:
    """Return a reader for a single snapshot: all GPUs in parallel, GPM as soon as possible, no Xid watching."""
    cadence = detailed_cadence(MIN_GPM_SECONDS)._replace(second=_SNAPSHOT_SECONDS)
    return GpuReader(cadence, watch_xids=False, parallel=None)
