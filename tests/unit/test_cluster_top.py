"""The cluster view: rows, filters, sort orders, the screen at several sizes, and the application."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from gpulse.cluster.protocol.answers import (
    ClusterOccupancy,
    FindingAdvice,
    Findings,
    GpuHolderAnswer,
    GpuOccupancy,
    NodeFinding,
    NodeOccupancy,
    NodeState,
)
from gpulse.errors import GpulseError
from gpulse.model.finding import Severity
from gpulse.model.gpu_state import GPU_STATES, GpuState
from gpulse.terminal.top.cluster_app import ClusterTopApp, ClusterTopOptions
from gpulse.terminal.top.cluster_cells import STATE_GLYPHS, gpu_cells, totals_line
from gpulse.terminal.top.cluster_layout import (
    PANEL_NAMES,
    ClusterScreenInput,
    ConnectionStatus,
    DrawnCluster,
    draw_cluster,
)
from gpulse.terminal.top.cluster_rows import (
    SORT_ORDERS,
    ClusterFilter,
    ClusterSnapshot,
    ClusterViewState,
    build_jobs,
    build_nodes,
    parse_cluster_filter,
    sort_nodes,
)
from gpulse.terminal.top.live_view import Page, Panel
from gpulse.terminal.top.styled_text import ASCII, UNICODE, Glyphs, Line, width

if TYPE_CHECKING:
    from textual.pilot import Pilot

NOW = 1_763_200_000.0
GIB = 1 << 30
GOLDEN = Path(__file__).parents[1] / "golden"
_PATIENCE_SECONDS = 60.0


@pytest.fixture(autouse=True)
def _utc() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TZ", "UTC")
        time.tzset()
        yield
    time.tzset()


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    assert [] == [thread.name for thread in threading.enumerate() if thread.name == "gpulse-cluster-top"]


def holder(user: str = "ada", job: str | None = None, pid: int = 7) -> GpuHolderAnswer:
    """A process that was started an hour ago."""
    return GpuHolderAnswer(
        pid=pid,
        user=user,
        job=job,
        name="python3",
        command="/usr/bin/python3 train.py",
        gpu_memory_bytes=30 * GIB,
        start_time=NOW - 3600,
    )


def gpu(
    node: str, index: int, state: GpuState, *holders: GpuHolderAnswer, busy: float | None = None
) -> GpuOccupancy:
    """A GPU in a state."""
    is_used = bool(holders)
    return GpuOccupancy(
        label=str(index),
        uuid=f"GPU-{node}-{index}",
        name="NVIDIA H200",
        state=state,
        utilization_ratio=(0.98 if state == "busy" else 0.0) if busy is None else busy,
        memory_used_bytes=(31 if is_used else 0.5) * GIB,
        memory_total_bytes=140.0 * GIB,
        power_watts=600.0 if state == "busy" else 80.0,
        temperature_celsius=50.0,
        users=[one.user for one in holders if one.user and not (one.job or "").startswith("harvest:")],
        holders=holders,
    )


def node(name: str, *gpus: GpuOccupancy, state: NodeState = "healthy") -> NodeOccupancy:
    """A node."""
    return NodeOccupancy(
        node=name,
        state=state,
        connected=state != "lost",
        seen=NOW - (90 if state == "lost" else 0),
        time=NOW,
        gpus=gpus,
    )


def finding(
    where: str,
    index: int | None,
    severity: Severity = "high",
    name: str = "pcie_copy_bound",
    *,
    is_silenced: bool = False,
) -> NodeFinding:
    """A finding."""
    return NodeFinding(
        key=f"{where} {index} {name}",
        category="slowness",
        users=(),
        jobs=(),
        acknowledged=False,
        silenced=is_silenced,
        node=where,
        id=name,
        family="copy",
        severity=severity,
        confidence=0.9,
        summary=f"GPU {index} waits 90% of the time for copies",
        gpu=index,
        label=None if index is None else str(index),
        pids=(),
        lost_ratio=0.9,
        start=NOW - 600,
        end=NOW,
        evidence=(),
        counter_evidence=(),
        ruled_out=(),
        advice=(FindingAdvice(do="pin memory", why="it is faster", confirm="time it"),),
        url=None,
        cause=None,
        inferred=False,
    )


def snapshot(
    nodes: Sequence[NodeOccupancy], findings: Sequence[NodeFinding] = (), missing: Sequence[str] = ()
) -> ClusterSnapshot:
    """Answers of a head with these nodes."""
    states = [one.state for each in nodes for one in each.gpus]
    occupancy = ClusterOccupancy(
        time=NOW,
        counts={state: states.count(state) for state in GPU_STATES},
        nodes=nodes,
        missing_nodes=missing,
    )
    return ClusterSnapshot(occupancy, Findings(time="", findings=findings))


def small_cluster() -> ClusterSnapshot:
    """One node in each condition."""
    job = holder("ada", "slurm:1")
    return snapshot(
        [
            node("n1", *(gpu("n1", index, "busy", job) for index in range(4))),
            node(
                "n2",
                gpu("n2", 0, "busy", job),
                gpu("n2", 1, "idle", holder("bob", pid=8)),
                gpu("n2", 2, "free"),
                gpu("n2", 3, "harvested", holder("eve", "harvest:fold", pid=9), busy=0.9),
            ),
            node("n3", gpu("n3", 0, "faulty"), *(gpu("n3", index, "free") for index in (1, 2, 3))),
            node("n10", *(gpu("n10", index, "lost", job) for index in range(4)), state="lost"),
        ],
        [finding("n3", 0, "critical", "gpu_fault"), finding("n2", 1, "medium")],
        missing=["n11"],
    )


def large_cluster(nodes: int) -> ClusterSnapshot:
    """Nodes with eight busy GPUs each."""
    return snapshot(
        [
            node(
                f"gpu-{number:03}", *(gpu(f"gpu-{number:03}", index, "busy", holder()) for index in range(8))
            )
            for number in range(nodes)
        ]
    )


def text(line: Line) -> str:
    """What a line says, without its tones."""
    return "".join(piece.text for piece in line)


def picture(
    answers: ClusterSnapshot | None,
    cells: int = 80,
    lines: int = 24,
    state: ClusterViewState | None = None,
    glyphs: Glyphs = UNICODE,
    status: ConnectionStatus | None = None,
) -> DrawnCluster:
    """The screen for some answers."""
    return draw_cluster(
        ClusterScreenInput(
            answers,
            state or ClusterViewState(),
            status or ConnectionStatus("gpu-head:8090", 1.0),
            glyphs,
            cells,
            lines,
            NOW,
        )
    )


def shown(one: DrawnCluster) -> list[str]:
    """The lines of the screen."""
    return [text(line) for part in PANEL_NAMES for line in one.parts.get(part, [])]


@pytest.mark.parametrize(("cells", "lines"), [(80, 24), (120, 40), (200, 60)])
@pytest.mark.parametrize("page", ["nodes", "jobs", "findings", "n2"])
def test_golden_screens(cells: int, lines: int, page: str) -> None:
    """Every page at three sizes; `UPDATE_GOLDEN=1` writes them anew."""
    tabs = {"nodes": "nodes", "jobs": "jobs", "findings": "findings"}
    state = (
        ClusterViewState().with_tab(tabs[page])  # type: ignore[arg-type]
        if page in tabs
        else ClusterViewState().with_node(page)
    )
    drawn = "\n".join(line.rstrip() for line in shown(picture(small_cluster(), cells, lines, state))) + "\n"
    path = GOLDEN / f"cluster-{page}-{cells}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(drawn, encoding="utf-8")

    assert path.read_text(encoding="utf-8") == drawn


@pytest.mark.parametrize("glyphs", [UNICODE, ASCII])
@pytest.mark.parametrize(("cells", "lines"), [(40, 10), (80, 24), (120, 40), (200, 60)])
@pytest.mark.parametrize("nodes", [0, 1, 8, 125])
def test_every_size_fills_the_screen_exactly(nodes: int, cells: int, lines: int, glyphs: Glyphs) -> None:
    """With 8, 64 and 1,000 GPUs; nothing is wider or higher than the terminal."""
    drawn = picture(large_cluster(nodes), cells, lines, glyphs=glyphs)

    assert lines == sum(map(len, drawn.parts.values()))
    assert cells >= max(width(line) for part in drawn.parts.values() for line in part)
    if glyphs is ASCII:
        assert all(line.isascii() for line in shown(drawn))


def test_all_rows_of_a_thousand_gpus_can_be_reached() -> None:
    """The last one is in view when the cursor is there."""
    answers, state = large_cluster(125), ClusterViewState()
    drawn = picture(answers, state=state)
    state = state.with_cursor(state.cursor.moved(100_000, drawn.keys, drawn.height))
    lines = shown(picture(answers, state=state))

    assert any(line.startswith("▌gpu-124") for line in lines)
    assert any("-125/125" in line for line in lines)


def test_what_needs_attention_comes_first() -> None:
    """Silent nodes, then faults, then findings, then GPUs that are held idle."""
    rows = sort_nodes(build_nodes(small_cluster()), "attention", descending=True)

    assert ["n10", "n11", "n3", "n2", "n1"] == [row.name for row in rows]


def test_silenced_findings_do_not_ask_for_attention() -> None:
    """Somebody has said until when and why they are not news."""
    answers = snapshot([node("n1", gpu("n1", 0, "free"))], [finding("n1", 0, is_silenced=True)])

    assert [()] == [row.findings for row in build_nodes(answers)]
    assert any("findings 0" in line for line in shown(picture(answers)))


def test_states_can_be_told_apart_without_color() -> None:
    """A glyph for each, with its number and its meaning in the totals."""
    answers = small_cluster()
    totals = text(totals_line(answers.occupancy.counts, 4000.0, 120, UNICODE))

    assert len(GPU_STATES) == len(set(STATE_GLYPHS.values()))
    assert (
        "● 5 busy   ◐ 1 held idle   ○ 4 free   ◇ 1 harvested   ⊘ 1 faulty   ✕ 4 lost   4.0 kW"
        == totals.strip()
    )
    assert "● 98 ◐  0 ○  0 ◇ 90" == text(gpu_cells(answers.occupancy.nodes[1].gpus, 40, UNICODE))
    assert "● ◐ ○ ◇" == text(gpu_cells(answers.occupancy.nodes[1].gpus, 10, UNICODE))


def test_a_job_has_its_gpus_on_all_nodes() -> None:
    """A process without a job is a job of its own; a harvest is one on each node."""
    jobs = {row.key: (row.user, len(row.gpus), row.idle) for row in build_jobs(small_cluster().occupancy)}

    assert {"slurm:1": ("ada", 9, 0), "n2/8": ("bob", 1, 1), "n2/harvest:fold": ("eve", 1, 0)} == jobs


@pytest.mark.parametrize(
    ("typed", "names"),
    [
        ("", {"n1", "n2", "n3", "n10", "n11"}),
        ("user:bob", {"n2"}),
        ("node:n1*", {"n1", "n10", "n11"}),
        ("state:free", {"n2", "n3", "n11"}),
        ("TRAIN user:ada", {"n1", "n2", "n10"}),
        ("harvest:fold", {"n2"}),
    ],
)
def test_filters(typed: str, names: set[str]) -> None:
    """By user, node, state of GPUs and words; a node without GPUs has no states to be filtered by."""
    state = ClusterViewState().filtered(parse_cluster_filter(typed))

    assert names == set(picture(small_cluster(), state=state).keys)


def test_a_filter_reads_as_it_was_typed() -> None:
    """It can be edited."""
    typed = "user:ada node:n1 state:free train"

    assert typed == str(parse_cluster_filter(typed))
    assert not ClusterFilter()


@pytest.mark.parametrize("table", ["nodes", "jobs", "gpus"])
def test_every_sort_order_works_in_both_directions(table: str) -> None:
    """Also with values that are unknown."""
    state = ClusterViewState()
    state = state.with_node("n2") if table == "gpus" else state.with_tab(table)  # type: ignore[arg-type]
    seen = set()
    for _ in SORT_ORDERS[state.table]:
        keys = picture(small_cluster(), state=state).keys
        assert sorted(keys) == sorted(picture(small_cluster(), state=state.reversed()).keys)
        assert state.order is not None
        seen.add(state.order.column)
        state = state.sorted_next(1)

    assert set(SORT_ORDERS[state.table]) == seen


def test_a_disconnected_head_keeps_its_last_values() -> None:
    """With the time since when."""
    status = ConnectionStatus("gpu-head:8090", 1.0, lost_since=NOW, problem="nothing is listening")
    lines = shown(picture(small_cluster(), status=status))

    assert "DISCONNECTED since 09:46:40; showing the last values" in lines[0]
    assert any("n2" in line and "● 98" in line for line in lines)


class Answers:
    """A head that answers, or fails, as it is told."""

    def __init__(self, answers: ClusterSnapshot) -> None:
        self.answers = answers
        self.failure: GpulseError | None = None
        self.connections = 0

    def connect(self) -> Answers:
        """Count it."""
        self.connections += 1
        return self

    def read(self) -> ClusterSnapshot:
        """Answer, or fail."""
        if self.failure is not None:
            raise self.failure
        return self.answers

    def close(self) -> None:
        """Do nothing."""


async def until(pilot: Pilot[GpulseError], condition: Callable[[], bool]) -> None:
    """Let the application work until something is so."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it did not come to pass"
        await pilot.pause()


