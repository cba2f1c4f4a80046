from __future__ import annotations

import asyncio
import gzip
import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from gpulse.cli import agent
from gpulse.cli.agent import MetricsOptions, _metrics_access
from gpulse.cluster.access_control import AccessPolicy, HttpRequest
from gpulse.cluster.agent import metrics_server
from gpulse.cluster.agent.identity import AgentIdentity
from gpulse.cluster.agent.metrics_server import MetricsPage, MetricsServer
from gpulse.cluster.agent.sampling_thread import sample_standalone
from gpulse.errors import GpulseError, UsageError
from gpulse.model.device import Node
from gpulse.model.finding import Finding
from gpulse.model.frame import Frame, HostReading
from gpulse.sources.demo_machine import DemoMachine

NOW = 1_767_225_600.0
TOKEN = "0123456789abcdef" * 4
ME = AgentIdentity("gpu-7", "machine", "boot", "instance", 1)


class Clock:
    """A clock that is set."""

    def __init__(self) -> None:
        self.now = NOW

    def __call__(self) -> float:
        """Epoch seconds."""
        return self.now


def board_by(clock: Clock, *, dcgm_names: bool = False) -> MetricsPage:
    """A board that goes by such a clock, as the frames of the demo machine do."""
    return MetricsPage(ME, dcgm_names=dcgm_names, clock=clock, monotonic=clock)


@asynccontextmanager
async def opened(board: MetricsPage, access: AccessPolicy | None = None) -> AsyncIterator[int]:
    """A server on this machine; its port."""
    made = MetricsServer(board, access or AccessPolicy(TOKEN, who="agent"))
    await made.start("127.0.0.1", 0)
    try:
        yield int(made.address.rpartition(":")[2])
    finally:
        await made.close()


