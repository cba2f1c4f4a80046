from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pynvml
import pytest

from gpulse.errors import UsageError
from gpulse.profiling.profiler import Profiler
from tests.fakes.nvml import FakeNvml
from tests.integration.cluster import until

GIB = 1024**3
_SHORT = 0.25
"""Time for some samples of the GPUs."""


@pytest.fixture
def profile() -> Iterator[Profiler]:
    """What `gpulse.profile` is, with blocks of its own and little patience after the last of them."""
    made = Profiler(linger_seconds=0.2)
    yield made
    made.stop()


@pytest.fixture
def warm(fake_nvml: FakeNvml, profile: Profiler) -> Profiler:
    """The same, already reading a GPU of 300 W."""
    draw(fake_nvml, 300)
    profile.start(interval_seconds=0.05)
    return profile


def draw(fake: FakeNvml, watts: int, gpu: int = 0) -> None:
    """Let a GPU draw this much from now on."""
    fake.gpu(gpu).power_mw = watts * 1000


def looks(profile: Profiler) -> int:
    """How often the GPUs were looked at."""
    return profile._samples


def wait_for_looks(profile: Profiler, count: int = 3) -> None:
    """Wait for some samples."""
    first = looks(profile)
    until(lambda: looks(profile) >= first + count, "looks at the GPUs")


def test_a_block_knows_what_it_used(fake_nvml: FakeNvml, warm: Profiler) -> None:
    """Energy, memory of the GPU, activity: of the time between its begin and its end."""
    gpu = fake_nvml.gpu(0)
    gpu.memory_used, gpu.util_gpu = 30 * GIB, 97
    fake_nvml.set_gpm(0, pynvml.NVML_GPM_METRIC_SM_UTIL, 62.0)
    wait_for_looks(warm)
    with warm("train") as block:
        wait_for_looks(warm)
    gpu.memory_used = 70 * GIB
    report = block.report()

    assert (1, False) == (report.runs, report.is_open)
    assert report.energy_joules == pytest.approx(300 * report.seconds, rel=0.001)
    assert report.seconds == pytest.approx(report.measured_seconds)
    assert 30 * GIB == report.memory_peak_bytes
    assert report.activity["sm_active_ratio"] == pytest.approx(0.62)
    assert report.activity["gpu_utilization_ratio"] == pytest.approx(0.97)
    assert report.samples >= 2
    for name in ("runs", "energy_joules", "memory_peak_bytes", "process_memory_peak_bytes", "activity"):
        assert getattr(report, name) == pytest.approx(getattr(block, name))


def test_runs_of_one_name_add_up(warm: Profiler) -> None:
    """And a block without a name begins anew."""
    with warm("step"):
        wait_for_looks(warm, 1)
    with warm("step") as block:
        wait_for_looks(warm, 1)
    with warm() as other:
        pass

    assert (2, 1) == (block.runs, other.runs)
    assert block.energy_joules == pytest.approx(300 * block.seconds, rel=0.001)
    assert ["step"] == [report.name for report in warm.summary().blocks]


def test_nested_and_within_itself(warm: Profiler) -> None:
    """What is inside counts for both, and a block within itself counts once."""

    @warm("deep")
    def deep(depth: int) -> None:
        if depth:
            deep(depth - 1)
        else:
            wait_for_looks(warm, 2)

    with warm("outer") as outer:
        deep(3)
    inner, whole = warm("deep").report(), outer.report()

    assert (4, 1) == (inner.runs, whole.runs)
    assert inner.seconds <= whole.seconds
    assert inner.energy_joules == pytest.approx(300 * inner.seconds, rel=0.001)


def test_what_a_block_raises_is_raised(warm: Profiler) -> None:
    """And its time counts."""
    with pytest.raises(KeyError, match="lost"), warm("load") as block:
        raise KeyError("lost")

    assert (1, False) == (block.runs, block.report().is_open)


def test_a_function_is_a_block(warm: Profiler) -> None:
    """With its name, its documentation and its value; `profile` is its block."""

    @warm
    def add(left: int, right: int = 1) -> int:
        """Add."""
        return left + right

    assert (3, "add", "Add.") == (add(1, right=2), add.__name__, add.__doc__)
    assert f"{__name__}.test_a_function_is_a_block.<locals>.add" == add.profile.name  # type: ignore[attr-defined]
    assert 1 == add.profile.runs  # type: ignore[attr-defined]


def test_a_coroutine_is_a_block_until_it_is_done(warm: Profiler) -> None:
    """Not only until it is made; others may be in it meanwhile."""

    @warm("fetch")
    async def fetch() -> int:
        await asyncio.sleep(_SHORT)
        return 1

    class Fetcher:
        async def __call__(self) -> int:
            return await fetch()

    fetcher = warm("fetcher")(Fetcher())

    async def both() -> list[int]:
        return list(await asyncio.gather(fetch(), fetcher()))

    began = time.monotonic()
    results = asyncio.run(both())
    took = time.monotonic() - began
    report = warm("fetch").report()

    assert ([1, 1], 2) == (results, report.runs)
    assert _SHORT <= report.seconds <= took
    assert (report.run_seconds or 0) >= _SHORT
    assert _SHORT <= warm("fetcher").seconds


