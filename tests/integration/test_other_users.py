"""Other users of the head's machine: they read, and need the token to change anything."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from gpulse.cluster.protocol.operations import OPERATIONS
from gpulse.cluster.wire_pb2 import AgentMessage, Layout
from tests.integration.cluster import Cluster, HeadProcess, cluster_in, free_port, talk, until
from tests.integration.commands import BIN, Ended, environment
from tests.integration.hands import IS_ROOT
from tests.integration.hostile_messages import EVENTS, SUBJECTS, batch, frame, hello, layout

pytestmark = pytest.mark.skipif(not IS_ROOT, reason="only root can be another user as well")

NOBODY, DAEMON = 65534, 1
ROOT = Path(__file__).parents[2]
CHANGES = [operation for operation in OPERATIONS if operation.writes]
READS = [operation for operation in OPERATIONS if not operation.writes and not operation.is_file]

_HTTP = """
import http.client, json, sys
host, port, token, requests = json.loads(sys.argv[1])
answers = []
for method, path in requests:
    connection = http.client.HTTPConnection(host, port, timeout=30)
    headers = {"Host": f"localhost:{port}"} | ({"Authorization": f"Bearer {token}"} if token else {})
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    answers.append([answer.status, answer.read().decode()])
    connection.close()
print(json.dumps(answers))
"""
_GRPC = """
import json, sys
from gpulse.cluster import wire
from gpulse.cluster.wire_pb2 import Request
from tests.integration.cluster import call
address, operations = json.loads(sys.argv[1])
print(json.dumps([
    call(address, wire.CALL, Request(operation=name, body=b"{}").SerializeToString())[0].name for name in operations
]))
"""
_WEBSOCKET = """
import asyncio, json, sys, websockets
async def look():
    async with websockets.connect(sys.argv[1]) as stream:
        return json.loads(await stream.recv())["type"]
try:
    print(json.dumps(asyncio.run(look())))
except websockets.InvalidStatus as error:
    print(json.dumps(error.response.status_code))
"""


def _as(user: int) -> list[str]:
    """Runs a command as another user, who can read the interpreter wherever that is."""
    caps = ("--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search") if user else ()
    return ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups", *caps, "--"]


class User(NamedTuple):
    """Somebody on this machine, with a home directory."""

    uid: int
    home: Path

    @classmethod
    def at(cls, uid: int, home: Path) -> User:
        """The user, whose home is made."""
        home.mkdir()
        os.chown(home, uid, uid)
        return cls(uid, home)

    def script(self, code: str, document: Any) -> Any:
        """What a script prints."""
        text = document if isinstance(document, str) else json.dumps(document)
        done = self._run([sys.executable, "-c", code, text])
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def type(self, *words: str) -> Ended:
        """Run a command to its end."""
        done = self._run([str(BIN / words[0]), *words[1:]])
        return Ended(done.returncode, done.stdout, done.stderr)

    def http(
        self, head: HeadProcess, *requests: tuple[str, str], host: str = "127.0.0.1", token: str | None = None
    ) -> list[tuple[int, str]]:
        """Status and text of answers, each over a connection of its own."""
        answers = self.script(_HTTP, [host, head.http_port, token, requests])
        return [(status, text) for status, text in answers]

    def grpc(self, head: HeadProcess, *operations: str, host: str = "127.0.0.1") -> list[str]:
        """How calls end."""
        ended: list[str] = self.script(_GRPC, [f"{host}:{head.port}", operations])
        return ended

    def _run(self, words: list[str]) -> subprocess.CompletedProcess[str]:
        env = environment({"HOME": str(self.home), "PYTHONPATH": str(ROOT)})
        return subprocess.run(
            [*_as(self.uid), *words],
            env=env,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """Heads and agents for one test."""
    with cluster_in(tmp_path) as made:
        yield made


@pytest.fixture
def homes() -> Iterator[Path]:
    """A directory that everybody can enter."""
    with tempfile.TemporaryDirectory(prefix="gpulse-users-") as made:
        path = Path(made)
        path.chmod(0o755)
        yield path


@pytest.fixture
def nobody(homes: Path) -> User:
    """Another user."""
    return User.at(NOBODY, homes / "nobody")


@pytest.fixture
def root(homes: Path) -> User:
    """The user who runs heads, without the head's token."""
    return User.at(0, homes / "root")


