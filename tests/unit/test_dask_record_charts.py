"""What pictures of records show: a job's lines, boxes and heat maps, and when its graphs ran."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest

from gpulse.charts.chart_model import Boxes, Chart, ChartGap, ChartLine, ChartPage, HeatMap, Lines
from gpulse.integrations.dask.csv_files import WorkerTable, parse_record
from gpulse.integrations.dask.record_charts import (
    build_boxes_picture,
    build_cluster_picture,
    build_lines_picture,
)
from gpulse.integrations.dask.record_selection import GraphTime, build_graph_spans
from tests.unit.dask_records import Plan, record, table

GIB = 1 << 30


def lines_chart(found: WorkerTable, job: int | None = 1, height: float = 10, metric: str = "m") -> Chart:
    """A worker's lines in a picture of that height."""
    return chart_of(build_lines_picture(found, job, [metric], (20, height)))


def cluster_chart(tables: dict[int, WorkerTable], job: int | None = 1) -> Chart:
    """All workers."""
    return chart_of(build_cluster_picture(tables, job, ["m"], "run", (20, 10)))


def chart_of(picture: ChartPage) -> Chart:
    """The one chart of a picture."""
    (chart,) = picture.charts
    return chart


def line_times(line: ChartLine) -> list[list[float]]:
    """The times of each part of a line that is drawn without a break."""
    return [line.times[segment].tolist() for segment in line.segments()]


def lines_of(chart: Chart) -> Lines:
    """The lines of the first panel."""
    return lines_in(chart.panels[0].content)


def lines_in(content: object) -> Lines:
    """Content that must be lines."""
    assert isinstance(content, Lines)
    return content


def worker(**plan: Any) -> WorkerTable:
    """A made-up record."""
    return parse_record(*record(Plan(**plan)), "worker-0.csv")


def test_a_line_for_each_gpu_of_the_job() -> None:
    """The times and values of its lines, and nothing of another job."""
    found = table(
        ["m"], [1, 1, 0.0, [5, 6]], [2, 1, 0.2, [7, 8]], [2, 1, 0.4, [9, None]], [1, 1, 0.6, [1, 1]]
    )

    chart = lines_chart(found, 2)

    first, second = lines_of(chart).lines
    assert ("GPU 0", "GPU 1") == chart.panels[0].labels
    assert ([0.2, 0.4], [7.0, 9.0]) == (first.times.tolist(), first.values.tolist())
    assert [[0.2]] == line_times(second)
    assert 8.0 == second.values[0]
    assert [0.2, 0.6] == pytest.approx([chart.start, chart.end])


def test_lines_of_several_graphs_at_one_moment_are_one_point() -> None:
    """The record has a line for each graph then, with the same readings."""
    found = table(["m"], *([1, dag, place / 5, [place]] for place in range(4) for dag in (1, 2)))

    chart = lines_chart(found, None)

    assert [0.0, 0.2, 0.4, 0.6] == lines_of(chart).lines[0].times.tolist()
    assert [("1.1", 0), ("1.2", 1)] == [(span.label, span.lane) for span in chart.spans]


def test_nothing_is_drawn_across_a_gap() -> None:
    """A worker that was restarted was not there in between, however long the record is."""
    for lines in (300, 9000):
        end = lines / 5
        found = worker(lines=lines, gpus=1, jobs=1, gap=(end / 2, end / 2 + 4))
        chart = lines_chart(found, metric="mem-util")

        before, after = line_times(lines_of(chart).lines[0])
        (gap,) = chart.panels[0].gaps
        assert before[-1] < end / 2
        assert after[0] >= end / 2 + 4
        assert [end / 2, end / 2 + 4] == pytest.approx([gap.start, gap.end])
        assert ("no records of job 1", ()) == (gap.reason, gap.rows)
        assert not any(span.start < end / 2 + 2 < span.end for span in chart.spans)


def test_graphs_are_bands_from_their_first_line_to_their_last() -> None:
    """The time between two graphs is in none."""
    dags = [1, 1, 1, 0, 0, 0, 0, 2, 2]
    chart = lines_chart(table(["m"], *([1, dag, float(place), 1] for place, dag in enumerate(dags))))

    assert [("1", 0.0, 3.0), ("2", 7.0, 9.0)] == [(span.label, span.start, span.end) for span in chart.spans]
    assert ["band0", "band1"] == [span.color for span in chart.spans]


def test_graphs_that_alternate_are_one_band_each() -> None:
    """Short tasks of two graphs take turns on a worker; that is no boundary."""
    chart = lines_chart(table(["m"], *([1, 1 + place % 2, place / 5, 1] for place in range(50))))

    assert ["1", "2"] == [span.label for span in chart.spans]


