"""Live view of one machine: the thread that samples, and the application that handles keys and redraws the screen."""

from __future__ import annotations

import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import ClassVar

from textual.binding import Binding, BindingType

from gpulse.errors import CollectionError, GpulseError
from gpulse.model.counter_rates import compute_rates
from gpulse.model.finding import Finding
from gpulse.model.frame import Frame, GpuReading
from gpulse.model.process import ProcessIdentity
from gpulse.sampling.sampler import Sampler
from gpulse.sources.frame_source import EndOfRecordingError, Source
from gpulse.sources.procfs import parse_pid_stat, parse_stat
from gpulse.terminal.top import findings_panel, process_panel, screen_layout
from gpulse.terminal.top.gpu_panel import GpuHistory
from gpulse.terminal.top.live_view import EndDialog, LiveView, Page, Panel
from gpulse.terminal.top.screen_layout import PANEL_NAMES, DrawnScreen, ScreenInput, draw_screen
from gpulse.terminal.top.styled_text import Line, StyledText
from gpulse.terminal.top.view_state import (
    ProcessFilter,
    TopOptions,
    TopSnapshot,
    ViewState,
    parse_process_filter,
)

_START_TIME_TOLERANCE_SECONDS = 1.5
"""The kernel rounds the boot time to seconds, so a start time can shift by one when the clock is adjusted."""
_MAX_WAITING_SNAPSHOTS = 120
_STOP_TIMEOUT_SECONDS = 2.0


class SnapshotFeed:
    """Takes snapshots of a source on its own thread, until the view fetches them.

    The caller closes the source: stopping the feed ends the thread but does not close the source.
    """

    def __init__(
        self,
        source: Source,
        *,
        interval_seconds: float,
        narrow: Callable[[Frame], Frame] | None,
        findings: Callable[[Frame], Sequence[Finding]],
        wake: Callable[[], object],
    ) -> None:
        """Prepare the thread without starting it.

        Args:
            source: Where frames come from.
            interval_seconds: Time from one frame to the next.
            narrow: Removes from each frame what is not shown.
            findings: Returns the findings so far; called with every frame, in order, on the thread.
            wake: Called on the thread whenever there is something to fetch.
        """
        self.interval_seconds = interval_seconds
        self._source = source
        self._narrow = narrow
        self._findings = findings
        self._wake = wake
        self._waiting: deque[TopSnapshot] = deque(maxlen=_MAX_WAITING_SNAPSHOTS)
        self._closing = threading.Event()
        self._sampler = Sampler(self, interval_seconds=interval_seconds)
        self._thread = threading.Thread(target=self._run, name="gpulse-top", daemon=True)
        self._last: Frame | None = None
        self.ended = False
        """True after the last frame of a recording."""
        self.refused: GpulseError | None = None
        """Error if the selected GPUs do not exist."""
        self.failure: str | None = None
        """Why the last attempt to sample failed; None when it succeeded."""

    def start(self) -> None:
        """Start sampling."""
        self._thread.start()

    def fetch(self) -> list[TopSnapshot]:
        """Return the snapshots since the last call, oldest first."""
        snapshots = []
        while self._waiting:
            snapshots.append(self._waiting.popleft())
        return snapshots

    def set_interval(self, seconds: float) -> None:
        """Change the interval at once, not only after the current wait."""
        self.interval_seconds = seconds
        self._sampler.stop()

    def stop(self) -> bool:
        """Stop the thread; return False when it hangs in a call of the source."""
        self._closing.set()
        self._sampler.stop()
        if self._thread.is_alive():
            self._thread.join(_STOP_TIMEOUT_SECONDS)
        return not self._thread.is_alive()

    def sample(self, now: float) -> Frame:
        """Return one frame of the source, for the sampler.

        An unexpected exception becomes an error that the sampler raises. An empty frame in its place would blank the
        tables; this way the last good frame stays visible.
        """
        try:
            return self._source.sample(now)
        except EndOfRecordingError:
            self.ended = True
            raise
        except GpulseError:
            raise
        except Exception as error:
            raise CollectionError(f"{type(error).__name__}: {error}") from error

    def close(self) -> None:
        """Do nothing: the caller closes the source."""

    def _run(self) -> None:
        while not self._closing.is_set() and not self.ended and self.refused is None:
            self._sampler = sampler = Sampler(self, interval_seconds=self.interval_seconds)
            # The previous sampler may have been stopped meanwhile, to change the interval.
            if self._closing.is_set() or sampler.interval_seconds != self.interval_seconds:
                continue
            try:
                for frame in sampler:
                    if self._closing.is_set():
                        return
                    self._take(frame)
            except Exception as error:  # noqa: BLE001  the view must survive whatever a source raises
                self.failure = (
                    error.message if isinstance(error, GpulseError) else f"{type(error).__name__}: {error}"
                )
                if self.refused is None:
                    self._notify()
                    self._closing.wait(self.interval_seconds)
        self._notify()

    def _take(self, frame: Frame) -> None:
        if self._narrow is not None:
            try:
                frame = self._narrow(frame)
            except GpulseError as error:
                self.refused = error
                raise
        last = self._last if self._last is not None else frame
        self._waiting.append(TopSnapshot(frame, compute_rates(last, frame), tuple(self._findings(frame))))
        self._last = frame
        self.failure = None
        self._notify()

    def _notify(self) -> None:
        # After a call that hung for too long, the view may be closed already.
        if not self._closing.is_set():
            self._wake()


