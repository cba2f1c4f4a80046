"""`gpulse`: one look, or one every few seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import TYPE_CHECKING

import click

from gpulse.cli import selection, shell
from gpulse.errors import GpulseError, RecordingError
from gpulse.model.snapshot import Snapshot

if TYPE_CHECKING:
    from pathlib import Path

    from gpulse.model.frame import Frame
    from gpulse.sources.base import Source
    from gpulse.sources.machine import LocalMachine
    from gpulse.terminal.snapshot import Parts

RATES_SECONDS = 0.5
CLEAR = "\x1b[H\x1b[2J\x1b[3J"


def look(
    *,
    machine: LocalMachine | None,
    parts: Parts,
    gpus: str | None,
    watch: float | None,
    as_json: bool,
    as_csv: bool,
    sqlite: Path | None,
    no_color: bool,
    demo: bool,
    replay: Path | None,
    at: float | None,
) -> None:
    """Take looks and show them in the way that was asked for.

    Args:
        machine: This machine, when it was opened already; then the caller closes it.
        parts: What to show.
        gpus: Which GPUs, as in --gpus.
        watch: Seconds between looks, None for a single one.
        as_json: Print JSON.
        as_csv: Print CSV.
        sqlite: Append to this database.
        no_color: Print without colours.
        demo: Look at the demo machine.
        replay: Look at this recording.
        at: Seconds after the recording's start.
    """
    if as_json and as_csv:
        raise click.UsageError("--json and --csv exclude each other")
    if at is not None and replay is None:
        raise click.UsageError("--at goes with --replay")
    choose = selection.parse(gpus)
    show = _shower(
        parts, as_json=as_json, as_csv=as_csv, sqlite=sqlite, no_color=no_color, watching=watch is not None
    )
    needs_rates = parts.cpu or parts.disk or parts.network or as_json or sqlite is not None
    if watch is None:
        show(_chosen(_one(machine, demo=demo, replay=replay, at=at, needs_rates=needs_rates), choose))
        return
    for snapshot in _many(watch, shell.other_source(demo=demo, replay=replay)):
        show(_chosen(snapshot, choose))


def _chosen(snapshot: Snapshot, choose: selection.Select) -> Snapshot:
    frame = choose(snapshot.frame)
    if frame is snapshot.frame:
        return snapshot
    indices = {gpu.device.index for gpu in frame.gpus}
    findings = tuple(
        finding for finding in snapshot.findings if finding.gpu is None or finding.gpu in indices
    )
    return Snapshot(frame, snapshot.rates, findings)


def _one(
    machine: LocalMachine | None, *, demo: bool, replay: Path | None, at: float | None, needs_rates: bool
) -> Snapshot:
    if replay is not None:
        return _from_recording(replay, at)
    source = shell.other_source(demo=demo, replay=None)
    if source is not None:
        now = time.time()
        return _with_faults(Snapshot.of(source.sample(now - RATES_SECONDS), source.sample(now)))
    from gpulse.sampling.look import look as take  # noqa: PLC0415  loads the driver's binding
    from gpulse.sampling.look import machine_for_one_look  # noqa: PLC0415

    rates_seconds = RATES_SECONDS if needs_rates else None
    if machine is not None:
        return _with_faults(take(machine, rates_seconds=rates_seconds))
    with closing(machine_for_one_look()) as opened:
        return _with_faults(take(opened, rates_seconds=rates_seconds))


def _from_recording(path: Path, at: float | None) -> Snapshot:
    """The look at the recording's end, or at a moment of it."""
    from gpulse.sources.recording import Recording  # noqa: PLC0415

    recent: list[Frame] = []
    first: float | None = None
    for frame in Recording(path):
        first = frame.time if first is None else first
        if at is not None and frame.time - first > at and recent:
            break
        recent = [old for old in recent if frame.time - old.time <= 2 * RATES_SECONDS or old is recent[-1]]
        recent.append(frame)
    if not recent:
        raise RecordingError(
            f"{path} holds no frame", hint="it was cut off before its first frame; record again"
        )
    last = recent[-1]
    apart = [old for old in recent[:-1] if last.monotonic - old.monotonic >= RATES_SECONDS - 0.01]
    earlier = apart[-1] if apart else recent[0] if len(recent) > 1 else None
    return _with_faults(Snapshot.of(earlier, last))


def _with_faults(snapshot: Snapshot) -> Snapshot:
    from gpulse.diagnosis.faults import faults  # noqa: PLC0415

    return snapshot._replace(findings=tuple(faults(snapshot.frame)))


def _many(seconds: float, source: Source | None) -> Iterator[Snapshot]:
    from gpulse.sampling.sampler import Sampler  # noqa: PLC0415

    before: Frame | None = None
    with closing(Sampler(source, interval_seconds=seconds)) as sampler:
        for frame in sampler:
            yield _with_faults(Snapshot.of(before, frame))
            before = frame


Show = Callable[[Snapshot], None]


def _shower(
    parts: Parts, *, as_json: bool, as_csv: bool, sqlite: Path | None, no_color: bool, watching: bool
) -> Show:
    if as_csv:
        show = _csv_shower(parts)
    elif as_json:
        show = _json_shower(watching=watching)
    elif sqlite is not None and not watching:
        return _sqlite_shower(sqlite, None)
    else:
        show = _text_shower(parts, no_color=no_color, watching=watching)
    return show if sqlite is None else _sqlite_shower(sqlite, show)


def _text_shower(parts: Parts, *, no_color: bool, watching: bool) -> Show:
    from gpulse.terminal.snapshot import snapshot_lines  # noqa: PLC0415

    in_place = watching and sys.stdout.isatty()

    def show(snapshot: Snapshot) -> None:
        lines = "\n".join(snapshot_lines(snapshot, parts, shell.width(), shell.paint(no_color=no_color)))
        shell.write(f"{CLEAR}{lines}" if in_place else f"{lines}\n" if watching else lines)
        sys.stdout.flush()

    return show


def _json_shower(*, watching: bool) -> Show:
    import json  # noqa: PLC0415

    from gpulse.export.document import document  # noqa: PLC0415

    def show(snapshot: Snapshot) -> None:
        click.echo(json.dumps(document(snapshot), indent=None if watching else 2))
        sys.stdout.flush()

    return show


def _csv_shower(parts: Parts) -> Show:
    from gpulse.export.csv import CsvWriter  # noqa: PLC0415
    from gpulse.export.tables import Table  # noqa: PLC0415

    asked: list[tuple[bool, Table]] = [
        (parts.cpu, "process"),
        (parts.disk, "disk"),
        (parts.network, "network"),
    ]
    tables = [table for wanted, table in asked if wanted]
    if len(tables) > 1:
        raise click.UsageError(
            "CSV holds one table: give one of -c, -d, -n, or use --json or --sqlite for all of them"
        )
    return CsvWriter(sys.stdout, tables[0] if tables else "gpu").write


def _sqlite_shower(path: Path, also: Show | None) -> Show:
    from gpulse.export.sqlite import SqliteSink  # noqa: PLC0415

    def show(snapshot: Snapshot) -> None:
        with closing(SqliteSink(path)) as sink:
            sink.append(snapshot)
        if also is not None:
            also(snapshot)
        else:
            click.echo(f"appended one look at {len(snapshot.frame.gpus)} GPUs to {path}", err=True)

    return show


def seconds_after(text: str) -> float:
    """`+12.5`, or `12.5`, as seconds after a recording's start.

    Raises:
        GpulseError: It is not a number.
    """
    try:
        return float(text.removeprefix("+"))
    except ValueError:
        raise GpulseError(f"{text!r} is not a number of seconds") from None
