"""Writes a session of a store that no head holds, and says what that took: data directory, session, file."""

from __future__ import annotations

import json
import os
import sys
import time

from benchmarks.processes import memory
from gpulse.cluster.client import offline_sessions


def main() -> None:
    """Write it once."""
    directory, name, path = sys.argv[1:]
    before = time.perf_counter(), time.process_time()
    with offline_sessions.open_store(directory) as store, open(path, "wb") as file:
        size = offline_sessions.write_session_file(
            store, offline_sessions.find_offline_session(store, name), "json", file
        )
    after = time.perf_counter(), time.process_time()
    peak = memory(os.getpid(), "VmHWM")  # getrusage has what the parent took
    print(
        json.dumps(
            {"wall": after[0] - before[0], "cpu": after[1] - before[1], "bytes": size, "peak": peak},
        )
    )


if __name__ == "__main__":
    main()
