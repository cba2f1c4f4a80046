"""What a head stores goes to real databases: equal, in time, and again after they died."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.parse
from pathlib import Path

import pytest

from gpulse.errors import MissingExtraError, install_command
from gpulse.model.device import Device, Node
from gpulse.model.frame import CgroupReading, Frame, GpuReading, HostReading, NetworkReading
from gpulse.model.frame_packing import FramePacker
from gpulse.model.process import GpuProcess, ProcessIdentity, ProcessReading
from gpulse.store.local import LocalStore
from gpulse.store.log.record_payloads import FrameBatch, LogEntry
from gpulse.store.tsdb.config import TsdbConfig
from gpulse.store.tsdb.send_supervisor import TsdbForwarder
from tests.integration.cluster import cluster_in, is_gone, until
from tests.integration.remote_lab import Found, Lab, held, lab_in, raw, stored
from tests.integration.tsdb_servers import Prometheus, TsdbProcess, VictoriaMetrics
from tests.unit.history_frames import BEGIN

_EACH_DATABASE = pytest.mark.parametrize("kind", [VictoriaMetrics, Prometheus])


@_EACH_DATABASE
def test_a_database_has_what_the_head_has(tmp_path: Path, kind: type[TsdbProcess]) -> None:
    """Every sample of every series is there once, at its time and with its value; and so is who it is of."""

    with kind(tmp_path / "database") as tsdb:
        labelled = tsdb.tsdb._replace(labels={"cluster": "c1", "Zone": "z"})
        with lab_in(tmp_path / "data", labelled) as lab:
            for seconds in (1, 1, 30, 13):
                lab.tick(seconds)
            lab.tick(5, shift_us=2_345_678)
            lab.sent()

            assert stored(lab.archive) == held(tsdb)
            raised = raw(tsdb, "gpulse_gpu_info", BEGIN - 10, BEGIN + 100)

    assert {f"GPU-{node}-{gpu}" for node in lab.nodes for gpu in range(2)} == {
        labels["uuid"] for labels, _ in raised
    }
    assert {("c1", "z", "NVIDIA H200")} == {(w["cluster"], w["Zone"], w["name"]) for w, _ in raised}
    seconds_told = {time_ms // 1000 - BEGIN for _, samples in raised for time_ms in samples}
    assert max(seconds_told) >= 30


@_EACH_DATABASE
def test_nothing_is_missing_after_a_database_was_killed_under_load(
    tmp_path: Path, kind: type[TsdbProcess]
) -> None:
    """A time-series database forgets what it confirmed last when it is killed: it is sent again, and what came meanwhile too."""

    with kind(tmp_path / "database") as tsdb, lab_in(tmp_path / "data", tsdb.tsdb) as lab:
        over = threading.Event()

        def load() -> None:
            while not over.wait(0.02):
                lab.tick()

        thread = threading.Thread(target=load)
        thread.start()
        try:
            for _ in range(2):
                lab.sent_some(40)
                tsdb.kill()
                until(lambda: lab.forwarder.state().state == "failing", "the head notices")
                time.sleep(0.2)
                tsdb.start()
                lab.sent_some(40)
        finally:
            over.set()
            thread.join()
        lab.sent()

        assert stored(lab.archive) == held(tsdb)
        assert 0 == lab.forwarder.state().refused_total


def test_a_database_that_is_away_for_long_gets_everything_when_it_comes(tmp_path: Path) -> None:
    """Commits do not wait for it, the log is kept for it, and it is said what is wrong and how much waits."""

    tsdb = VictoriaMetrics(tmp_path / "database")
    with lab_in(tmp_path / "data", tsdb.tsdb) as lab:
        for _ in range(60):
            lab.tick(10)
        lab.archive.seal()
        state = until(
            lambda: (now := lab.forwarder.state()).waiting_bytes and now.state == "failing" and now,
            "it is said that it is away",
        )
        assert "cannot reach" in (state.error or "")
        assert "check that the time-series database is running" in (state.hint or "")

        try:
            tsdb.start()
            lab.sent()
            assert stored(lab.archive) == held(tsdb)
        finally:
            tsdb.kill()


@_EACH_DATABASE
def test_a_head_that_is_started_again_goes_on_where_it_was(tmp_path: Path, kind: type[TsdbProcess]) -> None:
    """Also when the sending process was killed; what is sent twice is harmless."""

    with kind(tmp_path / "database") as tsdb:
        with lab_in(tmp_path / "data", tsdb.tsdb) as lab:
            for _ in range(5):
                lab.tick(3)
            lab.sent()
            pid = lab.forwarder.pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            lab.tick(3)
            until(lambda: lab.forwarder.pid not in (None, pid), "it is started again")
            lab.sent()
            lab.tick(3)  # what is on its way when the head ends is sent before that
        with lab_in(tmp_path / "data", tsdb.tsdb, begin=lab.second) as again:
            again.tick(3)
            again.sent()

            assert stored(again.archive) == held(tsdb)
            assert 0 == again.forwarder.state().refused_total


def test_a_real_head_sends_what_real_agents_take(tmp_path: Path) -> None:
    """From the agent's sampling to the database's answer nothing is lost or changed, though the database dies on the way."""

    with VictoriaMetrics(tmp_path / "database") as tsdb, cluster_in(tmp_path) as cluster:
        head = cluster.head("--remote-write", tsdb.tsdb.write_url)

        def sending(state: str, more: int = 0) -> int:
            remote = head.get("/status")["remote"]
            return (
                int(remote["samples_total"])
                if remote["state"] == state and remote["samples_total"] > more
                else 0
            )

        agents = [cluster.agent(name, head.port) for name in ("n1", "n2")]
        count = until(lambda: sending("ok", 1000), "samples arrive")
        tsdb.kill()
        until(lambda: sending("failing"), "the head notices")
        tsdb.start()
        until(lambda: sending("ok", count + 1000), "samples arrive again")
        for agent in agents:
            agent.end()
        assert 0 == head.end()

        with LocalStore(str(head.data_dir)) as archive:
            wanted = stored(archive)
        times = [time_ms / 1000 for values in wanted.values() for time_ms in values]
        found = held(tsdb, start=min(times) - 5, end=max(times) + 1)
    facts = {name for name, *_ in found} - {name for name, *_ in wanted}

    assert {key: values for key, values in found.items() if key[0] not in facts} == wanted
    assert "gpulse_gpu_memory_total_bytes" in facts
    assert {"gpu", "host", "disk", "filesystem", "network"} == {name.split("_")[1] for name, *_ in wanted}


def test_a_wrong_address_costs_nothing(tmp_path: Path) -> None:
    """It is said what the database answers and what to try; with the right address everything arrives."""

    with VictoriaMetrics(tmp_path / "database") as tsdb:
        wrong = tsdb.tsdb._replace(write_url=f"{tsdb.url}/api/v1/wright")
        with lab_in(tmp_path / "data", wrong) as lab:
            lab.tick(20)
            state = until(
                lambda: (now := lab.forwarder.state()).state == "refused" and now,
                "it is said that it is wrong",
            )
            assert "unsupported path" in (state.error or "")
            assert "check that --remote-write" in (state.hint or "")
            assert (0, 0, 0) == (state.samples_total, state.refused_total, state.lost_total)
        with lab_in(tmp_path / "data", tsdb.tsdb, begin=lab.second) as lab:
            lab.tick(1)
            lab.sent()

            assert stored(lab.archive) == held(tsdb)


def _busy_frame(second: int, processes: int) -> Frame:
    """A frame with processes, groups and interfaces that nobody has seen before."""
    pids = range(1000 + second * processes, 1000 + (second + 1) * processes)
    held_by = tuple(GpuProcess(pid, "compute", 1 << 30, 0.1) for pid in pids)
    return Frame(
        time=BEGIN + 5.0 * second,
        monotonic=5.0 * second,
        node=Node("n"),
        gpus=(GpuReading(Device(0, "GPU-0", "NVIDIA H200"), {"power_watts": 70.0 + second}, held_by),),
        host=HostReading({"cpu_utilization_ratio": 0.5}),
        network=(
            NetworkReading("eth0", "ethernet", True, {"rx_bytes_total": second}),
            NetworkReading(f"veth{second}", "virtual", True, {"rx_bytes_total": second}),
        ),
        processes=tuple(
            ProcessReading(ProcessIdentity(pid, 1, BEGIN, "job"), "R", {"cpu_percent": 1.0}, on_gpu=True)
            for pid in pids
        ),
        cgroups=(CgroupReading(f"/job_{second}", {"cpu_utilization_ratio": 0.5}),),
    )


def test_ten_thousand_short_processes_add_no_series(tmp_path: Path) -> None:
    """What comes and goes without end stays out of the database's index."""

    packer = FramePacker()

    def tick(lab: Lab, second: int) -> None:
        packed, layouts = packer.pack(_busy_frame(second, 100))
        facts = [
            LogEntry.of_fact("layout", id=str(block.layout), text=text.decode())
            for text in layouts
            for block in packed.blocks
            if lab.learn(text) == block.layout
        ]
        now_us = packed.time_us
        batch = FrameBatch(bytes(range(16)), 1, second + 1, 1, now_us, 0, packed.to_bytes())
        lab.archive.commit([*facts, LogEntry.of_batch(batch, ())])

    def count(tsdb: TsdbProcess) -> int:
        tsdb.settle()
        query = urllib.parse.urlencode(
            {"query": 'count(last_over_time({__name__=~".+"}[1h]))', "time": BEGIN + 3000}
        )
        answer = json.loads(tsdb.get(f"/api/v1/query?nocache=1&{query}"))
        return int(answer["data"]["result"][0]["value"][1])

    with VictoriaMetrics(tmp_path / "database") as tsdb, lab_in(tmp_path / "data", tsdb.tsdb) as lab:
        lab.archive.commit([LogEntry.of_fact("node", id=1, name="n", host="n", machine="m", time=BEGIN)])
        for second in range(2):
            tick(lab, second)
        lab.sent()
        before = count(tsdb)
        for second in range(2, 102):
            tick(lab, second)
        lab.sent()

        assert before == count(tsdb)
        found: Found = held(tsdb)

    power = found["gpulse_gpu_power_watts", "n", "GPU-0"]
    assert {(BEGIN + 5 * second) * 1000: 70.0 + second for second in range(102)} == power


