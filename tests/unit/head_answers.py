"""Answers of a head with usual values, for tests of those who read them."""

from __future__ import annotations

from typing import Any

from gpulse.cluster.protocol.answers import NodeState, NodeStatus, SessionAnswer, Status, Storage


def node_status(name: str, state: NodeState = "healthy", **changes: Any) -> NodeStatus:
    """A node with eight GPUs."""
    fields: dict[str, Any] = {
        "gpu_count": 8,
        "gpu_models": {"NVIDIA H200": 8},
        "connected": state != "lost",
        "at_other_head": False,
        "last_seen": "2025-11-15T09:46:39.600Z",
        "silent_seconds": 0.4,
        "version": "0.1.0",
        "labels": {},
    }
    return NodeStatus(name=name, state=state, **{**fields, **changes})


def session_answer(name: str = "run", **changes: Any) -> SessionAnswer:
    """A session that goes on."""
    fields: dict[str, Any] = {
        "session_id": "e8691366c8487001",
        "is_active": True,
        "state": "active",
        "recoverable": False,
        "start_time": "2025-11-15T09:40:00.000Z",
        "end_time": None,
        "frame_count": 400,
        "interval_ms": 500,
        "output_file": None,
        "labels": {},
        "nodes": [],
        "gpus": [],
        "enable_bandwidth_profiling": False,
        "enable_nvlink_profiling": False,
        "interruptions": [],
    }
    return SessionAnswer(name=name, **{**fields, **changes})


def storage(**changes: Any) -> Storage:
    """A disk that is well."""
    fields: dict[str, Any] = {
        "state": "ok",
        "error": None,
        "hint": None,
        "since": None,
        "directory": "/data",
        "waiting_bytes": 0,
        "commit_seconds": 0.001,
        "log_bytes": 1 << 20,
        "history_bytes": 1 << 21,
        "metadata_bytes": 1 << 20,
        "free_bytes": 1 << 30,
        "unsealed_bytes": 0,
        "is_behind": False,
    }
    return Storage(**{**fields, **changes})


def head_status(*nodes: NodeStatus, **changes: Any) -> Status:
    """A head with these nodes."""
    fields: dict[str, Any] = {
        "freq": 500,
        "enable_bandwidth_profiling": True,
        "enable_nvlink_profiling": False,
        "is_profiling": False,
        "output_filename": "",
        "frame_id_counter": 0,
        "connected_clients": [node.name for node in nodes if node.connected],
        "total_gpus": sum(8 for node in nodes if node.connected),
        "gpu_info": {},
        "active_sessions": [],
        "recoverable_sessions": [],
        "version": "0.1.0",
        "time": "2025-11-15T09:46:40.000Z",
        "uptime_seconds": 3725.0,
        "frames_received": 12345,
        "nodes": nodes,
        "missing_nodes": [],
        "findings": [],
        "storage": storage(),
    }
    return Status(**{**fields, **changes})
