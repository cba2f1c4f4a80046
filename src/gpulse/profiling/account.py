"""What each block has used: the readings of GPUs shared out to the blocks that were open meanwhile."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple

from gpulse.profiling.meter import OWN_MEMORY, Meter, Stretch
from gpulse.profiling.spans import Spans

if TYPE_CHECKING:
    from gpulse.diagnosis.digest import Digest
    from gpulse.diagnosis.seconds import Second
    from gpulse.model.device import Device
    from gpulse.model.frame import Frame, GpuReading
    from gpulse.model.metric import Value

_MOST_SECONDS = 600
"""Seconds of a block that are kept for its diagnosis."""
_INSIDE = 0.9
"""Share of a second that must be in a block for the second to speak about it."""
_WHOLE = 0.98
"""Share of the time between two looks at the counter of energy that must be in a block for them to put it right."""
_PATIENCE_SECONDS = 10.0
"""How long a run waits for readings of its time, which come some ticks later."""
Event = tuple[float, "Account", bool]
"""When, which block, and whether a run began or ended."""


class Part(NamedTuple):
    """How much of a stretch of time was in a block."""

    seconds: float
    middle: float
    """Of that part, in seconds from the start of the stretch."""
    is_inside: bool
    """Whether the end of the stretch, which is when something was read, was in the block."""


class Tally:
    """What one block used of one GPU."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.samples = 0
        """Readings that were taken while the block was open."""
        self.seconds = 0.0
        """Time of the block over which power was known."""
        self.joules = 0.0
        self.rough_joules = 0.0
        """Energy since the counter was last looked at, from power alone."""
        self.sums: dict[str, list[float]] = {}
        """By catalogue name a mean's total and weight, the latter in seconds."""
        self.peaks: dict[str, Value] = {}

    def add(self, stretch: Stretch, part: Part) -> None:
        """Take the block's part of a stretch of time."""
        length, middle, is_inside = part
        if is_inside:
            self.samples += stretch.is_tick
            for name, value in stretch.peaks:
                self.peaks[name] = max(value, self.peaks.get(name, value))
        if length == 0.0:
            return
        if stretch.watts is not None:
            first, last = stretch.watts
            self.rough_joules += length * (first + (last - first) * middle / (stretch.end - stretch.start))
            self.seconds += length
        for name, mean in stretch.means:
            total = self.sums.setdefault(name, [0.0, 0.0])
            total[0] += mean * length
            total[1] += length

    def correct(self, factor: float) -> None:
        """Put the energy since the last look at the counter right."""
        self.joules += self.rough_joules * factor
        self.rough_joules = 0.0


