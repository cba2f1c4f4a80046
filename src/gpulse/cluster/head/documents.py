"""Make the answers about nodes, GPUs, sessions and findings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from msgspec import UNSET, UnsetType

from gpulse.cluster.protocol import answers as a
from gpulse.cluster.protocol.interface import LiveNode
from gpulse.export.session.steps import steps
from gpulse.model import iso_time
from gpulse.model.device import Device
from gpulse.model.finding import SEVERITIES, Evidence, Finding
from gpulse.model.frame import Frame, GpuReading
from gpulse.model.natural import natural_key
from gpulse.model.session import Session
from gpulse.reports.interruptions import Coverage

_GIGA = 1e9


def _iso(seconds: float | None) -> str | None:
    return None if seconds is None else iso_time.iso(seconds)


def _gpu_id(node: str, device: Device) -> str:
    """`host:3:NVIDIA H200`."""
    return f"{node}:{device.label}:{device.name}"


def node_gpus(node: LiveNode) -> list[a.Gpu]:
    """Return the GPUs of a node."""
    return [
        a.Gpu(id=_gpu_id(node.name, device), name=device.name, physical_idx=device.index, uuid=device.uuid)
        for device in node.devices
    ]


def client(node: LiveNode, now: float) -> a.Client:
    """Return a connected node with its GPUs."""
    gpus = node_gpus(node)
    return a.Client(
        client_id=node.name,
        hostname=_hostname(node),
        gpu_count=len(gpus),
        gpus=gpus,
        state=node.state,
        connected=node.connected,
        elsewhere=node.elsewhere,
        last_seen=iso_time.iso(node.seen),
        silent_seconds=_silent_seconds(node, now),
        version=node.version,
        labels=dict(node.labels),
    )


def node_status(node: LiveNode, now: float) -> a.NodeStatus:
    """Return how a node is."""
    return a.NodeStatus(
        name=node.name,
        gpu_count=len(node.devices) if node.frame or node.known else None,
        gpu_models=dict(Counter(device.name for device in node.devices)),
        state=node.state,
        connected=node.connected,
        elsewhere=node.elsewhere,
        last_seen=iso_time.iso(node.seen),
        silent_seconds=_silent_seconds(node, now),
        version=node.version,
        labels=dict(node.labels),
    )


def _hostname(node: LiveNode) -> str:
    return node.name.partition("#")[0]


def _silent_seconds(node: LiveNode, now: float) -> float:
    return round(max(0.0, now - node.seen), 3)


def node_values(node: LiveNode, frame: Frame, now: float, *, bandwidth: bool, nvlink: bool) -> a.NodeValues:
    """Return the newest readings of a node.

    Args:
        node: The node.
        frame: Its newest frame.
        now: Epoch seconds.
        bandwidth: Also the PCIe traffic of its GPUs.
        nvlink: Also their NVLink traffic.
    """
    return a.NodeValues(
        hostname=_hostname(node),
        state=node.state,
        time=iso_time.iso(frame.time),
        age_seconds=round(max(0.0, now - frame.time), 3),
        gpus=[_gpu_values(node, gpu, bandwidth=bandwidth, nvlink=nvlink) for gpu in frame.gpus],
        host=frame.host.values if frame.host else None,
    )


def _gpu_values(node: LiveNode, gpu: GpuReading, *, bandwidth: bool, nvlink: bool) -> a.GpuValues:
    used, total = gpu.get("memory_used_bytes"), gpu.get("memory_total_bytes")
    busy = gpu.get("gpu_utilization_ratio")
    received, sent = gpu.get("pcie_rx_bytes_per_second"), gpu.get("pcie_tx_bytes_per_second")
    links = gpu.get("nvlink_rx_bytes_per_second"), gpu.get("nvlink_tx_bytes_per_second")
    return a.GpuValues(
        gpu_id=_gpu_id(node.name, gpu.device),
        physical_idx=gpu.device.index,
        name=gpu.device.name,
        gpu_util=None if busy is None else round(100 * busy, 3),
        gpu_memory=None if used is None or not total else round(100 * used / total, 3),
        dram_bandwidth=_giga(received, sent) if bandwidth else UNSET,
        dram_bandwidth_rx=_giga(received) if bandwidth else UNSET,
        dram_bandwidth_tx=_giga(sent) if bandwidth else UNSET,
        gpu_bandwidth=_giga(*links) if nvlink else UNSET,
        values=gpu.values,
    )


def _giga(*parts: float | None) -> float | None:
    if any(part is None for part in parts):
        return None
    return round(sum(part or 0.0 for part in parts) / _GIGA, 6)


def session(
    session: Session,
    now: float,
    *,
    output_file: str | None = None,
    export: a.ExportState | UnsetType = UNSET,
    coverage: Sequence[Coverage | None] = (),
) -> a.SessionAnswer:
    """Return the answer about a session.

    Args:
        session: The session.
        now: Epoch seconds.
        output_file: Its file, or the one that it will get.
        export: How far the file is, where there is a head that writes it.
        coverage: What is missing of each interruption; empty where that was not looked up.
    """
    end = session.end
    if end is None:
        end = session.interruptions[-1].start if session.state == "interrupted" else now
    found = coverage or [None] * len(session.interruptions)
    return a.SessionAnswer(
        name=session.name,
        session_id=session.id,
        is_active=session.is_active,
        state=session.state,
        recoverable=session.state == "interrupted",
        start_time=iso_time.iso(session.start),
        end_time=_iso(session.end),
        frame_count=steps(session.start, end, session.interval_ms),
        interval_ms=session.interval_ms,
        output_file=output_file,
        labels=dict(session.labels),
        nodes=session.nodes,
        gpus=session.gpus,
        enable_bandwidth_profiling=session.bandwidth,
        enable_nvlink_profiling=session.nvlink,
        interruptions=[
            a.SessionInterruption(
                start_time=iso_time.iso(part.start),
                end_time=_iso(part.end),
                missing=UNSET if covered is None else _missing(covered),
                pending=UNSET if covered is None else covered.pending,
            )
            for part, covered in zip(session.interruptions, found, strict=True)
        ],
        export=export,
    )


def _missing(coverage: Coverage) -> list[a.MissingFrames]:
    return [a.MissingFrames(node=one.node, seconds=one.seconds) for one in coverage.missing]


def findings(live: Iterable[LiveNode], missing: Iterable[Finding]) -> list[a.NodeFinding]:
    """Return what is wrong now on all nodes, worst first.

    Args:
        live: The nodes.
        missing: About nodes that were expected and never reported; each names its node as its cause.
    """
    found = [_finding(node.name, finding) for node in live for finding in node.findings]
    found += [_finding(finding.cause, finding) for finding in missing]
    return sorted(
        found,
        key=lambda item: (
            -SEVERITIES.index(item.severity),
            -(item.lost_ratio or 0.0),
            natural_key(str(item.node)),
            natural_key(item.label or ""),
        ),
    )


def _finding(node: str | None, finding: Finding) -> a.NodeFinding:
    return a.NodeFinding(
        node=node,
        id=finding.id,
        family=finding.family,
        severity=finding.severity,
        confidence=finding.confidence,
        summary=finding.summary,
        gpu=finding.gpu,
        label=finding.label,
        pids=finding.pids,
        lost_ratio=finding.lost_ratio,
        start=finding.start,
        end=finding.end,
        evidence=_evidence(finding.evidence),
        counter_evidence=_evidence(finding.counter_evidence),
        ruled_out=finding.ruled_out,
        advice=[a.FindingAdvice(**item._asdict()) for item in finding.advice],
        url=finding.url,
        cause=finding.cause,
    )


def _evidence(evidence: Sequence[Evidence]) -> list[a.FindingEvidence]:
    return [a.FindingEvidence(**item._asdict()) for item in evidence]
