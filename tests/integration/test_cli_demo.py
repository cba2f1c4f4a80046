"""`gpulse demo`: a cluster that is there within seconds, and leaves nothing behind."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.integration.cluster import Process, free_port, is_gone, until

IMPATIENT = {
    "gpulse.cluster.head.fleet:LATE_SECONDS": 1.0,
    "gpulse.cluster.head.fleet:LATE_INTERVALS": 2,
    "gpulse.cluster.head.fleet:LOST_SECONDS": 1.0,
}
"""A head that gives nodes up after four seconds."""


class Demo(Process):
    """A demo, and whatever it could leave behind."""

    def __init__(self, directory: Path, *options: str) -> None:
        self.temporary = directory / "temporary"
        self.home = directory / "home"
        self.temporary.mkdir(parents=True)
        self.home.mkdir()
        super().__init__(
            *("demo", "--nodes", "3", "--gpus", "2", *options),
            cwd=directory,
            env={
                "TMPDIR": str(self.temporary),
                "HOME": str(self.home),
                "XDG_STATE_HOME": str(self.home / "state"),
                "XDG_CONFIG_HOME": str(self.home / "config"),
            },
            tuned=IMPATIENT,
        )

    def ready(self) -> int:
        """Wait until it says where the page is; the port."""
        said = re.search(r"http://127\.0\.0\.1:(\d+)/", self.said("http://127.0.0.1:"))
        assert said is not None
        self.said("Ctrl-C")
        return int(said[1])

    def processes(self) -> list[int]:
        """It and its children."""
        children = Path(f"/proc/{self.popen.pid}/task/{self.popen.pid}/children").read_text(encoding="ascii")
        return [self.popen.pid, *map(int, children.split())]


def is_free(port: int) -> bool:
    """Whether nobody listens on a port of this machine."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


@contextmanager
def demo_in(directory: Path, *options: str) -> Iterator[Demo]:
    """A demo that is gone at the end, one way or the other."""
    demo = Demo(directory, *options)
    try:
        yield demo
    finally:
        demo.kill()


class Page:
    """The HTTP side of a demo."""

    def __init__(self, demo: Demo, port: int) -> None:
        self.demo = demo
        self.port = port

    def get(self, path: str) -> Any:
        """What a path answers."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            text = answer.read()
            assert answer.status == 200, (answer.status, text)
            return json.loads(text)
        finally:
            connection.close()


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """A demo for everybody."""
    with demo_in(tmp_path_factory.mktemp("demo"), "--port", str(free_port())) as demo:
        yield Page(demo, demo.ready())


def test_everything_is_there_at_once(page: Page) -> None:
    """Nodes with values, findings, two sessions, and nothing in the home directory."""

    status = page.get("/status")
    clients = page.get("/clients")["clients"]
    sessions = page.get("/api/v1/sessions")["sessions"]
    findings = page.get("/api/v1/findings")["findings"]

    assert ["gpu-01", "gpu-02", "gpu-03"] == [node["name"] for node in status["nodes"]]
    assert {2} == {client["gpu_count"] for client in clients}
    assert {("pretrain_gpt_7b", "active"), ("resnet_baseline", "finished")} == {
        (session["name"], session["state"]) for session in sessions
    }
    assert "input_too_few_workers" in {finding["id"] for finding in findings}
    assert not status["storage"].get("damage"), "a new demo has no damaged data"
    assert [] == list(page.demo.home.iterdir())


def test_the_past_is_there(page: Page) -> None:
    """Six hours of values without a hole, that go on in the present; whose jobs they were."""

    history = page.get("/api/v1/history?metrics=power_watts&nodes=gpu-02&gpus=0&from=-350m&points=400")
    usage = page.get("/api/v1/usage?from=-350m&by=job")
    (power,) = [series["values"] for series in history["series"]]

    assert 340 < len(power)
    assert power.count(None) <= 2
    assert {("ada", "slurm:4711"), ("edsger", "slurm:4688")} <= {
        (row["user"], row["job"]) for row in usage["rows"]
    }


def test_hours_are_those_that_were_held(page: Page) -> None:
    """Whether the past is coarse or fine: a job that ran for all of a time held its GPUs for all of it."""

    for start, end in ((300, 260), (50, 10)):
        usage = page.get(f"/api/v1/usage?from=-{start}m&to=-{end}m&by=job&users=ada")
        held = {row["job"]: row["gpu_seconds"] / 60 / (start - end) for row in usage["rows"]}
        assert held
        # Frames are 60 s apart at first and 10 s apart in the last 20 minutes, processes are listed each 20 s:
        # half a step may be missing at either end and where the steps change.
        missing = (60 + 20) / (60 * (start - end))
        assert all(abs(gpus / round(gpus) - 1) < missing for gpus in held.values()), (start, held)


def test_values_change(page: Page) -> None:
    """What the nodes send is live."""

    first = page.get("/status")["frames_received"]

    until(lambda: page.get("/status")["frames_received"] > first + 3, "more frames")


def test_a_second_demo_takes_the_next_port_and_dies_without_a_trace(page: Page, tmp_path: Path) -> None:
    """Killed without warning, it leaves neither process nor directory; the nodes' process cleans up."""

    with demo_in(tmp_path, "--port", str(page.port)) as demo:
        port = demo.ready()
        pids = demo.processes()
        assert 1 == len(list(demo.temporary.iterdir()))
        demo.kill()
        until(lambda: all(map(is_gone, pids)), "its processes to end")

        assert f"port {page.port} is in use; the page is on port {port}" in demo.text
        assert port > page.port
        assert 2 == len(pids)
        assert [] == list(demo.temporary.iterdir())
        assert is_free(port)


