"""Index of the frames of all runs: which are acknowledged, in the spool, or lost. Numbers only, no frames and no I/O.

Acknowledgements are cumulative and frames are spooled in order. So the frames that a run still has to send are those
after the last acknowledged number, and those of them that neither memory nor the spool holds are lost. The number of
lost frames is computed from this, not counted.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Mapping
from math import ceil
from typing import Any, NamedTuple

from gpulse.model.intervals import merge

MAX_SPOOL_DELAY_SECONDS = 1.0
"""An unacknowledged frame is in the spool after this long."""
MAX_SYNC_DELAY_SECONDS = 10.0
"""A frame in the spool is on disk after this long, so that it survives a power cut."""
DEFAULT_INTERVAL_MS = 1000
_MAX_EMPTY_RUNS = 100


class SpoolRange(NamedTuple):
    """Consecutive frames of one run in consecutive records of the spool."""

    position: int
    run: bytes
    first: int
    count: int  # type: ignore[assignment]  # hides tuple.count, which is not used here

    @property
    def last(self) -> int:
        """Number of the last frame."""
        return self.first + self.count - 1

    def after(self, sequence: int) -> SpoolRange | None:
        """Return the part after a frame; None if there is none."""
        skipped = max(0, sequence + 1 - self.first)
        if skipped >= self.count:
            return None
        return SpoolRange(self.position + skipped, self.run, self.first + skipped, self.count - skipped)


class DamagedRange(NamedTuple):
    """Frames of a run that a damaged part of the spool held."""

    first: int
    """0 if it is unknown which frames."""
    last: int
    """Less than `first` if it held no frames of the run."""
    start_us: int = 0
    """Time of the frame before it; 0 if unknown."""
    end_us: int = 0
    """Time of the frame after it; 0 if unknown."""


class AgentRunState(NamedTuple):
    """State of one run of the agent."""

    id: bytes
    boot: str
    interval_ms: int
    """Its latest sampling interval."""
    ended: bool = False
    """False for a run that continues or was killed."""
    acked: int = 0
    last: int = 0
    """Number of its newest frame; for a killed run, of the newest in the spool."""
    given_up: int = 0
    """How many frames up to `acked` were lost."""
    holes: tuple[tuple[int, int], ...] = ()
    """First and last number of each range after `acked` that is lost because later frames were sent."""
    alive_us: int = 0
    """When the run last wrote to the spool, on the monotonic clock; 0 if unknown."""
    lost_at_most: int | None = None
    """How many frames after `last` a killed run may have sampled; None if the run was not killed."""
    other_head_last: int = 0
    """Frames up to this number were acknowledged by other heads than the last one."""
    damaged: tuple[DamagedRange, ...] = ()

    def bound_losses(self, boot: str, taken: int | None, now_us: int) -> int:
        """Return how many frames a killed run may have sampled without writing them to the spool.

        Args:
            boot: ID of this boot of the machine.
            taken: The newest frame that the run sampled; None if unknown.
            now_us: Time on the monotonic clock.
        """
        stored = max(self.last, self.acked)
        if not self.boot or self.boot != boot:  # a power cut also loses what was not synced
            seconds = MAX_SPOOL_DELAY_SECONDS + MAX_SYNC_DELAY_SECONDS
        elif taken is not None:
            return max(0, taken - stored)
        else:
            seconds = max(MAX_SPOOL_DELAY_SECONDS, (now_us - self.alive_us) / 1e6 if self.alive_us else 0.0)
            if self.damaged:  # frames that were written just after `alive_us` may be in the damaged part
                seconds += MAX_SPOOL_DELAY_SECONDS
        return max(ceil(seconds * 1000 / max(1, self.interval_ms)) + 1, (taken or 0) - stored)

    def to_dict(self) -> dict[str, Any]:
        """Return the state as a JSON object."""
        return {**self._asdict(), "id": self.id.hex()}

    @classmethod
    def from_dict(cls, document: dict[str, Any]) -> AgentRunState:
        """Return the state in a JSON object that `to_dict` made.

        Raises:
            ValueError: The object is not a run state.
        """
        try:
            known = {name: document[name] for name in cls._fields if name in document}
            holes = tuple((int(first), int(last)) for first, last in known.get("holes", ()))
            damaged = tuple(DamagedRange(*map(int, one)) for one in known.get("damaged", ()))
            return cls(**{**known, "id": bytes.fromhex(known["id"]), "holes": holes, "damaged": damaged})
        except (TypeError, ValueError, LookupError) as error:
            raise ValueError(f"invalid run state: {error}") from error


class RunIndex:
    """Runs with frames to send, oldest first, and the ranges of the spool that hold these frames.

    The work per frame or acknowledgement touches only the ends of one run's ranges, however many there are.
    """

    def __init__(self) -> None:
        self.runs: dict[bytes, AgentRunState] = {}
        self._held: dict[bytes, deque[SpoolRange]] = {}
        """Unacknowledged ranges by run, in order; runs without any are left out."""
        self._counts: dict[bytes, int] = {}
        """Number of frames in these ranges, by run."""

    def begin(self, note: AgentRunState) -> None:
        """Add a run; forget the oldest runs without frames if there are far too many."""
        self.runs[note.id] = note
        if len(self.runs) - len(self._held) <= _MAX_EMPTY_RUNS:
            return
        empty = [run for run in self.runs if run not in self._held and run != note.id]
        for run in empty[:-_MAX_EMPTY_RUNS]:
            del self.runs[run]

    def forget(self, run: bytes) -> None:
        """Remove a run that has no frames left to send."""
        self.runs.pop(run, None)
        self._hold(run, deque())

    def bound_losses(self, boot: str, taken: Mapping[bytes, int], now_us: int) -> None:
        """Compute how many frames the killed runs may have lost.

        Args:
            boot: ID of this boot of the machine.
            taken: The newest frames that runs of this boot sampled, as far as they are known.
            now_us: Time on the monotonic clock.
        """
        for run in taken.keys() - self.runs.keys():  # the spool has lost it
            self.begin(AgentRunState(run, boot, DEFAULT_INTERVAL_MS))
        for run, note in list(self.runs.items()):
            if not note.ended and note.lost_at_most is None:
                lost = note.bound_losses(boot, taken.get(run), now_us)
                self.runs[run] = note._replace(lost_at_most=lost)

    def adopt(self, earlier: RunIndex, present: bytes) -> None:
        """Take over the runs before the present one; idempotent."""
        own = self.runs.pop(present)
        self.runs = {run: note for run, note in earlier.runs.items() if run != present} | self.runs
        for run, pieces in earlier._held.items():
            if run != present:
                left = (piece.after(self.runs[run].acked) for piece in pieces)
                self._hold(run, deque(piece for piece in left if piece is not None))
        self.begin(own)

    @property
    def pieces(self) -> list[SpoolRange]:
        """All ranges of the spool, by position."""
        return sorted(piece for pieces in self._held.values() for piece in pieces)

    def spooled(self, position: int, run: bytes, first: int, count: int = 1) -> None:
        """Record that frames were written to the spool, starting at a position."""
        note = self.runs.get(run)
        if note is None:
            return
        if first + count - 1 > note.last:
            self.runs[run] = note._replace(last=first + count - 1)
        new = SpoolRange(position, run, first, count).after(note.acked)
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
        """Return the number of the newest frame of a run in the spool; 0 if there is none."""
        pieces = self._held.get(run)
        return pieces[-1].last if pieces else 0

    def acknowledge(self, run: bytes, sequence: int) -> None:
        """Record that the head has all frames of a run up to a number."""
        note = self.runs.get(run)
        if note is None or sequence <= note.acked:
            return
        self.runs[run] = note._replace(
            acked=sequence,
            last=max(note.last, sequence),
            given_up=note.given_up
            + sum(max(0, min(last, sequence) + 1 - first) for first, last in note.holes),
            holes=_holes_after(note.holes, sequence),
        )
        pieces = self._held.get(run)
        while pieces and pieces[0].first <= sequence:
            self._shorten(run, pieces, pieces[0].after(sequence))

    def _shorten(self, run: bytes, pieces: deque[SpoolRange], left: SpoolRange | None) -> None:
        """Replace the first range with what is left of it."""
        gone = pieces.popleft()
        self._counts[run] -= gone.count
        if left is not None:
            pieces.appendleft(left)
            self._counts[run] += left.count
        if not pieces:
            del self._held[run], self._counts[run]

    def _hold(self, run: bytes, pieces: deque[SpoolRange]) -> None:
        """Replace all ranges of a run."""
        self._held.pop(run, None)
        self._counts.pop(run, None)
        if pieces:
            self._held[run], self._counts[run] = pieces, sum(piece.count for piece in pieces)

    def dropped_before(self, position: int) -> bool:
        """Record that the spool dropped everything before a position; return whether unacknowledged frames were lost."""
        dropped = False
        for run, pieces in list(self._held.items()):
            while pieces and pieces[0].position < position:
                piece = pieces[0]
                self._shorten(run, pieces, piece.after(piece.first + (position - piece.position) - 1))
                dropped = True
        return dropped

    def cut_after(self, position: int) -> None:
        """Record that the spool lost everything after a position."""
        for run, pieces in list(self._held.items()):
            if pieces[-1].position + pieces[-1].count - 1 <= position:
                continue
            kept = (
                piece._replace(count=min(piece.count, position + 1 - piece.position))
                for piece in pieces
                if piece.position <= position
            )
            self._hold(run, deque(kept))

    def give_up(self, lost: SpoolRange) -> None:
        """Record that the spool does not hold a range after all."""
        left: deque[SpoolRange] = deque()
        for piece in self._held.get(lost.run, ()):
            if piece.last < lost.first or piece.first > lost.last:
                left.append(piece)
                continue
            if piece.first < lost.first:
                left.append(piece._replace(count=lost.first - piece.first))
            if rest := piece.after(lost.last):
                left.append(rest)
        self._hold(lost.run, left)

    def find(self, run: bytes, after: int) -> SpoolRange | None:
        """Return the first range of a run in the spool after a frame; None if there is none."""
        pieces = self._held.get(run)
        if not pieces or pieces[-1].last <= after:
            return None
        return pieces[bisect_right(pieces, after, key=lambda piece: piece.last)].after(after)

    def needed_from(self) -> int | None:
        """Return the oldest position in the spool that is still needed; None if none is."""
        return min((pieces[0].position for pieces in self._held.values()), default=None)

    def record_gap(self, run: bytes, sent: int, first: int) -> None:
        """Record that the frames between `sent` and `first` are lost, because `first` is sent next."""
        note = self.runs.get(run)
        if note is None:
            return
        begin = max(sent, note.acked) + 1
        if first > begin:
            self.runs[run] = note._replace(holes=_merge_holes([*note.holes, (begin, first - 1)]))

    def dropped(self, run: bytes, memory_first: int | None = None, sent: int = 0) -> int:
        """Return how many frames of a run are lost.

        Args:
            run: The run.
            memory_first: The first frame in memory, which holds all later ones; None if it holds none.
            sent: The last frame that was sent to the head; frames up to it need not be stored any more.
        """
        note = self.runs.get(run)
        if note is None:
            return 0
        gone = max(note.acked, sent)
        end = note.last if memory_first is None else memory_first - 1
        held = self._counts.get(run, 0)
        pieces = self._held.get(run, ())
        for piece in pieces:  # skip the first ones, which were sent
            if piece.first > gone:
                break
            held -= min(piece.last, gone) + 1 - piece.first
        for piece in reversed(pieces):  # skip the last ones, which memory holds
            if piece.last <= end:
                break
            held -= max(0, piece.last - max(end, piece.first - 1, gone))
        passed = sum(max(0, min(last, gone) + 1 - first) for first, last in note.holes)
        return max(0, note.given_up + passed + max(0, end - gone) - held)

    def first_kept(self, run: bytes, memory_first: int | None = None) -> int | None:
        """Return the oldest frame of a run that can still be sent; None if there is none."""
        note = self.runs.get(run)
        if note is None:
            return None
        piece = self.find(run, note.acked)
        firsts = [piece.first] if piece else []
        if memory_first is not None:
            firsts.append(memory_first)
        return min(firsts, default=None)


def _holes_after(holes: Iterable[tuple[int, int]], sequence: int) -> tuple[tuple[int, int], ...]:
    return tuple((max(first, sequence + 1), last) for first, last in holes if last > sequence)


def _merge_holes(holes: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Return ranges of sequence numbers (last number included), merged."""
    return tuple((first, end - 1) for first, end in merge((first, last + 1) for first, last in holes))
