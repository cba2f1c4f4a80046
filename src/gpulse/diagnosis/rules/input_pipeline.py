"""Rules on the input pipeline: the GPU waits for data."""

from __future__ import annotations

from gpulse.diagnosis.evidence import GpuEvidence, saturated_workers, worker_count
from gpulse.diagnosis.rule import Rule, RuleMatch, SignalText
from gpulse.diagnosis.second_summary import SecondSummary
from gpulse.model.finding import Advice, Evidence
from gpulse.model.formatting import rate

_SYNTHETIC = "feed the model the same batch from GPU memory at every step: each step should become shorter by the time that loading took"


_WHILE_WAITING = "average while waiting for workers"


def _behind(gpu: GpuEvidence) -> list[SecondSummary]:
    """Return the seconds in which the GPU waited for workers."""
    return gpu.attribution.of("workers")


def _spent_cpus(gpu: GpuEvidence) -> tuple[Evidence, ...]:
    """Return the evidence that the job has no free CPU; empty when it has one."""
    seconds = _behind(gpu)
    cores, cpus = gpu.window.job_cores(seconds), gpu.window.cpus
    if cores is None or not cpus:
        return ()
    busy = gpu.window.host("cpu_utilization_ratio", seconds)
    measures = (
        Evidence("job_cores", _WHILE_WAITING, cores, ">=", gpu.t.cores_used * cpus),
        Evidence("cpu_utilization_ratio", _WHILE_WAITING, busy or 0.0, ">=", gpu.t.host_full),
        Evidence("workers", _WHILE_WAITING, worker_count(seconds), ">=", cpus),
    )
    return tuple(item for item in measures if item.value >= item.threshold)


def _worker_match(gpu: GpuEvidence, summary: str, evidence: tuple[Evidence, ...]) -> RuleMatch:
    share = gpu.attribution.shares.get("workers", 0.0)
    saturated = saturated_workers(gpu.window, _behind(gpu), gpu.t) or 0.0
    return RuleMatch(
        summary=summary,
        severity=gpu.severity(gpu.lost),
        confidence=gpu.confidence(share),
        evidence=(
            gpu.lost_evidence(),
            gpu.explained_evidence("workers"),
            Evidence("saturated_workers", _WHILE_WAITING, saturated, ">=", 0),
            *evidence,
        ),
        ruled_out_causes=gpu.ruled_out("workers"),
        lost_ratio=gpu.lost,
        start=gpu.attribution.onset("workers", gpu.t),
    )


def input_cpu_bound(gpu: GpuEvidence) -> RuleMatch | None:
    """The workers use all CPUs."""
    if gpu.cause != "workers" or not (spent := _spent_cpus(gpu)):
        return None
    cores, cpus = gpu.window.job_cores(_behind(gpu)) or 0.0, gpu.window.cpus or 0.0
    count = worker_count(_behind(gpu))
    workers = f"{count:.0f} worker{'' if round(count) == 1 else 's'}"
    return _worker_match(
        gpu,
        f"waits {gpu.lost:.0%} of the time for its input, with {workers} using {cores:.1f} of {cpus:.0f} CPUs, so no CPU is free",
        (*spent, *_sentence_evidence(cores, count, cpus, but=spent)),
    )


def input_too_few_workers(gpu: GpuEvidence) -> RuleMatch | None:
    """The workers are saturated while CPUs are idle."""
    if gpu.cause != "workers" or _spent_cpus(gpu):
        return None
    cores, cpus = gpu.window.job_cores(_behind(gpu)) or 0.0, gpu.window.cpus
    count = worker_count(_behind(gpu))
    evidence = [Evidence("workers", _WHILE_WAITING, count, ">=", 0)]
    room = ""
    if cpus:
        left = max(0.0, cpus - cores)
        evidence.append(Evidence("job_cores", _WHILE_WAITING, cores, "<", gpu.t.cores_used * cpus))
        evidence.append(Evidence("cpus_left", _WHILE_WAITING, left, ">", 0))
        evidence.append(Evidence("cpus", "last", cpus, ">", 0))
        room = f" while {left:.0f} of the job's {cpus:.0f} CPUs are free"
    workers = f"{count:.0f} worker{'' if round(count) == 1 else 's'}"
    return _worker_match(
        gpu,
        f"waits {gpu.lost:.0%} of the time for its input, with {workers} busy all the time{room}",
        tuple(evidence),
    )


def _sentence_evidence(
    cores: float, count: float, cpus: float, *, but: tuple[Evidence, ...]
) -> tuple[Evidence, ...]:
    """Return evidence for the numbers in the summary that have no threshold."""
    known = {item.signal for item in but}
    numbers = (
        Evidence("job_cores", _WHILE_WAITING, cores, ">=", 0),
        Evidence("workers", _WHILE_WAITING, count, ">=", 0),
        Evidence("cpus", "last", cpus, ">", 0),
    )
    return tuple(item for item in numbers if item.signal not in known)


