"""Labels of Prometheus series, the same for scrapes and for time-series databases.

Short-lived subjects (processes, cgroups, interfaces and mounts of containers) never become series: each would stay in
the index of a time-series database for good.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpulse.model.device import Device, Node
from gpulse.model.metric_catalog import Scope

EXPOSED_SCOPES: tuple[Scope, ...] = ("gpu", "host", "disk", "filesystem", "network")
"""Scopes whose readings become series."""
MAX_EXPOSED_SUBJECTS = 512
"""Number of GPUs, disks, file systems or links of one node in a scrape, or sent per day; others get no series."""
NODE_INFO, GPU_INFO = "gpulse_node_info", "gpulse_gpu_info"
"""Series with the value 1 whose labels describe a node and a GPU."""
_PERMANENT_LINK_KINDS = frozenset({"ethernet", "infiniband"})
_EPHEMERAL_MOUNTS = (
    "/var/lib/kubelet/",
    "/var/lib/docker/",
    "/var/lib/containers/",
    "/run/",
    "/tmp/",  # noqa: S108  a mount point, not a file
    "/var/tmp/",  # noqa: S108
)
"""Jobs and pods mount short-lived file systems below these."""


def is_exposed(scope: Scope, subject: Mapping[str, Any]) -> bool:
    """Whether a subject of a layout gets series."""
    if scope == "network":
        return subject.get("kind") in _PERMANENT_LINK_KINDS
    if scope == "filesystem":
        return not str(subject.get("mount_point", "")).startswith(_EPHEMERAL_MOUNTS)
    return scope in EXPOSED_SCOPES


def build_series_labels(scope: Scope, node: str, subject: Mapping[str, Any]) -> dict[str, str]:
    """Return the labels of the series of a layout's subject."""
    labels = {"node": node}
    if scope == "gpu":
        index, mig = subject.get("index"), subject.get("mig_index")
        labels["gpu"] = f"{index}" if mig is None else f"{index}:{mig}"
        labels["uuid"] = str(subject.get("uuid", ""))
        labels["name"] = str(subject.get("name", ""))
    elif scope == "disk":
        labels["disk"] = str(subject.get("name", ""))
    elif scope == "filesystem":
        labels["mount_point"] = str(subject.get("mount_point", ""))
        labels["device"] = str(subject.get("device", ""))
        labels["type"] = str(subject.get("type", ""))
    elif scope == "network":
        labels["interface"] = str(subject.get("name", ""))
    return labels


_SUBJECT_LABELS: dict[Scope, str] = {
    "gpu": "uuid",
    "disk": "disk",
    "filesystem": "mount_point",
    "network": "interface",
}


def subject_label_name(scope: Scope) -> str | None:
    """Return the name of the label that identifies the subject of a series within its node; None for a host."""
    return _SUBJECT_LABELS.get(scope)


def node_info_labels(node: Node, *, host: str, machine: str, version: str) -> dict[str, str]:
    """Return the labels of `gpulse_node_info`."""
    return {
        "node": node.name,
        "host": host,
        "machine": machine,
        "version": version,
        **_texts(node._asdict(), leave_out=("name", "numa_cpus", "ticks_per_second")),
    }


def gpu_info_labels(node: str, device: Device) -> dict[str, str]:
    """Return the labels of `gpulse_gpu_info`."""
    return {"node": node, "gpu": device.label, **_texts(device._asdict(), leave_out=_NOT_LABELS)}


def device_from_info_labels(labels: Mapping[str, str]) -> Device | None:
    """Return the GPU of the labels of `gpulse_gpu_info`; None when they do not describe one."""
    index = _number(labels.get("gpu", "").partition(":")[0])
    uuid = labels.get("uuid")
    if index is None or not uuid:
        return None
    numbers = {name: _number(labels.get(name)) for name in _NUMBER_FIELDS}
    texts = {name: labels.get(name) or None for name in _TEXT_FIELDS}
    return Device(
        index,
        uuid,
        labels.get("name", ""),
        has_gpm=labels.get("has_gpm") == "true",
        **numbers,  # type: ignore[arg-type]
        **texts,  # type: ignore[arg-type]
    )


def node_facts_from_info_labels(labels: Mapping[str, str]) -> dict[str, str]:
    """Return the fields of `Node`, without its name, from the labels of `gpulse_node_info`."""
    return {name: labels[name] for name in ("driver", "cuda", "kernel", "cpu_model") if labels.get(name)}


_NOT_LABELS = (
    "index",
    "facts",
    "board_part_number",
    "cpu_affinity",
    "switch_links",
    "paths",
    "adapter_paths",
)
"""Fields of a device that its metadata has, but not its labels."""
_NUMBER_FIELDS = ("minor_number", "numa_node", "mig_index", "gpu_instance", "compute_instance")
_TEXT_FIELDS = ("bus_id", "serial", "vbios", "architecture", "compute_capability", "parent_uuid")


def _texts(fields: Mapping[str, Any], *, leave_out: tuple[str, ...]) -> dict[str, str]:
    """Return fields as labels, without unknown ones."""
    known = {name: value for name, value in fields.items() if value is not None and name not in leave_out}
    return {
        name: ("true" if value else "false") if isinstance(value, bool) else str(value)
        for name, value in known.items()
    }


def _number(text: str | None) -> int | None:
    return int(text) if text and text.isascii() and text.isdigit() else None
