"""What reading stacks takes from a program that computes in Python: its steps with and without, in random turns."""

from __future__ import annotations

import math
import mmap
import random
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks import measure
from benchmarks.measure import Report, Table, Target
from gpulse.model.python_stack import StackTarget
from gpulse.sampling.stack_collector import StackCollector
from gpulse.sources.python_stacks import StackReader, find_py_spy

NAME = "line_overhead"
_MAX_SLOWDOWN = 0.004
_TURN_SECONDS = 2.0
_SETTLE_SECONDS = 0.1
_COUNTER = struct.Struct("<q")
_PROGRAM = """
import json, mmap, struct, sys
with open(sys.argv[1], "r+b") as file:
    steps = mmap.mmap(file.fileno(), 8)
record, count = {str(n): [n] * 5 for n in range(20)}, 0
while True:
    json.loads(json.dumps(record))
    count += 1
    struct.pack_into("<q", steps, 0, count)
"""


def _rate(steps: mmap.mmap) -> float:
    """Steps per second of one turn."""
    before, start = _COUNTER.unpack_from(steps)[0], time.perf_counter()
    time.sleep(_TURN_SECONDS)
    after, end = _COUNTER.unpack_from(steps)[0], time.perf_counter()
    return float((after - before) / (end - start))


def run(*, quick: bool, pairs: int = 60) -> Report:
    """Switch the reading on and off, in random order within each pair."""
    pairs = 2 if quick else pairs
    report = Report(NAME, "What reading stacks takes from a program")
    reader = StackReader(find_py_spy())
    logs: list[float] = []
    with tempfile.NamedTemporaryFile() as file:
        file.write(bytes(_COUNTER.size))
        file.flush()
        steps = mmap.mmap(file.fileno(), _COUNTER.size)
        child = subprocess.Popen([sys.executable, "-c", _PROGRAM, str(Path(file.name))])
        collector = StackCollector(lambda pid: reader.read(pid, time.time))
        try:
            while _COUNTER.unpack_from(steps)[0] == 0:
                time.sleep(0.01)
            for _ in range(pairs):
                rates = {}
                for is_read in random.sample([True, False], 2):
                    collector.watch([StackTarget(child.pid, "main")] if is_read else [])
                    time.sleep(_SETTLE_SECONDS)
                    rates[is_read] = _rate(steps)
                logs.append(math.log(rates[True] / rates[False]))
                collector.take()
        finally:
            collector.close()
            child.kill()
            child.wait()
    ratio = math.exp(statistics.fmean(logs))
    error = statistics.stdev(logs) / math.sqrt(len(logs))
    busy = pairs * (_TURN_SECONDS + _SETTLE_SECONDS)
    rows: list[Sequence[str]] = [
        ("steps with reading, relative to without", f"{ratio:.4f} ± {error:.4f}"),
        ("pairs of turns", str(pairs)),
        ("reads", str(collector.reads)),
        ("CPU time of one read, ms", f"{1000 * collector.cpu_seconds / max(1, collector.reads):.1f}"),
        ("CPU use of all reads", f"{collector.cpu_seconds / busy:.1%}"),
    ]
    report.tables.append(Table("A loop that encodes and decodes JSON:", ("what", "figure"), rows))
    is_resolved = 2 * error <= _MAX_SLOWDOWN
    report.targets.append(
        Target(
            "slowdown of the program",
            f"{1 - ratio:.2%} ± {error:.2%}",
            f"at most {_MAX_SLOWDOWN:.1%}",
            1 - ratio <= _MAX_SLOWDOWN if is_resolved else None,
        )
    )
    report.notes.append("± is one standard error of the mean over the pairs.")
    return report


if __name__ == "__main__":
    given = measure.parser(NAME, __doc__, {"pairs": 60}).parse_args()
    if find_py_spy() is None:
        sys.exit(f"benchmarks.{NAME}: py-spy is not installed here")
    measure.publish(run(quick=given.quick, pairs=given.pairs), write=given.write)
