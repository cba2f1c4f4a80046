"""Findings over time as the API tells of them."""

from __future__ import annotations

from typing import Any, TypeVar

from gpulse.reports.document import Document
from gpulse.store.store import StoredFinding

_Kind = TypeVar("_Kind")


def described(stored: StoredFinding, name: str) -> Document:
    """Return a stored finding as the API tells of it, with its own start and end whatever time was asked for.

    Args:
        stored: The finding.
        name: The node's.
    """
    told = stored.finding
    return {
        "node": name,
        "gpu": _as(int, told.get("gpu")),
        "label": _as(str, told.get("label")),
        "id": str(told.get("id")),
        "cause": _as(str, told.get("cause")),
        "family": _as(str, told.get("family")),
        "severity": _as(str, told.get("severity")) or "info",
        "summary": _as(str, told.get("summary")) or "",
        "lost_ratio": _number(told.get("lost_ratio")),
        "confidence": _number(told.get("confidence")),
        "pids": [pid for pid in _as(list, told.get("pids")) or [] if _as(int, pid) is not None],
        "from": stored.span.start,
        "to": stored.span.end,
        "evidence": [item for item in _as(list, told.get("evidence")) or [] if isinstance(item, dict)],
        "advice": [item for item in _as(list, told.get("advice")) or [] if isinstance(item, dict)],
        "url": _as(str, told.get("url")),
    }


def _as(kind: type[_Kind], value: Any) -> _Kind | None:
    """A value of that kind, None for any other: agents of other versions may tell other things."""
    return value if isinstance(value, kind) and not isinstance(value, bool) else None


def _number(value: Any) -> float | None:
    return _as(float, value) if isinstance(value, float) else _as(int, value)
