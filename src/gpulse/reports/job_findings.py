"""What was wrong with a job: findings of its GPUs in its time as one each, and what only the whole of it shows."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from gpulse.model.finding import SEVERITIES, Advice, FindingKey, finding_key
from gpulse.model.natural import natural_key
from gpulse.reports import findings
from gpulse.reports.document import Document
from gpulse.reports.efficiency import GpuUse
from gpulse.store.store import StoredFinding

MOST = 200
_IDLE_SHARE = 0.25
"""From this share of the time held on it is worth saying that GPUs did nothing."""
_WASTE_SECONDS = 600.0
"""Less idle time than that is a start or an end."""


def gathered(
    held: Iterable[StoredFinding],
    names: Mapping[int, str],
    labels: Mapping[int, Collection[str]],
    pids: Mapping[int, Collection[int]] | None,
    start: float,
    end: float,
) -> list[Document]:
    """The findings about somebody's GPUs, each once with how often and how long it held.

    Args:
        held: The findings of their nodes and time, oldest first.
        names: The nodes'.
        labels: Their GPUs, by node.
        pids: Their processes, by node: what is about others' alone is left out; None for everybody's.
        start: When their time began.
        end: When their time was over.
    """
    found: dict[tuple[int, FindingKey], Document] = {}
    for stored in held:
        node, span = stored.node, stored.span
        if node is None or node not in names:
            continue
        told = findings.described(stored, names[node])
        theirs = set(told["pids"])
        if told["label"] is not None and told["label"] not in labels.get(node, ()):
            continue
        if pids is not None and theirs and theirs.isdisjoint(pids.get(node, ())):
            continue
        until = end if span.end is None else min(span.end, end)
        seconds = max(0.0, until - max(span.start, start))
        key = node, finding_key(stored.finding)
        before = found.get(key)
        told |= {"times": 1, "active_seconds": seconds}
        if before is not None:
            told["from"] = before["from"]
            told["times"] += before["times"]
            told["active_seconds"] += before["active_seconds"]
        found[key] = told
    for told in found.values():
        told["active_seconds"] = round(told["active_seconds"], 3)
    return list(found.values())


def ranked(found: Iterable[Document]) -> list[Document]:
    """The worst first, and no more than anybody reads."""
    return sorted(found, key=_rank)[:MOST]


def _rank(told: Document) -> tuple[object, ...]:
    severity = told["severity"]
    worth = SEVERITIES.index(severity) if severity in SEVERITIES else -1
    return -worth, -told["active_seconds"], natural_key(told["node"] or ""), natural_key(told["label"] or "")


def of_the_whole(uses: Sequence[GpuUse], start: float, end: float) -> Iterator[Document]:
    """What is wrong with a job as a whole."""
    granted = [use for use in uses if use.granted_seconds is not None]
    untouched = [use for use in granted if use.use == "untouched"]
    if untouched:
        lost = sum(use.granted_seconds or 0.0 for use in untouched)
        yield _finding(
            "gpus_untouched",
            "high" if 2 * len(untouched) >= len(granted) else "medium",
            f"{len(untouched)} of {len(granted)} allocated GPUs were never touched, {lost / 3600:.1f} GPU-hours",
            Advice(
                _fewer(len(granted) - len(untouched)),
                "no process of the job was ever seen on them, and they did nothing",
                "gpulse job JOB lists them as untouched",
            ),
            (start, end),
            lost / max(1.0, sum(use.granted_seconds or 0.0 for use in granted)),
        )
    held = sum(use.held.known for use in uses)
    idle = sum(use.held.idle for use in uses)
    if held and idle >= _IDLE_SHARE * held and idle >= _WASTE_SECONDS:
        yield _finding(
            "gpus_held_idle",
            "high" if 2 * idle >= held else "medium",
            f"GPUs were held but did nothing for {100 * idle / held:.0f}% of the time, {idle / 3600:.1f} GPU-hours",
            Advice(
                "end the program when its work is done, and prepare data before GPUs are asked for",
                "in these minutes the job had the GPUs, and no kernel of it ran on them",
                "the idle column says which GPUs, the page's map says when",
            ),
            (start, end),
            idle / held,
        )


def _fewer(needed: int) -> str:
    """What to do about GPUs that nobody needs."""
    if not needed:
        return "ask for GPUs only where the program uses them, and see whether it finds them"
    return f"ask for {needed} {'GPU' if needed == 1 else 'GPUs'}, or let the program use all of them"


def _finding(
    number: str,
    severity: str,
    summary: str,
    advice: Advice,
    span: tuple[float, float],
    lost: float,
) -> Document:
    return {
        "node": None,
        "gpu": None,
        "label": None,
        "id": number,
        "cause": None,
        "family": "gpu_use",
        "severity": severity,
        "summary": summary,
        "lost_ratio": round(lost, 4),
        "confidence": 1.0,
        "pids": [],
        "from": span[0],
        "to": span[1],
        "times": 1,
        "active_seconds": round(span[1] - span[0], 3),
        "evidence": [],
        "advice": [advice._asdict()],
        "url": None,
    }


def pids_by_node(keys: Iterable[tuple[int, int, Any]]) -> dict[int, set[int]]:
    """Processes by their node."""
    found: dict[int, set[int]] = {}
    for node, pid, _ in keys:
        found.setdefault(node, set()).add(pid)
    return found
