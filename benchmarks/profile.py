"""What `gpulse.profile` takes from the program that uses it: a block, a loop of them, the thread beside it."""

from __future__ import annotations

from benchmarks import measure
from benchmarks.fake_machine import fake_machine
from benchmarks.measure import Report, Spread, Table, Target

NAME = "profile"
_MOST_SECONDS = 100e-6
_MOST_FIRST_SECONDS = 5e-3
_MOST_CORE = 0.05
_STEPS = 20_000


def run(*, quick: bool) -> Report:
    """Blocks, loops and rest, with one GPU and with eight."""
    report = Report(NAME, "Blocks of one's own code: `gpulse.profile`")
    blocks = Table(
        "Entering and leaving an empty block, µs:",
        ("GPUs", "first block", "later ones, median and middle half", "99 of 100 below", "longest"),
    )
    loops = Table(
        "What it costs to have it:",
        (
            "GPUs",
            "a step of a loop, µs",
            "with a block around it",
            "difference",
            "CPU of the thread, % of a core",
        ),
    )
    for gpus in (1, 8):
        _measure(report, blocks, loops, gpus, quick=quick)
    report.tables += [blocks, loops]
    report.notes.append(
        "The first block starts the thread that reads the GPUs, which loads the driver's binding beside it; importing is "
        "not counted. A step is some additions without a GPU, so that the thread and the loop want the same "
        "interpreter's lock; the loop's difference has everything in it, the thread's work for the blocks too. The fake "
        "driver has an H200's latencies and sleeps where a real one spins."
    )
    return report


def _measure(report: Report, blocks: Table, loops: Table, gpus: int, *, quick: bool) -> None:
    rounds, seconds = (1, 2.0) if quick else (5, 10.0)
    firsts: list[float] = []
    with fake_machine(gpus) as machine:
        for _ in range(2 * rounds):
            with measure.child("profiled", [], machine.environment) as program:
                firsts.append(program.hear()["first"])
        with measure.child("profiled", [], machine.environment) as program:
            firsts.append(program.hear()["first"])
            takes = program.ask(f"blocks {_STEPS}")
            paces = measure.in_turn(
                rounds,
                {
                    "bare": lambda: program.ask(f"bare {_STEPS}") / _STEPS,
                    "loop": lambda: program.ask(f"loop {_STEPS}") / _STEPS,
                },
            )
            busy = program.ask(f"rest {seconds}") - program.ask(f"sleep {seconds}")
    first, later = Spread.of(firsts), Spread.of(takes)
    p99 = sorted(takes)[int(0.99 * len(takes))]
    bare, loop = Spread.of(paces["bare"]), Spread.of(paces["loop"])
    blocks.rows.append(
        (str(gpus), first.text(1e6, 0), later.text(1e6, 2), f"{p99 * 1e6:.2f}", f"{later.most * 1e6:.0f}")
    )
    loops.rows.append(
        (
            str(gpus),
            bare.text(1e6, 2),
            loop.text(1e6, 2),
            f"{(loop.median - bare.median) * 1e6:.2f}",
            f"{busy * 100:.1f}",
        )
    )
    report.targets += [
        Target(
            f"a block, {gpus} GPUs: later ones, median",
            f"{later.median * 1e6:.2f} µs",
            f"under {_MOST_SECONDS * 1e6:.0f} µs",
            later.median < _MOST_SECONDS,
        ),
        Target(
            f"a block, {gpus} GPUs: all it adds to a step",
            f"{(loop.median - bare.median) * 1e6:.2f} µs",
            f"under {_MOST_SECONDS * 1e6:.0f} µs",
            loop.median - bare.median < _MOST_SECONDS,
        ),
        Target(
            f"the first block, {gpus} GPUs",
            f"{first.median * 1e6:.0f} µs",
            f"under {_MOST_FIRST_SECONDS * 1e6:.0f} µs",
            first.median < _MOST_FIRST_SECONDS,
        ),
        Target(
            f"the thread beside it, {gpus} GPUs",
            f"{busy * 100:.1f} % of a core",
            f"under {_MOST_CORE * 100:.0f} %",
            busy < _MOST_CORE,
        ),
    ]


if __name__ == "__main__":
    given = measure.parser(NAME, __doc__).parse_args()
    measure.publish(run(quick=given.quick), write=given.write)
