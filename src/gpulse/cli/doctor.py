"""`gpulse doctor`: what works here, what does not, and what to do."""

from __future__ import annotations

import json
import platform
import time
from contextlib import closing

import click

from gpulse._version import __version__
from gpulse.cli import shell

_MARKS = {"ok": ("ok", "good"), "limited": ("limited", "notice"), "broken": ("BROKEN", "warn")}


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--no-color", is_flag=True, help="No colours (as NO_COLOR=1).")
def command(*, as_json: bool, no_color: bool) -> int:
    """Check driver, GPUs, permissions, kernel and container; exit 1 when something is broken."""
    from gpulse.sampling.look import machine_for_one_look  # noqa: PLC0415  loads the driver's binding
    from gpulse.sources.checkup import Check, checkup  # noqa: PLC0415
    from gpulse.sources.procfs import Roots  # noqa: PLC0415

    with closing(machine_for_one_look()) as machine:
        frame = machine.sample(time.time(), patient=True)
    about = f"{__version__} on Python {platform.python_version()}, Linux {platform.release()}"
    checks = [Check("gpulse", "ok", about), *checkup(frame, Roots())]
    if as_json:
        click.echo(json.dumps([check._asdict() for check in checks], indent=2))
    else:
        paint = shell.paint(no_color=no_color)
        topics = max(len(check.topic) for check in checks)
        for check in checks:
            mark, style = _MARKS[check.status]
            shell.write(f"{paint(style, mark.rjust(7))}  {check.topic.ljust(topics)}  {check.detail}")
            if check.advice and check.status != "ok":
                shell.write(f"{'':7}  {'':{topics}}  -> {check.advice}")
    return int(any(check.status == "broken" for check in checks))
