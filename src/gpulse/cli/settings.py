"""`gpulse settings`: show or change how a head's agents sample."""

from __future__ import annotations

from typing import Any

import click

from gpulse.cli import common, head_client
from gpulse.cluster.protocol import answers


@click.command()
@click.option(
    "--freq", type=click.IntRange(50, 3_600_000), metavar="MS", help="Milliseconds between samples."
)
@click.option(
    "--bandwidth/--no-bandwidth", default=None, help="Record PCIe traffic in sessions that start from now on."
)
@click.option(
    "--nvlink/--no-nvlink", default=None, help="Record NVLink traffic in sessions that start from now on."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@head_client.options
def command(
    *, freq: int | None, bandwidth: bool | None, nvlink: bool | None, as_json: bool, **given: Any
) -> None:
    """Show or change the sampling settings of a head's agents; changes take effect at once.

    \b
    gpulse settings                            show the settings
    gpulse settings --freq 1000 --bandwidth    change them
    """  # noqa: D301  click needs the backspace itself
    asked = {"interval_ms": freq, "bandwidth": bandwidth, "nvlink": nvlink}
    body = {name: value for name, value in asked.items() if value is not None}
    with head_client.connect_to_head(head_client.pop_target(given)) as head:
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
        head_client.print_json(settings)
        return
    common.write(
        f"agents sample every {settings.interval_ms} ms; "
        f"PCIe traffic {_on_off(settings.bandwidth)}, NVLink traffic {_on_off(settings.nvlink)}"
    )


def _on_off(flag: bool) -> str:
    return "on" if flag else "off"
