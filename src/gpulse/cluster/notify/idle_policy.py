"""When a holder of unused GPUs is warned, warned again, and when the site's hook runs.

The state machine is pure. `EpisodeFile` keeps its tracks in the head's data directory, so that a restart repeats no step.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from fnmatch import fnmatchcase
from typing import Literal, NamedTuple

import msgspec

from gpulse.atomic_files import replace_file
from gpulse.cluster.notify.idle_holdings import HeldPlace, Holder, Holding, Use
from gpulse.model.device import IDLE_RATIO
from gpulse.model.finding_acknowledgement import Silence
from gpulse.model.safe_text import one_line
from gpulse.store.damage import add_checksum, strip_checksum

StepKind = Literal["warn", "warn_again", "hook", "resolved"]
EndReason = Literal["used", "changed", "released"]
"""Its GPUs are used, it has another process or GPU, or it has left its GPUs."""
MAX_USED_SHARE = IDLE_RATIO
"""Holders may use their GPUs for this share of the window and still count as idle: one stray kernel is no work."""
MAX_GAP_SECONDS = 10.0
"""What happened between two observations that are further apart is unknown."""
RELEASE_SECONDS = 15.0
"""A holder has left when it was not seen for this long: lists of processes come every five seconds, and may fail."""
_MAX_START_DIFFERENCE_SECONDS = 5.0
"""Start times of the same process may differ by this much from one agent to the next."""
_MAX_INTERRUPTIONS = 100
_MAX_SILENT_SECONDS = 7 * 86_400.0
"""Holders on nodes that were not seen for this long are forgotten."""
WARNED, WARNED_AGAIN, HOOK_STARTED = 1, 2, 3
"""Levels of a track: the last step that was taken."""
log = logging.getLogger(__name__)
EPISODE_FILE = "idle-episodes.json"
MAX_TRACKS = 20_000
_MAX_FILE_BYTES = 64 << 20
_VERSION = 1


class Exemptions(NamedTuple):
    """Patterns of holders that are never touched."""

    users: tuple[str, ...] = ()
    jobs: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    silences: Callable[[], Iterable[Silence]] = tuple
    """Returns the silences that are in force: what people do not want to be told about is left alone as well."""

    def match(self, holding: Holding) -> bool:
        """Return whether a holding is exempt: one of its users or nodes is enough, so that no other can undo it."""
        return (
            _matches(self.users, holding.users)
            or _matches(self.jobs, [holding.holder.job or ""])
            or _matches(self.nodes, holding.nodes)
            or any(is_about(silence, holding) for silence in self.silences())
        )


def is_about(silence: Silence, holding: Holding) -> bool:
    """Return whether a silence is about a holding: about its node, GPU, user or job, whatever the finding.

    It must match every field that the silence has. One for certain findings is not about holdings.
    """
    if silence.findings:
        return False
    gpus = {f"{place.node}:{label}" for place in holding.places for label, _ in place.gpus}
    jobs = () if holding.holder.job is None else (holding.holder.job,)
    fields = (
        (silence.nodes, holding.nodes),
        (silence.gpus, gpus),
        (silence.users, holding.users),
        (silence.jobs, jobs),
    )
    return all(not set(wanted).isdisjoint(present) for wanted, present in fields if wanted)


class IdlePolicy(NamedTuple):
    """The `[idle]` table of the configuration."""

    after_seconds: float = 1800.0
    """Length of the window in which GPUs must be held and unused before the first warning."""
    warn_again_seconds: float = 900.0
    hook_after_seconds: float = 1800.0
    """Grace period after the second warning."""
    threshold: float = IDLE_RATIO
    """A GPU whose activity is at most this is unused."""
    dry_run: bool = True
    hook: tuple[str, ...] = ()
    """Program and arguments; empty for none."""
    hook_user: str | None = None
    hook_timeout_seconds: float = 60.0
    max_hooks_per_hour: int = 10
    exempt: Exemptions = Exemptions()
    users: tuple[tuple[str, str], ...] = ()
    """Mail address, or name of a target, by user."""
    mail: str | None = None
    """Mail address of users who are not listed, with `{user}` in it."""
    mail_target: str | None = None
    """Name of the mail target through which users get their mail."""
    targets: tuple[str, ...] = ()
    """Names of the operators' targets."""

    @property
    def allowance_seconds(self) -> float:
        """How much of a window may be used, or unknown."""
        return MAX_USED_SHARE * self.after_seconds

    def required_seconds(self, level: int) -> float:
        """Return how long GPUs must have been unused before the step that follows a level."""
        delays = (self.after_seconds, self.warn_again_seconds, self.hook_after_seconds)
        return sum(delays[: level + 1])

    def pause_seconds(self, level: int) -> float:
        """Return the minimum time between the step of a level and the one that follows."""
        return (0.0, self.warn_again_seconds, self.hook_after_seconds)[level]


class IdleInterruption(NamedTuple):
    """Time within the window that does not count as unused."""

    time: float
    seconds: float
    was_used: bool
    """False when it is unknown."""


