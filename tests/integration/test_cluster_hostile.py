"""Agents, clients and programs that mean no good: what they send is refused, and the head goes on."""

from __future__ import annotations

import json
import os
import random
import select
import socket
import struct
import time
import zlib
from collections.abc import Iterator
from contextlib import suppress
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import Any

import grpc
import pytest

from gpulse.cluster import wire
from gpulse.cluster.wire_pb2 import AgentMessage, Batch, Hello, Layout, Reply, Request, Run
from gpulse.model.packed_columns import ColumnBlock, PackedFrame, layout_id
from tests.integration.cluster import (
    SEALING,
    AgentProcess,
    Cluster,
    HeadProcess,
    call,
    cluster_in,
    talk,
    until,
)

_INVALID = grpc.StatusCode.INVALID_ARGUMENT
_GPU = {"index": 0, "uuid": "GPU-hostile", "name": "NVIDIA Hostile"}
_HUGE = 100 << 20


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A head and an agent for all tests of this file."""
    with cluster_in(tmp_path_factory.mktemp("hostile")) as made:
        yield made


@pytest.fixture(scope="module")
def head(shared: Cluster) -> HeadProcess:
    """The head that is attacked; it seals all the time, so that what it took in has to be sealed as well."""
    tuned = {"gpulse.web.server:TimeoutHttpProtocol.request_seconds": 2.0}
    return shared.head("--freq", "100", *SEALING, tuned=tuned)


@pytest.fixture(scope="module")
def bystander(shared: Cluster, head: HeadProcess) -> AgentProcess:
    """An agent that has nothing to do with it."""
    agent = shared.agent("bystander", head.port)
    agent.said("connected to")
    return agent


@pytest.fixture(autouse=True)
def _goes_on(shared: Cluster, head: HeadProcess, bystander: AgentProcess) -> Iterator[None]:
    """After every test the head serves the other agent, every answer is JSON, and nothing was written elsewhere."""
    before, told = files(shared.directory), len(head.lines)
    yield
    assert head.popen.poll() is None, "\n".join(head.lines[told:])
    check_answers(head)
    frame = newest(head)
    until(lambda: newest(head) != frame, "frames of the other agent")
    assert bystander.popen.poll() is None
    assert files(shared.directory) - before <= {str(head.output_dir / "fine.json")}
    assert not [line for line in head.lines[told:] if "Traceback" in line], "\n".join(head.lines[told:])


def files(directory: Path) -> set[str]:
    """All files but those of the head's own data and the agent's spool, and what is called x beside the directory."""
    own = ("data", "agent-bystander", "state", "config")
    beside = [*directory.parent.glob("x*"), *directory.parent.parent.glob("x*"), Path("/etc/x"), Path("/x")]
    found = {str(path) for path in beside if path.exists()}
    for place, folders, names in os.walk(directory):
        if place == str(directory):
            folders[:] = [name for name in folders if name not in own]
        found |= {os.path.join(place, name) for name in names}
    return found


def newest(head: HeadProcess) -> Any:
    """When the other agent took its newest frame."""
    return head.get("/metrics/latest")["client_data"].get("bystander", {}).get("time")


def check_answers(head: HeadProcess) -> None:
    """Everything that can be asked is answered, with JSON that every parser takes."""
    for path in (
        "/status",
        "/clients",
        "/metrics/latest",
        "/profiling/sessions",
        "/api/v1/events",
        "/api/v1/findings",
        "/api/v1/findings/history",
        "/api/v1/query?metric=gpu_utilization_ratio&from=-10m",
        "/api/v1/query?metric=gpu_utilization_ratio&from=-10m&step=60",
    ):
        status, text = raw(
            head, f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode()
        )
        assert status == 200, (path, status, text[:500])
        json.loads(text, parse_constant=no_number)
    status, text = raw(head, b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    assert status == 200
    assert b"gpu" in text


def no_number(word: str) -> None:
    """What NaN and infinities in an answer come to."""
    pytest.fail(f"not valid JSON {word}")


def raw(head: HeadProcess, *pieces: bytes) -> tuple[int, bytes]:
    """Send bytes to the HTTP port until an answer comes; its status and body, 0 when there is none."""
    with socket.create_connection(("127.0.0.1", head.http_port), 20.0) as connection:
        with suppress(OSError):
            for piece in pieces:
                connection.sendall(piece)
                if select.select([connection], [], [], 0.0)[0]:
                    break
        answer = HTTPResponse(connection)
        try:
            answer.begin()
            return answer.status, answer.read()
        except (OSError, HTTPException):
            return 0, b""
        finally:
            answer.close()


# --- agents


def hello(name: str, run: bytes, **fields: Any) -> AgentMessage:
    """The first message of an agent."""
    known = {"protocol": wire.PROTOCOL, "version": "1", "host": name, "machine": f"{name}-id", "boot": "b"}
    known |= {"instance": name, "pid": 1, "monotonic_us": 10**9, "time_us": time.time_ns() // 1000}
    return AgentMessage(hello=Hello(**{**known, "runs": [Run(id=run)], **fields}))


def layout(**fields: Any) -> bytes:
    """The text of a layout, of one GPU and one metric unless told otherwise."""
    document = {
        "scope": "gpu",
        "subjects": [_GPU],
        "wide": [],
        "narrow": [["gpu_utilization_ratio", 1000, 1]],
    }
    return json.dumps({**document, **fields}).encode()


def frame(text: bytes, numbers: bytes = bytes(4), **fields: Any) -> bytes:
    """A frame of one block."""
    known = {"time_us": time.time_ns() // 1000, "monotonic_us": 10**9, "events": b"", **fields}
    blocks = (ColumnBlock(layout_id(text), numbers),)
    return PackedFrame(known["time_us"], known["monotonic_us"], blocks, known["events"]).to_bytes()


def batch(run: bytes, frames: bytes, **fields: Any) -> AgentMessage:
    """Frames."""
    known = {"run": run, "first": 1, "count": 1, "sent_monotonic_us": 10**9, "frames": frames}
    return AgentMessage(batch=Batch(**{**known, **fields}))


def said(head: HeadProcess, *messages: AgentMessage | bytes) -> tuple[grpc.StatusCode, str]:
    """Send messages as an agent would; how it ended, and the reason."""
    sent = [one if isinstance(one, bytes) else one.SerializeToString() for one in messages]
    code, why, _ = talk(f"127.0.0.1:{head.port}", sent)
    return code, why


def runs() -> Iterator[bytes]:
    """Ids that nobody had yet."""
    while True:
        yield os.urandom(16)


_RUNS = runs()


def refused(head: HeadProcess, *messages: AgentMessage | bytes, name: str = "hostile") -> str:
    """An agent says hello and then these; the words with which it is refused."""
    ids = [one.batch.run for one in messages if isinstance(one, AgentMessage) and one.HasField("batch")]
    code, words = said(head, hello(name, ids[0]), *messages)
    assert code is _INVALID, (code, words)
    assert words
    return words


def test_no_agent_at_all(head: HeadProcess) -> None:
    """Messages that are none, and a first one that is no hello, are refused."""

    run = next(_RUNS)
    whole = hello("hostile", run).SerializeToString()
    for first in (b"\xff" * 100, whole[: len(whole) // 2], random.Random(7).randbytes(5000), b""):
        assert said(head, first)[0] is _INVALID
    assert said(head, batch(run, frame(layout())))[0] is _INVALID
    assert said(head)[0] is not grpc.StatusCode.OK


@pytest.mark.parametrize(
    "fields",
    [
        {"host": ""},
        {"host": "x" * 10_240},
        {"host": "line\nbreak"},
        {"host": "\x1b[2Jscreen"},
        {"machine": ""},
        {"machine": "m" * 10_240},
        {"instance": "i" * 10_240},
        {"runs": []},
        {"runs": [Run(id=b"short")]},
        {"runs": [Run(id=bytes(16))] * 10_001},
        {"labels": {"k": "v" * 10_240}},
        {"labels": {f"k{n}": "v" for n in range(10_000)}},
        {"node": b"no json"},
        {"node": b"[1, 2]"},
        {"node": b"[" * 100_000},
        {"node": b'{"ticks_per_second": NaN}'},
        {"node": b'{"ticks_per_second": 1e999}'},
        {"node": b'{"kernel": {"a": 1}}'},
        {"node": b'{"ticks_per_second": true, "numa_cpus": ["x", 1]}'},
        {"node": b"\xff\xfe"},
    ],
    ids=lambda fields: f"{next(iter(fields))}-{str(next(iter(fields.values())))[:12]!r}",
)
def test_hello(head: HeadProcess, fields: dict[str, Any]) -> None:
    """A hello with anything odd in it is refused in words, and no node comes of it."""

    before = set(head.nodes())
    code, words = said(head, hello("hostile", next(_RUNS), **fields))
    assert code is _INVALID
    assert words.isprintable()
    assert len(words) < 1000
    assert set(head.nodes()) == before


def test_path_as_host(head: HeadProcess) -> None:
    """A host may call itself what it likes: no path is made from it."""

    run, text = next(_RUNS), layout()
    name = "../../x"
    messages = (hello(name, run), AgentMessage(layout=Layout(text=text)), batch(run, frame(text)))
    assert said(head, *messages)[0] is grpc.StatusCode.OK
    assert name in head.nodes()


def bomb() -> bytes:
    """A gibibyte of zeros, zipped: made of one part again and again, since every process that collects tests makes it."""
    size, parts = 1 << 24, 64
    packer = zlib.compressobj(9)
    first, again = (packer.compress(bytes(size)) + packer.flush(zlib.Z_FULL_FLUSH) for _ in range(2))
    total = size * parts % 65521
    return first + again * (parts - 1) + b"\x03\x00" + struct.pack(">HH", total, 1)


def lying_frames() -> Iterator[tuple[str, AgentMessage]]:
    """Batches that are not what they say."""
    text = layout()
    good = frame(text)
    cases: dict[str, tuple[bytes, dict[str, Any]]] = {
        "count too large": (good, {"count": 2}),
        "count huge": (good, {"count": (1 << 32) - 1}),
        "count zero": (good, {"count": 0}),
        "nothing": (b"", {"count": 0}),
        "nothing but a count": (b"", {"count": 5}),
        "cut off": (good[:-1], {}),
        "too long": (good + b"\0", {}),
        "noise": (random.Random(3).randbytes(4000), {}),
        "short block": (frame(text, bytes(3)), {}),
        "long block": (frame(text, bytes(4000)), {}),
        "unknown layout": (frame(b"never told"), {}),
        "length beyond the end": (struct.pack("<I", 0xFFFFFFFF) + good[4:], {}),
        "blocks beyond the end": (good[:20] + b"\xff\xff" + good[22:], {}),
        "zip bomb": (bomb(), {"zipped": True}),
        "no zip": (b"no zip at all", {"zipped": True}),
        "half a zip": (zlib.compress(good)[:-5], {"zipped": True}),
        "number too large": (good, {"first": (1 << 64) - 1}),
        "number too large for a file": (good, {"first": 1 << 63}),
        "time too large": (frame(text, time_us=(1 << 63) - 1), {}),
        "time too small": (frame(text, time_us=-(1 << 63)), {}),
        "monotonic too large": (frame(text, monotonic_us=(1 << 63) - 1), {}),
        "monotonic too small": (frame(text, monotonic_us=-(1 << 63)), {}),
        "a time after all calendars": (frame(text, time_us=1 << 60, monotonic_us=1 << 60), {}),
    }
    for name, (data, fields) in cases.items():
        yield name, batch(next(_RUNS), data, **fields)


@pytest.mark.parametrize("message", [pytest.param(message, id=name) for name, message in lying_frames()])
def test_frames(head: HeadProcess, message: AgentMessage) -> None:
    """A batch that is not what it says is refused as a whole."""

    before = head.get("/status")["nodes"]
    refused(head, AgentMessage(layout=Layout(text=layout())), message)
    after = {node["name"] for node in head.get("/status")["nodes"]}
    assert after - {node["name"] for node in before} <= {"hostile"}


def test_batch_of_nobody(head: HeadProcess) -> None:
    """Frames of a run that was not announced, and of another node's, are refused."""

    text = AgentMessage(layout=Layout(text=layout()))
    mine, other = next(_RUNS), next(_RUNS)
    assert said(head, hello("hostile", mine), text, batch(other, frame(layout())))[0] is _INVALID
    assert said(head, hello("elsewhere", mine))[0] is _INVALID


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"no json",
        b"[" * 100_000,
        b"\xff\xfe",
        layout(scope="unknown"),
        layout(subjects=[1]),
        layout(subjects=[{}]),
        layout(subjects=[{**_GPU, "index": "zero"}]),
        layout(subjects=[{**_GPU, "index": -1}]),
        layout(subjects=[{**_GPU, "index": 1 << 70}]),
        layout(subjects=[{**_GPU, "uuid": 5}]),
        layout(subjects=[{**_GPU, "uuid": "\ud800"}]),
        layout(subjects=[{**_GPU, "name": "\udfff"}]),
        layout(subjects=[{**_GPU, "name": "x" * 1_000_000}]),
        layout(subjects=[{**_GPU, "mig_index": "x"}]),
        layout(subjects=[_GPU, _GPU]),
        layout(subjects=[{**_GPU, "facts": {"power": 1e999}}]).replace(b"Infinity", b"NaN"),
        layout(subjects=[_GPU] * 70_000),
        layout(narrow=[["gpu_utilization_ratio", 1, 1]] * 2),
        layout(narrow=[["gpu_utilization_ratio", 0, 1]]),
        layout(narrow=[["gpu_utilization_ratio", 1 << 80, 1]]),
        layout(narrow=[["\ud800", 1, 1]]),
        layout(narrow=[['"; DROP TABLE nodes; --', 1, 1]]),
        layout(narrow=[["x" * 100_000, 1, 1]]),
        layout(scope="process", subjects=[{"pid": {}}]),
        layout(scope="disk", subjects=[{"name": "\ud800"}]),
        b" " * (5 << 20),
    ],
    ids=lambda text: f"{len(text)}-{text[:12]!r}",
)
def test_layout(head: HeadProcess, text: bytes) -> None:
    """A layout of things that cannot be is left out, or does no harm; at the end of all tests it has to be sealed."""

    run = next(_RUNS)
    size = 0
    with suppress(ValueError, RecursionError, KeyError):
        document = json.loads(text)
        size = len(document["subjects"]) * (8 * len(document["wide"]) + 4 * len(document["narrow"]))
    code, words = said(
        head,
        hello("hostile", run),
        AgentMessage(layout=Layout(text=text)),
        batch(run, frame(text, bytes(size))),
    )
    assert code in (grpc.StatusCode.OK, _INVALID), (code, words)


