"""Reports about jobs: figures that are right, GPUs that were shared, idle or never touched, and what is not known."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import msgspec
import pytest

from gpulse.errors import RefusedError
from gpulse.export.job_report_text import one_line_summary
from gpulse.model.frame import Frame
from gpulse.model.job import Job
from gpulse.model.session import Session
from gpulse.reports.job_report import JobReport
from gpulse.store.log.record_payloads import LogEntry
from tests.unit.job_documents import read
from tests.unit.report_lab import BEGIN, Document, Held, Lab, check_alike

HOUR = range(0, 3600, 5)
SCHEMA = msgspec.json.schema(JobReport)
BUSY = {
    "gpu_utilization_ratio": 0.8,
    "sm_active_ratio": 0.6,
    "power_watts": 500.0,
    "memory_used_bytes": 9 << 30,
}
QUIET = {
    "gpu_utilization_ratio": 0.0,
    "sm_active_ratio": 0.0,
    "power_watts": 100.0,
    "memory_used_bytes": 1 << 30,
}


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    """Two nodes with two GPUs each."""
    with Lab(tmp_path, ("0", "1"), ("0", "1")) as lab:
        yield lab


def given(*gpus: str, number: str = "slurm:4711", **more: Any) -> Job:
    """A job and the GPUs of the first node that it was given."""
    told = {"user": "ada", "name": "llama", "partition": "gpu", **more}
    return Job(number, gpus=tuple(f"GPU-1-{gpu}" for gpu in gpus), **told)


def told(document: Document, *names: str) -> tuple[Any, ...]:
    """Some of what a document says."""
    return tuple(document[name] for name in names)


async def test_a_job_alone(lab: Lab) -> None:
    """Who, where, when and how much; means and peaks of its GPU while it held it; energy; nothing that is unknown."""
    own = Held(7, job="slurm:4711", memory=5 << 30)
    lab.fill(range(0, 600, 5), values={"0": QUIET, "1": QUIET})
    lab.fill(range(600, 1195, 5), own, values={"0": BUSY, "1": QUIET})
    lab.fill([1195], own, values={"0": {**BUSY, "power_watts": 700.0}, "1": QUIET})
    lab.fill(range(1200, 1800, 5), values={"0": QUIET, "1": QUIET})

    answer = await lab.job("4711", now=1800, points=10)

    jsonschema_rs.validate(SCHEMA, answer)
    assert ("slurm:4711", "job", "ended", "ada", ["n1"], 1, 1) == told(
        answer, "job", "kind", "state", "user", "nodes", "gpus", "processes"
    )
    assert (BEGIN + 600, BEGIN + 1200) == told(answer, "from", "to")
    assert (600.0, 0.0, 0.8, 5 << 30) == told(
        answer, "gpu_seconds", "idle_seconds", "utilization_mean", "memory_bytes_max"
    )
    assert 600 * 500.0 + 5 * 200.0 == pytest.approx(answer["energy_joules"], rel=1e-3)
    assert {"unit": "1", "mean": 0.6, "max": 0.6} == answer["metrics"]["sm_active_ratio"]
    assert 700.0 == answer["metrics"]["power_watts"]["max"]
    assert "tensor_active_ratio" not in answer["metrics"]
    assert (None, None, None, 0.0, []) == told(
        answer, "allocated_seconds", "unused_seconds", "untouched_gpus", "missing_seconds", "missing"
    )
    assert 10 >= len(answer["series"]["times"]) > 5
    assert {0.8} == set(answer["series"]["gpus"][0]["values"])
    assert (await lab.job("4711", now=1800))["series"] is None


async def test_a_shared_gpu_is_divided_by_sm_time(lab: Lab) -> None:
    """Two jobs of two users on one GPU have what they used of it; each of them held it all the time, idle or not."""
    ada, bob = Held(7, job="slurm:1", sm=0.6), Held(8, user="bob", job="slurm:2", sm=0.2)
    lab.fill(range(0, 1200, 5), ada, bob, values={"0": BUSY})
    lab.fill(range(1200, 2400, 5), ada._replace(sm=0.0), bob._replace(sm=0.0), values={"0": QUIET})

    one, two = [await lab.job(number, now=2400) for number in ("slurm:1", "slurm:2")]

    names = "user", "gpu_seconds", "held_seconds", "idle_seconds"
    assert ("ada", 900.0 + 600.0, 2400.0, 1200.0) == told(one, *names)
    assert ("bob", 300.0 + 600.0, 2400.0, 1200.0) == told(two, *names)
    assert 2400.0 == one["gpu_seconds"] + two["gpu_seconds"]
    assert 1200 * 600.0 == pytest.approx(one["energy_joules"] + two["energy_joules"])
    assert [True] == [row["shared"] for row in one["gpu_rows"]]
    assert "n1 GPU 0" in one["data_gaps"][-1]
    assert ["gpus_held_idle"] == [finding["id"] for finding in one["findings"]]


async def test_a_report_has_what_usage_has(lab: Lab) -> None:
    """Time and energy of every job are those of its row in the answer about everybody, but for minutes that are cut."""
    for second in range(0, 1800, 5):
        held = [Held(7, ("0", "1"), job="slurm:1", sm=0.5)] if second < 1500 else []
        held += [Held(8, ("1",), user="bob", job="slurm:2", sm=0.1)] if second % 600 < 400 else []
        held += [Held(100 + second // 300, ("0",), job="slurm:3")] if second > 900 else []
        lab.fill([second], *held, values={"0": BUSY, "1": QUIET if second < 900 else BUSY})
    rows = (await lab.usage(start=0, end=1800, by="job"))["rows"]
    names = ("memory_bytes_max", "gpus", "processes", "user")

    assert {"slurm:1", "slurm:2", "slurm:3"} == {row["job"] for row in rows}
    for row in rows:
        answer = await lab.job(row["job"], now=1800, start=0, end=1800)
        assert told(row, *names) == told(answer, *names)
        for name in ("gpu_seconds", "energy_joules"):
            assert row[name] == pytest.approx(answer[name], rel=0.003)


async def test_gpus_that_were_allocated_and_never_touched(lab: Lab) -> None:
    """They are told apart from those that were held, with the hours, and it is a finding with advice."""
    job = given("0", "1")
    lab.fill(range(0, 600, 5), jobs=(job,), values={"0": QUIET, "1": QUIET})
    lab.fill(range(600, 3600, 5), Held(7, job=job.id), jobs=(job,), values={"0": BUSY, "1": QUIET})
    lab.fill(range(3600, 4000, 5))

    answer = await lab.job("4711", now=4000, points=60)

    assert ("llama", "gpu", "ended", 2, 1) == told(
        answer, "name", "partition", "state", "gpus", "untouched_gpus"
    )
    assert (7200.0, 3000.0, 4200.0) == told(answer, "allocated_seconds", "gpu_seconds", "unused_seconds")
    assert [("0", "used", 3600.0, 3000.0, 600.0), ("1", "untouched", 3600.0, 0.0, 3600.0)] == [
        told(row, "gpu", "use", "allocated_seconds", "gpu_seconds", "unused_seconds")
        for row in answer["gpu_rows"]
    ]
    assert 0.8 == pytest.approx(answer["metrics"]["gpu_utilization_ratio"]["mean"], abs=0.01)
    assert 0.8 == max(answer["series"]["metrics"]["gpu_utilization_ratio"])
    assert [0.8, 0.0] == [max(gpu["values"]) for gpu in answer["series"]["gpus"]]
    (finding,) = answer["findings"]
    assert ("gpus_untouched", "high") == told(finding, "id", "severity")
    assert "1 of 2 allocated GPUs" in finding["summary"]
    assert finding["advice"][0]["do"].startswith("request only 1 GPU,")


async def test_a_busy_gpu_without_a_process_is_not_called_untouched(lab: Lab) -> None:
    """Where no process can be seen, it is said that the GPU was busy and nobody knows by whom."""
    lab.fill(range(0, 600, 5), jobs=(given("0"),), values={"0": BUSY})
    answer = await lab.job("4711", now=600)

    assert ("unattributed", None) == told(answer["gpu_rows"][0], "use", "unused_seconds")
    assert 0 == answer["untouched_gpus"]
    assert "n1 GPU 0 was busy, but no process of the job was seen on it" in answer["data_gaps"]
    assert [] == answer["findings"]


async def test_one_that_others_hold_is_untouched_however_busy(lab: Lab) -> None:
    """What others did on it is none of the job's work."""
    lab.fill(range(0, 600, 5), Held(9, user="bob"), jobs=(given("0"),), values={"0": BUSY})
    assert ["untouched"] == [row["use"] for row in (await lab.job("4711", now=600))["gpu_rows"]]


