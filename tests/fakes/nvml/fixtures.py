"""Gives tests a built fake NVML library and a fake machine."""

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.nvml.control import FakeNvml, build
from tests.prerequisites import require


@pytest.fixture(scope="session")
def nvml_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiled library, built once and shared by the xdist workers of this session."""
    require("C compiler")
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    library = shared / "fake-nvml" / "libnvidia-ml.so.1"
    return library if library.exists() else build(library.parent)


@pytest.fixture
def fake_nvml(nvml_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeNvml]:
    """A fake machine with one H200, which this process's NVML finds at its next nvmlInit."""
    fake = FakeNvml.create(tmp_path / "nvml-control")
    monkeypatch.setenv("FAKE_NVML_CONTROL", str(fake.path))
    ctypes.CDLL(str(nvml_library))
    yield fake
    fake.close()
