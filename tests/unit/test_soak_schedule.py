"""Schedule and report of the soak."""

from __future__ import annotations

from tests.soak import schedule
from tests.soak.observations import HEAD, Outage, Usage
from tests.soak.observers import read_page
from tests.soak.parts import log_line
from tests.soak.report import Summary, text

OTHERS = ("gpu-3", "gpu-4")


def plan(seed: int, minutes: float) -> list[schedule.Action]:
    """A schedule for a run of so many minutes."""
    return schedule.plan(seed, minutes * 60, faulty="gpu-7", others=OTHERS)


def test_seed() -> None:
    """The same seed gives the same schedule, another one another."""

    assert plan(1, 30) == plan(1, 30)
    assert plan(1, 30) != plan(2, 30)


def test_every_kind() -> None:
    """Even the shortest run has every disturbance once, and a longer one each of them more often."""

    kinds = {*schedule.HEAD_ACTIONS, *schedule.OTHER_ACTIONS}
    for seed in range(20):
        assert sorted(kinds) == sorted(action.kind for action in plan(seed, 2))
        long = [action.kind for action in plan(seed, 30)]
        assert all(long.count(kind) >= 5 for kind in kinds)


def test_order_and_quiet_end() -> None:
    """Disturbances are in the order of their times, and the last part of a run has none."""

    for seed in range(20):
        for minutes in (2, 10, 30):
            times = [action.at_seconds for action in plan(seed, minutes)]
            assert sorted(times) == times
            assert times[-1] <= 0.7 * minutes * 60


def test_head_first() -> None:
    """A short run restarts the head in its first half, so that pages then stay connected for more than 30 seconds."""

    for seed in range(20):
        heads = [action.at_seconds for action in plan(seed, 2) if action.kind in schedule.HEAD_ACTIONS]
        assert max(heads) <= 60


def test_nodes() -> None:
    """The agent of the faulty node is restarted and killed in a long run; only nodes that may be touched are."""

    actions = plan(3, 30)
    touched = {(action.kind, action.node) for action in actions if action.node}
    assert (schedule.AGENT_RESTART, "gpu-7") in touched
    assert (schedule.AGENT_KILL, "gpu-7") in touched
    assert (schedule.AGENT_OUTAGE, "gpu-7") not in touched
    assert {node for _, node in touched} <= {"gpu-7", *OTHERS}


def test_description() -> None:
    """The schedule is printed with its seed, a line for each disturbance."""

    lines = schedule.describe(1, [schedule.Action(8.0, schedule.AGENT_KILL, "gpu-3")]).splitlines()
    assert ["schedule of seed 1:", "      8.0 s  kill agent gpu-3"] == lines


def test_log_line() -> None:
    """A line of a log has a time and a level; a line of a traceback has neither."""

    parsed = log_line(HEAD, "2027-01-15 08:00:05 E sending failed")
    assert (1_800_000_005.0, "E", "sending failed") == parsed[1:]
    assert (None, "", "  File x") == log_line(HEAD, "  File x")[1:]


def test_metrics_page() -> None:
    """A page with a sample twice, without samples or that cannot be parsed says so."""

    assert None is read_page(0.0, HEAD, "# TYPE a gauge\na 1\n").problem
    assert "twice" in str(read_page(0.0, HEAD, "# TYPE a gauge\na 1\na 1\n").problem)
    assert "empty" in str(read_page(0.0, HEAD, "").problem)
    assert "cannot be read" in str(read_page(0.0, HEAD, 'a{b="c" 1\n').problem)


def summary(*violations: str) -> Summary:
    """A run with one process."""
    return Summary(
        42,
        3.0,
        3.1,
        {"kill head": 1},
        {"frames stored": 1234},
        [Usage(0.0, HEAD, 7, 1 << 20, 10), Usage(60.0, HEAD, 7, 3 << 20, 12)],
        [Outage(HEAD, "kill head", 10.0, 15.0)],
        violations,
    )


def test_report() -> None:
    """The report has what was done and counted, memory and files at start and end, and whether all was well."""

    lines = [" ".join(line.split()) for line in text(summary()).splitlines()]
    assert "soak of 3.1 minutes, seed 42" in lines
    assert "kill head 1" in lines
    assert "downtime: head 5 s" in lines
    assert "frames stored 1,234" in lines
    assert "head 7 60 1.0 3.0 3.0 10 12" in lines
    assert "no violations" == lines[-1]


def test_report_with_violations() -> None:
    """All violations are listed, with the command that repeats the run."""

    lines = text(summary("first", "second")).splitlines()
    assert ["2 violations:", "  1. first", "  2. second"] == lines[-4:-1]
    assert "run again with: make soak MINUTES=3 SEED=42" == lines[-1]
