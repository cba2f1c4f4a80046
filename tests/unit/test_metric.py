from __future__ import annotations

import re

import pytest

from gpulse.model.metric import CATALOGUE, Metric, Scope, names

ALL = [metric for metrics in CATALOGUE.values() for metric in metrics.values()]
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


def test_names_elsewhere_are_unique() -> None:
    """No two rows give one Prometheus name, and within a scope no two rows one DCGM name."""

    prometheus = [metric.prometheus for metric in ALL]
    dcgm = [(metric.scope, metric.dcgm) for metric in ALL if metric.dcgm is not None]

    assert len(set(prometheus)) == len(prometheus)
    assert len(set(dcgm)) == len(dcgm)


@pytest.mark.parametrize("scope", CATALOGUE)
def test_names_can_be_had_without_the_derived_ones(scope: Scope) -> None:
    """In the catalogue's order."""

    assert list(CATALOGUE[scope]) == names(scope)
    assert [n for n in names(scope) if not CATALOGUE[scope][n].derived] == names(scope, derived=False)
