"""What an earlier harvest of the same ledger left behind when it was killed."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Collection, Iterable
from time import monotonic
from typing import NamedTuple

from gpulse.harvest.running.ending import end as end_all
from gpulse.harvest.running.errand import RUN
from gpulse.harvest.running.keeping import NAME
from gpulse.harvest.running.told import Process
from gpulse.harvest.running.tree import Tree
from gpulse.sources.procfs import Roots, read_bytes, text, try_read

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

    Neither this process, nor what it descends from, nor anything that it runs itself is an orphan.
    """
    tree = Tree(roots.proc)
    me = tree.myself()
    ours = {me, *tree.lineage(me.pid, 0), *tree.below(me)}
    runs = _marked(mark, tree, roots.proc)
    found = _with_descendants({*known, *runs} - ours, tree) - ours
    return [_orphan(process, mark, runs.get(process), roots.proc) for process in sorted(found)]


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
        left = find(left[0].mark, [orphan.process for orphan in left], roots)
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


def _marked(mark: str, tree: Tree, proc: str) -> dict[Process, str]:
    """The run of each process that bears this mark, as far as environments may be read."""
    runs: dict[Process, str] = {}
    for pid, stat in tree.everyone().items():
        run = _run(mark, f"{proc}/{pid}/environ")
        process = Process(pid, stat.start_ticks)
        if run is not None and tree.find(pid) == process:
            runs[process] = run
    return runs


def _run(mark: str, path: str) -> str | None:
    start = os.fsencode(f"{RUN}={mark}/")
    try:
        variables = read_bytes(path)
    except OSError:
        return None
    if start not in variables:
        return None
    named = (text(value.removeprefix(start)) for value in variables.split(b"\0") if value.startswith(start))
    return next(named, None)


def _orphan(process: Process, mark: str, run: str | None, proc: str) -> Orphan:
    name = text(try_read(f"{proc}/{process.pid}/comm") or b"").strip()
    return Orphan(process, name, mark, run, is_keeper=name == NAME)
