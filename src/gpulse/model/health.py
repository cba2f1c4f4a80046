"""What could not be read, why, and since when: health travels beside the data, never inside it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

from gpulse.model.device import ranges

Code = Literal[
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
"""not_supported: this hardware or kernel cannot say. no_permission: this user may not ask.
gpu_lost: the GPU fell off the bus or out of the machine. not_answering: a call has not come back.
timeout / failed: a call came back with an error. driver_*: NVML as a whole is out of reach.
unreadable: a file could not be read or understood. not_visible: something is hidden from here (another
user's process, another PID namespace). truncated / gap: a recording ends early or misses a stretch."""

EXPECTED: frozenset[Code] = frozenset({"not_supported", "not_visible"})
"""Codes that are facts about a machine rather than faults of it."""


class Health(NamedTuple):
    """One thing that is not as it should be."""

    source: str
    """Which source noticed it: nvml, gpm, host, disks, network, processes, recording, sampler."""
    code: Code
    detail: str
    since: float
    """Epoch seconds at which it was first seen."""
    subject: str | None = None
    """What it is about: `gpu 3`, a path, a pid; None for the source as a whole."""
    metrics: tuple[str, ...] = ()
    """The catalogue names that are missing because of it."""
    hint: str | None = None
    """The next thing to try."""

    @property
    def is_problem(self) -> bool:
        """True when somebody should look at it, false when the machine simply cannot say."""
        return self.code not in EXPECTED


def gathered(entries: Iterable[Health]) -> list[Health]:
    """What is the same for several GPUs said once, about `gpu 0-63`, since it was first seen.

    What is said of the driver as a whole is not repeated for its GPUs.
    """
    known = list(entries)
    driver = {entry.code for entry in known if entry.subject is None}
    alike: dict[object, list[Health]] = {}
    for entry in known:
        about_gpu = entry.subject is not None and entry.subject.startswith("gpu ")
        if about_gpu and entry.code.startswith("driver_") and entry.code in driver:
            continue
        words = entry.detail.translate(_WITHOUT_DIGITS)
        missing = () if entry.code in _OUT_OF_REACH else entry.metrics
        alike.setdefault((entry.source, entry.code, words, missing) if about_gpu else entry, []).append(entry)
    return [_as_one(group) for group in alike.values()]


_OUT_OF_REACH: frozenset[Code] = frozenset(
    {"gpu_lost", "not_answering", "driver_missing", "driver_mismatch", "driver_unloaded"}
)
"""Codes with which everything is missing, whatever was asked for."""
_WITHOUT_DIGITS = dict.fromkeys(map(ord, "0123456789"))
"""How long each of several GPUs has been silent is no difference."""


def _as_one(group: list[Health]) -> Health:
    if len(group) == 1:
        return group[0]
    oldest = min(group, key=lambda entry: entry.since)
    labels = dict.fromkeys(entry.subject.removeprefix("gpu ") for entry in group if entry.subject)
    return oldest._replace(subject=f"gpu {ranges(labels)}")
