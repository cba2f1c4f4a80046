"""`gpulse findings`: list the findings of a head, acknowledge and silence them."""

from __future__ import annotations

import getpass
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import click

from gpulse.cli import common, head_client, option_types
from gpulse.cli.common import CommandGroup
from gpulse.cluster.protocol.answers import AcknowledgedFindings, SilenceAnswer, Silences
from gpulse.errors import RefusedError, UsageError
from gpulse.model.finding import FINDING_CATEGORIES, FindingCategory, format_places
from gpulse.reports.finding_report import FindingGroupRow, FindingGroups, GroupedFinding
from gpulse.terminal import value_format as f
from gpulse.terminal.table import (
    Paint,
    TableCell,
    TableColumn,
    display_width,
    make_painter,
    render_table,
    wrap,
    wrap_items,
)

_BY = click.option(
    "--by",
    metavar="NAME",
    show_default="your user name",
    help="Name to record as the author; shown to others.",
)
_TITLES: dict[FindingCategory, str] = {"fault": "Faults", "slowness": "Slowness", "waste": "Waste"}
_UNLIMITED_WIDTH = 1_000_000
_LABEL_WIDTH = 10
"""Width of a severity with a gap, where a finding is a paragraph."""
_ITEM_GAP = "   "
_STYLES = {"critical": "warn", "high": "warn", "medium": "notice"}
_CURRENT = (
    TableColumn("severity", right=False),
    TableColumn("finding", right=False),
    TableColumn("where", right=False),
    TableColumn("users", right=False, optional=True),
    TableColumn("GPUs lost", optional=True),
    TableColumn("since"),
    TableColumn("for"),
    TableColumn("", right=False, optional=True),
    TableColumn("key", right=False),
)
_PAST = (
    TableColumn("severity", right=False),
    TableColumn("finding", right=False),
    TableColumn("where", right=False),
    TableColumn("users", right=False, optional=True),
    TableColumn("from", right=False),
    TableColumn("to", right=False),
    TableColumn("GPU-hours", optional=True),
)
_SILENCES = (
    TableColumn("silence", right=False),
    TableColumn("what", right=False),
    TableColumn("until", right=False),
    TableColumn("reason", right=False),
    TableColumn("by", right=False),
    TableColumn("hidden now"),
)


@click.group(cls=CommandGroup, invoke_without_command=True)
@click.option(
    "--past",
    type=option_types.duration,
    metavar="TIME",
    help="List findings that ended within this time, such as 24h or 30d, instead of current ones.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the head's answer as JSON.")
@click.option("--no-color", is_flag=True, help="Do not use colors (same as NO_COLOR=1).")
@head_client.options
@click.pass_context
def command(
    ctx: click.Context, /, *, past: float | None, as_json: bool, no_color: bool, **given: Any
) -> None:
    """List the findings of a head: faults first, then slowness and waste, grouped by cause.

    \b
    gpulse findings                              list current findings
    gpulse findings --past 24h                   list past findings, with start and end
    gpulse findings ack gpu_fault/xid_94         acknowledge a finding
    gpulse findings silence node_lost/n7 --for 2h --reason "new disk"
    gpulse findings silences                     list what is silenced, until when and why
    """  # noqa: D301  click needs the backspace itself
    if ctx.invoked_subcommand is not None:
        verb = command.commands[ctx.invoked_subcommand]
        common.reject_misplaced_options(ctx, verb, "gpulse findings", ctx.invoked_subcommand)
        return
    body = {"state": "now"} if past is None else {"state": "past", "from": f"-{past:.0f}s"}
    with head_client.connect_to_head(head_client.pop_target(given)) as head:
        if as_json:
            head_client.print_json(head.call("finding_groups", dict, body))
            return
        answer = head.call("finding_groups", FindingGroups, body)
    width, paint = common.terminal_width(), common.paint(no_color=no_color)
    lines = current_lines if past is None else past_lines
    common.write("\n".join(lines(answer.groups, answer.time, width=width, paint=paint)))
    if past is None and answer.counts.silenced:
        noun = f.count_noun(answer.counts.silenced, "kind")
        common.write(f"\nsilenced: {noun} of finding; list the silences with: gpulse findings silences")


