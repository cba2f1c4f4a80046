"""Collect what is missing from an answer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_MAX_CHARACTERS = 300
_MAX_TEXTS = 20

_heard: ContextVar[list[str] | None] = ContextVar("left_out", default=None)


def left_out(text: str) -> None:
    """Say what is missing from the answer that is on its way, for people."""
    heard = _heard.get()
    text = text if len(text) <= _MAX_CHARACTERS else f"{text[: _MAX_CHARACTERS - 1]}…"
    if heard is not None and text not in heard and len(heard) < _MAX_TEXTS:
        heard.append(text)


@contextmanager
def noticing() -> Iterator[list[str]]:
    """Hear what is left out of the answers to questions that are asked within; each text once.

    It is for questions of the same thread.
    """
    heard: list[str] = []
    before = _heard.set(heard)
    try:
        yield heard
    finally:
        _heard.reset(before)
