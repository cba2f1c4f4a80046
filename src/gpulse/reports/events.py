"""Questions about what happened, in the words of the API: events, and findings over time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

from gpulse.model import iso_time
from gpulse.reports import findings
from gpulse.reports.document import Document
from gpulse.store.registry import Register
from gpulse.store.store import Query, Store, StoredFinding

_DEFAULT_SECONDS = 86_400.0
_MOST_EVENTS = 10_000
_MAX_FINDINGS = 2000


class Happened:
    """A store, asked what happened."""

    def __init__(
        self, store: Store, register: Register, node_ids: Callable[[Sequence[str]], frozenset[int] | None]
    ) -> None:
        """Prepare to answer.

        Args:
            store: Where the answers are.
            register: The nodes by number.
            node_ids: The numbers of nodes by name; None for all of them.
        """
        self._store = store
        self._register = register
        self._node_ids = node_ids

    async def events(
        self, *, start: float | None, end: float, kinds: Sequence[str], nodes: Sequence[str]
    ) -> Document:
        """What happened, the newest of it when it is much."""
        start = end - _DEFAULT_SECONDS if start is None else start
        found = await asyncio.to_thread(
            self._store.events,
            Query(
                start,
                end,
                nodes=self._node_ids(nodes),
                kinds=frozenset(kinds) or None,
                limit=_MOST_EVENTS + 1,
            ),
        )
        names = self._register.by_id
        return {
            "truncated": len(found) > _MOST_EVENTS,
            "events": [
                {
                    "time": iso_time.iso(event.time),
                    "kind": event.kind,
                    "node": names[event.node].name if event.node in names else None,
                    "detail": dict(event.detail),
                }
                for event in found[-_MOST_EVENTS:]
            ],
        }

    async def finding_spans(
        self, *, start: float | None, end: float | None, nodes: Sequence[str], now: float
    ) -> Document:
        """Return from when to when findings held that held at some time of a range, oldest first."""
        until = now if end is None else end
        begin = until - _DEFAULT_SECONDS if start is None else start
        wanted = self._node_ids(nodes)
        names = {number: node.name for number, node in self._register.by_id.items()}

        def ask() -> Document:
            found = self._store.findings(Query(begin, until, nodes=wanted, limit=_MAX_FINDINGS + 1))
            return {
                "truncated": len(found) > _MAX_FINDINGS,
                "spans": [
                    findings.described(stored, _name(stored, names)) for stored in found[-_MAX_FINDINGS:]
                ],
            }

        return {"from": begin, "to": until, **await asyncio.to_thread(ask)}


def _name(stored: StoredFinding, names: Mapping[int, str]) -> str:
    """Return the name of the node that a finding is about; one that never reported has it in the finding alone."""
    if stored.node is None:
        return str(stored.finding.get("cause") or "")
    return names.get(stored.node, str(stored.node))
