"""Files with the addresses of a running head, for commands on the same machine."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from gpulse.atomic_files import replace_file

ADDRESS_FILE = "head.json"
"""File in the data directory while a head runs."""


def read_address_file(directory: str) -> dict[str, Any] | None:
    """Return the address document of the head that uses a data directory on this machine; None if none runs."""
    try:
        with open(f"{directory}/{ADDRESS_FILE}", encoding="utf-8") as file:
            document: dict[str, Any] = dict(json.load(file))
    except (OSError, ValueError, TypeError):
        return None
    pid = document.get("pid")
    return document if isinstance(pid, int) and _is_alive(pid) else None


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True  # another user's process
    except (OSError, OverflowError):
        return False
    return True


class AddressFile:
    """The address files of one head; a file that another head has written since is left alone."""

    def __init__(self, paths: Sequence[str]) -> None:
        self._paths = tuple(dict.fromkeys(paths))

    def write(self, document: dict[str, Any]) -> None:
        """Write the addresses of this head; errors are ignored, because the files are only a convenience."""
        for path in self._paths:
            with suppress(OSError):
                os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
                text = json.dumps({"pid": os.getpid(), **document})
                replace_file(path, text.encode(), 0o600, durable=False)

    def remove(self) -> None:
        """Remove the files of this head."""
        for path in self._paths:
            with suppress(OSError, ValueError):
                with open(path, encoding="utf-8") as file:
                    document = json.load(file)
                if isinstance(document, dict) and document.get("pid") == os.getpid():
                    os.unlink(path)
