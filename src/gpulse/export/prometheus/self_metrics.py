"""Metrics of a head or an agent about itself."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from gpulse.export.prometheus.text_format import Kind, MetricFamily
from gpulse.model.metric_catalog import Value

_STATES = ("healthy", "late", "lost")
_USAGE = ("log", "history", "metadata")


def process_families(started: float) -> Iterator[MetricFamily]:
    """Yield metrics of this process under the standard names of Prometheus client libraries.

    Args:
        started: Start of the process in epoch seconds.
    """
    yield _single_family(
        "process_start_time_seconds", "gauge", "Start time of this process, in epoch seconds", started
    )
    yield _single_family(
        "process_cpu_seconds_total", "counter", "CPU time of this process", round(time.process_time(), 3)
    )
    with suppress(OSError, ValueError), open("/proc/self/statm", encoding="ascii") as file:
        resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        yield _single_family(
            "process_resident_memory_bytes", "gauge", "Resident memory of this process", resident
        )


def agent_families(frames: int) -> Iterator[MetricFamily]:
    """Yield metrics of an agent."""
    yield _single_family(
        "gpulse_agent_frames_total", "counter", "Frames taken since the agent started", frames
    )


def head_families(status: Mapping[str, Any]) -> Iterator[MetricFamily]:
    """Yield metrics of a head from its status document; values that it lacks are left out."""
    yield _single_family(
        "gpulse_head_frames_received_total",
        "counter",
        "Frames received since the head started",
        _number(status.get("frames_received")),
    )
    connected = status.get("connected_clients")
    yield _single_family(
        "gpulse_head_streams",
        "gauge",
        "Connected agents",
        len(connected) if isinstance(connected, list) else None,
    )
    states = Counter(node.get("state") for node in status.get("nodes") or ())
    yield MetricFamily(
        "gpulse_head_nodes",
        "gauge",
        "Nodes of this head, by state",
        [({"state": state}, states[state]) for state in _STATES],
    )
    missing = status.get("missing_nodes")
    yield _single_family(
        "gpulse_head_nodes_missing",
        "gauge",
        "Expected nodes that have never reported",
        None if missing is None else len(missing),
    )
    sessions = status.get("active_sessions")
    yield _single_family(
        "gpulse_head_sessions_active",
        "gauge",
        "Active sessions",
        len(sessions) if isinstance(sessions, list) else None,
    )
    yield from _storage(status.get("storage") or {})
    for name, help_text in _BACKENDS.items():
        found = status.get(name)
        if isinstance(found, Mapping):
            yield _single_family(
                f"gpulse_head_{name}_up", "gauge", help_text, int(found.get("state") in {"ok", "behind"})
            )
    remote = status.get("remote")
    if isinstance(remote, Mapping):
        for name, kind, help_text in _REMOTE_WRITE:
            yield _single_family(f"gpulse_head_remote_{name}", kind, help_text, _number(remote.get(name)))
    notified = status.get("notifications")
    if isinstance(notified, Sequence) and notified:
        yield from _notifications(notified)


def _notifications(targets: Sequence[Mapping[str, Any]]) -> Iterator[MetricFamily]:
    yield MetricFamily(
        "gpulse_head_notifications_up",
        "gauge",
        "1 when the last notification to a target was delivered",
        [({"target": str(one.get("name"))}, int(one.get("state") == "ok")) for one in targets],
    )
    for name, kind, help_text in _NOTIFICATIONS:
        yield MetricFamily(
            f"gpulse_head_notifications_{name}",
            kind,
            help_text,
            [({"target": str(one.get("name"))}, _number(one.get(name))) for one in targets],
        )


def _storage(storage: Mapping[str, Any]) -> Iterator[MetricFamily]:
    state = storage.get("state")
    yield _single_family(
        "gpulse_head_storage_up",
        "gauge",
        "1 when frames from agents are being stored",
        None if state is None else int(state == "ok"),
    )
    yield MetricFamily(
        "gpulse_head_storage_bytes",
        "gauge",
        "Disk space used by the head's data, by kind of data",
        [({"part": part}, _number(storage.get(f"{part}_bytes"))) for part in _USAGE],
    )
    yield _single_family(
        "gpulse_head_storage_free_bytes",
        "gauge",
        "Free space on the disk that holds the head's data",
        _number(storage.get("free_bytes")),
    )
    yield _single_family(
        "gpulse_head_commit_waiting_bytes",
        "gauge",
        "Received data that has not been written to disk yet",
        _number(storage.get("waiting_bytes")),
    )
    yield _single_family(
        "gpulse_head_commit_seconds",
        "gauge",
        "Duration of the last commit to disk",
        _number(storage.get("commit_seconds")),
    )


_BACKENDS = {
    "remote": "1 when the remote-write endpoint accepts samples",
    "remote_query": "1 when the time-series database answers queries",
    "database": "1 when the database that the heads share is available",
}
"""Storage that a head may have besides its local disk."""
_REMOTE_WRITE: tuple[tuple[str, Kind, str], ...] = (
    ("waiting_bytes", "gauge", "Data in the head's log that the remote-write endpoint has not confirmed"),
    ("waiting_seconds", "gauge", "Age of the oldest sample that the remote-write endpoint has not confirmed"),
    ("samples_total", "counter", "Samples that the remote-write endpoint confirmed"),
    ("refused_total", "counter", "Samples that the remote-write endpoint rejected permanently"),
    ("lost_total", "counter", "Records dropped because the backlog was too large"),
    ("resent_total", "counter", "Samples resent to the remote-write endpoint"),
)


_NOTIFICATIONS: tuple[tuple[str, Kind, str], ...] = (
    ("waiting", "gauge", "Changes and messages that have not been delivered yet, by target"),
    ("sent_total", "counter", "Notifications accepted, by target"),
    ("failed_total", "counter", "Failed attempts to deliver a notification, by target"),
    ("given_up_total", "counter", "Notifications that were never delivered, by target"),
)


def _single_family(name: str, kind: Kind, help_text: str, value: Value | None) -> MetricFamily:
    return MetricFamily(name, kind, help_text, [({}, value)])


def _number(value: object) -> Value | None:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None
