"""What the demo shows does not contradict itself: seen as an operator would look at it, over its past and live."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import pytest

from gpulse.cluster.demo.demo_history import build_totals, find_period, make_machine
from gpulse.cluster.demo.scenario import HISTORY_SECONDS, DemoNode, build_cluster
from gpulse.cluster.head.fleet import Fleet
from gpulse.cluster.head.fleet_monitor import GpuStates
from gpulse.cluster.head.gpu_columns import GpuColumns
from gpulse.diagnosis.live_diagnosis import LiveDiagnosis
from gpulse.model.counter_rates import Rates, compute_rates
from gpulse.model.frame import Frame, GpuReading
from gpulse.model.frame_packing import FramePacker
from gpulse.model.gpu_state import GPU_STATES
from gpulse.model.packed_columns import ColumnLayout, layout_id
from gpulse.store.store import StoredNode

STARTED = 1_800_000_000.0
PLAN = build_cluster(8, 8)
OVER_SECONDS = 40.0
TIMES = [*range(-round(HISTORY_SECONDS) + 120, -240, 677), -140, -60, 60, 300, 900]
GB = 1e9


class Look(NamedTuple):
    """A node over some seconds in which none of its workloads changed."""

    node: DemoNode
    time: float
    frame: Frame
    rates: Rates

    @property
    def recordings(self) -> list[str]:
        """What its GPUs play."""
        return [find_period(self.node, slot, self.time).scene.recording for slot in range(8)]


def is_steady(node: DemoNode, time: float) -> bool:
    """Whether a node is there, and no workload began or was restarted in the seconds before."""
    if node.away is not None and node.away[0] - 1 <= time - OVER_SECONDS and time <= node.away[1] + 1:
        return False
    for slot in range(8):
        now, before = find_period(node, slot, time), find_period(node, slot, time - OVER_SECONDS)
        runs = [now.scene.restarts(moment - now.begin) for moment in (time, time - OVER_SECONDS)]
        if now != before or runs[0] != runs[1]:
            return False
    return True


@pytest.fixture(scope="module")
def looks() -> list[Look]:
    """All nodes, from six hours before the start to a quarter of an hour after it."""
    return list(look_at_all())


def look_at_all() -> Iterator[Look]:
    """Look at every node at all times."""
    for node in PLAN.nodes:
        machine = make_machine(node, STARTED)
        for time in TIMES:
            if is_steady(node, time):
                before = machine.sample(STARTED + time - OVER_SECONDS)
                frame = machine.sample_over(STARTED + time, OVER_SECONDS)
                yield Look(node, time, frame, compute_rates(before, frame, cores=False))


def sums(frame: Frame) -> Iterator[tuple[GpuReading, float, int]]:
    """The GPUs with processes, the sum of the processes' SM utilization, and of their memory."""
    for gpu in frame.gpus:
        held = gpu.processes or ()
        assert all(process.sm_ratio is not None for process in held)
        if held:
            memory = sum(process.gpu_memory_bytes or 0 for process in held)
            yield gpu, sum(process.sm_ratio or 0.0 for process in held), memory


def test_the_times_cover_the_past_and_the_present(looks: list[Look]) -> None:
    """Nearly all looks are steady; otherwise the other tests would show little."""
    assert len(looks) > 0.75 * len(TIMES) * len(PLAN.nodes)
    assert {"gpu_memory_leak", "disk_read", "gpu_shared", "idle", "healthy_gpt"} <= {
        recording for look in looks for recording in look.recordings
    }


def test_processes_have_a_part_of_their_gpu_in_every_frame(looks: list[Look]) -> None:
    """Their SM utilization is never missing and adds up to the GPU's; so does their memory, up to the driver's own."""
    for look in looks:
        for gpu, ratio, memory in sums(look.frame):
            used = gpu.values["memory_used_bytes"]
            assert ratio == pytest.approx(gpu.values["gpu_utilization_ratio"], abs=0.01)
            assert used - 2**30 < memory <= used <= gpu.device.facts["memory_total_bytes"]


def test_a_leak_grows_until_its_process_is_started_again() -> None:
    """Every process has more memory the longer it runs; only a new process has less."""
    leaks = [
        (node, slot)
        for node in PLAN.nodes
        for slot in range(8)
        if find_period(node, slot, 0.0).scene.recording == "gpu_memory_leak"
    ]
    assert len(leaks) > 1
    for node, slot in leaks:
        machine = make_machine(node, STARTED)
        begin = find_period(node, slot, 0.0).begin
        seen = []
        for time in range(round(begin) + 5, 3600, 60):
            frame = machine.sample(STARTED + time)
            (held,) = frame.gpus[slot].processes or ()
            process = next(one for one in frame.processes if one.pid == held.pid)
            seen.append((held, process.identity.start_time or 0.0, process.values["cpu_user_seconds_total"]))
            assert seen[-1][1] <= frame.time
            assert seen[-1][2] <= 16 * (frame.time - seen[-1][1])
        runs = len({held.pid for held, _, _ in seen})
        for (held, start, cpu), (later, later_start, later_cpu) in pairwise(seen):
            if held.pid == later.pid:
                assert (later.gpu_memory_bytes or 0) > (held.gpu_memory_bytes or 0)
                assert (start, True) == (later_start, later_cpu >= cpu)
            else:
                assert later_start > start
        assert runs >= 3


