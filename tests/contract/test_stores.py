"""What every home for samples must answer alike: a head's disk, databases, and both together."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpulse.errors import GpulseError, UsageError
from gpulse.model.metric_catalog import Scope
from gpulse.store.federated import FederatedStore
from gpulse.store.history import reader
from gpulse.store.incomplete_answers import collect_missing
from gpulse.store.local import LocalStore
from gpulse.store.store import Samples, Series, SeriesKey, Statistic, Store
from gpulse.store.tsdb import series_query
from gpulse.store.tsdb.promql import PromqlClient
from gpulse.store.tsdb.store import TsdbStore
from tests.contract.store_lab import (
    BEGIN,
    END,
    FRAMES,
    HALF,
    METRICS,
    MIDDLE,
    NODES,
    Stored,
    fill,
    sealed,
    series_of,
)
from tests.integration.tsdb_servers import Prometheus, TsdbProcess, VictoriaMetrics
from tests.queries import query

pytestmark = pytest.mark.slow

_STORES = ("disk", "victoria-metrics", "prometheus", "federated")


class Homes:
    """The same samples in every home."""

    def __init__(self, stored: Stored, disk: LocalStore, databases: dict[str, TsdbProcess]) -> None:
        self.truth: Store = stored.whole
        self.recent = stored.recent
        self.databases = databases
        self.clients = {name: PromqlClient(process.tsdb) for name, process in databases.items()}
        samples = {
            name: TsdbStore(client, stored.whole.nodes, labels={"cluster": "lab"})
            for name, client in self.clients.items()
        }
        self.federated = FederatedStore(stored.recent, samples["victoria-metrics"], None, now=lambda: END)
        self.by_name: dict[str, Store] = {"disk": disk, "federated": self.federated, **samples}


@pytest.fixture(scope="module")
def homes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Homes]:
    """Everything filled, once for all questions."""
    directory: Path = tmp_path_factory.mktemp("stores")
    stored = fill(directory)
    with (
        stored.whole,
        stored.recent,
        sealed(directory / "disk") as disk,
        VictoriaMetrics(directory / "victoria") as victoria,
        Prometheus(directory / "prometheus") as prometheus,
    ):
        series = list(series_of(stored.whole))
        others = [({**labels, "cluster": "another"}, [(END - 1, -1e9)]) for labels, _ in series]
        for tsdb in (victoria, prometheus):
            tsdb.write([*series, *others])
        victoria.write(series)  # what was sent twice is there twice, and must count once
        homes = Homes(stored, disk, {"victoria-metrics": victoria, "prometheus": prometheus})
        for client in homes.clients.values():
            client.vector("vector(1)")  # the connection stays: no test opens one
        yield homes
        for client in homes.clients.values():
            client.close()


@pytest.fixture(params=_STORES)
def store(request: pytest.FixtureRequest, homes: Homes) -> Store:
    """One of them."""
    return homes.by_name[request.param]


def known(series: list[Series]) -> dict[SeriesKey, tuple[list[float], list[float]]]:
    """What is known, with times cut to the millisecond."""
    found = {}
    for one in series:
        kept = ~np.isnan(one.values)
        found[one.key] = (cut(one.times[kept]), one.values[kept].tolist())
    return found


def cut(times: np.ndarray[tuple[int], np.dtype[np.float64]]) -> list[float]:
    """Times as databases know them."""
    found: list[float] = (np.rint(times * 1e6).astype(np.int64) // 1000 / 1000).tolist()
    return found


@pytest.mark.parametrize("scope", METRICS)
def test_every_sample_is_told_as_it_was_stored(store: Store, homes: Homes, scope: Scope) -> None:
    """Values are equal to the last bit, and times to the millisecond."""

    for metric in METRICS[scope]:
        expected = known(homes.truth.series(query(scope, metric, start=BEGIN, end=END)))

        assert expected == known(store.series(query(scope, metric, start=BEGIN, end=END)))
        assert len(expected) >= 3


@pytest.mark.parametrize("statistic", ["mean", "min", "max", "last"])
@pytest.mark.parametrize(
    ("start", "end", "step"), [(0.0, 0.0, 60.0), (17.3, -71.9, 233.3333333), (2.0, -3.0, 700.0)]
)
def test_a_point_stands_for_the_samples_of_its_step_alone(
    store: Store, homes: Homes, statistic: Statistic, start: float, end: float, step: float
) -> None:
    """Also where the time asked for begins or ends within a step, and where values are not known all the time."""

    asked: Any = {"start": BEGIN + start, "end": END + end, "step": step, "statistic": statistic}
    for metric in ("power_watts", "sm_active_ratio"):
        expected = homes.truth.series(query("gpu", metric, **asked))
        found = store.series(query("gpu", metric, **asked))

        assert [one.key for one in expected] == [one.key for one in found]
        for one, other in zip(expected, found, strict=True):
            assert one.times.tolist() == other.times.tolist()
            assert one.values.tolist() == pytest.approx(other.values.tolist(), rel=1e-6)


@pytest.mark.parametrize(("start", "end", "step"), [(0.0, 0.0, 60.0), (17.3, -71.9, 0.5), (2.0, -3.0, 700.0)])
def test_steps_tell_means_extremes_and_when_they_ended(
    store: Store, homes: Homes, start: float, end: float, step: float
) -> None:
    """Of every metric and subject that is known in them, also of those longer than a time-series database looks back."""

    asked: Any = {"start": BEGIN + start, "end": END + end, "step": step}
    for scope in ("gpu", "host", "network"):
        expected = homes.truth.series(query(scope, METRICS[scope], **asked))
        found = store.series(query(scope, METRICS[scope], **asked))

        assert [one[:2] for one in expected] == [one[:2] for one in found]
        for one, other in zip(expected, found, strict=True):
            check_alike(one, other)


def check_alike(one: Series, other: Series) -> None:
    """Two say the same; means of minutes are kept with seven digits."""
    assert one.times.tolist() == other.times.tolist()
    assert one.values.tolist() == pytest.approx(other.values.tolist(), rel=1e-6)
    assert one.lows.tolist() == other.lows.tolist()
    assert one.highs.tolist() == other.highs.tolist()
    assert one.counts is not None
    assert other.counts is not None
    assert one.counts.tolist() == other.counts.tolist()
    if one.metric != "sm_active_ratio":  # a disk says when the last frame was, known or not
        assert cut(one.ends) == cut(other.ends)


def test_a_scan_gives_whole_rows_in_the_order_of_time(
    store: Store, homes: Homes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One for each subject and moment, whichever of the metrics are known then, in several parts."""

    metrics = METRICS["gpu"]
    asked: Any = {"start": BEGIN + 3.0, "end": END}
    monkeypatch.setattr(reader, "_MAX_SCAN_US", 130_000_000)
    monkeypatch.setattr(series_query, "_MAX_SCAN_MS", 130_000)
    expected = rows(list(homes.truth.scan(query("gpu", metrics, **asked))))
    parts = list(store.scan(query("gpu", metrics, **asked)))

    assert expected == rows(parts)
    assert len(parts) >= 9
    moments = np.concatenate([part.times for part in parts])
    assert (np.diff(moments) >= 0).all()


