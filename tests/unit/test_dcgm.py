from __future__ import annotations

import re
from pathlib import Path

import pytest

from gpulse.export.prometheus.dcgm_metrics import FIELDS
from gpulse.export.prometheus.metrics_page import format_metrics
from gpulse.export.prometheus.node_state import NodeState
from gpulse.model.device import Device, Node
from gpulse.model.frame import Frame, GpuReading
from gpulse.model.job import Job
from gpulse.model.metric_catalog import Values
from gpulse.model.process import GpuProcess, Owner, ProcessIdentity, ProcessReading

DATA = Path(__file__).parents[1] / "data/dcgm"
NOW = 1_767_225_600.0
ROW = re.compile(r"(?:# )?(DCGM_[A-Z0-9_]+) *, *(gauge|counter|label) *, *(.+)")
SAMPLE = re.compile(r'(DCGM_[A-Z0-9_]+)\{((?:[A-Za-z_]+="[^"]*",?)+)\} (\S+)')
UNKNOWN = {
    "DCGM_FI_DEV_BOARD_LIMIT_VIOLATION",
    "DCGM_FI_DEV_LOW_UTIL_VIOLATION",
    "DCGM_FI_DEV_RELIABILITY_VIOLATION",
    "DCGM_EXP_CLOCK_EVENTS_COUNT",
    "DCGM_EXP_XID_ERRORS_COUNT",
    "DCGM_EXP_GPU_HEALTH_STATUS",
    "DCGM_EXP_P2P_STATUS",
    "DCGM_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL",
    "DCGM_FI_DEV_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL",
    "DCGM_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL",
    "DCGM_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL",
    "DCGM_FI_DEV_NVLINK_BANDWIDTH_L0",
    "DCGM_FI_DEV_VGPU_LICENSE_STATUS",
}
"""What the exporter's lists have and no reading of ours says."""
DEVICE = Device(
    3,
    "GPU-3",
    "NVIDIA H200",
    bus_id="00000000:9B:00.0",
    minor_number=5,
    facts={"memory_total_bytes": 1 << 37},
)


def listed(name: str) -> dict[str, tuple[str, str]]:
    """Type and help by name in one of the exporter's lists, what is switched off by default included."""
    rows = map(ROW.fullmatch, (DATA / name).read_text(encoding="utf-8").splitlines())
    found = [match for match in rows if match is not None]
    # A name can be there twice, commented out as something that it is not.
    return {match[1]: (match[2], match[3]) for match in found}


def served(frame: Frame, node: str = "node1") -> list[tuple[str, dict[str, str], float]]:
    """The samples of a page in DCGM's names."""
    pages = format_metrics(
        [NodeState(node, frame)], now=NOW, interval_seconds=1.0, version="1", dcgm_names=True
    )
    lines = [line for line in "".join(pages).splitlines() if line.startswith("DCGM_")]
    found = []
    for line in lines:
        match = SAMPLE.fullmatch(line)
        assert match is not None, line
        labels = dict(re.findall(r'([A-Za-z_]+)="([^"]*)"', match[2]))
        found.append((match[1], labels, float(match[3])))
    return found


def frame(*gpus: GpuReading, **more: object) -> Frame:
    """A frame of some GPUs."""
    return Frame(NOW, NOW, Node("x", driver="580.159.04"), gpus)._replace(**more)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["default-counters.csv", "dcp-metrics-included.csv"])
def test_types_and_helps_are_the_exporters(name: str) -> None:
    """Every name of its lists that we can know has its type and its help, and the others are known by name."""

    ours = {field.name: (field.kind, field.help) for field in FIELDS}
    theirs = {key: value for key, value in listed(name).items() if value[0] != "label"}
    assert len(theirs) > 40

    assert {key: value for key, value in theirs.items() if key in ours} == {
        key: ours[key] for key in theirs if key in ours
    }
    assert theirs.keys() - ours.keys() <= UNKNOWN


def test_no_field_is_there_twice() -> None:
    """Each name is one family."""

    names = [field.name for field in FIELDS]
    assert sorted(set(names)) == sorted(names)


