"""How often each group of metrics is read: NVML's calls differ a thousandfold in cost, most of it CPU time.

Measured on an H200 (driver 580), CPU microseconds per call, during which the driver spins: utilization,
power, clocks 2-30; memory 8-50; process list 10-50; GPM sample and metrics 70-280, its graphics metric
1,300-1,750; energy 3,000-5,700; shares of processes 1,400-2,800; hardware-slowdown counters 400-1,150
each; margin temperature 800-1,200; maximal clocks 1,200-1,750 each.
"""

from __future__ import annotations

from typing import NamedTuple

_ONCE_SECONDS = float("inf")


class Cadence(NamedTuple):
    """Periods of the metric groups in seconds; the caller sets the tick itself."""

    second: float = 1.0
    """Limits, links, video engines, memory temperature, the list of processes."""
    gpm: float | None = 1.0
    """Activity of SMs, tensor cores, memory and links; None disables GPM."""
    graphics: float = 10.0
    """Activity of the graphics engine, GPM's one costly metric."""
    shares: float = 10.0
    """Each process's share of the multiprocessors."""
    slow: float = 30.0
    """Energy, slowdown counters, ECC, settings."""
    pcie: float = 5.0
    """PCIe rates of GPUs without GPM and without byte counters: NVML waits 20 ms per direction to measure them."""
    details: float = 5.0
    """Disk use and run-queue wait of processes, which cost twice as much as the rest of a process."""

    def period(self, group: str) -> float | None:
        """Return the period of a metric group; None when it is disabled."""
        return {
            "second": self.second,
            "gpm": self.gpm,
            "pcie": self.pcie,
            "slow": self.slow,
            "facts": _ONCE_SECONDS,
        }[group]


class DriverTimeouts(NamedTuple):
    """Timeouts and check intervals of the driver, in seconds."""

    start: float = 3.0
    """Time for NVML to start, and then for the GPUs to identify themselves, before the first frame."""
    call: float = 2.0
    """Time for one slower metric group, after which its GPU counts as not responding."""
    survey: float = 10.0
    """Time between two checks of which GPUs exist."""
    retry: float = 2.0
    """Time between two attempts to start NVML."""


def live_cadence() -> Cadence:
    """Return the cadence for interactive views, where the shares of processes are worth their cost."""
    return Cadence(shares=2.0, graphics=2.0, pcie=1.0, details=0.0)


def detailed_cadence(gpm_seconds: float = 0.2) -> Cadence:
    """Return the cadence for a recording or a diagnosis: everything often, for a limited time."""
    return Cadence(gpm=gpm_seconds, graphics=gpm_seconds, shares=2.0, slow=5.0, pcie=1.0, details=0.0)
