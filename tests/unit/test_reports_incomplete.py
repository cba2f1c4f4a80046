"""What answers lack is told beside them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpulse.cluster.head.operations import ReportRunner
from gpulse.cluster.protocol import requests as r
from gpulse.cluster.protocol.requests import Duration
from gpulse.errors import DiskError, GpulseError, RefusedError
from gpulse.model.session import Interruption, Session
from gpulse.reports.job_report import JobReport
from gpulse.store.federated import FederatedStore
from gpulse.store.incomplete_answers import collect_missing, note_missing
from gpulse.store.node_registry import NodeRegistry
from gpulse.store.store import Query
from tests.unit.report_lab import BEGIN, Held, Lab

NOW = BEGIN + 1000.0
GONE = DiskError("the file server is gone")


class Silent:
    """Somebody to ask who has nothing, or does not answer."""

    def __init__(self) -> None:
        self.error: GpulseError | None = None

    def series(self, _query: Query) -> list[Any]:
        """Nothing, or an error."""
        if self.error is not None:
            raise self.error
        return []

    gpu_holders = gpu_time = processes = events = findings = job_events = series

    def job_names(self) -> list[str]:
        """Nothing, or an error."""
        return self.series(Query(0.0, 1.0))

    sessions = gpus = job_names


class Joined:
    """A head that has a minute of a node, and asks others for the rest."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        lab = stack.enter_context(Lab(directory, ("0",)))
        lab.add([lab.frame(second, Held(100)) for second in range(0, 60, 5)])
        self.tsdb, self.database, self.now = Silent(), Silent(), NOW
        elsewhere: Any = self.tsdb, self.database
        store = FederatedStore(lab.archive, *elsewhere, now=lambda: self.now)
        self.reports = ReportRunner(store, NodeRegistry(store.nodes().values()), lambda: 5.0)

    async def job(self, name: str) -> JobReport:
        """The report about a job."""
        return await self.reports.job(r.GetJob(job=name), NOW)

    async def answers(self) -> dict[str, Any]:
        """To each question."""
        span: dict[str, Any] = {"start": float(BEGIN), "end": NOW}
        chart: dict[str, Any] = {**span, "points": 10}
        processes = r.GetHistory(metrics=("sm_ratio",), scope="process", **chart)
        power = r.GetHistory(metrics=("power_watts",), **chart)
        point = r.QueryMetric(metric="power_watts", step=Duration(60.0), **span)
        return {
            "usage": await self.reports.usage(r.GetUsage(**span), NOW),
            "processes": await self.reports.processes(r.GetProcesses(**span), NOW),
            "process history": await self.reports.history(processes, NOW),
            "history": await self.reports.history(power, NOW),
            "query": await self.reports.query(point, NOW),
        }


@pytest.fixture
def joined(tmp_path: Path) -> Iterator[Joined]:
    """One head, everybody answers."""
    with ExitStack() as stack:
        yield Joined(tmp_path, stack)


async def lacking(joined: Joined) -> dict[str, list[str]]:
    """What is missing from which answers."""
    return {name: answer.incomplete for name, answer in (await joined.answers()).items()}


async def test_answers_say_what_they_lack(joined: Joined) -> None:
    """Also those for which nobody was asked since it is no use at the moment, and none any more afterwards."""
    nothing = await lacking(joined)
    assert [[]] * 5 == list(nothing.values())

    joined.database.error = GONE
    told = ["some data is missing: the file server is gone"]
    assert {**nothing, "usage": told, "processes": told, "process history": told} == await lacking(joined)

    joined.tsdb.error, joined.database.error = GONE, None
    joined.now += 60.0
    assert {**nothing, "history": told, "query": told} == await lacking(joined)

    joined.tsdb.error = None
    joined.now += 60.0
    assert nothing == await lacking(joined)


