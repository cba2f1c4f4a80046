"""The numbers of a session file: how they are called, what they are made of, how finely they are written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from gpulse.model.session import Session

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Array = NDArray[np.float64]

BYTES = 1e9
"""Bandwidths are written in 10⁹ bytes a second."""


class Quantity(NamedTuple):
    """One array of every frame."""

    name: str
    digits: int
    is_percent: bool
    title: str


UTIL = Quantity("gpu_util", 2, is_percent=True, title="Utilization")
MEMORY = Quantity("gpu_memory", 2, is_percent=True, title="Memory")
DRAM = Quantity("dram_bandwidth", 4, is_percent=False, title="PCIe")
DRAM_RX = Quantity("dram_bandwidth_rx", 4, is_percent=False, title="PCIe to the GPU")
DRAM_TX = Quantity("dram_bandwidth_tx", 4, is_percent=False, title="PCIe from the GPU")
NVLINK = Quantity("gpu_bandwidth", 4, is_percent=False, title="NVLink")
QUANTITIES = (UTIL, MEMORY, DRAM, DRAM_RX, DRAM_TX, NVLINK)

_PCIE = ("pcie_rx_bytes_per_second", "pcie_tx_bytes_per_second")
_NVLINK = ("nvlink_rx_bytes_per_second", "nvlink_tx_bytes_per_second")
ENERGY, POWER = "energy_joules_total", "power_watts"


def of_session(session: Session) -> tuple[Quantity, ...]:
    """What the frames of a session have."""
    return (
        UTIL,
        MEMORY,
        *((DRAM, DRAM_RX, DRAM_TX) if session.bandwidth else ()),
        *((NVLINK,) if session.nvlink else ()),
    )


def metrics(session: Session) -> list[str]:
    """What has to be read for that."""
    return [
        "gpu_utilization_ratio",
        "memory_used_bytes",
        "memory_total_bytes",
        POWER,
        ENERGY,
        *(_PCIE if session.bandwidth else ()),
        *(_NVLINK if session.nvlink else ()),
    ]


def from_samples(session: Session, values: Mapping[str, Array], known_total: Array) -> dict[str, Array]:
    """The quantities of samples.

    Args:
        session: Says which are wanted.
        values: The samples' metrics.
        known_total: For each sample the memory of its board, for sources that say it only once.
    """
    import numpy as np  # noqa: PLC0415  not needed to know the names

    total = np.where(np.isnan(values["memory_total_bytes"]), known_total, values["memory_total_bytes"])
    with np.errstate(divide="ignore", invalid="ignore"):
        memory = np.where(total > 0, 100 * values["memory_used_bytes"] / total, np.nan)
    found = {UTIL.name: 100 * values["gpu_utilization_ratio"], MEMORY.name: memory}
    if session.bandwidth:
        rx, tx = (values[name] / BYTES for name in _PCIE)
        found |= {DRAM.name: rx + tx, DRAM_RX.name: rx, DRAM_TX.name: tx}
    if session.nvlink:
        found[NVLINK.name] = (values[_NVLINK[0]] + values[_NVLINK[1]]) / BYTES
    return {
        quantity.name: np.round(found[quantity.name], quantity.digits) for quantity in of_session(session)
    }
