"""Who is who: namesakes, doubles, old versions, ports, settings and sessions, with real heads and agents."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from itertools import pairwise
from pathlib import Path

import grpc
import pytest

from gpulse.cluster import wire
from gpulse.cluster.wire_pb2 import AgentMessage, Hello, Run
from tests.integration.cluster import EAGER, Cluster, HeadProcess, cluster_in, talk, until
from tests.integration.stored import check_order, read_stored


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Heads and agents for all tests of this file."""
    with cluster_in(tmp_path_factory.mktemp("nodes")) as made:
        yield made


@pytest.fixture(scope="module")
def head(shared: Cluster) -> HeadProcess:
    """A head that all of them share."""
    return shared.head("--freq", "50")


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """Heads and agents for one test."""
    with cluster_in(tmp_path) as made:
        yield made


def machine(directory: Path, name: str) -> tuple[str, str]:
    """The options of an agent on a machine of that id."""
    file = directory / f"machine-{name}"
    file.write_text(f"{name}\n", encoding="ascii")
    return "--machine-id-file", str(file)


def frames_of(head: HeadProcess, name: str) -> bool:
    """Whether there are readings of a node."""
    return name in head.get("/metrics/latest")["client_data"]


def test_clients_are_those_that_are_connected(cluster: Cluster) -> None:
    """A node whose agent was killed is no client any more, and its GPUs do not count; it is still a node."""

    head = cluster.head("--freq", "50")
    doomed, other = cluster.agent("doomed", head.port), cluster.agent("other", head.port)
    until(lambda: frames_of(head, "doomed") and frames_of(head, "other"), "frames of both")
    assert (2, 16) == (head.get("/clients")["total_clients"], head.get("/status")["total_gpus"])

    doomed.kill()
    until(lambda: head.get("/status")["connected_clients"] == ["other"], "the connection to break")

    clients, status = head.get("/clients"), head.get("/status")
    assert (1, ["other"]) == (clients["total_clients"], [each["client_id"] for each in clients["clients"]])
    assert (8, ["other"]) == (status["total_gpus"], list(status["gpu_info"]))
    assert {"doomed": (8, False), "other": (8, True)} == {
        node["name"]: (node["gpu_count"], node["connected"]) for node in status["nodes"]
    }
    assert other.end() == 0


def test_namesakes(cluster: Cluster, head: HeadProcess, tmp_path: Path) -> None:
    """Two machines of one name are two nodes, the second with a number, and both are told."""

    first = cluster.agent("twin", head.port, *machine(tmp_path, "one"))
    first.said("connected to")
    second = cluster.agent(
        "twin", head.port, *machine(tmp_path, "two"), "--state-dir", str(tmp_path / "second")
    )
    second.said("as twin#2")
    assert "shown as twin#2" in second.said("warning from the head: ")
    assert "shown as twin#2" in first.said("warning from the head: ")
    until(lambda: frames_of(head, "twin") and frames_of(head, "twin#2"), "frames of both")
    assert {"twin", "twin#2"} <= set(head.nodes())
    conflicts = until(lambda: head.get("/api/v1/events?kinds=name_conflict")["events"], "the event")
    assert [event["detail"]["name"] for event in conflicts] == ["twin#2"]

    # A name is for life, in whatever order they come back.
    for agent in (first, second):
        assert agent.end() == 0
    again = cluster.agent(
        "twin", head.port, *machine(tmp_path, "two"), "--state-dir", str(tmp_path / "second")
    )
    again.said("as twin#2")


def test_same_machine_twice(cluster: Cluster, head: HeadProcess, tmp_path: Path) -> None:
    """A second agent of a machine is refused while the first lives, told why, and let in when the first is gone."""

    options = machine(tmp_path, "single")
    first = cluster.agent("single", head.port, *options)
    first.said("connected to")
    elsewhere = ("--state-dir", str(tmp_path / "second"))
    hasty = {"gpulse.cluster.agent.connection:_MAX_DISPLACED_SECONDS": 1.5}
    second = cluster.agent("single", head.port, *options, *elsewhere, tuned=hasty)
    assert "another agent is already connected as single" in second.said("refused")
    assert second.popen.wait(30) == 1
    assert head.nodes()["single"] == "healthy"
    assert "single#2" not in head.nodes()
    assert first.end() == 0
    cluster.agent("single", head.port, *options, *elsewhere).said("connected to 127.0.0.1")


