"""Parts and pages of the dashboard by themselves: filters, times, charts, and what is said of things that are not there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from playwright.sync_api import expect

from gpulse.charts.style import COLORS, heat_ramp
from tests.integration.browser import browsing, empty_page, in_fleet

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    """An empty page that can import the modules; there is no server behind it."""
    with browsing() as browser:
        yield empty_page(browser)


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (["/usr/bin/python3", "/home/ada/train.py", "--lr", "1"], "train.py --lr 1"),
        (["python3.12", "-u", "-W", "ignore", "train.py"], "train.py"),
        (["python", "-m", "torch.distributed.run", "train.py"], "torch.distributed.run train.py"),
        (["python", "-c", "import torch"], "python -c import torch"),
        (["/opt/bin/solver", "in/a.cfg"], "solver in/a.cfg"),
        ([], "python3"),
    ],
)
def test_what_a_process_runs(page: Page, command: list[str], expected: str) -> None:
    """The script tells one from another, the interpreter does not."""
    script = "command => import('/parts/processes.js').then((m) => m.programWords({name: 'python3', command}).join(' '))"
    assert expected == page.evaluate(script, command)


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ({"from": "-1h"}, [3600, None]),
        ({"from": "-99999d"}, [366 * 86400, None]),
        ({"from": "-1ms"}, [10, None]),
        ({"from": "1", "to": "2"}, [900, None]),
        ({"from": "1700000000", "to": "1700000001"}, [10, 1700000001]),
        ({"from": "1800000000", "to": "1900000000"}, [900, None]),
        ({"from": "nonsense"}, [900, None]),
    ],
)
def test_times_in_an_address(page: Page, query: dict[str, str], expected: list[float | None]) -> None:
    """Neither longer nor shorter than what can be chosen, and not from before there was anything."""
    script = """query => import('/parts/time-range.js').then((m) => {
      const range = new m.Range({now: () => 1750000000, fallback: {length: 900, end: null}});
      range.read(query);
      return [range.length, range.end];
    })"""
    assert expected == page.evaluate(script, query)


def test_a_plot_beside_one_that_is_empty(page: Page) -> None:
    """As wide as its column, even where the first chart is not shown; what cannot be measured is not kept."""
    script = """import('/parts/chart-board.js').then(({Board}) => {
      const card = document.createElement('section');
      const stage = document.createElement('div');
      Object.assign(card.style, {width: '300px', padding: '0 20px', boxSizing: 'border-box', display: 'none'});
      stage.style.display = 'none';
      card.append(stage);
      document.body.append(card);
      const board = {_soon: () => {}, widths: new Map()};
      const widths = [Board.prototype.widthOf.call(board, stage)];
      card.style.display = 'block';
      widths.push(Board.prototype.widthOf.call(board, stage));
      card.remove();
      return widths;
    })"""
    assert [600, 260] == page.evaluate(script)


def test_lines_are_called_without_tricks(page: Page) -> None:
    """A disk whose name turns the reading direction does not turn the legend's."""
    script = """import('/parts/chart-data.js').then((m) => {
      const spec = {each: {metric: 'x', name: (series) => series.subject, words: 'disks'}};
      return m.linesOf(spec, {times: [1], step: 1, series: [{node: 'n', subject: 'a\\u202eb', metric: 'x', values: [1]}]}).lines[0].title;
    })"""
    assert "a\ufffdb" == page.evaluate(script)


