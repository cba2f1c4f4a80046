"""Loop of a harvest: observe, apply the policy, and carry out its instructions."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

from gpulse.errors import GpulseError
from gpulse.harvest import events, policy_state
from gpulse.harvest.events import MachineObservation
from gpulse.harvest.policy import next_event_time, step, wants_look
from gpulse.harvest.policy_state import initial_state
from gpulse.harvest.settings import HarvestSettings, Program
from gpulse.harvest.state_directory import StateDirectory
from gpulse.harvest.status import HarvestAccounting, describe_plan, describe_waiting
from gpulse.model.device import gpu_label

log = logging.getLogger(__name__)

_MAX_WAIT_SECONDS = 30.0
"""Hours begin and end between looks too."""
_MIN_LOOK_SECONDS = 0.1
"""Between looks that are not due, but would let something start."""
_SHUTDOWN_SECONDS = 5.0
"""How long an immediate shutdown waits for processes that cannot be killed."""


class MachineObserver(Protocol):
    """Interface for observing GPUs and people."""

    @property
    def descriptor(self) -> int | None:
        """Readable when `glance` should be called; None when only `look` observes changes."""

    def watch_people(self, wanted: bool) -> None:
        """Start or stop observing people at the machine."""

    def look(self, now: float) -> MachineObservation:
        """Observe everything; `now` is in epoch seconds."""

    def glance(self, now: float) -> MachineObservation | None:
        """Observe what the descriptor became readable for; None when nothing changed."""

    def close(self) -> None:
        """Stop watching."""


class RunnerProtocol(Protocol):
    """Interface for running programs, or simulating it."""

    def start(self, run: str, program: Program, environment: Mapping[str, str]) -> None:
        """Start a program."""

    def signal(self, run: str, number: int) -> None:
        """Ask everything of a run to end."""

    def kill(self, run: str) -> None:
        """End everything of a run."""


class HarvestOptions(NamedTuple):
    """Options of a harvest."""

    environment: Mapping[str, str]
    """Of the programs."""
    once: bool = False
    """Decide once, and exit when the started programs have ended."""
    dry_run: bool = False
    decided: Callable[[list[str]], None] = lambda _: None
    """Called once with what each GPU and each program does, and why."""


class Harvester:
    """Carries events to the policy and its instructions to the runner; `run` does everything."""

    def __init__(
        self,
        settings: HarvestSettings,
        watcher: MachineObserver,
        account: HarvestAccounting,
        state_directory: StateDirectory | None,
        options: HarvestOptions,
    ) -> None:
        """Prepare.

        Args:
            settings: The configuration.
            watcher: Observes GPUs and people; it is closed in the end.
            account: Adds up GPU time.
            state_directory: Where that is saved; None: nowhere.
            options: How to run.
        """
        self._account = account
        self._state_directory = state_directory
        self._options = options
        self._state = initial_state(settings, time.time() - time.monotonic())
        self._watcher = watcher
        self._watcher.watch_people(settings.people.enabled)
        self._runner: RunnerProtocol | None = None
        self._events: list[policy_state.Event] = []
        self._stepping = False
        self._looked_at = self._look_at = -math.inf
        self._give_up_at = math.inf
        self._fault: BaseException | None = None
        self._wake = asyncio.Event()
        self._started = False
        self._waiting_logged = False
        self._began = time.monotonic()

    @property
    def idle(self) -> bool:
        """True when no program runs."""
        return not self._state.runs

    def handle_run_event(self, event: events.RunEvent) -> None:
        """Handle an event of the runner."""
        _log_run_event(event)
        self._account.record_run_event(event, time.time())
        self._take(policy_state.RunReported(time.monotonic(), event))

    def change(self, settings: HarvestSettings) -> None:
        """Go on with another configuration."""
        self._watcher.watch_people(settings.people.enabled)
        observation = self._watcher.look(time.time())
        self._take(policy_state.Reconfigured(time.monotonic(), settings, observation))
        self._look_at = -math.inf

    def end(self) -> None:
        """Stop all programs; a second call kills them at once."""
        again = self._state.ended
        if again:
            log.warning("killing all programs now")
            self._give_up_at = min(self._give_up_at, time.monotonic() + _SHUTDOWN_SECONDS)
        elif self._state.runs:
            log.info("shutting down: waiting for programs to stop (send the signal again to kill them now)")
        self._take(policy_state.ShutdownRequested(time.monotonic(), at_once=again))

    async def run(self, runner: RunnerProtocol) -> None:
        """Harvest until shutdown, or once.

        Raises:
            GpulseError: A process of a program could not be killed.
            Exception: A bug in harvest, also in a callback.
        """
        self._runner = runner
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._handle_fault)
        descriptor = self._watcher.descriptor
        if descriptor is not None:
            loop.add_reader(descriptor, self._glance)
        try:
            while not self._is_over():
                self._turn()
                await self._rest()
        finally:
            if descriptor is not None:
                loop.remove_reader(descriptor)
            self._watcher.close()
        if self._state.ended and self._state.runs:
            left = ", ".join(run.program.name for run in self._state.runs.values())
            raise GpulseError(
                f"cannot kill all processes of {left}",
                hint="reset the GPU or reboot the machine: a process that hangs in the driver cannot be killed",
            )

    def _handle_fault(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """End after an error in a callback: the policy's state no longer matches what was done."""
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
        self._take(policy_state.TimePassed(now, time.time() - now))
        if now >= self._look_at:
            self._look()
        if self._options.once and not self._state.closed:
            self._decide_once()
        self._save(changed=False)

    def _look(self) -> None:
        observation = self._watcher.look(time.time())
        now = self._looked_at = time.monotonic()
        self._look_at = now + self._state.settings.interval_seconds
        self._take(policy_state.Observed(now, observation))
        if not self._waiting_logged:
            self._waiting_logged = True
            for line in () if self._options.once else describe_waiting(self._state, now):
                log.info("%s", line)

    def _decide_once(self) -> None:
        now = time.monotonic()
        settings = self._state.settings
        waited = now - self._began > settings.idle_seconds + settings.interval_seconds
        if self._started or waited:
            self._options.decided(list(describe_plan(self._state, now, dry_run=self._options.dry_run)))
            self._take(policy_state.StartsClosed(now))

    async def _rest(self) -> None:
        """Wait for an event, or until the next check is due."""
        if self._is_over():
            return
        self._wake.clear()
        now = time.monotonic()
        times = [self._look_at, now + _MAX_WAIT_SECONDS, self._give_up_at]
        soonest = next_event_time(self._state, now)
        if soonest is not None:
            times.append(soonest)
        if wants_look(self._state, now):
            self._look_at = max(now, self._looked_at + _MIN_LOOK_SECONDS)
            times.append(self._look_at)
        with suppress(TimeoutError):
            await asyncio.wait_for(self._wake.wait(), max(0.0, min(times) - now))

    def _glance(self) -> None:
        observation = self._watcher.glance(time.time())
        if observation is not None:
            self._take(policy_state.Observed(time.monotonic(), observation))

    def _take(self, event: policy_state.Event) -> None:
        """Apply an event and carry out the instructions; events that come meanwhile wait for their turn."""
        self._events.append(event)
        self._wake.set()
        if self._stepping:
            return
        self._stepping = True
        try:
            while self._events:
                event = self._events.pop(0)
                self._account.accrue(self._state, event.now)
                self._state, orders = step(self._state, event)
                self._account.record_instructions(self._state, orders, time.time())
                for order in orders:
                    self._carry_out(order)
                if orders or isinstance(event, policy_state.RunReported):
                    self._save(changed=True)
        finally:
            self._stepping = False

    def _carry_out(self, order: policy_state.Instruction) -> None:
        if self._runner is None:
            return
        is_dry = self._options.dry_run
        match order:
            case policy_state.Start(run, program):
                self._started = True
                verb = "would start" if is_dry else "starting"
                log.info("%s %s on %s", verb, program.name, _format_gpus(program))
                self._runner.start(run, program, self._options.environment)
            case policy_state.Signal(run, number, reason):
                self._runner.signal(run, number)
                verb = "would stop" if is_dry else "stopping"
                log.info("%s %s: %s", verb, _program_name(run), reason.what)
            case policy_state.Kill(run, reason):
                self._runner.kill(run)
                verb = "would kill" if is_dry else "killing"
                log.info("%s %s: %s", verb, _program_name(run), reason.what)

    def _save(self, *, changed: bool) -> None:
        if self._state_directory is not None:
            status = self._account.status(self._state, time.monotonic(), time.time())
            self._state_directory.save(status, self._account.totals(), changed=changed)