async def ask(port: int, request: str) -> tuple[int, dict[str, str], bytes]:
    """Send some bytes; the status, the headers and the body that come back."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request.encode("latin-1"))
        raw = await asyncio.wait_for(reader.read(), 60)
    finally:
        writer.close()
        await writer.wait_closed()
    head, _, body = raw.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    return int(first.split()[1]), dict(line.split(": ", 1) for line in lines), body


def get(path: str, *headers: str, method: str = "GET", host: str = "localhost") -> str:
    """A request as it is sent."""
    return "\r\n".join([f"{method} {path} HTTP/1.1", f"Host: {host}", *headers, "", ""])


def demo(seconds: float = 0.0) -> Frame:
    """A frame of the demo machine."""
    machine = DemoMachine(NOW - 60, gpus=2)
    try:
        return machine.sample(NOW + seconds)
    finally:
        machine.close()


async def test_the_newest_frame_is_served() -> None:
    """What was taken last, whoever asks; nothing is read for it."""

    clock = Clock()
    board = board_by(clock)
    async with opened(board) as port:
        status, _, body = await ask(port, get("/metrics"))
        assert (200, False) == (status, b"gpulse_gpu_" in body)
        board.show(demo(), (), 1.0)
        status, headers, body = await ask(port, get("/metrics"))
        packed = await ask(port, get("/metrics", "Accept-Encoding: gzip"))
        empty = await ask(port, get("/metrics", method="HEAD"))

    assert (200, "text/plain; version=0.0.4; charset=utf-8") == (status, headers["Content-Type"])
    assert 2 == body.count(b'\ngpulse_gpu_power_watts{node="gpu-7"')
    assert b"\ngpulse_agent_frames_total 1\n" in body
    assert b"\ngpulse_build_info{version=" in body
    assert "gzip" == packed[1]["Content-Encoding"]
    assert b'\ngpulse_gpu_power_watts{node="gpu-7"' in gzip.decompress(packed[2])
    assert (200, b"") == (empty[0], empty[2])


async def test_dcgm_names() -> None:
    """The same frame under the other names."""

    board = board_by(Clock(), dcgm_names=True)
    board.show(demo(), (), 1.0)
    async with opened(board) as port:
        _, _, body = await ask(port, get("/metrics"))

    assert 2 == body.count(b"\nDCGM_FI_DEV_POWER_USAGE{")
    assert b"\ngpulse_gpu_" not in body
    assert b'\ngpulse_up{node="gpu-7"} 1\n' in body


async def test_old_frames_are_not_served_as_fresh() -> None:
    """When sampling stands still, readings go, and it is not ready any more."""

    clock = Clock()
    board = board_by(clock)
    async with opened(board) as port:
        before = await ask(port, get("/-/ready"))
        board.show(demo(), (), 1.0)
        ready = await ask(port, get("/-/ready"))
        clock.now += 11
        late = await ask(port, get("/-/ready"))
        _, _, body = await ask(port, get("/metrics"))
        healthy = await ask(port, get("/-/healthy"))

    assert [503, 200, 503, 200] == [answer[0] for answer in (before, ready, late, healthy)]
    assert "the newest sample is 11 s old" == json.loads(late[2])["error"]
    assert b"gpulse_gpu_" not in body
    assert b'\ngpulse_up{node="gpu-7"} 0\n' in body
    assert b'\ngpulse_frame_age_seconds{node="gpu-7"} 11.0\n' in body


@pytest.mark.parametrize(
    ("interval", "age", "is_fresh"),
    [(1.0, 10, True), (1.0, 11, False), (30.0, 149, True), (30.0, 151, False)],
)
def test_a_frame_is_fresh_for_ten_seconds_or_five_intervals(
    interval: float, age: float, is_fresh: bool
) -> None:
    """Also the first one; how long a frame before it was late says nothing about the next."""

    clock = Clock()
    alone, after_a_hang = board_by(clock), board_by(clock)
    alone.show(demo(), (), interval)
    after_a_hang.show(demo(-100), (), interval)
    after_a_hang.show(demo(), (), interval)
    clock.now += age

    for board in (alone, after_a_hang):
        assert is_fresh == (board.trouble() is None)
        assert is_fresh == ("gpulse_gpu_power_watts" in "".join(board.pieces()))


def test_setting_the_clock_makes_nothing_fresh() -> None:
    """Nor anything old: ages are those of a clock that nobody sets."""

    wall, steady = Clock(), Clock()
    board = MetricsPage(ME, clock=wall, monotonic=steady)
    board.show(demo(), (), 1.0)
    steady.now += 20
    wall.now -= 3600
    assert "the newest sample is 20 s old" == board.trouble()
    assert 'gpulse_frame_age_seconds{node="gpu-7"} 20.0\n' in "".join(board.pieces())

    board.show(demo(20), (), 1.0)
    wall.now += 7200

    assert None is board.trouble()
    assert 'gpulse_up{node="gpu-7"} 1\n' in "".join(board.pieces())


async def test_rates_are_those_since_the_frame_before() -> None:
    """Counters of two frames give what the catalogue derives from them."""

    board = board_by(Clock())
    for second, user, idle in ((-2, 10.0, 10.0), (0, 11.0, 13.0)):
        values = {"cpu_user_seconds_total": user, "cpu_idle_seconds_total": idle}
        values |= dict.fromkeys(
            [f"cpu_{part}_seconds_total" for part in ("nice", "system", "iowait", "irq", "softirq", "steal")],
            0.0,
        )
        board.show(Frame(NOW + second, NOW + second, Node("x"), host=HostReading(values)), (), 2.0)

    assert 'gpulse_host_cpu_utilization_ratio{node="gpu-7"} 0.25\n' in "".join(board.pieces())


async def test_who_may_ask() -> None:
    """This machine by its own name; others with the token; pages of other origins never."""

    board = board_by(Clock())
    proxied = "X-Forwarded-For: 10.0.0.1"
    bearer = f"Authorization: Bearer {TOKEN}"
    async with opened(board) as port:
        allowed = [
            await ask(port, get("/metrics")),
            await ask(port, get("/metrics", host=f"127.0.0.1:{port}")),
            await ask(port, get("/metrics", proxied, bearer)),
            await ask(port, get("/metrics", bearer, host="gpu-7.example")),
        ]
        refused = [
            await ask(port, get("/metrics", proxied)),
            await ask(port, get("/-/healthy", proxied)),
            await ask(port, get("/metrics", proxied, "Authorization: Bearer wrong")),
            await ask(port, get("/metrics", proxied, bearer, bearer)),
            await ask(port, get("/metrics", host="rebound.example")),
            await ask(port, get("/metrics", "Origin: https://elsewhere.example")),
        ]
    async with opened(board, AccessPolicy(None, insecure=True, who="agent")) as port:
        open_door = await ask(port, get("/metrics", proxied))

    assert [200] * 4 == [answer[0] for answer in allowed]
    assert [401, 401, 401, 401, 403, 403] == [answer[0] for answer in refused]
    assert (
        "this agent requires a token for requests from other machines" == json.loads(refused[0][2])["error"]
    )
    words = [json.loads(answer[2]) for answer in refused]
    assert "this agent refuses requests from other websites" == words[-1]["error"]
    assert [] == [
        each for each in words if "head" in (each["error"] + each["hint"]).replace("Host header", "").split()
    ]
    assert 'Bearer realm="gpulse"' == refused[0][1]["WWW-Authenticate"]
    assert 200 == open_door[0]


@pytest.mark.parametrize(
    ("request_text", "status"),
    [
        (get("/nothing"), 404),
        (get("/metrics", method="POST", host="localhost"), 405),
        (get("/metrics", "Content-Length: 3", "Content-Type: text/plain", method="POST"), 415),
        (get("/metrics?x=1"), 200),
        (get("/metrics", "Host: rebound.example"), 400),
        ("nonsense\r\n\r\n", 400),
        ("GET /metrics HTTP/2.0\r\n\r\n", 400),
        ("GET http://localhost/metrics HTTP/1.1\r\n\r\n", 400),
        (get("/metrics", *(f"X-{number}: 1" for number in range(200))), 431),
        (get("/metrics", "X: " + "x" * 100_000), 431),
        (get("/metrics", "X: " + "x" * 31_000), 200),
    ],
)
async def test_odd_requests(request_text: str, status: int) -> None:
    """Each gets an answer that says what is wrong."""

    async with opened(board_by(Clock())) as port:
        assert status == (await ask(port, request_text))[0]


async def test_slow_and_many_connections_do_not_keep_others_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Backends so many at once, who has said nothing for longest is cut off, long before its time is over."""

    monkeypatch.setattr(metrics_server, "_REQUEST_SECONDS", 600.0)
    monkeypatch.setattr(metrics_server, "_MAX_CONNECTIONS", 4)
    async with opened(board_by(Clock())) as port:
        silent = []
        for _ in range(4):
            silent.append(await asyncio.open_connection("127.0.0.1", port))
            await asyncio.sleep(0.01)
        try:
            assert 200 == (await ask(port, get("/-/healthy")))[0]
            assert b"" == await asyncio.wait_for(silent[0][0].read(), 60)
            assert 200 == (await ask(port, get("/-/healthy")))[0]
        finally:
            for _, writer in silent:
                writer.close()
                with suppress(OSError):
                    await writer.wait_closed()


