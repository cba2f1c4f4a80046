"""Who holds which GPUs in frames, and whether these are used."""

from __future__ import annotations

from gpulse.cluster.notify.idle_holdings import Holder, Holding, HoldingsView, NodeSample
from gpulse.model.frame import Frame, GpuReading
from gpulse.model.job import Job
from gpulse.model.metric_catalog import Values
from gpulse.model.process import GpuProcess, Owner, ProcessReading
from tests.unit.frames import frame, gpu, process

IDLE: Values = {"gpu_utilization_ratio": 0.0}


def on(*pids: int, kind: str = "compute") -> tuple[GpuProcess, ...]:
    """Processes on a GPU."""
    return tuple(GpuProcess(pid, kind) for pid in pids)


def owned(pid: int, job: str | None = None, user: str | None = "ada", parent: int = 1) -> ProcessReading:
    """A process of a user or job."""
    made = process(pid, parent=parent)
    return made._replace(identity=made.identity._replace(owner=Owner(user, 1000, job)))


def view(*nodes: Frame | NodeSample) -> HoldingsView:
    """The holdings on nodes."""
    return HoldingsView(
        0.01, [one if isinstance(one, NodeSample) else NodeSample(one.node.name, one) for one in nodes]
    )


def only(found: HoldingsView) -> Holding:
    """The one holding."""
    (holding,) = found.holdings.values()
    return holding


def idle(index: int, *pids: int, values: Values | None = None) -> GpuReading:
    """An unused GPU with processes on it."""
    return gpu(index, {**IDLE, **(values or {})}, on(*pids))


def test_use() -> None:
    """A GPU is used by whichever reading is highest, and unknown without any."""

    def use(values: Values, *, without: bool = False) -> str:
        reading = idle(0, 7, values=values)
        if without:
            reading = reading._replace(values={})
        return only(view(frame(reading, processes=(owned(7),)))).use

    assert use({}) == "unused"
    assert use({"gpu_utilization_ratio": 0.01}) == "unused"
    assert use({"gpu_utilization_ratio": 0.02}) == "used"
    assert use({"sm_active_ratio": 0.3}) == "used"
    assert use({}, without=True) == "unknown"


def test_job() -> None:
    """A job holds the GPUs that it was given, also without a process there; one that is used is enough."""

    job = Job("slurm:1", "ada", gpus=("GPU-0000", "GPU-0001"))
    gpus = (idle(0, 7), idle(1), idle(2))
    held = only(view(frame(*gpus, processes=(owned(7, "slurm:1"),), jobs=(job,))))

    assert (held.holder, held.user, held.use) == (Holder("slurm:1"), "ada", "unused")
    assert [label for label, _ in held.places[0].gpus] == ["0", "1"]
    busy = (idle(0, 7), idle(1, values={"gpu_utilization_ratio": 0.9}))
    assert only(view(frame(*busy, processes=(owned(7, "slurm:1"),), jobs=(job,)))).use == "used"
    gone = job._replace(gpus=("GPU-0000", "GPU-0009"))
    assert only(view(frame(*gpus, processes=(owned(7, "slurm:1"),), jobs=(gone,)))).use == "unknown"


def test_job_on_several_nodes() -> None:
    """It is idle only if it is idle on all of them, and unknown while one of them is silent."""

    here = frame(idle(0, 7), processes=(owned(7, "slurm:1"),))
    there = here._replace(node=here.node._replace(name="node2"))
    busy = there._replace(gpus=(gpu(0, {"gpu_utilization_ratio": 0.5}, on(7)),))

    assert only(view(here, there)).nodes == ["node1", "node2"]
    assert only(view(here, there)).use == "unused"
    assert only(view(here, busy)).use == "used"
    assert only(view(here, NodeSample("node2", None, frozenset({"slurm:1"})))).use == "unknown"
    assert only(view(here, NodeSample("node2", None, frozenset({"slurm:2"})))).use == "unused"


def test_disputed_job() -> None:
    """A job that processes of two users claim has no known user; processes of root do not count."""

    def user(*processes: ProcessReading) -> str | None:
        return only(view(frame(idle(0, 7, 8), processes=processes))).user

    assert user(owned(7, "slurm:1"), owned(8, "slurm:1", "eve")) is None
    assert user(owned(7, "slurm:1"), owned(8, "slurm:1", "root")) == "ada"
    assert user(owned(7, "slurm:1", "root"), owned(8, "slurm:1", "root")) == "root"


def test_users_without_a_job() -> None:
    """GPUs of processes that belong together are held together; others are separate, so that no work is ended."""

    gpus = (idle(0, 7), idle(1, 7, 8), idle(2, 9), idle(3, 10))
    processes = (owned(7), owned(8), owned(9, parent=500), owned(10, parent=500))
    found = view(frame(*gpus, processes=processes)).holdings

    assert [holder.gpus for holder in found] == [("GPU-0000", "GPU-0001"), ("GPU-0002", "GPU-0003")]
    assert {holder.user for holder in found} == {"ada"}


def test_not_holders() -> None:
    """A display server, a harvest, memory without a process, and processes of unknown users are nobody's holding."""

    gpus = (gpu(0, IDLE, on(7, kind="graphics")), idle(1, 8), idle(2), idle(3, 9))
    processes = (owned(7), owned(8, "harvest:fold"), owned(9, user=None))

    assert view(frame(*gpus, processes=processes)).holdings == {}


def test_split_gpu() -> None:
    """Of a GPU with MIG instances, the instances are held."""

    parent, part = gpu(0, IDLE, on(7)), gpu(0, IDLE, on(7), mig=1)
    held = only(view(frame(parent, part, processes=(owned(7),))))

    assert [label for label, _ in held.places[0].gpus] == ["0:1"]


def test_released() -> None:
    """A holder has left only if its GPUs are seen, with the owners of all their processes."""

    held = only(view(frame(idle(0, 7), processes=(owned(7),))))

    assert view(frame(idle(0))).is_released(held.places)
    assert view(frame(idle(0, 8), processes=(owned(8, user="eve"),))).is_released(held.places)
    assert not view(frame(idle(0, 8))).is_released(held.places)
    assert not view(frame(gpu(0, IDLE, None))).is_released(held.places)
    assert not view(frame(idle(1))).is_released(held.places)
    assert not view(NodeSample("node1", None)).is_released(held.places)
