"""What a head or an agent tells Prometheus about itself."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from gpulse.export.prometheus.text import Family, Kind
from gpulse.model.metric import Value

_STATES = ("healthy", "late", "lost")
_USAGE = ("log", "history", "book")


def of_process(started: float) -> Iterator[Family]:
    """What every program tells under names that all of them share.

    Args:
        started: Epoch seconds.
    """
    yield _one(
        "process_start_time_seconds", "gauge", "When this program was started, in epoch seconds", started
    )
    yield _one(
        "process_cpu_seconds_total", "counter", "CPU time of this program", round(time.process_time(), 3)
    )
    with suppress(OSError, ValueError), open("/proc/self/statm", encoding="ascii") as file:
        resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        yield _one("process_resident_memory_bytes", "gauge", "Memory of this program", resident)


def of_agent(frames: int) -> Iterator[Family]:
    """An agent's own numbers."""
    yield _one("gpulse_agent_frames_total", "counter", "Frames taken since the agent started", frames)


def of_head(status: Mapping[str, Any]) -> Iterator[Family]:
    """A head's own numbers, from its status document; what that does not say is left out."""
    yield _one(
        "gpulse_head_frames_received_total",
        "counter",
        "Frames that came since the head started",
        _number(status.get("frames_received")),
    )
    connected = status.get("connected_clients")
    yield _one(
        "gpulse_head_streams",
        "gauge",
        "Agents that are connected",
        len(connected) if isinstance(connected, list) else None,
    )
    states = Counter(node.get("state") for node in status.get("nodes") or ())
    yield Family(
        "gpulse_head_nodes",
        "gauge",
        "Nodes that this head knows, by how they are",
        [({"state": state}, states[state]) for state in _STATES],
    )
    missing = status.get("missing_nodes")
    yield _one(
        "gpulse_head_nodes_missing",
        "gauge",
        "Expected nodes that have never reported",
        None if missing is None else len(missing),
    )
    sessions = status.get("active_sessions")
    yield _one(
        "gpulse_head_sessions_active",
        "gauge",
        "Sessions that go on",
        len(sessions) if isinstance(sessions, list) else None,
    )
    yield from _storage(status.get("storage") or {})
    for name, words in _BEYOND.items():
        found = status.get(name)
        if isinstance(found, Mapping):
            yield _one(f"gpulse_head_{name}_up", "gauge", words, int(found.get("state") in {"ok", "behind"}))
    remote = status.get("remote")
    if isinstance(remote, Mapping):
        for name, kind, words in _ENGINE:
            yield _one(f"gpulse_head_remote_{name}", kind, words, _number(remote.get(name)))


def _storage(storage: Mapping[str, Any]) -> Iterator[Family]:
    state = storage.get("state")
    yield _one(
        "gpulse_head_storage_up",
        "gauge",
        "1 when what agents send is being stored",
        None if state is None else int(state == "ok"),
    )
    yield Family(
        "gpulse_head_storage_bytes",
        "gauge",
        "What the head's store takes of its disk",
        [({"part": part}, _number(storage.get(f"{part}_bytes"))) for part in _USAGE],
    )
    yield _one(
        "gpulse_head_storage_free_bytes",
        "gauge",
        "What is free on that disk",
        _number(storage.get("free_bytes")),
    )
    yield _one(
        "gpulse_head_commit_waiting_bytes",
        "gauge",
        "What came and is not on disk yet",
        _number(storage.get("waiting_bytes")),
    )
    yield _one(
        "gpulse_head_commit_seconds",
        "gauge",
        "How long the last commit took",
        _number(storage.get("commit_seconds")),
    )


_BEYOND = {
    "remote": "1 when the engine takes samples",
    "remote_query": "1 when the engine answers questions",
    "database": "1 when the database that heads share can be used",
}
"""What a head may have beyond its own disk."""
_ENGINE: tuple[tuple[str, Kind, str], ...] = (
    ("waiting_bytes", "gauge", "What the engine has not confirmed yet, in the head's log"),
    ("waiting_seconds", "gauge", "Age of the oldest sample that the engine has not confirmed"),
    ("samples_total", "counter", "Samples that the engine confirmed"),
    ("refused_total", "counter", "Samples that the engine refused for good"),
    ("lost_total", "counter", "Samples given up because too much waited"),
    ("resent_total", "counter", "Samples that were sent again"),
)


def _one(name: str, kind: Kind, words: str, value: Value | None) -> Family:
    return Family(name, kind, words, [({}, value)])


def _number(value: object) -> Value | None:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None
