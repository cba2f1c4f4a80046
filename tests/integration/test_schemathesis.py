"""Schemathesis against the served API: whatever the OpenAPI document says is so."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from gpulse.cluster.security import Access
from gpulse.web.app import make_app
from tests.integration.serving import served
from tests.unit.fake_head import TOKEN, FakeHead

pytest.importorskip("schemathesis")


@pytest.mark.slow
async def test_the_api_is_what_it_says(tmp_path: Path) -> None:
    """All default checks pass over all operations, with bad data as well as good."""

    head = FakeHead()
    await head.start_session(name="one")
    async with served(make_app(head, Access(TOKEN))) as port:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "schemathesis.cli", "run", f"http://127.0.0.1:{port}/openapi.json"),
            *("--max-examples", "10", "--generation-deterministic", "--no-color"),
            *("--workers", "2", "--suppress-health-check", "all"),
            cwd=tmp_path,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        async with asyncio.timeout(110):
            output, _ = await process.communicate()
    assert 0 == process.returncode, output.decode()[-8000:]
