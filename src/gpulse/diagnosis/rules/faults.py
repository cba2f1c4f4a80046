"""Rules on faults: those that the driver or the kernel reports, and nodes that do not report.

They are facts, not inferences: for most, one frame is enough. What no frame can show, the head reports.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from gpulse.diagnosis.rule import Rule, RuleMatch, SignalText, build_finding
from gpulse.diagnosis.rules import clocks
from gpulse.model.finding import SEVERITIES, Advice, Evidence, Finding, Severity
from gpulse.model.formatting import seconds as seconds_text
from gpulse.model.frame import Frame, GpuReading
from gpulse.model.source_health import Health, HealthCode, format_subject, merge_gpu_entries
from gpulse.model.xid import XID_MEANINGS, XidCounts

if TYPE_CHECKING:
    from gpulse.diagnosis.evidence import GpuEvidence, NodeEvidence

_START_AGENT = Advice(
    "check that the machine is up and reachable, then start its agent: run `gpulse agent HEAD` there, or `gpulse deploy up --nodes FILE --head HEAD` for all nodes in a list",
    "the node's GPUs and jobs are not monitored until it reports again",
    "`gpulse status` should show the node as healthy",
)
_CHECK_NAME = Advice(
    "start an agent on the node with `gpulse deploy up --nodes FILE --head HEAD`, or correct the name in the node list",
    "a node that has never reported is not monitored at all, so its faults go unnoticed",
    "`gpulse status` should no longer list the node as missing",
)

NODE_LOST = Rule(
    id="node_lost",
    family="fault",
    title="A node has stopped reporting",
    means="The head no longer receives anything from this node's agent: the machine is down, the network is broken, or the agent has ended. The state of the node's GPUs is unknown.",
    recognised="The node has not reported for 30 s, or for ten sampling intervals if that is longer. The finding ends when the node reports again.",
    severity="Critical when the reports stopped unexpectedly, medium when the agent was stopped normally.",
    advice=(_START_AGENT,),
    quantities={"last_heard_timestamp_seconds": SignalText("time of the last report", "time")},
    sources=("gpulse: time of the node's last report to the head",),
)
NODE_MISSING = Rule(
    id="node_missing",
    family="fault",
    title="An expected node has never reported",
    means="The node is in the head's node list, but no agent with this name has ever connected.",
    recognised="The name is in the node list (`--nodes`), but no agent reports under this name. The finding ends when the node reports or is removed from the list.",
    severity="High.",
    advice=(_CHECK_NAME,),
    quantities={"expected_since_timestamp_seconds": SignalText("expected since", "time")},
    sources=("gpulse: the head's node list (`--nodes`)",),
)


def node_lost(name: str, last_heard: float, now: float, *, was_stopped: bool) -> Finding:
    """Return the finding about a node that has stopped reporting.

    Args:
        name: The node's.
        last_heard: When something came from it last, in epoch seconds.
        now: Epoch seconds.
        was_stopped: Whether its agent was stopped in the regular way.
    """
    summary = f"{name} has stopped reporting"
    if was_stopped:
        summary = f"the agent on {name} was stopped and has not been started again"
    match = RuleMatch(
        summary=summary,
        severity="medium" if was_stopped else "critical",
        confidence=1.0,
        evidence=(Evidence("last_heard_timestamp_seconds", "now", round(last_heard, 3), ">", 0),),
        start=last_heard,
        end=now,
    )
    return build_finding(NODE_LOST, match)


def node_missing(name: str, since: float, now: float) -> Finding:
    """Return the finding about a node that was expected since then and never reported.

    Args:
        name: The node's, as the list of nodes has it.
        since: Epoch seconds.
        now: Epoch seconds.
    """
    match = RuleMatch(
        summary=f"{name} is in the node list but has never reported",
        severity="high",
        confidence=1.0,
        evidence=(Evidence("expected_since_timestamp_seconds", "now", round(since, 3), ">", 0),),
        start=since,
        end=now,
        cause=name,
    )
    return build_finding(NODE_MISSING, match)


_RECOVERY = {
    1: "a GPU reset",
    2: "a node reboot",
    3: "a drain of peer-to-peer traffic",
    4: "a drain and a reset",
}
_SERVICE = Advice(
    "stop using this GPU for important work, then reset it or have it replaced",
    "memory that failed once tends to fail again, and results can be wrong",
    "run `nvidia-smi -q -d ECC,ROW_REMAPPER` after a reset: on a healthy board, the counters should stay at zero",
)
_BROKEN: tuple[tuple[str, Severity, str], ...] = (
    (
        "ecc_uncorrected_errors_total",
        "critical",
        "uncorrectable memory errors since the driver was loaded: {}",
    ),
    ("remapped_rows_failed", "critical", "a faulty memory row could not be remapped"),
    ("remapped_rows_pending", "medium", "a memory row needs a GPU reset to be remapped"),
    ("retired_pages_pending", "medium", "a memory page needs a GPU reset to be retired"),
)
_XID_RESTART = frozenset(
    {8, 11, 13, 25, 31, 32, 39, 40, 41, 60, 75, 76, 77, 80, 88, 89, 94, 139}
    | set(range(68, 73))
    | set(range(82, 87))
    | set(range(96, 106))
    | set(range(126, 136))
)
_XID_ECHO = frozenset(
    {37, 38, 43, 44, 45, 63, 66, 67, 92, 93, 106, 107, 121, 137, 141, 152, 153, 157, 160, 161}
)
_XID_RESET = frozenset({46, 62, 64, 95, 109, 110, 119, 120, 136, 140, 143, 155, 156, 158})
_XID_REBOOT = frozenset({79})
_XID_MECHANICAL = frozenset({54})

_DRIVER_FAULTS: frozenset[HealthCode] = frozenset(
    {"driver_missing", "driver_mismatch", "driver_unloaded", "not_answering", "failed", "no_permission"}
)
_GPU_FAULTS: frozenset[HealthCode] = frozenset(
    {"gpu_lost", "not_answering", "driver_missing", "driver_mismatch", "driver_unloaded"}
)


def gpu_fault(node: NodeEvidence) -> Iterator[RuleMatch]:
    """Yield the faults that the driver reports in the last frame."""
    yield from match_faults(node.frame)


def match_faults(frame: Frame, xids: XidCounts | None = None) -> Iterator[RuleMatch]:
    """Yield a match for every fault that the driver reports.

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


