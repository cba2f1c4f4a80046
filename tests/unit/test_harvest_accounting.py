"""What a harvest has won, what it says of itself, and what it keeps."""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time
from pathlib import Path

import pytest

from gpulse.atomic_files import replace_file
from gpulse.errors import DiskError, UsageError
from gpulse.harvest.events import (
    GpuHolder,
    MachineObservation,
    ObservedUse,
    ProcessId,
    ProgramExited,
    ProgramGone,
    ProgramStarted,
    ProgramStartFailed,
    RunEvent,
    UserPresence,
)
from gpulse.harvest.policy import step
from gpulse.harvest.policy_state import Event, Observed, RunReported, State, TimePassed, initial_state
from gpulse.harvest.settings import HarvestableGpu, HarvestSettings, Program
from gpulse.harvest.state_directory import SavedState, StateDirectory, read_saved_status
from gpulse.harvest.status import UNKNOWN_USER, HarvestAccounting, HarvestIdentity, describe_plan
from gpulse.harvest.supervise.process_tree import MachineProcessTree
from gpulse.model.harvest_status import HarvestStatus, status_from_document, status_to_document
from gpulse.sources.harvest_status import status_path
from gpulse.sources.procfs import Roots
from gpulse.terminal.harvest_tables import status_lines
from gpulse.terminal.table import make_painter

WALL = 1_760_000_000.0
ME = HarvestIdentity(ProcessId(4, 5), os.getuid(), "ada")
GPUS = (HarvestableGpu(0, 0, "GPU-a", "H200"), HarvestableGpu(1, 1, "GPU-b", "H200"))
ALICE = GpuHolder(71, 8, ("python3",), "alice", working=True)
PROGRAMS = (
    Program("pair", ("true",), (0, 1), whole=True),
    Program("one", ("true",), (0,), backoff_seconds=30),
)
SETTINGS = HarvestSettings(
    "h.toml", {0: frozenset(), 1: frozenset()}, PROGRAMS, idle_seconds=0, cooldown_seconds=0
)


class Book:
    """A policy and its account; the wall clock shows WALL more than the other."""

    def __init__(self, before: SavedState = SavedState(), settings: HarvestSettings = SETTINGS) -> None:  # noqa: B008
        self.account = HarvestAccounting(ME, GPUS, before, wall=WALL)
        self.state: State = initial_state(settings, WALL)
        self.now = 0.0

    def take(self, event: Event) -> None:
        """As the loop does it."""
        self.now = event.now
        self.account.accrue(self.state, event.now)
        self.state, orders = step(self.state, event)
        self.account.record_instructions(self.state, orders, WALL + event.now)

    def hear(self, told: RunEvent, now: float) -> None:
        """A word of the runner."""
        self.account.record_run_event(told, WALL + now)
        self.take(RunReported(now, told))

    def look(self, now: float, *uses: ObservedUse) -> None:
        """A look at both GPUs."""
        self.take(
            Observed(now, MachineObservation(dict(enumerate([*uses, ObservedUse(), ObservedUse()][:2])), ()))
        )

    def status(self, now: float | None = None) -> HarvestStatus:
        """What it says now."""
        if now is not None:
            self.take(TimePassed(now, WALL))
        return self.account.status(self.state, self.now, WALL + self.now)


def started(run: str) -> ProgramStarted:
    """A run's process."""
    return ProgramStarted(run, ProcessId(10, 1), ProcessId(11, 2))


def worked() -> Book:
    """Ten seconds of a program on two GPUs, then alice."""
    book = Book()
    book.look(0.0)
    book.hear(started("pair.1"), 1.0)
    book.look(11.0, ObservedUse((ALICE,)))
    book.hear(ProgramExited("pair.1", -15), 11.2)
    book.hear(ProgramGone("pair.1"), 11.5)
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
    assert "alice's python3 (pid 71) is using GPU 0" == preemption.what
    assert 0.5 == preemption.took_seconds


def test_somebody_without_a_name() -> None:
    """Nobody is made up."""

    book = Book()
    book.look(0.0)
    book.hear(started("pair.1"), 0.0)
    book.look(1.0, ObservedUse(unknown="no answer"))

    assert UNKNOWN_USER == book.status().preemptions[0].by
    assert book.status().preemptions[0].took_seconds is None


