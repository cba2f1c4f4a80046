"""Choose the processes of the jobs on GPUs, and group their stacks: the process that differs stands out."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from gpulse.diagnosis.code_lines import find_main_thread, is_own_code, view_stack
from gpulse.diagnosis.line_search import find_workers
from gpulse.model.finding import CodeRole
from gpulse.model.frame import Frame
from gpulse.model.process import ProcessIdentity
from gpulse.model.python_stack import ProcessStacks, StackProblem, ThreadStack

MAX_PROCESSES = 256
"""Number of processes of one machine whose stacks are read at once."""


class StackProcess(NamedTuple):
    """A process whose stacks were wanted."""

    pid: int
    role: CodeRole
    name: str | None = None
    gpus: tuple[str, ...] = ()
    """Labels of the GPUs that it uses."""
    node: str | None = None
    """Where it runs, when the processes are of several machines."""


class StackGroup(NamedTuple):
    """Processes of one role that are at the same lines of their own code."""

    processes: tuple[StackProcess, ...]
    threads: tuple[ThreadStack, ...]
    """Threads of the first process: the main thread first, then those that run or have code of the user."""


class StackGroups(NamedTuple):
    """All groups, the smallest first, and the processes whose stacks could not be read."""

    groups: tuple[StackGroup, ...]
    problems: tuple[tuple[StackProcess, StackProblem], ...]


def group_stacks(
    dumps: Iterable[tuple[StackProcess, ProcessStacks]], *, all_threads: bool = False
) -> StackGroups:
    """Group processes that are at the same place.

    Two processes are at the same place when their main threads are at the same lines of the user's own code; without
    such lines, when their whole stacks are equal. Processes on GPUs come before their workers, and small groups before
    large ones: in a job that hangs, the rank that differs is the first.

    Args:
        dumps: The stacks of each process.
        all_threads: Keep all threads, also those that wait in library code.
    """
    groups: dict[object, list[tuple[StackProcess, ProcessStacks]]] = {}
    problems = []
    for process, stacks in dumps:
        if stacks.problem is not None:
            problems.append((process, stacks.problem))
        elif stacks.threads:
            groups.setdefault((process.role, _place(stacks)), []).append((process, stacks))
    found = [
        StackGroup(
            tuple(process for process, _ in members), choose_threads(members[0][1], all_threads=all_threads)
        )
        for members in groups.values()
    ]
    found.sort(key=lambda group: (group.processes[0].role != "main", len(group.processes)))
    return StackGroups(tuple(found), tuple(problems))


def _place(stacks: ProcessStacks) -> object:
    main = find_main_thread(stacks)
    lines = view_stack(main).lines
    frames = lines or main.frames
    return tuple((frame.file, frame.line, frame.function) for frame in frames)


def choose_threads(stacks: ProcessStacks, *, all_threads: bool = False) -> tuple[ThreadStack, ...]:
    """Return the main thread, then those that run or have code of the user, or all others."""
    if not stacks.threads:
        return ()
    main = find_main_thread(stacks)
    others = [
        thread
        for thread in stacks.threads
        if thread is not main and (all_threads or thread.is_active or any(map(is_own_code, thread.frames)))
    ]
    return (main, *others)


def list_processes(frame: Frame, job: str | None) -> list[StackProcess]:
    """Return the processes on GPUs in a frame, limited to a job if one is given, then their workers.

    At most `MAX_PROCESSES`.
    """
    named = {process.pid: process.identity for process in frame.processes}
    gpus: dict[int, list[str]] = {}
    for gpu in frame.gpus:
        for process in gpu.processes or ():
            gpus.setdefault(process.pid, []).append(gpu.device.label)
    mains = [pid for pid in gpus if job is None or _is_of_job(named.get(pid), job)]
    workers = dict.fromkeys(pid for main in mains for pid in find_workers(frame, [main]))
    found = [StackProcess(pid, "main", _name(named.get(pid)), tuple(gpus[pid])) for pid in mains]
    found += [StackProcess(pid, "worker", _name(named.get(pid))) for pid in workers]
    return found[:MAX_PROCESSES]


def is_job(known: str, wanted: str) -> bool:
    """Return whether a job such as `slurm:4711` is the wanted one, which may be given without its scheduler."""
    return wanted in (known, known.partition(":")[2])


def _name(identity: ProcessIdentity | None) -> str | None:
    return None if identity is None else identity.name


def _is_of_job(identity: ProcessIdentity | None, wanted: str) -> bool:
    job = None if identity is None else identity.owner.job
    return job is not None and is_job(job, wanted)
