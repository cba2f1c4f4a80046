"""Puts a monitor into workers in such a way that one without gpulse is left as it is."""

from __future__ import annotations

import logging
import pickle
from typing import TYPE_CHECKING, Any

import cloudpickle
from distributed.diagnostics.plugin import WorkerPlugin

from gpulse.integrations.dask.settings import Settings
from gpulse.integrations.dask.tracking import ArgumentError
from gpulse.integrations.dask.wire import PLUGIN
from gpulse.integrations.dask.worker import WorkerMonitor

if TYPE_CHECKING:
    from distributed import Worker


def packed_plugin(settings: Settings) -> bytes:
    """The plugin for every worker, as dask sends it.

    Raises:
        ArgumentError: A custom metric cannot travel.
    """
    packed: bytes = cloudpickle.dumps(_carrier(_packed(settings)))
    return packed


def _packed(settings: Settings) -> bytes:
    try:
        packed: bytes = cloudpickle.dumps(WorkerMonitor(settings))
    except (TypeError, AttributeError, pickle.PicklingError) as error:
        names = ", ".join(metric.name for metric in settings.custom)
        raise ArgumentError(
            f"custom metrics ({names}) cannot be sent to the workers: {error}",
            hint="they travel with the globals they use: locks, files and connections have to be made inside them",
        ) from error
    return packed


def _carrier(packed: bytes) -> WorkerPlugin:
    """What travels whole, and lets the worker itself load the rest, or not.

    A plugin that cannot be loaded keeps a worker from joining its cluster.
    """

    class Carrier(WorkerPlugin):
        name = PLUGIN

        def __init__(self) -> None:
            self.packed = packed
            self.monitor: Any = None

        async def setup(self, worker: Worker) -> None:
            try:
                self.monitor = pickle.loads(self.packed)  # noqa: S301  dask's own wire, and what it carries anyway
            except ImportError as error:
                logging.getLogger("distributed.worker.gpulse").warning(
                    "this worker is not monitored, because something is not installed here: %s", error
                )
                return
            await self.monitor.setup(worker)

        async def teardown(self, worker: Worker) -> None:
            if self.monitor is not None:
                await self.monitor.teardown(worker)

    return Carrier()
