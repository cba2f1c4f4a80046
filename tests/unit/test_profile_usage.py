from __future__ import annotations

import re
from math import isclose
from pathlib import Path

import pytest

import gpulse
from gpulse.model.device import Device
from gpulse.model.finding import Diagnosis
from gpulse.model.formatting import short_duration
from gpulse.model.frame import GpuReading
from gpulse.model.metric_catalog import Values
from gpulse.model.process import GpuProcess
from gpulse.profiling.block_diagnosis import diagnose_block
from gpulse.profiling.block_report import BlockReport, ProfileSummary, energy
from gpulse.profiling.block_usage import BlockUsage, RunTimes, UsageTracker
from gpulse.profiling.profiler import Block
from gpulse.sources.recording_reader import Recording
from tests.unit.frames import GIB, NOON

RECORDINGS = Path(__file__).parents[1] / "data" / "recordings"
ME = 4711


def run_times(*runs: tuple[float, float]) -> RunTimes:
    """Return the run times of a block, recorded in order."""
    made = RunTimes()
    moments = [(start, True) for start, _ in runs] + [(end, False) for _, end in runs]
    for at, begins in sorted(moments):
        (made.enter if begins else made.leave)(at)
    return made


def reading(
    at: float,
    values: Values,
    *,
    index: int = 0,
    gpm_at: float | None = None,
    slow_at: float | None = None,
    own_bytes: int | None = None,
) -> GpuReading:
    """What a GPU says at a time, in seconds since noon; power and processes are of that very time."""
    read_at = {"second": NOON + at}
    if gpm_at is not None:
        read_at["gpm"] = NOON + gpm_at
    if slow_at is not None:
        read_at["slow"] = NOON + slow_at
    processes = () if own_bytes is None else (GpuProcess(ME, "compute", own_bytes),)
    return GpuReading(Device(index, f"GPU-{index}", "NVIDIA H200"), values, processes, read_at)


class Scene:
    """A usage tracker and its events, in seconds since noon."""

    def __init__(self) -> None:
        self.tracker = UsageTracker()
        self.tracker.pid = ME
        self.usage = BlockUsage("step")

    def run(self, start: float, end: float | None = None, usage: BlockUsage | None = None) -> None:
        """A run of the block."""
        self.tracker.add_event((start, usage or self.usage, True))
        if end is not None:
            self.tracker.add_event((end, usage or self.usage, False))

    def see(self, at: float, *gpus: GpuReading) -> None:
        """Add one sample of the GPUs."""
        self.tracker.add_readings(gpus, NOON + at, at)

    def watts(self, *powers: float, step: float = 1.0) -> None:
        """Add samples of a GPU with these power values."""
        for place, power in enumerate(powers):
            self.see(place * step, reading(place * step, {"power_instant_watts": power}))

    def report(self, now: float = 100.0, usage: BlockUsage | None = None) -> BlockReport:
        """Return the report of the block."""
        return BlockReport.of(
            usage or self.usage,
            now,
            Diagnosis("-"),
            interval_seconds=0.1,
            used_uuids=self.tracker.used_uuids,
        )


def test_runs_that_overlap_are_one_time() -> None:
    """Threads in the same block at once, and a block within itself, use the GPU once."""
    made = run_times((1.0, 3.0), (2.0, 5.0), (2.5, 2.75))

    assert (3, 4.0, 5.25) == (made.count, made.seconds(9.0), made.runs_seconds(9.0))
    assert (4.0, 3.0) == made.within(0.0, 10.0)


def test_a_part_of_a_block_has_its_own_middle() -> None:
    """The energy of an interval depends on where in it the block was."""
    made = run_times((1.0, 2.0), (4.0, 8.0))

    assert (2.0, 0.5 * (0.5 + 3.5)) == made.within(1.0, 5.0)
    assert (0.0, 0.0) == made.within(2.0, 4.0)


@pytest.mark.parametrize("lateness", [0.004, -0.004, 0.3])
def test_energy_does_not_depend_on_how_two_clocks_were_read(lateness: float) -> None:
    """A busy machine can pause this process between its reads of the one clock and the other."""
    scene = Scene()
    scene.run(0.1, 0.9)
    for at, read_at, late in (
        (0, 0, 0),
        (0.25, 0.25, 0.01),
        (0.5, 0.25, 0.01 - lateness),
        (0.75, 0.75, 0),
        (1, 1, 0),
    ):
        gpu = reading(read_at, {"power_instant_watts": 300.0})
        scene.tracker.add_readings([gpu], NOON + at, at + late)

    assert scene.report().energy_joules == pytest.approx(300 * 0.8)


def test_a_moment_is_in_a_block_or_not() -> None:
    """Also while it is open."""
    made = run_times((1.0, 2.0))
    made.enter(5.0)

    assert [False, True, True, False, False, True] == [made.covers(at) for at in (0.5, 1, 2, 2.5, 4.9, 7)]


