"""Which frames of which runs are where: acknowledged, in the spool, given up. Numbers alone, no frames and no disk.

Acknowledgements are cumulative and frames are spooled in order. So what a run still has to bring home are the numbers
after the last one acknowledged, and those of them that neither memory nor the spool holds are the ones given up: they
are computed, never counted along.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable
from math import ceil
from typing import Any, NamedTuple

LATEST_SECONDS = 1.0
"""A frame that nobody has acknowledged is in the spool after so long."""
_MOST_EMPTY_RUNS = 100


class Piece(NamedTuple):
    """Frames of one run that stand one after the other in the spool, record by record."""

    position: int
    run: bytes
    first: int
    count: int  # type: ignore[assignment]  # hides tuple.count, which nobody calls here

    @property
    def last(self) -> int:
        """The last frame's number."""
        return self.first + self.count - 1

    def after(self, sequence: int) -> Piece | None:
        """The part behind a frame, None when there is none."""
        skipped = max(0, sequence + 1 - self.first)
        if skipped >= self.count:
            return None
        return Piece(self.position + skipped, self.run, self.first + skipped, self.count - skipped)


class RunNote(NamedTuple):
    """What is known of one run."""

    id: bytes
    boot: str
    interval_ms: int
    """How often it took a frame, last."""
    ended: bool = False
    """False for a run that goes on, or was killed."""
    acked: int = 0
    last: int = 0
    """The newest frame that is known of; of a run that was killed, the newest in the spool."""
    given_up: int = 0
    """How many of the frames up to `acked` never got to the head."""
    holes: tuple[tuple[int, int], ...] = ()
    """First and last of those after it that never will, because later ones were sent."""

    @property
    def lost_at_most(self) -> int:
        """How many frames a killed run may have taken and not spooled yet."""
        return ceil(LATEST_SECONDS * 1000 / max(1, self.interval_ms)) + 1

    def to_dict(self) -> dict[str, Any]:
        """The note as JSON spells it."""
        return {**self._asdict(), "id": self.id.hex()}

    @classmethod
    def from_dict(cls, document: dict[str, Any]) -> RunNote:
        """Read what `to_dict` made.

        Raises:
            ValueError: It is something else.
        """
        try:
            known = {name: document[name] for name in cls._fields if name in document}
            holes = tuple((int(first), int(last)) for first, last in known.get("holes", ()))
            return cls(**{**known, "id": bytes.fromhex(known["id"]), "holes": holes})
        except (TypeError, ValueError, LookupError) as error:
            raise ValueError(f"it is not a run: {error}") from error


