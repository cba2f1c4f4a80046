"""What a harvest has won, what it says of itself, and what it keeps."""

from __future__ import annotations

import json
import os
import resource
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gpulse.errors import DiskError, UsageError
from gpulse.harvest import scribe
from gpulse.harvest.account import NOBODY, Account, Me
from gpulse.harvest.ledger import Kept, Ledger, read_kept
from gpulse.harvest.policy.state import State, begin
from gpulse.harvest.policy.step import step
from gpulse.harvest.policy.words import Event, Heard, Looked, Passed
from gpulse.harvest.running.told import Exited, Failed, Gone, Process, Started, Told
from gpulse.harvest.settings import Gpu, Program, Settings
from gpulse.harvest.sight.seen import Holder, Presence, Sighting, Use
from gpulse.harvest.view import plan
from gpulse.model.harvest import HarvestStatus, from_document, to_document
from gpulse.sources.harvest import status_path
from gpulse.sources.procfs import Roots
from gpulse.terminal.harvest import status_lines
from gpulse.terminal.table import painter

WALL = 1_760_000_000.0
ME = Me(Process(4, 5), 1000, "ada")
GPUS = (Gpu(0, 0, "GPU-a", "H200"), Gpu(1, 1, "GPU-b", "H200"))
ALICE = Holder(71, 8, ("python3",), "alice", working=True)
PROGRAMS = (
    Program("pair", ("true",), (0, 1), whole=True),
    Program("one", ("true",), (0,), backoff_seconds=30),
)
SETTINGS = Settings("h.toml", {0: frozenset(), 1: frozenset()}, PROGRAMS, idle_seconds=0, cooldown_seconds=0)


class Book:
    """A policy and its account; the wall clock shows WALL more than the other."""

    def __init__(self, before: Kept = Kept(), settings: Settings = SETTINGS) -> None:  # noqa: B008
        self.account = Account(ME, GPUS, before, wall=WALL)
        self.state: State = begin(settings, WALL)
        self.now = 0.0

    def take(self, event: Event) -> None:
        """As the loop does it."""
        self.now = event.now
        self.account.pass_to(self.state, event.now)
        self.state, orders = step(self.state, event)
        self.account.ordered(self.state, orders, WALL + event.now)

    def hear(self, told: Told, now: float) -> None:
        """A word of the runner."""
        self.account.told(told, WALL + now)
        self.take(Heard(now, told))

    def look(self, now: float, *uses: Use) -> None:
        """A look at both GPUs."""
        self.take(Looked(now, Sighting(dict(enumerate([*uses, Use(), Use()][:2])), ())))

    def status(self, now: float | None = None) -> HarvestStatus:
        """What it says now."""
        if now is not None:
            self.take(Passed(now, WALL))
        return self.account.status(self.state, self.now, WALL + self.now)


def started(run: str) -> Started:
    """A run's process."""
    return Started(run, Process(10, 1), Process(11, 2))


def worked() -> Book:
    """Ten seconds of a program on two GPUs, then alice."""
    book = Book()
    book.look(0.0)
    book.hear(started("pair.1"), 1.0)
    book.look(11.0, Use((ALICE,)))
    book.hear(Exited("pair.1", -15), 11.2)
    book.hear(Gone("pair.1"), 11.5)
    return book


def test_time_is_counted_for_each_gpu() -> None:
    """From the start of a program until nothing of it is left, and not before it runs."""

    status = worked().status()

    assert [10.5, 10.5] == [gpu.harvested_seconds for gpu in status.gpus]
    assert 21.0 == status.harvested_seconds
    assert {"pair": 21.0, "one": 0.0} == {
        program.name: program.harvested_seconds for program in status.programs
    }


def test_who_was_given_way_to() -> None:
    """By whom, on which GPUs, and how long it took."""

    (preemption,) = worked().status().preemptions

    assert (WALL + 11.0, "pair", (0, 1), "alice") == preemption[:4]
    assert "alice's python3 (pid 71) works on GPU 0" == preemption.what
    assert 0.5 == preemption.took_seconds


