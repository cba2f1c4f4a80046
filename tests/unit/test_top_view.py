from __future__ import annotations

import re
from dataclasses import replace

import pytest

from gpulse.model.counter_rates import Rates, compute_rates
from gpulse.model.device import Device, Node
from gpulse.model.finding import Advice, Finding
from gpulse.model.frame import Frame, GpuReading, HostReading
from gpulse.model.process import GpuProcess, Owner, ProcessIdentity, ProcessReading
from gpulse.model.source_health import Health
from gpulse.sources.demo_machine import DemoMachine
from gpulse.terminal.top import findings_panel, gpu_panel, process_panel
from gpulse.terminal.top.app import SnapshotBuffer
from gpulse.terminal.top.gpu_panel import MAX_VALUES_PER_GPU, GpuHistory
from gpulse.terminal.top.live_view import next_interval
from gpulse.terminal.top.process_panel import (
    ProcessTreeRow,
    build_entries,
    build_rows,
    find_users,
    sort_entries,
)
from gpulse.terminal.top.screen_layout import (
    PANEL_NAMES,
    DrawnScreen,
    SamplingStatus,
    ScreenInput,
    area,
    draw_screen,
    group_cores,
    host_lines,
    notice_line,
    plan_panel_heights,
    position,
    top_line,
)
from gpulse.terminal.top.styled_text import (
    ASCII,
    UNICODE,
    Glyphs,
    Line,
    PanelColumn,
    StyledText,
    align_both,
    bar,
    fit_columns,
    fit_parts,
    glyphs_for,
    pad,
    styled,
    trend,
    truncate,
    width,
)
from gpulse.terminal.top.view_state import (
    SORT_ORDERS,
    ListCursor,
    ProcessFilter,
    TopSnapshot,
    ViewState,
    next_choice,
    parse_process_filter,
)


def text(line: Line) -> str:
    """What a line says, without its tones."""
    return "".join(piece.text for piece in line)


def gpu(index: int, *processes: GpuProcess, mig: int | None = None, **values: float) -> GpuReading:
    """A GPU with these readings."""
    device = Device(
        index=index, uuid=f"GPU-{index}-{mig}", name="NVIDIA H100 80GB HBM3", mig_index=mig, has_gpm=True
    )
    return GpuReading(device, dict(values), processes)


def process(
    pid: int, parent: int = 1, *, on_gpu: bool = True, user: str = "ada", command: str = "python3 train.py"
) -> ProcessReading:
    """A process."""
    identity = ProcessIdentity(
        pid=pid,
        parent_pid=parent,
        start_time=900.0,
        name="python3",
        command=tuple(command.split()),
        owner=Owner(user=user),
    )
    return ProcessReading(identity, "S", {"host_memory_bytes": 1 << 30, "threads": 4}, on_gpu=on_gpu)


def frame(
    gpus: tuple[GpuReading, ...] = (),
    processes: tuple[ProcessReading, ...] = (),
    health: tuple[Health, ...] = (),
) -> Frame:
    """A frame with little in it."""
    return Frame(
        time=1000.0, monotonic=1000.0, node=Node("box"), gpus=gpus, processes=processes, health=health
    )


def demo(gpus: int = 8, *, seconds: float = 1.0) -> TopSnapshot:
    """The demo machine after some seconds."""
    machine = DemoMachine(1000.0, gpus=gpus)
    first, second = machine.sample(1000.0), machine.sample(1000.0 + seconds)
    return TopSnapshot(second, compute_rates(first, second))


def picture(
    snapshot: TopSnapshot | None,
    cells: int,
    lines: int,
    state: ViewState | None = None,
    glyphs: Glyphs = UNICODE,
) -> DrawnScreen:
    """The screen for a snapshot."""
    history = GpuHistory()
    if snapshot is not None:
        history.add(snapshot.frame)
    return draw_screen(
        ScreenInput(
            snapshot, history, state or ViewState(), SamplingStatus(1.0), "gpulse", glyphs, cells, lines
        )
    )


