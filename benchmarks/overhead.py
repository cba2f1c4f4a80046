"""What a sampler costs that runs for a long time: CPU and memory of its process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from benchmarks import measure
from benchmarks.measure import Report, Table, Target

NAME = "overhead"
_MIB = 1 << 20
_MOST_CPU_PERCENT = 0.5
_MOST_CPU_PERCENT_FAST = 4.0
_MOST_RESIDENT_MB = 45.0
_MOST_GROWTH_MB = 1.0
_WARM_SECONDS = 60.0


class _Setting(NamedTuple):
    gpus: int
    """0 for those that this machine really has."""
    processes: int
    interval: float
    gpm: bool
    most_percent: float | None

    @property
    def words(self) -> str:
        gpm = "" if self.gpm else " without GPM"
        where = f"{self.gpus} GPUs x {self.processes} processes" if self.gpus else "this machine's GPUs"
        return f"{where}, {1 / self.interval:g} Hz{gpm}"


_SETTINGS = (
    _Setting(8, 1, 1.0, gpm=True, most_percent=_MOST_CPU_PERCENT),
    _Setting(8, 1, 0.1, gpm=False, most_percent=_MOST_CPU_PERCENT_FAST),
    _Setting(64, 20, 1.0, gpm=True, most_percent=None),
)
_REAL_SETTINGS = (
    _Setting(0, 0, 1.0, gpm=True, most_percent=_MOST_CPU_PERCENT),
    _Setting(0, 0, 0.1, gpm=False, most_percent=_MOST_CPU_PERCENT_FAST),
)


def run(*, quick: bool, seconds: float = 60.0, real: bool = False) -> Report:
    """Sample for so many seconds in each setting, on fake GPUs or on those that this machine has."""
    report = Report(
        f"{NAME}_real" if real else NAME, "A sampler that runs on and on" + (" on a real GPU" if real else "")
    )
    length = 12.0 if quick else seconds
    table = Table(
        f"{length:.0f} s each, or a little more:",
        (
            "setting",
            "frames",
            "CPU of a core",
            "CPU a frame",
            "Xid watch besides",
            "RSS at start",
            "RSS at end",
            "growth once warm",
        ),
    )
    for setting in _REAL_SETTINGS if real else _SETTINGS:
        reports = _sample(setting, length)
        first, last = reports[0], reports[-1]
        warm_at = min(_WARM_SECONDS, length / 2)
        warm = next((r for r in reports if r["seconds"] >= warm_at), last)
        cpu = last["cpu"] - (0 if real else last["watch"])
        percent = 100 * cpu / last["seconds"]
        growth = (last["resident"] - warm["resident"]) / _MIB
        resident = last["resident"] / _MIB
        table.rows.append(
            (
                setting.words,
                str(last["frames"]),
                f"{percent:.2f} %",
                f"{1000 * cpu / last['frames']:.1f} ms",
                "counted in" if real else f"{100 * last['watch'] / last['seconds']:.2f} %",
                f"{first['resident'] / _MIB:.1f} MB",
                f"{resident:.1f} MB",
                f"{growth:+.2f} MB",
            )
        )
        if setting.most_percent is not None:
            report.targets += [
                Target(
                    f"{setting.words}: CPU",
                    f"{percent:.2f} % of a core",
                    f"at most {setting.most_percent} %",
                    percent <= setting.most_percent,
                ),
                Target(
                    f"{setting.words}: RSS",
                    f"{resident:.1f} MB",
                    f"at most {_MOST_RESIDENT_MB:g} MB",
                    resident <= _MOST_RESIDENT_MB,
                ),
                Target(
                    f"{setting.words}: growth after {warm_at:.0f} s",
                    f"{growth:+.2f} MB",
                    f"less than {_MOST_GROWTH_MB:g} MB after the first minute",
                    growth < _MOST_GROWTH_MB if length > 2 * _WARM_SECONDS else None,
                ),
            ]
    report.tables.append(table)
    report.notes.append(
        "CPU is that of all threads from the third frame on. "
        + (
            "The driver is the real one, which spins while it waits for most answers: that is counted."
            if real
            else "The fake driver waits asleep where a real one waits for hardware or spins (see gpm_cost), and spins "
            "where it waits for less than 60 µs. Its wait for Xid errors polls every 2 ms, where a real driver blocks: "
            "the thread in that wait is listed apart and not counted. The 64-GPU setting has no target."
        )
    )
    return report


def _sample(setting: _Setting, seconds: float) -> list[dict[str, Any]]:
    arguments = [str(setting.interval), "gpm" if setting.gpm else "no-gpm", "0", "quiet"]
    reports: list[dict[str, Any]] = []
    with (
        _environment(setting) as environment,
        measure.child("sampler", arguments, environment) as sampler,
    ):
        while not reports or reports[-1]["seconds"] < seconds:
            reports.append(sampler.hear())
    return reports


@contextmanager
def _environment(setting: _Setting) -> Iterator[dict[str, str]]:
    if setting.gpus == 0:
        yield measure.child_environment()
        return
    from benchmarks.fake_machine import fake_machine  # noqa: PLC0415  needs a C compiler, which GPU machines may lack

    with fake_machine(setting.gpus, setting.processes) as machine:
        yield machine.environment


if __name__ == "__main__":
    parser = measure.parser(NAME, __doc__, {"seconds": 60.0})
    parser.add_argument("--real", action="store_true", help="on the GPUs of this machine")
    given = parser.parse_args()
    measure.publish(run(quick=given.quick, seconds=given.seconds, real=given.real), write=given.write)
