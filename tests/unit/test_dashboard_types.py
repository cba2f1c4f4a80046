"""The types that the dashboard's JavaScript is checked against."""

from __future__ import annotations

from tests.fixtures.api_types import TYPES_FILE, render_types


def test_the_dashboard_is_checked_against_the_answers_of_the_head() -> None:
    """The file of types is what the OpenAPI document says; `make types` writes it."""
    assert render_types() == TYPES_FILE.read_text(encoding="utf-8")