def _memory(gpu: GpuReading, frame: Frame) -> Iterator[RuleMatch]:
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


def _recovery(gpu: GpuReading, frame: Frame) -> Iterator[RuleMatch]:
    action = gpu.get("recovery_action")
    if action:
        wanted = _RECOVERY.get(int(action), f"recovery action {action}")
        evidence = Evidence("recovery_action", "now", action, ">", 0)
        yield _match(
            gpu, frame, "critical", f"the driver requests {wanted}", evidence, _SERVICE, "recovery_action"
        )


def _xids(gpu: GpuReading, frame: Frame, xids: XidCounts | None) -> Iterator[RuleMatch]:
    counts: dict[int, tuple[float, float]] = {}
    if xids is not None:
        counts = {code: (known.errors, known.first) for code, known in xids.of(gpu.device.uuid).items()}
    last = gpu.get("xid_last_code")
    if last is not None:
        moment = gpu.get("xid_last_timestamp_seconds")
        counts.setdefault(
            int(last), (gpu.get("xid_errors_total") or 1, frame.time if moment is None else moment)
        )
    for code, (errors, began) in counts.items():
        known = _classify(code)
        evidence = Evidence("xid_errors_total", "now", errors, ">", 0)
        words = f"the driver reported Xid {code}{known.words}"
        match = _match(gpu, frame, known.severity, words, evidence, known.advice, f"xid_{code}")
        yield match._replace(start=min(began, frame.time))


class _XidClass(NamedTuple):
    """Severity, description and advice of an Xid code."""

    severity: Severity
    words: str
    advice: Advice