def test_states_of_gpus_and_programs() -> None:
    """What they do, since when, and why."""

    book = worked()
    status = book.status(20.0)

    assert [("people", None), ("waiting", None)] == [(gpu.state, gpu.program) for gpu in status.gpus]
    assert "alice's python3 (pid 71) is using GPU 0" == status.gpus[0].why
    assert [1, 1] == [gpu.preemptions for gpu in status.gpus]
    assert ["waiting", "waiting"] == [program.state for program in status.programs]
    assert status.gpus[0].since == book.status(25.0).gpus[0].since
    book.look(30.0, ObservedUse(unknown="no answer"))
    assert "unknown" == book.status().gpus[0].state


def test_a_program_that_fails_says_so() -> None:
    """Until it is tried again."""

    book = Book(settings=SETTINGS._replace(programs=PROGRAMS[1:]))
    book.look(0.0)
    book.hear(ProgramStartFailed("one.1", "no such file"), 0.0)

    (program,) = book.status().programs
    assert ("backoff", "failed to start: no such file; it restarts in 30 s") == (
        program.state,
        program.why,
    )


def test_what_is_kept_goes_on() -> None:
    """Hours, preemptions and since when they are counted, by the GPU and not by its place."""

    before = worked().status()
    moved = before._replace(gpus=tuple(gpu._replace(index=7 + gpu.index) for gpu in before.gpus))

    status = Book(SavedState(moved)).status()

    assert (21.0, WALL) == (status.harvested_seconds, status.since)
    assert [10.5, 10.5] == [gpu.harvested_seconds for gpu in status.gpus]
    assert before.preemptions == status.preemptions


def test_what_the_configuration_no_longer_names_is_not_forgotten() -> None:
    """A GPU and a program that come back go on where they were."""

    book = worked()
    narrow = SETTINGS._replace(gpus={0: frozenset()}, programs=(PROGRAMS[1],))
    between = Book(SavedState(book.status(), book.account.totals()), settings=narrow)

    status = Book(SavedState(between.status(), between.account.totals())).status()

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
        book.look(now + 1, ObservedUse((ALICE,)))
        book.hear(ProgramGone(run), now + 1.5)

    status = book.status()
    assert 50 == len(status.preemptions)
    assert {0.5} == {preemption.took_seconds for preemption in status.preemptions}
    assert 60 == status.gpus[0].preemptions
    assert status == status_from_document(json.loads(json.dumps(status_to_document(status))))


def test_people_in_the_view() -> None:
    """A free GPU says that somebody at the machine keeps it from being used."""

    watched = SETTINGS._replace(people=SETTINGS.people._replace(enabled=True))
    book = Book(settings=watched)
    book.take(
        Observed(
            0.0,
            MachineObservation({0: ObservedUse(), 1: ObservedUse()}, (UserPresence("carol", "tty1", 3.0),)),
        )
    )

    assert "GPU 1: waiting: pair: carol is logged in and active at tty1" in list(
        describe_plan(book.state, 0.0)
    )


def test_the_state_directory(tmp_path: Path) -> None:
    """What is written is found again, by others too; the mark stays the same; nobody else can have the directory."""

    roots = Roots(dev=str(tmp_path))
    (tmp_path / "shm").mkdir()
    book = worked()
    status = book.status()
    state_directory = StateDirectory(str(tmp_path / "state"), roots, uid=os.getuid())
    state_directory.save(status, book.account.totals(), changed=True)
    with pytest.raises(UsageError, match=f"pid {os.getpid()}"):
        StateDirectory(str(tmp_path / "state"), roots, uid=os.getuid())
    published = Path(status_path(roots, os.getuid(), state_directory.mark))
    assert 0o644 == published.stat().st_mode & 0o777
    assert status == status_from_document(json.loads(published.read_text(encoding="utf-8")))
    mark = state_directory.mark
    state_directory.close()

    assert not published.exists()
    assert status == read_saved_status(str(tmp_path / "state"))
    again = StateDirectory(str(tmp_path / "state"), roots, uid=os.getuid())
    assert mark == again.mark
    assert (status, book.account.totals()) == again.load()[:2]
    newer = status._replace(time=status.time + 5, harvested_seconds=99.0)
    again.save(newer, book.account.totals(), changed=False)
    assert newer == again.load().status
    again.close()


