"""Paths between the devices of a node: what /sys says of network adapters, and what a head makes of a node's GPUs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulse.cluster.head.answer_builder import build_hardware
from gpulse.cluster.protocol.head_interface import LiveNode
from gpulse.model.device import MAX_PATHS, Device, DevicePath, Node, PcieLevel, paths_from_document
from gpulse.model.recording_codec import to_sparse_dict
from gpulse.sources.demo_machine import DemoMachine
from gpulse.sources.network import PciDevices
from gpulse.sources.procfs import Roots

_SWITCH = "pci0000:15/0000:15:01.0/0000:16:00.0"
_GPU = f"{_SWITCH}/0000:17:00.0/0000:18:00.0"
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just("SYS"),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=12,
)


def plug(sys: Path, place: str, *, numa: int, names: dict[str, str] | None = None) -> Path:
    """Put a PCI device into /sys, with the names that it has by class."""
    folder = sys / "devices" / place
    folder.mkdir(parents=True)
    (folder / "numa_node").write_text(f"{numa}\n")
    address = sys / "bus/pci/devices" / folder.name
    address.parent.mkdir(parents=True, exist_ok=True)
    address.symlink_to(folder)
    for kind, name in (names or {}).items():
        device = folder / kind / name
        device.mkdir(parents=True)
        (device / "device").symlink_to(folder)
        (sys / "class" / kind).mkdir(parents=True, exist_ok=True)
        (sys / "class" / kind / name).symlink_to(device)
    return folder


@pytest.mark.parametrize(
    ("place", "numa", "level"),
    [
        (f"{_SWITCH}/0000:17:01.0/0000:19:00.0", 0, "PIX"),
        (f"{_SWITCH}/0000:17:01.0/0000:1a:00.0/0000:1b:00.0/0000:1c:00.0", 0, "PXB"),
        ("pci0000:15/0000:15:02.0/0000:1d:00.0", 0, "PHB"),
        ("pci0000:37/0000:37:01.0/0000:38:00.0", 0, "NODE"),
        ("pci0000:97/0000:97:01.0/0000:98:00.0", 1, "SYS"),
        ("pci0000:97/0000:97:01.0/0000:98:00.0", -1, None),
    ],
)
def test_how_near_an_adapter_is(tmp_path: Path, place: str, numa: int, level: str | None) -> None:
    """By the bridges that two devices share, and by their NUMA nodes where they share none."""

    plug(tmp_path, _GPU, numa=0)
    plug(tmp_path, place, numa=numa, names={"net": "eth1"})
    for node in ("node0", "node1"):
        (tmp_path / "devices/system/node" / node).mkdir(parents=True)

    found = PciDevices(Roots(sys=str(tmp_path))).find_adapters("00000000:18:00.0")

    assert ([] if level is None else [("eth1", level)]) == found


def test_which_adapters_there_are(tmp_path: Path) -> None:
    """Each once, by its InfiniBand name if it has one; neither virtual functions nor what is not on a PCI bus."""

    plug(tmp_path, _GPU, numa=-1)
    both = {"infiniband": "mlx5_10", "net": "ib0"}
    plug(tmp_path, "pci0000:37/0000:37:01.0/0000:38:00.0", numa=-1, names=both)
    plug(tmp_path, "pci0000:37/0000:37:02.0/0000:39:00.0", numa=-1, names={"infiniband": "mlx5_2"})
    virtual = plug(tmp_path, "pci0000:37/0000:37:02.0/0000:39:00.1", numa=-1, names={"net": "eth0v0"})
    (virtual / "physfn").symlink_to(virtual)
    (tmp_path / "class/net/lo").mkdir()
    os.symlink("../nowhere", tmp_path / "class/net/gone")
    pci = PciDevices(Roots(sys=str(tmp_path)))

    assert [("mlx5_2", "NODE"), ("mlx5_10", "NODE")] == pci.find_adapters("00000000:18:00.0")
    assert [] == pci.find_adapters("00000000:99:00.0")


@given(_JSON)
def test_any_document_has_paths_or_none(document: object) -> None:
    """What is stored or recorded is read without a failure, and what it says can be written again."""

    paths = paths_from_document(document)

    assert len(paths) <= MAX_PATHS
    assert paths == paths_from_document([list(path) for path in paths])


def live(*devices: Device, name: str = "n") -> LiveNode:
    """A node without a frame, as a head that was restarted knows it."""
    facts = Node(name, driver="580.1", cuda="13.0", numa_cpus=("0-31", "32-63"))
    return LiveNode(1, name, "lost", False, 0.0, None, {}, (), {}, "", devices, node=facts)


def test_a_lost_node_shows_its_hardware() -> None:
    """All that its agent reported comes from the metadata; what it did not know is unknown."""

    first = Device(
        *(0, "GPU-a", "H200"),
        serial="165",
        numa_node=0,
        switch_links=18,
        paths=(DevicePath("GPU-b", "SYS", 0),),
    )
    second = Device(1, "GPU-b", "H200", switch_links=17, adapter_paths=(DevicePath("mlx5_0", "PIX"),))

    answer = build_hardware(live(first, second))

    assert ("580.1", "13.0", ("0-31", "32-63")) == (answer.driver, answer.cuda, answer.numa_cpus)
    assert [("165", 0), (None, None)] == [(gpu.serial, gpu.numa_node) for gpu in answer.gpus]
    assert ["mlx5_0"] == answer.adapters
    assert [
        (("GPU-a", "GPU-b"), "SYS", 17, True),
        (("GPU-b", "mlx5_0"), "PIX", None, False),
    ] == [(path.between, path.pcie, path.nvlinks, path.switched) for path in answer.paths]


@pytest.mark.parametrize(
    ("nvlinks", "switched", "expected"),
    [(4, None, (4, False)), (0, None, (0, False)), (None, None, (None, False)), (0, 18, (18, True))],
)
def test_links_between_two_gpus(
    nvlinks: int | None, switched: int | None, expected: tuple[int | None, bool]
) -> None:
    """Direct links count before switches, none is not the same as unknown, and one GPU's report is enough."""

    one = Device(0, "GPU-a", "A", switch_links=switched)
    other = Device(1, "GPU-b", "A", switch_links=switched, paths=(DevicePath("GPU-a", None, nvlinks),))

    [path] = build_hardware(live(one, other)).paths

    assert expected == (path.nvlinks, path.switched)


@pytest.mark.parametrize(
    ("number", "levels", "nvlinks"), [(1, {"NODE", "SYS"}, {18}), (6, {"PIX", "PHB", "SYS"}, {None})]
)
def test_the_demo_has_two_kinds_of_nodes(
    number: int, levels: set[PcieLevel], nvlinks: set[int | None]
) -> None:
    """One with NVSwitches, and one with PCIe GPUs; paths are the same from both ends."""

    machine = DemoMachine(0.0, number=number)
    devices = [gpu.device for gpu in machine.sample(1.0).gpus]
    answer = build_hardware(live(*devices))
    between = [path for path in answer.paths if path.between[1] not in answer.adapters]

    assert 28 == len(between)
    assert (levels, nvlinks) == ({p.pcie for p in between}, {p.nvlinks for p in between})
    ways = {(device.uuid, path.to): path for device in devices for path in device.paths}
    assert all(path.pcie == ways[to, uuid].pcie for (uuid, to), path in ways.items())
    assert all(device.serial and device.vbios and to_sparse_dict(device) for device in devices)
