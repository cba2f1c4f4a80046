"""A simulated day of a head: memory and open files by the hour, as fast as it goes."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.unit.notified_findings import Active, settings

from benchmarks import fleet as agents
from benchmarks import measure, store
from benchmarks.measure import Report, Table, Target
from benchmarks.processes import memory, workplace
from gpulse.cluster.head.fleet import Fleet
from gpulse.cluster.head.fleet_monitor import FleetMonitor
from gpulse.cluster.notify import outbox
from gpulse.cluster.notify.notify_state import (
    FindingSnapshot,
    NotifyState,
    apply_snapshot,
    prepare_messages,
    replace_queue,
    send_rules,
)
from gpulse.model.packed_columns import ColumnBlock, PackedFrame, layout_id
from gpulse.store.local import LocalStore
from gpulse.store.log.record_payloads import FrameBatch, LogEntry
from gpulse.store.store import Query

NAME = "day"
_BEGIN = 1_790_000_000
_HOUR, _MINUTE = 3600, 60
_SEAL_SECONDS, _SAMPLE_SECONDS = 600, 10
_KEEP_SECONDS = 4 * _HOUR
"""Retention: from then on, the history on disk stays as large as it is."""
_WARM_HOURS = 5
"""When retention has begun and the first hour was removed."""
_MAX_GROWTH_MB = 10.0
_TARGET = "admins"


class _Hour(NamedTuple):
    """What the head used by the end of a simulated hour."""

    hour: int
    resident: float
    files: int
    sealer: float
    sealer_files: int
    segments: int
    disk: float
    messages: int


class _Day:
    """The parts of a head that keep state, driven by a simulated clock."""

    def __init__(self, directory: Path, nodes: int) -> None:
        looped = store.Looped(sorted(agents.RECORDINGS.glob("*.jsonl.gz")), seed=4)
        self._nodes = {
            node: store.make_node(looped, node, _HOUR, begin=_BEGIN) for node in range(1, nodes + 1)
        }
        self.now = float(_BEGIN)
        self._directory = directory
        self._archive = LocalStore(str(directory))
        self._archive.commit(list(store.node_facts(self._nodes)))
        self._layouts = {node: layout_id(made.layout.to_json()) for node, made in self._nodes.items()}
        layouts = {self._layouts[node]: made.layout for node, made in self._nodes.items()}
        self._fleet = Fleet(self._archive.nodes(), {}, layouts)
        for stored in self._archive.nodes().values():
            self._fleet.member(stored, self.now)
        self._monitor = FleetMonitor(
            self._fleet, self._archive, str(directory), missing=lambda: 0, now=lambda: self.now
        )
        self._config = settings()
        self._notify = NotifyState()
        self._messages = 0

    def run(self, hours: int) -> Iterator[_Hour]:
        """Let the hours pass."""
        for minute in range(hours * 60):
            self._take_minute(minute)
            seconds = (minute + 1) * _MINUTE
            if seconds % _SEAL_SECONDS == 0:
                self._archive.seal()
                self._archive.tidy(self.now, keep_seconds=_KEEP_SECONDS, limit_bytes=None)
                self._ask()
            if seconds % _HOUR == 0:
                asyncio.run(self._monitor.save())
                yield self._use(seconds // _HOUR)

    def close(self) -> None:
        """Close the store."""
        self._archive.close()

    def _take_minute(self, minute: int) -> None:
        first = minute * _MINUTE
        entries = []
        for node, made in self._nodes.items():
            number = self._layouts[node]
            frames = [
                PackedFrame(
                    (_BEGIN + second) * 1_000_000,
                    second * 1_000_000,
                    (ColumnBlock(number, made.blocks[second % _HOUR].tobytes()),),
                )
                for second in range(first, first + _MINUTE)
            ]
            data = b"".join(frame.to_bytes() for frame in frames)
            batch = FrameBatch(
                node.to_bytes(16, "big"), node, first + 1, _MINUTE, frames[-1].time_us, 0, data
            )
            entries.append(LogEntry.of_batch(batch, ()))
            self._fleet.members[node].take(frames[-1], self._fleet.layouts, 0)
        entries.append(
            LogEntry.of_fact("event", time=self.now, kind="agent_connected", node=1 + minute % 3, detail={})
        )
        self._archive.commit(entries)
        for _ in range(_MINUTE // _SAMPLE_SECONDS):
            self.now += _SAMPLE_SECONDS
            self._monitor.sample(self.now)
            self._look_at_findings(minute)

    def _look_at_findings(self, minute: int) -> None:
        """One finding begins and ends every twenty minutes, another one belongs to a new job each time."""
        findings = [
            finding
            for finding, active in (
                (Active(since=self.now), minute % 20 < 10),
                (Active(key=f"gpu_fault/n2/{minute // 20}", node="n2", since=self.now), minute % 20 < 5),
            )
            if active
        ]
        state = apply_snapshot(self._notify, FindingSnapshot(findings, self.now), self._config)
        target = self._config.targets[_TARGET]
        state, _ = prepare_messages(state, target, self._config, self.now)
        queue = state.queue(_TARGET)
        message = outbox.next_message(queue, send_rules(target, self._config), self.now)
        if message is not None:
            queue = outbox.begin_attempt(queue, message.id, self.now)
            state = replace_queue(state, _TARGET, outbox.mark_delivered(queue, message.id))
            self._messages += 1
        self._notify = state

    def _ask(self) -> None:
        """Ask what a page of the dashboard asks."""
        for _ in self._archive.scan(Query(self.now - _MINUTE * 10, self.now, "gpu", ("power_watts",))):
            pass
        self._archive.events(Query(self.now - _HOUR, self.now, "gpu", ()))

    def _use(self, hour: int) -> _Hour:
        own, sealer = os.getpid(), _find_sealer()
        sizes = (file.stat().st_size for file in self._directory.rglob("*") if file.is_file())
        return _Hour(
            hour,
            memory(own),
            _files(own),
            memory(sealer),
            0 if sealer is None else _files(sealer),
            len(self._archive.segments),
            sum(sizes) / (1 << 20),
            self._messages,
        )


def _find_sealer() -> int | None:
    for task in Path("/proc/self/task").iterdir():
        for child in (task / "children").read_text().split():
            if b"store.seal_process" in Path(f"/proc/{child}/cmdline").read_bytes():
                return int(child)
    return None


def _files(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def run(*, quick: bool, hours: int = 24, nodes: int = 4) -> Report:
    """Let a day pass, or a few hours."""
    report = Report(NAME, "A simulated day of a head")
    hours = min(hours, _WARM_HOURS + 3) if quick else hours
    begun, used = time.monotonic(), []
    with workplace() as folder:
        day = _Day(folder / "data", nodes)
        try:
            for hour in day.run(hours):
                used.append(hour)
                print(
                    f"hour {hour.hour}: {hour.resident:.0f} MB, {hour.files} files",
                    file=sys.stderr,
                    flush=True,
                )
        finally:
            day.close()
    took = time.monotonic() - begun
    warm, last = used[min(_WARM_HOURS, len(used)) - 1], used[-1]
    growth, more = last.resident - warm.resident, last.files - warm.files
    report.targets += [
        Target(
            f"memory from hour {warm.hour} to hour {last.hour}",
            f"{growth:+.1f} MB",
            f"flat (less than {_MAX_GROWTH_MB:g} MB)",
            growth < _MAX_GROWTH_MB,
        ),
        Target(f"open files from hour {warm.hour} to hour {last.hour}", f"{more:+d}", "flat (0)", more <= 0),
        Target(
            f"open files of the sealing process from hour {warm.hour} to hour {last.hour}",
            f"{last.sealer_files - warm.sealer_files:+d}",
            "flat (0)",
            last.sealer_files <= warm.sealer_files,
        ),
    ]
    table = Table(
        f"{nodes} nodes with 8 GPUs at 1 Hz, samples kept for {_KEEP_SECONDS // _HOUR} hours, {took:.0f} s in all:",
        (
            "by the end of hour",
            "RSS, MB",
            "open files",
            "sealing process, MB",
            "its files",
            "segments",
            "on disk, MB",
            "messages sent",
        ),
    )
    table.rows += [
        (
            str(hour.hour),
            f"{hour.resident:.1f}",
            str(hour.files),
            f"{hour.sealer:.1f}",
            str(hour.sealer_files),
            str(hour.segments),
            f"{hour.disk:.1f}",
            str(hour.messages),
        )
        for hour in used
    ]
    report.tables.append(table)
    report.notes.append(
        "The log, the metadata, the sealing process, retention, totals of the fleet and the notifications' state are those of a "
        "head; their clock is an argument, so a day takes minutes. There is no network, and no message leaves the process."
    )
    return report


if __name__ == "__main__":
    given = measure.parser(NAME, __doc__, {"hours": 24, "nodes": 4}).parse_args()
    measure.publish(run(quick=given.quick, hours=given.hours, nodes=given.nodes), write=given.write)