def test_a_leak_is_found_and_its_start_is_that_of_the_process() -> None:
    """The diagnosis of the frames themselves finds it, while the process runs."""
    node = PLAN.nodes[0]
    machine, diagnosis = make_machine(node, STARTED), LiveDiagnosis()
    for second in range(-40, 0):
        findings = diagnosis(machine.sample(STARTED + second))

    assert [("gpu_memory_leak", "5")] == [
        (finding.id, finding.label) for finding in findings if finding.label == "5"
    ]


def test_the_cpu_time_of_a_node_is_that_of_its_processes_and_a_little_more(looks: list[Look]) -> None:
    """The load fits both, and nothing is more than the node has CPUs."""
    for look in looks:
        assert look.frame.host is not None
        values, cpus = look.frame.host.values, look.frame.host.values["cpus"]
        used = look.rates.host["cpu_utilization_ratio"] * cpus
        waiting = look.rates.host.get("cpu_iowait_ratio", 0.0) * cpus
        own = sum(rates.get("cpu_percent", 0.0) for rates in look.rates.processes.values()) / 100
        assert cpus == 16 * 8
        assert own <= used <= own + 4 < cpus
        assert used - 2 <= values["load1"] <= used + waiting + 2
        assert values["load1"] == values["load15"]
        assert all(ratio <= 1.001 for name, ratio in look.rates.host.items() if name.startswith("pressure_"))


def test_only_jobs_of_several_nodes_have_much_traffic_between_nodes(looks: list[Look]) -> None:
    """Both nodes of a job send and receive the same at the same time, over NVLink too."""
    traffic: dict[tuple[float, str], list[tuple[float, float]]] = {}
    for look in looks:
        (link,) = look.rates.network.values()
        moved = link["rx_bytes_per_second"], link["tx_bytes_per_second"]
        jobs = {job.id for job in look.frame.jobs}
        if look.node.name in {"gpu-02", "gpu-03"} and jobs:
            (job,) = jobs
            traffic.setdefault((look.time, job), []).append(moved)
            assert 2 * GB < min(moved) <= max(moved) < 0.85 * 100e9 / 8
            for gpu in look.frame.gpus:
                assert gpu.values["nvlink_rx_bytes_per_second"] > 10 * GB
        else:
            assert 1e4 < min(moved) <= max(moved) < 0.05 * GB
    pairs = [moved for moved in traffic.values() if len(moved) == 2]
    assert len(pairs) > 20
    for one, other in pairs:
        assert one == pytest.approx(other, rel=0.01)


def test_who_waits_for_a_disk_reads_from_it(looks: list[Look]) -> None:
    """The disk delivers what the processes read, is never more than busy, and rests where nobody reads."""
    for look in looks:
        read = sum(rates.get("read_bytes_per_second", 0.0) for rates in look.rates.disks.values())
        own = sum(rates.get("read_bytes_per_second", 0.0) for rates in look.rates.processes.values())
        readers = look.recordings.count("disk_read")
        assert readers <= 1
        assert (read > 2 * GB) == (readers == 1)
        assert read == pytest.approx(own, rel=0.1, abs=0.05 * GB)
        assert all(rates.get("busy_ratio", 0.0) <= 1.0 for rates in look.rates.disks.values())


def test_power_temperature_and_clocks_fit_the_work(looks: list[Look]) -> None:
    """Free GPUs are cool and slow, those at full load hot; none draws more than its limit."""
    for look in looks:
        for gpu, recording in zip(look.frame.gpus, look.recordings, strict=True):
            values = gpu.values
            watts, used = values["power_watts"], values["gpu_utilization_ratio"]
            heat, clock = values["temperature_celsius"], values["sm_clock_hertz"]
            assert 70 < watts <= 1.01 * gpu.device.facts["power_limit_watts"]
            if used > 0.9:
                assert (watts > 600, heat > 55, clock > 1.5e9) == (True, True, True)
            if recording == "idle":
                assert (used, watts < 90, heat < 42, clock < 0.5e9) == (0.0, True, True, True)
            elif used < 0.3:
                assert (watts < 160, heat < 50) == (True, True)