def token_of(head: HeadProcess, user: User) -> Path:
    """The head's token, copied for a user."""
    copy = user.home / "token"
    copy.write_bytes((head.data_dir.parent / "config" / "gpulse" / "token").read_bytes())
    copy.chmod(0o600)
    os.chown(copy, user.uid, user.uid)
    return copy


def test_over_http_others_read_and_change_nothing(cluster: Cluster, nobody: User, root: User) -> None:
    """Every request that changes something is refused with what helps; with the token it is not."""

    head = cluster.head()
    changes = [("POST", path) for operation in CHANGES for path in operation.paths]
    reads = [("GET", "/status"), ("GET", "/clients"), ("GET", "/metrics"), ("GET", "/api/v1/sessions")]
    unknown = [(method, "/status") for method in ("DELETE", "PUT", "PATCH")]

    refused = nobody.http(head, *changes, *unknown)
    assert {401} == {status for status, _ in refused}
    assert all("gpulse token" in json.loads(text)["hint"] for _, text in refused)
    assert {200} == {status for status, _ in nobody.http(head, *reads)}
    token = token_of(head, nobody).read_text().strip()
    assert [200, 200] == [
        status
        for status, _ in nobody.http(
            head, ("POST", "/profiling/start"), ("POST", "/profiling/stop"), token=token
        )
    ]
    assert [200] == [status for status, _ in root.http(head, ("POST", "/profiling/start"))]


def test_over_grpc_others_read_and_change_nothing(cluster: Cluster, nobody: User, root: User) -> None:
    """As over HTTP."""

    head = cluster.head()
    changes, reads = [operation.name for operation in CHANGES], [operation.name for operation in READS]

    assert ["UNAUTHENTICATED"] * len(changes) == nobody.grpc(head, *changes)
    assert ["OK"] * len(reads) == nobody.grpc(head, *reads)
    assert head.popen.poll() is None
    assert ["OK"] == root.grpc(head, "settings")


def test_commands_of_another_user(cluster: Cluster, nobody: User, root: User) -> None:
    """They see everything; what would change something says how to get the token, and works with it."""

    head = cluster.head()
    place = f"127.0.0.1:{head.port}"
    changing = (
        ("gpulse", "settings", "--freq", "1000", "--head", place),
        ("gpulse", "session", "start", "x", "--head", f"http://127.0.0.1:{head.http_port}"),
        ("gsprof", "exit", place),
    )

    for words in changing:
        ended = nobody.type(*words)
        assert (1, "") == (ended.code, ended.out)
        assert "this head requires a token for changes by users other than root" in ended.err
        assert "gpulse token --show" in ended.err
    assert 0 == nobody.type("gpulse", "status", "--head", place).code
    token = token_of(head, nobody)
    for words in changing[:2]:
        assert 0 == nobody.type(*words, "--token-file", str(token)).code
    assert 0 == root.type("gsprof", "exit", place).code
    assert 0 == head.popen.wait(30)


