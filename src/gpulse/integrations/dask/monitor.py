"""`Monitor`, the client-side API: attach to a running cluster, record, and export the measurements."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from gpulse._version import __version__
from gpulse.errors import GpulseError, pip_requirement
from gpulse.integrations.dask import dataframe_and_parquet
from gpulse.integrations.dask import metric_peaks as peak
from gpulse.integrations.dask.csv_files import WorkerTable, parse_record, read_folder, write_files
from gpulse.integrations.dask.head_stream import head_settings
from gpulse.integrations.dask.monitor_settings import MonitorSettings, build_settings
from gpulse.integrations.dask.trackable_metrics import ArgumentError
from gpulse.integrations.dask.worker_registry import PLUGIN_NAME, MonitorStatus, unpack_block

if TYPE_CHECKING:
    from distributed import Client, Scheduler

_log = logging.getLogger("gpulse.dask")
Result = TypeVar("Result")
FetchedRecord = tuple[bytes, Iterator[bytes]]
"""First line of a worker's file, and the rest."""


class NotAttachedError(GpulseError):
    """The cluster is not monitored."""

    def __init__(self) -> None:
        super().__init__(
            "no monitor is attached to this cluster: attach() was never called, the monitor was detached, or the "
            "scheduler was restarted, which ended the monitoring and lost its record",
            hint="use attach(tracking=['mem-util', 'compute-util']), then start()",
        )