class SignalError(GpulseError):
    """A process could not be sent its signal."""


def signal_process(identity: ProcessIdentity, signal_number: signal.Signals) -> None:
    """Send a signal to a process, if its PID still belongs to the process that was shown.

    The descriptor is opened before the start time is compared: from then on it refers to the same process, even if
    the PID is reused.

    Raises:
        SignalError: The process has ended, its PID belongs to another process, or this user lacks permission.
    """
    if identity.start_time is None:
        raise SignalError(f"cannot signal process {identity.pid} safely: its start time is unknown")
    try:
        descriptor = os.pidfd_open(identity.pid)
    except OSError as error:
        raise SignalError(_explain_error(identity.pid, error)) from error
    try:
        started = _read_start_time(identity.pid)
        if started is None or abs(started - identity.start_time) > _START_TIME_TOLERANCE_SECONDS:
            raise SignalError(f"process {identity.pid} has ended; its PID now belongs to another process")
        signal.pidfd_send_signal(descriptor, signal_number)
    except OSError as error:
        raise SignalError(_explain_error(identity.pid, error)) from error
    finally:
        os.close(descriptor)


def _read_start_time(pid: int) -> float | None:
    stat = parse_pid_stat(Path(f"/proc/{pid}/stat").read_bytes())
    boot = parse_stat(Path("/proc/stat").read_bytes()).boot_time
    return None if stat is None or boot is None else boot + stat.start_ticks / os.sysconf("SC_CLK_TCK")


def _explain_error(pid: int, error: OSError) -> str:
    if isinstance(error, ProcessLookupError | FileNotFoundError):
        return f"process {pid} has already ended"
    if isinstance(error, PermissionError):
        return f"no permission to end process {pid}: it belongs to another user"
    return f"cannot signal process {pid}: {error.strerror or error}"


class SnapshotBuffer:
    """Collects snapshots, and keeps the shown one while the view is paused."""

    def __init__(self) -> None:
        self._newest: TopSnapshot | None = None
        self._running = GpuHistory()
        self.snapshot: TopSnapshot | None = None
        """The one that is shown."""
        self.history = self._running
        """The history up to that snapshot."""

    @property
    def gpus(self) -> Sequence[GpuReading]:
        """The GPUs that are shown."""
        return () if self.snapshot is None else self.snapshot.frame.gpus

    def take(self, snapshots: Iterable[TopSnapshot]) -> None:
        """Add snapshots in order; only the last one is shown."""
        is_live = self.history is self._running
        for snapshot in snapshots:
            self._newest = snapshot
            self._running.add(snapshot.frame)
        if is_live:
            self.snapshot = self._newest

    def pause(self, *, paused: bool) -> None:
        """Freeze what is shown, or continue with the newest snapshot."""
        if paused:
            self.history = self._running.copy()
        else:
            self.snapshot, self.history = self._newest, self._running


_SORT_KEYS = {
    "P": "pid",
    "U": "user",
    "G": "gpu",
    "M": "gpu_memory",
    "A": "sm",
    "C": "cpu",
    "R": "ram",
    "T": "elapsed",
}

STATE_KEYS: dict[str, Callable[[ViewState], ViewState]] = {
    "s": lambda state: state.sorted_next(1),
    "S": lambda state: state.sorted_next(-1),
    "r": ViewState.reversed,
    "t": ViewState.with_tree,
    "e": ViewState.folded_all,
    **{key: partial(ViewState.sorted_by, sort=column) for key, column in _SORT_KEYS.items()},
}
"""Changes that need only the state, by key."""

