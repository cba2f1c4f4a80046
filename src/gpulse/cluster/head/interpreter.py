"""What another head tells, in this head's words: nodes get the numbers that they have here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

from gpulse.cluster.head.fleet import Fleet
from gpulse.cluster.head.upkeep import Notes
from gpulse.store.base import StoredNode
from gpulse.store.shared.facts import VIA, NodeName, Told

_UNREADABLE = (ValueError, TypeError, LookupError, AttributeError)
_LONGEST = (253, 200, 300)


class Interpreter:
    """Translates what other heads tell. For the loop's thread, as everything that gives nodes their numbers."""

    def __init__(self, fleet: Fleet, notes: Notes, *, now: Callable[[], float]) -> None:
        self._fleet = fleet
        self._notes = notes
        self._now = now

    def translated(self, head: str, facts: Sequence[Told]) -> Iterator[dict[str, Any]]:
        """The facts with this head's numbers; nodes that are new here are noted on the way, what cannot be read is left out."""
        for fact in facts:
            with suppress(*_UNREADABLE):
                told = self._translated(head, fact)
                if told is not None:
                    yield told

    def _translated(self, head: str, fact: Told) -> dict[str, Any] | None:
        told = {name: value for name, value in fact.items() if name != "position"}
        kind = told["fact"]
        if kind == "session":
            return told
        node = None if told.get("node") is None else self._number(head, _checked(told["node"]), fact)
        if kind == "node":
            return None  # it is noted by now
        if kind == "event" and node is None:
            told["detail"] = {**told["detail"], "head": head}
        if kind == "devices":
            told["first"] = self._now()
        return {**told, "node": node}

    def _number(self, head: str, name: NodeName, fact: Told) -> int:
        register = self._fleet.register
        known = register.find(name.host, name.machine)
        is_news = fact["fact"] == "node"
        node = known
        if node is None:
            began = float(fact["time"]) if isinstance(fact.get("time"), int | float) else self._now()
            node = register.new(name.host, name.machine, began, name=name.name)
        if is_news and (known is None or (fact["position"] and not self._is_here(known.id))):
            node = node._replace(facts=dict(fact["facts"]), labels=dict(fact["labels"]))
        if node != known:
            self._take(node, head)
        return node.id

    def _take(self, node: StoredNode, head: str) -> None:
        fields = node._asdict()
        fields["time"] = fields.pop("first_seen")
        self._notes.note("node", **fields, **{VIA: head})
        self._fleet.register.put(node)
        member = self._fleet.members.get(node.id)
        if member is not None:
            member.stored = node

    def _is_here(self, node: int) -> bool:
        """Whether a node speaks to this head itself, which then knows better."""
        member = self._fleet.members.get(node)
        return member is not None and member.connected


def _checked(value: Any) -> NodeName:
    for text, longest in zip(value, _LONGEST, strict=True):
        if not isinstance(text, str) or not 0 < len(text) <= longest or not text.isprintable():
            raise ValueError("it is not a node's name")
    return NodeName(*value)
