"""Sealed segments on disk: list, read, add and remove them.

A segment is a directory named after the log positions that it was made from. It is written under a temporary name and renamed
when it is complete on disk. The names in the history directory therefore show what is sealed; there is no other index.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

from gpulse.atomic_files import make_directories, replace_file, sync_directory
from gpulse.errors import GpulseError, LogError
from gpulse.model.metric_catalog import Scope
from gpulse.store.damage import (
    Damage,
    add_checksum,
    damaged_path,
    describe_time_range,
    file_checksum,
    set_aside,
    strip_checksum,
)
from gpulse.store.disk_errors import disk_errors

log = logging.getLogger(__name__)

SEGMENT_FORMAT = 1
META_FILE = "meta.json"
_THIN_SUFFIX = "-thin"
_NAME = re.compile(rf"(\d{{20}})-(\d{{20}})({_THIN_SUFFIX})?")
_SUMMARY = re.compile(r"summary-\d{20}-\d{20}")
_UNFINISHED = ".unfinished-"
_REMOVED = ".removed-"
_FILE = re.compile(r"[a-z]+-\d+(\.\d+s)?\.parquet")
_SAMPLES_NAME = re.compile(r"(?!share-)[a-z]+-\d+\.parquet")
_OLDEST_FILE = "oldest.json"
"""File with the first log position of the oldest segment that retention has kept."""
_OVERLAP_SECONDS = 60.0
"""Segments of different nodes may overlap in time by about this much."""
SHARE_SECONDS = 3600
"""Seconds that a row of a share file covers; see `gpu_share_files`."""
NODES_PER_FILE = 256
"""Writing few large files takes two thirds of the time of many small ones."""


class SealedFile(NamedTuple):
    """One Parquet file of a segment."""

    name: str
    scope: Scope
    nodes: tuple[int, ...]
    """Sorted."""
    rows: int
    size_bytes: int
    start: int
    """The earliest time in the file, in microseconds."""
    end: int
    """The latest time in the file, in microseconds."""
    columns: Mapping[str, str]
    """SQL types by column name."""
    seconds: int = 0
    """Seconds that a rollup row covers; 0 if every sample has a row."""
    checksum: int | None = None
    """CRC-32 of the file; None if an earlier version of gpulse wrote it."""


class DamagedFile(NamedTuple):
    """A file of a segment, or of a segment that was merged into it, that cannot be used."""

    name: str
    reason: str
    scope: Scope | None
    """None for all scopes."""
    nodes: tuple[int, ...] | None
    """None for all nodes."""
    start: int
    """Microseconds."""
    end: int
    is_lost: bool
    """False if other files have the same data."""


class Segment(NamedTuple):
    """A sealed range of the log."""

    first: int
    last: int
    log: str
    """The ID of the log in hexadecimal."""
    frames: int
    received: tuple[int, int] | None
    """When its first and last batches were received, in microseconds; None if it has no batches."""
    is_compacted: bool
    files: tuple[SealedFile, ...]
    is_summary: bool = False
    """True for a summary of other segments, which are kept."""
    thinned: int | None = None
    """Time of its last removed sample, which only a time-series database has now, in microseconds; None if it is complete."""
    damaged: tuple[DamagedFile, ...] = ()

    @property
    def name(self) -> str:
        """The name of its directory."""
        return _directory_name(
            self.first, self.last, is_summary=self.is_summary, is_thin=self.thinned is not None
        )

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
        """The latest time in the segment, in microseconds; None if it has no rows."""
        ends = [file.end for file in self.files]
        return max([*ends, *(file.end for file in self.damaged)], default=None)

    @property
    def start(self) -> int | None:
        """The earliest time in the segment, in microseconds; None if it has no rows. Rollups start at whole minutes or hours."""
        starts = [file.start for file in self.samples or self.files]
        return min([*starts, *(file.start for file in self.damaged)], default=None)

    @property
    def shares(self) -> list[SealedFile]:
        """The files that divide the time of GPUs among processes."""
        return [file for file in self.files if file.seconds == SHARE_SECONDS]

    def has(self, scope: Scope, seconds: int = 0) -> bool:
        """Whether it has rows of a scope that cover a number of seconds; 0 for samples."""
        return any(file.seconds == seconds and file.scope == scope for file in self.files)

    def without_files(self, reasons: Mapping[str, str]) -> Segment:
        """Return the segment without damaged files. Files from which their data can be computed again take their place.

        Args:
            reasons: What is wrong with each file, by name.
        """
        gone = [file for file in self.files if file.name in reasons]
        files = [file for file in self.files if file.name not in reasons]
        unreadable = {(file.scope, node) for file in gone if not file.seconds for node in file.nodes}
        unreadable |= {
            (one.scope, node)
            for one in self.damaged
            if one.scope is not None and _SAMPLES_NAME.fullmatch(one.name)
            for node in one.nodes or ()
        }
        is_compacted = self.is_compacted
        lost = []
        for file in gone:
            if file.seconds == SHARE_SECONDS:  # queries then divide GPU time themselves
                files = [one for one in files if one.seconds != SHARE_SECONDS]
                is_lost = False
            elif file.seconds:  # queries then use samples, if all of them exist
                is_lost = self.thinned is not None or any(
                    (file.scope, node) in unreadable for node in file.nodes
                )
                if not is_lost:
                    is_compacted = False
            else:
                is_lost = True
            lost.append(
                DamagedFile(
                    file.name, reasons[file.name], file.scope, file.nodes, file.start, file.end, is_lost
                )
            )
        if not is_compacted:
            files = [one for one in files if one.seconds in (0, SHARE_SECONDS)]
        return self._replace(files=tuple(files), is_compacted=is_compacted, damaged=(*self.damaged, *lost))

    def to_json(self) -> str:
        """Return the content of the metadata file. Columns that several files have in common are written once."""
        shared: list[Mapping[str, str]] = []
        files = []
        for file in self.files:
            if file.columns not in shared:
                shared.append(file.columns)
            files.append({**file._asdict(), "columns": shared.index(file.columns)})
        document = {"format": SEGMENT_FORMAT, **self._asdict(), "columns": shared, "files": files}
        document["damaged"] = [one._asdict() for one in self.damaged]
        return add_checksum(json.dumps(document, separators=(",", ":")).encode()).decode()


def segment_name(first: int, last: int) -> str:
    """Return the name of the directory for a range of the log."""
    return f"{first:020d}-{last:020d}"


def _directory_name(first: int, last: int, *, is_summary: bool, is_thin: bool) -> str:
    return f"{'summary-' if is_summary else ''}{segment_name(first, last)}{_THIN_SUFFIX if is_thin else ''}"


def position_range(name: str) -> tuple[int, int]:
    """Return the first and the last log position of a segment from its name.

    Raises:
        ValueError: It is not a valid segment name.
    """
    found = _NAME.fullmatch(name)
    if found is None:
        raise ValueError(f"{name!r} is not a valid segment name")
    return int(found[1]), int(found[2])


def list_segment_names(directory: str) -> list[str]:
    """Return the names of current segments, oldest first, without those that were merged into another one or thinned.

    Raises:
        LogError: Two segments overlap.
        DiskError: The directory cannot be read.
    """
    while True:
        found = _read_names(directory)
        try:
            return _drop_nested(directory, found)
        except LogError:
            if found == _read_names(directory):
                raise  # otherwise it was changed while it was being listed


def _read_names(directory: str) -> set[str]:
    with disk_errors(f"cannot read {directory}"), suppress(FileNotFoundError):
        return {name for name in os.listdir(directory) if _NAME.fullmatch(name)}
    return set()


def _drop_nested(directory: str, names: Collection[str]) -> list[str]:
    ranges = [(*position_range(name), name) for name in names]
    kept: list[tuple[int, int, str]] = []
    for first, last, name in sorted(
        ranges, key=lambda item: (item[0], -item[1], not item[2].endswith(_THIN_SUFFIX))
    ):
        if last < first:
            raise _damage_error(f"{directory}/{name}", "the range in its name ends before it starts")
        if kept and last <= kept[-1][1]:
            continue
        if kept and first <= kept[-1][1]:
            raise _damage_error(directory, f"the segments {kept[-1][2]} and {name} overlap")
        kept.append((first, last, name))
    return [name for _, _, name in kept]


class DamagedSegmentError(LogError):
    """The metadata of a segment is damaged, so that nothing in the segment can be used."""


def read_segment(directory: str, name: str) -> Segment:
    """Read the metadata of a segment and check it against its files; damaged files are left out of it.

    Raises:
        DamagedSegmentError: The metadata of the segment is damaged.
        LogError: The segment has a newer format.
        FileNotFoundError: The segment was removed.
    """
    path = f"{directory}/{name}"
    try:
        with open(f"{path}/{META_FILE}", "rb") as file:
            data, is_protected = strip_checksum(file.read())
        document = json.loads(data)
        if not is_protected and set(document) != _UNPROTECTED_FIELDS:
            raise ValueError("its checksum is missing")
        if document["format"] > SEGMENT_FORMAT:
            raise LogError(
                f"{path} has format {document['format']}; this version of gpulse reads up to format {SEGMENT_FORMAT}",
                hint="use the newer version of gpulse that wrote it, or another directory",
            )
        segment = _parse_segment(document)
        if segment.name != name:
            raise ValueError("its metadata belongs to another segment")
        reasons = {file.name: reason for file in segment.files if (reason := _check_size(path, file))}
    except FileNotFoundError as error:
        if not os.path.isdir(path):
            raise
        raise _damage_error(path, f"{os.path.basename(str(error.filename))} is missing") from error
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise _damage_error(path, str(error)) from error
    return segment.without_files(reasons) if reasons else segment


_UNPROTECTED_FIELDS = {"format", "columns", *Segment._fields} - {"damaged"}
"""The fields of metadata without a checksum, which earlier versions of gpulse wrote."""


def _check_size(path: str, file: SealedFile) -> str | None:
    """Return what is wrong with the size of a file; None if it is right.

    Raises:
        FileNotFoundError: The segment was removed.
    """
    try:
        size = os.stat(f"{path}/{file.name}").st_size
    except FileNotFoundError:
        if not os.path.isdir(path):
            raise
        return "the file is missing"
    return None if size == file.size_bytes else f"it has {size} bytes instead of {file.size_bytes}"


@lru_cache(256)
def _interned(columns: tuple[tuple[str, str], ...]) -> dict[str, str]:
    """Return the same object for equal columns, since thousands of files have them."""
    return dict(columns)


def _parse_segment(document: dict[str, Any]) -> Segment:
    files = []
    shared = [_interned(tuple(columns.items())) for columns in document["columns"]]
    for raw in document["files"]:
        file = SealedFile(
            **{"checksum": None, **{name: raw[name] for name in SealedFile._fields if name in raw}}
        )
        if not _FILE.fullmatch(file.name):
            raise ValueError(f"{file.name!r} is not a valid name of a segment file")
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
        tuple(DamagedFile(**raw) for raw in document.get("damaged", ())),
    )


def _damage_error(path: str, why: str) -> DamagedSegmentError:
    return DamagedSegmentError(
        f"{path} is damaged: {why}",
        hint="restore it from a backup, or move the directory away to continue without it",
    )


def read_segments(directory: str, known: Iterable[Segment] = ()) -> list[Segment]:
    """Read all segments, oldest first, without those whose metadata is damaged.

    Args:
        directory: The directory of segments.
        known: Segments that were read before; segments never change.

    Raises:
        LogError: A segment has a newer format.
        DiskError: The directory cannot be read.
    """
    before = {segment.name: segment for segment in known}
    while True:
        names = list_segment_names(directory)
        found = []
        try:
            with disk_errors(f"cannot read {directory}"):
                for name in names:
                    with suppress(DamagedSegmentError):
                        found.append(before.get(name) or read_segment(directory, name))
            if len(found) == len(names) or names == list_segment_names(directory):
                return found
        except GpulseError:
            if names == list_segment_names(directory):
                raise  # otherwise one was merged or removed since the directory was listed


def check_file(directory: str, segment: Segment, file: SealedFile) -> str | None:
    """Return what is wrong with a file by its checksum; None if nothing is, or if it has no checksum.

    Raises:
        FileNotFoundError: The segment was merged or removed.
    """
    path = f"{directory}/{segment.name}"
    if file.checksum is None:
        return None
    try:
        return None if file_checksum(f"{path}/{file.name}") == file.checksum else "its checksum is wrong"
    except FileNotFoundError:
        if not os.path.isdir(path):
            raise
        return "the file is missing"
    except OSError as error:
        return f"it cannot be read: {error.strerror}"


def check_segment(directory: str, segment: Segment) -> Segment:
    """Check the files of a segment, and return it without those that are damaged, which are moved aside.

    Only for the writer of the directory.

    Raises:
        DiskError: A file cannot be moved, or the segment does not exist any more.
    """
    with disk_errors(f"cannot read {directory}/{segment.name}"):
        reasons = {
            file.name: reason for file in segment.files if (reason := check_file(directory, segment, file))
        }
    for name, reason in reasons.items():
        moved = set_file_aside(directory, segment, name)
        log.error("%s/%s/%s is damaged: %s (moved to %s)", directory, segment.name, name, reason, moved)
    return segment.without_files(reasons) if reasons else segment


def set_file_aside(directory: str, segment: Segment, name: str) -> str | None:
    """Move a damaged file of a segment out of the history, and return its new path.

    Raises:
        DiskError: The file cannot be moved.
    """
    path = f"{directory}/{segment.name}/{name}"
    return set_aside(os.path.dirname(directory), path, f"history-{segment.name}-{name}")


def set_damaged_segments_aside(directory: str) -> list[Damage]:
    """Move damaged files, and segments whose metadata is damaged, out of the history. Only for the writer of the data directory.

    Damage that only the content of a file shows is found when the file is read.

    Raises:
        LogError: A segment has a newer format.
        DiskError: The directory cannot be read, or a segment cannot be moved.
    """
    found = []
    for name in [*list_segment_names(directory), *list_summary_names(directory)]:
        path = f"{directory}/{name}"
        try:
            with disk_errors(f"cannot read {path}"):
                segment = read_segment(directory, name)
            for file in segment.damaged:
                if os.path.exists(f"{path}/{file.name}"):
                    moved = set_file_aside(directory, segment, file.name)
                    found.append(describe_damaged_file(path, file, moved))
        except DamagedSegmentError as error:
            moved = set_aside(os.path.dirname(directory), path, f"history-{name}")
            reason = error.message.removeprefix(f"{path} is damaged: ")
            affects = "its samples cannot be read, unless they are still in the log"
            if _SUMMARY.fullmatch(name):
                affects = "the summary is written again"
            found.append(Damage(path, reason, affects, moved_to=moved))
    return found


def find_history_gaps(directory: str, segments: Sequence[Segment]) -> list[Damage]:
    """Return what is missing from the history: damaged files, and segments that do not exist any more."""
    found = [
        describe_damaged_file(f"{directory}/{segment.name}", file)
        for segment in segments
        for file in segment.damaged
        if file.is_lost or not _is_moved(directory, segment, file)
    ]
    edges: list[tuple[int, float]] = []
    oldest = read_oldest(directory)
    if oldest is not None:
        edges.append((oldest - 1, 0.0))
    for segment in segments:
        start, end = segment.start, segment.end
        if edges and segment.first > edges[-1][0] + 1 and start is not None:
            begin, stop = max(0.0, edges[-1][1] - _OVERLAP_SECONDS), start / 1e6 + _OVERLAP_SECONDS
            path = f"{directory}/{segment_name(edges[-1][0] + 1, segment.first - 1)}"
            found.append(
                Damage(
                    path,
                    "the segment is missing",
                    describe_missing_samples(None, None, begin, stop),
                    begin,
                    stop,
                )
            )
        edges.append((segment.last, edges[-1][1] if end is None and edges else (end or 0) / 1e6))
    return found


def _is_moved(directory: str, segment: Segment, file: DamagedFile) -> bool:
    """Whether a file was moved aside, and therefore reported, before."""
    return os.path.exists(damaged_path(os.path.dirname(directory), f"history-{segment.name}-{file.name}"))


def describe_damaged_file(path: str, file: DamagedFile, moved: str | None = None) -> Damage:
    """Return what is missing because of a damaged file.

    Args:
        path: The directory of its segment.
        file: The file.
        moved: Where it was moved.
    """
    path = f"{path}/{file.name}"
    if not file.is_lost:
        affects = "no samples are missing: other files contain the same data"
        return Damage(path, file.reason, affects, moved_to=moved)
    span = file.start / 1e6, file.end / 1e6
    affects = describe_missing_samples(file.scope, file.nodes, *span)
    return Damage(path, file.reason, affects, *span, file.nodes, file.scope, moved)


def describe_missing_samples(
    scope: Scope | None, nodes: tuple[int, ...] | None, start: float, end: float
) -> str:
    """Return a sentence that says which samples are missing."""
    which = "" if nodes is None else f" of {len(nodes)} node{'s' * (len(nodes) != 1)}"
    return f"{scope or 'all'} samples{which} {describe_time_range(start, end)} are missing"


def read_oldest(directory: str) -> int | None:
    """Return the first log position that retention has kept; None if it is unknown."""
    try:
        with open(f"{directory}/{_OLDEST_FILE}", "rb") as file:
            return int(json.loads(strip_checksum(file.read())[0])["first"])
    except (OSError, ValueError, TypeError, LookupError, RecursionError):
        return None


def write_oldest(directory: str, first: int) -> None:
    """Record the first log position that retention keeps, so that segments deleted by something else are noticed.

    Raises:
        DiskError: The file cannot be written.
    """
    path = f"{directory}/{_OLDEST_FILE}"
    with disk_errors(f"cannot write {path}"):
        replace_file(path, add_checksum(json.dumps({"first": first}).encode()), 0o600)


class DaySummary(NamedTuple):
    """A summary of a day, used instead of its segments where coarser rows are sufficient."""

    segment: Segment
    members: tuple[Segment, ...]


def read_summaries(directory: str, known: Iterable[Segment] = ()) -> list[Segment]:
    """Read all summaries, oldest first; unreadable ones are skipped, since their segments have the same data.

    Args:
        directory: The directory of segments.
        known: Summaries that were read before; summaries never change.

    Raises:
        DiskError: The directory cannot be read.
    """
    before = {segment.name: segment for segment in known}
    found = []
    for name in list_summary_names(directory):
        with suppress(LogError, OSError):
            summary = before.get(name) or read_segment(directory, name)
            if not summary.damaged:
                found.append(summary)
    return found


def list_summary_names(directory: str) -> list[str]:
    """Return the names of the summaries, oldest first.

    Raises:
        DiskError: The directory cannot be read.
    """
    with disk_errors(f"cannot read {directory}"), suppress(FileNotFoundError):
        return sorted(name for name in os.listdir(directory) if _SUMMARY.fullmatch(name))
    return []


def valid_summaries(summaries: Iterable[Segment], segments: Sequence[Segment]) -> list[DaySummary]:
    """Return the summaries whose segments all exist, with these segments."""
    begins = {segment.first: place for place, segment in enumerate(segments)}
    ends = {segment.last: place for place, segment in enumerate(segments)}
    found: list[DaySummary] = []
    for summary in summaries:
        begin, end = begins.get(summary.first), ends.get(summary.last)
        if begin is None or end is None or begin > end:
            continue
        members = tuple(segments[begin : end + 1])
        is_whole = all(one.last + 1 == other.first for one, other in pairwise(members))
        if is_whole and (not found or found[-1].segment.last < summary.first):
            found.append(DaySummary(summary, members))
    return found


def remove_stale_summaries(directory: str) -> list[str]:
    """Remove the summaries that are no longer valid and return their names. Only for the writer of the directory.

    Raises:
        LogError: A segment is damaged.
        DiskError: A summary cannot be removed.
    """
    kept = {
        item.segment.name for item in valid_summaries(read_summaries(directory), read_segments(directory))
    }
    lost = [name for name in list_summary_names(directory) if name not in kept]
    if lost:
        remove_segments(directory, lost)
    return lost


@contextmanager
def new_segment(
    directory: str, first: int, last: int, *, is_summary: bool = False, is_thin: bool = False
) -> Iterator[str]:
    """Yield a new directory that becomes a segment when the block ends without an error.

    The block must sync its files to disk.

    Raises:
        DiskError: The directory cannot be created or renamed.
    """
    name = _directory_name(first, last, is_summary=is_summary, is_thin=is_thin)
    unfinished = f"{directory}/{_UNFINISHED}{name}"
    with disk_errors(f"cannot write {unfinished}"):
        shutil.rmtree(unfinished, ignore_errors=True)
        os.mkdir(unfinished, 0o700)
    try:
        yield unfinished
        with disk_errors(f"cannot write {directory}/{name}"):
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
    with (
        disk_errors(f"cannot write {path}/{META_FILE}"),
        open(f"{path}/{META_FILE}", "x", encoding="utf-8") as file,
    ):
        file.write(segment.to_json())
        file.flush()
        os.fsync(file.fileno())


def remove_segments(directory: str, names: Collection[str]) -> None:
    """Rename segments so that they are ignored, then remove their files.

    Raises:
        DiskError: A segment cannot be removed.
    """
    with disk_errors(f"cannot remove segments in {directory}"):
        gone = []
        for name in sorted(names):
            with suppress(FileNotFoundError):
                os.rename(f"{directory}/{name}", f"{directory}/{_REMOVED}{name}")
                gone.append(f"{directory}/{_REMOVED}{name}")
        sync_directory(directory)
        for path in gone:
            shutil.rmtree(path)


def remove_leftovers(directory: str) -> list[str]:
    """Create the directory, or remove leftovers of an earlier process. Only for the writer, when it starts.

    Raises:
        LogError: Two segments overlap.
        DiskError: The directory cannot be created or changed.
    """
    with disk_errors(f"cannot write to {directory}"):
        make_directories(directory)
        names = os.listdir(directory)
        left = [name for name in names if name.startswith((_UNFINISHED, _REMOVED))]
        for name in left:
            shutil.rmtree(f"{directory}/{name}")
    merged = sorted(
        {name for name in names if _NAME.fullmatch(name)}.difference(list_segment_names(directory))
    )
    remove_segments(directory, merged)
    return sorted([*left, *merged])


def sealed_to(segments: Sequence[Segment]) -> int:
    """Return the log position up to which everything is sealed; 0 if nothing is."""
    return segments[-1].last if segments else 0


def newest_us(segments: Iterable[Segment]) -> int:
    """Return when the newest sealed batch was received, in microseconds; 0 if there is none."""
    return max((segment.received[1] for segment in segments if segment.received), default=0)
