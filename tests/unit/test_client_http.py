"""Asking a head over HTTP, and finding out what else listens where a head should."""

from __future__ import annotations

import io
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from gpulse.cluster.client.head_client import connect
from gpulse.cluster.client.transport import (
    DownloadInterruptedError,
    HeadAddress,
    HeadCredentials,
    HeadNotAnsweringError,
    HeadUnreachableError,
    PortProbe,
    check_listening,
    probe_port,
)
from gpulse.errors import GpulseError, UsageError

_ANSWER = b'{"success": true}'
_SETTINGS = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])


class _Handler(BaseHTTPRequestHandler):
    """Notes what it was asked and gives the server's answer."""

    server: _Server

    def do_GET(self) -> None:
        length = int(self.headers.get("Content-Length", 0))
        self.server.asked.append((self.command, self.path, self.rfile.read(length), dict(self.headers)))
        self.send_response(self.server.status)
        self.send_header("Content-Length", str(self.server.length or len(self.server.body)))
        self.end_headers()
        self.wfile.write(self.server.body)

    do_POST = do_GET  # noqa: N815  http.server's name

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


class _Server(ThreadingHTTPServer):
    status = 200
    body = _ANSWER
    length = 0

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.asked: list[tuple[str, str, bytes, dict[str, str]]] = []

    def handle_error(self, *_: Any) -> None:
        """What is no HTTP is no news."""

    @property
    def address(self) -> HeadAddress:
        return HeadAddress("http", "127.0.0.1", self.server_address[1])


@pytest.fixture
def server() -> Iterator[_Server]:
    """A server that answers everything alike."""
    with _Server() as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield running
        running.shutdown()
        thread.join()


@contextmanager
def speaking(answer: Callable[[socket.socket], None]) -> Iterator[HeadAddress]:
    """Something that is no head listens, and answers every connection so."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    with connection, suppress(OSError):
                        answer(connection)

        thread = threading.Thread(target=serve)
        thread.start()
        yield HeadAddress("http", "127.0.0.1", listener.getsockname()[1])
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_reading_asks_with_a_query(server: _Server) -> None:
    """Fields become parts of the path where it has a place for them, and of the query elsewhere."""
    with connect(server.address, HeadCredentials()) as client:
        client.call("session", dict, {"name": "a/../b"})
        client.call("query", dict, {"metric": "power_watts", "nodes": ["a", "b"], "step": 10})

    assert [
        ("GET", "/api/v1/sessions/a%2F..%2Fb"),
        ("GET", "/api/v1/query?metric=power_watts&nodes=a%2Cb&step=10"),
    ] == [asked[:2] for asked in server.asked]


def test_writing_asks_with_a_body_and_the_token(server: _Server) -> None:
    """A body is JSON, says so, and comes with the token; the host is the one that was named."""
    with connect(server.address, HeadCredentials(token="secret-of-this-head")) as client:
        assert {"success": True} == client.call("start", dict, {"name": "a"})

    method, path, body, headers = server.asked[0]
    assert ("POST", "/profiling/start", b'{"name": "a"}') == (method, path, body)
    assert "application/json" == headers["Content-Type"]
    assert "Bearer secret-of-this-head" == headers["Authorization"]
    assert server.address.target == headers["Host"]


def test_proxies_of_the_environment_are_not_used(server: _Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A head is asked directly, whatever the shell says about the web."""
    monkeypatch.setenv("http_proxy", "http://192.0.2.9:1")

    with connect(server.address, HeadCredentials()) as client:
        assert {"success": True} == client.call("status", dict)


def test_a_download_that_breaks_off_is_an_error(server: _Server) -> None:
    """A file that is shorter than announced is not taken for the whole."""
    server.length = 1000

    with (
        connect(server.address, HeadCredentials()) as client,
        pytest.raises(DownloadInterruptedError, match="was interrupted"),
    ):
        client.download("a", "json", io.BytesIO())


def test_nothing_listens() -> None:
    """The error says where, and how to start a head."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = HeadAddress("http", "127.0.0.1", free.getsockname()[1])
        with pytest.raises(HeadUnreachableError) as caught:
            connect(address, HeadCredentials()).call("status", dict)

    assert f"nothing is listening at {address.target}" == caught.value.message
    assert "gpulse head" in (caught.value.hint or "")


def test_no_such_machine() -> None:
    """A name that nobody knows is told apart from a machine that is down."""
    with pytest.raises(HeadUnreachableError, match=r"cannot resolve the host name 'no-such-host\.invalid'"):
        check_listening(HeadAddress("grpc", "no-such-host.invalid", 8090))


def test_the_http_port_is_known_for_what_it_is(server: _Server) -> None:
    """Whoever speaks gRPC there can be told."""
    assert PortProbe("http", tls=False) == probe_port(server.address._replace(transport="grpc"))


def test_the_grpc_port_is_known_for_what_it_is() -> None:
    """A head's first words in gRPC are enough, and the error names the other port."""
    with (
        speaking(lambda connection: connection.sendall(_SETTINGS)) as address,
        pytest.raises(HeadNotAnsweringError) as caught,
    ):
        connect(address, HeadCredentials()).call("status", dict)

    assert "is a gRPC port, but this command uses HTTP" in caught.value.message
    assert "8091" in (caught.value.hint or "")


def test_something_else_is_told_as_such() -> None:
    """A server of another kind is no head."""
    with (
        speaking(lambda connection: connection.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")) as address,
        pytest.raises(HeadNotAnsweringError, match="is not a gpulse head"),
    ):
        connect(address, HeadCredentials()).call("status", dict)


def test_tls_where_there_is_none_is_told(server: _Server) -> None:
    """The option to leave out is named."""
    with pytest.raises(HeadNotAnsweringError) as caught:
        connect(server.address, HeadCredentials(tls=True)).call("status", dict)

    assert "does not use TLS" in caught.value.message
    assert "omit --tls" == caught.value.hint


def test_a_head_that_does_not_answer_is_not_waited_for_forever() -> None:
    """The time that was waited is said."""
    done = threading.Event()

    def keep_waiting(_connection: socket.socket) -> None:
        done.wait(600)

    with speaking(keep_waiting) as address:
        client = connect(address, HeadCredentials(), call_seconds=0.1)
        with pytest.raises(HeadNotAnsweringError, match=r"did not answer within 0\.1 s"):
            client.call("status", dict)
        done.set()


def test_files_for_tls_must_be_some(server: _Server) -> None:
    """A certificate without its key, or no certificate at all, is refused before anything is sent."""
    for wrong in (
        HeadCredentials(tls=True, ca="/dev/null"),
        HeadCredentials(tls=True, cert="/nonexistent.pem"),
    ):
        with pytest.raises(UsageError):
            connect(server.address, wrong)

    assert [] == server.asked


def test_an_operation_that_does_not_exist_is_not_sent(server: _Server) -> None:
    """There is no path to ask for it."""
    with (
        connect(server.address, HeadCredentials()) as client,
        pytest.raises(GpulseError, match="no operation"),
    ):
        client.call("nonsense", dict)
