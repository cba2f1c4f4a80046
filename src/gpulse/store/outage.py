"""A failure that is going on, with its start and hint."""

from __future__ import annotations

from typing import NamedTuple


class Outage(NamedTuple):
    """What does not work, since when, and what to try."""

    since: float
    message: str
    hint: str | None = None
