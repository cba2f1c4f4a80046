"""What `gpulse why` says, byte for byte. `make golden` writes the files anew."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpulse.diagnosis.engine import diagnose
from gpulse.sources.recording_reader import Recording
from gpulse.terminal.diagnosis_verdict import verdict_lines
from gpulse.terminal.table import make_painter
from tests.integration.commands import TRACES

GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.fixture(autouse=True)
def _greenwich(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The same local time everywhere."""
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "UTC")
        time.tzset()
        yield
    time.tzset()


@pytest.mark.parametrize("trace", ["checkpoint_stall", "loader_all_cores", "healthy_graphs"])
def test_the_verdict_on_recorded_hardware(trace: str) -> None:
    """A pause, a slow input pipeline and a healthy run, in a window of 80 columns."""
    found = diagnose(Recording(TRACES / f"{trace}.jsonl.gz"))
    said = "\n".join([*verdict_lines(found, 80, make_painter(color=False), verbose=False), ""])
    path = GOLDEN / f"why-{trace}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_bytes(said.encode())

    assert path.read_bytes().decode() == said
