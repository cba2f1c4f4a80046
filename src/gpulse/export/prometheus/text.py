"""Prometheus' text format: titles, labels, and families in one piece."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Literal, NamedTuple

from gpulse.model.metric import Value

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SAMPLES_A_PIECE = 1000
"""So many are written before somebody else gets a turn."""
Kind = Literal["gauge", "counter"]


class Family(NamedTuple):
    """All samples of one name."""

    name: str
    kind: Kind
    help: str
    samples: Iterable[tuple[Mapping[str, str] | str, Value | None]]
    """Labels, spelled already or not, and value; what is unknown has no line."""


def written(families: Iterable[Family]) -> Iterator[str]:
    """Families as text, one after the other, in pieces (some of them empty)."""
    for family in families:
        yield from _family(family)


def _family(family: Family) -> Iterator[str]:
    """One of them; nothing at all when it has no samples. A series that is there twice is told once."""
    head, told = title(family.name, family.kind, family.help), set()
    lines: list[str] = []
    for count, (labels, value) in enumerate(family.samples, 1):
        if value is not None and math.isfinite(value):
            series = labels if isinstance(labels, str) else spelled(labels)
            if series not in told:
                told.add(series)
                lines.append(f"{family.name}{series} {value}\n")
        if count % SAMPLES_A_PIECE == 0:
            yield head + "".join(lines) if lines else ""
            head = "" if lines else head
            lines.clear()
    yield head + "".join(lines) if lines else ""


def title(name: str, kind: Kind, help_text: str) -> str:
    """The two lines that a family begins with."""
    escaped = help_text.replace("\\", r"\\").replace("\n", r"\n")
    return f"# HELP {name} {escaped}\n# TYPE {name} {kind}\n"


def spelled(labels: Mapping[str, str]) -> str:
    """Labels in their braces."""
    if not labels:
        return ""
    inside = ",".join([f'{name}="{_escaped(value)}"' for name, value in labels.items()])
    return f"{{{inside}}}"


def added(labels: str, **more: str) -> str:
    """Some labels in their braces, and more after them."""
    return f"{labels[:-1]},{spelled(more)[1:]}"


def _escaped(value: str) -> str:
    """As Prometheus wants it; what UTF-8 cannot hold becomes a question mark."""
    clean = value if value.isascii() else value.encode("utf-8", "replace").decode()
    if '"' in clean or "\\" in clean or "\n" in clean:  # hardly ever
        return clean.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
    return clean


def accepts_gzip(header: str | None) -> bool:
    """Whether an `Accept-Encoding` header asks for gzip."""
    for part in (header or "").lower().split(","):
        name, _, weight = part.partition(";")
        if name.strip() in {"gzip", "*"}:
            return weight.replace(" ", "") not in {"q=0", "q=0.0", "q=0.00", "q=0.000"}
    return False
