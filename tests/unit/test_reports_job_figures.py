"""Figures of reports about jobs where it is hard: jobs one after the other, beside one another, short ones, and others' claims."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from gpulse.errors import RefusedError
from gpulse.export.job_report_text import describe_facts, one_line_summary
from gpulse.model.session import Session
from gpulse.reports.job_lookup import JobUser
from gpulse.store.incomplete_answers import note_missing
from gpulse.store.log.record_payloads import LogEntry
from gpulse.store.store import Query, Series
from tests.unit.job_documents import read
from tests.unit.report_lab import BEGIN, Held, Lab
from tests.unit.test_reports_job import BUSY, HOUR, QUIET, given, told

ADA, BOB = Held(7, job="slurm:1"), Held(8, user="bob", job="slurm:2")


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    """Two nodes with two GPUs each."""
    with Lab(tmp_path, ("0", "1"), ("0", "1")) as lab:
        yield lab


async def test_what_is_shared_is_held_all_the_time(lab: Lab) -> None:
    """A part of the GPU's time is the job's, but none of it was unused."""
    jobs = given("0", number="slurm:1"), given("0", number="slurm:2", user="bob")
    lab.fill(HOUR, ADA._replace(sm=0.1), BOB._replace(sm=0.7), jobs=jobs, values={"0": BUSY})
    answer = await lab.job("1", now=3600)

    assert (450.0, 3600.0, 3600.0, 0.0) == told(
        answer, "gpu_seconds", "held_seconds", "allocated_seconds", "unused_seconds"
    )
    said = "1.0 GPU-hours held, which is the whole allocation; the job's share is 8 GPU-min, because other jobs held the same GPUs"
    assert ("GPU time", said) == next(describe_facts(read(answer)))


async def test_who_idles_beside_a_busy_one_holds_it_idle(lab: Lab) -> None:
    """A notebook beside a training run has none of the GPU's time, and held it for nothing."""
    jobs = given("0", number="slurm:1"), given("0", number="slurm:2", user="bob")
    lab.fill(HOUR, ADA._replace(sm=0.8), BOB._replace(sm=0.0), jobs=jobs, values={"0": BUSY})
    one, two = [await lab.job(number, now=3600) for number in "12"]

    names = "gpu_seconds", "held_seconds", "idle_seconds", "unused_seconds"
    assert (3600.0, 3600.0, 0.0, 0.0) == told(one, *names)
    assert (0.0, 3600.0, 3600.0, 0.0) == told(two, *names)
    assert ["gpus_held_idle"] == [finding["id"] for finding in two["findings"]]
    assert "idle 100%" in one_line_summary(read(two))


async def test_jobs_one_after_the_other_share_nothing(lab: Lab) -> None:
    """Neither within a minute nor when one was there before and after."""
    lab.fill(range(0, 1220, 5), BOB, values={"0": BUSY})
    lab.fill(range(1230, 2430, 5), ADA, jobs=(given("0", number="slurm:1"),), values={"0": BUSY})
    lab.fill(range(2430, 2600, 5), BOB, values={"0": BUSY})
    answer = await lab.job("1", now=2600)

    assert ([False], []) == ([row["shared"] for row in answer["gpu_rows"]], answer["data_gaps"])


async def test_who_was_there_before_does_not_make_it_untouched(lab: Lab) -> None:
    """A GPU that is busy while no process can be seen is nobody's, whoever had it before."""
    lab.fill(range(0, 1220, 5), BOB, values={"0": BUSY})
    lab.fill(range(1230, 2430, 5), jobs=(given("0", number="slurm:1"),), values={"0": BUSY})
    answer = await lab.job("1", now=2430)

    assert ("unattributed", None) == told(answer["gpu_rows"][0], "use", "unused_seconds")
    assert [] == answer["findings"]


