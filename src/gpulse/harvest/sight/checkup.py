"""What harvest can see on this machine, what it would miss, and what to do about it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing

from gpulse.errors import CollectionError
from gpulse.harvest.settings import Gpu
from gpulse.harvest.sight import logind
from gpulse.harvest.sight.contexts import find_gpus, split_gpus
from gpulse.harvest.sight.inotify import Inotify, reason
from gpulse.harvest.sight.people import SOMEBODY, People
from gpulse.harvest.sight.seen import Holder, Presence, Sighting, Use
from gpulse.harvest.sight.sight import Sight, is_native
from gpulse.sources.checkup import Check
from gpulse.sources.nvml.cadence import Patience
from gpulse.sources.procfs import Roots, parse_mounts, read_bytes, text, try_read

_OPEN_MODES = frozenset({"0", "off"})


def checkup(now: float, roots: Roots = Roots(), patience: Patience | None = None) -> list[Check]:  # noqa: B008  frozen
    """Every check, from the driver to who is here; `now` is in epoch seconds."""
    try:
        gpus = find_gpus()
    except CollectionError as error:
        missing = Check("driver", "broken", f"{error.message}: there is nothing to harvest", error.hint)
        with closing(People(roots)) as people:
            present = people.look(now, ask=False)
        return [missing, _namespace(roots), *_hiding(roots), *_inotify(roots), *_people(present, roots)]
    sight = Sight(gpus, is_ours=lambda _: False, roots=roots, people=True, patience=patience)
    with closing(sight):
        sighting = sight.look(now)
        hidden, why_blind = sight.hidden, sight.why_blind
    return [
        _driver(gpus, sighting),
        *_split(gpus, split_gpus()),
        *_device_files(gpus, roots),
        _processes(hidden),
        *_hiding(roots),
        _namespace(roots),
        *_inotify(roots, why_blind),
        _persistence(roots),
        *_people(sighting.people or (), roots),
        *_users(sighting),
    ]


def _driver(gpus: Sequence[Gpu], sighting: Sighting) -> Check:
    unknown = {index: use.unknown for index, use in sighting.uses.items() if use.unknown}
    if unknown:
        index, why = next(iter(unknown.items()))
        return Check(
            "driver",
            "broken",
            f"who is on {len(unknown)} of {len(gpus)} GPUs is not known (GPU {index}: {why}), so they count as busy",
            "see `gpulse doctor`",
        )
    return Check("driver", "ok", f"{len(gpus)} GPU(s), with the processes that have a context on each")


def _split(gpus: Sequence[Gpu], instances: Mapping[str, int]) -> Iterator[Check]:
    split = [f"GPU {gpu.index} into {instances[gpu.uuid]}" for gpu in gpus if gpu.uuid in instances]
    if split:
        yield Check(
            "MIG",
            "limited",
            f"split: {', '.join(split)}; a GPU counts as busy while one of its instances is used",
            "name an instance in the program's environment (CUDA_VISIBLE_DEVICES=MIG-…)",
        )


def _device_files(gpus: Sequence[Gpu], roots: Roots) -> Iterator[Check]:
    paths = [f"{roots.dev}/nvidia{gpu.minor}" for gpu in gpus]
    missing = [path for path in paths if not os.path.exists(path)]
    closed = [path for path in paths if path not in missing and not os.access(path, os.R_OK | os.W_OK)]
    if missing:
        yield Check(
            "device files",
            "limited",
            f"{', '.join(missing)} not here: opens of it are seen at the next look, and programs cannot use it",
            "run `nvidia-smi` once, which makes them; in a container, start it with the GPUs (--gpus all)",
        )
    if closed:
        yield Check(
            "device files",
            "broken",
            f"this user may not open {', '.join(closed)}",
            "join the group that owns them (video, render)",
        )
    if not missing and not closed:
        yield Check("device files", "ok", f"{len(paths)} under {roots.dev} can be opened and watched")


def _processes(hidden: str | None) -> Check:
    if hidden is None:
        return Check("processes", "ok", "every process of every user can be looked into")
    return Check(
        "processes",
        "limited",
        f"{hidden}. Their opens are seen as somebody's, without a name (ignore_programs applies to programs "
        "that were just started), and their work when the driver lists it; one that has a GPU open without "
        "working on it, and opened it before harvest began, is missed",
        "run harvest as root, or give it CAP_SYS_PTRACE (see contrib/systemd)",
    )


def _hiding(roots: Roots) -> Iterator[Check]:
    """What the mount of /proc hides, where it hides anything."""
    try:
        mounts = parse_mounts(read_bytes(f"{roots.proc}/self/mounts"))
    except OSError:
        return
    proc = [mount for mount in mounts if mount.type == "proc" and mount.mount_point == roots.proc]
    options = proc[-1].options if proc else ()
    modes = [option.removeprefix("hidepid=") for option in options if option.startswith("hidepid=")]
    if modes and modes[-1] not in _OPEN_MODES:
        yield Check(
            "hidepid",
            "ok" if os.geteuid() == 0 else "limited",
            f"{roots.proc} is mounted with hidepid={modes[-1]}: users do not see each other's processes",
            None if os.geteuid() == 0 else "run harvest as root, or join the group of its gid= option",
        )


def _namespace(roots: Roots) -> Check:
    if is_native(roots):
        return Check("PID namespace", "ok", "the machine's own: the driver's pids are ours")
    return Check(
        "PID namespace",
        "limited",
        "a container's: processes outside are out of sight, their opens too where they have device files of "
        "their own. Who works on a GPU is told apart from our programs by their number alone",
        "run harvest on the host, or start the container with --pid=host",
    )


def _inotify(roots: Roots, trouble: str | None = None) -> Iterator[Check]:
    if trouble is None:
        try:
            Inotify().close()
        except OSError as error:
            trouble = reason(error)
    if trouble is not None:
        yield Check(
            "inotify",
            "limited",
            f"{trouble}. Opens are seen at the next look, after up to an interval",
            "raise the limits (sysctl fs.inotify), or see the permissions of the device files",
        )
        return
    limits = [
        f"{text(limit).strip()} {what}"
        for what in ("instances", "watches")
        if (limit := try_read(f"{roots.proc}/sys/fs/inotify/max_user_{what}")) is not None
    ]
    told = f" (at most {', '.join(limits)} a user)" if limits else ""
    yield Check(
        "inotify", "ok", f"opens are seen at once{told}; containers with device files of their own escape it"
    )


def _persistence(roots: Roots) -> Check:
    if os.path.exists(f"{roots.run}/nvidia-persistenced/socket"):
        return Check(
            "persistence daemon",
            "ok",
            "runs: it has the GPUs open and stops counting as a user after a while",
        )
    return Check(
        "persistence daemon", "ok", "does not run: harvest itself keeps the GPUs awake while it runs"
    )


def _people(people: Sequence[Presence], roots: Roots) -> Iterator[Check]:
    unseen = [person.where for person in people if person.user == SOMEBODY]
    if unseen:
        yield Check(
            "people",
            "limited",
            f"there is {unseen[0]}, so that somebody counts as being there: nothing runs while people are watched",
            "mount devpts, see the permissions, or do not watch people",
        )
    elif people:
        yield Check("people", "ok", f"here now: {', '.join(map(_person, people))}")
    else:
        yield Check("people", "ok", "nobody is at a terminal or a desktop")
    if logind.is_available(roots):
        yield Check("logind", "ok", "tells who sits at a desktop, and whether they are idle")
    else:
        yield Check(
            "logind",
            "limited",
            f"no {roots.run}/systemd/sessions: people at a desktop are seen only by their terminals",
            "in a container, mount /run/systemd from the host",
        )


def _person(presence: Presence) -> str:
    idle = presence.idle_seconds
    since = "idle for an unknown time" if idle is None else f"idle for {idle:.0f} s"
    return f"{presence.user} at {presence.where} ({since})"


def _users(sighting: Sighting) -> Iterator[Check]:
    for index, use in sorted(sighting.uses.items()):
        yield Check(f"gpu {index}", "ok", _told(use))


def _told(use: Use) -> str:
    if not use.holders:
        return "nobody has it open" if use.unknown is None else f"not known: {use.unknown}"
    return "; ".join(map(_holder, use.holders))


def _holder(holder: Holder) -> str:
    name = holder.names[0] if holder.names else "a process"
    what = "works on it" if holder.working else "has it open"
    return f"{name} (pid {holder.pid}, {holder.user or 'user unknown'}) {what}"