def shown(one: DrawnScreen) -> list[str]:
    """The lines of the screen."""
    return [text(line) for part in PANEL_NAMES for line in one.parts.get(part, [])]


def trainer_with_workers() -> TopSnapshot:
    """A trainer on GPU 0 with two loader workers."""
    held = GpuProcess(10, "compute", 5 << 30, 0.9)
    workers = tuple(process(pid, 10, on_gpu=False) for pid in (11, 12))
    return TopSnapshot(frame((gpu(0, held),), (process(10), *workers)))


def resting() -> ListCursor[str]:
    """A cursor that nobody moved."""
    return ListCursor()


class TestCells:
    """Lines and columns that fit."""

    def test_a_cut_text_ends_with_an_ellipsis(self) -> None:
        """A text that is too long is cut and says so."""
        assert truncate("abcdef", 4, "…") == "abc…"

    def test_wide_characters_count_double(self) -> None:
        """A line of wide characters takes exactly the cells it was given."""
        assert width(pad(styled("数据集训练"), 7)) == 7

    def test_the_right_end_is_kept(self) -> None:
        """When two ends do not fit, the left one gives way."""
        assert text(align_both(styled("a long title"), styled("12:00"), 10)) == "a lon12:00"

    def test_parts_drop_by_priority(self) -> None:
        """Of several parts those with the lowest numbers stay, in their own order."""
        parts = [(2, styled("aaa")), (0, styled("bbb")), (1, styled("ccc"))]

        assert text(fit_parts(parts, 8, "  ")) == "bbb  ccc"

    def test_columns_drop_by_priority_and_the_rest_is_stretched(self) -> None:
        """What does not fit is left out, what is left over goes to the column that can use it."""
        columns = [
            PanelColumn("a", "A", 4, 0),
            PanelColumn("b", "B", 10, 2),
            PanelColumn("c", "C", 3, 1, extra_cells=100),
        ]

        assert [(column.key, room) for column, room in fit_columns(columns, 12)] == [("a", 4), ("c", 7)]


class TestGlyphs:
    """Bars, trends and what a terminal can show."""

    @pytest.mark.parametrize(
        ("environment", "encoding", "expected"),
        [
            ({"LANG": "en_US.UTF-8"}, "utf-8", UNICODE),
            ({}, "utf-8", UNICODE),
            ({"LANG": "C", "LC_CTYPE": "C.UTF-8"}, "utf-8", ASCII),
            ({"LANG": "C", "LC_CTYPE": "de_DE.UTF-8"}, "utf-8", UNICODE),
            ({"LC_ALL": "POSIX", "LANG": "en_US.UTF-8"}, "utf-8", ASCII),
            ({"LANG": "en_US"}, "iso-8859-1", ASCII),
            ({"LANG": "en_US.UTF-8", "TERM": "linux"}, "utf-8", ASCII),
            ({"LANG": "en_US.UTF-8"}, None, ASCII),
        ],
    )
    def test_the_locale_decides(
        self, environment: dict[str, str], encoding: str | None, expected: Glyphs
    ) -> None:
        """Terminals that are not known to show more get plain ASCII signs, also when Python coerced the locale."""
        assert glyphs_for(environment, encoding) is expected

    @pytest.mark.parametrize(
        ("value", "expected"), [(0.0, "────"), (0.01, "╸───"), (0.5, "━━──"), (1.0, "━━━━"), (7.0, "━━━━")]
    )
    def test_bars(self, value: float, expected: str) -> None:
        """A bar is as long as its value, never longer than its room, and a little is not nothing."""
        assert text(bar(value, 4, "plain", UNICODE)) == expected

    def test_an_unknown_bar_is_blank(self) -> None:
        """An unknown value has no bar, not an empty one."""
        assert text(bar(None, 4, "plain", UNICODE)) == "    "

    def test_trends_end_at_the_right(self) -> None:
        """The newest value is rightmost, and a gap stays a gap."""
        assert text(trend([0.0, None, 1.0], 5, UNICODE)) == "  ▁ ▇"

    def test_areas_fill_from_below(self) -> None:
        """A value of a half fills the lower of two lines."""
        assert [text(line) for line in area([0.5, 1.0], 3, 2, lambda _: "plain", UNICODE)] == ["  █", " ██"]

    def test_foreign_text_is_ascii_where_it_must_be(self) -> None:
        """A terminal without UTF-8 gets question marks instead of bytes it cannot show."""
        assert ASCII.clean("训练\x1b[2J") == "??^[[2J"


