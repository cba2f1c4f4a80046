"""The manual that the dashboard reads: every finding, and words for every signal."""

from __future__ import annotations

import json

from gpulse.diagnosis.finding_texts import DERIVED_SIGNALS, FAMILY_TITLES, signal_text
from gpulse.diagnosis.rule_registry import RULES
from gpulse.web import dashboard


def test_every_finding_is_explained() -> None:
    """Under its id, with its title, what it means and what to do."""
    findings = dashboard.manual_document()["findings"]
    assert {rule.id for rule in RULES} == set(findings)
    for rule in RULES:
        said = findings[rule.id]
        assert (rule.title, rule.means) == (said["title"], said["means"])
        assert [advice.do for advice in rule.advice] == [advice["do"] for advice in said["advice"]]
        assert said["family"] in FAMILY_TITLES


def test_signals_have_the_words_of_the_terminal() -> None:
    """What `gpulse why` calls a signal, with the unit its numbers are written in."""
    signals = dashboard.manual_document()["signals"]
    assert set(DERIVED_SIGNALS) <= set(signals)
    for name, said in signals.items():
        known = signal_text(name)
        assert known is not None
        assert {"words": known.words, "unit": known.unit} == said


def test_it_is_one_json_document() -> None:
    """Nothing in it that JSON does not have."""
    assert dashboard.manual_document() == json.loads(json.dumps(dashboard.manual_document()))
