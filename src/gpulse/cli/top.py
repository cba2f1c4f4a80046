"""`gpulse top`: the full-screen view."""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gpulse.cli import selection, shell
from gpulse.errors import UsageError
from gpulse.sampling.sampler import checked_interval

if TYPE_CHECKING:
    from gpulse.sources.base import Source


@click.command()
@click.option(
    "-i",
    "--interval",
    type=float,
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="Time between two readings.",
)
@click.option(
    "--gpus", metavar="LIST", help="Only these GPUs: indices, ranges, UUIDs (0,2-3,GPU-1f2e), or `visible`."
)
@click.option("--readonly", is_flag=True, help="Forbid ending processes.")
@shell.source_options
@click.option(
    "--demo-gpus",
    type=click.IntRange(1, 64),
    default=8,
    show_default=True,
    help="With --demo: how many GPUs.",
)
def command(
    *, interval: float, gpus: str | None, readonly: bool, demo: bool, replay: Path | None, demo_gpus: int
) -> None:
    """Watch GPUs, processes, host and faults full-screen; press ? for the keys."""
    checked_interval(interval)
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UsageError("top needs a terminal", hint="gpulse -w 2 for files and pipes")
    choose = selection.parse(gpus)
    other = shell.other_source(demo=demo, replay=replay, gpus=demo_gpus)
    from gpulse.diagnosis.live import Monitor  # noqa: PLC0415  --help needs none of it
    from gpulse.terminal.top import Options, run_top  # noqa: PLC0415

    with closing(other or _this_machine(interval)) as source:
        run_top(
            source,
            Options(
                interval_seconds=interval,
                readonly=readonly,
                killable=other is None,
                gpus=choose,
                findings=Monitor(),
                title=f"gpulse {replay.name}" if replay is not None else "gpulse demo" if demo else "gpulse",
            ),
        )


def _this_machine(interval: float) -> Source:
    from gpulse.sources.machine import LocalMachine  # noqa: PLC0415  loads the driver's binding
    from gpulse.sources.nvml.cadence import live  # noqa: PLC0415

    return LocalMachine(interval_seconds=interval, cadence=live(), threads=True)
