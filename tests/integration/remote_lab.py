"""A head's archive that is sent to a time-series database, and what the database has then."""

from __future__ import annotations

import json
import math
import threading
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import cramjam

from gpulse.model.metric_catalog import CATALOG
from gpulse.model.packed_columns import ColumnLayout, layout_id
from gpulse.model.series_labels import EXPOSED_SCOPES, subject_label_name
from gpulse.store.local import LocalStore
from gpulse.store.log.record_payloads import LogEntry
from gpulse.store.tsdb.config import TsdbConfig
from gpulse.store.tsdb.send_process import DurableMark, Sender
from gpulse.store.tsdb.send_supervisor import TsdbForwarder
from gpulse.store.tsdb.write_request import format_labels, series_labels, split_series
from tests.integration.cluster import until
from tests.integration.tsdb_servers import TsdbProcess
from tests.queries import query
from tests.unit.history_frames import BEGIN, Fleet

Found = dict[tuple[str, str, str], dict[int, float]]
"""By metric, node and subject the values, by milliseconds."""


class SenderThread(TsdbForwarder):
    """A forwarder whose process is a thread of the test, so that a test can change its constants."""

    def start(self) -> None:
        """Begin to send."""
        self._durable = DurableMark(self._announced)
        sender = Sender(self._data_dir, self._config, self._durable, self._update_state)
        self._sending = threading.Thread(target=sender.run)
        self._sending.start()

    def wake(self, position: int) -> None:
        """Say that records up to here are on disk."""
        super().wake(position)
        if hasattr(self, "_durable"):
            self._durable.advance(position)

    def close(self) -> None:
        """End the thread."""
        self._durable.end()
        self._sending.join()


class Lab:
    """An archive, filled second by second, whose log goes to a time-series database."""

    def __init__(
        self,
        directory: Path,
        tsdb: TsdbConfig,
        *,
        nodes: int = 3,
        limit_bytes: int = 1 << 30,
        begin: int = 0,
        in_thread: bool = False,
    ) -> None:
        self.fleet = Fleet()
        self.nodes = range(1, nodes + 1)
        self.second = begin
        self._told: set[int] = set()
        self.archive = LocalStore(str(directory), layouts=self.fleet.layouts)
        kind = SenderThread if in_thread else TsdbForwarder
        self.forwarder = kind(str(directory), tsdb, limit_bytes=limit_bytes)
        self.archive.forward_to(self.forwarder)
        self.forwarder.start()

    def tick(self, seconds: int = 1, *, shift_us: int = 0) -> None:
        """Some more seconds of all nodes come and are committed, from clocks that are wrong by so much."""
        batches = [self.fleet.batch(node, self.second, seconds, shift=shift_us) for node in self.nodes]
        self.archive.commit([*self._facts(), *(LogEntry.of_batch(batch, ()) for batch in batches)])
        self.second += seconds

    def _facts(self) -> list[LogEntry]:
        """What is said once, and the layouts that are new."""
        new = self.fleet.texts.keys() - self._told
        nodes = () if self._told or self.second else self.nodes
        self._told |= new
        entries = [
            LogEntry.of_fact(
                "node",
                id=node,
                name=f"host-{node}",
                host=f"host-{node}",
                machine=f"m{node}",
                time=BEGIN,
                facts={"driver": "580.1"},
            )
            for node in nodes
        ]
        return entries + [
            LogEntry.of_fact("layout", id=str(number), text=self.fleet.texts[number].decode())
            for number in new
        ]

    def learn(self, text: bytes) -> int:
        """Make a layout known to the archive; its number."""
        number = layout_id(text)
        self.fleet.layouts[number] = ColumnLayout.from_json(text)
        return number

    def sent_some(self, seconds: int) -> None:
        """Wait until the database has some seconds more."""
        goal = self.archive.accepted + seconds * len(self.nodes)
        until(lambda: self.forwarder.reached >= goal, "more is sent")

    def sent(self) -> None:
        """Wait until the database has everything."""
        until(self.is_sent, f"everything is sent: {self.forwarder.state()}")

    def is_sent(self) -> bool:
        """Whether nothing waits and nothing is wrong."""
        state = self.forwarder.state()
        return state.state == "ok" and self.forwarder.reached >= self.archive.accepted

    def shorten(self) -> int:
        """Do what happens to the log when all of it was sealed; how long it is then."""
        self.archive._shorten_log(self.archive.accepted)
        return self.archive.usage().log_bytes

    def close(self) -> None:
        """End it."""
        self.forwarder.close()
        self.archive.close()


