"""Estimates of what GPM would measure, for any board."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulse.diagnosis.estimates import (
    ContextPower,
    PowerModel,
    estimate_copy_ratio,
    infer_duty,
    infer_seconds,
    link_bytes_per_second,
    model_power,
)
from gpulse.diagnosis.second_summary import SecondSummary, WeightedMean
from gpulse.model.device import Device
from gpulse.model.frame import GpuReading
from gpulse.model.metric_catalog import Values

GIGABYTE = 1e9
RATIOS = st.floats(0.0, 1.0)
LIMITS = st.floats(70.0, 1000.0)
"""Default power limits, from a T4 to the largest boards."""
CLOCKS = st.floats(0.3, 1.0)
"""Relative to the maximum."""


def second(
    at: float = 0.0,
    *,
    facts: Values | None = None,
    **means: float,
) -> SecondSummary:
    """One second of a GPU without GPM."""
    device = Device(0, "GPU-0", "board", facts=facts or {})
    return SecondSummary(
        start=at, end=at + 1.0, frames=5, reading=GpuReading(device, {}),
        gpu={name: WeightedMean(5 * value, 5) for name, value in means.items()},
        duties=(), reasons={}, holders=None, shares={}, holder_cores={}, cores=None, thread_cores=None,
        feeding_cores=None, workers=(), blocked=None, stuck=0, run_wait=None, read_bytes=None, written_bytes=None,
        resident_bytes=None, throttled=None, cpus=None, remote_cpus=None, host={}, disk={}, nfs={}, network=("", {}),
    )  # fmt: skip


def learn(seconds: Sequence[SecondSummary]) -> list[SecondSummary]:
    """The same seconds with the idle power known at each."""
    context = ContextPower()
    return [each._replace(context_watts=context.follow(each)) for each in seconds]


def idle(at: float, watts: float, clock: float = 1.98e9) -> SecondSummary:
    """A second without kernels."""
    return second(at, gpu_utilization_ratio=0.0, power_watts=watts, sm_clock_hertz=clock)


@given(limit=LIMITS, context=RATIOS, watts=RATIOS, more=RATIOS, duty=st.floats(0.02, 1.0), clock=CLOCKS)
def test_more_power_never_means_less_use(
    limit: float, context: float, watts: float, more: float, duty: float, clock: float
) -> None:
    """The estimate is a share, and grows with the power draw."""
    model = PowerModel(0.5 * context * limit, limit, 2e9)
    low, high = sorted((watts * limit, more * limit))
    first, then = model.fill(low, duty, clock * 2e9), model.fill(high, duty, clock * 2e9)

    assert first is not None
    assert then is not None
    assert 0.0 <= first.ratio <= then.ratio <= 1.0


@given(limit=LIMITS, context=st.floats(0.1, 0.4), fill=RATIOS, duty=st.floats(0.02, 1.0), clock=CLOCKS)
def test_what_kernels_add_is_recovered(
    limit: float, context: float, fill: float, duty: float, clock: float
) -> None:
    """Whatever the board, its clock and how often it is busy."""
    model = PowerModel(context * limit, limit, 2e9)
    watts = model.context_watts + fill * duty * model.full_kernel_watts(clock * 2e9)
    estimate = model.fill(watts, duty, clock * 2e9)

    assert estimate is not None
    assert fill == pytest.approx(estimate.ratio, abs=1e-6)


@given(limit=LIMITS, lowered=st.floats(0.4, 1.0), watts=RATIOS)
def test_a_lowered_power_limit_changes_nothing(limit: float, lowered: float, watts: float) -> None:
    """Small kernels draw the same at any limit, so the estimate is relative to the board's default."""
    drawn = 0.2 * limit + 0.2 * watts * limit
    seconds = [second(power_watts=drawn, facts={"power_default_limit_watts": limit})]
    cut = [
        each._replace(reading=each.reading._replace(values={"power_limit_watts": lowered * limit}))
        for each in seconds
    ]

    assert model_power(seconds) == model_power(cut)


