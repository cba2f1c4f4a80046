"""The recipe for a queue of work, as it is in contrib/: a `dask worker` on idle GPUs that retires in good order."""

from __future__ import annotations

import json
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.fakes.nvml import FakeNvml
from tests.integration.cluster import Process, is_gone, until
from tests.integration.harvest_machine import HarvestMachine, HarvestProcess

RECIPE = Path(__file__).parents[2] / "contrib" / "harvest" / "dask"
HASTE = {
    "interval_seconds = 10": "interval_seconds = 0.2",
    "idle_seconds = 60": "idle_seconds = 0",
    "cooldown_seconds = 300": "cooldown_seconds = 0.2",
}


@contextmanager
def ended(process: Process) -> Iterator[Process]:
    """A process that is gone in the end."""
    try:
        yield process
    finally:
        process.end(signal.SIGKILL)


def follow_recipe(machine: HarvestMachine, scheduler: str) -> None:
    """Do as the documentation says, in haste."""
    shutil.copy(RECIPE / "retire.py", machine.config.parent)
    text = (RECIPE / "harvest.toml").read_text(encoding="utf-8")
    for old, new in {**HASTE, "tcp://scheduler:8786": scheduler}.items():
        assert 1 == text.count(old)
        text = text.replace(old, new)
    machine.config.write_text(text, encoding="utf-8")


@pytest.mark.slow
def test_results_outlive_the_worker(tmp_path: Path, fake_nvml: FakeNvml, nvml_library: Path) -> None:
    """Somebody comes: what was computed is kept elsewhere, what was not is computed later, and the GPU is free at once."""

    machine = HarvestMachine(tmp_path, fake_nvml, nvml_library, gpus=1)
    env = {
        "PATH": f"{Path(sys.executable).parent}:{machine.environment['PATH']}",
        "DASK_TEMPORARY_DIRECTORY": str(tmp_path / "scratch"),
    }
    started, go = tmp_path / "started", tmp_path / "go"
    lab = Process(
        *(str(started), str(go)),
        cwd=tmp_path,
        env={"HOME": machine.environment["HOME"], **env},
        command=[sys.executable, str(Path(__file__).with_name("dask_lab.py"))],
    )
    with ended(lab):
        follow_recipe(machine, lab.said("scheduler at ").split()[-1])
        with ended(HarvestProcess(machine, env=env)) as harvest:
            before = json.loads(lab.said("results ").partition(" ")[2])
            until(started.exists, "a task on the GPU")
            (run,) = machine.status()["runs"]
            with machine.holding(0):
                until(lambda: is_gone(run["process"]["pid"]), "the worker to retire, though its task runs on")
                tell(lab)
                kept = json.loads(lab.said("kept ").partition(" ")[2])
                go.touch()
            second = int(lab.said("finished by ").split()[-1])
            harvest.said("all processes of dask-0 have ended")
            assert 0 == harvest.end()
        assert 0 == lab.popen.wait(30), lab.text

    assert {"workers": 2, "on_shelf": 0} == before
    assert {"workers": 1, "on_shelf": 20, "same": True, "held_against_it": 0} == kept
    assert second != run["process"]["pid"]


def tell(lab: Process) -> None:
    """Let it look."""
    assert lab.popen.stdin is not None
    lab.popen.stdin.write("\n")
    lab.popen.stdin.flush()
