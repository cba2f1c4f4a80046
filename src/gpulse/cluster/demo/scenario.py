"""Scenario of the demo cluster: its nodes, the users and jobs on their GPUs, and what happened before the start.

Nearly all readings come from the packaged recordings, which are of one GPU each. Names, jobs and times are invented. So
is what no recording has: the traffic between GPUs and nodes of a job, how a leak goes on for longer than a recording,
counters of memory errors, a node that was lost for a while, one Xid error, how full the disks are, and the totals of the
time before the history.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from gpulse.sources.demo_machine import DEMO_WORKLOADS, IDLE_WORKLOAD, DemoWorkload, WorkloadPeriod

HISTORY_SECONDS = 6 * 3600.0
"""Length of the planned history; large clusters use only its last part."""
LEAVE_SECONDS = 8.0
"""One of the nodes leaves this long after its agent started."""
RUNNING_SESSION = "pretrain_gpt_7b"
FINISHED_SESSION = "resnet_baseline"

_USERS = (
    *("ada", "grace", "linus", "barbara", "alan", "katherine"),
    *("edsger", "frances", "margaret", "donald", "radia", "ken"),
)
_FIRST_JOB = 4711
_MINUTE = 60.0
_HOUR = 3600.0
_HISTORY_START = -HISTORY_SECONDS
_EARLIER_SECONDS = 50 * _HOUR
"""How far back the totals of the fleet go."""
_LEAK_SECONDS = 18 * _MINUTE
_NODES_PER_RACK = 4
_GRADIENT_BYTES_PER_SECOND = 0.4e9
"""Traffic of each GPU of a job with the job's other node."""
_NVLINK_BYTES_PER_SECOND = 60e9
_REQUEST_BYTES_PER_SECOND = 1.5e6

Slots = tuple[tuple[WorkloadPeriod, ...], ...]


class DemoNode(NamedTuple):
    """One node: the recordings that its GPUs replay, and when it is away."""

    name: str
    number: int
    """Counts from 1."""
    slots: Slots
    away: tuple[float, float] | None = None
    """Start and end of the time in which it was lost, in seconds relative to the demo's start."""
    leaves: float | None = None
    """When its agent ends, in seconds after the agent's start."""
    labels: Mapping[str, str] = {}
    earlier: Slots = ()
    """What its GPUs did before the first period of its slots; only the totals of the fleet show it."""


class DemoCluster(NamedTuple):
    """All nodes, and the expected ones that never report."""

    nodes: tuple[DemoNode, ...]
    missing: tuple[str, ...]

    @property
    def expected(self) -> tuple[str, ...]:
        """Names of all expected nodes."""
        return (*(node.name for node in self.nodes), *self.missing)

    @property
    def example_nodes(self) -> tuple[str, ...]:
        """Names of the nodes in the example sessions: those of the large job, if there are enough nodes."""
        return tuple(node.name for node in self.nodes[1:3] or self.nodes[:1] if node.slots)


class _NodeGroup(NamedTuple):
    """A group of eight nodes; every group has different users and jobs."""

    group: int

    def user(self, number: int) -> str:
        return _USERS[(number + 5 * self.group) % len(_USERS)]

    def job(self, number: int) -> str:
        return f"slurm:{_FIRST_JOB + number + 40 * self.group}"

    def scene(
        self, recording: str, user: int, command: str, *, job: int | None = None, container: int | None = None
    ) -> DemoWorkload:
        """Return a recording as the work of a user of this group."""
        is_leak = recording == "gpu_memory_leak"
        return DemoWorkload(
            recording,
            _RECORDING_STARTS[recording],
            self.user(user),
            command,
            job=None if job is None else self.job(job),
            container=None if container is None else f"{0xC0FFEE00 + 256 * self.group + container:012x}",
            pod=None if container is None else f"de300000-0000-4000-8000-{256 * self.group + container:012x}",
            leak_seconds=_LEAK_SECONDS if is_leak else None,
        )


_RECORDING_STARTS = {
    **{scene.recording: scene.begin for scene in DEMO_WORKLOADS},
    "gpu_shared": 11.0,
    "healthy_cnn_with_loader": 15.0,
    "sparse_serving": 8.5,
    "checkpoint_stall": 8.5,
}
"""Start of the interesting part of each recording, in seconds."""


