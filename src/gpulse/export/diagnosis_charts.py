"""Charts of a diagnosis: the GPUs of its findings over time, with the signals that the evidence names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np

from gpulse.charts import chart_files
from gpulse.charts.chart_model import (
    Axis,
    Chart,
    ChartGap,
    ChartLine,
    ChartPage,
    ChartPanel,
    ChartSpan,
    Lines,
    arrange_lines,
    make_axis,
    make_line,
)
from gpulse.charts.html_page import advice_list, badge, bullets, page
from gpulse.charts.style import severity_color
from gpulse.charts.svg_renderer import safe
from gpulse.diagnosis.finding_texts import describe_evidence, signal_text
from gpulse.diagnosis.line_search import LineSpan, describe_where
from gpulse.diagnosis.second_summary import SecondSummary
from gpulse.diagnosis.thresholds import DEFAULTS
from gpulse.model.clock_event_reasons import CLOCK_REASONS
from gpulse.model.finding import Diagnosis, Finding
from gpulse.model.formatting import Unit, local_time, long_size, watts
from gpulse.model.formatting import seconds as seconds_text
from gpulse.model.intervals import Interval, overlap
from gpulse.model.safe_text import printable

Seconds = Sequence[SecondSummary]
CodeSpans = Mapping[str, Sequence[LineSpan]]
Value = Callable[[SecondSummary], float | None]

_PAUSES = frozenset({"stalls"})
"""Signals of findings that come and go: the GPU works between their start and their end."""
_GAP_SECONDS = 1.5
_BAND_COLORS = 3
_NOT_RECORDED = "not recorded"
_MAX_CHARTS_WITHOUT_FINDING = 2
_MAX_EVIDENCE_ROWS = 12
_MAX_CODE_LANES = 3
_PROCESS_SHARE = "sm_ratio"
"""The only signal that each process on a GPU has."""
_AXIS_UNITS: dict[Unit, str] = {
    "share": "ratio",
    "bytes": "bytes",
    "bytes/second": "bytes/second",
    "cpus": "CPUs",
    "number": "1",
    "count": "1",
    "seconds": "seconds",
    "celsius": "celsius",
    "watts": "watts",
    "hertz": "hertz",
}
"""Units of signals that can be drawn, as the metric catalog names them."""


@dataclass(frozen=True)
class _PanelSignals:
    """Panel of a chart: related signals of one unit."""

    title: str
    unit: str
    signals: Mapping[str, str]
    """Labels of the lines, by signal."""
    is_always_drawn: bool = False
    """Otherwise only when the evidence names one of its signals."""
    least: float = 0.0
    """Minimum upper end of the axis."""


_PANELS = (
    _PanelSignals(
        "GPU activity",
        "ratio",
        {
            "duty": "kernels running",
            "sm_active_ratio": "SMs in use",
            "tensor_active_ratio": "tensor cores",
            "dram_active_ratio": "memory interface",
        },
        is_always_drawn=True,
    ),
    _PanelSignals(
        "Pipelines in use",
        "ratio",
        {"fp16_active_ratio": "fp16", "fp32_active_ratio": "fp32", "fp64_active_ratio": "fp64"},
    ),
    _PanelSignals(
        "Storage",
        "bytes/second",
        {
            "job_read_bytes_per_second": "read by the job",
            "disk_read_bytes_per_second": "read from the busiest disk",
            "nfs_read_bytes_per_second": "read from NFS",
            "stall_written_bytes": "written by the job",
        },
        least=1e6,
    ),
    _PanelSignals(
        "Waiting for storage",
        "1",
        {
            "processes_waiting_for_disks": "processes waiting for disks",
            "nfs_reads_in_flight": "NFS reads in flight",
            "queue_length": "requests queued at the busiest disk",
        },
        least=1.0,
    ),
    _PanelSignals(
        "Data-loading workers",
        "1",
        {"workers": "all", "saturated_workers": "fully busy workers"},
        least=1.0,
    ),
    _PanelSignals("Run queue", "1", {"runnable_per_cpu": "runnable threads per CPU"}, least=1.0),
    _PanelSignals(
        "Resource pressure on the host",
        "ratio",
        {
            "cpu_utilization_ratio": "CPUs in use",
            "run_wait_ratio": "main thread waiting for a CPU",
            "cpu_throttled_ratio": "periods throttled by the CPU limit",
            "pressure_cpu_some_ratio": "some tasks waiting for a CPU (PSI)",
            "pressure_io_some_ratio": "some tasks waiting for I/O (PSI)",
            "pressure_memory_full_ratio": "all tasks waiting for memory (PSI)",
            "remote_cpu_ratio": "CPU time on a remote NUMA node",
        },
    ),
    _PanelSignals(
        "PCIe",
        "bytes/second",
        {"pcie_rx_bytes_per_second": "to the GPU", "pcie_tx_bytes_per_second": "from the GPU"},
        is_always_drawn=True,
        least=1e6,
    ),
    _PanelSignals(
        "Host memory",
        "bytes",
        {"job_resident_bytes": "used by the job", "memory_available_bytes": "available"},
    ),
    _PanelSignals(
        "Network",
        "ratio",
        {"network_busy_ratio": "use of the network link", "network_error_ratio": "packets with errors"},
    ),
    _PanelSignals(
        "Power and memory",
        "ratio",
        {"power_ratio": "power", "memory_used_ratio": "memory"},
        is_always_drawn=True,
    ),
    _PanelSignals(
        "CPU time",
        "CPUs",
        {
            "trainer_cores": "the program",
            "feeding_cores": "its two busiest threads",
            "worker_cores": "its workers",
            "cpus": "CPUs that the job may use",
        },
        is_always_drawn=True,
        least=1.0,
    ),
)
_ONLY_AS_EVIDENCE = frozenset(
    {
        "feeding_cores",
        "cpus",
        "run_wait_ratio",
        "cpu_throttled_ratio",
        "pressure_cpu_some_ratio",
        "pressure_io_some_ratio",
        "pressure_memory_full_ratio",
        "remote_cpu_ratio",
    }
)
"""Signals that are drawn only when the evidence names them; all other signals of a panel are always drawn with it."""
_SAME_PANEL = {
    "pcie_bytes_per_second": "pcie_rx_bytes_per_second",
    "pcie_link_ratio": "pcie_rx_bytes_per_second",
    "memory_used_bytes": "memory_used_ratio",
    "power_watts": "power_ratio",
    "fill_ratio": "sm_active_ratio",
    "lost_ratio": "duty",
    "stall_seconds": "duty",
    "job_cores": "trainer_cores",
    "cpus_left": "cpus",
}
"""Signals that are shown by another signal."""


def _count_runnable(second: SecondSummary) -> float | None:
    running = second.host.get("processes_running")
    return None if running is None or not second.cpus else running / second.cpus


def _count_saturated_workers(second: SecondSummary) -> float | None:
    """Count workers that are always busy; None where the processes could not be read."""
    if second.cores is None:
        return None
    return sum(helper.cores >= DEFAULTS.saturated_worker for helper in second.workers)


def _reason_ratio(bit: int, second: SecondSummary) -> float:
    """Return the fraction of frames in which a reason held the clocks down."""
    return second.reasons.get(bit, 0) / max(1, second.frames)


def _share(pid: int, second: SecondSummary) -> float | None:
    """Return a process's share of the GPU."""
    return second.shares[pid].mean if pid in second.shares else None


