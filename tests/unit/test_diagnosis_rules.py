from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from gpulse.diagnosis.engine import diagnose
from gpulse.diagnosis.rule import HARDWARE_FAMILIES
from gpulse.diagnosis.rule_registry import RULES, RULES_BY_ID
from gpulse.model.device import Node
from gpulse.model.finding import NODE_FINDINGS, Finding
from gpulse.model.frame import Frame, GpuReading
from gpulse.model.metric_catalog import Values
from gpulse.model.process import GpuProcess
from tests.unit.diagnosis_machine import BUSY, GIB, NOON, PID, Doing, lost, play, together
from tests.unit.diagnosis_perturb import without_gpm
from tests.unit.diagnosis_recompute import HOLDS, everything, unexplained
from tests.unit.diagnosis_traces import steady

POLLING: Values = {
    **BUSY,
    "gpu_utilization_ratio": 1.0,
    "memory_utilization_ratio": 0.0,
    "graphics_active_ratio": 1.0,
    "sm_active_ratio": 0.1,
    **{f"{name}_active_ratio": 0.0 for name in ("tensor", "dram", "fp32")},
    "pcie_rx_bytes_per_second": 0.5e6,
    "pcie_tx_bytes_per_second": 0.5e6,
    "power_watts": 130,
    "clocks_event_reasons": 0,
    "sm_clock_hertz": 1_980_000_000,
}
"""One kernel that polls a flag."""
TWO_SOCKETS = Node("node1", numa_cpus=("0-7", "8-15"))


def busy(**values: float) -> Doing:
    """A healthy job, but for these readings."""
    return Doing({**BUSY, **values})


def growing(
    name: str, per_second: float, start: float = 0.0, base: Values = BUSY
) -> Callable[[float], Doing]:
    """A healthy job with one reading that grows."""
    return lambda now: Doing({**base, name: start + per_second * now})


def crew(*, slow: int) -> list[Frame]:
    """Four GPUs of one job, one of which does not keep pace."""
    return together(
        *(
            play(20, busy(power_watts=350) if index == slow else Doing(), index=index, parent=77)
            for index in range(4)
        )
    )


def killed(now: float) -> Doing:
    """A job that the kernel kills after 15 s."""
    return Doing(host={"oom_kills_total": 1}, on_gpu=False) if now >= 15 else Doing()


def shared(name: str, others: int = 1) -> list[Frame]:
    """Processes that compute on one GPU, of which one may be the server of MPS."""
    frames = play(20, Doing(name=name))
    more = [GpuProcess(PID + 50 + place, "compute", GIB, 0.6) for place in range(others)]
    return [
        frame._replace(gpus=(frame.gpus[0]._replace(processes=(*(frame.gpus[0].processes or ()), *more)),))
        for frame in frames
    ]


