"""Serving an application with uvicorn in the running loop, with limits on what a slow or greedy client can hold."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import uvicorn

from gpulse.cluster.ports import who_listens
from gpulse.cluster.security import TlsFiles
from gpulse.errors import GpulseError
from gpulse.web.protocol import PatientHttp, PatientWebSocket

if TYPE_CHECKING:
    from starlette.types import ASGIApp

MOST_CONNECTIONS = 512
_LONGEST_HEADERS = 256 * 1024
_LARGEST_WISH = 64 * 1024
_ENDING_SECONDS = 1.0
_CUT_SECONDS = 0.5
_BACKLOG = 512
KEEP_ALIVE_SECONDS = 15
"""How long a connection may stay idle between two requests."""


async def serve(
    app: ASGIApp,
    *,
    host: str,
    port: int,
    tls: TlsFiles | None = None,
    ready: Callable[[int], None] | None = None,
    most_connections: int = MOST_CONNECTIONS,
) -> None:
    """Serve until cancelled; then open requests get a second to end, and WebSockets are closed.

    Args:
        app: What to serve.
        host: The address to listen on; a name listens on all its addresses, an empty one on all interfaces.
        port: The port; 0 takes any that is free.
        tls: The files of HTTPS.
        ready: Called with the port once connections are taken.
        most_connections: Backends so many, those that wait for nothing are closed for new ones.

    Raises:
        GpulseError: The port cannot be listened on.
    """
    sockets = await listen(host, port)
    real_port: int = sockets[0].getsockname()[1]
    try:
        server = _Server(_configured(app, tls, most_connections), lambda: ready(real_port) if ready else None)
        running = asyncio.create_task(server.serve(sockets=sockets))
        try:
            await asyncio.shield(running)
        finally:
            server.should_exit = True
            await _ended(server, running)
    finally:
        for each in sockets:
            each.close()


async def listen(host: str, port: int) -> list[socket.socket]:
    """Sockets that listen on all addresses of a name, all on one port.

    Raises:
        GpulseError: The name is unknown, or the port is taken or not for us.
    """
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise GpulseError(
            f"{host} is no address of this machine: {error.strerror}", hint="--host 127.0.0.1"
        ) from error
    sockets: list[socket.socket] = []
    try:
        for family, _, _, _, address in dict.fromkeys(found):
            chosen = sockets[0].getsockname()[1] if sockets else port
            bound = _bound(family, (address[0], chosen, *address[2:]))
            if bound is not None:
                sockets.append(bound)
        if not sockets:
            raise GpulseError(f"nothing can listen on {host or 'any address'}", hint="--host 127.0.0.1")
    except OSError as error:
        for each in sockets:
            each.close()
        raise _taken(host, port, error) from error
    return sockets


def _bound(family: int, address: tuple[Any, ...]) -> socket.socket | None:
    """A socket that listens, or None where the machine does not have such addresses (IPv6 may be off)."""
    try:
        # Without the protocol asyncio leaves Nagle's algorithm on, and every answer's end comes 40 ms late.
        made = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    except OSError:
        return None
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        made.bind(address)
        made.listen(_BACKLOG)
        made.setblocking(False)
    except OSError as error:
        made.close()
        if family == socket.AF_INET6 and error.errno in {97, 99}:  # no such family, no such address
            return None
        raise
    return made


def _taken(host: str, port: int, error: OSError) -> GpulseError:
    where = f"{host or '*'}:{port}"
    if error.errno == 98:
        who = who_listens(port)
        held = f" by {who}" if who else ""
        return GpulseError(f"port {port} is in use{held}", hint="stop it, or choose another port")
    return GpulseError(f"cannot listen on {where}: {error.strerror}", hint="choose another port or --host")


def _configured(app: ASGIApp, tls: TlsFiles | None, most_connections: int) -> uvicorn.Config:
    extra: dict[str, Any] = {}
    if tls is not None:
        context = tls.context()
        extra["ssl_certfile"] = tls.cert
        extra["ssl_context_factory"] = lambda _config, _default: context
    return uvicorn.Config(
        app,
        http=PatientHttp,
        ws=PatientWebSocket,
        ws_max_size=_LARGEST_WISH,
        ws_per_message_deflate=False,  # it would hold the loop for longer than the network saves
        lifespan="off",
        log_config=None,
        log_level="error",  # every stranger's bad request would be a line else
        access_log=False,
        proxy_headers=False,  # nobody is believed about where a request comes from
        server_header=False,
        limit_concurrency=most_connections,
        h11_max_incomplete_event_size=_LONGEST_HEADERS,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        **extra,
    )


class _Server(uvicorn.Server):
    """Uvicorn, leaving signals to whoever runs the loop."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._ready = ready

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready()


async def _ended(server: uvicorn.Server, running: asyncio.Task[None]) -> None:
    """Wait for the end, and cut what does not end by itself: first connections, then what still works for them."""
    await asyncio.wait((running,), timeout=_ENDING_SECONDS)
    for connection in list(server.server_state.connections):
        connection.transport.abort()
    await asyncio.wait((running,), timeout=_CUT_SECONDS)
    left = {*server.server_state.tasks, running}
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)
