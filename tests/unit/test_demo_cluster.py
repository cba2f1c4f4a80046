"""The demo's cluster: who plays what, and the past that is written for it."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from gpulse.cluster.demo.demo_history import (
    MAX_FRAMES,
    frame_ages,
    history_seconds,
    make_machine,
    write_history,
)
from gpulse.cluster.demo.scenario import HISTORY_SECONDS, build_cluster
from gpulse.model.frame import Frame
from gpulse.store.local import LocalStore
from tests.queries import query
from tests.unit.test_demo_machine import counters

STARTED = 1_800_000_000.0


def frames_at(seconds: float) -> dict[str, Frame]:
    """Every node of the usual cluster, so long after the start."""
    return {
        node.name: make_machine(node, STARTED).sample(STARTED + seconds) for node in build_cluster(8, 8).nodes
    }


def test_the_plan_is_always_the_same() -> None:
    """What is shown depends on the size of the cluster and the time alone."""

    assert build_cluster(8, 8) == build_cluster(8, 8)
    assert frames_at(12.5) == frames_at(12.5)


def test_every_kind_of_use_is_there() -> None:
    """Jobs over two nodes, containers, shared GPUs, GPUs that are held and free; nobody is everywhere."""

    frames = frames_at(5.0)
    owners = {name: {process.identity.owner for process in frame.processes} for name, frame in frames.items()}
    jobs = Counter(owner.job for found in owners.values() for owner in found if owner.job)
    sharers = [len(gpu.processes or ()) for frame in frames.values() for gpu in frame.gpus]
    users = {owner.user for found in owners.values() for owner in found}

    assert 2 == jobs["slurm:4711"]
    assert any(owner.container and owner.pod for owner in owners["gpu-05"])
    assert {0, 1, 2} == set(sharers)
    assert 8 < sharers.count(0) < 24
    assert len(users) >= 10
    assert len({gpu.device.uuid for frame in frames.values() for gpu in frame.gpus}) == 64


def test_idle_gpus_are_harvested() -> None:
    """One has been all along, others were given back once for a while; the rest of the cluster knows nothing of it."""

    def told(seconds: float) -> list[tuple[float | None, ...]]:
        names = ("harvest_state", "harvested_seconds_total", "harvest_preemptions_total")
        return [tuple(gpu.get(name) for name in names) for gpu in frames_at(seconds)["gpu-07"].gpus]

    jobs = {process.identity.owner.job for process in frames_at(5.0)["gpu-07"].processes}

    assert "harvest:fold" in jobs
    assert [(None, None, None)] * 5 == told(5.0)[:5]
    assert [(2, HISTORY_SECONDS + 5.0 - 51 * 60, 1)] * 2 == told(5.0)[5:7]
    assert (2, HISTORY_SECONDS + 5.0, 0) == told(5.0)[7]
    assert [0, 2] == [told(-2.8 * 3600)[place][0] for place in (5, 7)]


def test_two_people_share_a_gpu() -> None:
    """Both processes are on it, each of its own user, neither the other's child."""

    frame = frames_at(5.0)["gpu-06"]
    first, second = (
        next(process.identity for process in frame.processes if process.pid == held.pid)
        for held in frame.gpus[0].processes or ()
    )

    assert {first.owner.user, second.owner.user} == {"linus", "donald"}
    assert second.pid != first.parent_pid
    assert first.pid != second.parent_pid


@pytest.mark.parametrize("place", range(8))
def test_counters_go_on_from_one_job_to_the_next(place: int) -> None:
    """From the first hour to a minute after the start no counter of a node runs backwards."""

    node = build_cluster(8, 8).nodes[place]
    machine = make_machine(node, STARTED)
    known: dict[tuple[object, ...], float] = {}
    backwards = set()
    for ago in range(round(HISTORY_SECONDS), -61, -173):
        now = counters(machine.sample(STARTED - ago))
        backwards |= {key for key, value in now.items() if value < known.get(key, value)}
        known.update(now)

    assert set() == backwards


def test_an_xid_error_stays() -> None:
    """One GPU reports it, since the moment at which a job ended."""

    before, now = frames_at(-3600.0)["gpu-07"], frames_at(1.0)["gpu-07"]
    codes = [gpu.get("xid_last_code") for gpu in now.gpus]

    assert [None] * 8 == [gpu.get("xid_last_code") for gpu in before.gpus]
    assert [None, 94, *[None] * 6] == codes
    assert STARTED - 3120 == now.gpus[1].get("xid_last_timestamp_seconds")


