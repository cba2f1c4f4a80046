"""Findings that hold now: their keys, their owners, and their order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gpulse.cluster.head.active_findings import collect_active_findings
from gpulse.cluster.protocol.head_interface import LiveNode
from gpulse.diagnosis.rules.faults import node_lost, node_missing
from gpulse.model.finding import Evidence, Finding
from gpulse.model.finding_acknowledgement import active_key, parse_active_key
from gpulse.model.process import Owner, ProcessIdentity
from gpulse.sources.demo_machine import DemoMachine

NOW = 1_767_225_600.0
WORKERS = Finding(
    "input_too_few_workers",
    "input",
    "high",
    0.9,
    "GPU 1 waits 97% of the time",
    gpu=1,
    label="1",
    lost_ratio=0.97,
    start=NOW - 7800,
    evidence=(Evidence("lost_ratio", "mean", 0.97, ">=", 0.1),),
)
XID = Finding(
    "gpu_fault", "fault", "low", 1.0, "GPU 0: Xid 43", gpu=0, label="0", start=NOW - 60, cause="xid_43"
)


def live(name: str, *findings: Finding, **fields: object) -> LiveNode:
    """A node with two GPUs and these findings."""
    machine = DemoMachine(NOW - 60, gpus=2)
    node = LiveNode(
        1,
        name,
        "healthy",
        connected=True,
        seen=NOW,
        frame=machine.sample(NOW),
        processes={},
        findings=findings,
        labels={},
        version="1",
    )
    machine.close()
    return node._replace(**fields)  # type: ignore[arg-type]


def test_faults_come_first_however_small_they_are() -> None:
    """Then the others by severity and lost time; lost and missing nodes are faults."""
    lost = node_lost("n3", NOW - 600, NOW, was_stopped=False)
    less = WORKERS._replace(lost_ratio=0.5, label="0", gpu=0)
    idle = Finding("gpu_idle_allocated", "gpu_use", "high", 0.9, "is idle", gpu=1, label="1", start=NOW)
    nodes = [live("n1", less, WORKERS, idle), live("n2", XID), live("n3", lost, state="lost")]

    found = collect_active_findings(nodes, [node_missing("n4", NOW - 90, NOW)], NOW)

    assert [
        ("fault", "node_lost/n3"),
        ("fault", "node_missing/n4"),
        ("fault", "gpu_fault/n2/0/xid_43"),
        ("slowness", "input_too_few_workers/n1/1"),
        ("slowness", "input_too_few_workers/n1/0"),
        ("waste", "gpu_idle_allocated/n1/1"),
    ] == [(one.category, one.key) for one in found]


def test_a_finding_says_what_where_since_when_and_what_to_do() -> None:
    """With its title, and evidence with thresholds in words."""
    (found,) = collect_active_findings([live("n1", WORKERS)], [], NOW)

    assert ("Too few data-loading workers", "n1", (1,), NOW - 7800, ("lost GPU time 97%, at least 10%",)) == (
        found.title,
        found.node,
        found.gpus,
        found.since,
        found.evidence,
    )


def test_the_users_are_those_of_the_finding_s_processes() -> None:
    """A finding about a whole node concerns all of them, also when no frame has come since the head started."""
    processes = {
        7: ProcessIdentity(7, owner=Owner(user="ada", job="slurm:1")),
        8: ProcessIdentity(8, owner=Owner(user="grace", job="slurm:2")),
    }
    lost = node_lost("n1", NOW - 600, NOW, was_stopped=False)
    nodes = [live("n1", lost, WORKERS._replace(pids=(8,)), frame=None, processes=processes)]

    found = collect_active_findings(nodes, [], NOW)

    assert [(("ada", "grace"), ("slurm:1", "slurm:2")), (("grace",), ("slurm:2",))] == [
        (one.users, one.jobs) for one in found
    ]


@given(
    st.text(min_size=1),
    st.text(min_size=1),
    st.none() | st.text(min_size=1),
    st.text().map(lambda text: text[:64]),
)
def test_every_key_can_be_read_back(rule_id: str, node: str, label: str | None, cause: str) -> None:
    """Whatever characters its parts have."""
    rule_id, node = f"r{rule_id}", f"n{node}"

    assert (node, (rule_id, label, cause)) == parse_active_key(active_key(node, (rule_id, label, cause)))
