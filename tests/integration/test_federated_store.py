"""A head's disk and a time-series database as one store: history that is not on the disk any more, or never was."""

from __future__ import annotations

import io
import math
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from gpulse.cluster.head.operations import ReportRunner
from gpulse.cluster.protocol import requests as r
from gpulse.errors import DiskError, GpulseError
from gpulse.export.session_file.file_writer import write_session
from gpulse.model.session import Session
from gpulse.store.federated import FederatedStore
from gpulse.store.local import LocalStore
from gpulse.store.merge import merge_shares
from gpulse.store.node_registry import NodeRegistry
from gpulse.store.store import GpuHolding, GpuShare, Query, Samples, Series, Store
from gpulse.store.tsdb.config import TsdbError
from gpulse.store.tsdb.promql import PromqlClient
from gpulse.store.tsdb.store import TsdbStore
from tests.contract.store_lab import (
    BEGIN,
    END,
    EVERY,
    FRAMES,
    HALF,
    LATE,
    METRICS,
    MIDDLE,
    NODES,
    Feeder,
    Stored,
    fill,
    series_of,
)
from tests.integration.tsdb_servers import VictoriaMetrics
from tests.queries import query
from tests.unit.report_lab import as_json


class Lab(NamedTuple):
    """A store that has everything, one that dropped half of it, and a backend that has everything."""

    stored: Stored
    samples: TsdbStore


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """All of it, once."""
    directory: Path = tmp_path_factory.mktemp("federated")
    stored = fill(directory)
    with stored.whole, stored.recent, VictoriaMetrics(directory / "backend") as backend:
        backend.write(series_of(stored.whole))
        client = PromqlClient(backend.tsdb, timeout_seconds=10.0)
        client.vector("vector(1)")  # the connection stays: no test opens one
        yield Lab(stored, TsdbStore(client, stored.whole.nodes))
        client.close()


class Counting(Store):
    """A backend that remembers for which stretches of time it was asked."""

    def __init__(self, samples: TsdbStore | None) -> None:
        self._samples = samples
        self.asked: list[tuple[float, float, list[int] | None]] = []
        self.error: GpulseError | None = None
        self.own: LocalStore | None = None
        """Whose GPU time is a part of the answer."""

    def _note(self, query: Query) -> None:
        nodes = None if query.nodes is None else sorted(query.nodes)
        self.asked.append((query.start - BEGIN, query.end - BEGIN, nodes))
        if self.error is not None:
            raise self.error

    def series(self, query: Query) -> list[Series]:
        """As the time-series database."""
        self._note(query)
        return [] if self._samples is None else self._samples.series(query)

    def scan(self, query: Query) -> Iterator[Samples]:
        """As the time-series database."""
        self._note(query)
        return iter(()) if self._samples is None else self._samples.scan(query)

    def gpu_holders(self, query: Query) -> list[GpuHolding]:
        """One process that was here earlier too."""
        self._note(query)
        if query.start > BEGIN + 10.0:
            return []
        return [GpuHolding(1, 4000, None, "GPU-1-0", BEGIN + 10.0, BEGIN + 590.0, 5.0e9, 9.0e9, 0.25)]

    def gpu_time(self, query: Query) -> list[GpuShare]:
        """What it had then."""
        self._note(query)
        first, last = BEGIN + 10.0, BEGIN + 590.0
        here = [] if self.own is None else self.own.gpu_time(query)
        if query.start > first:
            return here
        there = GpuShare(
            1, 4000, None, "GPU-1-0", first, last, 580.0, 580.0, 290.0, 60.0, 1000.0, 9.0e9, 600.0
        )
        return merge_shares([*here, there])


def reports_of(store: Store) -> ReportRunner:
    """The questions of the API to a store."""
    return ReportRunner(store, NodeRegistry(store.nodes().values()), lambda: float(EVERY))


@pytest.mark.parametrize(
    "asked",
    [
        {"metrics": METRICS["gpu"], "scope": "gpu", "points": 30, "spread": True},
        {"metrics": METRICS["gpu"], "scope": "gpu", "points": 600, "spread": False},
        {"metrics": METRICS["host"], "scope": "host", "points": 3, "spread": True},
        {"metrics": METRICS["network"], "scope": "network", "points": 100, "spread": False},
    ],
)
async def test_charts_do_not_know_the_difference(lab: Lab, asked: dict[str, Any]) -> None:
    """Gauges, their spread, and counters as rates, also where the disk's part begins."""

    federated = FederatedStore(lab.stored.recent, lab.samples, now=lambda: END)
    given = {"nodes": (), "gpus": (), "start": BEGIN, "end": END, **asked}

    expected = as_json(await reports_of(lab.stored.whole).history(r.GetHistory(**given), END))
    found = as_json(await reports_of(federated).history(r.GetHistory(**given), END))

    assert len(expected["series"]) >= 3
    assert {**expected, "series": None} == {**found, "series": None}
    for one, other in zip(expected["series"], found["series"], strict=True):
        for column in {"values", "lows", "highs"} & one.keys():
            assert known(one.pop(column)) == pytest.approx(known(other.pop(column)), rel=1e-3, nan_ok=True)
        assert one == other
    assert federated.outage is None


