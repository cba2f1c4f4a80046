"""gpulse's reading of the GPUs, one tick for each line of input; answers with the CPU time used before it.

First of all it tells the periods of what it calls slow, graphics and shares.
"""

from __future__ import annotations

import sys
import time

from gpulse.sources.nvml.gpu_reader import GpuReader
from gpulse.sources.nvml.read_timing import Cadence


def main() -> None:
    """Read a tick whenever a line comes in."""
    cadence = Cadence()
    print([cadence.slow, cadence.graphics, cadence.shares], flush=True)
    reader = GpuReader(cadence, watch_xids=False)
    patience = 3.0
    for _ in sys.stdin:
        cpu, begun = time.process_time(), time.perf_counter()
        now = time.time()
        reader.start(now)
        reader.collect(now, tick_patience=0.2, patience=patience)
        patience = 0.0
        print(f'{{"cpu": {cpu:.9f}, "wall": {time.perf_counter() - begun:.9f}}}', flush=True)
    reader.close()


if __name__ == "__main__":
    main()