@pytest.mark.parametrize(
    "events",
    [
        b"[NaN, Infinity, -Infinity]",
        b'[{"event": "findings", "findings": [{"score": NaN, "title": "x"}], "verdict": Infinity}]',
        b'[{"event": "findings", "findings": [1, null, {"severity": {}}], "verdict": 7}]',
        b'[{"event": "findings", "findings": {"a": 1}}]',
        b'[{"event": "health", "entries": [{"source": NaN}, 1, {"source": "\\ud800", "metrics": 5}]}]',
        b'[{"event": "health", "entries": [{"source": "a", "state": {"b": []}, "metrics": [[1]]}]}]',
        b'[{"event": "process", "pid": 1e400, "start_time": NaN}]',
        b'[{"event": "process", "pid": 99999999999999999999999, "start_time": 1}]',
        b'[{"event": "process", "pid": -1, "command": "x", "owner": 5, "name": "\\ud800"}]',
        b'[{"event": "process", "pid": true, "owner": {"uid": 1e999}, "command": [[], {}]}]',
        b'[{"event": "process", "pid": 4, "start_time": 1e300, "parent_pid": 123456789012345678901234}]',
        b'[{"event": "process_end", "pid": []}]',
        b'[{"event": {"a": 1}}, 5, "x", null, [], {}]',
        b'[{"event": "clock_step", "seconds": NaN}]',
        b'[{"event": "' + b"k" * 100_000 + b'"}]',
        b'[{"event": "../../x", "detail": "\\u0000"}]',
        b"[" + b"[" * 900 + b"]" * 900 + b"]",
        b'[{"event": "findings", "findings": [' + b'{"a":' * 400 + b"1" + b"}" * 400 + b"]}]",
        b'[{"event": "agent_started"}]',
        b"{",
        b'{"event":"health"}',
        b'["\xff\xfe"]',
        b"[" * 100_000,
    ],
    ids=lambda events: events[:40].decode("ascii", "replace"),
)
def test_events(head: HeadProcess, events: bytes) -> None:
    """Events that hold odd things do no harm, whether they are taken or not, and cost nothing but themselves."""

    run, text = next(_RUNS), layout()
    messages = (AgentMessage(layout=Layout(text=text)), batch(run, frame(text, events=events)))
    code, words = said(head, hello("hostile", run), *messages)
    assert code is grpc.StatusCode.OK, words