def test_units_are_dcgms() -> None:
    """Percent, MiB, mJ, MHz, ns and ratios, without digits that the change of units makes up."""

    values = {
        "gpu_utilization_ratio": 0.57,
        "memory_utilization_ratio": 0.29,
        "encoder_utilization_ratio": 0.07,
        "decoder_utilization_ratio": 0.0,
        "memory_used_bytes": 34_634_465_280,
        "memory_free_bytes": 100 << 20,
        "memory_reserved_bytes": 1 << 36,
        "power_watts": 693.25,
        "energy_joules_total": 361_034.498,
        "temperature_celsius": 67,
        "memory_temperature_celsius": 62,
        "fan_speed_ratio": 0.3,
        "sm_clock_hertz": 1_980_000_000,
        "memory_clock_hertz": 3_201_000_000,
        "power_cap_seconds_total": 1.000000001,
        "thermal_slowdown_seconds_total": 2.5,
        "pcie_rx_bytes_per_second": 37_766_562,
        "pcie_replays_total": 4,
        "nvlink_rx_bytes_per_second": 1_024_000_000,
        "nvlink_tx_bytes_per_second": 2_048_000_000,
        "tensor_active_ratio": 0.4767,
        "remapped_rows_uncorrected": 1,
        "xid_errors_total": 0,
    }
    expected = {
        "DCGM_FI_DEV_GPU_UTIL": 57,
        "DCGM_FI_DEV_MEM_COPY_UTIL": 29,
        "DCGM_FI_DEV_ENC_UTIL": 7,
        "DCGM_FI_DEV_DEC_UTIL": 0,
        "DCGM_FI_DEV_FB_TOTAL": 131_072,
        "DCGM_FI_DEV_FB_USED": 33_030,
        "DCGM_FI_DEV_FB_FREE": 100,
        "DCGM_FI_DEV_FB_RESERVED": 65_536,
        "DCGM_FI_DEV_FB_USED_PERCENT": 0.503998,
        "DCGM_FI_DEV_POWER_USAGE": 693.25,
        "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION": 361_034_498,
        "DCGM_FI_DEV_GPU_TEMP": 67,
        "DCGM_FI_DEV_MEMORY_TEMP": 62,
        "DCGM_FI_DEV_FAN_SPEED": 30,
        "DCGM_FI_DEV_SM_CLOCK": 1980,
        "DCGM_FI_DEV_MEM_CLOCK": 3201,
        "DCGM_FI_DEV_POWER_VIOLATION": 1_000_000_001,
        "DCGM_FI_DEV_THERMAL_VIOLATION": 2_500_000_000,
        "DCGM_FI_PROF_PCIE_RX_BYTES": 37_766_562,
        "DCGM_FI_DEV_PCIE_REPLAY_COUNTER": 4,
        "DCGM_FI_PROF_NVLINK_RX_BYTES": 1_024_000_000,
        "DCGM_FI_PROF_NVLINK_TX_BYTES": 2_048_000_000,
        "DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL": 3000,
        "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE": 0.4767,
        "DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS": 1,
        "DCGM_FI_DEV_XID_ERRORS": 0,
    }

    assert expected == {name: value for name, _, value in served(frame(GpuReading(DEVICE, values)))}


def test_labels_are_the_exporters() -> None:
    """Those of its own page, with the name of the host spelled both ways."""

    [(_, labels, _)] = served(frame(GpuReading(DEVICE._replace(facts={}), {"temperature_celsius": 60})))

    assert {
        "gpu": "3",
        "UUID": "GPU-3",
        "pci_bus_id": "00000000:9B:00.0",
        "device": "nvidia5",
        "modelName": "NVIDIA H200",
        "Hostname": "node1",
        "hostname": "node1",
        "DCGM_FI_DRIVER_VERSION": "580.159.04",
    } == labels


