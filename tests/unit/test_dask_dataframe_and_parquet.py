from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest
from pyarrow import parquet

from gpulse.errors import MissingExtraError, RecordingError, UsageError, install_command
from gpulse.integrations.dask import dataframe_and_parquet
from gpulse.integrations.dask.csv_files import parse_record
from gpulse.integrations.dask.dataframe_and_parquet import to_pandas, to_parquet
from tests.unit.dask_records import Plan, lines_of, record, table

COLUMNS = ("tasks", "total-mem", "mem-util", "cpu", "net", "word", "odd", "huge", "never", "gpuless")
LINES: list[list[Any]] = [
    [1, 1, 0.2, ["a", "b"], [2**40], [1.5], 1, {"eth0": 1, "lo": 2.5}, "x", 1, 2**70, None, []],
    [1, 2, 0.4, [], [None], [2], None, None, None, "two", 1, None, []],
]


@pytest.mark.slow
def test_a_table_of_all_workers() -> None:
    """Numbers are numbers, lists are lists, and what is missing is missing."""
    frame = to_pandas({3: table(COLUMNS, *LINES), 1: table(COLUMNS, LINES[0])})

    assert ["worker", "job", "dag", "timestamp", *COLUMNS] == list(frame.columns)
    assert [1, 3, 3] == frame["worker"].tolist()
    assert ["int64"] * 3 + ["float64"] == [str(kind) for kind in frame.dtypes.iloc[:4]]
    assert [["a", "b"], ["a", "b"], []] == frame["tasks"].tolist()
    assert [[1.5], [1.5], [2]] == frame["mem-util"].tolist()
    assert [1.0, 1.0] == frame["cpu"].tolist()[:2]
    assert math.isnan(frame["cpu"].tolist()[2])
    assert {"eth0": 1, "lo": 2.5} == frame["net"].iloc[0]
    assert ["x", "x", None] == frame["word"].tolist()
    assert frame["never"].isna().all()


def test_a_table_of_nothing_has_its_columns() -> None:
    """No workers, and workers without a line."""

    assert ["worker", "job", "dag", "timestamp"] == list(to_pandas({}).columns)
    assert (0, 5) == to_pandas({0: table(["mem-util"])}).shape


def test_metrics_that_only_some_workers_have() -> None:
    """The others are without."""
    frame = to_pandas({0: table(["a"], [1, 1, 0.0, 5]), 1: table(["b"], [1, 1, 0.0, 6])})

    assert [[5.0, None], [None, 6.0]] == [
        [None if math.isnan(value) else value for value in frame[name]] for name in "ab"
    ]


def test_parquet_files_have_types(tmp_path: Path) -> None:
    """A list of numbers is one; what has no type of its own is JSON."""
    (path,) = to_parquet(tmp_path, {4: table(COLUMNS, *LINES)})

    found = parquet.read_table(path)
    assert "worker-4.parquet" == path.name
    assert {
        "job": "int64",
        "dag": "int64",
        "timestamp": "double",
        "tasks": "list<element: string>",
        "total-mem": "list<element: int64>",
        "mem-util": "list<element: double>",
        "cpu": "int64",
        "net": "map<string, double ('net')>",
        "word": "string",
        "odd": "string",
        "huge": "string",
        "never": "double",
        "gpuless": "list<element: double>",
    } == {field.name: str(field.type) for field in found.schema}
    assert [["a", "b"], []] == found["tasks"].to_pylist()
    assert [[2**40], [None]] == found["total-mem"].to_pylist()
    assert [[("eth0", 1.0), ("lo", 2.5)], None] == found["net"].to_pylist()
    assert ["1", '"two"'] == found["odd"].to_pylist()
    assert [str(2**70), "1"] == found["huge"].to_pylist()


def test_parquet_of_a_long_record_is_whole(tmp_path: Path) -> None:
    """Blocks of lines come together, whatever the first of them held."""
    plan = Plan(metrics=("mem-util", "late"), lines=5000, gpus=4)
    header, chunks = record(plan)
    late = b'2,3,1800.000,"[1, 2, 3, 4]",7\n'

    (path,) = to_parquet(tmp_path, {0: parse_record(header, [*chunks, late])})

    found = parquet.read_table(path)
    assert [line[3] for line in lines_of(plan)] + [[1, 2, 3, 4]] == found["mem-util"].to_pylist()
    assert [None] * 5000 + [7] == found["late"].to_pylist()


def test_parquet_replaces_the_export_before(tmp_path: Path) -> None:
    """And nothing that is not ours."""
    one = table(["m"], [1, 1, 0.0, 1])
    to_parquet(tmp_path, {0: one, 1: one, 2: one})
    (tmp_path / "worker-7.parquet").write_text("mine")

    to_parquet(tmp_path, {1: one})

    assert ["worker-1.parquet", "worker-7.parquet"] == sorted(os.listdir(tmp_path))
    with pytest.raises(UsageError, match="was not written by gpulse"):
        to_parquet(tmp_path, {7: one})


def test_a_broken_record_leaves_no_parquet(tmp_path: Path) -> None:
    """It is named."""
    broken = parse_record(b"job,dag,timestamp,m", [b"1,1,0.0,{\n"], "worker-5")

    with pytest.raises(RecordingError, match="worker-5, line 2"):
        to_parquet(tmp_path, {5: broken})
    assert [] == os.listdir(tmp_path)


def test_a_package_that_is_missing_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With the command that installs it."""
    monkeypatch.setattr(dataframe_and_parquet, "find_spec", lambda _: None)

    for export in (lambda: to_pandas({}), lambda: to_parquet(tmp_path, {})):
        with pytest.raises(MissingExtraError) as error:
            export()
        assert install_command("dask") == error.value.hint
