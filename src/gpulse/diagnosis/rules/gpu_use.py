"""Rules on GPU use: how well the GPU is used while it is busy, and whether it is used at all."""

from __future__ import annotations

from gpulse.diagnosis.evidence import GpuEvidence
from gpulse.diagnosis.rule import Rule, RuleMatch, SignalText
from gpulse.model.finding import Advice, Evidence
from gpulse.model.formatting import long_size, rate
from gpulse.model.formatting import seconds as seconds_text


def thin_kernels(gpu: GpuEvidence) -> RuleMatch | None:
    """Kernels run all the time but leave most of the GPU unused."""
    s, t = gpu.window, gpu.t
    filled, dram, tensor = (
        s.mean(name) for name in ("sm_active_ratio", "dram_active_ratio", "tensor_active_ratio")
    )
    if not gpu.is_busy:
        return None
    if filled is None:
        return _thin_kernels_by_power(gpu)
    narrow = filled < t.thin_sm and (dram or 0.0) < t.thin_dram and (tensor or 0.0) < t.thin_tensor
    if not (narrow or _is_hollow(gpu, filled)):
        return None
    duty = s.duty or 0.0
    evidence = [
        Evidence("duty", "mean", duty, ">=", t.busy),
        Evidence("sm_active_ratio", "mean", filled, "<", t.thin_sm if narrow else t.stalled_sm),
    ]
    if dram is not None:
        evidence.append(
            Evidence("dram_active_ratio", "mean", dram, "<", t.thin_dram if narrow else t.stalled_activity)
        )
    if tensor is not None:
        evidence.append(
            Evidence(
                "tensor_active_ratio", "mean", tensor, "<", t.thin_tensor if narrow else t.stalled_activity
            )
        )
    watts = ""
    if gpu.power is not None:
        evidence.append(Evidence("power_ratio", "mean", gpu.power, "<", 1.0 if narrow else t.low_power))
        watts = f", at {gpu.power:.0%} of its power limit"
    empty = 1.0 - filled
    return RuleMatch(
        summary=f"is busy {duty:.0%} of the time with kernels that use {filled:.1%} of its SMs{watts}",
        severity=gpu.severity(empty),
        confidence=0.9 if dram is not None and tensor is not None else 0.7,
        evidence=tuple(evidence),
        ruled_out=("memory_bandwidth_bound: memory is not busy either",) if dram is not None else (),
        lost_ratio=empty,
        start=s.start,
    )


def _thin_kernels_by_power(gpu: GpuEvidence) -> RuleMatch | None:
    """The same without GPM: kernels run all the time and draw little power, and memory is not busy either."""
    s, t = gpu.window, gpu.t
    fill, dram, watts = s.estimated_fill, s.estimated_dram, s.mean("power_watts")
    if fill is None or dram is None or watts is None:
        return None
    if not fill.is_surely_below(t.estimated_fill) or dram >= t.thin_dram:
        return None
    duty = s.duty or 0.0
    empty = 1.0 - fill.ratio
    return RuleMatch(
        summary=f"is busy {duty:.0%} of the time with kernels that use about {fill.ratio:.0%} of the GPU (inferred from its power draw of {watts:.0f} W)",
        severity=gpu.severity(empty),
        confidence=0.6 if fill.is_learned else 0.5,
        evidence=(
            Evidence("duty", "mean", duty, ">=", t.busy),
            Evidence("estimated_fill_ratio", "mean", fill.ratio, "<", t.estimated_fill),
            Evidence("estimated_dram_active_ratio", "mean", dram, "<", t.thin_dram),
            Evidence("power_watts", "mean", watts, ">=", 0.0),
        ),
        ruled_out=(
            "memory_bandwidth_bound: memory is not busy either",
            f"pcie_copy_bound: PCIe traffic is only {rate(s.mean('copies') or 0.0)}",
        ),
        lost_ratio=empty,
        start=s.start,
        inferred=True,
    )


def _is_hollow(gpu: GpuEvidence, filled: float) -> bool:
    """Whether warps are resident but stalled: nothing computes or moves data, and power is low."""
    t = gpu.t
    pipes = [gpu.window.mean(f"{name}_active_ratio") for name in ("tensor", "dram", "fp64", "fp32", "fp16")]
    at_rest = all(part is not None and part < t.stalled_activity for part in pipes)
    return at_rest and filled < t.stalled_sm and (gpu.power or 1.0) < t.low_power


