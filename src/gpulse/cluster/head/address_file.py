"""Files that say where a head listens, for commands on the same machine."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

ADDRESS_FILE = "head.json"
"""In the data directory, while a head runs."""


def read_whereabouts(directory: str) -> dict[str, Any] | None:
    """What the head says that works in a data directory on this machine; None when none does."""
    try:
        with open(f"{directory}/{ADDRESS_FILE}", encoding="utf-8") as file:
            document: dict[str, Any] = dict(json.load(file))
    except (OSError, ValueError, TypeError):
        return None
    pid = document.get("pid")
    return document if isinstance(pid, int) and _lives(pid) else None


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True  # it is somebody else's
    except (OSError, OverflowError):
        return False
    return True


class AddressFile:
    """The files of one head; a file that another head has written since is left alone."""

    def __init__(self, paths: Sequence[str]) -> None:
        self._paths = tuple(dict.fromkeys(paths))

    def write(self, document: dict[str, Any]) -> None:
        """Say where this head is. What cannot be written is left out: it is a courtesy."""
        for path in self._paths:
            with suppress(OSError):
                os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
                draft = f"{path}.{os.getpid()}"
                flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
                with os.fdopen(os.open(draft, flags, 0o600), "w", encoding="utf-8") as file:
                    json.dump({"pid": os.getpid(), **document}, file)
                os.replace(draft, path)

    def remove(self) -> None:
        """This head is no more."""
        for path in self._paths:
            with suppress(OSError, ValueError):
                with open(path, encoding="utf-8") as file:
                    document = json.load(file)
                if isinstance(document, dict) and document.get("pid") == os.getpid():
                    os.unlink(path)
