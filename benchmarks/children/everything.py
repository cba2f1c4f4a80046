"""Everything that gpulse reads of a machine, one frame for each line of input, as a sampler at 1 Hz reads it."""

from __future__ import annotations

import sys
import time

from gpulse.sources.local_machine import LocalMachine


def main() -> None:
    """Read a frame whenever a line comes in."""
    machine = LocalMachine(interval_seconds=1.0, watch_xids=False)  # the fake driver polls for them
    for _ in sys.stdin:
        cpu, begun = time.process_time(), time.perf_counter()
        frame = machine.sample(time.time())
        wall = time.perf_counter() - begun
        listed = sum(len(gpu.processes or ()) for gpu in frame.gpus)
        known = sum(1 for process in frame.processes if process.on_gpu and process.values)
        print(f'{{"cpu": {cpu:.9f}, "wall": {wall:.9f}, "listed": {listed}, "known": {known}}}', flush=True)
    machine.close()


if __name__ == "__main__":
    main()
