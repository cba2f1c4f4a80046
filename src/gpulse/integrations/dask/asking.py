"""Asks people's own metrics, so that one that raises or hangs costs nobody else anything."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from time import monotonic
from types import TracebackType
from typing import Any

from gpulse.integrations.dask.custom import CustomMetric
from gpulse.integrations.dask.rows import Cell, plain
from gpulse.sources.lanes import Lanes, Run

_LATE_SECONDS = 1.0
"""An answer that takes longer, and longer than a measurement, is worth a word."""


class CustomReader:
    """Calls each function on a thread of its own, at most once at a time; a measurement waits half its interval for them."""

    def __init__(
        self,
        metrics: Sequence[CustomMetric],
        worker: Any,
        *,
        interval_seconds: float,
        report: Callable[[str], None],
    ) -> None:
        """Prepare to ask.

        Args:
            metrics: What is asked.
            worker: The dask worker that they get.
            interval_seconds: Time between two measurements.
            report: Told once of each way in which a metric fails.
        """
        self.handles: list[Any] = []
        """Of the worker's GPUs, None for one that has none."""
        self._metrics = {metric.name: metric for metric in metrics}
        self._worker = worker
        self._patience = interval_seconds / 2
        self._late_seconds = max(_LATE_SECONDS, interval_seconds)
        self._report = report
        self._reported: set[tuple[str, str]] = set()
        self._lanes: Lanes[str] = Lanes("custom", len(metrics))
        self._runs: dict[str, tuple[Run[str, Cell], float]] = {}
        """What is being asked, and since when."""

    def cells(self) -> list[Cell]:
        """One answer a metric, None for those that failed or are late; a late answer counts when it comes."""
        clock = monotonic()
        for name in self._metrics.keys() - self._runs.keys():
            self._runs[name] = self._lanes.start([name], self._ask), clock
        for run, _ in self._runs.values():
            run.wait(clock + self._patience - monotonic())
        return [self._answer(name) for name in self._metrics]

    def close(self) -> None:
        """End the threads; one that hangs dies with the process."""
        self._lanes.close(0.2)

    def _answer(self, name: str) -> Cell:
        run, since = self._runs[name]
        if not run.finished:
            if monotonic() - since > self._late_seconds:
                self._failed(name, None)
            return None
        del self._runs[name]
        if name in run.errors:
            self._failed(name, run.errors[name])
        return run.results.get(name)

    def _ask(self, name: str) -> Cell:
        try:
            return self._asked(self._metrics[name])
        except (SystemExit, KeyboardInterrupt) as error:  # which would end the thread without a word
            raise RuntimeError(f"it raised {error!r}") from error

    def _asked(self, metric: CustomMetric) -> Cell:
        if not metric.per_device:
            return plain(metric(self._worker, list(self.handles)))
        return [None if handle is None else plain(metric(self._worker, handle)) for handle in self.handles]

    def _failed(self, name: str, error: Exception | None) -> None:
        kind = "late" if error is None else type(error).__name__
        if (name, kind) in self._reported:
            return
        self._reported.add((name, kind))
        if error is None:
            self._report(
                f"custom metric {name!r} takes longer than {self._late_seconds:g} s and is recorded as missing meanwhile"
            )
            return
        lines = "".join(traceback.format_exception(type(error), error, _theirs(error.__traceback__)))
        self._report(f"custom metric {name!r} fails and is recorded as missing:\n{lines}")


def _theirs(trace: TracebackType | None) -> TracebackType | None:
    """Where a traceback comes to people's own code."""
    while trace is not None and trace.tb_frame.f_globals.get("__name__", "").startswith("gpulse."):
        trace = trace.tb_next
    return trace
