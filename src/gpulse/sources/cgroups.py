"""Read the resource limits of control groups, version 1, version 2 and hybrid."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from gpulse.model.frame import CgroupReading
from gpulse.model.metric_catalog import Values
from gpulse.sources.procfs import Roots, is_due, number, parse_mounts, parse_vmstat, read_bytes, try_read

_PERIOD_SECONDS = 1.0
_MOUNT_PERIOD_SECONDS = 30.0
_UNIFIED_KEY = ""
_MIN_UNLIMITED_BYTES = 1 << 62
"""Version 1 reports "no limit" as the largest multiple of the page size, which differs between machines."""

Paths = Mapping[str, str]
"""The control groups of a process, by controller, as `parse_cgroup` gives them."""


def main_path(paths: Paths) -> str | None:
    """Return the path that identifies the group of a process, whichever hierarchies the machine uses."""
    for controller in (_UNIFIED_KEY, "memory", "cpu"):
        if paths.get(controller, "/") != "/":
            return paths[controller]
    return max(paths.values(), key=len, default=None)


class CgroupReader:
    """Reads limits and throttling, each group at most once a second."""

    def __init__(self, roots: Roots) -> None:
        self._roots = roots
        self._mounts: dict[str, str] = {}
        self._mounts_at: float | None = None
        self._known: dict[str, tuple[float, CgroupReading]] = {}

    def read(self, now: float, groups: Mapping[str, Paths]) -> tuple[CgroupReading, ...]:
        """Return the readings of these groups, given by main path; groups without values are left out."""
        if is_due(now, self._mounts_at, _MOUNT_PERIOD_SECONDS):
            self._mounts_at = now
            self._mounts = find_mounts(self._roots, ("cpu", "memory"))
        known: dict[str, tuple[float, CgroupReading]] = {}
        for name, paths in groups.items():
            at, reading = self._known.get(name, (None, None))
            if reading is None or is_due(now, at, _PERIOD_SECONDS):
                at, reading = now, CgroupReading(name, {**self._cpu(paths), **self._memory(paths)})
            known[name] = (at or now, reading)
        self._known = known
        return tuple(reading for _, reading in known.values() if reading.values)

    def _cpu(self, paths: Paths) -> Values:
        """Return the tightest CPU limit and its throttling, from the group that sets it."""
        tightest: tuple[float, str] | None = None
        for folder in self._folders("cpu", paths):
            limit = _read_cpu_limit(folder)
            # Of two equal limits the outer one is reached first: more processes share it.
            if limit is not None and (tightest is None or limit <= tightest[0]):
                tightest = (limit, folder)
        return {} if tightest is None else {"cpu_limit_cores": tightest[0], **_read_throttling(tightest[1])}

    def _memory(self, paths: Paths) -> Values:
        """Return the tightest memory limit and its usage, from the group that sets it."""
        tightest: tuple[int, str] | None = None
        folders = self._folders("memory", paths)
        for folder in folders:
            limit = _read_memory_limit(folder)
            if limit is not None and (tightest is None or limit <= tightest[0]):
                tightest = (limit, folder)
        if tightest is None:
            # The root group is the whole machine, which the host reading covers.
            return _read_memory_use(folders[0]) if len(folders) > 1 else {}
        return {"memory_limit_bytes": tightest[0], **_read_memory_use(tightest[1])}

    def _folders(self, controller: str, paths: Paths) -> list[str]:
        """Return the group's directory and its parents, innermost first.

        In a container the path may not exist below the mount point: then the mount point itself is the
        container's group, and it comes last here in any case.
        """
        hierarchy = controller if controller in self._mounts and controller in paths else _UNIFIED_KEY
        mount, path = self._mounts.get(hierarchy), paths.get(hierarchy)
        if mount is None or path is None:
            return []
        parts = [part for part in path.split("/") if part not in ("", "..")]
        return ["/".join([mount, *parts[:depth]]) for depth in range(len(parts), -1, -1)]


def find_mounts(roots: Roots, hierarchies: Collection[str]) -> dict[str, str]:
    """Return where hierarchies of version 1 are mounted, by controller, and under the empty name that of version 2."""
    try:
        mounts = parse_mounts(read_bytes(f"{roots.proc}/self/mounts"))
    except OSError:
        return {}
    found: dict[str, str] = {}
    for mount in mounts:
        inside_sys = mount.mount_point.startswith("/sys/")
        folder = roots.sys + mount.mount_point.removeprefix("/sys") if inside_sys else mount.mount_point
        if mount.type == "cgroup2":
            found.setdefault(_UNIFIED_KEY, folder)
        elif mount.type == "cgroup":
            for name in set(hierarchies).intersection(mount.options):
                found.setdefault(name, folder)
    return found


def _read_cpu_limit(folder: str) -> float | None:
    unified = try_read(f"{folder}/cpu.max")
    if unified is not None:
        quota, _, period = unified.partition(b" ")
    else:
        quota = try_read(f"{folder}/cpu.cfs_quota_us") or b""
        period = try_read(f"{folder}/cpu.cfs_period_us") or b""
    allowed, length = number(quota), number(period)
    return allowed / length if allowed is not None and length and allowed > 0 and length > 0 else None


def _read_throttling(folder: str) -> Values:
    stat = parse_vmstat(try_read(f"{folder}/cpu.stat") or b"")
    values: Values = {}
    if "nr_periods" in stat and "nr_throttled" in stat:
        values["cpu_periods_total"] = stat["nr_periods"]
        values["cpu_throttled_periods_total"] = stat["nr_throttled"]
    if "throttled_usec" in stat:
        values["cpu_throttled_seconds_total"] = stat["throttled_usec"] / 1e6
    elif "throttled_time" in stat:
        values["cpu_throttled_seconds_total"] = stat["throttled_time"] / 1e9
    return values


def _read_memory_limit(folder: str) -> int | None:
    limit = _read_first_number(f"{folder}/memory.max", f"{folder}/memory.limit_in_bytes")
    return limit if limit is not None and 0 <= limit < _MIN_UNLIMITED_BYTES else None


def _read_memory_use(folder: str) -> Values:
    values: Values = {}
    used = _read_first_number(f"{folder}/memory.current", f"{folder}/memory.usage_in_bytes")
    if used is not None:
        values["memory_used_bytes"] = used
    events = try_read(f"{folder}/memory.events") or try_read(f"{folder}/memory.oom_control") or b""
    kills = parse_vmstat(events).get("oom_kill")
    if kills is not None:
        values["oom_kills_total"] = kills
    return values


def _read_first_number(*paths: str) -> int | None:
    for path in paths:
        if (data := try_read(path)) is not None:
            return number(data)
    return None
