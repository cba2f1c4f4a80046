"""Network interfaces and InfiniBand ports, and how near a GPU is to each adapter on the PCI bus, from /proc and /sys."""

from __future__ import annotations

import os
import re
from itertools import takewhile
from typing import NamedTuple

from gpulse.model.device import PcieLevel
from gpulse.model.frame import NetworkReading
from gpulse.model.metric_catalog import Value, Values
from gpulse.model.safe_text import natural_key
from gpulse.model.source_health import Health
from gpulse.sources.procfs import (
    KernelFile,
    Roots,
    is_due,
    list_names,
    number,
    parse_net_dev,
    read_link,
    try_read,
    unreadable_health,
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
_SPEED_PERIOD_SECONDS = 30.0
_STATE_PERIOD_SECONDS = 1.0
_WORD_BYTES = 4
"""InfiniBand counts data in units of four bytes."""
_TRAFFIC = (
    ("rx_bytes_total", "port_rcv_data", _WORD_BYTES),
    ("tx_bytes_total", "port_xmit_data", _WORD_BYTES),
    ("rx_packets_total", "port_rcv_packets", 1),
    ("tx_packets_total", "port_xmit_packets", 1),
)
_ERRORS = {
    "rx_errors_total": ("port_rcv_errors", "symbol_error", "port_rcv_remote_physical_errors"),
    "tx_errors_total": ("port_xmit_constraint_errors",),
    "rx_drops_total": ("port_rcv_constraint_errors", "VL15_dropped"),
    "tx_drops_total": ("port_xmit_discards",),
}


class _InterfaceState:
    """Cached state of an interface or a port."""

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
        self._file = KernelFile(f"{roots.proc}/net/dev")
        self._links: dict[str, _InterfaceState] = {}
        self._ports: list[_InterfaceState] = []
        self._ports_at: float | None = None

    def read(self, now: float) -> tuple[tuple[NetworkReading, ...], list[Health]]:
        """Return a reading of each interface, then of each port; `now` is in epoch seconds."""
        health: list[Health] = []
        try:
            stats = parse_net_dev(self._file.read())
        except OSError as error:
            stats = {}
            health.append(
                unreadable_health(
                    "network", self._file.path, error, now, tuple(name for name, _ in _COUNTERS)
                )
            )
        if self._links.keys() != stats.keys():
            self._links = {name: self._links.get(name) or self._link(name) for name in stats}
        interfaces = [_read_interface(self._links[name], counters, now) for name, counters in stats.items()]
        return (*interfaces, *self._read_ports(now)), health

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _link(self, name: str) -> _InterfaceState:
        folder = f"{self._roots.sys}/class/net/{name}"
        hardware = number(try_read(f"{folder}/type"))
        if hardware == _LOOPBACK or name == "lo":
            kind = "loopback"
        elif hardware == _INFINIBAND:
            kind = "infiniband"
        else:
            kind = "virtual" if read_link(f"{folder}/device") is None else "ethernet"
        return _InterfaceState(name, folder, kind)

    def _read_ports(self, now: float) -> list[NetworkReading]:
        if is_due(now, self._ports_at, _SPEED_PERIOD_SECONDS):
            self._ports_at = now
            self._ports = _find_ports(f"{self._roots.sys}/class/infiniband", self._ports)
        return [_read_port(port, now) for port in self._ports]


def _read_interface(link: _InterfaceState, counters: tuple[int, ...], now: float) -> NetworkReading:
    values: Values = {name: counters[column] for name, column in _COUNTERS}
    if is_due(now, link.speed_at, _SPEED_PERIOD_SECONDS):
        link.speed_at = now
        link.speed = _read_speed(link.folder)
        link.up = _is_up(link.folder)
    elif link.kind in ("ethernet", "infiniband") and is_due(now, link.state_at, _STATE_PERIOD_SECONDS):
        link.state_at = now
        link.up = _is_up(link.folder)
    values.update(link.speed or {})
    return NetworkReading(link.name, link.kind, link.up, values)


def _read_speed(folder: str) -> Values:
    megabits = number(try_read(f"{folder}/speed"))
    # A link of unknown speed reports -1, in some drivers as an unsigned number.
    if megabits is None or not 0 < megabits < 0xFFFFFFFF:
        return {}
    return {"link_bits_per_second": megabits * 1_000_000}


def _is_up(folder: str) -> bool | None:
    state = (try_read(f"{folder}/operstate") or b"unknown").strip()
    if state != b"unknown":
        return state == b"up"
    # Drivers without an operational state, such as loopback, still report whether there is a carrier.
    carrier = number(try_read(f"{folder}/carrier"))
    return None if carrier is None else carrier == 1


def _find_ports(root: str, known: list[_InterfaceState]) -> list[_InterfaceState]:
    old = {port.name: port for port in known}
    ports: list[_InterfaceState] = []
    for device in sorted(list_names(root)):
        for port in sorted(list_names(f"{root}/{device}/ports")):
            name = f"{device}/{port}"
            ports.append(
                old.get(name) or _InterfaceState(name, f"{root}/{device}/ports/{port}", "infiniband")
            )
    return ports


def _read_port(port: _InterfaceState, now: float) -> NetworkReading:
    """Read an InfiniBand or RoCE port; a RoCE port counts the traffic that bypasses its Ethernet interface."""
    counters = f"{port.folder}/counters"
    values: Values = {}
    for name, file, unit in _TRAFFIC:
        count = number(try_read(f"{counters}/{file}"))
        if count is not None:
            values[name] = count * unit
    if is_due(now, port.state_at, _STATE_PERIOD_SECONDS):
        # Reading these files queries the card's firmware, so they are not read every time.
        port.state_at = now
        port.up = _port_is_up(port.folder)
        port.errors = _sum_port_errors(counters)
    if is_due(now, port.speed_at, _SPEED_PERIOD_SECONDS):
        port.speed_at = now
        port.speed = _parse_port_speed(try_read(f"{port.folder}/rate") or b"")
    values.update(port.errors or {})
    values.update(port.speed or {})
    return NetworkReading(port.name, port.kind, port.up, values)


def _port_is_up(folder: str) -> bool | None:
    state = try_read(f"{folder}/state")
    return None if state is None else b"ACTIVE" in state


def _sum_port_errors(counters: str) -> Values:
    values: Values = {}
    for name, files in _ERRORS.items():
        counts = [count for file in files if (count := number(try_read(f"{counters}/{file}"))) is not None]
        if counts:
            values[name] = sum(counts)
    return values


_RATE = re.compile(rb"(\d{1,6}(?:\.\d{1,6})?) Gb/sec")


def _parse_port_speed(rate: bytes) -> Values:
    match = _RATE.match(rate)
    bits: Value | None = round(float(match[1]) * 1e9) if match else None
    return {"link_bits_per_second": bits} if bits else {}


_FUNCTION = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f]")
_HOST_BRIDGE = re.compile(r"pci[0-9a-f]{4,8}:[0-9a-f]{2}")
_MAX_ADAPTERS = 32
_BELOW_ONE_SWITCH = 2
"""A device on a PCIe switch is two steps below the switch: its downstream port, and itself."""


