"""All GPUs of a node, tick by tick: what is due is read, what is sick is kept apart, what is lost is looked for."""

from __future__ import annotations

from time import monotonic
from typing import Any, NamedTuple

from gpulse.model.device import Device
from gpulse.model.frame import GpuReading
from gpulse.model.health import Code, Health
from gpulse.model.metric import Values
from gpulse.sources.lanes import Lanes, Run
from gpulse.sources.nvml import inventory, library, probes
from gpulse.sources.nvml.events import XidWatcher
from gpulse.sources.nvml.library import DRIVER_GONE, NVMLError, code_of, hint_for, text_of
from gpulse.sources.nvml.target import Result, Target, open_gpu, placeholder

_RETRY_SECONDS = 2.0
_SURVEY_SECONDS = 10.0
_SLOW_CALL_SECONDS = 2.0
_PARALLEL = 8
_ONCE = float("inf")


class Cadence(NamedTuple):
    """How often each group of readings is taken, in seconds; the tick itself is the caller's."""

    second: float = 1.0
    gpm: float | None = 1.0
    """None leaves GPM alone."""
    slow: float = 30.0

    def period(self, group: str) -> float | None:
        """The period of one group, None when it is switched off."""
        return {"second": self.second, "gpm": self.gpm, "slow": self.slow, "facts": _ONCE}[group]


class _Row:
    """One line of the machine: a GPU or MIG instance, whether it answers or not."""

    def __init__(self, device: Device, target: Target | None, trouble: Health | None = None) -> None:
        self.device = device
        self.target = target
        self.trouble = trouble
        """Why there is no target."""
        self.results: dict[str, Result] = {}


