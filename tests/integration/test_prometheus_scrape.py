from __future__ import annotations

import json
import re
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from gpulse.export.prometheus import self_metrics
from gpulse.export.prometheus.dcgm_metrics import FIELDS
from gpulse.model.metric_catalog import CATALOG
from tests.integration.cluster import Process, cluster_in, until
from tests.integration.scraping import Prometheus, checked, scraping

ROOT = Path(__file__).parents[2]
CONTRIB = ROOT / "contrib"
IMPORTED = ROOT / "tests/data/dcgm/dashboard.json"
GPUS = 8
"""Of a demo machine."""
SOMETIMES = {
    "gpulse_gpu_xid_total": "a demo machine has no Xid errors",
    "gpulse_finding": "a finding takes longer than this test",
    "gpulse_health_problems": "nothing is wrong with it",
    "gpulse_gpu_power_cap_seconds_total": "no reading of the simulated GPU",
    "gpulse_gpu_thermal_slowdown_seconds_total": "no reading of the simulated GPU",
    "gpulse_gpu_hardware_thermal_slowdown_seconds_total": "no reading of the simulated GPU",
    "increase(": "needs more of the past than this test has",
}
"""What a query of our boards may be empty for."""


class Scraped(NamedTuple):
    """Heads and agents under both kinds of names, and who scrapes them."""

    prometheus: Prometheus
    ports: dict[str, int]

    def page(self, name: str) -> bytes:
        """What one of them serves now."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.ports[name]}/metrics", timeout=60) as answer:
            text: bytes = answer.read()
            return text


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scraped]:
    """A head with its agent under our names, a head with its agent under DCGM's, and a real Prometheus."""
    folder = tmp_path_factory.mktemp("scraped")
    (folder / "ours").mkdir()
    (folder / "dcgm").mkdir()
    with cluster_in(folder / "ours") as ours, cluster_in(folder / "dcgm") as theirs:
        ports = {}
        heads = [
            (ours.head(wait=False), ours, ()),
            (theirs.head("--dcgm-names", wait=False), theirs, ("--dcgm-names",)),
        ]
        for kind, (head, cluster, options) in zip(("ours", "dcgm"), heads, strict=True):
            agent = cluster.agent("gpu-1", head.port, "--metrics-port", "0", "-i", "0.5", *options)
            ports[f"{kind}-head"] = head.http_port
            ports[f"{kind}-agent"] = port_of(agent)
        for head, _, _ in heads:
            head.said("listening for agents on")
            until(lambda head=head: "gpu-1" in head.nodes(), "the agent to be there")  # type: ignore[misc]
        with scraping(folder, ports) as prometheus:
            made = Scraped(prometheus, ports)
            until(lambda: settled(made), "two scrapes with readings of everything")
            yield made


def port_of(agent: Process) -> int:
    """Where an agent serves its metrics, as it says."""
    match = re.search(r"metrics on http://127\.0\.0\.1:(\d+)/metrics", agent.said("metrics on"))
    assert match is not None
    return int(match[1])


def settled(made: Scraped) -> bool:
    """Whether everything was scraped at least twice with readings in it."""
    power = "gpulse_gpu_power_watts", "DCGM_FI_DEV_POWER_USAGE"
    counts = [made.prometheus.query(f"count(count_over_time({name}[1m]) >= 2)") for name in power]
    rates = made.prometheus.query("count(rate(gpulse_disk_read_bytes_total[1m]))")
    return [[({}, 2.0 * GPUS)]] * 2 == counts and [({}, 2.0)] == rates


def expressions(board: Path) -> list[str]:
    """Every query of a board, its variables standing for everything."""
    document = json.loads(board.read_text(encoding="utf-8"))
    found = [target["expr"] for panel in document["panels"] for target in panel.get("targets", ())]
    for variable in document["templating"]["list"]:
        if variable["type"] == "query":
            asked = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["definition"])
            assert asked is not None
            found.append(f"count by ({asked[2]}) ({asked[1]})")
    return [re.sub(r"\$\w+", ".*", text) for text in found]


@pytest.mark.parametrize("job", ["dcgm-head", "dcgm-agent"])
def test_the_board_that_people_import_works_untouched(scraped: Scraped, job: str) -> None:
    """Every query of it returns data, from a head as from an agent."""

    asked = expressions(IMPORTED)
    assert len(asked) == 10
    for text in asked:
        only = re.sub(r"(DCGM_\w+)(?:\{([^}]*)\})?", rf'\1{{job="{job}",\2}}', text)
        assert scraped.prometheus.query(only), only
    [(_, clock)] = scraped.prometheus.query(f'max(DCGM_FI_DEV_SM_CLOCK{{job="{job}"}}) * 1000000')
    assert 1e8 < clock < 4e9
    [(_, tensor)] = scraped.prometheus.query(f'max(DCGM_FI_PROF_PIPE_TENSOR_ACTIVE{{job="{job}"}})')
    assert 0 < tensor <= 1


