"""The entry point of `gpulse`, which begins to read the GPUs before it parses the command line.

GPM needs a tenth of a second between two samples. Taking the first one before the rest of the program
is even loaded hides most of the program's start in that time.
"""

from __future__ import annotations

import gc
import os
import sys
import time

from gpulse.errors import INTERRUPTED

TYPE_CHECKING = False  # as in typing, whose import this early would cost more than it tells
if TYPE_CHECKING:
    from gpulse.sources.nvml.reader import GpuReader

_OTHER_MACHINES = ("--demo", "--replay", "--help", "--version", "--watch")


def main() -> None:
    """Run `gpulse`."""
    try:
        code = _run()
        if "duckdb" not in sys.modules:  # which counts what is left, and complains
            gc.freeze()  # nothing is left to collect; looking for it would take as long as drawing the table
        sys.exit(code)
    except KeyboardInterrupt:  # before or after the part that deals with it itself
        sys.exit(INTERRUPTED)


def _run() -> int:
    gpus = _opened() if _is_one_look(sys.argv[1:]) else None
    try:
        from gpulse.cli import main as root  # noqa: PLC0415  after the first sample, on purpose
        from gpulse.cli import shell  # noqa: PLC0415

        return shell.run(root.command, name="gpulse", gpus=gpus)
    finally:
        if gpus is not None:
            gpus.close()


def _is_one_look(arguments: list[str]) -> bool:
    """A guess from the looks of the arguments; a wrong one costs a few milliseconds and nothing else."""
    if "_GPULSE_COMPLETE" in os.environ or (arguments and not arguments[0].startswith("-")):
        return False
    return not any(
        argument.startswith(_OTHER_MACHINES)
        or (argument[:1] == "-" and argument[1:2] != "-" and set("wh") & set(argument))
        for argument in arguments
    )


def _opened() -> GpuReader | None:
    """The GPUs, None when anything goes wrong: the look itself meets the same error and reports it."""
    gc.disable()
    gpus: GpuReader | None = None
    try:
        from gpulse.sources.nvml.reader import for_one_look  # noqa: PLC0415  loads the driver's binding

        gpus = for_one_look()
        gpus.open(time.time())
    except Exception:  # noqa: BLE001  outside of the place that stands between a bug and the user
        if gpus is not None:
            gpus.close()
        return None
    return gpus
