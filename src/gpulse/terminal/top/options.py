"""What the live view can be told from outside."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gpulse.model.finding import Finding
from gpulse.model.frame import Frame
from gpulse.terminal.top.glyphs import Glyphs


def _none_found(_frame: Frame) -> Sequence[Finding]:
    return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Settings of the live view."""

    interval_seconds: float = 1.0
    """Time from one frame to the next, to begin with."""
    readonly: bool = False
    """Forbids to end processes."""
    killable: bool = True
    """False for a demo or a recording, whose processes do not live here."""
    gpus: Callable[[Frame], Frame] | None = None
    """Leaves out of each frame what is not to be shown."""
    findings: Callable[[Frame], Sequence[Finding]] = _none_found
    """What is wrong so far; asked about every frame, in order, on the sampling thread."""
    title: str = "gpulse"
    """What stands at the top left."""
    glyphs: Glyphs | None = None
    """The signs to draw with; those that fit this terminal when None."""
