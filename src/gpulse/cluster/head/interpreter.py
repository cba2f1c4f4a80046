"""What another head tells, in this head's words: nodes get the numbers that they have here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

from gpulse.cluster.head.fleet import Fleet
from gpulse.cluster.head.membership import node_fact
from gpulse.cluster.head.upkeep import Notes
from gpulse.store.base import HEARSAY, StoredNode
from gpulse.store.shared.checking import checked
from gpulse.store.shared.facts import NodeName, Told


class Interpreter:
    """Translates what other heads tell. For the loop's thread, as everything that gives nodes their numbers."""

    def __init__(self, fleet: Fleet, notes: Notes, *, now: Callable[[], float]) -> None:
        self._fleet = fleet
        self._notes = notes
        self._now = now

    def translated(self, head: str, facts: Sequence[Told]) -> Iterator[dict[str, Any]]:
        """The facts with this head's numbers; nodes that are new here are noted on the way, what cannot be read is left out."""
        for fact in facts:
            with suppress(ValueError):
                told = self._translated(head, checked(fact))
                if told is not None:
                    yield told

    def _translated(self, head: str, fact: Told) -> dict[str, Any] | None:
        told = {name: value for name, value in fact.items() if name != "position"}
        kind = told["fact"]
        if kind == "session":
            return told
        if kind == "event" and not fact["position"]:
            told["past"] = True
        if told.get("node") is None:
            return {**told, "detail": {**told["detail"], "head": head}}
        node = self._number(head, told["node"], fact)
        if kind == "node":
            return None  # it is noted by now
        if kind == "devices":
            told["here"] = self._is_here(node)
        return {**told, "node": node}

    def _number(self, head: str, name: NodeName, fact: Told) -> int:
        register = self._fleet.register
        known = register.find(name.host, name.machine)
        node = known
        if node is None:
            began = float(fact["time"]) if "time" in fact else self._now()
            node = register.new(name.host, name.machine, began, name=name.name)
            node = node._replace(via=HEARSAY)
        if fact["fact"] == "node" and self._is_news(known, fact):
            node = node._replace(facts=dict(fact["facts"]), labels=dict(fact["labels"]), via=head)
        if node != known:
            self._take(node)
        return node.id

    def _is_news(self, known: StoredNode | None, fact: Told) -> bool:
        """Whether what another head says of a node counts: the one that the node speaks to knows best."""
        if known is None or known.via == HEARSAY:
            return True
        return bool(fact["position"]) and not self._is_here(known.id)

    def _take(self, node: StoredNode) -> None:
        self._notes.note("node", **node_fact(node))
        self._fleet.register.put(node)
        member = self._fleet.members.get(node.id)
        if member is not None:
            member.stored = node

    def _is_here(self, node: int) -> bool:
        """Whether a node speaks to this head itself, which then knows better."""
        member = self._fleet.members.get(node)
        return member is not None and member.connected
