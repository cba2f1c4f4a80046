"""The version of a data directory's format."""

from __future__ import annotations

import json
from pathlib import Path
from zlib import crc32

import pytest

from gpulse.errors import LogError
from gpulse.store.format_version import FORMAT, check_format, prepare_format
from gpulse.store.local import LocalStore, OfflineStore
from gpulse.store.scrub import repair_data, scrub_data
from tests.fixtures.data import ANSWERS, answers, unpack
from tests.unit.report_lab import check_alike


def test_a_new_directory_is_marked(tmp_path: Path) -> None:
    """Once, and every later start accepts it."""
    for _ in range(2):
        with LocalStore(str(tmp_path / "data")):
            pass
    first, second = (tmp_path / "data/format").read_text().splitlines()
    assert (f"gpulse data, format {FORMAT}", "checksum ") == (first, second[:9])
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
        ("", "the file is damaged"),
        ("gpulse data, format ٣\n", "the file is damaged"),
        (f"gpulse data, format {FORMAT}\nmore", "the file is damaged"),
        ("x" * 10_000, "the file is damaged"),
    ],
)
def test_other_formats_are_refused(tmp_path: Path, text: str, message: str) -> None:
    """With what to do instead."""
    (tmp_path / "format").write_text(text)
    with pytest.raises(LogError, match=message) as refusal:
        prepare_format(str(tmp_path))
    assert "--data-dir" in (refusal.value.hint or "")


@pytest.mark.parametrize("done", ["another version", "another checksum", "cut", "deleted"])
def test_a_damaged_format_file_is_written_again(tmp_path: Path, done: str) -> None:
    """The head starts and reports it; readers of a stopped head's data are refused, since they change nothing."""
    with LocalStore(str(tmp_path)) as store:
        store.seal()
    path = tmp_path / "format"
    text = path.read_bytes()
    match done:
        case "another version":
            path.write_bytes(text.replace(b"format 2", b"format 3"))
        case "another checksum":
            path.write_bytes(text[:-2] + bytes([text[-2] ^ 1]) + text[-1:])
        case "cut":
            path.write_bytes(text[:-3])
        case _:
            path.unlink()
    with pytest.raises(LogError, match="the file is damaged"):
        OfflineStore(str(tmp_path))
    assert [str(path)] == [found.path for found in scrub_data(str(tmp_path)).damage]
    with LocalStore(str(tmp_path)) as store:
        assert [str(path)] == [found.path for found in store.damage.take()]
    assert text == path.read_bytes()


def test_a_confirmed_version_is_not_changed_by_a_repair(tmp_path: Path) -> None:
    """A checksum shows that another version of gpulse wrote it; without one, the metadata decides."""
    with LocalStore(str(tmp_path)) as store:
        store.seal()
    path = tmp_path / "format"
    line = f"gpulse data, format {FORMAT + 1}\n".encode()
    path.write_bytes(line + b"checksum %08x\n" % crc32(line))
    with pytest.raises(LogError, match="a newer version of gpulse"):
        repair_data(str(tmp_path), 0.0, lambda _done, _total, _path: None)
    path.write_bytes(line)
    with pytest.raises(LogError, match="a newer version of gpulse"):
        LocalStore(str(tmp_path))
    report = repair_data(str(tmp_path), 0.0, lambda _done, _total, _path: None)
    assert [str(path)] == [found.path for found in report.damage]
    with LocalStore(str(tmp_path)):
        assert check_format(str(tmp_path))


def test_stored_data_is_read_as_it_was_when_the_format_was_made(tmp_path: Path) -> None:
    """A change that breaks this needs a new number for the format and a new fixture: `python -m tests.fixtures.data`."""
    unpack(tmp_path)
    check_alike(json.loads(ANSWERS.read_text()), answers(tmp_path))