@contextmanager
def lab_in(directory: Path, tsdb: TsdbConfig, **given: Any) -> Iterator[Lab]:
    """A lab for one test."""
    lab = Lab(directory, tsdb, **given)
    try:
        yield lab
    finally:
        lab.close()


def stored(archive: LocalStore) -> Found:
    """Everything that the archive has and a time-series database should."""
    names = {number: node.name for number, node in archive.nodes().items()}
    found: Found = {}
    for scope in EXPOSED_SCOPES:
        for metric in CATALOG[scope].values():
            for series in archive.series(query(scope, metric.name, start=0, end=1e11)):
                values = {
                    round(time * 1e6) // 1000: value * metric.prometheus_factor
                    for time, value in zip(series.times.tolist(), series.values.tolist(), strict=True)
                    if not math.isnan(value)
                }
                if values:
                    found[metric.prometheus, names[series.key.node], series.key.subject] = values
    return found


def held(tsdb: TsdbProcess, *, start: float = BEGIN - 10, end: float = BEGIN + 3000) -> Found:
    """Everything that a time-series database has, facts of GPUs and nodes aside."""
    tsdb.settle()
    found: Found = {}
    scopes = {
        metric.prometheus: (scope, metric) for scope in EXPOSED_SCOPES for metric in CATALOG[scope].values()
    }
    for labels, values in raw(tsdb, '{__name__=~"gpulse_.+"}', start, end):
        if labels["__name__"] in scopes:
            label = subject_label_name(scopes[labels["__name__"]][0])
            key = labels["__name__"], labels["node"], labels[label] if label else ""
            assert key not in found, key
            found[key] = values
    return found


def raw(
    tsdb: TsdbProcess, selector: str, start: float, end: float
) -> list[tuple[dict[str, str], dict[int, float]]]:
    """Samples as they are in a time-series database, by series."""
    query = {"query": f"{selector}[{math.ceil(end - start)}s]", "time": f"{end:.3f}", "nocache": "1"}
    document = json.loads(tsdb.get(f"/api/v1/query?{urllib.parse.urlencode(query)}"))
    answer = []
    for series in document["data"]["result"]:
        times = [round(time * 1000) for time, _ in series["values"]]
        assert len(set(times)) == len(times), "a sample is there twice"
        answer.append(
            (series["metric"], dict(zip(times, (float(value) for _, value in series["values"]), strict=True)))
        )
    return answer


class FakeTsdb:
    """An HTTP server that takes remote write, or does not."""

    def __init__(self) -> None:
        self.status = 204
        self.text = ""
        self.headers: dict[str, str] = {}
        self.wanted: Callable[[str], bool] = lambda _: True
        """Which series it takes, by how people write them; one that it does not take costs the whole request."""
        self.started = 1.0
        """When it says that it was started."""
        self.looked = 0
        """How often it was asked for that."""
        self.taken: list[bytes] = []
        self.asked: list[dict[str, str]] = []
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            wbufsize = 1 << 16

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                status, text = fake.take(dict(self.headers.items()), body)
                self.send_response(status)
                for name, value in {**fake.headers, "Content-Length": str(len(text))}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(text)

            def do_GET(self) -> None:
                fake.looked += 1
                text = f"process_start_time_seconds {fake.started}\n".encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()

    @property
    def tsdb(self) -> TsdbConfig:
        """Where it is."""
        url = f"http://127.0.0.1:{self._server.server_port}"
        return TsdbConfig(f"{url}/api/v1/write", url)

    def take(self, headers: dict[str, str], body: bytes) -> tuple[int, bytes]:
        """What to answer to a request."""
        self.asked.append(headers)
        if self.status != 204:
            return self.status, self.text.encode()
        series = list(split_series(bytes(cramjam.snappy.decompress_raw(body))))
        for one in series:
            if not self.wanted(format_labels(series_labels(one))):
                return 400, b"label value too long"
        self.taken += series
        return 204, b""

    def samples(self) -> dict[str, int]:
        """How many samples it took, by series."""
        found: dict[str, int] = {}
        for series in self.taken:
            name = format_labels(series_labels(series))
            found[name] = found.get(name, 0) + 1
        return found

    def close(self) -> None:
        """End it."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@contextmanager
def fake_tsdb() -> Iterator[FakeTsdb]:
    """A fake for one test."""
    fake = FakeTsdb()
    try:
        yield fake
    finally:
        fake.close()
