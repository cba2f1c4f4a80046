"""Frames that no head has acknowledged: the newest in memory, the others in the spool.

The one lock is never held during disk or network I/O, so that sampling waits for neither.
"""

from __future__ import annotations

import json
import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

from gpulse.cluster.agent.run_index import AgentRunState, DamagedRange, RunIndex, SpoolRange
from gpulse.model.packed_columns import PackedFrame, layout_id

RESEND_SECONDS = 120.0
_MAX_RESEND_BYTES = 16 << 20


class BufferedFrame(NamedTuple):
    """A packed frame that is to be sent."""

    sequence: int
    data: bytes
    layouts: tuple[int, ...]
    offset_us: int
    """Wall clock minus monotonic clock."""
    taken: float = 0.0
    """Time of the sample on the monotonic clock."""


class _Acknowledgement(NamedTuple):
    time: float
    run: bytes
    frames: int
    size: int


class ResendBuffer:
    """Recently acknowledged frames by run, in order, for a second head that may lack them."""

    def __init__(self, keep_seconds: float = 0.0, max_bytes: int = _MAX_RESEND_BYTES) -> None:
        """Start empty.

        Args:
            keep_seconds: How long a frame is kept after its acknowledgement; 0 keeps none.
            max_bytes: The oldest frames are dropped beyond this size.
        """
        self.keep_seconds = keep_seconds
        self._max_bytes = max_bytes
        self._frames: dict[bytes, deque[BufferedFrame]] = {}
        self._acknowledged: deque[_Acknowledgement] = deque()
        """Acknowledgements, oldest first."""
        self._bytes = 0
        self._texts: dict[int, bytes] = {}
        """Layouts of frames that were read from the spool."""

    def add(
        self,
        run: bytes,
        frames: Iterable[BufferedFrame],
        now: float,
        texts: Mapping[int, bytes] | None = None,
    ) -> None:
        """Add acknowledged frames of a run; frames that are here already are ignored.

        Args:
            run: The run.
            frames: The frames in order.
            now: Time on the monotonic clock.
            texts: Their layouts, where nothing else keeps them.
        """
        if self.keep_seconds <= 0.0:
            return
        kept = self._frames.get(run)
        newest = kept[-1].sequence if kept else 0
        new = [frame for frame in frames if frame.sequence > newest]
        if new:
            self._frames.setdefault(run, deque()).extend(new)
            size = sum(len(frame.data) for frame in new)
            self._acknowledged.append(_Acknowledgement(now, run, len(new), size))
            self._bytes += size
            for frame in new if texts else ():
                self._texts |= {
                    layout: texts[layout] for layout in frame.layouts if texts and layout in texts
                }
        self.forget(now)

    def forget(self, now: float) -> None:
        """Drop frames that were acknowledged too long ago, and the oldest ones beyond the size limit."""
        while self._acknowledged and (
            self._acknowledged[0].time < now - self.keep_seconds or self._bytes > self._max_bytes
        ):
            acknowledged = self._acknowledged.popleft()
            frames = self._frames[acknowledged.run]
            for _ in range(acknowledged.frames):
                frames.popleft()
            if not frames:
                del self._frames[acknowledged.run]
            self._bytes -= acknowledged.size
            if not self._acknowledged:
                self._texts.clear()

    def again(self, now: float) -> None:
        """Restart the retention of all frames: the head that gets them now may fail, too."""
        self._acknowledged = deque(acknowledged._replace(time=now) for acknowledged in self._acknowledged)

    def has(self, run: bytes) -> bool:
        """Return whether there are frames of a run."""
        return run in self._frames

    def first_after(self, run: bytes, sequence: int) -> int | None:
        """Return the number of the first frame of a run after another one; None if there is none."""
        frames = self._frames.get(run)
        if not frames or frames[-1].sequence <= sequence:
            return None
        return frames[bisect_right(frames, sequence, key=lambda frame: frame.sequence)].sequence

    def after(self, run: bytes, sequence: int, max_frames: int, max_bytes: int) -> list[BufferedFrame]:
        """Return consecutive frames of a run after a given one, within the limits."""
        kept = self._frames.get(run, deque())
        begin = bisect_right(kept, sequence, key=lambda frame: frame.sequence)
        frames: list[BufferedFrame] = []
        size = 0
        for frame in islice(kept, begin, begin + max_frames):
            size += len(frame.data)
            if frames and (size > max_bytes or frame.sequence != frames[-1].sequence + 1):
                break
            frames.append(frame)
        return frames

    def layouts(self) -> set[int]:
        """Return the layouts that the frames refer to."""
        return {layout for frames in self._frames.values() for frame in frames for layout in frame.layouts}

    def texts(self, layouts: Iterable[int]) -> dict[int, bytes]:
        """Return the texts of those layouts that are stored here."""
        return {layout: self._texts[layout] for layout in layouts if layout in self._texts}


