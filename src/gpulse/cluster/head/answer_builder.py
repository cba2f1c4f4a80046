"""Build the answers about nodes, GPUs, sessions and findings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from itertools import combinations

from msgspec import UNSET, UnsetType

from gpulse.cluster.head.active_findings import ActiveFinding
from gpulse.cluster.protocol import answers as a
from gpulse.cluster.protocol.head_interface import LiveNode
from gpulse.export.session_file.frame_grid import count_steps
from gpulse.model import time_text
from gpulse.model.device import Device, Node
from gpulse.model.finding import Evidence
from gpulse.model.frame import Frame, GpuReading
from gpulse.model.gpu_state import (
    GPU_STATES,
    AssessedGpu,
    GpuState,
    ProcessOnGpu,
    assess_gpus,
    gpu_activity,
)
from gpulse.model.safe_text import natural_key, plain
from gpulse.model.session import Session
from gpulse.reports.event_report import InterruptionCoverage

_GIGA = 1e9
_MAX_TOPOLOGY_GPUS = 64
"""GPUs of a node whose connections are shown; the number of pairs grows with the square."""
_MAX_HOLDERS = 20
"""Processes of a GPU in an answer about the whole cluster; the largest."""
_MAX_COMMAND_CHARS = 200


def _iso(seconds: float | None) -> str | None:
    return None if seconds is None else time_text.format_iso(seconds)


def _gpu_id(node: str, device: Device) -> str:
    """`host:3:NVIDIA H200`."""
    return f"{node}:{device.label}:{device.name}"


def build_node_gpus(node: LiveNode) -> list[a.Gpu]:
    """Return the GPUs of a node."""
    return [
        a.Gpu(id=_gpu_id(node.name, device), name=device.name, physical_idx=device.index, uuid=device.uuid)
        for device in node.devices
    ]


def build_client(node: LiveNode, now: float) -> a.Client:
    """Return a connected node with its GPUs."""
    gpus = build_node_gpus(node)
    return a.Client(
        client_id=node.name,
        hostname=_hostname(node),
        gpu_count=len(gpus),
        gpus=gpus,
        state=node.state,
        connected=node.connected,
        at_other_head=node.at_other_head,
        last_seen=time_text.format_iso(node.seen),
        silent_seconds=_silent_seconds(node, now),
        version=node.version,
        labels=dict(node.labels),
    )


def build_hardware(node: LiveNode) -> a.NodeHardware:
    """Return the hardware of a node, as its agent last reported it."""
    facts = node.node or Node(node.name)
    gpus = [device for device in node.devices if device.parent_uuid is None][:_MAX_TOPOLOGY_GPUS]
    return a.NodeHardware(
        name=node.name,
        driver=facts.driver,
        cuda=facts.cuda,
        kernel=facts.kernel,
        cpu_model=facts.cpu_model,
        numa_cpus=facts.numa_cpus,
        gpus=[_gpu_hardware(device) for device in node.devices],
        adapters=sorted({path.to for gpu in gpus for path in gpu.adapter_paths}, key=natural_key),
        paths=[
            *(_gpu_path(one, other) for one, other in combinations(gpus, 2)),
            *(
                a.HardwarePath(between=(gpu.uuid, path.to), pcie=path.pcie, nvlinks=None, switched=False)
                for gpu in gpus
                for path in gpu.adapter_paths
            ),
        ],
    )


def _gpu_hardware(device: Device) -> a.GpuHardware:
    return a.GpuHardware(
        id=device.label,
        uuid=device.uuid,
        name=device.name,
        bus_id=device.bus_id,
        serial=device.serial,
        vbios=device.vbios,
        board_part_number=device.board_part_number,
        architecture=device.architecture,
        compute_capability=device.compute_capability,
        numa_node=device.numa_node,
        cpu_affinity=device.cpu_affinity,
        switch_links=device.switch_links,
        facts=device.facts,
    )


def _gpu_path(one: Device, other: Device) -> a.HardwarePath:
    """Return the path between two GPUs; what only one of them reports holds for both."""
    known = [path for gpu, peer in ((one, other), (other, one)) for path in gpu.paths if path.to == peer.uuid]
    direct = next((path.nvlinks for path in known if path.nvlinks is not None), None)
    # All GPUs of a node are on the same switches.
    switched = min(one.switch_links or 0, other.switch_links or 0)
    return a.HardwarePath(
        between=(one.uuid, other.uuid),
        pcie=next((path.pcie for path in known if path.pcie is not None), None),
        nvlinks=direct or switched or direct,
        switched=not direct and switched > 0,
    )


def build_node_status(node: LiveNode, now: float) -> a.NodeStatus:
    """Return the status of a node."""
    return a.NodeStatus(
        name=node.name,
        gpu_count=len(node.devices) if node.frame or node.last_devices else None,
        gpu_models=dict(Counter(device.name for device in node.devices)),
        state=node.state,
        connected=node.connected,
        at_other_head=node.at_other_head,
        last_seen=time_text.format_iso(node.seen),
        silent_seconds=_silent_seconds(node, now),
        version=node.version,
        labels=dict(node.labels),
    )


def _hostname(node: LiveNode) -> str:
    return node.name.partition("#")[0]


def _silent_seconds(node: LiveNode, now: float) -> float:
    return round(max(0.0, now - node.seen), 3)


def build_node_values(
    node: LiveNode, frame: Frame, now: float, *, bandwidth: bool, nvlink: bool
) -> a.NodeValues:
    """Return the newest readings of a node.

    Args:
        node: The node.
        frame: Its newest frame.
        now: Epoch seconds.
        bandwidth: Include the PCIe traffic of its GPUs.
        nvlink: Include their NVLink traffic.
    """
    return a.NodeValues(
        hostname=_hostname(node),
        state=node.state,
        time=time_text.format_iso(frame.time),
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
        dram_bandwidth=_to_giga(received, sent) if bandwidth else UNSET,
        dram_bandwidth_rx=_to_giga(received) if bandwidth else UNSET,
        dram_bandwidth_tx=_to_giga(sent) if bandwidth else UNSET,
        gpu_bandwidth=_to_giga(*links) if nvlink else UNSET,
        values=gpu.values,
    )


def assess_node(node: LiveNode) -> list[AssessedGpu]:
    """Return the state of each GPU of a node by its newest readings; empty while there is no frame of it."""
    return [] if node.frame is None else assess_gpus(node.frame, node.processes, node.findings)


def build_node_occupancy(
    node: LiveNode, uses: Sequence[AssessedGpu], recently_active: Collection[str] = ()
) -> a.NodeOccupancy:
    """Return what the GPUs of a node do, and who holds them.

    Args:
        node: The node.
        uses: Its GPUs, as `assess_node` returns them.
        recently_active: UUIDs of GPUs that are held and were active within the last seconds: they count as busy.
    """
    if node.frame is None:
        gpus = [_gpu_without_frame(device, node) for device in node.devices]
    else:
        gpus = [
            _gpu_occupancy(
                use._replace(state="busy")
                if use.state == "idle" and use.reading.device.uuid in recently_active
                else use,
                node,
            )
            for use in uses
        ]
    return a.NodeOccupancy(
        node=node.name,
        state=node.state,
        connected=node.connected or node.at_other_head,
        seen=round(node.seen, 3),
        time=None if node.frame is None else node.frame.time,
        gpus=gpus,
    )


def build_cluster_occupancy(
    nodes: Sequence[a.NodeOccupancy], missing: Sequence[str], now: float
) -> a.ClusterOccupancy:
    """Return what the GPUs of all nodes do, with the number of GPUs in each state."""
    counts = Counter[GpuState](gpu.state for node in nodes for gpu in node.gpus)
    return a.ClusterOccupancy(
        time=now,
        counts={state: counts[state] for state in GPU_STATES},
        nodes=nodes,
        missing_nodes=missing,
    )


def find_free_gpus(live: Iterable[LiveNode]) -> dict[str, list[str]]:
    """Return the labels of free GPUs by node."""
    found = {
        node.name: [use.reading.device.label for use in assess_node(node) if use.state == "free"]
        for node in live
        if node.state != "lost"
    }
    return {name: labels for name, labels in found.items() if labels}


def _gpu_occupancy(use: AssessedGpu, node: LiveNode) -> a.GpuOccupancy:
    gpu = use.reading
    return a.GpuOccupancy(
        label=gpu.device.label,
        uuid=gpu.device.uuid,
        name=gpu.device.name,
        state="lost" if node.state == "lost" else use.state,
        utilization_ratio=gpu_activity(gpu),
        memory_used_bytes=gpu.get("memory_used_bytes"),
        memory_total_bytes=gpu.get("memory_total_bytes"),
        power_watts=gpu.get("power_watts"),
        temperature_celsius=gpu.get("temperature_celsius"),
        users=use.users,
        holders=None if use.holders is None else [_holder(one) for one in use.holders[:_MAX_HOLDERS]],
    )


def _gpu_without_frame(device: Device, node: LiveNode) -> a.GpuOccupancy:
    return a.GpuOccupancy(
        label=device.label,
        uuid=device.uuid,
        name=device.name,
        state="lost" if node.state == "lost" else "unknown",
        utilization_ratio=None,
        memory_used_bytes=None,
        memory_total_bytes=device.facts.get("memory_total_bytes"),
        power_watts=None,
        temperature_celsius=None,
        users=(),
        holders=None,
    )


def _holder(holder: ProcessOnGpu) -> a.GpuHolderAnswer:
    owner, identity = holder.identity.owner, holder.identity
    command = plain(" ".join(identity.command))
    return a.GpuHolderAnswer(
        pid=holder.process.pid,
        user=owner.user or (None if owner.uid is None else str(owner.uid)),
        job=owner.job,
        name=identity.name,
        command=command[:_MAX_COMMAND_CHARS] or None,
        gpu_memory_bytes=holder.process.gpu_memory_bytes,
        start_time=identity.start_time,
    )


def _to_giga(*parts: float | None) -> float | None:
    if any(part is None for part in parts):
        return None
    return round(sum(part or 0.0 for part in parts) / _GIGA, 6)


def build_session(
    session: Session,
    now: float,
    *,
    output_file: str | None = None,
    export: a.ExportState | UnsetType = UNSET,
    coverage: Sequence[InterruptionCoverage | None] = (),
) -> a.SessionAnswer:
    """Return the answer about a session.

    Args:
        session: The session.
        now: Epoch seconds.
        output_file: Its file, or the file that it will be written to.
        export: State of writing the file, if a head writes it.
        coverage: Missing frames of each interruption; empty if not looked up.
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
        start_time=time_text.format_iso(session.start),
        end_time=_iso(session.end),
        frame_count=count_steps(session.start, end, session.interval_ms),
        interval_ms=session.interval_ms,
        output_file=output_file,
        labels=dict(session.labels),
        nodes=session.nodes,
        gpus=session.gpus,
        enable_bandwidth_profiling=session.bandwidth,
        enable_nvlink_profiling=session.nvlink,
        interruptions=[
            a.SessionInterruption(
                start_time=time_text.format_iso(part.start),
                end_time=_iso(part.end),
                missing=UNSET if covered is None else _missing(covered),
                pending=UNSET if covered is None else covered.pending,
            )
            for part, covered in zip(session.interruptions, found, strict=True)
        ],
        export=export,
    )


def _missing(coverage: InterruptionCoverage) -> list[a.MissingFrames]:
    return [a.MissingFrames(node=one.node, seconds=one.seconds) for one in coverage.missing]


def build_findings(active: Iterable[ActiveFinding]) -> list[a.NodeFinding]:
    """Return the current findings of all nodes, in their order."""
    return [_finding(item) for item in active]


def _finding(active: ActiveFinding) -> a.NodeFinding:
    finding = active.reported
    return a.NodeFinding(
        key=active.key,
        node=active.node,
        id=finding.id,
        category=active.category,
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
        inferred=finding.inferred,
        users=active.users,
        jobs=active.jobs,
        acknowledged=active.acknowledged,
        silenced=active.silenced,
        where=UNSET if finding.where is None else [a.FindingLocation(**p._asdict()) for p in finding.where],
        where_note=UNSET if finding.where_note is None else finding.where_note,
    )


def _evidence(evidence: Sequence[Evidence]) -> list[a.FindingEvidence]:
    return [a.FindingEvidence(**item._asdict()) for item in evidence]
