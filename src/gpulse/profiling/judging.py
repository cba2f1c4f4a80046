"""What the time of a block shows: the rules of `gpulse why` over the seconds that lie in it."""

from __future__ import annotations

from gpulse.diagnosis.engine import judge
from gpulse.diagnosis.thresholds import DEFAULTS
from gpulse.model.finding import Diagnosis
from gpulse.profiling.account import Account


def judged(account: Account, trouble: str | None) -> Diagnosis:
    """The diagnosis of a block, as far as it was open for long enough on end."""
    frame = account.frame
    seconds = {uuid: list(kept) for uuid, kept in account.seconds.items()}
    if trouble is not None and not seconds:
        return Diagnosis(f"Not enough data: {trouble}.")
    if frame is None or not seconds:
        return Diagnosis(
            f"Not enough data: a block must be open for {DEFAULTS.shortest_seconds:.0f} s on end to be judged."
        )
    diagnosis = judge(seconds, frame, DEFAULTS, frame.time)
    start = min(kept[0].start for kept in seconds.values())
    frames = max(len(kept) for kept in seconds.values())
    return diagnosis._replace(start=start, end=frame.time, frames=frames)
