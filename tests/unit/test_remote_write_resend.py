from __future__ import annotations

from pathlib import Path

from gpulse.store.tsdb.send_process import (
    CURSOR_FILE,
    RESEND_SECONDS,
    ResendWindow,
    SendCursor,
    read_cursor,
    write_cursor,
)


def confirmed(seconds: int, *, start: int = 0) -> ResendWindow:
    """A time-series database that confirmed a position every second."""
    overlap = ResendWindow(start)
    for second in range(1, seconds + 1):
        overlap.confirmed(start + second, float(second))
    return overlap


def test_after_a_failure_the_last_ninety_seconds_are_sent_again() -> None:
    """However long the database was away: what counts is what it confirmed last."""

    overlap = confirmed(200)

    overlap.failed(1000.0, hard=True)

    assert 200 - RESEND_SECONDS - 1 == overlap.reached
    assert 200 == overlap.furthest


def test_the_log_is_needed_for_as_long_as_something_may_be_sent_again() -> None:
    """What was confirmed less than ninety seconds before the newest is kept."""

    overlap = confirmed(60)
    assert 0 == overlap.safe
    for second in range(61, 200):
        overlap.confirmed(second, float(second))

    assert 199 - RESEND_SECONDS - 1 == overlap.safe


def test_what_is_sent_again_is_kept_for_as_long_as_if_it_were_new() -> None:
    """A time-series database may die a second time."""

    overlap = confirmed(200)
    overlap.failed(200.0, hard=True)
    again = overlap.reached
    for position in range(again + 1, 201):
        overlap.confirmed(position, 201.0)

    overlap.failed(202.0, hard=True)

    assert again == overlap.reached


def test_what_is_sent_again_is_cut_in_the_same_places() -> None:
    """A time-series database that takes a request as a whole or not at all then knows each that it has."""

    overlap = ResendWindow(0)
    for end in (3, 7, 12):
        overlap.confirmed(end, 1.0)
    assert None is overlap.next_end()
    overlap.failed(2.0, hard=True)

    found = []
    while (again := overlap.next_end()) is not None:
        found.append(again)
        overlap.confirmed(again, 3.0)

    assert [3, 7, 12] == found
    assert [3, 7, 12] == ResendWindow(0, overlap.ends).ends


def test_a_database_that_keeps_complaining_gets_on_nevertheless() -> None:
    """One that answers but cannot is not sent the same over and over; what is owed to it comes later."""

    overlap = confirmed(200)
    assert overlap.failed(200.0, hard=False)
    safe, now, position = overlap.reached, 200.0, overlap.reached
    while now < 495.0:
        now += 1.0
        position += 1
        overlap.confirmed(position, now)
        if now % 60 == 0:
            assert not overlap.failed(now, hard=False)

    assert position == overlap.reached
    assert safe == overlap.safe
    assert not overlap.due(now)
    assert overlap.due(501.0)
    overlap.rewind(501.0)
    assert safe == overlap.reached


def test_a_place_is_kept_by_database_and_log(tmp_path: Path) -> None:
    """Another database begins anew, and so does another log under the same name."""

    write_cursor(str(tmp_path), "http://a", "log-1", 17, [20, 30], 9)
    write_cursor(str(tmp_path), "http://b", "log-1", 5, [])

    assert SendCursor(17, (20, 30), 9) == read_cursor(str(tmp_path), "http://a", "log-1")
    assert SendCursor(5) == read_cursor(str(tmp_path), "http://b", "log-1")
    assert SendCursor() == read_cursor(str(tmp_path), "http://c", "log-1")
    assert SendCursor() == read_cursor(str(tmp_path), "http://a", "log-2")


def test_a_damaged_place_is_the_beginning(tmp_path: Path) -> None:
    """What cannot be read is sent again, which is harmless."""

    for text in ("", "[1]", '{"http://a": {"log": "log-1", "position": "x", "ends": []}}', '{"http://a": 3}'):
        (tmp_path / CURSOR_FILE).write_text(text, encoding="utf-8")
        assert SendCursor() == read_cursor(str(tmp_path), "http://a", "log-1")
    write_cursor(str(tmp_path), "http://a", "log-1", 17, [])
    assert SendCursor(17) == read_cursor(str(tmp_path), "http://a", "log-1")
