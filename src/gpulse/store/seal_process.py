"""The process that writes the log into Parquet files: `python -m gpulse.store.seal_process DATA_DIR`.

It reads one JSON object per line from its standard input and answers each with one. It exits as soon as its input is
closed, whatever it is doing: a directory that was not renamed does not count.
"""

from __future__ import annotations

import ctypes
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
from gpulse.store.metadata.lookup import MetadataLookup
from gpulse.store.metadata.metadata import METADATA_FILE

_PR_SET_PDEATHSIG = 1
_NICE = 19


def open_writer(data_dir: str) -> HistoryWriter:
    """Return the writer of the history in a data directory.

    Raises:
        GpulseError: The directory is damaged, or another process has the lock.
    """
    return HistoryWriter(data_dir, MetadataLookup(f"{data_dir}/{METADATA_FILE}"))


def answer(writer: HistoryWriter, request: dict[str, Any]) -> dict[str, Any]:
    """Carry out a request."""
    match request:
        case {"do": "seal", "to": int(position)}:
            return writer.seal(position)
        case {"do": "compact"}:
            return writer.compact()
        case {"do": "retain", **asked}:
            return writer.retain(**asked)
    raise GpulseError(f"the sealing process was asked for {request!r}")


def _requests() -> Iterator[str]:
    """Yield the lines of the input; the thread that reads them ends the process when the input is closed."""
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            lines.put(line)
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    while True:
        yield lines.get()


def _say(document: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(document) + "\n")
    sys.stdout.flush()


def _refusal(error: GpulseError) -> dict[str, Any]:
    kind = "disk" if isinstance(error, DiskError) else "log" if isinstance(error, LogError) else "other"
    return {"error": error.message, "hint": error.hint, "kind": kind}


def main(data_dir: str) -> int:
    """Answer requests until the input is closed."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the head, which then closes the input
    with suppress(OSError):
        os.nice(_NICE)
    try:
        return _answer_all(data_dir, _requests())
    except BrokenPipeError:
        return 0  # the head is gone


def _answer_all(data_dir: str, requests: Iterator[str]) -> int:
    try:
        writer = open_writer(data_dir)
    except GpulseError as error:
        _say(_refusal(error))
        return error.exit_code
    with closing(writer):
        _say({"ready": True, "sealed_to": writer.sealed_to, "tidied": writer.tidied})
        for line in requests:
            try:
                _say(answer(writer, json.loads(line)))
            except GpulseError as error:
                _say(_refusal(error))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
