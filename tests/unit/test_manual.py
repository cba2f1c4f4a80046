from __future__ import annotations

import inspect
import re

import pytest

from gpulse.diagnosis import attribution, case, stretch
from gpulse.diagnosis.manual import FAMILIES, LIMITS, entries, entry, similar
from gpulse.diagnosis.rule import Rule
from gpulse.diagnosis.rulebook import BY_ID, RULES
from gpulse.diagnosis.thresholds import DEFAULTS
from gpulse.export.manual import LIVE, diagnosis_markdown
from tests.unit.diagnosed import ROOT


def live() -> str:
    """The part that is written by hand."""
    return (ROOT / LIVE).read_text(encoding="utf-8")


def test_the_document_is_that_of_the_rules() -> None:
    """Whoever changes a rule runs `make docs`."""

    assert diagnosis_markdown(live()) == (ROOT / "docs" / "diagnosis.md").read_text(encoding="utf-8")


def test_every_finding_has_a_section_under_its_name() -> None:
    """The address that a finding carries leads somewhere."""

    headings = re.findall(r"^## ([a-z_]+)$", diagnosis_markdown(), re.MULTILINE)

    assert {rule.id for rule in RULES} == set(headings)
    assert len(headings) == len(set(headings))


def test_the_part_written_by_hand_is_the_end() -> None:
    """As it is, after everything that is made."""

    assert diagnosis_markdown("## Seen live\n").endswith("\n\n## Seen live\n")


def test_every_finding_is_in_the_manual() -> None:
    """Also those of a family that somebody adds."""

    assert {rule.id for rule in RULES} == {known.id for known in entries()}
    assert {rule.family for rule in RULES} == set(FAMILIES)


@pytest.mark.parametrize("name", LIMITS)
def test_thresholds_are_those_that_the_rule_uses(name: str) -> None:
    """A threshold that is named is read by the rule, or by what prepares its case."""

    rule = BY_ID[name]
    check = rule.check or rule.check_node
    assert check is not None
    module = inspect.getmodule(check)
    assert module is not None
    source = "".join(map(inspect.getsource, (module, attribution, case, stretch)))

    assert [] == [limit for limit in LIMITS[name] if not re.search(rf"\bt(hresholds)?\.{limit}\b", source)]


def test_a_threshold_follows_its_value() -> None:
    """Other thresholds are told as they are."""

    rule: Rule = BY_ID["launch_bound"]

    assert "lost time, from 25%" in entry(rule, DEFAULTS._replace(lost=0.25)).limits


@pytest.mark.parametrize(
    ("name", "meant"),
    [("launch", "launch_bound"), ("too-few", "input_too_few_workers"), ("straglers", "straggler")],
)
def test_what_somebody_may_have_meant(name: str, meant: str) -> None:
    """A part of a name, or one with a slip in it."""

    assert meant == similar(name)[0]


@pytest.mark.parametrize("name", ["", "zzzz"])
def test_nothing_is_like_nonsense(name: str) -> None:
    """A guess that is none helps nobody."""

    assert [] == similar(name)
