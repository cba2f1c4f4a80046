"""What the person at the keyboard chose: sorting, filter, tree, cursors; every change gives a new state."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, Literal, TypeVar

from gpulse.model.rates import ProcessKey
from gpulse.terminal.top.query import Query, following

Key = TypeVar("Key", bound=Hashable)
Focus = Literal["processes", "gpus"]

SORTS = (
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
"""What processes can be sorted by, in the order in which the key goes through them."""
_ASCENDING = frozenset({"pid", "user", "gpu", "kind", "state", "command"})
"""What one expects to begin with the smallest."""


@dataclass(frozen=True, slots=True)
class Cursor(Generic[Key]):
    """A place in a list that stays with its item while the list is reordered and grows."""

    key: Key | None = None
    """The item it stays with; None until somebody moves it, so that it rests at the top."""
    index: int = 0
    offset: int = 0
    """The first item in view."""

    def settled(self, keys: Sequence[Key], height: int) -> Cursor[Key]:
        """Where it is in this list, in view."""
        index = self.index
        if self.key is not None and self.key in keys:
            index = keys.index(self.key)
        index = max(0, min(index, len(keys) - 1))
        lowest = max(0, len(keys) - height)
        offset = min(self.offset, lowest, index)
        return replace(self, index=index, offset=max(offset, index - height + 1, 0))

    def moved(self, by: int, keys: Sequence[Key], height: int) -> Cursor[Key]:
        """So many items further down, or up when negative."""
        if not keys:
            return self
        index = max(0, min(self.settled(keys, height).index + by, len(keys) - 1))
        return replace(self, key=keys[index], index=index).settled(keys, height)


@dataclass(frozen=True, slots=True)
class ViewState:
    """All choices at once."""

    sort: str = "gpu_memory"
    descending: bool = True
    tree: bool = True
    unfolded: bool = False
    """Whether workers are shown under their process unless said otherwise."""
    exceptions: frozenset[ProcessKey] = frozenset()
    """The processes for which it is the other way round."""
    query: Query = field(default_factory=Query)
    paused: bool = False
    focus: Focus = "processes"
    process: Cursor[ProcessKey] = field(default_factory=Cursor)
    gpu: Cursor[str] = field(default_factory=Cursor)

    def is_unfolded(self, key: ProcessKey) -> bool:
        """Whether the workers of a process are listed."""
        return self.unfolded != (key in self.exceptions)

    def sorted_by(self, sort: str) -> ViewState:
        """Sort by this, in its natural direction; asked for again, the other way round."""
        if sort == self.sort:
            return self.reversed()
        return replace(self, sort=sort, descending=sort not in _ASCENDING)

    def sorted_next(self, step: int, among: Sequence[str] = SORTS) -> ViewState:
        """Sort by the next or the previous column."""
        index = among.index(self.sort) if self.sort in among else -step
        return self.sorted_by(among[(index + step) % len(among)])

    def reversed(self) -> ViewState:
        """The other direction."""
        return replace(self, descending=not self.descending)

    def with_tree(self) -> ViewState:
        """Tree on or off."""
        return replace(self, tree=not self.tree)

    def folded(self, key: ProcessKey, *, unfold: bool) -> ViewState:
        """List the workers of one process, or no longer."""
        if unfold == self.is_unfolded(key):
            return self
        return replace(self, tree=True, exceptions=self.exceptions ^ {key})

    def folded_all(self) -> ViewState:
        """List the workers of every process, or of none."""
        return replace(self, tree=True, unfolded=not self.unfolded, exceptions=frozenset())

    def filtered(self, query: Query) -> ViewState:
        """Show only what passes."""
        return replace(self, query=query)

    def next_user(self, users: Sequence[str]) -> ViewState:
        """Only the next user's processes, after the last one everybody's."""
        return self.filtered(replace(self.query, user=following(self.query.user, users)))

    def next_gpu(self, labels: Sequence[str]) -> ViewState:
        """Only the processes of the next GPU, after the last one those of all."""
        current = self.query.gpus[0] if len(self.query.gpus) == 1 else ""
        label = following(current, labels)
        return self.filtered(replace(self.query, gpus=(label,) if label else ()))

    def only_gpu(self, label: str) -> ViewState:
        """Only the processes of this GPU; asked for again, those of all."""
        gpus = () if self.query.gpus == (label,) else (label,)
        return self.filtered(replace(self.query, gpus=gpus))

    def with_pause(self) -> ViewState:
        """Stand still, or go on."""
        return replace(self, paused=not self.paused)

    def with_other_focus(self) -> ViewState:
        """Move the keyboard to the other table."""
        return replace(self, focus="gpus" if self.focus == "processes" else "processes")
