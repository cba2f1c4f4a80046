"""CSV of records: rows that workers write, files that are read in batches, and exports that are written completely or not at all."""

from __future__ import annotations

import csv
import json
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from gpulse.atomic_files import resolve_output
from gpulse.errors import RecordingError
from gpulse.integrations.dask.job_labels import GraphLabel
from gpulse.integrations.dask.trackable_metrics import FIXED_COLUMNS, ArgumentError, TrackedColumn
from gpulse.model.counter_rates import Rates, compute_rates, process_key
from gpulse.model.frame import Frame, GpuReading
from gpulse.model.metric_catalog import CATALOG, Value, Values, to_portable

Cell = Any
"""A JSON value."""
_DECIMALS = 6
_MAX_NESTING = 4


def build_header(tracked: Sequence[TrackedColumn], custom: Iterable[str]) -> str:
    """Return the first line of a record."""
    return ",".join(map(quote_cell, (*FIXED_COLUMNS, *(column.name for column in tracked), *custom))) + "\n"


def quote_cell(text: str) -> str:
    """Return text as a cell of CSV."""
    if any(letter in text for letter in ',"\n\r'):
        return '"' + text.replace('"', '""') + '"'
    return text


def build_lines(labels: Iterable[GraphLabel | None], timestamp: float, cells: Sequence[Cell]) -> str:
    """Return a measurement: a line for each graph that was executing, without label where the scheduler fills it in."""
    rest = "".join("," + quote_cell(_encode_json(cell)) for cell in cells)
    return "".join(
        f"{'' if label is None else label.job},{'' if label is None else label.dag},{timestamp:.3f}{rest}\n"
        for label in labels
    )


def _encode_json(cell: Cell) -> str:
    """Return a cell as JSON, with control characters and direction overrides escaped."""
    if cell is None:
        return ""
    text = json.dumps(cell, ensure_ascii=False)
    return text if text.isprintable() else json.dumps(cell)


