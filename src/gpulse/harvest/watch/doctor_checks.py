"""Checks of `gpulse harvest doctor`: what harvest can see on this machine, what it would miss, and what to do."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing

from gpulse.errors import CollectionError
from gpulse.harvest.events import GpuHolder, MachineObservation, ObservedUse, UserPresence
from gpulse.harvest.settings import HarvestableGpu
from gpulse.harvest.watch.gpu_contexts import count_mig_instances, find_gpus
from gpulse.harvest.watch.inotify import Inotify, explain_inotify_error
from gpulse.harvest.watch.user_presence import UNKNOWN_PERSON, PresenceDetector, is_logind_available
from gpulse.harvest.watch.watcher import Watcher, is_native
from gpulse.sources.doctor_checks import Check
from gpulse.sources.nvml.read_timing import DriverTimeouts
from gpulse.sources.procfs import Roots, parse_mounts, read_bytes, text, try_read

_VISIBLE_HIDEPID_MODES = frozenset({"0", "off"})


def run_harvest_checks(
    now: float,
    roots: Roots = Roots(),  # noqa: B008  frozen
    timeouts: DriverTimeouts | None = None,
) -> list[Check]:
    """Run every check, from the driver to the people present; `now` is in epoch seconds."""
    try:
        gpus = find_gpus()
    except CollectionError as error:
        missing = Check("driver", "broken", f"{error.message}; no GPU can be harvested", error.hint)
        with closing(PresenceDetector(roots)) as people:
            present = people.look(now, ask=False)
        return [
            missing,
            _check_pid_namespace(roots),
            *_check_hidepid(roots),
            *_check_inotify(roots),
            *_check_people(present, roots),
        ]
    watcher = Watcher(gpus, is_ours=lambda _: False, roots=roots, people=True, timeouts=timeouts)
    with closing(watcher):
        observation = watcher.look(now)
        hidden, inotify_problem = watcher.hidden, watcher.inotify_problem
    return [
        _check_driver(gpus, observation),
        *_check_mig(gpus, count_mig_instances()),
        *_check_device_files(gpus, roots),
        _check_processes(hidden),
        *_check_hidepid(roots),
        _check_pid_namespace(roots),
        *_check_inotify(roots, inotify_problem),
        _check_persistence_daemon(roots),
        *_check_people(observation.people or (), roots),
        *_list_gpu_users(observation),
    ]


def _check_driver(gpus: Sequence[HarvestableGpu], observation: MachineObservation) -> Check:
    unknown = {index: use.unknown for index, use in observation.uses.items() if use.unknown}
    if unknown:
        index, why = next(iter(unknown.items()))
        return Check(
            "driver",
            "broken",
            f"cannot determine who uses {len(unknown)} of {len(gpus)} GPUs, which therefore count as busy (GPU {index}: {why})",
            "run `gpulse doctor`",
        )
    return Check(
        "driver",
        "ok",
        f"{len(gpus)} {'GPU' if len(gpus) == 1 else 'GPUs'}; the driver lists the processes on each GPU",
    )


def _check_mig(gpus: Sequence[HarvestableGpu], instances: Mapping[str, int]) -> Iterator[Check]:
    split = [
        f"GPU {gpu.index} is split into {instances[gpu.uuid]} instances"
        for gpu in gpus
        if gpu.uuid in instances
    ]
    if split:
        yield Check(
            "MIG",
            "limited",
            f"{', '.join(split)}; a GPU counts as busy while any of its instances is in use",
            "to run a program on one instance, set CUDA_VISIBLE_DEVICES=MIG-… in its env",
        )


def _check_device_files(gpus: Sequence[HarvestableGpu], roots: Roots) -> Iterator[Check]:
    paths = [f"{roots.dev}/nvidia{gpu.minor}" for gpu in gpus]
    missing = [path for path in paths if not os.path.exists(path)]
    closed = [path for path in paths if path not in missing and not os.access(path, os.R_OK | os.W_OK)]
    if missing:
        yield Check(
            "device files",
            "limited",
            f"missing: {', '.join(missing)}; programs cannot use these GPUs, and harvest notices use by others only at its next check",
            "run `nvidia-smi` once to create them; if this is a container, start the container with --gpus all",
        )
    if closed:
        yield Check(
            "device files",
            "broken",
            f"no permission to open {', '.join(closed)}",
            "join the group that owns the device files (video or render)",
        )
    if not missing and not closed:
        yield Check(
            "device files", "ok", f"all {len(paths)} device files in {roots.dev} can be opened and watched"
        )


def _check_processes(hidden: str | None) -> Check:
    if hidden is None:
        return Check("processes", "ok", "the open files of all users' processes can be read")
    return Check(
        "processes",
        "limited",
        f"{hidden}. When such a process opens a GPU, harvest notices this but cannot identify the process "
        "(ignore_programs applies only if the program was just started). While the process works on the GPU, the "
        "driver lists it. Harvest misses a process that opened a GPU before harvest started and does no work there",
        "run harvest as root, or grant it CAP_SYS_PTRACE (see contrib/systemd)",
    )


def _check_hidepid(roots: Roots) -> Iterator[Check]:
    """Check what the mount of /proc hides, where it hides anything."""
    try:
        mounts = parse_mounts(read_bytes(f"{roots.proc}/self/mounts"))
    except OSError:
        return
    proc = [mount for mount in mounts if mount.type == "proc" and mount.mount_point == roots.proc]
    options = proc[-1].options if proc else ()
    modes = [option.removeprefix("hidepid=") for option in options if option.startswith("hidepid=")]
    if modes and modes[-1] not in _VISIBLE_HIDEPID_MODES:
        yield Check(
            "hidepid",
            "ok" if os.geteuid() == 0 else "limited",
            f"{roots.proc} is mounted with hidepid={modes[-1]}: users cannot see each other's processes",
            None
            if os.geteuid() == 0
            else "run harvest as root, or join the group in the gid= option of that mount",
        )


def _check_pid_namespace(roots: Roots) -> Check:
    if is_native(roots):
        return Check(
            "PID namespace", "ok", "this is the host's namespace: the driver and /proc use the same PIDs"
        )
    return Check(
        "PID namespace",
        "limited",
        "this is a container's namespace: harvest cannot see processes outside the container, and does not notice that they open a GPU if they use their own "
        "device files. It detects other users of a GPU only by the number of processes on it",
        "run harvest on the host, or start the container with --pid=host",
    )


def _check_inotify(roots: Roots, problem: str | None = None) -> Iterator[Check]:
    if problem is None:
        try:
            Inotify().close()
        except OSError as error:
            problem = explain_inotify_error(error)
    if problem is not None:
        yield Check(
            "inotify",
            "limited",
            f"{problem}. Harvest notices GPU use by others only at its next check, up to one interval later",
            "raise the limits (sysctl fs.inotify), or check the permissions of the device files",
        )
        return
    limits = [
        f"{text(limit).strip()} {what}"
        for what in ("instances", "watches")
        if (limit := try_read(f"{roots.proc}/sys/fs/inotify/max_user_{what}")) is not None
    ]
    limit_note = f" (limits per user: {', '.join(limits)})" if limits else ""
    yield Check(
        "inotify",
        "ok",
        f"GPU use by others is detected immediately{limit_note}, except in containers with their own device files",
    )


def _check_persistence_daemon(roots: Roots) -> Check:
    if os.path.exists(f"{roots.run}/nvidia-persistenced/socket"):
        return Check(
            "persistence daemon",
            "ok",
            "running; it keeps the GPUs open, but no longer counts as a user after quiet_holder_seconds",
        )
    return Check(
        "persistence daemon", "ok", "not running; harvest itself keeps the GPUs initialized while it runs"
    )


def _check_people(people: Sequence[UserPresence], roots: Roots) -> Iterator[Check]:
    unseen = [person.where for person in people if person.user == UNKNOWN_PERSON]
    if unseen:
        yield Check(
            "people",
            "limited",
            f"cannot check {unseen[0]}: harvest must assume that somebody is present, so it runs no program while [people] is enabled",
            "mount devpts, check the permissions, or set enabled = false in [people]",
        )
    elif people:
        yield Check("people", "ok", f"present now: {', '.join(map(_describe_person, people))}")
    else:
        yield Check("people", "ok", "nobody is logged in at a terminal or a desktop")
    if is_logind_available(roots):
        yield Check("logind", "ok", "available; it reports desktop sessions and whether they are idle")
    else:
        yield Check(
            "logind",
            "limited",
            f"{roots.run}/systemd/sessions does not exist: harvest notices people at a desktop only through their terminals",
            "in a container, mount /run/systemd from the host",
        )


def _describe_person(presence: UserPresence) -> str:
    idle = presence.idle_seconds
    since = "idle time unknown" if idle is None else f"idle for {idle:.0f} s"
    return f"{presence.user} at {presence.where} ({since})"


def _list_gpu_users(observation: MachineObservation) -> Iterator[Check]:
    for index, use in sorted(observation.uses.items()):
        yield Check(f"gpu {index}", "ok", _describe_use(use))


def _describe_use(use: ObservedUse) -> str:
    if not use.holders:
        return "not in use" if use.unknown is None else f"unknown: {use.unknown}"
    return "; ".join(map(_describe_holder, use.holders))


def _describe_holder(holder: GpuHolder) -> str:
    name = holder.names[0] if holder.names else "a process"
    what = "is using it" if holder.working else "has it open"
    return f"{name} (pid {holder.pid}, {holder.user or 'user unknown'}) {what}"
