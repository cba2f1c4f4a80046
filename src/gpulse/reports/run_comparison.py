"""Comparison of two runs, before and after a change: what became better or worse, and what cannot be told.

A difference counts only if it is larger than the runs' own variation. Unknown figures stay unknown. The comparison
is symmetric: with the runs exchanged, everything that rose fell, and better is worse.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from msgspec import Struct, field

from gpulse.model.finding import SEVERITIES, Severity
from gpulse.reports import comparison_text as words
from gpulse.reports.run_figures import Measure, RunFigures, RunFinding

Outcome = Literal["better", "worse", "mixed", "no_clear_change", "unknown"]
Change = Literal["rose", "fell", "no_clear_change", "unknown", "not_compared"]
Effect = Literal["better", "worse", "none"]
FindingChange = Literal["gone", "new", "stayed"]

_ERRORS = 3.0
"""A difference is clear if it is larger than this many standard errors."""
_MIN_RATIO_DIFFERENCE = 0.02
"""Smaller differences of ratios are not clear, however steady the runs were: two equal runs differ by as much."""
_MIN_RELATIVE_DIFFERENCE = 0.03
"""The same for other quantities, relative to their mean."""
_MIN_STEP_DIFFERENCE = 0.05
_SAME_WORK_FACTOR = 1.5
"""If the GPU works longer than this factor in one period than in the other run's, a period is not the same work."""
_SAME_KERNELS_FACTOR = 1.1
_MIN_COUNTED_SEVERITY = SEVERITIES.index("medium")
_MIN_LISTED_LOSS = 0.005
_LARGE_FACTOR = 1.25
"""A change of a ratio by at least this factor is large."""
_DIGITS = 6


class ComparedRun(Struct, frozen=True, kw_only=True):
    """One of the two runs."""

    name: str
    start: float | None = field(name="from")
    """Epoch seconds."""
    recorded_seconds: float
    compared_seconds: float
    """Without start-up and idle ends."""
    gpus: int
    """GPUs in use."""
    models: list[str]
    """Their models, each once."""
    programs: list[str] | None
    step_confidence: float | None
    """Confidence in the step time, 0 to 1; null without a step time."""


class ComparedQuantity(Struct, frozen=True, kw_only=True):
    """A quantity of both runs; null is unknown."""

    name: str
    title: str
    unit: str
    before: float | None
    after: float | None
    difference: float | None
    """After minus before."""
    noise: float | None
    """A smaller difference is not clear; null if it is not compared or unknown."""
    change: Change
    effect: Effect
    before_text: str
    after_text: str
    change_text: str


class ComparedFinding(Struct, frozen=True, kw_only=True):
    """A kind of findings that one or both runs have."""

    id: str
    change: FindingChange
    severity: Severity
    """The later one, if both runs have it."""
    summary: str
    before_lost_ratio: float | None
    """Time lost to it, as a fraction of the time of all GPUs in use; null when unknown or without the finding."""
    after_lost_ratio: float | None
    change_text: str
    loss_text: str
    """The time lost to it; empty when it is unknown."""


class RunComparison(Struct, frozen=True, kw_only=True):
    """What changed from one run to another."""

    outcome: Outcome
    title: str
    """The outcome in a few words."""
    verdict: str
    """One sentence."""
    before: ComparedRun
    after: ComparedRun
    quantities: list[ComparedQuantity]
    lost_time: list[ComparedQuantity]
    """Time without a kernel by cause, as a fraction of all time."""
    findings: list[ComparedFinding]
    notes: list[str]
    """What limits the comparison, in sentences."""


class _Subject(NamedTuple):
    """One row of the comparison."""

    name: str
    title: str
    unit: Literal["share", "seconds", "joules"]
    of: Callable[[RunFigures], Measure | None]
    is_better_higher: bool | None = None
    """None when neither is better."""
    is_compared: bool = True


