from __future__ import annotations

from gpulse.model.source_health import Health
from gpulse.sources.frame_source import HealthLog

LOST = Health("nvml", "gpu_lost", "lost", 10.0, "gpu 1")


def test_the_first_time_stays() -> None:
    """However often a problem is reported again, with other words."""

    log = HealthLog()
    log.merge([LOST])

    assert (LOST._replace(detail="still lost"),) == log.merge(
        [LOST._replace(detail="still lost", since=20.0)]
    )


def test_what_is_no_longer_reported_is_forgotten() -> None:
    """And begins anew when it comes back."""

    log = HealthLog()
    log.merge([LOST])
    log.merge([])

    assert (LOST._replace(since=30.0),) == log.merge([LOST._replace(since=30.0)])


def test_two_problems_of_one_kind_are_one_entry_with_all_names() -> None:
    """Two calls that fail in different ways do not hide each other."""

    one = Health("nvml", "failed", "Unknown Error", 10.0, "gpu 1", ("power_watts",))
    other = Health("nvml", "failed", "Corrupted infoROM", 10.0, "gpu 1", ("ecc_enabled",))

    assert (
        one._replace(detail="Unknown Error; Corrupted infoROM", metrics=("ecc_enabled", "power_watts")),
    ) == HealthLog().merge([one, other])
