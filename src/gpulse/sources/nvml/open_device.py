"""An open GPU or MIG instance: its identity, its NVML handle and its probes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import c_ulonglong
from time import monotonic
from typing import Any, NamedTuple, TypeVar

from gpulse.model.device import Device, format_ranges
from gpulse.model.metric_catalog import Values
from gpulse.model.process import GpuProcess
from gpulse.sources.network import PciDevices
from gpulse.sources.nvml import gpm, library, metric_probes
from gpulse.sources.nvml.gpu_inventory import find_mig_instances
from gpulse.sources.nvml.gpu_processes import GpuProcessReader
from gpulse.sources.nvml.gpu_topology import PeerGpu, read_bus_id, read_connections
from gpulse.sources.nvml.library import PERMANENT_CODES, NVMLError, code_of
from gpulse.sources.nvml.metric_probes import UNSIGNED_LONG_LONG, Failures, Probe, read_fields
from gpulse.sources.nvml.read_timing import Cadence

_RETRY_SECONDS = 300.0
"""How often refused metrics are tried again: permissions and modes can change."""

_PROCESS_METRICS = ("gpu_memory_bytes", "sm_ratio")

_NODE_WORDS = 4
"""Words of 64 NUMA nodes each."""
_CPU_WORDS = 32
"""Words of 64 CPUs each."""
_WHOLE_NODE = 0
"""NVML's constant for the nearest memory within the machine, not within the socket."""
_ARCHITECTURES: dict[int | None, str] = {
    2: "Kepler",
    3: "Maxwell",
    4: "Pascal",
    5: "Volta",
    6: "Turing",
    7: "Ampere",
    8: "Ada",
    9: "Hopper",
    10: "Blackwell",
    13: "Rubin",
    0xFFFFFFFF: "Unknown",
}

Result = TypeVar("Result")


class ProbeResult(NamedTuple):
    """Result of one group of probes."""

    at: float
    values: Values
    failures: Failures
    processes: tuple[GpuProcess, ...] | None = None
    details: dict[str, Any] = {}  # noqa: RUF012  a NamedTuple's default, never changed
    """Fields of the device that are read with its facts."""
    read_at: dict[str, float] = {}  # noqa: RUF012
    """When metrics with a longer period than their group were read."""