class Track(NamedTuple):
    """What was observed of one holder, and which steps were taken."""

    holder: Holder
    user: str | None
    places: tuple[HeldPlace, ...]
    time: float
    """The last observation."""
    use: Use
    """Of the last observation."""
    seen: float
    """The last observation in which the use was known."""
    since: float
    """When the GPUs became unused, as far as it was observed."""
    unused_seconds: float = 0.0
    """Time since then that is known to be unused."""
    interruptions: tuple[IdleInterruption, ...] = ()
    """Those of the last window, oldest first."""
    level: int = 0
    step_seconds: float = 0.0
    """`unused_seconds` when the last step was taken."""
    first_warned: float | None = None
    is_dry_run: bool = True
    """Whether the steps so far were only reported."""
    is_pending: bool = False
    """Whether the last step was decided, but is not known to be carried out."""

    @property
    def episode(self) -> str:
        """Text that identifies the episode."""
        named = "\0".join(
            (self.holder.job or "", self.holder.user or "", self.holder.node, *self.holder.gpus)
        )
        return (
            f"{hashlib.sha256(named.encode(errors='replace')).hexdigest()[:16]}-{self.first_warned or 0:.3f}"
        )

    @property
    def nodes(self) -> list[str]:
        """Names of the nodes."""
        return [place.node for place in self.places]


class Step(NamedTuple):
    """One step to carry out."""

    kind: StepKind
    track: Track
    """As it is after the step; for `resolved`, as it was before."""
    reason: EndReason | None = None
    """Why an episode is over."""


def observe(
    track: Track | None, holding: Holding, now: float, policy: IdlePolicy, *, may_run_hook: bool = True
) -> tuple[Track, Step | None]:
    """Add one observation of a holder, and return its new track and the step to take.

    Args:
        track: What was observed before; None for a new holder.
        holding: Its GPUs now.
        now: Epoch seconds.
        policy: The policy.
        may_run_hook: Whether the limit of hooks per hour permits one more.
    """
    if track is None:
        return _start(holding, now, policy), None
    if now <= track.time:
        return track, None
    if holding.use != "unknown" and _has_new_parts(track.places, holding.places):
        return _end(track, holding, now, policy, "changed")
    seconds = now - track.time
    is_seen = holding.use == track.use == "unused" and seconds <= MAX_GAP_SECONDS
    is_unknown = "unknown" in (holding.use, track.use) or seconds > MAX_GAP_SECONDS
    interruptions = _forget_old(track.interruptions, now - policy.after_seconds)
    if holding.use == "used" or is_unknown:
        interruptions = (*interruptions, IdleInterruption(now, seconds, holding.use == "used"))
    if sum(one.seconds for one in interruptions if one.was_used) > policy.allowance_seconds:
        return _end(track, holding, now, policy, "used")
    track = track._replace(
        user=holding.user,
        places=track.places if holding.use == "unknown" else _keep_starts(track.places, holding.places),
        time=now,
        use=holding.use,
        seen=track.seen if holding.use == "unknown" else now,
        interruptions=interruptions,
        unused_seconds=track.unused_seconds + (seconds if is_seen else 0.0),
    )
    if (
        sum(one.seconds for one in interruptions) > policy.allowance_seconds
        or len(interruptions) > _MAX_INTERRUPTIONS
    ):
        track = track._replace(since=now, unused_seconds=0.0, step_seconds=0.0, interruptions=())
    return _take_step(track, now, policy, may_run_hook=may_run_hook) if is_seen else (track, None)


def lose(track: Track, now: float, policy: IdlePolicy) -> Track | None:
    """Return the track of a holder of which nothing is known at the moment; None when there is nothing to remember."""
    users = frozenset(() if track.user is None else (track.user,))
    unknown = Holding(track.holder, users, track.places, "unknown")
    track, _ = observe(track, unknown, now, policy)
    is_empty = not track.level and not track.unused_seconds
    return None if is_empty or now - track.seen > _MAX_SILENT_SECONDS else track


def release(track: Track) -> Step | None:
    """Return the step when a holder has left its GPUs; None if nobody was warned."""
    return Step("resolved", track, "released") if track.level else None


def resume(track: Track, now: float, policy: IdlePolicy) -> Track:
    """Return a track of the previous run of the head as the current policy sees it.

    Nothing is known of the time in between. Steps of a dry run do not count for a policy that acts: nobody was warned.
    """
    track = track._replace(use="unknown", seen=now)
    if track.time > now:  # the clock was set back
        track = track._replace(time=now, since=now, unused_seconds=0.0, step_seconds=0.0, interruptions=())
    if track.is_dry_run and not policy.dry_run:
        return track._replace(
            level=0, step_seconds=0.0, first_warned=None, is_dry_run=False, is_pending=False
        )
    return track._replace(is_dry_run=policy.dry_run)


def _start(holding: Holding, now: float, policy: IdlePolicy) -> Track:
    return Track(
        holding.holder,
        holding.user,
        holding.places,
        time=now,
        use=holding.use,
        seen=now,
        since=now,
        is_dry_run=policy.dry_run,
    )


