"""`gpulse report`, as people run it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.integration.commands import run


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """A small session file in gswarm-profiler's layout."""
    path = tmp_path / "training_run_1.json"
    frames = [
        {
            "frame_id": number + 1,
            "time": f"2026-11-15T10:00:{number:02}Z",
            "gpu_id": ["n1:0:NVIDIA H200", "n2:0:NVIDIA H200"],
            "gpu_util": [number, 100 - number],
            "gpu_memory": [25.0, None],
        }
        for number in range(30)
    ]
    path.write_text(json.dumps({"session_name": "training_run_1", "frames": frames}))
    return path


def test_figures(recorded: Path) -> None:
    """A table on standard output, nothing on standard error."""
    ended = run("report", recorded)

    assert (0, "") == (ended.code, ended.err)
    assert ended.out.startswith(
        "training_run_1\n2026-11-15 10:00:00 to 10:00:30 UTC (30s), 30 frames, one every 1 s, "
    )


def test_json(recorded: Path) -> None:
    """The same for programs."""
    ended = run("report", recorded, "--json")

    found: dict[str, Any] = json.loads(ended.out)
    assert (30, "n1:0:NVIDIA H200", 14.5) == (
        found["frames"],
        found["gpus"][0]["gpu_id"],
        found["gpus"][0]["avg_gpu_util"],
    )


@pytest.mark.parametrize("kind", ["pdf", "png", "svg", "html"])
def test_pictures(kind: str, recorded: Path, tmp_path: Path) -> None:
    """Beside the table; an older picture is replaced."""
    path = tmp_path / f"run.{kind}"
    path.write_text("older")

    ended = run("report", recorded, "--plot", path, env={"MPLCONFIGDIR": str(tmp_path / "matplotlib")})

    assert 0 == ended.code
    assert path.stat().st_size > 5000


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["nowhere.json"], 1, "no such file"),
        (["cut.json"], 1, "incomplete"),
        (["training_run_1.json", "--plot", "x.docx"], 2, "cannot draw 'x.docx'"),
        (["training_run_1.json", "--plot", "nowhere/x.png"], 2, "directory nowhere does not exist"),
        ([], 2, "Missing argument"),
    ],
)
def test_what_cannot_be_done(arguments: list[str], code: int, message: str, recorded: Path) -> None:
    """One line that says so, and what to try; no traceback."""
    (recorded.parent / "cut.json").write_text(recorded.read_text()[:900])

    ended = run("report", *arguments, cwd=recorded.parent)

    assert code == ended.code
    assert message in ended.err
    assert "Traceback" not in ended.err
    assert "" == ended.out
