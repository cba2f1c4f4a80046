"""Groups of processes at the same line, and how they are printed."""

from __future__ import annotations

import json
from collections.abc import Iterable

from gpulse.cli.stacks import stack_lines
from gpulse.cluster.protocol.answers import Stacks
from gpulse.cluster.protocol.codec import encode
from gpulse.cluster.protocol.stack_codec import build_stacks
from gpulse.diagnosis.stack_groups import StackProcess, group_stacks
from gpulse.model.python_stack import ProcessStacks, StackFrame, StackProblem, ThreadStack
from gpulse.terminal.table import make_painter

PLAIN = make_painter(color=False)
LIB = "/usr/lib/python3.11"


def stacks(pid: int, line: int, inner: int = 1) -> ProcessStacks:
    """A process at a line of the user's code, somewhere inside a library."""
    frames = (
        StackFrame(f"{LIB}/site-packages/torch/distributed.py", inner, "all_reduce", "torch/distributed.py"),
        StackFrame("/u/train.py", line, "step", "train.py"),
    )
    idle = ThreadStack("pin", None, False, (StackFrame(f"{LIB}/queue.py", 9, "get", "queue.py"),))
    return ProcessStacks(pid, 0.0, (idle, ThreadStack("MainThread", pid, False, frames)))


def rank(pid: int, gpu: int) -> StackProcess:
    """A rank on a GPU."""
    return StackProcess(pid, "main", "python", (str(gpu),))


def answer(dumps: Iterable[tuple[StackProcess, ProcessStacks]]) -> Stacks:
    """The answer with these stacks."""
    return build_stacks(group_stacks(dumps), 1000.0)


RANKS = [(rank(10 + n, n), stacks(10 + n, 80 if n == 5 else 84, inner=n)) for n in range(8)]
WORKERS = [(StackProcess(50, "worker"), stacks(50, 12))]


def test_the_rank_that_differs_is_first() -> None:
    """The others are one group, whatever the library does inside; workers come last."""
    found = group_stacks([*WORKERS, *RANKS])

    assert [[15], [10, 11, 12, 13, 14, 16, 17], [50]] == [
        [process.pid for process in group.processes] for group in found.groups
    ]


def test_processes_without_stacks_have_their_reason() -> None:
    """They are not in a group."""
    problem = StackProblem("not_permitted", "not yours")
    found = group_stacks([(rank(9, 0), ProcessStacks(9, 0.0, problem=problem)), *RANKS])

    assert [(9, "not yours")] == [(process.pid, each.reason) for process, each in found.problems]
    assert 2 == len(found.groups)


def test_threads_that_wait_in_libraries_are_left_out() -> None:
    """All are there on demand."""
    shown = [group_stacks(RANKS, all_threads=all_threads).groups[0].threads for all_threads in (False, True)]

    assert [["MainThread"], ["MainThread", "pin"]] == [[each.name for each in part] for part in shown]


def test_groups_are_printed() -> None:
    """Who is there, where, and what could not be read."""
    problem = StackProblem("not_python", "process 9 is not a Python program")
    found = group_stacks([(rank(9, 3), ProcessStacks(9, 0.0, problem=problem)), *RANKS])

    assert [
        "1 process, pid 15, GPU 5",
        "  MainThread, waiting",
        "    torch/distributed.py:5 all_reduce",
        "    train.py:80 step",
        "",
        "7 processes at the same line, pid 10 11 12 13 14 16 17, GPUs 0-4,6,7",
        "  MainThread, waiting",
        "    torch/distributed.py:0 all_reduce",
        "    train.py:84 step",
        "",
        "no stacks of pid 9: process 9 is not a Python program",
    ] == list(stack_lines(build_stacks(found, 1000.0), 100, PLAIN, verbose=False))


def test_deep_stacks_are_shortened() -> None:
    """The middle is left out, and counted."""
    frames = tuple(StackFrame("/u/a.py", n, f"f{n}", "a.py") for n in range(100))
    deep = ProcessStacks(1, 0.0, (ThreadStack("MainThread", 1, True, frames),))
    found = group_stacks([(rank(1, 0), deep)])
    lines = list(stack_lines(build_stacks(found, 1000.0), 80, PLAIN, verbose=False))

    assert "    ... 76 more frames (show all with -v)" == lines[14]
    assert (27, 102) == (
        len(lines),
        len(list(stack_lines(build_stacks(found, 1000.0), 80, PLAIN, verbose=True))),
    )


def test_text_from_processes_is_made_safe() -> None:
    """And no line is wider than the terminal."""
    frames = (StackFrame("/u/\x1b[2J.py", 1, "x" * 200, "\x1b[2J.py"),)
    nasty = ProcessStacks(1, 0.0, (ThreadStack("\x07" * 90, 1, True, frames),))
    lines = list(stack_lines(answer([(rank(1, 0), nasty)]), 60, PLAIN, verbose=False))

    assert all(line.isprintable() and len(line) <= 60 for line in lines)


def test_the_json_has_all_frames() -> None:
    """With full paths, in the form that heads use."""
    document = json.loads(encode(answer(RANKS)))
    group = document["groups"][0]

    assert ("1970-01-01T00:16:40.000Z", [], []) == tuple(
        document[key] for key in ("time", "problems", "unanswered")
    )
    assert [{"pid": 15, "role": "main", "name": "python", "gpus": ["5"], "node": None}] == group["processes"]
    assert {"file": "/u/train.py", "short_file": "train.py", "line": 80, "function": "step"} == group[
        "threads"
    ][0]["frames"][1]


def first_line(*processes: StackProcess) -> str:
    """The title of the group that these processes are."""
    return next(
        stack_lines(answer([(each, stacks(each.pid, 84)) for each in processes]), 200, PLAIN, verbose=False)
    )


def test_gpus_are_in_natural_order() -> None:
    """10 comes after 9, not after 1."""
    shown = first_line(*(rank(10 + n, n) for n in range(12)))

    assert shown.endswith(", GPUs 0-11")


def test_the_gpus_of_each_node_are_named() -> None:
    """GPU 0 of one node is not GPU 0 of another."""
    shown = first_line(
        *(rank(7, gpu)._replace(node=node) for node, gpu in (("n10", 0), ("n2", 1), ("n2", 0)))
    )

    assert "3 processes at the same line, n10 pid 7, n2 pid 7 7, n2 GPUs 0,1, n10 GPU 0" == shown


def test_nodes_without_stacks_come_last() -> None:
    """With their reason; those with the same one on one line."""
    unanswered = {
        "n1": "no process uses a GPU there",
        "n2": "it is gone",
        "n3": "no process uses a GPU there",
    }
    lines = list(stack_lines(build_stacks(group_stacks([]), 0.0, unanswered), 100, PLAIN, verbose=False))

    assert ["no stacks from n1, n3: no process uses a GPU there", "no stacks from n2: it is gone"] == lines