SCENARIOS: dict[str, Callable[[], list[Frame] | tuple[Frame, ...]]] = {
    "gpu_fault": lambda: play(20, busy(xid_last_code=79, xid_errors_total=1)),
    "process_died": lambda: play(25, killed),
    "process_blocked": lambda: play(310, Doing(lost(1.0), cores=0.0, state="D"), step=1.0),
    "thermal_throttle": lambda: play(20, busy(clocks_event_reasons=0x20)),
    "power_brake": lambda: play(20, busy(clocks_event_reasons=0x88)),
    "hw_slowdown": lambda: play(20, busy(clocks_event_reasons=0x8)),
    "fan_failure": lambda: play(20, busy(fan_speed_ratio=0.0, fan_target_ratio=0.6, temperature_celsius=85)),
    "memory_overtemperature": lambda: play(
        20, busy(memory_temperature_celsius=96), facts={"memory_temperature_max_celsius": 95}
    ),
    "power_capped": lambda: play(20, facts={"power_limit_watts": 400}),
    "clocks_locked": lambda: play(
        20, busy(clocks_event_reasons=0x2, sm_clock_application_hertz=1_200_000_000)
    ),
    "pcie_link_degraded": lambda: play(20, busy(pcie_link_width=8)),
    "pcie_replays": lambda: play(90, growing("pcie_replays_total", 1.0), step=1.0),
    "numa_mismatch": lambda: play(
        20, Doing(lost(0.6), cores=1.0, last_cpu=12), node=TWO_SOCKETS, numa_node=0
    ),
    "gpu_oom_imminent": lambda: play(20, growing("memory_used_bytes", 0.5 * GIB, 125 * GIB)),
    "gpu_memory_leak": lambda: steady("gpu_memory_leak"),
    "host_memory_leak": lambda: steady("host_memory_leak"),
    "swap_thrash": lambda: play(
        20,
        Doing(
            lost(0.5),
            cores=0.3,
            growing={"swap_in_pages_total": 5000, "pressure_memory_full_seconds_total": 0.3},
        ),
    ),
    "gpu_memory_orphaned": lambda: play(
        20, Doing({**lost(1.0), "memory_used_bytes": 30 * GIB}, on_gpu=False)
    ),
    "collective_hang": lambda: play(30, Doing(POLLING)),
    "checkpoint_stall": lambda: steady("checkpoint_stall"),
    "periodic_stall": lambda: steady("periodic_host_eval"),
    "throughput_regression": lambda: play(30, lambda now: Doing(lost(0.01 if now < 15 else 0.17))),
    "gpu_contention": lambda: shared("python3"),
    "straggler": lambda: crew(slow=2),
    "pcie_copy_bound": lambda: steady("pcie_copies"),
    "input_io_bound": lambda: steady("disk_read"),
    "input_too_few_workers": lambda: steady("loader_too_few_workers"),
    "input_cpu_bound": lambda: steady("loader_all_cores"),
    "cpu_oversubscribed": lambda: steady("cpu_oversubscribed"),
    "cgroup_cpu_throttled": lambda: play(20, Doing(lost(0.5), cores=2.0, throttled=0.6)),
    "launch_bound": lambda: steady("launch_bound"),
    "input_main_process": lambda: steady("loader_main_process"),
    "host_many_threads": lambda: play(20, Doing(lost(0.5), cores=9.0)),
    "host_single_thread": lambda: steady("python_bound_step"),
    "host_wait_unattributed": lambda: steady("loader_waits_on_service"),
    "gpu_underused": lambda: steady("sparse_serving"),
    "gpu_idle_allocated": lambda: steady("idle_allocated"),
    "thin_kernels": lambda: steady("single_block_kernel"),
    "tensor_cores_unused": lambda: steady("tensor_cores_unused"),
    "slow_start": lambda: play(20, Doing(lost(1.0)), age=5.0),
    "compute_bound": lambda: steady("healthy_gpt"),
    "memory_bandwidth_bound": lambda: steady("memory_bandwidth"),
    "network_saturated": lambda: play(20, Doing(network=0.95)),
}
"""For each rule frames that show it; nodes do not judge themselves, so their rules have none."""


def told(frames: list[Frame] | tuple[Frame, ...]) -> list[Finding]:
    """All that is found, informational or not."""
    diagnosis = diagnose(frames)
    return [*diagnosis.findings, *diagnosis.info]


def ids(frames: list[Frame] | tuple[Frame, ...]) -> set[str]:
    """The findings that are worth somebody's time."""
    return {finding.id for finding in diagnose(frames).findings}


def one(rule: str, frames: list[Frame] | tuple[Frame, ...]) -> Finding:
    """The finding of one rule."""
    [finding] = [finding for finding in told(frames) if finding.id == rule]
    return finding