START = 1_750_000_000
_CHARTS = """async ({start, rows}) => {
  const load = (tag, attributes) => new Promise((resolve) => {
    const one = Object.assign(document.createElement(tag), attributes, {onload: resolve});
    document.head.append(one);
  });
  await Promise.all([...['/vendor/uPlot.min.css', '/tokens.css', '/base.css', '/components.css', '/charts.css'].map(
    (href) => load('link', {rel: 'stylesheet', href})), load('script', {src: '/vendor/uPlot.iife.min.js'})]);
  const [{Board}, {Range}] = await Promise.all([import('/parts/chart-board.js'), import('/parts/time-range.js')]);
  const times = rows[0].map((_, at) => start + 10 * at);
  const range = new Range({now: () => start + 10_000, fallback: {length: 10 * rows[0].length, end: start + 10 * rows[0].length}});
  const host = document.createElement('main');
  document.body.append(host);
  const board = new Board({range, host, why: () => 'nothing'});
  const series = (metric, factor) => rows.map((values, place) => ({node: 'n', subject: `GPU-${place}`, gpu: String(place), metric,
    values: values.map((value) => (value === null ? null : value * factor))}));
  const spec = (id, unit, top) => ({id, title: id, unit, top, each: {metric: id, name: ({gpu}) => `GPU ${gpu}`}});
  board.add(host, {specs: [spec('used', 'ratio', 1), spec('power', 'watts')], ask: async () => ({from: times[0],
    to: times.at(-1) + 10, step: 10, times, series: [...series('used', 1), ...series('power', 500)]})});
  await board.load();
}"""
_PIXELS = """(host, places) => {
  const [canvas, over] = ['canvas', '.u-over'].map((name) => host.querySelector(name));
  const [outer, inner] = [canvas, over].map((one) => one.getBoundingClientRect());
  return places.map(([x, y]) => [...canvas.getContext('2d').getImageData(
    inner.left - outer.left + x * inner.width, inner.top - outer.top + y * inner.height, 1, 1).data.slice(0, 3)]);
}"""


@pytest.fixture
def charts(page: Page) -> Iterator[Page]:
    """The page, emptied after charts were on it."""
    yield page
    page.goto("http://localhost/empty")


def _draw(page: Page, rows: list[list[float | None]]) -> Locator:
    page.evaluate(_CHARTS, {"start": START, "rows": rows})
    chart = page.locator("[data-chart=used]")
    expect(chart).to_have_attribute("data-state", "ready")
    return chart


def _draw_map(page: Page, rows: list[list[float | None]]) -> Locator:
    chart = _draw(page, rows)
    chart.get_by_role("button", name="Map of used").click()
    expect(chart).to_have_attribute("data-kind", "map")
    return chart


def _hover(chart: Locator, x: float, y: float) -> None:
    box = chart.locator(".u-over").bounding_box()
    assert box is not None
    chart.page.mouse.move(box["x"] + x * box["width"], box["y"] + y * box["height"])


def test_few_series_are_lines(charts: Page) -> None:
    """Three can be told apart: each has a key with its value, and can be hidden."""
    chart = _draw(charts, [[0.5] * 10] * 3)
    expect(chart).to_have_attribute("data-kind", "lines")
    expect(chart.locator(".chart-line .chart-value")).to_have_text(["50%"] * 3)
    chart.locator(".chart-line").first.click()
    expect(chart.locator(".chart-line").first).to_have_attribute("aria-pressed", "false")


def test_some_series_are_small_multiples(charts: Page) -> None:
    """From four on each has a lane with its name and value, and the lanes are inside of the plot."""
    chart = _draw(charts, [[place / 10] * 10 for place in range(5)])
    expect(chart).to_have_attribute("data-kind", "multiples")
    lanes = chart.locator(".chart-lanes li")
    expect(lanes).to_have_text([f"GPU {place} {10 * place}%" for place in range(5)])
    plot, last = chart.locator(".u-over").bounding_box(), lanes.last.bounding_box()
    assert plot is not None
    assert last is not None
    assert last["y"] + last["height"] <= plot["y"] + plot["height"] + 1


def _outlier() -> list[list[float | None]]:
    """Fifteen GPUs that are alike, and one that is not, in the second half."""
    rows: list[list[float | None]] = [[0.70 + 0.01 * (place % 3)] * 10 for place in range(16)]
    rows[5] = [0.71 if at < 5 else 0.95 for at in range(10)]
    return rows


