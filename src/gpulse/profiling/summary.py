"""All blocks of a process in one table."""

from __future__ import annotations

from typing import Any, NamedTuple

from gpulse.profiling.loading import loading
from gpulse.profiling.report import Report


class Summary(NamedTuple):
    """The blocks of this process, in the order in which they were first used."""

    blocks: tuple[Report, ...]

    def to_dict(self) -> dict[str, Any]:
        """The blocks as JSON types."""
        return {"blocks": [report.to_dict() for report in self.blocks]}

    def __str__(self) -> str:
        with loading:
            from gpulse.profiling.view import summary_text  # noqa: PLC0415  only who prints needs it

        return summary_text(self.blocks)

    def _repr_html_(self) -> str:
        with loading:
            from gpulse.profiling.view import summary_html  # noqa: PLC0415

        return summary_html(self.blocks)
