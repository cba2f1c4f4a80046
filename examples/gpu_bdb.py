"""Monitor a retail query in the style of GPU-BDB: which items of each category are bought right after they were viewed.

    python examples/gpu_bdb.py [--scheduler ADDRESS] [--rows N] [--out DIRECTORY]

It generates its own data, so it needs only a cluster: that of the given scheduler, or one on this machine. It uses cuDF
where cuDF is installed, and pandas otherwise. The five steps are in `main`; the query itself does not know that it is
monitored.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
from distributed import Client, LocalCluster, wait

from gpulse.integrations.dask import Monitor, visualize

TRACKING = ["tasks", "total-mem", "mem-util", "compute-util", "cpu_utilization_ratio", "host_memory_bytes"]
ITEMS_PER_CATEGORY = 50
CATEGORIES = ("books", "garden", "kitchen", "music", "sports", "toys")
DAY_SECONDS = 86_400
SESSION_GAP_SECONDS = 1_800
CLICKS_PER_SALE = 10
ROWS_PER_PARTITION = 50_000
TOP = 3


def clicks(part: int, rows: int, users: int) -> pd.DataFrame:
    """One partition of the clickstream: who looked at which item when."""
    chance = np.random.default_rng(part)
    return pd.DataFrame(
        {
            "user": chance.integers(users, size=rows),
            "item": chance.zipf(1.5, size=rows) % (ITEMS_PER_CATEGORY * len(CATEGORIES)),
            "clicked": chance.integers(DAY_SECONDS, size=rows),
        }
    )


def sales(part: int, rows: int, users: int) -> pd.DataFrame:
    """One partition of the sales: most of them are of something that was just looked at."""
    chance = np.random.default_rng(part + 1_000_000)
    looked = clicks(part, rows, users).sample(rows // CLICKS_PER_SALE, random_state=part)
    price = chance.gamma(2.0, 15.0, size=len(looked)).round(2)
    sold = looked["clicked"] + chance.integers(1, 2 * SESSION_GAP_SECONDS, size=len(looked))
    return pd.DataFrame({"user": looked["user"], "item": looked["item"], "sold": sold, "price": price})


def items() -> pd.DataFrame:
    """Every item and its category."""
    number = np.arange(ITEMS_PER_CATEGORY * len(CATEGORIES))
    return pd.DataFrame({"item": number, "category": [CATEGORIES[item % len(CATEGORIES)] for item in number]})


def with_sessions(frame: Any) -> Any:
    """Number the sessions of each user, and keep the first look at an item in each.

    A session ends when nothing is clicked for half an hour.
    """
    frame = frame.sort_values(["user", "clicked"])
    pause = frame["clicked"] - frame["clicked"].shift(1)
    begins = (frame["user"] != frame["user"].shift(1)) | (pause > SESSION_GAP_SECONDS)
    frame["session"] = begins.astype("int64").cumsum()
    return frame.drop_duplicates(["session", "item"])


def tables(rows: int, backend: str) -> tuple[Any, Any, Any]:
    """Clicks, sales and items as collections that the workers make."""
    parts = max(2, rows // ROWS_PER_PARTITION)
    size, users = rows // parts, max(10, rows // 100)
    made = [
        dd.from_map(table, range(parts), rows=size, users=users, meta=table(0, CLICKS_PER_SALE, users))
        for table in (clicks, sales)
    ]
    made.append(dd.from_pandas(items(), npartitions=1))
    clicked, sold, listed = (table.to_backend(backend) for table in made)
    return clicked, sold, listed


def sessions(clicked: Any) -> Any:
    """The clickstream with numbered sessions; all clicks of a user come to one partition."""
    return clicked.shuffle("user").map_partitions(with_sessions)


def top_items(visited: Any, sold: Any, listed: Any) -> Any:
    """The items of each category that were bought in most sessions, within half an hour of the first look."""
    bought = visited.merge(sold, on=["user", "item"])
    waited = bought["sold"] - bought["clicked"]
    soon = bought[(waited > 0) & (waited < SESSION_GAP_SECONDS)]
    named = soon.merge(listed, on="item")
    totals = named.groupby(["category", "item"]).agg({"session": "count", "price": "sum"}).compute()
    totals = totals.reset_index().rename(columns={"session": "sessions"})
    totals = totals.sort_values(["category", "sessions", "item"], ascending=[True, False, True])
    return totals.groupby("category").head(TOP)


def run_benchmark(client: Client, rows: int, backend: str) -> Any:
    """Two graphs: the sessions, which stay in the cluster's memory, and then the query about them."""
    with client.as_current(), dask.config.set({"dataframe.shuffle.method": "tasks"}):
        clicked, sold, listed = tables(rows, backend)
        visited = sessions(clicked).persist()
        wait(visited)
        return top_items(visited, sold, listed)


@contextmanager
def a_cluster(scheduler: str | None) -> Iterator[str]:
    """The address of a scheduler: the one that was named, or that of a cluster on this machine."""
    if scheduler is not None:
        yield scheduler
        return
    options: dict[str, Any] = {"dashboard_address": ":0"}
    if importlib.util.find_spec("dask_cuda") is not None:
        from dask_cuda import LocalCUDACluster  # noqa: PLC0415  only where there are GPUs

        made = LocalCUDACluster(**options)
    else:
        made = LocalCluster(n_workers=2, threads_per_worker=1, **options)
    with made as cluster:
        yield cluster.scheduler_address


def report(peaks: dict[str, list[list[Any]]]) -> None:
    """Print the peaks of each worker."""
    for metric, workers in peaks.items():
        for number, values in enumerate(workers):
            shown = ", ".join("unknown" if value is None else f"{value:,}" for value in values) or "no GPUs"
            print(f"  {metric:22} worker {number}: {shown}")


def main() -> None:
    """Follow the recipe."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--scheduler", metavar="ADDRESS", help="such as tcp://10.0.0.5:8786 (default: a cluster here)"
    )
    parser.add_argument("--rows", type=int, default=500_000, help="clicks to make (default: %(default)s)")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("gpu_bdb_metrics"),
        help="where CSV and plot go (default: %(default)s)",
    )
    given = parser.parse_args()
    backend = "pandas" if importlib.util.find_spec("cudf") is None else "cudf"

    # 1. Install gpulse[dask] on all nodes of the cluster.  2. Start the cluster and connect all the workers.
    with a_cluster(given.scheduler) as address:
        # 3. Connect the monitor and start recording.
        with Client(address) as client:
            monitor = Monitor(client)
            monitor.attach(tracking=TRACKING, polling_interval=100)
            monitor.start()

        # 4. Run the benchmark.
        with Client(address) as client:
            best = run_benchmark(client, given.rows, backend)

        # 5. Stop the monitor and export metrics to csv.
        with Client(address) as client:
            monitor = Monitor(client)
            monitor.stop()
            files = monitor.to_csv(given.out)
            peaks = {metric: monitor.get_peaks(metric, per_job=False) for metric in TRACKING[1:]}
            monitor.detach()

    print(best.to_string(index=False))
    print("peaks:")
    report(peaks)
    plot = given.out / "cluster.html"
    visualize.cluster(given.out, save=plot)
    print("wrote", *files, plot, sep="\n  ")


if __name__ == "__main__":
    main()
