from __future__ import annotations

import itertools
import math
import random
from typing import Any

import numpy as np
import pytest

from gpulse.integrations.dask.drawing.charts import Boxes, Chart, HeatMap, Lines, Panel
from gpulse.integrations.dask.drawing.graphs import bands, job_starts, named
from gpulse.integrations.dask.drawing.pieces import pieces
from gpulse.integrations.dask.drawing.selection import Stretch
from gpulse.integrations.dask.drawing.units import axis_of, time_ticks
from gpulse.integrations.dask.drawing.views import boxes_chart, cluster_chart, lines_chart
from gpulse.integrations.dask.files import WorkerTable, parse
from tests.unit.dask_records import Plan, record, table

GIB = 1 << 30


def lines_of(chart: Chart, panel: int = 0) -> Lines:
    """The lines of a panel."""
    content = chart.panels[panel].content
    assert isinstance(content, Lines)
    return content


def worker(**plan: Any) -> WorkerTable:
    """A made-up record."""
    return parse(*record(Plan(**plan)), "worker-0.csv")


def test_a_line_for_each_gpu_of_the_job() -> None:
    """The times and values of its lines, and nothing of another job."""
    found = table(
        ["m"], [1, 1, 0.0, [5, 6]], [2, 1, 0.2, [7, 8]], [2, 1, 0.4, [9, None]], [1, 1, 0.6, [1, 1]]
    )

    chart = lines_chart(found, 2, ["m"], 10)

    assert ["GPU 0", "GPU 1"] == [curve.label for curve in lines_of(chart).curves]
    (first,), (second,) = (curve.pieces for curve in lines_of(chart).curves)
    assert ([0.2, 0.4], [7.0, 9.0]) == (first.times.tolist(), first.mean.tolist())
    assert ([0.2], [8.0]) == (second.times.tolist(), second.mean.tolist())
    assert [0.2, 0.6] == pytest.approx([chart.start, chart.end])


def test_lines_of_several_graphs_at_one_moment_are_one_point() -> None:
    """The record has a line for each graph then, with the same readings."""
    found = table(["m"], *([1, dag, place / 5, [place]] for place in range(4) for dag in (1, 2)))

    chart = lines_chart(found, None, ["m"], 10)

    assert [0.0, 0.2, 0.4, 0.6] == lines_of(chart).curves[0].pieces[0].times.tolist()
    assert [("1.1", 0), ("1.2", 1)] == [(band.label, band.lane) for band in chart.bands]


def test_nothing_is_drawn_across_a_gap() -> None:
    """A worker that was restarted was not there in between, however long the record is."""
    for lines in (300, 9000):
        end = lines / 5
        chart = lines_chart(
            worker(lines=lines, gpus=1, jobs=1, gap=(end / 2, end / 2 + 4)), 1, ["mem-util"], 10
        )

        before, after = lines_of(chart).curves[0].pieces
        assert before.times[-1] < end / 2
        assert after.times[0] >= end / 2 + 4
        assert not any(band.start < end / 2 + 2 < band.end for band in chart.bands)


def test_a_long_record_is_drawn_in_few_points_without_losing_its_extremes() -> None:
    """One value of many thousands is still the highest of its point."""
    values = np.ones(100_000)
    values[51_234], values[60_000] = 97.0, np.nan

    (piece,) = pieces(np.arange(100_000) / 5, values, 1.0, 1500)

    assert 1500 == len(piece.times)
    assert (1.0, 97.0) == (piece.low.min(), piece.high.max())
    assert piece.mean.max() < 3
    assert np.all(np.diff(piece.times) > 0)


def test_what_is_unknown_breaks_a_line() -> None:
    """It is never drawn as zero."""
    values = np.array([1.0, np.nan, 3.0, 4.0, np.nan])

    found = pieces(np.arange(5.0), values, 2.5, 100)

    assert [[0.0], [2.0, 3.0]] == [piece.times.tolist() for piece in found]


def test_graphs_are_bands_from_their_first_line_to_their_last() -> None:
    """The time between two graphs is in none."""
    dags = [1, 1, 1, 0, 0, 0, 0, 2, 2]
    chart = lines_chart(
        table(["m"], *([1, dag, float(place), 1] for place, dag in enumerate(dags))), 1, ["m"], 10
    )

    assert [("1", 0.0, 3.0), ("2", 7.0, 9.0)] == [(band.label, band.start, band.end) for band in chart.bands]
    assert [0, 1] == [band.shade for band in chart.bands]


def test_graphs_that_alternate_are_one_band_each() -> None:
    """Short tasks of two graphs take turns on a worker; that is no boundary."""
    chart = lines_chart(
        table(["m"], *([1, 1 + place % 2, place / 5, 1] for place in range(50))), 1, ["m"], 10
    )

    assert ["1", "2"] == [band.label for band in chart.bands]


