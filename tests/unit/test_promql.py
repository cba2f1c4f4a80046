from __future__ import annotations

import json
import math
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar
from urllib.parse import parse_qs

import pytest

from gpulse.store.tsdb import promql, write_client
from gpulse.store.tsdb.config import TsdbConfig, TsdbError
from gpulse.store.tsdb.promql import PromqlClient
from tests.integration.cluster import free_port

Answer = Callable[["Desk"], None]


class Desk(BaseHTTPRequestHandler):
    """Answers as a test says, and remembers what was asked."""

    protocol_version = "HTTP/1.1"
    answer: ClassVar[Answer]
    asked: ClassVar[list[tuple[str, dict[str, list[str]], dict[str, str]]]]
    connections: ClassVar[set[Any]]

    def do_POST(self) -> None:
        """Any question."""
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        self.asked.append((self.path, parse_qs(body), dict(self.headers)))
        self.connections.add(self.client_address)
        type(self).answer(self)

    def say(self, status: int, content: bytes, **headers: str) -> None:
        """Send an answer."""
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def leave(self, content: bytes = b"") -> None:
        """Hang up."""
        self.wfile.write(content)
        self.connection.shutdown(socket.SHUT_RDWR)
        self.close_connection = True

    def log_message(self, *_: object) -> None:
        """Nothing is printed."""


@contextmanager
def desk(answer: Answer) -> Iterator[tuple[type[Desk], str]]:
    """A server that answers so, and where it is."""
    made = type("Made", (Desk,), {"answer": staticmethod(answer), "asked": [], "connections": set()})
    with ThreadingHTTPServer(("127.0.0.1", 0), made) as server:
        server.daemon_threads = False
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield made, f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def open_client(url: str, **others: Any) -> Iterator[PromqlClient]:
    """A client of a time-series database there."""
    client = PromqlClient(TsdbConfig("", url), **others)
    try:
        yield client
    finally:
        client.close()


def found(kind: str, result: object) -> Answer:
    """An answer as databases give it."""
    document = {"status": "success", "data": {"resultType": kind, "result": result}}
    return lambda it: it.say(200, json.dumps(document).encode())


def test_samples_are_read_as_they_were_written() -> None:
    """Numbers are text in an answer, and some are no numbers at all."""

    result = [{"metric": {"node": "a"}, "value": [1700000000.123, text]} for text in ("0.1", "+Inf", "NaN")]
    with desk(found("vector", result)) as (_, url), open_client(url) as client:
        samples = client.vector("up")

        assert [0.1, float("inf")] == [sample.value for sample in samples[:2]]
        assert math.isnan(samples[2].value)
        assert ({"node": "a"}, 1700000000.123) == samples[0][:2]


def test_questions_are_whole_and_go_to_the_address_below_the_base() -> None:
    """Headers go with each, and whatever keeps a time-series database from an old or a partial answer."""

    tsdb = TsdbConfig("", "", headers={"X-Scope-OrgID": "lab"})
    with desk(found("matrix", [])) as (made, url):
        client = PromqlClient(tsdb._replace(query_url=f"{url}/prometheus/"))
        client.range("up", start=1.0, end=2.5, step=0.5)
        client.matrix("up[5s]", 7.0004)
        client.close()

    (path, form, headers), (other, more, _) = made.asked
    assert ("/prometheus/api/v1/query_range", "/prometheus/api/v1/query") == (path, other)
    assert (["1.000"], ["2.500"], ["0.500"]) == (form["start"], form["end"], form["step"])
    assert ["7.000"] == more["time"]
    assert ["1"] == form["nocache"] == form["deny_partial_response"]
    assert ["false"] == form["partial_response"]
    assert "lab" == headers["X-Scope-OrgID"]


def test_a_connection_is_used_again() -> None:
    """Also after a refusal, and anew when the database closed it meanwhile."""

    def last(it: Desk) -> None:
        found("vector", [])(it)
        it.close_connection = True

    answers: list[Answer] = [
        found("vector", []),
        lambda it: it.say(422, b'{"status":"error","error":"too many"}'),
        last,
        found("vector", []),
    ]

    def answer(it: Desk) -> None:
        answers.pop(0)(it)

    with desk(answer) as (made, url), open_client(url) as client:
        client.vector("up")
        with pytest.raises(TsdbError, match="too many"):
            client.vector("up")
        client.vector("up")
        client.vector("up")  # the database has closed it by now, without a word

        assert 4 == len(made.asked)
        assert 2 == len(made.connections)


