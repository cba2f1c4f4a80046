"""A rule: a function from the evidence of a GPU to a match, and the text that explains it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Literal, NamedTuple

from gpulse.diagnosis.second_summary import SignalGroup
from gpulse.model.finding import Advice, Evidence, Family, Finding, FindingCategory, Severity
from gpulse.model.formatting import Unit

if TYPE_CHECKING:  # a snapshot needs only the hardware rules, not the modules for time windows
    from gpulse.diagnosis.evidence import Cause, GpuEvidence, NodeEvidence
    from gpulse.diagnosis.job_window import JobWindow

HARDWARE_FAMILIES: frozenset[Family] = frozenset({"fault", "clocks", "link"})
"""Families of hardware facts, which hold whatever runs on the GPU."""


StackChoice = Literal["idle", "pauses", "all"]
"""Stacks taken while the GPU was idle, those in its pauses, or all."""


class SignalText(NamedTuple):
    """Label and unit of a signal."""

    words: str
    unit: Unit


class RuleMatch(NamedTuple):
    """What a rule found on one GPU; the engine adds the rule's metadata."""

    summary: str
    severity: Severity
    confidence: float
    evidence: tuple[Evidence, ...] = ()
    counter_evidence: tuple[Evidence, ...] = ()
    ruled_out: tuple[str, ...] = ()
    ruled_out_causes: Mapping[Cause, Evidence] = {}
    """Causes of lost time that were ruled out, each with the evidence against it; the engine names their rules."""
    lost_ratio: float | None = None
    start: float | None = None
    end: float | None = None
    pids: tuple[int, ...] | None = None
    """None means the job's own."""
    gpu: int | None = None
    """For rules that look at the whole node."""
    advice: tuple[Advice, ...] | None = None
    """Replaces the rule's advice when this GPU needs something specific."""
    cause: str | None = None
    """Distinguishes it from other matches of the same rule on the same GPU."""
    inferred: bool = False
    """Whether it rests on estimates, because the GPU does not measure what it is about."""


Check = Callable[["GpuEvidence"], RuleMatch | Iterable[RuleMatch] | None]
NodeCheck = Callable[["NodeEvidence"], Iterable[RuleMatch]]


class Rule(NamedTuple):
    """One finding that can be made, how to check for it, and its explanation."""

    id: str
    family: Family
    title: str
    means: str
    """What it is and why it costs time, for a reader who has never seen it."""
    recognised: str
    """How it is distinguished from similar findings."""
    severity: str
    """Description of its severity."""
    advice: tuple[Advice, ...]
    check: Check | None = None
    check_node: NodeCheck | None = None
    applies: Callable[[GpuEvidence], bool] | None = None
    """Whether the rule makes sense for the GPU; only then missing signals are reported as a gap."""
    needs: tuple[SignalGroup, ...] = ()
    limits: tuple[str, ...] = ()
    """Names of its thresholds in `Thresholds`; facts that the driver reports have none."""
    quantities: Mapping[str, SignalText] = {}
    """Labels of signals in its evidence that neither the metric catalog nor another rule describes."""
    explains: Cause | None = None
    """The cause of lost time that it reports."""
    yields_to: tuple[str, ...] = ()
    """Rules that explain the same better: if one of them has a finding on the same GPU, this one is dropped."""
    yields_to_losses: bool = False
    """Whether it is dropped if any other finding on the same GPU has a lost time."""
    without_job: bool = False
    """Whether it also applies to GPUs whose job has ended or not started working; hardware rules always do."""
    from_frame: bool = False
    """Whether a single frame shows it, so that a live diagnosis takes it from the newest frame."""
    is_settled: bool = False
    """Whether its own evidence takes so long that a live diagnosis reports it at the first evaluation."""
    sources: tuple[str, ...] = ()
    shown: bool = True
    """Whether a recording of a real run has shown it, or the hardware reports it as a fact; otherwise informational."""
    inferred_without_gpm: bool = False
    """Whether it rests on estimates where GPM is missing."""
    stacks: StackChoice | None = None
    """Which stacks of the job show the line of code that causes it; None when the cause is not in its code."""
    trend: bool = False
    """Whether it looks for slow changes, so that it needs a long window."""
    category: FindingCategory | None = None
    """None for the category of its family."""

    @property
    def needs_job(self) -> bool:
        """Whether it applies only to GPUs with a working job."""
        return not self.without_job and self.family not in HARDWARE_FAMILIES


def build_finding(rule: Rule, match: RuleMatch, gpu: GpuEvidence | None = None) -> Finding:
    """Build the finding from a rule's match."""
    window = None if gpu is None else gpu.window
    summary = match.summary if window is None else f"GPU {window.device.label} {match.summary}"
    if window is None and match.gpu is not None and not match.summary.startswith("GPU "):
        summary = f"GPU {match.gpu} {match.summary}"
    return Finding(
        id=rule.id,
        family=rule.family,
        severity=match.severity if rule.shown else "info",
        confidence=match.confidence,
        summary=summary,
        gpu=match.gpu if window is None else window.device.index,
        label=_label(match, window),
        pids=(() if window is None else window.pids) if match.pids is None else match.pids,
        lost_ratio=match.lost_ratio,
        start=match.start,
        end=match.end if match.end is not None or window is None else window.end if window.steady else None,
        evidence=match.evidence,
        counter_evidence=match.counter_evidence,
        ruled_out=match.ruled_out,
        advice=rule.advice if match.advice is None else match.advice,
        url=f"docs/reference/findings.md#{rule.id}",
        cause=match.cause,
        inferred=match.inferred,
    )


def _label(match: RuleMatch, window: JobWindow | None) -> str | None:
    if window is not None:
        return window.device.label
    return None if match.gpu is None else str(match.gpu)