def known(values: list[float | None]) -> list[float]:
    """NaN where nothing is known."""
    return [math.nan if value is None else value for value in values]


async def test_a_query_of_the_api_does_not_know_the_difference(lab: Lab) -> None:
    """With every statistic, and without steps."""

    federated = FederatedStore(lab.stored.recent, lab.samples, now=lambda: END)
    for step, statistic in ((None, "mean"), (60.0, "mean"), (60.0, "max"), (300.0, "last")):
        given: Any = {"metric": "power_watts", "scope": "gpu", "nodes": (), "gpus": ("gamma:1",)}
        given |= {"start": BEGIN, "end": END, "step": step, "statistic": statistic}

        expected = as_json(await reports_of(lab.stored.whole).query(r.QueryMetric(**given), END))
        found = as_json(await reports_of(federated).query(r.QueryMetric(**given), END))

        (one,), (other,) = expected.pop("series"), found.pop("series")
        assert expected == found
        assert one.pop("times") == pytest.approx(other.pop("times"), abs=0.001)
        assert one.pop("values") == pytest.approx(other.pop("values"), rel=1e-6)
        assert one == other


@pytest.mark.parametrize("output_format", ["json", "csv"])
def test_the_file_of_a_session_does_not_know_the_difference(lab: Lab, output_format: Any) -> None:
    """A session that began before what is on disk is written whole, byte for byte."""

    federated = FederatedStore(lab.stored.recent, lab.samples, now=lambda: END)
    session = Session("s1", "run", BEGIN + 100.0, BEGIN, 5000, state="finished", end=END - 100.0)
    files = []
    for store in (lab.stored.whole, federated.strict):
        with io.BytesIO() as file:
            write_session(store, session, file, output_format)
            files.append(file.getvalue())

    assert len(files[0]) > 20_000
    assert files[0] == files[1]


def test_what_is_on_disk_is_not_asked_for_elsewhere(lab: Lab) -> None:
    """Only what was dropped, and the minutes at its edge."""

    backend = Counting(lab.samples)
    federated = FederatedStore(lab.stored.recent, backend, now=lambda: END)

    federated.series(query("gpu", "power_watts", start=MIDDLE + 120.0, end=END - 60.0))
    assert [] == backend.asked

    federated.series(query("gpu", "power_watts", start=BEGIN, end=END - 60.0))
    ((start, end, nodes),) = backend.asked
    assert (0.0, sorted(NODES)) == (start, nodes)
    assert HALF * EVERY <= end <= HALF * EVERY + 120.0


def test_what_is_dropped_while_it_runs_is_found_elsewhere(lab: Lab, tmp_path: Path) -> None:
    """As soon as it is gone."""

    backend = Counting(lab.samples)
    with LocalStore(str(tmp_path / "data")) as archive:
        federated = FederatedStore(archive, backend, now=lambda: END)
        feeder = Feeder(archive, 1)
        for numbers in (range(HALF), range(HALF, FRAMES)):
            federated.committed(feeder.feed(numbers))
            archive.seal()
        asked: Any = {"start": BEGIN + 60.0, "end": END, "nodes": {1}, "subjects": {"GPU-1-0"}}
        before = federated.series(query("gpu", "power_watts", **asked))
        assert [] == backend.asked

        archive.tidy(END, keep_seconds=END - MIDDLE - 1.0, limit_bytes=None)
        after = federated.series(query("gpu", "power_watts", **asked))

        assert 1 == len(backend.asked)
        assert [FRAMES - 12] == [len(series.times) for series in before]
        assert before[0].values.tolist() == after[0].values.tolist()


