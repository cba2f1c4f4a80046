from __future__ import annotations

import json

import click
import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner

from gpulse.cli.explain import command
from gpulse.cli.main import command as root
from gpulse.diagnosis.rule_registry import RULES
from gpulse.errors import UsageError


def explained(*arguments: str, columns: int = 80) -> str:
    """What `gpulse explain` prints."""
    ended = CliRunner(env={"COLUMNS": str(columns)}).invoke(command, arguments, catch_exceptions=False)
    assert 0 == ended.exit_code
    return ended.output


@pytest.mark.parametrize("columns", [40, 60, 80, 120])
def test_the_list_names_every_finding_once(columns: int) -> None:
    """Grouped by family, and no line too wide."""

    lines = explained(columns=columns).splitlines()

    assert sorted(rule.id for rule in RULES) == sorted(
        line.split()[0] for line in lines if line.startswith("  ") and line[2] != " "
    )
    assert "Input: the GPU waits for data" in lines
    if columns >= 60:
        assert [] == [line for line in lines if len(line) > columns]


def test_the_list_marks_what_is_informational() -> None:
    """Rules that were not seen on a real run say so."""

    lines = {line.split()[0]: line for line in explained(columns=120).splitlines() if line.startswith("  ")}

    assert {rule.id for rule in RULES if not rule.shown} == {
        name for name, line in lines.items() if "(informational)" in line
    }


@pytest.mark.parametrize("name", [rule.id for rule in RULES])
def test_every_finding_is_explained_in_full(name: str) -> None:
    """What it means, how it is recognised, how bad it is, what to do and where that comes from."""

    rule = next(rule for rule in RULES if rule.id == name)
    said = explained(name)
    flat = " ".join(said.split())

    assert [] == [line for line in said.splitlines() if len(line) > 80]
    assert said.startswith(rule.title)
    assert [] == [
        text for text in (rule.means, rule.recognised, rule.severity, *rule.sources) if text not in flat
    ]
    assert [] == [part for advice in rule.advice for part in advice if part not in flat]


def test_names_are_taken_as_people_write_them() -> None:
    """Case and hyphens are no reason to say no."""

    assert explained("launch_bound") == explained("Launch-Bound")


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [("lauch", "launch_bound"), ("checkpoint", "checkpoint_stall"), ("gpu_leak", "gpu_memory_leak")],
)
def test_a_wrong_name_is_told_what_was_meant(wrong: str, meant: str) -> None:
    """A usage error with close matches."""

    with pytest.raises(UsageError, match=meant) as caught:
        CliRunner().invoke(command, [wrong], catch_exceptions=False)

    assert 2 == caught.value.exit_code


def test_nonsense_is_sent_to_the_list() -> None:
    """Without anything close to it the hint is the list."""

    with pytest.raises(UsageError) as caught:
        CliRunner().invoke(command, ["\x1b[2J"], catch_exceptions=False)

    assert "\x1b" not in caught.value.message
    assert "list all findings with: gpulse explain" == caught.value.hint


def test_json_holds_everything() -> None:
    """For programs: all findings, or one."""

    everything = json.loads(explained("--json"))
    one = json.loads(explained("launch_bound", "--json"))

    assert {rule.id for rule in RULES} == {entry["id"] for entry in everything}
    assert one in everything
    assert {"do", "why", "confirm"} == set(one["advice"][0])
    assert "lost GPU time: at least 10%" in one["limits"]


def test_the_shell_completes_names() -> None:
    """`gpulse explain inp<TAB>`."""

    completions = ShellComplete(root, {}, "gpulse", "_GPULSE_COMPLETE").get_completions(
        ["explain"], "input_c"
    )

    assert ["input_cpu_bound"] == [item.value for item in completions]


def test_it_is_a_verb() -> None:
    """`gpulse --help` names it."""

    assert "explain" in root.list_commands(click.Context(root))
