"""Checks of `gpulse doctor`: what works on this machine, what does not, and what to do about it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Literal, NamedTuple

from gpulse.model.frame import Frame
from gpulse.sources.procfs import Roots, try_read
from gpulse.sources.python_stacks import (
    YAMA_NOBODY,
    YAMA_ROOT_ONLY,
    describe_missing_py_spy,
    find_py_spy,
    yama_scope,
)

CheckStatus = Literal["ok", "limited", "broken"]
INITIAL_PID_NAMESPACE = 4026531836
_NVIDIA_VENDOR = b"0x10de"
_DISPLAY_CLASSES = (b"0x03", b"0x12")
_SLOW_CLOCKS = frozenset({"hpet", "acpi_pm", "jiffies"})


class Check(NamedTuple):
    """Result of one check."""

    topic: str
    status: CheckStatus
    detail: str
    advice: str | None = None


def run_checks(frame: Frame, roots: Roots) -> list[Check]:
    """Run every check, from the driver to the clock; `frame` is a sample that waited for the slow readings too."""
    return [
        *_check_driver(frame, roots),
        *_check_gpus(frame),
        *_check_device_files(frame, roots),
        *_check_gpm(frame),
        _check_pressure(frame),
        *_check_processes(frame, roots),
        _check_pid_namespace(roots),
        _check_cgroups(roots),
        _check_clock(roots),
        _check_code_lines(roots, find_py_spy()),
    ]


def _check_driver(frame: Frame, roots: Roots) -> Iterator[Check]:
    trouble = next((h for h in frame.health if h.source == "nvml" and h.subject is None), None)
    if trouble is None:
        yield Check(
            "driver",
            "ok",
            f"{frame.node.driver or 'version unknown'}, CUDA up to {frame.node.cuda or 'unknown'}",
        )
        kernel = _is_kernel_module_loaded(roots)
        if kernel and frame.node.driver and kernel != frame.node.driver:
            yield Check(
                "driver",
                "broken",
                f"version mismatch: kernel module {kernel}, library {frame.node.driver}",
                "reload the kernel module or reboot",
            )
        return
    cards = _count_nvidia_cards(roots)
    if cards or trouble.code != "driver_missing":
        found = f"; NVIDIA devices on the PCI bus: {len(cards)}" if cards else ""
        yield Check("driver", "broken", f"{trouble.detail}{found}", trouble.hint)
    else:
        yield Check(
            "driver",
            "limited",
            "no NVIDIA GPU on the PCI bus, and no NVIDIA driver",
            "run `gpulse --demo` to see what gpulse shows on a GPU machine",
        )


def _is_kernel_module_loaded(roots: Roots) -> str | None:
    raw = try_read(f"{roots.sys}/module/nvidia/version")
    return None if raw is None else raw.decode("ascii", "replace").strip()


def _count_nvidia_cards(roots: Roots) -> list[str]:
    base = f"{roots.sys}/bus/pci/devices"
    try:
        slots = sorted(os.listdir(base))
    except OSError:
        return []
    return [
        slot
        for slot in slots
        if (try_read(f"{base}/{slot}/vendor") or b"").strip() == _NVIDIA_VENDOR
        and (try_read(f"{base}/{slot}/class") or b"").startswith(_DISPLAY_CLASSES)
    ]


def _check_gpus(frame: Frame) -> Iterator[Check]:
    for gpu in frame.gpus:
        subject = f"gpu {gpu.device.label}"
        entries = [h for h in frame.health if h.subject in (subject, gpu.device.uuid)]
        problems = [h for h in entries if h.is_problem and h.code != "no_permission"]
        refused = [name for h in entries if h.code == "no_permission" for name in h.metrics]
        unknown = [name for h in entries if h.code == "not_supported" for name in h.metrics]
        if problems:
            yield from (Check(subject, "broken", f"{gpu.device.name}: {h.detail}", h.hint) for h in problems)
            continue
        lacks = f"; does not report {', '.join(unknown)}" if unknown else ""
        yield Check(subject, "ok", f"{gpu.device.name}, {len(gpu.values)} readings{lacks}")
        if refused:
            yield Check(
                subject,
                "limited",
                f"no permission to read {', '.join(refused)}",
                "ask the administrator for access, or run as root",
            )


def _check_device_files(frame: Frame, roots: Roots) -> Iterator[Check]:
    if not frame.gpus:
        return
    names = [
        "nvidiactl",
        *(f"nvidia{g.device.minor_number}" for g in frame.gpus if g.device.minor_number is not None),
    ]
    present = [name for name in dict.fromkeys(names) if os.path.exists(f"{roots.dev}/{name}")]
    closed = [name for name in present if not os.access(f"{roots.dev}/{name}", os.R_OK | os.W_OK)]
    if closed:
        yield Check(
            "device files",
            "broken",
            f"no permission to open {', '.join(closed)}",
            "join the group that owns the device files (video or render)",
        )
    elif present:
        yield Check(
            "device files", "ok", f"all NVIDIA device files in {roots.dev} can be opened ({len(present)})"
        )
    else:
        yield Check(
            "device files",
            "limited",
            f"no nvidia* files in {roots.dev}: programs here cannot use the GPUs",
            "if gpulse runs in a container, start the container with --gpus all",
        )


def _check_gpm(frame: Frame) -> Iterator[Check]:
    whole = [gpu for gpu in frame.gpus if gpu.device.mig_index is None and gpu.values]
    if not whole:
        return
    having = [gpu for gpu in whole if gpu.device.has_gpm]
    if len(having) == len(whole):
        yield Check(
            "GPM",
            "ok",
            "reports SM, tensor core, memory and PCIe activity of every GPU, without root privileges",
        )
    elif having:
        yield Check(
            "GPM",
            "limited",
            f"available on only {len(having)} of {len(whole)} GPUs",
            "GPM requires Hopper or newer",
        )
    else:
        yield Check(
            "GPM",
            "limited",
            "not available on any GPU here, so SM and tensor core activity is unknown",
            "GPM requires Hopper or newer and driver 520 or newer",
        )


def _check_pressure(frame: Frame) -> Check:
    known = frame.host is not None and "pressure_cpu_some_seconds_total" in frame.host.values
    if known:
        return Check("pressure (PSI)", "ok", "the kernel reports time spent waiting for CPU, disk and memory")
    return Check(
        "pressure (PSI)",
        "limited",
        "the kernel does not report pressure stall information",
        "boot the kernel with psi=1",
    )


def _check_processes(frame: Frame, roots: Roots) -> Iterator[Check]:
    hidden = [h for h in frame.health if h.source == "processes" and h.code == "not_visible"]
    if hidden:
        yield Check(
            "processes",
            "limited",
            f"{len(hidden)} {'process' if len(hidden) == 1 else 'processes'} on the GPUs cannot be seen from here",
            hidden[0].hint,
        )
    if _hides_processes(roots):
        yield Check(
            "processes",
            "limited",
            "/proc is mounted with hidepid: other users' processes are invisible",
            "ask the administrator to add you to the group in the gid= option of that mount",
        )
    elif os.geteuid() == 0:
        yield Check("processes", "ok", "running as root: all data of all processes can be read")
    else:
        yield Check(
            "processes",
            "ok",
            "names and CPU use of all processes can be read, but disk use only for your own processes",
        )


def _hides_processes(roots: Roots) -> bool:
    for line in (try_read(f"{roots.proc}/self/mounts") or b"").splitlines():
        parts = line.split()
        if len(parts) >= 4 and parts[2] == b"proc" and parts[1] == os.fsencode(roots.proc):
            options = parts[3].split(b",")
            return any(o.startswith(b"hidepid=") and o not in (b"hidepid=0", b"hidepid=off") for o in options)
    return False


def _check_pid_namespace(roots: Roots) -> Check:
    try:
        inode = os.stat(f"{roots.proc}/self/ns/pid").st_ino
    except OSError:
        return Check("PID namespace", "limited", "unknown", None)
    if inode == INITIAL_PID_NAMESPACE:
        return Check("PID namespace", "ok", "gpulse runs on the host: the driver and /proc use the same PIDs")
    return Check(
        "PID namespace",
        "limited",
        "gpulse runs in a container: the driver reports host PIDs, so some processes cannot be identified",
        "run gpulse on the host, or start the container with --pid=host",
    )


def _check_cgroups(roots: Roots) -> Check:
    if os.path.exists(f"{roots.sys}/fs/cgroup/cgroup.controllers"):
        return Check("cgroups", "ok", "version 2")
    if os.path.isdir(f"{roots.sys}/fs/cgroup"):
        return Check("cgroups", "ok", "version 1, or hybrid (versions 1 and 2)")
    return Check(
        "cgroups",
        "limited",
        "not mounted: limits of jobs and containers are unknown",
        "mount /sys/fs/cgroup",
    )


def _check_clock(roots: Roots) -> Check:
    raw = try_read(f"{roots.sys}/devices/system/clocksource/clocksource0/current_clocksource")
    if raw is None:
        return Check("clock source", "limited", "unknown", None)
    name = raw.decode("ascii", "replace").strip()
    if name in _SLOW_CLOCKS:
        return Check(
            "clock source",
            "limited",
            f"{name} is slow; it slows down every program that reads the time",
            "`dmesg | grep -i tsc` shows why the kernel does not use tsc",
        )
    return Check("clock source", "ok", name)


def _check_code_lines(roots: Roots, py_spy: str | None) -> Check:
    """Check whether `gpulse why` can name lines of code."""
    if py_spy is None:
        problem = describe_missing_py_spy()
        return Check(
            "lines of code",
            "limited",
            f"{problem.reason}, so `gpulse why` cannot name lines of code",
            problem.hint,
        )
    if os.geteuid() == 0:
        if yama_scope(roots) == YAMA_NOBODY:
            return Check("lines of code", "limited", _UNREADABLE, _LOWER_SCOPE)
        return Check("lines of code", "ok", "`gpulse why` can name the lines of all Python programs")
    scope = yama_scope(roots) or 0
    if scope == YAMA_NOBODY:
        return Check("lines of code", "limited", _UNREADABLE, _LOWER_SCOPE)
    if scope == YAMA_ROOT_ONLY:
        return Check(
            "lines of code",
            "limited",
            "only root can read stacks: kernel.yama.ptrace_scope is 2",
            "run `gpulse why` as root",
        )
    if scope:
        return Check(
            "lines of code",
            "limited",
            f"available only for programs started by `gpulse why -- COMMAND`: kernel.yama.ptrace_scope is {scope}",
            "for programs that are already running, run `gpulse why` as root, or set kernel.yama.ptrace_scope to 0",
        )
    return Check("lines of code", "ok", "`gpulse why` can name the lines of your own Python programs")


_UNREADABLE = "nobody can read stacks: kernel.yama.ptrace_scope is 3"
_LOWER_SCOPE = "set a lower kernel.yama.ptrace_scope and reboot"
