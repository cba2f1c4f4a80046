"""What every source must keep, whatever it reads: one suite over all of them."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import get_args

import pytest

from gpulse.errors import ClosedError
from gpulse.model.frame import Frame
from gpulse.model.metric_catalog import CATALOG, Scope, Values
from gpulse.model.recording_codec import RecordingDecoder, RecordingEncoder
from gpulse.model.source_health import HealthCode
from gpulse.sampling.recorder import Recorder
from gpulse.sources.demo_machine import DemoMachine
from gpulse.sources.frame_source import Source
from gpulse.sources.local_machine import LocalMachine
from gpulse.sources.nvml.read_timing import Cadence
from gpulse.sources.recording_reader import Recording, ReplaySource
from tests.fakes.nvml import FakeNvml

TRACES = sorted((Path(__file__).parents[1] / "data" / "traces").glob("*.jsonl.gz"))
SHIPPED = sorted((Path(__file__).parents[2] / "src" / "gpulse" / "sources" / "demo").glob("*.jsonl.gz"))
FRAMES = 30
LIVE_FRAMES = 10
STARTED = 1_800_000_000.0
STEP_SECONDS = 0.05

Make = Callable[[pytest.FixtureRequest, Path], Source]


def _local(request: pytest.FixtureRequest, _: Path) -> Source:
    fake: FakeNvml = request.getfixturevalue("fake_nvml")
    fake.add(1)
    fake.add_mig(1, gpu_instance=3)
    fake.add_process(0, os.getpid(), 1 << 30, sm=150)
    fake.add_process(0, 1 << 22, 1 << 30)
    fake.gpu(0).util_gpu = 101
    for metric in range(1, 100):
        fake.set_gpm(0, metric, float("nan") if metric % 3 == 0 else 99.99999)
    return LocalMachine(cadence=Cadence(second=0.05, gpm=0.1, slow=0.1), threads=True)


def _demo(_: pytest.FixtureRequest, __: Path) -> Source:
    return DemoMachine(time.time() - 25.0)


def _recording(_: pytest.FixtureRequest, folder: Path) -> Source:
    path = folder / "demo.jsonl.gz"
    recorder = Recorder(path)
    demo = DemoMachine(STARTED)
    for number in range(FRAMES):
        recorder.write(demo.sample(STARTED + number))
    recorder.close()
    return ReplaySource(Recording(path))


def _trace(path: Path) -> Make:
    return lambda _, __: ReplaySource(Recording(path))


SOURCES: dict[str, Make] = {
    "local machine": _local,
    "demo": _demo,
    "recording": _recording,
    **{path.name.removesuffix(".jsonl.gz"): _trace(path) for path in (*TRACES, *SHIPPED)},
}


@pytest.fixture(params=list(SOURCES.values()), ids=list(SOURCES))
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Source]:
    """Each source there is."""
    made: Source = request.param(request, tmp_path)
    yield made
    made.close()


@pytest.fixture
def frames(request: pytest.FixtureRequest, source: Source, taken: dict[Make, list[Frame]]) -> list[Frame]:
    """Some frames of a source."""
    make: Make = request.node.callspec.params["source"]
    if make not in taken:
        taken[make] = _taken(source)
    return taken[make]


@pytest.fixture(scope="module")
def taken() -> dict[Make, list[Frame]]:
    """The frames of each source, which nobody changes: taken by the first test that looks at them."""
    return {}


def _taken(source: Source) -> list[Frame]:
    """Some frames; a live source is given the time that it needs to change."""
    if not isinstance(source, LocalMachine):
        return [source.sample(time.time()) for _ in range(FRAMES)]
    found = []
    for _ in range(LIVE_FRAMES):
        found.append(source.sample(time.time()))
        time.sleep(STEP_SECONDS)
    return found


def readings(frame: Frame) -> Iterator[tuple[Scope, object, Values]]:
    """Everything in a frame that has values, with its scope and what it is known by."""
    for gpu in frame.gpus:
        yield "gpu", gpu.device.uuid, gpu.values
        yield "gpu", (gpu.device.uuid, "facts"), gpu.device.facts
    if frame.host is not None:
        yield "host", None, frame.host.values
    for disk in frame.disks:
        yield "disk", disk.name, disk.values
    for filesystem in frame.filesystems:
        yield "filesystem", filesystem.mount_point, filesystem.values
    for link in frame.network:
        yield "network", link.name, link.values
    for process in frame.processes:
        yield "process", (process.pid, process.identity.start_time), process.values
    for group in frame.cgroups:
        yield "cgroup", group.path, group.values


def test_names_are_the_catalogues(frames: list[Frame]) -> None:
    """A source reads what the catalogue lists for its scope; what is derived is nobody's to read."""
    strange = {
        (scope, name)
        for frame in frames
        for scope, _, values in readings(frame)
        for name in values
        if name not in CATALOG[scope] or CATALOG[scope][name].derived
    }

    assert set() == strange


