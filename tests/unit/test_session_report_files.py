from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from gpulse.errors import RecordingError
from gpulse.export.session_report.session_json_reader import find_newer_file, find_session_file


def test_the_newest_session_counts_and_not_the_newest_file(tmp_path: Path) -> None:
    """An old session that is exported again stays the older one."""
    _write(tmp_path / "run.json", "run", hour=2)
    _write(tmp_path / "run-2.json", "run", hour=1)

    assert tmp_path / "run.json" == find_session_file(tmp_path / "run")
    assert [None, tmp_path / "run.json"] == [
        find_newer_file(tmp_path / name) for name in ("run.json", "run-2.json")
    ]


def test_a_session_that_began_in_the_past_is_the_newest_when_it_ended_last(tmp_path: Path) -> None:
    """It may begin before one that was stopped long ago."""
    for name, begin, end in (("run.json", 2, 3), ("run-2.json", 1, 4)):
        times = {"start_time": f"2026-11-15T0{begin}:00:00Z", "end_time": f"2026-11-15T0{end}:00:00Z"}
        (tmp_path / name).write_text(json.dumps({"session_name": "run", **times, "frames": []}))

    assert tmp_path / "run-2.json" == find_session_file(tmp_path / "run")
    assert tmp_path / "run-2.json" == find_newer_file(tmp_path / "run.json")


def test_of_one_session_the_newest_file_counts(tmp_path: Path) -> None:
    """It may have been exported while it went on, and is not a newer run."""
    for count, name in enumerate(("run.json", "run-2.json")):
        os.utime(_write(tmp_path / name, "run", hour=1), (count, count))

    assert tmp_path / "run-2.json" == find_session_file(tmp_path / "run")
    assert find_newer_file(tmp_path / "run.json") is None


def test_a_file_says_itself_whose_it_is(tmp_path: Path) -> None:
    """`run-2.json` is the second file of `run`, or the first one of `run-2`."""
    _write(tmp_path / "run.json", "run", hour=1)
    _write(tmp_path / "run-2.json", "run-2", hour=2)
    _write(tmp_path / "run-2-2.jsonl", "run-2", hour=3)
    _write(tmp_path / "run-10.json", "run", hour=4)

    assert ["run-10.json", "run-2-2.jsonl", "run-10.json"] == [
        find_session_file(tmp_path / name).name for name in ("run", "run-2", "run-10")
    ]


def test_a_path_means_that_file(tmp_path: Path) -> None:
    """Whatever else is there; one that is gone means the newest file of its name."""
    _write(tmp_path / "run-2.json", "run", hour=1)
    _write(tmp_path / "run-3.json", "run", hour=2)

    assert [tmp_path / "run-2.json", tmp_path / "run-3.json"] == [
        find_session_file(tmp_path / name) for name in ("run-2.json", "run.json")
    ]


def test_files_that_cannot_be_read_are_passed_over(tmp_path: Path) -> None:
    """One that says whose it is before it is cut off counts, so that its report says what is wrong."""
    whole = _write(tmp_path / "run.json", "run", hour=1)
    (tmp_path / "run-2.json").write_text("no JSON")
    (tmp_path / "run-3.json").mkdir()
    (tmp_path / "run-4.json").write_bytes(b"")

    assert whole == find_session_file(tmp_path / "run")

    (tmp_path / "run-5.json").write_text(_document("run", hour=2)[:-9])

    assert tmp_path / "run-5.json" == find_session_file(tmp_path / "run")


@pytest.mark.parametrize("name", ["run", "run.json", "run[1]", "nowhere/run"])
def test_nothing_of_that_name(name: str, tmp_path: Path) -> None:
    """The directory that was looked at is said."""
    _write(tmp_path / "run1.json", "run1", hour=1)

    with pytest.raises(RecordingError, match="no such file, and no session file with this name") as caught:
        find_session_file(tmp_path / name)
    expected = None if "[" in name else "download it from the head with: gpulse session export run"
    assert expected == caught.value.hint


def _document(name: str, *, hour: int) -> str:
    frames = [{"time": 1.0, "gpu_id": ["n:0:G"], "gpu_util": [1.0]}]
    return json.dumps({"session_name": name, "start_time": f"2026-11-15T{hour:02}:00:00Z", "frames": frames})


def _write(path: Path, name: str, *, hour: int) -> Path:
    path.write_text(_document(name, hour=hour))
    return path


def test_a_pipe_with_the_name_of_a_session_is_passed_over(tmp_path: Path) -> None:
    """Nobody waits for its writer."""
    os.mkfifo(tmp_path / "run-2.json")

    with pytest.raises(RecordingError, match="no session file with this name"):
        find_session_file(tmp_path / "run")
