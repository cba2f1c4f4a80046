"""The machine around the GPUs in two lines: CPUs, memory, pressure, the busiest disk, the network."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gpulse.model.frame import Frame
from gpulse.model.metric import Values
from gpulse.terminal import format as human
from gpulse.terminal.top.cells import Line, Piece, Tone, fitted, width
from gpulse.terminal.top.glyphs import Glyphs, bar, trend
from gpulse.terminal.top.history import share
from gpulse.terminal.top.snapshot import Snapshot

_BAR_CELLS = 6
_SHORTEST_HEAT = 8
_GAP = 2
_WIDE_CELLS = 100
_NAMED_DISK_CELLS = 76
_STRAINED, _STARVED = 0.1, 0.4
"""Shares of time in which somebody waits from which on pressure is worth a look, and is bad."""


def lines(snapshot: Snapshot, cells: int, glyphs: Glyphs) -> list[Line]:
    """Both lines."""
    return [_computing(snapshot, cells, glyphs), _moving(snapshot, cells, glyphs)]


def _computing(snapshot: Snapshot, cells: int, glyphs: Glyphs) -> Line:
    host = snapshot.frame.host.values if snapshot.frame.host else {}
    busy = snapshot.rates.host.get("cpu_utilization_ratio")
    cpu: Line = (_label("CPU"), Piece(f"{human.ratio(busy):>4}", _busy(busy)))
    parts = [
        (0, cpu),
        (3, _load(host, longer=cells >= _WIDE_CELLS)),
        (1, _memory(host, glyphs)),
        (1, _swap(host, glyphs)),
        (2, _network(snapshot)),
    ]
    parts = [part for part in parts if part[1]]
    room = cells - sum(width(line) + _GAP for _, line in parts)
    if room >= _SHORTEST_HEAT and snapshot.rates.cores:
        groups = folded(snapshot.rates.cores, room)
        parts[0] = (0, (*cpu, Piece(" "), *trend(groups, len(groups), glyphs)))
    return (Piece(" "), *fitted(parts, cells - 1, " " * _GAP))


def folded(cores: Sequence[float | None], cells: int) -> list[float | None]:
    """The CPUs in at most so many groups, the busiest of each: one hot CPU must not vanish in a mean."""
    size = -(-len(cores) // cells)
    groups = [cores[begin : begin + size] for begin in range(0, len(cores), size)]
    return [max((core for core in group if core is not None), default=None) for group in groups]


def _moving(snapshot: Snapshot, cells: int, glyphs: Glyphs) -> Line:
    pressure = _pressure(snapshot.rates.host, glyphs)
    parts = [
        (0, pressure),
        (1, _disk(snapshot, named=cells >= _NAMED_DISK_CELLS)),
        (2, _filesystem(snapshot, glyphs)),
    ]
    return (Piece(" "), *fitted([part for part in parts if part[1]], cells - 1, " " * _GAP))


def _label(text: str) -> Piece:
    return Piece(f"{text} ", "head")


def _busy(value: float | None) -> Tone:
    if value is None:
        return "dim"
    return "warn" if value >= 0.9 else "plain"


def _load(host: Values, *, longer: bool) -> Line:
    loads = [human.number(host.get(f"load{minutes}"), 1) for minutes in ((1, 5, 15) if longer else (1,))]
    return (_label("load"), Piece(" ".join(loads), "plain" if "load1" in host else "dim"))


def _memory(host: Values, glyphs: Glyphs) -> Line:
    total, available = host.get("memory_total_bytes"), host.get("memory_available_bytes")
    used = None if total is None or available is None else total - available
    part = share(used, total)
    tone: Tone = "warn" if part is not None and part >= 0.9 else "memory"
    return (
        _label("RAM"),
        Piece(human.sizes(used, total), tone),
        Piece(" "),
        *bar(part, _BAR_CELLS, tone, glyphs),
    )


def _swap(host: Values, glyphs: Glyphs) -> Line:
    """Only while some of it is in use: idle swap is no news."""
    total, free = host.get("swap_total_bytes"), host.get("swap_free_bytes")
    if total is None or free is None or total - free <= 0:
        return ()
    return (_label("swap"), Piece(f"{human.sizes(total - free, total)}{glyphs.up}", "warn"))


def _pressure(rates: Values, glyphs: Glyphs) -> Line:
    pieces = [_label("PSI")]
    for resource, name in (("cpu", "cpu"), ("io", "io"), ("memory", "mem")):
        value = rates.get(f"pressure_{resource}_some_ratio")
        mark, tone = "", "plain"  # type: tuple[str, Tone]
        if value is None:
            tone = "dim"
        elif value >= _STRAINED:
            mark, tone = (glyphs.up, "bad" if value >= _STARVED else "warn")
        pieces += [
            Piece(f"{name} ", "dim"),
            Piece(f"{human.ratio(value):>4}", tone),
            Piece(f"{mark or ' '} ", tone),
        ]
    return tuple(pieces[:-1]) if not pieces[-1].text.strip() else tuple(pieces)


def _disk(snapshot: Snapshot, *, named: bool) -> Line:
    rates = snapshot.rates.disks
    if not snapshot.frame.disks:
        return ()
    name = max((disk.name for disk in snapshot.frame.disks), key=lambda name: _weight(rates.get(name, {})))
    own = rates.get(name, {})
    return (
        _label("disk"),
        *(_named(name, own.get("busy_ratio")) if named else ()),
        *_pair("r", own.get("read_bytes_per_second"), "w", own.get("written_bytes_per_second")),
    )


def _named(disk: str, busy: float | None) -> Line:
    return (Piece(f"{human.plain(disk)} ", "dim"), Piece(f"{human.ratio(busy):>4}", _busy(busy)), Piece(" "))


def _weight(values: Values) -> tuple[float, float]:
    moved = values.get("read_bytes_per_second", 0.0) + values.get("written_bytes_per_second", 0.0)
    return values.get("busy_ratio", -1.0), moved


def _network(snapshot: Snapshot) -> Line:
    names = _links(snapshot.frame)
    rates = [snapshot.rates.network.get(name, {}) for name in names]
    received, sent = _total(rates, "rx_bytes_per_second"), _total(rates, "tx_bytes_per_second")
    return (_label("net"), *_pair("rx", received, "tx", sent)) if names else ()


def _links(frame: Frame) -> list[str]:
    """Real interfaces; where there are none, as in a container, whatever is not the loopback."""
    real = [link.name for link in frame.network if link.kind in ("ethernet", "infiniband")]
    return real or [link.name for link in frame.network if link.kind != "loopback"]


def _total(rates: Iterable[Values], name: str) -> float | None:
    known = [values[name] for values in rates if name in values]
    return sum(known) if known else None


def _filesystem(snapshot: Snapshot, glyphs: Glyphs) -> Line:
    """The fullest one."""
    full = {
        item.mount_point: share(item.values.get("used_bytes"), item.values.get("size_bytes"))
        for item in snapshot.frame.filesystems
    }
    known = {mount_point: part for mount_point, part in full.items() if part is not None}
    if not known:
        return ()
    fullest = max(known, key=lambda mount_point: known[mount_point])
    mark = glyphs.up if known[fullest] >= 0.9 else ""
    tone: Tone = "warn" if mark else "plain"
    return (
        _label("fullest"),
        Piece(f"{glyphs.clean(fullest)} ", "dim"),
        Piece(f"{human.ratio(known[fullest])}{mark}", tone),
    )


def _pair(first: str, one: float | None, second: str, other: float | None) -> Line:
    return (
        Piece(f"{first} ", "dim"),
        Piece(f"{_short(one):>5}", "plain" if one else "dim"),
        Piece(f" {second} ", "dim"),
        Piece(f"{_short(other):>5}", "plain" if other else "dim"),
        Piece(" B/s", "dim"),
    )


def _short(value: float | None) -> str:
    """A rate whose unit stands after the pair."""
    return human.rate(value).removesuffix("B/s").replace(" ", "")
