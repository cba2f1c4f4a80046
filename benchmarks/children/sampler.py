"""A process that samples as users do: says what it cost now and then, and every frame's delay when asked.

Arguments: interval in seconds, `gpm` or `no-gpm`, seconds to run (0: until its input ends), `frames` or `quiet`.
"""

from __future__ import annotations

import os
import sys
import threading
import time

from gpulse.sampling.sampler import Sampler
from gpulse.sources.local_machine import LocalMachine
from gpulse.sources.nvml.read_timing import Cadence

_REPORT_SECONDS = 5.0
_SETTLE_TICKS = 3
_WATCH = "gpulse-xid"


def _resident_bytes() -> int:
    with open("/proc/self/statm", "rb", buffering=0) as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _watch_seconds() -> float:
    """The CPU time of the thread that waits for Xid errors, which the fake driver makes poll."""
    for thread in threading.enumerate():
        if thread.name == _WATCH:
            with open(f"/proc/self/task/{thread.native_id}/schedstat", "rb", buffering=0) as file:
                return int(file.read().split()[0]) / 1e9
    return 0.0


def _stop_at_end_of_input(sampler: Sampler) -> None:
    sys.stdin.read()
    sampler.stop()


def main() -> None:
    """Sample until told to stop."""
    interval, seconds = float(sys.argv[1]), float(sys.argv[3])
    cadence = Cadence() if sys.argv[2] == "gpm" else Cadence(gpm=None)
    each_frame = sys.argv[4] == "frames"
    machine = LocalMachine(interval_seconds=interval, cadence=cadence)
    with Sampler(machine, interval_seconds=interval) as sampler:
        threading.Thread(target=_stop_at_end_of_input, args=(sampler,), daemon=True).start()
        begun = time.monotonic()
        settled, settled_cpu, settled_watch, reported = begun, 0.0, 0.0, 0.0
        for count, frame in enumerate(sampler):
            now = time.monotonic()
            if each_frame:
                tick = int((frame.monotonic - begun) / interval + 0.01)
                late = now - begun - tick * interval
                answering = [gpu.device.index for gpu in frame.gpus if "power_watts" in gpu.values]
                print(f'{{"tick": {tick}, "late": {late:.6f}, "answering": {answering}}}', flush=True)
                continue
            if count < _SETTLE_TICKS:
                settled, settled_cpu, settled_watch = now, time.process_time(), _watch_seconds()
            elif now - reported >= _REPORT_SECONDS or count == _SETTLE_TICKS:
                reported = now
                cpu = time.process_time() - settled_cpu
                watch = _watch_seconds() - settled_watch
                times = f'"seconds": {now - settled:.3f}, "cpu": {cpu:.6f}, "watch": {watch:.6f}'
                frames = f'"resident": {_resident_bytes()}, "frames": {count + 1 - _SETTLE_TICKS}'
                print(f"{{{times}, {frames}}}", flush=True)
            if seconds and now - settled >= seconds:
                break


if __name__ == "__main__":
    main()
