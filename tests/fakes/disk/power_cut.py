"""What a power cut leaves of a directory, from the trace of everything that programs did to it (`write_trace.c`).

The model is strict, but one that file systems follow. A synced file has its content, under any name that it still has.
Of a file that was changed since, every page of 4 KiB is either the old one or the new one, and so is its size; pages
that were never written are zeros. Of the changes to a directory since it was synced (names that were created, renamed
and removed), the first few are there and the others are not. Syncing a file does not keep its name.
"""

from __future__ import annotations

import fcntl
import json
import os
import random
import shutil
import struct
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

_ENTRY = struct.Struct("<IIQQc7x")
_PAGE_BYTES = 4096
_UNTRACED = ("-shm",)
"""Files that are written through shared memory; they are rebuilt after every crash."""


class _File:
    """A file: what is on disk for certain, and what programs see."""

    def __init__(self, content: bytes = b"", synced: bytes = b"") -> None:
        self.content = bytearray(content)
        self.synced = synced
        self.dirty: set[int] = set()
        """Pages that were written since the last sync."""

    def write(self, offset: int, data: bytes) -> None:
        if offset > len(self.content):
            self.content.extend(bytes(offset - len(self.content)))
        self.content[offset : offset + len(data)] = data
        self.dirty.update(range(offset // _PAGE_BYTES, (offset + len(data) - 1) // _PAGE_BYTES + 1))

    def truncate(self, size: int) -> None:
        if size <= len(self.content):
            del self.content[size:]
        else:
            self.content.extend(bytes(size - len(self.content)))
        self.dirty.add(size // _PAGE_BYTES)

    def sync(self) -> None:
        self.synced = bytes(self.content)
        self.dirty.clear()

    def after_cut(self, chance: random.Random) -> bytes:
        """Return what a power cut leaves."""
        if not self.dirty:
            return self.synced
        outcome = chance.random()
        if outcome < 0.3:
            return self.synced
        if outcome < 0.4:
            return bytes(self.content)
        size = chance.choice((len(self.synced), len(self.content)))
        left = bytearray(self.synced[:size].ljust(size, b"\0"))
        for page in self.dirty:
            if chance.random() < 0.5:
                begin = page * _PAGE_BYTES
                new = self.content[begin : min(begin + _PAGE_BYTES, size)]
                left[begin : begin + len(new)] = new
        return bytes(left[:size])


class _Directory:
    """A directory: its names on disk for certain, and the changes since."""

    def __init__(self) -> None:
        self.names: dict[str, _File | _Directory] = {}
        self._synced: dict[str, _File | _Directory] = {}
        self._changes: list[dict[str, _File | _Directory | None]] = []
        """What each change since the last sync did to names; None for a name that is gone."""

    def change(self, names: dict[str, _File | _Directory | None]) -> None:
        _apply(self.names, names)
        self._changes.append(names)

    def sync(self) -> None:
        self._synced = dict(self.names)
        self._changes.clear()

    def after_cut(self, chance: random.Random) -> dict[str, _File | _Directory]:
        """Return what a power cut leaves."""
        left = dict(self._synced)
        for names in self._changes[: chance.randint(0, len(self._changes))]:
            _apply(left, names)
        return left


class _NoChance(random.Random):
    """Loses everything that was not synced."""

    def random(self) -> float:
        """Return the lowest number."""
        return 0.0

    def randint(self, a: int, b: int) -> int:  # noqa: ARG002
        """Return the lowest number."""
        return a


def _apply(names: dict[str, _File | _Directory], change: dict[str, _File | _Directory | None]) -> None:
    for name, item in change.items():
        if item is None:
            names.pop(name, None)
        else:
            names[name] = item


class Disk:
    """A directory whose writes are traced, and which can lose its power."""

    def __init__(self, root: Path, chance: random.Random) -> None:
        """Prepare an existing directory; everything in it counts as synced.

        Args:
            root: The directory.
            chance: Decides what a power cut leaves.
        """
        self.root = root
        self.notes: list[dict[str, Any]] = []
        """What programs wrote to the trace themselves (`noted_frames`)."""
        self.lost_bytes = 0
        """How much the power cuts have changed, so that a test can tell that they did anything."""
        self._chance = chance
        self.keeps_unsynced = True
        """Whether a power cut keeps some of what was not synced; otherwise everything is lost."""
        self._trace = root.with_name(f"{root.name}.trace")
        self._begin()

    @property
    def env(self) -> dict[str, str]:
        """The environment of programs that use the disk."""
        return {
            "LD_PRELOAD": str(_compile_library(self.root.with_name("write_trace.so"))),
            "TRACE_ROOT": str(self.root),
            "TRACE_FILE": str(self._trace),
        }

    def cut(self, kill: Callable[[], None]) -> None:
        """Cut the power: end the programs between two calls, and lose what was not synced.

        Args:
            kill: Ends all programs that use the disk.
        """
        with open(self._trace, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            kill()
        self._replay()
        self._check_trace()
        before = _read_tree(self.root)
        self._write_tree()
        after = _read_tree(self.root)
        self.lost_bytes += sum(
            abs(len(content) - len(after.get(name, b""))) for name, content in before.items()
        )
        self._begin()

    def collect(self) -> None:
        """Read the notes of programs that have ended without a power cut."""
        self._replay()
        self._begin()

    def _begin(self) -> None:
        self._trace.write_bytes(b"")
        self._inodes: dict[int, _File] = {}
        self._top = self._read_directory(self.root)

    def _read_directory(self, path: Path) -> _Directory:
        directory = _Directory()
        for item in path.iterdir():
            if item.is_dir():
                directory.names[item.name] = self._read_directory(item)
            else:
                content = item.read_bytes()
                inode = item.stat().st_ino
                directory.names[item.name] = self._inodes.setdefault(inode, _File(content, content))
        directory.sync()
        return directory

    def _replay(self) -> None:
        for kind, inode, offset, one, two in _read_trace(self._trace):
            match kind:
                case b"w":
                    self._file(inode).write(offset, one)
                case b"t":
                    self._file(inode).truncate(offset)
                case b"s":
                    self._file(inode).sync()
                case b"d":
                    self._find(one.decode()).sync()
                case b"c":
                    self._inodes[inode] = _File()
                    self._put(one.decode(), self._inodes[inode])
                case b"m":
                    self._put(one.decode(), _Directory())
                case b"u":
                    self._put(one.decode(), None)
                case b"l":
                    self._put(two.decode(), self._find(one.decode()))
                case b"r":
                    self._rename(one.decode(), two.decode())
                case b"n":
                    self.notes.append(json.loads(one))
                case _:
                    raise AssertionError(f"unknown entry {kind!r}")

    def _file(self, inode: int) -> _File:
        assert inode in self._inodes, f"a write to a file (inode {inode}) that was never opened"
        return self._inodes[inode]

    def _parent(self, path: str) -> tuple[_Directory, str]:
        *parts, name = os.path.normpath(path).removeprefix(f"{self.root}/").split("/")
        directory = self._top
        for part in parts:
            below = directory.names[part]
            assert isinstance(below, _Directory)
            directory = below
        return directory, name

    def _find(self, path: str) -> Any:
        if os.path.normpath(path) == str(self.root):
            return self._top
        directory, name = self._parent(path)
        return directory.names[name]

    def _put(self, path: str, item: _File | _Directory | None) -> None:
        directory, name = self._parent(path)
        directory.change({name: item})

    def _rename(self, old: str, new: str) -> None:
        moved = self._find(old)
        (source, old_name), (target, new_name) = self._parent(old), self._parent(new)
        if source is target:
            source.change({old_name: None, new_name: moved})
        else:
            target.change({new_name: moved})
            source.change({old_name: None})

    def _check_trace(self) -> None:
        """Check that the trace has everything: what it says that programs see is what they see."""
        real, traced = _read_tree(self.root), dict(_walk(self._top, lambda item: item.names, ""))
        assert sorted(real) == sorted(traced)
        for name, content in real.items():
            file = traced[name]
            assert name.endswith(_UNTRACED) or content == file.content, f"the trace lacks writes to {name}"

    def _write_tree(self) -> None:
        chance = self._chance if self.keeps_unsynced else _NoChance()
        left = [
            (name, file.after_cut(chance))
            for name, file in _walk(self._top, lambda item: item.after_cut(chance), "", keep_empty=True)
        ]
        for item in self.root.iterdir():
            shutil.rmtree(item) if item.is_dir() else item.unlink()
        for name, content in left:
            path = self.root / name
            if content is None:
                path.mkdir(mode=0o700, parents=True, exist_ok=True)
            else:
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                path.touch(mode=0o600)
                path.write_bytes(content)


def _read_trace(path: Path) -> Iterator[tuple[bytes, int, int, bytes, bytes]]:
    data = path.read_bytes()
    place = 0
    while place < len(data):
        size, first, inode, offset, kind = _ENTRY.unpack_from(data, place)
        body = data[place + _ENTRY.size : place + _ENTRY.size + size]
        place += _ENTRY.size + size
        yield kind, inode, offset, body[:first], body[first:]


def _walk(
    directory: _Directory,
    names: Callable[[_Directory], dict[str, _File | _Directory]],
    prefix: str,
    *,
    keep_empty: bool = False,
) -> Iterator[tuple[str, Any]]:
    for name, item in names(directory).items():
        if isinstance(item, _Directory):
            if keep_empty:
                yield f"{prefix}{name}", _EMPTY
            yield from _walk(item, names, f"{prefix}{name}/", keep_empty=keep_empty)
        else:
            yield f"{prefix}{name}", item


class _EmptyDirectory:
    def after_cut(self, _: random.Random) -> None:
        """Return nothing: a directory has no content."""


_EMPTY = _EmptyDirectory()


def _read_tree(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def _compile_library(made: Path) -> Path:
    """Compile `write_trace.c`, unless that was done before."""
    if not made.exists():
        source = Path(__file__).with_name("write_trace.c")
        command = ["cc", "-O1", "-shared", "-fPIC", "-o", str(made), str(source), "-ldl"]
        subprocess.run(command, check=True, capture_output=True)
    return made
