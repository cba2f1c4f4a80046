"""What is new at the nodes, as JSON; each piece of it is written once for all clients that want the same."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from gpulse.cluster.protocol.codec import encode
from gpulse.cluster.protocol.interface import HeadInterface, LiveNode
from gpulse.model.metric import Value
from gpulse.web.details import describe
from gpulse.web.wish import Wish

_MOST_TEXTS = 20_000


class Shown(NamedTuple):
    """What was last told of a node, as far as it takes to know that there is more."""

    state: str
    connected: bool
    time: float | None
    gpus: tuple[str, ...] | None

    @classmethod
    def of(cls, node: LiveNode) -> Shown:
        """A node as it is now."""
        time = None if node.frame is None else node.frame.time
        return cls(
            node.state, node.connected or node.elsewhere, time, tuple(device.uuid for device in node.devices)
        )


class Sent(NamedTuple):
    """What somebody has of a node."""

    shown: Shown
    details: str


_NOTHING = Sent(Shown("", connected=False, time=None, gpus=None), "")


class News:
    """Writes what is new; remembers what it wrote last of each node."""

    def __init__(self, head: HeadInterface) -> None:
        self._head = head
        self._texts: dict[tuple[int, tuple[str, ...], tuple[str, ...]], tuple[Shown, str]] = {}
        self._details: dict[int, tuple[Shown, str]] = {}
        """The same text as long as the details are the same."""

    def clear(self) -> None:
        """Forget everything: nobody listens."""
        self._texts.clear()
        self._details.clear()

    def since(self, wanted: Wish, sent: dict[int, Sent]) -> Iterator[str]:
        """The nodes that changed since they were sent last; remembers that they were."""
        for node in self._head.live():
            if wanted.nodes is not None and node.name not in wanted.nodes:
                continue
            now = Sent(Shown.of(node), "")
            if wanted.details:
                now = now._replace(details=self._detailed(node, now.shown))
            before = sent.get(node.id, _NOTHING)
            if before == now:
                continue
            sent[node.id] = now
            gpus = f'"gpus":{encode(gpus_of(node)).decode()},' if before.shown.gpus != now.shown.gpus else ""
            details = f'"details":{now.details},' if before.details != now.details else ""
            yield f"{{{gpus}{details}{self._text(node, now.shown, wanted)}}}"

    def _detailed(self, node: LiveNode, now: Shown) -> str:
        before = self._details.get(node.id)
        if before is None or before[0] != now:
            text = encode(describe(node)).decode()
            if before is not None and before[1] == text:
                text = before[1]
            before = self._details[node.id] = (now, text)
        return before[1]

    def _text(self, node: LiveNode, now: Shown, wanted: Wish) -> str:
        key = (node.id, wanted.metrics, wanted.host_metrics)
        before = self._texts.get(key)
        if before is None or before[0] != now:
            if len(self._texts) >= _MOST_TEXTS:
                self._texts.clear()
            before = self._texts[key] = (now, encode(_document(node, wanted))[1:-1].decode())
        return before[1]


def gpus_of(node: LiveNode) -> list[dict[str, str]]:
    """A node's GPUs, in the order of their values."""
    return [{"id": device.label, "uuid": device.uuid, "name": device.name} for device in node.devices]


def _document(node: LiveNode, wanted: Wish) -> dict[str, Any]:
    frame = node.frame
    document: dict[str, Any] = {
        "node": node.name,
        "state": node.state,
        "connected": node.connected or node.elsewhere,
        "time": None if frame is None else frame.time,
        "seen": round(node.seen, 3),
        "values": {},
    }
    if frame is not None:
        document["values"] = {name: [_finite(gpu.get(name)) for gpu in frame.gpus] for name in wanted.metrics}
    if wanted.host_metrics:
        values: Mapping[str, Value] = (
            frame.host.values if frame is not None and frame.host is not None else {}
        )
        document["host"] = {name: _finite(values.get(name)) for name in wanted.host_metrics}
    return document


def _finite(value: Value | None) -> Value | None:
    return value if value is not None and math.isfinite(value) else None