KEYS = (
    ("q, Ctrl-C", "quit"),
    ("?, h", "this help"),
    ("space, p", "pause the display; sampling continues"),
    ("arrows, PgUp/Dn", "move the cursor; also Home and End"),
    ("Tab", "switch between GPUs and processes"),
    ("Enter", "show details of a process; on a GPU: show only its processes"),
    ("s, S", "sort by the next or the previous column"),
    ("P U G M A C R T", "sort by PID, user, GPU, GPU memory, SM activity, CPU, RAM, time"),
    ("r", "reverse the order"),
    ("t", "switch between a process tree and a flat list"),
    ("right, left", "show or hide the workers of a process"),
    ("e", "show or hide the workers of all processes"),
    ("/", "filter, for example: user:ada gpu:0,2-3 train"),
    ("u", "show only the next user's processes"),
    ("g", "show only the next GPU's processes"),
    ("Esc", "clear the filter"),
    ("f", "show all findings with advice"),
    ("+, -", "sample less often or more often"),
    ("k", "end the selected process, after confirmation"),
)
"""Every key and what it does, in the order of the help page."""

_LEGEND = (
    ("UTIL", "percentage of time in which at least one kernel, however small, ran on the GPU"),
    ("SM, TC, DRAM", "how busy the multiprocessors, the tensor cores and the memory interface are"),
    ("MBUS", "percentage of time in which GPU memory was read or written"),
    ("HELD BY", "what limits the clocks"),
    (
        "PSI",
        "percentage of time in which at least one task waited for CPU, I/O or memory (pressure stall information)",
    ),
    ("-", "unknown"),
)


def help_page() -> list[Line]:
    """Return all keys and the meanings of the columns."""
    keys: list[Line] = [(StyledText(key, "key"), StyledText(text)) for key, text in KEYS]
    legend: list[Line] = [(StyledText(name, "head"), StyledText(text, "dim")) for name, text in _LEGEND]
    return [*keys, (), *legend]