async def test_means_are_of_the_time_in_which_it_held_a_gpu(lab: Lab) -> None:
    """A job that was there twice has nothing of what another did in between."""
    own, other = Held(7, job="slurm:1"), Held(8, job="slurm:2", user="bob")
    lab.fill(range(0, 1200, 5), own, values={"0": BUSY})
    lab.fill(range(1200, 2400, 5), other, values={"0": QUIET})
    lab.fill(range(2400, 3600, 5), own._replace(pid=9), values={"0": BUSY})
    answer = await lab.job("slurm:1", now=3600)

    assert (2400.0, 0.8) == told(answer, "gpu_seconds", "utilization_mean")
    assert 0.8 == pytest.approx(answer["metrics"]["gpu_utilization_ratio"]["mean"], abs=0.01)
    assert 500.0 == pytest.approx(answer["metrics"]["power_watts"]["mean"], abs=3)


async def test_a_job_that_runs_is_reported_as_of_now(lab: Lab) -> None:
    """And one that is asked about for a part of its time for that part."""
    lab.fill(HOUR, Held(7, job="slurm:1"))
    answer = await lab.job("1", now=3600)
    assert ("running", BEGIN, BEGIN + 3600, 3600.0) == told(answer, "state", "from", "to", "gpu_seconds")

    part = await lab.job("1", now=3600, start=600, end=1200)
    assert (BEGIN + 600, BEGIN + 1200, 600.0) == told(part, "from", "to", "gpu_seconds")
    with pytest.raises(RefusedError) as refused:
        await lab.job("1", now=3600, end=-600)
    assert ("running", False) == told(part, "state", "to_now")
    assert (404, "slurm:1 did not run in this time range") == (refused.value.status, refused.value.message)
    assert (
        "choose a time range in which it ran: 2027-01-15T08:00:00.000Z to 2027-01-15T09:00:00.000Z"
        == refused.value.hint
    )


