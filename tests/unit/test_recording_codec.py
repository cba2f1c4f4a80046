from __future__ import annotations

import json
import math
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpulse.model.device import MAX_LINKS, PCIE_LEVELS, Device, DevicePath, Node
from gpulse.model.frame import (
    CgroupReading,
    DiskReading,
    FilesystemReading,
    Frame,
    GpuReading,
    HostReading,
    NetworkReading,
)
from gpulse.model.metric_catalog import Scope, Values, metric_names
from gpulse.model.process import GpuProcess, Owner, ProcessIdentity, ProcessReading, Thread
from gpulse.model.recording_codec import RecordingDecoder, RecordingEncoder
from gpulse.model.source_health import Health, HealthCode

WORDS = st.text(max_size=12) | st.sampled_from(
    ["", "\n", "\r\n", "\x00", "\x1b[2J", "\u2028", '"', "\\", "\ud800", "😀", "null"]
)
NUMBERS = st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False)
TIMES = st.floats(0, 4e9)


def maybe(strategy: st.SearchStrategy[object]) -> st.SearchStrategy[object]:
    """Or nothing."""
    return st.none() | strategy


def values(scope: Scope) -> st.SearchStrategy[Values]:
    """Readings of one scope."""
    return st.dictionaries(st.sampled_from(metric_names(scope)), NUMBERS, max_size=5)


def some(strategy: st.SearchStrategy[object]) -> st.SearchStrategy[tuple[object, ...]]:
    """None, one or a few."""
    return st.lists(strategy, max_size=3).map(tuple)


PATHS = some(
    st.builds(
        DevicePath,
        WORDS.filter(bool),
        maybe(st.sampled_from(PCIE_LEVELS)),
        maybe(st.integers(0, MAX_LINKS)),
    )
)
DEVICES = st.builds(
    Device,
    index=st.integers(0, 99),
    uuid=WORDS,
    name=WORDS,
    bus_id=maybe(WORDS),
    minor_number=maybe(st.integers(0, 99)),
    serial=maybe(WORDS),
    numa_node=maybe(st.integers(-1, 9)),
    has_gpm=st.booleans(),
    parent_uuid=maybe(WORDS),
    mig_index=maybe(st.integers(0, 7)),
    facts=values("gpu"),
    board_part_number=maybe(WORDS),
    cpu_affinity=maybe(WORDS),
    switch_links=maybe(st.integers(0, 36)),
    paths=PATHS,
    adapter_paths=PATHS,
)
GPUS = st.builds(
    GpuReading,
    device=DEVICES,
    values=values("gpu"),
    processes=maybe(
        some(st.builds(GpuProcess, st.integers(0), WORDS, maybe(st.integers(0)), maybe(st.floats(0, 1))))
    ),
    read_at=st.dictionaries(st.sampled_from(["second", "gpm", "slow"]), TIMES),
)
IDENTITIES = st.builds(
    ProcessIdentity,
    pid=st.integers(0, 2**22),
    parent_pid=maybe(st.integers(0)),
    start_time=maybe(TIMES),
    name=maybe(WORDS),
    command=some(WORDS),
    owner=st.builds(Owner, maybe(WORDS), maybe(st.integers(0)), maybe(WORDS), maybe(WORDS), maybe(WORDS)),
    cgroup=maybe(WORDS),
)
PROCESSES = st.builds(
    ProcessReading,
    identity=IDENTITIES,
    state=maybe(WORDS),
    values=values("process"),
    threads=some(
        st.builds(Thread, st.integers(1), WORDS, WORDS, st.floats(0, 1e9), maybe(st.floats(0, 1e9)))
    ),
    on_gpu=st.booleans(),
)
FRAMES = st.builds(
    Frame,
    time=TIMES,
    monotonic=TIMES,
    node=st.builds(
        Node,
        WORDS,
        maybe(WORDS),
        maybe(WORDS),
        maybe(WORDS),
        maybe(WORDS),
        st.integers(1, 1000),
        some(WORDS),
    ),
    gpus=st.lists(GPUS, max_size=3, unique_by=lambda gpu: gpu.device.uuid).map(tuple),
    host=maybe(st.builds(HostReading, values("host"), some(st.lists(st.integers(0), max_size=8).map(tuple)))),
    disks=some(st.builds(DiskReading, WORDS, maybe(WORDS), values("disk"), maybe(WORDS))),
    filesystems=some(
        st.builds(FilesystemReading, WORDS, WORDS, WORDS, maybe(WORDS), maybe(WORDS), values("filesystem"))
    ),
    network=some(st.builds(NetworkReading, WORDS, WORDS, maybe(st.booleans()), values("network"))),
    processes=st.lists(PROCESSES, max_size=3, unique_by=lambda process: process.pid).map(tuple),
    cgroups=some(st.builds(CgroupReading, WORDS, values("cgroup"))),
    health=some(
        st.builds(
            Health,
            WORDS,
            st.sampled_from(get_args(HealthCode)),
            WORDS,
            TIMES,
            maybe(WORDS),
            some(WORDS),
            maybe(WORDS),
        )
    ),
)
FRAME = Frame(
    10.0,
    5.0,
    Node("n"),
    gpus=(GpuReading(Device(0, "GPU-0", "H200"), {"power_watts": 1.5}, ()),),
    processes=(ProcessReading(ProcessIdentity(7, 1, 2.0), "R", {"threads": 1}),),
)


