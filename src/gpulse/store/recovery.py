"""Open the parts of a head's data directory, and repair what is damaged, so that damage costs only what is damaged."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress

from gpulse.atomic_files import sync_directory
from gpulse.errors import LogError
from gpulse.store.damage import METADATA_SCOPE, Damage, DamageList, set_aside, strip_checksum
from gpulse.store.disk_errors import disk_errors
from gpulse.store.history.duckdb_query import SealedHistory
from gpulse.store.history.segments import describe_missing_samples, list_segment_names
from gpulse.store.log.log import Log
from gpulse.store.log.record_payloads import LogEntry, LostTime
from gpulse.store.log.repair import LostRecords, find_log_id
from gpulse.store.log.segment import DamagedLogError, LogRecord, list_segment_numbers
from gpulse.store.metadata.file_check import (
    BACKUP_SUFFIX,
    CHECK_SUFFIX,
    METADATA_FILE,
    find_backup_damage,
    find_check_damage,
    find_damage,
    restore_database,
)
from gpulse.store.metadata.local_metadata import Metadata
from gpulse.store.metadata.sqlite_file import DamagedMetadataError
from gpulse.store.store import ALL_TIME, Query

log = logging.getLogger(__name__)

DAMAGE_EVENT = "data_damaged"
"""Kind of the event about damage to the data directory."""
_MAX_DAMAGE_EVENTS = 1000
_PROGRESS_SECONDS = 5.0
_RECORDS_PER_CHECK = 100
"""How many records are read before the time is checked."""
STATE_FILES = {
    "fleet-totals.json": "the fleet totals of the last two days restart from zero",
    "notifications.json": "notifications about active findings are sent again",
    "idle-episodes.json": "the idle times of GPUs are counted from now on",
    "remote.json": "samples that the log still has are sent to the time-series database again",
    "history/oldest.json": "deletion of the oldest history segments cannot be detected",
}
"""JSON files with a checksum, and what happens without them. `FORMAT_FILE` is checked by `format_version`."""


_NO_CHECK = "damage to the metadata cannot be detected until a new checksum is written"
_NO_BACKUP = "the metadata has no backup until the next one is written"
_PERMANENT_FILES = {
    METADATA_FILE + CHECK_SUFFIX: _NO_CHECK,
    METADATA_FILE + BACKUP_SUFFIX: _NO_BACKUP,
    **STATE_FILES,
}
"""Files that always exist once they were written, and what happens without them."""


def record_files(directory: str, metadata: Metadata) -> None:
    """Record which files of a data directory exist, so that the loss of one is noticed. Only for its writer.

    Raises:
        DiskError: The metadata cannot be written.
    """
    names = {name for name in _PERMANENT_FILES if os.path.exists(f"{directory}/{name}")}
    if names - metadata.files():
        with disk_errors(f"cannot sync {directory}"):  # a power cut must not look like a loss
            for place in (directory, f"{directory}/history"):
                if os.path.isdir(place):
                    sync_directory(place)
        metadata.set_files(names)


def find_missing_files(directory: str, recorded: Collection[str]) -> list[Damage]:
    """Return the files of a data directory that were recorded and no longer exist."""
    return [
        Damage(f"{directory}/{name}", "the file is missing", affects)
        for name, affects in _PERMANENT_FILES.items()
        if name in recorded and not os.path.exists(f"{directory}/{name}")
    ]


def check_state_file(path: str) -> str | None:
    """Return what is wrong with a JSON file that may have a checksum; None if nothing is, or if it does not exist.

    Raises:
        OSError: The file cannot be read.
    """
    try:
        with open(path, "rb") as file:
            json.loads(strip_checksum(file.read())[0])
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError) as error:
        return str(error) or "it is not valid JSON"
    return None


def set_damaged_state_files_aside(directory: str) -> list[Damage]:
    """Move damaged JSON files out of a data directory. Only for its writer.

    Raises:
        DiskError: A file cannot be read or moved.
    """
    found = []
    for name, affects in STATE_FILES.items():
        path = f"{directory}/{name}"
        with disk_errors(f"cannot read {path}"):
            reason = check_state_file(path)
        if reason is not None:
            moved = set_aside(directory, path, name.replace("/", "-"))
            found.append(Damage(path, reason, affects, moved_to=moved))
    return found


def open_metadata(directory: str, damage: DamageList) -> Metadata:
    """Open the metadata of a data directory; restore it from its backup if it is damaged. Only for the writer.

    If it is lost, because there is no backup either, nothing is applied to it.

    Raises:
        LogError: The file has another format, or belongs to another program.
        DiskError: The disk is full, read-only or failing.
    """
    path = f"{directory}/{METADATA_FILE}"
    with disk_errors(f"cannot read {path}"):
        reason = find_damage(path)
        _check_side_files(directory, path, damage)
        if reason is None and not _may_be_new(directory, path) and not _has_content(path):
            reason = "the file is missing or empty"
    metadata: Metadata | None = None
    if reason is None:
        try:
            metadata = Metadata(path)
        except DamagedMetadataError as error:
            reason = error.message.removeprefix(f"{path} is damaged: ")
    if metadata is None:
        found = restore_database(path, str(reason))
        metadata = Metadata(path)
        if not metadata.applied:
            found = found._replace(start=0.0, end=time.time(), scope=METADATA_SCOPE)
        damage.add(found)
    _report_missing_files(directory, metadata, damage)
    query = Query(*ALL_TIME, kinds=frozenset({DAMAGE_EVENT}), limit=_MAX_DAMAGE_EVENTS)
    for event in metadata.events(query):
        with suppress(TypeError, ValueError):
            past = Damage.from_detail(event.detail)
            damage.add(past, is_known=True, is_gap=past.scope == METADATA_SCOPE)
    return metadata


def _report_missing_files(directory: str, metadata: Metadata, damage: DamageList) -> None:
    """Report once each file that was lost; damaged ones were moved aside, and are reported already."""
    missing = find_missing_files(directory, metadata.files())
    known = {one.path for one in damage.found}
    for one in missing:
        if one.path not in known:
            damage.add(one)
    if missing:
        metadata.set_files(
            metadata.files().difference(one.path.removeprefix(f"{directory}/") for one in missing)
        )


def _has_content(path: str) -> bool:
    return os.path.exists(path) and os.path.getsize(path) > 0


def _may_be_new(directory: str, path: str) -> bool:
    """Return whether the metadata may never have been written, so that a missing file is no damage.

    A log that still starts with its first record has everything, as in the demo, which writes only a log. Without a log, a
    directory with a history or with a backup is not new either.
    """
    numbers = list_segment_numbers(f"{directory}/log", check=False)
    was_written = any(map(os.path.exists, (path + CHECK_SUFFIX, path + BACKUP_SUFFIX)))
    if not numbers:
        return not was_written and not list_segment_names(f"{directory}/history")
    return numbers[0] == 1 and not was_written


def _check_side_files(directory: str, path: str, damage: DamageList) -> None:
    """Check the checksum and the backup of the metadata themselves."""
    reason = find_check_damage(path)
    if reason is not None:
        moved = set_aside(directory, path + CHECK_SUFFIX, METADATA_FILE + CHECK_SUFFIX)
        damage.add(Damage(path + CHECK_SUFFIX, reason, _NO_CHECK, moved_to=moved))
    reason = find_backup_damage(path)
    if reason is not None:
        moved = set_aside(directory, path + BACKUP_SUFFIX, METADATA_FILE + BACKUP_SUFFIX)
        damage.add(Damage(path + BACKUP_SUFFIX, reason, _NO_BACKUP, moved_to=moved))
    with suppress(FileNotFoundError):
        os.unlink(f"{path}{BACKUP_SUFFIX}.part")  # an unfinished backup


def open_log(
    directory: str,
    metadata: Metadata,
    history: SealedHistory,
    damage: DamageList,
    *,
    segment_bytes: int,
    lock_file: int,
) -> Log:
    """Open the log of a data directory, repair it, and bring the metadata up to date with it.

    Raises:
        LogError: The log has a newer format, or belongs to another data directory.
        DiskError: The disk is full, read-only or failing.
    """
    segments = history.segments
    known = bytes.fromhex(segments[-1].log) if segments and segments[-1].log else metadata.log_id
    with disk_errors(f"cannot read the log in {directory}/log"):
        found = find_log_id(f"{directory}/log")
    if known is not None and found is not None and known != found:
        os.close(lock_file)
        raise LogError(
            f"the log in {directory}/log belongs to another data directory",
            hint="restore the log that belongs to this data directory, or use another --data-dir",
        )
    opened = Log(
        f"{directory}/log",
        segment_bytes=segment_bytes,
        repairs=True,
        written=max(metadata.applied, history.sealed_to),
        log_id=known,
        lock_file=lock_file,
    )
    try:
        if metadata.log_id != opened.log_id:
            metadata.set_log_id(opened.log_id)
        kept = min(metadata.applied, history.sealed_to)
        add_lost_records(damage, opened.lost, kept)
        applied, first = metadata.applied, opened.first
        if first > applied + 1:
            if applied:
                reason = f"it ends at record {applied}, but the log starts at record {first}"
                affects = "the sessions, events, findings and processes of the records in between are missing"
                span = 0.0, time.time()
                damage.add(Damage(metadata.path, reason, affects, *span, scope=METADATA_SCOPE))
            metadata.skip_to(first - 1)
        try:
            metadata.replay(_with_progress(opened, metadata.applied + 1))
            for _ in opened.read(history.sealed_to + 1):
                pass
        except DamagedLogError:
            add_lost_records(damage, opened.repair(), kept)
            metadata.replay(opened.read(metadata.applied + 1))
    except BaseException:
        opened.close()
        raise
    return opened


def _with_progress(opened: Log, start: int) -> Iterator[LogRecord]:
    """Yield the records of a log from a position; log how far it is while that takes long."""
    reported = time.monotonic()
    for record in opened.read(start):
        if not record.position % _RECORDS_PER_CHECK and time.monotonic() - reported >= _PROGRESS_SECONDS:
            reported = time.monotonic()
            log.info("updating the metadata from the log: record %d of %d", record.position, opened.last)
        yield record


def add_lost_records(damage: DamageList, lost: Sequence[LostRecords], kept: int) -> None:
    """Report damaged records of the log.

    Args:
        damage: The list to add to.
        lost: The records.
        kept: The position up to which everything is in the metadata and in the history.
    """
    for path, offset, first, last, reason, copy in lost:
        if last < first:
            affects = "no records are missing"
        elif last <= kept:
            affects = "no data is missing: the records are already in the metadata and in the history"
        elif last == max(first, kept + 1):
            affects = f"record {last} is missing, with its samples and events"
        else:
            affects = f"records {max(first, kept + 1)} to {last} are missing, with their samples and events"
        damage.add(Damage(path, f"{reason} at byte {offset}", affects, moved_to=copy))


def add_lost_time(damage: DamageList, directory: str, lost: LostTime) -> None:
    """Report the time for which the log has lost frames that are not in the history."""
    span = lost.span(int(time.time() * 1e6))
    if span is not None:
        start, end = span[0] / 1e6, span[1] / 1e6
        affects = describe_missing_samples(None, None, start, end)
        damage.add(Damage(directory, f"records missing from the log: {lost.records}", affects, start, end))


def add_unreadable_time(damage: DamageList, directory: str, span: tuple[int, int]) -> None:
    """Report the time in microseconds of frames whose layouts were lost with the metadata."""
    start, end = span[0] / 1e6, span[1] / 1e6
    affects = describe_missing_samples(None, None, start, end)
    reason = "the metadata lacks the column layouts of the newest frames"
    damage.add(Damage(directory, reason, affects, start, end))


def find_lost_nodes(metadata: Metadata, history: SealedHistory) -> list[LogEntry]:
    """Return facts about the nodes that only the history has, so that their numbers are not used for other nodes."""
    files = [(segment, file) for segment in history.segments for file in segment.samples]
    lost = {node for _, file in files for node in file.nodes}.difference(metadata.nodes())
    if not lost:
        return []
    log.warning("the metadata was lost; nodes restored from the history: %d", len(lost))
    names = history.node_names(lost)
    taken = {node.name for node in metadata.nodes().values()}.union(names.values())
    start = min(file.start for _, file in files) / 1e6
    found = []
    for node in sorted(lost):
        name = names.get(node, f"node-{node}")
        fields = {"name": name, "host": _host_of(name, taken), "machine": "", "time": start}
        found.append(LogEntry.of_fact("node", id=node, **fields, facts={}, labels={}))
    return found


def _host_of(name: str, names: Collection[str]) -> str:
    """Return the host name of a node by its own: the second node of host gpu01 is called gpu01#2."""
    host, _, number = name.rpartition("#")
    return host if number.isdecimal() and host in names else name
