"""Status of a harvest as tables, and notes about GPUs that are harvested."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from gpulse.model.device import format_ranges, gpu_label
from gpulse.model.frame import Frame, GpuReading
from gpulse.model.harvest_status import (
    STATE_CODES,
    HarvestGpu,
    HarvestProgram,
    HarvestStatus,
    Preemption,
    is_harvest_job,
)
from gpulse.model.metric_catalog import Value
from gpulse.terminal import value_format as f
from gpulse.terminal.table import Paint, TableCell, TableColumn, render_table, wrap

MAX_SHOWN_PREEMPTIONS = 5
_STYLES = {
    "harvested": "good",
    "running": "good",
    "stopping": "notice",
    "unknown": "notice",
    "backoff": "notice",
    "people": "name",
}
_GPU_COLUMNS = (
    TableColumn("GPU"),
    TableColumn("state", right=False),
    TableColumn("for"),
    TableColumn("program", right=False, least=8, optional=True),
    TableColumn("harvested", drop=1),
    TableColumn("given back", drop=2),
    TableColumn("why", right=False, drop=3, least=12, optional=True),
)
_PROGRAM_COLUMNS = (
    TableColumn("program", right=False, least=8),
    TableColumn("state", right=False),
    TableColumn("GPUs"),
    TableColumn("starts", drop=3),
    TableColumn("failures", drop=4),
    TableColumn("last exit", right=False, drop=5),
    TableColumn("harvested", drop=1),
    TableColumn("why", right=False, drop=2, least=12, optional=True),
)
_STATE_TEXTS = {
    "people": "used by people",
    "waiting": "waiting",
    "harvested": "harvested",
    "stopping": "being freed",
    "unknown": "unknown",
}
_IN_USE_CODES = frozenset({STATE_CODES["harvested"], STATE_CODES["stopping"]})
_TEXT_BY_CODE: dict[Value, str] = {code: _STATE_TEXTS[state] for state, code in STATE_CODES.items()}


def status_lines(
    status: HarvestStatus, now: float, *, alive: bool, width: int, paint: Paint
) -> Iterator[str]:
    """Yield the lines about one harvest.

    Args:
        status: Status that the harvest published.
        now: Epoch seconds.
        alive: Whether it is still running.
        width: Columns of the terminal.
        paint: Adds colors.
    """
    yield from wrap(_headline(status, now, alive=alive), width, "  ")
    if alive:
        yield ""
        yield from render_table(_GPU_COLUMNS, (_gpu_row(gpu, now) for gpu in status.gpus), width, paint)
        yield ""
        yield from render_table(
            _PROGRAM_COLUMNS, (_program_row(item) for item in status.programs), width, paint
        )
        for program in status.programs:
            if program.state == "backoff" and program.why:  # in full: it names a file, and what to do
                text = f"! {f.plain(program.name)}: {f.plain(program.why)}"
                yield from (paint("notice", line) for line in wrap(text, width, "  "))
    if status.preemptions:
        yield ""
        yield paint("title", "GPUs given back")
        for preemption in status.preemptions[: -MAX_SHOWN_PREEMPTIONS - 1 : -1]:
            yield from wrap(_preemption_line(preemption, now), width, "    ")
    yield ""
    total = (
        f"harvested {f.hours(status.harvested_seconds)} of GPU time since {f.local_time(status.since, now)}"
    )
    yield from wrap(total, width, "  ")


def _headline(status: HarvestStatus, now: float, *, alive: bool) -> str:
    user, config = f.plain(status.user), f.plain(status.config)
    if not alive:
        return f"no harvest of {user} is running; the last one reported at {f.local_time(status.time, now)} ({config})"
    dry = "; dry run: nothing is started" if status.dry_run else ""
    return f"harvest of {user} (process {status.pid}, {config}) checks the GPUs every {status.interval_seconds:g} s{dry}"


def _gpu_row(gpu: HarvestGpu, now: float) -> list[TableCell | str]:
    return [
        str(gpu.index),
        TableCell(gpu.state, _STYLES.get(gpu.state, "")),
        f.duration(now - gpu.since),
        f.plain(gpu.program) or "-",
        f.hours(gpu.harvested_seconds),
        str(gpu.preemptions),
        f.plain(gpu.why),
    ]


def _program_row(program: HarvestProgram) -> list[TableCell | str]:
    return [
        f.plain(program.name),
        TableCell(program.state, _STYLES.get(program.state, "")),
        format_ranges(map(str, program.gpus)),
        str(program.starts),
        str(program.failures),
        _ended(program.last_status),
        f.hours(program.harvested_seconds),
        f.plain(program.why),
    ]


def _ended(status: int | None) -> str:
    if status is None:
        return "-"
    return f"signal {-status}" if status < 0 else f"exit {status}"


def _preemption_line(preemption: Preemption, now: float) -> str:
    took = preemption.took_seconds
    gone = "still stopping" if took is None else f"stopped after {f.short_duration(took)}"
    gpus = gpu_label(map(str, preemption.gpus))
    return (
        f"  {f.local_time(preemption.time, now)}  {f.plain(preemption.program)} on {gpus}: "
        f"{f.plain(preemption.what)}; {gone}"
    )


def describe_state(code: Value) -> str:
    """Return the state of a GPU in a harvest, as text."""
    return _TEXT_BY_CODE.get(code, _STATE_TEXTS["unknown"])


def find_harvest_jobs(frame: Frame) -> dict[int, str]:
    """Return the job of each process that belongs to a harvest, by PID."""
    found = ((process.pid, process.identity.owner.job) for process in frame.processes)
    return {pid: job for pid, job in found if job is not None and is_harvest_job(job)}


def is_only_harvested(gpu: GpuReading, harvested: Mapping[int, str], known: Iterable[int]) -> bool:
    """Return whether only a harvest uses a GPU, so that anyone who starts work there gets it at once.

    Args:
        gpu: The GPU.
        harvested: Jobs of the harvest's processes, by PID.
        known: PIDs of the processes whose user is known.
    """
    pids = {process.pid for process in gpu.processes or ()}
    if (pids - harvested.keys()).intersection(known):
        return False
    return bool(pids & harvested.keys()) or gpu.get("harvest_state") in _IN_USE_CODES


def find_only_harvested(frame: Frame) -> list[GpuReading]:
    """Return the GPUs that only a harvest uses."""
    harvested = find_harvest_jobs(frame)
    known = [process.pid for process in frame.processes if process.identity.owner.user is not None]
    return [gpu for gpu in frame.gpus if is_only_harvested(gpu, harvested, known)]


def harvest_note(frame: Frame) -> str | None:
    """Return a note for people who look for a free GPU; None when no GPU is harvested."""
    labels = [gpu.device.label for gpu in find_only_harvested(frame)]
    if not labels:
        return None
    is_one = len(labels) == 1
    return (
        f"{gpu_label(labels)} {'is' if is_one else 'are'} harvested while nobody needs {'it' if is_one else 'them'}: "
        f"start your work there, and {'it is' if is_one else 'they are'} freed immediately."
    )
