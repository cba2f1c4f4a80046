"""The processes that held GPUs in a time range, and the index of stored processes by which their owners and ancestors are found."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from msgspec import Struct, field

from gpulse.reports.time_grid import ReportContext
from gpulse.store.incomplete_answers import collect_missing
from gpulse.store.store import GpuHolding, GpuShare, Query, StoredGpu, StoredProcess

_MAX_ANCESTORS = 64
_SLACK_SECONDS = 60.0
"""A process may be seen on a GPU a little before or after the time that is stored for it."""

ProcessKey = tuple[int, int, float | None]
"""Node, PID and start time of a process."""


class ProcessInfo(NamedTuple):
    """Identity and owner of a process."""

    key: ProcessKey
    user: str | None = None
    job: str | None = None
    container: str | None = None
    pod: str | None = None
    name: str | None = None
    command: tuple[str, ...] = ()
    first_seen: float | None = None
    """None for a process that is not stored."""
    ended: float | None = None

    @property
    def program(self) -> str | None:
        """Its command line, or else its name."""
        return " ".join(self.command) or self.name


class ProcessIndex:
    """Processes of a time range by node and PID."""

    def __init__(self, processes: Iterable[StoredProcess]) -> None:
        self._by_pid: dict[tuple[int, int], list[StoredProcess]] = {}
        for process in processes:
            self._by_pid.setdefault((process.node, process.pid), []).append(process)

    def find(self, held: GpuHolding | GpuShare) -> ProcessInfo:
        """Return the process that held a GPU; one that is not stored has only its key."""
        return _build_info(self._stored(held), held)

    def find_root(self, held: GpuHolding | GpuShare) -> ProcessInfo:
        """Return the topmost known ancestor of the process that held a GPU."""
        found = self._stored(held)
        if found is None:
            return _build_info(None, held)
        *_, top = self.lineage(found)
        return _build_info(top, held)

    def lineage(self, process: StoredProcess) -> Iterator[StoredProcess]:
        """Yield a process and its known ancestors, the closest first."""
        found: StoredProcess | None = process
        for _ in range(_MAX_ANCESTORS):
            if found is None:
                return
            yield found
            found = self._parent(found)

    def _stored(self, held: GpuHolding | GpuShare) -> StoredProcess | None:
        """Return the process with this PID and start time; if the start time is unknown, one that lived at that time."""
        if held.pid is None:
            return None
        candidates = self._by_pid.get((held.node, held.pid), [])
        if held.start is not None:
            return next((process for process in candidates if process.start == held.start), None)
        near = [
            process for process in candidates if _lived_during(process, held.first or 0.0, held.last or 0.0)
        ]
        return near[-1] if near else None

    def _parent(self, child: StoredProcess) -> StoredProcess | None:
        """Return the process that had the parent's PID when the child was first seen."""
        pid = child.identity.get("parent_pid")
        for process in self._by_pid.get((child.node, pid), []) if isinstance(pid, int) else []:
            if process is not child and _lived_during(process, child.first_seen, child.first_seen):
                return process
        return None


def _lived_during(process: StoredProcess, first: float, last: float) -> bool:
    return process.first_seen - _SLACK_SECONDS <= last and (
        process.ended is None or process.ended + _SLACK_SECONDS >= first
    )


def _build_info(process: StoredProcess | None, held: GpuHolding | GpuShare) -> ProcessInfo:
    if process is None:
        return ProcessInfo((held.node, held.pid or 0, held.start))
    identity, owner = process.identity, stored_owner(process)
    command = identity.get("command")
    return ProcessInfo(
        process_key(process),
        user=text_or_none(owner.get("user")),
        job=text_or_none(owner.get("job")),
        container=text_or_none(owner.get("container")),
        pod=text_or_none(owner.get("pod")),
        name=text_or_none(identity.get("name")),
        command=tuple(str(word) for word in command) if isinstance(command, (list, tuple)) else (),
        first_seen=process.first_seen,
        ended=process.ended,
    )


def process_key(process: StoredProcess) -> ProcessKey:
    """Return the key that identifies a process."""
    return process.node, process.pid, process.start


