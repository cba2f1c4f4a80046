"""What checksums cost: sealing and the first query with and without them, side by side in one run.

python -m benchmarks.checksums [--takes 5]
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from unittest import mock

import numpy as np

from gpulse.model.device import Device, Node
from gpulse.model.frame import Frame, GpuReading
from gpulse.model.frame_packing import FramePacker
from gpulse.model.packed_columns import ColumnLayout, layout_id
from gpulse.store.history import duckdb_query, parquet
from gpulse.store.history.reader import HistoryReader
from gpulse.store.history.recent_frames import RecentFrames
from gpulse.store.local import LocalStore
from gpulse.store.log.record_payloads import FrameBatch, LogEntry
from gpulse.store.scrub import scrub_data
from gpulse.store.seal_process import open_writer
from gpulse.store.store import Query

_NODES, _GPUS, _SECONDS = 32, 8, 600
_BEGIN = 1_700_000_000
_METRICS = (
    "power_watts",
    "gpu_utilization_ratio",
    "memory_used_bytes",
    "sm_active_ratio",
    "dram_active_ratio",
)


def _fill(directory: str) -> int:
    """Write ten minutes of 256 GPUs at 1 Hz to a log; return the last position."""
    chance = np.random.default_rng(1)
    with LocalStore(directory) as store:
        for number in range(1, _NODES + 1):
            packer = FramePacker()
            fact = {"id": number, "name": f"n{number}", "host": f"n{number}", "machine": f"m{number}"}
            store.commit([LogEntry.of_fact("node", time=float(_BEGIN), facts={}, labels={}, **fact)])
            devices = [Device(gpu, f"GPU-{number}-{gpu}", "NVIDIA H200") for gpu in range(_GPUS)]
            frames: list[bytes] = []
            for second in range(_SECONDS):
                power, duty, sm, dram = chance.random((4, _GPUS))
                readings = tuple(
                    GpuReading(
                        device,
                        {
                            "power_watts": round(100 + 600 * power[gpu], 1),
                            "gpu_utilization_ratio": round(duty[gpu], 2),
                            "memory_used_bytes": int(power[gpu] * 140e9) & ~0xFFFFF,
                            "sm_active_ratio": round(sm[gpu], 3),
                            "dram_active_ratio": round(dram[gpu], 3),
                        },
                    )
                    for gpu, device in enumerate(devices)
                )
                frame = Frame(_BEGIN + second, float(second), Node(f"n{number}"), readings)
                packed, texts = packer.pack(frame, [])
                for text in texts:
                    store.layouts[layout_id(text)] = ColumnLayout.from_json(text)
                    store.commit([LogEntry.of_fact("layout", id=str(layout_id(text)), text=text.decode())])
                frames.append(packed.to_bytes())
            received = (_BEGIN + _SECONDS) * 1_000_000
            batch = FrameBatch(bytes([number] * 16), number, 1, _SECONDS, received, 0, b"".join(frames))
            store.commit([LogEntry.of_batch(batch, ())])
        return store.accepted


def _cpu(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def _seal(directory: str, last: int) -> float:
    shutil.rmtree(f"{directory}/history", ignore_errors=True)
    with closing(open_writer(directory)) as writer:
        return _cpu(lambda: writer.seal(last))


def _first_query(directory: str, nodes: frozenset[int] | None) -> float:
    with closing(duckdb_query.SealedHistory(directory)) as history:
        reader = HistoryReader(history, RecentFrames({}))
        query = Query(_BEGIN, _BEGIN + _SECONDS, "gpu", _METRICS[:1], nodes, step=60.0)
        return _cpu(lambda: reader.series(query))


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--takes", type=int, default=5)
    takes = parser.parse_args().takes
    with tempfile.TemporaryDirectory() as directory:
        last = _fill(directory)
        found: dict[str, tuple[list[float], list[float]]] = {}
        for _ in range(takes):
            with mock.patch.object(parquet, "file_checksum", return_value=0):
                bare = _seal(directory, last)
            found.setdefault("sealing 10 min of 256 GPUs", ([], []))[0].append(bare)
            found["sealing 10 min of 256 GPUs"][1].append(_seal(directory, last))
            for what, nodes in (("all GPUs", None), ("one node", frozenset({1}))):
                name = f"first query, {what}, one metric"
                with mock.patch.object(duckdb_query, "check_file", return_value=None):
                    bare = _first_query(directory, nodes)
                found.setdefault(name, ([], []))[0].append(bare)
                found[name][1].append(_first_query(directory, nodes))
        size = sum(path.stat().st_size for path in Path(directory, "history").rglob("*.parquet"))
        print(f"files: {size / 1e6:.1f} MB")
        print(f"{'CPU time of':42} {'without':>9} {'with':>9} {'ratio':>7}")
        for name, (bare_times, times) in found.items():
            one, other = statistics.median(bare_times), statistics.median(times)
            print(f"{name:42} {one * 1000:6.1f} ms {other * 1000:6.1f} ms {other / one:6.2f}x")
        spent = _cpu(lambda: scrub_data(directory))
        total = scrub_data(directory).size_bytes
        print(f"scrub: {total / 1e6 / spent:.0f} MB per second of CPU time ({total / 1e6:.1f} MB)")


if __name__ == "__main__":
    main()
