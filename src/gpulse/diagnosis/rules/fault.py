"""Faults that the driver or the kernel reports: facts, not inferences, so one frame is enough."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from gpulse.diagnosis.rule import Match, Rule
from gpulse.diagnosis.xid import classify
from gpulse.model.finding import Advice, Evidence, Severity
from gpulse.model.frame import Frame, GpuReading
from gpulse.model.health import Code, Health, gathered
from gpulse.model.units import duration
from gpulse.model.xid import XidLedger

if TYPE_CHECKING:  # a look needs the facts alone, not what windows of time are made of
    from gpulse.diagnosis.case import Case, Node

_RECOVERY = {
    1: "a reset of the GPU",
    2: "a reboot of the node",
    3: "its peers to be drained",
    4: "to be drained and reset",
}
_SERVICE = Advice(
    "stop using this GPU for work that matters and reset it, or have it replaced",
    "memory that fails once tends to fail again, and results can be wrong",
    "run `nvidia-smi -q -d ECC,ROW_REMAPPER` after a reset: the counters stay at zero on a sound board",
)
_BROKEN: tuple[tuple[str, Severity, str], ...] = (
    (
        "ecc_uncorrected_errors_total",
        "critical",
        "{} memory errors could not be corrected since the driver was loaded",
    ),
    ("remapped_rows_failed", "critical", "a broken memory row could not be remapped"),
    ("remapped_rows_pending", "medium", "a memory row waits for a reset to be remapped"),
    ("retired_pages_pending", "medium", "a memory page waits for a reset to be retired"),
)
_DRIVER_FAULTS: frozenset[Code] = frozenset(
    {"driver_missing", "driver_mismatch", "driver_unloaded", "not_answering", "failed", "no_permission"}
)
_GPU_FAULTS: frozenset[Code] = frozenset(
    {"gpu_lost", "not_answering", "driver_missing", "driver_mismatch", "driver_unloaded"}
)


def gpu_fault(node: Node) -> Iterator[Match]:
    """What the driver reports in the last frame."""
    yield from faults_of(node.frame)


def faults_of(frame: Frame, xids: XidLedger | None = None) -> Iterator[Match]:
    """Yield a match for everything that the driver calls broken.

    Args:
        frame: The newest readings.
        xids: The Xid errors so far; the frame alone has only the last code of each GPU.
    """
    yield from _out_of_reach(frame)
    for gpu in frame.gpus:
        if gpu.device.mig_index is None:
            yield from _memory(gpu, frame)
            yield from _recovery(gpu, frame)
            yield from _xids(gpu, frame, xids)


def _memory(gpu: GpuReading, frame: Frame) -> Iterator[Match]:
    for name, severity, words in _BROKEN:
        value = gpu.get(name)
        if value:
            yield _match(
                gpu,
                frame,
                severity,
                words.format(value),
                Evidence(name, "now", value, ">", 0),
                _SERVICE,
                name,
            )


def _recovery(gpu: GpuReading, frame: Frame) -> Iterator[Match]:
    action = gpu.get("recovery_action")
    if action:
        wanted = _RECOVERY.get(int(action), f"recovery action {action}")
        evidence = Evidence("recovery_action", "now", action, ">", 0)
        yield _match(
            gpu, frame, "critical", f"the driver asks for {wanted}", evidence, _SERVICE, "recovery_action"
        )


def _xids(gpu: GpuReading, frame: Frame, xids: XidLedger | None) -> Iterator[Match]:
    counts: dict[int, float] = {}
    if xids is not None:
        counts = {code: counted.errors for code, counted in xids.of(gpu.device.uuid).items()}
    last = gpu.get("xid_last_code")
    if last is not None:
        counts.setdefault(int(last), gpu.get("xid_errors_total") or 1)
    for code, errors in counts.items():
        known = classify(code)
        evidence = Evidence("xid_errors_total", "now", errors, ">", 0)
        words = f"the driver reported Xid {code}{known.words}"
        yield _match(gpu, frame, known.severity, words, evidence, known.advice, f"xid_{code}")


def _out_of_reach(frame: Frame) -> Iterator[Match]:
    """The driver, or GPUs, that cannot be asked; GPUs with the same trouble in one match."""
    for health in gathered(frame.health):
        if health.source != "nvml":
            continue
        if health.subject is None:
            # A machine without a driver and without GPUs is sound.
            if health.code in _DRIVER_FAULTS and (health.code != "driver_missing" or frame.gpus):
                yield _unreachable(health, frame, health.detail, None)
        elif health.code in _GPU_FAULTS:
            meant = [gpu.device for gpu in frame.gpus if _is_about(health, gpu)]
            label = meant[0].label if meant else health.subject.removeprefix("gpu ")
            yield _unreachable(
                health, frame, f"GPU {label}: {health.detail}", meant[0].index if meant else None
            )


def _is_about(health: Health, gpu: GpuReading) -> bool:
    return health.subject in (f"gpu {gpu.device.label}", gpu.device.uuid)


def _unreachable(health: Health, frame: Frame, summary: str, gpu: int | None) -> Match:
    whole = health.subject is None
    advice = Advice(
        health.hint or "see `dmesg | grep -i -e xid -e nvrm`, then reset or reboot",
        "without the driver no GPU can be used or read" if whole else "nothing can be read from it like this",
        "`gpulse doctor` finds the driver in order" if whole else "`gpulse doctor` names the GPU again",
    )
    return Match(
        summary,
        "critical",
        1.0,
        pids=(),
        gpu=gpu,
        start=health.since,
        end=frame.time,
        advice=(advice,),
        cause=health.code if whole or gpu is not None else f"{health.code} {health.subject}",
    )


def _match(
    gpu: GpuReading,
    frame: Frame,
    severity: Severity,
    summary: str,
    evidence: Evidence,
    advice: Advice,
    cause: str,
) -> Match:
    return Match(
        summary=f"GPU {gpu.device.label}: {summary}",
        severity=severity,
        confidence=1.0,
        evidence=(evidence,),
        pids=(),
        gpu=gpu.device.index,
        start=frame.time,
        end=frame.time,
        advice=(advice,),
        cause=cause,
    )


def process_died(case: Case) -> Match | None:
    """A process of the job left while the kernel was killing for want of memory."""
    job = case.stretch.job
    seen = case.stretch.seconds_seen
    if not job or not seen or job[-1].end >= seen[-1].end or job[-1].holders is None:
        return None
    before, after = (second.host.get("oom_kills_total") for second in (job[-1], seen[-1]))
    if before is None or after is None or after <= before:
        return None
    return Match(
        summary=f"lost its process while the kernel killed {after - before:.0f} for want of memory",
        severity="critical",
        confidence=0.8,
        evidence=(Evidence("oom_kills_total", "rise", after - before, ">", 0),),
        pids=tuple(sorted(pid for pid, _ in job[-1].holders)),
        start=job[-1].end,
        end=seen[-1].end,
    )


def process_blocked(case: Case) -> Match | None:
    """A process on the GPU has been in uninterruptible sleep for very long."""
    seconds = case.stretch.steady
    stuck = 0.0
    for second in reversed(seconds):
        if not second.stuck:
            break
        stuck += second.seconds
    if stuck < case.t.blocked_seconds:
        return None
    return Match(
        summary=f"has a process that has waited in the kernel for {duration(stuck)} and cannot be ended",
        severity="critical",
        confidence=0.8,
        evidence=(Evidence("blocked_seconds", "last", stuck, ">=", case.t.blocked_seconds),),
        start=seconds[-1].end - stuck,
    )


RULES = (
    Rule(
        id="gpu_fault",
        family="fault",
        title="The GPU or its driver is broken",
        means="The driver reports an Xid error, memory that cannot be corrected or remapped, asks for a reset or reboot, or cannot be asked any more.",
        recognised="The driver says so itself: Xid events, ECC counters, row remapping, the recovery action, or its calls fail. Each Xid code of a GPU is a finding of its own. An agent that starts again reports the Xid errors of the last day again, unless the machine was rebooted.",
        severity="After NVIDIA's classes: critical when the GPU must be reset or the node rebooted, high when a program must be restarted, low for an echo of another error.",
        advice=(_SERVICE,),
        check_node=gpu_fault,
        sources=("NVIDIA: Xid errors", "NVML: row remapping, recovery action"),
    ),
    Rule(
        id="process_died",
        family="fault",
        title="The kernel killed the job for want of memory",
        means="The job's process left the GPU at the moment in which the kernel's out-of-memory killer struck.",
        recognised="The process is gone, and the machine's or its control group's count of such kills grew at the same time.",
        severity="Critical.",
        advice=(
            Advice(
                "give it more host memory, or fewer workers and a smaller prefetch",
                "the kernel kills whoever uses most when memory runs out",
                "`dmesg | grep -i 'killed process'` names it",
            ),
        ),
        check=process_died,
        sources=("proc(5): oom_kill", "Linux cgroup v2: memory.events"),
    ),
    Rule(
        id="process_blocked",
        family="fault",
        title="A process hangs in the kernel",
        means="A process on the GPU has waited in the kernel for minutes, for a dead file server or a GPU that does not answer; it cannot be killed until that ends.",
        recognised="State D in every sample for five minutes or more.",
        severity="Critical.",
        advice=(
            Advice(
                "see what it waits for: `cat /proc/PID/wchan`, `dmesg | tail`; a dead mount or a dead GPU",
                "no signal reaches a process in this state",
                "`ls` on the mounts of the machine comes back",
            ),
        ),
        check=process_blocked,
        needs=("processes",),
        sources=("proc(5): state D", "GCM: five minutes"),
    ),
)
