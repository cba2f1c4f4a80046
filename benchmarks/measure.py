"""What all benchmarks share: fair turns, the cost of a child, tables, and the file of results."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeVar

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).with_name("RESULTS.md")
T = TypeVar("T")


class Spread(NamedTuple):
    """What many takes of one figure say."""

    median: float
    low: float
    """The lower quartile."""
    high: float
    """The upper quartile."""
    least: float
    most: float

    @classmethod
    def of(cls, takes: Sequence[float]) -> Spread:
        """The spread of at least one take."""
        ordered = sorted(takes)
        low, median, high = (_quantile(ordered, share) for share in (0.25, 0.5, 0.75))
        return cls(median, low, high, ordered[0], ordered[-1])

    def text(self, scale: float = 1.0, digits: int = 1, unit: str = "") -> str:
        """The median, and the middle half of the takes."""
        median, low, high = (f"{value * scale:.{digits}f}" for value in (self.median, self.low, self.high))
        return f"{median}{unit} ({low} to {high})"


def _quantile(ordered: Sequence[float], share: float) -> float:
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


class Target(NamedTuple):
    """One promise and how it stands."""

    what: str
    figure: str
    target: str
    met: bool | None
    """None when this run cannot tell."""


@dataclass
class Table:
    """Lines under a heading; the first column is text, the others are figures."""

    title: str
    header: Sequence[str]
    rows: list[Sequence[str]] = field(default_factory=list)

    def text(self) -> str:
        """As Markdown whose columns line up, for people and for the file alike."""
        lines = [list(self.header), *(list(row) for row in self.rows)]
        widths = [max(len(line[column]) for line in lines) for column in range(len(self.header))]
        rule = [
            "-" * width if column == 0 else "-" * (max(2, width) - 1) + ":"
            for column, width in enumerate(widths)
        ]
        lines.insert(1, rule)
        drawn = (
            "| "
            + " | ".join(
                cell.ljust(width) if column == 0 else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(line, widths, strict=True))
            )
            + " |"
            for line in lines
        )
        return f"{self.title}\n\n" + "\n".join(drawn)


@dataclass
class Report:
    """What one benchmark found."""

    name: str
    """Of its module."""
    title: str
    targets: list[Target] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    module: str = ""
    """The module that makes it, where that has several reports."""

    def text(self) -> str:
        """The whole report as Markdown."""
        parts: list[str] = []
        if self.targets:
            words = {True: "yes", False: "**no**", None: "not told"}
            rows: list[Sequence[str]] = [(t.what, t.figure, t.target, words[t.met]) for t in self.targets]
            parts.append(Table("Targets:", ("what", "figure", "target", "met"), rows).text())
        parts.extend(table.text() for table in self.tables)
        parts.extend(self.notes)
        return "\n\n".join(parts)


def parser(
    name: str, description: str | None, more: Mapping[str, float] | None = None
) -> argparse.ArgumentParser:
    """The command line of one benchmark; `more` are options with a number each."""
    made = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=description)
    made.add_argument("--quick", action="store_true", help="a short pass, to see that it works")
    made.add_argument("--write", action="store_true", help=f"put the section into benchmarks/{RESULTS.name}")
    for option, default in (more or {}).items():
        made.add_argument(f"--{option}", type=type(default), default=default, help="default: %(default)s")
    return made


def add_only(made: argparse.ArgumentParser, parts: Mapping[str, object]) -> None:
    """Give a benchmark of several parts the option to run some of them."""

    def chosen(text: str) -> list[str]:
        names = text.split(",")
        if unknown := set(names) - parts.keys():
            raise argparse.ArgumentTypeError(
                f"there is no {', '.join(unknown)}; there are {', '.join(parts)}"
            )
        return names

    made.add_argument(
        "--only", type=chosen, default=list(parts), metavar="PART,...", help=f"of {', '.join(parts)}"
    )


def publish(report: Report, *, write: bool) -> None:
    """Print a report and, when asked, keep it as its section of the file of results."""
    body = f"## {report.title}\n\n{report.text()}\n"
    print(f"\n{body}", flush=True)
    if write:
        module = report.module or report.name.removesuffix("_real")
        command = " ".join(["python", "-m", f"benchmarks.{module}", *sys.argv[1:]])
        day = time.strftime("%Y-%m-%d")
        made = f"Made on {day} by `{command}` on {machine_in_words()}.\n"
        write_section(report.name, body + "\n" + made)


def write_section(name: str, body: str) -> None:
    """Put a section between its markers, where it stood or at the end."""
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    section = f"{begin}\n{body}{end}\n"
    known = RESULTS.read_text() if RESULTS.exists() else "# Results\n"
    pattern = re.compile(re.escape(begin) + r".*?" + re.escape(end) + r"\n", re.DOTALL)
    if pattern.search(known):
        RESULTS.write_text(pattern.sub(lambda _: section, known))
    else:
        RESULTS.write_text(f"{known}\n{section}")


def machine_in_words() -> str:
    """Cores, CPU and Python; no names of hosts."""
    model = "unknown CPU"
    with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
        for line in file:
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    cores = len(os.sched_getaffinity(0))
    return f"{cores} cores of {model}, Python {platform.python_version()}"


def child_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a child: everybody runs from bytecode, and gpulse may lie in src uninstalled."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    paths = [str(ROOT / "src"), *environment.get("PYTHONPATH", "").split(os.pathsep)]
    environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    return {**environment, **(extra or {})}


def in_turn(rounds: int, contenders: Mapping[str, Callable[[], T]]) -> dict[str, list[T]]:
    """Let everybody run once a round, beginning with another one each time."""
    takes: dict[str, list[T]] = {name: [] for name in contenders}
    names = list(contenders)
    for number in range(rounds):
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            takes[name].append(contenders[name]())
    return takes


class Cost(NamedTuple):
    """What one run of a command cost."""

    wall: float
    cpu: float


def run_command(command: Sequence[str], environment: Mapping[str, str]) -> Cost:
    """Run a command to its end and take the CPU time of all its threads and children.

    Raises:
        RuntimeError: It failed, or printed nothing.
    """
    with tempfile.TemporaryFile() as output:
        begun = time.perf_counter()
        child = subprocess.Popen(  # its end is waited for by wait4, which tells what it used
            command, env=dict(environment), stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )
        _, status, used = os.wait4(child.pid, 0)
        wall = time.perf_counter() - begun
        child.returncode = os.waitstatus_to_exitcode(status)
        if child.returncode != 0 or output.tell() == 0:
            output.seek(0)
            said = output.read().decode(errors="replace")
            raise RuntimeError(f"{' '.join(command)} ended with {child.returncode}: {said[-2000:]}")
    return Cost(wall, used.ru_utime + used.ru_stime)


class Child:
    """A program under `benchmarks.children` that is told what to do line by line and answers in JSON lines."""

    def __init__(self, module: str, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", f"benchmarks.children.{module}", *arguments],
            cwd=ROOT,
            env=dict(environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def tell(self, line: str) -> None:
        """Send one line."""
        stream = self._stream(self._process.stdin)
        stream.write(line + "\n")
        stream.flush()

    def hear(self) -> Any:
        """The next answer.

        Raises:
            RuntimeError: The program ended without one.
        """
        line = self._stream(self._process.stdout).readline()
        if not line:
            raise RuntimeError(f"{self._process.args!r} ended with {self._process.wait()}")
        return json.loads(line)

    def ask(self, line: str) -> Any:
        """Send one line and wait for the answer."""
        self.tell(line)
        return self.hear()

    def end(self) -> None:
        """Close its input, which ends it, and wait; one that stays is killed."""
        self._stream(self._process.stdin).close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._stream(self._process.stdout).close()

    def _stream(self, stream: IO[str] | None) -> IO[str]:
        if stream is None:
            raise RuntimeError("the child was started without pipes")
        return stream


@contextmanager
def child(module: str, arguments: Sequence[str], environment: Mapping[str, str]) -> Iterator[Child]:
    """A child for the length of a block."""
    started = Child(module, arguments, environment)
    try:
        yield started
    finally:
        started.end()
