"""The code does not grow unnoticed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.architecture import ROOT, commit_values, committed_values, measure, report, worse

CODE = """\
import os


class Reader:
    def read(self) -> str:
        import json
        def parse() -> object:
            from json import loads
            return loads("1")
        return json.dumps(os.getcwd())
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A source folder with one module."""
    folder = tmp_path / "src"
    folder.mkdir()
    (folder / "reader.py").write_text(CODE, encoding="utf-8")
    return folder


def test_the_code_does_not_get_worse() -> None:
    """A larger value is accepted by whoever needs it, and seen by whoever reviews the change."""

    measures = measure(ROOT / "src")
    print(report(measures))

    problems = worse(measures, committed_values())

    assert not problems, "\n\n".join(
        [
            *problems,
            "Make it smaller, or accept it: run `make architecture` and commit tests/architecture.toml.",
        ]
    )


def test_sizes_and_imports_are_counted(source: Path) -> None:
    """An import inside a nested function counts once, and one at the top of the file does not."""

    measures = measure(source)

    assert {
        "modules": 1,
        "lines": 10,
        "largest_file": 10,
        "largest_class": 7,
        "largest_function": 6,
        "deferred_imports": 2,
    } == {name: found.value for name, found in measures.items()}
    assert "     6 src/reader.py:5 read" in report(measures)


def test_a_worse_value_is_named_with_its_place(source: Path) -> None:
    """Today's value, the committed one, and the largest parts; nothing about the others."""

    measures = measure(source)
    committed = {name: found.value for name, found in measures.items()}

    problems = worse(measures, {**committed, "largest_function": 4})

    places = "     6 src/reader.py:5 read\n     3 src/reader.py:7 parse"
    assert [f"largest function: 6, committed: 4\n{places}"] == problems
    assert [] == worse(measures, committed)


def test_committed_values_are_accepted(source: Path, tmp_path: Path) -> None:
    """Lines and modules are rounded up, so that not every change has to touch the file."""

    file = tmp_path / "architecture.toml"
    measures = measure(source)

    commit_values(measures, file)

    assert [] == worse(measures, committed_values(file))
    assert (5, 500, 6) == tuple(
        committed_values(file)[name] for name in ("modules", "lines", "largest_function")
    )
