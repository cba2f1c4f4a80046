"""What the live views of a machine and of a cluster share: the application, a panel that shows lines, and the dialogs."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Generic, Protocol, TypeVar

from rich.segment import Segment
from rich.style import Style
from rich.table import Table
from rich.text import Text
from textual import events
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.geometry import Size
from textual.message import Message
from textual.screen import ModalScreen
from textual.strip import Strip
from textual.theme import Theme
from textual.widget import Widget
from textual.widgets import Button, Input, Static

from gpulse.errors import GpulseError
from gpulse.terminal.top.styled_text import Glyphs, Line, Tone, terminal_glyphs

THEME = Theme(
    name="gpulse",
    primary="#5fb3f6",
    secondary="#7c8cff",
    warning="#f0b352",
    error="#f2637e",
    success="#59d38c",
    accent="#5fd7c7",
    foreground="#d5dbe6",
    background="#0e1116",
    surface="#161b22",
    panel="#1c232d",
    dark=True,
)

COLOR_STYLES: dict[Tone, Style] = {
    "plain": Style(),
    "dim": Style(color="#79869a"),
    "strong": Style(color="#ffffff", bold=True),
    "head": Style(color="#7f93b2", bold=True),
    "bar": Style(color="#9fb3d1", bgcolor="#1c2633", bold=True),
    "bar_accent": Style(color="#5fd7c7", bgcolor="#1c2633", bold=True),
    "border": Style(color="#34404f"),
    "title": Style(color="#5fd7c7", bold=True),
    "accent": Style(color="#5fd7c7"),
    "key": Style(color="#f0b352", bold=True),
    "good": Style(color="#59d38c"),
    "warn": Style(color="#f0b352"),
    "bad": Style(color="#f2637e", bold=True),
    "memory": Style(color="#8f9bff"),
    "power": Style(color="#d98f5c"),
    "level0": Style(color="#566274"),
    "level1": Style(color="#4a90d9"),
    "level2": Style(color="#3fb6c4"),
    "level3": Style(color="#4ccb8b"),
    "level4": Style(color="#8be25c"),
    "alert": Style(color="#0e1116", bgcolor="#f0b352", bold=True),
}
"""The level tones say how much, not how good: a busy GPU is not a problem."""

_BOLD = Style(bold=True)
_DIM = Style(dim=True)
_REVERSE = Style(bold=True, reverse=True)
_UNDERLINED = Style(bold=True, underline=True)
PLAIN_STYLES: dict[Tone, Style] = dict.fromkeys(COLOR_STYLES, Style()) | {
    "dim": _DIM,
    "border": _DIM,
    "strong": _BOLD,
    "head": _BOLD,
    "bar": _UNDERLINED,
    "bar_accent": _UNDERLINED,
    "title": _BOLD,
    "key": _BOLD,
    "bad": _BOLD,
    "warn": _BOLD,
    "alert": _REVERSE,
}
"""Styles when the environment variable NO_COLOR is set."""

_INTERVAL_CHOICES_SECONDS = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
_NOTICE_SECONDS = 6.0
_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
CURSOR = Style(bgcolor="#243447")
UNFOCUSED_CURSOR = Style(bgcolor="#171e27")
PLAIN_CURSOR = Style(reverse=True)


def styles_for(*, colored: bool) -> dict[Tone, Style]:
    """Return the style of each tone."""
    return COLOR_STYLES if colored else PLAIN_STYLES


def make_strip(line: Line, cells: int, styles: dict[Tone, Style], base: Style) -> Strip:
    """Return a line for the screen in exactly this many cells."""
    segments = [Segment(text, base + styles[tone]) for text, tone in line if text]
    return Strip(segments).adjust_cell_length(cells, base)


class Panel(Widget):
    """Lines of text, of which one may be marked."""

    class Clicked(Message):
        """The user clicked on a line."""

        def __init__(self, panel: Panel, line: int) -> None:
            super().__init__()
            self.panel = panel
            self.line = line

    class Scrolled(Message):
        """The user turned the mouse wheel."""

        def __init__(self, panel: Panel, lines: int) -> None:
            super().__init__()
            self.panel = panel
            self.lines = lines

    def __init__(self, id: str) -> None:  # noqa: A002  Textual's name
        super().__init__(id=id)
        self._lines: Sequence[Line] = ()
        self._mark: int | None = None
        self._active = False

    def show(self, lines: Sequence[Line], *, mark: int | None, active: bool) -> None:
        """Show these lines, one of them marked as the cursor."""
        if self._lines == lines and (self._mark, self._active) == (mark, active):
            return
        if len(lines) != len(self._lines):
            self.styles.height = len(lines)
        self._lines, self._mark, self._active = lines, mark, active
        self.refresh()

    @property
    def text(self) -> str:
        """The shown lines without styles."""
        return "\n".join("".join(piece.text for piece in line).rstrip() for line in self._lines)

    def render_line(self, y: int) -> Strip:
        """Return one line for the screen."""
        base = self.rich_style
        if y >= len(self._lines):
            return Strip.blank(self.size.width, base)
        base += self._background(y)
        return make_strip(self._lines[y], self.size.width, styles_for(colored=not self.app.no_color), base)

    def on_click(self, event: events.Click) -> None:
        """Post the event to the application."""
        self.post_message(self.Clicked(self, event.y))

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        """Post the event to the application."""
        event.stop()
        self.post_message(self.Scrolled(self, 1))

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        """Post the event to the application."""
        event.stop()
        self.post_message(self.Scrolled(self, -1))

    def _background(self, y: int) -> Style:
        if y != self._mark:
            return Style()
        if self.app.no_color:
            return PLAIN_CURSOR if self._active else Style()
        return CURSOR if self._active else UNFOCUSED_CURSOR


class Page(ModalScreen[None]):
    """Page of text over the view; most keys close it."""

    BINDINGS: ClassVar[list[BindingType]] = [
        ("escape,q,enter,question_mark,h,f,space", "dismiss", "close"),
        ("down,j", "scroll(1)", "down"),
        ("up,k", "scroll(-1)", "up"),
        ("pagedown", "scroll(10)", "down"),
        ("pageup", "scroll(-10)", "up"),
    ]

    def __init__(self, title: str, lines: Sequence[Line]) -> None:
        super().__init__()
        self._title = title
        self._page = lines

    def compose(self) -> ComposeResult:
        """Yield a box with the text."""
        with VerticalScroll(classes="dialog") as box:
            box.border_title = Text(self._title)
            box.border_subtitle = Text("Esc: close")
            styles = styles_for(colored=not self.app.no_color)
            yield Static(_table(self._page, styles), id="page")

    def action_scroll(self, lines: int) -> None:
        """Scroll the text."""
        self.query_one(VerticalScroll).scroll_relative(y=lines, animate=False)


class EndDialog(ModalScreen[signal.Signals | None]):
    """Asks before a process is ended; pressing only Enter cancels."""

    BINDINGS: ClassVar[list[BindingType]] = [
        ("escape,q,n", "cancel", "cancel"),
        ("right", "app.focus_next", "next"),
        ("left", "app.focus_previous", "previous"),
    ]

    def __init__(self, question: Sequence[Line]) -> None:
        super().__init__()
        self._question = question

    def compose(self) -> ComposeResult:
        """Yield the question and three buttons."""
        with Vertical(classes="dialog question") as box:
            box.border_title = Text("End this process?")
            styles = styles_for(colored=not self.app.no_color)
            yield Static(_table(self._question, styles), id="question")
            with Horizontal():
                yield Button("Cancel", id="cancel")
                yield Button("SIGTERM: ask it to exit", id="term", variant="warning")
                yield Button("SIGKILL: end it now", id="kill", variant="error")

    def on_mount(self) -> None:
        """Focus the harmless button first."""
        self.query_one("#cancel").focus()

    def on_button_pressed(self, event: Button.Pressed) -> None:
        """Close the dialog with the chosen signal."""
        self.dismiss({"term": signal.SIGTERM, "kill": signal.SIGKILL}.get(event.button.id or ""))

    def action_cancel(self) -> None:
        """Close the dialog without a signal."""
        self.dismiss(None)


def _table(lines: Sequence[Line], styles: dict[Tone, Style]) -> Table:
    """Return each line in two columns, its label and the rest, so that long text wraps next to its label."""
    table = Table.grid(padding=(0, 1))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for line in lines:
        label, rest = line[:1], line[1:]
        table.add_row(
            *(Text.assemble(*((text, styles[tone]) for text, tone in part)) for part in (label, rest))
        )
    return table


class Feed(Protocol):
    """Thread that new data comes from."""

    interval_seconds: float

    def start(self) -> None:
        """Start the thread."""

    def set_interval(self, seconds: float) -> None:
        """Change the interval at once."""

    def stop(self) -> bool:
        """Stop the thread; return False when it hangs."""


class FilteredState(Protocol):
    """State of a live view, which includes a filter."""

    @property
    def query(self) -> object:
        """The filter, whose text is what the user typed."""


State = TypeVar("State", bound=FilteredState)
PanelName = TypeVar("PanelName", bound=str)


def next_interval(seconds: float, step: int) -> float:
    """Return the next longer interval, or the next shorter one for a negative step; at either end the same."""
    longer = [choice for choice in _INTERVAL_CHOICES_SECONDS if choice > seconds]
    shorter = [choice for choice in _INTERVAL_CHOICES_SECONDS if choice < seconds]
    return next(iter(longer if step > 0 else reversed(shorter)), seconds)


class LiveView(App[GpulseError], Generic[State]):
    """Application that draws a state and the newest data into panels, with a filter and notices."""

    ENABLE_COMMAND_PALETTE = False
    AUTO_FOCUS = ""
    CSS_PATH = "top.tcss"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+c", "quit", priority=True),
        Binding("q", "quit"),
        Binding("question_mark,h", "help"),
        Binding("space,p", "pause"),
        Binding("slash", "filter"),
        Binding("u", "user"),
        Binding("plus,equals_sign", "interval(1)"),
        Binding("minus", "interval(-1)"),
        Binding("f", "findings"),
        Binding("down,j", "move(1)"),
        Binding("up", "move(-1)"),
        Binding("pagedown", "page(1)"),
        Binding("pageup", "page(-1)"),
        Binding("home", "move(-100000)"),
        Binding("end", "move(100000)"),
    ]

    class Arrived(Message):
        """The feed has something new."""

    def __init__(
        self,
        state: State,
        glyphs: Glyphs | None,
        *,
        panels: Sequence[str],
        placeholder: str,
        changes: Mapping[str, Callable[[State], State]],
    ) -> None:
        """Create the application; the subclass creates its feed.

        Args:
            state: The first state.
            glyphs: Characters to draw with; None chooses them for this terminal.
            panels: Names of the panels, from top to bottom.
            placeholder: Example of a filter.
            changes: Changes that need only the state, by key.
        """
        super().__init__()
        self._state = state
        self._glyphs = glyphs or terminal_glyphs()
        self._panels = panels
        self._placeholder = placeholder
        self._changes = changes
        self._space = Size(80, 24)
        self._notice = ""
        self._notices = 0

    @property
    def feed(self) -> Feed:
        """The thread that new data comes from."""
        raise NotImplementedError

    def redraw(self) -> None:
        """Draw the state and the newest data."""
        raise NotImplementedError

    def apply_filter(self, text: str) -> None:
        """Show what a filter matches."""
        raise NotImplementedError

    def run_until_quit(self) -> None:
        """Show the view until the user quits.

        Raises:
            GpulseError: There is nothing to show.
        """
        refused = self.run()
        if refused is not None:
            raise refused

    def compose(self) -> ComposeResult:
        """Yield a panel for each part of the screen, and the input line of the filter."""
        for part in self._panels:
            yield Panel(id=part)
        yield Input(placeholder=self._placeholder, id="filter")

    def on_mount(self) -> None:
        """Start the feed."""
        self.register_theme(THEME)
        self.theme = THEME.name
        self.set_class(self._glyphs.is_ascii, "ascii")
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                asyncio.get_running_loop().add_signal_handler(number, self.exit)
        self.feed.start()

    def on_unmount(self) -> None:
        """Stop the feed."""
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                asyncio.get_running_loop().remove_signal_handler(number)
        self.feed.stop()

    def on_resize(self, event: events.Resize) -> None:
        """Redraw for the new size; `self.size` changes only after this event."""
        self._space = event.size
        self.redraw()

    def on_input_changed(self, event: Input.Changed) -> None:
        """Apply the filter while it is being typed."""
        if event.input.display:
            self.apply_filter(event.value)

    def action_change(self, key: str) -> None:
        """Apply one of the changes that need only the state."""
        self.set_state(self._changes[key](self._state))

    def action_filter(self) -> None:
        """Open the input line of the filter."""
        self.show_input(visible=True)

    def action_interval(self, step: int) -> None:
        """Get new data more or less often."""
        self.feed.set_interval(next_interval(self.feed.interval_seconds, step))
        self.redraw()

    def set_state(self, state: State) -> None:
        """Show another state."""
        self._state = state
        self.redraw()

    def show_notice(self, text: str) -> None:
        """Show a message for a few seconds; one that is repeated needs no second timer."""
        if text == self._notice:
            return
        self._notice = text
        self._notices += 1
        number = self._notices
        self.set_timer(_NOTICE_SECONDS, lambda: self._clear_notice(number))
        self.redraw()

    def _clear_notice(self, number: int) -> None:
        if number == self._notices:
            self._notice = ""
            self.redraw()

    def show_input(self, *, visible: bool) -> None:
        """Show or hide the input line of the filter."""
        box = self.query_one(Input)
        box.display = visible
        self.query_one("#keys").display = not visible
        if visible:
            box.value = str(self._state.query)
            self.screen.set_focus(box)  # at once: keys that were typed ahead belong to it
        else:
            self.screen.set_focus(None)

    def show_panels(
        self, parts: Mapping[PanelName, Sequence[Line]], marks: Mapping[PanelName, int], active: PanelName
    ) -> None:
        """Show lines in the panels.

        Args:
            parts: Lines by panel.
            marks: Line of the cursor by panel.
            active: The panel whose cursor moves.
        """
        lines: dict[str, Sequence[Line]] = dict(parts.items())
        marked: dict[str, int] = dict(marks.items())
        for base in self.screen_stack[:1]:  # empty, or without panels, during shutdown
            panels = {panel.id: panel for panel in base.query(Panel)}
            for name in self._panels:
                if name in panels:
                    panels[name].show(lines.get(name, []), mark=marked.get(name), active=name == active)
