"""Several programs on one GPU, and GPUs of one job that do not keep pace."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from gpulse.diagnosis.case import Case, Node
from gpulse.diagnosis.rule import Match, Rule
from gpulse.diagnosis.seconds import Sum
from gpulse.model.finding import Advice, Evidence

_PACE = "power_watts"


def gpu_contention(case: Case) -> Match | None:
    """Two or more processes compute on the same GPU."""
    t = case.t
    totals: dict[int, Sum] = {}
    for second in case.stretch.steady:
        for pid, part in second.shares.items():
            old = totals.get(pid, Sum(0.0, 0))
            totals[pid] = Sum(old.total + part.total, old.count + part.count)
    busy = {
        pid: entry.mean
        for pid, entry in totals.items()
        if pid in case.stretch.pids and entry.mean >= t.contention
    }
    if (
        len(busy) < 2
        or (case.stretch.duty or 0.0) < t.contention_duty
        or any("mps" in case.stretch.names.get(pid, "") for pid in case.stretch.pids)
    ):
        return None
    shares = sorted(busy.values(), reverse=True)
    told = ", ".join(f"{share:.0%}" for share in shares[:4])
    return Match(
        summary=f"is shared by {len(busy)} processes that compute in turns: their kernels were there {told} of the time",
        severity=case.severity(shares[1]) if shares[1] >= t.lost_medium else "low",
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
        start=case.stretch.start,
    )


def _is_shared(case: Case) -> bool:
    return len(case.stretch.pids) >= 2


def straggler(node: Node) -> Iterator[Match]:
    """One GPU of a job that draws far less power than its peers."""
    jobs: dict[object, list[Case]] = {}
    for case in node.cases:
        parents = _launcher(case, node)
        if parents is not None:
            jobs.setdefault(parents, []).append(case)
    for cases in jobs.values():
        paces = [
            (case, pace) for case in cases if (pace := case.stretch.mean(_PACE)) is not None and case.is_busy
        ]
        if len(paces) < 3:
            continue
        usual = median(pace for _, pace in paces)
        for case, pace in paces:
            if pace < node.t.straggler * usual:
                yield Match(
                    summary=f"does not keep pace with the other GPUs of its job: {pace:.0f} W against {usual:.0f} W",
                    severity="high",
                    confidence=0.5,
                    evidence=(
                        Evidence(_PACE, "mean", pace, "<", node.t.straggler * usual),
                        Evidence(_PACE, "median of the job's GPUs", usual, ">=", 0),
                    ),
                    pids=case.stretch.pids,
                    gpu=case.stretch.device.index,
                    start=case.stretch.start,
                )


def _launcher(case: Case, node: Node) -> object | None:
    """What the ranks of one job have in common: the process itself, or the one that started them."""
    parents = {process.pid: process.identity.parent_pid for process in node.frame.processes}
    found = {parents.get(pid) for pid in case.stretch.pids} - {None, 0, 1}
    return next(iter(found)) if len(found) == 1 else None


RULES = (
    Rule(
        id="gpu_contention",
        family="contention",
        title="Several programs compute on one GPU",
        means="Without MPS the programs take turns: each gets a slice of time, and all of them run slower than alone.",
        recognised="Two or more processes each use at least 10 % of the multiprocessors over the window, and MPS is not in use.",
        severity="High.",
        advice=(
            Advice(
                "move one of them to a free GPU (`gpulse` shows which are), or run them one after the other",
                "taking turns adds switching to the sum of both",
                "pause one (`kill -STOP`): the other speeds up at once",
            ),
            Advice(
                "if they must share: MPS for small kernels, MIG for guarantees",
                "they then run at the same time instead of in turns",
                "steps per second of both together rise",
            ),
        ),
        check=gpu_contention,
        applies=_is_shared,
        needs=("shares",),
        sources=("NVML: process utilization", "NVIDIA: MPS documentation"),
    ),
    Rule(
        id="straggler",
        family="contention",
        title="One GPU of a job does not keep pace",
        means="In a job over several GPUs all wait for the slowest at each step. One of them draws far less power than the others.",
        recognised="At least three busy GPUs whose processes have the same parent; one draws less than three quarters of the median power.",
        severity="High.",
        advice=(
            Advice(
                "compare clocks, temperature, ECC and PCIe of that GPU with its peers, and what its rank does besides",
                "a cooler GPU at the same load waits, a hotter one is slowed down",
                "give the rank another GPU: does the slowness move with the rank or stay with the GPU?",
            ),
        ),
        check_node=straggler,
        sources=("NVIDIA Resiliency Extension: relative performance 0.75", "Minder"),
        shown=False,
    ),
)
