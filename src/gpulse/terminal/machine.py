"""The host's part of a look as text: CPUs and memory, disks and file systems, network."""

from __future__ import annotations

from collections.abc import Iterator

from gpulse.model.frame import DiskReading, FilesystemReading, NetworkReading
from gpulse.model.snapshot import Snapshot
from gpulse.terminal import format as f
from gpulse.terminal.table import Cell, Column, Paint, flowed, render, wrapped

_EIGHTHS = " .:-=+*#"


def host_lines(snapshot: Snapshot, width: int, paint: Paint, *, verbose: bool) -> Iterator[str]:
    """CPUs, load, memory, swap and pressure; with `verbose` every CPU as one character."""
    if snapshot.frame.host is None:
        yield from wrapped("The host's /proc could not be read.", width)
        return
    loads = (f.number(snapshot.host(name), 1) for name in ("load1", "load5", "load15"))
    words = [_cpus(snapshot), f"load {' '.join(loads)}", f"RAM {_memory(snapshot)}"]
    if snapshot.host("swap_total_bytes"):
        total, free = snapshot.host("swap_total_bytes") or 0, snapshot.host("swap_free_bytes") or 0
        words.append(f"swap {f.sizes(total - free, total)}")
    words.append(_pressure(snapshot))
    yield from flowed([word for word in words if word], width, "   ")
    if verbose:
        yield from _cores(snapshot, width, paint)


def _cpus(snapshot: Snapshot) -> str:
    busy, cpus = snapshot.host("cpu_utilization_ratio"), snapshot.host("cpus")
    return f"{f.number(cpus)} CPUs" if busy is None else f"CPU {f.ratio(busy)} of {f.number(cpus)}"


def _memory(snapshot: Snapshot) -> str:
    total, available = snapshot.host("memory_total_bytes"), snapshot.host("memory_available_bytes")
    used = None if total is None or available is None else total - available
    return f"{f.sizes(used, total)} used"


def _pressure(snapshot: Snapshot) -> str:
    shares = [(name, snapshot.host(f"pressure_{name}_some_ratio")) for name in ("cpu", "io", "memory")]
    if all(share is None for _, share in shares):
        return ""
    return "waiting for " + ", ".join(f"{name} {f.ratio(share)}" for name, share in shares)


def _cores(snapshot: Snapshot, width: int, paint: Paint) -> Iterator[str]:
    marks = ["?" if share is None else _EIGHTHS[min(7, int(share * 8))] for share in snapshot.rates.cores]
    if not marks:
        return
    room = max(8, width - 2)
    yield from (paint("dim", line) for line in wrapped("Each CPU (blank idle, # busy):", width))
    for begin in range(0, len(marks), room):
        yield "[" + "".join(marks[begin : begin + room]) + "]"


_DISK_COLUMNS = (
    Column("Disk", right=False),
    Column("Kind", right=False, drop=3),
    Column("Read"),
    Column("Write"),
    Column("Reads/s", drop=5),
    Column("Writes/s", drop=4),
    Column("Await", drop=1),
    Column("Queue", drop=2),
    Column("Busy"),
)
_FILESYSTEM_COLUMNS = (
    Column("Mounted on", right=False, least=12),
    Column("Used"),
    Column("Full", drop=1),
    Column("Kind", right=False, drop=2),
    Column("Type", right=False, drop=3),
    Column("Device", right=False, drop=4, least=12),
)


def disk_lines(snapshot: Snapshot, width: int, paint: Paint, *, verbose: bool) -> Iterator[str]:
    """Disks with what they do, then file systems with what they hold."""
    disks = [disk for disk in snapshot.frame.disks if verbose or disk.kind != "memory"]
    if disks:
        yield from render(_DISK_COLUMNS, [_disk_row(snapshot, disk) for disk in disks], width, paint)
    else:
        yield from wrapped("No disk to show.", width)
    if snapshot.frame.filesystems:
        yield ""
        rows = [_filesystem_row(filesystem) for filesystem in snapshot.frame.filesystems]
        yield from render(_FILESYSTEM_COLUMNS, rows, width, paint)


