"""Files that commands bring here: whole or not at all, and never in place of another."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import pytest

from gpulse.cli.remote import Waiting, save, tell_written
from gpulse.cluster.protocol.answers import ExportState
from gpulse.errors import GpulseError, UsageError
from tests.unit.head_answers import session_answer


def _three_bytes(file: BinaryIO, told: Callable[[int], None]) -> int:
    file.write(b"abc")
    told(3)
    return 3


def test_a_file_is_saved_under_the_name_of_its_session(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is said where, how large it is, and how to look at it."""
    path = save("run", "json", tmp_path, _three_bytes)

    assert str(tmp_path / "run.json") == path
    assert f"run saved: {path} (3B)\nsee it with: gpulse report {path}\n" == capsys.readouterr().out
    assert b"abc" == Path(path).read_bytes()


def test_what_is_there_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The new file gets a number, and that is said."""
    (tmp_path / "mine.csv").write_text("precious")

    path = save("run", "csv", tmp_path / "mine.csv", _three_bytes)

    assert str(tmp_path / "mine-2.csv") == path
    assert "precious" == (tmp_path / "mine.csv").read_text()
    assert "mine.csv was there already and stays as it is" in capsys.readouterr().err


@pytest.mark.parametrize("reason", [KeyboardInterrupt(), GpulseError("gone"), OSError(28, "No space left")])
def test_an_interrupted_download_leaves_nothing(tmp_path: Path, reason: BaseException) -> None:
    """Neither under its own name nor under another."""

    def interrupted(file: BinaryIO, _told: Callable[[int], None]) -> int:
        file.write(b"half")
        raise reason

    with pytest.raises((KeyboardInterrupt, GpulseError)):
        save("run", "json", tmp_path, interrupted)

    assert [] == os.listdir(tmp_path)


def test_a_directory_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    """It says how to make it."""
    with pytest.raises(UsageError) as caught:
        save("run", "json", tmp_path / "new" / "run.json", _three_bytes)

    assert f"mkdir -p {tmp_path / 'new'}" == caught.value.hint


def test_a_file_that_the_head_could_not_write_is_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    """The session is stopped all the same, and can be exported again."""
    failed = session_answer("run", export=ExportState(state="failed", error="the disk is full"))

    assert 1 == tell_written(
        [failed], verb="stopped", export_with="gpulse session export {} --head h:1".format
    )
    said = capsys.readouterr().err
    assert "run stopped, but its file could not be written: the disk is full" in said
    assert "try: gpulse session export run --head h:1\n" in said


def test_what_takes_long_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    """Once, where nobody sees a line that moves."""
    with Waiting("waiting for the head", patience_seconds=0.0) as waiting:
        while not waiting._drawn:
            threading.Event().wait(0.01)

    assert "waiting for the head ...\n" == capsys.readouterr().err


def test_what_is_quick_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is said about what takes no time."""
    with Waiting("waiting for the head"):
        pass

    assert "" == capsys.readouterr().err