def stored_owner(process: StoredProcess) -> Mapping[str, Any]:
    """Return the stored fields of a process's `model.process.Owner`."""
    owner = process.identity.get("owner")
    return owner if isinstance(owner, Mapping) else {}


def text_or_none(value: Any) -> str | None:
    """Return a non-empty text; None for anything else."""
    return value if isinstance(value, str) and value else None


STEP_SECONDS = 60.0
"""Held and idle times are computed in steps of one minute."""

GpuKey = tuple[int, str]
"""Node and UUID of a GPU."""


class GpuTime:
    """GPU time of some processes, and what the GPUs did during it."""

    def __init__(self) -> None:
        self.seconds = self.known = self.busy = self.idle = 0.0
        self.energy: float | None = None
        self.memory: float | None = None
        self.first, self.last = float("inf"), float("-inf")
        self.gpus: set[GpuKey] = set()
        self.processes: dict[ProcessKey, float] = {}
        """Seconds by process."""
        self._largest: tuple[float, ProcessInfo] | None = None

    def add(self, share: GpuShare, process: ProcessInfo) -> None:
        """Add a process's share of a GPU."""
        self.seconds += share.seconds
        self.known += share.known_seconds
        self.busy += share.busy_seconds
        self.idle += share.idle_seconds
        if share.energy_joules is not None:
            self.energy = (self.energy or 0.0) + share.energy_joules
        if share.memory_max is not None:
            self.memory = max(self.memory or 0.0, share.memory_max)
        if share.first is not None and share.last is not None:
            self.first, self.last = min(self.first, share.first), max(self.last, share.last)
        seconds = self.processes[process.key] = self.processes.get(process.key, 0.0) + share.seconds
        if self._largest is None or seconds > self._largest[0]:
            self._largest = seconds, process
        self.gpus.add((share.node, share.uuid))

    def include(self, other: GpuTime) -> None:
        """Add another GPU time."""
        self.seconds += other.seconds
        self.known += other.known
        self.busy += other.busy
        self.idle += other.idle
        if other.energy is not None:
            self.energy = (self.energy or 0.0) + other.energy
        if other.memory is not None:
            self.memory = max(self.memory or 0.0, other.memory)
        self.first, self.last = min(self.first, other.first), max(self.last, other.last)
        self.gpus |= other.gpus
        for key, seconds in other.processes.items():
            self.processes[key] = self.processes.get(key, 0.0) + seconds
        if other._largest is not None:
            key = other._largest[1].key
            if self._largest is None or self.processes[key] > self._largest[0]:
                self._largest = self.processes[key], other._largest[1]

    @property
    def program(self) -> str | None:
        """Program of the process with the most GPU time."""
        return self._largest[1].program if self._largest else None


def find_capacity(shares: Iterable[GpuShare], gpus: Iterable[StoredGpu]) -> dict[GpuKey, float]:
    """Return how many seconds each GPU was available; a split GPU is replaced by its MIG instances."""
    split = {(gpu.node, gpu.device.get("parent_uuid")) for gpu in gpus}
    found: dict[GpuKey, float] = {}
    for share in shares:
        key = share.node, share.uuid
        if key not in split:
            found[key] = found.get(key, 0.0) + share.seen_seconds
    return found


_MAX_PROCESSES = 2000
_ENDED_AFTER_SECONDS = 60.0
"""A process that is not stored counts as ended when it was not seen for this long."""
_MARGIN_SECONDS = 120.0
"""Stored processes are also read for this long before and after a range, since they are seen on a GPU a little later."""


class ProcessGpu(Struct, frozen=True, kw_only=True):
    """What a process held of one GPU."""

    gpu: str | None
    uuid: str
    start: float = field(name="from")
    end: float = field(name="to")
    memory_bytes_mean: float | None
    memory_bytes_max: float | None
    sm_ratio_mean: float | None


