"""Process that delivers messages: `python -m gpulse.cluster.notify.delivery_process`.

It reads one JSON object per line from standard input, and answers each with one line on standard output. Every message
is sent by a child process of its own, which is killed at its deadline: a server that hangs delays nobody else, and
sends nothing later. It exits when its input is closed. It writes nothing else anywhere, because the library that sends
writes URLs, and so secrets, to its log.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import selectors
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Literal, NamedTuple, Self
from urllib.parse import parse_qsl, urlsplit, urlunsplit

from gpulse.cluster.notify.secret_text import MAIL_SCHEMAS, redact, url_schema
from gpulse.model.safe_text import one_line

_PR_SET_PDEATHSIG = 1
_MAX_REPLY_BYTES = 65_536
_READ_BYTES = 65_536
_NICE = 10
MessageKind = Literal["info", "success", "warning", "failure"]
CONNECT_SECONDS = 15.0
READ_SECONDS = 30.0
"""How long a server may take to accept a message; a message that is accepted later is sent twice."""
_MAX_ERROR_CHARACTERS = 300


def load_plugins() -> None:
    """Load the modules for all kinds of URLs, which takes a moment."""
    _make_service("json://localhost")


def check_url(url: str) -> str | None:
    """Return why messages cannot be sent to a URL; None if it is valid."""
    with _CapturedLog() as log:
        return None if _make_service(url) is not None else _explain(url, log.last, "the URL is not valid")


def send_message(url: str, *, title: str, body: str, kind: MessageKind) -> str | None:
    """Send a message, and return why it failed; None if it was accepted.

    Args:
        url: The URL of the target.
        title: One line.
        body: Plain text.
        kind: How services that have colors or symbols show it.
    """
    from apprise import NotifyFormat, NotifyType  # noqa: PLC0415  optional

    with _CapturedLog() as log:
        service = _make_service(url)
        if service is None:
            return _explain(url, log.last, "the URL is not valid")
        service.socket_connect_timeout = max(service.socket_connect_timeout, CONNECT_SECONDS)
        service.socket_read_timeout = max(service.socket_read_timeout, READ_SECONDS)
        try:
            notify: Callable[..., bool] = service.notify
            is_sent = notify(
                title=title,
                body=body,
                notify_type=getattr(NotifyType, kind.upper()),
                body_format=NotifyFormat.TEXT,
            )
        except Exception as error:  # noqa: BLE001  plugins of a library: any error means that it was not sent
            return f"sending failed with {type(error).__name__}"
        return None if is_sent else _explain(url, log.last, "the server did not accept the message")


def _make_service(url: str) -> Any:
    """Return the service of a URL; None if it is not valid."""
    from apprise import Apprise, AppriseAsset  # noqa: PLC0415  optional

    asset = AppriseAsset(
        app_id="gpulse", app_desc="gpulse", app_url="", async_mode=False, storage_mode="memory"
    )
    try:
        return Apprise.instantiate(_plain_text_mail(url), asset=asset)
    except ValueError:  # its message may quote a part of the URL
        return None


def _plain_text_mail(url: str) -> str:
    """Return the URL of a mail target so that it sends plain text, unless it asks for another format."""
    if url_schema(url) not in MAIL_SCHEMAS:
        return url
    parts = urlsplit(url)
    if any(name.lower() == "format" for name, _ in parse_qsl(parts.query, keep_blank_values=True)):
        return url
    query = f"{parts.query}&format=text" if parts.query else "format=text"
    return urlunsplit(parts._replace(query=query))


def _explain(url: str, reason: str | None, otherwise: str) -> str:
    """Return the reason that the library gave, without the secrets of the URL."""
    return one_line(redact(reason, url), _MAX_ERROR_CHARACTERS).rstrip(".") if reason else otherwise


class _CapturedLog(logging.Handler):
    """Keeps the last warning of the library that quotes no URL; nothing reaches any other log."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.last: str | None = None

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if "URL" not in text and "://" not in text:
            self.last = text

    def __enter__(self) -> Self:
        log = logging.getLogger("apprise")
        log.propagate = False
        log.setLevel(logging.WARNING)
        log.addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("apprise").removeHandler(self)


