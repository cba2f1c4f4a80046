"""Build the columns of a Parquet file from stacks of several layouts: sorted rows and SQL types."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpulse.model.metric_catalog import CATALOG, Scope
from gpulse.model.packed_columns import MISSING_NARROW, MISSING_WIDE, LayoutColumn
from gpulse.model.safe_text import replace_surrogates
from gpulse.store.history.frame_blocks import BlockGroup, BlockStack, subject_key

_LABELS: dict[Scope, dict[str, str]] = {
    "gpu": {"gpu": "VARCHAR", "model": "VARCHAR"},
    "process": {"pid": "BIGINT", "start_time": "DOUBLE", "gpu": "VARCHAR"},
}
"""The SQL types of the columns that describe the subjects of a scope."""
KEY_COLUMNS = ("node", "node_id", "subject", "time", "run", "sequence")
"""The columns of every file that are not metrics."""
_NAME = re.compile("[a-z][a-z0-9_]{0,99}")
"""Valid metric names of any version; SQL ignores case."""
_MAX_NARROW_DIGITS, _MAX_DIGITS = 9, 18
"""Number of digits of a 32-bit and of a 64-bit DECIMAL."""


class ParquetColumn(NamedTuple):
    """A column of a file."""

    name: str
    expression: str
    """SQL expression over the arrays."""


class ParquetTable(NamedTuple):
    """The rows of one file."""

    arrays: dict[str, NDArray[Any]]
    fields: list[ParquetColumn]
    rows: int
    start: int
    """The earliest time, in microseconds."""
    end: int
    """The latest time, in microseconds."""


def quote_name(name: str) -> str:
    """Quote a name for SQL."""
    return '"' + name.replace('"', '""') + '"'


def quote_text(text: str) -> str:
    """Quote a text for SQL."""
    return "'" + text.replace("'", "''") + "'"


def label_columns(scope: Scope) -> tuple[str, ...]:
    """Return the names of the columns that describe the subjects of a scope."""
    return tuple(_LABELS.get(scope, ()))


def build_table(scope: Scope, groups: Sequence[BlockGroup], names: Mapping[int, str]) -> ParquetTable:
    """Build the rows of some groups, sorted by node, subject, time and sequence number.

    Args:
        scope: The scope of the groups.
        groups: At least one group.
        names: Node names by number.
    """
    keys = [
        [[subject_key(scope, subject) for subject in layout.subjects] for layout in group.layouts]
        for group in groups
    ]
    subjects = sorted({key for group in keys for member in group for key in member})
    ranks = {subject: rank for rank, subject in enumerate(subjects)}
    node = np.concatenate([_repeat_nodes(group) for group in groups])
    rank = np.concatenate(
        [
            _repeat_members(group, np.array([[ranks[key] for key in member] for member in members], np.int32))
            for group, members in zip(groups, keys, strict=True)
        ]
    )
    time, run, sequence = (
        np.concatenate([np.tile(column, len(stack.layout.subjects)) for stack, column in columns])
        for columns in (
            [(group.stack, group.stack.times) for group in groups],
            [(group.stack, group.stack.runs) for group in groups],
            [(group.stack, group.stack.sequences) for group in groups],
        )
    )
    order = np.lexsort((sequence, time, rank, node))
    known = {"node_id": node[order], "rank": rank[order], "run": run[order], "sequence": sequence[order]}
    known["time"] = time[order]
    numbers, places = np.unique(known["node_id"], return_inverse=True)
    arrays: dict[str, NDArray[Any]] = {
        "node": text_column(
            [replace_surrogates(names.get(number, f"node {number}")) for number in numbers.tolist()]
        )[places],
        "subject": text_column(subjects)[known.pop("rank")],
        **known,
    }
    fields = [
        ParquetColumn(name, "make_timestamptz(time)" if name == "time" else quote_name(name))
        for name in KEY_COLUMNS
    ]
    for label, kind in reversed(_LABELS.get(scope, {}).items()):
        arrays[label] = np.concatenate([_label_column(label, group) for group in groups])[order]
        fields.insert(3, ParquetColumn(label, f"{quote_name(label)}::{kind}"))
    stacks = [group.stack for group in groups]
    for column_name in _metric_names(scope, stacks, (*KEY_COLUMNS, *label_columns(scope))):
        array, expression = _metric_column(column_name, stacks, order)
        arrays[column_name] = array
        fields.append(ParquetColumn(column_name, expression))
    return ParquetTable(arrays, fields, len(order), int(time.min()), int(time.max()))


def _repeat_nodes(group: BlockGroup) -> NDArray[np.int32]:
    """Return the node of each row of a group; rows are ordered by subject, then by block."""
    nodes = np.repeat(np.array(group.nodes, np.int32), group.counts)
    return np.tile(nodes, len(group.stack.layout.subjects))


def _repeat_members(group: BlockGroup, values: NDArray[Any]) -> NDArray[Any]:
    """Return a value for each row of a group, from values by member and subject."""
    return np.repeat(values, group.counts, axis=0).T.ravel()


def _label_column(label: str, group: BlockGroup) -> NDArray[np.object_]:
    values = text_column(
        [label_value(label, subject) for layout in group.layouts for subject in layout.subjects]
    )
    return _repeat_members(group, values.reshape(len(group.layouts), -1))


def text_column(texts: Sequence[Any]) -> NDArray[np.object_]:
    """Return texts as a column of objects."""
    column = np.empty(len(texts), object)
    column[:] = texts
    return column


def label_value(label: str, subject: Mapping[str, Any]) -> Any:
    """Return the value of a label column for a subject; None if the layout has no valid one."""
    if label == "gpu" and "index" in subject:
        part = subject.get("mig_index")
        return str(subject["index"]) if part is None else f"{subject['index']}:{part}"
    value = subject.get("name" if label == "model" else label)
    if label == "pid":
        return value if isinstance(value, int) and 0 <= value < 1 << 31 else None
    if label == "start_time":
        return float(value) if isinstance(value, int | float) else None
    return None if value is None else replace_surrogates(str(value))


def _metric_names(scope: Scope, stacks: Sequence[BlockStack], taken: Sequence[str]) -> list[str]:
    """Return the metrics of all stacks in the order of the catalog, with unknown ones at the end."""
    present = {column.name for stack in stacks for column in (*stack.layout.wide, *stack.layout.narrow)}
    known = [name for name in CATALOG[scope] if name in present]
    return known + sorted(name for name in present.difference(known, taken) if _NAME.fullmatch(name))


def _metric_column(
    name: str, stacks: Sequence[BlockStack], order: NDArray[np.intp]
) -> tuple[NDArray[Any], str]:
    """Return a metric's numbers in the order of the rows, and the SQL expression for its values."""
    found = [stack.column(name) for stack in stacks]
    columns = {item[0] for item in found if item is not None}
    common = next(iter(columns)) if len(columns) == 1 else _common_unit(columns)
    if common is None:
        values = np.concatenate([stack.values(name).T.ravel() for stack in stacks])[order]
        return values, f"CASE WHEN isnan({quote_name(name)}) THEN NULL ELSE {quote_name(name)} END"
    is_narrow = len(columns) == 1 and all(item is None or item[2] == MISSING_NARROW for item in found)
    missing = MISSING_NARROW if is_narrow else MISSING_WIDE
    kind = np.int32 if is_narrow else np.int64
    pieces = []
    for stack, item in zip(stacks, found, strict=True):
        if item is None:
            pieces.append(np.full(len(stack.times) * len(stack.layout.subjects), missing, kind))
        else:
            pieces.append(_rescale(*item, common, missing, kind))
    numbers = np.concatenate(pieces)[order]
    return numbers, _value_expression(name, common, numbers, missing, is_narrow=is_narrow)


