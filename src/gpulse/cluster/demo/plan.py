"""Who plays what in the demo's cluster: nodes, their GPUs, whose jobs run there, and what happened before.

All readings are those of the packaged recordings. Names, jobs and times are made up, and so are one node that went away
for a while, one Xid error, and how full the disks are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from gpulse.sources.playing import Scene, Stint
from gpulse.sources.simulated import FREE, SCENES

PAST_SECONDS = 6 * 3600.0
"""How much of the past is planned; large clusters start with less of it."""
LEAVES_SECONDS = 8.0
"""So long after its agents started one of the nodes falls silent."""
RUNNING_SESSION = "pretrain_gpt_7b"
FINISHED_SESSION = "resnet_baseline"

_PEOPLE = (
    *("ada", "grace", "linus", "barbara", "alan", "katherine"),
    *("edsger", "frances", "margaret", "donald", "radia", "ken"),
)
_FIRST_JOB = 4711
_MINUTE = 60.0
_HOUR = 3600.0
_BEGIN = -PAST_SECONDS

Slots = tuple[tuple[Stint, ...], ...]


class NodePlan(NamedTuple):
    """One node: what each of its GPUs plays, and when it is not there."""

    name: str
    number: int
    """Counts from 1."""
    slots: Slots
    away: tuple[float, float] | None = None
    """From when to when it was lost, in seconds after the demo's start."""
    leaves: float | None = None
    """When its agent ends, in seconds after it started."""
    labels: Mapping[str, str] = {}


class ClusterPlan(NamedTuple):
    """All nodes, and those that somebody expects in vain."""

    nodes: tuple[NodePlan, ...]
    missing: tuple[str, ...]

    @property
    def expected(self) -> tuple[str, ...]:
        """The nodes that should be there."""
        return (*(node.name for node in self.nodes), *self.missing)

    @property
    def example_nodes(self) -> tuple[str, ...]:
        """The nodes of the sessions: those of the large job, if there are so many; all when none has a GPU."""
        return tuple(node.name for node in self.nodes[1:3] or self.nodes[:1] if node.slots)


class _Cast(NamedTuple):
    """Who is around on a group of eight nodes: every group has other people and other jobs."""

    group: int

    def user(self, number: int) -> str:
        return _PEOPLE[(number + 5 * self.group) % len(_PEOPLE)]

    def job(self, number: int) -> str:
        return f"slurm:{_FIRST_JOB + number + 40 * self.group}"

    def scene(
        self, recording: str, user: int, command: str, *, job: int | None = None, container: int | None = None
    ) -> Scene:
        """A recording as the work of somebody here."""
        return Scene(
            recording,
            _BEGINNINGS[recording],
            self.user(user),
            command,
            job=None if job is None else self.job(job),
            container=None if container is None else f"{0xC0FFEE00 + 256 * self.group + container:012x}",
            pod=None if container is None else f"de300000-0000-4000-8000-{256 * self.group + container:012x}",
        )


_BEGINNINGS = {
    **{scene.recording: scene.begin for scene in SCENES},
    "gpu_shared": 8.0,
    "healthy_cnn_with_loader": 15.0,
    "sparse_serving": 8.5,
    "checkpoint_stall": 8.5,
}
"""Where each recording begins to be worth watching, in seconds after its start."""