def test_a_scheduler_gave_jobs_their_gpus() -> None:
    """Those that their processes use, on each node; a harvest's programs were given none."""
    frames = frames_at(5.0)
    assert [("slurm:4711", 8), ("slurm:4711", 8)] == [
        (job.id, len(job.gpus)) for name in ("gpu-02", "gpu-03") for job in frames[name].jobs
    ]
    for frame in frames.values():
        own = {
            (process.identity.owner.job, gpu.device.uuid)
            for gpu in frame.gpus
            for held in gpu.processes or ()
            for process in frame.processes
            if process.pid == held.pid and (process.identity.owner.job or "").startswith("slurm:")
        }
        assert own == {(job.id, uuid) for job in frame.jobs for uuid in job.gpus}


def test_jobs_began_when_they_say() -> None:
    """A process is as old as its job, hours before the demo's start."""

    frame = frames_at(0.0)["gpu-02"]
    ages = [STARTED - (process.identity.start_time or 0.0) for process in frame.processes if process.on_gpu]

    assert all(3.6 * 3600 < age < 3.8 * 3600 for age in ages)


def test_sizes() -> None:
    """One node, many nodes, machines without GPUs, and with twice as many: names differ, the last one leaves."""

    small, large = build_cluster(1, 0), build_cluster(200, 16)
    names = {node.name for node in large.nodes}

    assert [None] == [node.leaves for node in small.nodes]
    assert ("gpu-02",) == small.missing
    assert () == small.example_nodes
    assert ("gpu-002", "gpu-003") == large.example_nodes
    assert () == make_machine(small.nodes[0], STARTED).sample(STARTED).gpus
    assert 200 == len(names)
    assert not names & set(large.missing)
    assert ["gpu-200"] == [node.name for node in large.nodes if node.leaves is not None]
    assert 16 == len(make_machine(large.nodes[7], STARTED).sample(STARTED).gpus)
    assert large.nodes[1].slots[0][-1].scene.user != large.nodes[9].slots[0][-1].scene.user


def test_a_large_cluster_has_a_shorter_past() -> None:
    """The work of writing it is bounded; few nodes have six hours, all have more than twenty minutes."""

    assert HISTORY_SECONDS == history_seconds(8)
    assert 1200 < history_seconds(200) < HISTORY_SECONDS
    assert all(nodes * len(frame_ages(nodes)) <= MAX_FRAMES for nodes in range(1, 201))
    assert all(sorted(frame_ages(nodes), reverse=True) == frame_ages(nodes) for nodes in (1, 9, 50, 200))


