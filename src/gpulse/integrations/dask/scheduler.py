"""In the scheduler: the home of a cluster's monitoring, which leads the workers and keeps what they measured."""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from distributed.diagnostics.plugin import SchedulerPlugin

from gpulse.errors import GpulseError, requirement
from gpulse.integrations.dask.jobs import Numbering
from gpulse.integrations.dask.labelling import CAUSE, Labelling
from gpulse.integrations.dask.orders import Orders
from gpulse.integrations.dask.record import Record
from gpulse.integrations.dask.roster import Member, Roster
from gpulse.integrations.dask.rows import header
from gpulse.integrations.dask.settings import Settings
from gpulse.integrations.dask.status import Status
from gpulse.integrations.dask.tracking import DEFAULT_ON_HOSTS, columns
from gpulse.integrations.dask.wire import JOIN, PLUGIN, ROWS, Order

if TYPE_CHECKING:
    from distributed import Scheduler

_LOOK_SECONDS = 0.2
_SHARE_OF_LOOKING = 200
"""Looking at what the cluster is at takes no more than one part in so many of the scheduler's time."""

UpdateGraph = Callable[..., Awaitable[None]]


class SchedulerMonitor(SchedulerPlugin):
    """The plugin in the scheduler: clients come and go, this stays until it is detached."""

    name = PLUGIN

    def __init__(self, settings: Settings, custom: tuple[str, ...], for_workers: bytes) -> None:
        """Prepare to travel.

        Args:
            settings: Without people's functions, which need not be loadable here.
            custom: The names of those.
            for_workers: The plugin for every worker.
        """
        self._settings = settings
        self._custom = custom
        self._for_workers = for_workers

    async def start(self, scheduler: Scheduler) -> None:
        """Dask has put the plugin into the scheduler.

        Raises:
            GpulseError: Another monitor is there, or there is no place for what does not fit into memory.
        """
        if PLUGIN in scheduler.plugins:
            raise already_monitored()
        if JOIN in scheduler.handlers:  # of one that was taken out without being told
            stale: Any = scheduler.handlers[JOIN]
            await stale.__self__.close()
        self._scheduler = scheduler
        self._tracked = self._settings.tracked
        self._dumps = _Dumps(self._settings) if self._settings.mem_limit is not None else None
        self._roster = Roster(self._new_record)
        self._orders = Orders(scheduler)
        self._numbering = Numbering(self._settings.job_type)
        self._labels: Labelling | None = None
        """From the first start on."""
        self._begun: float | None = None
        """The monotonic time of the first start."""
        self._running = False
        self._is_closed = False
        self._turn = asyncio.Lock()
        """Clients that want something at the same time get it one after the other."""
        self._looking: asyncio.Task[None] | None = None
        self._errands: set[asyncio.Task[Any]] = set()
        self._notes: list[str] = []
        self._has_looked_for_gpus = False
        self._submit: UpdateGraph = scheduler.stream_handlers["update-graph"]
        scheduler.stream_handlers["update-graph"] = self._submitted
        scheduler.handlers[JOIN] = self._joined
        scheduler.handlers[ROWS] = self._brought
        for address in scheduler.stream_comms:  # which has the workers in the order in which they came
            self._roster.arrived(address, scheduler.workers[address].name)

    async def close(self) -> None:
        """The scheduler ends, or monitoring is detached."""
        self._running, self._is_closed = False, True
        tasks = [*self._errands, *([] if self._looking is None else [self._looking])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._looking = None
        handlers = self._scheduler.stream_handlers
        if handlers.get("update-graph") == self._submitted:
            handlers["update-graph"] = self._submit
        for name in (JOIN, ROWS):
            self._scheduler.handlers.pop(name, None)
        self._roster.close()
        if self._dumps is not None:
            self._dumps.close()

    # What dask tells.

    def update_graph(self, scheduler: Scheduler, *, client: str, tasks: Iterable[Any], **_: Any) -> None:  # noqa: ARG002  dask's signature
        """A graph was submitted."""
        if self._labels is not None:
            self._labels.submitted(client, tasks, self._elapsed())

    def add_worker(self, scheduler: Scheduler, worker: str) -> None:
        """A worker has come."""
        self._roster.arrived(worker, scheduler.workers[worker].name)

    def remove_worker(self, scheduler: Scheduler, worker: str, **_: Any) -> None:  # noqa: ARG002  dask's signature
        """A worker has gone; if it spoke to a head, another one of its machine does so now."""
        member = self._roster.at(worker)
        was_speaking = member is not None and self._roster.speaks(member)
        gone = self._roster.left(worker)
        if gone is None or not was_speaking or not self._running or self._settings.head is None:
            return
        for heir in self._roster.on(gone.host)[:1]:
            errand = asyncio.ensure_future(self._orders.give({heir: self._beginning(heir)}))
            self._errands.add(errand)
            errand.add_done_callback(self._errands.discard)

    def remove_client(self, scheduler: Scheduler, client: str) -> None:  # noqa: ARG002  dask's signature
        """A client has closed its connection."""
        if self._labels is not None:
            self._numbering.left(client)
            self._labels.look(self._elapsed())

    # What workers tell.

    async def _joined(self, worker: str, host: str, pid: int, gpus: Iterable[str]) -> dict[str, Any] | None:
        member = self._roster.at(worker) or self._roster.arrived(worker, worker)
        self._roster.joined(member, host, pid, gpus)
        if not self._running:
            return None
        self._look_for_gpus()
        return self._beginning(member)._asdict()

    async def _brought(
        self,
        worker: str,
        life: str,
        number: int,
        batch: Mapping[str, Any] | None,
        troubles: Iterable[str],
        head: str | None = None,
    ) -> dict[int, str]:
        member = self._roster.at(worker) or self._roster.arrived(worker, worker)
        member.complain(troubles)
        member.head_trouble = head
        if batch is not None and self._labels is not None and member.is_new(life, number):
            lines = self._labels.resting.filled(batch["rows"])
            member.record.add(lines, batch["measurements"], batch["last"])
            member.lost += batch["lost"]
        return (
            self._jobs_on(member.host)
            if self._settings.head is not None and self._roster.speaks(member)
            else {}
        )

    # What clients want.

    async def settle(self) -> list[str]:
        """Put the other half into the workers: what is worth knowing about them.

        Raises:
            GpulseError: There are workers, and none of them can be monitored.
        """
        async with self._turn:
            return await self._settle()

    async def _settle(self) -> list[str]:
        self._check_open()
        self._scheduler.worker_plugins[PLUGIN] = self._for_workers  # also for those that come later
        self._notes += await self._orders.put_plugin(self._roster.here(), self._for_workers)
        self._notes += self._unmonitored()
        if self._roster.here() and not self._roster.present():
            self._scheduler.worker_plugins.pop(PLUGIN, None)
            raise GpulseError(self._notes[0], hint=f"pip install {requirement('dask')} where the workers run")
        self._look_for_gpus()
        return self._notes

    async def begin(self) -> list[str]:
        """Start, or go on after a stop; the troubles that workers had with it."""
        async with self._turn:
            return await self._begin()

    async def _begin(self) -> list[str]:
        self._check_open()
        if self._running:
            raise GpulseError("monitoring runs already", hint="stop() ends it")
        if PLUGIN not in self._scheduler.worker_plugins:
            await self._settle()  # whoever attached it did not live to the end of that
        self._running = True
        self._look_for_gpus()
        if self._begun is None:
            self._begun = time.monotonic()
        if self._labels is None:
            self._labels = Labelling(self._scheduler, self._numbering)
            self._labels.adopt()
        self._looking = asyncio.create_task(self._watch())
        troubles = await self._orders.give({m: self._beginning(m) for m in self._roster.present()})
        return [*self._unmonitored(), *troubles]

    async def end(self) -> list[str]:
        """Stop; when this returns, the last measurements are here, but for those of workers that had troubles."""
        async with self._turn:
            return await self._end()

    async def _end(self) -> list[str]:
        self._check_open()
        if not self._running:
            raise GpulseError("monitoring does not run", hint="start() begins it")
        self._running = False
        looking, self._looking = self._looking, None
        troubles = await self._orders.give(dict.fromkeys(self._roster.present(), Order(stop=True)))
        if looking is not None:
            looking.cancel()
        return troubles

    async def leave(self) -> None:
        """Take everything out of the cluster again, whoever of it is still alive."""
        async with self._turn:
            if self._is_closed:
                return
            self._scheduler.worker_plugins.pop(PLUGIN, None)
            # Workers first: they bring their last rows to a scheduler that still knows what they are.
            await self._orders.take_plugin(self._roster.here())
            await self.close()
            self._scheduler.plugins.pop(PLUGIN, None)

    async def gather(self) -> list[tuple[int, str]]:
        """Take in what workers have measured so far: the index of each record and its first line."""
        if self._running:
            await self._orders.give(dict.fromkeys(self._roster.present(), Order()))
        first = header(self._tracked, self._custom)
        return [(member.index, first) for member in self._roster.members]

    async def page(self, index: int, position: int) -> tuple[list[bytes], int | None]:
        """A part of a record."""
        return self._roster.members[index].record.page(position)

    async def new_job(self, job: int | None) -> int:
        """Go on with another job."""
        number = self._numbering.new_job(job)
        if self._labels is not None:
            self._labels.look(self._elapsed())
        return number

    async def status(self) -> Status:
        """How it stands."""
        settings, numbering = self._settings, self._numbering
        return Status(
            running=self._running,
            started=self._begun is not None,
            tracking=tuple(column.name for column in self._tracked),
            custom=self._custom,
            job_type=settings.job_type,
            polling_interval=settings.interval_ms,
            mem_limit=settings.mem_limit,
            dump_loc=settings.dump_loc,
            head=None if settings.head is None else settings.head.address,
            job=numbering.job,
            jobs=numbering.jobs,
            dags=numbering.graphs,
            workers=tuple(member.status() for member in self._roster.members),
            troubles=tuple(self._notes),
        )

    # The rest.

    async def _submitted(self, **message: Any) -> None:
        """Stands before dask's own handler of submissions, which does not tell plugins which task made them."""
        labels = self._labels
        cause = None if labels is None else labels.cause(message["client"], message.get("submitting_task"))
        token = CAUSE.set(cause)
        try:
            await self._submit(**message)
        finally:
            CAUSE.reset(token)

    async def _watch(self) -> None:
        while True:
            begun = time.perf_counter()
            if self._labels is not None:
                self._labels.look(self._elapsed())
            spent = time.perf_counter() - begun
            await asyncio.sleep(max(_LOOK_SECONDS, _SHARE_OF_LOOKING * spent))

    def _unmonitored(self) -> list[str]:
        return [
            f"worker {member.index} ({member.address}) is not monitored: gpulse is not installed there, or its log says why"
            for member in self._roster.here()
            if not member.joined
        ]

    def _check_open(self) -> None:
        if self._is_closed:
            raise GpulseError("the monitor was detached meanwhile", hint="attach() it again")

    def _elapsed(self) -> float:
        return 0.0 if self._begun is None else time.monotonic() - self._begun

    def _look_for_gpus(self) -> None:
        """Once, as soon as there are workers: where none has a GPU, turn to the hosts."""
        here = self._roster.present()
        if self._has_looked_for_gpus or not here:
            return
        self._has_looked_for_gpus = True
        if any(member.gpus for member in here) or not any(column.is_of_gpus for column in self._tracked):
            return
        note = "no worker has a GPU: what needs one stays empty"
        if all(column.shape in ("gpus", "tasks") for column in self._tracked):
            more = [name for name in DEFAULT_ON_HOSTS if name not in self._custom]
            self._tracked = (*self._tracked, *columns(more))
            note += f", and {' and '.join(more)} of the hosts are tracked as well"
        self._notes.append(note)

    def _jobs_on(self, host: str) -> dict[int, str]:
        """By process, the job that each worker of a machine is at, as a head calls it."""
        place = self._scheduler.address.partition("://")[2]
        found: dict[int, str] = {}
        for member in self._roster.on(host):
            worker = self._scheduler.workers.get(member.address)
            job = 0 if worker is None or self._labels is None else self._labels.newest_on(worker).job
            if job and member.pid is not None:
                found[member.pid] = f"dask:{place}/{job}"
        return found

    def _beginning(self, member: Member) -> Order:
        worker, labels = self._scheduler.workers.get(member.address), self._labels
        return Order(
            running=True,
            elapsed=self._elapsed(),
            sent=time.time(),
            token="" if labels is None else labels.token,
            adopted={} if labels is None or worker is None else dict(labels.adopted_on(worker)),
            tracked=self._tracked,
            streams=self._settings.head is not None and self._roster.speaks(member),
        )

    def _new_record(self, index: int) -> Record:
        path = None if self._dumps is None else os.path.join(self._dumps.folder, f"worker-{index}.dump")
        return Record(path, self._settings.mem_limit)


class _Dumps:
    """A folder of our own under the one that was named."""

    def __init__(self, settings: Settings) -> None:
        """Make it.

        Raises:
            GpulseError: There can be none.
        """
        self._under = os.path.abspath(settings.dump_loc)
        self._was_there = os.path.isdir(self._under)
        self.folder = os.path.join(self._under, f"gpulse-{secrets.token_hex(4)}")
        try:
            os.makedirs(self.folder, mode=0o700)
        except OSError as error:
            raise GpulseError(
                f"the scheduler cannot make {self.folder}: {error.strerror}",
                hint="dump_loc names a folder on the scheduler's machine that its user may write",
            ) from error

    def close(self) -> None:
        """Remove what was made, as far as nobody else uses it."""
        with suppress(OSError):
            os.rmdir(self.folder)
            if not self._was_there:
                os.rmdir(self._under)


def already_monitored() -> GpulseError:
    """Only one monitor can be attached to a cluster."""
    return GpulseError(
        "this cluster is being monitored already", hint="stop(), or detach() which drops the record"
    )


async def check_place(settings: Settings, dask_scheduler: Scheduler) -> GpulseError | None:  # noqa: ARG001  dask's word
    """On the scheduler: what would keep a monitor from being attached, before another one is given up for it."""
    if settings.mem_limit is not None:
        try:
            _Dumps(settings).close()
        except GpulseError as error:
            return error
    return None
