"""Process that seals the log into Parquet files: `python -m gpulse.store.seal_process DATA_DIR`.

It reads one JSON object per line from standard input and answers each with one line. It exits as soon as its input is
closed, even in the middle of a request: a segment counts only after its directory was renamed.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import queue
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from typing import Any

from gpulse.errors import DiskError, GpulseError, LogError
from gpulse.store.history.writer import HistoryWriter
from gpulse.store.metadata.file_check import METADATA_FILE
from gpulse.store.metadata.reader import MetadataLookup

_PR_SET_PDEATHSIG = 1
_NICE = 19
_GC_THRESHOLDS = (100_000, 20, 100)
"""The frames of a segment become many objects without cycles; looking for garbage among them takes a twentieth of the time."""


def open_writer(data_dir: str) -> HistoryWriter:
    """Return the writer of the history in a data directory.

    Raises:
        GpulseError: The directory is damaged, or another process has the lock.
    """
    return HistoryWriter(data_dir, MetadataLookup(f"{data_dir}/{METADATA_FILE}"))


def handle_request(writer: HistoryWriter, request: dict[str, Any]) -> dict[str, Any]:
    """Execute one request and return the reply."""
    match request:
        case {"do": "seal", "to": int(position)}:
            return writer.seal(position)
        case {"do": "compact"}:
            return writer.compact()
        case {"do": "retain", **asked}:
            return writer.retain(**asked)
    raise GpulseError(f"unknown request to the process that writes the history: {request!r}")


def _read_requests() -> Iterator[str]:
    """Yield the lines of standard input; the reading thread exits the process when the input is closed."""
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            lines.put(line)
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    while True:
        yield lines.get()


def _send_reply(document: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(document) + "\n")
    sys.stdout.flush()


def _error_reply(error: GpulseError) -> dict[str, Any]:
    kind = "disk" if isinstance(error, DiskError) else "log" if isinstance(error, LogError) else "other"
    return {"error": error.message, "hint": error.hint, "kind": kind}


def main(data_dir: str) -> int:
    """Answer requests until the input is closed."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the head handles Ctrl-C and closes the input
    with suppress(OSError):
        os.nice(_NICE)
    gc.set_threshold(*_GC_THRESHOLDS)
    try:
        return _handle_requests(data_dir, _read_requests())
    except BrokenPipeError:
        return 0  # the head has exited


def _handle_requests(data_dir: str, requests: Iterator[str]) -> int:
    try:
        writer = open_writer(data_dir)
    except GpulseError as error:
        _send_reply(_error_reply(error))
        return error.exit_code
    with closing(writer):
        _send_reply({"ready": True, "sealed_to": writer.sealed_to, "tidied": writer.tidied})
        for line in requests:
            try:
                _send_reply(handle_request(writer, json.loads(line)))
            except GpulseError as error:
                _send_reply(_error_reply(error))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
