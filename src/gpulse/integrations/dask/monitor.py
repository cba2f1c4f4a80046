"""`Monitor`: attaches to a running cluster from any client, and takes home what was measured."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from gpulse._version import __version__
from gpulse.errors import GpulseError, requirement
from gpulse.integrations.dask import peaks as peak
from gpulse.integrations.dask import tables
from gpulse.integrations.dask.files import WorkerTable, parse, read_folder, write_files
from gpulse.integrations.dask.record import unpacked
from gpulse.integrations.dask.settings import Settings, settings
from gpulse.integrations.dask.tracking import ArgumentError
from gpulse.integrations.dask.wire import PLUGIN

if TYPE_CHECKING:
    from distributed import Client, Scheduler

    from gpulse.integrations.dask.status import Status

_log = logging.getLogger("gpulse.dask")
Result = TypeVar("Result")
Record = tuple[bytes, Iterator[bytes]]
"""The first line of a worker's file, and the rest."""


class NotAttachedError(GpulseError):
    """The cluster is not monitored."""

    def __init__(self) -> None:
        super().__init__(
            "no monitor is attached to this cluster: none ever was, it was detached, or its scheduler has been started "
            "anew since, which ended the monitoring and lost what was recorded",
            hint="attach(tracking=['mem-util', 'compute-util']), then start()",
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
            TypeError: It is no client of Dask's.
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
        """Prepare the cluster to be monitored, and forget what an earlier monitor has recorded.

        Args:
            tracking: What to track: `tasks`, `total-mem`, `mem-util`, `compute-util`, or names of gpulse's catalogue.
            custom_metrics: Functions made by `custom_metric`.
            job_type: `client`: every client that submits work is a job; `manual`: jobs change with `new_job()`.
            polling_interval: Milliseconds between two measurements.
            mem_limit: How many measurements of each worker stay in memory; all when None.
            dump_loc: The folder on the scheduler's machine for the others.
            head: A gpulse head, `HOST:8090`, that gets what the workers' machines show as well.
            head_token_file: Holds the head's token.
            head_ca: PEM file of who vouches for the head.

        Raises:
            ValueError: An argument does not make sense; the error says what is allowed.
            GpulseError: Monitoring runs already, or the cluster cannot be monitored.
        """
        streamed = None
        if head is not None:
            from gpulse.integrations.dask.streaming import head_settings  # noqa: PLC0415  hardly anybody streams

            streamed = head_settings(head, head_token_file, head_ca)
        wanted = settings(tracking, custom_metrics, job_type, polling_interval, mem_limit, dump_loc, streamed)
        return self._sync(self._attach, wanted)

    def start(self) -> Any:
        """Begin to record, or go on after a stop.

        Raises:
            GpulseError: No monitor is attached, or it runs already.
        """
        return self._sync(self._obeyed, "begin")

    def stop(self) -> Any:
        """Stop recording; the last measurements of every worker are in when this returns.

        Raises:
            GpulseError: No monitor is attached, or it does not run.
        """
        return self._sync(self._obeyed, "end")

    def new_job(self, job: int | None = None) -> Any:
        """Go on with the next job, or with the one that is named; its number. Only with `job_type='manual'`.

        Raises:
            ValueError: Jobs are numbered by clients, or that is no number.
            GpulseError: No monitor is attached.
        """
        return self._sync(self._ask, "new_job", job)

    def status(self) -> Any:
        """How the monitoring stands: what is tracked, jobs, workers, and what went wrong.

        Raises:
            GpulseError: No monitor is attached.
        """
        return self._sync(self._ask, "status")

    def detach(self) -> Any:
        """End the monitoring and forget what was recorded; nothing happens when there is none."""
        return self._sync(self._detach)

    def to_csv(self, folder: str | os.PathLike[str]) -> Any:
        """Write a file for each worker, `worker-0.csv` and so on; their paths. Also while it records.

        Raises:
            GpulseError: No monitor is attached, or a file cannot be written.
        """
        place = _folder(folder)
        return self._sync(self._with_records, lambda records: write_files(place, records))

    def to_parquet(self, folder: str | os.PathLike[str]) -> Any:
        """Write a file for each worker, `worker-0.parquet` and so on; their paths.

        Raises:
            GpulseError: As for `to_csv`, or pyarrow is not installed.
        """
        place = _folder(folder)
        return self._sync(self._with_records, lambda records: tables.to_parquet(place, _tables(records)))

    def to_pandas(self) -> Any:
        """Everything that was recorded, as one DataFrame whose first column is the worker's index.

        Raises:
            GpulseError: No monitor is attached, or pandas is not installed.
        """
        return self._sync(self._with_records, lambda records: tables.to_pandas(_tables(records)))

    def get_peaks(self, metric: str, workers: Sequence[int] | None = None, per_job: bool = True) -> Any:
        """The highest values that a metric reached on each worker, for each of its GPUs.

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
            lambda records: peak.peaks(_tables(records, metric), metric, workers, per_job=per_job),
            workers,
        )

    @staticmethod
    def peaks_from_csv(
        folder: str | os.PathLike[str],
        metric: str,
        workers: Sequence[int] | None = None,
        per_job: bool = True,
    ) -> Any:
        """The same from the files that `to_csv` wrote.

        Raises:
            GpulseError: There are no such files, or there is no such metric or worker.
        """
        return peak.peaks(read_folder(folder), metric, workers, per_job=per_job)

    def _sync(self, function: Callable[..., Awaitable[Any]], *arguments: Any) -> Any:
        """The answer, or with an asynchronous client what to await for it."""
        if self.client.status == "closed":
            raise GpulseError(
                "this client is closed", hint="Monitor(Client(...)), with one that is connected"
            )
        return self.client.sync(function, *arguments)  # type: ignore[no-untyped-call]

    async def _attach(self, wanted: Settings) -> None:
        from gpulse.integrations.dask.plugin import packed_plugin  # noqa: PLC0415  a client that looks needs neither
        from gpulse.integrations.dask.scheduler import SchedulerMonitor, already_monitored, check_place  # noqa: PLC0415

        names = tuple(metric.name for metric in wanted.custom)
        monitor = SchedulerMonitor(wanted._replace(custom=()), names, packed_plugin(wanted))
        try:
            status: Status = await self._ask("status")
        except NotAttachedError:
            pass
        else:
            if status.running:
                raise already_monitored()
            await self._check(check_place, wanted._replace(custom=()))
            await self._detach()
        await self._answered(self.client.register_plugin(monitor, name=PLUGIN))
        try:
            await self._obeyed("settle")
        except BaseException:
            await self._detach()
            raise

    async def _check(self, check: Callable[..., Any], wanted: Settings) -> None:
        error = await self._answered(self.client.run_on_scheduler(check, wanted))  # type: ignore[no-untyped-call]
        if error is not None:
            raise error

    async def _detach(self) -> None:
        with suppress(NotAttachedError):
            await self._ask("leave")

    async def _obeyed(self, operation: str) -> None:
        """Have the scheduler do something, and say what troubles workers had with it."""
        for trouble in await self._ask(operation):
            _log.warning("%s", trouble)

    async def _with_records(
        self, use: Callable[[Mapping[int, Record]], Result], workers: Sequence[int] | None = None
    ) -> Result:
        """Let a function read the records, which are fetched page by page while it does."""
        loop = asyncio.get_running_loop()

        def chunks(index: int) -> Iterator[bytes]:
            position: int | None = 0
            while position is not None:
                page = asyncio.run_coroutine_threadsafe(self._ask("page", index, position), loop)
                blocks, position = page.result()
                yield from map(unpacked, blocks)

        found: dict[int, str] = dict(await self._ask("gather"))
        wanted = peak.asked_workers(found, workers)
        records = {index: (found[index].encode(), chunks(index)) for index in wanted}
        return await asyncio.to_thread(use, records)

    async def _ask(self, operation: str, *arguments: Any) -> Any:
        """Have the scheduler do something."""
        kind, answer = await self._answered(
            self.client.run_on_scheduler(perform, operation, arguments, __version__)  # type: ignore[no-untyped-call]
        )
        if kind == "failed":
            raise answer
        if kind == "unknown":
            raise NotAttachedError
        return answer

    async def _answered(self, question: Awaitable[Result]) -> Result:
        try:
            return await question
        except ImportError as error:
            raise GpulseError(
                f"the scheduler cannot load the monitor: {error}",
                hint=f"install gpulse {__version__} where the scheduler and the workers run: pip install {requirement('dask')}",
            ) from error
        except OSError as error:
            raise GpulseError(
                f"the scheduler does not answer: {str(error) or type(error).__name__}",
                hint="a scheduler that was started anew has forgotten its monitor: attach() it again",
            ) from error


async def perform(
    operation: str, arguments: Sequence[Any], version: str, dask_scheduler: Scheduler
) -> tuple[str, Any]:
    """On the scheduler: do what a client wants of the monitor there."""
    if version != __version__:
        return "failed", GpulseError(
            f"here is gpulse {version}, and where the scheduler runs {__version__}",
            hint="install the same version in both places",
        )
    monitor = dask_scheduler.plugins.get(PLUGIN)
    if monitor is None:
        return "unknown", None
    try:
        return "done", await getattr(monitor, operation)(*arguments)
    except (GpulseError, OSError) as error:
        return "failed", error


def _folder(given: object) -> str:
    """Where to export to.

    Raises:
        ArgumentError: That is no path.
    """
    path = os.fspath(given) if isinstance(given, str | os.PathLike) else None
    if not isinstance(path, str) or not path or "\0" in path:
        raise ArgumentError(f"an export needs the path of a folder, not {given!r}")
    return path


def _tables(records: Mapping[int, Record], metric: str | None = None) -> dict[int, WorkerTable]:
    """The records as tables; without fetching anything, see to it that a metric is in them."""
    if metric is not None:
        for header, _ in records.values():
            peak.check_metric(parse(header, ()).tracked, metric)
    return {
        index: parse(header, chunks, f"the record of worker {index}")
        for index, (header, chunks) in records.items()
    }