class GpuReader:
    """Reads every GPU without letting one of them delay or blank the others."""

    def __init__(
        self, cadence: Cadence | None = None, *, watch_xids: bool = True, patience: float = 10.0
    ) -> None:
        self._cadence = cadence or Cadence()
        self._watch_xids = watch_xids
        self._patience = patience
        """How long starting NVML and naming the GPUs may take."""
        self._tick: Lanes[Target] = Lanes("tick", 1)
        self._others: Lanes[Target] = Lanes("slow", _PARALLEL)
        self._control: Lanes[str] = Lanes("control", 1)
        self._rows: list[_Row] = []
        self._open = False
        self._unavailable: Health | None = None
        self._tried_at: float | None = None
        self._surveyed_at = 0.0
        self._survey: Run[str, tuple[str | None, ...] | int] | None = None
        self._signature: tuple[str | None, ...] = ()
        self._tick_run: Run[Target, Result | None] | None = None
        self._rounds: dict[str, Run[Target, Result | None]] = {}
        self._started_at: dict[str, float] = {}
        self._xids: XidWatcher | None = None
        self.versions: tuple[str | None, str | None] = (None, None)
        """Of the driver, and of the newest CUDA it supports."""

    @property
    def gpm_ready_at(self) -> float | None:
        """The monotonic time from which on every GPU's GPM activity can be read, None when none has it."""
        times = [
            row.target.gpm.ready_at
            for row in self._rows
            if row.target is not None and row.target.gpm is not None
        ]
        return max(times, default=None)

    def open(self, now: float) -> None:
        """Start NVML and name the GPUs, unless that was done or has just failed."""
        if not self._open and (self._tried_at is None or monotonic() - self._tried_at >= _RETRY_SECONDS):
            self._open_all(now)

    def start(self, now: float) -> None:
        """Begin this tick's readings; `collect` brings them home."""
        self.open(now)
        if not self._open:
            return
        clock = monotonic()
        targets = [row.target for row in self._rows if row.target is not None]
        self._tick_run = self._tick.start(targets, lambda target: target.read("tick", now))
        for group in ("facts", "second", "slow", "gpm"):
            self._begin(group, targets, now, clock)
        if self._survey is None and clock - self._surveyed_at >= _SURVEY_SECONDS:
            self._surveyed_at = clock
            self._survey = self._control.start(["survey"], lambda _: inventory.survey())

    def collect(
        self, now: float, *, tick_patience: float, patience: float = 0.0
    ) -> tuple[tuple[GpuReading, ...], list[Health]]:
        """The readings of the tick that `start` began.

        Args:
            now: Epoch seconds.
            tick_patience: How long to wait for a GPU before going on without it.
            patience: How long to wait for the slower groups; 0 takes what is there.
        """
        if self._tick_run is not None:
            self._tick.finish(self._tick_run, tick_patience)
            self._take(self._tick_run, "tick")
        for group, run in list(self._rounds.items()):
            if patience > 0:
                self._others.finish(run, patience)
            else:
                self._others.sweep(run, _SLOW_CALL_SECONDS)
            self._take(run, group)
            if run.finished:
                del self._rounds[group]
        xids = self._xid_values()
        readings = tuple(self._reading(row, now, xids) for row in self._rows)
        health = [entry for row in self._rows for entry in self._health(row, now)]
        if self._unavailable is not None:
            health.insert(0, self._unavailable)
        self._look_for_changes(now)
        self._tick_run = None
        return readings, health

    def close(self) -> None:
        """End the threads and NVML; a call that hangs is left to die with the process."""
        if self._xids is not None:
            self._xids.close()
            self._xids = None
        calm = all([self._tick.close(), self._others.close(), self._control.close()])
        self._shut(calm=calm)

    def _begin(self, group: str, targets: list[Target], now: float, clock: float) -> None:
        period = self._cadence.period(group)
        started = self._started_at.get(group)
        if (
            period is None
            or group in self._rounds
            or (started is not None and clock - started < period * 0.9)
        ):
            return
        if group == "gpm" and clock < (self.gpm_ready_at or 0.0):
            return
        self._started_at[group] = clock
        wanted = [
            t
            for t in targets
            if (t.gpm is not None if group == "gpm" else t.probes[group] or group == "second")
        ]
        self._rounds[group] = self._others.start(wanted, lambda target: target.read(group, now))

    def _take(self, run: Run[Target, Any], group: str) -> None:
        for row in self._rows:
            if row.target is not None and (result := run.results.get(row.target)) is not None:
                row.results[group] = result
                if group == "facts":
                    row.device = row.device._replace(facts=result.values)
            elif group == "tick":
                row.results.pop("tick", None)

    def _reading(self, row: _Row, now: float, xids: dict[str, Values]) -> GpuReading:
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
        if row.device.uuid in xids:
            values.update(xids[row.device.uuid])
        processes = row.results["second"].processes if "second" in read_at else None
        return GpuReading(row.device, values, processes, read_at)

    def _health(self, row: _Row, now: float) -> list[Health]:
        subject = f"gpu {row.device.label}"
        if row.target is None:
            return [] if row.trouble is None else [row.trouble]
        for lanes in (self._tick, self._others):
            seconds = lanes.stuck_seconds(row.target)
            if seconds is not None:
                detail = f"a call to the driver has not come back for {seconds:.0f} s"
                return [
                    Health(
                        "nvml",
                        "not_answering",
                        detail,
                        now - seconds,
                        subject,
                        hint=hint_for("not_answering"),
                    )
                ]
        by_error: dict[int, list[str]] = {}
        for result in row.results.values():
            for name, error in probes.passing(result.failures).items():
                by_error.setdefault(error, []).append(name)
        for name, error in row.target.unsupported.items():
            by_error.setdefault(error, []).append(name)
        return [
            Health(
                "nvml",
                code_of(error),
                text_of(error),
                now,
                subject,
                tuple(sorted(names)),
                hint_for(code_of(error)),
            )
            for error, names in by_error.items()
        ]

    def _xid_values(self) -> dict[str, Values]:
        if self._xids is None:
            return {}
        values: dict[str, Values] = {
            row.device.uuid: {"xid_errors_total": 0} for row in self._rows if row.device.parent_uuid is None
        }
        for xid in self._xids.seen():
            known = values.setdefault(xid.uuid, {"xid_errors_total": 0})
            known["xid_errors_total"] += 1
            known["xid_last_code"] = xid.code
            known["xid_last_timestamp_seconds"] = xid.time
        return values

    def _open_all(self, now: float) -> None:
        """Start NVML and name every GPU; what is not there any more keeps its row, as a gap."""
        self._tried_at = monotonic()
        run: Run[str, tuple[int, tuple[str | None, str | None]] | int] = self._control.start(
            ["open"], lambda _: inventory.start()
        )
        self._control.finish(run, self._patience / 2)
        answer = run.results.get("open")
        if answer is None or isinstance(answer, int):
            self._unavailable = _silent(now) if answer is None else library.unavailable(answer, now)
            self._lose_all(self._unavailable.code, self._unavailable.detail, now)
            return
        count, self.versions = answer
        self._unavailable = None
        rows = self._named(count, now)
        self._open = True
        self._signature = tuple(row.device.uuid if row.target else None for row in rows)
        self._rows = rows + self._missing(rows, now)
        self._surveyed_at = monotonic()
        self._started_at, self._rounds = {}, {}
        if self._watch_xids:
            self._watch()

    def _named(self, count: int, now: float) -> list[_Row]:
        """A row for each GPU that the driver lists, in its order, MIG instances after their GPU."""
        openers: Lanes[int] = Lanes("open", _PARALLEL)
        run = openers.start(range(count), open_gpu)
        openers.finish(run, self._patience / 2)
        openers.close(0.1)
        known = {row.device.index: row.device for row in self._rows if row.device.parent_uuid is None}
        rows: list[_Row] = []
        for index in range(count):
            if index in run.results:
                rows.extend(_Row(target.device, target) for target in run.results[index])
            else:
                trouble = _nameless(index, run.errors.get(index), now)
                rows.append(_Row(known.get(index, placeholder(index)), None, trouble))
        return rows

    def _missing(self, rows: list[_Row], now: float) -> list[_Row]:
        """A row for each GPU that was here before and is not listed any more."""
        listed = {row.device.uuid for row in rows}
        return [
            _Row(row.device, None, _gone(row.device, now))
            for row in self._rows
            if row.device.uuid not in listed
            and row.device.parent_uuid is None
            and row.device.minor_number is not None
        ]

    def _watch(self) -> None:
        try:
            self._xids = XidWatcher(
                (r.device.uuid, r.target.handle) for r in self._rows if r.target and not r.device.parent_uuid
            )
        except NVMLError:  # no events on this driver: xid readings stay unknown
            self._xids = None

    def _look_for_changes(self, now: float) -> None:
        """Notice a driver that went away, GPUs that came or went, and MIG that was set up anew."""
        if not self._open:
            return
        for row in self._rows:
            tick = row.results.get("tick")
            for error in tick.failures.values() if tick is not None else ():
                if code_of(error) in DRIVER_GONE:
                    self._restart(now, code_of(error), text_of(error))
                    return
        if self._survey is None:
            return
        self._control.sweep(self._survey, _SLOW_CALL_SECONDS)
        if not self._survey.finished:
            return
        answer = self._survey.results.get("survey")
        self._survey = None
        if isinstance(answer, int):
            self._restart(now, code_of(answer), text_of(answer))
        elif answer is not None and answer != self._signature:
            self._restart(now, "gpu_lost", "the GPUs of this machine changed")
            self._tried_at = None

    def _restart(self, now: float, code: Code, detail: str) -> None:
        calm = not any(
            self._tick.stuck_seconds(r.target) or self._others.stuck_seconds(r.target)
            for r in self._rows
            if r.target
        )
        if self._xids is not None:
            self._xids.close()
            self._xids = None
        self._shut(calm=calm)
        self._lose_all(code, detail, now)
        self._tried_at = monotonic()

    def _shut(self, *, calm: bool) -> None:
        if not self._open:
            return
        self._open = False
        self._rounds = {}
        if calm:
            for row in self._rows:
                if row.target is not None:
                    row.target.close()
            library.stop()

    def _lose_all(self, code: Code, detail: str, now: float) -> None:
        for row in self._rows:
            if row.target is not None:
                row.target, row.results = None, {}
                row.trouble = Health(
                    "nvml", code, detail, now, f"gpu {row.device.label}", hint=hint_for(code)
                )


def _nameless(index: int, error: Exception | None, now: float) -> Health:
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
    detail = "the driver no longer lists this GPU"
    return Health("nvml", "gpu_lost", detail, now, f"gpu {device.label}", hint=hint_for("gpu_lost"))
