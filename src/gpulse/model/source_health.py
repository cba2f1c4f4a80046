"""Health of the data sources: what could not be read, why, and since when."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Literal, NamedTuple

from gpulse.model.device import format_ranges

HealthCode = Literal[
    "not_supported",
    "no_permission",
    "gpu_lost",
    "not_answering",
    "timeout",
    "failed",
    "driver_missing",
    "driver_mismatch",
    "driver_unloaded",
    "unreadable",
    "not_visible",
    "truncated",
    "gap",
]
"""not_supported: this hardware or kernel does not provide it. no_permission: this user may not read it.
gpu_lost: the GPU fell off the bus or was removed. not_answering: a call has not returned.
timeout / failed: a call returned an error. driver_*: NVML as a whole is unavailable.
unreadable: a file could not be read or parsed. not_visible: something is hidden from here (another
user's process, another PID namespace). truncated / gap: a recording ends early or has a gap."""

EXPECTED_CODES: frozenset[HealthCode] = frozenset({"not_supported", "not_visible"})
"""Codes that are properties of a machine, not faults."""


class Health(NamedTuple):
    """One problem or limitation of a data source."""

    source: str
    """Source that noticed it: nvml, gpm, host, disks, network, processes, recording, sampler."""
    code: HealthCode
    detail: str
    since: float
    """When it was first noticed, in epoch seconds."""
    subject: str | None = None
    """What it is about: `gpu 3`, a path, a PID; None for the whole source."""
    metrics: tuple[str, ...] = ()
    """Metrics that are missing because of it."""
    hint: str | None = None
    """The next thing to try."""

    @property
    def is_problem(self) -> bool:
        """True when someone should look at it, False when the machine simply does not provide the data."""
        return self.code not in EXPECTED_CODES


def merge_gpu_entries(entries: Iterable[Health]) -> list[Health]:
    """Merge equal entries of several GPUs into one about `gpu 0-63`, since the earliest of them.

    Entries about the whole driver are not repeated for its GPUs.
    """
    known = list(entries)
    driver = {entry.code for entry in known if entry.subject is None}
    groups: dict[object, list[Health]] = {}
    for entry in known:
        about_gpu = entry.subject is not None and entry.subject.startswith("gpu ")
        if about_gpu and entry.code.startswith("driver_") and entry.code in driver:
            continue
        words = entry.detail.translate(_WITHOUT_DIGITS)
        missing = () if entry.code in _UNREACHABLE_CODES else entry.metrics
        groups.setdefault((entry.source, entry.code, words, missing) if about_gpu else entry, []).append(
            entry
        )
    return [_as_one(group) for group in groups.values()]


_UNREACHABLE_CODES: frozenset[HealthCode] = frozenset(
    {"gpu_lost", "not_answering", "driver_missing", "driver_mismatch", "driver_unloaded"}
)
"""Codes for which all metrics are missing."""
_WITHOUT_DIGITS = dict.fromkeys(map(ord, "0123456789"))
"""Entries that differ only in numbers, such as a duration, are merged."""


def _as_one(group: list[Health]) -> Health:
    if len(group) == 1:
        return group[0]
    oldest = min(group, key=lambda entry: entry.since)
    labels = dict.fromkeys(entry.subject.removeprefix("gpu ") for entry in group if entry.subject)
    return oldest._replace(subject=f"gpu {format_ranges(labels)}")


def format_subject(subject: str) -> str:
    """Return the subject of a health entry as people write it: `gpu 3` becomes `GPU 3`, `gpu 0-3` becomes `GPUs 0-3`."""
    if not subject.startswith("gpu "):
        return subject
    labels = subject.removeprefix("gpu ")
    return f"{'GPUs' if re.search('[-,]', labels) else 'GPU'} {labels}"
