"""Options of one look, which `gpulse` and `bmon` share."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gpulse.cli import shell

if TYPE_CHECKING:
    from gpulse.sources.nvml.reader import GpuReader

PARTS = {"bottleneck": "findings", "cpu": "cpu", "disk": "disk", "net": "network"}
"""The flag of each part that a look can have, and the part's name."""
_OPTIONS: tuple[Callable[[shell.Command], shell.Command], ...] = (
    click.option(
        "-b",
        "--bottleneck",
        is_flag=True,
        help="Faults, and what slows the running jobs: watches them for about ten seconds.",
    ),
    click.option("-c", "--cpu", is_flag=True, help="CPUs, memory, pressure, and every process on a GPU."),
    click.option("-d", "--disk", is_flag=True, help="Disks with their rates, file systems with their sizes."),
    click.option("-n", "--net", is_flag=True, help="Network interfaces with their rates and errors."),
    click.option(
        "-v",
        "--verbose",
        is_flag=True,
        help="More of each part: clocks, links, every child process, what cannot be read.",
    ),
    click.option(
        "-w",
        "--watch",
        type=shell.seconds,
        is_flag=False,
        flag_value=2.0,
        metavar="[SECONDS]",
        help="Look again every SECONDS (2 when not given) until Ctrl-C.",
    ),
    click.option(
        "--gpus",
        metavar="LIST",
        help="Only these GPUs: indices, ranges, UUIDs (0,2-3,GPU-1f2e), or `visible` for CUDA_VISIBLE_DEVICES.",
    ),
    click.option("--json", "as_json", is_flag=True, help="Print JSON; with --watch one document a line."),
    click.option(
        "--csv",
        "as_csv",
        is_flag=True,
        help="Print one table as CSV: one row per GPU, or with -b, -c, -d or -n one per finding, process, disk or interface.",
    ),
    click.option(
        "--sqlite",
        type=click.Path(path_type=Path, dir_okay=False),
        metavar="FILE",
        help="Append all tables to a SQLite database.",
    ),
    click.option("--no-color", is_flag=True, help="No colours (as NO_COLOR=1)."),
    shell.source_options,
    click.option(
        "--at",
        metavar="+SECONDS",
        help="With --replay: the moment to look at, after the recording's start.",
    ),
)


def look_options(command: shell.Command) -> shell.Command:
    """Add the options of a look to a command, in the order of the help."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def take_look(options: dict[str, Any], *, always: Collection[str] = (), opened: GpuReader | None) -> None:
    """Look as the options of `look_options` say.

    Args:
        options: Their values by parameter name.
        always: Parts to show even if their flag is not given: `bottleneck`, `cpu`, `disk`, `net`.
        opened: The GPUs of this machine, when they were opened already.
    """
    from gpulse.cli.look import look, seconds_after  # noqa: PLC0415  --help needs none of it
    from gpulse.terminal.snapshot import Parts  # noqa: PLC0415

    rest = dict(options)
    wanted = {part: rest.pop(flag) or flag in always for flag, part in PARTS.items()}
    at = rest.pop("at")
    parts = Parts(**wanted, verbose=rest.pop("verbose"))
    look(opened=opened, parts=parts, at=None if at is None else seconds_after(at), **rest)
