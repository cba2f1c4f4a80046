"""The scheduler's list of workers, with their records and status, and the calls between scheduler and workers."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from gpulse.integrations.dask.trackable_metrics import TrackedColumn

if TYPE_CHECKING:
    from distributed import Scheduler

_BLOCK_BYTES = 1 << 16
"""Size at which lines are compressed together."""
_COMPRESSION_LEVEL = 1
_PAGE_BYTES = 1 << 21

_MAX_PROBLEMS = 50


class WorkerRecord:
    """A worker's lines in order of arrival, in compressed blocks whose numbers never change."""

    def __init__(self, path: str | None = None, limit: int | None = None) -> None:
        """Begin an empty record.

        Args:
            path: The file for what does not stay in memory.
            limit: How many measurements stay in memory at most; all when None.
        """
        self._path = path
        self._limit = limit
        self._tail = bytearray()
        self._blocks: list[bytes] = []
        self._in_memory = 0
        self._ends: list[int] = [0]
        """Ends of the blocks in the file."""
        self.measurements = 0
        self.last: float | None = None
        """The timestamp of the newest."""
        self.trouble: str | None = None
        """Why the file cannot be written; everything stays in memory then."""

    def add(self, lines: bytes, measurements: int, last: float) -> None:
        """Append whole lines."""
        self._tail += lines
        self.measurements += measurements
        self._in_memory += measurements
        self.last = last
        if len(self._tail) >= _BLOCK_BYTES:
            self._compress_tail()
        if self._limit is not None and self._in_memory >= self._limit:
            self._dump()

    def page(self, position: int) -> tuple[list[bytes], int | None]:
        """Return some compressed blocks from a position on, and the position to continue at; None at the end.

        Blocks that the file has lost are empty, and `trouble` says so.
        """
        blocks: list[bytes] = []
        size = 0
        for block in self._blocks_from(position):
            blocks.append(block)
            position += 1
            size += len(block)
            if size >= _PAGE_BYTES:
                return blocks, position
        if self._tail:
            blocks.append(zlib.compress(self._tail, _COMPRESSION_LEVEL))
        return blocks, None

    def close(self) -> None:
        """Drop the record, on disk as well."""
        self._tail.clear()
        self._blocks.clear()
        if self._path is not None:
            with suppress(OSError):
                os.unlink(self._path)

    def _blocks_from(self, position: int) -> Iterator[bytes]:
        filed = len(self._ends) - 1
        if position < filed:
            yield from self._read_dumped(position)
        yield from self._blocks[max(0, position - filed) :]

    def _read_dumped(self, position: int) -> Iterator[bytes]:
        """Yield blocks of the file; lost ones are empty, so that the others keep their numbers."""
        sizes = [end - start for start, end in pairwise(self._ends[position:])]
        try:
            with open(self._path or "", "rb") as file:
                file.seek(self._ends[position])
                blocks = [file.read(size) for size in sizes]
        except OSError:
            blocks = [b""] * len(sizes)
        for block, size in zip(blocks, sizes, strict=True):
            if len(block) < size:
                self.trouble = f"{self._path} was removed or truncated; its content is lost"
            yield block if len(block) == size else zlib.compress(b"")

    def _compress_tail(self) -> None:
        if self._tail:
            self._blocks.append(zlib.compress(self._tail, _COMPRESSION_LEVEL))
            self._tail.clear()

    def _dump(self) -> None:
        """Move the blocks in memory to the file, all or none."""
        if self._path is None:
            return
        self._compress_tail()
        try:
            with open(self._path, "ab") as file:
                if file.tell() < self._ends[-1]:
                    raise OSError(errno.EIO, "it was removed or truncated")
                file.truncate(self._ends[-1])
                file.write(b"".join(self._blocks))
        except OSError as error:
            self.trouble = f"cannot write {self._path}: {error.strerror or error}; the record stays in memory"
            return
        self.trouble = None
        for block in self._blocks:
            self._ends.append(self._ends[-1] + len(block))
        self._blocks.clear()
        self._in_memory = 0


def unpack_block(block: bytes) -> bytes:
    """Return the lines of a block."""
    return zlib.decompress(block)


