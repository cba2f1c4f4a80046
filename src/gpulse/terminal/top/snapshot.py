"""What one tick hands to the view: a frame, the rates since the one before, and the findings so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from gpulse.model.finding import Finding
from gpulse.model.frame import Frame
from gpulse.model.rates import Rates


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One instant with all that is shown of it."""

    frame: Frame
    rates: Rates = field(default_factory=lambda: Rates(interval_seconds=0.0))
    findings: Sequence[Finding] = ()
