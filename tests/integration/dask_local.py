"""Clusters that dask makes itself, monitored: `python dask_local.py threads|adaptive FOLDER`."""

from __future__ import annotations

import logging
import sys
import time
from pathlib import Path
from typing import Any

import distributed

from gpulse.integrations.dask import Monitor
from tests.integration import dask_tasks as tasks

dask: Any = distributed  # it has no types


def threads(folder: Path) -> None:
    """Two workers in this very process."""
    with (
        dask.LocalCluster(
            n_workers=2, threads_per_worker=1, processes=False, dashboard_address=":0"
        ) as cluster,
        dask.Client(cluster) as client,
    ):
        monitor = Monitor(client)
        monitor.attach(["tasks", "compute-util"], [tasks.BEAT], polling_interval=50)
        monitor.start()
        for key, address in zip("ab", client.nthreads(), strict=True):
            client.submit(tasks.seen, times=8, key=key, workers=[address]).result()
        monitor.stop()
        monitor.to_csv(folder)


def adaptive(folder: Path) -> None:
    """A cluster that grows when there is work and shrinks when there is none."""
    with (
        dask.LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address=":0") as cluster,
        dask.Client(cluster) as client,
    ):
        monitor = Monitor(client)
        monitor.attach(["tasks", "compute-util"], [tasks.BEAT], polling_interval=50)
        monitor.start()
        cluster.adapt(minimum=1, maximum=2, interval="50ms", wait_count=4, target_duration="100ms")
        folder.mkdir()
        # Longer than a second: rows are sent once a second, and a worker that dask takes away may not send its last.
        given = ([str(folder)] * 2, range(2), [30] * 2)
        client.gather(client.map(tasks.together, *given, key=["crowd-0", "crowd-1"]))
        while len(client.nthreads()) > 1:
            time.sleep(0.02)
        client.submit(tasks.seen, key="alone").result()
        monitor.stop()
        print([worker.here for worker in monitor.status().workers])
        monitor.to_csv(folder)


if __name__ == "__main__":
    logging.getLogger("distributed").setLevel(
        logging.WARNING
    )  # dask tells of connections that end with the cluster
    {"threads": threads, "adaptive": adaptive}[sys.argv[1]](Path(sys.argv[2]))
