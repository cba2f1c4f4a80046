"""`gpulse doctor`: check what gpulse can read on this machine, and how to fix the rest."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Iterator, Sequence
from contextlib import closing

import click

from gpulse._version import __version__
from gpulse.cli import common
from gpulse.diagnosis.rule_registry import describe_level, levels_of_readings
from gpulse.model.device import format_ranges
from gpulse.model.frame import Frame
from gpulse.sampling.sampler import open_machine_for_snapshot
from gpulse.sources.doctor_checks import Check, run_checks
from gpulse.sources.procfs import Roots
from gpulse.terminal import value_format as f
from gpulse.terminal.table import Paint, wrap

_MARKS = {"ok": ("ok", "good"), "limited": ("limited", "notice"), "broken": ("BROKEN", "warn")}
_MARK_COLUMNS = 7
_MIN_DETAIL_COLUMNS = 24
"""With less room than this, details are below topics instead of beside them."""


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--no-color", is_flag=True, help="Do not use colors (same as NO_COLOR=1).")
def command(*, as_json: bool, no_color: bool) -> int:
    """Check the driver, GPUs, permissions, kernel and container.

    The exit code is 1 when something is broken.
    """
    with closing(open_machine_for_snapshot()) as machine:
        frame = machine.sample(time.time(), patient=True)
    about = f"{__version__} on Python {platform.python_version()}, Linux {platform.release()}"
    return print_checks(
        [Check("gpulse", "ok", about), *run_checks(frame, Roots()), *check_levels(frame)],
        as_json=as_json,
        no_color=no_color,
    )


def check_levels(frame: Frame) -> Iterator[Check]:
    """Yield what `gpulse why` can tell about the GPUs."""
    levels = levels_of_readings(frame.gpus) or {"host_only": []}
    for level, labels in levels.items():
        which = f"GPU {format_ranges(labels)}: " if len(levels) > 1 else ""
        yield Check("diagnosis", "ok" if level == "full" else "limited", f"{which}{describe_level(level)}")


def print_checks(checks: Sequence[Check], *, as_json: bool, no_color: bool) -> int:
    """Print the checks; return the exit code."""
    if as_json:
        click.echo(json.dumps([check._asdict() for check in checks], indent=2))
    else:
        for line in _lines(_merge_gpus(checks), common.terminal_width(), common.paint(no_color=no_color)):
            common.write(line)
    return int(any(check.status == "broken" for check in checks))


def _merge_gpus(checks: Sequence[Check]) -> list[Check]:
    """Merge equal checks of several GPUs into one, at the place of the first."""
    labels: dict[Check, list[str]] = {}
    for check in checks:
        gpu, _, label = check.topic.partition("gpu ")
        same = check._replace(topic="gpu") if label and not gpu else check
        labels.setdefault(same, []).append(label)
    return [
        check._replace(topic=f"gpu {format_ranges(found)}") if check.topic == "gpu" else check
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
        detail = list(wrap(f.plain(check.detail), width - len(indent)))
        if is_narrow:
            yield f"{paint(style, mark)} {check.topic}"
        else:
            first = detail.pop(0)
            yield f"{paint(style, mark.rjust(_MARK_COLUMNS))}  {check.topic.ljust(topics)}  {first}"
        yield from (f"{indent}{line}" for line in detail)
        if check.advice and check.status != "ok":
            for line in wrap(f"-> {check.advice}", width - len(indent), "   "):
                yield f"{indent}{line}"
