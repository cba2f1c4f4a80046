"""How long history is kept: by age and by size, the oldest goes first."""

from __future__ import annotations

from collections.abc import Sequence

from gpulse.store.history.segments import (
    Segment,
    Summary,
    counted,
    read_segments,
    read_summaries,
    remove_lost_summaries,
    remove_segments,
)


def outdated(
    segments: list[Segment],
    *,
    now: float,
    keep_seconds: float | None,
    limit_bytes: int | None,
    summaries: Sequence[Summary] = (),
) -> list[Segment]:
    """The segments to remove. The newest always stays: its name says up to where everything is sealed.

    Args:
        segments: All of them, oldest first.
        now: Epoch seconds.
        keep_seconds: What is older goes; None to keep everything.
        limit_bytes: How much may stay at most; None for no limit.
        summaries: Those that count; one goes with the first of its segments.
    """
    lost = {item.members[0].first: item.segment.size_bytes for item in summaries}
    size = sum(segment.size_bytes for segment in segments) + sum(lost.values())
    gone: list[Segment] = []
    for segment in segments[:-1]:
        is_old = keep_seconds is not None and (segment.end is None or segment.end / 1e6 < now - keep_seconds)
        if not is_old and (limit_bytes is None or size <= limit_bytes):
            break
        size -= segment.size_bytes + lost.get(segment.first, 0)
        gone.append(segment)
    return gone


def apply_retention(
    directory: str, *, now: float, keep_seconds: float | None, limit_bytes: int | None
) -> list[str]:
    """Remove the oldest segments, and give their names. For the one writer of the directory.

    Raises:
        LogError: A segment is damaged.
        DiskError: One cannot be removed.
    """
    segments = read_segments(directory)
    gone = outdated(
        segments,
        now=now,
        keep_seconds=keep_seconds,
        limit_bytes=limit_bytes,
        summaries=counted(read_summaries(directory), segments),
    )
    names = [segment.name for segment in gone]
    if names:
        remove_segments(directory, names)
        remove_lost_summaries(directory)
    return names
