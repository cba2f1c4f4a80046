"""Totals and trends of a real head with agents, and what the next head knows of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.cluster import Cluster, HeadProcess, cluster_in, until

pytestmark = pytest.mark.slow


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """Heads and agents of one test."""
    with cluster_in(tmp_path) as made:
        yield made


def known_steps(head: HeadProcess) -> dict[float, tuple[float, ...]]:
    """The trends of both nodes by the start of each step, where all GPUs have a value."""
    answer = head.get("/api/v1/fleet/trends")
    gpus = [values for node in ("n1", "n2") for values in answer["gpus"].get(node, {}).values()]
    steps = zip(*gpus, strict=True) if gpus else ()
    return {
        answer["start"] + place * answer["step_seconds"]: step
        for place, step in enumerate(steps)
        if None not in step
    }


def test_totals_and_trends_of_a_head_and_of_the_next_one(cluster: Cluster, tmp_path: Path) -> None:
    """Every GPU is in one state; a restart keeps the hours, and the trends are read back from the store."""
    nodes = tmp_path / "nodes"
    nodes.write_text("n1\nn2\nn9\n", encoding="ascii")
    head = cluster.head("--nodes", str(nodes))
    agents = [cluster.agent(name, head.port) for name in ("n1", "n2")]

    def counted(head: HeadProcess) -> Any:
        now = head.get("/api/v1/fleet/totals")["now"]
        is_complete = now["missing_nodes"] == 1 and now["gpus"] == 16  # eight of each agent
        return (
            now
            if is_complete and now["busy"] and now["power_watts"] and now["held_gpu_hours_today"]
            else None
        )

    now = until(lambda: counted(head), "GPUs at work")
    total = head.get("/status")["total_gpus"]
    assert (
        total
        == now["gpus"]
        == sum(now[state] for state in ("busy", "held_idle", "free", "harvested", "faulty", "lost"))
    )
    before = until(lambda: known_steps(head), "trends")
    first = min(before)
    until(lambda: max(known_steps(head)) > first, "a step that is over")
    before = known_steps(head)
    assert len(before[first]) == total
    hours = head.get("/api/v1/fleet/totals")["now"]["held_gpu_hours_today"]
    assert head.end() == 0

    again = cluster.head("--nodes", str(nodes), port=head.port, http_port=head.http_port)
    after = until(lambda: known_steps(again), "trends from the store")
    assert first in after
    totals = again.get("/api/v1/fleet/totals")
    assert totals["now"]["held_gpu_hours_today"] >= hours
    assert totals["day"]["busy"][-2:] != [None, None]
    for agent in agents:
        agent.tell()
