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
from gpulse.sources.nvml.inventory import mig_instances
from gpulse.sources.nvml.library import LASTING, NVMLError, code_of
from gpulse.sources.nvml.probes import Failures, Probe, call
from gpulse.sources.nvml.processes import GpuProcessReader

_RETRY_SECONDS = 300.0
"""How often what was refused is asked for again: permissions and modes can change."""

_OF_PROCESSES = ("gpu_memory_bytes", "sm_ratio")

_NODE_WORDS = 4
"""Words of 64 NUMA nodes each."""
_WHOLE_NODE = 0
"""NVML's word for the memory that is nearest within the machine, not within the socket."""


class Result(NamedTuple):
    """What one group of probes brought home."""

    at: float
    values: Values
    failures: Failures
    processes: tuple[GpuProcess, ...] | None = None
    details: dict[str, Any] = {}  # noqa: RUF012  a NamedTuple's default, never changed
    """Fields of the device that are read with its facts."""
    read_at: dict[str, float] = {}  # noqa: RUF012
    """When what has a longer period than its group was read."""


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
        self.probes = dict(probes)
        self.gpm = gpm
        self.processes = GpuProcessReader(handle, cadence.shares)
        self.instances: tuple[str, ...] = ()
        """UUIDs of the MIG instances that the driver listed when the GPU was opened."""
        self.unsupported: Failures = {}
        """What this GPU has never said and refuses to say, so that it is asked again only rarely."""
        self._answered: set[str] = set()
        self._all = probes
        self._retry_at = monotonic() + _RETRY_SECONDS
        self._wants_details = device.parent_uuid is None
        self.wants_processes = True

    def keep(self, names: frozenset[str]) -> None:
        """Ask from now on only for these readings."""
        self.probes = {
            group: tuple(probe for probe in known if not names.isdisjoint(probe.names))
            for group, known in self.probes.items()
        }
        self._all = dict(self.probes)
        self._wants_details = False
        if "sm_ratio" not in names:
            self.processes.has_shares = False

    def narrow(self, names: frozenset[str]) -> None:
        """Ask from now on only for these readings, for processes and GPM only when one of them needs it."""
        self.keep(names)
        self.wants_processes = not names.isdisjoint(_OF_PROCESSES)
        if names.isdisjoint(gpm.NAMES):
            self.close()

    def read(self, group: str, now: float) -> Result | None:
        """Run one group of probes; None when there is nothing to say yet (GPM needs two samples)."""
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
        return Result(now, values, failures, processes, details, read_at)

    def _refuse(self, group: str, failures: Failures) -> None:
        """Stop asking for what is refused for good; what was told before may be told again."""
        refused = {n: e for n, e in probes.lasting(failures).items() if n not in self._answered}
        if refused:
            self.unsupported.update(refused)
            known = self.probes.get(group, ())
            self.probes[group] = tuple(p for p in known if not self.unsupported.keys() >= set(p.names))

    def _details(self) -> dict[str, Any]:
        return {
            "serial": _text(pynvml.nvmlDeviceGetSerial, self.handle),
            "vbios": _text(pynvml.nvmlDeviceGetVbiosVersion, self.handle),
            "architecture": _architecture(self.handle),
            "compute_capability": _compute_capability(self.handle),
            "numa_node": _numa_node(self.handle),
        }

    def _read_gpm(self, now: float) -> Result | None:
        values: Values = {}
        failures: Failures = {}
        activity = self.gpm
        if activity is None or not activity.read(monotonic(), values, failures):
            return None
        self._answered.update(values)
        self._refuse("gpm", failures)
        if self.unsupported.keys() >= set(gpm.NAMES):
            self.close()
        return Result(now, values, failures, read_at={"graphics": now - (monotonic() - activity.graphics_at)})

    def close(self) -> None:
        """Give back what the library lent."""
        activity, self.gpm = self.gpm, None
        if activity is not None:
            activity.close()


def open_gpu(index: int, cadence: Cadence, waits_for_pcie: Callable[[], bool] = lambda: True) -> list[Target]:
    """A GPU and, right after it, its MIG instances; what takes milliseconds is left to the probes.

    Args:
        index: NVML's.
        cadence: How often what is read.
        waits_for_pcie: Whether PCIe rates are wanted that can only be had by waiting.

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
        counts = _counts_pcie_bytes(handle)
        second += (probes.pcie_counters() if counts else probes.pcie_by_waiting(waits_for_pcie),)
    target = Target(
        device,
        handle,
        {"facts": probes.facts(), "tick": probes.tick(), "second": second, "slow": probes.slow()},
        activity,
        cadence,
    )
    listed = mig_instances(handle)
    target.instances = tuple(uuid for uuid, _ in listed)
    instances = _instances(target, listed, cadence)
    if instances:
        target.close()  # a GPU that is split has counters only for its parts
    return [target, *instances]


def placeholder(index: int) -> Device:
    """The row of a GPU that is there but could not be named."""
    return Device(index=index, uuid=f"unknown-{index}", name="not answering")


def _instances(parent: Target, listed: list[tuple[str, Any]], cadence: Cadence) -> list[Target]:
    found: list[Target] = []
    for uuid, handle in listed:
        try:
            found.append(_instance(parent, uuid, handle, len(found), cadence))
        except NVMLError:  # one that was just destroyed, or that this user may not open
            continue
    return found


def _instance(parent: Target, uuid: str, handle: Any, mig_index: int, cadence: Cadence) -> Target:
    gpu_instance: int = pynvml.nvmlDeviceGetGpuInstanceId(handle)
    device = parent.device._replace(
        uuid=uuid,
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


def _nodes(handle: Any) -> Any:
    return call("nvmlDeviceGetMemoryAffinity")(handle, _NODE_WORDS, _WHOLE_NODE)


def _numa_node(handle: Any) -> int | None:
    """The NUMA node whose memory is nearest, None when it is none or several.

    The GPU's own node id, where there is one, is that of its memory (Grace) and not where CPUs are near.
    """
    nodes = _ask(_nodes, handle)
    near = (
        [place for place in range(64 * _NODE_WORDS) if nodes[place // 64] >> place % 64 & 1] if nodes else []
    )
    return near[0] if len(near) == 1 else None


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