def test_a_gpu_at_its_lowered_limit_is_full() -> None:
    """The limit works through the clock, and full kernels draw less at a lower clock."""
    estimate = PowerModel(125.0, 700.0, 1.98e9).fill(398.0, 0.99, 1.25e9)

    assert estimate is not None
    assert estimate.ratio >= 0.9


def test_a_rarely_busy_gpu_is_in_doubt() -> None:
    """A few watts of idle power are then as much as its kernels."""
    model = PowerModel(125.0, 700.0, 1.98e9)
    often, rarely = model.fill(140.0, 0.95, None), model.fill(128.0, 0.02, None)

    assert often is not None
    assert rarely is not None
    assert often.is_surely_below(0.35)
    assert not rarely.is_surely_below(0.35)


def test_without_kernels_there_is_nothing_to_fill() -> None:
    """An idle GPU has no estimate."""
    assert None is PowerModel(125.0, 700.0).fill(125.0, 0.0, None)


@pytest.mark.parametrize(
    "facts", [{}, {"power_default_limit_watts": 0.0}, {"power_default_limit_watts": 90.0}]
)
def test_a_board_without_a_sensible_limit_has_no_model(facts: Values) -> None:
    """Unknown limits, and an idle board that draws more than its limit."""
    seconds = learn([idle(0, 100.0), idle(1, 100.0)])
    seconds = [
        each._replace(reading=each.reading._replace(device=Device(0, "", "", facts=facts)))
        for each in seconds
    ]

    assert None is model_power(seconds)


def test_idle_power_is_learned_at_the_clock_of_work() -> None:
    """An idle GPU at a low clock draws less, which says nothing about one at its working clock."""
    known = learn(
        [
            idle(0, 82.0, 0.345e9),
            idle(1, 82.0, 0.345e9),
            idle(2, 110.0),
            idle(3, 127.0),
            idle(4, 126.0),
            second(5, gpu_utilization_ratio=0.9, power_watts=500.0, sm_clock_hertz=1.9e9),
        ]
    )

    assert [None, 82.0, None, 127.0, 126.0, 126.0] == [each.context_watts for each in known]


def test_a_wrong_low_reading_is_forgotten_after_a_day_of_idle_hours() -> None:
    """But a board that works for days without a pause keeps what was learned before."""
    first = [idle(0, 126.0), idle(1, 126.0), idle(2, 5.0)]
    hours = [idle(3600.0 * hour + at, 126.0) for hour in range(1, 25) for at in (0, 1)]
    late = second(9e6, gpu_utilization_ratio=0.9, power_watts=500.0, sm_clock_hertz=1.98e9)

    assert 5.0 == learn([*first, *hours[:-2]])[-1].context_watts
    assert 126.0 == learn([*first, *hours])[-1].context_watts
    assert 126.0 == learn([*first[:2], late])[-1].context_watts


def test_the_first_idle_second_is_not_trusted() -> None:
    """The driver averages power, so it still contains some work, or too little of the new clock."""
    known = learn(
        [idle(0, 300.0), second(1, gpu_utilization_ratio=0.5, power_watts=300.0, sm_clock_hertz=1.98e9)]
    )

    assert [None, None] == [each.context_watts for each in known]


@given(
    st.lists(
        st.tuples(st.integers(1, 700), st.integers(200_000_000, 2_000_000_000), st.booleans()), max_size=40
    )
)
def test_learned_power_is_one_that_was_seen(moments: list[tuple[int, int, bool]]) -> None:
    """Never more than the lowest idle power at that clock, and never invented."""
    seconds = [
        second(place, gpu_utilization_ratio=float(busy), power_watts=watts, sm_clock_hertz=clock)
        for place, (watts, clock, busy) in enumerate(moments)
    ]
    seen = {watts for watts, _, busy in moments if not busy}

    assert {each.context_watts for each in learn(seconds)} - {None} <= seen


