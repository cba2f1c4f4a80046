"""Find the user behind an HTTP connection."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpulse.cluster.security import is_loopback
from gpulse.cluster.socket_owner import connection_owner

if TYPE_CHECKING:
    import asyncio


def client_user(transport: asyncio.Transport) -> int | None:
    """Return the user id of the client's process; None when it is on another machine or cannot be found.

    Args:
        transport: A connection that was just accepted.
    """
    accepted = transport.get_extra_info("socket")
    if accepted is None:
        return None
    try:
        client = accepted.getpeername()[:2]
        if not is_loopback(client[0]):
            return None
        user = connection_owner(client, accepted.getsockname()[:2])
        accepted.getpeername()  # fails once the connection is gone: another user's may have its port by now
    except OSError:
        return None
    return user
