"""Rules on the host side of the program: the GPU waits for the thread that feeds it, or for an unknown cause."""

from __future__ import annotations

from gpulse.diagnosis.evidence import Cause, GpuEvidence, runnable
from gpulse.diagnosis.rule import Rule, RuleMatch, SignalText
from gpulse.model.finding import Advice, Evidence


def _is_launch_bound(gpu: GpuEvidence) -> bool:
    """Whether the GPU runs many small kernels and waits between them."""
    t, fill, estimated = gpu.t, gpu.fill, gpu.window.estimated_fill
    if (gpu.window.duty or 0.0) < t.rare_duty:
        return False
    launches = gpu.window.mean("pcie_rx_bytes_per_second", gpu.attribution.seconds)
    many = launches is None or launches >= t.launch_bytes_per_second
    if fill is None:
        return estimated is not None and (
            estimated.is_surely_below(t.estimated_fill) or (estimated.ratio < t.launch_fill and many)
        )
    return fill < t.launch_fill_surely or (fill < t.launch_fill and many)


def _thread_match(gpu: GpuEvidence, summary: str, *evidence: Evidence, least_cores: float = 0.0) -> RuleMatch:
    cores = gpu.window.cpu("cores", gpu.attribution.of("main")) or 0.0
    feeding = gpu.window.cpu("feeding_cores", gpu.attribution.of("main")) or 0.0
    pegged = max(gpu.t.busy_thread_cores, 1.0 - gpu.t.explained * gpu.lost)
    share = gpu.attribution.shares["main"]
    confidence = gpu.confidence(share)
    if "copies" not in gpu.window.signals:
        # A thread that copies pageable memory looks the same where PCIe traffic cannot be seen.
        confidence = min(confidence, 0.4)
    return RuleMatch(
        summary=summary,
        severity=gpu.severity(gpu.lost),
        confidence=confidence,
        evidence=(
            gpu.lost_evidence(),
            gpu.explained_evidence("main"),
            Evidence("feeding_cores", "average while computing", feeding, ">=", pegged),
            Evidence("trainer_cores", "average while computing", cores, ">=", least_cores),
            *evidence,
        ),
        ruled_out_causes=gpu.ruled_out("main"),
        lost_ratio=gpu.lost,
        start=gpu.attribution.onset("main", gpu.t),
    )


def launch_bound(gpu: GpuEvidence) -> RuleMatch | None:
    """Launching the kernels takes longer than running them."""
    if gpu.cause != "main" or not _is_launch_bound(gpu):
        return None
    if gpu.fill is None:
        return _launch_bound_by_power(gpu)
    fill = gpu.fill
    evidence = [Evidence("fill_ratio", "mean", fill, "<", gpu.t.launch_fill)]
    launches = gpu.window.mean("pcie_rx_bytes_per_second", gpu.attribution.seconds)
    if launches is not None and fill >= gpu.t.launch_fill_surely:
        least = gpu.t.launch_bytes_per_second
        evidence.append(Evidence("pcie_rx_bytes_per_second", gpu.over, launches, ">=", least))
    return _thread_match(
        gpu,
        f"is idle {gpu.lost:.0%} of the time between kernels that fill only {fill:.0%} of the GPU; launching them takes longer than running them",
        *evidence,
    )


def _launch_bound_by_power(gpu: GpuEvidence) -> RuleMatch | None:
    """The same without GPM: the kernels between the gaps draw little power."""
    fill = gpu.window.estimated_fill
    if fill is None:
        return None
    match = _thread_match(
        gpu,
        f"is idle {gpu.lost:.0%} of the time between kernels that use about {fill.ratio:.0%} of the GPU (inferred from its power draw); launching them takes longer than running them",
        Evidence("estimated_fill_ratio", "mean", fill.ratio, "<", gpu.t.launch_fill),
    )
    return match._replace(confidence=min(match.confidence, 0.6 if fill.is_learned else 0.5), inferred=True)