_DERIVED: dict[str, Value] = {
    "trainer_cores": lambda second: second.cores,
    "feeding_cores": lambda second: second.feeding_cores,
    "worker_cores": lambda second: (
        None if second.cores is None else sum(helper.cores for helper in second.workers)
    ),
    "cpus": lambda second: second.cpus,
    "workers": lambda second: None if second.cores is None else len(second.workers),
    "saturated_workers": _count_saturated_workers,
    "processes_waiting_for_disks": lambda second: second.blocked,
    "blocked_seconds": lambda second: float(second.stuck),
    "job_read_bytes_per_second": lambda second: second.read_bytes,
    "disk_read_bytes_per_second": lambda second: second.disk.get("read_bytes_per_second"),
    "stall_written_bytes": lambda second: second.written_bytes,
    "job_resident_bytes": lambda second: second.resident_bytes,
    "runnable_per_cpu": _count_runnable,
    "run_wait_ratio": lambda second: second.run_wait,
    "cpu_throttled_ratio": lambda second: second.throttled,
    "remote_cpu_ratio": lambda second: second.remote_cpus,
    "network_busy_ratio": lambda second: second.network[1].get("busy_ratio"),
    "network_error_ratio": lambda second: second.network[1].get("error_ratio"),
    "processes_on_gpu": lambda second: None if second.holders is None else len(second.holders),
    **{f"clocks_event_{reason.bit:#x}_ratio": partial(_reason_ratio, reason.bit) for reason in CLOCK_REASONS},
}
"""Signals that are computed, not read."""


