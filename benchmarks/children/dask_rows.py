"""Lines of a Dask worker in made-up time: `python -m benchmarks.children.dask_rows GPUS HOURS` tells what they cost the worker.

`fill` makes the same lines inside a scheduler.
"""

from __future__ import annotations

import gc
import json
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gpulse.integrations.dask.csv_files import FrameReader
from gpulse.integrations.dask.job_labels import GraphLabel
from gpulse.integrations.dask.trackable_metrics import build_columns
from gpulse.integrations.dask.worker_registry import ROWS_HANDLER
from gpulse.integrations.dask.worker_sampling import (
    CustomMetricRunner,
    ExecutingTasks,
    RowBatch,
    WorkerSamplingThread,
)
from gpulse.model.device import Device, Node
from gpulse.model.frame import Frame, GpuReading

_INTERVAL_SECONDS = 0.2
_A_SECOND = 5
"""Measurements, which go to the scheduler together."""
_TOTAL_BYTES = 150_754_820_096
_MIB = 1 << 20


class _Nothing:
    """A source that nobody asks."""

    def sample(self, now: float) -> Frame:
        raise NotImplementedError

    def close(self) -> None:
        """Nothing is held."""


def frames(gpus: int, count: int) -> Iterator[Frame]:
    """GPUs at work: use that jumps about, and memory that wanders."""
    chance = random.Random(7)
    node = Node("bench")
    devices = [Device(index, f"GPU-{index:032d}", "NVIDIA H200") for index in range(gpus)]
    used = [chance.randrange(1 << 36) for _ in devices]
    for number in range(count):
        at = number * _INTERVAL_SECONDS
        readings = []
        for device in devices:
            used[device.index] = max(
                0, min(_TOTAL_BYTES, used[device.index] + chance.randrange(-64, 65) * 2 * _MIB)
            )
            values = {
                "memory_used_bytes": used[device.index],
                "memory_total_bytes": _TOTAL_BYTES,
                "gpu_utilization_ratio": chance.randrange(101) / 100,
            }
            readings.append(GpuReading(device, values))
        yield Frame(time=at, monotonic=at, node=node, gpus=tuple(readings))


def recorded(gpus: int, hours: float) -> Iterator[tuple[RowBatch, float]]:
    """What a worker sends each second, and how long it took to make."""
    step = 0

    def executing() -> ExecutingTasks:
        key = f"('sum-partial-{step // 50:032x}', {step % 50}, 0)"
        return ExecutingTasks((key,), (GraphLabel(1 + step // 40_000, 1 + step // 500),))

    tracked = build_columns(["tasks", "total-mem", "mem-util", "compute-util"])
    uuids = [f"GPU-{index:032d}" for index in range(gpus)]
    recorder = WorkerSamplingThread(
        _Nothing(),
        _INTERVAL_SECONDS,
        frames=FrameReader(tracked, uuids, 1),
        custom=CustomMetricRunner((), None, interval_seconds=_INTERVAL_SECONDS, report=print),
        executing=executing,
        elapsed=lambda moment: moment,
    )
    spent = 0.0
    for step, frame in enumerate(frames(gpus, round(hours * 3600 / _INTERVAL_SECONDS))):
        begun = time.perf_counter()
        recorder.take(frame)
        spent += time.perf_counter() - begun
        if (step + 1) % _A_SECOND == 0:
            batch = recorder.take_batch()
            if batch is not None:
                yield batch, spent / batch.measurements
            spent = 0.0


async def fill(gpus: int, hours: float, dask_scheduler: Any) -> int:
    """In a scheduler: take in what its first worker would have sent; how many measurements that was."""
    address = next(iter(dask_scheduler.workers))
    taken = 0
    for number, (batch, _) in enumerate(recorded(gpus, hours), 1):
        message = {**batch._asdict(), "rows": batch.rows.encode()}
        await dask_scheduler.handlers[ROWS_HANDLER](
            worker=address, life="made up", number=number, batch=message, troubles=()
        )
        taken += batch.measurements
    gc.collect()
    return taken


def private_bytes(pid: int | str = "self") -> int:
    """What a process does not share with others."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return 1024 * sum(int(line.split()[1]) for line in text.splitlines() if line.startswith("Private_"))


def main() -> None:
    """Measure eight hours in this process."""
    gpus, hours = int(sys.argv[1]), float(sys.argv[2])
    for _ in recorded(gpus, 0.01):
        pass
    gc.collect()
    before = private_bytes()
    seconds, size, measurements = [], 0, 0
    for batch, took in recorded(gpus, hours):
        size += len(batch.rows)
        measurements += batch.measurements
        seconds.append(took)
    grown = max(0, private_bytes() - before)
    print(
        json.dumps({"grown": grown, "bytes": size, "measurements": measurements, "seconds": seconds}),
        flush=True,
    )


if __name__ == "__main__":
    main()
