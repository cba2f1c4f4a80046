from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpulse.errors import RecordingError, UsageError
from gpulse.integrations.dask.csv_files import (
    WorkerTable,
    find_worker_files,
    parse_record,
    read_folder,
    read_table,
    write_files,
)
from tests.unit.dask_records import Plan, export, lines_of, one_file, record

HEADER = b"job,dag,timestamp,tasks,mem-util"
LINE = b'1,2,0.200,"[""inc-1"", ""(\'x\', 0)""]","[1.5, null]"\n'


def rows(table: WorkerTable) -> list[list[Any]]:
    """Everything in a record, line by line."""
    found: list[list[Any]] = []
    for batch in table.batches():
        columns = [batch.jobs, batch.dags, batch.timestamps, *map(batch.values, table.tracked)]
        found += [list(line) for line in zip(*columns, strict=True)]
    return found


def test_a_line_is_read_as_it_was_meant() -> None:
    """Numbers, keys of tasks with quotes and commas, values that are missing."""

    assert [[1, 2, 0.2, ["inc-1", "('x', 0)"], [1.5, None]]] == rows(parse_record(HEADER, [LINE]))


def test_an_export_is_read_back_whole(tmp_path: Path) -> None:
    """Files of more than one block, whatever the chunks were that they were written from."""
    plan = Plan(lines=2500, gpus=8)
    header, (content,) = record(plan)
    chunks = [content[place : place + 1000] for place in range(0, len(content), 1000)]

    (path,) = write_files(tmp_path, {0: (header, chunks)})

    assert [[*line[:2], round(line[2], 3), *line[3:]] for line in lines_of(plan)] == rows(read_table(path))
    assert rows(parse_record(header, chunks)) == rows(read_table(path))


def test_a_record_can_be_gone_through_again() -> None:
    """Also when its bytes came from an iterator."""
    table = parse_record(HEADER, iter([LINE]))

    assert [1, 1] == [len(rows(table)), len(rows(table))]


def test_a_last_line_that_was_cut_off_is_left_out() -> None:
    """As a disk that was full or a program that was killed leaves it, wherever it was cut."""
    kept = {len(rows(parse_record(HEADER, [LINE + LINE[:end]]))) for end in range(len(LINE))}

    assert {1} == kept


def test_missing_cells_are_none_and_numbers_that_are_none_too() -> None:
    """Python writes NaN into JSON; that is unknown."""
    table = parse_record(HEADER, [b'0,0,1.000,,\n1,1,2.000,[],"[NaN, 1]"\n'])

    assert [[0, 0, 1.0, None, None], [1, 1, 2.0, [], [None, 1]]] == rows(table)


def test_a_cell_of_any_length_is_read() -> None:
    """Keys of tasks can be long; the csv module refuses to read them."""
    key = "k" * 300_000
    table = parse_record(HEADER, [f'1,1,0.000,"[""{key}""]",\n'.encode()])

    assert [[1, 1, 0.0, [key], None]] == rows(table)


def test_a_file_that_a_spreadsheet_wrote_is_read() -> None:
    """It has a mark in front and other ends of lines."""
    table = parse_record(b"\xef\xbb\xbfjob,dag,timestamp,mem-util\r\n", [b'1,1,0.5,"[1, 2]"\r\n2,1,0.7,\r\n'])

    assert [[1, 1, 0.5, [1, 2]], [2, 1, 0.7, None]] == rows(table)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b"1,1,0.4,[]\n", "4 cells, but the header has 5 columns"),
        (b"1,1,0.4,[],[],[]\n", "6 cells"),
        (b"\n", "1 cells"),
        (b'1,1,0.4,"[],[]\n', "quotes"),
        (b'1,1,0.4,"[]"x,[]\n', "quotes"),
        (b"1,1,0.4,[],{\n", "'{' is not a valid value"),
        (b'1,1,0.4,[],"1,2"\n', "'1,2' is not a valid value"),
        (b"1,1,0.4,[],abc\n", "'abc' is not a valid value"),
        (b"one,1,0.4,[],[]\n", "'one' is not a valid value"),
        (b"1,1,nan,[],[]\n", "'nan' is not a valid value"),
        (b"1,1,1e300,[],[]\n", "'1e300' is not a valid value"),
        (b"9223372036854775808,1,0.4,[],[]\n", "'9223372036854775808' is not a valid value"),
        (b"1," + b"9" * 30 + b",0.4,[],[]\n", "is not a valid value"),
        (b"-1,1,0.4,[],[]\n", "'-1' is not a valid value"),
        (b'1,1,0.4,[],[1\n1,1,0.6,[],"2],3"\n', "'.1' is not a valid value"),
        (b'1,1,0.4,[],"[[1"\n1,1,0.6,[],2]]\n1,1,0.8,[],"3,4,5"\n', "'..1' is not a valid value"),
        (b'1,1,0.4,[],"[1,""~~"",2"\n1,1,0.6,[],"3],""~~"",4"\n', "is not a valid value"),
        (b"1,1,0.4,[],\xff\n", "not UTF-8 text"),
        (b"1,1,0.4,[]," + b"[" * 100_000 + b"\n", "is not a valid value"),
    ],
)
def test_a_broken_line_is_named(line: bytes, why: str, tmp_path: Path) -> None:
    """By its file and number, also when it lies far behind the first block."""
    path = tmp_path / "worker-3.csv"
    path.write_bytes(HEADER + b"\n" + LINE * 8000 + line + LINE)

    with pytest.raises(RecordingError, match=r"worker-3\.csv, line 8002: .*" + why.replace("{", r"\{")):
        rows(read_table(path))


