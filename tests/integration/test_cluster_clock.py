"""Clocks that are set by an hour while agents and heads run."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from tests.integration.cluster import EAGER, AgentProcess, Cluster, HeadProcess, cluster_in, until
from tests.integration.stored import Stored, check_complete, check_times, read_stored, read_taken
from tests.prerequisites import find_faketime, require

_HOUR = 3600.0


class Clock:
    """The wall clock of one process, as a file says."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.set(0.0)

    def set(self, seconds: float) -> None:
        """Let it differ from the machine's by so much, from now on."""
        new = self._file.with_suffix(".new")
        new.write_text(f"{seconds:+.0f}s\n", encoding="ascii")
        new.rename(self._file)

    @property
    def env(self) -> dict[str, str]:
        """What the process needs."""
        return {
            "LD_PRELOAD": library(),
            "FAKETIME_TIMESTAMP_FILE": str(self._file),
            "FAKETIME_NO_CACHE": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "DONT_FAKE_MONOTONIC": "1",
            "FAKETIME_DONT_RESET": "1",
        }


def library() -> str:
    """libfaketime's, for programs with threads."""
    require("libfaketime")
    return find_faketime() or ""


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """Heads and agents for one test."""
    with cluster_in(tmp_path) as made:
        yield made


def more_frames(head: HeadProcess, count: int = 20) -> None:
    """Wait for so many more frames."""
    before = head.get("/status")["frames_received"]
    until(lambda: head.get("/status")["frames_received"] >= before + count, f"{count} more frames")


def ended(agent: AgentProcess, head: HeadProcess) -> Stored:
    """End both; what is stored, which is all that the agent took, in order."""
    assert agent.end() == 0, agent.text
    assert head.end() == 0, head.text
    found = read_stored(head.data_dir)
    check_complete(found, read_taken(agent.state_dir), agent.name)
    return found


@pytest.mark.slow
def test_agent_clock(cluster: Cluster, tmp_path: Path) -> None:
    """An agent whose clock is set by an hour, forward and back, goes on in order, and its times stay the head's."""

    clock = Clock(tmp_path / "clock")
    head = cluster.head("--freq", "50")
    began = time.time()
    agent = cluster.agent("node", head.port, tuned=EAGER, env=clock.env)
    more_frames(head)
    for seconds in (_HOUR, 0.0, -_HOUR):
        clock.set(seconds)
        more_frames(head)
    found = ended(agent, head)
    over = time.time()
    ((_, frames),) = found.of("node").items()
    assert began - 2.5 <= min(frames.values())
    assert max(frames.values()) <= over + 2.5
    check_times(frames)
    steps = [event.detail["seconds"] for event in found.said("clock_step", "node")]
    assert [round(step / 60.0) for step in steps] == [60, -60, -60]
    skews = [event.detail["seconds"] for event in found.said("clock_skew", "node")]
    assert [round(skew / 60.0) for skew in skews] == [60, 0, -60]


@pytest.mark.slow
def test_agent_clock_while_alone(cluster: Cluster, tmp_path: Path) -> None:
    """Clocks that are set while no head is there are put right when the frames come home."""

    clock = Clock(tmp_path / "clock")
    head = cluster.head("--freq", "50")
    began = time.time()
    agent = cluster.agent("node", head.port, tuned=EAGER, env=clock.env)
    more_frames(head)
    head.kill()
    kept = len(next(iter(read_taken(agent.state_dir).kept.values()), ()))
    for number, seconds in enumerate((_HOUR, -_HOUR, 0.0), 1):
        clock.set(seconds)
        wanted = kept + 15 * number
        until(
            lambda: sum(map(len, read_taken(agent.state_dir).kept.values())) >= wanted,  # noqa: B023
            "frames in the spool",
        )
    head = cluster.head(port=head.port, http_port=head.http_port)
    more_frames(head, 60)
    found = ended(agent, head)
    ((_, frames),) = found.of("node").items()
    assert began - 2.5 <= min(frames.values())
    assert max(frames.values()) <= time.time() + 2.5
    check_times(frames)
    assert len(found.said("clock_step", "node")) == 3


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [_HOUR, -_HOUR])
def test_head_clock(cluster: Cluster, tmp_path: Path, seconds: float) -> None:
    """A head whose clock is set says so, drops nothing, stays in order, and cuts sessions out where frames are."""

    clock = Clock(tmp_path / "clock")
    head = cluster.head("--freq", "50", env=clock.env)
    agent = cluster.agent("node", head.port, tuned=EAGER)
    more_frames(head)
    clock.set(seconds)
    head.said("clock was changed by")
    more_frames(head, 5)
    head.post("/profiling/start", {"name": "after"})
    more_frames(head)
    latest = head.get("/metrics/latest")
    assert latest["client_data"]["node"]["age_seconds"] < 60.0
    session = head.post("/profiling/stop", {"name": "after"})["sessions"][0]
    assert session["frame_count"] > 0
    assert head.nodes()["node"] == "healthy"
    found = ended(agent, head)
    (step,) = found.said("head_clock_step")
    assert abs(step.detail["seconds"] - seconds) < 60.0
    ((_, frames),) = found.of("node").items()
    check_times(frames)
    end = time.time() + max(0.0, seconds)
    assert abs(max(frames.values()) - end) < 10.0
    assert session_rows(head, "after") > 5


@pytest.mark.slow
def test_head_clock_set_back_before_a_restart(cluster: Cluster, tmp_path: Path) -> None:
    """Ten minutes forward, ten back, and a restart: a session goes on, and its file has frames from before and after."""

    clock = Clock(tmp_path / "clock")
    options = ("--freq", "50", "--auto-resume")
    head = cluster.head(*options, env=clock.env)
    agent = cluster.agent("node", head.port, tuned=EAGER)
    more_frames(head)
    clock.set(600.0)
    head.said("clock was changed by")
    more_frames(head, 5)
    head.post("/profiling/start", {"name": "kept"})
    more_frames(head)
    clock.set(0.0)
    until(lambda: head.text.count("clock was changed by") == 2, "the step back")
    more_frames(head, 5)
    assert head.end() == 0, head.text
    head = cluster.head(*options, port=head.port, http_port=head.http_port, env=clock.env)
    assert "behind the newest data" in head.text
    more_frames(head)
    (session,) = head.post("/profiling/stop", {"name": "kept"})["sessions"]
    assert session["frame_count"] > 20
    assert agent.end() == 0, agent.text
    assert head.end() == 0, head.text
    found = read_stored(head.data_dir)
    ((_, frames),) = found.of("node").items()
    times = list(frames.values())
    # On a busy machine the delay of the first message after the start counts as a difference of the clocks.
    assert all(later > earlier - 60.0 for earlier, later in pairwise(times))
    assert max(times) - min(times) < 900.0
    steps = [round(event.detail["seconds"] / 60.0) for event in found.said("head_clock_step")]
    assert steps == [10, -10, -10]
    assert session_rows(head, "kept") > 20


def session_rows(head: HeadProcess, name: str) -> int:
    """How many frames of a session's file have a reading."""
    import json  # noqa: PLC0415

    document = json.loads((head.output_dir / f"{name}.json").read_text(encoding="utf-8"))
    return sum(any(value is not None for value in frame["gpu_util"]) for frame in document["frames"])
