"""How agents wait between attempts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gpulse.cluster.agent.backoff import LONGEST_SECONDS, SHORTEST_SECONDS, Backoff, delay


def test_the_longest_wait_doubles_up_to_a_minute() -> None:
    """One second at first, sixty in the end."""

    assert [1, 2, 4, 8, 16, 32, 60, 60] == [delay(failures, 1.0) for failures in range(1, 9)]


@given(st.integers(1, 10**6), st.floats(0, 1))
def test_chance_decides_where_below_it_the_wait_ends(failures: int, chance: float) -> None:
    """Never at once, never beyond a minute."""

    assert SHORTEST_SECONDS <= delay(failures, chance) <= LONGEST_SECONDS


def test_a_good_connection_starts_the_count_again() -> None:
    """Three seconds are a good one, a second is not: a head that is restarted often is not waited for long."""

    backoff = Backoff(lambda: 1.0)
    assert [1, 2, 4] == [backoff.failed(0.0), backoff.failed(1.0), backoff.failed(2.9)]
    assert 1 == backoff.failed(3.0)
    assert 2 == backoff.failed(0.0)


def test_a_refusal_waits_long() -> None:
    """Whoever was refused asks again after half a minute to a minute, not sooner."""

    assert 60 == Backoff(lambda: 1.0).refused()
    assert 30 == Backoff(lambda: 0.0).refused()
