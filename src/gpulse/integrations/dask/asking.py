"""Asks people's own metrics, so that one that raises or hangs costs nobody else anything."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

from gpulse.integrations.dask.custom import CustomMetric
from gpulse.integrations.dask.rows import Cell, plain
from gpulse.sources.lanes import Lanes

_SHORTEST_PATIENCE = 1.0


class CustomReader:
    """Calls the functions on a thread beside that of the measurements."""

    def __init__(
        self,
        metrics: Sequence[CustomMetric],
        worker: Any,
        handles: Sequence[Any],
        *,
        interval_seconds: float,
        report: Callable[[str], None],
    ) -> None:
        """Prepare to ask.

        Args:
            metrics: What is asked.
            worker: The dask worker that they get.
            handles: Of the worker's GPUs.
            interval_seconds: Time between two measurements, for which an answer is waited.
            report: Told once of each way in which a metric fails.
        """
        self._metrics = {metric.name: metric for metric in metrics}
        self._worker = worker
        self._handles = list(handles)
        self._patience = max(_SHORTEST_PATIENCE, interval_seconds)
        self._report = report
        self._reported: set[tuple[str, str]] = set()
        self._lanes: Lanes[str] = Lanes("custom", 1)

    def cells(self) -> list[Cell]:
        """One answer a metric, None for those that failed."""
        if not self._metrics:
            return []
        run = self._lanes.start(list(self._metrics), self._ask)
        self._lanes.finish(run, self._patience)
        for name in self._metrics.keys() - run.results.keys():
            self._failed(name, run.errors.get(name))
        return [run.results.get(name) for name in self._metrics]

    def close(self) -> None:
        """End the thread; one that hangs dies with the process."""
        self._lanes.close(0.2)

    def _ask(self, name: str) -> Cell:
        metric = self._metrics[name]
        if not metric.per_device:
            return plain(metric(self._worker, list(self._handles)))
        return [plain(metric(self._worker, handle)) for handle in self._handles]

    def _failed(self, name: str, error: Exception | None) -> None:
        kind = "late" if error is None else type(error).__name__
        if (name, kind) in self._reported:
            return
        self._reported.add((name, kind))
        if error is None:
            self._report(
                f"custom metric {name!r} does not come back within {self._patience:g} s and is recorded as missing"
            )
            return
        lines = "".join(traceback.format_exception(type(error), error, _theirs(error.__traceback__)))
        self._report(f"custom metric {name!r} fails and is recorded as missing:\n{lines}")


def _theirs(trace: TracebackType | None) -> TracebackType | None:
    """Where a traceback comes to people's own code."""
    while trace is not None and trace.tb_frame.f_globals.get("__name__", "").startswith("gpulse."):
        trace = trace.tb_next
    return trace