async def test_hours_without_data_are_said(lab: Lab) -> None:
    """Of the node that was silent, from when to when, and not counted as idle."""
    job: Any = {"job": "slurm:1", "start": BEGIN - 50.0}
    lab.fill(HOUR, Held(7, **job), node=1)
    lab.fill(range(0, 1200, 5), Held(8, **job), node=2)
    lab.fill(range(2400, 3600, 5), Held(8, **job), node=2)
    answer = await lab.job("1", now=3600)

    assert 1200.0 == pytest.approx(answer["missing_seconds"], abs=10)
    assert [("n2", 1195, 2400)] == [
        (gap["node"], gap["from"] - BEGIN, gap["to"] - BEGIN) for gap in answer["missing"]
    ]
    assert (
        "No samples from n2 for 20:05 between 2027-01-15T08:19:55.000Z and 2027-01-15T08:40:00.000Z"
        in (answer["data_gaps"])
    )
    assert 3600.0 + 2400.0 == pytest.approx(answer["gpu_seconds"], abs=10)
    assert 0.0 == answer["idle_seconds"]


async def test_what_nobody_saw_is_not_called_unused(lab: Lab) -> None:
    """Time of an allocation without data is told as missing, and as nothing else."""
    job = given("0")
    for seconds in (range(0, 1200, 5), range(1800, 3600, 5)):
        lab.fill(seconds, Held(7, job=job.id), jobs=(job,), values={"0": BUSY})
    answer = await lab.job("4711", now=3600)

    assert 3600.0 == answer["allocated_seconds"]
    assert 0.0 == pytest.approx(answer["unused_seconds"], abs=10)
    assert 600.0 == pytest.approx(answer["missing_seconds"], abs=10)


async def test_a_job_on_a_lost_node_ends_when_that_was_heard_of_last(lab: Lab) -> None:
    """It may still run; nobody knows, and it does not grow for ever."""
    job = given("0")
    lab.fill(range(0, 600, 5), Held(7, job=job.id), jobs=(job,))
    lab.fill(range(0, 7200, 60), node=2)
    answer = await lab.job("4711", now=3 * 86_400)

    assert ("lost", BEGIN + 600, False) == told(answer, "state", "to", "to_now")
    assert (600.0, 600.0, 0.0, 0.0) == told(
        answer, "gpu_seconds", "allocated_seconds", "unused_seconds", "missing_seconds"
    )
    assert [
        "n1 last reported at 2027-01-15T08:10:00.000Z; it is unknown whether the job still runs there"
    ] == answer["data_gaps"]
    assert one_line_summary(read(answer)).endswith(", lost")
    assert "running" == (await lab.job("4711", now=650))["state"]


