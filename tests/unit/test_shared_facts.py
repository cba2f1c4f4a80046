"""What heads tell each other through a directory."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gpulse.cluster.head import exchange, sharing
from gpulse.cluster.head.membership import node_fact
from gpulse.cluster.head.sessions import interrupted, stopped
from gpulse.model.columns import layout_id
from gpulse.store import archive
from gpulse.store.base import HEARSAY
from gpulse.store.book.book import Book
from gpulse.store.shared import folder, outbox, reading
from gpulse.store.shared.reading import read_on
from tests.unit.books import gpu_layout, layout_facts
from tests.unit.shared_heads import RUN, START, TinyHead, ended, process

Make = Callable[..., TinyHead]
OTHER_RUN = bytes(range(16, 32))


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Makes heads by name; the same name is the same data directory."""
    made: list[TinyHead] = []
    (tmp_path / "shared").mkdir()

    def head(name: str, **options: Any) -> TinyHead:
        made.append(TinyHead(tmp_path / name, tmp_path / "shared", **options))
        return made[-1]

    yield head
    for one in made:
        one.end()


def facts_in(head: TinyHead) -> list[dict[str, Any]]:
    """Everything that a head told, line by line."""
    files = sorted(head.folder.glob("facts-*.jsonl"))
    lines = [line for file in files for line in file.read_bytes().split(b"\n")[:-1]]
    return [fact for line in lines for fact in json.loads(line)["facts"]]


def test_what_one_head_knows_the_other_one_knows(make: Make) -> None:
    """Nodes, GPUs, sessions, events and processes, under the other's own numbers for nodes."""

    a, b = make("a"), make("b")
    b.node("elsewhere", "m9")
    node = a.node("n1")
    for fact in layout_facts(gpu_layout((0, None), (1, None)), node, START):
        a.note(fact.pop("fact"), **fact)
    a.session("run")
    a.event("gap", node, frames=3)
    a.frame(node, 1, {"event": "agent_started"}, process(7), process(8))
    a.frame(node, 2, ended(8), {"event": "findings", "findings": [{"id": "idle"}]})
    a.look()
    b.look()

    assert {"elsewhere": 1, "n1": 2} == {name: node.id for name, node in b.nodes().items()}
    assert {"rack": "7"} == b.nodes()["n1"].labels
    assert [(2, "0"), (2, "1")] == [(gpu.node, gpu.label) for gpu in b.archive.gpus()]
    assert ["run"] == [session.name for session in b.sessions.active()]
    assert b.archive.sessions() == b.sessions.all()
    assert {7: None, 8: START + 2} == b.lives()
    assert ["gap", "agent_started", "findings"] == b.kinds()
    assert {2} == {event.node for event in b.archive.events(start=0.0, end=1e11)}


def test_a_node_that_is_elsewhere_is_shown_with_its_processes(make: Make) -> None:
    """What it said to the other head; what it says to this one counts more."""

    a, b = make("a"), make("b")
    node = a.node("n1")
    a.look()
    b.look()
    member = b.fleet.member(b.nodes()["n1"], 0.0)
    a.frame(node, 1, process(7))
    a.look()
    b.look()
    assert [7] == list(member.processes)
    assert member.is_elsewhere

    member.connected = True
    a.frame(node, 2, ended(7))
    a.look()
    b.look()
    assert [7] == list(member.processes)


def test_nothing_is_told_twice_and_nothing_is_told_back(make: Make) -> None:
    """However often they look, and although each hears what it told itself."""

    a, b = make("a"), make("b")
    a.frame(a.node("n1"), 1, {"event": "agent_started"}, process(7))
    for _ in range(3):
        a.look()
        b.look()
    told, applied = len(facts_in(b)), b.archive.book.applied
    b.look()
    a.look()

    assert ["agent_started"] == b.kinds() == a.kinds()
    assert told == len(facts_in(b))
    assert [] == [fact for fact in facts_in(b) if fact["position"] and fact["fact"] != "session"]
    assert applied == b.archive.book.applied


def test_a_new_head_with_an_empty_directory_gets_everything_back(make: Make, tmp_path: Path) -> None:
    """The one before it is gone with its disk."""

    a = make("a")
    a.frame(a.node("n1"), 1, {"event": "agent_started"}, process(7))
    a.session("run")
    a.look()
    a.end()
    shutil.rmtree(tmp_path / "a")
    b = make("b")
    b.look()

    assert ["n1"] == list(b.nodes())
    assert {7: None} == b.lives()
    assert ["run"] == [session.name for session in b.archive.sessions()]


