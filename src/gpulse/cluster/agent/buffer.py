"""The frames that a head has not got for certain: the newest in memory, the others known to be in the spool.

One lock, never held while a disk or a network is waited for, so that sampling waits for neither.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

from gpulse.cluster.agent.ledger import Ledger, Piece, RunNote
from gpulse.cluster.agent.overlap import Kept, Overlap
from gpulse.model.columns import PackedFrame, layout_id

MOST_FRAMES = 10_000
_MOST_BYTES = 8 << 20
"""Frames that are in the spool as well stay in memory up to this much, so that a long outage costs disk alone."""
_LAYOUTS_IN_USE = 64
"""So many layouts were certainly in use lately; older ones stay only for the frames that refer to them."""


__all__ = ["MOST_FRAMES", "Announced", "Buffer", "Kept", "read_notes"]


class Announced(NamedTuple):
    """A run as it is told to a head."""

    note: RunNote
    first_kept: int
    dropped: int
    ended_badly: bool


class Buffer:
    """What this agent has to bring home, of this run and of earlier ones; safe to use from several threads."""

    def __init__(
        self,
        run: bytes,
        boot: str,
        interval_ms: int,
        *,
        most_frames: int = MOST_FRAMES,
        overlap_seconds: float = 0.0,
    ) -> None:
        """Begin a run.

        Args:
            run: Its sixteen random bytes.
            boot: The boot of the machine that its monotonic times are of.
            interval_ms: How often it takes a frame.
            most_frames: So many are kept in memory.
            overlap_seconds: For how long what a head has acknowledged is kept for another one.
        """
        self.run = run
        self._most_frames = most_frames
        self._lock = threading.Lock()
        self._frames: deque[Kept] = deque()
        self._bytes = 0
        self._last = 0
        self._spooled = 0
        """Up to this frame the spool has, or had, all that was not acknowledged."""
        self._texts: dict[int, bytes] = {}
        """Layouts, those used last at the end."""
        self._ledger = Ledger()
        self._ledger.begin(RunNote(run, boot, interval_ms))
        self._overlap = Overlap(overlap_seconds)
        self._head = ""
        self._sent: dict[bytes, int] = {}
        """By run the newest frame that is on its way over the connection there is now."""
        self.changes = 0
        """Grows with everything that the spool's notes should say."""
        self.shift_us: int | None = None
        """What the last head added to the times of frames, None before one did."""
        self.losses = 0
        """Grows whenever frames were given up."""

    def add(self, packed: PackedFrame, texts: Iterable[bytes], taken: float) -> int:
        """Take the next frame of this run; its number.

        Args:
            packed: The frame.
            texts: The layouts that were not in use before it.
            taken: When, on the monotonic clock.
        """
        data = packed.to_bytes()
        layouts = tuple(block.layout for block in packed.blocks)
        offset = packed.time_us - packed.monotonic_us
        with self._lock:
            for text in texts:
                self._texts[layout_id(text)] = text
            for layout in layouts:
                self._texts[layout] = self._texts.pop(layout)
            self._last += 1
            self._frames.append(Kept(self._last, data, layouts, offset, taken))
            self._bytes += len(data)
            self._evict()
            if len(self._texts) > 2 * _LAYOUTS_IN_USE:
                self._forget_layouts()
            note = self._ledger.runs[self.run]
            self._ledger.runs[self.run] = note._replace(last=self._last)
            return self._last

    def _evict(self) -> None:
        while len(self._frames) > self._most_frames or (
            self._bytes > _MOST_BYTES and self._frames[0].sequence <= self._spooled
        ):
            frame = self._pop()
            if frame.sequence > self._spooled:
                self._spooled = frame.sequence  # it will not be, any more
                self.losses += 1
            elif (piece := self._ledger.find(self.run, frame.sequence - 1)) is None or (
                piece.first > frame.sequence
            ):
                self.losses += 1

    def _pop(self) -> Kept:
        frame = self._frames.popleft()
        self._bytes -= len(frame.data)
        return frame

    def _forget_layouts(self) -> None:
        used = {layout for frame in self._frames for layout in frame.layouts} | self._overlap.layouts()
        old = list(self._texts)[:-_LAYOUTS_IN_USE]
        for layout in old:
            if layout not in used:
                del self._texts[layout]

    def acknowledge(self, run: bytes, sequence: int, now: float = 0.0) -> None:
        """The head has everything of a run up to a frame; a number that was never given is not believed.

        Args:
            run: The run.
            sequence: The frame's number.
            now: On the monotonic clock.
        """
        with self._lock:
            note = self._ledger.runs.get(run)
            if note is None or sequence <= note.acked or (run == self.run and sequence > self._last):
                return
            self._ledger.acknowledge(run, sequence)
            self.changes += 1
            if run == self.run:
                gone: list[Kept] = []
                while self._frames and self._frames[0].sequence <= sequence:
                    gone.append(self._pop())
                self._overlap.add(run, gone, now)
                self._spooled = max(self._spooled, sequence)

    def remember(self, run: bytes, frames: Sequence[Kept], texts: Mapping[int, bytes], now: float) -> None:
        """A head has acknowledged frames that were read back from the spool: another one may need them, too."""
        with self._lock:
            if run in self._ledger.runs:
                self._overlap.add(run, frames, now, texts)

    def resume(self, durable: Mapping[bytes, int], now: float) -> dict[bytes, int]:
        """Where to begin with a head that has frames of some runs, by run the last one that need not be sent.

        Args:
            durable: By run up to which frame it has them.
            now: On the monotonic clock.
        """
        with self._lock:
            self._overlap.forget(now)
            begin: dict[bytes, int] = {}
            for run, note in self._ledger.runs.items():
                again = self._overlap.first_after(run, durable.get(run, 0))
                begin[run] = note.acked if again is None else min(again - 1, note.acked)
            if any(begin[run] < note.acked for run, note in self._ledger.runs.items()):
                self._overlap.again(now)
            return begin

    def due(self, before: float, most: int) -> tuple[list[Kept], int]:
        """The oldest frames that are not in the spool and were taken before this, and what is acknowledged."""
        with self._lock:
            first = self._memory_first()
            acked = self._ledger.runs[self.run].acked
            if first is None:
                return [], acked
            waiting = islice(self._frames, max(0, self._spooled + 1 - first), None)
            frames: list[Kept] = []
            for frame in waiting:
                if frame.taken > before or len(frames) >= most:
                    break
                frames.append(frame)
            return frames, acked

    def texts(self, layouts: Iterable[int]) -> dict[int, bytes]:
        """The layouts that are known of these."""
        with self._lock:
            wanted = tuple(layouts)
            return self._overlap.texts(wanted) | {
                layout: self._texts[layout] for layout in wanted if layout in self._texts
            }

    def spooled(self, position: int, first: int, count: int) -> None:
        """Frames of this run were written to the spool, at this position and those after it."""
        with self._lock:
            self._ledger.spooled(position, self.run, first, count)
            self._spooled = max(self._spooled, first + count - 1)

    def dropped_before(self, position: int) -> None:
        """The spool has nothing before a position any more."""
        with self._lock:
            if self._ledger.dropped_before(position):
                self.losses += 1

    def cut_after(self, position: int) -> None:
        """The spool has nothing after a position any more; what memory still has of it is to be written again."""
        with self._lock:
            self._ledger.cut_after(position)
            first = self._memory_first()
            self._spooled = max(0 if first is None else first - 1, self._ledger.spooled_to(self.run))
            self.losses += 1

    def adopt(self, ledger: Ledger) -> None:
        """Earlier runs were found in the spool."""
        with self._lock:
            self._ledger.adopt(ledger, self.run)
            self.changes += 1

    def needed_from(self) -> int | None:
        """The oldest position in the spool that is still needed, None when none is."""
        with self._lock:
            return self._ledger.needed_from()

    def runs(self) -> list[Announced]:
        """The runs that have something to bring home or to tell, oldest first, this one last."""
        with self._lock:
            return [self._announced(run) for run in self._ledger.runs]

    def _announced(self, run: bytes) -> Announced:
        note, own = self._ledger.runs[run], run == self.run
        first = self._memory_first() if own else None
        memory_first = self._last + 1 if own and first is None else first
        kept = self._ledger.first_kept(run, memory_first)
        dropped = self._ledger.dropped(run, memory_first, self._sent.get(run, 0))
        return Announced(note, kept or 0, dropped, not own and not note.ended)

    def ready(
        self, run: bytes, sent: int, most_frames: int, most_bytes: int
    ) -> Sequence[Kept] | Piece | None:
        """What comes after a frame: frames from memory, or where the spool has them; None when nothing does."""
        with self._lock:
            note = self._ledger.runs.get(run)
            if note is None:
                return None
            if sent < note.acked and (again := self._overlap.after(run, sent, most_frames, most_bytes)):
                return again
            sent = max(sent, note.acked)
            first = self._memory_first() if run == self.run else None
            if first is not None and first <= sent + 1:
                return self._from_memory(sent + 1 - first, most_frames, most_bytes) or None
            piece = self._ledger.find(run, sent)
            if piece is not None and (first is None or piece.first < first):
                return piece if first is None else piece._replace(count=min(piece.count, first - piece.first))
            return None if first is None else self._from_memory(0, most_frames, most_bytes)

    def _from_memory(self, begin: int, most_frames: int, most_bytes: int) -> list[Kept]:
        frames: list[Kept] = []
        size = 0
        for frame in islice(self._frames, begin, begin + most_frames):
            size += len(frame.data)
            if frames and size > most_bytes:
                break
            frames.append(frame)
        return frames

    def sent(self, run: bytes, sequence: int) -> None:
        """Frames of a run up to this one are on their way to the head."""
        with self._lock:
            self._sent[run] = sequence

    def disconnected(self) -> None:
        """What was on its way may never come to the head."""
        with self._lock:
            self._sent.clear()

    def pass_over(self, run: bytes, sent: int, first: int) -> None:
        """Frames between these two cannot be sent any more."""
        with self._lock:
            self._ledger.pass_over(run, sent, first)
            self.changes += 1

    def give_up(self, piece: Piece) -> None:
        """What the spool should hold there cannot be read."""
        with self._lock:
            self._ledger.give_up(piece)
            self.losses += 1

    def settle(self, told: Iterable[bytes]) -> int:
        """Forget those of these earlier runs that have nothing left to bring home, all about them being known.

        Returns:
            How many they were.
        """
        settled = 0
        with self._lock:
            for run in told:
                note = self._ledger.runs.get(run)
                if note is None or run == self.run or self._overlap.has(run):
                    continue
                if self._ledger.find(run, 0) is None:
                    self._ledger.forget(run)
                    self.changes += 1
                    settled += 1
        return settled

    def set_interval(self, interval_ms: int) -> bool:
        """This run takes frames at this pace from now on; whether it is another one."""
        with self._lock:
            note = self._ledger.runs[self.run]
            if note.interval_ms == interval_ms:
                return False
            self._ledger.runs[self.run] = note._replace(interval_ms=interval_ms)
            self.changes += 1
            return True

    def end(self) -> None:
        """This run ends as it should."""
        with self._lock:
            self._ledger.runs[self.run] = self._ledger.runs[self.run]._replace(ended=True)
            self.changes += 1

    def notes(self) -> bytes:
        """What the spool is to say about all runs."""
        with self._lock:
            runs = dict(self._ledger.runs)
            own = runs[self.run]
            # Frames that are in memory alone do not outlive a kill: what becomes of them is not known here.
            runs[self.run] = own._replace(last=max(self._spooled, own.acked))
            document = {"runs": [note.to_dict() for note in runs.values()], "head": self._head}
        return json.dumps(document, separators=(",", ":")).encode()

    @property
    def head(self) -> str:
        """Which store it was that this agent last spoke to."""
        return self._head

    @head.setter
    def head(self, value: str) -> None:
        if value != self._head:
            self._head = value
            self.changes += 1

    @property
    def serves_several(self) -> bool:
        """Whether there may be another head that needs what one has acknowledged."""
        return self._overlap.keep_seconds > 0.0

    @property
    def last(self) -> int:
        """The newest frame of this run."""
        return self._last

    @property
    def acked(self) -> int:
        """The newest frame of this run that the head is certain to have."""
        with self._lock:
            return self._ledger.runs[self.run].acked

    @property
    def dropped(self) -> int:
        """How many frames were given up, of all runs."""
        return sum(run.dropped for run in self.runs())

    def _memory_first(self) -> int | None:
        return self._frames[0].sequence if self._frames else None


def read_notes(text: bytes) -> tuple[Mapping[bytes, RunNote], str]:
    """The runs and the store that a spool's notes name.

    Raises:
        ValueError: They are no notes.
    """
    document: Any = json.loads(text)
    try:
        runs = [RunNote.from_dict(raw) for raw in document["runs"]]
        return {run.id: run for run in runs}, str(document.get("head", ""))
    except (TypeError, LookupError, AttributeError) as error:
        raise ValueError(f"they are no notes: {error}") from error
