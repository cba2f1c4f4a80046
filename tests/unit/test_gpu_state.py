"""States of GPUs, and the choice among free ones."""

from __future__ import annotations

import pytest

from gpulse.model.device import Device, Node
from gpulse.model.finding import Finding
from gpulse.model.frame import Frame, GpuReading
from gpulse.model.gpu_state import (
    FreeGpuTracker,
    GpuCandidate,
    GpuRequest,
    GpuState,
    HolderSummary,
    assess_gpus,
    choose_gpus,
    count_possible,
    describe_wait,
)
from gpulse.model.process import GpuProcess, Owner, ProcessIdentity, ProcessReading

GIB = 1 << 30
ADA = ProcessReading(ProcessIdentity(7, owner=Owner(user="ada")), "S", {}, on_gpu=True)
FOLD = ProcessReading(ProcessIdentity(8, owner=Owner(user="eve", job="harvest:fold")), "S", {}, on_gpu=True)
FAULT = Finding("gpu_fault", "fault", "critical", 1.0, "it is broken", 0, "0")


def gpu(*pids: int, listed: bool = True, mig: int | None = None, **values: float) -> GpuReading:
    """GPU 0, or an instance of it, with these processes and readings."""
    device = Device(
        0,
        "GPU-0" if mig is None else f"MIG-{mig}",
        "H200",
        mig_index=mig,
        parent_uuid=None if mig is None else "GPU-0",
    )
    processes = tuple(GpuProcess(pid, "compute", GIB) for pid in pids) if listed else None
    return GpuReading(device, dict(values), processes)


def states(
    *gpus: GpuReading, findings: tuple[Finding, ...] = (), active: tuple[str, ...] = ()
) -> list[GpuState]:
    """Their states."""
    frame = Frame(100.0, 100.0, Node("n1"), gpus, processes=(ADA, FOLD))
    return [use.state for use in assess_gpus(frame, {}, findings, active)]


@pytest.mark.parametrize(
    ("state", "reading"),
    [
        ("free", gpu(gpu_utilization_ratio=0.0, memory_used_bytes=GIB / 2)),
        ("free", gpu()),
        ("busy", gpu(7, gpu_utilization_ratio=0.5)),
        ("busy", gpu(gpu_utilization_ratio=0.5)),
        ("busy", gpu(7)),
        ("idle", gpu(7, gpu_utilization_ratio=0.0)),
        ("idle", gpu(gpu_utilization_ratio=0.0, memory_used_bytes=2 * GIB)),
        ("free", gpu(gpu_utilization_ratio=0.0, memory_used_bytes=2 * GIB, memory_total_bytes=140 * GIB)),
        ("harvested", gpu(8, gpu_utilization_ratio=0.9)),
        ("harvested", gpu(gpu_utilization_ratio=0.9, harvest_state=2)),
        ("busy", gpu(7, 8, gpu_utilization_ratio=0.9, harvest_state=2)),
        ("unknown", gpu(listed=False)),
    ],
)
def test_states_by_readings_and_processes(state: GpuState, reading: GpuReading) -> None:
    """Unknown activity of a held GPU counts as busy; memory in use counts as held, even without a visible process."""
    assert [state] == states(reading)


def test_a_held_gpu_stays_busy_for_a_while() -> None:
    """A pause between two batches is not idleness."""
    assert ["busy"] == states(gpu(7, gpu_utilization_ratio=0.0), active=("GPU-0",))


def test_a_fault_matters_only_where_nobody_is() -> None:
    """Nobody should take that GPU; who is on it already is shown as before."""
    assert ["faulty"] == states(gpu(gpu_utilization_ratio=0.0), findings=(FAULT,))
    assert ["busy"] == states(gpu(7, gpu_utilization_ratio=0.9), findings=(FAULT,))
    assert ["faulty", "faulty"] == states(gpu(), gpu(mig=0), gpu(mig=1), findings=(FAULT,))


def test_instances_are_counted_in_place_of_their_gpu() -> None:
    """Only units that can be allocated have a state."""
    assert ["busy", "free"] == states(gpu(7), gpu(7, mig=0), gpu(mig=1))


def candidate(
    node: str = "n1",
    index: int = 0,
    state: GpuState = "free",
    problem: str | None = None,
    gigabytes: float = 140.0,
) -> GpuCandidate:
    """A GPU."""
    holders = (HolderSummary("ada", "slurm:1", "python3", 0.0),) if state in ("busy", "idle") else ()
    return GpuCandidate(
        node,
        str(index),
        f"{node}-{index}",
        "H200",
        state,
        holders,
        problem,
        is_excluded=problem == "MIG",
        memory_bytes=gigabytes * 1e9,
        memory_total_bytes=140e9,
    )


def test_a_pause_between_two_programs_is_not_taken_for_free() -> None:
    """The time counts again from the start."""
    tracker = FreeGpuTracker(GpuRequest(1, free_seconds=3.0))
    looks = [(0.0, "free"), (2.0, "free"), (2.5, "busy"), (3.5, "free"), (6.0, "free"), (6.5, "free")]
    ready = [bool(tracker.update([candidate(state=state)], at)) for at, state in looks]  # type: ignore[arg-type]

    assert [False, False, False, False, False, True] == ready


@pytest.mark.parametrize(
    "other",
    [
        candidate(state="unknown"),
        candidate(state="faulty"),
        candidate(problem="MIG"),
        candidate(gigabytes=30),
    ],
)
def test_only_free_gpus_with_enough_memory_are_ready(other: GpuCandidate) -> None:
    """Unknown is never free."""
    assert [] == FreeGpuTracker(GpuRequest(1, memory_bytes=int(40e9))).update([other], 0.0)


@pytest.mark.parametrize(
    ("chosen", "ready", "request_"),
    [
        (["n1-0", "n1-2"], [candidate(index=2), candidate(index=0), candidate(index=3)], GpuRequest(2)),
        (["n1-1"], [candidate(index=0, state="harvested"), candidate(index=1)], GpuRequest(1)),
        ([], [candidate("n1"), candidate("n2")], GpuRequest(2)),
        (["n1-0", "n2-0"], [candidate("n2"), candidate("n1")], GpuRequest(2, spread=True)),
        (["n2-0"], [candidate("n1", 0), candidate("n1", 1), candidate("n2", 0)], GpuRequest(1)),
    ],
    ids=["lowest", "harvested last", "one node", "spread", "fewest left over"],
)
def test_which_gpus_are_chosen(chosen: list[str], ready: list[GpuCandidate], request_: GpuRequest) -> None:
    """All on one node, unless told otherwise."""
    assert chosen == [one.uuid for one in choose_gpus(ready, request_)]


def test_what_can_never_be_had_is_not_counted() -> None:
    """GPUs that are only in use count."""
    gpus = [candidate(index=0, problem="MIG"), candidate(index=1, state="busy"), candidate("n2")]

    assert [1, 2, 0] == [
        count_possible(gpus, request)
        for request in (GpuRequest(1), GpuRequest(1, spread=True), GpuRequest(1, memory_bytes=int(200e9)))
    ]


def test_the_line_says_who_holds_the_gpus() -> None:
    """GPUs with the same holder together."""
    gpus = [
        candidate(index=0, state="busy"),
        candidate(index=1, state="busy"),
        candidate(index=2),
        candidate(index=3, problem="MIG"),
    ]
    request = GpuRequest(2)

    line = describe_wait(gpus, FreeGpuTracker(request), request, 200_000.0)
    assert line.startswith("waiting for 2 GPUs, 1 free now; GPUs 0,1: ada slurm:1 since 0")
    assert line.endswith(", busy; GPU 3: MIG")
