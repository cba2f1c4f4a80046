from __future__ import annotations

import re
import struct
from typing import Any

import pytest

from gpulse.export.prometheus.metrics_page import format_metrics
from gpulse.export.prometheus.node_state import NodeState
from gpulse.model.frame_packing import FramePacker
from gpulse.model.metric_catalog import CATALOG, Scope, Values
from gpulse.model.packed_columns import BlockPacker, ColumnLayout, SubjectValues, layout_id, unpack_block
from gpulse.model.series_labels import build_series_labels
from gpulse.sources.demo_machine import DemoMachine
from gpulse.store.tsdb.request_builder import InfoTemplate, NodeDescription, build_block_template
from gpulse.store.tsdb.write_request import (
    MAX_TIME_MS,
    encode_labels,
    encode_series,
    encode_time,
    format_labels,
    series_labels,
    split_series,
)

_TIME_MS = 1_767_225_600_123
_GPUS: list[dict[str, Any]] = [
    {"index": index, "uuid": f"GPU-{index}", "name": "NVIDIA H200", "facts": {"memory_total_bytes": 1 << 37}}
    for index in range(3)
]


def read(request: bytes) -> dict[tuple[tuple[str, str], ...], tuple[int, float]]:
    """What a request says, read as the protocol is defined: by labels the time and the value."""
    found = {}
    for number, series in fields(request):
        assert number == 1
        labels, samples = [], []
        for kind, content in fields(series):
            if kind == 1:
                words = dict(fields(content))
                labels.append((words[1].decode(), words[2].decode()))
            else:
                assert content[:1] == b"\x09"
                assert content[9:10] == b"\x10"
                samples.append((varint(content, 10)[0], struct.unpack("<d", content[1:9])[0]))
        assert sorted(labels) == labels
        assert len(samples) == 1
        assert tuple(labels) not in found
        found[tuple(labels)] = samples[0]
    return found


def fields(message: bytes) -> list[tuple[int, bytes]]:
    """The fields of a message, each with a length."""
    at, found = 0, []
    while at < len(message):
        tag, at = varint(message, at)
        assert tag & 7 == 2
        length, at = varint(message, at)
        found.append((tag >> 3, message[at : at + length]))
        at += length
    return found


def varint(data: bytes, at: int) -> tuple[int, int]:
    """A number of protobuf."""
    number = shift = 0
    while True:
        number |= (data[at] & 0x7F) << shift
        shift += 7
        at += 1
        if data[at - 1] < 0x80:
            return number, at


def packed(
    scope: Scope, subjects: list[dict[str, Any]], rows: list[SubjectValues]
) -> tuple[ColumnLayout, bytes]:
    """A block of readings."""
    packer = BlockPacker(scope)
    packer.pack(subjects, [(dict.fromkeys(CATALOG[scope], 1), {}) for _ in subjects])  # all columns
    block, _ = packer.pack(subjects, rows)
    return packer.layout, block.numbers


def expected(
    layout: ColumnLayout, numbers: bytes, node: str
) -> dict[tuple[tuple[str, str], ...], tuple[int, float]]:
    """What a request has to say, from the block's own reading."""
    found = {}
    for subject, values in zip(layout.subjects, unpack_block(layout, numbers), strict=True):
        for name, value in values.items():
            metric = CATALOG[layout.scope][name]
            labels = {"__name__": metric.prometheus, **build_series_labels(layout.scope, node, subject)}
            found[tuple(sorted(labels.items()))] = _TIME_MS, value * metric.prometheus_factor
    return found


def test_databases_get_what_scrapes_show() -> None:
    """Under the same names, with the same labels, in the same units."""

    machine = DemoMachine(_TIME_MS / 1000 - 60, gpus=2)
    frame = machine.sample(_TIME_MS / 1000)
    machine.close()
    content, texts = FramePacker().pack(frame, [])
    layouts = {layout_id(text): ColumnLayout.from_json(text) for text in texts}
    sent = {}
    for block in content.blocks:
        template = build_block_template(layouts[block.layout], "n", {})
        if template is not None:
            request, _ = template.request(block.numbers, encode_time(_TIME_MS))
            sent.update({labels: value for labels, (_, value) in read(request).items()})
    page = format_metrics([NodeState("n", frame)], now=frame.time, interval_seconds=1.0, version="1")
    shown = {}
    for name, labels, value in re.findall(r"^(\w+)\{(.+)\} (\S+)$", "".join(page), re.MULTILINE):
        known = [("__name__", name), *re.findall(r'(\w+)="([^"]*)"', labels)]
        shown[tuple(sorted(known))] = float(value)

    links = [labels for labels in sent if labels[0][1] == "gpulse_network_link_bytes_per_second"]
    assert [12.5e9] == [sent[labels] for labels in links]
    assert sent == pytest.approx({labels: shown.get(labels) for labels in sent}, rel=0.01, abs=0.02)


@pytest.mark.parametrize("known", [(0, 1, 2), (1,), ()])
def test_a_block_becomes_the_samples_that_it_holds(known: tuple[int, ...]) -> None:
    """Every value that is known is there with its labels and time, and no other: also the second time, and the third."""

    every: Values = {name: 17 + place for place, name in enumerate(CATALOG["gpu"])}
    rows: list[SubjectValues] = [(every if gpu in known else {"power_watts": 71.25}, {}) for gpu in range(3)]
    layout, numbers = packed("gpu", _GPUS, rows)
    template = build_block_template(layout, "node-1", {})
    assert template is not None

    for _ in range(3):
        request, samples = template.request(numbers, encode_time(_TIME_MS))

        assert expected(layout, numbers, "node-1") == read(request)
        assert len(read(request)) == samples


