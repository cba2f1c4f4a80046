from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import pytest

from gpulse.model.frame import Frame
from tests.unit import diagnosis_traces as traces


def _benchmark(name: str) -> ModuleType:
    """A module of the benchmarks, which are not on pytest's path."""
    path = Path(__file__).parents[2] / "benchmarks" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"benchmarks.{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if TYPE_CHECKING:
    from benchmarks import diagnosis_baselines as baselines
else:
    baselines = _benchmark("diagnosis_baselines")


def _full_power() -> list[str]:
    """Healthy runs at the power limit; not at import, since every process that collects tests would read them all."""
    return [
        name
        for name in traces.HEALTHY
        if all(int(frame.gpus[0].values["clocks_event_reasons"]) == 4 for frame in traces.steady(name))
    ]


def _words(outcome: baselines.Outcome) -> str | None:
    return None if outcome.answer is None else outcome.answer.words


def test_bmon_calls_the_idle_card_a_bottleneck() -> None:
    """An idle GPU has a clocks event reason, and that is all bmon asks for."""

    assert "reason 0x1" == _words(baselines.bmon(traces.steady("idle")))


def test_bmon_calls_every_healthy_run_at_full_power_a_bottleneck() -> None:
    """The software power cap at the default limit is healthy; there are enough such runs to say so."""
    names = _full_power()

    assert len(names) >= 5
    assert dict.fromkeys(names, "reason 0x4") == {
        name: _words(baselines.bmon(traces.steady(name))) for name in names
    }


def test_low_utilization_alone_misses_the_single_block_kernel() -> None:
    """Utilization reads 100 % there."""

    assert None is _words(baselines.small_batch(traces.steady("single_block_kernel")))


def test_low_utilization_alone_calls_a_slow_disk_a_small_batch() -> None:
    """It knows no other cause."""

    assert "small batch" == _words(baselines.small_batch(traces.steady("disk_read")))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("loader_all_cores", "CPUBottleneck"),
        ("disk_read", "IOBottleneck"),
        ("gpu_memory_leak", "GPUMemoryIncrease"),
        ("sparse_serving", "LowGPUUtilization"),
        ("periodic_host_eval", "GPU fluctuates"),
        ("single_block_kernel", None),
        ("healthy_gpt", None),
        ("idle", None),
    ],
)
def test_each_rule_of_sagemaker_debugger_fires_where_it_should(name: str, words: str | None) -> None:
    """A baseline that never fires would be no baseline."""

    assert words == _words(baselines.sagemaker(traces.steady(name)))


def test_a_single_second_cannot_see_a_leak() -> None:
    """One second repeated does not change."""

    assert None is _words(baselines.snapshot(traces.steady("gpu_memory_leak")))


def test_nothing_to_look_at_is_not_judged_from_a_single_second() -> None:
    """Missing data is never health."""

    assert baselines.Outcome(None, judged=False) == baselines.snapshot([])


def test_without_gpm_and_host_only_the_driver_is_left() -> None:
    """Utilization, power and the list of pids stay; activity, link rates and /proc go."""

    frame: Frame = baselines.without_gpm(baselines.without_host(traces.steady("healthy_gpt")[:1]))[0]

    gpu = frame.gpus[0]
    assert {"gpu_utilization_ratio", "power_watts"} <= gpu.values.keys()
    assert not {"sm_active_ratio", "sm_occupancy_ratio", "pcie_rx_bytes_per_second"} & gpu.values.keys()
    assert gpu.processes
    assert (None, (), ()) == (frame.host, frame.processes, frame.disks)
