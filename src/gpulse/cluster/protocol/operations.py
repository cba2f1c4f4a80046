"""The one table of what a head can be asked: gRPC, HTTP, the OpenAPI document and the command line read it."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, cast, get_args

import msgspec

from gpulse.cluster.protocol import fields as f
from gpulse.cluster.protocol import schemas
from gpulse.cluster.protocol.answers import failure, refusal
from gpulse.cluster.protocol.interface import Download, Format, HeadInterface
from gpulse.cluster.protocol.usage_file import usage_file
from gpulse.errors import RefusedError, UsageError
from gpulse.model.metric import CATALOGUE, Scope
from gpulse.reports.document import Document
from gpulse.reports.subject import JobKind
from gpulse.reports.usage import Grouping, UsageReport
from gpulse.store.store import Statistic

Method = Literal["GET", "POST"]
Answer = Document | msgspec.Struct
Run = Callable[[HeadInterface, dict[str, Any]], Answer | Awaitable[Answer]]
Fetch = Callable[[HeadInterface, dict[str, Any]], Download | Awaitable[Download]]


class Operation(NamedTuple):
    """One thing a head can be asked or told."""

    name: str
    method: Method
    paths: tuple[str, ...]
    """In HTTP; `{field}` is a field of the request."""
    help: str
    run: Run
    response: f.Schema
    fields: tuple[f.Field, ...] = ()
    any_of: tuple[str, ...] = ()
    """At least one of these fields is needed."""
    writes: bool = False
    fetch: Fetch | None = None
    """Makes the file, where the answer is one, piece by piece, and not a document."""
    media_types: tuple[str, ...] = ("application/json",)

    @property
    def is_file(self) -> bool:
        """Whether the answer is a file."""
        return self.fetch is not None


_FORMATS = cast("tuple[str, ...]", get_args(Format))
_SINCE = f.Field("since", f.DURATION, "how long ago it began, such as 10m; now when left out")
_INTERVAL = f.Field("interval_ms", f.whole(50, 3_600_000), "milliseconds between two frames")
_NODES = f.Field("nodes", f.TEXTS, "only these nodes; all when left out")
_GPUS = f.Field("gpus", f.TEXTS, "only these GPUs, as index, node:index or UUID; all when left out")
_SOME_NODES = f.Field("nodes", f.PARTS, "only these nodes, with commas or given again and again")
_SOME_GPUS = f.Field("gpus", f.PARTS, "only these GPUs, as index, node:index or UUID")
_FORMAT = f.Field("format", f.choice(*_FORMATS), "the kind of file; json when left out")
_FROM = f.Field("from", f.TIME, "epoch seconds, ISO 8601, -10m (ten minutes ago) or now")
_TO = f.Field("to", f.TIME, "as from; now when left out")
_MOST_ROWS = 5000
"""Of an answer about usage; its file has them all."""
_MAYBE_NAME = f.Field("name", f.NAME, "the session's name", may_be_empty=True)
_NAME = f.Field("name", f.NAME, "the session's name or id", required=True)
_USERS = f.Field("users", f.PARTS, "only what these users hold")
_USAGE_FIELDS = (
    _FROM,
    _TO,
    f.Field("by", f.choice(*get_args(Grouping)), "one row a user, or one a job; user when left out"),
    _SOME_NODES,
    _USERS,
)
_METRICS = tuple(dict.fromkeys(name for names in CATALOGUE.values() for name in names))


def _start(head: HeadInterface, given: dict[str, Any]) -> Awaitable[Document]:
    since = given.pop("since", None)
    return head.start_session(name=given.pop("name", None), since_seconds=since, **given)


def _query(head: HeadInterface, given: dict[str, Any]) -> Awaitable[Answer]:
    metric = given.pop("metric")
    step = given.pop("step", None) or None
    scope = given.pop("scope", None) or scope_of(metric)
    _check_homes(scope, (metric,))
    return head.query(
        metric=metric,
        scope=scope,
        start=given.pop("from", None),
        end=given.pop("to", None),
        step=step,
        **given,
    )


def _history(head: HeadInterface, given: dict[str, Any]) -> Awaitable[Answer]:
    scope, metrics = given.pop("scope", "gpu"), given.pop("metrics")
    _check_homes(scope, metrics)
    return head.history(
        scope=scope, metrics=metrics, start=given.pop("from", None), end=given.pop("to", None), **given
    )


def _whole_usage(head: HeadInterface, given: dict[str, Any]) -> Awaitable[UsageReport]:
    return head.usage(start=given.pop("from", None), end=given.pop("to", None), **given)


async def _usage(head: HeadInterface, given: dict[str, Any]) -> UsageReport:
    report = await _whole_usage(head, given)
    is_long = len(report.rows) > _MOST_ROWS
    return msgspec.structs.replace(report, truncated=is_long, rows=report.rows[:_MOST_ROWS])


async def _usage_file(head: HeadInterface, given: dict[str, Any]) -> Download:
    return usage_file(await _whole_usage(head, given))


def _session_file(head: HeadInterface, given: dict[str, Any]) -> Download:
    return head.download(name=given["name"], output_format=_file_format(given))


def _no_document(_head: HeadInterface, _given: dict[str, Any]) -> Document:
    raise RefusedError(400, "a download is a stream, not a document", hint="ask for it as a stream")


def _check_homes(scope: Scope, metrics: Sequence[str]) -> None:
    for metric in metrics:
        if metric not in CATALOGUE[scope]:
            raise RefusedError(
                404, f"a {scope} has no {metric}", hint=f"it is a number of: {', '.join(_homes(metric))}"
            )


def scope_of(metric: str) -> Scope:
    """Whose number a metric is when nobody says: a GPU's if GPUs have it."""
    return _homes(metric)[0]


