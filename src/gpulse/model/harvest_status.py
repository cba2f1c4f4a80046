"""Published status of a harvest: its GPUs, programs, runs and preemptions."""

from __future__ import annotations

import re
from functools import cache
from math import isfinite
from types import NoneType
from typing import Annotated, Any, Literal, NamedTuple, cast, get_args, get_origin, get_type_hints

from gpulse.model.safe_text import replace_surrogates

STATUS_VERSION = 1
MAX_PREEMPTIONS = 50
"""Number of preemptions that are published; the newest."""

GpuStateName = Literal["people", "waiting", "harvested", "stopping", "unknown"]
RunStateName = Literal["starting", "running", "stopping"]
ProgramStateName = Literal["running", "waiting", "backoff", "done", "closed"]
ExitStatus = Annotated[int, "an exit code, or the negative number of the signal that ended the process"]

STATE_CODES: dict[GpuStateName, int] = {
    "people": 0,
    "waiting": 1,
    "harvested": 2,
    "stopping": 3,
    "unknown": 4,
}
"""Values of the metric `harvest_state`."""

_JOB = "harvest:"
_MAX_NAME_LENGTH = 64
_INVALID_NAME_CHARACTER = re.compile(r"[^A-Za-z0-9._-]")
_DIGEST_BYTES = 4
_MAX_ITEMS = 10_000
_MAX_TEXT_LENGTH = 4096


class HarvestProcess(NamedTuple):
    """A process of a harvest, by PID and start time, because PIDs are reused."""

    pid: int
    start_ticks: int


class HarvestGpu(NamedTuple):
    """One GPU that a harvest watches."""

    index: int  # type: ignore[assignment]  # hides tuple.index, which is not used here
    uuid: str
    state: GpuStateName
    """people: someone uses it. waiting: idle, and no program of the harvest runs. unknown: who uses it is unknown."""
    since: float
    """Epoch seconds."""
    why: str = ""
    """Reason for the state."""
    program: str | None = None
    """Program that runs on it."""
    harvested_seconds: float = 0.0
    """Total time of programs on it."""
    preemptions: int = 0
    """How often a program had to give it back."""


class HarvestRun(NamedTuple):
    """One running program."""

    id: str
    program: str
    gpus: tuple[int, ...]
    since: float
    state: RunStateName
    supervisor: HarvestProcess | None = None
    """The supervisor of the program."""
    process: HarvestProcess | None = None


class HarvestProgram(NamedTuple):
    """One configured program."""

    name: str
    gpus: tuple[int, ...]
    state: ProgramStateName
    """backoff: it failed and waits before the next attempt. done: it is not restarted. closed: outside its hours."""
    why: str = ""
    starts: int = 0
    failures: int = 0
    last_status: ExitStatus | None = None
    harvested_seconds: float = 0.0
    """Total time on its GPUs."""


class Preemption(NamedTuple):
    """One preemption of a program."""

    time: float
    program: str
    gpus: tuple[int, ...]
    by: str
    """Who needed the GPU."""
    what: str
    """What they did."""
    took_seconds: float | None = None
    """Time until no process of the program was left; None while one still exists."""


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
    """Total time over all GPUs."""
    since: float = 0.0
    """Start of the counting period."""


def harvest_job_name(program: str) -> str:
    """Return the job name of a program, such as `harvest:fold`.

    Characters other than ASCII letters, digits, dots, underscores and dashes are percent-encoded (`fold%20it`), and a
    name that is too long ends in a hash of the whole name, so that two programs never have the same job name.
    """
    name = _INVALID_NAME_CHARACTER.sub(lambda found: _escaped(found[0]), program[:_MAX_NAME_LENGTH])
    if len(name) > _MAX_NAME_LENGTH or len(program) > _MAX_NAME_LENGTH:
        digest = _digest(program)
        name = f"{name[: _MAX_NAME_LENGTH - len(digest) - 1]}~{digest}"
    return f"{_JOB}{name or 'unnamed'}"


