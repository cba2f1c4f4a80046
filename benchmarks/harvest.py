"""How soon `gpulse harvest` gives a GPU back, and what it costs while there is nothing to do."""

from __future__ import annotations

import json
import os
import random
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from benchmarks import measure
from benchmarks.fake_machine import Machine, fake_machine
from benchmarks.measure import Report, Spread, Table, Target

NAME = "harvest"
_OBEYS = "trap 'exit 0' TERM; sleep 600 & sleep 600 & wait"
_IGNORES = "trap '' TERM; sleep 600 & sleep 600 & while :; do wait; done"
_FAMILY = 3
"""The shell and its two children."""
_GRACE_SECONDS = 0.5
_POLL_SECONDS = 1.0
_QUICK_SECONDS = 0.5
"""Between looks, by which a GPU is found free again; who opens it is seen without them."""
_TICKS = os.sysconf("SC_CLK_TCK")


class Size(NamedTuple):
    """How much of everything."""

    times: int = 100
    processes: int = 2000
    gpus: int = 8
    seconds: float = 120.0
    interval: float = 10.0


_FULL = Size()
_QUICK = Size(times=5, processes=200, gpus=2, seconds=10.0, interval=1.0)


class Harvest:
    """A harvest on fake device files, and what it runs."""

    def __init__(
        self,
        machine: Machine,
        folder: Path,
        gpus: int,
        programs: str,
        *,
        interval: float,
        polling: bool = False,
    ) -> None:
        self.folder = folder
        self.dev = folder / "dev"
        (self.dev / "shm").mkdir(parents=True)
        (self.dev / "pts").mkdir()
        for number in range(gpus):
            (self.dev / f"nvidia{number}").touch()
        config = folder / "harvest.toml"
        config.write_text(
            f"[harvest]\ninterval_seconds = {interval}\n[idle]\nidle_seconds = 0\ncooldown_seconds = 0\n"
            f"[people]\nenabled = true\n{programs}"
        )
        module = "benchmarks.children.harvest_polling" if polling else "gpulse"
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", module, "harvest", "-c", str(config)),
                *("--dev-dir", str(self.dev), "--state-dir", str(folder / "state")),
            ],
            env={**machine.environment, "HOME": str(folder)},
            cwd=measure.ROOT,
            stdout=subprocess.DEVNULL,
            stderr=(folder / "said").open("wb"),
        )

    def status(self) -> dict[str, object]:
        """What it says of itself."""
        try:
            (path,) = (self.dev / "shm").glob("gpulse-harvest-*.json")
            found: dict[str, object] = json.loads(path.read_text())
        except (OSError, ValueError):
            return {}
        return found

    def running(self, programs: int) -> list[int]:
        """Wait until so many programs run; their processes."""
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            runs = self.status().get("runs") or []
            assert isinstance(runs, list)
            found = [run["process"]["pid"] for run in runs if run["state"] == "running"]
            # The file may be that of a moment ago: a process that is gone is not meant.
            if len(found) == programs and all(map(_is_there, found)):
                return found
            time.sleep(0.005)
        said = (self.folder / "said").read_text()
        raise RuntimeError(f"harvest did not start its programs:\n{said}")

    def close(self) -> None:
        """End it."""
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(30)


@contextmanager
def _harvest(
    gpus: int, programs: str, *, interval: float, polling: bool = False, processes: int = 0
) -> Iterator[Harvest]:
    with ExitStack() as stack:
        machine = stack.enter_context(fake_machine(gpus))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gpulse-bench-")))
        for _ in range(processes):
            stack.callback(
                _bury, os.posix_spawn(shutil.which("sleep") or "/bin/sleep", ["sleep", "7200"], os.environ)
            )
        harvest = Harvest(machine, folder, gpus, programs, interval=interval, polling=polling)
        stack.callback(harvest.close)
        yield harvest