def test_somebody_without_a_name() -> None:
    """Nobody is made up."""

    book = Book()
    book.look(0.0)
    book.hear(started("pair.1"), 0.0)
    book.look(1.0, Use(unknown="no answer"))

    assert NOBODY == book.status().preemptions[0].by
    assert book.status().preemptions[0].took_seconds is None


def test_states_of_gpus_and_programs() -> None:
    """What they do, since when, and why."""

    book = worked()
    status = book.status(20.0)

    assert [("people", None), ("waiting", None)] == [(gpu.state, gpu.program) for gpu in status.gpus]
    assert "alice's python3 (pid 71) works on GPU 0" == status.gpus[0].why
    assert [1, 1] == [gpu.preemptions for gpu in status.gpus]
    assert ["waiting", "waiting"] == [program.state for program in status.programs]
    assert status.gpus[0].since == book.status(25.0).gpus[0].since
    book.look(30.0, Use(unknown="no answer"))
    assert "unknown" == book.status().gpus[0].state


def test_a_program_that_fails_says_so() -> None:
    """Until it is tried again."""

    book = Book(settings=SETTINGS._replace(programs=PROGRAMS[1:]))
    book.look(0.0)
    book.hear(Failed("one.1", "no such file"), 0.0)

    (program,) = book.status().programs
    assert ("backoff", "it could not be started: no such file; it is started again in 30 s") == (
        program.state,
        program.why,
    )


def test_what_is_kept_goes_on() -> None:
    """Hours, preemptions and since when they are counted, by the GPU and not by its place."""

    before = worked().status()
    moved = before._replace(gpus=tuple(gpu._replace(index=7 + gpu.index) for gpu in before.gpus))

    status = Book(Kept(moved)).status()

    assert (21.0, WALL) == (status.harvested_seconds, status.since)
    assert [10.5, 10.5] == [gpu.harvested_seconds for gpu in status.gpus]
    assert before.preemptions == status.preemptions


def test_what_the_configuration_no_longer_names_is_not_forgotten() -> None:
    """A GPU and a program that come back go on where they were."""

    book = worked()
    narrow = SETTINGS._replace(gpus={0: frozenset()}, programs=(PROGRAMS[1],))
    between = Book(Kept(book.status(), book.account.won()), settings=narrow)

    status = Book(Kept(between.status(), between.account.won())).status()

    assert [10.5, 10.5] == [gpu.harvested_seconds for gpu in status.gpus]
    assert 21.0 == status.programs[0].harvested_seconds


def test_many_preemptions() -> None:
    """The oldest are forgotten, and each still gets its own end."""

    book = Book()
    for number in range(60):
        now = 100.0 * number
        run = f"pair.{number + 1}"
        book.look(now)
        book.hear(started(run), now)
        book.look(now + 1, Use((ALICE,)))
        book.hear(Gone(run), now + 1.5)

    status = book.status()
    assert 50 == len(status.preemptions)
    assert {0.5} == {preemption.took_seconds for preemption in status.preemptions}
    assert 60 == status.gpus[0].preemptions
    assert status == from_document(json.loads(json.dumps(to_document(status))))


def test_people_in_the_view() -> None:
    """A free GPU says that somebody at the machine keeps it from being used."""

    watched = SETTINGS._replace(people=SETTINGS.people._replace(enabled=True))
    book = Book(settings=watched)
    book.take(Looked(0.0, Sighting({0: Use(), 1: Use()}, (Presence("carol", "tty1", 3.0),))))

    assert "GPU 1: waiting: pair: carol is at tty1" in list(plan(book.state, 0.0))


