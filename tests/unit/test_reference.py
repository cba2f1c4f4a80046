from __future__ import annotations

from pathlib import Path

from gpulse.cli.main import VERBS
from gpulse.export.reference import metrics_markdown

ROOT = Path(__file__).parents[2]


def test_the_metrics_document_is_that_of_the_catalogue() -> None:
    """Whoever changes the catalogue runs `make docs`."""

    assert metrics_markdown() == (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")


def test_the_readme_speaks_of_every_verb() -> None:
    """A verb that nobody is told about does not exist."""

    readme = (ROOT / "README.md").read_text(encoding="utf-8")

    assert [] == [verb for verb in VERBS if f"gpulse {verb}" not in readme]