def postpone_hook(track: Track) -> Track:
    """Return the track of a holder whose hook was decided, but certainly did not run: it has another grace period."""
    return track._replace(level=WARNED_AGAIN, step_seconds=track.unused_seconds, is_pending=False)


def _end(
    track: Track, holding: Holding, now: float, policy: IdlePolicy, reason: EndReason
) -> tuple[Track, Step | None]:
    step = Step("resolved", track, reason) if track.level else None
    return _start(holding, now, policy), step


def _take_step(
    track: Track, now: float, policy: IdlePolicy, *, may_run_hook: bool
) -> tuple[Track, Step | None]:
    level = track.level
    if level >= HOOK_STARTED or track.is_pending or (level == WARNED_AGAIN and not policy.hook):
        return track, None
    if track.unused_seconds < policy.required_seconds(level):
        return track, None
    if track.unused_seconds - track.step_seconds < policy.pause_seconds(level):
        return track, None
    if level == WARNED_AGAIN and not may_run_hook:
        return track, None
    taken = track._replace(
        level=level + 1,
        step_seconds=track.unused_seconds,
        first_warned=now if level == 0 else track.first_warned,
        is_pending=True,
    )
    kinds: tuple[StepKind, ...] = ("warn", "warn_again", "hook")
    return taken, Step(kinds[level], taken)


def _has_new_parts(before: Iterable[HeldPlace], after: Iterable[HeldPlace]) -> bool:
    """Return whether a holder has taken another GPU or started another process since it was last seen."""
    gpus = {(place.node, uuid) for place in before for _, uuid in place.gpus}
    starts = _process_starts(before)
    for place in after:
        if any((place.node, uuid) not in gpus for _, uuid in place.gpus):
            return True
        for pid, start in place.processes:
            known = starts.get((place.node, pid))
            if known is None or (known and start and abs(known - start) > _MAX_START_DIFFERENCE_SECONDS):
                return True
    return False


def _keep_starts(before: Iterable[HeldPlace], after: Iterable[HeldPlace]) -> tuple[HeldPlace, ...]:
    """Return places with the start times that were known before, where they are unknown now."""
    starts = _process_starts(before)
    return tuple(
        place._replace(
            processes=tuple(
                (pid, start or starts.get((place.node, pid), 0.0)) for pid, start in place.processes
            )
        )
        for place in after
    )


def _process_starts(places: Iterable[HeldPlace]) -> dict[tuple[str, int], float]:
    return {(place.node, pid): start for place in places for pid, start in place.processes}


def _forget_old(interruptions: tuple[IdleInterruption, ...], before: float) -> tuple[IdleInterruption, ...]:
    if interruptions and interruptions[0].time <= before:
        return tuple(one for one in interruptions if one.time > before)
    return interruptions


def _matches(patterns: Iterable[str], names: Iterable[str]) -> bool:
    return any(name and fnmatchcase(name, pattern) for pattern in patterns for name in names)


class _EpisodeDocument(msgspec.Struct, frozen=True):
    """The whole file."""

    version: int
    hooks: tuple[float, ...] = ()
    """When hooks were started in the last hour."""
    tracks: tuple[Track, ...] = ()


class EpisodeFile:
    """The file with the tracks; every write is atomic and durable."""

    def __init__(self, directory: str) -> None:
        self._path = os.path.join(directory, EPISODE_FILE)

    def load(self) -> tuple[list[Track], list[float]]:
        """Return the tracks of the previous head, and when it started hooks; nothing of a file that cannot be read.

        A file that cannot be read is renamed and reported: every holder is then observed for a whole window again.
        """
        try:
            with open(self._path, "rb") as file:
                data = file.read(_MAX_FILE_BYTES + 1)
            found = msgspec.json.decode(strip_checksum(data)[0], type=_EpisodeDocument)
            if found.version != _VERSION:
                raise ValueError(f"its version is {found.version}, not {_VERSION}")
        except FileNotFoundError:
            return [], []
        except (OSError, ValueError, RecursionError) as error:
            log.error(
                "cannot read %s: %s; idle times are counted from now on",
                self._path,
                one_line(str(error), 200),
            )
            with suppress(OSError):
                os.replace(self._path, f"{self._path}.damaged")
            return [], []
        return list(found.tracks[:MAX_TRACKS]), list(found.hooks)

    def save(self, tracks: Iterable[Track], hooks: Iterable[float]) -> None:
        """Replace the file; of too many tracks, those with the most steps and the longest idle time are kept.

        Raises:
            OSError: The file cannot be written; the old one may be unchanged.
        """
        kept = sorted(tracks, key=lambda track: (track.level, track.unused_seconds), reverse=True)[
            :MAX_TRACKS
        ]
        document = _EpisodeDocument(_VERSION, tuple(hooks), tuple(kept))
        replace_file(self._path, add_checksum(msgspec.json.encode(document)), 0o600, has_umask=False)
