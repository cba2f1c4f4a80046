"""Decode the events inside an agent's frames into values whose types and sizes are known.

The head does this once when a frame comes, and again when it reads its log: an earlier version may have written down what
this one would refuse. Nobody else has to look whether a process id is a number.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta, Struct

from gpulse.model.bounds import (
    LEFT_OUT,
    MAX_EVENT_BYTES,
    MAX_EVENTS_BYTES,
    MAX_INTEGER,
    MAX_LIST_ITEMS,
    MAX_TEXT_CHARS,
    MAX_TIME_SECONDS,
    check_document,
)

Text = Annotated[str, Meta(max_length=MAX_TEXT_CHARS)]
Name = Annotated[str, Meta(min_length=1, max_length=MAX_TEXT_CHARS)]
Texts = Annotated[list[Text], Meta(max_length=MAX_LIST_ITEMS)]
Count = Annotated[int, Meta(ge=0, le=MAX_INTEGER)]
Number = Annotated[int, Meta(ge=-MAX_INTEGER, le=MAX_INTEGER)] | float
Time = (
    Annotated[int, Meta(ge=0, lt=int(MAX_TIME_SECONDS))] | Annotated[float, Meta(ge=0.0, lt=MAX_TIME_SECONDS)]
)
Pid = Annotated[int, Meta(ge=0, lt=1 << 32)]
UserId = Annotated[int, Meta(ge=-(1 << 32), le=1 << 32)]
Kind = Annotated[str, Meta(pattern=r"^[a-z][a-z0-9_]{0,63}$")]

UNREADABLE = (ValueError, RecursionError)
"""What decoding JSON may raise; msgspec's own errors are ValueErrors."""


class Owner(Struct):
    """On whose behalf a process runs."""

    user: Text | None = None
    uid: UserId | None = None
    job: Text | None = None
    container: Text | None = None
    pod: Text | None = None


class Process(Struct):
    """A process that has begun, or has changed."""

    pid: Pid
    start_time: Time | None = None
    parent_pid: Pid | None = None
    name: Text | None = None
    command: Texts | None = None
    owner: Owner | None = None
    on_gpu: bool | None = None
    cgroup: Text | None = None


class ProcessEnd(Struct):
    """A process that is gone."""

    pid: Pid
    start_time: Time | None = None


class Job(Struct):
    """A scheduler's job that is on the node."""

    id: Name
    user: Text | None = None
    uid: UserId | None = None
    name: Text | None = None
    partition: Text | None = None
    account: Text | None = None
    gpus: Texts | None = None
    source: Text | None = None
    array: Text | None = None


class JobEnd(Struct):
    """A job that has left the node."""

    job: Name


class Xid(Struct):
    """Errors of one code that a GPU reported."""

    uuid: Name
    gpu: Text
    code: Annotated[int, Meta(ge=0, lt=1 << 16)]
    errors: Annotated[int, Meta(gt=0, lt=1 << 32)]
    time: Time


class HealthEntry(Struct):
    """One thing that is not as it should be."""

    source: Text | None = None
    code: Kind | None = None
    detail: Text | None = None
    since: Time | None = None
    subject: Text | None = None
    metrics: Texts | None = None
    hint: Text | None = None


class HealthState(Struct):
    """Everything that is not as it should be on a node."""

    entries: Annotated[list[HealthEntry], Meta(max_length=MAX_LIST_ITEMS)]


class Evidence(Struct):
    """One number against its threshold."""

    signal: Text
    statistic: Text
    value: Number | None
    comparison: Text
    threshold: Number | None


class Advice(Struct):
    """One thing to do."""

    do: Text
    why: Text
    confirm: Text


