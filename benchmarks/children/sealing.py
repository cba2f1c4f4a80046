"""Commit some seconds of a fleet to a store and seal them: the CPU time of both per frame, as JSON."""

from __future__ import annotations

import argparse
import json
import os
import resource
import tempfile
import time
from typing import Any

from benchmarks import fleet
from gpulse.cluster.head.message_decoder import decode_layout
from gpulse.model.packed_columns import PackedFrame, layout_id
from gpulse.store import seal_process
from gpulse.store.local import LocalStore
from gpulse.store.log.record_payloads import FrameBatch, LogEntry
from gpulse.store.node_registry import node_fact
from gpulse.store.store import StoredNode

_GPUS = 8


def _facts(store: LocalStore, played: list[fleet.Script], runs: list[bytes], begin: float) -> list[LogEntry]:
    """What the log says of the nodes before their first frames."""
    facts = []
    for number, script in enumerate(played, 1):
        name = fleet.host_name(number)
        node = StoredNode(number, name, name, fleet.machine_name(number), begin, {}, {})
        run = {"run": runs[number - 1].hex(), "node": number, "time": begin}
        facts.append(LogEntry.of_fact("node", **node_fact(node)))
        facts.append(LogEntry.of_fact("run", **run, version="1", pid=1, boot="boot"))
        for text in script.layouts:
            layout, key = decode_layout(text), layout_id(text)
            if key not in store.layouts:
                facts.append(LogEntry.of_fact("layout", id=str(key), text=layout.to_json().decode()))
                store.layouts[key] = layout
            if layout.scope == "gpu":
                facts.append(LogEntry.of_fact("devices", node=number, layout=str(key), time=begin))
    return facts


def run(nodes: int, seconds: int) -> dict[str, Any]:
    """Make the store and seal it; the first half is sealed before, so that everything is loaded."""
    played = fleet.scripts(nodes, _GPUS, 30)
    runs = [os.urandom(16) for _ in played]
    begin = int(time.time()) - seconds
    with tempfile.TemporaryDirectory(prefix="gpulse-bench-") as directory:
        commit = 0.0
        with LocalStore(directory) as store:
            store.commit(_facts(store, played, runs, float(begin)))
            for second in range(seconds):
                entries = []
                for number, script in enumerate(played, 1):
                    now = (begin + second) * 1_000_000 + number
                    frame = PackedFrame(now, now, script.seconds[second % len(script.seconds)])
                    batch = FrameBatch(runs[number - 1], number, second + 1, 1, now, 0, frame.to_bytes())
                    entries.append(LogEntry.of_batch(batch, ()))
                used = time.process_time()
                store.commit(entries)
                commit += time.process_time() - used
            last = store.metadata.applied
        writer = seal_process.open_writer(directory)
        half = nodes * (seconds // 2)
        writer.seal(last - half)
        used = time.process_time()
        writer.seal(last)
        seal = time.process_time() - used
        writer.close()
    return {
        "commit_us": 1e6 * commit / (nodes * seconds),
        "seal_us": 1e6 * seal / half,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def main() -> None:
    """`python -m benchmarks.children.sealing NODES SECONDS`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("nodes", type=int)
    parser.add_argument("seconds", type=int)
    given = parser.parse_args()
    print(json.dumps(run(given.nodes, given.seconds)))


if __name__ == "__main__":
    main()
