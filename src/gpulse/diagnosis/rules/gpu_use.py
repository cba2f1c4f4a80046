"""How well the GPU is used while it is busy, and whether it is used at all."""

from __future__ import annotations

from gpulse.diagnosis.case import Case
from gpulse.diagnosis.rule import Match, Rule
from gpulse.model.finding import Advice, Evidence
from gpulse.model.units import long_size


def thin_kernels(case: Case) -> Match | None:
    """Busy all the time with kernels that leave most of the GPU empty."""
    s, t = case.stretch, case.t
    filled, dram, tensor = (
        s.mean(name) for name in ("sm_active_ratio", "dram_active_ratio", "tensor_active_ratio")
    )
    if not case.is_busy or filled is None:
        return None
    narrow = filled < t.thin_sm and (dram or 0.0) < t.thin_dram and (tensor or 0.0) < t.thin_tensor
    if not (narrow or _is_hollow(case, filled)):
        return None
    duty = s.duty or 0.0
    evidence = [
        Evidence("duty", "mean", duty, ">=", t.busy),
        Evidence("sm_active_ratio", "mean", filled, "<", t.thin_sm if narrow else t.hollow_sm),
    ]
    if dram is not None:
        evidence.append(Evidence("dram_active_ratio", "mean", dram, "<", t.thin_dram if narrow else t.hollow))
    if tensor is not None:
        evidence.append(
            Evidence("tensor_active_ratio", "mean", tensor, "<", t.thin_tensor if narrow else t.hollow)
        )
    watts = ""
    if case.power is not None:
        evidence.append(Evidence("power_ratio", "mean", case.power, "<", 1.0 if narrow else t.hollow_power))
        watts = f", at {case.power:.0%} of its power"
    empty = 1.0 - filled
    return Match(
        summary=f"is busy {duty:.0%} of the time with kernels that use {filled:.1%} of its multiprocessors{watts}",
        severity=case.severity(empty),
        confidence=0.9 if dram is not None and tensor is not None else 0.7,
        evidence=tuple(evidence),
        ruled_out=("memory_bandwidth_bound: the memory is not busy either",) if dram is not None else (),
        lost_ratio=empty,
        start=s.start,
    )


def _is_hollow(case: Case, filled: float) -> bool:
    """Whether warps are there, and stall: nothing computes or moves, and the board is cool."""
    t = case.t
    pipes = [case.stretch.mean(f"{name}_active_ratio") for name in ("tensor", "dram", "fp64", "fp32", "fp16")]
    at_rest = all(part is not None and part < t.hollow for part in pipes)
    return at_rest and filled < t.hollow_sm and (case.power or 1.0) < t.hollow_power


def tensor_cores_unused(case: Case) -> Match | None:
    """Single-precision arithmetic on the ordinary pipes while the tensor cores rest."""
    s, t = case.stretch, case.t
    filled, tensor, fp32, dram, fp64 = (
        s.mean(f"{name}_active_ratio") for name in ("sm", "tensor", "fp32", "dram", "fp64")
    )
    if not case.is_busy or filled is None or tensor is None or fp32 is None:
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
    return Match(
        summary=f"computes in single precision ({fp32:.0%} of the fp32 pipes) while its tensor cores rest ({tensor:.1%})",
        severity="medium",
        confidence=0.8,
        evidence=tuple(evidence),
        ruled_out=("memory_bandwidth_bound: the memory is less busy than the arithmetic",),
        start=s.start,
    )


def gpu_idle_allocated(case: Case) -> Match | None:
    """Memory held by a process that does nothing, or nothing any more."""
    s, t = case.stretch, case.t
    seconds = s.still_end if s.has_worked else s.steady
    used, duty = s.mean("memory_used_bytes", seconds), s.mean("duty", seconds)
    if not seconds or used is None or used < t.held_bytes or duty is None or duty >= t.still:
        return None
    if (s.mean("sm_active_ratio", seconds) or 0.0) >= t.still:
        return None
    if (s.mean("copies", seconds) or 0.0) >= 0.1 * t.copy_bytes_per_second:
        return None
    cores = s.job_cores(seconds)
    if (cores is None and s.has_worked) or (cores is not None and cores >= t.idle_cores):
        return None  # its owner computes: it has not come to the GPU yet, or again, or between two looks
    over = "mean since it stopped" if s.has_worked else "mean"
    evidence = [
        Evidence("memory_used_bytes", over, used, ">=", t.held_bytes),
        Evidence("duty", over, duty, "<", t.still),
    ]
    if cores is not None:
        evidence.append(Evidence("job_cores", over, cores, "<", t.idle_cores))
    length = sum(second.seconds for second in seconds)
    return Match(
        summary=f"is held and not used: {long_size(used)} of memory, busy {duty:.1%} of the time",
        severity="high" if length >= 3600 else "medium",
        confidence=0.9 if cores is not None else 0.4,  # nobody could say whether its owner computes
        evidence=tuple(evidence),
        ruled_out=(f"slow_start: its processes use {cores:.2f} CPUs",) if cores is not None else (),
        lost_ratio=1.0 - duty,
        start=seconds[0].start,
    )