def test_many_series_are_a_band_with_outliers(charts: Page) -> None:
    """Median, percentiles and the one that differs, in a legend that is smaller than the plot; single lines on demand."""
    chart = _draw(charts, _outlier())
    expect(chart).to_have_attribute("data-kind", "band")
    keys = chart.locator(".chart-legend li")
    expect(keys).to_have_text(
        [
            re.compile(r"median\s+71%"),
            re.compile(r"5th to 95th.* of 15 GPUs\s+70 to 72%"),
            re.compile(r"outlier GPU 5\s+95%"),
        ]
    )
    legend, plot = chart.locator(".chart-legend").bounding_box(), chart.locator(".u-over").bounding_box()
    assert legend is not None
    assert plot is not None
    assert legend["height"] < plot["height"] / 2
    assert legend["width"] < plot["width"]
    _hover(chart, 0.72, 0.5)
    expect(chart.locator(".chart-at")).to_have_text(re.compile("^at "))
    expect(chart.locator(".chart-time")).to_be_visible()
    chart.get_by_role("button", name="Lines of used").click()
    expect(chart).to_have_attribute("data-kind", "many")
    charts.mouse.move(0, 0)
    expect(chart.locator(".chart-legend")).to_have_text("lowest GPU 0 70%, highest GPU 5 95%")
    _hover(chart, 0.75, 0.08)
    expect(chart.locator(".chart-legend")).to_have_text("GPU 5 95%")


def test_the_legend_has_values_right_after_a_zoom(charts: Page) -> None:
    """Those of the last sample, until the pointer moves."""
    chart = _draw(charts, [[0.5] * 10] * 2)
    _hover(chart, 0.2, 0.5)
    charts.mouse.down()
    _hover(chart, 0.4, 0.5)
    _hover(chart, 0.7, 0.5)
    charts.mouse.up()
    expect(chart.locator(".chart-line .chart-value")).to_have_text(["50%"] * 2)
    expect(chart).to_have_attribute("data-at", "latest")
    expect(chart.locator(".chart-time")).to_be_hidden()


def test_many_series_as_a_heat_map(charts: Page) -> None:
    """A row each in the colours of all heat maps, from the least to the most; what is missing is grey, what is sampled rarely is not."""
    full: list[list[float | None]] = [[1.0] * 10 for _ in range(7)]
    gap: list[float | None] = [0.0, 0.0, 0.0, None, None, None, 0.0, 0.0, 0.0, 0.0]
    rare: list[float | None] = [0.0, None, None, 0.0, None, None, 0.0, None, None, 0.0]
    chart = _draw_map(charts, [*full, gap, rare])
    expect(chart.locator(".chart-key").first).to_have_text("0%100%")
    expect(chart.locator(".chart-line")).to_have_count(0)
    places = [
        (0.41, 0.5 / 9),
        (0.41, 6.5 / 9),
        (0.15, 7.5 / 9),
        (0.41, 7.5 / 9),
        (0.65, 7.5 / 9),
        (0.41, 8.5 / 9),
    ]
    no_data = [int(COLORS["gap"].light[at : at + 2], 16) for at in (1, 3, 5)]
    low, high = list(heat_ramp()[0]), list(heat_ramp()[-1])
    assert [high, high, low, no_data, low, low] == chart.evaluate(_PIXELS, places)


def test_the_cursor_on_a_heat_map(charts: Page) -> None:
    """Time, series and value where the pointer is, the same row in the other charts; all rows' range without one."""
    rows: list[list[float | None]] = [[place / 10] * 10 for place in range(10)]
    rows[4][3] = None
    rows[4][4] = None
    chart = _draw_map(charts, rows)
    charts.get_by_role("button", name="Map of power").click()
    said, other = chart.locator(".chart-value"), charts.locator("[data-chart=power] .chart-value")
    expect(said).to_have_text("latest: 0% to 90%")
    _hover(chart, 0.7, 0.25)
    expect(said).to_have_text(_clock(charts, 7) + ", GPU 2: 20%")
    expect(other).to_have_text(_clock(charts, 7) + ", GPU 2: 100 W")
    expect(chart.locator(".chart-row")).to_be_visible()
    _hover(chart, 0.3, 0.45)
    expect(said).to_have_text(_clock(charts, 3) + ", GPU 4: no data")
    charts.mouse.move(0, 0)
    expect(said).to_have_text("latest: 0% to 90%")
    expect(chart.locator(".chart-row")).to_be_hidden()