class Account:
    """All that is known about one block."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_wanted: Callable[[], object] = lambda: True
        """Whether anybody is left who can ask about it."""
        self.begin()

    def begin(self) -> None:
        """Nothing has been seen yet."""
        self.spans = Spans()
        self.measured_seconds = 0.0
        """Time of the block that lies between two readings of the machine."""
        self.tallies: dict[str, Tally] = {}
        """By UUID."""
        self.seconds: dict[str, deque[Second]] = {}
        """By UUID what a diagnosis of the block looks at."""
        self.frame: Frame | None = None
        """The last one with everything in it that was taken while the block was open."""

    def restart(self, now: float) -> None:
        """Forget what was seen; runs that are under way begin now."""
        depth = self.spans.depth
        self.begin()
        for _ in range(depth):
            self.spans.enter(now)

    def tally(self, device: Device) -> Tally:
        """What it used of one GPU."""
        tally = self.tallies.get(device.uuid)
        if tally is None:
            tally = self.tallies[device.uuid] = Tally(device)
        return tally


class Ledger:
    """Carries events and readings to the accounts of the blocks; whoever calls it holds its lock."""

    def __init__(self) -> None:
        self.pid: int | None = None
        """Under which number the driver knows this process, None when nobody can say."""
        self.held: set[str] = set()
        """UUIDs of GPUs on which the driver saw this process."""
        self.seen_at: float | None = None
        """When the newest reading was taken, on the monotonic clock."""
        self._parts: dict[tuple[Account, float, float], Part] = {}
        """Of the look that is being shared out: GPUs are read together, so that each part is wanted often."""
        self._awake: dict[Account, None] = {}
        self._ended_at: float | None = None
        self._meters: dict[str, Meter] = {}
        self._uncorrected: dict[str, dict[Tally, Spans]] = {}
        """By UUID what has energy that was not compared with the counter yet."""
        self._digest: Digest | None = None

    @property
    def is_idle(self) -> bool:
        """Whether no block is open."""
        return all(account.spans.depth == 0 for account in self._awake)

    def last_end(self) -> float | None:
        """When the last run of any block ended, None before the first one."""
        return self._ended_at

    def is_settled(self, at: float) -> bool:
        """Whether every GPU has been read since that moment, on the monotonic clock."""
        return self.seen_at is not None and all(meter.upto >= at for meter in self._meters.values())

    def take_event(self, event: Event) -> None:
        """A run began or ended."""
        at, account, begins = event
        if begins:
            self._awake[account] = None
            account.spans.enter(at)
        else:
            account.spans.leave(at)
            self._ended_at = at

    def tidy(self) -> None:
        """Let go of blocks that nobody can ask about any more."""
        for account in [a for a in self._awake if a.spans.depth == 0 and not a.is_wanted()]:
            del self._awake[account]

    def take(self, gpus: Iterable[GpuReading], now: float, monotonic: float) -> None:
        """Share out what the GPUs say at one moment, in epoch seconds and on the monotonic clock."""
        self._parts.clear()
        self.tidy()
        if self.seen_at is not None and monotonic > self.seen_at:
            for account in self._awake:
                account.measured_seconds += self._part(account, self.seen_at, monotonic).seconds
        self.seen_at = monotonic
        for gpu in gpus:
            self._share_out(gpu, now, monotonic)
        for account in [a for a in self._awake if a.spans.is_asleep(monotonic - _PATIENCE_SECONDS)]:
            del self._awake[account]
        for account in self._awake:
            account.spans.forget(monotonic - _PATIENCE_SECONDS)

    def take_frame(self, frame: Frame) -> None:
        """Keep what a diagnosis of the open blocks needs of a frame with everything in it."""
        from gpulse.diagnosis.digest import Digest  # noqa: PLC0415  loaded by the thread that samples
        from gpulse.errors import RecordingError  # noqa: PLC0415

        if self._digest is None:
            self._digest = Digest()
        try:
            done = self._digest.feed(frame)
        except RecordingError:  # the machine has another name now
            self._digest, done = None, {}
        offset = frame.monotonic - frame.time
        for account in self._awake:
            if account.spans.cover(frame.monotonic):
                account.frame = frame
            for uuid, second in done.items():
                inside, _ = account.spans.within(second.start + offset, second.end + offset)
                if inside >= _INSIDE * (second.end - second.start):
                    kept = account.seconds.setdefault(uuid, deque(maxlen=_MOST_SECONDS))
                    kept.append(second)

    def stop(self) -> None:
        """The readings end here: what comes later does not continue them."""
        for tally in [tally for tallies in self._uncorrected.values() for tally in tallies]:
            tally.correct(1.0)
        self._meters.clear()
        self._uncorrected.clear()
        self._digest = None
        self.seen_at = None

    def _share_out(self, gpu: GpuReading, now: float, monotonic: float) -> None:
        uuid = gpu.device.uuid
        meter = self._meters.setdefault(uuid, Meter())
        stretches, correction = meter.take(gpu, now, monotonic, self.pid)
        uncorrected = self._uncorrected.setdefault(uuid, {})
        for stretch in stretches:
            if any(name == OWN_MEMORY for name, _ in stretch.peaks):
                self.held.add(uuid)
            for account in self._awake:
                tally = account.tally(gpu.device)
                tally.add(stretch, self._part(account, stretch.start, stretch.end))
                if tally.rough_joules:
                    uncorrected[tally] = account.spans
        if correction is not None:
            start, end, factor = correction
            for tally, spans in uncorrected.items():
                # What was only partly in the block says nothing about how its part differed from the rest.
                is_whole = spans.within(start, end)[0] >= _WHOLE * (end - start)
                tally.correct(factor if is_whole else 1.0)
            uncorrected.clear()

    def _part(self, account: Account, start: float, end: float) -> Part:
        key = (account, start, end)
        part = self._parts.get(key)
        if part is None:
            spans = account.spans
            part = self._parts[key] = Part(*spans.within(start, end), spans.cover(end))
        return part
