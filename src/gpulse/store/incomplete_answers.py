"""Notes on what is missing from an answer, and outages of the backends that cause it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

_MAX_NOTE_CHARS = 300
_MAX_NOTES = 20

_notes: ContextVar[list[str] | None] = ContextVar("missing", default=None)


def note_missing(text: str) -> None:
    """Add a note for users about data that is missing from the current answer."""
    notes = _notes.get()
    text = text if len(text) <= _MAX_NOTE_CHARS else f"{text[: _MAX_NOTE_CHARS - 1]}…"
    if notes is not None and text not in notes and len(notes) < _MAX_NOTES:
        notes.append(text)


@contextmanager
def collect_missing() -> Iterator[list[str]]:
    """Collect the notes about missing data from all queries within the block, each note once.

    Only queries of the same thread are covered.
    """
    notes: list[str] = []
    before = _notes.set(notes)
    try:
        yield notes
    finally:
        _notes.reset(before)


class BackendOutage(NamedTuple):
    """An ongoing failure of a backend: since when, why, and what to try."""

    since: float
    message: str
    hint: str | None = None