def test_code_is_shown_only_to_those_who_may_change_something(
    cluster: Cluster, nobody: User, root: User
) -> None:
    """Others see the findings without it, over HTTP and gRPC, in answers and in session files."""

    head = cluster.head()
    place = f"127.0.0.1:{head.port}"
    head.post("/profiling/start", {"name": "one"})
    text = layout("gpu", json.dumps(SUBJECTS["gpu"]))
    event = {"event": "findings", **EVENTS["findings"]}
    messages = (
        hello("n1"),
        AgentMessage(layout=Layout(text=text)),
        batch("n1", 1, [frame([(text, 8)], json.dumps([event]).encode())]),
    )
    talk(place, [message.SerializeToString() for message in messages])
    until(lambda: head.get("/api/v1/findings/history?from=-10m")["spans"], "the finding is stored")
    reads = [("GET", path) for path in ("/status", "/api/v1/findings", "/api/v1/events?from=-10m")]
    reads += [("GET", "/api/v1/findings/history?from=-10m"), ("GET", "/api/v1/sessions/one/download")]
    token = token_of(head, nobody)

    def sees_code(user: User, **given: str) -> set[bool]:
        answers = user.http(head, *reads, **given)
        assert {200} == {status for status, _ in answers}
        assert all('"severity"' in text for _, text in answers)
        return {"train.py" in text for _, text in answers}

    assert [{False}, {True}] == [sees_code(nobody), sees_code(root)]
    assert {True} == sees_code(nobody, token=token.read_text().strip())
    status = ("gpulse", "status", "--json", "--head", place)
    assert "train.py" not in nobody.type(*status).out
    assert "train.py" in nobody.type(*status, "--token-file", str(token)).out
    assert "train.py" in root.type(*status).out
    saved = nobody.home / "saved.json"
    download = ("gpulse", "session", "export", "one", "--head", place, "-o", str(saved))
    assert 0 == nobody.type(*download).code
    assert '"severity"' in saved.read_text()
    assert "train.py" not in saved.read_text()
    assert 0o644 == saved.stat().st_mode & 0o777
    for suffix, mode in ((".json", 0o600), (".jsonl", 0o600), (".parquet", 0o600), (".csv", 0o644)):
        whole = nobody.home / f"whole{suffix}"
        assert 0 == nobody.type(*download[:-1], str(whole), "--token-file", str(token)).code
        assert (mode == 0o600, mode) == (b"train.py" in whole.read_bytes(), whole.stat().st_mode & 0o777)


def test_agents_of_another_user_need_the_token(cluster: Cluster, nobody: User) -> None:
    """Without it they are not let in, and say what helps."""

    head = cluster.head()
    there = nobody.home

    def agent(name: str, *options: str) -> Any:
        env = {"HOME": str(there), "XDG_CONFIG_HOME": str(there / "config"), "XDG_STATE_HOME": str(there)}
        state = ("--state-dir", str(there / name))
        return cluster.agent(name, head.port, *state, *options, env=env, prefix=_as(NOBODY))

    refused = agent("refused")
    assert "this head requires a token for changes by users other than root" in refused.said("refused")
    assert "gpulse token --show" in refused.said("try")
    assert 1 == refused.popen.wait(30)
    assert {} == head.nodes()
    welcome = agent("welcome", "--token-file", str(token_of(head, nobody)))
    welcome.said("connected to")
    assert 0 == welcome.end()


def test_a_private_head(cluster: Cluster, nobody: User, root: User) -> None:
    """Others cannot read it either, over HTTP, gRPC and the live stream; its own user and root can."""

    head = cluster.head("--private")
    live = f"ws://localhost:{head.http_port}/api/v1/live"

    assert {401} == {status for status, _ in nobody.http(head, ("GET", "/status"), ("GET", "/metrics"))}
    assert ["UNAUTHENTICATED"] == nobody.grpc(head, "status")
    assert 401 == nobody.script(_WEBSOCKET, live)
    token = token_of(head, nobody)
    assert [200] == [s for s, _ in nobody.http(head, ("GET", "/status"), token=token.read_text().strip())]
    place = ("--head", f"127.0.0.1:{head.port}")
    assert 0 == nobody.type("gpulse", "status", *place, "--token-file", str(token)).code
    assert [200] == [status for status, _ in root.http(head, ("GET", "/status"))]
    assert ["OK"] == root.grpc(head, "status")
    assert "hello" == root.script(_WEBSOCKET, live)


def test_the_live_stream_is_open_to_others(cluster: Cluster, nobody: User) -> None:
    """It only reads."""

    head = cluster.head()

    assert "hello" == nobody.script(_WEBSOCKET, f"ws://localhost:{head.http_port}/api/v1/live")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.1.1", "::1", "::ffff:127.0.0.1"])
def test_every_address_of_this_machine(cluster: Cluster, nobody: User, root: User, host: str) -> None:
    """A head on all interfaces knows its users at each of them."""

    head = cluster.head("--host", "::" if ":" in host and "." not in host else "0.0.0.0")
    bracketed = f"[{host}]" if ":" in host else host
    change = ("POST", "/profiling/start")

    assert ["UNAUTHENTICATED", "OK"] == nobody.grpc(head, "settings", "status", host=bracketed)
    assert ["OK", "OK"] == root.grpc(head, "settings", "status", host=bracketed)
    assert [401, 200] == [status for status, _ in nobody.http(head, change, ("GET", "/status"), host=host)]
    assert [200] == [status for status, _ in root.http(head, change, host=host)]


