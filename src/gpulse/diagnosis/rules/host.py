"""The host's side of the program: the GPU waits for the thread that feeds it, or nobody knows for what."""

from __future__ import annotations

from gpulse.diagnosis.attribution import Cause, runnable
from gpulse.diagnosis.case import Case
from gpulse.diagnosis.rule import Match, Rule
from gpulse.model.finding import Advice, Evidence


def _is_launch_bound(case: Case) -> bool:
    """Whether the kernels between which the GPU waits are small and many."""
    t, fill = case.t, case.fill
    if fill is None or (case.stretch.duty or 0.0) < t.seldom:
        return False
    launches = case.stretch.mean("pcie_rx_bytes_per_second", case.attribution.seconds)
    many = launches is None or launches >= t.launch_bytes_per_second
    return fill < t.launch_fill_surely or (fill < t.launch_fill and many)


def _thread_match(case: Case, summary: str, *evidence: Evidence) -> Match:
    cores = case.stretch.cpu("cores", case.attribution.of("main")) or 0.0
    feeding = case.stretch.cpu("feeding_cores", case.attribution.of("main")) or 0.0
    pegged = max(case.t.pegged, 1.0 - case.t.explained * case.lost)
    share = case.attribution.shares["main"]
    confidence = case.confidence(share)
    if "copies" not in case.stretch.sees:
        # A thread that copies pageable memory looks the same where PCIe traffic cannot be seen.
        confidence = min(confidence, 0.4)
    return Match(
        summary=summary,
        severity=case.severity(case.lost),
        confidence=confidence,
        evidence=(
            case.lost_evidence(),
            case.explained_evidence("main"),
            Evidence("feeding_cores", "mean while it computes", feeding, ">=", pegged),
            Evidence("trainer_cores", "mean while it computes", cores, ">=", 0.0),
            *evidence,
        ),
        ruled_out=case.ruled_out("main"),
        lost_ratio=case.lost,
        start=case.attribution.onset("main", case.t),
    )


def launch_bound(case: Case) -> Match | None:
    """Kernels so small that launching them takes longer than running them."""
    if case.cause != "main" or not _is_launch_bound(case):
        return None
    fill = case.fill or 0.0
    evidence = [Evidence("fill_ratio", "mean", fill, "<", case.t.launch_fill)]
    launches = case.stretch.mean("pcie_rx_bytes_per_second", case.attribution.seconds)
    if launches is not None and fill >= case.t.launch_fill_surely:
        least = case.t.launch_bytes_per_second
        evidence.append(Evidence("pcie_rx_bytes_per_second", case.over, launches, ">=", least))
    return _thread_match(
        case,
        f"idles {case.lost:.0%} of the time between kernels that fill {fill:.0%} of it: launching them takes longer than running them",
        *evidence,
    )


def host_single_thread(case: Case) -> Match | None:
    """The program's own thread computes while the GPU waits."""
    if case.cause != "main" or _is_launch_bound(case):
        return None
    cores = case.stretch.cpu("cores", case.attribution.of("main")) or 0.0
    evidence = []
    if case.fill is not None:
        evidence.append(Evidence("fill_ratio", "mean", case.fill, ">=", case.t.launch_fill_surely))
    return _thread_match(
        case,
        f"waits {case.lost:.0%} of the time for its own program, which computes on {cores:.1f} CPUs meanwhile",
        *evidence,
    )


