"""States of GPUs by their readings and processes, by which the head and the dashboard are tested."""

from __future__ import annotations

from typing import Any

FOLD = {"pid": 1, "user": "ada", "job": "harvest:fold"}
STATE_CASES: list[tuple[dict[str, float | None], list[dict[str, Any]] | None, str]] = [
    ({"gpu_utilization_ratio": 0.5}, [{"pid": 1}], "busy"),
    ({"gpu_utilization_ratio": 0.5}, [], "busy"),
    ({"gpu_utilization_ratio": 0.0}, [{"pid": 1}], "idle"),
    ({"gpu_utilization_ratio": 0.0, "memory_used_bytes": 9 << 30}, [], "idle"),
    ({"gpu_utilization_ratio": 0.0, "memory_used_bytes": 500 << 20}, [], "free"),
    ({"gpu_utilization_ratio": 0.0}, None, "free"),
    ({"gpu_utilization_ratio": None}, None, "unknown"),
    ({"gpu_utilization_ratio": None}, [], "free"),
    ({"gpu_utilization_ratio": None}, [{"pid": 1}], "busy"),
    ({"gpu_utilization_ratio": None, "sm_active_ratio": 0.0}, [{"pid": 1}], "idle"),
    ({"gpu_utilization_ratio": 0.9}, [FOLD], "harvested"),
    ({"gpu_utilization_ratio": 0.0}, [FOLD], "harvested"),
    ({"gpu_utilization_ratio": 0.0, "harvest_state": 2}, [], "harvested"),
    ({"gpu_utilization_ratio": 0.9, "harvest_state": 3}, [{"pid": 1}], "harvested"),
    ({"gpu_utilization_ratio": 0.9, "harvest_state": 2}, [FOLD, {"pid": 2, "user": "bob"}], "busy"),
    ({"gpu_utilization_ratio": 0.0, "harvest_state": 1}, [], "free"),
    ({"gpu_utilization_ratio": 0.0, "harvest_state": 0}, [], "free"),
]
"""Readings, processes (None if unknown), and the state as the dashboard calls it."""
