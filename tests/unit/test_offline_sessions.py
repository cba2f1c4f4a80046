"""The data of a head that does not run: read as it is, and changed only to mark a session to go on."""

from __future__ import annotations

import io
import json
import os
import sqlite3
import stat
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import pytest

from gpulse.cli.session_download import save_file
from gpulse.cluster.client import offline_sessions
from gpulse.errors import GpulseError, LogError, RefusedError
from gpulse.model.session import Session
from gpulse.store.local import LocalStore, OfflineStore, open_offline
from gpulse.store.log.lock import find_writer
from gpulse.store.log.log import Log
from gpulse.store.log.record_payloads import LogEntry
from gpulse.store.store import StoredEvent
from tests.unit.metadata_records import RUN, batch, node_fact
from tests.unit.session_store import START, MemoryStore, gpu, session

RUNNING = Session("id1", "week_long", start=100.0, created=100.0, interval_ms=1000)
DONE = Session("id2", "done", start=50.0, created=50.0, interval_ms=1000, state="finished", end=60.0)


@pytest.fixture
def left(tmp_path: Path) -> Path:
    """What a head left that was killed: its log is ahead of its metadata."""
    directory = tmp_path / "data"
    fields = {key: value for key, value in node_fact().items() if key != "fact"}
    with LocalStore(str(directory)) as archive:
        archive.commit([LogEntry.of_fact("node", **fields), LogEntry.of_fact("session", **DONE.to_dict())])
    with Log(directory / "log") as log:
        entry = LogEntry.of_fact("session", **RUNNING.to_dict())
        log.append(entry.kind, entry.payload)
        log.append(1, batch((105.0, b""), run=RUN))
    return directory


def _content(directory: Path) -> dict[str, bytes]:
    return {
        str(path): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file() and not path.name.endswith("-shm")
    }


def test_what_is_only_in_the_log_is_there(left: Path) -> None:
    """Nothing in the directory changes."""
    before = _content(left)

    with open_offline(str(left)) as store:
        assert [DONE, RUNNING] == store.sessions()
        assert ["a"] == [node.name for node in store.nodes().values()]
        assert 200.0 == store.newest

    assert before == _content(left)


def test_a_directory_that_cannot_be_written_can_be_read(left: Path) -> None:
    """Whoever looks need not be who started the head."""
    paths = [left, *left.rglob("*")]
    for path in paths:
        path.chmod(0o500 if path.is_dir() else 0o400)
    try:
        with open_offline(str(left)) as store:
            assert 2 == len(store.sessions())
    finally:
        for path in paths:
            path.chmod(0o700 if path.is_dir() else 0o600)


def test_a_session_of_a_killed_head_can_be_recovered(left: Path) -> None:
    """It ended, as far as is known, when the last frames came."""
    described = {session.name: session for session in offline_sessions.list_sessions(str(left), 1000.0)}

    assert described["week_long"].recoverable
    assert "1970-01-01T00:03:20.000Z" == described["week_long"].interruptions[0].start_time
    assert not described["done"].recoverable


def test_a_session_is_marked_to_go_on(left: Path) -> None:
    """Once it is, there is nothing left to recover."""
    session = offline_sessions.recover_offline_session(
        str(left), name="week_long", session_id=None, now=300.0
    )

    assert session.is_active
    assert [(200.0, 300.0)] == [tuple(gap) for gap in session.interruptions]
    assert not any(session.recoverable for session in offline_sessions.list_sessions(str(left), 400.0))
    with pytest.raises(RefusedError, match="was stopped and is complete"):
        offline_sessions.recover_offline_session(str(left), name="done", session_id=None, now=300.0)


def test_a_session_becomes_a_file(left: Path) -> None:
    """The same that the head would have written."""
    file, sizes = io.BytesIO(), list[int]()

    with open_offline(str(left)) as store:
        size = offline_sessions.write_session_file(
            store, offline_sessions.find_offline_session(store, "id1"), "json", file, sizes.append
        )

    assert size == len(file.getvalue()) == sizes[-1]
    assert "week_long" == json.loads(file.getvalue())["session_name"]


def test_a_session_that_waits_to_be_resumed_becomes_a_file(left: Path) -> None:
    """It was recovered, and no head has run since."""
    offline_sessions.recover_offline_session(str(left), name="week_long", session_id=None, now=300.0)
    file = io.BytesIO()

    with open_offline(str(left)) as store:
        session = offline_sessions.find_offline_session(store, "week_long")
        offline_sessions.write_session_file(store, session, "json", file)

    document = json.loads(file.getvalue())
    assert ("week_long", "1970-01-01T00:05:00.000Z") == (document["session_name"], document["end_time"])


class OfflineMemory(MemoryStore):
    """A store in memory that no head writes any more."""

    newest = START + 10


@pytest.mark.parametrize(
    ("code", "mode"), [({"where_note": "no line of train.py stands out"}, 0o600), ({}, 0o644)]
)
def test_a_saved_file_with_code_belongs_to_its_owner(tmp_path: Path, code: dict[str, Any], mode: int) -> None:
    """As the one that the head would have written; others can be read by everybody."""
    finding = {"id": "launch_bound", "severity": "high", "summary": "waits", "gpu": 0, "label": "0", **code}
    store = OfflineMemory([gpu(1, 0)], [StoredEvent(START + 3, "findings", 1, {"findings": [finding]})])
    store.add(gpu(1, 0), [START + second for second in range(10)], gpu_utilization_ratio=0.5)
    before = os.umask(0o022)
    try:
        path = save_file(
            "run",
            "json",
            tmp_path,
            lambda draft, progress: offline_sessions.write_session_file(
                cast("OfflineStore", store), session(), "json", draft.file, progress, draft.make_private
            ),
        )
    finally:
        os.umask(before)

    assert mode == stat.S_IMODE(os.stat(path).st_mode)
    assert bool(code) == ("train.py" in Path(path).read_text())


def test_who_holds_a_store_is_known(left: Path) -> None:
    """While a head writes it, it is that head's business."""
    assert find_writer(str(left)) is None

    with LocalStore(str(left)):
        assert os.getpid() == find_writer(str(left))
        with pytest.raises(LogError, match="is writing to it"):
            offline_sessions.recover_offline_session(str(left), name="week_long", session_id=None, now=300.0)

    assert find_writer(str(left / "nothing")) is None


def test_errors_name_the_file_of_the_user(left: Path) -> None:
    """Not the copy of it that is read."""
    metadata = left / "metadata.sqlite"
    for path in left.glob("metadata.sqlite*"):
        path.unlink()
    with closing(sqlite3.connect(metadata)) as other:
        other.execute("CREATE TABLE theirs (x)")
        other.commit()

    with pytest.raises(GpulseError) as caught:
        offline_sessions.list_sessions(str(left), 300.0)
    assert f"{metadata} belongs to another program" == caught.value.message


def test_no_store_is_no_empty_store(tmp_path: Path) -> None:
    """A wrong directory is told, and not filled."""
    with pytest.raises(GpulseError, match="not a head's data directory"):
        open_offline(str(tmp_path))

    assert [] == os.listdir(tmp_path)
