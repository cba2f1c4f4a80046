"""Check every file of a data directory against its checksums, and repair the directory if asked."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple

from gpulse.store.damage import Damage, set_aside
from gpulse.store.disk_errors import disk_errors
from gpulse.store.format_version import (
    FORMAT_FILE,
    DamagedFormatError,
    OtherFormatError,
    check_format,
    write_format,
)
from gpulse.store.history.segments import (
    DamagedSegmentError,
    SealedFile,
    Segment,
    check_file,
    describe_damaged_file,
    find_history_gaps,
    list_segment_names,
    list_summary_names,
    read_segment,
)
from gpulse.store.local import LocalStore
from gpulse.store.log.record_payloads import LogEntry
from gpulse.store.log.repair import find_damaged_records
from gpulse.store.log.segment import list_segment_numbers, segment_path
from gpulse.store.metadata.file_check import (
    BACKUP_SUFFIX,
    CHECK_SUFFIX,
    METADATA_FILE,
    find_backup_damage,
    find_check_damage,
    find_damage,
    has_check,
    read_recorded_files,
)
from gpulse.store.recovery import DAMAGE_EVENT, STATE_FILES, check_state_file, find_missing_files

_LOGS = ("log", "agent/spool")
"""The logs in a data directory: that of the head, and the spool of its own agent."""
_MAX_ATTEMPTS = 3
_RETRY_SECONDS = 0.5
ProgressCallback = Callable[[int, int, str], None]
"""Called with the number of bytes checked, the number of all bytes, and the file being checked."""


class ScrubReport(NamedTuple):
    """Result of checking a data directory."""

    files: int
    size_bytes: int
    unprotected: tuple[str, ...]
    """Files that an earlier version of gpulse wrote without a checksum."""
    damage: tuple[Damage, ...]


class _PlannedCheck(NamedTuple):
    """One file to check."""

    path: str
    run: Callable[[], Sequence[Damage]]


def scrub_data(directory: str, progress: ProgressCallback = lambda _done, _all, _path: None) -> ScrubReport:
    """Check every file of a data directory, without changing anything. A head may be running.

    Raises:
        LogError: The directory has another format.
        DiskError: The directory cannot be read.
    """
    unprotected: list[str] = []
    damage: list[Damage] = []
    damage += find_missing_files(directory, read_recorded_files(f"{directory}/{METADATA_FILE}"))
    checks = list(_list_checks(directory, unprotected, damage))
    sizes = [_size(check.path) for check in checks]
    done, total = 0, sum(sizes)
    for check, size in zip(checks, sizes, strict=True):
        progress(done, total, check.path)
        with (
            disk_errors(f"cannot read {check.path}"),
            suppress(FileNotFoundError),
        ):  # merged or removed meanwhile
            damage += check.run()
        done += size
    progress(total, total, "")
    return ScrubReport(len(checks), total, tuple(unprotected), tuple(damage))


def _size(path: str) -> int:
    with suppress(OSError):
        return os.stat(path).st_size
    return 0


def _list_checks(directory: str, unprotected: list[str], damage: list[Damage]) -> Iterator[_PlannedCheck]:
    yield _PlannedCheck(f"{directory}/{FORMAT_FILE}", lambda: _check_format(directory))
    for name in _LOGS:
        path = f"{directory}/{name}"
        numbers = list_segment_numbers(path, check=False) if os.path.isdir(path) else []
        for number in range(numbers[0], numbers[-1] + 1) if numbers else ():
            yield _PlannedCheck(segment_path(path, number), partial(_check_log, path, number))
    yield from _list_metadata_checks(f"{directory}/{METADATA_FILE}", unprotected)
    yield from _list_history_checks(f"{directory}/history", unprotected, damage)
    for name, affects in STATE_FILES.items():
        path = f"{directory}/{name}"
        if os.path.exists(path):
            yield _PlannedCheck(path, partial(_check_state_file, path, affects))


def _check_state_file(path: str, affects: str) -> list[Damage]:
    return _one(path, check_state_file(path), affects)


def _one(path: str, reason: str | None, affects: str) -> list[Damage]:
    return [] if reason is None else [Damage(path, reason, affects)]


def _check_format(directory: str) -> list[Damage]:
    path = f"{directory}/{FORMAT_FILE}"
    try:
        check_format(directory)
    except DamagedFormatError as error:
        return [Damage(path, error.reason, "the head writes the file again when it starts")]
    except OtherFormatError as error:
        affects = "the head does not start; `gpulse head --repair` writes the file again if the metadata has this format"
        return [Damage(path, error.message, affects)]
    return []


def _check_log(directory: str, number: int) -> list[Damage]:
    for attempt in range(_MAX_ATTEMPTS):
        lost = find_damaged_records(directory, number)
        if not lost or attempt == _MAX_ATTEMPTS - 1:
            return [
                Damage(one.path, f"{one.reason} at byte {one.offset}", "its records are missing")
                for one in lost
            ]
        time.sleep(_RETRY_SECONDS)  # the head may have been writing it
    return []


def _list_metadata_checks(path: str, unprotected: list[str]) -> Iterator[_PlannedCheck]:
    if not os.path.exists(path) and not has_check(path):
        return
    if not has_check(path):
        unprotected.append(path)
    backup = path + BACKUP_SUFFIX
    affects = "the head restores the file from its backup and the log when it starts"
    yield _PlannedCheck(path, lambda: _one(path, _retry(lambda: find_damage(path)), affects))
    affects_check = "damage to the metadata cannot be detected"
    yield _PlannedCheck(
        path + CHECK_SUFFIX,
        lambda: _one(path + CHECK_SUFFIX, _retry(lambda: find_check_damage(path)), affects_check),
    )
    if os.path.exists(backup):
        affects_backup = "the metadata has no backup"
        yield _PlannedCheck(
            backup, lambda: _one(backup, _retry(lambda: find_backup_damage(path)), affects_backup)
        )


def _retry(find: Callable[[], str | None]) -> str | None:
    """Check again if something is wrong, since the head may have been writing the file."""
    reason = find()
    for _ in range(_MAX_ATTEMPTS - 1):
        if reason is None:
            return None
        time.sleep(_RETRY_SECONDS)
        reason = find()
    return reason


def _list_history_checks(
    directory: str, unprotected: list[str], damage: list[Damage]
) -> Iterator[_PlannedCheck]:
    segments = []
    for name in [*list_segment_names(directory), *list_summary_names(directory)]:
        path = f"{directory}/{name}"
        try:
            segment = read_segment(directory, name)
        except FileNotFoundError:
            continue  # merged or removed meanwhile
        except DamagedSegmentError as error:
            reason = error.message.removeprefix(f"{path} is damaged: ")
            damage.append(Damage(path, reason, "the samples in it cannot be read"))
            continue
        damage += [describe_damaged_file(path, file) for file in segment.damaged if not file.is_lost]
        if not segment.is_summary:
            segments.append(segment)
        for file in segment.files:
            if file.checksum is None:
                unprotected.append(f"{path}/{file.name}")
            yield _PlannedCheck(f"{path}/{file.name}", partial(_check_sealed, directory, segment, file))
    damage += find_history_gaps(directory, segments)


def _check_sealed(directory: str, segment: Segment, file: SealedFile) -> list[Damage]:
    reason = check_file(directory, segment, file)
    if reason is None:
        return []
    lost = segment.without_files({file.name: reason}).damaged
    return [
        describe_damaged_file(f"{directory}/{segment.name}", one) for one in lost if one.name == file.name
    ]


def repair_data(directory: str, now: float, progress: ProgressCallback) -> ScrubReport:
    """Move everything that is damaged aside, restore what can be restored, and write events about it.

    Args:
        directory: The data directory of a stopped head.
        now: Epoch seconds.
        progress: Called with the progress of the check.

    Raises:
        LogError: A head is running, or the data is from another version of gpulse.
        DiskError: The directory cannot be read or written.
    """
    repaired = _repair_format(directory)
    with LocalStore(directory) as store:
        for one in repaired:
            store.damage.add(one)
        store.check_everything()
        entries = [
            LogEntry.of_fact("event", time=now, node=None, kind=DAMAGE_EVENT, detail=damage.to_detail())
            for damage in store.damage.take()
        ]
        if entries:
            store.commit(entries)
        found = store.damage.found
    report = scrub_data(directory, progress)
    return report._replace(damage=(*found, *(one for one in report.damage if one.start is None)))


def _repair_format(directory: str) -> list[Damage]:
    """Write the format file again if it says another version without a checksum, but the metadata is of this version."""
    try:
        check_format(directory)
    except DamagedFormatError:
        return []  # repaired and reported when the store is opened
    except OtherFormatError as error:
        with disk_errors(f"cannot read {directory}/{METADATA_FILE}"):
            reason = find_damage(f"{directory}/{METADATA_FILE}")
        if error.is_certain or not has_check(f"{directory}/{METADATA_FILE}") or reason is not None:
            raise
        path = f"{directory}/{FORMAT_FILE}"
        moved = set_aside(directory, path, FORMAT_FILE)
        write_format(directory)
        return [Damage(path, error.message, "no data is missing: the file was written again", moved_to=moved)]
    return []
