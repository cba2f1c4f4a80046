from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from gpulse.store.store import SeriesKey, StoredNode
from gpulse.store.tsdb.promql import RangeSeries
from gpulse.store.tsdb.series_query import build_selector, group_names, split_range, split_steps
from gpulse.store.tsdb.store import TsdbStore
from tests.queries import query

NOW = 1_700_000_000_000
"""Milliseconds."""


def test_a_selector_names_what_is_asked_for() -> None:
    """One by its name, several by a pattern in which nothing has a meaning of its own."""

    alone = build_selector("gpu", "power_watts", nodes=["a.b"], subjects=None, labels={})
    several = build_selector(
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

    made = build_selector("host", "load1", nodes=["a\nb\\", "\udcff"], subjects=None, labels={})

    assert 'gpulse_host_load1{node=~"a\\nb\\\\\\\\|?"}' == made.replace("\\\\?", "?")
    made.encode()


def test_many_names_are_asked_for_in_groups() -> None:
    """None is left out, and no question is too long."""

    names = {f"node-{number:04d}.cluster.example.org" for number in range(1250)}
    long = {f"{number:03d}{'x' * 250}" for number in range(100)}

    assert sorted(names) == [name for group in group_names(names) for name in group]
    assert all(len(group) <= 250 for group in group_names(names))
    assert sorted(long) == [name for group in group_names(long) for name in group]
    assert all(sum(map(len, group)) <= 6000 for group in group_names(long))
    assert [] == list(group_names([]))


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
    for piece in split_steps(start, end, step_us, series):
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
    for first, until in split_range(start, start + length, series):
        assert begin == first < until
        begin = until

    assert begin == start + length


class Repeating:
    """A time-series database in which the samples of one GPU are several times, under labels that changed."""

    def matrix(self, query: str, at: float, **_: object) -> list[RangeSeries]:  # noqa: ARG002
        """The same samples in two series, some twice, and one from before what was asked for."""
        times = np.array([99.999, 100.5, 101.5, 101.5, 102.5])
        return [
            RangeSeries({"node": "a", "uuid": "GPU-1", "gpu": gpu}, times, 10 * times) for gpu in ("0", "1")
        ] + [RangeSeries({"node": "stranger", "uuid": "GPU-1"}, times, times)]


def test_a_sample_counts_once_however_often_it_was_written() -> None:
    """What was sent again, or is kept twice, is the same sample; nodes that nobody knows are passed over."""

    nodes = {7: StoredNode(7, "a", "a", "m", 0.0, {}, {})}
    tsdb: Any = Repeating()
    samples = TsdbStore(tsdb, lambda: nodes)

    (series,) = samples.series(query("gpu", "power_watts", start=100.0, end=103.0))
    (steps,) = samples.series(query("gpu", ["power_watts"], start=100.0, end=103.0, step=0.5))

    assert SeriesKey(7, "GPU-1") == series.key == steps.key
    assert [100.5, 101.5, 102.5] == series.times.tolist() == steps.times.tolist()
    assert [1005.0, 1015.0, 1025.0] == series.values.tolist() == steps.values.tolist()
