"""Texts of a comparison of two runs, the same in terminals, JSON and on pages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from gpulse.diagnosis.rule_registry import RULES_BY_ID
from gpulse.model.formatting import UNKNOWN, duration, energy, share
from gpulse.model.safe_text import printable
from gpulse.reports.run_figures import RunFigures

_MAX_NAMED = 3
_MAX_NAME_CHARACTERS = 60
_UNEQUAL_LENGTHS_FACTOR = 2.0
_SHORT_SECONDS = 30.0
_MIN_LEFT_OUT_SECONDS = 5.0

CAUSE_TITLES = {
    "throttled": "at the cgroup's CPU limit",
    "swapping": "swapping memory",
    "crowded": "waiting for a CPU",
    "storage": "waiting for storage",
    "copies": "copying over PCIe",
    "workers": "data-loading workers busy",
    "main": "program busy on the CPU",
    "pauses": "pauses of the program",
    "none": "no cause found",
}
"""Causes of lost time in recordings; in sessions, the findings are the causes."""

OUTCOMES = {
    "better": "Better",
    "worse": "Worse",
    "mixed": "Partly better, partly worse",
    "no_clear_change": "No clear change",
    "unknown": "Not enough data",
}
_WHICH = {"before": "first", "after": "second"}
FINDING_CHANGES = {"gone": "gone", "new": "new", "stayed": "remains"}
STEP_TIME = (
    "The step time is the period with which the GPU's activity repeats; "
    "steps that always come in groups, or between regular pauses, count as one."
)
NO_STEP_TIME = (
    "At least one run shows no step time, so the comparison is based on how busy the GPU was, "
    "not on how fast it worked."
)
OTHER_WORK = "The step times are not compared, because the GPU does a different amount of work per step in the two runs."


def describe_cause(cause: str) -> str:
    """Return the title of a cause of lost time: that of the rule for a finding."""
    if cause in CAUSE_TITLES:
        return CAUSE_TITLES[cause]
    rule = RULES_BY_ID.get(cause)
    return f"{cause}: {rule.title}" if rule is not None else printable(cause, _MAX_NAME_CHARACTERS)


def format_quantity(value: float | None, unit: str) -> str:
    """Format a value of a comparison."""
    if value is None:
        return UNKNOWN
    if unit == "share":
        return share(value)
    if unit == "joules":
        return f"{value:.0f} J" if value < 360 else energy(value)
    return f"{value:.2f} s" if value < 10 else f"{value:.1f} s"


def describe_change(change: str, before: float | None, after: float | None, unit: str) -> str:
    """Return a change in a few words: `+52 points`, `-56%`, `no clear change`."""
    if change == "no_clear_change":
        return "no clear change"
    if change == "not_compared":
        return "not compared"
    if before is None or after is None:
        return "unknown"
    if unit == "share":
        points = 100 * (after - before)
        return f"{points:+.1f} points" if abs(points) < 9.95 else f"{points:+.0f} points"
    return f"{(after - before) / before:+.0%}" if before else "from 0"


def describe_loss(change: str, before: float | None, after: float | None) -> str:
    """Return the time that is lost to a finding: `it cost 41% of the time`; empty when it is unknown."""
    if change == "gone":
        return "" if before is None else f"it cost {share(before)} of the time"
    if after is None:
        return ""
    earlier = "" if change == "new" or before is None else f" ({share(before)} before)"
    return f"it costs {share(after)} of the time{earlier}"


def describe_activity(name: str, change: str, before: str, after: str) -> str:
    """Return how the activity of the GPUs changed, as the beginning of a sentence."""
    what = "SM activity" if name == "sm_active_ratio" else "GPU utilization"
    if change == "no_clear_change":
        return f"{what} shows no clear change ({before} before, {after} after)"
    if change in ("rose", "fell"):
        return f"{what} {change} from {before} to {after}"
    return f"{what} cannot be compared ({before} before, {after} after)"


def describe_step_change(change: str, before: str, after: str) -> str:
    """Return how the step time changed, as a part of a sentence."""
    if change == "no_clear_change":
        return (
            f"a step takes {after}, as before"
            if before == after
            else f"a step takes about as long as before ({before} before, {after} after)"
        )
    return f"a step takes {after} instead of {before}"


def compose_verdict(
    activity: str,
    *,
    gone: Sequence[str],
    new: Sequence[str],
    stayed: Sequence[str],
    step: str | None,
    differs: Sequence[str],
) -> str:
    """Return the comparison in one sentence.

    Args:
        activity: How the activity of the GPUs changed.
        gone: IDs of findings that only the first run has.
        new: IDs of findings that only the second run has.
        stayed: IDs of findings that both have.
        step: How the step time changed; None when that is unknown.
        differs: In what the runs differ.
    """
    found = [
        f"{_list(names)} {'is' if len(names) == 1 else 'are'} {state}"
        for names, state in ((gone, "gone"), (new, "new"))
        if names
    ]
    if stayed and not gone:
        found.append(f"{_list(stayed)} {'remains' if len(stayed) == 1 else 'remain'}")
    parts = [f"{activity}: {found[0]}" if found else activity, *found[1:], *((step,) if step else ())]
    if differs:
        parts.append(f"the runs differ in {' and '.join(differs)}")
    return f"{'; '.join(parts)}."


def _list(names: Sequence[str]) -> str:
    shown = [printable(name, _MAX_NAME_CHARACTERS) for name in names[:_MAX_NAMED]]
    more = len(names) - len(shown)
    if more > 0:
        return f"{', '.join(shown)} and {more} more"
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"


def describe_not_comparable(before: RunFigures, after: RunFigures) -> str:
    """Return why two runs cannot be compared, in one sentence."""
    missing = [
        f"{which} ({printable(run.name, _MAX_NAME_CHARACTERS)}): {run.missing}"
        for which, run in (("before", before), ("after", after))
        if run.missing is not None
    ]
    return f"Not enough data: {'; '.join(missing)}."


def list_differences(before: RunFigures, after: RunFigures) -> list[str]:
    """Return in what two runs differ so that they may not be comparable, in a few words each."""
    if before.missing is not None or after.missing is not None:
        return []
    found = []
    if (
        before.programs is not None
        and after.programs is not None
        and set(before.programs).isdisjoint(after.programs)
    ):
        found.append("program")
    if set(before.models) != set(after.models):
        found.append("GPU model")
    if before.gpus != after.gpus:
        found.append("number of GPUs")
    return found


def describe_differences(before: RunFigures, after: RunFigures) -> Iterator[str]:
    """Yield sentences about differences between two runs."""
    differences = list_differences(before, after)
    if "program" in differences:
        yield (
            f"The programs differ: {_names(before.programs or ())} before, {_names(after.programs or ())} after. "
            "If these are different jobs, the comparison does not show the effect of a change."
        )
    if (before.programs is None or after.programs is None) and before.seconds > 0 and after.seconds > 0:
        yield "The programs of at least one run are unknown; make sure that both runs are of the same job."
    if "GPU model" in differences:
        yield f"The GPUs differ: {_names(before.models)} before, {_names(after.models)} after."
    if "number of GPUs" in differences:
        yield (
            f"The number of GPUs in use differs: {before.gpus} before, {after.gpus} after. "
            "Ratios are averages over the GPUs in use, and a step may do a different amount of work."
        )
    if dict(before.labels) != dict(after.labels):
        yield f"The labels differ: {_labels(before)} before, {_labels(after)} after."


def describe_missing_runs(before: RunFigures, after: RunFigures) -> Iterator[str]:
    """Yield what to do about runs without figures."""
    for which, run in (("before", before), ("after", after)):
        if run.missing is not None:
            yield f"The {_WHICH[which]} run has {duration(run.recorded_seconds)} of data, but cannot be compared: {run.missing}."


def describe_limits(before: RunFigures, after: RunFigures) -> Iterator[str]:
    """Yield what limits the comparison of two runs that have figures."""
    lengths = before.seconds, after.seconds
    if max(lengths) >= _UNEQUAL_LENGTHS_FACTOR * min(lengths):
        yield (
            f"The compared periods have different lengths: {duration(lengths[0])} before, {duration(lengths[1])} after. "
            "Means and energy per hour are comparable, but total energy is not."
        )
    if min(lengths) < _SHORT_SECONDS:
        yield (
            f"Only {duration(min(lengths))} could be compared; "
            "rare events, such as checkpoints, may be missing."
        )
    for which, run in (("before", before), ("after", after)):
        left_out = round(run.recorded_seconds - run.seconds, 3)
        if left_out >= _MIN_LEFT_OUT_SECONDS:
            yield (
                f"{duration(left_out)} of the {_WHICH[which]} run are left out: "
                "start-up, time without a job, or time without data."
            )


def describe_missing_quantities(rows: Iterable[tuple[str, bool]]) -> Iterator[str]:
    """Yield which quantities only one run has: their titles, and whether the run before is the one without them."""
    missing: dict[str, list[str]] = {"before": [], "after": []}
    for title, is_missing_before in rows:
        missing["before" if is_missing_before else "after"].append(title)
    for which, titles in missing.items():
        if titles:
            yield f"Not measured in the {_WHICH[which]} run: {', '.join(titles)}."


def describe_run_notes(before: RunFigures, after: RunFigures) -> Iterator[str]:
    """Yield the notes of each run."""
    if before.notes == after.notes:
        yield from (_sentence(note) for note in before.notes)
        return
    for which, run in (("before", before), ("after", after)):
        yield from (f"In the {_WHICH[which]} run: {note.rstrip('.')}." for note in run.notes)


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:].rstrip('.')}."


def _names(names: Iterable[str]) -> str:
    return _list(list(dict.fromkeys(name or UNKNOWN for name in names)) or [UNKNOWN])


def _labels(run: RunFigures) -> str:
    found = [f"{key}={value}" for key, value in run.labels.items()]
    return _list(found) if found else "none"
