"""Where the metadata are stored, and disks that refuse: which journal it has, and that a failed update leaves nothing."""

from __future__ import annotations

import os
import resource
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gpulse.errors import DiskError, LogError
from gpulse.store.metadata import sqlite_file as metadata_file
from gpulse.store.metadata.file_check import find_damage
from gpulse.store.metadata.local_metadata import Metadata, MetadataUpdate
from gpulse.store.metadata.sqlite_file import filesystem_type, is_local, is_local_type, to_store_error
from tests.queries import query
from tests.unit.metadata_records import content, fact, node_fact

_MOUNTS = rb"""
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
30 22 0:40 / /home rw,relatime shared:2 master:3 - nfs4 server:/home rw,vers=4.2
31 30 8:2 / /home/local rw - xfs /dev/sdb rw
32 22 0:41 / /my\040data rw - fuse.rclone remote rw
33 22 8:3 / /twice rw - ext4 /dev/sdc rw
34 33 0:42 / /twice rw - lustre 10.0.0.1@tcp:/fs rw
35 22 0:43 / /homes rw - tmpfs tmpfs rw
nonsense
"""


@pytest.mark.parametrize(
    ("path", "expected", "local"),
    [
        ("/var/lib/gpulse", "ext4", True),
        ("/", "ext4", True),
        ("/home", "nfs4", False),
        ("/home/eve/data", "nfs4", False),
        ("/home/local/data", "xfs", True),
        ("/homes/eve", "tmpfs", True),
        ("/home2", "ext4", True),
        ("/my data/x", "fuse.rclone", False),
        ("/twice/x", "lustre", False),
    ],
)
def test_the_mount_that_holds_a_path(path: str, expected: str, local: bool) -> None:
    """It is the innermost, and of two at one place the later."""
    kind = filesystem_type(path, _MOUNTS)
    assert expected == kind
    assert local == is_local_type(kind)


@pytest.mark.parametrize(
    "kind", ["nfs", "cifs", "smb3", "gpfs", "beegfs", "ceph", "fuse.sshfs", "fuse", "9p", None]
)
def test_what_is_shared_or_unknown_is_not_local(kind: str | None) -> None:
    """None of these keeps the maps of two machines in step."""
    assert not is_local_type(kind)


def test_this_machines_own_disk_is_local(tmp_path: Path) -> None:
    """As far as tests run on one."""
    assert is_local(str(tmp_path))


@pytest.fixture
def metadata(tmp_path: Path) -> Iterator[Metadata]:
    """Metadata with a node."""
    with Metadata(str(tmp_path / "metadata.sqlite")) as opened:
        opened.apply(MetadataUpdate(1, [node_fact()]))
        yield opened


def test_a_shared_file_system_has_the_old_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Metadata that comes there from a local disk is changed, and everything works as before."""
    path = str(tmp_path / "metadata.sqlite")
    with Metadata(path) as metadata:
        metadata.apply(MetadataUpdate(1, [node_fact()]))
        assert "wal" == metadata.file.journal_mode
    monkeypatch.setattr(metadata_file, "is_local", lambda _: False)
    with Metadata(path) as metadata, Metadata(path, read_only=True) as reader:
        assert "delete" == metadata.file.journal_mode
        assert metadata.apply(MetadataUpdate(2, [node_fact(2, "b")]))
        assert 2 == metadata.checkpoint()
        assert [1, 2] == list(reader.nodes())
        names = {"metadata.sqlite", "metadata.sqlite.check", "metadata.sqlite.backup"}
        assert names == set(os.listdir(tmp_path))


@pytest.mark.parametrize("read_only", [True, False])
def test_half_a_step_of_a_killed_writer_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read_only: bool
) -> None:
    """Also by readers, and also where pages of the step are in the file itself already."""
    monkeypatch.setattr(metadata_file, "is_local", lambda _: False)
    (tmp_path / "left").mkdir()
    with Metadata(str(tmp_path / "metadata.sqlite")) as metadata:
        metadata.apply(MetadataUpdate(1, [node_fact(number, "x" * 500) for number in range(1, 500)]))
        expected = content(metadata)
        database = metadata._file._writing_connection()
        database.execute("PRAGMA cache_size = 2")
        database.execute("BEGIN IMMEDIATE")
        database.execute("UPDATE nodes SET name = 'half'")
        for name in ("metadata.sqlite", "metadata.sqlite-journal"):
            shutil.copy(tmp_path / name, tmp_path / "left" / name)
        database.execute("ROLLBACK")
    left = tmp_path / "left" / "metadata.sqlite"
    assert b"half" in left.read_bytes()
    with Metadata(str(left), read_only=read_only) as metadata:
        assert expected == content(metadata)


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """No file of this process may grow beyond a size."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.slow
@pytest.mark.parametrize("local", [True, False])
def test_a_step_that_finds_no_room_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, local: bool
) -> None:
    """The metadata can be read meanwhile, and the same update is applied once there is space."""
    monkeypatch.setattr(metadata_file, "is_local", lambda _: local)
    large = MetadataUpdate(
        2, [fact("event", time=1.0, kind="x", node=1, detail={"text": f"{n:1000}"}) for n in range(2000)]
    )
    with Metadata(str(tmp_path / "metadata.sqlite")) as metadata:
        metadata.apply(MetadataUpdate(1, [node_fact()]))
        before = content(metadata)
        for _ in range(3):
            with (
                files_of_at_most(300_000),
                pytest.raises(DiskError, match=r"cannot write .*metadata.sqlite") as caught,
            ):
                metadata.apply(large)
            assert caught.value.hint is not None
            assert before == content(metadata)
        assert metadata.apply(large)
        assert 2000 == len(metadata.events(query(start=0, end=10)))
        assert 2 == metadata.checkpoint()


