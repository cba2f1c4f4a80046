"""Directories that everybody can write to: nothing of another user is followed, changed or removed there."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from gpulse.atomic_files import (
    check_private_directory,
    create_file,
    open_output,
    replace_file,
    resolve_output,
)
from gpulse.charts.chart_files import replace_chart_file
from gpulse.cli import daemon
from gpulse.errors import RecordingError
from gpulse.export.csv_files import CsvSink
from gpulse.export.session_file.output_file import SessionFile, remove_stale_drafts
from gpulse.export.sqlite_database import SqliteSink
from gpulse.harvest.state_directory import _lock
from gpulse.integrations.dask.csv_files import ExportFormat, replace_files
from gpulse.sampling.recorder import Recorder
from gpulse.sources.demo_machine import DemoMachine
from tests.integration.hands import IS_ROOT

pytestmark = pytest.mark.skipif(not IS_ROOT, reason="only root can give files to another user")

OTHER = 65534
WRITERS: dict[str, Callable[[Path], object]] = {
    "log": lambda path: os.close(open_output(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)),
    "lock": lambda path: os.close(_lock(str(path))),
    "chart": lambda path: replace_chart_file(path, b"new"),
    "replaced file": lambda path: replace_file(path, b"new"),
    "new file": lambda path: create_file(path, b"new"),
    "recording": lambda path: Recorder(path).close(),
    "CSV": lambda path: CsvSink(path).close(),
    "SQLite": lambda path: SqliteSink(path).close(),
}


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A directory like /tmp."""
    path = tmp_path / "shared"
    path.mkdir()
    path.chmod(0o1777)
    return path


def link_of_other(path: Path, target: Path) -> None:
    """Make a symbolic link that belongs to another user."""
    path.symlink_to(target)
    os.chown(path, OTHER, OTHER, follow_symlinks=False)