class DryRunner:
    """Runner of a dry run: starts nothing, and reports every program as gone as soon as it should end."""

    def __init__(self, report: Callable[[events.RunEvent], None]) -> None:
        self._report = report

    def start(self, run: str, program: Program, environment: Mapping[str, str]) -> None:
        """Pretend to start: its GPUs are taken from now on."""

    def signal(self, run: str, number: int) -> None:  # noqa: ARG002  a runner's signature
        """Pretend that it obeyed."""
        self._report(events.ProgramGone(run))

    def kill(self, run: str) -> None:
        """Pretend that it is gone."""
        self._report(events.ProgramGone(run))


def _log_run_event(event: events.RunEvent) -> None:
    match event:
        case events.ProgramStarted(run, _, process):
            log.info("%s started (pid %d)", _program_name(run), process.pid)
        case events.ProgramStartFailed(run, why):
            log.error("cannot start program %s: %s", _program_name(run), why)
        case events.ProgramExited(run, status) if status < 0:
            log.info("%s was terminated by signal %d", _program_name(run), -status)
        case events.ProgramExited(run, status):
            log.log(
                logging.INFO if status == 0 else logging.WARNING,
                "%s exited with status %d",
                _program_name(run),
                status,
            )
        case events.ProgramGone(run):
            log.info("all processes of %s have ended", _program_name(run))


def _program_name(run: str) -> str:
    """Return the program's name from a run's ID, which is NAME.NUMBER."""
    return run.rpartition(".")[0]


def _format_gpus(program: Program) -> str:
    return gpu_label(map(str, program.gpus))
