from __future__ import annotations

from pathlib import Path

import pytest

from gpulse.model.frame import NetworkReading
from gpulse.model.metric_catalog import metric_names
from gpulse.sources.network import NetworkReader
from gpulse.sources.procfs import Roots
from tests.unit.trees import grow

HEADER = "Inter-| Receive\n face |bytes\n"
LINE = "{name}: 1 2 3 4 0 0 0 0 5 6 7 8 0 0 0 0\n"
COUNTERS = {
    "rx_bytes_total": 1,
    "rx_packets_total": 2,
    "rx_errors_total": 3,
    "rx_drops_total": 4,
    "tx_bytes_total": 5,
    "tx_packets_total": 6,
    "tx_errors_total": 7,
    "tx_drops_total": 8,
}
PORT = "sys/class/infiniband/mlx5_0/ports/1"


def links(root: Path, *interfaces: str) -> Roots:
    """A tree with these interfaces."""
    return grow(root, {"proc/net/dev": HEADER + "".join(LINE.format(name=name) for name in interfaces)})


def test_an_ethernet_link_has_counters_and_a_speed(tmp_path: Path) -> None:
    """Counters come under the catalogue's names, the speed in bits per second."""

    roots = grow(
        tmp_path,
        {
            "proc/net/dev": HEADER + LINE.format(name="eth0"),
            "sys/class/net/eth0/type": "1\n",
            "sys/class/net/eth0/speed": "25000\n",
            "sys/class/net/eth0/operstate": "up\n",
        },
        {"sys/class/net/eth0/device": "../../pci"},
    )

    readings, health = NetworkReader(roots).read(1.0)

    assert [] == health
    assert (
        NetworkReading("eth0", "ethernet", True, {**COUNTERS, "link_bits_per_second": 25_000_000_000}),
    ) == readings
    assert set(metric_names("network", derived=False)) == readings[0].values.keys()


@pytest.mark.parametrize(
    ("name", "hardware", "has_device", "kind"),
    [
        ("lo", "772", False, "loopback"),
        ("veth1", "1", False, "virtual"),
        ("ib0", "32", True, "infiniband"),
        ("eth0", "1", True, "ethernet"),
        ("tun0", "65534", False, "virtual"),
    ],
)
def test_the_kind_of_a_link(tmp_path: Path, name: str, hardware: str, has_device: bool, kind: str) -> None:
    """Hardware types and the presence of a device tell the kinds apart."""

    files = {"proc/net/dev": LINE.format(name=name), f"sys/class/net/{name}/type": f"{hardware}\n"}
    roots = grow(tmp_path, files, {f"sys/class/net/{name}/device": "../x"} if has_device else {})

    assert kind == NetworkReader(roots).read(1.0)[0][0].kind


@pytest.mark.parametrize("speed", ["-1\n", "0\n", "4294967295\n", "", "fast\n"])
def test_a_link_that_does_not_know_its_speed_has_none(tmp_path: Path, speed: str) -> None:
    """Virtual links and links that are down answer with -1 or nothing."""

    roots = grow(tmp_path, {"proc/net/dev": LINE.format(name="eth0"), "sys/class/net/eth0/speed": speed})

    assert COUNTERS == NetworkReader(roots).read(1.0)[0][0].values


@pytest.mark.parametrize(
    ("files", "up"),
    [
        ({"operstate": "up\n"}, True),
        ({"operstate": "down\n"}, False),
        ({"operstate": "lowerlayerdown\n"}, False),
        ({"operstate": "unknown\n", "carrier": "1\n"}, True),
        ({"operstate": "unknown\n"}, None),
        ({}, None),
    ],
)
def test_whether_a_link_is_up(tmp_path: Path, files: dict[str, str], up: bool | None) -> None:
    """The kernel's state is believed; without one the carrier decides."""

    tree = {f"sys/class/net/eth0/{name}": content for name, content in files.items()}

    roots = grow(tmp_path, {"proc/net/dev": LINE.format(name="eth0"), **tree})

    assert up is NetworkReader(roots).read(1.0)[0][0].up


