"""Merge what several stores, or several pieces of one, have about the same series, processes or samples."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import add
from typing import TYPE_CHECKING

import numpy as np

from gpulse.store.store import Holding, Samples, Series, SeriesKey, Share, Statistic

if TYPE_CHECKING:
    from numpy.typing import NDArray

_Named = tuple[SeriesKey, str]


def merged_series(parts: Iterable[Series], metrics: Sequence[str], statistic: Statistic) -> list[Series]:
    """Merge series with steps: samples of one step add up."""
    return [
        group[0] if len(group) == 1 else _added(group, statistic)
        for group in _by_series(parts, metrics).values()
    ]


def better_series(here: Iterable[Series], there: Iterable[Series], metrics: Sequence[str]) -> list[Series]:
    """Merge series with steps: of each step, the source that knows more samples counts, the first of equals."""
    return [
        group[0] if len(group) == 1 else _better(group)
        for group in _by_series([*here, *there], metrics).values()
    ]


def united_series(here: Iterable[Series], there: Iterable[Series], metrics: Sequence[str]) -> list[Series]:
    """Merge series without steps: every sample once, although some sources know times to the millisecond only."""
    return [
        group[0] if len(group) == 1 else _united(group)
        for group in _by_series([*here, *there], metrics).values()
    ]


def _by_series(parts: Iterable[Series], metrics: Sequence[str]) -> dict[_Named, list[Series]]:
    """In the order of subjects and metrics."""
    found: dict[_Named, list[Series]] = {}
    for part in parts:
        found.setdefault((part.key, part.metric), []).append(part)
    places = {metric: place for place, metric in enumerate(metrics)}
    return dict(sorted(found.items(), key=lambda item: (item[0][0], places[item[0][1]])))


def _stacked(parts: Sequence[Series]) -> Series:
    """Parts one after the other."""
    return Series(
        parts[0].key,
        parts[0].metric,
        np.concatenate([part.times for part in parts]),
        np.concatenate([part.values for part in parts]),
        np.concatenate([part.lows for part in parts]),
        np.concatenate([part.highs for part in parts]),
        np.concatenate([part.ends for part in parts]),
        np.concatenate([_weights(part) for part in parts]),
    )


def _weights(part: Series) -> NDArray[np.int64]:
    return np.ones(len(part.times), np.int64) if part.counts is None else np.maximum(part.counts, 1)


def _begins(times: NDArray[np.float64] | NDArray[np.int64]) -> NDArray[np.int64]:
    """Where a time is another one than before."""
    return np.flatnonzero(np.concatenate(([True], times[1:] != times[:-1])))


def _added(parts: Sequence[Series], statistic: Statistic) -> Series:
    found = _stacked(parts)
    ends = np.where(np.isnan(found.ends), found.times, found.ends)
    found = found.only(np.lexsort((ends, found.times)))
    counts, begins = _weights(found), _begins(found.times)
    total = np.add.reduceat(counts, begins)
    lows, highs = np.fmin.reduceat(found.lows, begins), np.fmax.reduceat(found.highs, begins)
    if statistic == "mean":
        values = np.add.reduceat(found.values * counts, begins) / total
    elif statistic == "last":
        values = found.values[np.append(begins[1:], len(counts)) - 1]
    else:
        values = lows if statistic == "min" else highs
    return found._replace(
        times=found.times[begins],
        values=values,
        lows=lows,
        highs=highs,
        ends=np.fmax.reduceat(found.ends, begins),
        counts=total,
    )


def _better(parts: Sequence[Series]) -> Series:
    found = _stacked(parts)
    order = np.lexsort((-_weights(found), found.times))  # stable: of equals the first stays first
    return found.only(order[_begins(found.times[order])])


def _united(parts: Sequence[Series]) -> Series:
    found = _stacked(parts)
    times = _milliseconds(found.times)
    order = np.lexsort((np.isnan(found.values), times))  # stable: the first source's times are the exact ones
    return found.only(order[_begins(times[order])])._replace(counts=None)


def _milliseconds(times: NDArray[np.float64]) -> NDArray[np.int64]:
    return np.rint(times * 1e6).astype(np.int64) // 1000


def merged_shares(shares: Iterable[Share]) -> list[Share]:
    """Return one share a process and GPU, from parts of different times."""
    found: dict[tuple[object, ...], Share] = {}
    for share in shares:
        before = found.get(share[:4])
        found[share[:4]] = share if before is None else joined(before, share)
    return sorted(
        found.values(), key=lambda share: (share.node, share.pid or 0, share.start or 0.0, share.uuid)
    )


def joined(one: Share, other: Share) -> Share:
    """Add up the shares of one process and GPU in two stretches of time."""
    return Share(
        *one[:4],
        _either(min, one.first, other.first),
        _either(max, one.last, other.last),
        one.seconds + other.seconds,
        one.known_seconds + other.known_seconds,
        one.busy_seconds + other.busy_seconds,
        one.idle_seconds + other.idle_seconds,
        _either(add, one.energy_joules, other.energy_joules),
        _either(max, one.memory_max, other.memory_max),
        one.seen_seconds + other.seen_seconds,
    )


def _either(both: Callable[[float, float], float], one: float | None, other: float | None) -> float | None:
    if one is None or other is None:
        return other if one is None else one
    return both(one, other)


def merged_holdings(holdings: Iterable[Holding]) -> list[Holding]:
    """Return one holding a process and GPU, from parts of different times; means are weighted by their times."""
    found: dict[tuple[object, ...], list[Holding]] = {}
    for holding in holdings:
        found.setdefault(holding[:4], []).append(holding)
    merged = [group[0] if len(group) == 1 else _held(group) for group in found.values()]
    return sorted(merged, key=lambda one: (one.first, one.node, one.pid, one.start or 0.0, one.uuid))


def _held(parts: Sequence[Holding]) -> Holding:
    weights = [max(part.last - part.first, 1e-3) for part in parts]
    return parts[0]._replace(
        first=min(part.first for part in parts),
        last=max(part.last for part in parts),
        memory_mean=_mean([part.memory_mean for part in parts], weights),
        memory_max=max((part.memory_max for part in parts if part.memory_max is not None), default=None),
        sm_mean=_mean([part.sm_mean for part in parts], weights),
    )


def _mean(values: Sequence[float | None], weights: Sequence[float]) -> float | None:
    known = [(value, weight) for value, weight in zip(values, weights, strict=True) if value is not None]
    total = sum(weight for _, weight in known)
    return sum(value * weight for value, weight in known) / total if known else None


def join_samples(parts: Sequence[Samples], metrics: Sequence[str]) -> Samples:
    """Bring the samples of several sources together, in the order of time."""
    keys = sorted({key for part in parts for key in part.keys})
    places = {key: place for place, key in enumerate(keys)}
    series = np.concatenate(
        [np.array([places[key] for key in part.keys], np.int32)[part.series] for part in parts]
    )
    times = np.concatenate([part.times for part in parts])
    sequences = np.concatenate([part.sequences for part in parts])
    order = np.lexsort((sequences, series, times))
    return Samples(
        keys,
        series[order],
        times[order],
        np.concatenate([part.runs for part in parts])[order],
        sequences[order],
        {metric: np.concatenate([part.values[metric] for part in parts])[order] for metric in metrics},
    )


def interleaved(
    here: Iterator[Samples], there: Iterator[Samples], metrics: Sequence[str]
) -> Iterator[Samples]:
    """Yield every sample of two sources once, in the order of time, in which each of them yields."""
    waiting: list[Samples | None] = [None, None]
    sources: list[Iterator[Samples] | None] = [here, there]
    while True:
        for place, source in enumerate(sources):
            if source is not None and waiting[place] is None:
                waiting[place] = next(source, None)
                if waiting[place] is None:
                    sources[place] = None
        known = [samples for samples in waiting if samples is not None]
        if not known:
            return
        if len(known) == 1:
            yield known[0]
            waiting = [None, None]
            continue
        until = min(int(_milliseconds(samples.times[-1:])[0]) for samples in known)
        cut = [_split(samples, until) for samples in known]
        yield _without_doubles(cut[0][0], cut[1][0], metrics)
        waiting = [rest if len(rest.times) else None for _, rest in cut]


def _split(samples: Samples, until: int) -> tuple[Samples, Samples]:
    """Samples up to a millisecond, and the others."""
    count = int(np.searchsorted(_milliseconds(samples.times), until, side="right"))
    return _only(samples, slice(None, count)), _only(samples, slice(count, None))


def _only(samples: Samples, which: slice | NDArray[np.bool_]) -> Samples:
    return Samples(
        samples.keys,
        samples.series[which],
        samples.times[which],
        samples.runs[which],
        samples.sequences[which],
        {metric: values[which] for metric, values in samples.values.items()},
    )


def _without_doubles(here: Samples, there: Samples, metrics: Sequence[str]) -> Samples:
    places = {
        key: place for place, key in enumerate({**dict.fromkeys(here.keys), **dict.fromkeys(there.keys)})
    }
    cells = [
        _milliseconds(samples.times) * len(places)
        + np.array([places[key] for key in samples.keys], np.int64)[samples.series]
        for samples in (here, there)
    ]
    return join_samples([here, _only(there, ~np.isin(cells[1], cells[0]))], metrics)
