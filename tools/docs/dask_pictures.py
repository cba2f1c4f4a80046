"""Draw the pictures of Dask records from a simulated cluster: `make pictures`."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.unit.dask_records import Plan, record

from gpulse.integrations.dask import visualize
from gpulse.integrations.dask.csv_files import write_files

IMAGES = Path(__file__).parents[2] / "docs" / "images"
METRICS = ["compute-util", "mem-util"]
SIZE: dict[str, Any] = {"width": 14, "height": 6.5}
WORKERS = 12


def draw(folder: Path) -> None:
    """Draw twelve workers with two GPUs each; two are restarted, and one joins late."""
    plan = Plan(metrics=("compute-util", "mem-util"), lines=1500, dags=6)
    plans = {worker: plan._replace(worker=worker) for worker in range(WORKERS)}
    plans[0] = plans[0]._replace(gap=(96.0, 108.0))
    plans[7] = plans[7]._replace(gap=(190.0, 215.0))
    plans[11] = plans[11]._replace(gap=(0.0, 75.0))
    write_files(folder, {worker: record(each) for worker, each in plans.items()})
    visualize.lines(folder / "worker-0.csv", 1, METRICS, save=IMAGES / "dask-lines.png", **SIZE)
    visualize.boxes(folder / "worker-0.csv", 1, METRICS, save=IMAGES / "dask-boxes.png", **SIZE)
    visualize.cluster(folder, METRICS, save=IMAGES / "dask-cluster.png", **SIZE)


if __name__ == "__main__":
    IMAGES.mkdir(exist_ok=True)
    with TemporaryDirectory() as place:
        draw(Path(place) / "my-run")
    print(f"drew {', '.join(sorted(path.name for path in IMAGES.glob('dask-*.png')))} in {IMAGES}")
