"""Batches for the history's tests: a few nodes with made-up numbers that say where they belong."""

from __future__ import annotations

from pathlib import Path

from gpulse.model.packed_columns import BlockPacker, ColumnLayout, PackedFrame, SubjectValues, layout_id
from gpulse.store.log.log import Log
from gpulse.store.log.record_payloads import BATCH, FACT, FrameBatch, encode_fact

BEGIN = 1_700_000_040
"""Epoch seconds; the beginning of a minute."""
GPUS = 2


def run_of(node: int, start: int = 1) -> bytes:
    """The run of a node."""
    return bytes([0, node, start]) + b"\xff" * 13


def power(node: int, gpu: int, second: int) -> float:
    """What a GPU draws at a second."""
    return 100.0 * node + gpu + second / 1000


class Fleet:
    """Makes batches of one frame a second, and knows the layouts they refer to."""

    def __init__(self) -> None:
        self.layouts: dict[int, ColumnLayout] = {}
        self.texts: dict[int, bytes] = {}
        self._gpu = BlockPacker("gpu")
        self._host = BlockPacker("host")

    def batch(self, node: int, second: int, count: int = 1, *, shift: int = 0) -> FrameBatch:
        """The frames of some seconds; sequence numbers are seconds + 1."""
        frames = []
        for now in range(second, second + count):
            subjects = [
                {"uuid": f"GPU-{node}-{gpu}", "index": gpu, "name": "NVIDIA H200"} for gpu in range(GPUS)
            ]
            rows: list[SubjectValues] = [
                (
                    {
                        "power_watts": power(node, gpu, now),
                        "energy_joules_total": 1e6 + now,
                        "memory_used_bytes": now << 20,
                        "sm_clock_hertz": 1_980_000_000,
                        "pcie_rx_bytes_per_second": 1024.0 * now,
                        **({"sm_active_ratio": 0.5} if now % 2 else {}),
                    },
                    {},
                )
                for gpu in range(GPUS)
            ]
            blocks = []
            for packer, block in (
                (self._gpu, self._gpu.pack(subjects, rows)[0]),
                (self._host, self._host.pack([{}], [({"cpu_utilization_ratio": now % 100 / 100}, {})])[0]),
            ):
                self.layouts[block.layout] = packer.layout
                self.texts[block.layout] = packer.text
                assert block.layout == layout_id(packer.text)
                blocks.append(block)
            frames.append(PackedFrame((BEGIN + now) * 1_000_000, now, tuple(blocks)).to_bytes())
        received = (BEGIN + second + count) * 1_000_000
        return FrameBatch(run_of(node), node, second + 1, count, received, shift, b"".join(frames))

    def facts(self, nodes: range) -> list[bytes]:
        """What a head writes to its log before the first batch."""
        facts = [encode_fact("node", id=node, name=f"host-{node}") for node in nodes]
        return facts + [
            encode_fact("layout", id=str(number), text=text.decode()) for number, text in self.texts.items()
        ]


def write_log(directory: Path, fleet: Fleet, nodes: range, seconds: range, *, frames: int = 10) -> int:
    """Append some seconds of some nodes to a head's log, with all facts before; gives the last position."""
    batches = [
        fleet.batch(node, second, min(frames, seconds.stop - second))
        for second in seconds[::frames]
        for node in nodes
    ]
    with Log(directory / "log") as log:
        log.append_many([(FACT, fact) for fact in fleet.facts(nodes)])
        log.append_many([(BATCH, batch.to_bytes()) for batch in batches])
        log.sync()
        return log.last
