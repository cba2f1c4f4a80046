"""Pauses: checkpoints, evaluations, hangs, and a pace that broke."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise
from statistics import fmean, median, pstdev

from gpulse.diagnosis.case import Case, Pause
from gpulse.diagnosis.rule import Match, Rule
from gpulse.model.finding import Advice, Evidence
from gpulse.model.units import long_size


def checkpoint_stall(case: Case) -> Match | None:
    """The GPU pauses while the program writes."""
    pauses, t = case.checkpoints, case.t
    if not pauses or _share(case, pauses) < t.stall_share:
        return None
    lost = _share(case, pauses)
    written = fmean(pause.written_bytes or 0.0 for pause in pauses)
    long = fmean(pause.stall.seconds for pause in pauses)
    return Match(
        summary=f"stood still {_times(len(pauses))} for {long:.1f} s while {long_size(written)} were written: {lost:.0%} of the time",
        severity=case.severity(lost) if lost >= t.lost else "low",
        confidence={1: 0.6, 2: 0.8}.get(len(pauses), 0.9),
        evidence=(
            Evidence("stalls", "count", len(pauses), ">=", 1),
            Evidence("stall_seconds", "mean", long, ">=", t.checkpoint_seconds),
            Evidence("stall_ratio", "share", lost, ">=", t.stall_share),
            Evidence("stall_written_bytes", "mean", written, ">=", t.checkpoint_bytes),
        ),
        lost_ratio=lost,
        start=pauses[0].stall.start,
        end=pauses[-1].stall.end,
    )


def periodic_stall(case: Case) -> Match | None:
    """The GPU pauses again and again, and nothing is written."""
    t = case.t
    pauses = [pause for pause in case.pauses if pause not in case.checkpoints]
    if len(pauses) < 2 or len(pauses) < len(case.checkpoints) or _share(case, pauses) < t.stall_share:
        return None
    lost = _share(case, pauses)
    long = fmean(pause.stall.seconds for pause in pauses)
    spaces = [b.stall.start - a.stall.start for a, b in pairwise(pauses)]
    regular = len(spaces) >= 2 and pstdev(spaces) / fmean(spaces) < t.regular_spacing
    evidence = [
        Evidence("stalls", "count", len(pauses), ">=", 2),
        Evidence("stall_seconds", "mean", long, ">=", t.stall_seconds),
        Evidence("stall_ratio", "share", lost, ">=", t.stall_share),
        Evidence("stall_spacing_seconds", "mean", fmean(spaces), ">=", 0),
    ]
    every = f", every {fmean(spaces):.1f} s," if regular else ""
    return Match(
        summary=f"stood still {len(pauses)} times for {long:.1f} s{every} with nothing written: {lost:.0%} of the time",
        severity=case.severity(lost) if lost >= t.lost else "low",
        confidence=0.8 if regular else 0.6 if len(pauses) >= 3 else 0.5,
        evidence=tuple(evidence),
        ruled_out=("checkpoint_stall: less than 200 MB written in each pause",),
        lost_ratio=lost,
        start=pauses[0].stall.start,
        end=pauses[-1].stall.end,
    )


def throughput_regression(case: Case) -> Match | None:
    """From one moment on the GPU does less."""
    t, seconds = case.t, case.stretch.steady
    if case.names_pauses:
        return None
    series = [(s.start, value) for s in seconds if (value := s.mean("duty")) is not None]
    change = _change(series, t.regression_seconds)
    if change is None:
        return None
    place, before, after = change
    if before < 0.3 or after > (1 - t.regression) * before:
        return None
    return Match(
        summary=f"does less since one moment: busy {before:.0%} of the time before, {after:.0%} after",
        severity="medium" if after < 0.6 * before else "low",
        confidence=0.6,
        evidence=(
            Evidence("duty", "median before", before, ">=", 0.3),
            Evidence("duty", "median after", after, "<", (1 - t.regression) * before),
        ),
        lost_ratio=before - after,
        start=series[place][0],
    )


def collective_hang(case: Case) -> Match | None:
    """Busy, and yet nothing moves."""
    s, t = case.stretch, case.t
    values = [value for _, value in s.duties]
    filled, dram, tensor = (s.mean(f"{name}_active_ratio") for name in ("sm", "dram", "tensor"))
    if not values or fmean(values) < 0.95 or pstdev(values) > 0.02 or filled is None:
        return None
    if filled >= t.hang_sm or (dram or 0.0) >= 0.03 or (tensor or 0.0) >= 0.01:
        return None
    traffic = max(s.mean("copies") or 0.0, s.mean("nvlink_rx_bytes_per_second") or 0.0)
    if traffic > 20e6 or (s.cpu("written_bytes") or 0.0) > 1e5 or s.length < t.hang_seconds:
        return None
    return Match(
        summary=f"has been busy for {s.length:.0f} s and nothing moves: multiprocessors {filled:.1%}, memory {dram or 0.0:.1%}, nothing copied",
        severity="critical",
        confidence=0.6,
        evidence=(
            Evidence("duty", "mean", fmean(values), ">=", 0.95),
            Evidence("sm_active_ratio", "mean", filled, "<", t.hang_sm),
            Evidence("dram_active_ratio", "mean", dram or 0.0, "<", 0.03),
            Evidence("seconds", "length", s.length, ">=", t.hang_seconds),
        ),
        start=s.start,
    )


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _share(case: Case, pauses: Sequence[Pause]) -> float:
    return sum(pause.stall.seconds for pause in pauses) / max(case.stretch.length, 1e-9)


def _change(series: Sequence[tuple[float, float]], least_seconds: float) -> tuple[int, float, float] | None:
    """The moment that splits a series best into two steady levels, with the medians on both sides."""
    if len(series) < 4 or series[-1][0] - series[0][0] < 2 * least_seconds:
        return None
    values = [value for _, value in series]
    sums = [0.0, *accumulate(values)]
    squares = [0.0, *accumulate(value * value for value in values)]

    def scatter_of(begin: int, end: int) -> float:
        count, total = end - begin, sums[end] - sums[begin]
        return count * math.sqrt(max(0.0, (squares[end] - squares[begin]) / count - (total / count) ** 2))

    best: tuple[float, int] | None = None
    for place in range(1, len(series)):
        if (
            series[place][0] - series[0][0] < least_seconds
            or series[-1][0] - series[place][0] < least_seconds
        ):
            continue
        spread = scatter_of(0, place) + scatter_of(place, len(values))
        if best is None or spread < best[0]:
            best = (spread, place)
    if best is None:
        return None
    left, right = values[: best[1]], values[best[1] :]
    before, after = median(left), median(right)
    scatter = max(median(abs(v - before) for v in left), median(abs(v - after) for v in right))
    if abs(before - after) < 4 * scatter:
        return None
    return best[1], before, after


RULES = (
    Rule(
        id="collective_hang",
        family="stall",
        title="The GPU spins and nothing moves",
        means="A kernel waits for something that does not come, mostly another rank in a collective operation: utilization reads 100 %, and no step is ever finished.",
        recognised="Busy all the time without variation, hardly any multiprocessor or memory activity, nothing copied or written, for two minutes or more.",
        severity="Critical.",
        advice=(
            Advice(
                "find the rank that differs: `py-spy dump` on each, and NCCL's flight recorder (TORCH_NCCL_TRACE_BUFFER_SIZE)",
                "one rank that died, raised or took another branch keeps all others waiting",
                "all ranks but one stand in the same collective",
            ),
        ),
        check=collective_hang,
        needs=("duty", "gpm"),
        sources=("NCCL issue 968", "PyTorch: NCCL flight recorder"),
        shown=False,
    ),
    Rule(
        id="checkpoint_stall",
        family="stall",
        title="The GPU stands still while checkpoints are written",
        means="The program stops its steps to copy the model to the host and to write it, and the GPU waits for the disk.",
        recognised="Pauses of the GPU between stretches of work, 200 MB or more written by its processes in each, together at least 5 % of the time; two or more of them make it surer.",
        severity="By the share of time: low from 5 %, medium from 20 %, high from 40 %.",
        advice=(
            Advice(
                "write asynchronously (torch.distributed.checkpoint.async_save, or a copy to the host and a thread)",
                "only the copy to the host needs the GPU to wait; writing can go on beside the next steps",
                "save to /dev/shm once: the pause shrinks to the copy alone",
            ),
            Advice(
                "save less often, in shards, or to a faster disk",
                "the cost is (time a save takes) x (how often)",
                "`gpulse -d` shows the disk's write rate during the pause",
            ),
        ),
        check=checkpoint_stall,
        needs=("duty", "io"),
        sources=("PyTorch: distributed checkpoint", "GoCkpt"),
    ),
    Rule(
        id="periodic_stall",
        family="stall",
        title="The GPU stands still again and again",
        means="At intervals the program does something without the GPU: an evaluation on the host, logging, garbage collection, starting the workers of the next epoch.",
        recognised="Two or more pauses of the GPU between stretches of work, with nothing written and nobody who should have fed it being busy; regular spacing makes it surer.",
        severity="By the share of time: low from 5 %, medium from 20 %, high from 40 %.",
        advice=(
            Advice(
                "see what happens at those times: evaluation metrics on the CPU, logging, the end of an epoch",
                "whatever runs there can run less often, on the GPU, or beside the steps",
                "`py-spy dump --pid PID` during a pause",
            ),
            Advice(
                "persistent_workers=True if the pauses are the ends of epochs",
                "workers are otherwise started again each time",
                "`gpulse -c -v` shows new worker pids after each pause",
            ),
        ),
        check=periodic_stall,
        needs=("duty", "processes"),
        sources=("Amazon SageMaker: step outliers",),
    ),
    Rule(
        id="throughput_regression",
        family="stall",
        title="The pace broke at one moment",
        means="From one moment on the GPU is busy for a smaller part of the time than before, without a pause in between.",
        recognised="Two steady levels of duty with one change between them, the second at least 15 % lower.",
        severity="Low; medium when more than 40 % of the pace is gone.",
        advice=(
            Advice(
                "see what else began at that moment: another job, a backup, a new phase of the program",
                "the other findings of the same time name the resource",
                "`gpulse top` shows who started when",
            ),
        ),
        check=throughput_regression,
        needs=("duty",),
        sources=("Greyhound: fail-slow detection", "Google: performance regression thresholds"),
    ),
)
