"""`gpulse explain`: what a finding means, how it is recognised, and how to fix it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import click
from click.shell_completion import CompletionItem

from gpulse.cli import shell
from gpulse.errors import UsageError
from gpulse.terminal import format as f
from gpulse.terminal.table import Paint, wrapped

if TYPE_CHECKING:
    from gpulse.diagnosis.manual import Entry

_GUTTER = 12
_MIN_TEXT_COLUMNS = 24
"""With less room beside titles, texts stand below them."""


def _completed(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:  # noqa: ARG001  click's signature
    """The findings that begin like this."""
    from gpulse.diagnosis.rulebook import RULES  # noqa: PLC0415  `gpulse --help` needs no rules

    return [CompletionItem(rule.id, help=rule.title) for rule in RULES if rule.id.startswith(incomplete)]


@click.command()
@click.argument("finding", metavar="[ID]", required=False, shell_complete=_completed)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--no-color", is_flag=True, help="No colours (as NO_COLOR=1).")
def command(*, finding: str | None, as_json: bool, no_color: bool) -> None:
    """Explain the findings of `gpulse why` and `gpulse -b`: all of them in a list, or one in full.

    \b
    gpulse explain                 every finding there is
    gpulse explain launch_bound    what it means, how it is recognised, what to do
    """  # noqa: D301  click needs the backspace itself
    from gpulse.diagnosis.manual import entries, similar  # noqa: PLC0415  loads the rules

    known = entries()
    paint = shell.paint(no_color=no_color)
    if finding is None:
        if as_json:
            click.echo(json.dumps([entry.to_dict() for entry in known], indent=2))
            return
        lines = _list(known, shell.width(), paint)
    else:
        found = next((entry for entry in known if entry.id == finding.lower().replace("-", "_")), None)
        if found is None:
            close = similar(finding)
            meant = f"; close to it: {', '.join(close)}" if close else ""
            raise UsageError(
                f"there is no finding {finding!r}{meant}",
                hint=f"gpulse explain {close[0]}" if close else "gpulse explain, which lists them all",
            )
        if as_json:
            click.echo(json.dumps(found.to_dict(), indent=2))
            return
        lines = _page(found, shell.width(), paint)
    for line in lines:
        shell.write(line)


def _list(known: Sequence[Entry], width: int, paint: Paint) -> Iterator[str]:
    from gpulse.diagnosis.manual import FAMILIES  # noqa: PLC0415

    ids = max(len(entry.id) for entry in known)
    for place, (family, title) in enumerate(FAMILIES.items()):
        if place:
            yield ""
        yield from (paint("title", line) for line in wrapped(title, width))
        for entry in known:
            if entry.family == family:
                mark = " (informational)" if entry.informational else ""
                if width - ids - 4 < _MIN_TEXT_COLUMNS:
                    yield f"  {paint('name', entry.id)}"
                    yield from (f"    {line}" for line in wrapped(f"{entry.title}{mark}", width - 4))
                    continue
                said = list(wrapped(f"{entry.title}{mark}", width - ids - 4))
                yield f"  {paint('name', entry.id)}{' ' * (ids - len(entry.id))}  {said[0]}"
                yield from (f"{' ' * (ids + 4)}{line}" for line in said[1:])
    yield ""
    yield from (
        paint("dim", line)
        for line in wrapped(
            "Informational ones have not been seen on a real run yet and are told as notes. "
            "`gpulse explain ID` says everything about one.",
            width,
        )
    )


def _page(entry: Entry, width: int, paint: Paint) -> Iterator[str]:
    from gpulse.diagnosis.manual import FAMILIES  # noqa: PLC0415

    yield from (paint("title", line) for line in wrapped(entry.title, width))
    mark = ", informational: not seen on a real run yet" if entry.informational else ""
    yield from (
        paint("dim", line) for line in wrapped(f"{entry.id} ({FAMILIES[entry.family]}{mark})", width, "  ")
    )
    is_narrow = width - _GUTTER < _MIN_TEXT_COLUMNS
    gutter = 2 if is_narrow else _GUTTER
    room = width - gutter
    parts: tuple[tuple[str, Iterable[str]], ...] = (
        ("Means", wrapped(entry.means, room)),
        ("Recognised", wrapped(entry.recognised, room)),
        ("Thresholds", _items(entry.limits, room)),
        ("Severity", wrapped(entry.severity, room)),
        ("Needs", _items(entry.needs, room)),
        ("Do", _advice(entry, room, paint)),
        ("Sources", _items(entry.sources, room)),
    )
    for title, lines in parts:
        for place, line in enumerate(lines):
            if place == 0:
                yield ""
            if place == 0 and is_narrow:
                yield paint("title", title)
            is_beside = place == 0 and not is_narrow
            beside = paint("title", title) + " " * (gutter - len(title)) if is_beside else " " * gutter
            yield f"{beside}{line}"


def _items(texts: Iterable[str], room: int) -> Iterator[str]:
    for text in texts:
        yield from wrapped(f.plain(text), room, "  ")


def _advice(entry: Entry, room: int, paint: Paint) -> Iterator[str]:
    several = len(entry.advice) > 1
    for place, advice in enumerate(entry.advice, start=1):
        mark = f"{place}. " if several else "-> "
        yield from wrapped(f"{mark}{advice.do}", room, "   ")
        for word, text in (("why", advice.why), ("see", advice.confirm)):
            yield from (paint("dim", line) for line in wrapped(f"   {word}: {text}", room, "        "))
