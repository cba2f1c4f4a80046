"""Entry point of `gpulse`, which starts to read the GPUs before it parses the command line.

GPM (the driver's performance counters) needs a tenth of a second between two samples. Taking the first one before the
rest of the program is loaded hides most of the start-up time.
"""

from __future__ import annotations

import gc
import os
import sys
import time

from gpulse.errors import EXIT_INTERRUPTED

TYPE_CHECKING = False  # as in typing, which is too slow to import this early
if TYPE_CHECKING:
    from gpulse.sources.nvml.gpu_reader import GpuReader

_OTHER_MODES = ("--demo", "--replay", "--help", "--version", "--watch")


def main() -> None:
    """Run `gpulse`."""
    try:
        code = _run()
        if "duckdb" not in sys.modules:  # it complains about objects that are left
            gc.freeze()  # a last collection would take as long as drawing the table, and find nothing
        sys.exit(code)
    except KeyboardInterrupt:  # before or after common.run, which handles it itself
        sys.exit(EXIT_INTERRUPTED)


def _run() -> int:
    gpus = _open_gpus() if _is_single_snapshot(sys.argv[1:]) else None
    try:
        from gpulse.cli import common, main  # noqa: PLC0415  after the first sample, on purpose

        return common.run(main.command, name="gpulse", gpus=gpus)
    finally:
        if gpus is not None:
            gpus.close()


def _is_single_snapshot(arguments: list[str]) -> bool:
    """Guess from the arguments whether a snapshot is wanted; a wrong guess costs only a few milliseconds."""
    if "_GPULSE_COMPLETE" in os.environ or (arguments and not arguments[0].startswith("-")):
        return False
    return not any(
        argument.startswith(_OTHER_MODES)
        or (argument[:1] == "-" and argument[1:2] != "-" and set("wh") & set(argument))
        for argument in arguments
    )


def _open_gpus() -> GpuReader | None:
    """Open the GPUs; None when anything goes wrong: the snapshot meets the same error and reports it."""
    gc.disable()
    gpus: GpuReader | None = None
    try:
        from gpulse.sources.nvml.gpu_reader import snapshot_reader  # noqa: PLC0415  loads the driver's binding

        gpus = snapshot_reader()
        gpus.open(time.time())
    except Exception:  # noqa: BLE001  errors are reported by common.run, which is not running yet
        if gpus is not None:
            gpus.close()
        return None
    return gpus
