"""Groups of findings, and names in natural order."""

from __future__ import annotations

from typing import Any

import pytest

from gpulse.model.finding import Finding, group_by_kind, group_similar_findings
from gpulse.model.safe_text import natural_key


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
    first, second = group_similar_findings(found)

    assert ("critical", "swapping", ("n2",), 1, 5.0) == (first.severity, first.id, *first[3:])
    assert ("high", "slow", ("n2 GPUs 9,10", "n10 GPUs 0-2"), 7, 8.0) == (
        second.severity,
        second.id,
        *second[3:],
    )
    assert 0.5 == second.worst["lost_ratio"]


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ([finding("n1", "4", summary="GPU 4 waits")], "n1 GPU 4 waits"),
        ([finding("n1", "4", summary="GPU 4: Xid 94")], "n1 GPU 4: Xid 94"),
        ([finding("n1", "4", summary="GPU 40 waits")], "n1 GPU 4: GPU 40 waits"),
        ([finding("n1", None, summary="n1 has never reported")], "n1 has never reported"),
        ([finding("n1", None, summary="swaps")], "n1: swaps"),
        ([finding(name, None, summary=f"{name} is lost") for name in ("n1", "n2")], "n1, n2: n1 is lost"),
        ([{"id": "idle", "severity": "low", "summary": "GPUs were idle"}], "GPUs were idle"),
        (
            [
                finding("n1", "1", summary="GPU 1 waits 20%", lost_ratio=0.2),
                *(
                    finding("n4", str(one), summary=f"GPU {one} waits", lost_ratio=0.3 + one)
                    for one in range(4)
                ),
            ],
            "n1 GPU 1, n4 GPUs 0-3 (worst: n4 GPU 3): GPU 3 waits",
        ),
        (
            [finding(f"n{one}", "0", summary="GPU 0 waits", lost_ratio=1 / one) for one in range(1, 6)],
            "n1 GPU 0, n2 GPU 0, n3 GPU 0, n4 GPU 0 and 1 more node (worst: n1 GPU 0): GPU 0 waits",
        ),
    ],
)
def test_the_text_of_a_group_says_once_which_gpu_it_is_about(
    found: list[dict[str, Any]], expected: str
) -> None:
    """For one GPU without repeating its name, for several with the node of the worst."""
    (group,) = group_similar_findings(found)

    assert expected == group.text


def test_faults_of_several_causes_are_several_groups() -> None:
    """Nodes that are missing are one, whatever their names."""
    faults = [finding("n1", "0", "gpu_fault", cause=cause) for cause in ("ecc", "xid_94", "ecc")]
    missing = [finding(name, None, "node_missing", cause=name) for name in ("n8", "n7")]

    assert [("gpu_fault", 2), ("gpu_fault", 1), ("node_missing", 2)] == [
        (group.id, len(group.members)) for group in group_similar_findings([*faults, *missing])
    ]
    assert ("n7", "n8") == group_similar_findings(missing)[0].places


def test_what_why_groups_is_grouped_by_the_same_rule() -> None:
    """Findings that are not documents have the same kinds."""
    found = [
        Finding("gpu_fault", "fault", "medium", 1.0, "a", 0, "0", cause="remap"),
        Finding("gpu_fault", "fault", "critical", 1.0, "b", 0, "0", cause="ecc"),
        Finding("gpu_fault", "fault", "medium", 1.0, "c", 1, "1", cause="remap"),
    ]
    assert [["b"], ["a", "c"]] == [
        [one.summary for one in kind] for kind in group_by_kind(found, lambda one: one)
    ]


def test_numbers_in_names_count_by_their_value() -> None:
    """Whatever stands around them, and in any letters; names that differ only in how they are written have an order."""
    names = ["node2", "Node10", "node1", "a", "node01", "node", "r2n11", "r2n3", "", "10.0.0.2", "10.0.0.10"]

    assert [
        "", "10.0.0.2", "10.0.0.10", "a", "node", "node01", "node1", "node2", "Node10", "r2n3", "r2n11"
    ] == sorted(names, key=natural_key)  # fmt: skip
