"""What a frame costs a head and its sealing process: CPU by thread, memory, and how late it is durable."""

from __future__ import annotations

import json
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import measure
from benchmarks.measure import Report, Table, Target
from benchmarks.processes import (
    Head,
    Process,
    allow_connections,
    cpu_seconds,
    memory,
    thread_seconds,
    workplace,
)

NAME = "ingest"
_GPUS = 8
_PARTS = ("event loop", "gRPC", "commit, others")
_SETTLE_SECONDS = 5.0
_SEAL_SECONDS = 14
"""Time whose frames are sealed at once, beside the head."""
_MAX_CORES, _MAX_MEMORY_MB, _MAX_P99_SECONDS = 1.5, 1000, 1.5


class Size(NamedTuple):
    """How much of everything."""

    agents: int
    seconds: float


_FULL = Size(3125, 60.0)
_QUICK = Size(200, 20.0)


class _Found(NamedTuple):
    """What one version costs; times are microseconds of CPU per frame."""

    head: float
    threads: dict[str, float]
    sealing: float
    """Of the sealing process while the head received frames."""
    sealing_alone: float
    """Of the same work beside the head, where nothing is cold."""
    fleet: float
    """Of the agents."""
    cores: float
    came: dict[str, Any]
    peak: float
    sealing_peak: float


def _threads(pid: int) -> dict[str, float]:
    """CPU seconds of a head's threads, by what they do."""
    found = dict.fromkeys(_PARTS, 0.0)
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):
            name = (task / "comm").read_text().strip()
            kind = (
                "event loop"
                if int(task.name) == pid
                else "gRPC"
                if name == "event_engine"
                else "commit, others"
            )
            found[kind] += thread_seconds(pid, int(task.name))
    return found


def _measure(size: Size, source: Path | None) -> _Found:
    agents = allow_connections(size.agents)
    with workplace() as folder, Head(folder, "--freq", "1000", source=source) as head:
        token = json.loads((head.data / "head.json").read_text())["token_file"]
        command = [sys.executable, "-m", "benchmarks.fleet", head.address, "--agents", str(agents)]
        command += ["--gpus", str(_GPUS), "--seconds", str(size.seconds), "--token-file", token]
        with Process(command, folder) as fleet:
            start = fleet.lines(1, 300.0)[0]["start"]
            time.sleep(max(0.0, start - time.time()) + _SETTLE_SECONDS)
            begun, threads = time.monotonic(), _threads(head.pid)
            before = [cpu_seconds(head.pid), cpu_seconds(head.sealer), cpu_seconds(fleet.pid)]
            sealing_peak = 0.0
            while (seconds := time.monotonic() - begun) < size.seconds - 2 * _SETTLE_SECONDS:
                time.sleep(1.0)
                sealing_peak = max(sealing_peak, memory(head.sealer, "VmHWM"))
            after = [cpu_seconds(head.pid), cpu_seconds(head.sealer), cpu_seconds(fleet.pid)]
            threads_after = _threads(head.pid)
            came = fleet.lines(2, 300.0)[1]
        peak = memory(head.pid, "VmHWM")
        command = [sys.executable, "-m", "benchmarks.children.sealing", str(agents), str(_SEAL_SECONDS)]
        extra = {} if source is None else {"PYTHONPATH": f"{source}:{measure.ROOT}"}
        with Process(command, folder, environment=extra) as sealing:
            alone = sealing.answer(600.0)["seal_us"]
    used = [one - other for one, other in zip(after, before, strict=True)]
    frames = agents * seconds
    return _Found(
        1e6 * used[0] / frames,
        {name: 1e6 * (threads_after[name] - threads[name]) / frames for name in _PARTS},
        1e6 * used[1] / frames,
        alone,
        1e6 * used[2] / frames,
        (used[0] + used[1]) / seconds,
        came,
        peak,
        sealing_peak,
    )


def run(size: Size, before: Path | None = None) -> Report:
    """Measure this version and, when given, an earlier one."""
    report = Report(NAME, "The cost of a frame")
    table = Table(
        f"CPU per frame of {_GPUS} GPUs, {size.agents * _GPUS:,} GPUs at 1 Hz; sealing as it goes on, and alone; peak RSS of "
        "head and sealing:",
        ("version", "head", *_PARTS, "sealing", "alone", "agents", "peak RSS", "p50", "p99"),
    )
    for name, source in {**({"before": before} if before else {}), "now": None}.items():
        found = _measure(size, source)
        figures = [found.head, *found.threads.values(), found.sealing, found.sealing_alone, found.fleet]
        late = [f"{found.came[key]:.2f} s" for key in ("p50", "p99")]
        peak = f"{found.peak:.0f} + {found.sealing_peak:.0f} MB"
        table.rows.append((name, *(f"{one:.0f} µs" for one in figures), peak, *late))
        if name == "now":
            report.targets += _targets(size, found)
    report.tables.append(table)
    return report


def _targets(size: Size, found: _Found) -> list[Target]:
    came, whole = found.came, found.peak + found.sealing_peak
    sealing = found.sealing or found.sealing_alone  # a small fleet seals nothing in the time that is measured
    return [
        Target(
            f"{size.agents * _GPUS:,} GPUs at 1 Hz, head and sealing",
            f"{found.cores:.2f} cores",
            f"{_MAX_CORES} cores",
            found.cores <= _MAX_CORES,
        ),
        Target(
            "peak RSS of head and sealing",
            f"{whole:.0f} MB",
            f"{_MAX_MEMORY_MB} MB",
            whole <= _MAX_MEMORY_MB,
        ),
        Target(
            "sealing, of the head",
            f"{100 * sealing / found.head:.0f} %",
            "25 %",
            sealing <= found.head / 4,
        ),
        Target(
            "from sample to acknowledgement, p99",
            f"{came['p99']:.2f} s",
            f"{_MAX_P99_SECONDS} s",
            came["p99"] <= _MAX_P99_SECONDS,
        ),
        Target(
            "frames sent = durable",
            f"{came['sent']:,} = {came['durable']:,}",
            "all",
            came["sent"] == came["durable"],
        ),
    ]


def main() -> None:
    """`python -m benchmarks.ingest --before OTHER/src`."""
    parser = measure.parser(NAME, __doc__)
    parser.add_argument("--before", type=Path, help="the source of an earlier version, to measure it too")
    for name, value in _FULL._asdict().items():
        parser.add_argument(
            f"--{name}", type=type(value), help=f"default: {value}, {getattr(_QUICK, name)} with --quick"
        )
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    chosen = {name: value for name in Size._fields if (value := getattr(given, name)) is not None}
    size = (_QUICK if given.quick else _FULL)._replace(**chosen)
    measure.publish(run(size, given.before), write=given.write)


if __name__ == "__main__":
    main()