def input_io_bound(gpu: GpuEvidence) -> RuleMatch | None:
    """The job waits for disks or a file server."""
    if gpu.cause != "storage":
        return None
    window, seconds, t = gpu.window, gpu.attribution.of("storage"), gpu.t
    blocked = window.cpu("blocked", seconds) or 0.0
    read = window.cpu("read_bytes", seconds)
    evidence = [
        gpu.lost_evidence(),
        gpu.explained_evidence("storage"),
        Evidence(
            "processes_waiting_for_disks", "average while waiting for storage", blocked, ">=", t.blocked
        ),
    ]
    what = "disks"
    if read is not None:
        evidence.append(
            Evidence(
                "job_read_bytes_per_second",
                "average while waiting for storage",
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
                "average while waiting for storage",
                sum(in_flight) / len(in_flight),
                ">=",
                t.blocked,
            )
        )
    pressure = window.host("pressure_io_some_ratio", seconds)
    if pressure is not None and pressure >= t.io_pressure:
        evidence.append(
            Evidence(
                "pressure_io_some_ratio", "average while waiting for storage", pressure, ">=", t.io_pressure
            )
        )
    reading = (
        f" while reading {rate(read)}" if read is not None and read >= t.job_read_bytes_per_second else ""
    )
    share = gpu.attribution.shares["storage"]
    return RuleMatch(
        summary=f"waits {gpu.lost:.0%} of the time for its input, because on average {blocked:.1f} of its processes wait for {what}{reading}",
        severity=gpu.severity(gpu.lost),
        confidence=gpu.confidence(share),
        evidence=tuple(evidence),
        ruled_out_causes=gpu.ruled_out("storage"),
        lost_ratio=gpu.lost,
        start=gpu.attribution.onset("storage", t),
    )


RULES = (
    Rule(
        id="input_io_bound",
        family="input",
        title="The input pipeline waits for storage",
        means="The GPU has no work because its next batch has not been read yet: the processes that read it spend their time waiting for a disk or a file server, not computing.",
        recognised="GPU time is lost while processes of the job are in uninterruptible sleep (state D) or I/O pressure is high, and the job reads from a disk or an NFS mount. Reads from the page cache do not count.",
        severity="Depends on the lost GPU time: low from 10%, medium from 20%, high from 40%.",
        advice=(
            Advice(
                "pack small files into large shards (tar, WebDataset, Parquet) and read them sequentially",
                "a disk serves one large read far faster than thousands of small ones",
                "copy part of the data to /dev/shm and run the program on this copy: the lost time should disappear",
            ),
            Advice(
                "read with more workers and more prefetching, or move the data to local NVMe",
                "more reads in flight hide the latency of each, up to the device's limit",
                "`gpulse -d` shows each disk's queue length: below 1, the disk has spare capacity; far above 1, it has none",
            ),
        ),
        check=input_io_bound,
        needs=("duty", "processes"),
        limits=("lost", "explained", "blocked", "job_read_bytes_per_second", "io_pressure"),
        quantities={"job_read_bytes_per_second": SignalText("data read by the job", "bytes/second")},
        explains="storage",
        stacks="idle",
        sources=("iostat(1)", "proc(5): state D and /proc/PID/io", "nfsiostat: RTT and execution time"),
    ),
    Rule(
        id="input_too_few_workers",
        family="input",
        title="Too few data-loading workers",
        means="All data-loading workers compute all the time and the GPU still waits for them, although other CPUs are idle.",
        recognised="GPU time is lost while most of the active workers use a whole CPU each, the job's main thread waits, and other CPUs are free.",
        severity="Depends on the lost GPU time: low from 10%, medium from 20%, high from 40%.",
        advice=(
            Advice(
                "raise num_workers until no GPU time is lost or all CPUs are in use",
                "workers prepare batches in parallel, and there are idle CPUs for more of them",
                "double num_workers: steps should become nearly twice as fast",
            ),
            Advice(
                "set persistent_workers=True and pin_memory=True",
                "workers are then not restarted at every epoch, and copies from pinned memory are faster",
                _SYNTHETIC,
            ),
        ),
        check=input_too_few_workers,
        needs=("duty", "processes"),
        limits=("lost", "explained", "active_worker", "saturated_worker"),
        quantities={
            "cpus": SignalText("CPUs available to the job", "cpus"),
            "cpus_left": SignalText("free CPUs of the job", "cpus"),
            "workers": SignalText("data-loading workers", "number"),
        },
        explains="workers",
        stacks="idle",
        sources=("PyTorch data loading documentation", "NVIDIA DALI: test with synthetic data"),
    ),
    Rule(
        id="input_cpu_bound",
        family="input",
        title="The input pipeline uses all CPUs",
        means="The GPU waits for batches whose preparation (decoding, augmenting, tokenizing) uses all CPUs available to the job. More workers cannot help.",
        recognised="GPU time is lost while the workers together use nearly all CPUs that the job may use according to its CPU affinity and cgroup.",
        severity="Depends on the lost GPU time: low from 10%, medium from 20%, high from 40%.",
        advice=(
            Advice(
                "do less per sample on the CPU: decode at a smaller size, cache what does not change, or move augmentation to the GPU (DALI, kornia, torchvision v2 on CUDA tensors)",
                "the GPU has time to spare, and the CPUs have none",
                _SYNTHETIC,
            ),
            Advice(
                "request more CPUs per GPU from the scheduler",
                "the job may use only these CPUs, however many the machine has",
                "`gpulse -c` shows how many CPUs are available to the job",
            ),
        ),
        check=input_cpu_bound,
        needs=("duty", "processes"),
        limits=("lost", "explained", "cores_used"),
        explains="workers",
        stacks="idle",
        sources=("PyTorch data loading documentation", "NVIDIA DALI: test with synthetic data"),
    ),
)