async def test_means_are_of_the_time_in_which_a_process_was_there(lab: Lab) -> None:
    """One that goes and comes back has nothing of what another did meanwhile, and did not share with that."""
    job = given("0", number="slurm:1")
    lab.fill(range(0, 1200, 5), ADA, jobs=(job,), values={"0": BUSY})
    lab.fill(range(1200, 2400, 5), BOB, jobs=(job,), values={"0": QUIET})
    lab.fill(range(2400, 3600, 5), ADA, jobs=(job,), values={"0": BUSY})
    for _ in range(2):
        answer = await lab.job("1", now=3600)
        lab.archive.seal()

        assert (2400.0, 2400.0, 0.8, 1200.0) == told(
            answer, "gpu_seconds", "held_seconds", "utilization_mean", "unused_seconds"
        )
        assert 2400 * 500.0 == pytest.approx(answer["energy_joules"])
        assert (0.8, 0.6, 500.0) == tuple(
            answer["metrics"][name]["mean"]
            for name in ("gpu_utilization_ratio", "sm_active_ratio", "power_watts")
        )
        assert [False] == [row["shared"] for row in answer["gpu_rows"]]


@pytest.mark.parametrize(("begin", "end"), [(80, 100), (30, 90), (65, 70)])
async def test_a_short_job_has_nothing_of_the_minutes_around_it(lab: Lab, begin: int, end: int) -> None:
    """It is as busy as its GPU was in its seconds."""
    lab.fill(range(0, begin, 5), values={"0": QUIET})
    lab.fill(range(begin, end, 5), ADA, jobs=(given("0", number="slurm:1"),), values={"0": BUSY})
    lab.fill(range(end, 300, 5), values={"0": QUIET})
    answer = await lab.job("1", now=300)

    seconds = float(end - begin)
    assert (seconds, 0.8, 500.0 * seconds, 0.0) == told(
        answer, "gpu_seconds", "utilization_mean", "energy_joules", "idle_seconds"
    )


async def test_a_short_job_that_does_nothing_between_busy_ones(lab: Lab) -> None:
    """It was idle all the time, and alone."""
    lab.fill(range(0, 80, 5), BOB, values={"0": BUSY})
    lab.fill(range(80, 100, 5), ADA, jobs=(given("0", number="slurm:1"),), values={"0": QUIET})
    lab.fill(range(100, 300, 5), BOB, values={"0": BUSY})
    answer = await lab.job("1", now=300)

    assert (20.0, 20.0, 0.0, 2000.0, 0.0) == told(
        answer, "gpu_seconds", "idle_seconds", "utilization_mean", "energy_joules", "unused_seconds"
    )
    assert [] == answer["data_gaps"]


async def test_a_process_that_begins_within_a_minute(lab: Lab) -> None:
    """What the GPU did before it came is none of its work."""
    job = given("0", number="slurm:1")
    lab.fill(range(0, 30, 5), jobs=(job,), values={"0": QUIET})
    lab.fill(range(30, 150, 5), ADA, jobs=(job,), values={"0": BUSY})
    lab.fill(range(150, 180, 5), jobs=(job,), values={"0": QUIET})
    answer = await lab.job("1", now=180)

    assert (180.0, 120.0, 0.8, 120 * 500.0, 60.0) == told(
        answer, "allocated_seconds", "gpu_seconds", "utilization_mean", "energy_joules", "unused_seconds"
    )


