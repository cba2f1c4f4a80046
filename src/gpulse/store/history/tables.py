"""Build the columns of one Parquet file from stacks of several layouts: sorted, with SQL types."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from gpulse.model.columns import MISSING_NARROW, MISSING_WIDE, Column
from gpulse.model.metric import CATALOGUE, Scope
from gpulse.store.history.blocks import Stack, plain, subject_key

if TYPE_CHECKING:
    from numpy.typing import NDArray

_LABELS: dict[Scope, dict[str, str]] = {
    "gpu": {"gpu": "VARCHAR", "model": "VARCHAR"},
    "process": {"pid": "BIGINT", "start_time": "DOUBLE", "gpu": "VARCHAR"},
}
"""The SQL types of the columns that describe the subjects of a scope."""
KEYS = ("node", "node_id", "subject", "time", "run", "sequence")
"""Columns of every file that are not metrics."""
_NAME = re.compile("[a-z][a-z0-9_]{0,99}")
"""The names that metrics of any version have; SQL ignores their case."""
_MAX_NARROW_DIGITS, _MAX_DIGITS = 9, 18
"""How many digits a DECIMAL of 32 and of 64 bits has."""


class Field(NamedTuple):
    """A column of a file."""

    name: str
    expression: str
    """The SQL expression over the arrays."""


class Table(NamedTuple):
    """The rows of one file."""

    arrays: dict[str, NDArray[Any]]
    fields: list[Field]
    rows: int
    start: int
    """The earliest time, in microseconds."""
    end: int
    """The latest one."""


def quoted(name: str) -> str:
    """Quote a name for SQL."""
    return '"' + name.replace('"', '""') + '"'


def literal(text: str) -> str:
    """Quote a text for SQL."""
    return "'" + text.replace("'", "''") + "'"


def label_columns(scope: Scope) -> tuple[str, ...]:
    """Return the names of the columns that describe the subjects of a scope."""
    return tuple(_LABELS.get(scope, ()))


def build_table(scope: Scope, stacks: Sequence[Stack], names: Mapping[int, str]) -> Table:
    """Build the rows of some stacks, sorted by node, subject, time and sequence number.

    Args:
        scope: Whose stacks they are.
        stacks: At least one.
        names: The names of the nodes.
    """
    parts = [_keys(scope, stack) for stack in stacks]
    subjects = sorted({subject for part in parts for subject in part})
    ranks = {subject: rank for rank, subject in enumerate(subjects)}
    counts = [len(stack.times) for stack in stacks]
    node = np.concatenate(
        [
            np.full(count * len(part), s.node, np.int32)
            for s, part, count in zip(stacks, parts, counts, strict=True)
        ]
    )
    rank = np.concatenate(
        [np.repeat([ranks[key] for key in part], count) for part, count in zip(parts, counts, strict=True)]
    ).astype(np.int32)
    time = np.concatenate([np.tile(s.times, len(part)) for s, part in zip(stacks, parts, strict=True)])
    run = np.concatenate([np.tile(s.runs, len(part)) for s, part in zip(stacks, parts, strict=True)])
    sequence = np.concatenate(
        [np.tile(s.sequences, len(part)) for s, part in zip(stacks, parts, strict=True)]
    )
    order = np.lexsort((sequence, time, rank, node))
    known = {"node_id": node[order], "rank": rank[order], "run": run[order], "sequence": sequence[order]}
    known["time"] = time[order]
    numbers, places = np.unique(known["node_id"], return_inverse=True)
    arrays: dict[str, NDArray[Any]] = {
        "node": text_column([plain(names.get(number, f"node {number}")) for number in numbers.tolist()])[
            places
        ],
        "subject": text_column(subjects)[known.pop("rank")],
        **known,
    }
    fields = [Field(name, "make_timestamptz(time)" if name == "time" else quoted(name)) for name in KEYS]
    for label, kind in reversed(_LABELS.get(scope, {}).items()):
        values = [label_of(label, subject) for stack in stacks for subject in stack.layout.subjects]
        spans = [count for stack, count in zip(stacks, counts, strict=True) for _ in stack.layout.subjects]
        column = np.repeat(text_column(values), spans)
        arrays[label] = column[order]
        fields.insert(3, Field(label, f"{quoted(label)}::{kind}"))
    for column_name in _metrics(scope, stacks, (*KEYS, *label_columns(scope))):
        array, expression = _metric(column_name, stacks, order)
        arrays[column_name] = array
        fields.append(Field(column_name, expression))
    return Table(arrays, fields, len(order), int(time.min()), int(time.max()))


def _keys(scope: Scope, stack: Stack) -> list[str]:
    return [subject_key(scope, subject) for subject in stack.layout.subjects]


def text_column(texts: Sequence[Any]) -> NDArray[np.object_]:
    """Return texts as a column."""
    column = np.empty(len(texts), object)
    column[:] = texts
    return column


def label_of(label: str, subject: Mapping[str, Any]) -> Any:
    """Return the value of a label column for a subject; None when its layout has none, or an invalid one."""
    if label == "gpu" and "index" in subject:
        part = subject.get("mig_index")
        return str(subject["index"]) if part is None else f"{subject['index']}:{part}"
    value = subject.get("name" if label == "model" else label)
    if label == "pid":
        return value if isinstance(value, int) and 0 <= value < 1 << 31 else None
    if label == "start_time":
        return float(value) if isinstance(value, int | float) else None
    return None if value is None else plain(str(value))


def _metrics(scope: Scope, stacks: Sequence[Stack], taken: Sequence[str]) -> list[str]:
    """Return the metrics that any stack has, in the catalogue's order, with unknown ones at the end."""
    present = {column.name for stack in stacks for column in (*stack.layout.wide, *stack.layout.narrow)}
    known = [name for name in CATALOGUE[scope] if name in present]
    return known + sorted(name for name in present.difference(known, taken) if _NAME.fullmatch(name))


