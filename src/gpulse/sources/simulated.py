"""The demo machine: one node whose GPUs each replay another recording of real hardware."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gpulse.errors import ClosedError
from gpulse.model.device import Node
from gpulse.model.frame import DiskReading, FilesystemReading, Frame, HostReading, NetworkReading
from gpulse.model.job import Job
from gpulse.model.metric import Value, Values
from gpulse.sources.playing import Part, Scene, Stint, Track
from gpulse.sources.reel import added

_GIB = 1024**3
_SCHEDULER = "slurm:"
_USED = (0.62, 0.41, 0.55, 0.93, 0.78, 0.34, 0.17, 0.69)
"""How full the file system is, by the machine's number."""


SCENES = (
    Scene("healthy_gpt", 9.0, "ada", "python3 train_gpt.py --config gpt-1b.yaml"),
    Scene("loader_too_few_workers", 9.0, "grace", "python3 train.py --data /data/imagenet --workers 2"),
    Scene("launch_bound", 9.5, "linus", "python3 rnn_lm.py --hidden 256"),
    Scene("disk_read", 9.0, "grace", "python3 pretrain.py --shards /data/laion --workers 8"),
    Scene("pcie_copies", 5.0, "barbara", "python3 embed.py --shard 3"),
    Scene("gpu_memory_leak", 8.0, "alan", "python3 finetune.py --log-losses"),
    Scene("idle_allocated", 5.0, "katherine", "python3 -m ipykernel_launcher -f kernel-4f1c.json"),
    Scene("idle", 0.0, "", ""),
)
FREE = SCENES[-1]
"""A GPU that nobody uses."""


class DemoMachine:
    """A source that composes one believable machine out of recordings, endlessly.

    What it shows depends only on the time since `started`. Each recording plays from its interesting
    stretch to its end and starts over; counters go on growing across the seam, and from one stint to the next.
    """

    def __init__(
        self,
        started: float,
        *,
        gpus: int = 8,
        slots: Sequence[Sequence[Stint]] | None = None,
        name: str = "demo",
        number: int = 0,
        inside: bool = True,
    ) -> None:
        """Compose the machine.

        Args:
            started: When the demo starts, in epoch seconds.
            gpus: How many GPUs play the scenes above in turn.
            slots: Instead of these, what each GPU plays, one stint after the other.
            name: Of the node.
            number: Tells machines apart: no two numbers have a GPU in common.
            inside: Show single CPUs and threads, too, which nobody keeps.
        """
        self._started = started
        self._name = name
        self._number = number
        if slots is None:
            slots = [_usual(slot) for slot in range(gpus)]
        self._gpus = len(slots)
        # A machine without GPUs has CPUs all the same.
        self._tracks = [
            Track(slot, stints, started, number, inside=inside)
            for slot, stints in enumerate(slots or [[Stint(FREE)]])
        ]
        self._closed = False

    def sample(self, now: float) -> Frame:
        """The machine at one instant.

        Raises:
            ClosedError: The source was closed.
        """
        return self.sample_over(now, None)

    def sample_over(self, now: float, over: float | None) -> Frame:
        """The machine at one instant, its GPUs as they were on the mean over some seconds up to then.

        Raises:
            ClosedError: The source was closed.
        """
        parts = self._parts(now, whole=True, over=over)
        return self._quick(now, parts)._replace(
            disks=(DiskReading("nvme0n1", "nvme", added([part.disk for part in parts]), "Demo NVMe 15 TB"),),
            filesystems=_filesystems(_USED[self._number % len(_USED)]),
            network=(_link([part.link for part in parts]),),
            processes=tuple(process for part in parts for process in part.processes),
            jobs=tuple(_jobs(parts[: self._gpus])),
        )

    def glance(self, now: float, *, over: float | None = None) -> Frame:
        """Only the GPUs and the host of that moment, for much less work.

        Args:
            now: Epoch seconds.
            over: Tell what the GPUs did on the mean in so many seconds up to then.

        Raises:
            ClosedError: The source was closed.
        """
        return self._quick(now, self._parts(now, whole=False, over=over))

    def _parts(self, now: float, *, whole: bool, over: float | None) -> list[Part]:
        if self._closed:
            raise ClosedError("this demo machine was closed")
        return [track.at(now - self._started, whole=whole, over=over) for track in self._tracks]

    def _quick(self, now: float, parts: Sequence[Part]) -> Frame:
        return Frame(
            time=now,
            monotonic=now,
            node=Node(
                name=self._name,
                driver=parts[0].driver,
                cuda="13.0",
                kernel="6.8.0",
                cpu_model="2 x 64-core demo CPU",
            ),
            gpus=tuple(
                part.gpu._replace(read_at=dict.fromkeys(part.gpu.read_at, now))
                for part in parts[: self._gpus]
            ),
            host=_host([part.host for part in parts if part.host is not None]),
        )

    def close(self) -> None:
        """Nothing is held; later calls of `sample` fail."""
        self._closed = True


def _jobs(parts: Iterable[Part]) -> Iterable[Job]:
    """The scheduler's jobs, which were given the GPUs that they use."""
    found: dict[str, Job] = {}
    for part in parts:
        for owner in {process.identity.owner for process in part.processes}:
            if owner.job is not None and owner.job.startswith(_SCHEDULER):
                before = found.get(owner.job, Job(owner.job, owner.user, partition="gpu", source="devices"))
                found[owner.job] = before._replace(gpus=(*before.gpus, part.gpu.device.uuid))
    return sorted(found.values(), key=lambda job: job.id)


def _usual(slot: int) -> tuple[Stint, ...]:
    return (Stint(SCENES[slot % len(SCENES)], phase=(slot // len(SCENES)) * 1.7),)


def _host(parts: list[HostReading]) -> HostReading:
    """The hosts side by side: their CPUs in a row, everything that can be added added.

    Time in which *every* task waited cannot be added up; the mean stands in for it.
    """
    values: dict[str, Value] = {}
    for part in parts:
        for name, value in part.values.items():
            values[name] = values.get(name, 0) + (value / len(parts) if "_full_" in name else value)
    return HostReading(values, tuple(core for part in parts for core in part.cores))


def _filesystems(used: float) -> tuple[FilesystemReading, ...]:
    size = 14_000 * _GIB
    values: Values = {
        "size_bytes": size,
        "used_bytes": int(size * used),
        "available_bytes": int(size * (1 - used)),
    }
    return (FilesystemReading("/data", "/dev/nvme0n1", "ext4", "nvme0n1", "nvme", values),)


def _link(parts: Sequence[Values]) -> NetworkReading:
    return NetworkReading("eth0", "ethernet", True, {**added(parts), "link_bits_per_second": 100_000_000_000})
