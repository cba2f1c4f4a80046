"""The dashboard's core by itself: numbers in words, addresses, states of GPUs, the filter, the order of nodes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, pairwise
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from gpulse.cluster.head.answer_builder import build_hardware
from gpulse.cluster.protocol.head_interface import LiveNode
from gpulse.diagnosis.rule_registry import RULES_BY_ID, find_category, find_title
from gpulse.model.device import Device, DevicePath, PcieLevel
from gpulse.model.finding import Finding
from gpulse.model.formatting import share
from gpulse.terminal.diagnosis_verdict import confidence_word
from tests.integration.browser import browsing, empty_page, in_fleet
from tests.unit.gpu_state_cases import STATE_CASES

if TYPE_CHECKING:
    from playwright.sync_api import Page

DASH = "\u2013"


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
        ("f.percent(0.873)", "87%"),
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
        ("f.metricValue('sm_active_ratio', 0.5)", "50%"),
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


@pytest.mark.parametrize("confidence", [1.0, 0.85, 0.84, 0.6, 0.59, 0.1])
def test_confidence_has_the_words_of_the_terminal(page: Page, confidence: float) -> None:
    """One finding is not certain on a page and sure in a terminal."""
    script = f"import('/parts/findings-manual.js').then((m) => m.confidenceWord({confidence}))"

    assert confidence_word(confidence) == page.evaluate(script)


@pytest.mark.parametrize("value", [0.0, 0.0004, 0.014, 0.0995, 0.5, 1.0])
def test_percents_of_evidence_are_written_as_in_the_terminal(page: Page, value: float) -> None:
    """Without a space before the sign."""
    script = f"import('/parts/findings-manual.js').then((m) => m.written({value}, 'share'))"

    assert share(value) == page.evaluate(script)


@pytest.mark.parametrize("name", ["gpu-1", "a/b", "ü ?#%", "100%", "<img src=x>", ";rm -rf ~"])
def test_an_address_keeps_a_name(page: Page, name: str) -> None:
    """Whatever a node is called, its address leads back to it."""
    found = page.evaluate(
        "name => import('/core/router.js').then((r) => r.parse(r.href('gpu', name, '3:1', {from: '-24h', x: null})))",
        name,
    )
    assert {"page": "gpu", "parts": [name, "3:1"], "query": {"from": "-24h"}} == found


def test_nvlinks_in_the_topology_do_not_meet(page: Page) -> None:
    """Of lines at the same depth, one ends before the next begins; every pair of GPUs has one."""
    order = [f"GPU-{index}" for index in range(8)]
    pairs = [{"between": [one, other], "nvlinks": 1} for one, other in combinations(order, 2)]
    arcs = page.evaluate(
        "([pairs, order]) => import('/parts/topology.js').then((t) => t.placeArcs(pairs, order))",
        [pairs, order],
    )
    spans = sorted(
        (arc["depth"], *sorted(order.index(uuid) for uuid in arc["path"]["between"])) for arc in arcs
    )

    assert len(pairs) == len(spans)
    assert all(depth < deeper or end < start for (depth, _, end), (deeper, start, _) in pairwise(spans))


def test_devices_are_grouped_by_numa_node_and_pcie_switch(page: Page) -> None:
    """A network adapter on the switch of a GPU stands with it, another one by itself under the nearest NUMA node."""
    answer = build_hardware(topology_node())
    script = """hardware => import('/parts/topology.js').then(({arrange, cellText}) => {
      const {sockets, paths, hasSwitch} = arrange(hardware);
      const cells = hardware.gpus.map((gpu) => cellText(paths, hardware.gpus[0].uuid, gpu.uuid));
      return [hasSwitch, cells, sockets.map(({numa, clusters}) => [numa, clusters.map((one) =>
        [one.gpus.map((gpu) => gpu.id), one.adapters, one.level, one.upward])])];
    })"""
    has_switch, cells, sockets = page.evaluate(script, msgspec.to_builtins(answer))

    assert (False, ["X", "PIX", "PHB", "NV4"]) == (has_switch, cells)
    assert [
        [0, [[["0", "1"], ["mlx5_0"], "PIX", "PHB"], [["2"], [], None, "PHB"]]],
        [1, [[["3"], [], None, None], [[], ["eth1"], None, "NODE"]]],
    ] == sockets


def topology_node() -> LiveNode:
    """Two GPUs on one PCIe switch with an adapter, one on another host bridge, and one on another CPU with an adapter."""
    levels: dict[tuple[int, int], PcieLevel] = {(0, 1): "PIX", (0, 2): "PHB", (1, 2): "PHB"}
    adapters: list[dict[str, PcieLevel]] = [
        {"mlx5_0": "PIX", "eth1": "SYS"},
        {"mlx5_0": "PIX", "eth1": "SYS"},
        {"mlx5_0": "PHB", "eth1": "SYS"},
        {"mlx5_0": "SYS", "eth1": "NODE"},
    ]
    devices = [
        Device(
            *(index, f"GPU-{index}", "A"),
            numa_node=index // 3,
            paths=tuple(
                DevicePath(
                    f"GPU-{other}", levels.get((index, other), "SYS"), 4 if (index, other) == (0, 3) else 0
                )
                for other in range(index + 1, 4)
            ),
            adapter_paths=tuple(DevicePath(name, level) for name, level in adapters[index].items()),
        )
        for index in range(4)
    ]
    return LiveNode(1, "n", "lost", False, 0.0, None, {}, (), {}, "", devices)


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


@pytest.mark.parametrize(("values", "processes", "expected"), STATE_CASES)
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
      const {Recent} = await import('/core/live.js');
      const asked = [];
      const before = window.fetch;
      let answer;
      window.fetch = (address) => new Promise((resolve) => { asked.push(address); answer = resolve; });
      new Recent(fleet, Object.assign(new EventTarget(), {subscription: {nodes: null}}));
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
      return [[...fleet.gpus()].map(core.gpuState), filter.tally(fleet.gpus()), [...found].map((gpu) => gpu.label)];
    }"""
    states, counts, found = in_fleet(page, script)
    assert ["faulty", "busy", "faulty", "faulty", "free"] == states
    assert [4, 1, 1, 2] == [counts[name] for name in ("all", "free", "busy", "faulty")]
    assert {"0", "2:0"} <= set(found)