def input_main_process(gpu: GpuEvidence) -> RuleMatch | None:
    """The main process prepares the input itself, in turns with the GPU's work."""
    if gpu.cause != "main" or _is_launch_bound(gpu) or not _copies_input(gpu):
        return None
    seconds, t = gpu.attribution.of("main"), gpu.t
    cores = gpu.window.cpu("cores", seconds) or 0.0
    copied, returned = (
        gpu.window.mean(f"pcie_{way}_bytes_per_second", seconds) or 0.0 for way in ("rx", "tx")
    )
    plural = "CPU" if f"{cores:.1f}" == "1.0" else "CPUs"
    return _thread_match(
        gpu,
        f"waits {gpu.lost:.0%} of the time for its input, which the main process prepares itself on {cores:.1f} {plural}",
        Evidence(
            "pcie_rx_bytes_per_second", "average while computing", copied, ">=", t.input_bytes_per_second
        ),
        Evidence(
            "pcie_tx_bytes_per_second",
            "average while computing",
            returned,
            "<=",
            copied / t.input_over_output,
        ),
    )


def _copies_input(gpu: GpuEvidence) -> bool:
    """Whether a program without workers copies batches of data to the GPU, and much less back."""
    window, t, seconds = gpu.window, gpu.t, gpu.attribution.of("main")
    copied, returned = (window.mean(f"pcie_{way}_bytes_per_second", seconds) for way in ("rx", "tx"))
    return (
        not window.has_workers
        and copied is not None
        and copied >= t.input_bytes_per_second
        and copied >= t.input_over_output * (returned or 0.0)
    )


def _computes_on_many_threads(gpu: GpuEvidence) -> bool:
    return (gpu.window.cpu("cores", gpu.attribution.of("main")) or 0.0) >= gpu.t.many_threads_cores


def host_many_threads(gpu: GpuEvidence) -> RuleMatch | None:
    """The GPU waits for CPU work that the program does on many threads."""
    if gpu.cause != "main" or _is_launch_bound(gpu) or _copies_input(gpu):
        return None
    if not _computes_on_many_threads(gpu):
        return None
    cores = gpu.window.cpu("cores", gpu.attribution.of("main")) or 0.0
    return _thread_match(
        gpu,
        f"waits {gpu.lost:.0%} of the time for the program, which computes on {cores:.1f} CPUs during this time",
        least_cores=gpu.t.many_threads_cores,
    )


def host_single_thread(gpu: GpuEvidence) -> RuleMatch | None:
    """The program's own thread computes while the GPU waits."""
    if gpu.cause != "main" or _is_launch_bound(gpu) or _copies_input(gpu) or _computes_on_many_threads(gpu):
        return None
    cores = gpu.window.cpu("cores", gpu.attribution.of("main")) or 0.0
    evidence = []
    if gpu.fill is not None:
        evidence.append(Evidence("fill_ratio", "mean", gpu.fill, ">=", gpu.t.launch_fill_surely))
    return _thread_match(
        gpu,
        f"waits {gpu.lost:.0%} of the time for the program, which uses {cores:.1f} CPUs during this time",
        *evidence,
    )


def cpu_oversubscribed(gpu: GpuEvidence) -> RuleMatch | None:
    """There are more runnable threads than CPUs, and the job waits for its turn."""
    if gpu.cause != "crowded":
        return None
    t, crowd = gpu.t, gpu.attribution.of("crowded")
    ratio = runnable(gpu.window, crowd) or 0.0
    evidence = [
        gpu.lost_evidence(),
        gpu.explained_evidence("crowded"),
        Evidence("runnable_per_cpu", "average while waiting for a CPU", ratio, ">=", t.runnable_per_core),
    ]
    waits = gpu.window.cpu("run_wait", crowd)
    if waits is not None:
        least = t.run_wait if waits >= t.run_wait else t.run_wait_some
        evidence.append(Evidence("run_wait_ratio", "average while waiting for a CPU", waits, ">=", least))
    pressure = gpu.window.host("pressure_cpu_some_ratio", crowd)
    if pressure is not None:
        evidence.append(
            Evidence(
                "pressure_cpu_some_ratio", "average while waiting for a CPU", pressure, ">=", t.cpu_pressure
            )
        )
    share = gpu.attribution.shares["crowded"]
    return RuleMatch(
        summary=f"is idle {gpu.lost:.0%} of the time because its processes wait for a CPU; there are {ratio:.1f} runnable threads per CPU",
        severity=gpu.severity(gpu.lost),
        confidence=gpu.confidence(share),
        evidence=tuple(evidence),
        ruled_out_causes=gpu.ruled_out("crowded"),
        lost_ratio=gpu.lost,
        start=gpu.attribution.onset("crowded", t),
    )


