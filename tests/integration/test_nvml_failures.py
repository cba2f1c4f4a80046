from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pynvml as nv
import pytest

from gpulse.model.frame import Frame, GpuReading
from gpulse.model.source_health import Health
from gpulse.sampling.sampler import Sampler
from gpulse.sources.host import read_node
from gpulse.sources.local_machine import LocalMachine
from gpulse.sources.nvml.gpu_reader import GpuReader
from tests.fakes.nvml import FakeNvml
from tests.integration.cluster import until
from tests.integration.nvml_machine import (
    IMPATIENT,
    QUICK,
    TICK_PATIENCE,
    codes,
    four,
    frames_until,
    machine,
    reading,
)

XIDS = {"xid_errors_total", "xid_last_code", "xid_last_timestamp_seconds"}
HANGS = {
    "a call of the tick": "nvmlDeviceGetPowerUsage",
    "a call of the second group": "nvmlDeviceGetEnforcedPowerLimit",
    "the list of processes": "nvmlDeviceGetComputeRunningProcesses",
    "a fact": "nvmlDeviceGetMaxPcieLinkWidth",
    "a slow call": "nvmlDeviceGetPersistenceMode",
    "a GPM sample": "nvmlGpmSampleGet",
}
FULL = 55
"""A GPU of the fake machine has more readings than this once every group was read."""


def is_full(gpu: GpuReading) -> bool:
    """Whether every group of readings is there."""
    return len(gpu.values) > FULL and len(gpu.device.facts) > 10 and gpu.processes is not None


def all_full(readings: tuple[GpuReading, ...], _: tuple[Health, ...] = ()) -> bool:
    """Whether every GPU of four is."""
    return len(readings) == 4 and all(map(is_full, readings))


def is_problem_free(readings: tuple[GpuReading, ...], health: tuple[Health, ...]) -> bool:
    """Whether all four are there and nobody complains."""
    return all_full(readings) and not any(entry.is_problem for entry in health)