def test_unseen_idle_power_is_a_guess_below_what_was_drawn() -> None:
    """And counts as one."""
    guessed = model_power([second(power_watts=130.0, facts={"power_default_limit_watts": 700.0})])
    small = model_power([second(power_watts=60.0, facts={"power_default_limit_watts": 700.0})])

    assert (PowerModel(120.0, 700.0), PowerModel(60.0, 700.0)) == (guessed, small)


@given(utilization=RATIOS, copying=RATIOS, used=RATIOS)
def test_kernels_run_no_more_than_the_gpu_is_busy(utilization: float, copying: float, used: float) -> None:
    """And no less than without the copies, or than the power shows."""
    duty = infer_duty(utilization, copying, used)

    assert duty <= utilization
    assert duty >= min(utilization, used)
    assert duty >= utilization - copying


@given(rate=st.floats(0.0, 1e12), link=st.floats(1e6, 1e12))
def test_copies_take_a_share_of_the_time(rate: float, link: float) -> None:
    """Never more than all of it."""
    assert 0.0 <= estimate_copy_ratio(rate, link) <= 1.0


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({"pcie_link_generation_max": 5, "pcie_link_width_max": 16}, 63.0 * GIGABYTE),
        ({"pcie_link_generation_max": 3, "pcie_link_width_max": 16}, 15.8 * GIGABYTE),
        ({"pcie_link_generation_max": 4}, None),
        ({"pcie_link_generation_max": 0, "pcie_link_width_max": 0}, None),
    ],
)
def test_the_link_is_as_fast_as_its_lanes(facts: Values, expected: float | None) -> None:
    """An unknown link has no speed."""
    speed = link_bytes_per_second(GpuReading(Device(0, "", "", facts=facts), {}))

    assert (None if expected is None else pytest.approx(expected, rel=0.01)) == speed


LINK: Values = {"pcie_link_generation_max": 4, "pcie_link_width_max": 16, "power_default_limit_watts": 400.0}


def copying(at: float, rate: float, **means: float) -> SecondSummary:
    """A second with copies to the GPU, at half of its power."""
    known = {"gpu_utilization_ratio": 0.98, "duty": 0.98, "power_watts": 100.0, **means}
    return second(at, facts=LINK, pcie_rx_bytes_per_second=rate, copies=rate, **known)


def test_the_time_of_copies_is_no_work() -> None:
    """Half of the link in use means half of the time, where power shows no kernels meanwhile."""
    model = PowerModel(60.0, 400.0)
    (inferred,) = infer_seconds([copying(0, 14.2 * GIGABYTE)], model)

    assert 0.48 == pytest.approx(inferred.mean("duty"), abs=0.01)


def test_rare_samples_of_the_link_are_averaged() -> None:
    """A sample that hit a copy and three that did not are a quarter of the time in each second."""
    model = PowerModel(60.0, 400.0)
    seconds = [copying(at, 28.35 * GIGABYTE if at == 1 else 0.0) for at in range(4)]
    duties = [each.mean("duty") for each in infer_seconds(seconds, model)]

    assert [pytest.approx(0.73, abs=0.01)] * 4 == duties


@pytest.mark.parametrize(
    ("model", "means"),
    [
        (PowerModel(60.0, 400.0), {"power_watts": 395.0}),
        (PowerModel(60.0, 400.0), {"memory_utilization_ratio": 0.98}),
        (None, {}),
    ],
)
def test_copies_behind_kernels_cost_nothing(model: PowerModel | None, means: dict[str, float]) -> None:
    """Power or memory shows that kernels ran; without either nothing is subtracted."""
    (inferred,) = infer_seconds([copying(0, 10 * GIGABYTE, **means)], model)

    assert 0.98 == pytest.approx(inferred.mean("duty"), abs=0.02)


def test_little_traffic_changes_nothing() -> None:
    """The seconds stay as they are, and so do those without any PCIe traffic."""
    quiet, unknown = [copying(0, 1e8)], [second(gpu_utilization_ratio=0.9, duty=0.9)]

    assert quiet == list(infer_seconds(quiet, None))
    assert unknown == list(infer_seconds(unknown, None))
