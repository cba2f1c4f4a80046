from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from gpulse.model.metric_catalog import CATALOG, Metric, Scope, metric_names
from gpulse.sources.nvml import metric_probes

SOURCE = Path(__file__).parents[2] / "src" / "gpulse"
ALL = [metric for metrics in CATALOG.values() for metric in metrics.values()]
UNITS = {
    "_bytes": "bytes",
    "_watts": "watts",
    "_celsius": "celsius",
    "_hertz": "hertz",
    "_joules_total": "joules",
    "_ratio": "1",
}


def identify(metric: Metric) -> str:
    """How a metric is named in the output."""
    return f"{metric.scope} {metric.name}"


@pytest.mark.parametrize("metric", ALL, ids=identify)
def test_a_row_is_complete(metric: Metric) -> None:
    """A plain name, a unit, and a sentence that begins with a capital and has no full stop."""

    assert re.fullmatch(r"[a-z][a-z0-9_]*", metric.name)
    assert metric.unit
    assert re.fullmatch(r"[A-Z0-9].*[^.]", metric.help)
    assert metric.resolution > 0


@pytest.mark.parametrize("metric", ALL, ids=identify)
def test_names_hold_their_unit_and_kind(metric: Metric) -> None:
    """A counter ends in _total and nothing else does; a ratio ends in _ratio and has no unit."""

    assert (metric.kind == "counter") == metric.name.endswith("_total")
    assert (metric.kind == "ratio") == metric.name.endswith("_ratio")
    for ending, unit in UNITS.items():
        assert not metric.name.endswith(ending) or metric.unit == unit


def test_external_names_are_unique() -> None:
    """No two rows give one Prometheus name, and within a scope no two rows one DCGM name."""

    prometheus = [metric.prometheus for metric in ALL]
    dcgm = [(metric.scope, metric.dcgm) for metric in ALL if metric.dcgm is not None]

    assert len(set(prometheus)) == len(prometheus)
    assert len(set(dcgm)) == len(dcgm)


@pytest.mark.parametrize("scope", CATALOG)
def test_names_can_be_had_without_the_derived_ones(scope: Scope) -> None:
    """In the catalog's order."""

    assert list(CATALOG[scope]) == metric_names(scope)
    assert [n for n in metric_names(scope) if not CATALOG[scope][n].derived] == metric_names(
        scope, derived=False
    )


@cache
def written_in(path: str) -> re.Pattern[str]:
    """Match the strings of the source files under a path; the holes of an f-string match anything."""
    root = SOURCE / path
    texts = set()
    for file in [root] if root.is_file() else root.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.add(re.escape(node.value))
            elif isinstance(node, ast.JoinedStr):
                texts.add(
                    "".join(
                        re.escape(str(p.value)) if isinstance(p, ast.Constant) else ".+" for p in node.values
                    )
                )
    return re.compile("|".join(text for text in texts if re.search("[a-z]", text)))


@pytest.mark.parametrize("metric", ALL, ids=identify)
def test_every_metric_is_read_somewhere(metric: Metric) -> None:
    """A row without a probe would be documented and never seen."""

    place = "model/counter_rates.py" if metric.derived else "sources"

    assert written_in(place).fullmatch(metric.name), (
        f"nothing in src/gpulse/{place} writes {metric.name}: add a probe (CONTRIBUTING.md, Add a metric)"
    )


def test_facts_are_what_nvml_reads_once() -> None:
    """A fact that is not marked is looked for as if it came with every frame, and is not found."""

    read_once = {name for probe in metric_probes.fact_probes() for name in probe.names}

    assert read_once == {name for name, metric in CATALOG["gpu"].items() if metric.fact}, (
        "a probe in `facts()` of sources/nvml/metric_probes.py needs `fact=True` in model/metric_catalog.py, and no other"
    )