async def test_a_job_that_another_node_goes_on_with(lab: Lab) -> None:
    """It runs, and of the node that was lost only what was seen of it counts."""
    job: Any = {"job": "slurm:1", "start": BEGIN - 50.0}
    lab.fill(range(0, 600, 5), Held(7, **job), node=1)
    lab.fill(range(0, 1800, 5), Held(8, **job), node=2)
    answer = await lab.job("1", now=1800)

    assert ("running", BEGIN + 1800, True, 2400.0) == told(answer, "state", "to", "to_now", "gpu_seconds")
    assert "n1 last reported" in answer["data_gaps"][0]


async def test_a_node_that_comes_back_without_the_job(lab: Lab) -> None:
    """The job ended when the node did, not when its agent started again; so did a process."""
    job, days = given("0"), 3 * 86_400
    lab.fill(range(0, 600, 5), Held(7, job=job.id), jobs=(job,), values={"0": BUSY})
    lab.restart()
    lab.fill(range(days, days + 300, 5), values={"0": QUIET})

    for answer in (
        await lab.job("4711", now=days + 300),
        await lab.job("7", kind="process", now=days + 300),
    ):
        assert ("ended", BEGIN + 600, 600.0, 0.0) == told(
            answer, "state", "to", "gpu_seconds", "missing_seconds"
        )
        assert answer["allocated_seconds"] in (600.0, None)


async def test_an_agent_that_starts_again_changes_nothing(lab: Lab) -> None:
    """A job that goes on meanwhile is one."""
    job = given("0")
    lab.fill(range(0, 600, 5), Held(7, job=job.id), jobs=(job,))
    lab.restart()
    lab.fill(range(630, 1200, 5), Held(7, job=job.id), jobs=(job,))
    answer = await lab.job("4711", now=1200)

    assert ("running", BEGIN, BEGIN + 1200, 1200.0) == told(
        answer, "state", "from", "to", "allocated_seconds"
    )
    assert 35.0 == answer["missing_seconds"]


async def test_samples_that_are_far_apart_are_no_gaps(lab: Lab) -> None:
    """A cluster that was sampled once a minute then, and more often now, has no holes."""
    lab.fill(range(0, 1800, 60), Held(7, job="slurm:1"))
    lab.fill(range(1800, 3600, 5), Held(7, job="slurm:1"))
    assert [] == (await lab.job("1", now=3600))["missing"]


@pytest.mark.parametrize("word", ["slurm:4711_3", "4711_3"])
async def test_by_its_number(lab: Lab, word: str) -> None:
    """With its scheduler or without, tasks of arrays too."""
    lab.fill(range(0, 60, 5), Held(7, job="slurm:4711_3"), Held(8, ("1",), job="slurm:4711_4"))
    assert "slurm:4711_3" == (await lab.job(word, now=60))["job"]


async def test_a_task_of_an_array(lab: Lab) -> None:
    """By the name that people know, though its number is another; the array itself is told by its tasks."""
    tasks = [given(str(gpu), number=f"slurm:{4720 + gpu}", array=f"4711_{gpu}") for gpu in (0, 1)]
    lab.fill(
        range(0, 600, 5),
        Held(7, ("0",), job="slurm:4720"),
        Held(8, ("1",), job="slurm:4721"),
        jobs=tuple(tasks),
    )
    answer = await lab.job("4711_1", now=600)

    assert ("slurm:4721", "4711_1", 600.0, 600.0) == told(
        answer, "job", "array", "gpu_seconds", "allocated_seconds"
    )
    with pytest.raises(RefusedError) as refused:
        await lab.job("4711", now=600)
    assert "select a task of this job array: 4711_0, 4711_1" == refused.value.hint


async def test_of_several_the_one_that_was_heard_of_last(lab: Lab) -> None:
    """A number that two schedulers gave means the newer job, and a full name the one it names."""
    lab.fill(range(0, 60, 5), Held(7, job="slurm:12"))
    lab.fill(range(60, 120, 5), Held(8, job="flux:12"))
    assert "flux:12" == (await lab.job("12", now=120))["job"]
    assert "slurm:12" == (await lab.job("slurm:12", now=120))["job"]
    lab.fill(range(120, 180, 5), Held(9, job="12"))
    lab.fill(range(180, 240, 5), Held(10, job="k8s:12"))
    assert "12" == (await lab.job("12", now=240))["job"]