def test_keys_and_table_of_a_heat_map(charts: Page) -> None:
    """Arrows lead to every row and sample, and are spoken; the table has a column for each row."""
    _draw_map(charts, [[place / 10] * 10 for place in range(10)])
    stage = charts.get_by_role("slider", name="used")
    expect(stage).to_have_accessible_description(
        re.compile("Heat map of 10 rows; .* mean 45%, from 0% to 90%")
    )
    stage.focus()
    for key in ("Home", "ArrowRight", "ArrowDown", "ArrowDown"):
        charts.keyboard.press(key)
    expect(stage).to_have_attribute("aria-valuetext", _clock(charts, 1) + ", GPU 1: 10%")
    charts.keyboard.press("Shift+ArrowDown")
    expect(stage).to_have_attribute("aria-valuetext", _clock(charts, 1) + ", GPU 9: 90%")
    charts.keyboard.press("Escape")
    expect(stage).to_have_attribute("aria-valuetext", "latest: 0% to 90%")
    charts.get_by_role("button", name="Table of used").click()
    heads = charts.get_by_role("region", name="used as a table").get_by_role("columnheader")
    expect(heads).to_have_text(["Time", *(f"GPU {place}" for place in range(10))])


def _clock(page: Page, sample: int) -> str:
    script = "time => import('/core/format.js').then((m) => m.clock(time))"
    return str(page.evaluate(script, START + 10 * sample))


def test_what_moves_keeps_the_focus(page: Page) -> None:
    """Cards get another order, and one goes; the keyboard stays where it was."""
    script = """import('/core/dom.js').then((m) => {
      const box = m.h('div');
      const [a, b, c] = ['a', 'b', 'c'].map((name) => m.h('button', {}, name));
      document.body.append(box);
      m.setChildren(box, [a, b, c]);
      a.focus();
      m.setChildren(box, [c, a]);
      const after = [box.textContent, document.activeElement.textContent];
      box.remove();
      return after;
    })"""
    assert ["ca", "a"] == page.evaluate(script)


_CONTROLS = """async ({core, fleet, gpus, update, given}) => {
  const [{FleetControls}, {FleetSummary}] = await Promise.all([import('/parts/fleet-controls.js'), import('/parts/fleet-summary.js')]);
  document.body.innerHTML = '<input id="fleet-filter">';
  for (const node of ['n1', 'n10', 'n2']) update({node, gpus: gpus(['0']), values: {}});
  const kept = new Map([['filter', {q: 'mine'}]]);
  const prefs = {read: (key, fallback) => kept.get(key) ?? fallback, write: (key, value) => kept.set(key, value)};
  const at = (address) => history.replaceState(null, '', address);
  const summary = new FleetSummary(fleet);
  summary.structure();
  const make = (address) => {
    at(address);
    return new FleetControls({fleet, prefs, toast: () => {}, announce: () => {}}, summary, () => {});
  };
  const answer = (new Function('return ' + given)())({make, at, kept});
  at('/empty');
  return answer;
}"""


def test_a_link_does_not_become_the_filter(page: Page) -> None:
    """What somebody else's link shows is not remembered, what is chosen here is; the bare address keeps what was chosen."""
    script = """({make, at, kept}) => {
      const controls = make('#/?state=free');
      const told = [controls.filter.state, kept.get('filter').q];
      at('#/');
      controls.rerouted();
      told.push(controls.filter.state, controls.filter.q, location.hash);
      controls.element.querySelector('[data-chip=free]').click();
      told.push(JSON.stringify(kept.get('filter')));
      at('#/');
      controls.rerouted();
      told.push(controls.filter.state, JSON.stringify(kept.get('filter')));
      controls.leave();
      return told;
    }"""
    chosen = '{"q":"mine","state":"free"}'
    expected = ["free", "mine", "all", "mine", "#/?q=mine", chosen, "free", chosen]
    assert expected == in_fleet(page, _CONTROLS, script)


