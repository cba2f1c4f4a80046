"""Record programs of `workloads.py` at a lowered power limit and at locked clocks, on a machine with a GPU, as root.

    PYTHONPATH=src python tests/gpu/record_limited.py --out DIR --limit 530

Two recorders run beside each program: one as usual, and one that finds a GPU without GPM and without byte counters of
PCIe, as those before Hopper are. DIR gets `limited.tar` with both recordings of each program, its log, and
`labels.json`, complete after every program. The power limit and the clocks are as before when it ends.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.gpu import workloads
from tests.gpu.record_workloads import label

_KINDS = (
    "thin_decode",
    "healthy_gpt",
    "launch_mlp",
    "offload_layers",
    "loader_few4",
    "bandwidth_norm",
    "healthy_cnn_loader",
    "python_30",
    "decode_eager",
    "pageable_256m",
)
_UNLIMITED_KINDS = ("offload_layers", "pageable_256m", "healthy_prefetch")
"""Recorded at the end, while time is left, for what NVML's own PCIe rates look like."""

_WITHOUT_GPM = """
import sys
from gpulse.cli.entry import main
from gpulse.sources.nvml import gpm, open_device
gpm.is_supported = lambda handle: False
open_device._counts_pcie_bytes = lambda handle: False
sys.argv[0] = "gpulse"
main()
"""


class Limit(NamedTuple):
    """One way to hold the GPU back."""

    name: str
    arguments: tuple[str, ...]
    """Of nvidia-smi."""
    kinds: tuple[str, ...]


LIMITS = (
    Limit("power_400", ("-pl", "400"), _KINDS),
    Limit("clock_1300", ("-lgc", "300,1300"), _KINDS),
    Limit("unlimited", (), _UNLIMITED_KINDS),
)


def _ask(*arguments: str) -> str:
    done = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=30, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"nvidia-smi {' '.join(arguments)}: {done.stdout}{done.stderr}")
    return done.stdout.strip()


def _state() -> str:
    return _ask("--query-gpu=power.limit,clocks.sm,clocks.max.sm,power.draw", "--format=csv,noheader")


@contextlib.contextmanager
def limited(limit: Limit) -> Iterator[None]:
    """Hold the GPU back for a while; it is as before afterwards, whatever happens."""
    before = float(_ask("--query-gpu=power.limit", "--format=csv,noheader,nounits").splitlines()[0])
    try:
        if limit.arguments:
            print(_ask(*limit.arguments), flush=True)
        print(f"{limit.name}: {_state()}", flush=True)
        yield
    finally:
        try:
            print(_ask("-rgc"), flush=True)
        finally:
            print(_ask("-pl", f"{before:g}"), flush=True)


def record(limit: Limit, kind: str, seconds: float, folder: Path, interval: float) -> dict[str, Any]:
    """Run one program beside both recorders; its label."""
    name = f"{limit.name}_{kind}"
    log = folder / f"{name}.log"
    options = ["-i", str(interval), "-q"]
    recorders = [
        subprocess.Popen([sys.executable, *how, "record", "-o", str(folder / path), *options])
        for how, path in (
            (["-m", "gpulse"], f"{name}.gpm.jsonl.gz"),
            (["-c", _WITHOUT_GPM], f"{name}.jsonl.gz"),
        )
    ]
    try:
        time.sleep(0.5)
        told = workloads.launch(kind, seconds, str(log))
        time.sleep(0.5)
    finally:
        for recorder in recorders:
            recorder.send_signal(signal.SIGINT)
        for recorder in recorders:
            recorder.wait(20)
    return {**label(kind, told), "code": told["code"], "state": _state()}


def main() -> int:
    """Record every program at every limit until the time is over."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=16.0)
    parser.add_argument("--interval", type=float, default=0.2)
    parser.add_argument("--limit", type=float, default=530.0, help="start nothing that would end after this")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the settings are restored
    began = time.monotonic()
    options.out.mkdir(parents=True, exist_ok=True)
    labels: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        # Without persistence mode the settings would be lost as soon as no program has the GPU open.
        holder = subprocess.Popen(["nvidia-smi", "-l", "3600"], stdout=subprocess.DEVNULL)
        stack.callback(holder.wait)
        stack.callback(holder.kill)
        for limit in LIMITS:
            with limited(limit):
                for kind in limit.kinds:
                    start = time.monotonic()
                    if start - began + options.seconds + 8 > options.limit:
                        print(f"{limit.name} {kind}: no time left", flush=True)
                        continue
                    try:
                        entry = record(limit, kind, options.seconds, folder, options.interval)
                    except Exception as error:  # noqa: BLE001  the next one may work
                        print(f"{limit.name} {kind}: {error!r}", flush=True)
                        continue
                    labels[f"{limit.name}_{kind}"] = entry
                    (folder / "labels.json").write_text(json.dumps(labels, indent=1), encoding="utf-8")
                    with tarfile.open(options.out / "limited.tar", "w") as tar:
                        for path in sorted(folder.iterdir()):
                            tar.add(path, path.name)
                    took, at = time.monotonic() - start, time.monotonic() - began
                    print(
                        f"{limit.name} {kind:20} code {entry['code']} took {took:.1f} s, at {at:.0f} s",
                        flush=True,
                    )
                    if entry["code"] != 0:
                        log = folder / f"{limit.name}_{kind}.log"
                        print(log.read_text(errors="replace")[-800:], flush=True)
    print(f"restored: {_state()}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
