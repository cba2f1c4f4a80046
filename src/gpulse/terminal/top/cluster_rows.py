"""Rows of the cluster view: nodes, the GPUs of a node, jobs and findings, each sorted and filtered by the state.

The state is immutable: tab, open node, sort orders, filter and cursors.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple

import msgspec

from gpulse.cluster.protocol.answers import (
    ClusterOccupancy,
    Findings,
    GpuHolderAnswer,
    GpuOccupancy,
    NodeFinding,
    NodeOccupancy,
)
from gpulse.model.finding import SEVERITIES, FindingGroup, group_similar_findings
from gpulse.model.gpu_state import FAULT, GPU_STATES, GpuState
from gpulse.model.harvest_status import is_harvest_job
from gpulse.model.safe_text import natural_key
from gpulse.terminal.top.view_state import ListCursor, next_choice

_NO_SEVERITY = -1
_NODE_STATES = {"missing": 3, "lost": 3, "late": 2, "healthy": 0}
"""The higher, the more a node needs attention."""
Tab = Literal["nodes", "jobs", "findings"]
Table = Literal["nodes", "jobs", "findings", "gpus"]
"""A table on the screen: that of a tab, or the GPUs of the open node."""
TABS: tuple[Tab, ...] = ("nodes", "jobs", "findings")

SORT_ORDERS: Mapping[Table, Sequence[str]] = {
    "nodes": ("attention", "name", "utilization", "free", "memory", "power"),
    "jobs": ("gpus", "idle", "utilization", "memory", "user", "name", "elapsed"),
    "gpus": ("gpu", "utilization", "memory", "power", "user"),
    "findings": (),
}
"""Columns that each table can be sorted by, in the order of the key `s`; findings are always worst first."""
_ASCENDING = frozenset({"name", "user", "gpu"})
"""Columns that are sorted from the smallest value by default."""


@dataclass(frozen=True, slots=True)
class ClusterFilter:
    """Filter of nodes, jobs, GPUs and findings; an empty field matches everything."""

    user: str = ""
    """A user name, with `*` and `?` as in a shell."""
    node: str = ""
    """A node's name, with `*` and `?`."""
    state: str = ""
    """A state of GPUs, such as `free`."""
    text: tuple[str, ...] = ()
    """Words that must all occur, in any case."""

    def __bool__(self) -> bool:
        return bool(self.user or self.node or self.state or self.text)

    def __str__(self) -> str:
        named = {"user": self.user, "node": self.node, "state": self.state}
        return " ".join([*(f"{name}:{value}" for name, value in named.items() if value), *self.text])

    def admits(self, *, users: Iterable[str], node: str, states: Collection[str], text: str) -> bool:
        """Return whether something with these users, on this node, with GPUs in these states matches."""
        if self.user and not any(fnmatchcase(user, self.user) for user in users):
            return False
        if self.node and not fnmatchcase(node, self.node):
            return False
        if self.state and states and not any(state.startswith(self.state) for state in states):
            return False
        return all(word.lower() in text.lower() for word in self.text)


def parse_cluster_filter(typed: str) -> ClusterFilter:
    """Parse a filter such as `user:ada node:gpu-0* state:idle train`; every part is optional."""
    named = {"user": "", "node": "", "state": ""}
    text: list[str] = []
    for word in typed.split():
        name, colon, value = word.partition(":")
        if colon and name in named:
            named[name] = value
        else:
            text.append(word)
    return ClusterFilter(named["user"], named["node"], named["state"], tuple(text))


@dataclass(frozen=True, slots=True)
class SortOrder:
    """Column and direction of a table."""

    column: str
    descending: bool = True


def _default_orders() -> Mapping[Table, SortOrder]:
    return {
        table: SortOrder(columns[0], columns[0] not in _ASCENDING)
        for table, columns in SORT_ORDERS.items()
        if columns
    }


