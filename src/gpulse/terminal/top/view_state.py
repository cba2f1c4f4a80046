"""State of the live view: sort order, filter, tree and cursors. It is immutable: every change returns a new state."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Generic, Literal, TypeVar

from gpulse.model.counter_rates import ProcessKey, Rates
from gpulse.model.finding import Finding
from gpulse.model.frame import Frame
from gpulse.terminal.top.styled_text import Glyphs


@dataclass(frozen=True, slots=True)
class ProcessFilter:
    """Filter of processes; an empty field matches everything."""

    user: str = ""
    """A user name, with `*` and `?` as in a shell."""
    gpus: tuple[str, ...] = ()
    """Labels of GPUs; that of a whole GPU includes its MIG instances."""
    text: tuple[str, ...] = ()
    """Words that must all occur, in any case."""

    def __bool__(self) -> bool:
        return bool(self.user or self.gpus or self.text)

    def __str__(self) -> str:
        parts = [f"user:{self.user}"] if self.user else []
        if self.gpus:
            parts.append(f"gpu:{','.join(self.gpus)}")
        return " ".join([*parts, *self.text])

    def admits(self, *, user: str, gpus: Iterable[str], text: str) -> bool:
        """Return whether a process of this user, on these GPUs, with this command line matches."""
        if self.user and not fnmatchcase(user, self.user):
            return False
        if self.gpus and not any(_is_part(label, wanted) for label in gpus for wanted in self.gpus):
            return False
        return all(word in text for word in self.text) or all(
            word.lower() in text.lower() for word in self.text
        )


def parse_process_filter(typed: str) -> ProcessFilter:
    """Parse a filter such as `user:ada gpu:0,2-3 train`; every part is optional."""
    user, gpus = "", ()  # type: tuple[str, tuple[str, ...]]
    text: list[str] = []
    for word in typed.split():
        name, colon, value = word.partition(":")
        if colon and name == "user":
            user = value
        elif colon and name == "gpu":
            gpus = tuple(label for part in value.split(",") if part for label in _labels(part))
        else:
            text.append(word)
    return ProcessFilter(user, gpus, tuple(text))


def _labels(part: str) -> list[str]:
    first, dash, last = part.partition("-")
    if dash and first.isdecimal() and last.isdecimal() and int(first) <= int(last) < 1000:
        return [str(index) for index in range(int(first), int(last) + 1)]
    return [part]


def _is_part(label: str, wanted: str) -> bool:
    return label == wanted or label.startswith(f"{wanted}:")


def next_choice(current: str, choices: Iterable[str]) -> str:
    """Return the choice after the current one; the empty choice comes first, and again after the last."""
    ordered = ["", *choices]
    return ordered[(ordered.index(current) + 1) % len(ordered)] if current in ordered else ""


Key = TypeVar("Key", bound=Hashable)
Focus = Literal["processes", "gpus"]

SORT_ORDERS = (
    "gpu_memory",
    "sm",
    "cpu",
    "ram",
    "elapsed",
    "pid",
    "user",
    "gpu",
    "kind",
    "read",
    "state",
    "command",
)
"""Columns that processes can be sorted by, in the order of the key `s`."""
_ASCENDING = frozenset({"pid", "user", "gpu", "kind", "state", "command"})
"""Columns that are sorted from the smallest value by default."""


@dataclass(frozen=True, slots=True)
class ListCursor(Generic[Key]):
    """Cursor in a list that stays on its item while the list changes."""

    key: Key | None = None
    """Key of its item; None until the user moves it, so that it stays at the top."""
    index: int = 0
    offset: int = 0
    """The first item in view."""

    def settled(self, keys: Sequence[Key], height: int) -> ListCursor[Key]:
        """Return the cursor at the place of its item in this list, scrolled into view."""
        index = self.index
        if self.key is not None and self.key in keys:
            index = keys.index(self.key)
        index = max(0, min(index, len(keys) - 1))
        lowest = max(0, len(keys) - height)
        offset = min(self.offset, lowest, index)
        return replace(self, index=index, offset=max(offset, index - height + 1, 0))

    def moved(self, by: int, keys: Sequence[Key], height: int) -> ListCursor[Key]:
        """Return the cursor moved down by this many items, or up when negative."""
        if not keys:
            return self
        index = max(0, min(self.settled(keys, height).index + by, len(keys) - 1))
        return replace(self, key=keys[index], index=index).settled(keys, height)


@dataclass(frozen=True, slots=True)
class ViewState:
    """All choices of the user."""

    sort: str = "gpu_memory"
    descending: bool = True
    tree: bool = True
    unfolded: bool = False
    """Whether workers are shown under their process by default."""
    exceptions: frozenset[ProcessKey] = frozenset()
    """Processes for which the opposite of `unfolded` holds."""
    query: ProcessFilter = field(default_factory=ProcessFilter)
    paused: bool = False
    focus: Focus = "processes"
    process: ListCursor[ProcessKey] = field(default_factory=ListCursor)
    gpu: ListCursor[str] = field(default_factory=ListCursor)

    def is_unfolded(self, key: ProcessKey) -> bool:
        """Return whether the workers of a process are shown."""
        return self.unfolded != (key in self.exceptions)

    def sorted_by(self, sort: str) -> ViewState:
        """Sort by a column in its default direction, or reverse it if it is the current one."""
        if sort == self.sort:
            return self.reversed()
        return replace(self, sort=sort, descending=sort not in _ASCENDING)

    def sorted_next(self, step: int, among: Sequence[str] = SORT_ORDERS) -> ViewState:
        """Sort by the next or the previous column."""
        index = among.index(self.sort) if self.sort in among else -step
        return self.sorted_by(among[(index + step) % len(among)])

    def reversed(self) -> ViewState:
        """Reverse the direction."""
        return replace(self, descending=not self.descending)

    def with_tree(self) -> ViewState:
        """Switch between tree and flat list."""
        return replace(self, tree=not self.tree)

    def folded(self, key: ProcessKey, *, unfold: bool) -> ViewState:
        """Show or hide the workers of one process."""
        if unfold == self.is_unfolded(key):
            return self
        return replace(self, tree=True, exceptions=self.exceptions ^ {key})

    def folded_all(self) -> ViewState:
        """Show or hide the workers of all processes."""
        return replace(self, tree=True, unfolded=not self.unfolded, exceptions=frozenset())

    def filtered(self, query: ProcessFilter) -> ViewState:
        """Show only the processes that match a filter."""
        return replace(self, query=query)

    def next_user(self, users: Sequence[str]) -> ViewState:
        """Show only the next user's processes; after the last user, all processes."""
        return self.filtered(replace(self.query, user=next_choice(self.query.user, users)))

    def next_gpu(self, labels: Sequence[str]) -> ViewState:
        """Show only the processes of the next GPU; after the last GPU, all processes."""
        current = self.query.gpus[0] if len(self.query.gpus) == 1 else ""
        label = next_choice(current, labels)
        return self.filtered(replace(self.query, gpus=(label,) if label else ()))

    def only_gpu(self, label: str) -> ViewState:
        """Show only the processes of this GPU, or all processes if that is already the filter."""
        gpus = () if self.query.gpus == (label,) else (label,)
        return self.filtered(replace(self.query, gpus=gpus))

    def with_pause(self) -> ViewState:
        """Pause or continue."""
        return replace(self, paused=not self.paused)

    def with_other_focus(self) -> ViewState:
        """Move the focus to the other table."""
        return replace(self, focus="gpus" if self.focus == "processes" else "processes")


def _no_findings(_frame: Frame) -> Sequence[Finding]:
    return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TopOptions:
    """Settings of the live view."""

    interval_seconds: float = 1.0
    """Initial time from one frame to the next."""
    readonly: bool = False
    """Whether ending processes is forbidden."""
    killable: bool = True
    """False for a demo or a recording, whose processes do not run on this machine."""
    gpus: Callable[[Frame], Frame] | None = None
    """Removes from each frame what is not shown."""
    findings: Callable[[Frame], Sequence[Finding]] = _no_findings
    """Returns the findings so far; called with every frame, in order, on the sampling thread."""
    title: str = "gpulse"
    """Text at the top left."""
    glyphs: Glyphs | None = None
    """Characters to draw with; None chooses them for this terminal."""


@dataclass(frozen=True, slots=True)
class TopSnapshot:
    """One frame with the rates and findings that are shown with it."""

    frame: Frame
    rates: Rates = field(default_factory=lambda: Rates(interval_seconds=0.0))
    findings: Sequence[Finding] = ()
