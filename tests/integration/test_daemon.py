"""Background mode: a command that goes on in a fresh process, and what its start reports."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import pytest

from tests.integration.cluster import free_port, is_gone, until
from tests.integration.commands import BIN, environment, run


@contextmanager
def starting_head(directory: Path) -> Iterator[tuple[subprocess.Popen[bytes], int, IO[str]]]:
    """A head that is being started in the background and waits for a file of its options: caller, head, file."""
    pipe = directory / "headers"
    os.mkfifo(pipe)
    options = ["--port", str(free_port()), "--http-port", "0", "--data-dir", str(directory / "data")]
    options += ["--remote-write", f"http://127.0.0.1:{free_port()}/", "--remote-headers", str(pipe)]
    with subprocess.Popen(
        [BIN / "gpulse", "head", "--background", *options],
        env=environment({"HOME": str(directory)}),
        stdin=subprocess.DEVNULL,
    ) as caller:

        def opened() -> IO[str] | None:
            with suppress(OSError):  # nobody reads it yet
                return open(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK), "w", encoding="utf-8")
            return None

        with until(opened, "the head reads the file") as headers:
            (head,) = map(int, Path(f"/proc/{caller.pid}/task/{caller.pid}/children").read_text().split())
            try:
                yield caller, head, headers
            finally:
                for pid in (head, caller.pid):
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_start_that_is_interrupted_leaves_no_process(tmp_path: Path, number: signal.Signals) -> None:
    """Ctrl-C, a kill, and a terminal that is closed."""

    with starting_head(tmp_path) as (caller, head, _):
        caller.send_signal(number)
        assert 130 == caller.wait(60)
        assert is_gone(head)


def test_a_process_whose_caller_was_killed_ends_itself(tmp_path: Path) -> None:
    """Nobody knows of it."""

    with starting_head(tmp_path) as (caller, head, headers):
        caller.kill()
        caller.wait(60)
        headers.write("X-Scope-OrgID: lab\n")
        headers.close()
        until(lambda: is_gone(head), "the head ends")
        assert "gpulse head" not in (tmp_path / "data" / "head.log").read_text(), "in an orderly way"


def test_a_process_in_the_background_is_fresh_and_detached(tmp_path: Path) -> None:
    """It has no terminal, reads nothing, and has a session of its own; its options may name open pipes."""

    with starting_head(tmp_path) as (caller, head, headers):
        headers.write("X-Scope-OrgID: lab\n")
        headers.close()
        assert 0 == caller.wait(60)
        assert head == os.getsid(head) != os.getsid(0)
        assert "/dev/null" == os.readlink(f"/proc/{head}/fd/0")
        assert str(tmp_path / "data" / "head.log") == os.readlink(f"/proc/{head}/fd/1")
        assert b"--background" in Path(f"/proc/{head}/cmdline").read_bytes().split(b"\0")


def test_a_start_that_fails_says_why(tmp_path: Path) -> None:
    """With the exit code of the reason, and the place of the log."""

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        words = ("head", "--port", port, "--http-port", "0", "--background", "--data-dir", tmp_path / "data")
        ended = run(*words, env={"HOME": str(tmp_path)})
    assert 1 == ended.code
    assert f"gpulse head: cannot listen on 127.0.0.1:{port}" in ended.err
    assert f"; see {tmp_path}/data/head.log" in ended.err
    missing = run(*words, "--nodes", tmp_path / "missing", env={"HOME": str(tmp_path)})
    assert (2, True) == (missing.code, f"gpulse head: cannot read {tmp_path}/missing" in missing.err)
    unwritable = run(*words, "--log-file", tmp_path / "none" / "log", env={"HOME": str(tmp_path)})
    assert (1, True) == (unwritable.code, "cannot write" in unwritable.err)
