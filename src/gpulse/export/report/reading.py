"""Reads a session file of any age and size into a report."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpulse.errors import RecordingError, file_hint, install_command
from gpulse.export.report.gaps import Silence
from gpulse.export.report.model import GpuReport, NodeReport, Report
from gpulse.export.report.moments import epoch
from gpulse.export.report.scanner import FRAMES, members
from gpulse.export.report.series import Thinned
from gpulse.export.session.quantities import QUANTITIES
from gpulse.export.session.statistics import Distribution

Array = NDArray[np.float64]

_CELLS_AT_ONCE = 65_536
_LEAST_CELLS = 64
"""What a frame counts for at least: one of few GPUs takes memory too."""
_MOST_GPUS = 65_536
_LARGEST = 1e15
_NEWEST_VERSION = 1
_KEPT = frozenset(
    {
        "session_name",
        "start_time",
        "end_time",
        "interval_ms",
        "labels",
        "interruptions",
        "nodes",
        "findings",
        "events",
        "summary_by_device",
    }
)


def read_report(path: str | os.PathLike[str]) -> Report:
    """Read a session file: JSON in gswarm-profiler's layout, or our JSON lines.

    Raises:
        RecordingError: It cannot be read, is none, is cut off, or has no frames.
    """
    name = os.path.basename(os.fspath(path))
    try:
        with open(path, "rb") as file:
            reader = _Reader(name)
            for key, value in members(file, name):
                reader.take(key, value)
            return reader.report()
    except OSError as error:
        raise RecordingError(
            f"cannot read {os.fspath(path)}: {error.strerror}", hint=file_hint(error)
        ) from error


class _Reader:
    """What was read so far."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._about: dict[str, Any] = {}
        self._columns: dict[str, int] = {}
        self._ids: list[str] | None = None
        self._places: NDArray[np.int64] = np.empty(0, np.int64)
        self._rows: list[tuple[float | None, NDArray[np.int64], dict[str, Array]]] = []
        self._rows_size = 0
        self._of = {quantity.name: Distribution(is_percent=quantity.is_percent) for quantity in QUANTITIES}
        self._silence = Silence()
        self._series: Thinned | None = None
        self._interval: float | None = None
        self._heard: NDArray[np.int64] = np.zeros(0, np.int64)
        self._frames = 0
        self._first: float | None = None
        self._last: float | None = None
        self._strange = 0

    def take(self, key: str, value: Any) -> None:
        """One member of the document."""
        if key == FRAMES:
            if not isinstance(value, Mapping):
                raise self._wrong("something in `frames` is not a frame")
            self._take_frame(value)
        elif key == "format":
            self._check_version(value)
        elif key in _KEPT:
            self._about[key] = value

    def report(self) -> Report:
        """Everything that was read."""
        self._flush()
        if not self._frames or self._series is None or self._first is None or self._last is None:
            raise RecordingError(
                f"{self._name} has no frames",
                hint="was the session stopped before an agent delivered anything?",
            )
        interval = self._interval or 1.0
        gpus = self._gpus()
        end = epoch(self._about.get("end_time"))
        end = self._last + interval if end is None or end < self._last else end
        start = epoch(self._about.get("start_time"))
        start = self._first if start is None or start > self._first else start
        start, end = min(start, end), max(start, end)  # times of frames may run backwards
        return Report(
            name=_text(self._about.get("session_name")) or os.path.splitext(self._name)[0],
            start=start,
            end=end,
            interval_seconds=interval,
            frames=self._frames,
            gpus=tuple(gpus),
            nodes=tuple(self._nodes(gpus)),
            gaps=self._silence.finish(min(end, self._last + interval), self._heard),
            quantities=tuple(quantity for quantity in QUANTITIES if self._series.has(quantity.name)),
            labels=_texts(self._about.get("labels")),
            findings=tuple(_objects(self._about.get("findings"))),
            events=tuple(_objects(self._about.get("events"))),
            interruptions=tuple(_objects(self._about.get("interruptions"))),
            strange_values=self._strange,
            series=self._series,
        )

    def _check_version(self, value: Any) -> None:
        version = value.get("version") if isinstance(value, Mapping) else None
        if isinstance(version, int) and version > _NEWEST_VERSION:
            raise RecordingError(
                f"{self._name} is of version {version}, and this gpulse reads up to {_NEWEST_VERSION}",
                hint=f"install a newer gpulse: {install_command(upgrade=True)}",
            )

    def _take_frame(self, frame: Mapping[str, Any]) -> None:
        count = self._frames + len(self._rows) + 1
        ids = frame.get("gpu_id")
        if not isinstance(ids, list) or not all(isinstance(name, str) for name in ids):
            raise self._wrong(f"frame {count} has no list of GPUs in `gpu_id`")
        if ids != self._ids:
            self._know(ids, count)
        values = {}
        for quantity in QUANTITIES:
            raw = frame.get(quantity.name)
            if raw is not None:
                if not isinstance(raw, list) or len(raw) != len(ids):
                    has = f"{len(raw)} values" if isinstance(raw, list) else "no list"
                    raise self._wrong(f"frame {count} has {len(ids)} GPUs and {has} in `{quantity.name}`")
                values[quantity.name] = self._numbers(raw)
        self._rows.append((epoch(frame.get("time")), self._places, values))
        self._rows_size += max(_LEAST_CELLS, len(self._columns))
        if self._rows_size >= _CELLS_AT_ONCE:
            self._flush()

    def _know(self, ids: list[str], count: int) -> None:
        if len(set(ids)) != len(ids):
            raise self._wrong(f"frame {count} has a GPU twice in `gpu_id`")
        for name in ids:
            self._columns.setdefault(name, len(self._columns))
        if len(self._columns) > _MOST_GPUS:
            raise self._wrong(f"it has more than {_MOST_GPUS} GPUs")
        self._ids = ids
        self._places = np.array([self._columns[name] for name in ids], np.int64)

    def _numbers(self, raw: list[Any]) -> Array:
        try:
            found: Array = np.array(raw, np.float64)  # null becomes NaN, and text that is a number a number
        except (ValueError, TypeError, OverflowError):
            found = np.array([_number(value) for value in raw], np.float64)
            self._strange += int(np.isnan(found).sum()) - sum(value is None for value in raw)
        if found.ndim != 1:
            found = np.full(len(raw), np.nan)
        found[~(np.abs(found) <= _LARGEST)] = np.nan  # infinities, and what no GPU can do
        return found

    def _flush(self) -> None:
        if not self._rows:
            return
        rows, self._rows, self._rows_size = self._rows, [], 0
        gpus = len(self._columns)
        times = self._times([time for time, _, _ in rows])
        matrices = {}
        known = np.zeros((len(rows), gpus), np.bool_)
        for quantity in QUANTITIES:
            if any(quantity.name in values for _, _, values in rows):
                matrix = np.full((len(rows), gpus), np.nan)
                for row, (_, places, values) in enumerate(rows):
                    if quantity.name in values:
                        matrix[row, places] = values[quantity.name]
                matrices[quantity.name] = matrix
                self._of[quantity.name].add(matrix)
                known |= ~np.isnan(matrix)
        self._heard = np.concatenate((self._heard, np.zeros(gpus - len(self._heard), np.int64)))
        self._heard += known.sum(axis=0)
        self._silence.add(*self._with_breaks(times, known))
        if self._series is None:
            is_ours = "interval_ms" in self._about
            width = self._interval or 1.0
            self._series = Thinned(width if is_ours else 2 * width)
        self._series.add(times, matrices)
        self._frames += len(rows)
        self._last = float(times.max() if self._last is None else max(self._last, times.max()))

    def _times(self, found: Sequence[float | None]) -> Array:
        """The frames' times; one without a time comes one interval after the one before."""
        times = np.array([math.nan if time is None else time for time in found])
        if self._interval is None:
            self._interval = self._pace(times)
        before = self._last
        if before is None:
            start = epoch(self._about.get("start_time"))
            before = (start or 0.0) - self._interval
        for row in np.flatnonzero(np.isnan(times)):
            times[row] = (times[row - 1] if row else before) + self._interval
        self._first = float(times.min() if self._first is None else min(self._first, times.min()))
        return times

    def _pace(self, times: Array) -> float:
        told = _number(self._about.get("interval_ms"))
        if 1 <= told <= 86_400_000:
            return told / 1000
        steps = np.diff(times[~np.isnan(times)])
        steps = steps[steps > 0]
        return max(0.001, float(np.median(steps))) if len(steps) else 1.0

    def _with_breaks(self, times: Array, known: NDArray[np.bool_]) -> tuple[Array, NDArray[np.bool_]]:
        """With a silent moment where frames are missing altogether, as when the head was down."""
        pace = self._interval or 1.0
        before = times[0] if self._last is None else self._last
        breaks = np.flatnonzero(np.diff(times, prepend=before) > 2.5 * pace)
        if not len(breaks):
            return times, known
        ends = np.where(breaks > 0, times[breaks - 1], before) + pace
        return np.insert(times, breaks, ends), np.insert(known, breaks, values=False, axis=0)

    def _gpus(self) -> list[GpuReport]:
        summary = self._about.get("summary_by_device")
        summary = summary if isinstance(summary, Mapping) else {}
        return [self._gpu(name, column, summary.get(name)) for name, column in self._columns.items()]

    def _gpu(self, name: str, column: int, summary: Any) -> GpuReport:
        node, label, model = split_id(name)
        energy = _number(summary.get("energy_joules")) if isinstance(summary, Mapping) else math.nan
        found = {quantity.name: self._of[quantity.name].of(column) for quantity in QUANTITIES}
        return GpuReport(
            name,
            node,
            label,
            model,
            availability_ratio=int(self._heard[column]) / self._frames,
            energy_joules=energy if 0 <= energy <= _LARGEST else None,
            statistics={key: value for key, value in found.items() if value is not None},
        )

    def _nodes(self, gpus: Sequence[GpuReport]) -> list[NodeReport]:
        columns: dict[str, list[int]] = {}
        for column, gpu in enumerate(gpus):
            columns.setdefault(gpu.node, []).append(column)
        return [self._node(name, places, gpus) for name, places in columns.items()]

    def _node(self, name: str, places: list[int], gpus: Sequence[GpuReport]) -> NodeReport:
        found = {quantity.name: self._of[quantity.name].of(places) for quantity in QUANTITIES}
        energies = [gpus[place].energy_joules for place in places]
        known = [energy for energy in energies if energy is not None]
        return NodeReport(
            name,
            gpus=tuple(places),
            availability_ratio=float(self._heard[places].mean()) / self._frames,
            energy_joules=sum(known) if len(known) == len(energies) else None,
            statistics={key: value for key, value in found.items() if value is not None},
        )

    def _wrong(self, why: str) -> RecordingError:
        return RecordingError(
            f"{self._name} is not a session file: {why}", hint="gpulse session export NAME writes one"
        )


def split_id(name: str) -> tuple[str, str, str]:
    """Node, label and model of `node:3:NVIDIA H200`; of anything else as much as can be told."""
    node, _, rest = name.partition(":")
    labels: list[str] = []
    while True:
        label, colon, after = rest.partition(":")
        if not label.isdecimal():
            return node, ":".join(labels), rest
        labels.append(label)
        if not colon:
            return node, ":".join(labels), ""
        rest = after


def _number(raw: Any) -> float:
    if isinstance(raw, str | int | float):
        try:
            return float(raw)
        except (ValueError, OverflowError):
            return math.nan
    return math.nan


def _text(raw: Any) -> str:
    return raw[:1000] if isinstance(raw, str) else ""


def _texts(raw: Any) -> dict[str, str]:
    return {str(key): str(value) for key, value in raw.items()} if isinstance(raw, Mapping) else {}


def _objects(raw: Any) -> list[Mapping[str, Any]]:
    return [item for item in raw if isinstance(item, Mapping)] if isinstance(raw, list) else []
