"""Reports about a job as JSON documents."""

from __future__ import annotations

from typing import Any

import msgspec

from gpulse.reports.job_report import JobReport

BEGIN = 1_800_000_000.0


def metric_document(mean: float, peak: float) -> dict[str, Any]:
    """A metric."""
    return {"unit": "", "mean": mean, "max": peak}


def gpu_document(number: int, **more: Any) -> dict[str, Any]:
    """A row of a GPU."""
    return {
        "node": "n1",
        "gpu": str(number),
        "uuid": f"GPU-{number}",
        "model": "NVIDIA H200",
        "use": "used",
        "shared": False,
        "memory_total_bytes": 140 << 30,
        "allocated_seconds": 7200.0,
        "unused_seconds": 0.0,
        "gpu_seconds": 7200.0,
        "held_seconds": 7200.0,
        "known_seconds": 7200.0,
        "idle_seconds": 360.0,
        "utilization_mean": 0.83,
        "energy_joules": 3.6e6,
        "memory_bytes_max": 71 << 30,
        "metrics": {
            "power_watts": metric_document(500.0, 700.0),
            "memory_used_bytes": metric_document(60 << 30, 71 << 30),
        },
        **more,
    }


def finding_document(label: str | None, **more: Any) -> dict[str, Any]:
    """A finding."""
    return {
        "node": "n1",
        "gpu": 0,
        "label": label,
        "id": "input_io_bound",
        "severity": "high",
        "summary": "GPU waits 40% of the time",
        **dict.fromkeys(("cause", "family", "lost_ratio", "confidence", "url")),
        "pids": [],
        "evidence": [],
        "from": BEGIN + 60,
        "to": BEGIN + 660,
        "times": 2,
        "active_seconds": 300.0,
        "advice": [{"do": "cache the data", "why": "it is read again", "confirm": "see"}],
        **more,
    }


def job_document(**more: Any) -> dict[str, Any]:
    """A report about a job."""
    untouched = gpu_document(
        2,
        use="untouched",
        gpu_seconds=0.0,
        held_seconds=0.0,
        known_seconds=0.0,
        idle_seconds=None,
        utilization_mean=None,
        energy_joules=None,
    )
    return {
        "job": "slurm:4711",
        "kind": "job",
        "state": "ended",
        "to_now": False,
        "name": "llama",
        "array": None,
        "step": 5.0,
        "truncated": False,
        "user": "ada",
        "partition": "gpu",
        "account": None,
        "program": "python3 train.py",
        "from": BEGIN,
        "to": BEGIN + 7200,
        "nodes": ["n1"],
        "gpus": 3,
        "processes": 2,
        "allocated_seconds": 21600.0,
        "unused_seconds": 7200.0,
        "untouched_gpus": 1,
        "gpu_seconds": 14400.0,
        "held_seconds": 14400.0,
        "known_seconds": 14400.0,
        "idle_seconds": 720.0,
        "utilization_mean": 0.83,
        "energy_joules": 7.2e6,
        "memory_bytes_max": 71 << 30,
        "metrics": {
            "gpu_utilization_ratio": metric_document(0.8, 1.0),
            "tensor_active_ratio": metric_document(0.31, 0.5),
            "memory_used_bytes": metric_document(60 << 30, 71 << 30),
            "power_watts": metric_document(500.0, 700.0),
        },
        "cluster": {
            "gpus": 8,
            "capacity_seconds": 2e6,
            "gpus_held": 8,
            "energy_joules": None,
            "gpu_seconds": 1e6,
            "known_seconds": 1e6,
            "idle_seconds": 120_000.0,
            "utilization_mean": 0.61,
            "power_watts_mean": 410.0,
        },
        "findings": [
            finding_document("0"),
            finding_document("1", active_seconds=600.0, summary="GPU waits 50% of the time"),
        ],
        "gpu_rows": [gpu_document(0), gpu_document(1), untouched],
        "missing_seconds": 0.0,
        "missing": [],
        "data_gaps": ["nothing is known of n1 for a while"],
        "series": {
            "step": 1800.0,
            "times": [BEGIN + 1800 * place for place in range(4)],
            "metrics": {"gpu_utilization_ratio": [0.8, None, 0.9, 0.0], "power_watts": [1.0, 2.0, 3.0, 4.0]},
            "gpus": [{"node": "n1", "gpu": "0", "uuid": "GPU-0", "values": [0.8, None, 0.9, 0.0]}],
        },
        **more,
    }


def read(document: dict[str, Any]) -> JobReport:
    """A report as clients read it."""
    return msgspec.convert(document, JobReport)
