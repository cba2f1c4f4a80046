"""Newest readings of all GPUs as columns, taken from packed frames without decoding them.

Decoding the frames of a thousand GPUs takes tens of milliseconds. Nodes whose blocks have the same columns are read
together, with a few array operations for all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpulse.cluster.head.fleet import FleetMember
from gpulse.model.device import Device
from gpulse.model.finding import MULTI_CAUSE_FINDING, Finding
from gpulse.model.frame import Frame
from gpulse.model.frame_packing import device_from_subject
from gpulse.model.harvest_status import is_harvest_job
from gpulse.model.packed_columns import MISSING_NARROW, MISSING_WIDE, ColumnLayout, PackedFrame
from gpulse.model.process import ProcessIdentity
from gpulse.model.safe_text import natural_key
from gpulse.store.store import StoredNode

METRICS = (
    "gpu_utilization_ratio",
    "sm_active_ratio",
    "memory_used_bytes",
    "power_watts",
    "harvest_state",
)


class GpuRow(NamedTuple):
    """One GPU or MIG instance: a row of the columns."""

    node: int
    node_name: str
    label: str
    uuid: str
    is_unit: bool
    """Whether it can be allocated: a GPU without MIG instances, or a MIG instance."""
    is_instance: bool
    memory_total_bytes: float
    """NaN if unknown."""


class _ColumnPlace(NamedTuple):
    """Where a metric is within a block."""

    name: str
    offset: int
    width: int
    steps: int
    size: int


class _BlockPlan(NamedTuple):
    """How to read the blocks of a layout."""

    shape: int
    """Hash of the columns and the number of GPUs; blocks of the same shape are read together."""
    gpus: int
    block_bytes: int
    places: tuple[_ColumnPlace, ...]


class _NodeRows:
    """The rows of one node, and which of its data they show."""

    def __init__(self, stored: StoredNode, key: object, base: int, count: int) -> None:
        self.stored = stored
        self.key = key
        self.base = base
        self.count = count
        self.layout: int | None = None
        """Layout of its GPUs."""
        self.plan: _BlockPlan | None = None
        self.newest: object = None
        """The frame that was read last."""
        self.slow: object = None
        self.holdings: object = None
        """The layout of the processes that were read last."""
        self.findings: Sequence[Finding] | None = None
        self.state = ""

    @property
    def rows(self) -> slice:
        return slice(self.base, self.base + self.count)


_NodeBlock = tuple[_NodeRows, tuple[PackedFrame, int], bytes]
"""A node, its newest frame with the microseconds to add to its time, and the block with its GPUs."""
_Blocks = dict[int, list[_NodeBlock]]
"""Blocks that are read together, by shape."""


class GpuColumns:
    """Newest readings of all GPUs, one row per GPU, ordered by node name and index."""

    def __init__(self) -> None:
        self.rows: list[GpuRow] = []
        self.users: list[tuple[str, ...]] = []
        """Users of each GPU, without those of harvests."""
        self._nodes: dict[int, _NodeRows] = {}
        self._allocate(0)

    def _allocate(self, count: int) -> None:
        self.values = {name: np.full(count, np.nan) for name in METRICS}
        """By metric; NaN where unknown."""
        self.times = np.full(count, np.nan)
        """Time of each GPU's newest frame, in epoch seconds."""
        self.is_new = np.zeros(count, bool)
        """Whether the last call of `read` found a new frame."""
        self.is_lost = np.zeros(count, bool)
        self.is_faulty = np.zeros(count, bool)
        self.has_process = np.zeros(count, bool)
        self.has_people = np.zeros(count, bool)
        """Whether a process of a known user, other than a harvest's, is on it."""
        self.has_harvest = np.zeros(count, bool)
        """Whether a process of a harvest is on it."""
        self.knows_processes = np.zeros(count, bool)
        self.is_unit = np.array([row.is_unit for row in self.rows], bool)
        self.is_instance = np.array([row.is_instance for row in self.rows], bool)
        self.memory_total = np.array([row.memory_total_bytes for row in self.rows], float)

    def read(
        self,
        members: Mapping[int, FleetMember],
        layouts: Mapping[int, ColumnLayout],
        *,
        processes: bool = False,
    ) -> NDArray[np.int64] | None:
        """Read what has changed since the last call.

        Args:
            members: All nodes, by number.
            layouts: Layouts of their frames, by ID.
            processes: Read the processes again even where they are the same, because their users may have become known.

        Returns:
            For each row, its place before the call or -1 if it is new; None if no row has moved.
        """
        moved = None
        blocks = self._collect_blocks(members) if len(members) == len(self._nodes) else None
        if blocks is None and any(self._is_other(member, layouts) for member in members.values()):
            moved = self._rebuild(members.values(), layouts)
        self.is_new[:] = False
        for number, member in members.items():
            node = self._nodes[number]
            if member.state != node.state or member.findings is not node.findings:
                self._read_state(node, member)
            slow = member.newest_slow
            if blocks is None and (frame := _other_head_frame(member)) is not None:
                self._read_frame(node, frame, processes=processes)
            elif slow is not None and (slow is not node.slow or processes):
                node.slow = slow
                self._read_processes(node, member, slow, layouts, again=processes)
        if blocks is None:
            blocks = self._collect_other_blocks(members.values())
        for group in blocks.values():
            self._read_blocks(group)
        return moved

    def _collect_blocks(self, members: Mapping[int, FleetMember]) -> _Blocks | None:
        """Return the blocks of new frames by shape; None if a node needs a closer look, as few do."""
        blocks: _Blocks = {}
        nodes = self._nodes
        for number, member in members.items():
            node, newest = nodes.get(number), member.newest
            if node is None or member.other_head.frame is not None or member.stored is not node.stored:
                return None
            if newest is None or newest is node.newest:
                continue
            packed_blocks = newest[0].blocks
            plan = node.plan
            if plan is None or not packed_blocks or packed_blocks[0].layout != node.layout:
                return None
            group = blocks.get(plan.shape)
            if group is None:
                blocks[plan.shape] = [(node, newest, packed_blocks[0].numbers)]
            else:
                group.append((node, newest, packed_blocks[0].numbers))
        return blocks

    def _collect_other_blocks(self, members: Iterable[FleetMember]) -> _Blocks:
        """Return the blocks of new frames by shape, wherever they are in their frame."""
        blocks: _Blocks = {}
        for member in members:
            node, newest = self._nodes[member.stored.id], member.newest
            if newest is None or newest is node.newest or _other_head_frame(member) is not None:
                continue
            node.newest = newest
            for layout, numbers in newest[0].blocks:
                if layout == node.layout and node.plan is not None:
                    blocks.setdefault(node.plan.shape, []).append((node, newest, numbers))
                    break
        return blocks

    def _is_other(self, member: FleetMember, layouts: Mapping[int, ColumnLayout]) -> bool:
        """Return whether the rows of a node must be made again."""
        node = self._nodes.get(member.stored.id)
        if node is None or node.key != _device_key(member, layouts):
            return True
        node.stored = member.stored
        return False

    # --- rows

    def _rebuild(
        self,
        members: Iterable[FleetMember],
        layouts: Mapping[int, ColumnLayout],
    ) -> NDArray[np.int64]:
        """Make the rows of all nodes again; keep what is known of GPUs that are still there."""
        places = {(row.node, row.uuid): place for place, row in enumerate(self.rows)}
        before, nodes = self._nodes, {}
        rows: list[GpuRow] = []
        for member in sorted(members, key=lambda member: natural_key(member.name)):
            number = member.stored.id
            own = list(_make_rows(number, member.name, _find_devices(member, layouts)))
            layout = _gpu_layout(member, layouts)
            made = _NodeRows(member.stored, _device_key(member, layouts), len(rows), len(own))
            made.layout = layout
            made.plan = None if layout is None or not own else _make_plan(layouts[layout])
            old = before.get(number)
            if old is not None and old.key == made.key:
                made.newest, made.slow, made.holdings = old.newest, old.slow, old.holdings
                made.findings, made.state = old.findings, old.state
            nodes[number] = made
            rows += own
        moved = np.array([places.get((row.node, row.uuid), -1) for row in rows], np.int64)
        kept = moved >= 0
        old_columns, old_users = self._columns(), self.users
        self.rows, self._nodes = rows, nodes
        self._allocate(len(rows))
        for column, old_column in zip(self._columns(), old_columns, strict=True):
            column[kept] = old_column[moved[kept]]
        self.users = [old_users[place] if place >= 0 else () for place in moved]
        return moved

    def _columns(self) -> list[NDArray[Any]]:
        return [
            *self.values.values(),
            self.times,
            self.is_lost,
            self.is_faulty,
            self.has_process,
            self.has_people,
            self.has_harvest,
            self.knows_processes,
        ]

    # --- readings

    def _read_state(self, node: _NodeRows, member: FleetMember) -> None:
        """Read whether a node is lost, and which of its GPUs are faulty."""
        node.state = member.state
        self.is_lost[node.rows] = member.state == "lost"
        node.findings = member.findings
        faulty = {
            str(finding.gpu) if finding.label is None else finding.label
            for finding in member.findings
            if finding.id == MULTI_CAUSE_FINDING and finding.gpu is not None
        }
        for place in range(node.base, node.base + node.count):
            label = self.rows[place].label
            self.is_faulty[place] = label in faulty or label.partition(":")[0] in faulty

    def _read_blocks(self, group: Sequence[_NodeBlock]) -> None:
        """Read the blocks of several nodes with the same columns."""
        plan = group[0][0].plan
        if plan is None or any(len(numbers) != plan.block_bytes for _, _, numbers in group):
            return  # the head does not accept such frames
        count = plan.gpus
        bases, times = [], []
        for node, newest, _ in group:
            node.newest = newest
            bases.append(node.base)
            times.append((newest[0].time_us + newest[1]) / 1e6)
        raw = np.frombuffer(b"".join([numbers for _, _, numbers in group]), np.uint8)
        raw = raw.reshape(len(group), plan.block_bytes)
        rows = np.asarray(bases)[:, None] + np.arange(count)
        known = set()
        for name, offset, width, steps, size in plan.places:
            known.add(name)
            numbers = raw[:, offset : offset + width * count].view("<i8" if width == 8 else "<i4")
            values = numbers / steps if steps > 1 else numbers * float(size)
            values[numbers == (MISSING_WIDE if width == 8 else MISSING_NARROW)] = np.nan
            self.values[name][rows] = values
        for name in METRICS:
            if name not in known:
                self.values[name][rows] = np.nan
        self.times[rows] = np.asarray(times)[:, None]
        self.is_new[rows] = True

    def _read_processes(
        self,
        node: _NodeRows,
        member: FleetMember,
        slow: PackedFrame,
        layouts: Mapping[int, ColumnLayout],
        *,
        again: bool,
    ) -> None:
        """Read which processes are on the GPUs, from the layout that lists them."""
        for number, _ in reversed(slow.blocks):  # it is the last one
            layout = layouts.get(number)
            if layout is None or layout.scope != "process":
                continue
            if layout.subjects and "gpu" not in layout.subjects[0]:
                continue
            if number != node.holdings or again:
                node.holdings = number
                pids: dict[str, list[int]] = {}
                for subject in layout.subjects:
                    pid = subject.get("pid")
                    if isinstance(pid, int):
                        pids.setdefault(str(subject.get("gpu")), []).append(pid)
                self._set_processes(node, pids, member.processes)
            return

    def _read_frame(self, node: _NodeRows, frame: Frame, *, processes: bool) -> None:
        """Read a frame that is decoded already, because it came from another head."""
        if frame is node.newest and not processes:
            return
        is_new = frame is not node.newest
        node.newest = frame
        for place, gpu in enumerate(frame.gpus, node.base):
            for name in METRICS:
                value = gpu.get(name)
                self.values[name][place] = np.nan if value is None else value
        self.times[node.rows] = frame.time
        self.is_new[node.rows] = is_new
        pids = {gpu.device.uuid: [use.pid for use in gpu.processes or ()] for gpu in frame.gpus}
        self._set_processes(node, pids, {process.pid: process.identity for process in frame.processes})

    def _set_processes(
        self,
        node: _NodeRows,
        pids: Mapping[str, Sequence[int]],
        identities: Mapping[int, ProcessIdentity],
    ) -> None:
        for place in range(node.base, node.base + node.count):
            found = pids.get(self.rows[place].uuid, ())
            owners = [identities[pid].owner for pid in found if pid in identities]
            harvests = [is_harvest_job(owner.job) for owner in owners]
            users = {
                owner.user
                for owner, is_harvest in zip(owners, harvests, strict=True)
                if owner.user and not is_harvest
            }
            self.has_process[place] = bool(found)
            self.has_harvest[place] = any(harvests)
            self.has_people[place] = bool(users)
            self.users[place] = tuple(users)
        self.knows_processes[node.rows] = True


