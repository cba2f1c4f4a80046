"""What a rule is: one function from a case to a match, and the words that explain it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Literal, NamedTuple

from gpulse.diagnosis.seconds import Signal
from gpulse.model.finding import Advice, Evidence, Family, Finding, Severity

if TYPE_CHECKING:
    from gpulse.diagnosis.case import Case, Node
    from gpulse.diagnosis.stretch import Stretch

Scope = Literal["gpu", "node"]


class Match(NamedTuple):
    """A rule's word on one case; the engine adds what the rule's metadata says."""

    summary: str
    severity: Severity
    confidence: float
    evidence: tuple[Evidence, ...] = ()
    counter_evidence: tuple[Evidence, ...] = ()
    ruled_out: tuple[str, ...] = ()
    lost_ratio: float | None = None
    start: float | None = None
    end: float | None = None
    pids: tuple[int, ...] | None = None
    """None stands for the job's own."""
    gpu: int | None = None
    """For rules that look at the whole node."""
    advice: tuple[Advice, ...] | None = None
    """Instead of the rule's own, where the case asks for something special."""
    cause: str | None = None
    """Tells it from other matches of the same rule on the same GPU."""


Check = Callable[["Case"], Match | Iterable[Match] | None]
NodeCheck = Callable[["Node"], Iterable[Match]]


class Rule(NamedTuple):
    """One thing that can be found, and everything there is to say about it."""

    id: str
    family: Family
    title: str
    means: str
    """What it is and why it costs time, for somebody who meets it for the first time."""
    recognised: str
    """How it is told from what looks like it."""
    severity: str
    """How bad it is, in words."""
    advice: tuple[Advice, ...]
    check: Check | None = None
    check_node: NodeCheck | None = None
    applies: Callable[[Case], bool] | None = None
    """Whether the question makes sense at all; without its signals a rule leaves a gap only if it does."""
    needs: tuple[Signal, ...] = ()
    sources: tuple[str, ...] = ()
    shown: bool = True
    """Whether it has been seen on a recording of a real run, or is a fact that the hardware reports.

    What has not stays informational.
    """
    trend: bool = False
    """Whether it looks at slow changes, so that hours are worth more to it than a minute."""


def found(rule: Rule, match: Match, case: Case | None = None) -> Finding:
    """A rule's match as a finding."""
    stretch = None if case is None else case.stretch
    summary = match.summary if stretch is None else f"GPU {stretch.device.label} {match.summary}"
    if stretch is None and match.gpu is not None and not match.summary.startswith("GPU "):
        summary = f"GPU {match.gpu} {match.summary}"
    return Finding(
        id=rule.id,
        family=rule.family,
        severity=match.severity if rule.shown else "info",
        confidence=match.confidence,
        summary=summary,
        gpu=match.gpu if stretch is None else stretch.device.index,
        label=_label(match, stretch),
        pids=(() if stretch is None else stretch.pids) if match.pids is None else match.pids,
        lost_ratio=match.lost_ratio,
        start=match.start,
        end=match.end
        if match.end is not None or stretch is None
        else stretch.end
        if stretch.steady
        else None,
        evidence=match.evidence,
        counter_evidence=match.counter_evidence,
        ruled_out=match.ruled_out,
        advice=rule.advice if match.advice is None else match.advice,
        url=f"docs/diagnosis.md#{rule.id}",
        cause=match.cause,
    )


def _label(match: Match, stretch: Stretch | None) -> str | None:
    if stretch is not None:
        return stretch.device.label
    return None if match.gpu is None else str(match.gpu)
