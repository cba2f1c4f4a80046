"""What happened from one frame to the next, in words: processes and jobs that came and went, health, findings, clock steps."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Sequence
from typing import Any

from gpulse.model.bounds import bounded_command
from gpulse.model.finding import Finding
from gpulse.model.frame import Frame
from gpulse.model.health import Health
from gpulse.model.job import JOB, JOB_END, Job
from gpulse.model.process import ProcessIdentity, ProcessReading
from gpulse.model.xid import XID, XidLedger

STEP_SECONDS = 1.0
"""A difference between two clocks from which on somebody set one of them."""
FINDINGS_SECONDS = 30.0
"""How often findings are told again when only their numbers have changed."""
NOTHING_FOUND_SECONDS = 45.0
"""How long an agent watches before it reports that it found nothing: a head keeps what an earlier agent found until then."""
_SCRIPTS = (".py", ".sh", ".jl", ".pl", ".rb", ".js", ".lua", ".r", ".ipynb")
_WITHOUT_DIGITS = dict.fromkeys(map(ord, "0123456789"))

Event = dict[str, Any]
_Key = tuple[int, float | None]


class Changes:
    """Takes the frames of one run, one after the other, and gives the events that go with each."""

    def __init__(self, *, version: str, pid: int, full_commands: bool = False) -> None:
        """Know nothing yet.

        Args:
            version: Of gpulse.
            pid: Of the agent.
            full_commands: Tell whole command lines, which may hold secrets.
        """
        self._started: Event = {"event": "agent_started", "version": version, "pid": pid}
        self._is_new = True
        self._again = threading.Event()
        self._full_commands = full_commands
        self._offset: float | None = None
        self._processes: dict[_Key, tuple[ProcessIdentity, bool]] = {}
        self._jobs: dict[str, Job] = {}
        self._xids = XidLedger()
        self._health: tuple[object, ...] = ()
        self._findings: tuple[object, ...] | None = None
        """Those that were told last, None before the first time."""
        self._findings_told = 0.0
        self._began: float | None = None

    def again(self) -> None:
        """Tell everything with the next frame, whatever was told before; may be called from any thread."""
        self._again.set()

    def __call__(self, frame: Frame, findings: Sequence[Finding] = ()) -> list[Event]:
        """The events of the next frame.

        Args:
            frame: The frame.
            findings: What is wrong as of it.
        """
        is_read = frame.host is not None or bool(frame.gpus)  # else it is no end of anything, nor everything
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
        events += [{"event": XID, **xid._asdict()} for xid in self._xids.follow(frame)]
        events += self._health_event(frame.health, whole=whole)
        events += self._findings_event(findings, frame.monotonic, whole=whole)
        return events

    def _clock(self, frame: Frame) -> Iterable[Event]:
        offset = frame.time - frame.monotonic
        before, self._offset = self._offset, offset
        if before is not None and abs(offset - before) > STEP_SECONDS:
            yield {"event": "clock_step", "seconds": round(offset - before, 6)}

    def _process_events(self, readings: Iterable[ProcessReading], *, whole: bool) -> Iterable[Event]:
        now = {_key(reading.identity): (reading.identity, reading.on_gpu) for reading in readings}
        if now == self._processes and not whole:
            return
        for pid, start in self._processes.keys() - now.keys():
            yield {"event": "process_end", "pid": pid, "start_time": start}
        for key, (identity, on_gpu) in now.items():
            if whole or self._processes.get(key) != (identity, on_gpu):
                yield self._process(identity, on_gpu=on_gpu)
        self._processes = now

    def _process(self, identity: ProcessIdentity, *, on_gpu: bool) -> Event:
        command = identity.command if self._full_commands else shortened(identity.command)
        return {
            "event": "process",
            "pid": identity.pid,
            "start_time": identity.start_time,
            "parent_pid": identity.parent_pid,
            "name": identity.name,
            "command": bounded_command(command),
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
        # How long something has been silent is no change.
        now = tuple(entry._replace(detail=entry.detail.translate(_WITHOUT_DIGITS)) for entry in entries)
        if whole or now != self._health:
            self._health = now
            yield {"event": "health", "entries": [_health(entry) for entry in entries]}

    def _findings_event(self, findings: Sequence[Finding], now: float, *, whole: bool) -> Iterable[Event]:
        keys = tuple(
            sorted((item.id, item.label or "", item.cause or "", item.severity) for item in findings)
        )
        self._began = now if self._began is None else self._began
        if (
            self._findings is None
            and not findings
            and not whole
            and now - self._began < NOTHING_FOUND_SECONDS
        ):
            return
        is_old = bool(findings) and now - self._findings_told >= FINDINGS_SECONDS
        if whole or keys != self._findings or is_old:
            self._findings, self._findings_told = keys, now
            yield {
                "event": "findings",
                "findings": [item.to_dict() for item in findings],
                "verdict": findings[0].summary if findings else None,
            }


def _key(identity: ProcessIdentity) -> _Key:
    return identity.pid, identity.start_time


def _health(entry: Health) -> Event:
    return {**entry._asdict(), "metrics": list(entry.metrics)}


def shortened(command: Sequence[str]) -> tuple[str, ...]:
    """Program and script, or module, of a command line: the rest of it may hold secrets."""
    words = os.path.basename(command[0]).split() if command else []
    if not words:
        return ()
    for place, argument in enumerate(command[1:], 1):
        if argument == "-c":  # what follows is a program, not the name of one
            break
        if argument == "-m" and place + 1 < len(command):
            return words[0], "-m", command[place + 1]
        if argument.lower().endswith(_SCRIPTS) and not argument.startswith("-"):
            return words[0], os.path.basename(argument)
    return (words[0],)
