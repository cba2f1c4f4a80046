"""The page of a job with sixteen GPUs, one of which slows the others; no server is behind it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from playwright.sync_api import expect

from tests.integration.browser import browsing, empty_page, in_fleet

if TYPE_CHECKING:
    from playwright.sync_api import Page

_PAGE = """async ({fleet, gpus, update, given}) => {
  const load = (tag, attributes) => new Promise((resolve) => {
    document.head.append(Object.assign(document.createElement(tag), attributes, {onload: resolve}));
  });
  const sheets = ['/vendor/uPlot.min.css', '/tokens.css', '/base.css', '/components.css', '/charts.css'];
  await Promise.all([...sheets.map((href) => load('link', {rel: 'stylesheet', href})),
    load('script', {src: '/vendor/uPlot.iife.min.js'})]);
  const [start, step, count] = [1750000000, 60, 200];
  const end = start + step * count;
  const times = Array.from({length: count}, (_, at) => start + at * step);
  const names = Array.from({length: given.gpus}, (_, at) => [`gpu-${String(2 + Math.floor(at / 8)).padStart(2, '0')}`, String(at % 8)]);
  const values = (metric, at) => times.map((_, place) => {
    const isSlow = place > 120;
    if (metric === 'sm_active_ratio') return isSlow ? (at === 13 ? 0.96 : 0.75) : 0.92;
    if (metric === 'sm_clock_hertz') return isSlow && at === 13 ? 1.21e9 : 1.98e9;
    return metric.endsWith('_ratio') ? 0.99 : metric === 'memory_used_bytes' ? 2 ** 35 : 60;
  });
  const series = (metric) => names.map(([node, gpu], at) => ({node, gpu, subject: `GPU-${at}`, metric, unit: '', values: values(metric, at)}));
  const processes = names.map(([node, gpu], at) => ({node, pid: 100 + at, start_time: start, first_seen: start, ended: null, user: 'ada',
    job: 'slurm:4711', container: null, pod: null, name: 'python3', command: ['python3', 'train_gpt.py'],
    gpus: [{gpu, from: start, to: end, memory_bytes_mean: 1, memory_bytes_max: 1, sm_ratio_mean: 1}]}));
  const span = {gpu: 5, label: '5', id: 'hot', cause: null, family: 'clocks', severity: 'high', summary: 'GPU 5 runs at 1.21 GHz',
    lost_ratio: 0.18, confidence: 0.9, pids: [], from: times[121], to: given.isLost ? end - 1 : null, evidence: [], advice: [{do: 'Replace fan tray 3', why: ''}],
    url: null, where: [{file: 'train_gpt.py', line: 212, function: 'all_reduce', share: 0.71, stacks: 40, role: 'main'}], node: 'gpu-03'};
  const usage = {user: 'ada', job: 'slurm:4711', program: 'train_gpt.py', node: null, pid: null, start_time: start, gpu_seconds: 190000,
    idle_seconds: 14000, harvested_seconds: 0, utilization_mean: 0.9, memory_bytes_max: 1, energy_joules: 1e8, harvested_energy_joules: null,
    gpus: names.length, nodes: ['gpu-02', 'gpu-03'], processes: names.length, first: start, last: end};
  window.asked = [];
  window.fetch = async (address) => {
    const url = new URL(String(address), 'http://localhost');
    window.asked.push(url.search);
    const metrics = url.searchParams.getAll('metrics').join().split(',').filter(Boolean);
    const flat = times.map(() => 0.75);
    const history = url.searchParams.get('spread') === 'percentiles'
      ? {series: [], bands: metrics.map((metric) => ({metric, unit: '', count: names.length, values: flat, lows: flat, highs: flat}))}
      : {series: metrics.flatMap(series)};
    const answers = {
      '/api/v1/processes': {from: start, to: end, processes, truncated: false, incomplete: []},
      '/api/v1/usage': {from: start, to: end, rows: [usage], incomplete: []},
      '/api/v1/findings/history': {from: start, to: end, spans: [span], truncated: false},
      '/api/v1/events': {events: []},
      '/manual.json': {families: {}, findings: {hot: {title: 'One GPU slows the others'}}, signals: {}, statistics: {}, comparisons: {}, reasons: {}},
      '/api/v1/history': {from: start, to: end, step, times, ...history},
    };
    return new Response(JSON.stringify(answers[url.pathname] ?? {}), {headers: {'content-type': 'application/json'}});
  };
  const [{mount}, {watchKeys}] = await Promise.all([import('/pages/job.js'), import('/core/shortcuts.js')]);
  watchKeys();
  fleet.headTime = () => end;
  for (const node of new Set(names.map(([name]) => name)))
    update({node, state: given.isLost ? 'lost' : 'healthy', seen: end - 60, gpus: gpus(['0', '1', '2', '3', '4', '5', '6', '7']),
      values: {sm_active_ratio: Array(8).fill(0.75)}});
  if (given.othersHold) update({node: 'gpu-03', values: {sm_active_ratio: Array(8).fill(0)}, details: {findings: [],
    processes: Array.from({length: 8}, (_, at) => [{pid: 900 + at, start_time: start, user: 'bob', job: 'slurm:4712'}])}});
  const main = document.body.appendChild(document.createElement('main'));
  const root = main.appendChild(Object.assign(document.createElement('div'), {className: 'page'}));
  location.hash = '#/job/slurm:4711';
  const app = {fleet, prefs: {read: (key, fallback) => fallback, write: () => {}}, announce: () => {}, toast: () => {}};
  window.leave = mount(root, {page: 'job', parts: ['slurm:4711'], query: {}}, app).leave;
}"""


@pytest.fixture
def page() -> Iterator[Page]:
    """A window that can import the modules."""
    with browsing() as browser:
        made = empty_page(browser)
        yield made
        made.evaluate("window.leave()")


def _shown(page: Page, gpus: int, **given: bool) -> None:
    in_fleet(page, _PAGE, {"gpus": gpus, **given})
    expect(page.locator(".gr-row").first).to_be_visible()


def test_sixteen_gpus_are_a_band_and_rows(page: Page) -> None:
    """The outlier has a name and a mark, the list of GPUs is the heat map; small charts become large, times are chosen."""
    page.set_viewport_size({"width": 1440, "height": 900})
    _shown(page, 16)
    large = page.locator(".lead-large .chart:visible")
    expect(large).to_have_attribute("data-kind", "band")
    expect(large.locator(".chart-legend")).to_contain_text("outlier gpu-03 · 5 96%")
    legend, plot = large.locator(".chart-legend").bounding_box(), large.locator(".u-over").bounding_box()
    assert legend is not None
    assert plot is not None
    assert legend["height"] < 30
    assert legend["width"] < plot["width"]
    rows = page.locator(".gr-row")
    expect(rows).to_have_count(16)
    expect(page.get_by_role("link", name="gpu-03 · 5")).to_have_count(1)
    expect(rows.nth(13)).to_have_attribute("data-severity", "high")
    expect(rows.nth(13).locator("[data-metric=sm_active_ratio]")).to_have_text("96")
    expect(rows.nth(13).locator("[data-metric=sm_clock_hertz]")).to_have_text("1.21")
    side = page.locator(".lead-side")
    for text in ("One GPU slows the others", "Replace fan tray 3", "train_gpt.py:212"):
        expect(side).to_contain_text(text)
    page.get_by_role("button", name="SM clock").click()
    expect(large).to_have_attribute("data-chart", "clock")
    expect(page.locator(".gr-legend")).to_contain_text("heat: SM clock")

    whole = page.get_by_role("button", name="Whole job")
    expect(whole).to_have_attribute("aria-pressed", "true")
    page.get_by_role("button", name="Zoom in").click()
    expect(whole).to_have_attribute("aria-pressed", "false")
    expect(large.locator(".chart-value").first).to_have_text("1.98 GHz")
    zoomed = page.url
    page.keyboard.press("+")
    assert zoomed != page.url
    page.keyboard.press("0")
    expect(whole).to_have_attribute("aria-pressed", "true")

    page.keyboard.press("?")
    expect(page.get_by_role("dialog")).to_contain_text(re.compile("wheel.*pinch", re.DOTALL))
    page.keyboard.press("Escape")

    popover = page.locator("details.range-own")
    summary = popover.locator("summary")
    summary.click()
    expect(popover).to_have_attribute("open", "")
    page.keyboard.press("Escape")
    expect(popover).not_to_have_attribute("open", "")
    expect(summary).to_be_focused()
    summary.click()
    page.get_by_role("heading", level=1).click()
    expect(popover).not_to_have_attribute("open", "")
    summary.click()
    popover.get_by_role("button", name="Show").click()
    expect(popover).not_to_have_attribute("open", "")
    expect(page.locator(".range")).to_contain_text(" to ")


def test_on_a_phone_the_others_are_folded(page: Page) -> None:
    """What differs comes first; durations are in the popover, which a choice closes; nothing is wider than the screen."""
    page.set_viewport_size({"width": 390, "height": 844})
    _shown(page, 16)
    cards = page.locator(".gr-cards")
    expect(cards.get_by_role("link", name="gpu-03 · 5")).to_be_visible()
    expect(cards.locator("summary")).to_contain_text("15 others")
    expect(cards.get_by_role("link", name="gpu-02 · 0")).to_be_hidden()
    cards.locator("summary").click()
    expect(cards.get_by_role("link", name="gpu-02 · 0")).to_be_visible()
    expect(page.locator("table.stack td").first).to_have_css("display", "flex")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    popover = page.locator("details.range-own")
    popover.locator("summary").click()
    popover.get_by_role("button", name="15 min").click()
    expect(popover).not_to_have_attribute("open", "")
    expect(popover.locator("summary")).to_contain_text("last 15 min")


def test_the_head_computes_the_percentiles_of_many_gpus(page: Page) -> None:
    """The rows are thin then, and their numbers are those of nodes."""
    _shown(page, 128)
    expect(page.locator(".lead-large .chart:visible .chart-legend")).to_contain_text("of 128 GPUs")
    expect(page.locator(".gr-row")).to_have_count(16)
    asked = page.evaluate("window.asked.filter((search) => search.includes('metrics='))")
    assert any("spread=percentiles" in search for search in asked)
    assert all("spread=percentiles" in search or "metrics=sm_active_ratio&" in search for search in asked)


def test_a_job_on_lost_nodes_is_lost(page: Page) -> None:
    """It keeps the findings that its nodes had when they were lost; its figures are of the range, and none is of now."""
    _shown(page, 16, isLost=True)
    expect(page.locator(".history-title .badge.pill")).to_have_text("lost")
    expect(page.locator(".lead-side")).to_contain_text("One GPU slows the others")
    stats = page.locator("dl.stats")
    expect(stats.locator("[data-stat='SM active']")).to_contain_text("mean")
    expect(stats).to_contain_text("at least until")
    expect(stats).not_to_contain_text("now")
    expect(page.locator("td[data-label=Until]").first).to_have_text("lost")


def test_what_others_hold_now_is_not_of_the_job(page: Page) -> None:
    """GPUs that a job held earlier count in its range, and not in its figures of now."""
    _shown(page, 16, othersHold=True)
    stats = page.locator("dl.stats")
    expect(stats.locator("[data-stat=GPUs]")).to_have_text(re.compile(r"8\s+on gpu-02, 16 in this range"))
    expect(stats.locator("[data-stat='SM active']")).to_have_text(re.compile(r"75%\s+current mean"))