def slow_start(case: Case) -> Match | None:
    """The job is there and has not used the GPU yet."""
    s = case.stretch
    if not s.is_starting:
        return None
    seconds = case.now - (s.started if s.started is not None else s.job[0].start)
    cores = s.job_cores(s.job) or 0.0
    is_young = seconds < case.t.startup_seconds
    since = "has not been used yet" if is_young else "was not used while it was watched"
    return Match(
        summary=f"{since}, {seconds:.0f} s after its job started, which computes on {cores:.1f} CPUs",
        severity="info" if is_young else "low",
        confidence=0.8,
        evidence=(
            Evidence("job_cores", "mean since it came", cores, ">=", 0.3),
            Evidence("startup_seconds", "last", seconds, ">=", 0.0 if is_young else case.t.startup_seconds),
        ),
        start=s.job[0].start,
        end=s.job[-1].end,
    )


def compute_bound(case: Case) -> Match | None:
    """The GPU's arithmetic is the limit: as it should be."""
    s, t = case.stretch, case.t
    tensor, filled, dram = (s.mean(f"{name}_active_ratio") for name in ("tensor", "sm", "dram"))
    if not case.is_busy or filled is None or (dram or 0.0) >= t.dram_bound:
        return None
    if (tensor or 0.0) < t.compute_tensor and filled < t.compute_sm:
        return None
    evidence = [
        Evidence("duty", "mean", s.duty or 0.0, ">=", t.busy),
        Evidence("sm_active_ratio", "mean", filled, ">=", 0.0),
    ]
    if tensor is not None:
        evidence.append(Evidence("tensor_active_ratio", "mean", tensor, ">=", 0.0))
    told = f", tensor cores {tensor:.0%}" if tensor is not None else ""
    return Match(
        summary=f"is the limit itself: busy {s.duty or 0.0:.0%} of the time, multiprocessors {filled:.0%}{told}",
        severity="info",
        confidence=0.8,
        evidence=tuple(evidence),
        start=s.start,
    )


def memory_bandwidth_bound(case: Case) -> Match | None:
    """The GPU's memory is the limit."""
    s, t = case.stretch, case.t
    dram = s.mean("dram_active_ratio")
    if not case.is_busy or dram is None or dram < t.dram_bound:
        return None
    return Match(
        summary=f"is limited by its own memory: {dram:.0%} of the peak bandwidth in use",
        severity="info",
        confidence=0.8,
        evidence=(
            Evidence("duty", "mean", s.duty or 0.0, ">=", t.busy),
            Evidence("dram_active_ratio", "mean", dram, ">=", t.dram_bound),
        ),
        start=s.start,
    )


