"""What must hold on a real NVIDIA GPU; skipped where there is none."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpulse import Recording, Sampler, snapshot
from gpulse.model.metric_catalog import CATALOG
from gpulse.sources.local_machine import LocalMachine
from gpulse.sources.nvml.read_timing import detailed_cadence

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
_WORKLOAD = Path(__file__).with_name("workload.py")


@pytest.fixture(scope="module")
def training() -> Iterator[subprocess.Popen[str]]:
    """A process that trains on the first GPU."""
    pytest.importorskip("torch")
    child = subprocess.Popen([sys.executable, str(_WORKLOAD), "120"], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline().strip() == "ready"
    yield child
    child.kill()
    child.wait()
    child.stdout.close()


def test_an_idle_gpu_has_its_readings() -> None:
    """Every GPU names itself and reports memory, power, temperature and clocks."""

    look = snapshot()

    assert look.frame.gpus
    for gpu in look.frame.gpus:
        for name in (
            "memory_total_bytes",
            "memory_used_bytes",
            "power_watts",
            "temperature_celsius",
            "sm_clock_hertz",
        ):
            assert gpu.get(name) is not None, name
        assert gpu.values.keys() <= CATALOG["gpu"].keys()
        assert all(0 <= value <= 1 for name, value in gpu.values.items() if name.endswith("_ratio"))


def test_health_holds_no_problem_on_a_sound_machine() -> None:
    """A machine that works reports no problem, only what it cannot say."""

    look = snapshot()

    assert [] == [health for health in look.frame.health if health.is_problem]


def test_a_training_process_is_seen(training: subprocess.Popen[str]) -> None:
    """The trainer is listed with its memory, its user and its CPU use, and the GPU is busy."""

    time.sleep(2)  # the driver averages utilization over about a second
    look = snapshot()
    gpu = look.frame.gpus[0]
    held = {process.pid: process for process in gpu.processes or ()}

    assert training.pid in held
    assert (held[training.pid].gpu_memory_bytes or 0) > 100 * 2**20
    assert (gpu.get("gpu_utilization_ratio") or 0) > 0.5
    process = next(process for process in look.frame.processes if process.pid == training.pid)
    assert process.identity.owner.user is not None
    assert (look.process(process, "cpu_percent") or 0) > 10


def test_gpm_shows_tensor_cores_at_work(training: subprocess.Popen[str]) -> None:
    """bf16 matrix products keep SMs and tensor cores busy where the GPU can tell."""

    gpu = snapshot().frame.gpus[0]
    if not gpu.device.has_gpm:
        pytest.skip("this GPU has no GPM")

    assert training.poll() is None
    assert (gpu.get("sm_active_ratio") or 0) > 0.5
    assert (gpu.get("tensor_active_ratio") or 0) > 0.2


def test_counters_grow_and_rates_are_believable(training: subprocess.Popen[str]) -> None:
    """Energy between two frames is power times time, give or take the driver's averaging."""

    with Sampler(LocalMachine(cadence=detailed_cadence()), interval_seconds=1.0) as sampler:
        frames = [frame for frame, _ in zip(sampler, range(12), strict=False)]
    first, last = frames[1].gpus[0], frames[-1].gpus[0]
    joules = (last.get("energy_joules_total") or 0) - (first.get("energy_joules_total") or 0)
    watts = joules / (last.read_at["slow"] - first.read_at["slow"])

    assert training.poll() is None
    assert watts == pytest.approx(last.get("power_watts"), rel=0.35)


def test_a_recorded_run_replays(tmp_path: Path) -> None:
    """A recording of a training command holds it busy, and its exit code is the command's."""

    pytest.importorskip("torch")
    path = tmp_path / "run.jsonl.gz"
    arguments = ["record", "-o", str(path), "--interval", "0.1", "--", sys.executable, str(_WORKLOAD), "4"]

    done = subprocess.run(
        [sys.executable, "-m", "gpulse", *arguments], check=False, capture_output=True, text=True
    )
    frames = list(Recording(path))

    assert 0 == done.returncode, done.stderr
    assert len(frames) > 40
    assert max(frame.gpus[0].get("sm_active_ratio") or 0 for frame in frames) > 0.5
    assert max(len(frame.gpus[0].processes or ()) for frame in frames) >= 1


def test_the_doctor_is_content() -> None:
    """Nothing is broken on a sound machine."""

    done = subprocess.run(
        [sys.executable, "-m", "gpulse", "doctor", "--json"], check=False, capture_output=True, text=True
    )

    assert [] == [check for check in json.loads(done.stdout) if check["status"] == "broken"]
    assert 0 == done.returncode
