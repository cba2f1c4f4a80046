"""Read a session file of any size and version into a report."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpulse.errors import RecordingError, file_hint, install_command
from gpulse.export.session_file.frame_grid import QUANTITIES
from gpulse.export.session_file.gpu_statistics import Distribution
from gpulse.export.session_report.session_figures import (
    DataGap,
    DownsampledSeries,
    GpuFigures,
    NodeFigures,
    SessionReport,
)
from gpulse.export.session_report.session_json_reader import FRAMES_MEMBER, parse_epoch, read_members

Array = NDArray[np.float64]

_BATCH_CELLS = 65_536
_MIN_FRAME_CELLS = 64
"""Minimum number of cells that a frame counts for, since frames with few GPUs take memory too."""
MAX_GPUS = 65_536
_MAX_VALUE = 1e15
_MAX_FORMAT_VERSION = 1
_MAX_GAPS_OF_GPU = 2000
_MAX_GAP_RATIO = 0.25
"""A GPU with more gaps per frame than this is sampled more slowly than the session's interval."""
_MEMBERS = frozenset(
    {
        "session_name",
        "start_time",
        "end_time",
        "interval_ms",
        "labels",
        "interruptions",
        "findings",
        "events",
        "summary_by_device",
    }
)


def read_report(path: str | os.PathLike[str]) -> SessionReport:
    """Read a session file: JSON in gswarm-profiler's layout, or JSON lines.

    Raises:
        RecordingError: The file cannot be read, is not a session file, is incomplete, or has no frames.
    """
    name = os.path.basename(os.fspath(path))
    try:
        with open(path, "rb") as file:
            reader = _ReportBuilder(name)
            for key, value in read_members(file, name):
                reader.take(key, value)
            return reader.report()
    except OSError as error:
        raise RecordingError(
            f"cannot read {os.fspath(path)}: {error.strerror}", hint=file_hint(error)
        ) from error


