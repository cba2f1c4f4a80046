"""Requests to a head: the fields of each operation, with their limits and their descriptions."""

from __future__ import annotations

from typing import Annotated, ClassVar

from msgspec import Meta, Struct, field

from gpulse.cluster.protocol.values import (
    Duration,
    IntervalMs,
    Labels,
    Metric,
    Metrics,
    OptionalSessionName,
    PathText,
    QueryTexts,
    SessionName,
    Text,
    Texts,
    Time,
)
from gpulse.model.metric import Scope
from gpulse.model.session import Format
from gpulse.reports.subject import JobKind
from gpulse.reports.usage import Grouping
from gpulse.store.store import Statistic

_From = Annotated[Time | None, Meta(description="epoch seconds, ISO 8601, -10m (ten minutes ago) or now")]
_To = Annotated[Time | None, Meta(description="as from; now when left out")]
_Nodes = Annotated[
    QueryTexts, Meta(description="only these nodes, with commas or repeated; all when left out")
]
_Gpus = Annotated[QueryTexts, Meta(description="only these GPUs, as index, node:index or UUID")]
_Users = Annotated[QueryTexts, Meta(description="only what these users hold")]
_Format = Annotated[Format, Meta(description="the file format; json when left out")]


class Request(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A request; a field that is null counts as left out."""

    NEEDS_ONE_OF: ClassVar[tuple[str, ...]] = ()
    """At least one of these fields must be given."""


class NoFields(Request, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A request without fields."""


class GetSession(Request, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which session to show."""

    name: Annotated[SessionName, Meta(description="the session's name or id")]


class StartSession(Request, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a new session covers."""

    name: Annotated[
        OptionalSessionName,
        Meta(description="the session's name; the head makes one up when it is empty or left out"),
    ] = ""
    since: Annotated[
        Duration | None, Meta(description="how long ago it began, such as 10m; now when left out")
    ] = None
    nodes: Annotated[Texts, Meta(description="only these nodes; all when left out")] = ()
    gpus: Annotated[
        Texts, Meta(description="only these GPUs, as index, node:index or UUID; all when left out")
    ] = ()
    labels: Annotated[Labels, Meta(description="texts by name, to find the session again")] = {}
    interval_ms: Annotated[IntervalMs | None, Meta(description="milliseconds between two frames")] = None


class StopSessions(Request, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which session to end, and the format of its file."""

    name: Annotated[
        OptionalSessionName, Meta(description="the session's name; all active ones when empty or left out")
    ] = ""
    format: _Format = "json"


class RecoverSession(Request, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which interrupted session to go on with."""

    NEEDS_ONE_OF = ("name", "session_id")

    name: Annotated[SessionName | None, Meta(description="the session's name")] = None
    session_id: Annotated[
        SessionName | None, Meta(description="the session's id, when several have one name")
    ] = None


class GetSessionFile(Request, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which session to write to a file, and in which format."""

    name: Annotated[SessionName, Meta(description="the session's name or id")]
    format: _Format = "json"


class QueryMetric(Request, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which metric, of what, over which time."""

    metric: Annotated[Metric, Meta(description="a name of the metric catalogue (docs/metrics.md)")]
    scope: Annotated[Scope | None, Meta(description="whose number it is; gpu when GPUs have it")] = None
    nodes: _Nodes = ()
    gpus: _Gpus = ()
    start: _From = field(name="from", default=None)
    end: _To = field(name="to", default=None)
    step: Annotated[
        Duration | None,
        Meta(description="seconds per point, such as 10s; every sample when it is 0 or left out"),
    ] = None
    statistic: Annotated[
        Statistic, Meta(description="which statistic of its step a point is; mean when left out")
    ] = "mean"


class GetHistory(Request, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which metrics, of what, over which time, at how many points."""

    metrics: Annotated[
        Metrics, Meta(description="names of the metric catalogue (docs/metrics.md), with commas or repeated")
    ]
    scope: Annotated[Scope, Meta(description="whose numbers they are; gpu when left out")] = "gpu"
    nodes: _Nodes = ()
    gpus: _Gpus = ()
    start: _From = field(name="from", default=None)
    end: _To = field(name="to", default=None)
    points: Annotated[
        int, Meta(ge=10, le=2000, description="the most points in the answer; 600 when left out")
    ] = 600
    spread: Annotated[bool, Meta(description="also the minimum and the maximum of each step")] = False


class GetProcesses(Request, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Whose processes, where, over which time."""

    start: _From = field(name="from", default=None)
    end: _To = field(name="to", default=None)
    nodes: _Nodes = ()
    gpus: _Gpus = ()
    users: _Users = ()
    jobs: Annotated[QueryTexts, Meta(description="only these jobs, such as slurm:4711 or harvest:fold")] = ()


class GetUsage(Request, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Whose GPU time, over which time, in rows of what."""

    start: _From = field(name="from", default=None)
    end: _To = field(name="to", default=None)
    by: Annotated[Grouping, Meta(description="one row per user, or one per job; user when left out")] = "user"
    nodes: _Nodes = ()
    users: _Users = ()


class GetJob(Request, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which job, session or process to report on."""

    job: Annotated[PathText, Meta(description="a job such as 4711 or slurm:4711, a session's name, or a pid")]
    kind: Annotated[
        JobKind | None, Meta(description="which of them it is; a job, or else a session, when left out")
    ] = None
    node: Annotated[Text | None, Meta(description="only what was on this node")] = None
    start: _From = field(name="from", default=None)
    end: _To = field(name="to", default=None)
    points: Annotated[
        int, Meta(ge=0, le=2000, description="the most points of its curves; no curves when left out")
    ] = 0


class GetEvents(Request, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which events, over which time."""

    start: _From = field(name="from", default=None)
    end: _To = field(name="to", default=None)
    kinds: Annotated[QueryTexts, Meta(description="only these kinds of events")] = ()
    nodes: _Nodes = ()


class GetFindingSpans(Request, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Whose findings, over which time."""

    start: _From = field(name="from", default=None)
    end: _To = field(name="to", default=None)
    nodes: _Nodes = ()


class ChangeSettings(Request, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How agents are to sample; what is left out stays as it is."""

    interval_ms: Annotated[IntervalMs | None, Meta(description="milliseconds between two frames")] = None
    bandwidth: Annotated[bool | None, Meta(description="whether sessions hold PCIe traffic")] = None
    nvlink: Annotated[bool | None, Meta(description="whether sessions hold NVLink traffic")] = None