def resident_bytes(head: HeadProcess) -> int:
    """The memory of the head's process."""
    status = Path(f"/proc/{head.popen.pid}/status").read_text(encoding="ascii")
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmRSS"))


def test_limits_by_node(tmp_path: Path) -> None:
    """Layouts and events without end are refused with a reason; the head's memory stays bounded, and it starts again."""
    with cluster_in(tmp_path) as made:
        head = made.head()
        _send_without_end(head)
        head.end()
        again = made.head()
        assert ["greedy"] == [node["name"] for node in again.get("/status")["nodes"]]
        run, text = next(_RUNS), layout()
        sent = AgentMessage(layout=Layout(text=text)), batch(run, frame(text))
        assert said(again, hello("greedy", run), *sent)[0] is grpc.StatusCode.OK
        until(lambda: again.get("/metrics/latest")["client_data"], "frames after the restart")


def _send_without_end(head: HeadProcess) -> None:
    run, good = next(_RUNS), layout()
    messages = [AgentMessage(layout=Layout(text=good))]
    for number in range(60):
        subjects = [{"pid": 8192 * number + place, "kind": "x" * 80} for place in range(8192)]
        text = layout(scope="process", subjects=subjects, wide=[["gpu_memory_bytes", 1, 1]], narrow=[])
        messages.append(AgentMessage(layout=Layout(text=text)))
    many = b"[" + b",".join([b'{"event":"process","pid":5}'] * 100_000) + b"]"
    messages += [
        batch(run, frame(good, events=many)),
        batch(run, frame(good), first=2),
    ]
    told, before = len(head.lines), resident_bytes(head)
    code, words = said(head, hello("greedy", run), *messages)

    assert code is grpc.StatusCode.OK, words
    assert resident_bytes(head) - before < 300 << 20
    for reason in (
        "the column layouts of this node exceed the head's limit of 64 MiB per node",
        "the frame has 100,000 events, more than the limit of 4,096",
    ):
        until(lambda: any(reason in line for line in head.lines[told:]), reason)  # noqa: B023
    until(lambda: "greedy" in head.get("/metrics/latest")["client_data"], "the frames of the greedy node")