class TestQuery:
    """The filter."""

    def test_it_is_read_and_written(self) -> None:
        """What was typed comes back in the same words."""
        assert parse_process_filter("user:ada gpu:0,2-3 train py") == ProcessFilter(
            "ada", ("0", "2", "3"), ("train", "py")
        )
        assert str(parse_process_filter("user:ada gpu:0,2-3 train")) == "user:ada gpu:0,2,3 train"

    def test_a_colon_alone_is_text(self) -> None:
        """A word with an unknown name before its colon is looked for as it stands."""
        assert parse_process_filter("http://x").text == ("http://x",)

    @pytest.mark.parametrize(
        ("typed", "expected"),
        [
            ("", True),
            ("user:ada", True),
            ("user:a*", True),
            ("user:bob", False),
            ("gpu:3", True),
            ("gpu:3:1", True),
            ("gpu:1", False),
            ("TRAIN", True),
            ("train eval", False),
        ],
    )
    def test_it_admits(self, typed: str, expected: bool) -> None:
        """All of user, GPU and words must match; a GPU includes its instances."""
        assert (
            parse_process_filter(typed).admits(user="ada", gpus=("3:1",), text="python3 train.py") is expected
        )

    def test_choices_come_in_turn(self) -> None:
        """After the last choice comes no filter, then the first one again."""
        assert [next_choice(current, ["a", "b"]) for current in ("", "a", "b", "gone")] == ["a", "b", "", ""]


class TestState:
    """Choices and cursors."""

    def test_a_cursor_stays_with_its_item(self) -> None:
        """When the list is reordered the cursor follows the item it was put on."""
        cursor = resting().moved(1, ["a", "b", "c"], 3)

        assert cursor.settled(["b", "c", "a"], 3).index == 0

    def test_a_cursor_that_nobody_moved_rests_at_the_top(self) -> None:
        """Until somebody moves it the cursor does not run after the first item."""
        assert resting().settled(["a", "b"], 2).settled(["b", "a"], 2).index == 0

    def test_a_cursor_whose_item_is_gone_stays_in_place(self) -> None:
        """When the item ends the cursor is on whatever took its place."""
        cursor = resting().moved(2, ["a", "b", "c"], 3)

        assert cursor.settled(["a", "b"], 3).index == 1

    def test_the_view_scrolls_with_the_cursor(self) -> None:
        """The cursor is always in view, and the view never runs past the end."""
        keys = [str(number) for number in range(64)]
        cursor = resting().moved(63, keys, 8)

        assert (cursor.index, cursor.offset) == (63, 56)
        assert cursor.moved(-60, keys, 8).offset == 3

    def test_an_empty_list_is_harmless(self) -> None:
        """There is nothing to move to in an empty list."""
        assert resting().moved(1, [], 5).settled([], 5) == ListCursor()

    def test_sorting_again_by_the_same_reverses(self) -> None:
        """Numbers begin with the largest, names with the smallest; asked for again they turn round."""
        state = ViewState().sorted_by("user")

        assert (state.sort, state.descending) == ("user", False)
        assert state.sorted_by("user").descending
        assert ViewState().sorted_by("cpu").descending

    def test_sorting_goes_through_all_columns(self) -> None:
        """As many steps as there are columns lead back to the first."""
        state = ViewState()
        seen = []
        for _ in SORT_ORDERS:
            seen.append(state.sort)
            state = state.sorted_next(1)

        assert tuple(seen) == SORT_ORDERS
        assert state.sort == SORT_ORDERS[0]
        assert state.sorted_next(-1).sort == SORT_ORDERS[-1]

    def test_gpus_and_users_take_turns(self) -> None:
        """The keys for users and GPUs go round and leave the rest of the filter alone."""
        state = ViewState(query=parse_process_filter("train")).next_gpu(["0", "1"]).next_user(["ada"])

        assert str(state.query) == "user:ada gpu:0 train"
        assert str(state.next_gpu(["0", "1"]).next_gpu(["0", "1"]).query) == "user:ada train"

    @pytest.mark.parametrize(
        ("now", "step", "then"),
        [(1.0, 1, 2.0), (1.0, -1, 0.5), (0.7, 1, 1.0), (60.0, 1, 60.0), (0.1, -1, 0.1)],
    )
    def test_intervals(self, now: float, step: int, then: float) -> None:
        """Intervals go through a short list and stop at its ends."""
        assert next_interval(now, step) == then