def to_plain_json(value: object, depth: int = 0) -> Cell:
    """Return the result of a custom metric as a JSON value.

    Raises:
        TypeError: It is not a number, text, None, or a list or dict of them.
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
            return to_portable(value)
        case list() | tuple() if depth < _MAX_NESTING:
            return [to_plain_json(part, depth + 1) for part in value]
        case dict() if depth < _MAX_NESTING:
            return {str(name): to_plain_json(part, depth + 1) for name, part in value.items()}
    raise TypeError(
        f"it returned {type(value).__name__} instead of a number, a string, or a list or dict of them"
    )


class FrameReader:
    """Reads the cells of frames, with rates since the frame before."""

    def __init__(self, tracked: Sequence[TrackedColumn], uuids: Sequence[str], pid: int) -> None:
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
        """Return one cell per column."""
        rates = self._rates(frame)
        gpus = {gpu.device.uuid: gpu for gpu in frame.gpus}
        mine = [gpus.get(uuid) for uuid in self._uuids]
        return [
            list(tasks) if column.shape == "tasks" else self._cell(column, frame, rates, mine)
            for column in self._tracked
        ]

    def _rates(self, frame: Frame) -> Rates:
        before, self._before = self._before, frame if self._wants_rates else None
        return Rates(0.0) if before is None else compute_rates(before, frame, cores=False)

    def _cell(
        self, column: TrackedColumn, frame: Frame, rates: Rates, gpus: Sequence[GpuReading | None]
    ) -> Cell:
        if column.shape == "gpus":
            return [None if gpu is None else self._of_gpu(column, gpu, rates) for gpu in gpus]
        if column.shape == "named":
            return _read_named(column, frame, rates)
        return _round_value(_find_value(column.metric, *self._values(column, frame, rates)))

    def _of_gpu(self, column: TrackedColumn, gpu: GpuReading, rates: Rates) -> Cell:
        match column.metric:
            case "total-mem":
                return _round_value(gpu.get("memory_used_bytes"))
            case "mem-util":
                used, total = gpu.get("memory_used_bytes"), gpu.get("memory_total_bytes")
                return None if used is None or not total else round(100 * used / total, 2)
            case "compute-util":
                ratio = gpu.get("gpu_utilization_ratio")
                return None if ratio is None else round(100 * ratio)
        if column.scope == "process":
            own = next((process for process in gpu.processes or () if process.pid == self._pid), None)
            return None if own is None else _round_value(getattr(own, column.metric))
        value = gpu.get(column.metric)
        return _round_value(
            rates.gpus.get(gpu.device.uuid, {}).get(column.metric) if value is None else value
        )

    def _values(self, column: TrackedColumn, frame: Frame, rates: Rates) -> tuple[Values, Values]:
        """Return the values and the rates of the object that a column is about."""
        if column.scope == "host":
            return ({} if frame.host is None else frame.host.values), rates.host
        own = next((process for process in frame.processes if process.pid == self._pid), None)
        if own is None:
            return {}, {}
        if column.scope == "process":
            return own.values, rates.processes.get(process_key(own), {})
        path = own.identity.cgroup or ""
        group = next((group for group in frame.cgroups if group.path == path), None)
        return ({} if group is None else group.values), rates.cgroups.get(path, {})


def _read_named(column: TrackedColumn, frame: Frame, rates: Rates) -> dict[str, Cell]:
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
    return {name: _round_value(_find_value(column.metric, *values)) for name, values in read.items()}


def _find_value(name: str, read: Values, computed: Values) -> Value | None:
    value = read.get(name)
    return computed.get(name) if value is None else value


def _round_value(value: Value | None) -> Value | None:
    """Return a value without digits beyond its precision."""
    value = to_portable(value)
    return round(value, _DECIMALS) if isinstance(value, float) else value


def _is_derived(column: TrackedColumn) -> bool:
    if column.scope is None:
        return False
    return CATALOG[column.scope][column.metric].derived or column.metric.endswith("_bytes_per_second")


BLOCK_BYTES = 1 << 18
"""Bytes that are parsed at a time."""
_CSV_CELL = re.compile(r'(?:"([^"]*(?:""[^"]*)*)"|([^",\r]*))(,|\r?\Z)')

_FILE_NAME = re.compile(r"worker-(0|[1-9]\d{0,8})\.csv")
_MAX_HEADER_BYTES = 1 << 20
_MAX_NUMBER = (1 << 63) - 1
_MAX_SECONDS = 1e12
_SEPARATOR = '"~~"'
"""Separator of cells that are parsed together; a cell that runs into the next one would contain it."""
_decode = json.JSONDecoder(parse_constant=lambda _: None).decode
FileWriter = Callable[[BinaryIO], None]


def damaged_line_error(source: str, line: int, why: str) -> RecordingError:
    """Return the error about a line."""
    return RecordingError(
        f"{source}, line {line}: {why}", hint="export the record again with Monitor.to_csv()"
    )


def read_line_batches(chunks: Iterable[bytes], source: str) -> Iterator[list[str]]:
    """Yield the lines in lists of some thousands."""
    waiting: list[bytes] = []
    size, line = 0, 2
    for chunk in chunks:
        waiting.append(chunk)
        size += len(chunk)
        if size >= BLOCK_BYTES and b"\n" in chunk:
            whole, _, rest = b"".join(waiting).rpartition(b"\n")
            lines = _decode_lines(whole, source, line)
            yield lines
            line += len(lines)
            waiting, size = [rest], len(rest)
    whole, end, _ = b"".join(waiting).rpartition(b"\n")
    if end:
        yield _decode_lines(whole, source, line)


def _decode_lines(whole: bytes, source: str, first_line: int) -> list[str]:
    try:
        return whole.decode().split("\n")
    except UnicodeDecodeError as error:
        line = first_line + whole.count(b"\n", 0, error.start)
        raise damaged_line_error(source, line, "not UTF-8 text") from error


def split_rows(source: str, first_line: int, lines: list[str], width: int) -> list[list[str]]:
    """Return the cells of each line."""
    try:
        rows = list(csv.reader(lines, strict=True))
    except csv.Error:
        rows = []
    if len(rows) == len(lines) and all(len(row) == width for row in rows):
        return rows
    return [_split_checked(source, first_line + place, line, width) for place, line in enumerate(lines)]


def _split_checked(source: str, number: int, line: str, width: int) -> list[str]:
    cells = split_cells(line)
    if cells is None:
        raise damaged_line_error(source, number, "unbalanced quotes")
    if len(cells) != width:
        raise damaged_line_error(source, number, f"{len(cells)} cells, but the header has {width} columns")
    return cells


def split_cells(line: str) -> list[str] | None:
    """Return the cells of a line of any length; None when its quotes do not match."""
    found, place = [], 0
    while match := _CSV_CELL.match(line, place):
        quoted, plain, end = match.groups()
        found.append(plain if quoted is None else quoted.replace('""', '"'))
        place = match.end()
        if end != ",":
            return found
    return None


def format_file_name(index: int) -> str:
    """Return the name of a worker's file."""
    return f"worker-{index}.csv"


