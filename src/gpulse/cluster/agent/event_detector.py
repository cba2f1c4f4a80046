"""Detect events between frames: processes and jobs that start or end, health, findings, Xid errors, clock steps."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Sequence
from typing import Any

from gpulse.model.finding import CodeLocation, Finding
from gpulse.model.frame import Frame
from gpulse.model.job import JOB, JOB_END, Job
from gpulse.model.message_limits import (
    MAX_CODE_LOCATIONS,
    MAX_FUNCTION_CHARS,
    bound_code_text,
    bound_command,
    bound_name,
    bound_path,
)
from gpulse.model.process import ProcessIdentity, ProcessReading
from gpulse.model.source_health import Health
from gpulse.model.xid import MAX_XID_HOLDERS, XID_EVENT, XidCounts, XidErrors

MIN_CLOCK_STEP_SECONDS = 1.0
"""A change between wall clock and monotonic clock of more than this means that the clock was set."""
FINDINGS_REPEAT_SECONDS = 30.0
"""Findings are repeated this often when only their numbers have changed."""
FIRST_COMPLETE_REPORT_SECONDS = 45.0
"""An agent's reports are complete after this long; until then the head keeps the other findings of the earlier run."""
_SCRIPT_SUFFIXES = (".py", ".sh", ".jl", ".pl", ".rb", ".js", ".lua", ".r", ".ipynb")
_WITHOUT_DIGITS = dict.fromkeys(map(ord, "0123456789"))

Event = dict[str, Any]
_Key = tuple[int, float | None]


class EventDetector:
    """Derives the events of each frame of one run from the frames before it."""

    def __init__(self, *, version: str, pid: int, full_commands: bool = False) -> None:
        """Start without a previous frame.

        Args:
            version: Version of gpulse.
            pid: Process ID of the agent.
            full_commands: Report full command lines, which may contain secrets.
        """
        self._started: Event = {"event": "agent_started", "version": version, "pid": pid}
        self._is_new = True
        self._again = threading.Event()
        self._full_commands = full_commands
        self._offset: float | None = None
        self._processes: dict[_Key, tuple[ProcessIdentity, bool]] = {}
        self._jobs: dict[str, Job] = {}
        self._xids = XidCounts()
        self._last: Frame | None = None
        self._health: tuple[object, ...] = ()
        self._findings: tuple[object, ...] | None = None
        """The findings reported last; None before the first report."""
        self._findings_reported = 0.0
        self._was_complete = False
        """Whether the last report was complete."""
        self._began: float | None = None

    def again(self) -> None:
        """Report everything again with the next frame; may be called from any thread."""
        self._again.set()

    def __call__(self, frame: Frame, findings: Sequence[Finding] = ()) -> list[Event]:
        """Return the events of the next frame.

        Args:
            frame: The frame.
            findings: The findings as of this frame.
        """
        is_read = frame.host is not None or bool(
            frame.gpus
        )  # an empty frame does not mean that anything ended
        whole = is_read and self._again.is_set()
        if whole:
            self._again.clear()
        events: list[Event] = []
        if whole or self._is_new:
            events.append(self._started)
            self._is_new = False
        events += self._clock(frame)
        if is_read:
            events += self._process_events(frame.processes, whole=whole)
            events += self._job_events(frame.jobs, whole=whole)
        events += [self._xid(xid, frame) for xid in self._xids.follow(frame)]
        self._last = frame
        events += self._health_event(frame.health, whole=whole)
        events += self._findings_event(findings, frame.monotonic, whole=whole)
        return events

    def _xid(self, xid: XidErrors, frame: Frame) -> Event:
        """Return the event about an Xid error, with the processes on the GPU, which the error may have ended."""
        frames = [frame] if self._last is None else [frame, self._last]
        known = {process.pid: process.identity for one in reversed(frames) for process in one.processes}
        held = [
            gpu.processes
            for one in frames
            for gpu in one.gpus
            if xid.uuid in (gpu.device.uuid, gpu.device.parent_uuid)
        ]
        if all(processes is None for processes in held):
            return _xid_event(xid)
        pids = dict.fromkeys(process.pid for processes in held for process in processes or ())
        holders = [
            _xid_holder(known.get(pid) or ProcessIdentity(pid)) for pid in list(pids)[:MAX_XID_HOLDERS]
        ]
        return {**_xid_event(xid), "holders": holders}

    def _clock(self, frame: Frame) -> Iterable[Event]:
        offset = frame.time - frame.monotonic
        before, self._offset = self._offset, offset
        if before is not None and abs(offset - before) > MIN_CLOCK_STEP_SECONDS:
            yield {"event": "clock_step", "seconds": round(offset - before, 6)}

    def _process_events(self, readings: Iterable[ProcessReading], *, whole: bool) -> Iterable[Event]:
        now = {_process_key(reading.identity): (reading.identity, reading.on_gpu) for reading in readings}
        if now == self._processes and not whole:
            return
        for pid, start in self._processes.keys() - now.keys():
            yield {"event": "process_end", "pid": pid, "start_time": start}
        for key, (identity, on_gpu) in now.items():
            if whole or self._processes.get(key) != (identity, on_gpu):
                yield self._process(identity, on_gpu=on_gpu)
        self._processes = now

    def _process(self, identity: ProcessIdentity, *, on_gpu: bool) -> Event:
        command = identity.command if self._full_commands else shorten_command(identity.command)
        return {
            "event": "process",
            "pid": identity.pid,
            "start_time": identity.start_time,
            "parent_pid": identity.parent_pid,
            "name": identity.name,
            "command": bound_command(command),
            "owner": identity.owner._asdict(),
            "on_gpu": on_gpu,
        }

    def _job_events(self, jobs: Sequence[Job], *, whole: bool) -> Iterable[Event]:
        now = {job.id: job for job in jobs}
        for number in self._jobs.keys() - now.keys():
            yield {"event": JOB_END, "job": number}
        for number, job in now.items():
            if whole or self._jobs.get(number) != job:
                yield {"event": JOB, **job._asdict(), "gpus": list(job.gpus)}
        self._jobs = now

    def _health_event(self, entries: Sequence[Health], *, whole: bool) -> Iterable[Event]:
        # A change of a duration in the text is not a new event.
        now = tuple(entry._replace(detail=entry.detail.translate(_WITHOUT_DIGITS)) for entry in entries)
        if whole or now != self._health:
            self._health = now
            yield {"event": "health", "entries": [_health_document(entry) for entry in entries]}

    def _findings_event(self, findings: Sequence[Finding], now: float, *, whole: bool) -> Iterable[Event]:
        keys = tuple(
            sorted(
                (item.id, item.label or "", item.cause or "", item.severity, _first_line(item))
                for item in findings
            )
        )
        self._began = now if self._began is None else self._began
        is_complete = now - self._began >= FIRST_COMPLETE_REPORT_SECONDS
        if self._findings is None and not findings and not whole and not is_complete:
            return
        is_old = bool(findings) and now - self._findings_reported >= FINDINGS_REPEAT_SECONDS
        if whole or keys != self._findings or is_old or is_complete != self._was_complete:
            self._findings, self._findings_reported, self._was_complete = keys, now, is_complete
            yield {
                "event": "findings",
                "findings": [_finding_document(item) for item in findings],
                "verdict": findings[0].summary if findings else None,
                **({} if is_complete else {"watched_seconds": round(now - self._began, 3)}),
            }