class TestProcessTree:
    """Which processes are shown and in what order."""

    def test_workers_are_folded(self) -> None:
        """Loader workers are a count on the line of their trainer until it is unfolded."""
        found = build_entries(trainer_with_workers())

        (row,) = build_rows(found, ViewState())
        assert (row.entry.process.pid, row.hidden) == (10, 2)
        unfolded = build_rows(found, ViewState().folded(row.entry.key, unfold=True))
        assert [(row.entry.process.pid, row.has_more_siblings) for row in unfolded] == [
            (10, ()),
            (11, (True,)),
            (12, (False,)),
        ]

    def test_a_flat_list_has_everybody(self) -> None:
        """Without the tree every process has its own line."""
        assert len(build_rows(build_entries(trainer_with_workers()), ViewState(tree=False))) == 3

    def test_a_process_on_a_gpu_is_never_folded(self) -> None:
        """A rank that its launcher started holds a GPU itself and is listed under the launcher."""
        held = (GpuProcess(10, "compute", 1, None), GpuProcess(12, "compute", 2, None))
        processes = (process(10), process(11, 10, on_gpu=False), process(12, 11))
        found = build_entries(TopSnapshot(frame((gpu(0, *held),), processes)))

        assert [(row.entry.process.pid, row.hidden) for row in build_rows(found, ViewState())] == [
            (10, 1),
            (12, 0),
        ]

    def test_workers_count_for_the_gpu_of_their_trainer(self) -> None:
        """A filter for a GPU keeps the workers, one for their pid finds them without the trainer."""
        found = build_entries(trainer_with_workers())

        assert build_rows(found, ViewState(query=parse_process_filter("gpu:0")))[0].hidden == 2
        assert [
            row.entry.process.pid for row in build_rows(found, ViewState(query=parse_process_filter("12")))
        ] == [12]

    def test_a_ring_of_parents_is_harmless(self) -> None:
        """Two processes that seem to be each other's parent are both shown, once."""
        found = build_entries(TopSnapshot(frame((gpu(0),), (process(10, 11), process(11, 10)))))

        assert sorted(row.entry.process.pid for row in build_rows(found, ViewState())) == [10, 11]

    def test_nesting_has_no_limit(self) -> None:
        """A chain of thousands of processes is shown like any other."""
        chain = tuple(process(pid, pid - 1) for pid in range(10, 3010))

        assert len(build_rows(build_entries(TopSnapshot(frame((), chain))), ViewState())) == 3000

    @pytest.mark.parametrize("descending", [True, False])
    @pytest.mark.parametrize("sort", SORT_ORDERS)
    def test_unknown_comes_last(self, sort: str, descending: bool) -> None:
        """Whatever the order, a process about which nothing is known is at the end (its pid is known)."""
        blank = ProcessReading(ProcessIdentity(pid=99), None, {}, on_gpu=True)
        snapshot = demo()
        found = build_entries(
            replace(snapshot, frame=snapshot.frame._replace(processes=(blank, *snapshot.frame.processes)))
        )
        last = sort_entries(found, sort, descending=descending)[-1]

        assert last.process.pid == 99 or sort == "pid" or getattr(last, sort, None) is None

    def test_an_instance_counts_instead_of_its_gpu(self) -> None:
        """A process that the driver lists on a MIG instance and on its GPU holds its memory once."""
        held = GpuProcess(10, "compute", 100, None)
        (entry,) = build_entries(TopSnapshot(frame((gpu(3, held), gpu(3, held, mig=1)), (process(10),))))

        assert (entry.gpus, entry.gpu_memory) == (("3:1",), 100)

    def test_users(self) -> None:
        """Everybody is named once."""
        assert find_users(build_entries(demo())) == ["ada", "alan", "barbara", "grace", "katherine", "linus"]


