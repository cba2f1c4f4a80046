from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from gpulse.store.remote.pieces import raw_pieces, step_pieces
from gpulse.store.remote.selecting import groups, selector

NOW = 1_700_000_000_000
"""Milliseconds."""


def test_a_selector_names_what_is_asked_for() -> None:
    """One by its name, several by a pattern in which nothing has a meaning of its own."""

    alone = selector("gpu", "power_watts", nodes=["a.b"], subjects=None, labels={})
    several = selector(
        "filesystem",
        "used_bytes",
        nodes=["n[1]", 'a"b'],
        subjects=["/mnt/x (1)", "/"],
        labels={"cluster": 'c"1', "a": ""},
    )

    assert 'gpulse_gpu_power_watts{node="a.b"}' == alone
    assert (
        'gpulse_filesystem_used_bytes{a="",cluster="c\\"1",'
        'node=~"a\\"b|n\\\\[1\\\\]",mount_point=~"/|/mnt/x \\\\(1\\\\)"}'
    ) == several


def test_a_selector_is_valid_text_whatever_names_hold() -> None:
    """Names come from nodes."""

    made = selector("host", "load1", nodes=["a\nb\\", "\udcff"], subjects=None, labels={})

    assert 'gpulse_host_load1{node=~"a\\nb\\\\\\\\|?"}' == made.replace("\\\\?", "?")
    made.encode()


def test_many_names_are_asked_for_in_groups() -> None:
    """None is left out, and no question is too long."""

    names = {f"node-{number:04d}.cluster.example.org" for number in range(1250)}
    long = {f"{number:03d}{'x' * 250}" for number in range(100)}

    assert sorted(names) == [name for group in groups(names) for name in group]
    assert all(len(group) <= 250 for group in groups(names))
    assert sorted(long) == [name for group in groups(long) for name in group]
    assert all(sum(map(len, group)) <= 6000 for group in groups(long))
    assert [] == list(groups([]))


@settings(deadline=None, max_examples=50)
@given(
    start=st.integers(NOW, NOW + 10_000_000),
    length=st.integers(0, 5_000_000),
    step_us=st.integers(1_000_000, 4_000_000_000),
    series=st.integers(1, 1_000_000),
)
def test_windows_of_steps_cover_a_time_once(start: int, length: int, step_us: int, series: int) -> None:
    """Each lies within one step, and the next begins where it ends."""

    begin, end = start, start + length
    for piece in step_pieces(start, end, step_us, series):
        for moment in range(piece.first, piece.last + 1, piece.step):
            assert begin == moment + 1 - piece.window
            assert begin * 1000 // step_us == moment * 1000 // step_us
            begin = moment + 1

    assert begin == end


@settings(deadline=None, max_examples=50)
@given(start=st.integers(0, NOW), length=st.integers(0, 10**9), series=st.integers(0, 100_000))
def test_pieces_of_a_time_follow_each_other(start: int, length: int, series: int) -> None:
    """However many series answer."""

    begin = start
    for first, until in raw_pieces(start, start + length, series):
        assert begin == first < until
        begin = until

    assert begin == start + length
