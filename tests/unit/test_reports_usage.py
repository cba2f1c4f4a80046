"""Who held GPUs: shares that add up, idle time, jobs over nodes, and processes as they were."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpulse.cluster.protocol import requests as r
from gpulse.cluster.protocol.operations import make_usage_csv
from gpulse.cluster.protocol.requests import Time
from gpulse.model.frame import Frame
from tests.unit.report_lab import BEGIN, Document, Held, Lab, check_alike

MINUTE = range(0, 60, 5)


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    """Two nodes with two GPUs each."""
    with Lab(tmp_path, ("0", "1"), ("0", "1")) as lab:
        yield lab


def held(answer: Document, name: str = "user") -> dict[Any, float]:
    """The time of each row, by who had it."""
    return {row[name]: row["gpu_seconds"] for row in answer["rows"]}


async def test_one_process_alone(lab: Lab) -> None:
    """It has all the time for which it was seen, what the GPU did and drew then, and what it held at most."""
    lab.fill(range(0, 90, 5), Held(7, memory=5 << 30))
    answer = await lab.usage(start=0, end=120)
    (row,) = answer["rows"]
    assert {
        "user": "ada",
        **dict.fromkeys(("job", "program", "node", "pid", "start_time")),
        "gpu_seconds": 90.0,
        "idle_seconds": 0.0,
        "harvested_seconds": 0.0,
        "utilization_mean": 0.5,
        "memory_bytes_max": 5 << 30,
        "energy_joules": 9000.0,
        "harvested_energy_joules": None,
        "gpus": 1,
        "nodes": ["n1"],
        "processes": 1,
        "first": BEGIN,
        "last": BEGIN + 85,
    } == row
    assert (90.0, 0.0, 2, 180.0) == tuple(
        answer[name] for name in ("gpu_seconds", "idle_seconds", "gpus", "capacity_seconds")
    )


@pytest.mark.parametrize(
    ("shares", "wanted"),
    [((None, None), (30, 30)), ((0.75, 0.25), (45, 15)), ((0.75, None), (30, 30)), ((0.0, 0.0), (30, 30))],
)
async def test_a_shared_gpu_is_divided(
    lab: Lab, shares: tuple[float | None, ...], wanted: tuple[float, ...]
) -> None:
    """By how much each used the GPU if that is known of all, else equally; never more than there was."""
    lab.fill(MINUTE, Held(7, sm=shares[0]), Held(8, user="bob", sm=shares[1]))
    assert {"ada": wanted[0], "bob": wanted[1]} == held(await lab.usage(start=0, end=60))


async def test_one_after_the_other_share_nothing(lab: Lab) -> None:
    """Two that held a GPU in the same minute but not at once have what they had, however they used it."""
    lab.fill(range(0, 30, 5), Held(7, sm=0.9))
    lab.fill(range(30, 60, 5), Held(8, user="bob", sm=0.1))
    assert {"ada": 30.0, "bob": 30.0} == held(await lab.usage(start=0, end=60))


async def test_idle_time(lab: Lab) -> None:
    """Time held while the GPU did nothing is idle; what it did is not always known, and then neither is that."""
    quiet, busy, silent = (
        {"gpu_utilization_ratio": 0.01},
        {"gpu_utilization_ratio": 0.9},
        {"power_watts": 9.0},
    )
    lab.fill(MINUTE, Held(7), values={"0": quiet})
    lab.fill(range(60, 120, 5), Held(7), Held(8, ("1",), user="bob"), values={"0": busy, "1": silent})
    rows = {row["user"]: row for row in (await lab.usage(start=0, end=120))["rows"]}
    assert (120.0, 60.0, 0.455) == tuple(
        rows["ada"][name] for name in ("gpu_seconds", "idle_seconds", "utilization_mean")
    )
    assert (60.0, None, None, 540.0) == tuple(
        rows["bob"][name] for name in ("gpu_seconds", "idle_seconds", "utilization_mean", "energy_joules")
    )


async def test_a_job_over_two_nodes(lab: Lab) -> None:
    """A scheduler's job is one row with all its nodes, GPUs and processes; others go by their topmost process."""
    job: Any = {"job": "slurm:4711", "start": BEGIN - 50.0}
    lab.fill(MINUTE, Held(7, ("0", "1"), **job), Held(8, (), **job))
    lab.fill(
        MINUTE,
        Held(7, ("0",), **job),
        Held(20, ("1",), user="bob"),
        Held(21, ("1",), user="bob", parent=20),
        node=2,
    )
    answer = await lab.usage(start=0, end=60, by="job")
    first, second = answer["rows"]
    assert ("slurm:4711", "ada", 180.0, 3, ["n1", "n2"], 2, "python3 train.py", None) == tuple(
        first[name] for name in ("job", "user", "gpu_seconds", "gpus", "nodes", "processes", "program", "pid")
    )
    assert (None, "bob", 60.0, 1, ["n2"], 2, "n2", 20, BEGIN - 100.0) == tuple(
        second[name]
        for name in ("job", "user", "gpu_seconds", "gpus", "nodes", "processes", "node", "pid", "start_time")
    )
    assert {"bob": 60.0} == held(await lab.usage(start=0, end=60, users=("bob",)))
    assert {"ada": 120.0} == held(await lab.usage(start=0, end=60, nodes=("n1",)))