def test_huge_message(head: HeadProcess) -> None:
    """A message of 100 MB is refused by its size, over gRPC and over HTTP."""

    run = next(_RUNS)
    code, words = said(head, hello("hostile", run), batch(run, bytes(_HUGE)))
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED, words
    top = b"POST /profiling/start HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    status, _ = raw(head, top + b"Content-Length: %d\r\n\r\n" % _HUGE, *[bytes(1 << 20)] * 100)
    assert status == 413
    chunk = b"10000\r\n" + bytes(1 << 16) + b"\r\n"
    status, _ = raw(head, top + b"Transfer-Encoding: chunked\r\n\r\n", *[chunk] * 64, b"0\r\n\r\n")
    assert status == 413


def test_unknown_calls(head: HeadProcess) -> None:
    """Calls and operations that there are not are refused as such, over gRPC and over HTTP."""

    address = f"127.0.0.1:{head.port}"
    for path in ("/gpulse.v1.Head/Nothing", "/gpulse.v2.Head/Stream", "/x"):
        assert call(address, path, b"x")[0] is grpc.StatusCode.UNIMPLEMENTED
    assert call(address, wire.CALL, b"\xff\xff\xff")[0] is _INVALID
    for operation, body, status in (
        ("nothing", b"{}", 404),
        ("../../x", b"{}", 404),
        ("o" * 10_240, b"{}", 404),
        ("status", b"{", 400),
        ("status", b"[" * 100_000, 400),
        ("status", b"[1]", 400),
        ("start", b'{"interval_ms": NaN}', 400),
        ("start", b'{"interval_ms": 1e999}', 400),
        ("start", b'{"name": "../../x"}', 400),
        ("start", b'{"name": "\\ud800"}', 400),
        ("start", b'{"since": NaN}', 400),
        ("start", b'{"labels": {"a": {}}}', 400),
    ):
        request = Request(operation=operation, body=body).SerializeToString()
        reply = Reply.FromString(call(address, wire.CALL, request)[2])
        assert reply.status == status, (operation, body[:40], reply)
        assert json.loads(reply.body)["error"]
    assert head.ask("/nothing")[0] == 404
    assert head.ask("/profiling/start")[0] == 405


