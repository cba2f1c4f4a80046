"""Live view of a cluster: the thread that asks the head, and the application that handles keys and redraws the screen."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from time import time
from typing import ClassVar, Protocol

from textual.binding import Binding, BindingType
from textual.widgets import Input

from gpulse.cluster.client.head_client import HeadClient
from gpulse.cluster.protocol.answers import ClusterOccupancy, Findings
from gpulse.errors import GpulseError
from gpulse.model.gpu_state import GPU_STATES, STATE_TITLES, GpuState
from gpulse.terminal.top import cluster_rows, findings_panel
from gpulse.terminal.top.cluster_cells import state_glyph
from gpulse.terminal.top.cluster_layout import (
    PANEL_NAMES,
    ClusterScreenInput,
    ConnectionStatus,
    DrawnCluster,
    PanelName,
    build_problems,
    draw_cluster,
    finding_page,
)
from gpulse.terminal.top.cluster_rows import ClusterSnapshot, ClusterViewState, parse_cluster_filter
from gpulse.terminal.top.live_view import LiveView, Page, Panel
from gpulse.terminal.top.styled_text import Glyphs, Line, StyledText

_SORT_KEYS = {"U": "user", "G": "gpus", "M": "memory", "A": "utilization", "T": "elapsed", "N": "name"}

STATE_KEYS: dict[str, Callable[[ClusterViewState], ClusterViewState]] = {
    "s": lambda state: state.sorted_next(1),
    "S": lambda state: state.sorted_next(-1),
    "r": ClusterViewState.reversed,
    **{key: partial(ClusterViewState.sorted_by, column=column) for key, column in _SORT_KEYS.items()},
}
"""Changes that need only the state, by key."""

KEYS = (
    ("q, Ctrl-C", "quit"),
    ("?, h", "this help"),
    ("space, p", "pause the display; data is still fetched"),
    ("arrows, PgUp/Dn", "move the cursor; also Home and End"),
    ("Tab", "switch between nodes, jobs and findings"),
    ("Enter", "open a node, the node of a job, or a finding with its advice"),
    ("Esc", "go back; on the first page: clear the filter"),
    ("s, S", "sort by the next or the previous column"),
    (
        "N A M G U T",
        "sort by name, activity, memory, number of GPUs, user or time, if the table has that column",
    ),
    ("r", "reverse the order"),
    ("/", "filter, for example: user:ada node:gpu-0* state:idle train"),
    ("u", "show only the next user's nodes, jobs and findings"),
    ("f", "show all findings with advice"),
    ("+, -", "query the head less often or more often"),
)
"""Every key and what it does, in the order of the help page."""

_STATE_HELP: dict[GpuState, str] = {
    "busy": "the GPU was active within the last 30 seconds",
    "idle": "a process holds the GPU, but has not used it for 30 seconds",
    "free": "nobody uses the GPU",
    "harvested": "only a harvest uses the GPU; it stops as soon as you start a program there",
    "faulty": "the GPU is not in use, and has a fault: see its finding",
    "lost": "the GPU's node no longer reports; the last values are shown",
    "unknown": "the state could not be read",
}
_STOP_TIMEOUT_SECONDS = 2.0
_MIN_RETRY_SECONDS, _MAX_RETRY_SECONDS = 1.0, 10.0
"""Pauses between attempts to reach a head that does not answer."""


class ClusterReader(Protocol):
    """Connection to a head."""

    def read(self) -> ClusterSnapshot:
        """Return the newest state of the cluster.

        Raises:
            GpulseError: The head does not answer, or refuses.
        """

    def close(self) -> None:
        """Close the connection."""


ClusterSource = Callable[[], ClusterReader]
"""Opens a connection; raises GpulseError if that fails."""


class HeadReader:
    """Reads the state of a cluster from its head."""

    def __init__(self, client: HeadClient) -> None:
        self._client = client

    def read(self) -> ClusterSnapshot:
        """Return what the GPUs do now, and the current findings.

        Raises:
            GpulseError: The head does not answer, or refuses.
        """
        occupancy = self._client.call("gpus", ClusterOccupancy)
        return ClusterSnapshot(occupancy, self._client.call("findings", Findings))

    def close(self) -> None:
        """Close the connection."""
        self._client.close()


class ClusterFeed:
    """Asks a head on its own thread, and reconnects by itself."""

    def __init__(
        self,
        connect: ClusterSource,
        *,
        interval_seconds: float,
        clock: Callable[[], float],
        wake: Callable[[], object],
    ) -> None:
        """Prepare the thread without starting it.

        Args:
            connect: Opens a connection to the head.
            interval_seconds: Time from one request to the next.
            clock: Returns the time in epoch seconds.
            wake: Called on the thread whenever something has changed.
        """
        self.interval_seconds = interval_seconds
        self._connect = connect
        self._clock = clock
        self._wake = wake
        self._changed = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gpulse-cluster-top", daemon=True)
        self.newest: ClusterSnapshot | None = None
        """The last answer."""
        self.lost_since: float | None = None
        """When the first of the failed requests was made; None if the last request succeeded."""
        self.problem = ""
        """Why the last request failed; empty if it succeeded."""

    def start(self) -> None:
        """Start to ask."""
        self._thread.start()

    def set_interval(self, seconds: float) -> None:
        """Change the interval at once, not only after the current wait."""
        self.interval_seconds = seconds
        self._changed.set()

    def stop(self) -> bool:
        """Stop the thread; return False when it waits for an answer of the head."""
        self._closing.set()
        self._changed.set()
        if self._thread.is_alive():
            self._thread.join(_STOP_TIMEOUT_SECONDS)
        return not self._thread.is_alive()

    def _run(self) -> None:
        reader: ClusterReader | None = None
        retry = _MIN_RETRY_SECONDS
        while not self._closing.is_set():
            asked = self._clock()
            try:
                reader = reader or self._connect()
                self.newest = reader.read()
                self.lost_since, self.problem, retry = None, "", _MIN_RETRY_SECONDS
            except Exception as error:  # noqa: BLE001  the view must survive whatever an answer causes
                self._note_failure(error, asked)
                reader = self._discard(reader)
            if self._closing.is_set():
                break
            self._wake()
            pause = self.interval_seconds if self.lost_since is None else retry
            retry = retry if self.lost_since is None else min(2 * retry, _MAX_RETRY_SECONDS)
            self._changed.wait(pause)
            self._changed.clear()
        self._discard(reader)

    def _note_failure(self, error: Exception, asked: float) -> None:
        if self.lost_since is None:
            self.lost_since = asked
        self.problem = error.message if isinstance(error, GpulseError) else f"{type(error).__name__}: {error}"

    @staticmethod
    def _discard(reader: ClusterReader | None) -> None:
        if reader is not None:
            reader.close()


def help_page(glyphs: Glyphs) -> list[Line]:
    """Return all keys and the meanings of the glyphs."""
    keys: list[Line] = [(StyledText(key, "key"), StyledText(text)) for key, text in KEYS]
    states: list[Line] = [
        (
            StyledText(f"{state_glyph(state, glyphs).text} {STATE_TITLES[state]}", "head"),
            StyledText(_STATE_HELP[state], "dim"),
        )
        for state in GPU_STATES
    ]
    return [*keys, (), *states]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterTopOptions:
    """Settings of the cluster view."""

    address: str
    """The head, for the top line."""
    interval_seconds: float = 1.0
    """Initial time from one request to the next."""
    glyphs: Glyphs | None = None
    """Characters to draw with; None chooses them for this terminal."""
    clock: Callable[[], float] = time
    """Returns the time in epoch seconds."""


class ClusterTopApp(LiveView[ClusterViewState]):
    """Live view of a cluster."""

    BINDINGS: ClassVar[list[BindingType]] = [
        *(Binding(key, f"change('{key}')") for key in STATE_KEYS),
        Binding("escape,left", "go_back"),
        Binding("enter,right", "open"),
        Binding("tab", "next_tab", priority=True),
    ]

    def __init__(self, connect: ClusterSource, options: ClusterTopOptions) -> None:
        super().__init__(
            ClusterViewState(),
            options.glyphs,
            panels=PANEL_NAMES,
            placeholder="user:NAME node:NAME state:free words",
            changes=STATE_KEYS,
        )
        self._options = options
        self._feed = ClusterFeed(
            connect,
            interval_seconds=options.interval_seconds,
            clock=options.clock,
            wake=lambda: self.post_message(self.Arrived()),
        )
        self._shown: ClusterSnapshot | None = None
        self._drawn = DrawnCluster({})

    @property
    def feed(self) -> ClusterFeed:
        """The thread that asks the head."""
        return self._feed

    def on_live_view_arrived(self) -> None:
        """Show the newest answer, unless the view is paused."""
        if not self._state.paused:
            self._shown = self._feed.newest
        if self._feed.problem:
            self.show_notice(self._feed.problem)
        self.redraw()

    def on_panel_clicked(self, event: Panel.Clicked) -> None:
        """Move the cursor to the clicked line."""
        row = event.line - self._drawn.first_line
        if event.panel.id == "main" and 0 <= row < self._drawn.height:
            cursor = self._state.cursor
            self.action_move(cursor.offset + row - cursor.index)

    def on_panel_scrolled(self, event: Panel.Scrolled) -> None:
        """Move the cursor."""
        self.action_move(event.lines)

    def apply_filter(self, text: str) -> None:
        """Show the rows that a filter matches."""
        self.set_state(self._state.filtered(parse_cluster_filter(text)))

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Keep the filter."""
        self._state = self._state.filtered(parse_cluster_filter(event.value))
        self.show_input(visible=False)
        self.redraw()

    def action_pause(self) -> None:
        """Pause, or continue with the newest answer."""
        self._state = self._state.with_pause()
        if not self._state.paused:
            self._shown = self._feed.newest
        self.redraw()

    def action_user(self) -> None:
        """Show only the next user's rows."""
        if self._shown is not None:
            self.set_state(self._state.next_user(cluster_rows.find_users(self._shown.occupancy.nodes)))

    def action_go_back(self) -> None:
        """Close the input line or the open node; on the first page clear the filter."""
        if self.query_one(Input).display:
            self.show_input(visible=False)
        else:
            self.set_state(self._state.went_back())

    def action_next_tab(self) -> None:
        """Show the next tab."""
        if len(self.screen_stack) == 1:
            self.set_state(self._state.with_next_tab())

    def action_move(self, by: int) -> None:
        """Move the cursor."""
        cursor = self._state.cursor.moved(by, self._drawn.keys, self._drawn.height)
        self.set_state(self._state.with_cursor(cursor))

    def action_page(self, pages: int) -> None:
        """Move by whole pages."""
        self.action_move(pages * max(1, self._drawn.height - 1))

    def action_open(self) -> None:
        """Open a node, the node of a job, or a finding."""
        keys, index = self._drawn.keys, self._state.cursor.index
        if self._shown is None or index >= len(keys):
            return
        match self._state.table:
            case "nodes":
                self.set_state(self._state.with_node(keys[index]))
            case "jobs":
                jobs = {row.key: row for row in cluster_rows.build_jobs(self._shown.occupancy)}
                if keys[index] in jobs:
                    self.set_state(self._state.with_tab("nodes").with_node(jobs[keys[index]].nodes[0]))
            case "findings":
                group = self._drawn.groups[index]
                page = finding_page(group, self._shown.occupancy.time, self._glyphs)
                self.push_screen(Page(group.id, page))
            case "gpus":
                self._open_gpu(keys[index])

    def _open_gpu(self, uuid: str) -> None:
        """Show all findings about a GPU of the open node."""
        if self._shown is None:
            return
        gpus = {gpu.uuid: gpu.label for node in self._shown.occupancy.nodes for gpu in node.gpus}
        place = f"{self._state.node}:{gpus.get(uuid, '')}"
        own = [one for one in self._shown.findings.findings if cluster_rows.finding_place(one) == place]
        problems = build_problems(cluster_rows.group_findings(own), self._shown.occupancy.time)
        self.push_screen(Page(f"findings of {place}", findings_panel.page_lines(problems, self._glyphs)))

    def action_help(self) -> None:
        """Show all keys."""
        self.push_screen(Page("gpulse top: keys", help_page(self._glyphs)))

    def action_findings(self) -> None:
        """Show all findings with advice."""
        if self._shown is not None:
            shown = [one for one in self._shown.findings.findings if cluster_rows.needs_attention(one)]
            problems = build_problems(cluster_rows.group_findings(shown), self._shown.occupancy.time)
            self.push_screen(Page("findings", findings_panel.page_lines(problems, self._glyphs)))

    def redraw(self) -> None:
        """Draw the shown answer of the head."""
        feed = self._feed
        status = ConnectionStatus(self._options.address, feed.interval_seconds, feed.lost_since, feed.problem)
        scene = ClusterScreenInput(
            snapshot=self._shown,
            state=self._state,
            status=status,
            glyphs=self._glyphs,
            cells=self._space.width,
            lines=self._space.height,
            now=0.0 if self._shown is None else self._shown.occupancy.time,
            notice=self._notice,
        )
        self._drawn = draw_cluster(scene)
        self._state = self._drawn.state
        marks: dict[PanelName, int] = {} if self._drawn.mark is None else {"main": self._drawn.mark}
        self.show_panels(self._drawn.parts, marks, "main")


def run_cluster_top(connect: ClusterSource, options: ClusterTopOptions) -> None:
    """Show the live view of a cluster until the user quits.

    Raises:
        GpulseError: The head refuses, or cannot be reached at first.
    """
    ClusterTopApp(connect, options).run_until_quit()