MAX_MEMORY_FRAMES = 10_000
_MAX_MEMORY_BYTES = 8 << 20
"""Frames that are also in the spool are kept in memory up to this size, so that a long outage costs disk space only."""
_MIN_KEPT_LAYOUTS = 64
"""This many layouts are always kept; older ones only while frames refer to them."""


__all__ = ["MAX_MEMORY_FRAMES", "AnnouncedRun", "BufferedFrame", "FrameBuffer", "parse_run_states"]


class AnnouncedRun(NamedTuple):
    """A run as the hello message announces it."""

    note: AgentRunState
    first_kept: int
    dropped: int
    ended_badly: bool
    lost_at_most: int = 0
    """How many frames of a killed run may be lost, besides the dropped ones."""


class FrameBuffer:
    """The unacknowledged frames of this run and of earlier ones; thread-safe."""

    def __init__(
        self,
        run: bytes,
        boot: str,
        interval_ms: int,
        *,
        max_frames: int = MAX_MEMORY_FRAMES,
        resend_seconds: float = 0.0,
    ) -> None:
        """Start a run.

        Args:
            run: ID of the run, 16 random bytes.
            boot: ID of the boot that its monotonic times belong to.
            interval_ms: Sampling interval.
            max_frames: Maximum number of frames in memory.
            resend_seconds: How long acknowledged frames are kept for another head.
        """
        self.run = run
        self._max_frames = max_frames
        self._lock = threading.Lock()
        self._frames: deque[BufferedFrame] = deque()
        self._bytes = 0
        self._last = 0
        self._spooled = 0
        """Unacknowledged frames up to this number were written to the spool."""
        self._texts: dict[int, bytes] = {}
        """Layouts, most recently used last."""
        self._run_index = RunIndex()
        self._run_index.begin(AgentRunState(run, boot, interval_ms))
        self._resend_buffer = ResendBuffer(resend_seconds)
        self._head = ""
        self._sent: dict[bytes, int] = {}
        """Newest frame sent over the current connection, by run."""
        self.changes = 0
        """Grows with every change of the run states in the spool."""
        self.shift_us: int | None = None
        """Clock shift that the last head added to frame times; None until a head reports one."""
        self.losses = 0
        """Grows whenever frames are lost."""
        self.count_taken: Callable[[int], None] = lambda _: None
        """Called with the number of every frame, in the thread that adds it."""

    def add(self, packed: PackedFrame, texts: Iterable[bytes], taken: float) -> int:
        """Add the next frame of this run and return its number.

        Args:
            packed: The frame.
            texts: Layouts that this frame is the first to use.
            taken: Time of the sample on the monotonic clock.
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
            self._frames.append(BufferedFrame(self._last, data, layouts, offset, taken))
            self._bytes += len(data)
            self._evict()
            if len(self._texts) > 2 * _MIN_KEPT_LAYOUTS:
                self._forget_layouts()
            note = self._run_index.runs[self.run]
            self._run_index.runs[self.run] = note._replace(last=self._last)
            number = self._last
        self.count_taken(number)
        return number

    def _evict(self) -> None:
        while len(self._frames) > self._max_frames or (
            self._bytes > _MAX_MEMORY_BYTES and self._frames[0].sequence <= self._spooled
        ):
            frame = self._pop()
            if frame.sequence > self._spooled:
                self._spooled = frame.sequence  # lost: it will not be written any more
                self.losses += 1
            elif (piece := self._run_index.find(self.run, frame.sequence - 1)) is None or (
                piece.first > frame.sequence
            ):
                self.losses += 1

    def _pop(self) -> BufferedFrame:
        frame = self._frames.popleft()
        self._bytes -= len(frame.data)
        return frame

    def _forget_layouts(self) -> None:
        used = {layout for frame in self._frames for layout in frame.layouts} | self._resend_buffer.layouts()
        old = list(self._texts)[:-_MIN_KEPT_LAYOUTS]
        for layout in old:
            if layout not in used:
                del self._texts[layout]

    def acknowledge(self, run: bytes, sequence: int, now: float = 0.0) -> None:
        """Drop the frames of a run up to a number that the head acknowledged; numbers never sent are ignored.

        Args:
            run: The run.
            sequence: Number of the last acknowledged frame.
            now: Time on the monotonic clock.
        """
        with self._lock:
            note = self._run_index.runs.get(run)
            if note is None or sequence <= note.acked or (run == self.run and sequence > self._last):
                return
            self._run_index.acknowledge(run, sequence)
            self.changes += 1
            if run == self.run:
                gone: list[BufferedFrame] = []
                while self._frames and self._frames[0].sequence <= sequence:
                    gone.append(self._pop())
                self._resend_buffer.add(run, gone, now)
                self._spooled = max(self._spooled, sequence)

    def remember(
        self, run: bytes, frames: Sequence[BufferedFrame], texts: Mapping[int, bytes], now: float
    ) -> None:
        """Keep acknowledged frames that were read from the spool: another head may need them, too."""
        with self._lock:
            if run in self._run_index.runs:
                self._resend_buffer.add(run, frames, now, texts)

    def resume(self, durable: Mapping[bytes, int], now: float) -> dict[bytes, int]:
        """Return, by run, the last frame that need not be sent to a newly connected head.

        Args:
            durable: The newest frame that this head has, by run.
            now: Time on the monotonic clock.
        """
        with self._lock:
            self._resend_buffer.forget(now)
            begin: dict[bytes, int] = {}
            for run, note in self._run_index.runs.items():
                again = self._resend_buffer.first_after(run, durable.get(run, 0))
                begin[run] = note.acked if again is None else min(again - 1, note.acked)
            if any(begin[run] < note.acked for run, note in self._run_index.runs.items()):
                self._resend_buffer.again(now)
            return begin

    def due(self, before: float, most: int) -> tuple[list[BufferedFrame], int]:
        """Return the oldest unspooled frames taken before a time, and the last acknowledged number."""
        with self._lock:
            first = self._memory_first()
            acked = self._run_index.runs[self.run].acked
            if first is None:
                return [], acked
            waiting = islice(self._frames, max(0, self._spooled + 1 - first), None)
            frames: list[BufferedFrame] = []
            for frame in waiting:
                if frame.taken > before or len(frames) >= most:
                    break
                frames.append(frame)
            return frames, acked

    def oldest_unspooled(self) -> float | None:
        """Return when the oldest unspooled frame was taken, on the monotonic clock; None if there is none."""
        with self._lock:
            first = self._memory_first()
            place = 0 if first is None else max(0, self._spooled + 1 - first)
            return self._frames[place].taken if place < len(self._frames) else None

    def texts(self, layouts: Iterable[int]) -> dict[int, bytes]:
        """Return the texts of those layouts that are in memory."""
        with self._lock:
            wanted = tuple(layouts)
            return self._resend_buffer.texts(wanted) | {
                layout: self._texts[layout] for layout in wanted if layout in self._texts
            }

    def spooled(self, position: int, first: int, count: int) -> None:
        """Record that frames of this run were written to the spool, starting at a position."""
        with self._lock:
            self._run_index.spooled(position, self.run, first, count)
            self._spooled = max(self._spooled, first + count - 1)

    def dropped_before(self, position: int) -> None:
        """Record that the spool dropped everything before a position."""
        with self._lock:
            if self._run_index.dropped_before(position):
                self.losses += 1

    def cut_after(self, position: int) -> None:
        """Record that the spool lost everything after a position; frames still in memory are written again."""
        with self._lock:
            self._run_index.cut_after(position)
            first = self._memory_first()
            self._spooled = max(0 if first is None else first - 1, self._run_index.spooled_to(self.run))
            self.losses += 1

    def adopt(self, run_index: RunIndex, taken: Mapping[bytes, int] | None = None, now_us: int = 0) -> None:
        """Take over the earlier runs that were found in the spool.

        Args:
            run_index: The runs.
            taken: The newest frames that earlier runs of this boot sampled, as far as they are known.
            now_us: Time on the monotonic clock.
        """
        with self._lock:
            own = self._run_index.runs[self.run]
            earlier = {run: last for run, last in (taken or {}).items() if run != self.run}
            run_index.bound_losses(own.boot, earlier, now_us)
            self._run_index.adopt(run_index, self.run)
            self.changes += 1

    def damaged(self, damage: DamagedRange) -> None:
        """Record damage of the spool that cannot be assigned to an earlier run."""
        with self._lock:
            own = self._run_index.runs[self.run]
            self._run_index.runs[self.run] = own._replace(damaged=(*own.damaged, damage))
            self.changes += 1

    def needed_from(self) -> int | None:
        """Return the oldest position in the spool that is still needed; None if none is."""
        with self._lock:
            return self._run_index.needed_from()

    def runs(self) -> list[AnnouncedRun]:
        """Return the runs that the head must know of, oldest first, this run last."""
        with self._lock:
            return [self._announced(run) for run in self._run_index.runs]

    def _announced(self, run: bytes) -> AnnouncedRun:
        note, own = self._run_index.runs[run], run == self.run
        first = self._memory_first() if own else None
        memory_first = self._last + 1 if own and first is None else first
        kept = self._run_index.first_kept(run, memory_first)
        dropped = self._run_index.dropped(run, memory_first, self._sent.get(run, 0))
        ended_badly = not own and not note.ended
        return AnnouncedRun(note, kept or 0, dropped, ended_badly, note.lost_at_most or 0)

    def ready(
        self, run: bytes, sent: int, max_frames: int, max_bytes: int
    ) -> Sequence[BufferedFrame] | SpoolRange | None:
        """Return the frames after a number, or their range in the spool; None if there are none."""
        with self._lock:
            note = self._run_index.runs.get(run)
            if note is None:
                return None
            if sent < note.acked and (again := self._resend_buffer.after(run, sent, max_frames, max_bytes)):
                return again
            sent = max(sent, note.acked)
            first = self._memory_first() if run == self.run else None
            if first is not None and first <= sent + 1:
                return self._from_memory(sent + 1 - first, max_frames, max_bytes) or None
            piece = self._run_index.find(run, sent)
            if piece is not None and (first is None or piece.first < first):
                return piece if first is None else piece._replace(count=min(piece.count, first - piece.first))
            return None if first is None else self._from_memory(0, max_frames, max_bytes)

    def _from_memory(self, begin: int, max_frames: int, max_bytes: int) -> list[BufferedFrame]:
        frames: list[BufferedFrame] = []
        size = 0
        for frame in islice(self._frames, begin, begin + max_frames):
            size += len(frame.data)
            if frames and size > max_bytes:
                break
            frames.append(frame)
        return frames

    def sent(self, run: bytes, sequence: int) -> None:
        """Record that the frames of a run up to a number were sent."""
        with self._lock:
            self._sent[run] = sequence

    def disconnected(self) -> None:
        """Forget what was sent over the lost connection: it may not have arrived."""
        with self._lock:
            self._sent.clear()

    def record_gap(self, run: bytes, sent: int, first: int) -> None:
        """Record that the frames between two numbers can no longer be sent."""
        with self._lock:
            self._run_index.record_gap(run, sent, first)
            self.changes += 1

    def give_up(self, piece: SpoolRange) -> None:
        """Record that a range of the spool cannot be read."""
        with self._lock:
            self._run_index.give_up(piece)
            self.losses += 1

    def forget_finished_runs(self, acknowledged: Iterable[bytes]) -> int:
        """Forget those earlier runs that have no frames left to send; return how many there were."""
        settled = 0
        with self._lock:
            for run in acknowledged:
                note = self._run_index.runs.get(run)
                if note is None or run == self.run or self._resend_buffer.has(run):
                    continue
                if self._run_index.find(run, 0) is None:
                    self._run_index.forget(run)
                    self.changes += 1
                    settled += 1
        return settled

    def set_interval(self, interval_ms: int) -> bool:
        """Set the sampling interval of this run; return whether it changed."""
        with self._lock:
            note = self._run_index.runs[self.run]
            if note.interval_ms == interval_ms:
                return False
            self._run_index.runs[self.run] = note._replace(interval_ms=interval_ms)
            self.changes += 1
            return True

    def end(self) -> None:
        """Record that this run ended normally."""
        with self._lock:
            self._run_index.runs[self.run] = self._run_index.runs[self.run]._replace(ended=True)
            self.changes += 1

    def notes(self, now_us: int = 0) -> bytes:
        """Return the states of all runs as a record for the spool.

        Args:
            now_us: Time on the monotonic clock.
        """
        with self._lock:
            runs = dict(self._run_index.runs)
            own = runs[self.run]
            # Frames that are only in memory are lost if the agent is killed, so they do not count.
            runs[self.run] = own._replace(last=max(self._spooled, own.acked), alive_us=now_us)
            document = {"runs": [note.to_dict() for note in runs.values()], "head": self._head}
        return json.dumps(document, separators=(",", ":")).encode()

    @property
    def head(self) -> str:
        """ID of the store that this agent was last connected to."""
        return self._head

    @head.setter
    def head(self, value: str) -> None:
        if value == self._head:
            return
        with self._lock:
            if self._head:
                for run, note in self._run_index.runs.items():
                    self._run_index.runs[run] = note._replace(other_head_last=note.acked)
            self._head = value
            self.changes += 1

    @property
    def has_several_heads(self) -> bool:
        """Whether several heads are configured, so that another one may need acknowledged frames."""
        return self._resend_buffer.keep_seconds > 0.0

    @property
    def last(self) -> int:
        """Number of the newest frame of this run."""
        return self._last

    @property
    def acked(self) -> int:
        """Number of the newest acknowledged frame of this run."""
        with self._lock:
            return self._run_index.runs[self.run].acked

    @property
    def dropped(self) -> int:
        """Number of lost frames of all runs."""
        return sum(run.dropped for run in self.runs())

    def _memory_first(self) -> int | None:
        return self._frames[0].sequence if self._frames else None


def parse_run_states(text: bytes) -> tuple[Mapping[bytes, AgentRunState], str]:
    """Return the run states and the store ID of a spool record.

    Raises:
        ValueError: The record does not hold run states.
    """
    document: Any = json.loads(text)
    try:
        runs = [AgentRunState.from_dict(raw) for raw in document["runs"]]
        return {run.id: run for run in runs}, str(document.get("head", ""))
    except (TypeError, LookupError, AttributeError) as error:
        raise ValueError(f"invalid run states: {error}") from error
