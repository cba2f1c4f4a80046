"""Prometheus at the door: `/metrics` of a head of a thousand GPUs that takes frames all the while, and of an agent."""

from __future__ import annotations

import http.client
import json
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Self

from benchmarks import measure
from benchmarks.measure import Report, Spread, Table, Target
from benchmarks.processes import Head, Process, cores, cpu_seconds, workplace
from gpulse.cluster.agent.identity import AgentIdentity
from gpulse.cluster.agent.metrics_server import MetricsPage
from gpulse.sources.demo_machine import DemoMachine

NAME = "scrape"
_GPUS = 8
_SETTLE_SECONDS = 5.0
_PROBE_SECONDS = 0.01
_MOST_SCRAPE, _MOST_HELD = 0.200, 0.050
_PLAIN: Mapping[str, str] = {}
_PACKED = {"Accept-Encoding": "gzip"}


class Size(NamedTuple):
    """How much of everything."""

    nodes: int
    scrapes: int


_FULL = Size(125, 25)
_QUICK = Size(20, 5)


class _Probe:
    """Asks a head for next to nothing all the time: what it waits for is a loop that is held up."""

    def __init__(self, host: str, port: int) -> None:
        self._connection = http.client.HTTPConnection(host, port, timeout=30)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._work)
        self.waits: list[float] = []

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self._connection.close()

    def _work(self) -> None:
        while not self._ended.wait(_PROBE_SECONDS):
            begun = time.perf_counter()
            self._connection.request("GET", "/-/healthy")
            self._connection.getresponse().read()
            self.waits.append(time.perf_counter() - begun)


@contextmanager
def _served(size: Size, *options: str) -> Iterator[tuple[Head, str, int]]:
    """A head with a fleet that sends, and where its HTTP side is."""
    _, others = cores()
    seconds = 3 * size.scrapes + 60.0
    with workplace() as folder, Head(folder, "--freq", "1000", *options, core=None) as head:
        command = [sys.executable, "-m", "benchmarks.fleet", head.address, "--agents", str(size.nodes)]
        command += ["--gpus", str(_GPUS), "--seconds", str(seconds), "--jobs"]
        with Process(command, folder, core=others) as made:
            start = made.lines(1, 120.0)[0]["start"]
            time.sleep(max(0.0, start - time.time()) + _SETTLE_SECONDS)
            host, _, port = json.loads((head.data / "head.json").read_text())["http"].rpartition(":")
            yield head, host, int(port)


class _Taken(NamedTuple):
    """How scrapes went."""

    seconds: list[float]
    cpu: list[float]
    size: int
    samples: int
    waits: list[float]


def _scrape(host: str, port: int, headers: Mapping[str, str]) -> bytes:
    connection = http.client.HTTPConnection(host, port, timeout=30)
    try:
        connection.request("GET", "/metrics", headers=dict(headers))
        return connection.getresponse().read()
    finally:
        connection.close()


def _scraped(head: Head, host: str, port: int, headers: Mapping[str, str], times: int) -> _Taken:
    """Scrape once a second, as frames come: no page is the one before. First alone, then beside others that ask."""
    seconds, cpu, body = [], [], b""
    for _ in range(times):
        used, begun = cpu_seconds(head.pid), time.perf_counter()
        body = _scrape(host, port, headers)
        seconds.append(time.perf_counter() - begun)
        cpu.append(cpu_seconds(head.pid) - used)
        time.sleep(1.0)
    with _Probe(host, port) as probe:
        for _ in range(times // 2):
            _scrape(host, port, headers)
            time.sleep(1.0)
    lines = _scrape(host, port, _PLAIN).splitlines()
    return _Taken(seconds, cpu, len(body), sum(not line.startswith(b"#") for line in lines), probe.waits)


def _idle(host: str, port: int) -> list[float]:
    with _Probe(host, port) as probe:
        time.sleep(5.0)
    return probe.waits


def head(report: Report, size: Size) -> None:
    """A head that takes a fleet's frames and is scraped."""
    gpus = size.nodes * _GPUS
    table = Table(
        f"`/metrics` of a head with {gpus:,} GPUs on {size.nodes} nodes at 1 Hz, {size.scrapes} scrapes; the fleet has one of two cores:",
        ("names", "samples", "on the wire", "scrape", "of that CPU", "others wait, 99 %", "at most"),
    )
    for name, options, headers in (
        ("ours, gzip", (), _PACKED),
        ("ours, plain", (), _PLAIN),
        ("DCGM's, gzip", ("--dcgm-names",), _PACKED),
    ):
        with _served(size, *options) as (made, host, port):
            idle = _idle(host, port)
            taken = _scraped(made, host, port, headers, size.scrapes)
        took, used = Spread.of(taken.seconds), Spread.of(taken.cpu)
        table.rows.append(
            (
                name,
                f"{taken.samples:,}",
                f"{taken.size / 1e6:.2f} MB",
                took.text(1e3, 0, " ms"),
                used.text(1e3, 0, " ms"),
                f"{_late(taken.waits) * 1e3:.0f} ms ({_late(idle) * 1e3:.0f} ms without scrapes)",
                f"{max(taken.waits) * 1e3:.0f} ms",
            )
        )
        if headers:
            report.targets += [
                Target(
                    f"{name}: a scrape of {gpus:,} GPUs",
                    f"{took.median * 1e3:.0f} ms",
                    "200 ms",
                    took.median < _MOST_SCRAPE,
                ),
                Target(
                    f"{name}: 99 % of other requests meanwhile",
                    f"{_late(taken.waits) * 1e3:.0f} ms",
                    "50 ms",
                    _late(taken.waits) < _MOST_HELD,
                ),
            ]
    report.tables.append(table)


def _late(waits: Sequence[float]) -> float:
    return sorted(waits)[int(0.99 * (len(waits) - 1))]


def agent(report: Report, size: Size) -> None:
    """What an agent's page costs its machine."""
    table = Table("A page of an agent with eight GPUs:", ("names", "samples", "CPU"))
    machine = DemoMachine(time.time(), gpus=_GPUS)
    try:
        frames = [machine.sample(time.time() + second) for second in range(2)]
    finally:
        machine.close()
    for name, dcgm_names in (("ours", False), ("DCGM's", True)):
        me = AgentIdentity("node", "m", "b", "i", 1)
        board = MetricsPage(me, dcgm_names=dcgm_names, monotonic=lambda: frames[-1].monotonic)
        for frame in frames:
            board.show(frame, (), 1.0)
        takes, page = [], ""
        for _ in range(4 * size.scrapes):
            begun = time.process_time()
            page = "".join(board.pieces())
            takes.append(time.process_time() - begun)
        lines = sum(not line.startswith("#") for line in page.splitlines())
        table.rows.append((name, f"{lines:,}", Spread.of(takes).text(1e3, 1, " ms")))
    report.tables.append(table)


def main() -> None:
    """`python -m benchmarks.scrape`."""
    given = measure.parser(NAME, __doc__).parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    size = _QUICK if given.quick else _FULL
    report = Report(NAME, "Prometheus at the door", module=NAME)
    head(report, size)
    agent(report, size)
    measure.publish(report, write=given.write)


if __name__ == "__main__":
    main()