@pytest.fixture(params=[0o1777, 0o775, 0o700], ids=["public", "group", "private"])
def directory(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A directory in which another user has, or had once, put something."""
    path = tmp_path / "shared"
    path.mkdir()
    path.chmod(request.param)
    return path


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
@pytest.mark.parametrize("is_there", [True, False])
def test_a_planted_link_is_refused(
    directory: Path, tmp_path: Path, write: Callable[[Path], object], is_there: bool
) -> None:
    """Whether there is a file where it leads, or not."""

    victim = tmp_path / "victim"
    if is_there:
        victim.write_bytes(b"")
    link_of_other(directory / "out.sqlite", victim)
    with pytest.raises((RecordingError, OSError)) as raised:
        write(directory / "out.sqlite")

    assert "of another user (UID 65534)" in str(raised.value) or "exists" in str(raised.value)
    assert [is_there, b""] == [victim.exists(), victim.read_bytes() if is_there else b""]
    assert ["out.sqlite"] == os.listdir(directory)


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
@pytest.mark.parametrize("mode", [0o1777, 0o700], ids=["public", "private"])
def test_a_planted_file_is_refused(shared: Path, write: Callable[[Path], object], mode: int) -> None:
    """It stays as it is."""

    shared.chmod(mode)
    path = shared / "out.sqlite"
    path.write_bytes(b"")
    path.chmod(0o666)
    os.chown(path, OTHER, OTHER)
    with pytest.raises((RecordingError, OSError)) as raised:
        write(path)

    assert "a file of another user (UID 65534)" in str(raised.value) or "exists" in str(raised.value)
    assert (b"", OTHER) == (path.read_bytes(), path.stat().st_uid)


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_a_planted_link_to_a_directory_is_refused(
    directory: Path, tmp_path: Path, write: Callable[[Path], object]
) -> None:
    """Nothing appears where it leads."""

    home = tmp_path / "home"
    home.mkdir()
    link_of_other(directory / "results", home)
    with pytest.raises((RecordingError, OSError), match=r"results is a symbolic link of another user"):
        write(directory / "results" / "out.sqlite")

    assert [] == os.listdir(home)


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_links_of_ones_own_are_followed(tmp_path: Path, write: Callable[[Path], object]) -> None:
    """In directories of one's own, and also in shared ones."""

    (tmp_path / "big").mkdir()
    (tmp_path / "results").symlink_to("big")
    write(tmp_path / "results" / "out.sqlite")

    assert ["out.sqlite"] == [name for name in os.listdir(tmp_path / "big") if not name.endswith("-journal")]


@pytest.mark.parametrize("name", ["log", "chart", "SQLite"])
def test_a_file_that_is_a_link_of_ones_own_stays_a_link(tmp_path: Path, name: str) -> None:
    """What it leads to is written."""

    (tmp_path / "out.sqlite").symlink_to("there")
    WRITERS[name](tmp_path / "out.sqlite")

    assert (tmp_path / "out.sqlite").is_symlink()
    assert (tmp_path / "there").is_file()


def test_a_file_of_a_group_can_be_appended_to(tmp_path: Path) -> None:
    """In a directory that its members share."""

    path = tmp_path / "team.sqlite"
    SqliteSink(path).close()
    os.chown(path, OTHER, OTHER)
    tmp_path.chmod(0o770)
    SqliteSink(path).close()


def test_links_in_a_directory_of_their_owner_are_followed(tmp_path: Path) -> None:
    """Whoever writes to a directory of another user relies on them."""

    (tmp_path / "theirs" / "disk").mkdir(parents=True)
    link_of_other(tmp_path / "theirs" / "results", tmp_path / "theirs" / "disk")
    os.chown(tmp_path / "theirs", OTHER, OTHER)
    os.close(open_output(tmp_path / "theirs" / "results" / "out", os.O_WRONLY | os.O_CREAT))

    assert (tmp_path / "theirs" / "disk" / "out").is_file()


def test_a_file_that_the_shell_has_opened_can_be_written(tmp_path: Path) -> None:
    """Also one of another user: `sudo gpulse record /dev/stdout > file`."""

    with (tmp_path / "out").open("wb") as file:
        os.fchown(file.fileno(), OTHER, OTHER)
        os.close(open_output(f"/dev/fd/{file.fileno()}", os.O_WRONLY))


@pytest.mark.parametrize("suffix", ["-journal", "-wal", "-shm"])
def test_a_planted_journal_is_not_applied_to_a_database(shared: Path, suffix: str) -> None:
    """SQLite would write its content into the database."""

    path = shared / "out.sqlite"
    frame = DemoMachine(1_800_000_000.0).sample(1_800_000_000.0)
    with closing(SqliteSink(path)) as sink:
        sink.write(frame)
        (shared / f"out.sqlite{suffix}").write_bytes(b"planted")
        os.chown(shared / f"out.sqlite{suffix}", OTHER, OTHER)
        for write in (lambda: sink.write(frame), lambda: SqliteSink(path)):
            with pytest.raises(RecordingError, match=f"out.sqlite{suffix} is a file of another user"):
                write()


def test_a_second_name_of_a_file_is_not_written(shared: Path, tmp_path: Path) -> None:
    """Anybody could have made it, where the kernel permits hard links to files of others."""

    (tmp_path / "victim").write_bytes(b"mine")
    os.link(tmp_path / "victim", shared / "log")
    with pytest.raises(OSError, match="is a hard link in a directory that everybody can write to"):
        open_output(shared / "log", os.O_WRONLY | os.O_APPEND)


def test_pipes_of_the_shell_can_be_written() -> None:
    """Their links in /proc lead nowhere by name."""

    reading, writing = os.pipe()
    try:
        assert f"/proc/self/fd/{writing}" == resolve_output(f"/dev/fd/{writing}")
        again = open_output(f"/dev/fd/{writing}", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(again, b"output")
        os.close(again)
        assert b"output" == os.read(reading, 10)
    finally:
        os.close(reading)
        os.close(writing)


def test_drafts_of_others_are_neither_removed_nor_written(shared: Path) -> None:
    """Another user's unfinished download may be one that is still going on, on another machine."""

    theirs = shared / ".run.json.gpulse-part"
    theirs.write_bytes(b"half")
    theirs.chmod(0o666)
    os.chown(theirs, OTHER, OTHER)
    assert [] == remove_stale_drafts(shared)
    with SessionFile(shared, "run", ".json") as out:
        out.file.write(b"whole")
        out.publish()

    assert [b"half", b"whole"] == [theirs.read_bytes(), (shared / "run.json").read_bytes()]


def test_an_export_of_another_user_is_not_replaced(shared: Path) -> None:
    """Nor is it removed as one of an earlier export."""

    theirs = shared / "worker-7.csv"
    theirs.write_bytes(b"")
    os.chown(theirs, OTHER, OTHER)
    kind = ExportFormat(re.compile(r"worker-\d\.csv"), lambda _path: True)
    replace_files(shared, {"worker-0.csv": lambda _file: None}, kind)

    assert ["worker-0.csv", "worker-7.csv"] == sorted(os.listdir(shared))


@pytest.mark.parametrize(
    ("mode", "owner", "expected"),
    [
        (0o700, 0, None),
        (0o755, 0, None),
        (0o770, 0, "other users can write to {} (mode 770)"),
        (0o757, 0, "other users can write to {} (mode 757)"),
        (0o1777, 0, "other users can write to {} (mode 1777)"),
        (0o700, OTHER, "{} belongs to another user (UID 65534)"),
    ],
)
def test_private_directories(tmp_path: Path, mode: int, owner: int, expected: str | None) -> None:
    """Nobody else can write to them; one that does not exist yet will be private."""

    path = tmp_path / "data"
    check_private_directory(str(path))
    path.mkdir()
    path.chmod(mode)
    os.chown(path, owner, owner)
    if expected is None:
        check_private_directory(str(path))
        return
    with pytest.raises(PermissionError) as raised:
        check_private_directory(str(path))

    assert (expected.format(path), str(path)) == (raised.value.strerror, raised.value.filename)


@pytest.mark.parametrize(("mode", "is_fine"), [(0o1777, True), (0o777, False)])
def test_private_directories_cannot_be_replaced(tmp_path: Path, mode: int, is_fine: bool) -> None:
    """In a directory like /tmp they cannot; without the sticky bit anybody could rename them."""

    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(mode)
    (tmp_path / "shared" / "data").mkdir(0o700)
    if is_fine:
        check_private_directory(str(tmp_path / "shared" / "data"))
        return
    with pytest.raises(PermissionError, match="other users can replace it, because they can write to"):
        check_private_directory(str(tmp_path / "shared" / "data"))


def test_directories_in_private_directories_are_private(tmp_path: Path) -> None:
    """Such as the spool of an agent; also behind a link to another disk."""

    (tmp_path / "disk" / "spool").mkdir(parents=True)
    (tmp_path / "data").mkdir(0o700)
    (tmp_path / "data" / "spool").symlink_to(tmp_path / "disk" / "spool")
    check_private_directory(tmp_path / "data")
    (tmp_path / "disk" / "spool").chmod(0o777)

    with pytest.raises(PermissionError, match=r"other users can write to .*/data/spool \(mode 777\)"):
        check_private_directory(tmp_path / "data")


@pytest.mark.parametrize("place", ["log", "log/lock", "log/spool/0.log"])
@pytest.mark.parametrize("kind", ["symbolic link", "hard link", "file"])
def test_private_directories_contain_nothing_of_others(tmp_path: Path, place: str, kind: str) -> None:
    """A link would lead writes elsewhere, and a file could be changed by its owner."""

    victim = tmp_path / "victim"
    victim.mkdir() if place == "log" and kind == "symbolic link" else victim.write_bytes(b"mine")
    path = tmp_path / "data" / place
    path.parent.mkdir(parents=True)
    match kind:
        case "symbolic link":
            path.symlink_to(victim)
        case "hard link":
            path.hardlink_to(victim)
        case _:
            path.write_bytes(b"")
    os.chown(path, OTHER, OTHER, follow_symlinks=False)
    with pytest.raises(PermissionError) as raised:
        check_private_directory(tmp_path / "data")

    assert (f"{path} belongs to another user (UID 65534)", str(path)) == (
        raised.value.strerror,
        raised.value.filename,
    )


def test_private_directories_may_have_links_of_ones_own(tmp_path: Path) -> None:
    """Also one that leads back, and one that leads nowhere."""

    (tmp_path / "disk").mkdir()
    (tmp_path / "data").symlink_to("disk")
    (tmp_path / "disk" / "again").symlink_to(tmp_path / "disk")
    (tmp_path / "disk" / "gone").symlink_to("nowhere")
    check_private_directory(tmp_path / "data")


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o022, 0o077])
def test_what_a_daemon_creates_it_accepts_again(tmp_path: Path, umask: int) -> None:
    """Whatever the umask is, the parents of its directory are not writable for everybody."""

    directory = tmp_path / "state" / "gpulse" / "head"
    before = os.umask(umask)
    try:
        for _ in range(2):
            with daemon.run_daemon("head", directory, None, background=False):
                os.makedirs(directory, mode=0o700, exist_ok=True)
        assert umask == os.umask(umask)
    finally:
        os.umask(before)
    assert not any(path.stat().st_mode & 0o002 for path in directory.parents if path.is_relative_to(tmp_path))
