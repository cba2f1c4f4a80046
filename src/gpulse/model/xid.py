"""Xid errors, reported and counted by GPU and code."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from gpulse.model.device import Device
from gpulse.model.frame import Frame

XID_EVENT = "xid"
"""Kind of the events that report them."""
XID_MEANINGS = {
    8: "the GPU stopped processing",
    13: "illegal instruction or access in a kernel",
    31: "illegal memory access in a kernel",
    32: "a program sent the GPU invalid commands",
    38: "driver firmware error",
    43: "a program was stopped",
    45: "a program was terminated",
    48: "uncorrectable memory error",
    54: "power cable not connected",
    61: "the power controller reported a warning",
    62: "the power controller halted",
    63: "a memory row was remapped",
    64: "row remapping failed",
    69: "a program used a graphics or compute class incorrectly",
    74: "NVLink error",
    79: "the GPU has fallen off the bus",
    92: "high rate of corrected memory errors",
    94: "memory error contained to one program",
    95: "uncontained memory error",
    109: "a program's context did not switch in time",
    119: "GPU firmware (GSP) does not respond",
    120: "GPU firmware (GSP) error",
    140: "unrecovered memory error",
    154: "the driver requests a recovery action",
}
"""What the most frequent codes mean."""
MAX_XID_HOLDERS = 16
"""Processes that an event about Xid errors names."""
_MAX_GPUS = 256
_MAX_CODES = 64
_MAX_CODE = 1 << 16
_MAX_ERRORS_AT_ONCE = 1 << 32


class XidErrors(NamedTuple):
    """New errors with the same code of one GPU."""

    uuid: str
    gpu: str
    """Label of the GPU."""
    code: int
    errors: int
    time: float
    """Time of the last of them in epoch seconds."""
    first: float | None = None
    """Time of the first of them; None if only the last is known."""


class XidCount(NamedTuple):
    """Number of errors with one code, and the times of the last and the first."""

    errors: int
    time: float
    first: float


class XidCounts:
    """Counts the Xid errors of one node's GPUs by GPU and code; its size is bounded."""

    def __init__(self) -> None:
        self._totals: dict[str, float] = {}
        self._counted: dict[str, dict[int, XidCount]] = {}
        self._newest: dict[tuple[str, int], float] = {}
        """Time of the last reported error by GPU and code, on the node's clock."""
        self._devices: dict[str, Device] = {}
        """GPUs with errors by UUID."""

    def follow(self, frame: Frame) -> list[XidErrors]:
        """Add the next frame of a source, and return its new errors.

        A source reports one code per GPU and frame (`sources/nvml/nvml_lifecycle.py`), so that none is missed.
        """
        found = []
        for gpu in frame.gpus:
            total, code = gpu.values.get("xid_errors_total"), gpu.values.get("xid_last_code")
            if total is None:
                continue
            before = self._totals.get(gpu.device.uuid, 0.0)
            self._totals[gpu.device.uuid] = total
            new = total - before if total >= before else total
            if new > 0 and code is not None:
                moment = gpu.values.get("xid_last_timestamp_seconds", frame.time)
                found.append(XidErrors(gpu.device.uuid, gpu.device.label, int(code), int(new), float(moment)))
        for xid in found:
            self._count(xid)
        return found

    def add(self, xid: XidErrors, *, shift_seconds: float = 0.0) -> None:
        """Count reported errors; repeated reports are not counted again.

        Args:
            xid: The errors.
            shift_seconds: Offset from the node's clock to ours.
        """
        if xid.time > self._newest.get((xid.uuid, xid.code), -math.inf):
            self._count(xid, shift_seconds)

    def _count(self, xid: XidErrors, shift_seconds: float = 0.0) -> None:
        codes = self._counted.get(xid.uuid)
        if codes is None:
            if len(self._counted) >= _MAX_GPUS:
                return
            codes = self._counted[xid.uuid] = {}
            self._devices[xid.uuid] = _device(xid)
        known = codes.get(xid.code)
        if known is None and len(codes) >= _MAX_CODES:
            return
        moment, first = xid.time + shift_seconds, xid.time if xid.first is None else xid.first
        if known is None:
            codes[xid.code] = XidCount(xid.errors, moment, first + shift_seconds)
        else:
            codes[xid.code] = XidCount(known.errors + xid.errors, max(known.time, moment), known.first)
        self._newest[xid.uuid, xid.code] = xid.time

    def update_devices(self, devices: Iterable[Device]) -> None:
        """Update the descriptions of GPUs with errors; a GPU that fell off the bus keeps its last one."""
        if self._devices:
            self._devices.update({d.uuid: d for d in devices if d.uuid in self._devices})

    def counted(self) -> list[tuple[Device, Mapping[int, XidCount]]]:
        """Return the GPUs with errors, and their counts by code."""
        return [(self._devices[uuid], codes) for uuid, codes in list(self._counted.items())]

    def errors(self) -> list[XidErrors]:
        """Return all errors so far, one entry per GPU and code."""
        return [
            XidErrors(device.uuid, device.label, code, counted.errors, counted.time, counted.first)
            for device, codes in self.counted()
            for code, counted in codes.items()
        ]

    def of(self, uuid: str) -> Mapping[int, XidCount]:
        """Return the counts of one GPU by code."""
        return self._counted.get(uuid, {})


def _device(xid: XidErrors) -> Device:
    """Return a device with the data that an error report contains."""
    index, mig = (int(part) if part.isdecimal() else None for part in xid.gpu.partition(":")[::2])
    return Device(-1 if index is None else index, xid.uuid, "", mig_index=mig)


def xid_from_document(raw: Mapping[str, Any]) -> XidErrors | None:
    """Return the errors of an event; None when it is not an Xid event."""
    uuid, gpu, code, errors, moment, first = (raw.get(name) for name in XidErrors._fields)
    if not isinstance(uuid, str) or not isinstance(gpu, str) or not isinstance(moment, int | float):
        return None
    if not isinstance(code, int) or not 0 <= code < _MAX_CODE:
        return None
    if not isinstance(errors, int) or not 0 < errors < _MAX_ERRORS_AT_ONCE:
        return None
    began = float(first) if isinstance(first, int | float) and first <= moment else None
    return XidErrors(uuid, gpu, code, errors, float(moment), began)
