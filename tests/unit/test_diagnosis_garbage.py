from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpulse.diagnosis.engine import diagnose
from gpulse.errors import RecordingError
from gpulse.model.device import Device, Node
from gpulse.model.finding import Diagnosis
from gpulse.model.frame import CgroupReading, DiskReading, Frame, GpuReading, HostReading, NetworkReading
from gpulse.model.metric_catalog import CATALOG
from gpulse.model.process import GpuProcess, ProcessIdentity, ProcessReading, Thread
from tests.unit.diagnosis_perturb import glue
from tests.unit.diagnosis_traces import SICK, labels, steady

SURE = 0.5


def judged_or_refused(frames: list[Frame]) -> Diagnosis | None:
    """What is made of them; None when they are refused."""
    try:
        return diagnose(frames)
    except RecordingError:
        return None


def test_nothing_at_all() -> None:
    """No frames are not enough, and say so."""

    diagnosis = diagnose([])

    assert ((), (), 0) == (diagnosis.findings, diagnosis.judged, diagnosis.frames)
    assert diagnosis.verdict.startswith("Not enough data")


@pytest.mark.parametrize("count", [1, 2, 11, 50])
def test_too_short_to_judge(count: int) -> None:
    """One frame, two, or five seconds of a sick job are no window."""

    for name in SICK:
        diagnosis = diagnose(steady(name)[:count])

        assert () == diagnosis.findings
        assert () == diagnosis.judged
        assert diagnosis.verdict.startswith("Not enough data")


def test_too_short_says_how_much_is_missing() -> None:
    """In the gaps, with the seconds that were seen."""

    [gap] = [gap for gap in diagnose(steady("launch_bound")[:50]).data_gaps if "are needed" in gap]

    assert "only 4" in gap
    assert "10 s are needed" in gap


@pytest.mark.parametrize("name", SICK)
def test_reversed_frames_are_refused(name: str) -> None:
    """Time that runs backwards is no recording."""

    with pytest.raises(RecordingError, match="older than the frame before"):
        diagnose(reversed(steady(name)))


@pytest.mark.parametrize("name", SICK)
def test_shuffled_frames_are_refused(name: str) -> None:
    """So is time that jumps about."""

    frames = list(steady(name))
    random.Random(1).shuffle(frames)

    with pytest.raises(RecordingError):
        diagnose(frames)


def test_frames_a_little_out_of_order_are_dropped() -> None:
    """Two that changed places cost one frame and no finding."""

    frames = list(steady("launch_bound"))
    frames[50], frames[51] = frames[51], frames[50]

    assert diagnose(frames).findings[0].id in labels()["launch_bound"].right


def test_two_machines_are_refused() -> None:
    """Their frames have nothing to do with each other."""

    here = steady("launch_bound")
    there = [frame._replace(node=Node("elsewhere")) for frame in here]
    mixed = [frame for pair in zip(here, there, strict=True) for frame in pair]

    with pytest.raises(RecordingError, match="elsewhere"):
        diagnose(mixed)


def test_no_gpus() -> None:
    """A machine without any has nothing to judge."""

    diagnosis = diagnose([frame._replace(gpus=()) for frame in steady("launch_bound")])

    assert ((), ()) == (diagnosis.findings, diagnosis.judged)


@pytest.mark.parametrize("name", SICK)
def test_a_gpu_that_vanishes_is_judged_by_what_was_seen(name: str) -> None:
    """And so is one that appears midway, or is gone for a while."""

    frames = steady(name)
    third = len(frames) // 3
    gone = [frame._replace(gpus=()) for frame in frames]
    for parts in (
        [*frames[:third], *gone[third:]],
        [*gone[:third], *frames[third:]],
        [*frames[:third], *gone[third : 2 * third], *frames[2 * third :]],
    ):
        found = [f for f in diagnose(parts).findings if f.confidence >= SURE]

        assert set() == {f.id for f in found} - labels()[name].right - _WHILE_AWAY


_WHILE_AWAY = frozenset({"gpu_fault"})


@pytest.mark.parametrize("name", SICK)
def test_time_that_stands_still_is_no_time(name: str) -> None:
    """However many frames there are."""

    first = steady(name)[0]
    frames = [frame._replace(time=first.time, monotonic=first.monotonic) for frame in steady(name)]

    assert ((), ()) == (diagnose(frames).findings, diagnose(frames).judged)


@pytest.mark.parametrize("name", SICK)
def test_a_clock_that_is_set_back(name: str) -> None:
    """The wall clock jumps an hour back while the monotonic one goes on: nothing sure and wrong."""

    middle = len(steady(name)) // 2
    frames = [
        frame._replace(time=frame.time - 3600) if place >= middle else frame
        for place, frame in enumerate(steady(name))
    ]
    found = [finding for finding in diagnose(frames).findings if finding.confidence >= SURE]

    assert set() == {finding.id for finding in found} - labels()[name].right


