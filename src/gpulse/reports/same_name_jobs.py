"""Tell jobs of several users apart that have the same name.

Schedulers begin to count anew, and every process can claim to belong to a job.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from gpulse.model import iso_time
from gpulse.model.natural import natural_key
from gpulse.reports.process_index import owner_of, text
from gpulse.store.store import StoredEvent, StoredProcess

_ROOT = "root"
_MAX_OTHER_USERS = 5
_MAX_NAMED_NODES = 4


class User(NamedTuple):
    """A user by name, number or both."""

    name: str | None = None
    uid: int | None = None

    @property
    def shown(self) -> str:
        """The name, or else the number."""
        return self.name[:40] if self.name else f"uid {self.uid}"

    @property
    def is_root(self) -> bool:
        """Whether it may act for any job: processes in its containers, and those that look after it."""
        return self.uid == 0 or self.name == _ROOT

    def differs(self, other: User) -> bool:
        """Return whether two are certainly not the same; numbers decide where both have one."""
        if self.uid is not None and other.uid is not None:
            return self.uid != other.uid
        return self.name is not None and other.name is not None and self.name != other.name


def user_of(document: Mapping[str, Any]) -> User:
    """Return the user of a job or of a process's owner."""
    uid = document.get("uid")
    return User(text(document.get("user")), uid if isinstance(uid, int) else None)


class SameNameJobs:
    """Processes and events of one job name, by user."""

    def __init__(self, processes: Sequence[StoredProcess], events: Sequence[StoredEvent]) -> None:
        """Keep what has the name.

        Args:
            processes: Those that claim the job.
            events: Those that report it.
        """
        self._processes = processes
        self._events = events

    @property
    def users(self) -> list[User]:
        """The users that may have such a job, the newest first: those that schedulers name, or else the processes'."""
        reported = [(event.time, user_of(event.detail)) for event in self._events]
        seen = [(one.first_seen, _user(one)) for one in self._processes]
        for some in (reported, [one for one in seen if not one[1].is_root], seen):
            ordered = [user for _, user in sorted(some, key=lambda one: one[0], reverse=True)]
            found = _distinct(user for user in ordered if user != User())
            if found:
                return found
        return [User()]

    def of(self, user: User) -> tuple[list[StoredProcess], list[StoredEvent]]:
        """Return the processes and events that are a user's, or may be."""
        return (
            [one for one in self._processes if (owner := _user(one)).is_root or not owner.differs(user)],
            [one for one in self._events if not user_of(one.detail).differs(user)],
        )

    def others(self, user: User, during: tuple[float, float], names: Mapping[int, str]) -> Iterator[str]:
        """Yield sentences about other users' jobs and processes, which the report leaves out.

        Args:
            user: The user whose job is reported.
            during: The time that is reported.
            names: Names of nodes.
        """
        everybody = [_user(one) for one in self._processes] + [user_of(one.detail) for one in self._events]
        others = _distinct(one for one in everybody if one.differs(user) and not one.is_root)
        for other in others[:_MAX_OTHER_USERS]:
            own = [one for one in self._processes if _is_of(_user(one), other, user)]
            events = [one for one in self._events if _is_of(user_of(one.detail), other, user)]
            places = {one.node for one in own} | {one.node for one in events}
            nodes = sorted(
                (names[node] for node in places if node is not None and node in names), key=natural_key
            )
            where = ", ".join(nodes[:_MAX_NAMED_NODES]) + (
                " and more" if len(nodes) > _MAX_NAMED_NODES else ""
            )
            if events:
                first = min([one.time for one in events] + [one.first_seen for one in own])
                yield (
                    f"Left out a job of {other.shown} that has the same name, on {where} since {iso_time.iso(first)}; "
                    "to get its report, ask for another time or node"
                )
            elif any(one.first_seen < during[1] and (one.ended or during[1]) > during[0] for one in own):
                many = f"{len(own)} {'process' if len(own) == 1 else 'processes'}"
                yield f"Ignored {many} of {other.shown} on {where} that claim{'s' if len(own) == 1 else ''} this job's ID"


def _distinct(users: Iterable[User]) -> list[User]:
    found: list[User] = []
    for user in users:
        if all(user.differs(one) for one in found):
            found.append(user)
    return found


def _is_of(user: User, other: User, reported: User) -> bool:
    return user.differs(reported) and not user.differs(other)


def _user(process: StoredProcess) -> User:
    return user_of(owner_of(process))