async def test_a_job_of_last_week_is_found(lab: Lab) -> None:
    """However far back, and all of it: what it did on two days is one report."""
    day = 86_400
    lab.fill(range(0, 60, 5), Held(7, job="slurm:1"))
    lab.fill(range(day, day + 60, 5), Held(9, job="slurm:1"))
    lab.fill(range(2 * day, 2 * day + 60, 5), Held(8, job="slurm:2"))
    answer = await lab.job("1", now=9 * day)

    assert (120.0, 2, BEGIN) == told(answer, "gpu_seconds", "processes", "from")


async def test_what_was_allocated_days_ago_is_known(lab: Lab) -> None:
    """An agent tells of a job once; it may go on for long."""
    day, job = 86_400, given("0")
    lab.fill([0, 5], Held(7, job=job.id), jobs=(job,))
    lab.fill([2 * day], Held(7, job=job.id), jobs=(job,))
    lab.fill([4 * day], Held(7, job=job.id), jobs=(job,))
    assert 4.0 * day == (await lab.job("4711", now=4 * day))["allocated_seconds"]
    assert 3600.0 == (await lab.job("4711", now=4 * day, start=4 * day - 3600))["allocated_seconds"]


async def test_a_job_that_there_is_not(lab: Lab) -> None:
    """It is refused with the newest that there are; without any it says so."""
    with pytest.raises(RefusedError) as nothing:
        await lab.job("4711", now=60)
    assert (404, "list sessions with: gpu") == (nothing.value.status, (nothing.value.hint or "")[:23])

    for number in range(8):
        lab.fill([60 * number], Held(number + 1, job=f"slurm:{number}"))
    with pytest.raises(RefusedError) as refused:
        await lab.job("4711", now=600)
    assert "there is no job or session '4711'" == refused.value.message
    assert "use one of the newest jobs: slurm:7, slurm:6, slurm:5, slurm:4, slurm:3" == refused.value.hint
    lab.fill([600], Held(99, job="slurm:\x1b[31m"))
    with pytest.raises(RefusedError) as refused:
        await lab.job("4711\x1b", now=660)
    assert "slurm:?[31m, slurm:7" in (refused.value.hint or "")
    assert "\x1b" not in f"{refused.value.message}{refused.value.hint}"


async def test_a_process_and_all_below_it(lab: Lab) -> None:
    """Its children count, what only shares its parent does not; a pid on two nodes needs a name."""
    tree = (
        Held(20, ()),
        Held(21, ("0",), parent=20),
        Held(22, ("1",), parent=21),
        Held(30, ("1",), user="bob"),
    )
    lab.fill(range(0, 600, 5), *tree)
    lab.fill(range(0, 60, 5), Held(21), node=2)
    with pytest.raises(RefusedError) as refused:
        await lab.job("21", kind="process", now=600)
    assert (409, "PID 21 was on several nodes: n1, n2") == (refused.value.status, refused.value.message)

    whole = await lab.job("20", kind="process", now=600)
    assert ("n1:20", "process", 2, 900.0) == told(whole, "job", "kind", "gpus", "gpu_seconds")
    part = await lab.job("21", kind="process", node="n1", now=600)
    assert ("n1:21", 2, 900.0) == told(part, "job", "gpus", "gpu_seconds")
    leaf = await lab.job("22", kind="process", now=600)
    assert ("n1:22", 1, 300.0) == told(leaf, "job", "gpus", "gpu_seconds")


@pytest.mark.parametrize("word", ["nonsense", "99", "9" * 30])
async def test_pids_that_are_none(lab: Lab, word: str) -> None:
    """No process has them; the API takes any word there, so it is not a wrong request."""
    with pytest.raises(RefusedError) as refused:
        await lab.job(word, kind="process", now=60)
    assert 404 == refused.value.status


async def test_a_session(lab: Lab) -> None:
    """What everybody did on its GPUs in its time; a job of that name comes first unless it is said what is meant."""
    session = Session("s1", "training", BEGIN + 60.0, BEGIN + 60.0, 1000, "finished", BEGIN + 660.0, ("n1",))
    lab.archive.commit([LogEntry.of_fact("session", **session.to_dict())])
    lab.fill(range(0, 720, 5), Held(7), Held(8, user="bob"), values={"0": BUSY, "1": QUIET})
    answer = await lab.job("training", now=720)

    assert ("training", "session", "ended", None, 2, 600.0, 1) == told(
        answer, "job", "kind", "state", "user", "gpus", "gpu_seconds", "untouched_gpus"
    )
    assert (BEGIN + 60, BEGIN + 660) == told(answer, "from", "to")
    assert ["used", "untouched"] == [row["use"] for row in answer["gpu_rows"]]
    lab.fill(range(720, 780, 5), Held(9, job="slurm:training"))
    assert "job" == (await lab.job("training", now=780))["kind"]
    assert "session" == (await lab.job("training", kind="session", now=780))["kind"]
    with pytest.raises(RefusedError):
        await lab.job("slurm:training", kind="session", now=780)