def written(*frames: Frame) -> list[str]:
    """The lines of a recording."""
    encoder = RecordingEncoder()
    return [line for frame in frames for line in encoder.lines(frame)]


def read(lines: list[str]) -> list[Frame]:
    """The frames of its lines."""
    decoder = RecordingDecoder()
    return [frame for line in lines if (frame := decoder.feed(line)) is not None]


@pytest.mark.slow
@settings(max_examples=50, deadline=None)
@given(st.lists(FRAMES, min_size=1, max_size=4))
def test_any_frames_come_back_as_they_were(frames: list[Frame]) -> None:
    """Whatever is in them: odd text, unknown things, empty lists, numbers of any size."""

    lines = written(*frames)

    assert frames == read(lines)
    assert all("\n" not in line and line.isascii() for line in lines)


@pytest.mark.slow
@settings(max_examples=50, deadline=None)
@given(FRAMES)
def test_types_come_back_as_they_were(frame: Frame) -> None:
    """Tuples are tuples and whole numbers whole, so that equal frames are also alike."""

    assert repr([frame]) == repr(read(written(frame)))


def test_a_node_without_later_facts_is_still_read() -> None:
    """A recording from before a field was known."""

    frames = read(['{"node":{"name":"n","ticks_per_second":100}}', '{"frame":{"time":1,"monotonic":1}}'])

    assert [Node("n")] == [frame.node for frame in frames]


def test_what_does_not_change_is_written_once() -> None:
    """The second frame of a quiet machine is one line."""

    later = FRAME._replace(time=11.0, monotonic=6.0)

    assert len(written(FRAME)) + 1 == len(written(FRAME, later))


def test_what_changes_is_written_again() -> None:
    """A device whose facts became known, and a process that called exec."""

    gpu, process = FRAME.gpus[0], FRAME.processes[0]
    later = FRAME._replace(
        gpus=(gpu._replace(device=gpu.device._replace(facts={"memory_total_bytes": 1})),),
        processes=(process._replace(identity=process.identity._replace(name="other")),),
    )

    assert [FRAME, later, FRAME] == read(written(FRAME, later, FRAME))


def test_a_pid_that_is_used_again_is_another_process() -> None:
    """Each frame keeps the process that had the pid then."""

    process = FRAME.processes[0]
    reborn = FRAME._replace(processes=(process._replace(identity=process.identity._replace(start_time=9.0)),))
    gone = FRAME._replace(processes=())

    assert [FRAME, gone, reborn] == read(written(FRAME, gone, reborn))


