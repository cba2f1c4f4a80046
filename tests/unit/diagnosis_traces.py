"""The labelled recordings of real runs, read once for a whole session of tests."""

from __future__ import annotations

import gzip
import json
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from gpulse.model.frame import Frame
from gpulse.sources.recording_reader import TraceDecoder

_ROOT = Path(__file__).parents[2]
_TRACES = _ROOT / "tests" / "data" / "traces"
_DEMO = _ROOT / "src" / "gpulse" / "sources" / "demo"


class Label(NamedTuple):
    """What must come out of a recording."""

    expect: tuple[str, ...]
    """The findings; empty for a healthy run."""
    right: frozenset[str]
    """What is accepted: those, and their neighbours that say the same."""
    begin: float
    end: float
    """Between these the run is in its steady state."""
    mark: float | None
    """When the trouble began, where it did not from the start."""


@cache
def labels() -> dict[str, Label]:
    """What must come out, by recording."""
    raw: dict[str, dict[str, Any]] = json.loads((_TRACES / "labels.json").read_text())
    return {
        name: Label(
            expect=tuple(entry["expect"]),
            right=frozenset((*entry["expect"], *entry.get("also_right", ()))),
            begin=entry["begin"],
            end=entry["end"],
            mark=entry["marks"][0]["at"] if entry["marks"] else None,
        )
        for name, entry in raw.items()
    }


@cache
def whole(name: str) -> tuple[Frame, ...]:
    """Every frame of a recording, with its start-up."""
    path = next(path for path in (_TRACES / f"{name}.jsonl.gz", _DEMO / f"{name}.jsonl.gz") if path.exists())
    decoder = TraceDecoder()
    frames = map(decoder.feed, gzip.decompress(path.read_bytes()).decode().splitlines())
    return tuple(frame for frame in frames if frame is not None)


@cache
def steady(name: str) -> tuple[Frame, ...]:
    """The frames of a recording in its steady state."""
    label = labels()[name]
    return tuple(frame for frame in whole(name) if label.begin <= frame.time <= label.end)


NAMES = tuple(labels())
SICK = tuple(name for name in NAMES if labels()[name].expect)
HEALTHY = tuple(name for name in NAMES if not labels()[name].expect)
