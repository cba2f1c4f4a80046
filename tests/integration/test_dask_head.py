"""Frames of Dask workers at a real head: nodes and jobs are shown, whatever becomes of the head on the way."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from gpulse.cluster.agent import connection, head_selection
from gpulse.integrations.dask import Monitor, head_stream
from gpulse.integrations.dask.head_stream import HeadStream, head_settings
from gpulse.model.frame import Frame
from gpulse.sources.demo_machine import DemoMachine
from tests.integration import dask_tasks as tasks
from tests.integration.cluster import Cluster, HeadProcess, cluster_in, free_port, until
from tests.integration.dask_machine import dask_machine
from tests.integration.stored import check_complete, read_stored, read_taken
from tests.integration.test_cluster_tls import make_certificates

pytestmark = pytest.mark.slow

NODE = socket.gethostname()
FAST = ("--freq", "50")
SOON = {"gpulse.cluster.head.group_commit:Committer.__init__.__kwdefaults__['seconds']": 0.1}
"""Heads that write down what they got ten times a second."""
JOBS = ("dask:10.0.0.5:8786/1", "dask:10.0.0.5:8786/2", "dask:inproc://ada's <b>lab</b>/7/3")
_LEAP_SECONDS = 6.0
"""Agents tell who is on a GPU every five seconds."""


class Recording:
    """A stream and the frames that it is offered, which are six seconds apart to those who read their times."""

    def __init__(self, stream: HeadStream) -> None:
        self.stream = stream
        self._machine = DemoMachine(time.time() - 3000.0, gpus=2)
        self._back = 2400.0
        """So many seconds ago is now."""
        self.pid = next(process.pid for process in self._next().processes if process.on_gpu)

    def _next(self) -> Frame:
        now, monotonic = time.time() - self._back, time.monotonic() - self._back
        return self._machine.sample(now)._replace(monotonic=monotonic)

    def until(self, condition: Callable[[], Any], what: str) -> Any:
        """Offer frames until something has come to pass."""

        def goes_on() -> Any:
            if self._back > _LEAP_SECONDS:
                self._back -= _LEAP_SECONDS
            self.stream.offer(self._next())
            return condition()

        return until(goes_on, what)


@contextmanager
def recording(address: str, state: Path, ca: Path | None = None) -> Iterator[Recording]:
    """A stream to a head, ended afterwards."""
    stream = HeadStream(head_settings(address, ca=ca), state)
    stream.start()
    try:
        yield Recording(stream)
    finally:
        stream.stop()


def processes(head: HeadProcess, job: str) -> list[dict[str, Any]]:
    """What a head knows of the processes of a job."""
    found: list[dict[str, Any]] = head.get(f"/api/v1/processes?from=-1h&jobs={quote(job, safe='')}")[
        "processes"
    ]
    return found


def waits(state: Path, job: str) -> bool:
    """Whether a frame is in the spool that tells of a job."""
    return any(job.encode() in part.read_bytes() for part in (state / "1" / "spool").iterdir())


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A directory for the head that nobody hurts."""
    with cluster_in(tmp_path_factory.mktemp("head")) as made:
        yield made


@pytest.fixture(scope="module")
def head(shared: Cluster) -> HeadProcess:
    """A head that nobody hurts."""
    return shared.head(*FAST, tuned=SOON)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """Heads and agents of one test."""
    with cluster_in(tmp_path) as made:
        yield made


def test_a_head_shows_the_jobs_of_a_process_one_after_the_other(head: HeadProcess, tmp_path: Path) -> None:
    """Each has its own time on the GPU, also when its name has characters that mean something elsewhere."""

    with recording(f"localhost:{head.port}", tmp_path / "state") as given:
        for job in JOBS:
            given.stream.label({given.pid: job})
            given.until(lambda: processes(head, job), f"{job} is shown")  # noqa: B023  called at once
        trouble = given.stream.trouble
    found = [processes(head, job) for job in JOBS]
    usage = head.get("/api/v1/usage?by=job&from=-1h")["rows"]
    latest = head.get("/metrics/latest")["client_data"][NODE]

    assert trouble is None
    assert [[given.pid]] * 3 == [[process["pid"] for process in of] for of in found]
    assert [False, False, True] == [of[0]["ended"] is None for of in found]
    assert all(earlier[0]["gpus"][-1]["to"] < later[0]["start_time"] for earlier, later in pairwise(found))
    assert set(JOBS) <= {row["job"] for row in usage}
    assert latest


