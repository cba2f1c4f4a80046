"""Heads, agents and sealing processes that are killed without warning."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from gpulse.errors import DiskError
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
from tests.integration.stored import check_complete, check_order, check_times, logged, read_stored, read_taken

_KILLS = int(os.environ.get("GPULSE_KILLS", "5"))
"""How often a process is killed at a random moment; each run tries other moments."""
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


def acknowledged_frames(agent: AgentProcess, number: int) -> None:
    """Wait until the head has acknowledged a frame, and the agent has noted it."""
    until(
        lambda: any(note.acked >= number for note in read_taken(agent.state_dir).runs.values()),
        "an acknowledgement",
    )


def spooled(agent: AgentProcess) -> dict[bytes, set[int]]:
    """The frames in a spool, which may not be there yet."""
    with suppress(DiskError):
        return dict(read_taken(agent.state_dir).kept)
    return {}


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
def test_head_killed_again_and_again(cluster: Cluster) -> None:
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
    for _ in range(_KILLS):
        pid = until(lambda: sealers(head.popen.pid), "a sealing process")[0]
        time.sleep(chance.uniform(0.0, 0.6))
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    history = head.data_dir / "history"
    for _ in range(_KILLS // 2):
        # A segment is made under another name first: while there is such a directory, sealing goes on.
        with suppress(AssertionError):
            until(lambda: any(history.glob(".*")), "sealing", 3.0, max_pause_seconds=0.01)
        head.kill()
        head = cluster.head(*SEALING, port=head.port, http_port=head.http_port, tuned=_SMALL)
    caught_up(head, {agent.name for agent in agents})
    until(lambda: head.get("/status")["storage"]["history_bytes"], "sealing")
    end_all(agents, head)
    check_all(agents, head)
    assert "Traceback" not in head.text


@pytest.mark.slow
def test_agent_killed(cluster: Cluster) -> None:
    """Of an agent that is killed what was not in the spool is lost, and the head knows how much that is."""

    port = free_port()
    # A head that hears everything and acknowledges nothing: what it heard is what the agent took.
    spy = cluster.spy(port, interval_ms=100)
    agent = cluster.agent("node", port, tuned=EAGER)
    until(lambda: max(spy.heard.values(), default=0) >= 25, "25 frames")
    agent.popen.send_signal(signal.SIGSTOP)
    time.sleep(0.5)  # what is on its way to the spy arrives
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
    assert 0 <= lost <= killed[0].detail["lost_at_most"] <= lost + 1
    assert len(found.frames) == 2


@pytest.mark.slow
def test_a_head_with_an_older_copy_of_its_data_records_the_gap(cluster: Cluster) -> None:
    """Agents know what the head had acknowledged; frames that are no longer there are named once."""

    head = cluster.head("--freq", "50")
    notes = {"gpulse.cluster.agent.spool_writer:_RUN_STATES_SECONDS": 0.5}
    agent = cluster.agent("node", head.port, tuned={**EAGER, **notes})
    caught_up(head, {"node"})
    assert head.end() == 0, head.text
    copy = head.data_dir.with_name("copy")
    shutil.copytree(head.data_dir, copy)
    before = logged(copy)
    for _ in range(2):  # the second time without an older copy
        head = cluster.head(port=head.port, http_port=head.http_port)
        caught_up(head, {"node"})
        acknowledged_frames(agent, max(before.values()) + 20)
        assert head.end() == 0, head.text
        if copy.exists():
            acknowledged = logged(head.data_dir)
            shutil.rmtree(head.data_dir)
            copy.rename(head.data_dir)
    assert "older copy" in head.text
    agent.said("its data directory is an older copy")
    assert agent.end() == 0, agent.text
    found = read_stored(head.data_dir)
    (gap,) = found.said("gap", "node")
    ((run, last),) = acknowledged.items()
    # The agent had not heard of the last acknowledgement when the head ended, and sends those frames again.
    assert run.hex() == gap.detail["run"]
    assert 0 < gap.detail["frames"] <= last - before[run]
    frames = found.frames[run]
    assert gap.detail["before"] - gap.detail["frames"] == before[run] + 1
    assert set(frames) == {*range(1, before[run] + 1), *range(gap.detail["before"], max(frames) + 1)}
    check_times(frames)


@pytest.mark.slow
def test_a_damaged_spool_is_reported(cluster: Cluster) -> None:
    """One flipped bit costs one frame, and the head says which."""

    port = free_port()
    agent = cluster.agent("node", port, tuned=EAGER)
    until(lambda: any(len(kept) > 20 for kept in spooled(agent).values()), "spooled frames")
    agent.kill()
    ((run, kept),) = read_taken(agent.state_dir).kept.items()
    (path,) = (agent.state_dir / "spool").glob("*.log")
    text = bytearray(path.read_bytes())
    place = text.index(run + (10).to_bytes(8, "little"))
    text[place + 60] ^= 1
    path.write_bytes(text)

    head = cluster.head("--freq", "50", port=port)
    agent = cluster.agent("node", port, tuned=EAGER)
    caught_up(head, {"node"})
    until(lambda: "spool_damaged" in kinds(head), "the event")
    end_all([agent], head)
    found = read_stored(head.data_dir)
    assert kept - {10} == found.frames[run].keys()
    (damage,) = found.said("spool_damaged", "node")
    assert (run.hex(), 1, 10, 10) == (
        damage.detail["run"],
        damage.detail["frames"],
        damage.detail["first"],
        damage.detail["last"],
    )
    assert damage.detail["start"] < damage.detail["end"]
    (gap,) = found.said("gap", "node")
    assert gap.detail["frames"] == 1
    (killed,) = found.said("run_killed", "node")
    assert killed.detail["lost_at_most"] <= 20


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
        agent.said("onnect")
        time.sleep(1.1 + 0.2 * life)  # it is to have frames in the spool and others in memory
        agent.kill()
        states.append(read_taken(agent.state_dir))
    head = cluster.head(port=head.port, http_port=head.http_port)
    notes = {"gpulse.cluster.agent.spool_writer:_RUN_STATES_SECONDS": 0.5}
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
