"""What all tests with real processes share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.commands import serving_commands


@pytest.fixture(scope="session", autouse=True)
def _commands() -> Iterator[None]:
    """Commands are imported once, and not for each one that is run."""
    with serving_commands():
        yield
