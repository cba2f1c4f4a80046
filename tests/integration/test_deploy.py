"""`gpulse deploy` against real sshds on this machine, each with a host name and a home of its own."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Self

import pytest

from tests.integration.cluster import AgentProcess, HeadProcess, free_port, until
from tests.integration.commands import BIN, Ended, environment
from tests.integration.ssh_nodes import PLAIN_PATH, SshNode, is_alive, make_key, require_sshd


@pytest.fixture(autouse=True, scope="module")
def _sshd() -> None:
    require_sshd()


_TOKEN = "t0ken-that-nobody-must-see-0123456789"


class Farm:
    """Machines, a head, and somebody who deploys."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.key = make_key(directory / "key")
        self.stranger = make_key(directory / "stranger")
        self.user = directory / "user"
        self.user.mkdir()
        self.nodes: dict[str, SshNode] = {}
        self._hosts: list[str] = []
        self._known: list[str] = []

    def node(self, stack: ExitStack, name: str, *, known: str | None = None, **given: Any) -> SshNode:
        """One more machine, known by its name and its key unless another one is known."""
        node = SshNode(self.directory, name, key=self.key, **given)
        stack.callback(node.close)
        self.nodes[name] = node
        self.alias(name, node.port, known=node.known_host if known is None else known.format(port=node.port))
        return node

    def alias(self, name: str, port: int, *, known: str = "", key: Path | None = None) -> None:
        """A name in the ssh configuration."""
        self._hosts.append(
            f"Host {name}\n  HostName 127.0.0.1\n  Port {port}\n  IdentityFile {key or self.key}\n"
        )
        self._known.append(known)

    def run(self, verb: str, nodes: Sequence[str] | str, *words: str, seconds: float = 200.0) -> Ended:
        """Run `gpulse deploy`."""
        with self.started(verb, nodes, *words) as process:
            out, err = process.communicate(timeout=seconds)
        return Ended(process.returncode, out, err)

    @contextmanager
    def started(self, verb: str, nodes: Sequence[str] | str, *words: str) -> Iterator[subprocess.Popen[str]]:
        """`gpulse deploy`, while it runs."""
        listed = self.directory / "node-list.txt"
        listed.write_text(nodes if isinstance(nodes, str) else "\n".join(nodes))
        known, config = self.directory / "known", self.directory / "config"
        known.write_text("".join(self._known))
        common = f"UserKnownHostsFile {known}\nGlobalKnownHostsFile /dev/null\nIdentitiesOnly yes\nIdentityAgent none\n"
        dangerous = "Host *rm*\n  ProxyCommand true %h\n"  # older ssh would run what follows the semicolon
        config.write_text("".join([*self._hosts, dangerous, "Host *\n", common]))
        process = subprocess.Popen(
            [BIN / "gpulse", "deploy", verb, "--nodes", listed, "--ssh-config", config, *words],
            env=environment({"HOME": str(self.user)}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            yield process
        finally:
            process.kill()
            process.communicate()

    def document(self, verb: str, nodes: Sequence[str], *words: str) -> dict[str, dict[str, Any]]:
        """What `gpulse deploy --json` says, by node."""
        ended = self.run(verb, nodes, "--json", *words)
        assert ended.out, ended.err
        return {told["node"]: told for told in json.loads(ended.out)["nodes"]}


@contextmanager
def silent_port() -> Iterator[int]:
    """A port that takes connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


@pytest.fixture(scope="module")
def farm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Farm]:
    """Machines of all tests here."""
    with ExitStack() as stack:
        made = Farm(tmp_path_factory.mktemp("farm"))
        made.node(stack, "gpu01")
        made.node(stack, "gpu02")
        yield made


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HeadProcess]:
    """A head for all of them."""
    process = HeadProcess(tmp_path_factory.mktemp("head"))
    yield process
    process.end()


class Watcher:
    """Looks at the command lines and environments of all processes, all the time."""

    def __init__(self) -> None:
        self.seen: set[bytes] = set()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._done.wait(0.05):
            for pid in filter(str.isdecimal, os.listdir("/proc")):
                for name in ("cmdline", "environ"):
                    with suppress(OSError):
                        self.seen.add(Path(f"/proc/{pid}/{name}").read_bytes())


def test_agents_live_and_end_as_they_are_told(farm: Farm, head: HeadProcess, tmp_path: Path) -> None:
    """Up, up again, status, logs, restart, down, purge; nobody sees the token, and nobody else is touched."""

    token = tmp_path / "token"
    token.write_text(_TOKEN)
    token.chmod(0o600)
    both = ("gpu01", "gpu02")
    start = ("--head", f"127.0.0.1:{head.port}", "--token-file", str(token))
    foreign = AgentProcess(tmp_path, "foreign", head.port)
    try:
        with Watcher() as watcher:
            up = farm.run("up", both, *start, "--", "--demo")
        assert (0, 2) == (up.code, up.out.count("started")), up
        assert f"gpulse status --head 127.0.0.1:{head.port}" in up.out
        assert any(b"BatchMode=yes" in seen for seen in watcher.seen)
        assert not any(_TOKEN.encode() in seen for seen in watcher.seen)
        kept = farm.nodes["gpu01"].state / "now" / "token"
        assert (_TOKEN + "\n", 0o600) == (kept.read_text(), kept.stat().st_mode & 0o777)

        running = farm.document("status", both, *start[:2])
        pids = [told["pid"] for told in running.values()]
        assert ["running"] * 2 == [told["state"] for told in running.values()]
        assert ["connected"] * 2 == [told["link"] for told in running.values()]
        assert ["healthy"] * 2 == [told["heard"] for told in running.values()]
        assert all(is_alive(pid) and os.getsid(pid) != os.getsid(0) for pid in pids)

        again = farm.document("up", both, *start, "--", "--demo")
        assert ["already running"] * 2 == [told["did"] for told in again.values()]
        assert pids == [told["pid"] for told in again.values()]
        logs = farm.run("logs", both, "-n", "5")
        assert "gpu01 | " in logs.out
        assert f"connected to 127.0.0.1:{head.port} as gpu02" in logs.out
        other = farm.document(
            "up", both, *start, "--only", "gpu01", "--", "--demo", "--label", "rack=a 'b' $c"
        )
        assert "restarted (its options changed)" == other["gpu01"]["did"]
        assert other["gpu01"]["pid"] not in pids
        table = farm.run("restart", both, "--only", "gpu02")
        assert (0, True) == (table.code, f"gpulse status --head {start[1]}" in table.out), table
        restarted = farm.document("restart", both, "--only", "gpu02")
        assert "restarted (as requested)" == restarted["gpu02"]["did"]
        assert b"--demo" in Path(f"/proc/{restarted['gpu02']['pid']}/cmdline").read_bytes()
        bare = farm.run("up", both, *start[:2], "--", "--demo")
        assert (1, 1) == (bare.code, bare.err.count("gpu01, gpu02: the agent there has a token")), bare
        assert not any(map(is_alive, pids))
        labels = {node["name"]: node["labels"] for node in head.get("/status")["nodes"]}
        assert {"rack": "a 'b' $c"} == {key: value for key, value in labels["gpu01"].items() if key != "ssh"}
        assert "ssh" in labels["gpu01"], "the name in the list, by which the head knows whom it misses"

        pids = [other["gpu01"]["pid"], restarted["gpu02"]["pid"]]
        elsewhere = farm.run("down", both, "--head", "elsewhere:8090")
        assert (0, 2) == (elsewhere.code, elsewhere.out.count("left unchanged"))
        assert all(map(is_alive, pids))
        down = farm.run("down", both)
        assert (0, 4) == (down.code, down.out.count("stopped")), down
        assert not any(map(is_alive, pids))
        assert is_alive(foreign.popen.pid)
        assert 1 == farm.run("status", both).code
        purged = farm.document("purge", both)
        assert ["removed"] * 2 == [told["did"] for told in purged.values()]
        assert [] == [
            path for name in both for path in (farm.directory / f"home {name}").rglob("*") if path.is_file()
        ]
    finally:
        foreign.end()


def test_a_bad_node_is_named_and_stops_no_other(farm: Farm) -> None:
    """One refuses, one has no door, one hangs, one is a stranger, one has changed; two names are none."""

    canary = farm.user / "canary"
    canary.write_text("alive")
    good = farm.nodes["gpu01"]
    farm.alias("closed", free_port())
    farm.alias("wrong-key", good.port, key=farm.stranger)
    names = ["closed", "wrong-key", "hangs", "unknown", "changed", "my node", "; rm -rf ~", "gpu01", "-oX=y"]
    with silent_port() as port, ExitStack() as stack:
        farm.alias("hangs", port)
        farm.node(stack, "unknown", known="")
        farm.node(stack, "changed", known=f"[127.0.0.1]:{{port}} {good.public_key}\n")
        told = farm.run("down", names, "--timeout", "3")

    assert 1 == told.code
    assert "8 of 9 nodes failed" in told.err
    for reason in (
        "closed: the node refused the connection",
        "wrong-key: the node refused the login",
        "hangs: the node did not answer within 3 s",
        "unknown: the node's host key is unknown",
        "changed: the node's host key has changed",
        "my node, ; rm -rf ~: the host or user name contains invalid characters",
        "-oX=y: '-oX=y' starts with - and would be read as an option",
    ):
        assert f"  {reason}" in told.err, told.err
    assert "ssh-keyscan" in told.err
    assert "no agent was running" in told.out
    assert "alive" == canary.read_text()


def test_ctrl_c_ends_every_ssh_and_says_what_was_done(farm: Farm) -> None:
    """Nothing is left running, and those that were done are in the table."""

    with silent_port() as port:
        farm.alias("silent", port)
        with farm.started("down", ("gpu01", "silent")) as process:
            assert process.stderr is not None
            assert "gpu01: no agent was running" in process.stderr.readline()
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
            (ssh,) = map(int, children.read_text().split())
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=60)

    assert 130 == process.returncode
    assert "interrupted after 1 of 2 nodes" in err
    assert "in an unknown state: silent" in err
    assert "gpu01" in out
    assert not is_alive(ssh)


def test_an_up_that_is_refused_leaves_the_agents_that_run(farm: Farm, head: HeadProcess) -> None:
    """An agent that does not start, for whatever reason of its own."""

    start = ("--head", f"127.0.0.1:{head.port}")
    first = farm.document("up", ["gpu01"], *start, "--", "--demo")["gpu01"]
    told = farm.run("up", ["gpu01"], *start, "--", "--demo", "--spool-limit", "1KB")
    assert 1 == told.code
    assert (
        "the new agent did not start, so the earlier one runs again: --spool-limit must be at least 1 MiB"
        in told.err
    ), told.err
    after = farm.document("status", ["gpu01"])["gpu01"]
    assert ("running", "connected") == (after["state"], after["link"])
    assert first["pid"] != after["pid"]
    assert "already running" == farm.document("up", ["gpu01"], *start, "--", "--demo")["gpu01"]["did"]
    farm.document("purge", ["gpu01"])


def test_a_crowd_before_one_door_comes_through(farm: Farm) -> None:
    """A jump host, say, that takes few connections at once."""

    names = ("crowd1", "crowd2")
    with ExitStack() as stack:
        door = farm.node(stack, "door", options=["MaxStartups 1:100:1", "LogLevel VERBOSE"])
        for name in names:
            farm.alias(name, door.port, known=door.known_host)
        with socket.create_connection(("127.0.0.1", door.port)) as before:
            before.recv(1)
            process = stack.enter_context(farm.started("down", names))
            until(lambda: "drop connection" in door.log.read_text(), "the door is shut")
        out, err = process.communicate(timeout=30)

    assert (0, 2) == (process.returncode, out.count("no agent was running")), err


def test_a_node_without_gpulse_says_how_to_get_it(farm: Farm) -> None:
    """And keeps nothing of what was sent."""

    with ExitStack() as stack:
        bare = farm.node(stack, "bare", path=PLAIN_PATH)
        told = farm.run("up", ["bare"], "--head", "127.0.0.1:1", "--", "--demo")

    assert 1 == told.code
    assert "bare: gpulse is not installed there" in told.err
    assert "--push" in told.err
    assert [] == [path for path in bare.home.rglob("*") if path.is_file()]


@pytest.mark.slow
def test_a_copy_of_gpulse_needs_no_internet_and_is_made_once(
    farm: Farm, head: HeadProcess, tmp_path: Path
) -> None:
    """Two nodes that share an empty home: one copies, both run, and it goes with the last of them."""

    wheels = tmp_path / "wheels"
    subprocess.run(
        [BIN / "gpulse", "deploy", "wheelhouse", wheels], env=environment(), check=True, capture_output=True
    )
    home = tmp_path / "shared home"
    both = ("share1", "share2")
    start = ("--head", f"127.0.0.1:{head.port}", "--push", "--wheelhouse", str(wheels), "--", "--demo")
    copies = home / ".local" / "share" / "gpulse" / "deploy"
    with socket.create_server(("127.0.0.1", 0)) as internet, ExitStack() as stack:
        internet.setblocking(False)
        proxy = f"http://127.0.0.1:{internet.getsockname()[1]}"
        env = {"http_proxy": proxy, "https_proxy": proxy, "PIP_INDEX_URL": f"{proxy}/simple"}
        nodes = [farm.node(stack, name, home=home, path=PLAIN_PATH, env=env) for name in both]
        up = farm.document("up", both, *start)

        assert [None] * 2 == [told["error"] for told in up.values()]
        assert [False, True] == sorted(told["pushed"] for told in up.values())
        with pytest.raises(BlockingIOError):
            internet.accept()
        assert 1 == len(list(copies.iterdir()))
        until(lambda: {"share1", "share2"} <= head.nodes().keys(), "both are heard")
        for node in nodes:
            assert Path(f"/proc/{node.pid}/cmdline").read_text().startswith(str(copies))
        (copy,) = copies.iterdir()
        (copy / "venv" / "bin" / "python").unlink()
        mended = farm.document("up", ["share2"], *start)["share2"]
        assert (None, True, "already running") == (mended["error"], mended["pushed"], mended["did"])
        first = farm.document("purge", ["share1"])["share1"]
        assert ["removed", 1] == [first["did"], len(first["notes"])]
        assert copies.exists()
        farm.document("purge", both)
        assert [] == [path for path in home.rglob("*") if path.is_file()]
