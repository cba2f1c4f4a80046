"""Tests that need programs which this machine may not have, and the summary of those that were skipped."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import conftest, prerequisites
from tests.prerequisites import Tool

ROOT = Path(__file__).parents[2]
ABSENT = Tool(lambda: False, ("absent-package", "another"))
INNER = """
import pytest
from tests import prerequisites
from tests.prerequisites import TOOLS, Tool

TOOLS["Absent"] = Tool(lambda: False, ("absent-package",))

@pytest.mark.requires("Absent")
def test_marked():
    pass

@pytest.fixture
def helper():
    prerequisites.require("Absent")

def test_through_a_helper(helper):
    pass

def test_that_needs_nothing():
    pass
"""


@pytest.fixture
def session(tmp_path: Path) -> Path:
    """A file with two tests whose program is missing, and one that runs."""
    path = tmp_path / "test_inner.py"
    path.write_text(INNER, encoding="utf-8")
    return path


def pytest_in(path: Path, **env: str) -> tuple[int, str]:
    """Run the tests of a file with this project's settings; the exit code, and what was printed."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("CI", "PYTEST_"))
    }
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "-p",
        "tests.conftest",
        "-c",
        "pyproject.toml",
    ]
    done = subprocess.run(
        [*command, "--rootdir", str(ROOT), str(path)],
        cwd=ROOT,
        env={**environment, "PYTHONPATH": str(ROOT), **env},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
def test_what_is_missing_is_skipped_and_said(session: Path) -> None:
    """With the number of tests, and with the command that would enable them."""
    code, said = pytest_in(session)

    assert 0 == code, said
    assert "1 passed, 2 skipped" in said
    assert "\n    2 skipped, missing here: Absent\n" in said
    assert "apt-get install --no-install-recommends absent-package\n" in said


@pytest.mark.slow
def test_nothing_is_skipped_in_ci(session: Path) -> None:
    """What cannot be tested there is a failure."""
    code, said = pytest_in(session, CI="true")

    assert 1 == code, said
    assert "nothing may be: missing here: Absent" in said
    assert "skipped" not in said.splitlines()[-1]


def test_nothing_skipped_is_nothing_to_say() -> None:
    """As on a machine that has everything."""

    assert [] == prerequisites.summary([])


def test_reasons_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The commonest first; rights that are missing are named, but nothing can be installed for them."""
    monkeypatch.setitem(prerequisites.TOOLS, "Absent", ABSENT)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    reasons = ["needs root, to mount", "missing here: Absent", "missing here: Absent"]

    assert [
        "    2 skipped, missing here: Absent",
        "    1 skipped, needs root, to mount",
        "To run those with something missing: sudo apt-get install --no-install-recommends absent-package another",
    ] == prerequisites.summary(reasons)


@pytest.mark.parametrize(("group", "ci", "code"), [("test", "", 0), ("test", "1", 1), ("venv", "", 1)])
def test_what_may_not_be_installed_is_said(
    group: str, ci: str, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is an error where nothing works without it, and in CI."""
    monkeypatch.setattr(prerequisites, "_may_install", lambda: False)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setitem(prerequisites.GROUPS, group, {"Absent": ABSENT})
    monkeypatch.setenv("CI", ci)

    assert code == prerequisites.main(["install", group])
    said = capsys.readouterr().err
    assert "Not installed: Absent. " in said
    assert ": sudo apt-get install --no-install-recommends absent-package another\n" in said


@pytest.mark.parametrize(
    ("path", "is_ours"),
    [
        ("/var/lib/libuuid/clock.txt", False),
        ("/usr/lib/locale/locale-archive", False),
        ("socket:[4711]", True),
        ("pipe:[4711]", True),
        ("anon_inode:inotify", True),
        ("/dev/nvidia0", True),
        (str(ROOT / "README.md"), True),
        ("/home/ada/run.jsonl", True),
    ],
)
def test_only_what_tests_can_leave_open_counts(path: str, is_ours: bool) -> None:
    """Libraries keep files of the system open, such as libuuid the one with its clock."""

    assert is_ours == conftest._is_ours(path)


def test_files_under_temporary_directories_are_ours(tmp_path: Path) -> None:
    """Wherever those are."""

    assert conftest._is_ours(str(tmp_path / "left"))
