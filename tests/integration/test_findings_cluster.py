"""Findings of real agents at a real head: what they are, since when, and where they are shown."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect

from tests.fakes.nvml import FakeNvml
from tests.integration.browser import browsing, tab
from tests.integration.cluster import AgentProcess, Cluster, HeadProcess, cluster_in, until
from tests.integration.commands import run

QUICKLY = {
    "gpulse.cluster.head.fleet:LATE_SECONDS": 1.0,
    "gpulse.cluster.head.fleet:LATE_INTERVALS": 2,
    "gpulse.cluster.head.fleet:LOST_SECONDS": 4.0,
    "gpulse.cluster.head.fleet:RECONNECT_SECONDS": 4.0,
    "gpulse.cluster.head.expected_nodes:MIN_MISSING_SECONDS": 1.0,
}
"""Nodes are lost and missing sooner."""
CAUSES = {"ecc_uncorrected_errors_total", "remapped_rows_pending", "xid_94", "xid_13"}
DAY = 86_400


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """Heads and agents that are all gone at the end."""
    with cluster_in(tmp_path) as made:
        yield made


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[FakeNvml]:
    """A machine with two GPUs, the first of which is broken in two ways."""
    made = FakeNvml.create(tmp_path / "control", 2)
    made.gpu(0).ecc_volatile[1] = 2
    made.gpu(0).remapped_pending = 1
    yield made
    made.close()


def faults(head: HeadProcess) -> dict[str, float]:
    """The faults that hold now, by cause since when."""
    found = head.get("/api/v1/findings")["findings"]
    return {one["cause"]: one["start"] for one in found if one["id"] == "gpu_fault"}


def history(head: HeadProcess, seconds: float, **wanted: str) -> list[tuple[str, float, float | None]]:
    """Cause or node, beginning and end of the findings of the last so many seconds."""
    spans = head.get(f"/api/v1/findings/history?from={time.time() - seconds}")["spans"]
    return sorted(
        (one["cause"] or one["node"], one["from"], one["to"])
        for one in spans
        if all(one[name] == value for name, value in wanted.items())
    )


def until_started(head: HeadProcess, agent: AgentProcess) -> None:
    """Wait until the head knows that this agent has started."""

    def is_known() -> bool:
        events = head.get(f"/api/v1/events?from={time.time() - 3600}&kinds=agent_started")["events"]
        return agent.popen.pid in {one["detail"]["pid"] for one in events}

    until(is_known, "the next agent, which has seen no Xid")


def broken(cluster: Cluster, head: HeadProcess, env: dict[str, str]) -> AgentProcess:
    """Start an agent of the broken machine."""
    return cluster.agent("n1", head.port, "--interval", "0.25", source=(), env=env)


def test_faults_keep_their_start_over_restarts(cluster: Cluster, fake: FakeNvml, nvml_library: Path) -> None:
    """Of an agent and of the head, in every range, and all of them are in the session's file and report."""
    env = fake.env(nvml_library)
    head = cluster.head("--freq", "250", tuned=QUICKLY)
    agent = broken(cluster, head, env)
    until(lambda: len(faults(head)) == 2, "two faults")
    head.post("/profiling/start", {"name": "s"})
    fake.push_xid(0, 94)
    fake.push_xid(0, 13)
    until(lambda: set(faults(head)) == CAUSES, "four faults")
    began = faults(head)
    until(lambda: len(history(head, DAY)) == 4, "four faults in the history")
    head.post("/profiling/stop", {})

    for how in (signal.SIGTERM, signal.SIGKILL):
        agent.end(how)
        agent = broken(cluster, head, env)
        until_started(head, agent)
        until(lambda: set(faults(head)) == CAUSES, "four faults")
        assert began == faults(head)

    head.end(signal.SIGKILL)
    head = cluster.head("--freq", "250", port=head.port, http_port=head.http_port, tuned=QUICKLY)
    until(lambda: head.nodes() == {"n1": "healthy"}, "the node is back")
    until(lambda: [one[2] for one in history(head, DAY)].count(None) == 4, "four faults again")
    assert began == faults(head)
    for seconds in (60 * DAY, DAY, 3600, 0.5):
        spans = history(head, seconds, id="gpu_fault")
        assert {(cause, began[cause]) for cause, _, end in spans if end is None} == set(faults(head).items())

    (path,) = head.output_dir.glob("s.json")
    told = json.loads(path.read_text())["findings"]
    assert ["critical", "high", "high", "medium"] == [one["severity"] for one in told]
    assert began == {one["cause"]: one["start"] for one in told}
    report = run("report", path).out
    status = run("status", "--head", f"127.0.0.1:{head.port}", env={"HOME": str(path.parent)}).out
    for words in ("uncorrectable memory errors", "needs a GPU reset"):
        assert words in report
        assert words in status
    assert "Xid 94" in report
    agent.end()


