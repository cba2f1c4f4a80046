"""Findings grouped by cause: what a group costs, whom it affects, and which past ones belong together."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulse.cli.findings import current_lines, past_lines, silence_lines
from gpulse.cluster.protocol import requests as r
from gpulse.cluster.protocol.answers import SilenceAnswer
from gpulse.cluster.protocol.requests import Time
from gpulse.model.finding import Finding
from gpulse.reports.finding_report import (
    GroupItem,
    build_past_items,
    group_findings,
    group_past_findings,
)
from gpulse.terminal.table import make_painter
from tests.unit.report_lab import BEGIN, Lab
from tests.unit.test_reports_findings import Story, finding, happens, told

NOW = 1_767_225_600.0
HOUR = 3600.0


def item(
    rule_id: str = "input_too_few_workers",
    node: str = "n1",
    label: str = "0",
    lost: float | None = 0.5,
    start: float = -HOUR,
    end: float | None = None,
    severity: str = "high",
    cause: str | None = None,
    users: tuple[str, ...] = (),
) -> GroupItem:
    """A finding on a GPU."""
    family = "fault" if rule_id == "gpu_fault" else "input"
    found = Finding(rule_id, family, severity, 0.9, "s", int(label), label, lost_ratio=lost, cause=cause)  # type: ignore[arg-type]
    return GroupItem(node, found, NOW + start, None if end is None else NOW + end, users)


def test_a_group_sums_what_its_gpus_lose() -> None:
    """GPUs lost are the shares, GPU-hours the shares over time; its start is the earliest."""
    items = [
        item(lost=0.99, users=("frances",)),
        item(node="n2", lost=0.97, start=-2 * HOUR, users=("grace",)),
    ]
    (group,) = group_findings(items, NOW)

    assert (1.96, 2.93, NOW - 2 * HOUR, ["frances", "grace"], ["n1", "n2"]) == (
        group.gpus_lost,
        group.gpu_hours,
        group.start,
        group.users,
        [member.node for member in group.members],
    )


def test_faults_come_first_and_small_losses_of_many_gpus_before_large_ones_of_one() -> None:
    """Faults have no lost time, and each kind of fault is a group."""
    items = [
        item("launch_bound", lost=0.9),
        *(item("straggler", label=str(gpu), lost=0.18) for gpu in range(16)),
        item("gpu_idle_allocated", lost=0.99, severity="critical"),
        item("gpu_fault", lost=None, severity="medium", cause="xid_94"),
        item("gpu_fault", lost=None, severity="critical", cause="xid_79"),
        item("gpu_fault", node="n2", lost=None, severity="critical", cause="xid_79"),
    ]
    groups = group_findings(items, NOW)

    assert [
        ("gpu_fault/xid_79", 2, None),
        ("gpu_fault/xid_94", 1, None),
        ("straggler", 16, 2.88),
        ("launch_bound", 1, 0.9),
        ("gpu_idle_allocated", 1, 0.99),
    ] == [(group.key, len(group.members), group.gpus_lost) for group in groups]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 99), st.integers(1, 30)), max_size=12))
def test_past_findings_are_one_group_while_they_overlap(spans: list[tuple[str, int, int]]) -> None:
    """Every finding is in exactly one group, and groups of the same cause do not overlap."""
    items = [item(cause, start=start - 200, end=start - 200 + length) for cause, start, length in spans]
    groups = group_past_findings(items, NOW)

    assert len(items) == sum(len(group.members) for group in groups)
    assert len(groups) == len({group.key for group in groups})
    for group in groups:
        assert group.end == max(member.end or 0 for member in group.members)
        for other in groups:
            if other.group == group.group and other is not group:
                assert other.start > (group.end or 0) or (other.end or 0) < group.start


def test_past_findings_say_whose_they_were_and_how_they_ended(tmp_path: Path) -> None:
    """With their own start and end, and who had acknowledged them."""
    with Lab(tmp_path, ("0",), ("0",)) as lab:
        story = Story(lab)
        story.tell(
            told(0, finding(lost_ratio=0.5), finding("hot")),
            happens(60, "findings_acknowledged", None, keys=["slow/n1/0"], by="mo", note="known"),
            told(3600, finding("hot")),
            happens(3630, "agent_stopping"),
            happens(3700, "findings_acknowledged", None, keys=["slow/n1/0"], by="ada"),
        )
        request = r.GetFindingGroups(state="past", start=Time(BEGIN + 600), end=Time(BEGIN + 7200))
        context, query = lab.reports.past_findings(request, BEGIN + 7200)
        items, is_cut, incomplete = build_past_items(context, query, ())

    names = {name: node for node, name in context.node_names.items()}
    assert (False, [], 1) == (is_cut, incomplete, names["n1"])
    assert [
        ("hot", 0, 3630, None, "not_reporting", None),
        ("slow", 0, 3600, 0.5, "recovered", "mo"),
    ] == [
        (
            group.id,
            group.start - BEGIN,
            (group.end or 0) - BEGIN,
            group.gpu_hours,
            group.members[0].ending,
            group.members[0].acknowledged and group.members[0].acknowledged.by,
        )
        for group in group_past_findings(items, BEGIN + 7200)
    ]


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_no_text_of_a_finding_is_cut(width: int) -> None:
    """Titles, places, users and keys are whole at every width; lists of places break between places."""
    items = [
        *(
            item("straggler", f"gpu-node-{node}", str(gpu), 0.18)
            for node in range(1, 40, 2)
            for gpu in range(4)
        ),
        item("launch_bound", lost=0.9, users=("frances", "grace")),
        item("gpu_fault", node="a-machine-with-a-long-name", lost=None, cause="xid_79_with_a_long_cause"),
    ]
    groups = group_findings(items, NOW)
    past = group_past_findings([one._replace(end=NOW - 60) for one in items], NOW)
    reason = "a new disk is being put into this machine, and then it is tested for a day"
    about = {"findings": ["gpu_fault"], "nodes": ["n1", "n2"], "gpus": [], "users": [], "jobs": []}
    silence = SilenceAnswer(id="s1", start=NOW, until=NOW + HOUR, reason=reason, by="mo", matches=3, **about)
    paint = make_painter(color=False)
    texts = (
        [*current_lines(groups, NOW, width=width, paint=paint)],
        past_lines(past, NOW, width=width, paint=paint),
        silence_lines([silence], NOW, width=width, paint=paint),
    )

    assert all(len(line) <= width and "~" not in line for lines in texts for line in lines)
    shown = [" ".join(" ".join(lines).split()) for lines in texts]
    for group in groups:
        assert group.key in shown[0]
    for lines in shown[:2]:
        assert "Launch overhead dominates because kernels are too small" in lines
        assert "a-machine-with-a-long-name GPU 0" in lines
        assert "frances, grace" in lines
        assert "gpu-node-37 GPUs 0-3, gpu-node-39 GPUs 0-3" in lines
    assert reason in shown[2]
    assert not any(line.endswith("GPUs") for lines in texts for line in lines)


def test_findings_are_a_table_where_there_is_room() -> None:
    """One line for each."""
    groups = group_findings([item("launch_bound", lost=0.9)], NOW)
    paint = make_painter(color=False)

    assert 3 == len([*current_lines(groups, NOW, width=160, paint=paint)])
    assert 4 == len([*current_lines(groups, NOW, width=80, paint=paint)])
