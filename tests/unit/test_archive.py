from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from gpulse.errors import DiskError, LogError
from gpulse.store.local import LocalStore
from gpulse.store.log.records import Entry
from gpulse.store.metadata.metadata import Metadata
from gpulse.store.metadata.step import Step
from tests.queries import query


def event(kind: str, time: float = 1000.0) -> Entry:
    """Something that happened."""
    return Entry.of_fact("event", time=time, kind=kind, node=None, detail={})


def kinds(archive: LocalStore) -> list[str]:
    """Everything that happened."""
    return [item.kind for item in archive.events(query(start=0.0, end=1e10))]


def test_a_book_that_could_not_follow_catches_up_with_the_next_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is on disk in the log is found as soon as the disk lets it."""

    apply, full = Metadata.apply, [True]

    def refusing(book: Metadata, step: Step) -> bool:
        if full[0]:
            raise DiskError("no space")
        return apply(book, step)

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


def test_a_log_that_is_not_the_books_is_refused(tmp_path: Path) -> None:
    """Its records would be taken for known ones, and their frames be lost though acknowledged."""

    with LocalStore(str(tmp_path)) as archive:
        archive.commit([event("one"), event("two")])
    shutil.rmtree(tmp_path / "log")

    with pytest.raises(LogError, match="ends at record 0, but 2 were read") as refused:
        LocalStore(str(tmp_path))

    assert str(tmp_path / "log") in refused.value.message
    assert refused.value.hint is not None


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