def test_a_head_that_begins_to_share_tells_of_its_past(make: Make) -> None:
    """What its log has dropped long ago is in its book."""

    alone = make("a")
    node = alone.node("n1")
    alone.frame(node, 1, {"event": "agent_started"}, process(7), process(8))
    alone.frame(node, 2, ended(8))
    alone.event("gap", node, frames=3)
    alone.event("head_clock_step", None, seconds=5)
    alone.commit()
    alone.end()
    a, b = make("a"), make("b")
    a.look()
    a.frame(node, 9, ended(7))
    a.look()
    b.look()

    assert {7: START + 9, 8: START + 2} == b.lives()
    assert ["gap", "head_clock_step", "agent_started"] == b.kinds()
    assert a.kinds() == b.kinds()
    assert 0 == a.sharing.state()["lost_records"]


def test_heads_that_go_to_another_directory_do_not_tell_each_other_what_they_know(
    make: Make, tmp_path: Path
) -> None:
    """What is in a book may be what another head told."""

    a, b = make("a"), make("b")
    a.frame(a.node("n1"), 1, {"event": "one"})
    for head in (a, b, a):
        head.look()
    for head in (a, b):
        head.end()
    shutil.rmtree(tmp_path / "shared")
    (tmp_path / "shared").mkdir()
    a, b = make("a", now=START + 9.0), make("b", now=START + 9.0)
    a.frame(1, 2, {"event": "two"})
    for head in (a, b, a, b):
        head.look()

    assert ["one", "two"] == a.kinds() == b.kinds()


def test_another_directory_gets_everything_that_is_not_in_the_log_any_more(
    make: Make, tmp_path: Path
) -> None:
    """From the head that it was told to; those that knew it take nothing in twice."""

    a, b = make("a"), make("b")
    node = a.node("n1")
    a.frame(node, 1, {"event": "one"}, process(7))
    a.event("two", node)
    a.event("three", None)
    for head in (a, b, a):
        head.look()
    for head in (a, b):
        head.end()
    shutil.rmtree(tmp_path / "shared")
    (tmp_path / "shared").mkdir()
    a, b, c = (make(name, now=START + 9.0) for name in "abc")
    for head in (a, b, c, a, b, c):
        head.look()

    assert ["one", "three", "two"] == sorted(a.kinds()) == sorted(b.kinds()) == sorted(c.kinds())
    assert {7: None} == a.lives() == b.lives() == c.lives()


@pytest.mark.parametrize("how", ["folder", "directory", "mounted"])
def test_a_folder_that_goes_while_its_head_runs_is_begun_anew(make: Make, tmp_path: Path, how: str) -> None:
    """With everything in it, though the head has a file open that nobody else sees."""

    a = make("a")
    node = a.node("n1")
    a.frame(node, 1, {"event": "one"})
    a.look()
    shared = tmp_path / "shared"
    if how == "folder":
        shutil.rmtree(a.folder)
    else:
        shared.rename(tmp_path / "gone")
    if how == "directory":
        a.look()
        assert a.sharing.trouble is not None
    shared.mkdir(exist_ok=True)
    a.time += 9.0
    a.frame(node, 2, {"event": "two"})
    a.look()
    b = make("b")
    b.look()
    assert ["one", "two"] == b.kinds()
    assert a.sharing.trouble is None

    if how == "mounted":
        shutil.rmtree(shared)
        (tmp_path / "gone").rename(shared)
        a.frame(node, 3, {"event": "three"})
        a.look()
        c = make("c")
        c.look(5)
        assert ["one", "two", "three"] == c.kinds()


