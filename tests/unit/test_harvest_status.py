"""What a harvest publishes, as a document and back."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulse.model.harvest_status import (
    MAX_PREEMPTIONS,
    HarvestGpu,
    HarvestProcess,
    HarvestProgram,
    HarvestRun,
    HarvestStatus,
    Preemption,
    harvest_job_name,
    is_harvest_job,
    status_from_document,
    status_to_document,
)

STATUS = HarvestStatus(
    time=1_700_000_000.5,
    pid=77,
    pid_start_ticks=1234,
    uid=1000,
    user="ada",
    config="/home/ada/harvest.toml",
    interval_seconds=10.0,
    gpus=(
        HarvestGpu(0, "GPU-0", "harvested", 1_699_999_000.0, "idle since 12:00", "fold", 3600.0, 2),
        HarvestGpu(1, "GPU-1", "people", 1_699_999_500.0, "bob: python3"),
    ),
    runs=(
        HarvestRun(
            "r1", "fold", (0,), 1_699_999_000.0, "running", HarvestProcess(80, 5000), HarvestProcess(81, 5001)
        ),
        HarvestRun("r2", "fold", (1,), 1_699_999_000.0, "starting"),
    ),
    programs=(HarvestProgram("fold", (0, 1), "running", "", 3, 1, -15, 3600.0),),
    preemptions=(
        Preemption(1_699_999_400.0, "fold", (1,), "bob", "opened GPU 1", 0.08),
        Preemption(1_699_999_500.0, "fold", (1,), "bob", "sat down at pts/3"),
    ),
    harvested_seconds=3600.0,
    since=1_699_000_000.0,
)


def document(**changes: Any) -> dict[str, Any]:
    """The status as it is published, with some of it other than it should be."""
    return {**json.loads(json.dumps(status_to_document(STATUS))), **changes}


def test_a_status_comes_back_as_it_was() -> None:
    """Through JSON, with everything in it and without what only a newer writer knows."""

    assert STATUS == status_from_document(document(news="of a later version"))


@pytest.mark.parametrize(
    "changes",
    [
        {"version": 2},
        {"time": None},
        {"time": float("nan")},
        {"interval_seconds": -1},
        {"pid": True},
        {"pid": 1 << 70},
        {"uid": "1000"},
        {"dry_run": 1},
        {"user": None},
        {"gpus": {}},
        {"gpus": [[]]},
        {"gpus": [{**status_to_document(STATUS)["gpus"][0], "state": "mine"}]},
        {"gpus": [{**status_to_document(STATUS)["gpus"][0], "harvested_seconds": -1.0}]},
        {"runs": [{"id": "r1"}]},
        {"runs": [{**status_to_document(STATUS)["runs"][0], "supervisor": {"pid": 1}}]},
        {"programs": [{**status_to_document(STATUS)["programs"][0], "last_status": 10_000}]},
        {"preemptions": [{**status_to_document(STATUS)["preemptions"][0], "gpus": ["0"]}]},
        {"gpus": [{}] * 20_000},
    ],
    ids=repr,
)
def test_what_is_not_a_status_is_none(changes: dict[str, Any]) -> None:
    """Another version, a missing field, a number that cannot be one, a state nobody knows."""

    assert status_from_document(document(**changes)) is None


@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from(sorted(status_to_document(STATUS))), inner, max_size=8)
        ),
        max_leaves=20,
    )
)
def test_no_document_makes_it_fail(anything: Any) -> None:
    """Whatever JSON may hold is a status or nothing."""

    assert status_from_document(anything) is None
    if isinstance(anything, dict):
        status_from_document(document(**anything))


def test_only_the_newest_preemptions_are_reported() -> None:
    """A status does not grow with the years."""

    many = tuple(Preemption(float(number), "fold", (0,), "bob", "") for number in range(200))

    back = status_from_document(status_to_document(STATUS._replace(preemptions=many)))

    assert back is not None
    assert many[-MAX_PREEMPTIONS:] == back.preemptions


def test_texts_are_made_harmless() -> None:
    """What cannot be written as UTF-8 would break whoever prints or stores it, and nobody reads a novel."""

    back = status_from_document(json.loads(json.dumps(document(user="a\ud800b", config="x" * 100_000))))

    assert back is not None
    assert ("a?b", "x" * 4096) == (back.user, back.config)


@pytest.mark.parametrize(
    ("program", "job"),
    [
        ("fold", "harvest:fold"),
        ("fold-0.5_b", "harvest:fold-0.5_b"),
        ("my fold; rm", "harvest:my%20fold%3B%20rm"),
        ("\x1b[31m", "harvest:%1B%5B31m"),
        ("é", "harvest:%C3%A9"),
        ("\ud800", "harvest:%3F"),
        ("", "harvest:unnamed"),
        ("x" * 64, f"harvest:{'x' * 64}"),
    ],
)
def test_a_program_names_a_job(program: str, job: str) -> None:
    """With letters that are harmless everywhere, and not too many of them."""

    assert job == harvest_job_name(program)
    assert is_harvest_job(job)


def test_programs_are_never_one_job() -> None:
    """Not those that differ in a blank, in another alphabet, or at the end of a long name; and none is too long."""
    long = "x" * 64
    names = [
        "fold it",
        "fold_it",
        "fold%20it",
        "折る",
        "畳む",
        "é" * 40,
        "é" * 41,
        long,
        f"{long}a",
        f"{long}b",
    ]

    jobs = {harvest_job_name(name) for name in names}

    assert (len(names), True) == (len(jobs), all(len(job) <= 8 + 64 and job.isascii() for job in jobs))


def test_other_jobs_are_not_harvested() -> None:
    """A scheduler's job, or none at all, is somebody's own."""

    assert [False, False] == [is_harvest_job("slurm:4711"), is_harvest_job(None)]
