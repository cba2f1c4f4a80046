"""Real receivers of notifications for tests: a mail server, and a web server that can be slow, refuse and die."""

from __future__ import annotations

import email
import email.policy
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from email.message import EmailMessage
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal, NamedTuple

from aiosmtpd.controller import Controller
from aiosmtpd.smtp import AuthResult, LoginPassword

from tests.integration.cluster import free_port

Behavior = Literal["accept", "refuse", "hold", "cut"]
"""Answer 200; answer 500; answer 200 when the test says so; take the message and close the connection."""
PATIENCE_SECONDS = 60.0


class HookServer:
    """A web server that receives notifications."""

    def __init__(self) -> None:
        self.port = free_port()
        self.behavior: Behavior = "accept"
        self.seen: list[dict[str, Any]] = []
        """Every message that came completely, in order, whatever the answer was."""
        self.accepted: list[dict[str, Any]] = []
        """The messages that were answered with success."""
        self.headers: list[dict[str, str]] = []
        self.released = threading.Event()
        self._news = threading.Condition()
        self._server: ThreadingHTTPServer | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Listen, on the same port every time."""
        hook = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                message = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                hook.headers.append(dict(self.headers))
                behavior = hook.behavior
                hook._record(hook.seen, {"path": self.path, **message})
                if behavior == "cut":
                    self.close_connection = True
                    return
                if behavior == "hold" and not hook.released.wait(PATIENCE_SECONDS):
                    return
                try:
                    self.send_response(500 if behavior == "refuse" else 200)
                    self.send_header("Content-Length", "0")
                    self.end_headers()
                except OSError:
                    return  # the sender has given up
                if behavior != "refuse":
                    hook._record(hook.accepted, message)

            def log_message(self, *_: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            block_on_close = False

            def handle_error(self, *_: Any) -> None:
                pass

        self._server = Server(("127.0.0.1", self.port), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()

    def stop(self) -> None:
        """Die: connections are refused from now on."""
        self.released.set()
        if self._server is not None and self._thread is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()
            self._server = None

    def wait_for(self, count: int) -> list[dict[str, Any]]:
        """Wait until so many messages were accepted; return them."""
        with self._news:
            assert self._news.wait_for(lambda: len(self.accepted) >= count, PATIENCE_SECONDS), self.seen
        return self.accepted

    def wait_until_seen(self, count: int) -> list[dict[str, Any]]:
        """Wait until so many messages came, whatever the answer was; return them."""
        with self._news:
            assert self._news.wait_for(lambda: len(self.seen) >= count, PATIENCE_SECONDS), self.seen
        return self.seen

    def _record(self, where: list[dict[str, Any]], message: dict[str, Any]) -> None:
        with self._news:
            where.append(message)
            self._news.notify_all()


class Mail(NamedTuple):
    """A mail that arrived."""

    recipients: tuple[str, ...]
    user: str | None
    message: EmailMessage

    @property
    def text(self) -> str:
        """The plain text, with ordinary line ends."""
        part = self.message.get_body(("plain",))
        assert part is not None
        return str(part.get_content()).replace("\r\n", "\n")


class Mailbox:
    """A mail server that requires a password."""

    def __init__(self, user: str, password: str) -> None:
        self.port = free_port()
        self.mails: list[Mail] = []
        self._login = (user.encode(), password.encode())
        self._news = threading.Condition()
        self._controller = Controller(
            self,
            hostname="127.0.0.1",
            port=self.port,
            authenticator=self._authenticate,
            auth_require_tls=False,
        )

    def start(self) -> None:
        """Accept mail."""
        self._controller.start()

    def stop(self) -> None:
        """End it."""
        self._controller.stop()

    def wait_for(self, count: int) -> list[Mail]:
        """Wait until so many mails arrived; return them."""
        with self._news:
            assert self._news.wait_for(lambda: len(self.mails) >= count, PATIENCE_SECONDS), self.mails
        return self.mails

    async def handle_DATA(self, _server: Any, session: Any, envelope: Any) -> str:  # noqa: N802  aiosmtpd's name
        """Take a mail of somebody who gave the password."""
        if not session.authenticated:
            return "530 Authentication required"
        message = email.message_from_bytes(envelope.content, policy=email.policy.default)
        assert isinstance(message, EmailMessage)
        with self._news:
            login = session.auth_data
            user = login.login.decode() if isinstance(login, LoginPassword) else None
            self.mails.append(Mail(tuple(envelope.rcpt_tos), user, message))
            self._news.notify_all()
        return "250 OK"

    def _authenticate(
        self, _server: Any, _session: Any, _envelope: Any, _mechanism: str, data: Any
    ) -> AuthResult:
        is_known = isinstance(data, LoginPassword) and (data.login, data.password) == self._login
        return AuthResult(success=is_known, auth_data=data)


@contextmanager
def running(*receivers: HookServer | Mailbox) -> Iterator[None]:
    """Receivers that are gone at the end."""
    try:
        for receiver in receivers:
            receiver.start()
        yield
    finally:
        for receiver in receivers:
            receiver.stop()
