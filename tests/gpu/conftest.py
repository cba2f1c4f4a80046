"""Skips these tests where there is no GPU."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _needs_gpu() -> None:
    pynvml = pytest.importorskip("pynvml")
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        pytest.skip(f"no NVIDIA GPU: {error}")
    count = pynvml.nvmlDeviceGetCount()
    pynvml.nvmlShutdown()
    if count == 0:
        pytest.skip("no NVIDIA GPU")