def write_diagnosis_charts(
    seconds: Mapping[str, Seconds], diagnosis: Diagnosis, path: Path, lines: CodeSpans | None = None
) -> None:
    """Draw a diagnosis to a file; an existing file is replaced atomically.

    Args:
        seconds: Summaries of each GPU's seconds in order, by its UUID.
        diagnosis: The diagnosis of these seconds.
        path: Output file; its extension selects the format.
        lines: The lines of code over time of each GPU, by its label.

    Raises:
        UsageError: The extension is unknown, or the file cannot be created there.
        MissingExtraError: The format needs matplotlib, which is not installed.
        OSError: The file cannot be written.
    """
    chart_files.check_chart_path(path, example="why")
    chart_files.write_chart(
        path, build_picture(seconds, diagnosis, lines), lambda: build_page(seconds, diagnosis, lines)
    )


def build_picture(
    seconds: Mapping[str, Seconds], diagnosis: Diagnosis, lines: CodeSpans | None = None
) -> ChartPage:
    """Return the charts of a diagnosis, those of the verdict's GPU first."""
    charts = build_charts(seconds, diagnosis, lines)
    return ChartPage(diagnosis.verdict, describe_window(diagnosis), tuple(charts))


def build_page(seconds: Mapping[str, Seconds], diagnosis: Diagnosis, lines: CodeSpans | None = None) -> str:
    """Return a diagnosis as an HTML page."""
    parts: list[str | Chart] = [*build_charts(seconds, diagnosis, lines)]
    if diagnosis.findings:
        parts.append("<h2>Findings</h2>")
        for finding in diagnosis.findings:
            parts += _finding(finding)
    if diagnosis.info:
        parts += [
            "<h2>Notes</h2>",
            *bullets(f"{item.summary} ({item.id})" for item in diagnosis.info),
        ]
    if diagnosis.data_gaps:
        parts += ["<h2>Missing data</h2>", *bullets(diagnosis.data_gaps)]
    return page(diagnosis.verdict, describe_window(diagnosis), parts)


def describe_window(diagnosis: Diagnosis) -> str:
    """Return the time range in local time, its length, and the number of frames."""
    frames = f"{diagnosis.frames} {'frame' if diagnosis.frames == 1 else 'frames'}"
    if diagnosis.start is None or diagnosis.end is None:
        return frames
    begin, end = local_time(diagnosis.start), local_time(diagnosis.end)
    return f"{begin} to {end}, {seconds_text(diagnosis.end - diagnosis.start)}, {frames}"


