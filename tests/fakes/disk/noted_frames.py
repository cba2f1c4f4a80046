"""Import this in an agent: frames that it takes, and that a head acknowledges, are noted in the trace of its disk."""

from __future__ import annotations

import fcntl
import json
import os
import struct
from typing import Any

from gpulse.cluster.agent.frame_buffer import FrameBuffer

UNSYNCED: tuple[str, ...] = ()
"""Functions of `os` that do nothing, to show that a test notices a missing sync."""
_ENTRY = struct.Struct("<IIQQc7x")
_add, _acknowledge = FrameBuffer.add, FrameBuffer.acknowledge
_syncs = {name: getattr(os, name) for name in ("fsync", "fdatasync")}


def note(**fields: Any) -> None:
    """Write something to the trace of this program's disk, in the order of its writes."""
    data = json.dumps(fields).encode()
    file = os.open(os.environ["TRACE_FILE"], os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        os.write(file, _ENTRY.pack(len(data), len(data), 0, 0, b"n") + data)
    finally:
        os.close(file)


def add(self: FrameBuffer, packed: Any, texts: Any, taken: float) -> int:
    """Add a frame, as the buffer does."""
    number = _add(self, packed, texts, taken)
    note(what="taken", run=self.run.hex(), number=number, time=packed.time_us / 1e6)
    return number


def acknowledge(self: FrameBuffer, run: bytes, sequence: int, now: float = 0.0) -> None:
    """Drop acknowledged frames, as the buffer does."""
    if run == self.run:  # of an earlier run, acknowledgements also cover gaps that the agent has told of
        note(what="acknowledged", run=run.hex(), number=sequence)
    _acknowledge(self, run, sequence, now)


def _sync(name: str, file: int) -> None:
    if name not in UNSYNCED:
        _syncs[name](file)


FrameBuffer.add, FrameBuffer.acknowledge = add, acknowledge  # type: ignore[method-assign]
os.fsync = lambda file: _sync("fsync", file)  # type: ignore[assignment,arg-type]
os.fdatasync = lambda file: _sync("fdatasync", file)  # type: ignore[assignment,arg-type]
