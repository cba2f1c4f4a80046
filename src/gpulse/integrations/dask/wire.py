"""What scheduler and workers say to each other, and under which names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Self

from gpulse.integrations.dask.tracking import Column

PLUGIN = "gpulse"
"""The name of the plugins."""
JOIN = "gpulse_join"
"""A worker is here; the answer is an order, if monitoring runs."""
ROWS = "gpulse_rows"
"""A worker brings measurements; the answer is a dict, and nothing at all where nobody knows the question."""
ORDER = "gpulse_order"
"""The scheduler wants something of a worker; the answer is as above."""


class Order(NamedTuple):
    """What the scheduler wants: to begin, to stop, or, when it is neither, just what was measured so far."""

    running: bool = False
    stop: bool = False
    elapsed: float = 0.0
    """Seconds since monitoring was first started, when this was sent."""
    sent: float = 0.0
    """That moment by the scheduler's clock."""
    token: str = ""
    """Of the marks that count."""
    adopted: Mapping[Any, str] = {}
    """The marks of tasks that were here before they could carry one."""
    tracked: tuple[Column, ...] = ()
    streams: bool = False
    """Whether this worker speaks to the head for its machine."""

    @classmethod
    def of(cls, message: Mapping[str, Any]) -> Self:
        """The order of a message; dask's wire knows only plain lists."""
        order = cls(**message)
        return order._replace(tracked=tuple(Column(*column) for column in order.tracked))