async def test_the_average_of_the_cluster(lab: Lab) -> None:
    """Everybody's held time in the same hours, this job's too; harvests do not count."""
    lab.fill(
        range(0, 600, 5),
        Held(7, job="slurm:1"),
        Held(8, ("1",), job="harvest:x"),
        values={"0": BUSY, "1": BUSY},
    )
    lab.fill(range(0, 600, 5), Held(9, user="bob"), values={"0": QUIET}, node=2)
    answer = await lab.job("1", now=600)

    assert (4, 2, 1200.0, 600.0, 0.4, 300.0) == told(
        answer["cluster"],
        "gpus",
        "gpus_held",
        "gpu_seconds",
        "idle_seconds",
        "utilization_mean",
        "power_watts_mean",
    )
    assert 0.8 == answer["utilization_mean"]


async def test_findings_of_its_own_gpus_and_processes(lab: Lab) -> None:
    """Each once, with how often and how long; those of other GPUs, of others' processes and of before are left out."""

    def finding(number: str, label: str | None = "0", **more: Any) -> dict[str, Any]:
        return {"id": number, "severity": "high", "summary": "waits", "gpu": 0, "label": label, **more}

    def tell(second: int, *found: dict[str, Any]) -> None:
        detail = {"node": 1, "kind": "findings", "detail": {"findings": list(found)}}
        lab.archive.commit([LogEntry.of_fact("event", time=float(BEGIN + second), **detail)])

    tell(10, finding("before"))
    tell(100)
    lab.fill(range(120, 720, 5), Held(7, job="slurm:1"), Held(8, ("0", "1"), user="bob"))
    tell(
        180,
        finding("mine", pids=[7]),
        finding("theirs", pids=[8]),
        finding("other", "1"),
        finding("host", None),
    )
    tell(300)
    tell(420, finding("mine", summary="still waits", severity="low"))
    tell(480)
    tell(700, finding("mine"))
    answer = await lab.job("1", now=720)

    found = {item["id"]: item for item in answer["findings"]}
    assert {"mine", "host"} == set(found)
    assert (3, 120.0 + 60.0 + 20.0, BEGIN + 180, None) == told(
        found["mine"], "times", "active_seconds", "from", "to"
    )
    jsonschema_rs.validate(SCHEMA, answer)


@pytest.mark.slow
async def test_the_same_from_memory_files_and_minutes(lab: Lab) -> None:
    """Sealing and merging change nothing of a report."""

    def frame(second: int) -> Frame:
        values = BUSY if second % 1200 < 900 else QUIET
        return lab.frame(
            second,
            Held(7, job="slurm:1"),
            jobs=(given("0", "1", number="slurm:1"),),
            values={"0": values, "1": QUIET},
        )

    for begin, end in ((0, 2400), (2400, 4800), (4800, 5400)):
        lab.add([frame(second) for second in range(begin, end, 5)])
        if end < 5000:
            lab.archive.seal()
    before = await lab.job("1", now=5400)
    lab.archive.tidy(BEGIN + 5400.0, keep_seconds=1e9, limit_bytes=None)
    after = await lab.job("1", now=5400)

    for answer in (before, after):
        answer["cluster"].pop("capacity_seconds")
    check_alike(before, after)
    assert 4 * 300.0 == before["idle_seconds"]


async def test_nothing_that_agents_say_breaks_a_report(lab: Lab) -> None:
    """Events that make no sense are passed over."""
    for detail in ({}, {"id": 7}, {"id": "slurm:1", "gpus": 5}, {"id": "slurm:1", "gpus": [None], "user": 3}):
        told_ = {"node": 1, "kind": "job", "detail": detail}
        lab.archive.commit([LogEntry.of_fact("event", time=float(BEGIN + 5), **told_)])
    lab.fill(range(0, 60, 5), Held(7, job="slurm:1"))
    answer = await lab.job("1", now=60)

    jsonschema_rs.validate(SCHEMA, answer)
    assert ("ada", 60.0) == told(answer, "user", "gpu_seconds")