def test_the_rule_registry_is_complete() -> None:
    """Every rule is there once, and each has frames in this file that show it."""

    assert sorted([*SCENARIOS, *NODE_FINDINGS]) == sorted(rule.id for rule in RULES), (
        "a new rule needs a row in SCENARIOS, with frames that show it"
    )


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
def test_every_rule_explains_itself(rule: object) -> None:
    """What it means, how it is recognised, how bad it is, what to do and who says so."""

    known = next(entry for entry in RULES if entry is rule)

    assert all((known.title, known.means, known.recognised, known.severity, known.advice, known.sources))
    assert all(all(advice) for advice in known.advice)
    assert (known.id not in NODE_FINDINGS) == ((known.check is None) != (known.check_node is None))


@pytest.mark.parametrize("rule", SCENARIOS)
def test_every_rule_is_shown_by_some_frames(rule: str) -> None:
    """Rules that no real run has shown stay informational; all others say how bad it is."""

    finding = one(rule, SCENARIOS[rule]())
    informational = {"slow_start", "compute_bound", "memory_bandwidth_bound"}

    assert RULES_BY_ID[rule].family == finding.family
    assert (not RULES_BY_ID[rule].shown or rule in informational) == (finding.severity == "info")
    assert finding.evidence
    assert finding.advice
    assert 0.0 < finding.confidence <= 1.0
    assert finding.url == f"docs/reference/findings.md#{rule}"


@pytest.mark.parametrize("rule", SCENARIOS)
def test_every_rule_is_honest_about_its_numbers(rule: str) -> None:
    """Each is on its side of the threshold, and each number of the sentence is one of them."""

    for finding in told(SCENARIOS[rule]()):
        assert all(HOLDS[item.comparison](item.value, item.threshold) for item in everything(finding))
        assert unexplained(finding) <= {"79"}  # an Xid is a name


@pytest.mark.parametrize(
    "rule", [rule for rule in SCENARIOS if RULES_BY_ID[rule].family in HARDWARE_FAMILIES]
)
def test_facts_stand_alone(rule: str) -> None:
    """A fault of the hardware on a healthy job is the only finding, unless the job itself is hit."""

    others = ids(SCENARIOS[rule]()) - {rule}

    assert others <= {"host_single_thread", "gpu_idle_allocated"}


def test_a_healthy_job_made_by_hand_has_no_finding() -> None:
    """At its power limit, with twelve busy workers, a spinning thread, a full disk queue and a loud neighbour."""

    assert set() == ids(play(20))
    assert set() == ids(play(20, Doing(helpers=(0.95,) * 12)))
    assert set() == ids(play(20, Doing(host={"processes_running": 60}, run_wait=0.5)))
    assert set() == ids(play(20, Doing(helpers=(0.1,) * 8, helper_state="D", read=300e6)))


def test_heat_is_seen_by_bits_and_by_counters() -> None:
    """The hardware's own brake is worse than the driver's; a counter catches what falls between frames."""

    driver = one("thermal_throttle", play(20, busy(clocks_event_reasons=0x24)))
    hardware = one("thermal_throttle", play(20, busy(clocks_event_reasons=0x48)))
    counted = one("thermal_throttle", play(20, growing("thermal_slowdown_seconds_total", 0.1)))

    assert ["high", "critical", "high"] == [found.severity for found in (driver, hardware, counted)]
    assert "10%" in counted.summary
    assert "hw_slowdown" not in ids(play(20, busy(clocks_event_reasons=0x48)))
    assert set() == ids(play(20, growing("thermal_slowdown_seconds_total", 0.005)))


def test_the_power_cap_is_a_finding_only_below_the_boards_own() -> None:
    """At the default limit every busy GPU runs into it, and without reaching it a low limit costs nothing."""

    idle = busy(clocks_event_reasons=0x0)

    assert "power_capped" in ids(play(20, facts={"power_limit_watts": 400}))
    assert set() == ids(play(20))
    assert set() == ids(play(20, idle, facts={"power_limit_watts": 400}))


def test_one_frame_of_hardware_slowdown_is_a_change_of_state() -> None:
    """Two and more are a fault."""

    def blip(now: float, until: float) -> Doing:
        return busy(clocks_event_reasons=0x8 if 5.0 <= now < until else 0x0)

    assert set() == ids(play(20, lambda now: blip(now, 5.2)))
    assert {"hw_slowdown"} == ids(play(20, lambda now: blip(now, 7.0)))


