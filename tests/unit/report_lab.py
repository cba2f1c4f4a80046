"""A real store filled with small frames, and the questions about the past over it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import msgspec
import pytest

from gpulse.cluster.agent.event_detector import EventDetector
from gpulse.cluster.head.operations import ReportRunner
from gpulse.cluster.protocol import requests as r
from gpulse.model.device import Device, Node
from gpulse.model.frame import Frame, GpuReading
from gpulse.model.frame_packing import FramePacker
from gpulse.model.metric_catalog import Values
from gpulse.model.packed_columns import ColumnLayout, PackedFrame, layout_id
from gpulse.model.process import GpuProcess, Owner, ProcessIdentity, ProcessReading
from gpulse.store.local import LocalStore
from gpulse.store.log.record_payloads import FrameBatch, LogEntry
from gpulse.store.metadata.log_updates import find_frame_events
from gpulse.store.node_registry import NodeRegistry

Document = dict[str, Any]
"""An answer as JSON."""

NO_TIME = 0.0
"""The time now, where a request says when it ends."""
BEGIN = 1_800_000_000
"""Epoch seconds; the beginning of an hour."""


class Held(NamedTuple):
    """A process and what it holds."""

    pid: int
    gpus: tuple[str, ...] = ("0",)
    user: str | None = "ada"
    job: str | None = None
    sm: float | None = None
    memory: int | None = 1 << 30
    start: float | None = BEGIN - 100.0
    parent: int | None = None
    name: str = "python3"

    def reading(self) -> ProcessReading:
        """The process as an agent reads it."""
        owner = Owner(user=self.user, job=self.job)
        identity = ProcessIdentity(
            self.pid, self.parent, self.start, self.name, (self.name, "train.py"), owner
        )
        return ProcessReading(identity, "R", {"cpu_user_seconds_total": 1.0}, on_gpu=bool(self.gpus))


class Machine:
    """One node: packs frames as its agent would."""

    def __init__(self, number: int, labels: Sequence[str]) -> None:
        self.number = number
        self.devices = [_device(number, label) for label in labels]
        self.run = bytes([number] * 16)
        self.packer = FramePacker()
        self.changes = EventDetector(version="1", pid=1)
        self.sequence = 0
        self.known: set[bytes] = set()


def _device(node: int, label: str) -> Device:
    index, _, mig = label.partition(":")
    return Device(
        int(index),
        f"GPU-{node}-{label.replace(':', '.')}",
        "NVIDIA H200",
        parent_uuid=f"GPU-{node}-{index}" if mig else None,
        mig_index=int(mig) if mig else None,
    )


class Lab:
    """A store, filled frame by frame."""

    def __init__(self, directory: Path, *labels: Sequence[str]) -> None:
        """One node for each list of GPUs; they are called n1, n2 and so on."""
        self.archive = LocalStore(str(directory / "data"))
        self.machines = {number: Machine(number, gpus) for number, gpus in enumerate(labels, 1)}
        for number in self.machines:
            fact = {"id": number, "name": f"n{number}", "host": f"n{number}", "machine": f"m{number}"}
            self.archive.commit([LogEntry.of_fact("node", time=float(BEGIN), facts={}, labels={}, **fact)])
        self.reports = ReportRunner(self.archive, NodeRegistry(self.archive.nodes().values()), lambda: 5.0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.archive.close()

    def frame(
        self,
        second: int,
        *held: Held,
        node: int = 1,
        values: Mapping[str, Values] | None = None,
        **others: Any,
    ) -> Frame:
        """What a node is at a second after the beginning; `values` by the label of a GPU."""
        gpus = [
            GpuReading(
                device,
                (values or {}).get(device.label, {"gpu_utilization_ratio": 0.5, "power_watts": 100.0}),
                tuple(
                    GpuProcess(one.pid, "compute", one.memory, one.sm)
                    for one in held
                    if device.label in one.gpus
                ),
            )
            for device in self.machines[node].devices
        ]
        processes = tuple(one.reading() for one in held)
        return Frame(
            BEGIN + second, float(second), Node(f"n{node}"), tuple(gpus), processes=processes, **others
        )

    def fill(self, seconds: Iterable[int], *held: Held, node: int = 1, **others: Any) -> None:
        """Frames at some seconds after the beginning, all alike."""
        self.add([self.frame(second, *held, node=node, **others) for second in seconds], node)

    def add(self, frames: Sequence[Frame], node: int = 1) -> None:
        """Commit frames of a node as a head does."""
        machine = self.machines[node]
        facts: list[LogEntry] = []
        packed: list[PackedFrame] = []
        for frame in frames:
            done, texts = machine.packer.pack(frame, machine.changes(frame))
            packed.append(done)
            for text in texts:
                if text not in machine.known:
                    machine.known.add(text)
                    layout = str(layout_id(text))
                    self.archive.layouts[layout_id(text)] = ColumnLayout.from_json(text)
                    facts.append(LogEntry.of_fact("layout", id=layout, text=text.decode()))
                    if b'"scope":"gpu"' in text:
                        facts.append(
                            LogEntry.of_fact("devices", node=machine.number, layout=layout, time=frame.time)
                        )
        batch = FrameBatch(
            machine.run,
            machine.number,
            machine.sequence + 1,
            len(packed),
            round(frames[-1].time * 1e6),
            0,
            b"".join(frame.to_bytes() for frame in packed),
        )
        machine.sequence += len(packed)
        self.archive.commit([*facts, LogEntry.of_batch(batch, tuple(find_frame_events(batch)))])

    def restart(self, node: int = 1) -> None:
        """Start a node's agent again: it tells everything anew."""
        machine = self.machines[node]
        machine.changes = EventDetector(version="1", pid=2)
        machine.run = bytes([machine.run[0] + 100] * 16)
        machine.sequence = 0

    async def history(self, metrics: Sequence[str], **asked: Any) -> Document:
        """Several metrics; seconds count from the beginning."""
        request = r.GetHistory(metrics=tuple(metrics), **_times(asked))
        return as_json(await self.reports.history(request, NO_TIME))

    async def processes(self, **asked: Any) -> Document:
        """Who held GPUs."""
        return as_json(await self.reports.processes(r.GetProcesses(**_times(asked)), NO_TIME))

    async def usage(self, **asked: Any) -> Document:
        """How much of them."""
        return as_json(await self.reports.usage(r.GetUsage(**_times(asked)), NO_TIME))

    async def job(self, job: str, *, now: int, **asked: Any) -> Document:
        """How well somebody used their GPUs; seconds count from the beginning."""
        for name in ("start", "end"):
            second = asked.pop(name, None)
            asked[name] = None if second is None else float(BEGIN + second)
        return as_json(await self.reports.job(r.GetJob(job=job, **asked), float(BEGIN + now)))


def as_json(report: msgspec.Struct) -> Document:
    """A report as its readers get it."""
    document: Document = msgspec.json.decode(msgspec.json.encode(report))
    return document


def check_alike(one: Any, other: Any) -> None:
    """Two answers say the same; means of minutes are kept with seven digits."""
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for name, value in one.items():
            check_alike(value, other[name])
    elif isinstance(one, (list, tuple)):
        for item, twin in zip(one, other, strict=True):
            check_alike(item, twin)
    else:
        assert one == (pytest.approx(other, rel=1e-5) if isinstance(other, float) else other)


def _times(asked: dict[str, Any]) -> dict[str, Any]:
    start, end = asked.pop("start"), asked.pop("end")
    return {"start": float(BEGIN + start), "end": float(BEGIN + end), **asked}
