"""From a window of seconds to a diagnosis: which rules may speak, what they say, and in which order."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence

from gpulse.diagnosis.case import Case, Node
from gpulse.diagnosis.digest import Digest
from gpulse.diagnosis.rule import Match, Rule, found
from gpulse.diagnosis.rulebook import BY_ID, RULES
from gpulse.diagnosis.seconds import SIGNALS, Second, Signal
from gpulse.diagnosis.stretch import Stretch, programs
from gpulse.diagnosis.thresholds import DEFAULTS, Thresholds
from gpulse.model.finding import SEVERITIES, Diagnosis, Finding, Judged
from gpulse.model.frame import Frame
from gpulse.model.units import duration, long_size

_ORDER = {rule.id: place for place, rule in enumerate(RULES)}
_HOLDS = {">=": operator.ge, ">": operator.gt, "<": operator.lt, "<=": operator.le}
_OPPOSITE = {">=": "<", ">": "<=", "<": ">=", "<=": ">"}
_WHATEVER = frozenset({"gpu_memory_orphaned", "process_died", "slow_start"})
"""Rules about GPUs whose job is gone, or not at work yet."""
_LOST_TO_NOBODY = frozenset(
    {"gpu_underused", "host_wait_unattributed", "periodic_stall", "throughput_regression"}
)
"""What a job that has stopped working looks like over a stretch in which it still worked at first."""
_WITHOUT_A_JOB = frozenset({"fault", "clocks", "link"})
"""Families whose findings do not depend on what runs on the GPU."""


def diagnose(
    frames: Iterable[Frame], *, thresholds: Thresholds = DEFAULTS, now: float | None = None
) -> Diagnosis:
    """What a stretch of frames shows, judged as a whole.

    Args:
        frames: In the order of their time.
        thresholds: What the rules compare with.
        now: The time of the judgement in epoch seconds; that of the last frame when None.

    Raises:
        RecordingError: The frames are out of order, or of several machines.
    """
    digest = Digest()
    seconds: dict[str, list[Second]] = {}
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
        return Diagnosis("Not enough data: there is not a single frame.")
    diagnosis = judge(seconds, last, thresholds, last.time if now is None else now)
    return diagnosis._replace(start=start, end=last.time, frames=count)


def judge(
    seconds: dict[str, Sequence[Second]] | dict[str, list[Second]],
    frame: Frame,
    t: Thresholds,
    now: float,
    rules: Sequence[Rule] = RULES,
) -> Diagnosis:
    """What the seconds of each GPU show, with the last frame for what it alone says."""
    names = programs(frame.processes)
    cases = [Case(Stretch(entries, t, names), t, now) for entries in seconds.values() if entries]
    cases.sort(key=lambda case: (case.stretch.device.index, case.stretch.device.mig_index or -1))
    _introduce(cases)
    gaps: list[str] = []
    findings: list[Finding] = []
    for case in cases:
        findings += _of_gpu(case, rules, gaps)
    enough = tuple(case for case in cases if case.stretch.is_enough)
    node = Node(enough, frame, t)
    for rule in rules:
        if rule.check_node is not None:
            findings += [_honest(found(rule, match)) for match in rule.check_node(node)]
    findings = [finding for finding in rank(findings) if not _repeats(finding, findings)]
    judged = tuple(entry for case in cases if (entry := _judged(case)) is not None)
    worth = tuple(finding for finding in findings if finding.severity != "info")
    return Diagnosis(
        verdict=verdict(
            worth,
            judged,
            starting=any(case.stretch.is_starting for case in cases),
        ),
        findings=worth,
        info=tuple(finding for finding in findings if finding.severity == "info"),
        data_gaps=tuple(dict.fromkeys(gaps)),
        judged=judged,
    )


def _introduce(cases: Sequence[Case]) -> None:
    """Tell each GPU of the others that the same processes are on."""
    for case in cases:
        pids = set(case.stretch.pids) if case.stretch.is_enough else set()
        case.siblings = [
            other
            for other in cases
            if other is not case and other.stretch.is_enough and pids & set(other.stretch.pids)
        ]


def _of_gpu(case: Case, rules: Sequence[Rule], gaps: list[str]) -> Iterator[Finding]:
    stretch = case.stretch
    enough = stretch.is_enough
    unseen: dict[Signal, list[str]] = {}
    for rule in rules:
        if rule.check is None:
            continue
        if not (enough or rule.family in _WITHOUT_A_JOB or rule.id in _WHATEVER):
            continue
        if rule.applies is not None and not rule.applies(case):
            continue
        missing = [signal for signal in rule.needs if signal not in stretch.sees] if enough else []
        if missing:
            for signal in missing:
                unseen.setdefault(signal, []).append(rule.id)
            continue
        if enough and stretch.is_starting and rule.family not in _WITHOUT_A_JOB and rule.id not in _WHATEVER:
            continue
        matches = rule.check(case)
        for match in () if matches is None else (matches,) if isinstance(matches, Match) else matches:
            yield _honest(found(rule, match, case))
    label = f"GPU {stretch.device.label}"
    for signal, ids in unseen.items():
        gaps.append(f"{label}: {SIGNALS[signal]} could not be read: {', '.join(ids)} not judged")
    if stretch.is_unlisted:
        gaps.append(
            f"{label}: works, and its list of processes is empty: in a container, --pid=host shows whose they are"
        )
    if enough and case.is_hollow:
        gaps.append(
            f"{label}: draws {case.power or 0.0:.0%} of its power limit although utilization reads {stretch.duty or 0.0:.0%}: "
            "whether its kernels are thin or it copies cannot be told without GPM"
        )
    if stretch.job and not enough and not stretch.is_starting:
        gaps.append(f"{label}: {_too_little(case)}")


def _too_little(case: Case) -> str:
    stretch, t = case.stretch, case.t
    if stretch.length >= t.shortest_seconds - 0.5 and stretch.frames >= t.fewest_frames:
        span = stretch.end - stretch.start
        return f"only {stretch.length:.0f} s of {span:.0f} s were seen, and too much is missing in between"
    return (
        f"only {stretch.length:.1f} s ({stretch.frames} frames) of its job at work were seen, and "
        f"{t.shortest_seconds:.0f} s are needed"
    )


def _honest(finding: Finding) -> Finding:
    """With what does not hold, where one sign of several was enough, told as speaking against it."""
    stands, falls = [], []
    for item in finding.evidence:
        holds = _HOLDS.get(item.comparison)
        if holds is None or holds(item.value, item.threshold):
            stands.append(item)
        else:
            falls.append(item._replace(comparison=_OPPOSITE[item.comparison]))
    return finding._replace(evidence=tuple(stands), counter_evidence=(*finding.counter_evidence, *falls))


def _repeats(finding: Finding, findings: Sequence[Finding]) -> bool:
    """Whether another finding says the same better."""
    others = {other.id for other in findings if other.label == finding.label and other.severity != "info"}
    if finding.id == "gpu_memory_leak":
        return "gpu_oom_imminent" in others
    if finding.id == "compute_bound":
        return bool(others & {"tensor_cores_unused", "gpu_contention"})
    if finding.id in _LOST_TO_NOBODY and "gpu_idle_allocated" in others:
        return True
    if finding.id == "throughput_regression":
        # The cause says more than the fact that something changed.
        return any(
            other.lost_ratio is not None and other.id != finding.id and other.label == finding.label
            for other in findings
            if other.severity != "info"
        )
    return False


def rank(findings: Sequence[Finding]) -> list[Finding]:
    """Worst first; among equals in the order of the rulebook."""
    return sorted(
        findings,
        key=lambda finding: (
            -SEVERITIES.index(finding.severity),
            _ORDER[finding.id],
            finding.gpu if finding.gpu is not None else -1,
        ),
    )


def _judged(case: Case) -> Judged | None:
    stretch = case.stretch
    device = stretch.device
    if stretch.is_enough and not stretch.is_starting:
        duty = stretch.duty
        state = "busy share unknown" if duty is None else f"busy {duty:.0%}"
        return Judged(
            device.index,
            device.label,
            stretch.start,
            stretch.end,
            stretch.frames,
            state,
            is_clear=not case.is_unclear,
        )
    seen = stretch.seconds_seen
    length = seen[-1].end - seen[0].start
    if not stretch.job and length >= case.t.shortest_seconds - 0.5:
        frames = sum(second.frames for second in seen)
        held = stretch.mean("memory_used_bytes", seen)
        if held is not None and held >= case.t.held_bytes:
            state = f"idle with {long_size(held)} in use by nobody who can be seen"
            return Judged(
                device.index, device.label, seen[0].start, seen[-1].end, frames, state, is_clear=False
            )
        return Judged(device.index, device.label, seen[0].start, seen[-1].end, frames, "idle")
    return None


def verdict(findings: Sequence[Finding], judged: Sequence[Judged], *, starting: bool) -> str:
    """The one sentence that says it."""
    if findings:
        first = findings[0]
        more = len(findings) - 1
        rest = f" ({more} more {'finding' if more == 1 else 'findings'})" if more else ""
        return f"{BY_ID[first.id].title}: {first.summary}{rest}."
    if not judged:
        if starting:
            return "Not enough data: the job has not reached the GPU yet."
        return "Not enough data: no GPU was seen for long enough."
    at_work = [entry for entry in judged if entry.state != "idle"]
    if not at_work:
        which = "The GPU is" if len(judged) == 1 else f"All {len(judged)} GPUs are"
        return f"{which} idle: nothing runs, so nothing is slow."
    doubtful = [entry for entry in at_work if not entry.is_clear]
    if doubtful:
        return f"No cause found: {_told(doubtful)}, and why cannot be told from what could be read."
    return f"Nothing holds the GPUs up: {_told(at_work)}."


def _told(entries: Sequence[Judged]) -> str:
    told = ", ".join(f"GPU {entry.label} {entry.state}" for entry in entries[:4])
    others = f" and {len(entries) - 4} more" if len(entries) > 4 else ""
    seconds = max(entry.end - entry.start for entry in entries)
    return f"{told}{others} over {duration(seconds)}"
