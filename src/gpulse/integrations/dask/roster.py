"""The workers of a cluster in the order in which they first joined, and what each has measured."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from gpulse.integrations.dask.record import Record
from gpulse.integrations.dask.status import WorkerStatus

_MOST_TROUBLES = 50


class Member:
    """One worker, which may have left and come back."""

    def __init__(self, index: int, address: str, name: str, record: Record) -> None:
        self.index = index
        self.address = address
        self.name = name
        self.record = record
        self.host = ""
        self.pid: int | None = None
        self.gpus: tuple[str, ...] = ()
        self.here = True
        self.joined = False
        """Whether it has said that it can be monitored."""
        self.troubles: list[str] = []
        self._life = ""
        self._number = 0

    def is_new(self, life: str, number: int) -> bool:
        """Whether a batch was not taken before: one whose answer was lost on the way comes again."""
        if (life, number) == (self._life, self._number):
            return False
        self._life, self._number = life, number
        return True

    def complain(self, troubles: Iterable[str]) -> None:
        """Remember what could not be measured, each thing once."""
        for trouble in troubles:
            if trouble not in self.troubles and len(self.troubles) < _MOST_TROUBLES:
                self.troubles.append(trouble)

    def status(self) -> WorkerStatus:
        """How it stands."""
        dumping = () if self.record.trouble is None else (self.record.trouble,)
        return WorkerStatus(
            self.index,
            self.address,
            self.name,
            self.host,
            self.pid,
            self.gpus,
            self.here,
            self.record.measurements,
            self.record.last,
            (*self.troubles, *dumping),
        )


class Roster:
    """All workers that ever were there."""

    def __init__(self, begin: Callable[[int], Record]) -> None:
        """Begin without any.

        Args:
            begin: Makes the record of the worker with an index.
        """
        self._begin = begin
        self.members: list[Member] = []

    def arrived(self, address: str, name: object) -> Member:
        """A worker is there: one that was known by its address, or by a name of its own, is the same one."""
        known = self.at(address) or self._namesake(address, str(name))
        if known is None:
            known = Member(len(self.members), address, str(name), self._begin(len(self.members)))
            self.members.append(known)
        known.address, known.name, known.here, known.joined = address, str(name), True, False
        return known

    def left(self, address: str) -> Member | None:
        """A worker is gone; its record stays."""
        member = self.at(address)
        if member is not None:
            member.here = member.joined = False
        return member

    def at(self, address: str) -> Member | None:
        """The worker at an address, whether it is still there or not."""
        return next((member for member in self.members if member.address == address), None)

    def present(self) -> list[Member]:
        """Those that are there and can be monitored."""
        return [member for member in self.members if member.here and member.joined]

    def speakers(self) -> dict[str, Member]:
        """The first worker of each host, which speaks to a head for its machine."""
        first: dict[str, Member] = {}
        for member in self.present():
            first.setdefault(member.host, member)
        return first

    def close(self) -> None:
        """Forget the records."""
        for member in self.members:
            member.record.close()

    def _namesake(self, address: str, name: str) -> Member | None:
        """A worker that left and whose name somebody gave it: by itself dask calls workers by their address."""
        if name == address:
            return None
        return next((member for member in self.members if member.name == name and not member.here), None)
