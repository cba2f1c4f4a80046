"""A JSON object."""

from __future__ import annotations

from typing import Any

Document = dict[str, Any]
