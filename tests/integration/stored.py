"""What a head has on disk, read after its end, and what its agents took."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from gpulse.cluster.agent.frame_buffer import parse_run_states
from gpulse.cluster.agent.run_index import AgentRunState
from gpulse.cluster.agent.spool import FRAME, RUN_STATES, SEGMENT_RUN_STATES
from gpulse.store.history.frame_blocks import run_number
from gpulse.store.local import LocalStore
from gpulse.store.log.reader import LogCursor
from gpulse.store.log.record_payloads import BATCH, FrameBatch
from gpulse.store.store import StoredEvent, StoredNode
from tests.queries import query

_METRIC = "gpu_utilization_ratio"
_AGES = 1e11
"""Later than any time in a test."""


class Stored(NamedTuple):
    """Everything that a data directory holds of the frames."""

    frames: Mapping[bytes, Mapping[int, float]]
    """By run, the time of every frame by its number, on the head's clock."""
    doubled: int
    """How many samples of a GPU are there more than once."""
    nodes: Mapping[int, StoredNode]
    owners: Mapping[bytes, str]
    """By run, the name of its node."""
    events: list[StoredEvent]
    sealed_to: int
    """Up to which position of the log the history holds everything."""

    def of(self, name: str) -> dict[bytes, Mapping[int, float]]:
        """The runs of one node that have frames."""
        return {run: found for run, found in self.frames.items() if self.owners[run] == name}

    def said(self, kind: str, name: str | None = None) -> list[StoredEvent]:
        """The events of a kind."""
        return [
            event
            for event in self.events
            if event.kind == kind
            and (name is None or (event.node is not None and self.nodes[event.node].name == name))
        ]


def read_stored(data_dir: Path) -> Stored:
    """Read a data directory that no head holds."""
    counts: Counter[tuple[int, int, int]] = Counter()
    times: dict[int, dict[int, float]] = {}
    with LocalStore(str(data_dir)) as archive:
        names = {run_number(run): run for run in archive.runs()}
        for found in archive.scan(query("gpu", [_METRIC], start=0.0, end=_AGES)):
            rows = zip(
                found.runs.tolist(),
                found.sequences.tolist(),
                found.series.tolist(),
                found.times.tolist(),
                strict=True,
            )
            for run, sequence, series, time in rows:
                counts[run, sequence, hash(found.keys[series])] += 1
                times.setdefault(run, {})[sequence] = time
        nodes = archive.nodes()
        return Stored(
            {names[run]: dict(sorted(of.items())) for run, of in times.items()},
            sum(count - 1 for count in counts.values()),
            nodes,
            {run: nodes[known.node].name for run, known in archive.runs().items() if known.node is not None},
            archive.events(query(start=0.0, end=_AGES)),
            archive._history.sealed_to,
        )


def logged(data_dir: Path) -> dict[bytes, int]:
    """How far each run is in the log, read without touching anything; the order of its frames is checked."""
    last: dict[bytes, int] = {}
    with LogCursor(f"{data_dir}/log") as cursor:
        for record in cursor:
            if record.kind != BATCH:
                continue
            batch = FrameBatch.from_bytes(record.payload)
            assert batch.first > last.get(batch.run, 0), (
                "a frame is in the log a second time, or out of order"
            )
            last[batch.run] = batch.last
    return last


class Taken(NamedTuple):
    """What an agent took, by its own spool, read after its end."""

    runs: Mapping[bytes, AgentRunState]
    """The runs that it has not been told to forget, oldest first."""
    kept: Mapping[bytes, set[int]]
    """The frames that are in the spool."""


def read_taken(state_dir: Path) -> Taken:
    """Read an agent's spool that no agent holds."""
    runs: Mapping[bytes, AgentRunState] = {}
    kept: dict[bytes, set[int]] = {}
    with LogCursor(f"{state_dir}/spool") as cursor:
        for record in cursor:
            if record.kind in (RUN_STATES, SEGMENT_RUN_STATES):
                runs, _ = parse_run_states(record.payload)
            elif record.kind == FRAME:
                kept.setdefault(record.payload[:16], set()).add(
                    int.from_bytes(record.payload[16:24], "little")
                )
    return Taken(runs, kept)


def check_complete(found: Stored, taken: Taken, name: str) -> None:
    """Every frame that an agent took is stored once, in order; those that it could not bring home yet are in its spool."""
    assert found.doubled == 0
    for run, note in taken.runs.items():
        frames = found.frames.get(run, {})
        assert note.last > 0
        kept = taken.kept.get(run, set())
        missing = [
            number for number in range(1, note.last + 1) if number not in frames and number not in kept
        ]
        assert not missing, f"{name} took {note.last} frames; {missing} are nowhere"
        assert max(frames, default=0) <= note.last
    for frames in found.of(name).values():
        check_order(frames)


def check_order(frames: Mapping[int, float]) -> None:
    """Numbers without a hole from 1 on, and times in their order."""
    holes = sorted({*range(1, max(frames, default=0) + 1)} - {*frames})
    assert not holes, f"{holes} of {len(frames) + len(holes)} frames are not stored"
    check_times(frames)


def check_times(frames: Mapping[int, float]) -> None:
    """Times are in the order of the numbers."""
    assert all(earlier <= later for earlier, later in pairwise(frames.values()))
