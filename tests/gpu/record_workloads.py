"""Record the programs of `workloads.py` one after the other, with labels, on a machine with a GPU.

    PYTHONPATH=src python tests/gpu/record_workloads.py --out DIR --limit 500 [KIND...]

Torch is imported once, and every program is a fork that starts CUDA for itself. DIR gets `traces.tar` and
`labels.json`, both complete after every program. WORKLOAD_KINDS names the kinds where the command line
should not.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.gpu import workloads

if os.environ.get("WORKLOAD_PREIMPORT"):
    import torch._dynamo  # type: ignore[import-not-found,unused-ignore]  # noqa: F401  optimisers load it, for seconds


def record(name: str, seconds: float | None, folder: Path, interval: float) -> dict[str, Any]:
    """Run one kind beside a recorder; its label."""
    path, log = folder / f"{name}.jsonl.gz", folder / f"{name}.log"
    arguments = ["record", "-o", str(path), "-i", str(interval), "-q"]
    recorder = subprocess.Popen([sys.executable, "-m", "gpulse", *arguments])
    time.sleep(0.3)
    told = workloads.launch(name, seconds, str(log))
    time.sleep(0.3)
    recorder.send_signal(signal.SIGINT)
    recorder.wait(20)
    return {**label(name, told), "code": told["code"]}


def label(name: str, told: dict[str, Any]) -> dict[str, Any]:
    """What the recording shows, in the form of tests/data/traces/labels.json."""
    entry = workloads.KINDS[name]
    found: dict[str, Any] = {"expect": list(entry.expect)}
    if entry.also_right:
        found["also_right"] = list(entry.also_right)
    if entry.info:
        found["info"] = list(entry.info)
    found["note"] = entry.note
    found.update({key: told[key] for key in ("begin", "end", "marks", "steps", "facts") if key in told})
    if "end" in told and "begin" in told:
        found["steps_per_s"] = round(told["steps"] / (told["end"] - told["begin"]), 3)
    return found


def main() -> int:
    """Record the chosen kinds until the time is over."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("kinds", nargs="*", default=os.environ.get("WORKLOAD_KINDS", "").split())
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=None)
    parser.add_argument("--interval", type=float, default=0.2)
    parser.add_argument(
        "--limit", type=float, default=540.0, help="start no program that would end after this"
    )
    options = parser.parse_args()
    began = time.monotonic()
    options.out.mkdir(parents=True, exist_ok=True)
    labels: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        if any(name.startswith("disk_") for name in options.kinds):
            workloads.make_file()
            print(f"file made after {time.monotonic() - began:.1f} s", flush=True)
        for name in options.kinds or workloads.KINDS:
            length = options.seconds or workloads.KINDS[name].seconds
            start = time.monotonic()
            if start - began + length + 6 > options.limit:
                print(f"{name}: no time left", flush=True)
                continue
            try:
                entry = record(name, options.seconds, folder, options.interval)
            except Exception as error:  # noqa: BLE001  the next one may work
                print(f"{name}: {error!r}", flush=True)
                continue
            with tarfile.open(options.out / "traces.tar", "a") as tar:
                for path in sorted(folder.glob(f"{name}.*")):
                    tar.add(path, path.name)
            labels[name] = entry
            (options.out / "labels.json").write_text(json.dumps(labels, indent=1), encoding="utf-8")
            print(
                f"{name:24} code {entry['code']} {entry.get('steps_per_s', 0):8.2f} steps/s {entry.get('facts', '')}"
                f" took {time.monotonic() - start:.1f} s, at {time.monotonic() - began:.0f} s",
                flush=True,
            )
            if not any(other["code"] == 0 for other in labels.values()) and len(labels) >= 3:
                print("nothing works", flush=True)
                return 1
            if entry["code"] != 0:
                print((folder / f"{name}.log").read_text(errors="replace")[-800:], flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
