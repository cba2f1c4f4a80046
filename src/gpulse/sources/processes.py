"""Read the processes that use a GPU and their descendants: identity, resource use, threads, PID namespaces."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from heapq import nlargest

from gpulse.model.frame import CgroupReading
from gpulse.model.metric_catalog import Values
from gpulse.model.process import Owner, ProcessIdentity, ProcessReading, Thread
from gpulse.model.source_health import Health
from gpulse.sources.cgroups import CgroupReader, Paths, main_path
from gpulse.sources.harvest_status import PublishedHarvests, find_program
from gpulse.sources.process_owners import JobRegistry, find_owner
from gpulse.sources.procfs import (
    KernelFile,
    PidStat,
    ProcessDescendants,
    Roots,
    is_due,
    list_names,
    parse_cgroup,
    parse_command,
    parse_cpu_list,
    parse_pid_io,
    parse_pid_stat,
    parse_pid_status,
    parse_schedstat,
    parse_stat,
    read_bytes,
    read_link,
    read_record,
    text,
    try_read,
)
from gpulse.sources.slurm import JobEnvironment, parse_environ

_SCAN_SECONDS = 1.0
_MANY_SCAN_SECONDS = 5.0
"""Time between two scans of a process with more threads than are read in between: PyTorch starts hundreds."""
_MAX_BUSY_THREADS = 8


class ThreadReader:
    """Reads all threads of one process now and then, and in between those that used the most CPU time."""

    def __init__(self, folder: str, pid: int, details_seconds: float = 0.0) -> None:
        """Prepare to read.

        Args:
            folder: Of the process in /proc.
            pid: Of the process.
            details_seconds: How often the run-queue waits are read; they are missing in between.
        """
        self._folder = f"{folder}/task"
        self._pid = pid
        self._details_seconds = details_seconds
        self._ticks_per_second = os.sysconf("SC_CLK_TCK")
        self._scanned_at: float | None = None
        self._detailed_at: float | None = None
        self._count = 0
        self._ticks: dict[int, int] = {}
        self._busiest: list[int] = []
        self._files: dict[int, KernelFile] = {}
        """The files of the busiest threads."""

    def read(self, now: float, count: int) -> tuple[Thread, ...]:
        """Return the main thread, then the others, those that used the most CPU time since the last scan first.

        Args:
            now: Epoch seconds.
            count: How many threads the process has: a change means that there are new ones.
        """
        period = _SCAN_SECONDS if count <= _MAX_BUSY_THREADS else _MANY_SCAN_SECONDS
        if count != self._count or is_due(now, self._scanned_at, period):
            self._scanned_at, self._count = now, count
            stats = self._scan(count)
        else:
            stats = self._read_stats(self._busiest)
        with_waits = is_due(now, self._detailed_at, 0.9 * self._details_seconds)
        if with_waits:
            self._detailed_at = now
        return tuple(self._thread(tid, stats[tid], with_waits) for tid in self._busiest if tid in stats)

    def _scan(self, count: int) -> dict[int, PidStat]:
        stats = self._read_stats(self._busiest) if len(self._busiest) == count else {}
        if len(stats) != count:  # otherwise these are still all threads
            stats = self._read_stats(int(name) for name in list_names(self._folder) if name.isdecimal())
        ticks = {tid: stat.user_ticks + stat.system_ticks for tid, stat in stats.items()}
        growth = {tid: (total - self._ticks.get(tid, 0), total) for tid, total in ticks.items()}
        others = [
            tid for tid in nlargest(_MAX_BUSY_THREADS, growth, key=growth.__getitem__) if tid != self._pid
        ]
        self._busiest = [self._pid, *others]
        self._files = {
            tid: self._files.get(tid) or KernelFile(f"{self._folder}/{tid}/stat") for tid in self._busiest
        }
        self._ticks = ticks
        return stats

    def _read_stats(self, tids: Iterable[int]) -> dict[int, PidStat]:
        """Return what can be read of these threads."""
        stats: dict[int, PidStat] = {}
        for tid in tids:
            file = self._files.get(tid)
            try:
                data = read_record(f"{self._folder}/{tid}/stat") if file is None else file.read_record()
            except OSError:
                continue
            if (stat := parse_pid_stat(data)) is not None:
                stats[tid] = stat
        return stats

    def _thread(self, tid: int, stat: PidStat, with_waits: bool) -> Thread:
        schedule = parse_schedstat(try_read(f"{self._folder}/{tid}/schedstat") or b"") if with_waits else None
        return Thread(
            tid=tid,
            name=text(stat.comm),
            state=stat.state,
            cpu_seconds_total=(stat.user_ticks + stat.system_ticks) / self._ticks_per_second,
            run_wait_seconds_total=None if schedule is None else schedule.wait_nanoseconds / 1e9,
        )


_HOST_PID_NAMESPACES = frozenset({"pid:[4026531836]"})
"""The initial PID namespace, in which the driver's PIDs are valid."""
_FOREIGN_PID_SECONDS = 3.0
"""A process that ended stays on the driver's list briefly; one that stays longer but is not in /proc is not ours."""
_HELD_SECONDS, _NOT_HELD_SECONDS = 30.0, 1.0


