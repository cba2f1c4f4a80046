"""Agents as real processes, against a head that is killed, cut off, silent, or does not want them."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from gpulse.cluster.agent.frame_buffer import BufferedFrame
from gpulse.cluster.agent.spool import Spool
from gpulse.model.packed_columns import ColumnBlock, PackedFrame, layout_id
from tests.integration.cluster import free_port, until
from tests.integration.commands import environment, start
from tests.integration.stored import read_taken

_PATIENCE_SECONDS = 60.0
_ROOT = Path(__file__).parents[2]
_IMPATIENT = {"gpulse.cluster.agent.connection:_MAX_DISPLACED_SECONDS": 1.5}
"""An agent that soon gives up when another one has its place."""
_EAGER = {"gpulse.cluster.agent.head_selection:STABLE_SECONDS": 0.0}
"""And one that counts every connection as a good one, and so never waits for more than a second to try again."""

Event = dict[str, Any]


class Head:
    """A fake head in a process of its own."""

    def __init__(self, store: Path, *options: str) -> None:
        self.store = store
        self.process = start(
            store,
            *options,
            module="tests.integration.fake_head",
            env=environment(),
            cwd=_ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self.seen: list[Event] = []
        self._rest = b""
        self.port = self.until(lambda event: event["kind"] == "listening")["port"]

    def until(self, wanted: Callable[[Event], bool]) -> Event:
        """Wait until something happens; everything that happens is in `seen`."""
        assert self.process.stdout is not None
        descriptor = self.process.stdout.fileno()
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while time.monotonic() < deadline:
            while b"\n" in self._rest:
                line, _, self._rest = self._rest.partition(b"\n")
                event: Event = json.loads(line)
                self.seen.append(event)
                assert "wrong" != event["kind"], event
                if wanted(event):
                    return event
            if select.select([descriptor], [], [], 1.0)[0]:
                piece = os.read(descriptor, 1 << 16)
                assert piece, "the head has ended"
                self._rest += piece
        pytest.fail(f"it did not happen; the last things that did: {self.seen[-5:]}")

    def until_kind(self, kind: str) -> Event:
        """Wait for the next event of a kind."""
        return self.until(lambda event: event["kind"] == kind)

    def until_frame(self, sequence: int) -> Event:
        """Wait for a frame of a run, whichever."""
        return self.until(
            lambda event: event["kind"] == "batch" and event["first"] + event["count"] > sequence
        )

    def tell(self, **order: Any) -> None:
        """Change how it behaves."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order).encode() + b"\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        """As kill -9 does."""
        self.process.kill()
        self.process.wait()
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()

    def got(self) -> dict[str, list[int]]:
        """The frames it has, by run, in the order in which they came."""
        runs: dict[str, list[int]] = {}
        for line in self.store.read_text().splitlines():
            run, sequence = line.split()[:2]
            runs.setdefault(run, []).append(int(sequence))
        return runs