class _ReportBuilder:
    """Accumulates the frames of a session file."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._header: dict[str, Any] = {}
        self._columns: dict[str, int] = {}
        self._ids: list[str] | None = None
        self._columns_of_frame: NDArray[np.int64] = np.empty(0, np.int64)
        self._rows: list[tuple[float | None, NDArray[np.int64], dict[str, Array]]] = []
        self._rows_size = 0
        self._distributions = {
            quantity.name: Distribution(is_percent=quantity.is_percent) for quantity in QUANTITIES
        }
        self._gaps_by_gpu = _GapDetector()
        self._series: DownsampledSeries | None = None
        self._interval: float | None = None
        self._frames_known: NDArray[np.int64] = np.zeros(0, np.int64)
        self._frames = 0
        self._first: float | None = None
        self._last: float | None = None
        self._strange_values = 0

    def take(self, key: str, value: Any) -> None:
        """Add one member of the document."""
        if key == FRAMES_MEMBER:
            if not isinstance(value, Mapping):
                raise self._error("an item of `frames` is not a JSON object")
            self._take_frame(value)
        elif key == "format":
            self._check_version(value)
        elif key in _MEMBERS:
            self._header[key] = value

    def report(self) -> SessionReport:
        """Return the report on everything that has been read."""
        self._flush()
        if not self._frames or self._series is None or self._first is None or self._last is None:
            raise RecordingError(
                f"{self._name} has no frames",
                hint="check whether the session was stopped before an agent had sent any frames",
            )
        interval = self._interval or 1.0
        gpus = self._gpus()
        end = parse_epoch(self._header.get("end_time"))
        end = self._last + interval if end is None or end < self._last else end
        start = parse_epoch(self._header.get("start_time"))
        start = self._first if start is None or start > self._first else start
        start, end = min(start, end), max(start, end)  # times of frames may run backwards
        return SessionReport(
            name=_text(self._header.get("session_name")) or os.path.splitext(self._name)[0],
            start=start,
            end=end,
            interval_seconds=interval,
            frames=self._frames,
            gpus=tuple(gpus),
            nodes=tuple(self._nodes(gpus)),
            gaps=self._gaps_by_gpu.finish(min(end, self._last + interval), self._frames_known),
            quantities=tuple(quantity for quantity in QUANTITIES if self._series.has(quantity.name)),
            labels=_texts(self._header.get("labels")),
            findings=tuple(_objects(self._header.get("findings"))),
            events=tuple(_objects(self._header.get("events"))),
            interruptions=tuple(_objects(self._header.get("interruptions"))),
            strange_values=self._strange_values,
            series=self._series,
        )

    def _check_version(self, value: Any) -> None:
        version = value.get("version") if isinstance(value, Mapping) else None
        if isinstance(version, int) and version > _MAX_FORMAT_VERSION:
            raise RecordingError(
                f"cannot read {self._name}: its format is version {version}, "
                f"and this version of gpulse supports versions up to {_MAX_FORMAT_VERSION}",
                hint=f"install a newer gpulse: {install_command(upgrade=True)}",
            )

    def _take_frame(self, frame: Mapping[str, Any]) -> None:
        count = self._frames + len(self._rows) + 1
        ids = frame.get("gpu_id")
        if not isinstance(ids, list) or not all(isinstance(name, str) for name in ids):
            raise self._error(f"frame {count} has no list of GPUs in `gpu_id`")
        if ids != self._ids:
            self._add_gpus(ids, count)
        values = {}
        for quantity in QUANTITIES:
            raw = frame.get(quantity.name)
            if raw is not None:
                if not isinstance(raw, list) or len(raw) != len(ids):
                    has = f"has {_count(raw, 'value')}" if isinstance(raw, list) else "is not a list"
                    raise self._error(f"frame {count} has {_count(ids, 'GPU')}, but `{quantity.name}` {has}")
                values[quantity.name] = self._numbers(raw)
        self._rows.append((parse_epoch(frame.get("time")), self._columns_of_frame, values))
        self._rows_size += max(_MIN_FRAME_CELLS, len(self._columns))
        if self._rows_size >= _BATCH_CELLS:
            self._flush()

    def _add_gpus(self, ids: list[str], count: int) -> None:
        if len(set(ids)) != len(ids):
            raise self._error(f"frame {count} lists a GPU twice in `gpu_id`")
        for name in ids:
            self._columns.setdefault(name, len(self._columns))
        if len(self._columns) > MAX_GPUS:
            raise self._error(f"it has more than {MAX_GPUS} GPUs")
        self._ids = ids
        self._columns_of_frame = np.array([self._columns[name] for name in ids], np.int64)

    def _numbers(self, raw: list[Any]) -> Array:
        try:
            found: Array = np.array(raw, np.float64)  # null becomes NaN, and numeric text a number
        except (ValueError, TypeError, OverflowError):
            found = np.array([_number(value) for value in raw], np.float64)
            self._strange_values += int(np.isnan(found).sum()) - sum(value is None for value in raw)
        if found.ndim != 1:
            found = np.full(len(raw), np.nan)
        found[~(np.abs(found) <= _MAX_VALUE)] = np.nan  # infinities and impossible values
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
                self._distributions[quantity.name].add(matrix)
                known |= ~np.isnan(matrix)
        self._frames_known = np.concatenate(
            (self._frames_known, np.zeros(gpus - len(self._frames_known), np.int64))
        )
        self._frames_known += known.sum(axis=0)
        self._gaps_by_gpu.add(*self._with_breaks(times, known))
        if self._series is None:
            is_ours = "interval_ms" in self._header
            width = self._interval or 1.0
            self._series = DownsampledSeries(width if is_ours else 2 * width)
        self._series.add(times, matrices)
        self._frames += len(rows)
        self._last = float(times.max() if self._last is None else max(self._last, times.max()))

    def _times(self, found: Sequence[float | None]) -> Array:
        """Return the frames' times; a frame without a time is placed one interval after the previous frame."""
        times = np.array([math.nan if time is None else time for time in found])
        if self._interval is None:
            self._interval = self._measure_interval(times)
        before = self._last
        if before is None:
            start = parse_epoch(self._header.get("start_time"))
            before = (start or 0.0) - self._interval
        for row in np.flatnonzero(np.isnan(times)):
            times[row] = (times[row - 1] if row else before) + self._interval
        self._first = float(times.min() if self._first is None else min(self._first, times.min()))
        return times

    def _measure_interval(self, times: Array) -> float:
        interval_ms = _number(self._header.get("interval_ms"))
        if 1 <= interval_ms <= 86_400_000:
            return interval_ms / 1000
        steps = np.diff(times[~np.isnan(times)])
        steps = steps[steps > 0]
        return max(0.001, float(np.median(steps))) if len(steps) else 1.0

    def _with_breaks(self, times: Array, known: NDArray[np.bool_]) -> tuple[Array, NDArray[np.bool_]]:
        """Insert a row without data where frames are missing, for example because the head was down."""
        interval = self._interval or 1.0
        before = times[0] if self._last is None else self._last
        breaks = np.flatnonzero(np.diff(times, prepend=before) > 2.5 * interval)
        if not len(breaks):
            return times, known
        ends = np.where(breaks > 0, times[breaks - 1], before) + interval
        return np.insert(times, breaks, ends), np.insert(known, breaks, values=False, axis=0)

    def _gpus(self) -> list[GpuFigures]:
        summary = self._header.get("summary_by_device")
        summary = summary if isinstance(summary, Mapping) else {}
        return [self._gpu(name, column, summary.get(name)) for name, column in self._columns.items()]

    def _gpu(self, name: str, column: int, summary: Any) -> GpuFigures:
        node, label, model = split_id(name)
        energy = _number(summary.get("energy_joules")) if isinstance(summary, Mapping) else math.nan
        found = {quantity.name: self._distributions[quantity.name].of(column) for quantity in QUANTITIES}
        return GpuFigures(
            name,
            node,
            label,
            model,
            availability_ratio=int(self._frames_known[column]) / self._frames,
            energy_joules=energy if 0 <= energy <= _MAX_VALUE else None,
            statistics={key: value for key, value in found.items() if value is not None},
        )

    def _nodes(self, gpus: Sequence[GpuFigures]) -> list[NodeFigures]:
        columns: dict[str, list[int]] = {}
        for column, gpu in enumerate(gpus):
            columns.setdefault(gpu.node, []).append(column)
        return [self._node(name, places, gpus) for name, places in columns.items()]

    def _node(self, name: str, places: list[int], gpus: Sequence[GpuFigures]) -> NodeFigures:
        found = {quantity.name: self._distributions[quantity.name].of(places) for quantity in QUANTITIES}
        energies = [gpus[place].energy_joules for place in places]
        known = [energy for energy in energies if energy is not None]
        return NodeFigures(
            name,
            gpus=tuple(places),
            availability_ratio=float(self._frames_known[places].mean()) / self._frames,
            energy_joules=sum(known) if len(known) == len(energies) else None,
            statistics={key: value for key, value in found.items() if value is not None},
        )

    def _error(self, why: str) -> RecordingError:
        return RecordingError(
            f"{self._name} is not a session file: {why}",
            hint="write one with: gpulse session export NAME",
        )


