"""Totals and trends of the fleet: states of GPUs, GPU-hours, the file, and what a restart keeps."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from datetime import UTC, timedelta, timezone
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pytest

from gpulse.cluster.head.fleet import Fleet, FleetMember
from gpulse.cluster.head.fleet_monitor import FleetMonitor
from gpulse.cluster.head.fleet_totals import (
    DAY_STEP_SECONDS,
    TOTALS_FILE,
    StateCounts,
    TotalsHistory,
    find_midnights,
    read_totals,
)
from gpulse.model.device import Device, Node
from gpulse.model.finding import Finding
from gpulse.model.frame import Frame, GpuReading, HostReading
from gpulse.model.frame_packing import FramePacker
from gpulse.model.packed_columns import ColumnLayout, layout_id
from gpulse.model.process import GpuProcess, Owner, ProcessIdentity, ProcessReading
from gpulse.store.store import Query, Series, SeriesKey, Store, StoredNode
from tests.unit.gpu_state_cases import STATE_CASES

MIDNIGHT = find_midnights(1_794_916_800.0)[0]
NOON = MIDNIGHT + 12 * 3600
GIB = 1 << 30

Used = dict[str, float | None]
Uses = list[dict[str, Any]] | None


class Machine:
    """A node of the fleet that sends frames when it is told to."""

    def __init__(self, fleet: Fleet, number: int, devices: Sequence[Device], name: str = "") -> None:
        self.devices = list(devices)
        self.member: FleetMember = fleet.member(
            StoredNode(number, name or f"n{number}", f"n{number}", f"m{number}", NOON, {}, {}), NOON
        )
        self._fleet = fleet
        self._packer = FramePacker()

    def send(self, time: float, values: Sequence[Used], uses: Sequence[Uses] = ()) -> None:
        """Send a frame, with processes if the uses of its GPUs are given."""
        readings = [{name: value for name, value in used.items() if value is not None} for used in values]
        of = [list(use or ()) for use in uses] or [[] for _ in values]
        frame = Frame(
            time,
            time,
            Node(self.member.name),
            tuple(
                GpuReading(device, used, tuple(GpuProcess(one["pid"], "compute") for one in use))
                for device, used, use in zip(self.devices, readings, of, strict=True)
            ),
            HostReading({"cpu_utilization_ratio": 0.5}),
        )
        for one in (one for use in of for one in use):
            identity = ProcessIdentity(one["pid"], owner=Owner(one.get("user"), job=one.get("job")))
            frame = frame._replace(processes=(*frame.processes, ProcessReading(identity, "R", {})))
            self.member.processes[one["pid"]] = identity
        packed, layouts = self._packer.pack(frame)
        for text in layouts:
            self._fleet.layouts[layout_id(text)] = ColumnLayout.from_json(text)
        if any(use is None for use in uses):
            packed = packed._replace(blocks=packed.blocks[:2])
        self.member.take(packed, self._fleet.layouts, 0)


class Lab:
    """A fleet, its monitor, and a clock that is set by hand."""

    def __init__(self, directory: Path, store: Store | None = None, now: float = NOON) -> None:
        self.time = now
        self.fleet = Fleet({}, {}, {})
        self.directory = directory
        self._store = store or Empty()
        self.monitor = self.restarted()

    def restarted(self) -> FleetMonitor:
        """Another monitor of the same fleet, as a head makes it when it starts."""
        self.monitor = FleetMonitor(
            self.fleet, self._store, str(self.directory), missing=lambda: 1, now=lambda: self.time
        )
        self.monitor.open()
        return self.monitor

    def machine(self, number: int = 1, gpus: int = 1, name: str = "") -> Machine:
        """A node with some GPUs."""
        return Machine(
            self.fleet, number, [Device(at, f"GPU-{number}-{at}", "H200") for at in range(gpus)], name
        )

    def play(self, seconds: float, send: Callable[[float], None], step: float = 3.0) -> None:
        """Let time pass, with a frame for every sample."""
        end = self.time + seconds
        while self.time < end:
            self.time += step
            send(self.time)
            self.monitor.sample(self.time)


class Empty(Store):
    """A store without anything."""


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    """A fleet without nodes."""
    return Lab(tmp_path)


@pytest.mark.parametrize(("values", "uses", "expected"), STATE_CASES)
def test_the_head_finds_the_states_of_the_dashboard(
    lab: Lab, values: Used, uses: Uses, expected: str
) -> None:
    """The same cases as in the tests of the dashboard."""
    machine = lab.machine()
    lab.play(60, lambda time: machine.send(time, [values], [uses]))
    now = lab.monitor.totals().now
    counted = {
        "busy": now.busy,
        "idle": now.held_idle,
        "free": now.free,
        "harvested": now.harvested,
        "unknown": now.gpus - now.busy - now.held_idle - now.free - now.harvested,
    }

    assert {expected: 1} == {state: count for state, count in counted.items() if count}


def test_a_fault_counts_only_where_nobody_is(lab: Lab) -> None:
    """Somebody who holds a faulty GPU is not hidden; the GPUs of a lost node are lost whatever they did."""
    machine, other = lab.machine(1, gpus=3), lab.machine(2, gpus=2)
    machine.member.findings = [
        Finding("gpu_fault", "fault", "high", 1.0, "", gpu=gpu, label=str(gpu)) for gpu in (0, 1)
    ]
    other.member.state = "lost"
    machine.send(NOON, [{"gpu_utilization_ratio": used} for used in (0.0, 0.9, 0.0)])
    other.send(NOON, [{"gpu_utilization_ratio": 0.9, "power_watts": 700.0}] * 2)
    lab.time += 1
    now = lab.monitor.totals().now

    assert (5, 1, 1, 1, 2, None) == (now.gpus, now.faulty, now.busy, now.free, now.lost, now.power_watts)


def test_a_mig_instance_counts_and_the_gpu_that_it_is_part_of_does_not(lab: Lab) -> None:
    """The instance has no utilization of its own; the power is that of the whole GPU."""
    whole = Device(0, "GPU-a", "H200")
    parts = [Device(0, f"MIG-{at}", "H200", parent_uuid="GPU-a", mig_index=at) for at in range(2)]
    machine = Machine(lab.fleet, 1, [whole, *parts])
    machine.send(
        NOON, [{"power_watts": 300.0}, {"sm_active_ratio": 0.4}, {"sm_active_ratio": 0.0}], [[], [], []]
    )
    lab.time += 1
    now = lab.monitor.totals().now
    trends = asyncio.run(lab.monitor.trends()).gpus["n1"]

    assert (2, 1, 1, 300.0) == (now.gpus, now.busy, now.free, now.power_watts)
    assert {"0": None, "0:0": 0.4, "0:1": 0.0} == {label: values[-1] for label, values in trends.items()}


def test_hours_in_which_gpus_are_held_and_idle_are_wasted(lab: Lab) -> None:
    """An hour of three held GPUs of which one works; the first half minute is in doubt."""
    machine = lab.machine(gpus=4)
    ada, bob = {"pid": 1, "user": "ada"}, {"pid": 2, "user": "bob"}

    def send(time: float) -> None:
        used = [0.9, 0.0, 0.0, 0.0]
        values: list[Used] = [{"gpu_utilization_ratio": ratio, "power_watts": 100.0} for ratio in used]
        machine.send(time, values, [[ada], [ada], [ada, bob], []])

    lab.play(3600, send)
    answer = lab.monitor.totals()
    now, day = answer.now, answer.day

    assert (1, 2, 1, 400.0, 2, 1) == (
        now.busy,
        now.held_idle,
        now.free,
        now.power_watts,
        now.idle_users,
        now.missing_nodes,
    )
    assert now.wasted_gpu_hours_today == pytest.approx(2 * 3570 / 3600, abs=0.01)
    assert now.held_gpu_hours_today == pytest.approx(3.0, abs=0.01)
    assert now.wasted_gpu_hours_yesterday is None
    assert now.longest_idle_seconds == pytest.approx(3597, abs=1)
    assert [None] * 91 == list(day.busy[:91])
    assert [1.0, 1.0, 1.0] == list(day.busy[92:95])
    assert [2.0, 2.0, 2.0] == list(day.held_idle[92:95])
    assert [0.5, 0.5, 0.5] == pytest.approx([value or 0.0 for value in day.wasted_gpu_hours[92:95]], abs=0.01)
    assert [400.0] * 4 == list(day.power_watts[91:95])
    assert day.start == lab.time // 900 * 900 - 95 * 900


def test_nothing_is_known_of_the_time_in_which_nobody_looked(lab: Lab) -> None:
    """A suspended head does not count the time that it has missed."""
    machine = lab.machine()
    lab.play(300, lambda time: machine.send(time, [{"gpu_utilization_ratio": 0.9}]))
    lab.time += 1800
    lab.play(300, lambda time: machine.send(time, [{"gpu_utilization_ratio": 0.9}]))

    assert lab.monitor.totals().now.held_gpu_hours_today == pytest.approx(600 / 3600, abs=0.005)
    assert [1.0, None, 1.0] == list(lab.monitor.totals().day.busy[-3:])


def test_the_totals_survive_a_restart(lab: Lab) -> None:
    """Also for how long a GPU has been idle, although the new head has not seen it work."""
    machine = lab.machine()

    def send(used: float) -> Callable[[float], None]:
        return lambda time: machine.send(
            time,
            [{"gpu_utilization_ratio": used, "memory_used_bytes": 9 * GIB}],
            [[{"pid": 1, "user": "ada"}]],
        )

    lab.play(600, send(0.9))
    lab.play(600, send(0.0))
    before = lab.monitor.totals()
    asyncio.run(lab.monitor.save())
    lab.time += 60
    lab.restarted()
    lab.play(3, send(0.0))
    after = lab.monitor.totals()

    assert before.now.longest_idle_seconds == 600
    assert after.now.longest_idle_seconds == 663
    assert before.day.busy[-2:] == after.day.busy[-2:]
    assert after.now.wasted_gpu_hours_today == pytest.approx(573 / 3600, abs=0.002)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b'{"version":2,"steps":[],"idle":[]}',
        b'{"version":1,"steps":[[900,1e400,0,0,0,0,0,0,0]],"idle":[]}',
        b'{"version":1,"steps":[[900,-1,0,0,0,0,0,0,0]],"idle":[]}',
        b'{"version":1,"steps":[[901,1,0,0,0,0,0,0,0]],"idle":[]}',
        b'{"version":1,"steps":[[900,90000,0,0,0,0,0,0,0]],"idle":[]}',
        b'{"version":1,"steps":[],"idle":[["GPU",null,"x"]]}',
        b'{"version":1,"steps":[' + b",".join([b"[900]"] * 300) + b'],"idle":[]}',
    ],
)
def test_a_damaged_file_is_refused_as_a_whole(lab: Lab, content: bytes) -> None:
    """The head starts without it."""
    (lab.directory / TOTALS_FILE).write_bytes(content)

    assert lab.restarted().totals().now.wasted_gpu_hours_yesterday is None
    with pytest.raises(ValueError, match=r"."):
        read_totals(content)


def test_totals_are_kept_for_two_days() -> None:
    """What the file contains is bounded, and yesterday is complete."""
    history = TotalsHistory()
    counts = StateCounts(busy=2, held_idle=1)
    for place in range(5 * 96):
        history.add(counts, DAY_STEP_SECONDS, MIDNIGHT + place * DAY_STEP_SECONDS)
    history, _ = read_totals(history.to_bytes(()))
    end = MIDNIGHT + 5 * 86_400

    assert (24.0, 72.0) == history.gpu_hours(end - 86_400, end)
    assert (24.0, 72.0) == history.gpu_hours(end - 2 * 86_400, end - 86_400)
    assert history.gpu_hours(MIDNIGHT, MIDNIGHT + 86_400) is None


@pytest.mark.parametrize(
    ("now", "zone", "hours"),
    [
        (1_794_916_800.0, UTC, (12, 36)),
        (1_794_916_800.0, timezone(timedelta(hours=5, minutes=45)), (17.75, 41.75)),
        (1_761_476_400.0, ZoneInfo("Europe/Berlin"), (13, 37)),  # the clocks went back in this night
    ],
)
def test_a_day_begins_at_the_midnight_of_the_head(now: float, zone: Any, hours: tuple[float, float]) -> None:
    """Also on the day on which the clocks change."""
    midnight, before = find_midnights(now, zone)

    assert hours == ((now - midnight) / 3600, (now - before) / 3600)


def test_a_trend_is_the_mean_of_each_step(lab: Lab) -> None:
    """Steps without a frame are null; the last one is not over."""
    machine = lab.machine(gpus=2, name="alpha")
    for step, used in enumerate((0.2, 0.4, None, 0.8)):
        for second in (3, 6, 9):
            lab.time = NOON + 15 * step + second
            if used is not None:
                machine.send(
                    lab.time, [{"gpu_utilization_ratio": used}, {"gpu_utilization_ratio": second / 10}]
                )
            lab.monitor.sample(lab.time)
    answer = asyncio.run(lab.monitor.trends())

    assert (NOON + 45 - 59 * 15, 15.0) == (answer.start, answer.step_seconds)
    assert [None] * 56 + [0.2, 0.4, None, 0.8] == answer.gpus["alpha"]["0"]
    assert [None] * 56 + [0.6, 0.6, None, 0.6] == answer.gpus["alpha"]["1"]


def test_trends_are_computed_once_for_all_who_ask(lab: Lab) -> None:
    """Within five seconds the answer is the same object."""

    async def ask() -> list[int]:
        found = []
        for seconds in (0, 4, 6):
            lab.time = NOON + seconds
            found.append(id(await lab.monitor.trends()))
        return found

    first, second, third = asyncio.run(ask())

    assert first == second != third


def test_a_gpu_keeps_its_trend_when_others_come_and_go(lab: Lab) -> None:
    """Rows move; what was observed moves with them."""
    later = lab.machine(2, name="b")
    lab.play(15, lambda time: later.send(time, [{"gpu_utilization_ratio": 0.7}]))
    earlier = lab.machine(1, gpus=3, name="a")
    lab.play(15, lambda time: earlier.send(time, [{"gpu_utilization_ratio": 0.1}] * 3))
    gpus = asyncio.run(lab.monitor.trends()).gpus

    assert ["a", "b"] == list(gpus)
    assert 0.7 in gpus["b"]["0"]
    assert all(0.7 not in values for values in gpus["a"].values())


async def test_a_new_head_reads_the_last_minutes_from_the_store(tmp_path: Path) -> None:
    """Gaps of up to a minute between two readings are filled, as slow agents leave them."""

    class Stored(Store):
        def series(self, query: Query) -> list[Series]:
            places = (20, 21, 22, 26, 30, 39)  # the last gap is longer than a minute
            times = np.array([query.start + 15 * place for place in places])
            values = np.array([0.1, 0.2, 0.3, 0.4, 0.5, 0.6])
            return [
                Series(SeriesKey(1, "GPU-1-0"), "gpu_utilization_ratio", times, values, values, values, times)
            ]

    lab = Lab(tmp_path, Stored())
    lab.machine().send(NOON, [{"gpu_utilization_ratio": 0.5}])
    lab.monitor.sample(NOON)
    await lab.monitor.restore_trends()
    values = (await lab.monitor.trends()).gpus["n1"]["0"]

    assert [None] * 19 + [0.1, 0.2, *[0.3] * 4, *[0.4] * 4, 0.5, *[None] * 8, 0.6] == values[:39]
    assert [None] * 20 + [0.5] == values[39:]