def compare_runs(before: RunFigures, after: RunFigures) -> RunComparison:
    """Compare two runs."""
    before, after = _round_lengths(before), _round_lengths(after)
    quantities = list(_compare_quantities(before, after))
    by_name = {one.name: one for one in quantities}
    lost = list(_compare_lost_time(before, after, by_name["gpu_utilization_ratio"].noise))
    findings = list(_compare_findings(before.findings, after.findings))
    is_known = before.missing is None and after.missing is None
    outcome = _judge(by_name, findings) if is_known else "unknown"
    differences = words.describe_differences(before, after)
    notes = [
        *words.describe_missing_runs(before, after),
        *differences,
        *(words.describe_limits(before, after) if is_known else ()),
        *_describe_step(by_name.get("step_seconds"), outcome),
        *words.describe_missing_quantities(
            (one.title, one.before is None)
            for one in quantities
            if is_known and (one.before is None) != (one.after is None)
        ),
        *words.describe_run_notes(before, after),
    ]
    return RunComparison(
        outcome=outcome,
        title=words.OUTCOMES[outcome],
        verdict=_verdict(outcome, by_name, findings, before, after),
        before=_describe_run(before),
        after=_describe_run(after),
        quantities=quantities,
        lost_time=lost,
        findings=findings,
        notes=notes,
    )


def _round_lengths(run: RunFigures) -> RunFigures:
    """Return a run with rounded lengths, so that its table and its notes show the same ones."""
    return run._replace(recorded_seconds=round(run.recorded_seconds, 3), seconds=round(run.seconds, 3))


def _describe_run(run: RunFigures) -> ComparedRun:
    return ComparedRun(
        name=run.name,
        start=run.start,
        recorded_seconds=run.recorded_seconds,
        compared_seconds=run.seconds,
        gpus=run.gpus,
        models=list(dict.fromkeys(run.models)),
        programs=None if run.programs is None else list(run.programs),
        step_confidence=None if run.rhythm is None else run.rhythm.confidence,
    )


def _per_hour(run: RunFigures, gpus: int) -> Measure | None:
    power = run.power_watts
    if power is None:
        return None
    factor = 3600.0 * gpus
    return Measure(power.value * factor, None if power.error is None else power.error * factor)


def _step(run: RunFigures) -> Measure | None:
    return None if run.rhythm is None else Measure(run.rhythm.seconds, run.rhythm.error_seconds)


def _energy_per_step(run: RunFigures) -> Measure | None:
    if run.power_watts is None or run.rhythm is None:
        return None
    value = run.power_watts.value * run.gpus * run.rhythm.seconds
    relative = (run.power_watts.error or 0.0) / run.power_watts.value if run.power_watts.value else 0.0
    return Measure(value, value * (relative + run.rhythm.error_seconds / run.rhythm.seconds))


def _energy(run: RunFigures) -> Measure | None:
    return None if run.energy_joules is None else Measure(run.energy_joules)


_SUBJECTS = (
    _Subject("gpu_utilization_ratio", "GPU utilization", "share", lambda run: run.utilization, True),
    _Subject("sm_active_ratio", "SM activity", "share", lambda run: run.sm_activity, True),
    _Subject("tensor_active_ratio", "Tensor core activity", "share", lambda run: run.tensor_activity),
    _Subject("step_seconds", "Step time", "seconds", _step, False),
    _Subject("energy_joules_per_step", "Energy per step", "joules", _energy_per_step, False),
    _Subject("energy_joules_per_gpu_hour", "Energy per GPU-hour", "joules", lambda run: _per_hour(run, 1)),
    _Subject(
        "energy_joules_per_hour",
        "Energy per hour, all GPUs",
        "joules",
        lambda run: _per_hour(run, run.gpus),
        is_compared=False,
    ),
    _Subject("energy_joules", "Energy over the compared period", "joules", _energy, is_compared=False),
)
_STEP_SUBJECTS = frozenset({"step_seconds", "energy_joules_per_step"})


def _compare_quantities(before: RunFigures, after: RunFigures) -> Iterator[ComparedQuantity]:
    is_same_work = _is_same_work(before, after)
    for subject in _SUBJECTS:
        first, second = subject.of(before), subject.of(after)
        if subject.name in _STEP_SUBJECTS and first is None and second is None:
            continue
        if subject.name == "energy_joules_per_hour" and max(before.gpus, after.gpus) < 2:
            continue
        is_compared = subject.is_compared and (is_same_work or subject.name not in _STEP_SUBJECTS)
        noise = _noise(subject, first, second) if is_compared else None
        yield _compare(subject, first, second, noise, is_compared=is_compared)


