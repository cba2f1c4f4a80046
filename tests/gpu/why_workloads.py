"""Run `gpulse why` beside the programs of `workloads.py`, on a machine with a GPU, and keep what it says.

    PYTHONPATH=src python tests/gpu/why_workloads.py --out DIR KIND...

DIR gets `KIND.txt` and `KIND.json` for each, and a line on the screen says whether the answer was right.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.gpu import workloads

if os.environ.get("WORKLOAD_PREIMPORT"):
    import torch._dynamo  # type: ignore[import-not-found,unused-ignore]  # noqa: F401  optimisers load it, for seconds

_WATCH_SECONDS = 20.0
_WAIT = (
    'until grep -q "^begin" "$LOG"; do sleep 0.1; done; exec "$PYTHON" -m gpulse why -q --window "$WINDOW"'
)


def beside(name: str, out: Path) -> str:
    """Watch one program; the ids of what was found."""
    with tempfile.TemporaryDirectory() as place:
        log = Path(place) / "log"
        log.touch()
        environment = {
            **os.environ,
            "LOG": str(log),
            "PYTHON": sys.executable,
            "WINDOW": str(_WATCH_SECONDS),
            "COLUMNS": "100",
        }
        with (out / f"{name}.txt").open("w") as text, (out / f"{name}.json").open("w") as document:
            watchers = [
                subprocess.Popen(["sh", "-c", _WAIT], env=environment, stdout=text, stderr=text),
                subprocess.Popen(["sh", "-c", f"{_WAIT} --json"], env=environment, stdout=document),
            ]
            told = workloads.launch(name, _WATCH_SECONDS + 3.0, str(log))
            codes = []
            for watcher in watchers:
                try:
                    codes.append(watcher.wait(10))
                except subprocess.TimeoutExpired:
                    watcher.kill()
                    codes.append(watcher.wait())
    if told["code"] != 0:
        return f"the program ended with {told['code']}"
    found = [finding["id"] for finding in json.loads((out / f"{name}.json").read_text())["findings"]]
    entry = workloads.KINDS[name]
    right = found[:1] == list(entry.expect)[:1] or bool(found and found[0] in entry.also_right)
    return f"{'right' if right else 'WRONG'} {found} exit codes {codes}"


def main() -> int:
    """Watch the chosen kinds one after the other."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("kinds", nargs="*", default=os.environ.get("WORKLOAD_KINDS", "").split())
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--limit", type=float, default=540.0, help="start nothing after this many seconds")
    options = parser.parse_args()
    began = time.monotonic()
    options.out.mkdir(parents=True, exist_ok=True)
    if any(name.startswith("disk_") for name in options.kinds):
        workloads.make_file()
    for name in options.kinds:
        if time.monotonic() - began > options.limit:
            print(f"{name}: no time left", flush=True)
            continue
        print(f"{name:20} {beside(name, options.out)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
