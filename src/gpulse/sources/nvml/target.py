"""One GPU or MIG instance as something to be read: its identity, its handle and its probes."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from time import monotonic
from typing import Any, NamedTuple

import pynvml

from gpulse.model.device import Device
from gpulse.model.metric import Values
from gpulse.model.process import GpuProcess
from gpulse.sources.nvml import gpm, probes
from gpulse.sources.nvml.cadence import Cadence
from gpulse.sources.nvml.library import LASTING, NVMLError, code_of
from gpulse.sources.nvml.probes import Failures, Probe, call
from gpulse.sources.nvml.processes import GpuProcessReader


class Result(NamedTuple):
    """What one group of probes brought home."""

    at: float
    values: Values
    failures: Failures
    processes: tuple[GpuProcess, ...] | None = None
    details: dict[str, Any] = {}  # noqa: RUF012  a NamedTuple's default, never changed
    """Fields of the device that are read with its facts."""


class Target:
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
        self.probes = probes
        self.gpm = gpm
        self.processes = GpuProcessReader(handle, cadence.shares)
        self.unsupported: Failures = {}
        """What this GPU will not say, so that it is not asked again."""
        self._wants_details = device.parent_uuid is None

    def keep(self, names: frozenset[str]) -> None:
        """Ask from now on only for these readings."""
        self.probes = {
            group: tuple(probe for probe in known if not names.isdisjoint(probe.names))
            for group, known in self.probes.items()
        }
        self._wants_details = False
        if "sm_ratio" not in names:
            self.processes.has_shares = False

    def read(self, group: str, now: float) -> Result | None:
        """Run one group of probes; None when there is nothing to say yet (GPM needs two samples)."""
        if group == "gpm":
            return self._read_gpm(now)
        values: Values = {}
        failures: Failures = {}
        active = self.probes[group]
        for probe in active:
            probe.read(self.handle, values, failures)
        processes = None
        if group == "second" and "gpu_memory_bytes" not in self.unsupported:
            try:
                processes = self.processes.read(now, failures)
            except NVMLError as error:
                failures["gpu_memory_bytes"] = error.value
        if failures and (refused := probes.lasting(failures)):
            self.unsupported.update(refused)
            self.probes[group] = tuple(p for p in active if not self.unsupported.keys() >= set(p.names))
        details = self._details() if group == "facts" and self._wants_details else {}
        return Result(now, values, failures, processes, details)

    def _details(self) -> dict[str, Any]:
        return {
            "serial": _text(pynvml.nvmlDeviceGetSerial, self.handle),
            "vbios": _text(pynvml.nvmlDeviceGetVbiosVersion, self.handle),
            "architecture": _architecture(self.handle),
            "compute_capability": _compute_capability(self.handle),
            "numa_node": _ask(call("nvmlDeviceGetNumaNodeId"), self.handle),
        }

    def _read_gpm(self, now: float) -> Result | None:
        values: Values = {}
        failures: Failures = {}
        activity = self.gpm
        if activity is None or not activity.read(monotonic(), values, failures):
            return None
        self.unsupported.update(probes.lasting(failures))
        if self.unsupported.keys() >= set(gpm.NAMES):
            self.close()
        return Result(now, values, failures)

    def close(self) -> None:
        """Give back what the library lent."""
        activity, self.gpm = self.gpm, None
        if activity is not None:
            activity.close()


def open_gpu(index: int, cadence: Cadence) -> list[Target]:
    """A GPU and, right after it, its MIG instances; what takes milliseconds is left to the probes.

    Raises:
        NVMLError: The GPU cannot even be named.
    """
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    uuid = _uuid(handle) or f"unknown-{index}"
    has_gpm = gpm.supported(handle)
    activity = (
        gpm.GpmReader(handle, graphics_seconds=cadence.graphics).prime(monotonic()) if has_gpm else None
    )
    device = Device(
        index=index,
        uuid=uuid,
        name=_text(pynvml.nvmlDeviceGetName, handle) or "unknown",
        bus_id=_bus_id(handle),
        minor_number=_ask(pynvml.nvmlDeviceGetMinorNumber, handle),
        has_gpm=has_gpm,
    )
    second = probes.second()
    if not has_gpm:
        second += (probes.pcie_counters() if _counts_pcie_bytes(handle) else probes.pcie_by_waiting(),)
    target = Target(
        device,
        handle,
        {"facts": probes.facts(), "tick": probes.tick(), "second": second, "slow": probes.slow()},
        activity,
        cadence,
    )
    instances = _instances(target, cadence)
    if instances:
        target.close()  # a GPU that is split has counters only for its parts
    return [target, *instances]


def placeholder(index: int) -> Device:
    """The row of a GPU that is there but could not be named."""
    return Device(index=index, uuid=f"unknown-{index}", name="not answering")


def _instances(parent: Target, cadence: Cadence) -> list[Target]:
    try:
        if pynvml.nvmlDeviceGetMigMode(parent.handle)[0] != pynvml.NVML_DEVICE_MIG_ENABLE:
            return []
        most = pynvml.nvmlDeviceGetMaxMigDeviceCount(parent.handle)
    except NVMLError:
        return []
    found: list[Target] = []
    for slot in range(most):
        try:
            handle = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(parent.handle, slot)
            found.append(_instance(parent, handle, len(found), cadence))
        except (NVMLError, ValueError):  # an empty slot, or an instance that was just destroyed
            continue
    return found


def _instance(parent: Target, handle: Any, mig_index: int, cadence: Cadence) -> Target:
    gpu_instance: int = pynvml.nvmlDeviceGetGpuInstanceId(handle)
    device = parent.device._replace(
        uuid=pynvml.nvmlDeviceGetUUID(handle),
        name=_text(pynvml.nvmlDeviceGetName, handle) or f"{parent.device.name} MIG",
        parent_uuid=parent.device.uuid,
        mig_index=mig_index,
        gpu_instance=gpu_instance,
        compute_instance=_ask(pynvml.nvmlDeviceGetComputeInstanceId, handle),
    )
    return Target(
        device,
        handle,
        {"facts": probes.mig_facts(), "tick": probes.mig_tick(), "second": (), "slow": ()},
        gpm.GpmReader(parent.handle, graphics_seconds=cadence.graphics, gpu_instance=gpu_instance)
        if parent.device.has_gpm
        else None,
        cadence,
    )


def _ask(function: Callable[[Any], Any], handle: Any) -> Any:
    """The answer, or None: identity is best effort, a GPU without a serial number is still a GPU."""
    try:
        return function(handle)
    except (NVMLError, ValueError):  # ValueError: text that is not UTF-8
        return None


def _uuid(handle: Any) -> str | None:
    """The name that everything else hangs on, None on a board that has none."""
    try:
        uuid: str = pynvml.nvmlDeviceGetUUID(handle)
    except NVMLError as error:
        if code_of(error.value) not in LASTING:
            raise
        return None
    return uuid


def _text(function: Callable[[Any], Any], handle: Any) -> str | None:
    answer = _ask(function, handle)
    return answer.decode("utf-8", "replace") if isinstance(answer, bytes) else answer


def _bus_id(handle: Any) -> str | None:
    info = _ask(pynvml.nvmlDeviceGetPciInfo, handle)
    if info is None:
        return None
    text = info.busId.decode() if isinstance(info.busId, bytes) else str(info.busId)
    return text.lower()


def _compute_capability(handle: Any) -> str | None:
    answer = _ask(pynvml.nvmlDeviceGetCudaComputeCapability, handle)
    return None if answer is None else f"{answer[0]}.{answer[1]}"


def _architecture(handle: Any) -> str | None:
    return _architectures().get(_ask(call("nvmlDeviceGetArchitecture"), handle))


@cache
def _architectures() -> dict[int, str]:
    prefix = "NVML_DEVICE_ARCH_"
    names = (name for name in vars(pynvml) if name.startswith(prefix))
    return {getattr(pynvml, name): name.removeprefix(prefix).capitalize() for name in names}


def _counts_pcie_bytes(handle: Any) -> bool:
    """Whether the byte counters are 64 bits wide; narrower ones run over several times a second."""
    try:
        answer = pynvml.nvmlDeviceGetFieldValues(handle, [198])[0]
    except NVMLError:
        return False
    return bool(
        answer.nvmlReturn == pynvml.NVML_SUCCESS
        and answer.valueType == pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG
    )
