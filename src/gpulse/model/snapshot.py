"""One look: a frame, and what happened in the short time before it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from gpulse.model.finding import Finding
from gpulse.model.frame import Frame, GpuReading
from gpulse.model.metric import Value
from gpulse.model.process import ProcessReading
from gpulse.model.rates import Rates, between, key

RATES_SECONDS = 0.5
"""How far apart the two readings behind the rates of one look are taken."""


class Snapshot(NamedTuple):
    """A frame with the rates since an earlier one, and the findings about it."""

    frame: Frame
    rates: Rates
    findings: tuple[Finding, ...] = ()
    verdict: str | None = None
    """What a diagnosis of the time before it says; None when there was only the look itself."""

    @classmethod
    def of(cls, earlier: Frame | None, frame: Frame, findings: tuple[Finding, ...] = ()) -> Snapshot:
        """The snapshot that two frames make; without an earlier one it has no rates."""
        rates = Rates(interval_seconds=0.0) if earlier is None else between(earlier, frame)
        return cls(frame, rates, findings)

    def gpu(self, gpu: GpuReading, name: str) -> Value | None:
        """A GPU's reading, fact or rate by its catalogue name."""
        value = gpu.get(name)
        return self.rates.gpus.get(gpu.device.uuid, {}).get(name) if value is None else value

    def host(self, name: str) -> Value | None:
        """A reading or rate of the host by its catalogue name."""
        value = self.frame.host.values.get(name) if self.frame.host is not None else None
        return self.rates.host.get(name) if value is None else value

    def process(self, process: ProcessReading, name: str) -> Value | None:
        """A process' reading or rate by its catalogue name."""
        value = process.values.get(name)
        if value is not None:
            return value
        rate = self.rates.processes.get(key(process), {}).get(name)
        if rate is None and name == "elapsed_seconds" and process.identity.start_time is not None:
            return max(0.0, self.frame.time - process.identity.start_time)
        return rate


def select(frame: Frame, wanted: Callable[[GpuReading], bool]) -> Frame:
    """The frame with only the wanted GPUs, the processes on them and those processes' descendants."""
    gpus = tuple(gpu for gpu in frame.gpus if wanted(gpu))
    if len(gpus) == len(frame.gpus):
        return frame
    pids = {process.pid for gpu in gpus for process in gpu.processes or ()}
    grew = True
    while grew:
        children = {p.pid for p in frame.processes if p.identity.parent_pid in pids and not p.on_gpu}
        grew = not children <= pids
        pids |= children
    return frame._replace(gpus=gpus, processes=tuple(p for p in frame.processes if p.pid in pids))