def threads() -> list[str]:
    """Return the names of the threads that read GPUs."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("gpulse")]


def seconds_of(call: Callable[[], object]) -> float:
    """Return how long a call took."""
    begun = time.monotonic()
    call()
    return time.monotonic() - begun


# --- a GPU that is lost -------------------------------------------------------------------------


def test_a_lost_gpu_is_a_gap_and_the_others_are_whole(fake_nvml: FakeNvml) -> None:
    """Every reading of it is absent at once, its facts and its row stay, and nobody else is touched."""

    four(fake_nvml)
    with reading() as gpus:
        gpus.until(all_full)
        fake_nvml.lose(2)
        readings, health = gpus.tick()

    assert {} == readings[2].values
    assert readings[2].processes is None
    assert len(readings[2].device.facts) > 10
    assert [True, True, False, True] == [is_full(gpu) for gpu in readings]
    assert [("gpu 2", "gpu_lost")] == [(e.subject, e.code) for e in health if e.is_problem]


def test_the_others_stay_whole_while_a_gpu_is_lost(fake_nvml: FakeNvml) -> None:
    """Not even the look for what changed costs them a reading."""

    four(fake_nvml)
    with reading() as gpus:
        gpus.until(all_full)
        fake_nvml.lose(2)
        shortest = FULL
        for _ in range(20):
            readings, health = gpus.tick()
            shortest = min(shortest, *(len(readings[index].values) for index in (0, 1, 3)))
            assert {"gpu_lost"} == codes(health, "gpu 2")
            time.sleep(0.01)

    assert FULL == shortest
    assert 1 == fake_nvml.inits


def test_a_lost_gpu_comes_back_by_itself(fake_nvml: FakeNvml) -> None:
    """As soon as it answers again, all of its readings are there."""

    four(fake_nvml)
    with reading() as gpus:
        gpus.until(all_full)
        fake_nvml.lose(2)
        gpus.until(lambda _, health: codes(health, "gpu 2") == {"gpu_lost"})
        fake_nvml.restore(2)
        gpus.until(is_problem_free)


def test_a_gpu_that_is_lost_at_the_start_is_a_row_and_comes_back(fake_nvml: FakeNvml) -> None:
    """It has no name yet, but it is there, and the look for changes opens it later."""

    four(fake_nvml).lose(1)
    with reading() as gpus:
        readings, health = gpus.tick(patience=1.0)
        fake_nvml.restore(1)
        after, _ = gpus.until(is_problem_free)

    assert ["not answering", "unknown-1", {}] == [
        readings[1].device.name,
        readings[1].device.uuid,
        readings[1].values,
    ]
    assert {"gpu_lost"} == codes(health, "gpu 1")
    assert ["NVIDIA H200"] * 4 == [gpu.device.name for gpu in after]


def test_since_when_a_gpu_is_lost_stays_the_same(fake_nvml: FakeNvml) -> None:
    """The health entry says when it began, not when it was last seen."""

    with reading() as gpus:
        gpus.tick(patience=1.0)
        fake_nvml.lose(0)
        first = gpus.tick()[1]
        time.sleep(0.05)
        later = gpus.tick()[1]

    assert [e.since for e in first if e.code == "gpu_lost"] == [
        e.since for e in later if e.code == "gpu_lost"
    ]


# --- GPUs that come and go ----------------------------------------------------------------------


def test_a_gpu_that_is_removed_keeps_its_row_as_a_gap(fake_nvml: FakeNvml) -> None:
    """The later ones move up, as NVML counts; the one that is gone is last, without readings."""

    four(fake_nvml)
    with reading() as gpus:
        before, _ = gpus.until(all_full)
        fake_nvml.remove(1)
        uuids = [gpu.device.uuid for gpu in before]
        moved = [uuids[0], uuids[2], uuids[3], uuids[1]]
        after, health = gpus.until(
            lambda readings, _: (
                moved == [gpu.device.uuid for gpu in readings] and all(map(is_full, readings[:3]))
            )
        )

    assert [0, 1, 2, 1] == [gpu.device.index for gpu in after]
    assert {} == after[-1].values
    assert {"gpu_lost"} == codes(health, uuids[1])
    assert set() == codes(health, "gpu 1")


def test_a_gpu_that_is_added_gets_a_row_with_everything(fake_nvml: FakeNvml) -> None:
    """No restart is needed, and the others do not lose a reading over it."""

    for index in (1, 3):
        fake_nvml.add(index)
    with reading() as gpus:
        gpus.until(lambda readings, _: len(readings) == 3 and all(map(is_full, readings)))
        fake_nvml.add(2)
        readings, health = gpus.until(all_full)

    assert [0, 1, 2, 3] == [gpu.device.index for gpu in readings]
    assert [0, 1, 2, 3] == [gpu.device.minor_number for gpu in readings]
    assert not [entry for entry in health if entry.is_problem]


def test_a_gpu_that_was_removed_and_comes_back_is_itself_again(fake_nvml: FakeNvml) -> None:
    """Its gap is filled, and there is no second row of it."""

    four(fake_nvml)
    with reading() as gpus:
        gpus.until(all_full)
        fake_nvml.remove(2)
        gpus.until(lambda readings, _: readings[-1].device.minor_number == 2)
        fake_nvml.add(2)
        readings, _ = gpus.until(is_problem_free)

    assert [0, 1, 2, 3] == [gpu.device.minor_number for gpu in readings]


# --- the driver as a whole ----------------------------------------------------------------------


def test_without_a_driver_the_rest_of_the_machine_is_read(tmp_path: Path) -> None:
    """No library on the path: no GPUs, one entry that says so, and everything else."""

    script = (
        "import time; from gpulse.sources.local_machine import LocalMachine; m = LocalMachine(); "
        "f = m.sample(time.time()); m.close(); "
        "print(len(f.gpus), f.host is not None, [(h.code, h.subject) for h in f.health if h.source == 'nvml'])"
    )
    env = {"PATH": os.environ["PATH"], "LD_LIBRARY_PATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True, timeout=60
    )

    assert "0 True [('driver_missing', None)]\n" == done.stdout


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (nv.NVML_ERROR_DRIVER_NOT_LOADED, "driver_unloaded"),
        (nv.NVML_ERROR_LIB_RM_VERSION_MISMATCH, "driver_mismatch"),
        (nv.NVML_ERROR_NO_PERMISSION, "no_permission"),
        (nv.NVML_ERROR_UNKNOWN, "failed"),
    ],
)
def test_nvml_that_does_not_start_is_one_entry_and_is_tried_again(
    fake_nvml: FakeNvml, error: int, code: str
) -> None:
    """The health says what is wrong and what to do; when it is mended the GPUs appear."""

    four(fake_nvml).fail_init(error)
    with reading() as gpus:
        readings, health = gpus.tick()
        fake_nvml.fail_init(0)
        gpus.until(is_problem_free)

    assert () == readings
    assert [(code, None)] == [(entry.code, entry.subject) for entry in health]
    assert code == "failed" or health[0].hint
    assert (1, 1) == (fake_nvml.inits, fake_nvml.shutdowns)


def test_a_driver_that_is_unloaded_and_loaded_again(fake_nvml: FakeNvml) -> None:
    """Frames keep coming, their health says why the GPUs are gaps, and then the readings return."""

    four(fake_nvml)
    with reading(watch_xids=True) as gpus:
        gpus.until(all_full)
        fake_nvml.unload_driver()
        gone, health = gpus.until(lambda readings, _: not any(gpu.values.keys() - XIDS for gpu in readings))
        assert {"driver_unloaded"} == {entry.code for entry in health if entry.is_problem}
        _, health = gpus.until(lambda _, health: codes(health, None) == {"driver_unloaded"})
        fake_nvml.load_driver("581.00")
        back, _ = gpus.until(is_problem_free)
        versions = gpus.reader.versions

    assert [0, 1, 2, 3] == [gpu.device.index for gpu in gone]
    assert [gpu.device.uuid for gpu in gone] == [gpu.device.uuid for gpu in back]
    assert "581.00" == versions[0]
    assert (2, 2, 0, 0) == (
        fake_nvml.inits,
        fake_nvml.shutdowns,
        fake_nvml.open_gpm_samples,
        fake_nvml.open_event_sets,
    )


@pytest.mark.usefixtures("fake_nvml")
def test_what_the_driver_says_of_the_node_takes_nothing_away() -> None:
    """Its version joins the name, the kernel, the CPUs and their NUMA nodes."""

    with machine() as local:
        node = frames_until(local, lambda frame: frame.node.driver is not None).node

    assert (True, read_node()) == (node.cuda is not None, node._replace(driver=None, cuda=None))


def test_frames_keep_their_pace_while_the_driver_is_away(fake_nvml: FakeNvml) -> None:
    """Neither losing the driver nor looking for it holds a frame up: they come while NVML hangs at its new start."""

    four(fake_nvml)
    with machine(timeouts=IMPATIENT._replace(start=60.0)) as local:
        frames_until(local, lambda frame: all_full(frame.gpus))
        fake_nvml.hang("nvmlInit")
        fake_nvml.unload_driver()
        begun = time.monotonic()
        frames_until(local, lambda _: fake_nvml.waiting == 1)
        frames = [local.sample(time.time()) for _ in range(5)]
        took = time.monotonic() - begun
        out = fake_nvml.waiting
        fake_nvml.release_hangs()

    assert 1 == out
    assert all(frame.host is not None for frame in frames)
    assert took < 30.0, "a frame waited for the start of NVML, for which it may wait a minute"


# --- calls that do not come back ----------------------------------------------------------------


@pytest.mark.parametrize("function", HANGS.values(), ids=HANGS.keys())
def test_a_call_that_hangs_costs_only_its_gpu(fake_nvml: FakeNvml, function: str) -> None:
    """Frames with the readings of the other GPUs go on while it hangs, and say which GPU does; then it returns."""

    four(fake_nvml)
    began = time.time()
    is_fact = function == "nvmlDeviceGetMaxPcieLinkWidth"
    if is_fact:  # read once, so it hangs at the start or never
        fake_nvml.hang(function, 2)
    with machine() as local:
        whole = [0, 1, 3] if is_fact else [0, 1, 2, 3]
        frames_until(local, lambda frame: len(frame.gpus) == 4 and all(is_full(frame.gpus[i]) for i in whole))
        if not is_fact:
            fake_nvml.hang(function, 2)
        frame = frames_until(
            local,
            lambda frame: (
                "not_answering" in codes(frame.health, "gpu 2")
                and all(is_full(frame.gpus[index]) for index in (0, 1, 3))
            ),
        )
        out = fake_nvml.waiting
        fake_nvml.release_hangs()
        frames_until(local, lambda frame: is_problem_free(frame.gpus, frame.health))

    (entry,) = (entry for entry in frame.health if entry.subject == "gpu 2" and entry.is_problem)
    assert out > 0
    assert began - 30 < entry.since < frame.time


def test_a_gpu_that_hangs_in_the_tick_has_no_readings_of_the_tick(fake_nvml: FakeNvml) -> None:
    """What did not come back is absent, never the last good value."""

    four(fake_nvml)
    with reading() as gpus:
        gpus.until(all_full)
        fake_nvml.hang("nvmlDeviceGetPowerUsage", 2)
        first, _ = gpus.tick()
        later, _ = gpus.tick()
        fake_nvml.release_hangs()

    assert ["power_watts" in gpu.values for gpu in first] == [True, True, False, True]
    assert ["power_watts" in gpu.values for gpu in later] == [True, True, False, True]


def test_a_gpu_that_hangs_for_long_loses_its_slower_readings_too(fake_nvml: FakeNvml) -> None:
    """Values are held for their group's period and no longer."""

    four(fake_nvml)
    with reading() as gpus:
        gpus.until(all_full)
        fake_nvml.hang("*", 2)
        readings, _ = gpus.until(lambda readings, _: not readings[2].values)
        fake_nvml.release_hangs()

    assert readings[2].processes is None
    assert {} == readings[2].read_at


