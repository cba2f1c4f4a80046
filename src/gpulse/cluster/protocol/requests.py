"""Requests to a head: the fields of each operation with their limits and descriptions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from msgspec import Meta, Struct, field

from gpulse.model.finding_acknowledgement import MAX_CHOICES, MAX_KEY_CHARACTERS, MAX_KEYS
from gpulse.model.message_limits import MAX_TIME_SECONDS
from gpulse.model.metric_catalog import CATALOG, Scope
from gpulse.model.session import (
    MAX_INTERVAL_MS,
    MAX_LABEL_CHARS,
    MAX_LABELS,
    MIN_INTERVAL_MS,
    SessionFormat,
    check_session_name,
)
from gpulse.model.time_text import MAX_DURATION_SECONDS, parse_duration, parse_time
from gpulse.reports.finding_report import FindingState
from gpulse.reports.report_subject import JobKind
from gpulse.reports.usage_report import Grouping
from gpulse.store.store import Statistic

MAX_TEXT_CHARACTERS = 200
MAX_ITEMS = 10_000
MAX_REPEATED_FIELDS = 500
"""How often one field may occur in a URL."""
MAX_METRICS = 32

_END = r"$(?!\n)"
"""End of the text; `$` alone also matches before a trailing newline."""
_CONTROLS = r"\u0000-\u001f\u007f-\u009f\u2028\u2029"
_LINE = f"^[^{_CONTROLS}]*{_END}"
_NAME = "[A-Za-z0-9][A-Za-z0-9._-]{0,99}"
_STRING_LENGTH = f"a string of 1 to {MAX_TEXT_CHARACTERS} characters"
_NO_CONTROLS = "without control characters such as newlines"
# Limits each part to about ten years, because a pattern cannot add up the parts.
_DURATION_PARTS = "|".join(
    rf"[0-9]{{1,{digits}}}(\.[0-9]{{1,9}})?{unit}"
    for unit, digits in {"ms": 10, "s": 7, "m": 6, "h": 4, "d": 3, "w": 2}.items()
)
_DURATION = f"({_DURATION_PARTS}){{1,3}}"


class Duration(float):
    """A duration: a number of seconds, or text such as `10m`."""

    SCHEMA: ClassVar[dict[str, Any]] = {
        "anyOf": [
            {"type": "number", "minimum": 0, "maximum": MAX_DURATION_SECONDS},
            {"type": "string", "pattern": f"^{_DURATION}$"},
        ]
    }

    @classmethod
    def decode(cls, given: object, _now: float) -> Self:
        """Parse a duration.

        Raises:
            ValueError: The value is not a duration.
        """
        return cls(parse_duration(given))


class Time(float):
    """A time: epoch seconds, ISO 8601, `-10m` or `now`."""

    SCHEMA: ClassVar[dict[str, Any]] = {
        "anyOf": [
            {"type": "number", "minimum": 0, "maximum": MAX_TIME_SECONDS},
            {"type": "string", "format": "date-time"},
            {"type": "string", "pattern": f"^(now|-{_DURATION})$"},
        ]
    }

    @classmethod
    def decode(cls, given: object, now: float) -> Self:
        """Parse a time.

        Raises:
            ValueError: The value is not a time.
        """
        return cls(parse_time(given, now))


def json_schema(kind: type) -> dict[str, Any]:
    """Return the JSON schema of a custom type."""
    if issubclass(kind, (Duration, Time)):
        return dict(kind.SCHEMA)
    raise NotImplementedError


_CHECK_NAME = {"check": check_session_name}
"""Raises the usual error for an invalid session name."""
SessionName = Annotated[str, Meta(pattern=f"^{_NAME}{_END}", title="a session's name", extra=_CHECK_NAME)]
OptionalSessionName = Annotated[
    str, Meta(pattern=f"^({_NAME})?{_END}", title="a session's name", extra=_CHECK_NAME)
]
Text = Annotated[
    str,
    Meta(
        min_length=1,
        max_length=MAX_TEXT_CHARACTERS,
        pattern=_LINE,
        title=f"{_STRING_LENGTH} {_NO_CONTROLS}",
    ),
]
PathText = Annotated[
    str,
    Meta(
        min_length=1,
        max_length=MAX_TEXT_CHARACTERS,
        pattern=rf"^(?!\.{{1,2}}{_END})[^/{_CONTROLS}]+{_END}",
        title=f"{_STRING_LENGTH} without slashes and {_NO_CONTROLS}, other than . and ..",
    ),
]
"""A text that can be one component of a path."""
_ListedText = Annotated[
    str,
    Meta(
        min_length=1,
        max_length=MAX_TEXT_CHARACTERS,
        pattern=f"^[^,{_CONTROLS}]+{_END}",
        title=f"{_STRING_LENGTH} without commas and {_NO_CONTROLS}",
    ),
]
Texts = Annotated[tuple[Text, ...], Meta(max_length=MAX_ITEMS)]
QueryTexts = Annotated[tuple[_ListedText, ...], Meta(max_length=MAX_ITEMS)]
"""Texts in a URL, comma-separated or repeated."""
Labels = Annotated[
    dict[
        Annotated[str, Meta(min_length=1, max_length=MAX_LABEL_CHARS, pattern=_LINE)],
        Annotated[str, Meta(max_length=MAX_LABEL_CHARS, pattern=_LINE)],
    ],
    Meta(
        max_length=MAX_LABELS,
        title=f"an object with at most {MAX_LABELS} strings as values, each of at most {MAX_LABEL_CHARS} characters {_NO_CONTROLS}",
    ),
]
IntervalMs = Annotated[int, Meta(ge=MIN_INTERVAL_MS, le=MAX_INTERVAL_MS)]
_METRICS = tuple(dict.fromkeys(name for names in CATALOG.values() for name in names))
if TYPE_CHECKING:
    Metric = str
else:
    Metric = Literal[_METRICS]
Metrics = Annotated[tuple[Metric, ...], Meta(min_length=1, max_length=MAX_METRICS)]


_From = Annotated[
    Time | None,
    Meta(description="start of the time range: epoch seconds, ISO 8601, -10m (ten minutes ago) or now"),
]
_To = Annotated[
    Time | None, Meta(description="end of the time range, in the same forms as `from`; default: now")
]
_Nodes = Annotated[
    QueryTexts, Meta(description="only these nodes, comma-separated or repeated; default: all")
]
_Gpus = Annotated[QueryTexts, Meta(description="only these GPUs, as index, node:index or UUID; default: all")]
_Users = Annotated[QueryTexts, Meta(description="only these users; default: all")]
_Format = Annotated[SessionFormat, Meta(description="file format; default: json")]


class Request(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base class of all requests; a field that is null counts as omitted."""

    NEEDS_ONE_OF: ClassVar[tuple[str, ...]] = ()
    """At least one of these fields must be given."""


