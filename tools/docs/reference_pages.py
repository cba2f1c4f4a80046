"""The pages docs/reference/metrics.md and docs/reference/findings.md, from the metric catalogue and the rules."""

from __future__ import annotations

from collections.abc import Iterator

from gpulse.diagnosis.finding_texts import FAMILY_TITLES, ManualEntry, build_entries
from gpulse.diagnosis.second_summary import SIGNAL_GROUPS
from gpulse.model.metric_catalog import CATALOG, Scope

_TITLES: dict[Scope, str] = {
    "gpu": "GPU",
    "host": "Host",
    "disk": "Disk",
    "filesystem": "File system",
    "network": "Network interface",
    "process": "Process",
    "cgroup": "Control group",
}


def metrics_markdown() -> str:
    """Return every metric with its unit, its meaning and its names in DCGM and OpenTelemetry."""
    lines = [
        "# Metrics",
        "",
        "Every metric that gpulse collects. The names are the same in JSON, CSV, SQLite and recordings, and do not",
        "change once released. In Prometheus, `gpulse_`, the scope and `_` come before the name: `power_watts` of a GPU",
        "is `gpulse_gpu_power_watts`. A value that cannot be read is `null` in JSON, empty in CSV, NULL in SQLite and",
        "absent in a recording; it is never 0. *Derived* values are computed from two readings a short time apart.",
        "",
        "<!-- Generated from src/gpulse/model/metric_catalog.py by `make docs`; do not edit. -->",
    ]
    for scope, metrics in CATALOG.items():
        lines += [
            "",
            f"## {_TITLES[scope]}",
            "",
            "| name | kind | unit | meaning | DCGM | OpenTelemetry |",
            "|---|---|---|---|---|---|",
        ]
        for metric in metrics.values():
            kind = f"{metric.kind}, derived" if metric.derived else metric.kind
            lines.append(
                f"| `{metric.name}` | {kind} | {metric.unit} | {metric.help} | {_code(metric.dcgm)} | {_code(metric.otel)} |"
            )
    return "\n".join(lines) + "\n"


def _code(name: str | None) -> str:
    return f"`{name}`" if name else ""


def diagnosis_markdown() -> str:
    """Return every finding with its meaning, thresholds and advice."""
    known = build_entries()
    lines = [*_introduction(known), *_table(known)]
    for entry in known:
        lines += _section(entry)
    return "\n".join(lines) + "\n"


def _introduction(known: list[ManualEntry]) -> Iterator[str]:
    informational = sum(entry.informational for entry in known)
    yield f"""\
# Findings

Every finding of `gpulse why`, with its meaning, how it is recognized, its thresholds and what to do about it.
`gpulse explain ID` prints the same for one finding. [How the diagnosis works](../explanation/diagnosis.md) explains
the method.

*Informational* findings are printed as notes and are never the verdict; {informational} of the {len(known)} findings
below are marked as informational.

<!-- Generated from the rules in src/gpulse/diagnosis/rules by `make docs`; do not edit. -->

## Signals

The *needs* of a finding name the signals without which it cannot be judged:
"""
    for signal, words in SIGNAL_GROUPS.items():
        yield f"- `{signal}`: {words}"
    yield """
## All findings
"""


def _table(known: list[ManualEntry]) -> Iterator[str]:
    yield "| finding | what it says | family | severity |"
    yield "|---|---|---|---|"
    for entry in known:
        mark = " *(informational)*" if entry.informational else ""
        yield f"| [`{entry.id}`](#{entry.id}) | {_cell(entry.title)}{mark} | {entry.family} | {_cell(entry.severity)} |"


def _section(entry: ManualEntry) -> Iterator[str]:
    yield ""
    yield f"## {entry.id}"
    yield ""
    yield f"**{entry.title}.** {entry.means}"
    yield ""
    yield f"Family: {FAMILY_TITLES[entry.family]}. Severity: {_lowered(entry.severity)}"
    if entry.informational:
        yield ""
        yield "Informational: this rule has not yet fired on a recording of a real run."
    yield ""
    yield f"*Recognized by:* {entry.recognised}"
    for title, items in (("Thresholds", entry.limits), ("Needs", entry.needs), ("Sources", entry.sources)):
        if items:
            yield ""
            yield f"*{title}:* {'; '.join(items)}."
    yield ""
    yield "*What to do:*"
    yield ""
    for place, advice in enumerate(entry.advice, start=1):
        yield f"{place}. {advice.do}  "
        yield f"   Why: {advice.why}.  "
        yield f"   To check: {advice.confirm}."


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _lowered(text: str) -> str:
    return text[:1].lower() + text[1:]