async def test_who_says_nothing_is_cut_off_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when there is room for more connections, and not before its time is over."""

    monkeypatch.setattr(metrics_server, "_REQUEST_SECONDS", 0.3)
    async with opened(board_by(Clock())) as port:
        started = time.monotonic()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            assert b"" == await asyncio.wait_for(reader.read(), 60)
            assert time.monotonic() - started > 0.2
        finally:
            writer.close()
            await writer.wait_closed()


async def test_a_port_that_is_taken() -> None:
    """Whoever has it is named."""

    board = MetricsPage(ME)
    async with opened(board) as port:
        with pytest.raises(GpulseError, match="is using this port") as caught:
            await MetricsServer(board, AccessPolicy(None)).start("127.0.0.1", port)
    assert "--metrics-port" in (caught.value.hint or "")


async def test_an_agent_without_a_head_samples_until_told_to_stop() -> None:
    """Frames are shown one after the other, and the source is closed in the end."""

    board, stop, seen = MetricsPage(ME), asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def show(frame: Frame, findings: Sequence[Finding], interval_seconds: float) -> None:
        board.show(frame, findings, interval_seconds)
        if "gpulse_agent_frames_total 3\n" in "".join(board.pieces()):
            loop.call_soon_threadsafe(seen.set)

    machine = DemoMachine(0.0, gpus=1)
    running = asyncio.create_task(
        sample_standalone(machine, interval_seconds=0.05, seen=show, stop=stop, diagnosis=False)
    )
    await asyncio.wait_for(seen.wait(), 60)
    stop.set()
    await asyncio.wait_for(running, 60)


def test_an_agent_needs_somebody_to_sample_for() -> None:
    """A head, a port for Prometheus, or both; and options about a port need one."""

    with pytest.raises(UsageError, match="needs a HEAD, a --metrics-port, or both"):
        agent.start()
    for wrong in (MetricsOptions(dcgm_names=True), MetricsOptions(insecure=True), MetricsOptions(host="::")):
        with pytest.raises(UsageError, match="require --metrics-port"):
            agent.start(head="localhost", metrics=wrong)


def test_lines_of_code_need_a_head_and_programs(tmp_path: Path) -> None:
    """They are not for Prometheus, and the programs of a recording do not run here."""

    with pytest.raises(UsageError, match="--lines requires a HEAD"):
        agent.start(metrics=MetricsOptions(port=0), lines=True)
    for source in ({"demo": True}, {"replay": tmp_path / "x.jsonl"}):
        with pytest.raises(UsageError, match="--lines cannot be used with --demo or --replay"):
            agent.start(head="localhost", lines=True, **source)


def test_an_agent_takes_back_its_own_note_alone(tmp_path: Path) -> None:
    """Where two share a directory, the one that ends first leaves the other's process number there."""

    note = tmp_path / "agent.pid"
    agent._write_pid_file(note)
    agent._remove_pid_file(note)
    assert not note.exists()
    note.write_text("1\n", encoding="ascii")
    agent._remove_pid_file(note)
    agent._remove_pid_file(tmp_path / "none")

    assert "1\n" == note.read_text(encoding="ascii")


def test_the_address_that_is_told_is_one_that_answers() -> None:
    """Also where it is another one of this machine's own."""

    access = _metrics_access(MetricsOptions(0, "127.0.0.2"), None, None)
    request = HttpRequest("127.0.0.1", "127.0.0.2:9400")

    assert None is access.check_http(request)
    assert None is not access.check_http(request._replace(host="127.0.0.3:9400"))
