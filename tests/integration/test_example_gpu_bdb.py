"""The recipe for GPU-BDB, as it is in examples/, on a small data set."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.dask_machine import ROOT, dask_machine, read_rows

pytestmark = pytest.mark.slow

EXAMPLE = ROOT / "examples" / "gpu_bdb.py"


def test_the_recipe_on_a_running_cluster(tmp_path: Path, nvml_library: Path) -> None:
    """It finds what sells, and leaves the peaks, a file for each worker and a picture behind."""

    with dask_machine(tmp_path / "machine", nvml_library) as machine:
        machine.fake.gpu(0).util_gpu, machine.fake.gpu(1).util_gpu = 45, 72
        machine.start_workers(["0", "1"])
        out = tmp_path / "out"
        run = machine.run_script(
            EXAMPLE, "--scheduler", machine.address, "--rows", "40000", "--out", str(out)
        )

    assert 0 == run.popen.returncode, run.text
    assert ["cluster.html", "worker-0.csv", "worker-1.csv"] == sorted(path.name for path in out.iterdir())
    rows = [row for path in out.glob("*.csv") for row in read_rows(path)]
    labels = {row.label for row in rows}
    assert (1, 2) in labels
    assert labels <= {(0, 0), (1, 0), (1, 1), (1, 2)}
    peaks = {line.split()[-1] for line in run.lines if line.split()[:1] == ["compute-util"]}
    assert {"45", "72"} == peaks
    assert 3 == sum(line.split()[0] == "books" for line in run.lines if line.strip())
    assert "<svg" in (out / "cluster.html").read_text(encoding="utf-8")


def test_the_recipe_on_a_cluster_of_its_own(tmp_path: Path, nvml_library: Path) -> None:
    """Without a scheduler it makes a cluster, here one without GPUs."""

    with dask_machine(tmp_path / "machine", nvml_library, gpus=0) as machine:
        run = machine.run_script(EXAMPLE, "--rows", "20000", "--out", str(tmp_path / "out"))

    assert 0 == run.popen.returncode, run.text
    assert 2 == run.text.count("no GPUs") / 3, run.text
    assert (tmp_path / "out" / "worker-1.csv").exists()
