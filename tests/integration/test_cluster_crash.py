"""Heads, agents and sealing processes that are killed without warning."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.integration.cluster import (
    EAGER,
    SEALING,
    AgentProcess,
    Cluster,
    HeadProcess,
    cluster_in,
    free_port,
    until,
)
from tests.integration.stored import check_complete, check_order, logged, read_stored, read_taken

_KILLS = 20
_SMALL = {"gpulse.store.local:_SEGMENT_BYTES": 32 << 10}
"""Segments of the log that are full soon, so that sealing has something to drop."""


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """Heads and agents for one test."""
    with cluster_in(tmp_path) as made:
        yield made


def caught_up(head: HeadProcess, names: set[str]) -> None:
    """Wait until the newest frame of every node is one of now."""

    def fresh() -> bool:
        latest = head.get("/metrics/latest")["client_data"]
        return names <= {name for name, data in latest.items() if data["age_seconds"] < 1.0}

    until(fresh, "frames of now from all nodes")


def end_all(agents: list[AgentProcess], head: HeadProcess) -> None:
    """End the agents gently, then the head."""
    for agent in agents:
        agent.tell()
    for agent in agents:
        assert agent.end() == 0, agent.text
    assert head.end() == 0, head.text


def sealers(pid: int) -> list[int]:
    """The sealing processes of a head."""
    found = []
    with suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/children", encoding="ascii") as file:
                found += [int(child) for child in file.read().split()]
    return found


def check_all(agents: list[AgentProcess], head: HeadProcess) -> None:
    """Every frame of every agent is stored exactly once, and most of them are not in a spool any more."""
    found = read_stored(head.data_dir)
    assert found.sealed_to > 0
    for agent in agents:
        taken = read_taken(agent.state_dir)
        check_complete(found, taken, agent.name)
        runs = found.of(agent.name)
        assert len(runs) == 1
        last = list(taken.runs.values())[-1].last
        assert len(next(iter(runs.values()))) >= last - 20, "the agent had caught up, yet much is missing"
        # The last frame says that it is: what the agent counted is what it took.
        assert len(found.said("agent_started", agent.name)) == 1
        assert len(found.said("agent_stopping", agent.name)) <= 1


@pytest.mark.slow
def test_head_killed_twenty_times(cluster: Cluster) -> None:
    """Whenever a head is killed under load, every frame of every agent is stored once and in order, and stays so."""

    seed = random.randrange(1 << 30)
    print("seed", seed)
    chance = random.Random(seed)
    options = ("--freq", "100", *SEALING)
    head = cluster.head(*options, tuned=_SMALL)
    agents = [cluster.agent(f"node{n}", head.port, tuned=EAGER) for n in range(4)]
    caught_up(head, {agent.name for agent in agents})
    before: dict[bytes, int] = {}
    for _ in range(_KILLS):
        time.sleep(chance.uniform(0.0, 1.2))  # the moment is what is tried here
        head.kill()
        now = logged(head.data_dir)
        for run, last in before.items():
            assert now.get(run, last) >= last, "frames that were on disk have vanished"
        before |= now
        head = cluster.head(*options, port=head.port, http_port=head.http_port, tuned=_SMALL)
    caught_up(head, {agent.name for agent in agents})
    until(lambda: head.get("/status")["storage"]["history_bytes"], "sealing")
    end_all(agents, head)
    check_all(agents, head)


@pytest.mark.slow
def test_killed_while_sealing(cluster: Cluster) -> None:
    """Killing the sealing process, or the head in the midst of sealing, neither loses nor doubles a frame."""

    chance = random.Random()
    head = cluster.head("--freq", "50", *SEALING, tuned=_SMALL)
    agents = [cluster.agent(f"node{n}", head.port, tuned=EAGER) for n in range(2)]
    caught_up(head, {agent.name for agent in agents})
    for _ in range(8):
        pid = until(lambda: sealers(head.popen.pid), "a sealing process")[0]
        time.sleep(chance.uniform(0.0, 0.6))
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    history = head.data_dir / "history"
    for _ in range(4):
        # A segment is made under another name first: while there is such a directory, sealing goes on.
        with suppress(AssertionError):
            until(lambda: any(history.glob(".*")), "sealing", 3.0)
        head.kill()
        head = cluster.head(*SEALING, port=head.port, http_port=head.http_port, tuned=_SMALL)
    caught_up(head, {agent.name for agent in agents})
    until(lambda: head.get("/status")["storage"]["history_bytes"], "sealing")
    end_all(agents, head)
    check_all(agents, head)
    assert "Traceback" not in head.text


@pytest.mark.slow
def test_agent_killed(cluster: Cluster) -> None:
    """Of an agent that is killed at most the last second is lost, and the head knows how much that may be."""

    port = free_port()
    # A head that hears everything and acknowledges nothing: what it heard is what the agent took.
    spy = cluster.spy(port, interval_ms=100)
    agent = cluster.agent("node", port, tuned=EAGER)
    until(lambda: max(spy.heard.values(), default=0) >= 25, "25 frames")

    def is_stopped_in_time() -> bool:
        """Stop the agent where the last second alone is not on disk; a busy machine may not have let it write for longer."""
        agent.popen.send_signal(signal.SIGSTOP)
        time.sleep(0.5)  # what is on its way to the spy arrives
        ((run, took),) = spy.heard.items()
        if took - len(read_taken(agent.state_dir).kept[run]) <= 11:
            return True
        agent.popen.send_signal(signal.SIGCONT)
        time.sleep(1.0)
        return False

    until(is_stopped_in_time, "all frames but those of a second on disk")
    agent.kill()
    spy.kill()
    ((run, took),) = spy.heard.items()

    head = cluster.head("--freq", "100", port=port)
    agent = cluster.agent("node", port, tuned=EAGER)
    caught_up(head, {"node"})
    until(lambda: "run_killed" in kinds(head), "the event")
    end_all([agent], head)
    found = read_stored(head.data_dir)
    check_order(found.frames[run])
    killed = [event for event in found.said("run_killed", "node") if event.detail["run"] == run.hex()]
    assert len(killed) == 1
    # One more may have been taken and not been heard of any more.
    lost = took - len(found.frames[run])
    assert 0 <= lost + 1 <= killed[0].detail["lost_at_most"] <= 12
    assert len(found.frames) == 2


def kinds(head: HeadProcess) -> list[str]:
    """What happened, so far as the head says."""
    return [event["kind"] for event in head.get("/api/v1/events")["events"]]


@pytest.mark.slow
def test_agent_killed_again_and_again(cluster: Cluster) -> None:
    """What an agent had on disk when it was killed comes home whenever it lives long enough, without holes."""

    head = cluster.head("--freq", "50")
    states = []
    for life in range(3):
        if life == 1:
            head.kill()
        agent = cluster.agent("node", head.port, tuned=EAGER)
        agent.said("onnected to")
        time.sleep(1.1 + 0.2 * life)  # it is to have frames in the spool and others in memory
        agent.kill()
        states.append(read_taken(agent.state_dir))
    head = cluster.head(port=head.port, http_port=head.http_port)
    notes = {"gpulse.cluster.agent.keeper:_NOTES_SECONDS": 0.5}
    agent = cluster.agent("node", head.port, tuned={**EAGER, **notes})
    caught_up(head, {"node"})
    until(lambda: len(read_taken(agent.state_dir).runs) == 1, "all earlier runs to be told")
    end_all([agent], head)
    found = read_stored(head.data_dir)
    assert found.doubled == 0
    for frames in found.frames.values():
        check_order(frames)
    for taken in states:
        for run, kept in taken.kept.items():
            assert kept <= found.frames[run].keys(), "a frame that was on disk did not come home"
    told = {event.detail["run"] for event in found.said("run_killed", "node")}
    assert {run.hex() for taken in states for run in taken.runs} <= told