def test_processes_before_a_restart_of_the_machine_are_nobodys(tmp_path: Path) -> None:
    """Their numbers belong to others now."""

    roots = Roots(dev=str(tmp_path))
    book = Book()
    book.look(0.0)
    book.hear(started("pair.1"), 0.0)
    state_directory = StateDirectory(str(tmp_path / "state"), roots, uid=os.getuid())
    state_directory.save(book.status(), book.account.totals(), changed=True)
    path = tmp_path / "state" / "ledger.json"
    while not path.exists():  # a thread of its own writes it
        time.sleep(0.001)
    assert (ProcessId(10, 1), ProcessId(11, 2)) == state_directory.load().processes
    document = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**document, "boot": "another"}), encoding="utf-8")

    assert () == state_directory.load().processes
    path.write_text("{", encoding="utf-8")
    assert state_directory.load().status is None
    state_directory.close()


def test_the_processes_of_programs_are_saved(tmp_path: Path) -> None:
    """Whatever became of their parents, so that the next harvest knows them; in the private file, not for everybody."""

    (tmp_path / "shm").mkdir()
    roots = Roots(dev=str(tmp_path))
    book = worked()
    with subprocess.Popen(["sleep", "60"]) as child:
        state_directory = StateDirectory(str(tmp_path / "state"), roots, uid=os.getuid())
        state_directory.save(book.status(), book.account.totals(), changed=True)
        published = Path(status_path(roots, os.getuid(), state_directory.mark)).read_text(encoding="utf-8")
        process = MachineProcessTree().find(child.pid)
        state_directory.close()
        child.kill()
    again = StateDirectory(str(tmp_path / "state"), roots, uid=os.getuid())

    assert process in again.load().processes
    assert "processes" not in json.loads(published)
    assert 0o600 == (tmp_path / "state" / "ledger.json").stat().st_mode & 0o777
    again.close()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files to another user")
def test_a_status_that_another_user_published_is_not_believed(tmp_path: Path) -> None:
    """It could name any process as one of ours."""

    (tmp_path / "shm").mkdir()
    roots = Roots(dev=str(tmp_path))
    book = worked()
    state_directory = StateDirectory(str(tmp_path / "state"), roots, uid=os.getuid())
    planted = Path(status_path(roots, os.getuid(), state_directory.mark))
    planted.write_text(json.dumps(status_to_document(book.status())), encoding="utf-8")
    os.chown(planted, 65534, 65534)

    assert state_directory.load().status is None
    state_directory.close()


def test_a_disk_that_hangs_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What everybody is told goes on, and of what waited only the newest is written."""

    (tmp_path / "shm").mkdir()
    roots = Roots(dev=str(tmp_path))
    book = worked()
    state_directory = StateDirectory(str(tmp_path / "state"), roots, uid=os.getuid())
    hung, written = threading.Event(), []
    real = replace_file

    def slow(path: str, data: bytes, mode: int, *, has_umask: bool = True, durable: bool = True) -> None:
        if durable:  # on the disk; what is published is in memory
            hung.wait(60)
            written.append(json.loads(data)["status"]["time"])
        real(path, data, mode, has_umask=has_umask, durable=durable)

    monkeypatch.setattr("gpulse.harvest.state_directory.replace_file", slow)
    for number in range(5):
        state_directory.save(book.status()._replace(time=float(number)), book.account.totals(), changed=True)
    (published,) = (tmp_path / "shm").glob("*.json")
    assert 4.0 == json.loads(published.read_text(encoding="utf-8"))["time"]
    hung.set()
    state_directory.close()

    assert 4.0 == written[-1]
    assert len(written) <= 2


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    """Is said with a way out."""

    (tmp_path / "file").touch()
    with pytest.raises(DiskError) as caught:
        StateDirectory(str(tmp_path / "file" / "state"), Roots(dev=str(tmp_path)), uid=1)
    assert "--state-dir" in (caught.value.hint or "")


def test_the_status_on_a_terminal() -> None:
    """Everything fits, foreign text is harmless, and one that ended is not shown as if it ran."""

    status = worked().status()
    status = status._replace(gpus=(status.gpus[0]._replace(why="\x1b[31mred"), *status.gpus[1:]))

    for width in (40, 80, 160):
        lines = list(
            status_lines(status, WALL + 60, alive=True, width=width, paint=make_painter(color=False))
        )
        assert all(len(line) <= width for line in lines)
        assert "\x1b" not in "".join(lines)
    text = "\n".join(lines)
    assert "harvested 21 s of GPU time" in text
    assert "stopped after 500 ms" in text
    ended = "\n".join(
        status_lines(status, WALL + 60, alive=False, width=120, paint=make_painter(color=False))
    )
    assert ended.startswith("no harvest of ada is running")
    assert "GPU  state" not in ended
