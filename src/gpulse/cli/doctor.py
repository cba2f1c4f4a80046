"""`gpulse doctor`: what works here, what does not, and what to do."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import TYPE_CHECKING

import click

from gpulse._version import __version__
from gpulse.cli import shell
from gpulse.model.device import ranges
from gpulse.terminal import format as f
from gpulse.terminal.table import Paint, wrapped

if TYPE_CHECKING:
    from gpulse.sources.checkup import Check

_MARKS = {"ok": ("ok", "good"), "limited": ("limited", "notice"), "broken": ("BROKEN", "warn")}
_MARK_COLUMNS = 7
_MIN_DETAIL_COLUMNS = 24
"""With less room beside marks and topics, details stand below them."""


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
    return show([Check("gpulse", "ok", about), *checkup(frame, Roots())], as_json=as_json, no_color=no_color)


def show(checks: Sequence[Check], *, as_json: bool, no_color: bool) -> int:
    """Print what was found; the exit code."""
    if as_json:
        click.echo(json.dumps([check._asdict() for check in checks], indent=2))
    else:
        for line in _lines(_gathered(checks), shell.width(), shell.paint(no_color=no_color)):
            shell.write(line)
    return int(any(check.status == "broken" for check in checks))


def _gathered(checks: Sequence[Check]) -> list[Check]:
    """GPUs about which there is the same to say on one line, where the first of them stood."""
    labels: dict[Check, list[str]] = {}
    for check in checks:
        gpu, _, label = check.topic.partition("gpu ")
        same = check._replace(topic="gpu") if label and not gpu else check
        labels.setdefault(same, []).append(label)
    return [
        check._replace(topic=f"gpu {ranges(found)}") if check.topic == "gpu" else check
        for check, found in labels.items()
    ]


def _lines(checks: Sequence[Check], width: int, paint: Paint) -> Iterator[str]:
    topics = max(len(check.topic) for check in checks)
    indent = " " * (_MARK_COLUMNS + topics + 4)
    is_narrow = width - len(indent) < _MIN_DETAIL_COLUMNS
    if is_narrow:
        indent = "  "
    for check in checks:
        mark, style = _MARKS[check.status]
        detail = list(wrapped(f.plain(check.detail), width - len(indent)))
        if is_narrow:
            yield f"{paint(style, mark)} {check.topic}"
        else:
            beside = detail.pop(0)
            yield f"{paint(style, mark.rjust(_MARK_COLUMNS))}  {check.topic.ljust(topics)}  {beside}"
        yield from (f"{indent}{line}" for line in detail)
        if check.advice and check.status != "ok":
            for line in wrapped(f"-> {check.advice}", width - len(indent), "   "):
                yield f"{indent}{line}"
