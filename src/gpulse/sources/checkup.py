"""What works on this machine, what does not, and what to do about it: the facts behind `gpulse doctor`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Literal, NamedTuple

from gpulse.model.frame import Frame
from gpulse.sources.procfs import Roots, try_read

Status = Literal["ok", "limited", "broken"]
INITIAL_PID_NAMESPACE = 4026531836
_NVIDIA_VENDOR = b"0x10de"
_DISPLAY_CLASSES = (b"0x03", b"0x12")
_SLOW_CLOCKS = frozenset({"hpet", "acpi_pm", "jiffies"})


class Check(NamedTuple):
    """One thing that was looked at."""

    topic: str
    status: Status
    detail: str
    advice: str | None = None


def checkup(frame: Frame, roots: Roots) -> list[Check]:
    """Every check, from the driver to the clock; `frame` is a patient sample of this machine."""
    return [
        *_driver(frame, roots),
        *_gpus(frame),
        *_device_files(frame, roots),
        *_gpm(frame),
        _pressure(frame),
        *_processes(frame, roots),
        _namespace(roots),
        _cgroups(roots),
        _clock(roots),
    ]


def _driver(frame: Frame, roots: Roots) -> Iterator[Check]:
    trouble = next((h for h in frame.health if h.source == "nvml" and h.subject is None), None)
    if trouble is None:
        yield Check(
            "driver",
            "ok",
            f"{frame.node.driver or 'version unknown'}, CUDA up to {frame.node.cuda or 'unknown'}",
        )
        kernel = _kernel_module(roots)
        if kernel and frame.node.driver and kernel != frame.node.driver:
            yield Check(
                "driver",
                "broken",
                f"the kernel module is {kernel}, the library {frame.node.driver}",
                "reload the kernel module or reboot",
            )
        return
    cards = _nvidia_cards(roots)
    if cards or trouble.code != "driver_missing":
        found = f"; {len(cards)} NVIDIA device(s) on the PCI bus" if cards else ""
        yield Check("driver", "broken", f"{trouble.detail}{found}", trouble.hint)
    else:
        yield Check(
            "driver",
            "limited",
            "no NVIDIA GPU on the PCI bus, and no driver",
            "`gpulse --demo` shows what a GPU machine looks like",
        )


def _kernel_module(roots: Roots) -> str | None:
    raw = try_read(f"{roots.sys}/module/nvidia/version")
    return None if raw is None else raw.decode("ascii", "replace").strip()


def _nvidia_cards(roots: Roots) -> list[str]:
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


def _gpus(frame: Frame) -> Iterator[Check]:
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
                f"this user may not read {', '.join(refused)}",
                "ask the administrator, or run as root",
            )


def _device_files(frame: Frame, roots: Roots) -> Iterator[Check]:
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
            f"this user may not open {', '.join(closed)}",
            "join the group that owns them (video, render)",
        )
    elif present:
        yield Check("device files", "ok", f"{len(present)} under {roots.dev} can be opened")
    else:
        yield Check(
            "device files",
            "limited",
            f"no /dev/nvidia* under {roots.dev}: programs here cannot use the GPUs",
            "in a container, start it with the GPUs (--gpus all)",
        )


def _gpm(frame: Frame) -> Iterator[Check]:
    whole = [gpu for gpu in frame.gpus if gpu.device.mig_index is None and gpu.values]
    if not whole:
        return
    having = [gpu for gpu in whole if gpu.device.has_gpm]
    if len(having) == len(whole):
        yield Check("GPM", "ok", "SM, tensor, memory and PCIe activity on every GPU, without root")
    elif having:
        yield Check("GPM", "limited", f"on {len(having)} of {len(whole)} GPUs", "GPM needs Hopper or later")
    else:
        yield Check(
            "GPM",
            "limited",
            "no GPU here reports it, so SM and tensor activity stay unknown",
            "GPM needs Hopper or later and driver 520 or later",
        )


def _pressure(frame: Frame) -> Check:
    known = frame.host is not None and "pressure_cpu_some_seconds_total" in frame.host.values
    if known:
        return Check("pressure (PSI)", "ok", "the kernel counts time spent waiting for CPU, disk and memory")
    return Check("pressure (PSI)", "limited", "the kernel does not count it", "boot with psi=1")


def _processes(frame: Frame, roots: Roots) -> Iterator[Check]:
    hidden = [h for h in frame.health if h.source == "processes" and h.code == "not_visible"]
    if hidden:
        yield Check(
            "processes",
            "limited",
            f"{len(hidden)} process(es) on the GPUs cannot be seen from here",
            hidden[0].hint,
        )
    if _hides_processes(roots):
        yield Check(
            "processes",
            "limited",
            "/proc is mounted with hidepid: other users' processes are invisible",
            "ask the administrator to add you to its gid= group",
        )
    elif os.geteuid() == 0:
        yield Check("processes", "ok", "running as root: everything of every process can be read")
    else:
        yield Check("processes", "ok", "names and CPU use of all users, disk use only of your own processes")


def _hides_processes(roots: Roots) -> bool:
    for line in (try_read(f"{roots.proc}/self/mounts") or b"").splitlines():
        parts = line.split()
        if len(parts) >= 4 and parts[2] == b"proc" and parts[1] == os.fsencode(roots.proc):
            options = parts[3].split(b",")
            return any(o.startswith(b"hidepid=") and o not in (b"hidepid=0", b"hidepid=off") for o in options)
    return False


def _namespace(roots: Roots) -> Check:
    try:
        inode = os.stat(f"{roots.proc}/self/ns/pid").st_ino
    except OSError:
        return Check("PID namespace", "limited", "cannot be determined", None)
    if inode == INITIAL_PID_NAMESPACE:
        return Check("PID namespace", "ok", "the machine's own: the driver's pids are ours")
    return Check(
        "PID namespace",
        "limited",
        "a container's: the driver names processes by the host's pids, so some cannot be told apart",
        "run gpulse on the host, or start the container with --pid=host",
    )


def _cgroups(roots: Roots) -> Check:
    if os.path.exists(f"{roots.sys}/fs/cgroup/cgroup.controllers"):
        return Check("cgroups", "ok", "version 2")
    if os.path.isdir(f"{roots.sys}/fs/cgroup"):
        return Check("cgroups", "ok", "version 1 or hybrid")
    return Check(
        "cgroups",
        "limited",
        "not mounted: limits of jobs and containers stay unknown",
        "mount /sys/fs/cgroup",
    )


def _clock(roots: Roots) -> Check:
    raw = try_read(f"{roots.sys}/devices/system/clocksource/clocksource0/current_clocksource")
    if raw is None:
        return Check("clock source", "limited", "cannot be determined", None)
    name = raw.decode("ascii", "replace").strip()
    if name in _SLOW_CLOCKS:
        return Check(
            "clock source",
            "limited",
            f"{name}: reading the time is slow, which slows every program",
            "see `dmesg | grep -i tsc` for why tsc is not used",
        )
    return Check("clock source", "ok", name)
