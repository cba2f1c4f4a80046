from __future__ import annotations

import csv
import io
import math
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from gpulse.errors import RecordingError
from gpulse.export.csv_files import CsvSink, CsvWriter
from gpulse.export.snapshot_documents import (
    TABLE_NAMES,
    TEXT_COLUMNS,
    build_document,
    build_rows,
    column_names,
)
from gpulse.export.sqlite_database import SCHEMA_VERSION, SqliteSink
from gpulse.model.process import GpuProcess
from gpulse.model.snapshot import Snapshot
from gpulse.sources.demo_machine import DemoMachine
from tests.unit.frames import GIB, NOON, frame, gpu, process, snapshot


@pytest.fixture(scope="module")
def demo() -> Snapshot:
    """Eight busy GPUs."""
    machine = DemoMachine(NOON)
    return Snapshot.of(machine.sample(NOON + 5), machine.sample(NOON + 5.5))


@pytest.fixture
def database(tmp_path: Path) -> Path:
    """A file that does not exist yet."""
    return tmp_path / "looks.sqlite"


def ask(path: Path, question: str) -> list[tuple[object, ...]]:
    """The answer of a database."""
    with closing(sqlite3.connect(path)) as opened:
        return opened.execute(question).fetchall()


def append(path: Path, look: Snapshot) -> None:
    """Append one look as `--sqlite` does."""
    with closing(SqliteSink(path)) as sink:
        sink.append(look)


def refusal(path: Path) -> RecordingError:
    """The error with which a file is refused."""
    with pytest.raises(RecordingError) as caught:
        SqliteSink(path)
    return caught.value


def test_rows_hold_only_known_columns(demo: Snapshot) -> None:
    """Every value that a table shows has a column, so that none is lost in silence."""
    extra = {"kind", "pod", "cgroup"}  # of a process, in JSON alone

    assert [set()] * len(TABLE_NAMES) == [
        {name for row in build_rows(table, demo) for name in row} - set(column_names(table)) - extra
        for table in TABLE_NAMES
    ]


def test_text_columns_hold_text_and_the_others_numbers(demo: Snapshot) -> None:
    """A reader can tell the type of a column by its name."""
    wrong = [
        (table, name, value)
        for table in TABLE_NAMES
        for row in build_rows(table, demo)
        for name, value in row.items()
        if name in column_names(table)
        and value is not None
        and isinstance(value, str) != (name in TEXT_COLUMNS)
    ]

    assert [] == wrong


def test_a_process_has_a_row_for_each_gpu_it_is_on() -> None:
    """What it holds on each is told apart."""
    look = snapshot(
        gpu(0, None, (GpuProcess(17, "compute", GIB),)),
        gpu(1, None, (GpuProcess(17, "compute", 2 * GIB),)),
        processes=(process(17), process(18, parent=17, on_gpu=False)),
    )

    assert [("0", 17, GIB), ("1", 17, 2 * GIB), (None, 18, None)] == [
        (row["gpu"], row["pid"], row["gpu_memory_bytes"]) for row in build_rows("process", look)
    ]


def test_csv_has_a_header_once_and_empty_cells_for_the_unknown() -> None:
    """Unknown is not 0."""
    stream = io.StringIO(newline="")
    writer = CsvWriter(stream)
    for _ in range(2):
        writer.write(snapshot(gpu(0), gpu(1, {"power_watts": 0})))
    read = list(csv.DictReader(io.StringIO(stream.getvalue())))

    assert ["300.4", "0", "300.4", "0"] == [row["power_watts"] for row in read]
    assert [""] * 4 == [row["sm_active_ratio"] for row in read]


def test_csv_quotes_what_needs_it() -> None:
    """A command with commas and quotes comes back whole."""
    stream, evil = io.StringIO(newline=""), 'a,"b" c'
    look = snapshot(gpu(0, None, (GpuProcess(17, "compute"),)), processes=(process(17, evil),))
    CsvWriter(stream, "process").write(look)

    assert evil == next(csv.DictReader(io.StringIO(stream.getvalue(), newline="")))["command"]


