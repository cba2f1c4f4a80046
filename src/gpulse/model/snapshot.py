"""A snapshot: a frame, and the rates over the short time before it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from gpulse.model.counter_rates import Rates, compute_rates, process_key
from gpulse.model.finding import Finding
from gpulse.model.frame import Frame, GpuReading
from gpulse.model.metric_catalog import Value
from gpulse.model.process import ProcessReading

RATES_SECONDS = 0.5
"""Time between the two readings from which the rates of a snapshot are computed."""


class Snapshot(NamedTuple):
    """A frame with the rates since an earlier one, and the findings about it."""

    frame: Frame
    rates: Rates
    findings: tuple[Finding, ...] = ()
    verdict: str | None = None
    """Verdict of a diagnosis of the time before it; None when there was only the snapshot itself."""

    @classmethod
    def of(cls, earlier: Frame | None, frame: Frame, findings: tuple[Finding, ...] = ()) -> Snapshot:
        """Return the snapshot of two frames; without an earlier one it has no rates."""
        rates = Rates(interval_seconds=0.0) if earlier is None else compute_rates(earlier, frame)
        return cls(frame, rates, findings)

    def gpu(self, gpu: GpuReading, name: str) -> Value | None:
        """Return a reading, fact or rate of a GPU by its metric name."""
        value = gpu.get(name)
        return self.rates.gpus.get(gpu.device.uuid, {}).get(name) if value is None else value

    def host(self, name: str) -> Value | None:
        """Return a reading or rate of the host by its metric name."""
        value = self.frame.host.values.get(name) if self.frame.host is not None else None
        return self.rates.host.get(name) if value is None else value

    def process(self, process: ProcessReading, name: str) -> Value | None:
        """Return a reading or rate of a process by its metric name."""
        value = process.values.get(name)
        if value is not None:
            return value
        rate = self.rates.processes.get(process_key(process), {}).get(name)
        if rate is None and name == "elapsed_seconds" and process.identity.start_time is not None:
            return max(0.0, self.frame.time - process.identity.start_time)
        return rate


def select_gpus(frame: Frame, wanted: Callable[[GpuReading], bool]) -> Frame:
    """Return the frame with only the selected GPUs, their processes and descendants of those."""
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
