"""What a harvest does, as tables: its GPUs, its programs, who it gave way to, and what it won."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime

from gpulse.model.device import ranges
from gpulse.model.harvest import HarvestGpu, HarvestProgram, HarvestStatus, Preemption
from gpulse.terminal import format as f
from gpulse.terminal.table import Cell, Column, Paint, render, wrapped

MOST_PREEMPTIONS = 5
_STYLES = {
    "harvested": "good",
    "running": "good",
    "stopping": "notice",
    "unknown": "notice",
    "backoff": "notice",
    "people": "name",
}
_GPU_COLUMNS = (
    Column("GPU"),
    Column("state", right=False),
    Column("for"),
    Column("program", right=False, least=8, optional=True),
    Column("won", drop=1),
    Column("given back", drop=2),
    Column("why", right=False, drop=3, least=12, optional=True),
)
_PROGRAM_COLUMNS = (
    Column("program", right=False, least=8),
    Column("state", right=False),
    Column("GPUs"),
    Column("starts", drop=3),
    Column("failures", drop=4),
    Column("last end", right=False, drop=5),
    Column("won", drop=1),
    Column("why", right=False, drop=2, least=12, optional=True),
)


def status_lines(
    status: HarvestStatus, now: float, *, alive: bool, width: int, paint: Paint
) -> Iterator[str]:
    """All of one harvest.

    Args:
        status: Its own words.
        now: Epoch seconds.
        alive: It still runs.
        width: Columns of the terminal.
        paint: Puts on colours.
    """
    yield from wrapped(_headline(status, now, alive=alive), width, "  ")
    if alive:
        yield ""
        yield from render(_GPU_COLUMNS, (_gpu_row(gpu, now) for gpu in status.gpus), width, paint)
        yield ""
        yield from render(_PROGRAM_COLUMNS, (_program_row(item) for item in status.programs), width, paint)
        for program in status.programs:
            if program.state == "backoff" and program.why:  # in full: it names a file, and what to do
                text = f"! {f.plain(program.name)}: {f.plain(program.why)}"
                yield from (paint("notice", line) for line in wrapped(text, width, "  "))
    if status.preemptions:
        yield ""
        yield paint("title", "gave way")
        for preemption in status.preemptions[: -MOST_PREEMPTIONS - 1 : -1]:
            yield from wrapped(_given_back(preemption, now), width, "    ")
    yield ""
    won = f"won {f.hours(status.harvested_seconds)} on GPUs since {_moment(status.since, now)}"
    yield from wrapped(won, width, "  ")


def _headline(status: HarvestStatus, now: float, *, alive: bool) -> str:
    user, config = f.plain(status.user), f.plain(status.config)
    if not alive:
        return f"no harvest of {user} runs; the last one was seen {_moment(status.time, now)} ({config})"
    dry = ", dry run: nothing is started" if status.dry_run else ""
    return (
        f"harvest of {user} (process {status.pid}), {config}, looks every {status.interval_seconds:g} s{dry}"
    )


def _gpu_row(gpu: HarvestGpu, now: float) -> list[Cell | str]:
    return [
        str(gpu.index),
        Cell(gpu.state, _STYLES.get(gpu.state, "")),
        f.duration(now - gpu.since),
        f.plain(gpu.program) or "-",
        f.hours(gpu.harvested_seconds),
        str(gpu.preemptions),
        f.plain(gpu.why),
    ]


def _program_row(program: HarvestProgram) -> list[Cell | str]:
    return [
        f.plain(program.name),
        Cell(program.state, _STYLES.get(program.state, "")),
        ranges(map(str, program.gpus)),
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


def _given_back(preemption: Preemption, now: float) -> str:
    took = preemption.took_seconds
    gone = "not gone yet" if took is None else f"gone after {_length(took)}"
    gpus = ranges(map(str, preemption.gpus))
    return (
        f"  {_moment(preemption.time, now)}  {f.plain(preemption.program)} on GPU {gpus}: "
        f"{f.plain(preemption.what)}; {gone}"
    )


def _length(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"


def _moment(time: float, now: float) -> str:
    local = datetime.fromtimestamp(time)  # noqa: DTZ006  people read the clock on their wall
    today = local.date() == datetime.fromtimestamp(now).date()  # noqa: DTZ006
    return local.strftime("%H:%M:%S" if today else "%Y-%m-%d %H:%M")