def lost(head: HeadProcess) -> list[dict[str, Any]]:
    """The findings about nodes."""
    found = head.get("/api/v1/findings")["findings"]
    return [one for one in found if one["id"] in ("node_lost", "node_missing")]


def test_nodes_that_do_not_report_are_findings(cluster: Cluster, tmp_path: Path) -> None:
    """Until they do; in the past they are there with their beginning and end, over a restart of the head."""
    names = tmp_path / "nodes"
    names.write_text("n2\nn10\nn1\n")
    head = cluster.head("--freq", "250", "--nodes", str(names), tuned=QUICKLY)
    agent = cluster.agent("n1", head.port)
    until(lambda: head.nodes() == {"n1": "healthy"}, "a node")
    until(lambda: [one["node"] for one in lost(head)] == ["n2", "n10"], "two nodes are missing")
    missed = {one["node"]: one["start"] for one in lost(head)}

    agent.end(signal.SIGKILL)
    until(lambda: len(lost(head)) == 3, "one is lost")
    first = lost(head)[0]
    assert ("n1", "node_lost", "critical", "fault") == tuple(
        first[name] for name in ("node", "id", "severity", "family")
    )
    assert ("last_heard_timestamp_seconds", first["start"]) == (
        first["evidence"][0]["signal"],
        pytest.approx(first["evidence"][0]["value"], abs=0.001),
    )
    status = run("status", "--head", f"127.0.0.1:{head.port}", env={"HOME": str(tmp_path)}).out
    assert "n1 has stopped reporting" in status
    assert "n2, n10: " in status

    head.end()
    head = cluster.head(
        "--freq", "250", "--nodes", str(names), port=head.port, http_port=head.http_port, tuned=QUICKLY
    )
    until(lambda: len(lost(head)) == 3, "all of them after a restart")
    assert {"n1": first["start"], **missed} == {one["node"]: one["start"] for one in lost(head)}

    cluster.agent("n1", head.port)
    cluster.agent("n10", head.port)
    until(lambda: [one["node"] for one in lost(head)] == ["n2"], "they report")
    until(lambda: [one for one in history(head, DAY) if one[2]][1:], "their findings are over")
    found = {(name, start, end is not None) for name, start, end in history(head, DAY, family="fault")}
    assert {("n1", first["start"], True), ("n10", missed["n10"], True), ("n2", missed["n2"], False)} <= found


def groups(head: HeadProcess, state: str = "now") -> dict[str, dict[str, Any]]:
    """The groups of findings in a state, by key."""
    return {one["key"]: one for one in head.get(f"/api/v1/findings/groups?state={state}")["groups"]}


