"""Whose process is at the other end of a connection on this machine."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress

import pytest

from gpulse.cluster import socket_owner
from gpulse.cluster.socket_owner import find_connection_owner, find_port_owner

OTHER = 4711
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a socket away")


class Pair:
    """A server on all addresses, and clients of it."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._server = stack.enter_context(socket.socket(socket.AF_INET6))
        self._server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        self._server.bind(("::", 0))
        self._server.listen()
        self.port: int = self._server.getsockname()[1]

    def connect(
        self, host: str, *, port: int = 0, family: int | None = None
    ) -> tuple[socket.socket, socket.socket]:
        """The client's side and the server's."""
        family = family or (socket.AF_INET6 if ":" in host else socket.AF_INET)
        client = self._stack.enter_context(socket.socket(family))
        client.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if port:
            client.bind(("127.0.0.1", port))
        client.connect((host, self.port))
        return client, self._stack.enter_context(self._server.accept()[0])


@pytest.fixture
def pair() -> Iterator[Pair]:
    """A server that is closed afterwards."""
    with ExitStack() as stack:
        yield Pair(stack)


@pytest.fixture(params=["netlink", "proc"])
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask the kernel over netlink, or where that is not possible."""
    if request.param == "proc":

        def refuse(*_: object) -> Iterator[object]:
            raise PermissionError

        monkeypatch.setattr(socket_owner, "_from_netlink", refuse)


def owners(server: socket.socket) -> list[int | None]:
    """What is found when this side's address is known, and when it is not."""
    client, here = server.getpeername()[:2], server.getsockname()[:2]
    return [find_connection_owner(client, here), find_port_owner(client, (here[1], 1))]


@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.1.1", "::1", "::ffff:127.0.0.1"])
def test_the_user_of_a_client_is_found(pair: Pair, host: str) -> None:
    """Over IPv4, IPv6 and IPv4 in IPv6, at every address of the loopback."""

    _, server = pair.connect(host)

    assert [os.geteuid()] * 2 == owners(server)


@needs_root
@pytest.mark.usefixtures("_way")
def test_another_user_is_found(pair: Pair) -> None:
    """It is the user of the client's socket, not that of the server's."""

    client, server = pair.connect("127.0.0.1")
    os.fchown(client.fileno(), OTHER, -1)

    assert [OTHER] * 2 == owners(server)


def _reset(client: socket.socket) -> None:
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()


@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize("end", [socket.socket.close, _reset])
def test_a_client_that_is_gone_is_nobody(pair: Pair, end: Callable[[socket.socket], None]) -> None:
    """The kernel calls sockets that no process holds root's, so they count for nothing."""

    client, server = pair.connect("127.0.0.1")
    peer, here = client.getsockname(), server.getsockname()[:2]
    end(client)

    assert [None, None] == [find_connection_owner(peer, here), find_port_owner(peer, (here[1],))]


@pytest.mark.usefixtures("_way")
def test_a_client_that_sends_no_more_is_still_known(pair: Pair) -> None:
    """It may have sent all it had to say."""

    client, server = pair.connect("127.0.0.1")
    client.shutdown(socket.SHUT_WR)

    assert [os.geteuid()] * 2 == owners(server)


def connect_from_one_port(pair: Pair) -> tuple[socket.socket, socket.socket, socket.socket]:
    """Connect twice from one port, to two addresses of the server."""
    for _ in range(100):
        _, first = pair.connect("127.0.0.1")
        with suppress(OSError):  # another program of this machine connects from that port, too
            return first, *pair.connect("127.0.0.2", port=first.getpeername()[1])
    raise AssertionError("no port could be used twice")


@needs_root
@pytest.mark.usefixtures("_way")
def test_two_users_at_one_port_are_told_apart_or_nobody(pair: Pair) -> None:
    """Somebody who connects from root's own port, to another address of the server, does not pass for root."""

    trusted, sly, server = connect_from_one_port(pair)
    os.fchown(sly.fileno(), OTHER, -1)

    assert trusted.getpeername() == server.getpeername()
    assert [OTHER, None] == owners(server)
    assert [0, None] == owners(trusted)


@pytest.mark.usefixtures("_way")
def test_what_is_no_connection_is_nobody(pair: Pair) -> None:
    """A listener at the client's port, an unknown port, and what is no address."""

    listener = ("127.0.0.1", pair.port)

    for client, server in (
        (listener, listener),
        (("127.0.0.1", 1), listener),
        (("10.0.0.1", 1), ("::1", 1)),
        (("", 1), listener),
        (("x:y", 1), listener),
    ):
        assert None is find_connection_owner(client, server)
        assert None is find_port_owner(client, (server[1],))
