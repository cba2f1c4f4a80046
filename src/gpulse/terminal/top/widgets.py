"""The widgets: a panel that shows lines, and the dialogs over it. They draw and pass on, and decide nothing."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from rich.style import Style
from rich.table import Table
from rich.text import Text
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.message import Message
from textual.screen import ModalScreen
from textual.strip import Strip
from textual.widget import Widget
from textual.widgets import Button, Static

from gpulse.terminal.top.cells import Line, Tone
from gpulse.terminal.top.palette import CURSOR, PLAIN_CURSOR, RESTING_CURSOR, strip, styles_for

if TYPE_CHECKING:
    from textual import events
    from textual.app import ComposeResult
    from textual.binding import BindingType


class Panel(Widget):
    """Lines of text, one of them marked."""

    class Clicked(Message):
        """Somebody clicked on a line."""

        def __init__(self, panel: Panel, line: int) -> None:
            super().__init__()
            self.panel = panel
            self.line = line

    class Scrolled(Message):
        """Somebody turned the wheel."""

        def __init__(self, panel: Panel, lines: int) -> None:
            super().__init__()
            self.panel = panel
            self.lines = lines

    def __init__(self, id: str) -> None:  # noqa: A002  Textual's word
        super().__init__(id=id)
        self._lines: Sequence[Line] = ()
        self._mark: int | None = None
        self._active = False

    def show(self, lines: Sequence[Line], *, mark: int | None, active: bool) -> None:
        """Show these lines, and which of them the cursor is in."""
        if self._lines == lines and (self._mark, self._active) == (mark, active):
            return
        if len(lines) != len(self._lines):
            self.styles.height = len(lines)
        self._lines, self._mark, self._active = lines, mark, active
        self.refresh()

    @property
    def text(self) -> str:
        """What it shows, without looks."""
        return "\n".join("".join(piece.text for piece in line).rstrip() for line in self._lines)

    def render_line(self, y: int) -> Strip:
        """One line for the screen."""
        base = self.rich_style
        if y >= len(self._lines):
            return Strip.blank(self.size.width, base)
        base += self._background(y)
        return strip(self._lines[y], self.size.width, styles_for(coloured=not self.app.no_color), base)

    def on_click(self, event: events.Click) -> None:
        """Pass it on."""
        self.post_message(self.Clicked(self, event.y))

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        """Pass it on."""
        event.stop()
        self.post_message(self.Scrolled(self, 1))

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        """Pass it on."""
        event.stop()
        self.post_message(self.Scrolled(self, -1))

    def _background(self, y: int) -> Style:
        if y != self._mark:
            return Style()
        if self.app.no_color:
            return PLAIN_CURSOR if self._active else Style()
        return CURSOR if self._active else RESTING_CURSOR


class Page(ModalScreen[None]):
    """Text to read over the view; most keys close it."""

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
        """A frame with the text in it."""
        with VerticalScroll(classes="dialog") as box:
            box.border_title = Text(self._title)
            box.border_subtitle = Text("Esc closes")
            styles = styles_for(coloured=not self.app.no_color)
            yield Static(_table(self._page, styles), id="page")

    def action_scroll(self, lines: int) -> None:
        """Move the text."""
        self.query_one(VerticalScroll).scroll_relative(y=lines, animate=False)


class EndDialog(ModalScreen[signal.Signals | None]):
    """Asks before a process is ended; whoever just presses Enter ends nothing."""

    BINDINGS: ClassVar[list[BindingType]] = [
        ("escape,q,n", "cancel", "cancel"),
        ("right", "app.focus_next", "next"),
        ("left", "app.focus_previous", "previous"),
    ]

    def __init__(self, question: Sequence[Line]) -> None:
        super().__init__()
        self._question = question

    def compose(self) -> ComposeResult:
        """The question and three answers."""
        with Vertical(classes="dialog question") as box:
            box.border_title = Text("End this process?")
            styles = styles_for(coloured=not self.app.no_color)
            yield Static(_table(self._question, styles), id="question")
            with Horizontal():
                yield Button("Cancel", id="cancel")
                yield Button("TERM: ask it to end", id="term", variant="warning")
                yield Button("KILL: end it now", id="kill", variant="error")

    def on_mount(self) -> None:
        """Begin at the harmless answer."""
        self.query_one("#cancel").focus()

    def on_button_pressed(self, event: Button.Pressed) -> None:
        """Answer."""
        self.dismiss({"term": signal.SIGTERM, "kill": signal.SIGKILL}.get(event.button.id or ""))

    def action_cancel(self) -> None:
        """Answer no."""
        self.dismiss(None)


def _table(lines: Sequence[Line], styles: dict[Tone, Style]) -> Table:
    """Each line in two columns, its first piece and the rest, so that long text wraps beside its label."""
    table = Table.grid(padding=(0, 1))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for line in lines:
        label, rest = line[:1], line[1:]
        table.add_row(
            *(Text.assemble(*((text, styles[tone]) for text, tone in part)) for part in (label, rest))
        )
    return table