class Finding(Struct):
    """One verdict about a GPU or the node."""

    id: Name
    severity: Literal["info", "low", "medium", "high", "critical"] | None = None
    summary: Text | None = None
    family: Text | None = None
    confidence: Number | None = None
    gpu: Count | None = None
    label: Text | None = None
    pids: Annotated[list[Pid], Meta(max_length=MAX_LIST_ITEMS)] | None = None
    lost_ratio: Number | None = None
    start: Time | None = None
    end: Time | None = None
    evidence: Annotated[list[Evidence], Meta(max_length=MAX_LIST_ITEMS)] | None = None
    counter_evidence: Annotated[list[Evidence], Meta(max_length=MAX_LIST_ITEMS)] | None = None
    ruled_out: Texts | None = None
    advice: Annotated[list[Advice], Meta(max_length=MAX_LIST_ITEMS)] | None = None
    url: Text | None = None
    cause: Text | None = None


class Findings(Struct):
    """Everything that is wrong on a node."""

    findings: Annotated[list[Finding], Meta(max_length=MAX_LIST_ITEMS)]
    verdict: Text | None = None


class AgentStarted(Struct):
    """An agent's first frame."""

    version: Text | None = None
    pid: Pid | None = None


class AgentStopping(Struct):
    """An agent's last frame."""


class ClockStep(Struct):
    """Somebody set the node's clock."""

    seconds: Number


class LeftOut(Struct):
    """Events that did not fit into a frame."""

    events: Count


KINDS: dict[str, type[Struct]] = {
    "process": Process,
    "process_end": ProcessEnd,
    "job": Job,
    "job_end": JobEnd,
    "xid": Xid,
    "health": HealthState,
    "findings": Findings,
    "agent_started": AgentStarted,
    "agent_stopping": AgentStopping,
    "clock_step": ClockStep,
    LEFT_OUT: LeftOut,
}
"""What agents tell of. Everything else is told by heads alone: an agent must not be able to tell it in their place."""


class Decoded(NamedTuple):
    """The events of one frame."""

    events: list[dict[str, Any]]
    """Those that are as they should be."""
    problems: list[str]
    """Of each of the others what is wrong with it."""


def decode_events(data: bytes, *, kinds: Collection[str] | None = KINDS.keys()) -> Decoded:
    """Read the events of one frame.

    Args:
        data: A JSON array, or nothing.
        kinds: Those that may be told; any when None.
    """
    if not data:
        return Decoded([], [])
    if len(data) > MAX_EVENTS_BYTES:
        return Decoded([], [f"its events take more than {MAX_EVENTS_BYTES >> 20} MiB"])
    try:
        raw = _ARRAY.decode(data)
    except UNREADABLE as error:
        return Decoded([], [f"its events are not a JSON array: {error}"])
    events: list[dict[str, Any]] = []
    problems: list[str] = []
    for piece in raw:
        try:
            events.append(_event(bytes(piece), kinds))
        except UNREADABLE as error:
            problems.append(str(error))
    return Decoded(events, problems)


def check_event(event: Any, kinds: Collection[str] | None = KINDS.keys()) -> dict[str, Any]:
    """An event that was decoded already, when it is one that an agent may tell.

    Raises:
        ValueError: It is not.
    """
    check_document(event)
    if not isinstance(event, dict):
        raise ValueError("an event is not an object")  # noqa: TRY004  what was sent is wrong
    kind = msgspec.convert(event.get("event"), Kind)
    if kinds is not None and kind not in kinds:
        raise ValueError(f"agents do not tell of {kind}")
    known = KINDS.get(kind)
    if known is not None:
        try:
            msgspec.convert(event, known)
        except msgspec.ValidationError as error:
            raise ValueError(f"an event of the kind {kind} is wrong: {error}") from error
    return event


def _event(data: bytes, kinds: Collection[str] | None) -> dict[str, Any]:
    if len(data) > MAX_EVENT_BYTES:
        raise ValueError(f"an event takes more than {MAX_EVENT_BYTES >> 10} KiB")
    return check_event(_JSON.decode(data), kinds)


_ARRAY = msgspec.json.Decoder(list[msgspec.Raw])
_JSON = msgspec.json.Decoder()
