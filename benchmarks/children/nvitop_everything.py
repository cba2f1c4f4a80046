"""Everything that nvitop's API reads of a machine, once for each line of input."""

from __future__ import annotations

import sys
import time

import nvitop
from nvitop import host


def main() -> None:
    """Take all snapshots whenever a line comes in."""
    devices = nvitop.Device.all()
    for _ in sys.stdin:
        cpu, begun = time.process_time(), time.perf_counter()
        taken = nvitop.take_snapshots(devices)
        host.cpu_percent()
        host.virtual_memory()
        host.swap_memory()
        host.load_average()
        wall = time.perf_counter() - begun
        known = sum(1 for process in taken.gpu_processes if process.command)
        print(
            f'{{"cpu": {cpu:.9f}, "wall": {wall:.9f}, "listed": {len(taken.gpu_processes)}, "known": {known}}}',
            flush=True,
        )


if __name__ == "__main__":
    main()