def _homes(metric: str) -> list[Scope]:
    return [scope for scope, metrics in CATALOGUE.items() if metric in metrics]


def _file_format(given: dict[str, Any]) -> Format:
    return cast("Format", given.get("format", "json"))


OPERATIONS: tuple[Operation, ...] = (
    Operation(
        "info", "GET", ("/",), "Who this is and what it answers.", lambda head, _: head.info(), schemas.INFO
    ),
    Operation(
        "status",
        "GET",
        ("/status",),
        "How the head is, what it stores, who is connected.",
        lambda head, _: head.status(),
        schemas.STATUS,
    ),
    Operation(
        "clients",
        "GET",
        ("/clients",),
        "The connected nodes and their GPUs.",
        lambda head, _: head.clients(),
        schemas.CLIENTS,
    ),
    Operation(
        "latest",
        "GET",
        ("/metrics/latest",),
        "The newest readings of every node that is not lost.",
        lambda head, _: head.latest(),
        schemas.LATEST,
    ),
    Operation(
        "sessions",
        "GET",
        ("/profiling/sessions", "/api/v1/sessions"),
        "All sessions.",
        lambda head, _: head.sessions(),
        schemas.SESSIONS,
    ),
    Operation(
        "session",
        "GET",
        ("/api/v1/sessions/{name}",),
        "One session, by its id or the newest of that name.",
        lambda head, given: head.session(given["name"]),
        schemas.SESSION,
        (_NAME,),
    ),
    Operation(
        "start",
        "POST",
        ("/profiling/start",),
        "Begin a session, in the past when asked to.",
        _start,
        schemas.STARTED,
        (
            _MAYBE_NAME,
            _SINCE,
            _NODES,
            _GPUS,
            f.Field("labels", f.LABELS, "texts by name, to find the session again"),
            _INTERVAL,
        ),
        writes=True,
    ),
    Operation(
        "stop",
        "POST",
        ("/profiling/stop",),
        "End one session, or all that are active, and write their files.",
        lambda head, given: head.stop_sessions(name=given.get("name"), output_format=_file_format(given)),
        schemas.STOPPED,
        (_MAYBE_NAME, _FORMAT),
        writes=True,
    ),
    Operation(
        "recover",
        "POST",
        ("/api/v1/sessions/recover",),
        "Go on with a session that was interrupted.",
        lambda head, given: head.recover_session(name=given.get("name"), session_id=given.get("session_id")),
        schemas.DONE,
        (
            f.Field("name", f.NAME, "the session's name"),
            f.Field("session_id", f.NAME, "the session's id, when several have one name"),
        ),
        any_of=("name", "session_id"),
        writes=True,
    ),
    Operation(
        "export",
        "POST",
        ("/api/v1/sessions/{name}/export",),
        "Write a session's file again, where the head keeps such files.",
        lambda head, given: head.export_session(name=given["name"], output_format=_file_format(given)),
        schemas.DONE,
        (_NAME, _FORMAT),
        writes=True,
    ),
    Operation(
        "download",
        "GET",
        ("/api/v1/sessions/{name}/download",),
        "A session's file.",
        _no_document,
        {},
        (_NAME, _FORMAT),
        fetch=_session_file,
        media_types=(
            "application/json",
            "application/x-ndjson",
            "text/csv",
            "application/vnd.apache.parquet",
        ),
    ),
    Operation(
        "query",
        "GET",
        ("/api/v1/query",),
        "The history of one metric.",
        _query,
        schemas.QUERY,
        (
            f.Field("metric", f.choice(*_METRICS), "a name of the metric catalogue", required=True),
            f.Field("scope", f.choice(*CATALOGUE), "whose number it is; gpu when GPUs have it"),
            _SOME_NODES,
            _SOME_GPUS,
            _FROM,
            _TO,
            f.Field(
                "step",
                f.DURATION,
                "one point for so long, such as 10s; every sample when it is 0 or left out",
            ),
            f.Field(
                "statistic", f.choice(*get_args(Statistic)), "what a point is of its step; mean when left out"
            ),
        ),
    ),
    Operation(
        "history",
        "GET",
        ("/api/v1/history",),
        "Several metrics over time, all at the same moments.",
        _history,
        schemas.HISTORY,
        (
            f.Field(
                "metrics", f.some_of(*_METRICS), "names of the metric catalogue, with commas", required=True
            ),
            f.Field("scope", f.choice(*CATALOGUE), "whose numbers they are; gpu when left out"),
            _SOME_NODES,
            _SOME_GPUS,
            _FROM,
            _TO,
            f.Field("points", f.whole(10, 2000), "the most moments in the answer; 600 when left out"),
            f.Field("spread", f.FLAG_WORD, "also the least and the largest value of each step"),
        ),
    ),
    Operation(
        "processes",
        "GET",
        ("/api/v1/processes",),
        "The processes that held GPUs, newest first.",
        lambda head, given: head.processes(start=given.pop("from", None), end=given.pop("to", None), **given),
        schemas.PROCESSES,
        (
            _FROM,
            _TO,
            _SOME_NODES,
            _SOME_GPUS,
            _USERS,
            f.Field("jobs", f.PARTS, "only these jobs, such as slurm:4711 or harvest:fold"),
        ),
    ),
    Operation(
        "usage",
        "GET",
        ("/api/v1/usage",),
        "Who held GPUs, for how long, and how much of that they did nothing.",
        _usage,
        schemas.USAGE,
        _USAGE_FIELDS,
    ),
    Operation(
        "usage.csv",
        "GET",
        ("/api/v1/usage.csv",),
        "The same as a file.",
        _no_document,
        {},
        _USAGE_FIELDS,
        fetch=_usage_file,
        media_types=("text/csv",),
    ),
    Operation(
        "job",
        "GET",
        ("/api/v1/jobs/{job}",),
        "How well a job, a session or a process used its GPUs.",
        lambda head, given: head.job(start=given.pop("from", None), end=given.pop("to", None), **given),
        schemas.JOB,
        (
            f.Field(
                "job", f.WORD, "a job such as 4711 or slurm:4711, a session's name, or a pid", required=True
            ),
            f.Field(
                "kind",
                f.choice(*get_args(JobKind)),
                "which of them it is; a job, or else a session, when left out",
            ),
            f.Field("node", f.TEXT, "only what was on this node"),
            _FROM,
            _TO,
            f.Field(
                "points", f.whole(0, 2000), "the most moments of what is told over time; none when left out"
            ),
        ),
    ),
    Operation(
        "events",
        "GET",
        ("/api/v1/events",),
        "What happened, oldest first.",
        lambda head, given: head.events(start=given.pop("from", None), end=given.pop("to", None), **given),
        schemas.EVENTS,
        (_FROM, _TO, f.Field("kinds", f.PARTS, "only these kinds of events"), _SOME_NODES),
    ),
    Operation(
        "findings",
        "GET",
        ("/api/v1/findings",),
        "What is wrong now, worst first.",
        lambda head, _: head.findings(),
        schemas.FINDINGS,
    ),
    Operation(
        "finding_spans",
        "GET",
        ("/api/v1/findings/history",),
        "What was wrong at some time of a range, oldest first, each with its own start and end.",
        lambda head, given: head.finding_spans(
            start=given.pop("from", None), end=given.pop("to", None), **given
        ),
        schemas.FINDING_SPANS,
        (_FROM, _TO, _SOME_NODES),
    ),
    Operation(
        "settings",
        "POST",
        ("/api/v1/settings",),
        "Change how agents sample; they follow at once.",
        lambda head, given: head.change_settings(**given),
        schemas.DONE,
        (
            _INTERVAL,
            f.Field("bandwidth", f.FLAG, "whether sessions hold PCIe traffic"),
            f.Field("nvlink", f.FLAG, "whether sessions hold NVLink traffic"),
        ),
        writes=True,
    ),
    Operation(
        "exit",
        "POST",
        ("/api/v1/exit",),
        "End the head, gently; sessions can be recovered.",
        lambda head, _: head.shut_down(),
        schemas.DONE,
        writes=True,
    ),
)

