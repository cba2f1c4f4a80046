"""The ways to show a look: a table on the terminal, JSON, CSV, rows in a database."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterable
from contextlib import closing
from typing import IO, TYPE_CHECKING, cast

import click

from gpulse.cli import shell
from gpulse.model.snapshot import Snapshot

if TYPE_CHECKING:
    from pathlib import Path

    from gpulse.terminal.snapshot import Parts

Show = Callable[[Snapshot], None]

_HOME = "\x1b[H"
_TO_END_OF_LINE = "\x1b[K"
_TO_END_OF_SCREEN = "\x1b[J"
_CLEARED = "\x1b[2J"


def shower(
    parts: Parts, *, as_json: bool, as_csv: bool, sqlite: Path | None, no_color: bool, watching: bool
) -> Show:
    """The function that shows a look in the way that was asked for."""
    if as_csv:
        show = _csv(parts)
    elif as_json:
        show = _json(watching=watching)
    elif sqlite is not None and not watching:
        return _sqlite(sqlite, None)
    else:
        show = _text(parts, no_color=no_color, watching=watching)
    return show if sqlite is None else _sqlite(sqlite, show)


def _text(parts: Parts, *, no_color: bool, watching: bool) -> Show:
    from gpulse.terminal.snapshot import snapshot_lines  # noqa: PLC0415

    in_place = watching and shell.is_capable_terminal()
    if in_place:
        click.echo(_CLEARED, nl=False)

    def show(snapshot: Snapshot) -> None:
        lines = list(snapshot_lines(snapshot, parts, shell.width(), shell.paint(no_color=no_color)))
        if in_place:
            shell.write(_redrawn(lines, shutil.get_terminal_size().lines))
        else:
            shell.write("\n".join([*lines, ""] if watching else lines))
        sys.stdout.flush()

    return show


def _redrawn(lines: list[str], height: int) -> str:
    """The lines over those of the look before, without a blank screen in between and without scrolling."""
    room = max(1, height - 2)
    if len(lines) > room + 1:
        lines = [*lines[:room], f"+ {len(lines) - room} lines; a taller window shows them"]
    return _HOME + "\n".join(f"{line}{_TO_END_OF_LINE}" for line in lines) + _TO_END_OF_SCREEN


def _json(*, watching: bool) -> Show:
    import json  # noqa: PLC0415

    from gpulse.export.document import document  # noqa: PLC0415

    def show(snapshot: Snapshot) -> None:
        click.echo(json.dumps(document(snapshot), indent=None if watching else 2, allow_nan=False))
        sys.stdout.flush()

    return show


def _csv(parts: Parts) -> Show:
    from gpulse.export.csv import CsvWriter  # noqa: PLC0415
    from gpulse.export.tables import Table  # noqa: PLC0415

    asked: Iterable[tuple[bool, Table]] = (
        (parts.findings, "finding"),
        (parts.cpu, "process"),
        (parts.disk, "disk"),
        (parts.network, "network"),
    )
    tables = [table for wanted, table in asked if wanted]
    if len(tables) > 1:
        raise click.UsageError(
            "CSV holds one table: give one of -b, -c, -d, -n, or use --json or --sqlite for all of them"
        )
    return CsvWriter(cast("IO[str]", _Data()), tables[0] if tables else "gpu").write


class _Data:
    """Standard output for data: UTF-8 whatever the locale."""

    def write(self, text: str) -> int:
        sys.stdout.buffer.write(text.encode("utf-8", "replace"))
        return len(text)

    def flush(self) -> None:
        sys.stdout.buffer.flush()


def _sqlite(path: Path, also: Show | None) -> Show:
    from gpulse.export.sqlite import SqliteSink  # noqa: PLC0415

    def show(snapshot: Snapshot) -> None:
        with closing(SqliteSink(path)) as sink:
            sink.append(snapshot)
        if also is not None:
            also(snapshot)
        else:
            count = len(snapshot.frame.gpus)
            click.echo(f"appended a look at {count} {'GPU' if count == 1 else 'GPUs'} to {path}", err=True)

    return show