class PidTranslator:
    """Translates the driver's PIDs to PIDs of this /proc.

    On the host both are the same. In a container older drivers report host PIDs; newer ones report the container's
    own PIDs and leave out all other processes (seen with driver 580). No driver mixes them: if one PID stays on the list
    that is no process here with a GPU open, all of them are host PIDs, and one that matches a process here does so by chance.
    """

    def __init__(self, roots: Roots) -> None:
        self._roots = roots
        self._own = read_link(f"{roots.proc}/self/ns/pid")
        self._is_native = self._own is None or self._own in _HOST_PID_NAMESPACES
        status = parse_pid_status(try_read(f"{roots.proc}/self/status") or b"")
        self._depth = max(0, len(status.namespace_pids) - 1)
        """Number of PID namespaces between that of /proc and ours."""
        self._inner: dict[int, int] = {}
        self._inner_at: float | None = None
        self._held: dict[int, tuple[float, bool | None]] = {}
        self._strays: dict[int, float] = {}
        self._fitted = False
        self._is_foreign = False

    def believed(self, now: float, numbers: Collection[int], gone: Collection[int] = ()) -> Mapping[int, int]:
        """Return the driver's PIDs that are processes of this /proc, running or ended, each with its PID in /proc.

        Args:
            now: Epoch seconds.
            numbers: PIDs that the driver lists.
            gone: Those that were translated before and have ended since.
        """
        if self._is_native:
            return {number: number for number in numbers}
        if self._depth and (inner := self._translated(now, numbers)):
            return inner
        self._held = {number: self._look(number, now) for number in numbers if number not in gone}
        strays = [number for number, (_, holds) in self._held.items() if holds is False]
        self._strays = {number: min(self._strays.get(number, now), now) for number in strays}
        if any(now - since >= _FOREIGN_PID_SECONDS for since in self._strays.values()):
            self._is_foreign = True
        self._fitted = self._fitted or not strays
        if self._is_foreign or (strays and not self._fitted):
            return {}
        return {number: number for number in numbers if number in gone or self._held[number][1]}

    def _look(self, pid: int, now: float) -> tuple[float, bool | None]:
        at, holds = self._held.get(pid, (None, None))
        if at is not None and not is_due(now, at, _HELD_SECONDS if holds else _NOT_HELD_SECONDS):
            return at, holds
        seen = holds_gpu(self._roots, f"{self._roots.proc}/{pid}")
        return now, holds if seen is None else seen

    def _translated(self, now: float, numbers: Collection[int]) -> Mapping[int, int]:
        """Translate PIDs of our namespace to those of the outer one whose /proc we read; empty unless all are ours."""
        is_new = not self._inner.keys() >= set(numbers)
        if is_due(now, self._inner_at, _NOT_HELD_SECONDS if is_new else _HELD_SECONDS):
            self._inner_at, self._inner = now, self._neighbours()
        if not self._inner.keys() >= set(numbers):
            return {}
        return {number: self._inner[number] for number in numbers}

    def _neighbours(self) -> dict[int, int]:
        """Return the processes of our namespace that have a GPU open, by PID in our namespace."""
        found: dict[int, int] = {}
        for name in list_names(self._roots.proc):
            folder = f"{self._roots.proc}/{name}"
            if (
                name.isdecimal()
                and read_link(f"{folder}/ns/pid") == self._own
                and holds_gpu(self._roots, folder)
            ):
                pids = parse_pid_status(try_read(f"{folder}/status") or b"").namespace_pids
                if len(pids) > self._depth:
                    found[pids[self._depth]] = int(name)
        return found


