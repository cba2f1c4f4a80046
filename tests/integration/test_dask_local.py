"""Clusters that dask makes itself: workers that are threads of one process, and workers that come and go with the work."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.dask_machine import DaskMachine, Row, dask_machine, read_rows

pytestmark = pytest.mark.slow

LOCAL = Path(__file__).with_name("dask_local.py")


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory, nvml_library: Path) -> Iterator[DaskMachine]:
    """A machine with two GPUs."""
    with dask_machine(tmp_path_factory.mktemp("local"), nvml_library) as made:
        yield made


def keys(rows: list[Row]) -> set[str]:
    """The tasks that were seen."""
    return {key for row in rows for key in row.cells["tasks"]}


def test_workers_of_one_process(machine: DaskMachine, tmp_path: Path) -> None:
    """Workers that are threads of one process are measured each for itself."""

    run = machine.run_script(LOCAL, "threads", str(tmp_path / "csv"))
    assert (0, "") == (run.popen.returncode, run.text)
    one, other = (read_rows(tmp_path / "csv" / f"worker-{index}.csv") for index in range(2))

    assert [{"a"}, {"b"}] == sorted((keys(one), keys(other)), key=min)
    assert {(1, 1), (1, 2)} == {row.label for row in (*one, *other) if row.cells["tasks"]}
    assert {2} == {len(row.cells["compute-util"]) for row in (*one, *other)}


def test_a_cluster_that_grows_and_shrinks(machine: DaskMachine, tmp_path: Path) -> None:
    """An adaptive cluster: the worker that came for a while has its file."""

    run = machine.run_script(LOCAL, "adaptive", str(tmp_path / "csv"))
    assert 0 == run.popen.returncode, run.text
    one, other = (read_rows(tmp_path / "csv" / f"worker-{index}.csv") for index in range(2))

    assert {"[True, False]", "[False, True]"} & set(run.lines), run.text
    assert {"crowd-0", "crowd-1", "alone"} == keys(one) | keys(other)
    assert not keys(one) & keys(other)
    for key, label in {"crowd-0": (1, 1), "crowd-1": (1, 1), "alone": (1, 2)}.items():
        assert {label} == {row.label for row in (*one, *other) if key in row.cells["tasks"]}
