"""The HTTP API over real connections: limits, live streams, TLS, and what happens at the end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import select
import socket
import ssl
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route, WebSocketRoute
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from gpulse.cluster.access_control import AccessPolicy
from gpulse.cluster.socket_owner import describe_listener
from gpulse.cluster.tls_files import TlsFiles
from gpulse.errors import GpulseError
from gpulse.model.finding import Finding
from gpulse.web import server
from gpulse.web.app import make_app
from gpulse.web.server import TimeoutHttpProtocol, TimeoutWebSocketProtocol, serve
from tests.integration.serving import served
from tests.prerequisites import require
from tests.unit.fake_head import TOKEN, FakeHead

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.websockets import WebSocket


@pytest.fixture
def head() -> FakeHead:
    """What is asked."""
    return FakeHead()


@pytest.fixture
async def port(head: FakeHead) -> AsyncIterator[int]:
    """Where the head is served."""
    async with served(make_app(head, AccessPolicy(TOKEN), clock=head.now, max_live_streams=2)) as made:
        yield made


def outside_address() -> str:
    """An address of this machine that is not loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this machine has loopback alone")
        address: str = probe.getsockname()[0]
    return address


async def say(port: int, text: bytes, *, host: str = "127.0.0.1", **options: Any) -> bytes:
    """Send bytes and read until the connection ends."""
    reader, writer = await asyncio.open_connection(host, port, **options)
    try:
        writer.write(text)
        async with asyncio.timeout(60):
            return await reader.read()
    finally:
        writer.close()


async def message(stream: ClientConnection) -> dict[str, Any]:
    """The next message of a live stream."""
    async with asyncio.timeout(60):
        document: dict[str, Any] = json.loads(await stream.recv())
        return document


async def drained(stream: ClientConnection) -> None:
    """Read until the stream ends."""
    while True:
        await message(stream)


async def ended(connection: socket.socket) -> None:
    """Wait until the other side has cut a connection, without reading from it."""
    poll = select.poll()
    poll.register(connection, 0)
    async with asyncio.timeout(60):
        while not poll.poll(0):  # noqa: ASYNC110  a loop is told only of what can be read
            await asyncio.sleep(0.02)


async def test_curl_as_printed(port: int, head: FakeHead) -> None:
    """The seed's curl lines work as they are printed."""

    require("curl")
    here = f"http://localhost:{port}"
    body = ["-X", "POST", "-H", "Content-Type: application/json", "-d", '{"name": "my_experiment"}']
    for arguments, key in (
        ([f"{here}/status"], "freq"),
        ([f"{here}/profiling/start", *body], "success"),
        ([f"{here}/profiling/stop", *body], "success"),
        ([f"{here}/profiling/stop", *body[:-1], "{}"], "success"),
        ([f"{here}/clients"], "total_clients"),
        ([f"{here}/metrics/latest"], "client_data"),
        ([f"{here}/profiling/sessions"], "sessions"),
    ):
        process = await asyncio.create_subprocess_exec(
            "curl", "-sS", *arguments, stdout=asyncio.subprocess.PIPE
        )
        output, _ = await process.communicate()
        assert key in json.loads(output)
    assert ["start", "stop", "stop"] == [operation for operation, _ in head.asked]