def cpu_oversubscribed(case: Case) -> Match | None:
    """More runnable threads than CPUs, and the job waits its turn."""
    if case.cause != "crowded":
        return None
    t, crowd = case.t, case.attribution.of("crowded")
    ratio = runnable(case.stretch, crowd) or 0.0
    evidence = [
        case.lost_evidence(),
        case.explained_evidence("crowded"),
        Evidence("runnable_per_cpu", "mean while crowded", ratio, ">=", t.runnable_per_core),
    ]
    waits = case.stretch.cpu("run_wait", crowd)
    if waits is not None:
        evidence.append(Evidence("run_wait_ratio", "mean while crowded", waits, ">=", t.run_wait))
    pressure = case.stretch.host("pressure_cpu_some_ratio", crowd)
    if pressure is not None:
        evidence.append(
            Evidence("pressure_cpu_some_ratio", "mean while crowded", pressure, ">=", t.cpu_pressure)
        )
    share = case.attribution.shares["crowded"]
    return Match(
        summary=f"loses {case.lost:.0%} of the time because its processes wait for a CPU: {ratio:.1f} threads want each one",
        severity=case.severity(case.lost),
        confidence=case.confidence(share),
        evidence=tuple(evidence),
        ruled_out=case.ruled_out("crowded"),
        lost_ratio=case.lost,
        start=case.attribution.onset("crowded", t),
    )


def cgroup_cpu_throttled(case: Case) -> Match | None:
    """The control group's CPU limit stops the job again and again."""
    if case.cause != "throttled":
        return None
    ratio = case.stretch.cpu("throttled", case.attribution.of("throttled")) or 0.0
    return Match(
        summary=f"loses {case.lost:.0%} of the time while its control group is out of CPU time in {ratio:.0%} of the scheduling periods",
        severity=case.severity(case.lost),
        confidence=case.confidence(case.attribution.shares["throttled"]),
        evidence=(
            case.lost_evidence(),
            case.explained_evidence("throttled"),
            Evidence("cpu_throttled_ratio", "mean while throttled", ratio, ">=", case.t.throttled_periods),
        ),
        ruled_out=case.ruled_out("throttled"),
        lost_ratio=case.lost,
        start=case.attribution.onset("throttled", case.t),
    )


def host_wait_unattributed(case: Case) -> Match | None:
    """Time is lost, and nothing on this machine accounts for it."""
    if case.cause not in ("none", "throttled", "swapping") or _is_sparse(case) or not case.stretch.has_worked:
        return None
    t = case.t
    seen = case.stretch.sees
    shares = case.attribution.shares
    cores = case.stretch.cpu("cores", case.attribution.seconds)
    evidence = [
        case.lost_evidence(),
        *(
            case.explained_evidence(cause)._replace(threshold=0.0)
            for cause in sorted(shares, key=lambda name: -shares[name])
            if shares[cause] >= 0.1 or cause == "none"
        ),
    ]
    if cores is not None:
        evidence.append(
            Evidence("trainer_cores", case.over, cores, "<", max(t.pegged, 1.0 - t.explained * case.lost))
        )
    is_known = seen >= {"gpm", "processes", "host", "io"} and ("pressure" in seen or _counts_waits(case))
    confidence = 0.6 if is_known else 0.4 if "processes" in seen else 0.3
    if case.takes_turns:
        confidence = min(confidence, 0.4)
    return Match(
        summary=f"waits {case.lost:.0%} of the time{_meanwhile(case)}",
        severity=case.severity(case.lost),
        confidence=confidence,
        evidence=tuple(evidence),
        ruled_out=case.ruled_out(),
        lost_ratio=case.lost,
        start=case.attribution.onset(case.cause, case.t),
    )


def _meanwhile(case: Case) -> str:
    """What is known about the time in which the GPU waited."""
    if case.takes_turns:
        return " while its program works on its other GPUs: they take turns"
    if case.cause == "throttled":
        return " while its control group is out of CPU time"
    if case.cause == "swapping":
        return " while the machine swaps"
    if "processes" not in case.stretch.sees:
        return ", and what its processes do meanwhile cannot be read"
    shares = case.attribution.shares
    named = sorted(_WORDS[cause] for cause in shares if cause != "none" and shares[cause] >= 0.3)
    if named:
        return f", part of it for {' and '.join(named)}, and most of it for what cannot be seen from here"
    return " while nothing on this machine is busy: the network, a remote service or a lock come to mind"


_WORDS: dict[Cause, str] = {
    "throttled": "its control group's CPU limit",
    "swapping": "swapped memory",
    "crowded": "a free CPU",
    "storage": "storage",
    "copies": "copies",
    "workers": "its workers",
    "main": "its own program",
}


