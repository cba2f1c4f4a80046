"""A measurement as lines of a record: what a frame says about each column, as cells of CSV."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from gpulse.integrations.dask.jobs import Label
from gpulse.integrations.dask.tracking import ALWAYS, Column
from gpulse.model.frame import Frame, GpuReading
from gpulse.model.metric import CATALOGUE, Value, Values, portable
from gpulse.model.rates import Rates, between, key

Cell = Any
"""What JSON can say: numbers, text, None, lists and objects of them."""
_DECIMALS = 6
_DEEPEST = 4


def header(tracked: Sequence[Column], custom: Iterable[str]) -> str:
    """The first line of a record."""
    return ",".join(map(quoted, (*ALWAYS, *(column.name for column in tracked), *custom))) + "\n"


def quoted(text: str) -> str:
    """Text as a cell of CSV."""
    if any(letter in text for letter in ',"\n\r'):
        return '"' + text.replace('"', '""') + '"'
    return text


def lines(labels: Iterable[Label | None], timestamp: float, cells: Sequence[Cell]) -> str:
    """A measurement: one line for each graph that was executing; without a number where the scheduler knows it."""
    rest = "".join("," + quoted(_json(cell)) for cell in cells)
    return "".join(
        f"{'' if label is None else label.job},{'' if label is None else label.dag},{timestamp:.3f}{rest}\n"
        for label in labels
    )


def _json(cell: Cell) -> str:
    """A cell as JSON, in which what a terminal must not see (control characters, direction overrides) is escaped."""
    if cell is None:
        return ""
    text = json.dumps(cell, ensure_ascii=False)
    return text if text.isprintable() else json.dumps(cell)


def plain(value: object, depth: int = 0) -> Cell:
    """What somebody's function answered, as JSON has it.

    Raises:
        TypeError: It is something else than numbers, text, None, lists and dicts of them.
    """
    item = getattr(value, "item", None)
    if callable(item) and getattr(value, "shape", None) == ():
        value = item()  # a number of numpy's or cupy's
    match value:
        case str():
            return value.encode("utf-8", "backslashreplace").decode()
        case None | bool():
            return value
        case int() | float():
            return portable(value)
        case list() | tuple() if depth < _DEEPEST:
            return [plain(part, depth + 1) for part in value]
        case dict() if depth < _DEEPEST:
            return {str(name): plain(part, depth + 1) for name, part in value.items()}
    raise TypeError(
        f"it answered with {type(value).__name__}, not with numbers, text, lists or dicts of them"
    )


class FrameReader:
    """Reads the cells of a frame, remembering the frame before for what happened in between."""

    def __init__(self, tracked: Sequence[Column], uuids: Sequence[str], pid: int) -> None:
        """Prepare to read.

        Args:
            tracked: The columns.
            uuids: The worker's GPUs, in its order.
            pid: The worker's process.
        """
        self._tracked = tracked
        self._uuids = uuids
        self._pid = pid
        self._wants_rates = any(_is_derived(column) for column in tracked)
        self._before: Frame | None = None

    def cells(self, frame: Frame, tasks: Sequence[str]) -> list[Cell]:
        """One cell a column."""
        rates = self._rates(frame)
        gpus = {gpu.device.uuid: gpu for gpu in frame.gpus}
        mine = [gpus.get(uuid) for uuid in self._uuids]
        return [
            list(tasks) if column.shape == "tasks" else self._cell(column, frame, rates, mine)
            for column in self._tracked
        ]

    def _rates(self, frame: Frame) -> Rates:
        before, self._before = self._before, frame if self._wants_rates else None
        return Rates(0.0) if before is None else between(before, frame, cores=False)

    def _cell(self, column: Column, frame: Frame, rates: Rates, gpus: Sequence[GpuReading | None]) -> Cell:
        if column.shape == "gpus":
            return [None if gpu is None else self._of_gpu(column, gpu, rates) for gpu in gpus]
        if column.shape == "named":
            return _named(column, frame, rates)
        return _tidy(_value(column.metric, *self._values(column, frame, rates)))

    def _of_gpu(self, column: Column, gpu: GpuReading, rates: Rates) -> Cell:
        match column.metric:
            case "total-mem":
                return _tidy(gpu.get("memory_used_bytes"))
            case "mem-util":
                used, total = gpu.get("memory_used_bytes"), gpu.get("memory_total_bytes")
                return None if used is None or not total else round(100 * used / total, 2)
            case "compute-util":
                ratio = gpu.get("gpu_utilization_ratio")
                return None if ratio is None else round(100 * ratio)
        if column.scope == "process":
            own = next((process for process in gpu.processes or () if process.pid == self._pid), None)
            return None if own is None else _tidy(getattr(own, column.metric))
        value = gpu.get(column.metric)
        return _tidy(rates.gpus.get(gpu.device.uuid, {}).get(column.metric) if value is None else value)

    def _values(self, column: Column, frame: Frame, rates: Rates) -> tuple[Values, Values]:
        """Of the one thing that a column is about: what was read, and what was computed."""
        if column.scope == "host":
            return ({} if frame.host is None else frame.host.values), rates.host
        own = next((process for process in frame.processes if process.pid == self._pid), None)
        if own is None:
            return {}, {}
        if column.scope == "process":
            return own.values, rates.processes.get(key(own), {})
        path = own.identity.cgroup or ""
        group = next((group for group in frame.cgroups if group.path == path), None)
        return ({} if group is None else group.values), rates.cgroups.get(path, {})


def _named(column: Column, frame: Frame, rates: Rates) -> dict[str, Cell]:
    match column.scope:
        case "disk":
            read = {disk.name: (disk.values, rates.disks.get(disk.name, {})) for disk in frame.disks}
        case "network":
            read = {link.name: (link.values, rates.network.get(link.name, {})) for link in frame.network}
        case _:
            read = {
                item.mount_point: (item.values, rates.filesystems.get(item.mount_point, {}))
                for item in frame.filesystems
            }
    return {name: _tidy(_value(column.metric, *values)) for name, values in read.items()}


def _value(name: str, read: Values, computed: Values) -> Value | None:
    value = read.get(name)
    return computed.get(name) if value is None else value


def _tidy(value: Value | None) -> Value | None:
    """Without digits that nobody measured."""
    value = portable(value)
    return round(value, _DECIMALS) if isinstance(value, float) else value


def _is_derived(column: Column) -> bool:
    if column.scope is None:
        return False
    return CATALOGUE[column.scope][column.metric].derived or column.metric.endswith("_bytes_per_second")
