"""What a plain `pip install` of gpulse can do, and what it says about the rest."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpulse.errors import pip_requirement
from tests.integration.base_install import base_install
from tests.integration.commands import Ended, run


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """A session's file."""
    path = tmp_path / "run.json"
    frames = [
        {"time": f"2026-11-15T10:00:{number:02}Z", "gpu_id": ["n1:0:NVIDIA H200"], "gpu_util": [number]}
        for number in range(30)
    ]
    path.write_text(json.dumps({"session_name": "run", "frames": frames}))
    return path


@pytest.fixture
def plain(tmp_path: Path) -> dict[str, str]:
    """The environment of a base install."""
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    return base_install(hidden)


def test_figures_need_no_extra(recorded: Path, plain: dict[str, str]) -> None:
    """A session's figures are printed as text and as JSON, by either program."""
    text = run("report", recorded, env=plain)
    by_gsprof = run("stat", "--data", recorded, program="gsprof", env=plain)
    document = run("report", recorded, "--json", env=plain)

    assert (0, "") == (text.code, text.err)
    assert "p95" in text.out
    assert text == by_gsprof
    assert 14.5 == json.loads(document.out)["gpus"][0]["avg_gpu_util"]


@pytest.mark.parametrize(
    ("program", "arguments", "feature", "extra"),
    [
        ("gpulse", ["report", "run.json", "--plot", "run.png"], "drawing charts", "plot"),
        ("gsprof", ["stat", "--data", "run.json", "--plot", "run.pdf"], "drawing charts", "plot"),
        ("gpulse", ["why", "--demo", "--plot", "why.svg"], "drawing charts", "plot"),
        ("gpulse", ["head", "--port", "0"], "a head", "head"),
        ("gsprof", ["start", "--port", "0"], "a head", "head"),
        ("gpulse", ["demo"], "gpulse demo", "head"),
        ("gpulse", ["session", "recover", "--list", "--data-dir", "."], "reading the data of a head", "head"),
        ("gpulse", ["dask", "status", "tcp://127.0.0.1:1"], "`gpulse dask`", "dask"),
        ("gpulse", ["dask", "plot", ".", "-o", "x.png"], "drawing charts", "dask"),
    ],
)
def test_what_needs_an_extra_says_how_to_get_it(
    program: str, arguments: list[str], feature: str, extra: str, recorded: Path, plain: dict[str, str]
) -> None:
    """The last line is the command, for this environment and from where gpulse came."""
    ended: Ended = run(*arguments, program=program, env=plain, cwd=recorded.parent)

    assert 2 == ended.code
    assert "" == ended.out
    said, tried = ended.err.splitlines()
    assert f"{program}: {feature} needs packages that are not installed" == said
    assert tried.startswith("  try: ")
    assert tried.endswith(f"pip install {pip_requirement(extra)}")