def _metric(name: str, stacks: Sequence[Stack], order: NDArray[np.intp]) -> tuple[NDArray[Any], str]:
    """Return a metric's numbers in the order of the rows, and the expression for its values."""
    found = [stack.column(name) for stack in stacks]
    columns = {item[0] for item in found if item is not None}
    common = next(iter(columns)) if len(columns) == 1 else _common(columns)
    if common is None:
        values = np.concatenate([stack.values(name).T.ravel() for stack in stacks])[order]
        return values, f"CASE WHEN isnan({quoted(name)}) THEN NULL ELSE {quoted(name)} END"
    is_narrow = len(columns) == 1 and all(item is None or item[2] == MISSING_NARROW for item in found)
    missing = MISSING_NARROW if is_narrow else MISSING_WIDE
    kind = np.int32 if is_narrow else np.int64
    pieces = []
    for stack, item in zip(stacks, found, strict=True):
        if item is None:
            pieces.append(np.full(len(stack.times) * len(stack.layout.subjects), missing, kind))
        else:
            pieces.append(_rescaled(*item, common, missing, kind))
    numbers = np.concatenate(pieces)[order]
    return numbers, _expression(name, common, numbers, missing, is_narrow=is_narrow)


def _common(columns: set[Column]) -> Column | None:
    """Return a unit in which the numbers of several columns are whole; None when there is none that fits."""
    steps = math.lcm(*(column.steps for column in columns))
    size = math.gcd(*(column.size for column in columns))
    if steps > 1 and max(column.size for column in columns) > 1:
        size = 1
    return None if steps > 10**9 else Column("", steps, size)


def _rescaled(
    column: Column,
    numbers: NDArray[Any],
    old: int,
    common: Column,
    missing: int,
    kind: type[np.signedinteger[Any]],
) -> NDArray[Any]:
    flat = numbers.T.ravel()
    factor = common.steps // column.steps * (column.size // common.size)
    if factor == 1 and old == missing:
        return flat
    return np.where(flat == old, missing, flat.astype(np.int64) * factor).astype(kind)


def _expression(name: str, column: Column, numbers: NDArray[Any], missing: int, *, is_narrow: bool) -> str:
    """Return the expression for values in the base unit, of the type that is exact and small on disk.

    Decimals are kept as integers, which the writer packs by their differences. A number of KiB becomes a DOUBLE, whose
    last bytes are zero and vanish when bytes of one place are compressed together; as an integer its zero bits cost half a
    byte.
    """
    value = f"nullif({quoted(name)}, {missing})"
    digits = _scale(column.steps)
    present = numbers[numbers != missing]
    largest = max(int(present.max()), -int(present.min())) if len(present) else 0
    if column.steps > 1:
        width = _MAX_NARROW_DIGITS if is_narrow and largest < 10**_MAX_NARROW_DIGITS else _MAX_DIGITS
        if digits is None or digits > width or largest >= 10**_MAX_DIGITS:
            return f"{value} / {column.steps}::DOUBLE"
        one = f"0.{'1':0>{digits}}::DECIMAL({digits}, {digits})"
        whole = f"{value}::DECIMAL({width if is_narrow else _MAX_DIGITS}, 0)"
        return f"({whole} * {one})::DECIMAL({width}, {digits})"
    if column.size > 1:
        is_binary = is_narrow and column.size & (column.size - 1) == 0
        is_huge = largest * column.size >= 1 << 63
        return f"{value}::{'DOUBLE' if is_binary or is_huge else 'BIGINT'} * {column.size}"
    return value


def _scale(steps: int) -> int | None:
    digits = len(str(steps)) - 1
    return digits if steps == 10**digits else None