@pytest.mark.parametrize("readings", [3, 5.5, 9, 10.2, 12.5])
def test_what_is_no_estimate_is_nearly_right(readings: float) -> None:
    """Power that jumps between readings is shared out as if it rose slowly; only few readings make much of that."""
    wrong = 0.0
    for late in range(10):
        scene, begin = Scene(), 1.0 + late / 100
        end = begin + readings / 10
        scene.run(begin, end)
        scene.watts(*(100 if begin <= at / 10 < end else 500 for at in range(40)), step=0.1)
        report = scene.report()
        wrong = max(wrong, abs((report.energy_joules or 0) / report.seconds - 100) / 400)

    assert wrong < 0.11 or report.is_estimate
    assert (readings < 10) == report.is_estimate


def test_a_block_that_is_open_may_be_an_estimate_too() -> None:
    """By the runs so far: somebody may ask in the middle of one."""
    short, long, unused = Scene(), Scene(), Scene()
    for start in (0.0, 1.0, 2.0):
        short.run(start, start + 0.1)
    short.run(3.0)
    long.run(0.0)
    reports = [short.report(3.1), long.report(3.1), unused.report(3.1)]

    assert [True, False, False] == [report.is_estimate for report in reports]
    assert [None, None, None] == [report.run_seconds for report in reports]


def test_documentation_names_what_a_block_and_its_report_have() -> None:
    """Whatever stands in its first column can be asked for."""
    text = (Path(__file__).parents[2] / "docs" / "reference" / "python-api.md").read_text()
    of_block, of_report = (
        re.findall(r"`(\w+)(?:\(\))?`", " ".join(re.findall(r"^\| (`.*?) \|", part, re.MULTILINE)))
        for part in re.findall(r"^\| of (?:a block|`p\.report).*?\n\n", text, re.MULTILINE | re.DOTALL)
    )

    assert {"runs", "energy_joules", "activity", "findings", "to_dict"} <= set(of_block)
    assert {"run_seconds", "is_estimate"} <= set(of_report)
    assert [] == [name for name in of_block if not hasattr(Block, name)]
    assert [] == [name for name in [*of_block, *of_report] if not hasattr(BlockReport, name)]


def test_an_end_without_a_begin_is_nothing() -> None:
    """As in a process that was forked inside the block."""
    made = run_times((1.0, 2.0))
    made.leave(9.0)

    assert (1, 0, 1.0) == (made.count, made.depth, made.seconds(10.0))


def test_energy_is_the_area_under_the_power() -> None:
    """Power runs straight from one reading to the next."""
    scene = Scene()
    scene.run(0.0, 3.0)
    scene.watts(100, 200, 400, 400)

    assert 150 + 300 + 400 == scene.report().energy_joules
    assert pytest.approx(850 / 3) == scene.report().gpus[0].power_watts


def test_a_short_block_has_the_power_around_it() -> None:
    """Its energy is read off the line between two readings, and nothing claims that one fell into it."""
    scene = Scene()
    scene.run(0.70, 0.80)
    scene.watts(100, 200)
    report = scene.report()

    assert isclose(17.5, report.energy_joules or 0)
    assert (0, None, True) == (
        report.samples,
        report.memory_peak_bytes,
        isclose(0.1, report.measured_seconds),
    )


def test_many_short_runs_cost_what_one_long_one_does() -> None:
    """However a second is cut up."""
    scene, whole = Scene(), BlockUsage("whole")
    scene.run(0.0, 4.0, whole)
    for place in range(400):
        scene.run(place / 100, (place + 1) / 100)
    scene.watts(100, 300, 50, 50, 700)

    assert isclose(scene.report().energy_joules or 0, scene.report(usage=whole).energy_joules or 1)
    assert 400 == scene.report().runs


def test_nested_blocks_each_have_all_of_their_time() -> None:
    """What is inside is also what the outer one used."""
    scene, inner = Scene(), BlockUsage("inner")
    scene.run(0.0, 4.0)
    scene.run(1.0, 2.0, inner)
    scene.watts(100, 100, 100, 100, 100)

    assert (400, 100) == (scene.report().energy_joules, scene.report(usage=inner).energy_joules)


def test_power_that_was_not_known_gives_no_energy() -> None:
    """Neither zero nor what it was before: the time is left out, and said to be."""
    scene = Scene()
    scene.run(0.0, 4.0)
    for at, watts in enumerate((100, 100, None, None, None)):
        scene.see(float(at), reading(float(at), {} if watts is None else {"power_instant_watts": watts}))
    gpu = scene.report().gpus[0]

    assert (100, 1.0, 4.0) == (gpu.energy_joules, gpu.measured_seconds, scene.report().measured_seconds)