def _counts_waits(case: Case) -> bool:
    return case.stretch.cpu("run_wait") is not None


def _is_sparse(case: Case) -> bool:
    """Whether the program itself has little to do: no helpers, hardly any input, mostly asleep."""
    stretch, t = case.stretch, case.t
    if not stretch.sees >= {"processes", "copies"} or stretch.has_workers:
        return False
    traffic = stretch.mean("pcie_rx_bytes_per_second")
    cores = stretch.cpu("cores")
    return (
        traffic is not None
        and traffic < t.underused_bytes_per_second
        and cores is not None
        and cores < t.asleep
        and case.lost >= t.lost_high
    )


def gpu_underused(case: Case) -> Match | None:
    """Demand itself is sparse."""
    if case.cause != "none" or not _is_sparse(case) or not case.stretch.has_worked:
        return None
    t = case.t
    cores = case.stretch.cpu("cores") or 0.0
    traffic = case.stretch.mean("pcie_rx_bytes_per_second") or 0.0
    duty = case.stretch.duty or 0.0
    return Match(
        summary=f"works {duty:.1%} of the time: its program sleeps between short bursts of work ({cores:.2f} CPUs used)",
        severity="medium",
        confidence=0.7 if case.stretch.length >= 15 else 0.6,
        evidence=(
            case.lost_evidence(),
            Evidence("duty", "mean", duty, "<", 1.0 - t.lost_high),
            Evidence("trainer_cores", "mean", cores, "<", t.asleep),
            Evidence("pcie_rx_bytes_per_second", "mean", traffic, "<", t.underused_bytes_per_second),
        ),
        ruled_out=case.ruled_out(),
        lost_ratio=case.lost,
        start=case.stretch.start,
    )


_LOST = "By lost time: low from 10 %, medium from 20 %, high from 40 %."
_PROFILE = "`py-spy dump --pid PID` a few times while the GPU idles: the same line at the top is the culprit"