def test_it_can_be_ended_while_it_starts(tmp_path: Path) -> None:
    """Long before there is a page, one Ctrl-C is enough."""

    with demo_in(tmp_path, "--port", "0") as demo:
        demo.said("generating the history")
        pids = demo.processes()

        assert demo.end(signal.SIGINT) == 0
        assert "http://" not in demo.text
        assert "Traceback" not in demo.text
        until(lambda: all(map(is_gone, pids)), "its processes to end")
        assert [] == list(demo.temporary.iterdir())


def test_nodes_that_end_end_the_demo(tmp_path: Path) -> None:
    """Without its nodes a demo is none: it says so, and removes what they left."""

    with demo_in(tmp_path, "--port", "0") as demo:
        until(lambda: list(demo.temporary.glob("*/data")), "the nodes to work")
        _, nodes = demo.processes()
        os.kill(nodes, signal.SIGKILL)

        assert demo.popen.wait(30) == 1
        demo.said("the process that simulates the nodes ended unexpectedly")
        assert [] == list(demo.temporary.iterdir())


def test_the_last_node_is_lost_and_the_next_one_never_came(page: Page) -> None:
    """A node that falls silent is lost since then; one that is expected is missing."""

    def states() -> dict[str, str]:
        return {node["name"]: node["state"] for node in page.get("/status")["nodes"]}

    until(lambda: states()["gpu-03"] == "lost", "a node to be lost")

    assert {"gpu-01": "healthy", "gpu-02": "healthy", "gpu-03": "lost"} == states()
    assert ["gpu-04"] == page.get("/status")["missing_nodes"]


def test_one_signal_ends_it_and_nothing_is_left(page: Page) -> None:
    """Last of all: no process, no port, no directory, no word in the home directory."""

    demo = page.demo
    pids = demo.processes()

    assert demo.end(signal.SIGTERM) == 0
    until(lambda: all(map(is_gone, pids)), "its processes to end")
    assert is_free(page.port)
    assert [] == list(demo.temporary.iterdir())
    assert [] == list(demo.home.iterdir())
    assert "Traceback" not in demo.text