def seen(app: ClusterTopApp, part: str) -> str:
    """What a part of the screen says, dialogs aside."""
    return app.screen_stack[0].query_one(f"#{part}", Panel).text


def app_on(head: Answers, interval_seconds: float = 0.1) -> ClusterTopApp:
    """A view of a head."""
    return ClusterTopApp(
        head.connect,
        ClusterTopOptions(
            address="gpu-head:8090", interval_seconds=interval_seconds, glyphs=UNICODE, clock=lambda: NOW
        ),
    )


async def test_keys() -> None:
    """Enter opens a node and Escape goes back; Tab switches; a finding shows its advice; the filter keeps what is typed."""
    app = app_on(Answers(small_cluster()))
    async with app.run_test(size=(100, 24)) as pilot:
        await until(pilot, lambda: "n10" in seen(app, "main"))
        await pilot.press("down", "down", "down", "enter")
        assert "[n2]" in seen(app, "tabs")
        assert "held idle" in seen(app, "main")
        await pilot.press("escape", "tab")
        assert "[jobs 3]" in seen(app, "tabs")
        await pilot.press("tab", "enter")
        assert isinstance(app.screen, Page)
        await pilot.press("escape", "tab", "slash", *"user:bob", "enter")
        await until(pilot, lambda: "user:bob" in seen(app, "tabs"))
        assert ["n2"] == [line[1:].split()[0] for line in seen(app, "main").splitlines()[1:] if line.strip()]
        await pilot.press("escape")
        assert "n10" in seen(app, "main")
        await pilot.press("question_mark")
        assert isinstance(app.screen, Page)
        await pilot.press("escape", "q")


