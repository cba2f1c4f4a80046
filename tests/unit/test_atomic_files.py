from __future__ import annotations

import errno
import os
import resource
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from gpulse.atomic_files import create_file, replace_file


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    """And nothing else: no draft, no descriptor."""

    path = tmp_path / "file"
    replace_file(path, b"old")
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match="File too large"), _small_files():
        replace_file(path, b"x" * 100_000)

    assert b"old" == path.read_bytes()
    assert ["file"] == os.listdir(tmp_path)
    assert len(before) == len(os.listdir("/proc/self/fd"))


def test_a_directory_of_that_name_is_not_replaced(tmp_path: Path) -> None:
    """The draft is removed."""

    (tmp_path / "file").mkdir()
    with pytest.raises(IsADirectoryError):
        replace_file(tmp_path / "file", b"new")

    assert ["file"] == os.listdir(tmp_path)


@pytest.mark.parametrize(
    ("expected", "write"),
    [
        (0o604, replace_file),
        (0o604, create_file),
        (0o644, lambda path, data, mode: replace_file(path, data, mode, has_umask=False)),
    ],
)
def test_the_umask_takes_permissions_away(
    tmp_path: Path, expected: int, write: Callable[[Path, bytes, int], None]
) -> None:
    """Unless the file must have exactly those that are given."""

    before = os.umask(0o062)
    try:
        write(tmp_path / "file", b"", 0o644)
    finally:
        os.umask(before)

    assert expected == (tmp_path / "file").stat().st_mode & 0o777


def test_a_link_is_replaced(tmp_path: Path) -> None:
    """What it leads to stays as it is."""

    (tmp_path / "other").write_bytes(b"other")
    (tmp_path / "file").symlink_to("other")
    replace_file(tmp_path / "file", b"new")

    assert b"other" == (tmp_path / "other").read_bytes()
    assert b"new" == (tmp_path / "file").read_bytes()
    assert not (tmp_path / "file").is_symlink()


@pytest.mark.parametrize("name", ["x" * 255, "\u20ac" * 85, "\udcff" * 255, "x" + "\u20ac" * 84])
@pytest.mark.parametrize("write", [replace_file, create_file])
def test_the_longest_name_that_a_file_may_have_is_accepted(
    tmp_path: Path, name: str, write: Callable[[Path, bytes], None]
) -> None:
    """Also with letters of several bytes, and with bytes that are not text."""

    write(tmp_path / name, b"new")

    assert [name] == os.listdir(tmp_path)
    assert b"new" == (tmp_path / name).read_bytes()


@pytest.mark.parametrize("has_links", [True, False])
def test_a_new_file_replaces_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, has_links: bool
) -> None:
    """Not even a link that leads nowhere, and not on file systems without hard links either."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    if not has_links:
        monkeypatch.setattr(os, "link", refuse)
    create_file(tmp_path / "file", b"first")
    (tmp_path / "link").symlink_to("nowhere")
    for name in ("file", "link"):
        with pytest.raises(FileExistsError):
            create_file(tmp_path / name, b"second")

    assert b"first" == (tmp_path / "file").read_bytes()
    assert {"file", "link"} == set(os.listdir(tmp_path))


@contextmanager
def _small_files() -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)


def test_threads_that_replace_the_same_file_do_not_disturb_each_other(tmp_path: Path) -> None:
    """One of them wins, and no temporary file is left."""

    path = tmp_path / "file"

    def write(number: int) -> None:
        for _ in range(50):
            replace_file(path, bytes([number]) * 1000, durable=False)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(4)))

    assert 1 == len(set(path.read_bytes()))
    assert ["file"] == os.listdir(tmp_path)