def tensor_cores_unused(gpu: GpuEvidence) -> RuleMatch | None:
    """Single-precision arithmetic runs on the regular pipes while the tensor cores are idle."""
    s, t = gpu.window, gpu.t
    filled, tensor, fp32, dram, fp64 = (
        s.mean(f"{name}_active_ratio") for name in ("sm", "tensor", "fp32", "dram", "fp64")
    )
    if not gpu.is_busy or filled is None or tensor is None or fp32 is None:
        return None
    if filled < t.sm_busy or tensor >= t.tensor_unused or fp32 < t.fp32_busy:
        return None
    if (dram or 0.0) >= min(t.dram_bound, fp32) or (fp64 or 0.0) >= t.fp64_busy:
        return None
    evidence = [
        Evidence("sm_active_ratio", "mean", filled, ">=", t.sm_busy),
        Evidence("tensor_active_ratio", "mean", tensor, "<", t.tensor_unused),
        Evidence("fp32_active_ratio", "mean", fp32, ">=", t.fp32_busy),
    ]
    if dram is not None:
        evidence.append(Evidence("dram_active_ratio", "mean", dram, "<", min(t.dram_bound, fp32)))
    return RuleMatch(
        summary=f"computes in single precision ({fp32:.0%} of the fp32 pipes in use) while its tensor cores are idle ({tensor:.1%} in use)",
        severity="medium",
        confidence=0.8,
        evidence=tuple(evidence),
        ruled_out=("memory_bandwidth_bound: memory is less busy than the arithmetic pipes",),
        start=s.start,
    )


def gpu_idle_allocated(gpu: GpuEvidence) -> RuleMatch | None:
    """A process holds memory and does nothing, or nothing anymore."""
    s, t = gpu.window, gpu.t
    seconds = s.idle_end if s.has_worked else s.steady
    used, duty = s.mean("memory_used_bytes", seconds), s.mean("duty", seconds)
    if not seconds or used is None or used < t.allocated_bytes or duty is None or duty >= t.idle_duty:
        return None
    if (s.mean("sm_active_ratio", seconds) or 0.0) >= t.idle_duty:
        return None
    if (s.mean("copies", seconds) or 0.0) >= 0.1 * t.copy_bytes_per_second:
        return None
    cores = s.job_cores(seconds)
    if (cores is None and s.has_worked) or (cores is not None and cores >= t.idle_cores):
        return (
            None  # its owner computes: it has not used the GPU yet, or not again, or only between two samples
        )
    over = "mean since the work stopped" if s.has_worked else "mean"
    evidence = [
        Evidence("memory_used_bytes", over, used, ">=", t.allocated_bytes),
        Evidence("duty", over, duty, "<", t.idle_duty),
    ]
    if cores is not None:
        evidence.append(Evidence("job_cores", over, cores, "<", t.idle_cores))
    length = sum(second.seconds for second in seconds)
    return RuleMatch(
        summary=f"is allocated but idle: {long_size(used)} of memory in use, busy {duty:.1%} of the time",
        severity="high" if length >= 3600 else "medium",
        confidence=0.9 if cores is not None else 0.4,  # whether its owner computes is unknown
        evidence=tuple(evidence),
        ruled_out=(f"slow_start: its processes use only {cores:.2f} CPUs",) if cores is not None else (),
        lost_ratio=1.0 - duty,
        start=seconds[0].start,
    )


def slow_start(gpu: GpuEvidence) -> RuleMatch | None:
    """The job has started and has not used the GPU yet."""
    s = gpu.window
    if not s.is_starting:
        return None
    seconds = gpu.now - (s.started if s.started is not None else s.job[0].start)
    cores = s.job_cores(s.job) or 0.0
    is_young = seconds < gpu.t.startup_seconds
    since = "has not been used yet" if is_young else "was not used during the observation"
    return RuleMatch(
        summary=f"{since}; its job has been running for {seconds_text(seconds)} and uses {cores:.1f} CPUs",
        severity="info" if is_young else "low",
        confidence=0.8,
        evidence=(
            Evidence("job_cores", "mean since the job appeared", cores, ">=", 0.3),
            Evidence("startup_seconds", "last", seconds, ">=", 0.0 if is_young else gpu.t.startup_seconds),
        ),
        start=s.job[0].start,
        end=s.job[-1].end,
    )