@pytest.mark.parametrize(
    ("cell", "name"),
    [
        ("'=cmd|' /C calc'!A0", "=cmd|' /C calc'!A0"),
        ("'@SUM(A1)", "@SUM(A1)"),
        ("'-2+3", "-2+3"),
        ("'\uff1d1+1", "\uff1d1+1"),
        ("^I=1", "\t=1"),
        ("^[[2J^[]0;owned^G", "\x1b[2J\x1b]0;owned\x07"),
        ("a^Jb^M", "a\nb\r"),
        ("<202E>live", "\u202elive"),
        ("a^@b<9B>", "a\0b\x9b"),
        ("py?", "py\udcff"),
    ],
)
def test_a_process_name_harms_neither_spreadsheets_nor_terminals(
    cell: str, name: str, tmp_path: Path
) -> None:
    """Formulas get an apostrophe; control characters and direction overrides are spelled out."""
    stream = io.StringIO(newline="")
    look = snapshot(gpu(0, None, (GpuProcess(17, "compute"),)), processes=(process(17, name=name),))
    CsvWriter(stream, "process").write(look)
    with closing(CsvSink(tmp_path / "run.csv")) as sink:
        sink.write(frame(gpu(0, name=name)))

    assert cell == next(csv.DictReader(io.StringIO(stream.getvalue(), newline="")))["name"]
    assert f",{cell},".encode() in (tmp_path / "run.csv").read_bytes()


@pytest.mark.parametrize(
    ("kept", "value"),
    [
        (2**63 - 1, 2**63 - 1),
        (-(2**63), -(2**63)),
        (float(2**63), 2**63),
        (float(2**64 - 1), 2**64 - 1),
        (-float(2**63), -(2**63) - 1),
        (None, 10**400),
        (None, math.nan),
        (None, -math.inf),
    ],
    ids=str,
)
def test_no_number_costs_a_file(kept: object, value: float, database: Path) -> None:
    """Integers beyond 64 bits are stored as floats, what is not finite as unknown, and the rest of the row is there."""
    held = GpuProcess(17, "compute", value)  # type: ignore[arg-type]
    whole = frame(
        gpu(0, {"memory_used_bytes": value, "temperature_celsius": 40}, (held,)),
        processes=(process(17, values={"read_bytes_total": value}),),
    )
    with closing(SqliteSink(database)) as sink, closing(CsvSink(database.with_suffix(".csv"))) as table:
        for each in (sink, table):
            each.write(whole)
            each.write(whole._replace(time=whole.time + 1, monotonic=whole.monotonic + 1))
    row = next(csv.DictReader(io.StringIO(database.with_suffix(".csv").read_text())))

    assert [(kept, 40)] * 2 == ask(database, "SELECT memory_used_bytes, temperature_celsius FROM gpu")
    assert [(kept, kept)] * 2 == ask(database, "SELECT gpu_memory_bytes, read_bytes_total FROM process")
    assert ("" if kept is None else str(kept)) == row["memory_used_bytes"]
    assert kept == build_document(Snapshot.of(None, whole))["gpus"][0]["memory_used_bytes"]


@pytest.mark.parametrize("name", ["py\udcff", "a\0b", "\x1b[2J", "a\nb"])
def test_no_text_costs_a_database(name: str, database: Path) -> None:
    """What cannot be encoded becomes a question mark; everything else is stored as it is."""
    append(database, snapshot(gpu(0, name=name), processes=(process(17, name, name=name, user=name),)))

    assert [(name.replace("\udcff", "?"),) * 3] == ask(database, "SELECT name, command, user FROM process")


def test_whether_a_link_is_up_is_a_number(demo: Snapshot) -> None:
    """Spreadsheets and databases agree on 1."""

    assert [1] == [row["up"] for row in build_rows("network", demo)]


