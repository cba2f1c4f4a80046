"""Table of the head's operations, from which gRPC, HTTP, the OpenAPI document and the commands are driven.

A new operation needs a request type (`requests`), an answer type (`answers`, or `reports` for reports), a method of the head
(`head_interface`), and a row here.

Whoever may change something at a head is trusted with the code that its agents see. Everybody else gets the same findings
without `where` and `where_note`, whose texts name files and functions.
"""

from __future__ import annotations

import csv
import inspect
import io
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import msgspec
from msgspec import UNSET
from msgspec.structs import replace

from gpulse.cluster.protocol import answers as a
from gpulse.cluster.protocol import requests as r
from gpulse.cluster.protocol.codec import (
    RequestField,
    answer_for_exception,
    decode_request,
    error_answer,
    fields_of,
)
from gpulse.cluster.protocol.head_interface import Download, HeadInterface
from gpulse.errors import RefusedError
from gpulse.model.finding import without_code
from gpulse.model.metric_catalog import CATALOG, Scope
from gpulse.model.safe_text import csv_cell, quoted
from gpulse.model.time_text import format_iso_seconds
from gpulse.reports.event_report import EventReport, EventRow
from gpulse.reports.finding_report import FindingGroupRow, FindingGroups, FindingReport, ReportedFinding
from gpulse.reports.job_report import JobReport
from gpulse.reports.metric_history import HistoryReport, QueryReport
from gpulse.reports.process_report import ProcessReport
from gpulse.reports.run_comparison import RunComparison
from gpulse.reports.usage_report import UsageReport, UsageRow

USAGE_COLUMNS = UsageRow.__struct_fields__
_TIME_COLUMNS = frozenset({"start_time", "first", "last"})
_ROWS_PER_CHUNK = 500
CODE_ANSWERS = frozenset({a.Status, a.Findings, FindingGroups, FindingReport, JobReport, EventReport})
"""Types of answers that may have lines of code and are open to readers."""

_Finding = TypeVar("_Finding", a.NodeFinding, ReportedFinding, FindingGroupRow)


def make_usage_csv(report: UsageReport) -> Download:
    """Return a usage report as a CSV file; an empty cell is an unknown value."""
    name = f"gpulse-usage-{_file_timestamp(report.start)}-{_file_timestamp(report.end)}.csv"
    return Download(name, "text/csv", _csv_chunks(report.rows))


async def _csv_chunks(rows: Sequence[UsageRow]) -> AsyncIterator[bytes]:
    yield _csv_lines([USAGE_COLUMNS])
    for place in range(0, len(rows), _ROWS_PER_CHUNK):
        yield _csv_lines(
            [
                [_usage_cell(row, name) for name in USAGE_COLUMNS]
                for row in rows[place : place + _ROWS_PER_CHUNK]
            ]
        )


def _csv_lines(rows: Sequence[Sequence[Any]]) -> bytes:
    stream = io.StringIO()
    csv.writer(stream, lineterminator="\n").writerows(rows)
    return stream.getvalue().encode("utf-8", "replace")


def _usage_cell(row: UsageRow, name: str) -> Any:
    value = getattr(row, name)
    if name == "nodes":
        value = " ".join(value)
    elif name in _TIME_COLUMNS and value is not None:
        value = format_iso_seconds(value)
    return csv_cell(value) if isinstance(value, str) else value


def _file_timestamp(seconds: float) -> str:
    return format_iso_seconds(seconds).replace("-", "").replace(":", "")


Method = Literal["GET", "POST"]
Request = TypeVar("Request", bound=r.Request)

_MAX_USAGE_ROWS = 5000
"""Maximum number of rows in a usage answer; the CSV file has all rows."""


