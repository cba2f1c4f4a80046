"""Text format of Prometheus: metric families, labels and escaping."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Literal, NamedTuple

from gpulse.model.metric_catalog import Value
from gpulse.model.safe_text import replace_surrogates

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SAMPLES_PER_CHUNK = 1000
"""Samples that are formatted before other tasks can run."""
Kind = Literal["gauge", "counter"]


class MetricFamily(NamedTuple):
    """All samples of one metric name."""

    name: str
    kind: Kind
    help: str
    samples: Iterable[tuple[Mapping[str, str] | str, Value | None]]
    """Labels, formatted or by name, with their values; an unknown value gets no line."""


def format_families(families: Iterable[MetricFamily]) -> Iterator[str]:
    """Yield families as text in chunks, some of which may be empty."""
    for family in families:
        yield from _format_family(family)


def _format_family(family: MetricFamily) -> Iterator[str]:
    """Yield one family, or nothing when it has no samples; repeated series are written once."""
    head, seen = format_family_header(family.name, family.kind, family.help), set()
    lines: list[str] = []
    for count, (labels, value) in enumerate(family.samples, 1):
        if value is not None and math.isfinite(value):
            series = labels if isinstance(labels, str) else format_labels(labels)
            if series not in seen:
                seen.add(series)
                lines.append(f"{family.name}{series} {value}\n")
        if count % SAMPLES_PER_CHUNK == 0:
            yield head + "".join(lines) if lines else ""
            head = "" if lines else head
            lines.clear()
    yield head + "".join(lines) if lines else ""


def format_family_header(name: str, kind: Kind, help_text: str) -> str:
    """Return the HELP and TYPE lines of a family."""
    escaped = help_text.replace("\\", r"\\").replace("\n", r"\n")
    return f"# HELP {name} {escaped}\n# TYPE {name} {kind}\n"


def format_labels(labels: Mapping[str, str]) -> str:
    """Return labels in braces."""
    if not labels:
        return ""
    inside = ",".join([f'{name}="{_escape(value)}"' for name, value in labels.items()])
    return f"{{{inside}}}"


def add_labels(labels: str, **more: str) -> str:
    """Return formatted labels with more labels appended."""
    return f"{labels[:-1]},{format_labels(more)[1:]}"


def _escape(value: str) -> str:
    """Escape a label value; characters that UTF-8 cannot encode become question marks."""
    clean = replace_surrogates(value)
    if '"' in clean or "\\" in clean or "\n" in clean:  # rare
        return clean.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
    return clean


def accepts_gzip(header: str | None) -> bool:
    """Return whether an `Accept-Encoding` header asks for gzip."""
    for part in (header or "").lower().split(","):
        name, _, weight = part.partition(";")
        if name.strip() in {"gzip", "*"}:
            return weight.replace(" ", "") not in {"q=0", "q=0.0", "q=0.00", "q=0.000"}
    return False