async def test_harvested_time_is_nobodys_own(lab: Lab) -> None:
    """It has columns of its own, and charges nobody with idleness, energy or GPUs they did not ask for."""
    lab.fill(MINUTE, Held(7), Held(8, ("1",), job="harvest:fold"))
    lab.fill(MINUTE, Held(9, ("0", "1"), user="bob", job="harvest:fold"), node=2)
    answer = await lab.usage(start=0, end=60)
    energies = ("energy_joules", "harvested_energy_joules")
    told = ("user", "gpu_seconds", "idle_seconds", "harvested_seconds", "gpus", "processes", *energies)
    assert [
        ("ada", 60.0, 0.0, 60.0, 1, 1, 6000.0, 6000.0),
        ("bob", 0.0, None, 120.0, 2, 1, None, 12000.0),
    ] == [tuple(row[name] for name in told) for row in answer["rows"]]
    assert (60.0, 0.0, 180.0) == tuple(answer[name] for name in told[1:4])
    jobs = await lab.usage(start=0, end=60, by="job")
    assert [
        (None, "ada", 60.0, 0.0),
        ("harvest:fold", "bob", 0.0, 120.0),
        ("harvest:fold", "ada", 0.0, 60.0),
    ] == [
        tuple(row[name] for name in ("job", "user", "gpu_seconds", "harvested_seconds"))
        for row in jobs["rows"]
    ]
    assert [[6000.0, 18000.0], [6000.0, 18000.0]] == [
        [sum(row[name] or 0.0 for row in one["rows"]) for name in energies] for one in (answer, jobs)
    ]


async def test_a_pid_that_is_used_again(lab: Lab) -> None:
    """Two processes of one pid are two, whose time goes to each one's user."""
    lab.fill(MINUTE, Held(7))
    lab.fill(range(60, 90, 5), Held(7, user=None, start=BEGIN + 58.0))
    assert {"ada": 60.0, None: 30.0} == held(await lab.usage(start=0, end=120))
    found = (await lab.processes(start=0, end=120))["processes"]
    assert [(None, BEGIN + 58.0, None), ("ada", BEGIN - 100.0, BEGIN + 60.0)] == [
        (one["user"], one["start_time"], one["ended"]) for one in found
    ]


async def test_processes_over_time(lab: Lab) -> None:
    """Those that held a GPU in that time, newest first, with what they held of which and when."""
    lab.fill(range(0, 30, 5), Held(7, ("0", "1"), job="slurm:1", sm=0.5), Held(9, ()))
    lab.fill(
        range(30, 60, 5), Held(8, ("1",), user="bob", memory=None), Held(7, ("0",), job="slurm:1", sm=0.7)
    )
    answer = await lab.processes(start=0, end=60)
    bob, ada = answer["processes"]
    assert (8, BEGIN + 30, None, "bob", None, ["python3", "train.py"]) == tuple(
        bob[name] for name in ("pid", "first_seen", "ended", "user", "job", "command")
    )
    assert [None, None, None] == [
        bob["gpus"][0][n] for n in ("memory_bytes_mean", "memory_bytes_max", "sm_ratio_mean")
    ]
    assert [("0", BEGIN, BEGIN + 55), ("1", BEGIN, BEGIN + 25)] == [
        (gpu["gpu"], gpu["from"], gpu["to"]) for gpu in ada["gpus"]
    ]
    assert 0.6 == pytest.approx(ada["gpus"][0]["sm_ratio_mean"])
    assert [7] == [
        one["pid"] for one in (await lab.processes(start=0, end=60, jobs=("slurm:1",)))["processes"]
    ]
    assert [8] == [one["pid"] for one in (await lab.processes(start=0, end=60, users=("bob",)))["processes"]]
    assert [7] == [one["pid"] for one in (await lab.processes(start=0, end=60, gpus=("n1:0",)))["processes"]]
    assert [] == (await lab.processes(start=60, end=0))["processes"]