def test_values_are_finite_numbers(frames: list[Frame]) -> None:
    """Neither None nor NaN nor infinity nor text: what could not be had is absent."""
    bad = {
        (scope, name, value)
        for frame in frames
        for scope, _, values in readings(frame)
        for name, value in values.items()
        if type(value) not in (int, float) or not math.isfinite(value)
    }

    assert set() == bad


def test_ratios_are_between_nothing_and_all(frames: list[Frame]) -> None:
    """0 to 1, those of single processes too."""
    bad = {
        (scope, name, value)
        for frame in frames
        for scope, _, values in readings(frame)
        for name, value in values.items()
        if CATALOG[scope][name].kind == "ratio" and not 0 <= value <= 1
    }
    shares = [
        process.sm_ratio
        for frame in frames
        for gpu in frame.gpus
        for process in gpu.processes or ()
        if process.sm_ratio is not None
    ]

    assert set() == bad
    assert all(0 <= share <= 1 for share in shares)


def test_counters_never_run_backwards(frames: list[Frame]) -> None:
    """From one frame to the next a counter stays or grows."""
    backwards = set()
    known: dict[tuple[object, ...], float] = {}
    for frame in frames:
        for scope, subject, values in readings(frame):
            for name, value in values.items():
                if CATALOG[scope][name].kind == "counter":
                    if value < known.get((scope, subject, name), value):
                        backwards.add((scope, subject, name))
                    known[scope, subject, name] = value

    assert set() == backwards


def test_time_goes_on(frames: list[Frame]) -> None:
    """The clock that rates are computed over increases with every frame."""
    clocks = [frame.monotonic for frame in frames]

    assert sorted(set(clocks)) == clocks


def test_names_of_things_are_unique(frames: list[Frame]) -> None:
    """No two GPUs with one UUID, no two processes with one pid, no two disks, links or file systems."""
    for frame in frames:
        for names in (
            [gpu.device.uuid for gpu in frame.gpus],
            [(gpu.device.label) for gpu in frame.gpus],
            [process.pid for process in frame.processes],
            [disk.name for disk in frame.disks],
            [link.name for link in frame.network],
            [filesystem.mount_point for filesystem in frame.filesystems],
            [group.path for group in frame.cgroups],
        ):
            assert len(set(names)) == len(names)


def test_the_processes_of_gpus_are_among_the_processes(frames: list[Frame]) -> None:
    """Whoever the driver lists is there with what the kernel says, as far as it can be seen from here."""
    for frame in frames:
        listed = {process.pid for gpu in frame.gpus for process in gpu.processes or ()}
        on_gpu = {process.pid for process in frame.processes if process.on_gpu}
        known = {process.pid for process in frame.processes}

        assert on_gpu <= listed
        assert listed <= known


def test_the_parents_of_descendants_are_there(frames: list[Frame]) -> None:
    """A process that holds no GPU is in a frame because an ancestor does.

    Not so in traces, which also follow a program that is about to take the GPU or has let it go.
    """
    for frame in (frame for frame in frames if frame.node.name != "trace"):
        known = {process.pid for process in frame.processes}
        parents = {process.identity.parent_pid for process in frame.processes if not process.on_gpu}

        assert parents <= known


def test_instances_follow_their_gpu(frames: list[Frame]) -> None:
    """A MIG instance comes after its GPU, which is there."""
    for frame in frames:
        seen: set[str] = set()
        for gpu in frame.gpus:
            seen.add(gpu.device.uuid)
            assert gpu.device.parent_uuid is None or gpu.device.parent_uuid in seen


def test_health_speaks_in_known_codes(frames: list[Frame]) -> None:
    """Every entry has a code of the model, words, and names that the catalogue knows."""
    names = {name for metrics in CATALOG.values() for name in metrics}
    for entry in (entry for frame in frames for entry in frame.health):
        assert entry.code in get_args(HealthCode)
        assert entry.detail
        assert set(entry.metrics) <= names
        assert entry.since <= time.time() + 1


def test_frames_survive_being_recorded(frames: list[Frame]) -> None:
    """What is written and read back is equal, to the last digit."""
    encoder, decoder = RecordingEncoder(), RecordingDecoder()
    back = [frame for given in frames for line in encoder.lines(given) if (frame := decoder.feed(line))]

    assert frames == back


def test_a_closed_source_says_so(source: Source) -> None:
    """Closing twice is fine; sampling afterwards is an error of its own."""
    source.sample(time.time())
    source.close()
    source.close()

    with pytest.raises(ClosedError):
        source.sample(time.time())


def test_a_source_may_be_closed_before_it_is_used(source: Source) -> None:
    """Nothing was opened, so nothing is left."""
    source.close()

    with pytest.raises(ClosedError):
        source.sample(time.time())
