"""Rules on contention: several programs on one GPU, and GPUs of one job that lag behind."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from gpulse.diagnosis.evidence import GpuEvidence, NodeEvidence
from gpulse.diagnosis.rule import Rule, RuleMatch, SignalText
from gpulse.diagnosis.second_summary import WeightedMean
from gpulse.model.finding import Advice, Evidence

_PACE = "power_watts"
_MAX_NAMED_SHARES = 4


def gpu_contention(gpu: GpuEvidence) -> RuleMatch | None:
    """Two or more processes compute on the same GPU."""
    t = gpu.t
    totals: dict[int, WeightedMean] = {}
    for second in gpu.window.steady:
        for pid, part in second.shares.items():
            old = totals.get(pid, WeightedMean(0.0, 0))
            totals[pid] = WeightedMean(old.total + part.total, old.count + part.count)
    busy = {
        pid: entry.mean
        for pid, entry in totals.items()
        if pid in gpu.window.pids and entry.mean >= t.contention
    }
    if (
        len(busy) < 2
        or (gpu.window.duty or 0.0) < t.contention_duty
        or any("mps" in gpu.window.names.get(pid, "") for pid in gpu.window.pids)
    ):
        return None
    shares = sorted(busy.values(), reverse=True)
    *percents, last = [f"{share:.0%}" for share in shares[:_MAX_NAMED_SHARES]]
    subject = "their kernels" if len(shares) <= _MAX_NAMED_SHARES else "the kernels of the four busiest"
    return RuleMatch(
        summary=f"is shared by {len(busy)} processes that take turns: {subject} ran {', '.join(percents)} and {last} of the time",
        severity=gpu.severity(shares[1]) if shares[1] >= t.lost_medium else "low",
        confidence=0.85 if shares[1] >= t.lost_medium else 0.6,
        evidence=(
            Evidence("computing_processes", "count", len(busy), ">=", 2),
            *(
                Evidence("sm_ratio", f"mean of pid {pid}", share, ">=", t.contention)
                for pid, share in sorted(busy.items())
            ),
        ),
        pids=tuple(sorted(busy)),
        lost_ratio=1.0 - shares[0] / sum(shares),
        start=gpu.window.start,
    )


def _is_shared(gpu: GpuEvidence) -> bool:
    return len(gpu.window.pids) >= 2


def straggler(node: NodeEvidence) -> Iterator[RuleMatch]:
    """One GPU of a job draws far less power than its peers."""
    jobs: dict[object, list[GpuEvidence]] = {}
    for gpu in node.gpus:
        parents = _launcher(gpu, node)
        if parents is not None:
            jobs.setdefault(parents, []).append(gpu)
    for gpus in jobs.values():
        paces = [(gpu, pace) for gpu in gpus if (pace := gpu.window.mean(_PACE)) is not None and gpu.is_busy]
        if len(paces) < 3:
            continue
        usual = median(pace for _, pace in paces)
        for gpu, pace in paces:
            if pace < node.t.straggler * usual:
                yield RuleMatch(
                    summary=f"lags behind the other GPUs of its job: it draws {pace:.0f} W, while their median is {usual:.0f} W",
                    severity="high",
                    confidence=0.5,
                    evidence=(
                        Evidence(_PACE, "mean", pace, "<", node.t.straggler * usual),
                        Evidence(_PACE, "median of the job's GPUs", usual, ">=", 0),
                    ),
                    pids=gpu.window.pids,
                    gpu=gpu.window.device.index,
                    start=gpu.window.start,
                )


def _launcher(gpu: GpuEvidence, node: NodeEvidence) -> object | None:
    """Return what the ranks of one job have in common: the process that started them; None when unclear."""
    parents = {process.pid: process.identity.parent_pid for process in node.frame.processes}
    found = {parents.get(pid) for pid in gpu.window.pids} - {None, 0, 1}
    return next(iter(found)) if len(found) == 1 else None


RULES = (
    Rule(
        id="gpu_contention",
        family="contention",
        title="Several programs compete for one GPU",
        means="Without MPS (Multi-Process Service), the programs take turns: each gets time slices, and all of them run slower than they would alone.",
        recognised="At least two processes each use at least 10% of the SMs (streaming multiprocessors) over the window, and MPS is not in use.",
        severity="Depends on the second-busiest process's share of the GPU: low from 10%, medium from 20%, high from 40%.",
        advice=(
            Advice(
                "move one of the programs to a free GPU (`gpulse` shows which are free), or run them one after the other",
                "taking turns adds switching time to all of them",
                "pause one program for ten seconds (`kill -STOP PID`, then `kill -CONT PID`): the other should speed up",
            ),
            Advice(
                "if they must share the GPU, use MPS for small kernels or MIG for guaranteed resources",
                "the programs then run at the same time instead of taking turns",
                "together, the jobs should complete more steps per second",
            ),
        ),
        check=gpu_contention,
        applies=_is_shared,
        needs=("shares",),
        limits=("contention",),
        quantities={"computing_processes": SignalText("processes computing on the GPU", "count")},
        sources=("NVML: process utilization", "NVIDIA: MPS documentation"),
    ),
    Rule(
        id="straggler",
        family="contention",
        title="One GPU of a job lags behind the others",
        means="In a multi-GPU job, every step waits for the slowest GPU. Here, one GPU draws far less power than the others.",
        recognised="At least three busy GPUs have processes with the same parent, and one of these GPUs draws less than three quarters of their median power.",
        severity="High.",
        advice=(
            Advice(
                "compare this GPU's clocks, temperature, ECC errors and PCIe link with those of its peers, and check what else its rank does",
                "a GPU that is cooler under the same load is waiting; a hotter one is throttled",
                "give the rank another GPU, and see whether the slowness moves with the rank or stays with the GPU",
            ),
        ),
        check_node=straggler,
        limits=("straggler",),
        sources=("NVIDIA Resiliency Extension: relative performance threshold of 0.75", "Minder"),
        shown=False,
    ),
)