@pytest.mark.parametrize("function", ["nvmlDeviceGetHandleByIndex", "nvmlDeviceGetName", "nvmlGpmSampleGet"])
def test_a_gpu_that_hangs_while_it_is_opened_costs_only_itself(fake_nvml: FakeNvml, function: str) -> None:
    """The first frame waits a little; the others are in it, and the GPU joins them when it answers."""

    four(fake_nvml).hang(function, 2)
    with machine() as local:
        first = local.sample(time.time())
        later = [seconds_of(lambda: local.sample(time.time())) for _ in range(10)]
        fake_nvml.release_hangs()
        frames_until(local, lambda frame: is_problem_free(frame.gpus, frame.health))

    assert min(later) < IMPATIENT.start, "each frame waits for it anew"
    assert [True, True, False, True] == [len(gpu.values) > 30 for gpu in first.gpus]
    assert {"not_answering"} == codes(first.health, "gpu 2")
    assert 0 == fake_nvml.open_gpm_samples


def test_nvml_that_hangs_at_its_start_costs_the_gpus_alone(fake_nvml: FakeNvml) -> None:
    """The first frame waits a little, the next do not; the GPUs appear when NVML answers."""

    four(fake_nvml).hang("nvmlInit")
    with machine() as local:
        first, second = local.sample(time.time()), local.sample(time.time())
        later = [seconds_of(lambda: local.sample(time.time())) for _ in range(10)]
        fake_nvml.release_hangs()
        frames_until(local, lambda frame: is_problem_free(frame.gpus, frame.health))

    assert min(later) < IMPATIENT.start, "each frame waits for it anew"
    assert (True, ()) == (first.host is not None, first.gpus)
    assert {"not_answering"} == codes(first.health, None) == codes(second.health, None)
    assert (1, 1) == (fake_nvml.inits, fake_nvml.shutdowns)