def compute_bound(gpu: GpuEvidence) -> RuleMatch | None:
    """The GPU's arithmetic is the limit, as it should be."""
    s, t = gpu.window, gpu.t
    tensor, filled, dram = (s.mean(f"{name}_active_ratio") for name in ("tensor", "sm", "dram"))
    if gpu.is_busy and filled is None:
        return _compute_bound_by_power(gpu)
    if not gpu.is_busy or filled is None or (dram or 0.0) >= t.dram_bound:
        return None
    if (tensor or 0.0) < t.compute_tensor and filled < t.compute_sm:
        return None
    evidence = [
        Evidence("duty", "mean", s.duty or 0.0, ">=", t.busy),
        Evidence("sm_active_ratio", "mean", filled, ">=", 0.0),
    ]
    if tensor is not None:
        evidence.append(Evidence("tensor_active_ratio", "mean", tensor, ">=", 0.0))
    tensor_text = f" and {tensor:.0%} of its tensor cores" if tensor is not None else ""
    return RuleMatch(
        summary=f"is fully used: busy {s.duty or 0.0:.0%} of the time with {filled:.0%} of its SMs{tensor_text} in use",
        severity="info",
        confidence=0.8,
        evidence=tuple(evidence),
        start=s.start,
    )


def _compute_bound_by_power(gpu: GpuEvidence) -> RuleMatch | None:
    """The same without GPM: kernels run all the time and draw as much power as the board gives them."""
    s, t = gpu.window, gpu.t
    fill, dram = s.estimated_fill, s.estimated_dram
    if fill is None or dram is None or dram >= t.dram_bound or fill.ratio < t.estimated_full:
        return None
    return RuleMatch(
        summary=f"is fully used: busy {s.duty or 0.0:.0%} of the time with about {fill.ratio:.0%} of the GPU in use (inferred from its power draw); the use of tensor cores is unknown",
        severity="info",
        confidence=0.6,
        evidence=(
            Evidence("duty", "mean", s.duty or 0.0, ">=", t.busy),
            Evidence("estimated_fill_ratio", "mean", fill.ratio, ">=", t.estimated_full),
        ),
        start=s.start,
        inferred=True,
    )


def memory_bandwidth_bound(gpu: GpuEvidence) -> RuleMatch | None:
    """GPU memory bandwidth is the limit."""
    s, t = gpu.window, gpu.t
    measured, estimated = s.mean("dram_active_ratio"), s.estimated_dram
    dram = measured if measured is not None else estimated
    if not gpu.is_busy or dram is None or dram < t.dram_bound:
        return None
    how = "" if measured is not None else " (inferred from its memory utilization)"
    signal = "dram_active_ratio" if measured is not None else "estimated_dram_active_ratio"
    return RuleMatch(
        summary=f"is limited by its memory bandwidth: {dram:.0%} of the peak in use{how}",
        severity="info",
        confidence=0.8 if measured is not None else 0.6,
        evidence=(
            Evidence("duty", "mean", s.duty or 0.0, ">=", t.busy),
            Evidence(signal, "mean", dram, ">=", t.dram_bound),
        ),
        start=s.start,
        inferred=measured is None,
    )


