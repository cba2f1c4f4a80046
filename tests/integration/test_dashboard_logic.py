"""The dashboard's modules by themselves: numbers in words, addresses, states of GPUs, the filter, the map's layout."""

from __future__ import annotations

import mimetypes
from collections.abc import Iterator
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest

from tests.integration.browser import browsing

if TYPE_CHECKING:
    from playwright.sync_api import Page, Route

DASH = "\u2013"
STATIC = Path(str(files("gpulse.web").joinpath("static")))
_FLEET = """
async ({script, given}) => {
  const [core, filter] = await Promise.all([import("/core/fleet.js"), import("/parts/filter.js")]);
  let now = 1000;
  const fleet = new core.Fleet(() => now);
  const gpus = (labels) => labels.map((id) => ({id, uuid: `GPU-${id}`, name: "H200"}));
  const update = (row) => fleet.take({type: "update", time: now, nodes: [{state: "healthy", connected: true, time: now, ...row}]});
  const process = (user, more = {}) => ({pid: 1, user, job: null, name: "python3", command: ["python3", "train.py"], ...more});
  const wait = (seconds) => { now += seconds; };
  return await (new Function("return " + script)())({core, filter, fleet, gpus, update, process, wait, given});
}
"""


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    """An empty page that can import the modules; there is no server behind it."""
    with browsing() as browser:
        opened = browser.new_page()
        opened.route("**/*", _serve)
        opened.goto("http://localhost/empty")
        yield opened


def _serve(route: Route) -> None:
    path = STATIC / urlsplit(route.request.url).path.lstrip("/")
    if path.is_file():
        kind = mimetypes.guess_type(path.name)[0] or "text/plain"
        route.fulfill(body=path.read_bytes(), content_type=kind)
    else:
        route.fulfill(body="<!doctype html><title>empty</title>", content_type="text/html")


def _in_fleet(page: Page, script: str, given: Any = None) -> Any:
    """What a function answers that gets a fleet and what it takes to fill it."""
    return page.evaluate(_FLEET, {"script": script, "given": given})


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ("f.bytes(null)", DASH),
        ("f.bytes(undefined)", DASH),
        ("f.bytes(NaN)", DASH),
        ("f.bytes(0)", "0 B"),
        ("f.bytes(13207024435)", "12.3 GiB"),
        ("f.bytesOf(2 ** 30, 80 * 2 ** 30)", "1.0 / 80.0 GiB"),
        ("f.bytesOf(null, 80 * 2 ** 30)", f"{DASH} / 80.0 GiB"),
        ("f.bytesOf(2 ** 39, 2 ** 40)", "512 / 1024 GiB"),
        ("f.rate(1.2e9)", "1.2 GB/s"),
        ("f.percent(0.873)", "87 %"),
        ("f.percent(null)", DASH),
        ("f.watts(411.7)", "412 W"),
        ("f.celsius(61)", "61 °C"),
        ("f.hertz(1.98e9)", "1.98 GHz"),
        ("f.duration(8.9)", "8 s"),
        ("f.duration(59.99)", "59 s"),
        ("f.duration(725)", "12 min"),
        ("f.duration(3 * 86400 + 4 * 3600 + 59)", "3 d 4 h"),
        ("f.duration(-3)", "0 s"),
        ("f.hours(44640)", "12.4 h"),
        ("f.joules(11520000)", "3.2 kWh"),
        ("f.joules(12000)", "12.0 kJ"),
        ("f.metricValue('sm_active_ratio', 0.5)", "50 %"),
        ("f.metricValue('power_watts', null)", DASH),
        ("f.metricTitle('sm_active_ratio')", "SM active"),
        ("f.metricTitle('ecc_corrected_errors_total')", "ECC corrected errors"),
        ("f.text('a\\u202eb\\u001b[31m')", "a\ufffdb\ufffd[31m"),
        ("f.text('')", DASH),
    ],
)
def test_numbers_in_words(page: Page, call: str, expected: str) -> None:
    """What people read; a dash for what nobody knows."""
    assert expected == page.evaluate(f"import('/core/format.js').then((f) => {call})")


@pytest.mark.parametrize("name", ["gpu-1", "a/b", "ü ?#%", "100%", "<img src=x>", ";rm -rf ~"])
def test_an_address_keeps_a_name(page: Page, name: str) -> None:
    """Whatever a node is called, its address leads back to it."""
    found = page.evaluate(
        "name => import('/core/router.js').then((r) => r.parse(r.href('gpu', name, '3:1', {from: '-24h', x: null})))",
        name,
    )
    assert {"page": "gpu", "parts": [name, "3:1"], "query": {"from": "-24h"}} == found


def test_words_of_an_address_change(page: Page) -> None:
    """Without another page being shown."""
    script = """import('/core/router.js').then((r) => {
      let moves = 0;
      addEventListener('hashchange', () => { moves += 1; });
      history.replaceState(null, '', '#/gpu/n/0?from=-1h&to=now');
      r.setQuery({to: null, from: '-5m', q: 'a b'});
      const after = r.current();
      history.replaceState(null, '', '/empty');
      return [after.query, after.parts, moves];
    })"""
    assert [{"from": "-5m", "q": "a b"}, ["n", "0"], 0] == page.evaluate(script)


