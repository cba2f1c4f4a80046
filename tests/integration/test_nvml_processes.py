from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pynvml as nv
import pytest

from gpulse.model.process import GpuProcess
from gpulse.sources.local_machine import LocalMachine
from gpulse.sources.procfs import Roots
from tests.fakes.nvml import COMPUTE, GRAPHICS, FakeNvml
from tests.integration.nvml_machine import IMPATIENT, QUICK, frames_until, machine, reading
from tests.integration.opened import open_to_all

HOLD = "import sys, time; held = open(sys.argv[1]); print('ready', flush=True); time.sleep(600)"


@contextmanager
def holder(device: Path, *prefix: str) -> Iterator[subprocess.Popen[bytes]]:
    """A real process that holds a device file open, ended afterwards."""
    child = subprocess.Popen([*prefix, sys.executable, "-c", HOLD, str(device)], stdout=subprocess.PIPE)
    assert child.stdout is not None
    try:
        child.stdout.readline()
        yield child
    finally:
        child.terminate()
        child.wait()
        child.stdout.close()


@contextmanager
def container(root: Path) -> Iterator[tuple[LocalMachine, Path]]:
    """This machine, with a /dev of its own that has one GPU's file."""
    root.chmod(0o755)
    device = root / "nvidia0"
    device.touch()
    local = LocalMachine(
        interval_seconds=0.25,
        cadence=QUICK,
        timeouts=IMPATIENT,
        watch_xids=False,
        roots=Roots(dev=str(root)),
    )
    try:
        yield local, device
    finally:
        local.close()


def test_a_process_on_a_gpu_is_read_with_its_owner(fake_nvml: FakeNvml, tmp_path: Path) -> None:
    """What the driver says of it stands with the GPU, what the kernel says with the processes."""

    with container(tmp_path) as (local, device), holder(device) as child:
        fake_nvml.add_process(0, child.pid, 5 << 30, sm=60)
        frame = frames_until(local, lambda frame: bool(frame.gpus[0].processes))

    assert (GpuProcess(child.pid, "compute", 5 << 30, 0.6),) == frame.gpus[0].processes
    assert [(child.pid, True, "root" if os.getuid() == 0 else None)] == [
        (p.pid, p.on_gpu, p.identity.owner.user if os.getuid() == 0 else None) for p in frame.processes
    ]
    assert frame.processes[0].values["host_memory_bytes"] > 1_000_000


def test_a_process_that_vanishes_between_the_driver_and_the_kernel(
    fake_nvml: FakeNvml, tmp_path: Path
) -> None:
    """The driver still lists it, the kernel does not: it is simply gone, and nothing is wrong."""

    with container(tmp_path) as (local, device):
        with holder(device) as child:
            fake_nvml.add_process(0, child.pid, 5 << 30)
            frames_until(local, lambda frame: len(frame.processes) == 1)
        frame = local.sample(time.time())

    assert [child.pid] == [process.pid for process in frame.gpus[0].processes or ()]
    assert () == frame.processes
    assert [] == [entry for entry in frame.health if entry.source == "processes"]


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to become another user")
def test_a_process_of_another_user_is_read(fake_nvml: FakeNvml, tmp_path: Path) -> None:
    """Root sees whose it is and what it uses."""

    open_to_all(tmp_path)
    nobody = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--")
    with container(tmp_path) as (local, device), holder(device, *nobody) as child:
        fake_nvml.add_process(0, child.pid, 1 << 30)
        frame = frames_until(local, lambda frame: len(frame.processes) == 1)

    assert ("nobody", 65534) == frame.processes[0].identity.owner[:2]


def test_a_pid_of_another_namespace_is_not_visible(fake_nvml: FakeNvml) -> None:
    """The driver names the host's pids; one that nobody has here is shown without what cannot be known."""

    fake_nvml.add_process(0, 1 << 22, 3 << 30)
    with machine() as local:
        frame = local.sample(time.time())

    assert (GpuProcess(1 << 22, "compute", 3 << 30, 0.0),) == frame.gpus[0].processes
    assert [(1 << 22, None, {})] == [(p.pid, p.state, p.values) for p in frame.processes]
    assert [("not_visible", f"pid {1 << 22}")] == [
        (entry.code, entry.subject) for entry in frame.health if entry.source == "processes"
    ]


def test_processes_come_with_the_most_memory_first(fake_nvml: FakeNvml) -> None:
    """Unknown memory counts as none, and a process on both lists is one process."""

    fake_nvml.add_process(0, 11, 1 << 30)
    fake_nvml.add_process(0, 12, None)
    fake_nvml.add_process(0, 13, 2 << 30, kind=COMPUTE | GRAPHICS)
    with reading() as gpus:
        readings, _ = gpus.tick(patience=1.0)

    assert [(13, "compute+graphics", 2 << 30), (11, "compute", 1 << 30), (12, "compute", None)] == [
        process[:3] for process in readings[0].processes or ()
    ]


def test_a_process_listed_twice_by_the_driver_is_one_process(fake_nvml: FakeNvml) -> None:
    """On a GPU that is split, a process in two instances is listed for each; its memory adds up."""

    fake_nvml.add_process(0, 11, 1 << 30, gpu_instance=1)
    fake_nvml.add_process(0, 11, 2 << 30, gpu_instance=2)
    with reading() as gpus:
        readings, _ = gpus.tick(patience=1.0)

    assert [(11, "compute", 3 << 30)] == [process[:3] for process in readings[0].processes or ()]


def test_the_processes_of_a_mig_instance_are_its_own(fake_nvml: FakeNvml) -> None:
    """Each instance lists who is on it; shares are not to be had there, and it says so."""

    for number, instance in enumerate((3, 5)):
        fake_nvml.add_mig(0, gpu_instance=instance)
        fake_nvml.add_process(0, 100 + number, 1 << 30, gpu_instance=instance, compute_instance=0)
    with reading() as gpus:
        readings, health = gpus.tick(patience=1.0)

    assert [[100], [101]] == [[p.pid for p in gpu.processes or ()] for gpu in readings[1:]]
    assert [("gpu 0:0", True), ("gpu 0:1", True)] == [
        (entry.subject, "sm_ratio" in entry.metrics)
        for entry in health
        if entry.subject in ("gpu 0:0", "gpu 0:1")
    ]


def test_a_graphics_list_that_fails_once_is_asked_again(fake_nvml: FakeNvml) -> None:
    """Half a list would pass for the whole, so there is none; the next one is complete."""

    fake_nvml.add_process(0, 11, 1 << 30)
    fake_nvml.add_process(0, 12, 1 << 20, kind=GRAPHICS)
    fake_nvml.fail("nvmlDeviceGetGraphicsRunningProcesses", 0, nv.NVML_ERROR_TIMEOUT, times=1)
    with reading() as gpus:
        first, health = gpus.tick(patience=1.0)
        later, _ = gpus.until(lambda readings, _: readings[0].processes is not None)

    assert first[0].processes is None
    assert [("timeout", ("gpu_memory_bytes",))] == [(e.code, e.metrics) for e in health if e.is_problem]
    assert [11, 12] == [process.pid for process in later[0].processes or ()]


def test_an_idle_gpu_has_an_empty_list_of_processes(fake_nvml: FakeNvml) -> None:
    """Nobody there is something else than not known."""

    with reading() as gpus:
        readings, _ = gpus.tick(patience=1.0)

    assert () == readings[0].processes
    assert 0 == fake_nvml.calls("nvmlDeviceGetProcessUtilization")
