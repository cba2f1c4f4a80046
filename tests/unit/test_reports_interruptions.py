"""What a session lacks of the time in which its head was away."""

from __future__ import annotations

from pathlib import Path

from gpulse.cluster.head.operations import ReportRunner
from gpulse.model.session import Interruption, Session
from gpulse.reports.event_report import InterruptionCoverage, MissingTime
from gpulse.store.node_registry import NodeRegistry
from tests.unit.report_lab import BEGIN, Lab

VALUES = {"0": {"memory_used_bytes": 1.0}}
COMPLETE = InterruptionCoverage(missing=[], pending=[])


async def asked(
    lab: Lab, *parts: tuple[int, int | None], nodes: tuple[str, ...] = ()
) -> list[InterruptionCoverage | None]:
    """What is missing of the interruptions of a session, in seconds after the beginning."""
    interruptions = tuple(
        Interruption(BEGIN + start, None if end is None else BEGIN + end) for start, end in parts
    )
    session = Session("s1", "run", BEGIN, BEGIN, 1000, nodes=nodes, interruptions=interruptions)
    register = NodeRegistry(lab.archive.nodes().values())
    return await ReportRunner(lab.archive, register, lambda: 1.0).coverage(session)


async def test_what_agents_sent_afterwards_is_not_missing(tmp_path: Path) -> None:
    """A head that was away for 16 seconds lacks nothing once its agents have sent what they kept."""

    with Lab(tmp_path, ["0"], ["0"]) as lab:
        for node in (1, 2):
            lab.fill(range(60), node=node, values=VALUES)
        assert [COMPLETE] == await asked(lab, (20, 36))


async def test_until_a_node_is_back_nobody_knows(tmp_path: Path) -> None:
    """A node that has not sent anything from after the interruption may still have its frames."""

    with Lab(tmp_path, ["0"], ["0"]) as lab:
        lab.fill(range(60), node=1, values=VALUES)
        lab.fill(range(20), node=2, values=VALUES)
        assert [InterruptionCoverage(missing=[], pending=["n2"])] == await asked(lab, (20, 36))
        lab.fill(range(20, 60), node=2, values=VALUES)
        assert [COMPLETE] == await asked(lab, (20, 36))


async def test_what_no_frame_covers_is_a_gap(tmp_path: Path) -> None:
    """Of a node whose agent ended, too, exactly that time is missing which nobody sampled."""

    with Lab(tmp_path, ["0"], ["0"]) as lab:
        lab.fill(range(60), node=1, values=VALUES)
        lab.fill([*range(25), *range(34, 60)], node=2, values=VALUES)
        assert [
            InterruptionCoverage(missing=[MissingTime(node="n2", seconds=9.0)], pending=[])
        ] == await asked(lab, (20, 36))
        assert [COMPLETE] == await asked(lab, (20, 36), nodes=("n1",))


async def test_a_node_with_a_slow_pace_of_its_own(tmp_path: Path) -> None:
    """Frames every ten seconds are as complete as frames every second."""

    with Lab(tmp_path, ["0"]) as lab:
        lab.fill(range(0, 300, 10), values=VALUES)
        assert [COMPLETE] == await asked(lab, (95, 141))


async def test_nodes_that_were_not_there_are_not_expected(tmp_path: Path) -> None:
    """Neither one that was gone for long before, nor one that came later."""

    with Lab(tmp_path, ["0"], ["0"], ["0"]) as lab:
        lab.fill(range(200), node=1, values=VALUES)
        lab.fill(range(20), node=2, values=VALUES)
        lab.fill(range(150, 200), node=3, values=VALUES)
        assert [COMPLETE] == await asked(lab, (120, 140))


async def test_an_interruption_that_goes_on(tmp_path: Path) -> None:
    """Nothing is said of it, and earlier ones are known all the same."""

    with Lab(tmp_path, ["0"]) as lab:
        lab.fill(range(60), values=VALUES)
        assert [COMPLETE, None] == await asked(lab, (20, 25), (50, None))