def test_a_survey_that_hangs_holds_up_nobody(fake_nvml: FakeNvml) -> None:
    """Asking a sick GPU for its name is done aside, too."""

    four(fake_nvml)
    with reading() as gpus:
        gpus.until(all_full)
        fake_nvml.hang("nvmlDeviceGetUUID", 2)
        gpus.until(lambda *_: fake_nvml.waiting == 1)
        hung_at = time.time()
        gpus.until(
            lambda readings, _: (
                all_full(readings) and all(gpu.read_at["second"] > hung_at for gpu in readings)
            )
        )
        out = fake_nvml.waiting
        fake_nvml.release_hangs()

    assert 1 == out


def test_a_slow_gpu_does_not_slow_the_sampler(fake_nvml: FakeNvml) -> None:
    """With one GPU whose every call takes a minute, a dozen frames of the others come before its first call returns."""

    interval = 0.25
    four(fake_nvml).delay("*", 2, 60.0)
    source = LocalMachine(interval_seconds=interval, cadence=QUICK, timeouts=IMPATIENT, watch_xids=False)
    frames: list[Frame] = []
    begun = time.monotonic()
    with Sampler(source, interval_seconds=interval) as sampler:
        for frame in sampler:
            if len(frame.gpus) == 4 and all("power_watts" in frame.gpus[index].values for index in (0, 1, 3)):
                frames.append(frame)
            if len(frames) == 12:
                break
        took = time.monotonic() - begun
        fake_nvml.clear_faults()

    assert took < 30.0
    assert {"not_answering"} == codes(frames[-1].health, "gpu 2")


