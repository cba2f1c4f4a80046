"""Read Python stacks for an agent: the lines of code behind its findings, and the answers to a head's requests for stacks."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

from gpulse.cluster.protocol.stack_codec import encode_stacks
from gpulse.cluster.wire_pb2 import StackAnswer, StackRequest
from gpulse.diagnosis.line_search import LiveLines
from gpulse.diagnosis.stack_groups import list_processes
from gpulse.model.finding import Finding
from gpulse.model.frame import Frame
from gpulse.model.message_limits import bound_code_text
from gpulse.sampling.stack_collector import collect_with
from gpulse.sources.python_stacks import StackReader, describe_missing_py_spy, find_py_spy, read_all

_log = logging.getLogger(__name__)

ANSWER_SECONDS = 8.0
"""Time for reading all processes; heads wait a little longer."""


class StackAnswers:
    """Reads the stacks that heads ask for; one request at a time."""

    def __init__(self, reader: StackReader) -> None:
        self._reader = reader
        self._lock = threading.Lock()
        self._stuck: tuple[threading.Thread, ...] = ()
        """Threads of the last request that were still reading when its time was over."""

    def answer(self, request: StackRequest, frame: Frame | None) -> StackAnswer:
        """Return the answer to a request; this takes up to `ANSWER_SECONDS`.

        Args:
            request: The request.
            frame: The newest frame, which has the processes; None if there is none yet.
        """
        if not self._lock.acquire(blocking=False):
            return _refuse(request, "this agent is still answering another request for stacks")
        try:
            stuck = sum(thread.is_alive() for thread in self._stuck)
            if stuck:
                processes = "1 process" if stuck == 1 else f"{stuck} processes"
                return _refuse(
                    request, f"this agent is still reading the stacks of {processes} for an earlier request"
                )
            if frame is None:
                return _refuse(request, "this agent has not taken a sample yet")
            chosen = list_processes(frame, request.job or None)
            found = read_all([process.pid for process in chosen], self._reader, ANSWER_SECONDS)
            self._stuck = found.stuck
            encoded = encode_stacks(list(zip(chosen, found.stacks, strict=True)))
            return StackAnswer(id=request.id, processes=encoded)
        except Exception as error:  # noqa: BLE001  the head would wait for an answer
            return _refuse(request, bound_code_text(f"internal error (a bug in gpulse): {error!r}"))
        finally:
            self._lock.release()


class LineCollection:
    """Reads the stacks of processes whose findings are in their code, and adds the lines to the findings.

    The sampling thread calls it with every frame and never waits: py-spy runs in a thread of its own.
    """

    def __init__(self) -> None:
        """Look for py-spy; nothing is read before a finding needs it."""
        py_spy = find_py_spy()
        if py_spy is None:
            _log.warning("findings will not name lines of code: %s", describe_missing_py_spy().sentence)
        reader = StackReader(py_spy)
        self.answers = StackAnswers(reader)
        """Answers a head's requests for stacks."""
        self._collector = collect_with(reader)
        self._lines = LiveLines(self._collector.watch, self._collector.take)

    def __call__(self, frame: Frame, findings: Sequence[Finding]) -> Sequence[Finding]:
        """Return the findings of a frame with their lines of code, as far as these are known."""
        return self._lines(frame, findings)

    def close(self) -> None:
        """Stop reading; a read in progress is waited for, at most for a few seconds."""
        self._collector.close()


def _refuse(request: StackRequest, reason: str) -> StackAnswer:
    return StackAnswer(id=request.id, refusal=reason)
