"""How GPUs are connected, and who they are, as the driver tells it: through the real binding, an agent and a head."""

from __future__ import annotations

from pathlib import Path

import pynvml as nv

from gpulse.model.device import DevicePath
from gpulse.model.frame import GpuReading
from gpulse.sources.network import PciDevices
from gpulse.sources.nvml.gpu_reader import GpuReader
from tests.fakes.nvml import FakeNvml
from tests.integration.cluster import EAGER, cluster_in, until
from tests.integration.nvml_machine import IMPATIENT, QUICK, Gpus


def read(fake: FakeNvml, gpus: int) -> tuple[GpuReading, ...]:
    """The GPUs, once each has told how it is connected."""
    reader = GpuReader(QUICK, watch_xids=False, timeouts=IMPATIENT, pci=PciDevices())
    try:
        readings, _ = Gpus(reader).until(
            lambda found, _: (
                len(found) == gpus
                and all(len(one.device.paths) == gpus - 1 for one in found)
                and all(one.device.facts and "ecc_enabled" in one.values for one in found)
            )
        )
    finally:
        reader.close()
    assert 0 == fake.open_gpm_samples
    return readings


def paths(reading: GpuReading) -> list[tuple[str | None, int | None]]:
    """What the paths of a GPU cross, in the order of the other GPUs."""
    return [(path.pcie, path.nvlinks) for path in reading.device.paths]


def test_gpus_on_nvswitches(fake_nvml: FakeNvml) -> None:
    """Every link that is up leads to a switch, and the levels are those between NUMA nodes."""

    for index in range(1, 8):
        fake_nvml.add(index)
    fake_nvml.gpu(1).links[3].active = 0

    readings = read(fake_nvml, 8)

    assert [18, 17, 18] == [one.device.switch_links for one in readings[:3]]
    assert [("NODE", 0)] * 3 + [("SYS", 0)] * 4 == paths(readings[0])
    device = readings[7].device
    assert ("692-2G520-0282-000", 1, "64-127") == (
        device.board_part_number,
        device.numa_node,
        device.cpu_affinity,
    )
    assert 26_562_000_000 == readings[0].values["nvlink_link_bytes_per_second"]


def test_pcie_gpus_with_bridges(fake_nvml: FakeNvml) -> None:
    """Two GPUs on one PCIe switch are linked directly; the others are behind a host bridge or another CPU."""

    for index in range(4):
        fake_nvml.add(index)
        gpu = fake_nvml.gpu(index)
        gpu.pcie_switch, gpu.host_bridge, gpu.numa_node = 1 + index // 2, 1 + index // 3, index // 3
        gpu.link_count = 4 if index < 2 else 0
        for link in gpu.links[:4]:
            link.remote = 2 - index if index < 2 else 0

    readings = read(fake_nvml, 4)

    assert [("PIX", 4), ("PHB", 0), ("SYS", 0)] == paths(readings[0])
    assert [("PHB", None), ("PHB", None), ("PIX", None)] == paths(readings[2])
    assert [0, 0, None, None] == [one.device.switch_links for one in readings]


def test_a_consumer_card_has_neither_numbers_nor_counters(fake_nvml: FakeNvml) -> None:
    """What it does not have is unknown, and never zero."""

    fake_nvml.add(1)
    gpu = fake_nvml.gpu(1)
    gpu.ecc_supported = gpu.link_count = 0
    gpu.numa_node = -1
    for function in ("Serial", "VbiosVersion", "BoardPartNumber", "RemappedRows", "TopologyCommonAncestor"):
        fake_nvml.fail(f"nvmlDeviceGet{function}", 1, nv.NVML_ERROR_NOT_SUPPORTED)
    fake_nvml.set_field(1, 90, code=nv.NVML_ERROR_NOT_SUPPORTED)
    reader = GpuReader(QUICK, watch_xids=False, timeouts=IMPATIENT, pci=PciDevices())

    readings, _ = Gpus(reader).until(
        lambda found, _: (
            len(found) == 2 and bool(found[1].device.paths) and "energy_joules_total" in found[1].values
        )
    )
    reader.close()

    device, values = readings[1].device, readings[1].values
    assert {None} == {
        device.serial,
        device.vbios,
        device.board_part_number,
        device.numa_node,
        device.cpu_affinity,
        device.switch_links,
    }
    assert (DevicePath(readings[0].device.uuid, None, None),) == device.paths
    assert not [name for name in values if name.startswith(("ecc_", "remapped_", "nvlink_link"))]