def cluster_plan(nodes: int, gpus: int) -> ClusterPlan:
    """The cluster of this size: always the same one.

    Args:
        nodes: How many nodes there are. The last one of several is lost soon; one more is expected and never comes.
        gpus: How many GPUs each of them has.
    """
    digits = max(2, len(str(nodes + 1)))
    planned = []
    for place in range(nodes):
        role = _ROLES[place % len(_ROLES)]
        number = place + 1
        slots, away = role(_Cast(place // len(_ROLES)), gpus)
        planned.append(
            NodePlan(
                name=f"gpu-{number:0{digits}d}",
                number=number,
                slots=tuple(
                    tuple(stint._replace(phase=1.3 * slot + 0.7 * number) for stint in stints)
                    for slot, stints in enumerate(slots)
                ),
                away=away,
                leaves=LEAVES_SECONDS if 1 < number == nodes else None,
                labels={"rack": f"r{place // len(_ROLES) + 1}", "demo": "yes"},
            )
        )
    return ClusterPlan(tuple(planned), (f"gpu-{nodes + 1:0{digits}d}",))


def _repeated(some: Sequence[tuple[Stint, ...]], gpus: int) -> Slots:
    return tuple(some[slot % len(some)] for slot in range(gpus))


_Played = tuple[Slots, tuple[float, float] | None]


def _every_trouble(cast: _Cast, gpus: int) -> _Played:
    """Another trouble on every GPU, and one that is free."""
    train = cast.scene("healthy_gpt", 0, "python3 train_gpt.py --config gpt-1b.yaml")
    workers = cast.scene("loader_too_few_workers", 1, "python3 train.py --data /data/imagenet --workers 2")
    launches = cast.scene("launch_bound", 2, "python3 rnn_lm.py --hidden 256")
    shards = cast.scene("disk_read", 1, "python3 pretrain.py --shards /data/laion --workers 8")
    copies = cast.scene("pcie_copies", 3, "python3 embed.py --shard 3")
    leak = cast.scene("gpu_memory_leak", 4, "python3 finetune.py --log-losses")
    notebook = cast.scene("idle_allocated", 5, "python3 -m ipykernel_launcher -f kernel-4f1c.json")
    some = [
        _after(train, -2.2 * _HOUR),
        _after(workers, -1.4 * _HOUR, earlier=train),
        _after(launches, -47 * _MINUTE, earlier=shards),
        _after(shards, -3.1 * _HOUR),
        _after(copies, -36 * _MINUTE),
        _after(leak, -94 * _MINUTE, earlier=leak, pause=_MINUTE),
        _after(notebook, -5.3 * _HOUR),
        _after(FREE, -1.1 * _HOUR, earlier=train, pause=0.0),
    ]
    return _repeated(some, gpus), None


def _large_job(cast: _Cast, gpus: int) -> _Played:
    """One training over all GPUs, and over those of the next node."""
    now = cast.scene("healthy_gpt", 0, "python3 train_gpt.py --config gpt-7b.yaml", job=0)
    before = cast.scene("healthy_gpt", 6, "python3 train_gpt.py --config gpt-1b.yaml --lr 3e-4", job=-23)
    return _repeated([_after(now, -3.7 * _HOUR + 40.0, earlier=before, pause=12 * _MINUTE)], gpus), None


def _starved(cast: _Cast, gpus: int) -> _Played:
    """A job that waits for its loader, notebooks that hold GPUs and do nothing, free GPUs."""
    starved = cast.scene(
        "loader_too_few_workers", 7, "python3 train_vit.py --data /data/imagenet --workers 2", job=9
    )
    notebooks = [
        cast.scene("idle_allocated", user, f"python3 -m ipykernel_launcher -f kernel-{user:x}a07.json")
        for user in (8, 5)
    ]
    before = cast.scene("disk_read", 9, "python3 tokenize_shards.py --out /data/tokens", job=4)
    some = [
        *([_after(starved, -2.6 * _HOUR, earlier=before)] * 4),
        *(_after(notebook, -5.1 * _HOUR) for notebook in notebooks),
        _after(FREE, -3.3 * _HOUR, earlier=before, pause=0.0),
        _after(FREE, _BEGIN),
    ]
    return _repeated(some, gpus), None


def _containers(cast: _Cast, gpus: int) -> _Played:
    """Services in containers, and a training that waits for its checkpoints; the node was away for a while."""
    away = (-2.1 * _HOUR, -1.9 * _HOUR)
    back = away[1] + 90.0
    saving = cast.scene("checkpoint_stall", 10, "python3 train_diffusion.py --save-every 4s", job=14)
    earlier = cast.scene("healthy_gpt", 10, "python3 train_diffusion.py --config xl.yaml", job=2)
    serving = [
        cast.scene("sparse_serving", 11, f"python3 -m serve --model chat-{size}b", container=place)
        for place, size in enumerate((8, 8, 70, 70))
    ]
    some = [
        *(
            (Stint(scene, _BEGIN), Stint(FREE, away[0]), Stint(scene, back + 20.0 * place))
            for place, scene in enumerate(serving)
        ),
        *([(Stint(earlier, _BEGIN), Stint(FREE, away[0]), Stint(saving, back + 400.0))] * 4),
    ]
    return _repeated(some, gpus), away


def _shared(cast: _Cast, gpus: int) -> _Played:
    """Two people on one GPU, twice; most of the others are free."""
    two = [
        cast.scene("gpu_shared", first, f"python3 sweep.py --seed {first}")._replace(
            neighbour=(cast.user(second), "python3 distill.py --student small")
        )
        for first, second in ((2, 9), (3, 1))
    ]
    healthy = cast.scene(
        "healthy_cnn_with_loader", 6, "python3 train_resnet.py --data /data/imagenet --workers 12", job=21
    )
    some = [
        _after(two[0], -64 * _MINUTE),
        _after(two[1], -1.8 * _HOUR),
        _after(healthy, -4.4 * _HOUR),
        _after(healthy, -4.4 * _HOUR),
        *([_after(FREE, -2.4 * _HOUR, earlier=healthy, pause=0.0)] * 2),
        *([_after(FREE, _BEGIN)] * 2),
    ]
    return _repeated(some, gpus), None


def _mostly_free(cast: _Cast, gpus: int) -> _Played:
    """Hardly anybody is here, since an Xid error ended somebody's job; a harvest makes use of some that are idle."""
    notebook = cast.scene("idle_allocated", 4, "python3 -m ipykernel_launcher -f kernel-77d2.json")
    copies = cast.scene("pcie_copies", 3, "python3 embed.py --shard 7", job=31)
    fold = cast.scene("healthy_gpt", 9, "python3 -m fold --queue /data/proteins")._replace(job="harvest:fold")
    some = [
        _after(notebook, -4.9 * _HOUR),
        _after(FREE, -52 * _MINUTE, earlier=copies, pause=0.0, xid=94),
        *([_after(FREE, _BEGIN)] * 3),
        *(_given_back(fold, copies, -2.9 * _HOUR + 300.0 * place) for place in range(2)),
        (Stint(fold, _BEGIN),),
    ]
    return _repeated(some, gpus), None


def _small_kernels(cast: _Cast, gpus: int) -> _Played:
    """A job whose kernels are too small for their launch, on every other GPU."""
    launches = cast.scene("launch_bound", 2, "python3 rnn_lm.py --hidden 256 --sweep", job=17)
    leak = cast.scene("gpu_memory_leak", 8, "python3 finetune.py --log-losses", job=18)
    some = [
        _after(launches, -1.7 * _HOUR),
        _after(leak, -41 * _MINUTE, earlier=launches),
    ]
    return _repeated(some, gpus), None


def _given_back(harvested: Scene, somebody: Scene, begin: float) -> tuple[Stint, ...]:
    """A GPU that is harvested but for the time in which somebody needed it."""
    return (
        Stint(harvested, _BEGIN),
        Stint(somebody, begin),
        Stint(FREE, begin + 50 * _MINUTE),
        Stint(harvested, begin + 51 * _MINUTE),
    )


_ROLES: tuple[Callable[[_Cast, int], _Played], ...] = (
    _every_trouble,
    _large_job,
    _large_job,
    _starved,
    _containers,
    _shared,
    _mostly_free,
    _small_kernels,
)


def _after(
    scene: Scene,
    begin: float,
    *,
    earlier: Scene | None = None,
    pause: float = 4 * _MINUTE,
    xid: int | None = None,
) -> tuple[Stint, ...]:
    """A GPU that plays this since then; before it was free, or somebody else's until a moment before."""
    now = Stint(scene, begin, xid=xid)
    if begin <= _BEGIN:
        return (now,)
    if earlier is None:
        return Stint(FREE, _BEGIN), now
    if not pause:
        return Stint(earlier, _BEGIN), now
    return Stint(earlier, _BEGIN), Stint(FREE, begin - pause), now
