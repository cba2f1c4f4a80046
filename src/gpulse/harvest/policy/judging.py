"""Who counts as a user of a GPU, and who as somebody at the machine."""

from __future__ import annotations

from collections.abc import Iterable

from gpulse.harvest.policy.state import GpuState, ProcessKey, Sighted
from gpulse.harvest.policy.words import Reason
from gpulse.harvest.settings import Settings
from gpulse.harvest.sight.seen import Holder, Presence, Use


def judged(gpu: GpuState, index: int, use: Use, settings: Settings, now: float, *, ours: bool) -> GpuState:
    """A GPU after a look at it.

    Args:
        gpu: As it was.
        index: Which one it is.
        use: What was seen.
        settings: Who counts.
        now: The time of the look.
        ours: A program of ours is on it, so that what it does says nothing about others.
    """
    sighted = dict(_sighted(gpu, use.holders, now))
    ignored = settings.gpus.get(index, frozenset())
    # Who opened it cannot be seen, but what was started just then can: a monitor that everybody ignores is a reason.
    excused = any(not ignored.isdisjoint(names) for names in use.suspects)
    unseen_at = now if use.opened_unseen and not excused else gpu.unseen_at
    busy = _busy(index, use, sighted, settings, now)
    if busy is None and unseen_at is not None and now - unseen_at < settings.quiet_seconds:
        busy = Reason("gpu", None, f"somebody out of sight opened GPU {index}")
    if busy is None and not ours:
        busy = _too_much(index, use, settings)
    return gpu._replace(
        looked_at=now,
        free_since=None if busy else (now if gpu.free_since is None else min(gpu.free_since, now)),
        busy=busy,
        sighted=sighted,
        unseen_at=unseen_at,
        cool_until=now + settings.cooldown_seconds if busy and gpu.preempted else gpu.cool_until,
    )


def _sighted(gpu: GpuState, holders: Iterable[Holder], now: float) -> Iterable[tuple[ProcessKey, Sighted]]:
    for holder in holders:
        key = (holder.pid, holder.start_ticks)
        known = gpu.sighted.get(key)
        opened = known is None or not holder.files <= known.files
        yield key, Sighted(now if known is None or opened else min(known.since, now), holder.files)


def _busy(
    index: int, use: Use, sighted: dict[ProcessKey, Sighted], settings: Settings, now: float
) -> Reason | None:
    if use.unknown is not None:
        return Reason("unknown", None, f"who uses GPU {index} is not known: {use.unknown}")
    ignored = settings.gpus.get(index, frozenset())
    for holder in use.holders:
        held = now - sighted[holder.pid, holder.start_ticks].since
        if _counts(holder, ignored, settings, held):
            name = holder.names[0] if holder.names else "a program"
            whose = f"{holder.user}'s {name}" if holder.user else name
            verb = "works on" if holder.working else "has opened"
            return Reason("gpu", holder.user, f"{whose} (pid {holder.pid}) {verb} GPU {index}")
    return None


def _counts(holder: Holder, ignored: frozenset[str], settings: Settings, held: float) -> bool:
    if holder.user in settings.always_users:
        return True
    if holder.user in settings.ignore_users or not ignored.isdisjoint(holder.names):
        return False
    return holder.working or held < settings.quiet_seconds


def _too_much(index: int, use: Use, settings: Settings) -> Reason | None:
    """What nobody in sight does to a GPU, somebody out of sight does."""
    most, busy = settings.utilization_ratio, use.utilization_ratio
    if most is not None and (busy is None or busy > most):
        what = "its utilization is not known" if busy is None else f"it is {busy:.0%} busy"
        return Reason("unknown" if busy is None else "gpu", None, f"GPU {index}: {what}")
    room, taken = settings.memory_bytes, use.memory_bytes
    if room is not None and (taken is None or taken > room):
        what = (
            "its memory is not known"
            if taken is None
            else f"{taken / 2**20:.0f} MiB of its memory are in use by nobody in sight"
        )
        return Reason("unknown" if taken is None else "gpu", None, f"GPU {index}: {what}")
    return None


def present(people: Iterable[Presence], settings: Settings) -> tuple[Presence, ...]:
    """Those at the machine who count."""
    return tuple(person for person in people if _is_there(person, settings))


def _is_there(person: Presence, settings: Settings) -> bool:
    if person.idle_seconds is not None and person.idle_seconds >= settings.people.idle_seconds:
        return False
    if person.user in settings.always_users:
        return True
    return person.user not in settings.people.whitelist and person.user not in settings.ignore_users


def somebody(people: tuple[Presence, ...] | None, settings: Settings) -> Reason | None:
    """Why the people at the machine keep programs from running, None when they do not."""
    if not settings.people.enabled:
        return None
    if people is None:
        return Reason("unknown", None, "who is at the machine is not known yet")
    if not people:
        return None
    first = people[0]
    return Reason("people", first.user, f"{first.user} is at {first.where}")
