from __future__ import annotations

import pytest

from gpulse.model.counter_rates import compute_rates
from gpulse.model.device import Device, Node
from gpulse.model.frame import (
    CgroupReading,
    DiskReading,
    FilesystemReading,
    Frame,
    GpuReading,
    HostReading,
    NetworkReading,
)
from gpulse.model.metric_catalog import CATALOG, Values
from gpulse.model.process import ProcessIdentity, ProcessReading

BEFORE = Frame(1000.0, 50.0, Node("n"))
AFTER = Frame(1002.0, 52.0, Node("n"))


def process(pid: int, start: float | None, user: float, system: float = 0.0) -> ProcessReading:
    """A process that has used so much CPU."""
    values: Values = {"cpu_user_seconds_total": user, "cpu_system_seconds_total": system}
    return ProcessReading(ProcessIdentity(pid, start_time=start), "R", values)


def test_counters_become_rates() -> None:
    """Bytes, requests and seconds over the time between the frames."""

    disks = [
        (DiskReading("sda", "ssd", values),)
        for values in (
            {
                "read_bytes_total": 1000,
                "reads_total": 10,
                "read_seconds_total": 1.0,
                "busy_seconds_total": 3.0,
            },
            {
                "read_bytes_total": 5000,
                "reads_total": 14,
                "read_seconds_total": 3.0,
                "busy_seconds_total": 4.0,
            },
        )
    ]

    rates = compute_rates(BEFORE._replace(disks=disks[0]), AFTER._replace(disks=disks[1]))

    assert {
        "read_bytes_per_second": 2000,
        "reads_per_second": 2,
        "read_await_seconds": 0.5,
        "busy_ratio": 0.5,
    } == rates.disks["sda"]
    assert 2.0 == rates.interval_seconds


def test_every_rate_is_in_the_catalog_as_derived() -> None:
    """Whatever rates are made of, they have a name there."""

    host: Values = {name: 10.0 for name in CATALOG["host"] if name.endswith("_total")}
    grown: Values = {name: value + 1 for name, value in host.items()}
    disk: Values = dict.fromkeys((n for n in CATALOG["disk"] if n.endswith("_total")), 1)
    mount: Values = dict.fromkeys((n for n in CATALOG["filesystem"] if n.endswith("_total")), 1)
    link: Values = dict.fromkeys((n for n in CATALOG["network"] if n.endswith("_total")), 1)
    own: Values = dict.fromkeys((n for n in CATALOG["process"] if n.endswith("_total")), 1)
    group: Values = dict.fromkeys((n for n in CATALOG["cgroup"] if n.endswith("_total")), 1)
    gpu: Values = {f"{link}_bytes_total": 1 for link in ("pcie_rx", "pcie_tx", "nvlink_rx", "nvlink_tx")}

    def frame(base: Frame, host: Values, more: int) -> Frame:
        def grow(values: Values) -> Values:
            return {name: value + more for name, value in values.items()}

        return base._replace(
            gpus=(GpuReading(Device(0, "u", "g"), grow(gpu)),),
            host=HostReading(host, ((1, 1, 1, more, 1, 0, 0, 0),)),
            disks=(DiskReading("sda", None, grow(disk)),),
            filesystems=(FilesystemReading("/data", "srv:/a", "nfs4", None, "network", grow(mount)),),
            network=(NetworkReading("eth0", "ethernet", True, grow(link)),),
            processes=(ProcessReading(ProcessIdentity(1, start_time=900.0), "R", grow(own)),),
            cgroups=(CgroupReading("/", grow(group)),),
        )

    rates = compute_rates(frame(BEFORE, host, 0), frame(AFTER, grown, 3))
    found = {
        "gpu": set(rates.gpus["u"]),
        "host": set(rates.host),
        "disk": set(rates.disks["sda"]),
        "filesystem": set(rates.filesystems["/data"]),
        "network": set(rates.network["eth0"]),
        "process": set(rates.processes[1, 900.0]),
        "cgroup": set(rates.cgroups["/"]),
    }

    for scope, derived in found.items():
        metrics = CATALOG[scope]  # type: ignore[index]
        assert derived <= metrics.keys()
        if scope != "gpu":  # its link rates are read where there is GPM
            assert {name for name, metric in metrics.items() if metric.derived} == derived


def test_a_counter_that_ran_backwards_gives_no_rate() -> None:
    """A new boot, a reloaded driver or a wrapped register: unknown, never negative, never huge."""

    old = (NetworkReading("eth0", "ethernet", True, {"rx_bytes_total": 2**32 - 5, "tx_bytes_total": 10}),)
    new = (NetworkReading("eth0", "ethernet", True, {"rx_bytes_total": 5, "tx_bytes_total": 30}),)

    rates = compute_rates(BEFORE._replace(network=old), AFTER._replace(network=new))

    assert {"tx_bytes_per_second": 10.0} == rates.network["eth0"]


