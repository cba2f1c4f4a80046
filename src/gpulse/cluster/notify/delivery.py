"""Client of the delivery process: starts it, hands messages to it, and restarts it if it dies or hangs."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib.util import find_spec
from typing import IO, NamedTuple

from gpulse.cluster.notify.config import Target
from gpulse.cluster.notify.delivery_process import MessageKind
from gpulse.cluster.notify.outbox import Message
from gpulse.cluster.notify.secret_text import MAIL_SCHEMAS, with_recipient
from gpulse.errors import MissingExtraError
from gpulse.model.finding import Severity

MAX_SEND_SECONDS = 60.0
"""After this time an attempt is ended; it is made again later."""
_MAX_ANSWER_SECONDS = MAX_SEND_SECONDS + 60.0
"""A delivery process that has not answered by then is stuck."""
_CHECK_SECONDS = 120.0
_EXIT_SECONDS = 2.0
_PIPE_BYTES = 1 << 20
_COMMAND = (sys.executable, "-m", "gpulse.cluster.notify.delivery_process")
_PROCESS_ENDED = "the delivery process ended before it answered"
_KINDS: Mapping[Severity, MessageKind] = {
    "info": "info",
    "low": "info",
    "medium": "warning",
    "high": "warning",
    "critical": "failure",
}

Answered = Callable[[int, str | None], None]
"""Called with the number of a message, and why it was not accepted; None if it was."""


def has_apprise() -> bool:
    """Return whether the library that sends is installed."""
    return find_spec("apprise") is not None


def require_apprise() -> None:
    """Check that the library that sends is installed.

    Raises:
        MissingExtraError: It is not.
    """
    if not has_apprise():
        raise MissingExtraError("sending notifications", "notify")


def check_targets(targets: Mapping[str, Target]) -> dict[str, str]:
    """Return why messages cannot be sent to targets, by name; empty if all URLs are valid. Nothing is sent."""
    names = list(targets)
    requests = b"".join(
        _encode({"do": "check", "id": number, "url": targets[name].url.reveal()})
        for number, name in enumerate(names)
    )
    answers: dict[int, str | None] = {}
    with suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(  # noqa: S603  our own module
            _COMMAND,
            check=False,
            input=requests,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=_CHECK_SECONDS,
        )
        for line in done.stdout.splitlines():
            answer = json.loads(line)
            answers[answer["id"]] = answer["error"]
    problems = {name: answers.get(number, _PROCESS_ENDED) for number, name in enumerate(names)}
    return {name: problem for name, problem in problems.items() if problem is not None}


def message_url(target: Target, recipient: str | None) -> str:
    """Return the URL that a message is sent to.

    Args:
        target: The target.
        recipient: Mail address that replaces the target's own recipients; ignored for targets other than mail.
    """
    url = target.url.reveal()
    return url if recipient is None or target.schema not in MAIL_SCHEMAS else with_recipient(url, recipient)


class _Attempt(NamedTuple):
    """A message that the process is sending."""

    process: int
    """Number of the process that got it."""
    started: float
    """On the monotonic clock."""


class DeliveryClient:
    """Client of one delivery process. One thread submits; answers come from another thread."""

    def __init__(self, answered: Answered) -> None:
        """Create the client; the process is started when it is first needed.

        Args:
            answered: Called for every submitted message, from a thread of its own.
        """
        self._answered = answered
        self._process: subprocess.Popen[bytes] | None = None
        self._started = 0
        """How many processes were started."""
        self._lock = threading.Lock()
        self._attempts: dict[int, _Attempt] = {}
        self._reader: threading.Thread | None = None

    @property
    def pid(self) -> int | None:
        """The PID of the process; None while it does not run."""
        return self._process.pid if self._process else None

    def submit(self, number: int, url: str, message: Message) -> None:
        """Hand over a message; its answer comes later."""
        line = _encode(
            {
                "do": "send",
                "id": number,
                "url": url,
                "title": message.title,
                "body": message.body,
                "kind": "success" if message.is_resolved else _KINDS[message.severity],
                "max_seconds": MAX_SEND_SECONDS,
            }
        )
        try:
            process = self._ensure()
            with self._lock:
                self._attempts[number] = _Attempt(self._started, time.monotonic())
            assert process.stdin is not None  # noqa: S101  a pipe was requested
            if os.write(process.stdin.fileno(), line) != len(line):
                raise BlockingIOError
        except BlockingIOError:
            self._kill()  # it does not read; the reader reports what it had
        except OSError as error:
            self._answer(number, f"cannot write to the delivery process: {error.strerror}")

    def end_stuck_process(self) -> None:
        """Kill the process if it should have answered long ago."""
        with self._lock:
            oldest = min((attempt.started for attempt in self._attempts.values()), default=None)
        if oldest is not None and time.monotonic() - oldest > _MAX_ANSWER_SECONDS:
            self._kill()

    def close(self) -> None:
        """End the process; messages that it is sending are not answered any more."""
        with self._lock:
            self._attempts.clear()
        self._forget_process()

    def _forget_process(self) -> None:
        """End the process, if it has not ended, and close everything that belongs to it."""
        process, reader = self._process, self._reader
        if process is None:
            return
        if process.stdin is not None:
            with suppress(OSError):
                process.stdin.close()
        try:
            process.wait(_EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if reader is not None:
            reader.join()
        self._process = self._reader = None

    def _ensure(self) -> subprocess.Popen[bytes]:
        """Return the running process; start it if there is none."""
        if self._process is not None and self._process.poll() is None:
            return self._process
        self._forget_process()
        process = subprocess.Popen(  # noqa: S603  our own module
            _COMMAND,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # the library that sends may print URLs
            bufsize=0,
        )
        assert process.stdin is not None and process.stdout is not None  # noqa: PT018, S101  pipes were requested
        with suppress(OSError):
            fcntl.fcntl(process.stdin.fileno(), fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        os.set_blocking(process.stdin.fileno(), False)
        self._process = process
        self._started += 1
        self._reader = threading.Thread(
            target=self._read, args=(process.stdout, self._started), name="notification-answers", daemon=True
        )
        self._reader.start()
        return process

    def _read(self, output: IO[bytes], process_number: int) -> None:
        """Pass on the answers of one process; when it ends, everything that it had has failed."""
        with output:
            for line in output:
                with suppress(ValueError, KeyError, TypeError):
                    answer = json.loads(line)
                    self._answer(int(answer["id"]), answer["error"])
        with self._lock:
            left = [number for number, attempt in self._attempts.items() if attempt.process == process_number]
        for number in left:
            self._answer(number, _PROCESS_ENDED)

    def _answer(self, number: int, error: str | None) -> None:
        with self._lock:
            was_waiting = self._attempts.pop(number, None) is not None
        if was_waiting:
            self._answered(number, error)

    def _kill(self) -> None:
        process = self._process
        if process is not None:
            process.kill()
            process.wait()


def _encode(request: Mapping[str, object]) -> bytes:
    return json.dumps(request).encode() + b"\n"


def send_to_all(messages: Mapping[str, Message], targets: Mapping[str, Target]) -> dict[str, str | None]:
    """Send a message to each target, all at once; return why one failed, or None, by name of the target.

    Args:
        messages: The message for each target, by its name.
        targets: The targets.
    """
    answers: dict[int, str | None] = {}
    changed = threading.Condition()

    def answered(number: int, error: str | None) -> None:
        with changed:
            answers[number] = error
            changed.notify()

    client = DeliveryClient(answered)
    try:
        for number, (name, message) in enumerate(messages.items()):
            client.submit(number, message_url(targets[name], None), message)
        with changed:
            changed.wait_for(lambda: len(answers) == len(messages), _MAX_ANSWER_SECONDS)
    finally:
        client.close()
    return {name: answers.get(number, _PROCESS_ENDED) for number, name in enumerate(messages)}
