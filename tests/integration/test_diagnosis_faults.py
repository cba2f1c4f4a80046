"""Faults that cannot be induced honestly, from the fake driver through the whole path to a finding."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from gpulse.diagnosis.engine import diagnose
from gpulse.model.finding import Finding
from gpulse.model.frame import Frame
from tests.fakes.nvml import FakeNvml
from tests.fakes.nvml.layout import Gpu
from tests.integration.nvml_machine import machine

GRAPHICS = 1
"""GPM's number for the activity of the graphics engine."""
NOW = 1_800_000_000.0
Outage = Callable[[Gpu, int], None]


def watched(fake: FakeNvml, *troubles: Outage, seconds: int = 12) -> list[Frame]:
    """So many seconds of a machine on whose GPUs something is wrong, read as fast as the fake driver answers."""
    for index in range(1, len(troubles)):
        fake.add(index)
    frames = []
    with machine() as local:
        for index in range(len(troubles)):
            fake.set_gpm(index, GRAPHICS, 95.0)
            fake.gpu(index).clocks[1] = fake.gpu(index).clocks_max[1]
        for second in range(seconds):
            for index, trouble in enumerate(troubles):
                trouble(fake.gpu(index), second)
            time.sleep(0.06)  # every group of readings is due again
            frame = local.sample(time.time(), patient=True)
            frames.append(frame._replace(time=NOW + second, monotonic=float(second)))
    return frames


def facts(findings: Iterable[Finding]) -> list[Finding]:
    """Without what is said of the work on the GPU, which the fake driver makes up."""
    return [finding for finding in findings if finding.family in ("fault", "clocks", "link")]


def hot(gpu: Gpu, second: int) -> None:  # noqa: ARG001  one signature for all
    """The hardware slows it down because of heat."""
    gpu.reasons, gpu.temperature, gpu.clocks[1] = 0x48, 92, 600


def hot_between_looks(gpu: Gpu, second: int) -> None:
    """Heat that only the counter of its time shows."""
    gpu.event_sw_thermal_ns = second * 500_000_000


def braked(gpu: Gpu, second: int) -> None:  # noqa: ARG001
    """The power supply slows it down."""
    gpu.reasons = 0x88


def slowed(gpu: Gpu, second: int) -> None:  # noqa: ARG001
    """The hardware slows it down and does not say why."""
    gpu.reasons = 0x8


def capped(gpu: Gpu, second: int) -> None:  # noqa: ARG001
    """A power limit below its own is reached."""
    gpu.reasons, gpu.power_enforced_mw, gpu.power_limit_mw = 0x4, 450_000, 450_000


def locked(gpu: Gpu, second: int) -> None:  # noqa: ARG001
    """Its clocks were set lower."""
    gpu.reasons = 0x2
    gpu.clocks_app[1] = 1200


def without_fan(gpu: Gpu, second: int) -> None:  # noqa: ARG001
    """Its fan stands still."""
    gpu.fan_count, gpu.temperature = 1, 80
    gpu.fans[0], gpu.fan_targets[0] = 0, 70


def narrow(gpu: Gpu, second: int) -> None:  # noqa: ARG001
    """Half of its PCIe lanes are gone."""
    gpu.pcie_width = 8


def resending(gpu: Gpu, second: int) -> None:
    """PCIe packets are sent again."""
    gpu.pcie_replays = 100 * second


def failing_memory(gpu: Gpu, second: int) -> None:  # noqa: ARG001
    """Memory errors that could not be corrected."""
    gpu.ecc_volatile[1] = 2


def unmapped(gpu: Gpu, second: int) -> None:  # noqa: ARG001
    """A memory row that could not be remapped."""
    gpu.remapped_failed = 1


def wants_reset(gpu: Gpu, second: int) -> None:  # noqa: ARG001
    """The driver asks for a reset."""
    gpu.recovery_action = 1


def test_every_fault_of_the_hardware_is_found(fake_nvml: FakeNvml) -> None:
    """By what the driver says, each on its own GPU, and nothing else is found."""
    expected = {
        hot: ("thermal_throttle", "critical"),
        hot_between_looks: ("thermal_throttle", "high"),
        braked: ("power_brake", "critical"),
        slowed: ("hw_slowdown", "critical"),
        capped: ("power_capped", "low"),
        locked: ("clocks_locked", "low"),
        without_fan: ("fan_failure", "high"),
        narrow: ("pcie_link_degraded", "low"),
        resending: ("pcie_replays", "medium"),
        failing_memory: ("gpu_fault", "critical"),
        unmapped: ("gpu_fault", "critical"),
        wants_reset: ("gpu_fault", "critical"),
    }

    found = facts(diagnose(watched(fake_nvml, *expected)).findings)

    assert {(gpu, *told) for gpu, told in enumerate(expected.values())} == {
        (finding.gpu, finding.id, finding.severity) for finding in found
    }
    assert len(expected) == len(found)


def test_hot_memory_is_found(fake_nvml: FakeNvml) -> None:
    """When it reaches the maximum that the board states."""

    def hot_memory(gpu: Gpu, second: int) -> None:  # noqa: ARG001
        gpu.thresholds[2] = gpu.thresholds[2] or 95
        gpu.temperature_memory = gpu.thresholds[2] + 1

    assert ["memory_overtemperature"] == [
        f.id for f in facts(diagnose(watched(fake_nvml, hot_memory)).findings)
    ]


def test_a_sound_machine_has_no_fault(fake_nvml: FakeNvml) -> None:
    """At its default power limit the power cap is normal."""

    def sound(gpu: Gpu, second: int) -> None:  # noqa: ARG001
        gpu.reasons = 0x4

    assert [] == facts(diagnose(watched(fake_nvml, sound)).findings)


def test_a_gpu_that_falls_off_the_bus_is_found(fake_nvml: FakeNvml) -> None:
    """In the last frame, or at any time."""

    def falls(gpu: Gpu, second: int) -> None:
        gpu.lost = int(second > 6)

    found: list[Finding] = list(diagnose(watched(fake_nvml, falls)).findings)

    assert ("gpu_fault", "critical") in [(finding.id, finding.severity) for finding in found]


def test_an_xid_is_found_with_its_class(fake_nvml: FakeNvml) -> None:
    """What NVIDIA's catalogue says about the code is said."""
    frames: list[Frame] = []
    with machine(watch_xids=True) as local:
        local.sample(time.time(), patient=True)
        fake_nvml.push_xid(0, 79)
        deadline = time.monotonic() + 60
        while not frames or frames[-1].gpus[0].get("xid_last_code") is None:
            assert time.monotonic() < deadline
            time.sleep(0.02)
            frames.append(local.sample(time.time()))

    (finding,) = diagnose(frames[-1:]).findings

    assert ("gpu_fault", "critical") == (finding.id, finding.severity)
    assert "Xid 79 (the GPU has fallen off the bus)" in finding.summary
