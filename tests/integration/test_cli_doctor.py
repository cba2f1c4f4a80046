"""`gpulse doctor` on machines that are well and on some that are not."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pynvml
import pytest

from tests.fakes.nvml import FakeNvml
from tests.integration.commands import run


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[FakeNvml]:
    """A machine with four GPUs."""
    made = FakeNvml.create(tmp_path / "control", 4)
    yield made
    made.close()


def test_gpus_with_the_same_to_say_share_a_line(fake: FakeNvml, nvml_library: Path) -> None:
    """A healthy machine with many GPUs is a short report."""
    ended = run("doctor", env=fake.env(nvml_library))

    assert 0 == ended.code
    assert 1 == ended.out.count("NVIDIA H200")
    assert "ok  gpu 0-3 " in ended.out


def test_a_lost_gpu_is_broken(fake: FakeNvml, nvml_library: Path) -> None:
    """The report names it with the next thing to try, and the exit code is 1."""
    fake.lose(2)
    ended = run("doctor", env=fake.env(nvml_library))

    assert 1 == ended.code
    assert "BROKEN  gpu 2 " in ended.out
    assert "ok  gpu 0,1,3 " in ended.out
    assert "-> see `dmesg" in ended.out


def test_a_driver_that_does_not_start_is_broken(fake: FakeNvml, nvml_library: Path) -> None:
    """A mismatch of library and kernel module is the most common fault after an update."""
    fake.fail_init(pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH)
    ended = run("doctor", env=fake.env(nvml_library))

    assert 1 == ended.code
    assert "BROKEN  driver " in ended.out


def test_a_machine_without_a_driver_is_not_broken() -> None:
    """It is told about the demo."""
    ended = run("doctor", env={"LD_LIBRARY_PATH": "/nonexistent"})

    assert 0 == ended.code
    assert "limited  driver " in ended.out
    assert "gpulse --demo" in ended.out


def test_what_a_diagnosis_can_tell_is_said_beforehand(fake: FakeNvml, nvml_library: Path) -> None:
    """By the GPUs with GPM and those without."""
    everywhere = run("doctor", env={"COLUMNS": "400", **fake.env(nvml_library)})
    fake.gpu(3).gpm_supported = 0
    some = run("doctor", env={"COLUMNS": "400", **fake.env(nvml_library)})

    assert ["full"] == re.findall(r"ok  diagnosis +(\S.*):", everywhere.out)
    assert "GPU 0-2: full: " in some.out
    assert "GPU 3: NVML only: " in some.out
    assert "cannot be diagnosed: tensor_cores_unused" in some.out


def test_without_a_driver_only_the_host_is_known() -> None:
    """Its processes and memory can be judged, and nothing on the GPU."""
    ended = run("doctor", env={"LD_LIBRARY_PATH": "/nonexistent", "COLUMNS": "400"})

    assert "host only: " in ended.out


def test_programs_get_json(fake: FakeNvml, nvml_library: Path) -> None:
    """One entry a check, GPUs on their own, the same exit code."""
    fake.lose(1)
    ended = run("doctor", "--json", env=fake.env(nvml_library))
    checks = {item["topic"]: item["status"] for item in json.loads(ended.out)}

    assert (1, "ok", "broken") == (ended.code, checks["gpu 0"], checks["gpu 1"])


@pytest.mark.parametrize("columns", [40, 60, 80])
def test_the_report_fits_the_terminal(fake: FakeNvml, nvml_library: Path, columns: int) -> None:
    """Details are wrapped below each other."""
    ended = run("doctor", env={"COLUMNS": str(columns), **fake.env(nvml_library)})

    assert [] == [line for line in ended.out.splitlines() if len(line) > columns]
