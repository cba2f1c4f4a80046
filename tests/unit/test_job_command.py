"""What `gpulse job` makes of its options, without a head."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import click
import pytest
from click.testing import CliRunner

from gpulse.cli import head_client, job
from gpulse.cluster.client.head_client import HeadClient
from gpulse.cluster.client.transport import HeadAddress, Reply
from gpulse.errors import GpulseError, RefusedError, UsageError
from tests.unit.job_documents import job_document


class _Link:
    """Stands for a head with one report."""

    def __init__(self) -> None:
        self.asked: list[Mapping[str, Any]] = []
        self.failure: Exception | None = None
        self.changes: dict[str, Any] = {}

    def ask(self, operation: str, body: Mapping[str, Any]) -> Reply:
        """Answer as a head does."""
        assert "job" == operation
        self.asked.append(body)
        if self.failure is not None:
            raise self.failure
        return Reply(200, json.dumps({**job_document(), **self.changes}).encode())

    def fetch(self, body: Mapping[str, Any]) -> Iterator[Reply]:
        """Nothing is fetched."""
        raise AssertionError(body)

    def close(self) -> None:
        """Nothing is held."""


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch) -> _Link:
    """The way to the head that commands ask."""
    made = _Link()
    here = HeadAddress("grpc", "localhost", 8090)
    monkeypatch.setattr(head_client.HeadTarget, "connect", lambda *_: HeadClient(made, here))
    return made


@pytest.mark.parametrize(
    ("words", "body"),
    [
        (["4711"], {"job": "4711"}),
        (["slurm:4711_3", "--node", "n1"], {"job": "slurm:4711_3", "node": "n1"}),
        (["--session", "x"], {"job": "x", "kind": "session"}),
        (["--pid", "7"], {"job": "7", "kind": "process"}),
        (["x", "--since", "2h"], {"job": "x", "from": "-2h"}),
        (["x", "--from", "-2h", "--to", "now"], {"job": "x", "from": "-2h", "to": "now"}),
        (["x", "--html", "-"], {"job": "x", "points": 240}),
    ],
)
def test_what_is_asked(link: _Link, words: list[str], body: dict[str, Any]) -> None:
    """The head gets what was meant, times as they were written."""
    assert 0 == CliRunner().invoke(job.command, words).exit_code
    assert [body] == link.asked


@pytest.mark.parametrize(
    "words",
    [
        [],
        [""],
        ["--session", " "],
        ["4711", "--pid", "7"],
        ["4711", "--session", "x"],
        ["4711", "--json", "--line"],
        ["4711", "--from", "yesterday"],
        ["4711", "--since", "soon"],
        ["4711", "--since", "1h", "--from", "-2h"],
        ["--pid", "0"],
        ["--pid", "x"],
        ["4711", "--html", "/"],
    ],
)
def test_what_makes_no_sense(link: _Link, words: list[str]) -> None:
    """It is a wrong command, and the head is not asked."""
    found = CliRunner().invoke(job.command, words, standalone_mode=False)
    assert isinstance(found.exception, UsageError | click.UsageError)
    assert 2 == found.exception.exit_code
    assert [] == link.asked


@pytest.mark.parametrize(("status", "code"), [(400, 2), (404, 1), (409, 1)])
def test_what_a_head_refuses(link: _Link, status: int, code: int) -> None:
    """What makes no sense to it is a wrong command, what there is not is a failure."""
    link.failure = RefusedError(status, "no", hint="yes")
    found = CliRunner().invoke(job.command, ["x"], standalone_mode=False)
    assert (code, "no", "yes") == (
        found.exception.exit_code,  # type: ignore[union-attr]
        found.exception.message,  # type: ignore[union-attr]
        found.exception.hint,  # type: ignore[union-attr]
    )


@pytest.mark.parametrize("changes", [{"gpus": "many"}, {"cluster": None}, {"gpu_rows": [{}]}])
def test_an_answer_that_is_not_a_report(link: _Link, changes: dict[str, Any]) -> None:
    """As of a head of another version; it is printed as JSON all the same."""
    link.changes = changes
    found = CliRunner().invoke(job.command, ["x"], standalone_mode=False)
    assert isinstance(found.exception, GpulseError)
    assert "to 'job': " in found.exception.message
    assert "same version" in (found.exception.hint or "")
    assert 0 == CliRunner().invoke(job.command, ["x", "--json"]).exit_code
