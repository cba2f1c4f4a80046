"""What reports are computed from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from gpulse.store.store import Store


class Context(NamedTuple):
    """A store, and what is known about its nodes besides."""

    store: Store
    node_names: Mapping[int, str]
    """By node number; answers leave out nodes that are not among them."""
    interval_seconds: float
    """From one sample of an agent to the next."""
    deadline: float | None = None
    """Monotonic seconds; what a backend has not delivered by then is missing from the report."""

    def gpu_labels(self) -> dict[tuple[int, str], str]:
        """Return the labels of all GPUs, by node and UUID."""
        return {(gpu.node, gpu.uuid): gpu.label for gpu in self.store.gpus()}
