from __future__ import annotations

from itertools import pairwise

import pytest

from gpulse.errors import ClosedError
from gpulse.model.frame import Frame
from gpulse.model.metric_catalog import CATALOG
from gpulse.sources.demo_machine import DEMO_WORKLOADS, DemoMachine

STARTED = 1_800_000_000.0


def play(seconds: float, step: float, *, gpus: int = 8) -> list[Frame]:
    """Frames of a demo, one every step."""
    demo = DemoMachine(STARTED, gpus=gpus)
    return [demo.sample(STARTED + number * step) for number in range(int(seconds / step) + 1)]


def counters(frame: Frame) -> dict[tuple[object, ...], float]:
    """Every counter of a frame, by what it is known by."""
    found: dict[tuple[object, ...], float] = {}
    groups = [
        *(("gpu", gpu.device.uuid, gpu.values) for gpu in frame.gpus),
        *(("disk", disk.name, disk.values) for disk in frame.disks),
        *(("network", link.name, link.values) for link in frame.network),
        *(("process", (p.pid, p.identity.start_time), p.values) for p in frame.processes),
    ]
    assert frame.host is not None
    groups.append(("host", "", frame.host.values))
    for scope, subject, values in groups:
        for name, value in values.items():
            if CATALOG[scope][name].kind == "counter":  # type: ignore[index]
                found[scope, subject, name] = value
    for core, ticks in enumerate(frame.host.cores):
        for state, count in enumerate(ticks):
            found["core", core, state] = count
    return found


def test_the_same_time_shows_the_same_machine() -> None:
    """What is shown depends on nothing but the time since the start, whatever was shown before."""

    fresh = DemoMachine(STARTED).sample(STARTED + 47.3)
    played = DemoMachine(STARTED)
    for seconds in (0.0, 12.0, 200.0, 3.0):
        played.sample(STARTED + seconds)

    assert fresh == played.sample(STARTED + 47.3)


def test_every_gpu_plays_its_workload() -> None:
    """Eight GPUs, eight scenes, each with its user."""

    frame = DemoMachine(STARTED).sample(STARTED + 10)
    owners = {process.identity.owner.user for process in frame.processes}

    assert list(range(8)) == [gpu.device.index for gpu in frame.gpus]
    assert {scene.user for scene in DEMO_WORKLOADS if scene.user} == owners


@pytest.mark.slow
def test_counters_go_on_growing_over_the_seam() -> None:
    """Played for five minutes, each recording starts over many times, and no counter ever runs backwards."""

    known: dict[tuple[object, ...], float] = {}
    backwards = set()
    for frame in play(300.0, 0.5):
        now = counters(frame)
        backwards |= {key for key, value in now.items() if value < known.get(key, value)}
        known.update(now)

    assert set() == backwards


def test_work_goes_on_over_the_seam() -> None:
    """Energy grows in every ten seconds of five minutes, on every GPU."""

    frames = play(300.0, 10.0)
    grown = [
        later.values["energy_joules_total"] - earlier.values["energy_joules_total"]
        for before, after in pairwise(frames)
        for earlier, later in zip(before.gpus, after.gpus, strict=True)
    ]

    assert min(grown) > 0


def test_processes_keep_their_start_time() -> None:
    """A process is the same one for as long as the demo runs."""

    starts: dict[int, set[float | None]] = {}
    for frame in play(120.0, 1.0):
        for process in frame.processes:
            starts.setdefault(process.pid, set()).add(process.identity.start_time)

    assert {1} == {len(times) for times in starts.values()}
    assert all(start is not None and start < STARTED + 60 for times in starts.values() for start in times)


def test_sixty_four_gpus() -> None:
    """A large machine has no two GPUs, bus addresses or processes alike."""

    frame = DemoMachine(STARTED, gpus=64).sample(STARTED + 20)

    assert 64 == len({gpu.device.uuid for gpu in frame.gpus})
    assert 64 == len({gpu.device.bus_id for gpu in frame.gpus})
    assert len({process.pid for process in frame.processes}) == len(frame.processes)
    assert {process.pid for gpu in frame.gpus for process in gpu.processes or ()} == {
        process.pid for process in frame.processes if process.on_gpu
    }


def test_a_time_before_the_start_shows_the_start() -> None:
    """A clock that is set back does not break the demo."""

    demo = DemoMachine(STARTED)

    start, before = demo.sample(STARTED), demo.sample(STARTED - 100)

    assert [gpu.values for gpu in start.gpus] == [gpu.values for gpu in before.gpus]


def test_a_closed_demo_says_so() -> None:
    """Using it afterwards is an error."""

    demo = DemoMachine(STARTED)
    demo.close()
    demo.close()

    with pytest.raises(ClosedError):
        demo.sample(STARTED)
