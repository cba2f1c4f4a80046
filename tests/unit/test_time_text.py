from __future__ import annotations

import pytest

from gpulse.model.time_text import format_iso, format_iso_seconds, parse_iso

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

    assert text == format_iso(seconds)


def test_a_time_without_its_fraction_is_not_rounded_up() -> None:
    """A file is not named after a second that had not begun."""

    assert "2026-11-16T12:00:00Z" == format_iso_seconds(NOON + 0.9996)
    assert "9999-12-31T23:59:59Z" == format_iso_seconds(1e300)


@pytest.mark.parametrize(
    ("expected", "text"),
    [
        (NOON + 0.067, "2026-11-16T12:00:00.067Z"),
        (NOON, "2026-11-16T13:00:00+01:00"),
        (None, "yesterday"),
        (None, "0001-01-01T00:00:00"),
        (None, None),
    ],
)
def test_a_written_time_is_read_back(expected: float | None, text: object) -> None:
    """Whatever else stands there is no time."""

    assert expected == parse_iso(text)
