"""Merge series, samples and GPU time of several stores, or of several parts of one store."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import add

import numpy as np
from numpy.typing import NDArray

from gpulse.store.store import GpuHolding, GpuShare, Samples, Series, SeriesKey, Statistic

_SeriesName = tuple[SeriesKey, str]


def merge_series(parts: Iterable[Series], metrics: Sequence[str], statistic: Statistic) -> list[Series]:
    """Merge series with steps: the samples of equal steps are combined."""
    return [
        group[0] if len(group) == 1 else _sum_steps(group, statistic)
        for group in _by_series(parts, metrics).values()
    ]


def choose_fuller_steps(
    here: Iterable[Series], there: Iterable[Series], metrics: Sequence[str]
) -> list[Series]:
    """Merge series with steps: take each step from the source with more samples, from `here` if they are equal."""
    return [
        group[0] if len(group) == 1 else _fuller_steps(group)
        for group in _by_series([*here, *there], metrics).values()
    ]


def union_series(here: Iterable[Series], there: Iterable[Series], metrics: Sequence[str]) -> list[Series]:
    """Merge series without steps: keep every sample once, although some sources know times only to the millisecond."""
    return [
        group[0] if len(group) == 1 else _union_samples(group)
        for group in _by_series([*here, *there], metrics).values()
    ]


def _by_series(parts: Iterable[Series], metrics: Sequence[str]) -> dict[_SeriesName, list[Series]]:
    """Group series by subject and metric, in that order."""
    found: dict[_SeriesName, list[Series]] = {}
    for part in parts:
        found.setdefault((part.key, part.metric), []).append(part)
    places = {metric: place for place, metric in enumerate(metrics)}
    return dict(sorted(found.items(), key=lambda item: (item[0][0], places[item[0][1]])))


def _concatenate(parts: Sequence[Series]) -> Series:
    """Concatenate series of the same subject and metric."""
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


def _group_starts(times: NDArray[np.float64] | NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the indices at which the time changes."""
    return np.flatnonzero(np.concatenate(([True], times[1:] != times[:-1])))


def _sum_steps(parts: Sequence[Series], statistic: Statistic) -> Series:
    found = _concatenate(parts)
    ends = np.where(np.isnan(found.ends), found.times, found.ends)
    found = found.only(np.lexsort((ends, found.times)))
    counts, begins = _weights(found), _group_starts(found.times)
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


def _fuller_steps(parts: Sequence[Series]) -> Series:
    found = _concatenate(parts)
    order = np.lexsort((-_weights(found), found.times))  # stable: `here` comes first among equals
    return found.only(order[_group_starts(found.times[order])])


def _union_samples(parts: Sequence[Series]) -> Series:
    found = _concatenate(parts)
    times = _to_milliseconds(found.times)
    order = np.lexsort((np.isnan(found.values), times))  # stable: the times of `here` are the exact ones
    return found.only(order[_group_starts(times[order])])._replace(counts=None)


def _to_milliseconds(times: NDArray[np.float64]) -> NDArray[np.int64]:
    return np.rint(times * 1e6).astype(np.int64) // 1000


def merge_shares(shares: Iterable[GpuShare]) -> list[GpuShare]:
    """Merge shares of different time ranges into one share per process and GPU."""
    found: dict[tuple[object, ...], GpuShare] = {}
    for share in shares:
        before = found.get(share[:4])
        found[share[:4]] = share if before is None else add_shares(before, share)
    return sorted(
        found.values(), key=lambda share: (share.node, share.pid or 0, share.start or 0.0, share.uuid)
    )


def add_shares(one: GpuShare, other: GpuShare) -> GpuShare:
    """Add up the shares of one process and GPU in two time ranges."""
    return GpuShare(
        *one[:4],
        _combine_optional(min, one.first, other.first),
        _combine_optional(max, one.last, other.last),
        one.seconds + other.seconds,
        one.known_seconds + other.known_seconds,
        one.busy_seconds + other.busy_seconds,
        one.idle_seconds + other.idle_seconds,
        _combine_optional(add, one.energy_joules, other.energy_joules),
        _combine_optional(max, one.memory_max, other.memory_max),
        one.seen_seconds + other.seen_seconds,
    )


def _combine_optional(
    both: Callable[[float, float], float], one: float | None, other: float | None
) -> float | None:
    if one is None or other is None:
        return other if one is None else one
    return both(one, other)


def merge_holdings(holdings: Iterable[GpuHolding]) -> list[GpuHolding]:
    """Merge holdings of different time ranges into one per process and GPU; means are weighted by duration."""
    found: dict[tuple[object, ...], list[GpuHolding]] = {}
    for holding in holdings:
        found.setdefault(holding[:4], []).append(holding)
    merged = [group[0] if len(group) == 1 else _merge_holding(group) for group in found.values()]
    return sorted(merged, key=lambda one: (one.first, one.node, one.pid, one.start or 0.0, one.uuid))


def _merge_holding(parts: Sequence[GpuHolding]) -> GpuHolding:
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


def concatenate_samples(parts: Sequence[Samples], metrics: Sequence[str]) -> Samples:
    """Concatenate the samples of several sources, sorted by time."""
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


def interleave_samples(
    here: Iterator[Samples], there: Iterator[Samples], metrics: Sequence[str]
) -> Iterator[Samples]:
    """Yield every sample of two sources once, sorted by time; each source must yield sorted by time."""
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
        until = min(int(_to_milliseconds(samples.times[-1:])[0]) for samples in known)
        cut = [_split(samples, until) for samples in known]
        yield _deduplicate(cut[0][0], cut[1][0], metrics)
        waiting = [rest if len(rest.times) else None for _, rest in cut]


def _split(samples: Samples, until: int) -> tuple[Samples, Samples]:
    """Split samples into those up to a millisecond and the rest."""
    count = int(np.searchsorted(_to_milliseconds(samples.times), until, side="right"))
    return _select_samples(samples, slice(None, count)), _select_samples(samples, slice(count, None))


def _select_samples(samples: Samples, which: slice | NDArray[np.bool_]) -> Samples:
    return Samples(
        samples.keys,
        samples.series[which],
        samples.times[which],
        samples.runs[which],
        samples.sequences[which],
        {metric: values[which] for metric, values in samples.values.items()},
    )


def _deduplicate(here: Samples, there: Samples, metrics: Sequence[str]) -> Samples:
    places = {
        key: place for place, key in enumerate({**dict.fromkeys(here.keys), **dict.fromkeys(there.keys)})
    }
    cells = [
        _to_milliseconds(samples.times) * len(places)
        + np.array([places[key] for key in samples.keys], np.int64)[samples.series]
        for samples in (here, there)
    ]
    return concatenate_samples([here, _select_samples(there, ~np.isin(cells[1], cells[0]))], metrics)
