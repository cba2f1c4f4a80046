"""What an agent tells about the time between two frames."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gpulse.cluster.agent.changes import Changes, shortened
from gpulse.model.device import Node
from gpulse.model.finding import Finding
from gpulse.model.frame import Frame, HostReading
from gpulse.model.health import Health
from gpulse.model.process import Owner, ProcessIdentity, ProcessReading

_STARTED = {"event": "agent_started", "version": "1.2", "pid": 7}


def frame(
    time: float,
    *processes: ProcessReading,
    offset: float = 1000.0,
    health: tuple[Health, ...] = (),
) -> Frame:
    """A frame so many seconds after boot."""
    return Frame(
        time=time + offset,
        monotonic=time,
        node=Node("n"),
        host=HostReading({}),
        processes=processes,
        health=health,
    )


def process(pid: int, *command: str, on_gpu: bool = True, start: float = 5.0) -> ProcessReading:
    """A process."""
    identity = ProcessIdentity(pid, 1, start, "python3", command, Owner(user="ada", uid=1000))
    return ProcessReading(identity, "R", {}, on_gpu=on_gpu)


@pytest.fixture
def changes() -> Changes:
    """One that has seen its first frame."""
    made = Changes(version="1.2", pid=7)
    assert [_STARTED] == made(frame(0))
    return made


def test_a_process_is_told_when_it_comes_changes_and_goes(changes: Changes) -> None:
    """Once each, and nothing in between."""

    came = changes(frame(1, process(10, "/usr/bin/python3", "train.py", "--token", "s3cret")))
    told = {
        "event": "process",
        "pid": 10,
        "start_time": 5.0,
        "parent_pid": 1,
        "name": "python3",
        "command": ["python3", "train.py"],
        "owner": {"user": "ada", "uid": 1000, "job": None, "container": None, "pod": None},
        "on_gpu": True,
    }
    assert [told] == came
    assert [] == changes(frame(2, process(10, "/usr/bin/python3", "train.py", "--token", "s3cret")))
    assert [{**told, "command": ["bash"]}] == changes(frame(3, process(10, "bash")))
    assert [{**told, "command": ["bash"], "on_gpu": False}] == changes(
        frame(4, process(10, "bash", on_gpu=False))
    )
    assert [{"event": "process_end", "pid": 10, "start_time": 5.0}] == changes(frame(5))


def test_a_pid_that_is_used_again_is_another_process(changes: Changes) -> None:
    """Its start tells them apart."""

    changes(frame(1, process(10, "a")))
    kinds = [event["event"] for event in changes(frame(2, process(10, "a", start=9.0)))]
    assert ["process_end", "process"] == kinds


def test_a_frame_of_which_nothing_could_be_read_ends_no_process(changes: Changes) -> None:
    """The processes may well be there."""

    changes(frame(1, process(10, "a")))
    assert [] == changes(Frame(time=1002, monotonic=2, node=Node("n")))
    assert [] == changes(frame(3, process(10, "a")))


def test_a_clock_that_was_set_is_told_with_its_seconds(changes: Changes) -> None:
    """Once, in the frame after it; a clock that is steered is not."""

    assert [] == changes(frame(1, offset=1000.4))
    assert [{"event": "clock_step", "seconds": -3600.0}] == changes(frame(2, offset=-2599.6))
    assert [] == changes(frame(3, offset=-2599.6))


def test_health_is_told_as_a_whole_when_it_changes(changes: Changes) -> None:
    """How long something lasts is no change."""

    def entry(seconds: int) -> Health:
        return Health("nvml", "not_answering", f"silent for {seconds} s", 3.0, "gpu 1", ("power_watts",))

    (told,) = changes(frame(1, health=(entry(1),)))
    assert "health" == told["event"]
    assert [{**entry(1)._asdict(), "metrics": ["power_watts"]}] == told["entries"]
    assert [] == changes(frame(2, health=(entry(2),)))
    assert [{"event": "health", "entries": []}] == changes(frame(3))


def test_that_nothing_is_wrong_is_told_after_a_while(changes: Changes) -> None:
    """An agent that has just started cannot know it yet, and what the one before it found may still hold."""
    told = [[event["event"] for event in changes(frame(second), [])] for second in (0, 30, 44, 45, 90)]
    assert [[], [], [], ["findings"], []] == told


def test_findings_are_told_when_they_change_and_their_numbers_now_and_then(changes: Changes) -> None:
    """At once when one comes or gets worse, every half minute otherwise, and when the last one goes."""

    def finding(severity: Any, end: float) -> Finding:
        return Finding("x", "input", severity, 0.9, f"until {end}", gpu=0, label="0", end=end)

    (told,) = changes(frame(1), [finding("low", 1)])
    assert ("findings", "until 1") == (told["event"], told["verdict"])
    assert [finding("low", 1).to_dict()] == told["findings"]
    assert [] == changes(frame(2), [finding("low", 2)])
    assert 1 == len(changes(frame(3), [finding("high", 3)]))
    assert [] == changes(frame(32), [finding("high", 32)])
    (again,) = changes(frame(33), [finding("high", 33)])
    assert "until 33" == again["verdict"]
    assert [{"event": "findings", "findings": [], "verdict": None}] == changes(frame(34), [])
    assert [] == changes(frame(70), [])
    json.dumps(told, allow_nan=False)


def test_everything_is_told_again_on_request(changes: Changes) -> None:
    """Once, with the next frame of which something could be read; also that there is nothing to complain about."""

    entry = Health("nvml", "not_answering", "silent", 3.0, "gpu 1", ())
    told = changes(frame(1, process(10, "a"), process(11, "b"), health=(entry,)))
    changes.again()
    assert [] == changes(Frame(time=1002, monotonic=2, node=Node("n"), health=(entry,)))
    again = changes(frame(3, process(10, "a"), health=(entry,)))

    findings: dict[str, Any] = {"event": "findings", "findings": [], "verdict": None}
    ended = {"event": "process_end", "pid": 11, "start_time": 5.0}
    assert [_STARTED, ended, told[0], told[2], findings] == again
    assert [] == changes(frame(4, process(10, "a"), health=(entry,)))


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ((), ()),
        (("",), ()),
        (("/opt/python3.11", "-u", "/home/ada/train.py", "--key", "k"), ("python3.11", "train.py")),
        (
            ("python", "-m", "torch.distributed.run", "--x", "train.py"),
            ("python", "-m", "torch.distributed.run"),
        ),
        (("python", "-c", "password = 'x.py'", "a.py"), ("python",)),
        (("torchrun", "--nproc", "8", "train.py"), ("torchrun", "train.py")),
        (("curl", "-H", "Authorization: secret"), ("curl",)),
        (("ray::worker secret",), ("ray::worker",)),
    ],
)
def test_a_command_is_program_and_script(command: tuple[str, ...], expected: tuple[str, ...]) -> None:
    """The rest may hold secrets."""

    assert expected == shortened(command)


def test_whole_commands_on_request() -> None:
    """For those who want them."""

    changes = Changes(version="1.2", pid=7, full_commands=True)
    told = changes(frame(1, process(10, "/usr/bin/python3", "train.py", "--lr", "1")))[1]
    assert ["/usr/bin/python3", "train.py", "--lr", "1"] == told["command"]