def test_a_sick_gpu_is_not_called_over_and_over(fake_nvml: FakeNvml) -> None:
    """While a call is out, nobody makes another one to the same GPU on the same lanes."""

    four(fake_nvml)
    with reading() as gpus:
        gpus.until(all_full)
        fake_nvml.hang("nvmlDeviceGetPowerUsage", 2)
        gpus.until(lambda _, health: "not_answering" in codes(health, "gpu 2"))
        out = fake_nvml.waiting
        fake_nvml.release_hangs()

    assert 1 == out


def test_closing_does_not_wait_for_a_hung_gpu(fake_nvml: FakeNvml) -> None:
    """The thread in the hung call is left behind; NVML is not ended under it."""

    four(fake_nvml)
    reader = GpuReader(QUICK, timeouts=IMPATIENT)
    now = time.time()
    reader.start(now)
    reader.collect(now, tick_patience=TICK_PATIENCE, patience=1.0)
    fake_nvml.hang("nvmlDeviceGetPowerUsage", 2)
    reader.start(now)
    reader.collect(now, tick_patience=TICK_PATIENCE)
    reader.close()
    until(lambda: threads() == ["gpulse-tick"], "the end of the threads that do not hang")
    out = fake_nvml.waiting
    fake_nvml.release_hangs()

    assert 1 == out
    assert (1, 0) == (fake_nvml.inits, fake_nvml.shutdowns)
    assert (0, 0) == (fake_nvml.open_gpm_samples, fake_nvml.open_event_sets)


def test_closing_while_nvml_hangs_at_its_end(fake_nvml: FakeNvml) -> None:
    """Even nvmlShutdown may hang; closing does not."""

    reader = GpuReader(QUICK, timeouts=IMPATIENT)
    reader.start(time.time())
    reader.collect(time.time(), tick_patience=TICK_PATIENCE)
    fake_nvml.hang("nvmlShutdown")
    reader.close()
    out = fake_nvml.waiting
    fake_nvml.release_hangs()

    assert 1 == out


