"""In the scheduler: numbers jobs and graphs, leads the workers, and keeps what they measured."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING, Any

from distributed.diagnostics.plugin import SchedulerPlugin

from gpulse.errors import GpulseError
from gpulse.integrations.dask.jobs import ANNOTATION, Label, Numbering, marked
from gpulse.integrations.dask.record import Record
from gpulse.integrations.dask.resting import Resting
from gpulse.integrations.dask.roster import Member, Roster
from gpulse.integrations.dask.rows import header
from gpulse.integrations.dask.settings import Settings
from gpulse.integrations.dask.status import Status
from gpulse.integrations.dask.tracking import DEFAULT_ON_HOSTS, columns
from gpulse.integrations.dask.wire import JOIN, ORDER, PLUGIN, ROWS, Order

if TYPE_CHECKING:
    from distributed import Scheduler
    from distributed.scheduler import TaskState

_ANSWER_SECONDS = 10.0
"""A worker that has not obeyed by then is left alone."""
_MOST_LOOKED_AT = 16
"""Tasks of a worker that are looked at for what the cluster is at."""
_LOOK_SECONDS = 0.1
_UNSUBMITTED = frozenset({"released", "forgotten"})

_log = logging.getLogger("distributed.scheduler.gpulse")

UpdateGraph = Callable[..., Awaitable[None]]


class SchedulerMonitor(SchedulerPlugin):
    """The home of a cluster's monitoring: clients come and go, this stays until it is detached."""

    name = PLUGIN

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

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
        self._tracked = self.settings.tracked
        self._dumps = _dump_folder(self.settings) if self.settings.mem_limit is not None else None
        self._roster = Roster(self._new_record)
        self._numbering: Numbering | None = None
        self._origin: float | None = None
        self._running = False
        self._resting = Resting()
        self._looking: asyncio.Task[None] | None = None
        self._notes: list[str] = []
        self._causes: dict[str, Any] = {}
        """By the id of a submission, the task that made it."""
        self._submit: UpdateGraph = scheduler.stream_handlers["update-graph"]
        scheduler.stream_handlers["update-graph"] = self._submitted
        scheduler.handlers[JOIN] = self._joined
        scheduler.handlers[ROWS] = self._brought
        for address in scheduler.stream_comms:  # which has the workers in the order in which they came
            self._roster.arrived(address, scheduler.workers[address].name)

    async def close(self) -> None:
        """The scheduler ends, or monitoring is detached."""
        if self._looking is not None:
            self._looking.cancel()
            with suppress(asyncio.CancelledError):
                await self._looking
            self._looking = None
        handlers = self._scheduler.stream_handlers
        if handlers.get("update-graph") == self._submitted:
            handlers["update-graph"] = self._submit
        for name in (JOIN, ROWS):
            self._scheduler.handlers.pop(name, None)
        self._running = False
        self._roster.close()
        if self._dumps is not None:
            with suppress(OSError):
                os.rmdir(self._dumps)

    # What dask tells.

    def update_graph(
        self, scheduler: Scheduler, *, client: str, tasks: Iterable[Any], stimulus_id: str = "", **_: Any
    ) -> None:
        """A graph was submitted: its tasks carry its numbers from now on, also to the workers."""
        if self._numbering is None:
            return
        label = self._numbering.submitted(client, self._cause(stimulus_id))
        mark = label.mark
        for key in tasks:
            task = scheduler.tasks.get(key)
            if task is not None and (task.state in _UNSUBMITTED or marked(task.annotations) is None):
                _mark(task, mark)
        self._resting.note(self._elapsed(), label)

    def add_worker(self, scheduler: Scheduler, worker: str) -> None:
        """A worker has come."""
        self._roster.arrived(worker, scheduler.workers[worker].name)

    async def remove_worker(self, scheduler: Scheduler, worker: str, **_: Any) -> None:  # noqa: ARG002  dask's signature
        """A worker has gone; if it spoke to a head, another one of its machine does so now."""
        was_speaking = any(member.address == worker for member in self._roster.speakers().values())
        gone = self._roster.left(worker)
        if gone is None or not was_speaking or not self._running or self.settings.head is None:
            return
        heir = self._roster.speakers().get(gone.host)
        if heir is not None:
            await self._order(heir, self._beginning(heir))

    def remove_client(self, scheduler: Scheduler, client: str) -> None:  # noqa: ARG002  dask's signature
        """A client has closed its connection."""
        if self._numbering is not None:
            self._numbering.left(client)

    # What workers tell.

    async def _joined(self, worker: str, host: str, pid: int, gpus: Iterable[str]) -> dict[str, Any] | None:
        member = self._roster.at(worker) or self._roster.arrived(worker, worker)
        member.host, member.pid, member.gpus, member.joined = host, pid, tuple(gpus), True
        return self._beginning(member)._asdict() if self._running else None

    async def _brought(
        self, worker: str, life: str, number: int, batch: dict[str, Any] | None, troubles: Iterable[str]
    ) -> dict[int, str] | None:
        member = self._roster.at(worker)
        if member is None:
            return None
        member.complain(troubles)
        if batch is not None and member.is_new(life, number):
            self._look()
            member.record.add(self._resting.filled(batch["rows"]), batch["measurements"], batch["last"])
            if batch["lost"]:
                member.complain(
                    [f"{batch['lost']} measurements were given up: the scheduler did not take them"]
                )
        return None if self.settings.head is None else self._jobs_on(member.host)

    # What clients want.

    async def begin(self) -> None:
        """Start, or go on after a stop."""
        if self._running:
            raise GpulseError("monitoring runs already", hint="stop() ends it")
        if self._origin is None:
            self._origin = time.time()
        if self._numbering is None:
            self._numbering = Numbering(self.settings.job_type)
            self._adopt()
        self._running = True
        self._looking = asyncio.create_task(self._watch())
        await self._tell({member: self._beginning(member) for member in self._roster.present()})

    async def end(self) -> None:
        """Stop; when this returns, the last measurements are here."""
        if not self._running:
            raise GpulseError("monitoring does not run", hint="start() begins it")
        self._running = False
        await self._tell(dict.fromkeys(self._roster.present(), Order(stop=True)))
        if self._looking is not None:
            self._looking.cancel()
            self._looking = None

    async def gather(self) -> list[tuple[int, str]]:
        """Take in what workers have measured so far: the index of each record and its first line."""
        if self._running:
            await self._tell(dict.fromkeys(self._roster.present(), Order()))
        first = header(self._tracked, [metric.name for metric in self.settings.custom])
        return [(member.index, first) for member in self._roster.members]

    async def page(self, index: int, position: int) -> tuple[list[bytes], int | None]:
        """A part of a record."""
        return self._roster.members[index].record.page(position)

    async def new_job(self, job: int | None) -> int:
        """Go on with another job."""
        if self._numbering is None:
            self._numbering = Numbering(self.settings.job_type)
        number = self._numbering.new_job(job)
        self._look()
        return number

    async def settle(self) -> list[str]:
        """Once the workers have joined: what is worth knowing about them."""
        here = self._roster.present()
        if here and not any(member.gpus for member in here):
            self._notes.append(self._without_gpus())
        self._notes.extend(
            f"worker {member.address} is not monitored: its log says why"
            for member in self._roster.members
            if member.here and not member.joined
        )
        return self._notes

    def _without_gpus(self) -> str:
        """Turn to the hosts where nothing was asked for that they could tell."""
        note = "no worker has a GPU: what needs one stays empty"
        if not self._tracked or not all(column.shape in ("gpus", "tasks") for column in self._tracked):
            return note
        self._tracked = (*self._tracked, *columns(DEFAULT_ON_HOSTS))
        return f"{note}, and {' and '.join(DEFAULT_ON_HOSTS)} of the hosts are tracked as well"

    async def status(self) -> Status:
        """How it stands."""
        settings, numbering = self.settings, self._numbering
        return Status(
            running=self._running,
            started=self._origin is not None,
            tracking=tuple(column.name for column in self._tracked),
            custom=tuple(metric.name for metric in settings.custom),
            job_type=settings.job_type,
            polling_interval=settings.interval_ms,
            mem_limit=settings.mem_limit,
            dump_loc=settings.dump_loc,
            head=None if settings.head is None else settings.head.address,
            job=0 if numbering is None else numbering.job,
            jobs=0 if numbering is None else numbering.jobs,
            dags=0 if numbering is None else numbering.graphs,
            workers=tuple(member.status() for member in self._roster.members),
            troubles=tuple(self._notes),
        )

    # The rest.

    async def _submitted(self, **message: Any) -> None:
        """Stands before dask's own handler of submissions, which does not tell plugins which task made them."""
        stimulus = message.get("stimulus_id") or f"update-graph-{time.time()}-{secrets.token_hex(4)}"
        cause = message.get("submitting_task")
        if cause is None:
            await self._submit(**message)
            return
        self._causes[stimulus] = cause
        try:
            await self._submit(**{**message, "stimulus_id": stimulus})
        finally:
            self._causes.pop(stimulus, None)

    def _cause(self, stimulus: str) -> Label | None:
        task = self._scheduler.tasks.get(self._causes.get(stimulus, ""))
        return None if task is None else marked(task.annotations)

    def _adopt(self) -> None:
        """Number what clients have submitted before and still wait for: one graph of a job each."""
        if self._numbering is None:
            return
        for client, state in self._scheduler.clients.items():
            waiting = [
                task for task in state.wants_what if task.state not in ("memory", "erred", *_UNSUBMITTED)
            ]
            if not waiting:
                continue
            label = self._numbering.submitted(client)
            while waiting:
                task = waiting.pop()
                if marked(task.annotations) is None:
                    _mark(task, label.mark)
                    waiting.extend(task.dependencies)

    async def _watch(self) -> None:
        while True:
            self._look()
            await asyncio.sleep(max(_LOOK_SECONDS, self.settings.interval_seconds / 2))

    def _look(self) -> None:
        """Note what the cluster is at now."""
        if self._numbering is None or self._origin is None:
            return
        labels = (
            marked(task.annotations)
            for worker in self._scheduler.workers.values()
            for task in islice(worker.processing, _MOST_LOOKED_AT)
        )
        label = self._numbering.resting(label for label in labels if label is not None)
        self._resting.note(self._elapsed(), label)

    def _elapsed(self) -> float:
        return 0.0 if self._origin is None else time.time() - self._origin

    def _jobs_on(self, host: str) -> dict[int, str]:
        """By process, the job that each worker of a machine is at, as a head calls it."""
        found: dict[int, str] = {}
        for member in self._roster.present():
            worker = self._scheduler.workers.get(member.address)
            if member.host != host or member.pid is None or worker is None:
                continue
            labels = [marked(task.annotations) for task in islice(worker.processing, _MOST_LOOKED_AT)]
            newest = max(
                (label for label in labels if label),
                key=lambda label: label.serial,
                default=self._resting.now,
            )
            if newest.job:
                place = self._scheduler.address.partition("://")[2]
                found[member.pid] = f"dask:{place}/{newest.job}"
        return found

    def _beginning(self, member: Member) -> Order:
        streams = self.settings.head is not None and self._roster.speakers().get(member.host) is member
        return Order(running=True, origin=self._origin or 0.0, tracked=self._tracked, streams=streams)

    async def _tell(self, orders: dict[Member, Order]) -> None:
        await asyncio.gather(*(self._order(member, order) for member, order in orders.items()))

    async def _order(self, member: Member, order: Order) -> None:
        try:
            call = getattr(self._scheduler.rpc(member.address), ORDER)
            async with asyncio.timeout(_ANSWER_SECONDS):
                await call(**order._asdict())
        except TimeoutError:
            member.complain([f"it did not answer within {_ANSWER_SECONDS:g} s"])
        except OSError as error:
            if member.here:
                member.complain([f"it could not be reached: {error}"])
        except Exception as error:  # noqa: BLE001  a fault in one worker stays with that worker
            member.complain([f"it failed: {error!r}"])
            _log.warning("worker %s: %r", member.address, error)

    def _new_record(self, index: int) -> Record:
        path = None if self._dumps is None else os.path.join(self._dumps, f"worker-{index}.dump")
        return Record(path, self.settings.mem_limit)


def _mark(task: TaskState, mark: str) -> None:
    if task.annotations is None:
        task.annotations = {}
    task.annotations[ANNOTATION] = mark


def already_monitored() -> GpulseError:
    """Only one monitor can be attached to a cluster."""
    return GpulseError(
        "this cluster is being monitored already", hint="stop(), or detach() which drops the record"
    )


async def check_place(settings: Settings, dask_scheduler: Scheduler) -> GpulseError | None:  # noqa: ARG001  dask's word
    """On the scheduler: what would keep a monitor from being attached, before another one is given up for it."""
    if settings.mem_limit is not None:
        try:
            os.rmdir(_dump_folder(settings))
        except GpulseError as error:
            return error
    return None


def _dump_folder(settings: Settings) -> str:
    """A folder of our own under the one that was named.

    Raises:
        GpulseError: There can be none.
    """
    folder = os.path.join(os.path.abspath(settings.dump_loc), f"gpulse-{secrets.token_hex(4)}")
    try:
        os.makedirs(folder, mode=0o700)
    except OSError as error:
        raise GpulseError(
            f"the scheduler cannot make {folder}: {error.strerror}",
            hint="dump_loc names a folder on the scheduler's machine that its user may write",
        ) from error
    return folder