def _noise(subject: _Subject, first: Measure | None, second: Measure | None) -> float | None:
    """Return the difference above which a change is clear; None when a value is unknown."""
    if first is None or second is None:
        return None
    least = _MIN_RATIO_DIFFERENCE
    if subject.unit != "share":
        relative = _MIN_STEP_DIFFERENCE if subject.name in _STEP_SUBJECTS else _MIN_RELATIVE_DIFFERENCE
        least = relative * (abs(first.value) + abs(second.value)) / 2
    return max(least, _ERRORS * math.hypot(first.error or 0.0, second.error or 0.0))


def _compare(
    subject: _Subject,
    first: Measure | None,
    second: Measure | None,
    noise: float | None,
    *,
    is_compared: bool = True,
) -> ComparedQuantity:
    difference = None if first is None or second is None else second.value - first.value
    change: Change
    if difference is None:
        change = "unknown"
    elif not is_compared or noise is None:
        change = "not_compared"
    elif abs(difference) <= noise:
        change = "no_clear_change"
    else:
        change = "rose" if difference > 0 else "fell"
    effect: Effect = "none"
    if change in ("rose", "fell") and subject.is_better_higher is not None:
        effect = "better" if (change == "rose") == subject.is_better_higher else "worse"
    return ComparedQuantity(
        name=subject.name,
        title=subject.title,
        unit="ratio" if subject.unit == "share" else subject.unit,
        before=_rounded(first),
        after=_rounded(second),
        difference=None if difference is None else round(difference, _DIGITS),
        noise=None if noise is None else round(noise, _DIGITS),
        change=change,
        effect=effect,
        before_text=words.format_quantity(None if first is None else first.value, subject.unit),
        after_text=words.format_quantity(None if second is None else second.value, subject.unit),
        change_text=words.describe_change(
            change,
            None if first is None else first.value,
            None if second is None else second.value,
            subject.unit,
        ),
    )


def _rounded(value: Measure | None) -> float | None:
    return None if value is None else round(value.value, _DIGITS)


def _is_same_work(before: RunFigures, after: RunFigures) -> bool:
    """Return whether a period of the rhythm is probably the same work in both runs.

    If several steps always come together (such as one for each worker of a loader), a period is several steps. Then
    the GPU works longer in a period, although the same kernels run.
    """
    if (
        before.rhythm is None
        or after.rhythm is None
        or before.utilization is None
        or after.utilization is None
    ):
        return True
    first = before.rhythm.seconds * before.utilization.value
    second = after.rhythm.seconds * after.utilization.value
    if min(first, second) * _SAME_WORK_FACTOR >= max(first, second):
        return True
    return any(
        _have_different_density(before, after, of)
        for of in (lambda run: run.sm_activity, lambda run: run.tensor_activity)
    )


def _have_different_density(
    before: RunFigures, after: RunFigures, of: Callable[[RunFigures], Measure | None]
) -> bool:
    """Return whether the kernels use the GPU differently while they run: then they are other kernels."""
    densities = [
        activity.value / run.utilization.value
        for run in (before, after)
        if (activity := of(run)) is not None and run.utilization is not None and run.utilization.value > 0
    ]
    return len(densities) == 2 and max(densities) > _SAME_KERNELS_FACTOR * min(densities) + 0.01


def _compare_lost_time(
    before: RunFigures, after: RunFigures, noise: float | None
) -> Iterator[ComparedQuantity]:
    causes = dict.fromkeys((*(before.lost_time or {}), *(after.lost_time or {})))
    rows = []
    for cause in causes:
        first, second = _loss(before, cause), _loss(after, cause)
        if max((one.value for one in (first, second) if one is not None), default=0.0) >= _MIN_LISTED_LOSS:
            subject = _Subject(cause, words.describe_cause(cause), "share", lambda _: None, False)
            limit = None if first is None or second is None else noise or _MIN_RATIO_DIFFERENCE
            rows.append(_compare(subject, first, second, limit))
    yield from sorted(rows, key=lambda row: (-max(row.before or 0.0, row.after or 0.0), row.name))


