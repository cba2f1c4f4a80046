"""Packaged recordings of real runs, played over and over: the interesting stretch of one, with counters that go on."""

from __future__ import annotations

import gzip
import math
from collections.abc import Mapping, Sequence
from functools import cache, cached_property
from importlib.resources import files
from itertools import accumulate
from typing import NamedTuple

from gpulse.model.frame import Frame, HostReading
from gpulse.model.metric import CATALOGUE, Scope, Value, Values
from gpulse.sources.trace import TraceDecoder

Cores = tuple[tuple[int, ...], ...]
_COARSE = 0.01
_AVERAGED = {
    name
    for name, metric in CATALOGUE["gpu"].items()
    if metric.kind == "ratio" or name in ("power_watts", "power_instant_watts")
}


class Reel:
    """One packaged recording, decoded as it is needed."""

    def __init__(self, name: str) -> None:
        packed = files("gpulse.sources").joinpath("demo", f"{name}.jsonl.gz").read_bytes()
        header, *self._lines = gzip.decompress(packed).splitlines()
        self._decoder = TraceDecoder()
        self._decoder.feed(header.decode())
        self._frames: dict[int, Frame] = {}
        self.first = self.frame(0)

    def __len__(self) -> int:
        return len(self._lines)

    def frame(self, index: int) -> Frame:
        """The frame of one line; threads that ask at once may both decode it, to the same end."""
        frame = self._frames.get(index)
        if frame is None:
            decoded = self._decoder.feed(self._lines[index].decode())
            assert decoded is not None  # noqa: S101  the header was taken off before
            frame = self._frames[index] = decoded
        return frame

    def index(self, seconds: float) -> int:
        """The last line at or before this many seconds; lines are a tenth of a second apart, more or less."""
        origin = self.first.time
        index = min(len(self) - 1, max(0, int(seconds * 10)))
        while index > 0 and self.frame(index).time - origin > seconds:
            index -= 1
        while index + 1 < len(self) and self.frame(index + 1).time - origin <= seconds:
            index += 1
        return index


class Played(NamedTuple):
    """A moment of a recording that is played over and over."""

    frame: Frame
    loops: int
    """How often it was played before."""
    pids: set[int]
    """The processes that hold the GPU, and their descendants."""
    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody calls here
    """Which line of the recording it is."""


class Loop:
    """The part of a recording that repeats, and how much its counters grow each time."""

    def __init__(self, name: str, begin: float) -> None:
        """Find the stretch.

        Args:
            name: Of the recording.
            begin: Where it begins to be worth watching, in seconds after the recording's start.
        """
        self._reel = Reel(name)
        self.first = self._reel.first
        self._begin = self._reel.index(begin)
        self._end = self._last_alike(self._begin)
        self.base = self._reel.frame(self._begin)
        self.end = self._reel.frame(self._end)
        self.span = self.end.time - self.base.time
        self._origin = self.base.time - self.first.time
        base, end = self.base, self.end
        self.gpu = growth("gpu", base.gpus[0].values, end.gpus[0].values)
        self.host = growth("host", _values(base.host), _values(end.host))
        self.cores = core_growth(_cores(base.host), _cores(end.host))
        self.disks = [growth("disk", b.values, e.values) for b, e in zip(base.disks, end.disks, strict=True)]
        self.links = [
            growth("network", b.values, e.values) for b, e in zip(base.network, end.network, strict=True)
        ]
        last = {process.pid: process.values for process in end.processes}
        self.processes = {
            process.pid: growth("process", process.values, last.get(process.pid, {}))
            for process in base.processes
        }
        self.holders = sorted(process.pid for process in base.processes if process.on_gpu)
        """The processes that hold the GPU."""
        self._trees: dict[int, set[int]] = {}
        self._means: dict[tuple[int, int], Values] = {}

    def at(self, seconds: float) -> Played:
        """What there is this many seconds after the stretch began."""
        loops, offset = divmod(max(0.0, seconds), self.span)
        index = self._reel.index(self._origin + offset)
        frame = self._reel.frame(index)
        pids = self._trees.get(index)
        if pids is None:
            pids = self._trees[index] = tree(frame)
        return Played(frame, int(loops), pids, index)

    def means(self, played: Played, length: float) -> Values:
        """What the GPU did on the mean in some time up to a moment, for what changes from one to the next.

        Of the whole stretch where that time is longer.
        """
        count = self._end - self._begin
        wanted = min(count, max(1, round(count * length / self.span)))
        first = 0 if wanted == count else played.index - self._begin + 1 - wanted + count
        found = self._means.get((first, wanted))
        if found is None:
            found = self._means[first, wanted] = {
                name: _mean(totals[first + wanted] - totals[first], wanted, name)
                for name, totals in self._totals.items()
            }
        return found

    @cached_property
    def _totals(self) -> dict[str, list[float]]:
        """What came together up to each moment of the stretch when it is played twice."""
        played = [self._reel.frame(index).gpus[0].values for index in range(self._begin, self._end)]
        found = {}
        for name in _AVERAGED.intersection(*played):
            values = [float(values[name]) for values in played]
            found[name] = list(accumulate([*values, *values, values[0]], initial=0.0))
        return found

    def _last_alike(self, begin: int) -> int:
        """The last line at which the same processes run: near its end a recording shows them leave."""
        pids = tree(self._reel.frame(begin))
        index = len(self._reel) - 1
        while index > begin and tree(self._reel.frame(index)) != pids:
            index -= 1
        return index


