from __future__ import annotations

import itertools

import pytest

from gpulse.model.frame import Frame
from gpulse.model.frame_packing import FramePacker, unpack_frame
from gpulse.model.metric_catalog import CATALOG, Scope, Values
from gpulse.model.packed_columns import ColumnLayout, PackedFrame, layout_id, split_packed_frames
from gpulse.sources.demo_machine import DemoMachine

START = 1_800_000_000.0


def frames(count: int, seconds: float = 1.0) -> list[Frame]:
    """Frames of a simulated machine."""
    machine = DemoMachine(START - 60.0, gpus=4)
    return [machine.sample(START + number * seconds) for number in range(count)]


def packed(given: list[Frame]) -> tuple[list[PackedFrame], dict[int, ColumnLayout]]:
    """The same as they travel, and their layouts."""
    packer = FramePacker()
    layouts: dict[int, ColumnLayout] = {}
    found: list[PackedFrame] = []
    for frame in given:
        one, new = packer.pack(frame)
        layouts.update({layout_id(text): ColumnLayout.from_json(text) for text in new})
        found += split_packed_frames(one.to_bytes())
    return found, layouts


def is_close(scope: Scope, expected: Values, actual: Values) -> bool:
    """To half a step, and nothing missing."""
    return all(
        abs(actual[name] - value) <= CATALOG[scope][name].resolution * 0.5000001
        for name, value in expected.items()
    )


def test_a_frame_comes_back_as_it_was() -> None:
    """GPUs, host, disks, network, processes: to the resolution of the catalog."""

    given = frames(1)
    (one,), layouts = packed(given)

    frame = unpack_frame(given[0].node, layouts, one)

    assert frame.time == pytest.approx(given[0].time, abs=1e-6)
    assert [gpu.device for gpu in frame.gpus] == [gpu.device for gpu in given[0].gpus]
    for expected, actual in zip(given[0].gpus, frame.gpus, strict=True):
        assert is_close("gpu", expected.values, actual.values)
        assert [p.pid for p in actual.processes or ()] == [p.pid for p in expected.processes or ()]
    assert given[0].host is not None
    assert frame.host is not None
    assert is_close("host", given[0].host.values, frame.host.values)
    assert [d.name for d in frame.disks] == [d.name for d in given[0].disks]
    assert [link.name for link in frame.network] == [link.name for link in given[0].network]
    assert [p.pid for p in frame.processes] == [p.pid for p in given[0].processes]
    assert [p.on_gpu for p in frame.processes] == [p.on_gpu for p in given[0].processes]


def test_what_changes_slowly_is_packed_every_five_seconds() -> None:
    """Two blocks in most frames, all of them in every fifth."""

    found, _ = packed(frames(11))

    full = [number for number, frame in enumerate(found) if len(frame.blocks) > 2]
    assert full == [0, 5, 10]


def test_a_quick_frame_borrows_from_the_last_full_one() -> None:
    """Disks and processes of the last five seconds are still known."""

    given = frames(3)
    found, layouts = packed(given)

    frame = unpack_frame(given[2].node, layouts, found[2], slow=found[0])

    assert [d.name for d in frame.disks] == [d.name for d in given[2].disks]
    assert len(frame.processes) == len(given[0].processes)
    assert is_close("gpu", given[2].gpus[0].values, frame.gpus[0].values)


def test_rates_travel_with_the_frames() -> None:
    """The head need not keep counters to know how busy the CPUs were."""

    given = frames(2)
    found, layouts = packed(given)

    first, second = (unpack_frame(given[0].node, layouts, frame) for frame in found)

    assert first.host is not None
    assert second.host is not None
    assert "cpu_utilization_ratio" not in first.host.values
    assert 0 <= second.host.values["cpu_utilization_ratio"] <= 1


def test_layouts_are_sent_once() -> None:
    """A frame of a running machine is numbers alone."""

    packer = FramePacker()

    news = [len(packer.pack(frame)[1]) for frame in frames(30)]

    assert news[0] >= 6
    assert sum(news[11:]) == 0


def test_a_clock_that_is_off_is_put_right() -> None:
    """The head adds what the node's clock is wrong by."""

    given = frames(1)
    (one,), layouts = packed(given)

    assert unpack_frame(given[0].node, layouts, one, shift_us=-3_600_000_000).time == pytest.approx(
        given[0].time - 3600, abs=1e-6
    )


def test_a_block_of_an_unknown_layout_is_refused() -> None:
    """Numbers without a meaning are not guessed at."""

    given = frames(1)
    (one,), _ = packed(given)

    with pytest.raises(ValueError, match="unknown layout"):
        unpack_frame(given[0].node, {}, one)


def test_frames_are_small() -> None:
    """Eight GPUs a second are a few kilobytes, so that a thousand nodes are a few megabytes."""

    machine = DemoMachine(START - 60.0, gpus=8)
    found, _ = packed([machine.sample(START + second) for second in range(10)])

    sizes = [len(frame.to_bytes()) for frame in found]
    assert max(sizes) < 12_000
    assert sum(sizes) / len(sizes) < 4_000
    assert all(a <= b for a, b in itertools.pairwise(frame.time_us for frame in found))