class TopApp(LiveView[ViewState]):
    """Live view of one source, which it does not close."""

    BINDINGS: ClassVar[list[BindingType]] = [
        *(Binding(key, f"change('{key}')") for key in STATE_KEYS),
        Binding("right", "fold(True)"),
        Binding("left", "fold(False)"),
        Binding("g", "gpu"),
        Binding("escape", "clear"),
        Binding("k", "end"),
        Binding("enter", "open"),
        Binding("tab", "focus_table", priority=True),
    ]

    def __init__(self, source: Source, options: TopOptions) -> None:
        super().__init__(
            ViewState(),
            options.glyphs,
            panels=PANEL_NAMES,
            placeholder="user:NAME gpu:0,2-3 words",
            changes=STATE_KEYS,
        )
        self.title = options.title
        self._options = options
        self._feed = SnapshotFeed(
            source,
            interval_seconds=options.interval_seconds,
            narrow=options.gpus,
            findings=options.findings,
            wake=lambda: self.post_message(self.Arrived()),
        )
        self._buffer = SnapshotBuffer()
        self._drawn = DrawnScreen({}, {})

    @property
    def feed(self) -> SnapshotFeed:
        """The thread that samples."""
        return self._feed

    def on_live_view_arrived(self) -> None:
        """Fetch snapshots from the feed; while paused they only go into the history."""
        if self._feed.refused is not None:
            self.exit(self._feed.refused)
            return
        self._buffer.take(self._feed.fetch())
        if self._feed.failure is not None:
            self.show_notice(f"sampling failed: {self._feed.failure}")
        self.redraw()

    def on_panel_clicked(self, event: Panel.Clicked) -> None:
        """Move the cursor to the clicked line."""
        row = event.line - self._drawn.first_line
        if row >= 0 and self._focus_on(event.panel):
            cursor = self._state.gpu if self._state.focus == "gpus" else self._state.process
            self.action_move(cursor.offset + row - cursor.index)

    def on_panel_scrolled(self, event: Panel.Scrolled) -> None:
        """Move the cursor of the table under the mouse."""
        if self._focus_on(event.panel):
            self.action_move(event.lines)

    def _focus_on(self, panel: Panel) -> bool:
        if panel.id == "gpus":
            self._state = replace(self._state, focus="gpus")
        elif panel.id == "processes":
            self._state = replace(self._state, focus="processes")
        return panel.id == self._state.focus

    def apply_filter(self, text: str) -> None:
        """Show the processes that a filter matches."""
        self.set_state(self._state.filtered(parse_process_filter(text)))

    def on_input_submitted(self) -> None:
        """Keep the filter."""
        self.show_input(visible=False)

    def action_pause(self) -> None:
        """Pause, or continue with the newest snapshot."""
        self._buffer.pause(paused=not self._state.paused)
        self.set_state(self._state.with_pause())

    def action_fold(self, unfold: bool) -> None:
        """Show or hide the workers of the selected process, or of the process that the selected worker belongs to."""
        row = self._drawn.selected
        if row is None:
            return
        entry = row.entry
        own = entry.key if entry.process.on_gpu or entry.holder is None else entry.holder
        state = self._state.folded(own, unfold=unfold)
        self.set_state(state if own == entry.key else replace(state, process=replace(state.process, key=own)))

    def action_user(self) -> None:
        """Show only the next user's processes."""
        self.set_state(self._state.next_user(process_panel.find_users(self._drawn.entries)))

    def action_gpu(self) -> None:
        """Show only the next GPU's processes."""
        self.set_state(self._state.next_gpu([gpu.device.label for gpu in self._buffer.gpus]))

    def action_clear(self) -> None:
        """Clear the filter."""
        self.show_input(visible=False)
        self.set_state(self._state.filtered(ProcessFilter()))

    def action_focus_table(self) -> None:
        """Move the focus to the other table; in a dialog to the next button."""
        if len(self.screen_stack) > 1:
            self.screen.focus_next()
        else:
            self.set_state(self._state.with_other_focus())

    def action_move(self, by: int) -> None:
        """Move the cursor of the table that has the focus."""
        layout = self._drawn.plan
        if layout is None:
            return
        if self._state.focus == "gpus":
            keys = [gpu.device.uuid for gpu in self._buffer.gpus]
            self.set_state(replace(self._state, gpu=self._state.gpu.moved(by, keys, layout.gpus)))
        else:
            cursor = self._state.process.moved(by, self._drawn.process_keys, layout.processes)
            self.set_state(replace(self._state, process=cursor))

    def action_page(self, pages: int) -> None:
        """Move by whole pages."""
        if self._drawn.plan is not None:
            height = self._drawn.plan.gpus if self._state.focus == "gpus" else self._drawn.plan.processes
            self.action_move(pages * max(1, height - 1))

    def action_open(self) -> None:
        """Show the details of a process, or only the processes of a GPU."""
        snapshot, gpus = self._buffer.snapshot, self._buffer.gpus
        if self._state.focus == "gpus" and gpus:
            self.set_state(self._state.only_gpu(gpus[self._state.gpu.index].device.label))
        elif snapshot is not None and (row := self._drawn.selected) is not None:
            page = process_panel.page_lines(snapshot, row.entry.key, self._glyphs)
            self.push_screen(Page(f"process {row.entry.process.pid}", page))

    def action_help(self) -> None:
        """Show all keys."""
        self.push_screen(Page("gpulse top: keys", help_page()))

    def action_findings(self) -> None:
        """Show all findings."""
        if (snapshot := self._buffer.snapshot) is not None:
            self.push_screen(
                Page(
                    "findings",
                    findings_panel.page_lines(findings_panel.find_problems(snapshot), self._glyphs),
                )
            )

    def action_end(self) -> None:
        """Ask whether to end the selected process, where that is allowed."""
        row = self._drawn.selected
        if self._options.readonly:
            self.show_notice("cannot end processes in read-only mode")
        elif not self._options.killable:
            self.show_notice("cannot end these processes: they are not running on this machine")
        elif row is not None:
            identity = row.entry.process.identity
            self.push_screen(
                EndDialog(process_panel.question_lines(identity, self._glyphs)),
                lambda answer: self._end(identity, answer),
            )

    def _end(self, identity: ProcessIdentity, answer: signal.Signals | None) -> None:
        if answer is None:
            return
        try:
            signal_process(identity, answer)
        except SignalError as error:
            self.show_notice(error.message)
        else:
            self.show_notice(f"sent {answer.name} to process {identity.pid}")

    def redraw(self) -> None:
        """Draw the shown snapshot."""
        status = screen_layout.SamplingStatus(
            self._feed.interval_seconds, self._feed.ended, self._feed.failure is not None
        )
        scene = ScreenInput(
            snapshot=self._buffer.snapshot,
            history=self._buffer.history,
            state=self._state,
            status=status,
            title=self.title,
            glyphs=self._glyphs,
            cells=self._space.width,
            lines=self._space.height,
            notice=self._notice,
        )
        self._drawn = draw_screen(scene)
        self._state = self._drawn.state
        self.show_panels(self._drawn.parts, self._drawn.marked, self._state.focus)