RULES = (
    Rule(
        id="gpu_idle_allocated",
        family="gpu_use",
        title="A GPU is held and not used",
        means="A process keeps memory on the GPU and does nothing with it: a forgotten notebook, a debugger at a breakpoint, a job that waits. Nobody else can use the memory.",
        recognised="A process holds at least 1 GiB, no kernel runs, nothing is copied, and the process uses no CPU either.",
        severity="Medium; high after an hour.",
        advice=(
            Advice(
                "ask its owner, or end it: shut the notebook's kernel down, release with `del` and torch.cuda.empty_cache()",
                "the memory stays taken for as long as the process lives",
                "`gpulse` shows owner, command and age of the process",
            ),
        ),
        check=gpu_idle_allocated,
        needs=("memory", "holders", "duty"),
        sources=("Princeton jobstats", "common practice of GPU sharing policies"),
    ),
    Rule(
        id="thin_kernels",
        family="gpu_use",
        title="Kernels leave most of the GPU empty",
        means="Some kernel runs all the time, so utilization reads 100 %, but it occupies a small part of the multiprocessors: too small a batch, a serial kernel, decoding one token at a time.",
        recognised="Busy at least 90 % of the time with few active multiprocessors, while neither memory nor tensor cores are busy; or with up to 70 % of them, whose warps only wait: no pipe and no memory at 10 %, and little power. (A multiprocessor counts as active while its warps stall.)",
        severity="By the empty share of the GPU: low from 10 %, medium from 20 %, high from 40 %.",
        advice=(
            Advice(
                "raise the batch size or the sequence length, or batch requests (continuous batching)",
                "the same kernels then fill more multiprocessors at hardly any cost",
                "double the batch: a step takes nearly as long as before",
            ),
            Advice(
                "share the GPU (MPS, MIG) if the work cannot grow",
                "several thin programs fill what one leaves empty",
                "start a second copy: both run at nearly full speed",
            ),
        ),
        check=thin_kernels,
        needs=("duty", "gpm"),
        sources=("DCGM profiling metrics: SM active", "Kempner Institute GPU handbook"),
    ),
    Rule(
        id="tensor_cores_unused",
        family="gpu_use",
        title="Single precision without tensor cores",
        means="The GPU is full of single-precision arithmetic on its ordinary pipes, while the tensor cores, which multiply matrices many times faster in TF32 or bf16, rest. For training that is a setting; for simulations without matrix products it is how it must be.",
        recognised="Busy and full, fp32 pipes at work, tensor cores below 3 %, and the memory less busy than the arithmetic (element-wise work is not matrix work).",
        severity="Medium.",
        advice=(
            Advice(
                "torch.set_float32_matmul_precision('high') for TF32, or torch.autocast('cuda', dtype=torch.bfloat16)",
                "tensor cores multiply matrices several times faster than the fp32 pipes",
                "run a hundred steps with it: tensor_active_ratio rises and steps get faster",
            ),
        ),
        check=tensor_cores_unused,
        needs=("duty", "gpm"),
        sources=("PyTorch: TF32 on Ampere and later", "kineto: automatic mixed precision advice"),
    ),
    Rule(
        id="slow_start",
        family="gpu_use",
        title="The job has not reached the GPU yet",
        means="A process is on the GPU but still imports, compiles, loads or tokenises on the host.",
        recognised="The GPU has computed nothing for the job, and the job computes on the host, or copies to the GPU what stays there: weights on their way in.",
        severity="Informational; low after five minutes.",
        advice=(
            Advice(
                "cache what is computed at every start (compiled kernels, tokenised data), load weights lazily (safetensors, mmap)",
                "GPUs that wait for a start are lost to everybody",
                "`py-spy dump --pid PID` shows what it does",
            ),
        ),
        check=slow_start,
        needs=("duty", "processes"),
        sources=("Amazon SageMaker Debugger: max initialization time",),
    ),
    Rule(
        id="compute_bound",
        family="gpu_use",
        title="The GPU itself is the limit",
        means="Kernels run all the time and fill the GPU: the program uses what was paid for. Only better kernels or a faster GPU make it faster.",
        recognised="Busy at least 90 % of the time with multiprocessors at 80 % or tensor cores at 40 %.",
        severity="Informational.",
        advice=(
            Advice(
                "nothing needs to be done; to go on, lower precision (fp8), better kernels (fused attention), or more GPUs",
                "the GPU does as much as these kernels allow",
                "compare tensor_active_ratio before and after",
            ),
        ),
        check=compute_bound,
        needs=("duty", "gpm"),
        sources=("NVIDIA: deep learning performance guide",),
    ),
    Rule(
        id="memory_bandwidth_bound",
        family="gpu_use",
        title="The GPU's memory is the limit",
        means="Kernels read and write device memory as fast as it goes: element-wise operations, normalisation, decoding. Normal for such work.",
        recognised="Busy at least 90 % of the time with 60 % or more of the memory's peak bandwidth.",
        severity="Informational.",
        advice=(
            Advice(
                "fuse element-wise operations (torch.compile), use smaller types, raise the batch of matrix work",
                "each fused operation saves one pass over memory",
                "dram_active_ratio falls and steps get faster",
            ),
        ),
        check=memory_bandwidth_bound,
        needs=("duty", "gpm"),
        sources=("Roofline model", "XProf: memory bound programs"),
    ),
)