@pytest.mark.parametrize("name", [(), ("named",)], ids=["nameless", "named"])
def test_what_is_not_over_when_it_returns_is_refused(profile: Profiler, name: tuple[str, ...]) -> None:
    """A generator or a class would be measured for next to nothing, and a method that is none yet breaks."""

    def batches() -> Iterator[int]:
        yield 1

    async def later() -> AsyncIterator[int]:
        yield 1

    class Batches:
        def __call__(self) -> Iterator[int]:
            yield 1

    wrong: list[Any] = [batches, later, Batches(), Path, classmethod(repr), staticmethod(len), 3]
    for thing in wrong:
        with pytest.raises(UsageError):
            profile(*name)(thing)
        with pytest.raises(UsageError):
            profile(thing)


def test_unreferenced_blocks_are_released(profile: Profiler) -> None:
    """A loop of nameless blocks does not fill the memory; the thread goes on as after any block."""
    for _ in range(30_000):
        with profile():
            pass

    with profile._condition:
        assert len(profile._events) + len(profile._tracker._active) < 25_000
        profile._drain()
        profile._tracker.tidy()
        assert 0 == len(profile._tracker._active)
        assert profile._tracker.last_end() is not None


def test_many_threads_use_one_block(warm: Profiler) -> None:
    """Their runs are counted each, and their common time once."""
    at_once = threading.Barrier(8)

    def work(_: int) -> None:
        at_once.wait()
        for _ in range(200):
            with warm("shared"):
                pass
        with warm("shared"):
            wait_for_looks(warm, 2)

    began = time.monotonic()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    report = warm("shared").report()

    assert 8 * 201 == report.runs
    assert report.seconds <= time.monotonic() - began
    assert report.energy_joules == pytest.approx(300 * report.seconds, rel=0.001)