class Operation(NamedTuple, Generic[Request]):
    """One operation of a head."""

    name: str
    method: Method
    paths: tuple[str, ...]
    """HTTP paths; `{field}` is a field of the request."""
    help: str
    request: type[Request]
    answer: Any
    """The type of the answer; None if the answer is a file."""
    run: Callable[[HeadInterface, Request], Any]
    """Runs the operation; returns the answer or the file."""
    media_types: tuple[str, ...] = ("application/json",)
    run_for_readers: Callable[[HeadInterface, Request], Any] | None = None
    """Runs it for callers who may only read, if `hide_code` is not enough for them."""

    @property
    def fields(self) -> Mapping[str, RequestField]:
        """Fields of its request by name."""
        return fields_of(self.request)

    @property
    def writes(self) -> bool:
        """Whether it changes something."""
        return self.method == "POST"

    @property
    def is_file(self) -> bool:
        """Whether the answer is a file."""
        return self.answer is None

    @property
    def is_shared(self) -> bool:
        """Whether all callers with the same rights get the same answer."""
        return not self.writes and not self.is_file and self.request is r.NoFields

    @property
    def hides_code(self) -> bool:
        """Whether callers who may only read get less than others."""
        return self.run_for_readers is not None or self.answer in CODE_ANSWERS

    async def carry_out(
        self, head: HeadInterface, body: Mapping[str, Any], *, now: float, is_trusted: bool = False
    ) -> Any:
        """Validate a request, run the operation, and return the head's answer.

        Args:
            head: The head.
            body: The request's fields.
            now: The time that relative times refer to.
            is_trusted: Whether the caller may change something, and not only read.

        Raises:
            UsageError: The request is invalid.
            RefusedError: The head refuses the request.
        """
        request = decode_request(self.request, body, now=now, in_address=self.method == "GET")
        run = self.run if is_trusted or self.run_for_readers is None else self.run_for_readers
        result = run(head, request)
        answer = await result if inspect.isawaitable(result) else result
        return answer if is_trusted else hide_code(answer)


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
    return make_usage_csv(await head.reports.usage(request, head.now()))


def _check_metrics(scope: Scope, metrics: Sequence[str]) -> None:
    for metric in metrics:
        if metric not in CATALOG[scope]:
            raise RefusedError(
                404,
                f"the scope {scope} has no metric {metric}",
                hint=f"use one of the scopes with this metric: {', '.join(_scopes_of(metric))}",
            )


def _scopes_of(metric: str) -> list[Scope]:
    """Return the scopes of a metric; gpu first."""
    return [scope for scope, metrics in CATALOG.items() if metric in metrics]


