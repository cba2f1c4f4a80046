"""The keys: what each one does, and the page that lists them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from textual.binding import Binding

from gpulse.terminal.top.cells import Line, Piece
from gpulse.terminal.top.state import ViewState

_SORTS = {
    "P": "pid",
    "U": "user",
    "G": "gpu",
    "M": "gpu_memory",
    "A": "sm",
    "C": "cpu",
    "R": "ram",
    "T": "elapsed",
}

CHANGES: dict[str, Callable[[ViewState], ViewState]] = {
    "s": lambda state: state.sorted_next(1),
    "S": lambda state: state.sorted_next(-1),
    "r": ViewState.reversed,
    "t": ViewState.with_tree,
    "e": ViewState.folded_all,
    **{key: partial(ViewState.sorted_by, sort=column) for key, column in _SORTS.items()},
}
"""By key the changes that need nothing but the state."""

BINDINGS = (
    Binding("ctrl+c", "quit", priority=True),
    Binding("q", "quit"),
    Binding("question_mark,h", "help"),
    Binding("space,p", "pause"),
    *(Binding(key, f"change('{key}')") for key in CHANGES),
    Binding("right", "fold(True)"),
    Binding("left", "fold(False)"),
    Binding("slash", "filter"),
    Binding("u", "user"),
    Binding("g", "gpu"),
    Binding("escape", "clear"),
    Binding("plus,equals_sign", "interval(1)"),
    Binding("minus", "interval(-1)"),
    Binding("f", "findings"),
    Binding("k", "end"),
    Binding("enter", "open"),
    Binding("tab", "focus_table", priority=True),
    Binding("down,j", "move(1)"),
    Binding("up", "move(-1)"),
    Binding("pagedown", "page(1)"),
    Binding("pageup", "page(-1)"),
    Binding("home", "move(-100000)"),
    Binding("end", "move(100000)"),
)

KEYS = (
    ("q, Ctrl-C", "quit"),
    ("?, h", "this help"),
    ("space, p", "pause the picture; sampling goes on"),
    ("arrows, PgUp/Dn", "move the cursor; also Home and End"),
    ("Tab", "move between GPUs and processes"),
    ("Enter", "details of a process; on a GPU: only its processes"),
    ("s, S", "sort by the next, the previous column"),
    ("P U G M A C R T", "sort by pid, user, GPU, GPU memory, SM activity, CPU, RAM, time"),
    ("r", "reverse the order"),
    ("t", "tree: workers under their process, or a flat list"),
    ("right, left", "list the workers of a process, or hide them"),
    ("e", "list the workers of all processes, or hide them"),
    ("/", "filter: user:NAME gpu:0,2-3 and words"),
    ("u", "only the next user's processes"),
    ("g", "only the next GPU's processes"),
    ("Esc", "clear the filter"),
    ("f", "all findings with advice"),
    ("+, -", "sample less often, more often"),
    ("k", "end the selected process; asks first"),
)
"""Every key and what it does, in the order in which the help lists them."""

_LEGEND = (
    ("UTIL", "share of time with a kernel on the GPU, however small"),
    ("SM, TC, DRAM", "how much of the multiprocessors, tensor cores and memory bandwidth is at work"),
    ("MBUS", "share of time in which the memory was read or written"),
    ("HELD BY", "what keeps the clocks down"),
    ("PSI", "share of time in which some task waited for a CPU, a disk, memory"),
    ("-", "unknown"),
)


def help_page() -> list[Line]:
    """All keys and what the columns mean."""
    keys: list[Line] = [(Piece(key, "key"), Piece(text)) for key, text in KEYS]
    legend: list[Line] = [(Piece(name, "head"), Piece(text, "dim")) for name, text in _LEGEND]
    return [*keys, (), *legend]