def rows(parts: list[Samples]) -> dict[tuple[float, SeriesKey], list[str]]:
    """The values of all metrics, by moment and subject; none is there twice."""
    found = {}
    for samples in parts:
        columns = [samples.values[metric].tolist() for metric in METRICS["gpu"]]
        for moment, series, *values in zip(
            cut(samples.times), samples.series.tolist(), *columns, strict=True
        ):
            key = moment, samples.keys[series]
            assert key not in found
            found[key] = [str(value) for value in values]
    return found


def test_only_what_is_asked_for_is_told(store: Store, homes: Homes) -> None:
    """Nodes by number, whatever is in their names, and subjects as stores name them."""

    asked: Any
    for asked in (
        {"nodes": {2}},
        {"nodes": {2, 3}, "subjects": {"GPU-3-1", "GPU-2-0", "GPU-1-0"}},
        {"subjects": {"GPU-1-1"}},
        {"nodes": set()},
        {"nodes": {99}},
        {"subjects": set()},
    ):
        expected = known(homes.truth.series(query("gpu", "power_watts", start=BEGIN, end=END, **asked)))

        assert expected == known(store.series(query("gpu", "power_watts", start=BEGIN, end=END, **asked)))
    host = known(store.series(query("host", "cpu_utilization_ratio", start=BEGIN, end=END, nodes={2})))
    assert [SeriesKey(2, "")] == list(host)
    assert [] == store.series(query("host", "cpu_utilization_ratio", start=BEGIN, end=END, subjects={"x"}))


def test_two_times_that_follow_each_other_have_every_sample_once(store: Store) -> None:
    """Wherever the cut is, a sample that is kept to the millisecond is on one side of it."""

    whole = len(
        store.series(query("gpu", "power_watts", start=BEGIN, end=END, subjects={"GPU-1-0"}))[0].times
    )
    for middle in (MIDDLE, MIDDLE + 0.1, MIDDLE + 0.123, MIDDLE + 0.1234, MIDDLE + 0.124):
        parts = [
            store.series(query("gpu", "power_watts", start=start, end=end, subjects={"GPU-1-0"}))[0].times
            for start, end in ((BEGIN, middle), (middle, END))
        ]

        assert whole == sum(map(len, parts))
        assert (parts[1] >= middle).all()


