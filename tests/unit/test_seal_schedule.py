"""When a head seals: in time, before memory is full, and less often while it fails."""

from __future__ import annotations

from gpulse.cluster.head.maintenance import SealSchedule
from gpulse.store.local import SEAL_BYTES


def attempts(schedule: SealSchedule, seconds: int, unsealed_bytes: int) -> list[int]:
    """When sealing that always fails is tried, asked every second."""
    found = []
    for now in range(seconds):
        if schedule.is_due(float(now), unsealed_bytes):
            schedule.failed(float(now))
            found.append(now)
    return found


def test_sealing_is_due_after_a_time_or_when_memory_is_full() -> None:
    """Whichever comes first."""
    schedule = SealSchedule(600.0, 0.0)
    assert not schedule.is_due(599.0, SEAL_BYTES - 1)
    assert schedule.is_due(600.0, 0)
    assert schedule.is_due(1.0, SEAL_BYTES)
    schedule.done(600.0)
    assert not schedule.is_due(1199.0, 0)
    assert not schedule.has_failed


def test_sealing_that_fails_is_tried_less_and_less_often() -> None:
    """Up to the time between two; success ends that."""
    schedule = SealSchedule(100.0, 0.0)
    assert [0, 10, 30, 70, 150, 250, 350] == attempts(schedule, 400, SEAL_BYTES)
    schedule.done(400.0)
    assert schedule.is_due(401.0, SEAL_BYTES)