def test_a_csv_recording_has_rates_since_the_frame_before(tmp_path: Path) -> None:
    """The first frame has none."""
    path, machine = tmp_path / "run.csv", DemoMachine(NOON)
    sink = CsvSink(path)
    for seconds in (5.0, 5.5):
        sink.write(machine.sample(NOON + seconds))
    sink.close()
    with path.open(newline="") as file:
        times = [row["time"] for row in csv.DictReader(file)]

    assert [str(NOON + 5)] * 8 + [str(NOON + 5.5)] * 8 == times


def test_an_existing_csv_file_is_not_touched(tmp_path: Path) -> None:
    """The error says so and what to do."""
    path = tmp_path / "run.csv"
    path.write_text("mine")
    with pytest.raises(RecordingError, match="already exists"):
        CsvSink(path)

    assert "mine" == path.read_text()


def test_sqlite_appends(database: Path, demo: Snapshot) -> None:
    """A second look adds its rows to those of the first."""
    append(database, demo)
    append(database, demo)

    assert [(16,)] == ask(database, "SELECT count(*) FROM gpu")
    assert [(8,)] == ask(database, "SELECT count(DISTINCT uuid) FROM gpu WHERE power_watts > 50")


def test_an_older_database_gets_the_new_columns(database: Path, demo: Snapshot) -> None:
    """What was written before a metric existed stays, with NULL for it."""
    append(database, demo)
    with closing(sqlite3.connect(database)) as opened:
        opened.execute("ALTER TABLE gpu DROP COLUMN power_watts")
        opened.commit()
    append(database, demo)

    assert [(8, 8)] == ask(database, "SELECT sum(power_watts IS NULL), sum(power_watts > 0) FROM gpu")


def test_a_database_of_a_newer_gpulse_is_refused_by_its_version(database: Path, demo: Snapshot) -> None:
    """An old program does not damage what it does not know."""
    append(database, demo)
    with closing(sqlite3.connect(database)) as opened:
        opened.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")

    assert "newer version of gpulse" in refusal(database).message


def test_another_programs_database_is_not_written_into(database: Path) -> None:
    """A slip of the finger does not put our tables into a browser's history."""
    with closing(sqlite3.connect(database)) as opened:
        opened.execute("CREATE TABLE bookmarks (url)")
        opened.commit()

    assert "belongs to another program" in refusal(database).message
    assert [("bookmarks",)] == ask(database, "SELECT name FROM sqlite_master")


def test_a_file_that_is_no_database_is_refused(database: Path) -> None:
    """The file stays as it is."""
    database.write_bytes(b"not a database at all" * 100)

    assert "file is not a database" in refusal(database).message


@pytest.fixture
def locked(database: Path, demo: Snapshot, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A database that another program is writing."""
    monkeypatch.setattr("gpulse.export.sqlite_database._LOCK_TIMEOUT_SECONDS", 0.05)
    append(database, demo)
    with closing(sqlite3.connect(database)) as other:
        other.execute("BEGIN EXCLUSIVE")
        yield database


def test_a_locked_database_is_named_as_such(locked: Path) -> None:
    """After some patience the error says who is in the way."""
    error = refusal(locked)

    assert "locked" in error.message
    assert "the program that has locked the file" in str(error.hint)


def test_a_look_is_appended_whole_or_not_at_all(database: Path, demo: Snapshot) -> None:
    """A failure in the middle leaves no half of it."""
    append(database, demo)
    with closing(SqliteSink(database)) as sink, closing(sqlite3.connect(database)) as other:
        other.execute("DROP TABLE process")
        other.commit()
        with pytest.raises(RecordingError):
            sink.append(demo)

    assert [(8,)] == ask(database, "SELECT count(*) FROM gpu")


def test_nan_is_unknown_in_a_table() -> None:
    """Columns hold numbers or nothing."""

    assert [None] == [
        row["power_watts"]
        for row in build_rows("gpu", Snapshot.of(None, frame(gpu(0, {"power_watts": float("nan")}))))
    ]
