"""Processes of a harvest: those below this one, and orphans, whose supervisor is gone and which are found by their mark and ended."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Collection, Iterable
from time import monotonic, sleep
from typing import NamedTuple

from gpulse.harvest.events import ProcessId
from gpulse.harvest.supervise.process_tree import MachineProcessTree
from gpulse.harvest.supervise.supervisor import SUPERVISOR_NAME
from gpulse.sources.process_owners import find_container
from gpulse.sources.procfs import Roots, parse_cgroup, read_bytes, text, try_read
from gpulse.sources.slurm import find_slurm_job

RUN_VARIABLE = "GPULSE_HARVEST_RUN"
"""The variable that names the state directory's mark and the run."""
_MAX_LINEAGE_READS = 3
_MAX_REMEMBERED = 8192
_MAX_ENVIRON_READS = 5
_ENVIRON_PAUSE_SECONDS = 0.001


class OwnProcesses:
    """Finds descendants of this process; results are cached, since a process that is ours stays ours."""

    def __init__(self, tree: MachineProcessTree) -> None:
        self._tree = tree
        self._known: dict[ProcessId, ProcessId | None] = {}
        """Through which child of this process they descend from it; None: they do not."""

    def is_ours(self, pid: int) -> bool:
        """True for this process and its descendants."""
        me = os.getpid()
        if pid == me:
            return True
        process = self._tree.find(pid)
        if process is None:
            return False
        return (self._known[process] if process in self._known else self._find_out(process, me)) is not None

    def was_below(self, process: ProcessId, child: ProcessId) -> bool:
        """True when this process was once seen as a descendant of that child of ours."""
        return self._known.get(process) == child

    def _find_out(self, process: ProcessId, me: int) -> ProcessId | None:
        for _ in range(_MAX_LINEAGE_READS):
            chain = self._tree.lineage(process.pid, me)
            # Parents that are the same twice were the parents in between: no number was used again.
            if chain and chain[0] == process and chain == self._tree.lineage(process.pid, me):
                return self._remember(process, chain[-2] if chain[-1].pid == me else None)
        return None

    def _remember(self, process: ProcessId, child: ProcessId | None) -> ProcessId | None:
        if len(self._known) >= _MAX_REMEMBERED:
            self._known.clear()
        self._known[process] = child
        return child


def read_environ(process: ProcessId, tree: MachineProcessTree, proc: str) -> bytes | None:
    """Return the environment a process was started with; None when it is hidden or the process is gone."""
    try:
        variables = read_bytes(f"{proc}/{process.pid}/environ")
    except OSError:
        return None
    return variables if tree.is_there(process) else None


def read_settled_environ(process: ProcessId, tree: MachineProcessTree, proc: str) -> bytes | None:
    """Return the environment of a process that may have just been started: during exec it is empty for a moment."""
    variables = None
    for _ in range(_MAX_ENVIRON_READS):
        command = try_read(f"{proc}/{process.pid}/cmdline")
        variables = read_environ(process, tree, proc)
        if command or variables != b"":
            break
        sleep(_ENVIRON_PAUSE_SECONDS)
    return variables


def run_of(mark: str, variables: bytes) -> str | None:
    """Return the run that these variables name, if they have the mark of this state directory."""
    start = os.fsencode(f"{RUN_VARIABLE}={mark}/")
    if start not in variables:
        return None
    named = (text(value.removeprefix(start)) for value in variables.split(b"\0") if value.startswith(start))
    return next(named, None)


_KILL_SECONDS = 5.0
"""How long they may take to go once they are killed."""
_MIN_PAUSE_SECONDS = 0.002
_MAX_PAUSE_SECONDS = 0.1


class Orphan(NamedTuple):
    """A process of a run whose harvest is gone."""

    process: ProcessId
    name: str
    """The kernel's name for it."""
    mark: str
    """The mark of the state directory that its harvest had."""
    run: str | None
    """None: its environment does not name it or cannot be read."""
    is_supervisor: bool


def find_orphans(mark: str, known: Iterable[ProcessId], roots: Roots = Roots()) -> list[Orphan]:  # noqa: B008  frozen
    """Return the remaining processes of this state directory's runs: known ones, others of their sessions, and descendants.

    Anybody can copy the mark into the environment of another process, so the mark alone proves nothing. A session
    does: a process gets into one only as a descendant of the program that began it.

    Neither this process, nor what it descends from, nor anything that it runs itself is an orphan. Nor is one that
    the state directory knows and whose environment shows no mark, nor one that got its mark through a batch system or a
    container's engine: it was never below a supervisor.

    Args:
        mark: The mark of the state directory.
        known: The processes that the state directory knows, also those that have ended.
        roots: Where the kernel's files are.
    """
    tree = MachineProcessTree(roots.proc)
    known = list(known)
    proven = [process for process in known if _may_be_orphan(process, mark, tree, roots.proc)]
    return _list_orphans(mark, proven, {process.pid for process in known}, tree, roots.proc)


