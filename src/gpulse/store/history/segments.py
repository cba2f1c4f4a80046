"""The directory of sealed segments: list, read, add and remove them.

A segment is a directory named by the log positions it was made from. It is written under another name and renamed when it
is complete on disk, so that the names in the directory say what is sealed, and no other list is needed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

from gpulse.errors import GpulseError, LogError
from gpulse.model.metric import Scope
from gpulse.store.disk import disk_errors, sync_directory

FORMAT = 1
META = "meta.json"
_THIN = "-thin"
_NAME = re.compile(rf"(\d{{20}})-(\d{{20}})({_THIN})?")
_SUMMARY = re.compile(r"summary-\d{20}-\d{20}")
_UNFINISHED = ".unfinished-"
_REMOVED = ".removed-"
_FILE = re.compile(r"[a-z]+-\d+(\.\d+s)?\.parquet")
SHARES = 3600
"""The length of time, in seconds, that a row of a file of shares is of; see `share_files`."""
NODES_PER_FILE = 256
"""Few large files are written in two thirds of the time of small ones."""


class SealedFile(NamedTuple):
    """One Parquet file of a segment."""

    name: str
    scope: Scope
    nodes: tuple[int, ...]
    """In order."""
    rows: int
    size_bytes: int
    start: int
    """The earliest time in it, in microseconds."""
    end: int
    """The latest one."""
    columns: Mapping[str, str]
    """Their SQL types, by name."""
    seconds: int = 0
    """How many seconds a rollup row covers; 0 when every sample has a row."""


class Segment(NamedTuple):
    """The sealed form of one range of the log."""

    first: int
    last: int
    log: str
    """The ID of the log, as hexadecimal digits."""
    frames: int
    received: tuple[int, int] | None
    """When the first and the last of its batches were received, in microseconds; None when there is none."""
    is_compacted: bool
    files: tuple[SealedFile, ...]
    is_summary: bool = False
    """True for a summary of other segments, which are still there."""
    thinned: int | None = None
    """The time of its last sample that only a time-series database has now, in microseconds; None when it has all its samples."""

    @property
    def name(self) -> str:
        """The name of its directory."""
        return _name(self.first, self.last, is_summary=self.is_summary, is_thin=self.thinned is not None)

    @property
    def samples(self) -> list[SealedFile]:
        """The files with a row for every sample."""
        return [file for file in self.files if not file.seconds]

    @property
    def size_bytes(self) -> int:
        """The size of its files on disk."""
        return sum(file.size_bytes for file in self.files)

    @property
    def end(self) -> int | None:
        """The latest time in it, in microseconds; None when it has no rows."""
        return max((file.end for file in self.files), default=None)

    @property
    def shares(self) -> list[SealedFile]:
        """The files that divide the time of GPUs among processes."""
        return [file for file in self.files if file.seconds == SHARES]

    def has(self, scope: Scope, seconds: int = 0) -> bool:
        """Whether it has rows of a scope that cover this much time; samples by default."""
        return any(file.seconds == seconds and file.scope == scope for file in self.files)

    def to_json(self) -> str:
        """Return the metadata that is kept beside the files. Columns that several files share are written once."""
        shared: list[Mapping[str, str]] = []
        files = []
        for file in self.files:
            if file.columns not in shared:
                shared.append(file.columns)
            files.append({**file._asdict(), "columns": shared.index(file.columns)})
        document = {"format": FORMAT, **self._asdict(), "columns": shared, "files": files}
        return json.dumps(document, separators=(",", ":"))


def segment_name(first: int, last: int) -> str:
    """Return the name of the directory for a range of the log."""
    return f"{first:020d}-{last:020d}"


def _name(first: int, last: int, *, is_summary: bool, is_thin: bool) -> str:
    return f"{'summary-' if is_summary else ''}{segment_name(first, last)}{_THIN if is_thin else ''}"


def position_range(name: str) -> tuple[int, int]:
    """Return the first and the last log position that a segment was made from, by its name.

    Raises:
        ValueError: It is not the name of a segment.
    """
    found = _NAME.fullmatch(name)
    if found is None:
        raise ValueError(f"{name!r} is not the name of a segment")
    return int(found[1]), int(found[2])


def list_names(directory: str) -> list[str]:
    """Return the segments that count, oldest first: one within the range of another was merged into it, or thinned.

    Raises:
        LogError: Two segments overlap.
        DiskError: The directory cannot be read.
    """
    while True:
        found = _listed(directory)
        try:
            return _outermost(directory, found)
        except LogError:
            if found == _listed(directory):
                raise  # else it was changed while it was being read


def _listed(directory: str) -> set[str]:
    with disk_errors(f"read {directory}"), suppress(FileNotFoundError):
        return {name for name in os.listdir(directory) if _NAME.fullmatch(name)}
    return set()


def _outermost(directory: str, names: Collection[str]) -> list[str]:
    ranges = [(*position_range(name), name) for name in names]
    kept: list[tuple[int, int, str]] = []
    for first, last, name in sorted(
        ranges, key=lambda item: (item[0], -item[1], not item[2].endswith(_THIN))
    ):
        if last < first:
            raise _damaged(f"{directory}/{name}", "its range ends before it begins")
        if kept and last <= kept[-1][1]:
            continue
        if kept and first <= kept[-1][1]:
            raise _damaged(directory, f"{kept[-1][2]} and {name} overlap")
        kept.append((first, last, name))
    return [name for _, _, name in kept]


def read_segment(directory: str, name: str) -> Segment:
    """Read the metadata of a segment and check it against its files.

    Raises:
        LogError: The segment is damaged, or of a newer format.
        FileNotFoundError: The segment was removed.
    """
    path = f"{directory}/{name}"
    try:
        with open(f"{path}/{META}", encoding="utf-8") as file:
            document = json.load(file)
        if document["format"] > FORMAT:
            raise LogError(
                f"{path} is of format {document['format']}, and this version reads up to {FORMAT}",
                hint="use the newer version that wrote it, or another directory",
            )
        segment = _segment(document)
        if segment.name != name:
            raise ValueError("its metadata is of another segment")
        for sealed in segment.files:
            size = os.stat(f"{path}/{sealed.name}").st_size
            if size != sealed.size_bytes:
                raise ValueError(f"{sealed.name} has {size} bytes instead of {sealed.size_bytes}")
    except FileNotFoundError as error:
        if not os.path.isdir(path):
            raise
        raise _damaged(path, f"{os.path.basename(str(error.filename))} is missing") from error
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise _damaged(path, str(error)) from error
    return segment


@lru_cache(256)
def _interned(columns: tuple[tuple[str, str], ...]) -> dict[str, str]:
    """Return the same object for the same columns: thousands of files have them."""
    return dict(columns)


def _segment(document: dict[str, Any]) -> Segment:
    files = []
    shared = [_interned(tuple(columns.items())) for columns in document["columns"]]
    for raw in document["files"]:
        file = SealedFile(**{field: raw[field] for field in SealedFile._fields})
        if not _FILE.fullmatch(file.name):
            raise ValueError(f"{file.name!r} is not the name of a file of a segment")
        files.append(file._replace(nodes=tuple(file.nodes), columns=shared[raw["columns"]]))
    received = document["received"]
    return Segment(
        int(document["first"]),
        int(document["last"]),
        str(document["log"]),
        int(document["frames"]),
        None if received is None else (int(received[0]), int(received[1])),
        bool(document["is_compacted"]),
        tuple(files),
        bool(document["is_summary"]),
        None if document["thinned"] is None else int(document["thinned"]),
    )


def _damaged(path: str, why: str) -> LogError:
    return LogError(
        f"{path} is damaged: {why}",
        hint="restore it from a copy, or move the directory away to go on without it",
    )


def read_segments(directory: str, known: Iterable[Segment] = ()) -> list[Segment]:
    """Read all segments, oldest first.

    Args:
        directory: The directory of segments.
        known: Those that were read before; a segment never changes.

    Raises:
        LogError: A segment is damaged, or of a newer format.
        DiskError: The directory cannot be read.
    """
    before = {segment.name: segment for segment in known}
    while True:
        names = list_names(directory)
        try:
            with disk_errors(f"read {directory}"):
                return [before.get(name) or read_segment(directory, name) for name in names]
        except GpulseError:
            if names == list_names(directory):
                raise  # else one was merged or removed since the directory was listed


class Summary(NamedTuple):
    """A segment made of others, which replaces them where its coarser rows are enough."""

    segment: Segment
    members: tuple[Segment, ...]


def read_summaries(directory: str, known: Iterable[Segment] = ()) -> list[Segment]:
    """Read all summaries, oldest first; skip those that cannot be read, since their segments have the same data.

    Args:
        directory: The directory of segments.
        known: Those that were read before; a summary never changes.

    Raises:
        DiskError: The directory cannot be read.
    """
    before = {segment.name: segment for segment in known}
    found = []
    for name in _summary_names(directory):
        with suppress(LogError, OSError):
            found.append(before.get(name) or read_segment(directory, name))
    return found


def _summary_names(directory: str) -> list[str]:
    with disk_errors(f"read {directory}"), suppress(FileNotFoundError):
        return sorted(name for name in os.listdir(directory) if _SUMMARY.fullmatch(name))
    return []


def valid_summaries(summaries: Iterable[Segment], segments: Sequence[Segment]) -> list[Summary]:
    """Return the summaries all of whose segments are there, with these segments."""
    begins = {segment.first: place for place, segment in enumerate(segments)}
    ends = {segment.last: place for place, segment in enumerate(segments)}
    found: list[Summary] = []
    for summary in summaries:
        begin, end = begins.get(summary.first), ends.get(summary.last)
        if begin is None or end is None or begin > end:
            continue
        members = tuple(segments[begin : end + 1])
        is_whole = all(one.last + 1 == other.first for one, other in pairwise(members))
        if is_whole and (not found or found[-1].segment.last < summary.first):
            found.append(Summary(summary, members))
    return found


def remove_stale_summaries(directory: str) -> list[str]:
    """Remove the summaries that are not valid any more and return their names. Only for the one writer.

    Raises:
        LogError: A segment is damaged.
        DiskError: A summary cannot be removed.
    """
    kept = {
        item.segment.name for item in valid_summaries(read_summaries(directory), read_segments(directory))
    }
    lost = [name for name in _summary_names(directory) if name not in kept]
    if lost:
        remove_segments(directory, lost)
    return lost


@contextmanager
def new_segment(
    directory: str, first: int, last: int, *, is_summary: bool = False, is_thin: bool = False
) -> Iterator[str]:
    """Yield a new directory, which becomes the segment when the block ends without an error.

    Its files must be on disk by then.

    Raises:
        DiskError: The directory cannot be made or renamed.
    """
    name = _name(first, last, is_summary=is_summary, is_thin=is_thin)
    unfinished = f"{directory}/{_UNFINISHED}{name}"
    with disk_errors(f"write {unfinished}"):
        shutil.rmtree(unfinished, ignore_errors=True)
        os.mkdir(unfinished, 0o700)
    try:
        yield unfinished
        with disk_errors(f"write {directory}/{name}"):
            sync_directory(unfinished)
            os.rename(unfinished, f"{directory}/{name}")
            sync_directory(directory)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def write_meta(path: str, segment: Segment) -> None:
    """Write the metadata of a segment and wait until it is on disk.

    Raises:
        DiskError: The metadata cannot be written.
    """
    with disk_errors(f"write {path}/{META}"), open(f"{path}/{META}", "x", encoding="utf-8") as file:
        file.write(segment.to_json())
        file.flush()
        os.fsync(file.fileno())


def remove_segments(directory: str, names: Collection[str]) -> None:
    """Rename segments so that they do not count, then remove their files.

    Raises:
        DiskError: A segment cannot be removed.
    """
    with disk_errors(f"remove segments in {directory}"):
        gone = []
        for name in sorted(names):
            with suppress(FileNotFoundError):
                os.rename(f"{directory}/{name}", f"{directory}/{_REMOVED}{name}")
                gone.append(f"{directory}/{_REMOVED}{name}")
        sync_directory(directory)
        for path in gone:
            shutil.rmtree(path)


def remove_leftovers(directory: str) -> list[str]:
    """Create the directory, or remove what an ended process left in it. Only for the one writer, when it starts.

    Raises:
        LogError: Two segments overlap.
        DiskError: The directory cannot be created or changed.
    """
    with disk_errors(f"write {directory}"):
        if not os.path.isdir(directory):
            os.makedirs(directory, mode=0o700, exist_ok=True)
            sync_directory(os.path.dirname(os.path.abspath(directory)))
        names = os.listdir(directory)
        left = [name for name in names if name.startswith((_UNFINISHED, _REMOVED))]
        for name in left:
            shutil.rmtree(f"{directory}/{name}")
    merged = sorted({name for name in names if _NAME.fullmatch(name)}.difference(list_names(directory)))
    remove_segments(directory, merged)
    return sorted([*left, *merged])


def sealed_to(segments: Sequence[Segment]) -> int:
    """Return the log position up to which everything is sealed; 0 when nothing is."""
    return segments[-1].last if segments else 0
