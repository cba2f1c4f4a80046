"""Readings under the names, types, labels and units of NVIDIA's DCGM exporter, for the boards made for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from operator import methodcaller
from typing import Any, NamedTuple

from gpulse.export.prometheus.exposed import MOST_KEPT, Fresh, Holder, finite, known, naming
from gpulse.export.prometheus.text import SAMPLES_A_PIECE, Kind, spelled, title
from gpulse.model.device import Device
from gpulse.model.metric import CATALOGUE, Metric, Value, Values

_NODES_A_TURN = 25
_MIG = " MIG "
"""Between the name of a GPU and the profile of an instance, in the name of the instance."""
_OF_COMPUTE = "c."
"""In the profile of an instance that is not all of its GPU instance: there may be others in it."""

Read = Callable[[Values], Value | None]


class Field(NamedTuple):
    """One of DCGM's fields as the exporter serves it."""

    name: str
    kind: Kind
    help: str
    read: Read


class _Subject(NamedTuple):
    """A GPU or MIG instance: its labels, once for every holder that the exporter would name."""

    labels: tuple[str, ...]
    values: Values
    instances: tuple[Values, ...] = ()


def pieces(nodes: Sequence[Fresh]) -> Iterator[str]:
    """The readings of some nodes, in pieces (some of them empty), so that others get their turn."""
    subjects: list[_Subject] = []
    told: set[str] = set()
    for count, fresh in enumerate(nodes, 1):
        for subject in _subjects(fresh):
            labels = tuple(each for each in subject.labels if each not in told)  # a series is told once
            told.update(labels)
            subjects.append(subject._replace(labels=labels))
        if count % _NODES_A_TURN == 0:
            yield ""
    for field in FIELDS:
        yield from _family(field, subjects)


def _family(field: Field, subjects: Sequence[_Subject]) -> Iterator[str]:
    name, read = field.name, field.read
    head = title(name, field.kind, field.help)
    for start in range(0, len(subjects), SAMPLES_A_PIECE):
        # As DCGM has it: what is told by instance is not told of the whole GPU again, or sums would have it twice.
        lines = [
            f"{name}{each} {value}\n"
            for labels, values, instances in subjects[start : start + SAMPLES_A_PIECE]
            if (value := read(values)) is not None
            and not (instances and any(read(instance) is not None for instance in instances))
            for each in labels
        ]
        yield head + "".join(lines) if lines else ""
        head = "" if lines else head


def _subjects(fresh: Fresh) -> Iterator[_Subject]:
    node, frame, held = fresh.node.name, fresh.frame, fresh.held
    parents = {gpu.device.uuid: gpu for gpu in frame.gpus if gpu.device.parent_uuid is None}
    instances: dict[str, list[Values]] = {}
    for gpu in frame.gpus:
        if gpu.device.parent_uuid is not None:
            instances.setdefault(gpu.device.parent_uuid, []).append(finite(known(gpu)))
    for gpu in frame.gpus:
        device = gpu.device
        board = parents.get(device.parent_uuid or "", gpu).device
        told: list[Holder | None] = [
            holder._replace(user=None) for holder in held.get(device.uuid, ()) if holder.job or holder.pod
        ]
        names = node, frame.node.driver, naming(device), naming(board)
        shown = dict.fromkeys(_spelled(*names, holder) for holder in told or [None])
        yield _Subject(tuple(shown), finite(known(gpu)), tuple(instances.get(device.uuid, ())))


@lru_cache(MOST_KEPT)
def _spelled(
    node: str, driver: str | None, device: tuple[Any, ...], board: tuple[Any, ...], holder: Holder | None
) -> str:
    """The labels of a GPU's series, which are the same in every scrape for as long as a job holds it."""
    labels = _labels(node, driver, Device(*device), Device(*board))
    return spelled(labels if holder is None else {**labels, **_job_labels(holder)})