def test_a_speed_is_looked_up_again_after_half_a_minute(tmp_path: Path) -> None:
    """A link that was renegotiated shows its new speed, though not at once."""

    speed = "sys/class/net/eth0/speed"
    roots = grow(tmp_path, {"proc/net/dev": LINE.format(name="eth0"), speed: "100\n"})
    reader = NetworkReader(roots)
    speeds = []
    for now, megabits in ((0.0, 100), (29.0, 1000), (30.0, 1000)):
        grow(tmp_path, {speed: f"{megabits}\n"})
        speeds.append(reader.read(now)[0][0].values["link_bits_per_second"])

    assert [100e6, 100e6, 1000e6] == speeds


def test_a_cable_pulled_out_is_seen_within_a_second(tmp_path: Path) -> None:
    """The state of a real link is asked for more often than its speed."""

    state = "sys/class/net/eth0/operstate"
    roots = grow(
        tmp_path,
        {"proc/net/dev": LINE.format(name="eth0"), state: "up\n"},
        {"sys/class/net/eth0/device": "../x"},
    )
    reader = NetworkReader(roots)
    reader.read(0.0)
    grow(tmp_path, {state: "down\n"})

    assert reader.read(1.0)[0][0].up is False


def test_links_come_and_go(tmp_path: Path) -> None:
    """An interface that appears is reported at once, one that is gone no more."""

    reader = NetworkReader(links(tmp_path, "eth0"))
    seen = [[reading.name for reading in reader.read(0.0)[0]]]
    links(tmp_path, "eth0", "eth1")
    seen.append([reading.name for reading in reader.read(0.1)[0]])
    links(tmp_path, "eth1")
    seen.append([reading.name for reading in reader.read(0.2)[0]])

    assert [["eth0"], ["eth0", "eth1"], ["eth1"]] == seen


def test_an_infiniband_port_counts_in_words_of_four_bytes(tmp_path: Path) -> None:
    """Data counters are multiplied, errors added up, and the rate is read from its text."""

    counters = {
        "port_rcv_data": "10",
        "port_xmit_data": "20",
        "port_rcv_packets": "3",
        "port_xmit_packets": "4",
        "symbol_error": "1",
        "port_rcv_errors": "2",
        "port_xmit_discards": "5",
        "port_xmit_constraint_errors": "N/A (no PMA)",
    }
    files = {f"{PORT}/counters/{name}": f"{value}\n" for name, value in counters.items()}
    roots = links(tmp_path)
    grow(tmp_path, {**files, f"{PORT}/rate": "400 Gb/sec (4X NDR)\n", f"{PORT}/state": "4: ACTIVE\n"})

    assert (
        NetworkReading(
            "mlx5_0/1",
            "infiniband",
            True,
            {
                "rx_bytes_total": 40,
                "tx_bytes_total": 80,
                "rx_packets_total": 3,
                "tx_packets_total": 4,
                "rx_errors_total": 3,
                "tx_drops_total": 5,
                "link_bits_per_second": 400_000_000_000,
            },
        ),
    ) == NetworkReader(roots).read(1.0)[0]


def test_a_port_that_is_down_and_says_nothing(tmp_path: Path) -> None:
    """A port without counters is still shown, with what is known of it."""

    roots = links(tmp_path)
    grow(tmp_path, {f"{PORT}/state": "1: DOWN\n", f"{PORT}/rate": "2.5 Gb/sec (1X SDR)\n"})

    assert (
        NetworkReading("mlx5_0/1", "infiniband", False, {"link_bits_per_second": 2_500_000_000}),
    ) == NetworkReader(roots).read(1.0)[0]


def test_a_missing_file_is_reported(tmp_path: Path) -> None:
    """Without /proc/net/dev there are no interfaces and one entry says so."""

    readings, health = NetworkReader(grow(tmp_path, {})).read(1.0)

    assert () == readings
    assert [("network", "unreadable")] == [(entry.source, entry.code) for entry in health]


def test_this_machine_has_a_loopback() -> None:
    """On a real kernel the loopback is there and counts."""

    readings, health = NetworkReader().read(1.0)

    assert [] == health
    assert ["loopback"] == [reading.kind for reading in readings if reading.name == "lo"]