def test_the_density_is_in_the_address(page: Page) -> None:
    """Automatic at first; what is chosen lasts, and an address says otherwise."""
    script = """({make, at, kept}) => {
      const controls = make('#/');
      const told = [controls.density];
      controls.element.querySelector('[data-density=strips]').click();
      told.push(controls.density, location.hash, kept.get('density'));
      at('#/?density=rows&metric=power');
      controls.rerouted();
      told.push(controls.density, controls.metric, kept.get('density'));
      at('#/?density=nonsense&metric=constructor');
      controls.rerouted();
      controls.leave();
      return [...told, controls.density, controls.metric];
    }"""
    assert [
        "cards",
        "strips",
        "#/?q=mine&density=strips",
        "strips",
        "rows",
        "power",
        "strips",
        "cards",
        "utilization",
    ] == in_fleet(page, _CONTROLS, script)


def test_an_own_time_ends_with_back(page: Page) -> None:
    """The page of who used what goes by its address alone."""
    script = """import('/pages/who.js').then(({mount}) => {
      const root = document.createElement('div');
      const handle = mount(root, {query: {from: '1700000000', to: '1700003600'}}, {fleet: {headTime: () => 1750000000}});
      const pressed = () => [...root.querySelectorAll('[aria-label=Time] [aria-pressed=true]')].map((one) => one.textContent).join();
      const told = [pressed()];
      handle.rerouted({query: {}});
      told.push(pressed());
      handle.leave();
      return told;
    })"""
    assert ["From … to", "24 h"] == page.evaluate(script)


_ROW = """({user, held, harvested}) => ({
  user, job: null, program: null, node: null, pid: null, start_time: null, gpu_seconds: held, idle_seconds: held ? 0 : null,
  harvested_seconds: harvested, utilization_mean: 0.5, memory_bytes_max: 1, energy_joules: held ? 1000 : null,
  harvested_energy_joules: harvested ? 3000 : null, gpus: 1, nodes: ['n'], processes: 1, first: 0, last: 3600})"""


@pytest.mark.parametrize("harvested", [0, 7200])
def test_harvested_time_has_a_column_of_its_own(page: Page, harvested: int) -> None:
    """Beside what people held, with its energy, which is in nobody's sum; what is missing is told as it was written."""
    script = """async harvested => {
      const {mount} = await import('/pages/who.js');
      const row = ROW;
      const rows = [row({user: 'ada', held: 3600, harvested: 0}), ...(harvested ? [row({user: 'bob', held: 0, harvested})] : [])];
      const answer = {from: 0, to: 14400, step: 60, by: 'user', gpus: 1, capacity_seconds: 14400, gpu_seconds: 3600, idle_seconds: 0,
        harvested_seconds: harvested, truncated: false, incomplete: harvested ? ['<b>much</b> is gone'] : [], rows};
      const before = window.fetch;
      window.fetch = async () => new Response(JSON.stringify(answer), {headers: {'content-type': 'application/json'}});
      const root = document.createElement('div');
      const handle = mount(root, {query: {}}, {fleet: {headTime: () => 14400}});
      while (!root.querySelector('tfoot')) await new Promise((resolve) => setTimeout(resolve));
      const words = (selector) => [...root.querySelectorAll(selector)].map((one) => one.textContent.replace(/\\s+/g, ' ').trim());
      const told = [words('.usage-summary dt').slice(2), words('.usage-summary dd').slice(2), words('[data-label=Harvested]'),
        words('[data-label=Energy]'), words('.usage-summary p')];
      handle.leave();
      window.fetch = before;
      return told;
    }""".replace("ROW", _ROW)
    told = page.evaluate(script, harvested)
    if harvested:
        assert [
            ["in use", "held idle", "harvested", "free"],
            ["1.00 25%", "0.00 0%", "2.00 50%", "1.00 25%"],
            ["0.00", "2.00 3.0 kJ", "2.00 3.0 kJ"],
            ["1.0 kJ", "\N{EN DASH}", "1.0 kJ"],
            ["Incomplete: <b>much</b> is gone."],
        ] == told
    else:
        assert [
            ["in use", "held idle", "free"],
            ["1.00 25%", "0.00 0%", "3.00 75%"],
            [],
            ["1.0 kJ", "1.0 kJ"],
            [],
        ] == told