def _loss(run: RunFigures, cause: str) -> Measure | None:
    """Return the time that a cause lost: none if the run does not have it, unknown if its causes are unknown."""
    lost = None if run.lost_time is None else run.lost_time.get(cause, 0.0)
    return None if lost is None else Measure(lost)


def _compare_findings(before: Sequence[RunFinding], after: Sequence[RunFinding]) -> Iterator[ComparedFinding]:
    old, new = {one.kind: one for one in before}, {one.kind: one for one in after}
    for kind in dict.fromkeys((*old, *new)):
        first, second = old.get(kind), new.get(kind)
        shown = second or first
        if shown is not None:
            change: FindingChange = "gone" if second is None else "new" if first is None else "stayed"
            losses = (
                None if first is None else first.lost_ratio,
                None if second is None else second.lost_ratio,
            )
            yield ComparedFinding(
                id=shown.id,
                change=change,
                severity=shown.severity,
                summary=shown.summary,
                before_lost_ratio=None if losses[0] is None else round(losses[0], _DIGITS),
                after_lost_ratio=None if losses[1] is None else round(losses[1], _DIGITS),
                change_text=words.FINDING_CHANGES[change],
                loss_text=words.describe_loss(change, *losses),
            )


def _judge(quantities: Mapping[str, ComparedQuantity], findings: Sequence[ComparedFinding]) -> Outcome:
    """Return whether the run became better.

    A step time decides alone: a GPU that does the same work faster may well be less busy. So does a large change of
    the activity of SMs, which is how long and how widely the GPU works, or else of the utilization. Smaller changes
    of the utilization count together with findings of some severity. A critical finding counts in any case.
    """
    step = quantities.get("step_seconds")
    use, filled = quantities["gpu_utilization_ratio"], quantities["sm_active_ratio"]
    counted = [
        one
        for one in findings
        if one.change != "stayed" and SEVERITIES.index(one.severity) >= _MIN_COUNTED_SEVERITY
    ]
    if step is not None and step.change in ("rose", "fell"):
        effects = {step.effect}
    elif _is_large(filled) or _is_large(use):
        effects = {filled.effect if _is_large(filled) else use.effect}
    else:
        effects = {use.effect, *(_finding_effect(one) for one in counted)}
    effects |= {_finding_effect(one) for one in counted if one.severity == "critical"}
    effects -= {"none"}
    if not effects:
        return "no_clear_change"
    return "mixed" if len(effects) > 1 else "better" if "better" in effects else "worse"


def _is_large(quantity: ComparedQuantity) -> bool:
    """Return whether a ratio changed clearly, and by a large part of itself."""
    if quantity.effect == "none" or quantity.before is None or quantity.after is None:
        return False
    low, high = sorted((quantity.before, quantity.after))
    return high >= _LARGE_FACTOR * low


def _finding_effect(finding: ComparedFinding) -> Effect:
    return "better" if finding.change == "gone" else "worse"


def _verdict(
    outcome: Outcome,
    quantities: Mapping[str, ComparedQuantity],
    findings: Sequence[ComparedFinding],
    before: RunFigures,
    after: RunFigures,
) -> str:
    if outcome == "unknown":
        return words.describe_not_comparable(before, after)
    use, filled = quantities["gpu_utilization_ratio"], quantities["sm_active_ratio"]
    main = filled if _is_large(filled) and filled.effect != use.effect else use
    step = quantities.get("step_seconds")
    named = {
        change: [one.id for one in findings if one.change == change] for change in ("gone", "new", "stayed")
    }
    return words.compose_verdict(
        words.describe_activity(main.name, main.change, main.before_text, main.after_text),
        gone=named["gone"],
        new=named["new"],
        stayed=named["stayed"],
        step=None
        if step is None or step.change not in ("rose", "fell", "no_clear_change")
        else words.describe_step_change(step.change, step.before_text, step.after_text),
        differs=words.list_differences(before, after),
    )


def _describe_step(step: ComparedQuantity | None, outcome: Outcome) -> Iterator[str]:
    if outcome == "unknown":
        return
    if step is None or step.change == "unknown":
        yield words.NO_STEP_TIME
    elif step.change == "not_compared":
        yield words.OTHER_WORK
    if step is not None:
        yield words.STEP_TIME
