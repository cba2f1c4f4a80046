"""Who uses one GPU, put together from what the kernel and the driver say."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence

from gpulse.harvest.sight.contexts import Load
from gpulse.harvest.sight.holders import Identities
from gpulse.harvest.sight.seen import Holder, Use
from gpulse.model.process import GpuProcess

Files = Mapping[int, frozenset[int]]
"""By pid, the descriptors under which it has the GPU open."""


class Judge:
    """Tells whose a process is, and who it is."""

    def __init__(self, identities: Identities, is_ours: Callable[[int], bool], *, native: bool) -> None:
        """Prepare to judge.

        Args:
            identities: Who processes are.
            is_ours: Whether a process is of our own making.
            native: The driver's pids are those of our /proc; in a container they are the host's.
        """
        self._identities = identities
        self._is_ours = is_ours
        self._native = native
        self._self = os.getpid()

    def ours(self, pid: int) -> bool:
        """True for this process and everything it started."""
        return pid == self._self or self._is_ours(pid)

    def use(self, files: Files, load: Load, *, hidden: bool) -> Use:
        """One GPU, as far as it can be told who uses it.

        Args:
            files: Who has it open.
            load: What the driver says of it.
            hidden: Not all processes are in sight.
        """
        listed = {process.pid: process for process in load.processes or ()}
        believed = listed if self._native else {pid: listed[pid] for pid in listed if pid in files}
        strangers = [process for pid, process in listed.items() if pid not in believed]
        own = {pid for pid in (*files, *believed) if self.ours(pid)}
        others = dict.fromkeys(pid for pid in (*files, *believed) if pid not in own)
        silent = [pid for pid in others if pid not in believed]
        room = sum(pid not in believed and pid != self._self for pid in own)
        # Contexts that none of ours can have are those of others in sight, or of somebody out of sight.
        # Where nobody tells who has a context, everybody may.
        theirs = load.processes is None or len(strangers) > room
        unseen = strangers if len(strangers) > room + len(silent) else []
        holders = [
            self._holder(pid, files.get(pid, frozenset()), working=pid in believed or theirs)
            for pid in others
        ]
        holders.extend(Holder(process.pid, None, (), None, working=True) for process in unseen)
        unknown = load.trouble
        if unknown is None and load.processes is None and hidden:
            unknown = "neither the driver nor /proc shows all who use it"
        return Use(
            tuple(holder for holder in holders if holder is not None),
            unknown,
            utilization_ratio=load.utilization_ratio,
            memory_bytes=_unexplained(load.memory_bytes, list(listed.values())),
        )

    def _holder(self, pid: int, files: frozenset[int], *, working: bool) -> Holder | None:
        """One that is not ours, None when it is gone."""
        identity = self._identities.of(pid)
        if identity is not None:
            return Holder(pid, identity.start_ticks, identity.names, identity.user, working, files)
        return Holder(pid, None, (), None, working, files) if _is_alive(pid) else None


def _unexplained(used: int | None, listed: Sequence[GpuProcess]) -> int | None:
    """Memory in use by none of these, None when that is not known."""
    sizes = [process.gpu_memory_bytes for process in listed]
    known = [size for size in sizes if size is not None]
    return None if used is None or len(known) < len(sizes) else max(0, used - sum(known))


def _is_alive(pid: int) -> bool:
    """Whether there is such a process, even where /proc hides it."""
    try:
        os.close(os.pidfd_open(pid))
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