async def test_a_job_that_cannot_be_found_now_may_exist(joined: Joined) -> None:
    """While a backend does not answer, nobody knows that there is no such job."""
    with pytest.raises(RefusedError, match="there is no job") as refusal:
        await joined.job("4711")
    assert 404 == refusal.value.status

    joined.database.error = GONE
    joined.now += 60.0
    with pytest.raises(RefusedError, match="in the data that is available now") as refusal:
        await joined.job("4711")
    assert (503, "some data is missing: the file server is gone") == (
        refusal.value.status,
        refusal.value.hint,
    )


def test_each_thing_is_heard_once_by_whoever_asked() -> None:
    """A text is no longer than people read, and what nobody listens to is forgotten."""
    note_missing("nobody hears it")
    with collect_missing() as heard:
        for _ in range(3):
            note_missing("a part")
        with collect_missing() as inner:
            note_missing("another one")
        note_missing("x" * 1000)
        for number in range(100):
            note_missing(str(number))

    assert (["another one"], ["a part", f"{'x' * 299}…", "0"]) == (inner, heard[:3])
    assert 20 == len(heard)


def test_samples_that_heads_do_not_share_are_named(tmp_path: Path) -> None:
    """Without a time-series database a head has no samples of nodes that report to another one."""
    with Lab(tmp_path, ("0",)) as lab:
        register = NodeRegistry(lab.archive.nodes().values())
        other = register.add_from_other_head("far", "m-far", BEGIN, name="far", facts={}, labels={})
        store = FederatedStore(lab.archive, register=register, now=lambda: NOW)
        query = Query(float(BEGIN), NOW, metrics=("power_watts",), step=60.0)
        with collect_missing() as incomplete:
            store.series(query)
            store.series(replace(query, nodes=frozenset({other.id})))
        with collect_missing() as own:
            store.series(replace(query, nodes=frozenset({1})))

    assert ["far"] == [text.split()[2] for text in incomplete]
    assert "--remote-write" in incomplete[0]
    assert [] == own


class _Recorder:
    """A store that remembers the deadlines of questions."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.deadlines: list[float | None] = []

    def __getattr__(self, name: str) -> Any:
        """Return a method of the store."""

        def ask(*arguments: Any) -> Any:
            self.deadlines += [one.deadline for one in arguments if isinstance(one, Query)]
            return getattr(self._store, name)(*arguments)

        return ask


async def test_every_question_of_a_job_report_and_of_a_coverage_has_a_deadline(tmp_path: Path) -> None:
    """All questions of one report have the same one, so that a slow backend cannot add them up."""
    with Lab(tmp_path, ("0",)) as lab:
        lab.add([lab.frame(second, Held(100)) for second in range(0, 60, 5)])
        store: Any = _Recorder(lab.archive)
        reports = ReportRunner(store, NodeRegistry(lab.archive.nodes().values()), lambda: 5.0)
        await reports.job(r.GetJob(job="100", kind="process", points=10), NOW)
        of_job, store.deadlines = store.deadlines, []
        interruption = Interruption(BEGIN + 20.0, BEGIN + 30.0)
        session = Session("s1", "run", BEGIN, BEGIN, 1000, interruptions=(interruption,))
        await reports.coverage(session)

    assert len(of_job) > 5
    assert 1 == len(set(of_job))
    assert None not in of_job
    assert 2 == len(store.deadlines)
    assert None not in store.deadlines


async def test_a_coverage_that_lacks_something_is_computed_again(joined: Joined) -> None:
    """Once the backend answers, it is complete."""
    interruption = Interruption(BEGIN + 20.0, BEGIN + 30.0)
    session = Session("s1", "run", BEGIN, BEGIN, 1000, interruptions=(interruption,))
    joined.tsdb.error = GONE
    await joined.reports.coverage(session)
    assert not joined.reports._coverage
    joined.tsdb.error = None
    joined.now += 100.0
    await joined.reports.coverage(session)
    assert 1 == len(joined.reports._coverage)