class Agent:
    """An agent in a process of its own."""

    def __init__(
        self, port: int, state: Path, *options: str, env: dict[str, str] | None = None, eager: bool = False
    ) -> None:
        self.log = state.with_suffix(".log")
        with self.log.open("ab") as log:
            self.process = start(
                *("agent", f"127.0.0.1:{port}", "--demo", "--state-dir", str(state), *options),
                env=environment({"XDG_CONFIG_HOME": str(state), **(env or {})}),
                stderr=log,
                tuned={**_IMPATIENT, **(_EAGER if eager else {})},
            )

    def end(self, number: int = signal.SIGTERM) -> int:
        """End it and give its exit code."""
        self.process.send_signal(number)
        return self.process.wait(_PATIENCE_SECONDS)

    def until_said(self, text: str) -> None:
        """Wait until it has logged something."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while text not in self.log.read_text():
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.02)


class Cluster:
    """Starts heads and agents, and ends what is left of them."""

    def __init__(self, directory: Path, ends: ExitStack) -> None:
        self.directory = directory
        self._ends = ends
        self.port = free_port()

    def until_spooled(self, frames: int, state: str = "state") -> None:
        """Wait until an agent has written this many frames to its spool."""
        directory = self.directory / state

        def is_there() -> bool:
            return any((directory / "spool").glob("*.log")) and frames <= sum(
                map(len, read_taken(directory).kept.values())
            )

        until(is_there, f"{frames} frames in the spool")

    def head(self, *options: str, store: str = "store") -> Head:
        """Start a head; always at the same port."""
        head = Head(self.directory / store, "--port", str(self.port), *options)
        self._ends.callback(head.kill)
        return head

    def agent(
        self, *options: str, state: str = "state", env: dict[str, str] | None = None, eager: bool = False
    ) -> Agent:
        """Start an agent; always with the same state."""
        agent = Agent(self.port, self.directory / state, *options, env=env, eager=eager)
        self._ends.callback(agent.process.wait)
        self._ends.callback(agent.process.kill)
        return agent


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """A head and agents to be."""
    with ExitStack() as ends:
        yield Cluster(tmp_path, ends)


def whole(numbers: list[int]) -> bool:
    """Every frame from the first on, once and in order."""
    return numbers == [*range(1, len(numbers) + 1)]


def test_an_agent_sends_says_goodbye_and_leaves(cluster: Cluster) -> None:
    """Hello, frames, events; then SIGTERM ends it, exit 0, with nothing left to send."""

    head = cluster.head()
    agent = cluster.agent("--label", "rack=7", "--node-name", "node-a")
    hello = head.until_kind("hello")
    assert ("node-a", {"rack": "7"}, agent.process.pid) == (hello["host"], hello["labels"], hello["pid"])
    assert "580.159.04" == hello["node"]["driver"]
    first = head.until_kind("batch")
    assert ["agent_started", "process"] == [event["event"] for event in first["events"][:2]]
    head.until_frame(20)
    assert 0 == agent.end()
    head.until_kind("goodbye")
    (numbers,) = head.got().values()
    assert whole(numbers)
    last = [event for event in head.seen if event["kind"] == "batch"][-1]
    assert "agent_stopping" == last["events"][-1]["event"]


def test_ctrl_c_is_as_good(cluster: Cluster) -> None:
    """Also without any head: exit 0."""

    agent = cluster.agent()
    agent.until_said("cannot connect")
    assert 0 == agent.end(signal.SIGINT)


@pytest.mark.slow
def test_a_head_that_is_killed_again_and_again(cluster: Cluster) -> None:
    """Every frame is there once and in order, whatever the head had not written when it died."""

    agent = cluster.agent("--interval", "0.05", eager=True)
    for frame in (10, 30, 50, 70):
        head = cluster.head()
        head.until_frame(frame)
        head.kill()
    head = cluster.head()
    head.until_frame(100)
    assert 0 == agent.end()
    head.until_kind("goodbye")
    (numbers,) = head.got().values()
    assert whole(numbers)
    assert len(numbers) >= 100


@pytest.mark.slow
def test_a_head_that_comes_late_gets_everything(cluster: Cluster) -> None:
    """More than memory holds: the rest comes back from the spool, zipped, before the newest."""

    agent = cluster.agent("--interval", "0.05", "--memory-frames", "20")
    cluster.until_spooled(40)
    head = cluster.head()
    head.until(lambda event: event["kind"] == "batch" and event["zipped"])
    head.until_frame(60)
    assert 0 == agent.end()
    head.until_kind("goodbye")
    (numbers,) = head.got().values()
    assert whole(numbers)
    assert "frames from the spool" in agent.log.read_text()
    assert not any(event["kind"] == "dropped" for event in head.seen)


@pytest.mark.slow
def test_an_agent_that_is_killed_loses_at_most_a_second(cluster: Cluster) -> None:
    """Its next life sends what the spool has, and says how much may be missing."""

    first = cluster.agent("--interval", "0.05")
    cluster.until_spooled(20)
    first.process.kill()
    first.process.wait()
    head = cluster.head()
    second = cluster.agent("--interval", "0.05")
    old, own = head.until_kind("hello")["runs"]
    assert (True, 1) == (old["ended_badly"], old["first_kept"])
    assert (False, 0) == (own["ended_badly"], own["lost_at_most"])
    head.until(lambda event: event["kind"] == "batch" and event["run"] == own["id"] and event["first"] > 30)
    assert 0 == second.end()
    head.until_kind("goodbye")
    got = head.got()
    assert [old["id"], own["id"]] == list(got)
    assert whole(got[old["id"]])
    assert whole(got[own["id"]])
    assert len(got[old["id"]]) >= 20


@pytest.mark.slow
def test_a_run_is_told_of_until_the_head_has_it(cluster: Cluster) -> None:
    """After a clean end nothing is left, so that the third life announces itself alone."""

    head = cluster.head()
    for _ in range(3):
        agent = cluster.agent("--interval", "0.05")
        hello = head.until_kind("hello")
        own = hello["runs"][-1]["id"]
        head.until(lambda e, own=own: e["kind"] == "batch" and e["run"] == own and e["first"] > 20)  # type: ignore[misc]
        assert 0 == agent.end()
        head.until_kind("goodbye")
        assert len(hello["runs"]) <= 2
        assert not any(run["ended_badly"] or run["dropped"] for run in hello["runs"])


def test_a_clean_end_without_a_head_keeps_everything(cluster: Cluster) -> None:
    """The next life brings it home, and nothing is said to be missing."""

    first = cluster.agent("--interval", "0.05")
    first.until_said("cannot connect")
    assert 0 == first.end()
    head = cluster.head()
    second = cluster.agent("--interval", "0.05")
    old, own = head.until_kind("hello")["runs"]
    assert (False, 0, 0) == (old["ended_badly"], old["lost_at_most"], old["dropped"])
    head.until(lambda event: event["kind"] == "batch" and event["run"] == own["id"])
    assert 0 == second.end()
    assert all(whole(numbers) for numbers in head.got().values())


def test_a_full_spool_gives_up_the_oldest_and_says_how_many(cluster: Cluster) -> None:
    """What is missing at the head is exactly what was reported, and what the missing ones told is told again."""

    agent = cluster.agent("--interval", "0.05", "--memory-frames", "5", "--spool-limit", "1MiB")
    agent.until_said("no space for unsent frames")
    head = cluster.head()
    hello = head.until_kind("hello")
    head.until_kind("gap")
    head.until(
        lambda e: e["kind"] == "batch" and {"agent_started", "process"} <= {x["event"] for x in e["events"]}
    )
    agent.end()
    head.until_kind("goodbye")
    reported = max([hello["runs"][0]["dropped"], *(e["frames"] for e in head.seen if e["kind"] == "dropped")])
    gaps = [event["frames"] for event in head.seen if event["kind"] == "gap"]
    (numbers,) = head.got().values()
    missing = set(range(1, numbers[-1] + 1)) - set(numbers)
    assert reported == sum(gaps) == len(missing)
    assert sorted(numbers) == numbers


def test_settings_of_the_head_take_effect_at_once(cluster: Cluster) -> None:
    """An agent that would take its next frame in ten minutes takes it now."""

    head = cluster.head("--interval-ms", "600000")
    cluster.agent()
    head.until_kind("batch")
    head.tell(interval_ms=50)
    head.until_frame(20)


def test_frames_are_on_disk_though_the_head_is_silent(cluster: Cluster) -> None:
    """A head that takes everything and acknowledges nothing is not believed."""

    head = cluster.head("--silent")
    agent = cluster.agent("--interval", "0.05")
    event = head.until_kind("batch")
    cluster.until_spooled(1)
    agent.process.kill()
    agent.process.wait()
    cluster.agent("--interval", "0.05")
    run = head.until(lambda e: e["kind"] == "hello")["runs"][0]
    assert (event["run"], 1) == (run["id"], run["first_kept"])
    head.tell(acknowledge=True)


@pytest.mark.parametrize(
    ("code", "hint"),
    [
        ("FAILED_PRECONDITION", "same version"),
        ("UNAUTHENTICATED", "--token-file"),
        ("INVALID_ARGUMENT", "refused this agent: the head uses protocol 9\n"),
        ("ALREADY_EXISTS", "refused this agent: the head uses protocol 9\n"),
    ],
)
def test_an_agent_that_is_not_wanted_ends_with_a_reason(cluster: Cluster, code: str, hint: str) -> None:
    """At the first contact; exit 1, no traceback."""

    cluster.head("--refuse", code, "--reason", "the head uses protocol 9")
    agent = cluster.agent()
    assert 1 == agent.process.wait(_PATIENCE_SECONDS)
    said = agent.log.read_text()
    assert "the head uses protocol 9" in said
    assert hint in said
    assert ("same version" in said) == (code == "FAILED_PRECONDITION"), (
        "the head's own words say what is wrong"
    )
    assert "Traceback" not in said


def test_a_port_where_http_is_spoken_is_named(cluster: Cluster) -> None:
    """The agent ends at once and says which port it should be, not what gRPC makes of it."""

    with ThreadingHTTPServer(("127.0.0.1", cluster.port), SimpleHTTPRequestHandler) as server:
        server.handle_error = lambda *_: None  # type: ignore[method-assign]  # what is no HTTP is no news
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            agent = cluster.agent()
            assert 1 == agent.process.wait(_PATIENCE_SECONDS)
        finally:
            server.shutdown()
            thread.join()
    said = agent.log.read_text()
    assert f"127.0.0.1:{cluster.port} is an HTTP port; agents use the gRPC port (default: 8090)" in said
    assert "cannot connect" not in said


def test_a_head_that_is_not_there_is_told_in_plain_words(cluster: Cluster) -> None:
    """And Ctrl-C ends the agent all the same."""

    agent = cluster.agent()
    agent.until_said(f"cannot connect to 127.0.0.1:{cluster.port} (nothing is listening at")
    assert 0 == agent.end(signal.SIGINT)


def test_a_head_with_another_store_is_told_everything(cluster: Cluster) -> None:
    """The frames that told it are not sent again, so the next one does."""

    head = cluster.head("--interval-ms", "50")
    agent = cluster.agent()
    first = head.until_kind("batch")["events"]
    head.until_frame(10)
    head.kill()
    other = cluster.head("--interval-ms", "50", "--head-id", "store-2", store="other")
    again = other.until(
        lambda e: e["kind"] == "batch" and any(event["event"] == "agent_started" for event in e["events"])
    )["events"]
    told = {event["pid"] for event in again if event["event"] == "process"}
    assert told
    assert told >= {event["pid"] for event in first if event["event"] == "process"}
    assert {"health", "findings"} <= {event["event"] for event in again}
    assert 0 == agent.end()


@pytest.mark.slow
def test_more_runs_than_a_head_takes_at_once(cluster: Cluster) -> None:
    """They are brought home in parts, the oldest first, and none is lost."""

    texts = {layout_id(b"one"): b"one"}
    (layout,) = texts
    spool = Spool(cluster.directory / "state" / "spool")
    runs = [b"%016d" % number for number in range(2_500)]
    for number, run in enumerate(runs, 1):
        data = PackedFrame(number + 5, number, (ColumnBlock(layout, bytes(10)),)).to_bytes()
        spool.append(run, [BufferedFrame(1, data, (layout,), 5)], 0, texts, b'{"runs":[],"head":""}')
    spool.close()

    head = cluster.head()
    agent = cluster.agent()
    wanted = {run.hex() for run in runs}

    def is_complete(event: Event) -> bool:
        if event["kind"] == "batch":
            wanted.discard(event["run"])
        return not wanted

    head.until(is_complete)
    assert 0 == agent.end()
    hellos = [len(event["runs"]) for event in head.seen if event["kind"] == "hello"]
    assert max(hellos) <= 1000
    assert len(hellos) >= 3
    assert "refused" not in agent.log.read_text()


@pytest.mark.parametrize("code", ["UNAUTHENTICATED", "ALREADY_EXISTS"])
def test_a_head_that_refuses_later_is_asked_again(cluster: Cluster, code: str) -> None:
    """An agent that was welcome once does not end."""

    head = cluster.head()
    agent = cluster.agent()
    head.until_frame(3)
    head.kill()
    cluster.head("--refuse", code, "--reason", "who are you")
    agent.until_said("who are you")
    assert agent.process.poll() is None
    assert 0 == agent.end()


def test_two_agents_cannot_share_a_state(cluster: Cluster) -> None:
    """The second is told who has it."""

    head = cluster.head()
    first = cluster.agent()
    head.until_kind("hello")
    second = Agent(cluster.port, cluster.directory / "state")
    assert 1 == second.process.wait(_PATIENCE_SECONDS)
    assert f"process {first.process.pid}" in second.log.read_text()
    assert 0 == first.end()


def test_a_token_is_shown(cluster: Cluster) -> None:
    """From the environment, never from the command line."""

    head = cluster.head()
    cluster.agent(env={"GPULSE_TOKEN": "s" * 20})
    assert "Bearer " + "s" * 20 == head.until_kind("hello")["token"]


def test_a_state_that_cannot_be_written(cluster: Cluster) -> None:
    """The agent goes on in memory alone, and says so once."""

    head = cluster.head()
    (cluster.directory / "file").write_text("")
    agent = Agent(cluster.port, cluster.directory / "agent", "--state-dir", str(cluster.directory / "file/x"))
    head.until_frame(15)
    assert 0 == agent.end()
    assert 1 == agent.log.read_text().count("only in memory")
    (numbers,) = head.got().values()
    assert whole(numbers)


def test_a_damaged_spool_loses_only_what_is_damaged(cluster: Cluster) -> None:
    """The damage is named, a copy of the file is kept, and all other frames arrive."""

    first = cluster.agent("--interval", "0.05")
    cluster.until_spooled(10)
    first.end()
    (segment,) = (cluster.directory / "state" / "spool").glob("*.log")
    data = bytearray(segment.read_bytes())
    data[len(data) // 2] ^= 1
    segment.write_bytes(data)
    head = cluster.head()
    second = cluster.agent()
    head.until_frame(3)
    assert 0 == second.end()
    assert [segment.name] == [
        path.name.removeprefix("spool-") for path in (cluster.directory / "state" / "damaged").iterdir()
    ]
    assert "is damaged" in second.log.read_text()


def test_in_the_background(cluster: Cluster) -> None:
    """The command returns once the agent runs, says where the log is, and the agent outlives it."""

    head = cluster.head()
    agent = Agent(cluster.port, cluster.directory / "state", "--background")
    assert 0 == agent.process.wait(_PATIENCE_SECONDS)
    hello = head.until_kind("hello")
    pid = int((cluster.directory / "state" / "agent.pid").read_text())
    try:
        assert pid == hello["pid"] != agent.process.pid
        head.until_frame(5)
        assert "connected to" in (cluster.directory / "state" / "agent.log").read_text()
    finally:
        os.kill(pid, signal.SIGTERM)
    head.until_kind("goodbye")
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not Path(f"/proc/{pid}").exists()