_NAMES = [
    "../../x",
    "..",
    ".",
    "/etc/x",
    "a/b",
    "a\\b",
    "x" * 10_240,
    "nul\0",
    "new\nline",
    "\x1b[2J",
    " ",
    "\ud800",
]


@pytest.mark.parametrize("name", _NAMES, ids=lambda name: repr(name[:10]))
def test_session_names(head: HeadProcess, name: str) -> None:
    """A session's name that could be more than a name is refused wherever one can be given."""

    for path in ("/profiling/start", "/profiling/stop", "/api/v1/sessions/recover"):
        status, document = head.ask(path, {"name": name})
        assert 400 <= status < 500, (path, status, document)
        assert document["error"]
    assert not head.get("/status")["active_sessions"]


@pytest.mark.parametrize(
    "body",
    [
        b'{"name": "\xff\xfe"}',
        b'{"name": NaN}',
        b'{"name": 5}',
        b'{"name": "fine", "interval_ms": NaN}',
        b'{"name": "fine", "interval_ms": Infinity}',
        b'{"name": "fine", "interval_ms": 1e999}',
        b'{"name": "fine", "interval_ms": 99999999999999999999}',
        b'{"name": "fine", "since": -Infinity}',
        b'{"name": "fine", "since": -5}',
        b'{"name": "fine", "labels": {"a": NaN}}',
        b'{"name": "fine", "nodes": [NaN]}',
        b'{"name": "fine", "nodes": ["../../y"]}',
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"[]",
        b"\x00" * 100,
        b'{"name": "fine"',
    ],
    ids=lambda body: repr(body[:30]),
)
def test_json(head: HeadProcess, body: bytes) -> None:
    """A body that is not what it should be is refused in words, and nothing begins."""

    top = "POST /profiling/start HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    status, answer = raw(
        head, f"{top}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
    )
    assert 400 <= status < 500, answer
    assert json.loads(answer)["error"]
    assert not head.get("/status")["active_sessions"]