@pytest.mark.parametrize("is_long", [False, True])
def test_names_in_the_table_of_jobs_are_whole(page: Page, is_long: bool) -> None:
    """Where there is room for them; a word that is as long as no name should be does not push the others out."""
    script = """async isLong => {
      const {mount} = await import('/pages/who.js');
      const sheets = ['/tokens.css', '/base.css', '/components.css'].map((href) => Object.assign(document.createElement('link'), {rel: 'stylesheet', href}));
      const loaded = sheets.map((sheet) => new Promise((resolve) => { sheet.onload = resolve; }));
      document.head.append(...sheets);
      await Promise.all(loaded);
      const row = ROW;
      const job = (user, name) => ({...row({user, held: 360000, harvested: 3600}), job: name, program: 'python3 -m ipykernel_launcher --profile /srv/ada'});
      const rows = isLong ? [job('x'.repeat(80), 'y'.repeat(80))] : [job('katherine', 'slurm:4711'), job('margaret', 'harvest:fold')];
      const answer = {from: 0, to: 14400, step: 60, by: 'job', gpus: 1, capacity_seconds: 14400, gpu_seconds: 1080000, idle_seconds: 0,
        harvested_seconds: 10800, truncated: false, rows};
      const before = window.fetch;
      window.fetch = async () => new Response(JSON.stringify(answer), {headers: {'content-type': 'application/json'}});
      const root = document.createElement('main');
      document.body.append(root);
      const handle = mount(root, {query: {by: 'job'}}, {fleet: {headTime: () => 14400}});
      while (!root.querySelector('tfoot')) await new Promise((resolve) => setTimeout(resolve));
      const line = parseFloat(getComputedStyle(document.body).lineHeight);
      const broken = [...root.querySelectorAll('tbody tr')].map((one) => [...one.querySelectorAll('th > a bdi, td bdi')].some((name) => name.offsetHeight > 1.5 * line));
      const card = root.querySelector('.table-card');
      const fits = card.scrollWidth <= card.clientWidth && document.documentElement.scrollWidth === 1400;
      handle.leave();
      window.fetch = before;
      [root, ...sheets].forEach((one) => one.remove());
      return [broken, fits];
    }""".replace("ROW", _ROW)
    page.set_viewport_size({"width": 1400, "height": 900})
    try:
        assert [[True] if is_long else [False, False], True] == page.evaluate(script, is_long)
    finally:
        page.set_viewport_size({"width": 1280, "height": 720})


def test_a_harvested_gpu_says_that_it_can_be_had(page: Page) -> None:
    """Beside the program that makes use of it."""
    script = """async ({fleet, gpus, update, process}) => {
      const {GpuLines} = await import('/parts/gpu-lines.js');
      update({node: 'n', gpus: gpus(['0']), values: {gpu_utilization_ratio: [0.9]},
        details: {processes: [[process('ada', {job: 'harvest:fold'})]]}});
      const lines = new GpuLines(fleet.nodes.get('n').gpus[0], () => {});
      lines.update(1000);
      const [row] = lines.elements;
      return [row.dataset.state, row.querySelector('.c-finding').textContent, row.querySelector('.badge.harvest').textContent];
    }"""
    assert ["harvested", "freed as soon as you use it", "harvest:fold"] == in_fleet(page, script)


def test_a_user_without_a_name(page: Page) -> None:
    """Nobody, and not everybody."""
    script = """import('/pages/user.js').then(({mount}) => {
      const root = document.createElement('div');
      mount(root, {parts: [], query: {}}, {});
      return root.textContent;
    })"""
    assert "contains no user name" in page.evaluate(script)


