"""Agents whose way to the head is cut, slow or lossy."""

from __future__ import annotations

import os
import random
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.integration.cluster import EAGER, AgentProcess, Cluster, HeadProcess, cluster_in, free_port, until
from tests.integration.proxy import Proxy
from tests.integration.stored import check_complete, check_times, logged, read_stored, read_taken
from tests.prerequisites import require

_SMALL_SPOOL = {**EAGER, "gpulse.cluster.agent.spool:MIN_LIMIT_BYTES": 0}


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """Heads and agents for one test."""
    with cluster_in(tmp_path) as made:
        yield made


@pytest.fixture
def head(cluster: Cluster) -> HeadProcess:
    """A head that wants frames often."""
    return cluster.head("--freq", "50")


@pytest.fixture
def proxy(head: HeadProcess) -> Iterator[Proxy]:
    """The way to it."""
    with Proxy(head.port) as made:
        yield made


def spooled(agent: AgentProcess) -> int:
    """How many frames the agent has on disk."""
    return sum(map(len, read_taken(agent.state_dir).kept.values()))


def told_dropped(agent: AgentProcess) -> int:
    """How many frames the agent says it had no room for."""
    return max((int(number) for number in re.findall(r"dropped so far: (\d+)", agent.text)), default=0)


def is_fresh(head: HeadProcess, name: str) -> bool:
    """Whether the newest frame of a node is one of now."""
    data = head.get("/metrics/latest")["client_data"].get(name)
    return data is not None and data["age_seconds"] < 1.0


def check_nothing_lost(head: HeadProcess, *agents: AgentProcess) -> None:
    """End everything; every frame of every agent is stored once."""
    for agent in agents:
        agent.tell()
    for agent in agents:
        assert agent.popen.wait(30.0) == 0, agent.text
        agent.end()
    assert head.end() == 0, head.text
    found = read_stored(head.data_dir)
    for agent in agents:
        taken = read_taken(agent.state_dir)
        check_complete(found, taken, agent.name)
        ((run, frames),) = found.of(agent.name).items()
        assert len(frames) >= taken.runs[run].last - 20
        assert not found.said("gap", agent.name)
        assert not found.said("frames_dropped", agent.name)


@pytest.mark.slow
def test_cut(cluster: Cluster, head: HeadProcess, proxy: Proxy) -> None:
    """An agent that is cut off for longer than its memory lasts brings everything home; others notice nothing."""

    agent = cluster.agent("cut", proxy.port, "--memory-frames", "20", tuned=EAGER)
    other = cluster.agent("whole", head.port, tuned=EAGER)
    until(lambda: is_fresh(head, "cut") and is_fresh(head, "whole"), "both agents")
    proxy.cut()
    agent.said("lost the connection to")
    until(lambda: spooled(agent) >= 60, "three times as much as memory holds")
    assert is_fresh(head, "whole")
    assert head.nodes()["whole"] == "healthy"
    proxy.heal()
    until(lambda: is_fresh(head, "cut"), "the agent to catch up")
    assert "frames from the spool" in agent.said("sent ")
    check_nothing_lost(head, agent, other)


@pytest.mark.slow
def test_cut_again_and_again(cluster: Cluster, head: HeadProcess, proxy: Proxy) -> None:
    """Connections that end at any moment, also while kept frames are sent, cost nothing."""

    chance = random.Random()
    agent = cluster.agent("cut", proxy.port, "--memory-frames", "20", tuned=EAGER)
    until(lambda: is_fresh(head, "cut"), "the agent")
    for _ in range(3):
        proxy.cut()
        before = spooled(agent)
        until(lambda: spooled(agent) >= before + 25 or spooled(agent) < before, "frames in the spool")  # noqa: B023
        proxy.heal()
        begun = proxy.passed_bytes + chance.randrange(60_000)
        until(lambda: proxy.passed_bytes > begun, "some of them on their way")  # noqa: B023
    proxy.cut()
    proxy.heal()
    until(lambda: is_fresh(head, "cut"), "the agent to catch up")
    check_nothing_lost(head, agent)


