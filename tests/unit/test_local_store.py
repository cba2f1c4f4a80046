from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from gpulse.errors import DiskError, LogError
from gpulse.store.disk_errors import write_at
from gpulse.store.format_version import prepare_format
from gpulse.store.local import LocalStore
from gpulse.store.log.log import Log
from gpulse.store.log.record_payloads import LogEntry
from gpulse.store.log.segment import DAMAGED, SEGMENT_HEADER_BYTES
from gpulse.store.metadata.local_metadata import Metadata
from gpulse.store.metadata.log_updates import MetadataUpdate
from tests.queries import query


def event(kind: str, time: float = 1000.0) -> LogEntry:
    """Something that happened."""
    return LogEntry.of_fact("event", time=time, kind=kind, node=None, detail={})


def kinds(archive: LocalStore) -> list[str]:
    """Everything that happened."""
    return [item.kind for item in archive.events(query(start=0.0, end=1e10))]


def test_metadata_that_lagged_catches_up_with_the_next_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is on disk in the log is found as soon as the disk lets it."""

    apply, full = Metadata.apply, [True]

    def refusing(metadata: Metadata, step: MetadataUpdate) -> bool:
        if full[0]:
            raise DiskError("no space")
        return apply(metadata, step)

    with LocalStore(str(tmp_path)) as archive:
        archive.commit([event("before")])
        monkeypatch.setattr(Metadata, "apply", refusing)
        archive.commit([event("while", 1001.0)])
        archive.commit([event("still", 1002.0)])
        assert kinds(archive) == ["before"]
        assert archive.usage().is_behind

        full[0] = False
        archive.commit([event("after", 1003.0)])

        assert kinds(archive) == ["before", "while", "still", "after"]
        assert not archive.usage().is_behind


def test_a_log_of_other_metadata_is_refused(tmp_path: Path) -> None:
    """Its records would be taken for known ones, and their frames be lost though acknowledged."""

    for name in ("a", "b"):
        with LocalStore(str(tmp_path / name)) as archive:
            archive.commit([event("one"), event("two")])
    shutil.rmtree(tmp_path / "a" / "log")
    (tmp_path / "b" / "log").rename(tmp_path / "a" / "log")

    with pytest.raises(LogError, match="belongs to another data directory") as refused:
        LocalStore(str(tmp_path / "a"))

    assert str(tmp_path / "a" / "log") in refused.value.message
    assert refused.value.hint is not None


def test_a_log_that_is_gone_is_reported(tmp_path: Path) -> None:
    """A new one continues after the records that the metadata already has."""

    with LocalStore(str(tmp_path)) as archive:
        archive.commit([event("one"), event("two")])
    shutil.rmtree(tmp_path / "log")

    with LocalStore(str(tmp_path)) as archive:
        assert ["all segments are missing at byte 0"] == [found.reason for found in archive.damage.found[:1]]
        archive.commit([event("three")])
        assert 3 == archive.accepted
        assert ["one", "two", "three"] == [
            found.kind for found in archive.events(query(start=0.0, end=2000.0))
        ]


def test_a_probe_must_fit(tmp_path: Path) -> None:
    """An empty record would fit where nothing else does."""

    with LocalStore(str(tmp_path)) as archive:
        before = archive.usage().log_bytes
        archive.repair(100_000)

        assert archive.usage().log_bytes - before >= 100_000
        archive.commit([event("after")])
        assert kinds(archive) == ["after"]
    with LocalStore(str(tmp_path)) as archive:
        assert kinds(archive) == ["after"]


def test_a_log_that_is_repaired_keeps_its_id(tmp_path: Path) -> None:
    """Even if its only header is damaged when a commit fails: the next head must recognize it."""

    with LocalStore(str(tmp_path)) as archive:
        archive.commit([event("one"), event("two")])
        (segment,) = (tmp_path / "log").glob("*.log")
        with segment.open("r+b") as file:
            file.seek(SEGMENT_HEADER_BYTES - 20)
            byte = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte[0] ^ 1]))
        archive.repair()
        archive.commit([event("three")])
        assert kinds(archive) == ["one", "two", "three"]
    with LocalStore(str(tmp_path)) as archive:
        assert kinds(archive) == ["one", "two", "three"]
        assert [1, 2] == [record.position for record in archive._log.read() if record.kind != DAMAGED][:2]


def test_pages_that_a_failed_sync_may_have_dropped_are_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel takes them for written, so that another sync does not write them."""

    written: list[tuple[int, int]] = []

    def write(file: int, data: bytes, offset: int) -> None:
        written.append((offset, len(data)))
        write_at(file, data, offset)

    with LocalStore(str(tmp_path)) as archive:
        archive.commit([event("one")])
        monkeypatch.setattr("gpulse.store.log.log.write_at", write)
        archive.repair()

        size = next((tmp_path / "log").glob("*.log")).stat().st_size
        assert (0, size) in written
        assert kinds(archive) == ["one"]


def test_damaged_metadata_lags_behind_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit succeeds when its entries are in the log; the metadata catches up later."""

    def fail(_: object) -> None:
        raise LogError("the metadata is damaged")

    with LocalStore(str(tmp_path)) as archive:
        with monkeypatch.context() as patch:
            patch.setattr(archive.metadata, "apply", fail)
            archive.commit([event("one")])
            assert 1 == archive.accepted
        archive.catch_up()
        assert kinds(archive) == ["one"]


def test_sealing_that_keeps_failing_does_not_stop_commits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log is searched for damage without the lock that commits need, and the error is passed on."""

    def fail(_: object) -> None:
        raise LogError("a segment of the history is from a newer version")

    find = Log.find_damaged_segments

    def commit_meanwhile(log: Log) -> set[int]:
        archive.commit([event("meanwhile", 1001.0)])
        return find(log)

    with LocalStore(str(tmp_path)) as archive:
        archive.commit([event("one")])
        monkeypatch.setattr(archive._sealer, "seal", fail)
        monkeypatch.setattr(Log, "find_damaged_segments", commit_meanwhile)
        monkeypatch.setattr(Log, "repair", None)
        with pytest.raises(LogError, match="newer version"):
            archive.seal()
        assert ["one", "meanwhile"] == kinds(archive)


def test_a_log_from_its_first_record_on_needs_no_metadata(tmp_path: Path) -> None:
    """As the demo writes it: everything is read from the log, and nothing is reported as damaged."""

    prepare_format(str(tmp_path))
    with Log(tmp_path / "log") as log:
        log.append_many([(event("one").kind, event("one").payload)])

    with LocalStore(str(tmp_path)) as archive:
        assert [] == list(archive.damage.found)
        assert kinds(archive) == ["one"]
