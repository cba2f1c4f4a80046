"""Whole outputs, byte for byte. `UPDATE_GOLDEN=1 pytest tests/integration/test_cli_golden.py` writes them anew."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpulse.api import snapshot
from gpulse.model.frame import Frame
from gpulse.sampling.recorder import Recorder
from gpulse.sources.demo_machine import DemoMachine
from tests.fakes.nvml import FakeNvml
from tests.integration.commands import TRACES, run

GOLDEN = Path(__file__).parents[1] / "golden"
STARTED = 1_700_049_600.0
GIB = 1 << 30
MOMENTS = {
    "gpu_shared": "+20",
    "loader_all_cores": "+12",
    "disk_small_random": "+12",
    "host_memory_leak": "+12",
}


def compare(name: str, *arguments: str | Path, columns: int = 120) -> None:
    """Compare what a command prints with the file of that name, or write the file."""
    ended = run(*arguments, env={"COLUMNS": str(columns)})
    assert (0, "") == (ended.code, ended.err)
    path = GOLDEN / name
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_bytes(ended.out.encode())

    assert path.read_bytes().decode() == ended.out


def recorded(path: Path, *frames: Frame) -> Path:
    """A recording of these frames."""
    recorder = Recorder(path)
    for frame in frames:
        recorder.write(frame)
    recorder.close()
    return path


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Half a second of the demo machine, at a time that does not change."""
    machine = DemoMachine(STARTED)
    path = tmp_path_factory.mktemp("demo") / "demo.jsonl"
    return recorded(path, machine.sample(STARTED + 5.0), machine.sample(STARTED + 5.5))


@pytest.fixture
def faulty(fake_nvml: FakeNvml, tmp_path: Path) -> Path:
    """A look at a fake machine on which much is wrong, without what differs between two runs."""
    for index in range(1, 5):
        fake_nvml.add(index)
    fake_nvml.lose(2)
    hot, capped = fake_nvml.gpu(1), fake_nvml.gpu(0)
    hot.reasons, hot.clocks[1], hot.temperature = 0x48, 600, 91
    capped.reasons, capped.clocks[1], capped.power_mw, capped.util_gpu = 0x4, 1200, 699_000, 99
    fake_nvml.gpu(3).ecc_volatile[1] = 3
    fake_nvml.add_mig(4, gpu_instance=7)
    fake_nvml.add_process(0, 4_194_999, 3 * GIB)
    frame = snapshot(rates_seconds=None).frame
    node = frame.node._replace(name="faulty", kernel=None, cpu_model=None)
    entries = tuple(
        entry._replace(since=STARTED) for entry in frame.health if entry.source in ("nvml", "gpm")
    )
    return recorded(
        tmp_path / "faulty.jsonl",
        Frame(STARTED, 0.0, node, frame.gpus, processes=frame.processes, health=entries),
    )


@pytest.mark.parametrize("columns", [60, 80, 120, 200])
def test_the_demo_machine(demo: Path, columns: int) -> None:
    """Everything about eight GPUs, in windows of four widths."""
    compare(f"demo-{columns}.txt", "--replay", demo, "-a", columns=columns)


@pytest.mark.parametrize("columns", [60, 80, 120, 200])
@pytest.mark.parametrize("trace", MOMENTS)
def test_recorded_hardware(trace: str, columns: int) -> None:
    """A moment of a real run, in windows of four widths."""
    path = TRACES / f"{trace}.jsonl.gz"
    compare(f"{trace}-{columns}.txt", "--replay", path, "--at", MOMENTS[trace], "-a", columns=columns)


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_a_machine_with_faults(faulty: Path, columns: int) -> None:
    """A lost GPU, a hot one, memory errors, a MIG instance, and a process nobody can see."""
    compare(f"faulty-{columns}.txt", "--replay", faulty, "-b", "-c", columns=columns)


def test_every_detail() -> None:
    """What -v adds."""
    compare("details.txt", "--replay", TRACES / "gpu_shared.jsonl.gz", "--at", "+20", "-a", "-v")


@pytest.mark.parametrize("kind", ["json", "csv"])
def test_data_for_programs(kind: str) -> None:
    """The keys and columns that other programs rely on."""
    compare(f"gpu_shared.{kind}", "--replay", TRACES / "gpu_shared.jsonl.gz", "--at", "+20", f"--{kind}")