def test_a_power_brake_is_seen_by_its_counter() -> None:
    """Even when no frame caught it."""

    assert {"power_brake"} == ids(play(20, growing("power_brake_seconds_total", 0.05)))


def test_clocks_a_little_lower_are_left_alone() -> None:
    """A site may round its clocks."""

    assert set() == ids(play(20, busy(clocks_event_reasons=0x2, sm_clock_application_hertz=1_950_000_000)))


def test_boards_without_fans_have_no_broken_ones() -> None:
    """SXM boards report none; a fan at rest on a cool board is quiet by design."""

    assert set() == ids(play(20, busy(temperature_celsius=85)))
    assert set() == ids(play(20, busy(fan_speed_ratio=0.0, fan_target_ratio=0.6, temperature_celsius=40)))
    assert set() == ids(play(20, busy(fan_speed_ratio=0.0, fan_target_ratio=0.0, temperature_celsius=70)))


def test_memory_within_its_limit_is_left_alone() -> None:
    """Warm is not hot, and a board that states no limit is not judged."""

    facts: Values = {"memory_temperature_max_celsius": 95}

    assert set() == ids(play(20, busy(memory_temperature_celsius=94), facts=facts))
    assert set() == ids(play(20, busy(memory_temperature_celsius=120)))


def test_an_idle_link_may_be_slow() -> None:
    """Links save power at rest; a slow one is a finding under load, and a serious one when copies are the limit."""

    resting = Doing({**lost(1.0), "pcie_link_generation": 1}, cores=0.0)
    copying = {**BUSY, **steady("pcie_copies")[100].gpus[0].values, "pcie_link_width": 8}

    assert "pcie_link_degraded" not in ids(play(20, resting))
    assert "low" == one("pcie_link_degraded", play(20, busy(pcie_link_generation=3))).severity
    assert "high" == one("pcie_link_degraded", play(20, Doing(copying))).severity


def test_few_replays_are_chance() -> None:
    """Up to what the standard's error rate allows."""

    assert set() == ids(play(90, growing("pcie_replays_total", 0.3), step=1.0))


def test_a_far_numa_node_matters_only_while_data_moves() -> None:
    """A job on the right node, or one whose GPU never waits, is left alone."""

    def at(cpu: int, gpu: Values) -> list[str]:
        frames = play(20, Doing(gpu, last_cpu=cpu), node=TWO_SOCKETS, numa_node=0)
        return [finding.id for finding in told(frames) if finding.id == "numa_mismatch"]

    assert ["numa_mismatch"] == at(12, lost(0.6))
    assert [] == at(3, lost(0.6))
    assert [] == at(12, BUSY)


def test_a_full_but_flat_memory_is_normal() -> None:
    """JAX and vLLM take nearly all of it at once."""

    assert [] == [f for f in told(play(20, busy(memory_used_bytes=136 * GIB))) if f.family == "memory"]


def test_memory_that_is_about_to_run_out_says_more_than_its_leak() -> None:
    """The forecast stands for both."""

    assert {"gpu_oom_imminent"} == ids(SCENARIOS["gpu_oom_imminent"]())


def test_a_jump_of_memory_is_no_leak() -> None:
    """Nor is memory that comes and goes, nor a small growth."""

    def jump(now: float) -> Doing:
        return busy(memory_used_bytes=(20 if now < 10 else 40) * GIB)

    def waves(now: float) -> Doing:
        return busy(memory_used_bytes=(20 + 10 * (now % 4)) * GIB)

    assert set() == ids(play(20, jump))
    assert set() == ids(play(20, waves))
    assert set() == ids(play(20, growing("memory_used_bytes", 20e6, 20 * GIB)))


