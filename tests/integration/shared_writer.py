"""A head that is told something all the time and shares it, until it is killed: DATA_DIR SHARED_DIR."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.unit.shared_heads import RUN, TinyHead, process


def main(data_dir: str, shared: str) -> None:
    """Go on where the one before ended."""
    head = TinyHead(Path(data_dir), Path(shared))
    node = head.node("n1") if "n1" not in head.nodes() else head.nodes()["n1"].id
    run = head.archive.runs().get(RUN)
    sequence = 0 if run is None else run.last
    print("ready", flush=True)
    while True:
        sequence += 1
        head.frame(node, sequence, {"event": f"e{sequence}"}, process(sequence))
        head.look(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