@pytest.mark.parametrize(
    ("values", "processes", "expected"),
    [
        ({"gpu_utilization_ratio": 0.5}, [{"pid": 1}], "busy"),
        ({"gpu_utilization_ratio": 0.5}, [], "busy"),
        ({"gpu_utilization_ratio": 0.0}, [{"pid": 1}], "idle"),
        ({"gpu_utilization_ratio": 0.0, "memory_used_bytes": 9 << 30}, [], "idle"),
        ({"gpu_utilization_ratio": 0.0, "memory_used_bytes": 500 << 20}, [], "free"),
        ({"gpu_utilization_ratio": 0.0}, None, "free"),
        ({"gpu_utilization_ratio": None}, None, "unknown"),
        ({"gpu_utilization_ratio": None}, [], "free"),
        ({"gpu_utilization_ratio": None}, [{"pid": 1}], "busy"),
        ({"gpu_utilization_ratio": None, "sm_active_ratio": 0.0}, [{"pid": 1}], "idle"),
    ],
)
def test_the_state_of_a_gpu(
    page: Page, values: dict[str, float | None], processes: list[Any] | None, expected: str
) -> None:
    """Busy when it works, idle when it is held and does not, free when nobody holds it, never a guess."""
    script = """({core, fleet, gpus, update, given}) => {
      const values = Object.fromEntries(Object.entries(given.values).map(([name, value]) => [name, [value]]));
      update({node: 'n', gpus: gpus(['0']), values, details: {processes: [given.processes]}});
      const before = core.gpuState(fleet.nodes.get('n').gpus[0]);
      update({node: 'n', state: 'lost', values});
      return [before, core.gpuState(fleet.nodes.get('n').gpus[0])];
    }"""
    assert [expected, "lost"] == _in_fleet(page, script, {"values": values, "processes": processes})


def test_a_pause_between_two_steps_is_not_idleness(page: Page) -> None:
    """A GPU that worked a moment ago is busy; one that has not for long is held idle."""
    script = """({core, fleet, gpus, update, process, wait}) => {
      const tell = (used) => {
        update({node: 'n', gpus: gpus(['0']), values: {gpu_utilization_ratio: [used]}, details: {processes: [[process('ada')]]}});
        return core.gpuState(fleet.nodes.get('n').gpus[0]);
      };
      const states = [tell(0.9)];
      wait(10);
      states.push(tell(0));
      wait(60);
      states.push(tell(0));
      return states;
    }"""
    assert ["busy", "busy", "idle"] == _in_fleet(page, script)


def test_nodes_come_and_go(page: Page) -> None:
    """GPUs that stay are the same objects; a head that comes back without a node takes it away."""
    script = """({fleet, gpus, update}) => {
      const seen = [];
      fleet.addEventListener('structure', () => seen.push([...fleet.nodes.keys()].join()));
      update({node: 'a', gpus: gpus(['0', '1']), values: {power_watts: [1, null]}});
      const first = fleet.nodes.get('a').gpus[1];
      update({node: 'a', gpus: gpus(['1']), values: {power_watts: [7]}});
      const isSame = first === fleet.nodes.get('a').gpus[0];
      update({node: 'b', gpus: [], values: {}});
      update({node: 'b', values: {}});
      fleet.take({type: 'hello', time: 2000, nodes: [{node: 'b', state: 'late', gpus: []}], missing: ['b', 'c']});
      return [seen, isSame, first.values, fleet.missing, fleet.headTime()];
    }"""
    assert [["a", "a", "a,b", "b"], True, {"power_watts": 7}, ["c"], 2000] == _in_fleet(page, script)