class TestProcessView:
    """The process table."""

    def row(self, one: ProcessReading, cells: int = 120) -> str:
        """The line of one process."""
        (entry,) = build_entries(TopSnapshot(frame((), (one,))))
        return text(
            process_panel.process_line(
                ProcessTreeRow(entry), process_panel.columns_for([ProcessTreeRow(entry)], cells), UNICODE
            )
        )

    def test_escape_sequences_are_harmless(self) -> None:
        """A command line cannot move the cursor or speak in markup."""
        shown = self.row(process(7, command="evil\x1b[2J\x1b]0;pwned\x07 [red]x[/red]\nnext\u202e"))

        assert "\x1b" not in shown
        assert "\n" not in shown
        assert "^[[2J" in shown
        assert "[red]x[/red]" in shown

    def test_unknown_is_a_dash(self) -> None:
        """A process of another namespace has its pid and dashes, and says why."""
        shown = self.row(ProcessReading(ProcessIdentity(pid=7), None, {}, on_gpu=True))

        assert shown.split()[:3] == ["7", "-", "-"]
        assert "(not visible)" in shown

    def test_the_heading_points_at_the_order(self) -> None:
        """The column that is sorted by has an arrow in the direction of the order."""
        columns = process_panel.columns_for([], 80)

        assert "CPU▼" in text(process_panel.heading(columns, ViewState(sort="cpu"), (), 80, UNICODE))
        assert "PID^" in text(
            process_panel.heading(columns, ViewState(sort="pid", descending=False), (), 80, ASCII)
        )

    @pytest.mark.parametrize(
        ("labels", "expected"),
        [
            ((), ""),
            (("0",), "0"),
            (("0", "1", "2", "5"), "0-2,5"),
            (("3:0", "3:1"), "3:0,3:1"),
            (("0", "3:1", "4"), "0,3:1,4"),
        ],
    )
    def test_spans(self, labels: tuple[str, ...], expected: str) -> None:
        """Neighbouring GPUs are written as a range."""
        assert process_panel.join_labels(labels) == expected


class TestGpuView:
    """The GPU table."""

    def line(self, snapshot: TopSnapshot, cells: int = 110, glyphs: Glyphs = UNICODE) -> str:
        """The line of the first GPU."""
        look = gpu_panel.make_row_context(
            gpu_panel.columns_for(snapshot.frame, cells), snapshot, GpuHistory(), glyphs
        )
        return text(gpu_panel.gpu_line(snapshot.frame.gpus[0], look))

    def test_a_busy_gpu(self) -> None:
        """One line has what the GPU does, what it takes and what holds it back."""
        shown = self.line(demo())

        for word in (
            "0",
            "H200",
            "ada",
            "66C",
            "693/700W",
            "99%",
            "32.9/140G",
            "92%",
            "52%",
            "34%",
            "1830",
            "power cap",
        ):
            assert word in shown.split() or word in shown

    def test_nothing_known_is_dashes(self) -> None:
        """A GPU that says nothing, without anybody knowing why, shows dashes and never a zero."""
        shown = self.line(TopSnapshot(frame((gpu(0),))))

        assert "0%" not in shown
        assert shown.count("-") >= 6

    def test_silence_is_explained(self) -> None:
        """A GPU that does not answer says so in its own row."""
        health = (Health("nvml", "gpu_lost", "GPU is lost\x1b[2J", 990.0, "gpu 0"),)

        assert "gpu lost: GPU is lost^[[2J" in self.line(TopSnapshot(frame((gpu(0),), health=health)))

    def test_heat_has_a_sign(self) -> None:
        """A temperature at the slowdown threshold is marked by more than a colour."""
        assert "88C!" in self.line(
            TopSnapshot(frame((gpu(0, temperature_celsius=88, temperature_slowdown_celsius=89),)))
        )

    def test_faults_have_a_sign(self) -> None:
        """A fault that holds the clocks down has a sign before its name."""
        assert "▲thermal" in self.line(TopSnapshot(frame((gpu(0, clocks_event_reasons=0x24),))))

    def test_instances_have_their_label(self) -> None:
        """A MIG instance is named after its GPU and its place in it."""
        assert self.line(
            TopSnapshot(frame((gpu(3, mig=1, memory_used_bytes=1 << 30, memory_total_bytes=10 << 30),)))
        ).startswith("3:1")

    def test_without_gpm_there_are_no_empty_columns(self) -> None:
        """A machine whose GPUs cannot say how busy their units are has no columns for it."""
        old = gpu(0, gpu_utilization_ratio=0.5)
        old = old._replace(device=old.device._replace(has_gpm=False))
        keys = {column.key for column, _ in gpu_panel.columns_for(frame((old,)), 200)}

        assert "memory_busy" in keys
        assert not keys & {"sm", "tensor", "dram", "nvlink"}

    def test_no_gpu_says_why(self) -> None:
        """Without a driver the table says that and what to try."""
        health = (Health("nvml", "driver_missing", "no NVIDIA driver", 1.0, hint="install one"),)

        assert "no NVIDIA driver (install one)" in text(
            gpu_panel.no_gpu_lines(frame(health=health), 80, UNICODE)[0]
        )