@pytest.mark.parametrize("place", ["before", "between", "after"])
def test_a_head_that_is_killed_between_steps_tells_everything_once(
    make: Make, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before a line is on disk, when it is but the head does not know, or when the sign of life is missing."""

    a = make("a")
    node = a.node("n1")
    a.look()
    a.frame(node, 1, {"event": "one"})
    if place == "before":
        monkeypatch.setattr(folder.Folder, "append", _killed)
        with pytest.raises(KeyboardInterrupt):
            a.sharing.facts_courier.run_once()
    elif place == "between":
        monkeypatch.setattr(os, "fsync", _killed)
        with pytest.raises(KeyboardInterrupt):
            a.sharing.facts_courier.run_once()
    else:
        a.sharing.facts_courier.run_once()
    monkeypatch.undo()
    a.end()
    again = make("a")
    again.frame(node, 2, {"event": "two"})
    again.look()
    b = make("b")
    b.look()

    assert ["one", "two"] == b.kinds()


def _killed(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_head_that_is_killed_while_it_takes_in_takes_in_everything_once(make: Make, when: str) -> None:
    """What it took in and how far that was are one record of its log."""

    a, b = make("a"), make("b")
    a.frame(a.node("n1"), 1, {"event": "one"})
    a.look()
    b.sharing.facts_courier.run_once()
    if when == "after":
        b.commit()
    b.end()
    again = make("b")
    again.look()

    assert ["one"] == again.kinds()
    assert ["n1"] == list(again.nodes())


def test_what_is_handed_over_twice_is_taken_in_once(make: Make) -> None:
    """A stretch counts only where the last one ended."""

    a, b = make("a"), make("b")
    a.event("one", a.node("n1"))
    a.commit()
    a.look()
    b.sharing.facts_courier.run_once()
    b.sharing._exchange._handed.clear()
    b.sharing.facts_courier.run_once()
    b.commit()

    assert ["one"] == b.kinds()


def test_an_unfinished_line_counts_when_it_is_whole(make: Make) -> None:
    """A reader may come while a line is being written."""

    a, b = make("a"), make("b")
    node = a.node("n1")
    a.look()
    a.frame(node, 1, {"event": "one"})
    a.look()
    file = max(a.folder.glob("facts-*.jsonl"))
    whole = file.read_bytes()
    file.write_bytes(whole[:-10])
    b.look()
    assert [] == b.kinds()

    file.write_bytes(whole)
    b.look()
    assert ["one"] == b.kinds()


def test_what_a_crash_left_unfinished_is_passed_over(make: Make) -> None:
    """The head tells it again in its next file."""

    a, b = make("a"), make("b")
    node = a.node("n1")
    a.look()
    with max(a.folder.glob("facts-*.jsonl")).open("ab") as file:
        file.write(b'{"to":99,"facts":[{"position":99,"fact":"event","time":1.0,"kind":"half"')
    a.end()
    again = make("a")
    again.frame(node, 1, {"event": "one"})
    again.look()
    b.look(5)

    assert ["one"] == b.kinds()


def test_a_line_that_is_nonsense_costs_only_itself(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    """It is said, and what follows is taken in."""

    a, b = make("a"), make("b")
    node = a.node("n1")
    a.look()
    with max(a.folder.glob("facts-*.jsonl")).open("ab") as file:
        file.write(b"\0\0\0 no JSON\n")
        file.write(b'{"to":1,"facts":[{"position":0,"fact":"event","node":["",5],"kind":"x"}, 7]}\n')
    a.sharing._exchange.outbox.close()
    a.sharing._exchange.outbox._folder.close()
    a.frame(node, 1, {"event": "one"})
    a.look()
    b.look(5)

    assert ["one"] == b.kinds()
    assert "cannot be read" in caplog.text


GOOD = {
    "frame": {"node": ["n1", "m1", "n1"], "run": RUN.hex(), "sequence": 1, "time": START, "events": "[]"},
    "event": {"node": ["n1", "m1", "n1"], "time": START, "kind": "odd", "detail": {}},
    "devices": {
        "node": ["n1", "m1", "n1"],
        "time": START,
        "devices": [{"index": 0, "uuid": "GPU-9", "name": "H200"}],
    },
    "process": {"node": ["n1", "m1", "n1"], "pid": 3, "first_seen": START, "identity": {}, "start_time": 1.0},
    "node": {"node": ["n9", "m9", "n9"], "time": START, "facts": {}, "labels": {}},
    "session": {
        "id": "odd",
        "name": "odd",
        "start": START,
        "created": START,
        "interval_ms": 1000,
        "interruptions": [[START, None]],
        "state": "interrupted",
    },
}


@pytest.mark.parametrize(
    ("kind", "odd"),
    [
        ("frame", {"time": "abc"}),
        ("frame", {"events": 5}),
        ("frame", {"events": "\ud800"}),
        ("frame", {"run": "00"}),
        ("frame", {"sequence": -1}),
        ("frame", {"node": None}),
        ("event", {"time": None}),
        ("event", {"detail": [5]}),
        ("event", {"detail": {"x": float("1e999")}}),
        ("devices", {"devices": [{"index": "x", "uuid": 5}]}),
        ("devices", {"time": None}),
        ("process", {"identity": 7}),
        ("node", {"facts": 3}),
        ("node", {"labels": {"rack": 3}}),
        ("node", {"node": ["n9", "m\n", "n9"]}),
        ("session", {"interruptions": []}),
        ("session", {"interruptions": [[None, None]]}),
        ("session", {"state": "sleeping"}),
        ("session", {"state": "finished", "end": None}),
        ("session", {"id": 5}),
        ("session", {"name": "../x"}),
        ("session", {"start": "now"}),
        ("session", {"interval_ms": 0}),
        ("session", {"labels": {"a": 5}}),
        ("session", {"nodes": 5}),
        ("rack", {}),
    ],
)
def test_an_odd_fact_costs_only_itself(make: Make, kind: str, odd: dict[str, Any]) -> None:
    """Whoever wrote it: this head goes on, keeps nothing of it, and hears the next one."""

    b = make("b")
    b.fleet.members[b.node("n1")].connected = False
    before = b.archive.nodes(), b.kinds()
    stranger = Path(b.sharing.directory) / "aaaaaaaa1"
    stranger.mkdir()
    fact = {"position": 1, "fact": kind, **GOOD.get(kind, {}), **odd}
    last = {"position": 2, "fact": "event", **GOOD["event"], "kind": "two"}
    lines = [{"to": 1, "facts": [fact]}, {"to": 2, "facts": [last]}]
    text = "".join(f"{json.dumps(line)}\n" for line in lines).replace("Infinity", "1e999")
    (stranger / "facts-000001.jsonl").write_text(text)
    b.look()

    assert (before[0], [*before[1], "two"]) == (b.archive.nodes(), b.kinds())
    assert ([], [], {}) == (b.archive.sessions(), b.archive.gpus(), b.lives())
    assert b.sharing.trouble is None


def test_what_is_not_odd_is_taken_in(make: Make) -> None:
    """Else the test before this one would say nothing."""

    b = make("b")
    stranger = Path(b.sharing.directory) / "aaaaaaaa1"
    stranger.mkdir()
    facts = [{"position": 1, "fact": kind, **fields} for kind, fields in GOOD.items()]
    (stranger / "facts-000001.jsonl").write_text(f"{json.dumps({'to': 1, 'facts': facts})}\n")
    b.look()

    assert (["n1", "n9"], ["odd"], {3: None}) == (list(b.nodes()), b.kinds(), b.lives())
    assert (["odd"], ["GPU-9"]) == (
        [one.name for one in b.archive.sessions()],
        [gpu.uuid for gpu in b.archive.gpus()],
    )


@pytest.mark.parametrize(
    "line",
    [
        b'{"to":Infinity,"facts":[]}',
        b'{"to":1e999,"facts":[]}',
        b'{"to":9,"facts":[{"position":9,"fact":"event","node":null,"time":NaN,"kind":"x","detail":{}}]}',
        b"[" * 100_000,
        b"x" * 300,
    ],
)
def test_a_line_that_no_head_would_write_is_passed_over(
    make: Make, line: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever its length; what follows it is taken in."""

    monkeypatch.setattr(exchange, "_STRETCH_BYTES", 64)
    if line.startswith(b"x"):
        monkeypatch.setattr(reading, "LONGEST_LINE_BYTES", 200)
    a, b = make("a"), make("b")
    node = a.node("n1")
    a.look()
    with max(a.folder.glob("facts-*.jsonl")).open("ab") as file:
        file.write(line + b"\n")
    a.sharing._exchange.outbox._folder.close()
    a.frame(node, 1, {"event": "one"})
    a.look()
    b.look(8)

    assert ["one"] == b.kinds()


def test_a_folder_that_cannot_be_read_keeps_nobody_from_being_heard(make: Make) -> None:
    """A file by the name of a head is none; a folder that is refused is told of."""

    a, b = make("a"), make("b")
    shared = Path(b.sharing.directory)
    (shared / "00001116").touch()
    (shared / "00002222" / "head.json").mkdir(parents=True)
    (shared / "00002222" / "facts-000001.jsonl").mkdir()
    a.event("one", a.node("n1"))
    a.look()
    b.look()
    assert ["one"] == b.kinds()
    assert b.sharing.trouble is not None
    assert "00002222" in b.sharing.trouble.message
    assert [True] == [head["alive"] for head in b.sharing.state()["heads"]]

    shutil.rmtree(shared / "00002222")
    b.look()
    assert b.sharing.trouble is None


@pytest.mark.parametrize("life", ["[]", '{"id": 5, "host": [], "started": "x", "alive": {}}', "[" * 5000])
def test_a_sign_of_life_that_is_none(make: Make, life: str) -> None:
    """Nobody is there who cannot say so."""

    b = make("b")
    stranger = Path(b.sharing.directory) / "aaaaaaaa1"
    stranger.mkdir()
    (stranger / "head.json").write_text(life)
    b.look()

    assert ([], None) == (b.sharing.state()["heads"], b.sharing.trouble)


def test_a_full_file_server_stops_nothing_and_is_told(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """What could not be written is written once there is room, and only once."""

    a, b = make("a"), make("b")
    node = a.node("n1")
    a.look()

    def full(file: int, data: bytes, offset: int) -> None:
        os.pwrite(file, data[: len(data) // 2], offset)
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(folder, "write_at", full)
    a.frame(node, 1, {"event": "one"})
    a.look()
    trouble = a.sharing.trouble
    assert trouble is not None
    assert "No space left" in trouble.message
    assert trouble.hint is not None
    assert a.sharing.shared_to < a.archive.accepted
    b.look()
    assert [] == b.kinds()

    monkeypatch.undo()
    a.frame(node, 2, {"event": "two"})
    a.look()
    b.look(5)
    assert 1 == len(list(a.folder.glob("facts*")))
    assert a.sharing.trouble is None
    assert ["one", "two"] == b.kinds()


def test_what_is_not_certain_to_be_on_disk_is_told_again_elsewhere(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others may have read the line: another one must not take its place."""

    a, b = make("a"), make("b")
    node = a.node("n1")
    a.look()
    a.frame(node, 1, {"event": "one"})
    sync = os.fsync

    def broken(file: int) -> None:
        sync(file)
        raise OSError(5, os.strerror(5))

    monkeypatch.setattr(os, "fsync", broken)
    a.sharing.facts_courier.run_once()
    monkeypatch.undo()
    b.look()
    a.frame(node, 2, {"event": "two"})
    a.look()
    b.look(5)

    assert ["one", "two"] == b.kinds()
    assert 2 == len(list(a.folder.glob("facts-*.jsonl")))


def test_a_directory_that_is_not_there_is_told(make: Make, tmp_path: Path) -> None:
    """It is not made: an empty place where a file system belongs must not be filled."""

    a = make("a")
    os.rmdir(tmp_path / "shared")
    a.look()

    assert a.sharing.trouble is not None
    assert "there is no shared directory" in a.sharing.trouble.message
    assert not (tmp_path / "shared").exists()


def test_more_than_fits_into_memory_is_read_from_the_log(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the file server is away, everything waits in the log."""

    monkeypatch.setattr(outbox, "_MOST_WAITING_BYTES", 100)
    a, b = make("a"), make("b")
    node = a.node("n1")
    a.look()
    shutil.move(tmp_path / "shared", tmp_path / "away")
    for number in range(1, 20):
        a.frame(node, number, {"event": f"e{number}"})
        a.sharing.facts_courier.run_once()
    assert a.sharing.state()["waiting_records"] == 19
    shutil.move(tmp_path / "away", tmp_path / "shared")
    a.look()
    b.look()

    assert [f"e{number}" for number in range(1, 20)] == b.kinds()
    assert a.sharing.state()["lost_records"] == 0


def test_the_log_stays_until_it_is_told(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sealing would drop it; a head that is killed meanwhile has nothing else to tell from."""

    monkeypatch.setattr(archive, "_SEGMENT_BYTES", 4096)
    a, b = make("a"), make("b")
    a.archive.holds.append(lambda: a.sharing.shared_to)
    node = a.node("n1")
    a.look()
    shutil.move(tmp_path / "shared", tmp_path / "away")
    known = [f"e{number}" for number in range(1, 60)]
    for number, kind in enumerate(known, 1):
        a.frame(node, number, {"event": kind, "detail": "x" * 200})
    a.look(1)
    a.archive.seal()
    a.end()
    shutil.move(tmp_path / "away", tmp_path / "shared")
    again = make("a")
    again.look()
    b.look()

    assert known == b.kinds()
    assert again.sharing.shared_to == again.archive.accepted
    before = again.archive.usage().log_bytes
    again.archive.seal()
    assert again.archive.usage().log_bytes < before


def test_a_log_that_is_too_long_goes_untold(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file server that never comes back must not fill the head's disk; what is lost is counted."""

    monkeypatch.setattr(archive, "_SEGMENT_BYTES", 4096)
    monkeypatch.setattr(sharing, "_MOST_LOG_BYTES", 8192)
    monkeypatch.setattr(outbox, "_MOST_WAITING_BYTES", 100)
    a, b = make("a"), make("b")
    a.archive.holds.append(lambda: a.sharing.shared_to)
    node = a.node("n1")
    a.look()
    shutil.move(tmp_path / "shared", tmp_path / "away")
    for number in range(1, 100):
        a.frame(node, number, {"event": f"e{number}", "detail": "x" * 200})
    asyncio.run(a.sharing._check_limit())
    a.archive.seal()
    a.frame(node, 100, {"event": "last"})
    shutil.move(tmp_path / "away", tmp_path / "shared")
    a.look()
    b.look()

    lost = a.sharing.state()["lost_records"]
    assert 50 < lost < 100
    assert [*(f"e{number}" for number in range(lost + 1, 100)), "last"] == b.kinds()


def test_files_are_rotated_and_the_old_ones_go(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file begins with the nodes and sessions, so that a new head misses none of them."""

    monkeypatch.setattr(folder, "FILE_BYTES", 1)
    a = make("a", keep_seconds=100.0)
    a.session("run")
    node = a.node("n1")
    for number in range(1, 5):
        a.frame(node, number, {"event": f"e{number}"})
        a.look()
    files = sorted(a.folder.glob("facts-*.jsonl"))
    for file in files[:-1]:
        os.utime(file, (time.time() - 200.0,) * 2)
    a.sharing._exchange._dropped = float("-inf")
    a.time = time.time()
    a.look()
    b = make("b")
    b.look(5)

    assert [files[-1]] == sorted(a.folder.glob("facts-*.jsonl"))
    assert ["run"] == [session.name for session in b.sessions.all()]
    assert ["n1"] == list(b.nodes())


def test_a_reader_whose_file_was_dropped_goes_on_with_the_next(tmp_path: Path) -> None:
    """What was dropped is old; the rest is not read twice."""

    for number, position in ((3, 30), (4, 40)):
        fact = {"position": position, "fact": "event"}
        (tmp_path / f"facts-{number:06d}.jsonl").write_text(
            json.dumps({"to": position, "facts": [fact]}) + "\n"
        )
    found = read_on(str(tmp_path), 1, 500, 30)
    assert found is not None

    assert (3, []) == (found.file, found.facts)
    later = read_on(str(tmp_path), found.file, found.offset, 30)
    assert later is not None
    assert (4, 0) == later[:2]
    last = read_on(str(tmp_path), *later[:2], 30)
    assert last is not None
    assert [40] == [fact["position"] for fact in last.facts]


def test_a_frame_that_two_heads_got_counts_once(make: Make) -> None:
    """An agent sends what it sent last to the next head again."""

    a, b = make("a"), make("b")
    at_a, at_b = a.node("n1"), b.node("n1")
    for sequence in range(1, 4):
        a.frame(at_a, sequence, {"event": f"e{sequence}"})
    for sequence in range(2, 6):
        b.frame(at_b, sequence, {"event": f"e{sequence}"})
    for _ in range(2):
        a.look()
        b.look()

    assert [f"e{number}" for number in range(1, 6)] == b.kinds() == a.kinds()


def test_a_process_that_began_at_one_head_and_ended_at_another_has_ended(make: Make) -> None:
    """In whatever order a head hears of it, and not twice."""

    a, b = make("a"), make("b")
    at_a, at_b = a.node("n1"), b.node("n1")
    a.frame(at_a, 1, {"event": "agent_started"}, process(7), process(8))
    a.frame(at_a, 2, {"event": "health", "entries": []})
    b.frame(at_b, 5, ended(7), process(8, "later.py"), {"event": "health", "entries": [{"code": "new"}]})
    b.frame(at_b, 6, ended(8))
    for _ in range(2):
        a.look()
        b.look()

    assert {7: START + 5, 8: START + 6} == b.lives() == a.lives()
    assert {8: "later.py", 7: "train.py"} == {
        one.pid: one.identity["name"] for one in b.archive.processes(start=0.0, end=1e11)
    }
    assert {"entries": [{"code": "new"}]} == b.archive.latest("health")[at_b][1]


def test_an_older_run_that_is_heard_of_late_stays_ended(make: Make) -> None:
    """The next run began at another head meanwhile."""

    a, b = make("a"), make("b")
    at_a, at_b = a.node("n1"), b.node("n1")
    a.frame(at_a, 1, {"event": "agent_started"}, process(7))
    b.frame(at_b, 9, {"event": "agent_started"}, process(8), run=OTHER_RUN)
    b.look()
    a.look()
    b.look()

    assert {7: START + 9, 8: None} == b.lives()


def test_machines_of_one_name_keep_theirs(make: Make) -> None:
    """Nodes are known by their machines; who has a name already stays what it is."""

    a, b = make("a"), make("b")
    a.node("n1", "m1")
    b.node("n1", "m2")
    a.look()
    b.look()

    assert {"n1": "m2", "n1#2": "m1"} == {name: node.machine for name, node in b.nodes().items()}


def test_news_of_a_node_are_taken_from_the_head_that_it_speaks_to(make: Make) -> None:
    """They do not go back and forth."""

    a, b = make("a"), make("b")
    number = a.node("n1")
    a.look()
    b.look()
    changed = a.fleet.register.by_id[number]._replace(labels={"rack": "8"})
    fields: dict[str, Any] = a.fleet.member(changed, START).stored._asdict()
    a.note("node", time=fields.pop("first_seen"), **fields)
    a.commit()
    for _ in range(3):
        a.look()
        b.look()

    assert {"rack": "8"} == b.nodes()["n1"].labels == a.nodes()["n1"].labels

    b.fleet.member(b.nodes()["n1"], START).connected = True
    changed = changed._replace(labels={"rack": "9"})
    fields = a.fleet.member(changed, START).stored._asdict()
    a.note("node", time=fields.pop("first_seen"), **fields)
    a.commit()
    a.look()
    b.look()
    assert {"rack": "8"} == b.nodes()["n1"].labels


def gpus(head: TinyHead, node: int, time: float, via: str | None = None, **facts: int) -> None:
    """A node tells a head of its GPU, or somebody else does."""
    (subject,) = gpu_layout((0, None)).subjects
    layout = gpu_layout((0, None))._replace(subjects=({**subject, "facts": facts},))
    head.archive.layouts[layout_id(layout.to_json())] = layout
    for fact in layout_facts(layout, node, time):
        head.note(fact.pop("fact"), **fact, **({"via": via} if "layout" in fact else {}))
    head.commit()


def known_gpus(head: TinyHead) -> list[tuple[str, dict[str, int]]]:
    """By node what a head knows of its GPU."""
    return [(gpu.node_name, gpu.device["facts"]) for gpu in head.archive.gpus()]


def test_the_last_word_that_a_node_said_of_its_gpus_counts(make: Make) -> None:
    """To whichever head, in whatever order that is heard; not while it speaks to this one."""

    a, b, c = make("a"), make("b"), make("c")
    gpus(b, b.node("n1"), START + 10.0, limit=2)
    gpus(a, a.node("n1"), START, limit=1)
    a.fleet.members[1].connected = False
    b.look()
    a.look()
    c.look()
    assert [("n1", {"limit": 2})] == known_gpus(a) == known_gpus(b) == known_gpus(c)

    gpus(a, 1, START + 5.0, limit=3)  # its clock is behind
    a.look()
    b.look()
    assert [("n1", {"limit": 3})] == known_gpus(a)
    assert [("n1", {"limit": 2})] == known_gpus(b)

    gpus(a, 1, START + 50.0, limit=4)  # its clock is ahead
    a.look()
    b.look()
    c.look()
    assert [("n1", {"limit": 2})] == known_gpus(b)
    assert [("n1", {"limit": 4})] == known_gpus(c)


def test_hearsay_is_not_told_on_and_gives_way(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """What an engine or another head tells of nodes stands at the beginning of nobody's file."""

    monkeypatch.setattr(folder, "FILE_BYTES", 1)
    a, b = make("a"), make("b")
    heard = b.fleet.register.new("n1", "m1", START + 50.0)._replace(via=HEARSAY)
    b.fleet.register.put(heard)
    b.note("node", **node_fact(heard))
    gpus(b, heard.id, START + 50.0, via=HEARSAY)
    b.event("one", 1)
    b.look()
    assert [] == [fact for fact in facts_in(b) if fact["fact"] in ("node", "devices")]

    gpus(a, a.node("n1"), START, limit=1)
    a.end()
    for file in a.folder.glob("facts-*"):
        file.unlink()
    again = make("a")  # its first file begins with what it knows
    again.look()
    b.look()
    b.event("two", 1)
    b.look()
    assert [("n1", {"limit": 1})] == known_gpus(b)
    assert ({"rack": "7"}, a.archive.head_id) == (b.nodes()["n1"].labels, b.nodes()["n1"].via)
    assert [] == [fact for fact in facts_in(b) if fact["fact"] in ("node", "devices")]


def test_a_session_of_one_head_can_be_stopped_at_another(make: Make) -> None:
    """And stays stopped, whatever was heard of it before."""

    a, b = make("a"), make("b")
    session = a.session("run")
    a.look()
    b.look()
    b.keep(stopped(b.sessions.find("run"), START + 10))
    b.look()
    a.keep(interrupted(session, START + 20))
    for _ in range(2):
        a.look()
        b.look()

    assert ["finished"] * 4 == [
        sessions[0].state for head in (a, b) for sessions in (head.sessions.all(), head.archive.sessions())
    ]


def test_a_head_that_comes_back_does_not_interrupt_what_others_carried_on(make: Make) -> None:
    """It was killed, and the other one is there."""

    a, b = make("a"), make("b")
    a.frame(a.node("n1"), 1)
    a.session("run")
    a.look()
    a.end()
    b.look()
    again = make("a", now=START + 60)
    again.look()

    assert again.sharing.is_carried_on
    assert ["active"] == [session.state for session in again.sessions.all()]


def test_a_head_that_is_there_goes_on_with_what_another_one_left(make: Make) -> None:
    """That one did not see it, because its file server did not answer for a while."""

    a, b = make("a"), make("b")
    session = a.session("run")
    a.look()
    b.look()
    a.keep(interrupted(session, START + 20))
    for head in (a, b, a):
        head.look()

    assert ["active"] * 4 == [
        sessions[0].state for head in (a, b) for sessions in (head.sessions.all(), head.archive.sessions())
    ]


def test_a_head_that_was_alone_interrupts_its_sessions_when_it_comes_back(make: Make) -> None:
    """Since the last frame that any head got, when all of them were gone."""

    a, b = make("a"), make("b")
    a.session("run")
    a.frame(a.node("n1"), 1)
    b.frame(b.node("n1"), 30)
    for head in (a, b, a):
        head.look()
    for head in (a, b):
        head.end()
        life = head.folder / "head.json"
        old = json.loads(life.read_text()) | {"newest": head.archive.newest}
        life.write_text(json.dumps(old))
        os.utime(life, (time.time() - 1000.0,) * 2)
    again = make("a", now=START + 60)
    again.look()

    found = again.sessions.find("run")
    assert ("interrupted", START + 30) == (found.state, found.interruptions[-1].start)
    assert [found] == again.archive.sessions()


def test_a_head_that_says_goodbye_is_gone_at_once(make: Make) -> None:
    """Nobody has to wait until its sign of life is old."""

    a, b = make("a"), make("b")
    a.look()
    b.look()
    assert b.sharing.is_carried_on
    a.sharing._is_ending = True
    a.sharing.facts_courier.run_once()
    b.look()

    assert not b.sharing.is_carried_on


def test_a_data_directory_that_is_older_than_what_it_told_is_refused(make: Make, tmp_path: Path) -> None:
    """Its positions would be taken for known ones."""

    a = make("a")
    a.look()
    a.end()
    shutil.copytree(tmp_path / "a", tmp_path / "copy")
    again = make("a")
    again.frame(again.node("n1"), 1, {"event": "one"})
    again.look()
    again.end()
    shutil.rmtree(tmp_path / "a")
    shutil.move(tmp_path / "copy", tmp_path / "a")
    older = make("a")
    older.look()

    assert older.sharing.trouble is not None
    assert "the log of this head ends at" in older.sharing.trouble.message


def test_a_copy_of_a_head_on_another_machine_is_refused(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two that write as one would not be understood; when the other one is gone for a while, this one is it."""

    a = make("a")
    a.look()
    a.end()
    monkeypatch.setattr(socket, "gethostname", lambda: "another")
    copy = make("a")
    copy.look()
    trouble = copy.sharing.trouble
    assert trouble is not None
    assert "under the same name" in trouble.message

    os.utime(a.folder / "head.json", (time.time() - 1000.0,) * 2)
    copy.look()
    assert copy.sharing.trouble is None


def test_nobody_is_taken_for_gone_while_the_file_server_takes_nothing(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head that comes back leaves sessions as they are until it can tell who is there."""

    a, b = make("a"), make("b")
    a.session("run")
    a.look()
    b.look()
    a.end()
    monkeypatch.setattr(exchange, "write_life", _full)
    again = make("a", now=START + 60)
    again.look()
    assert ["active"] == [session.state for session in again.sessions.all()]

    monkeypatch.undo()
    os.utime(b.folder / "head.json", (time.time() - 1000.0,) * 2)
    again.look()
    assert ["interrupted"] == [session.state for session in again.sessions.all()]


def _full(*_: object) -> None:
    raise OSError(28, os.strerror(28))


def test_an_older_book_gets_what_it_lacks(make: Make, tmp_path: Path) -> None:
    """A data directory of before can begin to share."""

    make("a").end()
    with sqlite3.connect(tmp_path / "a" / "book.sqlite") as database:
        for table in ("shared", "told", "early_ends"):
            database.execute(f"DROP TABLE {table}")
        database.execute("ALTER TABLE processes DROP COLUMN sequence")
        for table in ("nodes", "gpus", "events", "processes"):
            database.execute(f"ALTER TABLE {table} DROP COLUMN via")
    database.close()
    with Book(str(tmp_path / "a" / "book.sqlite"), read_only=True) as book:
        assert ({}, []) == (book.nodes(), book.gpus())
    a, b = make("a"), make("b")
    b.frame(b.node("n1"), 1, process(7))
    b.look()
    a.look()

    assert {7: None} == a.lives()


def test_the_run_is_part_of_what_is_known_of_a_frame(make: Make) -> None:
    """Two runs count their frames from one each."""

    a, b = make("a"), make("b")
    node = a.node("n1")
    a.frame(node, 1, {"event": "one"}, run=RUN)
    a.frame(node, 1, {"event": "two"}, run=OTHER_RUN)
    a.look()
    b.look()

    assert ["one", "two"] == b.kinds()
