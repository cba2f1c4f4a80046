"""Find who holds which GPUs in the newest frames of all nodes, and whether these GPUs are used."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Literal, NamedTuple

from gpulse.model.frame import Frame, GpuReading
from gpulse.model.job import Job
from gpulse.model.process import Owner, ProcessReading
from gpulse.reports.gpu_process_spans import WORK_METRICS

Use = Literal["used", "unused", "unknown"]
HARVEST_PREFIX = "harvest:"
"""Jobs of a harvest give their GPUs back as soon as somebody else wants them."""
MAX_NAME_CHARACTERS = 256
"""Holders with a longer user or job name are ignored; no system has such names."""
MAX_HOLDERS = 20_000
"""Maximum over all nodes, to limit the head's memory."""
_FIRST_USER_PID = 2
"""Processes whose parent is process 1 have nothing in common."""


class Holder(NamedTuple):
    """A job, or a user without a job on some GPUs of one node."""

    job: str | None = None
    """Such as `slurm:4711`; the fields below are empty for a job, which may be on several nodes."""
    user: str | None = None
    node: str = ""
    gpus: tuple[str, ...] = ()
    """UUIDs of GPUs whose processes belong together."""


class HeldPlace(NamedTuple):
    """The part of a holding that is on one node."""

    node: str
    gpus: tuple[tuple[str, str], ...]
    """Label and UUID of each GPU."""
    processes: tuple[tuple[int, float], ...] = ()
    """PID and start time of each process on them; 0 when the start time is unknown."""


class Holding(NamedTuple):
    """The GPUs of a holder at one moment."""

    holder: Holder
    users: frozenset[str]
    """Its users as far as they are known; processes of several users may claim the same job."""
    places: tuple[HeldPlace, ...]
    """In order of the nodes' names."""
    use: Use

    @property
    def user(self) -> str | None:
        """Its user; None when it is unknown, or when several users claim the job."""
        return next(iter(self.users)) if len(self.users) == 1 else None

    @property
    def nodes(self) -> list[str]:
        """Names of the nodes."""
        return [place.node for place in self.places]


class NodeSample(NamedTuple):
    """A node at one moment."""

    name: str
    frame: Frame | None
    """The newest frame; None when it is too old, or when the node is not connected to this head."""
    jobs: frozenset[str] = frozenset()
    """Jobs that were on it according to its last reports."""


class HoldingsView:
    """All holdings at one moment, and what is not known about them."""

    def __init__(self, threshold: float, nodes: Iterable[NodeSample] = ()) -> None:
        """Find the holdings.

        Args:
            threshold: A GPU whose activity is at most this is unused.
            nodes: Nodes of the head; `add` adds others.
        """
        self._threshold = threshold
        self._holdings: dict[Holder, Holding] = {}
        self._doubtful_jobs: set[str] = set()
        self._certain: dict[str, frozenset[str]] = {}
        """UUIDs of the GPUs whose holders are all known, by node."""
        for node in nodes:
            self.add(node)

    def add(self, node: NodeSample) -> None:
        """Add the holdings on one more node."""
        if node.frame is None:
            self._doubtful_jobs |= node.jobs
            return
        found = _NodeHoldings(node.name, node.frame, self._threshold)
        self._certain[node.name] = found.certain
        for holding in found.holdings():
            self._add(holding)

    @property
    def holdings(self) -> dict[Holder, Holding]:
        """All holdings; whether a job that may also be on a silent node is idle is unknown."""
        return self._holdings | {
            known.holder: known._replace(use="unknown")
            for job in self._doubtful_jobs
            if (known := self._holdings.get(Holder(job))) is not None and known.use == "unused"
        }

    def _add(self, holding: Holding) -> None:
        before = self._holdings.get(holding.holder)
        if before is not None:
            holding = Holding(
                holding.holder,
                before.users | holding.users,
                tuple(sorted((*before.places, *holding.places))),
                combine_uses((before.use, holding.use)),
            )
        elif len(self._holdings) >= MAX_HOLDERS:
            return
        self._holdings[holding.holder] = holding

    def is_released(self, places: Iterable[HeldPlace]) -> bool:
        """Return whether a holder that has no holding here has surely left all of its GPUs."""
        return all(
            {uuid for _, uuid in place.gpus} <= self._certain.get(place.node, frozenset()) for place in places
        )


def combine_uses(uses: Iterable[Use]) -> Use:
    """Return the use of several GPUs together: one that is used is enough, one that is unknown leaves it open."""
    found = set(uses)
    return "used" if "used" in found else "unused" if found == {"unused"} else "unknown"


def gpu_use(gpu: GpuReading, threshold: float) -> Use:
    """Return whether a GPU is used, by whichever of its activity readings is the highest."""
    known = [value for name in WORK_METRICS if (value := gpu.values.get(name)) is not None]
    return "unknown" if not known else "used" if max(known) > threshold else "unused"


