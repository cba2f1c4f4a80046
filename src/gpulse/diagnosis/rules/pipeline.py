"""The input pipeline: the GPU waits for data."""

from __future__ import annotations

from gpulse.diagnosis.attribution import saturated_workers, worker_count
from gpulse.diagnosis.case import Case
from gpulse.diagnosis.rule import Match, Rule
from gpulse.diagnosis.seconds import Second
from gpulse.model.finding import Advice, Evidence
from gpulse.model.units import rate

_SYNTHETIC = "feed the model one batch that stays on the GPU, again and again: the steps get faster by as much as data costs"


_WHILE = "mean while it waits for workers"


def _behind(case: Case) -> list[Second]:
    """The seconds in which the workers were the reason."""
    return case.attribution.of("workers")


def _spent_cpus(case: Case) -> tuple[Evidence, ...]:
    """What says that the job has no CPU left: nothing when it has."""
    seconds = _behind(case)
    cores, cpus = case.stretch.job_cores(seconds), case.stretch.cpus
    if cores is None or not cpus:
        return ()
    busy = case.stretch.host("cpu_utilization_ratio", seconds)
    measures = (
        Evidence("job_cores", _WHILE, cores, ">=", case.t.cores_used * cpus),
        Evidence("cpu_utilization_ratio", _WHILE, busy or 0.0, ">=", case.t.host_full),
        Evidence("workers", _WHILE, worker_count(seconds), ">=", cpus),
    )
    return tuple(item for item in measures if item.value >= item.threshold)


def _worker_match(case: Case, summary: str, evidence: tuple[Evidence, ...]) -> Match:
    share = case.attribution.shares.get("workers", 0.0)
    saturated = saturated_workers(case.stretch, _behind(case), case.t) or 0.0
    return Match(
        summary=summary,
        severity=case.severity(case.lost),
        confidence=case.confidence(share),
        evidence=(
            case.lost_evidence(),
            case.explained_evidence("workers"),
            Evidence("saturated_workers", _WHILE, saturated, ">=", 0),
            *evidence,
        ),
        ruled_out=case.ruled_out("workers"),
        lost_ratio=case.lost,
        start=case.attribution.onset("workers", case.t),
    )


def input_cpu_bound(case: Case) -> Match | None:
    """Workers use up all CPUs."""
    if case.cause != "workers" or not (spent := _spent_cpus(case)):
        return None
    cores, cpus = case.stretch.job_cores(_behind(case)) or 0.0, case.stretch.cpus or 0.0
    count = worker_count(_behind(case))
    return _worker_match(
        case,
        f"waits {case.lost:.0%} of the time for its input: {count:.0f} workers use {cores:.1f} of {cpus:.0f} CPUs, and there are no more",
        (*spent, *_told(cores, count, cpus, but=spent)),
    )


def input_too_few_workers(case: Case) -> Match | None:
    """Workers are saturated while CPUs are idle."""
    if case.cause != "workers" or _spent_cpus(case):
        return None
    cores, cpus = case.stretch.job_cores(_behind(case)) or 0.0, case.stretch.cpus
    count = worker_count(_behind(case))
    evidence = [Evidence("workers", _WHILE, count, ">=", 0)]
    room = ""
    if cpus:
        left = max(0.0, cpus - cores)
        evidence.append(Evidence("job_cores", _WHILE, cores, "<", case.t.cores_used * cpus))
        evidence.append(Evidence("cpus_left", _WHILE, left, ">", 0))
        evidence.append(Evidence("cpus", "last", cpus, ">", 0))
        room = f" while {left:.0f} of {cpus:.0f} CPUs are left to it"
    plural = "worker is" if round(count) == 1 else "workers are"
    return _worker_match(
        case,
        f"waits {case.lost:.0%} of the time for its input: {count:.0f} {plural} busy all the time{room}",
        tuple(evidence),
    )


def _told(cores: float, count: float, cpus: float, *, but: tuple[Evidence, ...]) -> tuple[Evidence, ...]:
    """The numbers of the sentence that no threshold decided about."""
    known = {item.signal for item in but}
    numbers = (
        Evidence("job_cores", _WHILE, cores, ">=", 0),
        Evidence("workers", _WHILE, count, ">=", 0),
        Evidence("cpus", "last", cpus, ">", 0),
    )
    return tuple(item for item in numbers if item.signal not in known)