@pytest.mark.slow
def test_silence(cluster: Cluster) -> None:
    """A way that holds everything back for a while makes the node late, and then healthy again; nothing is lost."""

    head = cluster.head("--freq", "50", tuned={"gpulse.cluster.head.fleet:LATE_SECONDS": 2.0})
    with Proxy(head.port) as proxy:
        agent = cluster.agent("cut", proxy.port, "--memory-frames", "20", tuned=EAGER)
        until(lambda: is_fresh(head, "cut"), "the agent")
        proxy.swallow()
        until(lambda: head.nodes()["cut"] == "late", "the head to notice")
        proxy.heal()
        until(lambda: is_fresh(head, "cut"), "the agent to catch up")
        until(lambda: head.nodes()["cut"] == "healthy", "the head to notice")
        check_nothing_lost(head, agent)


@pytest.mark.slow
def test_slow_way(cluster: Cluster, head: HeadProcess, proxy: Proxy) -> None:
    """With 200 ms and a packet in twenty lost, frames come late and all of them come."""

    proxy.delay_seconds, proxy.loss = 0.2, 0.05
    agent = cluster.agent("slow", proxy.port, tuned=EAGER)
    until(lambda: is_fresh(head, "slow"), "the agent")
    proxy.cut()
    until(lambda: spooled(agent) >= 30, "frames in the spool")
    proxy.heal()
    until(lambda: is_fresh(head, "slow"), "the agent to catch up")
    before = head.get("/status")["frames_received"]
    until(lambda: head.get("/status")["frames_received"] >= before + 40, "frames over the slow way")
    assert head.nodes()["slow"] == "healthy"
    check_nothing_lost(head, agent)
    assert not read_stored(head.data_dir).said("clock_skew"), "a slow way is no wrong clock"


@pytest.mark.slow
def test_spool_too_small(cluster: Cluster) -> None:
    """When the spool is full the oldest frames go, and exactly as many as are missing are reported."""

    head = cluster.head("--freq", "50")
    with Proxy(head.port) as proxy:
        limits = ("--memory-frames", "20", "--spool-limit", "128KiB")
        agent = cluster.agent("full", proxy.port, *limits, tuned=_SMALL_SPOOL)
        until(lambda: is_fresh(head, "full"), "the agent")
        proxy.cut()
        # The first to go may be frames that the head has, whose acknowledgement was cut off.
        until(lambda: told_dropped(agent) > head.get("/status")["frames_received"], "frames that nobody has")
        proxy.heal()
        until(lambda: is_fresh(head, "full"), "the agent to catch up")
        assert agent.end() == 0
    assert head.end() == 0
    found, taken = read_stored(head.data_dir), read_taken(agent.state_dir)
    ((run, frames),) = found.of("full").items()
    assert found.doubled == 0
    check_times(frames)
    missing = max(frames) - len(frames)
    assert missing > 0
    assert sum(event.detail["frames"] for event in found.said("gap", "full")) == missing
    numbers = list(frames)
    holes = [(a, b) for a, b in pairwise(numbers) if b != a + 1]
    assert len(holes) == 1, "the oldest go, one after the other"
    assert max(frames) >= taken.runs[run].last - 20


@pytest.mark.slow
def test_earlier_run_gone(cluster: Cluster) -> None:
    """Of an earlier run of which nothing is left in the spool, too, the head is told how many frames there were."""

    port = free_port()
    options = ("--memory-frames", "20", "--spool-limit", "128KiB", "--interval", "0.05")
    agent = cluster.agent("node", port, *options, tuned=_SMALL_SPOOL)
    agent.said("cannot connect to")
    until(lambda: spooled(agent) >= 20, "frames in the spool")
    assert agent.end() == 0
    ((run, note),) = read_taken(agent.state_dir).runs.items()
    agent = cluster.agent("node", port, *options, tuned=_SMALL_SPOOL)
    agent.said("cannot connect to")
    until(lambda: run not in read_taken(agent.state_dir).kept, "the earlier run to be pushed out")
    head = cluster.head("--freq", "50", port=port)
    until(lambda: is_fresh(head, "node"), "the agent to catch up")
    assert agent.end() == 0
    assert head.end() == 0
    found = read_stored(head.data_dir)
    assert run not in found.frames
    dropped = [event for event in found.said("frames_dropped", "node") if event.detail["run"] == run.hex()]
    assert [event.detail["frames"] for event in dropped] == [note.last]
    ((own, frames),) = found.of("node").items()
    gaps = [event.detail["frames"] for event in found.said("gap", "node")]
    assert sum(gaps) == max(frames) - len(frames), own.hex()