def test_memory_of_visible_processes_has_an_owner() -> None:
    """Only memory without a process is orphaned, and a little is always used by the driver."""

    little = Doing({**lost(1.0), "memory_used_bytes": 0.5 * GIB}, on_gpu=False)

    assert [] == told(play(20, little))
    assert [] == [finding for finding in told(play(20)) if finding.id == "gpu_memory_orphaned"]


def test_a_job_that_ends_by_itself_did_not_die() -> None:
    """Without a kill by the kernel at the same time there is nothing to tell."""

    assert set() == ids(play(25, lambda now: Doing(on_gpu=now < 15)))
    assert set() == ids(play(25, Doing(host={"oom_kills_total": 7})))


def test_a_job_that_died_is_named() -> None:
    """With its process, and the time at which it was gone."""

    finding = one("process_died", play(25, killed))

    assert (PID,) == finding.pids
    assert finding.start == pytest.approx(NOON + 15, abs=1.5)


def test_a_short_wait_in_the_kernel_is_no_hang() -> None:
    """Five minutes in every frame is."""

    short = play(120, Doing(lost(1.0), cores=0.0, state="D"), step=1.0)

    assert "process_blocked" not in ids(short)
    assert "critical" == one("process_blocked", SCENARIOS["process_blocked"]()).severity


def test_an_xid_is_a_fault_even_on_a_healthy_job() -> None:
    """And is listed first."""

    diagnosis = diagnose(SCENARIOS["gpu_fault"]())

    assert "gpu_fault" == diagnosis.findings[0].id
    assert "critical" == diagnosis.findings[0].severity
    assert "Xid 79" in diagnosis.verdict


def test_waiting_for_a_file_server_is_waiting_for_input() -> None:
    """Reads over NFS are not in the disks' counters, so the mount's own queue counts."""

    waiting = Doing(lost(0.7), cores=0.2, helpers=(0.1,) * 4, helper_state="D", nfs_in_flight=3.5)
    finding = one("input_io_bound", play(20, waiting))

    assert "NFS" in finding.summary
    assert "nfs_reads_in_flight" in {item.signal for item in finding.evidence}
    assert "input_io_bound" not in ids(play(20, waiting._replace(nfs_in_flight=0.0)))


def test_mps_lets_programs_share_on_purpose() -> None:
    """Its server among the processes means that they run side by side."""

    assert {"gpu_contention"} == ids(shared("python3"))
    assert set() == ids(shared("nvidia-cuda-mps-server"))


@pytest.mark.parametrize(
    ("others", "words"),
    [
        (1, r"2 processes that take turns: their kernels ran \d+% and \d+% of the time"),
        (2, r"3 processes that take turns: their kernels ran \d+%, \d+% and \d+% of the time"),
        (5, r"6 .*: the kernels of the four busiest ran \d+%, \d+%, \d+% and \d+% of the time"),
    ],
)
def test_shares_of_a_gpu_are_listed_as_in_a_sentence(others: int, words: str) -> None:
    """With `and`, and for many processes only those of the busiest."""

    assert re.search(words, one("gpu_contention", shared("python3", others)).summary)


@pytest.mark.parametrize("rule", ["gpu_memory_leak", "host_memory_leak", "gpu_oom_imminent"])
def test_durations_in_a_sentence_are_written_one_way(rule: str) -> None:
    """With a space before the unit, or as minutes and seconds."""

    assert not re.search(r"\d(s|m|min|h)\b", one(rule, SCENARIOS[rule]()).summary)


def test_a_straggler_is_the_one_that_differs() -> None:
    """Named by its GPU, and only among GPUs of one job."""

    strangers = together(
        *(
            play(20, busy(power_watts=350) if index == 2 else Doing(), index=index, parent=70 + index)
            for index in range(4)
        )
    )

    assert 2 == one("straggler", crew(slow=2)).gpu
    assert [] == [finding for finding in told(strangers) if finding.id == "straggler"]
    assert [] == [finding for finding in told(crew(slow=9)) if finding.id == "straggler"]