OPERATIONS: tuple[Operation[Any], ...] = (
    Operation(
        "info",
        "GET",
        ("/",),
        "Name and version of the server, and the path of its API description.",
        r.NoFields,
        a.Info,
        lambda head, _: head.info(),
    ),
    Operation(
        "status",
        "GET",
        ("/status",),
        "Status of the head, its storage, its nodes and its sessions.",
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
        "The newest sample of every node that is not lost.",
        r.NoFields,
        a.Latest,
        lambda head, _: head.latest(),
    ),
    Operation(
        "hardware",
        "GET",
        ("/api/v1/nodes/{name}/hardware",),
        "Hardware of a node: driver, CPUs, GPUs, and the connections between the GPUs.",
        r.GetHardware,
        a.NodeHardware,
        lambda head, request: head.hardware(request),
    ),
    Operation(
        "gpus",
        "GET",
        ("/api/v1/gpus",),
        "Current state of every GPU, and the processes that hold it.",
        r.NoFields,
        a.ClusterOccupancy,
        lambda head, _: head.gpus(),
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
        "One session by its ID, or the newest session with a given name.",
        r.GetSession,
        a.SessionAnswer,
        lambda head, request: head.session(request),
    ),
    Operation(
        "compare",
        "GET",
        ("/api/v1/sessions/{before}/compare",),
        "Compare two sessions: what changed, and whether each change is an improvement.",
        r.CompareSessions,
        RunComparison,
        lambda head, request: head.reports.compare_sessions(request, head.now()),
    ),
    Operation(
        "start",
        "POST",
        ("/profiling/start",),
        "Start a session; its start time can be in the past.",
        r.StartSession,
        a.OneSession,
        lambda head, request: head.start_session(request),
    ),
    Operation(
        "stop",
        "POST",
        ("/profiling/stop",),
        "Stop one session or all active ones, and write their files.",
        r.StopSessions,
        a.SeveralSessions,
        lambda head, request: head.stop_sessions(request),
    ),
    Operation(
        "recover",
        "POST",
        ("/api/v1/sessions/recover",),
        "Resume an interrupted session.",
        r.RecoverSession,
        a.OneSession,
        lambda head, request: head.recover_session(request),
    ),
    Operation(
        "export",
        "POST",
        ("/api/v1/sessions/{name}/export",),
        "Write a session's file again, in the head's output directory.",
        r.GetSessionFile,
        a.SeveralSessions,
        lambda head, request: head.export_session(request),
    ),
    Operation(
        "download",
        "GET",
        ("/api/v1/sessions/{name}/download",),
        "Download a session's file.",
        r.GetSessionFile,
        None,
        lambda head, request: head.download(request),
        media_types=(
            "application/json",
            "application/x-ndjson",
            "text/csv",
            "application/vnd.apache.parquet",
        ),
        run_for_readers=lambda head, request: head.download(request, with_code=False),
    ),
    Operation(
        "query",
        "GET",
        ("/api/v1/query",),
        "History of one metric.",
        r.QueryMetric,
        QueryReport,
        _query,
    ),
    Operation(
        "history",
        "GET",
        ("/api/v1/history",),
        "History of several metrics, with common timestamps.",
        r.GetHistory,
        HistoryReport,
        _history,
    ),
    Operation(
        "processes",
        "GET",
        ("/api/v1/processes",),
        "Processes that held GPUs, newest first.",
        r.GetProcesses,
        ProcessReport,
        lambda head, request: head.reports.processes(request, head.now()),
    ),
    Operation(
        "usage",
        "GET",
        ("/api/v1/usage",),
        "GPU time by user or job: how long GPUs were held, and how long they were idle while held.",
        r.GetUsage,
        UsageReport,
        _usage,
    ),
    Operation(
        "usage.csv",
        "GET",
        ("/api/v1/usage.csv",),
        "The usage report as a CSV file.",
        r.GetUsage,
        None,
        _usage_file,
        media_types=("text/csv",),
    ),
    Operation(
        "job",
        "GET",
        ("/api/v1/jobs/{job}",),
        "Report on how well a job, a session or a process used its GPUs.",
        r.GetJob,
        JobReport,
        lambda head, request: head.reports.job(request, head.now()),
    ),
    Operation(
        "events",
        "GET",
        ("/api/v1/events",),
        "Events of a time range, oldest first.",
        r.GetEvents,
        EventReport,
        lambda head, request: head.reports.events(request, head.now()),
    ),
    Operation(
        "findings",
        "GET",
        ("/api/v1/findings",),
        "Current findings, worst first.",
        r.NoFields,
        a.Findings,
        lambda head, _: head.findings(),
    ),
    Operation(
        "finding_groups",
        "GET",
        ("/api/v1/findings/groups",),
        "Findings grouped by cause: current findings (faults first) or past findings (newest first).",
        r.GetFindingGroups,
        FindingGroups,
        lambda head, request: head.finding_operations.groups(request),
    ),
    Operation(
        "acknowledge",
        "POST",
        ("/api/v1/findings/acknowledge",),
        "Acknowledge current findings; an acknowledgement lasts as long as the finding.",
        r.AcknowledgeFindings,
        a.AcknowledgedFindings,
        lambda head, request: head.finding_operations.acknowledge(request),
    ),
    Operation(
        "silences",
        "GET",
        ("/api/v1/silences",),
        "Active silences, ordered by end time.",
        r.NoFields,
        a.Silences,
        lambda head, _: head.finding_operations.silences(),
    ),
    Operation(
        "silence",
        "POST",
        ("/api/v1/silences",),
        "Silence findings until a time, with a reason.",
        r.SilenceFindings,
        a.SilenceAnswer,
        lambda head, request: head.finding_operations.silence(request),
    ),
    Operation(
        "end_silence",
        "POST",
        ("/api/v1/silences/{silence}/end",),
        "End a silence early.",
        r.EndSilence,
        a.SilenceAnswer,
        lambda head, request: head.finding_operations.end_silence(request),
    ),
    Operation(
        "finding_spans",
        "GET",
        ("/api/v1/findings/history",),
        "Findings of a time range, oldest first, each with its start and end.",
        r.GetFindingSpans,
        FindingReport,
        lambda head, request: head.reports.finding_spans(request, head.now()),
    ),
    Operation(
        "fleet_trends",
        "GET",
        ("/api/v1/fleet/trends",),
        "Utilization of every GPU in the last 15 minutes, in steps of 15 seconds.",
        r.NoFields,
        a.FleetTrends,
        lambda head, _: head.fleet_trends(),
    ),
    Operation(
        "fleet_totals",
        "GET",
        ("/api/v1/fleet/totals",),
        "Number of GPUs that are busy, held idle, free or faulty, with power and GPU-hours, now and over the last 24 hours.",
        r.NoFields,
        a.FleetTotals,
        lambda head, _: head.fleet_totals(),
    ),
    Operation(
        "stacks",
        "POST",
        ("/api/v1/stacks",),
        "Read the current stacks of Python processes on GPUs, with identical stacks grouped; requires agents started with --lines.",
        r.ReadStacks,
        a.Stacks,
        lambda head, request: head.read_stacks(request),
    ),
    Operation(
        "settings",
        "POST",
        ("/api/v1/settings",),
        "Change the sampling settings of all agents, effective immediately.",
        r.ChangeSettings,
        a.SettingsChanged,
        lambda head, request: head.change_settings(request),
    ),
    Operation(
        "exit",
        "POST",
        ("/api/v1/exit",),
        "Stop the head; active sessions are interrupted and can be resumed later.",
        r.NoFields,
        a.Done,
        lambda head, _: head.shut_down(),
    ),
)

