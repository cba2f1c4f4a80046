"""One GPU whose every call takes two seconds: how late the frames of the others are."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from benchmarks import measure
from benchmarks.fake_machine import Machine, fake_machine
from benchmarks.measure import Child, Report, Spread, Table, Target

NAME = "sick_gpu"
_INTERVAL = 0.5
_SICK = 3
_GPUS = 8


def run(*, quick: bool, seconds: float = 15.0, turns: int = 3) -> Report:
    """Let the GPU fall ill and recover a few times while one sampler watches."""
    report = Report(NAME, "A sick GPU among healthy ones")
    frames = round((4.0 if quick else seconds) / _INTERVAL)
    healthy: list[dict[str, Any]] = []
    sick: list[dict[str, Any]] = []
    with (
        fake_machine(_GPUS, 1) as machine,
        measure.child("sampler", [str(_INTERVAL), "gpm", "0", "frames"], machine.environment) as sampler,
    ):
        sampler.hear()  # the first frame waits for everything once, on purpose
        for _ in range(1 if quick else turns):
            healthy += [sampler.hear() for _ in range(frames)]
            sick += _while_sick(machine, sampler, frames)
            # Calls that were out come back within two seconds; the frames of that time belong to no phase.
            for _ in range(round(4 / _INTERVAL)):
                sampler.hear()
    with fake_machine(_GPUS, 1) as machine:
        machine.fake.delay("*", _SICK, 2.0)
        with measure.child("sampler", [str(_INTERVAL), "gpm", "0", "frames"], machine.environment) as sampler:
            first = sampler.hear()
    table = Table(
        f"A frame every {_INTERVAL} s, how long after its time on the grid it was there, in milliseconds:",
        ("phase", "frames", "median", "middle half", "worst", "ticks left out", "others' readings missing"),
    )
    others = set(range(_GPUS)) - {_SICK}
    missing = left_out = 0
    for phase, taken in (("healthy", healthy), (f"GPU {_SICK} sick", sick)):
        spread = Spread.of([frame["late"] * 1000 for frame in taken])
        missing = sum(len(others - set(frame["answering"])) for frame in taken)
        left_out = sum(
            max(0, later["tick"] - earlier["tick"] - 1)
            for earlier, later in pairwise(taken)
            if later["tick"] - earlier["tick"] < 5  # more is the pause between two phases
        )
        table.rows.append(
            (
                phase,
                str(len(taken)),
                f"{spread.median:.1f}",
                f"{spread.low:.1f} to {spread.high:.1f}",
                f"{spread.most:.1f}",
                str(left_out),
                str(missing),
            )
        )
    worst = max(frame["late"] for frame in sick)
    worst_healthy = max(frame["late"] for frame in healthy)
    report.targets += [
        Target(
            "worst delay of a frame while one GPU is sick",
            f"{worst * 1000:.0f} ms ({worst_healthy * 1000:.0f} ms healthy)",
            f"less than one tick ({_INTERVAL * 1000:.0f} ms)",
            worst < _INTERVAL,
        ),
        Target("ticks left out meanwhile", str(left_out), "0", left_out == 0),
        Target("readings of the other GPUs missing meanwhile", str(missing), "0", missing == 0),
    ]
    report.tables.append(table)
    report.notes.append(
        f"A sampler that starts while GPU {_SICK} is sick has its first frame after {first['tick'] * _INTERVAL + first['late']:.1f} s, "
        f"with {len(first['answering'])} GPUs answering."
    )
    return report


def _while_sick(machine: Machine, sampler: Child, frames: int) -> list[dict[str, Any]]:
    fault = machine.fake.delay("*", _SICK, 2.0)
    taken = [sampler.hear() for _ in range(frames)]
    machine.fake.clear(fault)
    return taken


if __name__ == "__main__":
    given = measure.parser(NAME, __doc__, {"seconds": 15.0}).parse_args()
    measure.publish(run(quick=given.quick, seconds=given.seconds), write=given.write)