class TestHostView:
    """The host strip."""

    def test_the_demo(self) -> None:
        """Two lines tell of CPUs, memory, pressure, disk and network."""
        first, second = (text(line) for line in host_lines(demo(), 120, UNICODE))

        for word in ("CPU", "7%", "load", "RAM", "net", "rx", "tx"):
            assert word in first.split()
        for word in ("PSI", "80%▲", "nvme0n1", "100%", "3.7G"):
            assert word in second.split()

    def test_swap_is_shown_when_used(self) -> None:
        """Swap is named only while some of it is in use."""
        used = frame()._replace(host=HostReading({"swap_total_bytes": 16 << 30, "swap_free_bytes": 12 << 30}))

        assert "swap 4.0/16.0G" in text(host_lines(TopSnapshot(used), 120, UNICODE)[0])
        assert "swap" not in text(host_lines(demo(), 120, UNICODE)[0])

    def test_nothing_known(self) -> None:
        """A frame without a host gives dashes."""
        assert text(host_lines(TopSnapshot(frame()), 80, UNICODE)[0]).split()[:2] == ["CPU", "-"]

    def test_a_hot_cpu_is_not_averaged_away(self) -> None:
        """When CPUs are drawn in groups the busiest of each counts."""
        assert group_cores([0.0, 1.0, None, None, 0.2], 3) == [1.0, None, 0.2]