def test_a_lost_node_of_which_only_its_gpus_are_known(page: Page) -> None:
    """After a restart of the head: its GPUs count as lost, with nothing said of what they did."""
    script = """({core, filter, fleet, gpus, update}) => {
      fleet.take({type: 'hello', time: 1000, nodes: [{node: 'n', state: 'lost', gpus: gpus(['0', '1'])}]});
      update({node: 'n', state: 'lost', connected: false, time: null, seen: 400, values: {}});
      const node = fleet.nodes.get('n');
      return [filter.tally(node.gpus).lost, node.gpus.map((gpu) => gpu.values), core.lastHeard(node, 1000)];
    }"""
    assert [2, [{}, {}], 400] == in_fleet(page, script)


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
        (("state", "findings"),): (["gpu-2:0"], True),
        (("state", "lost"),): ([], True),
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
      return filter.tally(fleet.gpus());
    }"""
    assert {
        "all": 3,
        "free": 2,
        "harvested": 0,
        "busy": 1,
        "idle": 0,
        "faulty": 0,
        "unknown": 0,
        "lost": 0,
    } == in_fleet(page, script)


def test_the_order_of_nodes(page: Page) -> None:
    """Lost, missing and faulty nodes first, then by the worst finding; or by what was chosen, and then as people count."""
    script = """({filter, fleet, gpus, update, process}) => {
      const finding = (id, severity) => ({id, severity, gpu: 0, label: '0', cause: null, summary: ''});
      const told = [
        ['gpu-10', [0, 1], 300, [[], [process('bob')]], []],
        ['gpu-2', [0, 0], 100, [[], []], [finding('x', 'medium'), finding('y', 'low')]],
        ['gpu-1', [1, 1], 200, [[process('ada')], [process('ada')]], [finding('x', 'high')]],
        ['gpu-7', [0, 1], 0, [[], [process('carl')]], [finding('gpu_fault', 'critical')]],
        ['gpu-9', [1, 1], 250, [[process('dora')], []], []],
      ];
      for (const [node, used, watts, processes, findings] of told) {
        update({node, gpus: gpus(['0', '1']), values: {gpu_utilization_ratio: used, power_watts: [watts, null]},
          details: {processes, findings}, state: node === 'gpu-9' ? 'lost' : 'healthy'});
      }
      fleet.take({type: 'update', nodes: [], missing: ['gpu-3']});
      const sorts = ['attention', 'name', 'free', 'load', 'findings', 'power', 'user'];
      return Object.fromEntries(sorts.map((sort) => [sort,
        filter.order(fleet, {...filter.NO_FILTER, sort}).map((name) => name.slice(4)).join(' ')]));
    }"""
    assert {
        "attention": "9 3 7 1 2 10",
        "name": "1 2 3 7 9 10",
        "free": "2 10 1 7 9 3",
        "load": "1 9 7 10 2 3",
        "findings": "2 3 7 1 9 10",
        "power": "10 9 1 2 3 7",
        "user": "1 10 7 9 2 3",
    } == in_fleet(page, script)


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
        Object.entries(filter.tally(fleet.gpus())).filter(([, count]) => count).map((pair) => pair.join(' ')).join(),
        [found({state: 'harvested'}), found({state: 'free'}), found({state: 'busy'}), found({user: 'ada'}), found({q: 'harvest:fold'})],
        filter.order(fleet, {...filter.NO_FILTER, sort: 'free'}).join(),
        filter.usersSeen(fleet).join(),
        [...fleet.gpus()].map((gpu) => core.usersOf(gpu).join()),
      ];
    }"""
    assert [
        "all 3,harvested 1,busy 2",
        ["b", "", "a,c", "", "b,c"],
        "b,a,c",
        "bob",
        ["bob", "", "bob"],
    ] == in_fleet(page, script)


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [(1, "cards"), (4, "cards"), (5, "rows"), (60, "rows"), (61, "strips"), (1250, "strips")],
)
def test_density_follows_the_number_of_nodes(page: Page, nodes: int, expected: str) -> None:
    """Few nodes are open, some are rows, many are strips."""
    script = f"import('/parts/fleet-controls.js').then((m) => m.automaticDensity({nodes}))"
    assert expected == page.evaluate(script)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["gpu-1.example.org", "gpu-2.example.org"], ["gpu-1", "gpu-2"]),
        (["gpu-1.north", "gpu-1.south"], ["gpu-1.north", "gpu-1.south"]),
        (["10.0.0.1", "10.0.0.2"], ["10.0.0.1", "10.0.0.2"]),
    ],
)
def test_names_without_what_repeats(page: Page, names: list[str], expected: list[str]) -> None:
    """A domain is left out only where nodes can still be told apart."""
    script = "names => import('/parts/fleet-summary.js').then((m) => [...m.shortNames(names).values()])"
    assert expected == page.evaluate(script, names)