class LineBatch(NamedTuple):
    """Consecutive lines of a record, by column."""

    source: str
    """Name of the record in errors."""
    first_line: int
    columns: tuple[str, ...]
    cells: tuple[tuple[str, ...], ...]
    """Text of the cells of each column."""

    @property
    def jobs(self) -> list[int]:
        """The job of each line."""
        return self._numbers(0, _parse_count)

    @property
    def dags(self) -> list[int]:
        """The graph of each line."""
        return self._numbers(1, _parse_count)

    @property
    def timestamps(self) -> list[float]:
        """The seconds of each line."""
        return self._numbers(2, _parse_seconds)

    def values(self, metric: str) -> list[Any]:
        """Return the values of a metric's cells, None where they are empty.

        Raises:
            RecordingError: A cell is not JSON.
        """
        cells = self.cells[self.columns.index(metric)]
        found = _parse_values_fast(cells)
        return self._each(cells, _parse_value) if found is None else found

    def _numbers(self, place: int, read: Any) -> list[Any]:
        cells = self.cells[place]
        try:
            return list(map(read, cells))
        except ValueError:
            return self._each(cells, read)

    def _each(self, cells: Sequence[str], read: Any) -> list[Any]:
        """Read cell by cell, so that the broken one can be named."""
        found = []
        for place, cell in enumerate(cells):
            try:
                found.append(read(cell))
            except (ValueError, RecursionError) as error:
                raise damaged_line_error(
                    self.source, self.first_line + place, f"{_unquote(cell)} is not a valid value"
                ) from error
        return found


class WorkerTable(NamedTuple):
    """A worker's record, which can be read any number of times."""

    source: str
    """Its name in errors."""
    columns: tuple[str, ...]
    chunks: Iterable[bytes]
    """The lines after the header."""

    @property
    def tracked(self) -> tuple[str, ...]:
        """Names of its metrics."""
        return self.columns[len(FIXED_COLUMNS) :]

    def batches(self) -> Iterator[LineBatch]:
        """Yield all lines, some thousands at a time, without a last one that was cut off.

        Raises:
            RecordingError: A line is broken.
        """
        line = 2
        for text in read_line_batches(self.chunks, self.source):
            rows = split_rows(self.source, line, text, len(self.columns))
            yield LineBatch(self.source, line, self.columns, tuple(zip(*rows, strict=True)))
            line += len(rows)


def parse_record(header: bytes, chunks: Iterable[bytes], source: str = "the record") -> WorkerTable:
    """Return the record in these bytes.

    Args:
        header: Its first line, with or without its end.
        chunks: What follows.
        source: Its name in errors.

    Raises:
        RecordingError: It is not a worker's record.
    """
    again = list(chunks) if isinstance(chunks, Iterator) else chunks
    return WorkerTable(source, _parse_header(header, source), again)


