from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gpulse.cluster.protocol import load_limits
from gpulse.cluster.protocol.load_limits import (
    MAX_REUSE_SECONDS,
    REUSE_FACTOR,
    BusyError,
    LoopShare,
    ReportLimit,
    SharedResults,
)


class Times:
    """Clocks that a test moves."""

    def __init__(self) -> None:
        self.now = self.used = 0.0

    def monotonic(self) -> float:
        """Seconds."""
        return self.now

    def cpu_seconds(self) -> float:
        """CPU time."""
        return self.used

    def work(self, seconds: float) -> None:
        """Use both."""
        self.now += seconds
        self.used += seconds


def results(times: Times) -> SharedResults:
    """Results on these clocks."""
    share = LoopShare(monotonic=times.monotonic)
    return SharedResults(share, monotonic=times.monotonic, cpu_seconds=times.cpu_seconds)


async def test_callers_at_the_same_time_share_one_computation() -> None:
    """However many they are."""

    times, computed, gate = Times(), list[int](), asyncio.Event()

    async def compute() -> int:
        computed.append(1)
        await gate.wait()
        return len(computed)

    shared = results(times)
    callers = [asyncio.create_task(shared.get("latest", compute)) for _ in range(200)]
    await asyncio.sleep(0)
    gate.set()

    assert {1} == set(await asyncio.gather(*callers))


async def test_a_costly_result_is_reused_in_proportion_and_a_cheap_one_is_not() -> None:
    """So that one route takes a fifth of the time at most, and small heads answer with their newest data."""

    times, computed = Times(), list[float]()

    async def compute(seconds: float) -> int:
        times.work(seconds)
        computed.append(seconds)
        return len(computed)

    async def ask(seconds: float) -> int:
        return await shared.get("latest", lambda: compute(seconds))

    shared = results(times)
    assert [1, 2, 3] == [await ask(0.001) for _ in range(3)]
    assert [4, 4] == [await ask(0.5) for _ in range(2)]
    times.now += 0.5 * REUSE_FACTOR - 0.01
    assert 4 == await ask(0.5)
    times.now += 0.02
    assert 5 == await ask(100.0)
    times.now += MAX_REUSE_SECONDS
    assert 6 == await ask(0.5)
    shared.clear()
    assert 7 == await ask(0.5)


async def test_a_result_waits_only_for_itself() -> None:
    """One that hangs delays no other, and the CPU time of others is not counted for it."""

    times, gate = Times(), asyncio.Event()
    share = LoopShare(monotonic=times.monotonic)
    shared = SharedResults(share, monotonic=times.monotonic, cpu_seconds=times.cpu_seconds)

    async def hang() -> str:
        await gate.wait()
        return "slow"

    async def work() -> str:
        times.used += 3.0
        return "fast"

    slow = asyncio.create_task(shared.get("gpus", hang))
    await asyncio.sleep(0)
    async with asyncio.timeout(60):
        assert "fast" == await shared.get("status", work)
    waited = share.wait_seconds()
    gate.set()
    assert "slow" == await slow
    assert waited == share.wait_seconds()


async def test_a_computation_that_is_cancelled_can_clean_up() -> None:
    """The cancellation reaches it."""

    ended: list[str] = []

    async def hang() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("cleaned up")

    work = asyncio.ensure_future(results(Times())._compute(hang, [0.0]))
    await asyncio.sleep(0)
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    assert ["cleaned up"] == ended


async def test_a_failed_computation_is_not_kept() -> None:
    """Its callers get the error, the next one tries again."""

    times, outcomes = Times(), iter([ValueError("no"), 1])

    async def compute() -> Any:
        times.work(1.0)
        outcome = next(outcomes)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    shared = results(times)
    with pytest.raises(ValueError, match="no"):
        await shared.get("latest", compute)
    assert 1 == await shared.get("latest", compute)


async def test_requests_wait_for_their_share_and_are_refused_when_that_takes_too_long() -> None:
    """With the time after which to try again."""

    times = Times()
    share = LoopShare(0.5, monotonic=times.monotonic)
    await share.admit(0.1, 0.0)
    assert 0.0 == share.wait_seconds()
    share.charge(2.0)
    wait = share.wait_seconds()
    assert 3.0 < wait < 4.2
    with pytest.raises(BusyError) as refusal:
        await share.admit(0.1, 1.0)
    assert (503, 3) == (refusal.value.status, refusal.value.retry_seconds)
    times.now += wait
    await share.admit(0.1, 0.0)


async def test_few_reports_are_computed_at_once_and_few_requests_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The others are refused."""
    monkeypatch.setattr(load_limits, "MAX_REPORTS_AT_ONCE", 2)
    monkeypatch.setattr(load_limits, "MAX_REPORTS_WAITING", 3)

    limit, gate, running, most = ReportLimit(), asyncio.Event(), 0, 0

    async def report() -> None:
        nonlocal running, most
        async with limit.slot():
            running += 1
            most = max(most, running)
            await gate.wait()
            running -= 1

    tasks = [asyncio.create_task(report()) for _ in range(5)]
    for _ in range(5):
        await asyncio.sleep(0)
    with pytest.raises(BusyError):
        await report()
    gate.set()
    await asyncio.gather(*tasks)
    assert 2 == most
