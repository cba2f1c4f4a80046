"""Writes a session's file: JSON, JSON lines, CSV or Parquet, from a store that may hold more than memory does."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import BinaryIO, NamedTuple, get_args

import numpy as np

from gpulse.errors import ExportCancelledError, UsageError
from gpulse.export.session import quantities
from gpulse.export.session.energy import Energy
from gpulse.export.session.grid import Grid, Rows, Table
from gpulse.export.session.gswarm_json import json_pieces, jsonl_pieces
from gpulse.export.session.members import present, unique_ids
from gpulse.export.session.outline import Document, Plan, Tally
from gpulse.export.session.steps import checked_steps
from gpulse.export.session.tables import csv_pieces, parquet_pieces
from gpulse.model.natural import natural_key
from gpulse.model.session import Format, Session
from gpulse.store.gpu_choice import choose_gpus
from gpulse.store.store import Query, Samples, Store, StoredGpu

FORMATS: tuple[Format, ...] = get_args(Format)
MEDIA_TYPES: Mapping[Format, str] = {
    "json": "application/json",
    "jsonl": "application/x-ndjson",
    "csv": "text/csv; charset=utf-8",
    "parquet": "application/vnd.apache.parquet",
}
_POWER_HOLDS_SECONDS = 10.0


class SessionSummary(NamedTuple):
    """What was written."""

    frames: int
    gpus: int
    nodes: int
    samples: int
    """How many cells of frames and GPUs know something."""
    bytes: int
    by_device: Mapping[str, Document]
    """As `summary_by_device` of the file."""


class SessionExport:
    """A session's file on its way out. Iterating gives its bytes, piece by piece, once."""

    def __init__(
        self,
        store: Store,
        session: Session,
        output_format: Format = "json",
        *,
        now: float | None = None,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> None:
        """Look up what the session is about.

        Args:
            store: Where its samples are.
            session: The session.
            output_format: The kind of file.
            now: Where a session that still goes on is cut.
            cancelled: Asked again and again whether nobody wants the file any more.

        Raises:
            UsageError: There is no such kind of file, or the session is too long for one.
        """
        if output_format not in FORMATS:
            raise UsageError(
                f"a session cannot be written as {output_format!r}", hint=f"one of {', '.join(FORMATS)}"
            )
        self._store = store
        self._format: Format = output_format
        self._cancelled = cancelled
        self.plan = plan(store, session, now=now)
        self.summary: SessionSummary | None = None
        """What was written, once everything was."""

    def __iter__(self) -> Iterator[bytes]:
        """The pieces.

        Raises:
            ExportCancelledError: Nobody wants them any more.
        """
        energy = Energy(
            len(self.plan.gpus),
            longest_gap_seconds=max(_POWER_HOLDS_SECONDS, 3 * self.plan.interval_seconds),
        )
        tally = Tally(self.plan, energy)
        size = 0
        for piece in self._pieces(tally, self._steps(tally, energy)):
            size += len(piece)
            self._go_on()
            yield piece
        self.summary = SessionSummary(
            tally.frames, len(self.plan.gpus), len(self.plan.nodes), tally.samples, size, tally.by_device()
        )

    def _pieces(self, tally: Tally, steps: Iterator[Rows]) -> Iterator[bytes]:
        def tail() -> Iterator[Document]:
            yield tally.tail(self._store)

        match self._format:
            case "json":
                return json_pieces(self.plan, steps, tail())
            case "jsonl":
                return jsonl_pieces(self.plan, steps, tail())
            case "csv":
                return csv_pieces(self.plan, steps)
            case "parquet":
                return parquet_pieces(self.plan, steps, tail())

    def _steps(self, tally: Tally, energy: Energy) -> Iterator[Rows]:
        plan = self.plan
        grid = Grid(
            start=plan.session.start,
            interval_seconds=plan.interval_seconds,
            steps=plan.steps,
            nodes=plan.places,
            names=[quantity.name for quantity in plan.quantities],
        )
        for samples in self._scan():
            self._go_on()
            table = self._table(samples)
            energy.add(table.until(plan.end))
            for rows in grid.add(self._converted(table)):
                self._go_on()
                tally.add(rows)
                yield rows
        for rows in grid.finish():
            self._go_on()
            tally.add(rows)
            yield rows

    def _go_on(self) -> None:
        if self._cancelled():
            raise ExportCancelledError(
                f"session {self.plan.session.name} was not written to its end",
                hint="export it again when there is time",
            )

    def _scan(self) -> Iterator[Samples]:
        plan = self.plan
        if not plan.gpus or not plan.steps:
            return
        yield from self._store.scan(
            Query(
                plan.session.start,
                plan.end + plan.interval_seconds / 2,  # what comes late for the last step
                "gpu",
                tuple(quantities.metrics(plan.session)),
                nodes=frozenset(plan.nodes),
                subjects=frozenset(gpu.uuid for gpu in plan.gpus),
            )
        )

    def _table(self, samples: Samples) -> Table:
        """The samples of the session's GPUs."""
        places = {(gpu.node, gpu.uuid): place for place, gpu in enumerate(self.plan.gpus)}
        of_key = np.array([places.get((key.node, key.subject), -1) for key in samples.keys], np.int64)
        columns = of_key[samples.series] if len(of_key) else np.empty(0, np.int64)
        kept = columns >= 0
        unknown = np.full(len(columns), np.nan)
        values = {
            name: samples.values.get(name, unknown)[kept] for name in quantities.metrics(self.plan.session)
        }
        return Table(columns[kept], samples.times[kept], values)

    def _converted(self, table: Table) -> Table:
        totals = np.array([_memory(gpu) for gpu in self.plan.gpus], np.float64)
        values = quantities.from_samples(self.plan.session, table.values, totals[table.columns])
        return table._replace(values=values)


def write_session(
    store: Store,
    session: Session,
    file: BinaryIO,
    output_format: Format = "json",
    *,
    now: float | None = None,
    cancelled: Callable[[], bool] = lambda: False,
) -> SessionSummary:
    """Write a session's file, from its beginning to its end, or up to `now` while it goes on.

    Raises:
        UsageError: There is no such kind of file, or the session is too long for one.
        ExportCancelledError: `cancelled` said so; what was written is no whole file.
        OSError: The file cannot be written.
    """
    export = SessionExport(store, session, output_format, now=now, cancelled=cancelled)
    file.writelines(export)
    if export.summary is None:
        raise RuntimeError("a session's file ended without a summary")
    return export.summary


def plan(store: Store, session: Session, *, now: float | None = None) -> Plan:
    """Who is in a session, and how many steps it has.

    Raises:
        UsageError: It has more than a file can hold.
    """
    end = max(session.start, _end(session, now))
    steps = checked_steps(session, end)
    gpus = _present(store, session, end)
    names = {gpu.node: natural_key(gpu.node_name) for gpu in gpus}
    nodes = sorted(names, key=lambda node: names[node])
    place_of = {node: place for place, node in enumerate(nodes)}
    gpus.sort(key=lambda gpu: (place_of[gpu.node], *_label(gpu)))
    return Plan(
        session,
        end,
        steps,
        tuple(gpus),
        tuple(unique_ids(gpus)),
        tuple(nodes),
        tuple(place_of[gpu.node] for gpu in gpus),
        quantities.of_session(session),
        store.nodes(),
    )


def _present(store: Store, session: Session, end: float) -> list[StoredGpu]:
    chosen = choose_gpus(store.gpus(), session.nodes, session.gpus, strict=False)
    if end <= session.start or not chosen:
        return []
    query = Query(
        session.start,
        end,
        "gpu",
        ("gpu_utilization_ratio", "memory_used_bytes"),
        nodes=frozenset(gpu.node for gpu in chosen),
        step=max(1.0, end - session.start),
        statistic="last",
        spread=False,
    )
    heard = {(series.key.node, series.key.subject) for series in store.series(query)}
    return present(chosen, session, heard)


def _end(session: Session, now: float | None) -> float:
    """Where it ends: where it was stopped, where the head ended under it, or now."""
    if session.end is not None:
        return session.end
    open_ends = [part.start for part in session.interruptions if part.end is None]
    if open_ends:
        return open_ends[-1]
    if now is None:
        raise ValueError("a session that goes on needs a time to cut it at")
    return now


def _label(gpu: StoredGpu) -> tuple[int, ...]:
    return tuple(int(part) for part in gpu.label.split(":") if part.isdigit())


def _memory(gpu: StoredGpu) -> float:
    total = (gpu.device.get("facts") or {}).get("memory_total_bytes")
    return float(total) if isinstance(total, int | float) else math.nan
