from __future__ import annotations

import asyncio
import gzip
import json
import os
from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec
import pytest
from starlette.datastructures import Headers

from gpulse.cluster.access_control import LOGIN_COOKIE, AccessPolicy
from gpulse.cluster.protocol.codec import MAX_BODY_BYTES, encode
from gpulse.cluster.protocol.load_limits import LoopShare
from gpulse.cluster.protocol.operations import OPERATIONS
from gpulse.web.app import make_app
from gpulse.web.responses import EncodedAnswer, SlicedResponse, encode_cooperatively, prefers_html
from tests.unit.fake_head import NOW, TOKEN, FakeHead, seen_as

BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"
FORM = {"Content-Type": "application/x-www-form-urlencoded"}


@pytest.fixture
def head() -> FakeHead:
    """What the application asks."""
    return FakeHead()


@pytest.fixture
async def local(head: FakeHead) -> AsyncIterator[httpx.AsyncClient]:
    """A client on the head's own machine."""
    async with client(head, "127.0.0.1", "http://localhost:8091") as made:
        yield made


@pytest.fixture
async def remote(head: FakeHead) -> AsyncIterator[httpx.AsyncClient]:
    """A client elsewhere."""
    async with client(head, "10.1.2.3", "http://head:8091") as made:
        yield made


def client(head: FakeHead, address: str, base: str, access: AccessPolicy | None = None) -> httpx.AsyncClient:
    """A client that is seen to come from an address."""
    app = make_app(head, access or AccessPolicy(TOKEN, ["https://panel.example"]), clock=head.now)
    transport = httpx.ASGITransport(
        seen_as(app, os.geteuid()), raise_app_exceptions=False, client=(address, 4711)
    )
    return httpx.AsyncClient(transport=transport, base_url=base)


async def test_the_seed_requests(local: httpx.AsyncClient, head: FakeHead) -> None:
    """Every request of the seed's documents works as printed."""

    started = await local.post("/profiling/start", json={"name": "my_experiment"})
    assert (200, True) == (started.status_code, started.json()["success"])
    for path in ("/", "/status", "/clients", "/metrics/latest", "/profiling/sessions"):
        answer = await local.get(path)
        assert (200, "application/json") == (answer.status_code, answer.headers["content-type"]), path
        assert isinstance(answer.json(), dict)
    sessions = (await local.get("/status")).json()["active_sessions"]
    assert ["my_experiment"] == [session["name"] for session in sessions]
    assert 409 == (await local.post("/profiling/start", json={"name": "my_experiment"})).status_code
    assert 200 == (await local.post("/profiling/stop", json={"name": "my_experiment"})).status_code
    assert 200 == (await local.post("/profiling/stop", json={})).status_code
    assert 404 == (await local.post("/profiling/stop", json={"name": "other"})).status_code
    assert "stop" == head.asked[-1][0]


async def test_queries(local: httpx.AsyncClient, head: FakeHead) -> None:
    """A query's fields come from the address: with commas or repeated, times in any spelling."""

    answer = await local.get(
        "/api/v1/query?metric=power_watts&nodes=a,b&nodes=c&from=-10m&to=now&step=10s&statistic=max"
    )

    assert 200 == answer.status_code
    expected: dict[str, Any] = {"metric": "power_watts", "scope": "gpu", "nodes": ("a", "b", "c"), "gpus": ()}
    expected |= {"start": NOW - 600, "end": NOW, "step": 10.0, "statistic": "max"}
    assert ("query", expected) == head.asked[-1]


@pytest.mark.parametrize(
    "path",
    ["/api/v1/query", "/api/v1/query?metric=x", "/api/v1/query?metric=power_watts&metric=power_watts", "/status?verbose=1", "/api/v1/query?metric=power_watts&nodes=", "/api/v1/sessions/..%2f..%2fx", "/api/v1/sessions/%ff",
     "/api/v1/sessions/s1/download?format=pickle", "/api/v1/sessions/s1/download?name=s2"],
)  # fmt: skip
async def test_addresses_that_make_no_sense(local: httpx.AsyncClient, path: str) -> None:
    """Wrong, double and unknown fields of an address are refused."""

    answer = await local.get(path)

    assert answer.status_code in {400, 404}
    assert {"error", "hint", "detail"} == set(answer.json())


