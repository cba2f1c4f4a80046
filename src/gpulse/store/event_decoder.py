"""Decode and validate the events inside an agent's frames: known types, bounded sizes.

The head does this once when a frame arrives, and again when it reads its log, because an earlier version may have stored
events that this version rejects. No other code has to check whether a process ID is a number.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta, Struct

from gpulse.model.finding import CodeRole
from gpulse.model.message_limits import (
    EVENTS_LEFT_OUT,
    MAX_CODE_LOCATIONS,
    MAX_CODE_TEXT_CHARS,
    MAX_EVENT_BYTES,
    MAX_EVENTS_BYTES,
    MAX_FUNCTION_CHARS,
    MAX_INTEGER,
    MAX_LIST_ITEMS,
    MAX_PATH_CHARS,
    MAX_TEXT_CHARS,
    MAX_TIME_SECONDS,
    check_document,
)
from gpulse.model.xid import MAX_XID_HOLDERS

ShortText = Annotated[str, Meta(max_length=MAX_TEXT_CHARS)]
NonEmptyText = Annotated[str, Meta(min_length=1, max_length=MAX_TEXT_CHARS)]
TextList = Annotated[list[ShortText], Meta(max_length=MAX_LIST_ITEMS)]
WholeNumber = Annotated[int, Meta(ge=0, le=MAX_INTEGER)]
AnyNumber = Annotated[int, Meta(ge=-MAX_INTEGER, le=MAX_INTEGER)] | float
EpochSeconds = (
    Annotated[int, Meta(ge=0, le=int(MAX_TIME_SECONDS))] | Annotated[float, Meta(ge=0.0, le=MAX_TIME_SECONDS)]
)
Pid = Annotated[int, Meta(ge=0, lt=1 << 32)]
FilePath = Annotated[str, Meta(min_length=1, max_length=MAX_PATH_CHARS)]
FunctionName = Annotated[str, Meta(min_length=1, max_length=MAX_FUNCTION_CHARS)]
CodeText = Annotated[str, Meta(max_length=MAX_CODE_TEXT_CHARS)]
Count = Annotated[int, Meta(ge=0, lt=1 << 31)]
UserId = Annotated[int, Meta(ge=-(1 << 32), le=1 << 32)]
EventKind = Annotated[str, Meta(pattern=r"^[a-z][a-z0-9_]{0,63}$")]

JSON_ERRORS = (ValueError, RecursionError)
"""Exceptions that decoding JSON may raise; msgspec's own errors are ValueErrors."""


class OwnerPayload(Struct):
    """The user, job or container that a process belongs to."""

    user: ShortText | None = None
    uid: UserId | None = None
    job: ShortText | None = None
    container: ShortText | None = None
    pod: ShortText | None = None


class ProcessEvent(Struct):
    """A process that started or changed."""

    pid: Pid
    start_time: EpochSeconds | None = None
    parent_pid: Pid | None = None
    name: ShortText | None = None
    command: TextList | None = None
    owner: OwnerPayload | None = None
    on_gpu: bool | None = None
    cgroup: ShortText | None = None


class ProcessEndEvent(Struct):
    """A process that ended."""

    pid: Pid
    start_time: EpochSeconds | None = None


class JobEvent(Struct):
    """A scheduler's job that runs on the node."""

    id: NonEmptyText
    user: ShortText | None = None
    uid: UserId | None = None
    name: ShortText | None = None
    partition: ShortText | None = None
    account: ShortText | None = None
    gpus: TextList | None = None
    source: ShortText | None = None
    array: ShortText | None = None


class JobEndEvent(Struct):
    """A job that no longer runs on the node."""

    job: NonEmptyText


class XidHolderPayload(Struct):
    """A process that was on a GPU when it reported an error."""

    pid: Pid
    user: ShortText | None = None
    name: ShortText | None = None


class XidEvent(Struct):
    """Xid errors with one code that a GPU reported."""

    uuid: NonEmptyText
    gpu: ShortText
    code: Annotated[int, Meta(ge=0, lt=1 << 16)]
    errors: Annotated[int, Meta(gt=0, lt=1 << 32)]
    time: EpochSeconds
    holders: Annotated[list[XidHolderPayload], Meta(max_length=MAX_XID_HOLDERS)] | None = None


class HealthEntryPayload(Struct):
    """One health problem."""

    source: ShortText | None = None
    code: EventKind | None = None
    detail: ShortText | None = None
    since: EpochSeconds | None = None
    subject: ShortText | None = None
    metrics: TextList | None = None
    hint: ShortText | None = None


class HealthEvent(Struct):
    """All current health problems of a node."""

    entries: Annotated[list[HealthEntryPayload], Meta(max_length=MAX_LIST_ITEMS)]


class EvidencePayload(Struct):
    """One value compared with its threshold."""

    signal: ShortText
    statistic: ShortText
    value: AnyNumber | None
    comparison: ShortText
    threshold: AnyNumber | None


class AdvicePayload(Struct):
    """One recommended action."""

    do: ShortText
    why: ShortText
    confirm: ShortText


class CodeLocationPayload(Struct):
    """A line of the user's code, and its share of the stacks that count."""

    pid: Pid
    role: CodeRole
    file: FilePath
    line: Count
    function: FunctionName
    share: Annotated[float, Meta(ge=0.0, le=1.0)]
    stacks: Count
    doing: CodeText | None = None


