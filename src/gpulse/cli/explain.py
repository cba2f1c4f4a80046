"""`gpulse explain`: what a finding means, how it is detected, and how to fix it."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Iterator, Sequence

import click
from click.shell_completion import CompletionItem

from gpulse.cli import common
from gpulse.diagnosis.finding_texts import FAMILY_TITLES, ManualEntry, build_entries
from gpulse.diagnosis.rule_registry import RULES
from gpulse.errors import UsageError
from gpulse.terminal import value_format as f
from gpulse.terminal.table import Paint, wrap

_GUTTER = 12
_MIN_TEXT_COLUMNS = 24
"""With less room than this, texts are below titles instead of beside them."""


def _complete_ids(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:  # noqa: ARG001  click's signature
    """Complete the ID of a finding."""
    return [CompletionItem(rule.id, help=rule.title) for rule in RULES if rule.id.startswith(incomplete)]


def find_similar(name: str) -> list[str]:
    """Return the finding IDs that are close to an unknown one."""
    wanted = name.lower().replace("-", "_")
    ids = [rule.id for rule in RULES]
    within = [known for known in ids if wanted and wanted in known]
    close = difflib.get_close_matches(wanted, ids, n=3, cutoff=0.5)
    return list(dict.fromkeys([*within, *close]))[:4]


@click.command()
@click.argument("finding", metavar="[ID]", required=False, shell_complete=_complete_ids)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--no-color", is_flag=True, help="Do not use colors (same as NO_COLOR=1).")
def command(*, finding: str | None, as_json: bool, no_color: bool) -> None:
    """List the findings of `gpulse why` and `gpulse -b`, or explain one in full.

    \b
    gpulse explain                 list all findings
    gpulse explain launch_bound    explain what it means, how it is detected and what to do
    """  # noqa: D301  click needs the backspace itself
    known = build_entries()
    paint = common.paint(no_color=no_color)
    if finding is None:
        if as_json:
            click.echo(json.dumps([entry.to_dict() for entry in known], indent=2))
            return
        lines = _list_lines(known, common.terminal_width(), paint)
    else:
        found = next((entry for entry in known if entry.id == finding.lower().replace("-", "_")), None)
        if found is None:
            close = find_similar(finding)
            meant = f"; did you mean {' or '.join(f'`{name}`' for name in close)}?" if close else ""
            raise UsageError(
                f"there is no finding {finding!r}{meant}",
                hint=f"gpulse explain {close[0]}" if close else "list all findings with: gpulse explain",
            )
        if as_json:
            click.echo(json.dumps(found.to_dict(), indent=2))
            return
        lines = _entry_lines(found, common.terminal_width(), paint)
    for line in lines:
        common.write(line)


def _list_lines(known: Sequence[ManualEntry], width: int, paint: Paint) -> Iterator[str]:
    ids = max(len(entry.id) for entry in known)
    for place, (family, title) in enumerate(FAMILY_TITLES.items()):
        if place:
            yield ""
        yield from (paint("title", line) for line in wrap(title, width))
        for entry in known:
            if entry.family == family:
                mark = " (informational)" if entry.informational else ""
                if width - ids - 4 < _MIN_TEXT_COLUMNS:
                    yield f"  {paint('name', entry.id)}"
                    yield from (f"    {line}" for line in wrap(f"{entry.title}{mark}", width - 4))
                    continue
                said = list(wrap(f"{entry.title}{mark}", width - ids - 4))
                yield f"  {paint('name', entry.id)}{' ' * (ids - len(entry.id))}  {said[0]}"
                yield from (f"{' ' * (ids + 4)}{line}" for line in said[1:])
    yield ""
    yield from (
        paint("dim", line)
        for line in wrap(
            "Informational findings have not been confirmed on a real run yet and are shown as notes. "
            "`gpulse explain ID` explains a finding in full.",
            width,
        )
    )


def _entry_lines(entry: ManualEntry, width: int, paint: Paint) -> Iterator[str]:
    yield from (paint("title", line) for line in wrap(entry.title, width))
    mark = ", informational: not confirmed on a real run yet" if entry.informational else ""
    yield from (
        paint("dim", line) for line in wrap(f"{entry.id} ({FAMILY_TITLES[entry.family]}{mark})", width, "  ")
    )
    is_narrow = width - _GUTTER < _MIN_TEXT_COLUMNS
    gutter = 2 if is_narrow else _GUTTER
    room = width - gutter
    parts: tuple[tuple[str, Iterable[str]], ...] = (
        ("Meaning", wrap(entry.means, room)),
        ("Detection", wrap(entry.recognised, room)),
        ("Thresholds", _item_lines(entry.limits, room)),
        ("Severity", wrap(entry.severity, room)),
        ("Requires", _item_lines(entry.needs, room)),
        ("What to do", _advice_lines(entry, room, paint)),
        ("Sources", _item_lines(entry.sources, room)),
    )
    for title, lines in parts:
        for place, line in enumerate(lines):
            if place == 0:
                yield ""
            if place == 0 and is_narrow:
                yield paint("title", title)
            is_first = place == 0 and not is_narrow
            prefix = paint("title", title) + " " * (gutter - len(title)) if is_first else " " * gutter
            yield f"{prefix}{line}"


def _item_lines(texts: Iterable[str], room: int) -> Iterator[str]:
    for text in texts:
        yield from wrap(f.plain(text), room, "  ")


def _advice_lines(entry: ManualEntry, room: int, paint: Paint) -> Iterator[str]:
    several = len(entry.advice) > 1
    for place, advice in enumerate(entry.advice, start=1):
        mark = f"{place}. " if several else "-> "
        yield from wrap(f"{mark}{advice.do}", room, "   ")
        for word, text in (("why", advice.why), ("see", advice.confirm)):
            yield from (paint("dim", line) for line in wrap(f"   {word}: {text}", room, "        "))
