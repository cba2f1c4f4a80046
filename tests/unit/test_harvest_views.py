"""Harvested GPUs as people see them in a terminal: neither free nor anybody's."""

from __future__ import annotations

import pytest

from gpulse.cli.progress import WatchProgress
from gpulse.cli.why_sources import DiagnosisSource
from gpulse.diagnosis.windowed_diagnosis import WindowedDiagnosis
from gpulse.model.frame import GpuReading
from gpulse.model.metric_catalog import Values
from gpulse.model.process import GpuProcess, Owner, ProcessReading
from gpulse.terminal import harvest_tables
from gpulse.terminal.snapshot_tables import SnapshotSections, snapshot_lines
from gpulse.terminal.table import make_painter
from gpulse.terminal.top import gpu_panel
from gpulse.terminal.top.gpu_panel import GpuHistory
from gpulse.terminal.top.styled_text import UNICODE
from gpulse.terminal.top.view_state import TopSnapshot
from tests.unit.frames import GIB, frame, gpu, process, snapshot

HARVESTED: Values = {"harvest_state": 2, "harvested_seconds_total": 45_000.0, "harvest_preemptions_total": 3}


def fold(pid: int = 17) -> ProcessReading:
    """A process that a harvest of ada's runs."""
    found = process(pid, "fold")
    return found._replace(identity=found.identity._replace(owner=Owner("ada", 1000, "harvest:fold")))


def held(*pids: int, index: int = 0, values: Values | None = None) -> GpuReading:
    """A GPU with these processes on it."""
    return gpu(index, values, tuple(GpuProcess(pid, "compute", GIB) for pid in pids))


def look(parts: SnapshotSections, *gpus: GpuReading, width: int = 120) -> list[str]:
    """The look as text."""
    shown = snapshot(*gpus, processes=(fold(), process(18, user="bob")))
    return list(snapshot_lines(shown, parts, width, make_painter(color=False)))


def test_a_look_says_that_a_harvested_gpu_can_be_had() -> None:
    """Its program stands where people's names stand, and a line says what that means to them."""
    lines = look(SnapshotSections(), held(17, values=HARVESTED), held(18, index=1))

    assert ["harvest:fold/17 1.0G", "bob:python3/18 1.0G"] == [line[44:] for line in lines[2:4]]
    assert (
        "GPU 0 is harvested while nobody needs it: start your work there, and it is freed immediately."
    ) == lines[4]


def test_a_narrow_look_names_the_program() -> None:
    """Where only one word is left, it is not the user's name."""

    assert look(SnapshotSections(), held(17), width=50)[2].endswith("  harvest:fold")


@pytest.mark.parametrize(
    ("pids", "values", "is_lent"),
    [
        pytest.param((17,), {}, True, id="its processes say so"),
        pytest.param((), HARVESTED, True, id="the harvest says so"),
        pytest.param((), {"harvest_state": 3}, True, id="it is being given back"),
        pytest.param((99,), HARVESTED, True, id="nobody knows whose the process is"),
        pytest.param((17, 18), HARVESTED, False, id="somebody else is there too"),
        pytest.param((18,), {"harvest_state": 0}, False, id="people use it"),
        pytest.param((), {"harvest_state": 1}, False, id="nothing runs on it"),
        pytest.param((), {}, False, id="nothing harvests"),
    ],
)
def test_what_counts_as_harvested(pids: tuple[int, ...], values: Values, is_lent: bool) -> None:
    """Only a GPU that nobody else uses."""
    shown = frame(held(*pids, values=values), processes=(fold(), process(18, user="bob")))

    assert is_lent == bool(harvest_tables.find_only_harvested(shown))


def test_the_details_say_how_much_was_harvested() -> None:
    """What it is now, for how long so far, and how often it was given back."""
    lines = look(SnapshotSections(verbose=True), held(17, values=HARVESTED))

    assert "  harvest   state harvested, total 12.5 h, given back 3 times" in lines


def test_top_says_harvested_where_nobody_else_is() -> None:
    """A person on the same GPU is who uses it."""
    whole = frame(held(17), held(17, 18, index=1), held(index=2), processes=(fold(), process(18, user="bob")))
    shown = TopSnapshot(whole)
    rows = gpu_panel.make_row_context(gpu_panel.columns_for(whole, 200), shown, GpuHistory(), UNICODE)
    lines = ["".join(piece.text for piece in gpu_panel.gpu_line(one, rows)) for one in whole.gpus]

    assert [["harvested"], ["bob"], []] == [
        [word for word in ("harvested", "bob", "ada") if word in line] for line in lines
    ]


def test_why_names_the_owner_of_the_work() -> None:
    """What ran on a harvested GPU was nobody's own."""
    watch = DiagnosisSource(WindowedDiagnosis(), lambda whole: whole, None, WatchProgress(quiet=True))
    for second in range(3):
        seen = frame(held(17), held(18, index=1), processes=(fold(), process(18, user="bob")))
        watch._take(
            seen._replace(time=seen.time + second, monotonic=seen.monotonic + second), lambda _: set()
        )

    assert [
        "GPU 0 was used by a harvest (harvest:fold), which stops as soon as somebody else uses the GPU"
    ] == [gap for gap in watch.diagnosis().data_gaps if "harvest" in gap]