def _labels(node: str, driver: str | None, device: Device, board: Device) -> dict[str, str]:
    minor = board.index if board.minor_number is None else board.minor_number
    labels = {
        "gpu": str(device.index),
        "UUID": board.uuid,
        "pci_bus_id": str(board.bus_id or ""),
        "device": f"nvidia{minor}",
        "modelName": board.name.partition(_MIG)[0],
    }
    if device.mig_index is not None:
        profile = labels["GPU_I_PROFILE"] = device.name.partition(_MIG)[2]
        labels["GPU_I_ID"] = str(device.mig_index if device.gpu_instance is None else device.gpu_instance)
        if _OF_COMPUTE in profile and device.compute_instance is not None:
            labels["GPU_CI_ID"] = str(device.compute_instance)
    # Releases of the exporter differ in how they spell it, and so do boards.
    labels["Hostname"] = labels["hostname"] = node
    if driver is not None:
        labels["DCGM_FI_DRIVER_VERSION"] = str(driver)
    return labels


def _job_labels(holder: Holder) -> dict[str, str]:
    """Whose it is; the exporter has a series for each job that shares a GPU, and so have we."""
    labels = {}
    if holder.job is not None:
        labels["hpc_job"] = holder.job.removeprefix("slurm:")
    if holder.pod is not None:
        labels["pod"] = holder.pod
        if holder.container is not None:
            labels["container"] = holder.container
    return labels


def _scaled(metric: Metric) -> Read:
    name, factor = metric.name, metric.dcgm_factor
    if factor == 1:
        return methodcaller("get", name)

    def read(values: Values) -> Value | None:
        value = values.get(name)
        return None if value is None else _short(value * factor)

    return read


def _short(value: float) -> Value:
    """Without the digits that a change of units makes up."""
    rounded = round(float(value), 6)
    return int(rounded) if rounded.is_integer() else rounded


def _xid(values: Values) -> Value | None:
    code = values.get("xid_last_code")
    return 0 if code is None and values.get("xid_errors_total") == 0 else code


def _nvlink(values: Values) -> Value | None:
    """Both directions in thousands of KiB a second: what DCGM has under a name that promises a counter."""
    received, sent = values.get("nvlink_rx_bytes_per_second"), values.get("nvlink_tx_bytes_per_second")
    return None if received is None or sent is None else _short((received + sent) / 1_024_000)


def _used_share(values: Values) -> Value | None:
    used, total = values.get("memory_used_bytes"), values.get("memory_total_bytes")
    if used is None or total is None:
        return None
    usable = total - values.get("memory_reserved_bytes", 0)
    return _short(used / usable) if usable > 0 else None