class OpenDevice:
    """One GPU or MIG instance."""

    def __init__(
        self,
        device: Device,
        handle: Any,
        probes: dict[str, tuple[Probe, ...]],
        gpm: gpm.GpmReader | None,
        cadence: Cadence,
    ) -> None:
        self.device = device
        self.handle = handle
        self.probes = dict(probes)
        self.gpm = gpm
        self.processes = GpuProcessReader(handle, cadence.shares, cadence.shares / 2)
        self.instances: tuple[str, ...] = ()
        """UUIDs of the MIG instances that the driver listed when the GPU was opened."""
        self.unsupported: Failures = {}
        """Metrics that this GPU has never reported and refuses, which are tried again only rarely."""
        self._answered: set[str] = set()
        self._all = probes
        self._retry_at = monotonic() + _RETRY_SECONDS
        self._wants_details = self.wants_topology = device.parent_uuid is None
        self.wants_processes = True

    def keep(self, names: frozenset[str]) -> None:
        """From now on read only these metrics."""
        self.probes = {
            group: tuple(probe for probe in known if not names.isdisjoint(probe.names))
            for group, known in self.probes.items()
        }
        self._all = dict(self.probes)
        self._wants_details = self.wants_topology = False
        if "sm_ratio" not in names:
            self.processes.has_shares = False

    def narrow(self, names: frozenset[str]) -> None:
        """From now on read only these metrics, and processes and GPM only when one of them needs it."""
        self.keep(names)
        self.wants_processes = not names.isdisjoint(_PROCESS_METRICS)
        if names.isdisjoint(gpm.GPM_METRICS):
            self.close()

    def read(self, group: str, now: float) -> ProbeResult | None:
        """Run one group of probes; None when there is no result yet (GPM needs two samples)."""
        if group == "gpm":
            return self._read_gpm(now)
        if group == "slow" and monotonic() >= self._retry_at:
            self._retry_at = monotonic() + _RETRY_SECONDS
            self.probes, self.unsupported = dict(self._all), {}
        values: Values = {}
        failures: Failures = {}
        for probe in self.probes[group]:
            probe.read(self.handle, values, failures)
        self._answered.update(values)
        processes = None
        if group == "second" and self.wants_processes and "gpu_memory_bytes" not in self.unsupported:
            try:
                processes = self.processes.read(now, failures)
                self._answered.add("gpu_memory_bytes")
            except NVMLError as error:
                failures["gpu_memory_bytes"] = error.value
        self._refuse(group, failures)
        details = self._details() if group == "facts" and self._wants_details else {}
        read_at = {"shares": self.processes.shares_at} if processes else {}
        return ProbeResult(now, values, failures, processes, details, read_at)

    def _refuse(self, group: str, failures: Failures) -> None:
        """Stop reading metrics that are permanently refused; those that were read before may come back."""
        refused = {
            n: e for n, e in metric_probes.permanent_failures(failures).items() if n not in self._answered
        }
        if refused:
            self.unsupported.update(refused)
            known = self.probes.get(group, ())
            self.probes[group] = tuple(p for p in known if not self.unsupported.keys() >= set(p.names))

    def _details(self) -> dict[str, Any]:
        return {
            "serial": _read_text("nvmlDeviceGetSerial", self.handle),
            "vbios": _read_text("nvmlDeviceGetVbiosVersion", self.handle),
            "architecture": _read_architecture(self.handle),
            "compute_capability": _read_compute_capability(self.handle),
            "numa_node": _find_numa_node(self.handle),
            "board_part_number": _read_text("nvmlDeviceGetBoardPartNumber", self.handle),
            "cpu_affinity": _read_cpu_affinity(self.handle),
        }

    def read_topology(self, now: float, peers: Sequence[PeerGpu], pci: PciDevices) -> ProbeResult:
        """Read how the GPU is connected to other devices.

        Args:
            now: Epoch seconds.
            peers: All GPUs of the node.
            pci: The PCI devices of the node.
        """
        found = read_connections(PeerGpu(self.device, self.handle), peers, pci)
        self.wants_topology = not found.is_complete
        details = found._asdict()
        del details["is_complete"]
        return ProbeResult(now, {}, {}, details=details)

    def _read_gpm(self, now: float) -> ProbeResult | None:
        values: Values = {}
        failures: Failures = {}
        activity = self.gpm
        if activity is None or not activity.read(monotonic(), values, failures):
            return None
        self._answered.update(values)
        self._refuse("gpm", failures)
        if self.unsupported.keys() >= set(gpm.GPM_METRICS):
            self.close()
        return ProbeResult(
            now, values, failures, read_at={"graphics": now - (monotonic() - activity.graphics_at)}
        )

    def close(self) -> None:
        """Free what NVML allocated."""
        activity, self.gpm = self.gpm, None
        if activity is not None:
            activity.close()


def open_gpu(index: int, cadence: Cadence) -> list[OpenDevice]:
    """Open a GPU and return it followed by its MIG instances; slow queries are left to the probes.

    Raises:
        NVMLError: The GPU cannot be identified.
    """
    handle = library.read_handle("nvmlDeviceGetHandleByIndex_v2", index)
    uuid = _read_uuid(handle) or f"unknown-{index}"
    has_gpm = gpm.is_supported(handle)
    activity = (
        gpm.GpmReader(handle, graphics_seconds=cadence.graphics).prime(monotonic()) if has_gpm else None
    )
    device = Device(
        index=index,
        uuid=uuid,
        name=_read_text("nvmlDeviceGetName", handle) or "unknown",
        bus_id=_call_or_none(lambda: read_bus_id("nvmlDeviceGetPciInfo_v3", handle)),
        minor_number=_read_number("nvmlDeviceGetMinorNumber", handle),
        has_gpm=has_gpm,
    )
    second = metric_probes.second_probes()
    pcie: tuple[Probe, ...] = ()
    if not has_gpm and _counts_pcie_bytes(handle):
        second += (metric_probes.pcie_counter_probe(),)
    elif not has_gpm:
        pcie = (metric_probes.pcie_rate_probe(),)
    target = OpenDevice(
        device,
        handle,
        {
            "facts": metric_probes.fact_probes(),
            "tick": metric_probes.tick_probes(),
            "second": second,
            "pcie": pcie,
            "slow": metric_probes.slow_probes(),
        },
        activity,
        cadence,
    )
    listed = find_mig_instances(handle)
    target.instances = tuple(uuid for uuid, _ in listed)
    instances = _open_instances(target, listed, cadence)
    if instances:
        target.close()  # a GPU with MIG instances has counters only for these
    return [target, *instances]