def format_count(number: int, noun: str) -> str:
    """Return a number with its noun, such as `1 GPU` or `2 GPUs`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


class WorkerStatus(NamedTuple):
    """Status of one worker, present or gone."""

    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody calls on a status
    """Position in the order of first joining."""
    address: str
    name: str
    host: str
    pid: int | None
    """None until the worker has joined."""
    gpus: tuple[str, ...]
    here: bool
    measurements: int
    last: float | None
    """The timestamp of its newest measurement."""
    troubles: tuple[str, ...] = ()
    """What could not be measured, and why."""


class MonitorStatus(NamedTuple):
    """Status of a cluster's monitor."""

    running: bool
    started: bool
    """Whether it was ever running."""
    tracking: tuple[str, ...]
    custom: tuple[str, ...]
    job_type: str
    polling_interval: float
    """Milliseconds."""
    mem_limit: int | None
    dump_loc: str
    head: str | None
    job: int
    """The newest job, or the one that was set; 0 before the first."""
    jobs: int
    """The highest number of a job."""
    dags: int
    """Number of graphs submitted in all jobs."""
    workers: tuple[WorkerStatus, ...]
    troubles: tuple[str, ...] = ()
    """Notes about the cluster as a whole."""

    def __str__(self) -> str:
        state = "running" if self.running else "stopped" if self.started else "attached, not started"
        here = sum(worker.here for worker in self.workers)
        tracked = ", ".join((*self.tracking, *self.custom))
        summary = f"newest job {self.job}, {format_count(self.dags, 'graph')}"
        workers = format_count(here, "worker")
        lines = [f"{state}: {tracked} every {self.polling_interval:g} ms on {workers}; {summary}"]
        for worker in self.workers:
            gone = "" if worker.here else ", gone"
            called = (
                worker.address if worker.name in ("", worker.address) else f"{worker.name} ({worker.address})"
            )
            lines.append(
                f"  {worker.index}: {called}{gone}, {format_count(len(worker.gpus), 'GPU')}, "
                f"{format_count(worker.measurements, 'measurement')}"
            )
            lines += [f"     {trouble}" for trouble in worker.troubles]
        return "\n".join([*lines, *(f"  {trouble}" for trouble in self.troubles)])


class WorkerEntry:
    """One worker, which may have left and come back."""

    def __init__(self, index: int, address: str, name: str, record: WorkerRecord) -> None:
        self.index = index
        self.address = address
        self.name = name
        self.record = record
        self.host = ""
        self.pid: int | None = None
        self.gpus: tuple[str, ...] = ()
        self.here = True
        self.joined = False
        """Whether it has reported that it can be monitored."""
        self.lost = 0
        """Number of measurements that it had to drop."""
        self.troubles: list[str] = []
        self.head_trouble: str | None = None
        """Why a head does not receive its frames; None when it does."""
        self._numbers: dict[str, int] = {}
        """Number of the last batch from each process of the worker."""

    def is_new(self, life: str, number: int) -> bool:
        """Return whether a batch is new; one whose answer was lost is sent again."""
        if number <= self._numbers.get(life, 0):
            return False
        self._numbers[life] = number
        return True

    def add_problems(self, troubles: Iterable[str]) -> None:
        """Add problems, each once."""
        for trouble in troubles:
            if trouble not in self.troubles and len(self.troubles) < _MAX_PROBLEMS:
                self.troubles.append(trouble)

    def status(self) -> WorkerStatus:
        """Return the status."""
        more = [] if self.record.trouble is None else [self.record.trouble]
        if self.head_trouble is not None:
            more.append(f"head: {self.head_trouble}")
        if self.here and not self.joined:
            more.append("it is not monitored: check that gpulse is installed there, and see the worker's log")
        if self.lost:
            more.append(f"dropped {format_count(self.lost, 'measurement')} that the scheduler did not accept")
        return WorkerStatus(
            self.index,
            self.address,
            self.name,
            self.host,
            self.pid,
            self.gpus,
            self.here,
            self.record.measurements,
            self.record.last,
            (*self.troubles, *more),
        )


class WorkerRegistry:
    """All workers that ever joined, in order."""

    def __init__(self, begin: Callable[[int], WorkerRecord]) -> None:
        """Start with none.

        Args:
            begin: Makes the record of the worker with an index.
        """
        self._begin = begin
        self.entries: list[WorkerEntry] = []
        self._at: dict[str, WorkerEntry] = {}
        self._on: dict[str, list[WorkerEntry]] | None = None
        """Monitored workers by machine; None when they must be collected again."""

    def arrived(self, address: str, name: object) -> WorkerEntry:
        """Add a worker, or return the entry of one that came back."""
        called = str(name)
        entry = self._find_returned(address, name)
        if entry is None:
            entry = WorkerEntry(len(self.entries), address, called, self._begin(len(self.entries)))
            self.entries.append(entry)
        entry.address, entry.name, entry.here, entry.joined = address, called, True, False
        self._at[address], self._on = entry, None
        return entry

    def joined(self, entry: WorkerEntry, host: str, pid: int, gpus: Iterable[str]) -> None:
        """Note that a worker has identified itself and can be monitored."""
        entry.host, entry.pid, entry.gpus, entry.joined = host, pid, tuple(gpus), True
        self._on = None

    def left(self, address: str) -> WorkerEntry | None:
        """Note that a worker is gone; its record stays."""
        entry = self._at.get(address)
        if entry is not None:
            entry.here = entry.joined = False
            self._on = None
        return entry

    def at(self, address: str) -> WorkerEntry | None:
        """Return the last worker at an address, present or gone."""
        return self._at.get(address)

    def here(self) -> list[WorkerEntry]:
        """Return the workers that are present."""
        return [entry for entry in self.entries if entry.here]

    def present(self) -> list[WorkerEntry]:
        """Return the workers that are present and can be monitored."""
        return [entry for entry in self.entries if entry.here and entry.joined]

    def on(self, host: str) -> list[WorkerEntry]:
        """Return the monitored workers of a machine; the first streams to a head for it."""
        if self._on is None:
            self._on = {}
            for entry in self.present():
                self._on.setdefault(entry.host, []).append(entry)
        return self._on.get(host, [])

    def streams_to_head(self, entry: WorkerEntry) -> bool:
        """Return whether a worker streams to a head for its machine."""
        return next(iter(self.on(entry.host)), None) is entry

    def close(self) -> None:
        """Drop the records."""
        for entry in self.entries:
            entry.record.close()

    def _find_returned(self, address: str, name: object) -> WorkerEntry | None:
        """Return the entry of a worker that has come back: by the name that its user gave it, else by its address.

        By itself dask calls workers by their address, or numbers them and uses the numbers again.
        """
        if isinstance(name, str) and name != address:
            for entry in self.entries:
                if entry.name == name and not entry.here:
                    return entry
        known = self._at.get(address)
        if known is None or known.here:
            return known
        was_named = known.name != known.address and not known.name.isdecimal()
        return None if was_named and str(name) not in (known.name, address) else known


