"""What the options about an engine mean, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpulse.cli.head_options import TsdbOptions
from gpulse.errors import UsageError
from gpulse.store.tsdb.config import TsdbConfig, derive_query_url


def test_nothing_given_is_no_engine() -> None:
    """A head has no engine unless it is told of one."""
    assert TsdbOptions().config() is None


def test_the_query_url_follows_from_the_write_url() -> None:
    """Prometheus and VictoriaMetrics are asked where they are written to."""
    engine = TsdbOptions(write="http://vm:8428/api/v1/write/").config()

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
    assert query == derive_query_url(write)


def test_headers_and_labels_are_read(tmp_path: Path) -> None:
    """Headers come from a file, so that no secret is on a command line."""
    file = tmp_path / "headers"
    file.write_text("# who we are\nAuthorization: Bearer s3cret\n\nX-Scope-OrgID:lab\n")

    engine = TsdbOptions(write="https://m/api/v1/push", headers=file, labels=("cluster=lab",)).config()

    assert engine is not None
    assert {"Authorization": "Bearer s3cret", "X-Scope-OrgID": "lab"} == engine.headers
    assert {"cluster": "lab"} == engine.labels


@pytest.mark.parametrize(
    "given",
    [
        TsdbOptions(write="vm:8428"),
        TsdbOptions(write="ftp://vm/x"),
        TsdbOptions(write="http://"),
        TsdbOptions(write="http://vm:99999/x"),
        TsdbOptions(write="http://me:secret@vm/api/v1/write"),
        TsdbOptions(write="http://vm/api/v1/write?x=1"),
        TsdbOptions(write="http://vm/api/v1/write", query="vm"),
        TsdbOptions(write="http://vm/api/v1/write", labels=("node=a",)),
        TsdbOptions(write="http://vm/api/v1/write", labels=("a-b=c",)),
        TsdbOptions(write="http://vm/api/v1/write", labels=("__name__=c",)),
        TsdbOptions(write="http://vm/api/v1/write", headers=Path("/nonexistent/headers")),
        TsdbOptions(write="http://vm/api/v1/write", ca=Path("/nonexistent/ca.pem")),
        TsdbOptions(write="http://vm/api/v1/write", limit=1),
        TsdbOptions(query="http://vm"),
        TsdbOptions(labels=("cluster=lab",)),
    ],
)
def test_nonsense_is_refused_with_a_hint(given: TsdbOptions) -> None:
    """Every mistake is named before anything is started, and no secret is repeated."""
    with pytest.raises(UsageError) as caught:
        given.config()

    assert caught.value.hint
    assert "secret" not in caught.value.message


@pytest.mark.parametrize("line", ["no colon", "Bad Name: x", "X: a\x01b"])
def test_a_line_that_is_no_header_is_named_by_its_number(line: str, tmp_path: Path) -> None:
    """The line itself may be a secret and is not shown."""
    file = tmp_path / "headers"
    file.write_text(f"A: b\n{line}\n")

    with pytest.raises(UsageError, match="line 2"):
        TsdbOptions(write="http://vm/api/v1/write", headers=file).config()