BY_NAME: Mapping[str, Operation] = {operation.name: operation for operation in OPERATIONS}


async def call(
    head: HeadInterface, operation: str, body: Mapping[str, Any], *, now: float
) -> tuple[int, Document]:
    """Check a request, carry it out, and say how it went, as HTTP counts it.

    Args:
        head: Who is asked.
        operation: A name of the table.
        body: The request's fields.
        now: What relative times start from.
    """
    known = BY_NAME.get(operation)
    if known is None:
        return 404, refusal(f"there is no operation {operation[:60]!a}", f"there are: {', '.join(BY_NAME)}")
    try:
        answer = known.run(head, checked(known, body, now))
        return 200, msgspec.to_builtins(await answer if inspect.isawaitable(answer) else answer)
    except Exception as error:  # noqa: BLE001  whatever happens, the caller gets an answer
        return failure(error)


def changes_anything(operation: str) -> bool:
    """Whether an operation changes something, by its name; one that does not exist changes nothing."""
    return any(each.writes for each in OPERATIONS if each.name == operation)


async def fetch(head: HeadInterface, operation: str, body: Mapping[str, Any], *, now: float) -> Download:
    """A file, piece by piece.

    Args:
        head: Who is asked.
        operation: A name of the table whose answer is a file.
        body: The request's fields.
        now: What relative times start from.

    Raises:
        UsageError: The request makes no sense.
        RefusedError: There is no such thing, or not now.
    """
    known = BY_NAME.get(operation)
    if known is None or known.fetch is None:
        files = ", ".join(name for name, other in BY_NAME.items() if other.is_file)
        raise RefusedError(404, f"there is no file {operation[:60]!a}", hint=f"there are: {files}")
    file = known.fetch(head, checked(known, body, now))
    return await file if inspect.isawaitable(file) else file


def checked(operation: Operation, body: Mapping[str, Any], now: float) -> dict[str, Any]:
    """The fields of a request, in the types that the head takes.

    Raises:
        UsageError: The request makes no sense.
    """
    values = f.parse(operation.fields, body, now)
    if operation.any_of and not any(name in values for name in operation.any_of):
        raise UsageError(f"{' or '.join(operation.any_of)} is missing", hint=operation.help)
    return values