def test_what_a_user_holds_is_told_from_what_they_harvest(page: Page) -> None:
    """The number above is that of the table below it, and the harvest's processes have one of their own."""
    script = """async ({fleet, gpus, update, process}) => {
      const {mount} = await import('/pages/user.js');
      update({node: 'n', gpus: gpus(['0', '1', '2']), values: {gpu_utilization_ratio: [1, 1, 1]},
        details: {processes: [[process('ada')], [process('ada', {pid: 2, job: 'harvest:fold'})], [process('ada', {pid: 3, job: 'harvest:fold'})]]}});
      const root = document.createElement('div');
      document.body.append(root);
      const app = {fleet, live: new EventTarget(), prefs: {read: (key, fallback) => fallback, write: () => {}}, announce: () => {}};
      const handle = mount(root, {parts: ['ada'], query: {}}, app);
      await new Promise((resolve) => requestAnimationFrame(() => setTimeout(resolve)));
      const stats = [...root.querySelectorAll('.stats dd')].slice(0, 2).map((one) => one.textContent.replace(/\\s+/g, ' ').trim());
      const tables = [...root.querySelectorAll('.jobs-now')].map((one) => one.querySelectorAll('tbody tr').length);
      handle.leave();
      root.remove();
      return [stats, tables];
    }"""
    assert [["1 GPU", "2 GPUs counted separately"], [1, 2]] == in_fleet(page, script)


@pytest.mark.parametrize(
    ("state", "values", "is_shown"),
    [(None, [0, 0.5, None], True), (None, [0, 0, None], False), (None, None, False), (1, None, True)],
)
def test_harvested_time_is_shown_where_there_is_any(
    page: Page, state: int | None, values: list[float | None] | None, is_shown: bool
) -> None:
    """In the time that is looked at, also when no harvest watches the GPU now."""
    script = """async ({fleet, gpus, update, given}) => {
      const {mount} = await import('/pages/gpu.js');
      update({node: 'n', gpus: gpus(['0']), values: given.state === null ? {} : {harvest_state: [given.state]}});
      const series = given.values ? [{metric: 'harvested_seconds_total', node: 'n', subject: 'GPU-0', gpu: '0', values: given.values}] : [];
      const answer = {from: 970, to: 1000, step: 10, times: [970, 980, 990], series, processes: [], events: [], findings: [], truncated: false};
      const before = window.fetch;
      let asked = 0;
      window.fetch = async () => { asked += 1; return new Response(JSON.stringify(answer), {headers: {'content-type': 'application/json'}}); };
      const root = document.createElement('div');
      document.body.append(root);
      const app = {fleet, live: new EventTarget(), prefs: {read: (key, fallback) => fallback, write: () => {}}, announce: () => {}};
      const handle = mount(root, {parts: ['n', '0'], query: {from: '970', to: '1000'}}, app);
      const host = root.querySelector('[data-chart=harvested]');
      while (host.dataset.state === 'loading' || !asked) await new Promise((resolve) => setTimeout(resolve));
      const isShown = !host.hidden;
      handle.leave();
      window.fetch = before;
      root.remove();
      return isShown;
    }"""
    assert is_shown is in_fleet(page, script, {"state": state, "values": values})


def test_a_gpu_that_a_node_does_not_have(page: Page) -> None:
    """The page says so, and which there are."""
    script = """async ({fleet, gpus, update}) => {
      const {mount} = await import('/pages/gpu.js');
      fleet.take({type: 'hello', time: 1000, nodes: [{node: 'n', state: 'healthy', gpus: gpus(['0', '1'])}]});
      const root = document.createElement('div');
      document.body.append(root);
      const app = {fleet, live: new EventTarget(), prefs: {read: (key, fallback) => fallback, write: () => {}}, announce: () => {}};
      const handle = mount(root, {parts: ['n', '99'], query: {}}, app);
      await new Promise((resolve) => requestAnimationFrame(() => setTimeout(resolve)));
      const said = root.querySelector('.empty')?.textContent.replace(/\\s+/g, ' ');
      handle.leave();
      root.remove();
      return said;
    }"""
    assert "n has no GPU 99. It has GPU 0, GPU 1." == in_fleet(page, script)