@dataclass(frozen=True, slots=True)
class ClusterViewState:
    """All choices of the user."""

    tab: Tab = "nodes"
    node: str | None = None
    """The open node; None shows the tab."""
    orders: Mapping[Table, SortOrder] = field(default_factory=_default_orders)
    query: ClusterFilter = field(default_factory=ClusterFilter)
    paused: bool = False
    cursors: Mapping[Table, ListCursor[str]] = field(default_factory=dict)

    @property
    def table(self) -> Table:
        """The table on the screen."""
        return self.tab if self.node is None else "gpus"

    @property
    def order(self) -> SortOrder | None:
        """Order of the table on the screen; None if it has only one."""
        return self.orders.get(self.table)

    @property
    def cursor(self) -> ListCursor[str]:
        """Cursor of the table on the screen."""
        return self.cursors.get(self.table, ListCursor())

    def with_cursor(self, cursor: ListCursor[str]) -> ClusterViewState:
        """Set the cursor of the table on the screen."""
        return replace(self, cursors={**self.cursors, self.table: cursor})

    def sorted_by(self, column: str) -> ClusterViewState:
        """Sort by a column in its default direction, or reverse it; no change if this table lacks the column."""
        if column not in SORT_ORDERS[self.table]:
            return self
        if self.order is not None and column == self.order.column:
            return self.reversed()
        return self._ordered(SortOrder(column, column not in _ASCENDING))

    def sorted_next(self, step: int) -> ClusterViewState:
        """Sort by the next or the previous column."""
        columns, order = SORT_ORDERS[self.table], self.order
        if order is None:
            return self
        return self.sorted_by(columns[(columns.index(order.column) + step) % len(columns)])

    def reversed(self) -> ClusterViewState:
        """Reverse the direction."""
        order = self.order
        return self if order is None else self._ordered(replace(order, descending=not order.descending))

    def _ordered(self, order: SortOrder) -> ClusterViewState:
        return replace(self, orders={**self.orders, self.table: order})

    def with_tab(self, tab: Tab) -> ClusterViewState:
        """Show a tab."""
        return replace(self, tab=tab, node=None)

    def with_next_tab(self) -> ClusterViewState:
        """Show the next tab."""
        return self.with_tab(TABS[(TABS.index(self.tab) + 1) % len(TABS)])

    def with_node(self, name: str) -> ClusterViewState:
        """Open a node, with the cursor at its first GPU."""
        return replace(self, node=name, cursors={**self.cursors, "gpus": ListCursor()})

    def went_back(self) -> ClusterViewState:
        """Close the open node; without one, clear the filter."""
        return replace(self, node=None) if self.node is not None else self.filtered(ClusterFilter())

    def filtered(self, query: ClusterFilter) -> ClusterViewState:
        """Show only what matches a filter."""
        return replace(self, query=query)

    def next_user(self, users: Sequence[str]) -> ClusterViewState:
        """Show only the next user's rows; after the last user, all rows."""
        return self.filtered(replace(self.query, user=next_choice(self.query.user, users)))

    def with_pause(self) -> ClusterViewState:
        """Pause or continue."""
        return replace(self, paused=not self.paused)


class ClusterSnapshot(NamedTuple):
    """Answers of the head at one moment."""

    occupancy: ClusterOccupancy
    findings: Findings


@dataclass(frozen=True, slots=True)
class NodeRow:
    """One node, or an expected one that never reported."""

    name: str
    state: str
    """`healthy`, `late`, `lost` or `missing`."""
    seen: float | None
    gpus: Sequence[GpuOccupancy]
    findings: Sequence[NodeFinding]

    @property
    def users(self) -> tuple[str, ...]:
        """The users of its GPUs, each once."""
        return tuple(dict.fromkeys(user for gpu in self.gpus for user in gpu.users))

    @property
    def severity(self) -> int:
        """How severe its worst finding is; -1 without any."""
        return max((SEVERITIES.index(one.severity) for one in self.findings), default=_NO_SEVERITY)

    def count(self, state: GpuState) -> int:
        """Return how many of its GPUs are in a state."""
        return sum(gpu.state == state for gpu in self.gpus)

    @property
    def utilization(self) -> float | None:
        """The mean activity of its GPUs."""
        return mean(gpu.utilization_ratio for gpu in self.gpus)

    @property
    def power(self) -> float | None:
        """The power of its GPUs."""
        return total(gpu.power_watts for gpu in self.gpus)

    @property
    def memory(self) -> float | None:
        """The used memory of its GPUs."""
        return total(gpu.memory_used_bytes for gpu in self.gpus)


