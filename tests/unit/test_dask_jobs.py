"""Jobs and graphs are numbered by who submits what."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulse.integrations.dask.jobs import NOTHING, Label, Numbering, marked
from gpulse.integrations.dask.resting import Resting
from gpulse.integrations.dask.tracking import ArgumentError


def test_every_client_that_submits_is_a_job() -> None:
    """Graphs count within it, and a connection that submits again goes on where it was."""
    numbering = Numbering("client")

    found = [numbering.submitted(client)[:2] for client in ("a", "b", "a", "b", "b")]

    assert [(1, 1), (2, 1), (1, 2), (2, 2), (2, 3)] == found
    assert (2, 5) == (numbering.jobs, numbering.graphs)


def test_what_a_task_submits_belongs_to_its_graph() -> None:
    """It is no graph of its own, and the worker's client is no job."""
    numbering = Numbering("client")
    cause = numbering.submitted("a")

    assert cause == numbering.submitted("worker", cause)
    assert (1, 2) == numbering.submitted("a")[:2]
    assert 1 == numbering.jobs


def test_manual_jobs_move_when_they_are_told() -> None:
    """Whoever submits, and a job that is gone back to counts its graphs on."""
    numbering = Numbering("manual")
    first = [numbering.submitted(client)[:2] for client in ("a", "b")]
    second = numbering.new_job(), numbering.submitted("a")[:2]
    seventh = numbering.new_job(7), numbering.submitted("a")[:2]
    again = numbering.new_job(1), numbering.submitted("b")[:2]

    assert [(1, 1), (1, 2)] == first
    assert [(2, (2, 1)), (7, (7, 1)), (1, (1, 3))] == [second, seventh, again]
    assert 7 == numbering.jobs


@pytest.mark.parametrize("job", [0, -1, True, 1.5, "2"])
def test_jobs_are_numbers_from_one_on(job: object) -> None:
    """Anything else is refused."""
    with pytest.raises(ArgumentError, match="from 1 on"):
        Numbering("manual").new_job(job)  # type: ignore[arg-type]


def test_with_clients_nobody_moves_the_job() -> None:
    """The error says how it is asked for."""
    with pytest.raises(ValueError, match="job_type='manual'"):
        Numbering("client").new_job()


def test_a_worker_at_rest_is_labelled_by_the_others() -> None:
    """The newest graph that runs, then the newest job whose client is there, then nothing."""
    numbering = Numbering("client")
    older, newer = numbering.submitted("a"), numbering.submitted("b")

    assert newer == numbering.resting([older, newer])
    assert older == numbering.resting([older])
    assert (2, 0) == numbering.resting([])[:2]
    numbering.left("b")
    assert (1, 0) == numbering.resting([])[:2]
    numbering.left("a")
    assert (0, 0) == numbering.resting([])[:2]


def test_a_manual_job_is_there_before_anything_is_submitted() -> None:
    """And after everything has ended."""
    numbering = Numbering("manual")

    assert (1, 0) == numbering.resting([])[:2]
    numbering.new_job()
    assert (2, 0) == numbering.resting([])[:2]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=40))
def test_numbers_have_no_holes(history: list[tuple[str, bool]]) -> None:
    """Whoever submits in whichever order, jobs and the graphs of each count 1, 2, 3."""
    numbering = Numbering("client")
    seen: list[Label] = []
    for client, from_task in history:
        cause = seen[-1] if from_task and seen else None
        label = numbering.submitted(client, cause)
        if cause is None:
            seen.append(label)

    jobs = list(dict.fromkeys(label.job for label in seen))
    assert list(range(1, len(jobs) + 1)) == jobs
    for job in jobs:
        dags = [label.dag for label in seen if label.job == job]
        assert list(range(1, len(dags) + 1)) == dags
    assert list(range(1, len(seen) + 1)) == [label.serial for label in seen]


def test_lines_without_a_label_get_that_of_their_moment() -> None:
    """Whatever was noted since; what has one keeps it."""
    resting = Resting()
    resting.note(1.0, Label(1, 1, 1))
    resting.note(2.0, Label(1, 0))
    resting.note(3.0, Label(2, 1, 2))

    filled = resting.filled(b',,0.500,"[1, 2]"\n,,1.000,[]\n5,6,1.500,[]\n,,2.999\n,,9.000,x\n')

    assert b'0,0,0.500,"[1, 2]"\n1,1,1.000,[]\n5,6,1.500,[]\n1,0,2.999\n2,1,9.000,x\n' == filled


def test_what_is_long_past_is_forgotten() -> None:
    """However often the label changes."""
    resting = Resting()
    for second in range(10_000):
        resting.note(float(second), Label(1, second + 1, second))

    assert len(resting._since) < 2_000
    assert (1, 9_990) == resting.at(9_989.5)[:2]
    assert (1, 9_200) == resting.at(9_199.5)[:2]
    assert NOTHING != resting.at(0.0)


def test_tasks_carry_their_graph_as_text() -> None:
    """What others wrote under that name is none, nor is what an earlier monitor wrote."""
    label = Label(3, 14, 159)

    assert label == marked({"gpulse": label.mark("ab"), "retries": 2}, "ab")
    assert marked({"gpulse": label.mark("ab")}, "cd") is None
    for foreign in (
        None,
        {},
        {"retries": 2},
        {"gpulse": 5},
        {"gpulse": "ab:a.b.c"},
        {"gpulse": "ab:1.2.3.4"},
    ):
        assert marked(foreign, "ab") is None
