"""Of which GPU a finding speaks, as people name it: `3`, or `3:1` for a MIG instance."""

from __future__ import annotations

import re
from collections.abc import Iterable

from gpulse.model.device import ranges
from gpulse.model.finding import Finding

_NAMED = re.compile(r"GPU (\d+(?::\d+)?)(?=[ :])")


def label_of(finding: Finding) -> str | None:
    """The label of its GPU; None when it is about the whole node."""
    if finding.label is None and finding.gpu is not None:
        return str(finding.gpu)
    return finding.label


def about(finding: Finding, labels: Iterable[str]) -> str:
    """Its sentence, with these GPUs in place of its own."""
    which = ranges(labels)
    return _NAMED.sub(f"GPU {which}", finding.summary, count=1) if which else finding.summary
