"""Schemathesis against a real head: whatever the OpenAPI document says is so."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.integration.cluster import HeadProcess, cluster_in, until

EXAMPLES = os.environ.get("GPULSE_API_EXAMPLES", "5")
"""Random requests per operation, beside those that every run makes: one for each limit and kind of each parameter."""


@pytest.fixture
def head(tmp_path: Path) -> Iterator[HeadProcess]:
    """A head with an agent, a session that goes on and one that has ended."""
    with cluster_in(tmp_path) as cluster:
        head = cluster.head("--freq", "100", "--retention", "1h")  # no session begins earlier
        cluster.agent("n1", head.port)
        until(lambda: head.nodes() == {"n1": "healthy"}, "the agent")
        for name in ("one", "two"):
            head.post("/profiling/start", {"name": name})
        until(lambda: head.get("/api/v1/sessions/two")["frame_count"] > 3, "frames")
        head.post("/profiling/stop", {"name": "two"})
        yield head


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(find_spec("schemathesis") is None, reason="schemathesis is not installed")
def test_the_api_is_what_it_says(head: HeadProcess, tmp_path: Path) -> None:
    """All default checks pass over all operations of a real head, with bad data as well as good, and it lives."""

    found = subprocess.run(
        [
            *(sys.executable, "-m", "schemathesis.cli", "run"),
            f"http://127.0.0.1:{head.http_port}/openapi.json",
            *("--exclude-path", "/api/v1/exit"),
            *("--max-examples", EXAMPLES, "--generation-deterministic", "--no-color"),
            *("--workers", "1", "--suppress-health-check", "all"),  # in the same order every time
            *("--request-timeout", "60"),  # how long an answer takes says how busy the machine is
        ],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=540,
        check=False,
    )
    assert 0 == found.returncode, found.stdout[-8000:]
    assert {"n1": "healthy"} == head.nodes()
    assert "Traceback" not in head.text
