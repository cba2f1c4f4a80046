from __future__ import annotations

import pytest

from gpulse.model.iso_time import iso

NOON = 1_794_830_400.0


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (NOON, "2026-11-16T12:00:00.000Z"),
        (NOON + 0.0674, "2026-11-16T12:00:00.067Z"),
        (NOON + 0.0678, "2026-11-16T12:00:00.068Z"),
        (NOON + 0.9996, "2026-11-16T12:00:01.000Z"),
        (-1.0, "1970-01-01T00:00:00.000Z"),
        (1e300, "9999-12-31T23:59:59.000Z"),
    ],
)
def test_a_time_is_rounded_to_the_millisecond(seconds: float, text: str) -> None:
    """The head's answers say the same as session files, also where a time is outside of any calendar."""

    assert text == iso(seconds)