def cgroup_cpu_throttled(gpu: GpuEvidence) -> RuleMatch | None:
    """The cgroup's CPU limit stops the job repeatedly."""
    if gpu.cause != "throttled":
        return None
    ratio = gpu.window.cpu("throttled", gpu.attribution.of("throttled")) or 0.0
    return RuleMatch(
        summary=f"is idle {gpu.lost:.0%} of the time because the job's cgroup uses up its CPU limit in {ratio:.0%} of the scheduling periods",
        severity=gpu.severity(gpu.lost),
        confidence=gpu.confidence(gpu.attribution.shares["throttled"]),
        evidence=(
            gpu.lost_evidence(),
            gpu.explained_evidence("throttled"),
            Evidence("cpu_throttled_ratio", "average while throttled", ratio, ">=", gpu.t.throttled_periods),
        ),
        ruled_out_causes=gpu.ruled_out("throttled"),
        lost_ratio=gpu.lost,
        start=gpu.attribution.onset("throttled", gpu.t),
    )


def host_wait_unattributed(gpu: GpuEvidence) -> RuleMatch | None:
    """Time is lost, and nothing on this machine explains it."""
    if gpu.cause not in ("none", "throttled", "swapping") or _is_sparse(gpu) or not gpu.window.has_worked:
        return None
    t = gpu.t
    seen = gpu.window.signals
    shares = gpu.attribution.shares
    cores = gpu.window.cpu("cores", gpu.attribution.seconds)
    evidence = [
        gpu.lost_evidence(),
        *(
            gpu.explained_evidence(cause)._replace(threshold=0.0)
            for cause in sorted(shares, key=lambda name: -shares[name])
            if shares[cause] >= 0.1 or cause == "none"
        ),
    ]
    if cores is not None:
        evidence.append(
            Evidence(
                "trainer_cores", gpu.over, cores, "<", max(t.busy_thread_cores, 1.0 - t.explained * gpu.lost)
            )
        )
    is_known = seen >= {"gpm", "processes", "host", "io"} and ("pressure" in seen or _counts_waits(gpu))
    confidence = 0.6 if is_known else 0.4 if "processes" in seen else 0.3
    if gpu.takes_turns:
        confidence = min(confidence, 0.4)
    return RuleMatch(
        summary=f"waits {gpu.lost:.0%} of the time{_meanwhile(gpu)}",
        severity=gpu.severity(gpu.lost),
        confidence=confidence,
        evidence=tuple(evidence),
        ruled_out_causes=gpu.ruled_out(),
        lost_ratio=gpu.lost,
        start=gpu.attribution.onset(gpu.cause, gpu.t),
    )


def _meanwhile(gpu: GpuEvidence) -> str:
    """Describe what is known about the time in which the GPU waited."""
    if gpu.takes_turns:
        return " while the program works on its other GPUs, one at a time"
    if gpu.cause == "throttled":
        return " while the job's cgroup has used up its CPU limit"
    if gpu.cause == "swapping":
        return " while the machine swaps"
    if "processes" not in gpu.window.signals:
        return "; the activity of its processes cannot be read"
    shares = gpu.attribution.shares
    named = sorted(_CAUSE_TEXTS[cause] for cause in shares if cause != "none" and shares[cause] >= 0.3)
    if named:
        return f", partly for {' and '.join(named)}, but mostly for something that is not visible on this machine"
    cores = gpu.window.cpu("cores", gpu.attribution.seconds)
    if cores is not None and cores >= gpu.t.explained * gpu.lost:
        return f" while the program uses {cores:.1f} CPUs, which is not enough to identify it as the cause"
    return (
        " while nothing on this machine is busy: possible causes are the network, a remote service or a lock"
    )


_CAUSE_TEXTS: dict[Cause, str] = {
    "throttled": "the cgroup's CPU limit",
    "swapping": "swapped-out memory",
    "crowded": "a free CPU",
    "storage": "storage",
    "copies": "copies",
    "workers": "the workers",
    "main": "the program itself",
}