def test_a_hang_shows_no_progress_at_all() -> None:
    """Kernels after one another, arithmetic, memory traffic, files, workers and allocations are all progress."""

    def hangs(doing: Doing | Callable[[float], Doing]) -> bool:
        return "collective_hang" in ids(play(20, doing))

    def polling(**values: float) -> Doing:
        return Doing({**POLLING, **values})

    assert hangs(polling())
    assert not hangs(polling(graphics_active_ratio=0.9995))
    assert not hangs(polling(fp32_active_ratio=0.01))
    assert not hangs(polling(dram_active_ratio=0.01))
    assert not hangs(polling(pcie_rx_bytes_per_second=200e6))
    assert not hangs(lambda now: polling(sm_active_ratio=0.1 + 0.001 * (now % 2)))
    assert not hangs(lambda now: polling(memory_used_bytes=40 * GIB + now * 2**22))
    assert not hangs(Doing(POLLING, helpers=(0.5, 0.5)))
    assert not hangs(Doing(POLLING, helpers=(0.1,), read=1e6))


def test_a_hang_takes_ten_seconds_to_tell() -> None:
    """A long kernel may take its time."""

    assert set() == ids(play(20, lambda now: Doing(POLLING if now >= 13 else BUSY)))


def test_without_gpm_a_hang_is_a_guess() -> None:
    """Only what drew more power before is reported, with what would confirm it; the rest is information."""

    before = play(30, lambda now: Doing(POLLING if now >= 8 else BUSY))
    guessed = one("collective_hang", without_gpm(before))
    alone = one("collective_hang", without_gpm(play(20, Doing(POLLING))))
    thin = without_gpm(play(20, Doing({**POLLING, "gpu_utilization_ratio": 0.99})))

    assert ("high", 0.5) == (guessed.severity, guessed.confidence)
    assert "possibly hangs" in guessed.summary
    assert "two stack dumps" in guessed.advice[0].confirm
    assert guessed.start == pytest.approx(NOON + 8, abs=1.5)
    assert ("info", 0.3) == (alone.severity, alone.confidence)
    assert "collective_hang" not in {finding.id for finding in told(thin)}


def test_a_sleeping_job_does_not_wait_for_a_cpu() -> None:
    """However much other jobs compete for the CPUs, and whether or not its own wait is counted."""

    crowd: Values = {"processes_running": 60}
    pressure = {"pressure_cpu_some_seconds_total": 0.95}
    asleep = play(20, Doing(lost(0.995), cores=0.0, host=crowd, growing=pressure))
    uncounted = [
        frame._replace(
            processes=tuple(
                p._replace(values={k: v for k, v in p.values.items() if k != "run_wait_seconds_total"})
                for p in frame.processes
            )
        )
        for frame in asleep
    ]
    waiting = play(20, Doing(lost(0.8), cores=0.2, run_wait=0.2, host=crowd, growing=pressure))

    assert "cpu_oversubscribed" not in ids(asleep)
    assert "cpu_oversubscribed" not in ids(uncounted)
    assert {"cpu_oversubscribed"} == ids(waiting)


def test_input_is_told_from_other_work_by_what_is_copied() -> None:
    """Batches go to the GPU; weights and gradients of an optimizer on the CPU go both ways."""

    def copying(rx: float, tx: float, **doing: Any) -> set[str]:
        gpu = lost(0.5, pcie_rx_bytes_per_second=rx, pcie_tx_bytes_per_second=tx)
        return ids(play(20, Doing(gpu, **doing)))

    assert {"input_main_process"} == copying(300e6, 20e6, cores=9.0)
    assert {"input_main_process"} == copying(300e6, 20e6, cores=1.0)
    assert {"host_many_threads"} == copying(300e6, 250e6, cores=9.0)
    assert {"host_many_threads"} == copying(40e6, 10e6, cores=9.0)
    assert {"host_single_thread"} == copying(40e6, 10e6, cores=1.0)


