"""What each finding means, for the dashboard: the words of `gpulse explain` and of the evidence, in one document."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from starlette.routing import Route

from gpulse.diagnosis import signals
from gpulse.diagnosis.manual import FAMILIES, Entry, entries
from gpulse.model.clocks import REASONS
from gpulse.model.metric import CATALOGUE
from gpulse.web.answer import json_response

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

PATH = "/manual.json"


@cache
def document() -> dict[str, Any]:
    """Families, findings, and how the signals of evidence are called."""
    return {
        "families": dict(FAMILIES),
        "findings": {entry.id: _explained(entry) for entry in entries()},
        "signals": _signals(),
        "statistics": dict(signals.STATISTICS),
        "comparisons": dict(signals.COMPARED),
        "reasons": {str(reason.bit): reason.name for reason in REASONS},
    }


def routes() -> list[Route]:
    """Where the document is served."""
    return [Route(PATH, _answer, methods=["GET"])]


async def _answer(_request: Request) -> Response:
    return await json_response(document())


def _explained(entry: Entry) -> dict[str, Any]:
    return {
        "title": entry.title,
        "means": entry.means,
        "recognised": entry.recognised,
        "severity": entry.severity,
        "family": entry.family,
        "informational": entry.informational,
        "limits": list(entry.limits),
        "needs": list(entry.needs),
        "sources": list(entry.sources),
        "advice": [advice._asdict() for advice in entry.advice],
    }


def _signals() -> dict[str, dict[str, str]]:
    names = [*signals.DERIVED, *(name for metrics in CATALOGUE.values() for name in metrics)]
    known = {name: signals.signal(name) for name in names}
    return {
        name: {"words": said.words, "unit": said.unit} for name, said in known.items() if said is not None
    }
