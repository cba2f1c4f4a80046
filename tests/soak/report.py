"""Report of a run: what was done, what was counted, how memory and files developed, and every violation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tests.soak.observations import Outage, Usage

_MIB = 1 << 20


class Summary(NamedTuple):
    """Everything that the report shows."""

    seed: int
    minutes: float
    """As asked for."""
    took_minutes: float
    done: Mapping[str, int]
    """How often each disturbance was carried out."""
    counts: Mapping[str, int]
    usages: Sequence[Usage]
    outages: Sequence[Outage]
    violations: Sequence[str]


def text(summary: Summary) -> str:
    """Return the report."""
    lines = ["", f"soak of {summary.took_minutes:.1f} minutes, seed {summary.seed}", ""]
    lines += _table(("disturbance", "times"), [(name, str(n)) for name, n in summary.done.items()])
    downtime = Counter[str]()
    for outage in summary.outages:
        downtime[outage.part] += round((outage.ready or outage.start) - outage.start)
    lines += ["", "downtime: " + ", ".join(f"{part} {seconds} s" for part, seconds in downtime.items()), ""]
    lines += _table(("counted", ""), [(name, f"{n:,}") for name, n in summary.counts.items()])
    lines += ["", *usage_table(summary.usages), ""]
    if summary.violations:
        count = len(summary.violations)
        lines.append("1 violation:" if count == 1 else f"{count} violations:")
        lines += [f"  {number}. {one}" for number, one in enumerate(summary.violations, 1)]
        lines.append(f"run again with: make soak MINUTES={summary.minutes:g} SEED={summary.seed}")
    else:
        lines.append("no violations")
    return "\n".join(lines)


def usage_table(usages: Sequence[Usage]) -> list[str]:
    """Return memory and open files of every process at its first and last observation."""
    own: dict[tuple[str, int], list[Usage]] = {}
    for usage in usages:
        own.setdefault((usage.part, usage.pid), []).append(usage)
    rows = []
    for (part, pid), seen in sorted(own.items()):
        first, last = seen[0], seen[-1]
        rows.append(
            (
                part,
                str(pid),
                f"{last.time - first.time:.0f}",
                f"{first.memory_bytes / _MIB:.1f}",
                f"{last.memory_bytes / _MIB:.1f}",
                f"{max(usage.memory_bytes for usage in seen) / _MIB:.1f}",
                str(first.files),
                str(last.files),
            )
        )
    return _table(("process", "pid", "seconds", "MiB start", "end", "most", "files start", "end"), rows)


def _table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    return [
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in (header, *rows)
    ]