def test_what_people_did_survives_a_killed_head(
    cluster: Cluster, fake: FakeNvml, nvml_library: Path, tmp_path: Path
) -> None:
    """An acknowledgement holds while the condition lasts, over restarts; a silence until its end; both are events."""
    ecc, remap = "gpu_fault/ecc_uncorrected_errors_total", "gpu_fault/remapped_rows_pending"
    head = cluster.head("--freq", "250", tuned=QUICKLY)
    agent = broken(cluster, head, fake.env(nvml_library))
    until(lambda: groups(head).keys() == {ecc, remap}, "two faults")
    began = groups(head)[ecc]["from"]
    at, env = ("--head", f"127.0.0.1:{head.port}"), {"HOME": str(tmp_path)}
    assert "mo acknowledged 1 finding" in run("findings", "ack", ecc, "--by", "mo", *at, env=env).out
    made = run(
        "findings",
        "silence",
        f"{remap.replace('/', '/n1/0/')}",
        "--for",
        "2h",
        "--reason",
        "a reset is planned",
        *at,
        env=env,
    )
    assert f"{remap} on n1:0 until" in made.out

    head.end(signal.SIGKILL)
    head = cluster.head("--freq", "250", port=head.port, http_port=head.http_port, tuned=QUICKLY)
    agent.end(signal.SIGKILL)
    broken(cluster, head, fake.env(nvml_library))
    until(lambda: head.nodes() == {"n1": "healthy"}, "the node is back")
    until(lambda: {**groups(head), **groups(head, "silenced")}.keys() == {ecc, remap}, "two faults again")

    (known,) = groups(head, "acknowledged")[ecc]["members"]
    assert (began, "mo") == (known["from"], known["acknowledged"]["by"])
    (silence,) = head.get("/api/v1/silences")["silences"]
    assert ("a reset is planned", 1, {remap}) == (
        silence["reason"],
        silence["matches"],
        set(groups(head, "silenced")),
    )
    assert [ecc] == list(groups(head))
    assert "a reset is planned" in run("findings", "silences", *at, env=env).out
    listed = run("findings", *at, env=env).out
    assert ("acknowledged" in listed, "silenced: 1 kind of finding" in listed) == (True, True)
    assert "has ended" in run("findings", "unsilence", silence["id"], *at, env=env).out
    assert {ecc, remap} == set(groups(head))
    events = head.get("/api/v1/events?kinds=findings_acknowledged,silence_started,silence_ended")["events"]
    assert ["findings_acknowledged", "silence_started", "silence_ended"] == [one["kind"] for one in events]

    fake.gpu(0).remapped_pending = 0
    until(lambda: remap not in groups(head), "one fault is mended")
    until(lambda: [one["group"] for one in groups(head, "past").values()] == [remap], "it is a past one")
    assert "needs a GPU reset" in run("findings", "--past", "1h", *at, env=env).out
    refused = run("findings", "ack", "gpu_fault/other", *at, env=env)
    assert (True, "gpulse findings" in refused.err) == (refused.code != 0, True)


def test_the_page_shows_the_same_start_in_every_range(
    cluster: Cluster, fake: FakeNvml, nvml_library: Path, tmp_path: Path
) -> None:
    """Every fault has an entry of its own, and a node that never reported has one, too."""
    names = tmp_path / "nodes"
    names.write_text("n7\n")  # n1 would be missing, too, until its agent is up
    head = cluster.head("--freq", "250", "--nodes", str(names), tuned=QUICKLY)
    broken(cluster, head, fake.env(nvml_library))
    until(lambda: [one["node"] for one in lost(head)] == ["n7"], "a node is missing")
    until(lambda: len(history(head, DAY, id="gpu_fault")) == 2, "two faults")
    until(lambda: history(head, DAY, id="node_missing"), "the missing node in the history")
    seen = []
    with browsing() as browser, tab(browser, head.http_port) as window:
        for query in ("", "by=node", "range=2592000"):
            page = window.go("findings", query=f"?{query}")
            window.settled()
            rows = page.locator(".finding-row")
            fault = rows.filter(has_text="ncorrectable memory errors")
            expect(fault).to_have_count(1)
            expect(rows.filter(has_text="needs a GPU reset to be remapped")).to_have_count(1)
            expect(rows.filter(has_text="An expected node has never reported")).to_have_count(1)
            fault.click()
            expect(page.locator("#finding-title")).to_contain_text("ncorrectable memory errors")
            seen.append(page.locator(".finding-members tbody td.num").nth(1).inner_text())
        window.quiet()
    assert 1 == len(set(seen))