@pytest.mark.parametrize("length", [0.6, 1.0, 1.2, 1.4, 2.0])
def test_pauses_in_a_rhythm_are_reported_with_it(length: float) -> None:
    """Whatever their length, on both sides of that from which a single pause counts."""

    frames = play(24, lambda now: Doing(lost(1.0) if now % 4 < length else BUSY, cores=0.05), step=0.2)
    finding = one("periodic_stall", frames)

    assert "every 4.0 s" in finding.summary
    assert finding.lost_ratio == pytest.approx(length / 4, abs=0.1)


def test_short_pauses_without_a_rhythm_are_a_wait() -> None:
    """Pauses shorter than 1.2 s at any time are not told from the waits between steps."""

    begins = (2.0, 4.4, 9.0, 10.8, 16.6, 18.2)

    def uneven(now: float) -> Doing:
        return Doing(lost(1.0) if any(b <= now < b + 0.9 for b in begins) else BUSY, cores=0.05)

    assert {"host_wait_unattributed"} == ids(play(22, uneven, step=0.2))


def test_locked_clocks_are_seen_without_a_reason() -> None:
    """A constant clock far below the maximum that neither power, heat nor rest explains; boost clocks do not count."""

    def at(megahertz: float, **values: float) -> set[str]:
        gpu = {"clocks_event_reasons": 0, "power_watts": 400, "sm_clock_hertz": megahertz * 1e6, **values}
        return ids(play(20, busy(**gpu)))

    def boost(now: float) -> Doing:
        return busy(clocks_event_reasons=0, power_watts=400, sm_clock_hertz=(1290 + 60 * (now % 3)) * 1e6)

    def counted(now: float) -> Doing:
        gpu = {"clocks_event_reasons": 0, "power_watts": 600, "sm_clock_hertz": 1_800_000_000}
        return busy(thermal_slowdown_seconds_total=now, **gpu)

    resting = Doing(lost(0.8, sm_clock_hertz=345e6, power_watts=100), cores=0.1)

    assert {"clocks_locked"} == at(1290)
    assert set() == at(1290, clocks_event_reasons=0x4)
    assert {"thermal_throttle"} == at(1290, clocks_event_reasons=0x20)
    assert set() == at(1290, power_watts=690)
    assert set() == at(1800)
    assert set() == ids(play(20, boost))
    assert "clocks_locked" not in ids(play(20, resting))
    assert {"clocks_locked"} == ids(play(20, counted))


def test_a_lowered_power_limit_is_seen_without_the_default() -> None:
    """By the highest limit that the board allows; little below it may be the default of that board."""

    def capped(limit: float) -> list[Finding]:
        facts: Values = {"power_limit_watts": limit, "power_max_limit_watts": 700}
        frames = play(20, busy(power_watts=limit), facts=facts)
        return [finding for finding in told(_without_default_limit(frames)) if finding.id == "power_capped"]

    assert [("low", 0.6)] == [(finding.severity, finding.confidence) for finding in capped(400)]
    assert [("info", 0.3)] == [(finding.severity, finding.confidence) for finding in capped(600)]
    assert [] == capped(700)


def _without_default_limit(frames: list[Frame]) -> list[Frame]:
    def cut(gpu: GpuReading) -> GpuReading:
        facts = {
            name: value for name, value in gpu.device.facts.items() if name != "power_default_limit_watts"
        }
        return gpu._replace(device=gpu.device._replace(facts=facts))

    return [frame._replace(gpus=tuple(map(cut, frame.gpus))) for frame in frames]


def test_a_throttled_cgroup_is_named_with_the_unexplained_loss() -> None:
    """The limit has no real run yet, so it is informational, and the lost time stays a finding."""

    diagnosis = diagnose(SCENARIOS["cgroup_cpu_throttled"]())

    assert ["host_wait_unattributed"] == [finding.id for finding in diagnosis.findings]
    assert "cgroup_cpu_throttled" in {finding.id for finding in diagnosis.info}


