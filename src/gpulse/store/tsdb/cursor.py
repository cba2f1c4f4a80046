"""Position of the log up to which the time-series database has everything, kept in a file beside it."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

from gpulse.store.disk import disk_errors
from gpulse.store.log.segment import read_headers

FILE = "remote.json"
_MAX_ENGINES = 16


class Place(NamedTuple):
    """A place in a log."""

    position: int = 0
    """Everything up to here need not be sent again, whatever happens to the time-series database."""
    ends: tuple[int, ...] = ()
    """Where requests ended that were sent after it: what is sent again is cut in the same places."""
    begun: int = 0
    """What comes after this was sent, up to the position; of what is before it something never was."""


def log_number(directory: str) -> str:
    """Which log it is; empty when there is none yet."""
    headers = read_headers(directory) if os.path.isdir(directory) else []
    return headers[-1].log_id.hex() if headers else ""


def read_place(data_dir: str, url: str, log: str) -> Place:
    """Where a time-series database is in a log; the beginning when that is not known."""
    entry = _read(data_dir).get(url)
    try:
        if entry is not None and entry["log"] == log:
            position, ends = int(entry["position"]), tuple(int(end) for end in entry["ends"])
            return Place(position, ends, int(entry.get("begun", position)))
    except (LookupError, TypeError, ValueError):
        pass  # somebody else wrote it: begin anew, which is harmless
    return Place()


def write_place(
    data_dir: str, url: str, log: str, position: int, ends: Sequence[int], begun: int = 0
) -> None:
    """Keep where a time-series database is.

    Raises:
        DiskError: It cannot be written.
    """
    kept = {name: entry for name, entry in _read(data_dir).items() if name != url}
    newest = dict(list(kept.items())[-(_MAX_ENGINES - 1) :])
    document = {**newest, url: {"log": log, "position": position, "ends": list(ends), "begun": begun}}
    path = f"{data_dir}/{FILE}"
    with disk_errors(f"write {path}"):
        file = os.open(f"{path}.new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        with os.fdopen(file, "w", encoding="utf-8") as text:
            json.dump(document, text)
            text.flush()
            os.fdatasync(text.fileno())
        os.replace(f"{path}.new", path)


def _read(data_dir: str) -> dict[str, Any]:
    try:
        with open(f"{data_dir}/{FILE}", encoding="utf-8") as file:
            document = json.load(file)
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}
