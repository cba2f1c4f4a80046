"""A report about a job as one HTML file that needs nothing else: figures, curves and a map of its GPUs as inline SVG."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gpulse.export import job_words as words
from gpulse.export.job_curves import LEVELS, over_time, safe, severity_color
from gpulse.model.units import UNKNOWN, energy, share, size, sizes, watts
from gpulse.reports.job_report import JobGpu, JobReport

_MAX_GPUS = 512
_STYLE = """
:root { color-scheme: light dark; --ink: #1f2328; --quiet: #59636e; --paper: #ffffff; --line: #d1d9e0; --card: #f6f8fa;
  --c0: #e6e9ec; --c1: #dcebf5; --c2: #c3dff0; --c3: #a5d0e8; --c4: #84bfdf; --c5: #62add4; --c6: #4298c6; --c7: #2683b6; --c8: #116ea4; --c9: #075a8c; --c10: #044870; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --quiet: #9198a1; --paper: #0d1117; --line: #30363d; --card: #161b22;
  --c0: #22272e; --c1: #12304a; --c2: #143c5c; --c3: #174a70; --c4: #1b5985; --c5: #20699b; --c6: #297ab1; --c7: #388cc5; --c8: #519fd6; --c9: #74b6e4; --c10: #a3d1f0; }
  svg polyline, svg circle, svg tspan { filter: brightness(1.35); } svg .here { fill: #fff; }
  svg .name { paint-order: stroke; stroke: #d0d7de; stroke-width: 3px; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 1200px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; margin-bottom: .2rem; overflow-wrap: anywhere; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; } h3 { font-size: 1rem; margin: 1rem 0 .2rem; }
.quiet { color: var(--quiet); }
.cards { display: flex; flex-wrap: wrap; gap: .7rem; margin: 1.2rem 0; } .card { background: var(--card); border: 1px solid var(--line); border-radius: .5rem; padding: .5rem .9rem; min-width: 8.5rem; }
.card b { display: block; font-size: 1.35rem; line-height: 1.3; } .card span { color: var(--quiet); font-size: .87rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1.2rem; } dt { color: var(--quiet); } dd { margin: 0; overflow-wrap: anywhere; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th { text-align: right; font-weight: 600; white-space: nowrap; border-bottom: 1px solid var(--line); } td { text-align: right; white-space: nowrap; }
th, td { padding: .15rem .9rem .15rem 0; } th.name, td.name { text-align: left; } tbody tr:hover { background: var(--card); }
.badge { display: inline-block; padding: 0 .5em; border-radius: .25em; font-size: .85em; color: #000; }
code { font: .92em ui-monospace, monospace; }
svg { width: 100%; height: auto; display: block; } svg text { font: 12px system-ui, sans-serif; fill: var(--quiet); }
svg .name { fill: #000; } svg .panel { font-weight: 600; fill: var(--ink); } svg .grid { stroke: var(--line); } svg .base { stroke: var(--quiet); } svg .here { fill: #000; opacity: 0; } svg .here:hover { opacity: .1; }
""" + "\n".join(f".u{place} {{ fill: var(--c{place}); }}" for place in range(LEVELS))


def page(report: JobReport) -> str:
    """The whole page. Every text that is not our own is escaped."""
    title = words.headline(report)
    body = [
        f"<h1>{safe(title)}</h1>",
        f'<p class="quiet">{safe(words.subtitle(report))}</p>',
        *_cards(report),
        *_facts(report),
        *_metrics(report),
        *over_time(report),
        *_findings(report),
        *_gpus(report),
        *_data_gaps(report),
    ]
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{safe(title)}</title><style>{_STYLE}</style></head><body>",
            *body,
            "</body></html>",
            "",
        ]
    )


def _cards(report: JobReport) -> Iterator[str]:
    others = report.cluster.utilization_mean
    cards = [
        (words.gpu_hours(report.held_seconds), "held"),
        (
            share(report.utilization_mean),
            "GPU busy" + ("" if others is None else f", cluster {share(others)}"),
        ),
        (words.idle_share(report), "of the time held but idle"),
        (energy(report.energy_joules), "energy"),
    ]
    if report.untouched_gpus is not None:
        cards.append((str(report.untouched_gpus), "GPUs never touched"))
    yield '<div class="cards">'
    yield from (
        f'<div class="card"><b>{safe(said)}</b><span>{safe(what)}</span></div>' for said, what in cards
    )
    yield "</div>"


def _facts(report: JobReport) -> Iterator[str]:
    yield "<dl>"
    yield from (f"<dt>{safe(name)}</dt><dd>{safe(text)}</dd>" for name, text in words.facts(report))
    yield "</dl>"


def _metrics(report: JobReport) -> Iterator[str]:
    rows = words.measured(report)
    if rows:
        yield "<h2>What the GPUs did</h2>"
        yield from _table(
            ("", "mean", "peak", "cluster mean"),
            ([one.title, one.mean, one.peak, one.cluster] for one in rows),
        )


def _table(heads: Sequence[str], rows: Iterator[Sequence[str]], left: int = 1) -> Iterator[str]:
    """A table whose first columns are names; a column that says nothing is left out."""

    def cells(kind: str, texts: Sequence[str]) -> str:
        opened = [f'<{kind} class="name">' if place < left else f"<{kind}>" for place in range(len(texts))]
        return "".join(f"{tag}{safe(text)}</{kind}>" for tag, text in zip(opened, texts, strict=True))

    texts = [list(row) for row in rows]
    telling = [
        place
        for place in range(len(heads))
        if place == 0 or any(row[place] not in ("", UNKNOWN) for row in texts)
    ]
    left = sum(place < left for place in telling)
    heads, texts = [heads[place] for place in telling], [[row[place] for place in telling] for row in texts]
    yield f'<div class="wide"><table><thead><tr>{cells("th", heads)}</tr></thead><tbody>'
    yield from (f"<tr>{cells('td', row)}</tr>" for row in texts)
    yield "</tbody></table></div>"


def _findings(report: JobReport) -> Iterator[str]:
    found = words.findings(report)
    if found:
        yield "<h2>Findings</h2>"
    for finding in found:
        place = f"{finding.places}: " if finding.places else ""
        yield (
            f'<h3><span class="badge" style="background:{severity_color(finding.severity)}">{safe(finding.severity)}</span> '
            f"{safe(place + finding.summary)}</h3>"
        )
        yield f'<p class="quiet"><code>{safe(finding.id)}</code>, {safe(finding.when)}</p>'
        if finding.advice:
            yield "<ul>"
            for advice in finding.advice:
                do, why = (words.text(part, 400) for part in advice)
                yield f'<li>{safe(do)}<br><span class="quiet">Why: {safe(why)}.</span></li>'
            yield "</ul>"


def _gpus(report: JobReport) -> Iterator[str]:
    rows = report.gpu_rows
    if not rows:
        return
    yield "<h2>GPUs</h2>"
    heads = (
        "GPU",
        "model",
        "",
        "allocated",
        "held",
        "idle",
        "busy",
        "SM",
        "tensor",
        "DRAM",
        "memory",
        "power",
        "peak",
        "energy",
    )
    yield from _table(heads, (_cells(row) for row in rows[:_MAX_GPUS]), left=3)
    if report.gpus > _MAX_GPUS:
        yield f'<p class="quiet">and {report.gpus - _MAX_GPUS} more</p>'


def _cells(row: JobGpu) -> list[str]:
    used, total = row.peak("memory_used_bytes"), row.memory_total_bytes
    use = row.use or ""
    return [
        words.gpu_name(row),
        words.text(row.model or UNKNOWN, 40),
        "shared" if use == "used" and row.shared else "" if use == "used" else use,
        words.span_hours(row.allocated_seconds),
        words.span_hours(row.held_seconds),
        words.span_hours(row.idle_seconds),
        share(row.utilization_mean),
        *(share(row.mean(name)) for name in ("sm_active_ratio", "tensor_active_ratio", "dram_active_ratio")),
        size(used) if total is None else sizes(used, total),
        watts(row.mean("power_watts")),
        watts(row.peak("power_watts")),
        energy(row.energy_joules),
    ]


def _data_gaps(report: JobReport) -> Iterator[str]:
    gaps = words.data_gaps(report)
    if gaps:
        yield "<h2>What is not known</h2><ul>"
        yield from (f"<li>{safe(gap)}</li>" for gap in gaps)
        yield "</ul>"
