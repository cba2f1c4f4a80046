"""Groups of findings, and names in natural order."""

from __future__ import annotations

from typing import Any

from gpulse.model.finding import Finding
from gpulse.model.finding_group import by_kind, grouped
from gpulse.model.natural import natural_key


def finding(node: str, label: str | None, number: str = "slow", **more: Any) -> dict[str, Any]:
    """A finding of a session or a job."""
    return {
        "id": number, "node": node, "label": label, "severity": "high", "times": 1, "active_seconds": 5.0, **more
    }  # fmt: skip


def test_one_kind_is_one_group() -> None:
    """Over nodes, GPUs and time, with how often and for how long, in the words of the one that cost most."""
    found = [
        *(finding("n10", str(label)) for label in (0, 1, 2)),
        finding("n2", "10", lost_ratio=0.5, active_seconds=1.0),
        finding("n2", "9", times=3, active_seconds=8.0),
        finding("n2", None, "swapping", severity="critical"),
    ]
    first, second = grouped(found)

    assert ("critical", "swapping", ("n2",), 1, 5.0) == (first.severity, first.id, *first[3:])
    assert ("high", "slow", ("n2:9,10", "n10:0-2"), 7, 8.0) == (second.severity, second.id, *second[3:])
    assert 0.5 == second.worst["lost_ratio"]


def test_faults_of_several_causes_are_several_groups() -> None:
    """Nodes that are missing are one, whatever their names."""
    faults = [finding("n1", "0", "gpu_fault", cause=cause) for cause in ("ecc", "xid_94", "ecc")]
    missing = [finding(name, None, "node_missing", cause=name) for name in ("n8", "n7")]

    assert [("gpu_fault", 2), ("gpu_fault", 1), ("node_missing", 2)] == [
        (group.id, len(group.members)) for group in grouped([*faults, *missing])
    ]
    assert ("n7", "n8") == grouped(missing)[0].places


def test_what_why_groups_is_grouped_by_the_same_rule() -> None:
    """Findings that are not documents have the same kinds."""
    found = [
        Finding("gpu_fault", "fault", "medium", 1.0, "a", 0, "0", cause="remap"),
        Finding("gpu_fault", "fault", "critical", 1.0, "b", 0, "0", cause="ecc"),
        Finding("gpu_fault", "fault", "medium", 1.0, "c", 1, "1", cause="remap"),
    ]
    assert [["b"], ["a", "c"]] == [[one.summary for one in kind] for kind in by_kind(found, lambda one: one)]


def test_numbers_in_names_count_by_their_value() -> None:
    """Whatever stands around them, and in any letters; names that differ only in how they are written have an order."""
    names = ["node2", "Node10", "node1", "a", "node01", "node", "r2n11", "r2n3", "", "10.0.0.2", "10.0.0.10"]

    assert [
        "", "10.0.0.2", "10.0.0.10", "a", "node", "node01", "node1", "node2", "Node10", "r2n3", "r2n11"
    ] == sorted(names, key=natural_key)  # fmt: skip