def test_graphs_at_the_same_time_lie_under_each_other() -> None:
    """Neighbours have different shades; what has no lane of its own has no number."""
    running = [(1,), (1, 2), (2, 3, 4, 5), (3,)]
    lines = [[1, dag, place / 5, 1] for place in range(40) for dag in running[place // 10]]

    picture = build_lines_picture(table(["m"], *lines), 1, ["m"], (20, 10))

    found = chart_of(picture).spans
    assert picture.note.endswith("3 graphs are labeled at a time; up to 1 more ran at the same time")
    assert [("1", 0), ("2", 1), ("3", 0), ("4", 2), ("", 2)] == [(span.label, span.lane) for span in found]
    assert ["band0", "band1", "band2", "band0", "band1"] == [span.color for span in found]
    assert "job 1, graph 5" == found[4].text


def test_graphs_one_after_the_other_share_a_lane_though_moments_are_not_evenly_apart() -> None:
    """A line holds until the next, also when that comes a few milliseconds early."""
    dice = random.Random(1)
    moments = [place / 5 + dice.uniform(-0.02, 0.02) for place in range(1, 121)]
    lines = [[1, 1 + place // 10, moment, 1] for place, moment in enumerate(moments)]

    chart = lines_chart(table(["m"], *lines))

    assert [0] * 12 == [span.lane for span in chart.spans]
    assert ["band0", "band1"] * 6 == [span.color for span in chart.spans]
    assert all(0 <= later.start - sooner.end < 0.05 for sooner, later in itertools.pairwise(chart.spans))


def test_graphs_one_after_the_other_share_a_lane_though_workers_look_at_different_moments() -> None:
    """On eight workers, each with moments of its own; the band before ends where the next begins."""
    dice = random.Random(2)
    tables = {}
    for index in range(8):
        moments = [place / 5 + index / 40 + dice.uniform(-0.01, 0.01) for place in range(1, 121)]
        lines = [[1, 1 + int(moment / 2), moment, 1] for moment in moments]
        tables[index] = table(["m"], *lines)

    found = cluster_chart(tables).spans

    assert [str(dag) for dag in range(1, 14)] == [span.label for span in found]
    assert {0} == {span.lane for span in found}
    assert all(sooner.color != later.color for sooner, later in itertools.pairwise(found))


def test_graphs_at_the_same_time_on_different_workers_lie_under_each_other() -> None:
    """Also a short one while a long one runs."""
    tables = {
        0: table(["m"], *([1, 1, place / 5, 1] for place in range(50))),
        1: table(["m"], *([1, 2 if place in (20, 21) else 1, place / 5 + 0.1, 1] for place in range(50))),
        2: table(["m"], *([1, 3 if place > 40 else 1, place / 5 + 0.05, 1] for place in range(60))),
    }

    found = cluster_chart(tables).spans

    assert [("1", 0), ("2", 1), ("3", 1)] == [(span.label, span.lane) for span in found]


def test_everything_lies_within_the_picture() -> None:
    """Also a graph that begins in the last record, and a last box of one."""
    tables = {
        0: table(["m"], *([1, 1 + (place == 9), place / 5, 1] for place in range(10))),
        1: table(["m"], *([1, 1 + (place > 3), place / 2, 1] for place in range(5))),
    }
    boxes = chart_of(build_boxes_picture(tables[0], 1, ["m"], 3, (20, 10)))
    charts = [lines_chart(tables[0]), boxes, cluster_chart(tables)]

    content = boxes.panels[0].content
    assert isinstance(content, Boxes)
    assert [2.0, 2.0, 2.5] == pytest.approx([chart.end for chart in charts])
    assert boxes.end == content.rows[0].boxes[-1].end
    for chart in charts:
        assert [0, 0] == [span.lane for span in chart.spans]
        assert all(chart.start <= span.start < span.end <= chart.end for span in chart.spans)


def test_boxes_do_not_overlap() -> None:
    """Though their records are not evenly apart."""
    dice = random.Random(3)
    lines = [[1, 1, place / 5 + dice.uniform(-0.05, 0.05), 1] for place in range(1, 60)]

    content = chart_of(build_boxes_picture(table(["m"], *lines), 1, ["m"], 4, (20, 10))).panels[0].content

    assert isinstance(content, Boxes)
    assert all(sooner.end <= later.start for sooner, later in itertools.pairwise(content.rows[0].boxes))


def test_jobs_begin_where_their_first_graph_does() -> None:
    """The first needs no mark."""
    found = build_graph_spans(
        [GraphTime(job, 1, float(job), job + 0.9) for job in range(1, 5)], with_jobs=True
    )

    assert [(2.0, "job 2"), (3.0, "job 3"), (4.0, "job 4")] == [
        (mark.time, mark.label) for mark in found.marks
    ]
    assert [1, 2, 3, 4] == [span.number for span in found.spans]


def test_a_cell_of_a_map_is_its_highest_value_and_says_so() -> None:
    """One record of thousands is seen; a mean would hide it."""
    lines = [[1, 1, float(place), [99 if place == 1234 else 10] * 17] for place in range(6000)]

    picture = build_cluster_picture({0: table(["m"], *lines)}, 1, ["m"], "run", (20, 10))

    content = chart_of(picture).panels[0].content
    assert isinstance(content, HeatMap)
    assert [99.0] * 17 == content.cells[:, 123].tolist()
    assert {10.0} == set(content.cells[:, 124].tolist())
    assert "1:40:00 h; each cell shows the maximum over 10 s" == picture.note


@pytest.mark.parametrize(
    ("gpus", "height", "kind"),
    [(4, 3, "together"), (8, 10, "lanes"), (16, 10, "lanes"), (8, 3, "heat map"), (17, 10, "heat map")],
)
def test_many_gpus_have_a_lane_each_or_a_row_of_colors(gpus: int, height: float, kind: str) -> None:
    """Few share an axis; more have lanes, as long as there is room for so many."""
    content = lines_chart(worker(lines=20, gpus=gpus, jobs=1), 1, height, "mem-util").panels[0].content

    found = (
        "heat map" if isinstance(content, HeatMap) else "lanes" if lines_in(content).has_lanes else "together"
    )
    assert kind == found
    assert tuple(f"GPU {gpu}" for gpu in range(gpus)) == content.labels


def test_a_box_stands_for_so_many_records() -> None:
    """The last for those that are left, and none reaches across a gap."""
    values = [*range(10), 100, 200, 300]
    times = [*(place / 5 for place in range(10)), 50.0, 50.2, 50.4]
    found = table(["m"], *([1, 1, time, value] for time, value in zip(times, values, strict=True)))

    (panel,) = chart_of(build_boxes_picture(found, 1, ["m"], 4, (20, 10))).panels

    assert isinstance(panel.content, Boxes)
    (row,) = panel.content.rows
    assert [4, 4, 2, 3] == [box.count for box in row.boxes]
    assert [(0, 1.5, 3), (4, 5.5, 7), (8, 8.5, 9), (100, 200, 300)] == [
        (box.low, box.median, box.high) for box in row.boxes
    ]
    assert (0.75, 2.25) == (row.boxes[0].q1, row.boxes[0].q3)


def test_more_boxes_than_can_be_seen_become_larger_ones() -> None:
    """By a multiple, which the picture says."""
    picture = build_boxes_picture(worker(lines=3000, gpus=2, jobs=1), 1, ["mem-util"], 2, (4, 10))

    content = chart_of(picture).panels[0].content
    assert isinstance(content, Boxes)
    assert 50 == len(content.rows[0].boxes)
    assert "60 records" in picture.note


@pytest.mark.parametrize(
    ("workers", "gpus", "kind", "rows"),
    [(2, 1, Lines, 2), (2, 4, Lines, 8), (5, 4, HeatMap, 20), (64, 1, HeatMap, 64), (64, 8, HeatMap, 64)],
)
def test_a_cluster_of_any_size(workers: int, gpus: int, kind: type, rows: int) -> None:
    """Lines of a few GPUs, a row for each GPU, and one for each worker where there is no room for that."""
    one = worker(lines=10, gpus=gpus, jobs=1)

    picture = build_cluster_picture(dict.fromkeys(range(workers), one), None, ["mem-util"], "run", (20, 10))

    (panel,) = chart_of(picture).panels
    assert kind is type(panel.content)
    assert rows == len(panel.labels)
    assert ("maximum over each worker's GPUs" in panel.heading) == (gpus == 8)
    assert f"run: {workers} workers" == picture.title


def test_a_map_leaves_what_is_unknown_open() -> None:
    """A worker that came later or was away is a hole in its row."""
    early = table(["m"], *([1, 1, float(place), [10.0] * 9] for place in range(60)))
    late = table(["m"], *([1, 1, float(place), [30.0] * 9] for place in (*range(30, 40), *range(50, 60))))

    (panel,) = cluster_chart({0: early, 1: late}).panels

    assert isinstance(panel.content, HeatMap)
    known = ~np.isnan(panel.content.cells)
    assert [600] * 9 == known[:9].sum(axis=1).tolist()
    assert not known[9:, :300].any()
    assert not known[9:, 430:500].any()
    assert {10.0, 30.0} == set(panel.content.cells[known].tolist())
    assert [(4.5, "worker 0"), (13.5, "worker 1")] == panel.content.row_ticks(4)
    assert [9] == panel.content.group_edges


def test_a_job_that_some_workers_did_not_see() -> None:
    """They are left out."""
    tables = {
        0: table(["m"], [1, 1, 0.0, 1]),
        1: table(["m"], [2, 1, 0.0, 1]),
        2: table(["m"], [2, 1, 0.2, 1]),
    }

    chart = cluster_chart(tables, 2)

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
    axis = lines_chart(table([metric], [1, 1, 0.0, low], [1, 1, 0.2, high]), metric=metric).panels[0].axis

    assert expected == (axis.unit, axis.low, axis.high)
    assert (axis.low, axis.high) == (axis.ticks[0], axis.ticks[-1])


def test_lines_of_a_worker_that_came_late_say_so() -> None:
    """The others were measured all the time."""
    tables = {
        0: table(["m"], *([1, 1, place / 5, 1] for place in range(50))),
        1: table(["m"], *([1, 1, place / 5, 1] for place in range(20, 50))),
    }

    assert (ChartGap(0.0, 4.0, "not measured", (1,)),) == cluster_chart(tables, None).panels[0].gaps
