"""GPUs that `gpulse wait` can choose from: those of this machine, or those of a head's nodes."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Sequence
from typing import Protocol

from gpulse.cli.head_client import HeadTarget
from gpulse.cluster.client.head_client import HeadClient
from gpulse.cluster.protocol.answers import ClusterOccupancy, GpuOccupancy, NodeOccupancy
from gpulse.diagnosis.rules.faults import find_faults
from gpulse.errors import CollectionError, GpulseError, UsageError
from gpulse.model.device import IDLE_RATIO, Device, visible_device_words
from gpulse.model.frame import Frame, GpuReading
from gpulse.model.gpu_state import (
    STAYS_BUSY_SECONDS,
    AssessedGpu,
    GpuCandidate,
    HolderSummary,
    ProcessOnGpu,
    assess_gpus,
    gpu_activity,
)
from gpulse.model.harvest_status import is_harvest_job
from gpulse.model.safe_text import quoted
from gpulse.model.xid import XidCounts
from gpulse.sources.gpu_claims import GpuClaim, claim_gpu, find_claimant, find_lock_problem
from gpulse.sources.local_machine import LocalMachine
from gpulse.sources.nvml.read_timing import Cadence
from gpulse.sources.process_owners import user_name
from gpulse.sources.procfs import Roots, parse_pid_status, try_read
from gpulse.terminal import value_format as f

_CADENCE = Cadence(second=0.2, gpm=None, graphics=60.0, shares=60.0, slow=30.0, pcie=60.0, details=60.0)
"""The list of processes is read for every look, and little else."""
_CALL_SECONDS = 10.0
_MIG = "`gpulse wait` does not support MIG instances"


class CandidateSource(Protocol):
    """Where GPUs come from."""

    @property
    def has_claims(self) -> bool:
        """Whether GPUs can be claimed there."""

    def look(self, now: float) -> Sequence[GpuCandidate]:
        """Return all GPUs as they are now.

        Args:
            now: Epoch seconds.

        Raises:
            GpulseError: Nothing could be read.
        """

    def claim(self, gpus: Iterable[GpuCandidate]) -> bool:
        """Claim GPUs, all or none; return whether that worked, and give back all other claims."""

    def close(self) -> None:
        """Release everything but the claims."""


class LocalGpus:
    """The GPUs of this machine."""

    has_claims = True

    def __init__(self, roots: Roots, *, interval_seconds: float) -> None:
        """Prepare to read.

        Args:
            roots: Where /proc, /sys and /dev are.
            interval_seconds: Time between two looks.
        """
        self._roots = roots
        self._machine = LocalMachine(interval_seconds=interval_seconds, cadence=_CADENCE, roots=roots)
        self._visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        self._xids = XidCounts()
        self._active_at: dict[str, float] = {}
        self._claims: dict[str, GpuClaim] = {}
        self._devices: dict[str, Device] = {}

    def look(self, now: float) -> list[GpuCandidate]:
        """Return all GPUs as they are now.

        Raises:
            CollectionError: There is no GPU.
        """
        frame = self._machine.sample(now, patient=True)
        if not frame.gpus:
            problem = next(
                (entry for entry in frame.health if entry.source == "nvml" and entry.is_problem), None
            )
            raise CollectionError(
                "there is no GPU on this machine" + (f": {f.plain(problem.detail)}" if problem else ""),
                hint="find out why with `gpulse doctor`, or wait for GPUs of a cluster with --head HOST",
            )
        self._xids.follow(frame)
        self._devices = {gpu.device.uuid: gpu.device for gpu in frame.gpus}
        for gpu in frame.gpus:
            if (gpu_activity(gpu) or 0.0) > IDLE_RATIO:
                self._active_at[gpu.device.uuid] = now
        recent = {uuid for uuid, at in self._active_at.items() if 0 <= now - at < STAYS_BUSY_SECONDS}
        uses = assess_gpus(frame, {}, find_faults(frame, self._xids), recent)
        visible = self._visible_uuids(frame)
        return [self._candidate(frame, use, visible) for use in uses]

    def claim(self, gpus: Iterable[GpuCandidate]) -> bool:
        """Claim GPUs, all or none; give back all others."""
        wanted = [one.uuid for one in gpus]
        for uuid in [uuid for uuid in self._claims if uuid not in wanted]:
            self._claims.pop(uuid).release()
        for uuid in sorted(
            wanted
        ):  # in the same order everywhere, so that two waiters do not block each other
            if uuid not in self._claims:
                claim = self._try_claim(uuid)
                if claim is None:
                    self.release()
                    return False
                self._claims[uuid] = claim
                self._wake_harvests(uuid)
        return True

    def release(self) -> None:
        """Give back all claims."""
        while self._claims:
            self._claims.popitem()[1].release()

    def close(self) -> None:
        """Release the driver."""
        self._machine.close()

    def _try_claim(self, uuid: str) -> GpuClaim | None:
        try:
            return claim_gpu(uuid, self._roots)
        except OSError as error:
            raise GpulseError(
                f"cannot write a lock file in {self._roots.dev}/shm: {error.strerror or error}",
                hint="make the directory writable for all users: chmod 1777 /dev/shm",
            ) from error

    def _wake_harvests(self, uuid: str) -> None:
        """Open the GPU's device file for a moment, which harvests notice at once, and so the claim."""
        minor = self._devices[uuid].minor_number
        try:
            os.close(os.open(f"{self._roots.dev}/nvidia{minor}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK))
        except OSError:  # harvests then notice the claim when they look the next time
            return

    def _visible_uuids(self, frame: Frame) -> Collection[str] | None:
        """Return the GPUs in CUDA_VISIBLE_DEVICES; None if it is not set."""
        if self._visible is None:
            return None
        devices = [gpu.device for gpu in frame.gpus]
        words = visible_device_words(devices, self._visible)
        return {device.uuid for device in devices if any(device.matches(word) for word in words)}

    def _candidate(self, frame: Frame, use: AssessedGpu, visible: Collection[str] | None) -> GpuCandidate:
        gpu = use.reading
        excluded = _find_exclusion(gpu.device, visible)
        return GpuCandidate(
            frame.node.name,
            gpu.device.label,
            gpu.device.uuid,
            gpu.device.name,
            use.state,
            tuple(_summary(holder) for holder in use.holders or ()),
            excluded or self._problem(use),
            is_excluded=excluded is not None,
            memory_bytes=_usable_memory(gpu, use.holders or ()),
            memory_total_bytes=gpu.get("memory_total_bytes"),
            read_at=gpu.read_at.get("second"),
        )

    def _problem(self, use: AssessedGpu) -> str | None:
        device = use.reading.device
        if not device.uuid.upper().startswith("GPU-"):
            return "it does not answer"
        if use.holders is None:
            return "its processes cannot be listed"
        if use.state in ("free", "harvested") and device.uuid not in self._claims:
            claimant = find_claimant(device.uuid, self._roots)
            if claimant is not None:
                return f"claimed by {self._describe_claimant(claimant.pid)}"
            return find_lock_problem(device.uuid, self._roots)
        return None

    def _describe_claimant(self, pid: int | None) -> str:
        uid = (
            None if pid is None else parse_pid_status(try_read(f"{self._roots.proc}/{pid}/status") or b"").uid
        )
        user = user_name(uid)
        return f"{user}'s gpulse wait (pid {pid})" if user else "another gpulse wait"


def _find_exclusion(device: Device, visible: Collection[str] | None) -> str | None:
    """Return why a GPU can never be taken; None if it can."""
    if device.mig_index is not None:
        return _MIG
    if visible is not None and device.uuid not in visible:
        return "hidden by CUDA_VISIBLE_DEVICES"
    return None


def _summary(holder: ProcessOnGpu) -> HolderSummary:
    owner, identity = holder.identity.owner, holder.identity
    user = owner.user or (None if owner.uid is None else str(owner.uid))
    program = f.shorten_command(identity.command, identity.name) if identity.name else None
    return HolderSummary(user, owner.job, program, identity.start_time)


def _usable_memory(gpu: GpuReading, holders: Collection[ProcessOnGpu]) -> float | None:
    """Return the free memory of a GPU; what a harvest uses counts as free."""
    used, total = gpu.get("memory_used_bytes"), gpu.get("memory_total_bytes")
    if used is None or total is None:
        return None
    lent = sum(one.process.gpu_memory_bytes or 0 for one in holders if one.is_harvested)
    return total - max(0.0, used - lent)


class ClusterGpus:
    """The GPUs of a head's nodes; they cannot be claimed."""

    has_claims = False

    def __init__(self, target: HeadTarget, nodes: Collection[str]) -> None:
        """Prepare to ask.

        Args:
            target: The head.
            nodes: Only these nodes; empty for all.
        """
        self._target = target
        self._nodes = frozenset(nodes)
        self._client: HeadClient | None = None
        self._has_answered = False

    def look(self, now: float) -> list[GpuCandidate]:
        """Return the GPUs of all nodes as they are now.

        Raises:
            GpulseError: The head does not answer, or refuses; the next call connects again.
        """
        del now  # the head's clock counts
        try:
            answer = self.ask()
        except GpulseError:
            self.close()
            raise
        self._check_nodes(answer)
        return [
            _remote_candidate(node, gpu)
            for node in answer.nodes
            if not self._nodes or node.node in self._nodes
            for gpu in node.gpus
        ]

    def ask(self) -> ClusterOccupancy:
        """Return the head's answer.

        Raises:
            GpulseError: The head does not answer, or refuses.
        """
        self._client = self._client or self._target.connect(call_seconds=_CALL_SECONDS)
        return self._client.call("gpus", ClusterOccupancy)

    def claim(self, gpus: Iterable[GpuCandidate]) -> bool:
        """Return True: nothing can be claimed on other machines."""
        del gpus
        return True

    def close(self) -> None:
        """Close the connection."""
        if self._client is not None:
            self._client.close()
            self._client = None

    def _check_nodes(self, answer: ClusterOccupancy) -> None:
        if self._has_answered:
            return
        self._has_answered = True
        known = {node.node for node in answer.nodes} | set(answer.missing_nodes)
        for name in sorted(self._nodes - known):
            raise UsageError(
                f"the head has no node {quoted(name)}", hint=f"gpulse status{self._target.options()}"
            )


def _remote_candidate(node: NodeOccupancy, gpu: GpuOccupancy) -> GpuCandidate:
    is_mig = ":" in gpu.label
    problem = _MIG if is_mig else None
    if node.state != "healthy" or not node.connected:
        problem = f"its node is {node.state}" if node.state != "healthy" else "its node is not connected"
    elif gpu.holders is None and gpu.state in ("free", "harvested"):
        problem = problem or "its processes cannot be listed"
    used, total = gpu.memory_used_bytes, gpu.memory_total_bytes
    lent = sum(one.gpu_memory_bytes or 0 for one in gpu.holders or () if is_harvest_job(one.job))
    return GpuCandidate(
        node.node,
        gpu.label,
        gpu.uuid,
        gpu.name,
        gpu.state,
        tuple(
            HolderSummary(one.user, one.job, one.command or one.name, one.start_time)
            for one in gpu.holders or ()
        ),
        problem,
        is_excluded=is_mig,
        memory_bytes=None if used is None or total is None else total - max(0.0, used - lent),
        memory_total_bytes=total,
        read_at=node.time,
    )


def check_own_node(target: HeadTarget, nodes: Collection[str], own: Collection[str]) -> None:
    """Check that this machine is a node of a head, so that a command can run on the GPUs that are waited for.

    Args:
        target: The head.
        nodes: Nodes that the user named; empty for all.
        own: UUIDs of the GPUs of this machine.

    Raises:
        UsageError: It is not one of these nodes.
    """
    cluster = ClusterGpus(target, nodes)
    try:
        answer = cluster.ask()
    finally:
        cluster.close()
    here = [node.node for node in answer.nodes if any(gpu.uuid in own for gpu in node.gpus)]
    if not here:
        raise UsageError(
            "COMMAND would run on this machine, which is not a node of that head",
            hint="leave out COMMAND and start it on the node that `gpulse wait` prints, "
            "or leave out --head to wait for GPUs of this machine",
        )
    if nodes and not set(here) & set(nodes):
        raise UsageError(
            f"COMMAND would run on this machine, {quoted(here[0])}, which is not among the nodes of --node",
            hint="run `gpulse wait` on one of these nodes, or leave out COMMAND",
        )
