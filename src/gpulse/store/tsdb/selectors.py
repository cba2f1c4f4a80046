"""PromQL selectors of the series that a question is about."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence

from gpulse.model.metric import CATALOGUE, Scope
from gpulse.model.series import subject_label

_MAX_NAMES = 250
_MAX_TEXT = 6000
"""Time-series databases refuse questions that are too long; this many characters of names may be in one."""
_META = re.compile(r"[\\.+*?()|\[\]{}^$]")


def selector(
    scope: Scope,
    metric: str,
    *,
    nodes: Collection[str] | None,
    subjects: Collection[str] | None,
    labels: Mapping[str, str],
) -> str:
    """The series of a metric.

    Args:
        scope: Whose metric it is.
        metric: Its name in the catalogue.
        nodes: Only of these, by name.
        subjects: Only of these, as stores name them.
        labels: What every series must have.
    """
    conditions = [f"{name}={quoted(value)}" for name, value in sorted(labels.items())]
    if nodes is not None:
        conditions.append(_among("node", nodes))
    label = subject_label(scope)
    if subjects is not None and label is not None:
        conditions.append(_among(label, subjects))
    return f"{CATALOGUE[scope][metric].prometheus}{{{','.join(conditions)}}}"


def matching(
    labels: Mapping[str, str], nodes: Collection[str] | None = None, *, name: str | None = None
) -> str:
    """The braces of a selector: labels that a series must have, its node, and a pattern for its name."""
    conditions = [f"{label}={quoted(value)}" for label, value in sorted(labels.items())]
    if name is not None:
        conditions.append(f"__name__=~{quoted(name)}")
    if nodes is not None:
        conditions.append(_among("node", nodes))
    return f"{{{','.join(conditions)}}}"


def quoted(text: str) -> str:
    """A string as PromQL writes it."""
    clean = text.encode("utf-8", "replace").decode()
    escaped = clean.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
    return f'"{escaped}"'


def groups(names: Collection[str]) -> Iterator[Sequence[str]]:
    """Names in groups, each short enough for one question."""
    group: list[str] = []
    size = 0
    for name in sorted(names):
        length = 2 * len(name.encode("utf-8", "replace")) + 1
        if group and (len(group) >= _MAX_NAMES or size + length > _MAX_TEXT):
            yield group
            group, size = [], 0
        group.append(name)
        size += length
    if group:
        yield group


def _among(label: str, values: Collection[str]) -> str:
    if len(values) == 1:
        return f"{label}={quoted(next(iter(values)))}"
    pattern = "|".join(_META.sub(r"\\\g<0>", value) for value in sorted(values))
    return f"{label}=~{quoted(pattern)}"
