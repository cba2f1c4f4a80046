from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulse.model.metric_catalog import CATALOG, Values
from gpulse.model.packed_columns import (
    BlockPacker,
    ColumnBlock,
    ColumnLayout,
    LayoutColumn,
    PackedFrame,
    build_column,
    is_wide,
    layout_id,
    split_packed_frames,
    unpack_block,
)

NUMBERS = st.integers(-(1 << 63), (1 << 63) - 1)
FRAMES = st.builds(
    PackedFrame,
    NUMBERS,
    NUMBERS,
    st.lists(st.builds(ColumnBlock, st.integers(0, (1 << 64) - 1), st.binary(max_size=40)), max_size=4).map(
        tuple
    ),
    st.binary(max_size=30),
)


@given(st.lists(FRAMES, max_size=5))
def test_frames_that_stand_one_after_the_other_come_apart_again(frames: list[PackedFrame]) -> None:
    """What was packed is what is found."""

    data = b"".join(frame.to_bytes() for frame in frames)

    assert list(split_packed_frames(data)) == frames


@given(st.binary(max_size=200))
def test_what_is_no_frame_is_refused_and_nothing_else_happens(data: bytes) -> None:
    """Any bytes are frames, or a ValueError."""

    try:
        frames = list(split_packed_frames(data))
    except ValueError:
        return
    assert b"".join(frame.to_bytes() for frame in frames) == data


@given(FRAMES, st.data())
def test_a_frame_that_was_cut_off_is_refused(frame: PackedFrame, data: st.DataObject) -> None:
    """Half a frame is none."""

    whole = frame.to_bytes()
    cut = data.draw(st.integers(1, len(whole) - 1))

    with pytest.raises(ValueError, match=r"frame|block"):
        list(split_packed_frames(whole[:cut]))


def _readings(scope: str) -> st.SearchStrategy[Values]:
    metrics = list(CATALOG[scope].values())  # type: ignore[index]
    each: dict[str, Any] = {}
    for metric in metrics:
        steps = (1 << 31) - 1 if not is_wide(metric) else 1 << 48
        each[metric.name] = st.integers(0, steps).map(build_column(metric).value)
    return st.fixed_dictionaries({}, optional=each)


@given(st.sampled_from(sorted(CATALOG)), st.data())
def test_every_metric_survives_packing_to_its_resolution(scope: Any, data: st.DataObject) -> None:
    """What is a whole number of steps comes back exactly, and what is absent stays absent."""

    rows = data.draw(st.lists(_readings(scope), min_size=1, max_size=3))
    packer = BlockPacker(scope)

    block, is_new = packer.pack([{"n": n} for n in range(len(rows))], [(row, {}) for row in rows])

    assert is_new
    assert unpack_block(packer.layout, block.numbers) == rows
    assert layout_id(packer.text) == block.layout
    assert ColumnLayout.from_json(packer.text) == packer.layout


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e300, 1e12])
def test_a_value_that_cannot_be_written_is_absent(value: float) -> None:
    """Neither a huge number nor one that is none becomes another number."""

    packer = BlockPacker("gpu")

    block, _ = packer.pack([{}], [({"gpu_utilization_ratio": value, "power_watts": 3.5}, {})])

    assert unpack_block(packer.layout, block.numbers) == [{"power_watts": 3.5}]


def test_rates_fill_in_what_was_not_read() -> None:
    """A reading comes before a rate of the same name."""

    packer = BlockPacker("gpu")
    rates: Values = {"pcie_rx_bytes_per_second": 2048, "pcie_tx_bytes_per_second": 4096}

    block, _ = packer.pack([{}], [({"pcie_rx_bytes_per_second": 1024}, rates)])

    assert unpack_block(packer.layout, block.numbers) == [
        {"pcie_rx_bytes_per_second": 1024, "pcie_tx_bytes_per_second": 4096}
    ]


def test_a_layout_changes_only_with_its_subjects_or_metrics() -> None:
    """A metric that is absent for a while changes nothing."""

    packer = BlockPacker("host")

    def is_new(values: Values) -> bool:
        return packer.pack([{}], [(values, {})])[1]

    changes = [
        is_new({"load1": 1.0}),
        is_new({}),
        is_new({"load1": 2.0}),
        is_new({"load5": 1.0, "load1": 1.0}),
    ]

    assert changes == [True, False, False, True]


def test_a_block_of_another_length_is_refused() -> None:
    """The layout says how long a block is."""

    layout = ColumnLayout("host", ({},), (LayoutColumn("cpus"),), (LayoutColumn("load1", 100),))

    with pytest.raises(ValueError, match="needs 12"):
        unpack_block(layout, b"\0" * 11)


@pytest.mark.parametrize(
    "document",
    [
        [],
        {},
        {"scope": "moon", "subjects": [], "wide": [], "narrow": []},
        {"scope": "gpu", "subjects": [3], "wide": [], "narrow": []},
        {"scope": "gpu", "subjects": [], "wide": [["a", 0, 1]], "narrow": []},
        {"scope": "gpu", "subjects": [], "wide": [["a", 1, 1], ["a", 1, 1]], "narrow": []},
        {"scope": "gpu", "subjects": [], "wide": [["a", 1]], "narrow": []},
        {"scope": "gpu", "subjects": [], "wide": [[1, 1, 1]], "narrow": []},
        {"scope": ["gpu"], "subjects": [], "wide": [], "narrow": []},
        {"scope": "gpu", "subjects": [{}] * 70_000, "wide": [], "narrow": []},
    ],
)
def test_what_is_no_layout_is_refused(document: Any) -> None:
    """Everything about a layout is checked before it is believed."""

    with pytest.raises(ValueError, match="not a valid layout"):
        ColumnLayout.from_json(json.dumps(document).encode())


@given(st.binary(max_size=100))
def test_any_bytes_are_a_layout_or_refused(text: bytes) -> None:
    """No bytes do anything else."""

    try:
        ColumnLayout.from_json(text)
    except ValueError as error:
        assert "not a valid layout" in str(error)  # noqa: PT017  most bytes are none


def test_layouts_of_many_nodes_share_their_columns() -> None:
    """A head keeps the layouts of thousands of nodes, which differ only in their subjects."""
    texts = []
    for uuid in ("a", "b"):
        packer = BlockPacker("gpu")
        packer.pack([{"uuid": uuid, "index": 0}], [({"power_watts": 1.0, "energy_joules_total": 2.0}, {})])
        texts.append(packer.text)
    one, other = map(ColumnLayout.from_json, texts)
    assert one.subjects != other.subjects
    assert (True, True) == (one.wide is other.wide, one.narrow is other.narrow)