async def test_sessions_by_name(local: httpx.AsyncClient, head: FakeHead) -> None:
    """A session is shown, exported, recovered and downloaded by its name."""

    await local.post("/profiling/start", json={"name": "one"})

    assert "one" == (await local.get("/api/v1/sessions/one")).json()["name"]
    assert (
        "one.csv"
        == (await local.post("/api/v1/sessions/one/export", json={"format": "csv"})).json()["output_file"]
    )
    assert 200 == (await local.post("/api/v1/sessions/one/export")).status_code
    assert 400 == (await local.post("/api/v1/sessions/one/export", json={"name": "two"})).status_code
    assert 200 == (await local.post("/api/v1/sessions/recover", json={"name": "one"})).status_code
    file = await local.get("/api/v1/sessions/one/download")
    assert {"session_name": "one"} == file.json()
    assert 'attachment; filename="one.json"' == file.headers["content-disposition"]
    parquet = await local.head("/api/v1/sessions/one/download?format=parquet")
    assert "application/vnd.apache.parquet" == parquet.headers["content-type"]
    assert 404 == (await local.get("/api/v1/sessions/two/download")).status_code
    assert 400 == (await local.post("/profiling/stop?name=one", json={})).status_code
    assert 200 == (await local.post("/api/v1/exit")).status_code
    assert head.was_ended


async def test_every_answer_is_guarded(
    local: httpx.AsyncClient, remote: httpx.AsyncClient, head: FakeHead
) -> None:
    """Good or bad, every answer carries the headers that keep browsers from misusing it."""

    head.failure = ZeroDivisionError("secret")
    for answer in (
        await local.get("/status"),
        await local.get("/"),
        await local.get("/nothing"),
        await local.put("/status"),
        await local.get("/metrics"),
        await remote.get("/status"),
        await local.get("/", headers={"Accept": BROWSER}),
        await local.options("/status"),
    ):
        assert "no-store" == answer.headers["cache-control"]
        assert "nosniff" == answer.headers["x-content-type-options"]
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert "frame-ancestors 'none'" in answer.headers["content-security-policy"]
        assert "access-control-allow-origin" not in answer.headers
        assert "secret" not in answer.text


async def test_errors_are_json(local: httpx.AsyncClient, head: FakeHead) -> None:
    """What is not there, not possible, too large, no JSON or broken is told the same way."""

    head.failure = ZeroDivisionError("secret")
    json_type = {"Content-Type": "application/json"}
    for expected, answer in (
        (404, await local.get("/nothing")),
        (404, await local.get("/status/")),
        (405, await local.delete("/status")),
        (405, await local.get("/profiling/start")),
        (405, await local.get("/api/v1/sessions/recover")),
        (413, await local.post("/profiling/start", content=b" " * (MAX_BODY_BYTES + 1), headers=json_type)),
        (400, await local.post("/profiling/start", content=b"{", headers=json_type)),
        (400, await local.post("/profiling/start", content=b'{"since": NaN}', headers=json_type)),
        (415, await local.post("/profiling/start", content=b"{}", headers=FORM)),
        (415, await local.post("/profiling/start", content=b"{}")),
        (500, await local.post("/profiling/start", json={})),
    ):
        assert expected == answer.status_code
        assert {"error", "hint", "detail"} == set(answer.json())
        assert "secret" not in answer.text
    curl = await local.post("/profiling/start", content=b"{}", headers=FORM)
    assert "Content-Type: application/json" in curl.json()["hint"]


