"""The mark in the environment of everything that a run started: its ledger, and the run."""

from __future__ import annotations

import os
from time import sleep

from gpulse.harvest.running.told import Process
from gpulse.harvest.running.tree import Tree
from gpulse.sources.procfs import read_bytes, text, try_read

RUN = "GPULSE_HARVEST_RUN"
"""The variable that names ledger and run."""
_TRIES = 5
_MOMENT_SECONDS = 0.001


def read_environ(process: Process, tree: Tree, proc: str) -> bytes | None:
    """What a process was started with, None when that is hidden or it is not there any more."""
    try:
        variables = read_bytes(f"{proc}/{process.pid}/environ")
    except OSError:
        return None
    return variables if tree.is_there(process) else None


def read_settled_environ(process: Process, tree: Tree, proc: str) -> bytes | None:
    """The same of one that may have been started just now: as it becomes its program it shows nothing for a moment."""
    variables = None
    for _ in range(_TRIES):
        command = try_read(f"{proc}/{process.pid}/cmdline")
        variables = read_environ(process, tree, proc)
        if command or variables != b"":
            break
        sleep(_MOMENT_SECONDS)
    return variables


def run_of(mark: str, variables: bytes) -> str | None:
    """The run of this ledger that these variables name."""
    start = os.fsencode(f"{RUN}={mark}/")
    if start not in variables:
        return None
    named = (text(value.removeprefix(start)) for value in variables.split(b"\0") if value.startswith(start))
    return next(named, None)
