"""How often what is read: NVML's calls differ a thousandfold in cost, and most of it is CPU time.

Measured on an H200 (driver 580), CPU microseconds a call, the driver spinning all the while: utilization,
power, clocks 2-30; memory 8-50; process list 10-50; GPM sample and metrics 70-280, its graphics metric
1,300-1,750; energy 3,000-5,700; shares of processes 1,400-2,800; hardware-slowdown counters 400-1,150
each; margin temperature 800-1,200; maximal clocks 1,200-1,750 each.
"""

from __future__ import annotations

from typing import NamedTuple

_ONCE = float("inf")


class Cadence(NamedTuple):
    """Periods of the groups of readings, in seconds; the tick itself is the caller's."""

    second: float = 1.0
    """Limits, links, video engines, memory temperature, the list of processes."""
    gpm: float | None = 1.0
    """Activity of SMs, tensor cores, memory and links; None leaves GPM alone."""
    graphics: float = 10.0
    """Activity of the graphics engine, GPM's one costly metric."""
    shares: float = 10.0
    """Each process' share of the multiprocessors."""
    slow: float = 30.0
    """Energy, slowdown counters, ECC, settings."""
    details: float = 5.0
    """Disk use and run-queue wait of processes, which cost twice what the rest of a process does."""

    def period(self, group: str) -> float | None:
        """The period of one group of probes, None when it is switched off."""
        return {"second": self.second, "gpm": self.gpm, "slow": self.slow, "facts": _ONCE}[group]


class Patience(NamedTuple):
    """How long the driver is waited for, and how often it is looked after, in seconds."""

    start: float = 3.0
    """For NVML to start, and then for the GPUs to say who they are, before the first frame goes out."""
    call: float = 2.0
    """For one group of readings off the tick, before its GPU counts as not answering."""
    survey: float = 10.0
    """From one look at which GPUs there are to the next."""
    retry: float = 2.0
    """From one attempt to start NVML to the next."""


def live() -> Cadence:
    """For a person who watches: shares of processes are worth their cost."""
    return Cadence(shares=2.0, graphics=2.0, details=0.0)


def close_up(gpm_seconds: float = 0.2) -> Cadence:
    """For a recording or a diagnosis: everything often, for a limited time."""
    return Cadence(gpm=gpm_seconds, graphics=gpm_seconds, shares=2.0, slow=5.0, details=0.0)