def test_a_process_is_always_of_the_same_user_and_job(looks: list[Look]) -> None:
    """PID and start time identify it on its node, and it exists when it is said to."""
    known: dict[tuple[str, int, float | None], object] = {}
    for look in looks:
        for process in look.frame.processes:
            identity = process.identity
            key = (look.node.name, identity.pid, identity.start_time)
            assert known.setdefault(key, (identity.owner, identity.command)) == (
                identity.owner,
                identity.command,
            )
            assert (identity.start_time or 0.0) < look.frame.time
    assert len({(name, pid) for name, pid, _ in known}) == len(known)


def test_live_values_go_on_where_the_history_ends() -> None:
    """The last minute of the history and the first one after the start have the same means, GPU by GPU."""
    for node in PLAN.nodes:
        machine = make_machine(node, STARTED)
        before = machine.glance(STARTED - 1, over=60.0).gpus
        live = [machine.glance(STARTED + second / 2).gpus for second in range(120)]
        for slot, gpu in enumerate(before):
            for name, slack in (("gpu_utilization_ratio", 0.03), ("power_watts", 30.0)):
                mean = sum(gpus[slot].values[name] for gpus in live) / len(live)
                assert mean == pytest.approx(gpu.values[name], abs=slack)
            memory = live[0][slot].values["memory_used_bytes"]
            assert memory == pytest.approx(gpu.values["memory_used_bytes"], abs=2**29)


def test_the_totals_of_the_past_are_those_that_the_head_counts() -> None:
    """The scenario's last count is what a head finds in the frames of the first half minute."""
    fleet, columns, states = Fleet({}, {}, {}), GpuColumns(), GpuStates()
    machines = [(make_machine(node, STARTED), FramePacker(), node) for node in PLAN.nodes]
    for second in range(44):
        for machine, packer, node in machines:
            member = fleet.member(
                StoredNode(node.number, node.name, node.name, node.name, STARTED, {}, {}), STARTED
            )
            frame = machine.sample(STARTED + second)
            packed, layouts = packer.pack(frame)
            for text in layouts:
                fleet.layouts[layout_id(text)] = ColumnLayout.from_json(text)
            member.processes = {process.pid: process.identity for process in frame.processes}
            member.take(packed, fleet.layouts, 0)
        moved = columns.read(fleet.members, fleet.layouts, processes=True)
        if moved is not None:
            states.move(moved)
        states.update(columns)
    found = {name: int((states.states == place).sum()) for place, name in enumerate(GPU_STATES)}
    totals, idle = build_totals(PLAN, STARTED)
    day = totals.day(STARTED - 1)
    last = {name: getattr(day, name)[-1] for name in ("busy", "held_idle", "free", "faulty")}

    # Faults are findings, which the frames alone do not have.
    assert found["busy"] == last["busy"]
    assert found["idle"] == last["held_idle"] == len(idle)
    assert found["free"] == last["free"] + last["faulty"]
    assert {row.uuid for row, state in zip(columns.rows, states.states, strict=True) if state == 1} == {
        gpu.uuid for gpu in idle
    }
    assert None not in day.busy
    assert None not in day.power_watts


def test_everything_that_the_overview_shows_is_there() -> None:
    """Racks, a node that leaves and one that never reports, an Xid error with its counters, facts of every GPU."""
    frames = [make_machine(node, STARTED).sample(STARTED) for node in PLAN.nodes]
    gpus = [gpu for frame in frames for gpu in frame.gpus]
    (faulty,) = [gpu for gpu in gpus if gpu.values.get("xid_last_code")]
    names = ("ecc_uncorrected_errors_total", "remapped_rows_uncorrected", "remapped_rows_pending")

    assert {"r1", "r2"} == {node.labels["rack"] for node in PLAN.nodes}
    assert [8] == [node.number for node in PLAN.nodes if node.leaves is not None]
    assert 1 == len(PLAN.missing)
    assert 64 == len({gpu.device.serial for gpu in gpus}) == len({gpu.device.uuid for gpu in gpus})
    assert all(gpu.device.vbios and gpu.device.bus_id for gpu in gpus)
    links = [(gpu.values.get("nvlink_links"), gpu.values.get("nvlink_links_active")) for gpu in gpus]
    assert {(18, 18), (None, None)} == set(links)
    assert [1, 1, 1] == [faulty.values[name] for name in names]
    assert {0} == {gpu.values[name] for gpu in gpus if gpu is not faulty for name in names}


def test_a_job_without_its_other_node_has_no_traffic() -> None:
    """With two nodes only one of the large job's is there; a GPU without others has nothing to exchange over NVLink."""
    node = build_cluster(2, 1).nodes[1]
    scene = find_period(node, 0, 0.0).scene

    assert (0.0, 0.0) == (scene.link_bytes_per_second, scene.nvlink_bytes_per_second)