@dataclass(frozen=True, slots=True)
class JobRow:
    """One job, or one process without a job, and its GPUs."""

    key: str
    name: str
    user: str
    program: str
    gpus: Sequence[tuple[str, GpuOccupancy]]
    """Each with the name of its node."""
    start: float | None

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes of its GPUs, each once."""
        return tuple(dict.fromkeys(node for node, _ in self.gpus))

    @property
    def utilization(self) -> float | None:
        """The mean activity of its GPUs."""
        return mean(gpu.utilization_ratio for _, gpu in self.gpus)

    @property
    def memory(self) -> float | None:
        """The used memory of its GPUs."""
        return total(gpu.memory_used_bytes for _, gpu in self.gpus)

    @property
    def idle(self) -> int:
        """How many of its GPUs are held idle."""
        return sum(gpu.state == "idle" for _, gpu in self.gpus)


def mean(values: Iterable[float | None]) -> float | None:
    """Return the mean of the known values; None without any."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def total(values: Iterable[float | None]) -> float | None:
    """Return the sum of the known values; None without any."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def count_states(occupancy: ClusterOccupancy) -> dict[GpuState, int]:
    """Return the number of GPUs in each state."""
    return {state: occupancy.counts.get(state, 0) for state in GPU_STATES}


def needs_attention(finding: NodeFinding) -> bool:
    """Return whether a finding asks for attention: notes and silenced findings do not."""
    return finding.severity != "info" and not finding.silenced


def build_nodes(snapshot: ClusterSnapshot) -> list[NodeRow]:
    """Return all nodes, also those that never reported."""
    by_node: dict[str, list[NodeFinding]] = {}
    for finding in snapshot.findings.findings:
        if finding.node is not None and needs_attention(finding):
            by_node.setdefault(finding.node, []).append(finding)
    rows = [
        NodeRow(node.node, node.state, node.seen, node.gpus, by_node.get(node.node, ()))
        for node in snapshot.occupancy.nodes
    ]
    known = {row.name for row in rows}
    rows += [
        NodeRow(name, "missing", None, (), by_node.get(name, ()))
        for name in snapshot.occupancy.missing_nodes
        if name not in known
    ]
    return rows


def attention(row: NodeRow) -> tuple[int, int, int, int]:
    """Return how much a node needs a person: by its state, faults, worst finding, and GPUs that are held idle."""
    return _NODE_STATES.get(row.state, 0), row.count("faulty"), row.severity, row.count("idle")


def _known(value: float | None) -> float:
    return -1.0 if value is None else value


_NODE_KEYS: Mapping[str, Callable[[NodeRow], Any]] = {
    "attention": attention,
    "name": lambda row: natural_key(row.name),
    "utilization": lambda row: _known(row.utilization),
    "free": lambda row: row.count("free") + row.count("harvested"),
    "memory": lambda row: _known(row.memory),
    "power": lambda row: _known(row.power),
}
_JOB_KEYS: Mapping[str, Callable[[JobRow], Any]] = {
    "gpus": lambda row: len(row.gpus),
    "idle": lambda row: row.idle,
    "utilization": lambda row: _known(row.utilization),
    "memory": lambda row: _known(row.memory),
    "user": lambda row: natural_key(row.user),
    "name": lambda row: natural_key(row.name),
    "elapsed": lambda row: -_known(row.start),
}
_GPU_KEYS: Mapping[str, Callable[[GpuOccupancy], Any]] = {
    "gpu": lambda gpu: natural_key(gpu.label),
    "utilization": lambda gpu: _known(gpu.utilization_ratio),
    "memory": lambda gpu: _known(gpu.memory_used_bytes),
    "power": lambda gpu: _known(gpu.power_watts),
    "user": lambda gpu: natural_key(",".join(gpu.users)),
}


def sort_nodes(rows: Iterable[NodeRow], sort: str, *, descending: bool) -> list[NodeRow]:
    """Return nodes in an order; equal ones by name."""
    named = sorted(rows, key=lambda row: natural_key(row.name))
    return sorted(named, key=_NODE_KEYS[sort], reverse=descending)


def sort_jobs(rows: Iterable[JobRow], sort: str, *, descending: bool) -> list[JobRow]:
    """Return jobs in an order; equal ones by name."""
    named = sorted(rows, key=lambda row: natural_key(row.name))
    return sorted(named, key=_JOB_KEYS[sort], reverse=descending)


def sort_gpus(gpus: Iterable[GpuOccupancy], sort: str, *, descending: bool) -> list[GpuOccupancy]:
    """Return the GPUs of a node in an order; equal ones by index."""
    named = sorted(gpus, key=lambda gpu: natural_key(gpu.label))
    return sorted(named, key=_GPU_KEYS[sort], reverse=descending)


def filter_nodes(rows: Iterable[NodeRow], query: ClusterFilter) -> list[NodeRow]:
    """Return the nodes that match a filter."""
    return [
        row
        for row in rows
        if query.admits(
            users=row.users,
            node=row.name,
            states=[gpu.state for gpu in row.gpus],
            text=" ".join([row.name, row.state, *row.users, *(_text_of(gpu) for gpu in row.gpus)]),
        )
    ]


def filter_jobs(rows: Iterable[JobRow], query: ClusterFilter) -> list[JobRow]:
    """Return the jobs that match a filter."""
    return [
        row
        for row in rows
        if any(
            query.admits(
                users=(row.user,),
                node=node,
                states=[gpu.state for _, gpu in row.gpus],
                text=f"{row.name} {row.user} {row.program} {' '.join(row.nodes)}",
            )
            for node in row.nodes
        )
    ]


def filter_gpus(node: str, gpus: Iterable[GpuOccupancy], query: ClusterFilter) -> list[GpuOccupancy]:
    """Return the GPUs of a node that match a filter."""
    return [
        gpu
        for gpu in gpus
        if query.admits(
            users=gpu.users,
            node=node,
            states=[gpu.state],
            text=f"{node} {gpu.label} {gpu.state} {' '.join(gpu.users)} {_text_of(gpu)}",
        )
    ]


def filter_findings(
    findings: Iterable[NodeFinding], users: Mapping[str, Sequence[str]], query: ClusterFilter
) -> list[NodeFinding]:
    """Return the findings that match a filter; a user's are those of the GPUs that the user holds."""
    return [
        one
        for one in findings
        if needs_attention(one)
        and query.admits(
            users=users.get(finding_place(one), ()),
            node=one.node or "",
            states=(),
            text=f"{one.node} {one.id} {one.severity} {one.summary}",
        )
    ]


