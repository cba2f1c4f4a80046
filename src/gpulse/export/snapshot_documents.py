"""Snapshots for other programs: the JSON document of `gpulse --json`, and flat tables for CSV and SQLite.

Metrics have their catalog names; unknown values are null.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, get_args

from gpulse.model.clock_event_reasons import active_clock_reasons
from gpulse.model.counter_rates import process_key
from gpulse.model.frame import GpuReading
from gpulse.model.metric_catalog import CATALOG, Scope, Values, metric_names, to_portable
from gpulse.model.process import GpuProcess, ProcessIdentity, ProcessReading
from gpulse.model.safe_text import replace_surrogates
from gpulse.model.snapshot import Snapshot
from gpulse.model.source_health import Health


def build_document(snapshot: Snapshot) -> dict[str, Any]:
    """Return a whole snapshot as JSON types."""
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
            "cores": [to_portable(share) for share in rates.cores],
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
        "descendants": [build_process(snapshot, p) for p in frame.processes if not p.on_gpu],
        "jobs": [{**job._asdict(), "gpus": list(job.gpus)} for job in frame.jobs],
        "findings": [finding.to_dict() for finding in snapshot.findings],
        "verdict": snapshot.verdict,
        "health": [build_health(health) for health in frame.health],
    }


def build_health(health: Health) -> dict[str, Any]:
    """Return one health entry as JSON types."""
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


def build_process(
    snapshot: Snapshot, process: ProcessReading, held: GpuProcess | None = None
) -> dict[str, Any]:
    """Return one process as JSON types, with what it holds on one GPU if `held` is given."""
    identity, owner = process.identity, process.identity.owner
    values = _values("process", process.values, snapshot.rates.processes.get(process_key(process), {}))
    values["elapsed_seconds"] = to_portable(snapshot.process(process, "elapsed_seconds"))
    if held is not None:
        values["gpu_memory_bytes"] = to_portable(held.gpu_memory_bytes)
        values["sm_ratio"] = to_portable(held.sm_ratio)
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
    """Return every metric of a GPU in the catalog with its value or None."""
    return {name: to_portable(snapshot.gpu(gpu, name)) for name in CATALOG["gpu"]}


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
        "board_part_number": device.board_part_number,
        "architecture": device.architecture,
        "compute_capability": device.compute_capability,
        "numa_node": device.numa_node,
        "cpu_affinity": device.cpu_affinity,
        **gpu_values(snapshot, gpu),
        "clocks_held_by": [reason.name for reason in active_clock_reasons(gpu)]
        if gpu.get("clocks_event_reasons") is not None
        else None,
        "read_at": gpu.read_at,
        "processes": None
        if gpu.processes is None
        else [
            build_process(snapshot, by_pid.get(held.pid) or _hidden_process(held), held)
            for held in gpu.processes
        ],
    }


def _hidden_process(held: GpuProcess) -> ProcessReading:
    return ProcessReading(ProcessIdentity(held.pid), None, {}, on_gpu=True)


def _values(scope: Scope, values: Values, rates: Values | None = None) -> dict[str, Any]:
    merged = values if not rates else {**values, **rates}
    return {name: to_portable(merged.get(name)) for name in CATALOG[scope]}


TableName = Literal["gpu", "host", "disk", "filesystem", "network", "process", "health", "finding"]
TableRow = dict[str, Any]
TABLE_NAMES: tuple[TableName, ...] = get_args(TableName)

_IDENTITY_COLUMNS: dict[TableName, tuple[str, ...]] = {
    "gpu": ("gpu", "uuid", "name"),
    "host": (),
    "disk": ("name", "kind"),
    "filesystem": ("mount_point", "device", "type", "kind"),
    "network": ("name", "kind", "up"),
    "process": (
        "gpu",
        "pid",
        "parent_pid",
        "user",
        "name",
        "command",
        "state",
        "job",
        "container",
        "start_time",
    ),
    "health": ("source", "subject", "code", "detail", "since", "hint"),
    "finding": (
        "gpu",
        "id",
        "family",
        "severity",
        "confidence",
        "summary",
        "pids",
        "lost_ratio",
        "start",
        "end",
        "advice",
        "url",
    ),
}
_SCOPES: dict[TableName, Scope] = {
    "gpu": "gpu",
    "host": "host",
    "disk": "disk",
    "filesystem": "filesystem",
    "network": "network",
    "process": "process",
}
TEXT_COLUMNS = frozenset(
    {
        "node",
        "gpu",
        "uuid",
        "name",
        "kind",
        "mount_point",
        "device",
        "type",
        "user",
        "command",
        "state",
        "job",
        "container",
        "source",
        "subject",
        "code",
        "detail",
        "hint",
        "id",
        "family",
        "severity",
        "summary",
        "pids",
        "advice",
        "url",
    }
)
"""Columns that hold text; every other one holds a number."""


def column_names(table: TableName) -> list[str]:
    """Return the columns of a table: time, node, identity of the subject, then every metric of its scope."""
    metrics = metric_names(_SCOPES[table]) if table in _SCOPES else []
    return ["time", "node", *_IDENTITY_COLUMNS[table], *metrics]


def build_rows(table: TableName, snapshot: Snapshot) -> list[TableRow]:
    """Return the rows that one snapshot adds to a table; None is an unknown value."""
    stamp: TableRow = {"time": snapshot.frame.time, "node": snapshot.frame.node.name}
    return [
        {
            name: replace_surrogates(value) if isinstance(value, str) else value
            for name, value in {**stamp, **row}.items()
        }
        for row in _ROW_BUILDERS[table](snapshot)
    ]


def _gpus(snapshot: Snapshot) -> list[TableRow]:
    return [
        {
            "gpu": gpu.device.label,
            "uuid": gpu.device.uuid,
            "name": gpu.device.name,
            **gpu_values(snapshot, gpu),
        }
        for gpu in snapshot.frame.gpus
    ]


def _host(snapshot: Snapshot) -> list[TableRow]:
    if snapshot.frame.host is None:
        return []
    return [_merged(snapshot.frame.host.values, snapshot.rates.host)]


def _disks(snapshot: Snapshot) -> list[TableRow]:
    rates = snapshot.rates.disks
    return [
        {"name": disk.name, "kind": disk.kind, **_merged(disk.values, rates.get(disk.name, {}))}
        for disk in snapshot.frame.disks
    ]


def _filesystems(snapshot: Snapshot) -> list[TableRow]:
    rates = snapshot.rates.filesystems
    return [
        {
            "mount_point": item.mount_point,
            "device": item.device,
            "type": item.type,
            "kind": item.kind,
            **_merged(item.values, rates.get(item.mount_point, {})),
        }
        for item in snapshot.frame.filesystems
    ]


def _network(snapshot: Snapshot) -> list[TableRow]:
    rates = snapshot.rates.network
    return [
        {
            "name": link.name,
            "kind": link.kind,
            "up": None if link.up is None else int(link.up),
            **_merged(link.values, rates.get(link.name, {})),
        }
        for link in snapshot.frame.network
    ]


def _processes(snapshot: Snapshot) -> list[TableRow]:
    """Return a row for each GPU that a process is on, and one for each descendant."""
    held = [(gpu.device.label, process) for gpu in snapshot.frame.gpus for process in gpu.processes or ()]
    found: list[TableRow] = []
    for process in snapshot.frame.processes:
        places = [(label, item) for label, item in held if item.pid == process.pid]
        found.extend({"gpu": label, **build_process(snapshot, process, item)} for label, item in places)
        if not places:
            found.append({"gpu": None, **build_process(snapshot, process)})
    return found


def _health(snapshot: Snapshot) -> list[TableRow]:
    return [
        {name: getattr(entry, name) for name in _IDENTITY_COLUMNS["health"]}
        for entry in snapshot.frame.health
    ]


def _findings(snapshot: Snapshot) -> list[TableRow]:
    return [
        {
            **{name: getattr(finding, name) for name in _IDENTITY_COLUMNS["finding"]},
            "gpu": finding.label,
            "pids": " ".join(map(str, finding.pids)),
            "advice": "; ".join(advice.do for advice in finding.advice),
        }
        for finding in snapshot.findings
    ]


def _merged(values: Values, rates: Values) -> TableRow:
    return {name: to_portable(value) for name, value in {**values, **rates}.items()}


_ROW_BUILDERS: dict[TableName, Callable[[Snapshot], list[TableRow]]] = {
    "gpu": _gpus,
    "host": _host,
    "disk": _disks,
    "filesystem": _filesystems,
    "network": _network,
    "process": _processes,
    "health": _health,
    "finding": _findings,
}