def _mean(total: float, count: int, name: str) -> float:
    """A started step of what the driver tells coarsely is one: a GPU that does little does not do nothing."""
    resolution = CATALOGUE["gpu"][name].resolution
    mean = round(total / count, 6)
    return mean if resolution < _COARSE else math.ceil(mean / resolution) * resolution


@cache
def loop(name: str, begin: float) -> Loop:
    """The stretch of a recording, shared by all that play it."""
    return Loop(name, begin)


def tree(frame: Frame) -> set[int]:
    """The processes that hold the GPU and their descendants."""
    pids = {process.pid for process in frame.processes if process.on_gpu}
    grew = True
    while grew:
        children = {process.pid for process in frame.processes if process.identity.parent_pid in pids}
        grew = not children <= pids
        pids |= children
    return pids


def growth(scope: Scope, base: Values, end: Values) -> Values:
    """How much each counter grows from one reading to another."""
    metrics = CATALOGUE[scope]
    return {
        name: max(0, end.get(name, value) - value)
        for name, value in base.items()
        if metrics[name].kind == "counter"
    }


def core_growth(base: Cores, end: Cores) -> Cores:
    """The same of every CPU's ticks."""
    return tuple(
        tuple(last - first for first, last in zip(old, new, strict=True))
        for old, new in zip(base, end, strict=True)
    )


class Carry(NamedTuple):
    """What a GPU's earlier jobs added to the counters of its part of the machine."""

    gpu: Values
    host: Values
    disk: Values
    link: Values
    cores: Cores


_NOTHING: Values = {}
NO_CARRY = Carry(_NOTHING, _NOTHING, _NOTHING, _NOTHING, ())
"""What the first job finds."""


def grown(values: Values, growth: Values, loops: int, carry: Mapping[str, Value] = _NOTHING) -> Values:
    """The values with their counters carried on over as many loops as were played."""
    made = dict(values)
    if loops or carry:
        for name, more in growth.items():
            if name in made:
                # Rounded, or the last digit of a sum could run backwards at the seam.
                made[name] = round(made[name] + loops * more + carry.get(name, 0), 6)
    return made


def grown_cores(cores: Cores, growth: Cores, loops: int, carry: Cores = ()) -> Cores:
    """The same for the ticks of CPUs."""
    if not loops and not carry:
        return cores
    if not carry:
        return tuple(
            tuple(now + loops * more for now, more in zip(core, grows, strict=True))
            for core, grows in zip(cores, growth, strict=True)
        )
    return tuple(
        tuple(now + loops * more + before for now, more, before in zip(core, grows, carried, strict=True))
        for core, grows, carried in zip(cores, growth, carry, strict=True)
    )


def _values(host: HostReading | None) -> Values:
    return {} if host is None else host.values


def _cores(host: HostReading | None) -> Cores:
    return () if host is None else host.cores


def added(parts: Sequence[Values]) -> Values:
    """Values added up."""
    total: dict[str, Value] = {}
    for part in parts:
        for name, value in part.items():
            total[name] = total.get(name, 0) + value
    return total