async def test_a_head_that_goes_away_and_comes_back() -> None:
    """The last values stay, with a message, and it connects again by itself."""
    head = Answers(small_cluster())
    app = app_on(head)
    async with app.run_test(size=(100, 24)) as pilot:
        await until(pilot, lambda: "n10" in seen(app, "main"))
        head.failure = GpulseError("nothing is listening")
        await until(pilot, lambda: "DISCONNECTED" in seen(app, "top"))
        assert "n10" in seen(app, "main")
        assert "nothing is listening" in seen(app, "keys")
        head.failure, before = None, head.connections
        await until(pilot, lambda: "DISCONNECTED" not in seen(app, "top"))

        assert head.connections > before


async def test_the_screen_follows_the_terminal() -> None:
    """A small one shows the nodes, a large one also jobs and findings."""
    app = app_on(Answers(small_cluster()))
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: "n10" in seen(app, "main"))
        assert "" == seen(app, "jobs")
        await pilot.resize_terminal(160, 50)
        await until(pilot, lambda: "slurm:1" in seen(app, "jobs"))

        assert "waits 90%" in seen(app, "findings")


async def test_a_pause_keeps_the_picture() -> None:
    """The newest answer is shown when it ends."""
    head = Answers(small_cluster())
    app = app_on(head)
    async with app.run_test(size=(100, 24)) as pilot:
        await until(pilot, lambda: "n10" in seen(app, "main"))
        await pilot.press("space")
        head.answers = snapshot([node("later", gpu("later", 0, "free"))])
        await until(pilot, lambda: app._feed.newest is head.answers)
        assert "PAUSED" in seen(app, "top")
        assert "n10" in seen(app, "main")
        await pilot.press("space")

        assert "later" in seen(app, "main")