@pytest.mark.parametrize("seed", range(3))
async def test_whatever_a_process_does_the_figures_are_those_of_its_samples(lab: Lab, seed: int) -> None:
    """It comes and goes, the GPU works and rests: added up sample by sample it is the same."""
    chance, job = random.Random(seed), given("0", number="slurm:1")
    frames, minutes = [], dict.fromkeys(range(30), (0.0, 0.0))
    is_there, used, held, energy = False, 0.0, 0.0, 0.0
    for second in range(0, 1800, 5):
        is_there ^= chance.random() < 0.03
        used = chance.choice((0.0, 0.3, 0.9)) if chance.random() < 0.05 else used
        values = {"gpu_utilization_ratio": used, "power_watts": 100.0 + 400.0 * used}
        frames.append(lab.frame(second, *[ADA] * is_there, jobs=(job,), values={"0": values}))
        if is_there:
            held, energy = held + 5.0, energy + 5.0 * values["power_watts"]
            seconds, busy = minutes[second // 60]
            minutes[second // 60] = seconds + 5.0, busy + 5.0 * used
    lab.add(frames)
    answer = await lab.job("1", now=1800)

    idle = sum(seconds for seconds, busy in minutes.values() if busy <= 0.01 * seconds)
    assert (held, held, idle, 1800.0 - held) == pytest.approx(
        told(answer, "held_seconds", "gpu_seconds", "idle_seconds", "unused_seconds"), abs=15.0
    )
    assert energy == pytest.approx(answer["energy_joules"], abs=15 * 500.0)


async def test_samples_that_are_minutes_apart(lab: Lab) -> None:
    """Each of them stands for the time until the next."""
    job = given("0", number="slurm:1")
    lab.fill(range(0, 7200, 120), ADA, jobs=(job,), values={"0": BUSY})
    answer = await lab.job("1", now=7140)

    assert (7140.0, 0.8, 0.0) == told(answer, "gpu_seconds", "utilization_mean", "unused_seconds")
    assert 7140 * 500.0 == answer["energy_joules"]


async def test_how_busy_is_known_for_half_of_the_time(lab: Lab) -> None:
    """Idle time is a part of what is known, everywhere the same, and the rest is said."""
    lab.fill(range(0, 1800, 5), ADA, values={"0": {"power_watts": 500.0}})
    lab.fill(range(1800, 3600, 5), ADA, values={"0": QUIET})
    answer = await lab.job("1", now=3600)

    assert (3600.0, 1800.0, 1800.0) == told(answer, "held_seconds", "known_seconds", "idle_seconds")
    assert "idle for 100% of the time" in answer["findings"][0]["summary"]
    assert "idle 100%" in one_line_summary(read(answer))
    assert "Utilization is missing for 50% of the time on: n1 GPU 0" in answer["data_gaps"]


@pytest.mark.parametrize("sm", [None, 0.4])
async def test_processes_without_memory_are_seen_too(lab: Lab, sm: float | None) -> None:
    """Where a driver tells neither memory nor shares, there is still when they were there."""
    lab.fill(range(0, 600, 5), values={"0": QUIET})
    lab.fill(range(600, 1200, 5), ADA._replace(memory=None, sm=sm), values={"0": BUSY})
    lab.fill(range(1200, 1800, 5), values={"0": QUIET})
    answer = await lab.job("1", now=1800)

    assert (600.0, 600.0, 0.8) == told(answer, "gpu_seconds", "held_seconds", "utilization_mean")


async def test_whoever_claims_to_be_of_a_job_is_left_out(lab: Lab) -> None:
    """Another user's process on another node is not the job's, and that is said; root's is."""
    lab.fill(range(0, 600, 5), ADA, jobs=(given("0", number="slurm:1"),), values={"0": BUSY})
    lab.fill(range(0, 600, 5), Held(9, user="bob", job="slurm:1"), node=2, values={"0": BUSY})
    answer = await lab.job("1", now=600)

    assert ("ada", ["n1"], 1, 600.0) == told(answer, "user", "nodes", "gpus", "gpu_seconds")
    assert ["Ignored 1 process of bob on n2 that claims this job's ID"] == answer["data_gaps"]
    lab.fill(range(600, 1200, 5), Held(10, user="root", job="slurm:1"), node=2, values={"0": BUSY})
    assert 2 == (await lab.job("1", now=1200))["gpus"]


async def test_a_user_whose_name_is_not_known_everywhere(lab: Lab) -> None:
    """Numbers say who is who, and who is not known is nobody else."""
    job = given("0", number="slurm:1", uid=1001)
    lab.fill(range(0, 600, 5), ADA._replace(user=None), jobs=(job,), values={"0": BUSY})
    assert (600.0, []) == told(await lab.job("1", now=600), "gpu_seconds", "data_gaps")
    assert not JobUser("ada", 1001).differs(JobUser(None, 1001))
    assert not JobUser("ada", 1001).differs(JobUser("ada@site", 1001))
    assert not JobUser("ada", 1001).differs(JobUser("ada"))
    assert JobUser("ada", 1001).differs(JobUser("ada", 1002))
    assert not JobUser("ada").differs(JobUser())


async def test_a_number_that_was_given_twice(lab: Lab) -> None:
    """It means the newer job; the older one has its time, and is named."""
    day = 86_400
    for begin, user, pid in ((0, "ada", 7), (day, "bob", 9)):
        lab.fill(
            range(begin, begin + 600, 5),
            Held(pid, user=user, job="slurm:1"),
            jobs=(given("0", number="slurm:1", user=user, name=f"of_{user}"),),
            values={"0": BUSY},
        )
        lab.fill(range(begin + 600, begin + 700, 5), values={"0": QUIET})
    newer = await lab.job("1", now=day + 700)
    older = await lab.job("1", now=day + 700, end=day - 1)

    assert ("bob", "of_bob", BEGIN + day, 600.0) == told(newer, "user", "name", "from", "gpu_seconds")
    assert newer["data_gaps"][0].startswith(
        "Left out a job of ada with the same name, on n1 since 2027-01-15T08:00"
    )
    assert ("ada", "of_ada", BEGIN, 600.0) == told(older, "user", "name", "from", "gpu_seconds")


async def test_what_somebody_called_a_job(lab: Lab) -> None:
    """The newest of that name, where no job has it as its number and no session is called so."""
    for begin, number in ((0, 1), (600, 2)):
        job = given("0", number=f"slurm:{number}", name="training")
        lab.fill(range(begin, begin + 600, 5), Held(number, job=job.id), jobs=(job,))

    assert ("slurm:2", "training") == told(await lab.job("training", now=1200), "job", "name")
    session = Session("s1", "training", BEGIN, BEGIN, 1000, "finished", BEGIN + 600.0, ("n1",))
    lab.archive.commit([LogEntry.of_fact("session", **session.to_dict())])
    assert "session" == (await lab.job("training", now=1200))["kind"]
    assert "slurm:2" == (await lab.job("training", kind="job", now=1200))["job"]


@pytest.mark.parametrize("window", [(600, 600), (1200, 600)])
async def test_times_that_are_none(lab: Lab, window: tuple[int, int]) -> None:
    """They make no sense, whatever is asked for."""
    lab.fill(HOUR, ADA)
    with pytest.raises(RefusedError) as refused:
        await lab.job("1", now=3600, start=window[0], end=window[1])
    assert (409, "the time range ends before it starts") == (refused.value.status, refused.value.message)


async def test_a_clock_that_is_ahead(lab: Lab) -> None:
    """A job that has just begun by the clock of its node can be reported."""
    lab.fill(range(1000, 1060, 5), ADA, values={"0": BUSY})
    answer = await lab.job("1", now=30)

    assert ("running", BEGIN + 1000, 0.8) == told(answer, "state", "from", "utilization_mean")
    assert 55.0 == answer["gpu_seconds"]


async def test_an_instance_of_a_gpu_that_was_given(tmp_path: Path) -> None:
    """Schedulers name the whole GPU: what counts is the instance that was held, once."""
    with Lab(tmp_path, ("0", "0:0", "0:1", "1")) as lab:
        values = {"0": {"sm_active_ratio": 0.4}, "0:0": {"sm_active_ratio": 0.8}, "0:1": QUIET, "1": QUIET}
        job = given("0", "1", number="slurm:1")
        lab.fill(range(0, 600, 5), ADA._replace(gpus=("0:0",)), jobs=(job,), values=values)
        answer = await lab.job("1", now=600)

    assert (2, 1, 1200.0, 600.0) == told(
        answer, "gpus", "untouched_gpus", "allocated_seconds", "unused_seconds"
    )
    assert [("0:0", "used", 600.0, 0.0), ("1", "untouched", 600.0, 600.0)] == [
        told(row, "gpu", "use", "allocated_seconds", "unused_seconds") for row in answer["gpu_rows"]
    ]
    assert (0.8, []) == (answer["metrics"]["sm_active_ratio"]["mean"], answer["data_gaps"])


async def test_tables_of_processes_that_are_gone(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Time for which only the GPUs' metrics are left is neither unused nor untouched, and is said."""
    job = given("0", "1", number="slurm:1")
    lab.fill(HOUR, ADA, jobs=(job,), values={"0": BUSY, "1": QUIET})
    gpu_time, series = lab.archive.gpu_time, lab.archive.series

    def later(query: Query) -> Query:
        return replace(query, start=max(query.start, BEGIN + 2700.0))

    monkeypatch.setattr(
        lab.archive, "series", lambda query: series(later(query) if query.scope == "process" else query)
    )
    monkeypatch.setattr(lab.archive, "gpu_time", lambda query: gpu_time(later(query)))
    answer = await lab.job("1", now=3600)

    assert (900.0, 0.0, 0) == told(answer, "gpu_seconds", "unused_seconds", "untouched_gpus")
    assert ["used", None] == [row["use"] for row in answer["gpu_rows"]]
    assert [
        "The processes on the GPUs are unknown for up to 45:00, so their GPU time is incomplete on: n1 GPU 0, n1 GPU 1"
    ] == answer["data_gaps"]
    assert [] == answer["findings"]
    short = await lab.job("1", now=3600, start=600, end=630)
    assert ([None, None], 0) == (
        [row["unused_seconds"] for row in short["gpu_rows"]],
        short["untouched_gpus"],
    )
    assert "unknown for up to 30s" in short["data_gaps"][-1]


async def test_what_is_elsewhere_and_cannot_be_had_is_said(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the store says it, and not when nothing is missing."""
    lab.fill(range(0, 600, 5), ADA)
    said = "some data is missing: the database does not answer"
    assert said not in (await lab.job("1", now=600))["data_gaps"]

    series = lab.archive.series

    def lacking(query: Query) -> list[Series]:
        note_missing(said)
        return series(query)

    monkeypatch.setattr(lab.archive, "series", lacking)
    assert [said] == [gap for gap in (await lab.job("1", now=600))["data_gaps"] if gap == said]


async def test_a_part_of_a_session(lab: Lab) -> None:
    """Other nodes are left out, and a time in which it was not is refused, as of a job."""
    session = Session("s1", "training", BEGIN, BEGIN, 1000, "finished", BEGIN + 600.0, ("n1", "n2"))
    lab.archive.commit([LogEntry.of_fact("session", **session.to_dict())])
    for node in (1, 2):
        lab.fill(range(0, 900, 5), Held(7), node=node, values={"0": BUSY, "1": QUIET})

    assert 4 == (await lab.job("training", now=900))["gpus"]
    assert (["n2"], 2) == told(await lab.job("training", now=900, node="n2"), "nodes", "gpus")
    with pytest.raises(RefusedError) as refused:
        await lab.job("training", now=900, start=700)
    assert (404, "training did not run in this time range") == (refused.value.status, refused.value.message)


async def test_nodes_that_came_after_a_session(lab: Lab) -> None:
    """They are none of its own."""
    session = Session("s1", "early", BEGIN - 600.0, BEGIN - 600.0, 1000, "finished", BEGIN - 60.0)
    lab.archive.commit([LogEntry.of_fact("session", **session.to_dict())])
    lab.fill(range(0, 60, 5))
    answer = await lab.job("early", now=60)

    assert (0, [], 0.0) == told(answer, "gpus", "nodes", "missing_seconds")