def test_one_state_directory(cluster: Cluster, head: HeadProcess) -> None:
    """A second agent with the state directory of the first ends at once and says who has it."""

    first = cluster.agent("lone", head.port)
    first.said("connected to")
    second = cluster.agent("lone", head.port)
    assert second.end(0) != 0
    assert f"pid {first.popen.pid}" in second.text or str(first.popen.pid) in second.text
    assert str(first.state_dir) in second.text


def test_older_protocol(head: HeadProcess) -> None:
    """An agent of another protocol is refused, and both versions are named."""

    hello = Hello(protocol=0, version="0.0.1", host="old", machine="old", runs=[Run(id=bytes(16))])
    message = AgentMessage(hello=hello).SerializeToString()
    code, words, _ = talk(f"127.0.0.1:{head.port}", [message])
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert f"protocol {wire.PROTOCOL}" in words
    assert "protocol 0" in words
    assert "0.0.1" in words
    assert "old" not in head.nodes()


def test_session_names(cluster: Cluster, head: HeadProcess) -> None:
    """An active session's name is refused; a finished one's may be used again, and the file gets a number."""

    agent = cluster.agent("worker", head.port)
    until(lambda: frames_of(head, "worker"), "frames")
    files = []
    for _ in range(2):
        head.post("/profiling/start", {"name": "again"})
        status, document = head.ask("/profiling/start", {"name": "again"})
        assert status == 409, document
        assert "again" in document["error"]
        stopped = head.post("/profiling/stop", {"name": "again"})
        files.append(Path(stopped["output_file"]).name)
    assert files == ["again.json", "again-2.json"]
    for name in files:
        document = json.loads((head.output_dir / name).read_text(encoding="utf-8"))
        assert document["session_name"] == "again"
    assert agent.end() == 0


def test_fifty_sessions(cluster: Cluster, head: HeadProcess) -> None:
    """Fifty sessions begin, go on and end at once."""

    agent = cluster.agent("busy", head.port)
    until(lambda: frames_of(head, "busy"), "frames")
    names = [f"many_{n}" for n in range(50)]
    with ThreadPoolExecutor(10) as pool:
        started = list(pool.map(lambda name: head.post("/profiling/start", {"name": name}), names))
        assert all(answer["success"] for answer in started)
        assert set(names) <= {session["name"] for session in head.get("/status")["active_sessions"]}
        before = head.get("/status")["frames_received"]
        until(lambda: head.get("/status")["frames_received"] >= before + 10, "frames for all of them")
        stopped = list(pool.map(lambda name: head.post("/profiling/stop", {"name": name}), names))
    assert all(answer["success"] for answer in stopped), stopped
    for name in names:
        document = json.loads((head.output_dir / f"{name}.json").read_text(encoding="utf-8"))
        readings = [value for frame in document["frames"] for value in frame["gpu_util"]]
        assert sum(value is not None for value in readings) > 0, name
    assert not head.get("/status")["active_sessions"]
    assert agent.end() == 0


@pytest.mark.slow
def test_settings(cluster: Cluster) -> None:
    """Settings reach agents at once, also those of a head that was started anew with others; nothing is lost by it."""

    head = cluster.head("--freq", "1000")
    agent = cluster.agent("node", head.port, tuned=EAGER)
    until(lambda: frames_of(head, "node"), "frames")
    head.post("/api/v1/settings", {"interval_ms": 50})
    assert pace(head) <= 0.15
    assert head.get("/status")["freq"] == 50
    assert head.end() == 0
    head = cluster.head("--freq", "1000", "--enable-bandwidth", port=head.port, http_port=head.http_port)
    agent.said("lost the connection")
    until(lambda: frames_of(head, "node"), "the agent to be back")
    assert pace(head, 2) >= 0.7
    status = head.get("/status")
    assert (status["freq"], status["enable_bandwidth_profiling"]) == (1000, True)
    assert agent.end() == 0
    assert head.end() == 0
    for frames in read_stored(head.data_dir).of("node").values():
        check_order(frames)