def holds_gpu(roots: Roots, folder: str) -> bool | None:
    """Return whether a process has a GPU's device file open; None when its files cannot be read.

    A process that is ending has closed all its files, and may stay on the driver's list for a long time.
    """
    prefix = f"{roots.dev}/nvidia"
    try:
        descriptors = os.listdir(f"{folder}/fd")
    except PermissionError:
        return None
    except OSError:
        return False
    if not descriptors:
        return None
    targets = (read_link(f"{folder}/fd/{descriptor}") for descriptor in descriptors)
    return any(target is not None and target.startswith(prefix) for target in targets)


_REFRESH_SECONDS = 30.0
_YOUNG_SECONDS = 5.0
_YOUNG_REFRESH_SECONDS = 1.0
_MAX_COMMAND_BYTES = 1 << 15
_MAX_ENVIRON_BYTES = 1 << 18
_IO_METRICS = ("read_chars_total", "written_chars_total", "read_bytes_total", "written_bytes_total")
"""Metric names, in the order of PidIo."""
_DEAD_STATES = frozenset("ZXx")


class _TrackedProcess:
    """Cached state of one process between two readings."""

    __slots__ = (
        "blank_since",
        "comm",
        "cpus_allowed",
        "detailed_at",
        "details",
        "details_data",
        "folder",
        "groups",
        "identified_at",
        "identity",
        "io_file",
        "job_environment",
        "period",
        "schedstat_file",
        "start_ticks",
        "stat",
        "stat_data",
        "stat_file",
        "threads",
        "values",
        "was_on_gpu",
    )

    def __init__(self, proc: str, pid: int, stat_file: KernelFile | None = None) -> None:
        self.folder = f"{proc}/{pid}"
        self.stat_file = stat_file or KernelFile(f"{self.folder}/stat")
        self.stat_data = b""
        self.stat: PidStat | None = None
        """The last content of the file and what it says: that of a process that sleeps does not change."""
        self.values: tuple[PidStat, Values] | None = None
        """The last values from the file, and what they were made of."""
        self.io_file: KernelFile | None = None
        """None, like the next one, when reading was refused: trying again each time would cost as much as a read."""
        self.schedstat_file: KernelFile | None = None
        self.start_ticks: int | None = None
        self.comm = b""
        self.blank_since: float | None = None
        """When its command line was first empty; None while it has one."""
        self.identity = ProcessIdentity(pid=pid)
        self.identified_at: float | None = None
        self.period = 0.0
        self.cpus_allowed = 0
        self.detailed_at: float | None = None
        self.details: Values = {}
        self.details_data = b""
        """The last details, and the content of the process's file when they were read."""
        self.groups: Paths = {}
        self.job_environment: JobEnvironment | None = None
        """A scheduler's job variables in its environment."""
        self.threads: ThreadReader | None = None
        self.was_on_gpu = False


