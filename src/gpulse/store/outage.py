"""Something that does not work at the moment, told beside what does."""

from __future__ import annotations

from typing import NamedTuple


class Outage(NamedTuple):
    """What does not work, since when, and what to try."""

    since: float
    message: str
    hint: str | None = None