def test_a_long_time_of_which_there_is_little_is_no_trouble(store: Store) -> None:
    """All of history can be asked for."""

    for start, end in ((0.0, 1e10), (float("-inf"), float("inf"))):
        found = store.series(query("gpu", "power_watts", start=start, end=end, subjects={"GPU-1-0"}))
        assert [240] == [len(series.times) for series in found]
    scanned = store.scan(query("gpu", ["power_watts"], start=0.0, end=1e10, subjects={"GPU-1-0"}))
    assert 240 == sum(len(samples.times) for samples in scanned)


@pytest.mark.parametrize("name", ["victoria-metrics", "prometheus"])
def test_what_was_written_just_now_is_told_as_it_is(homes: Homes, name: str) -> None:
    """Time-series databases that make up their newest points are not asked for them."""

    now = math.floor(time.time())
    samples = [(now - 150.0 + second, float(second)) for second in range(150)]
    labels = {"__name__": "gpulse_host_load1", "node": NODES[2], "cluster": "lab"}
    homes.databases[name].write([(labels, samples)])
    asked: Any = {"start": now - 150.0, "end": now + 10.0}

    for step in (1.0, 5.0, 30.0):
        (steps,) = homes.by_name[name].series(query("host", ["load1"], step=step, **asked))
        assert 150 == (0 if steps.counts is None else steps.counts.sum())
        assert steps.highs.tolist() == sorted(set(steps.highs))
        assert (149.0, now - 1.0) == (steps.highs[-1], steps.ends[-1])
        expected: dict[Statistic, float] = {"last": 149.0, "max": 149.0, "min": steps.lows[-1]}
        for statistic, value in expected.items():
            (series,) = homes.by_name[name].series(
                query("host", "load1", step=step, statistic=statistic, **asked)
            )
            assert steps.times.tolist() == series.times.tolist()
            assert value == series.values[-1]


@pytest.mark.parametrize(
    "ask",
    [
        lambda store: store.series(query("gpu", "no_such_metric", start=0.0, end=1.0)),
        lambda store: store.series(query("planet", "mass", start=0.0, end=1.0)),
        lambda store: store.series(query("gpu", "power_watts", start=0.0, end=1.0, step=0.0)),
        lambda store: store.series(
            query("gpu", "power_watts", start=0.0, end=1.0, step=1.0, statistic="mode")
        ),
        lambda store: store.series(query("gpu", "power_watts", start=float("nan"), end=1.0)),
        lambda store: list(store.scan(query("gpu", ['x"} or vector(1)'], start=0.0, end=1.0))),
        lambda store: store.series(query("gpu", ["no_such_metric"], start=0.0, end=1.0, step=1.0)),
    ],
)
def test_what_makes_no_sense_is_refused(store: Store, ask: Callable[[Store], object]) -> None:
    """No name of any other kind gets into a question."""

    with pytest.raises(UsageError):
        ask(store)


def test_what_is_no_series_is_only_on_disk(homes: Homes) -> None:
    """Processes never get into a time-series database."""

    asked: Any = {"start": BEGIN, "end": END}
    assert homes.truth.series(query("process", "gpu_memory_bytes", **asked))
    for name in ("victoria-metrics", "prometheus"):
        tsdb = homes.by_name[name]
        assert [] == tsdb.series(query("process", "gpu_memory_bytes", **asked))
        assert [] == list(tsdb.scan(query("process", ["gpu_memory_bytes"], **asked)))
        assert [] == tsdb.series(query("process", ["gpu_memory_bytes"], step=60.0, **asked))
        assert [] == tsdb.gpu_holders(query(**asked))
        assert [] == tsdb.gpu_time(query(**asked))


@pytest.mark.parametrize("name", ["victoria-metrics", "prometheus"])
def test_nobody_waits_past_a_deadline(homes: Homes, name: str) -> None:
    """A backend gives up, and what is on disk is the answer, which says that it is incomplete."""

    late = query("gpu", "power_watts", start=BEGIN, end=END, deadline=time.monotonic() - 1.0)
    with pytest.raises(GpulseError, match="did not answer within 0 s"):
        homes.by_name[name].series(late)
    with collect_missing() as incomplete:
        found = FederatedStore(homes.recent, homes.by_name[name], now=lambda: END).series(late)

    assert [FRAMES - HALF] * 6 == [len(series.times) for series in found]
    assert 1 == len(incomplete)
