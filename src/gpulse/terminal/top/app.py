"""The live view as an application: keys and frames in, pictures out."""

from __future__ import annotations

import asyncio
import signal
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from textual.app import App, ComposeResult
from textual.geometry import Size
from textual.message import Message
from textual.widgets import Input

from gpulse.errors import GpulseError
from gpulse.model.process import ProcessIdentity
from gpulse.sources.base import Source
from gpulse.terminal.top import chrome, details_view, findings_view, process_tree
from gpulse.terminal.top.ending import NotEndedError, end_process
from gpulse.terminal.top.feed import Feed, next_interval
from gpulse.terminal.top.glyphs import this_terminal
from gpulse.terminal.top.keys import BINDINGS, CHANGES, help_page
from gpulse.terminal.top.options import Options
from gpulse.terminal.top.palette import THEME
from gpulse.terminal.top.picture import PARTS, Picture, Scene, draw
from gpulse.terminal.top.query import Query, parse
from gpulse.terminal.top.stage import Stage
from gpulse.terminal.top.state import ViewState
from gpulse.terminal.top.widgets import EndDialog, Page, Panel

if TYPE_CHECKING:
    from textual import events
    from textual.binding import BindingType

_NOTICE_SECONDS = 6.0
_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


class TopApp(App[GpulseError]):
    """The live view of one source; the source is not closed by it."""

    ENABLE_COMMAND_PALETTE = False
    AUTO_FOCUS = ""
    CSS_PATH = "top.tcss"
    BINDINGS: ClassVar[list[BindingType]] = [*BINDINGS]

    class Arrived(Message):
        """There is something to fetch from the feed."""

    def __init__(self, source: Source, options: Options) -> None:
        super().__init__()
        self.title = options.title
        self._options = options
        self._glyphs = options.glyphs or this_terminal()
        self._feed = Feed(
            source,
            interval_seconds=options.interval_seconds,
            narrow=options.gpus,
            findings=options.findings,
            wake=lambda: self.post_message(self.Arrived()),
        )
        self._stage = Stage()
        self._state = ViewState()
        self._picture = Picture({}, {})
        self._space = Size(80, 24)
        self._notice = ""
        self._notices = 0

    def compose(self) -> ComposeResult:
        """One panel for each part, and the line in which a filter is typed."""
        for part in PARTS:
            yield Panel(id=part)
        yield Input(placeholder="user:NAME gpu:0,2-3 words", id="filter")

    def on_mount(self) -> None:
        """Start to sample."""
        self.register_theme(THEME)
        self.theme = THEME.name
        self.set_class(self._glyphs.is_ascii, "ascii")
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                asyncio.get_running_loop().add_signal_handler(number, self.exit)
        self._feed.start()

    def on_unmount(self) -> None:
        """Stop to sample."""
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                asyncio.get_running_loop().remove_signal_handler(number)
        self._feed.stop()

    def on_resize(self, event: events.Resize) -> None:
        """Draw for the new size, which the application itself learns of only later."""
        self._space = event.size
        self._redraw()

    def on_top_app_arrived(self) -> None:
        """Take in what the feed has; while paused it only goes into the history."""
        if self._feed.refused is not None:
            self.exit(self._feed.refused)
            return
        self._stage.take(self._feed.fetch())
        if self._feed.failure is not None:
            self._say(f"sampling failed: {self._feed.failure}")
        self._redraw()

    def on_panel_clicked(self, event: Panel.Clicked) -> None:
        """Move the cursor to the line."""
        row = event.line - self._picture.first_line
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

    def on_input_changed(self, event: Input.Changed) -> None:
        """Filter while it is typed."""
        if event.input.display:
            self._become(self._state.filtered(parse(event.value)))

    def on_input_submitted(self) -> None:
        """Keep the filter."""
        self._show_input(visible=False)

    def action_change(self, key: str) -> None:
        """One of the changes that need nothing but the state."""
        self._become(CHANGES[key](self._state))

    def action_pause(self) -> None:
        """Stand still, or go on with the newest frame."""
        self._stage.pause(paused=not self._state.paused)
        self._become(self._state.with_pause())

    def action_fold(self, unfold: bool) -> None:
        """List the workers of the process under the cursor, or of the one that the worker under it works for."""
        row = self._picture.selected
        if row is None:
            return
        entry = row.entry
        own = entry.key if entry.process.on_gpu or entry.holder is None else entry.holder
        state = self._state.folded(own, unfold=unfold)
        self._become(state if own == entry.key else replace(state, process=replace(state.process, key=own)))

    def action_filter(self) -> None:
        """Type a filter."""
        self._show_input(visible=True)

    def action_user(self) -> None:
        """Only the next user."""
        self._become(self._state.next_user(process_tree.users(self._picture.entries)))

    def action_gpu(self) -> None:
        """Only the next GPU."""
        self._become(self._state.next_gpu([gpu.device.label for gpu in self._stage.gpus]))

    def action_clear(self) -> None:
        """No filter."""
        self._show_input(visible=False)
        self._become(self._state.filtered(Query()))

    def action_interval(self, step: int) -> None:
        """Sample more or less often."""
        self._feed.set_interval(next_interval(self._feed.interval_seconds, step))
        self._redraw()

    def action_focus_table(self) -> None:
        """Move the keyboard to the other table; in a dialog to the next button."""
        if len(self.screen_stack) > 1:
            self.screen.focus_next()
        else:
            self._become(self._state.with_other_focus())

    def action_move(self, by: int) -> None:
        """Move the cursor of the table that has the keyboard."""
        layout = self._picture.plan
        if layout is None:
            return
        if self._state.focus == "gpus":
            keys = [gpu.device.uuid for gpu in self._stage.gpus]
            self._become(replace(self._state, gpu=self._state.gpu.moved(by, keys, layout.gpus)))
        else:
            cursor = self._state.process.moved(by, self._picture.process_keys, layout.processes)
            self._become(replace(self._state, process=cursor))

    def action_page(self, pages: int) -> None:
        """Move by what is in view."""
        if self._picture.plan is not None:
            height = self._picture.plan.gpus if self._state.focus == "gpus" else self._picture.plan.processes
            self.action_move(pages * max(1, height - 1))

    def action_open(self) -> None:
        """Details of a process, or only the processes of a GPU."""
        snapshot, gpus = self._stage.snapshot, self._stage.gpus
        if self._state.focus == "gpus" and gpus:
            self._become(self._state.only_gpu(gpus[self._state.gpu.index].device.label))
        elif snapshot is not None and (row := self._picture.selected) is not None:
            page = details_view.page(snapshot, row.entry.key, self._glyphs)
            self.push_screen(Page(f"process {row.entry.process.pid}", page))

    def action_help(self) -> None:
        """All keys."""
        self.push_screen(Page("gpulse top: keys", help_page()))

    def action_findings(self) -> None:
        """All findings."""
        if (snapshot := self._stage.snapshot) is not None:
            self.push_screen(
                Page("findings", findings_view.page(findings_view.items(snapshot), self._glyphs))
            )

    def action_end(self) -> None:
        """Ask whether the process under the cursor shall be ended, where that is allowed at all."""
        row = self._picture.selected
        if self._options.readonly:
            self._say("read-only: processes cannot be ended from here")
        elif not self._options.killable:
            self._say("these processes do not run here: they cannot be ended")
        elif row is not None:
            identity = row.entry.process.identity
            self.push_screen(
                EndDialog(details_view.question(identity, self._glyphs)),
                lambda answer: self._end(identity, answer),
            )

    def _end(self, identity: ProcessIdentity, answer: signal.Signals | None) -> None:
        if answer is None:
            return
        try:
            end_process(identity, answer)
        except NotEndedError as error:
            self._say(error.message)
        else:
            self._say(f"{answer.name} sent to {identity.pid}")

    def _become(self, state: ViewState) -> None:
        self._state = state
        self._redraw()

    def _say(self, text: str) -> None:
        """Show a message for a while; one that is repeated at every frame needs no second timer."""
        if text == self._notice:
            return
        self._notice = text
        self._notices += 1
        number = self._notices
        self.set_timer(_NOTICE_SECONDS, lambda: self._unsay(number))
        self._redraw()

    def _unsay(self, number: int) -> None:
        if number == self._notices:
            self._notice = ""
            self._redraw()

    def _show_input(self, *, visible: bool) -> None:
        box = self.query_one(Input)
        box.display = visible
        self.query_one("#keys").display = not visible
        if visible:
            box.value = str(self._state.query)
            box.focus()
        else:
            self.screen.set_focus(None)

    def _redraw(self) -> None:
        status = chrome.Status(self._feed.interval_seconds, self._feed.ended, self._feed.failure is not None)
        scene = Scene(
            snapshot=self._stage.snapshot,
            history=self._stage.history,
            state=self._state,
            status=status,
            title=self.title,
            glyphs=self._glyphs,
            cells=self._space.width,
            lines=self._space.height,
            notice=self._notice,
        )
        self._picture = draw(scene)
        self._state = self._picture.state
        for base in self.screen_stack[:1]:  # none, or without its panels, while everything is taken down
            panels = {panel.id: panel for panel in base.query(Panel)}
            for part in PARTS:
                if part in panels:
                    lines, mark = self._picture.parts.get(part, []), self._picture.marked.get(part)
                    panels[part].show(lines, mark=mark, active=part == self._state.focus)