@command.command()
@click.argument("keys", nargs=-1, required=True, metavar="KEY...")
@click.option("--note", metavar="TEXT", help="Note for others about what is being done.")
@_BY
@head_client.options
def ack(*, keys: tuple[str, ...], note: str | None, by: str | None, **given: Any) -> None:
    """Acknowledge findings, given by their keys.

    `gpulse findings` shows the keys. An acknowledgement is valid as long as the finding lasts.
    """
    with head_client.connect_to_head(head_client.pop_target(given)) as head:
        groups = head.call("finding_groups", FindingGroups).groups
        chosen = [member.key for key in keys for member in _find_members(groups, key)]
        body = {"keys": list(dict.fromkeys(chosen)), "by": by or getpass.getuser(), "note": note}
        answer = head.call("acknowledge", AcknowledgedFindings, body)
    common.write(f.plain(answer.message))


@command.command()
@click.argument("key", required=False)
@click.option(
    "--for",
    "seconds",
    type=option_types.duration,
    required=True,
    metavar="TIME",
    help="Duration of the silence, such as 2h or 7d; at most 30d.",
)
@click.option("--reason", required=True, metavar="TEXT", help="Reason for the silence; shown to others.")
@click.option(
    "--node", "nodes", multiple=True, metavar="NAME", help="Silence findings on this node only; repeatable."
)
@click.option(
    "--gpu",
    "gpus",
    multiple=True,
    metavar="NODE:INDEX",
    help="Silence findings on this GPU only; repeatable.",
)
@click.option(
    "--user",
    "users",
    multiple=True,
    metavar="NAME",
    help="Silence only findings that affect no users other than this one; repeatable.",
)
@click.option(
    "--job",
    "jobs",
    multiple=True,
    metavar="JOB",
    help="Silence only findings that affect no jobs other than this one; repeatable.",
)
@_BY
@head_client.options
def silence(
    *,
    key: str | None,
    seconds: float,
    reason: str,
    nodes: tuple[str, ...],
    gpus: tuple[str, ...],
    users: tuple[str, ...],
    jobs: tuple[str, ...],
    by: str | None,
    **given: Any,
) -> None:
    """Silence findings for a limited time.

    KEY is the key of a finding or of a group of findings, as `gpulse findings` shows it. Without KEY, all findings of the given nodes,
    GPUs, users or jobs are silenced.
    """
    chosen: dict[str, Any] = {"nodes": nodes, "gpus": gpus, "users": users, "jobs": jobs}
    if key is None and not any(chosen.values()):
        raise UsageError("nothing to silence", hint="give a KEY, --node, --gpu, --user or --job")
    with head_client.connect_to_head(head_client.pop_target(given)) as head:
        if key is not None:
            chosen = _add_key(chosen, key, head.call("finding_groups", FindingGroups).groups)
        fields = {name: list(names) for name, names in chosen.items() if names}
        body = {**fields, "seconds": seconds, "reason": reason, "by": by or getpass.getuser()}
        answer = head.call("silence", SilenceAnswer, body)
    hidden = f.count_noun(answer.matches, "finding")
    common.write(
        f.plain(
            f"silence {answer.id}: {describe_silence(answer)} until {f.local_time(answer.until)}; it currently hides {hidden}"
        )
    )


@command.command()
@click.option("--json", "as_json", is_flag=True, help="Print the head's answer as JSON.")
@click.option("--no-color", is_flag=True, help="Do not use colors (same as NO_COLOR=1).")
@head_client.options
def silences(*, as_json: bool, no_color: bool, **given: Any) -> None:
    """List silences: what is silenced, until when, why and by whom."""
    with head_client.connect_to_head(head_client.pop_target(given)) as head:
        answer = head.call("silences", Silences)
    if as_json:
        head_client.print_json(answer)
        return
    paint = common.paint(no_color=no_color)
    lines = silence_lines(answer.silences, answer.time, width=common.terminal_width(), paint=paint)
    common.write("\n".join(lines))