async def test_answers_are_not_held_back(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written goes out at once: the kernel does not wait for the client to confirm what came before."""

    found: list[int] = []
    made = TimeoutHttpProtocol.connection_made

    def watched(self: TimeoutHttpProtocol, transport: asyncio.Transport) -> None:
        found.append(transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        made(self, transport)

    monkeypatch.setattr(TimeoutHttpProtocol, "connection_made", watched)
    async with httpx.AsyncClient() as asking:
        assert 200 == (await asking.get(f"http://127.0.0.1:{port}/status")).status_code
    assert [1] == found


async def test_a_live_stream(port: int, head: FakeHead) -> None:
    """First who is there, then what changed, with the numbers that were asked for."""

    async with connect(f"ws://127.0.0.1:{port}/api/v1/live") as stream:
        hello = await message(stream)
        assert ("hello", ["alpha", "beta"]) == (hello["type"], [node["node"] for node in hello["nodes"]])
        first = await message(stream)
        assert "update" == first["type"]
        assert {"alpha", "beta"} == {node["node"] for node in first["nodes"]}
        alpha = next(node for node in first["nodes"] if node["node"] == "alpha")
        assert 2 == len(alpha["gpus"]) == len(alpha["values"]["power_watts"])
        await stream.send(
            json.dumps(
                {"nodes": ["beta"], "metrics": ["sm_clock_hertz"], "host_metrics": ["cpus"], "interval": 0.1}
            )
        )
        wanted = await message(stream)
        while "sm_clock_hertz" not in wanted["nodes"][0]["values"]:
            wanted = await message(stream)
        assert ["beta"] == [node["node"] for node in wanted["nodes"]]
        assert ["cpus"] == list(wanted["nodes"][0]["host"])
        assert "gpus" in wanted["nodes"][0]
        await head.advance()
        after = await message(stream)
        assert (head.time, False) == (after["nodes"][0]["time"], "gpus" in after["nodes"][0])
        assert after["sequence"] > wanted["sequence"]
        head.nodes = [node._replace(state="lost", connected=False) for node in head.nodes]
        lost = await message(stream)
        assert ("lost", False) == (lost["nodes"][0]["state"], lost["nodes"][0]["connected"])


async def test_details_when_they_change(port: int, head: FakeHead) -> None:
    """Processes, disks and findings come once, and again only when they are others."""

    async with connect(f"ws://127.0.0.1:{port}/api/v1/live") as stream:
        assert [] == (await message(stream))["missing"]
        await stream.send('{"nodes": ["alpha"], "details": true, "interval": 0.1}')
        first = await message(stream)
        while "details" not in first["nodes"][0]:
            first = await message(stream)
        details = first["nodes"][0]["details"]
        assert 2 == len(details["processes"])
        process = details["processes"][0][0]
        assert ("ada", "python3") == (process["user"], process["name"])
        assert process["gpu_memory_bytes"] > 0
        assert {"name", "kind", "read_bytes_per_second"} <= set(details["disks"][0])
        assert {"mount_point", "size_bytes", "used_bytes"} <= set(details["filesystems"][0])
        assert {"name", "up", "rx_bytes_per_second"} <= set(details["network"][0])
        await head.advance()
        assert "details" not in (await message(stream))["nodes"][0]
        found = Finding("input.workers", "input", "high", 0.9, "<b>starved</b>", gpu=0)
        head.nodes = [node._replace(findings=[found]) for node in head.nodes]
        await head.advance()
        later = (await message(stream))["nodes"][0]["details"]
        assert [("input.workers", "<b>starved</b>")] == [
            (finding["id"], finding["summary"]) for finding in later["findings"]
        ]


async def test_missing_nodes_are_told(port: int, head: FakeHead) -> None:
    """Nodes that were never heard of are named at once, and again when one of them came."""

    head.absent = ["gamma", "delta"]
    async with connect(f"ws://127.0.0.1:{port}/api/v1/live") as stream:
        assert ["gamma", "delta"] == (await message(stream))["missing"]
        assert ["gamma", "delta"] == (await message(stream))["missing"]
        await head.advance()
        assert "missing" not in await message(stream)
        head.absent = ["delta"]
        await head.advance()
        assert ["delta"] == (await message(stream))["missing"]


async def test_many_clients_get_the_same(port: int, head: FakeHead) -> None:
    """Who comes later gets everything first; from then on all get one text."""

    url = f"ws://127.0.0.1:{port}/api/v1/live"
    async with connect(url) as first, connect(url) as second:
        for stream in (first, second):
            await message(stream)
            await stream.send('{"interval": 0.1, "details": true}')
            whole = await message(stream)
            assert ["alpha", "beta"] == [node["node"] for node in whole["nodes"]]
            assert all("details" in node and "gpus" in node for node in whole["nodes"])
        for _ in range(3):
            await head.advance()
            told = [await message(stream) for stream in (first, second)]
            assert told[0] == told[1]
            assert [head.time] * 2 == [node["time"] for node in told[0]["nodes"]]
            assert not any("details" in node for node in told[0]["nodes"])


@pytest.mark.parametrize(
    "wish", ["", "{", "[]", '{"metrics": ["nope"]}', '{"interval": 0}', '{"interval": "1e9"}', '{"x": 1}', '{"interval": NaN}', '{"host_metrics": ["power_watts"]}']
)  # fmt: skip
async def test_wishes_that_make_no_sense(port: int, wish: str) -> None:
    """A wrong wish is answered with what is wrong, and the stream goes on."""

    async with connect(f"ws://127.0.0.1:{port}/api/v1/live") as stream:
        await message(stream)
        await message(stream)
        await stream.send(wish)
        if wish:
            answer = await message(stream)
            assert "error" == answer["type"]
            assert answer["error"]
        await stream.send('{"interval": 0.1}')
        assert "update" == (await message(stream))["type"]


async def test_a_wish_is_text(port: int, head: FakeHead) -> None:
    """Bytes are no wish: the client is told so, and still gets what it asked for before."""

    async with connect(f"ws://127.0.0.1:{port}/api/v1/live") as stream:
        await message(stream)
        await stream.send('{"nodes": ["beta"], "interval": 0.1}')
        while ["beta"] != [node["node"] for node in (await message(stream))["nodes"]]:
            pass
        await stream.send(b'{"nodes": ["alpha"]}')
        answer = await message(stream)
        assert ("error", True) == (answer["type"], "not bytes" in answer["error"])
        await head.advance()
        assert ["beta"] == [node["node"] for node in (await message(stream))["nodes"]]


async def test_who_may_listen(port: int, caplog: pytest.LogCaptureFixture) -> None:
    """A live stream obeys the rules of every other request, and who is refused is no line in the log."""

    url = f"ws://127.0.0.1:{port}/api/v1/live"
    for headers, status in (
        ({"Origin": "http://evil.com"}, 403),
        ({"Origin": "null"}, 403),
        ({"X-Forwarded-For": "1.2.3.4"}, 401),
        ({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "websocket"}, 403),
    ):
        with pytest.raises(InvalidStatus) as caught:
            async with connect(url, additional_headers=headers):
                pass
        assert status == caught.value.response.status_code
        assert "error" in json.loads(caught.value.response.body)
    async with connect(url, additional_headers={"Origin": f"http://127.0.0.1:{port}"}) as stream:
        assert "hello" == (await message(stream))["type"]
    with pytest.raises(InvalidStatus):
        async with connect(f"ws://127.0.0.1:{port}/status"):
            pass
    assert [] == complaints(caplog)


async def test_only_so_many_live_streams(port: int) -> None:
    """Backends the limit a stream is refused; when one ends there is room again."""

    url = f"ws://127.0.0.1:{port}/api/v1/live"
    async with connect(url) as first:
        await message(first)
        async with connect(url) as second:
            await message(second)
            with pytest.raises(InvalidStatus) as caught:
                async with connect(url):
                    pass
            assert 503 == caught.value.response.status_code
        async with asyncio.timeout(60):
            while True:
                try:
                    async with connect(url) as third:
                        assert "hello" == (await message(third))["type"]
                    break
                except InvalidStatus:
                    await asyncio.sleep(0)


async def test_slow_readers_get_the_newest(head: FakeHead) -> None:
    """A client that does not read makes nothing pile up, and sees the newest when it reads again."""

    wide = head.nodes[0].frame
    assert wide is not None
    head.nodes = [head.nodes[0]._replace(frame=wide._replace(gpus=wide.gpus * 8000))]
    async with served(make_app(head, AccessPolicy(TOKEN))) as port:
        small = socket.socket()
        small.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        small.connect(("127.0.0.1", port))
        url = f"ws://127.0.0.1:{port}/api/v1/live"
        async with connect(url, sock=small, max_queue=1, max_size=None) as stream:
            assert "hello" == (await message(stream))["type"]
            await stream.send('{"interval": 0.1}')
            for _ in range(20):
                await head.advance()
                await asyncio.sleep(0.11)  # longer than the interval, so that each could be a message
            seen = 1
            while (await message(stream))["nodes"][0]["time"] != head.time:
                seen += 1
            assert seen < 12


async def test_clients_that_never_read_are_cut_off(head: FakeHead, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who leaves answers unread loses the connection, over HTTP and over a live stream."""

    monkeypatch.setattr(TimeoutHttpProtocol, "read_seconds", 0.3)
    monkeypatch.setattr(TimeoutWebSocketProtocol, "read_seconds", 0.3)
    frame = head.nodes[0].frame
    assert frame is not None
    upgrade = (
        "Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
        "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
    )
    async with served(make_app(head, AccessPolicy(TOKEN), clock=head.now)) as port:
        for path, more, times in (("/metrics", "", 4_000), ("/api/v1/live", upgrade, 20_000)):
            many = tuple(
                gpu._replace(device=gpu.device._replace(index=number, uuid=f"GPU-{number}"))
                for number, gpu in enumerate(frame.gpus * times)
            )
            head.nodes = [node._replace(frame=frame._replace(gpus=many)) for node in head.nodes]
            with socket.socket() as greedy:
                greedy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                greedy.connect(("127.0.0.1", port))
                greedy.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n{more}\r\n".encode())
                await ended(greedy)


async def test_slow_loris(head: FakeHead, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that does not arrive in time loses its connection, at every stage; a patient answer does not."""

    monkeypatch.setattr(TimeoutHttpProtocol, "request_seconds", 0.4)
    post = b"POST /profiling/start HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{"
    async with served(make_app(head, AccessPolicy(TOKEN))) as port:
        for text in (b"", b"GET / HT", b"GET / HTTP/1.1\r\nHost: localhost\r\nX-A: ", post):
            started = time.monotonic()
            try:
                answer = await say(port, text)
            except ConnectionResetError:
                answer = b""
            assert b" 200 " not in answer
            assert 0.3 < time.monotonic() - started
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for letter in b"GET /status HTTP/1.1\r\nHost: localhost\r\n":
            writer.write(bytes([letter]))
            await asyncio.sleep(0.05)
            if reader.at_eof() or writer.is_closing():
                break
        assert reader.at_eof() or reader.exception() or writer.is_closing()
        writer.close()
        async with httpx.AsyncClient() as asking:
            for _ in range(4):
                assert 200 == (await asking.get(f"http://localhost:{port}/status")).status_code
                await asyncio.sleep(0.15)
    assert [] == head.asked


def complaints(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Warnings and errors; what clients say of their own requests depends on the tests before."""
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


async def slow_request_is_cut(port: int, **options: Any) -> None:
    """Send half a request, and wait until the connection is cut."""
    text = b"GET /status HTTP/1.1\r\nHost: localhost\r\nX-A: "
    with contextlib.suppress(ConnectionResetError):
        assert b" 200 " not in await say(port, text, host="localhost", **options)


@pytest.mark.parametrize(
    "before", [b"", b"HEAD /status HTTP/1.1\r\nHost: localhost\r\n\r\n"], ids=["fresh", "used"]
)
async def test_live_streams_outlast_the_deadlines_of_requests(
    head: FakeHead, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, before: bytes
) -> None:
    """A quiet stream stays while one slow request after the other is cut, also after a request on its connection."""

    monkeypatch.setattr(TimeoutHttpProtocol, "request_seconds", 0.2)
    monkeypatch.setattr(TimeoutHttpProtocol, "read_seconds", 0.2)
    monkeypatch.setattr(TimeoutWebSocketProtocol, "read_seconds", 0.2)
    async with served(make_app(head, AccessPolicy(TOKEN), clock=head.now)) as port:
        connection = socket.create_connection(("127.0.0.1", port))
        if before:
            connection.sendall(before)
            await asyncio.to_thread(connection.recv, 65536)
        async with connect(f"ws://127.0.0.1:{port}/api/v1/live", sock=connection) as stream:
            assert ["hello", "update"] == [(await message(stream))["type"] for _ in range(2)]
            for _ in range(5):
                await slow_request_is_cut(port)
            await head.advance()
            assert head.time == (await message(stream))["nodes"][0]["time"]
        async with connect(f"ws://127.0.0.1:{port}/api/v1/live"):
            pass
        await slow_request_is_cut(port)
    assert [] == complaints(caplog)


@pytest.mark.parametrize("is_read", [True, False])
async def test_an_upgrade_behind_a_large_answer(monkeypatch: pytest.MonkeyPatch, *, is_read: bool) -> None:
    """Who reads the answer keeps the WebSocket that was asked for behind it; who does not read loses it."""

    async def large(_request: Request) -> Response:
        return Response(b"x" * 20_000_000)

    async def echo(websocket: WebSocket) -> None:
        await websocket.accept()
        await websocket.send_text("here")
        await websocket.receive()

    monkeypatch.setattr(TimeoutHttpProtocol, "read_seconds", 0.5)
    monkeypatch.setattr(TimeoutWebSocketProtocol, "read_seconds", 0.5)
    monkeypatch.setattr(TimeoutHttpProtocol, "request_seconds", 1.0)
    app = Starlette(routes=[Route("/", large), WebSocketRoute("/live", echo)])
    async with served(app) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=4096)
        writer.write(
            b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
            b"GET /live HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
        )
        async with asyncio.timeout(60):
            if is_read:
                await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(20_000_000)
                assert b"HTTP/1.1 101 " in await reader.readuntil(b"\r\n\r\n")
                await slow_request_is_cut(port)
                await slow_request_is_cut(port)
                assert b"\x81\x04here" == await reader.readexactly(6)
                assert not writer.is_closing()
                assert not reader.at_eof()
            else:
                await ended(writer.get_extra_info("socket"))
        writer.close()


@pytest.mark.parametrize("is_whole", [True, False])
async def test_slow_downloads_are_not_cut(monkeypatch: pytest.MonkeyPatch, *, is_whole: bool) -> None:
    """A client that reads for many times as long as any deadline gets everything, written at once or piece by piece."""

    size, piece = 800_000, 8_000
    made = TimeoutHttpProtocol.connection_made

    def buffered(self: TimeoutHttpProtocol, transport: asyncio.Transport) -> None:
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 200_000)
        made(self, transport)

    async def large(_request: Request) -> Response:
        text = b"x" * size
        if is_whole:
            return Response(text)
        pieces = (text[start : start + piece] for start in range(0, size, piece))
        return StreamingResponse(pieces, headers={"Content-Length": str(size)})

    monkeypatch.setattr(TimeoutHttpProtocol, "connection_made", buffered)
    monkeypatch.setattr(TimeoutHttpProtocol, "read_seconds", 0.5)
    monkeypatch.setattr(TimeoutHttpProtocol, "request_seconds", 0.5)
    monkeypatch.setattr(server, "MIN_READ_BYTES", 1)
    monkeypatch.setattr(server, "KEEP_ALIVE_SECONDS", 0.3)
    async with served(Starlette(routes=[Route("/", large)])) as port:
        with socket.socket() as slow:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
            slow.connect(("127.0.0.1", port))
            slow.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            slow.setblocking(False)
            loop, got = asyncio.get_running_loop(), b""
            async with asyncio.timeout(30):
                while not got.endswith(b"\r\n\r\n" + b"x" * size):
                    read = await loop.sock_recv(slow, piece)
                    assert read, f"cut after {len(got)} bytes"
                    got += read
                    await asyncio.sleep(0.04)
            assert len(got) > size