def finding_place(finding: NodeFinding) -> str:
    """Return the GPU that a finding is about, as `node:label`; only the node if it is about no GPU."""
    label = finding.label or (None if finding.gpu is None else str(finding.gpu))
    return f"{finding.node}" if label is None else f"{finding.node}:{label}"


def users_by_place(nodes: Iterable[NodeOccupancy]) -> dict[str, Sequence[str]]:
    """Return the users of each GPU, by `node:label`, and of each node."""
    found: dict[str, Sequence[str]] = {}
    for node in nodes:
        for gpu in node.gpus:
            found[f"{node.node}:{gpu.label}"] = gpu.users
        found[node.node] = [user for gpu in node.gpus for user in gpu.users]
    return found


def find_users(nodes: Iterable[NodeOccupancy]) -> list[str]:
    """Return all users who hold GPUs, sorted."""
    return sorted({user for node in nodes for gpu in node.gpus for user in gpu.users})


def _text_of(gpu: GpuOccupancy) -> str:
    return " ".join(f"{one.job or ''} {one.command or one.name or ''}" for one in gpu.holders or ())


def program_of(holder: GpuHolderAnswer) -> str:
    """Return the program of a process: its command line without the directory of its program."""
    first, _, rest = (holder.command or holder.name or "").partition(" ")
    return f"{first.rpartition('/')[2]} {rest}".strip()


def build_jobs(occupancy: ClusterOccupancy) -> list[JobRow]:
    """Return the jobs that hold GPUs; a process without a job is a job of its own."""
    gpus: dict[str, list[tuple[str, GpuOccupancy]]] = {}
    holders: dict[str, list[GpuHolderAnswer]] = {}
    for node in occupancy.nodes:
        for gpu in node.gpus:
            for holder in gpu.holders or ():
                key = job_key(node.node, holder)
                held = gpus.setdefault(key, [])
                if (node.node, gpu) not in held[-1:]:
                    held.append((node.node, gpu))
                holders.setdefault(key, []).append(holder)
    return [_job_row(key, holders[key], held) for key, held in gpus.items()]


def job_key(node: str, holder: GpuHolderAnswer) -> str:
    """Return what identifies the job of a process in the whole cluster."""
    if holder.job is not None and not is_harvest_job(holder.job):
        return holder.job
    return f"{node}/{holder.job or holder.pid}"


def _job_row(
    key: str, holders: Sequence[GpuHolderAnswer], gpus: Sequence[tuple[str, GpuOccupancy]]
) -> JobRow:
    first = holders[0]
    users = dict.fromkeys(one.user for one in holders if one.user)
    starts = [one.start_time for one in holders if one.start_time is not None]
    return JobRow(
        key=key,
        name=first.job or f"pid {first.pid}",
        user=",".join(users),
        program=program_of(first),
        gpus=gpus,
        start=min(starts, default=None),
    )


def group_findings(findings: Iterable[NodeFinding]) -> list[FindingGroup]:
    """Return findings with equal ones of several GPUs together, worst first."""
    return group_similar_findings([msgspec.to_builtins(one) for one in findings])


def finding_of(gpu: GpuOccupancy, node: NodeRow) -> NodeFinding | None:
    """Return the worst finding about a GPU; a fault first."""
    place = f"{node.name}:{gpu.label}"
    own = [one for one in node.findings if finding_place(one) == place]
    return max(own, key=lambda one: (one.id == FAULT, SEVERITIES.index(one.severity)), default=None)