def test_every_finding_has_a_short_title(page: Page) -> None:
    """None is the words of an id, and none is longer than a card."""
    script = "ids => import('/parts/finding-titles.js').then((m) => ids.map((id) => m.shortTitle(id)))"
    ids = sorted(RULES_BY_ID)
    titles = page.evaluate(script, ids)
    assert [] == [
        title for rule, title in zip(ids, titles, strict=True) if rule.replace("_", " ") == title.lower()
    ]
    assert [] == [title for title in titles if len(title) > 30]


def test_a_title_without_the_manual(page: Page) -> None:
    """It is the short one, not the words of an id."""
    script = "id => import('/parts/findings-manual.js').then((m) => m.findingTitle(m.emptyManual, id))"
    assert "CPU limit throttles the job" == page.evaluate(script, "cgroup_cpu_throttled")


@pytest.mark.parametrize(
    ("values", "is_lost", "expected"),
    [
        ({"power_watts": 90}, True, "Unknown while the head cannot be reached."),
        ({"power_watts": 90}, False, "Loading…"),
        ({"ecc_enabled": None}, True, "The driver reports no memory error counters for this GPU."),
        ({}, False, "The node has not reported since the head started."),
    ],
)
def test_health_says_only_what_is_known(
    page: Page, values: dict[str, float | None], is_lost: bool, expected: str
) -> None:
    """The driver is named only after the head has sent what the page requested."""
    script = """async ([values, isLost]) => {
      const [{healthPanel}, {render}] = await Promise.all([import('/parts/hardware.js'), import('/vendor/lit-html.js')]);
      const root = document.createElement('div');
      render(healthPanel(values, {isFaulty: false, isLost}), root);
      return root.querySelector('p').textContent;
    }"""
    assert expected == page.evaluate(script, [values, is_lost])


