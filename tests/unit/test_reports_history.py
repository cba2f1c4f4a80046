"""Several metrics over time: one grid, gaps, rates of counters, and the same answer wherever the samples are."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpulse.errors import RefusedError
from gpulse.model.frame import DiskReading, FilesystemReading, HostReading, NetworkReading
from gpulse.reports.time_grid import make_grid
from tests.unit.report_lab import BEGIN, Document, Held, Lab, check_alike


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    """A node with a GPU and a part of one, and a node with one GPU."""
    with Lab(tmp_path, ("0", "1", "1:0"), ("0",)) as lab:
        yield lab


def lines(answer: Document) -> dict[tuple[str, str, str], list[float | None]]:
    """The values by node, subject and metric."""
    return {(one["node"], one["subject"], one["metric"]): one["values"] for one in answer["series"]}


@pytest.mark.parametrize(
    ("seconds", "points", "pace", "step"),
    [
        (300, 600, 0.5, 1),
        (300, 600, 1.0, 1),
        (300, 600, 5.0, 5),
        (3600, 600, 1.0, 10),
        (86_400, 600, 1.0, 300),
        (86_400, 2000, 1.0, 60),
        (30 * 86_400, 600, 1.0, 7200),
        (300, 600, 45.0, 60),
        (365 * 86_400, 100, 1.0, 4 * 86_400),
    ],
)
def test_steps_are_round_and_few(seconds: float, points: int, pace: float, step: float) -> None:
    """The shortest round step that gives no more points than wanted, and is no shorter than samples are apart."""
    moments = make_grid(BEGIN + 7.5, BEGIN + 7.5 + seconds, points, pace)
    assert (step, True) == (moments.step, 0 < moments.count <= points)
    assert moments.start <= BEGIN + 7.5 < moments.start + step
    assert moments.times()[-1] < BEGIN + 7.5 + seconds <= moments.times()[-1] + step


async def test_one_grid_with_gaps(lab: Lab) -> None:
    """Every series has a value for every moment; where there was no sample it is null."""
    for second in (*range(0, 30, 5), *range(45, 60, 5)):
        lab.fill(
            [second],
            values={"0": {"power_watts": float(second)}, "1": {"temperature_celsius": 60}, "1:0": {}},
        )
    lab.fill(range(20, 40, 5), node=2, values={"0": {"power_watts": 7.0}})
    answer = await lab.history(
        ["power_watts", "temperature_celsius"], start=0, end=60, spread=True, points=10
    )
    assert (10.0, [BEGIN + 10.0 * place for place in range(6)]) == (answer["step"], answer["times"])
    assert {
        ("n1", "GPU-1-0", "power_watts"): [2.5, 12.5, 22.5, None, 45.0, 52.5],
        ("n1", "GPU-1-1", "temperature_celsius"): [60, 60, 60, None, 60, 60],
        ("n2", "GPU-2-0", "power_watts"): [None, None, 7.0, 7.0, None, None],
    } == lines(answer)
    first = answer["series"][0]
    assert [0.0, 10.0, 20.0, None, 45.0, 50.0] == first["lows"]
    assert [5.0, 15.0, 25.0, None, 45.0, 55.0] == first["highs"]
    assert ("0", "watts") == (first["gpu"], first["unit"])


async def test_counters_are_rates(lab: Lab) -> None:
    """A counter is answered as its growth a second; where it went back, as after a restart, nothing is known."""
    for second in range(0, 60, 5):
        joules = 1000.0 + 20 * second if second < 30 else 3.0 * (second - 30)
        lab.fill([second], values={"0": {"energy_joules_total": joules}})
    answer = await lab.history(["energy_joules_total"], start=0, end=60, points=10, spread=True)
    (series,) = answer["series"]
    assert ("joules/second", False) == (series["unit"], "lows" in series)
    assert [None, 20.0, 20.0, None, 3.0, 3.0] == series["values"]
    later = await lab.history(["energy_joules_total"], start=10, end=110, points=10)
    assert [20.0, 20.0, None, 3.0, 3.0, *[None] * 5] == later["series"][0]["values"]


async def test_numbers_have_no_more_digits_than_they_are_worth(lab: Lab) -> None:
    """Means are told with two more than a source reports; a rate that is small is not none."""
    metrics = ("power_watts", "gpu_utilization_ratio", "temperature_celsius", "xid_errors_total")
    for second, *told in ((0, 693.4, 0.1, 61, 0), (5, 693.5, 0.2, 61, 0), (10, 693.459, 0.2, 62, 0)):
        lab.fill([second], values={"0": dict(zip(metrics, told, strict=True))})
    lab.fill([2410], values={"0": {"xid_errors_total": 1}})
    found = lines(await lab.history(metrics, start=0, end=7200, points=10))

    assert [693.453, 0.1667, 61.33] == [found["n1", "GPU-1-0", metric][0] for metric in metrics[:3]]
    assert 0.000416667 == found["n1", "GPU-1-0", "xid_errors_total"][2]


async def test_other_scopes(lab: Lab) -> None:
    """Hosts, disks, interfaces, file systems and processes have series of their own."""
    for second in range(0, 60, 5):
        lab.fill(
            [second],
            Held(7, ("0",), sm=0.25),
            host=HostReading({"load1": 1.5, "cpus": 8}),
            disks=(DiskReading("sda", "ssd", {"read_bytes_total": second * 512}),),
            network=(NetworkReading("eth0", "ethernet", True, {"rx_bytes_total": second * 100}),),
            filesystems=(FilesystemReading("/", "/dev/sda1", "ext4", "sda", "ssd", {"used_bytes": 1000}),),
        )

    async def one(scope: Any, metric: str, **more: Any) -> dict[tuple[str, str, str], list[float | None]]:
        return lines(await lab.history([metric], scope=scope, start=20, end=40, points=10, **more))

    assert {("n1", "", "load1"): [1.5] * 4} == await one("host", "load1")
    assert {("n1", "sda", "read_bytes_total"): [512.0] * 4} == await one("disk", "read_bytes_total")
    assert {("n1", "eth0", "rx_bytes_total"): [100.0] * 4} == await one("network", "rx_bytes_total")
    assert {("n1", "/", "used_bytes"): [1000.0] * 4} == await one("filesystem", "used_bytes")
    assert {("n1", "7@GPU-1-0", "sm_ratio"): [0.25] * 4} == await one("process", "sm_ratio", gpus=("n1:0",))
    assert {} == await one("process", "sm_ratio", gpus=("n1:1",))
    assert {("n1", "", "load1"): [1.5] * 4} == await one("host", "load1", gpus=("n1:0",))


async def test_chosen_gpus(lab: Lab) -> None:
    """GPUs are chosen as everywhere, parts of them too; what there is not is refused."""
    lab.fill(range(0, 30, 5))
    lab.fill(range(0, 30, 5), node=2)
    answer = await lab.history(["power_watts"], start=0, end=30, gpus=("n1:1:0", "GPU-2-0"))
    assert [("n1", "1:0"), ("n2", "0")] == [(one["node"], one["gpu"]) for one in answer["series"]]
    with pytest.raises(RefusedError):
        await lab.history(["power_watts"], start=0, end=30, nodes=("n3",))
    with pytest.raises(RefusedError):
        await lab.history(["power_watts"], start=0, end=30, gpus=("n1:9",))


async def test_an_empty_time(lab: Lab) -> None:
    """Nothing is between now and earlier, and nothing before there was a store."""
    lab.fill(range(0, 30, 5))
    answer = await lab.history(["power_watts"], start=30, end=0)
    assert ([], []) == (answer["times"], answer["series"])
    assert [] == (await lab.history(["power_watts"], start=-1000, end=-500))["series"]


@pytest.mark.slow
@pytest.mark.parametrize(("points", "step"), [(1000, 5), (100, 60)])
async def test_the_same_from_memory_files_and_minutes(lab: Lab, points: int, step: int) -> None:
    """Sealing and merging change nothing of an answer."""
    for begin, end in ((0, 5), (5, 2000), (2000, 4000), (4000, 5000)):
        lab.add(
            [
                lab.frame(
                    second, values={"0": {"power_watts": second / 10, "energy_joules_total": 7.0 * second}}
                )
                for second in range(begin, end, 5)
                if not 900 < second < 1000
            ]
        )
        if end in (2000, 4000):
            lab.archive.seal()
    metrics = ["power_watts", "energy_joules_total"]
    asked: Any = {"start": 123, "end": 4877, "points": points, "spread": True}
    partly = await lab.history(metrics, **asked)
    lab.archive.tidy(BEGIN + 5000.0, keep_seconds=1e9, limit_bytes=None)
    merged = await lab.history(metrics, **asked)
    assert any(segment.is_compacted for segment in lab.archive._history.segments)
    assert step == merged["step"]
    check_alike(partly, merged)
    rates = next(one["values"] for one in merged["series"] if one["metric"] == "energy_joules_total")
    known = [rate for rate in rates if rate is not None]
    assert [7.0] * len(known) == pytest.approx(known)
    assert (step < 60) == (len(known) < len(rates))


async def test_percentiles_over_many_gpus(tmp_path: Path) -> None:
    """The distribution of those that are alike, and the one that is not as a series; where nothing is known it is null."""
    labels = tuple(str(place) for place in range(12))
    with Lab(tmp_path, labels) as lab:
        values = {label: {"power_watts": 500.0 + int(label) % 3} for label in labels}
        values["7"] = {"power_watts": 100.0}
        lab.fill(range(0, 30, 5), values=values)
        answer = await lab.history(["power_watts"], start=0, end=60, points=10, spread="percentiles")

    (band,) = answer["bands"]
    assert ("power_watts", 11) == (band["metric"], band["count"])
    assert (501.0, 500.0, 502.0) == (band["values"][0], band["lows"][0], band["highs"][0])
    assert [None, None] == band["values"][-2:]
    assert ["7"] == [series["gpu"] for series in answer["series"]]


async def test_a_group_has_no_outliers(tmp_path: Path) -> None:
    """Where half of the GPUs do something else, none of them is named."""
    labels = tuple(str(place) for place in range(12))
    with Lab(tmp_path, labels) as lab:
        lab.fill(
            range(0, 30, 5),
            values={label: {"power_watts": 500.0 if int(label) < 7 else 100.0} for label in labels},
        )
        answer = await lab.history(["power_watts"], start=0, end=30, points=10, spread="percentiles")

    assert (12, []) == (answer["bands"][0]["count"], answer["series"])