def _disk_row(snapshot: Snapshot, disk: DiskReading) -> list[Cell]:
    rates = snapshot.rates.disks.get(disk.name, {})
    queue = rates.get("queue_length")
    return [
        Cell(f.plain(disk.name), "name"),
        Cell(_kind(disk.kind)),
        Cell(f.rate(rates.get("read_bytes_per_second"))),
        Cell(f.rate(rates.get("written_bytes_per_second"))),
        Cell(f.count(rates.get("reads_per_second"))),
        Cell(f.count(rates.get("writes_per_second"))),
        Cell(f.milliseconds(rates.get("await_seconds"))),
        Cell(f.number(queue, 1)),
        Cell(f.ratio(rates.get("busy_ratio"))),
    ]


def _filesystem_row(filesystem: FilesystemReading) -> list[Cell]:
    used, size = filesystem.values.get("used_bytes"), filesystem.values.get("size_bytes")
    share = used / size if used is not None and size else None
    nearly_full = share is not None and share > 0.95
    return [
        Cell(f.plain(filesystem.mount_point)),
        Cell(f.sizes(used, size), "notice" if nearly_full else ""),
        Cell(f.ratio(share), "notice" if nearly_full else ""),
        Cell(_kind(filesystem.kind)),
        Cell(f.plain(filesystem.type)),
        Cell(f.plain(filesystem.device)),
    ]


def _kind(kind: str | None) -> str:
    return {"nvme": "NVMe SSD", "ssd": "SSD", "hdd": "HDD"}.get(kind or "", f.plain(kind))


_NETWORK_COLUMNS = (
    Column("Interface", right=False),
    Column("Kind", right=False, drop=3),
    Column("State", right=False, drop=1, optional=True),
    Column("Link", drop=2, optional=True),
    Column("Received"),
    Column("Sent"),
    Column("Errors/s", drop=5, optional=True),
    Column("Drops/s", drop=5, optional=True),
    Column("Errors", drop=4, optional=True),
)


def network_lines(snapshot: Snapshot, width: int, paint: Paint, *, verbose: bool) -> Iterator[str]:
    """Interfaces; loopback, and virtual ones that never carried anything, only with `verbose`."""
    links = [link for link in snapshot.frame.network if verbose or _is_interesting(link)]
    if not links:
        yield from wrapped("No network interface to show.", width)
        return
    yield from render(_NETWORK_COLUMNS, [_network_row(snapshot, link) for link in links], width, paint)


def _is_interesting(link: NetworkReading) -> bool:
    used = link.values.get("rx_bytes_total", 0) or link.values.get("tx_bytes_total", 0)
    return link.kind != "loopback" and bool(link.kind != "virtual" or used)


def _network_row(snapshot: Snapshot, link: NetworkReading) -> list[Cell]:
    rates = snapshot.rates.network.get(link.name, {})

    def both(values: dict[str, float], kind: str) -> float | None:
        parts = [values[name] for name in (f"rx_{kind}", f"tx_{kind}") if name in values]
        return sum(parts) if parts else None

    errors = both(rates, "errors_per_second")
    return [
        Cell(f.plain(link.name), "name"),
        Cell(f.plain(link.kind)),
        Cell({True: "up", False: "down", None: f.UNKNOWN}[link.up], "notice" if link.up is False else ""),
        Cell(f.bits(link.values.get("link_bits_per_second"))),
        Cell(f.rate(rates.get("rx_bytes_per_second"))),
        Cell(f.rate(rates.get("tx_bytes_per_second"))),
        Cell(f.count(errors), "warn" if errors else ""),
        Cell(f.count(both(rates, "drops_per_second"))),
        Cell(f.count(both(link.values, "errors_total"))),
    ]