def _finding(finding: Finding) -> Iterator[str]:
    yield f"<h3>{badge(finding.severity)} {safe(finding.summary)}</h3>"
    pids = f", pid {' '.join(map(str, finding.pids))}" if finding.pids else ""
    yield f'<p class="quiet"><code>{safe(finding.id)}</code>, confidence {finding.confidence:.2f}{pids}</p>'
    yield from (f"<p>Where: <code>{safe(text)}</code></p>" for text in describe_where(finding))
    yield '<div class="beside">'
    if finding.evidence:
        yield '<div><div class="wide"><table>'
        for item in finding.evidence[:_MAX_EVIDENCE_ROWS]:
            text = describe_evidence(item)
            yield (
                f'<tr title="{safe(f"{item.signal}, {item.statistic}")}"><td class="name">{safe(text.words)}</td>'
                f'<td>{safe(text.value)}</td><td class="name quiet">{safe(text.limit)}</td></tr>'
            )
        yield "</table></div>"
        more = len(finding.evidence) - _MAX_EVIDENCE_ROWS
        if more > 0:
            yield f'<p class="quiet">and {more} more</p>'
        yield "</div>"
    yield from advice_list(finding.advice)
    yield "</div>"


def build_charts(
    seconds: Mapping[str, Seconds], diagnosis: Diagnosis, lines: CodeSpans | None = None
) -> list[Chart]:
    """Return a chart per GPU with a finding; without findings, per diagnosed GPU; without those, per GPU.

    More than a few GPUs without findings are compared in one chart.
    """
    seen = {entries[-1].reading.device.label: entries for entries in seconds.values() if entries}
    order: list[str | None] = [finding.label for finding in diagnosis.findings]
    if not order or None in order:
        order += [judged.label for judged in diagnosis.judged]
    labels = [label for label in dict.fromkeys(order) if label is not None and label in seen]
    labels = labels or sorted(seen, key=lambda label: [int(part) for part in label.split(":")])
    shown = {label: seen[label] for label in labels}
    has_own = any(finding.label is not None for finding in diagnosis.findings)
    if len(shown) > _MAX_CHARTS_WITHOUT_FINDING and not has_own:
        models = Counter(entries[-1].reading.device.name for entries in shown.values())
        names = ", ".join(f"{count} {printable(model)}" for model, count in models.items())
        return [_chart(f"All GPUs: {names}", shown, diagnosis, ())]
    return [
        _chart(
            f"GPU {label}  {printable(entries[-1].reading.device.name)}",
            {label: entries},
            diagnosis,
            (lines or {}).get(label, ()),
        )
        for label, entries in shown.items()
    ]


def _chart(title: str, gpus: Mapping[str, Seconds], diagnosis: Diagnosis, lines: Sequence[LineSpan]) -> Chart:
    start = min(seconds[0].start for seconds in gpus.values())
    end = max(start + 1.0, *(seconds[-1].end for seconds in gpus.values()))
    own = [
        finding
        for finding in (*diagnosis.findings, *diagnosis.info)
        if finding.label is None or finding.label in gpus
    ]
    named = list(dict.fromkeys(item.signal for finding in own for item in finding.evidence))
    subjects, wanted = _choose_panels(named)
    panels: list[ChartPanel | None] = []
    for subject in subjects:
        if len(gpus) > 1 and subject.is_always_drawn:
            panels += [_comparison(subject, name, gpus) for name in _drawn_signals(subject, wanted)]
        else:
            label = _gpu_of_panel(subject, own)
            panel = _panel(subject, gpus[label] if label else next(iter(gpus.values())), wanted)
            if panel is not None and label and len(gpus) > 1:
                panel = replace(panel, title=f"{panel.title}, GPU {label}")
            panels.append(panel)
    return Chart(
        start,
        end,
        tuple(panel for panel in panels if panel is not None),
        title=title,
        spans=(
            *(_span(lane, finding, start, end) for lane, finding in enumerate(own)),
            *_code_spans(lines, len(own), start, end),
        ),
    )


