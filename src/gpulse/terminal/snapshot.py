"""One look as text: GPUs, and on request host, processes, disks, network and findings."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import NamedTuple

from gpulse.model.frame import Frame
from gpulse.model.snapshot import Snapshot
from gpulse.terminal import format as f
from gpulse.terminal.details import detail_lines
from gpulse.terminal.gpus import gpu_lines, no_gpu_lines
from gpulse.terminal.machine import disk_lines, host_lines, network_lines
from gpulse.terminal.notes import finding_lines, health_lines, urgent_lines
from gpulse.terminal.processes import process_lines
from gpulse.terminal.table import Paint, cut


class Parts(NamedTuple):
    """Which parts of a look are wanted."""

    cpu: bool = False
    disk: bool = False
    network: bool = False
    findings: bool = False
    verbose: bool = False


def snapshot_lines(snapshot: Snapshot, parts: Parts, width: int, paint: Paint) -> Iterator[str]:
    """The look, line by line, its parts apart from each other."""
    yield paint("dim", cut(_header(snapshot.frame, width), width))
    for number, part in enumerate(_parts(snapshot, parts, width, paint)):
        lines = list(part)
        if number and lines:
            yield ""
        yield from lines
    if snapshot.rates.interval_seconds and (parts.cpu or parts.disk or parts.network):
        yield paint("dim", f"Rates over {snapshot.rates.interval_seconds:.2f} s.")


def _parts(snapshot: Snapshot, parts: Parts, width: int, paint: Paint) -> Iterator[Iterator[str] | list[str]]:
    frame, verbose = snapshot.frame, parts.verbose
    yield gpu_lines(frame, width, paint) if frame.gpus else no_gpu_lines(frame, width, paint)
    if verbose:
        yield list(detail_lines(snapshot, width, paint))[1:]
    if parts.cpu or not frame.gpus:
        yield host_lines(snapshot, width, paint, verbose=verbose)
    if parts.cpu and frame.gpus:
        yield process_lines(snapshot, width, paint, verbose=verbose)
    if parts.disk:
        yield disk_lines(snapshot, width, paint, verbose=verbose)
    if parts.network:
        yield network_lines(snapshot, width, paint, verbose=verbose)
    yield (finding_lines if parts.findings else urgent_lines)(snapshot, width, paint)
    yield health_lines(snapshot, width, paint, verbose=verbose)


def _header(frame: Frame, width: int) -> str:
    node = frame.node
    words = [f.plain(node.name), _stamp(frame.time)]
    if node.driver:
        words.append(f"driver {f.plain(node.driver)}")
    if node.cuda:
        words.append(f"CUDA {f.plain(node.cuda)}")
    while len("  ".join(words)) > width and len(words) > 2:
        words.pop()
    return "  ".join(words)


def _stamp(moment: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment))
    except (OverflowError, ValueError, OSError):  # a damaged recording can claim any time
        return "at an unknown time"
