"""What one GPU did over the last minutes, as areas one above the other in time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gpulse.model.frame import GpuReading
from gpulse.terminal import format as human
from gpulse.terminal.top.cells import Line, Piece, Tone, joined, padded
from gpulse.terminal.top.glyphs import Glyphs, level
from gpulse.terminal.top.history import History, Moment, activity

_WIDE_CELLS = 150
_GAP = "   "


def lines(gpu: GpuReading, history: History, cells: int, height: int, glyphs: Glyphs) -> list[Line]:
    """Activity and memory side by side, power too when there is room; one line of words above them."""
    moments = history.last(gpu.device.uuid, cells)
    charts: list[tuple[Line, Callable[[Moment], float | None], Callable[[float], Tone]]] = [
        (_activity(gpu), lambda moment: moment.activity, level),
        (_memory(gpu), lambda moment: moment.memory, lambda _: "memory"),
    ]
    if cells >= _WIDE_CELLS:
        charts.append((_power(gpu), lambda moment: moment.power, lambda _: "power"))
    room = (cells - 2 - len(_GAP) * (len(charts) - 1)) // len(charts)
    drawn = [
        [padded(title, room), *area([value(moment) for moment in moments], room, height - 1, tone, glyphs)]
        for title, value, tone in charts
    ]
    return [padded((Piece(" "), *joined(parts, _GAP)), cells) for parts in zip(*drawn, strict=True)]


def area(
    values: Sequence[float | None], cells: int, height: int, tone: Callable[[float], Tone], glyphs: Glyphs
) -> list[Line]:
    """The newest values as columns over several lines; the tone of a line goes with its height."""
    newest = [None] * max(0, cells - len(values)) + list(values[-cells:])
    steps = len(glyphs.rise) - 1
    filled = [None if value is None else max(1, round(min(1.0, value) * height * steps)) for value in newest]
    out: list[Line] = []
    for row in range(height - 1, -1, -1):
        signs = "".join(
            " " if fill is None else glyphs.rise[max(0, min(steps, fill - row * steps))] for fill in filled
        )
        out.append((Piece(signs, tone((row + 0.5) / height)),))
    return out


def _activity(gpu: GpuReading) -> Line:
    name = "SM activity" if gpu.get("sm_active_ratio") is not None else "utilization"
    return (Piece(f"{name} ", "head"), Piece(human.ratio(activity(gpu)), "strong"))


def _memory(gpu: GpuReading) -> Line:
    return (
        Piece("memory ", "head"),
        Piece(human.sizes(gpu.get("memory_used_bytes"), gpu.get("memory_total_bytes")), "strong"),
    )


def _power(gpu: GpuReading) -> Line:
    used, limit = gpu.get("power_watts"), gpu.get("power_limit_watts")
    return (Piece("power ", "head"), Piece(f"{human.number(used)}/{human.watts(limit)}", "strong"))
