"""`gpulse top`: watch GPUs, processes and host, or a whole cluster, full-screen."""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import click

from gpulse.cli import common, gpu_selection, head_client
from gpulse.diagnosis.live_diagnosis import LiveDiagnosis
from gpulse.errors import UsageError
from gpulse.sampling.sampler import check_interval
from gpulse.sources.frame_source import Source
from gpulse.sources.local_machine import LocalMachine
from gpulse.sources.nvml.read_timing import live_cadence

_CALL_SECONDS = 10.0
"""A head that does not answer a request for this long counts as disconnected."""


@click.command()
@click.option(
    "-i",
    "--interval",
    type=float,
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="Seconds between updates.",
)
@click.option(
    "--gpus",
    metavar="LIST",
    help="Show only these GPUs: indices, ranges and UUIDs (0,2-3,GPU-1f2e), or `visible`.",
)
@click.option("--readonly", is_flag=True, help="Disable the keys that end processes.")
@common.source_options
@click.option(
    "--demo-gpus",
    type=click.IntRange(1, 64),
    default=8,
    show_default=True,
    metavar="N",
    help="With --demo: number of GPUs.",
)
@click.option(
    "--head",
    metavar="HOST[:8090]",
    help="Watch the cluster of this head instead of this machine: HOST:8090 or http://HOST:8091.",
)
@head_client.access_options
@click.pass_context
def command(
    ctx: click.Context,
    /,
    *,
    interval: float,
    gpus: str | None,
    readonly: bool,
    demo: bool,
    replay: Path | None,
    demo_gpus: int,
    **given: Any,
) -> None:
    """Watch GPUs, processes, the host and faults in a full-screen view; press ? for the keys.

    With --head, watch a whole cluster: its nodes (with a cell for each GPU), jobs and findings.

    \b
    gpulse top                    watch this machine
    gpulse top --head gpu-head    watch the cluster of that head
    """  # noqa: D301  click needs the backspace itself
    check_interval(interval)
    chosen = head_client.pop_target(given)
    is_cluster = chosen.head is not None
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UsageError(
            "gpulse top needs a terminal",
            hint=f"gpulse status{chosen.options()}"
            if is_cluster
            else "use `gpulse -w 2`, which also writes to files and pipes",
        )
    if is_cluster:
        _reject_local_options(ctx)
        _watch_cluster(chosen, interval)
        return
    if chosen != head_client.HeadTarget():
        raise UsageError("--token-file and the --tls options require --head", hint="gpulse top --head HOST")
    choose = gpu_selection.parse_gpus(gpus)
    other = common.chosen_source(demo=demo, replay=replay, gpus=demo_gpus)
    from gpulse.terminal.top import TopOptions, run_top  # noqa: PLC0415  loads Textual, which --help does not need

    with closing(other or _open_local_machine(interval)) as source:
        run_top(
            source,
            TopOptions(
                interval_seconds=interval,
                readonly=readonly,
                killable=other is None,
                gpus=choose,
                findings=LiveDiagnosis(),
                title=f"gpulse {replay.name}" if replay is not None else "gpulse demo" if demo else "gpulse",
            ),
        )


_LOCAL_OPTIONS = {"gpus": "--gpus", "readonly": "--readonly", "demo": "--demo", "replay": "--replay"}


def _reject_local_options(ctx: click.Context) -> None:
    for name, flag in _LOCAL_OPTIONS.items():
        source = ctx.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise click.UsageError(f"{flag} and --head cannot be used together")


def _watch_cluster(chosen: head_client.HeadTarget, interval: float) -> None:
    """Show the cluster view; a head that cannot be reached at first is an error."""
    from gpulse.terminal.top.cluster_app import ClusterTopOptions, HeadReader, run_cluster_top  # noqa: PLC0415  loads Textual

    def connect() -> HeadReader:
        return HeadReader(chosen.connect(call_seconds=_CALL_SECONDS))

    with head_client.connect_to_head(chosen) as head:
        HeadReader(head.client).read()
        address = head.address
    run_cluster_top(connect, ClusterTopOptions(address=address, interval_seconds=interval))


def _open_local_machine(interval: float) -> Source:
    return LocalMachine(interval_seconds=interval, cadence=live_cadence(), threads=True)
