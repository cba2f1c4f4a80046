"""How long agents wait for their acknowledgements: without readers, and with many that poll and many open pages."""

from __future__ import annotations

import json
import signal
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import measure
from benchmarks.children.pollers import ROUTES
from benchmarks.measure import Report, Table, Target
from benchmarks.processes import Head, Process, allow_connections, cores, cpu_seconds, memory, workplace

NAME = "readers"
_GPUS = 8
_SETTLE_SECONDS = 5.0
_MAX_P99_SECONDS = 2.0


class Size(NamedTuple):
    """How much of everything."""

    agents: int
    pollers: int
    pages: int
    seconds: float
    """Without readers, and again with them."""


_FULL = Size(250, 200, 250, 30.0)
_QUICK = Size(40, 50, 20, 10.0)


class _Found(NamedTuple):
    """What one head did."""

    came: dict[str, Any]
    """What the fleet says."""
    answers: dict[str, int]
    """Answers to the pollers by status."""
    alone: float
    """Cores that the head used without readers."""
    read: float
    """And with them."""
    peak: float


def _measure(size: Size, source: Path | None) -> _Found:
    agents = allow_connections(size.agents)
    mine, others = cores()
    with workplace() as folder, Head(folder, "--freq", "1000", core=mine, source=source) as head:
        known = json.loads((head.data / "head.json").read_text())
        url = f"http://{known['http']}"
        sending = [sys.executable, "-m", "benchmarks.fleet", head.address, "--agents", str(agents)]
        sending += ["--gpus", str(_GPUS), "--jobs", "--token-file", known["token_file"]]
        sending += ["--seconds", str(2 * size.seconds), "--split", str(size.seconds)]
        polling = [sys.executable, "-m", "benchmarks.children.pollers", url, str(size.pollers)]
        watching = [sys.executable, "-m", "benchmarks.children.watchers"]
        watching += [url.replace("http://", "ws://") + "/api/v1/live", str(size.pages)]
        with Process(sending, folder, core=others) as fleet:
            start = fleet.lines(1, 120.0)[0]["start"]
            time.sleep(max(0.0, start - time.time()) + _SETTLE_SECONDS)
            alone = _used(head, size.seconds - _SETTLE_SECONDS)
            with Process(watching, folder, core=others), Process(polling, folder, core=others) as polled:
                read = _used(head, size.seconds)
                polled.signal_end()
                answers = polled.answer()
            came = fleet.lines(2, 120.0)[1]
        return _Found(came, answers, alone, read, memory(head.pid, "VmHWM"))


def _used(head: Head, seconds: float) -> float:
    begun, before = time.monotonic(), cpu_seconds(head.pid)
    time.sleep(max(0.0, seconds))
    return (cpu_seconds(head.pid) - before) / (time.monotonic() - begun)


def run(size: Size, before: Path | None = None) -> Report:
    """Measure this version and, when given, an earlier one."""
    report = Report(NAME, "Readers and agents")
    what = f"{size.agents * _GPUS:,} GPUs at 1 Hz, {size.pollers} clients that poll, {size.pages} open pages"
    table = Table(
        f"From sample to acknowledgement, {what}:",
        ("head", "readers", "p50", "p99", "worst", "CPU of a core", "peak RSS"),
    )
    versions = {**({"before": before} if before else {}), "now": None}
    for name, source in versions.items():
        found = _measure(size, source)
        came = found.came
        for readers, part, used in (("none", "before", found.alone), ("all", "after", found.read)):
            row = [f"{came[part][key]:.2f} s" if came[part] else "never" for key in ("p50", "p99", "max")]
            table.rows.append((name, readers, *row, f"{100 * used:.0f} %", f"{found.peak:.0f} MB"))
        said = ", ".join(f"{count:,} with {status}" for status, count in sorted(found.answers.items()))
        report.notes.append(
            f"{name}: {came['durable']:,} of {came['sent']:,} frames were acknowledged; answers to those that poll: {said}."
        )
        if name == "now":
            p99 = came["after"].get("p99", float("inf"))
            report.targets += [
                Target("acknowledgement with readers, p99", f"{p99:.2f} s", "2 s", p99 <= _MAX_P99_SECONDS),
                Target(
                    "frames sent = acknowledged",
                    f"{came['sent']:,} = {came['durable']:,}",
                    "all",
                    came["sent"] == came["durable"],
                ),
            ]
    report.tables.append(table)
    report.notes.append(
        f"Each client polls one of {len(ROUTES)} routes as fast as it is answered, also after a refusal. The head has a core of its "
        "own; the fleet, the clients and the pages share the other one."
    )
    return report


def main() -> None:
    """`python -m benchmarks.readers --before OTHER/src`."""
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
