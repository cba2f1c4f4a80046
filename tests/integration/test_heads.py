"""Two real heads over one real database: agents go from one to the other and back, and nobody notices in the data."""

from __future__ import annotations

import signal
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from gpulse.store.local import LocalStore
from gpulse.store.tsdb.fleet_query import FleetQuery
from gpulse.store.tsdb.promql import PromqlClient
from tests.integration.cluster import AgentProcess, Cluster, HeadProcess, cluster_in, free_port, until
from tests.integration.tsdb_servers import Prometheus, TsdbProcess, VictoriaMetrics

NODES = ("north", "south", "west")
_QUICK_AGENT = {"gpulse.cluster.agent.head_selection:PROBE_SECONDS": 0.5}
_QUICK_HEAD = {"gpulse.cluster.head.backends:POLL_SECONDS": 1.0}
_TROUBLES = "gap,frames_dropped,node_late,node_lost,run_killed"


class Pair:
    """Two heads that write to one database, and the agents of both."""

    def __init__(self, directory: Path, cluster: Cluster, tsdb: VictoriaMetrics) -> None:
        self.tsdb = tsdb
        self._directory = directory
        self._cluster = cluster
        self._ports = {name: (free_port(), free_port()) for name in "ab"}
        self.heads: dict[str, HeadProcess] = {}

    def start(self, name: str, *, url: str | None = None) -> HeadProcess:
        """Start a head, again perhaps; its database may be another one, or none."""
        directory = self._directory / name
        directory.mkdir(exist_ok=True)
        port, http_port = self._ports[name]
        head = HeadProcess(
            directory,
            *("--remote-write", url or self.tsdb.tsdb.write_url, "--freq", "250"),
            port=port,
            http_port=http_port,
            tuned=_QUICK_HEAD,
        )
        self.heads[name] = self._cluster._kept(head)
        return head

    def agent(self, node: str) -> AgentProcess:
        """Start an agent that knows both."""
        first, second = (self._ports[name][0] for name in "ab")
        return self._cluster.agent(node, second, host=f"127.0.0.1:{first},127.0.0.1", tuned=_QUICK_AGENT)

    def at(self, name: str) -> list[str]:
        """The nodes that are connected to a head."""
        return sorted(self.heads[name].get("/status")["connected_clients"])


class Watcher:
    """Somebody who looks at the heads all the time."""

    def __init__(self, pair: Pair) -> None:
        self._pair = pair
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self.missed: list[tuple[str, list[str]]] = []
        self.looks = 0
        self._thread.start()

    def _watch(self) -> None:
        while not self._ending.wait(0.1):
            for name, head in list(self._pair.heads.items()):
                try:
                    nodes = head.get("/status")["nodes"]
                except OSError:  # it is dead, or about to be
                    continue
                self.looks += 1
                shown = sorted(node["name"] for node in nodes if node["gpu_count"] == 8)
                if shown != sorted(NODES):
                    self.missed.append((name, shown))

    def close(self) -> None:
        """Look no more."""
        self._ending.set()
        self._thread.join()


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    """Two heads, a time-series database, and agents."""
    with VictoriaMetrics(tmp_path / "database") as tsdb, cluster_in(tmp_path) as cluster:
        yield Pair(tmp_path, cluster, tsdb)


def test_a_head_is_killed_and_comes_back(pair: Pair, tmp_path: Path) -> None:
    """Agents go on at the other and return; the database has every frame once; both show all nodes."""

    pair.start("a")
    pair.start("b")
    agents = [pair.agent(name) for name in NODES]
    until(lambda: pair.at("a") == sorted(NODES), "all agents are at the first head")
    until(lambda: len(pair.heads["b"].nodes()) == 3, "the second shows them, too")
    until(lambda: len(pair.heads["b"].get("/metrics/latest")["client_data"]) == 3, "and their readings")
    watcher = Watcher(pair)
    try:
        pair.heads["a"].kill()
        until(lambda: pair.at("b") == sorted(NODES), "all agents are at the second head")
        time.sleep(2.0)  # frames that only the second one has
        pair.start("a")
        until(lambda: pair.at("a") == sorted(NODES), "all agents are back")
        until(
            lambda: all(client["at_other_head"] for client in pair.heads["b"].get("/clients")["clients"]),
            "the second head knows where they are",
        )
        assert {"healthy"} == set(pair.heads["b"].nodes().values())
        until(
            lambda: [_scraped(pair.heads[name]) for name in "ab"] == [24, 0],
            "the first head shows all GPUs to Prometheus, the second none",
        )
    finally:
        watcher.close()
    assert [] == watcher.missed
    assert watcher.looks > 20

    for agent in agents:
        agent.end()
    for head in pair.heads.values():
        assert [] == head.get(f"/api/v1/events?kinds={_TROUBLES}")["events"]
        until(lambda head=head: _has_sent_everything(head), "all of it is sent")  # type: ignore[misc]
        assert 0 == head.end(signal.SIGTERM)
    pair.tsdb.settle()
    assert _taken(tmp_path) == _kept(pair.tsdb)
    assert {"a": 24, "b": 24} == {name: _described(tmp_path / name / "data") for name in "ab"}


