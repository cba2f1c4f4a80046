"""`gpulse harvest` on a real GPU: the driver's own device files, contexts and `nvidia-smi`."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.cluster import Process, until

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
_WORKLOAD = Path(__file__).with_name("workload.py")
_CONFIG = """
[harvest]
interval_seconds = 0.3
[idle]
idle_seconds = 0
cooldown_seconds = 0
# The last one is nvidia-smi again, where a sandbox starts it through its loader.
ignore_programs = ["gpulse", "nvidia-smi", "ld-linux-x86-64"]
[[program]]
name = "train"
command = {command}
gpus = 0
"""
_LOOK = """
import json, sys
open("/proc/self/comm", "w").write("gpulse")
from gpulse import snapshot
frame = snapshot().frame
gpu = frame.gpus[0]
owners = {process.pid: process.identity.owner.job for process in frame.processes}
pid = gpu.processes[0].pid
print(json.dumps({"pid": pid, "job": owners[pid], "state": gpu.get("harvest_state")}))
"""


@pytest.fixture
def harvest(tmp_path: Path) -> Iterator[Process]:
    """A harvest that trains on the first GPU."""
    pytest.importorskip("torch")
    config = tmp_path / "harvest.toml"
    config.write_text(
        _CONFIG.format(command=json.dumps([sys.executable, str(_WORKLOAD), "120"])), encoding="utf-8"
    )
    process = Process("harvest", "-c", str(config), "--state-dir", str(tmp_path / "state"), cwd=tmp_path)
    yield process
    process.end()


def test_it_trains_until_somebody_opens_the_gpu(harvest: Process) -> None:
    """Neither its own opens nor `nvidia-smi` end it, anybody else's does, and it comes back."""

    harvest.said("ready")
    pid = int(harvest.said("train started").rpartition("pid ")[2].rstrip(")"))
    smi = shutil.which("nvidia-smi")
    if smi is not None:
        subprocess.run([smi], stdout=subprocess.DEVNULL, check=True)
    descriptor = os.pidfd_open(pid)
    try:
        assert not select.select([descriptor], [], [], 2.0)[0]
        with open("/dev/nvidia0", "rb"):
            assert select.select([descriptor], [], [], 5.0)[0]
    finally:
        os.close(descriptor)
    harvest.said("has opened GPU 0")
    harvest.said("all processes of train are gone")
    until(lambda: harvest.text.count("train started") == 2, "a second start")


def test_its_process_has_its_job(harvest: Process) -> None:
    """A look shows the context of a harvested process as the harvest's."""

    harvest.said("ready")
    pid = int(harvest.said("train started").rpartition("pid ")[2].rstrip(")"))
    frame = subprocess.run(
        [sys.executable, "-c", _LOOK], capture_output=True, text=True, timeout=30, check=True
    )

    assert {"pid": pid, "job": "harvest:train", "state": 2} == json.loads(frame.stdout)
