"""Facts, frames and records for tests of the metadata, and everything that metadata contain."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from gpulse.model.packed_columns import ColumnLayout, LayoutColumn, PackedFrame, layout_id
from gpulse.store.log.record_payloads import BATCH, FACT, FrameBatch, FrameEvents, encode_fact
from gpulse.store.log.segment import LogRecord
from gpulse.store.metadata.local_metadata import Metadata
from tests.queries import query

RUN = bytes(range(16))
LATER_RUN = bytes(range(16, 32))


def fact(name: str, /, **fields: Any) -> dict[str, Any]:
    """A fact as it is read from the log."""
    return {"fact": name, **fields}


def node_fact(number: int = 1, name: str = "a", **changes: Any) -> dict[str, Any]:
    """A node that joined at 100 s."""
    fields = {"host": name, "machine": f"m{number}", "time": 100.0, "facts": {"driver": "580"}, "labels": {}}
    return fact("node", id=number, name=name, **(fields | changes))


def gpu_layout(*labels: tuple[int, int | None], name: str = "NVIDIA H200") -> ColumnLayout:
    """A layout of GPUs by index and MIG index."""
    subjects: tuple[dict[str, Any], ...] = tuple(
        {"uuid": f"GPU-{index}-{mig}", "index": index, "mig_index": mig, "name": name, "facts": {}}
        for index, mig in labels
    )
    return ColumnLayout("gpu", subjects, (), (LayoutColumn("gpu_busy_ratio", 100, 1),))


def layout_facts(layout: ColumnLayout, node: int = 1, time: float = 100.0) -> list[dict[str, Any]]:
    """The facts that introduce a layout, and its GPUs as a node's."""
    text = layout.to_json()
    key = str(layout_id(text))
    return [
        fact("layout", id=key, text=text.decode()),
        fact("devices", node=node, layout=key, time=time),
    ]


def frame_events(
    *events: Mapping[str, Any], time: float, node: int = 1, run: bytes = RUN, sequence: int = 1
) -> FrameEvents:
    """The events of one frame."""
    return FrameEvents(node, run, sequence, time, json.dumps(events).encode())


def process(pid: int, start_time: float | None = 50.0, name: str = "python3") -> dict[str, Any]:
    """A process began, or changed."""
    return {"event": "process", "pid": pid, "start_time": start_time, "name": name, "owner": {"user": "eve"}}


def batch(
    *frames: tuple[float, bytes], node: int = 1, run: bytes = RUN, first: int = 1, shift_us: int = 0
) -> bytes:
    """The payload of a batch of frames, given as times and events."""
    packed = b"".join(PackedFrame(round(time * 1e6), 0, (), events).to_bytes() for time, events in frames)
    return FrameBatch(run, node, first, len(frames), 200_000_000, shift_us, packed).to_bytes()


def records(payloads: Iterable[dict[str, Any] | bytes], first: int = 1) -> list[LogRecord]:
    """Records of facts, and of payloads of batches."""
    return [
        LogRecord(position, BATCH, payload)
        if isinstance(payload, bytes)
        else LogRecord(
            position, FACT, encode_fact(payload["fact"], **{k: payload[k] for k in payload if k != "fact"})
        )
        for position, payload in enumerate(payloads, first)
    ]


def content(metadata: Metadata) -> dict[str, Any]:
    """Everything that the metadata answer."""
    return {
        "applied": metadata.applied,
        "nodes": metadata.nodes(),
        "gpus": metadata.gpus(),
        "sessions": metadata.sessions(),
        "events": metadata.events(query(start=-1e300, end=1e300)),
        "processes": metadata.processes(query(start=-1e300, end=1e300)),
        "health": metadata.latest("health"),
        "findings": metadata.latest("findings"),
        "finding_spans": metadata.findings(query(start=-1e300, end=1e300)),
        "runs": metadata.runs(),
        "layouts": metadata.layouts(),
        "settings": metadata.settings(),
    }