def test_what_no_backend_takes_stays_on_disk_for_longer(lab: Lab, tmp_path: Path) -> None:
    """Old samples of GPUs and hosts come from the backend, and who held GPUs is told as before, also after a restart."""

    now = BEGIN + 5000.0
    with LocalStore(str(tmp_path)) as archive:
        federated = FederatedStore(archive, lab.samples, now=lambda: now)
        feeder = Feeder(archive, 1)
        for numbers in (range(FRAMES), range(960, 972), range(972, 984)):
            federated.committed(feeder.feed(numbers))
            archive.seal()
        before = all_told(federated)
        assert before == all_told(archive)

        assert [] == archive.tidy(now, keep_seconds=100.0, limit_bytes=None, metadata_seconds=1e6)

        assert [True, False] == [segment.thinned is not None for segment in archive.segments]
        assert [] == archive.series(query("gpu", "power_watts", start=BEGIN, end=END))
        assert before == all_told(federated)
    with LocalStore(str(tmp_path)) as archive:
        federated = FederatedStore(archive, lab.samples, now=lambda: now)
        assert before == all_told(federated)

        dropped = archive.tidy(now, keep_seconds=100.0, limit_bytes=None, metadata_seconds=100.0)
        assert 1 == len(dropped)
        assert [] == federated.gpu_time(query(start=BEGIN, end=END))


def all_told(store: Store) -> Any:
    """What a store says of a node's samples and processes."""
    span: Any = {"start": BEGIN, "end": END, "nodes": {1}}
    shares = [one for share in store.gpu_time(query(**span)) for one in share]
    power, busy = (
        store.series(query("gpu", "power_watts", **span)),
        store.series(query("host", METRICS["host"][0], **span)),
    )
    steps = store.series(query("gpu", ["power_watts", "memory_used_bytes"], step=60.0, **span))
    return (
        [(one.key, one.values.tolist()) for one in (*power, *busy)],
        [(one.key, one.metric, one.counts.tolist()) for one in steps if one.counts is not None],
        [one[:6] for one in store.gpu_holders(query(**span))],
        [pytest.approx(one, rel=1e-5) if isinstance(one, float) else one for one in shares],
    )


def test_frames_that_another_head_had_are_found_and_none_is_doubled(lab: Lab, tmp_path: Path) -> None:
    """Numbers of frames say that some are missing, however few; a node that was never here is found, too."""

    backend = Counting(lab.samples)
    with LocalStore(str(tmp_path / "data")) as archive:
        federated = FederatedStore(archive, backend, now=lambda: END)
        feeder = Feeder(archive, 1)
        Feeder(archive, 2)
        for numbers in (range(30, 100), range(104, FRAMES)):
            federated.committed(feeder.feed(numbers))
        for start in (BEGIN, BEGIN + 400.0):
            expected = lab.stored.whole.series(
                query("gpu", "power_watts", start=start, end=END, nodes={1, 2})
            )
            found = federated.series(query("gpu", "power_watts", start=start, end=END))

            assert [one.key for one in expected] == [one.key for one in found]
            assert [one.values.tolist() for one in expected] == [one.values.tolist() for one in found]
        samples = federated.scan(query("gpu", ["power_watts"], start=BEGIN, end=END))
        assert 4 * FRAMES == sum(len(part.times) for part in samples)
        steps = federated.series(query("gpu", ["power_watts"], start=BEGIN, end=END, step=60.0, nodes={1}))
        assert [[12] * 20] * 2 == [one.counts.tolist() for one in steps if one.counts is not None]


def test_a_backend_that_does_not_answer_leaves_what_is_on_disk(lab: Lab) -> None:
    """It is told, not asked again at once, and nothing with a hole is made of it."""

    backend, now = Counting(lab.samples), [END]
    federated = FederatedStore(lab.stored.recent, backend, now=lambda: now[0])
    backend.error = TsdbError("the backend is away", hint="start it")
    ask: Any = {"start": BEGIN, "end": END, "nodes": {1}, "subjects": {"GPU-1-0"}}

    for _ in range(3):
        (series,) = federated.series(query("gpu", "power_watts", **ask))
        assert BEGIN + HALF * EVERY + LATE == pytest.approx(series.times[0])
        now[0] += 1.0
    assert 1 == len(backend.asked)
    assert federated.outage == (END, "the backend is away", "start it")
    with pytest.raises(TsdbError):
        list(federated.scan(query("gpu", ["power_watts"], **ask)))
    with pytest.raises(TsdbError):
        federated.strict.series(query("gpu", "power_watts", **ask))

    backend.error = None
    now[0] += 60.0
    (series,) = federated.series(query("gpu", "power_watts", **ask))
    assert FRAMES == len(series.times)
    assert federated.outage is None