class _NodeHoldings:
    """Holdings on one node."""

    def __init__(self, node: str, frame: Frame, threshold: float) -> None:
        self._node = node
        split = {gpu.device.parent_uuid for gpu in frame.gpus}
        self._gpus = {gpu.device.uuid: gpu for gpu in frame.gpus if gpu.device.uuid not in split}
        self._uses = {uuid: gpu_use(gpu, threshold) for uuid, gpu in self._gpus.items()}
        self._processes = {process.pid: process for process in frame.processes}
        self._jobs = {job.id: job for job in frame.jobs}
        self._held: dict[int, set[str]] = {}
        """GPUs of each process that computes."""
        for uuid, gpu in self._gpus.items():
            for process in gpu.processes or ():
                if process.kind != "graphics":
                    self._held.setdefault(process.pid, set()).add(uuid)

    @property
    def certain(self) -> frozenset[str]:
        """UUIDs of the GPUs whose processes are listed and have a known owner."""
        return frozenset(
            uuid
            for uuid, gpu in self._gpus.items()
            if gpu.processes is not None
            and all(self._is_owner_known(process.pid) for process in gpu.processes)
        )

    def holdings(self) -> Iterator[Holding]:
        """Yield the holdings of jobs, then those of users without a job."""
        by_job: dict[str, list[int]] = {}
        by_user: dict[str, list[int]] = {}
        for pid in self._held:
            owner = self._owner(pid)
            if owner.job is not None:
                by_job.setdefault(owner.job, []).append(pid)
            elif owner.user is not None:
                by_user.setdefault(owner.user, []).append(pid)
        for name in sorted(by_job.keys() | self._jobs.keys()):
            held = self._job_holding(name, self._jobs.get(name), by_job.get(name, []))
            if held is not None:
                yield held
        for user, pids in sorted(by_user.items()):
            if len(user) <= MAX_NAME_CHARACTERS:
                yield from self._user_holdings(user, pids)

    def _job_holding(self, name: str, job: Job | None, pids: list[int]) -> Holding | None:
        allocated = set(job.gpus) if job is not None else set()
        gpus = (allocated & self._gpus.keys()).union(*(self._held[pid] for pid in pids))
        if not gpus or name.startswith(HARVEST_PREFIX) or len(name) > MAX_NAME_CHARACTERS:
            return None
        users = {user for pid in pids if (user := self._owner(pid).user) is not None}
        if job is not None and job.user is not None:
            users.add(job.user)
        users = users - {"root"} or users  # schedulers start processes of their own in a job
        use = self._use(gpus)
        if allocated - self._gpus.keys():  # a GPU that is not in the frame may be in use
            use = combine_uses((use, "unknown"))
        return Holding(Holder(name), frozenset(users), (self._place(gpus, pids),), use)

    def _user_holdings(self, user: str, pids: list[int]) -> Iterator[Holding]:
        for gpus, own in self._group_processes(pids):
            holder = Holder(user=user, node=self._node, gpus=tuple(sorted(gpus)))
            yield Holding(holder, frozenset((user,)), (self._place(gpus, own),), self._use(gpus))

    def _group_processes(self, pids: list[int]) -> list[tuple[set[str], list[int]]]:
        """Return processes that share a GPU or a parent, with all of their GPUs: ending one may end the others."""
        groups: list[tuple[set[str], set[int], list[int]]] = []
        for pid in pids:
            gpus, family, own = set(self._held[pid]), {pid}, [pid]
            process = self._processes.get(pid)
            parent = process.identity.parent_pid if process is not None else None
            if parent is not None and parent >= _FIRST_USER_PID:
                family.add(parent)
            apart = []
            for group in groups:
                if group[0] & gpus or group[1] & family:
                    gpus, family, own = gpus | group[0], family | group[1], group[2] + own
                else:
                    apart.append(group)
            groups = [*apart, (gpus, family, own)]
        return [(gpus, own) for gpus, _, own in groups]

    def _place(self, gpus: Iterable[str], pids: Iterable[int]) -> HeldPlace:
        devices = sorted(
            (self._gpus[uuid].device for uuid in gpus),
            key=lambda device: (device.index, device.mig_index or 0),
        )
        return HeldPlace(
            self._node,
            tuple((device.label, device.uuid) for device in devices),
            tuple(sorted((pid, self._start_time(pid)) for pid in pids)),
        )

    def _use(self, gpus: Iterable[str]) -> Use:
        return combine_uses(self._uses[uuid] for uuid in gpus)

    def _owner(self, pid: int) -> Owner:
        process: ProcessReading | None = self._processes.get(pid)
        return process.identity.owner if process is not None else Owner()

    def _is_owner_known(self, pid: int) -> bool:
        owner = self._owner(pid)
        return owner.user is not None or owner.job is not None

    def _start_time(self, pid: int) -> float:
        process = self._processes.get(pid)
        return (process.identity.start_time or 0.0) if process is not None else 0.0


def index_jobs(jobs: Mapping[str, Job], owners: Iterable[Owner]) -> frozenset[str]:
    """Return the jobs of a node according to its last reports."""
    return frozenset(jobs) | {owner.job for owner in owners if owner.job is not None}
