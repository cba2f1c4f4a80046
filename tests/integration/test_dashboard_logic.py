"""The dashboard's core by itself: numbers in words, addresses, states of GPUs, the filter, the map's layout."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest

from tests.integration.browser import browsing, empty_page, in_fleet

if TYPE_CHECKING:
    from playwright.sync_api import Page

DASH = "\u2013"
FOLD = {"pid": 1, "user": "ada", "job": "harvest:fold"}


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    """An empty page that can import the modules; there is no server behind it."""
    with browsing() as browser:
        yield empty_page(browser)


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
        ("f.text('a\\u200bb\\u00adc\\ufeff')", "a\ufffdb\ufffdc\ufffd"),
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
        ({"gpu_utilization_ratio": 0.9}, [FOLD], "harvested"),
        ({"gpu_utilization_ratio": 0.0}, [FOLD], "harvested"),
        ({"gpu_utilization_ratio": 0.0, "harvest_state": 2}, [], "harvested"),
        ({"gpu_utilization_ratio": 0.9, "harvest_state": 3}, [{"pid": 1}], "harvested"),
        ({"gpu_utilization_ratio": 0.9, "harvest_state": 2}, [FOLD, {"pid": 2, "user": "bob"}], "busy"),
        ({"gpu_utilization_ratio": 0.0, "harvest_state": 1}, [], "free"),
        ({"gpu_utilization_ratio": 0.0, "harvest_state": 0}, [], "free"),
    ],
)
def test_the_state_of_a_gpu(
    page: Page, values: dict[str, float | None], processes: list[Any] | None, expected: str
) -> None:
    """Busy when it works, idle when it is held and does not, harvested when only a harvest has it, free when nobody holds it."""
    script = """({core, fleet, gpus, update, given}) => {
      const values = Object.fromEntries(Object.entries(given.values).map(([name, value]) => [name, [value]]));
      update({node: 'n', gpus: gpus(['0']), values, details: {processes: [given.processes]}});
      const before = core.gpuState(fleet.nodes.get('n').gpus[0]);
      update({node: 'n', state: 'lost', values});
      return [before, core.gpuState(fleet.nodes.get('n').gpus[0])];
    }"""
    assert [expected, "lost"] == in_fleet(page, script, {"values": values, "processes": processes})


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
    assert ["busy", "busy", "idle"] == in_fleet(page, script)


def test_a_fresh_tab_sees_what_an_old_one_does(page: Page) -> None:
    """Until the head said what GPUs did just now nobody is called idle; afterwards the states are as everywhere."""
    script = """async ({core, fleet, gpus, update, process, wait}) => {
      const {Recent} = await import('/core/recent.js');
      const asked = [];
      const before = window.fetch;
      let answer;
      window.fetch = (address) => new Promise((resolve) => { asked.push(address); answer = resolve; });
      new Recent(fleet, Object.assign(new EventTarget(), {wish: {nodes: null}}));
      const states = () => [...fleet.gpus()].map(core.gpuState).join();
      const tell = () => update({node: 'n', values: {gpu_utilization_ratio: [0, 0, 0]}});
      fleet.take({type: 'hello', time: 1000, nodes: [{node: 'n', state: 'healthy', gpus: gpus(['0', '1', '2'])}]});
      update({node: 'n', values: {gpu_utilization_ratio: [0, 0, 0]}, details: {processes: [[process('ada')], [process('ada')], []]}});
      const seen = [states()];
      const drawn = new Promise((resolve) => fleet.addEventListener('values', resolve, {once: true}));
      const series = [['0', [0.4, 0]], ['1', [0, 0]], ['2', [0.9, null]]].map(([id, values]) =>
        ({node: 'n', subject: `GPU-${id}`, gpu: id, times: [980, 985], values}));
      answer(new Response(JSON.stringify({series, step: 5, to: 1000})));
      await drawn;
      window.fetch = before;
      seen.push(states());
      wait(14); tell(); seen.push(states());
      wait(2); tell(); seen.push(states());
      return [seen, asked];
    }"""
    seen, asked = in_fleet(page, script)
    assert ["busy,busy,free", "busy,idle,free", "busy,idle,free", "idle,idle,free"] == seen
    assert 1 == len(asked)
    assert "metric=gpu_utilization_ratio" in asked[0]


def test_without_an_answer_a_tab_looks_for_itself(page: Page) -> None:
    """For half a minute nobody is called idle."""
    script = """({core, fleet, gpus, update, process, wait}) => {
      fleet.take({type: 'hello', time: 1000, nodes: [{node: 'n', state: 'healthy', gpus: gpus(['0'])}]});
      return [0, 29, 2].map((seconds) => {
        wait(seconds);
        update({node: 'n', values: {gpu_utilization_ratio: [0]}, details: {processes: [[process('ada')]]}});
        return core.gpuState(fleet.nodes.get('n').gpus[0]);
      });
    }"""
    assert ["busy", "busy", "idle"] == in_fleet(page, script)


def test_a_gpu_with_a_fault_is_not_free(page: Page) -> None:
    """It is counted and found as what it is, its instances too; who holds one is not hidden by that."""
    script = """({core, filter, fleet, gpus, update, process}) => {
      const fault = (label) => ({id: 'gpu_fault', family: 'fault', severity: 'high', gpu: 0, label});
      update({node: 'n', gpus: gpus(['0', '1', '2', '2:0', '3']), values: {gpu_utilization_ratio: [0, 0.9, null, null, 0]},
        details: {processes: [[], [process('ada')], [], [], []], findings: [fault('0'), fault('1'), fault('2')]}});
      const found = new filter.Matcher(filter.fromQuery({state: 'faulty'})).gpus(fleet.nodes.get('n'));
      return [[...fleet.gpus()].map(core.gpuState), filter.tallyText(filter.tally(fleet.gpus())), [...found].map((gpu) => gpu.label)];
    }"""
    states, text, found = in_fleet(page, script)
    assert ["faulty", "busy", "faulty", "faulty", "free"] == states
    assert "4 GPUs: 1 free, 1 busy, 2 faulty" == text
    assert {"0", "2:0"} <= set(found)


def test_a_lost_node_of_which_only_its_gpus_are_known(page: Page) -> None:
    """After a restart of the head: its GPUs count as lost, with nothing said of what they did."""
    script = """({core, filter, fleet, gpus, update}) => {
      fleet.take({type: 'hello', time: 1000, nodes: [{node: 'n', state: 'lost', gpus: gpus(['0', '1'])}]});
      update({node: 'n', state: 'lost', connected: false, time: null, seen: 400, values: {}});
      const node = fleet.nodes.get('n');
      return [filter.tallyText(filter.tally(node.gpus)), node.gpus.map((gpu) => gpu.values), core.lastHeard(node, 1000)];
    }"""
    assert ["2 GPUs: 0 free, 0 busy, 2 unknown or lost", [{}, {}], 400] == in_fleet(page, script)


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
    assert [["a", "a", "a,b", "b"], True, {"power_watts": 7}, ["c"], 2000] == in_fleet(page, script)


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
        (): (["cpu-1:", "gpu-1:0,1,2", "gpu-2:0"], True),
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
        (("state", "nonsense"),): (["cpu-1:", "gpu-1:0,1,2", "gpu-2:0"], True),
    }
    for given, answer in expected.items():
        assert list(answer) == in_fleet(page, script, dict(given)), given


def test_instances_count_and_not_what_they_are_parts_of(page: Page) -> None:
    """A GPU that is divided is no GPU that somebody can have."""
    script = """({filter, fleet, gpus, update, process}) => {
      update({node: 'n', gpus: gpus(['0', '0:0', '0:1', '1']), values: {gpu_utilization_ratio: [0.4, null, null, 0]},
        details: {processes: [[], [process('ada')], [], []]}});
      const counts = filter.tally(fleet.gpus());
      return [counts, filter.tallyText(counts)];
    }"""
    counts, text = in_fleet(page, script)
    assert {
        "all": 3,
        "free": 2,
        "harvested": 0,
        "busy": 1,
        "idle": 0,
        "faulty": 0,
        "unknown": 0,
        "lost": 0,
    } == counts
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
    by_name, by_free = in_fleet(page, script)
    assert ["gpu-1", "gpu-2", "gpu-3", "gpu-10"] == by_name
    assert ["gpu-2", "gpu-10", "gpu-1", "gpu-3"] == by_free


def test_harvested_gpus_are_neither_free_nor_anybodys(page: Page) -> None:
    """They are counted and found apart, come right after free ones, and nobody holds them."""
    script = """({core, filter, fleet, gpus, update, process, given}) => {
      const fold = process('ada', {job: 'harvest:fold'});
      const told = {a: [process('bob')], b: [fold], c: [process('bob'), fold]};
      for (const [node, processes] of Object.entries(told)) {
        update({node, gpus: gpus(['0']), values: {gpu_utilization_ratio: [0.9]}, details: {processes: [processes]}});
      }
      const found = (filtered) => {
        const matcher = new filter.Matcher({...filter.NO_FILTER, ...filtered});
        return [...fleet.nodes.values()].filter((node) => matcher.gpus(node) !== null).map((node) => node.name).join();
      };
      return [
        filter.tallyText(filter.tally(fleet.gpus())),
        [found({state: 'harvested'}), found({state: 'free'}), found({state: 'busy'}), found({user: 'ada'}), found({q: 'harvest:fold'})],
        filter.order(fleet, {...filter.NO_FILTER, sort: 'free'}).join(),
        filter.usersSeen(fleet).join(),
        [...fleet.gpus()].map((gpu) => core.usersOf(gpu).join()),
      ];
    }"""
    assert [
        "3 GPUs: 0 free, 1 harvested (yours when you use it), 2 busy",
        ["b", "", "a,c", "", "b,c"],
        "b,a,c",
        "bob",
        ["bob", "", "bob"],
    ] == in_fleet(page, script)


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
      const map = m.place([8, 8, 8], 200, 20, 0);
      const go = (from, ...keys) => keys.reduce((at, key) => m.neighbour(map, at, `Arrow${key}`), from);
      const { x, y } = map.cells[10];
      return [go(0, 'Left'), go(3, 'Right'), go(3, 'Down'), go(3, 'Down', 'Up'), go(20, 'Down'), go(23, 'Right'),
        m.cellAt(map, x + 19, y + 19), m.cellAt(map, 1, 1)];
    })"""
    assert [0, 4, 11, 3, 20, 23, 10, -1] == page.evaluate(script)


def test_cells_grow_with_the_screen(page: Page) -> None:
    """64 GPUs fill most of a wall screen, and their names are as large as its letters."""
    script = """import('/parts/heat-layout.js').then((m) => {
      const found = m.layout(Array(8).fill(8), 3800, 1850, 19 / 14);
      return [found.size, found.cells[0].y - found.groups[0].y];
    })"""
    size, label = page.evaluate(script)
    assert size > 200
    assert 19 == label