OPERATIONS_BY_NAME: Mapping[str, Operation[Any]] = {operation.name: operation for operation in OPERATIONS}


async def call_operation(
    head: HeadInterface, operation: str, body: Mapping[str, Any], *, now: float, is_trusted: bool = False
) -> tuple[int, msgspec.Struct]:
    """Validate a request, run the operation, and return the HTTP status and the answer.

    Args:
        head: The head.
        operation: Name of the operation.
        body: The request's fields.
        now: The time that relative times refer to.
        is_trusted: Whether the caller may change something, and not only read.
    """
    known = OPERATIONS_BY_NAME.get(operation)
    if known is None:
        return 404, error_answer(
            f"there is no operation {quoted(operation)}",
            f"use one of: {', '.join(OPERATIONS_BY_NAME)}",
        )
    try:
        if known.is_file:
            raise RefusedError(
                400, "the answer of this operation is a file", hint="use the Download call instead"
            )
        return 200, await known.carry_out(head, body, now=now, is_trusted=is_trusted)
    except Exception as error:  # noqa: BLE001  the caller always gets an answer
        return answer_for_exception(error)


async def open_download(
    head: HeadInterface, operation: str, body: Mapping[str, Any], *, now: float, is_trusted: bool = False
) -> Download:
    """Return a file to download in pieces.

    Args:
        head: The head.
        operation: Name of an operation whose answer is a file.
        body: The request's fields.
        now: The time that relative times refer to.
        is_trusted: Whether the caller may change something, and not only read.

    Raises:
        UsageError: The request is invalid.
        RefusedError: The operation is unknown, or the head refuses the request.
    """
    known = OPERATIONS_BY_NAME.get(operation)
    if known is None or not known.is_file:
        files = ", ".join(name for name, other in OPERATIONS_BY_NAME.items() if other.is_file)
        raise RefusedError(404, f"there is no download {quoted(operation)}", hint=f"use one of: {files}")
    file: Download = await known.carry_out(head, body, now=now, is_trusted=is_trusted)
    return file


def hides_from_readers(operation: str) -> bool:
    """Return whether callers who may only read get less than others; False if there is no such operation."""
    known = OPERATIONS_BY_NAME.get(operation)
    return known is not None and known.hides_code


def is_write_operation(operation: str) -> bool:
    """Return whether an operation changes something; False if it does not exist."""
    return any(each.writes for each in OPERATIONS if each.name == operation)


def hide_code(answer: Any) -> Any:
    """Return an answer of one of `CODE_ANSWERS` without lines of code, any other one as it is."""
    match answer:
        case a.Status() | a.Findings() | JobReport():
            return replace(answer, findings=_without_code(answer.findings))
        case FindingGroups():
            return replace(answer, groups=_without_code(answer.groups))
        case FindingReport():
            return replace(answer, spans=_without_code(answer.spans))
        case EventReport():
            return replace(answer, events=[_event_without_code(event) for event in answer.events])
    return answer


def _without_code(findings: Sequence[_Finding]) -> list[_Finding]:
    return [replace(finding, where=UNSET, where_note=UNSET) for finding in findings]


def _event_without_code(event: EventRow) -> EventRow:
    """Return an event without lines of code; those of findings have the reported findings as they came."""
    listed = event.detail.get("findings")
    if not isinstance(listed, list):
        return event
    found = [without_code(item) if isinstance(item, dict) else item for item in listed]
    return replace(event, detail={**event.detail, "findings": found})