def test_the_ledger(tmp_path: Path) -> None:
    """What is written is found again, by others too; the mark stays the same; nobody else can have the directory."""

    roots = Roots(dev=str(tmp_path))
    (tmp_path / "shm").mkdir()
    book = worked()
    status = book.status()
    ledger = Ledger(str(tmp_path / "state"), roots, uid=1000)
    ledger.keep(status, book.account.won(), changed=True)
    with pytest.raises(UsageError, match=f"process {os.getpid()}"):
        Ledger(str(tmp_path / "state"), roots, uid=1000)
    published = Path(status_path(roots, 1000, ledger.mark))
    assert 0o644 == published.stat().st_mode & 0o777
    assert status == from_document(json.loads(published.read_text(encoding="utf-8")))
    mark = ledger.mark
    ledger.close()

    assert not published.exists()
    assert status == read_kept(str(tmp_path / "state"))
    again = Ledger(str(tmp_path / "state"), roots, uid=1000)
    assert mark == again.mark
    assert (status, book.account.won()) == again.kept()[:2]
    newer = status._replace(time=status.time + 5, harvested_seconds=99.0)
    again.keep(newer, book.account.won(), changed=False)
    assert newer == again.kept().status
    again.close()


def test_processes_before_a_restart_of_the_machine_are_nobodys(tmp_path: Path) -> None:
    """Their numbers belong to others now."""

    roots = Roots(dev=str(tmp_path))
    book = Book()
    book.look(0.0)
    book.hear(started("pair.1"), 0.0)
    ledger = Ledger(str(tmp_path / "state"), roots, uid=1000)
    ledger.keep(book.status(), book.account.won(), changed=True)
    path = tmp_path / "state" / "ledger.json"
    while not path.exists():  # a thread of its own writes it
        time.sleep(0.001)
    assert (Process(10, 1), Process(11, 2)) == ledger.kept().processes
    document = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**document, "boot": "another"}), encoding="utf-8")

    assert () == ledger.kept().processes
    path.write_text("{", encoding="utf-8")
    assert ledger.kept().status is None
    ledger.close()


def test_a_disk_that_hangs_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What everybody is told goes on, and of what waited only the newest is written."""

    (tmp_path / "shm").mkdir()
    roots = Roots(dev=str(tmp_path))
    book = worked()
    ledger = Ledger(str(tmp_path / "state"), roots, uid=1000)
    hung, written = threading.Event(), []
    real = scribe.replace

    def slow(path: str, data: bytes, mode: int) -> None:
        hung.wait(60)
        written.append(json.loads(data)["status"]["time"])
        real(path, data, mode)

    monkeypatch.setattr(scribe, "replace", slow)
    for number in range(5):
        ledger.keep(book.status()._replace(time=float(number)), book.account.won(), changed=True)
    (published,) = (tmp_path / "shm").glob("*.json")
    assert 4.0 == json.loads(published.read_text(encoding="utf-8"))["time"]
    hung.set()
    ledger.close()

    assert 4.0 == written[-1]
    assert len(written) <= 2


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    """And nothing else: no temporary file, no descriptor."""

    path = tmp_path / "file"
    scribe.replace(str(path), b"old", 0o600)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match="File too large"), _small_files():
        scribe.replace(str(path), b"x" * 100_000, 0o600)

    assert b"old" == path.read_bytes()
    assert ["file"] == [entry.name for entry in tmp_path.iterdir()]
    assert len(before) == len(os.listdir("/proc/self/fd"))


@contextmanager
def _small_files() -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    """Is said with a way out."""

    (tmp_path / "file").touch()
    with pytest.raises(DiskError) as caught:
        Ledger(str(tmp_path / "file" / "state"), Roots(dev=str(tmp_path)), uid=1)
    assert "--state-dir" in (caught.value.hint or "")


def test_the_status_on_a_terminal() -> None:
    """Everything fits, foreign text is harmless, and one that ended is not shown as if it ran."""

    status = worked().status()
    status = status._replace(gpus=(status.gpus[0]._replace(why="\x1b[31mred"), *status.gpus[1:]))

    for width in (40, 80, 160):
        lines = list(status_lines(status, WALL + 60, alive=True, width=width, paint=painter(color=False)))
        assert all(len(line) <= width for line in lines)
        assert "\x1b" not in "".join(lines)
    text = "\n".join(lines)
    assert "won 21 s on GPUs" in text
    assert "gone after 500 ms" in text
    ended = "\n".join(status_lines(status, WALL + 60, alive=False, width=120, paint=painter(color=False)))
    assert ended.startswith("no harvest of ada runs")
    assert "harvested" not in ended
