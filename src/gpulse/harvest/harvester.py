"""The loop of a harvest: looks, asks the policy, and has done what it says."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

from gpulse.errors import GpulseError
from gpulse.harvest.account import Account
from gpulse.harvest.ledger import Ledger
from gpulse.harvest.policy.state import begin
from gpulse.harvest.policy.step import next_time, step, wants_look
from gpulse.harvest.policy.words import (
    Changed,
    Closed,
    Ended,
    Event,
    Heard,
    Instruction,
    Kill,
    Looked,
    Passed,
    Signal,
    Start,
)
from gpulse.harvest.running.told import Exited, Failed, Gone, Started, Told
from gpulse.harvest.settings import Program, Settings
from gpulse.harvest.sight.seen import Sighting
from gpulse.harvest.view import plan, waiting
from gpulse.model.device import ranges

log = logging.getLogger(__name__)

_LONGEST_REST_SECONDS = 30.0
"""Hours begin and end between looks too."""
_LEAST_LOOK_SECONDS = 0.1
"""Between looks that are not due, but would let something start."""
_GIVE_UP_SECONDS = 5.0
"""How long an end at once waits for what cannot be killed."""


class Watching(Protocol):
    """What looks at GPUs and people."""

    @property
    def descriptor(self) -> int | None:
        """Readable when a glance is worth it; None when only looks tell."""

    def watch_people(self, wanted: bool) -> None:
        """Look at who is at the machine from now on, or no longer."""

    def look(self, now: float) -> Sighting:
        """Everything; `now` is in epoch seconds."""

    def glance(self, now: float) -> Sighting | None:
        """What the descriptor is readable for, None when that is nothing."""

    def close(self) -> None:
        """Stop watching."""


class Running(Protocol):
    """What runs the programs, or says that it would."""

    def start(self, run: str, program: Program, environment: Mapping[str, str]) -> None:
        """Start a program."""

    def signal(self, run: str, number: int) -> None:
        """Ask everything of a run to end."""

    def kill(self, run: str) -> None:
        """End everything of a run."""


class Options(NamedTuple):
    """How a harvest goes about it."""

    environment: Mapping[str, str]
    """Of the programs."""
    once: bool = False
    """Decide once, and end when what was started has ended."""
    dry_run: bool = False
    decided: Callable[[list[str]], None] = lambda _: None
    """Is told, once, what each GPU and each program does, and why."""


class Harvester:
    """Carries events to the policy and its instructions to the runner; `run` is the whole of it."""

    def __init__(
        self,
        settings: Settings,
        sight: Watching,
        account: Account,
        ledger: Ledger | None,
        options: Options,
    ) -> None:
        """Prepare.

        Args:
            settings: What is wanted.
            sight: What looks; it is closed in the end.
            account: Adds up what is won.
            ledger: Where that is kept; None: nowhere.
            options: How to go about it.
        """
        self._account = account
        self._ledger = ledger
        self._options = options
        self._state = begin(settings, time.time() - time.monotonic())
        self._sight = sight
        self._sight.watch_people(settings.people.enabled)
        self._runner: Running | None = None
        self._events: list[Event] = []
        self._stepping = False
        self._looked_at = self._look_at = -math.inf
        self._give_up_at = math.inf
        self._fault: BaseException | None = None
        self._wake = asyncio.Event()
        self._started = False
        self._told_waiting = False
        self._began = time.monotonic()

    @property
    def idle(self) -> bool:
        """True when nothing of ours is there."""
        return not self._state.runs

    def told(self, told: Told) -> None:
        """The runner's word."""
        _say_told(told)
        self._account.told(told, time.time())
        self._take(Heard(time.monotonic(), told))

    def change(self, settings: Settings) -> None:
        """Go on with another configuration."""
        self._sight.watch_people(settings.people.enabled)
        sighting = self._sight.look(time.time())
        self._take(Changed(time.monotonic(), settings, sighting))
        self._look_at = -math.inf

    def end(self) -> None:
        """Stop everything; a second time: at once."""
        again = self._state.ended
        if again:
            log.warning("ending everything at once")
            self._give_up_at = min(self._give_up_at, time.monotonic() + _GIVE_UP_SECONDS)
        elif self._state.runs:
            log.info("ending: what runs is asked to stop (once more to end it at once)")
        self._take(Ended(time.monotonic(), at_once=again))

    async def run(self, runner: Running) -> None:
        """Work until the end, or once.

        Raises:
            GpulseError: Something of ours could not be ended.
            Exception: A fault of our own, whoever met it.
        """
        self._runner = runner
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._met)
        descriptor = self._sight.descriptor
        if descriptor is not None:
            loop.add_reader(descriptor, self._glance)
        try:
            while not self._is_over():
                self._turn()
                await self._rest()
        finally:
            if descriptor is not None:
                loop.remove_reader(descriptor)
            self._sight.close()
        if self._state.ended and self._state.runs:
            left = ", ".join(run.program.name for run in self._state.runs.values())
            raise GpulseError(
                f"something of {left} cannot be ended",
                hint="a process that hangs in the driver goes with a reset of its GPU or a reboot",
            )

    def _met(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """A fault in a callback: the policy believes what was not done, so that it is the end."""
        fault = context.get("exception")
        if fault is None:
            loop.default_exception_handler(context)
            return
        self._fault = self._fault or fault
        self._wake.set()

    def _is_over(self) -> bool:
        if self._fault is not None:
            raise self._fault
        if (self._state.closed and self._options.dry_run) or time.monotonic() >= self._give_up_at:
            return True
        return (self._state.ended or self._state.closed) and self.idle

    def _turn(self) -> None:
        now = time.monotonic()
        self._take(Passed(now, time.time() - now))
        if now >= self._look_at:
            self._look()
        if self._options.once and not self._state.closed:
            self._decide_once()
        self._keep(changed=False)

    def _look(self) -> None:
        sighting = self._sight.look(time.time())
        now = self._looked_at = time.monotonic()
        self._look_at = now + self._state.settings.interval_seconds
        self._take(Looked(now, sighting))
        if not self._told_waiting:
            self._told_waiting = True
            for line in () if self._options.once else waiting(self._state, now):
                log.info("%s", line)

    def _decide_once(self) -> None:
        now = time.monotonic()
        settings = self._state.settings
        waited = now - self._began > settings.idle_seconds + settings.interval_seconds
        if self._started or waited:
            self._options.decided(list(plan(self._state, now, dry_run=self._options.dry_run)))
            self._take(Closed(now))

    async def _rest(self) -> None:
        """Until something happens, or the next thing is due."""
        if self._is_over():
            return
        self._wake.clear()
        now = time.monotonic()
        times = [self._look_at, now + _LONGEST_REST_SECONDS, self._give_up_at]
        soonest = next_time(self._state, now)
        if soonest is not None:
            times.append(soonest)
        if wants_look(self._state, now):
            self._look_at = max(now, self._looked_at + _LEAST_LOOK_SECONDS)
            times.append(self._look_at)
        with suppress(TimeoutError):
            await asyncio.wait_for(self._wake.wait(), max(0.0, min(times) - now))

    def _glance(self) -> None:
        sighting = self._sight.glance(time.time())
        if sighting is not None:
            self._take(Looked(time.monotonic(), sighting))

    def _take(self, event: Event) -> None:
        """Tell the policy, and do what it says; what happens meanwhile waits for its turn."""
        self._events.append(event)
        self._wake.set()
        if self._stepping:
            return
        self._stepping = True
        try:
            while self._events:
                event = self._events.pop(0)
                self._account.pass_to(self._state, event.now)
                self._state, orders = step(self._state, event)
                self._account.ordered(self._state, orders, time.time())
                for order in orders:
                    self._carry_out(order)
                if orders or isinstance(event, Heard):
                    self._keep(changed=True)
        finally:
            self._stepping = False

    def _carry_out(self, order: Instruction) -> None:
        if self._runner is None:
            return
        would = "would " if self._options.dry_run else ""
        match order:
            case Start(run, program):
                self._started = True
                log.info("%sstart %s on %s", would, program.name, _gpus(program))
                self._runner.start(run, program, self._options.environment)
            case Signal(run, number, reason):
                self._runner.signal(run, number)
                log.info("%sstop %s: %s", would, _name(run), reason.what)
            case Kill(run, reason):
                self._runner.kill(run)
                log.info("%skill %s: %s", would, _name(run), reason.what)

    def _keep(self, *, changed: bool) -> None:
        if self._ledger is not None:
            status = self._account.status(self._state, time.monotonic(), time.time())
            self._ledger.keep(status, self._account.won(), changed=changed)


class DryRunner:
    """Runs nothing; what it is asked to end is gone at once."""

    def __init__(self, report: Callable[[Told], None]) -> None:
        self._report = report

    def start(self, run: str, program: Program, environment: Mapping[str, str]) -> None:
        """As if it had been started: its GPUs are taken from now on."""

    def signal(self, run: str, number: int) -> None:  # noqa: ARG002  a runner's signature
        """As if it obeyed."""
        self._report(Gone(run))

    def kill(self, run: str) -> None:
        """As if it were gone."""
        self._report(Gone(run))


def _say_told(told: Told) -> None:
    match told:
        case Started(run, _, process):
            log.info("%s runs (process %d)", _name(run), process.pid)
        case Failed(run, why):
            log.error("program %s was not started: %s", _name(run), why)
        case Exited(run, status) if status < 0:
            log.info("%s was ended by signal %d", _name(run), -status)
        case Exited(run, status):
            log.log(logging.INFO if status == 0 else logging.WARNING, "%s ended with %d", _name(run), status)
        case Gone(run):
            log.info("nothing of %s is left", _name(run))


def _name(run: str) -> str:
    """A run's program: its id is that with a number."""
    return run.rpartition(".")[0]


def _gpus(program: Program) -> str:
    count = len(program.gpus)
    return f"GPU{'s' if count > 1 else ''} {ranges(map(str, program.gpus))}"