@pytest.mark.parametrize(
    ("answer", "message", "hint"),
    [
        (lambda it: it.say(401, b"who?"), r"rejected a query \(HTTP 401\): who\?", "--remote-headers"),
        (lambda it: it.say(404, b""), r"\(HTTP 404\): Not Found", "/api/v1/query"),
        (lambda it: it.say(302, b"", Location="http://x/"), r"\(HTTP 302\)", "--remote-query"),
        (lambda it: it.say(503, b"<b>busy\x1b[2J\n</b>"), r"\(HTTP 503\): <b>busy\?\[2J </b>$", "try again"),
        (lambda it: it.say(200, b"<html>hello</html>"), "does not support", "--remote-query"),
        (lambda it: it.say(200, b'{"status":"success"}'), "does not support", "--remote-query"),
        (lambda it: it.say(200, b"[" * 100_000), "does not support", "--remote-query"),
        (found("scalar", [0, "1"]), "does not support", "--remote-query"),
        (found("vector", [{"metric": [], "value": [0, "1"]}]), "does not support", "--remote-query"),
        (found("vector", [{"metric": {}, "value": [0, "one"]}]), "does not support", "--remote-query"),
        (
            lambda it: it.say(200, b'{"status":"success","isPartial":true,"data":{}}'),
            "only a partial",
            "nodes",
        ),
        (lambda it: it.say(200, b'{"status":"error","error":"x"}'), r"\(HTTP 200\): x", "log"),
        (lambda it: it.leave(), "cannot reach", "running"),
        (
            lambda it: it.leave(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{"),
            "cannot reach",
            "running",
        ),
    ],
)
def test_a_database_that_does_not_answer_well_is_told_apart(answer: Answer, message: str, hint: str) -> None:
    """With what to try next, and nothing in it that a terminal would obey."""

    with desk(answer) as (_, url), open_client(url) as client:
        with pytest.raises(TsdbError, match=message) as refused:
            client.vector("up")

        assert hint in str(refused.value.hint)
        assert "\x1b" not in refused.value.message


def test_a_database_that_is_not_there_is_said_so() -> None:
    """At once."""

    with open_client(f"http://127.0.0.1:{free_port()}") as client, pytest.raises(TsdbError, match="refused"):
        client.vector("up")


def test_a_slow_answer_is_not_waited_for_for_long() -> None:
    """Even when a little of it comes all the time."""

    done = threading.Event()

    def drip(it: Desk) -> None:
        it.send_response(200)
        it.send_header("Content-Length", "1000000")
        it.end_headers()
        with suppress(OSError):
            while not done.wait(0.02):
                it.wfile.write(b" ")
        it.close_connection = True

    with desk(drip) as (_, url):
        with (
            open_client(url, timeout_seconds=0.2) as client,
            pytest.raises(TsdbError, match=r"within 0\.2 s"),
        ):
            client.vector("up")
        done.set()


def test_an_answer_that_is_too_large_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it is in memory."""

    monkeypatch.setattr(promql, "_MAX_ANSWER_BYTES", 1 << 20)
    with desk(lambda it: it.say(200, bytes(3 << 20))) as (_, url), open_client(url) as client:
        with pytest.raises(TsdbError, match="larger than 1 MiB") as refused:
            client.vector("up")

        assert "shorter" in str(refused.value.hint)


@pytest.mark.parametrize("url", ["", "ftp://x", "database:8428", "http://", "http://x:99999/"])
def test_what_is_no_address_is_refused(url: str) -> None:
    """Before anything is asked."""

    with pytest.raises(TsdbError):
        PromqlClient(TsdbConfig("", url))


def test_an_authority_that_is_none_is_refused() -> None:
    """With the option that names it."""

    with pytest.raises(TsdbError, match="authorities") as refused:
        PromqlClient(TsdbConfig("", "https://database", ca="/no/such/file"))

    assert "--remote-ca" in str(refused.value.hint)


@contextmanager
def dripping(beginning: bytes) -> Iterator[str]:
    """A server that begins an answer at once and then sends a byte now and then, and where it is."""
    is_over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            with suppress(OSError):
                connection, _ = listening.accept()
                with connection:
                    connection.sendall(beginning)
                    while not is_over.wait(0.02):
                        connection.sendall(b"1")

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            is_over.set()
            thread.join()


@pytest.mark.parametrize(
    "beginning",
    [
        b"HTTP/1.1 200 OK\r\nX: a",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 9999\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n\r\n",
    ],
)
def test_a_database_that_drips_is_not_waited_for(beginning: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte now and then is no answer: of the whole of it there is one time, for questions and for samples."""

    monkeypatch.setattr(write_client, "_TIMEOUT_SECONDS", 0.15)
    monkeypatch.setattr(write_client, "_METRICS_SECONDS", 0.15)
    late = pytest.raises(TsdbError, match=r"did not answer within 0\.15 s")
    with dripping(beginning) as url, open_client(url, timeout_seconds=0.15) as client, late:
        client.vector("up")
    with (
        dripping(beginning) as url,
        pytest.raises(write_client.ConnectionFailed, match="did not answer within") as broken,
    ):
        write_client.WriteClient(TsdbConfig(f"{url}/api/v1/write")).post(b"")
    assert not broken.value.hard
    with dripping(beginning) as url:
        assert write_client.WriteClient(TsdbConfig("http://x/", url)).started() is None


@pytest.mark.parametrize(
    "result",
    [
        [{"metric": {}, "value": [1, int("9" * 400)]}],
        [{"metric": {"node": ["q"]}, "value": [1, "1"]}],
        [{"metric": {"host": 5}, "value": [1, "1"]}],
    ],
)
def test_an_answer_that_no_database_would_give(result: object) -> None:
    """It is an error of the database's, and not one of ours."""

    odd = pytest.raises(TsdbError, match="does not support the Prometheus")
    with desk(found("vector", result)) as (_, url), open_client(url) as client, odd:
        client.vector("up")
