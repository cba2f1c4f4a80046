"""The nodes of other heads, as an engine tells of them."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Collection, Mapping
from typing import Any

import pytest

from gpulse.cluster.head import backends as module
from gpulse.cluster.head.backends import OtherHeadsPoller
from gpulse.model.device import Device, Node
from gpulse.model.frame import Frame, GpuReading
from gpulse.store.tsdb.config import TsdbError
from gpulse.store.tsdb.fleet_query import FleetQuery, ReportedNode
from gpulse.store.tsdb.promql import InstantSample
from tests.unit.test_ingest import NOW, Scene, batch, committers_end, settled

__all__ = ["committers_end"]  # a fixture that every test here uses

GPU = Device(0, "GPU-1", "H200")


class Engine:
    """What an engine would say."""

    def __init__(self) -> None:
        self.heard: dict[str, ReportedNode] = {}
        self.asked: list[str] = []
        self.error: TsdbError | None = None
        self.frames_error: TsdbError | None = None

    def hears(self, name: str, time: float, **labels: str) -> None:
        """Another head has written something of a node."""
        self.heard[name] = ReportedNode({"node": name, "host": name, "machine": f"m-{name}", **labels}, time)

    def nodes(self, _now: float) -> dict[str, ReportedNode]:
        """Who they are."""
        self.asked.append("nodes")
        if self.error is not None:
            raise self.error
        return dict(self.heard)

    def gpus(self, nodes: Collection[str]) -> dict[str, tuple[Device, ...]]:
        """What they have."""
        self.asked.append("gpus")
        return dict.fromkeys(nodes, (GPU,))

    def frames(
        self, heard: Mapping[str, ReportedNode], devices: Mapping[str, tuple[Device, ...]]
    ) -> dict[str, Frame]:
        """How they are."""
        self.asked.append(f"frames of {','.join(sorted(heard))}")
        if self.frames_error is not None:
            raise self.frames_error
        return {
            name: Frame(
                node.time,
                node.time,
                Node(name),
                tuple(GpuReading(gpu, {"power_watts": 7.0}) for gpu in devices[name]),
            )
            for name, node in heard.items()
        }


class Fleet:
    """A head among others."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.engine = Engine()
        self.scene = Scene()
        patch.setattr(module, "FleetQuery", lambda *_, **__: self.engine)
        nothing: Any = None
        self.poller = OtherHeadsPoller(
            nothing, self.scene.fleet, self.scene.ingest, labels={}, now=lambda: self.scene.now
        )

    async def look(self) -> None:
        """The engine is asked once."""
        await self.poller._run_query(self.poller._update_nodes)
        await self.poller._run_query(self.poller._update_readings)

    def shown(self) -> dict[str, tuple[str, bool, bool, float | None]]:
        """By node its state, whether it is connected, whether it is elsewhere, and when its frame was taken."""
        return {
            node.name: (node.state, node.connected, node.at_other_head, node.frame and node.frame.time)
            for node in self.scene.fleet.live()
        }


@pytest.fixture
async def fleet(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Fleet]:
    """A head that knows nobody."""
    made = Fleet(monkeypatch)
    yield made
    made.scene.committer.close()


async def test_a_node_that_was_never_here_is_shown(fleet: Fleet) -> None:
    """With its GPUs and its newest readings, and by its age alone it is late and lost, without an event."""

    fleet.engine.hears("far", NOW - 2.0, version="7", driver="580")
    await fleet.look()
    assert {"far": ("healthy", False, True, NOW - 2.0)} == fleet.shown()
    (node,) = fleet.scene.fleet.live()
    assert ([GPU], "7") == (list(node.devices), node.version)
    assert node.frame is not None
    assert {"power_watts": 7.0} == node.frame.gpus[0].values
    assert "580" == node.frame.node.driver

    states = []
    for silent in (10.0, 20.0, 60.0):
        assert [] == fleet.scene.fleet.check(NOW + silent, 1.0)
        states.append(fleet.shown()["far"][0])
    assert ["healthy", "late", "lost"] == states


async def test_nothing_of_it_is_in_the_log(fleet: Fleet) -> None:
    """Until it connects here itself: then it keeps its number."""

    for second in range(5):
        fleet.engine.hears("far", NOW + second)
        await fleet.look()
    await fleet.scene.committer.commit()
    assert [] == fleet.scene.log
    register = fleet.scene.fleet.register
    (gpu,) = register.other_head_gpus(())
    assert ("far:0:H200", 1) == (gpu.key, gpu.node)

    call = await fleet.scene.connected(host="far", machine="m-far")
    await fleet.scene.committer.commit()
    facts = [entry.fact for entry in fleet.scene.log if entry.fact is not None]
    assert [("node", 1)] == [(fact["fact"], fact["id"]) for fact in facts if fact["fact"] == "node"]
    await call.hang_up()


async def test_streams_of_its_own_win(fleet: Fleet) -> None:
    """Of a node that is connected here nothing is asked."""

    call = await fleet.scene.connected(host="near", machine="m-near")
    call.say(batch=batch(1))
    await settled(fleet.scene, call)
    fleet.engine.hears("near", NOW + 100.0)
    await fleet.look()

    assert {"near": ("healthy", True, False, NOW)} == fleet.shown()
    assert ["nodes"] == fleet.engine.asked
    await call.hang_up()


