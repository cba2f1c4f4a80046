"""What a head acknowledged lately, for another one that takes its place: the first may have died with it."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import NamedTuple

KEEP_SECONDS = 120.0
MOST_BYTES = 16 << 20


class Kept(NamedTuple):
    """A frame on its way."""

    sequence: int
    data: bytes
    layouts: tuple[int, ...]
    offset_us: int
    """Wall clock less monotonic clock."""
    taken: float = 0.0
    """When, on the monotonic clock."""


class _Told(NamedTuple):
    time: float
    run: bytes
    frames: int
    size: int


class Overlap:
    """The frames that were acknowledged during the last while, by run, in order."""

    def __init__(self, keep_seconds: float = 0.0, most_bytes: int = MOST_BYTES) -> None:
        """Begin with none.

        Args:
            keep_seconds: For how long after its acknowledgement a frame is kept; none is when 0.
            most_bytes: Backends that the oldest acknowledgements go.
        """
        self.keep_seconds = keep_seconds
        self._most_bytes = most_bytes
        self._frames: dict[bytes, deque[Kept]] = {}
        self._told: deque[_Told] = deque()
        """What was acknowledged when, oldest first."""
        self._bytes = 0
        self._texts: dict[int, bytes] = {}
        """Layouts of frames that were read back from the spool."""

    def add(
        self, run: bytes, frames: Iterable[Kept], now: float, texts: Mapping[int, bytes] | None = None
    ) -> None:
        """A head has these frames of a run now; those that are here already stay as they are.

        Args:
            run: The run.
            frames: In order.
            now: On the monotonic clock.
            texts: Layouts of theirs that nobody else keeps.
        """
        if self.keep_seconds <= 0.0:
            return
        kept = self._frames.get(run)
        newest = kept[-1].sequence if kept else 0
        new = [frame for frame in frames if frame.sequence > newest]
        if new:
            self._frames.setdefault(run, deque()).extend(new)
            size = sum(len(frame.data) for frame in new)
            self._told.append(_Told(now, run, len(new), size))
            self._bytes += size
            for frame in new if texts else ():
                self._texts |= {
                    layout: texts[layout] for layout in frame.layouts if texts and layout in texts
                }
        self.forget(now)

    def forget(self, now: float) -> None:
        """Let go of what was acknowledged too long ago, and of the oldest when it is too much."""
        while self._told and (self._told[0].time < now - self.keep_seconds or self._bytes > self._most_bytes):
            told = self._told.popleft()
            frames = self._frames[told.run]
            for _ in range(told.frames):
                frames.popleft()
            if not frames:
                del self._frames[told.run]
            self._bytes -= told.size
            if not self._told:
                self._texts.clear()

    def again(self, now: float) -> None:
        """Another head gets all of it now: it may die with it just as well."""
        self._told = deque(told._replace(time=now) for told in self._told)

    def has(self, run: bytes) -> bool:
        """Whether any frame of a run is here."""
        return run in self._frames

    def first_after(self, run: bytes, sequence: int) -> int | None:
        """The first frame of a run behind another one, None when there is none."""
        frames = self._frames.get(run)
        if not frames or frames[-1].sequence <= sequence:
            return None
        return frames[bisect_right(frames, sequence, key=lambda frame: frame.sequence)].sequence

    def after(self, run: bytes, sequence: int, most_frames: int, most_bytes: int) -> list[Kept]:
        """The frames of a run behind a frame, without a hole among them, as many as are sent at once."""
        kept = self._frames.get(run, deque())
        begin = bisect_right(kept, sequence, key=lambda frame: frame.sequence)
        frames: list[Kept] = []
        size = 0
        for frame in islice(kept, begin, begin + most_frames):
            size += len(frame.data)
            if frames and (size > most_bytes or frame.sequence != frames[-1].sequence + 1):
                break
            frames.append(frame)
        return frames

    def layouts(self) -> set[int]:
        """The layouts that its frames refer to."""
        return {layout for frames in self._frames.values() for frame in frames for layout in frame.layouts}

    def texts(self, layouts: Iterable[int]) -> dict[int, bytes]:
        """The layouts that are known here of these."""
        return {layout: self._texts[layout] for layout in layouts if layout in self._texts}
