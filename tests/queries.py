"""Builds the questions that tests ask stores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gpulse.store.store import Query

_SETS = ("nodes", "subjects", "gpus", "kinds", "pids", "jobs")


def query(scope: Any = "gpu", metrics: str | Sequence[str] = (), **fields: Any) -> Query:
    """A question, with any collection where a query has a set, and one metric or several."""
    names = (metrics,) if isinstance(metrics, str) else tuple(metrics)
    for name in _SETS:
        if fields.get(name) is not None:
            fields[name] = frozenset(fields[name])
    return Query(scope=scope, metrics=names, **fields)
