"""What a harvest tells about itself: its GPUs, its programs, what runs and what had to give way."""

from __future__ import annotations

import re
from collections.abc import Callable
from math import isfinite
from typing import Any, Literal, NamedTuple, TypeVar, cast, get_args

VERSION = 1
MOST_PREEMPTIONS = 50
"""The newest that are told."""

GpuWord = Literal["people", "waiting", "harvested", "stopping", "unknown"]
RunWord = Literal["starting", "running", "stopping"]
ProgramWord = Literal["running", "waiting", "backoff", "done", "closed"]

STATE_CODES: dict[GpuWord, int] = {"people": 0, "waiting": 1, "harvested": 2, "stopping": 3, "unknown": 4}
"""The values of the catalogue's `harvest_state`."""

_JOB = "harvest:"
_LONGEST_NAME = 64
_UNNAMABLE = re.compile(r"[^A-Za-z0-9._-]")
_DIGEST_BYTES = 4
_MOST = 10_000
_LONGEST = 4096

T = TypeVar("T")


class HarvestProcess(NamedTuple):
    """A process of a harvest; the number alone is used again, with its start it is not."""

    pid: int
    start_ticks: int


class HarvestGpu(NamedTuple):
    """One GPU that a harvest watches."""

    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody calls on a GPU
    uuid: str
    state: GpuWord
    """people: somebody uses it. waiting: idle, and nothing of ours runs. unknown: it cannot be told."""
    since: float
    """Epoch seconds."""
    why: str = ""
    """In a few words why it is in this state."""
    program: str | None = None
    """The one that runs on it."""
    harvested_seconds: float = 0.0
    """For how long programs have run on it."""
    preemptions: int = 0
    """How often a program had to give it back."""


class HarvestRun(NamedTuple):
    """One program at work."""

    id: str
    program: str
    gpus: tuple[int, ...]
    since: float
    state: RunWord
    keeper: HarvestProcess | None = None
    process: HarvestProcess | None = None


class HarvestProgram(NamedTuple):
    """One configured program and how it fares."""

    name: str
    gpus: tuple[int, ...]
    state: ProgramWord
    """backoff: it failed and waits for its next try. done: it is not started again. closed: out of its hours."""
    why: str = ""
    starts: int = 0
    failures: int = 0
    last_status: int | None = None
    """Its last exit code, or minus the signal that ended it."""
    harvested_seconds: float = 0.0
    """Its GPUs' time, added up."""


class Preemption(NamedTuple):
    """One time that a program had to give way."""

    time: float
    program: str
    gpus: tuple[int, ...]
    by: str
    """Who came."""
    what: str
    """What they did."""
    took_seconds: float | None = None
    """Until nothing of the program was left; None while something is."""


class HarvestStatus(NamedTuple):
    """One harvest at one instant."""

    time: float
    """Epoch seconds."""
    pid: int
    pid_start_ticks: int
    uid: int
    user: str
    config: str
    interval_seconds: float
    dry_run: bool = False
    gpus: tuple[HarvestGpu, ...] = ()
    runs: tuple[HarvestRun, ...] = ()
    programs: tuple[HarvestProgram, ...] = ()
    preemptions: tuple[Preemption, ...] = ()
    """The newest last."""
    harvested_seconds: float = 0.0
    """The time of all GPUs, added up."""
    since: float = 0.0
    """From when on this is counted."""


def job_of(program: str) -> str:
    """How a process of this program names its job, such as `harvest:fold`.

    Other characters than plain letters, digits, dots and dashes are written as addresses write them (`fold%20it`), and a
    name that is too long ends in a digest of all of it: two programs are never one job.
    """
    name = _UNNAMABLE.sub(lambda found: _escaped(found[0]), program[:_LONGEST_NAME])
    if len(name) > _LONGEST_NAME or len(program) > _LONGEST_NAME:
        digest = _digest(program)
        name = f"{name[: _LONGEST_NAME - len(digest) - 1]}~{digest}"
    return f"{_JOB}{name or 'unnamed'}"


def _escaped(character: str) -> str:
    return "".join(f"%{byte:02X}" for byte in character.encode("utf-8", "replace"))


def _digest(program: str) -> str:
    from hashlib import blake2s  # noqa: PLC0415  hardly any name is so long

    return blake2s(program.encode("utf-8", "replace"), digest_size=_DIGEST_BYTES).hexdigest()


def is_harvested(job: str | None) -> bool:
    """True for the job of a program that a harvest runs."""
    return job is not None and job.startswith(_JOB)


def to_document(status: HarvestStatus) -> dict[str, Any]:
    """The status as JSON types."""
    document: dict[str, Any] = {"version": VERSION, **status._asdict()}
    document["gpus"] = [gpu._asdict() for gpu in status.gpus]
    document["runs"] = [_run_document(run) for run in status.runs]
    document["programs"] = [_with_gpus(program) for program in status.programs]
    document["preemptions"] = [
        _with_gpus(preemption) for preemption in status.preemptions[-MOST_PREEMPTIONS:]
    ]
    return document


def from_document(document: object) -> HarvestStatus | None:
    """What `to_document` made, None for anything else; fields of newer writers are left out."""
    try:
        return _status(_mapping(document))
    except (KeyError, ValueError, OverflowError):
        return None


