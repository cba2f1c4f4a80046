"""`gpulse stacks`: print the stacks of Python processes once, equal ones together."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from typing import Any

import click

from gpulse.cli import common, head_client
from gpulse.cluster.protocol.answers import (
    StackFrameAnswer,
    StackGroupAnswer,
    StackProblemAnswer,
    StackProcessAnswer,
    Stacks,
    ThreadStackAnswer,
    UnansweredNode,
)
from gpulse.cluster.protocol.stack_codec import build_stacks
from gpulse.diagnosis.code_lines import is_own_code
from gpulse.diagnosis.stack_groups import MAX_PROCESSES, StackProcess, group_stacks, list_processes
from gpulse.errors import GpulseError, UsageError
from gpulse.model.device import gpu_label
from gpulse.model.finding import format_places
from gpulse.model.python_stack import StackFrame
from gpulse.model.safe_text import natural_key
from gpulse.sampling.sampler import open_machine_for_snapshot
from gpulse.sources.procfs import ProcessDescendants, Roots
from gpulse.sources.python_stacks import StackReader, find_py_spy, read_all
from gpulse.terminal import value_format as f
from gpulse.terminal.table import Paint, truncate, wrap

_READ_SECONDS = 30.0
"""Time for reading all processes; those that are left are named."""
EXIT_NO_STACKS = 3
_MAX_PIDS = 16
_MAX_NODES = 8
_MAX_FRAMES = 24
"""Frames of a stack that are shown; of longer ones, the middle is left out."""


@click.command()
@click.option(
    "--pid",
    type=click.IntRange(min=1),
    metavar="PID",
    help="Print only this process and its descendants, whether they use a GPU or not.",
)
@click.option(
    "--job",
    metavar="ID",
    help="Print only the processes of this scheduler job, such as 4711 or slurm:4711.",
)
@click.option(
    "--node",
    "nodes",
    multiple=True,
    metavar="NAME",
    help="Print only processes of this node of a head; repeatable. Without --job: all processes that use its GPUs.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("-v", "--verbose", is_flag=True, help="Show all threads, and stacks in full.")
@click.option("--no-color", is_flag=True, help="Do not use colors (same as NO_COLOR=1).")
@head_client.options
def command(
    *,
    pid: int | None,
    job: str | None,
    nodes: tuple[str, ...],
    as_json: bool,
    verbose: bool,
    no_color: bool,
    **given: Any,
) -> int:
    """Print the current stacks of all Python processes that use GPUs, and of their workers.

    Processes that are at the same line of their own code are printed together. Processes that differ from the others
    come first: in a job that hangs, these are the ranks to look at. The processes are not stopped.

    \b
    gpulse stacks               print all processes that use GPUs, and their workers
    gpulse stacks --pid 4711    print one process and its descendants
    gpulse stacks --job 1234    print one scheduler job
    gpulse stacks --job 1234 --head gpu-head    print all ranks of a job, on every node

    With --head or --node, the head collects the stacks from its agents, which must have been started with --lines. This
    needs the head's token, because stacks show the code of other users' programs.

    This command needs py-spy and the permission to read the processes. The exit code is 3 when no stack could be read.
    """  # noqa: D301  click needs the backspace itself
    if pid is not None and job is not None:
        raise click.UsageError("--pid and --job cannot be used together")
    head = head_client.pop_target(given)
    if nodes or head != head_client.HeadTarget():
        if pid is not None:
            raise click.UsageError("--pid cannot be used with --head or --node")
        answer = _ask_head(head, job, nodes)
    else:
        answer = _read_here(
            _family_of(pid) if pid is not None else _on_gpus(job), all_threads=verbose or as_json
        )
    if as_json:
        head_client.print_json(answer)
    else:
        paint = common.paint(no_color=no_color)
        for line in stack_lines(answer, common.terminal_width(), paint, verbose=verbose):
            common.write(line)
    return 0 if answer.groups else EXIT_NO_STACKS


def _ask_head(head: head_client.HeadTarget, job: str | None, nodes: Sequence[str]) -> Stacks:
    if job is None and not nodes:
        raise UsageError(
            "with --head, a job or a node must be given", hint="gpulse stacks --job ID --head HOST"
        )
    with head_client.connect_to_head(head) as connection:
        return connection.call("stacks", Stacks, {"job": job, "nodes": list(nodes)})


def _read_here(processes: Sequence[StackProcess], *, all_threads: bool) -> Stacks:
    """Return the stacks of processes of this machine as a head would."""
    now = time.time()
    pids = [process.pid for process in processes]
    stacks = read_all(pids, StackReader(find_py_spy()), _READ_SECONDS).stacks
    return build_stacks(group_stacks(zip(processes, stacks, strict=True), all_threads=all_threads), now)


def _family_of(pid: int) -> list[StackProcess]:
    """Return a process and its descendants, without this one."""
    found = ProcessDescendants(Roots()).descendants(time.monotonic(), [pid])
    family = [each for each in found if each != os.getpid()]
    return [
        StackProcess(pid, "main"),
        *(StackProcess(each, "worker") for each in family[: MAX_PROCESSES - 1]),
    ]


def _on_gpus(job: str | None) -> list[StackProcess]:
    """Return the processes on GPUs and their workers, limited to a job if one is given.

    Raises:
        GpulseError: There are none.
        UsageError: The job has none.
    """
    with closing(open_machine_for_snapshot()) as machine:
        frame = machine.sample(time.time(), patient=True)
    found = list_processes(frame, job)
    if not found and job is not None:
        raise UsageError(
            f"no process of job {job} uses a GPU of this machine",
            hint="list the processes that use GPUs, with their jobs: gpulse -c",
        )
    if not found:
        raise GpulseError(
            "no process uses a GPU of this machine",
            hint="choose a process with --pid PID (it need not use a GPU); `gpulse doctor` shows what can be read",
        )
    return found


def stack_lines(answer: Stacks, width: int, paint: Paint, *, verbose: bool) -> Iterator[str]:
    """Yield the groups, then the processes without stacks and the nodes without an answer.

    Args:
        answer: The stacks of this machine, or those of several nodes from a head.
        width: Columns of the terminal; no line is wider.
        paint: Adds colors.
        verbose: Show stacks in full.
    """
    for place, group in enumerate(answer.groups):
        if place:
            yield ""
        yield from _group_lines(group, width, paint, verbose=verbose)
    missing = [*_problem_texts(answer.problems), *_unanswered_texts(answer.unanswered)]
    if missing and answer.groups:
        yield ""
    for text in missing:
        yield from (paint("dim", line) for line in wrap(f.plain(text), width, "  "))


def _problem_texts(problems: Iterable[StackProblemAnswer]) -> Iterator[str]:
    reasons: dict[str, list[StackProblemAnswer]] = {}
    for problem in problems:
        reasons.setdefault(problem.reason, []).append(problem)
    for reason, processes in reasons.items():
        yield f"no stacks of {_pids(processes)}: {reason}"


def _unanswered_texts(unanswered: Iterable[UnansweredNode]) -> Iterator[str]:
    reasons: dict[str, list[str]] = {}
    for node in unanswered:
        reasons.setdefault(node.reason, []).append(node.node)
    for reason, nodes in reasons.items():
        more = f" and {f.count_noun(len(nodes) - _MAX_NODES, 'more node')}" if len(nodes) > _MAX_NODES else ""
        yield f"no stacks from {', '.join(nodes[:_MAX_NODES])}{more}: {reason}"


def _group_lines(group: StackGroupAnswer, width: int, paint: Paint, *, verbose: bool) -> Iterator[str]:
    processes = group.processes
    noun = "process" if processes[0].role == "main" else "worker"
    count = f"{len(processes)} {noun}{'' if len(processes) == 1 else 'es' if noun == 'process' else 's'}"
    same = f"{count} at the same line" if len(processes) > 1 else count
    text = ", ".join((same, _pids(processes), *_gpus(processes)))
    yield from (paint("title", line) for line in wrap(f.plain(text), width, "  "))
    for thread in group.threads:
        yield from _thread_lines(thread, width, paint, verbose=verbose)


def _pids(processes: Sequence[StackProcessAnswer]) -> str:
    nodes: dict[str | None, list[int]] = {}
    for process in processes:
        nodes.setdefault(process.node, []).append(process.pid)
    texts = []
    for node, pids in nodes.items():
        more = f" and {len(pids) - _MAX_PIDS} more" if len(pids) > _MAX_PIDS else ""
        where = "" if node is None else f"{node} "
        texts.append(f"{where}pid {' '.join(map(str, pids[:_MAX_PIDS]))}{more}")
    return ", ".join(texts)


def _gpus(processes: Iterable[StackProcessAnswer]) -> tuple[str, ...]:
    """Return the GPUs of processes: `GPUs 0-7` on this machine, `n1 GPUs 0-7` for each node of a head."""
    here = {label for process in processes if process.node is None for label in process.gpus}
    other_nodes = [
        {"node": process.node, "label": label}
        for process in processes
        if process.node is not None
        for label in process.gpus
    ]
    own = (gpu_label(sorted(here, key=natural_key)),) if here else ()
    return *own, *format_places(other_nodes)


def _thread_lines(thread: ThreadStackAnswer, width: int, paint: Paint, *, verbose: bool) -> Iterator[str]:
    state = "running" if thread.active else "waiting"
    yield paint("dim", truncate(f.plain(f"  {thread.name or 'unnamed thread'}, {state}"), width))
    frames = thread.frames
    left_out = 0 if verbose else max(0, len(frames) - _MAX_FRAMES)
    for place, frame in enumerate(frames):
        if left_out and place == _MAX_FRAMES // 2:
            yield paint(
                "dim", truncate(f"    ... {f.count_noun(left_out, 'more frame')} (show all with -v)", width)
            )
        if left_out and _MAX_FRAMES // 2 <= place < _MAX_FRAMES // 2 + left_out:
            continue
        yield _frame_line(frame, width, paint)


def _frame_line(answer: StackFrameAnswer, width: int, paint: Paint) -> str:
    frame = StackFrame(answer.file, answer.line, answer.function, answer.short_file)
    text = truncate(f.plain(f"    {frame.shown_file}:{frame.line} {frame.function}"), width)
    return paint("name", text) if is_own_code(frame) else text
