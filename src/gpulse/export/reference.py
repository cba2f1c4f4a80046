"""The catalogue as a document: `python -m gpulse.export.reference` writes docs/metrics.md."""

from __future__ import annotations

from gpulse.model.metric import CATALOGUE, Scope

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
    """Every metric with its unit, its meaning and its names elsewhere."""
    lines = [
        "# Metrics",
        "",
        "Every number that gpulse knows. The names are the same in JSON, CSV, SQLite and recordings, and they",
        "do not change once released. Prometheus names put `gpulse_`, the scope and `_` in front. A value that",
        "could not be read is `null` in JSON, empty in CSV, NULL in SQLite and absent in a recording: never 0.",
        "*Derived* values are computed from two readings a short time apart.",
        "",
        "This page is made from the catalogue in `src/gpulse/model/metric.py` by `make docs`.",
    ]
    for scope, metrics in CATALOGUE.items():
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


if __name__ == "__main__":
    print(metrics_markdown(), end="")
