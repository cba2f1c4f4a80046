"""Sends a signal to exactly the process that was shown, never to another one that got its number."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from gpulse.errors import GpulseError
from gpulse.model.process import ProcessIdentity
from gpulse.sources.procfs import parse_stat
from gpulse.sources.procpid import parse_pid_stat

_TOLERANCE_SECONDS = 1.5
"""The kernel rounds the time of boot to seconds, so that a start time moves by one when the clock is adjusted."""


class NotEndedError(GpulseError):
    """A process could not be sent its signal."""


def end_process(identity: ProcessIdentity, signal_number: signal.Signals) -> None:
    """Send a signal to a process, if its number still means the process that was shown.

    The descriptor is opened before the start time is compared: from then on it means one process for
    good, whatever becomes of the number.

    Raises:
        NotEndedError: It is gone, it is another one, or this user may not.
    """
    if identity.start_time is None:
        raise NotEndedError(f"{identity.pid} is not sent a signal: it is not known when it started")
    try:
        descriptor = os.pidfd_open(identity.pid)
    except OSError as error:
        raise NotEndedError(_why(identity.pid, error)) from error
    try:
        started = _started(identity.pid)
        if started is None or abs(started - identity.start_time) > _TOLERANCE_SECONDS:
            raise NotEndedError(f"{identity.pid} has ended; the number now belongs to another process")
        signal.pidfd_send_signal(descriptor, signal_number)
    except OSError as error:
        raise NotEndedError(_why(identity.pid, error)) from error
    finally:
        os.close(descriptor)


def _started(pid: int) -> float | None:
    stat = parse_pid_stat(Path(f"/proc/{pid}/stat").read_bytes())
    boot = parse_stat(Path("/proc/stat").read_bytes()).boot_time
    return None if stat is None or boot is None else boot + stat.start_ticks / os.sysconf("SC_CLK_TCK")


def _why(pid: int, error: OSError) -> str:
    if isinstance(error, ProcessLookupError | FileNotFoundError):
        return f"{pid} has already ended"
    if isinstance(error, PermissionError):
        return f"no permission to end {pid}: it belongs to another user"
    return f"{pid} could not be sent a signal: {error.strerror or error}"