@pytest.fixture(scope="module")
def past(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The past of five nodes with two GPUs each."""
    directory = tmp_path_factory.mktemp("past")
    _told.clear()  # a worker that took tests of another file in between makes it anew
    write_history(
        str(directory),
        build_cluster(5, 2),
        STARTED,
        clock=lambda: STARTED + 2.0,
        progress=_told.append,
    )
    return directory


_told: list[float] = []


def test_a_head_finds_the_past(past: Path) -> None:
    """Nodes, GPUs, processes that ended and processes that live, events, a session, all of the time."""

    with LocalStore(str(past)) as archive:
        nodes = {node.name: number for number, node in archive.nodes().items()}
        processes = archive.processes(query(start=STARTED - HISTORY_SECONDS - 1, end=STARTED))
        events = archive.events(query(start=STARTED - HISTORY_SECONDS - 1, end=STARTED + 3))
        series = archive.series(
            query(
                "gpu",
                "gpu_utilization_ratio",
                start=STARTED - HISTORY_SECONDS,
                end=STARTED,
                step=60.0,
                nodes={nodes["gpu-01"], nodes["gpu-05"]},
            )
        )
        points = {one.key: len(one.times) for one in series}
        (session,) = archive.sessions()
        gpus = archive.gpus()

    assert ["gpu-01", "gpu-02", "gpu-03", "gpu-04", "gpu-05"] == sorted(nodes)
    assert 10 == len(gpus)
    assert {True, False} == {process.ended is None for process in processes}
    assert {"head_started", "agent_started", "findings", "node_late", "node_lost", "node_back"} <= {
        event.kind for event in events
    }
    assert {360} == {count for key, count in points.items() if key.node == nodes["gpu-01"]}
    assert {348} == {count for key, count in points.items() if key.node == nodes["gpu-05"]}
    assert "finished" == session.state
    assert sorted(_told) == _told
    assert 1.0 == pytest.approx(_told[-1])


def test_the_findings_of_the_past_are_judged(past: Path) -> None:
    """What is wrong now is known before the first frame comes, and none of it on healthy GPUs."""

    with LocalStore(str(past)) as archive:
        latest = archive.latest("findings")
        names = {number: node.name for number, node in archive.nodes().items()}

    def found(detail: dict[str, Any]) -> set[str]:
        return {finding["id"] for finding in json.loads(json.dumps(detail["findings"]))}

    by_name = {names[node]: found(detail) for node, (_, detail) in latest.items()}

    assert {"input_too_few_workers"} <= by_name["gpu-01"]
    assert {"input_too_few_workers"} <= by_name["gpu-04"]
    assert set() == by_name["gpu-02"]


@pytest.mark.parametrize("seconds", [7, 19])
def test_one_finding_of_a_gpu_begins_with_its_job(tmp_path: Path, seconds: int) -> None:
    """What the diagnosis suspects beside it may be over a moment later, and was not there for all of the job's hours."""
    plan = build_cluster(8, 8)
    plan = plan._replace(nodes=tuple(node for node in plan.nodes if node.name in {"gpu-04", "gpu-05"}))
    now = STARTED + seconds
    write_history(str(tmp_path), plan, STARTED, clock=lambda: now, progress=lambda _: None)
    with LocalStore(str(tmp_path)) as archive:
        events = archive.events(query(start=now - HISTORY_SECONDS - 1, end=now + 3))
        nodes = {number: node.name for number, node in archive.nodes().items()}
    old: dict[tuple[str | None, str], set[str]] = {}
    for event in events:
        for finding in event.detail["findings"] if event.kind == "findings" else ():
            if now - finding["start"] > 60.0:
                old.setdefault((nodes.get(event.node or 0), finding["label"]), set()).add(finding["id"])

    assert {1} == {len(ids) for ids in old.values()}
    assert {"input_too_few_workers"} == set.union(*(old["gpu-04", label] for label in "0123"))
    assert {"checkpoint_stall"} == set.union(*(old["gpu-05", label] for label in "4567"))


def test_a_glance_is_a_part_of_the_whole() -> None:
    """GPUs and host are the same; nothing else is there, not even an empty list of processes."""

    machine = make_machine(build_cluster(8, 8).nodes[4], STARTED)
    whole, part = machine.sample(STARTED - 777), machine.glance(STARTED - 777)

    assert part.host == whole.host
    assert [gpu.values for gpu in part.gpus] == [gpu.values for gpu in whole.gpus]
    assert {None} == {gpu.processes for gpu in part.gpus}
    assert () == part.processes


@pytest.mark.parametrize("over", [10.0, 60.0])
def test_over_some_time_gpus_tell_what_they_did_on_the_mean(over: float) -> None:
    """Between the least and the largest of its moments, a started percent for a whole one; counters are not touched."""

    machine = make_machine(build_cluster(8, 8).nodes[0], STARTED)
    now = STARTED - 400.0
    seen = [machine.glance(now - tenth / 10).gpus for tenth in range(round(over * 10))]
    for slot, gpu in enumerate(machine.glance(now, over=over).gpus):
        moments = [gpus[slot].values for gpus in seen]
        for name, slack in (("gpu_utilization_ratio", 0.01), ("sm_active_ratio", 0.0), ("power_watts", 0.0)):
            values = [moment[name] for moment in moments]
            mean = sum(values) / len(values)
            assert min(values) <= gpu.values[name] <= max(values) + slack
            assert gpu.values[name] == pytest.approx(mean, rel=0.25, abs=0.012)
        assert gpu.values["energy_joules_total"] == moments[0]["energy_joules_total"]


def test_who_waits_for_input_is_not_idle(past: Path) -> None:
    """Only GPUs that do next to nothing are held idle: a loader that is too slow is another trouble."""

    with LocalStore(str(past)) as archive:
        nodes = {node.name: number for number, node in archive.nodes().items()}
        shares = [
            share
            for share in archive.gpu_time(query(start=STARTED - HISTORY_SECONDS, end=STARTED))
            if share.pid is not None
        ]

    def idle(name: str) -> float:
        own = [share for share in shares if share.node == nodes[name]]
        return sum(share.idle_seconds for share in own) / sum(share.seconds for share in own)

    assert idle("gpu-04") < 0.05
    assert idle("gpu-05") > 0.9