def _classify(code: int) -> _XidClass:
    """Return the class of an Xid code."""
    name = XID_MEANINGS.get(code)
    if code in _XID_REBOOT:
        return _xid_class("critical", name, "reboot the node", "the driver has lost the GPU")
    if code in _XID_MECHANICAL:
        return _xid_class(
            "critical",
            name,
            "check the GPU's power cables and seating",
            "its auxiliary power is not connected",
        )
    if code in _XID_RESET:
        return _xid_class(
            "critical",
            name,
            "stop the jobs on this GPU, then reset it (`nvidia-smi -r`)",
            "the GPU does not recover by itself",
        )
    if code in _XID_RESTART:
        return _xid_class(
            "high",
            name,
            "check the program's error messages, then restart it",
            "most of these errors are caused by the program",
        )
    if code in _XID_ECHO:
        return _xid_class(
            "low",
            name,
            "look for another Xid error just before this one",
            "this error is only a consequence of another error",
        )
    return _xid_class(
        "high",
        name,
        "follow NVIDIA's instructions for this code",
        "the remedy depends on the details in the driver's message",
    )


def _xid_class(severity: Severity, name: str | None, do: str, why: str) -> _XidClass:
    confirm = "check `dmesg | grep -i xid`, and run the same program on another GPU to see whether the program or the board is at fault"
    return _XidClass(severity, f" ({name})" if name else "", Advice(do, why, confirm))


def _out_of_reach(frame: Frame) -> Iterator[RuleMatch]:
    """Yield matches for a driver or GPUs that do not respond; GPUs with the same problem share one match."""
    for health in merge_gpu_entries(frame.health):
        if health.source != "nvml":
            continue
        if health.subject is None:
            # A machine without a driver and without GPUs is healthy.
            if health.code in _DRIVER_FAULTS and (health.code != "driver_missing" or frame.gpus):
                yield _unreachable(health, frame, health.detail, None)
        elif health.code in _GPU_FAULTS:
            meant = [gpu.device for gpu in frame.gpus if _is_about(health, gpu)]
            subject = f"GPU {meant[0].label}" if meant else format_subject(health.subject)
            yield _unreachable(
                health, frame, f"{subject}: {health.detail}", meant[0].index if meant else None
            )


def _is_about(health: Health, gpu: GpuReading) -> bool:
    return health.subject in (f"gpu {gpu.device.label}", gpu.device.uuid)


