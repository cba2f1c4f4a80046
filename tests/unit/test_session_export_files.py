from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gpulse.errors import RecordingError, UsageError
from gpulse.export.session_file.output_file import SessionFile, find_free_path, remove_stale_drafts


def test_a_file_gets_its_name_when_it_is_complete(tmp_path: Path) -> None:
    """Before that nothing carries it, and afterwards nothing else is left."""
    with SessionFile(tmp_path, "run", ".json") as out:
        out.file.write(b"{}")
        assert [".run.json.gpulse-part"] == os.listdir(tmp_path)
        path = out.publish()

    assert str(tmp_path / "run.json") == path
    assert b"{}" == Path(path).read_bytes()
    assert ["run.json"] == os.listdir(tmp_path)


def test_nothing_is_ever_overwritten(tmp_path: Path) -> None:
    """A name that is taken, even by a dangling link, gets a number."""
    (tmp_path / "run.json").write_text("mine")
    (tmp_path / "run-2.json").symlink_to(tmp_path / "nowhere")

    with SessionFile(tmp_path, "run", ".json") as out:
        path = out.publish()

    assert str(tmp_path / "run-3.json") == path
    assert "mine" == (tmp_path / "run.json").read_text()
    assert not (tmp_path / "nowhere").exists()


def test_an_export_that_failed_leaves_nothing(tmp_path: Path) -> None:
    """Neither under its name nor under another."""

    def export() -> None:
        with SessionFile(tmp_path, "run", ".json") as out:
            out.file.write(b"half")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        export()

    assert [] == os.listdir(tmp_path)


def test_two_at_the_same_time(tmp_path: Path) -> None:
    """Each has a file of its own."""
    with (
        SessionFile(tmp_path, "run", ".csv") as one,
        SessionFile(tmp_path, "run", ".csv") as two,
    ):
        one.file.write(b"1")
        two.file.write(b"2")
        paths = [two.publish(), one.publish()]

    assert [str(tmp_path / "run.csv"), str(tmp_path / "run-2.csv")] == paths
    assert [b"2", b"1"] == [Path(path).read_bytes() for path in paths]


def test_what_a_crash_left_is_used_again(tmp_path: Path) -> None:
    """So that such files do not pile up; nothing of it stays."""
    (tmp_path / ".run.json.gpulse-part").write_text("half of an older one")

    with SessionFile(tmp_path, "run", ".json") as out:
        out.file.write(b"new")
        out.publish()

    assert ["run.json"] == os.listdir(tmp_path)
    assert "new" == (tmp_path / "run.json").read_text()


def test_drafts_of_dead_writers_are_removed(tmp_path: Path) -> None:
    """Those of writers that live, and everything that only looks like one, stay."""
    writer = (
        "import sys; from gpulse.export.session_file.output_file import SessionFile as create; "
        "kept = create(sys.argv[1], 'dead', '.json'); kept.file.write(b'half'); kept.file.flush(); "
        "print('ready', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", writer, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert b"ready\n" == process.stdout.readline()
        assert [] == remove_stale_drafts(tmp_path)
        process.send_signal(signal.SIGKILL)
    (tmp_path / ".dead.csv.7.gpulse-part").write_text("older")
    (tmp_path / ".dead.json.2.gpulse-part").symlink_to(tmp_path / "notes.part")
    (tmp_path / ".folder.json.gpulse-part").mkdir()
    os.mkfifo(tmp_path / ".pipe.json.gpulse-part")
    others = [
        "notes.part",
        ".download.json.part",
        ".notes.gpulse-part",
        ".notes.part",
        "dead.json",
        ".dead.json",
        "dead.json.part",
        ".dead.json.part.txt",
    ]
    for name in others:
        (tmp_path / name).write_text("mine")

    with SessionFile(tmp_path, "alive", ".json"):
        assert [".dead.csv.7.gpulse-part", ".dead.json.gpulse-part"] == remove_stale_drafts(tmp_path)
        left = sorted(os.listdir(tmp_path))

    kept = [
        *others,
        ".alive.json.gpulse-part",
        ".dead.json.2.gpulse-part",
        ".folder.json.gpulse-part",
        ".pipe.json.gpulse-part",
    ]
    assert sorted(kept) == left
    assert [] == remove_stale_drafts(tmp_path / "nowhere")


def test_a_planted_link_is_not_followed(tmp_path: Path) -> None:
    """What it points at stays as it is."""
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / ".run.json.gpulse-part").symlink_to(victim)

    with SessionFile(tmp_path, "run", ".json") as out:
        out.file.write(b"new")
        path = out.publish()

    assert b"new" == Path(path).read_bytes()
    assert "precious" == victim.read_text()


def test_a_file_system_without_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes the name first and then moves the file there."""

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    (tmp_path / "run.json").write_text("mine")

    with SessionFile(tmp_path, "run", ".json") as out:
        out.file.write(b"new")
        path = out.publish()

    assert str(tmp_path / "run-2.json") == path
    assert ["run-2.json", "run.json"] == sorted(os.listdir(tmp_path))
    assert "mine" == (tmp_path / "run.json").read_text()


@pytest.mark.parametrize("name", ["../x", "a/b", "", ".hidden", "x" * 101, "a\0b"])
def test_names_that_are_refused(name: str, tmp_path: Path) -> None:
    """Before anything is made."""
    with pytest.raises(UsageError):
        SessionFile(tmp_path, name, ".json")

    assert [] == os.listdir(tmp_path)


def test_endings_that_are_refused(tmp_path: Path) -> None:
    """Only those of the formats there are."""
    with pytest.raises(UsageError):
        SessionFile(tmp_path, "run", "/../x.json")


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    """Is said to be so."""
    with pytest.raises(RecordingError, match="cannot create a file in"):
        SessionFile(tmp_path / "nowhere", "run", ".json")


def test_the_path_that_a_file_will_get(tmp_path: Path) -> None:
    """The first that is neither there nor promised to another session; a broken link is there, too."""
    (tmp_path / "run.json").write_text("{}")
    (tmp_path / "run-2.json").symlink_to("nowhere")
    promised = {str(tmp_path / "run-3.json")}

    expected = find_free_path(tmp_path, "run", ".json", taken=promised)
    with SessionFile(tmp_path, "run", ".json", taken=promised) as out:
        assert str(tmp_path / "run-4.json") == expected == out.publish()