def read_table(path: str | os.PathLike[str]) -> WorkerTable:
    """Return the record in a file, whose lines are read on demand.

    Raises:
        ArgumentError: There is no such file.
        RecordingError: It cannot be read, or is not a worker's record.
    """
    file = _RecordFile(Path(path))
    return parse_record(file.header(), file, file.path.name)


def find_worker_files(folder: str | os.PathLike[str]) -> dict[int, Path]:
    """Return the files of an export by worker index, in order.

    Raises:
        ArgumentError: There is no such directory, or no such file in it.
        RecordingError: The directory cannot be read.
    """
    place = Path(folder)
    hint = "use the directory that you passed to Monitor.to_csv()"
    if not place.exists():
        raise ArgumentError(f"there is no directory {place}", hint=hint)
    if not place.is_dir():
        raise ArgumentError(f"{place} is not a directory", hint=hint)
    try:
        names = os.listdir(place)
    except OSError as error:
        raise RecordingError(f"cannot read {place}: {error.strerror}", hint=hint) from error
    found = {int(match[1]): place / name for name in names if (match := _FILE_NAME.fullmatch(name))}
    if not found:
        raise ArgumentError(f"{place} contains no worker-0.csv, worker-1.csv, …", hint=hint)
    return dict(sorted(found.items()))


def read_folder(folder: str | os.PathLike[str]) -> dict[int, WorkerTable]:
    """Return the records of an export by worker index, in order.

    Raises:
        ArgumentError: There is no such directory, or no record in it.
        RecordingError: One cannot be read, or is not a worker's record.
    """
    return {index: read_table(path) for index, path in find_worker_files(folder).items()}


def write_files(
    folder: str | os.PathLike[str], records: Mapping[int, tuple[bytes, Iterable[bytes]]]
) -> list[Path]:
    """Write an export, all files or none, and remove those of an earlier export.

    Args:
        folder: Target directory; created if missing.
        records: The header and the lines of each worker.

    Returns:
        The files, in the order of the workers.

    Raises:
        ArgumentError: The directory is not writable, or a file there was not written by an export.
        RecordingError: Writing failed, for example because the disk is full.
    """
    writers = {format_file_name(index): partial(_write, *records[index]) for index in sorted(records)}
    return replace_files(Path(folder), writers, ExportFormat(_FILE_NAME, _is_record))