def test_what_a_dead_head_had_not_sent(pair: Pair, tmp_path: Path) -> None:
    """It acknowledged frames and died for good with them: the database gets them from the other one all the same."""

    pair.start("a", url=f"http://127.0.0.1:{free_port()}/api/v1/write")
    pair.start("b")
    agent = pair.agent("north")
    until(lambda: pair.heads["a"].get("/status")["frames_received"] >= 6, "the first head has frames")
    pair.heads["a"].kill()
    until(lambda: pair.at("b") == ["north"], "the agent is at the second head")
    (acknowledged,) = _taken(tmp_path, "a")["north"]
    until(
        lambda: pair.heads["b"].get("/status")["frames_received"] >= acknowledged,
        "the second head has what the first one had",
    )
    agent.end()
    until(lambda: _has_sent_everything(pair.heads["b"]), "all of it is sent")
    assert 0 == pair.heads["b"].end(signal.SIGTERM)
    pair.tsdb.settle()
    taken = _taken(tmp_path)

    assert taken == _kept(pair.tsdb)
    assert min(taken["north"]) >= 6


def _scraped(head: HeadProcess) -> int:
    """How many GPUs a head shows to Prometheus."""
    with urllib.request.urlopen(f"http://127.0.0.1:{head.http_port}/metrics", timeout=60) as answer:
        text: str = answer.read().decode()
    return sum(line.startswith("gpulse_gpu_power_watts{") for line in text.splitlines())


def _described(directory: Path) -> int:
    """Of how many GPUs a head knows what their agents told it, which is more than the database knows."""
    with closing(LocalStore(str(directory))) as archive:
        return sum("memory_total_bytes" in gpu.device["facts"] for gpu in archive.gpus())


def _has_sent_everything(head: HeadProcess) -> bool:
    """Whether the database has confirmed all that a head has on disk."""
    waiting: int = head.get("/status")["remote"]["waiting_records"]
    return waiting == 0


def _taken(directory: Path, heads: str = "ab") -> dict[str, set[int]]:
    """By node how many frames its agent took: the number of the last one, since they are counted from 1."""
    taken: dict[str, int] = {}
    for name in heads:
        archive = LocalStore(str(directory / name / "data"))
        try:
            names = {node.id: node.name for node in archive.nodes().values()}
            for run in archive.runs().values():
                node = names[run.node or 0]
                taken[node] = max(taken.get(node, 0), run.last)
        finally:
            archive.close()
    return {node: {last} for node, last in taken.items()}


def _kept(tsdb: TsdbProcess) -> dict[str, set[int]]:
    """By node how many samples the database has of its GPUs: one number when all have the same."""
    client = PromqlClient(tsdb.tsdb)
    try:
        tracks = client.matrix("gpulse_gpu_power_watts[1h]", time.time() + 5.0)
    finally:
        client.close()
    found: dict[str, set[int]] = {}
    for track in tracks:
        found.setdefault(track.labels["node"], set()).add(len(set(track.times)))
    assert 8 * len(found) == len(tracks)
    return found


@pytest.mark.parametrize("kind", [VictoriaMetrics, Prometheus])
def test_what_a_database_says_of_now(kind: type[TsdbProcess], tmp_path: Path) -> None:
    """Nodes, GPUs and readings as they were written, however their names are spelled; nothing old as if it were new."""

    now = time.time()
    odd = 'o(d)d|"x"\\'
    info = {"__name__": "gpulse_node_info", "machine": "m", "version": "1"}
    gpu = {"__name__": "gpulse_gpu_info", "gpu": "0", "uuid": "GPU-0", "name": "H200", "has_gpm": "true"}
    power = {"__name__": "gpulse_gpu_power_watts", "gpu": "0", "uuid": "GPU-0", "name": "H200"}
    memory = {**power, "__name__": "gpulse_gpu_memory_used_bytes"}
    total = {**power, "__name__": "gpulse_gpu_memory_total_bytes"}
    link = {"__name__": "gpulse_network_rx_bytes_total", "interface": "ib0"}
    with kind(tmp_path) as tsdb:
        tsdb.write(
            [
                ({**info, "node": odd, "host": "odd", "driver": "570"}, [(now - 100, 1.0)]),
                ({**info, "node": odd, "host": "odd", "driver": "580"}, [(now - 20, 1.0)]),
                ({**gpu, "node": odd}, [(now - 20, 1.0)]),
                ({**power, "node": odd}, [(now - 4, 100.0), (now - 3, 123.456)]),
                ({**memory, "node": odd}, [(now - 3, 150754820096.0)]),
                ({**total, "node": odd}, [(now - 60, 150754820097.0)]),
                ({**link, "node": odd}, [(now - 5, 12.0)]),
                ({**info, "node": "old", "host": "old"}, [(now - 200, 1.0)]),
                ({**power, "node": "old"}, [(now - 200, 9.0)]),
            ]
        )
        client = PromqlClient(tsdb.tsdb)
        newest = FleetQuery(client, labels={})
        try:
            until(lambda: len(newest.nodes(now)) == 2, "the database has it")
            heard = newest.nodes(now)
            devices = newest.gpus(heard.keys())
            frames = newest.frames(heard, devices)
        finally:
            client.close()

    assert "580" == heard[odd].labels["driver"]
    assert pytest.approx(now - 3, abs=0.002) == heard[odd].time
    assert pytest.approx(now - 200, abs=0.002) == heard["old"].time
    assert [("GPU-0", True)] == [(device.uuid, device.has_gpm) for device in devices[odd]]
    (reading,) = frames[odd].gpus
    assert {
        "power_watts": 123.456,
        "memory_used_bytes": 150754820096,
        "memory_total_bytes": 150754820097,
    } == reading.values
    assert isinstance(reading.values["memory_used_bytes"], int)
    assert ("ib0", "infiniband", {"rx_bytes_total": 12}) == (
        frames[odd].network[0].name,
        frames[odd].network[0].kind,
        frames[odd].network[0].values,
    )
    assert ((), None) == (frames["old"].gpus, frames["old"].host)
