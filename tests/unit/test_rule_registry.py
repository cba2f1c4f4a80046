"""The rule registry as a whole: what each rule says about itself and about others."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest

from gpulse.diagnosis import rule_registry
from gpulse.diagnosis.evidence import Cause
from gpulse.diagnosis.rule import Rule
from gpulse.diagnosis.rule_registry import RULES, RULES_BY_ID
from gpulse.diagnosis.second_aggregator import AVERAGED_METRICS
from gpulse.diagnosis.thresholds import THRESHOLD_TEXTS, Thresholds
from gpulse.model.finding import MULTI_CAUSE_FINDING, NODE_FINDINGS


def test_every_file_of_rules_is_in_the_registry() -> None:
    """A file that is not listed would never be asked."""

    files = {path.stem for path in Path(rule_registry.__file__).with_name("rules").glob("[a-z]*.py")}
    listed = {name for name in files if hasattr(rule_registry, name)}

    assert files == listed, "add the file to src/gpulse/diagnosis/rule_registry.py, at the place of its rank"
    assert len(RULES_BY_ID) == len(RULES)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
def test_a_rule_speaks_of_rules_and_thresholds_that_exist(rule: Rule) -> None:
    """A name with a slip in it would silently do nothing."""

    assert set() == set(rule.yields_to) - RULES_BY_ID.keys()
    assert set() == set(rule.limits) - set(Thresholds._fields), (
        "add it to Thresholds in diagnosis/thresholds.py"
    )
    assert set() == set(rule.limits) - THRESHOLD_TEXTS.keys(), "add it to WORDS in diagnosis/thresholds.py"


def test_every_cause_of_lost_time_is_named_by_a_rule() -> None:
    """A cause that is ruled out is shown by the IDs of its findings."""

    assert set(get_args(Cause)) - {"none"} == {rule.explains for rule in RULES} - {None}


def test_words_are_for_thresholds_that_a_rule_lists() -> None:
    """Others are never shown."""

    assert {name for rule in RULES for name in rule.limits} == THRESHOLD_TEXTS.keys()


def test_rules_ask_for_means_that_are_computed() -> None:
    """Of any other reading a rule would get nothing, and never speak."""

    package = Path(rule_registry.__file__).parent
    sources = [path.read_text(encoding="utf-8") for path in package.rglob("*.py")]
    asked = {name for text in sources for name in re.findall(r'\.mean\(\s*"([a-z0-9_]+)"', text)}

    assert set() == asked - {*AVERAGED_METRICS, "duty", "copies"}, (
        "add it to MEANS in src/gpulse/diagnosis/second_aggregator.py"
    )


def test_findings_that_the_model_knows_by_id_are_rules() -> None:
    """Stored findings, and those of older agents, carry only their id."""

    assert {MULTI_CAUSE_FINDING, *NODE_FINDINGS} <= RULES_BY_ID.keys()