async def test_large_bodies_without_a_length(local: httpx.AsyncClient, head: FakeHead) -> None:
    """A body that does not say how large it is is cut off at the limit."""

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(30):
            yield b" " * 100_000

    answer = await local.post(
        "/profiling/start", content=pieces(), headers={"Content-Type": "application/json"}
    )
    assert 413 == answer.status_code
    assert [] == head.asked


@pytest.mark.parametrize(
    ("accepted", "nodes", "encoding"),
    [("gzip, deflate", 300, "gzip"), ("identity", 300, None), ("gzip;q=0", 300, None), ("gzip", 2, None)],
)
async def test_large_answers_are_compressed_for_those_who_accept_it(
    local: httpx.AsyncClient, head: FakeHead, accepted: str, nodes: int, encoding: str | None
) -> None:
    """The content is the same, and caches are told that it depends on the request."""
    head.nodes = [head.nodes[0]._replace(name=f"n{number}") for number in range(nodes)]
    answer = await local.get("/api/v1/fleet/trends", headers={"Accept-Encoding": accepted})

    assert encoding == answer.headers.get("content-encoding")
    assert ("Accept-Encoding" if nodes > 2 else None) == answer.headers.get("vary")
    assert nodes == len(answer.json()["gpus"])


async def test_methods(local: httpx.AsyncClient) -> None:
    """HEAD is GET without its body, OPTIONS and refusals say what there is."""

    whole, empty = await local.get("/status"), await local.head("/status")
    assert (200, whole.headers["content-length"]) == (empty.status_code, empty.headers["content-length"])
    options = await local.options("/profiling/start")
    assert (204, "POST, OPTIONS") == (options.status_code, options.headers["allow"])
    assert "GET, HEAD, OPTIONS" == (await local.request("PATCH", "/status")).headers["allow"]
    assert 405 == (await local.request("BREW", "/status")).status_code


@pytest.mark.parametrize(
    ("accept", "is_html"),
    [
        (None, False),
        ("", False),
        ("*/*", False),
        (BROWSER, True),
        ("text/html", True),
        ("application/json", False),
        ("text/html;q=0.5, application/json;q=0.4", True),
        ("text/html;q=0.4, application/json;q=0.5", False),
        ("text/html, application/json", False),
        ("text/*;q=0.3, */*;q=0.1", True),
        ("text/html;q=0", False),
        ("text/html;q=nan, */*;q=0.1", False),
        ("text/html;q=x", False),
        ("application/json;q=0.1, text/html;level=1;q=0.2", True),
        (",;,;q=1", False),
    ],
)
async def test_what_the_root_answers(local: httpx.AsyncClient, accept: str | None, *, is_html: bool) -> None:
    """JSON, unless HTML is preferred."""

    assert is_html == prefers_html(accept)
    answer = await local.get("/", headers={"Accept": accept or ""})
    assert ("text/html" if is_html else "application/json") == answer.headers["content-type"].split(";")[0]
    assert "Accept" == answer.headers["vary"]


async def test_metrics_and_health(local: httpx.AsyncClient, head: FakeHead) -> None:
    """Prometheus gets its text; health and readiness are told apart."""

    answer = await local.get("/metrics")
    assert "text/plain; version=0.0.4; charset=utf-8" == answer.headers["content-type"]
    assert 'gpulse_up{node="alpha"} 1' in answer.text
    assert 'gpulse_gpu_power_watts{node="alpha",gpu="0"' in answer.text
    assert 200 == (await local.head("/metrics")).status_code
    assert 200 == (await local.get("/-/healthy")).status_code
    assert 200 == (await local.get("/-/ready")).status_code
    head.storage = msgspec.structs.replace(head.storage, state="failing", error="no space left")
    assert 503 == (await local.get("/-/ready")).status_code
    head.time += 60
    assert "gpulse_gpu_" not in (await local.get("/metrics")).text