RULES = (
    Rule(
        id="gpu_idle_allocated",
        family="gpu_use",
        title="The GPU is allocated but idle",
        category="waste",
        means="A process holds memory on the GPU and does nothing with it. Examples are a forgotten notebook, a debugger at a breakpoint, or a waiting job. Nobody else can use that memory.",
        recognised="A process holds at least 1 GiB, no kernel runs, nothing is copied, and the process uses no CPU either.",
        severity="Medium; high after an hour.",
        advice=(
            Advice(
                "ask the owner to end the process or to shut down the notebook's kernel; a running program can release memory with `del` and torch.cuda.empty_cache()",
                "the memory stays allocated as long as the process lives",
                "`gpulse` shows the process's owner, command and age",
            ),
        ),
        check=gpu_idle_allocated,
        needs=("memory", "holders", "duty"),
        limits=("allocated_bytes", "idle_duty"),
        sources=("Princeton jobstats", "common practice in GPU sharing policies"),
    ),
    Rule(
        id="thin_kernels",
        family="gpu_use",
        title="Kernels leave most of the GPU unused",
        means="A kernel runs all the time, so utilization reads 100%, but it occupies only a few SMs (streaming multiprocessors). Typical causes are a small batch, a serial kernel, or decoding one token at a time.",
        recognised="The GPU is busy at least 90% of the time with few active SMs, and neither memory nor tensor cores are busy. An SM also counts as active while its warps stall, so up to 70% of the SMs may be active, provided that memory and every arithmetic pipe are less than 10% busy and the power draw is low. Without GPM (GPU performance monitoring), the used part of the GPU is inferred from its power draw.",
        severity="Depends on the unused part of the GPU: low from 10%, medium from 20%, high from 40%.",
        advice=(
            Advice(
                "increase the batch size or the sequence length, or batch requests (continuous batching)",
                "the same kernels then fill more SMs at almost no extra cost",
                "double the batch size: a step should take hardly any longer than before",
            ),
            Advice(
                "share the GPU (MPS, MIG) if the workload cannot grow",
                "several small programs together fill the GPU",
                "start a second copy of the program: both should run at nearly full speed",
            ),
        ),
        check=thin_kernels,
        needs=("duty", "fill", "dram"),
        limits=("busy", "thin_sm", "estimated_fill", "thin_dram", "thin_tensor"),
        quantities={"power_ratio": SignalText("power draw relative to the limit", "share")},
        yields_to=("collective_hang",),
        inferred_without_gpm=True,
        sources=("DCGM profiling metrics: SM active", "Kempner Institute GPU handbook"),
    ),
    Rule(
        id="tensor_cores_unused",
        family="gpu_use",
        title="Single-precision work does not use the tensor cores",
        means="The GPU computes in single precision on its regular pipes, while the tensor cores, which multiply matrices many times faster in TF32 or bf16, are idle. In training, a setting turns them on; simulations without matrix products cannot use them.",
        recognised="Kernels run nearly all the time and fill the GPU, the fp32 pipes are busy, less than 3% of the tensor cores are in use, and memory is less busy than the arithmetic pipes. (If memory is busier, the work is element-wise and cannot use tensor cores.)",
        severity="Medium.",
        advice=(
            Advice(
                "use torch.set_float32_matmul_precision('high') for TF32, or torch.autocast('cuda', dtype=torch.bfloat16)",
                "tensor cores multiply matrices several times faster than the fp32 pipes",
                "run a hundred steps with this setting: tensor_active_ratio should rise and steps should get faster",
            ),
        ),
        check=tensor_cores_unused,
        needs=("duty", "gpm"),
        limits=("busy", "sm_busy", "tensor_unused", "fp32_busy"),
        sources=("PyTorch: TF32 on Ampere and later", "kineto: automatic mixed precision advice"),
    ),
    Rule(
        id="slow_start",
        family="gpu_use",
        title="The job has not used the GPU yet",
        category="waste",
        means="A process is on the GPU but is still importing, compiling, loading or tokenizing on the host.",
        recognised="The GPU has not computed anything for the job yet, while the job computes on the host or loads data such as weights into GPU memory.",
        severity="Informational; low after five minutes.",
        advice=(
            Advice(
                "cache what is computed at every start (compiled kernels, tokenized data), and load weights lazily (safetensors, mmap)",
                "the GPU is allocated but unused while its job starts up",
                "`gpulse stacks` shows what the process is doing",
            ),
        ),
        check=slow_start,
        needs=("duty", "processes"),
        limits=("startup_seconds",),
        quantities={"startup_seconds": SignalText("time since the job started", "seconds")},
        without_job=True,
        sources=("Amazon SageMaker Debugger: max initialization time",),
    ),
    Rule(
        id="compute_bound",
        family="gpu_use",
        title="The GPU is fully used (compute-bound)",
        means="Kernels run all the time and fill the GPU, so the program makes full use of it. Only better kernels or a faster GPU would make the program faster.",
        recognised="The GPU is busy at least 90% of the time with at least 80% of its SMs (streaming multiprocessors) or 40% of its tensor cores in use. Without GPM (GPU performance monitoring), this is inferred from the power draw.",
        severity="Informational.",
        advice=(
            Advice(
                "no action is needed; to go even faster, use lower precision (fp8), better kernels (fused attention), or more GPUs",
                "the GPU does as much as these kernels allow",
                "compare tensor_active_ratio before and after the change",
            ),
        ),
        check=compute_bound,
        needs=("duty", "fill", "dram"),
        limits=("busy", "compute_tensor", "compute_sm", "estimated_full"),
        yields_to=("tensor_cores_unused", "gpu_contention"),
        inferred_without_gpm=True,
        sources=("NVIDIA: deep learning performance guide",),
    ),
    Rule(
        id="memory_bandwidth_bound",
        family="gpu_use",
        title="GPU memory bandwidth is the limit",
        means="Kernels read and write device memory at nearly full speed. This is normal for element-wise operations, normalization and decoding.",
        recognised="The GPU is busy at least 90% of the time with at least 60% of the peak memory bandwidth in use. Without GPM (GPU performance monitoring), this is inferred from NVML's memory utilization, which reads 100% at about 80% of the peak.",
        severity="Informational.",
        advice=(
            Advice(
                "fuse element-wise operations (torch.compile), use smaller data types, or increase the batch size of matrix operations",
                "each fused operation saves one pass over memory",
                "dram_active_ratio should fall and steps should get faster",
            ),
        ),
        check=memory_bandwidth_bound,
        needs=("duty", "dram"),
        limits=("busy", "dram_bound"),
        inferred_without_gpm=True,
        sources=("Roofline model", "XProf: memory-bound programs"),
    ),
)
