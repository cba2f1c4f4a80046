"""Copies what only heads have into the shared directory: sealed tables of processes, and what divides GPUs among them."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import closing, suppress

from gpulse.errors import LogError
from gpulse.store.base import StoredNode
from gpulse.store.disk import disk_errors, sync_directory
from gpulse.store.history.parquet import connect
from gpulse.store.history.segments import (
    SealedFile,
    Segment,
    list_names,
    new_segment,
    range_of,
    read_segment,
    read_segments,
    remove_segments,
    tidy,
    write_meta,
)
from gpulse.store.history.thinning import SCOPES, minutes_of_gpus
from gpulse.store.shared.facts import NodeName

NODES = "nodes.json"
_MODE = 0o750
"""Heads may run as several users of one group."""


class Copier:
    """Brings one head's tables to its folder in the shared directory, one segment at a time. For one thread."""

    def __init__(self, data_dir: str, folder: str, nodes: Callable[[], Mapping[int, StoredNode]]) -> None:
        """Prepare; nothing is touched yet.

        Args:
            data_dir: The head's directory.
            folder: Its folder in the shared one.
            nodes: Gives its nodes by their numbers.
        """
        self._source = f"{data_dir}/history"
        self._folder = folder
        self._target = f"{folder}/history"
        self._nodes = nodes
        self._named: dict[int, NodeName] = {}
        self._is_tidy = False
        self._empty: set[str] = set()
        """The segments in which there is nothing to copy."""

    def copy(self) -> bool:
        """Copy the oldest segment that is not there yet; False when all of them are.

        Raises:
            GpulseError: It cannot be copied; it can be tried again.
            OSError: The same.
        """
        if not self._is_tidy:
            os.makedirs(self._folder, mode=_MODE, exist_ok=True)
            tidy(self._target)
            os.chmod(self._target, _MODE)
            self._is_tidy = True
        there = [range_of(name) for name in list_names(self._target)]
        for name in list_names(self._source):
            first, last = range_of(name)
            if name in self._empty or any(begin <= first and last <= end for begin, end in there):
                continue
            with suppress(FileNotFoundError):  # it was merged into another one, which comes next
                segment = read_segment(self._source, name)
                if segment.files:
                    self._copy(segment)
                    return True
                self._empty.add(name)
        return False

    def _copy(self, segment: Segment) -> None:
        self._name_nodes()
        with new_segment(self._target, segment.first, segment.last) as path:
            os.chmod(path, _MODE)
            files = []
            for file in segment.files:
                if file.scope in SCOPES:
                    _copied(f"{self._source}/{segment.name}/{file.name}", f"{path}/{file.name}")
                    files.append(file)
            files += self._minutes(segment, path)
            copied = segment._replace(files=tuple(files), thinned=None)
            write_meta(path, copied)
        within = [name for name in os.listdir(self._target) if _lies_within(name, copied)]
        remove_segments(self._target, within)

    def _minutes(self, segment: Segment, path: str) -> list[SealedFile]:
        """What GPUs did in each minute, as far as it is needed to divide their time."""
        if not any(file.scope == "gpu" for file in segment.files):
            return []
        with closing(connect(f"{self._source}/.unfinished-shared")) as database:
            return minutes_of_gpus(database, f"{self._source}/{segment.name}", segment.files, path)

    def _name_nodes(self) -> None:
        """Say which nodes the numbers in the tables are, before there are tables that need it."""
        named = {number: NodeName.of(node) for number, node in self._nodes().items()}
        if named == self._named:
            return
        path = f"{self._folder}/{NODES}"
        with disk_errors(f"write {path}"):
            with open(f"{path}.new", "w", encoding="utf-8") as file:
                json.dump(named, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(f"{path}.new", path)
            sync_directory(self._folder)
        self._named = named

    def drop_before(self, time: float) -> list[str]:
        """Remove the tables that end before a time, and give their names.

        Raises:
            GpulseError: They cannot be removed.
        """
        return drop_tables(self._folder, time)


def drop_tables(folder: str, time: float) -> list[str]:
    """Remove a head's tables that end before a time, and give their names.

    Raises:
        GpulseError: They cannot be removed.
    """
    segments = read_segments(f"{folder}/history")
    old = [one.name for one in segments if one.end is not None and one.end / 1e6 < time]
    if old:
        remove_segments(f"{folder}/history", old)
    return old


def read_names(folder: str) -> dict[int, NodeName]:
    """The nodes of a head by the numbers that its tables have; none when it has no tables.

    Raises:
        OSError: They cannot be read.
        LogError: They cannot be understood.
    """
    try:
        with open(f"{folder}/{NODES}", encoding="utf-8") as file:
            return {int(number): NodeName(*name) for number, name in json.load(file).items()}
    except FileNotFoundError:
        return {}
    except (ValueError, TypeError, AttributeError) as error:
        raise LogError(
            f"{folder}/{NODES} cannot be read: {error}", hint="its head writes it anew when it starts"
        ) from error


def _lies_within(name: str, segment: Segment) -> bool:
    """Whether a segment was merged into another one."""
    try:
        first, last = range_of(name)
    except ValueError:
        return False
    return name != segment.name and segment.first <= first and last <= segment.last


def _copied(source: str, target: str) -> None:
    with disk_errors(f"write {target}"):
        shutil.copyfile(source, target)
        with open(target, "rb") as file:
            os.fsync(file.fileno())
