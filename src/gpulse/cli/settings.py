"""`gpulse settings`: how a head's agents sample, shown or changed while they run."""

from __future__ import annotations

from typing import Any

import click

from gpulse.cli import remote, shell, target


@click.command()
@click.option(
    "--freq", type=click.IntRange(50, 3_600_000), metavar="MS", help="Milliseconds between two samples."
)
@click.option(
    "--bandwidth/--no-bandwidth", default=None, help="PCIe traffic in sessions that begin from now on."
)
@click.option("--nvlink/--no-nvlink", default=None, help="NVLink traffic in sessions that begin from now on.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@target.options
def command(
    *, freq: int | None, bandwidth: bool | None, nvlink: bool | None, as_json: bool, **given: Any
) -> None:
    """Show how the agents of a head sample, or change it; they follow at once.

    \b
    gpulse settings
    gpulse settings --freq 1000 --bandwidth
    """  # noqa: D301  click needs the backspace itself
    asked = {"interval_ms": freq, "bandwidth": bandwidth, "nvlink": nvlink}
    body = {name: value for name, value in asked.items() if value is not None}
    from gpulse.cluster.protocol import answers  # noqa: PLC0415  --help needs none of it

    with remote.asking(target.taken(given)) as head:
        if body:
            settings = head.call("settings", answers.SettingsChanged, body).settings
        else:
            status = head.call("status", answers.Status)
            settings = answers.AgentSettings(
                interval_ms=status.freq,
                bandwidth=status.enable_bandwidth_profiling,
                nvlink=status.enable_nvlink_profiling,
            )
    if as_json:
        remote.print_json(settings)
        return
    shell.write(
        f"samples every {settings.interval_ms} ms, "
        f"PCIe bandwidth {_word(settings.bandwidth)}, NVLink {_word(settings.nvlink)}"
    )


def _word(flag: bool) -> str:
    return "on" if flag else "off"
