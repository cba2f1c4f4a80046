"""What the options about an engine mean, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpulse.cli.engine import EngineOptions
from gpulse.errors import UsageError
from gpulse.store.tsdb.config import TsdbConfig, query_url_of


def test_nothing_given_is_no_engine() -> None:
    """A head has no engine unless it is told of one."""
    assert EngineOptions().engine() is None


def test_the_query_url_follows_from_the_write_url() -> None:
    """Prometheus and VictoriaMetrics are asked where they are written to."""
    engine = EngineOptions(write="http://vm:8428/api/v1/write/").engine()

    assert TsdbConfig("http://vm:8428/api/v1/write", "http://vm:8428") == engine


@pytest.mark.parametrize(
    ("write", "query"),
    [
        ("http://vm/insert/0/prometheus/api/v1/write", "http://vm/insert/0/prometheus"),
        ("http://mimir:9009/api/v1/push", None),
    ],
)
def test_where_it_does_not_follow_nothing_is_guessed(write: str, query: str | None) -> None:
    """A push path says nothing about where to ask."""
    assert query == query_url_of(write)


def test_headers_and_labels_are_read(tmp_path: Path) -> None:
    """Headers come from a file, so that no secret is on a command line."""
    file = tmp_path / "headers"
    file.write_text("# who we are\nAuthorization: Bearer s3cret\n\nX-Scope-OrgID:lab\n")

    engine = EngineOptions(write="https://m/api/v1/push", headers=file, labels=("cluster=lab",)).engine()

    assert engine is not None
    assert {"Authorization": "Bearer s3cret", "X-Scope-OrgID": "lab"} == engine.headers
    assert {"cluster": "lab"} == engine.labels


@pytest.mark.parametrize(
    "given",
    [
        EngineOptions(write="vm:8428"),
        EngineOptions(write="ftp://vm/x"),
        EngineOptions(write="http://"),
        EngineOptions(write="http://vm:99999/x"),
        EngineOptions(write="http://me:secret@vm/api/v1/write"),
        EngineOptions(write="http://vm/api/v1/write?x=1"),
        EngineOptions(write="http://vm/api/v1/write", query="vm"),
        EngineOptions(write="http://vm/api/v1/write", labels=("node=a",)),
        EngineOptions(write="http://vm/api/v1/write", labels=("a-b=c",)),
        EngineOptions(write="http://vm/api/v1/write", labels=("__name__=c",)),
        EngineOptions(write="http://vm/api/v1/write", headers=Path("/nonexistent/headers")),
        EngineOptions(write="http://vm/api/v1/write", ca=Path("/nonexistent/ca.pem")),
        EngineOptions(write="http://vm/api/v1/write", limit=1),
        EngineOptions(query="http://vm"),
        EngineOptions(labels=("cluster=lab",)),
    ],
)
def test_nonsense_is_refused_with_a_hint(given: EngineOptions) -> None:
    """Every mistake is named before anything is started, and no secret is repeated."""
    with pytest.raises(UsageError) as caught:
        given.engine()

    assert caught.value.hint
    assert "secret" not in caught.value.message


@pytest.mark.parametrize("line", ["no colon", "Bad Name: x", "X: a\x01b"])
def test_a_line_that_is_no_header_is_named_by_its_number(line: str, tmp_path: Path) -> None:
    """The line itself may be a secret and is not shown."""
    file = tmp_path / "headers"
    file.write_text(f"A: b\n{line}\n")

    with pytest.raises(UsageError, match="line 2"):
        EngineOptions(write="http://vm/api/v1/write", headers=file).engine()