def test_paths(head: HeadProcess) -> None:
    """Paths that lead elsewhere lead nowhere."""

    for path in (
        "/api/v1/sessions/..%2f..%2fetc%2fpasswd/download",
        "/api/v1/sessions/%2e%2e/download?format=json",
        "/../../../etc/passwd",
        "/%2e%2e/%2e%2e/etc/passwd",
        "/api/v1/sessions/%ff%fe/download",
        "/api/v1/sessions/" + "x" * 10_240,
        "/api/v1/query?metric=" + "x" * 10_240,
        "/api/v1/query?metric=gpu_utilization_ratio&from=NaN",
        "/api/v1/query?metric=gpu_utilization_ratio&from=-1e400&to=inf",
        "/api/v1/query?metric=gpu_utilization_ratio&step=-1",
        "/api/v1/events?from=nan&to=nan",
    ):
        status, answer = raw(
            head, f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode()
        )
        assert 400 <= status < 500, (path, status, answer[:200])
        assert b"root:" not in answer


def test_noise(head: HeadProcess) -> None:
    """Bytes that are no protocol at all end the connection, on both ports."""

    chance = random.Random(11)
    noises = [
        chance.randbytes(3000),
        b"\0" * 3000,
        b"GET / HTTP/1.1\r\n" + b"x" * 100_000,
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ]
    noises += [
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + chance.randbytes(3000),
        b"POST / HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
    ]
    for port in (head.port, head.http_port):
        for noise in noises:
            with socket.create_connection(("127.0.0.1", port), 20.0) as connection, suppress(OSError):
                connection.sendall(noise)
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(1 << 16):
                    pass