async def test_nodes_that_left_are_not_missed(local: httpx.AsyncClient, head: FakeHead) -> None:
    """A node that falls silent is told for a day, one whose agent was ended in order or is at another head is not."""

    alpha, silent = head.nodes[0], head.nodes[1]._replace(connected=False, frame=None)
    day = 86_400.0
    head.nodes = [
        alpha._replace(was_stopped=True),  # connected: its next agent has not said so yet
        silent,
        silent._replace(name="gone", seen=NOW - day - 60),
        silent._replace(name="left", was_stopped=True),
        silent._replace(name="elsewhere", at_other_head=True),
    ]

    text = (await local.get("/metrics")).text

    assert ['gpulse_up{node="alpha"} 1', 'gpulse_up{node="beta"} 0'] == [
        line for line in text.splitlines() if line.startswith("gpulse_up{")
    ]


async def test_nothing_beyond_loopback_without_the_token(remote: httpx.AsyncClient, head: FakeHead) -> None:
    """Every path of every operation, and all others, answer 401 and nothing else to strangers."""

    paths = [
        path.replace("{name}", "one").replace("{job}", "7")
        for operation in OPERATIONS
        for path in operation.paths
    ]
    for path in [
        *paths,
        "/openapi.json",
        "/api/v1/openapi.json",
        "/metrics",
        "/-/healthy",
        "/-/ready",
        "/nothing",
    ]:
        for method in ("GET", "HEAD", "POST", "OPTIONS", "PUT"):
            answer = await remote.request(method, path, json={} if method == "POST" else None)
            assert 401 == answer.status_code, (method, path)
            assert "Bearer" in answer.headers["www-authenticate"]
            assert not answer.text or {"error", "hint", "detail"} == set(answer.json())
    spoofed = {
        "X-Forwarded-For": "127.0.0.1",
        "X-Real-IP": "127.0.0.1",
        "Forwarded": "for=127.0.0.1",
        "Host": "localhost",
    }
    assert 401 == (await remote.get("/status", headers=spoofed)).status_code
    assert [] == head.asked


async def test_the_token_opens_everything(remote: httpx.AsyncClient) -> None:
    """With the token another machine reads and writes."""

    remote.headers["Authorization"] = f"Bearer {TOKEN}"

    assert 200 == (await remote.get("/status")).status_code
    assert 200 == (await remote.post("/profiling/start", json={"name": "x"})).status_code
    assert 415 == (await remote.post("/profiling/start", content=b"{}", headers=FORM)).status_code


