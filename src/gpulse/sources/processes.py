"""The processes that hold a GPU and all their descendants: who they are and what they use."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping

from gpulse.model.frame import CgroupReading
from gpulse.model.health import Health
from gpulse.model.metric import Values
from gpulse.model.process import Owner, ProcessIdentity, ProcessReading, Thread
from gpulse.sources.cgroups import CgroupReader, Paths, main_path
from gpulse.sources.family import Family
from gpulse.sources.harvest import Harvests, program_of
from gpulse.sources.namespaces import Numbering
from gpulse.sources.owners import Register, find_owner
from gpulse.sources.procfs import (
    Roots,
    due,
    list_names,
    parse_cpu_list,
    parse_stat,
    read_bytes,
    read_link,
    read_record,
    text,
    try_read,
)
from gpulse.sources.procpid import (
    PidStat,
    parse_cgroup,
    parse_command,
    parse_pid_io,
    parse_pid_stat,
    parse_pid_status,
    parse_schedstat,
)
from gpulse.sources.slurm import Told, parse_environ
from gpulse.sources.threads import ThreadReader

_REFRESH_SECONDS = 30.0
_YOUNG_SECONDS = 5.0
_YOUNG_REFRESH_SECONDS = 1.0
_MOST_COMMAND = 1 << 15
_MOST_ENVIRON = 1 << 18
_IO = ("read_chars_total", "written_chars_total", "read_bytes_total", "written_bytes_total")
"""The catalogue's names, in the order of PidIo."""
_DEAD = frozenset("ZXx")


class _Known:
    """What is remembered of one process between two readings."""

    __slots__ = (
        "blank_since",
        "comm",
        "cpus_allowed",
        "detailed_at",
        "folder",
        "groups",
        "identified_at",
        "identity",
        "io_path",
        "period",
        "schedstat_path",
        "start_ticks",
        "stat_path",
        "threads",
        "told",
        "was_on_gpu",
    )

    def __init__(self, proc: str, pid: int) -> None:
        self.folder = f"{proc}/{pid}"
        self.stat_path = f"{self.folder}/stat"
        self.io_path: str | None = None
        """None, like the next one, when it was refused: asking again each time would cost as much as a read."""
        self.schedstat_path: str | None = None
        self.start_ticks: int | None = None
        self.comm = b""
        self.blank_since: float | None = None
        """When its command line was first found empty, None while it has one."""
        self.identity = ProcessIdentity(pid=pid)
        self.identified_at: float | None = None
        self.period = 0.0
        self.cpus_allowed = 0
        self.detailed_at: float | None = None
        self.groups: Paths = {}
        self.told: Told | None = None
        """What its environment says of a scheduler's job."""
        self.threads: ThreadReader | None = None
        self.was_on_gpu = False


