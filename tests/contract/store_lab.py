"""The same samples in every home for them: on a head's disk, in a time-series database, and some in each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from gpulse.model.device import Device, Node
from gpulse.model.frame import (
    DiskReading,
    FilesystemReading,
    Frame,
    GpuReading,
    HostReading,
    NetworkReading,
)
from gpulse.model.frame_packing import FramePacker
from gpulse.model.metric_catalog import CATALOG, Scope
from gpulse.model.packed_columns import ColumnLayout, layout_id
from gpulse.model.process import GpuProcess
from gpulse.model.series_labels import subject_label_name
from gpulse.store.local import LocalStore
from gpulse.store.log.record_payloads import FrameBatch, LogEntry
from gpulse.store.metadata.log_updates import find_frame_events
from gpulse.store.store import Store
from tests.integration.tsdb_servers import Written
from tests.queries import query

BEGIN = 1_700_000_040.0
"""Epoch seconds; the beginning of a minute."""
LATE = 0.1234567
"""How long after a second frames are taken: databases keep milliseconds."""
EVERY = 5
FRAMES = 240
HALF = FRAMES // 2
MIDDLE, END = BEGIN + HALF * EVERY, BEGIN + FRAMES * EVERY
NODES = {1: "alpha", 2: 'b(e)ta.+|"\\x', 3: "gamma"}
"""One of them has everything in its name that a pattern or a string could stumble over."""
METRICS: Mapping[Scope, Sequence[str]] = {
    "gpu": ("power_watts", "energy_joules_total", "sm_active_ratio", "memory_used_bytes"),
    "host": ("cpu_utilization_ratio", "cpu_user_seconds_total", "memory_available_bytes"),
    "disk": ("read_bytes_total",),
    "filesystem": ("used_bytes",),
    "network": ("rx_bytes_total", "link_bits_per_second"),
}


def frame(node: int, number: int) -> Frame:
    """What a node is at one moment; numbers say where they belong, and some are not known all the time."""
    gpus = [
        GpuReading(
            Device(gpu, f"GPU-{node}-{gpu}", "NVIDIA H200"),
            {
                "power_watts": 100.0 * node + gpu + number / 1000,
                "energy_joules_total": 1e9 + 12.345 * number,
                "memory_used_bytes": (number + 1) << 30,
                **({"sm_active_ratio": number % 7 / 7} if number % 3 else {}),
            },
            (GpuProcess(4000 + gpu, "compute", 1 << 30, 0.5),),
        )
        for gpu in range(2)
    ]
    host = {
        "cpu_utilization_ratio": number % 100 / 100,
        "cpu_user_seconds_total": 77.0 + number,
        "memory_available_bytes": (1 << 40) - number,
    }
    return Frame(
        BEGIN + number * EVERY + LATE,
        float(number * EVERY),
        Node(NODES[node]),
        tuple(gpus),
        HostReading(host),
        (DiskReading("nvme0n1", "nvme", {"read_bytes_total": 4096 * number}),),
        (
            FilesystemReading(
                "/scratch (old)", "/dev/sdb1", "xfs", None, None, {"used_bytes": (1 << 50) - number}
            ),
        ),
        (
            NetworkReading(
                "ib0",
                "infiniband",
                True,
                {
                    "rx_bytes_total": (1 << 50) + number,
                    "link_bits_per_second": 100_000_000_000 * (1 + number % 2),
                },
            ),
        ),
    )


class Feeder:
    """Commits the frames of a node as a head does."""

    def __init__(self, archive: LocalStore, node: int) -> None:
        self._archive = archive
        self._node = node
        self._packer = FramePacker()
        fact = {"id": node, "name": NODES[node], "host": NODES[node], "machine": f"m{node}"}
        archive.commit([LogEntry.of_fact("node", time=BEGIN, facts={}, labels={}, **fact)])

    def feed(self, numbers: range, *, run: int = 0) -> list[LogEntry]:
        """Some of its frames, of one run of its agent; what was committed."""
        facts: list[LogEntry] = []
        frames = []
        for number in numbers:
            packed, texts = self._packer.pack(frame(self._node, number), ())
            frames.append(packed)
            for text in texts:
                name = str(layout_id(text))
                self._archive.layouts[layout_id(text)] = ColumnLayout.from_json(text)
                facts.append(LogEntry.of_fact("layout", id=name, text=text.decode()))
                if b'"scope":"gpu"' in text:
                    facts.append(LogEntry.of_fact("devices", node=self._node, layout=name, time=BEGIN))
        batch = FrameBatch(
            bytes([self._node + 16 * run]) * 16,
            self._node,
            numbers.start + 1,
            len(numbers),
            round((BEGIN + numbers.stop * EVERY) * 1e6),
            0,
            b"".join(one.to_bytes() for one in frames),
        )
        entries = [*facts, LogEntry.of_batch(batch, tuple(find_frame_events(batch)))]
        self._archive.commit(entries)
        return entries


class Stored(NamedTuple):
    """The samples on a disk."""

    whole: LocalStore
    """With everything."""
    recent: LocalStore
    """With the second half alone, the first was dropped."""


def fill(directory: Path) -> Stored:
    """Two stores: one with everything, in its log alone, and one that dropped the older half of its history."""
    whole, recent = (LocalStore(str(directory / name)) for name in ("whole", "recent"))
    feeders = [Feeder(archive, node) for archive in (whole, recent) for node in NODES]
    for numbers in (range(HALF), range(HALF, HALF + HALF // 2)):
        for feeder in feeders:
            feeder.feed(numbers)
        recent.seal()
    dropped = recent.tidy(END, keep_seconds=END - MIDDLE - 1.0, limit_bytes=None)
    assert len(dropped) == 1
    for feeder in feeders:
        feeder.feed(range(HALF + HALF // 2, FRAMES))
    return Stored(whole, recent)


def sealed(directory: Path) -> LocalStore:
    """A store with everything, some of it in its history."""
    archive = LocalStore(str(directory))
    feeders = [Feeder(archive, node) for node in NODES]
    for feeder in feeders:
        feeder.feed(range(HALF + 7))
    archive.seal()
    for feeder in feeders:
        feeder.feed(range(HALF + 7, FRAMES))
    return archive


def series_of(store: Store) -> Iterator[Written]:
    """Everything in a store as a time-series database takes it: oldest first within a series."""
    for scope in METRICS:
        label = subject_label_name(scope)
        for metric in METRICS[scope]:
            known_as = CATALOG[scope][metric]
            for series in store.series(query(scope, metric, start=BEGIN, end=END)):
                labels = {
                    "__name__": known_as.prometheus,
                    "node": NODES[series.key.node],
                    **({label: series.key.subject} if label else {}),
                    "cluster": "lab",
                }
                known = ~np.isnan(series.values)
                values = series.values[known] * known_as.prometheus_factor
                yield labels, list(zip(series.times[known].tolist(), values.tolist(), strict=True))