def input_io_bound(case: Case) -> Match | None:
    """The job waits for disks or file servers."""
    if case.cause != "storage":
        return None
    stretch, seconds, t = case.stretch, case.attribution.of("storage"), case.t
    blocked = stretch.cpu("blocked", seconds) or 0.0
    read = stretch.cpu("read_bytes", seconds)
    evidence = [
        case.lost_evidence(),
        case.explained_evidence("storage"),
        Evidence("processes_waiting_for_disks", "mean while it waits for storage", blocked, ">=", t.blocked),
    ]
    what = "disks"
    if read is not None:
        evidence.append(
            Evidence(
                "job_read_bytes_per_second",
                "mean while it waits for storage",
                read,
                ">=",
                t.job_read_bytes_per_second,
            )
        )
    in_flight = [
        second.nfs["nfs_reads_in_flight"] for second in seconds if "nfs_reads_in_flight" in second.nfs
    ]
    if in_flight and sum(in_flight) / len(in_flight) >= t.blocked:
        what = "a file server (NFS)"
        evidence.append(
            Evidence(
                "nfs_reads_in_flight",
                "mean while it waits for storage",
                sum(in_flight) / len(in_flight),
                ">=",
                t.blocked,
            )
        )
    pressure = stretch.host("pressure_io_some_ratio", seconds)
    if pressure is not None and pressure >= t.io_pressure:
        evidence.append(
            Evidence(
                "pressure_io_some_ratio", "mean while it waits for storage", pressure, ">=", t.io_pressure
            )
        )
    reading = (
        f" while it reads {rate(read)}" if read is not None and read >= t.job_read_bytes_per_second else ""
    )
    share = case.attribution.shares["storage"]
    return Match(
        summary=f"waits {case.lost:.0%} of the time for its input, and its processes for {what}: {blocked:.1f} of them at any one time{reading}",
        severity=case.severity(case.lost),
        confidence=case.confidence(share),
        evidence=tuple(evidence),
        ruled_out=case.ruled_out("storage"),
        lost_ratio=case.lost,
        start=case.attribution.onset("storage", t),
    )


RULES = (
    Rule(
        id="input_io_bound",
        family="input",
        title="The input pipeline waits for storage",
        means="The GPU is out of work because its next batch has not been read yet: the processes that read it spend their time waiting for a disk or a file server, not computing.",
        recognised="Time is lost while processes of the job are in the kernel's uninterruptible wait (state D) or I/O pressure is high, and the job really reads from a disk or an NFS mount; reads from the page cache do not count.",
        severity="By lost time: low from 10 %, medium from 20 %, high from 40 %.",
        advice=(
            Advice(
                "pack small files into large shards (tar, WebDataset, Parquet) and read them in sequence",
                "a disk serves one large read far faster than thousands of small ones",
                "copy a part of the data to /dev/shm and run on that: the loss goes away",
            ),
            Advice(
                "read with more workers and a deeper prefetch, or move the data to local NVMe",
                "more outstanding reads hide the latency of each, until the device's own limit",
                "`gpulse -d` shows the queue: below 1 the device has room, far above it does not",
            ),
        ),
        check=input_io_bound,
        needs=("duty", "processes"),
        sources=("iostat(1)", "proc(5): state D, /proc/PID/io", "nfsiostat: RTT and execution time"),
    ),
    Rule(
        id="input_too_few_workers",
        family="input",
        title="Too few data-loading workers",
        means="Every data-loading worker computes all the time and the GPU still waits for them, while other CPUs have nothing to do.",
        recognised="Time is lost while most of the workers that do anything use a whole CPU each, the job's own main thread waits, and CPUs are left over.",
        severity="By lost time: low from 10 %, medium from 20 %, high from 40 %.",
        advice=(
            Advice(
                "raise num_workers until the loss is gone or all CPUs are used",
                "workers prepare batches side by side; idle CPUs are there for them",
                "double num_workers: the steps come nearly twice as often",
            ),
            Advice(
                "set persistent_workers=True and pin_memory=True",
                "workers are not started again at every epoch, and copies need no detour",
                _SYNTHETIC,
            ),
        ),
        check=input_too_few_workers,
        needs=("duty", "processes"),
        sources=("PyTorch data loading documentation", "NVIDIA DALI: test with synthetic data"),
    ),
    Rule(
        id="input_cpu_bound",
        family="input",
        title="The input pipeline uses up all CPUs",
        means="The GPU waits for batches whose preparation (decoding, augmenting, tokenising) takes all the CPUs the job may use. More workers cannot help.",
        recognised="Time is lost while the workers together use nearly all CPUs that affinity and control group leave to the job.",
        severity="By lost time: low from 10 %, medium from 20 %, high from 40 %.",
        advice=(
            Advice(
                "do less per sample on the CPU: decode at a smaller size, cache what does not change, move augmentation to the GPU (DALI, kornia, torchvision v2 on CUDA tensors)",
                "the GPU has time to spare and the CPUs have none",
                _SYNTHETIC,
            ),
            Advice(
                "ask the scheduler for more CPUs per GPU",
                "the job may use only so many, whatever the machine has",
                "`gpulse -c` shows how many CPUs the job may use",
            ),
        ),
        check=input_cpu_bound,
        needs=("duty", "processes"),
        sources=("PyTorch data loading documentation", "NVIDIA DALI: test with synthetic data"),
    ),
)