def pace(head: HeadProcess, count: int = 12) -> float:
    """Seconds from one frame to the next, by their own times."""
    times: list[str] = []

    def enough() -> bool:
        newest = head.get("/metrics/latest")["client_data"]["node"]["time"]
        if newest not in times:
            times.append(newest)
        return len(times) > count

    until(enough, f"{count} frames")
    seconds = [datetime.fromisoformat(text).timestamp() for text in times]
    steps = sorted(later - earlier for earlier, later in pairwise(seconds))
    return steps[len(steps) // 2]


def test_port_in_use(cluster: Cluster, head: HeadProcess) -> None:
    """A head whose port is taken ends, and says which program has it."""

    for ports in ({"port": head.port}, {"http_port": head.http_port}):
        second = cluster.head(**ports, wait=False)
        assert second.popen.wait(30) == 1
        second.end()
        assert f"pid {head.popen.pid}" in second.text
        assert str(next(iter(ports.values()))) in second.text
        assert "Traceback" not in second.text


def test_data_directory_in_use(shared: Cluster, head: HeadProcess) -> None:
    """A head whose data directory another one holds ends, and says so."""

    second = shared.head(wait=False)
    assert second.popen.wait(30) == 1
    second.end()
    assert str(head.popen.pid) in second.text
    assert "Traceback" not in second.text


@pytest.mark.slow
def test_states(cluster: Cluster) -> None:
    """A node that falls silent is late, then lost, and healthy again when it speaks; each of it is an event."""

    tuned = {
        "gpulse.cluster.head.fleet:LATE_SECONDS": 1.0,
        "gpulse.cluster.head.fleet:LOST_SECONDS": 2.0,
    }
    head = cluster.head("--freq", "100", tuned=tuned)
    agent = cluster.agent("node", head.port)
    other = cluster.agent("other", head.port)
    until(lambda: frames_of(head, "node") and frames_of(head, "other"), "frames")
    head.post("/profiling/start", {"name": "through"})
    agent.popen.send_signal(signal.SIGSTOP)
    seen = []

    def state(wanted: str) -> bool:
        found = head.nodes()["node"]
        if found not in seen:
            seen.append(found)
        return found == wanted

    until(lambda: state("lost"), "the node to be lost")
    assert seen[-2:] == ["late", "lost"]
    assert head.nodes()["other"] == "healthy"
    agent.popen.send_signal(signal.SIGCONT)
    until(lambda: state("healthy"), "the node to be back")
    time.sleep(0.3)  # a few frames in which it is there again
    stopped = head.post("/profiling/stop", {"name": "through"})
    document = json.loads((head.output_dir / stopped["output_file"]).read_text(encoding="utf-8"))
    assert agent.end() == 0
    assert other.end() == 0
    assert head.end() == 0
    kinds = [event.kind for event in read_stored(head.data_dir).events if event.kind.startswith("node_")]
    wanted = ["node_late", "node_lost", "node_back"]
    assert [kind for kind in kinds if kind in wanted][:3] == wanted
    ids = document["frames"][0]["gpu_id"]
    silent = {}
    for name in ("node", "other"):
        columns = [place for place, gpu in enumerate(ids) if gpu.startswith(f"{name}:")]
        silent[name] = [
            all(frame["gpu_util"][place] is None for place in columns) for frame in document["frames"]
        ]
        assert columns
    alone = sum(node and not other for node, other in zip(silent["node"], silent["other"], strict=True))
    assert alone >= 10, "a session goes on with those that are there"
