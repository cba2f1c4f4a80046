"""Jobs of several users that have the same name: numbers begin anew, and everybody can say that a process is of a job."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from gpulse.model import iso_time
from gpulse.model.natural import natural_key
from gpulse.reports.owners import owner_of, text
from gpulse.store.store import StoredEvent, StoredProcess

_ROOT = "root"
_MOST_OTHERS = 5
_MOST_NODES = 4


class Who(NamedTuple):
    """A user, as far as known."""

    user: str | None = None
    uid: int | None = None

    @property
    def name(self) -> str:
        """What to call them."""
        return self.user[:40] if self.user else f"uid {self.uid}"

    @property
    def is_root(self) -> bool:
        """Whether they may be on any job's behalf: what runs in its containers, and what looks after it."""
        return self.uid == 0 or self.user == _ROOT

    def is_other(self, who: Who) -> bool:
        """Whether two are known to be not the same; numbers say it better than names."""
        if self.uid is not None and who.uid is not None:
            return self.uid != who.uid
        return self.user is not None and who.user is not None and self.user != who.user


def someone(told: Mapping[str, Any]) -> Who:
    """The user that a job or the owner of a process names."""
    uid = told.get("uid")
    return Who(text(told.get("user")), uid if isinstance(uid, int) else None)


class Namesakes:
    """What is known of one name, by user."""

    def __init__(self, name: str, processes: Sequence[StoredProcess], events: Sequence[StoredEvent]) -> None:
        """Tell users apart.

        Args:
            name: The job's.
            processes: Those that say that they are of it.
            events: Those that tell of it.
        """
        self._name = name
        self._processes = processes
        self._events = events

    @property
    def users(self) -> list[Who]:
        """Whose job it may be, the newest first: those whom schedulers name, or else the processes'."""
        told = [(event.time, someone(event.detail)) for event in self._events]
        seen = [(one.first_seen, _user(one)) for one in self._processes]
        for some in (told, [one for one in seen if not one[1].is_root], seen):
            ordered = [who for _, who in sorted(some, key=lambda one: one[0], reverse=True)]
            named = _apart(who for who in ordered if who != Who())
            if named:
                return named
        return [Who()]

    def of(self, user: Who) -> tuple[list[StoredProcess], list[StoredEvent]]:
        """What is a user's, or may be."""
        return (
            [one for one in self._processes if (who := _user(one)).is_root or not who.is_other(user)],
            [one for one in self._events if not someone(one.detail).is_other(user)],
        )

    def others(self, user: Who, during: tuple[float, float], names: Mapping[int, str]) -> Iterator[str]:
        """What is left out of a user's, in words.

        Args:
            user: Whose is wanted.
            during: The time that is reported.
            names: The nodes'.
        """
        everybody = [_user(one) for one in self._processes] + [someone(one.detail) for one in self._events]
        others = _apart(who for who in everybody if who.is_other(user) and not who.is_root)
        for other in others[:_MOST_OTHERS]:
            own = [one for one in self._processes if _is_of(_user(one), other, user)]
            events = [one for one in self._events if _is_of(someone(one.detail), other, user)]
            places = {one.node for one in own} | {one.node for one in events}
            nodes = sorted(
                (names[node] for node in places if node is not None and node in names), key=natural_key
            )
            where = ", ".join(nodes[:_MOST_NODES]) + (" and more" if len(nodes) > _MOST_NODES else "")
            if events:
                first = min([one.time for one in events] + [one.first_seen for one in own])
                yield (
                    f"{other.name} had a job of that name, too, on {where} from {iso_time.iso(first)} on, which is left out; "
                    "the time or the node tells them apart"
                )
            elif any(one.first_seen < during[1] and (one.ended or during[1]) > during[0] for one in own):
                many = f"{len(own)} {'process' if len(own) == 1 else 'processes'}"
                yield f"{many} of {other.name} on {where} said to be of this job, and {'is' if len(own) == 1 else 'are'} left out"


def _apart(users: Iterable[Who]) -> list[Who]:
    """Those that are not the same."""
    found: list[Who] = []
    for who in users:
        if all(who.is_other(one) for one in found):
            found.append(who)
    return found


def _is_of(who: Who, other: Who, user: Who) -> bool:
    return who.is_other(user) and not who.is_other(other)


def _user(process: StoredProcess) -> Who:
    return someone(owner_of(process))