def test_instances_have_their_gpus_labels_and_are_not_summed_twice() -> None:
    """A MIG instance has its GPU's UUID and a profile; the GPU keeps to itself what its instances do not tell."""

    whole = GpuReading(
        DEVICE._replace(facts={}), {"memory_used_bytes": 3 << 20, "power_watts": 300.0, "mig_enabled": 1}
    )
    part = DEVICE._replace(
        uuid="MIG-1",
        name="NVIDIA H200 MIG 1g.18gb",
        parent_uuid="GPU-3",
        mig_index=0,
        gpu_instance=7,
        facts={},
    )
    found = served(frame(whole, GpuReading(part, {"memory_used_bytes": 1 << 20})))

    used = [(labels, value) for name, labels, value in found if name == "DCGM_FI_DEV_FB_USED"]
    assert [1.0] == [value for _, value in used]
    labels = used[0][0]
    assert ("3", "GPU-3", "nvidia5", "NVIDIA H200", "1g.18gb", "7") == tuple(
        labels[name] for name in ("gpu", "UUID", "device", "modelName", "GPU_I_PROFILE", "GPU_I_ID")
    )
    power = [(labels, value) for name, labels, value in found if name == "DCGM_FI_DEV_POWER_USAGE"]
    assert [300.0] == [value for _, value in power]
    assert "GPU_I_ID" not in power[0][0]


def test_compute_instances_of_one_gpu_instance_are_told_apart() -> None:
    """By a label that others do not have; and no series is there twice, whatever devices call themselves."""

    def instance(number: int, profile: str, compute: int | None) -> GpuReading:
        device = DEVICE._replace(
            uuid=f"MIG-{number}",
            name=f"NVIDIA H200 MIG {profile}",
            parent_uuid="GPU-3",
            mig_index=number,
            gpu_instance=1,
            compute_instance=compute,
            facts={},
        )
        return GpuReading(device, {"sm_active_ratio": 0.1 * number})

    parts = [instance(1, "1c.3g.71gb", 0), instance(2, "1c.3g.71gb", 1), instance(3, "3g.71gb", 0)]
    found = served(frame(*parts))

    assert [("0", 0.1), ("1", 0.2), (None, 0.3)] == [
        (labels.get("GPU_CI_ID"), round(value, 6)) for _, labels, value in found
    ]
    whole = GpuReading(DEVICE._replace(facts={}), {})
    assert 1 == len(served(frame(whole, instance(1, "?", None), instance(2, "?", None))))


def test_jobs_and_pods_are_labels() -> None:
    """A series for each Slurm job on a GPU, as the exporter has it; a pod by what is known of it."""

    owners = [
        Owner(user="ada", job="slurm:4711"),
        Owner(user="ada", job="slurm:4711"),
        Owner(user="bob", job="slurm:4712"),
        Owner(user="eve"),
        Owner(pod="1b2c", container="c0ffee"),
    ]
    processes = tuple(
        ProcessReading(ProcessIdentity(100 + place, owner=owner), "R", {})
        for place, owner in enumerate(owners)
    )
    shared = GpuReading(
        DEVICE._replace(facts={}),
        {"power_watts": 5.0},
        tuple(GpuProcess(process.pid, "compute") for process in processes[:4]),
    )
    other = GpuReading(
        DEVICE._replace(index=4, uuid="GPU-4", facts={}), {"power_watts": 6.0}, (GpuProcess(104, "compute"),)
    )
    given = GpuReading(DEVICE._replace(index=5, uuid="GPU-5", facts={}), {"power_watts": 7.0}, ())
    jobs = (Job("slurm:9", user="eve", gpus=("GPU-5",)),)

    found = served(frame(shared, other, given, processes=processes, jobs=jobs))

    told = [
        (labels["gpu"], labels.get("hpc_job"), labels.get("pod"), labels.get("container"))
        for _, labels, _ in found
    ]
    assert [
        ("3", "4711", None, None),
        ("3", "4712", None, None),
        ("4", None, "1b2c", "c0ffee"),
        ("5", "9", None, None),
    ] == told


def test_an_xid_is_zero_only_where_it_would_have_been_seen() -> None:
    """The last code; 0 when the GPU is watched and there was none; nothing when nobody watches."""

    watched: Values = {"xid_errors_total": 0}
    seen: Values = {"xid_errors_total": 3, "xid_last_code": 79}
    gpus = [
        GpuReading(Device(place, f"GPU-{place}", "X"), values)
        for place, values in enumerate(({}, watched, seen))
    ]

    assert [("1", 0.0), ("2", 79.0)] == [(labels["gpu"], value) for _, labels, value in served(frame(*gpus))]


def test_what_is_unknown_is_absent() -> None:
    """Nothing is zero because it could not be read, and numbers that are none are left out."""

    assert [] == served(frame(GpuReading(Device(0, "GPU-0", "X"), {"power_watts": float("nan")})))
