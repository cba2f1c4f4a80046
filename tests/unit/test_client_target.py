"""Which head a command asks, and which token it shows."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest

from gpulse.cli import common
from gpulse.cli.head_client import HeadTarget, find_running_head
from gpulse.cli.session_download import choose_format
from gpulse.errors import UsageError

TOKEN = "0123456789abcdef0123"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user without any files."""
    for name in ("GPULSE_HEAD", "GPULSE_TOKEN", "GPULSE_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path


def left(directory: Path, pid: int, grpc: str = "0.0.0.0:9999") -> Path:
    """What a head leaves in its directory while it runs."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "head.json").write_text(json.dumps({"pid": pid, "grpc": grpc, "http": None}))
    return directory


def test_the_option_comes_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """And both before the head of this machine, which comes before the default."""
    assert "localhost:8090" == HeadTarget().address().target

    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        left(common.state_dir("head"), os.getpid(), f"0.0.0.0:{port}")
        assert f"localhost:{port}" == HeadTarget().address().target
    assert "localhost:8090" == HeadTarget().address().target, "nothing listens there any more"

    monkeypatch.setenv("GPULSE_HEAD", "there")
    assert "there:8090" == HeadTarget().address().target
    assert "here:1" == HeadTarget(head="here:1").address().target


def test_a_head_that_is_gone_is_not_asked(tmp_path: Path) -> None:
    """The file of a head that was killed means nothing, nor does one that cannot be read."""
    dead = left(tmp_path / "data", 2**22 + 1)

    assert find_running_head(dead) is None
    assert find_running_head(tmp_path / "nothing") is None
    (dead / "head.json").write_text("{")
    assert find_running_head(dead) is None


def test_a_head_without_http_is_not_asked_over_http(tmp_path: Path) -> None:
    """Only where it listens it can be asked."""
    assert find_running_head(left(tmp_path / "data", os.getpid()), "http") is None


def test_the_token_is_found(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the file that was named, in the environment, or in the user's configuration."""
    file = home / "token"
    file.write_text(f"{TOKEN}-file\n")
    file.chmod(0o600)
    default = common.default_token_file()
    default.parent.mkdir(parents=True)

    assert HeadTarget().credentials(is_local=False).token is None

    default.write_text(f"{TOKEN}-default\n")
    default.chmod(0o600)
    assert f"{TOKEN}-default" == HeadTarget().credentials(is_local=False).token

    monkeypatch.setenv("GPULSE_TOKEN", f"{TOKEN}-environment")
    assert f"{TOKEN}-environment" == HeadTarget().credentials(is_local=False).token

    monkeypatch.setenv("GPULSE_TOKEN_FILE", str(file))
    assert f"{TOKEN}-file" == HeadTarget().credentials(is_local=False).token


def test_a_token_that_others_can_read_is_refused_where_it_is_needed() -> None:
    """A head on this machine needs none, so there it is no reason to stop."""
    default = common.default_token_file()
    default.parent.mkdir(parents=True)
    default.write_text(f"{TOKEN}\n")
    default.chmod(0o644)

    assert HeadTarget().credentials(is_local=True).token is None
    with pytest.raises(UsageError, match="other users can read"):
        HeadTarget().credentials(is_local=False)


def test_any_option_for_tls_means_tls() -> None:
    """A certificate is of no use without it."""
    assert not HeadTarget().credentials(is_local=True).tls
    assert HeadTarget(tls=True).credentials(is_local=True).tls
    assert HeadTarget(tls_ca=Path("ca.pem")).credentials(is_local=True).tls


def test_the_kind_of_file_follows_its_name(tmp_path: Path) -> None:
    """A directory and standard output say nothing about it."""
    assert "json" == choose_format(None, None)
    assert "csv" == choose_format(None, Path("x.csv"))
    assert "parquet" == choose_format("parquet", tmp_path)
    assert "jsonl" == choose_format("jsonl", Path("-"))
    for kind, place in (("json", Path("x.csv")), (None, Path("x.txt")), (None, Path("x"))):
        with pytest.raises(UsageError):
            choose_format(kind, place)
