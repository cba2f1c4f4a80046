from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest

from gpulse.harvest.events import ProcessId
from gpulse.harvest.supervise.own_processes import OwnProcesses, read_settled_environ
from gpulse.harvest.supervise.process_tree import MachineProcessTree
from tests.unit.trees import grow

ME = 10


def stat(pid: int, parent: int, start: int = 100, state: str = "S", comm: str = "a) (b") -> dict[str, str]:
    """One process that leads its group and session."""
    return {
        f"proc/{pid}/stat": f"{pid} ({comm}) {state} {parent} {pid} {pid} " + "0 " * 15 + f"{start} 0 0\n"
    }


def a_tree(folder: Path, *processes: dict[str, str]) -> MachineProcessTree:
    """A /proc of a kernel that does not list children."""
    files: dict[str, str | bytes] = {}
    for process in processes:
        files |= process
    return MachineProcessTree(grow(folder, files).proc)


def test_a_process_is_read_whatever_it_is_called(tmp_path: Path) -> None:
    """A name may hold parentheses and blanks; what is cut off or hidden is nobody."""

    tree = a_tree(tmp_path, stat(ME, 1, 55), {"proc/11/stat": "11 (cut) S 1"}, {"proc/12/stat": ""})

    assert ProcessId(ME, 55) == tree.find(ME)
    assert [None, None, None] == [tree.look(pid) for pid in (11, 12, 13)]
    assert [ME] == list(tree.everyone())


def test_one_that_ended_or_was_replaced_is_not_there(tmp_path: Path) -> None:
    """Neither a zombie nor another process of that number is the one that was meant."""

    tree = a_tree(tmp_path, stat(10, 1, 55), stat(11, 1, 55, "Z"))

    assert tree.is_there(ProcessId(10, 55))
    assert [False, False] == [tree.is_there(process) for process in (ProcessId(10, 54), ProcessId(11, 55))]


def test_descendants_are_found_without_the_kernels_lists(tmp_path: Path) -> None:
    """Children, grandchildren, and no one else; below a number that means another process there is nobody."""

    tree = a_tree(tmp_path, stat(10, 1), stat(11, 10, 110), stat(12, 11, 120), stat(13, 1), stat(14, 13))

    assert {ProcessId(11, 110), ProcessId(12, 120)} == set(tree.below(ProcessId(10, 100)))
    assert {} == tree.below(ProcessId(10, 99))


def test_a_chain_of_parents_ends_where_it_is_broken(tmp_path: Path) -> None:
    """At the top that was asked for, at a process that cannot be seen, and at one that was there already."""

    tree = a_tree(tmp_path, stat(10, 9), stat(11, 10), stat(20, 21), stat(21, 20))

    assert [11, 10] == [process.pid for process in tree.lineage(11, 10)]
    assert [11, 10] == [process.pid for process in tree.lineage(11, 1)]
    assert [20, 21] == [process.pid for process in tree.lineage(20, 1)]


class MovingTree(MachineProcessTree):
    """A machine where the parent of one process dies while it is looked at, and its number is used again."""

    def __init__(self, proc: str) -> None:
        super().__init__(proc)
        self.looks = 0

    def lineage(self, pid: int, top: int) -> tuple[ProcessId, ...]:
        """The first look goes through a process of ours that has the number of the dead parent."""
        self.looks += 1
        return (
            (ProcessId(pid, 1), ProcessId(50, 2), ProcessId(top, 3))
            if self.looks == 1
            else (ProcessId(pid, 1),)
        )


def test_a_parent_that_died_in_between_proves_nothing(tmp_path: Path) -> None:
    """Somebody is ours only when two readings of the parents say the same."""

    tree = MovingTree(grow(tmp_path, {**stat(40, 50, 1)}).proc)

    assert not OwnProcesses(tree).is_ours(40)
    assert 4 == tree.looks


class StartingTree(MachineProcessTree):
    """A machine where a process becomes its program while it is looked at."""

    def __init__(self, proc: str) -> None:
        super().__init__(proc)
        self.folder = Path(proc) / str(ME)

    def is_there(self, process: ProcessId) -> bool:
        """After the first look it shows with what it was started."""
        (self.folder / "environ").write_text("A=b\0")
        (self.folder / "cmdline").write_text("sleep\0")
        return super().is_there(process)


def test_what_is_being_started_shows_its_environment_soon(tmp_path: Path) -> None:
    """An empty one counts only when there is a command; one that is hidden, or whose process ended, is unknown."""

    empty = {f"proc/{pid}/{name}": "" for pid in (ME, 12) for name in ("environ", "cmdline")}
    cleared = {"proc/11/environ": "", "proc/11/cmdline": "sleep\0"}
    processes = [stat(ME, 1), stat(11, 1), stat(12, 1, state="Z"), stat(13, 1)]
    proc = grow(
        tmp_path, {name: text for files in (*processes, empty, cleared) for name, text in files.items()}
    ).proc

    shown = [read_settled_environ(ProcessId(pid, 100), StartingTree(proc), proc) for pid in (11, 12, 13)]
    assert [b"", None, None] == shown
    grow(tmp_path, empty)
    assert b"A=b\0" == read_settled_environ(ProcessId(ME, 100), StartingTree(proc), proc)


@pytest.mark.parametrize("shift", [-1, 1])
def test_a_signal_never_reaches_another_start(shift: int) -> None:
    """A process that has the number but not the start is not sent anything; the one that was meant is."""

    tree = MachineProcessTree()
    with subprocess.Popen(["sleep", "60"]) as child:
        process = tree.find(child.pid)
        assert process is not None
        other = ProcessId(process.pid, process.start_ticks + shift)

        assert not tree.send(other, signal.SIGKILL)
        assert child.poll() is None
        assert tree.send(process, signal.SIGTERM)
        assert -signal.SIGTERM == child.wait()
        assert not tree.send(process, signal.SIGTERM)
