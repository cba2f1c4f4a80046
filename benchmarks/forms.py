"""What each form of history buys and costs: the same questions with all forms, and with one of them left out."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import NamedTuple

from benchmarks import measure
from benchmarks.job import add_job
from benchmarks.measure import Report, Spread, Table, Target
from benchmarks.past import Maker, Size, make_metadata, make_recent
from benchmarks.store import Looped, make_node, make_store
from gpulse.cluster.head.operations import ReportRunner
from gpulse.cluster.protocol.requests import GetHistory, GetJob, GetUsage, Time
from gpulse.model.metric_catalog import CATALOG
from gpulse.reports.job_gpu_use import METRICS
from gpulse.store.history import gpu_share_files, rollup
from gpulse.store.history.duckdb_query import SealedHistory
from gpulse.store.history.parquet import open_database, write_file
from gpulse.store.history.reader import HistoryReader
from gpulse.store.history.recent_frames import RecentFrames
from gpulse.store.history.segments import SHARE_SECONDS, SealedFile, Segment, read_segments
from gpulse.store.local import StoreReader
from gpulse.store.node_registry import NodeRegistry
from gpulse.store.store import Query

NAME = "forms"
_RECORDINGS = measure.ROOT / "tests" / "data" / "recordings"
_GPUS = 8
_HOUR, _DAY = 3600, 86_400
_METRICS = tuple(dict.fromkeys((*gpu_share_files.GPU_METRICS, *METRICS, *CATALOG["gpu"])))[:45]
_CHART = _METRICS[:6]
_POINTS = 600
_HUNDRED_GPUS = 12
"""This many nodes have about a hundred GPUs."""
_MAX_ONE_GPU_SECONDS, _MAX_ALL_GPUS_SECONDS = 0.150, 1.0
_MAX_DIVIDED_DAYS = 7
"""Without files of GPU time a question about more days takes minutes."""
_FLEET_HOURS = 2
_SEAL_SECONDS = 600

Ask = Callable[[], Awaitable[object]]
Forms = tuple[tuple[Segment, ...], tuple[Segment, ...]]
"""Segments and summaries of a history."""


class Cost(NamedTuple):
    """What one answer took, in seconds."""

    wall: float
    cpu: float


class _Fixed(SealedHistory):
    """A history that does not look at its directory again, so that forms stay left out."""

    def refresh(self) -> int:
        return self.sealed_to

    def use(self, forms: Forms) -> None:
        """Answer from these segments and summaries."""
        self.segments, self.summaries = forms


def _without(segments: Iterable[Segment], seconds: int) -> tuple[Segment, ...]:
    """Return segments without the files whose rows cover this much time."""
    return tuple(
        segment._replace(files=tuple(file for file in segment.files if file.seconds != seconds))
        for segment in segments
    )


def _variants(history: SealedHistory) -> dict[str, Forms]:
    segments, summaries = history.segments, history.summaries
    return {
        "all forms": (segments, summaries),
        "no day summaries": (segments, ()),
        "no GPU time in summaries": (segments, _without(summaries, SHARE_SECONDS)),
        "no files of GPU time": (_without(segments, SHARE_SECONDS), _without(summaries, SHARE_SECONDS)),
    }


def _answered(history: _Fixed, forms: Forms, ask: Ask) -> Cost:
    history.use(forms)
    begun, used = time.perf_counter(), time.process_time()
    asyncio.run(ask())  # type: ignore[arg-type]
    return Cost(time.perf_counter() - begun, time.process_time() - used)


class _Questions:
    """What people ask about days and weeks."""

    def __init__(self, store: StoreReader, size: Size) -> None:
        self._reports = ReportRunner(store, NodeRegistry(store.nodes().values()), lambda: 1.0)
        self._size = size

    def series(self, days: int, nodes: int, metrics: Sequence[str]) -> Ask:
        """Return the question for charts of all GPUs of some nodes; of one GPU when there is no node."""
        request = GetHistory(
            metrics=tuple(metrics),
            nodes=tuple(f"node-{node}" for node in range(nodes)),
            gpus=() if nodes else ("node-3:5",),
            start=self._start(days),
            points=_POINTS,
            spread=True,
        )
        return partial(self._reports.history, request, float(self._size.end))

    def usage(self, days: int) -> Ask:
        """Return the question who used the GPUs."""
        return partial(self._reports.usage, GetUsage(start=self._start(days)), float(self._size.end))

    def job(self) -> Ask:
        """Return the question for a report about a job of one day."""
        request = GetJob(job="4711", start=Time(self._size.end - _DAY))
        return partial(self._reports.job, request, float(self._size.end))

    def _start(self, days: int) -> Time:
        oldest = self._size.end - self._size.days * _DAY + _HOUR
        return Time(max(self._size.end - days * _DAY, oldest))


def _ask_all(report: Report, history: _Fixed, questions: _Questions, size: Size, takes: int) -> None:
    variants = _variants(history)
    series_forms = ("all forms", "no day summaries")
    table = Table(
        "CPU time of an answer, and how many times as much without a form:", ("question", *variants)
    )
    gpus = size.nodes * _GPUS
    for days in (1, 7, 30):
        for nodes in (0, min(_HUNDRED_GPUS, size.nodes), size.nodes):
            count = nodes * _GPUS or 1
            what = f"{days} d of {count} GPUs, {1 if nodes else len(_CHART)} metrics"
            ask = questions.series(days, nodes, _CHART[:1] if nodes else _CHART)
            costs = _in_turn(history, {name: variants[name] for name in series_forms}, ask, takes)
            table.rows.append(_row(what, costs, variants))
            if days == 30 and count in (1, gpus):
                most = _MAX_ONE_GPU_SECONDS if count == 1 else _MAX_ALL_GPUS_SECONDS
                report.targets.append(_target(what, costs["all forms"], most))
    for days in (1, 7, 30):
        forms = dict(variants)
        if days > _MAX_DIVIDED_DAYS:
            del forms["no files of GPU time"]
        what = f"who used {gpus} GPUs in {days} d"
        costs = _in_turn(history, forms, questions.usage(days), takes)
        table.rows.append(_row(what, costs, variants))
        if days == 30:
            report.targets.append(_target(what, costs["all forms"], _MAX_ALL_GPUS_SECONDS))
    costs = _in_turn(history, variants, questions.job(), takes)
    table.rows.append(_row("report about a job of 8 GPUs for a day", costs, variants))
    report.tables.append(table)


def _in_turn(history: _Fixed, forms: Mapping[str, Forms], ask: Ask, takes: int) -> dict[str, list[Cost]]:
    """Ask with each choice of forms in turn; the first round is not valid_summaries."""
    contenders = {name: partial(_answered, history, some, ask) for name, some in forms.items()}
    return {name: costs[1:] for name, costs in measure.in_turn(takes + 1, contenders).items()}


def _row(what: str, costs: Mapping[str, list[Cost]], variants: Iterable[str]) -> tuple[str, ...]:
    cpu = {name: Spread.of([cost.cpu for cost in some]).median for name, some in costs.items()}
    whole = cpu["all forms"]
    return (
        what,
        f"{whole * 1e3:.0f} ms",
        *(f"{cpu[name] / whole:.1f} x" if name in cpu else "" for name in variants if name != "all forms"),
    )


def _target(what: str, costs: Sequence[Cost], most: float) -> Target:
    wall = Spread.of([cost.wall for cost in costs])
    return Target(what, wall.text(1e3, 0, " ms"), f"{most * 1e3:.0f} ms", wall.median <= most)


def _fleet(report: Report, base: Path, nodes: int, takes: int) -> None:
    """Measure minutes beside samples, and what making each form costs, on numbers of real GPUs."""
    looped = Looped(sorted(_RECORDINGS.glob("*.jsonl.gz")), seed=4)
    seconds = _FLEET_HOURS * _HOUR + _SEAL_SECONDS
    made = make_store(base, {node: make_node(looped, node, seconds) for node in range(1, nodes + 1)}, seconds)
    segments = read_segments(f"{base}/history")
    merged = [segment for segment in segments if segment.is_compacted]
    start = min(file.start for segment in merged for file in segment.files) / 1e6
    with closing(_Fixed(base)) as history:
        bare = tuple(one._replace(is_compacted=False) for one in _without(segments, rollup.FINE_SECONDS))
        reader = HistoryReader(history, RecentFrames({}))
        forms = {"all forms": (tuple(segments), ()), "no minutes": (bare, ())}
        table = Table(
            f"Minutes, {_FLEET_HOURS} hours in steps of a minute:", ("question", "all forms", "no minutes")
        )
        for count in (1, nodes):
            query = Query(
                start // 60 * 60,
                start + _FLEET_HOURS * _HOUR,
                metrics=("power_watts",),
                step=60.0,
                nodes=frozenset(range(1, count + 1)),
            )
            costs = _in_turn(history, forms, partial(asyncio.to_thread, reader.series, query), takes)
            table.rows.append(_row(f"{count * _GPUS} GPUs, 1 metric", costs, forms))
    report.tables += [table, _costs(base, merged, made.seal_seconds + made.compact_seconds, made.samples)]


def _costs(base: Path, merged: Sequence[Segment], spent: float, samples: int) -> Table:
    """Make the forms of merged segments once more, each on its own."""
    table = Table("What forms cost:", ("form", "bytes a GPU-sample", "CPU at 10,000 GPUs, of a core"))
    scratch = base / "scratch"
    scratch.mkdir()
    rows = sum(file.rows for segment in merged for file in segment.samples)
    whole = sum(file.size_bytes for segment in merged for file in segment.samples)
    table.rows.append(
        ("samples, and all others in it", f"{whole / rows:.2f}", f"{spent / samples * 1e6:.1f} %")
    )
    with closing(open_database(str(base / "spill"))) as database:

        def rolled(segment: Segment, file: SealedFile, seconds: int, metrics: Sequence[str] = ()) -> int:
            source = f"read_parquet('{base}/history/{segment.name}/{file.name}')"
            chosen = metrics or rollup.find_metrics(file.scope, file.columns)
            query = (
                rollup.five_minute_query(file.scope, source, file.columns)
                if file.seconds
                else rollup.minute_query(file.scope, source, chosen)
            )
            return write_file(database, query, str(scratch), file._replace(seconds=seconds)).size_bytes

        def divided(segment: Segment) -> int:
            files = [file for file in segment.files if file.seconds != SHARE_SECONDS]
            source = base / "history" / segment.name
            return sum(
                file.size_bytes
                for file in gpu_share_files.write_share_files(database, str(source), files, level=15)
            )

        def timed(what: str, work: Callable[[], int]) -> None:
            begun = time.process_time()
            size = work()
            cpu = time.process_time() - begun
            table.rows.append((what, f"{size / rows:.2f}", f"{cpu / rows * 1e6:.2f} %"))

        pairs = [(segment, file) for segment in merged for file in segment.files]
        of_samples = [pair for pair in pairs if pair[1].seconds == 0]
        of_minutes = [pair for pair in pairs if pair[1].seconds == rollup.FINE_SECONDS]
        timed("minutes", lambda: sum(rolled(*pair, 60) for pair in of_samples))
        timed("five minutes", lambda: sum(rolled(*pair, 300) for pair in of_minutes))
        timed(
            "minutes in a thin segment",
            lambda: sum(rolled(*pair, 60, gpu_share_files.GPU_METRICS) for pair in of_samples),
        )
        timed("GPU time, nobody on the GPUs", lambda: sum(map(divided, merged)))
    return table


def run(size: Size, *, quick: bool, takes: int) -> Report:
    """Make a month of history and two hours of real numbers, and ask both with and without each form."""
    report = Report(NAME, "Forms of history")
    base = Path(tempfile.mkdtemp(prefix="gpulse-forms-"))
    try:
        Maker(base, size, _METRICS, is_whole=True).make()
        recent, layouts, texts = make_recent(size)
        with (
            make_metadata(base / "metadata.sqlite", size, layouts, texts) as metadata,
            closing(_Fixed(base)) as history,
        ):
            add_job(base / "metadata.sqlite", size)
            store = StoreReader(metadata, history, recent)
            _ask_all(report, history, _Questions(store, size), size, takes)
        _fleet(report, base / "fleet", 4 if quick else 32, takes)
    finally:
        shutil.rmtree(base)
    report.notes.append(
        f"{size.nodes * _GPUS} GPUs, {size.days} days; every answer is made in turn with and without a form, and figures are "
        "medians of CPU time, since the machine has other work. Frames in memory cannot be left out: nothing else has them."
    )
    return report


if __name__ == "__main__":
    given = measure.parser(NAME, __doc__, {"takes": 3, "nodes": 125, "days": 30}).parse_args()
    asked = Size(16, 3) if given.quick else Size(given.nodes, given.days)
    measure.publish(run(asked, quick=given.quick, takes=given.takes), write=given.write)