def _counts_waits(gpu: GpuEvidence) -> bool:
    return gpu.window.cpu("run_wait") is not None


def _is_sparse(gpu: GpuEvidence) -> bool:
    """Whether the program itself has little to do: no workers, hardly any input, mostly asleep."""
    window, t = gpu.window, gpu.t
    if not window.signals >= {"processes", "copies"} or window.has_workers:
        return False
    traffic = window.mean("pcie_rx_bytes_per_second")
    cores = window.cpu("cores")
    return (
        traffic is not None
        and traffic < t.underused_bytes_per_second
        and cores is not None
        and cores < t.sleeping_cores
        and gpu.lost >= t.lost_high
    )


def gpu_underused(gpu: GpuEvidence) -> RuleMatch | None:
    """The program gives the GPU little work."""
    if gpu.cause != "none" or not _is_sparse(gpu) or not gpu.window.has_worked:
        return None
    t = gpu.t
    cores = gpu.window.cpu("cores") or 0.0
    traffic = gpu.window.mean("pcie_rx_bytes_per_second") or 0.0
    duty = gpu.window.duty or 0.0
    return RuleMatch(
        summary=f"is busy only {duty:.1%} of the time because the program sleeps between short bursts of work ({cores:.2f} CPUs used)",
        severity="medium",
        confidence=0.7 if gpu.window.length >= 15 else 0.6,
        evidence=(
            gpu.lost_evidence(),
            Evidence("duty", "mean", duty, "<", 1.0 - t.lost_high),
            Evidence("trainer_cores", "mean", cores, "<", t.sleeping_cores),
            Evidence("pcie_rx_bytes_per_second", "mean", traffic, "<", t.underused_bytes_per_second),
        ),
        ruled_out_causes=gpu.ruled_out(),
        lost_ratio=gpu.lost,
        start=gpu.window.start,
    )


_LOST = "Depends on the lost GPU time: low from 10%, medium from 20%, high from 40%."
_PROFILE = "with py-spy installed, `gpulse why` names the line of code, and `gpulse stacks` shows what every thread is doing"