async def test_a_gpu_that_is_split(tmp_path: Path) -> None:
    """Its instances can be held, the GPU itself cannot; without a utilization their activity counts."""
    with Lab(tmp_path, ("0", "0:0", "0:1")) as lab:
        lab.fill(
            MINUTE,
            Held(7, ("0:1",)),
            values={
                "0": {"power_watts": 5.0},
                "0:0": {"sm_active_ratio": 0.0},
                "0:1": {"sm_active_ratio": 0.0},
            },
        )
        answer = await lab.usage(start=0, end=60)
        assert (2, 120.0, 60.0, 60.0) == tuple(
            answer[name] for name in ("gpus", "capacity_seconds", "gpu_seconds", "idle_seconds")
        )
        assert ["0:1"] == [
            gpu["gpu"] for gpu in (await lab.processes(start=0, end=60))["processes"][0]["gpus"]
        ]


async def test_nothing_at_all(lab: Lab) -> None:
    """An empty time and an empty store give empty answers."""
    for asked in ({"start": 0, "end": 60}, {"start": 60, "end": 0}):
        answer = await lab.usage(**asked)
        assert ([], 0, 0.0, 0.0) == (
            answer["rows"],
            answer["gpus"],
            answer["gpu_seconds"],
            answer["idle_seconds"],
        )


@pytest.mark.slow
async def test_the_same_from_memory_files_and_minutes(lab: Lab) -> None:
    """Sealing and merging change nothing of who had how much."""

    def frame(second: int) -> Frame:
        values = {"gpu_utilization_ratio": 0.0 if second // 600 % 2 else 0.8, "power_watts": second / 10}
        bob = [Held(8, ("0", "1"), user="bob", sm=0.2)] if 700 < second < 4321 else []
        return lab.frame(second, Held(7, sm=0.6), *bob, values={"0": values})

    for begin, end in ((0, 5), (5, 2000), (2000, 4000), (4000, 5000)):
        lab.add([frame(second) for second in range(begin, end, 5)])
        if end in (2000, 4000):
            lab.archive.seal()
    asked: Any = {"start": 123, "end": 4877}
    before = await lab.usage(by="job", **asked), await lab.processes(**asked)
    lab.archive.tidy(BEGIN + 5000.0, keep_seconds=1e9, limit_bytes=None)
    assert any(segment.is_compacted for segment in lab.archive._history.segments)
    after = await lab.usage(by="job", **asked), await lab.processes(**asked)
    for answer in (before[0], after[0]):
        assert 2 * 4754 == pytest.approx(answer.pop("capacity_seconds"), abs=20)
    check_alike(before, after)


_SPANS = st.tuples(st.integers(0, 40), st.integers(1, 30))


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(st.lists(st.lists(_SPANS, min_size=1, max_size=2), min_size=1, max_size=2), st.booleans())
async def test_rows_add_up_to_the_time_held(spans: list[list[tuple[int, int]]], is_known: bool) -> None:
    """Whoever held which GPU when: what the rows have is what GPUs were held, no more and no less."""
    with tempfile.TemporaryDirectory() as directory, Lab(Path(directory), ("0", "1")) as lab:
        wanted = sum(
            len({frame for first, count in one for frame in range(first, first + count)}) for one in spans
        )

        def holders(frame: int) -> list[Held]:
            return [
                Held(100 * gpu + place, (str(gpu),), user=f"u{gpu}{place}", sm=0.5 if is_known else None)
                for gpu, one in enumerate(spans)
                for place, (first, count) in enumerate(one)
                if first <= frame < first + count
            ]

        lab.add([lab.frame(5 * frame, *holders(frame)) for frame in range(71)])
        answer = await lab.usage(start=0, end=400)
    assert 5.0 * wanted == pytest.approx(sum(row["gpu_seconds"] for row in answer["rows"]), abs=0.01)
    assert 5.0 * wanted == pytest.approx(answer["gpu_seconds"], abs=0.01)


async def test_the_file_cannot_become_a_formula(lab: Lab) -> None:
    """Texts that a spreadsheet would carry out begin with an apostrophe; what is unknown is empty."""
    lab.fill(MINUTE, Held(7, user='=cmd|"x"', job="-1"), Held(8, ("1",), user=None, name="@SUM(A1)"))
    request = r.GetUsage(start=Time(BEGIN), by="job")
    report = await lab.reports.usage(request, BEGIN + 60.0)
    file = make_usage_csv(report)
    lines = b"".join([piece async for piece in file.pieces]).decode().splitlines()
    assert "gpulse-usage-20270115T080000Z-20270115T080100Z.csv" == file.name
    assert 3 == len(lines)
    assert lines[1].startswith('"\'=cmd|""x""",\'-1,python3 train.py,,,,60.0,0.0,0.0,0.5,')
    assert lines[2].startswith(",,'@SUM(A1) train.py,n1,8,2027-01-15T07:58:20Z,60.0,")