def _common_unit(columns: set[LayoutColumn]) -> LayoutColumn | None:
    """Return a unit in which the numbers of several columns are integers; None if no unit fits."""
    steps = math.lcm(*(column.steps for column in columns))
    size = math.gcd(*(column.size for column in columns))
    if steps > 1 and max(column.size for column in columns) > 1:
        size = 1
    return None if steps > 10**9 else LayoutColumn("", steps, size)


def _rescale(
    column: LayoutColumn,
    numbers: NDArray[Any],
    old: int,
    common: LayoutColumn,
    missing: int,
    kind: type[np.signedinteger[Any]],
) -> NDArray[Any]:
    flat = numbers.T.ravel()
    factor = common.steps // column.steps * (column.size // common.size)
    if factor == 1 and old == missing:
        return flat
    return np.where(flat == old, missing, flat.astype(np.int64) * factor).astype(kind)


def _value_expression(
    name: str, column: LayoutColumn, numbers: NDArray[Any], missing: int, *, is_narrow: bool
) -> str:
    """Return the SQL expression for values in the base unit, with a type that is exact and small on disk.

    Decimals are stored as integers, which the writer delta-encodes. A multiple of 1024 becomes a DOUBLE, whose last bytes are
    zero and compress to nothing with byte-stream splitting; as an integer, its zero bits would cost half a byte.
    """
    value = f"nullif({quote_name(name)}, {missing})"
    digits = _decimal_digits(column.steps)
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


def _decimal_digits(steps: int) -> int | None:
    digits = len(str(steps)) - 1
    return digits if steps == 10**digits else None