class ProcessReader:
    """Reads processes: the numbers each time, who they are only when that may have changed."""

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
            details_seconds: How often disk use and run-queue wait are read; they are absent in between.
        """
        self._roots = roots
        self._details_seconds = details_seconds
        self._with_threads = threads
        self._family = Family(roots)
        self._cgroups = CgroupReader(roots)
        self._known: dict[int, _Known] = {}
        self._gone: set[int] = set()
        self._harvests = Harvests()
        self._register = Register()
        self._ticks_per_second = os.sysconf("SC_CLK_TCK")
        self._page_bytes = os.sysconf("SC_PAGE_SIZE")
        self._machine_at: float | None = None
        self._boot_time: int | None = None
        self._cpus_online: frozenset[int] = frozenset()
        self._counts_block_wait = False
        self._numbering = Numbering(roots)
        self.local: Mapping[int, int] = {}
        """By the driver's numbers those of the last reading's processes in this /proc."""

    def read(
        self,
        now: float,
        pids: Collection[int],
        harvests: Harvests | None = None,
        register: Register = Register(),  # noqa: B008  frozen
    ) -> tuple[tuple[ProcessReading, ...], tuple[CgroupReading, ...], list[Health]]:
        """The processes with these pids, then their descendants.

        Args:
            now: Epoch seconds.
            pids: Those on GPUs.
            harvests: What harvests say of their processes.
            register: What is known of the scheduler's jobs.
        """
        self._hear(harvests or Harvests(), register)
        if due(now, self._machine_at, _REFRESH_SECONDS):
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
                health.append(_not_visible(number, now))
        descendants = self._family.descendants(now, believed)
        for pid in descendants:
            reading = self._read_one(pid, now, on_gpu=False)
            if reading is not None:
                readings.append(reading)
        for pid in self._known.keys() - {*local.values(), *descendants}:
            del self._known[pid]
        self._gone.intersection_update(local.values())
        return tuple(readings), self._read_cgroups(readings, now), health

    def read_one(self, now: float, pid: int) -> tuple[ProcessReading | None, tuple[CgroupReading, ...]]:
        """A process of this PID namespace without its descendants, and its control group."""
        if due(now, self._machine_at, _REFRESH_SECONDS):
            self._look_at_machine(now)
        reading = self._read_one(pid, now, on_gpu=False)
        return (None, ()) if reading is None else (reading, self._read_cgroups([reading], now))

    def spoken(self) -> list[tuple[Told, int | None]]:
        """What the processes of the last reading say of their jobs, each with its user."""
        return [
            (known.told, known.identity.owner.uid)
            for known in self._known.values()
            if known.told is not None and known.told.job == known.identity.owner.job
        ]

    def _hear(self, harvests: Harvests, register: Register) -> None:
        """Take in what harvests and the scheduler say; whose process is whose is looked up again when that is new."""
        before, self._register = self._register, register
        told, self._harvests = self._harvests, harvests
        is_new = harvests.programs.keys() - told.programs.keys() or register.numbers.keys() - before.numbers
        if not is_new and register is before:
            return
        for known in self._known.values():
            if is_new or _is_judged_anew(known, before, register):
                known.period = 0.0

    def _look_at_machine(self, now: float) -> None:
        proc = self._roots.proc
        self._machine_at = now
        if self._boot_time is None:
            # Once: the kernel's answer moves when the clock is set, and start times name processes.
            self._boot_time = _boot_time(proc)
        self._cpus_online = parse_cpu_list(try_read(f"{self._roots.sys}/devices/system/cpu/online") or b"")
        # Without delay accounting the kernel counts zero; before it had a switch, it was on.
        self._counts_block_wait = (try_read(f"{proc}/sys/kernel/task_delayacct") or b"1").strip() != b"0"

    def _read_one(self, pid: int, now: float, *, on_gpu: bool) -> ProcessReading | None:
        known = self._known.get(pid) or _Known(self._roots.proc, pid)
        stat = _stat(known.stat_path)
        if stat is None:
            self._known.pop(pid, None)
            if known.was_on_gpu:
                self._gone.add(pid)
            return None
        if stat.start_ticks != known.start_ticks:
            known = self._known[pid] = _Known(self._roots.proc, pid)
            known.start_ticks = stat.start_ticks
        if stat.comm != known.comm or due(now, known.identified_at, known.period):
            self._identify(known, stat, now)
        elif stat.parent_pid != known.identity.parent_pid:
            known.identity = known.identity._replace(parent_pid=stat.parent_pid)
            self._family.note(pid, stat.parent_pid)
        known.was_on_gpu = known.was_on_gpu or on_gpu
        threads = self._read_threads(known, now) if on_gpu and self._with_threads else ()
        return ProcessReading(known.identity, stat.state, self._values(known, stat, now), threads, on_gpu)

    def _read_threads(self, known: _Known, now: float) -> tuple[Thread, ...]:
        if known.threads is None:
            known.threads = ThreadReader(known.folder, known.identity.pid)
        return known.threads.read(now)

    def _values(self, known: _Known, stat: PidStat, now: float) -> Values:
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
        if due(now, known.detailed_at, 0.9 * self._details_seconds):
            known.detailed_at = now
            _add_schedstat(values, known)
            _add_io(values, known)
        return values

    def _identify(self, known: _Known, stat: PidStat, now: float) -> None:
        # A command line and an environment are read out of the process's memory, and that read can hang
        # with a process that waits in the kernel.
        waiting = stat.state == "D"
        if waiting and known.identified_at is not None and stat.comm == known.comm:
            return
        pid, folder = known.identity.pid, known.folder
        # The command first: exec lays out the environment right after it, so that when the one is there,
        # so is the other.
        command = b"" if waiting else _memory(f"{folder}/cmdline", _MOST_COMMAND)
        unsettled = _in_exec(known, stat, command, now)
        if unsettled and known.identified_at is not None:
            return
        environ = b"" if waiting else _memory(f"{folder}/environ", _MOST_ENVIRON)
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
        known.told = parse_environ(environ)
        known.comm = stat.comm
        known.io_path, known.schedstat_path = f"{folder}/io", f"{folder}/schedstat"
        known.identified_at = now
        known.period = self._period(known.identity, now, soon=waiting or unsettled)
        self._family.note(pid, stat.parent_pid)

    def _owner(self, pid: int, uid: int | None, groups: Paths, environ: bytes) -> Owner:
        told = self._harvests
        program = program_of(pid, uid, told, self._roots) if told.programs else None
        return find_owner(uid, groups.values(), environ, program, self._register)

    def _start_time(self, stat: PidStat) -> float | None:
        return (
            None if self._boot_time is None else self._boot_time + stat.start_ticks / self._ticks_per_second
        )

    def _period(self, identity: ProcessIdentity, now: float, *, soon: bool) -> float:
        if soon or (identity.start_time is not None and now - identity.start_time < _YOUNG_SECONDS):
            return _YOUNG_REFRESH_SECONDS
        # Processes that started together should not all be looked at again in the same reading.
        return _REFRESH_SECONDS - identity.pid % 5

    def _read_cgroups(self, readings: list[ProcessReading], now: float) -> tuple[CgroupReading, ...]:
        groups: dict[str, Paths] = {}
        for reading in readings:
            name = reading.identity.cgroup
            if name is not None and name not in groups:
                groups[name] = self._known[reading.identity.pid].groups
        return self._cgroups.read(now, groups)


def device_holders(roots: Roots = Roots()) -> dict[int, set[int]]:  # noqa: B008  frozen
    """By N of /dev/nvidiaN, the local processes that hold it open, as far as this user may see."""
    holders: dict[int, set[int]] = {}
    for name in list_names(roots.proc):
        if name.isdecimal():
            for file in _gpu_files(roots, f"{roots.proc}/{name}"):
                if file.isdecimal():
                    holders.setdefault(int(file), set()).add(int(name))
    return holders


def _gpu_files(roots: Roots, folder: str) -> Iterator[str]:
    """What follows `nvidia` in the names of the device files that a process holds open."""
    prefix = f"{roots.dev}/nvidia"
    for descriptor in list_names(f"{folder}/fd"):
        target = read_link(f"{folder}/fd/{descriptor}")
        if target is not None and target.startswith(prefix):
            yield target.removeprefix(prefix)


def _is_judged_anew(known: _Known, before: Register, register: Register) -> bool:
    """Whether what a process says of its job is believed now and was not, or the other way round."""
    if known.told is None:
        return False
    job, uid = known.told.job, known.identity.owner.uid
    return before.believes(job, uid) != register.believes(job, uid)


def _stat(path: str) -> PidStat | None:
    try:
        return parse_pid_stat(read_record(path))
    except OSError:
        return None


def _in_exec(known: _Known, stat: PidStat, command: bytes, now: float) -> bool:
    """True while an empty command line may be that of a program which is just being replaced by another.

    Exec gives a process its new memory, then its new name, then its new command line. Who finds the last
    one empty for longer than a moment has found a process that erased it.
    """
    if command or stat.state in _DEAD:
        known.blank_since = None
        return False
    if known.blank_since is None:
        known.blank_since = now
    return not due(now, known.blank_since, _YOUNG_REFRESH_SECONDS)


def _add_schedstat(values: Values, known: _Known) -> None:
    if known.schedstat_path is None:
        return
    try:
        schedule = parse_schedstat(read_record(known.schedstat_path, 128))
    except OSError:
        schedule = None
    if schedule is None:
        known.schedstat_path = None
    else:
        values["run_wait_seconds_total"] = schedule.wait_nanoseconds / 1e9


def _add_io(values: Values, known: _Known) -> None:
    if known.io_path is None:
        return
    try:
        counts = parse_pid_io(read_record(known.io_path, 512))
    except OSError:
        known.io_path = None
        return
    for name, count in zip(_IO, counts, strict=True):
        if count is not None:
            values[name] = count


def _memory(path: str, most: int) -> bytes:
    try:
        return read_bytes(path, most)
    except OSError:
        return b""


def _boot_time(proc: str) -> int | None:
    try:
        return parse_stat(read_bytes(f"{proc}/stat")).boot_time
    except OSError:
        return None


def _not_visible(pid: int, now: float) -> Health:
    return Health(
        source="processes",
        code="not_visible",
        detail=f"process {pid} is on a GPU but not in this /proc",
        since=now,
        subject=f"pid {pid}",
        hint="it runs in another PID namespace, or /proc hides other users: run gpulse on the host as root, "
        "or its container with --pid=host",
    )