class TestFindings:
    """The findings strip and page."""

    def snapshot(self) -> TopSnapshot:
        """Two findings, a problem and a fact."""
        health = (
            Health("disks", "unreadable", "no /proc/diskstats", 1.0),
            Health("gpm", "not_supported", "old", 1.0),
        )
        advice = (Advice("more workers", "they are busy", "GPU waits less"),)
        findings = (
            Finding("a", "input", "low", 0.5, "a little slow", 1),
            Finding("b", "fault", "critical", 0.9, "broken", None, advice=advice),
        )
        return TopSnapshot(frame(health=health), Rates(0.0), findings)

    def test_the_worst_comes_first(self) -> None:
        """Findings and problems of health are one list by severity; facts about the machine are none."""
        assert [item.text for item in findings_panel.find_problems(self.snapshot())] == [
            "broken",
            "unreadable: no /proc/diskstats",
            "a little slow",
        ]

    def test_one_trouble_of_many_gpus_is_one_entry(self) -> None:
        """A driver that is gone does not fill the strip, and what a finding says is not repeated."""
        health = tuple(Health("nvml", "failed", "broke", 1.0, f"gpu {index}") for index in range(64))
        said = Health("nvml", "gpu_lost", "GPU is lost", 1.0, "gpu 3")
        finding = Finding("gpu_fault", "fault", "critical", 1.0, "GPU 3: GPU is lost", 3)
        found = findings_panel.find_problems(
            TopSnapshot(frame(health=(*health, said)), Rates(0.0), (finding,))
        )

        assert [(item.about, item.text) for item in found] == [
            ("GPU 3", "GPU is lost"),
            ("GPUs 0-63", "failed: broke"),
        ]

    def test_one_line_counts_the_rest(self) -> None:
        """The strip names the worst, in words, and how many more there are."""
        (line,) = findings_panel.panel_lines(findings_panel.find_problems(self.snapshot()), 1, 60, UNICODE)

        assert "CRITICAL" in text(line)
        assert "+2 more" in text(line)
        assert width(line) == 60

    def test_the_page_has_the_advice(self) -> None:
        """The page lists all of them with what to do."""
        page = "\n".join(
            text(line)
            for line in findings_panel.page_lines(findings_panel.find_problems(self.snapshot()), UNICODE)
        )

        assert "more workers" in page
        assert "a little slow" in page

    def lasting(self) -> list[findings_panel.Problem]:
        """A finding that holds for three minutes."""
        now = frame()
        summary = "GPU 1 waits 93 % of the time for data: its two workers never rest"
        finding = Finding("a", "input", "high", 0.9, summary, 1, start=now.time - 185)
        return findings_panel.find_problems(TopSnapshot(now, Rates(0.0), (finding,)))

    @pytest.mark.parametrize("cells", range(40, 121, 8))
    def test_since_when_it_holds_is_said_where_there_is_room(self, cells: int) -> None:
        """In full beside a whole text, in brief beside one that is cut, and never past the edge."""
        (line,) = findings_panel.panel_lines(self.lasting(), 1, cells, UNICODE)

        assert width(line) == cells
        assert ("since " in text(line)) == (cells >= 112)
        assert (" (3:05)" in text(line)) == (cells >= 72)

    def test_the_page_says_since_when(self) -> None:
        """The time, and how long that is."""
        page = [text(line) for line in findings_panel.page_lines(self.lasting(), UNICODE)]

        assert re.fullmatch(r"  since\d\d:\d\d:\d\d \(3:05\)", page[1]) is not None

    def test_what_has_only_begun_has_no_since(self) -> None:
        """Neither has what nobody knows the beginning of."""
        assert [""] * 3 == [item.since for item in findings_panel.find_problems(self.snapshot())]

    def test_all_is_well(self) -> None:
        """Without findings the strip says so."""
        assert "no findings" in text(findings_panel.panel_lines([], 1, 60, UNICODE)[0])


class TestDetails:
    """The page of one process."""

    def test_the_page(self) -> None:
        """Details have the whole command line, the parents and the children."""
        snapshot = trainer_with_workers()
        page = "\n".join(text(line) for line in process_panel.page_lines(snapshot, (10, 900.0), UNICODE))

        for word in ("python3 train.py", "ada", "sleeping", "5.0G memory", "ancestors1", "children2"):
            assert word in page

    def test_a_process_that_ended(self) -> None:
        """Details of a process that is gone say so."""
        assert "has ended" in text(process_panel.page_lines(trainer_with_workers(), (77, None), UNICODE)[0])


class TestHistory:
    """What is kept of the past."""

    def test_it_is_bounded(self) -> None:
        """However long it runs, each GPU keeps a limited number of values."""
        history = GpuHistory()
        one = frame((gpu(0, sm_active_ratio=0.5),))
        for _ in range(MAX_VALUES_PER_GPU + 50):
            history.add(one)

        assert len(history.last("GPU-0-None", 10_000)) == MAX_VALUES_PER_GPU

    def test_a_gpu_that_left_is_forgotten(self) -> None:
        """The trail of a GPU that is no longer there does not stay in memory."""
        history = GpuHistory()
        history.add(frame((gpu(0),)))
        history.add(frame())

        assert history.last("GPU-0-None", 5) == []

    def test_a_pause_stands_still(self) -> None:
        """While paused, what comes in is kept but not shown."""
        stage = SnapshotBuffer()
        stage.take([demo(seconds=1.0)])
        stage.pause(paused=True)
        stage.take([newest := demo(seconds=2.0)])
        uuid = newest.frame.gpus[0].device.uuid

        assert stage.snapshot is not newest
        assert len(stage.history.last(uuid, 9)) == 1
        stage.pause(paused=False)
        assert stage.snapshot is newest
        assert len(stage.history.last(uuid, 9)) == 2


