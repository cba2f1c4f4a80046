"""A harvest on this machine, seen in its frames."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from gpulse.model.harvest_status import (
    HarvestGpu,
    HarvestProcess,
    HarvestRun,
    HarvestStatus,
    status_to_document,
)
from gpulse.sources.harvest_status import status_path
from gpulse.sources.local_machine import LocalMachine
from gpulse.sources.procfs import Roots, parse_pid_stat
from tests.fakes.nvml import FakeNvml
from tests.integration.nvml_machine import IMPATIENT, QUICK, frames_until

HOLD = "import sys; held = open(sys.argv[1]); print('ready', flush=True); sys.stdin.read()"


def test_frames_tell_harvested_time_apart(fake_nvml: FakeNvml, tmp_path: Path) -> None:
    """The GPU has what the harvest says of it, its program's process a job of its own; the other GPU has nothing.

    What a process calls itself in its environment counts neither before nor after.
    """
    fake_nvml.add(1)
    (tmp_path / "shm").mkdir()
    (tmp_path / "nvidia0").touch()
    # Without control groups: beside those of a job, which other tests create, claims of processes are not believed.
    roots = Roots(dev=str(tmp_path), sys=str(tmp_path / "sys"))
    local = LocalMachine(cadence=QUICK, timeouts=IMPATIENT, watch_xids=False, roots=roots)
    child = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "nvidia0")],
        env={**os.environ, "GPULSE_HARVEST_PROGRAM": "mine", "SLURM_JOB_ID": "4711"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert child.stdout is not None
        child.stdout.readline()
        fake_nvml.add_process(0, child.pid, 5 << 30)
        before = frames_until(local, lambda frame: bool(frame.processes))
        publish(roots, before.gpus[0].device.uuid, child.pid)

        frame = frames_until(local, lambda frame: "harvest_state" in frame.gpus[0].values)
    finally:
        local.close()
        child.communicate()

    assert {"harvest_state": 2, "harvested_seconds_total": 90.5, "harvest_preemptions_total": 4} == {
        name: value for name, value in frame.gpus[0].values.items() if name.startswith("harvest")
    }
    assert not [name for name in frame.gpus[1].values if name.startswith("harvest")]
    assert not [name for name in before.gpus[0].values if name.startswith("harvest")]
    assert [["slurm:4711"], ["harvest:fold%20it"]] == [
        [process.identity.owner.job for process in one.processes] for one in (before, frame)
    ]


def process(pid: int) -> HarvestProcess:
    """A process and its start."""
    stat = parse_pid_stat(Path(f"/proc/{pid}/stat").read_bytes())
    assert stat is not None
    return HarvestProcess(pid, stat.start_ticks)


def publish(roots: Roots, uuid: str, program: int) -> None:
    """Say what a harvest says that this very process is and that runs this program."""
    run = HarvestRun("1", "fold it", (0,), time.time(), "running", None, process(program))
    gpu = HarvestGpu(0, uuid, "harvested", time.time(), "", "fold it", 90.5, 4)
    status = HarvestStatus(
        time.time(), *process(os.getpid()), os.getuid(), "me", "harvest.toml", 10.0, gpus=(gpu,), runs=(run,)
    )
    path = Path(status_path(roots, os.getuid(), "0" * 32))
    path.write_text(json.dumps(status_to_document(status)))
    path.chmod(0o644)