class Monitor:
    """The monitor of the cluster that a client is connected to.

    What it starts lives in the cluster: this client may be closed, and another one may stop it and export.

        monitor = Monitor(client)
        monitor.attach(tracking=["mem-util", "compute-util"])
        monitor.start()

    With an asynchronous client every call but `peaks_from_csv` is to be awaited.
    """

    def __init__(self, client: Client) -> None:
        """Bind to a client.

        Args:
            client: Connected to the cluster.

        Raises:
            TypeError: It is not a Dask client.
        """
        if not callable(getattr(client, "run_on_scheduler", None)):
            raise TypeError(f"Monitor(client) takes a distributed.Client, not {client!r}")
        self.client = client

    def attach(
        self,
        tracking: Iterable[str],
        custom_metrics: Iterable[object] = (),
        job_type: str = "client",
        polling_interval: float = 200,
        mem_limit: int | None = None,
        dump_loc: str | os.PathLike[str] = "temp",
        *,
        head: str | None = None,
        head_token_file: str | os.PathLike[str] | None = None,
        head_ca: str | os.PathLike[str] | None = None,
    ) -> Any:
        """Install the monitor in the cluster, and drop the record of an earlier one.

        Args:
            tracking: Metrics to record: `tasks`, `total-mem`, `mem-util`, `compute-util`, or names of gpulse's catalogue.
            custom_metrics: Functions made by `custom_metric`.
            job_type: `client`: every client that submits work is a job; `manual`: jobs change with `new_job()`.
            polling_interval: Milliseconds between two measurements.
            mem_limit: Maximum number of measurements per worker in memory; None keeps all.
            dump_loc: Directory on the scheduler's machine for the rest.
            head: Address of a gpulse head, `HOST:8090`, that also gets the frames of the workers' machines.
            head_token_file: File with the head's token.
            head_ca: PEM file with the CA certificate of the head.

        Raises:
            ValueError: An argument is wrong; the message names the valid values.
            GpulseError: Monitoring is already running, or the cluster cannot be monitored.
        """
        streamed = None
        if head is not None:
            streamed = head_settings(head, head_token_file, head_ca)
        wanted = build_settings(
            tracking, custom_metrics, job_type, polling_interval, mem_limit, dump_loc, streamed
        )
        return self._sync(self._attach, wanted)

    def start(self) -> Any:
        """Start recording, or continue after a stop.

        Raises:
            GpulseError: No monitor is attached, or it is already running.
        """
        return self._sync(self._call_and_log_problems, "begin")

    def stop(self) -> Any:
        """Stop recording; the last measurements of every worker are in when this returns.

        Raises:
            GpulseError: No monitor is attached, or it is not running.
        """
        return self._sync(self._call_and_log_problems, "end")

    def new_job(self, job: int | None = None) -> Any:
        """Begin the next job, or the one with a number, and return its number. Only with `job_type='manual'`.

        Raises:
            ValueError: Jobs are numbered by clients, or the number is wrong.
            GpulseError: No monitor is attached.
        """
        return self._sync(self._call_scheduler, "new_job", job)

    def status(self) -> Any:
        """Return the status: tracked metrics, jobs, workers and problems.

        Raises:
            GpulseError: No monitor is attached.
        """
        return self._sync(self._call_scheduler, "status")

    def detach(self) -> Any:
        """Remove the monitor from the cluster and drop the record; do nothing when there is none."""
        return self._sync(self._detach)

    def to_csv(self, folder: str | os.PathLike[str]) -> Any:
        """Write a file for each worker, `worker-0.csv` and so on, also while recording, and return their paths.

        Raises:
            GpulseError: No monitor is attached, or a file cannot be written.
        """
        place = _check_folder(folder)
        return self._sync(self._with_records, lambda records: write_files(place, records))

    def to_parquet(self, folder: str | os.PathLike[str]) -> Any:
        """Write a file for each worker, `worker-0.parquet` and so on, and return their paths.

        Raises:
            GpulseError: As for `to_csv`, or pyarrow is not installed.
        """
        place = _check_folder(folder)
        return self._sync(
            self._with_records,
            lambda records: dataframe_and_parquet.to_parquet(place, _build_tables(records)),
        )

    def to_pandas(self) -> Any:
        """Return the whole record as one DataFrame whose first column is the worker's index.

        Raises:
            GpulseError: No monitor is attached, or pandas is not installed.
        """
        return self._sync(
            self._with_records, lambda records: dataframe_and_parquet.to_pandas(_build_tables(records))
        )

    def get_peaks(self, metric: str, workers: Sequence[int] | None = None, per_job: bool = True) -> Any:
        """Return the highest values of a metric on each worker, for each of its GPUs.

        Args:
            metric: One that is tracked.
            workers: Their indices; all when None.
            per_job: By job, or over everything.

        Returns:
            For each worker a dict from job to peaks, or just the peaks.

        Raises:
            GpulseError: No monitor is attached, or there is no such metric or worker.
        """
        return self._sync(
            self._with_records,
            lambda records: peak.compute_peaks(
                _build_tables(records, metric), metric, workers, per_job=per_job
            ),
            workers,
        )

    @staticmethod
    def peaks_from_csv(
        folder: str | os.PathLike[str],
        metric: str,
        workers: Sequence[int] | None = None,
        per_job: bool = True,
    ) -> Any:
        """Return the same from files that `to_csv` wrote.

        Raises:
            GpulseError: There are no such files, or there is no such metric or worker.
        """
        return peak.compute_peaks(read_folder(folder), metric, workers, per_job=per_job)

    def _sync(self, function: Callable[..., Awaitable[Any]], *arguments: Any) -> Any:
        """Return the result, or an awaitable for it when the client is asynchronous."""
        if self.client.status == "closed":
            raise GpulseError("this client is closed", hint="use a connected client: Monitor(Client(...))")
        return self.client.sync(function, *arguments)  # type: ignore[no-untyped-call]

    async def _attach(self, wanted: MonitorSettings) -> None:
        from gpulse.integrations.dask.scheduler_plugin import (  # noqa: PLC0415
            SchedulerMonitor,
            already_monitored_error,
            check_before_attach,
        )
        from gpulse.integrations.dask.worker_plugin import pack_plugin  # noqa: PLC0415  a client that looks needs neither

        names = tuple(metric.name for metric in wanted.custom)
        monitor = SchedulerMonitor(wanted._replace(custom=()), names, pack_plugin(wanted))
        try:
            status: MonitorStatus = await self._call_scheduler("status")
        except NotAttachedError:
            pass
        else:
            if status.running:
                raise already_monitored_error()
            await self._check(check_before_attach, wanted._replace(custom=()))
            await self._detach()
        await self._await_answer(self.client.register_plugin(monitor, name=PLUGIN_NAME))
        try:
            await self._call_and_log_problems("install")
        except BaseException:
            await self._detach()
            raise

    async def _check(self, check: Callable[..., Any], wanted: MonitorSettings) -> None:
        error = await self._await_answer(self.client.run_on_scheduler(check, wanted))  # type: ignore[no-untyped-call]
        if error is not None:
            raise error

    async def _detach(self) -> None:
        with suppress(NotAttachedError):
            await self._call_scheduler("uninstall")

    async def _call_and_log_problems(self, operation: str) -> None:
        """Call the scheduler's monitor, and log problems on workers."""
        for trouble in await self._call_scheduler(operation):
            _log.warning("%s", trouble)

    async def _with_records(
        self, use: Callable[[Mapping[int, FetchedRecord]], Result], workers: Sequence[int] | None = None
    ) -> Result:
        """Call a function with the records, which are fetched in pages while it reads them."""
        loop = asyncio.get_running_loop()

        def chunks(index: int) -> Iterator[bytes]:
            position: int | None = 0
            while position is not None:
                page = asyncio.run_coroutine_threadsafe(self._call_scheduler("page", index, position), loop)
                blocks, position = page.result()
                yield from map(unpack_block, blocks)

        found: dict[int, str] = dict(await self._call_scheduler("collect"))
        wanted = peak.select_workers(found, workers)
        records = {index: (found[index].encode(), chunks(index)) for index in wanted}
        return await asyncio.to_thread(use, records)

    async def _call_scheduler(self, operation: str, *arguments: Any) -> Any:
        """Call a method of the scheduler's monitor."""
        kind, answer = await self._await_answer(
            self.client.run_on_scheduler(call_scheduler_monitor, operation, arguments, __version__)  # type: ignore[no-untyped-call]
        )
        if kind == "failed":
            raise answer
        if kind == "unknown":
            raise NotAttachedError
        return answer

    async def _await_answer(self, call: Awaitable[Result]) -> Result:
        try:
            return await call
        except ImportError as error:
            raise GpulseError(
                f"the scheduler cannot load the monitor: {error}",
                hint=f"install gpulse {__version__} on the machines of the scheduler and the workers: pip install {pip_requirement('dask')}",
            ) from error
        except OSError as error:
            raise GpulseError(
                f"the scheduler does not respond: {str(error) or type(error).__name__}",
                hint="if the scheduler was restarted, attach the monitor again with attach()",
            ) from error