class ProcessReader:
    """Reads processes: values each time, identities only when they may have changed."""

    def __init__(
        self,
        roots: Roots = Roots(),  # noqa: B008  frozen
        *,
        threads: bool = False,
        details_seconds: float = 0.0,
    ) -> None:
        """Prepare to read.

        Args:
            roots: Where /proc is.
            threads: Read the busiest threads of the processes on GPUs.
            details_seconds: How often disk use and run-queue wait are read; they are missing in between.
        """
        self._roots = roots
        self._details_seconds = details_seconds
        self._with_threads = threads
        self._family = ProcessDescendants(roots)
        self._cgroups = CgroupReader(roots)
        self._known: dict[int, _TrackedProcess] = {}
        self._gone: set[int] = set()
        self._harvests = PublishedHarvests()
        self._register = JobRegistry()
        self._ticks_per_second = os.sysconf("SC_CLK_TCK")
        self._page_bytes = os.sysconf("SC_PAGE_SIZE")
        self._machine_at: float | None = None
        self._boot_time: int | None = None
        self._cpus_online: frozenset[int] = frozenset()
        self._counts_block_wait = False
        self._numbering = PidTranslator(roots)
        self.local: Mapping[int, int] = {}
        """PIDs in this /proc by the driver's PIDs, of the last reading."""

    def read(
        self,
        now: float,
        pids: Collection[int],
        harvests: PublishedHarvests | None = None,
        register: JobRegistry = JobRegistry(),  # noqa: B008  frozen
    ) -> tuple[tuple[ProcessReading, ...], tuple[CgroupReading, ...], list[Health]]:
        """Return the processes with these PIDs, then their descendants.

        Args:
            now: Epoch seconds.
            pids: PIDs of the processes on GPUs.
            harvests: What harvests publish about their processes.
            register: Trusted facts about the scheduler's jobs.
        """
        self._update_job_knowledge(harvests or PublishedHarvests(), register)
        if is_due(now, self._machine_at, _REFRESH_SECONDS):
            self._look_at_machine(now)
        readings: list[ProcessReading] = []
        health: list[Health] = []
        believed: list[int] = []
        self.local = local = self._numbering.believed(now, set(pids), self._gone)
        for number in sorted(set(pids)):
            pid = local.get(number)
            reading = None if pid is None else self._read_one(pid, now, on_gpu=True)
            if reading is not None:
                believed.append(reading.pid)
                readings.append(reading)
            elif pid is None or pid not in self._gone:
                readings.append(ProcessReading(ProcessIdentity(pid=number), None, {}, on_gpu=True))
                health.append(_not_visible_health(number, now))
        descendants = self._family.descendants(now, believed)
        for pid in descendants:
            reading = self._read_one(pid, now, on_gpu=False)
            if reading is not None:
                readings.append(reading)
        for pid in self._known.keys() - {*local.values(), *descendants}:
            del self._known[pid]
        self._gone.intersection_update(local.values())
        return tuple(readings), self._read_cgroups(readings, now), health

    def close(self) -> None:
        """Close the files; the next reading identifies all processes again."""
        self._known.clear()

    def read_one(self, now: float, pid: int) -> tuple[ProcessReading | None, tuple[CgroupReading, ...]]:
        """Return a process of this PID namespace without its descendants, and its control group."""
        if is_due(now, self._machine_at, _REFRESH_SECONDS):
            self._look_at_machine(now)
        reading = self._read_one(pid, now, on_gpu=False)
        return (None, ()) if reading is None else (reading, self._read_cgroups([reading], now))

    def job_claims(self) -> list[tuple[JobEnvironment, int | None]]:
        """Return the job variables of the processes of the last reading, each with the process's user."""
        return [
            (known.job_environment, known.identity.owner.uid)
            for known in self._known.values()
            if known.job_environment is not None and known.job_environment.job == known.identity.owner.job
        ]

    def _update_job_knowledge(self, harvests: PublishedHarvests, register: JobRegistry) -> None:
        """Update what harvests and the scheduler report; owners are looked up again when that changes."""
        before, self._register = self._register, register
        earlier, self._harvests = self._harvests, harvests
        is_new = (
            harvests.programs.keys() - earlier.programs.keys() or register.numbers.keys() - before.numbers
        )
        if not is_new and register is before:
            return
        for known in self._known.values():
            if is_new or _has_belief_changed(known, before, register):
                known.period = 0.0

    def _look_at_machine(self, now: float) -> None:
        proc = self._roots.proc
        self._machine_at = now
        if self._boot_time is None:
            # Once: the value changes when the clock is set, and start times identify processes.
            self._boot_time = _read_boot_time(proc)
        self._cpus_online = parse_cpu_list(try_read(f"{self._roots.sys}/devices/system/cpu/online") or b"")
        # Without delay accounting the kernel reports zero; before the switch existed, it was always on.
        self._counts_block_wait = (try_read(f"{proc}/sys/kernel/task_delayacct") or b"1").strip() != b"0"

    def _read_one(self, pid: int, now: float, *, on_gpu: bool) -> ProcessReading | None:
        known = self._known.get(pid) or _TrackedProcess(self._roots.proc, pid)
        stat = _read_stat(known)
        if stat is None:
            self._known.pop(pid, None)
            if known.was_on_gpu:
                self._gone.add(pid)
            return None
        if stat.start_ticks != known.start_ticks:
            data, file = known.stat_data, known.stat_file
            known = self._known[pid] = _TrackedProcess(self._roots.proc, pid, file)
            known.stat_data, known.stat, known.start_ticks = data, stat, stat.start_ticks
        if stat.comm != known.comm or is_due(now, known.identified_at, known.period):
            self._identify(known, stat, now)
        elif stat.parent_pid != known.identity.parent_pid:
            known.identity = known.identity._replace(parent_pid=stat.parent_pid)
            self._family.note(pid, stat.parent_pid)
        known.was_on_gpu = known.was_on_gpu or on_gpu
        threads = self._read_threads(known, stat, now) if on_gpu and self._with_threads else ()
        return ProcessReading(known.identity, stat.state, self._values(known, stat, now), threads, on_gpu)

    def _read_threads(self, known: _TrackedProcess, stat: PidStat, now: float) -> tuple[Thread, ...]:
        if known.threads is None:
            known.threads = ThreadReader(known.folder, known.identity.pid, self._details_seconds)
        return known.threads.read(now, stat.threads)

    def _values(self, known: _TrackedProcess, stat: PidStat, now: float) -> Values:
        if known.values is None or known.values[0] is not stat:
            known.values = stat, self._stat_values(known, stat)
        values = known.values[1]
        if is_due(now, known.detailed_at, 0.9 * self._details_seconds):
            known.detailed_at = now
            if stat.state != "S" or known.details_data != known.stat_data:  # else it sleeps and has not run
                known.details_data, known.details = known.stat_data, {}
                _add_schedstat(known.details, known)
                _add_io(known.details, known)
            values = {**values, **known.details}
        return values

    def _stat_values(self, known: _TrackedProcess, stat: PidStat) -> Values:
        values: Values = {
            "cpu_user_seconds_total": stat.user_ticks / self._ticks_per_second,
            "cpu_system_seconds_total": stat.system_ticks / self._ticks_per_second,
            "host_memory_bytes": stat.resident_pages * self._page_bytes,
            "threads": stat.threads,
            "last_cpu": stat.last_cpu,
            "major_faults_total": stat.major_faults,
        }
        if known.cpus_allowed:
            values["cpus_allowed"] = known.cpus_allowed
        if self._counts_block_wait:
            values["block_wait_seconds_total"] = stat.block_ticks / self._ticks_per_second
        return values

    def _identify(self, known: _TrackedProcess, stat: PidStat, now: float) -> None:
        # A command line and an environment are read out of the process's memory, and that read can hang
        # with a process that waits in the kernel.
        waiting = stat.state == "D"
        if waiting and known.identified_at is not None and stat.comm == known.comm:
            return
        pid, folder = known.identity.pid, known.folder
        # The command first: exec sets up the environment right after it, so that when the command is there,
        # so is the environment.
        command = b"" if waiting else _read_memory(f"{folder}/cmdline", _MAX_COMMAND_BYTES)
        unsettled = _is_in_exec(known, stat, command, now)
        if unsettled and known.identified_at is not None:
            return
        environ = b"" if waiting else _read_memory(f"{folder}/environ", _MAX_ENVIRON_BYTES)
        status = parse_pid_status(try_read(f"{folder}/status") or b"")
        known.cpus_allowed = len(status.cpus_allowed & self._cpus_online or status.cpus_allowed)
        known.groups = parse_cgroup(try_read(f"{folder}/cgroup") or b"")
        known.identity = ProcessIdentity(
            pid=pid,
            parent_pid=stat.parent_pid,
            start_time=self._start_time(stat),
            name=text(stat.comm),
            command=parse_command(command),
            owner=self._owner(pid, status.uid, known.groups, environ),
            cgroup=main_path(known.groups),
        )
        known.job_environment = parse_environ(environ)
        known.comm = stat.comm
        known.io_file = known.io_file or KernelFile(f"{folder}/io")
        known.schedstat_file = known.schedstat_file or KernelFile(f"{folder}/schedstat")
        known.details_data, known.values = b"", None
        known.identified_at = now
        known.period = self._period(known.identity, now, soon=waiting or unsettled)
        self._family.note(pid, stat.parent_pid)

    def _owner(self, pid: int, uid: int | None, groups: Paths, environ: bytes) -> Owner:
        harvests = self._harvests
        program = find_program(pid, uid, harvests, self._roots) if harvests.programs else None
        return find_owner(uid, groups.values(), environ, program, self._register)

    def _start_time(self, stat: PidStat) -> float | None:
        return (
            None if self._boot_time is None else self._boot_time + stat.start_ticks / self._ticks_per_second
        )

    def _period(self, identity: ProcessIdentity, now: float, *, soon: bool) -> float:
        if soon or (identity.start_time is not None and now - identity.start_time < _YOUNG_SECONDS):
            return _YOUNG_REFRESH_SECONDS
        # Processes that started together should not all be identified again in the same reading.
        return _REFRESH_SECONDS - identity.pid % 5

    def _read_cgroups(self, readings: list[ProcessReading], now: float) -> tuple[CgroupReading, ...]:
        groups: dict[str, Paths] = {}
        for reading in readings:
            name = reading.identity.cgroup
            if name is not None and name not in groups:
                groups[name] = self._known[reading.identity.pid].groups
        return self._cgroups.read(now, groups)