class ProcessRow(Struct, frozen=True, kw_only=True):
    """A process and the GPUs that it held."""

    node: str
    pid: int
    start_time: float | None
    first_seen: float
    ended: float | None
    user: str | None
    job: str | None
    container: str | None
    pod: str | None
    name: str | None
    command: list[str]
    gpus: list[ProcessGpu]


class ProcessReport(Struct, frozen=True, kw_only=True):
    """The processes that held GPUs, newest first."""

    start: float = field(name="from")
    end: float = field(name="to")
    truncated: bool
    processes: list[ProcessRow]
    incomplete: list[str]
    """Sentences about missing data."""


def build_process_report(
    context: ReportContext, query: Query, *, users: Collection[str], jobs: Collection[str]
) -> ProcessReport:
    """Return the processes that held GPUs, newest first.

    Args:
        context: What the answer is computed from.
        query: Time range, nodes and GPUs.
        users: Only processes of these users; empty for all.
        jobs: Only processes of these jobs; empty for all.
    """
    found: list[_HeldGpus] = []
    with collect_missing() as incomplete:
        if query.start < query.end:
            held = context.store.gpu_holders(query)
            known = (holding for holding in held if holding.node in context.node_names)
            found = _group_by_process(known, read_processes(context, query), users, jobs)
        labels = context.gpu_labels()
    return ProcessReport(
        start=query.start,
        end=query.end,
        truncated=len(found) > _MAX_PROCESSES,
        processes=[_build_row(one, query.end, context.node_names, labels) for one in found[:_MAX_PROCESSES]],
        incomplete=incomplete,
    )


def read_processes(context: ReportContext, query: Query, pids: Collection[int] | None = None) -> ProcessIndex:
    """Return the processes that lived in a time range.

    Args:
        context: What the answer is computed from.
        query: Time range, nodes and deadline.
        pids: Only these; their ancestors are unknown then. None for all.
    """
    query = Query(
        query.start - _MARGIN_SECONDS,
        query.end + _MARGIN_SECONDS,
        nodes=query.nodes,
        pids=None if pids is None else frozenset(pids),
        deadline=query.deadline,
    )
    return ProcessIndex(context.store.processes(query))


class _HeldGpus(NamedTuple):
    """A process and the GPUs that it held."""

    process: ProcessInfo
    held: list[GpuHolding]

    @property
    def first(self) -> float:
        """When it was first seen."""
        known = self.process.first_seen
        return min(holding.first for holding in self.held) if known is None else known

    def ended(self, end: float) -> float | None:
        """Return when it ended; None while it lives."""
        if self.process.first_seen is not None:
            return self.process.ended
        last = max(holding.last for holding in self.held)
        return last if last < end - _ENDED_AFTER_SECONDS else None


def _group_by_process(
    held: Iterable[GpuHolding], processes: ProcessIndex, users: Collection[str], jobs: Collection[str]
) -> list[_HeldGpus]:
    found: dict[ProcessKey, _HeldGpus] = {}
    for holding in held:
        process = processes.find(holding)
        if (users and process.user not in users) or (jobs and process.job not in jobs):
            continue
        found.setdefault(process.key, _HeldGpus(process, [])).held.append(holding)
    return sorted(found.values(), key=lambda one: (-one.first, one.process.key[:2]))


def _build_row(
    found: _HeldGpus, end: float, names: Mapping[int, str], labels: Mapping[tuple[int, str], str]
) -> ProcessRow:
    process = found.process
    node, pid, start = process.key
    return ProcessRow(
        node=names[node],
        pid=pid,
        start_time=start,
        first_seen=found.first,
        ended=found.ended(end),
        user=process.user,
        job=process.job,
        container=process.container,
        pod=process.pod,
        name=process.name,
        command=list(process.command),
        gpus=[
            ProcessGpu(
                gpu=labels.get((node, holding.uuid)),
                uuid=holding.uuid,
                start=holding.first,
                end=holding.last,
                memory_bytes_mean=holding.memory_mean,
                memory_bytes_max=holding.memory_max,
                sm_ratio_mean=holding.sm_mean,
            )
            for holding in sorted(found.held, key=lambda holding: (holding.first, holding.uuid))
        ],
    )