class Ledger:
    """The runs that have something to bring home, oldest first, and what the spool holds of them.

    What is done for every frame or acknowledgement touches the ends of one run's pieces alone, however many there are.
    """

    def __init__(self) -> None:
        self.runs: dict[bytes, RunNote] = {}
        self._held: dict[bytes, deque[Piece]] = {}
        """By run, in order; what was acknowledged is not among them, nor is a run without any."""
        self._counts: dict[bytes, int] = {}
        """How many frames these are."""

    def begin(self, note: RunNote) -> None:
        """A run begins; older ones without a frame are forgotten when there are far too many."""
        self.runs[note.id] = note
        if len(self.runs) - len(self._held) <= _MOST_EMPTY_RUNS:
            return
        empty = [run for run in self.runs if run not in self._held and run != note.id]
        for run in empty[:-_MOST_EMPTY_RUNS]:
            del self.runs[run]

    def forget(self, run: bytes) -> None:
        """A run has nothing left to bring home."""
        self.runs.pop(run, None)
        self._hold(run, deque())

    def adopt(self, earlier: Ledger, present: bytes) -> None:
        """Take over the runs before this one; to do so again changes nothing."""
        own = self.runs.pop(present)
        self.runs = {run: note for run, note in earlier.runs.items() if run != present} | self.runs
        for run, pieces in earlier._held.items():
            if run != present:
                left = (piece.after(self.runs[run].acked) for piece in pieces)
                self._hold(run, deque(piece for piece in left if piece is not None))
        self.begin(own)

    @property
    def pieces(self) -> list[Piece]:
        """What the spool holds, by position."""
        return sorted(piece for pieces in self._held.values() for piece in pieces)

    def spooled(self, position: int, run: bytes, first: int, count: int = 1) -> None:
        """Frames were written to the spool, at this position and those after it."""
        note = self.runs.get(run)
        if note is None:
            return
        if first + count - 1 > note.last:
            self.runs[run] = note._replace(last=first + count - 1)
        new = Piece(position, run, first, count).after(note.acked)
        if new is None:
            return
        pieces = self._held.setdefault(run, deque())
        self._counts[run] = self._counts.get(run, 0) + new.count
        if pieces:
            end = pieces[-1]
            if (end.first + end.count, end.position + end.count) == (new.first, new.position):
                pieces[-1] = end._replace(count=end.count + new.count)
                return
        pieces.append(new)

    def spooled_to(self, run: bytes) -> int:
        """The newest frame of a run in the spool, 0 when there is none."""
        pieces = self._held.get(run)
        return pieces[-1].last if pieces else 0

    def acknowledge(self, run: bytes, sequence: int) -> None:
        """The head has everything of a run up to a frame."""
        note = self.runs.get(run)
        if note is None or sequence <= note.acked:
            return
        self.runs[run] = note._replace(
            acked=sequence,
            last=max(note.last, sequence),
            given_up=note.given_up
            + sum(max(0, min(last, sequence) + 1 - first) for first, last in note.holes),
            holes=_after(note.holes, sequence),
        )
        pieces = self._held.get(run)
        while pieces and pieces[0].first <= sequence:
            self._shorten(run, pieces, pieces[0].after(sequence))

    def _shorten(self, run: bytes, pieces: deque[Piece], left: Piece | None) -> None:
        """Of the first piece only this is left."""
        gone = pieces.popleft()
        self._counts[run] -= gone.count
        if left is not None:
            pieces.appendleft(left)
            self._counts[run] += left.count
        if not pieces:
            del self._held[run], self._counts[run]

    def _hold(self, run: bytes, pieces: deque[Piece]) -> None:
        """These are the pieces of a run."""
        self._held.pop(run, None)
        self._counts.pop(run, None)
        if pieces:
            self._held[run], self._counts[run] = pieces, sum(piece.count for piece in pieces)

    def dropped_before(self, position: int) -> bool:
        """The spool has nothing before a position any more; whether anything unacknowledged was there."""
        dropped = False
        for run, pieces in list(self._held.items()):
            while pieces and pieces[0].position < position:
                piece = pieces[0]
                self._shorten(run, pieces, piece.after(piece.first + (position - piece.position) - 1))
                dropped = True
        return dropped

    def cut_after(self, position: int) -> None:
        """The spool has nothing after a position any more."""
        for run, pieces in list(self._held.items()):
            if pieces[-1].position + pieces[-1].count - 1 <= position:
                continue
            kept = (
                piece._replace(count=min(piece.count, position + 1 - piece.position))
                for piece in pieces
                if piece.position <= position
            )
            self._hold(run, deque(kept))

    def give_up(self, lost: Piece) -> None:
        """The spool does not hold these, after all."""
        left: deque[Piece] = deque()
        for piece in self._held.get(lost.run, ()):
            if piece.last < lost.first or piece.first > lost.last:
                left.append(piece)
                continue
            if piece.first < lost.first:
                left.append(piece._replace(count=lost.first - piece.first))
            if rest := piece.after(lost.last):
                left.append(rest)
        self._hold(lost.run, left)

    def find(self, run: bytes, after: int) -> Piece | None:
        """The oldest frames of a run in the spool behind a frame."""
        pieces = self._held.get(run)
        if not pieces or pieces[-1].last <= after:
            return None
        return pieces[bisect_right(pieces, after, key=lambda piece: piece.last)].after(after)

    def needed_from(self) -> int | None:
        """The oldest position in the spool that is still needed, None when none is."""
        return min((pieces[0].position for pieces in self._held.values()), default=None)

    def pass_over(self, run: bytes, sent: int, first: int) -> None:
        """After one frame another one is sent that is not the next: those between are given up for good."""
        note = self.runs.get(run)
        if note is None:
            return
        begin = max(sent, note.acked) + 1
        if first > begin:
            self.runs[run] = note._replace(holes=_merged([*note.holes, (begin, first - 1)]))

    def dropped(self, run: bytes, memory_first: int | None = None, sent: int = 0) -> int:
        """How many frames of a run were given up.

        Args:
            run: The run.
            memory_first: From which frame on memory holds them all; None when it holds none.
            sent: Up to which frame they are on their way to the head: these need not be held any more.
        """
        note = self.runs.get(run)
        if note is None:
            return 0
        gone = max(note.acked, sent)
        end = note.last if memory_first is None else memory_first - 1
        held = self._counts.get(run, 0)
        pieces = self._held.get(run, ())
        for piece in pieces:  # of those on their way, which are the first
            if piece.first > gone:
                break
            held -= min(piece.last, gone) + 1 - piece.first
        for piece in reversed(pieces):  # of those that memory holds, which are the last
            if piece.last <= end:
                break
            held -= max(0, piece.last - max(end, piece.first - 1, gone))
        passed = sum(max(0, min(last, gone) + 1 - first) for first, last in note.holes)
        return max(0, note.given_up + passed + max(0, end - gone) - held)

    def first_kept(self, run: bytes, memory_first: int | None = None) -> int | None:
        """The oldest frame of a run that can still be sent, None when there is none."""
        note = self.runs.get(run)
        if note is None:
            return None
        piece = self.find(run, note.acked)
        firsts = [piece.first] if piece else []
        if memory_first is not None:
            firsts.append(memory_first)
        return min(firsts, default=None)


def _after(holes: Iterable[tuple[int, int]], sequence: int) -> tuple[tuple[int, int], ...]:
    return tuple((max(first, sequence + 1), last) for first, last in holes if last > sequence)


def _merged(holes: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    joined: list[tuple[int, int]] = []
    for first, last in sorted(holes):
        if joined and first <= joined[-1][1] + 1:
            joined[-1] = (joined[-1][0], max(last, joined[-1][1]))
        else:
            joined.append((first, last))
    return tuple(joined)