def test_a_backend_that_hangs_is_waited_for_by_one_alone(lab: Lab) -> None:
    """Those who ask meanwhile get what is on disk at once, and for a while after."""

    now, hanging, leave = [END], threading.Event(), threading.Event()

    class Hanging(Counting):
        def series(self, _query: Query) -> list[Series]:
            self.asked.append((0.0, 0.0, None))
            if len(self.asked) > 1:
                hanging.set()
                assert leave.wait(60.0)
                now[0] += 10.0
            raise TsdbError("no answer")

    backend = Hanging(None)
    federated = FederatedStore(lab.stored.recent, backend, now=lambda: now[0])
    ask: Any = {"start": BEGIN, "end": END - 60.0, "nodes": {1}, "subjects": {"GPU-1-0"}}
    federated.series(query("gpu", "power_watts", **ask))
    now[0] += 6.0
    patient = threading.Thread(target=federated.series, args=(query("gpu", "power_watts", **ask),))
    patient.start()
    assert hanging.wait(60.0)

    assert 1 == len(federated.series(query("gpu", "power_watts", **ask)))
    leave.set()
    patient.join()
    now[0] += 29.0
    assert 1 == len(federated.series(query("gpu", "power_watts", **ask)))
    assert 2 == len(backend.asked)
    now[0] += 2.0
    federated.series(query("gpu", "power_watts", **ask))
    assert 3 == len(backend.asked)


def test_a_session_that_is_only_in_a_backend_that_is_away_is_not_written_empty(lab: Lab) -> None:
    """An error is better than a file without GPUs."""

    backend = Counting(None)
    backend.error = TsdbError("the backend is away", hint="start it")
    federated = FederatedStore(lab.stored.recent, backend, now=lambda: END)
    session = Session("s1", "run", BEGIN + 100.0, BEGIN, 5000, state="finished", end=BEGIN + 200.0)

    with pytest.raises(TsdbError), io.BytesIO() as file:
        write_session(federated.strict, session, file, "json")


def test_a_real_backend_that_dies_and_comes_back(lab: Lab, tmp_path: Path) -> None:
    """Nothing has to be done for it."""

    now = [END]
    ask: Any = {"start": BEGIN, "end": END, "nodes": {1}, "subjects": {"GPU-1-0"}}
    with VictoriaMetrics(tmp_path) as backend, closing(PromqlClient(backend.tsdb)) as client:
        backend.write(series_of(lab.stored.whole))
        samples = TsdbStore(client, lab.stored.whole.nodes)
        federated = FederatedStore(lab.stored.recent, samples, now=lambda: now[0])
        assert [FRAMES] == [
            len(series.times) for series in federated.series(query("gpu", "power_watts", **ask))
        ]

        backend.kill()
        assert [FRAMES - HALF] == [
            len(series.times) for series in federated.series(query("gpu", "power_watts", **ask))
        ]
        assert federated.outage is not None
        assert "cannot reach" in federated.outage.message

        backend.start()
        backend.write(series_of(lab.stored.whole))
        now[0] += 6.0
        assert [FRAMES] == [
            len(series.times) for series in federated.series(query("gpu", "power_watts", **ask))
        ]
        assert federated.outage is None


def test_processes_of_elsewhere_come_from_the_tables(lab: Lab) -> None:
    """Added to what is on disk, and asked for only where that is not whole."""

    tables = Counting(None)
    tables.own = here = lab.stored.recent
    federated = FederatedStore(here, None, tables, now=lambda: END)

    held = {one[:4]: one for one in federated.gpu_holders(query(start=BEGIN, end=END))}
    key = (1, 4000, None, "GPU-1-0")
    (mine,) = [one for one in here.gpu_holders(query(start=BEGIN, end=END)) if one[:4] == key]
    assert (BEGIN + 10.0, mine.last, 9.0e9) == (held[key].first, held[key].last, held[key].memory_max)
    assert mine.sm_mean is not None
    assert 0.25 < (held[key].sm_mean or 0.0) < mine.sm_mean

    shares = {one[:4]: one for one in federated.gpu_time(query(start=BEGIN, end=END))}
    (before,) = [one for one in here.gpu_time(query(start=BEGIN, end=END)) if one[:4] == key]
    assert shares[key].seconds == pytest.approx(before.seconds + 580.0)
    assert shares[key].first == BEGIN + 10.0
    assert all(end <= HALF * EVERY + 120.0 for start, end, _ in tables.asked if not start)

    tables.asked.clear()
    assert len(federated.gpu_time(query(start=MIDDLE + 120.0, end=END - 60.0))) == 2 * len(NODES)
    assert [] == tables.asked

    tables.error = DiskError("the file server is gone")
    assert all_told(federated)[-1] == [
        one for share in here.gpu_time(query(start=BEGIN, end=END, nodes={1})) for one in share
    ]
    assert federated.outage is not None
