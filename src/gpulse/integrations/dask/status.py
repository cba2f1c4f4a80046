"""How the monitoring of a cluster stands."""

from __future__ import annotations

from typing import NamedTuple


class WorkerStatus(NamedTuple):
    """One worker, whether it is still there or not."""

    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody calls on a status
    """By order of first joining."""
    address: str
    name: str
    host: str
    pid: int | None
    """None until it has said so."""
    gpus: tuple[str, ...]
    here: bool
    measurements: int
    last: float | None
    """The timestamp of its newest measurement."""
    troubles: tuple[str, ...] = ()
    """What could not be measured, and why."""


class Status(NamedTuple):
    """The monitor of a cluster."""

    running: bool
    started: bool
    """Whether it ever was."""
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
    """Graphs that were submitted, of all jobs."""
    workers: tuple[WorkerStatus, ...]
    troubles: tuple[str, ...] = ()
    """Worth knowing about the cluster as a whole."""

    def __str__(self) -> str:
        state = "running" if self.running else "stopped" if self.started else "attached, not started"
        here = sum(worker.here for worker in self.workers)
        tracked = ", ".join((*self.tracking, *self.custom))
        lines = [
            f"{state}: {tracked} every {self.polling_interval:g} ms on {here} workers; newest job {self.job}, {self.dags} graphs"
        ]
        for worker in self.workers:
            gone = "" if worker.here else ", gone"
            called = (
                worker.address if worker.name in ("", worker.address) else f"{worker.name} ({worker.address})"
            )
            lines.append(
                f"  {worker.index}: {called}{gone}, {len(worker.gpus)} GPUs, {worker.measurements} measurements"
            )
            lines += [f"     {trouble}" for trouble in worker.troubles]
        return "\n".join([*lines, *(f"  {trouble}" for trouble in self.troubles)])