class NoFields(Request, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A request without fields."""


class GetSession(Request, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Request for one session."""

    name: Annotated[SessionName, Meta(description="name or ID of the session")]


class CompareSessions(Request, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Request for the comparison of two sessions."""

    before: Annotated[SessionName, Meta(description="name or ID of the session before a change")]
    after: Annotated[SessionName, Meta(description="name or ID of the session after the change")]


class StartSession(Request, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Request to start a session."""

    name: Annotated[
        OptionalSessionName,
        Meta(description="name of the session; if empty or omitted, the head generates one"),
    ] = ""
    since: Annotated[
        Duration | None, Meta(description="start the session this long ago, such as 10m; default: now")
    ] = None
    nodes: Annotated[Texts, Meta(description="only these nodes; default: all")] = ()
    gpus: Annotated[
        Texts, Meta(description="only these GPUs, as index, node:index or UUID; default: all")
    ] = ()
    labels: Annotated[Labels, Meta(description="labels by name, for finding the session later")] = {}
    interval_ms: Annotated[IntervalMs | None, Meta(description="milliseconds between samples")] = None


class StopSessions(Request, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Request to stop sessions and write their files."""

    name: Annotated[
        OptionalSessionName, Meta(description="name of the session; if empty or omitted, all active sessions")
    ] = ""
    format: _Format = "json"


class RecoverSession(Request, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Request to continue an interrupted session."""

    NEEDS_ONE_OF = ("name", "session_id")

    name: Annotated[SessionName | None, Meta(description="name of the session")] = None
    session_id: Annotated[
        SessionName | None, Meta(description="ID of the session, if several have the same name")
    ] = None


class GetSessionFile(Request, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Request for a session's file."""

    name: Annotated[SessionName, Meta(description="name or ID of the session")]
    format: _Format = "json"


class QueryMetric(Request, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Request for the history of one metric."""

    metric: Annotated[Metric, Meta(description="a name in the metric catalog (docs/reference/metrics.md)")]
    scope: Annotated[
        Scope | None, Meta(description="scope of the metric; default: gpu if it is a GPU metric")
    ] = None
    nodes: _Nodes = ()
    gpus: _Gpus = ()
    start: _From = field(name="from", default=None)
    end: _To = field(name="to", default=None)
    step: Annotated[
        Duration | None,
        Meta(description="time per point, such as 10s; 0 or omitted: every sample"),
    ] = None
    statistic: Annotated[
        Statistic, Meta(description="statistic of the samples in each step; default: mean")
    ] = "mean"


class GetHistory(Request, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Request for several metrics over time."""

    metrics: Annotated[
        Metrics,
        Meta(
            description="names in the metric catalog (docs/reference/metrics.md), comma-separated or repeated"
        ),
    ]
    scope: Annotated[Scope, Meta(description="scope of the metrics; default: gpu")] = "gpu"
    nodes: _Nodes = ()
    gpus: _Gpus = ()
    start: _From = field(name="from", default=None)
    end: _To = field(name="to", default=None)
    points: Annotated[
        int, Meta(ge=10, le=2000, description="maximum number of points in the answer; default: 600")
    ] = 600
    spread: Annotated[
        bool | Literal["percentiles"],
        Meta(
            description="true: also return the minimum and maximum of each step; percentiles: instead of every series, "
            "return the median and the 5th and 95th percentiles of all series at each step, and the outliers"
        ),
    ] = False


class GetProcesses(Request, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Request for the processes that held GPUs."""

    start: _From = field(name="from", default=None)
    end: _To = field(name="to", default=None)
    nodes: _Nodes = ()
    gpus: _Gpus = ()
    users: _Users = ()
    jobs: Annotated[
        QueryTexts, Meta(description="only these jobs, such as slurm:4711 or harvest:fold; default: all")
    ] = ()


class GetUsage(Request, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Request for GPU usage by user or job."""

    start: _From = field(name="from", default=None)
    end: _To = field(name="to", default=None)
    by: Annotated[Grouping, Meta(description="one row per user or per job; default: user")] = "user"
    nodes: _Nodes = ()
    users: _Users = ()


class GetJob(Request, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Request for the report on a job, a session or a process."""

    job: Annotated[
        PathText, Meta(description="a job such as 4711 or slurm:4711, a session's name, or a process ID")
    ]
    kind: Annotated[
        JobKind | None,
        Meta(
            description="whether `job` names a job, a session or a process; default: a job if there is one, otherwise a session"
        ),
    ] = None
    node: Annotated[Text | None, Meta(description="only this node; default: all nodes")] = None
    start: _From = field(name="from", default=None)
    end: _To = field(name="to", default=None)
    points: Annotated[
        int, Meta(ge=0, le=2000, description="maximum number of points per curve; default: no curves")
    ] = 0


class GetHardware(Request, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Request for the hardware of one node."""

    name: Annotated[PathText, Meta(description="name of the node")]


class GetEvents(Request, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Request for the events of a time range."""

    start: _From = field(name="from", default=None)
    end: _To = field(name="to", default=None)
    kinds: Annotated[QueryTexts, Meta(description="only these kinds of events; default: all")] = ()
    nodes: _Nodes = ()


class GetFindingSpans(Request, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Request for the findings of a time range."""

    start: _From = field(name="from", default=None)
    end: _To = field(name="to", default=None)
    nodes: _Nodes = ()


class GetFindingGroups(Request, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Request for findings, grouped by cause."""

    state: Annotated[
        FindingState,
        Meta(
            description="which findings to return: all current ones, only acknowledged or silenced current ones, or past ones"
        ),
    ] = "now"
    findings: Annotated[
        QueryTexts, Meta(description="only these findings, such as gpu_fault; default: all")
    ] = ()
    start: _From = field(name="from", default=None)
    end: _To = field(name="to", default=None)
    nodes: _Nodes = ()


FindingKeyText = Annotated[
    str,
    Meta(
        min_length=1,
        max_length=MAX_KEY_CHARACTERS,
        pattern=_LINE,
        title=f"a string of 1 to {MAX_KEY_CHARACTERS} characters {_NO_CONTROLS}",
    ),
]
_By = Annotated[Text, Meta(description="name of the person who sends this request, shown to other users")]
_Choice = Annotated[tuple[FindingKeyText, ...], Meta(max_length=MAX_CHOICES)]


class AcknowledgeFindings(Request, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Request to acknowledge findings; it holds as long as their condition lasts."""

    NEEDS_ONE_OF: ClassVar[tuple[str, ...]] = ("keys", "group")

    keys: Annotated[
        Annotated[tuple[FindingKeyText, ...], Meta(max_length=MAX_KEYS)],
        Meta(description="keys of current findings, as returned by GET /api/v1/findings"),
    ] = ()
    group: Annotated[
        FindingKeyText | None,
        Meta(description="all current findings with this cause, for example input_too_few_workers"),
    ] = None
    by: _By
    note: Annotated[Text | None, Meta(description="note on what is being done about the findings")] = None


class SilenceFindings(Request, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Request to silence findings until a time; a finding must match every field that is given."""

    NEEDS_ONE_OF: ClassVar[tuple[str, ...]] = ("findings", "nodes", "gpus", "users", "jobs")

    findings: Annotated[
        _Choice, Meta(description="only these findings, such as gpu_fault or gpu_fault/xid_94; default: all")
    ] = ()
    nodes: Annotated[_Choice, Meta(description="only on these nodes; default: all")] = ()
    gpus: Annotated[_Choice, Meta(description="only on these GPUs, as node:index; default: all")] = ()
    users: Annotated[
        _Choice, Meta(description="only findings that affect these users and no others; default: all")
    ] = ()
    jobs: Annotated[
        _Choice, Meta(description="only findings that affect these jobs and no others; default: all")
    ] = ()
    until: Annotated[Time | None, Meta(description="end of the silence: epoch seconds or ISO 8601")] = None
    seconds: Annotated[
        Duration | None,
        Meta(description="duration of the silence, such as 2h, instead of `until`; at most 30 days"),
    ] = None
    reason: Annotated[Text, Meta(description="reason for the silence")]
    by: _By


class EndSilence(Request, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Request to end a silence before its time."""

    silence: Annotated[PathText, Meta(description="ID of the silence")]
    by: _By


class ReadStacks(Request, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Request for the stacks of Python processes on GPUs, which agents read once."""

    NEEDS_ONE_OF: ClassVar[tuple[str, ...]] = ("job", "nodes")

    job: Annotated[
        Text | None, Meta(description="only processes of this job, such as 4711 or slurm:4711")
    ] = None
    nodes: Annotated[Texts, Meta(description="only these nodes; default: those where the job runs")] = ()


class ChangeSettings(Request, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Request to change the sampling settings; omitted fields stay unchanged."""

    interval_ms: Annotated[IntervalMs | None, Meta(description="milliseconds between samples")] = None
    bandwidth: Annotated[bool | None, Meta(description="whether sessions record PCIe traffic")] = None
    nvlink: Annotated[bool | None, Meta(description="whether sessions record NVLink traffic")] = None