@command.command()
@click.argument("silence_id", metavar="SILENCE")
@_BY
@head_client.options
def unsilence(*, silence_id: str, by: str | None, **given: Any) -> None:
    """End a silence early."""
    with head_client.connect_to_head(head_client.pop_target(given)) as head:
        body = {"silence": silence_id, "by": by or getpass.getuser()}
        answer = head.call("end_silence", SilenceAnswer, body)
    common.write(f.plain(f"silence {answer.id} has ended: {describe_silence(answer)}"))


def _find_members(groups: list[FindingGroupRow], key: str) -> list[GroupedFinding]:
    """Return the findings that the key of a group or of a finding names.

    Raises:
        RefusedError: There is none.
    """
    whole = [member for group in groups if group.key == key for member in group.members]
    found = whole or [member for group in groups for member in group.members if member.key == key]
    if not found:
        raise RefusedError(
            404, f"there is no current finding {key[:100]!r}", hint="list the keys with: gpulse findings"
        )
    return found


def _add_key(chosen: dict[str, Any], key: str, groups: list[FindingGroupRow]) -> dict[str, Any]:
    """Return the choice of a silence with what a key names: a cause everywhere, or a cause on one GPU or node."""
    (member, *_) = _find_members(groups, key)
    group = next(group for group in groups if any(one.key == member.key for one in group.members))
    narrowed = {**chosen, "findings": (group.group,)}
    if group.key == key:
        return narrowed
    if member.label is not None:
        return {**narrowed, "gpus": (*chosen["gpus"], f"{member.node}:{member.label}")}
    return {**narrowed, "nodes": (*chosen["nodes"], member.node)}


def current_lines(
    groups: Sequence[FindingGroupRow], now: float, *, width: int, paint: Paint
) -> Iterator[str]:
    """Yield the findings that hold now, faults first, under a title for each category."""
    if not groups:
        yield "no findings"
    rows = {
        category: [_current_row(group, now) for group in groups if group.category == category]
        for category in FINDING_CATEGORIES
    }
    fits = all(_fits(_CURRENT, found, width) for found in rows.values())
    is_first = True
    for category, found in rows.items():
        if not found:
            continue
        if not is_first:
            yield ""
        is_first = False
        yield paint("title", f"{_TITLES[category]} ({len(found)})")
        yield from _render(_CURRENT, found, width, paint, as_table=fits)


def past_lines(groups: Sequence[FindingGroupRow], now: float, *, width: int, paint: Paint) -> list[str]:
    """Return the findings that are over, newest first."""
    if not groups:
        return ["no findings ended in this time range"]
    rows = [_past_row(group, now) for group in groups]
    return _render(_PAST, rows, width, paint, as_table=_fits(_PAST, rows, width))


def silence_lines(silences: Sequence[SilenceAnswer], now: float, *, width: int, paint: Paint) -> list[str]:
    """Return the silences that are in force."""
    if not silences:
        return ["nothing is silenced"]
    rows = [_silence_row(silence, now) for silence in silences]
    return _render(_SILENCES, rows, width, paint, as_table=_fits(_SILENCES, rows, width))


def describe_silence(silence: SilenceAnswer) -> str:
    """Return what a silence is about: `gpu_fault on n1, n2`."""
    chosen = (("on", silence.nodes), ("on", silence.gpus), ("for", silence.users), ("in", silence.jobs))
    parts = [f"{word} {', '.join(names)}" for word, names in chosen if names]
    return " ".join([", ".join(silence.findings) or "everything", *parts])


