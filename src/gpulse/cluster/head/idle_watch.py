"""Watch a head's nodes for GPUs that are held and unused, warn their holders, and run the site's hook."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from gpulse.background_call import await_background_call
from gpulse.cluster.head.fleet import Fleet, FleetMember, node_state
from gpulse.cluster.head.maintenance import FactWriter
from gpulse.cluster.notify.config import find_user_address
from gpulse.cluster.notify.idle_holdings import Holder, HoldingsView, NodeSample, index_jobs
from gpulse.cluster.notify.idle_hook import (
    HookOutcome,
    HookRefusedError,
    HookRunner,
    IdleConfig,
    build_hook_call,
    find_placeholders,
    has_values,
)
from gpulse.cluster.notify.idle_policy import (
    HOOK_STARTED,
    MAX_GAP_SECONDS,
    RELEASE_SECONDS,
    WARNED_AGAIN,
    EpisodeFile,
    IdlePolicy,
    Step,
    StepKind,
    Track,
    lose,
    observe,
    postpone_hook,
    release,
    resume,
)
from gpulse.cluster.notify.outbox import Message, MessageSender
from gpulse.cluster.notify.templates import (
    USER,
    build_operator_message,
    build_outcome_message,
    build_user_message,
    describe_holder,
    describe_outcome,
    describe_policy,
    describe_step,
    message_key,
)

log = logging.getLogger(__name__)

_WATCH_SECONDS = 2.0
_MAX_WATCH_SECONDS = 6.0
_REST_FACTOR = 10.0
"""The pause after a round is at least this many times its duration, so that a large fleet is watched less often."""
_NODES_AT_ONCE = 16
"""Nodes that are decoded before other tasks of the head get their turn."""
_SAVE_SECONDS = 60.0
"""How often clocks are saved while no step is taken; a killed head forgets at most this much idle time."""
_STOP_SECONDS = 6.0
"""Longer than a hook may run on when the head stops."""
_HOUR_SECONDS = 3600.0
_EVENTS: dict[StepKind, str] = {
    "warn": "idle_warning",
    "warn_again": "idle_second_warning",
    "hook": "idle_hook_started",
    "resolved": "idle_resolved",
}
"""Kind of the event of each step."""
HOOK_ENDED_EVENT = "idle_hook_ended"
DRY_RUN_EVENT = "idle_dry_run"
"""Kind of the events of a dry run; `step` says what would have been done."""


class _AddressedMessage(NamedTuple):
    """A message, and where it is to be sent."""

    message: Message
    targets: tuple[str, ...]
    recipient: str | None = None


class _Warning(NamedTuple):
    """The messages of a step whose track stays pending until the sender has stored them."""

    episode: str
    keys: tuple[str, ...]
    refused: tuple[_AddressedMessage, ...]
    """Those that the sender has not accepted yet."""


class IdleWatch:
    """Background task of a head: observes all nodes that are connected to it."""

    def __init__(
        self,
        config: IdleConfig,
        fleet: Fleet,
        notes: FactWriter,
        sender: MessageSender,
        directory: str,
        *,
        now: Callable[[], float],
        interval_seconds: Callable[[], float],
    ) -> None:
        """Prepare to watch.

        Args:
            config: The policy.
            fleet: The nodes.
            notes: Writes events.
            sender: Delivers messages.
            directory: The head's data directory.
            now: The head's clock.
            interval_seconds: Returns the sampling interval of agents without their own.
        """
        self._policy, self._user = config
        self._fleet = fleet
        self._notes = notes
        self._sender = sender
        self._file = EpisodeFile(directory)
        self._now = now
        self._interval_seconds = interval_seconds
        self._users = dict(self._policy.users)
        self._placeholders = find_placeholders(self._policy.hook)
        self._tracks: dict[Holder, Track] = {}
        self._hooks: list[float] = []
        """When hooks were started in the last hour."""
        self._waiting: asyncio.Queue[Track | None] = asyncio.Queue()
        """Tracks whose hook is to run; None for the end."""
        self._warnings: dict[Holder, _Warning] = {}
        """Warnings that may not be stored yet."""
        self._saving = asyncio.Lock()
        self._runner = HookRunner(self._user, self._policy.hook_timeout_seconds) if self._user else None
        self._saved = 0.0
        self._is_limited = self._is_failing = self._has_error = self._is_refused = False

    async def run(self) -> None:
        """Run until cancelled."""
        await self.restore()
        hooks = asyncio.create_task(self.run_hooks(), name="idle hooks")
        try:
            while True:
                began = time.monotonic()
                await self.step()
                pause = min(_WATCH_SECONDS, self._policy.after_seconds / 10)
                took = time.monotonic() - began
                await asyncio.sleep(min(max(pause, _REST_FACTOR * took), _MAX_WATCH_SECONDS))
                if hooks.done():
                    hooks.result()
        finally:
            if self._runner is not None:
                self._runner.stop()
            self._waiting.put_nowait(None)
            await asyncio.wait([hooks], timeout=_STOP_SECONDS)
            hooks.cancel()
            await self._save()

    async def restore(self) -> None:
        """Continue where the previous head stopped."""
        tracks, hooks = await asyncio.to_thread(self._file.load)
        now = self._now()
        self._hooks = [when for when in hooks if now - _HOUR_SECONDS < when <= now]
        for before in tracks:
            track = resume(before, now, self._policy)
            self._tracks[track.holder] = track
            if track.is_pending and track.level == HOOK_STARTED:
                self._tracks[track.holder] = track._replace(is_pending=False)
                if not track.is_dry_run:
                    self._report_outcome(track, HookOutcome("unknown"))
            elif track.is_pending:
                kind: StepKind = "warn_again" if track.level == WARNED_AGAIN else "warn"
                self._warn(Step(kind, track))
        self._end_warnings()
        log.info("idle GPUs: %s", describe_policy(self._policy))

    async def step(self) -> None:
        """Observe all nodes once, and do what follows from it; an error in that must not end the head."""
        try:
            await self._apply(await self._look(), self._now())
            self._has_error = False
        except Exception:
            if not self._has_error:
                self._has_error = True
                log.exception("the watch for idle GPUs failed because of a bug in gpulse; trying again")

    async def _look(self) -> HoldingsView:
        """Return who holds which GPUs now."""
        view = HoldingsView(self._policy.threshold)
        for number, member in enumerate(list(self._fleet.members.values()), 1):
            view.add(self._sample(member))
            if number % _NODES_AT_ONCE == 0:
                await asyncio.sleep(0)
        return view

    def _sample(self, member: FleetMember) -> NodeSample:
        is_known = member.is_here and member.knows_processes
        frame = member.frame(self._fleet.layouts) if is_known else None
        interval = member.interval_seconds or self._interval_seconds()
        if frame is None or node_state(self._now() - frame.time, interval) != "healthy":
            owners = [identity.owner for identity in member.processes.values()]
            return NodeSample(member.name, None, index_jobs(member.jobs, owners))
        return NodeSample(member.name, frame)

    async def _apply(self, view: HoldingsView, now: float) -> None:
        """Add what was seen to the tracks, and carry out the steps that follow."""
        has_ended_warnings = self._end_warnings()
        before = dict(self._tracks)
        steps: list[Step] = []
        free_hooks = self._count_free_hooks(now)
        holdings = view.holdings
        for holder, holding in holdings.items():
            if self._policy.exempt.match(holding):
                self._tracks.pop(holder, None)
                continue
            track, step = observe(
                self._tracks.get(holder),
                holding,
                now,
                self._policy_for(holder),
                may_run_hook=free_hooks > 0 and self._is_warned(holder),
            )
            self._tracks[holder] = track
            if step is not None:
                steps.append(step)
                free_hooks -= step.kind == "hook"
        for holder in before.keys() - holdings.keys():
            track = before[holder]
            if now - track.seen > RELEASE_SECONDS and view.is_released(track.places):
                del self._tracks[holder]
                step = release(track)
                if step is not None:
                    steps.append(step)
            elif (left := lose(track, now, self._policy)) is not None:
                self._tracks[holder] = left
            else:
                del self._tracks[holder]
        if steps or has_ended_warnings or now - self._saved >= _SAVE_SECONDS or now < self._saved:
            hooks = self._hooks
            started = [now] * sum(step.kind == "hook" and not self._policy.dry_run for step in steps)
            self._hooks = [when for when in hooks if now - _HOUR_SECONDS < when <= now] + started
            # Steps are on disk before they are carried out: a head that is killed in between repeats none.
            if await self._save():
                await self._carry_out(steps)
                return
            self._hooks = hooks
            for step in steps:
                self._tracks[step.track.holder] = before[step.track.holder]

    def _policy_for(self, holder: Holder) -> IdlePolicy:
        """Return the policy for a holder: without the hook, if that needs something that the holder does not have."""
        track, policy = self._tracks.get(holder), self._policy
        if track is None or not policy.hook or has_values(self._placeholders, track):
            return policy
        return policy._replace(hook=())

    def _is_warned(self, holder: Holder) -> bool:
        """Return whether no warning to a holder still waits for its delivery."""
        track = self._tracks.get(holder)
        if track is None or track.level != WARNED_AGAIN:
            return False
        kinds: tuple[StepKind, ...] = ("warn", "warn_again")
        return not any(self._sender.is_waiting(message_key(kind, track, USER)) for kind in kinds)

    def _count_free_hooks(self, now: float) -> int:
        recent = sum(now - _HOUR_SECONDS < when <= now for when in self._hooks)
        free = self._policy.max_hooks_per_hour - recent
        if (free <= 0) != self._is_limited:
            self._is_limited = not self._is_limited
            if self._is_limited:
                log.warning(
                    "idle GPUs: the limit of hooks per hour has been reached (%d); further hooks are delayed",
                    recent,
                )
        return free

    async def _carry_out(self, steps: Sequence[Step]) -> None:
        for step in steps:
            track = self._tracks.get(step.track.holder)
            if step.kind == "resolved" or track is None:
                self._send_all(self._announce(step))
            elif step.kind == "hook" and not self._policy.dry_run:
                self._send_all(self._announce(step))
                self._waiting.put_nowait(track)
            else:
                self._warn(step)
        if self._end_warnings() or steps:
            await self._save()

    def _warn(self, step: Step) -> None:
        """Announce a step; its track stays pending until the sender has stored all messages about it."""
        deliveries = self._announce(step)
        keys = tuple(one.message.key for one in deliveries)
        self._warnings[step.track.holder] = _Warning(step.track.episode, keys, self._send_all(deliveries))

    def _end_warnings(self) -> bool:
        """Send again what was refused, and note which warnings are stored; return whether one is.

        A head that is killed before a track is saved as no longer pending warns again.
        """
        has_ended = False
        for holder, warning in list(self._warnings.items()):
            track = self._tracks.get(holder)
            if track is None or track.episode != warning.episode:
                del self._warnings[holder]
                continue
            refused = self._send_all(warning.refused)
            if refused or not all(map(self._sender.is_stored, warning.keys)):
                self._warnings[holder] = warning._replace(refused=refused)
                continue
            del self._warnings[holder]
            self._tracks[holder] = track._replace(is_pending=False)
            has_ended = True
        return has_ended

    # --- messages and events

    def _announce(self, step: Step) -> list[_AddressedMessage]:
        """Write the log and the event of a step, and return its messages."""
        policy, track = self._policy_for(step.track.holder), step.track
        address = find_user_address(track.user, self._users, policy.mail)
        text = describe_step(step, policy, address, self._shown_command(track))
        log.info("idle GPUs: %s. %s", text.title, text.lines[-1])
        for place in track.places:
            self._event(
                DRY_RUN_EVENT if policy.dry_run else _EVENTS[step.kind],
                place.node,
                **({"step": step.kind} if policy.dry_run else {}),
                job=track.holder.job,
                user=track.user,
                gpus=[label for label, _ in place.gpus],
                idle_seconds=round(track.unused_seconds, 3),
                **({"command": list(self._shown_command(track))} if step.kind == "hook" else {}),
                **({"reason": step.reason} if step.reason else {}),
            )
        deliveries = [_AddressedMessage(build_operator_message(step, text), policy.targets)]
        if not policy.dry_run and step.kind != "hook" and address is not None:
            message = build_user_message(step, policy)
            if "@" not in address:
                deliveries.append(_AddressedMessage(message, (address,)))
            elif policy.mail_target is not None:
                deliveries.append(_AddressedMessage(message, (policy.mail_target,), address))
        return deliveries

    def _shown_command(self, track: Track) -> tuple[str, ...]:
        """Return the hook with its arguments, or why it cannot be called."""
        if self._user is None:
            return ()
        try:
            return build_hook_call(self._policy.hook, track, self._user).command
        except HookRefusedError as refused:
            return (f"({refused})",)

    def _send_all(self, deliveries: Iterable[_AddressedMessage]) -> tuple[_AddressedMessage, ...]:
        """Send messages; return those that the sender has refused because too many wait."""
        given = [one for one in deliveries if one.targets]
        refused = tuple(
            one for one in given if not self._sender.send(one.message, one.targets, recipient=one.recipient)
        )
        if given and bool(refused) != self._is_refused:
            self._is_refused = bool(refused)
            if refused:
                log.error(
                    "idle GPUs: too many messages are waiting; warnings are delayed, and other messages are dropped"
                )
        return refused

    def _event(self, kind: str, node: str, **detail: object) -> None:
        known = next(
            (member.stored.id for member in self._fleet.members.values() if member.name == node), None
        )
        self._notes.event(kind, known, **detail)

    # --- the hook

    async def run_hooks(self) -> None:
        """Run hooks one after the other."""
        while (track := await self._waiting.get()) is not None:
            outcome = await self._run_hook(track)
            if outcome is not None and outcome.state == "stopped":
                return  # it may have done its work: the next head reports that, and does not run it again
            current = self._tracks.get(track.holder)
            if current is not None and current.episode == track.episode:
                done = postpone_hook(current) if outcome is None else current._replace(is_pending=False)
                self._tracks[track.holder] = done
                await self._save()
            if outcome is not None:
                self._report_outcome(track, outcome)

    async def _run_hook(self, track: Track) -> HookOutcome | None:
        """Run the hook for one track; None if it did not run because that is not certain to be right any more."""
        runner, user = self._runner, self._user
        current = self._tracks.get(track.holder)
        if (
            runner is None
            or user is None
            or runner.is_stopping
            or current is None
            or current.episode != track.episode
            or current.use != "unused"
            or self._now() - current.time > MAX_GAP_SECONDS
        ):
            log.info(
                "idle GPUs: the hook for %s was not run because the GPUs or their use have changed",
                describe_holder(track),
            )
            return None
        try:
            call = build_hook_call(self._policy.hook, track, user)
        except HookRefusedError as refused:
            return HookOutcome("refused", reason=str(refused))
        return await await_background_call(lambda: runner.run(call), name="gpulse-idle-hook")

    def _report_outcome(self, track: Track, outcome: HookOutcome) -> None:
        text = describe_outcome(track, outcome)
        level = logging.INFO if outcome.state == "ended" else logging.WARNING
        log.log(level, "idle GPUs: %s; %s", text.title, text.lines[0])
        for place in track.places:
            self._event(
                HOOK_ENDED_EVENT,
                place.node,
                job=track.holder.job,
                user=track.user,
                gpus=[label for label, _ in place.gpus],
                outcome=outcome.state,
                exit_code=outcome.exit_code,
                reason=outcome.reason,
                output=outcome.output,
            )
        self._send_all([_AddressedMessage(build_outcome_message(track, outcome), self._policy.targets)])

    async def _save(self) -> bool:
        """Save all tracks; return whether that succeeded."""
        async with self._saving:  # an older state must not replace a newer one
            try:
                await asyncio.to_thread(self._file.save, list(self._tracks.values()), list(self._hooks))
            except OSError as error:
                if not self._is_failing:
                    self._is_failing = True
                    log.error(
                        "cannot save the state of idle GPUs, so no warnings are sent and no hooks are run: %s",
                        error,
                    )
                return False
            self._is_failing, self._saved = False, self._now()
            return True