def _other_head_frame(member: FleetMember) -> Frame | None:
    """Return the newest frame of a node that is at another head; None for a node that is here."""
    frame = member.other_head.frame
    if frame is None or not member.is_at_other_head:
        return None
    newest = member.newest
    return frame if newest is None or newest[0].time_us + newest[1] < frame.time * 1e6 else None


def _gpu_layout(member: FleetMember, layouts: Mapping[int, ColumnLayout]) -> int | None:
    """Return the layout of the GPUs in a node's newest frame."""
    newest = member.newest
    for number, _ in newest[0].blocks if newest else ():
        layout = layouts.get(number)
        if layout is not None and layout.scope == "gpu":
            return number
    return None


def _device_key(member: FleetMember, layouts: Mapping[int, ColumnLayout]) -> object:
    """Return a key that changes with the node's GPUs."""
    frame = _other_head_frame(member)
    if frame is not None:
        return member.name, tuple(gpu.device.uuid for gpu in frame.gpus)
    number = _gpu_layout(member, layouts)
    return member.name, number if number is not None else tuple(d.uuid for d in member.last_devices)


def _find_devices(member: FleetMember, layouts: Mapping[int, ColumnLayout]) -> Sequence[Device]:
    frame = _other_head_frame(member)
    if frame is not None:
        return [gpu.device for gpu in frame.gpus]
    number = _gpu_layout(member, layouts)
    if number is None:
        return member.last_devices
    with suppress(ValueError):  # the other readers of this frame report it
        return [device_from_subject(subject) for subject in layouts[number].subjects]
    return ()


def _make_rows(node: int, name: str, devices: Iterable[Device]) -> Iterable[GpuRow]:
    found = list(devices)
    split = {device.parent_uuid for device in found}
    for device in found:
        total = device.facts.get("memory_total_bytes")
        yield GpuRow(
            node,
            name,
            device.label,
            device.uuid,
            device.uuid not in split,
            device.mig_index is not None,
            np.nan if total is None else float(total),
        )


def _make_plan(layout: ColumnLayout) -> _BlockPlan:
    count = len(layout.subjects)
    places = []
    offset = 0
    for columns, width in ((layout.wide, 8), (layout.narrow, 4)):
        for column in columns:
            if column.name in METRICS:
                places.append(_ColumnPlace(column.name, offset, width, column.steps, column.size))
            offset += width * count
    shape = hash((count, layout.wide, layout.narrow))
    return _BlockPlan(shape, count, layout.block_bytes, tuple(places))
