"""What the cells of a column hold, and the Arrow type for it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import chain
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa

_LARGEST = 1 << 63
_EXACT = 1 << 53


def fits(numbers: Iterable[int], limit: int = _LARGEST) -> bool:
    """Whether they are integers of 64 bits, or of fewer."""
    return all(-limit <= number < limit for number in numbers)


class Shape:
    """Collects what a column holds, batch by batch, until a type can be told."""

    def __init__(self) -> None:
        self._outer: set[type] = set()
        self._inner: set[type] = set()
        self._lowest = self._highest = 0

    def add(self, values: Iterable[Any]) -> None:
        """Take the values of some lines."""
        values = [value for value in values if value is not None]
        self._outer |= set(map(type, values))
        if list in self._outer:
            values = list(chain.from_iterable(value for value in values if type(value) is list))
        elif dict in self._outer:
            values = list(chain.from_iterable(value.values() for value in values if type(value) is dict))
        self._inner |= set(map(type, values)) - {type(None)}
        if int in self._inner:
            integers = [value for value in values if type(value) is int]
            self._lowest = min(self._lowest, *integers, 0)
            self._highest = max(self._highest, *integers, 0)

    @property
    def type(self) -> pa.DataType:
        """The Arrow type that all of it has; text, which is then JSON, when there is no other."""
        import pyarrow as pa  # noqa: PLC0415  an extra

        inner = self._inner_type()
        if inner is None:
            return pa.string()
        if self._outer == {list}:
            return pa.list_(inner)
        if self._outer == {dict}:
            return pa.map_(pa.string(), inner)
        return pa.string() if self._outer & {list, dict} else inner

    def array(self, values: list[Any]) -> pa.Array:
        """Values of the column as that type."""
        import pyarrow as pa  # noqa: PLC0415

        kind = self.type
        if pa.types.is_string(kind) and self._outer != {str}:
            texts = [None if value is None else json.dumps(value) for value in values]
            return pa.array(texts, kind)
        if pa.types.is_map(kind):
            values = [None if value is None else list(value.items()) for value in values]
        return pa.array(values, kind)

    def _inner_type(self) -> pa.DataType | None:
        import pyarrow as pa  # noqa: PLC0415

        limits = (self._lowest, self._highest)
        if self._inner == {int} and fits(limits):
            return pa.int64()
        if self._inner <= {int, float} and fits(limits, _EXACT):
            return pa.float64()
        return {frozenset({str}): pa.string(), frozenset({bool}): pa.bool_()}.get(frozenset(self._inner))
