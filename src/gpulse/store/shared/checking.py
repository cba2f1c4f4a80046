"""Whether what another head tells is as it should be: anybody may write into a shared directory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from gpulse.model.packing import device_of
from gpulse.model.session import Session
from gpulse.store.book.values import UNREADABLE, number, spelled, text, whole
from gpulse.store.shared.facts import NodeName, Told

_LONGEST = (253, 200, 300)
"""Of a node's host name, machine and name."""
_RUN_BYTES = 16


def checked(fact: Told) -> Told:
    """A fact whose fields are of their kinds, with its node as `NodeName`.

    Raises:
        ValueError: Something is not as it should be, or only a newer version knows it.
    """
    try:
        whole(fact["position"])
        spelled(fact)  # it is to be written to a log
        _KINDS[fact["fact"]](fact)
        if fact["fact"] == "session" or (fact["fact"] == "event" and fact.get("node") is None):
            return fact
        return {**fact, "node": _node(fact["node"])}
    except UNREADABLE as error:
        raise ValueError(f"it cannot be read: {error}") from error


def _node(value: Any) -> NodeName:
    for part, longest in zip(value, _LONGEST, strict=True):
        if not 0 < len(text(part)) <= longest or not part.isprintable():
            raise ValueError("it is not a node's name")
    return NodeName(*value)


def _known_node(fact: Told) -> None:
    number(fact["time"])
    dict(fact["facts"])
    for label in dict(fact["labels"]).items():
        "".join(map(text, label))


def _devices(fact: Told) -> None:
    number(fact["time"])
    for device in fact["devices"]:
        device_of(device)


def _event(fact: Told) -> None:
    number(fact["time"])
    text(fact["kind"])
    dict(fact["detail"])


def _frame(fact: Told) -> None:
    number(fact["time"])
    whole(fact["sequence"])
    text(fact["events"])
    if len(bytes.fromhex(fact["run"])) != _RUN_BYTES:
        raise ValueError("it is not a run")


def _process(fact: Told) -> None:
    number(fact["first_seen"])
    whole(fact["pid"])
    dict(fact["identity"])


_KINDS: Mapping[str, Callable[[Told], object]] = {
    "session": Session.from_dict,
    "node": _known_node,
    "devices": _devices,
    "event": _event,
    "frame": _frame,
    "process": _process,
}