async def test_idle_connections_make_room(head: FakeHead) -> None:
    """When all connections are taken by clients that send nothing, a real request is served all the same."""

    async with served(make_app(head, AccessPolicy(TOKEN)), max_connections=8) as port:
        idle = [socket.create_connection(("127.0.0.1", port)) for _ in range(40)]
        try:
            async with httpx.AsyncClient() as asking:
                for _ in range(3):
                    assert 200 == (await asking.get(f"http://127.0.0.1:{port}/status")).status_code
        finally:
            for each in idle:
                each.close()


async def test_busy_connections_are_not_ended_for_new_ones(head: FakeHead) -> None:
    """When all connections are at work, a new one is told so."""

    async with served(make_app(head, AccessPolicy(TOKEN)), max_connections=2) as port:
        url = f"ws://127.0.0.1:{port}/api/v1/live"
        async with connect(url) as first, connect(url) as second:
            await message(first)
            await message(second)
            answer = await say(port, b"")
            assert answer.startswith(b"HTTP/1.1 503 ")
            assert b'"error":"too many connections are open"' in answer


@pytest.mark.parametrize(
    "text",
    [b"\x00\x01\x02\r\n\r\n", b"GET\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n", b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
     b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 2_000_000 + b"\r\n\r\n", b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n",
     b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /"],
)  # fmt: skip
async def test_what_is_not_http(port: int, text: bytes) -> None:
    """Garbage is refused, and the head lives."""

    answer = await say(port, text)
    assert answer.startswith(b"HTTP/1.1 4")
    assert b'"error":' in answer
    async with httpx.AsyncClient() as asking:
        assert 200 == (await asking.get(f"http://127.0.0.1:{port}/status")).status_code


async def test_a_hundred_megabytes(port: int, head: FakeHead) -> None:
    """A message that is far too large is refused in words, and nothing of it is kept or done."""

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(100):
            yield b" " * 1_000_000

    url, kind = f"http://127.0.0.1:{port}/profiling/start", {"Content-Type": "application/json"}
    async with httpx.AsyncClient(timeout=60) as asking:
        for headers in (kind, {**kind, "Content-Length": "100000000"}):
            answer = await asking.post(url, content=pieces(), headers=headers)
            assert (413, True) == (answer.status_code, "larger" in answer.json()["error"])
    assert [] == head.asked


async def test_from_another_address(head: FakeHead) -> None:
    """Over a real connection that is not loopback, only the token opens anything."""

    address = outside_address()
    async with served(make_app(head, AccessPolicy(TOKEN)), host="0.0.0.0") as port:
        async with httpx.AsyncClient(base_url=f"http://{address}:{port}") as asking:
            for headers in (
                {},
                {"X-Forwarded-For": "127.0.0.1"},
                {"Host": "localhost"},
                {"Forwarded": "for=127.0.0.1"},
            ):
                for path in ("/", "/status", "/metrics", "/openapi.json", "/-/healthy"):
                    assert 401 == (await asking.get(path, headers=headers)).status_code
            bearer = {"Authorization": f"Bearer {TOKEN}"}
            assert 200 == (await asking.get("/status", headers=bearer)).status_code
        url = f"ws://{address}:{port}/api/v1/live"
        with pytest.raises(InvalidStatus) as caught:
            async with connect(url):
                pass
        assert 401 == caught.value.response.status_code
        async with connect(url, additional_headers=bearer) as stream:
            assert "hello" == (await message(stream))["type"]
        async with httpx.AsyncClient(base_url=f"http://{address}:{port}") as asking:
            await asking.post("/login", json={"token": TOKEN})
            cookie = "; ".join(f"{name}={value}" for name, value in asking.cookies.items())
        async with connect(url, additional_headers={"Cookie": cookie}) as stream:
            assert "hello" == (await message(stream))["type"]
        with pytest.raises(InvalidStatus):
            async with connect(url, additional_headers={"Cookie": cookie, "Origin": "http://evil.com"}):
                pass


async def test_a_port_in_use(port: int) -> None:
    """Who has the port is said."""

    who = describe_listener(port)
    assert who is not None
    with pytest.raises(GpulseError, match=f"port {port} is in use by .*pid ") as caught:
        await serve(make_app(FakeHead(), AccessPolicy(TOKEN)), host="127.0.0.1", port=port)
    assert caught.value.hint


async def test_addresses_that_cannot_be() -> None:
    """An address that is not this machine's is named."""

    for host in ("192.0.2.77", "no.such.name.invalid"):
        with pytest.raises(GpulseError, match=host):
            await serve(make_app(FakeHead(), AccessPolicy(TOKEN)), host=host, port=0)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        assert describe_listener(unused.getsockname()[1]) is None


async def test_the_end_waits_for_nobody(
    head: FakeHead, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ending cuts off a request that is half there, closes live streams, and leaves nothing, in the log neither."""

    monkeypatch.setattr(TimeoutHttpProtocol, "request_seconds", 600.0)
    port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    app = make_app(head, AccessPolicy(TOKEN))
    serving = asyncio.create_task(serve(app, host="127.0.0.1", port=0, ready=port.set_result))
    url = f"127.0.0.1:{await port}"
    half = b"POST /profiling/start HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{"
    with socket.create_connection(("127.0.0.1", port.result())) as sender:
        sender.sendall(half)
        async with connect(f"ws://{url}/api/v1/live") as stream, httpx.AsyncClient() as asking:
            await message(stream)
            assert 200 == (await asking.get(f"http://{url}/status")).status_code
            serving.cancel()
            ended, _ = await asyncio.wait({serving}, timeout=60)
            assert {serving} == ended
            assert serving.cancelled()
            with pytest.raises(ConnectionClosed):
                await drained(stream)
            assert 1012 == stream.close_code
            assert describe_listener(port.result()) is None
    assert [] == complaints(caplog)


async def test_tls(head: FakeHead, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """HTTPS and secure live streams that stay, and clients that need a certificate of their own."""

    require("openssl")
    cert, key = str(tmp_path / "cert.pem"), str(tmp_path / "key.pem")
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
        "-subj",
        "/CN=localhost",
    ]
    command += ["-addext", "subjectAltName=DNS:localhost", "-keyout", key, "-out", cert, "-days", "2"]
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.DEVNULL)
    assert 0 == await process.wait()
    trusting = ssl.create_default_context(cafile=cert)
    monkeypatch.setattr(TimeoutHttpProtocol, "request_seconds", 1.0)
    async with served(make_app(head, AccessPolicy(TOKEN)), tls=TlsFiles(cert, key)) as port:
        async with httpx.AsyncClient(verify=trusting) as asking:
            assert 200 == (await asking.get(f"https://localhost:{port}/status")).status_code
            answer = await asking.post(f"https://localhost:{port}/login", json={"token": TOKEN})
            assert "secure" in answer.headers["set-cookie"].lower()
        async with connect(f"wss://localhost:{port}/api/v1/live", ssl=trusting) as stream:
            assert ["hello", "update"] == [(await message(stream))["type"] for _ in range(2)]
            for _ in range(2):
                await slow_request_is_cut(port, ssl=trusting)
            await head.advance()
            assert head.time == (await message(stream))["nodes"][0]["time"]
    async with served(make_app(head, AccessPolicy(TOKEN)), tls=TlsFiles(cert, key, cert)) as port:
        async with httpx.AsyncClient(verify=trusting) as asking:
            with pytest.raises(httpx.HTTPError):
                await asking.get(f"https://localhost:{port}/status")
        trusting.load_cert_chain(cert, key)
        async with httpx.AsyncClient(verify=trusting) as asking:
            assert 200 == (await asking.get(f"https://localhost:{port}/status")).status_code


async def test_names_with_several_addresses(head: FakeHead) -> None:
    """The name localhost and the empty host listen on one port of all their addresses."""

    for host in ("localhost", ""):
        async with (
            served(make_app(head, AccessPolicy(TOKEN)), host=host) as port,
            httpx.AsyncClient() as asking,
        ):
            assert 200 == (await asking.get(f"http://127.0.0.1:{port}/status")).status_code
