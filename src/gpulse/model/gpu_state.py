"""State of a GPU for people who look for one: busy, held idle, free or lost; and the free GPUs that a request gets."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Literal, NamedTuple, get_args

from gpulse.model.device import IDLE_RATIO, format_ranges, gpu_label
from gpulse.model.finding import Finding
from gpulse.model.formatting import local_text
from gpulse.model.frame import Frame, GpuReading
from gpulse.model.harvest_status import STATE_CODES, is_harvest_job
from gpulse.model.process import GpuProcess, ProcessIdentity
from gpulse.model.safe_text import natural_key, plain

GpuState = Literal["busy", "idle", "free", "harvested", "faulty", "lost", "unknown"]
"""idle: held by a process that computes nothing. harvested: used by a program that gives way at once."""
GPU_STATES: tuple[GpuState, ...] = get_args(GpuState)
STATE_TITLES: Mapping[GpuState, str] = {
    "busy": "busy",
    "idle": "held idle",
    "free": "free",
    "harvested": "harvested",
    "faulty": "faulty",
    "lost": "lost",
    "unknown": "unknown",
}
STAYS_BUSY_SECONDS = 30.0
"""How long after its last activity a held GPU counts as busy."""
FAULT = "gpu_fault"
"""ID of the finding about a GPU that nobody should take."""

MIN_HELD_BYTES = 1 << 30
MIN_HELD_RATIO = 0.02
"""More memory in use than both of these is held by a process, even if no process is visible."""
_AT_WORK = (STATE_CODES["harvested"], STATE_CODES["stopping"])


class ProcessOnGpu(NamedTuple):
    """A process on a GPU."""

    process: GpuProcess
    identity: ProcessIdentity

    @property
    def is_harvested(self) -> bool:
        """Whether a harvest runs it."""
        return is_harvest_job(self.identity.owner.job)


class AssessedGpu(NamedTuple):
    """One GPU, or one MIG instance, with its state and the processes on it."""

    reading: GpuReading
    state: GpuState
    holders: tuple[ProcessOnGpu, ...] | None
    """None when its processes could not be listed."""

    @property
    def users(self) -> tuple[str, ...]:
        """The users of its processes, each once, without those of a harvest."""
        found = (holder.identity.owner for holder in self.holders or () if not holder.is_harvested)
        return tuple(dict.fromkeys(owner.user or str(owner.uid) for owner in found if owner != _NOBODY))


_NOBODY = ProcessIdentity(0).owner


def assess_gpus(
    frame: Frame,
    identities: Mapping[int, ProcessIdentity],
    findings: Sequence[Finding],
    recently_active: Collection[str] = (),
) -> list[AssessedGpu]:
    """Return the units of a node that can be allocated: GPUs without MIG instances, and MIG instances.

    Args:
        frame: The newest frame of the node.
        identities: Its processes by PID, in addition to those in the frame.
        findings: Its current findings.
        recently_active: UUIDs of GPUs that were active within the last `STAYS_BUSY_SECONDS`.
    """
    known = {**{one.pid: one.identity for one in frame.processes}, **identities}
    faulty = {
        finding.label or str(finding.gpu)
        for finding in findings
        if finding.id == FAULT and finding.gpu is not None
    }
    split = {gpu.device.parent_uuid for gpu in frame.gpus}
    uses = []
    for gpu in frame.gpus:
        if gpu.device.uuid in split:
            continue
        holders = (
            None
            if gpu.processes is None
            else tuple(
                ProcessOnGpu(one, known.get(one.pid) or ProcessIdentity(one.pid)) for one in gpu.processes
            )
        )
        state = classify_gpu(gpu, holders, was_active=gpu.device.uuid in recently_active)
        is_faulty = not faulty.isdisjoint({gpu.device.label, str(gpu.device.index)})
        uses.append(
            AssessedGpu(gpu, "faulty" if is_faulty and state in ("free", "unknown") else state, holders)
        )
    return uses


def classify_gpu(
    gpu: GpuReading, holders: Collection[ProcessOnGpu] | None, *, was_active: bool = False
) -> GpuState:
    """Return the state of a GPU by its readings and processes; faults and lost nodes are not considered."""
    if _is_lent(gpu, holders or ()):
        return "harvested"
    activity, is_held = gpu_activity(gpu), bool(holders) or is_memory_held(gpu)
    if activity is not None and activity > IDLE_RATIO:
        return "busy"
    if is_held:
        return "busy" if activity is None or was_active else "idle"
    is_unknown = activity is None and holders is None and gpu.get("memory_used_bytes") is None
    return "unknown" if is_unknown else "free"


def gpu_activity(gpu: GpuReading) -> float | None:
    """Return the activity of a GPU from 0 to 1; None when it is unknown."""
    known = [
        value for name in ("gpu_utilization_ratio", "sm_active_ratio") if (value := gpu.get(name)) is not None
    ]
    return max(known, default=None)


def is_memory_held(gpu: GpuReading) -> bool:
    """Return whether so much memory is in use that a process must hold it."""
    used, total = gpu.get("memory_used_bytes"), gpu.get("memory_total_bytes")
    return used is not None and used > max(MIN_HELD_BYTES, MIN_HELD_RATIO * (total or 0))


def _is_lent(gpu: GpuReading, holders: Collection[ProcessOnGpu]) -> bool:
    """Return whether only a harvest uses a GPU: nobody else is known to be on it."""
    if any(not holder.is_harvested and holder.identity.owner.user for holder in holders):
        return False
    return any(holder.is_harvested for holder in holders) or gpu.get("harvest_state") in _AT_WORK


_DAY_SECONDS = 86_400.0
_MAX_HOLDERS = 8
"""More holders than this are counted, not listed."""


class GpuRequest(NamedTuple):
    """What is wanted."""

    count: int  # type: ignore[assignment]  # hides tuple.count, which nobody calls here
    memory_bytes: int | None = None
    """Free memory that each GPU must have."""
    free_seconds: float = 0.0
    """How long a GPU must have been free."""
    spread: bool = False
    """Whether the GPUs may be on several nodes."""


class HolderSummary(NamedTuple):
    """Who holds a GPU."""

    user: str | None
    job: str | None
    program: str | None
    since: float | None
    """Epoch seconds."""


class GpuCandidate(NamedTuple):
    """One GPU, and whether it can be taken."""

    node: str
    label: str
    uuid: str
    name: str
    state: GpuState
    holders: tuple[HolderSummary, ...] = ()
    problem: str | None = None
    """Why it cannot be taken now, other than by its state."""
    is_excluded: bool = False
    """Whether it can never be taken: a MIG instance, or hidden from programs."""
    memory_bytes: float | None = None
    """Memory that a program could use now; None when unknown."""
    memory_total_bytes: float | None = None
    read_at: float | None = None
    """When its processes were read, in epoch seconds; None when unknown."""

    @property
    def is_free(self) -> bool:
        """Whether it can be taken: nobody uses it, or only a program of a harvest, which gives way."""
        return self.problem is None and self.state in ("free", "harvested")


class FreeGpuTracker:
    """Remembers since when each GPU has been free, so that a pause between two programs does not count."""

    def __init__(self, request: GpuRequest) -> None:
        self._request = request
        self._since: dict[str, float] = {}

    def update(self, candidates: Iterable[GpuCandidate], now: float) -> list[GpuCandidate]:
        """Take a new look; return the GPUs that have been free for long enough.

        Args:
            candidates: All GPUs.
            now: Seconds on a clock that cannot be set.
        """
        free = [one for one in candidates if self.fits(one)]
        self._since = {one.uuid: self._since.get(one.uuid, now) for one in free}
        return [one for one in free if now - self._since[one.uuid] >= self._request.free_seconds]

    def fits(self, candidate: GpuCandidate) -> bool:
        """Return whether a GPU is free now, with enough memory."""
        wanted, room = self._request.memory_bytes, candidate.memory_bytes
        return candidate.is_free and (wanted is None or (room is not None and room >= wanted))


def count_possible(candidates: Iterable[GpuCandidate], request: GpuRequest) -> int:
    """Return the largest number of GPUs that a request could get once all of them are free."""
    by_node: dict[str, int] = {}
    for one in candidates:
        too_small = (
            request.memory_bytes is not None
            and one.memory_total_bytes is not None
            and one.memory_total_bytes < request.memory_bytes
        )
        if not one.is_excluded and not too_small:
            by_node[one.node] = by_node.get(one.node, 0) + 1
    return sum(by_node.values()) if request.spread else max(by_node.values(), default=0)


def choose_gpus(ready: Sequence[GpuCandidate], request: GpuRequest) -> list[GpuCandidate]:
    """Return the GPUs to take; empty if there are not enough.

    GPUs without a harvest come first. All are on one node unless the request allows several: that node which has the
    fewest GPUs left over.
    """
    ordered = sorted(
        ready, key=lambda one: (one.state == "harvested", natural_key(one.node), natural_key(one.label))
    )
    if request.spread:
        return ordered[: request.count] if len(ordered) >= request.count else []
    by_node: dict[str, list[GpuCandidate]] = {}
    for one in ordered:
        by_node.setdefault(one.node, []).append(one)
    enough = [found for found in by_node.values() if len(found) >= request.count]
    best = min(
        enough,
        key=lambda found: (
            sum(one.state == "harvested" for one in found[: request.count]),
            len(found),
            natural_key(found[0].node),
        ),
        default=[],
    )
    return best[: request.count]


def describe_wait(
    candidates: Sequence[GpuCandidate], tracker: FreeGpuTracker, request: GpuRequest, now: float
) -> str:
    """Return what is waited for and who holds the GPUs meanwhile, in one line.

    Args:
        candidates: All GPUs.
        tracker: Knows which of them are free.
        request: What is wanted.
        now: Epoch seconds.
    """
    free = sum(tracker.fits(one) for one in candidates)
    wanted = f"{request.count} GPU{'' if request.count == 1 else 's'}"
    parts = [f"waiting for {wanted}, {free} free now"]
    parts += describe_holders([one for one in candidates if not tracker.fits(one)], request, now)
    return "; ".join(parts)


def describe_holders(held: Iterable[GpuCandidate], request: GpuRequest, now: float) -> list[str]:
    """Return who holds GPUs: one text for all GPUs with the same holders and state."""
    groups: dict[tuple[str, str], list[str]] = {}
    for one in held:
        groups.setdefault((one.node, _reason(one, request, now)), []).append(one.label)
    several = len({node for node, _ in groups}) > 1
    texts = [
        f"{plain(node)} {format_ranges(labels)}: {text}" if several else f"{gpu_label(labels)}: {text}"
        for (node, text), labels in groups.items()
    ]
    more = len(texts) - _MAX_HOLDERS
    return [*texts[:_MAX_HOLDERS], *([f"and {more} more"] if more > 0 else [])]


def _reason(one: GpuCandidate, request: GpuRequest, now: float) -> str:
    if one.problem is not None:
        return one.problem
    if one.is_free:
        return f"not enough free memory ({_gigabytes(one.memory_bytes)} of the requested {_gigabytes(request.memory_bytes)})"
    parts = [describe_holder(holder, now) for holder in one.holders[:2]]
    if len(one.holders) > len(parts):
        parts.append(f"{len(one.holders) - len(parts)} more")
    return ", ".join([*parts, STATE_TITLES[one.state]])


def describe_holder(holder: HolderSummary, now: float) -> str:
    """Return a holder as `ada slurm:4711 since 12:03`."""
    names = [plain(text) for text in (holder.user, holder.job or holder.program) if text]
    parts = [" ".join(names) or "a process that is not visible"]
    if holder.since is not None:
        pattern = "%H:%M" if now - holder.since < _DAY_SECONDS else "%m-%d %H:%M"
        if (began := local_text(holder.since, pattern)) is not None:
            parts.append(f"since {began}")
    return " ".join(parts)


def _gigabytes(size: float | None) -> str:
    return "unknown" if size is None else f"{size / 1e9:.1f} GB"


def candidate_to_document(one: GpuCandidate) -> Mapping[str, object]:
    """Return a GPU as JSON types."""
    return {
        "node": one.node,
        "gpu": one.label,
        "uuid": one.uuid,
        "name": one.name,
        "state": one.state,
        "problem": one.problem,
        "holders": [holder._asdict() for holder in one.holders],
    }