async def test_attacks_on_loopback(local: httpx.AsyncClient, head: FakeHead) -> None:
    """Rebound names, foreign origins, proxies and forms get nothing from the head's own machine either."""

    for headers, status in (
        ({"Host": "evil.com"}, 403),
        ({"Host": "evil.com", "Origin": "http://evil.com"}, 403),
        ({"Origin": "http://evil.com"}, 403),
        ({"Origin": "null"}, 403),
        ({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"}, 403),
        ({"X-Forwarded-For": "127.0.0.1"}, 401),
        ({"Via": "1.1 proxy"}, 401),
    ):
        assert status == (await local.get("/status", headers=headers)).status_code
        assert status == (await local.post("/profiling/start", json={}, headers=headers)).status_code
    doubled = [("Origin", "http://localhost:8091"), ("Origin", "http://evil.com")]
    assert 403 == (await local.get("/status", headers=doubled)).status_code
    assert [] == head.asked


async def test_allowed_origins_share(local: httpx.AsyncClient, remote: httpx.AsyncClient) -> None:
    """Pages of an allowed origin may ask and read; their preflight is answered, others' are not."""

    panel = {"Origin": "https://panel.example"}
    answer = await local.get("/status", headers=panel)
    assert (200, "https://panel.example") == (
        answer.status_code,
        answer.headers["access-control-allow-origin"],
    )
    assert "Origin" in answer.headers["vary"]
    assert "access-control-allow-credentials" not in answer.headers
    ask = {
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    preflight = await remote.options("/profiling/start", headers={**panel, **ask})
    assert 204 == preflight.status_code
    assert "authorization" in preflight.headers["access-control-allow-headers"]
    assert 401 == (await remote.get("/status", headers=panel)).status_code
    for client_ in (local, remote):
        evil = await client_.options("/profiling/start", headers={"Origin": "https://evil.com", **ask})
        assert evil.status_code in {401, 403}
        assert "access-control-allow-origin" not in evil.headers


async def test_logging_in(remote: httpx.AsyncClient) -> None:
    """A browser is shown a form, gets a cookie for the token, and gives it back."""

    asked = await remote.get("/", headers={"Accept": BROWSER})
    assert (401, True) == (asked.status_code, 'action="/login"' in asked.text)
    own = {"Origin": "http://head:8091"}
    wrong = await remote.post("/login", data={"token": "wrong"}, headers=own)
    assert (401, False) == (wrong.status_code, "set-cookie" in wrong.headers)
    right = await remote.post("/login", data={"token": TOKEN}, headers=own)
    assert (303, "/") == (right.status_code, right.headers["location"])
    cookie = right.headers["set-cookie"]
    assert cookie.startswith(f"{LOGIN_COOKIE}=")
    assert {"httponly", "samesite=strict", "path=/"} <= {part.strip().lower() for part in cookie.split(";")}
    assert "secure" not in cookie.lower()
    assert TOKEN not in cookie
    assert 200 == (await remote.get("/", headers={"Accept": BROWSER})).status_code
    assert 200 == (await remote.post("/profiling/start", json={}, headers=own)).status_code
    assert (
        403
        == (await remote.post("/profiling/start", json={}, headers={"Origin": "http://head:1"})).status_code
    )
    out = await remote.post("/logout", headers={**own, **FORM})
    assert (303, True) == (out.status_code, "max-age=0" in out.headers["set-cookie"].lower())
    assert 401 == (await remote.get("/status")).status_code


async def test_logging_in_from_elsewhere(remote: httpx.AsyncClient) -> None:
    """No page of another origin logs anybody in, and no form without a page."""

    for headers in ({}, {"Origin": "http://evil.com"}, {"Origin": "null"}):
        assert 403 == (await remote.post("/login", data={"token": TOKEN}, headers=headers)).status_code
    assert 403 == (await remote.post("/logout", headers={"Origin": "http://evil.com"})).status_code
    assert (
        415
        == (await remote.post("/login", content=TOKEN, headers={"Content-Type": "text/plain"})).status_code
    )
    assert 413 == (await remote.post("/login", json={"token": "x" * MAX_BODY_BYTES})).status_code
    assert 401 == (await remote.post("/login", json={"token": 5})).status_code
    assert (
        400
        == (
            await remote.post("/login", content=b"{", headers={"Content-Type": "application/json"})
        ).status_code
    )
    assert 405 == (await remote.put("/login")).status_code
    assert 405 == (await remote.get("/logout")).status_code
    assert 200 == (await remote.get("/login")).status_code
    good = await remote.post("/login", json={"token": TOKEN})
    assert {"success": True} == good.json()


async def test_cookies_over_tls_are_secure(head: FakeHead) -> None:
    """Over HTTPS the cookie never travels without it."""

    async with client(head, "10.0.0.1", "https://head:8091") as secure:
        answer = await secure.post("/login", json={"token": TOKEN})
        assert "secure" in answer.headers["set-cookie"].lower()


async def test_the_description(local: httpx.AsyncClient) -> None:
    """The OpenAPI document has every path of the table, with fields, answers and errors."""

    document = (await local.get("/openapi.json")).json()
    assert document == (await local.get("/api/v1/openapi.json")).json()
    assert "3.1.0" == document["openapi"]
    for operation in OPERATIONS:
        for path in operation.paths:
            described = document["paths"][path][operation.method.lower()]
            assert {"200", "400", "401", "404", "500"} <= set(described["responses"])
            assert operation.help == described["summary"]
    query = document["paths"]["/api/v1/query"]["get"]["parameters"]
    assert ["metric"] == [parameter["name"] for parameter in query if parameter["required"]]
    identities = [way["operationId"] for path in document["paths"].values() for way in path.values()]
    assert len(identities) == len(set(identities))


async def test_documents_are_json_whatever_is_in_them() -> None:
    """Numbers that JSON has no word for become null, and cutting a document in pieces does not change it."""

    document = {
        "a": [1, float("nan")],
        "b": {"c": float("inf")},
        "d": list(range(10_000)),
        "e": {str(n): n for n in range(50)},
    }
    expected = {**document, "a": [1, None], "b": {"c": None}}
    assert expected == json.loads(await encode_cooperatively(document))
    others: tuple[Any, ...] = (
        {},
        [],
        None,
        5,
        {"x": []},
        {"x": [{}, {"y": [1]}]},
        {"x": ({"y": 1},)},
        {"x": "\ud800ä"},
    )
    for other in others:
        assert json.loads(json.dumps(other)) == json.loads(await encode_cooperatively(other))
    assert b"null" == encode(float("-inf"))


async def test_a_request_that_the_end_of_the_server_cuts_off_gets_an_answer(
    head: FakeHead, local: httpx.AsyncClient
) -> None:
    """And no traceback goes to the log."""
    asked = asyncio.Event()

    async def hanging(_request: object, _now: float) -> None:
        asked.set()
        await asyncio.Event().wait()

    head.history = hanging  # type: ignore[method-assign, assignment]
    request = asyncio.create_task(local.get("/api/v1/history?metrics=power_watts"))
    await asked.wait()
    request.cancel()
    answer = await request
    assert 503 == answer.status_code
    assert "the head is stopping" == answer.json()["error"]


async def test_a_head_without_time_refuses_readers_and_says_when_to_come_back(
    head: FakeHead, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What changes something, and what supervisors ask, is answered all the same."""

    def used_up() -> LoopShare:
        share = LoopShare()
        share.charge(100.0)
        return share

    monkeypatch.setattr("gpulse.web.responses.LoopShare", used_up)
    async with client(head, "127.0.0.1", "http://localhost:8091") as local:
        for path in ("/metrics/latest", "/status", "/metrics", "/api/v1/query?metric=power_watts"):
            answer = await local.get(path)
            assert 503 == answer.status_code, path
            assert 1 <= int(answer.headers["retry-after"])
            assert "the head is busy with other requests" in answer.text
        assert 200 == (await local.post("/profiling/start", json={"name": "fine"})).status_code
        assert [200, 200] == [(await local.get(path)).status_code for path in ("/-/healthy", "/-/ready")]


async def test_an_answer_that_a_client_has_is_not_sent_again() -> None:
    """And it is compressed once for all others."""

    answer = EncodedAnswer(b"[" + b"1," * 50_000 + b"1]")
    plain = await answer.response(Headers({}))
    packed = [await answer.response(Headers({"accept-encoding": "gzip"})) for _ in range(2)]
    again = await answer.response(Headers({"if-none-match": plain.headers["etag"]}))

    assert (200, 100_003) == (plain.status_code, len(plain.body))
    assert packed[0].body is packed[1].body
    assert bytes(plain.body) == gzip.decompress(packed[0].body)
    assert (304, b"") == (again.status_code, again.body)


async def test_a_large_body_is_sent_in_pieces() -> None:
    """A client that does not read has one of them in memory, not all."""

    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {}

    body = bytes(range(256)) * 4000
    await SlicedResponse(body)({"type": "http"}, receive, send)

    assert body == b"".join(message.get("body", b"") for message in sent)
    assert max(len(message.get("body", b"")) for message in sent) <= 1 << 18
    assert [True, True, True, False] == [message["more_body"] for message in sent[1:]]