@pytest.mark.slow
def test_slow_loris(head: HeadProcess) -> None:
    """Clients that never finish a request are let go of, and others are served meanwhile, on both ports."""

    open_ones = [socket.create_connection(("127.0.0.1", head.http_port), 20.0) for _ in range(200)]
    others = [socket.create_connection(("127.0.0.1", head.port), 20.0) for _ in range(50)]
    try:
        for place, one in enumerate(open_ones):
            one.sendall(b"GET /status HTTP/1.1\r\nHost: localhost\r\nX-Slow: " if place % 2 else b"G")
        for one in others:
            one.sendall(b"PRI * HT")
        assert head.get("/status")["storage"]["state"] == "ok"
        for _ in range(4):  # a byte now and then does not help
            time.sleep(0.5)
            for one in open_ones:
                with suppress(OSError):
                    one.sendall(b"x")
        for one in open_ones:
            one.settimeout(60.0)
            with suppress(ConnectionError):
                while one.recv(1 << 16):
                    pass
    finally:
        for one in (*open_ones, *others):
            one.close()


@pytest.mark.slow
def test_what_was_taken_can_be_kept(head: HeadProcess) -> None:
    """After all of it the head seals what it has, and another head can open it."""

    text, run = layout(), next(_RUNS)
    said(head, hello("hostile", run), AgentMessage(layout=Layout(text=text)), batch(run, frame(text)))
    until(lambda: head.get("/status")["storage"]["history_bytes"] > 0, "sealing")
    before = head.get("/status")["storage"]["history_bytes"]
    until(lambda: head.get("/status")["storage"]["history_bytes"] > before, "sealing")
    assert " E " not in head.text, head.text
    head.post("/profiling/start", {"name": "fine", "since": "10m"})
    assert head.post("/profiling/stop", {"name": "fine"})["success"]
    document = json.loads((head.output_dir / "fine.json").read_text(encoding="utf-8"))
    assert any(gpu.startswith("bystander:") for gpu in document["frames"][0]["gpu_id"])


# --- from elsewhere


def outside_address() -> str:
    """An address of this machine that is not loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this machine has loopback alone")
        address: str = probe.getsockname()[0]
    return address


@pytest.mark.slow
def test_token(tmp_path: Path) -> None:
    """From beyond loopback nothing is read or written without the token, over gRPC or HTTP; with it everything is."""

    address = outside_address()
    with cluster_in(tmp_path) as cluster:
        head = cluster.head("--host", "0.0.0.0", "--freq", "100")
        token = (tmp_path / "config" / "gpulse" / "token").read_text(encoding="ascii").strip()
        stranger = {"XDG_CONFIG_HOME": str(tmp_path / "stranger")}
        agent = cluster.agent("stranger", head.port, host=address, env=stranger)
        assert agent.end(0) != 0
        assert "token" in agent.text
        assert head.nodes() == {}
        for key in (None, "wrong", token[:-1], token):
            metadata = [] if key is None else [(wire.TOKEN_KEY, f"Bearer {key}")]
            for request in (Request(operation="status"), Request(operation="start", body=b'{"name": "x"}')):
                code, why, answer = call(
                    f"{address}:{head.port}", wire.CALL, request.SerializeToString(), metadata
                )
                if key == token:
                    assert Reply.FromString(answer).status == 200
                else:
                    assert code is grpc.StatusCode.UNAUTHENTICATED
                    assert "token" in why
        assert [session["name"] for session in head.get("/status")["active_sessions"]] == ["x"]
        sent = [
            ("GET", "/status"),
            ("GET", "/metrics"),
            ("POST", "/profiling/stop"),
            ("POST", "/api/v1/exit"),
        ]
        for method, path in sent:
            top = f"{method} {path} HTTP/1.1\r\nHost: {address}\r\nContent-Type: application/json\r\nConnection: close\r\n"
            for key in (None, "wrong"):
                given = "" if key is None else f"Authorization: Bearer {key}\r\n"
                answer = exchanged(
                    address, head.http_port, f"{top}{given}Content-Length: 2\r\n\r\n{{}}".encode()
                )
                assert answer.startswith(b"HTTP/1.1 401"), answer[:200]
        assert [session["name"] for session in head.get("/status")["active_sessions"]] == ["x"]
        top = f"GET /status HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\nAuthorization: Bearer {token}\r\n\r\n"
        assert exchanged(address, head.http_port, top.encode()).startswith(b"HTTP/1.1 200")
        friend = cluster.agent("friend", head.port, host=address)
        friend.said("connected to")


def exchanged(address: str, port: int, data: bytes) -> bytes:
    """What comes back for bytes."""
    with socket.create_connection((address, port), 20.0) as connection:
        connection.sendall(data)
        return b"".join(iter(lambda: connection.recv(1 << 16), b""))