def test_a_stream_that_nobody_looks_at_or_that_hangs(page: Page) -> None:
    """A hidden tab does not connect, whatever wakes it; an attempt without an answer is given up."""
    script = """import('/core/live.js').then(({Live}) => {
      const sockets = [];
      const real = {socket: window.WebSocket, timer: window.setTimeout, fetch: window.fetch};
      const timers = [];
      window.WebSocket = class { constructor() { sockets.push(this); } close() { this.isClosed = true; } };
      window.setTimeout = (work, wait) => timers.push({work, wait});
      window.fetch = () => new Promise(() => {});
      const hide = (hidden) => Object.defineProperty(document, 'hidden', {value: hidden, configurable: true});
      hide(true);
      const live = new Live(() => {}, 'ws://localhost/');
      live.start();
      dispatchEvent(new Event('online'));
      const told = [live.state, sockets.length];
      hide(false);
      document.dispatchEvent(new Event('visibilitychange'));
      told.push(live.state, sockets.length);
      timers.find(({wait}) => wait === 10_000).work();
      told.push(live.state, sockets[0].isClosed);
      delete document.hidden;
      clearInterval(live._watch);
      Object.assign(window, {WebSocket: real.socket, setTimeout: real.timer, fetch: real.fetch});
      return told;
    })"""
    assert ["asleep", 0, "connecting", 1, "lost", True] == page.evaluate(script)


def test_findings_are_asked_for_when_they_are_others(page: Page) -> None:
    """Details change all the time; what was found seldom does."""
    script = """async ({fleet, gpus, update}) => {
      const {mount} = await import('/pages/findings.js');
      const real = window.setTimeout;
      let wishes = 0;
      const handle = mount(document.createElement('div'), {query: {}}, {fleet});
      const tell = (...ids) => {
        window.setTimeout = (work, wait) => { wishes += wait === 2000 ? 1 : 0; work(); };
        update({node: 'n', gpus: gpus(['0']), values: {}, details: {findings: ids.map((id) => ({id, severity: 'low', label: '0'}))}});
        window.setTimeout = real;
        return wishes;
      };
      const told = [tell('a'), tell('a'), tell('a', 'b'), tell('b', 'a'), tell()];
      handle.leave();
      return told;
    }"""
    assert [2, 2, 3, 3, 4] == in_fleet(page, script), "the first time because there is a node, too"


def test_xid_errors_stand_at_their_moments(page: Page) -> None:
    """Not at the step in which they came, nor between two of them, and only those of the time that is shown."""
    script = """values => import('/parts/timeline-items.js').then((m) => m.xidMarks({
      from: 100, to: 200, times: values.map((_, at) => 100 + 10 * at), series: [
        {metric: 'xid_last_timestamp_seconds', node: 'n', subject: 'u', gpu: '0', values},
        {metric: 'xid_last_code', node: 'n', subject: 'u', gpu: '0', values: values.map((value) => value > 140 ? 94 : 31)},
      ]}).map((mark) => [mark.time, mark.label]))"""
    assert [] == page.evaluate(script, [None, None])
    assert [] == page.evaluate(script, [50.5, 50.5]), "it was before"
    assert [[112.25, "Xid 31"]] == page.evaluate(script, [None, 112.25, 112.25])
    assert [[112.25, "Xid 31"], [157.5, "Xid 94"]] == page.evaluate(
        script, [50.0, 105.0, 112.25, 112.25, 112.25, 140.0, 157.5, 157.5]
    )


def test_numbers_of_a_silent_node_are_called_old(page: Page) -> None:
    """Nothing is said of one that is well."""
    script = "node => import('/core/fleet.js').then((m) => m.silence(node, 1000))"
    assert not page.evaluate(script, {"state": "healthy", "connected": True, "seen": 999})
    assert "the values are from that time" in page.evaluate(
        script, {"state": "lost", "connected": False, "seen": 900, "time": 899}
    )