_ORPHAN = """
import sys, time
from gpulse.store.local import LocalStore
from gpulse.store.tsdb.config import TsdbConfig
from gpulse.store.tsdb.send_supervisor import TsdbForwarder

archive = LocalStore(sys.argv[1])
forwarder = TsdbForwarder(sys.argv[1], TsdbConfig("http://127.0.0.1:9/write"), limit_bytes=1 << 30)
archive.forward_to(forwarder)
forwarder.start()
while forwarder.pid is None:
    time.sleep(0.01)
print(forwarder.pid, flush=True)
time.sleep(60)
"""


def test_nobody_sends_for_a_head_that_is_gone(tmp_path: Path) -> None:
    """The sending process ends with the head, however that ended."""

    head = subprocess.Popen(
        [sys.executable, "-c", _ORPHAN, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with head:
        assert head.stdout is not None
        pid = int(head.stdout.readline())
        head.kill()
    until(lambda: is_gone(pid), "the sending process is gone")


def test_a_head_without_what_sending_needs_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is started."""

    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)

    with pytest.raises(MissingExtraError) as raised:
        TsdbForwarder(str(tmp_path), TsdbConfig("http://127.0.0.1:9/write"), limit_bytes=1 << 30).start()
    assert install_command("head") == raised.value.hint


def test_a_sending_process_that_says_nothing_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it said last; and no longer once it speaks again."""

    forwarder = TsdbForwarder(str(tmp_path), TsdbConfig("http://127.0.0.1:9/write"), limit_bytes=1 << 30)
    forwarder.start()
    try:
        until(lambda: forwarder.pid is not None and forwarder.state().state == "ok", "the process")
        os.kill(forwarder.pid or 0, signal.SIGSTOP)
        monkeypatch.setattr("gpulse.store.tsdb.send_supervisor._SILENT_SECONDS", 0.0)
        assert "failing" == forwarder.state().state
        assert "has not reported for" in (forwarder.state().error or "")
        monkeypatch.undo()
        assert "ok" == forwarder.state().state
    finally:
        os.kill(forwarder.pid or 0, signal.SIGCONT)
        forwarder.close()