def test_without_any_power_there_is_no_energy() -> None:
    """A MIG instance, for one, cannot say what it draws."""
    scene = Scene()
    scene.run(0.0, 2.0)
    for at in (0.0, 1.0, 2.0):
        scene.see(at, reading(at, {"memory_used_bytes": GIB}))

    assert (None, None, GIB) == (
        scene.report().energy_joules,
        scene.report().gpus[0].power_watts,
        scene.report().memory_peak_bytes,
    )


def test_average_power_serves_where_there_is_no_other() -> None:
    """Older GPUs report no power of the instant."""
    scene = Scene()
    scene.run(0.0, 2.0)
    for at in (0.0, 1.0, 2.0):
        scene.see(at, reading(at, {"power_watts": 70.0}))

    assert 140 == scene.report().energy_joules


def test_the_counter_of_energy_puts_the_power_right() -> None:
    """Power is looked at now and then, the counter has seen it all."""
    scene = Scene()
    scene.run(0.0, 5.0)
    for at in range(7):
        counted: Values = {"power_instant_watts": 100.0, "energy_joules_total": 1000 + 110 * (at // 5) * 5.0}
        scene.see(float(at), reading(float(at), counted, slow_at=at // 5 * 5.0))

    assert isclose(550, scene.report().energy_joules or 0)


def test_the_counter_of_energy_speaks_only_of_blocks_that_were_open_all_the_time() -> None:
    """A bias of what ran before is not the block's."""
    scene, later = Scene(), BlockUsage("later")
    scene.run(0.0, 2.0)
    scene.run(2.0, 11.0, later)
    for at in range(13):
        counted: Values = {"power_instant_watts": 100.0, "energy_joules_total": 1000 + 120 * (at // 5) * 5.0}
        scene.see(float(at), reading(float(at), counted, slow_at=at // 5 * 5.0))

    assert 200 == scene.report().energy_joules
    assert isclose(300 + 600 + 100, scene.report(usage=later).energy_joules or 0)


@pytest.mark.parametrize("counted", [0.0, 2000.0, -50.0])
def test_an_implausible_counter_is_ignored(counted: float) -> None:
    """One that stands still, or that was set back, is no reason to doubt the power."""
    scene = Scene()
    scene.run(0.0, 5.0)
    for at in range(7):
        values: Values = {"power_instant_watts": 100.0, "energy_joules_total": 1000 + counted * (at // 5)}
        scene.see(float(at), reading(float(at), values, slow_at=at // 5 * 5.0))

    assert 500 == scene.report().energy_joules


def test_memory_peaks_at_readings_inside_the_block() -> None:
    """What others held before or after is not the block's."""
    scene = Scene()
    scene.run(0.5, 2.5)
    for at, used in enumerate((60, 20, 30, 70)):
        scene.see(float(at), reading(float(at), {"memory_used_bytes": used * GIB}, own_bytes=used * GIB // 2))
    report = scene.report()

    assert (2, 30 * GIB, 15 * GIB) == (
        report.samples,
        report.memory_peak_bytes,
        report.process_memory_peak_bytes,
    )


def test_activity_speaks_of_the_time_before_its_reading() -> None:
    """GPM's mean between two samples arrives a sample later, and counts for the blocks of its own time."""
    scene, later = Scene(), BlockUsage("later")
    scene.run(0.0, 1.0)
    scene.run(1.0, 2.0, later)
    scene.see(0.0, reading(0.0, {}, gpm_at=0.0))
    scene.see(1.0, reading(1.0, {"sm_active_ratio": 0.1}, gpm_at=0.0))
    scene.see(2.0, reading(2.0, {"sm_active_ratio": 0.9}, gpm_at=1.0))
    scene.see(3.0, reading(3.0, {"sm_active_ratio": 0.3}, gpm_at=2.0))

    assert {"sm_active_ratio": 0.9} == scene.report().activity
    assert {"sm_active_ratio": 0.3} == scene.report(usage=later).activity


def test_only_gpus_of_this_process_count_once_it_is_on_some() -> None:
    """Eight ranks that see eight GPUs each would otherwise each claim them all."""
    scene = Scene()
    scene.run(0.0, 1.0)
    for at in (0.0, 1.0):
        scene.see(
            at,
            reading(at, {"power_instant_watts": 100.0}, index=0),
            reading(at, {"power_instant_watts": 300.0}, index=1, own_bytes=GIB),
        )

    assert ["1"] == [gpu.label for gpu in scene.report().gpus]
    assert 300 == scene.report().energy_joules


def test_gpus_come_in_the_order_of_their_numbers() -> None:
    """The tenth after the second."""
    scene = Scene()
    scene.run(0.0, 1.0)
    for at in (0.0, 1.0):
        scene.see(at, *(reading(at, {"power_instant_watts": 1.0}, index=index) for index in (10, 2, 0)))

    assert ["0", "2", "10"] == [gpu.label for gpu in scene.report().gpus]


def test_time_between_two_samplings_is_not_made_up() -> None:
    """When the thread has ended meanwhile, the power is unknown."""
    scene = Scene()
    scene.watts(100, 100)
    scene.tracker.stop()
    scene.run(5.0, 6.0)
    scene.see(9.0, reading(9.0, {"power_instant_watts": 900.0}))

    assert (None, 0.0) == (scene.report().energy_joules, scene.report().measured_seconds)


def test_a_block_that_was_reset_begins_anew() -> None:
    """While it is open, from that moment on."""
    scene = Scene()
    scene.run(0.0)
    scene.watts(100, 100, 100)
    scene.usage.restart(2.0)
    scene.see(3.0, reading(3.0, {"power_instant_watts": 100.0}))

    assert (1, True, 1.0, 100) == (
        scene.report(3.0).runs,
        scene.report().is_open,
        scene.report(3.0).seconds,
        scene.report().energy_joules,
    )


@pytest.mark.parametrize("name", ["disk_small", "fp32_cnn"])
def test_a_long_block_is_judged_like_a_recording_of_it(name: str) -> None:
    """The rules are those of `gpulse why`, over the seconds that lie in the block."""
    frames = list(Recording(RECORDINGS / f"{name}.jsonl.gz"))
    tracker, usage = UsageTracker(), BlockUsage("epoch")
    tracker.add_event((frames[0].monotonic - 1, usage, True))
    for frame in frames:
        tracker.add_readings(frame.gpus, frame.time, frame.monotonic)
        tracker.add_frame(frame)
    expected = {finding.id for finding in gpulse.diagnose(frames).findings}

    assert expected
    assert expected == {finding.id for finding in diagnose_block(usage, None).findings}


def test_a_block_that_was_hardly_open_is_not_judged() -> None:
    """Seconds that are half somebody else's say nothing about it."""
    frames = list(Recording(RECORDINGS / "disk_small.jsonl.gz"))
    tracker, usage = UsageTracker(), BlockUsage("load")
    for frame in frames:
        at = frame.monotonic
        tracker.add_event((at - 0.05, usage, True))
        tracker.add_event((at - 0.02, usage, False))
        tracker.add_readings(frame.gpus, frame.time, at)
        tracker.add_frame(frame)
    diagnosis = diagnose_block(usage, None)

    assert () == diagnosis.findings
    assert "Not enough data: a block must be open for at least 10 s without a break." == diagnosis.verdict


def test_a_report_reads_well() -> None:
    """Time, energy and memory, a line for each GPU, and a note on missing data."""
    scene = Scene()
    scene.run(0.0, 2.0)
    for at in (0.0, 1.0, 2.0):
        values: Values = {
            "power_instant_watts": 350.0,
            "memory_used_bytes": 30 * GIB,
            "gpu_utilization_ratio": 0.97,
            "sm_active_ratio": 0.5,
        }
        scene.see(at, reading(at, values, gpm_at=at, own_bytes=29 * GIB))
    expected = """\
step: 2.0 s, 700 J, peak memory 30.0 GiB (29.0 GiB by this process)
  GPU  NAME         ENERGY  POWER  PEAK MEM  PROCESS  BUSY   SM  SAMPLES
    0  NVIDIA H200   700 J   350W     30.0G    29.0G   97%  50%        3
  -"""

    assert expected == str(scene.report())


def test_names_are_harmless_wherever_they_are_shown() -> None:
    """A block's name may come from a file that somebody else wrote."""
    usage = BlockUsage("<script>alert(1)</script>\x1b[2J")
    report = BlockReport.of(usage, 1.0, Diagnosis("<b>"), interval_seconds=0.1)
    shown = report._repr_html_() + ProfileSummary((report,))._repr_html_()

    assert "<script>" not in shown
    assert "<b><" not in shown
    assert "\x1b" not in str(report) + str(ProfileSummary((report,)))


@pytest.mark.parametrize(
    ("joules", "text"),
    [(None, "-"), (0.0123, "0.012 J"), (512, "512 J"), (7321, "7.3 kJ"), (9e5, "0.25 kWh")],
)
def test_energy_has_a_unit_that_fits(joules: float | None, text: str) -> None:
    """From a step to a night."""

    assert text == energy(joules)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (0.0, "0 µs"),
        (4e-7, "<1 µs"),
        (1.8e-5, "18 µs"),
        (0.0042, "4.2 ms"),
        (0.25, "250 ms"),
        (75.0, "1:15"),
    ],
)
def test_times_have_a_unit_that_fits(value: float | None, text: str) -> None:
    """From a step to a night."""

    assert text == short_duration(value)
