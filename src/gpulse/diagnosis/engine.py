"""The diagnosis engine: apply the rules to each GPU, and rank their findings."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import get_args

from gpulse.diagnosis.evidence import Cause, GpuEvidence, NodeEvidence
from gpulse.diagnosis.finding_texts import describe_in_line
from gpulse.diagnosis.job_window import JobWindow, program_names
from gpulse.diagnosis.rule import Rule, RuleMatch, build_finding
from gpulse.diagnosis.rule_registry import RULES, RULES_BY_ID
from gpulse.diagnosis.second_aggregator import SecondAggregator
from gpulse.diagnosis.second_summary import SIGNAL_GROUPS, SecondSummary, SignalGroup
from gpulse.diagnosis.thresholds import DEFAULTS, Thresholds
from gpulse.model.finding import SEVERITIES, Diagnosis, Finding, JudgedGpu
from gpulse.model.formatting import long_size
from gpulse.model.formatting import seconds as seconds_text
from gpulse.model.frame import Frame

_RULE_ORDER = {rule.id: place for place, rule in enumerate(RULES)}
_COMPARISONS = {">=": operator.ge, ">": operator.gt, "<": operator.lt, "<=": operator.le}
_OPPOSITE = {">=": "<", ">": "<=", "<": ">=", "<=": ">"}
_EXPLAINED_BY: dict[Cause, str] = {
    cause: ", ".join(sorted(rule.id for rule in RULES if rule.explains == cause)) for cause in get_args(Cause)
}
"""The rules that report each cause of lost time."""


def diagnose(
    frames: Iterable[Frame], *, thresholds: Thresholds = DEFAULTS, now: float | None = None
) -> Diagnosis:
    """Diagnose a sequence of frames as a whole.

    Args:
        frames: In order of time.
        thresholds: What the rules compare with.
        now: Time of the diagnosis in epoch seconds; the last frame's time when None.

    Raises:
        RecordingError: The frames are out of order, or of several machines.
    """
    digest = SecondAggregator()
    seconds: dict[str, list[SecondSummary]] = {}
    last: Frame | None = None
    start: float | None = None
    count = 0
    for frame in frames:
        for uuid, second in digest.feed(frame).items():
            seconds.setdefault(uuid, []).append(second)
        start = frame.time if start is None else start
        last = frame
        count += 1
    if last is None or start is None:
        return Diagnosis("Not enough data: there are no frames.")
    diagnosis = judge(seconds, last, thresholds, last.time if now is None else now)
    return diagnosis._replace(start=start, end=last.time, frames=count)


def judge(
    seconds: dict[str, Sequence[SecondSummary]] | dict[str, list[SecondSummary]],
    frame: Frame,
    t: Thresholds,
    now: float,
    rules: Sequence[Rule] = RULES,
) -> Diagnosis:
    """Apply the rules to the seconds of each GPU, and to the last frame."""
    names = program_names(frame.processes)
    gpus = [GpuEvidence(JobWindow(entries, t, names), t, now) for entries in seconds.values() if entries]
    gpus.sort(key=lambda gpu: (gpu.window.device.index, gpu.window.device.mig_index or -1))
    _link_siblings(gpus)
    gaps: list[str] = []
    unchecked: set[tuple[str, str]] = set()
    findings: list[Finding] = []
    for gpu in gpus:
        findings += _findings_of(gpu, rules, gaps, unchecked)
    enough = tuple(gpu for gpu in gpus if gpu.window.is_enough)
    node = NodeEvidence(enough, frame, t)
    for rule in rules:
        if rule.check_node is not None:
            findings += [_finding(rule, match) for match in rule.check_node(node)]
    findings = [finding for finding in rank_findings(findings) if not _repeats(finding, findings)]
    judged = tuple(entry for gpu in gpus if (entry := _judged(gpu)) is not None)
    worth = tuple(finding for finding in findings if finding.severity != "info")
    for gpu in gpus:
        gpu.siblings = []  # they refer to each other: all seconds would stay until the next garbage collection
    return Diagnosis(
        verdict=verdict(
            worth,
            judged,
            starting=any(gpu.window.is_starting for gpu in gpus),
        ),
        findings=worth,
        info=tuple(finding for finding in findings if finding.severity == "info"),
        data_gaps=tuple(dict.fromkeys(gaps)),
        judged=judged,
        unchecked=frozenset(unchecked),
    )


def _link_siblings(gpus: Sequence[GpuEvidence]) -> None:
    """Link each GPU to the others that the same processes use."""
    for gpu in gpus:
        pids = set(gpu.window.pids) if gpu.window.is_enough else set()
        gpu.siblings = [
            other
            for other in gpus
            if other is not gpu and other.window.is_enough and pids & set(other.window.pids)
        ]


def _findings_of(
    gpu: GpuEvidence, rules: Sequence[Rule], gaps: list[str], unchecked: set[tuple[str, str]]
) -> Iterator[Finding]:
    window = gpu.window
    enough = window.is_enough
    unseen: dict[SignalGroup, list[str]] = {}
    for rule in rules:
        if rule.check is None:
            continue
        needs_job = rule.needs_job
        if needs_job and not enough:
            continue
        if rule.applies is not None and not rule.applies(gpu):
            continue
        if enough and not window.signals.issuperset(rule.needs):
            missing = [signal for signal in rule.needs if signal not in window.signals]
            unchecked.add((rule.id, window.device.label))
            for signal in missing:
                unseen.setdefault(signal, []).append(rule.id)
            continue
        if needs_job and window.is_starting:
            continue
        matches = rule.check(gpu)
        for match in () if matches is None else (matches,) if isinstance(matches, RuleMatch) else matches:
            yield _finding(rule, match, gpu)
    label = f"GPU {window.device.label}"
    for signal, ids in unseen.items():
        gaps.append(f"{label}: cannot check {', '.join(ids)}; missing data: {SIGNAL_GROUPS[signal]}")
    if window.is_unlisted:
        gaps.append(
            f"{label}: busy, but no process is listed; if gpulse runs in a container, start the container with --pid=host"
        )
    if enough and gpu.is_busy_at_low_power:
        gaps.append(
            f"{label}: power is only {gpu.power or 0.0:.0%} of the limit, although utilization is {window.duty or 0.0:.0%}; "
            "without GPM (GPU performance monitoring), small kernels cannot be distinguished from copies"
        )
    if window.job and not enough and not window.is_starting:
        gaps.append(f"{label}: {_too_little(gpu)}")


def _too_little(gpu: GpuEvidence) -> str:
    window, t = gpu.window, gpu.t
    if window.length >= t.min_seconds - 0.5 and window.frames >= t.min_frames:
        span = window.end - window.start
        return f"only {seconds_text(window.length)} of {seconds_text(span)} were recorded, which is too little for a diagnosis"
    frames = "frame" if window.frames == 1 else "frames"
    return (
        f"only {seconds_text(window.length)} ({window.frames} {frames}) of its job's work were recorded; "
        f"at least {t.min_seconds:.0f} s are needed"
    )


def _finding(rule: Rule, match: RuleMatch, gpu: GpuEvidence | None = None) -> Finding:
    finding = build_finding(rule, match, gpu)
    measured = (
        f"{_EXPLAINED_BY[cause]}: {describe_in_line(m)}" for cause, m in match.ruled_out_causes.items()
    )
    return _with_counter_evidence(finding._replace(ruled_out=(*measured, *finding.ruled_out)))


def _with_counter_evidence(finding: Finding) -> Finding:
    """Move evidence that does not hold to the counter-evidence: for some rules one of several signs is enough."""
    holding, failing = [], []
    for item in finding.evidence:
        holds = _COMPARISONS.get(item.comparison)
        if holds is None or holds(item.value, item.threshold):
            holding.append(item)
        else:
            failing.append(item._replace(comparison=_OPPOSITE[item.comparison]))
    return finding._replace(evidence=tuple(holding), counter_evidence=(*finding.counter_evidence, *failing))


def _repeats(finding: Finding, findings: Sequence[Finding]) -> bool:
    """Whether another finding of the same GPU already covers this one."""
    rule = RULES_BY_ID[finding.id]
    others = [
        other
        for other in findings
        if other.label == finding.label and other.id != finding.id and other.severity != "info"
    ]
    if rule.yields_to_losses and any(other.lost_ratio is not None for other in others):
        return True
    return any(other.id in rule.yields_to for other in others)


def rank_findings(findings: Sequence[Finding]) -> list[Finding]:
    """Sort findings, worst first; among equals in the order of the rules."""
    return sorted(
        findings,
        key=lambda finding: (
            -SEVERITIES.index(finding.severity),
            _RULE_ORDER[finding.id],
            finding.gpu if finding.gpu is not None else -1,
        ),
    )


def _judged(gpu: GpuEvidence) -> JudgedGpu | None:
    window = gpu.window
    device = window.device
    if window.is_enough and not window.is_starting:
        duty = window.duty
        state = "utilization unknown" if duty is None else f"busy {duty:.0%}"
        return JudgedGpu(
            device.index,
            device.label,
            window.start,
            window.end,
            window.frames,
            state,
            is_clear=not gpu.is_unclear,
            level=window.level,
        )
    seen = window.seconds_seen
    length = seen[-1].end - seen[0].start
    if not window.job and length >= gpu.t.min_seconds - 0.5:
        frames = sum(second.frames for second in seen)
        held = window.mean("memory_used_bytes", seen)
        if held is not None and held >= gpu.t.allocated_bytes:
            state = f"idle with {long_size(held)} of memory in use, held by no visible process"
            return JudgedGpu(
                device.index,
                device.label,
                seen[0].start,
                seen[-1].end,
                frames,
                state,
                is_clear=False,
                level=window.level,
            )
        return JudgedGpu(
            device.index, device.label, seen[0].start, seen[-1].end, frames, "idle", level=window.level
        )
    return None


def verdict(findings: Sequence[Finding], judged: Sequence[JudgedGpu], *, starting: bool) -> str:
    """Return the diagnosis in one sentence."""
    if findings:
        first = findings[0]
        more = len(findings) - 1
        rest = f" ({more} more {'finding' if more == 1 else 'findings'})" if more else ""
        return f"{RULES_BY_ID[first.id].title}: {first.summary}{rest}."
    if not judged:
        if starting:
            return "Not enough data: the job has not used the GPU yet."
        return "Not enough data: no GPU was observed for long enough."
    at_work = [entry for entry in judged if entry.state != "idle"]
    if not at_work:
        if len(judged) == 1:
            return "The GPU is idle: nothing is running on it, so nothing is slow."
        return f"All {len(judged)} GPUs are idle: nothing is running on them, so nothing is slow."
    unclear = [entry for entry in at_work if not entry.is_clear]
    if unclear:
        return f"No cause found: {_states(unclear)}; the available readings do not explain why."
    return f"No bottleneck found: {_states(at_work)}."


def _states(entries: Sequence[JudgedGpu]) -> str:
    states = ", ".join(f"GPU {entry.label} {entry.state}" for entry in entries[:4])
    others = f" and {len(entries) - 4} more" if len(entries) > 4 else ""
    length = max(entry.end - entry.start for entry in entries)
    return f"{states}{others} over {seconds_text(length)}"