def test_cells_with_any_text_are_read() -> None:
    """Also that which stands between cells that are read at once."""
    content = b'1,1,0.2,"[""~~"", ""\\""~~\\""""]",1\n1,1,0.4,"""~~""",2\n'

    assert [[1, 1, 0.2, ["~~", '"~~"'], 1], [1, 1, 0.4, "~~", 2]] == rows(parse_record(HEADER, [content]))


def test_two_columns_of_one_name_are_refused() -> None:
    """Nobody could say which of them is meant."""

    with pytest.raises(RecordingError, match="line 1: duplicate column 'mem-util'"):
        parse_record(HEADER + b",mem-util", [])


@pytest.mark.parametrize(
    "content",
    [b"", b"job,dag", b"job,dag,timestamp,mem", b"a,b,c\n1,2,3\n", b"\x89PNG\r\n\x1a\n\x00", b'"job\n'],
)
def test_a_foreign_file_is_refused(content: bytes, tmp_path: Path) -> None:
    """With what a record begins with."""
    path = tmp_path / "worker-0.csv"
    path.write_bytes(content)

    with pytest.raises(RecordingError, match=r"worker-0\.csv, line 1: .*job,dag,timestamp"):
        read_table(path)


def test_a_file_that_is_not_there_is_a_usage_error(tmp_path: Path) -> None:
    """A folder is none either."""

    with pytest.raises(UsageError, match="there is no file"):
        read_table(tmp_path / "no.csv")
    with pytest.raises(UsageError, match="is a directory"):
        read_table(tmp_path)


def test_files_of_workers_are_found_in_order(tmp_path: Path) -> None:
    """By number, not by letter; whatever else lies there is left alone."""
    export(tmp_path, Plan(lines=2), workers=11)
    for name in ("worker-01.csv", "worker-x.csv", "worker-1.csv.bak", "notes.txt"):
        (tmp_path / name).touch()

    assert list(range(11)) == list(find_worker_files(tmp_path))
    assert list(range(11)) == list(read_folder(tmp_path))


def test_a_folder_without_records_is_refused_with_what_was_looked_for(tmp_path: Path) -> None:
    """No folder, a file, and a folder with other things in it."""
    (tmp_path / "notes.txt").touch()

    with pytest.raises(UsageError, match="there is no directory"):
        find_worker_files(tmp_path / "no")
    with pytest.raises(UsageError, match="is not a directory"):
        find_worker_files(tmp_path / "notes.txt")
    with pytest.raises(UsageError, match=r"no worker-0\.csv"):
        find_worker_files(tmp_path)


def test_an_export_replaces_the_one_before(tmp_path: Path) -> None:
    """A file of a worker that is no more would be taken for one of this export; what is not ours stays."""
    export(tmp_path / "a" / "b", Plan(lines=5), workers=4)
    (tmp_path / "a" / "b" / "worker-9.csv").write_text("mine")

    written = write_files(tmp_path / "a" / "b", {2: (HEADER + b"\n", [LINE]), 0: (HEADER, [])})

    assert ["worker-0.csv", "worker-2.csv"] == [path.name for path in written]
    assert ["worker-0.csv", "worker-2.csv", "worker-9.csv"] == sorted(os.listdir(tmp_path / "a" / "b"))
    assert [HEADER + b"\n", HEADER + b"\n" + LINE] == [path.read_bytes() for path in written]


def test_a_file_of_somebody_else_is_not_replaced(tmp_path: Path) -> None:
    """It has the name that ours would have."""
    (tmp_path / "worker-0.csv").write_text("mine")

    with pytest.raises(UsageError, match=r"worker-0\.csv already exists and was not written by gpulse"):
        export(tmp_path)
    assert "mine" == (tmp_path / "worker-0.csv").read_text()


def test_an_export_that_fails_leaves_the_one_before(tmp_path: Path) -> None:
    """Whole, and nothing beside it."""
    (path,) = write_files(tmp_path, {0: (HEADER, [LINE])})

    def broken() -> Iterator[bytes]:
        yield LINE
        raise OSError(28, "No space left on device")

    with pytest.raises(RecordingError, match="No space left"):
        write_files(tmp_path, {0: (HEADER, [LINE * 2]), 1: (HEADER, broken())})
    assert ["worker-0.csv"] == os.listdir(tmp_path)
    assert HEADER + b"\n" + LINE == path.read_bytes()


def test_a_place_for_no_files_is_refused(tmp_path: Path) -> None:
    """A file where the folder should be, or above it."""
    (tmp_path / "file").touch()

    for folder in (tmp_path / "file", tmp_path / "file" / "folder"):
        with pytest.raises(UsageError, match="is not a directory"):
            export(folder)


def test_hours_of_eight_gpus_are_read_in_blocks(tmp_path: Path) -> None:
    """Never the whole file at once."""
    path = one_file(tmp_path, Plan(lines=5000, gpus=8))

    sizes = [len(batch.jobs) for batch in read_table(path).batches()]

    assert 5000 == sum(sizes)
    assert max(sizes) < 2000