class PciPath(NamedTuple):
    """A PCI device: the bridges above it, from the host bridge down, and its NUMA node."""

    steps: tuple[str, ...]
    numa_node: int | None


class PciDevices:
    """The PCI devices of this machine."""

    def __init__(self, roots: Roots = Roots()) -> None:  # noqa: B008  frozen
        self._sys = roots.sys

    def find_adapters(self, bus_id: str) -> list[tuple[str, PcieLevel]]:
        """Return the network adapters, each with the level of its path to the device at a bus ID.

        An adapter has the name of its InfiniBand device if there is one, else that of its interface. Virtual
        functions are left out.
        """
        own = self._path(f"{self._sys}/bus/pci/devices/{_short_bus_id(bus_id)}")
        if own is None:
            return []
        found = {}
        for name, path in self._adapters().items():
            level = pcie_level(own, path, has_several_nodes=self._has_several_nodes())
            if level is not None:
                found[name] = level
        return sorted(found.items(), key=lambda item: natural_key(item[0]))

    def _adapters(self) -> dict[str, PciPath]:
        found: dict[tuple[str, ...], tuple[str, PciPath]] = {}
        for kind in ("infiniband", "net"):
            for name in sorted(list_names(f"{self._sys}/class/{kind}"), key=natural_key):
                folder = f"{self._sys}/class/{kind}/{name}/device"
                path = None if os.path.lexists(f"{folder}/physfn") else self._path(folder)
                if path is not None and len(found) < _MAX_ADAPTERS:
                    found.setdefault(path.steps, (name, path))
        return dict(found.values())

    def _path(self, folder: str) -> PciPath | None:
        """Return the PCI device of a folder in /sys; None when it does not exist or is not a PCI device."""
        parts = os.path.realpath(folder).split("/")
        first = next((at for at, part in enumerate(parts) if _HOST_BRIDGE.fullmatch(part)), None)
        if first is None or not os.path.isdir(folder):
            return None
        functions = takewhile(_FUNCTION.fullmatch, parts[first + 1 :])  # what follows is not on the PCI bus
        node = number((try_read(f"{folder}/numa_node") or b"").strip() or None)
        return PciPath((parts[first], *functions), None if node is None or node < 0 else node)

    def _has_several_nodes(self) -> bool:
        nodes = [
            name for name in list_names(f"{self._sys}/devices/system/node") if re.fullmatch(r"node\d+", name)
        ]
        return len(nodes) > 1


def pcie_level(one: PciPath, other: PciPath, *, has_several_nodes: bool) -> PcieLevel | None:
    """Return what the path between two PCI devices crosses; None when their NUMA nodes are needed and unknown."""
    shared = sum(
        1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one.steps, other.steps, strict=False))
    )
    if shared > 1:
        below = max(len(one.steps), len(other.steps)) - shared
        return "PIX" if below <= _BELOW_ONE_SWITCH else "PXB"
    if shared == 1:
        return "PHB"
    if not has_several_nodes:
        return "NODE"
    if one.numa_node is None or other.numa_node is None:
        return None
    return "NODE" if one.numa_node == other.numa_node else "SYS"


def _short_bus_id(bus_id: str) -> str:
    """Return NVML's bus ID as the kernel writes it: with four digits for the domain if these are enough."""
    domain, _, rest = bus_id.partition(":")
    return f"{int(domain, 16):04x}:{rest}" if re.fullmatch("[0-9a-f]{1,8}", domain) else bus_id
