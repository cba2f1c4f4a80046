"""The details of a node for the live stream: what changes now and then, and not with every frame."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from gpulse.cluster.protocol.interface import LiveNode
from gpulse.model.finding import Finding
from gpulse.model.frame import Frame, GpuReading
from gpulse.model.metric import Value
from gpulse.model.process import GpuProcess, ProcessIdentity

Details = dict[str, Any]

_FACTS = ("driver", "cuda", "kernel", "cpu_model")
_DISK = ("read_bytes_per_second", "written_bytes_per_second", "busy_ratio")
_FILESYSTEM = ("size_bytes", "used_bytes", "available_bytes")
_NETWORK = ("rx_bytes_per_second", "tx_bytes_per_second", "link_bits_per_second")
_PROCESS = ("cpu_percent", "host_memory_bytes")
_FINDING = ("id", "cause", "family", "severity", "gpu", "label", "pids", "summary", "lost_ratio", "start")
_MOST_PROCESSES = 100
"""Of one GPU: more are no table any more."""


def describe(node: LiveNode) -> Details:
    """Everything of a node but the readings that every frame has."""
    frame = node.frame
    return {
        "version": node.version,
        "labels": dict(node.labels),
        "facts": {name: getattr(frame.node, name) for name in _FACTS} if frame else {},
        "disks": [
            {"name": disk.name, "kind": disk.kind, "model": disk.model, **_some(disk.values, _DISK)}
            for disk in (frame.disks if frame else ())
        ],
        "filesystems": [
            {
                "mount_point": mounted.mount_point,
                "device": mounted.device,
                "type": mounted.type,
                "disk": mounted.disk,
                "kind": mounted.kind,
                **_some(mounted.values, _FILESYSTEM),
            }
            for mounted in (frame.filesystems if frame else ())
        ],
        "network": [
            {"name": link.name, "kind": link.kind, "up": link.up, **_some(link.values, _NETWORK)}
            for link in (frame.network if frame else ())
        ],
        "processes": _processes(node, frame) if frame else [],
        "findings": [_finding(item) for item in node.findings],
        "health": [entry._asdict() for entry in (frame.health if frame else ()) if entry.is_problem],
    }


def _processes(node: LiveNode, frame: Frame) -> list[list[Details] | None]:
    """By GPU who is on it; None where that is not known."""
    known = {reading.pid: reading for reading in frame.processes}
    identities = {**{pid: reading.identity for pid, reading in known.items()}, **node.processes}

    def of(gpu: GpuReading) -> list[Details] | None:
        if gpu.processes is None:
            return None
        return [
            {
                **_held(process),
                **_identity(identities.get(process.pid)),
                **_some(known[process.pid].values if process.pid in known else {}, _PROCESS),
            }
            for process in gpu.processes[:_MOST_PROCESSES]
        ]

    return [of(gpu) for gpu in frame.gpus]


def _held(process: GpuProcess) -> Details:
    return {
        "pid": process.pid,
        "kind": process.kind,
        "gpu_memory_bytes": process.gpu_memory_bytes,
        **_some({} if process.sm_ratio is None else {"sm_ratio": process.sm_ratio}, ("sm_ratio",)),
    }


def _identity(identity: ProcessIdentity | None) -> Details:
    known = identity or ProcessIdentity(0)
    return {
        "user": known.owner.user,
        "uid": known.owner.uid,
        "job": known.owner.job,
        "container": known.owner.container,
        "pod": known.owner.pod,
        "name": known.name,
        "command": list(known.command),
        "start_time": known.start_time,
    }


def _finding(finding: Finding) -> Details:
    return {name: getattr(finding, name) for name in _FINDING}


def _some(values: Mapping[str, Value], names: Sequence[str]) -> dict[str, Value | None]:
    found = {name: values.get(name) for name in names}
    return {name: value if value is None or math.isfinite(value) else None for name, value in found.items()}
