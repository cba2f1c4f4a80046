"""Who used the GPUs, as a table for spreadsheets."""

from __future__ import annotations

import csv
import io
from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime
from typing import Any

from gpulse.cluster.protocol.interface import Download
from gpulse.export.csv import safe_text
from gpulse.model.time_text import MAX_TIME_SECONDS
from gpulse.reports.usage import UsageReport, UsageRow

COLUMNS = UsageRow.__struct_fields__
_TIMES = frozenset({"start_time", "first", "last"})
_ROWS_A_PIECE = 500


def usage_file(report: UsageReport) -> Download:
    """Return the file of an answer about usage; an empty cell is an unknown value."""
    name = f"gpulse-usage-{_day(report.start)}-{_day(report.end)}.csv"
    return Download(name, "text/csv", _pieces(report.rows))


async def _pieces(rows: Sequence[UsageRow]) -> AsyncIterator[bytes]:
    yield _lines([COLUMNS])
    for place in range(0, len(rows), _ROWS_A_PIECE):
        yield _lines([[_cell(row, name) for name in COLUMNS] for row in rows[place : place + _ROWS_A_PIECE]])


def _lines(rows: Sequence[Sequence[Any]]) -> bytes:
    stream = io.StringIO()
    csv.writer(stream, lineterminator="\n").writerows(rows)
    return stream.getvalue().encode("utf-8", "replace")


def _cell(row: UsageRow, name: str) -> Any:
    value = getattr(row, name)
    if name == "nodes":
        value = " ".join(value)
    elif name in _TIMES and value is not None:
        value = f"{_moment(value):%Y-%m-%dT%H:%M:%SZ}"
    return safe_text(value) if isinstance(value, str) else value


def _day(seconds: float) -> str:
    return f"{_moment(seconds):%Y%m%dT%H%M%SZ}"


def _moment(seconds: float) -> datetime:
    return datetime.fromtimestamp(min(max(seconds, 0.0), MAX_TIME_SECONDS), UTC)