def test_fields_of_a_later_minor_version_do_no_harm() -> None:
    """What this version does not know is left out."""

    lines = []
    for line in written(FRAME):
        document = json.loads(line)
        for part in document.values():
            if isinstance(part, dict):
                part["invented_later"] = {"x": 1}
        lines.append(json.dumps({**document, "also": 1}))

    assert [FRAME] == read(lines)


@pytest.mark.parametrize(
    "line",
    [
        "",
        "{",
        "null",
        "[]",
        "7",
        '"frame"',
        '{"what": 1}',
        '{"frame": null}',
        '{"frame": {}}',
        '{"frame": {"time": "x", "monotonic": 0}}',
        '{"frame": {"time": NaN, "monotonic": 0}}',
        '{"frame": {"time": 1, "monotonic": Infinity}}',
        '{"frame": {"time": 1, "monotonic": 1, "gpus": [{"uuid": "nobody", "values": {}}]}}',
        '{"frame": {"time": 1, "monotonic": 1, "host": {"values": {"cpus": null}, "cores": []}}}',
        '{"frame": {"time": 1, "monotonic": 1, "host": {"values": {"cpus": "2"}, "cores": []}}}',
        '{"frame": {"time": 1, "monotonic": 1, "host": {"values": [], "cores": []}}}',
        '{"frame": {"time": 1, "monotonic": 1, "disks": [{"name": "sda", "values": {"x": "1"}}]}}',
        '{"frame": {"time": 1' + "0" * 400 + ', "monotonic": 1}}',
        '{"device": {"index": 0, "uuid": [], "name": ""}}',
        '{"device": {"index": 0, "uuid": "x", "name": "", "facts": 3}}',
        '{"process": []}',
        '{"node": {"name": "n", "numa_cpus": 3}}',
        "[" * 100_000,
    ],
)
def test_a_line_that_is_not_of_a_recording_is_refused(line: str) -> None:
    """With a ValueError, whatever is wrong with it."""

    with pytest.raises(ValueError, match=r"."):
        RecordingDecoder().feed(line)


@pytest.mark.parametrize(
    "bad",
    [math.nan, math.inf, -math.inf, 10**400, 10**5000],
    ids=["NaN", "inf", "-inf", "400 digits", "5000 digits"],
)
def test_a_reading_that_is_not_finite_is_unknown(bad: int) -> None:
    """One bad reading costs neither the frame nor the file, whether it is to be written or is in a file already."""
    gpu = FRAME.gpus[0]
    frame = FRAME._replace(
        gpus=(
            gpu._replace(
                values={"power_watts": bad, "temperature_celsius": 40},
                processes=(GpuProcess(7, "compute", bad, bad),),
            ),
        ),
        host=HostReading({"load1": bad, "cpu_count": 4}, ((bad,) * 8,)),
        disks=(DiskReading("sda", "ssd", {"read_bytes_total": bad, "used_bytes": 1}),),
    )
    known = FRAME._replace(
        gpus=(
            gpu._replace(
                values={"temperature_celsius": 40}, processes=(GpuProcess(7, "compute", None, None),)
            ),
        ),
        host=HostReading({"cpu_count": 4}, ()),
        disks=(DiskReading("sda", "ssd", {"used_bytes": 1}),),
    )

    assert [known, FRAME] == read(written(frame, FRAME))


def test_a_reading_that_is_not_finite_in_a_file_is_unknown() -> None:
    """As other programs write them: as a word, or with more digits than a float has room for."""
    lines = written(FRAME)
    bad = [
        line.replace('"power_watts":1.5', '"power_watts":NaN,"temperature_celsius":1' + "0" * 400)
        for line in lines
    ]

    assert bad != lines
    assert [{}] == [frame.gpus[0].values for frame in read(bad)]
