"""Diagnose a block with the rules of `gpulse why`, over the seconds in which it was open."""

from __future__ import annotations

from gpulse.diagnosis.engine import judge
from gpulse.diagnosis.thresholds import DEFAULTS
from gpulse.model.finding import Diagnosis
from gpulse.profiling.block_usage import BlockUsage


def diagnose_block(usage: BlockUsage, trouble: str | None) -> Diagnosis:
    """Return the diagnosis of a block; it needs enough time in one piece."""
    frame = usage.frame
    seconds = {uuid: list(kept) for uuid, kept in usage.seconds.items()}
    if trouble is not None and not seconds:
        return Diagnosis(f"Not enough data: {trouble}.")
    if frame is None or not seconds:
        return Diagnosis(
            f"Not enough data: a block must be open for at least {DEFAULTS.min_seconds:.0f} s without a break."
        )
    diagnosis = judge(seconds, frame, DEFAULTS, frame.time)
    start = min(kept[0].start for kept in seconds.values())
    frames = max(len(kept) for kept in seconds.values())
    return diagnosis._replace(start=start, end=frame.time, frames=frames)