async def call_scheduler_monitor(
    operation: str, arguments: Sequence[Any], version: str, dask_scheduler: Scheduler
) -> tuple[str, Any]:
    """Run on the scheduler: call a method of its monitor for a client."""
    if version != __version__:
        return "failed", GpulseError(
            f"gpulse versions differ: {version} on this machine, {__version__} on the scheduler's",
            hint="install the same version on both",
        )
    monitor = dask_scheduler.plugins.get(PLUGIN_NAME)
    if monitor is None:
        return "unknown", None
    try:
        return "done", await getattr(monitor, operation)(*arguments)
    except (GpulseError, OSError) as error:
        return "failed", error


def _check_folder(given: object) -> str:
    """Return the directory to export to.

    Raises:
        ArgumentError: It is not a path.
    """
    path = os.fspath(given) if isinstance(given, str | os.PathLike) else None
    if not isinstance(path, str) or not path or "\0" in path:
        raise ArgumentError(f"folder must be a path, not {given!r}")
    return path


def _build_tables(records: Mapping[int, FetchedRecord], metric: str | None = None) -> dict[int, WorkerTable]:
    """Return the records as tables, after checking that they have a metric, before anything is fetched."""
    if metric is not None:
        for header, _ in records.values():
            peak.check_metric(parse_record(header, ()).tracked, metric)
    return {
        index: parse_record(header, chunks, f"the record of worker {index}")
        for index, (header, chunks) in records.items()
    }