def test_only_the_gpus_that_cuda_shows_are_read(
    fake_nvml: FakeNvml, profile: Profiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others are asked for nothing, once they have said who they are."""
    for index in (1, 2):
        fake_nvml.add(index)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2")
    draw(fake_nvml, 500, 2)
    profile.start()
    wait_for_looks(profile)
    fake_nvml.reset_calls()
    with profile("step") as block:
        wait_for_looks(profile)

    assert ["2"] == [gpu.label for gpu in block.report().gpus]
    assert block.energy_joules == pytest.approx(500 * block.seconds, rel=0.001)
    assert (0, True) == (
        fake_nvml.calls("nvmlDeviceGetPowerUsage", 0),
        fake_nvml.calls("nvmlDeviceGetPowerUsage", 2) > 0,
    )


def test_gpus_can_be_chosen(fake_nvml: FakeNvml, profile: Profiler) -> None:
    """By index or UUID, whatever the environment says; a selection that matches nothing is reported."""
    fake_nvml.add(1)
    profile.start(gpus=[1], interval_seconds=0.05)
    with profile("one") as one:
        wait_for_looks(profile)
    profile.start(gpus=["GPU-nowhere"])
    with profile("none") as none:
        pass

    assert ["1"] == [gpu.label for gpu in one.report().gpus]
    assert () == none.report().gpus
    assert "'GPU-nowhere' matches none of the GPUs of this machine" == none.report().trouble


def test_an_interval_must_be_possible(profile: Profiler) -> None:
    """As everywhere else."""
    with pytest.raises(UsageError):
        profile.start(interval_seconds=0)


def test_the_thread_ends_after_the_last_block(fake_nvml: FakeNvml, profile: Profiler) -> None:
    """The driver is given back, and the next block begins anew without losing what was measured."""
    with profile("step"):
        until(lambda: looks(profile) > 1, "a look")
    until(lambda: profile.is_idle, "the thread has nothing to do")
    until(lambda: fake_nvml.inits == fake_nvml.shutdowns, "the driver is given back")
    with profile("step") as block:
        until(lambda: looks(profile) > 1, "a look")

    assert 2 == block.runs
    assert (block.energy_joules or 0) > 0


def test_without_a_driver_there_are_times_and_a_reason(
    fake_nvml: FakeNvml, profile: Profiler, caplog: pytest.LogCaptureFixture
) -> None:
    """What cannot be known is None, and why is said once."""
    fake_nvml.fail_init(pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
    with caplog.at_level(logging.WARNING, "gpulse.profile"):
        profile.start()
        for _ in range(3):
            with profile("step") as block:
                pass
        report = block.report()
    profile.stop()

    assert (3, None, None, {}, ()) == (
        report.runs,
        report.energy_joules,
        report.memory_peak_bytes,
        report.activity,
        report.gpus,
    )
    assert "the NVIDIA kernel driver is not loaded" in (report.trouble or "")
    assert report.diagnosis.verdict.startswith("Not enough data: the NVIDIA kernel driver is not loaded")
    assert 1 == len(caplog.records)
    assert "step" in str(report)


def test_a_driver_that_hangs_does_not_block(fake_nvml: FakeNvml, warm: Profiler) -> None:
    """Neither the block nor who asks about it."""
    fake_nvml.hang("nvmlDeviceGetUtilizationRates")
    fake_nvml.wait_until_waiting()
    with warm("step") as block:
        pass
    report = block.report()
    out = fake_nvml.waiting
    fake_nvml.release_hangs()

    assert 1 == out
    assert (1, 0) == (report.runs, report.samples)


def test_a_gpu_that_is_lost_leaves_a_gap(fake_nvml: FakeNvml, warm: Profiler) -> None:
    """Nothing is made up for the time without readings."""
    with warm("step") as block:
        wait_for_looks(warm)
        fake_nvml.lose(0)
        wait_for_looks(warm, 6)
    report = block.report()

    assert 0 < report.gpus[0].measured_seconds < report.seconds
    assert report.gpus[0].power_watts == pytest.approx(300, rel=0.001)
    assert report.trouble is not None


def test_a_forked_process_measures_for_itself(warm: Profiler) -> None:
    """It has neither the parent's thread nor its figures, and the parent keeps both."""
    with warm("epoch") as block:
        wait_for_looks(warm, 1)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                with warm("worker") as own:
                    until(lambda: looks(warm) > 3, "looks of its own")
                energy = own.energy_joules or 0.0
                inherited = block.report()
                if energy > 0 and inherited.runs == 0 and own.runs == 1:
                    status = 0
                warm.stop()
            finally:
                os._exit(status)
        _, status = os.waitpid(child, 0)
    report = block.report()

    assert 0 == status
    assert (1, ["epoch"]) == (report.runs, [each.name for each in warm.summary().blocks])
    assert report.energy_joules == pytest.approx(300 * report.seconds, rel=0.001)


@pytest.mark.parametrize(
    "module", ["gpulse.sources.local_machine", "gpulse.diagnosis.engine", "gpulse.terminal.table"]
)
def test_a_fork_while_modules_are_loaded(fake_nvml: FakeNvml, nvml_library: Path, module: str) -> None:
    """What the first block, the first report or the first print has half loaded is whole in the child."""
    code = """
import importlib.abc, os, signal, sys, threading, time, gpulse

half_loaded, forking, forked = threading.Event(), threading.Event(), threading.Event()

class Slow(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == sys.argv[1] and not half_loaded.is_set():
            os.register_at_fork(before=forking.set, after_in_parent=forked.set)
            half_loaded.set()
            forking.wait(60)
            forked.wait(0.3)  # in vain, if forks wait for what is being loaded

def measure(name):
    with gpulse.profile(name) as block:
        until = time.monotonic() + 60
        while gpulse.profile._samples < 2 and time.monotonic() < until:
            time.sleep(0.01)
    str(block)
    return block.report()

sys.meta_path.insert(0, Slow())
thread = threading.Thread(target=measure, args=("outer",))
thread.start()
assert half_loaded.wait(60)
child = os.fork()
if child == 0:
    signal.alarm(60)
    report = measure("inner")
    gpulse.profile.stop()
    os._exit(0 if report.trouble is None and report.energy_joules else 1)
thread.join()
gpulse.profile.stop()
print(os.waitpid(child, 0)[1])
"""
    ended = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", code, module],
        env={**os.environ, **fake_nvml.env(nvml_library)},
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )

    assert ("0\n", "") == (ended.stdout, ended.stderr)


def test_a_program_may_end_in_the_middle_of_a_block(fake_nvml: FakeNvml, nvml_library: Path) -> None:
    """It ends as it would without, and the driver is given back."""
    code = """
import sys, time, gpulse
gpulse.profile.start()
with gpulse.profile("run"):
    time.sleep(0.1)
    sys.exit(7)
"""
    environment = {**os.environ, **fake_nvml.env(nvml_library)}
    ended = subprocess.run(
        [sys.executable, "-X", "dev", "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )

    assert (7, "", "") == (ended.returncode, ended.stdout, ended.stderr)
    assert fake_nvml.inits == fake_nvml.shutdowns > 0


def test_a_million_names_do_not_fill_the_memory(profile: Profiler) -> None:
    """Whoever numbers blocks finds the later ones together under one name."""
    for number in range(1500):
        profile(f"step {number}")
    with profile("step 1400"), profile("step 1499") as block:
        pass

    assert ("(other blocks)", 2) == (block.name, block.runs)


def test_reset_forgets(warm: Profiler) -> None:
    """All blocks begin anew."""
    with warm("step") as block:
        pass
    warm.reset()

    assert 0 == block.runs
    assert () == warm.summary().blocks
    assert "No blocks were profiled." == str(warm.summary())
