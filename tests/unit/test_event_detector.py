"""What an agent tells about the time between two frames."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gpulse.cluster.agent.event_detector import EventDetector, shorten_command
from gpulse.model.device import Device, Node
from gpulse.model.finding import CodeLocation, Finding
from gpulse.model.frame import Frame, GpuReading, HostReading
from gpulse.model.process import GpuProcess, Owner, ProcessIdentity, ProcessReading
from gpulse.model.source_health import Health
from gpulse.store.event_decoder import check_event

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
def changes() -> EventDetector:
    """One that has seen its first frame."""
    made = EventDetector(version="1.2", pid=7)
    assert [_STARTED] == made(frame(0))
    return made


def test_a_process_is_told_when_it_comes_changes_and_goes(changes: EventDetector) -> None:
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


def test_a_pid_that_is_used_again_is_another_process(changes: EventDetector) -> None:
    """Its start tells them apart."""

    changes(frame(1, process(10, "a")))
    kinds = [event["event"] for event in changes(frame(2, process(10, "a", start=9.0)))]
    assert ["process_end", "process"] == kinds


def test_a_frame_of_which_nothing_could_be_read_ends_no_process(changes: EventDetector) -> None:
    """The processes may well be there."""

    changes(frame(1, process(10, "a")))
    assert [] == changes(Frame(time=1002, monotonic=2, node=Node("n")))
    assert [] == changes(frame(3, process(10, "a")))


def test_a_clock_that_was_set_is_told_with_its_seconds(changes: EventDetector) -> None:
    """Once, in the frame after it; a clock that is steered is not."""

    assert [] == changes(frame(1, offset=1000.4))
    assert [{"event": "clock_step", "seconds": -3600.0}] == changes(frame(2, offset=-2599.6))
    assert [] == changes(frame(3, offset=-2599.6))


def test_health_is_told_as_a_whole_when_it_changes(changes: EventDetector) -> None:
    """How long something lasts is no change."""

    def entry(seconds: int) -> Health:
        return Health("nvml", "not_answering", f"silent for {seconds} s", 3.0, "gpu 1", ("power_watts",))

    (told,) = changes(frame(1, health=(entry(1),)))
    assert "health" == told["event"]
    assert [{**entry(1)._asdict(), "metrics": ["power_watts"]}] == told["entries"]
    assert [] == changes(frame(2, health=(entry(2),)))
    assert [{"event": "health", "entries": []}] == changes(frame(3))


def test_that_nothing_is_wrong_is_told_after_a_while(changes: EventDetector) -> None:
    """An agent that has just started cannot know it yet, and what the one before it found may still hold."""
    told = [[event["event"] for event in changes(frame(second), [])] for second in (0, 30, 44, 45, 90)]
    assert [[], [], [], ["findings"], []] == told


def test_findings_are_told_when_they_change_and_their_numbers_now_and_then(changes: EventDetector) -> None:
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
    nothing: dict[str, Any] = {"event": "findings", "findings": [], "verdict": None}
    assert [{**nothing, "watched_seconds": 34}] == changes(frame(34), [])
    assert [nothing] == changes(frame(70), [])
    assert [] == changes(frame(170), [])
    json.dumps(told, allow_nan=False)


def test_another_line_is_told_at_once_and_another_share_is_not(changes: EventDetector) -> None:
    """The line that held the GPU up is part of what a finding says; its exact share changes all the time."""

    def finding(line: int, share: float) -> Finding:
        place = CodeLocation(7, "main", "/a/train.py", line, "step", share, 40)
        return Finding("x", "host", "high", 0.9, "s", gpu=0, label="0", where=(place,))

    first = [changes(frame(1), [finding(84, 0.8)]), changes(frame(2), [finding(84, 0.7)])]
    assert [1, 0] == [len(events) for events in first]
    (other,) = changes(frame(3), [finding(99, 0.7)])
    assert 99 == other["findings"][0]["where"][0]["line"]
    (none,) = changes(frame(4), [finding(99, 0.7)._replace(where=(), where_note="no single line")])
    assert ([], "no single line") == (none["findings"][0]["where"], none["findings"][0]["where_note"])


def test_lines_are_cut_to_what_heads_accept(changes: EventDetector) -> None:
    """A path keeps its end, names lose theirs, and only the first lines are sent."""

    place = CodeLocation(7, "worker", f"/{'d' * 5000}/train.py", 84, "f" * 5000, 0.8, 40, "g\n" * 5000)
    finding = Finding("x", "host", "high", 0.9, "s", where=(place,) * 50, where_note="n" * 5000)

    (event,) = changes(frame(1), [finding])

    (told,) = check_event(event)["findings"]
    assert (10, 1024) == (len(told["where"]), len(told["where_note"]))
    first = told["where"][0]
    assert (512, 256, 1024) == (len(first["file"]), len(first["function"]), len(first["doing"]))
    assert first["file"].startswith("…ddd")
    assert first["file"].endswith("d/train.py")
    assert first["doing"].isprintable()


def test_everything_is_told_again_on_request(changes: EventDetector) -> None:
    """Once, with the next frame of which something could be read; also that there is nothing to complain about."""

    entry = Health("nvml", "not_answering", "silent", 3.0, "gpu 1", ())
    told = changes(frame(1, process(10, "a"), process(11, "b"), health=(entry,)))
    changes.again()
    assert [] == changes(Frame(time=1002, monotonic=2, node=Node("n"), health=(entry,)))
    again = changes(frame(3, process(10, "a"), health=(entry,)))

    findings: dict[str, Any] = {"event": "findings", "findings": [], "verdict": None, "watched_seconds": 3}
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

    assert expected == shorten_command(command)


def test_whole_commands_on_request() -> None:
    """For those who want them."""

    changes = EventDetector(version="1.2", pid=7, full_commands=True)
    told = changes(frame(1, process(10, "/usr/bin/python3", "train.py", "--lr", "1")))[1]
    assert ["/usr/bin/python3", "train.py", "--lr", "1"] == told["command"]


def test_an_xid_error_names_the_processes_that_were_on_the_gpu(changes: EventDetector) -> None:
    """Those of the frame before count, too, because the error may have ended them; unknown ones are left out."""

    def gpus(*held: GpuProcess, errors: int, known: bool = True) -> tuple[GpuReading, ...]:
        values = {"xid_errors_total": errors, "xid_last_code": 94, "xid_last_timestamp_seconds": 1002.0}
        return (GpuReading(Device(0, "GPU-0", "H200"), values, held if known else None),)

    training = process(10, "/usr/bin/python3", "/home/ada/train.py", "--token", "s3cret")
    changes(frame(1, training)._replace(gpus=gpus(GpuProcess(10, "compute"), errors=0)))
    first = changes(frame(2)._replace(gpus=gpus(errors=1)))
    second = changes(frame(3)._replace(gpus=gpus(errors=2)))
    changes(frame(4)._replace(gpus=gpus(errors=2, known=False)))
    third = changes(frame(5)._replace(gpus=gpus(errors=3, known=False)))

    told = [check_event(event) for events in (first, second, third) for event in events if "code" in event]
    assert [{"pid": 10, "user": "ada", "name": "python3 train.py"}] == told[0]["holders"]
    assert [] == told[1]["holders"]
    assert "holders" not in told[2]