def test_what_was_known_in_another_block_is_not_sent_again() -> None:
    """Values that come and go leave nothing behind in prepared requests."""

    layout, full = packed("gpu", _GPUS, [({"power_watts": 1.0, "energy_joules_total": 5.5}, {})] * 3)
    template = build_block_template(layout, "n", {})
    assert template is not None
    blocks = [full]
    for gone in range(6):
        rows: list[SubjectValues] = [
            ({"power_watts": 2.0 + gone} if gpu != gone % 3 else {"temperature_celsius": gone}, {})
            for gpu in range(3)
        ]
        blocks.append(packed("gpu", _GPUS, rows)[1])

    for numbers in [*blocks, *reversed(blocks)]:
        assert expected(layout, numbers, "n") == read(template.request(numbers, encode_time(_TIME_MS))[0])


def test_what_comes_and_goes_gets_no_series() -> None:
    """Interfaces of containers and columns of newer agents are left out of a block."""

    links = [
        {"name": "eth0", "kind": "ethernet", "up": True},
        {"name": "veth1a2b", "kind": "virtual", "up": True},
    ]
    layout, numbers = packed("network", links, [({"rx_bytes_total": 5}, {}), ({"rx_bytes_total": 7}, {})])
    template = build_block_template(layout, "n", {"cluster": "a"})
    assert template is not None

    labels = (
        ("__name__", "gpulse_network_rx_bytes_total"),
        ("cluster", "a"),
        ("interface", "eth0"),
        ("node", "n"),
    )
    assert {labels: (_TIME_MS, 5.0)} == read(template.request(numbers, encode_time(_TIME_MS))[0])
    newer = layout._replace(
        wide=tuple(column._replace(name="of_tomorrow") for column in layout.wide), narrow=()
    )
    assert None is build_block_template(newer, "n", {})


def test_two_subjects_of_one_name_make_one_series() -> None:
    """A mount point that is there twice is the one that was mounted last, since a time-series database takes only one."""

    mounts = [{"mount_point": "/data", "device": "nfs", "type": "nfs4"}] * 2
    layout, numbers = packed("filesystem", mounts, [({"used_bytes": 1}, {}), ({"used_bytes": 2}, {})])
    template = build_block_template(layout, "n", {})
    assert template is not None

    assert [2.0] == [value for _, value in read(template.request(numbers, encode_time(_TIME_MS))[0]).values()]


def test_a_block_of_another_length_is_refused() -> None:
    """Numbers that do not belong to a layout never become samples."""

    layout, numbers = packed("host", [{}], [({"cpu_utilization_ratio": 0.5}, {})])
    template = build_block_template(layout, "n", {})
    assert template is not None

    with pytest.raises(ValueError, match="expected a block of"):
        template.request(numbers[:-4], encode_time(_TIME_MS))


def test_hostile_text_is_harmless_in_labels() -> None:
    """Names of any length, with any character, stay labels of valid UTF-8; those without a value do not exist."""

    texts = {"a": "\ud800x", "b": "ü" * 5000, "c": "", "d": 'quote" \\ \n \x00'}
    labels = encode_labels(texts)

    found = dict(next(iter(read(encode_series(labels)))))
    assert ["a", "b", "d"] == list(found)
    assert ("?x", "ü" * 1000, texts["d"]) == tuple(found.values())


@pytest.mark.parametrize("time_ms", [0, 1, 1 << 35, _TIME_MS, MAX_TIME_MS])
def test_times_are_always_as_long(time_ms: int) -> None:
    """Six bytes hold every time up to the year 2109."""

    assert (time_ms, 6) == varint(encode_time(time_ms), 0)


def test_a_request_is_taken_apart_where_it_was_put_together() -> None:
    """Series of any length are found again, and their labels can be read."""

    series = [
        encode_series(encode_labels({"__name__": "x", "node": "n" * length})) for length in (1, 90, 300)
    ]

    assert series == list(split_series(b"".join(series)))
    assert "x{node='n'}" == format_labels(series_labels(series[0]))


def test_what_hardly_changes_is_told_with_it() -> None:
    """A node, its GPUs and their facts are series of their own; a fact that is measured too is not sent twice."""

    layout, _ = packed("gpu", _GPUS[:1], [({}, {})])
    layout = layout._replace(wide=tuple(c for c in layout.wide if c.name != "memory_total_bytes"))
    node = NodeDescription(
        "node-1", "host-1", "m1", {"driver": "580.1", "numa_cpus": ["0-3"], "unheard_of": 1}
    )

    found = read(InfoTemplate(node, "1.2", layout, {}).request(encode_time(_TIME_MS)))

    names = [dict(labels)["__name__"] for labels in found]
    assert ["gpulse_node_info", "gpulse_gpu_info", "gpulse_gpu_memory_total_bytes"] == names
    assert {
        "driver": "580.1",
        "host": "host-1",
        "machine": "m1",
        "node": "node-1",
        "version": "1.2",
    }.items() <= dict(next(iter(found))).items()
    assert [(_TIME_MS, 1.0), (_TIME_MS, 1.0), (_TIME_MS, float(1 << 37))] == list(found.values())
