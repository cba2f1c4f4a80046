"""Frames as flat rows, one table a subject, with the catalogue's names as columns: what CSV and SQLite hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, get_args

from gpulse.export.document import gpu_values, process_document
from gpulse.model.metric import Scope, Values, names, portable
from gpulse.model.snapshot import Snapshot
from gpulse.model.text import encodable

Table = Literal["gpu", "host", "disk", "filesystem", "network", "process", "health", "finding"]
Row = dict[str, Any]
TABLES: tuple[Table, ...] = get_args(Table)

_IDENTITY: dict[Table, tuple[str, ...]] = {
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
_SCOPES: dict[Table, Scope] = {
    "gpu": "gpu",
    "host": "host",
    "disk": "disk",
    "filesystem": "filesystem",
    "network": "network",
    "process": "process",
}
TEXT = frozenset(
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


def columns(table: Table) -> list[str]:
    """The columns of a table: when and where, what it is about, then every metric of its scope."""
    metrics = names(_SCOPES[table]) if table in _SCOPES else []
    return ["time", "node", *_IDENTITY[table], *metrics]


def rows(table: Table, snapshot: Snapshot) -> list[Row]:
    """The rows that one look adds to a table; None where a value is unknown."""
    stamp: Row = {"time": snapshot.frame.time, "node": snapshot.frame.node.name}
    return [
        {
            name: encodable(value) if isinstance(value, str) else value
            for name, value in {**stamp, **row}.items()
        }
        for row in _MAKERS[table](snapshot)
    ]


def _gpus(snapshot: Snapshot) -> list[Row]:
    return [
        {
            "gpu": gpu.device.label,
            "uuid": gpu.device.uuid,
            "name": gpu.device.name,
            **gpu_values(snapshot, gpu),
        }
        for gpu in snapshot.frame.gpus
    ]


def _host(snapshot: Snapshot) -> list[Row]:
    if snapshot.frame.host is None:
        return []
    return [_merged(snapshot.frame.host.values, snapshot.rates.host)]


def _disks(snapshot: Snapshot) -> list[Row]:
    rates = snapshot.rates.disks
    return [
        {"name": disk.name, "kind": disk.kind, **_merged(disk.values, rates.get(disk.name, {}))}
        for disk in snapshot.frame.disks
    ]


def _filesystems(snapshot: Snapshot) -> list[Row]:
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


def _network(snapshot: Snapshot) -> list[Row]:
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


def _processes(snapshot: Snapshot) -> list[Row]:
    """One row for each GPU a process is on, and one for each descendant."""
    held = [(gpu.device.label, process) for gpu in snapshot.frame.gpus for process in gpu.processes or ()]
    found: list[Row] = []
    for process in snapshot.frame.processes:
        places = [(label, item) for label, item in held if item.pid == process.pid]
        found.extend({"gpu": label, **process_document(snapshot, process, item)} for label, item in places)
        if not places:
            found.append({"gpu": None, **process_document(snapshot, process)})
    return found


def _health(snapshot: Snapshot) -> list[Row]:
    return [{name: getattr(entry, name) for name in _IDENTITY["health"]} for entry in snapshot.frame.health]


def _findings(snapshot: Snapshot) -> list[Row]:
    return [
        {
            **{name: getattr(finding, name) for name in _IDENTITY["finding"]},
            "gpu": finding.label,
            "pids": " ".join(map(str, finding.pids)),
            "advice": "; ".join(advice.do for advice in finding.advice),
        }
        for finding in snapshot.findings
    ]


def _merged(values: Values, rates: Values) -> Row:
    return {name: portable(value) for name, value in {**values, **rates}.items()}


_MAKERS: dict[Table, Callable[[Snapshot], list[Row]]] = {
    "gpu": _gpus,
    "host": _host,
    "disk": _disks,
    "filesystem": _filesystems,
    "network": _network,
    "process": _processes,
    "health": _health,
    "finding": _findings,
}
