"""Around everything: the headers that every answer has, and an answer for what nobody expected."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from starlette.datastructures import MutableHeaders

from gpulse.web.answer import refused

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; img-src 'self'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'",
    # A stricter policy would make browsers send `Origin: null` with our own form.
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
_STARTS = frozenset({"http.response.start", "websocket.http.response.start"})

logger = logging.getLogger(__name__)


class Shell:
    """The outermost part of the application."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        has_started = False

        async def wrapped(message: Message) -> None:
            nonlocal has_started
            if message["type"] in _STARTS:
                has_started = True
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        try:
            await self._app(scope, receive, wrapped)
        except Exception:
            if has_started or scope["type"] != "http":
                raise  # half an answer is out: the server ends the connection, so that nobody takes it for a whole one
            logger.exception("a request failed")
            answer = refused(
                500, "the head failed at this; its log says how", "try again, and report what the log says"
            )
            await answer(scope, receive, wrapped)