def _with_gpus(item: HarvestRun | HarvestProgram | Preemption) -> dict[str, Any]:
    return {**item._asdict(), "gpus": list(item.gpus)}


def _run_document(run: HarvestRun) -> dict[str, Any]:
    return {
        **_with_gpus(run),
        "keeper": None if run.keeper is None else run.keeper._asdict(),
        "process": None if run.process is None else run.process._asdict(),
    }


def _status(raw: dict[str, Any]) -> HarvestStatus:
    if _whole(raw["version"]) != VERSION:
        raise ValueError("another version")
    return HarvestStatus(
        time=_number(raw["time"]),
        pid=_whole(raw["pid"]),
        pid_start_ticks=_whole(raw["pid_start_ticks"]),
        uid=_whole(raw["uid"]),
        user=_text(raw["user"]),
        config=_text(raw["config"]),
        interval_seconds=_number(raw["interval_seconds"]),
        dry_run=_truth(raw["dry_run"]),
        gpus=_all(_gpu, raw["gpus"]),
        runs=_all(_run, raw["runs"]),
        programs=_all(_program, raw["programs"]),
        preemptions=_all(_preemption, raw["preemptions"])[-MOST_PREEMPTIONS:],
        harvested_seconds=_number(raw["harvested_seconds"]),
        since=_number(raw["since"]),
    )


def _gpu(item: object) -> HarvestGpu:
    raw = _mapping(item)
    return HarvestGpu(
        index=_whole(raw["index"]),
        uuid=_text(raw["uuid"]),
        state=cast("GpuWord", _one_of(GpuWord, raw["state"])),
        since=_number(raw["since"]),
        why=_text(raw["why"]),
        program=_or_none(_text, raw["program"]),
        harvested_seconds=_number(raw["harvested_seconds"]),
        preemptions=_whole(raw["preemptions"]),
    )


def _run(item: object) -> HarvestRun:
    raw = _mapping(item)
    return HarvestRun(
        id=_text(raw["id"]),
        program=_text(raw["program"]),
        gpus=_all(_whole, raw["gpus"]),
        since=_number(raw["since"]),
        state=cast("RunWord", _one_of(RunWord, raw["state"])),
        keeper=_or_none(_process, raw["keeper"]),
        process=_or_none(_process, raw["process"]),
    )


def _process(item: object) -> HarvestProcess:
    raw = _mapping(item)
    return HarvestProcess(_whole(raw["pid"]), _whole(raw["start_ticks"]))


def _program(item: object) -> HarvestProgram:
    raw = _mapping(item)
    return HarvestProgram(
        name=_text(raw["name"]),
        gpus=_all(_whole, raw["gpus"]),
        state=cast("ProgramWord", _one_of(ProgramWord, raw["state"])),
        why=_text(raw["why"]),
        starts=_whole(raw["starts"]),
        failures=_whole(raw["failures"]),
        last_status=_or_none(_exit_status, raw["last_status"]),
        harvested_seconds=_number(raw["harvested_seconds"]),
    )


def _preemption(item: object) -> Preemption:
    raw = _mapping(item)
    return Preemption(
        time=_number(raw["time"]),
        program=_text(raw["program"]),
        gpus=_all(_whole, raw["gpus"]),
        by=_text(raw["by"]),
        what=_text(raw["what"]),
        took_seconds=_or_none(_number, raw["took_seconds"]),
    )


def _mapping(raw: object) -> dict[str, Any]:
    if not isinstance(raw, dict):
        raise ValueError("not an object")  # noqa: TRY004  one kind of refusal
    return raw


def _all(kind: Callable[[object], T], raw: object) -> tuple[T, ...]:
    if not isinstance(raw, list) or len(raw) > _MOST:
        raise ValueError("not a list that could be one of ours")
    return tuple(kind(item) for item in raw)


def _or_none(kind: Callable[[object], T], raw: object) -> T | None:
    return None if raw is None else kind(raw)


def _number(raw: object) -> float:
    if isinstance(raw, bool) or not isinstance(raw, int | float) or not isfinite(raw) or raw < 0:
        raise ValueError("not a number that could be one of ours")
    return float(raw)


def _whole(raw: object) -> int:
    if isinstance(raw, bool) or not isinstance(raw, int) or not 0 <= raw < 1 << 63:
        raise ValueError("not a whole number that could be one of ours")
    return raw


def _exit_status(raw: object) -> int:
    if isinstance(raw, bool) or not isinstance(raw, int) or not -256 < raw < 256:
        raise ValueError("no exit status")
    return raw


def _truth(raw: object) -> bool:
    if not isinstance(raw, bool):
        raise ValueError("neither true nor false")  # noqa: TRY004  one kind of refusal
    return raw


def _text(raw: object) -> str:
    if not isinstance(raw, str):
        raise ValueError("not a text")  # noqa: TRY004  one kind of refusal
    # A JSON file may hold halves of characters, which nothing can print or store.
    return raw[:_LONGEST].encode("utf-8", "replace").decode()


def _one_of(words: Any, raw: object) -> str:
    if not isinstance(raw, str) or raw not in get_args(words):
        raise ValueError("not a word of ours")
    return raw
