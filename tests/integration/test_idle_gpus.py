"""A real head that warns the holder of idle GPUs and runs a hook, with restarts in between."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from gpulse.cluster.notify.idle_policy import WARNED_AGAIN, EpisodeFile
from tests.integration.cluster import Cluster, HeadProcess, cluster_in, until

_HOLDER = "katherine"
"""The user of the demo machine whose notebook holds a GPU and does nothing."""


class Receiver:
    """An HTTP server that keeps the messages that it gets, by path."""

    def __init__(self) -> None:
        self.titles: dict[str, list[str]] = {}
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                """Keep one message."""
                message = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                receiver.titles.setdefault(self.path.strip("/"), []).append(message["title"])
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                """Print nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def close(self) -> None:
        """Stop."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    """A receiver of messages."""
    made = Receiver()
    yield made
    made.close()


@pytest.fixture
def runs() -> Iterator[Path]:
    """A file that every user can write: the hook adds a line each time that it runs."""
    directory = Path(tempfile.mkdtemp(prefix="gpulse-hook-"))
    directory.chmod(0o755)
    path = directory / "runs"
    path.touch()
    path.chmod(0o666)
    yield path
    shutil.rmtree(directory)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """Heads and agents of one test."""
    with cluster_in(tmp_path) as made:
        yield made


def write_settings(directory: Path, port: int, runs: Path, *, dry_run: bool) -> Path:
    """Settings with short times; the hook runs as another user where the tests may do that."""
    hook = ["/bin/sh", "-c", f'echo "$(id -un) $1 $GPULSE_NODE $GPULSE_GPUS" >>{runs}', "hook", "{user}"]
    user = 'hook_user = "nobody"' if os.geteuid() == 0 else ""
    path = directory / "notify.toml"
    path.write_text(f"""
        [targets.ops]
        url = "json://127.0.0.1:{port}/ops"
        max_per_hour = 1000
        [targets.holder]
        url = "json://127.0.0.1:{port}/holder"
        max_per_hour = 1000
        [idle]
        after = "2 s"
        warn_again = "1 s"
        hook_after = "5 s"
        dry_run = {str(dry_run).lower()}
        hook = {json.dumps(hook)}
        {user}
        targets = ["ops"]
        users = {{ {_HOLDER} = "holder" }}
        exempt_users = ["[!k]*"]
    """)
    path.chmod(0o600)
    return path


def kinds(head: HeadProcess, node: str) -> list[str]:
    """The kinds of the events about idle GPUs of a node, oldest first."""
    events = head.get("/api/v1/events?from=-1h")["events"]
    return [event["kind"] for event in events if event["node"] == node and event["kind"].startswith("idle_")]


def is_saved(head: HeadProcess, level: int) -> bool:
    """Whether a step was carried out, its message is delivered, and the next head will know both."""
    tracks, _ = EpisodeFile(str(head.data_dir)).load()
    waiting = "Second warning" in (head.data_dir / "notifications.json").read_text(encoding="utf-8")
    return not waiting and any(track.level == level and not track.is_pending for track in tracks)


def test_warnings_and_hook(cluster: Cluster, tmp_path: Path, receiver: Receiver, runs: Path) -> None:
    """Two warnings and one run of the hook, whatever is killed in between."""

    settings = write_settings(tmp_path, receiver.port, runs, dry_run=False)
    head = cluster.head("--notify", str(settings))
    agent = cluster.agent("one", head.port)
    until(lambda: len(receiver.titles.get("holder", ())) == 2, "both warnings")
    until(lambda: is_saved(head, WARNED_AGAIN) and len(kinds(head, "one")) == 2, "their records")
    head.kill()
    head = cluster.head("--notify", str(settings), port=head.port, http_port=head.http_port)
    until(lambda: "idle_hook_ended" in kinds(head, "one"), "the end of the hook")
    head.end()
    # Its holder needs as long for all steps on another node as for a second run of the hook here.
    head = cluster.head("--notify", str(settings), port=head.port, http_port=head.http_port)
    until(lambda: head.nodes().get("one") == "healthy" and agent.popen.poll() is None, "the first agent")
    cluster.agent("two", head.port)
    until(lambda: "idle_hook_ended" in kinds(head, "two"), "the end of the hook on the other node")

    steps = ["idle_warning", "idle_second_warning", "idle_hook_started", "idle_hook_ended"]
    who = "nobody" if os.geteuid() == 0 else os.environ.get("USER", "")
    assert kinds(head, "one") == kinds(head, "two") == steps
    assert runs.read_text().split() == [who, _HOLDER, "one", "6", who, _HOLDER, "two", "6"]
    until(lambda: len(receiver.titles["holder"]) == 4, "the warnings about the other node")
    for node in ("one", "two"):
        first, second = (title for title in receiver.titles["holder"] if title.endswith(f"on {node}"))
        assert first.startswith("Unused for")
        assert second.startswith("Second warning")


def test_dry_run(cluster: Cluster, tmp_path: Path, receiver: Receiver, runs: Path) -> None:
    """A dry run tells operators what would be done, tells users nothing and runs nothing."""

    settings = write_settings(tmp_path, receiver.port, runs, dry_run=True)
    head = cluster.head("--notify", str(settings))
    cluster.agent("one", head.port)
    head.said("the hook would have been run")
    until(lambda: len(receiver.titles.get("ops", ())) == 3, "the messages to operators")

    assert until(lambda: len(found := kinds(head, "one")) == 3 and found, "events") == ["idle_dry_run"] * 3
    assert all(title.startswith("Dry run: ") for title in receiver.titles["ops"])
    assert "holder" not in receiver.titles
    assert runs.read_text() == ""


def test_refused_settings(cluster: Cluster, tmp_path: Path, runs: Path) -> None:
    """A head whose hook cannot be run does not start, and says why."""

    settings = write_settings(tmp_path, 1, runs, dry_run=True)
    settings.write_text(settings.read_text().replace("/bin/sh", "/bin/no-such-program"))
    head = cluster.head("--notify", str(settings), wait=False)

    assert head.popen.wait(60) == 2
    assert head.said("[idle] hook: cannot find /bin/no-such-program: No such file or directory")
