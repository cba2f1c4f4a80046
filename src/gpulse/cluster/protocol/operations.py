"""The table of operations: gRPC, HTTP, the OpenAPI document and the commands read it.

A new operation needs a request type (`requests`), an answer type (`answers`, or `reports` for reports), a method of the head
(`interface`), and a row here.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import msgspec

from gpulse.cluster.protocol import answers as a
from gpulse.cluster.protocol import requests as r
from gpulse.cluster.protocol.codec import Field, decode_request, failure, fields_of, refusal
from gpulse.cluster.protocol.interface import Download, HeadInterface
from gpulse.cluster.protocol.usage_file import usage_file
from gpulse.errors import RefusedError
from gpulse.model.metric import CATALOGUE, Scope
from gpulse.reports.events import EventReport
from gpulse.reports.findings import FindingReport
from gpulse.reports.history import HistoryReport, QueryReport
from gpulse.reports.job_report import JobReport
from gpulse.reports.processes import ProcessReport
from gpulse.reports.usage import UsageReport

Method = Literal["GET", "POST"]
Request = TypeVar("Request", bound=r.Request)

_MAX_USAGE_ROWS = 5000
"""Of an answer about usage; its file has them all."""


class Operation(NamedTuple, Generic[Request]):
    """One thing that a head can be asked to do."""

    name: str
    method: Method
    paths: tuple[str, ...]
    """In HTTP; `{field}` is a field of the request."""
    help: str
    request: type[Request]
    answer: Any
    """The type of the answer; None where the answer is a file."""
    run: Callable[[HeadInterface, Request], Any]
    """Carries it out; returns the answer, or the file where the answer is one."""
    media_types: tuple[str, ...] = ("application/json",)

    @property
    def fields(self) -> Mapping[str, Field]:
        """The fields of its request by name."""
        return fields_of(self.request)

    @property
    def writes(self) -> bool:
        """Whether it changes something."""
        return self.method == "POST"

    @property
    def is_file(self) -> bool:
        """Whether the answer is a file."""
        return self.answer is None

    async def carry_out(self, head: HeadInterface, body: Mapping[str, Any], *, now: float) -> Any:
        """Check a request, carry it out, and return what the head answers.

        Args:
            head: The head.
            body: The request's fields.
            now: What relative times start from.

        Raises:
            UsageError: The request makes no sense.
            RefusedError: The head cannot do it, or not now.
        """
        request = decode_request(self.request, body, now=now, in_address=self.method == "GET")
        result = self.run(head, request)
        return await result if inspect.isawaitable(result) else result


def _query(head: HeadInterface, request: r.QueryMetric) -> Awaitable[QueryReport]:
    scope = request.scope or _scopes_of(request.metric)[0]
    _check_metrics(scope, (request.metric,))
    return head.reports.query(
        msgspec.structs.replace(request, scope=scope, step=request.step or None), head.now()
    )


def _history(head: HeadInterface, request: r.GetHistory) -> Awaitable[HistoryReport]:
    _check_metrics(request.scope, request.metrics)
    return head.reports.history(
        msgspec.structs.replace(request, metrics=tuple(dict.fromkeys(request.metrics))), head.now()
    )


async def _usage(head: HeadInterface, request: r.GetUsage) -> UsageReport:
    report = await head.reports.usage(request, head.now())
    is_long = len(report.rows) > _MAX_USAGE_ROWS
    return msgspec.structs.replace(report, truncated=is_long, rows=report.rows[:_MAX_USAGE_ROWS])


async def _usage_file(head: HeadInterface, request: r.GetUsage) -> Download:
    return usage_file(await head.reports.usage(request, head.now()))


def _check_metrics(scope: Scope, metrics: Sequence[str]) -> None:
    for metric in metrics:
        if metric not in CATALOGUE[scope]:
            raise RefusedError(
                404, f"a {scope} has no {metric}", hint=f"it is a metric of: {', '.join(_scopes_of(metric))}"
            )


def _scopes_of(metric: str) -> list[Scope]:
    """Return what a metric is a number of; GPUs first."""
    return [scope for scope, metrics in CATALOGUE.items() if metric in metrics]


OPERATIONS: tuple[Operation[Any], ...] = (
    Operation(
        "info",
        "GET",
        ("/",),
        "What serves here, and where its API is described.",
        r.NoFields,
        a.Info,
        lambda head, _: head.info(),
    ),
    Operation(
        "status",
        "GET",
        ("/status",),
        "How the head is, what it stores, who is connected.",
        r.NoFields,
        a.Status,
        lambda head, _: head.status(),
    ),
    Operation(
        "clients",
        "GET",
        ("/clients",),
        "The connected nodes and their GPUs.",
        r.NoFields,
        a.Clients,
        lambda head, _: head.clients(),
    ),
    Operation(
        "latest",
        "GET",
        ("/metrics/latest",),
        "The newest readings of every node that is not lost.",
        r.NoFields,
        a.Latest,
        lambda head, _: head.latest(),
    ),
    Operation(
        "sessions",
        "GET",
        ("/profiling/sessions", "/api/v1/sessions"),
        "All sessions.",
        r.NoFields,
        a.Sessions,
        lambda head, _: head.sessions(),
    ),
    Operation(
        "session",
        "GET",
        ("/api/v1/sessions/{name}",),
        "One session, by its id or the newest of that name.",
        r.GetSession,
        a.SessionAnswer,
        lambda head, request: head.session(request),
    ),
    Operation(
        "start",
        "POST",
        ("/profiling/start",),
        "Start a session, in the past when asked to.",
        r.StartSession,
        a.OneSession,
        lambda head, request: head.start_session(request),
    ),
    Operation(
        "stop",
        "POST",
        ("/profiling/stop",),
        "Stop one session, or all that are active, and write their files.",
        r.StopSessions,
        a.SeveralSessions,
        lambda head, request: head.stop_sessions(request),
    ),
    Operation(
        "recover",
        "POST",
        ("/api/v1/sessions/recover",),
        "Go on with a session that was interrupted.",
        r.RecoverSession,
        a.OneSession,
        lambda head, request: head.recover_session(request),
    ),
    Operation(
        "export",
        "POST",
        ("/api/v1/sessions/{name}/export",),
        "Write a session's file again, where the head keeps such files.",
        r.GetSessionFile,
        a.SeveralSessions,
        lambda head, request: head.export_session(request),
    ),
    Operation(
        "download",
        "GET",
        ("/api/v1/sessions/{name}/download",),
        "A session's file.",
        r.GetSessionFile,
        None,
        lambda head, request: head.download(request),
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
        r.QueryMetric,
        QueryReport,
        _query,
    ),
    Operation(
        "history",
        "GET",
        ("/api/v1/history",),
        "Several metrics over time, all at the same times.",
        r.GetHistory,
        HistoryReport,
        _history,
    ),
    Operation(
        "processes",
        "GET",
        ("/api/v1/processes",),
        "The processes that held GPUs, newest first.",
        r.GetProcesses,
        ProcessReport,
        lambda head, request: head.reports.processes(request, head.now()),
    ),
    Operation(
        "usage",
        "GET",
        ("/api/v1/usage",),
        "Who held GPUs, for how long, and how long those were idle.",
        r.GetUsage,
        UsageReport,
        _usage,
    ),
    Operation(
        "usage.csv",
        "GET",
        ("/api/v1/usage.csv",),
        "The same as a file.",
        r.GetUsage,
        None,
        _usage_file,
        media_types=("text/csv",),
    ),
    Operation(
        "job",
        "GET",
        ("/api/v1/jobs/{job}",),
        "How well a job, a session or a process used its GPUs.",
        r.GetJob,
        JobReport,
        lambda head, request: head.reports.job(request, head.now()),
    ),
    Operation(
        "events",
        "GET",
        ("/api/v1/events",),
        "What happened, oldest first.",
        r.GetEvents,
        EventReport,
        lambda head, request: head.reports.events(request, head.now()),
    ),
    Operation(
        "findings",
        "GET",
        ("/api/v1/findings",),
        "What is wrong now, worst first.",
        r.NoFields,
        a.Findings,
        lambda head, _: head.findings(),
    ),
    Operation(
        "finding_spans",
        "GET",
        ("/api/v1/findings/history",),
        "What was wrong at some time of a range, oldest first, each with its own start and end.",
        r.GetFindingSpans,
        FindingReport,
        lambda head, request: head.reports.finding_spans(request, head.now()),
    ),
    Operation(
        "settings",
        "POST",
        ("/api/v1/settings",),
        "Change how agents sample; they follow at once.",
        r.ChangeSettings,
        a.SettingsChanged,
        lambda head, request: head.change_settings(request),
    ),
    Operation(
        "exit",
        "POST",
        ("/api/v1/exit",),
        "Stop the head; sessions can be recovered.",
        r.NoFields,
        a.Done,
        lambda head, _: head.shut_down(),
    ),
)

BY_NAME: Mapping[str, Operation[Any]] = {operation.name: operation for operation in OPERATIONS}


async def call(
    head: HeadInterface, operation: str, body: Mapping[str, Any], *, now: float
) -> tuple[int, msgspec.Struct]:
    """Check a request, carry it out, and return the HTTP status and the answer.

    Args:
        head: The head.
        operation: A name of the table.
        body: The request's fields.
        now: What relative times start from.
    """
    known = BY_NAME.get(operation)
    if known is None:
        return 404, refusal(f"there is no operation {operation[:60]!a}", f"there are: {', '.join(BY_NAME)}")
    try:
        if known.is_file:
            raise RefusedError(400, "a download is a stream, not a document", hint="ask for it as a stream")
        return 200, await known.carry_out(head, body, now=now)
    except Exception as error:  # noqa: BLE001  whatever happens, the caller gets an answer
        return failure(error)


async def fetch(head: HeadInterface, operation: str, body: Mapping[str, Any], *, now: float) -> Download:
    """Return a file, to be read piece by piece.

    Args:
        head: The head.
        operation: A name of the table whose answer is a file.
        body: The request's fields.
        now: What relative times start from.

    Raises:
        UsageError: The request makes no sense.
        RefusedError: There is no such file, or not now.
    """
    known = BY_NAME.get(operation)
    if known is None or not known.is_file:
        files = ", ".join(name for name, other in BY_NAME.items() if other.is_file)
        raise RefusedError(404, f"there is no file {operation[:60]!a}", hint=f"there are: {files}")
    file: Download = await known.carry_out(head, body, now=now)
    return file


def changes_anything(operation: str) -> bool:
    """Return whether an operation changes something, by its name; one that does not exist changes nothing."""
    return any(each.writes for each in OPERATIONS if each.name == operation)