def test_the_filter(page: Page) -> None:
    """Every word must be found somewhere at a GPU or its node; states and users narrow it down."""
    script = """({filter, fleet, gpus, update, process, given}) => {
      const values = {gpu_utilization_ratio: [0.9, 0, 0]};
      const processes = [[process('ada', {job: 'slurm:7'})], [process('grace')], []];
      update({node: 'gpu-1', gpus: gpus(['0', '1', '2']), values, details: {labels: {rack: 'r1'}, processes, findings: []}});
      update({node: 'gpu-2', gpus: gpus(['0']), values: {gpu_utilization_ratio: [0]}, state: 'late',
        details: {labels: {rack: 'r2'}, processes: [[]], findings: [{id: 'x', severity: 'low', gpu: 0, label: '0'}]}});
      update({node: 'cpu-1', gpus: [], values: {}, details: {labels: {}, processes: [], findings: []}});
      fleet.take({type: 'update', nodes: [], missing: ['gpu-9']});
      const matcher = new filter.Matcher(filter.fromQuery(given));
      const shown = [...fleet.nodes.values()].flatMap((node) => {
        const found = matcher.gpus(node);
        return found === null ? [] : [`${node.name}:${[...found].map((gpu) => gpu.label)}`];
      });
      return [shown, matcher.missing('gpu-9')];
    }"""
    expected: dict[tuple[tuple[str, str], ...], tuple[list[str], bool]] = {
        (): (["gpu-1:0,1,2", "gpu-2:0", "cpu-1:"], True),
        (("q", "ADA train"),): (["gpu-1:0"], False),
        (("q", "slurm:7"),): (["gpu-1:0"], False),
        (("q", "rack=r1 idle"),): (["gpu-1:1"], False),
        (("q", "ada grace"),): ([], False),
        (("q", "gpu-"),): (["gpu-1:0,1,2", "gpu-2:0"], True),
        (("state", "free"),): (["gpu-1:2", "gpu-2:0"], False),
        (("state", "idle"),): (["gpu-1:1"], False),
        (("state", "findings"),): (["gpu-2:0"], False),
        (("state", "away"),): (["gpu-2:0"], True),
        (("user", "grace"),): (["gpu-1:1"], False),
        (("user", "grac"),): ([], False),
        (("state", "nonsense"),): (["gpu-1:0,1,2", "gpu-2:0", "cpu-1:"], True),
    }
    for given, answer in expected.items():
        assert list(answer) == _in_fleet(page, script, dict(given)), given


def test_instances_count_and_not_what_they_are_parts_of(page: Page) -> None:
    """A GPU that is divided is no GPU that somebody can have."""
    script = """({filter, fleet, gpus, update, process}) => {
      update({node: 'n', gpus: gpus(['0', '0:0', '0:1', '1']), values: {gpu_utilization_ratio: [0.4, null, null, 0]},
        details: {processes: [[], [process('ada')], [], []]}});
      const counts = filter.tally(fleet.gpus());
      return [counts, filter.tallyText(counts)];
    }"""
    counts, text = _in_fleet(page, script)
    assert {"all": 3, "free": 2, "busy": 1, "idle": 0, "unknown": 0, "lost": 0} == counts
    assert "3 GPUs: 2 free, 1 busy" == text


def test_the_order_of_nodes(page: Page) -> None:
    """As people count; or those with most free GPUs first."""
    script = """({filter, fleet, gpus, update}) => {
      for (const [node, free] of [['gpu-10', 1], ['gpu-2', 2], ['gpu-1', 0]]) {
        update({node, gpus: gpus(['0', '1']), values: {gpu_utilization_ratio: [free > 0 ? 0 : 1, free > 1 ? 0 : 1]}});
      }
      fleet.take({type: 'update', nodes: [], missing: ['gpu-3']});
      return ['name', 'free'].map((sort) => filter.order(fleet, {...filter.NO_FILTER, sort}));
    }"""
    by_name, by_free = _in_fleet(page, script)
    assert ["gpu-1", "gpu-2", "gpu-3", "gpu-10"] == by_name
    assert ["gpu-2", "gpu-10", "gpu-1", "gpu-3"] == by_free


@pytest.mark.parametrize(
    ("nodes", "gpus", "width", "height"),
    [(125, 8, 1566, 760), (1250, 8, 1566, 760), (1, 1, 360, 300), (40, 16, 358, 500), (3, 8, 3800, 1900)],
)
def test_the_map_fits(page: Page, nodes: int, gpus: int, width: int, height: int) -> None:
    """Every GPU has a place inside the picture, and no two share one."""
    script = """({nodes, gpus, width, height}) => import('/parts/heat-layout.js').then((m) => {
      const found = m.layout(Array(nodes).fill(gpus), width, height);
      return [found.size, found.height, found.cells.map((cell) => [cell.x, cell.y])];
    })"""
    size, tall, cells = page.evaluate(
        script, {"nodes": nodes, "gpus": gpus, "width": width, "height": height}
    )
    assert nodes * gpus == len(cells) == len({tuple(cell) for cell in cells})
    assert all(0 <= x and x + size <= width and 0 <= y and y + size <= tall for x, y in cells)
    assert tall <= height
    lines = sorted({y for _, y in cells})
    assert all(low + size <= high for low, high in pairwise(lines))


def test_arrows_lead_over_the_map(page: Page) -> None:
    """Left and right from GPU to GPU, up and down from line to line, and never out of it."""
    script = """import('/parts/heat-layout.js').then((m) => {
      const map = m.place([8, 8, 8], 200, 20, false);
      const go = (from, ...keys) => keys.reduce((at, key) => m.neighbour(map, at, `Arrow${key}`), from);
      const { x, y } = map.cells[10];
      return [go(0, 'Left'), go(3, 'Right'), go(3, 'Down'), go(3, 'Down', 'Up'), go(20, 'Down'), go(23, 'Right'),
        m.cellAt(map, x + 19, y + 19), m.cellAt(map, 1, 1)];
    })"""
    assert [0, 4, 11, 3, 20, 23, 10, -1] == page.evaluate(script)