class FindingPayload(Struct):
    """One diagnosis of a GPU or the node."""

    id: NonEmptyText
    severity: Literal["info", "low", "medium", "high", "critical"] | None = None
    summary: ShortText | None = None
    family: ShortText | None = None
    confidence: AnyNumber | None = None
    gpu: WholeNumber | None = None
    label: ShortText | None = None
    pids: Annotated[list[Pid], Meta(max_length=MAX_LIST_ITEMS)] | None = None
    lost_ratio: AnyNumber | None = None
    start: EpochSeconds | None = None
    end: EpochSeconds | None = None
    evidence: Annotated[list[EvidencePayload], Meta(max_length=MAX_LIST_ITEMS)] | None = None
    counter_evidence: Annotated[list[EvidencePayload], Meta(max_length=MAX_LIST_ITEMS)] | None = None
    ruled_out: TextList | None = None
    advice: Annotated[list[AdvicePayload], Meta(max_length=MAX_LIST_ITEMS)] | None = None
    url: ShortText | None = None
    cause: ShortText | None = None
    inferred: bool | None = None
    where: Annotated[list[CodeLocationPayload], Meta(max_length=MAX_CODE_LOCATIONS)] | None = None
    where_note: CodeText | None = None


class FindingsEvent(Struct):
    """All current findings of a node."""

    findings: Annotated[list[FindingPayload], Meta(max_length=MAX_LIST_ITEMS)]
    verdict: ShortText | None = None
    watched_seconds: AnyNumber | None = None
    """How long the agent has watched, while that is too short to recognise what still holds since its last run."""


class AgentStartedEvent(Struct):
    """The agent started; in its first frame."""

    version: ShortText | None = None
    pid: Pid | None = None


class AgentStoppingEvent(Struct):
    """The agent is stopping; in its last frame."""


class ClockStepEvent(Struct):
    """The node's clock was set."""

    seconds: AnyNumber


class DroppedEvents(Struct):
    """The number of events that did not fit into a frame."""

    events: WholeNumber


EVENT_TYPES: dict[str, type[Struct]] = {
    "process": ProcessEvent,
    "process_end": ProcessEndEvent,
    "job": JobEvent,
    "job_end": JobEndEvent,
    "xid": XidEvent,
    "health": HealthEvent,
    "findings": FindingsEvent,
    "agent_started": AgentStartedEvent,
    "agent_stopping": AgentStoppingEvent,
    "clock_step": ClockStepEvent,
    EVENTS_LEFT_OUT: DroppedEvents,
}
"""The events that agents may send, by kind. Only heads create events of other kinds, and agents must not forge them."""


class DecodedEvents(NamedTuple):
    """The decoded events of one frame."""

    events: list[dict[str, Any]]
    """The valid events."""
    problems: list[str]
    """For each invalid event, what is wrong with it."""


def decode_events(
    data: bytes, *, kinds: Collection[str] | None = EVENT_TYPES.keys(), max_events: int | None = None
) -> DecodedEvents:
    """Decode the events of one frame.

    Args:
        data: A JSON array, or empty.
        kinds: The allowed kinds; None allows all.
        max_events: If there are more, none is decoded; None for no limit.
    """
    if not data:
        return DecodedEvents([], [])
    if len(data) > MAX_EVENTS_BYTES:
        return DecodedEvents([], [f"the events of the frame are larger than {MAX_EVENTS_BYTES >> 20} MiB"])
    try:
        raw = _ARRAY.decode(data)
    except JSON_ERRORS as error:
        return DecodedEvents([], [f"the events of the frame are not a JSON array: {error}"])
    if max_events is not None and len(raw) > max_events:
        return DecodedEvents(
            [], [f"the frame has {len(raw):,} events, more than the limit of {max_events:,}"]
        )
    events: list[dict[str, Any]] = []
    problems: list[str] = []
    for piece in raw:
        try:
            events.append(_decode_event(bytes(piece), kinds))
        except JSON_ERRORS as error:
            problems.append(str(error))
    return DecodedEvents(events, problems)


def check_event(event: Any, kinds: Collection[str] | None = EVENT_TYPES.keys()) -> dict[str, Any]:
    """Check an event that is already decoded, and return it.

    Raises:
        ValueError: The event is not valid, or agents may not send it.
    """
    check_document(event)
    if not isinstance(event, dict):
        raise ValueError("an event is not a JSON object")  # noqa: TRY004  the data is wrong, not the caller
    kind = msgspec.convert(event.get("event"), EventKind)
    if kinds is not None and kind not in kinds:
        raise ValueError(f"agents may not send events of kind {kind}")
    event_type = EVENT_TYPES.get(kind)
    if event_type is not None:
        try:
            msgspec.convert(event, event_type)
        except msgspec.ValidationError as error:
            raise ValueError(f"an event of kind {kind} is not valid: {error}") from error
    return event


def _decode_event(data: bytes, kinds: Collection[str] | None) -> dict[str, Any]:
    if len(data) > MAX_EVENT_BYTES:
        raise ValueError(f"an event is larger than {MAX_EVENT_BYTES >> 10} KiB")
    return check_event(_JSON.decode(data), kinds)


_ARRAY = msgspec.json.Decoder(list[msgspec.Raw])
_JSON = msgspec.json.Decoder()
