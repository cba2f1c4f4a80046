"""Metrics under the names, types, labels and units of NVIDIA's DCGM exporter, for dashboards made for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from operator import methodcaller
from typing import Any, NamedTuple

from gpulse.export.prometheus.node_state import (
    MAX_CACHED_LABELS,
    FreshNode,
    HolderLabels,
    device_key,
    finite_values,
    gpu_values,
)
from gpulse.export.prometheus.text_format import SAMPLES_PER_CHUNK, Kind, format_family_header, format_labels
from gpulse.model.device import Device
from gpulse.model.metric_catalog import CATALOG, Metric, Value, Values

_NODES_PER_CHUNK = 25
_MIG = " MIG "
"""Separates the GPU's name and the profile in the name of a MIG instance."""
_COMPUTE_PROFILE = "c."
"""Part of the profile of a compute instance that covers only a part of its GPU instance."""

Read = Callable[[Values], Value | None]


class DcgmField(NamedTuple):
    """One of DCGM's fields as its exporter serves it."""

    name: str
    kind: Kind
    help: str
    read: Read


class _DcgmSubject(NamedTuple):
    """GPU or MIG instance: one set of labels for each holder that the exporter would name, and its values."""

    labels: tuple[str, ...]
    values: Values
    instances: tuple[Values, ...] = ()


def format_dcgm_metrics(nodes: Sequence[FreshNode]) -> Iterator[str]:
    """Yield the metrics of some nodes in chunks, some of which may be empty, so that other tasks can run."""
    subjects: list[_DcgmSubject] = []
    seen: set[str] = set()
    for count, fresh in enumerate(nodes, 1):
        for subject in _labeled_gpus(fresh):
            labels = tuple(each for each in subject.labels if each not in seen)  # each series is written once
            seen.update(labels)
            subjects.append(subject._replace(labels=labels))
        if count % _NODES_PER_CHUNK == 0:
            yield ""
    for field in FIELDS:
        yield from _family(field, subjects)


def _family(field: DcgmField, subjects: Sequence[_DcgmSubject]) -> Iterator[str]:
    name, read = field.name, field.read
    head = format_family_header(name, field.kind, field.help)
    for start in range(0, len(subjects), SAMPLES_PER_CHUNK):
        # Like DCGM: a metric that the MIG instances have is not repeated for the whole GPU, or sums would count it twice.
        lines = [
            f"{name}{each} {value}\n"
            for labels, values, instances in subjects[start : start + SAMPLES_PER_CHUNK]
            if (value := read(values)) is not None
            and not (instances and any(read(instance) is not None for instance in instances))
            for each in labels
        ]
        yield head + "".join(lines) if lines else ""
        head = "" if lines else head


def _labeled_gpus(fresh: FreshNode) -> Iterator[_DcgmSubject]:
    node, frame, held = fresh.node.name, fresh.frame, fresh.held
    parents = {gpu.device.uuid: gpu for gpu in frame.gpus if gpu.device.parent_uuid is None}
    instances: dict[str, list[Values]] = {}
    for gpu in frame.gpus:
        if gpu.device.parent_uuid is not None:
            instances.setdefault(gpu.device.parent_uuid, []).append(finite_values(gpu_values(gpu)))
    for gpu in frame.gpus:
        device = gpu.device
        board = parents.get(device.parent_uuid or "", gpu).device
        holders: list[HolderLabels | None] = [
            holder._replace(user=None) for holder in held.get(device.uuid, ()) if holder.job or holder.pod
        ]
        names = node, frame.node.driver, device_key(device), device_key(board)
        shown = dict.fromkeys(_label_text(*names, holder) for holder in holders or [None])
        yield _DcgmSubject(
            tuple(shown), finite_values(gpu_values(gpu)), tuple(instances.get(device.uuid, ()))
        )


