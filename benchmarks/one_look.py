"""One look, from the shell's point of view: `gpulse` beside `nvitop -1` and `gpustat`."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

from benchmarks import measure
from benchmarks.fake_machine import fake_machine
from benchmarks.measure import Report, Spread, Table, Target

NAME = "one_look"
_GPM_SECONDS = 0.1
"""The shortest time between two GPM samples, which the others do not read."""
_MOST_OF_NVITOP = 0.7
_MOST_OF_GPUSTAT = 0.3
_SETTINGS = ((8, 0), (8, 20), (64, 0), (64, 20))


def run(*, quick: bool, rounds: int = 15) -> Report:
    """Take the times, everybody in turn."""
    report = Report(NAME, "One look: the whole command")
    table = Table(
        "Milliseconds, median and middle half; CPU is the least of all runs:",
        ("GPUs x processes each", "command", "wall", "CPU"),
    )
    folder = Path(sys.executable).parent
    commands = {
        "gpulse": [str(folder / "gpulse")],
        "nvitop -1": [str(folder / "nvitop"), "-1"],
        "gpustat": [str(folder / "gpustat")],
    }
    for gpus, processes in _SETTINGS[:2] if quick else _SETTINGS:
        # The others take seconds for 64 GPUs: fewer rounds say as much there.
        turns = 3 if quick else rounds if gpus == 8 else max(3, rounds // 2)
        with fake_machine(gpus, processes) as machine:
            contenders = {
                name: partial(measure.run_command, command, machine.environment)
                for name, command in commands.items()
            }
            measure.in_turn(1, contenders)
            takes = measure.in_turn(turns, contenders)
        walls = {name: Spread.of([cost.wall for cost in costs]) for name, costs in takes.items()}
        setting = f"{gpus} x {processes}"
        for name, costs in takes.items():
            least = min(cost.cpu for cost in costs)
            table.rows.append((setting, name, walls[name].text(1000, 0), f"{least * 1000:.0f}"))
        ours = walls["gpulse"].median
        for name, most in (("nvitop -1", _MOST_OF_NVITOP), ("gpustat", _MOST_OF_GPUSTAT)):
            whole, rest = ours / walls[name].median, (ours - _GPM_SECONDS) / walls[name].median
            report.targets.append(
                Target(
                    f"{setting}: gpulse without GPM's 100 ms, of {name}",
                    f"{rest:.2f} x (with them {whole:.2f} x)",
                    f"at most {most} x",
                    rest <= most,
                )
            )
    report.tables.append(table)
    report.notes.append(
        "All three run from bytecode, write to a file and see the same fake driver with an H200's latencies. "
        "Only gpulse reads GPM, which needs 100 ms between two samples; the target is for the rest."
    )
    return report


if __name__ == "__main__":
    given = measure.parser(NAME, __doc__, {"rounds": 15}).parse_args()
    measure.publish(run(quick=given.quick, rounds=given.rounds), write=given.write)