def test_graphs_at_the_same_time_lie_under_each_other() -> None:
    """Neighbours have different shades; what has no lane of its own has no number."""
    running = [(1,), (1, 2), (2, 3, 4, 5), (3,)]
    lines = [[1, dag, place / 5, 1] for place in range(40) for dag in running[place // 10]]

    chart = lines_chart(table(["m"], *lines), 1, ["m"], 10)

    found = chart.bands
    assert chart.note.endswith("3 graphs are named at a time, and up to 1 more at once")
    assert [("1", 0), ("2", 1), ("3", 0), ("4", 2), ("", 2)] == [(band.label, band.lane) for band in found]
    assert [0, 1, 2, 0, 1] == [band.shade for band in found]
    assert "job 1, graph 5" == found[4].words


def test_graphs_one_after_the_other_share_a_lane_though_moments_are_not_evenly_apart() -> None:
    """A line holds until the next, also when that comes a few milliseconds early."""
    dice = random.Random(1)
    moments = [place / 5 + dice.uniform(-0.02, 0.02) for place in range(1, 121)]
    lines = [[1, 1 + place // 10, moment, 1] for place, moment in enumerate(moments)]

    chart = lines_chart(table(["m"], *lines), 1, ["m"], 10)

    assert [0] * 12 == [band.lane for band in chart.bands]
    assert [0, 1] * 6 == [band.shade for band in chart.bands]
    assert all(0 <= later.start - sooner.end < 0.05 for sooner, later in itertools.pairwise(chart.bands))


def test_graphs_one_after_the_other_share_a_lane_though_workers_look_at_different_moments() -> None:
    """On eight workers, each with moments of its own; the band before ends where the next begins."""
    dice = random.Random(2)
    tables = {}
    for index in range(8):
        moments = [place / 5 + index / 40 + dice.uniform(-0.01, 0.01) for place in range(1, 121)]
        lines = [[1, 1 + int(moment / 2), moment, 1] for moment in moments]
        tables[index] = table(["m"], *lines)

    found = cluster_chart(tables, 1, ["m"], "run", 10).bands

    assert [str(dag) for dag in range(1, 14)] == [band.label for band in found]
    assert {0} == {band.lane for band in found}
    assert all(sooner.shade != later.shade for sooner, later in itertools.pairwise(found))


def test_graphs_at_the_same_time_on_different_workers_lie_under_each_other() -> None:
    """Also a short one while a long one runs."""
    tables = {
        0: table(["m"], *([1, 1, place / 5, 1] for place in range(50))),
        1: table(["m"], *([1, 2 if place in (20, 21) else 1, place / 5 + 0.1, 1] for place in range(50))),
        2: table(["m"], *([1, 3 if place > 40 else 1, place / 5 + 0.05, 1] for place in range(60))),
    }

    found = cluster_chart(tables, 1, ["m"], "run", 10).bands

    assert [("1", 0), ("2", 1), ("3", 1)] == [(band.label, band.lane) for band in found]


def test_everything_lies_within_the_picture() -> None:
    """Also a graph that begins in the last record, and a last box of one."""
    tables = {
        0: table(["m"], *([1, 1 + (place == 9), place / 5, 1] for place in range(10))),
        1: table(["m"], *([1, 1 + (place > 3), place / 2, 1] for place in range(5))),
    }
    boxes = boxes_chart(tables[0], 1, ["m"], 3, (20, 10))
    charts = [lines_chart(tables[0], 1, ["m"], 10), boxes, cluster_chart(tables, 1, ["m"], "run", 10)]

    content = boxes.panels[0].content
    assert isinstance(content, Boxes)
    assert [2.0, 2.0, 2.5] == pytest.approx([chart.end for chart in charts])
    assert boxes.end == content.rows[0].boxes[-1].end
    for chart in charts:
        assert [0, 0] == [band.lane for band in chart.bands]
        assert all(chart.start <= band.start < band.end <= chart.end for band in chart.bands)


def test_boxes_do_not_overlap() -> None:
    """Though their records are not evenly apart."""
    dice = random.Random(3)
    lines = [[1, 1, place / 5 + dice.uniform(-0.05, 0.05), 1] for place in range(1, 60)]

    content = boxes_chart(table(["m"], *lines), 1, ["m"], 4, (20, 10)).panels[0].content

    assert isinstance(content, Boxes)
    assert all(sooner.end <= later.start for sooner, later in itertools.pairwise(content.rows[0].boxes))


@pytest.mark.parametrize(
    ("room", "expected"),
    [(0.5, list(range(1, 41))), (1.5, list(range(2, 41, 2))), (3.0, list(range(5, 41, 5))), (500, [])],
)
def test_every_so_many_th_graph_is_named_where_there_is_no_room_for_all(
    room: float, expected: list[int]
) -> None:
    """Not the first few, whose numbers are short."""
    found = bands([Stretch(1, dag, float(dag), dag + 0.9) for dag in range(1, 41)], with_jobs=False)

    assert [str(dag) for dag in expected] == [band.label for band in named(found, room)][: len(expected)]
    assert len(expected) >= len(named(found, room)) - 1


def test_a_long_graph_between_short_ones_is_named() -> None:
    """Whatever its number is; what would touch its name is not."""
    short = [Stretch(1, dag, dag / 10, dag / 10 + 0.1) for dag in range(1, 100)]
    found = bands(
        [*short, Stretch(1, 137, 10.0, 10.8), Stretch(1, 110, 10.8, 10.9)],
        with_jobs=False,
    )

    names = [band.label for band in named(found, 0.7)]

    assert ["137", *(str(dag) for dag in range(10, 100, 10))] == names


def test_jobs_begin_where_their_first_graph_does() -> None:
    """The first needs no mark."""
    found = bands([Stretch(job, 1, float(job), job + 0.9) for job in range(1, 5)], with_jobs=True)

    assert [2.0, 3.0, 4.0] == job_starts(found)
    assert ["2.1", "4.1"] == [band.label for band in named(found, 1.5)]


def test_a_cell_of_a_map_is_its_highest_value_and_says_so() -> None:
    """One record of thousands is seen; a mean would hide it."""
    lines = [[1, 1, float(place), [99 if place == 1234 else 10] * 9] for place in range(6000)]

    chart = cluster_chart({0: table(["m"], *lines)}, 1, ["m"], "run", 10)

    content = chart.panels[0].content
    assert isinstance(content, HeatMap)
    assert [99.0] * 9 == content.cells[:, 123].tolist()
    assert {10.0} == set(content.cells[:, 124].tolist())
    assert chart.note.endswith("; a cell is the highest value of 10 s")


@pytest.mark.parametrize(
    ("low", "high"), [(0.0, 5e-324), (1e300, 1e300), (-1e300, 1e300), (1e18, 1e18 + 256), (-3e-310, 0.0)]
)
def test_an_axis_of_any_numbers(low: float, high: float) -> None:
    """It holds them and has a few ticks."""
    axis = axis_of("m", low, high)

    room = 1e-9 * max(abs(low), abs(high), 1.0)
    assert axis.low * axis.factor - room <= low <= high <= axis.high * axis.factor + room
    assert axis.low < axis.high < math.inf
    assert 2 <= len(axis.ticks) <= 8


def test_a_worker_with_more_gpus_than_lines_can_be_told_apart() -> None:
    """They become rows of colours where there is no room for lanes."""
    many = worker(lines=20, gpus=20, jobs=1)

    contents = [lines_chart(many, 1, ["mem-util"], high).panels[0].content for high in (10, 4)]

    assert [Lines, HeatMap] == list(map(type, contents))
    assert isinstance(contents[1], HeatMap)
    assert [(0.5, "GPU 0"), (10.5, "GPU 10")] == contents[1].ticks(2)


def test_many_gpus_have_a_lane_each() -> None:
    """As long as there is room for it; few share an axis."""
    eight = worker(lines=20, gpus=8, jobs=1)

    assert [True, False] == [lines_of(lines_chart(eight, 1, ["mem-util"], high)).apart for high in (10, 3)]
    assert not lines_of(lines_chart(worker(lines=20, gpus=4, jobs=1), 1, ["mem-util"], 10)).apart


def test_a_box_stands_for_so_many_records() -> None:
    """The last for those that are left, and none reaches across a gap."""
    values = [*range(10), 100, 200, 300]
    times = [*(place / 5 for place in range(10)), 50.0, 50.2, 50.4]
    found = table(["m"], *([1, 1, time, value] for time, value in zip(times, values, strict=True)))

    (panel,) = boxes_chart(found, 1, ["m"], 4, (20, 10)).panels

    assert isinstance(panel.content, Boxes)
    (row,) = panel.content.rows
    assert [4, 4, 2, 3] == [box.records for box in row.boxes]
    assert [(0, 1.5, 3), (4, 5.5, 7), (8, 8.5, 9), (100, 200, 300)] == [
        (box.low, box.median, box.high) for box in row.boxes
    ]
    assert (0.75, 2.25) == (row.boxes[0].q1, row.boxes[0].q3)


def test_more_boxes_than_can_be_seen_become_larger_ones() -> None:
    """By a multiple, which the picture says."""
    chart = boxes_chart(worker(lines=3000, gpus=2, jobs=1), 1, ["mem-util"], 2, (4, 10))

    content = chart.panels[0].content
    assert isinstance(content, Boxes)
    assert 50 == len(content.rows[0].boxes)
    assert "60 records" in chart.note


@pytest.mark.parametrize(
    ("workers", "gpus", "kind", "rows"),
    [(2, 1, Lines, 2), (2, 4, Lines, 8), (3, 4, HeatMap, 12), (64, 1, HeatMap, 64), (64, 8, HeatMap, 64)],
)
def test_a_cluster_of_any_size(workers: int, gpus: int, kind: type, rows: int) -> None:
    """Lines of a few GPUs, a row for each GPU, and one for each worker where there is no room for that."""
    one = worker(lines=10, gpus=gpus, jobs=1)

    chart = cluster_chart(dict.fromkeys(range(workers), one), None, ["mem-util"], "run", 10)

    assert kind is type(chart.panels[0].content)
    assert rows == len(chart.panels[0].labels)
    assert ("highest of each worker's GPUs" in chart.panels[0].title) == (gpus == 8)
    assert f"run: {workers} workers" == chart.title


def test_a_map_leaves_what_is_unknown_open() -> None:
    """A worker that came later or was away is a hole in its row."""
    early = table(["m"], *([1, 1, float(place), [10.0] * 5] for place in range(60)))
    late = table(["m"], *([1, 1, float(place), [30.0] * 5] for place in (*range(30, 40), *range(50, 60))))

    (panel,) = cluster_chart({0: early, 1: late}, 1, ["m"], "run", 10).panels

    assert isinstance(panel.content, HeatMap)
    known = ~np.isnan(panel.content.cells)
    assert [600] * 5 == known[:5].sum(axis=1).tolist()
    assert not known[5:, :300].any()
    assert not known[5:, 430:500].any()
    assert {10.0, 30.0} == set(panel.content.cells[known].tolist())
    assert [(2.5, "worker 0"), (7.5, "worker 1")] == panel.content.ticks(4)
    assert [5] == panel.content.edges


def test_a_job_that_some_workers_did_not_see() -> None:
    """They are left out."""
    tables = {
        0: table(["m"], [1, 1, 0.0, 1]),
        1: table(["m"], [2, 1, 0.0, 1]),
        2: table(["m"], [2, 1, 0.2, 1]),
    }

    chart = cluster_chart(tables, 2, ["m"], "run", 10)

    assert ("worker 1", "worker 2") == chart.panels[0].labels


@pytest.mark.parametrize(
    ("metric", "low", "high", "expected"),
    [
        ("compute-util", 0, 12, ("%", 0, 100)),
        ("mem-util", 0, 12, ("%", 0, 20)),
        ("mem-util", 0, 73, ("%", 0, 100)),
        ("total-mem", GIB, 70 * GIB, ("GiB", 0, 80)),
        ("sm_active_ratio", 0.0, 0.4, ("%", 0, 50)),
        ("power_watts", 90, 640, ("W", 0, 800)),
        ("pcie_rx_bytes_per_second", 0, 12e9, ("GB/s", 0, 15)),
        ("host.memory_available_bytes", 1e9, 2e9, ("GiB", 0, 2)),
        ("energy_joules_total", 5.0e9, 5.1e9, ("MJ", 5000, 5100)),
        ("temperature_margin_celsius", -5, 20, ("°C", -10, 20)),
        ("rows of mine", 0, 3e6, ("millions", 0, 3)),
        ("rows of mine", 0, 0, ("", 0, 1)),
    ],
)
def test_units_and_ends_of_axes(
    metric: str, low: float, high: float, expected: tuple[str, float, float]
) -> None:
    """Round ones, that hold every value; use is drawn to a hundred."""
    axis = axis_of(metric, low, high)

    assert expected == (axis.unit, axis.low, axis.high)
    assert (axis.low, axis.high) == (axis.ticks[0], axis.ticks[-1])


@pytest.mark.parametrize("end", [0.001, 0.5, 7, 59, 119, 121, 3599, 28_800, 1e6, 1e8])
def test_times_are_round_and_few(end: float) -> None:
    """However long the record is; each has a name of its own."""
    ticks, names = time_ticks(0.0, end, 12)

    assert 1 < len(ticks) <= 13
    assert len(set(names)) == len(names)
    assert all(sooner < later for sooner, later in itertools.pairwise(ticks))


def test_a_panel_says_what_it_is_about() -> None:
    """The metric and its unit, harmless and short."""
    panel = Panel("a\x1b[31m" + "b" * 100, axis_of("power_watts", 0, 5), Lines((), apart=False))

    assert ("a?[31m" + "b" * 53 + "… (W)") == panel.title
