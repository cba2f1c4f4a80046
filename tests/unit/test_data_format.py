"""The version of a data directory's format."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpulse.errors import LogError
from gpulse.store.format import FORMAT, check_format, prepare_format
from gpulse.store.local import LocalStore
from gpulse.store.offline import OfflineStore
from tests.fixtures.data import ANSWERS, answers, unpack
from tests.unit.report_lab import check_alike


def test_a_new_directory_is_marked(tmp_path: Path) -> None:
    """Once, and every later start accepts it."""
    for _ in range(2):
        with LocalStore(str(tmp_path / "data")):
            pass
    assert f"gpulse data, format {FORMAT}\n" == (tmp_path / "data/format").read_text()
    assert check_format(str(tmp_path / "data"))
    with OfflineStore(str(tmp_path / "data")) as store:
        assert {} == store.nodes()


def test_an_unmarked_directory_with_data_is_refused(tmp_path: Path) -> None:
    """Versions before the mark wrote it; nothing in it is touched."""
    (tmp_path / "log").mkdir()
    for opened in (LocalStore, OfflineStore):
        with pytest.raises(LogError, match=r"an earlier version of gpulse \(data format 1\)") as refusal:
            opened(str(tmp_path))
        assert "--data-dir" in (refusal.value.hint or "")
    assert ["log"] == [path.name for path in tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"gpulse data, format {FORMAT + 1}\n", "a newer version of gpulse"),
        (f"gpulse data, format {FORMAT - 1}\n", "an earlier version of gpulse"),
        ("", "does not say which format"),
        ("gpulse data, format ٣\n", "does not say which format"),
        (f"gpulse data, format {FORMAT}\nmore", "does not say which format"),
        ("x" * 10_000, "does not say which format"),
    ],
)
def test_other_formats_are_refused(tmp_path: Path, text: str, message: str) -> None:
    """With what to do instead."""
    (tmp_path / "format").write_text(text)
    with pytest.raises(LogError, match=message) as refusal:
        prepare_format(str(tmp_path))
    assert "--data-dir" in (refusal.value.hint or "")


def test_stored_data_is_read_as_it_was_when_the_format_was_made(tmp_path: Path) -> None:
    """A change that breaks this needs a new number for the format and a new fixture: `python -m tests.fixtures.data`."""
    unpack(tmp_path)
    check_alike(json.loads(ANSWERS.read_text()), answers(tmp_path))
