"""What one sample costs once everything runs: beside the bare calls, and beside nvitop's API."""

from __future__ import annotations

import time
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from benchmarks import measure
from benchmarks.fake_machine import fake_machine
from benchmarks.measure import Child, Report, Spread, Table, Target

NAME = "sample_cost"
_GPUS = 8
_MOST_OF_BARE = 1.3
_MOST_CPU_OF_NVITOP = 0.15
_MOST_WALL_OF_NVITOP = 0.05


def run(*, quick: bool, seconds: int = 62) -> Report:
    """Sample once a second on both sides, in turn."""
    report = Report(NAME, "One sample of eight GPUs in steady state")
    _beside_bare_calls(report, 12 if quick else seconds)
    _beside_nvitop(report, 5 if quick else max(5, seconds // 2))
    return report


def _beside_bare_calls(report: Report, ticks: int) -> None:
    with (
        fake_machine(_GPUS, 1) as ours,
        fake_machine(_GPUS, 1) as theirs,
        measure.child("gpu_reader", [], ours.environment) as reader,
        measure.child("bare", [str(period) for period in reader.hear()], theirs.environment) as bare,
    ):
        _in_counter_phase({"gpulse": reader, "bare": bare}, 2)  # what is read once is behind us then
        time.sleep(1)
        ours.fake.reset_calls()
        theirs.fake.reset_calls()
        takes = _in_counter_phase({"gpulse": reader, "bare": bare}, ticks)
        time.sleep(0.5)
        calls = {"gpulse": ours.fake.calls_by_function(), "bare": theirs.fake.calls_by_function()}
    cpu = {name: _cpu_each(answers) for name, answers in takes.items()}
    ratio = _mean(cpu["gpulse"]) / _mean(cpu["bare"])
    ratio_of_medians = Spread.of(cpu["gpulse"]).median / Spread.of(cpu["bare"]).median
    table = Table(
        f"Reading {_GPUS} GPUs with a process each at 1 Hz for {ticks} s, milliseconds of CPU a sample, all threads:",
        ("side", "mean", "median and middle half", "CPU a call, µs", "wall of the call", "NVML calls"),
    )
    for name, label in (("gpulse", "gpulse's GpuReader"), ("bare", "bare loop over nvidia-ml-py")):
        wall = Spread.of([answer["wall"] for answer in takes[name]])
        table.rows.append(
            (
                label,
                f"{_mean(cpu[name]) * 1000:.2f}",
                Spread.of(cpu[name]).text(1000, 2),
                f"{sum(cpu[name]) * 1e6 / sum(calls[name].values()):.1f}",
                wall.text(1000, 1),
                str(sum(calls[name].values())),
            )
        )
    total = {name: sum(counted.values()) for name, counted in calls.items()}
    only = calls["gpulse"].keys() ^ calls["bare"].keys()
    share = total["gpulse"] / total["bare"]
    each = ratio * total["bare"] / total["gpulse"]
    throughput = calls["gpulse"].get("nvmlDeviceGetPcieThroughput", 0)
    report.targets += [
        Target(
            "CPU of a sample, of the bare calls",
            f"{ratio:.2f} x (medians {ratio_of_medians:.2f} x; call for call {each:.2f} x)",
            f"at most {_MOST_OF_BARE} x",
            ratio <= _MOST_OF_BARE,
        ),
        Target(
            "the same readings on both sides, with no more calls",
            f"{total['gpulse']} and {total['bare']} calls, {len(only)} functions on one side alone",
            "at most as many, 0",
            not only and share <= 1.0,
        ),
        Target("calls of nvmlDeviceGetPcieThroughput", str(throughput), "0", throughput == 0),
    ]
    report.tables += [table, _calls_table(calls)]
    report.notes.append(
        "gpulse needs fewer calls for the same readings: it lists processes with one call instead of two, and looks "
        "for graphics processes every five seconds while there are none."
    )


def _beside_nvitop(report: Report, ticks: int) -> None:
    with (
        fake_machine(_GPUS, 20) as machine,
        measure.child("everything", [], machine.environment) as ours,
        measure.child("nvitop_everything", [], machine.environment) as nvitop,
    ):
        time.sleep(6)  # gpulse looks at young processes more often
        sides = {"gpulse": ours, "nvitop": nvitop}
        _in_counter_phase(sides, 3)
        time.sleep(1)
        takes = _in_counter_phase(sides, ticks)
    cpu = {name: _cpu_each(answers) for name, answers in takes.items()}
    wall = {name: Spread.of([answer["wall"] for answer in answers]) for name, answers in takes.items()}
    table = Table(
        f"{_GPUS} GPUs with 20 processes each, everything there is, {ticks} samples of each in turn, milliseconds:",
        ("side", "CPU, mean", "CPU, median and middle half", "wall", "processes listed", "described"),
    )
    for name, label in (("gpulse", "a gpulse frame"), ("nvitop", "nvitop.take_snapshots() and its host")):
        last = takes[name][-1]
        table.rows.append(
            (
                label,
                f"{_mean(cpu[name]) * 1000:.1f}",
                Spread.of(cpu[name]).text(1000, 1),
                wall[name].text(1000, 1),
                str(last["listed"]),
                str(last["known"]),
            )
        )
    cpu_ratio = _mean(cpu["gpulse"]) / _mean(cpu["nvitop"])
    wall_ratio = wall["gpulse"].median / wall["nvitop"].median
    report.targets += [
        Target(
            "everything, 20 processes a GPU: CPU, of nvitop's API",
            f"{cpu_ratio:.3f} x",
            f"at most {_MOST_CPU_OF_NVITOP} x",
            cpu_ratio <= _MOST_CPU_OF_NVITOP,
        ),
        Target(
            "everything, 20 processes a GPU: wall, of nvitop's API",
            f"{wall_ratio:.3f} x",
            f"at most {_MOST_WALL_OF_NVITOP} x",
            wall_ratio <= _MOST_WALL_OF_NVITOP,
        ),
    ]
    report.tables.append(table)
    report.notes.append(
        "CPU is counted from one sample's begin to the next one's, so that what gpulse reads in the background "
        "is counted too; wall is until the frame is there. A frame holds the newest of what is read once a second. "
        "The fake driver sleeps where a real one spins, on both sides. The watch for Xid errors is off on our side, "
        "because the fake driver polls for them."
    )


def _in_counter_phase(sides: Mapping[str, Child], ticks: int) -> dict[str, list[dict[str, Any]]]:
    """One sample of each side a second, half a second apart; one more at the end closes the last account."""
    takes: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
    due = time.monotonic()
    for _ in range(ticks + 1):
        for name, side in sides.items():
            time.sleep(max(0.0, due - time.monotonic()))
            takes[name].append(side.ask("go"))
            due = max(due + 1 / len(sides), time.monotonic() + 0.1)
    return takes


def _cpu_each(answers: list[dict[str, Any]]) -> list[float]:
    return [later["cpu"] - earlier["cpu"] for earlier, later in pairwise(answers)]


def _mean(takes: list[float]) -> float:
    return sum(takes) / len(takes)


def _calls_table(calls: Mapping[str, Mapping[str, int]]) -> Table:
    table = Table("The NVML calls that made it up:", ("function", "gpulse", "bare loop"))
    for function in sorted(calls["gpulse"].keys() | calls["bare"].keys()):
        table.rows.append((function, *(str(calls[side].get(function, 0)) for side in ("gpulse", "bare"))))
    return table


if __name__ == "__main__":
    given = measure.parser(NAME, __doc__, {"seconds": 62}).parse_args()
    measure.publish(run(quick=given.quick, seconds=given.seconds), write=given.write)