def test_a_head_learns_that_there_will_be_no_more(
    head: HeadProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last frame says so at once, also when the recorder has nothing new: no frame is waited for."""

    monkeypatch.setattr(head_stream, "_MIN_PATIENCE_SECONDS", 600.0)
    monkeypatch.setattr(head_stream, "_STOP_SECONDS", 600.0)

    def farewells() -> int:
        return len(head.get("/api/v1/events?from=-1h&kinds=agent_stopping")["events"])

    with recording(f"localhost:{head.port}", tmp_path / "state") as given:
        given.stream.label({given.pid: "dask:stops/1"})
        given.until(lambda: processes(head, "dask:stops/1"), "it streams")
        until(lambda: given.stream._relay._newest is None, "the newest frame was sent")
        before = farewells()
        given.stream.stop()
        until(lambda: before + 1 == farewells(), "the head knows")


@pytest.mark.requires("machine id")
def test_the_place_of_an_agent_is_left_to_it(
    head: HeadProcess, shared: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node has one voice: that of the agent that is there already. Why nothing is sent is told in words."""

    monkeypatch.setattr(connection, "_MAX_DISPLACED_SECONDS", 0.3)
    agent = shared.agent(NODE, head.port)
    agent.said("connected to")
    with recording(f"localhost:{head.port}", tmp_path / "state") as given:
        refused = given.until(
            lambda: "refused" in (given.stream.trouble or "") and given.stream.trouble, "it is refused"
        )
    before = head.get("/metrics/latest")["client_data"][NODE]
    until(lambda: before != head.get("/metrics/latest")["client_data"][NODE], "the agent streams on")
    ended = agent.end()

    assert (
        f"the head at localhost:{head.port} refused this agent: another agent is already connected as {NODE}; "
        "the running agent already reports this node, but without Dask's jobs"
    ) == refused
    assert 0 == ended


def test_nothing_is_lost_while_there_is_no_head(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that comes later gets what was before it; one that is killed is missed, and gets the rest when it is back."""

    monkeypatch.setattr(head_stream, "_MIN_PATIENCE_SECONDS", 600.0)  # on a busy machine frames may be late
    monkeypatch.setattr(head_stream, "_SILENCE_SECONDS", 1.5)
    monkeypatch.setattr(head_selection, "STABLE_SECONDS", 0.0)
    monkeypatch.setattr(head_selection, "FIRST_DELAY_SECONDS", 0.3)
    port, state = free_port(), tmp_path / "state"
    with recording(f"localhost:{port}", state) as given:
        given.stream.label({given.pid: JOBS[0]})
        early = given.until(lambda: given.stream.trouble, "the head is missed")
        given.stream.label({given.pid: JOBS[1]})
        head = cluster.head(*FAST, port=port, tuned=SOON)
        given.until(lambda: processes(head, JOBS[1]), "the head is found")
        given.until(lambda: given.stream.trouble is None, "all is well")
        head.kill()
        given.stream.label({given.pid: JOBS[2]})
        given.until(lambda: waits(state, JOBS[2]), "frames wait for the head")
        late = given.until(lambda: given.stream.trouble, "the head is missed again")
        given.stream.label({given.pid: "dask:10.0.0.5:8786/4"})
        head = cluster.head(*FAST, port=port, tuned=SOON)
        given.until(lambda: processes(head, "dask:10.0.0.5:8786/4"), "the head is found again")
        given.until(lambda: given.stream.trouble is None, "all is well again")
    shown = [len(processes(head, job)) for job in JOBS]
    head.end()
    found = read_stored(head.data_dir)

    assert f"not yet connected to the head at localhost:{port}" in early
    assert (
        f"the head at localhost:{port} has not answered for 1.5 s or longer; frames are kept on this machine"
        == late
    )
    assert [1, 1, 1] == shown
    check_complete(found, read_taken(state / "1"), NODE)
    assert [] == [event for kind in ("gap", "frames_dropped", "run_killed") for event in found.said(kind)]


def test_a_head_that_hangs_does_not_keep_a_worker(head: HeadProcess, tmp_path: Path) -> None:
    """What it does not take waits in the directory, and the next stream brings it there."""

    with recording(f"localhost:{head.port}", tmp_path / "state") as given:
        given.stream.label({given.pid: "dask:hangs/1"})
        given.until(lambda: processes(head, "dask:hangs/1"), "it is shown")
        head.popen.send_signal(signal.SIGSTOP)
        try:
            given.stream.label({given.pid: "dask:hangs/2"})
            given.until(lambda: waits(tmp_path / "state", "dask:hangs/2"), "frames wait for the head")
            given.stream.stop()
        finally:
            head.popen.send_signal(signal.SIGCONT)
    until(lambda: not given.stream._thread.is_alive(), "nobody holds the directory any more")
    with recording(f"localhost:{head.port}", tmp_path / "state") as given:
        given.until(lambda: processes(head, "dask:hangs/2"), "what waited is there")


def test_what_is_no_head_is_reported(head: HeadProcess, tmp_path: Path) -> None:
    """There is no use in trying again."""

    with recording(f"localhost:{head.http_port}", tmp_path / "state") as given:
        trouble = given.until(lambda: given.stream.trouble, "it is told")

    assert f"localhost:{head.http_port} is an HTTP port" in trouble


def test_a_directory_that_a_child_of_a_task_holds_is_left_to_it(head: HeadProcess, tmp_path: Path) -> None:
    """A process that a task forked keeps what was open, and so the lock of the stream before."""

    state, address = tmp_path / "state", f"localhost:{head.port}"
    with recording(address, state) as given:
        given.stream.label({given.pid: "dask:before/1"})
        given.until(lambda: processes(head, "dask:before/1"), "it streams")
        descriptor = next(
            int(number)
            for number in os.listdir("/proc/self/fd")
            if _target(number) == str(state / "1" / "lock")
        )
        inherited = os.dup(descriptor)
    try:
        with recording(address, state) as given:
            given.stream.label({given.pid: "dask:forked/1"})
            given.until(lambda: processes(head, "dask:forked/1"), "it streams again")
            trouble = given.stream.trouble
    finally:
        os.close(inherited)

    assert trouble is None
    assert {"1", "2"} == set(os.listdir(state))


def _target(descriptor: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except FileNotFoundError:
        return ""


@pytest.mark.requires("openssl")
def test_the_certificate_comes_along(cluster: Cluster, tmp_path: Path) -> None:
    """A worker's machine need not have the file."""

    make_certificates(cluster.directory)
    head = cluster.head(*FAST, "--tls-cert", "head.pem", "--tls-key", "head.key")
    settings = head_settings(f"localhost:{head.port}", ca=cluster.directory / "ca.pem")
    (cluster.directory / "ca.pem").unlink()
    stream = HeadStream(settings, tmp_path / "state")
    stream.start()
    try:
        Recording(stream).until(lambda: f"{NODE} is connected" in head.text, "it is welcome")
    finally:
        stream.stop()

    assert stream.trouble is None


def test_a_cluster_with_a_head_is_on_its_dashboard(
    head: HeadProcess, tmp_path: Path, nvml_library: Path
) -> None:
    """One worker speaks for the machine: its GPUs are there, and who works on them for which job."""

    go = tmp_path / "go"
    with dask_machine(tmp_path / "dask", nvml_library) as machine:
        machine.start_workers(["0", "1"])
        pids = [worker.popen.pid for worker in machine.workers.values()]
        for index, pid in enumerate(pids):
            machine.fake.add_process(index, pid, 1 << 30)
        jobs = [f"dask:127.0.0.1:{machine.port}/{number}" for number in (1, 2)]
        with machine.client() as watching, machine.client() as client:
            monitor = Monitor(watching)
            monitor.attach(["tasks"], [tasks.BEAT], polling_interval=50, head=f"localhost:{head.port}")
            monitor.start()
            future = client.submit(
                tasks.held, str(tmp_path / "begun"), str(go), workers=[machine.workers["w1"].address]
            )
            shown = until(lambda: processes(head, jobs[0]), "the job is shown")
            go.touch()
            future.result()
            status = monitor.status()
            monitor.detach()
        until(
            lambda: f"{NODE} disconnected (its agent stopped)" in "\n".join(head.lines[-3:]),
            "the agent has left",
        )
        left = list((machine.directory / "scratch").rglob("gpulse-agent/*/lock"))

    assert {pids[1]} <= {process["pid"] for process in shown} <= set(pids)
    assert [] == [trouble for worker in status.workers for trouble in worker.troubles]
    assert f"localhost:{head.port}" == status.head
    assert 1 == len(left)
