"""Recordings of other programs than those that the rules were made with."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from gpulse.diagnosis.engine import diagnose
from gpulse.model.frame import Frame
from gpulse.sources.recording_reader import Recording

_FOLDER = Path(__file__).parents[1] / "data" / "recordings"
_LABELS: dict[str, dict[str, Any]] = json.loads((_FOLDER / "labels.json").read_text())


@cache
def frames(name: str) -> tuple[Frame, ...]:
    """A whole recording."""
    return tuple(Recording(_FOLDER / f"{name}.jsonl.gz"))


@pytest.mark.parametrize("name", _LABELS)
def test_the_induced_bottleneck_is_named(name: str) -> None:
    """First, in the steady state; and nothing at all where nothing was induced."""
    label = _LABELS[name]
    part = [frame for frame in frames(name) if label["begin"] <= frame.time <= label["end"]]
    found = [finding.id for finding in diagnose(part).findings]

    if label["expect"]:
        assert found
        assert found[0] in [*label["expect"], *label.get("also_right", ())]
    else:
        assert [] == found


@pytest.mark.parametrize("name", _LABELS)
def test_a_start_does_not_lead_astray(name: str) -> None:
    """Over the whole file, from the program's first moment to its last, nothing wrong comes first."""
    label = _LABELS[name]
    found = [finding.id for finding in diagnose(frames(name)).findings]

    assert set(found[:1]) <= {*label["expect"], *label.get("also_right", ())}