@lru_cache(MAX_CACHED_LABELS)
def _label_text(
    node: str,
    driver: str | None,
    device: tuple[Any, ...],
    board: tuple[Any, ...],
    holder: HolderLabels | None,
) -> str:
    """Return the labels of a GPU's series; cached, because they stay the same while a job holds the GPU."""
    labels = _labels(node, driver, Device(*device), Device(*board))
    return format_labels(labels if holder is None else {**labels, **_job_labels(holder)})


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
        if _COMPUTE_PROFILE in profile and device.compute_instance is not None:
            labels["GPU_CI_ID"] = str(device.compute_instance)
    # Releases of the exporter spell this label differently, and so do dashboards.
    labels["Hostname"] = labels["hostname"] = node
    if driver is not None:
        labels["DCGM_FI_DRIVER_VERSION"] = str(driver)
    return labels


def _job_labels(holder: HolderLabels) -> dict[str, str]:
    """Return the labels of a job or pod; as with the exporter, a shared GPU has a series for each job."""
    labels = {}
    if holder.job is not None:
        labels["hpc_job"] = holder.job.removeprefix("slurm:")
    if holder.pod is not None:
        labels["pod"] = holder.pod
        if holder.container is not None:
            labels["container"] = holder.container
    return labels


def _scaled_reader(metric: Metric) -> Read:
    name, factor = metric.name, metric.dcgm_factor
    if factor == 1:
        return methodcaller("get", name)

    def read(values: Values) -> Value | None:
        value = values.get(name)
        return None if value is None else _drop_digits(value * factor)

    return read


def _drop_digits(value: float) -> Value:
    """Return a value without the rounding errors of a unit conversion."""
    rounded = round(float(value), 6)
    return int(rounded) if rounded.is_integer() else rounded


def _xid(values: Values) -> Value | None:
    code = values.get("xid_last_code")
    return 0 if code is None and values.get("xid_errors_total") == 0 else code


def _nvlink(values: Values) -> Value | None:
    """Return both directions in thousands of KiB per second: a rate, although DCGM's name suggests a counter."""
    received, sent = values.get("nvlink_rx_bytes_per_second"), values.get("nvlink_tx_bytes_per_second")
    return None if received is None or sent is None else _drop_digits((received + sent) / 1_024_000)


def _used_ratio(values: Values) -> Value | None:
    used, total = values.get("memory_used_bytes"), values.get("memory_total_bytes")
    if used is None or total is None:
        return None
    usable = total - values.get("memory_reserved_bytes", 0)
    return _drop_digits(used / usable) if usable > 0 else None


_PCIE = "over the PCIe bus - including both protocol headers and data payloads - in bytes per second."
_THROTTLED = "Throttling duration due to {} constraints (in ns)."
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
    "DCGM_FI_DEV_POWER_VIOLATION": _THROTTLED.format("power"),
    "DCGM_FI_DEV_THERMAL_VIOLATION": _THROTTLED.format("thermal"),
    "DCGM_FI_DEV_SYNC_BOOST_VIOLATION": _THROTTLED.format("sync-boost"),
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
"""Help texts from the exporter's own lists; other fields use the catalog's texts."""
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
"""Gauges that the exporter's lists declare as counters."""
_SPECIAL_READERS: dict[str, Read] = {"DCGM_FI_DEV_XID_ERRORS": _xid}


def _field(name: str, metric: Metric) -> DcgmField:
    kind: Kind = "counter" if metric.kind == "counter" or name in _COUNTERS else "gauge"
    return DcgmField(
        name, kind, _HELP.get(name, metric.help), _SPECIAL_READERS.get(name) or _scaled_reader(metric)
    )


FIELDS: tuple[DcgmField, ...] = (
    *(_field(metric.dcgm, metric) for metric in CATALOG["gpu"].values() if metric.dcgm is not None),
    DcgmField(
        "DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL", "counter", _HELP["DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL"], _nvlink
    ),
    DcgmField(
        "DCGM_FI_DEV_FB_USED_PERCENT",
        "gauge",
        "Framebuffer memory used, as a fraction of the usable memory (0 to 1).",
        _used_ratio,
    ),
)
"""All DCGM fields that gpulse can serve."""