class Wire(NamedTuple):
    """Two machines, as far as the network can tell, and the wire between them."""

    agent: str
    head: str
    agent_device: str
    address: str

    def agent_prefix(self) -> list[str]:
        """What runs a program on the one."""
        return ["ip", "netns", "exec", self.agent]

    def head_prefix(self) -> list[str]:
        """What runs it on the other."""
        return ["ip", "netns", "exec", self.head]

    def filter(self, *rules: str) -> None:
        """Packets that come to the head's machine meet these rules, and no others."""
        inside = self.head_prefix()
        called(*inside, "nft", "flush", "chain", "inet", "chaos", "in")
        for rule in rules:
            called(*inside, "nft", "add", "rule", "inet", "chaos", "in", *rule.split())


def called(*command: str) -> None:
    """Run a program that must not fail."""
    subprocess.run(command, check=True, capture_output=True)


@contextmanager
def wire() -> Iterator[Wire]:
    """Two network namespaces and a wire between them."""
    if os.geteuid() != 0:
        pytest.skip("needs root, for network namespaces")
    require("ip and nft")
    mark = f"{os.getpid() % 10_000}{random.randrange(100)}"
    made = Wire(f"gpa{mark}", f"gph{mark}", f"va{mark}", "198.18.77.2")
    try:
        for name in (made.agent, made.head):
            try:
                called("ip", "netns", "add", name)
            except subprocess.CalledProcessError as error:
                pytest.skip(f"no network namespace can be made here: {error.stderr.decode().strip()}")
        device = f"vh{mark}"
        called("ip", "link", "add", made.agent_device, "type", "veth", "peer", "name", device)
        called("ip", "link", "set", made.agent_device, "netns", made.agent)
        called("ip", "link", "set", device, "netns", made.head)
        called("ip", "-n", made.agent, "addr", "add", "198.18.77.1/24", "dev", made.agent_device)
        called("ip", "-n", made.head, "addr", "add", "198.18.77.2/24", "dev", device)
        for name, end in ((made.agent, made.agent_device), (made.head, device)):
            called("ip", "-n", name, "link", "set", "lo", "up")
            called("ip", "-n", name, "link", "set", end, "up")
        inside = made.head_prefix()
        called(*inside, "nft", "add", "table", "inet", "chaos")
        hook = "{ type filter hook input priority 0; }"
        called(*inside, "nft", "add", "chain", "inet", "chaos", "in", hook)
        yield made
    finally:
        for name in (made.agent, made.head):
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


@pytest.mark.slow
def test_real_network(tmp_path: Path) -> None:
    """Between two machines, with packets lost, then all of them, then the wire pulled, nothing is lost in the end."""

    with wire() as made, cluster_in(tmp_path) as cluster:
        port = free_port()
        head = cluster.head("--freq", "50", "--host", made.address, port=port, prefix=made.head_prefix())
        agent = cluster.agent(
            "far",
            port,
            "--memory-frames",
            "20",
            host=made.address,
            prefix=made.agent_prefix(),
            tuned=EAGER,
        )
        agent.said("connected to")
        made.filter("ip saddr 198.18.77.1 numgen random mod 100 < 5 drop")
        begun = max_stored(head)
        until(lambda: max_stored(head) >= begun + 60, "frames over the lossy wire")
        made.filter("ip saddr 198.18.77.1 drop")
        agent.said("lost the connection to")
        until(lambda: spooled(agent) >= 50, "more frames than memory holds")
        called("ip", "-n", made.agent, "link", "set", made.agent_device, "down")
        made.filter()
        before = max_stored(head)
        called("ip", "-n", made.agent, "link", "set", made.agent_device, "up")
        until(lambda: max_stored(head) >= before + 60, "the agent to catch up")
        until(lambda: "frames from the spool" in agent.text, "it to say so")
        check_nothing_lost(head, agent)


def max_stored(head: HeadProcess) -> int:
    """How many frames of the agent are in the head's log."""
    return max(logged(head.data_dir).values(), default=0)
