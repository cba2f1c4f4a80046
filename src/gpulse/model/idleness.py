"""When a GPU counts as idle."""

from __future__ import annotations

IDLE_RATIO = 0.01
"""A GPU that is busy for no more than that does nothing."""
