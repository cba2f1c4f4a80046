"""The parts of reports about jobs: what a scheduler gave, when nothing is known, figures in stretches of time."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulse.model.job import Job
from gpulse.reports.job_gpu_use import (
    MetricFigure,
    NodeGap,
    combine_figures,
    find_gaps,
    measure_metric,
    total_gap_seconds,
)
from gpulse.reports.report_subject import Grant, find_grants
from gpulse.reports.time_grid import TimeGrid
from gpulse.store.metadata.event_tables import _JOB_EVENTS
from gpulse.store.store import Series, SeriesKey, StoredEvent
from tests.queries import query
from tests.unit.report_lab import BEGIN, Held, Lab

NOW = 10_000.0
_ALWAYS: Any = {"start": float("-inf"), "end": float("inf")}


def told(time: float, *gpus: str, job: str = "slurm:1", node: int = 1) -> StoredEvent:
    """An agent tells of a job."""
    return StoredEvent(time, "job", node, {"id": job, "gpus": list(gpus)})


def ended(time: float, job: str = "slurm:1", node: int = 1) -> StoredEvent:
    """An agent tells of its end."""
    return StoredEvent(time, "job_end", node, {"job": job})


def started(time: float, node: int = 1) -> StoredEvent:
    """An agent starts."""
    return StoredEvent(time, "agent_started", node, {})


def steps(times: list[float], ends: list[float], values: list[float] | None = None) -> Series:
    """Steps of one metric."""
    means = np.array(values or [1.0] * len(times))
    return Series(SeriesKey(1, "GPU-0"), "power_watts", np.array(times), means, means, means, np.array(ends))


def test_from_the_first_telling_to_the_end() -> None:
    """GPUs that are told later belong to it from the beginning; other jobs do not matter."""
    events = [told(10), told(20, "a", "b"), told(25, "c", job="slurm:2"), ended(30), ended(40, "slurm:2")]
    assert [Grant(1, 10, 30, frozenset("ab"))] == find_grants(events, "slurm:1", NOW)


def test_every_node_and_every_time_has_a_grant_of_its_own() -> None:
    """A job that was put back and came again was there twice."""
    events = [told(10, "a"), told(10, "b", node=2), ended(20), told(50, "a"), ended(60, node=2)]
    assert [
        Grant(1, 10, 20, frozenset("a")),
        Grant(2, 10, 60, frozenset("b")),
        Grant(1, 50, None, frozenset("a")),
    ] == find_grants(events, "slurm:1", NOW)


def test_an_agent_that_starts_again_tells_what_is_still_there() -> None:
    """What it tells within a minute goes on; what it does not tell was over by then, unless it has just started."""
    goes_on = [started(5), told(10, "a"), started(100), told(130, "a"), ended(200)]
    assert [Grant(1, 10, 200, frozenset("a"))] == find_grants(goes_on, "slurm:1", NOW)
    over = [told(10, "a"), started(100), started(150), told(300, job="slurm:2")]
    assert [Grant(1, 10, 100, frozenset("a"))] == find_grants(over, "slurm:1", NOW)
    assert [Grant(1, 10, None, frozenset("a"))] == find_grants(over[:2], "slurm:1", 110.0)
    again = [*over, told(400, "a")]
    assert [(10, 100), (400, None)] == [grant[1:3] for grant in find_grants(again, "slurm:1", NOW)]


def test_other_gpus_are_another_grant() -> None:
    """What is told first holds from the beginning, what is told later from then on; nothing told changes nothing."""
    events = [told(10), told(20, "a"), told(30), told(40, "b"), ended(50)]
    assert [Grant(1, 10, 40, frozenset("a")), Grant(1, 40, 50, frozenset("b"))] == find_grants(
        events, "slurm:1", NOW
    )


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.sampled_from(["job", "end", "start"]), st.integers(1, 2)), max_size=30
    )
)
def test_grants_never_overlap(happened: list[tuple[int, str, int]]) -> None:
    """Whatever was told in which order: on a node one ends before the next begins, and none before it began."""
    time, events = 0.0, []
    for passed, kind, node in happened:
        time += 40 * passed
        made = {
            "job": told(time, "a", node=node),
            "end": ended(time, node=node),
            "start": started(time, node),
        }
        events.append(made[kind])
    for node in (1, 2):
        found = [grant for grant in find_grants(events, "slurm:1", time) if grant.node == node]
        for before, after in pairwise(found):
            assert before.end is not None
            assert before.start <= before.end <= after.start


def test_what_lies_between_samples_is_missing() -> None:
    """From the last sample to the next step with one, before the first and after the last; shorter silences are none."""
    moments = TimeGrid(10.0, 0, 60)
    heard = [float(time) for time in range(100, 200, 10)] + [float(time) for time in range(300, 400, 10)]
    known = steps(heard, [time + 9 for time in heard])

    assert [NodeGap(1, 0, 100), NodeGap(1, 199, 300), NodeGap(1, 399, 600)] == find_gaps(
        1, [known], moments, [(0.0, 600.0)], 1.0
    )
    assert [NodeGap(1, 250, 300)] == find_gaps(1, [known], moments, [(110.0, 150.0), (250.0, 390.0)], 1.0)
    assert [] == find_gaps(1, [known], moments, [(100.0, 205.0)], 1.0)
    assert [NodeGap(1, 0, 600)] == find_gaps(1, [], moments, [(0.0, 600.0)], 1.0)


def test_steps_whose_last_sample_nobody_knows_are_whole() -> None:
    """As from an engine that tells no times of samples."""
    known = steps([0.0, 10.0, 40.0], [float("nan")] * 3)
    assert [NodeGap(1, 20, 40)] == find_gaps(1, [known], TimeGrid(10.0, 0, 5), [(0.0, 50.0)], 1.0)


def test_jobs_in_the_book(tmp_path: Path) -> None:
    """Processes are found by their job without looking at all the others, whenever they lived."""
    with Lab(tmp_path, ("0",)) as lab:
        for number in range(3):
            lab.fill([60 * number], Held(number + 1, job=f"slurm:{number % 2}"), Held(9, job=None))
        assert ["slurm:0", "slurm:1"] == sorted(lab.archive.job_names())
        assert [1, 3] == [
            process.pid for process in lab.archive.processes(query(**_ALWAYS, jobs={"slurm:0", "slurm:7"}))
        ]
        assert [] == lab.archive.processes(query(**_ALWAYS, jobs=()))
    with closing(sqlite3.connect(tmp_path / "data" / "metadata.sqlite")) as database:
        plan = database.execute(
            "EXPLAIN QUERY PLAN SELECT pid FROM processes WHERE job IN (?)",
            ["x"],
        ).fetchall()
        told = database.execute(f"EXPLAIN QUERY PLAN {_JOB_EVENTS}", ["x"] * 4 + [9, "x", 9]).fetchall()
    assert "processes_job" in str(plan)
    for index in ("events_job ", "events_job_array", "events_job_name", "events_job_number"):
        assert index in str(told)
    assert "SCAN events" not in str(told)


def test_events_of_a_job_in_the_book(tmp_path: Path) -> None:
    """By its number with the scheduler or without, its task, its array or its name, and by nothing else."""
    jobs = (
        Job("slurm:12", name="train", array="10_2"),
        Job("flux:12", name="other"),
        Job("slurm:13", name="12", array="10_3"),
        Job("slurm:14", name="train", array="101_1"),
    )
    with Lab(tmp_path, ("0",)) as lab:
        lab.fill([0], jobs=jobs)
        lab.fill([5], jobs=jobs[:1])

        def found(word: str) -> list[str]:
            return [event.detail["id"] for event in lab.archive.job_events(word) if event.kind == "job"]

        def over(word: str) -> list[float]:
            return [event.time - BEGIN for event in lab.archive.job_events(word) if event.kind == "job_end"]

        assert ["slurm:12", "flux:12", "slurm:13"] == found("12")
        assert {"slurm:12", "flux:12"} == set(found("slurm:12"))
        assert (["slurm:13"], ["slurm:12", "slurm:13"]) == (found("10_3"), found("10"))
        assert (["slurm:12", "slurm:14"], []) == (found("train"), found("1"))
        assert ([5.0], [5.0, 5.0, 5.0], []) == (over("slurm:13"), over("10_3") + over("12"), over("1"))


def test_what_is_missing_of_several_nodes_at_once_counts_once() -> None:
    """As time goes, not as nodes do."""
    gaps = [NodeGap(1, 0, 100), NodeGap(2, 50, 120), NodeGap(2, 200, 210), NodeGap(3, 60, 70)]
    assert 130.0 == total_gap_seconds(gaps)
    assert 0.0 == total_gap_seconds([])


def test_figures_are_of_the_time_asked_for() -> None:
    """A step counts as much as lies within; a metric that is not known then has none."""
    moments = TimeGrid(10.0, 0, 6)
    some = steps([0.0, 10.0, 20.0, 40.0], [9.0, 19.0, 29.0, 49.0], [1.0, 2.0, 4.0, 9.0])

    found = measure_metric(some, moments, [(5.0, 20.0), (22.0, 24.0)])
    assert found is not None
    assert ((5 * 1 + 10 * 2 + 2 * 4) / 17, 4.0, 17.0) == pytest.approx(found)
    assert measure_metric(some, moments, [(30.0, 40.0)]) is None
    assert {"power_watts": MetricFigure(3.0, 9.0, 40.0)} == combine_figures(
        [{"power_watts": MetricFigure(2.0, 9.0, 30.0)}, {"power_watts": MetricFigure(6.0, 6.0, 10.0)}, {}]
    )
