"""How a scheduler's jobs travel: in recordings, as an agent's events, and into what a head knows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gpulse.cluster.agent.event_detector import EventDetector
from gpulse.cluster.head.fleet import Fleet, FleetMember
from gpulse.model.device import Node
from gpulse.model.frame import Frame, HostReading
from gpulse.model.frame_packing import FramePacker
from gpulse.model.job import Job, job_from_document
from gpulse.model.recording_codec import RecordingDecoder, RecordingEncoder
from gpulse.store.local import LocalStore
from gpulse.store.log.record_payloads import LogEntry
from gpulse.store.store import StoredNode
from tests.unit.metadata_records import node_fact

ONE = Job("slurm:1", "ada", 1000, "train", "gpu", "ml", ("GPU-0", "GPU-1"), "environment", "1_3")
TWO = Job("slurm:2", "eve", 1001)
TOLD = {
    "event": "job",
    "id": "slurm:1",
    "user": "ada",
    "uid": 1000,
    "name": "train",
    "partition": "gpu",
    "account": "ml",
    "gpus": ["GPU-0", "GPU-1"],
    "source": "environment",
    "array": "1_3",
}


def frame(time: float, *jobs: Job) -> Frame:
    """A frame of a machine with these jobs."""
    return Frame(time, time, Node("n"), host=HostReading({}), jobs=jobs)


def changes() -> EventDetector:
    """One that has seen its first frame."""
    made = EventDetector(version="1", pid=7)
    made(frame(0))
    return made


def event(kind: str, time: float, **detail: Any) -> LogEntry:
    """Something that a node told."""
    return LogEntry.of_fact("event", time=time, kind=kind, node=1, detail=detail)


def test_a_job_is_told_when_it_comes_changes_and_goes() -> None:
    """Once each, and nothing in between."""

    tell = changes()

    assert [TOLD] == tell(frame(1, ONE))
    assert [] == tell(frame(2, ONE))
    assert [{**TOLD, "gpus": ["GPU-0"]}] == tell(frame(3, ONE._replace(gpus=("GPU-0",))))
    assert ["job_end", "job"] == [told["event"] for told in tell(frame(4, TWO))]
    assert [{"event": "job_end", "job": "slurm:2"}] == tell(frame(5))


def test_jobs_are_told_again_when_everything_is() -> None:
    """A head that has not heard of them hears of all of them."""

    tell = changes()
    tell(frame(1, ONE, TWO))
    tell.again()

    assert ["slurm:1", "slurm:2"] == [
        told["id"] for told in tell(frame(2, ONE, TWO)) if told["event"] == "job"
    ]


def test_a_frame_that_could_not_be_read_ends_no_job() -> None:
    """It says nothing about the machine."""

    tell = changes()
    tell(frame(1, ONE))

    assert [] == tell(Frame(2, 2, Node("n")))
    assert [] == tell(frame(3, ONE))


def test_a_recording_keeps_jobs() -> None:
    """They are written when they change, hold until then, and an end is a change, too."""

    frames = [frame(1), frame(2, ONE), frame(3, ONE), frame(4, ONE, TWO), frame(5)]
    encoder, decoder = RecordingEncoder(), RecordingDecoder()
    lines = [line for one in frames for line in encoder.lines(one)]

    assert frames == [found for line in lines if (found := decoder.feed(line)) is not None]
    assert [False, True, False, True, True] == [
        "jobs" in document["frame"] for document in map(json.loads, lines) if "frame" in document
    ]


def test_a_job_is_read_from_whatever_was_told() -> None:
    """Fields that are not of their kind are left out, further ones passed over."""

    assert ONE == job_from_document({**TOLD, "colour": "blue"})
    assert Job("x") == job_from_document({"id": "x", "uid": "y", "user": 7, "gpus": None})
    documents: list[Any] = [[], {}, {"id": 7}, {"id": "x", "gpus": "GPU-0"}]
    for wrong in documents:
        with pytest.raises(ValueError, match="job"):
            job_from_document(wrong)


def test_a_head_shows_the_jobs_that_are_there() -> None:
    """Until they end, or their agent starts anew; what is no job harms nobody."""

    member = FleetMember(StoredNode(1, "n", "n", "m", 0.0, {}, {}), 0.0)
    packed, _ = FramePacker().pack(frame(1))
    member.take(packed._replace(blocks=()), {}, 0)

    def shown(*events: dict[str, Any]) -> tuple[Job, ...]:
        member.apply_events(events, 1.0)
        member.take(packed._replace(blocks=()), {}, 0)
        found = member.frame({})
        assert found is not None
        return found.jobs

    assert (ONE, TWO) == shown(
        TOLD, {"event": "job", "id": "slurm:2", "user": "eve", "uid": 1001}, {"event": "job"}
    )
    assert (TWO,) == shown({"event": "job_end", "job": "slurm:1"}, {"event": "job_end"})
    assert () == shown({"event": "agent_started"})


def test_a_head_that_starts_again_knows_the_jobs_it_was_told_of(tmp_path: Path) -> None:
    """Agents tell them once, which may have been days ago."""

    told = {name: value for name, value in TOLD.items() if name != "event"}
    with LocalStore(str(tmp_path)) as archive:
        archive.commit(
            [
                LogEntry.of_fact(**node_fact()),
                event("job", 900.0, id="slurm:0"),
                event("agent_started", 1000.0),
                event("job", 1001.0, **told),
                event("job", 1002.0, id="slurm:2"),
                event("job_end", 1003.0, job="slurm:2"),
            ]
        )
        fleet = Fleet(archive.nodes(), {}, {})
        fleet.restore(archive, 5000.0)

    assert {"slurm:1": ONE} == fleet.members[1].jobs