def _xid_event(xid: XidErrors) -> Event:
    return {"event": XID_EVENT, **{name: value for name, value in xid._asdict().items() if value is not None}}


def _process_key(identity: ProcessIdentity) -> _Key:
    return identity.pid, identity.start_time


def _xid_holder(identity: ProcessIdentity) -> Event:
    program = shorten_command(identity.command)
    name = " ".join(program) if program else identity.name
    return {"pid": identity.pid, "user": identity.owner.user, "name": name and bound_name(name)}


def _first_line(finding: Finding) -> str:
    """Return the line that a finding names first: a change of its share alone is not a new event."""
    if not finding.where:
        return "" if finding.where is None else "none"
    first = finding.where[0]
    return f"{first.file}:{first.line}"


def _finding_document(finding: Finding) -> Event:
    """Return a finding as JSON types, with its lines of code within the size limits of heads."""
    note = finding.where_note
    return finding._replace(
        where=None
        if finding.where is None
        else tuple(map(_bound_location, finding.where[:MAX_CODE_LOCATIONS])),
        where_note=None if note is None else bound_code_text(note),
    ).to_dict()


def _bound_location(place: CodeLocation) -> CodeLocation:
    return place._replace(
        file=bound_path(place.file),
        function=bound_code_text(place.function, MAX_FUNCTION_CHARS),
        doing=None if place.doing is None else bound_code_text(place.doing),
    )


def _health_document(entry: Health) -> Event:
    return {**entry._asdict(), "metrics": list(entry.metrics)}


def shorten_command(command: Sequence[str]) -> tuple[str, ...]:
    """Return only program and script, or module, of a command line: the rest may contain secrets."""
    words = os.path.basename(command[0]).split() if command else []
    if not words:
        return ()
    for place, argument in enumerate(command[1:], 1):
        if argument == "-c":  # code follows, not a script name
            break
        if argument == "-m" and place + 1 < len(command):
            return words[0], "-m", command[place + 1]
        if argument.lower().endswith(_SCRIPT_SUFFIXES) and not argument.startswith("-"):
            return words[0], os.path.basename(argument)
    return (words[0],)