def _is_there(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def _bury(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def _program(script: str, gpus: str = "0", grace: float = _GRACE_SECONDS) -> str:
    path = shutil.which("sh") or "/bin/sh"
    return (
        f'[[program]]\nname = "work"\ncommand = {json.dumps([path, "-c", script])}\ngpus = {gpus}\n'
        f"grace_seconds = {grace}\n"
    )


def _family(leader: int) -> list[int]:
    """A process group, one descriptor a process."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdecimal():
            try:
                if os.getpgid(int(name)) == leader:
                    found.append(os.pidfd_open(int(name)))
            except ProcessLookupError:
                continue
    return found


def _given_back(harvest: Harvest, times: int) -> list[float]:
    """Seconds from an open of the GPU until the whole process group is gone, so many times."""
    takes = []
    for _ in range(times):
        (leader,) = harvest.running(1)
        deadline = time.monotonic() + 5
        while len(family := _family(leader)) < _FAMILY:
            for descriptor in family:
                os.close(descriptor)
            if time.monotonic() > deadline:
                raise RuntimeError("the program did not start its children")
            time.sleep(0.005)
        time.sleep(random.uniform(0.05, 0.3))
        begun = time.perf_counter()
        device = os.open(harvest.dev / "nvidia0", os.O_RDWR)
        try:
            for descriptor in family:
                if not select.select([descriptor], [], [], 30)[0]:
                    raise RuntimeError("a program was not given up")
            takes.append(time.perf_counter() - begun)
        finally:
            os.close(device)
            for descriptor in family:
                os.close(descriptor)
    return takes


def _reported(
    report: Report, what: str, takes: Sequence[float], targets: Sequence[tuple[str, float, float]]
) -> None:
    spread = Spread.of(takes)
    for name, value, most in targets:
        report.targets.append(
            Target(f"{what}, {name}", f"{value * 1000:.0f} ms", f"{most * 1000:.0f} ms", value < most)
        )
    ordered = sorted(takes)
    row = [spread.median, ordered[int(0.9 * (len(takes) - 1))], spread.most]
    table = Table(f"{what}, {len(takes)} times:", ("", "median", "90 %", "worst"))
    table.rows.append(
        ("from the open to the end of the process group", *(f"{value * 1000:.1f} ms" for value in row))
    )
    report.tables.append(table)


def obey(report: Report, size: Size) -> None:
    """A program and its two children that end at TERM."""
    with _harvest(1, _program(_OBEYS), interval=_QUICK_SECONDS) as harvest:
        takes = _given_back(harvest, size.times)
    spread = Spread.of(takes)
    _reported(
        report, "A program that obeys", takes, (("median", spread.median, 0.3), ("worst", spread.most, 1.0))
    )


def ignore(report: Report, size: Size) -> None:
    """A program and its two children that ignore TERM."""
    with _harvest(1, _program(_IGNORES), interval=_QUICK_SECONDS) as harvest:
        takes = _given_back(harvest, size.times)
    most = Spread.of(takes).most
    _reported(
        report,
        f"A program that ignores TERM, with {_GRACE_SECONDS * 1000:.0f} ms of grace",
        takes,
        (("worst", most, _GRACE_SECONDS + 0.2),),
    )


def poll(report: Report, size: Size) -> None:
    """Without inotify."""
    with _harvest(1, _program(_OBEYS), interval=_POLL_SECONDS, polling=True) as harvest:
        takes = _given_back(harvest, size.times)
    most = Spread.of(takes).most
    what = f"Without inotify, a look every {_POLL_SECONDS:g} s"
    _reported(report, what, takes, (("worst", most, _POLL_SECONDS + 1.0),))


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def idle(report: Report, size: Size) -> None:
    """Many GPUs and processes, and nobody comes."""
    program = _program("exec sleep 7200", '"each"')
    with _harvest(size.gpus, program, interval=size.interval, processes=size.processes) as harvest:
        harvest.running(size.gpus)
        supervisors = [run["keeper"]["pid"] for run in harvest.status()["runs"]]  # type: ignore[attr-defined]
        everybody = [harvest.process.pid, *supervisors]
        time.sleep(min(5.0, size.seconds / 2))
        before, begun = sum(map(_cpu_seconds, everybody)), time.perf_counter()
        time.sleep(size.seconds)
        cost = (sum(map(_cpu_seconds, everybody)) - before) / (time.perf_counter() - begun)
        memory = sum(_memory(pid) for pid in everybody)
    what = f"{size.gpus} GPUs, {size.processes} processes, a look every {size.interval:g} s, a program on each GPU"
    report.targets.append(Target(f"CPU: {what}", f"{cost:.2%} of a core", "0.30 %", cost < 0.003))
    table = Table(f"{what}, {size.seconds:g} s:", ("", "harvest and its supervisors"))
    table.rows.append(("CPU", f"{cost:.3%} of a core"))
    table.rows.append(("memory of their own", f"{memory / 1e6:.0f} MB"))
    report.tables.append(table)


def _memory(pid: int) -> int:
    """What a process does not share with others."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return 1024 * sum(int(line.split()[1]) for line in text.splitlines() if line.startswith("Private_"))


class _Part(NamedTuple):
    title: str
    work: Callable[[Report, Size], None]


_PARTS = {
    "obey": _Part("A GPU is given back", obey),
    "ignore": _Part("A GPU is given back by a program that does not want to", ignore),
    "poll": _Part("A GPU is given back without inotify", poll),
    "idle": _Part("What a harvest costs while nobody comes", idle),
}


def main() -> None:
    """`python -m benchmarks.harvest --only obey,idle`."""
    parser = measure.parser(NAME, __doc__)
    measure.add_only(parser, _PARTS)
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    size = _QUICK if given.quick else _FULL
    for name in given.only:
        report = Report(f"{NAME}_{name}", _PARTS[name].title, module=NAME)
        _PARTS[name].work(report, size)
        measure.publish(report, write=given.write)


if __name__ == "__main__":
    main()