def build_cluster(nodes: int, gpus: int) -> DemoCluster:
    """Return the cluster of a given size, which is always the same.

    Args:
        nodes: Number of nodes. The last one of several is lost soon; one more is expected and never reports.
        gpus: Number of GPUs per node.
    """
    digits = max(2, len(str(nodes + 1)))
    planned = []
    for place in range(nodes):
        role = _ROLES[place % len(_ROLES)]
        number = place + 1
        group = _NodeGroup(place // len(_ROLES))
        slots, away = role(group, gpus)
        if role is _large_job and number == nodes and place % len(_ROLES) == 1:
            slots = _without_link(slots)  # the other node of the job does not exist
        planned.append(
            DemoNode(
                name=f"gpu-{number:0{digits}d}",
                number=number,
                slots=tuple(
                    tuple(stint._replace(phase=1.3 * slot + 0.7 * number) for stint in stints)
                    for slot, stints in enumerate(slots)
                ),
                away=away,
                leaves=LEAVE_SECONDS if 1 < number == nodes else None,
                labels={"rack": f"r{place // _NODES_PER_RACK + 1}", "demo": "yes"},
                earlier=tuple(_earlier_periods(group, number, slot) for slot in range(gpus)),
            )
        )
    return DemoCluster(tuple(planned), (f"gpu-{nodes + 1:0{digits}d}",))


def _without_link(slots: Slots) -> Slots:
    return tuple(
        tuple(stint._replace(scene=stint.scene._replace(link_bytes_per_second=0.0)) for stint in stints)
        for stints in slots
    )


def _earlier_periods(group: _NodeGroup, number: int, slot: int) -> tuple[WorkloadPeriod, ...]:
    """Return what a GPU did in the two days before the history, in periods of two to six hours."""
    train = group.scene("healthy_gpt", 0, "python3 train_gpt.py --config gpt-1b.yaml")
    images = group.scene("healthy_cnn_with_loader", 6, "python3 train_resnet.py --data /data/imagenet")
    notebook = group.scene("idle_allocated", 5, "python3 -m ipykernel_launcher -f kernel-19b3.json")
    menu = (train, images, IDLE_WORKLOAD, train, notebook, images, train, IDLE_WORKLOAD, train)
    periods = []
    begin, step = -_EARLIER_SECONDS, 0
    while begin < _HISTORY_START:
        periods.append(WorkloadPeriod(menu[(7 * number + 3 * slot + 5 * step) % len(menu)], begin))
        begin += (2 + (5 * number + 3 * slot + 2 * step) % 5) * _HOUR
        step += 1
    return tuple(periods)


def _repeat_slots(some: Sequence[tuple[WorkloadPeriod, ...]], gpus: int) -> Slots:
    return tuple(some[slot % len(some)] for slot in range(gpus))


_NodeSlots = tuple[Slots, tuple[float, float] | None]


def _one_problem_per_gpu(group: _NodeGroup, gpus: int) -> _NodeSlots:
    """Return a different problem for every GPU, and one free GPU."""
    train = group.scene("healthy_gpt", 0, "python3 train_gpt.py --config gpt-1b.yaml")
    workers = group.scene("loader_too_few_workers", 1, "python3 train.py --data /data/imagenet --workers 2")
    launches = group.scene("launch_bound", 2, "python3 rnn_lm.py --hidden 256")
    shards = group.scene("disk_read", 1, "python3 pretrain.py --shards /data/laion --workers 8")
    copies = group.scene("pcie_copies", 3, "python3 embed.py --shard 3")
    leak = group.scene("gpu_memory_leak", 4, "python3 finetune.py --log-losses")
    notebook = group.scene("idle_allocated", 5, "python3 -m ipykernel_launcher -f kernel-4f1c.json")
    some = [
        _gpu_since(train, -2.2 * _HOUR),
        _gpu_since(workers, -1.4 * _HOUR, earlier=train),
        _gpu_since(launches, -47 * _MINUTE, earlier=copies),
        _gpu_since(shards, -3.1 * _HOUR),
        _gpu_since(copies, -36 * _MINUTE),
        _gpu_since(leak, -94 * _MINUTE, earlier=train),
        _gpu_since(notebook, -5.3 * _HOUR),
        _gpu_since(IDLE_WORKLOAD, -1.1 * _HOUR, earlier=train, pause=0.0),
    ]
    return _repeat_slots(some, gpus), None


def _large_job(group: _NodeGroup, gpus: int) -> _NodeSlots:
    """Return one training job on all GPUs, which also uses the next node."""
    now = group.scene("healthy_gpt", 0, "python3 train_gpt.py --config gpt-7b.yaml", job=0)
    before = group.scene("healthy_gpt", 6, "python3 train_gpt.py --config gpt-1b.yaml --lr 3e-4", job=-23)
    now, before = (
        _linked(scene, gpus)._replace(link_bytes_per_second=_GRADIENT_BYTES_PER_SECOND)
        for scene in (now, before)
    )
    return _repeat_slots(
        [_gpu_since(now, -3.7 * _HOUR + 40.0, earlier=before, pause=12 * _MINUTE)], gpus
    ), None


def _linked(scene: DemoWorkload, gpus: int, ratio: float = 1.0) -> DemoWorkload:
    """Return a workload whose GPUs, if it has several, exchange data over NVLink."""
    return scene._replace(nvlink_bytes_per_second=ratio * _NVLINK_BYTES_PER_SECOND if gpus > 1 else 0.0)


def _waiting_for_loader(group: _NodeGroup, gpus: int) -> _NodeSlots:
    """Return a job that waits for its data loader, idle notebooks that hold GPUs, and free GPUs."""
    starved = group.scene(
        "loader_too_few_workers", 7, "python3 train_vit.py --data /data/imagenet --workers 2", job=9
    )
    notebooks = [
        group.scene("idle_allocated", user, f"python3 -m ipykernel_launcher -f kernel-{user:x}a07.json")
        for user in (8, 5)
    ]
    starved = _linked(starved, gpus, 0.2)
    before = group.scene("disk_read", 9, "python3 tokenize_shards.py --out /data/tokens", job=4)
    images = group.scene(
        "healthy_cnn_with_loader", 7, "python3 train_vit.py --data /data/imagenet --workers 12", job=3
    )
    some = [
        *([_gpu_since(starved, -2.6 * _HOUR, earlier=_linked(images, gpus, 0.2))] * 4),
        *(_gpu_since(notebook, -5.1 * _HOUR) for notebook in notebooks),
        _gpu_since(IDLE_WORKLOAD, -3.3 * _HOUR, earlier=before, pause=0.0),
        _gpu_since(IDLE_WORKLOAD, _HISTORY_START),
    ]
    return _repeat_slots(some, gpus), None


def _containers(group: _NodeGroup, gpus: int) -> _NodeSlots:
    """Return services in containers and a training job that waits for checkpoints; the node was lost for a while."""
    away = (-2.1 * _HOUR, -1.9 * _HOUR)
    back = away[1] + 90.0
    saving = group.scene("checkpoint_stall", 10, "python3 train_diffusion.py --save-every 4s", job=14)
    earlier = group.scene("healthy_gpt", 10, "python3 train_diffusion.py --config xl.yaml", job=2)
    saving, earlier = (_linked(scene, gpus, 0.3) for scene in (saving, earlier))
    serving = [
        group.scene("sparse_serving", 11, f"python3 -m serve --model chat-{size}b", container=place)._replace(
            link_bytes_per_second=_REQUEST_BYTES_PER_SECOND, max_activity_ratio=0.01
        )
        for place, size in enumerate((8, 8, 70, 70))
    ]
    some = [
        *(
            (
                WorkloadPeriod(scene, _HISTORY_START),
                WorkloadPeriod(IDLE_WORKLOAD, away[0]),
                WorkloadPeriod(scene, back + 20.0 * place),
            )
            for place, scene in enumerate(serving)
        ),
        *(
            [
                (
                    WorkloadPeriod(earlier, _HISTORY_START),
                    WorkloadPeriod(IDLE_WORKLOAD, away[0]),
                    WorkloadPeriod(saving, back + 400.0),
                )
            ]
            * 4
        ),
    ]
    return _repeat_slots(some, gpus), away


def _shared_gpus(group: _NodeGroup, gpus: int) -> _NodeSlots:
    """Return two GPUs shared by two users each; most of the others are free."""
    two = [
        group.scene("gpu_shared", first, f"python3 sweep.py --seed {first}")._replace(
            neighbour=(group.user(second), "python3 distill.py --student small")
        )
        for first, second in ((2, 9), (3, 1))
    ]
    healthy = group.scene(
        "healthy_cnn_with_loader", 6, "python3 train_resnet.py --data /data/imagenet --workers 12", job=21
    )
    healthy = _linked(healthy, gpus, 0.2)
    some = [
        _gpu_since(two[0], -64 * _MINUTE),
        _gpu_since(two[1], -1.8 * _HOUR),
        _gpu_since(healthy, -4.4 * _HOUR),
        _gpu_since(healthy, -4.4 * _HOUR),
        *([_gpu_since(IDLE_WORKLOAD, -2.4 * _HOUR, earlier=healthy, pause=0.0)] * 2),
        *([_gpu_since(IDLE_WORKLOAD, _HISTORY_START)] * 2),
    ]
    return _repeat_slots(some, gpus), None


def _mostly_free(group: _NodeGroup, gpus: int) -> _NodeSlots:
    """Return mostly free GPUs after an Xid error ended a job; gpulse harvest uses some idle ones."""
    notebook = group.scene("idle_allocated", 4, "python3 -m ipykernel_launcher -f kernel-77d2.json")
    copies = group.scene("pcie_copies", 3, "python3 embed.py --shard 7", job=31)
    fold = group.scene("healthy_gpt", 9, "python3 -m fold --queue /data/proteins")._replace(
        job="harvest:fold"
    )
    some = [
        _gpu_since(notebook, -4.9 * _HOUR),
        _gpu_since(IDLE_WORKLOAD, -52 * _MINUTE, earlier=copies, pause=0.0, xid=94),
        *([_gpu_since(IDLE_WORKLOAD, _HISTORY_START)] * 3),
        *(_harvested_gpu(fold, copies, -2.9 * _HOUR + 300.0 * place) for place in range(2)),
        (WorkloadPeriod(fold, _HISTORY_START),),
    ]
    return _repeat_slots(some, gpus), None


def _small_kernels(group: _NodeGroup, gpus: int) -> _NodeSlots:
    """Return a job with kernels too small for their launch overhead on every other GPU."""
    launches = group.scene("launch_bound", 2, "python3 rnn_lm.py --hidden 256 --sweep", job=17)
    leak = group.scene("gpu_memory_leak", 8, "python3 finetune.py --log-losses", job=18)
    some = [
        _gpu_since(launches, -1.7 * _HOUR),
        _gpu_since(leak, -23 * _MINUTE, earlier=launches),
    ]
    return _repeat_slots(some, gpus), None


def _harvested_gpu(
    harvest_scene: DemoWorkload, user_scene: DemoWorkload, begin: float
) -> tuple[WorkloadPeriod, ...]:
    """Return a GPU that is harvested except while a user needed it."""
    return (
        WorkloadPeriod(harvest_scene, _HISTORY_START),
        WorkloadPeriod(user_scene, begin),
        WorkloadPeriod(IDLE_WORKLOAD, begin + 50 * _MINUTE),
        WorkloadPeriod(harvest_scene, begin + 51 * _MINUTE),
    )


_ROLES: tuple[Callable[[_NodeGroup, int], _NodeSlots], ...] = (
    _one_problem_per_gpu,
    _large_job,
    _large_job,
    _waiting_for_loader,
    _containers,
    _shared_gpus,
    _mostly_free,
    _small_kernels,
)


def _gpu_since(
    scene: DemoWorkload,
    begin: float,
    *,
    earlier: DemoWorkload | None = None,
    pause: float = 4 * _MINUTE,
    xid: int | None = None,
) -> tuple[WorkloadPeriod, ...]:
    """Return a GPU with this work since `begin`; before that it was free or had earlier work."""
    now = WorkloadPeriod(scene, begin, xid=xid)
    if begin <= _HISTORY_START:
        return (now,)
    if earlier is None:
        return WorkloadPeriod(IDLE_WORKLOAD, _HISTORY_START), now
    if not pause:
        return WorkloadPeriod(earlier, _HISTORY_START), now
    return WorkloadPeriod(earlier, _HISTORY_START), WorkloadPeriod(IDLE_WORKLOAD, begin - pause), now
