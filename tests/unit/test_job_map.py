"""Mapping directories of other exporters."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulse.model.device import Device
from gpulse.sources.scheduler_jobs import MappedJob, parse_job_map_file, read_job_map

GPUS = [
    Device(0, "GPU-0", "H200", minor_number=1),
    Device(1, "GPU-1", "H200", minor_number=0),
    Device(1, "MIG-10", "1g.18gb", parent_uuid="GPU-1", mig_index=0, gpu_instance=7),
]


def test_dcgm_exporters_directory_is_read(tmp_path: Path) -> None:
    """A file a GPU by index, in it a line a job; a GPU instance after a point."""

    (tmp_path / "0").write_text("4711\n4712\n")
    (tmp_path / "1").write_text("4711\n")
    (tmp_path / "1.7").write_text("host-job-0\n")

    assert (
        {
            "slurm:4711": MappedJob(None, ("GPU-0", "GPU-1")),
            "slurm:4712": MappedJob(None, ("GPU-0",)),
            "host-job-0": MappedJob(None, ("MIG-10",)),
        },
        [],
    ) == read_job_map(str(tmp_path), GPUS, 0.0)


def test_jobstats_directory_is_read(tmp_path: Path) -> None:
    """Job and user in one line, under the index and again under the UUID: it is one job."""

    for name in ("0", "GPU-0", "MIG-10"):
        (tmp_path / name).write_text("45916256 262563\n")

    assert {"slurm:45916256": MappedJob(262563, ("GPU-0", "MIG-10"))} == read_job_map(
        str(tmp_path), GPUS, 0.0
    )[0]


def test_the_number_of_a_device_file_is_not_an_index(tmp_path: Path) -> None:
    """Slurm counts files; that is how its prolog names GPUs."""

    (tmp_path / "nvidia0").write_text("1 0\n")
    (tmp_path / "0").write_text("2\n")

    assert {"slurm:1": MappedJob(0, ("GPU-1",)), "slurm:2": MappedJob(None, ("GPU-0",))} == read_job_map(
        str(tmp_path), GPUS, 0.0
    )[0]


def test_what_is_not_a_gpus_file_is_passed_over(tmp_path: Path) -> None:
    """Neither other names, nor GPUs that are not here, nor links, pipes and directories; none of them holds the reader up."""

    for name in ("7", "GPU-9", "README", "0.3", "0.bak"):
        (tmp_path / name).write_text("4711\n")
    os.mkfifo(tmp_path / "0")
    (tmp_path / "1").symlink_to(tmp_path / "README")
    (tmp_path / "GPU-1").mkdir()
    found, health = read_job_map(str(tmp_path), GPUS, 0.0)

    assert {} == found
    assert [str(tmp_path / "1")] == [entry.subject for entry in health]


def test_a_directory_that_is_not_there_is_said(tmp_path: Path) -> None:
    """With what to do about it."""

    found, health = read_job_map(str(tmp_path / "none"), GPUS, 5.0)

    assert {} == found
    assert [("jobs", "unreadable", 5.0)] == [(entry.source, entry.code, entry.since) for entry in health]
    assert "prolog" in (health[0].hint or "")


@pytest.mark.parametrize(
    ("data", "jobs"),
    [
        (b"12", [("slurm:12", None)]),
        (b" 12\t1000 \r\n\n", [("slurm:12", 1000)]),
        (b"12_3 1000\n", [("12_3", 1000)]),
        (b"123.pbs-server\n", [("123.pbs-server", None)]),
        (b"12 ada\n\x1b[2J\n\n", []),
        (b"", []),
        (b"x" * 65, []),
    ],
)
def test_lines_are_jobs(data: bytes, jobs: list[tuple[str, int | None]]) -> None:
    """Numbers are Slurm's; what is neither a job nor a job and a user is none."""

    assert jobs == parse_job_map_file(data)


@given(st.binary(max_size=300))
def test_no_file_raises(data: bytes) -> None:
    """Whatever is in it, and what comes out can be printed."""

    assert all(job.isprintable() for job, _ in parse_job_map_file(data))
