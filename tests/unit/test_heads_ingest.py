"""What a head makes of agents that speak to other heads as well."""

from __future__ import annotations

from typing import Any

from gpulse.cluster.wire_pb2 import Goodbye, Run
from gpulse.model.device import Device
from tests.unit.test_ingest import NOW, RUN, Scene, batch, committers_end, settled

__all__ = ["committers_end"]  # a fixture that every test here uses


def run_message(**given: Any) -> Run:
    """The run of an agent that has been somewhere else."""
    return Run(id=RUN, boot="b1", **given)


async def test_frames_that_another_head_has_are_not_lost() -> None:
    """An agent that comes for the first time after an hour brings the last of it, and nothing is reported missing."""

    scene = Scene()
    call = await scene.connected(runs=[run_message(elsewhere=3600, first_kept=3601)])
    call.say(batch=batch(3481, 10))
    call.say(batch=batch(3491, 111))
    await settled(scene, call)

    assert [*range(3481, 3602)] == scene.sequences()
    assert [] == scene.events("gap")
    await call.hang_up()


async def test_what_is_missing_behind_them_is_reported() -> None:
    """Only what no head has is lost, and it is exactly that."""

    scene = Scene()
    call = await scene.connected(runs=[run_message(elsewhere=100, first_kept=111)])
    call.say(batch=batch(111))
    await settled(scene, call)

    assert [10] == [gap["frames"] for gap in scene.events("gap")]
    await call.hang_up()


async def test_an_agent_that_comes_back() -> None:
    """The hole is what the other head has; what comes twice is stored once."""

    scene = Scene()
    call = await scene.connected()
    call.say(batch=batch(1, 10))
    await settled(scene, call)
    await call.hang_up()
    again = await scene.connected(runs=[run_message(elsewhere=500, first_kept=501)])
    again.say(batch=batch(8, 3))
    again.say(batch=batch(381, 121))
    await settled(scene, again)

    assert [*range(1, 11), *range(381, 502)] == scene.sequences()
    assert [] == scene.events("gap")
    await again.hang_up()


async def test_losses_that_another_head_was_told_of() -> None:
    """They are told once; those since then are told here."""

    scene = Scene()
    call = await scene.connected(
        runs=[run_message(elsewhere=100, first_kept=101, dropped=7, dropped_elsewhere=7)]
    )
    call.say(dropped=run_message(dropped=7))
    call.say(dropped=run_message(dropped=9))
    await settled(scene, call)

    assert [2] == [loss["frames"] for loss in scene.events("frames_dropped")]
    await call.hang_up()


async def test_a_node_that_moves_is_not_late() -> None:
    """Its goodbye says so: no event is written, and its state is a matter of the other head."""

    scene = Scene()
    call = await scene.connected()
    call.say(batch=batch(1))
    await settled(scene, call)
    call.say(goodbye=Goodbye(moved=True))
    await call.task
    for silent in (6.0, 16.0, 60.0):
        assert [] == scene.fleet.check(NOW + silent, 1.0)

    (node,) = scene.fleet.live()
    assert ("lost", False, True) == (node.state, node.connected, node.at_other_head)
    back = await scene.connected()
    assert not scene.fleet.live()[0].at_other_head
    await back.hang_up()


async def test_a_node_that_only_says_goodbye_is_late_and_lost() -> None:
    """As without any other head."""

    scene = Scene()
    call = await scene.connected()
    call.say(goodbye=Goodbye())
    await call.task
    states = [member.state for silent in (6.0, 31.0) for member, _ in scene.fleet.check(NOW + silent, 1.0)]

    assert ["late", "lost"] == states


async def test_a_node_that_vanishes_is_late_once_the_engine_knows_nothing_of_it_either() -> None:
    """It may have gone to another head, whose samples take a while to be found; but not for ever."""

    scene = Scene()
    call = await scene.connected()
    await call.hang_up()
    scene.fleet.asked = NOW - 1.0
    assert [] == scene.fleet.check(NOW + 7.0, 1.0)
    scene.fleet.asked = NOW + 10.5
    assert ["late"] == [member.state for member, _ in scene.fleet.check(NOW + 11.0, 1.0)]


async def test_a_node_that_vanishes_while_the_engine_is_silent() -> None:
    """It is waited for for some seconds only."""

    scene = Scene()
    call = await scene.connected()
    await call.hang_up()
    scene.fleet.asked = NOW - 1.0
    assert [] == scene.fleet.check(NOW + 19.0, 1.0)
    assert ["late"] == [member.state for member, _ in scene.fleet.check(NOW + 21.0, 1.0)]


def test_nodes_of_other_heads_have_numbers_while_the_head_runs() -> None:
    """With the name they have there and their GPUs; one that is known keeps what this head calls it."""

    register = Scene().fleet.register
    node = register.add_from_other_head("gpu02", "m2", NOW, name="gpu02", facts={"driver": "580"}, labels={})
    assert node == register.add_from_other_head("gpu02", "m2", NOW, name="other", facts={}, labels={})
    namesake = register.add_from_other_head("gpu02", "m3", NOW, name="gpu02", facts={}, labels={})
    register.set_other_head_gpus(node, [Device(0, "GPU-1", "H200"), Device(1, "GPU-2", "H200")])

    assert ("gpu02", "m2", {"driver": "580"}) == (node.name, node.machine, node.facts)
    assert "gpu02#2" == namesake.name
    assert {node.id, namesake.id} == register.other_head_ids
    assert ["GPU-1", "GPU-2"] == [gpu.uuid for gpu in register.other_head_gpus(())]


async def test_frames_that_two_heads_have_get_the_same_times() -> None:
    """Of a node whose clock is off: else they would stand twice in the engine, some milliseconds apart."""

    first, second = Scene(), Scene()
    call = await first.connected(monotonic_us=0)
    call.say(batch=batch(1, time=NOW - 100.0))
    await settled(first, call)
    shift_us = (await call.heard()).durable.shift_us
    assert 100_000_000 == shift_us
    await call.hang_up()
    second.now += 0.007  # the way there takes longer
    again = await second.connected(monotonic_us=0, shift_us=shift_us)
    again.say(batch=batch(1, time=NOW - 100.0))
    await settled(second, again)

    shifts = [entry.batch.shift_us for scene in (first, second) for entry in scene.log if entry.batch]
    assert [100_000_000, 100_000_000] == shifts
    assert [] == second.events("clock_skew")
    await again.hang_up()
