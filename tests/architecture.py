"""Size of the code in src: the largest files, classes and functions, and the imports inside functions.

`make architecture` prints the report and writes the values to tests/architecture.toml. A test fails when a value gets worse
than the committed one.
"""

from __future__ import annotations

import ast
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
COMMITTED = Path(__file__).with_suffix(".toml")
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_SHOWN = 5
"""How many of each kind the report lists."""
_STEPS = {"modules": 5, "lines": 500}
"""Committed values that are rounded up to a multiple, so that a small change does not have to touch them."""
_HEADER = """\
# Sizes of the code in src that must not get worse. Written by `make architecture`; commit it with the change that needs it.
"""


class Part(NamedTuple):
    """A file, a class or a function."""

    lines: int
    place: str
    """`src/gpulse/errors.py:12 GpulseError`."""


class Measure(NamedTuple):
    """One value of the report, with the places that make it up, largest first."""

    value: int
    places: tuple[str, ...] = ()


def measure(source: Path) -> dict[str, Measure]:
    """Measure all Python files under a folder."""
    files, classes, functions, deferred = [], [], [], Counter[str]()
    for path in sorted(source.rglob("*.py")):
        text, name = path.read_text(encoding="utf-8"), str(path.relative_to(source.parent))
        files.append(Part(len(text.splitlines()), name))
        for node, is_deferred in _statements(ast.parse(text)):
            if isinstance(node, ast.ClassDef):
                classes.append(_part(name, node))
            elif isinstance(node, _FUNCTIONS):
                functions.append(_part(name, node))
            elif is_deferred and isinstance(node, ast.Import | ast.ImportFrom):
                deferred[name] += 1
    return {
        "modules": Measure(len(files)),
        "lines": Measure(sum(part.lines for part in files)),
        "largest_file": _measure(files),
        "largest_class": _measure(classes),
        "largest_function": _measure(functions),
        "deferred_imports": Measure(
            deferred.total(), _largest(Part(count, name) for name, count in deferred.items())
        ),
    }


def _part(file: str, node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> Part:
    return Part((node.end_lineno or node.lineno) - node.lineno + 1, f"{file}:{node.lineno} {node.name}")


def _statements(node: ast.AST, *, deferred: bool = False) -> Iterator[tuple[ast.stmt, bool]]:
    """Yield all statements, and whether each is inside a function."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt):
            yield child, deferred
        if isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):
            yield from _statements(child, deferred=deferred or isinstance(child, _FUNCTIONS))


def _measure(parts: Iterable[Part]) -> Measure:
    parts = list(parts)
    return Measure(max((part.lines for part in parts), default=0), _largest(parts))


def _largest(parts: Iterable[Part]) -> tuple[str, ...]:
    shown = sorted(parts, key=lambda part: (-part.lines, part.place))[:_SHOWN]
    return tuple(f"{part.lines:6} {part.place}" for part in shown)


def report(measures: Mapping[str, Measure]) -> str:
    """Return the measures as text."""
    lines = []
    for name, found in measures.items():
        lines += [f"{name.replace('_', ' ')}: {found.value}", *found.places]
    return "\n".join(lines)


def worse(measures: Mapping[str, Measure], committed: Mapping[str, int]) -> list[str]:
    """Return a message for each value that is larger than the committed one."""
    return [
        "\n".join(
            [f"{name.replace('_', ' ')}: {found.value}, committed: {committed.get(name, 0)}", *found.places]
        )
        for name, found in measures.items()
        if found.value > committed.get(name, 0)
    ]


def committed_values(file: Path = COMMITTED) -> dict[str, int]:
    """Read the committed values."""
    return tomllib.loads(file.read_text(encoding="utf-8"))


def commit_values(measures: Mapping[str, Measure], file: Path = COMMITTED) -> None:
    """Write the values of today."""
    lines = [
        f"{name} = {-(-found.value // (step := _STEPS.get(name, 1))) * step}\n"
        for name, found in measures.items()
    ]
    file.write_text(_HEADER + "".join(lines), encoding="utf-8")


if __name__ == "__main__":
    today = measure(ROOT / "src")
    print(report(today))
    commit_values(today)
