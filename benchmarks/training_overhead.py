"""What a sampler takes away from a training loop on a real GPU: its pace with and without one beside it."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from importlib.util import find_spec

from benchmarks import measure
from benchmarks.gpm_cost import missing_gpu
from benchmarks.measure import Child, Report, Spread, Table, Target

NAME = "training_overhead"
_MOST_PERCENT = 0.5
_ARMS: dict[str, list[str] | None] = {
    "without": None,
    "1 Hz": ["1.0", "gpm", "0", "quiet"],
    "10 Hz": ["0.1", "gpm", "0", "quiet"],
}
"""The arguments of the sampler beside the training."""
_WORDS = {"light": "many small kernels", "heavy": "large matrices"}


def missing() -> str | None:
    """Why this cannot be measured here, None when it can."""
    if find_spec("torch") is None:
        return "torch is not installed here; this one needs it and a real NVIDIA GPU"
    return missing_gpu()


def run(*, quick: bool, rounds: int = 9, seconds: float = 2.5) -> Report:
    """Train in short windows, each with another sampler beside it, round after round."""
    report = Report(NAME, "A training loop with a sampler beside it")
    for kind in ("light", "heavy"):
        with measure.child("training", [kind], measure.child_environment()) as training:
            ready = training.hear()
            words = f"{kind} ({_WORDS[kind]}, {ready['ready']:.1f} steps/s)"
            print(f"{words} on {ready['device']}: {ready['passes']} passes a step", flush=True)
            training.ask(str(seconds))  # clocks and temperature settle
            paces: dict[str, list[float]] = {arm: [] for arm in _ARMS}
            for number in range(2 if quick else rounds):
                names = list(_ARMS)
                shift = number % len(names)
                for arm in names[shift:] + names[:shift]:
                    paces[arm].append(_window(training, arm, seconds))
                print(
                    f"{kind} round {number}: " + ", ".join(f"{a} {p[-1]:.3f}" for a, p in paces.items()),
                    flush=True,
                )
        _describe(report, kind, words, paces)
    report.notes.append(
        "Windows with the arms in turn; a round's difference is taken against the window without a sampler "
        "of the same round, so that drifting clocks cancel. The sampler is a process of its own and reads everything "
        "that gpulse reads by default, GPM once a second."
    )
    return report


def _window(training: Child, arm: str, seconds: float) -> float:
    arguments = _ARMS[arm]
    sampler = (
        nullcontext(None)
        if arguments is None
        else measure.child("sampler", arguments, measure.child_environment())
    )
    with sampler as beside:
        if beside is not None:
            beside.hear()  # its first report comes once it has settled
        return float(training.ask(str(seconds))["pace"])


def _describe(report: Report, kind: str, words: str, paces: dict[str, list[float]]) -> None:
    table = Table(f"{words}:", ("sampler", "windows", "steps/s", "slower than without, %"))
    for arm, taken in paces.items():
        losses = [
            100 * (1 - with_it / without) for with_it, without in zip(taken, paces["without"], strict=True)
        ]
        loss = Spread.of(losses)
        shown = "" if arm == "without" else loss.text(1, 2)
        table.rows.append((arm, str(len(taken)), Spread.of(taken).text(1, 3), shown))
        if arm != "without":
            report.targets.append(
                Target(
                    f"{kind}: {arm} sampler, steps/s lost",
                    f"{loss.text(1, 2)} %",
                    f"at most {_MOST_PERCENT} %",
                    loss.median <= _MOST_PERCENT,
                )
            )
    report.tables.append(table)


if __name__ == "__main__":
    given = measure.parser(NAME, __doc__, {"rounds": 9, "seconds": 2.5}).parse_args()
    if (reason := missing()) is not None:
        sys.exit(f"benchmarks.{NAME}: {reason}")
    measure.publish(run(quick=given.quick, rounds=given.rounds, seconds=given.seconds), write=given.write)