RULES = (
    Rule(
        id="cpu_oversubscribed",
        family="host",
        title="Too many threads compete for the CPUs",
        means="The threads that feed the GPU are ready to run but wait for a CPU, because far more threads are runnable than there are CPUs: every worker has its own thread pool, or another job uses the CPUs.",
        recognised="GPU time is lost while runnable threads outnumber the CPUs and the job's own processes wait for a CPU at least 30% of the time, or 10% under high CPU pressure. If the kernel does not report how long processes wait, high CPU pressure is enough, provided that the job uses the CPU at all. If the job's own workers occupy the CPUs, one each, the finding is input_cpu_bound.",
        severity=_LOST,
        advice=(
            Advice(
                "set OMP_NUM_THREADS and MKL_NUM_THREADS to the number of CPUs divided by the number of workers, or to 1 in each worker",
                "otherwise each worker starts a thread for every CPU of the machine",
                "`gpulse -c` shows the threads and the CPU use of every process; with OMP_NUM_THREADS=1, the waiting should end",
            ),
            Advice(
                "move the other job away, or give each job its own CPUs (taskset, cgroup, --cpus-per-task)",
                "the kernel divides CPU time among threads, so a job with more threads gets more of it",
                "pause the other job for ten seconds (`kill -STOP PID`, then `kill -CONT PID`): the GPU's utilization should rise",
            ),
        ),
        check=cpu_oversubscribed,
        needs=("duty", "host"),
        limits=("lost", "explained", "runnable_per_core", "run_wait", "run_wait_some", "cpu_pressure"),
        explains="crowded",
        stacks="idle",
        sources=(
            "proc(5): schedstat and pressure",
            "PyTorch issue 82219",
            "node exporter mixin: load per core",
        ),
    ),
    Rule(
        id="cgroup_cpu_throttled",
        family="host",
        title="The cgroup's CPU limit throttles the job",
        means="The container or job may use only a fixed amount of CPU time per period. Once it has used that up, it is paused until the next period, even when the machine's CPUs are idle.",
        recognised="GPU time is lost while the cgroup (control group) is throttled in at least a quarter of its scheduling periods.",
        severity=_LOST,
        advice=(
            Advice(
                "raise or remove the CPU limit (docker --cpus, Kubernetes limits.cpu), and start no more threads than it allows",
                "the limit counts time, not CPUs: sixteen threads use up two CPUs' worth of time in an eighth of the period",
                "`cat /sys/fs/cgroup/cpu.stat`: nr_throttled should stop growing",
            ),
        ),
        check=cgroup_cpu_throttled,
        needs=("duty",),
        limits=("lost", "explained", "throttled_periods"),
        explains="throttled",
        sources=("Linux cgroup v2 documentation: cpu.max and cpu.stat",),
        shown=False,
    ),
    Rule(
        id="launch_bound",
        family="host",
        title="Launch overhead dominates because kernels are too small",
        means="The program sends the GPU thousands of tiny kernels. Launching each takes longer than running it, so the GPU is idle between kernels and mostly unused while they run.",
        recognised="GPU time is lost while the program's threads are busy, the kernels fill less than half of the SMs (streaming multiprocessors), and the launches are visible in the PCIe traffic. Without GPM (GPU performance monitoring), the part of the GPU that the kernels fill is inferred from the power draw.",
        severity=_LOST,
        advice=(
            Advice(
                "use torch.compile (mode='reduce-overhead'), CUDA graphs, or fused operators and optimizers (fused=True)",
                "many small kernels become a few large ones, or are launched together",
                "increase the batch size fourfold: if steps take hardly any longer, launch overhead was the limit",
            ),
            Advice(
                "avoid .item(), .cpu() and print() in the training loop",
                "each call waits until the GPU has finished its work, and the GPU is then idle until the next launch",
                "count synchronizing calls with torch.cuda.set_sync_debug_mode('warn')",
            ),
        ),
        check=launch_bound,
        needs=("duty", "processes", "fill"),
        limits=(
            "lost",
            "explained",
            "busy_thread_cores",
            "launch_fill",
            "estimated_fill",
            "launch_bytes_per_second",
        ),
        quantities={
            "fill_ratio": SignalText("SMs in use while kernels run", "share"),
            "feeding_cores": SignalText("CPUs used by the two busiest threads", "cpus"),
        },
        explains="main",
        inferred_without_gpm=True,
        stacks="idle",
        sources=("PyTorch: CUDA graphs", "NVIDIA Nsight Systems: launch latency"),
    ),
    Rule(
        id="input_main_process",
        family="input",
        title="The main process prepares the input itself",
        means="The program has no data-loading workers (num_workers=0): it reads, decodes and transforms each batch in the process that also launches the kernels, on one thread or on many, and the GPU waits during that time.",
        recognised="GPU time is lost, and for at least half of that time the processes on the GPU compute on the CPU. There are no active workers, and batches are copied to the GPU: at least 100 MB/s over PCIe, and at least three times as much as is copied back. Smaller inputs, such as tokens, are reported as host_single_thread.",
        severity=_LOST,
        advice=(
            Advice(
                "prepare batches in workers: num_workers > 0 in the DataLoader, with pin_memory=True and persistent_workers=True",
                "workers prepare the next batches while the GPU computes; the main process only copies them",
                "feed the model the same batch from GPU memory at every step: each step should become shorter by the time that loading took",
            ),
            Advice(
                "give each worker one thread (OMP_NUM_THREADS=1, torch.set_num_threads(1)), and start as many workers as there are CPUs to spare",
                "preparing one sample per process scales better than preparing one sample on many threads",
                "`gpulse -c` shows the CPU use of every worker",
            ),
        ),
        check=input_main_process,
        needs=("duty", "processes", "copies"),
        limits=("lost", "explained", "busy_thread_cores", "input_bytes_per_second"),
        explains="main",
        stacks="idle",
        sources=("PyTorch data loading documentation", "PyTorch performance tuning guide"),
    ),
    Rule(
        id="host_many_threads",
        family="host",
        title="The GPU waits for the program's multithreaded CPU work",
        means="Between kernels, the program computes on many CPUs (transforms of a DataLoader with num_workers=0, an optimizer on the CPU, NumPy or pandas), and the GPU waits for it.",
        recognised="GPU time is lost, and the processes on the GPU compute on at least three CPUs for at least half of that time. If PCIe traffic shows that they prepare input, the finding is input_main_process.",
        severity=_LOST,
        advice=(
            Advice(
                "load data in workers (num_workers > 0) if the loop loads it",
                "loading then overlaps with the GPU's work instead of alternating with it",
                "replace the loader with one batch that stays on the GPU: each step should become shorter by the time that loading took",
            ),
            Advice(
                "move the computation to the GPU, or let it overlap with the GPU's work in another thread or process",
                "the GPU has time to spare while these threads compute",
                _PROFILE,
            ),
        ),
        check=host_many_threads,
        needs=("duty", "processes"),
        limits=("lost", "explained", "many_threads_cores"),
        explains="main",
        stacks="idle",
        sources=("PyTorch performance tuning guide",),
    ),
    Rule(
        id="host_single_thread",
        family="host",
        title="The GPU waits for the program's own CPU work",
        means="Between kernels, the program computes on the CPU, mostly on one thread (Python code, collating, tokenizing, logging, loading small samples with num_workers=0), and the GPU waits for it.",
        recognised="GPU time is lost, and the processes on the GPU compute on at most three CPUs for at least half of that time. A thread that waits for the GPU also keeps a CPU busy, but then the GPU is busy too; here it is idle.",
        severity=_LOST,
        advice=(
            Advice(
                "find out what the main thread does, and move this work out of the training loop: use workers, vectorize, or log less",
                "work that alternates with the GPU's work adds to every step",
                _PROFILE,
            ),
            Advice(
                "load data in workers (num_workers > 0) if the loop loads it",
                "loading then overlaps with the GPU's work instead of alternating with it",
                "replace the loader with one batch that stays on the GPU: each step should become shorter by the time that loading took",
            ),
        ),
        check=host_single_thread,
        needs=("duty", "processes"),
        limits=("lost", "explained", "busy_thread_cores"),
        explains="main",
        stacks="idle",
        sources=("PyTorch performance tuning guide",),
    ),
    Rule(
        id="host_wait_unattributed",
        family="host",
        title="The GPU waits, and the cause is not visible on this machine",
        means="The GPU is idle for much of the time, but the job keeps no CPU, disk or link of this machine busy. The job waits for something that gpulse cannot see from here.",
        recognised="GPU time is lost, and none of the measurable causes explains half of it.",
        severity=_LOST,
        advice=(
            Advice(
                "find out what the main thread and a worker wait for",
                "waiting for a remote store, a database, a lock or a timer leaves no trace on CPUs and disks",
                _PROFILE,
            ),
            Advice(
                "if data comes from a remote store, keep more requests in flight, read larger objects, or add a local cache",
                "issuing requests ahead of time hides latency",
                "copy part of the data to a local disk and run the program on this copy: the waiting should disappear",
            ),
        ),
        check=host_wait_unattributed,
        needs=("duty",),
        limits=("lost",),
        yields_to=("gpu_idle_allocated",),
        stacks="idle",
        sources=("Brendan Gregg: off-CPU analysis",),
    ),
    Rule(
        id="gpu_underused",
        family="gpu_use",
        title="The GPU has little work to do",
        category="waste",
        means="The program sleeps most of the time and wakes up for short bursts of work. Examples are a service with few requests, a notebook, or a slow simulation environment.",
        recognised="The GPU is idle at least 40% of the time, while the program mostly sleeps, has no worker processes, and sends hardly any data to the GPU.",
        severity="Medium.",
        advice=(
            Advice(
                "share the GPU between several small services (MPS, MIG, time slicing), or use a smaller GPU",
                "no part of the program is slow; there is just little work",
                "increase the load (more clients): utilization should rise with it",
            ),
        ),
        check=gpu_underused,
        needs=("duty", "processes", "copies"),
        limits=("lost", "sleeping_cores", "underused_bytes_per_second"),
        yields_to=("gpu_idle_allocated",),
        stacks="idle",
        sources=("NVIDIA: MPS and MIG user guides",),
    ),
)
