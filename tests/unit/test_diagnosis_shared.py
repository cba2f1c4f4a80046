"""Situations of shared and unusual machines, made out of recordings of simple ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest

from gpulse.diagnosis.engine import diagnose
from gpulse.diagnosis.live_diagnosis import LiveDiagnosis
from gpulse.diagnosis.windowed_diagnosis import WindowedDiagnosis
from gpulse.model.finding import Diagnosis
from gpulse.model.frame import CgroupReading, Frame, GpuReading, HostReading
from gpulse.model.process import GpuProcess, ProcessIdentity, ProcessReading
from tests.unit.diagnosis_traces import HEALTHY, labels, steady, whole

GIB = 2**30
Edit = Callable[[Frame], Frame]


def edited(frames: Iterable[Frame], *edits: Edit) -> list[Frame]:
    """Frames with something changed in each."""
    changed = list(frames)
    for edit in edits:
        changed = [edit(frame) for frame in changed]
    return changed


def gpu(**values: float) -> Edit:
    """Other readings of the GPU."""
    return lambda frame: frame._replace(
        gpus=tuple(reading._replace(values={**reading.values, **values}) for reading in frame.gpus)
    )


def host(**values: float) -> Edit:
    """Other readings of the host."""

    def change(frame: Frame) -> Frame:
        old = frame.host or HostReading({})
        return frame._replace(host=old._replace(values={**old.values, **values}))

    return change


def beside(pid: int, name: str, cpu: float = 0.0) -> Edit:
    """An old process that has the GPU open and uses so many CPUs."""

    def join(frame: Frame) -> Frame:
        identity = ProcessIdentity(pid, 1, frame.time - 90_000 + frame.time % 1e-9, name)
        values = {"cpu_user_seconds_total": cpu * (frame.time % 1e6), "cpu_system_seconds_total": 0.0}
        process = ProcessReading(identity._replace(start_time=1.7e9), "S", values, on_gpu=True)
        readings = tuple(
            reading._replace(processes=(*(reading.processes or ()), GpuProcess(pid, "compute", 5 * GIB, 0.0)))
            for reading in frame.gpus
        )
        return frame._replace(gpus=readings, processes=(*frame.processes, process))

    return join


def ids(diagnosis: Diagnosis) -> list[str]:
    """What was found."""
    return [finding.id for finding in diagnosis.findings]


@pytest.mark.parametrize("name", [name for name in HEALTHY if name != "idle"])
@pytest.mark.parametrize("neighbour", [("ipykernel", 0.0), ("Xorg", 0.04)])
def test_who_only_sits_on_the_gpu_is_no_part_of_the_job(name: str, neighbour: tuple[str, float]) -> None:
    """A notebook or a display that was there first does not make a start-up count as lost time."""
    assert [] == ids(diagnose(edited(whole(name), beside(777, *neighbour))))


@pytest.mark.parametrize("name", ["healthy_gpt", "launch_bound", "tensor_cores_unused", "gpu_memory_leak"])
def test_an_empty_list_of_processes_is_not_idleness(name: str) -> None:
    """In a container the list is empty while the GPU works: less is known, and nothing wrong is said."""

    def hide(frame: Frame) -> Frame:
        return frame._replace(gpus=tuple(g._replace(processes=()) for g in frame.gpus), processes=())

    diagnosis = diagnose(edited(steady(name), hide))

    assert "GPU is idle" not in diagnosis.verdict
    assert any("--pid=host" in gap for gap in diagnosis.data_gaps)
    sure = {finding.id for finding in diagnosis.findings if finding.confidence >= 0.5}
    assert sure <= labels()[name].right


def test_memory_without_a_process_is_not_healthy() -> None:
    """An idle GPU with a hundred gigabytes in use is not simply idle."""

    def hide(frame: Frame) -> Frame:
        return frame._replace(gpus=tuple(g._replace(processes=()) for g in frame.gpus), processes=())

    assert "in use, held by no visible process" in diagnose(edited(steady("idle_allocated"), hide)).verdict


def test_a_full_run_queue_is_no_harm_to_who_always_runs() -> None:
    """Neighbours of low priority fill the queue, and the job's own thread never waits."""
    crowd = [
        frame._replace(
            host=HostReading(
                {
                    **(frame.host.values if frame.host else {}),
                    "processes_running": 64,
                    "pressure_cpu_some_seconds_total": 0.95 * (frame.time - steady("launch_bound")[0].time),
                }
            )
        )
        for frame in steady("launch_bound")
    ]

    assert ["launch_bound"] == ids(diagnose(crowd))


def test_a_cpu_limit_is_reported_as_such() -> None:
    """Not as an unexplained wait."""
    first = steady("loader_waits_on_service")[0].time

    def throttled(frame: Frame) -> Frame:
        periods = 10 * (frame.time - first)
        values = {"cpu_periods_total": periods, "cpu_throttled_periods_total": 0.7 * periods}
        processes = tuple(p._replace(identity=p.identity._replace(cgroup="/job")) for p in frame.processes)
        return frame._replace(cgroups=(CgroupReading("/job", values),), processes=processes)

    diagnosis = diagnose(edited(steady("loader_waits_on_service"), throttled))

    assert ["host_wait_unattributed"] == ids(diagnosis)
    assert "cgroup has used up its CPU limit" in diagnosis.findings[0].summary
    assert "cgroup_cpu_throttled" in [finding.id for finding in diagnosis.info]