def test_a_full_database_says_what_a_full_disk_says(metadata: Metadata) -> None:
    """With the same advice as the log gives."""
    database = metadata._file._writing_connection()
    before = content(metadata)
    pages = database.execute("PRAGMA page_count").fetchone()[0]
    database.execute(f"PRAGMA max_page_count = {pages}")
    step = MetadataUpdate(2, [fact("event", time=1.0, kind="x" * 100_000, node=1, detail={})])
    with pytest.raises(DiskError, match="No space left on device") as caught:
        metadata.apply(step)
    assert "free some space" in (caught.value.hint or "")
    assert before == content(metadata)
    database.execute("PRAGMA max_page_count = 1000000")
    assert metadata.apply(step)


def test_an_error_in_an_update_leaves_nothing(metadata: Metadata) -> None:
    """Whatever is wrong, the metadata goes on as it was."""
    before = content(metadata)
    with pytest.raises(DiskError):
        metadata.apply(MetadataUpdate(2, [node_fact(2, "b")], {b"run": object()}))  # type: ignore[dict-item]
    assert before == content(metadata)
    assert metadata.apply(MetadataUpdate(2, [node_fact(2, "b")]))


def test_a_process_that_locks_the_metadata_is_waited_for(metadata: Metadata) -> None:
    """Then the error says that somebody does."""
    metadata._file._writing_connection().execute("PRAGMA busy_timeout = 10")
    other = sqlite3.connect(metadata.path, isolation_level=None)
    try:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(DiskError, match="locked") as caught:
            metadata.apply(MetadataUpdate(2))
        assert "process that has locked the file" in (caught.value.hint or "")
    finally:
        other.close()
    assert metadata.apply(MetadataUpdate(2))


def test_a_damaged_page_is_refused_by_name(tmp_path: Path) -> None:
    """Nothing is made of what cannot be read."""
    path = tmp_path / "metadata.sqlite"
    with Metadata(str(path)) as metadata:
        metadata.apply(MetadataUpdate(1, [node_fact(number, "x" * 500) for number in range(1, 500)]))
    text = bytearray(path.read_bytes())
    text[4096:] = os.urandom(len(text) - 4096)
    path.write_bytes(text)
    with pytest.raises(LogError, match=r"metadata.sqlite is damaged"), Metadata(str(path)) as metadata:
        metadata.nodes()


def test_damage_of_an_open_file_is_still_known_after_it_was_closed(tmp_path: Path) -> None:
    """SQLite writes to the file when it is closed: a file that has changed since its checksum must not count as good then."""
    path = tmp_path / "metadata.sqlite"
    with Metadata(str(path)) as metadata:
        metadata.apply(MetadataUpdate(1, [node_fact(number, f"name-{number}") for number in range(1, 500)]))
        metadata.file.sync()
        assert find_damage(str(path)) is None
        data = path.read_bytes()
        place = data.index(b"name-77")
        with open(path, "r+b") as file:
            file.seek(place)
            file.write(b"fame-77")
        metadata.apply(MetadataUpdate(2, [node_fact(500, "b")]))

    assert "its checksum is wrong" == find_damage(str(path))


def test_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
    """A file stands where it should be."""
    (tmp_path / "file").touch()
    with pytest.raises(DiskError, match="cannot open"):
        Metadata(str(tmp_path / "file" / "metadata.sqlite"))
    (tmp_path / "metadata.sqlite").mkdir()
    with pytest.raises(DiskError, match="cannot open"):
        Metadata(str(tmp_path / "metadata.sqlite"))


def test_errors_without_a_code_are_told_as_they_are() -> None:
    """Nothing is made up about them."""
    error = to_store_error("/x", "read", sqlite3.ProgrammingError("odd"))
    assert ("cannot read /x: odd", None) == (error.message, error.hint)