_PCIE = "over the PCIe bus - including both protocol headers and data payloads - in bytes per second."
_SLOWED = "Throttling duration due to {} constraints (in ns)."
_HELP: dict[str, str] = {
    "DCGM_FI_DEV_SM_CLOCK": "SM clock frequency (in MHz).",
    "DCGM_FI_DEV_MEM_CLOCK": "Memory clock frequency (in MHz).",
    "DCGM_FI_DEV_MEMORY_TEMP": "Memory temperature (in C).",
    "DCGM_FI_DEV_GPU_TEMP": "GPU temperature (in C).",
    "DCGM_FI_DEV_POWER_USAGE": "Power draw (in W).",
    "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION": "Total energy consumption since boot (in mJ).",
    "DCGM_FI_DEV_PCIE_REPLAY_COUNTER": "Total number of PCIe retries.",
    "DCGM_FI_DEV_GPU_UTIL": "GPU utilization (in %).",
    "DCGM_FI_DEV_MEM_COPY_UTIL": "Memory utilization (in %).",
    "DCGM_FI_DEV_ENC_UTIL": "Encoder utilization (in %).",
    "DCGM_FI_DEV_DEC_UTIL": "Decoder utilization (in %).",
    "DCGM_FI_DEV_XID_ERRORS": "Value of the last XID error encountered.",
    "DCGM_FI_DEV_POWER_VIOLATION": _SLOWED.format("power"),
    "DCGM_FI_DEV_THERMAL_VIOLATION": _SLOWED.format("thermal"),
    "DCGM_FI_DEV_SYNC_BOOST_VIOLATION": _SLOWED.format("sync-boost"),
    "DCGM_FI_DEV_FB_FREE": "Framebuffer memory free (in MiB).",
    "DCGM_FI_DEV_FB_USED": "Framebuffer memory used (in MiB).",
    "DCGM_FI_DEV_FB_RESERVED": "Framebuffer memory reserved (in MiB).",
    "DCGM_FI_DEV_ECC_SBE_VOL_TOTAL": "Total number of single-bit volatile ECC errors.",
    "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL": "Total number of double-bit volatile ECC errors.",
    "DCGM_FI_DEV_ECC_SBE_AGG_TOTAL": "Total number of single-bit persistent ECC errors.",
    "DCGM_FI_DEV_ECC_DBE_AGG_TOTAL": "Total number of double-bit persistent ECC errors.",
    "DCGM_FI_DEV_RETIRED_SBE": "Total number of retired pages due to single-bit errors.",
    "DCGM_FI_DEV_RETIRED_DBE": "Total number of retired pages due to double-bit errors.",
    "DCGM_FI_DEV_RETIRED_PENDING": "Total number of pages pending retirement.",
    "DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL": "Total number of NVLink bandwidth counters for all lanes.",
    "DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS": "Number of remapped rows for uncorrectable errors",
    "DCGM_FI_DEV_CORRECTABLE_REMAPPED_ROWS": "Number of remapped rows for correctable errors",
    "DCGM_FI_DEV_ROW_REMAP_FAILURE": "Whether remapping of rows has failed",
    "DCGM_FI_PROF_GR_ENGINE_ACTIVE": "Ratio of time the graphics engine is active.",
    "DCGM_FI_PROF_SM_ACTIVE": "The ratio of cycles an SM has at least 1 warp assigned.",
    "DCGM_FI_PROF_SM_OCCUPANCY": "The ratio of number of warps resident on an SM.",
    "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE": "Ratio of cycles the tensor (HMMA) pipe is active.",
    "DCGM_FI_PROF_DRAM_ACTIVE": "Ratio of cycles the device memory interface is active sending or receiving data.",
    "DCGM_FI_PROF_PIPE_FP64_ACTIVE": "Ratio of cycles the fp64 pipes are active.",
    "DCGM_FI_PROF_PIPE_FP32_ACTIVE": "Ratio of cycles the fp32 pipes are active.",
    "DCGM_FI_PROF_PIPE_FP16_ACTIVE": "Ratio of cycles the fp16 pipes are active.",
    "DCGM_FI_PROF_PCIE_TX_BYTES": f"The rate of data transmitted {_PCIE}",
    "DCGM_FI_PROF_PCIE_RX_BYTES": f"The rate of data received {_PCIE}",
}
"""As the exporter's lists have it; what is in none of them keeps our words."""
_COUNTERS = frozenset(
    {
        "DCGM_FI_DEV_RETIRED_SBE",
        "DCGM_FI_DEV_RETIRED_DBE",
        "DCGM_FI_DEV_RETIRED_PENDING",
        "DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS",
        "DCGM_FI_DEV_CORRECTABLE_REMAPPED_ROWS",
        "DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL",
    }
)
"""Gauges by their nature that the exporter's lists call counters."""
_READ_OTHERWISE: dict[str, Read] = {"DCGM_FI_DEV_XID_ERRORS": _xid}


def _field(name: str, metric: Metric) -> Field:
    kind: Kind = "counter" if metric.kind == "counter" or name in _COUNTERS else "gauge"
    return Field(name, kind, _HELP.get(name, metric.help), _READ_OTHERWISE.get(name) or _scaled(metric))


FIELDS: tuple[Field, ...] = (
    *(_field(metric.dcgm, metric) for metric in CATALOGUE["gpu"].values() if metric.dcgm is not None),
    Field(
        "DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL", "counter", _HELP["DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL"], _nvlink
    ),
    Field(
        "DCGM_FI_DEV_FB_USED_PERCENT",
        "gauge",
        "Framebuffer memory used over what can be used (0 to 1).",
        _used_share,
    ),
)
"""Everything that we can know of what DCGM knows."""
