"""Files that commands bring here: whole or not at all, and never in place of another."""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from gpulse.cli.progress import WaitNotice
from gpulse.cli.session_download import _CodeDetector, print_written_files, save_file
from gpulse.cluster.protocol.answers import ExportState
from gpulse.errors import GpulseError, UsageError
from gpulse.export.session_file.output_file import SessionFile
from tests.unit.head_answers import session_answer


@pytest.mark.parametrize("pieces", [(b'{"a":1,"where":[]}',), (b'{"a":1,"wh', b"er", b'e":[]', b"}")])
def test_lines_of_code_are_noticed_however_the_file_is_split(pieces: tuple[bytes, ...]) -> None:
    """A file with them can be read only by its owner."""
    file = io.BytesIO()
    content = _CodeDetector(file)
    for piece in pieces:
        content.write(piece)

    assert content.has_code
    assert b'{"a":1,"where":[]}' == file.getvalue()


def _three_bytes(draft: SessionFile, told: Callable[[int], None]) -> int:
    draft.file.write(b"abc")
    told(3)
    return 3


def test_a_file_is_saved_under_the_name_of_its_session(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is said where, how large it is, and how to look at it."""
    path = save_file("run", "json", tmp_path, _three_bytes)

    assert str(tmp_path / "run.json") == path
    assert f"wrote {path} (3B)\nview it with: gpulse report {path}\n" == capsys.readouterr().out
    assert b"abc" == Path(path).read_bytes()


def test_what_is_there_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The new file gets a number, and that is said."""
    (tmp_path / "mine.csv").write_text("precious")

    path = save_file("run", "csv", tmp_path / "mine.csv", _three_bytes)

    assert str(tmp_path / "mine-2.csv") == path
    assert "precious" == (tmp_path / "mine.csv").read_text()
    assert "mine.csv already exists and is kept" in capsys.readouterr().err


@pytest.mark.parametrize("reason", [KeyboardInterrupt(), GpulseError("gone"), OSError(28, "No space left")])
def test_an_interrupted_download_leaves_nothing(tmp_path: Path, reason: BaseException) -> None:
    """Neither under its own name nor under another."""

    def interrupted(draft: SessionFile, _told: Callable[[int], None]) -> int:
        draft.file.write(b"half")
        raise reason

    with pytest.raises((KeyboardInterrupt, GpulseError)):
        save_file("run", "json", tmp_path, interrupted)

    assert [] == os.listdir(tmp_path)


def test_a_directory_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    """It says how to make it."""
    with pytest.raises(UsageError) as caught:
        save_file("run", "json", tmp_path / "new" / "run.json", _three_bytes)

    assert f"mkdir -p {tmp_path / 'new'}" == caught.value.hint


def test_a_file_that_the_head_could_not_write_is_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    """The session is stopped all the same, and can be exported again."""
    failed = session_answer("run", export=ExportState(state="failed", error="the disk is full"))

    assert 1 == print_written_files(
        [failed], verb="stopped", export_with="gpulse session export {} --head h:1".format
    )
    said = capsys.readouterr().err
    assert "run stopped, but its file could not be written: the disk is full" in said
    assert "try: gpulse session export run --head h:1\n" in said


def test_what_takes_long_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    """Once, where nobody sees a line that moves."""
    with WaitNotice("waiting for the head", patience_seconds=0.0) as waiting:
        while not waiting._drawn:
            threading.Event().wait(0.01)

    assert "waiting for the head ...\n" == capsys.readouterr().err


def test_what_is_quick_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is said about what takes no time."""
    with WaitNotice("waiting for the head"):
        pass

    assert "" == capsys.readouterr().err