def placeholder_device(index: int) -> Device:
    """Return the device of a GPU that exists but could not be identified."""
    return Device(index=index, uuid=f"unknown-{index}", name="not answering")


def _open_instances(parent: OpenDevice, listed: list[tuple[str, Any]], cadence: Cadence) -> list[OpenDevice]:
    found: list[OpenDevice] = []
    for uuid, handle in listed:
        try:
            found.append(_open_instance(parent, uuid, handle, len(found), cadence))
        except NVMLError:  # just destroyed, or no permission to open it
            continue
    return found


def _open_instance(
    parent: OpenDevice, uuid: str, handle: Any, mig_index: int, cadence: Cadence
) -> OpenDevice:
    gpu_instance = library.read_number("nvmlDeviceGetGpuInstanceId", handle)
    device = parent.device._replace(
        uuid=uuid,
        name=_read_text("nvmlDeviceGetName", handle) or f"{parent.device.name} MIG",
        parent_uuid=parent.device.uuid,
        mig_index=mig_index,
        gpu_instance=gpu_instance,
        compute_instance=_read_number("nvmlDeviceGetComputeInstanceId", handle),
    )
    return OpenDevice(
        device,
        handle,
        {
            "facts": metric_probes.mig_fact_probes(),
            "tick": metric_probes.mig_tick_probes(),
            "second": (),
            "pcie": (),
            "slow": (),
        },
        gpm.GpmReader(parent.handle, graphics_seconds=cadence.graphics, gpu_instance=gpu_instance)
        if parent.device.has_gpm
        else None,
        cadence,
    )


def _call_or_none(read: Callable[[], Result]) -> Result | None:
    """Return what a function reads; None when it fails, because a GPU without, say, a serial number is still usable."""
    try:
        return read()
    except (NVMLError, ValueError):  # ValueError: text that is not UTF-8
        return None


def _read_number(name: str, handle: Any) -> int | None:
    return _call_or_none(lambda: library.read_number(name, handle))


def _read_text(name: str, handle: Any) -> str | None:
    return _call_or_none(lambda: library.read_text(name, handle))


def _find_numa_node(handle: Any) -> int | None:
    """Return the NUMA node whose memory is nearest; None when there are none or several.

    The GPU's own node ID, where there is one, is that of its memory (Grace), not that of the nearest CPUs.
    """
    near = _read_mask("nvmlDeviceGetMemoryAffinity", handle, _NODE_WORDS, _WHOLE_NODE)
    return near[0] if len(near) == 1 else None


def _read_cpu_affinity(handle: Any) -> str | None:
    cpus = _read_mask("nvmlDeviceGetCpuAffinity", handle, _CPU_WORDS)
    return format_ranges(map(str, cpus)) or None


def _read_mask(name: str, handle: Any, words: int, *arguments: int) -> list[int]:
    """Return the numbers of the bits that a function sets; none when it fails."""
    mask = (c_ulonglong * words)()
    try:
        library.call(name, handle, words, mask, *arguments)
    except NVMLError:
        return []
    return [bit for bit in range(64 * words) if mask[bit // 64] >> bit % 64 & 1]


def _read_uuid(handle: Any) -> str | None:
    """Return the UUID that identifies the GPU; None on a board without one."""
    try:
        return library.read_text("nvmlDeviceGetUUID", handle)
    except NVMLError as error:
        if code_of(error.value) not in PERMANENT_CODES:
            raise
        return None


def _read_compute_capability(handle: Any) -> str | None:
    answer = _call_or_none(lambda: library.read_numbers("nvmlDeviceGetCudaComputeCapability", 2, handle))
    return None if answer is None else f"{answer[0]}.{answer[1]}"


def _read_architecture(handle: Any) -> str | None:
    return _ARCHITECTURES.get(_read_number("nvmlDeviceGetArchitecture", handle))


def _counts_pcie_bytes(handle: Any) -> bool:
    """Return whether the byte counters are 64 bits wide; narrower ones overflow several times a second."""
    try:
        code, kind, _ = read_fields(handle, [(198, 0)])[0]
    except NVMLError:
        return False
    return not code and kind == UNSIGNED_LONG_LONG
