"""The first and the last line: what is watched and how, and which keys there are."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass

from gpulse.terminal.top.cells import Line, Piece, cut, ends, fitted, joined, words
from gpulse.terminal.top.glyphs import Glyphs
from gpulse.terminal.top.gpu_view import short_name
from gpulse.terminal.top.process_view import sort_title
from gpulse.terminal.top.snapshot import Snapshot
from gpulse.terminal.top.state import ViewState


@dataclass(frozen=True, slots=True)
class Status:
    """How the sampling goes."""

    interval_seconds: float
    ended: bool = False
    failing: bool = False


_SHORT = (
    (0, "q", "quit"),
    (0, "?", "help"),
    (1, "/", "filter"),
    (1, "s", "sort"),
    (3, "t", "tree"),
    (4, "u", "user"),
    (4, "g", "gpu"),
    (2, "k", "end"),
    (2, "space", "pause"),
    (5, "enter", "details"),
    (5, "f", "findings"),
    (6, "tab", "switch"),
)


def top_line(
    snapshot: Snapshot | None, state: ViewState, status: Status, title: str, cells: int, glyphs: Glyphs
) -> Line:
    """What is watched; at the right how often, and the time of the frame."""
    left: list[tuple[int, Line]] = [(0, words(glyphs.clean(title), "title"))]
    right: list[Piece] = []
    if status.ended:
        right += [Piece(" end of recording ", "alert"), Piece(" ")]
    if status.failing:
        right += [Piece(" NOT SAMPLING ", "alert"), Piece(" ")]
    if state.paused:
        right += [Piece(" PAUSED ", "alert"), Piece(" ")]
    right.append(Piece(f"{status.interval_seconds:g} s ", "dim"))
    if snapshot is not None:
        frame = snapshot.frame
        left.append((1, words(glyphs.clean(frame.node.name), "strong")))
        left.append((2, words(_inventory(snapshot, glyphs), "plain")))
        versions = [
            f"driver {frame.node.driver}" if frame.node.driver else "",
            f"CUDA {frame.node.cuda}" if frame.node.cuda else "",
        ]
        left.append(
            (3, words(glyphs.clean(f" {glyphs.dot} ".join(part for part in versions if part)), "dim"))
        )
        right.append(Piece(f" {time.strftime('%H:%M:%S', time.localtime(frame.time))} ", "strong"))
    room = cells - sum(len(piece.text) for piece in right) - 1
    return ends(
        (Piece(" "), *fitted([part for part in left if part[1][0].text], room, "  ")), tuple(right), cells
    )


def key_line(cells: int) -> Line:
    """The keys that one needs most."""
    parts: list[tuple[int, Line]] = [
        (priority, (Piece(key, "key"), Piece(f" {text}", "dim"))) for priority, key, text in _SHORT
    ]
    return (Piece(" "), *fitted(parts, cells - 1))


def notice_line(text: str, cells: int, glyphs: Glyphs) -> Line:
    """A message in the place of the keys."""
    shown = cut(f"{glyphs.warning} {glyphs.clean(text)}", cells - 2, glyphs.ellipsis)
    return (Piece(" "), Piece(shown, "warn"))


def position(first: int, visible: int, total: int) -> Line:
    """`9-16/64`, nothing while everything is in view."""
    if visible >= total:
        return ()
    if visible < 1:
        return words(f"0/{total}", "accent")
    return words(f"{first + 1}-{min(total, first + visible)}/{total}", "accent")


def process_status(
    state: ViewState, place: Line, counts: tuple[int, int], glyphs: Glyphs, *, with_sort: bool
) -> Line:
    """What the process table leaves out and in which order it is."""
    parts: list[Piece] = []
    if state.query:
        shown, total = counts
        parts.append(Piece(f"{glyphs.clean(str(state.query))} ({shown} of {total})", "accent"))
    if with_sort:
        parts.append(Piece(f"{sort_title(state, glyphs)} {'tree' if state.tree else 'flat'}", "dim"))
    return joined([(part,) for part in parts] + ([place] if place else []))


def _inventory(snapshot: Snapshot, glyphs: Glyphs) -> str:
    """`8 x H200`; MIG instances are parts and not counted."""
    names = Counter(short_name(gpu) for gpu in snapshot.frame.gpus if gpu.device.mig_index is None)
    return ", ".join(f"{count} x {glyphs.clean(name)}" for name, count in names.most_common(2))
