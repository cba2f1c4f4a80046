"""Frames made by hand, for tests of what is made of them."""

from __future__ import annotations

from typing import Any

from gpulse.model.device import Device, Node
from gpulse.model.frame import Frame, GpuReading
from gpulse.model.metric_catalog import Values
from gpulse.model.process import GpuProcess, Owner, ProcessIdentity, ProcessReading
from gpulse.model.snapshot import Snapshot

GIB = 1024**3
NOON = 1_700_049_600.0
"""2023-11-15 12:00:00 UTC."""
READINGS: Values = {
    "memory_total_bytes": 80 * GIB,
    "memory_used_bytes": 8 * GIB,
    "gpu_utilization_ratio": 0.5,
    "temperature_celsius": 40,
    "power_watts": 300.4,
    "power_limit_watts": 700,
}


def gpu(
    index: int = 0,
    readings: Values | None = None,
    processes: tuple[GpuProcess, ...] | None = (),
    *,
    name: str = "NVIDIA H200",
    mig: int | None = None,
) -> GpuReading:
    """A GPU with the usual readings and the given ones, or a MIG instance."""
    device = Device(index, f"GPU-{index:04}", name)
    if mig is not None:
        device = device._replace(uuid=f"MIG-{index:04}-{mig}", mig_index=mig, parent_uuid=device.uuid)
    return GpuReading(device, {**READINGS, **(readings or {})}, processes)


def process(
    pid: int,
    *command: str,
    user: str | None = "ada",
    name: str | None = None,
    parent: int = 1,
    on_gpu: bool = True,
    values: Values | None = None,
) -> ProcessReading:
    """A running process."""
    words = command or ("python3", "train.py")
    identity = ProcessIdentity(pid, parent, NOON - 90, name or words[0], words, Owner(user))
    return ProcessReading(identity, "R", values or {}, on_gpu=on_gpu)


def frame(*gpus: GpuReading, **parts: Any) -> Frame:
    """One node at noon."""
    whole = Frame(NOON, 1000.0, Node("node1", "580.1", "13.0"), gpus)
    return whole._replace(**parts)


def snapshot(*gpus: GpuReading, **parts: Any) -> Snapshot:
    """A look at it, without rates."""
    return Snapshot.of(None, frame(*gpus, **parts))