def _code_spans(lines: Sequence[LineSpan], lane: int, start: float, end: float) -> Iterator[ChartSpan]:
    """Yield the most frequent lines of code over time, each in a lane of its own with its name at the first span."""
    seen = [line for line in lines if max(line.start, start) < min(line.end, end)]
    most = [text for text, _ in Counter(line.text for line in seen).most_common(_MAX_CODE_LANES)]
    named: set[str] = set()
    for number, line in enumerate(seen):
        if line.text in most:
            place = most.index(line.text)
            yield ChartSpan(
                max(line.start, start),
                min(line.end, end),
                "" if line.text in named else printable(line.text),
                color=f"band{place % _BAND_COLORS}",
                lane=lane + place,
                is_shaded=False,
                number=number,
            )
            named.add(line.text)


def _gpu_of_panel(subject: _PanelSignals, findings: Iterable[Finding]) -> str | None:
    """Return the GPU whose finding names a signal of a panel; None for findings about the node."""
    for finding in findings:
        if any(_SAME_PANEL.get(item.signal, item.signal) in subject.signals for item in finding.evidence):
            return finding.label
    return None


def _span(lane: int, finding: Finding, start: float, end: float) -> ChartSpan:
    begin = start if finding.start is None else min(max(finding.start, start), end)
    until = end if finding.end is None else min(max(finding.end, begin), end)
    has_pauses = any(item.signal in _PAUSES for item in finding.evidence)
    return ChartSpan(
        begin,
        until,
        finding.id + (" (from the first to the last pause)" if has_pauses else ""),
        text=finding.summary,
        color=severity_color(finding.severity),
        lane=lane,
        is_shaded=finding.severity != "info",
    )


def _choose_panels(named: Sequence[str]) -> tuple[list[_PanelSignals], list[str]]:
    """Return the panels to draw, and the signals that the evidence names.

    The GPU's activity comes first, then the panels of the evidence in its order, then the others that are always drawn.
    """
    wanted = list(dict.fromkeys(_SAME_PANEL.get(name, name) for name in named))
    listed = {name: subject for subject in _PANELS for name in subject.signals}
    always = [subject for subject in _PANELS if subject.is_always_drawn]
    found = [always[0], *(listed.get(name) or _panel_of_one_signal(name) for name in wanted), *always]
    return list({subject.title: subject for subject in found if subject is not None}.values()), wanted


def _drawn_signals(subject: _PanelSignals, named: Sequence[str]) -> list[str]:
    """Return the signals of a panel that are drawn."""
    return [name for name in subject.signals if name not in _ONLY_AS_EVIDENCE or name in named]


def _panel_of_one_signal(name: str) -> _PanelSignals | None:
    """Return a panel for a signal that no other panel has; None if it cannot be drawn over time."""
    known = signal_text(name)
    unit = None if known is None else _AXIS_UNITS.get(known.unit)
    return (
        None
        if known is None or unit is None
        else _PanelSignals(known.words[:1].upper() + known.words[1:], unit, {name: known.words})
    )


def _panel(subject: _PanelSignals, seconds: Seconds, named: Sequence[str]) -> ChartPanel | None:
    """Return a panel with the signals of one GPU; None if none of them has values."""
    has_processes = _PROCESS_SHARE in subject.signals
    if has_processes:
        pids = dict.fromkeys(pid for second in seconds for pid in second.shares)
        lines = [_line(f"pid {pid}", partial(_share, pid), seconds) for pid in pids]
    else:
        lines = [
            _line(_label(name, subject.signals[name], seconds), _value_of(name, seconds), seconds)
            for name in _drawn_signals(subject, named)
        ]
    known = [line for line in lines if not line.is_empty]
    if not known:
        return None
    start, end = seconds[0].start, max(seconds[-1].end, seconds[0].start + 1.0)
    content = arrange_lines(known, start, end) if has_processes else Lines(tuple(known))
    return ChartPanel(subject.title, content, _axis(subject, known), tuple(_gaps(seconds)))