def _unreachable(health: Health, frame: Frame, summary: str, gpu: int | None) -> RuleMatch:
    whole = health.subject is None
    advice = Advice(
        health.hint or "check `dmesg | grep -i -e xid -e nvrm`, then reset the GPU or reboot the node",
        "no GPU can be used or read without the driver"
        if whole
        else "this GPU cannot be used or read in its current state",
        "`gpulse doctor` should report that the driver works"
        if whole
        else "`gpulse doctor` should list the GPU again",
    )
    return RuleMatch(
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
) -> RuleMatch:
    return RuleMatch(
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


def process_died(gpu: GpuEvidence) -> RuleMatch | None:
    """A process of the job disappeared while the kernel killed processes for lack of memory."""
    job = gpu.window.job
    seen = gpu.window.seconds_seen
    if not job or not seen or job[-1].end >= seen[-1].end or job[-1].holders is None:
        return None
    before, after = (second.host.get("oom_kills_total") for second in (job[-1], seen[-1]))
    if before is None or after is None or after <= before:
        return None
    killed = after - before
    noun = "process" if killed == 1 else "processes"
    return RuleMatch(
        summary=f"lost its process while Linux killed {killed:.0f} {noun} for lack of memory",
        severity="critical",
        confidence=0.8,
        evidence=(Evidence("oom_kills_total", "rise", killed, ">", 0),),
        pids=tuple(sorted(pid for pid, _ in job[-1].holders)),
        start=job[-1].end,
        end=seen[-1].end,
    )


def process_blocked(gpu: GpuEvidence) -> RuleMatch | None:
    """A process on the GPU has been in uninterruptible sleep for a long time."""
    seconds = gpu.window.steady
    stuck = 0.0
    for second in reversed(seconds):
        if not second.stuck:
            break
        stuck += second.seconds
    if stuck < gpu.t.blocked_seconds:
        return None
    return RuleMatch(
        summary=f"has a process that has been stuck in the Linux kernel for {seconds_text(stuck)} and cannot be killed",
        severity="critical",
        confidence=0.8,
        evidence=(Evidence("blocked_seconds", "last", stuck, ">=", gpu.t.blocked_seconds),),
        start=seconds[-1].end - stuck,
    )


RULES = (
    Rule(
        id="gpu_fault",
        family="fault",
        title="GPU or driver fault",
        means="The driver reports an Xid error, an uncorrectable memory error, memory that cannot be remapped, or that a reset or reboot is needed; or the driver itself no longer responds.",
        recognised="The driver reports the fault through an Xid event, an ECC counter, the state of row remapping, a requested recovery action, or a driver call that fails. Each Xid code of a GPU is a separate finding. An agent that restarts reports the Xid errors of the last day again, unless the machine was rebooted.",
        severity="Follows NVIDIA's classification of Xid errors: critical when the GPU must be reset or the node rebooted, high when a program must be restarted, low for an error that is only a consequence of another.",
        advice=(_SERVICE,),
        check_node=gpu_fault,
        from_frame=True,
        sources=("NVIDIA: Xid errors", "NVML: row remapping and recovery action"),
    ),
    Rule(
        id="process_died",
        family="fault",
        title="Linux killed the job for lack of host memory",
        means="The job's process disappeared from the GPU while the kernel's out-of-memory killer was active.",
        recognised="The process is gone, and the count of out-of-memory kills of the machine or of the job's cgroup grew at the same time.",
        severity="Critical.",
        advice=(
            Advice(
                "give the job more host memory, or use fewer workers and less prefetching",
                "when memory runs out, the kernel kills the process that uses most of it",
                "`dmesg | grep -i 'killed process'` names the process",
            ),
        ),
        check=process_died,
        without_job=True,
        sources=("proc(5): oom_kill", "Linux cgroup v2: memory.events"),
    ),
    Rule(
        id="process_blocked",
        family="fault",
        title="A process hangs in the Linux kernel",
        means="A process on the GPU has been waiting in the Linux kernel for minutes, for example for a dead file server or an unresponsive GPU. It cannot be killed until the wait ends.",
        recognised="The process is in uninterruptible sleep (state D) in every sample for at least five minutes.",
        severity="Critical.",
        advice=(
            Advice(
                "check what the process waits for, such as a dead mount or a dead GPU: `cat /proc/PID/wchan`, `dmesg | tail`",
                "a process in this state does not respond to signals",
                "`ls` should work on every mount of the machine",
            ),
        ),
        check=process_blocked,
        needs=("processes",),
        limits=("blocked_seconds",),
        quantities={"blocked_seconds": SignalText("time stuck in the Linux kernel", "seconds")},
        sources=("proc(5): state D", "Meta GCM: threshold of five minutes"),
    ),
    NODE_LOST,
    NODE_MISSING,
)

FAULT_READINGS = frozenset({"recovery_action", "clocks_event_reasons", *(name for name, _, _ in _BROKEN)})
"""Metrics that `find_faults` reads, besides health and Xid errors, which the driver reports only to a running listener."""

_RULES_BY_ID = {rule.id: rule for rule in (*RULES, *clocks.RULES)}


def find_faults(frame: Frame, xids: XidCounts | None = None) -> list[Finding]:
    """Return the faults that one frame shows, worst first. A snapshot reports these and no other findings.

    Args:
        frame: The newest readings.
        xids: The Xid errors so far; the frame alone has only the last code of each GPU.
    """
    findings = [build_finding(_RULES_BY_ID["gpu_fault"], match) for match in match_faults(frame, xids)]
    findings += [
        build_finding(_RULES_BY_ID[name], match)
        for gpu in frame.gpus
        if gpu.device.mig_index is None
        for name, match in clocks.find_instant_faults(gpu, frame.time)
    ]
    return sorted(findings, key=lambda finding: -SEVERITIES.index(finding.severity))