class _SendingChild(NamedTuple):
    """A child process that sends one message."""

    number: int
    pid: int
    deadline: float
    """On the monotonic clock."""


class DeliveryProcess:
    """Reads requests and starts a child process for each."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._children: dict[int, _SendingChild] = {}
        """By the descriptor of the pipe that the child answers through."""
        self._input = b""

    def run(self) -> None:
        """Handle requests until the input is closed."""
        os.set_blocking(0, False)
        self._selector.register(0, selectors.EVENT_READ)
        while True:
            for key, _ in self._selector.select(self._wait_seconds()):
                if key.fd == 0:
                    if not self._read_requests():
                        return
                else:
                    self._finish(key.fd)
            self._end_late_children()

    def close(self) -> None:
        """Kill the children that are still sending."""
        for descriptor in list(self._children):
            self._reap(descriptor)

    def _wait_seconds(self) -> float | None:
        if not self._children:
            return None
        return max(0.0, min(child.deadline for child in self._children.values()) - time.monotonic())

    def _read_requests(self) -> bool:
        """Read what there is; False at the end of the input."""
        with suppress(BlockingIOError):
            data = os.read(0, _READ_BYTES)
            if not data:
                return False
            self._input += data
        *lines, self._input = self._input.split(b"\n")
        for line in lines:
            self._handle(json.loads(line))
        return True

    def _handle(self, request: dict[str, Any]) -> None:
        if request["do"] == "check":
            _reply(request["id"], check_url(request["url"]))
            return
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            _send_and_exit(request, writer)
        os.close(writer)
        self._children[reader] = _SendingChild(
            request["id"], pid, time.monotonic() + float(request["max_seconds"])
        )
        self._selector.register(reader, selectors.EVENT_READ)

    def _finish(self, descriptor: int) -> None:
        """Pass on the answer of a child."""
        answer = os.read(descriptor, _MAX_REPLY_BYTES)
        child = self._reap(descriptor)
        error: str | None = "the process that was sending the message ended unexpectedly"
        with suppress(ValueError, KeyError):
            error = json.loads(answer)["error"]
        _reply(child.number, error)

    def _end_late_children(self) -> None:
        now = time.monotonic()
        for descriptor in [fd for fd, child in self._children.items() if child.deadline <= now]:
            child = self._reap(descriptor)
            _reply(child.number, "the server did not answer in time")

    def _reap(self, descriptor: int) -> _SendingChild:
        child = self._children.pop(descriptor)
        self._selector.unregister(descriptor)
        os.close(descriptor)
        os.kill(child.pid, signal.SIGKILL)  # it is not reaped yet, so the number is still its own
        os.waitpid(child.pid, 0)
        return child


def _send_and_exit(request: dict[str, Any], writer: int) -> None:
    """Send one message in a child process, and answer through the pipe."""
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        nowhere = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(nowhere, descriptor)
        error = send_message(
            request["url"], title=request["title"], body=request["body"], kind=request["kind"]
        )
        os.write(writer, json.dumps({"error": error}).encode())
    finally:
        os._exit(0)


def _reply(number: int, error: str | None) -> None:
    os.write(1, json.dumps({"id": number, "error": error}).encode() + b"\n")


def main() -> int:
    """Answer requests until the input is closed."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the head handles them, and closes the input
        signal.signal(number, signal.SIG_IGN)
    logging.lastResort = None
    with suppress(OSError):
        os.nice(_NICE)
    load_plugins()
    process = DeliveryProcess()
    try:
        process.run()
    except BrokenPipeError:
        pass  # the head has exited
    finally:
        process.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
