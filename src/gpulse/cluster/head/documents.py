"""How a head describes its nodes and sessions: the fields of the profiler's API, and ours beside them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from gpulse.cluster.protocol.interface import LiveNode
from gpulse.export.session.steps import steps
from gpulse.model import iso_time
from gpulse.model.device import Device
from gpulse.model.finding import Finding
from gpulse.model.frame import GpuReading
from gpulse.model.natural import NaturalKey, natural_key
from gpulse.model.session import Session
from gpulse.reports.document import Document

_GIGA = 1e9


def iso(seconds: float | None) -> str | None:
    """Format a time as ISO 8601 in UTC; None stays None."""
    return None if seconds is None else iso_time.iso(seconds)


def gpu_id(node: str, device: Device) -> str:
    """`host:3:NVIDIA H200`."""
    return f"{node}:{device.label}:{device.name}"


def node_gpus(node: LiveNode) -> list[Document]:
    """A node's GPUs, as the profiler's API lists them."""
    return [
        {
            "id": gpu_id(node.name, device),
            "name": device.name,
            "physical_idx": device.index,
            "uuid": device.uuid,
        }
        for device in node.devices
    ]


def client(node: LiveNode, now: float) -> Document:
    """One node with its GPUs."""
    gpus = node_gpus(node)
    return {
        "client_id": node.name,
        "hostname": node.name.partition("#")[0],
        "gpu_count": len(gpus),
        "gpus": gpus,
        **_how(node, now),
    }


def _how(node: LiveNode, now: float) -> Document:
    return {
        "state": node.state,
        "connected": node.connected,
        "elsewhere": node.elsewhere,
        "last_seen": iso(node.seen),
        "silent_seconds": round(max(0.0, now - node.seen), 3),
        "version": node.version,
        "labels": dict(node.labels),
    }


def reading(node: LiveNode, gpu: GpuReading, *, bandwidth: bool, nvlink: bool) -> Document:
    """One GPU's newest values, as the profiler's API gives them, and all others under their own names."""
    used, total = gpu.get("memory_used_bytes"), gpu.get("memory_total_bytes")
    document: Document = {
        "gpu_id": gpu_id(node.name, gpu.device),
        "physical_idx": gpu.device.index,
        "name": gpu.device.name,
        "gpu_util": _percent(gpu.get("gpu_utilization_ratio")),
        "gpu_memory": None if used is None or not total else round(100 * used / total, 3),
    }
    if bandwidth:
        received, sent = gpu.get("pcie_rx_bytes_per_second"), gpu.get("pcie_tx_bytes_per_second")
        document["dram_bandwidth"] = _giga(received, sent)
        document["dram_bandwidth_rx"], document["dram_bandwidth_tx"] = _giga(received), _giga(sent)
    if nvlink:
        document["gpu_bandwidth"] = _giga(
            gpu.get("nvlink_rx_bytes_per_second"), gpu.get("nvlink_tx_bytes_per_second")
        )
    document["values"] = gpu.values
    return document


def _percent(ratio: float | None) -> float | None:
    return None if ratio is None else round(100 * ratio, 3)


def _giga(*parts: float | None) -> float | None:
    if any(part is None for part in parts):
        return None
    return round(sum(part or 0.0 for part in parts) / _GIGA, 6)


def session(session: Session, now: float) -> Document:
    """One session."""
    end = session.end
    if end is None:
        end = session.interruptions[-1].start if session.state == "interrupted" else now
    return {
        "name": session.name,
        "session_id": session.id,
        "is_active": session.is_active,
        "state": session.state,
        "recoverable": session.state == "interrupted",
        "start_time": iso(session.start),
        "end_time": iso(session.end),
        "frame_count": steps(session.start, end, session.interval_ms),
        "interval_ms": session.interval_ms,
        "output_file": session.output,
        "labels": dict(session.labels),
        "nodes": list(session.nodes),
        "gpus": list(session.gpus),
        "enable_bandwidth_profiling": session.bandwidth,
        "enable_nvlink_profiling": session.nvlink,
        "interruptions": [
            {"start_time": iso(part.start), "end_time": iso(part.end)} for part in session.interruptions
        ],
    }


def nodes(live: Iterable[LiveNode], now: float) -> list[Document]:
    """Every node in a line."""
    return [
        {
            "name": node.name,
            "gpu_count": len(node.devices) if node.frame or node.known else None,
            "gpu_models": dict(Counter(device.name for device in node.devices)),
            **_how(node, now),
        }
        for node in live
    ]


def findings(live: Iterable[LiveNode], missing: Iterable[Finding]) -> list[dict[str, Any]]:
    """What is wrong now on all nodes, worst first.

    Args:
        live: The nodes.
        missing: About nodes that were expected and never reported; each names its node as its cause.
    """
    order = {"critical": 0, "high": 1, "medium": 2, "low": 3, "info": 4}
    found = [
        {"node": node.name, **(item if isinstance(item, dict) else item.to_dict())}  # type: ignore[union-attr]
        for node in live
        for item in node.findings
    ]
    found += [{"node": item.cause, **item.to_dict()} for item in missing]
    return sorted(
        found, key=lambda item: (order.get(str(item.get("severity")), 5), -_weight(item), *_place(item))
    )


def _place(item: dict[str, Any]) -> tuple[NaturalKey, NaturalKey]:
    return natural_key(str(item["node"])), natural_key(str(item.get("label") or ""))


def _weight(item: dict[str, Any]) -> float:
    lost = item.get("lost_ratio")
    return float(lost) if isinstance(lost, int | float) else 0.0