async def test_a_node_that_went_to_another_head(fleet: Fleet) -> None:
    """It is never late here, and what its agent told this head is not shown as if it were of now."""

    call = await fleet.scene.connected(host="near", machine="m-near")
    call.say(batch=batch(1))
    await settled(fleet.scene, call)
    member = fleet.scene.fleet.members[1]
    member.apply_events(
        [{"event": "process", "pid": 5}, {"event": "findings", "findings": [{"id": "x"}]}], 1.0
    )
    await call.hang_up()
    fleet.scene.fleet.asked = NOW
    for second in range(1, 60):
        fleet.scene.now = NOW + second
        fleet.engine.hears("near", fleet.scene.now - 3.0)
        if second % 5 == 0:
            await fleet.look()
        assert [] == fleet.scene.fleet.check(fleet.scene.now, 1.0)

    assert {"near": ("healthy", False, True, NOW + 52.0)} == fleet.shown()
    assert ({}, ()) == (member.processes, member.findings)
    back = await fleet.scene.connected(host="near", machine="m-near")
    assert not fleet.scene.fleet.live()[0].at_other_head
    await back.hang_up()


async def test_what_this_head_wrote_itself_is_not_elsewhere(fleet: Fleet) -> None:
    """A node that is gone is late and lost though the engine has its last samples."""

    call = await fleet.scene.connected(host="near", machine="m-near")
    await call.hang_up()
    fleet.engine.hears("near", NOW + 1.0)
    fleet.scene.now = NOW + 11.0
    await fleet.look()

    assert ["late"] == [member.state for member, _ in fleet.scene.fleet.check(NOW + 11.0, 1.0)]
    assert not fleet.scene.fleet.live()[0].at_other_head


async def test_an_engine_that_does_not_answer(fleet: Fleet, caplog: pytest.LogCaptureFixture) -> None:
    """It is told once, and kept for whoever asks how the head is; what was known stays."""

    fleet.engine.hears("far", NOW)
    await fleet.look()
    fleet.engine.error = TsdbError("it is down", hint="start it")
    for _ in range(3):
        await fleet.look()
    assert fleet.poller.trouble == (NOW, "it is down", "start it")
    assert 1 == sum("it is down" in message for message in caplog.messages)
    assert ["far"] == list(fleet.shown())

    fleet.engine.error = None
    await fleet.look()
    assert fleet.poller.trouble is None


async def test_an_engine_that_answers_one_question_of_two(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    """What it does not answer is told once, and stays trouble as long as that is so."""

    fleet.engine.hears("far", NOW)
    fleet.engine.frames_error = TsdbError("too many series")
    for _ in range(3):
        await fleet.look()
        assert fleet.poller.trouble is not None
    assert 1 == len(caplog.messages)

    fleet.engine.frames_error = None
    await fleet.look()
    assert fleet.poller.trouble is None


@pytest.mark.parametrize("labels", [{"host": "x" * 300}, {"machine": "m\n"}, {"version": "\x1b[31m"}])
async def test_words_that_no_head_would_have_taken(fleet: Fleet, labels: dict[str, str]) -> None:
    """What stands in an engine may come from anybody."""

    fleet.engine.hears("far", NOW, **labels)
    await fleet.look()

    assert {} == fleet.shown()


async def test_readings_are_asked_for_while_somebody_looks(fleet: Fleet) -> None:
    """Who there is, is known all the time; and who looks first does not wait for the next round."""

    fleet.engine.hears("far", NOW)
    running = asyncio.ensure_future(fleet.poller.run())
    async with asyncio.timeout(60.0):
        await fleet.scene.ingest.wait_for_change()
        assert ["nodes", "gpus"] == fleet.engine.asked
        assert fleet.shown()["far"][3] is None
        await fleet.scene.ingest.wait_for_change()
        assert NOW == fleet.shown()["far"][3]
    running.cancel()
    assert ["nodes", "gpus", "frames of far"] == fleet.engine.asked


async def test_a_connection_that_broke_without_a_word(fleet: Fleet) -> None:
    """Its agent speaks to another head by now, though it still seems to be connected here: it is not late."""

    call = await fleet.scene.connected(host="near", machine="m-near")
    call.say(batch=batch(1))
    await settled(fleet.scene, call)
    fleet.scene.fleet.asked = NOW
    for second in range(1, 60):
        fleet.scene.now = NOW + second
        fleet.engine.hears("near", fleet.scene.now - 3.0)
        if second % 5 == 0:
            await fleet.look()
        assert [] == fleet.scene.fleet.check(fleet.scene.now, 1.0)

    assert {"near": ("healthy", True, True, NOW + 52.0)} == fleet.shown()
    await call.hang_up()


@pytest.mark.parametrize("odd", [NOW + 3600.0, math.inf, math.nan])
def test_nobody_was_heard_of_in_the_future(odd: float) -> None:
    """An engine may hold anything; such a node would never be late."""

    class Client:
        def vector(self, query: str) -> list[InstantSample]:
            info = [InstantSample({"node": "far"}, NOW, NOW - 5.0), InstantSample({"node": "odd"}, NOW, odd)]
            return info if "node_info" in query else [InstantSample({"node": "far"}, NOW, odd)]

    client: Any = Client()

    assert {"far": NOW - 5.0} == {
        name: heard.time for name, heard in FleetQuery(client, labels={}).nodes(NOW).items()
    }
