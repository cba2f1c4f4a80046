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
        self.lost = 0
        """Measurements that it had to give up."""
        self.troubles: list[str] = []
        self.head_trouble: str | None = None
        """Why a head does not get what it streams, as long as that is so."""
        self._numbers: dict[str, int] = {}
        """By life of the worker, the batch that was taken last."""

    def is_new(self, life: str, number: int) -> bool:
        """Whether a batch was not taken before: one whose answer was lost on the way comes again."""
        if number <= self._numbers.get(life, 0):
            return False
        self._numbers[life] = number
        return True

    def complain(self, troubles: Iterable[str]) -> None:
        """Remember what could not be measured, each thing once."""
        for trouble in troubles:
            if trouble not in self.troubles and len(self.troubles) < _MOST_TROUBLES:
                self.troubles.append(trouble)

    def status(self) -> WorkerStatus:
        """How it stands."""
        more = [] if self.record.trouble is None else [self.record.trouble]
        if self.head_trouble is not None:
            more.append(f"head: {self.head_trouble}")
        if self.here and not self.joined:
            more.append("it is not monitored: gpulse is not installed there, or its log says why")
        if self.lost:
            more.append(f"{self.lost} measurements were given up: the scheduler did not take them")
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
            (*self.troubles, *more),
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
        self._at: dict[str, Member] = {}
        self._on: dict[str, list[Member]] | None = None
        """By machine, those that are present; None when that has to be found out anew."""

    def arrived(self, address: str, name: object) -> Member:
        """A worker is there; one that came back is the one it was."""
        called = str(name)
        member = self._returned(address, name)
        if member is None:
            member = Member(len(self.members), address, called, self._begin(len(self.members)))
            self.members.append(member)
        member.address, member.name, member.here, member.joined = address, called, True, False
        self._at[address], self._on = member, None
        return member

    def joined(self, member: Member, host: str, pid: int, gpus: Iterable[str]) -> None:
        """A worker has said who it is, and can be monitored."""
        member.host, member.pid, member.gpus, member.joined = host, pid, tuple(gpus), True
        self._on = None

    def left(self, address: str) -> Member | None:
        """A worker is gone; its record stays."""
        member = self._at.get(address)
        if member is not None:
            member.here = member.joined = False
            self._on = None
        return member

    def at(self, address: str) -> Member | None:
        """The worker that was last at an address, whether it is still there or not."""
        return self._at.get(address)

    def here(self) -> list[Member]:
        """Those that are there."""
        return [member for member in self.members if member.here]

    def present(self) -> list[Member]:
        """Those that are there and can be monitored."""
        return [member for member in self.members if member.here and member.joined]

    def on(self, host: str) -> list[Member]:
        """Those of one machine; the first speaks to a head for it."""
        if self._on is None:
            self._on = {}
            for member in self.present():
                self._on.setdefault(member.host, []).append(member)
        return self._on.get(host, [])

    def speaks(self, member: Member) -> bool:
        """Whether a worker is the first of its machine."""
        return next(iter(self.on(member.host)), None) is member

    def close(self) -> None:
        """Forget the records."""
        for member in self.members:
            member.record.close()

    def _returned(self, address: str, name: object) -> Member | None:
        """The worker that has come back: by a name that somebody gave it, else by its address.

        By itself dask calls workers by their address, or numbers them and uses the numbers again.
        """
        if isinstance(name, str) and name != address:
            for member in self.members:
                if member.name == name and not member.here:
                    return member
        known = self._at.get(address)
        if known is None or known.here:
            return known
        was_named = known.name != known.address and not known.name.isdecimal()
        return None if was_named and str(name) not in (known.name, address) else known