RULES = (
    Rule(
        id="cpu_oversubscribed",
        family="host",
        title="Too many threads want the CPUs",
        means="The threads that feed the GPU are ready to run and wait for a CPU, because far more threads are runnable than there are CPUs: thread pools multiplied by workers, or a neighbour.",
        recognised="Time is lost while runnable threads outnumber the CPUs and the job's run-queue wait or the CPU pressure is high. When the job's own workers take the CPUs, one each, it is input_cpu_bound.",
        severity=_LOST,
        advice=(
            Advice(
                "set OMP_NUM_THREADS and MKL_NUM_THREADS to CPUs / workers, or 1 in workers",
                "each worker otherwise starts a thread for every CPU of the machine",
                "`gpulse -c` shows threads and CPU use of every process; the waits end when OMP_NUM_THREADS=1",
            ),
            Advice(
                "move the neighbour away, or give each job its own CPUs (taskset, cgroup, --cpus-per-task)",
                "the scheduler shares CPUs by thread, so whoever has more threads gets more",
                "pause the neighbour (`kill -STOP`) for ten seconds and see the GPU's utilization rise",
            ),
        ),
        check=cpu_oversubscribed,
        needs=("duty", "host"),
        sources=("proc(5): schedstat, pressure", "PyTorch issue 82219", "node exporter mixin: load per core"),
    ),
    Rule(
        id="cgroup_cpu_throttled",
        family="host",
        title="The control group's CPU limit stops the job",
        means="The container or job may use only so much CPU time in each period and is stopped until the next one, even when the machine's CPUs are idle.",
        recognised="Time is lost while the control group was throttled in a quarter or more of its scheduling periods.",
        severity=_LOST,
        advice=(
            Advice(
                "raise or remove the CPU limit (docker --cpus, Kubernetes limits.cpu), and start no more threads than it allows",
                "a limit counts time, not CPUs: sixteen threads use up two CPUs' worth in an eighth of the period",
                "`cat /sys/fs/cgroup/cpu.stat`: nr_throttled stops growing",
            ),
        ),
        check=cgroup_cpu_throttled,
        needs=("duty",),
        sources=("Linux cgroup v2 documentation: cpu.max, cpu.stat",),
        shown=False,
    ),
    Rule(
        id="launch_bound",
        family="host",
        title="Kernels are too small for their launch",
        means="The program hands the GPU thousands of tiny kernels; launching each takes longer than running it, so the GPU idles in between and is mostly empty while it works.",
        recognised="Time is lost while the program's threads are busy, the kernels that run fill less than half of the multiprocessors, and the stream of launches shows in the PCIe traffic.",
        severity=_LOST,
        advice=(
            Advice(
                "torch.compile (mode='reduce-overhead'), CUDA graphs, or fused operators and optimisers (fused=True)",
                "many small kernels become few, or are launched at once",
                "raise the batch size fourfold: if the steps hardly take longer, it was the launches",
            ),
            Advice(
                "avoid .item(), .cpu() and prints in the loop",
                "each one waits until the GPU is empty, and then it stays empty until the next launch",
                "count synchronizing calls with torch.cuda.set_sync_debug_mode('warn')",
            ),
        ),
        check=launch_bound,
        needs=("duty", "processes", "gpm"),
        sources=("PyTorch: CUDA graphs", "NVIDIA: Nsight Systems launch latency"),
    ),
    Rule(
        id="host_single_thread",
        family="host",
        title="The program itself holds the GPU up",
        means="Between its kernels the program computes on the CPU, mostly on one thread (Python code, collating, tokenising, logging, loading with num_workers=0), sometimes on many (an optimiser on the CPU, a loader's threads), and the GPU waits for it.",
        recognised="Time is lost while the processes on the GPU compute for at least half of it. A thread that waits for the GPU spins too, but then the GPU is busy; here it is not.",
        severity=_LOST,
        advice=(
            Advice(
                "find what the main thread does, and take it out of the loop: workers, vectorising, less logging",
                "what runs in turns with the GPU's work adds to every step",
                _PROFILE,
            ),
            Advice(
                "load data in workers (num_workers > 0) if it is loaded in the loop",
                "loading then runs beside the GPU instead of in turns with it",
                "replace the loader by one batch that stays on the GPU: the steps get faster by as much as data costs",
            ),
        ),
        check=host_single_thread,
        needs=("duty", "processes"),
        sources=("PyTorch performance tuning guide",),
    ),
    Rule(
        id="host_wait_unattributed",
        family="host",
        title="The GPU waits, and nothing here accounts for it",
        means="The GPU is idle for a good part of the time, yet no CPU, disk or link of this machine is busy for the job: it waits for something that cannot be seen from here.",
        recognised="Time is lost and none of the causes that can be measured explains half of it.",
        severity=_LOST,
        advice=(
            Advice(
                "look what the main thread and a worker wait for",
                "a remote store, a database, a lock or a sleep leaves no trace on CPUs and disks",
                _PROFILE,
            ),
            Advice(
                "if it is a remote store: more requests in flight, larger objects, a local cache",
                "latency is hidden by asking for the next things before the last ones came",
                "copy a part of the data to a local disk and run on that",
            ),
        ),
        check=host_wait_unattributed,
        needs=("duty",),
        sources=("Brendan Gregg: off-CPU analysis",),
    ),
    Rule(
        id="gpu_underused",
        family="gpu_use",
        title="There is little for the GPU to do",
        means="The program sleeps most of the time and wakes for short bursts of work: a service with few requests, a notebook, an environment that steps slowly.",
        recognised="Most of the time is lost while the program sleeps, has no helpers, and hardly any data goes to the GPU.",
        severity="Medium.",
        advice=(
            Advice(
                "share the GPU: several small services on one (MPS, MIG, time slicing), or a smaller GPU",
                "nothing in the program is slow; there is simply little demand",
                "raise the demand (more clients) and see the utilization follow",
            ),
        ),
        check=gpu_underused,
        needs=("duty", "processes", "copies"),
        sources=("NVIDIA: MPS and MIG user guides",),
    ),
)
