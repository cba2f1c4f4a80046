"""JSON objects that are read when somebody looks into them: a month has many processes, and few are asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

from gpulse.store.metadata.values import read_object


@lru_cache(64)
def _read(text: str) -> dict[str, Any]:
    """Of the objects that are looked into, only the last ones are held."""
    return read_object(text)


class LazyJson(Mapping[str, Any]):
    """An object as it was written."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def __getitem__(self, name: str) -> Any:
        return _read(self._text)[name]

    def get(self, name: str, default: Any = None) -> Any:
        """What is under a name; quicker than the Mapping's own."""
        return _read(self._text).get(name, default)

    def __iter__(self) -> Iterator[str]:
        return iter(_read(self._text))

    def __len__(self) -> int:
        return len(_read(self._text))

    def __repr__(self) -> str:
        return self._text