class _GapDetector:
    """Finds the times in which GPUs have no data."""

    def __init__(self) -> None:
        self._missing_since: list[float | None] = []
        self._gaps: list[list[tuple[float, float]]] = []
        self._min_seconds: list[float] = []
        self._counts: list[int] = []
        self._start: float | None = None

    def add(self, times: NDArray[np.float64], known: NDArray[np.bool_]) -> None:
        """Add a row for each frame with a column for each GPU: whether it has any data. New GPUs come last."""
        if not len(times):
            return
        if self._start is None:
            self._start = float(times[0])
        while len(self._missing_since) < known.shape[1]:
            self._missing_since.append(self._start)
            self._gaps.append([])
            self._min_seconds.append(0.0)
            self._counts.append(0)
        before = np.array([since is None for since in self._missing_since[: known.shape[1]]], np.bool_)
        changed = np.vstack((before, known[:-1])) != known
        for column in np.flatnonzero(changed.any(axis=0)):
            self._follow_gpu(int(column), times, known[:, column])

    def _follow_gpu(self, column: int, times: NDArray[np.float64], known: NDArray[np.bool_]) -> None:
        since = self._missing_since[column]
        changes = np.flatnonzero(np.diff(known, prepend=since is None))
        if not len(changes):
            return
        changed_at = times[changes]
        if since is not None:
            changed_at = np.concatenate(([since], changed_at))
        pairs = changed_at[: len(changed_at) // 2 * 2].reshape(-1, 2)
        self._missing_since[column] = float(changed_at[-1]) if len(changed_at) % 2 else None
        lengths = pairs[:, 1] - pairs[:, 0]
        self._counts[column] += int((lengths > 0).sum())
        found = self._gaps[column]
        found += [(float(a), float(b)) for a, b in pairs[lengths > self._min_seconds[column]]]
        if len(found) > _MAX_GAPS_OF_GPU:
            self._drop_short(column, 2.0)

    def finish(self, end: float, frames_known: NDArray[np.int64]) -> tuple[DataGap, ...]:
        """Return the gaps, oldest first; gaps of several GPUs at the same time are merged.

        Args:
            end: End of the session.
            frames_known: Number of frames with data for each GPU.
        """
        together: dict[tuple[float, float], list[int]] = {}
        for column, since in enumerate(self._missing_since):
            if (
                self._counts[column] > _MAX_GAP_RATIO * max(1, frames_known[column])
                and self._counts[column] > 2
            ):
                self._drop_short(column, 3.0)
            if since is not None and end - since > self._min_seconds[column]:
                self._gaps[column].append((since, end))
            for gap in self._gaps[column]:
                together.setdefault(gap, []).append(column)
        return tuple(DataGap(start, end, tuple(gpus)) for (start, end), gpus in sorted(together.items()))

    def _drop_short(self, column: int, factor: float) -> None:
        """Drop gaps that are short for this GPU, which may just be sampled more slowly."""
        found = self._gaps[column]
        if not found:
            return
        limit = factor * float(np.median([end - start for start, end in found]))
        self._min_seconds[column] = max(limit, self._min_seconds[column])
        kept = [gap for gap in found if gap[1] - gap[0] > limit]
        self._gaps[column] = sorted(sorted(kept, key=lambda gap: gap[0] - gap[1])[: _MAX_GAPS_OF_GPU // 2])


def split_id(name: str) -> tuple[str, str, str]:
    """Split `node:3:NVIDIA H200` into node, label and model; parts that the ID lacks are empty."""
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


def _count(items: list[Any], noun: str) -> str:
    return f"{len(items)} {noun}{'' if len(items) == 1 else 's'}"


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