class _RecordFile:
    """A record's file; iterating it yields what follows the header."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def header(self) -> bytes:
        """Its first line."""
        if self.path.is_dir():
            raise ArgumentError(
                f"{self.path} is a directory", hint=f"use a file in it, such as {format_file_name(0)}"
            )
        with self._open() as file:
            header = file.readline(_MAX_HEADER_BYTES)
        if not header.endswith(b"\n"):
            raise _not_a_record_error(self.path.name)
        return header

    def __iter__(self) -> Iterator[bytes]:
        with self._open() as file:
            file.readline(_MAX_HEADER_BYTES)
            while block := file.read(BLOCK_BYTES):
                yield block

    def _open(self) -> BinaryIO:
        try:
            return self.path.open("rb")
        except FileNotFoundError as error:
            raise ArgumentError(
                f"there is no file {self.path}", hint="use a file that Monitor.to_csv() wrote"
            ) from error
        except OSError as error:
            raise RecordingError(f"cannot read {self.path}: {error.strerror}") from error


def _write(header: bytes, chunks: Iterable[bytes], file: BinaryIO) -> None:
    file.write(header.rstrip(b"\n") + b"\n")
    file.writelines(chunks)


def _is_record(path: Path) -> bool:
    begin = ",".join(FIXED_COLUMNS).encode()
    with path.open("rb") as file:
        return file.read(len(begin)) == begin


def _parse_header(header: bytes, source: str) -> tuple[str, ...]:
    try:
        text = header.decode("utf-8-sig").rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise _not_a_record_error(source) from error
    columns = tuple(split_cells(text) or ())
    if columns[: len(FIXED_COLUMNS)] != FIXED_COLUMNS:
        raise _not_a_record_error(source)
    for place, name in enumerate(columns):
        if name in columns[:place]:
            raise RecordingError(f"{source}, line 1: duplicate column {_unquote(name)}")
    return columns


def _not_a_record_error(source: str) -> RecordingError:
    return RecordingError(
        f"{source}, line 1: a worker's record begins with {','.join(FIXED_COLUMNS)}, but this file does not",
        hint=f"use a file that Monitor.to_csv() wrote, such as {format_file_name(0)}",
    )


def _parse_value(cell: str) -> Any:
    return _decode(cell) if cell else None


def _parse_values_fast(cells: Sequence[str]) -> list[Any] | None:
    """Return the values of cells in a fraction of the time that one by one would take; None unless every cell is JSON."""
    text = f",{_SEPARATOR},".join([cell or "null" for cell in cells])
    try:
        found: list[Any] = _decode(f"[{text}]")
    except (ValueError, RecursionError):
        return None
    between = len(cells) - 1
    is_whole = len(found) == len(cells) + between and text.count(_SEPARATOR) == between
    return found[::2] if is_whole and found[1::2].count(_SEPARATOR[1:-1]) == between else None


def _parse_count(cell: str) -> int:
    number = int(cell)
    if not 0 <= number <= _MAX_NUMBER:
        raise ValueError(cell)
    return number


def _parse_seconds(cell: str) -> float:
    number = float(cell)
    if not abs(number) <= _MAX_SECONDS:
        raise ValueError(cell)
    return number


def _unquote(cell: str) -> str:
    return repr(cell if len(cell) <= 40 else f"{cell[:39]}…")


class ExportFormat(NamedTuple):
    """Naming pattern and content check of the files of an export."""

    name: re.Pattern[str]
    is_ours: Callable[[Path], bool]


def replace_files(folder: Path, writers: Mapping[str, FileWriter], kind: ExportFormat) -> list[Path]:
    """Write temporary files, rename all of them at the end, and remove the files of an earlier export.

    Args:
        folder: Target directory; created if missing.
        writers: Functions that write the files, by file name.
        kind: How to recognize files of an earlier export.

    Returns:
        The files, in the order of the writers.

    Raises:
        ArgumentError: The directory is not writable, or a file there was not written by an export.
        RecordingError: Writing failed, for example because the disk is full.
    """
    _make_folder(folder)
    before = _find_earlier_files(folder, kind)
    for name in writers:
        if name not in before and (folder / name).exists():
            raise ArgumentError(
                f"{folder / name} already exists and was not written by gpulse, or belongs to another user",
                hint="choose another directory",
            )
    drafts: dict[str, Path] = {}
    mark = secrets.token_hex(4)
    try:
        for name, write in writers.items():
            drafts[name] = draft = folder / f".{name}.{mark}.part"
            with draft.open("xb") as file:
                write(file)
        for name, draft in drafts.items():
            draft.replace(folder / name)
    except OSError as error:
        raise RecordingError(
            f"cannot write to {folder}: {error.strerror or error}", hint="check whether the disk is full"
        ) from error
    finally:
        for draft in drafts.values():
            with suppress(OSError):
                draft.unlink(missing_ok=True)
    for name in before - writers.keys():
        with suppress(OSError):
            (folder / name).unlink()
    return [folder / name for name in writers]


def _make_folder(folder: Path) -> None:
    try:
        resolve_output(folder)
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise ArgumentError(f"{folder} is not a directory", hint="choose another directory") from error
    except OSError as error:
        raise ArgumentError(
            f"cannot create {folder}: {error.strerror}", hint="choose another directory"
        ) from error
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        raise ArgumentError(f"no permission to write to {folder}", hint="choose another directory")


def _find_earlier_files(folder: Path, kind: ExportFormat) -> set[str]:
    return {
        name for name in os.listdir(folder) if kind.name.fullmatch(name) and _is_ours(folder / name, kind)
    }


def _is_ours(path: Path, kind: ExportFormat) -> bool:
    try:
        found = path.lstat()
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
            return False
        return found.st_size == 0 or kind.is_ours(path)
    except OSError:
        return False