def test_gpus_that_take_turns_are_not_held_up_by_their_thread() -> None:
    """A model spread over two GPUs without a pipeline: its thread is busy for the other one."""

    def halve(reading: GpuReading) -> GpuReading:
        ratios = {name: value / 2 for name, value in reading.values.items() if name.endswith("_ratio")}
        return reading._replace(values={**reading.values, **ratios})

    def spread(frame: Frame) -> Frame:
        first = halve(frame.gpus[0])
        second = first._replace(device=first.device._replace(index=1, uuid="GPU-1"))
        return frame._replace(gpus=(first, second))

    diagnosis = diagnose(edited(steady("healthy_gpt"), spread))

    assert {"host_wait_unattributed"} == set(ids(diagnosis))
    assert all(finding.confidence < 0.5 for finding in diagnosis.findings)
    assert "one at a time" in diagnosis.findings[0].summary


def test_weights_on_their_way_in_are_no_leak() -> None:
    """What is copied to the GPU and stays there is a start, however much memory is left."""
    first = steady("healthy_gpt")[0].time

    def loading(frame: Frame) -> Frame:
        still = {name: 0.0 for name in frame.gpus[0].values if name.endswith("_ratio")}
        held = (60 + 4.4 * (frame.time - first)) * GIB
        return gpu(**still, memory_used_bytes=held, pcie_rx_bytes_per_second=4.4 * GIB)(frame)

    diagnosis = diagnose(edited(steady("healthy_gpt"), loading))

    assert [] == ids(diagnosis)
    assert ["slow_start"] == [finding.id for finding in diagnosis.info]


def test_a_job_that_only_prepares_its_data_is_starting() -> None:
    """Sixteen busy workers before the first kernel are no bottleneck of the input."""
    still = {name: 0.0 for name in steady("loader_all_cores")[0].gpus[0].values if name.endswith("_ratio")}
    diagnosis = diagnose(edited(steady("loader_all_cores"), gpu(**still, pcie_rx_bytes_per_second=0.0)))

    assert [] == ids(diagnosis)
    assert ["slow_start"] == [finding.id for finding in diagnosis.info]


def test_memory_that_fills_a_cache_is_no_leak() -> None:
    """Growth that slows down comes to an end."""
    first = steady("healthy_gpt")[0].time

    def caching(frame: Frame) -> Frame:
        seconds = frame.time - first
        return gpu(memory_used_bytes=(38 + 16 * seconds / (seconds + 6)) * GIB)(frame)

    assert [] == ids(diagnose(edited(steady("healthy_gpt"), caching)))


def test_readings_that_cannot_be_are_no_reason_for_a_finding() -> None:
    """Shares below zero, more memory than there is, and a mask without end."""
    absurd = gpu(
        graphics_active_ratio=-5.0,
        sm_active_ratio=-5.0,
        memory_used_bytes=2.0**60,
        clocks_event_reasons=0,
    )

    assert [] == ids(diagnose(edited(steady("healthy_gpt"), absurd)))


def test_a_long_run_without_gpm_is_not_called_healthy() -> None:
    """What is unclear for half a minute is unclear for ten."""

    def blind(frame: Frame) -> Frame:
        kept = {"gpu_utilization_ratio", "memory_used_bytes", "power_watts"}
        return frame._replace(
            gpus=tuple(
                g._replace(values={name: value for name, value in g.values.items() if name in kept})
                for g in frame.gpus
            )
        )

    frames = edited(steady("thin_graph_decode"), blind)
    length = frames[-1].time - frames[0].time + 0.1
    timeline = WindowedDiagnosis()
    for lap in range(15):
        for frame in frames:
            later = lap * length
            timeline.feed(frame._replace(time=frame.time + later, monotonic=frame.monotonic + later))

    assert timeline.finish().verdict.startswith("No cause found")


def test_instances_of_one_gpu_are_distinguished() -> None:
    """Two MIG slices with the same trouble are two findings."""

    def sliced(frame: Frame) -> Frame:
        reading = frame.gpus[0]
        devices = [
            reading.device._replace(uuid=f"MIG-{place}", mig_index=place, parent_uuid="GPU-0")
            for place in (0, 1)
        ]
        return frame._replace(gpus=tuple(reading._replace(device=device) for device in devices))

    frames = edited(steady("launch_bound"), sliced)
    monitor = LiveDiagnosis()
    told = [monitor(frame) for frame in frames][-1]
    timeline = WindowedDiagnosis()
    for frame in frames:
        timeline.feed(frame)

    assert {"0:0", "0:1"} == {finding.label for finding in told}
    assert ["0:1"] == [finding.label for finding in timeline.finish({"MIG-1"}).findings]


def test_a_short_checkpoint_is_one() -> None:
    """A fast disk makes the pauses short: seven tenths of a second with a gigabyte written are enough."""
    saves = [(12.6, 14.8), (19.5, 22.5), (27.4, 31.0)]
    origin = whole("checkpoint_stall")[0].time
    frames = []
    for frame in steady("checkpoint_stall"):
        since = frame.time - origin
        if any(begin < since < end for begin, end in saves):
            continue  # the middle of the pause never happened
        earlier = sum(end - begin for begin, end in saves if since >= end)
        frames.append(frame._replace(time=frame.time - earlier, monotonic=frame.monotonic - earlier))

    found = diagnose(frames).findings

    assert ["checkpoint_stall"] == [finding.id for finding in found]
    assert all(item.value < 1.2 for item in found[0].evidence if item.signal == "stall_seconds")