@pytest.mark.parametrize("name", ["gpulse-fleet.json", "gpulse-node.json", "gpulse-dcgm.json"])
def test_our_boards_show_what_there_is(scraped: Scraped, name: str) -> None:
    """Every query of them is understood, and returns data unless there can be none here."""

    asked = expressions(CONTRIB / "grafana" / name)
    assert len(asked) > 10
    for text in asked:
        found = scraped.prometheus.query(text)
        assert found or any(word in text for word in SOMETIMES), text


def test_head_and_agent_tell_the_same(scraped: Scraped) -> None:
    """The same series of readings, whichever of them is scraped; how long requests took needs requests."""

    def series(job: str) -> set[tuple[tuple[str, str], ...]]:
        found = scraped.prometheus.query(
            f'{{__name__=~"gpulse_(gpu|host|disk|filesystem|network|node)_.+", job="{job}"}}'
        )
        return {
            tuple(sorted((key, value) for key, value in labels.items() if key not in {"instance", "job"}))
            for labels, _ in found
            if not labels["__name__"].endswith(("_await_seconds", "_reading_age_seconds"))
        }

    agent = series("ours-agent")
    assert len(agent) > 300
    assert agent == series("ours-head")


def test_scrapes_are_understood(scraped: Scraped) -> None:
    """Prometheus takes every target for up, and finds nodes, versions and the programs themselves."""

    names = sorted(scraped.ports)
    for text in ("up == 1", "gpulse_build_info", "gpulse_up == 1", "process_resident_memory_bytes > 1e6"):
        assert names == sorted(labels["job"] for labels, _ in scraped.prometheus.query(text)), text
    assert [1.0, 1.0] == [value for _, value in scraped.prometheus.query("gpulse_head_streams")]
    assert [1.0, 1.0] == [value for _, value in scraped.prometheus.query("gpulse_head_storage_up")]
    assert all(0 <= age < 5 for _, age in scraped.prometheus.query("gpulse_frame_age_seconds"))


def test_pages_pass_promtool(scraped: Scraped) -> None:
    """Ours are clean; under DCGM's names nothing is said but what its own spelling asks for."""

    assert [] == checked(scraped.page("ours-head"))
    assert [] == checked(scraped.page("ours-agent"))
    theirs = (
        "not 'camelCase'",
        'counter metrics should have "_total" suffix',
        "DCGM_FI_DEV_PCIE_REPLAY_COUNTER metric name should not include type 'counter'",
    )
    for name in ("dcgm-head", "dcgm-agent"):
        assert [] == [line for line in checked(scraped.page(name)) if not line.endswith(theirs)]


@pytest.mark.requires("Prometheus")
def test_alert_rules() -> None:
    """They are understood, and alert when they should and not otherwise."""

    folder = CONTRIB / "prometheus"
    for command in (
        ("check", "rules", "gpulse-rules.yml"),
        ("test", "rules", "gpulse-rules-test.yml"),
        ("check", "config", "--syntax-only", "prometheus.yml"),
    ):
        ended = subprocess.run(
            ["promtool", *command], cwd=folder, capture_output=True, text=True, check=False
        )
        assert 0 == ended.returncode, ended.stdout + ended.stderr


def test_every_alert_has_its_test() -> None:
    """No rule is there that was never seen to fire."""

    rules = re.findall(
        r"- alert: (\w+)", (CONTRIB / "prometheus/gpulse-rules.yml").read_text(encoding="utf-8")
    )
    tests = (CONTRIB / "prometheus/gpulse-rules-test.yml").read_text(encoding="utf-8")
    fired = re.findall(r"alertname: (\w+)\n +exp_alerts:\n", tests)
    assert sorted(set(rules)) == sorted(set(fired))


def test_our_boards_do_not_count_instances_beside_their_gpus() -> None:
    """Our names tell a GPU and its MIG instances: what is put together is of whole GPUs."""

    board = json.loads((CONTRIB / "grafana/gpulse-fleet.json").read_text(encoding="utf-8"))
    queries = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    selected = [
        labels
        for query in queries
        if re.match(r"(sum|avg|max|count)\b", query)
        for name, labels in re.findall(r"(gpulse_gpu_\w+)(\{.*?\})", query)
        if name != "gpulse_gpu_job_info"
    ]
    assert len(selected) >= 9
    assert [] == [labels for labels in selected if 'gpu!~".+:.+"' not in labels]


def test_names_in_contrib_exist() -> None:
    """Boards and rules ask for nothing that is never served."""

    served = {metric.prometheus for metrics in CATALOG.values() for metric in metrics.values()}
    served |= {field.name for field in FIELDS}
    for source in (ROOT / "src/gpulse/export/prometheus").glob("*.py"):
        served |= set(re.findall(r'"(gpulse_\w+)"', source.read_text(encoding="utf-8")))
    served |= {"gpulse_gpu_info", "gpulse_node_info"}
    served |= {
        family.name
        for family in self_metrics.head_families({"remote": {}, "remote_query": {}, "database": {}})
    }
    asked: set[str] = set()
    for path in (*CONTRIB.glob("grafana/*.json"), CONTRIB / "prometheus/gpulse-rules.yml"):
        texts: Any = path.read_text(encoding="utf-8")
        asked |= set(re.findall(r"\b((?:gpulse|DCGM)_\w+)", texts))
    assert len(asked) > 40
    assert set() == asked - served