def test_a_temporary_failure_is_read_again(fake_nvml: FakeNvml) -> None:
    """A level that the driver could not tell at first is known later."""

    fake_nvml.add(1)
    fake_nvml.fail("nvmlDeviceGetTopologyCommonAncestor", code=nv.NVML_ERROR_UNKNOWN, times=3)
    reader = GpuReader(QUICK, watch_xids=False, timeouts=IMPATIENT, pci=PciDevices())

    Gpus(reader).until(lambda found, _: [[("NODE", 0)]] * 2 == [paths(one) for one in found])
    calls = fake_nvml.calls("nvmlDeviceGetTopologyCommonAncestor")
    for _ in range(5):
        Gpus(reader).tick(patience=1.0)
    reader.close()

    assert calls == fake_nvml.calls("nvmlDeviceGetTopologyCommonAncestor")


def test_a_head_keeps_the_hardware_of_a_node(nvml_library: Path, tmp_path: Path) -> None:
    """It learns another driver without a restart of the agent, names who was hit by an Xid error, and has all of it after its own restart."""

    fake = FakeNvml.create(tmp_path / "control", 2)
    with cluster_in(tmp_path / "cluster") as cluster:
        head = cluster.head("--freq", "250")
        agent = cluster.agent("n1", head.port, source=(), env=fake.env(nvml_library), tuned=EAGER)
        where = "/api/v1/nodes/n1/hardware"
        until(lambda: "n1" in head.nodes(), "the node is there")
        known = until(
            lambda: (
                (found := head.get(where))["gpus"] and found["paths"] and found["gpus"][1]["serial"] and found
            ),
            "its GPUs are known",
        )
        fake.push_xid(1, 94)
        xids = until(lambda: head.get("/api/v1/events?kinds=xid&from=-90d")["events"], "the error is stored")
        fake.unload_driver()
        fake.load_driver("999.1")
        until(lambda: head.get(where)["driver"] == "999.1", "the head knows the new driver")
        until(lambda: head.get(where)["paths"], "its GPUs are connected again")
        agent.end()
        head.end()
        again = cluster.head("--freq", "250")
        kept = until(lambda: again.get(where), "the node is known")
    fake.close()

    assert ["1652924000000", "1652924000001"] == [gpu["serial"] for gpu in known["gpus"]]
    path = {
        "between": [gpu["uuid"] for gpu in known["gpus"]],
        "pcie": "NODE",
        "nvlinks": 18,
        "switched": True,
    }
    assert path in known["paths"]
    detail = xids[0]["detail"]
    assert (94, "1", "memory error contained to one program", []) == (
        detail["code"],
        detail["gpu"],
        detail["meaning"],
        detail["holders"],
    )
    assert ("999.1", known["gpus"], known["paths"]) == (kept["driver"], kept["gpus"], kept["paths"])


def test_a_gpu_that_is_split_keeps_its_identity(fake_nvml: FakeNvml) -> None:
    """It is opened again for its MIG instances, and what was read once is not lost."""

    reader = GpuReader(QUICK, watch_xids=False, timeouts=IMPATIENT, pci=PciDevices())
    gpus = Gpus(reader)
    before, _ = gpus.until(lambda found, _: bool(found) and found[0].device.serial is not None)
    fake_nvml.add_mig(0, gpu_instance=1)
    after, _ = gpus.until(lambda found, _: len(found) == 2)
    reader.close()

    assert ("1652924000000", "96.00.A5.00.1A") == (after[0].device.serial, after[0].device.vbios)
    assert before[0].device.cpu_affinity == after[0].device.cpu_affinity