def test_a_head_of_a_user(nobody: User, root: User, homes: Path) -> None:
    """It trusts that user and root, and nobody else."""

    daemon = User.at(DAEMON, homes / "daemon")
    place = nobody.home / "head"
    place.mkdir()
    (place / "output").mkdir()
    for path in (place, place / "output"):
        os.chown(path, NOBODY, NOBODY)
    with cluster_in(place) as theirs:
        head = theirs.head(http_port=free_port(), prefix=_as(NOBODY))
        for user, status, code in ((nobody, 200, "OK"), (root, 200, "OK"), (daemon, 401, "UNAUTHENTICATED")):
            assert [status] == [found for found, _ in user.http(head, ("POST", "/profiling/stop"))]
            assert [code] == user.grpc(head, "settings")


def test_planted_links_are_not_followed(nobody: User, homes: Path) -> None:
    """What commands write to a directory like /tmp never goes where another user's link leads."""

    shared = homes / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    for name in ("run.jsonl", "gpus.csv", "gpus.sqlite", "why.html", "log"):
        (shared / name).symlink_to(nobody.home / f"precious-{name}")
        os.chown(shared / name, DAEMON, DAEMON, follow_symlinks=False)
    commands = (
        ("gpulse", "record", "--demo", "-t", "0.2", "-o", str(shared / "run.jsonl")),
        ("gpulse", "record", "--demo", "-t", "0.2", "-o", str(shared / "gpus.csv")),
        ("gpulse", "--demo", "--sqlite", str(shared / "gpus.sqlite")),
        ("gpulse", "why", "--demo", "--plot", str(shared / "why.html")),
        ("gpulse", "agent", "localhost:1", "--background", "--log-file", str(shared / "log")),
    )

    for words in commands:
        ended = nobody.type(*words)
        assert ended.code in (1, 2), ended
        assert "of another user (UID 1)" in ended.err or "already exists" in ended.err, ended.err
        assert "try: choose another" in ended.err or "try: choose a file" in ended.err, ended.err
    assert [] == [name for name in os.listdir(nobody.home) if name.startswith("precious")]
    own = nobody.home / "own.sqlite"
    own.symlink_to("real.sqlite")
    os.chown(own, NOBODY, NOBODY, follow_symlinks=False)
    assert 0 == nobody.type("gpulse", "--demo", "--sqlite", str(own)).code
    assert (nobody.home / "real.sqlite").is_file()


@pytest.mark.parametrize(
    "words", [("gpulse", "head", "--data-dir"), ("gpulse", "agent", "localhost:1", "--state-dir")]
)
def test_directories_that_others_can_write_are_refused(nobody: User, words: tuple[str, ...]) -> None:
    """With the command that mends it."""

    data = nobody.home / "data"
    data.mkdir()
    data.chmod(0o777)
    os.chown(data, NOBODY, NOBODY)
    ended = nobody.type(*words, str(data))

    assert 2 == ended.code
    assert f"other users can write to {data} (mode 777)" in ended.err
    assert f"try: chmod 700 {data}" in ended.err
    assert [] == os.listdir(data)


@pytest.mark.parametrize(
    "words", [("gpulse", "head", "--data-dir"), ("gpulse", "agent", "localhost:1", "--state-dir")]
)
def test_directories_with_a_link_of_another_user_are_refused(nobody: User, words: tuple[str, ...]) -> None:
    """Nothing is written where it leads, also if that is a directory of one's own."""

    data, precious = nobody.home / "data", nobody.home / "precious"
    for directory in (data, precious):
        directory.mkdir(0o700)
        os.chown(directory, NOBODY, NOBODY)
    for name in ("log", "spool"):
        (data / name).symlink_to(precious)
        os.chown(data / name, DAEMON, DAEMON, follow_symlinks=False)
    ended = nobody.type(*words, str(data))

    assert 2 == ended.code
    assert " belongs to another user (UID 1)" in ended.err
    assert f"try: choose another directory with {words[-1]}" in ended.err
    assert [] == os.listdir(precious)