def _comparison(subject: _PanelSignals, name: str, gpus: Mapping[str, Seconds]) -> ChartPanel | None:
    """Return a panel with one signal of several GPUs; None if it has no values."""
    lines = [_line(f"GPU {label}", _value_of(name, seconds), seconds) for label, seconds in gpus.items()]
    known = [line for line in lines if not line.is_empty]
    if not known:
        return None
    start, end = min(line.times[0] for line in known), max(line.times[-1] for line in known)
    titles = {_label(name, subject.signals[name], seconds) for seconds in gpus.values()}
    title = titles.pop() if len(titles) == 1 else f"{subject.signals[name]}, relative to each GPU's limit"
    first, *others = gpus.values()
    missing = [Interval(gap.start, gap.end) for gap in _gaps(first)]
    for seconds in others:
        missing = overlap(missing, [(gap.start, gap.end) for gap in _gaps(seconds)])
    gaps = tuple(ChartGap(*interval, _NOT_RECORDED) for interval in missing)
    return ChartPanel(
        f"{subject.title}: {title}",
        arrange_lines(known, start, max(end, start + 1.0)),
        _axis(subject, known),
        gaps,
    )


def _axis(subject: _PanelSignals, lines: Sequence[ChartLine]) -> Axis:
    values = [part for line in lines for part in (line.values, line.high) if part is not None]
    return make_axis(subject.unit, *values, is_whole=subject.is_always_drawn, min_top=subject.least)


def _gaps(seconds: Seconds) -> Iterator[ChartGap]:
    for before, after in pairwise(seconds):
        if after.start - before.end > _GAP_SECONDS:
            yield ChartGap(before.end, after.start, _NOT_RECORDED)


def _label(name: str, label: str, seconds: Seconds) -> str:
    """Return the label of a line; for ratios it names what 100% is."""
    limits = {"power_ratio": ("power_watts", "power_limit_watts", watts)}
    limits["memory_used_ratio"] = ("memory_used_bytes", "memory_total_bytes", long_size)
    if name not in limits:
        return label
    reading, limit, written = limits[name]
    whole = seconds[-1].reading.get(limit)
    if whole:
        return f"{label} (100% = {written(whole)})"
    highest = _highest_value(reading, seconds)
    return f"{label} (100% = {written(highest)}, the highest value)" if highest else label


def _highest_value(name: str, seconds: Seconds) -> float:
    return max((value for second in seconds if (value := second.mean(name)) is not None), default=0.0)


def _value_of(name: str, seconds: Seconds) -> Value:
    """Return a function that reads the value of a signal from a second."""
    if name in _DERIVED:
        return _DERIVED[name]
    if name == "power_ratio":
        return _ratio_of("power_watts", seconds[-1].reading.get("power_limit_watts"), seconds)
    if name == "memory_used_ratio":
        return _ratio_of("memory_used_bytes", seconds[-1].reading.get("memory_total_bytes"), seconds)

    def read(second: SecondSummary) -> float | None:
        mean = second.mean(name)
        if mean is not None:
            return mean
        for values in (second.reading.values, second.host, second.disk, second.nfs):
            if name in values:
                return values[name]
        return None

    return read


def _ratio_of(name: str, limit: float | None, seconds: Seconds) -> Value:
    whole = limit or _highest_value(name, seconds)

    def ratio(second: SecondSummary) -> float | None:
        value = second.mean(name)
        return None if value is None or not whole else min(1.0, value / whole)

    return ratio


def _line(label: str, value_of: Value, seconds: Seconds) -> ChartLine:
    values = [value_of(second) for second in seconds]
    lengths = [second.end - second.start for second in seconds]
    return make_line(
        label,
        np.array([(second.start + second.end) / 2 for second in seconds]),
        np.array([np.nan if value is None else value for value in values], np.float64),
        _GAP_SECONDS + max(lengths, default=0.0),
    )
