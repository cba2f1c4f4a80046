"""The loop of a harvest with eyes and hands that a test moves."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping

import pytest

from gpulse.errors import GpulseError
from gpulse.harvest.events import (
    GpuHolder,
    MachineObservation,
    ObservedUse,
    ProcessId,
    ProgramGone,
    ProgramStarted,
    UserPresence,
)
from gpulse.harvest.harvester import Harvester, HarvestOptions
from gpulse.harvest.settings import HarvestableGpu, HarvestSettings, PeopleSettings, Program
from gpulse.harvest.state_directory import SavedState
from gpulse.harvest.status import HarvestAccounting, HarvestIdentity

ALICE = ObservedUse((GpuHolder(71, 8, ("python3",), "alice", working=True),))
GPUS = (HarvestableGpu(0, 0, "GPU-a", "H200"),)
PROGRAM = Program("fold", ("true",), (0,), grace_seconds=0.05)
SETTINGS = HarvestSettings(
    "h.toml", {0: frozenset()}, (PROGRAM,), interval_seconds=600, idle_seconds=0, cooldown_seconds=0
)


class Eyes:
    """What is to be seen, and a pipe that is readable when a glance is worth it."""

    def __init__(self) -> None:
        self.use = ObservedUse()
        self.people: tuple[UserPresence, ...] = ()
        self.with_people = False
        self.looks = 0
        self.fault: Exception | None = None
        self.descriptor, self._rings = os.pipe()

    def watch_people(self, wanted: bool) -> None:
        """Whether people are looked at."""
        self.with_people = wanted

    def look(self, now: float) -> MachineObservation:  # noqa: ARG002  as all eyes
        """All there is."""
        self.looks += 1
        return MachineObservation({0: self.use}, self.people if self.with_people else None)

    def glance(self, now: float) -> MachineObservation | None:  # noqa: ARG002
        """The GPU alone."""
        os.read(self.descriptor, 1)
        if self.fault is not None:
            raise self.fault
        return MachineObservation({0: self.use})

    def ring(self) -> None:
        """Somebody opened the GPU."""
        os.write(self._rings, b"!")

    def close(self) -> None:
        """No more to be seen."""
        os.close(self.descriptor)
        os.close(self._rings)


class Hands:
    """Programs that end when they are asked to, unless told otherwise."""

    def __init__(self) -> None:
        self.did: list[str] = []
        self.obeys = True
        self.dies = True
        self.harvester: Harvester | None = None

    def _tell(self, told: ProgramStarted | ProgramGone) -> None:
        assert self.harvester is not None
        asyncio.get_running_loop().call_soon(self.harvester.handle_run_event, told)

    def start(self, run: str, program: Program, environment: Mapping[str, str]) -> None:  # noqa: ARG002
        """It runs."""
        self.did.append("start")
        self._tell(ProgramStarted(run, ProcessId(1, 1), ProcessId(2, 2)))

    def signal(self, run: str, number: int) -> None:  # noqa: ARG002
        """It ends, or does not."""
        self.did.append("signal")
        if self.obeys:
            self._tell(ProgramGone(run))

    def kill(self, run: str) -> None:
        """It ends, or hangs in the driver."""
        self.did.append("kill")
        if self.dies:
            self._tell(ProgramGone(run))


class World:
    """A harvester at work."""

    def __init__(self, settings: HarvestSettings = SETTINGS, **options: bool) -> None:
        self.eyes, self.hands = Eyes(), Hands()
        self.lines: list[str] = []
        account = HarvestAccounting(HarvestIdentity(ProcessId(1, 1), 0, "ada"), GPUS, SavedState(), wall=1e9)
        given = HarvestOptions({}, decided=self.lines.extend, **options)
        self.harvester = Harvester(settings, self.eyes, account, None, given)
        self.hands.harvester = self.harvester

    async def did(self, *words: str) -> None:
        """Wait until the hands have done exactly this."""
        await self.until(lambda: len(self.hands.did) >= len(words))
        assert [*words] == self.hands.did

    async def until(self, condition: Callable[[], bool]) -> None:
        """Let the others work until something is so."""
        async with asyncio.timeout(60):
            while not condition():  # noqa: ASYNC110  the loop has no event for what a test wants to see
                await asyncio.sleep(0.001)

    def play(self, story: Callable[[], Awaitable[None]]) -> None:
        """Run it beside a story, to its end."""

        async def both() -> None:
            running = asyncio.create_task(self.harvester.run(self.hands))
            try:
                await story()
            finally:
                async with asyncio.timeout(60):
                    await running

        asyncio.run(both())


def test_an_open_is_answered_between_looks() -> None:
    """And so is the news that the GPU is free again."""

    world = World()

    async def story() -> None:
        await world.did("start")
        world.eyes.use = ALICE
        world.eyes.ring()
        await world.did("start", "signal")
        world.eyes.use = ObservedUse()
        world.eyes.ring()
        await world.did("start", "signal", "start")
        world.harvester.end()

    world.play(story)
    assert ["start", "signal", "start", "signal"] == world.hands.did


def test_time_alone_starts_nothing() -> None:
    """When the idle time is over the GPU is looked at once more, long before the next look is due."""

    world = World(SETTINGS._replace(idle_seconds=0.05))

    async def story() -> None:
        await world.did("start")
        assert 2 == world.eyes.looks
        world.harvester.end()

    world.play(story)


def test_what_does_not_obey_is_killed_without_another_event() -> None:
    """The loop wakes by itself at the end of the grace period."""

    world = World()
    world.hands.obeys = False

    async def story() -> None:
        await world.did("start")
        world.eyes.use = ALICE
        world.eyes.ring()
        await world.did("start", "signal", "kill")
        world.harvester.end()

    world.play(story)


def test_a_change_comes_with_a_look() -> None:
    """People that are watched from now on stop programs only when somebody is there."""

    world = World()
    watched = SETTINGS._replace(people=PeopleSettings(enabled=True))

    async def story() -> None:
        await world.did("start")
        world.harvester.change(watched)
        assert world.eyes.with_people
        await world.did("start")
        world.eyes.people = (UserPresence("carol", "pts/1", 1.0),)
        world.harvester.change(watched._replace(interval_seconds=300))
        await world.did("start", "signal")
        world.harvester.end()

    world.play(story)


def test_what_cannot_be_killed_does_not_hold_the_end_up_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second end waits for a while, and says what is left."""

    monkeypatch.setattr("gpulse.harvest.harvester._SHUTDOWN_SECONDS", 0.05)
    world = World()
    world.hands.obeys = world.hands.dies = False

    async def story() -> None:
        await world.did("start")
        world.harvester.end()
        world.harvester.end()
        await world.did("start", "signal", "kill")

    with pytest.raises(GpulseError, match="cannot kill all processes of fold"):
        world.play(story)


def test_a_fault_of_our_own_is_the_end() -> None:
    """What was not done must not be believed to be done."""

    world = World()
    world.eyes.fault = ZeroDivisionError("a fault")

    async def story() -> None:
        await world.did("start")
        world.eyes.ring()

    with pytest.raises(ZeroDivisionError):
        world.play(story)


def test_once() -> None:
    """It says what it decided, starts nothing a second time, and ends with what it started."""

    world = World(once=True)

    async def story() -> None:
        await world.did("start")
        await world.until(lambda: bool(world.lines))
        world.eyes.use = ALICE
        world.eyes.ring()

    world.play(story)
    assert ["GPU 0: harvested: fold", "fold: running"] == world.lines
    assert ["start", "signal"] == world.hands.did