PLUGIN_NAME = "gpulse"
"""Name of the plugins."""
JOIN_HANDLER = "gpulse_join"
"""From a worker that joined; the answer is a command if monitoring is running."""
ROWS_HANDLER = "gpulse_rows"
"""From a worker with rows of measurements; the answer is a dict, or None where no monitor is installed."""
COMMAND_HANDLER = "gpulse_command"
"""From the scheduler with a command for a worker; the answer is as above."""

PATIENCE_SECONDS = 10.0
"""Deadline for a worker's answer."""
_log = logging.getLogger("distributed.scheduler.gpulse")


class WorkerCommand(NamedTuple):
    """Command to start, to stop, or, if neither is set, to send the measurements so far."""

    running: bool = False
    stop: bool = False
    elapsed: float = 0.0
    """Seconds since monitoring was first started, when this was sent."""
    sent: float = 0.0
    """That moment by the scheduler's clock."""
    token: str = ""
    """Token of the marks that count."""
    adopted: Mapping[Any, str] = {}
    """Marks of tasks that were on the worker before monitoring started."""
    tracked: tuple[TrackedColumn, ...] = ()
    streams: bool = False
    """Whether this worker streams to the head for its machine."""

    @classmethod
    def of(cls, message: Mapping[str, Any]) -> Self:
        """Return the command of a message; dask's messages only have plain lists."""
        command = cls(**message)
        return command._replace(tracked=tuple(TrackedColumn(*column) for column in command.tracked))


class WorkerRpc:
    """Calls the workers of one cluster, each on its own."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    async def send(self, commands: Mapping[WorkerEntry, WorkerCommand]) -> list[str]:
        """Send commands to workers; return the problems, which are also added to their status."""
        return _format_problems(
            await asyncio.gather(*(self._send(entry, command) for entry, command in commands.items()))
        )

    async def put_plugin(self, entries: Iterable[WorkerEntry], plugin: bytes) -> list[str]:
        """Install a plugin in workers."""
        calls = (self._call(entry, "plugin-add", plugin=plugin, name=PLUGIN_NAME) for entry in entries)
        return _format_problems(await asyncio.gather(*calls))

    async def take_plugin(self, entries: Iterable[WorkerEntry]) -> None:
        """Remove the plugin from workers."""
        await asyncio.gather(*(self._call(entry, "plugin-remove", name=PLUGIN_NAME) for entry in entries))

    async def _send(self, entry: WorkerEntry, command: WorkerCommand) -> str | None:
        return await self._call(entry, COMMAND_HANDLER, **command._asdict())

    async def _call(self, entry: WorkerEntry, question: str, /, **arguments: Any) -> str | None:
        """Return the problem; None when there was none."""
        trouble = await self._answer(entry, question, arguments)
        if trouble is None:
            return None
        entry.add_problems([trouble])
        return f"worker {entry.index} ({entry.address}): {trouble}"

    async def _answer(self, entry: WorkerEntry, question: str, arguments: Mapping[str, Any]) -> str | None:
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                answer = await getattr(self._scheduler.rpc(entry.address), question)(**arguments)
        except TimeoutError:
            return f"no response within {PATIENCE_SECONDS:g} s"
        except OSError as error:
            return f"unreachable: {error}" if entry.here else None
        except Exception as error:  # noqa: BLE001  a fault in one worker stays with that worker
            _log.warning("worker %s: %r", entry.address, error)
            return f"failed: {error!r}"
        return _find_error(answer)


def _find_error(answer: Any) -> str | None:
    """Return the error in an answer; dask answers calls that it does not know with None."""
    if not isinstance(answer, Mapping):
        return "not monitored: its plugin was removed, or gpulse is not installed there"
    if answer.get("status") == "error":
        return f"failed: {answer.get('exception_text') or answer.get('text') or answer.get('exception')}"
    if answer.get("lost"):
        return f"lost {format_count(answer['lost'], 'measurement')} that the scheduler did not accept in time"
    return None


def _format_problems(troubles: Iterable[str | None]) -> list[str]:
    return [trouble for trouble in troubles if trouble is not None]
