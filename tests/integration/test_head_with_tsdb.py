"""A head that has nothing on its disk, and a time-series database that has everything."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from tests.integration.cluster import AgentProcess, HeadProcess, until
from tests.integration.tsdb_servers import VictoriaMetrics


def values(head: HeadProcess, start: float, end: float) -> dict[str, tuple[list[int], list[float]]]:
    """What a head tells of a metric, by GPU; times in whole milliseconds."""
    found = head.get(f"/api/v1/query?metric=power_watts&from={start}&to={end}")
    return {
        one["subject"]: ([round(moment * 1e6) // 1000 for moment in one["times"]], one["values"])
        for one in found["series"]
    }


def charted(head: HeadProcess, start: float, end: float) -> list[Any]:
    """The same in steps, and a counter as rates."""
    metrics = "power_watts,energy_joules_total"
    found = head.get(f"/api/v1/history?metrics={metrics}&from={start}&to={end}&points=300")
    return [(one["subject"], one["metric"], one["values"]) for one in found["series"]]


def test_a_new_head_tells_the_past_of_another_ones_nodes(tmp_path: Path) -> None:
    """From the database, as the head tells it that has it on disk; and says so when the database is away."""

    places = [tmp_path / name for name in ("first", "second")]
    for place in places:
        place.mkdir()
    with VictoriaMetrics(tmp_path / "database") as tsdb:
        write = ("--remote-write", f"{tsdb.url}/api/v1/write")
        running: list[HeadProcess | AgentProcess] = []
        try:
            running.append(first := HeadProcess(places[0], "--freq", "200", *write))
            running.append(AgentProcess(tmp_path, "n1", first.port))
            begin = time.time() - 1.0
            until(
                lambda: len(next(iter(values(first, begin, time.time()).values()), ([],))[0]) >= 8, "frames"
            )
            end = float(int(time.time()))
            until(
                lambda: values(first, end, time.time()),
                "a frame after the end, so that none before it is under way",
            )
            expected = values(first, begin, end)
            assert len(expected) == 8

            running.append(second := HeadProcess(places[1], *write))
            until(lambda: values(second, begin, end) == expected, "the second head tells the same")

            for one, other in zip(charted(first, begin, end), charted(second, begin, end), strict=True):
                assert one[:2] == other[:2]
                assert [number is None for number in one[2]] == [number is None for number in other[2]]
                known = [[number for number in told[2] if number is not None] for told in (one, other)]
                assert known[0] == pytest.approx(known[1], rel=0.02)

            tsdb.kill()
            assert {} == values(second, begin, end)
            told = second.get("/status")["remote_query"]
            assert "failing" == told["state"]
            assert told["error"]
            assert expected == values(first, begin, end)
        finally:
            for process in reversed(running):
                process.end()