# --- the books ----------------------------------------------------------------------------------


def test_everything_borrowed_is_given_back(fake_nvml: FakeNvml) -> None:
    """After close: as many shutdowns as inits, no samples, no event sets, no threads."""

    four(fake_nvml)
    with reading(watch_xids=True) as gpus:
        gpus.until(all_full)

    assert (1, 1, 0, 0) == (
        fake_nvml.inits,
        fake_nvml.shutdowns,
        fake_nvml.open_gpm_samples,
        fake_nvml.open_event_sets,
    )
    until(lambda: not threads(), "the end of the threads")


def test_a_long_interval_still_shows_the_slower_groups(fake_nvml: FakeNvml) -> None:
    """Readings that take a moment are waited for, so that rare frames are whole frames."""

    fake_nvml.h200_latencies()
    four(fake_nvml)
    with machine(interval_seconds=10.0) as local:
        times = count(time.time(), 10.0)
        local.sample(next(times))

        def is_whole() -> bool:
            """Look once more, ten seconds later for who reads the time: nothing is left of the look before."""
            time.sleep(0.11)  # the shortest time from one GPM sample to the next
            frame = local.sample(next(times))
            return all("sm_active_ratio" in gpu.values and gpu.processes is not None for gpu in frame.gpus)

        until(is_whole, "a frame with all groups, unless the machine has no time for it")


# --- Xid errors ---------------------------------------------------------------------------------


def test_xid_errors_are_counted_by_gpu(fake_nvml: FakeNvml) -> None:
    """The count, and the code of the last one."""

    four(fake_nvml)
    with reading(watch_xids=True) as gpus:
        before, _ = gpus.until(all_full)
        fake_nvml.push_xid(1, 31)
        fake_nvml.push_xid(1, 43)
        after, _ = gpus.until(lambda readings, _: readings[1].values["xid_errors_total"] == 2)

    assert [0] * 4 == [gpu.values["xid_errors_total"] for gpu in before]
    assert [0, 2, 0, 0] == [gpu.values["xid_errors_total"] for gpu in after]
    assert 43 == after[1].values["xid_last_code"]
    assert "xid_last_code" not in after[0].values


def test_the_xid_of_a_gpu_that_fell_off_the_bus_is_counted(fake_nvml: FakeNvml) -> None:
    """Xid 79 comes with the loss of the GPU, and is the one reading left of it."""

    four(fake_nvml)
    with reading(watch_xids=True) as gpus:
        gpus.until(all_full)
        fake_nvml.lose(2)
        fake_nvml.push_xid(2, 79)
        readings, _ = gpus.until(lambda readings, _: "xid_last_code" in readings[2].values)

    assert (XIDS, 79) == (set(readings[2].values), readings[2].values["xid_last_code"])


def test_xids_are_remembered_over_a_reload_of_the_driver(fake_nvml: FakeNvml) -> None:
    """A counter does not run backwards because the driver was away."""

    with reading(watch_xids=True) as gpus:
        gpus.until(lambda readings, _: is_full(readings[0]))
        fake_nvml.push_xid(0, 31)
        gpus.until(lambda readings, _: readings[0].values.get("xid_errors_total") == 1)
        fake_nvml.unload_driver()
        gpus.until(lambda _, health: codes(health, None) == {"driver_unloaded"})
        fake_nvml.load_driver()
        gpus.until(lambda readings, _: is_full(readings[0]))
        fake_nvml.push_xid(0, 43)
        readings, _ = gpus.until(lambda readings, _: readings[0].values.get("xid_last_code") == 43)

    assert 2 == readings[0].values["xid_errors_total"]


def test_without_events_xid_readings_are_absent(fake_nvml: FakeNvml) -> None:
    """Not watched for is not the same as none seen."""

    fake_nvml.fail("nvmlEventSetCreate", None, nv.NVML_ERROR_NOT_SUPPORTED)
    with reading(watch_xids=True) as gpus:
        readings, _ = gpus.until(lambda readings, _: is_full(readings[0]))

    assert not readings[0].values.keys() & XIDS