def _list_orphans(
    mark: str, proven: Collection[ProcessId], leaders: set[int], tree: MachineProcessTree, proc: str
) -> list[Orphan]:
    me = tree.myself()
    ours = {me, *tree.lineage(me.pid, 0), *tree.below(me)}
    everyone = {ProcessId(pid, stat.start_ticks): stat for pid, stat in tree.everyone().items()}
    runs = _find_marked(mark, everyone, tree, proc)
    sessions = leaders | {everyone[process].session for process in proven if process in everyone}
    manager = _find_job_and_container(me.pid, proc)
    started = {
        process
        for process in runs
        if everyone[process].session in sessions - {os.getsid(0)}
        and _find_job_and_container(process.pid, proc) in (None, manager)
    }
    found = _with_descendants({*proven, *started} - ours, tree) - ours
    return [_build_orphan(process, mark, runs.get(process), proc) for process in sorted(found)]


async def end_orphans(found: Iterable[Orphan], grace: float, roots: Roots = Roots()) -> list[Orphan]:  # noqa: B008  frozen
    """End orphans and everything they start meanwhile; return those that could not be ended.

    Supervisors that live have begun to end their programs when their harvest died, and are left to it for the grace.
    What has no supervisor is asked to end, and killed after the grace.
    """
    left = list(found)
    tree = MachineProcessTree(roots.proc)
    begun = monotonic()
    deadline, limit = begun + grace, begun + grace + _KILL_SECONDS
    while left and monotonic() < limit:
        await _end_orphans_once(left, tree, deadline, limit)
        # A process that left its parents is known by its session.
        proven = [orphan.process for orphan in left]
        left = _list_orphans(left[0].mark, proven, {process.pid for process in proven}, tree, roots.proc)
        deadline = min(deadline, monotonic())
    return left


async def _end_orphans_once(
    orphans: Collection[Orphan], tree: MachineProcessTree, deadline: float, limit: float
) -> None:
    supervisors = {orphan.process for orphan in orphans if orphan.is_supervisor}
    for supervisor in supervisors:
        tree.send(supervisor, signal.SIGCONT)
    kept = _with_descendants(supervisors, tree)
    alone = {orphan.process for orphan in orphans} - kept
    await asyncio.gather(
        *(
            end_processes(
                _build_alive_finder(group, tree),
                tree=tree,
                stop_signal=number,
                deadline=lambda: deadline,
                limit=limit,
            )
            for group, number in ((kept, 0), (alone, signal.SIGTERM))
        )
    )


def _build_alive_finder(
    members: set[ProcessId], tree: MachineProcessTree
) -> Callable[[], Collection[ProcessId]]:
    def left() -> Collection[ProcessId]:
        members.update(_with_descendants(members, tree))
        return {process for process in members if tree.is_there(process)}

    return left


def _with_descendants(processes: Collection[ProcessId], tree: MachineProcessTree) -> set[ProcessId]:
    """Return those that have not ended, and their descendants."""
    there = {process for process in processes if tree.is_there(process)}
    below = (tree.below(process).items() for process in there)
    return there | {child for family in below for child, stat in family if not stat.ended}


def _may_be_orphan(process: ProcessId, mark: str, tree: MachineProcessTree, proc: str) -> bool:
    """False when its environment can be read and does not show the mark that supervisors and programs bear."""
    variables = read_environ(process, tree, proc)
    return variables is None or run_of(mark, variables) is not None


def _find_marked(
    mark: str, everyone: Iterable[ProcessId], tree: MachineProcessTree, proc: str
) -> dict[ProcessId, str]:
    """Return the run of each process with this mark, as far as environments can be read."""
    variables = ((process, read_environ(process, tree, proc) or b"") for process in everyone)
    return {process: run for process, found in variables if (run := run_of(mark, found)) is not None}


def _find_job_and_container(pid: int, proc: str) -> tuple[str | None, str | None] | None:
    """Return the Slurm job and the container of a process; None when it is in neither."""
    paths = parse_cgroup(try_read(f"{proc}/{pid}/cgroup") or b"").values()
    found = find_slurm_job(paths), find_container(paths)
    return found if any(found) else None


def _build_orphan(process: ProcessId, mark: str, run: str | None, proc: str) -> Orphan:
    name = text(try_read(f"{proc}/{process.pid}/comm") or b"").strip()
    return Orphan(process, name, mark, run, is_supervisor=name == SUPERVISOR_NAME)


async def end_processes(
    find: Callable[[], Collection[ProcessId]],
    *,
    tree: MachineProcessTree,
    stop_signal: int,
    deadline: Callable[[], float],
    limit: float | None = None,
) -> Collection[ProcessId]:
    """End the processes that `find` returns until there are none; return those left at the limit (monotonic).

    Each process is asked once, and killed when the deadline has passed.
    """
    asked: set[ProcessId] = set()
    pause = _MIN_PAUSE_SECONDS
    before: set[ProcessId] = set()
    while found := find():
        now = monotonic()
        if limit is not None and now >= limit:
            break
        if now >= deadline():
            for process in found:
                tree.send(process, signal.SIGKILL)
        else:
            for process in set(found) - asked:
                tree.send(process, stop_signal)
            asked.update(found)
        pause = _MIN_PAUSE_SECONDS if before - set(found) else min(2 * pause, _MAX_PAUSE_SECONDS)
        before = set(found)
        await asyncio.sleep(min(pause, max(_MIN_PAUSE_SECONDS, deadline() - now)))
    return found
