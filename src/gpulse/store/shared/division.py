"""Which head answers for which time of which node, where several have frames of it: each minute is one's alone."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from gpulse.store.base import Steps, SummarySource
from gpulse.store.history.rollup import MINUTE_US
from gpulse.store.history.series import microseconds

Minutes = Mapping[tuple[int, int], int]
"""By node and the microsecond at which a minute begins, how many samples of it there are."""


class Span(NamedTuple):
    """From when to when a head may have frames of some nodes, in microseconds."""

    start: int
    end: int
    nodes: frozenset[int]


class Part(NamedTuple):
    """What a head is asked for."""

    head: str
    start: int
    """Microseconds; within."""
    end: int
    """Microseconds; not within any more."""
    nodes: frozenset[int]


_PRESENT = ("gpu_utilization_ratio", "power_watts", "memory_used_bytes")
"""One of them is known of every GPU that is there."""
OWN = "own"
"""The head that asks: of two that have as much of a minute it is the one that answers."""


def minutes_of(store: SummarySource, start: float, end: float, nodes: Collection[int] | None) -> Minutes:
    """How many samples of GPUs a store has of each minute that a time touches."""
    begin = microseconds(start) // MINUTE_US * MINUTE_US / 1e6
    stop = -(-microseconds(end) // MINUTE_US) * MINUTE_US / 1e6
    by_node: dict[int, list[Steps]] = {}
    for steps in store.steps("gpu", _PRESENT, start=begin, end=stop, step=60.0, nodes=nodes):
        by_node.setdefault(steps.key.node, []).append(steps)
    found: dict[tuple[int, int], int] = {}
    for node, every in by_node.items():
        times = np.rint(np.concatenate([one.times for one in every]) * 1e6).astype(np.int64)
        counts = [np.ones(len(one.times), np.int64) if one.counts is None else one.counts for one in every]
        minutes, places = np.unique(times, return_inverse=True)
        most = np.zeros(len(minutes), np.int64)
        np.maximum.at(most, places, np.concatenate(counts))
        found |= {
            (node, minute): count for minute, count in zip(minutes.tolist(), most.tolist(), strict=True)
        }
    return found


def spans_of(minutes: Minutes) -> list[Span]:
    """From when to when minutes lie, those of nodes that have the same ones together."""
    begins: dict[int, list[int]] = {}
    for node, minute in minutes:
        begins.setdefault(node, []).append(minute)
    found: dict[tuple[int, int], set[int]] = {}
    for node, moments in begins.items():
        for stretch in _merged((moment, moment + MINUTE_US) for moment in moments):
            found.setdefault(stretch, set()).add(node)
    return [Span(start, end - 1, frozenset(nodes)) for (start, end), nodes in found.items()]


def contested(spans: Mapping[str, Sequence[Span]]) -> list[Span]:
    """Where two heads may have frames of the same nodes, in whole minutes and in their order."""
    found: list[Span] = []
    going: list[tuple[str, Span]] = []
    for span, head in sorted(
        ((span, head) for head, known in spans.items() for span in known), key=lambda item: item[0][:2]
    ):
        going = [(other, one) for other, one in going if one.end >= span.start]
        for other, one in going:
            nodes = one.nodes & span.nodes
            if other != head and nodes:
                start, end = span.start // MINUTE_US, min(one.end, span.end) // MINUTE_US + 1
                found.append(Span(start * MINUTE_US, end * MINUTE_US, nodes))
        going.append((head, span))
    return found


def divided(
    start: int,
    end: int,
    nodes: Mapping[str, frozenset[int]],
    disputes: Iterable[Span],
    minutes: Mapping[str, Minutes],
) -> list[Part]:
    """The questions to ask: what is undisputed at once, and each disputed minute of the head that has most of it.

    Args:
        start: Microseconds; within.
        end: Microseconds; not within any more.
        nodes: By head the nodes that it may be asked for.
        disputes: Where several heads may have frames of the same nodes.
        minutes: By head what it has of these.
    """
    owners = _owners(minutes)
    disputed: dict[int, list[tuple[int, int]]] = {}
    for span in disputes:
        for node in span.nodes:
            disputed.setdefault(node, []).append((max(span.start, start), min(span.end, end)))
    parts: dict[tuple[str, int, int], set[int]] = {}
    for head, known in nodes.items():
        for node in known:
            for begin, stop in _stretches(start, end, disputed.get(node, ()), head, node, owners):
                parts.setdefault((head, begin, stop), set()).add(node)
    return [Part(*key, frozenset(found)) for key, found in sorted(parts.items())]


def _owners(minutes: Mapping[str, Minutes]) -> dict[tuple[int, int], str]:
    best: dict[tuple[int, int], tuple[int, str]] = {}
    for head, known in sorted(minutes.items(), key=lambda item: (item[0] != OWN, item[0])):
        for key, samples in known.items():
            if key not in best or samples > best[key][0]:
                best[key] = samples, head
    return {key: head for key, (_, head) in best.items()}


def _stretches(
    start: int,
    end: int,
    disputed: Iterable[tuple[int, int]],
    head: str,
    node: int,
    owners: Mapping[tuple[int, int], str],
) -> Iterator[tuple[int, int]]:
    """What a head answers for of one node; neighbours are one."""
    begin = stop = start
    for first, last in _merged(disputed):
        stop = max(stop, first)
        minute = first // MINUTE_US * MINUTE_US
        while minute < last:
            if owners.get((node, minute), head) != head:
                if begin < stop:
                    yield begin, stop
                begin = min(minute + MINUTE_US, end)
            stop = min(minute + MINUTE_US, end)
            minute += MINUTE_US
    if begin < end:
        yield begin, end


def _merged(stretches: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for start, end in sorted(stretches):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        elif start < end:
            found.append((start, end))
    return found
