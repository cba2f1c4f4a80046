"""A harvest on this machine, seen in its frames."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from gpulse.model.harvest import HarvestGpu, HarvestStatus, to_document
from gpulse.sources.harvest import status_path
from gpulse.sources.machine import LocalMachine
from gpulse.sources.procfs import Roots
from gpulse.sources.procpid import parse_pid_stat
from tests.fakes.nvml import FakeNvml
from tests.integration.nvml_machine import IMPATIENT, QUICK, frames_until

HOLD = "import sys; held = open(sys.argv[1]); print('ready', flush=True); sys.stdin.read()"


def test_frames_tell_harvested_time_apart(fake_nvml: FakeNvml, tmp_path: Path) -> None:
    """The GPU has what the harvest says of it, its program's process a job of its own; the other GPU has nothing."""
    fake_nvml.add(1)
    (tmp_path / "shm").mkdir()
    (tmp_path / "nvidia0").touch()
    roots = Roots(dev=str(tmp_path))
    local = LocalMachine(cadence=QUICK, patience=IMPATIENT, watch_xids=False, roots=roots)
    child = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "nvidia0")],
        env={**os.environ, "GPULSE_HARVEST_PROGRAM": "fold it"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert child.stdout is not None
        child.stdout.readline()
        fake_nvml.add_process(0, child.pid, 5 << 30)
        before = frames_until(local, lambda frame: bool(frame.processes))
        publish(roots, before.gpus[0].device.uuid)

        frame = frames_until(local, lambda frame: "harvest_state" in frame.gpus[0].values)
    finally:
        local.close()
        child.communicate()

    assert {"harvest_state": 2, "harvested_seconds_total": 90.5, "harvest_preemptions_total": 4} == {
        name: value for name, value in frame.gpus[0].values.items() if name.startswith("harvest")
    }
    assert not [name for name in frame.gpus[1].values if name.startswith("harvest")]
    assert not [name for name in before.gpus[0].values if name.startswith("harvest")]
    assert ["harvest:fold_it"] == [process.identity.owner.job for process in frame.processes]


def publish(roots: Roots, uuid: str) -> None:
    """Say what a harvest says that this very process is."""
    stat = parse_pid_stat(Path("/proc/self/stat").read_bytes())
    assert stat is not None
    gpu = HarvestGpu(0, uuid, "harvested", time.time(), "", "fold it", 90.5, 4)
    status = HarvestStatus(
        time.time(), os.getpid(), stat.start_ticks, os.getuid(), "me", "harvest.toml", 10.0, gpus=(gpu,)
    )
    path = Path(status_path(roots, os.getuid()))
    path.write_text(json.dumps(to_document(status)))
    path.chmod(0o644)
