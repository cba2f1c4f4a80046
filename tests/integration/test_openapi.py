"""The OpenAPI document of a real head: every route answers a plain request with what it promises."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

from tests.integration.cluster import PATIENCE_SECONDS, HeadProcess, cluster_in, until

ASKED: dict[str, list[tuple[str, Any]]] = {
    "GET /": [("/", None)],
    "GET /status": [("/status", None)],
    "GET /clients": [("/clients", None)],
    "GET /metrics/latest": [("/metrics/latest", None)],
    "GET /api/v1/gpus": [("/api/v1/gpus", None)],
    "GET /profiling/sessions": [("/profiling/sessions", None)],
    "GET /api/v1/sessions": [("/api/v1/sessions", None)],
    "POST /profiling/start": [
        ("/profiling/start", {"name": "three", "since": "1s", "labels": {"a": "ä"}, "interval_ms": 200}),
        ("/profiling/start", {"name": "four", "nodes": ["n1"], "gpus": ["n1:0", "1"], "since": 0.5}),
    ],
    "GET /api/v1/sessions/{name}": [("/api/v1/sessions/one", None), ("/api/v1/sessions/two", None)],
    "GET /api/v1/sessions/{before}/compare": [("/api/v1/sessions/one/compare?after=two", None)],
    "POST /profiling/stop": [
        ("/profiling/stop", {"name": "three", "format": "csv"}),
        ("/profiling/stop", {"name": ""}),
        ("/profiling/stop", {}),
    ],
    "POST /api/v1/sessions/{name}/export": [("/api/v1/sessions/one/export", {"format": "jsonl"})],
    "GET /api/v1/sessions/{name}/download": [
        (f"/api/v1/sessions/four/download?format={kind}", None) for kind in ("json", "jsonl", "csv", "parquet")
    ],
    "GET /api/v1/nodes/{name}/hardware": [("/api/v1/nodes/n1/hardware", None)],
    "GET /api/v1/query": [
        ("/api/v1/query?metric=power_watts&from=-1h&to=now&step=10s&statistic=max", None),
        ("/api/v1/query?metric=gpu_utilization_ratio&nodes=n1&gpus=0,1&from=0", None),
        ("/api/v1/query?metric=cpu_utilization_ratio&scope=host&from=2020-01-01T00:00:00Z", None),
    ],
    "GET /api/v1/history": [
        ("/api/v1/history?metrics=power_watts,energy_joules_total&from=-1m&spread=true", None),
        ("/api/v1/history?metrics=rx_bytes_total&scope=network&nodes=n1&points=10", None),
    ],
    "GET /api/v1/processes": [("/api/v1/processes", None), ("/api/v1/processes?gpus=n1:0&users=ada&jobs=x", None)],
    "GET /api/v1/usage": [("/api/v1/usage", None), ("/api/v1/usage?from=-1d&by=job&nodes=n1&users=ada", None)],
    "GET /api/v1/usage.csv": [("/api/v1/usage.csv?by=job", None)],
    "GET /api/v1/jobs/{job}": [("/api/v1/jobs/one?points=10", None), ("/api/v1/jobs/two?kind=session&from=-1h", None)],
    "GET /api/v1/events": [("/api/v1/events", None), ("/api/v1/events?from=-1d&kinds=node_joined&nodes=n1", None)],
    "GET /api/v1/findings": [("/api/v1/findings", None)],
    "GET /api/v1/findings/groups": [
        (f"/api/v1/findings/groups?state={state}&from=-1d&findings=node_missing,gpu_fault", None)
        for state in ("now", "past", "acknowledged", "silenced")
    ],
    "POST /api/v1/findings/acknowledge": [
        ("/api/v1/findings/acknowledge", {"keys": ["node_missing/n9"], "by": "mo", "note": "ä"}),
        ("/api/v1/findings/acknowledge", {"group": "node_missing", "by": "mo"}),
    ],
    "POST /api/v1/silences": [
        ("/api/v1/silences", {"findings": ["node_missing"], "nodes": ["n9"], "seconds": "2h", "reason": "r", "by": "mo"}),
    ],
    "GET /api/v1/silences": [("/api/v1/silences", None)],
    "POST /api/v1/silences/{silence}/end": [("/api/v1/silences/SILENCE/end", {"by": "mo"})],
    "GET /api/v1/findings/history": [("/api/v1/findings/history?from=-1d&nodes=n1", None)],
    "GET /api/v1/fleet/trends": [("/api/v1/fleet/trends", None)],
    "GET /api/v1/fleet/totals": [("/api/v1/fleet/totals", None)],
    "POST /api/v1/stacks": [("/api/v1/stacks", {"nodes": ["n1"]}), ("/api/v1/stacks", {"nodes": ["n1"], "job": "4711"})],
    "POST /api/v1/settings": [("/api/v1/settings", {"interval_ms": 200, "bandwidth": True, "nvlink": True})],
    "GET /metrics": [("/metrics", None)],
    "GET /-/healthy": [("/-/healthy", None)],
    "GET /-/ready": [("/-/ready", None)],
    "GET /openapi.json": [("/openapi.json", None)],
    "GET /api/v1/openapi.json": [("/api/v1/openapi.json", None)],
    "POST /api/v1/sessions/recover": [("/api/v1/sessions/recover", {"name": "broken"})],
    "POST /api/v1/exit": [("/api/v1/exit", {})],
}  # fmt: skip
"""By route what is asked, in this order: the last of them ends the head."""


@pytest.fixture
def head(tmp_path: Path) -> Iterator[HeadProcess]:
    """A head that was killed once, with an agent and sessions of every state."""
    with cluster_in(tmp_path) as cluster:
        first = cluster.head("--freq", "100")
        cluster.agent("n1", first.port)
        until(lambda: first.nodes() == {"n1": "healthy"}, "the agent")
        for name in ("broken", "one"):
            first.post("/profiling/start", {"name": name})
        until(lambda: first.get("/api/v1/sessions/one")["frame_count"] > 3, "frames")
        first.post("/profiling/stop", {"name": "one"})
        first.kill()
        (tmp_path / "nodes").write_text("n1\nn9\n")
        head = cluster.head(
            *("--freq", "100", "--nodes", str(tmp_path / "nodes")),
            port=first.port,
            http_port=first.http_port,
            tuned={"gpulse.cluster.head.expected_nodes:MIN_MISSING_SECONDS": 0.1},
        )
        until(lambda: head.nodes() == {"n1": "healthy"}, "the agent")
        until(lambda: head.get("/api/v1/findings")["findings"], "the missing node")
        head.post("/profiling/start", {"name": "two"})
        yield head


def asked(port: int, method: str, path: str, body: Any) -> tuple[int, str, bytes]:
    """One request: the status, the kind of content, the content."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_SECONDS)
    try:
        data, headers = (
            (None, {}) if body is None else (json.dumps(body), {"Content-Type": "application/json"})
        )
        connection.request(method, path, data, headers)
        answer = connection.getresponse()
        return answer.status, answer.headers["Content-Type"].partition(";")[0], answer.read()
    finally:
        connection.close()


def test_every_route_keeps_its_promise(head: HeadProcess) -> None:
    """A plain request to every route of the document is answered with 200 and what the schema says."""

    described = head.get("/openapi.json")
    routes = [
        f"{method.upper()} {path}" for path, methods in described["paths"].items() for method in methods
    ]
    assert sorted(ASKED) == sorted(routes)

    silence = ""
    for route, requests in ASKED.items():
        method, _, path = route.partition(" ")
        contents = described["paths"][path][method.lower()]["responses"]["200"]["content"]
        for address, body in requests:
            status, kind, content = asked(head.http_port, method, address.replace("SILENCE", silence), body)
            assert (200, True) == (status, kind in contents), (route, body, status, kind, content[:1000])
            assert content
            if kind == "application/json":
                schema = {**contents[kind]["schema"], "components": described["components"]}
                document = json.loads(content)
                silence = document["id"] if route == "POST /api/v1/silences" else silence
                errors = [str(error) for error in jsonschema_rs.iter_errors(schema, document)]
                assert [] == errors, (route, body)
    assert 0 == head.popen.wait(PATIENCE_SECONDS)
    assert "Traceback" not in head.text
