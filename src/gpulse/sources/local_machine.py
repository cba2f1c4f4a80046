"""Source of frames of this machine: GPUs, host, disks, network and processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from time import monotonic

from gpulse.errors import ClosedError
from gpulse.model.device import Node
from gpulse.model.frame import Frame, GpuReading
from gpulse.model.source_health import Health
from gpulse.sources.disks import DiskReader, FilesystemReader
from gpulse.sources.frame_source import HealthLog
from gpulse.sources.harvest_status import HarvestReader, with_harvests
from gpulse.sources.host import HostReader, read_node
from gpulse.sources.network import NetworkReader, PciDevices
from gpulse.sources.nvml.gpu_reader import GpuReader
from gpulse.sources.nvml.read_timing import Cadence, DriverTimeouts
from gpulse.sources.processes import ProcessReader
from gpulse.sources.procfs import Roots
from gpulse.sources.scheduler_jobs import JobReader

_TICK_FRACTION = 0.2
"""Fraction of a tick for which the other GPUs wait for one that does not respond."""
_RARE_SECONDS = 2.0
"""At longer intervals a frame waits for the slower readings: the next frame would be too late for them."""


class LocalMachine:
    """Source of frames of the local machine."""

    def __init__(
        self,
        *,
        interval_seconds: float = 1.0,
        cadence: Cadence | None = None,
        timeouts: DriverTimeouts | None = None,
        threads: bool = False,
        watch_xids: bool = True,
        roots: Roots | None = None,
        gpus: GpuReader | None = None,
        job_maps: Sequence[str] = (),
    ) -> None:
        """Prepare to read.

        Args:
            interval_seconds: Time between two samples; a faulty GPU may delay one by a fraction of it.
            cadence: How often each group of metrics is read.
            timeouts: How long to wait for the driver.
            threads: Read the busiest threads of the processes on GPUs.
            watch_xids: Wait for Xid errors on a thread.
            roots: Where /proc, /sys and /dev are.
            gpus: An existing reader of the GPUs; it is closed with this source.
            job_maps: Directories in which a scheduler's prolog writes which job has which GPU.
        """
        cadence = cadence or Cadence()
        roots = roots or Roots()
        timeouts = timeouts or DriverTimeouts()
        self._first_patience = timeouts.start
        self._tick_patience = min(1.0, max(0.02, interval_seconds * _TICK_FRACTION))
        self._fresh_patience = 0.01 if interval_seconds < _RARE_SECONDS else min(1.0, 0.1 * interval_seconds)
        self._gpus = gpus or GpuReader(
            cadence, watch_xids=watch_xids, timeouts=timeouts, pci=PciDevices(roots)
        )
        self._host = HostReader(roots)
        self._disks = DiskReader(roots)
        self._filesystems = FilesystemReader(roots)
        self._network = NetworkReader(roots)
        self._harvest = HarvestReader(roots)
        self._jobs = JobReader(roots, folders=job_maps)
        self._processes = ProcessReader(roots, threads=threads, details_seconds=cadence.details)
        self._health = HealthLog()
        self._node: Node = read_node(roots)
        self._sampled = False
        self._closed = False

    @property
    def gpm_ready_at(self) -> float | None:
        """Monotonic time from which GPM activity can be read; None when no GPU supports GPM."""
        return self._gpus.gpm_ready_at

    def wait_for_pcie(self, wanted: bool) -> None:
        """Set whether PCIe rates are read often on GPUs that take time to measure them, as by default, or rarely."""
        self._gpus.waits_for_pcie = wanted

    def sample(self, now: float, *, patient: bool = False) -> Frame:
        """Return a frame; the first one, or a patient one, also waits for the slow readings.

        Raises:
            ClosedError: The source was closed.
        """
        if self._closed:
            raise ClosedError("this source is closed")
        clock = monotonic()
        host, found = self._host.read(now)
        disks, disk_health = self._disks.read(now)
        filesystems, filesystem_health = self._filesystems.read(now)
        network, network_health = self._network.read(now)
        self._gpus.start(now)
        patience = self._first_patience if patient or not self._sampled else self._fresh_patience
        gpus, gpu_health = self._gpus.collect(
            now, tick_patience=max(self._tick_patience, patience / 4), patience=patience
        )
        harvests = self._harvest.read(now)
        pids = {process.pid for gpu in gpus for process in gpu.processes or ()}
        register = self._jobs.register(now)
        processes, cgroups, process_health = self._processes.read(now, pids, harvests, register)
        jobs, job_health = self._jobs.read(now, [gpu.device for gpu in gpus], self._processes.job_claims())
        self._sampled = True
        health: list[Health] = [
            *gpu_health,
            *found,
            *disk_health,
            *filesystem_health,
            *network_health,
            *process_health,
            *job_health,
        ]
        return Frame(
            time=now,
            monotonic=clock,
            node=self._named(),
            gpus=_translate_pids(with_harvests(gpus, harvests), self._processes.local),
            host=host,
            disks=disks,
            filesystems=filesystems,
            network=network,
            processes=processes,
            cgroups=cgroups,
            health=self._health.merge(health),
            jobs=jobs,
        )

    def close(self) -> None:
        """End the threads and release the driver."""
        if not self._closed:
            self._closed = True
            for reader in (
                self._gpus,
                self._filesystems,
                self._host,
                self._disks,
                self._network,
                self._processes,
            ):
                reader.close()

    def _named(self) -> Node:
        driver, cuda = self._gpus.versions
        if (self._node.driver, self._node.cuda) != (driver, cuda):
            self._node = self._node._replace(driver=driver, cuda=cuda)
        return self._node


def _translate_pids(gpus: tuple[GpuReading, ...], local: Mapping[int, int]) -> tuple[GpuReading, ...]:
    """Return the GPUs with their processes' PIDs translated from the driver's to this machine's."""
    if all(number == pid for number, pid in local.items()):
        return gpus
    return tuple(
        gpu._replace(
            processes=tuple(one._replace(pid=local.get(one.pid, one.pid)) for one in gpu.processes or ())
        )
        for gpu in gpus
    )
