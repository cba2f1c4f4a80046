"""How a head and its agents are set up."""

from __future__ import annotations

from typing import Any

from gpulse.cluster import wire_pb2 as pb


class Settings:
    """How agents are to sample, changed while the head runs."""

    def __init__(self, *, interval_ms: int, bandwidth: bool, nvlink: bool) -> None:
        self.interval_ms = interval_ms
        self.bandwidth = bandwidth
        self.nvlink = nvlink

    def __str__(self) -> str:
        extras = [name for name in ("bandwidth", "nvlink") if getattr(self, name)]
        return ", ".join([f"every {self.interval_ms} ms", *extras])

    @property
    def interval_seconds(self) -> float:
        """From one frame to the next."""
        return self.interval_ms / 1000

    def changed(self, *, interval_ms: int | None, bandwidth: bool | None, nvlink: bool | None) -> Settings:
        """These with what is given."""
        return Settings(
            interval_ms=self.interval_ms if interval_ms is None else interval_ms,
            bandwidth=self.bandwidth if bandwidth is None else bandwidth,
            nvlink=self.nvlink if nvlink is None else nvlink,
        )

    def take(self, other: Settings) -> None:
        """Be as the other ones from now on."""
        self.interval_ms, self.bandwidth, self.nvlink = other.interval_ms, other.bandwidth, other.nvlink

    def to_dict(self) -> dict[str, Any]:
        """As JSON spells them."""
        return {"interval_ms": self.interval_ms, "bandwidth": self.bandwidth, "nvlink": self.nvlink}

    def to_wire(self) -> pb.Settings:
        """As agents are told."""
        return pb.Settings(interval_ms=self.interval_ms, bandwidth=self.bandwidth, nvlink=self.nvlink)