@pytest.mark.parametrize("name", SICK)
def test_a_clock_that_is_set_forward(name: str) -> None:
    """A gap of an hour in the wall clock is a gap."""

    middle = len(steady(name)) // 2
    frames = [
        frame._replace(time=frame.time + 3600) if place >= middle else frame
        for place, frame in enumerate(steady(name))
    ]
    found = [finding for finding in diagnose(frames).findings if finding.confidence >= SURE]

    assert set() == {finding.id for finding in found} - labels()[name].right


def test_a_suspended_machine_leaves_a_gap() -> None:
    """Ten minutes without frames are not judged as ten minutes of anything."""

    frames = steady("healthy_gpt")
    later = [frame._replace(time=frame.time + 600, monotonic=frame.monotonic + 600) for frame in frames[100:]]

    assert () == diagnose([*frames[:100], *later]).findings


def test_a_long_run_is_judged_as_a_whole() -> None:
    """The same run three times over is the same run."""

    once = steady("python_bound_step")
    thrice = glue(glue(once, once), once)

    assert diagnose(thrice).findings[0].id in labels()["python_bound_step"].right


_NAMES = {
    scope: [name for name, metric in CATALOG[scope].items() if not metric.derived]
    for scope in ("gpu", "host", "disk", "network", "process", "cgroup")
}
_NUMBERS = st.one_of(
    st.sampled_from([0, 1, -1, 0.5, 1e-9, 1e18, -1e18, 2**64]),
    st.floats(-1e18, 1e18),
    st.integers(-(2**64), 2**64),
)


def _values(scope: str) -> st.SearchStrategy[dict[str, float]]:
    return st.dictionaries(st.sampled_from(_NAMES[scope]), _NUMBERS, max_size=12)


_PIDS = st.integers(1, 4)
_GPUS = st.builds(
    lambda index, values, facts, processes: GpuReading(
        Device(index, f"GPU-{index}", "any", facts=facts), values, processes
    ),
    st.integers(0, 1),
    _values("gpu"),
    _values("gpu"),
    st.none()
    | st.lists(
        st.builds(GpuProcess, _PIDS, st.just("compute"), st.none(), st.none() | st.floats(0, 1)), max_size=2
    ).map(tuple),
)
_PROCESSES = st.builds(
    lambda pid, parent, start, state, values, on_gpu: ProcessReading(
        ProcessIdentity(pid, parent, start, "any", cgroup="/any"),
        state,
        values,
        (Thread(pid, "any", "R", values.get("cpu_user_seconds_total", 0.0)),),
        on_gpu,
    ),
    _PIDS,
    _PIDS | st.none(),
    st.none() | st.just(0.0),
    st.sampled_from(["R", "S", "D", None]),
    _values("process"),
    st.booleans(),
)
_MOMENTS = st.builds(
    lambda gpus, host, disk, link, group, processes: Frame(
        0.0,
        0.0,
        Node("any"),
        tuple({gpu.device.uuid: gpu for gpu in gpus}.values()),
        None if host is None else HostReading(host),
        (DiskReading("sda", None, disk),),
        (),
        (NetworkReading("eth0", "ethernet", True, link),),
        tuple({process.pid: process for process in processes}.values()),
        (CgroupReading("/any", group),),
    ),
    st.lists(_GPUS, max_size=2),
    st.none() | _values("host"),
    _values("disk"),
    _values("network"),
    _values("cgroup"),
    st.lists(_PROCESSES, max_size=3),
)


@pytest.mark.slow
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
@given(st.lists(_MOMENTS, min_size=1, max_size=4), st.sampled_from([0.1, 0.5, 1.0, 7.0]))
def test_absurd_readings_break_nothing(moments: list[Frame], step: float) -> None:
    """Whatever a driver may come up with: a diagnosis whose numbers can be written down, or a refusal."""

    frames = [
        moments[number % len(moments)]._replace(time=1e9 + number * step, monotonic=number * step)
        for number in range(45)
    ]
    diagnosis = judged_or_refused(frames)

    assert diagnosis is not None
    assert diagnosis.to_dict()["verdict"]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.sampled_from(SICK),
    st.lists(st.tuples(st.floats(-50, 50), st.floats(-50, 50)), min_size=8, max_size=8),
)
def test_absurd_times_break_nothing(name: str, jumps: list[tuple[float, float]]) -> None:
    """Clocks that jump about lead to a refusal, or to nothing that is sure and wrong."""

    frames = steady(name)
    part = len(frames) // len(jumps)
    jumped = [
        frame._replace(
            time=frame.time + jumps[min(place // part, 7)][0],
            monotonic=frame.monotonic + jumps[min(place // part, 7)][1],
        )
        for place, frame in enumerate(frames)
    ]
    diagnosis = judged_or_refused(jumped)
    found = () if diagnosis is None else diagnosis.findings

    assert set() == {finding.id for finding in found if finding.confidence >= SURE} - labels()[name].right