@pytest.mark.parametrize(
    "later",
    [
        AFTER._replace(node=Node("other")),
        AFTER._replace(monotonic=50.0),
        AFTER._replace(monotonic=49.0),
    ],
    ids=["another node", "no time between", "time ran backwards"],
)
def test_frames_that_do_not_belong_together_give_no_rates(later: Frame) -> None:
    """Another node, or no time between them."""

    host = HostReading({"context_switches_total": 1})

    rates = compute_rates(BEFORE._replace(host=host), later._replace(host=host))

    assert (0.0, {}, {}) == (rates.interval_seconds, rates.host, rates.processes)


def test_a_new_process_has_an_age_but_no_rate_yet() -> None:
    """One reading is not enough to say what it uses."""

    rates = compute_rates(BEFORE, AFTER._replace(processes=(process(7, 1001.0, 9.0),)))

    assert {"elapsed_seconds": 1.0} == rates.processes[7, 1001.0]


def test_a_pid_that_is_used_again_is_a_new_process() -> None:
    """The same pid with another start time has nothing to do with the one before."""

    rates = compute_rates(
        BEFORE._replace(processes=(process(7, 500.0, 1.0),)),
        AFTER._replace(processes=(process(7, 1001.0, 9.0),)),
    )

    assert [(7, 1001.0)] == list(rates.processes)
    assert "cpu_percent" not in rates.processes[7, 1001.0]


def test_cpu_percent_counts_every_core() -> None:
    """Two busy threads are two hundred per cent."""

    rates = compute_rates(
        BEFORE._replace(processes=(process(7, 500.0, 1.0, 1.0),)),
        AFTER._replace(processes=(process(7, 500.0, 4.0, 2.0),)),
    )

    assert 200.0 == rates.processes[7, 500.0]["cpu_percent"]


def test_a_process_without_a_start_time_is_known_by_its_pid() -> None:
    """As in recordings that do not have it."""

    rates = compute_rates(
        BEFORE._replace(processes=(process(7, None, 1.0),)),
        AFTER._replace(processes=(process(7, None, 2.0),)),
    )

    assert {"cpu_percent": 50.0} == rates.processes[7, None]


def test_a_share_of_time_is_at_most_all_of_it() -> None:
    """Counters and clocks are not read at the very same instant."""

    disks = [(DiskReading("sda", "ssd", {"busy_seconds_total": busy}),) for busy in (0.0, 2.02)]

    rates = compute_rates(BEFORE._replace(disks=disks[0]), AFTER._replace(disks=disks[1]))

    assert 1.0 == rates.disks["sda"]["busy_ratio"]


def test_cores_that_came_or_went_give_no_shares() -> None:
    """A CPU taken offline shifts the rows; guessing which is which would be wrong."""

    host = HostReading({}, ((1, 0, 0, 9, 0),))
    more = HostReading({}, ((2, 0, 0, 18, 0), (1, 0, 0, 9, 0)))

    assert () == compute_rates(BEFORE._replace(host=host), AFTER._replace(host=more)).cores


def test_a_core_that_did_not_tick_is_unknown() -> None:
    """Neither busy nor idle."""

    old = HostReading({}, ((1, 0, 0, 9, 0), (1, 0, 0, 9, 0)))
    new = HostReading({}, ((2, 0, 0, 12, 0), (1, 0, 0, 9, 0)))

    assert (0.25, None) == compute_rates(BEFORE._replace(host=old), AFTER._replace(host=new)).cores


def test_a_link_rate_that_was_read_is_not_derived() -> None:
    """GPM's own rate is better than one from counters."""

    device = Device(0, "u", "g")
    old: Values = {"pcie_rx_bytes_total": 0, "pcie_tx_bytes_total": 0}
    new: Values = {"pcie_rx_bytes_total": 100, "pcie_tx_bytes_total": 100, "pcie_rx_bytes_per_second": 7}

    rates = compute_rates(
        BEFORE._replace(gpus=(GpuReading(device, old),)), AFTER._replace(gpus=(GpuReading(device, new),))
    )

    assert {"pcie_tx_bytes_per_second": 50.0} == rates.gpus["u"]


def linked(read_at: float, received: int) -> GpuReading:
    """A GPU that counts bytes over PCIe, and when it was last asked."""
    values: Values = {"pcie_rx_bytes_total": received}
    return GpuReading(Device(0, "GPU-0", "gpu"), values, read_at={"second": read_at})


def test_a_link_rate_is_taken_over_the_time_between_its_readings() -> None:
    """A counter read every second is not divided by the time between two frames."""

    rates = compute_rates(
        BEFORE._replace(gpus=(linked(999.5, 1000),)), AFTER._replace(gpus=(linked(1001.5, 5000),))
    )

    assert {"pcie_rx_bytes_per_second": 2000.0} == rates.gpus["GPU-0"]


def test_a_counter_that_is_merely_held_gives_no_rate() -> None:
    """Between two readings of it nothing is known, which is not zero."""

    rates = compute_rates(
        BEFORE._replace(gpus=(linked(999.5, 1000),)), AFTER._replace(gpus=(linked(999.5, 1000),))
    )

    assert {} == rates.gpus["GPU-0"]
