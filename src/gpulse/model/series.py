"""How readings are called outside: the names and labels of series, spelled once for scrapes and for engines.

What comes and goes without end (processes, control groups, interfaces and mounts of containers) is never a series: each
would stay in an engine's index for good.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpulse.model.device import Device, Node
from gpulse.model.metric import Scope

PREFIX = "gpulse_"
EXPOSED: tuple[Scope, ...] = ("gpu", "host", "disk", "filesystem", "network")
"""The scopes whose readings are series."""
MOST_SUBJECTS = 512
"""So many GPUs, disks, file systems or links of one node are in a scrape, or sent in a day; others get no series."""
NODE_INFO, GPU_INFO = "gpulse_node_info", "gpulse_gpu_info"
"""Series of the value 1 whose labels say what a node and a GPU are."""
_LASTING_LINKS = frozenset({"ethernet", "infiniband"})
_PASSING_MOUNTS = (
    "/var/lib/kubelet/",
    "/var/lib/docker/",
    "/var/lib/containers/",
    "/run/",
    "/tmp/",  # noqa: S108  a place, not a file of ours
    "/var/tmp/",  # noqa: S108
)
"""Below these, jobs and pods mount what goes with them."""


def is_exposed(scope: Scope, subject: Mapping[str, Any]) -> bool:
    """Whether a subject, described as in a layout, gets series."""
    if scope == "network":
        return subject.get("kind") in _LASTING_LINKS
    if scope == "filesystem":
        return not str(subject.get("mount_point", "")).startswith(_PASSING_MOUNTS)
    return scope in EXPOSED


def labels_of(scope: Scope, node: str, subject: Mapping[str, Any]) -> dict[str, str]:
    """The labels of the series of a subject, described as in a layout: of a GPU the fields of `Device`, and so on."""
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


def subject_label(scope: Scope) -> str | None:
    """The label that names the subject of a series within its node, as stores name it; None for a host."""
    return _SUBJECT_LABELS.get(scope)


def node_info(node: Node, *, host: str, machine: str, version: str) -> dict[str, str]:
    """The labels of `gpulse_node_info`: what is known of a node, as text."""
    return {
        "node": node.name,
        "host": host,
        "machine": machine,
        "version": version,
        **_texts(node._asdict(), leave_out=("name", "numa_cpus", "ticks_per_second")),
    }


def gpu_info(node: str, device: Device) -> dict[str, str]:
    """The labels of `gpulse_gpu_info`: what is known of a GPU, as text."""
    return {"node": node, "gpu": device.label, **_texts(device._asdict(), leave_out=("index", "facts"))}


def device_of_info(labels: Mapping[str, str]) -> Device | None:
    """The GPU that the labels of `gpulse_gpu_info` speak of, None when they speak of none."""
    index = _number(labels.get("gpu", "").partition(":")[0])
    uuid = labels.get("uuid")
    if index is None or not uuid:
        return None
    numbers = {name: _number(labels.get(name)) for name in _NUMBERS}
    texts = {name: labels.get(name) or None for name in _WORDS}
    return Device(
        index,
        uuid,
        labels.get("name", ""),
        has_gpm=labels.get("has_gpm") == "true",
        **numbers,  # type: ignore[arg-type]
        **texts,  # type: ignore[arg-type]
    )


def facts_of_info(labels: Mapping[str, str]) -> dict[str, str]:
    """The fields of `Node`, its name aside, that the labels of `gpulse_node_info` tell."""
    return {name: labels[name] for name in ("driver", "cuda", "kernel", "cpu_model") if labels.get(name)}


_NUMBERS = ("minor_number", "numa_node", "mig_index", "gpu_instance", "compute_instance")
_WORDS = ("bus_id", "serial", "vbios", "architecture", "compute_capability", "parent_uuid")


def _texts(fields: Mapping[str, Any], *, leave_out: tuple[str, ...]) -> dict[str, str]:
    """Fields as labels; what is unknown has none."""
    known = {name: value for name, value in fields.items() if value is not None and name not in leave_out}
    return {
        name: ("true" if value else "false") if isinstance(value, bool) else str(value)
        for name, value in known.items()
    }


def _number(text: str | None) -> int | None:
    return int(text) if text and text.isascii() and text.isdigit() else None
