"""Values that observers record and that checks and the report read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

HEAD = "head"
DATABASE = "victoria-metrics"


class Outage(NamedTuple):
    """A time during which the soak itself kept one part down."""

    part: str
    """`HEAD`, `DATABASE` or the name of a node."""
    action: str
    start: float
    ready: float | None = None
    """When the part answered again; None while it is down."""


class PageEvent(NamedTuple):
    """One thing that happened in a browser tab."""

    time: float
    tab: str
    kind: str
    """`load`, `status`, `open`, `close`, `console`, `page error`, `request failed`, `http error`, `not filled`."""
    text: str


class Usage(NamedTuple):
    """Memory and open files of one process at one moment."""

    time: float
    part: str
    pid: int
    memory_bytes: int
    files: int


class LogLine(NamedTuple):
    """One line that a process wrote."""

    part: str
    time: float | None
    """None for lines without a time, such as those of a traceback."""
    level: str
    text: str


class Contact(NamedTuple):
    """The nodes that were connected when the head was asked."""

    time: float
    connected: frozenset[str]


class FindingSeen(NamedTuple):
    """A finding in one answer of the head."""

    time: float
    node: str
    label: str | None
    id: str
    start: float | None


class FindingsPoll(NamedTuple):
    """All findings in one answer of the head."""

    time: float
    findings: tuple[FindingSeen, ...]


class Scrape(NamedTuple):
    """One scrape of a metrics page."""

    time: float
    part: str
    problem: str | None
    """What is wrong with the page; None when nothing is."""
    samples: int = 0


class Life(NamedTuple):
    """One start of an agent, from its first frame to its end."""

    node: str
    pid: int
    start: float
    end: float
    killed: bool
    counted: int | None
    """Frames that the agent said it had sampled, asked just before its end; None when it did not answer."""
    spooled: Mapping[bytes, frozenset[int]]
    """Frame numbers by run that were in its spool after its end."""


class Run(NamedTuple):
    """The stored frames of one start of an agent."""

    id: bytes
    node: str
    pid: int
    frames: Mapping[int, float]
    """Time by frame number."""


class Stored(NamedTuple):
    """Everything that the head's data directory holds, read after its end."""

    runs: Sequence[Run]
    duplicates: int
    """Samples of one series and frame that are stored more than once."""
    samples: Mapping[tuple[str, str], Sequence[float]]
    """Times of the utilization samples by node and GPU."""


class SessionFile(NamedTuple):
    """What the file of a session says."""

    name: str
    start: float
    end: float
    interval_seconds: float
    frame_ids: Sequence[int]
    times: Sequence[float]
    present: Mapping[str, Sequence[bool]]
    """By node, whether it is among the available clients of each frame."""
    frame_counts: Mapping[str, int]
    """By node, the number of frames that the file's list of nodes states."""
    findings: Sequence[tuple[str, str, str | None, float, int]]
    """Node, id, label, first time, and how often it came up."""
    finding_starts: Mapping[tuple[str, str | None, str], float]
    """By node, label and id, when each finding began, also where that was before the session."""


class Claim(NamedTuple):
    """A time as one source states it."""

    subject: str
    source: str
    time: float
    resolution_seconds: float


class Tolerance(NamedTuple):
    """How much a process may grow before it counts as a leak."""

    warmup_seconds: float
    memory_bytes: int
    memory_bytes_per_minute: float
    files: int


def tolerance(minutes: float) -> Tolerance:
    """Return the tolerance for a run of this length: short runs see caches fill and need more of it."""
    if minutes >= 10:
        return Tolerance(120.0, 12 << 20, float(1 << 20), 8)
    return Tolerance(30.0, 48 << 20, float(1 << 20), 16)
