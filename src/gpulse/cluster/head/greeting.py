"""The first words of an agent: what must be true of them before anything is believed."""

from __future__ import annotations

import json
from typing import Any

import grpc

from gpulse._version import __version__
from gpulse.cluster import wire
from gpulse.cluster.wire_pb2 import Hello
from gpulse.model.device import Node
from gpulse.model.session import LONGEST_LABEL, MOST_LABELS

MOST_RUNS = 10_000
_LONGEST = {"host": 253, "machine": 200, "boot": 100, "instance": 100, "version": 100}


class Refused(Exception):  # noqa: N818  it is no error of ours
    """An agent's call that is ended, with the reason it is told."""

    def __init__(self, code: grpc.StatusCode, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


def checked_hello(hello: Hello) -> dict[str, Any]:
    """The node's facts, when the hello is one of an agent that can be understood.

    Raises:
        Refused: It is not.
    """
    if hello.protocol != wire.PROTOCOL:
        raise Refused(
            grpc.StatusCode.FAILED_PRECONDITION,
            f"the head speaks protocol {wire.PROTOCOL} (gpulse {__version__}), this agent protocol {hello.protocol}"
            f" (gpulse {_shown(hello.version)}); install the same gpulse on both",
        )
    for name, longest in _LONGEST.items():
        text = getattr(hello, name)
        if len(text) > longest or not text.isprintable():
            raise _invalid(f"its {name} is no name")
    if not hello.host or not hello.machine:
        raise _invalid("it does not say which machine it is on")
    labels = [text for pair in hello.labels.items() for text in pair]
    if len(hello.labels) > MOST_LABELS or any(
        len(text) > LONGEST_LABEL or not text.isprintable() for text in labels
    ):
        raise _invalid("its labels are too many, too long, or not printable")
    if not 1 <= len(hello.runs) <= MOST_RUNS or any(len(run.id) != wire.RUN_BYTES for run in hello.runs):
        raise _invalid("it does not say which run it is")
    return _facts(hello.node)


def _facts(text: bytes) -> dict[str, Any]:
    try:
        document = json.loads(text) if text else {}
        if not isinstance(document, dict):
            raise TypeError("no object")
        facts = {name: document[name] for name in Node._fields[1:] if name in document}
        Node("", **facts)
    except (ValueError, TypeError, RecursionError) as error:
        raise _invalid("its node's facts are none") from error
    for name, value in facts.items():
        if not _fits(name, value):
            raise _invalid(f"its node's {name} is none")
    return facts


def _fits(name: str, value: Any) -> bool:
    match name:
        case "ticks_per_second":
            return isinstance(value, int) and 0 < value <= 1_000_000
        case "numa_cpus":
            return isinstance(value, list) and len(value) <= 4096 and all(map(_is_short, value))
        case _:
            return value is None or _is_short(value)


def _is_short(value: object) -> bool:
    return isinstance(value, str) and len(value) <= 1000


def _shown(text: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in text[:40]) or "unknown"


def _invalid(reason: str) -> Refused:
    return Refused(grpc.StatusCode.INVALID_ARGUMENT, f"this is not an agent's hello: {reason}")