def _has_belief_changed(known: _TrackedProcess, before: JobRegistry, register: JobRegistry) -> bool:
    """Return whether a process's job claim is believed now but was not before, or the reverse."""
    if known.job_environment is None:
        return False
    job, uid = known.job_environment.job, known.identity.owner.uid
    return before.believes(job, uid) != register.believes(job, uid)


def _read_stat(known: _TrackedProcess) -> PidStat | None:
    try:
        data = known.stat_file.read_record()
    except OSError:
        return None
    if data != known.stat_data:
        known.stat_data, known.stat = data, parse_pid_stat(data)
    return known.stat


def _is_in_exec(known: _TrackedProcess, stat: PidStat, command: bytes, now: float) -> bool:
    """True while an empty command line may be that of a process in the middle of exec.

    Exec sets the new memory, then the new name, then the new command line. A command line that stays
    empty for longer was erased by the process itself.
    """
    if command or stat.state in _DEAD_STATES:
        known.blank_since = None
        return False
    if known.blank_since is None:
        known.blank_since = now
    return not is_due(now, known.blank_since, _YOUNG_REFRESH_SECONDS)


def _add_schedstat(values: Values, known: _TrackedProcess) -> None:
    if known.schedstat_file is None:
        return
    try:
        schedule = parse_schedstat(known.schedstat_file.read_record(128))
    except OSError:
        schedule = None
    if schedule is None:
        known.schedstat_file = None
    else:
        values["run_wait_seconds_total"] = schedule.wait_nanoseconds / 1e9


def _add_io(values: Values, known: _TrackedProcess) -> None:
    if known.io_file is None:
        return
    try:
        counts = parse_pid_io(known.io_file.read_record(512))
    except OSError:
        known.io_file = None
        return
    for name, count in zip(_IO_METRICS, counts, strict=True):
        if count is not None:
            values[name] = count


def _read_memory(path: str, most: int) -> bytes:
    try:
        return read_bytes(path, most)
    except OSError:
        return b""


def _read_boot_time(proc: str) -> int | None:
    try:
        return parse_stat(read_bytes(f"{proc}/stat")).boot_time
    except OSError:
        return None


def _not_visible_health(pid: int, now: float) -> Health:
    return Health(
        source="processes",
        code="not_visible",
        detail=f"process {pid} uses a GPU but is not visible in /proc",
        since=now,
        subject=f"pid {pid}",
        hint="run gpulse on the host as root, or start its container with --pid=host: the process is in another PID "
        "namespace, or /proc hides other users' processes",
    )
