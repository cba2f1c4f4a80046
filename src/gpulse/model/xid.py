"""Xid errors by GPU and code: told one by one, counted for as long as somebody counts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from gpulse.model.device import Device
from gpulse.model.frame import Frame

XID = "xid"
"""The kind of event in which they travel."""
_MOST_GPUS = 256
_MOST_CODES = 64
_HIGHEST_CODE = 1 << 16
_MOST_AT_ONCE = 1 << 32


class Xid(NamedTuple):
    """Errors of one code that a GPU reported since they were last told."""

    uuid: str
    gpu: str
    """How people name the GPU."""
    code: int
    errors: int
    time: float
    """When the last of them was seen, in epoch seconds."""


class Counted(NamedTuple):
    """How often a code was seen, and when last."""

    errors: int
    time: float


class XidLedger:
    """What the GPUs of one node reported so far. What comes from elsewhere cannot make it grow without end."""

    def __init__(self) -> None:
        self._totals: dict[str, float] = {}
        self._counted: dict[str, dict[int, Counted]] = {}
        self._newest: dict[tuple[str, int], float] = {}
        """By GPU and code the time of the last errors that were told, on the node's clock."""
        self._devices: dict[str, Device] = {}
        """By UUID what is known of GPUs that had errors."""

    def follow(self, frame: Frame) -> list[Xid]:
        """Take the next frame of a source; the errors that are new with it.

        A source tells one code of a GPU in each frame (`sources/nvml/events.py`), so that none is missed.
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
                found.append(Xid(gpu.device.uuid, gpu.device.label, int(code), int(new), float(moment)))
        for xid in found:
            self._count(xid)
        return found

    def add(self, xid: Xid, *, shift_seconds: float = 0.0) -> None:
        """Count errors that were told; those that were told before, perhaps in other words, are not counted again.

        Args:
            xid: The errors.
            shift_seconds: What makes a time of the node one of ours.
        """
        if xid.time > self._newest.get((xid.uuid, xid.code), -math.inf):
            self._count(xid, shift_seconds)

    def _count(self, xid: Xid, shift_seconds: float = 0.0) -> None:
        codes = self._counted.get(xid.uuid)
        if codes is None:
            if len(self._counted) >= _MOST_GPUS:
                return
            codes = self._counted[xid.uuid] = {}
            self._devices[xid.uuid] = _device(xid)
        known = codes.get(xid.code)
        if known is None and len(codes) >= _MOST_CODES:
            return
        errors, moment = known or Counted(0, 0.0)
        codes[xid.code] = Counted(errors + xid.errors, max(moment, xid.time + shift_seconds))
        self._newest[xid.uuid, xid.code] = xid.time

    def meet(self, devices: Iterable[Device]) -> None:
        """Learn what GPUs are that had errors; one that has fallen off the bus is told by nobody any more."""
        if self._devices:
            self._devices.update({d.uuid: d for d in devices if d.uuid in self._devices})

    def counted(self) -> list[tuple[Device, Mapping[int, Counted]]]:
        """The GPUs that had errors, as far as they are known, and their codes."""
        return [(self._devices[uuid], codes) for uuid, codes in list(self._counted.items())]

    def errors(self) -> list[Xid]:
        """Return the errors so far, one entry for each GPU and code."""
        return [
            Xid(device.uuid, device.label, code, counted.errors, counted.time)
            for device, codes in self.counted()
            for code, counted in codes.items()
        ]

    def of(self, uuid: str) -> Mapping[int, Counted]:
        """The codes of one GPU."""
        return self._counted.get(uuid, {})


def _device(xid: Xid) -> Device:
    """The GPU that errors speak of, as far as they say what it is."""
    index, mig = (int(part) if part.isdecimal() else None for part in xid.gpu.partition(":")[::2])
    return Device(-1 if index is None else index, xid.uuid, "", mig_index=mig)


def from_document(raw: Mapping[str, Any]) -> Xid | None:
    """The errors that an event speaks of, None when it speaks of none."""
    uuid, gpu, code, errors, moment = (raw.get(name) for name in Xid._fields)
    if not isinstance(uuid, str) or not isinstance(gpu, str) or not isinstance(moment, int | float):
        return None
    if not isinstance(code, int) or not 0 <= code < _HIGHEST_CODE:
        return None
    if not isinstance(errors, int) or not 0 < errors < _MOST_AT_ONCE:
        return None
    return Xid(uuid, gpu, code, errors, float(moment))