# --- MIG ----------------------------------------------------------------------------------------


def test_mig_instances_are_rows_under_their_gpu(fake_nvml: FakeNvml) -> None:
    """Each with its own memory and activity; the GPU says what only it can say."""

    fake_nvml.add(1)
    one, other = (fake_nvml.add_mig(0, gpu_instance=instance) for instance in (3, 5))
    one.memory_used, other.memory_used = 1 << 30, 2 << 30
    one.gpm[2], other.gpm[2] = 30.0, 60.0
    with reading() as gpus:
        readings, _ = gpus.until(
            lambda readings, _: all("sm_active_ratio" in gpu.values for gpu in readings[1:])
        )

    assert ["0", "0:0", "0:1", "1"] == [gpu.device.label for gpu in readings]
    assert [None, readings[0].device.uuid, readings[0].device.uuid, None] == [
        gpu.device.parent_uuid for gpu in readings
    ]
    assert [3, 5] == [gpu.device.gpu_instance for gpu in readings[1:3]]
    assert [1 << 30, 2 << 30] == [gpu.values["memory_used_bytes"] for gpu in readings[1:3]]
    assert [0.3, 0.6] == [gpu.values["sm_active_ratio"] for gpu in readings[1:3]]
    assert "power_watts" in readings[0].values
    assert "sm_active_ratio" not in readings[0].values


def test_mig_instances_appear_and_disappear(fake_nvml: FakeNvml) -> None:
    """Splitting a GPU, splitting it further and joining it again are noticed; the other GPU is not touched."""

    fake_nvml.add(1)
    with reading() as gpus:
        gpus.until(lambda readings, _: all(map(is_full, readings)))
        labels = [["0", "1"]]
        first = fake_nvml.add_mig(0, gpu_instance=3)
        readings, _ = gpus.until(lambda readings, _: len(readings) == 3)
        labels.append([gpu.device.label for gpu in readings])
        assert is_full(readings[-1])
        fake_nvml.add_mig(0, gpu_instance=5)
        readings, _ = gpus.until(lambda readings, _: len(readings) == 4)
        labels.append([gpu.device.label for gpu in readings])
        first.present = 0
        readings, _ = gpus.until(lambda readings, _: len(readings) == 3)
        labels.append([gpu.device.label for gpu in readings])
        fake_nvml.gpu(0).mig[1].present = fake_nvml.gpu(0).mig_mode = 0
        readings, health = gpus.until(
            lambda readings, _: len(readings) == 2 and "sm_active_ratio" in readings[0].values
        )
        labels.append([gpu.device.label for gpu in readings])

    assert [["0", "1"], ["0", "0:0", "1"], ["0", "0:0", "0:1", "1"], ["0", "0:0", "1"], ["0", "1"]] == labels
    assert not [entry for entry in health if entry.is_problem]
    assert (1, 1, 0) == (fake_nvml.inits, fake_nvml.shutdowns, fake_nvml.open_gpm_samples)


# --- many ---------------------------------------------------------------------------------------


def test_sixty_four_gpus_are_read_in_one_tick(fake_nvml: FakeNvml) -> None:
    """A frame of them is whole, and two sick ones cost only themselves."""

    for index in range(64):
        fake_nvml.add(index)
    with reading() as gpus:
        gpus.until(lambda readings, _: len(readings) == 64 and all(map(is_full, readings)))
        fake_nvml.hang("nvmlDeviceGetPowerUsage", 5)
        fake_nvml.hang("nvmlDeviceGetPowerUsage", 40)
        readings, _ = gpus.tick()
        fake_nvml.release_hangs()

    assert {5, 40} == {gpu.device.index for gpu in readings if "power_watts" not in gpu.values}
