from __future__ import annotations

from pathlib import Path

import pytest

from gpulse.model.frame import Frame, HostReading
from gpulse.model.source_health import Health
from gpulse.sources.doctor_checks import Check, run_checks
from gpulse.sources.procfs import Roots
from tests.unit.frames import NOON, frame, gpu
from tests.unit.trees import grow

CARD = {
    "sys/bus/pci/devices/0000:1b:00.0/vendor": "0x10de\n",
    "sys/bus/pci/devices/0000:1b:00.0/class": "0x030200\n",
}
MISSING = Health("nvml", "driver_missing", "no NVIDIA driver here", NOON, hint="install it")


def about(topic: str, found: Frame, roots: Roots) -> list[Check]:
    """The checks on one topic."""
    return [check for check in run_checks(found, roots) if check.topic == topic]


def statuses(topic: str, found: Frame, roots: Roots) -> list[str]:
    """How they ended."""
    return [check.status for check in about(topic, found, roots)]


def test_a_working_driver_is_named(tmp_path: Path) -> None:
    """With its version and the newest CUDA it knows."""

    assert [Check("driver", "ok", "580.1, CUDA up to 13.0")] == about(
        "driver", frame(gpu()), grow(tmp_path, {})
    )


def test_a_machine_without_a_card_is_limited_not_broken(tmp_path: Path) -> None:
    """A laptop is not sick for want of an NVIDIA GPU."""

    assert ["limited"] == statuses("driver", frame(health=(MISSING,)), grow(tmp_path, {}))


def test_a_card_without_a_driver_is_broken(tmp_path: Path) -> None:
    """The card on the bus is counted, and the advice passed on."""
    (check,) = about("driver", frame(health=(MISSING,)), grow(tmp_path, CARD))

    assert ("broken", "install it") == (check.status, check.advice)
    assert "NVIDIA devices on the PCI bus: 1" in check.detail


def test_a_driver_of_two_versions_is_broken(tmp_path: Path) -> None:
    """After an update without a reload the library and the module disagree."""
    roots = grow(tmp_path, {"sys/module/nvidia/version": "570.9\n"})

    assert ["ok", "broken"] == statuses("driver", frame(gpu()), roots)


def test_a_lost_gpu_is_broken_and_the_others_are_not(tmp_path: Path) -> None:
    """Each GPU is checked on its own."""
    lost = Health("nvml", "gpu_lost", "GPU is lost", NOON, "gpu 1", hint="reboot")
    found, roots = frame(gpu(0), gpu(1), health=(lost,)), grow(tmp_path, {})

    assert [["ok"], ["broken"]] == [statuses(f"gpu {index}", found, roots) for index in range(2)]


def test_what_this_user_may_not_read_is_limited(tmp_path: Path) -> None:
    """The readings are named."""
    refused = Health("nvml", "no_permission", "not allowed", NOON, "gpu 0", ("energy_joules_total",))
    checks = about("gpu 0", frame(gpu(0), health=(refused,)), grow(tmp_path, {}))

    assert [("ok", False), ("limited", True)] == [
        (c.status, "energy_joules_total" in c.detail) for c in checks
    ]


@pytest.mark.parametrize(
    ("expected", "having"), [("ok", (True, True)), ("limited", (True, False)), ("limited", (False, False))]
)
def test_gpm_is_limited_unless_every_gpu_has_it(
    tmp_path: Path, expected: str, having: tuple[bool, ...]
) -> None:
    """A mixed machine says so."""
    gpus = [
        gpu(index)._replace(device=gpu(index).device._replace(has_gpm=has))
        for index, has in enumerate(having)
    ]

    assert [expected] == statuses("GPM", frame(*gpus), grow(tmp_path, {}))


@pytest.mark.parametrize(
    ("expected", "files"), [("limited", {}), ("ok", {"dev/nvidiactl": "", "dev/nvidia0": ""})]
)
def test_device_files_decide_whether_programs_can_use_the_gpus(
    tmp_path: Path, expected: str, files: dict[str, str]
) -> None:
    """A container may see GPUs that it cannot open."""
    whole = gpu(0)._replace(device=gpu(0).device._replace(minor_number=0))

    assert [expected] == statuses("device files", frame(whole), grow(tmp_path, files))


def test_pressure_is_known_from_the_frame(tmp_path: Path) -> None:
    """A kernel without PSI is limited."""
    roots, counted = grow(tmp_path, {}), HostReading({"pressure_cpu_some_seconds_total": 1.0})

    assert [["limited"], ["ok"]] == [
        statuses("pressure (PSI)", frame(host=host), roots) for host in (None, counted)
    ]


def test_hidden_processes_are_limited(tmp_path: Path) -> None:
    """`hidepid` is found in the mounts of /proc."""
    roots = grow(tmp_path, {})
    grow(tmp_path, {"proc/self/mounts": f"proc {roots.proc} proc rw,hidepid=2 0 0\n"})

    assert ["limited"] == statuses("processes", frame(), roots)


def test_a_pid_namespace_of_a_container_is_limited(tmp_path: Path) -> None:
    """Its inode is not that of the machine's own."""
    roots = grow(tmp_path, {"proc/self/ns/pid": ""})

    assert ["limited"] == statuses("PID namespace", frame(), roots)


@pytest.mark.parametrize(("expected", "name"), [("ok", "tsc"), ("limited", "hpet")])
def test_a_slow_clock_is_limited(tmp_path: Path, expected: str, name: str) -> None:
    """It slows every program that asks for the time."""
    roots = grow(tmp_path, {"sys/devices/system/clocksource/clocksource0/current_clocksource": f"{name}\n"})

    assert [expected] == statuses("clock source", frame(), roots)


def test_every_limit_and_break_comes_with_a_detail(tmp_path: Path) -> None:
    """Nobody is told only that something is wrong."""
    checks = run_checks(frame(health=(MISSING,)), grow(tmp_path, CARD))

    assert [] == [check for check in checks if not check.detail]
