"""Apply steps of one head's log to the tables that all heads share."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from gpulse.model.columns import Layout
from gpulse.store.metadata.database import postgres_text
from gpulse.store.metadata.facts import Fact, apply_fact, gpus_of
from gpulse.store.metadata.frames import apply_frame
from gpulse.store.metadata.postgres import DATA_ERRORS, PostgresDatabase
from gpulse.store.metadata.step import Step
from gpulse.store.metadata.values import UNREADABLE, spelled
from gpulse.store.store import StoredNode

log = logging.getLogger(__name__)

_PRIVATE_FACTS = frozenset({"layout", "forget", "settings"})
"""Facts that concern one head alone."""
_NEW_NODES = """
INSERT INTO nodes (name, host, machine, first_seen, facts, labels)
SELECT * FROM unnest(?::text[], ?::text[], ?::text[], ?::float8[], ?::text[], ?::text[])
ON CONFLICT (host, machine) DO NOTHING
"""
_NODE_IDS = """
SELECT nodes.id, nodes.host, nodes.machine FROM nodes
JOIN unnest(?::text[], ?::text[]) AS known (host, machine) ON nodes.host = known.host AND nodes.machine = known.machine
"""


class NodeIds:
    """The ids that nodes have in PostgreSQL, by the numbers that one head gave them."""

    def __init__(self, node_of: Callable[[int], StoredNode | None]) -> None:
        """Know none yet.

        Args:
            node_of: Returns the node that a number of this head stands for.
        """
        self._node_of = node_of
        self._ids: dict[int, int] = {}

    def clear(self) -> None:
        """Forget all of them: the database may be another one."""
        self._ids.clear()

    def known(self, number: int) -> int | None:
        """Return the id of a node, None when it is not known."""
        return self._ids.get(number)

    def learn(self, database: PostgresDatabase, numbers: Iterable[int]) -> None:
        """Find the ids of nodes, and make those that are missing."""
        unknown = set(numbers) - self._ids.keys()
        nodes = [node for number in unknown if (node := self._node_of(number)) is not None]
        if not nodes:
            return
        database.execute(
            _NEW_NODES,
            (
                [node.name for node in nodes],
                [postgres_text(node.host) for node in nodes],
                [postgres_text(node.machine) for node in nodes],
                [node.first_seen for node in nodes],
                [spelled(dict(node.facts)) for node in nodes],
                [spelled(dict(node.labels)) for node in nodes],
            ),
        )
        self._ids |= find_ids(database, nodes)


def find_ids(database: PostgresDatabase, nodes: Iterable[StoredNode]) -> dict[int, int]:
    """Return the ids that nodes have in PostgreSQL, by their numbers; without those that are not there."""
    known = {(postgres_text(node.host), postgres_text(node.machine)): node.id for node in nodes}
    columns = [host for host, _ in known], [machine for _, machine in known]
    found = database.execute(_NODE_IDS, columns).fetchall()
    return {known[host, machine]: node for node, host, machine in found}


def run_or_skip(database: PostgresDatabase, work: Callable[[], object]) -> bool:
    """Do something within the caller's transaction, unless PostgreSQL refuses a value in it; whether it was done."""
    try:
        with database.connection.transaction():
            work()
    except DATA_ERRORS as error:
        log.error("PostgreSQL did not take a record of this head, which is skipped: %s", str(error)[:200])
        return False
    return True


class StepApplier:
    """Translates what one head's log says, and applies it."""

    def __init__(self, ids: NodeIds, layout_of: Callable[[int], Layout | None]) -> None:
        """Prepare to apply steps.

        Args:
            ids: The nodes of this head.
            layout_of: Returns a layout that an earlier step introduced.
        """
        self._ids = ids
        self._layout_of = layout_of
        self._gpu_layouts: dict[int, Layout] = {}

    def apply(self, database: PostgresDatabase, steps: Sequence[Step], *, one_by_one: bool = False) -> None:
        """Apply steps, within the caller's transaction.

        Args:
            database: Where to.
            steps: In the order of the log.
            one_by_one: Leave out what PostgreSQL does not take, and keep the rest.
        """
        numbers = {node for step in steps for node in _nodes_of(step)}
        if numbers:
            self._ids.learn(database, numbers)
        for step in steps:
            for fact in step.facts:
                translated = self._translated(fact)
                if translated is not None:
                    self._run(database, partial(apply_fact, database, translated), one_by_one)
            for frame in step.events:
                node = self._ids.known(frame.node)
                if node is not None:
                    own = frame._replace(node=node)
                    self._run(database, partial(apply_frame, database, own), one_by_one)

    def _run(self, database: PostgresDatabase, work: Callable[[], None], one_by_one: bool) -> None:
        if not one_by_one:
            work()
        else:
            run_or_skip(database, work)

    def _translated(self, fact: Fact) -> dict[str, Any] | None:
        """Return a fact with PostgreSQL's ids of nodes; None when it does not concern other heads."""
        kind = fact.get("fact")
        try:
            if kind == "layout":
                layout = Layout.from_json(fact["text"])
                if layout.scope == "gpu":
                    self._gpu_layouts[int(fact["id"])] = layout
            if kind in _PRIVATE_FACTS:
                return None
            found = dict(fact)
            if kind == "devices":
                found["devices"] = self._devices(int(fact["layout"]))
            name = "id" if kind == "node" else "node"
            number = found.get(name)
            if isinstance(number, int):
                found[name] = self._ids.known(number)
                if found[name] is None:
                    return None
        except UNREADABLE:  # the head's own metadata reports it
            return None
        return found

    def _devices(self, name: int) -> Sequence[Mapping[str, Any]]:
        layout = self._gpu_layouts.get(name) or self._layout_of(name)
        return () if layout is None else gpus_of(layout)


def _nodes_of(step: Step) -> Iterable[int]:
    for fact in step.facts:
        node = fact.get("id" if fact.get("fact") == "node" else "node")
        if isinstance(node, int) and not isinstance(node, bool):
            yield node
    for frame in step.events:
        yield frame.node
