"""How a head begins and ends: gently, at once, and in the middle of things."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from gpulse.cluster import wire
from gpulse.cluster.agent import head_selection
from gpulse.cluster.wire_pb2 import AgentMessage, Goodbye, HeadMessage, Hello, Request, Run
from tests.integration.cluster import EAGER, Cluster, HeadProcess, cluster_in, free_port, until

pytestmark = pytest.mark.slow
HASTY = {"gpulse.cluster.head.operations:_EXPORT_WAIT_SECONDS": 0.3}
"""Heads that soon answer that a file is still being written."""


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """Heads and agents of one test."""
    with cluster_in(tmp_path) as made:
        yield made


def with_frames(cluster: Cluster, head: HeadProcess, count: int = 4) -> None:
    """An agent delivers something, and leaves."""
    agent = cluster.agent("n1", head.port)
    until(lambda: head.get("/status")["frames_received"] >= count, "frames")
    agent.end()


def long_session(head: HeadProcess, name: str) -> None:
    """A session whose file takes very long to write."""
    head.post("/profiling/start", {"name": name, "since": "30d", "interval_ms": 50})
    head.post("/profiling/stop", {"name": name})


def test_a_head_ends_while_it_writes_a_session_and_the_next_one_writes_it(cluster: Cluster) -> None:
    """Nothing half-written is left, and the session is not forgotten."""

    head = cluster.head(http_port=free_port(), tuned=HASTY)
    with_frames(cluster, head)
    head.post("/profiling/start", {"name": "short"})
    long_session(head, "long")
    assert head.get("/api/v1/sessions/long")["export"]["state"] == "writing"
    until(lambda: list(head.output_dir.glob(".long*.gpulse-part")), "the draft")

    assert head.end(signal.SIGTERM) == 0

    assert list(head.output_dir.iterdir()) == []
    again = cluster.head(port=head.port, http_port=head.http_port)
    assert again.get("/api/v1/sessions/long")["export"]["state"] == "writing"
    assert again.get("/api/v1/sessions/short")["state"] == "interrupted"
    stopped = again.post("/profiling/stop", {"name": "short"})
    assert Path(stopped["output_file"]).name == "short.json", "one long export does not hold up the others"
    assert json.loads(Path(stopped["output_file"]).read_text())["session_name"] == "short"


def test_a_session_whose_file_was_not_written_is_written_by_the_next_head(cluster: Cluster) -> None:
    """Stopped, and then the head was killed."""

    head = cluster.head(tuned=HASTY)
    with_frames(cluster, head)
    long_session(head, "long")
    head.kill()
    again = cluster.head(port=head.port, http_port=head.http_port)

    assert again.get("/api/v1/sessions/long")["state"] == "finished"
    assert again.get("/api/v1/sessions/long")["export"]["state"] == "writing"


def test_a_head_that_was_asked_ends_without_a_word_too_many(cluster: Cluster) -> None:
    """The libraries that it answered with are let go in order, and have nothing to complain of."""

    head = cluster.head()
    head.get("/api/v1/query?metric=power_watts&scope=gpu")
    head.get("/api/v1/usage")

    assert 0 == head.end()
    assert head.lines[-1].endswith(" I stopping")


def test_a_second_signal_ends_a_head_at_once(cluster: Cluster) -> None:
    """Whatever it is doing."""

    head = cluster.head()
    head.popen.send_signal(signal.SIGTERM)
    head.said("stopping")
    if head.popen.poll() is None:
        head.popen.send_signal(signal.SIGTERM)

    assert head.popen.wait(60.0) in (0, 130)


def test_a_head_watches_itself_and_takes_its_agent_along(cluster: Cluster) -> None:
    """Also when it listens elsewhere than on loopback, and also when it is killed."""

    head = cluster.head("--with-agent", "--host", "127.0.0.2", wait=False)
    head.said("is connected")
    agents = [int(pid) for pid in os.listdir("/proc") if pid.isdecimal() and _parent(pid) == head.popen.pid]
    assert agents

    head.kill()

    until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in agents), "its agent to end")


def test_a_head_knows_the_gpus_of_nodes_that_have_not_come_back(cluster: Cluster) -> None:
    """Also after it was killed, and though nothing came from them since; they are not connected clients, though."""

    head = cluster.head(http_port=free_port())
    with_frames(cluster, head)
    before = head.get("/status")["nodes"][0]["gpu_count"]
    assert before
    head.kill()
    again = cluster.head(port=head.port, http_port=head.http_port)

    status = again.get("/status")
    assert [(before, False)] == [(node["gpu_count"], node["connected"]) for node in status["nodes"]]
    assert ([], 0, {}) == (status["connected_clients"], status["total_gpus"], status["gpu_info"])
    assert {"total_clients": 0, "clients": []} == again.get("/clients")
    assert {} == again.get("/metrics/latest")["client_data"], "their readings are unknown, not old"


def _parent(pid: str) -> int | None:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[1])
    except OSError:
        return None


def test_a_head_without_its_log_continues_after_it(cluster: Cluster) -> None:
    """It reports the loss, and numbers of lost records are not used again, since nobody would find their frames."""

    head = cluster.head()
    with_frames(cluster, head)
    head.end()
    for file in (head.data_dir / "log").iterdir():
        file.unlink()
    again = cluster.head(port=head.port, http_port=head.http_port)

    assert "data/log is damaged: all segments are missing" in again.text
    assert again.get("/status")["storage"]["damage"]
    with_frames(cluster, again)


def test_sessions_cannot_reach_back_further_than_history(cluster: Cluster) -> None:
    """However absurd the request, the head stays whole."""

    head = cluster.head()
    status, answer = head.ask("/profiling/start", {"name": "old", "since": 1e308})
    assert status == 400, answer
    started = head.post("/profiling/start", {"name": "old", "since": "90d"})

    assert started["session"]["frame_count"] == pytest.approx(30 * 86_400 * 2, rel=0.01)
    assert head.get("/profiling/sessions")["total_sessions"] == 1


def test_a_stop_goes_on_when_whoever_asked_goes_away(cluster: Cluster) -> None:
    """The session gets its file all the same."""

    head = cluster.head("--freq", "1000")
    with_frames(cluster, head, 1)
    head.post("/profiling/start", {"name": "left"})
    request = Request(operation="stop", body=b'{"name": "left"}').SerializeToString()
    with grpc.insecure_channel(f"127.0.0.1:{head.port}") as channel:
        call: Any = channel.unary_unary(wire.CALL)
        answer = call.future(request)
        until(lambda: head.get("/api/v1/sessions/left")["state"] == "finished", "the session's end")
        answer.cancel()

    until((head.output_dir / "left.json").exists, "its file")


def test_the_file_of_a_session_is_the_last_one_it_gets(cluster: Cluster) -> None:
    """One that was exported while it went on is exported once more when it ends."""

    head = cluster.head()
    with_frames(cluster, head)
    head.post("/profiling/start", {"name": "half"})
    early = head.post("/api/v1/sessions/half/export", {})
    assert Path(early["sessions"][0]["export"]["path"]).name == "half.json"
    late = head.post("/profiling/stop", {"name": "half"})

    assert Path(late["output_file"]).name == "half-2.json"
    assert head.get("/api/v1/sessions/half")["state"] == "finished"
    assert head.get("/api/v1/sessions/half")["output_file"] == late["output_file"]


def test_sessions_of_a_head_that_resumes_them_by_itself(cluster: Cluster) -> None:
    """`--auto-resume`: they go on, with the gap in them."""

    head = cluster.head()
    with_frames(cluster, head)
    head.post("/profiling/start", {"name": "week"})
    head.kill()
    again = cluster.head("--auto-resume", port=head.port, http_port=head.http_port)

    session = again.get("/api/v1/sessions/week")

    assert session["state"] == "active"
    assert [gap["end_time"] is not None for gap in session["interruptions"]] == [True]


def test_frames_that_agents_kept_are_not_missing(cluster: Cluster) -> None:
    """After a crash it is not known what is missing; once the agents are back, only what was not sampled is."""

    head = cluster.head("--freq", "250")
    agents = [cluster.agent(name, head.port, tuned=EAGER) for name in ("stays", "dies")]
    until(lambda: len(head.get("/status")["connected_clients"]) == 2, "the agents")
    head.post("/profiling/start", {"name": "week"})
    until(lambda: head.get("/api/v1/sessions/week")["frame_count"] > 8, "frames of the session")
    head.kill()
    killed = time.time()
    agents[1].kill()
    until(lambda: time.time() - killed > 6.0, "some seconds without a head and without one of the agents")
    again = cluster.head("--freq", "250", port=head.port, http_port=head.http_port)
    recovered = again.post("/api/v1/sessions/recover", {"name": "week"})["session"]["interruptions"]
    assert "dies" in recovered[0]["pending"]
    assert [] == recovered[0]["missing"]

    cluster.agent("dies", head.port, tuned=EAGER)

    def settled() -> Any:
        (found,) = again.get("/api/v1/sessions/week")["interruptions"]
        return found if not found["pending"] else None

    (gap,) = until(settled, "the agents have sent everything")["missing"]
    assert "dies" == gap["node"]
    assert 4.0 < gap["seconds"] < time.time() - killed


def test_a_head_that_was_stopped_does_not_call_its_nodes_late(cluster: Cluster) -> None:
    """It heard nobody while it did not run; its agents went on sending."""

    head = cluster.head("--freq", "250", tuned={"gpulse.cluster.head.fleet:LATE_SECONDS": 6.0})
    agent = cluster.agent("n1", head.port, tuned=EAGER)
    until(lambda: head.nodes().get("n1") == "healthy", "the node")
    before = head.get("/status")["frames_received"]
    head.popen.send_signal(signal.SIGSTOP)
    stopped = time.monotonic()
    until(lambda: time.monotonic() - stopped > 9.0, "longer than a node may be silent")
    head.popen.send_signal(signal.SIGCONT)

    head.said("this process was suspended for")
    until(lambda: head.get("/status")["frames_received"] > before + 24, "the frames of that time, and more")
    assert "late" not in head.text
    agent.kill()
    head.said("n1 is late (was healthy)")


def test_nodes_are_as_they_were_when_the_head_before_ended(cluster: Cluster) -> None:
    """A head that was away for long does not call nodes lost before they could come back; one that was lost stays so."""

    impatient = {
        "gpulse.cluster.head.fleet:LATE_SECONDS": 1.5,
        "gpulse.cluster.head.fleet:LOST_SECONDS": 3.0,
    }
    head = cluster.head("--freq", "250", tuned=impatient)
    agents = [cluster.agent(name, head.port, tuned=EAGER) for name in ("well", "gone")]
    until(lambda: set(head.nodes().values()) == {"healthy"} and len(head.nodes()) == 2, "the nodes")
    agents[1].kill()
    head.said("gone is lost")
    before = head.get("/status")["frames_received"]
    until(lambda: head.get("/status")["frames_received"] > before + 12, "frames of the other one, on disk")
    head.kill()
    killed = time.monotonic()
    agents[0].kill()
    until(lambda: time.monotonic() - killed > 4.0, "longer than a node may be silent")
    again = cluster.head("--freq", "250", port=head.port, http_port=head.http_port, tuned=impatient)

    assert {"well": "healthy", "gone": "lost"} == again.nodes()
    assert [] == again.get("/status")["connected_clients"]
    again.said("well is lost (was healthy)")


def test_agents_are_back_soon_after_two_quick_restarts(cluster: Cluster) -> None:
    """The second restart is waited for as briefly as the first, by every agent."""

    head = cluster.head("--freq", "500")
    agents = [cluster.agent(f"n{number}", head.port) for number in range(4)]
    for agent in agents:
        agent.said("I connected to")
    for restart in range(2):
        assert 0 == head.end()
        head = cluster.head("--freq", "500", port=head.port, http_port=head.http_port)
        until(
            lambda: all(agent.text.count("I connected to") >= 2 + restart for agent in agents),  # noqa: B023
            "all agents are back",
            head_selection.MAX_DELAY_SECONDS + 20.0,
        )
    waits = [
        float(found)
        for agent in agents
        for found in re.findall(r"lost the connection .* trying again in ([\d.]+) s", agent.text)
    ]
    assert 8 == len(waits)
    assert max(waits) <= head_selection.backoff_delay(
        3, 1.0
    )  # two connections that lasted less than three seconds


def test_losses_are_told_once_though_they_are_announced_again(cluster: Cluster) -> None:
    """An agent repeats what its earlier runs lost until it is certain that the head knows."""

    head = cluster.head()
    _say_hello(head.port)
    until(lambda: len(_told(head)) == 2, "the events")
    head.kill()
    again = cluster.head(port=head.port, http_port=head.http_port)
    _say_hello(again.port)
    _say_hello(again.port)
    until(lambda: len(again.get("/api/v1/events?kinds=head_started")["events"]) == 2, "the next commit")

    assert [(event["kind"], event["detail"].get("frames")) for event in _told(again)] == [
        ("run_killed", None),
        ("frames_dropped", 100),
    ]


def _told(head: HeadProcess) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = head.get("/api/v1/events?kinds=run_killed,frames_dropped")["events"]
    return events


def _say_hello(port: int) -> None:
    """Announce an earlier run that was killed, of which nothing is left."""
    earlier = Run(id=b"e" * 16, dropped=100, ended_badly=True, lost_at_most=3)
    hello = Hello(
        protocol=wire.PROTOCOL,
        version="1",
        host="n1",
        machine="m1",
        boot="b",
        instance="i",
        runs=[earlier, Run(id=b"o" * 16, first_kept=1)],
    )
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        messages = iter(
            [
                AgentMessage(hello=hello).SerializeToString(),
                AgentMessage(goodbye=Goodbye()).SerializeToString(),
            ]
        )
        call: Any = channel.stream_stream(wire.STREAM)
        answers = call(messages, timeout=30.0)
        assert HeadMessage.FromString(next(answers)).WhichOneof("kind") == "welcome"
        for _ in answers:
            pass