def _fits(columns: Sequence[TableColumn], rows: Sequence[Sequence[TableCell]], width: int) -> bool:
    """Return whether a table has room for all of its texts."""
    lines = render_table(columns, rows, _UNLIMITED_WIDTH, make_painter(color=False))
    return max(map(display_width, lines)) <= width


def _render(
    columns: Sequence[TableColumn],
    rows: Sequence[Sequence[TableCell]],
    width: int,
    paint: Paint,
    *,
    as_table: bool,
) -> list[str]:
    if as_table:
        return render_table(columns, rows, width, paint)
    return [line for row in rows for line in _paragraph(columns, row, width, paint)]


def _paragraph(
    columns: Sequence[TableColumn], row: Sequence[TableCell], width: int, paint: Paint
) -> Iterator[str]:
    """Yield a row as lines: the first two cells, then the others with their titles."""
    label, headline, *others = row
    indent = " " * _LABEL_WIDTH
    first, *more = wrap(f"{label.text:<{_LABEL_WIDTH - 2}}  {headline.text}", width, indent)
    yield paint(label.style, label.text) + first.removeprefix(label.text)
    yield from more
    short: list[str] = []
    for column, cell in zip(columns[2:], others, strict=True):
        if not cell.text:
            continue
        item = f"{column.title}: {cell.text}" if column.title else cell.text
        if display_width(item) <= width - _LABEL_WIDTH:
            short.append(item)
            continue
        yield from wrap_items([indent + short[0], *short[1:]] if short else (), width, _ITEM_GAP, indent)
        short = []
        yield from _wrap_list(indent + item, width, indent)
    yield from wrap_items([indent + short[0], *short[1:]] if short else (), width, _ITEM_GAP, indent)


def _wrap_list(text: str, width: int, indent: str) -> Iterator[str]:
    """Yield a long text on several lines, which end at commas if its parts are short enough."""
    *parts, last = text.removeprefix(indent).split(", ")
    parts = [*(f"{part}," for part in parts), last]
    if max(map(display_width, parts)) <= width - len(indent):
        return wrap_items([indent + parts[0], *parts[1:]], width, " ", indent)
    return wrap(text, width, indent)


def _current_row(group: FindingGroupRow, now: float) -> list[TableCell]:
    return [
        TableCell(group.severity, _STYLES.get(group.severity, "")),
        TableCell(f.plain(group.title)),
        TableCell(f.plain(_places(group))),
        TableCell(f.plain(", ".join(group.users))),
        TableCell("" if group.gpus_lost is None else f"{group.gpus_lost:.1f}"),
        TableCell(f.local_time(group.start, now)),
        TableCell(f.duration(now - group.start)),
        TableCell("acknowledged" if group.is_acknowledged else ""),
        TableCell(f.plain(group.key)),
    ]


def _past_row(group: FindingGroupRow, now: float) -> list[TableCell]:
    return [
        TableCell(group.severity, _STYLES.get(group.severity, "")),
        TableCell(f.plain(group.title)),
        TableCell(f.plain(_places(group))),
        TableCell(f.plain(", ".join(group.users))),
        TableCell(f.local_time(group.start, now)),
        TableCell(f.UNKNOWN if group.end is None else f.local_time(group.end, now)),
        TableCell("" if group.gpu_hours is None else f"{group.gpu_hours:.1f}"),
    ]


def _silence_row(silence: SilenceAnswer, now: float) -> list[TableCell]:
    return [
        TableCell(f.plain(silence.id), "name"),
        TableCell(f.plain(describe_silence(silence))),
        TableCell(f.local_time(silence.until, now)),
        TableCell(f.plain(silence.reason)),
        TableCell(f.plain(silence.by)),
        TableCell(str(silence.matches)),
    ]


def _places(group: FindingGroupRow) -> str:
    members: Iterable[dict[str, str | None]] = (
        {"node": member.node, "label": member.label} for member in group.members
    )
    return ", ".join(format_places(members))
