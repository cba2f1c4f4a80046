"""Network interfaces and InfiniBand ports, from /proc and /sys."""

from __future__ import annotations

import re

from gpulse.model.frame import NetworkReading
from gpulse.model.health import Health
from gpulse.model.metric import Value, Values
from gpulse.sources.procfs import (
    Roots,
    due,
    list_names,
    number,
    parse_net_dev,
    read_bytes,
    read_link,
    try_read,
    unreadable,
)

_COUNTERS = (
    ("rx_bytes_total", 0),
    ("rx_packets_total", 1),
    ("rx_errors_total", 2),
    ("rx_drops_total", 3),
    ("tx_bytes_total", 8),
    ("tx_packets_total", 9),
    ("tx_errors_total", 10),
    ("tx_drops_total", 11),
)
_LOOPBACK, _INFINIBAND = 772, 32
_SPEED_PERIOD = 30.0
_STATE_PERIOD = 1.0
_WORD = 4
"""InfiniBand counts data in units of four bytes."""
_TRAFFIC = (
    ("rx_bytes_total", "port_rcv_data", _WORD),
    ("tx_bytes_total", "port_xmit_data", _WORD),
    ("rx_packets_total", "port_rcv_packets", 1),
    ("tx_packets_total", "port_xmit_packets", 1),
)
_ERRORS = {
    "rx_errors_total": ("port_rcv_errors", "symbol_error", "port_rcv_remote_physical_errors"),
    "tx_errors_total": ("port_xmit_constraint_errors",),
    "rx_drops_total": ("port_rcv_constraint_errors", "VL15_dropped"),
    "tx_drops_total": ("port_xmit_discards",),
}


class _Link:
    """What is remembered of an interface or a port."""

    def __init__(self, name: str, folder: str, kind: str) -> None:
        self.name = name
        self.folder = folder
        self.kind = kind
        self.up: bool | None = None
        self.state_at: float | None = None
        self.speed: Values | None = None
        self.speed_at: float | None = None
        self.errors: Values | None = None


class NetworkReader:
    """Reads the counters of all interfaces and ports; speeds and states are looked up less often."""

    def __init__(self, roots: Roots = Roots()) -> None:  # noqa: B008  frozen
        self._roots = roots
        self._path = f"{roots.proc}/net/dev"
        self._links: dict[str, _Link] = {}
        self._ports: list[_Link] = []
        self._ports_at: float | None = None

    def read(self, now: float) -> tuple[tuple[NetworkReading, ...], list[Health]]:
        """One reading of each interface, then of each port; `now` is in epoch seconds."""
        health: list[Health] = []
        try:
            stats = parse_net_dev(read_bytes(self._path))
        except OSError as error:
            stats = {}
            health.append(unreadable("network", self._path, error, now, tuple(name for name, _ in _COUNTERS)))
        if self._links.keys() != stats.keys():
            self._links = {name: self._links.get(name) or self._link(name) for name in stats}
        interfaces = [_interface(self._links[name], counters, now) for name, counters in stats.items()]
        return (*interfaces, *self._read_ports(now)), health

    def _link(self, name: str) -> _Link:
        folder = f"{self._roots.sys}/class/net/{name}"
        hardware = number(try_read(f"{folder}/type"))
        if hardware == _LOOPBACK or name == "lo":
            kind = "loopback"
        elif hardware == _INFINIBAND:
            kind = "infiniband"
        else:
            kind = "virtual" if read_link(f"{folder}/device") is None else "ethernet"
        return _Link(name, folder, kind)

    def _read_ports(self, now: float) -> list[NetworkReading]:
        if due(now, self._ports_at, _SPEED_PERIOD):
            self._ports_at = now
            self._ports = _find_ports(f"{self._roots.sys}/class/infiniband", self._ports)
        return [_port(port, now) for port in self._ports]


def _interface(link: _Link, counters: tuple[int, ...], now: float) -> NetworkReading:
    values: Values = {name: counters[column] for name, column in _COUNTERS}
    if due(now, link.speed_at, _SPEED_PERIOD):
        link.speed_at = now
        link.speed = _speed(link.folder)
        link.up = _is_up(link.folder)
    elif link.kind in ("ethernet", "infiniband") and due(now, link.state_at, _STATE_PERIOD):
        link.state_at = now
        link.up = _is_up(link.folder)
    values.update(link.speed or {})
    return NetworkReading(link.name, link.kind, link.up, values)


def _speed(folder: str) -> Values:
    megabits = number(try_read(f"{folder}/speed"))
    # A link that does not know its speed says -1, in some drivers as an unsigned number.
    if megabits is None or not 0 < megabits < 0xFFFFFFFF:
        return {}
    return {"link_bits_per_second": megabits * 1_000_000}


def _is_up(folder: str) -> bool | None:
    state = (try_read(f"{folder}/operstate") or b"unknown").strip()
    if state != b"unknown":
        return state == b"up"
    # Drivers that keep no state, the loopback's among them, still know whether there is a carrier.
    carrier = number(try_read(f"{folder}/carrier"))
    return None if carrier is None else carrier == 1


def _find_ports(root: str, known: list[_Link]) -> list[_Link]:
    old = {port.name: port for port in known}
    ports: list[_Link] = []
    for device in sorted(list_names(root)):
        for port in sorted(list_names(f"{root}/{device}/ports")):
            name = f"{device}/{port}"
            ports.append(old.get(name) or _Link(name, f"{root}/{device}/ports/{port}", "infiniband"))
    return ports


def _port(port: _Link, now: float) -> NetworkReading:
    """One InfiniBand or RoCE port; a RoCE port counts what bypasses its Ethernet interface."""
    counters = f"{port.folder}/counters"
    values: Values = {}
    for name, file, unit in _TRAFFIC:
        count = number(try_read(f"{counters}/{file}"))
        if count is not None:
            values[name] = count * unit
    if due(now, port.state_at, _STATE_PERIOD):
        # Each of these files is a question to the card's firmware, so they are not asked every time.
        port.state_at = now
        port.up = _port_is_up(port.folder)
        port.errors = _port_errors(counters)
    if due(now, port.speed_at, _SPEED_PERIOD):
        port.speed_at = now
        port.speed = _port_speed(try_read(f"{port.folder}/rate") or b"")
    values.update(port.errors or {})
    values.update(port.speed or {})
    return NetworkReading(port.name, port.kind, port.up, values)


def _port_is_up(folder: str) -> bool | None:
    state = try_read(f"{folder}/state")
    return None if state is None else b"ACTIVE" in state


def _port_errors(counters: str) -> Values:
    values: Values = {}
    for name, files in _ERRORS.items():
        counts = [count for file in files if (count := number(try_read(f"{counters}/{file}"))) is not None]
        if counts:
            values[name] = sum(counts)
    return values


_RATE = re.compile(rb"(\d{1,6}(?:\.\d{1,6})?) Gb/sec")


def _port_speed(rate: bytes) -> Values:
    match = _RATE.match(rate)
    bits: Value | None = round(float(match[1]) * 1e9) if match else None
    return {"link_bits_per_second": bits} if bits else {}
