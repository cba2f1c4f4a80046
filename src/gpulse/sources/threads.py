"""The busiest threads of a process, found without reading all of them every time."""

from __future__ import annotations

import os
from heapq import nlargest

from gpulse.model.process import Thread
from gpulse.sources.procfs import due, list_names, read_record, text, try_read
from gpulse.sources.procpid import PidStat, parse_pid_stat, parse_schedstat

_PERIOD = 1.0
_MOST = 8


class ThreadReader:
    """Reads all threads of one process once a second, and in between those that used most CPU time."""

    def __init__(self, folder: str, pid: int) -> None:
        self._folder = f"{folder}/task"
        self._pid = pid
        self._ticks_per_second = os.sysconf("SC_CLK_TCK")
        self._scanned_at: float | None = None
        self._ticks: dict[int, int] = {}
        self._busiest: list[int] = []

    def read(self, now: float) -> tuple[Thread, ...]:
        """The main thread, then the others, the one that worked most in the last second first."""
        if due(now, self._scanned_at, _PERIOD):
            self._scanned_at = now
            stats = self._scan()
        else:
            stats = {tid: stat for tid in self._busiest if (stat := self._stat(tid)) is not None}
        return tuple(self._thread(tid, stats[tid]) for tid in self._busiest if tid in stats)

    def _scan(self) -> dict[int, PidStat]:
        stats: dict[int, PidStat] = {}
        for name in list_names(self._folder):
            if name.isdecimal() and (stat := self._stat(int(name))) is not None:
                stats[int(name)] = stat
        ticks = {tid: stat.user_ticks + stat.system_ticks for tid, stat in stats.items()}
        growth = {tid: (total - self._ticks.get(tid, 0), total) for tid, total in ticks.items()}
        others = [tid for tid in nlargest(_MOST, growth, key=growth.__getitem__) if tid != self._pid]
        self._busiest = [self._pid, *others]
        self._ticks = ticks
        return stats

    def _stat(self, tid: int) -> PidStat | None:
        try:
            return parse_pid_stat(read_record(f"{self._folder}/{tid}/stat"))
        except OSError:
            return None

    def _thread(self, tid: int, stat: PidStat) -> Thread:
        schedule = parse_schedstat(try_read(f"{self._folder}/{tid}/schedstat") or b"")
        return Thread(
            tid=tid,
            name=text(stat.comm),
            state=stat.state,
            cpu_seconds_total=(stat.user_ticks + stat.system_ticks) / self._ticks_per_second,
            run_wait_seconds_total=None if schedule is None else schedule.wait_nanoseconds / 1e9,
        )
