"""How agents wait between attempts."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from gpulse.cluster.agent.head_selection import MAX_DELAY_SECONDS, MIN_DELAY_SECONDS, Backoff, backoff_delay


def test_the_longest_wait_grows_up_to_ten_seconds() -> None:
    """One second at first, ten in the end."""

    assert [1.0, 1.5, 2.25, 3.375] == [backoff_delay(failures, 1.0) for failures in range(1, 5)]
    assert [10.0, 10.0] == [backoff_delay(failures, 1.0) for failures in (7, 10**6)]


@given(st.integers(1, 10**6), st.floats(0, 1))
def test_chance_decides_where_below_it_the_wait_ends(failures: int, chance: float) -> None:
    """Never at once, never beyond the longest wait."""

    assert MIN_DELAY_SECONDS <= backoff_delay(failures, chance) <= MAX_DELAY_SECONDS


def test_a_welcome_ends_the_count_of_failed_attempts() -> None:
    """A head that restarts twice in a row is not waited for longer than one that restarts once."""

    backoff = Backoff(lambda: 1.0)
    for _ in range(20):
        backoff.failed(None)
    assert 10 == backoff.failed(None)
    assert 1 == backoff.failed(3600.0)
    for _ in range(20):
        backoff.failed(None)
    assert 1.5 == backoff.failed(1.0)


def test_connections_that_keep_ending_soon_are_tried_less_often() -> None:
    """A head that welcomes and ends every connection is not asked every second; one good connection is enough."""

    backoff = Backoff(lambda: 1.0)
    waits = [backoff.failed(0.5) for _ in range(8)]
    assert sorted(waits) == waits
    assert 10 == waits[-1]
    assert 1 == backoff.failed(3.0)
    assert 1.5 == backoff.failed(None)


def test_a_thousand_agents_come_back_over_several_seconds() -> None:
    """After a long outage no second brings more than a third of them, and all are back within ten."""

    chance, outage = random.Random(7), 600.0
    arrivals = []
    for _ in range(1000):
        backoff, now = Backoff(chance.random), 0.0
        while now < outage:
            now += backoff.failed(None)
        arrivals.append(now - outage)
    assert max(arrivals) <= 10
    assert max(Counter(int(arrival) for arrival in arrivals).values()) < 333


def test_a_refusal_waits_long() -> None:
    """Whoever was refused asks again after half a minute to a minute, not sooner."""

    assert 60 == Backoff(lambda: 1.0).refused()
    assert 30 == Backoff(lambda: 0.0).refused()
