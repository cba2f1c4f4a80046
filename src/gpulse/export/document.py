"""The JSON document that `gpulse --json` prints: catalogue names, null for what is unknown."""

from __future__ import annotations

from typing import Any

from gpulse.model.clocks import reasons
from gpulse.model.frame import GpuReading
from gpulse.model.health import Health
from gpulse.model.metric import CATALOGUE, Scope, Values, portable
from gpulse.model.process import GpuProcess, ProcessIdentity, ProcessReading
from gpulse.model.rates import key
from gpulse.model.snapshot import Snapshot


def document(snapshot: Snapshot) -> dict[str, Any]:
    """The whole look as JSON types."""
    frame, rates = snapshot.frame, snapshot.rates
    by_pid = {process.pid: process for process in frame.processes}
    return {
        "time": frame.time,
        "node": frame.node.name,
        "driver": frame.node.driver,
        "cuda": frame.node.cuda,
        "rates_interval_seconds": rates.interval_seconds or None,
        "gpus": [_gpu(snapshot, gpu, by_pid) for gpu in frame.gpus],
        "host": None
        if frame.host is None
        else {
            **_values("host", frame.host.values, rates.host),
            "cores": [portable(share) for share in rates.cores],
            "kernel": frame.node.kernel,
            "cpu_model": frame.node.cpu_model,
        },
        "disks": [
            {
                "name": disk.name,
                "kind": disk.kind,
                "model": disk.model,
                **_values("disk", disk.values, rates.disks.get(disk.name, {})),
            }
            for disk in frame.disks
        ],
        "filesystems": [
            {
                "mount_point": item.mount_point,
                "device": item.device,
                "type": item.type,
                "disk": item.disk,
                "kind": item.kind,
                **_values("filesystem", item.values, rates.filesystems.get(item.mount_point, {})),
            }
            for item in frame.filesystems
        ],
        "network": [
            {
                "name": link.name,
                "kind": link.kind,
                "up": link.up,
                **_values("network", link.values, rates.network.get(link.name, {})),
            }
            for link in frame.network
        ],
        "cgroups": [
            {"path": group.path, **_values("cgroup", group.values, rates.cgroups.get(group.path, {}))}
            for group in frame.cgroups
        ],
        "descendants": [process_document(snapshot, p) for p in frame.processes if not p.on_gpu],
        "jobs": [{**job._asdict(), "gpus": list(job.gpus)} for job in frame.jobs],
        "findings": [finding.to_dict() for finding in snapshot.findings],
        "verdict": snapshot.verdict,
        "health": [health_document(health) for health in frame.health],
    }


def health_document(health: Health) -> dict[str, Any]:
    """One health entry as JSON types."""
    return {
        "source": health.source,
        "subject": health.subject,
        "code": health.code,
        "problem": health.is_problem,
        "detail": health.detail,
        "hint": health.hint,
        "since": health.since,
        "metrics": list(health.metrics),
    }


def process_document(
    snapshot: Snapshot, process: ProcessReading, held: GpuProcess | None = None
) -> dict[str, Any]:
    """One process as JSON types, with what it holds on one GPU if it does."""
    identity, owner = process.identity, process.identity.owner
    values = _values("process", process.values, snapshot.rates.processes.get(key(process), {}))
    values["elapsed_seconds"] = portable(snapshot.process(process, "elapsed_seconds"))
    if held is not None:
        values["gpu_memory_bytes"] = portable(held.gpu_memory_bytes)
        values["sm_ratio"] = portable(held.sm_ratio)
    return {
        "pid": identity.pid,
        "parent_pid": identity.parent_pid,
        "user": owner.user,
        "name": identity.name,
        "command": " ".join(identity.command) if identity.command else None,
        "kind": None if held is None else held.kind,
        "state": process.state,
        "start_time": identity.start_time,
        "job": owner.job,
        "container": owner.container,
        "pod": owner.pod,
        "cgroup": identity.cgroup,
        **values,
    }


def gpu_values(snapshot: Snapshot, gpu: GpuReading) -> dict[str, Any]:
    """Every catalogue name of a GPU with its value or None."""
    return {name: portable(snapshot.gpu(gpu, name)) for name in CATALOGUE["gpu"]}


def _gpu(snapshot: Snapshot, gpu: GpuReading, by_pid: dict[int, ProcessReading]) -> dict[str, Any]:
    device = gpu.device
    return {
        "index": device.index,
        "uuid": device.uuid,
        "name": device.name,
        "mig_index": device.mig_index,
        "parent_uuid": device.parent_uuid,
        "bus_id": device.bus_id,
        "minor_number": device.minor_number,
        "serial": device.serial,
        "vbios": device.vbios,
        "architecture": device.architecture,
        "compute_capability": device.compute_capability,
        "numa_node": device.numa_node,
        **gpu_values(snapshot, gpu),
        "clocks_held_by": [reason.name for reason in reasons(gpu)]
        if gpu.get("clocks_event_reasons") is not None
        else None,
        "read_at": gpu.read_at,
        "processes": None
        if gpu.processes is None
        else [
            process_document(snapshot, by_pid.get(held.pid) or _unseen(held), held) for held in gpu.processes
        ],
    }


def _unseen(held: GpuProcess) -> ProcessReading:
    return ProcessReading(ProcessIdentity(held.pid), None, {}, on_gpu=True)


def _values(scope: Scope, values: Values, rates: Values | None = None) -> dict[str, Any]:
    merged = values if not rates else {**values, **rates}
    return {name: portable(merged.get(name)) for name in CATALOGUE[scope]}
