"""What an earlier harvest of the same ledger left behind when it was killed."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Collection, Iterable
from time import monotonic
from typing import NamedTuple

from gpulse.harvest.running.ending import end as end_all
from gpulse.harvest.running.keeping import NAME
from gpulse.harvest.running.marks import read_environ, run_of
from gpulse.harvest.running.told import Process
from gpulse.harvest.running.tree import Tree
from gpulse.sources.owners import container
from gpulse.sources.procfs import Roots, text, try_read
from gpulse.sources.procpid import parse_cgroup
from gpulse.sources.slurm import slurm_job

_KILL_SECONDS = 5.0
"""How long they may take to go once they are killed."""


class Orphan(NamedTuple):
    """A process of a run whose harvest is not there any more."""

    process: Process
    name: str
    """What the kernel calls it."""
    mark: str
    """The ledger's."""
    run: str | None
    """None: its environment does not tell, or is hidden."""
    is_keeper: bool


def find(mark: str, known: Iterable[Process], roots: Roots = Roots()) -> list[Orphan]:  # noqa: B008  frozen
    """What is left of runs of this ledger: processes it knows, all that bear its mark, and what descends from them.

    Neither this process, nor what it descends from, nor anything that it runs itself is an orphan. Nor is one that
    the ledger knows and whose environment shows no mark, nor one that got its mark through a batch system or a
    container's engine: it was never below a keeper.
    """
    tree = Tree(roots.proc)
    proven = [process for process in known if _may_be(process, mark, tree, roots.proc)]
    return _find(mark, proven, tree, roots.proc)


def _find(mark: str, proven: Iterable[Process], tree: Tree, proc: str) -> list[Orphan]:
    me = tree.myself()
    ours = {me, *tree.lineage(me.pid, 0), *tree.below(me)}
    runs = _marked(mark, tree, proc)
    manager = _manager(me.pid, proc)
    started = {process for process in runs if _manager(process.pid, proc) in (None, manager)}
    found = _with_descendants({*proven, *started} - ours, tree) - ours
    return [_orphan(process, mark, runs.get(process), proc) for process in sorted(found)]


async def end(found: Iterable[Orphan], grace: float, roots: Roots = Roots()) -> list[Orphan]:  # noqa: B008  frozen
    """End them and whatever they start meanwhile; gives those that could not be ended.

    Keepers that live have begun to end their programs when their harvest died, and are left to it for the grace.
    What has no keeper is asked to end, and killed after the grace.
    """
    left = list(found)
    tree = Tree(roots.proc)
    begun = monotonic()
    deadline, limit = begun + grace, begun + grace + _KILL_SECONDS
    while left and monotonic() < limit:
        await _end_once(left, tree, deadline, limit)
        # What left its family to be nobody's child is known by its mark alone.
        left = _find(left[0].mark, [orphan.process for orphan in left], tree, roots.proc)
        deadline = min(deadline, monotonic())
    return left


async def _end_once(orphans: Collection[Orphan], tree: Tree, deadline: float, limit: float) -> None:
    keepers = {orphan.process for orphan in orphans if orphan.is_keeper}
    for keeper in keepers:
        tree.send(keeper, signal.SIGCONT)
    kept = _with_descendants(keepers, tree)
    alone = {orphan.process for orphan in orphans} - kept
    await asyncio.gather(
        *(
            end_all(
                _still(group, tree), tree=tree, stop_signal=number, deadline=lambda: deadline, limit=limit
            )
            for group, number in ((kept, 0), (alone, signal.SIGTERM))
        )
    )


def _still(members: set[Process], tree: Tree) -> Callable[[], Collection[Process]]:
    def left() -> Collection[Process]:
        members.update(_with_descendants(members, tree))
        return {process for process in members if tree.is_there(process)}

    return left


def _with_descendants(processes: Collection[Process], tree: Tree) -> set[Process]:
    """Those that have not ended, and what descends from them."""
    there = {process for process in processes if tree.is_there(process)}
    below = (tree.below(process).items() for process in there)
    return there | {child for family in below for child, stat in family if not stat.ended}


def _may_be(process: Process, mark: str, tree: Tree, proc: str) -> bool:
    """False when its environment can be read and does not show the mark that keepers and programs bear."""
    variables = read_environ(process, tree, proc)
    return variables is None or run_of(mark, variables) is not None


def _marked(mark: str, tree: Tree, proc: str) -> dict[Process, str]:
    """The run of each process that bears this mark, as far as environments may be read."""
    everyone = (Process(pid, stat.start_ticks) for pid, stat in tree.everyone().items())
    variables = ((process, read_environ(process, tree, proc) or b"") for process in everyone)
    return {process: run for process, found in variables if (run := run_of(mark, found)) is not None}


def _manager(pid: int, proc: str) -> tuple[str | None, str | None] | None:
    """The Slurm job and the container that a process runs in, None when it is in neither."""
    paths = parse_cgroup(try_read(f"{proc}/{pid}/cgroup") or b"").values()
    found = slurm_job(paths), container(paths)
    return found if any(found) else None


def _orphan(process: Process, mark: str, run: str | None, proc: str) -> Orphan:
    name = text(try_read(f"{proc}/{process.pid}/comm") or b"").strip()
    return Orphan(process, name, mark, run, is_keeper=name == NAME)
