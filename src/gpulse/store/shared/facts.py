"""From entries of a head's log to what other heads are told of them, which names nodes by their machines."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from gpulse.model.columns import Layout
from gpulse.model.session import Session
from gpulse.store.base import StoredEvent, StoredGpu, StoredNode, StoredProcess
from gpulse.store.entry import Entry

Told = dict[str, Any]
"""One fact as it is shared: `fact` says which, `position` where in the log it was."""
VIA = "via"
"""The field that says who told of a fact, when it was not a node that spoke to this head: then it is not told again."""


class NodeName(NamedTuple):
    """A node as all heads know it."""

    host: str
    machine: str
    name: str
    """What the head that tells of it calls it."""

    @classmethod
    def of(cls, node: StoredNode) -> NodeName:
        """The name of a node of this head."""
        return cls(node.host, node.machine, node.name)


def told_of(
    position: int, entry: Entry, nodes: Mapping[int, StoredNode], layouts: Mapping[int, Layout]
) -> list[Told]:
    """What other heads are told of one entry; mostly nothing.

    Args:
        position: The entry's, in the log.
        entry: What was written.
        nodes: Those of this head, by number.
        layouts: Those of frames, by number.
    """
    if entry.fact is not None:
        told = _of_fact(entry.fact, nodes, layouts)
        return [] if told is None else [{"position": position, **told}]
    return [
        {
            "position": position,
            "fact": "frame",
            "node": NodeName.of(nodes[frame.node]),
            "run": frame.run.hex(),
            "sequence": frame.sequence,
            "time": frame.time,
            "events": frame.events.decode("utf-8", "replace"),
        }
        for frame in entry.events
        if frame.node in nodes
    ]


def _of_fact(
    fact: Mapping[str, Any], nodes: Mapping[int, StoredNode], layouts: Mapping[int, Layout]
) -> Told | None:
    if fact.get(VIA) is not None:
        return None
    match fact["fact"]:
        case "session":
            return dict(fact)
        case "event" if fact.get("node") is None or fact["node"] in nodes:
            node = fact.get("node")
            return {**fact, "node": None if node is None else NodeName.of(nodes[node])}
        case "node" if fact["id"] in nodes:
            fields = {name: fact[name] for name in ("time", "facts", "labels")}
            return {"fact": "node", "node": NodeName.of(nodes[fact["id"]]), **fields}
        case "devices" if fact["node"] in nodes and int(fact["layout"]) in layouts:
            devices = list(layouts[int(fact["layout"])].subjects)
            name = NodeName.of(nodes[fact["node"]])
            return {"fact": "devices", "node": name, "time": fact["time"], "devices": devices}
    return None


def told_at_first(
    nodes: Mapping[int, StoredNode], gpus: Iterable[StoredGpu], sessions: Iterable[Session]
) -> Iterator[Told]:
    """What the beginning of every file tells, so that older ones can go: what nodes told this head, and all sessions."""
    for node in nodes.values():
        if node.via is not None:
            continue
        known = {"time": node.first_seen, "facts": dict(node.facts), "labels": dict(node.labels)}
        yield {"position": 0, "fact": "node", "node": NodeName.of(node), **known}
    for gpu in gpus:
        if gpu.node in nodes and gpu.via is None:
            name = NodeName.of(nodes[gpu.node])
            known = {"time": gpu.told, "devices": [dict(gpu.device)]}
            yield {"position": 0, "fact": "devices", "node": name, **known}
    for session in sessions:
        yield {"position": 0, "fact": "session", **session.to_dict()}


def told_of_past(
    nodes: Mapping[int, StoredNode], events: Iterable[StoredEvent], processes: Iterable[StoredProcess]
) -> Iterator[Told]:
    """What was before the head began to tell: what happened, and which processes there were."""
    names = {number: NodeName.of(node) for number, node in nodes.items()}
    for event in events:
        if event.node is None or event.node in names:
            node = None if event.node is None else names[event.node]
            known = {"time": event.time, "kind": event.kind, "detail": dict(event.detail)}
            yield {"position": 0, "fact": "event", "node": node, **known}
    for process in processes:
        if process.node in names:
            lived = {"first_seen": process.first_seen, "ended": process.ended}
            which = {"node": names[process.node], "pid": process.pid, "start_time": process.start}
            yield {"position": 0, "fact": "process", **which, **lived, "identity": dict(process.identity)}
