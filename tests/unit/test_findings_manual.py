from __future__ import annotations

import inspect
import re

import pytest

from gpulse.cli.explain import find_similar
from gpulse.diagnosis import evidence, job_window
from gpulse.diagnosis.finding_texts import FAMILY_TITLES, build_entries, build_entry
from gpulse.diagnosis.rule import Rule
from gpulse.diagnosis.rule_registry import RULES, RULES_BY_ID
from gpulse.diagnosis.rules import stall
from gpulse.diagnosis.thresholds import DEFAULTS
from tests.unit.diagnosed import ROOT
from tools.docs.reference_pages import diagnosis_markdown


def test_the_document_is_that_of_the_rules() -> None:
    """Whoever changes a rule runs `make docs`."""

    assert diagnosis_markdown() == (ROOT / "docs" / "reference" / "findings.md").read_text(encoding="utf-8")


def test_every_finding_has_a_section_under_its_name() -> None:
    """The address that a finding carries leads somewhere."""

    headings = re.findall(r"^## ([a-z_]+)$", diagnosis_markdown(), re.MULTILINE)

    assert {rule.id for rule in RULES} == set(headings)
    assert len(headings) == len(set(headings))


def test_every_finding_is_in_the_manual() -> None:
    """Also those of a family that somebody adds."""

    assert {rule.id for rule in RULES} == {known.id for known in build_entries()}
    assert {rule.family for rule in RULES} == set(FAMILY_TITLES)


@pytest.mark.parametrize("name", [rule.id for rule in RULES if rule.limits])
def test_thresholds_are_those_that_the_rule_uses(name: str) -> None:
    """A threshold that is named is read by the rule, or by what prepares its evidence."""

    rule = RULES_BY_ID[name]
    check = rule.check or rule.check_node
    assert check is not None
    module = inspect.getmodule(check)
    assert module is not None
    source = "".join(map(inspect.getsource, (module, stall, evidence, evidence, job_window)))

    assert [] == [limit for limit in rule.limits if not re.search(rf"\bt(hresholds)?\.{limit}\b", source)]


def test_a_threshold_follows_its_value() -> None:
    """The manual shows the thresholds in use."""

    rule: Rule = RULES_BY_ID["launch_bound"]

    assert "lost GPU time: at least 25%" in build_entry(rule, DEFAULTS._replace(lost=0.25)).limits


@pytest.mark.parametrize(
    ("name", "meant"),
    [("launch", "launch_bound"), ("too-few", "input_too_few_workers"), ("straglers", "straggler")],
)
def test_what_somebody_may_have_meant(name: str, meant: str) -> None:
    """A part of a name, or one with a slip in it."""

    assert meant == find_similar(name)[0]


@pytest.mark.parametrize("name", ["", "zzzz"])
def test_nothing_is_like_nonsense(name: str) -> None:
    """A bad guess does not help."""

    assert [] == find_similar(name)