@pytest.mark.parametrize(
    ("cores", "said"), [(0.4, "the program uses 0.4 CPUs"), (0.05, "nothing on this machine is busy")]
)
def test_a_program_that_computes_for_part_of_the_lost_time_is_not_called_idle(
    cores: float, said: str
) -> None:
    """It may block while it waits for the GPU, so its CPU time alone does not prove anything."""
    (found,) = told(play(20, Doing(lost(0.5), cores=cores)))

    assert ("host_wait_unattributed", True) == (found.id, said in found.summary)


def test_a_network_that_loses_packets_is_reported() -> None:
    """Even when it is not full; a quiet one is not."""

    assert ["network_saturated"] == [
        finding.id for finding in told(play(20, Doing(errors=0.03))) if finding.family == "network"
    ]
    assert [] == [finding for finding in told(play(20, Doing(network=0.4))) if finding.family == "network"]


def test_a_start_that_takes_minutes_is_a_finding() -> None:
    """Five of them, and it is no longer informational."""

    slow = play(330, Doing(lost(1.0)), step=1.0, age=5.0)

    assert "low" == one("slow_start", slow).severity


def test_saturated_workers_as_many_as_cpus_need_no_colleagues() -> None:
    """Sixteen on sixteen CPUs have used them up; two on sixteen have not."""

    def workers(count: int, cores: float) -> set[str]:
        return ids(play(20, Doing(lost(0.6), cores=0.1, helpers=(cores,) * count)))

    assert {"input_cpu_bound"} == workers(16, 0.98)
    assert {"input_cpu_bound"} == workers(16, 0.81)
    assert {"input_too_few_workers"} == workers(2, 0.98)
    assert {"host_wait_unattributed"} == workers(8, 0.05)


def test_a_spinning_thread_is_innocent_while_the_gpu_is_busy() -> None:
    """And the reason when the GPU is not."""

    assert set() == ids(play(20, Doing(cores=1.0)))
    assert {"host_single_thread"} == ids(play(20, Doing(lost(0.5), cores=1.0)))


def test_the_run_queue_counts_where_waiting_is_not_measured() -> None:
    """Without pressure and run-queue waits, many more threads than CPUs are still too many."""

    def blind(frame: Frame) -> Frame:
        assert frame.host is not None
        values = {name: value for name, value in frame.host.values.items() if "pressure" not in name}
        processes = tuple(
            process._replace(
                values={n: v for n, v in process.values.items() if n != "run_wait_seconds_total"}
            )
            for process in frame.processes
        )
        return frame._replace(host=frame.host._replace(values=values), processes=processes)

    crowded = play(20, Doing(lost(0.5), cores=0.3, host={"processes_running": 64}))

    assert {"cpu_oversubscribed"} == ids([blind(frame) for frame in crowded])
    assert {"host_wait_unattributed"} == ids(crowded)


def test_idle_samples_without_a_fall_of_power_are_an_echo_of_the_sampling() -> None:
    """Samples between the steps find the GPU idle, but its power shows that it is not."""

    def stall(now: float, watts: float) -> Doing:
        rests = now % 6 >= 4
        gpu = {**lost(1.0), "power_watts": watts} if rests else BUSY
        return Doing(gpu, cores=1.0)

    assert "periodic_stall" in ids(play(30, lambda now: stall(now, 130)))
    assert "periodic_stall" not in ids(play(30, lambda now: stall(now, 650)))


def test_a_held_reading_of_gpm_is_not_taken_for_the_present() -> None:
    """Its costly metric may be ten seconds old; utilization is fresh and counts then."""

    frames = [
        frame._replace(
            gpus=(
                frame.gpus[0]._replace(
                    values={**frame.gpus[0].values, "graphics_active_ratio": 0.2},
                    read_at={"gpm": frame.time, "graphics": frame.time - 9.0},
                ),
            )
        )
        for frame in play(20)
    ]

    assert set() == ids(frames)