def _escaped(character: str) -> str:
    return "".join(f"%{byte:02X}" for byte in character.encode("utf-8", "replace"))


def _digest(program: str) -> str:
    from hashlib import blake2s  # noqa: PLC0415  rarely needed: few names are this long

    return blake2s(program.encode("utf-8", "replace"), digest_size=_DIGEST_BYTES).hexdigest()


def is_harvest_job(job: str | None) -> bool:
    """Whether a job name belongs to a program of a harvest."""
    return job is not None and job.startswith(_JOB)


def status_to_document(status: HarvestStatus) -> dict[str, Any]:
    """Return the status as JSON types."""
    newest = status._replace(preemptions=status.preemptions[-MAX_PREEMPTIONS:])
    return {"version": STATUS_VERSION, **_encode(newest)}


def status_from_document(document: object) -> HarvestStatus | None:
    """Return the status of a document, None for anything else; fields of newer versions are ignored."""
    try:
        if _whole(_mapping(document)["version"]) != STATUS_VERSION:
            return None
        status = cast("HarvestStatus", _decode(HarvestStatus, document))
    except (KeyError, ValueError, OverflowError):
        return None
    return status._replace(preemptions=status.preemptions[-MAX_PREEMPTIONS:])


def _encode(value: Any) -> Any:
    """Return a value of one of the types above as JSON types."""
    if hasattr(value, "_asdict"):
        return {name: _encode(part) for name, part in value._asdict().items()}
    return [_encode(part) for part in value] if isinstance(value, tuple) else value


def _decode(kind: Any, raw: object) -> Any:
    """Decode a value of a type from JSON types.

    Raises:
        KeyError: A field is missing.
        ValueError: The value has another type, or is invalid.
    """
    if kind in _SCALARS:
        return _SCALARS[kind](raw)
    arguments = get_args(kind)
    if get_origin(kind) is Literal:
        if raw not in arguments:
            raise ValueError("unknown value")
        return raw
    if NoneType in arguments:
        return None if raw is None else _decode(arguments[0], raw)
    if get_origin(kind) is tuple:
        if not isinstance(raw, list) or len(raw) > _MAX_ITEMS:
            raise ValueError("not a list, or too long")
        return tuple(_decode(arguments[0], item) for item in raw)
    fields = _mapping(raw)
    return kind(**{name: _decode(part, fields[name]) for name, part in _types(kind).items()})


@cache
def _types(kind: type) -> dict[str, Any]:
    """Return the types of a record's fields."""
    return get_type_hints(kind, include_extras=True)


def _mapping(raw: object) -> dict[str, Any]:
    if not isinstance(raw, dict):
        raise ValueError("not an object")  # noqa: TRY004  all decoding errors are ValueErrors
    return raw


def _number(raw: object) -> float:
    if isinstance(raw, bool) or not isinstance(raw, int | float) or not isfinite(raw) or raw < 0:
        raise ValueError("not a valid number")
    return float(raw)


def _whole(raw: object) -> int:
    if isinstance(raw, bool) or not isinstance(raw, int) or not 0 <= raw < 1 << 63:
        raise ValueError("not a valid integer")
    return raw


def _exit_status(raw: object) -> int:
    if isinstance(raw, bool) or not isinstance(raw, int) or not -256 < raw < 256:
        raise ValueError("not an exit status")
    return raw


def _boolean(raw: object) -> bool:
    if not isinstance(raw, bool):
        raise ValueError("not a boolean")  # noqa: TRY004  all decoding errors are ValueErrors
    return raw


def _text(raw: object) -> str:
    if not isinstance(raw, str):
        raise ValueError("not a string")  # noqa: TRY004  all decoding errors are ValueErrors
    # JSON may contain lone surrogates, which cannot be printed or stored.
    return replace_surrogates(raw[:_MAX_TEXT_LENGTH])


_SCALARS = {float: _number, int: _whole, ExitStatus: _exit_status, bool: _boolean, str: _text}
"""Decoders of scalar types."""