def test_findings_in_groups(page: Page) -> None:
    """What does not report and what is broken comes first, then what costs the most GPUs; what is only worth knowing is left out."""
    script = """async ({fleet, gpus, update}) => {
      const {findingsOf, groupFindings} = await import('/parts/fleet-findings.js');
      const finding = (id, severity, label, lost_ratio = null) => ({id, severity, gpu: 0, label, cause: null, summary: '', lost_ratio, family: id === 'gpu_fault' ? 'fault' : 'x'});
      update({node: 'a', gpus: gpus(['0', '1']), details: {findings: [finding('one', 'high', '0', 0.9), finding('gpu_fault', 'critical', '1')]}});
      update({node: 'b', gpus: gpus(['0', '1']), details: {findings: [finding('many', 'high', '0', 0.5), finding('many', 'high', '1', 0.5), finding('fine', 'info', '0')]}});
      update({node: 'c', gpus: gpus(['0']), state: 'lost', details: {findings: []}});
      fleet.take({type: 'update', nodes: [], missing: ['d']});
      return groupFindings(findingsOf(fleet)).map(({id, severity, gpus}) => [id, severity, gpus]);
    }"""
    assert [
        ["not_reporting", "critical", 2],
        ["gpu_fault", "critical", 1],
        ["many", "high", 2],
        ["one", "high", 1],
    ] == in_fleet(page, script)


def test_trends_continue_what_the_head_remembers(page: Page) -> None:
    """The past stands at its time, live values follow, and a step without values is a gap."""
    script = """async ({fleet, gpus, update, wait}) => {
      const {Trends} = await import('/parts/fleet-trends.js');
      const trends = new Trends(fleet);
      const before = window.fetch;
      const past = Array.from({length: 60}, (_, at) => at / 100);
      window.fetch = async () => new Response(JSON.stringify({start: 990 - 59 * 15, step_seconds: 15, metric: 'gpu_utilization_ratio', gpus: {n: {0: past}}}));
      update({node: 'n', gpus: gpus(['0']), values: {gpu_utilization_ratio: [0.5]}});
      await trends.load(new AbortController().signal);
      window.fetch = before;
      const [gpu] = fleet.gpus();
      const last = (count) => trends.of(gpu).slice(-count);
      const told = [trends.of(gpu).length, last(2)];
      for (const value of [0.2, 0.4]) { update({node: 'n', values: {gpu_utilization_ratio: [value]}}); trends.take(['n']); }
      told.push(last(2));
      wait(45);
      update({node: 'n', values: {gpu_utilization_ratio: [1]}});
      trends.take(['n']);
      return [...told, last(5)];
    }"""
    length, loaded, collected, later = in_fleet(page, script)
    assert 60 == length
    assert [0.58, None] == loaded
    assert [0.58, pytest.approx(0.3)] == collected
    assert [0.58, pytest.approx(0.3), None, None, 1] == later


def test_every_fault_is_shown_as_one(page: Page) -> None:
    """The page knows faults by the rule and its family, as the head does; nothing else is shown as critical."""
    rules = [{"id": rule.id, "family": rule.family, "severity": "medium"} for rule in RULES_BY_ID.values()]
    shown = page.evaluate("async (rules) => rules.map((await import('/core/fleet.js')).shownSeverity)", rules)
    assert [find_category(rule["id"], rule["family"]) == "fault" for rule in rules] == [
        severity == "critical" for severity in shown
    ]


@pytest.mark.parametrize(
    "summary",
    [
        "GPU 1: the driver reported Xid 94 (memory error contained to one program)",
        "GPU 1: uncorrectable memory errors since the driver was loaded: 1",
        "the GPU does not answer",
    ],
)
def test_a_fault_has_its_cause_as_its_title(page: Page, summary: str) -> None:
    """The same one as in the head's answers."""
    fault = Finding("gpu_fault", "fault", "high", 1.0, summary, gpu=1, label="1")
    given = {"id": fault.id, "label": fault.label, "summary": summary}
    shown = page.evaluate(
        "async (given) => (await import('/parts/finding-titles.js')).faultTitle(given)", given
    )
    assert find_title(fault) == shown


def test_the_start_of_a_process_does_not_depend_on_the_range(page: Page) -> None:
    """A process that held a GPU all the time has its own start in every range; one that took it later, the later time."""
    starts = page.evaluate(
        """async () => {
          const {heldSince} = await import('/parts/timeline-items.js');
          const process = {start_time: 1000, first_seen: 1030};
          return [[1030, 0], [9005, 9000], [9005, 500]].map(([held, from]) => heldSince(process, {from: held}, from));
        }"""
    )
    assert [1000, 1000, 9005] == starts
