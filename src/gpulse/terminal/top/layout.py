"""How the lines of the terminal are shared out between the parts of the view."""

from __future__ import annotations

from dataclasses import dataclass

_ROOMY_HEIGHT = 30
_ROOMY_WIDTH = 76
_FEWEST_PROCESSES = 5
_CHART_LINES = 5
_TALLEST_CHART = 9
_MOST_FINDINGS = 4


@dataclass(frozen=True, slots=True)
class Plan:
    """So many rows for each part, frames and titles not counted; 0 leaves a part out."""

    boxed: bool
    host: int
    gpus: int
    chart: int
    processes: int
    findings: int


def plan(cells: int, lines: int, *, gpus: int, processes: int, findings: int) -> Plan:
    """Share out the lines: every part gets something, then the tables what they can use, then the chart."""
    boxed = lines >= _ROOMY_HEIGHT and cells >= _ROOMY_WIDTH
    frame = 2 if boxed else 0
    host = 2 if lines >= 16 else 1
    shown = min(_MOST_FINDINGS, max(1, findings)) if boxed else 1
    rest = lines - 2 - (host + frame) - (1 + frame) - (1 + frame) - (shown + frame)
    gpu_rows = _gpu_rows(rest, max(1, gpus), processes)
    process_rows = rest - gpu_rows
    spare = process_rows - max(_FEWEST_PROCESSES, processes) - frame
    chart = 0
    if boxed and spare >= _CHART_LINES and gpus:
        chart = min(_TALLEST_CHART, spare)
        process_rows -= chart + frame
    return Plan(boxed, host, gpu_rows, chart, max(0, process_rows), shown)


def _gpu_rows(rest: int, gpus: int, processes: int) -> int:
    """All GPUs when a few processes still fit under them, else about half the lines."""
    wanted = min(processes, _FEWEST_PROCESSES)
    if gpus + wanted <= rest:
        return gpus
    return max(1, min(gpus, rest // 2, rest - wanted))
