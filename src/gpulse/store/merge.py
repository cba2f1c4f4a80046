"""What several stores, or several pieces of one, say about the same series, brought together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from gpulse.store.history.gpu_holders import joined
from gpulse.store.history.series import join_samples
from gpulse.store.store import Holding, Samples, Series, SeriesKey, Share, Statistic, Steps

if TYPE_CHECKING:
    from numpy.typing import NDArray

_Named = tuple[SeriesKey, str]


def merged_steps(parts: Iterable[Steps], metrics: Sequence[str]) -> list[Steps]:
    """One entry a series and metric; steps that several parts tell of are weighed by their samples."""
    return [group[0] if len(group) == 1 else _added(group) for group in _by_series(parts, metrics).values()]


def better_steps(here: Iterable[Steps], there: Iterable[Steps], metrics: Sequence[str]) -> list[Steps]:
    """One entry a series and metric; of a step the one who knows more samples tells, and the first of equals."""
    return [
        group[0] if len(group) == 1 else _better(group)
        for group in _by_series([*here, *there], metrics).values()
    ]


def _by_series(parts: Iterable[Steps], metrics: Sequence[str]) -> dict[_Named, list[Steps]]:
    """In the order of series and metrics."""
    found: dict[_Named, list[Steps]] = {}
    for part in parts:
        found.setdefault((part.key, part.metric), []).append(part)
    places = {metric: place for place, metric in enumerate(metrics)}
    return dict(sorted(found.items(), key=lambda item: (item[0][0], places[item[0][1]])))


def _stacked(parts: Sequence[Steps]) -> Steps:
    """Parts one after the other, in the order of time, those of one time in the order they had."""
    times = np.concatenate([part.times for part in parts])
    order = np.argsort(times, kind="stable")
    return Steps(
        parts[0].key,
        parts[0].metric,
        times[order],
        np.concatenate([part.means for part in parts])[order],
        np.concatenate([part.lows for part in parts])[order],
        np.concatenate([part.highs for part in parts])[order],
        np.concatenate([part.ends for part in parts])[order],
        np.concatenate([_weights(part) for part in parts])[order],
    )


def _weights(part: Steps) -> NDArray[np.int64]:
    return np.ones(len(part.times), np.int64) if part.counts is None else np.maximum(part.counts, 1)


def _begins(times: NDArray[np.float64] | NDArray[np.int64]) -> NDArray[np.int64]:
    """Where a time is another one than before."""
    return np.flatnonzero(np.concatenate(([True], times[1:] != times[:-1])))


def _added(parts: Sequence[Steps]) -> Steps:
    found = _stacked(parts)
    counts, begins = _weights(found), _begins(found.times)
    total = np.add.reduceat(counts, begins)
    return found._replace(
        times=found.times[begins],
        means=np.add.reduceat(found.means * counts, begins) / total,
        lows=np.fmin.reduceat(found.lows, begins),
        highs=np.fmax.reduceat(found.highs, begins),
        ends=np.fmax.reduceat(found.ends, begins),
        counts=total,
    )


def _better(parts: Sequence[Steps]) -> Steps:
    found = _stacked(parts)
    counts = _weights(found)
    order = np.lexsort((-counts, found.times))  # stable: of equals the first stays first
    kept = order[_begins(found.times[order])]
    return found._replace(
        times=found.times[kept],
        means=found.means[kept],
        lows=found.lows[kept],
        highs=found.highs[kept],
        ends=found.ends[kept],
        counts=counts[kept],
    )


def series_of_steps(steps: Steps, statistic: Statistic) -> Series:
    """One statistic of steps."""
    columns = {"mean": steps.means, "min": steps.lows, "max": steps.highs}
    return Series(steps.key, steps.times, columns[statistic])


def united_series(here: Sequence[Series], there: Sequence[Series]) -> list[Series]:
    """Every sample that one of two knows, once; elsewhere times are known to the millisecond."""
    return [group[0] if len(group) == 1 else _united(group) for group in _by_key([*here, *there]).values()]


def replaced_series(here: Sequence[Series], there: Sequence[Series], *, until: float) -> list[Series]:
    """Points of steps; up to a time those of elsewhere count where both have one."""
    found = []
    for key, group in _by_key([*here, *there]).items():
        times = np.concatenate([series.times for series in group])
        values = np.concatenate([series.values for series in group])
        is_there = np.repeat(
            [any(series is other for other in there) for series in group],
            [len(series.times) for series in group],
        )
        order = np.lexsort((is_there == (times > until), times))
        kept = order[_begins(times[order])]
        found.append(Series(key, times[kept], values[kept]))
    return found


def _by_key(series: Iterable[Series]) -> dict[SeriesKey, list[Series]]:
    found: dict[SeriesKey, list[Series]] = {}
    for one in series:
        found.setdefault(one.key, []).append(one)
    return dict(sorted(found.items()))


def _united(group: Sequence[Series]) -> Series:
    times = np.concatenate([series.times for series in group])
    values = np.concatenate([series.values for series in group])
    order = np.lexsort((np.isnan(values), _milliseconds(times)))  # stable: the first one's come first
    kept = order[_begins(_milliseconds(times)[order])]
    return Series(group[0].key, times[kept], values[kept])


def _milliseconds(times: NDArray[np.float64]) -> NDArray[np.int64]:
    return np.rint(times * 1e6).astype(np.int64) // 1000


def merged_shares(shares: Iterable[Share]) -> list[Share]:
    """One share a process and GPU, of parts that are of different times."""
    found: dict[tuple[object, ...], Share] = {}
    for share in shares:
        before = found.get(share[:4])
        found[share[:4]] = share if before is None else joined(before, share)
    return sorted(
        found.values(), key=lambda share: (share.node, share.pid or 0, share.start or 0.0, share.uuid)
    )


def merged_holdings(holdings: Iterable[Holding]) -> list[Holding]:
    """One holding a process and GPU, of parts that are of different times; means count for as long as they are of."""
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


def interleaved(
    here: Iterator[Samples], there: Iterator[Samples], metrics: Sequence[str]
) -> Iterator[Samples]:
    """Every sample that one of two knows, once, in the order of time; each gives stretches in that order."""
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
