"""Which of several heads an agent turns to, and when it leaves one for a better one."""

from __future__ import annotations

from gpulse.cluster.agent.head_selection import PROBE_SECONDS, HeadSelection
from gpulse.errors import GpulseError


def heads(*targets: str) -> HeadSelection:
    """A list of heads, with chances that are all even."""
    return HeadSelection(targets or ("a:1", "b:2", "c:3"), lambda: 0.5)


def chosen(known: HeadSelection, now: float) -> str | None:
    """The one to try now."""
    found = known.next(now)
    return None if found is None else found.target


def test_the_first_that_answers() -> None:
    """Those that do not are passed over at once, and the first is tried again soon."""

    known = heads()
    a, b, c = known.all
    assert "a:1" == chosen(known, 0.0)
    assert 0.0 == known.failed(a, 0.0, None)
    assert "b:2" == chosen(known, 0.0)
    assert 0.0 == known.failed(b, 0.0, None)
    assert "c:3" == chosen(known, 0.0)
    assert 0.5 == known.failed(c, 0.0, None)
    assert chosen(known, 0.4) is None
    assert "a:1" == chosen(known, 0.5)


def test_a_head_that_was_lost_sends_its_agents_to_the_next_one_by_and_by() -> None:
    """Not all in the same instant."""

    known = heads()
    assert 0.25 == known.failed(known.all[0], 100.0, 90.0)
    assert "b:2" == chosen(known, 100.25)


def test_heads_that_are_all_away_are_tried_less_and_less_often() -> None:
    """Ten seconds lie between two attempts at most."""

    known = heads()
    now = 0.0
    waits = []
    for _ in range(40):
        while (head := known.next(now)) is None:
            waits.append(known.wait(now))
            now += waits[-1]
        known.failed(head, now, None)
    assert waits[:3] == sorted(waits[:3])
    assert 4.0 < max(waits) <= 10.0


def test_a_better_head_is_looked_for_now_and_then() -> None:
    """From the second one only the first is better, and ten seconds are between two looks at least."""

    known = heads()
    a, b, c = known.all
    assert [] == known.better(a, 0.0)
    assert [a] == known.better(b, 0.0)
    assert [a, b] == known.better(c, 0.0)
    assert PROBE_SECONDS <= known.probe_delay() <= 1.5 * PROBE_SECONDS


def test_a_better_head_that_never_lasts_is_left_alone_for_longer_and_longer() -> None:
    """Once is bad luck; a connection that lasted makes up for all of it."""

    known = heads()
    a, b, _ = known.all
    known.failed(a, 100.0, 5.0)
    assert [a] == known.better(b, 100.0)
    known.failed(a, 200.0, 5.0)
    assert ([], [a]) == (known.better(b, 219.0), known.better(b, 220.0))
    known.failed(a, 300.0, 5.0)
    assert ([], [a]) == (known.better(b, 339.0), known.better(b, 340.0))
    known.failed(a, 400.0, 90.0)
    known.failed(a, 500.0, 5.0)
    assert [a] == known.better(b, 500.0)


def test_a_head_that_refuses_is_asked_rarely() -> None:
    """The others are gone through without it, and none is left when all refuse."""

    known = heads("a:1", "b:2")
    a, b = known.all
    assert 0.0 == known.refused(a, 0.0, GpulseError("wrong token"))
    assert "b:2" == chosen(known, 0.0)
    assert [] == known.better(b, 29.0)
    refuse = [known.all_refused]
    known.refused(b, 0.0, GpulseError("wrong token"))
    refuse.append(known.all_refused)
    known.welcomed(a)
    assert [False, True, False] == [*refuse, known.all_refused]


def test_a_single_head_is_tried_whenever_it_is_time() -> None:
    """There is nothing to choose."""

    known = heads("a:1")
    assert 0.5 == known.failed(known.all[0], 0.0, None)
    assert "a:1" == chosen(known, 0.0)