class TestPicture:
    """The whole screen."""

    @pytest.mark.parametrize("glyphs", [UNICODE, ASCII])
    @pytest.mark.parametrize(
        "size", [(40, 10), (60, 20), (80, 24), (100, 30), (120, 40), (200, 50), (300, 80)]
    )
    @pytest.mark.parametrize("gpus", [1, 8, 64])
    def test_every_size_is_filled_exactly(self, gpus: int, size: tuple[int, int], glyphs: Glyphs) -> None:
        """In any terminal the picture has as many lines as that, none of them too long."""
        cells, lines = size
        one = picture(demo(gpus), cells, lines, ViewState(unfolded=True), glyphs)

        assert sum(len(part) for part in one.parts.values()) == lines
        assert max(width(line) for part in one.parts.values() for line in part) <= cells

    def test_plain_terminals_get_plain_text(self) -> None:
        """With the plain signs nothing on the screen needs more than ASCII."""
        assert "\n".join(shown(picture(demo(), 120, 40, glyphs=ASCII))).isascii()

    def test_before_the_first_frame(self) -> None:
        """Until there is a frame the screen says what it waits for."""
        assert any("waiting" in line for line in shown(picture(None, 80, 24)))

    def test_no_gpu_no_process(self) -> None:
        """A machine without GPUs is shown without them."""
        lines = "\n".join(shown(picture(TopSnapshot(frame()), 80, 24)))

        assert "no GPU in this machine" in lines
        assert "no process uses a GPU" in lines

    def test_many_gpus_scroll(self) -> None:
        """The place among 64 GPUs is written where the table has no room for all."""
        state = ViewState(gpu=ListCursor(index=63))
        lines = "\n".join(shown(picture(demo(64), 80, 24, state)))

        assert "/64" in lines
        assert "\n 63 " in lines

    def test_a_small_terminal_keeps_both_tables(self) -> None:
        """With eight GPUs and 24 lines all GPUs and several processes are in view."""
        one = plan_panel_heights(80, 24, gpus=8, processes=7, findings=3)

        assert one.gpus == 8
        assert one.processes >= 7

    def test_a_large_terminal_has_a_chart(self) -> None:
        """Lines that the tables do not need show what the GPU under the cursor did."""
        assert plan_panel_heights(120, 40, gpus=8, processes=7, findings=3).chart > 0
        assert plan_panel_heights(80, 24, gpus=8, processes=7, findings=3).chart == 0

    def test_the_first_line_says_how_it_stands(self) -> None:
        """A paused view, a recording that ended and a failing source are said in words."""
        status = SamplingStatus(1.0, ended=True, failing=True)
        line = text(top_line(demo(), ViewState(paused=True), status, "gpulse", 80, UNICODE))

        for word in ("PAUSED", "end of recording", "NOT SAMPLING"):
            assert word in line

    def test_notices_are_harmless(self) -> None:
        """The text of an error cannot do more than be read."""
        assert text(notice_line("bad\x1b[2J", 40, UNICODE)) == " ▲ bad^[[2J"


def test_pieces_are_plain_tuples() -> None:
    """A line can be compared and kept without copying."""
    assert styled("a", "dim") == (StyledText("a", "dim"),)


def test_a_table_without_room_for_a_row_has_no_range() -> None:
    """A range that ends before it begins says nothing."""
    assert [text(position(*place)) for place in ((1, 0, 7), (8, 8, 64), (0, 8, 8))] == [
        "0/7",
        "9-16/64",
        "",
    ]
